#include "perf/common/pattern.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace scape::perf {
namespace {

// Sign-extends the low bits of an integer type.
int64_t as_signed(uint64_t bits, size_t size) {
  const int shift = 64 - 8 * static_cast<int>(size);
  return static_cast<int64_t>(bits << shift) >> shift;
}

uint64_t low_bits(uint64_t value, size_t size) {
  return size == 8 ? value : value & ((uint64_t{1} << (8 * size)) - 1);
}

// One element of a reduction: what each rank gives, and what comes out.
struct Column {
  std::vector<uint64_t> inputs;
  uint64_t expected = 0;
};

double factor_of(int rank) { return (rank & 1) != 0 ? 2 : 1; }

void integer_column(Type type, Op op, uint64_t seed, Column* column) {
  const size_t size = size_of(type);
  const int ranks = static_cast<int>(column->inputs.size());
  auto random = [&](int rank) { return hash(seed, static_cast<uint64_t>(rank)); };

  if (op == Op::kAvg) {
    // A mean plus differences that cancel around the ring of ranks, none of which wraps around.
    const int64_t top = is_signed(type) ? (int64_t{1} << (std::min<size_t>(size, 4) * 8 - 1)) - 1
                                        : (int64_t{1} << (std::min<size_t>(size, 4) * 8)) - 1;
    const int64_t limit = std::max<int64_t>(top / ranks / 2, 1);
    auto draw = [&](uint64_t bits) {
      return static_cast<int64_t>(bits % static_cast<uint64_t>(limit));
    };
    const int64_t spread = is_signed(type) ? limit : (limit + 1) / 2;
    const int64_t mean =
        is_signed(type) ? draw(random(-1)) - limit / 2 : spread + draw(random(-1)) / 2;
    auto difference = [&](int rank) { return draw(random(rank % ranks)) % spread; };
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t value = mean + difference(rank) - difference(rank + 1);
      column->inputs[static_cast<size_t>(rank)] = low_bits(static_cast<uint64_t>(value), size);
    }
    column->expected = low_bits(static_cast<uint64_t>(mean), size);
    return;
  }

  uint64_t result = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const uint64_t value = low_bits(random(rank), size);
    column->inputs[static_cast<size_t>(rank)] = value;
    auto less = [&](uint64_t a, uint64_t b) {
      return is_signed(type) ? as_signed(a, size) < as_signed(b, size) : a < b;
    };
    const uint64_t term = op == Op::kMulSum ? value * premul_factor(type, rank) : value;
    if (rank == 0) {
      result = term;
    } else if (op == Op::kSum || op == Op::kMulSum) {
      result += term;
    } else if (op == Op::kProd) {
      result *= term;
    } else if (op == Op::kMax) {
      result = less(result, term) ? term : result;
    } else {
      result = less(term, result) ? term : result;
    }
  }
  column->expected = low_bits(result, size);
}

// Values of one element on all ranks, and the exact result.
double floating_values(Type type, Op op, uint64_t seed, double most, std::vector<double>* values) {
  const int ranks = static_cast<int>(values->size());
  const uint64_t common = hash(seed, ~uint64_t{0});
  auto random = [&](int rank) { return hash(seed, static_cast<uint64_t>(rank)); };
  // Takes part in this element: where the type's exact range is too small for all ranks at once,
  // a rotating share of them does.
  auto active = [&](int rank, int share) {
    return (static_cast<uint64_t>(rank) + common) % static_cast<uint64_t>(share) == 0;
  };
  double result = 0;
  if (op == Op::kSum || op == Op::kMulSum) {
    const double room =
        std::min({max_integer(type), 16777216.0, most}) / (op == Op::kMulSum ? 2 : 1);
    const double bound = std::max(1.0, std::floor(room / ranks));
    const int share = std::max(1, static_cast<int>(std::ceil(ranks / room)));
    const double scale = most < max_integer(type) ? 1 : std::ldexp(1.0, common >> 32 & 3);
    for (int rank = 0; rank < ranks; ++rank) {
      const uint64_t span = 2 * static_cast<uint64_t>(bound) + 1;
      const double unit = static_cast<double>(random(rank) % span) - bound;
      (*values)[static_cast<size_t>(rank)] = active(rank, share) ? scale * unit + 0.0 : 0.0;
      result += (*values)[static_cast<size_t>(rank)] * (op == Op::kMulSum ? factor_of(rank) : 1.0);
    }
  } else if (op == Op::kProd) {
    const bool wide = type == Type::kFloat || type == Type::kDouble;
    const int share = std::max(1, (ranks + 5) / 6);
    static constexpr double kFactors[] = {0.5, 1, 2, 3};
    result = 1;
    for (int rank = 0; rank < ranks; ++rank) {
      const uint64_t bits = random(rank);
      const double magnitude = kFactors[bits % (wide ? 4 : 3)];
      (*values)[static_cast<size_t>(rank)] =
          active(rank, share) ? ((bits >> 32 & 1) != 0 ? -magnitude : magnitude) : 1.0;
      result *= (*values)[static_cast<size_t>(rank)];
    }
  } else if (op == Op::kAvg) {
    // A power of two plus differences that cancel around the ring of ranks.
    const double room = std::floor(std::min(max_integer(type), 16777216.0) / (4.0 * ranks));
    const int levels = room < 2 ? 1 : std::ilogb(room);
    const double mean =
        std::ldexp((common & 1) != 0 ? -1.0 : 1.0,
                   static_cast<int>((common >> 1) % static_cast<uint64_t>(levels + 1)));
    const uint64_t span = room < 2 ? 2 : static_cast<uint64_t>(room);
    const double scale = std::ldexp(1.0, static_cast<int>(common >> 32) & 1);
    auto difference = [&](int rank) { return static_cast<double>(random(rank % ranks) % span); };
    for (int rank = 0; rank < ranks; ++rank) {
      (*values)[static_cast<size_t>(rank)] =
          scale * (mean + difference(rank) - difference(rank + 1)) + 0.0;
    }
    result = scale * mean;
  } else {
    for (int rank = 0; rank < ranks; ++rank) {
      // Any finite number; + 0.0 makes -0 the 0 it equals.
      uint64_t bits = low_bits(random(rank), size_of(type));
      double value = decode(type, bits) + 0.0;
      if (!std::isfinite(value)) value = 1;
      (*values)[static_cast<size_t>(rank)] = value;
      result = rank == 0        ? value
               : op == Op::kMax ? std::max(result, value)
                                : std::min(result, value);
    }
  }
  return result;
}

}  // namespace

uint64_t hash(uint64_t a, uint64_t b) {
  uint64_t mixed = a * 0x9e3779b97f4a7c15u + b + 0x632be59bd9b4e019u;
  mixed = (mixed ^ (mixed >> 32)) * 0xd6e8feb86659fd93u;
  mixed = (mixed ^ (mixed >> 29)) * 0xff51afd7ed558ccdu;
  return mixed ^ (mixed >> 32);
}

Pattern::Pattern(Type type, const std::vector<uint64_t>& elements, uint64_t seed, double tolerance)
    : type_(type), seed_(seed), tolerance_(tolerance), table_((kTable + kBlock) * size_of(type)) {
  for (size_t i = 0; i < kTable + kBlock; ++i) {
    store(table_.data(), i, size_of(type), elements[i % kTable]);
  }
}

template <typename Visit>
void Pattern::for_each_block(size_t first, size_t count, const Visit& visit) const {
  const size_t size = size_of(type_);
  for (size_t done = 0; done < count;) {
    const size_t block = (first + done) / kBlock;
    const size_t inside = (first + done) % kBlock;
    const size_t length = std::min(count - done, kBlock - inside);
    const size_t place = hash(seed_, block) % kTable;
    visit(done, table_.data() + (place + inside) * size, length);
    done += length;
  }
}

void Pattern::fill(void* dst, size_t first, size_t count) const {
  const size_t size = size_of(type_);
  for_each_block(first, count, [&](size_t at, const std::byte* source, size_t length) {
    std::memcpy(static_cast<std::byte*>(dst) + at * size, source, length * size);
  });
}

size_t Pattern::count_wrong(const void* data, size_t first, size_t count) const {
  const size_t size = size_of(type_);
  size_t wrong = 0;
  for_each_block(first, count, [&](size_t at, const std::byte* expected, size_t length) {
    const std::byte* got = static_cast<const std::byte*>(data) + at * size;
    if (std::memcmp(got, expected, length * size) == 0) return;
    for (size_t i = 0; i < length; ++i) {
      const uint64_t a = load(got, i, size), b = load(expected, i, size);
      if (a == b) continue;
      if (tolerance_ > 0) {
        const double want = decode(type_, b);
        if (std::fabs(decode(type_, a) - want) <= tolerance_ * std::fabs(want)) continue;
      }
      ++wrong;
    }
  });
  return wrong;
}

Status make_reduction_case(Type type, Op op, int rank, int ranks, uint64_t seed, double most,
                           ReductionCase* out) {
  std::vector<uint64_t> input(Pattern::kTable), expected(Pattern::kTable);
  Column column;
  column.inputs.resize(static_cast<size_t>(ranks));
  std::vector<double> values(static_cast<size_t>(ranks));
  for (size_t i = 0; i < Pattern::kTable; ++i) {
    const uint64_t element_seed = hash(seed, i);
    if (is_floating(type)) {
      const double result = floating_values(type, op, element_seed, most, &values);
      const double mine = values[static_cast<size_t>(rank)];
      if (!encode(type, mine, &input[i]) || !encode(type, result, &expected[i])) {
        return error(SCAPE_ERR_INTERNAL, "%s %s over %d ranks: %g or %g is not exact",
                     name_of(type), name_of(op), ranks, mine, result);
      }
    } else {
      integer_column(type, op, element_seed, &column);
      input[i] = column.inputs[static_cast<size_t>(rank)];
      expected[i] = column.expected;
    }
  }
  double tolerance = 0;
  const float inverse = 1.0f / static_cast<float>(ranks);
  if (op == Op::kAvg && is_floating(type) && inverse * static_cast<float>(ranks) != 1.0f) {
    tolerance = 2 / max_integer(type);
  }
  out->input = Pattern(type, input, seed);
  out->expected = Pattern(type, expected, seed, tolerance);
  return Status::Ok();
}

Pattern make_copy_pattern(Type type, uint64_t seed) {
  std::vector<uint64_t> elements(Pattern::kTable);
  for (size_t i = 0; i < elements.size(); ++i) elements[i] = low_bits(hash(seed, i), size_of(type));
  return Pattern(type, elements, seed);
}

uint64_t premul_factor(Type type, int rank) {
  if (!is_floating(type)) return static_cast<uint64_t>(rank % 3) + 1;
  uint64_t bits = 0;
  (void)encode(type, factor_of(rank), &bits);
  return bits;
}

}  // namespace scape::perf
