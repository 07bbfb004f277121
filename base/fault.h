// Points at which a process can be made to die (SCAPE_FAULT), so that tests show how the others
// take it, wherever a rank is.
#pragma once

#include "base/settings.h"

namespace scape {

// Numbered as the choices of SCAPE_FAULT.
enum class Fault : int {
  kNone = 0,
  kMeeting,      // has said who it is, knows nobody yet
  kConnecting,   // knows the others, has reached none
  kConnected,    // the communicator is there
  kDense,        // a dense collective is under way
  kAgreement,    // a buffer's first call is under way, with the agreement behind it
  kSideChannel,  // the side channel is being made
  kShare,        // memory shared with the ranks of the host is being made
  kPack,         // before a masked call packs
  kExchange,     // its payload is under way
  kUnpack,       // the payload is there
  kStep,         // before the optimizer step that follows
  kSelect,       // the progress thread chooses bits
  kMasks,        // the masks are under way
  kClosing,      // the communicator is being destroyed
};

namespace detail {
void pass_fault();
}

// The process ends here by SIGKILL when it was told to.
inline void fault_point(Fault point) {
  if (settings().fault == static_cast<int>(point)) [[unlikely]]
    detail::pass_fault();
}

}  // namespace scape
