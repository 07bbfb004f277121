#include "plugin/net/stripes.h"

#include <cstring>

namespace scape::net {
namespace {
constexpr uint64_t kMagic = 0x5343415045686561;
constexpr size_t kPage = 4096;
}  // namespace

void StripeHead::write(std::byte* bytes) const {
  std::memset(bytes, 0, kHeadBytes);
  std::memcpy(bytes, &kMagic, sizeof kMagic);
  std::memcpy(bytes + 8, &total, sizeof total);
  std::memcpy(bytes + 16, &sequence, sizeof sequence);
}

bool StripeHead::read(const std::byte* bytes) {
  uint64_t magic = 0;
  std::memcpy(&magic, bytes, sizeof magic);
  std::memcpy(&total, bytes + 8, sizeof total);
  std::memcpy(&sequence, bytes + 16, sizeof sequence);
  return magic == kMagic && is_striped(total);
}

void cut(size_t total, std::span<const uint32_t> weights, size_t* parts) {
  uint64_t sum = 0;
  for (const uint32_t weight : weights) sum += weight;
  uint64_t up_to = 0;
  size_t begin = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    up_to += weights[i];
    // Wide enough for any size and any speeds.
    const auto share = static_cast<unsigned __int128>(total) * up_to / sum;
    const size_t end = up_to == sum ? total : static_cast<size_t>(share) / kPage * kPage;
    parts[i] = end - begin;
    begin = end;
  }
}

Turns turns_of(std::span<const uint32_t> weights) {
  int64_t sum = 0;
  std::array<int64_t, kMaxRails> credit{};
  for (const uint32_t weight : weights) sum += weight;
  Turns turns{};
  for (uint8_t& turn : turns) {
    size_t next = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      credit[i] += weights[i];
      if (credit[i] > credit[next]) next = i;
    }
    credit[next] -= sum;
    turn = static_cast<uint8_t>(next);
  }
  return turns;
}

}  // namespace scape::net
