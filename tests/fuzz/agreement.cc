// The records that ranks send each other of a buffer, one after the other.
#include "plugin/masked/agreement.h"
#include "tests/fuzz/input.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace scape;
  // At least two ranks; what is missing is as in a record of the defaults.
  std::vector<plugin::AgreementRecord> records(
      std::clamp<size_t>(size / sizeof(plugin::AgreementRecord), 2, 64));
  std::memcpy(static_cast<void*>(records.data()), data,
              std::min(size, records.size() * sizeof records[0]));
  const Status verdict = plugin::compare_records(records);
  fuzz::require(
      verdict.ok() || (verdict.code() == SCAPE_ERR_MISMATCH && !verdict.message().empty()),
      "a refusal without a reason");
  const bool same = std::all_of(records.begin(), records.end(), [&](const auto& record) {
    return std::memcmp(&record, &records[0], sizeof record) == 0;
  });
  fuzz::require(verdict.ok() || !same, "equal records that differ");
  return 0;
}
