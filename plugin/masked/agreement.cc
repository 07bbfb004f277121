#include "plugin/masked/agreement.h"

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cstring>
#include <new>
#include <utility>

namespace scape::plugin {
namespace {

std::string shown(uint64_t value) { return format("%" PRIu64, value); }
// The shortest text that no other value has.
std::string shown(double value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof text, value).ptr);
}
std::string shown(const char (&value)[64]) {
  return format("'%.*s'", static_cast<int>(sizeof(value)), value);
}

// The fields in the order in which they are compared: what a record is first, then what it says.
struct Field {
  const char* name;
  std::string (*show)(const AgreementRecord&);
};
constexpr Field kFields[] = {
    {"the format of the agreement",
     [](const AgreementRecord& r) { return shown(uint64_t{r.version}); }},
    {"name", [](const AgreementRecord& r) { return shown(r.name); }},
    {"offset", [](const AgreementRecord& r) { return shown(r.offset); }},
    {"count", [](const AgreementRecord& r) { return shown(r.count); }},
    {"element type", [](const AgreementRecord& r) { return type_text(r.dtype); }},
    {"role", [](const AgreementRecord& r) { return role_text(r.role); }},
    {"payload", [](const AgreementRecord& r) { return type_text(r.payload); }},
    {"residual", [](const AgreementRecord& r) { return residual_text(r.residual); }},
    {"rule", [](const AgreementRecord& r) { return rule_text(r.rule); }},
    {"sparsity", [](const AgreementRecord& r) { return shown(r.sparsity); }},
    {"dense_steps", [](const AgreementRecord& r) { return shown(r.dense_steps); }},
    {"ramp_steps", [](const AgreementRecord& r) { return shown(r.ramp_steps); }},
    {"ramp_sparsity", [](const AgreementRecord& r) { return shown(r.ramp_sparsity); }},
    {"beta1", [](const AgreementRecord& r) { return shown(r.beta1); }},
    {"beta2", [](const AgreementRecord& r) { return shown(r.beta2); }},
    {"eps", [](const AgreementRecord& r) { return shown(r.eps); }},
    {"age_cap", [](const AgreementRecord& r) { return shown(r.age_cap); }},
    {"step", [](const AgreementRecord& r) { return shown(r.step); }},
    {"checksum of the replicated state",
     [](const AgreementRecord& r) { return format("%016" PRIx64, r.checksum); }},
};

}  // namespace

AgreementRecord make_agreement_record(const BufferConfig& config, uint64_t count, uint64_t step,
                                      uint64_t checksum) {
  AgreementRecord record;
  record.dtype = config.dtype;
  record.role = config.role;
  record.payload = config.payload;
  record.residual = config.residual;
  record.rule = config.rule;
  record.offset = config.offset;
  record.count = count;
  record.sparsity = config.sparsity;
  record.dense_steps = config.dense_steps;
  record.ramp_steps = config.ramp_steps;
  record.ramp_sparsity = config.ramp_sparsity;
  record.beta1 = config.beta1;
  record.beta2 = config.beta2;
  record.eps = config.eps;
  record.age_cap = config.age_cap;
  record.step = step;
  record.checksum = checksum;
  std::memcpy(record.name, config.name.data(), std::min(config.name.size(), sizeof(record.name)));
  return record;
}

Status compare_records(const std::vector<AgreementRecord>& records) {
  for (const Field& field : kFields) {
    const std::string first = field.show(records[0]);
    for (size_t rank = 1; rank < records.size(); ++rank) {
      const std::string other = field.show(records[rank]);
      if (other == first) continue;
      return error(
          SCAPE_ERR_MISMATCH,
          "buffer %s: ranks disagree on %s: rank 0 has %s, rank %zu has %s; register it with "
          "the same options, and load the same checkpoint, on every rank",
          shown(records[0].name).c_str(), field.name, first.c_str(), rank, other.c_str());
    }
  }
  return Status::Ok();
}

Agreement::Agreement(std::shared_ptr<MemorySpace> memory, const AgreementRecord& mine, int ranks)
    : memory_(std::move(memory)),
      ranks_(static_cast<size_t>(ranks)),
      name_(mine.name, ::strnlen(mine.name, sizeof(mine.name))) {
  records_.resize(ranks_ + 1);
  staging_ = static_cast<AgreementRecord*>(memory_->allocate_staging(bytes()));
  if (staging_ == nullptr) throw std::bad_alloc();
  std::fill_n(staging_, ranks_ + 1, AgreementRecord{});
  staging_[0] = mine;
}

Agreement::~Agreement() { memory_->release_staging(staging_, bytes()); }

Status Agreement::start(Communicator& side, Stream stream, WorkPtr* work) {
  memory_->copy(stream, records_.data(), staging_, bytes());
  const CallTag tag{.registered = true, .name = name_, .stream = stream};
  return side.all_gather(records_.data(), records_.data() + 1, sizeof(AgreementRecord),
                         DataType::kUint8, tag, work);
}

Status Agreement::finish(Stream stream) {
  memory_->copy(stream, staging_, records_.data(), bytes());
  return Status::Ok();
}

void Agreement::conclude() {
  verdict_ = compare_records(std::vector<AgreementRecord>(staging_ + 1, staging_ + 1 + ranks_));
}

}  // namespace scape::plugin
