// One rank's run of a masked buffer next to the simulation of all ranks, compared bit by bit at
// each step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "plugin/communicator.h"
#include "plugin/masked/masked_buffer.h"

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
  double weight_decay = 0.1;
  bool shared = false;  // the communicator's ranks share memory
  bool blind = false;   // the engine never tells what the data decided, as on a device
  uint64_t seed = 1;
};

// A short schedule: 3 dense steps, a ramp until step 8.
BufferConfig short_config(double sparsity, scape_role role);

// Names the scenario in a failure.
std::string describe(const Scenario& scenario, int ranks);

// Empty when everything was equal; else what differed first. *digest, if not null, becomes a
// checksum of all that the buffer gave: the same in each run.
std::string run_scenario(std::shared_ptr<Communicator> communicator, const Scenario& scenario,
                         uint32_t* digest = nullptr);

}  // namespace scape::plugin::test
