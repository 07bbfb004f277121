// A registered buffer on a device whose sums are exact, and whether all that went in came out.
#pragma once

#include "tests/functional/simgpu/sim_case.h"

#include <cstddef>
#include <vector>

namespace scape::cases {

// A registered buffer of the gradient role, with what went in and came out.
class Gradient {
 public:
  Gradient(size_t count, const char* name, double kept)
      : data_(count, 0), registration_(add(data_.get(), count, name, kept)) {}
  ~Gradient() { SCAPE(scape_unregister(registration_)); }

  float* get() const { return data_.get(); }
  size_t count() const { return data_.count(); }
  void put(const std::vector<float>& values) { data_.write(values); }
  std::vector<float> read(cudaStream_t stream) const { return data_.read(stream); }
  ncclResult_t call(ncclComm_t comm, cudaStream_t stream, ncclRedOp_t op = ncclSum) const {
    return ncclAllReduce(get(), get(), count(), ncclFloat32, op, comm, stream);
  }
  std::vector<float> residual() const {
    std::vector<float> values(count());
    SCAPE(scape_read_residual(get(), count(), values.data(), count()));
    return values;
  }
  scape_stats stats() const { return stats_of(get(), 0); }
  scape_registration registration() const { return registration_; }

 private:
  DeviceFloats data_;
  const scape_registration registration_;
};

// Of every rank, element by element, through the stand-in.
inline std::vector<float> sum_of_all(ncclComm_t comm, cudaStream_t stream,
                                     const std::vector<float>& mine) {
  const DeviceFloats data(mine);
  NCCL(ncclAllReduce(data.get(), data.get(), data.count(), ncclFloat32, ncclSum, comm, stream));
  return data.read(stream);
}

// All that went in, of all ranks, came out or waits.
class Balance {
 public:
  explicit Balance(size_t count) : in_(count), out_(count) {}
  void in(const std::vector<float>& values) { add(values, in_); }
  void out(const std::vector<float>& values) { add(values, out_); }
  void check(ncclComm_t comm, cudaStream_t stream, const Gradient& gradient) const {
    const std::vector<float> given = sum_of_all(comm, stream, in_);
    const std::vector<float> kept = sum_of_all(comm, stream, gradient.residual());
    for (size_t i = 0; i < given.size(); ++i) CHECK(given[i] == out_[i] + kept[i]);
  }

 private:
  static void add(const std::vector<float>& values, std::vector<float>& to) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += values[i];
  }
  std::vector<float> in_, out_;
};

inline void step(Rank& self, ncclComm_t comm, cudaStream_t stream, Gradient& gradient,
                 Balance& balance, int turn) {
  const std::vector<float> values = values_of(self, turn, gradient.count());
  gradient.put(values);
  balance.in(values);
  NCCL(gradient.call(comm, stream));
  balance.out(gradient.read(stream));
}

}  // namespace scape::cases
