#include "perf/common/nccl_library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdlib.h>
#include <unistd.h>

namespace scape::perf {
namespace {

template <typename Function>
bool find(void* handle, const char* name, Function* out) {
  *out = reinterpret_cast<Function>(dlsym(handle, name));
  return *out != nullptr;
}

}  // namespace

std::string library_beside_program(const std::string& name) {
  char program[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
  if (length <= 0) return name;
  const std::string path(program, static_cast<size_t>(length));
  return path.substr(0, path.rfind('/')) + "/../lib/" + name;
}

Status load_nccl(const std::string& path, NcclLibrary* out) {
  // The programs' buffers are host memory whatever the machine has.
  setenv("SCAPE_MODE", "host", 0);
  void* handle = RTLD_DEFAULT;
  if (!path.empty() || dlsym(RTLD_DEFAULT, "ncclGetVersion") == nullptr) {
    const std::string file = path.empty() ? library_beside_program("libscape_nccl.so") : path;
    handle = dlopen(file.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr) {
      return error(
          SCAPE_ERR_SYSTEM,
          "no NCCL to measure: %s; build the target scape_nccl, preload an NCCL library, or "
          "name one with --nccl-lib",
          dlerror());
    }
  }

  const char* missing = nullptr;
  auto require = [&](const char* name, auto* function) {
    if (!find(handle, name, function) && missing == nullptr) missing = name;
  };
  require("ncclGetVersion", &out->get_version);
  require("ncclGetErrorString", &out->get_error_string);
  require("ncclGetUniqueId", &out->get_unique_id);
  require("ncclCommInitRank", &out->comm_init_rank);
  require("ncclCommDestroy", &out->comm_destroy);
  require("ncclGroupStart", &out->group_start);
  require("ncclGroupEnd", &out->group_end);
  require("ncclRedOpCreatePreMulSum", &out->red_op_create_premul_sum);
  require("ncclRedOpDestroy", &out->red_op_destroy);
  require("ncclAllReduce", &out->all_reduce);
  require("ncclReduceScatter", &out->reduce_scatter);
  require("ncclAllGather", &out->all_gather);
  require("ncclBroadcast", &out->broadcast);

  Dl_info info{};
  if (out->get_version != nullptr &&
      dladdr(reinterpret_cast<void*>(out->get_version), &info) != 0 && info.dli_fname != nullptr) {
    char real[PATH_MAX];
    out->path = realpath(info.dli_fname, real) != nullptr ? real : info.dli_fname;
  }
  if (missing != nullptr) {
    return error(SCAPE_ERR_NOT_FOUND, "%s lacks %s; name a complete NCCL with --nccl-lib",
                 out->path.empty() ? "the library" : out->path.c_str(), missing);
  }

  find(handle, "ncclGetLastError", &out->get_last_error);
  find(handle, "scape_config_init", &out->config_init);
  find(handle, "scape_register", &out->register_buffer);
  find(handle, "scape_unregister", &out->unregister_buffer);
  find(handle, "scape_adams_step", &out->adams_step);
  find(handle, "scape_flush", &out->flush);
  find(handle, "scape_read_mask", &out->read_mask);
  find(handle, "scape_read_residual", &out->read_residual);
  find(handle, "scape_read_moment", &out->read_moment);
  find(handle, "scape_get_stats", &out->get_stats);
  find(handle, "scape_last_error", &out->last_error);
  if (const NcclResult result = out->get_version(&out->version); result != 0) {
    return nccl_error(*out, result, "ncclGetVersion", nullptr);
  }
  return Status::Ok();
}

Status nccl_error(const NcclLibrary& nccl, NcclResult result, const char* call, NcclComm comm) {
  const char* detail = nccl.get_last_error != nullptr ? nccl.get_last_error(comm) : nullptr;
  return error(SCAPE_ERR_SYSTEM, "%s: %s (%d)%s%s", call, nccl.get_error_string(result), result,
               detail != nullptr && *detail != '\0' ? ": " : "", detail != nullptr ? detail : "");
}

}  // namespace scape::perf
