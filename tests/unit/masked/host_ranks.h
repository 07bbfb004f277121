// Ranks as processes with a real host communicator between them.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "plugin/communicator.h"

namespace scape::plugin::test {

// Forks `ranks` processes with these variables set, makes a host communicator over them and runs
// the body in each. A text that a body returns, an error in between, and a process that does not
// end in time fail the test.
void run_host_ranks(int ranks,
                    const std::function<std::string(std::shared_ptr<Communicator>)>& body,
                    double limit_s = 60,
                    const std::map<std::string, std::string>& environment = {});

}  // namespace scape::plugin::test
