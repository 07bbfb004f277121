// A file of saved state: as it is, and with its checksums made right, which mutations do not get
// past.
#include "interposer/saved_state.h"
#include "base/crc.h"
#include "tests/fuzz/input.h"

namespace {

// Where the container's format has its checksums and lengths (interposer/saved_state.cc).
constexpr size_t kFileHeader = 32, kFileBytes = 16;
constexpr size_t kRecordHeader = 104, kRecordBytes = 88;

void put_crc(std::vector<std::byte>* data, size_t begin, size_t header, size_t bytes) {
  const uint32_t fields = scape::crc32(0, data->data() + begin, header - sizeof fields);
  const uint32_t crc = scape::crc32(fields, data->data() + begin + header, bytes);
  std::memcpy(data->data() + begin + header - sizeof crc, &crc, sizeof crc);
}

void make_right(std::vector<std::byte>* data) {
  if (data->size() < kFileHeader) return;
  const uint64_t whole = data->size();
  std::memcpy(data->data() + kFileBytes, &whole, sizeof whole);
  put_crc(data, 0, kFileHeader, 0);
  for (size_t at = kFileHeader; data->size() - at >= kRecordHeader;) {
    uint64_t bytes;
    std::memcpy(&bytes, data->data() + at + kRecordBytes, sizeof bytes);
    if (bytes > data->size() - at - kRecordHeader) return;
    put_crc(data, at, kRecordHeader, bytes);
    at += kRecordHeader + bytes;
  }
}

void load(const std::vector<std::byte>& data) {
  using namespace scape::interposer;
  std::vector<SavedBuffer> buffers;
  const scape::Status status = decode_saved(data, &buffers);
  if (!status.ok()) {
    scape::fuzz::require(status.code() == SCAPE_ERR_DATA && buffers.empty(), "not left alone");
    return;
  }
  std::vector<SavedBuffer> again;
  scape::fuzz::require(decode_saved(encode_saved(buffers), &again).ok() &&
                           again.size() == buffers.size() &&
                           (again.empty() || again.back().bytes == buffers.back().bytes),
                       "what was read does not come back");
  scape::fuzz::require(accept_state(std::move(buffers)).ok(), "refused where nothing lives");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes = scape::fuzz::copy_of(scape::fuzz::Input(data, size).rest());
  load(bytes);
  make_right(&bytes);
  load(bytes);
  return 0;
}
