// Whether enough file descriptors are left.
#pragma once

#include "base/status.h"

namespace scape::plugin {

// An error that names the transport and the remedy where fewer than `needed` can be opened. What
// network libraries do when they run out half-way is not to be relied on.
Status check_descriptors(const char* transport, int needed);

}  // namespace scape::plugin
