#include "tests/unit/plugin/testing.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace scape::plugin::test {
namespace {

// A small float's bits for an integer 0 .. 4, by hand.
uint32_t small_float_bits(DataType type, int value) {
  const float as_float = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &as_float, sizeof bits);
  const uint32_t sign = bits >> 31, exponent = (bits >> 23) & 0xff, mantissa = bits & 0x7fffff;
  int exponent_bits = 8, mantissa_bits = 7;
  if (type == DataType::kFloat16) exponent_bits = 5, mantissa_bits = 10;
  if (type == DataType::kFloat8e4m3) exponent_bits = 4, mantissa_bits = 3;
  if (type == DataType::kFloat8e5m2) exponent_bits = 5, mantissa_bits = 2;
  if (value == 0) return 0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const uint32_t moved = static_cast<uint32_t>(static_cast<int>(exponent) - 127 + bias);
  return sign << (exponent_bits + mantissa_bits) | moved << mantissa_bits |
         mantissa >> (23 - mantissa_bits);
}

void put(std::vector<std::byte>* bytes, size_t i, uint64_t bits, size_t size) {
  std::memcpy(bytes->data() + i * size, &bits, size);
}

}  // namespace

UniqueId new_id() {
  int ends[2];
  UniqueId id;
  if (::pipe(ends) != 0) std::abort();
  const pid_t server = ::fork();
  if (server == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (const Status status = make_unique_id(&id); !status.ok()) {
      std::fprintf(stderr, "%s\n", status.message().c_str());
      std::_Exit(1);
    }
    if (::write(ends[1], &id, sizeof id) != sizeof id) std::_Exit(1);
    ::close(ends[1]);
    for (;;) ::pause();
  }
  ::close(ends[1]);
  if (server < 0 || ::read(ends[0], &id, sizeof id) != sizeof id) std::abort();
  ::close(ends[0]);
  return id;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::string sum_ones(Communicator& communicator, size_t count) {
  std::vector<float> ones(count, 1), sums(count);
  WorkPtr work;
  SCAPE_RANK_OK(finish(
      communicator,
      communicator.all_reduce(ones.data(), sums.data(), count, DataType::kFloat32, {}, {}, &work),
      work));
  for (const float sum : sums) SCAPE_RANK_EXPECT(sum == static_cast<float>(communicator.size()));
  return "";
}

std::vector<std::byte> small_values(DataType type, size_t count, uint64_t seed) {
  std::mt19937_64 random(seed * 1000003 + static_cast<uint64_t>(type));
  const size_t size = size_of(type);
  std::vector<std::byte> bytes(count * size);
  for (size_t i = 0; i < count; ++i) {
    const bool is_unsigned =
        type == DataType::kUint8 || type == DataType::kUint32 || type == DataType::kUint64;
    const int value = static_cast<int>(random() % 3) - (is_unsigned ? 0 : 1);
    switch (type) {
      case DataType::kFloat32: {
        const float f = static_cast<float>(value);
        std::memcpy(bytes.data() + i * size, &f, size);
        break;
      }
      case DataType::kFloat64: {
        const double d = value;
        std::memcpy(bytes.data() + i * size, &d, size);
        break;
      }
      case DataType::kFloat16:
      case DataType::kBfloat16:
      case DataType::kFloat8e4m3:
      case DataType::kFloat8e5m2:
        put(&bytes, i, small_float_bits(type, value), size);
        break;
      default:
        put(&bytes, i, static_cast<uint64_t>(static_cast<int64_t>(value)), size);
        break;
    }
  }
  return bytes;
}

std::vector<std::byte> rough_values(DataType type, size_t count, uint64_t seed) {
  std::mt19937_64 random(seed * 7919 + static_cast<uint64_t>(type));
  const size_t size = size_of(type);
  std::vector<std::byte> bytes(count * size);
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = random();
    // Magnitudes of 1/4 .. 4 with random mantissas and signs.
    const auto around_one = [&](int exponent_bits, int mantissa_bits) {
      const uint64_t bias = (uint64_t{1} << (exponent_bits - 1)) - 1;
      const uint64_t exponent = bias - 2 + (bits >> 60) % 4;
      const uint64_t mantissa = bits & ((uint64_t{1} << mantissa_bits) - 1);
      return ((bits >> 59) & 1) << (exponent_bits + mantissa_bits) | exponent << mantissa_bits |
             mantissa;
    };
    uint64_t value = bits;
    if (type == DataType::kFloat16) value = around_one(5, 10);
    if (type == DataType::kBfloat16) value = around_one(8, 7);
    if (type == DataType::kFloat32) value = around_one(8, 23);
    if (type == DataType::kFloat64) value = around_one(11, 52);
    if (type == DataType::kFloat8e4m3) value = around_one(4, 3);
    if (type == DataType::kFloat8e5m2) value = around_one(5, 2);
    put(&bytes, i, value, size);
  }
  return bytes;
}

}  // namespace scape::plugin::test
