#include "plugin/net/group.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "plugin/host_communicator.h"
#include "plugin/net/device.h"
#include "plugin/net/nccl_log.h"
#include "plugin/net/statistics.h"

namespace scape::net {
namespace {

// So much of a window's parts is copied at a time: what memory moves in about a millisecond.
constexpr size_t kCopyBytes = size_t{4} << 20;
// What a schedule has posted at most, from each peer: three chunks each of operands and results.
constexpr size_t kReceivesPerPeer = 6;

Status check_piece(const Part& part, const char* what) {
  if (part.bytes > 0 && part.address == nullptr) {
    return error(SCAPE_ERR_ARGUMENT, "collectives: %zu bytes of %s are at a null pointer",
                 part.bytes, what);
  }
  const GroupMemory* const memory = part.memory;
  if (memory == nullptr || part.bytes == 0) return Status::Ok();
  const auto begin = reinterpret_cast<uintptr_t>(part.address);
  const auto first = reinterpret_cast<uintptr_t>(memory->data);
  if (begin >= first && begin - first <= memory->bytes &&
      part.bytes <= memory->bytes - (begin - first)) {
    return Status::Ok();
  }
  return error(SCAPE_ERR_ARGUMENT,
               "collectives: the %zu bytes of %s at %p are not in the memory that their handle "
               "names, %zu bytes at %p",
               part.bytes, what, static_cast<void*>(part.address), memory->bytes,
               static_cast<const void*>(memory->data));
}

void* region_of(const Part& part) { return part.memory != nullptr ? part.memory->region : nullptr; }

// Copies some more between the parts and their staging; true when all has been copied.
bool copy_parts(GroupRequest* request) {
  const bool to_staging = request->call.kind == GroupCall::Kind::kReduceScatter;
  size_t left = kCopyBytes, begin = 0;
  for (const Part& part : request->parts) {
    if (request->copied < begin + part.bytes && left > 0) {
      const size_t at = request->copied - begin, bytes = std::min(left, part.bytes - at);
      std::byte* const staged = request->staging.data() + request->copied;
      to_staging ? std::memcpy(staged, part.address + at, bytes)
                 : std::memcpy(part.address + at, staged, bytes);
      request->copied += bytes;
      left -= bytes;
    }
    begin += part.bytes;
  }
  return request->copied == request->call.window.bytes;
}

// Rank 0's invitation, once all have been read and fit.
Status read_handles(const Door& door, void* const* handles, int ranks, int rank, Invitation* root) {
  for (int r = 0; r < ranks; ++r) {
    Invitation invitation;
    if (handles[r] == nullptr) {
      return error(SCAPE_ERR_ARGUMENT, "the handle of rank %d is null", r);
    }
    if (const Status status = Invitation::read(handles[r], &invitation); !status.ok()) {
      return error(status.code(), "rank %d: %s", r, status.message().c_str());
    }
    if (r == rank && invitation.cookie != door.invitation.cookie) {
      return error(SCAPE_ERR_ARGUMENT,
                   "the handle of rank %d, which is this one, is not what listen wrote", r);
    }
    if (invitation.library != door.invitation.library) {
      return error(SCAPE_ERR_MISMATCH,
                   "rank %d uses %s and this rank %s; set SCAPE_NET to the same everywhere", r,
                   invitation.library.c_str(), door.invitation.library.c_str());
    }
    if (r == 0) *root = std::move(invitation);
  }
  return Status::Ok();
}

}  // namespace

Status Group::join(Door* door, void* const* handles, int ranks, int rank,
                   std::unique_ptr<Group>* out) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return error(SCAPE_ERR_ARGUMENT, "connect: rank %d of %d is not possible", rank, ranks);
  }
  plugin::Joining joining;
  joining.listener = std::move(door->socket);
  if (!joining.listener.valid()) {
    return error(SCAPE_ERR_USAGE,
                 "connect: what listens here has joined a group before; listen anew for each");
  }
  Invitation root;
  SCAPE_RETURN_IF_ERROR(read_handles(*door, handles, ranks, rank, &root));
  const Devices* devices = nullptr;
  SCAPE_RETURN_IF_ERROR(find_devices(&devices));
  const std::string& device = door->counters->device();
  std::unique_ptr<Group> group(new Group);
  group->counters_ = door->counters;
  group->rank_ = rank;
  group->ranks_ = ranks;
  group->counts_.resize(static_cast<size_t>(ranks));
  for (GroupRequest& request : group->requests_) request.group = group.get();
  if (ranks > 1) {
    plugin::TransportOptions options;
    options.ranks = ranks;
    options.device = device;
    options.tracks_all = true;
    SCAPE_RETURN_IF_ERROR(devices->module->make(options, &joining.transport));
    // One call's receives must not keep an older one's from their turn.
    const size_t receives = kReceivesPerPeer * static_cast<size_t>(ranks - 1);
    group->at_once_ = std::clamp<size_t>(joining.transport->room() / receives, 1, kMostAtOnce);
  }
  const plugin::Transport* const transport = joining.transport.get();
  joining.rank = rank;
  joining.size = ranks;
  joining.root = std::move(root.endpoint);
  joining.cookie = root.cookie;
  joining.endpoint = door->invitation.endpoint;
  joining.transport_name = door->invitation.library;
  SCAPE_RETURN_IF_ERROR(plugin::join_communicator(std::move(joining), &group->communicator_));
  group->transport_ = transport;
  if (transport != nullptr) group->counters_->add_transport(Interface::kCollNet, transport);
  group->counters_->groups_opened.add();
  group->counters_->groups.add();
  NET_INFO("collectives: rank %d of %d on %s over %s", rank, ranks, device.c_str(),
           devices->library.c_str());
  *out = std::move(group);
  return Status::Ok();
}

size_t Group::block_bytes(const Window& window, int rank) {
  const size_t begin = static_cast<size_t>(rank) * window.bytes_per_rank;
  const size_t from = std::max(begin, window.offset);
  const size_t to = std::min(begin + window.bytes_per_rank, window.offset + window.bytes);
  return to > from ? to - from : 0;
}

Status Group::check(GroupCall* call, const Part* parts, int part_count) const {
  const size_t element = plugin::size_of(call->type);
  const bool whole = call->kind == GroupCall::Kind::kAllReduce;
  const Window& window = call->window;
  if (whole ? call->count > kMaxBytes / element : window.bytes > kMaxBytes) {
    return error(SCAPE_ERR_ARGUMENT,
                 "collectives: %zu %s are more than the %zu bytes that the properties allow",
                 whole ? call->count : window.bytes, whole ? name_of(call->type) : "bytes",
                 kMaxBytes);
  }
  if (whole) {
    call->send.bytes = call->receive.bytes = call->count * element;
    SCAPE_RETURN_IF_ERROR(check_piece(call->send, "what is sent"));
    return check_piece(call->receive, "what is received");
  }
  const size_t ranks = static_cast<size_t>(ranks_);
  if (window.bytes_per_rank > SIZE_MAX / 2 / ranks ||
      window.offset > window.bytes_per_rank * ranks ||
      window.bytes > window.bytes_per_rank * ranks - window.offset) {
    return error(SCAPE_ERR_ARGUMENT,
                 "collectives: a window of %zu bytes at %zu is not in the %d blocks of %zu bytes",
                 window.bytes, window.offset, ranks_, window.bytes_per_rank);
  }
  if (window.bytes_per_rank % element != 0 || window.offset % element != 0 ||
      window.bytes % element != 0) {
    return error(SCAPE_ERR_ARGUMENT,
                 "collectives: a window of %zu bytes at %zu of blocks of %zu bytes cuts through "
                 "elements of %zu",
                 window.bytes, window.offset, window.bytes_per_rank, element);
  }
  size_t left = window.bytes;
  bool fit = true;
  for (int i = 0; i < part_count && fit; ++i) {
    SCAPE_RETURN_IF_ERROR(check_piece(parts[i], "a part of the window"));
    fit = parts[i].bytes <= left;
    if (fit) left -= parts[i].bytes;
  }
  if (!fit || left != 0) {
    return error(SCAPE_ERR_ARGUMENT, "collectives: %d parts do not make up a window of %zu bytes",
                 part_count, window.bytes);
  }
  Part& own = call->kind == GroupCall::Kind::kAllGather ? call->send : call->receive;
  own.bytes = block_bytes(window, rank_);
  return check_piece(own, "this rank's block");
}

GroupRequest* Group::free_request() {
  for (GroupRequest& request : requests_) {
    if (request.state == GroupRequest::State::kFree) return &request;
  }
  return nullptr;
}

Status Group::begin(const GroupCall& asked, const Part* parts, int part_count, GroupRequest** out) {
  *out = nullptr;
  std::lock_guard<std::mutex> lock(mutex_);
  SCAPE_RETURN_IF_ERROR(failure_);
  GroupCall call = asked;
  if (Status status = check(&call, parts, part_count); !status.ok()) {
    NET_WARN("%s", status.message().c_str());
    return status;
  }
  GroupRequest* const request = free_request();
  if (request == nullptr) {
    counters_->retries[Retry::kCollective].add();
    return Status::Ok();
  }
  Part& window_side = call.kind == GroupCall::Kind::kReduceScatter ? call.send : call.receive;
  request->parts.clear();
  request->copied = 0;
  if (part_count == 1) {
    window_side = parts[0];
  } else if (part_count > 1) {
    request->parts.assign(parts, parts + part_count);
    if (request->staging.size() < call.window.bytes) request->staging.resize(call.window.bytes);
    window_side = {nullptr, request->staging.data(), call.window.bytes};
  }
  request->call = call;
  request->state = GroupRequest::State::kWaiting;
  waiting_[(first_waiting_ + waiting_count_++) % kRequests] = request;
  SCAPE_RETURN_IF_ERROR(progress());
  *out = request;
  return Status::Ok();
}

Status Group::start(GroupRequest* request) {
  const GroupCall& call = request->call;
  plugin::CallTag tag;
  tag.send_region = region_of(call.send);
  tag.recv_region = region_of(call.receive);
  plugin::Reduction reduction;
  reduction.op = call.op;
  if (call.kind == GroupCall::Kind::kAllReduce) {
    return communicator_->all_reduce(call.send.address, call.receive.address, call.count, call.type,
                                     reduction, tag, &request->work);
  }
  for (int r = 0; r < ranks_; ++r) {
    counts_[static_cast<size_t>(r)] = block_bytes(call.window, r) / plugin::size_of(call.type);
  }
  if (call.kind == GroupCall::Kind::kAllGather) {
    return communicator_->all_gather_v(call.send.address, call.receive.address, counts_, call.type,
                                       tag, &request->work);
  }
  return communicator_->reduce_scatter_v(call.send.address, call.receive.address, counts_,
                                         call.type, reduction, tag, &request->work);
}

Status Group::progress() {
  SCAPE_RETURN_IF_ERROR(failure_);
  communicator_->progress();
  for (size_t i = 0; i < under_way_count_;) {
    GroupRequest* const request = under_way_[i];
    if (!request->work->done()) {
      ++i;
      continue;
    }
    if (const Status status = request->work->status(); !status.ok()) return fail(status);
    request->work.reset();
    const bool hands_out =
        !request->parts.empty() && request->call.kind == GroupCall::Kind::kAllGather;
    request->state = hands_out ? GroupRequest::State::kHandingOut : GroupRequest::State::kDone;
    under_way_[i] = under_way_[--under_way_count_];
  }
  while (waiting_count_ > 0 && under_way_count_ < at_once_) {
    GroupRequest* const next = waiting_[first_waiting_];
    const bool takes_in =
        !next->parts.empty() && next->call.kind == GroupCall::Kind::kReduceScatter;
    if (takes_in && !copy_parts(next)) break;
    if (const Status status = start(next); !status.ok()) return fail(status);
    first_waiting_ = (first_waiting_ + 1) % kRequests;
    --waiting_count_;
    next->state = GroupRequest::State::kUnderWay;
    under_way_[under_way_count_++] = next;
  }
  return Status::Ok();
}

Status Group::test(GroupRequest* request, bool* done, size_t* bytes) {
  Group& group = *request->group;
  std::lock_guard<std::mutex> lock(group.mutex_);
  *done = false;
  switch (request->state) {
    case GroupRequest::State::kFree: {
      Status status = error(SCAPE_ERR_USAGE, "collectives: test of a request that is over already");
      NET_WARN("%s", status.message().c_str());
      return status;
    }
    case GroupRequest::State::kWaiting:
    case GroupRequest::State::kUnderWay:
      SCAPE_RETURN_IF_ERROR(group.progress());
      break;
    case GroupRequest::State::kHandingOut:
      if (copy_parts(request)) request->state = GroupRequest::State::kDone;
      break;
    case GroupRequest::State::kDone:
      break;
  }
  if (request->state != GroupRequest::State::kDone) return Status::Ok();
  request->state = GroupRequest::State::kFree;
  *done = true;
  *bytes = request->call.receive.bytes;
  return Status::Ok();
}

Status Group::register_memory(void* data, size_t bytes, GroupMemory** out) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto memory = std::make_unique<GroupMemory>();
  memory->data = static_cast<std::byte*>(data);
  memory->bytes = bytes;
  if (Status status = communicator_->register_memory(data, bytes, &memory->region); !status.ok()) {
    counters_->errors[Error::kRegister].add();
    return status;
  }
  *out = memory.get();
  memories_.push_back(std::move(memory));
  counters_->registrations[Interface::kCollNet].add();
  counters_->registered[Interface::kCollNet].add();
  return Status::Ok();
}

Status Group::deregister_memory(GroupMemory* memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = std::find_if(memories_.begin(), memories_.end(),
                                  [&](const auto& known) { return known.get() == memory; });
  if (found == memories_.end()) {
    return error(SCAPE_ERR_ARGUMENT,
                 "the memory handle %p is not of this group; deregister a handle once",
                 static_cast<void*>(memory));
  }
  communicator_->deregister_memory(memory->region);
  memories_.erase(found);
  counters_->registered[Interface::kCollNet].take();
  return Status::Ok();
}

Status Group::fail(const Status& why) {
  failure_ = error(why.code(), "collectives: %s", why.message().c_str());
  counters_->errors[Error::kCollective].add();
  NET_WARN("%s", failure_.message().c_str());
  communicator_->abort(why);
  return failure_;
}

void Group::close() {
  std::lock_guard<std::mutex> lock(mutex_);
  static_cast<void>(progress());  // what is over need not be tested
  const size_t left = under_way_count_ + waiting_count_;
  if (left > 0 && failure_.ok()) {
    communicator_->abort(
        error(SCAPE_ERR_USAGE, "rank %d closed the group with %zu calls under way", rank_, left));
  }
  for (const auto& memory : memories_) {
    communicator_->deregister_memory(memory->region);
  }
  counters_->registered[Interface::kCollNet].take(memories_.size());
  if (transport_ != nullptr) counters_->remove_transport(Interface::kCollNet, transport_);
  communicator_.reset();
  counters_->groups.take();
  write_statistics();
}

}  // namespace scape::net
