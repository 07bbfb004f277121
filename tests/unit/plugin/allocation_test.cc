// Calls that repeat themselves allocate nothing: not the schedules, the runs, the scratch memory,
// nor what watches over them. Every form of operator new is counted; a transport's module has its
// own.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <new>
#include <vector>

#include "tests/unit/plugin/testing.h"

namespace {
std::atomic<long> allocations{0};

void* allocate(size_t bytes, size_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  const size_t rounded = (std::max<size_t>(bytes, 1) + alignment - 1) / alignment * alignment;
  if (void* const block = std::aligned_alloc(alignment, rounded)) return block;
  throw std::bad_alloc();
}
}  // namespace

void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete(void* block, size_t) noexcept { std::free(block); }
void operator delete(void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete(void* block, size_t, std::align_val_t) noexcept { std::free(block); }

namespace scape::plugin::test {
namespace {

using scape::test::all_well;
using scape::test::run_ranks;
using scape::test::text_of;

TEST(Allocations, EndAfterTheFirstCalls) {
  const UniqueId id = new_id();
  const auto results = run_ranks(3, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> c;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &c));
    constexpr size_t kLargest = 500000;
    std::vector<float> in(kLargest, 1), out(kLargest);
    const size_t counts[] = {1000, 0, 70001};
    constexpr int kUnderWay = 4;
    WorkPtr works[kUnderWay];
    const auto rounds = [&](int n) -> std::string {
      for (int i = 0; i < n; ++i) {
        for (const size_t count : {size_t{1}, size_t{3000}, kLargest}) {
          for (WorkPtr& work : works) {
            SCAPE_RANK_OK(
                c->all_reduce(in.data(), in.data(), count, DataType::kFloat32, {}, {}, &work));
          }
          for (WorkPtr& work : works) SCAPE_RANK_OK(wait(*c, *work));
        }
        SCAPE_RANK_OK(
            c->all_gather_v(in.data(), out.data(), counts, DataType::kFloat32, {}, &works[0]));
        SCAPE_RANK_OK(c->reduce_scatter_v(in.data(), out.data(), counts, DataType::kFloat32, {}, {},
                                          &works[1]));
        for (int k = 0; k < 2; ++k) SCAPE_RANK_OK(wait(*c, *works[k]));
      }
      return {};
    };
    if (std::string text = rounds(10); !text.empty()) return text;
    // A call that a busy machine holds up for long is told to the neighbours, which may allocate:
    // the quietest of some rounds counts.
    long fewest = std::numeric_limits<long>::max();
    for (int i = 0; i < 8; ++i) {
      const long before = allocations.load();
      if (std::string text = rounds(4); !text.empty()) return text;
      fewest = std::min(fewest, allocations.load() - before);
    }
    return fewest == 0 ? std::string() : std::to_string(fewest) + " allocations in 4 rounds";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

}  // namespace
}  // namespace scape::plugin::test
