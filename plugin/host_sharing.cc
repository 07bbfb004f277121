// Payloads in memory that ranks of one host share.
#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "base/fault.h"
#include "base/log.h"
#include "base/settings.h"
#include "plugin/host_communicator_impl.h"
#include "plugin/transport/host_digest.h"

namespace scape::plugin {
namespace {

// What each rank tells the others first, and then: whether it has all that it needs.
struct Offer {
  uint64_t host = 0;
  uint64_t willing = 0;
  MemoryTicket ticket;
};

// A payload in the making.
struct Making {
  size_t capacity = 0;
  SharedLayout layout;
  size_t host = 0, me = 0;
  Offer mine;
  std::vector<Offer> all;
  uint8_t have = 0;
  std::vector<uint8_t> all_have;
  std::unique_ptr<SharedMemory> memory;
  Status problem;
  WorkPtr step;
};

size_t needed(const Making& making) {
  return (making.layout.hosts[making.host].size() + 1) * making.layout.stride;
}

// The ranks of each host, in the order of their first ranks.
void find_hosts(int rank, Making* making) {
  std::map<uint64_t, size_t> known;
  auto& hosts = making->layout.hosts;
  for (size_t r = 0; r < making->all.size(); ++r) {
    const size_t host = known.emplace(making->all[r].host, hosts.size()).first->second;
    if (host == hosts.size()) hosts.emplace_back();
    if (static_cast<int>(r) == rank) {
      making->host = host;
      making->me = hosts[host].size();
    }
    hosts[host].push_back(static_cast<int>(r));
  }
}

// The host's first rank takes its memory from the system, the others open that.
Status come_together(Making* making) {
  if (making->me == 0) return making->memory->reserve(needed(*making));
  const auto first = static_cast<size_t>(making->layout.hosts[making->host].front());
  return SharedMemory::open(making->all[first].ticket, needed(*making), &making->memory);
}

class HostSharingWork final : public OwnedWork<SharingWork> {
 public:
  std::shared_ptr<SharedPayload> payload() const override { return payload_; }
  void set(std::shared_ptr<SharedPayload> payload) { payload_ = std::move(payload); }

 private:
  std::shared_ptr<SharedPayload> payload_;
};

void tell_why_not(std::string_view communicator, std::ptrdiff_t rank, const Status& problem) {
  SCAPE_WARN("%.*s: payloads go through the transport: rank %td shares no memory%s%s",
             static_cast<int>(communicator.size()), communicator.data(), rank,
             problem.ok() ? "" : "; ", problem.message().c_str());
}

}  // namespace

Status HostCommunicator::share_payload(size_t bytes, std::shared_ptr<SharingWork>* work) {
  constexpr size_t kPage = 4096;
  auto made = std::make_shared<HostSharingWork>();
  *work = made;
  if (size_ == 1) {
    made->end(Status::Ok());
    return Status::Ok();
  }
  SCAPE_RETURN_IF_ERROR(check_process("share payload"));
  const auto ranks = static_cast<size_t>(size_);
  if (bytes > SIZE_MAX / 4 / (ranks + 1)) {
    return error(SCAPE_ERR_ARGUMENT,
                 "%s: a shared payload of %zu bytes is more than memory can hold", name_.c_str(),
                 bytes);
  }
  auto making = std::make_shared<Making>();
  making->capacity = bytes;
  making->layout.stride = (bytes + kPage - 1) / kPage * kPage;
  making->all.resize(ranks);
  making->all_have.resize(ranks);
  making->mine.host = host_digest();
  // Whoever turns out to be the first of its host has it ready then.
  if (settings().shared_memory) {
    making->problem = SharedMemory::create((ranks + 1) * making->layout.stride, &making->memory);
  }
  if (making->memory != nullptr) {
    making->mine.willing = 1;
    making->mine.ticket = making->memory->ticket();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  SCAPE_RETURN_IF_ERROR(gather_bytes(&making->mine, making->all.data(), sizeof making->mine,
                                     "share payload", &making->step));
  followups_.push_back([this, making, made] {
    if (!making->step->done()) return false;
    Status status = making->step->status();
    const bool knows_hosts = !making->layout.hosts.empty();
    if (status.ok() && !knows_hosts) {
      find_hosts(rank_, making.get());
      const auto unwilling = std::find_if(making->all.begin(), making->all.end(),
                                          [](const Offer& offer) { return offer.willing == 0; });
      if (making->layout.hosts.size() == making->all.size()) {
        // No two ranks share a host.
      } else if (unwilling != making->all.end()) {
        if (settings().shared_memory)
          tell_why_not(name_, unwilling - making->all.begin(), making->problem);
      } else {
        fault_point(Fault::kShare);
        making->problem = come_together(making.get());
        making->have = making->problem.ok() ? 1 : 0;
        status =
            gather_bytes(&making->have, making->all_have.data(), 1, "share payload", &making->step);
        if (status.ok()) return false;
      }
    } else if (status.ok()) {
      const auto without = std::find(making->all_have.begin(), making->all_have.end(), 0);
      if (without == making->all_have.end()) {
        making->memory->retire();
        made->set(std::make_shared<HostSharedPayload>(std::move(making->memory), making->layout,
                                                      making->host, making->me, making->capacity));
      } else {
        tell_why_not(name_, without - making->all_have.begin(), making->problem);
      }
    }
    making->memory.reset();
    made->end(std::move(status));
    return true;
  });
  return Status::Ok();
}

Status HostCommunicator::gather_bytes(const void* mine, void* all, size_t bytes, const char* name,
                                      WorkPtr* work) {
  Arguments arguments;
  arguments.call = kAllGather;
  arguments.send = mine;
  arguments.recv = all;
  arguments.count = bytes;
  arguments.type = DataType::kUint8;
  return start_locked(arguments, {false, name}, work);
}

Status HostCommunicator::all_reduce(SharedPayload& payload, size_t count, DataType type,
                                    Reduction reduction, const CallTag& tag, WorkPtr* work) {
  auto& shared = static_cast<HostSharedPayload&>(payload);
  Arguments arguments;
  arguments.call = kSharedAllReduce;
  arguments.count = count;
  arguments.type = type;
  arguments.reduction = reduction;
  arguments.shared = &shared;
  SCAPE_RETURN_IF_ERROR(check(arguments));
  if (count * size_of(type) > shared.capacity() || !shared.can_reduce(type, reduction.op)) {
    return error(SCAPE_ERR_USAGE,
                 "%s: a shared payload of %zu bytes cannot take %zu elements of %s for %s",
                 name_.c_str(), shared.capacity(), count, plugin::name_of(type),
                 plugin::name_of(reduction.op));
  }
  return start(arguments, tag, work);
}

}  // namespace scape::plugin
