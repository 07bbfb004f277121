// Ranks as threads of one process: communicators whose collectives meet in shared memory.
//
// Lets the masked collective be tested over many sizes in a second, and under thread sanitizer. The
// sums come from simulate_all_reduce(), so they have the order that the real communicators
// document.
#pragma once

#include <functional>
#include <memory>

#include "plugin/communicator.h"

namespace scape::plugin::test {

// One communicator per rank.
std::vector<std::shared_ptr<Communicator>> make_local_group(int ranks);

// Runs body(communicator) of each rank in a thread of its own and joins them.
void run_local(int ranks, const std::function<void(std::shared_ptr<Communicator>)>& body);

}  // namespace scape::plugin::test
