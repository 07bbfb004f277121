// A worker of the network plugin for the targets that greet: on the first device there is, made
// anew now and then, since it remembers every peer.
#pragma once

#include "plugin/net/worker.h"
#include "tests/fuzz/input.h"

namespace scape::fuzz {

inline std::shared_ptr<net::Worker> a_worker() {
  static std::shared_ptr<net::Worker> worker;
  static int greetings = 0;
  if (greetings++ % 4096 == 0) {
    const net::Devices* devices = nullptr;
    require(net::find_devices(&devices).ok() &&
                net::Worker::make(*devices, devices->list[0], &worker).ok(),
            "no device");
  }
  require(worker->take_place(), "no place");
  return worker;
}

}  // namespace scape::fuzz
