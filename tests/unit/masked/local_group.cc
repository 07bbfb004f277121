#include "local_group.h"

#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "plugin/collectives/order.h"

namespace scape::plugin::test {
namespace {

enum class Kind { kAllReduce, kAllGather, kSide };

struct Operand {
  const void* send = nullptr;
  void* recv = nullptr;
  Reduction reduction = {};
  std::shared_ptr<Communicator>* side = nullptr;
};

// The k-th collective of the group.
struct Meeting {
  Kind kind = Kind::kAllReduce;
  std::string descriptor = {};
  size_t count = 0;
  DataType type = DataType::kFloat32;
  std::vector<size_t> counts = {};
  std::vector<Operand> operands = {};
  size_t arrived = 0;
  bool done = false;
  Status status = {};
};

struct Group {
  explicit Group(int size)
      : ranks(size), next(static_cast<size_t>(size)), next_payload(static_cast<size_t>(size)) {}
  const int ranks;
  std::mutex mutex;
  std::map<uint64_t, std::shared_ptr<Meeting>> meetings;
  std::vector<uint64_t> next;                                    // by rank
  std::vector<size_t> next_payload;                              // by rank
  std::vector<std::shared_ptr<std::vector<std::byte>>> results;  // of the shared payloads
  Status failure;
};

class LocalWork final : public Work {
 public:
  LocalWork(std::shared_ptr<Group> group, std::shared_ptr<Meeting> meeting)
      : group_(std::move(group)), meeting_(std::move(meeting)) {}
  // Its buffers may go with it: who comes to the meeting later must neither read nor write them.
  ~LocalWork() override {
    std::lock_guard lock(group_->mutex);
    if (meeting_->done || !group_->failure.ok()) return;
    group_->failure = error(SCAPE_ERR_REMOTE, "a rank left in the middle of a collective");
  }
  LocalWork(const LocalWork&) = delete;
  LocalWork& operator=(const LocalWork&) = delete;
  bool done() const override {
    std::lock_guard lock(group_->mutex);
    return meeting_->done || !group_->failure.ok();
  }
  Status status() const override {
    std::lock_guard lock(group_->mutex);
    return meeting_->done ? meeting_->status : group_->failure;
  }

 private:
  const std::shared_ptr<Group> group_;
  const std::shared_ptr<Meeting> meeting_;
};

// Where ranks pack, and the result that they share.
class LocalPayload final : public SharedPayload {
 public:
  explicit LocalPayload(std::shared_ptr<std::vector<std::byte>> result)
      : operand_(result->size()), result_(std::move(result)) {}
  size_t capacity() const override { return operand_.size(); }
  void* operand() override { return operand_.data(); }
  const void* result() const override { return result_->data(); }
  bool can_reduce(DataType, ReduceOp) const override { return true; }

 private:
  std::vector<std::byte> operand_;
  const std::shared_ptr<std::vector<std::byte>> result_;
};

class LocalSharing final : public SharingWork {
 public:
  explicit LocalSharing(std::shared_ptr<std::vector<std::byte>> result)
      : payload_(std::make_shared<LocalPayload>(std::move(result))) {}
  bool done() const override { return true; }
  Status status() const override { return Status::Ok(); }
  std::shared_ptr<SharedPayload> payload() const override { return payload_; }

 private:
  const std::shared_ptr<SharedPayload> payload_;
};

class LocalCommunicator final : public Communicator {
 public:
  LocalCommunicator(std::shared_ptr<Group> group, int rank)
      : group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->ranks; }
  std::string_view name() const override { return "local group"; }

  Status all_reduce(const void* send, void* recv, size_t count, DataType type, Reduction reduction,
                    const CallTag& tag, WorkPtr* work) override {
    Meeting call{.kind = Kind::kAllReduce, .count = count, .type = type};
    call.descriptor = format("all-reduce of %zu %s '%.*s'%s", count, name_of(type),
                             static_cast<int>(tag.name.size()), tag.name.data(),
                             tag.registered ? "" : " not registered");
    return meet(std::move(call), {.send = send, .recv = recv, .reduction = reduction}, work);
  }
  Status all_gather(const void* send, void* recv, size_t count, DataType type, const CallTag& tag,
                    WorkPtr* work) override {
    const std::vector<size_t> counts(static_cast<size_t>(size()), count);
    return all_gather_v(send, recv, counts, type, tag, work);
  }
  Status all_gather_v(const void* send, void* recv, std::span<const size_t> counts, DataType type,
                      const CallTag& tag, WorkPtr* work) override {
    Meeting call{.kind = Kind::kAllGather, .type = type};
    call.counts.assign(counts.begin(), counts.end());
    call.descriptor =
        format("all-gather of %zu '%.*s'", std::accumulate(counts.begin(), counts.end(), size_t{0}),
               static_cast<int>(tag.name.size()), tag.name.data());
    return meet(std::move(call), {.send = send, .recv = recv}, work);
  }
  Status side_channel(std::shared_ptr<Communicator>* side, WorkPtr* work) override {
    return meet({.kind = Kind::kSide, .descriptor = "side channel"}, {.side = side}, work);
  }

  Status reduce_scatter(const void*, void*, size_t, DataType, Reduction, const CallTag&,
                        WorkPtr*) override {
    return not_here();
  }
  Status reduce_scatter_v(const void*, void*, std::span<const size_t>, DataType, Reduction,
                          const CallTag&, WorkPtr*) override {
    return not_here();
  }
  Status all_to_all(const void*, void*, size_t, DataType, const CallTag&, WorkPtr*) override {
    return not_here();
  }
  Status broadcast(const void*, void*, size_t, DataType, int, const CallTag&, WorkPtr*) override {
    return not_here();
  }
  Status reduce(const void*, void*, size_t, DataType, Reduction, int, const CallTag&,
                WorkPtr*) override {
    return not_here();
  }
  Status gather(const void*, void*, size_t, DataType, int, const CallTag&, WorkPtr*) override {
    return not_here();
  }
  Status scatter(const void*, void*, size_t, DataType, int, const CallTag&, WorkPtr*) override {
    return not_here();
  }
  Status share_payload(size_t bytes, std::shared_ptr<SharingWork>* work) override {
    std::lock_guard lock(group_->mutex);
    const size_t number = group_->next_payload[static_cast<size_t>(rank_)]++;
    if (number == group_->results.size())
      group_->results.push_back(std::make_shared<std::vector<std::byte>>(bytes));
    *work = std::make_shared<LocalSharing>(group_->results[number]);
    return Status::Ok();
  }
  // All ranks read one result, as those of a host do.
  Status all_reduce(SharedPayload& payload, size_t count, DataType type, Reduction reduction,
                    const CallTag& tag, WorkPtr* work) override {
    return all_reduce(payload.operand(), const_cast<void*>(payload.result()), count, type,
                      reduction, tag, work);
  }
  Status send(const void*, size_t, DataType, int, WorkPtr*) override { return not_here(); }
  Status recv(void*, size_t, DataType, int, WorkPtr*) override { return not_here(); }

  Status register_memory(void*, size_t, void**) override { return not_here(); }
  void deregister_memory(void*) override {}

  bool progress() override { return false; }
  void wait_event(int) override { std::this_thread::yield(); }
  Status async_error() const override {
    std::lock_guard lock(group_->mutex);
    return group_->failure;
  }
  void abort(const Status& why) override {
    std::lock_guard lock(group_->mutex);
    if (group_->failure.ok()) group_->failure = why;
  }
  ByteCounters counters() const override { return {}; }

 private:
  static Status not_here() {
    return error(SCAPE_ERR_USAGE, "local groups only do what the masked collective needs");
  }

  Status meet(Meeting call, Operand operand, WorkPtr* work) {
    work->reset();  // before the lock, which a work takes when it ends
    std::lock_guard lock(group_->mutex);
    if (!group_->failure.ok()) return group_->failure;
    const auto me = static_cast<size_t>(rank_);
    const uint64_t number = group_->next[me]++;
    std::shared_ptr<Meeting>& meeting = group_->meetings[number];
    if (!meeting) {
      meeting = std::make_shared<Meeting>(std::move(call));
      meeting->operands.resize(group_->next.size());
    } else if (meeting->descriptor != call.descriptor) {
      group_->failure = error(SCAPE_ERR_MISMATCH, "call %llu: rank %d has %s, others %s",
                              static_cast<unsigned long long>(number), rank_,
                              call.descriptor.c_str(), meeting->descriptor.c_str());
    }
    meeting->operands[me] = operand;
    *work = std::make_shared<LocalWork>(group_, meeting);
    if (++meeting->arrived == group_->next.size() && group_->failure.ok()) {
      meeting->status = carry_out(meeting.get());
      meeting->done = true;
      group_->meetings.erase(number);
    }
    return Status::Ok();
  }

  static Status carry_out(Meeting* meeting) {
    const size_t ranks = meeting->operands.size();
    if (meeting->kind == Kind::kSide) {
      const auto communicators = make_local_group(static_cast<int>(ranks));
      for (size_t r = 0; r < ranks; ++r) *meeting->operands[r].side = communicators[r];
      return Status::Ok();
    }
    const size_t element = size_of(meeting->type);
    std::vector<std::byte> result;
    if (meeting->kind == Kind::kAllGather) {
      for (size_t r = 0; r < ranks; ++r) {
        const auto* part = static_cast<const std::byte*>(meeting->operands[r].send);
        result.insert(result.end(), part, part + meeting->counts[r] * element);
      }
    } else {
      std::vector<const void*> inputs;
      std::vector<Reduction> reductions;
      for (const Operand& operand : meeting->operands) {
        inputs.push_back(operand.send);
        reductions.push_back(operand.reduction);
      }
      result.resize(meeting->count * element);
      SCAPE_RETURN_IF_ERROR(
          simulate_all_reduce(inputs, result.data(), meeting->count, meeting->type, reductions));
    }
    for (const Operand& operand : meeting->operands) {
      if (!result.empty()) std::memcpy(operand.recv, result.data(), result.size());
    }
    return Status::Ok();
  }

  const std::shared_ptr<Group> group_;
  const int rank_;
};

}  // namespace

std::vector<std::shared_ptr<Communicator>> make_local_group(int ranks) {
  const auto group = std::make_shared<Group>(ranks);
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (int r = 0; r < ranks; ++r)
    communicators.push_back(std::make_shared<LocalCommunicator>(group, r));
  return communicators;
}

void run_local(int ranks, const std::function<void(std::shared_ptr<Communicator>)>& body) {
  std::vector<std::thread> threads;
  for (const std::shared_ptr<Communicator>& communicator : make_local_group(ranks)) {
    threads.emplace_back(body, communicator);
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace scape::plugin::test
