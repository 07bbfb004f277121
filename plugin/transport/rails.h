// A transport over several network devices: one transport on each, and large messages cut over
// them.
//
// Receives must be as long as what is sent, which is so between the ranks of a communicator: tags
// tell their calls apart. So both sides cut alike, and nothing but the parts travels. Short
// messages go whole over one of the devices, which the tag decides.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "plugin/transport/transport.h"

namespace scape::plugin {

inline constexpr size_t kMaxTransportRails = 8;
// Longer messages are cut.
inline constexpr size_t kCutFrom = size_t{64} << 10;

// Part `i` of `count` of a message: its beginning and length. Alike, on whole pages.
struct MessagePart {
  size_t begin = 0, bytes = 0;
};
MessagePart message_part(size_t bytes, size_t i, size_t count);

// On these devices of the module's, at most kMaxTransportRails.
Status make_rails(const TransportModule& module, const TransportOptions& options,
                  std::span<const std::string> devices, std::unique_ptr<Transport>* out);

}  // namespace scape::plugin
