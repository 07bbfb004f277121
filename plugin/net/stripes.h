// How messages are shared out over the rails of a connection: pure arithmetic, the same on both
// sides.
//
// A message of more than kStripedFrom bytes is cut into one part a rail, in the proportion of their
// speeds, so that all end together. The receiver posts buffers that may be larger than what comes,
// so a head goes before the parts and tells of them. Anything else is one message, and the rails
// take these in turns. What is as long as a head by chance is sent as a head and parts, too: so a
// length of kHeadBytes is always a head.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "plugin/net/abi/common.h"

namespace scape::net {

inline constexpr size_t kMaxRails = NET_MAX_MEMBERS;
inline constexpr size_t kStripedFrom = size_t{128} << 10;
// A length that messages seldom have.
inline constexpr size_t kHeadBytes = 23;

struct StripeHead {
  uint64_t total = 0;
  uint32_t sequence = 0;  // which names its parts: of the striped messages of a connection

  void write(std::byte* bytes) const;
  // False where the bytes are no head.
  bool read(const std::byte* bytes);
};

inline bool is_striped(size_t bytes) { return bytes > kStripedFrom || bytes == kHeadBytes; }

// parts[i] bytes for rail i, one after the other; their sum is `total`. Cuts are on whole pages of
// the message, so short ones may leave rails out. Weights are at least 1.
void cut(size_t total, std::span<const uint32_t> weights, size_t* parts);

// Which rail takes the how manieth message: each in proportion to its weight, spread out.
using Turns = std::array<uint8_t, 32>;
Turns turns_of(std::span<const uint32_t> weights);

}  // namespace scape::net
