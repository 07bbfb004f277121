// The agreement: ranks compare what they think a buffer is, once, on the side channel.
//
// Each rank sends one record of a fixed size. Every rank compares all of them with rank 0's and so
// comes to the same verdict in the same words.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "plugin/masked/array.h"
#include "plugin/masked/masked_buffer.h"
#include "plugin/masked/refresher.h"

namespace scape::plugin {

inline constexpr uint32_t kAgreementVersion = 1;

// What travels. No padding, so that the bytes are the record.
struct AgreementRecord {
  uint32_t version = kAgreementVersion;
  int32_t dtype = 0;
  int32_t role = 0;
  int32_t payload = 0;
  int32_t residual = 0;
  int32_t rule = 0;
  uint64_t offset = 0;
  uint64_t count = 0;
  double sparsity = 0;
  uint64_t dense_steps = 0;
  uint64_t ramp_steps = 0;
  double ramp_sparsity = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double age_cap = 0;
  uint64_t step = 0;
  uint64_t checksum = 0;  // of the replicated state before the step; 0 for a new buffer
  char name[64] = {};
};
static_assert(std::has_unique_object_representations_v<char[64]> && sizeof(AgreementRecord) == 184);

AgreementRecord make_agreement_record(const BufferConfig& config, uint64_t count, uint64_t step,
                                      uint64_t checksum);

// Ok, or MISMATCH naming the first field in which some rank differs from rank 0, both ranks and
// both values.
Status compare_records(const std::vector<AgreementRecord>& records);

// All-gathers this rank's record and compares.
class Agreement final : public SideJob {
 public:
  // Throws std::bad_alloc.
  Agreement(std::shared_ptr<MemorySpace> memory, const AgreementRecord& mine, int ranks);
  ~Agreement() override;
  Agreement(const Agreement&) = delete;
  Agreement& operator=(const Agreement&) = delete;

  // Valid once done() with an ok status().
  const Status& verdict() const { return verdict_; }

  Status start(Communicator& side, Stream stream, WorkPtr* work) override;
  Status finish(Stream stream) override;
  bool for_host() const override { return true; }
  void conclude() override;

 private:
  size_t bytes() const { return (ranks_ + 1) * sizeof(AgreementRecord); }

  const std::shared_ptr<MemorySpace> memory_;
  const size_t ranks_;
  const std::string name_;
  // Both: this rank's record, then those of all ranks.
  Array<AgreementRecord> records_{*memory_};
  AgreementRecord* staging_;
  Status verdict_;
};

}  // namespace scape::plugin
