#include "plugin/communicator.h"

#include <sched.h>

#include <chrono>

#include "base/settings.h"

namespace scape::plugin {

size_t size_of(DataType type) {
  switch (type) {
    case DataType::kInt8:
    case DataType::kUint8:
    case DataType::kFloat8e4m3:
    case DataType::kFloat8e5m2:
      return 1;
    case DataType::kFloat16:
    case DataType::kBfloat16:
      return 2;
    case DataType::kInt32:
    case DataType::kUint32:
    case DataType::kFloat32:
      return 4;
    case DataType::kInt64:
    case DataType::kUint64:
    case DataType::kFloat64:
      return 8;
  }
  return 0;
}

const char* name_of(DataType type) {
  switch (type) {
    case DataType::kInt8:
      return "int8";
    case DataType::kUint8:
      return "uint8";
    case DataType::kInt32:
      return "int32";
    case DataType::kUint32:
      return "uint32";
    case DataType::kInt64:
      return "int64";
    case DataType::kUint64:
      return "uint64";
    case DataType::kFloat16:
      return "float16";
    case DataType::kFloat32:
      return "float32";
    case DataType::kFloat64:
      return "float64";
    case DataType::kBfloat16:
      return "bfloat16";
    case DataType::kFloat8e4m3:
      return "float8e4m3";
    case DataType::kFloat8e5m2:
      return "float8e5m2";
  }
  return "unknown";
}

const char* name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kProd:
      return "prod";
    case ReduceOp::kMax:
      return "max";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kAvg:
      return "avg";
    case ReduceOp::kPremulSum:
      return "premultiplied sum";
  }
  return "unknown";
}

void drive(Communicator& communicator, const std::function<bool()>& over) {
  using Clock = std::chrono::steady_clock;
  // Idle turns before the core is offered to others, which may be the very rank that is waited for.
  constexpr int kSpins = 100;
  const double limit = settings().timeout_s;
  Clock::time_point last_moved = Clock::now();
  int idle = 0;
  while (!over()) {
    if (communicator.progress()) {
      idle = 0;
      continue;
    }
    if (++idle % kSpins != 0) continue;
    if (idle == kSpins) {
      last_moved = Clock::now();
    } else if (std::chrono::duration<double>(Clock::now() - last_moved).count() > limit) {
      communicator.abort(error(
          SCAPE_ERR_TIMEOUT,
          "%.*s: nothing arrived for %g s (SCAPE_TIMEOUT); look for what keeps the other ranks",
          static_cast<int>(communicator.name().size()), communicator.name().data(), limit));
      continue;
    }
    sched_yield();
  }
}

Status wait(Communicator& communicator, const Work& work) {
  drive(communicator, [&work] { return work.done(); });
  return work.status();
}

}  // namespace scape::plugin
