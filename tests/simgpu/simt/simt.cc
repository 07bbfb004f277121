// The runner: fibers on Boost.Context, one scheduler for each block under way.
#include "simt.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <boost/context/detail/fcontext.hpp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SIMGPU_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace simgpu {

constinit thread_local const Indices* current_indices = nullptr;

}  // namespace simgpu

// Past what a launch asked for, the rest is a guard.
constexpr size_t kSharedGuard = 1024;
alignas(16) thread_local unsigned char dynamic_shared[simgpu::kMaxDynamicShared + kSharedGuard];

namespace simgpu {
namespace {

using boost::context::detail::fcontext_t;
using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

constexpr unsigned kWarp = 32;
constexpr unsigned char kGuardByte = 0xa5;
constexpr size_t kPage = 4096;
#if defined(__SANITIZE_ADDRESS__) || defined(SIMGPU_TSAN)
constexpr size_t kStack = size_t{256} << 10;
#else
constexpr size_t kStack = size_t{64} << 10;
#endif

// From so many blocks on, several threads of the system share a grid.
constexpr size_t kBlocksToShare = 16;
constexpr unsigned kMaxWorkers = 4;

std::atomic<uint64_t> order_seed{0};
std::atomic<size_t> end_blocks{0};

std::string sentence(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string sentence(const char* format, ...) {
  char text[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  return text;
}

std::string kernel_name(const void* kernel) {
  Dl_info info;
  if (dladdr(kernel, &info) == 0 || info.dli_saddr != kernel) {  // it is in no table of symbols
    return sentence("kernel at %p", kernel);
  }
  int failed = 0;
  char* readable = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &failed);
  std::string name = failed == 0 ? readable : info.dli_sname;
  std::free(readable);
  return "kernel " + name;
}

Dim index_of(size_t flat, const Dim& size) {
  return {static_cast<unsigned>(flat % size.x), static_cast<unsigned>(flat / size.x % size.y),
          static_cast<unsigned>(flat / size.x / size.y)};
}

// ---- one grid under way ----

struct Run {
  const Launch& launch;
  const std::function<void()>& thread;
  uint64_t seed;
  size_t blocks;                // that are run
  size_t left_out_at;           // the blocks behind these are the grid's last ones
  std::vector<uint32_t> order;  // of blocks; empty: by index
  std::atomic<size_t> next{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::string error;

  void fail(const Indices& at, const std::string& what) {
    std::lock_guard lock(mutex);
    if (failed.exchange(true)) return;
    error = sentence(
                "%s, block (%u, %u, %u), thread (%u, %u, %u): ", kernel_name(launch.kernel).c_str(),
                at.block.x, at.block.y, at.block.z, at.thread.x, at.thread.y, at.thread.z) +
            what;
  }
};

// ---- fibers ----

class Worker;

enum class State { kRunnable, kBarrier, kWarpOp, kExited, kFailed };

struct Fiber {
  Indices indices;  // first: current_indices points at it
  Worker* worker = nullptr;
  unsigned index = 0;  // in the block
  State state = State::kRunnable;
  Site site{};
  WarpOp op{};
  unsigned mask = 0;
  unsigned source = 0;
  uint64_t value = 0;
  uint64_t result = 0;

  unsigned lane() const { return index % kWarp; }

  void* memory = nullptr;
  fcontext_t context = nullptr;
  void* fake_stack = nullptr;  // of the address sanitizer
  void* sanitizer = nullptr;   // of the thread sanitizer

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
};

// Lanes that wait for each other.
struct Group {
  unsigned mask = 0, arrived = 0;
  WarpOp op{};
  Site site{};
};

// A thread of the system that runs blocks, with fibers that it keeps from block to block.
class Worker {
 public:
  void work(Run& run);

  Worker* next_idle = nullptr;

  // ---- called on fibers ----
  int barrier(Fiber& fiber, Vote vote, bool predicate, Site site);
  uint64_t warp_operation(Fiber& fiber, WarpOp op, unsigned mask, uint64_t value, unsigned source,
                          Site site);
  [[noreturn]] void fail(Fiber& fiber, std::string&& what);
  const std::function<void()>& thread() const { return run_->thread; }
  void begin(Fiber& fiber);
  void exit(Fiber& fiber);
  void arrive_on_fiber(Fiber& fiber, fcontext_t scheduler);

 private:
  void leave(Fiber& fiber);
  void run_block(size_t block);
  void resume(Fiber& fiber);
  void report_deadlock();
  void complete(const Group& group, unsigned warp, Fiber& last);
  void order_before();
  void order_after();
  Fiber& at(unsigned index) { return *fibers_[index]; }
  unsigned take_runnable();
  void check_dynamic_shared();

  Run* run_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  unsigned threads_ = 0;  // of the block
  std::vector<unsigned> runnable_;
  std::vector<std::vector<Group>> groups_;  // by warp
  std::minstd_rand random_;
  unsigned exited_ = 0;
  unsigned at_barrier_ = 0;
  unsigned votes_ = 0;
  Site barrier_site_{};
  fcontext_t scheduler_ = nullptr;
  char sync_point_ = 0;  // its address stands for what barriers order
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_size_ = 0;
  void* scheduler_fake_stack_ = nullptr;
  void* scheduler_sanitizer_ = nullptr;
};

[[noreturn]] void fiber_main(transfer_t from) {
  auto& fiber = *static_cast<Fiber*>(from.data);
  fiber.worker->arrive_on_fiber(fiber, from.fctx);
  for (;;) {
    fiber.worker->begin(fiber);
    fiber.worker->thread()();
    fiber.worker->exit(fiber);
  }
}

Fiber::Fiber() {
  memory = ::mmap(nullptr, kPage + kStack, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    std::fputs("simgpu: no memory for the stack of a device thread\n", stderr);
    std::abort();
  }
  ::mprotect(memory, kPage, PROT_NONE);
  context = make_fcontext(static_cast<char*>(memory) + kPage + kStack, kStack, fiber_main);
#if defined(SIMGPU_TSAN)
  sanitizer = __tsan_create_fiber(0);
#endif
}

Fiber::~Fiber() {
#if defined(SIMGPU_TSAN)
  __tsan_destroy_fiber(sanitizer);
#endif
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(static_cast<char*>(memory) + kPage, kStack);
#endif
  ::munmap(memory, kPage + kStack);
}

// ---- switching ----

void Worker::resume(Fiber& fiber) {
  current_indices = &fiber.indices;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack_, static_cast<char*>(fiber.memory) + kPage,
                                 kStack);
#endif
#if defined(SIMGPU_TSAN)
  // Threads of a block are ordered by what they wait for, not by who runs first.
  scheduler_sanitizer_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.sanitizer, __tsan_switch_to_fiber_no_sync);
#endif
  const transfer_t back = jump_fcontext(fiber.context, &fiber);
  fiber.context = back.fctx;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
#endif
  current_indices = nullptr;
}

void Worker::arrive_on_fiber([[maybe_unused]] Fiber& fiber, fcontext_t scheduler) {
  scheduler_ = scheduler;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack_, &scheduler_stack_size_);
#endif
}

// Back to the scheduler, until it resumes the fiber.
void Worker::leave(Fiber& fiber) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&fiber.fake_stack, scheduler_stack_, scheduler_stack_size_);
#endif
#if defined(SIMGPU_TSAN)
  __tsan_switch_to_fiber(scheduler_sanitizer_, __tsan_switch_to_fiber_no_sync);
#endif
  const transfer_t back = jump_fcontext(scheduler_, nullptr);
  // Perhaps on another thread of the system, with another worker.
  fiber.worker->arrive_on_fiber(fiber, back.fctx);
}

// What came before order_before() on any fiber comes before what follows order_after(), as far as
// the thread sanitizer is concerned.
void Worker::order_before() {
#if defined(SIMGPU_TSAN)
  __tsan_release(&sync_point_);
#endif
}
void Worker::order_after() {
#if defined(SIMGPU_TSAN)
  __tsan_acquire(&sync_point_);
#endif
}

void Worker::begin(Fiber&) { order_after(); }

void Worker::exit(Fiber& fiber) {
  order_before();
  fiber.state = State::kExited;
  ++exited_;
  leave(fiber);
}

void Worker::fail(Fiber& fiber, std::string&& what) {
  run_->fail(fiber.indices, what);
  std::string().swap(what);  // the caller's, whose frame is never left
  order_before();
  fiber.state = State::kFailed;
  for (;;) leave(fiber);
}

// ---- barriers ----

int Worker::barrier(Fiber& fiber, Vote vote, bool predicate, Site site) {
  if (exited_ > 0) {
    for (unsigned i = 0; i < threads_; ++i) {
      if (at(i).state != State::kExited) continue;
      const Dim& gone = at(i).indices.thread;
      fail(fiber, sentence("divergent barrier at %s:%u: thread (%u, %u, %u) has exited without it",
                           site.file, site.line, gone.x, gone.y, gone.z));
    }
  }
  if (at_barrier_ == 0) {
    barrier_site_ = site;
    votes_ = 0;
  } else if (barrier_site_.line != site.line || barrier_site_.file != site.file) {
    fail(fiber, sentence("divergent barrier: it is at %s:%u, other threads of the block at %s:%u",
                         site.file, site.line, barrier_site_.file, barrier_site_.line));
  }
  votes_ += predicate;
  order_before();
  if (++at_barrier_ < threads_) {
    fiber.state = State::kBarrier;
    fiber.site = site;
    leave(fiber);
    order_after();
    return static_cast<int>(fiber.result);
  }
  unsigned result = 0;
  switch (vote) {
    case Vote::kNone:
      break;
    case Vote::kAny:
      result = votes_ > 0;
      break;
    case Vote::kAll:
      result = votes_ == threads_;
      break;
    case Vote::kCount:
      result = votes_;
      break;
  }
  at_barrier_ = 0;
  for (unsigned i = threads_; i-- > 0;) {
    if (at(i).state != State::kBarrier) continue;
    at(i).state = State::kRunnable;
    at(i).result = result;
    runnable_.push_back(i);
  }
  order_after();
  return static_cast<int>(result);
}

// ---- warp-wide operations ----

uint64_t combine(WarpOp op, uint64_t a, uint64_t b) {
  switch (op) {
    case WarpOp::kAdd:
      return static_cast<uint32_t>(a + b);
    case WarpOp::kMin:
      return std::min(a, b);
    case WarpOp::kMax:
      return std::max(a, b);
    case WarpOp::kAnd:
    case WarpOp::kAll:
      return a & b;
    case WarpOp::kXor:
      return a ^ b;
    default:
      return a | b;
  }
}

void Worker::complete(const Group& group, unsigned warp, Fiber& last) {
  const unsigned first = warp * kWarp;
  uint64_t all = 0;
  bool started = false;
  for (unsigned lanes = group.mask; lanes != 0; lanes &= lanes - 1) {
    const Fiber& fiber = at(first + static_cast<unsigned>(std::countr_zero(lanes)));
    const uint64_t value = group.op == WarpOp::kBallot ? fiber.value << fiber.lane() : fiber.value;
    all = started ? combine(group.op, all, value) : value;
    started = true;
  }
  for (unsigned lanes = group.mask; lanes != 0; lanes &= lanes - 1) {
    Fiber& fiber = at(first + static_cast<unsigned>(std::countr_zero(lanes)));
    fiber.result = all;
    if (group.op == WarpOp::kShuffle) {
      if ((group.mask >> fiber.source & 1) == 0) {
        fail(last,
             sentence("shuffle at %s:%u: lane %u reads lane %u, which mask %#x leaves out",
                      group.site.file, group.site.line, fiber.lane(), fiber.source, group.mask));
      }
      fiber.result = at(first + fiber.source).value;
    }
  }
  for (unsigned lanes = group.mask; lanes != 0; lanes &= lanes - 1) {
    Fiber& fiber = at(first + static_cast<unsigned>(std::countr_zero(lanes)));
    if (&fiber == &last) continue;
    fiber.state = State::kRunnable;
    runnable_.push_back(fiber.index);
  }
}

uint64_t Worker::warp_operation(Fiber& fiber, WarpOp op, unsigned mask, uint64_t value,
                                unsigned source, Site site) {
  const unsigned warp = fiber.index / kWarp;
  const unsigned lanes = std::min(kWarp, threads_ - warp * kWarp);
  const unsigned present = lanes == kWarp ? ~0u : (1u << lanes) - 1;
  // A whole warp may be named where the block ends within it.
  mask &= mask == ~0u ? present : ~0u;
  if ((mask & ~present) != 0 || (mask >> fiber.lane() & 1) == 0) {
    fail(fiber, sentence("warp-wide operation at %s:%u: mask %#x %s", site.file, site.line, mask,
                         (mask & ~present) != 0 ? "names lanes that the block has not"
                                                : "leaves out the calling lane"));
  }
  fiber.value = value;
  fiber.source = source;
  std::vector<Group>& groups = groups_[warp];
  auto group = std::find_if(groups.begin(), groups.end(),
                            [&](const Group& waiting) { return (waiting.mask & mask) != 0; });
  if (group == groups.end()) {
    group = groups.insert(groups.end(), Group{.mask = mask, .op = op, .site = site});
  } else if (group->mask != mask || group->op != op || group->site.line != site.line ||
             group->site.file != site.file) {
    fail(fiber,
         sentence("warp-wide operation at %s:%u with mask %#x: lanes that it names wait at "
                  "%s:%u with mask %#x",
                  site.file, site.line, mask, group->site.file, group->site.line, group->mask));
  }
  group->arrived |= 1u << fiber.lane();
  order_before();
  if (group->arrived != mask) {
    fiber.state = State::kWarpOp;
    fiber.site = site;
    fiber.mask = mask;
    leave(fiber);
  } else {
    const Group whole = *group;
    groups.erase(group);
    complete(whole, warp, fiber);
  }
  order_after();
  return fiber.result;
}

// ---- blocks ----

void Worker::report_deadlock() {
  const auto where = [](const Fiber& fiber) {
    return fiber.state == State::kExited
               ? std::string("has exited")
               : sentence("waits at %s:%u", fiber.site.file, fiber.site.line);
  };
  for (unsigned i = 0; i < threads_; ++i) {
    const Fiber& fiber = at(i);
    if (fiber.state == State::kBarrier) {
      for (unsigned other = 0; other < threads_; ++other) {
        if (at(other).state == State::kBarrier) continue;
        const Dim& absent = at(other).indices.thread;
        run_->fail(fiber.indices, sentence("divergent barrier at %s:%u: thread (%u, %u, %u) %s",
                                           fiber.site.file, fiber.site.line, absent.x, absent.y,
                                           absent.z, where(at(other)).c_str()));
        return;
      }
    }
    if (fiber.state != State::kWarpOp) continue;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if ((fiber.mask >> lane & 1) == 0) continue;
      const Fiber& other = at(i / kWarp * kWarp + lane);
      if (other.state == State::kWarpOp) continue;
      run_->fail(
          fiber.indices,
          sentence("warp-wide operation at %s:%u: mask %#x names lane %u, which %s",
                   fiber.site.file, fiber.site.line, fiber.mask, lane, where(other).c_str()));
      return;
    }
  }
}

unsigned Worker::take_runnable() {
  if (run_->seed != 0) {
    std::swap(runnable_[random_() % runnable_.size()], runnable_.back());
  }
  const unsigned index = runnable_.back();
  runnable_.pop_back();
  return index;
}

void Worker::check_dynamic_shared() {
  const unsigned char* const guard = dynamic_shared + run_->launch.dynamic_shared_bytes;
  const unsigned char* const end = guard + kSharedGuard;
  const unsigned char* const written =
      std::find_if(guard, end, [](unsigned char byte) { return byte != kGuardByte; });
  if (written == end) return;
  run_->fail(at(0).indices,
             sentence("a thread of this block wrote byte %td of %zu bytes of dynamic "
                      "shared memory",
                      written - dynamic_shared, run_->launch.dynamic_shared_bytes));
}

void Worker::run_block(size_t block) {
  const Launch& launch = run_->launch;
  const Indices common{.thread = {},
                       .block = index_of(block, launch.grid),
                       .block_dim = launch.block,
                       .grid_dim = launch.grid};
  exited_ = at_barrier_ = 0;
  runnable_.clear();
  for (unsigned i = threads_; i-- > 0;) {
    Fiber& fiber = at(i);
    fiber.indices = common;
    fiber.indices.thread = index_of(i, launch.block);
    fiber.worker = this;
    fiber.index = i;
    fiber.state = State::kRunnable;
    runnable_.push_back(i);
  }
  for (std::vector<Group>& groups : groups_) groups.clear();
  random_.seed(static_cast<uint32_t>(run_->seed * 0x9e3779b97f4a7c15u >> 32) +
               static_cast<uint32_t>(block));
  std::fill_n(dynamic_shared + launch.dynamic_shared_bytes, kSharedGuard, kGuardByte);
  order_before();
  while (!runnable_.empty()) {
    Fiber& fiber = at(take_runnable());
    resume(fiber);
    if (fiber.state == State::kFailed) break;
  }
  order_after();
  if (run_->failed.load(std::memory_order_relaxed)) return;
  if (exited_ < threads_) {
    report_deadlock();
  } else {
    check_dynamic_shared();
  }
}

void Worker::work(Run& run) {
  run_ = &run;
  threads_ = static_cast<unsigned>(run.launch.block.count());
  while (fibers_.size() < threads_) fibers_.push_back(std::make_unique<Fiber>());
  groups_.resize((threads_ + kWarp - 1) / kWarp);
  const size_t left_out = run.launch.grid.count() - run.blocks;
  while (!run.failed.load(std::memory_order_relaxed)) {
    const size_t next = run.next.fetch_add(1, std::memory_order_relaxed);
    if (next >= run.blocks) return;
    const size_t i = run.order.empty() ? next : run.order[next];
    run_block(i < run.left_out_at ? i : i + left_out);
  }
  // Where a block stopped in its middle its fibers are of no more use.
  fibers_.clear();
}

// Workers that no grid uses. Nothing of it is made at run time or destroyed: a program may end
// while a grid runs.
constinit std::mutex idle_mutex;
constinit Worker* idle_workers = nullptr;

Worker* take_worker() {
  std::lock_guard lock(idle_mutex);
  if (idle_workers == nullptr) return new Worker;
  return std::exchange(idle_workers, idle_workers->next_idle);
}

void give_back(Worker* worker) {
  std::lock_guard lock(idle_mutex);
  worker->next_idle = std::exchange(idle_workers, worker);
}

void work_on(Run& run) {
  Worker* const worker = take_worker();
  worker->work(run);
  give_back(worker);
}

Fiber& current_fiber() { return *reinterpret_cast<Fiber*>(const_cast<Indices*>(current_indices)); }

std::string check_launch(const Launch& launch) {
  const size_t threads = launch.block.count();
  if (threads == 0 || threads > kMaxBlockThreads || launch.grid.count() == 0 ||
      launch.grid.count() > 0x7fffffff || launch.grid.y > 65535 || launch.grid.z > 65535 ||
      launch.dynamic_shared_bytes > kMaxDynamicShared) {
    return sentence(
        "%s: no device runs %zu blocks of %zu threads with %zu bytes of dynamic shared "
        "memory",
        kernel_name(launch.kernel).c_str(), launch.grid.count(), threads,
        launch.dynamic_shared_bytes);
  }
  return {};
}

}  // namespace

// ---- what the device functions are made of ----

int block_barrier(Vote vote, bool predicate, Site site) {
  Fiber& fiber = current_fiber();
  return fiber.worker->barrier(fiber, vote, predicate, site);
}

uint64_t warp_operation(WarpOp op, unsigned mask, uint64_t value, unsigned source, Site site) {
  Fiber& fiber = current_fiber();
  return fiber.worker->warp_operation(fiber, op, mask, value, source, site);
}

unsigned lane() { return current_fiber().lane(); }

// ---- grids ----

void set_order(uint64_t seed) { order_seed.store(seed, std::memory_order_relaxed); }

void set_ends(size_t blocks) { end_blocks.store(blocks, std::memory_order_relaxed); }

std::string run_grid(const Launch& launch, const std::function<void()>& thread) {
  if (std::string wrong = check_launch(launch); !wrong.empty()) return wrong;
  const size_t ends = end_blocks.load(std::memory_order_relaxed);
  const bool in_part = ends > 0 && launch.grid.count() > 2 * ends;
  const size_t blocks = in_part ? 2 * ends : launch.grid.count();
  Run run{.launch = launch,
          .thread = thread,
          .seed = order_seed.load(std::memory_order_relaxed),
          .blocks = blocks,
          .left_out_at = in_part ? ends : blocks,
          .order = {},
          .mutex = {},
          .error = {}};
  if (run.seed != 0 && blocks > 1) {
    run.order.resize(blocks);
    std::iota(run.order.begin(), run.order.end(), 0u);
    std::shuffle(run.order.begin(), run.order.end(), std::minstd_rand(run.seed % 0x7fffffff));
  }
  std::vector<std::thread> helpers;
  if (blocks >= kBlocksToShare) {
    const unsigned processors = std::clamp(std::thread::hardware_concurrency(), 1u, kMaxWorkers);
    for (unsigned i = 1; i < processors; ++i) helpers.emplace_back([&] { work_on(run); });
  }
  work_on(run);
  for (std::thread& helper : helpers) helper.join();
  return run.error;
}

}  // namespace simgpu

// ---- arrays of known size ----

// CUDA sources are compiled with -fsanitize=bounds, which calls this; there is no other part of
// that sanitizer's library in the program.
#if !defined(SIMGPU_UBSAN)
struct BoundsCheck {
  const char* file;
  uint32_t line, column;
};

extern "C" [[noreturn]] void __ubsan_handle_out_of_bounds_abort(const BoundsCheck* check,
                                                                uintptr_t index);
extern "C" [[noreturn]] void __ubsan_handle_out_of_bounds_abort(const BoundsCheck* check,
                                                                uintptr_t index) {
  using namespace simgpu;
  std::string what = sentence("index %zd is outside the array at %s:%u",
                              static_cast<ssize_t>(index), check->file, check->line);
  if (current_indices != nullptr) current_fiber().worker->fail(current_fiber(), std::move(what));
  std::fprintf(stderr, "simgpu: %s\n", what.c_str());
  std::abort();
}
#endif
