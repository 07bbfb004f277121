#include "interposer/mode.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "base/log.h"
#include "base/settings.h"
#include "interposer/device_mode.h"
#include "interposer/host_mode.h"
#include "interposer/process.h"

namespace scape::interposer {

using namespace nccl;  // the rows of nccl/function_list.h name NCCL's types

constinit std::atomic<const Functions*> functions_in_force{nullptr};

namespace {

constinit std::atomic<Mode> settled{Mode::kUnsettled};
constinit std::mutex settling;
// A library that settling brings in may call NCCL from its constructors, on this very thread.
constinit thread_local bool settling_here = false;

struct Outcome {
  RealNccl real;
  Status failure;
};
Outcome& outcome() {
  static Outcome* const instance = new Outcome;  // never destroyed: used until the last moment
  return *instance;
}

// CUDA_VISIBLE_DEVICES hides every GPU when it is empty or begins with an invalid index.
bool gpus_hidden() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  return visible != nullptr && (*visible == '\0' || std::strncmp(visible, "-1", 2) == 0);
}

bool gpu_usable() {
  if (gpus_hidden()) return false;
  if (::access("/dev/nvidiactl", R_OK | W_OK) == 0) return true;
  // Where the driver has no such file (WSL), only the driver itself can tell.
  if (::access("/dev/dxg", F_OK) != 0) return false;
  void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return false;
  using Init = int (*)(unsigned);
  using GetCount = int (*)(int*);
  const auto init = reinterpret_cast<Init>(::dlsym(driver, "cuInit"));
  const auto get_count = reinterpret_cast<GetCount>(::dlsym(driver, "cuDeviceGetCount"));
  int count = 0;
  return init != nullptr && get_count != nullptr && init(0) == 0 && get_count(&count) == 0 &&
         count > 0;
}

enum class Wish { kAuto = 0, kHost = 1, kDevice = 2 };  // numbered as SCAPE_MODE's choices

Mode choose(const void* caller) {
  Outcome& result = outcome();
  if (Status status = begin_use(); !status.ok()) {
    result.failure = status;
    return Mode::kFailed;
  }
  const Wish wish = static_cast<Wish>(settings().mode);
  if (wish == Wish::kHost || (wish == Wish::kAuto && !gpu_usable())) return Mode::kHost;
  const Status found = find_real_nccl(caller, Search::kAnywhere, &result.real);
  if (found.ok()) return Mode::kDevice;
  if (wish == Wish::kAuto && settings().nccl_lib.empty()) {
    SCAPE_WARN("a GPU is usable but NCCL calls are served on host memory: %s",
               found.message().c_str());
    return Mode::kHost;
  }
  result.failure = error(SCAPE_ERR_SYSTEM, "device mode: %s", found.message().c_str());
  SCAPE_ERROR("%s", result.failure.message().c_str());
  return Mode::kFailed;
}

// Why a function of refusing_functions() refuses.
void explain_refusal(const char* name) {
  if (settling_here) {
    set_last_error(
        format("%s was called from inside the search for the real NCCL; call it later", name)
            .c_str());
    return;
  }
  switch (mode()) {
    case Mode::kHost:
      set_last_error(format("%s needs a GPU and is not part of host mode", name).c_str());
      break;
    case Mode::kDevice:
      set_last_error(
          format("%s is not in the real NCCL in use, %s", name, real_nccl().path.c_str()).c_str());
      break;
    default:
      set_last_error(outcome().failure.message().c_str());
  }
}

template <typename Type>
Type refusal(const char* name) {
  (void)guarded(name, [&]() -> Status {
    explain_refusal(name);
    return {};
  });
  if constexpr (std::is_same_v<Type, ncclResult_t>) {
    if (mode() == Mode::kFailed && !settling_here) return to_nccl(outcome().failure.code());
    return ncclInvalidUsage;
  } else if constexpr (std::is_same_v<Type, const char*>) {
    return last_error();
  } else if constexpr (!std::is_void_v<Type>) {
    return Type{};
  }
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
constexpr Functions kRefusing = {
#define SCAPE_NCCL_FUNCTION(type, name, params, args) \
  .name = [] params -> type { return refusal<type>("nccl" #name); },
#include "nccl/function_list.h"
};
#pragma GCC diagnostic pop

}  // namespace

const Functions& refusing_functions() { return kRefusing; }

const char* name_of(Mode mode) {
  switch (mode) {
    case Mode::kHost:
      return "host";
    case Mode::kDevice:
      return "device";
    case Mode::kFailed:
      return "failed";
    default:
      return "unsettled";
  }
}

Mode mode() { return settled.load(std::memory_order_acquire); }

const RealNccl& real_nccl() { return outcome().real; }

const Functions& settle_mode(const void* caller) {
  if (settling_here) return kRefusing;
  const std::lock_guard lock(settling);
  if (const Functions* table = functions_in_force.load(std::memory_order_acquire)) return *table;
  settling_here = true;
  Mode chosen = Mode::kFailed;
  const scape_status status = guarded("settling the mode", [&]() -> Status {
    chosen = choose(caller);
    return {};
  });
  settling_here = false;
  if (status != SCAPE_OK) outcome().failure = Status(status, last_error());
  const Functions* table = chosen == Mode::kHost     ? &host_functions()
                           : chosen == Mode::kDevice ? &device_functions(outcome().real)
                                                     : &kRefusing;
  settled.store(chosen, std::memory_order_release);
  functions_in_force.store(table, std::memory_order_release);
  if (chosen == Mode::kDevice) {
    SCAPE_INFO("device mode: NCCL calls go to %s", outcome().real.path.c_str());
  } else if (chosen == Mode::kHost) {
    SCAPE_INFO("host mode: NCCL calls are served on host memory");
  }
  return *table;
}

ncclResult_t get_version(int* version, const void* caller) {
  if (version == nullptr) {
    set_last_error("ncclGetVersion: version is null; pass the address of an int");
    return ncclInvalidArgument;
  }
  *version = 0;
  const scape_status status = guarded("ncclGetVersion", [&]() -> Status {
    if (mode() == Mode::kDevice) {
      *version = version_of(real_nccl());
    } else if (!settling_here) {
      RealNccl real;
      if (find_real_nccl(caller, Search::kInProcess, &real).ok()) *version = version_of(real);
    }
    return {};
  });
  if (*version == 0) *version = kVersionCode;
  return to_nccl(status);
}

const char* get_error_string(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    case ncclTimeout:
      return "time-out waiting for peers";
    default:
      return "unknown result code";
  }
}

const char* get_last_error(ncclComm_t comm) {
  switch (mode()) {
    case Mode::kHost:
      return host_last_error(comm);
    case Mode::kDevice:
      if (*last_error() == '\0' && real_nccl().handle != nullptr) return device_last_error(comm);
      return last_error();
    default:
      return last_error();
  }
}

}  // namespace scape::interposer
