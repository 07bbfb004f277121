// A schedule: what one rank does in one collective, as plain data.
//
// A directed graph of steps over byte ranges of four spaces (the caller's sending and receiving
// buffers, scratch memory, and memory that ranks of one host share). Computed from rank, size,
// count and type alone, so all ranks' schedules fit together, and any of it can be examined or run
// in a single process. Run by Executor over a transport, or by simulate() in
// plugin/collectives/order.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "plugin/communicator.h"

namespace scape::plugin {

enum class Space : uint8_t { kSend, kRecv, kScratch, kShared };

struct Place {
  Space space = Space::kSend;
  size_t offset = 0;  // bytes
};

enum class StepKind : uint8_t {
  kSend,    // `amount` bytes from `from` to `peer`
  kRecv,    // `amount` bytes from `peer` into `to`
  kReduce,  // `amount` elements: to = its sources, combined in order
  kScale,   // `amount` elements: to = from * this rank's factor
  kCopy,    // `amount` bytes from `from` to `to`
};

struct Step {
  StepKind kind = StepKind::kCopy;
  bool finish =
      false;          // kReduce: these are all operands: divide for avg, store as the result's type
  int32_t peer = -1;  // kSend, kRecv
  uint32_t message =
      0;  // kSend, kRecv: the how manieth of this call from that sender to that receiver
  Place to, from;
  size_t amount = 0;
  uint32_t first_source = 0, sources = 0;        // kReduce: in Schedule::sources
  uint32_t predecessors = 0;                     // steps that must be over first
  uint32_t first_successor = 0, successors = 0;  // in Schedule::successors
};

struct Schedule {
  int rank = 0, size = 1;
  DataType type = DataType::kInt8;          // of the result
  DataType operand_type = DataType::kInt8;  // of what is reduced: type, or accumulation_type(type)
  ReduceOp op = ReduceOp::kSum;
  size_t scratch_bytes = 0;
  std::vector<Step> steps;
  std::vector<Place> sources;
  std::vector<uint32_t> successors;
  std::vector<uint32_t> first;  // steps without predecessors, in order
};

// The spaces of one call.
struct Memory {
  const std::byte* send = nullptr;
  std::byte* recv = nullptr;
  std::byte* scratch = nullptr;
  std::byte* shared = nullptr;

  const std::byte* read(Place place) const {
    return place.space == Space::kSend ? send + place.offset : write(place);
  }
  // Nothing writes the sending space.
  std::byte* write(Place place) const {
    return (place.space == Space::kRecv      ? recv
            : place.space == Space::kScratch ? scratch
                                             : shared) +
           place.offset;
  }
};

// Does a kReduce, kScale or kCopy step.
void run_local(const Schedule& schedule, const Step& step, const Memory& memory,
               const Reduction& reduction);

// Puts a schedule together step by step.
class ScheduleBuilder {
 public:
  using Id = uint32_t;
  static constexpr Id kNone = UINT32_MAX;  // "after nothing"

  ScheduleBuilder(int rank, int size, DataType type);

  Schedule& schedule() { return schedule_; }
  int rank() const { return schedule_.rank; }
  int size() const { return schedule_.size; }

  // Scratch memory, 64-byte aligned.
  Place scratch(size_t bytes);

  // Between two ranks, the i-th send of one meets the i-th recv of the other, in the order of these
  // calls. A step starts when all of `after` are over.
  Id send(int peer, Place from, size_t bytes, std::initializer_list<Id> after = {});
  Id recv(int peer, Place to, size_t bytes, std::initializer_list<Id> after = {});
  Id reduce(Place to, std::span<const Place> sources, size_t elements, bool finish,
            std::initializer_list<Id> after = {});
  Id scale(Place to, Place from, size_t elements, std::initializer_list<Id> after = {});
  Id copy(Place to, Place from, size_t bytes, std::initializer_list<Id> after = {});
  void depend(Id step, Id after);

  // Links everything; the builder is spent.
  std::shared_ptr<const Schedule> finish();

 private:
  Id add(Step step, std::initializer_list<Id> after);

  Schedule schedule_;
  std::vector<std::pair<Id, Id>> edges_;   // (before, after)
  std::vector<uint32_t> sent_, received_;  // messages so far, per peer
};

}  // namespace scape::plugin
