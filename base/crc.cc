#include "base/crc.h"

#include <array>
#include <cstring>

namespace scape {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320u;
constexpr size_t kStride = 8;  // bytes taken at once

// table[s][b]: what byte b contributes when s more bytes of the stride follow it.
constexpr std::array<std::array<uint32_t, 256>, kStride> make_tables() {
  std::array<std::array<uint32_t, 256>, kStride> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t s = 1; s < kStride; ++s) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[s - 1][byte];
      tables[s][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr auto kTables = make_tables();

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, size_t size) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  crc = ~crc;
  for (; size >= kStride; size -= kStride, bytes += kStride) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof(word));
    word ^= crc;
    crc = 0;
    for (size_t i = 0; i < kStride; ++i) crc ^= kTables[kStride - 1 - i][(word >> (8 * i)) & 0xff];
  }
  for (; size > 0; --size, ++bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xff];
  return ~crc;
}

}  // namespace scape
