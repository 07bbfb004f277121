// One rank's run of a masked buffer next to the simulation of all ranks, compared bit by bit at
// each step.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "plugin/communicator.h"
#include "plugin/masked/engine.h"
#include "plugin/masked/masked_buffer.h"
#include "plugin/masked/refresher.h"

namespace scape::plugin::test {

struct Scenario {
  BufferConfig config;
  size_t count = 500;
  int steps = 50;
  ReduceOp op = ReduceOp::kAvg;
  bool out_of_place = false;  // roles that allow it
  bool inject_nonfinite = false;
  int flush_at = -1;   // after this many steps
  int reload_at = -1;  // save, make a new buffer and load, after this many steps
  std::optional<scape_residual> reload_to =
      std::nullopt;  // where the new buffer keeps its residual
  double weight_decay = 0.1;
  bool shared = false;  // the communicator's ranks share memory
  // The engine never tells what the data decided, as on a device. On host memory one is made for
  // it.
  bool blind = false;
  uint64_t seed = 1;
};

// A short schedule: 3 dense steps, a ramp until step 8.
BufferConfig short_config(double sparsity, scape_role role);

// Names the scenario in a failure.
std::string describe(const Scenario& scenario, int ranks);

// One rank, and the place where its buffers are.
struct Rank {
  // On host memory.
  explicit Rank(std::shared_ptr<Communicator> host);
  Rank(std::shared_ptr<Communicator> c, std::shared_ptr<Refresher> r,
       std::function<std::shared_ptr<Engine>()> e, Stream s)
      : communicator(std::move(c)), refresher(std::move(r)), make_engine(std::move(e)), stream(s) {}

  std::unique_ptr<MaskedBuffer> make(const BufferConfig& config, size_t count) const {
    return make_masked_buffer(make_engine(), communicator, refresher, config, count);
  }

  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Refresher> refresher;
  std::function<std::shared_ptr<Engine>()> make_engine;
  Stream stream;
};

// Empty when everything was equal; else what differed first. *digest, if not null, becomes a
// checksum of all that the buffer gave: the same in each run.
std::string run_scenario(const Rank& rank, const Scenario& scenario, uint32_t* digest = nullptr);

}  // namespace scape::plugin::test
