#include "interposer/process.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <string_view>

#include "base/log.h"
#include "base/settings.h"

namespace scape::interposer {
namespace {

// Plain bytes, because a std::string of the main thread would be gone when static destructors run.
constinit thread_local char last_error_text[1024] = "";

constinit std::atomic<pid_t> owner{0};
// Where the owner finds 1, and children of it that have memory of their own find 0. Null while
// there is no owner.
constinit std::atomic<std::atomic<uint32_t>*> owner_mark{nullptr};
constinit std::atomic<bool> caller_knows_timeout{false};
constinit std::atomic<bool> first_use_over{false};

std::string_view file_name(std::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == std::string_view::npos ? path : path.substr(slash + 1);
}

void first_use() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (const std::string& warning : settings_warnings()) SCAPE_WARN("%s", warning.c_str());
    if (!settings_status().ok()) SCAPE_ERROR("%s", settings_status().message().c_str());
    if (settings().unset_preload) {
      if (const char* value = std::getenv("LD_PRELOAD")) {
        const std::string rest = without_preload(value, own_object().path);
        if (rest.empty()) {
          ::unsetenv("LD_PRELOAD");
        } else {
          ::setenv("LD_PRELOAD", rest.c_str(), 1);
        }
      }
    }
    first_use_over.store(true, std::memory_order_release);
  });
}

}  // namespace

Status begin_use() {
  if (!first_use_over.load(std::memory_order_acquire)) first_use();
  return settings_status();
}

void set_last_error(const char* message) {
  std::snprintf(last_error_text, sizeof last_error_text, "%s", message);
}

const char* last_error() { return last_error_text; }

void claim_process() {
  pid_t nobody = 0;
  if (!owner.compare_exchange_strong(nobody, ::getpid(), std::memory_order_relaxed)) return;
  // The kernel itself wipes such a page in a child, however that was made. Kernels that cannot do
  // so leave it to the handler, which fork() runs and _Fork() and a bare clone() do not.
  constexpr size_t kPage = 4096;
  static std::atomic<uint32_t> handled_only;
  std::atomic<uint32_t>* mark = &handled_only;
  void* page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page != MAP_FAILED) {
    ::madvise(page, kPage, MADV_WIPEONFORK);
    mark = new (page) std::atomic<uint32_t>;
  }
  mark->store(1, std::memory_order_relaxed);
  owner_mark.store(mark, std::memory_order_release);
  ::pthread_atfork(nullptr, nullptr, [] { owner_mark.load()->store(0); });
}

Status check_process() {
  // Every hooked call asks: two loads cost nothing beside the system call that getpid() is.
  const std::atomic<uint32_t>* mark = owner_mark.load(std::memory_order_acquire);
  if (mark == nullptr || mark->load(std::memory_order_relaxed) != 0) return {};
  const pid_t claimed = owner.load(std::memory_order_relaxed);
  return error(
      SCAPE_ERR_USAGE,
      "process %d was forked from process %d, which has communicators or registrations open: "
      "they cannot be used here; start a new program (exec) instead",
      static_cast<int>(::getpid()), static_cast<int>(claimed));
}

std::string without_preload(const std::string& value, const std::string& library) {
  std::string rest;
  size_t position = 0;
  std::string separator;
  while (position < value.size()) {
    const size_t end = std::min(value.find_first_of(": ", position), value.size());
    const std::string_view entry = std::string_view(value).substr(position, end - position);
    const bool ours =
        !entry.empty() && (entry == library || file_name(entry) == file_name(library));
    if (!entry.empty() && !ours) {
      rest += rest.empty() ? "" : separator;
      rest += entry;
      separator.clear();
    }
    if (end < value.size()) separator = value[end];
    position = end + 1;
  }
  return rest;
}

LoadedObject object_of(const void* address) {
  Dl_info info{};
  if (::dladdr(address, &info) == 0) return {};
  return {info.dli_fname != nullptr ? info.dli_fname : "", info.dli_fbase};
}

const LoadedObject& own_object() {
  static const LoadedObject* const own =
      new LoadedObject(object_of(reinterpret_cast<const void*>(&own_object)));
  return *own;
}

nccl::ncclResult_t to_nccl(scape_status code) {
  switch (code) {
    case SCAPE_OK:
      return nccl::ncclSuccess;
    case SCAPE_ERR_ARGUMENT:
    case SCAPE_ERR_NOT_FOUND:
    case SCAPE_ERR_DATA:
      return nccl::ncclInvalidArgument;
    case SCAPE_ERR_USAGE:
    case SCAPE_ERR_MISMATCH:
    case SCAPE_ERR_INACTIVE:
      return nccl::ncclInvalidUsage;
    case SCAPE_ERR_MEMORY:
    case SCAPE_ERR_SYSTEM:
      return nccl::ncclSystemError;
    case SCAPE_ERR_REMOTE:
      return nccl::ncclRemoteError;
    case SCAPE_ERR_TIMEOUT:
      return caller_knows_timeout.load(std::memory_order_relaxed) ? nccl::ncclTimeout
                                                                  : nccl::ncclRemoteError;
    case SCAPE_ERR_INTERNAL:
      break;
  }
  return nccl::ncclInternalError;
}

void note_caller_version(unsigned version) {
  if (version >= 23200) caller_knows_timeout.store(true, std::memory_order_relaxed);
}

void report(const char* name, const Status& status) {
  set_last_error(status.message().c_str());
  SCAPE_WARN("%s: %s", name, status.message().c_str());
}

}  // namespace scape::interposer
