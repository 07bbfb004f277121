#include "plugin/net/engine.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/settings.h"
#include "plugin/net/call.h"
#include "plugin/net/connection.h"
#include "plugin/net/handshake.h"
#include "plugin/net/nccl_log.h"
#include "plugin/net/statistics.h"

namespace scape::net {
namespace {

// Connections that NCCL may make on a device; nothing here sets a limit.
constexpr int kMaxConnections = 65536;
// What NCCL takes for the largest there is.
constexpr size_t kMaxBytes = size_t{1} << 40;
// Connections that knock at once; more wait in the system's queue.
constexpr size_t kMaxGreetings = 256;
constexpr double kGreetingTimeout = 10;

// What belongs to one NCCL communicator (or to all, for NCCL that does not tell them apart): its
// workers, and connections that are being made.
class Context {
 public:
  Status worker(const Device& device, std::shared_ptr<Worker>* out) {
    const Devices* devices = nullptr;
    SCAPE_RETURN_IF_ERROR(find_devices(&devices));
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::weak_ptr<Worker>>& workers = workers_[&device];
    std::erase_if(workers, [](const std::weak_ptr<Worker>& worker) { return worker.expired(); });
    for (const std::weak_ptr<Worker>& kept : workers) {
      std::shared_ptr<Worker> worker = kept.lock();
      if (worker != nullptr && worker->take_place()) {
        *out = std::move(worker);
        return Status::Ok();
      }
    }
    std::shared_ptr<Worker> made;
    SCAPE_RETURN_IF_ERROR(Worker::make(*devices, device, &made));
    made->take_place();
    workers.push_back(made);
    *out = std::move(made);
    return Status::Ok();
  }

  // Dials are known by a number, which stands in the caller's handle between calls.
  uint64_t add(std::unique_ptr<Dial> dial) {
    std::lock_guard<std::mutex> lock(mutex_);
    dials_.emplace(++last_dial_, std::move(dial));
    return last_dial_;
  }
  // Takes it out, so that it is one caller's; null where there is none of this number.
  std::unique_ptr<Dial> take(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = dials_.find(number);
    if (found == dials_.end()) return nullptr;
    std::unique_ptr<Dial> dial = std::move(found->second);
    dials_.erase(found);
    return dial;
  }

 private:
  std::mutex mutex_;
  std::map<const Device*, std::vector<std::weak_ptr<Worker>>> workers_;
  std::map<uint64_t, std::unique_ptr<Dial>> dials_;
  uint64_t last_dial_ = 0;
};

// What NCCL holds of a context.
struct ContextHandle {
  std::shared_ptr<Context> context;
};
std::atomic<int> contexts{0};  // that NCCL holds

std::shared_ptr<Context> context_of(void* handle) {
  if (handle != nullptr) return static_cast<ContextHandle*>(handle)->context;
  static auto* const shared = new std::shared_ptr<Context>(std::make_shared<Context>());
  return *shared;
}

class Listener {
 public:
  static Status make(std::shared_ptr<Context> context, const Devices& devices, const Device& device,
                     Invitation* invitation, std::unique_ptr<Listener>* out) {
    auto listener = std::make_unique<Listener>();
    listener->context_ = std::move(context);
    listener->device_ = &device;
    listener->counters_ = &counters_of(devices, device);
    SCAPE_RETURN_IF_ERROR(open_door(devices.library, &listener->socket_, invitation));
    listener->addresses_ = invitation->endpoint.addresses;
    listener->invitation_ = *invitation;
    *out = std::move(listener);
    return Status::Ok();
  }

  DeviceCounters& counters() { return *counters_; }

  // One of those who knock, if it is ready.
  Status accept(std::unique_ptr<Connection>* out) {
    std::lock_guard<std::mutex> lock(mutex_);
    plugin::Socket socket;
    while (greetings_.size() < kMaxGreetings &&
           plugin::accept_connection(socket_, addresses_, &socket)) {
      greetings_.emplace_back(std::exchange(socket, plugin::Socket()), kGreetingTimeout);
    }
    const auto worker = [&](std::shared_ptr<Worker>* taken) {
      return context_->worker(*device_, taken);
    };
    for (auto greeting = greetings_.begin(); greeting != greetings_.end();) {
      bool stranger = false;
      const Status status = greeting->step(invitation_, worker, out, &stranger);
      if (status.ok() && *out == nullptr) {
        ++greeting;
        continue;
      }
      greeting = greetings_.erase(greeting);
      if (*out != nullptr) return Status::Ok();
      if (!stranger) return status;
      NET_INFO("a connection to port %u is dropped: %s", invitation_.endpoint.port,
               status.message().c_str());
    }
    return Status::Ok();
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Context> context_;
  const Device* device_ = nullptr;
  DeviceCounters* counters_ = nullptr;
  std::vector<plugin::Address> addresses_;
  plugin::Socket socket_;
  Invitation invitation_;
  std::list<Greeting> greetings_;
};

uint64_t dial_in(const void* handle) {
  uint64_t number = 0;
  std::memcpy(&number, static_cast<const std::byte*>(handle) + Invitation::kBytes, sizeof number);
  return number;
}

void put_dial(void* handle, uint64_t number) {
  std::memcpy(static_cast<std::byte*>(handle) + Invitation::kBytes, &number, sizeof number);
}

Status connect_step(Context* context, const Device& device, void* handle,
                    std::unique_ptr<Connection>* out) {
  uint64_t number = dial_in(handle);
  std::unique_ptr<Dial> dial;
  if (number == 0) {
    Invitation invitation;
    SCAPE_RETURN_IF_ERROR(Invitation::read(handle, &invitation));
    std::shared_ptr<Worker> worker;
    SCAPE_RETURN_IF_ERROR(context->worker(device, &worker));
    dial = std::make_unique<Dial>(std::move(worker), std::move(invitation),
                                  settings().bootstrap_timeout_s);
  } else {
    dial = context->take(number);
    if (dial == nullptr) {
      return error(SCAPE_ERR_ARGUMENT,
                   "connect: the handle names a connection that is not being made; pass it on as "
                   "listen wrote it");
    }
  }
  put_dial(handle, 0);
  SCAPE_RETURN_IF_ERROR(dial->step(out));
  if (*out == nullptr) put_dial(handle, context->add(std::move(dial)));
  return Status::Ok();
}

int close_connection(void* comm, const char* call) {
  return guarded(false, [&] {
    if (comm == nullptr) return null_argument(call, "the connection");
    Connection::close(std::unique_ptr<Connection>(static_cast<Connection*>(comm)));
    return Status::Ok();
  });
}

}  // namespace

int init(net_logger logger, void** context) {
  if (logger != nullptr) set_logger(logger);
  return guarded(false, [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(settings_status());
    const Devices* devices = nullptr;
    SCAPE_RETURN_IF_ERROR(find_devices(&devices));
    start_statistics(*devices);
    if (context == nullptr) return Status::Ok();
    *context = new ContextHandle{std::make_shared<Context>()};
    ++contexts;
    return Status::Ok();
  });
}

int finalize(void* context) {
  return guarded(false, [&] {
    if (context != nullptr) {
      delete static_cast<ContextHandle*>(context);
      if (--contexts == 0) uncount_joined_devices();
    }
    write_statistics();
    return Status::Ok();
  });
}

int devices(Face face, int* count) {
  return guarded(false, [&]() -> Status {
    if (count == nullptr) return null_argument("devices", "ndev");
    *count = 0;
    return count_devices(face, count);
  });
}

int make_device(Face face, const int* members, int count, int limit, int* device) {
  return guarded(false, [&]() -> Status {
    if (members == nullptr) return null_argument("makeVDevice", "props");
    if (device == nullptr) return null_argument("makeVDevice", "d");
    return join_devices(face, members, count, limit, device);
  });
}

int properties(Face face, int device, Properties* out) {
  return guarded(false, [&]() -> Status {
    const Devices* devices = nullptr;
    const Device* found = nullptr;
    SCAPE_RETURN_IF_ERROR(find_device(face, device, &devices, &found));
    *out = {};
    out->name = found->transport.name.c_str();
    out->pci_path = found->pci_path.empty() ? nullptr : found->pci_path.c_str();
    out->guid = found->guid;
    out->speed_mbps = found->speed_mbps;
    out->port = found->port;
    out->latency_us = 0;  // neither library says
    out->max_comms = kMaxConnections;
    out->max_bytes = std::min(found->transport.largest_message, kMaxBytes);
    out->members = found->members.data();
    out->member_count = static_cast<int>(found->members.size());
    return Status::Ok();
  });
}

int listen(void* context, int device, void* handle, void** listen_comm) {
  return guarded(false, [&]() -> Status {
    if (handle == nullptr) return null_argument("listen", "handle");
    if (listen_comm == nullptr) return null_argument("listen", "listenComm");
    *listen_comm = nullptr;
    const Devices* devices = nullptr;
    const Device* found = nullptr;
    SCAPE_RETURN_IF_ERROR(find_device(Face::kNet, device, &devices, &found));
    Invitation invitation;
    std::unique_ptr<Listener> listener;
    SCAPE_RETURN_IF_ERROR(
        Listener::make(context_of(context), *devices, *found, &invitation, &listener));
    SCAPE_RETURN_IF_ERROR(invitation.write(handle));
    *listen_comm = listener.release();
    return Status::Ok();
  });
}

int connect(void* context, int device, void* handle, void** send_comm) {
  return guarded(false, [&]() -> Status {
    if (handle == nullptr) return null_argument("connect", "handle");
    if (send_comm == nullptr) return null_argument("connect", "sendComm");
    *send_comm = nullptr;
    const Devices* devices = nullptr;
    const Device* found = nullptr;
    SCAPE_RETURN_IF_ERROR(find_device(Face::kNet, device, &devices, &found));
    std::unique_ptr<Connection> connection;
    Status status = connect_step(context_of(context).get(), *found, handle, &connection);
    DeviceCounters& counters = counters_of(*devices, *found);
    if (!status.ok()) {
      counters.errors[Error::kConnect].add();
    } else if (connection == nullptr) {
      counters.retries[Retry::kConnect].add();
    }
    *send_comm = connection.release();
    return status;
  });
}

int accept(void* listen_comm, void** receive_comm) {
  return guarded(false, [&]() -> Status {
    if (listen_comm == nullptr) return null_argument("accept", "listenComm");
    if (receive_comm == nullptr) return null_argument("accept", "recvComm");
    *receive_comm = nullptr;
    auto* const listener = static_cast<Listener*>(listen_comm);
    std::unique_ptr<Connection> connection;
    Status status = listener->accept(&connection);
    if (!status.ok()) {
      listener->counters().errors[Error::kAccept].add();
    } else if (connection == nullptr) {
      listener->counters().retries[Retry::kAccept].add();
    }
    *receive_comm = connection.release();
    return status;
  });
}

int close_listen(void* listen_comm) {
  return guarded(false, [&] {
    if (listen_comm == nullptr) return null_argument("closeListen", "listenComm");
    delete static_cast<Listener*>(listen_comm);
    return Status::Ok();
  });
}

int close_send(void* send_comm) { return close_connection(send_comm, "closeSend"); }
int close_receive(void* receive_comm) { return close_connection(receive_comm, "closeRecv"); }

int register_memory(void* comm, void* data, size_t bytes, int type, void** memory) {
  return guarded(false, [&]() -> Status {
    if (comm == nullptr) return null_argument("regMr", "comm");
    if (memory == nullptr) return null_argument("regMr", "mhandle");
    *memory = nullptr;
    SCAPE_RETURN_IF_ERROR(check_memory(data, bytes, type));
    Registration* registration = nullptr;
    SCAPE_RETURN_IF_ERROR(
        static_cast<Connection*>(comm)->register_memory(data, bytes, &registration));
    *memory = registration;
    return Status::Ok();
  });
}

int deregister_memory(void* comm, void* memory) {
  return guarded(false, [&]() -> Status {
    if (comm == nullptr) return null_argument("deregMr", "comm");
    if (memory == nullptr) return null_argument("deregMr", "mhandle");
    return static_cast<Connection*>(comm)->deregister_memory(static_cast<Registration*>(memory));
  });
}

int isend(void* send_comm, void* data, size_t bytes, int tag, void* memory, void** request) {
  if (request == nullptr || send_comm == nullptr || (data == nullptr && bytes > 0)) {
    return guarded(false, [&] {
      return null_argument("isend", request == nullptr     ? "request"
                                    : send_comm == nullptr ? "sendComm"
                                                           : "data");
    });
  }
  *request = nullptr;
  auto* const connection = static_cast<Connection*>(send_comm);
  if (!connection->sends()) return refuse("isend on a connection that receives");
  return guarded(true, [&] {
    Request* taken = nullptr;
    const Status status =
        connection->send(data, bytes, tag, static_cast<Registration*>(memory), &taken);
    *request = taken;
    return status;
  });
}

int irecv(void* receive_comm, int n, void* const* data, const size_t* bytes, const int* tags,
          void* const* memories, void** request) {
  if (receive_comm == nullptr || request == nullptr || data == nullptr || bytes == nullptr ||
      tags == nullptr) {
    return guarded(false, [&] { return null_argument("irecv", "an argument"); });
  }
  *request = nullptr;
  if (n < 1 || n > NET_MAX_RECEIVES) {
    return guarded(false, [&] {
      return error(SCAPE_ERR_ARGUMENT, "irecv: a group of %d receives; 1 to %d can be", n,
                   NET_MAX_RECEIVES);
    });
  }
  auto* const connection = static_cast<Connection*>(receive_comm);
  if (connection->sends()) return refuse("irecv on a connection that sends");
  return guarded(true, [&] {
    Request* taken = nullptr;
    Registration* registrations[NET_MAX_RECEIVES] = {};
    for (int i = 0; memories != nullptr && i < n; ++i) {
      registrations[i] = static_cast<Registration*>(memories[i]);
    }
    const Status status = connection->receive(n, data, bytes, tags, registrations, &taken);
    *request = taken;
    return status;
  });
}

int test(void* request, int* done, int* sizes) {
  if (request == nullptr || done == nullptr) {
    return guarded(false,
                   [&] { return null_argument("test", request == nullptr ? "request" : "done"); });
  }
  *done = 0;
  return guarded(true, [&] {
    bool ended = false;
    const Status status = Connection::test(static_cast<Request*>(request), &ended, sizes);
    *done = ended;
    return status;
  });
}

int refuse(const char* what) {
  return guarded(false, [&] { return error(SCAPE_ERR_USAGE, "%s: this plugin cannot", what); });
}

}  // namespace scape::net
