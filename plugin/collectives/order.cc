#include "plugin/collectives/order.h"

#include <cstring>
#include <map>
#include <tuple>
#include <vector>

namespace scape::plugin {
namespace {

using Key = std::tuple<int, int, uint32_t>;  // sender, receiver, message

struct RankState {
  const Schedule* schedule = nullptr;
  Memory memory;
  Reduction reduction;
  std::vector<std::byte> scratch;
  std::vector<uint32_t> remaining;  // predecessors, per step
  size_t left = 0;
};

class Simulation {
 public:
  explicit Simulation(size_t ranks) : ranks_(ranks) {}
  RankState& rank(size_t r) { return ranks_[r]; }

  Status run() {
    for (size_t r = 0; r < ranks_.size(); ++r) {
      for (const uint32_t id : ranks_[r].schedule->first) ready_.emplace_back(r, id);
    }
    for (size_t i = 0; i < ready_.size(); ++i) {
      const auto [r, id] = ready_[i];
      SCAPE_RETURN_IF_ERROR(step(r, id));
    }
    for (size_t r = 0; r < ranks_.size(); ++r) {
      if (ranks_[r].left != 0) {
        return error(SCAPE_ERR_INTERNAL,
                     "schedule: %zu steps of rank %zu of %zu never became ready", ranks_[r].left, r,
                     ranks_.size());
      }
    }
    if (!mail_.empty()) {
      const auto& [from, to, message] = mail_.begin()->first;
      return error(SCAPE_ERR_INTERNAL,
                   "schedule: message %u from rank %d to rank %d is never received", message, from,
                   to);
    }
    return Status::Ok();
  }

 private:
  Status step(size_t r, uint32_t id) {
    RankState& self = ranks_[r];
    const Step& step = self.schedule->steps[id];
    const int me = static_cast<int>(r);
    if (step.kind == StepKind::kSend) {
      const std::byte* const data = self.memory.read(step.from);
      std::vector<std::byte> bytes(data, data + step.amount);
      const Key key{me, step.peer, step.message};
      if (const auto waiting = waiting_.find(key); waiting != waiting_.end()) {
        const uint32_t receiver = waiting->second;
        waiting_.erase(waiting);
        SCAPE_RETURN_IF_ERROR(deliver(static_cast<size_t>(step.peer), receiver, bytes));
      } else {
        mail_.emplace(key, std::move(bytes));
      }
    } else if (step.kind == StepKind::kRecv) {
      const Key key{step.peer, me, step.message};
      const auto arrived = mail_.find(key);
      if (arrived == mail_.end()) {
        waiting_.emplace(key, id);
        return Status::Ok();
      }
      const std::vector<std::byte> bytes = std::move(arrived->second);
      mail_.erase(arrived);
      return deliver(r, id, bytes);
    } else {
      run_local(*self.schedule, step, self.memory, self.reduction);
    }
    complete(r, id);
    return Status::Ok();
  }

  Status deliver(size_t r, uint32_t id, const std::vector<std::byte>& bytes) {
    const Step& step = ranks_[r].schedule->steps[id];
    if (bytes.size() != step.amount) {
      return error(
          SCAPE_ERR_INTERNAL,
          "schedule: message %u from rank %d to rank %zu has %zu bytes where %zu are expected",
          step.message, step.peer, r, bytes.size(), step.amount);
    }
    if (!bytes.empty()) std::memcpy(ranks_[r].memory.write(step.to), bytes.data(), bytes.size());
    complete(r, id);
    return Status::Ok();
  }

  void complete(size_t r, uint32_t id) {
    RankState& self = ranks_[r];
    const Step& step = self.schedule->steps[id];
    --self.left;
    for (uint32_t i = 0; i < step.successors; ++i) {
      const uint32_t next = self.schedule->successors[step.first_successor + i];
      if (--self.remaining[next] == 0) ready_.emplace_back(r, next);
    }
  }

  std::vector<RankState> ranks_;
  std::vector<std::pair<size_t, uint32_t>> ready_;
  std::map<Key, std::vector<std::byte>> mail_;
  std::map<Key, uint32_t> waiting_;  // the receiving step
};

}  // namespace

Status simulate(std::span<const std::shared_ptr<const Schedule>> schedules,
                std::span<const void* const> send, std::span<void* const> recv,
                std::span<const Reduction> reductions, std::span<std::byte* const> shared) {
  Simulation simulation(schedules.size());
  for (size_t r = 0; r < schedules.size(); ++r) {
    RankState& state = simulation.rank(r);
    state.schedule = schedules[r].get();
    state.scratch.resize(schedules[r]->scratch_bytes);
    state.memory = {static_cast<const std::byte*>(send[r]), static_cast<std::byte*>(recv[r]),
                    state.scratch.data(), shared.empty() ? nullptr : shared[r]};
    state.reduction = reductions[reductions.size() == 1 ? 0 : r];
    state.left = schedules[r]->steps.size();
    for (const Step& step : schedules[r]->steps) state.remaining.push_back(step.predecessors);
  }
  return simulation.run();
}

Status simulate_all_reduce(std::span<const void* const> inputs, void* out, size_t count,
                           DataType type, std::span<const Reduction> reductions,
                           Algorithm algorithm) {
  if (inputs.empty() || (reductions.size() != 1 && reductions.size() != inputs.size())) {
    return error(SCAPE_ERR_ARGUMENT,
                 "simulate_all_reduce: %zu inputs with %zu reductions; give one, or one per rank",
                 inputs.size(), reductions.size());
  }
  std::vector<std::shared_ptr<const Schedule>> schedules;
  std::vector<std::vector<std::byte>> results(inputs.size());
  std::vector<void*> recv;
  for (size_t r = 0; r < inputs.size(); ++r) {
    Shape shape;
    shape.rank = static_cast<int>(r);
    shape.size = static_cast<int>(inputs.size());
    shape.count = count;
    shape.type = type;
    shape.op = reductions[0].op;
    schedules.push_back(all_reduce_schedule(shape, algorithm));
    if (r > 0) results[r].resize(count * size_of(type));
    recv.push_back(r == 0 ? out : results[r].data());
  }
  return simulate(schedules, inputs, recv, reductions);
}

Status simulate_all_reduce(std::span<const void* const> inputs, void* out, size_t count,
                           DataType type, Reduction reduction) {
  return simulate_all_reduce(inputs, out, count, type, std::span<const Reduction>(&reduction, 1));
}

}  // namespace scape::plugin
