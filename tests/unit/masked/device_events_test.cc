// What a device's ranks wait for and what they do not, and what happens when something is wrong.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <simgpu.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "device_ranks.h"
#include "plugin/masked/array.h"

namespace scape::plugin::test {
namespace {

constexpr size_t kCount = 3000;

BufferConfig at_once(double sparsity) {
  BufferConfig config = short_config(sparsity, SCAPE_ROLE_FUSED);
  config.dense_steps = 1;
  config.ramp_steps = 1;
  return config;
}

// A rank's fused steps, none of which waits by itself.
class Training {
 public:
  Training(const DeviceRank& rank, const BufferConfig& config)
      : rank_(rank),
        buffer_(rank.make(config, kCount)),
        memory_(rank.make_engine()),
        gradient_(*memory_),
        param_(*memory_) {
    std::vector<float> values(kCount);
    for (size_t j = 0; j < kCount; ++j)
      values[j] =
          static_cast<float>((j * 13 + static_cast<size_t>(rank.communicator->rank())) % 17);
    set_gradient(values);
    param_.fill(kCount, std::byte{0}, rank_.stream);
  }

  void set_gradient(const std::vector<float>& values) {
    gradient_.assign(values.data(), kCount, rank_.stream);
  }

  Status reduce() {
    SCAPE_RETURN_IF_ERROR(
        buffer_->begin_all_reduce(gradient_.data(), nullptr, {ReduceOp::kAvg}, rank_.stream));
    drive(*rank_.communicator, [&] { return buffer_->poll(); });
    return buffer_->status();
  }

  Status finish(double learning_rate = 1e-2) {
    return buffer_->adams_step(param_.data(), learning_rate, 0.1, rank_.stream);
  }

  Status step(double learning_rate = 1e-2) {
    SCAPE_RETURN_IF_ERROR(reduce());
    return finish(learning_rate);
  }

  Status steps(int n) {
    for (int i = 0; i < n; ++i) SCAPE_RETURN_IF_ERROR(step());
    return Status::Ok();
  }

  // Waits for the device without a call that counts as waiting.
  void idle() const {
    while (cudaStreamQuery(static_cast<cudaStream_t>(rank_.stream.handle)) == cudaErrorNotReady)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  std::vector<float> param() const { return param_.to_host(rank_.stream); }
  MaskedBuffer& buffer() { return *buffer_; }

 private:
  const DeviceRank& rank_;
  const std::unique_ptr<MaskedBuffer> buffer_;
  const std::shared_ptr<Engine> memory_;
  Array<float> gradient_;
  Array<float> param_;
};

// Holds up what a stream gets from now on, until it is opened.
class Gate {
 public:
  explicit Gate(Stream stream) {
    // The stream's own, since it may look once more when this is gone.
    auto* const state = new std::shared_ptr<std::atomic<bool>>(open_);
    EXPECT_EQ(cudaLaunchHostFunc(
                  static_cast<cudaStream_t>(stream.handle),
                  [](void* argument) {
                    const std::unique_ptr<std::shared_ptr<std::atomic<bool>>> open(
                        static_cast<std::shared_ptr<std::atomic<bool>>*>(argument));
                    while (!**open) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                  },
                  state),
              cudaSuccess);
  }
  void open() { *open_ = true; }

 private:
  const std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

#define EXPECT_OK(expression)                                 \
  do {                                                        \
    const Status expected_ok_ = (expression);                 \
    EXPECT_TRUE(expected_ok_.ok()) << expected_ok_.message(); \
  } while (0)

void expect_no_waiting(scape_residual residual) {
  std::barrier together(2);
  run_device_ranks(2, [&](const DeviceRank& rank) {
    BufferConfig config = at_once(0.9);
    config.residual = residual;
    Training training(rank, config);
    EXPECT_OK(training.steps(8));
    training.idle();
    together.arrive_and_wait();
    simgpu_counters before{}, after{};
    simgpu_get_counters(&before);
    together.arrive_and_wait();
    for (int t = 0; t < 6; ++t) {
      EXPECT_OK(training.step());
      training.idle();
      EXPECT_EQ(training.buffer().stats().skipped_steps, 0u);
    }
    together.arrive_and_wait();
    simgpu_get_counters(&after);
    together.arrive_and_wait();
    EXPECT_EQ(after.host_syncs, before.host_syncs);
    EXPECT_EQ(after.allocations, before.allocations);
    EXPECT_EQ(after.frees, before.frees);
    EXPECT_EQ(after.stream_creates, before.stream_creates);
    EXPECT_EQ(after.event_creates, before.event_creates);
    EXPECT_GT(after.kernels, before.kernels);
  });
}

TEST(Waiting, NothingIsAllocatedAndNobodyWaitsAfterTheFirstSteps) {
  expect_no_waiting(SCAPE_RESIDUAL_INTERNAL);
}

TEST(Waiting, NorWithTheResidualInHostMemory) { expect_no_waiting(SCAPE_RESIDUAL_HOST); }

TEST(Waiting, TheHostRunsAheadOfADeviceThatStandsStill) {
  std::vector<std::vector<float>> params(2);
  run_device_ranks(2, [&](const DeviceRank& rank) {
    Training training(rank, at_once(0.9));
    EXPECT_OK(training.steps(6));
    training.idle();
    Gate gate(rank.stream);
    // More would have to wait for a table of weight decay to be copied.
    EXPECT_OK(training.steps(4));
    EXPECT_EQ(cudaStreamQuery(static_cast<cudaStream_t>(rank.stream.handle)), cudaErrorNotReady);
    gate.open();
    params[static_cast<size_t>(rank.communicator->rank())] = training.param();
  });
  EXPECT_EQ(params[0], params[1]);
}

// With a table of weight decay that is another one in each step.
TEST(Waiting, TheHostKeepsTablesUntilTheDeviceHasCopiedThem) {
  std::vector<float> params[2];
  for (const bool held_up : {false, true}) {
    run_device_ranks(2, [&](const DeviceRank& rank) {
      Training training(rank, at_once(0.9));
      EXPECT_OK(training.steps(6));
      training.idle();
      std::unique_ptr<Gate> gate;
      std::thread opener;
      std::atomic<int> begun{0};
      if (held_up) {
        gate = std::make_unique<Gate>(rank.stream);
        // Once the host gets no further.
        opener = std::thread([&] {
          for (int before = 0; begun != before || before < 5;) {
            before = begun;
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
          }
          gate->open();
        });
      }
      for (int t = 0; t < 10; ++t) {
        ++begun;
        EXPECT_OK(training.step(1e-2 * (t + 1)));
        if (!held_up) training.idle();
      }
      if (held_up) opener.join();
      if (rank.communicator->rank() == 0) params[held_up] = training.param();
    });
  }
  EXPECT_EQ(params[0], params[1]);
}

// ---- memory that was given back ----

TEST(Memory, ServesAgainBehindTheStreamThatUsedIt) {
  run_device_ranks(1, [](const DeviceRank& rank) {
    const auto owner = rank.make_engine(), other = rank.make_engine();
    for (const bool in_call : {true, false}) {
      const size_t bytes = size_t{1} << (in_call ? 20 : 22);
      void* const memory = owner->allocate(bytes, Home::kPlace);
      Gate gate(rank.stream);
      owner->set(rank.stream, memory, std::byte{1}, bytes);
      if (!in_call) owner->end_call(rank.stream);
      owner->release(memory, bytes);
      // Time for what nothing holds up to get where it may be taken.
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      void* const meanwhile = other->allocate(bytes, Home::kPlace);
      EXPECT_NE(meanwhile, memory);
      gate.open();
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      void* const later = other->allocate(bytes, Home::kPlace);
      EXPECT_EQ(later, memory);
      other->release(meanwhile, bytes);
      other->release(later, bytes);
    }
  });
}

TEST(Memory, IsGivenBackWithoutWaitingForTheStream) {
  run_device_ranks(2, [](const DeviceRank& rank) {
    auto training = std::make_unique<Training>(rank, at_once(0.9));
    EXPECT_OK(training->steps(4));
    Gate gate(rank.stream);
    EXPECT_OK(training->step());
    training.reset();
    EXPECT_EQ(cudaStreamQuery(static_cast<cudaStream_t>(rank.stream.handle)), cudaErrorNotReady);
    gate.open();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  });
}

// Rank 1's score is late, so that rank 0's refresh waits for it; nothing else of rank 0 does.
TEST(Memory, ServesAgainBehindTheRefreshThatUsedIt) {
  std::barrier together(2);
  run_device_ranks(2, [&](const DeviceRank& rank) {
    const auto engine = rank.make_engine();
    auto training = std::make_unique<Training>(rank, at_once(0.9));
    EXPECT_OK(training->steps(4));
    EXPECT_OK(training->reduce());
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    together.arrive_and_wait();
    const bool late = rank.communicator->rank() == 1;
    std::unique_ptr<Gate> gate;
    if (late) gate = std::make_unique<Gate>(rank.stream);
    EXPECT_OK(training->finish());
    if (late) {
      together.arrive_and_wait();
      together.arrive_and_wait();
      gate->open();
    } else {
      training->idle();
      together.arrive_and_wait();
      std::vector<void*> taken;
      const auto is_fresh = [&] {
        simgpu_counters before{}, after{};
        simgpu_get_counters(&before);
        taken.push_back(engine->allocate(kCount * sizeof(float), Home::kPlace));
        simgpu_get_counters(&after);
        return after.allocations > before.allocations;
      };
      while (!is_fresh()) {
        // What earlier steps gave back.
      }
      training.reset();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_TRUE(is_fresh());
      together.arrive_and_wait();
      EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_FALSE(is_fresh());
      for (void* memory : taken) engine->release(memory, kCount * sizeof(float));
    }
  });
}

TEST(Counters, TellOfSkipsOnceTheDeviceHasGotThere) {
  run_device_ranks(2, [&](const DeviceRank& rank) {
    Training training(rank, at_once(0.9));
    EXPECT_OK(training.steps(2));
    std::vector<float> values(kCount, 1);
    if (rank.communicator->rank() == 1) values[7] = std::numeric_limits<float>::quiet_NaN();
    training.set_gradient(values);
    EXPECT_OK(training.step());
    training.set_gradient(std::vector<float>(kCount, 1));
    EXPECT_OK(training.steps(3));
    (void)training.param();
    const scape_stats stats = training.buffer().stats();
    EXPECT_EQ(stats.skipped_steps, 1u);
    EXPECT_LE(stats.nonfinite_values, rank.communicator->rank() == 1 ? 1u : 0u);
  });
}

TEST(Agreement, FailsOnEveryRankInTheSameWordsAndLeavesTheCommunicatorAlone) {
  std::vector<Status> errors(2);
  run_device_ranks(2, [&](const DeviceRank& rank) {
    const auto r = static_cast<size_t>(rank.communicator->rank());
    Training training(rank, at_once(r == 0 ? 0.9 : 0.8));
    EXPECT_OK(training.step());
    errors[r] = training.step();
    const auto memory = rank.make_engine();
    Array<float> value(*memory);
    const float one = 1;
    value.assign(&one, 1, rank.stream);
    EXPECT_EQ(rank.nccl.AllReduce(value.data(), value.data(), 1, nccl::ncclFloat32, nccl::ncclSum,
                                  rank.comm, static_cast<nccl::cudaStream_t>(rank.stream.handle)),
              nccl::ncclSuccess);
    EXPECT_EQ(value.to_host(rank.stream)[0], 2);
  });
  EXPECT_EQ(errors[0].code(), SCAPE_ERR_MISMATCH) << errors[0].message();
  EXPECT_NE(errors[0].message().find("rank 1 has 0.8"), std::string::npos) << errors[0].message();
  EXPECT_EQ(errors[0].message(), errors[1].message());
}

TEST(Agreement, NamesPlacesOfTheResidualThatDiffer) {
  std::vector<Status> errors(2);
  run_device_ranks(2, [&](const DeviceRank& rank) {
    const auto r = static_cast<size_t>(rank.communicator->rank());
    BufferConfig config = at_once(0.9);
    if (r == 1) config.residual = SCAPE_RESIDUAL_HOST;
    Training training(rank, config);
    EXPECT_OK(training.step());
    errors[r] = training.step();
  });
  EXPECT_EQ(errors[0].code(), SCAPE_ERR_MISMATCH) << errors[0].message();
  EXPECT_NE(errors[0].message().find("residual: rank 0 has internal, rank 1 has host memory"),
            std::string::npos)
      << errors[0].message();
  EXPECT_EQ(errors[0].message(), errors[1].message());
}

// ---- residuals in host memory while the host runs ahead ----

// Several chunks of SCAPE_RESIDUAL_CHUNK.
constexpr size_t kManyChunks = 5 * 2048 + 77;
constexpr int kSteps = 10;

// A buffer of the gradient role on a stream of its own, whose gradients are on the device before
// the first call.
class Lane {
 public:
  Lane(const DeviceRank& rank, const char* name, scape_residual residual)
      : rank_(rank), memory_(rank.make_engine()) {
    BufferConfig config = at_once(0.9);
    config.role = SCAPE_ROLE_GRADIENT;
    config.name = name;
    config.residual = residual;
    buffer_ = rank.make(config, kManyChunks);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    for (int t = 0; t < kSteps; ++t) {
      std::vector<float> values(kManyChunks);
      for (size_t j = 0; j < kManyChunks; ++j) {
        const size_t h = j * 2654435761u + static_cast<size_t>(t) * 40503u +
                         static_cast<size_t>(rank.communicator->rank()) * 977u;
        values[j] = static_cast<float>(h / 7 % 2003) - 1001;
      }
      gradients_.emplace_back(*memory_).assign(values.data(), kManyChunks, {stream_});
      results_.emplace_back(*memory_).resize(kManyChunks);
    }
  }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;
  ~Lane() {
    buffer_.reset();
    EXPECT_EQ(cudaStreamDestroy(stream_), cudaSuccess);
  }

  void step(int t) {
    const auto i = static_cast<size_t>(t);
    EXPECT_OK(buffer_->begin_all_reduce(gradients_[i].data(), results_[i].data(), {ReduceOp::kAvg},
                                        {stream_}));
    drive(*rank_.communicator, [&] { return buffer_->poll(); });
    EXPECT_OK(buffer_->status());
  }

  // The last residual, and the results of all steps.
  std::vector<float> outcome() {
    std::vector<float> all(kManyChunks);
    EXPECT_OK(buffer_->read_residual(all.data(), kManyChunks));
    for (const Array<float>& result : results_) {
      const std::vector<float> values = result.to_host({stream_});
      all.insert(all.end(), values.begin(), values.end());
    }
    return all;
  }

 private:
  const DeviceRank& rank_;
  const std::shared_ptr<Engine> memory_;
  std::unique_ptr<MaskedBuffer> buffer_;
  cudaStream_t stream_ = nullptr;
  std::vector<Array<float>> gradients_, results_;
};

// Two buffers, whose steps take turns.
std::vector<float> outcome_of_two(const DeviceRank& rank, const char* name,
                                  scape_residual residual) {
  Lane a(rank, format("%s.a", name).c_str(), residual);
  Lane b(rank, format("%s.b", name).c_str(), residual);
  for (int t = 0; t < kSteps; ++t) {
    a.step(t);
    b.step(t);
  }
  std::vector<float> outcome = a.outcome();
  for (const float value : b.outcome()) outcome.push_back(value);
  return outcome;
}

TEST(HostResidual, HasTheBitsOfDeviceMemoryWhileTheHostRunsAhead) {
  run_device_ranks(2, [](const DeviceRank& rank) {
    const std::vector<float> expected = outcome_of_two(rank, "device", SCAPE_RESIDUAL_INTERNAL);
    for (int round = 0; round < 2; ++round) {
      const std::vector<float> found =
          outcome_of_two(rank, format("host.%d", round).c_str(), SCAPE_RESIDUAL_HOST);
      EXPECT_TRUE(found == expected) << "round " << round;
    }
  });
}

// The device's memory that a buffer has taken after a few steps, of rank 0.
size_t device_memory_of(scape_residual residual) {
  size_t taken = 0;
  std::barrier together(2);
  run_device_ranks(2, [&](const DeviceRank& rank) {
    size_t before = 0, after = 0, total = 0;
    EXPECT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
    {
      Lane lane(rank, "measured", residual);
      for (int t = 0; t < 4; ++t) lane.step(t);
      (void)lane.outcome();
      EXPECT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
    }
    if (rank.communicator->rank() == 0) taken = before - after;
    together.arrive_and_wait();
  });
  return taken;
}

TEST(HostResidual, TakesNoMemoryOfTheDeviceButTheChunks) {
  constexpr size_t kChunkBytes = 8192;  // SCAPE_RESIDUAL_CHUNK here
  EXPECT_EQ(
      device_memory_of(SCAPE_RESIDUAL_INTERNAL) - kManyChunks * sizeof(float) + 2 * kChunkBytes,
      device_memory_of(SCAPE_RESIDUAL_HOST));
}

// Copies that nobody waited for are no danger to who gets the memory next.
TEST(HostResidual, IsGivenBackBehindItsCopies) {
  run_device_ranks(1, [](const DeviceRank& rank) {
    const auto engine = rank.make_engine();
    Array<float> gradient(*engine), payload(*engine);
    Array<uint16_t> last(*engine), ages(*engine);
    Array<uint64_t> mask(*engine);
    gradient.assign(std::vector<float>(kManyChunks, 3).data(), kManyChunks, rank.stream);
    payload.resize(kManyChunks);
    last.fill(kManyChunks, std::byte{0}, rank.stream);
    ages.resize(kManyChunks);
    mask.resize(kernels::mask_words(kManyChunks));
    engine->set_all_bits(rank.stream, mask.data(), kManyChunks);
    const auto is_clear = [&](const Array<float>& residual) {
      return residual.to_host(rank.stream) == std::vector<float>(kManyChunks);
    };
    std::vector<Array<float>> kept;  // so that nothing but a round's memory serves again
    for (int round = 0; round < 12; ++round) {
      const float* before = nullptr;
      {
        Array<float> residual(*engine, Home::kHost);
        residual.fill(kManyChunks, std::byte{0}, rank.stream);
        StepView step;
        step.stream = rank.stream;
        step.count = step.masked = kManyChunks;
        step.last = last.data();
        step.residual = residual.data();
        step.mask = mask.data();
        step.ages = ages.data();
        engine->pack(step, gradient.data(), payload.data());
        engine->end_call(rank.stream);
        before = residual.data();
      }
      do {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        kept.emplace_back(*engine, Home::kHost).resize(kManyChunks);
      } while (kept.back().data() != before);
      Array<float>& again = kept.back();
      const std::vector<float> zeros(kManyChunks);
      again.assign(zeros.data(), kManyChunks, rank.stream);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      EXPECT_TRUE(is_clear(again)) << "round " << round;
    }
    EXPECT_OK(engine->failure());
  });
}

// Page-locked memory ends behind that of the engines themselves: its own ctest entry.
TEST(NoHostMemory, IsSaidWithWhatToDo) {
  std::barrier together(2);
  run_device_ranks(2, [&](const DeviceRank& rank) {
    BufferConfig config = at_once(0.9);
    config.residual = SCAPE_RESIDUAL_HOST;
    Training training(rank, config);
    together.arrive_and_wait();
    const Status status = training.step();
    EXPECT_EQ(status.code(), SCAPE_ERR_MEMORY) << status.message();
    for (const char* part : {"12000 bytes", "SCAPE_RESIDUAL=device"})
      EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
    together.arrive_and_wait();
  });
}

TEST(Concurrency, SeveralBuffersInFlightAreStartedInOneOrder) {
  // Calls that begin together and are polled in another order on each rank.
  std::vector<std::vector<std::vector<float>>> results(2);
  run_device_ranks(2, [&](const DeviceRank& rank) {
    const auto memory = rank.make_engine();
    std::vector<std::unique_ptr<MaskedBuffer>> buffers;
    std::vector<Array<float>> data;
    for (size_t b = 0; b < 4; ++b) {
      BufferConfig config = at_once(0.9);
      config.role = b % 2 == 0 ? SCAPE_ROLE_GRADIENT : SCAPE_ROLE_FIRST_MOMENT;
      config.name = format("buffer.%zu", b);
      buffers.push_back(rank.make(config, 100 + 300 * b));
      std::vector<float> values;
      for (size_t j = 0; j < 100 + 300 * b; ++j) values.push_back(static_cast<float>(j % 23));
      data.emplace_back(*memory).assign(values.data(), values.size(), rank.stream);
    }
    for (int t = 0; t < 10; ++t) {
      for (size_t b = 0; b < buffers.size(); ++b) {
        EXPECT_OK(buffers[b]->begin_all_reduce(data[b].data(), data[b].data(), {ReduceOp::kAvg},
                                               rank.stream));
      }
      for (bool over = false; !over;) {
        over = true;
        for (size_t i = 0; i < buffers.size(); ++i) {
          const size_t b = rank.communicator->rank() == 0 ? i : buffers.size() - 1 - i;
          over = buffers[b]->poll() && over;
        }
        std::this_thread::yield();
      }
      for (const auto& buffer : buffers) EXPECT_OK(buffer->status());
    }
    auto& mine = results[static_cast<size_t>(rank.communicator->rank())];
    for (const Array<float>& values : data) mine.push_back(values.to_host(rank.stream));
  });
  EXPECT_EQ(results[0], results[1]);
}

TEST(Streams, MayBeGoneAfterACall) {
  std::vector<std::vector<float>> results(2);
  run_device_ranks(2, [&](const DeviceRank& rank) {
    const auto memory = rank.make_engine();
    const auto buffer = [&] {
      BufferConfig config = at_once(0.9);
      config.role = SCAPE_ROLE_GRADIENT;
      return rank.make(config, kCount);
    }();
    Array<float> data(*memory);
    const std::vector<float> values(kCount, 3);
    data.assign(values.data(), kCount, rank.stream);
    for (int t = 0; t < 6; ++t) {
      cudaStream_t stream = nullptr;
      EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      EXPECT_OK(buffer->begin_all_reduce(data.data(), data.data(), {ReduceOp::kAvg}, {stream}));
      drive(*rank.communicator, [&] { return buffer->poll(); });
      EXPECT_OK(buffer->status());
      if (t == 3) {
        std::vector<std::byte> saved;
        EXPECT_OK(buffer->save(&saved));
      }
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    }
    auto& mine = results[static_cast<size_t>(rank.communicator->rank())];
    mine.resize(kCount);
    EXPECT_OK(buffer->read_moment(mine.data(), kCount));
  });
  EXPECT_EQ(results[0], results[1]);
  EXPECT_NE(results[0], std::vector<float>(kCount));
}

TEST(HookedRole, PostStepScalesTheChangeOfMaskedParametersByTheirAgeAndHoldsTheOthers) {
  run_device_ranks(2, [](const DeviceRank& rank) {
    const size_t n = 333;
    BufferConfig config = at_once(0.9);
    config.role = SCAPE_ROLE_GRADIENT_HOOKED;
    const auto buffer = rank.make(config, n);
    const auto memory = rank.make_engine();
    Array<float> data(*memory), device_before(*memory), param(*memory);
    for (int t = 0; t < 15; ++t) {
      std::vector<float> values(n);
      for (size_t j = 0; j < n; ++j)
        values[j] = static_cast<float>((j * 13 + static_cast<size_t>(t)) % 11);
      data.assign(values.data(), n, rank.stream);
      EXPECT_OK(buffer->begin_all_reduce(data.data(), data.data(), {ReduceOp::kAvg}, rank.stream));
      drive(*rank.communicator, [&] { return buffer->poll(); });
      EXPECT_OK(buffer->status());
    }
    std::vector<uint64_t> mask(kernels::mask_words(n));
    std::vector<uint16_t> ages(n);
    EXPECT_OK(buffer->read_mask(mask.data(), mask.size()));
    EXPECT_OK(buffer->read_ages(ages.data(), n));
    std::vector<float> before(n), after(n), expected(n);
    size_t scaled = 0;
    for (size_t j = 0; j < n; ++j) {
      before[j] = 1 + static_cast<float>(j) / 100;
      after[j] = before[j] - 0.25f;
      const bool masked = (mask[j / 64] >> (j % 64)) & 1;
      const float decayed = before[j] * 0.75f;
      const float scaled_step = decayed + static_cast<float>(ages[j]) * (after[j] - decayed);
      expected[j] = !masked ? decayed : ages[j] == 1 ? after[j] : scaled_step;
      scaled += masked && ages[j] > 1;
    }
    EXPECT_GT(scaled, 0u);
    device_before.assign(before.data(), n, rank.stream);
    param.assign(after.data(), n, rank.stream);
    for (size_t begin = 0; begin < n;) {
      const size_t length = std::min(n - begin, 1 + begin % 97);
      EXPECT_OK(buffer->post_step(begin, length, device_before.data() + begin, param.data() + begin,
                                  0.5, 0.5, rank.stream));
      begin += length;
    }
    EXPECT_EQ(param.to_host(rank.stream), expected);
  });
}

// Rank 1 takes part in the first all-reduce and in the making of the side communicator only. Its
// own ctest entry, with a short SCAPE_TIMEOUT.
TEST(Silence, OfARankEndsTheSecondCallAndLeavesTheCommunicatorAlone) {
  std::barrier together(2);
  run_device_ranks(2, [&](const DeviceRank& rank) {
    const auto stream = static_cast<nccl::cudaStream_t>(rank.stream.handle);
    const auto memory = rank.make_engine();
    Array<float> values(*memory);
    values.fill(kCount, std::byte{0}, rank.stream);
    if (rank.communicator->rank() == 0) {
      Training training(rank, at_once(0.9));
      EXPECT_OK(training.step());
      const Status status = training.step();
      EXPECT_FALSE(status.ok());
      EXPECT_EQ(training.step().message(), status.message()) << "later calls fail at once";
      together.arrive_and_wait();
    } else {
      EXPECT_EQ(rank.nccl.AllReduce(values.data(), values.data(), kCount, nccl::ncclFloat32,
                                    nccl::ncclAvg, rank.comm, stream),
                nccl::ncclSuccess);
      nccl::ncclComm_t side = nullptr;
      EXPECT_EQ(rank.nccl.CommSplit(rank.comm, 0, 1, &side, nullptr), nccl::ncclSuccess);
      together.arrive_and_wait();
      EXPECT_EQ(rank.nccl.CommAbort(side), nccl::ncclSuccess);
    }
    const std::vector<float> ones(kCount, 1);
    values.assign(ones.data(), kCount, rank.stream);
    EXPECT_EQ(rank.nccl.AllReduce(values.data(), values.data(), kCount, nccl::ncclFloat32,
                                  nccl::ncclSum, rank.comm, stream),
              nccl::ncclSuccess);
    EXPECT_EQ(values.to_host(rank.stream)[5], 2);
  });
}

TEST(Masks, ThatAreDamagedKeepTheirNumberOfBitsAndAreTold) {
  run_device_ranks(1, [](const DeviceRank& rank) {
    const auto engine = rank.make_engine();
    const size_t n = 130, k = 40;
    const Partition part{0, n};
    Array<uint64_t> mask(*engine), code(*engine);
    mask.fill(3, std::byte{0}, rank.stream);
    const uint64_t words[] = {0, ~uint64_t{0}, ~uint64_t{0}};  // too many, and beyond the end
    code.assign(words, 3, rank.stream);
    const auto take = [&] {
      return engine->take_masks(rank.stream, {&part, 1}, {&k, 1},
                                reinterpret_cast<const std::byte*>(code.data()), sizeof(words),
                                mask.data());
    };
    EXPECT_EQ(take(), -1);
    engine->end_call(rank.stream);
    EXPECT_EQ(mask.to_host(rank.stream), (std::vector<uint64_t>{(uint64_t{1} << k) - 1, 0, 0}));
    EXPECT_EQ(take(), 0);
    EXPECT_OK(engine->failure());
  });
}

// The device is broken until the process ends: its own ctest entry.
TEST(Failure, OfTheDeviceEndsTheBuffer) {
  run_device_ranks(1, [](const DeviceRank& rank) {
    Training training(rank, at_once(0.9));
    EXPECT_OK(training.step());
    simgpu_break_device(0, cudaErrorIllegalAddress);
    Status status;
    for (int t = 0; t < 3 && status.ok(); ++t) status = training.step();
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("illegal"), std::string::npos) << status.message();
  });
}

}  // namespace
}  // namespace scape::plugin::test
