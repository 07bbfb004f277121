// How communicators are made: side channels, and the ways of NCCL.
#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "base/fault.h"
#include "base/settings.h"
#include "plugin/host_communicator.h"
#include "plugin/host_communicator_impl.h"
#include "plugin/transport/bootstrap.h"

namespace scape::plugin {
namespace {

constexpr size_t kAddressSlot = size_t{16} << 10;

// A meeting of all ranks, and what this one brings to it.
struct Meeting {
  Endpoint root;
  uint64_t cookie = 0;
  bool at_rank_0 = false;             // rank 0 holds it, else who made the unique id
  const Socket* root_door = nullptr;  // on a rank 0 that holds it: where it listens
  int rank = 0, size = 1;
  std::string purpose, transport_name;
  std::unique_ptr<Transport> transport;
  Socket listener;  // of this rank, for its lifeline
  Endpoint endpoint;
};

// Meets the other ranks and builds the communicator.
Status establish(Meeting* meeting, std::shared_ptr<Communicator>* out) {
  const double timeout = settings().bootstrap_timeout_s;
  Attendance mine;
  mine.rank = meeting->rank;
  mine.size = meeting->size;
  mine.transport = std::move(meeting->transport_name);
  mine.purpose = std::move(meeting->purpose);
  mine.listener = meeting->endpoint;
  SCAPE_RETURN_IF_ERROR(meeting->transport->address(&mine.blob));
  std::vector<Member> members;
  if (meeting->root_door != nullptr) {
    SCAPE_RETURN_IF_ERROR(hold_meeting(*meeting->root_door, meeting->root.addresses,
                                       meeting->cookie, mine, timeout, &members));
  } else {
    SCAPE_RETURN_IF_ERROR(attend_meeting(meeting->root, meeting->cookie, meeting->at_rank_0, mine,
                                         timeout, &members));
  }
  std::vector<std::vector<std::byte>> addresses;
  std::vector<Endpoint> endpoints;
  for (Member& member : members) {
    addresses.push_back(std::move(member.blob));
    endpoints.push_back(std::move(member.listener));
  }
  fault_point(Fault::kConnecting);
  SCAPE_RETURN_IF_ERROR(meeting->transport->connect(addresses));
  std::shared_ptr<Lifeline> lifeline;
  SCAPE_RETURN_IF_ERROR(Lifeline::connect(
      meeting->rank, meeting->size, mix(meeting->cookie, 0), std::move(meeting->listener),
      meeting->endpoint.addresses, std::move(endpoints), seconds_from_now(timeout), &lifeline));
  *out = std::make_shared<HostCommunicator>(meeting->rank, meeting->size, meeting->cookie, 0,
                                            std::move(meeting->transport), std::move(lifeline));
  fault_point(Fault::kConnected);
  return Status::Ok();
}

// What host mode brings: the chosen transport, and a new listener.
Status prepare(Meeting* meeting) {
  TransportOptions options;
  options.ranks = meeting->size;
  SCAPE_RETURN_IF_ERROR(make_transport(options, &meeting->transport));
  meeting->transport_name = chosen_transport();
  SCAPE_RETURN_IF_ERROR(choose_addresses(settings().socket_ifname, settings().socket_family,
                                         &meeting->endpoint.addresses));
  return listen_on(meeting->endpoint.addresses, &meeting->listener, &meeting->endpoint.port);
}

Status check_rank(int rank, int size) {
  if (size >= 1 && size <= kMaxRanks && rank >= 0 && rank < size) return Status::Ok();
  return error(SCAPE_ERR_ARGUMENT,
               "rank %d of %d is not possible: ranks are 0 .. size - 1, sizes 1 .. %d", rank, size,
               kMaxRanks);
}

HostCommunicator* as_host(Communicator& communicator) {
  return dynamic_cast<HostCommunicator*>(&communicator);
}

// Meets some of the parent's ranks (`members`, in their new order) at the first one's listener.
Status meet_again(HostCommunicator& parent, const std::vector<int>& members, uint64_t cookie,
                  const std::string& purpose, std::shared_ptr<Communicator>* out) {
  const auto me = std::find(members.begin(), members.end(), parent.rank());
  const int rank = static_cast<int>(me - members.begin()), size = static_cast<int>(members.size());
  if (size == 1) {
    *out = std::make_shared<HostCommunicator>(0, 1, cookie, 0, nullptr, nullptr);
    return Status::Ok();
  }
  const Lifeline& lifeline = *parent.lifeline();
  Meeting meeting;
  meeting.root = lifeline.members()[static_cast<size_t>(members.front())];
  meeting.cookie = cookie;
  meeting.at_rank_0 = true;
  if (rank == 0) meeting.root_door = &lifeline.listener();
  meeting.rank = rank;
  meeting.size = size;
  meeting.purpose = purpose;
  SCAPE_RETURN_IF_ERROR(prepare(&meeting));
  return establish(&meeting, out);
}

}  // namespace

Status HostCommunicator::side_channel(std::shared_ptr<Communicator>* side, WorkPtr* work) {
  if (channel_ != 0) return error(SCAPE_ERR_USAGE, "%s is a side channel itself", name_.c_str());
  const uint64_t cookie = mix(cookie_, next_offspring() + 1);
  auto made = std::make_shared<SimpleWork>();
  *work = made;
  if (size_ == 1) {
    *side = std::make_shared<HostCommunicator>(0, 1, cookie, 1, nullptr, nullptr);
    made->end(Status::Ok());
    return Status::Ok();
  }
  SCAPE_RETURN_IF_ERROR(check_process("side channel"));
  // Exchanges the addresses over this communicator, each in a slot of one size.
  struct Exchange {
    std::unique_ptr<Transport> transport;
    std::vector<std::byte> mine, all;
    WorkPtr gathering;
  };
  auto exchange = std::make_shared<Exchange>();
  TransportOptions options;
  options.wakeup = true;
  options.ranks = size_;
  SCAPE_RETURN_IF_ERROR(make_transport(options, &exchange->transport));
  std::vector<std::byte> address;
  SCAPE_RETURN_IF_ERROR(exchange->transport->address(&address));
  if (address.size() > kAddressSlot - sizeof(uint32_t)) {
    return error(SCAPE_ERR_SYSTEM,
                 "%s: a transport address of %zu bytes is longer than %zu; choose fewer devices "
                 "(UCX_NET_DEVICES)",
                 name_.c_str(), address.size(), kAddressSlot - sizeof(uint32_t));
  }
  fault_point(Fault::kSideChannel);
  const uint32_t length = static_cast<uint32_t>(address.size());
  exchange->mine.resize(kAddressSlot);
  std::memcpy(exchange->mine.data(), &length, sizeof length);
  std::memcpy(exchange->mine.data() + sizeof length, address.data(), length);
  exchange->all.resize(kAddressSlot * static_cast<size_t>(size_));
  SCAPE_RETURN_IF_ERROR(all_gather(exchange->mine.data(), exchange->all.data(), kAddressSlot,
                                   DataType::kUint8, {false, "side channel"},
                                   &exchange->gathering));
  std::lock_guard<std::mutex> lock(mutex_);
  followups_.push_back([this, exchange, made, side, cookie] {
    if (!exchange->gathering->done()) return false;
    if (Status status = exchange->gathering->status(); !status.ok()) {
      made->end(std::move(status));
      return true;
    }
    std::vector<std::vector<std::byte>> addresses;
    for (size_t q = 0; q < static_cast<size_t>(size_); ++q) {
      const std::byte* const slot = exchange->all.data() + q * kAddressSlot;
      uint32_t bytes;
      std::memcpy(&bytes, slot, sizeof bytes);
      addresses.emplace_back(
          slot + sizeof bytes,
          slot + sizeof bytes + std::min<size_t>(bytes, kAddressSlot - sizeof bytes));
    }
    Status status = exchange->transport->connect(addresses);
    if (status.ok()) {
      *side = std::make_shared<HostCommunicator>(rank_, size_, cookie, 1,
                                                 std::move(exchange->transport), lifeline_);
    }
    made->end(std::move(status));
    return true;
  });
  return Status::Ok();
}

Status make_unique_id(UniqueId* id) {
  SCAPE_RETURN_IF_ERROR(settings_status());
  Invitation invitation;
  SCAPE_RETURN_IF_ERROR(open_root(settings().bootstrap_timeout_s, &invitation));
  id->bytes = invitation.encode();
  return Status::Ok();
}

bool is_host_unique_id(const UniqueId& id) {
  Invitation invitation;
  return Invitation::decode(id.bytes, &invitation);
}

void drop_unique_id(const UniqueId& id) {
  Invitation invitation;
  if (Invitation::decode(id.bytes, &invitation)) leave_root(invitation.cookie, true);
}

Status create_communicator(const UniqueId& id, int rank, int size,
                           std::shared_ptr<Communicator>* out) {
  SCAPE_RETURN_IF_ERROR(settings_status());
  SCAPE_RETURN_IF_ERROR(check_rank(rank, size));
  Invitation invitation;
  if (!Invitation::decode(id.bytes, &invitation)) {
    return error(SCAPE_ERR_ARGUMENT,
                 "rank %d: the unique id is not one of scape's host mode; make it with "
                 "ncclGetUniqueId in a process with the same SCAPE_MODE",
                 rank);
  }
  if (invitation.version != Invitation::kVersion || invitation.mode != Invitation::kHostMode) {
    return error(SCAPE_ERR_MISMATCH,
                 "rank %d: the unique id is of version %u, mode %u; this library has version %u, "
                 "mode %u (host); use one "
                 "build and one SCAPE_MODE everywhere",
                 rank, invitation.version, invitation.mode, Invitation::kVersion,
                 Invitation::kHostMode);
  }
  if (size == 1) {
    leave_root(invitation.cookie, true);
    *out = std::make_shared<HostCommunicator>(0, 1, invitation.cookie, 0, nullptr, nullptr);
    return Status::Ok();
  }
  Meeting meeting;
  meeting.root = invitation.root;
  meeting.cookie = invitation.cookie;
  meeting.rank = rank;
  meeting.size = size;
  meeting.purpose = "create";
  Status status = prepare(&meeting);
  if (status.ok()) status = establish(&meeting, out);
  leave_root(invitation.cookie, false);
  return status;
}

Status join_communicator(Joining joining, std::shared_ptr<Communicator>* out) {
  SCAPE_RETURN_IF_ERROR(check_rank(joining.rank, joining.size));
  if (joining.size == 1) {
    *out = std::make_shared<HostCommunicator>(0, 1, joining.cookie, 0, nullptr, nullptr);
    return Status::Ok();
  }
  Meeting meeting;
  meeting.root = std::move(joining.root);
  meeting.cookie = joining.cookie;
  meeting.at_rank_0 = true;
  meeting.rank = joining.rank;
  meeting.size = joining.size;
  meeting.purpose = "join";
  meeting.transport_name = std::move(joining.transport_name);
  meeting.transport = std::move(joining.transport);
  meeting.listener = std::move(joining.listener);
  meeting.endpoint = std::move(joining.endpoint);
  if (joining.rank == 0) meeting.root_door = &meeting.listener;
  return establish(&meeting, out);
}

Status split_communicator(Communicator& parent, int color, int key,
                          std::shared_ptr<Communicator>* out) {
  HostCommunicator* const host = as_host(parent);
  if (host == nullptr)
    return error(SCAPE_ERR_ARGUMENT, "split: the parent is not a host communicator");
  struct Choice {
    int32_t color, key;
  };
  const Choice mine{color, key};
  std::vector<Choice> all(static_cast<size_t>(host->size()));
  WorkPtr work;
  SCAPE_RETURN_IF_ERROR(
      host->all_gather(&mine, all.data(), sizeof mine, DataType::kUint8, {false, "split"}, &work));
  SCAPE_RETURN_IF_ERROR(wait(*host, *work));
  const uint64_t offspring = host->next_offspring() + 1;
  out->reset();
  if (color < 0) return Status::Ok();
  std::vector<int> members;
  for (int r = 0; r < host->size(); ++r) {
    if (all[static_cast<size_t>(r)].color == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) {
    return all[static_cast<size_t>(a)].key < all[static_cast<size_t>(b)].key;
  });
  const uint64_t cookie = mix(mix(host->cookie(), offspring), static_cast<uint64_t>(color));
  return meet_again(*host, members, cookie, "split", out);
}

Status shrink_communicator(Communicator& parent, std::span<const int> excluded,
                           std::shared_ptr<Communicator>* out) {
  HostCommunicator* const host = as_host(parent);
  if (host == nullptr)
    return error(SCAPE_ERR_ARGUMENT, "shrink: the parent is not a host communicator");
  const std::set<int> out_of_it(excluded.begin(), excluded.end());
  std::string purpose = "shrink without";
  for (const int rank : out_of_it) {
    if (rank < 0 || rank >= host->size() || rank == host->rank()) {
      return error(SCAPE_ERR_ARGUMENT, "shrink: rank %d cannot be excluded on rank %d of %d", rank,
                   host->rank(), host->size());
    }
    purpose += format(" %d", rank);
  }
  std::vector<int> members;
  for (int r = 0; r < host->size(); ++r) {
    if (out_of_it.count(r) == 0) members.push_back(r);
  }
  const uint64_t cookie = mix(mix(host->cookie(), host->next_offspring() + 1), uint64_t{1} << 40);
  return meet_again(*host, members, cookie, purpose, out);
}

Status grow_communicator(Communicator* parent, const UniqueId* id, int rank, int size,
                         std::shared_ptr<Communicator>* out) {
  if (parent == nullptr) {
    if (id == nullptr) return error(SCAPE_ERR_ARGUMENT, "grow: a new rank needs the unique id");
    return create_communicator(*id, rank, size, out);
  }
  if (size <= parent->size()) {
    return error(SCAPE_ERR_ARGUMENT, "grow: %d ranks is not more than the %d there are", size,
                 parent->size());
  }
  // The root's id to all: slots of a flag and the id.
  struct Slot {
    uint8_t present = 0;
    UniqueId id;
  };
  Slot mine;
  if (id != nullptr) mine = {1, *id};
  std::vector<Slot> all(static_cast<size_t>(parent->size()));
  WorkPtr work;
  SCAPE_RETURN_IF_ERROR(
      parent->all_gather(&mine, all.data(), sizeof mine, DataType::kUint8, {false, "grow"}, &work));
  SCAPE_RETURN_IF_ERROR(wait(*parent, *work));
  const auto present = [](const Slot& slot) { return slot.present != 0; };
  if (std::count_if(all.begin(), all.end(), present) != 1) {
    return error(
        SCAPE_ERR_USAGE,
        "grow: %td ranks of the parent gave a unique id; the one that made it must, and no "
        "other",
        std::count_if(all.begin(), all.end(), present));
  }
  const auto root = std::find_if(all.begin(), all.end(), present);
  return create_communicator(root->id, parent->rank(), size, out);
}
}  // namespace scape::plugin
