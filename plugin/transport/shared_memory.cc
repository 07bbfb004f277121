#include "plugin/transport/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <string_view>

#include "base/large_pages.h"
#include "plugin/transport/bootstrap.h"

namespace scape::plugin {
namespace {

// The first page holds the secret.
constexpr size_t kPage = 4096;

// The first number behind `label` in a file of the system; `otherwise` where there is none.
uint64_t number_in(const char* path, std::string_view label, uint64_t otherwise) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, label.size(), label) != 0) continue;
    char* end = nullptr;
    const char* const begin = line.c_str() + label.size();
    const uint64_t number = std::strtoull(begin, &end, 10);
    return end == begin ? otherwise : number;
  }
  return otherwise;
}

// What can be taken without driving the machine, or the container, out of memory.
uint64_t available_bytes() {
  const uint64_t machine = number_in("/proc/meminfo", "MemAvailable:", UINT64_MAX >> 10) << 10;
  const uint64_t limit = number_in("/sys/fs/cgroup/memory.max", "", UINT64_MAX);
  const uint64_t used = number_in("/sys/fs/cgroup/memory.current", "", 0);
  return std::min(machine, limit - std::min(limit, used));
}

}  // namespace

SharedMemory::~SharedMemory() {
  retire();
  if (mapped_ > 0) ::munmap(data_ - kPage, mapped_);
}

void SharedMemory::retire() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

Status SharedMemory::map(size_t bytes) {
  void* const memory =
      ::mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  if (memory == MAP_FAILED) {
    return error(SCAPE_ERR_SYSTEM, "shared memory: mapping %zu bytes: %s", bytes,
                 std::strerror(errno));
  }
  mapped_ = bytes + kPage;
  data_ = static_cast<std::byte*>(memory) + kPage;
  wish_large_pages(memory, mapped_);
  return Status::Ok();
}

Status SharedMemory::create(size_t bytes, std::unique_ptr<SharedMemory>* out) {
  std::unique_ptr<SharedMemory> memory(new SharedMemory);
  SCAPE_RETURN_IF_ERROR(random_cookie(&memory->ticket_.secret));
  // Beyond it the system would end the process instead of refusing.
  rlimit largest{};
  if (::getrlimit(RLIMIT_FSIZE, &largest) == 0 && largest.rlim_cur < bytes + kPage) {
    return error(SCAPE_ERR_SYSTEM,
                 "shared memory: %zu bytes are more than the process may give a file (%llu); raise "
                 "that limit (ulimit -f), or set SCAPE_SHARED_MEMORY=0",
                 bytes, static_cast<unsigned long long>(largest.rlim_cur));
  }
  memory->descriptor_ = ::memfd_create("scape", MFD_CLOEXEC);
  if (memory->descriptor_ < 0 || ::fchmod(memory->descriptor_, 0600) != 0 ||
      ::ftruncate(memory->descriptor_, static_cast<off_t>(bytes + kPage)) != 0) {
    return error(SCAPE_ERR_SYSTEM, "shared memory: making %zu bytes: %s", bytes,
                 std::strerror(errno));
  }
  SCAPE_RETURN_IF_ERROR(memory->map(bytes));
  SCAPE_RETURN_IF_ERROR(memory->reserve(0));
  std::memcpy(memory->data_ - kPage, &memory->ticket_.secret, sizeof memory->ticket_.secret);
  memory->ticket_.process = ::getpid();
  memory->ticket_.descriptor = memory->descriptor_;
  *out = std::move(memory);
  return Status::Ok();
}

Status SharedMemory::open(const MemoryTicket& ticket, size_t bytes,
                          std::unique_ptr<SharedMemory>* out) {
  std::unique_ptr<SharedMemory> memory(new SharedMemory);
  const std::string path = format("/proc/%lld/fd/%d", static_cast<long long>(ticket.process),
                                  static_cast<int>(ticket.descriptor));
  // Whatever has that name on another host must not be waited for, nor read beyond its end.
  memory->descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  struct stat found {};
  if (memory->descriptor_ < 0 || ::fstat(memory->descriptor_, &found) != 0) {
    return error(SCAPE_ERR_SYSTEM, "shared memory: %s: %s", path.c_str(), std::strerror(errno));
  }
  const Status stranger =
      error(SCAPE_ERR_SYSTEM, "shared memory: %s is not what its maker sent", path.c_str());
  if (!S_ISREG(found.st_mode) || found.st_size < static_cast<off_t>(bytes + kPage)) return stranger;
  SCAPE_RETURN_IF_ERROR(memory->map(bytes));
  memory->retire();
  if (std::memcmp(memory->data_ - kPage, &ticket.secret, sizeof ticket.secret) != 0)
    return stranger;
  *out = std::move(memory);
  return Status::Ok();
}

Status SharedMemory::reserve(size_t bytes) {
  // The system would rather kill a process than refuse: see first.
  const uint64_t available = available_bytes();
  int problem = bytes > available ? ENOMEM : 0;
  while (problem == 0 && ::fallocate(descriptor_, 0, 0, static_cast<off_t>(bytes + kPage)) != 0) {
    if (errno != EINTR) problem = errno;
  }
  if (problem == 0) return Status::Ok();
  return error(SCAPE_ERR_MEMORY,
               "shared memory: %zu bytes are needed and cannot be had: %s (%llu are available); "
               "free or allow that many, or set SCAPE_SHARED_MEMORY=0",
               bytes, std::strerror(problem), static_cast<unsigned long long>(available));
}

}  // namespace scape::plugin
