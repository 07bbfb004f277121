// Saved state: what scape_save_state() writes and scape_load_state() takes.
//
// A container holds one record per buffer: what identifies it (name, offset, count), the rank and
// size of its communicator, its bytes as the masked buffer gave them, and a checksum over all of
// that. A header holds magic, version and lengths, with a checksum of its own. Numbers are
// little-endian.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace scape::interposer {

struct Buffer;

// The state of one buffer, apart from where it lives.
struct SavedBuffer {
  std::string name;  // up to 63 bytes
  uint64_t offset = 0;
  uint64_t count = 0;
  int32_t rank = 0;
  int32_t size = 0;
  std::vector<std::byte> bytes;
  bool missed = false;  // a buffer of its name and offset, but of another count, has been called
};

std::vector<std::byte> encode_saved(const std::vector<SavedBuffer>& buffers);

// DATA says what is wrong and leaves *out alone.
Status decode_saved(std::span<const std::byte> data, std::vector<SavedBuffer>* out);

// Writes the file as a whole or not at all: a new file takes the place of the old one, and its
// mode, at the end. Symbolic links stay, and the file that they lead to is the one replaced.
// ARGUMENT when `path` is no regular file: a device, a pipe, a folder.
Status write_file(const std::string& path, std::span<const std::byte> data);
// ARGUMENT when `path` is no regular file.
Status read_file(const std::string& path, std::vector<std::byte>* out);

// All buffers of this process, each as what was loaded for it where that still waits; and what was
// loaded and has found no buffer yet.
Status collect_state(std::vector<SavedBuffer>* out);

// Keeps state until its buffers are called, instead of what waits under the same names. DATA when a
// part belongs to another rank or world than the buffer or, where no such buffer lives, than any
// communicator of this process; nothing is kept then.
Status accept_state(std::vector<SavedBuffer> buffers);

// Drops what waits under the names of a registration that is gone, unless another one has them.
void forget_state(const std::set<std::string>& names);

// Whether state of several ranks' buffer waits for a buffer of this name, offset and count.
bool state_waits(const std::string& name, uint64_t offset, uint64_t count);

// Before a call: gives the buffer its part, if one waits. USAGE where the buffer cannot take it
// yet; what is refused otherwise waits no longer. The caller holds buffer.busy.
Status claim_saved_state(Buffer& buffer);

}  // namespace scape::interposer
