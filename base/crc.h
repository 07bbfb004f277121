// CRC-32 (the IEEE 802.3 polynomial, reflected) of saved and replicated state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace scape {

// Continues from `crc`, the result for the bytes before these; 0 at the beginning.
uint32_t crc32(uint32_t crc, const void* data, size_t size);

}  // namespace scape
