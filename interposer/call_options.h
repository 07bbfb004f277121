// What a call itself says of its buffer: Scape's options in NCCL 2.32's ncclCollConfig_t.
#pragma once

#include "base/status.h"
#include "nccl/api.h"
#include "scape/scape.h"

namespace scape::interposer {

struct CallOptions {
  bool present = false;  // the call has a Scape option; its name is then set
  // As scape_register() takes it; strings are the caller's, and last as long as the call.
  scape_config config{};
};

// Reads Scape's options from the list in `config` (scape.h, "Options of a single call"), where
// there is one; those of other vendors are theirs. ARGUMENT for an option that is unknown, given
// twice or without a value, for options without SCAPE_CALL_NAME, and for a list without an end. The
// values are checked with the registration they make.
Status read_call_options(const nccl::ncclCollConfig_t* config, CallOptions* out);

// The same for collectives that are never sparse: USAGE where there are any.
Status refuse_call_options(const nccl::ncclCollConfig_t* config);

}  // namespace scape::interposer
