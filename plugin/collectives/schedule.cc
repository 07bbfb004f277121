#include "plugin/collectives/schedule.h"

#include <cstring>
#include <utility>

#include "plugin/collectives/reduce.h"

namespace scape::plugin {

void run_local(const Schedule& schedule, const Step& step, const Memory& memory,
               const Reduction& reduction) {
  switch (step.kind) {
    case StepKind::kReduce: {
      // Not very many ranks need no allocation.
      constexpr uint32_t kFew = 128;
      const void* few[kFew];
      std::vector<const void*> many;
      const void** in = few;
      if (step.sources > kFew) {
        many.resize(step.sources);
        in = many.data();
      }
      for (uint32_t i = 0; i < step.sources; ++i)
        in[i] = memory.read(schedule.sources[step.first_source + i]);
      ReduceCall call;
      call.result = step.finish ? schedule.type : schedule.operand_type;
      call.operand = schedule.operand_type;
      call.op = schedule.op;
      call.divisor = step.finish && schedule.op == ReduceOp::kAvg ? schedule.size : 0;
      call.out = memory.write(step.to);
      call.in = in;
      call.operands = static_cast<int>(step.sources);
      call.n = step.amount;
      return reduce(call);
    }
    case StepKind::kScale:
      return scale(schedule.type, reduction, memory.write(step.to), memory.read(step.from),
                   step.amount);
    case StepKind::kCopy: {
      std::byte* const to = memory.write(step.to);
      const std::byte* const from = memory.read(step.from);
      if (to != from) std::memcpy(to, from, step.amount);
      return;
    }
    case StepKind::kSend:
    case StepKind::kRecv:
      return;  // the executor's
  }
}

ScheduleBuilder::ScheduleBuilder(int rank, int size, DataType type)
    : sent_(static_cast<size_t>(size)), received_(static_cast<size_t>(size)) {
  schedule_.rank = rank;
  schedule_.size = size;
  schedule_.type = type;
  schedule_.operand_type = type;
}

Place ScheduleBuilder::scratch(size_t bytes) {
  const Place place{Space::kScratch, schedule_.scratch_bytes};
  schedule_.scratch_bytes += (bytes + 63) / 64 * 64;
  return place;
}

ScheduleBuilder::Id ScheduleBuilder::add(Step step, std::initializer_list<Id> after) {
  const Id id = static_cast<Id>(schedule_.steps.size());
  schedule_.steps.push_back(step);
  for (const Id before : after) depend(id, before);
  return id;
}

void ScheduleBuilder::depend(Id step, Id after) {
  if (after == kNone) return;
  edges_.emplace_back(after, step);
  ++schedule_.steps[step].predecessors;
  ++schedule_.steps[after].successors;
}

ScheduleBuilder::Id ScheduleBuilder::send(int peer, Place from, size_t bytes,
                                          std::initializer_list<Id> after) {
  Step step;
  step.kind = StepKind::kSend;
  step.peer = peer;
  step.message = sent_[static_cast<size_t>(peer)]++;
  step.from = from;
  step.amount = bytes;
  return add(step, after);
}

ScheduleBuilder::Id ScheduleBuilder::recv(int peer, Place to, size_t bytes,
                                          std::initializer_list<Id> after) {
  Step step;
  step.kind = StepKind::kRecv;
  step.peer = peer;
  step.message = received_[static_cast<size_t>(peer)]++;
  step.to = to;
  step.amount = bytes;
  return add(step, after);
}

ScheduleBuilder::Id ScheduleBuilder::reduce(Place to, std::span<const Place> sources,
                                            size_t elements, bool finish,
                                            std::initializer_list<Id> after) {
  Step step;
  step.kind = StepKind::kReduce;
  step.finish = finish;
  step.to = to;
  step.amount = elements;
  step.first_source = static_cast<uint32_t>(schedule_.sources.size());
  step.sources = static_cast<uint32_t>(sources.size());
  schedule_.sources.insert(schedule_.sources.end(), sources.begin(), sources.end());
  return add(step, after);
}

ScheduleBuilder::Id ScheduleBuilder::scale(Place to, Place from, size_t elements,
                                           std::initializer_list<Id> after) {
  Step step;
  step.kind = StepKind::kScale;
  step.to = to;
  step.from = from;
  step.amount = elements;
  return add(step, after);
}

ScheduleBuilder::Id ScheduleBuilder::copy(Place to, Place from, size_t bytes,
                                          std::initializer_list<Id> after) {
  Step step;
  step.kind = StepKind::kCopy;
  step.to = to;
  step.from = from;
  step.amount = bytes;
  return add(step, after);
}

std::shared_ptr<const Schedule> ScheduleBuilder::finish() {
  std::vector<Step>& steps = schedule_.steps;
  uint32_t next = 0;
  for (Step& step : steps) {
    step.first_successor = next;
    next += step.successors;
    step.successors = 0;
  }
  schedule_.successors.resize(next);
  for (const auto& [before, after] : edges_) {
    Step& step = steps[before];
    schedule_.successors[step.first_successor + step.successors++] = after;
  }
  for (Id id = 0; id < steps.size(); ++id) {
    if (steps[id].predecessors == 0) schedule_.first.push_back(id);
  }
  return std::make_shared<const Schedule>(std::move(schedule_));
}

}  // namespace scape::plugin
