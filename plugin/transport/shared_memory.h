// Memory that processes of one host share, without a name: nothing of it is left, whatever happens
// to the processes. One makes it and hands out a ticket, others open it with that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"

namespace scape::plugin {

// What another process of the host needs. Plain bytes.
struct MemoryTicket {
  int64_t process = 0;
  uint64_t secret = 0;  // proves that what was opened is what was meant
  int32_t descriptor = -1;
  int32_t reserved = 0;
};

class SharedMemory {
 public:
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // Makes `bytes` of zeros, none of which exists until it is used or reserved. SYSTEM where the
  // system does not have such memory.
  static Status create(size_t bytes, std::unique_ptr<SharedMemory>* out);
  // Opens `bytes` of what another process of this host, or this one, has made. SYSTEM when it
  // cannot be reached, as between containers or users.
  static Status open(const MemoryTicket& ticket, size_t bytes, std::unique_ptr<SharedMemory>* out);

  // Takes the first `bytes` from the system now, so that no later use of them can fail. MEMORY
  // names how many there should be.
  Status reserve(size_t bytes);

  // Of the maker: the ticket holds until retire(), which everybody has to have opened it before.
  const MemoryTicket& ticket() const { return ticket_; }
  void retire();

  std::byte* data() const { return data_; }

 private:
  SharedMemory() = default;
  Status map(size_t bytes);

  MemoryTicket ticket_;
  int descriptor_ = -1;
  std::byte* data_ = nullptr;  // behind a page of its own
  size_t mapped_ = 0;
};

}  // namespace scape::plugin
