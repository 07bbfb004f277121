// What carries the messages that net_perf measures: the plugin, or a network library that is called
// directly. All have the plugin's habits: nothing waits, and whoever wants a message to move asks
// for it again.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "perf/common/control.h"

namespace scape::perf {

inline constexpr int kMaxGroup = 8;    // receives in one request
inline constexpr int kMaxWindow = 32;  // requests under way on a connection

// Where the messages of each connection lie: on both sides `bytes` per connection, one after the
// other.
struct Areas {
  int connections = 0;
  size_t bytes = 0;
  std::byte* send = nullptr;
  std::byte* receive = nullptr;
};

enum class Answer { kNotNow, kDone, kFailed };

// A send, or a group of receives, under way.
struct Request {
  bool receives = false;
  int count = 0;
  void* handles[kMaxGroup] = {};  // the carrier's
  size_t sizes[kMaxGroup] = {};   // of what was received
};

class Carrier {
 public:
  virtual ~Carrier() = default;

  virtual const std::string& name() const = 0;

  // Collective, over two ranks: makes the connections, each in both directions, and tells the
  // library of the memory.
  virtual Status open(Control& control, const Areas& areas) = 0;
  // Collective: ends them.
  virtual Status close(Control& control) = 0;

  // The next message of a tag on a connection. kNotNow: nothing has begun; ask again.
  virtual Answer send(int connection, void* data, size_t bytes, int tag, Request* request) = 0;
  virtual Answer receive(int connection, int count, void** data, const size_t* bytes, int* tags,
                         Request* request) = 0;
  // kDone: the request is over, and may be used again.
  virtual Answer test(Request* request) = 0;

  // Why the last answer was kFailed.
  virtual Status failure() const = 0;
};

// The plugin, loaded as NCCL loads it.
struct PluginChoice {
  std::string path;                // empty: ../lib/libnccl-net-scape.so beside this program
  int version = 0;                 // of the interface; 0: the newest that it has
  std::vector<int> devices = {0};  // several are joined to one
};
struct PluginInfo {
  std::string path;
  int version = 0;
  int number = 0;  // of the device
  std::string device;
  int speed_mbps = 0;
};
Status make_plugin_carrier(const PluginChoice& choice, PluginInfo* info,
                           std::unique_ptr<Carrier>* out);

// Tagged messages over UCP or libfabric, on the device of this name where the library knows it. Not
// there when the library's headers were not at build time: then the error says so.
Status make_ucp_carrier(const std::string& device, std::unique_ptr<Carrier>* out);
Status make_ofi_carrier(const std::string& device, std::unique_ptr<Carrier>* out);

// Collective: each rank's bytes, of any number; the other rank's come out.
Status exchange(Control& control, const std::string& mine, std::string* theirs);

}  // namespace scape::perf
