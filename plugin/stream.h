// Where work on memory is ordered, without the headers of any device.
#pragma once

namespace scape::plugin {

// A device's stream; null where work is done when its call returns, as on the host. Not owned.
struct Stream {
  void* handle = nullptr;
};

}  // namespace scape::plugin
