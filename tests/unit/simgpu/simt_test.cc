// The runner of grids: what device code may rely on, and what it is stopped for.
#include "simt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <set>
#include <tuple>
#include <vector>

extern __shared__ unsigned char dynamic_shared[];

namespace simgpu::test {

// Kernels have names in errors where they are visible.
template <typename... Params, typename... Args>
std::string run(Dim grid, Dim block, size_t dynamic, void (*kernel)(Params...), Args... args) {
  return run_grid({reinterpret_cast<const void*>(kernel), grid, block, dynamic},
                  [&] { kernel(args...); });
}

class Runner : public ::testing::TestWithParam<uint64_t> {
 protected:
  void SetUp() override { set_order(GetParam()); }
  void TearDown() override { set_order(0); }
};
INSTANTIATE_TEST_SUITE_P(Orders, Runner, ::testing::Values(0, 1, 2, 3));

__global__ void note_indices(std::vector<std::atomic<int>>* seen) {
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  ++(*seen)[block * blockDim.x * blockDim.y * blockDim.z + thread];
}

TEST_P(Runner, RunsEachThreadOnce) {
  std::vector<std::atomic<int>> seen(3 * 4 * 5 * 7 * 3 * 2);
  EXPECT_EQ(run({3, 4, 5}, {7, 3, 2}, 0, note_indices, &seen), "");
  for (const auto& count : seen) EXPECT_EQ(count, 1);
}

TEST_P(Runner, RunsTheEndsOfLargeGridsAlone) {
  set_ends(2);
  for (const unsigned blocks : {1u, 4u, 5u, 100u}) {
    std::vector<std::atomic<int>> seen(blocks);
    EXPECT_EQ(run({blocks}, {1}, 0, note_indices, &seen), "");
    for (unsigned b = 0; b < blocks; ++b) EXPECT_EQ(seen[b], b < 2 || b + 2 >= blocks) << b;
  }
  set_ends(0);
}

// Sums a block's numbers by halves in shared memory.
__global__ void block_sum(const int* in, int* out) {
  __shared__ int sums[1024];
  sums[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[blockIdx.x] = sums[0];
}

TEST_P(Runner, BarriersOrderSharedMemory) {
#if defined(__SANITIZE_THREAD__)  // whose time goes with the square of the threads
  constexpr unsigned kBlocks = 20, kThreads = 64;
#else
  constexpr unsigned kBlocks = 40, kThreads = 1024;
#endif
  std::vector<int> in(kBlocks * kThreads), out(kBlocks);
  for (size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int>(i % 1000);
  EXPECT_EQ(run({kBlocks}, {kThreads}, 0, block_sum, in.data(), out.data()), "");
  for (unsigned b = 0; b < kBlocks; ++b) {
    int expected = 0;
    for (unsigned i = 0; i < kThreads; ++i) expected += in[b * kThreads + i];
    EXPECT_EQ(out[b], expected);
  }
}

// Each thread hands its number to its neighbour, without the barrier that has to stand between.
__global__ void pass_on_without_barrier(unsigned* out) {
  __shared__ unsigned numbers[64];
  numbers[threadIdx.x] = 0;
  __syncthreads();
  numbers[threadIdx.x] = threadIdx.x + 1;
  out[threadIdx.x] = numbers[(threadIdx.x + 1) % 64];
}

#if !defined(__SANITIZE_THREAD__)  // which sees the race
TEST(Order, ShowsAMissingBarrier) {
  std::set<std::vector<unsigned>> results;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    set_order(seed);
    std::vector<unsigned> out(64);
    EXPECT_EQ(run({1}, {64}, 0, pass_on_without_barrier, out.data()), "");
    results.insert(out);
    std::vector<unsigned> again(64);
    EXPECT_EQ(run({1}, {64}, 0, pass_on_without_barrier, again.data()), "");
    EXPECT_EQ(out, again) << "a seed gives one order";
  }
  EXPECT_GT(results.size(), 1u);
  set_order(0);
}
#endif

__global__ void vote(unsigned* out) {
  const unsigned thread = threadIdx.x;
  const unsigned lane = thread % 32;
  unsigned* const mine = out + thread * 12;
  mine[0] = __ballot_sync(~0u, lane % 3 == 0);
  mine[1] = static_cast<unsigned>(__any_sync(~0u, lane == 7));
  mine[2] = static_cast<unsigned>(__all_sync(~0u, lane != 7));
  mine[3] = __shfl_sync(~0u, thread, 5);
  mine[4] = __shfl_up_sync(~0u, thread, 2);
  mine[5] = __shfl_down_sync(~0u, thread, 3);
  mine[6] = static_cast<unsigned>(__shfl_xor_sync(~0u, uint64_t{thread} << 32, 8) >> 32);
  mine[7] = __reduce_add_sync(~0u, lane);
  mine[8] = __reduce_max_sync(~0u, lane * 3 % 32);
  // Halves by themselves.
  mine[9] = lane < 16 ? __reduce_or_sync(0xffffu, 1u << lane) : 0;
  mine[10] = static_cast<unsigned>(__syncthreads_count(lane == 1));
  mine[11] = static_cast<unsigned>(__syncthreads_or(threadIdx.x == 40) * 2 +
                                   __syncthreads_and(threadIdx.x != 40));
}

TEST_P(Runner, LanesVoteAndShuffle) {
  std::vector<unsigned> out(96 * 12);
  EXPECT_EQ(run({1}, {96}, 0, vote, out.data()), "");
  for (unsigned i = 0; i < 96; ++i) {
    const unsigned lane = i % 32, first = i - lane;
    const std::vector<unsigned> expected = {0x49249249u,
                                            1,
                                            0,
                                            first + 5,
                                            lane < 2 ? i : i - 2,
                                            lane > 28 ? i : i + 3,
                                            first + (lane ^ 8),
                                            496,
                                            31,
                                            lane < 16 ? 0xffffu : 0,
                                            3,
                                            2};
    EXPECT_EQ(std::vector<unsigned>(out.begin() + i * 12, out.begin() + i * 12 + 12), expected)
        << "thread " << i;
  }
}

__global__ void count_up(unsigned long long* sum, unsigned* largest, int* swaps) {
  atomicAdd(sum, 1ull << 33);
  atomicMax(largest, blockIdx.x * blockDim.x + threadIdx.x);
  if (atomicCAS(swaps, 0, 1) == 0) atomicAdd_system(swaps, 10);
}

TEST_P(Runner, AtomicsAreAtomicOverBlocks) {
  unsigned long long sum = 0;
  unsigned largest = 0;
  int swaps = 0;
  EXPECT_EQ(run({100}, {64}, 0, count_up, &sum, &largest, &swaps), "");
  EXPECT_EQ(sum, 6400ull << 33);
  EXPECT_EQ(largest, 6399u);
  EXPECT_EQ(swaps, 11);
}

__global__ void use_dynamic(unsigned bytes, unsigned* out) {
  if (threadIdx.x == 0) dynamic_shared[bytes - 1] = 42;
  __syncthreads();
  *out = dynamic_shared[bytes - 1];
}

TEST_P(Runner, GivesDynamicSharedMemory) {
  unsigned out = 0;
  EXPECT_EQ(run({1}, {1}, 1000, use_dynamic, 1000u, &out), "");
  EXPECT_EQ(out, 42u);
#if !defined(__SANITIZE_ADDRESS__)
  EXPECT_THAT(run({1}, {1}, 1000, use_dynamic, 1001u, &out),
              ::testing::HasSubstr("wrote byte 1000 of 1000 bytes of dynamic shared memory"));
#endif
}

// ---- what is stopped ----

__global__ void exit_before_barrier() {
  if (threadIdx.x == 9) return;
  __syncthreads();
}
__global__ void barriers_apart() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void barrier_beside_vote() {
  if (threadIdx.x == 3) {
    __syncthreads();
  } else {
    __syncwarp();
  }
}
__global__ void vote_of_the_gone() {
  if (threadIdx.x == 4) return;
  __ballot_sync(~0u, 1);
}
__global__ void vote_of_lanes_elsewhere() {
  if (threadIdx.x % 2 == 0) {
    __ballot_sync(~0u, 1);
  } else {
    __ballot_sync(~0u, 0);
  }
}
__global__ void vote_without_itself() {
  if (threadIdx.x == 6) __ballot_sync(1u, 1);
}
__global__ void shuffle_from_outside() {
  if (threadIdx.x < 16) __shfl_sync(0xffffu, 1, 20);
}

TEST_P(Runner, NamesWhatNeverEnds) {
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  EXPECT_THAT(run({1}, {64}, 0, exit_before_barrier),
              AllOf(HasSubstr("exit_before_barrier"), HasSubstr("block (0, 0, 0), thread ("),
                    HasSubstr("thread (9, 0, 0) has exited"), HasSubstr("simt_test.cc")));
  EXPECT_THAT(run({1}, {64}, 0, barriers_apart), HasSubstr("divergent barrier"));
  EXPECT_THAT(run({1}, {32}, 0, barrier_beside_vote),
              AllOf(HasSubstr("thread ("), HasSubstr("waits at")));
  EXPECT_THAT(run({1}, {32}, 0, vote_of_the_gone),
              AllOf(HasSubstr("names lane 4"), HasSubstr("has exited")));
  EXPECT_THAT(run({1}, {32}, 0, vote_of_lanes_elsewhere), HasSubstr("lanes that it names wait at"));
  EXPECT_THAT(run({1}, {32}, 0, vote_without_itself), HasSubstr("leaves out the calling lane"));
  EXPECT_THAT(run({1}, {32}, 0, shuffle_from_outside), HasSubstr("reads lane 20"));
  // The next grid is well.
  std::vector<std::atomic<int>> seen(64);
  EXPECT_EQ(run({1}, {64}, 0, note_indices, &seen), "");
}

#if !defined(SIMGPU_UBSAN)
__global__ void index_too_far(unsigned at, int* out) {
  __shared__ int few[10];
  few[at + threadIdx.x] = 1;
  out[threadIdx.x] = few[at];
}

TEST_P(Runner, NamesAnIndexOutsideASharedArray) {
  int out[4];
  EXPECT_EQ(run({1}, {1}, 0, index_too_far, 9u, out), "");
  EXPECT_THAT(run({1}, {4}, 0, index_too_far, 7u, out),
              ::testing::AllOf(::testing::HasSubstr("index_too_far"),
                               ::testing::HasSubstr("thread (3, 0, 0): index 10 is outside")));
}
#endif

TEST(Launches, ThatNoDeviceRunsAreRefused) {
  EXPECT_NE(run({1}, {1025}, 0, barriers_apart), "");
  EXPECT_NE(run({0}, {32}, 0, barriers_apart), "");
  EXPECT_NE(run({1}, {32}, size_t{1} << 20, barriers_apart), "");
}

}  // namespace simgpu::test
