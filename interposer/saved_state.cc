#include "interposer/saved_state.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <mutex>

#include "base/crc.h"
#include "base/log.h"
#include "interposer/buffers.h"
#include "interposer/registry.h"

namespace scape::interposer {
namespace {

constexpr char kMagic[8] = {'S', 'C', 'A', 'P', 'E', 'S', 'T', 'A'};
constexpr uint32_t kVersion = 1;

struct FileHeader {
  char magic[8];
  uint32_t version;
  uint32_t records;
  uint64_t bytes;  // of the whole container
  uint32_t reserved;
  uint32_t crc;  // of the fields before it
};
static_assert(sizeof(FileHeader) == 32);

struct RecordHeader {
  char name[64];
  uint64_t offset;
  uint64_t count;
  int32_t rank;
  int32_t size;
  uint64_t bytes;  // that follow
  uint32_t reserved;
  uint32_t crc;  // of the fields before it and the bytes that follow
};
static_assert(sizeof(RecordHeader) == 104);

std::span<const std::byte> fields(const auto& header) {
  return std::as_bytes(std::span(&header, 1)).first(sizeof header - sizeof header.crc);
}

uint32_t checksum(std::span<const std::byte> data, uint32_t before = 0) {
  return crc32(before, data.data(), data.size());
}

uint32_t record_crc(const RecordHeader& header, std::span<const std::byte> bytes) {
  return checksum(bytes, checksum(fields(header)));
}

template <typename T>
void append(const T& value, std::vector<std::byte>* out) {
  const size_t end = out->size();
  out->resize(end + sizeof(value));
  std::memcpy(out->data() + end, &value, sizeof(value));
}

struct Waiting {
  std::mutex mutex;
  std::vector<SavedBuffer> buffers;
  std::atomic<bool> any{false};  // read without the mutex on the path of each call

  // The caller holds the mutex.
  void erase_if(auto&& gone) {
    std::erase_if(buffers, gone);
    any.store(!buffers.empty(), std::memory_order_release);
  }
};
Waiting& waiting() {
  static Waiting* const instance = new Waiting;  // never destroyed: used until the last moment
  return *instance;
}

bool is_called(const SavedBuffer& saved, const std::string& name, uint64_t offset, uint64_t count) {
  return saved.name == name && saved.offset == offset && saved.count == count;
}

bool same_buffer(const SavedBuffer& saved, const Buffer& buffer) {
  const plugin::BufferConfig& config = buffer.masked->config();
  return is_called(saved, config.name, config.offset, buffer.count);
}

bool is_of(const SavedBuffer& saved, const Buffer& buffer) {
  return same_buffer(saved, buffer) && saved.rank == buffer.comm->rank() &&
         saved.size == buffer.comm->size();
}

// No refusal: the same range may be reduced whole in one communicator and in part in another, and
// what waits is the other's then.
void tell_of_other_counts(std::vector<SavedBuffer>& waiting, const Buffer& buffer) {
  const plugin::BufferConfig& config = buffer.masked->config();
  for (SavedBuffer& saved : waiting) {
    if (saved.missed || saved.name != config.name || saved.offset != config.offset) continue;
    saved.missed = true;
    SCAPE_WARN(
        "buffer \"%s\" has %zu elements and begins anew, while the loaded state of that name has "
        "%zu and waits; reduce as many as when it was saved to go on from it",
        config.name.c_str(), buffer.count, static_cast<size_t>(saved.count));
  }
}

Status foreign(const SavedBuffer& saved, int rank, int size) {
  return error(SCAPE_ERR_DATA,
               "the saved state of \"%s\" is rank %d's of %d, this is rank %d of %d: each rank "
               "loads its own file, in a "
               "world of the same size",
               saved.name.c_str(), saved.rank, saved.size, rank, size);
}

std::string system_error() { return std::strerror(errno); }

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

Status check_regular(const std::string& path, const struct stat& info) {
  if (S_ISREG(info.st_mode)) return {};
  const char* kind = S_ISDIR(info.st_mode)    ? "a folder"
                     : S_ISFIFO(info.st_mode) ? "a pipe"
                     : S_ISSOCK(info.st_mode) ? "a socket"
                                              : "a device";
  return error(SCAPE_ERR_ARGUMENT, "%s is %s; name a regular file, or one that is not there yet",
               path.c_str(), kind);
}

// What a new file has to take the place of so that `path` names it afterwards: where symbolic links
// lead, whether a file is there yet or not. *mode: that of the file there, else left alone.
Status file_to_replace(const std::string& path, std::string* target, mode_t* mode) {
  namespace fs = std::filesystem;
  struct stat info {};
  std::error_code failed;
  fs::path end = path;
  if (::stat(path.c_str(), &info) == 0) {
    SCAPE_RETURN_IF_ERROR(check_regular(path, info));
    *mode = info.st_mode & 0777;
    if (fs::is_symlink(end, failed)) end = fs::canonical(end, failed);
  } else {
    if (errno != ENOENT) {
      return error(SCAPE_ERR_SYSTEM, "%s cannot be written: %s", path.c_str(),
                   system_error().c_str());
    }
    // Links to what is not there yet: a ring of them would have been another error.
    while (!failed && fs::is_symlink(fs::symlink_status(end, failed)))
      end = end.parent_path() / fs::read_symlink(end, failed);
    if (failed == std::errc::no_such_file_or_directory) failed.clear();
  }
  if (failed) {
    return error(SCAPE_ERR_SYSTEM, "%s cannot be followed: %s", path.c_str(),
                 failed.message().c_str());
  }
  *target = end.string();
  return {};
}

}  // namespace

std::vector<std::byte> encode_saved(const std::vector<SavedBuffer>& buffers) {
  FileHeader file{};
  std::memcpy(file.magic, kMagic, sizeof kMagic);
  file.version = kVersion;
  file.records = static_cast<uint32_t>(buffers.size());
  file.bytes = sizeof file;
  for (const SavedBuffer& buffer : buffers)
    file.bytes += sizeof(RecordHeader) + buffer.bytes.size();
  file.crc = checksum(fields(file));
  std::vector<std::byte> out;
  out.reserve(file.bytes);
  append(file, &out);
  for (const SavedBuffer& buffer : buffers) {
    RecordHeader record{};
    std::snprintf(record.name, sizeof record.name, "%s", buffer.name.c_str());
    record.offset = buffer.offset;
    record.count = buffer.count;
    record.rank = buffer.rank;
    record.size = buffer.size;
    record.bytes = buffer.bytes.size();
    record.crc = record_crc(record, buffer.bytes);
    append(record, &out);
    out.insert(out.end(), buffer.bytes.begin(), buffer.bytes.end());
  }
  return out;
}

Status decode_saved(std::span<const std::byte> data, std::vector<SavedBuffer>* out) {
  FileHeader file;
  if (data.size() < sizeof file) {
    return error(SCAPE_ERR_DATA,
                 "%zu bytes are too few for saved state; the file was cut or is another's",
                 data.size());
  }
  std::memcpy(&file, data.data(), sizeof file);
  if (std::memcmp(file.magic, kMagic, sizeof kMagic) != 0) {
    return error(SCAPE_ERR_DATA, "these bytes are not saved state of scape");
  }
  if (file.crc != checksum(fields(file))) {
    return error(SCAPE_ERR_DATA, "the saved state is damaged in its header; load an intact copy");
  }
  if (file.version != kVersion) {
    return error(SCAPE_ERR_DATA, "the saved state has version %u, this library reads version %u",
                 file.version, kVersion);
  }
  if (file.bytes != data.size()) {
    return error(SCAPE_ERR_DATA,
                 "the saved state is of %llu bytes, and %zu are here: %s; load an intact copy",
                 static_cast<unsigned long long>(file.bytes), data.size(),
                 data.size() < file.bytes ? "it was cut" : "something was appended to it");
  }
  std::span<const std::byte> rest = data.subspan(sizeof file);
  std::vector<SavedBuffer> buffers;
  for (uint32_t i = 0; i < file.records; ++i) {
    RecordHeader record;
    if (rest.size() < sizeof record)
      return error(SCAPE_ERR_DATA, "the saved state ends in record %u", i);
    std::memcpy(&record, rest.data(), sizeof record);
    rest = rest.subspan(sizeof record);
    if (record.bytes > rest.size())
      return error(SCAPE_ERR_DATA, "the saved state ends in record %u", i);
    const auto bytes = rest.first(record.bytes);
    rest = rest.subspan(record.bytes);
    const bool intact = record.crc == record_crc(record, bytes);
    record.name[sizeof record.name - 1] = '\0';
    if (!intact) {
      return error(SCAPE_ERR_DATA, "the saved state of \"%s\" is damaged; load an intact copy",
                   record.name);
    }
    buffers.push_back({record.name, record.offset, record.count, record.rank, record.size,
                       std::vector<std::byte>(bytes.begin(), bytes.end())});
  }
  if (!rest.empty()) return error(SCAPE_ERR_DATA, "%zu bytes follow the last record", rest.size());
  *out = std::move(buffers);
  return {};
}

Status write_file(const std::string& path, std::span<const std::byte> data) {
  std::string target;
  mode_t mode = 0;
  SCAPE_RETURN_IF_ERROR(file_to_replace(path, &target, &mode));
  const std::string temporary = target + ".new." + std::to_string(::getpid());
  const File file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file.get() < 0) {
    return error(SCAPE_ERR_SYSTEM, "%s cannot be created: %s", temporary.c_str(),
                 system_error().c_str());
  }
  const auto fail = [&](const char* what) {
    const Status status = error(SCAPE_ERR_SYSTEM, "%s cannot be %s: %s", temporary.c_str(), what,
                                system_error().c_str());
    ::unlink(temporary.c_str());
    return status;
  };
  if (mode != 0 && ::fchmod(file.get(), mode) != 0) return fail("given the old file's mode");
  for (std::span<const std::byte> rest = data; !rest.empty();) {
    const ssize_t written = ::write(file.get(), rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return fail("written");
    rest = rest.subspan(static_cast<size_t>(written));
  }
  if (::fsync(file.get()) != 0) return fail("brought to the disk");
  if (::rename(temporary.c_str(), target.c_str()) != 0) return fail("renamed");
  return {};
}

Status read_file(const std::string& path, std::vector<std::byte>* out) {
  // Opening a pipe would wait for its writer.
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info {};
  if (file.get() < 0 || ::fstat(file.get(), &info) != 0) {
    return error(SCAPE_ERR_SYSTEM, "%s cannot be opened: %s", path.c_str(), system_error().c_str());
  }
  SCAPE_RETURN_IF_ERROR(check_regular(path, info));
  out->resize(static_cast<size_t>(info.st_size));
  size_t have = 0;
  while (have < out->size()) {
    const ssize_t got = ::read(file.get(), out->data() + have, out->size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      return error(SCAPE_ERR_SYSTEM, "%s cannot be read: %s", path.c_str(), system_error().c_str());
    if (got == 0) break;
    have += static_cast<size_t>(got);
  }
  out->resize(have);
  return {};
}

Status collect_state(std::vector<SavedBuffer>* out) {
  {
    const std::lock_guard lock(waiting().mutex);
    *out = waiting().buffers;
  }
  const size_t loaded = out->size();
  for (const auto& registration : registry().all()) {
    std::vector<std::shared_ptr<Buffer>> buffers;
    {
      const std::lock_guard lock(registration->mutex);
      buffers = registration->buffers;
    }
    for (const auto& buffer : buffers) {
      const std::lock_guard busy(buffer->busy);
      if (buffer->dropped) continue;
      // What was loaded for it is its state already, though the next call brings it there.
      if (std::any_of(out->begin(), out->begin() + static_cast<ptrdiff_t>(loaded),
                      [&](const SavedBuffer& saved) { return is_of(saved, *buffer); }))
        continue;
      const plugin::BufferConfig& config = buffer->masked->config();
      SavedBuffer saved{config.name,          config.offset,        buffer->count,
                        buffer->comm->rank(), buffer->comm->size(), {}};
      const auto hold = buffer->comm->hold();
      SCAPE_RETURN_IF_ERROR(buffer->masked->save(&saved.bytes));
      out->push_back(std::move(saved));
    }
  }
  return {};
}

Status accept_state(std::vector<SavedBuffer> buffers) {
  for (const SavedBuffer& saved : buffers) {
    bool lives = false;
    bool fits = false;
    int rank = -1;
    int size = 0;
    for (const auto& registration : registry().all()) {
      const std::lock_guard lock(registration->mutex);
      for (const auto& buffer : registration->buffers) {
        if (!same_buffer(saved, *buffer)) continue;
        lives = true;
        rank = buffer->comm->rank();
        size = buffer->comm->size();
        fits |= rank == saved.rank && size == saved.size;
      }
    }
    if (!lives) {
      for (const auto& comm : live_comms()) {
        lives = true;
        rank = comm->rank();
        size = comm->size();
        if (rank == saved.rank && size == saved.size) {
          fits = true;
          break;
        }
      }
    }
    if (lives && !fits) return foreign(saved, rank, size);
  }
  Waiting& list = waiting();
  const std::lock_guard lock(list.mutex);
  list.erase_if([&](const SavedBuffer& old) {
    return std::any_of(buffers.begin(), buffers.end(),
                       [&](const SavedBuffer& saved) { return saved.name == old.name; });
  });
  std::move(buffers.begin(), buffers.end(), std::back_inserter(list.buffers));
  list.any.store(!list.buffers.empty(), std::memory_order_release);
  return {};
}

void forget_state(const std::set<std::string>& names) {
  Waiting& list = waiting();
  if (!list.any.load(std::memory_order_acquire)) return;
  std::set<std::string> gone = names;
  for (const auto& registration : registry().all()) gone.erase(registration->config.name);
  const std::lock_guard lock(list.mutex);
  list.erase_if([&](const SavedBuffer& saved) { return gone.contains(saved.name); });
}

bool state_waits(const std::string& name, uint64_t offset, uint64_t count) {
  Waiting& list = waiting();
  const std::lock_guard lock(list.mutex);
  return std::any_of(list.buffers.begin(), list.buffers.end(), [&](const SavedBuffer& saved) {
    return is_called(saved, name, offset, count) && saved.size > 1;
  });
}

Status claim_saved_state(Buffer& buffer) {
  Waiting& list = waiting();
  if (!list.any.load(std::memory_order_acquire)) return {};
  SavedBuffer mine;
  {
    const std::lock_guard lock(list.mutex);
    auto& buffers = list.buffers;
    auto found = std::find_if(buffers.begin(), buffers.end(),
                              [&](const SavedBuffer& saved) { return is_of(saved, buffer); });
    const bool fits = found != buffers.end();
    if (!fits) {
      found = std::find_if(buffers.begin(), buffers.end(),
                           [&](const SavedBuffer& saved) { return same_buffer(saved, buffer); });
      if (found == buffers.end()) {
        tell_of_other_counts(buffers, buffer);
        return {};
      }
    }
    mine = std::move(*found);
    buffers.erase(found);
    list.any.store(!buffers.empty(), std::memory_order_release);
    if (!fits) return foreign(mine, buffer.comm->rank(), buffer.comm->size());
  }
  if (const Status status = buffer.masked->load(mine.bytes.data(), mine.bytes.size());
      !status.ok()) {
    if (status.code() == SCAPE_ERR_USAGE) {
      const std::lock_guard lock(list.mutex);
      list.buffers.push_back(std::move(mine));
      list.any.store(true, std::memory_order_release);
    }
    return status;
  }
  SCAPE_INFO("buffer \"%s\": saved state taken (%zu bytes)", mine.name.c_str(), mine.bytes.size());
  return {};
}

}  // namespace scape::interposer
