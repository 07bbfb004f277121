// Ranks as processes with a real host communicator between them.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "plugin/communicator.h"

namespace scape::plugin::test {

// Forks `ranks` processes, makes a host communicator over them and runs the body in each. A text
// that a body returns, an error in between, and a process that does not end in time fail the test.
void run_host_ranks(int ranks,
                    const std::function<std::string(std::shared_ptr<Communicator>)>& body,
                    double limit_s = 60);

}  // namespace scape::plugin::test
