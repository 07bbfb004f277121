// Calls that bring Scape's options themselves (scape.h, "Options of a single call").
#include <cstring>
#include <deque>

#include "tests/functional/cases/case.h"

namespace scape::cases {
namespace {

constexpr size_t kCount = 1000;

// An NCCL configuration with a list of options.
class Options {
 public:
  Options() {
    config_.size = sizeof config_;
    config_.magic = kApiMagic;
    config_.version = kVersionCode;
  }
  Options& name(const char* value) {
    add(SCAPE_CALL_NAME).val.s = value;
    return *this;
  }
  Options& number(int option, int value) {
    add(option).val.i = value;
    return *this;
  }
  Options& pointer(int option, const void* value) {
    add(option).val.raw = const_cast<void*>(value);
    return *this;
  }
  Options& of_vendor(int vendor) {
    list_.back().key.vendorId = vendor;
    return *this;
  }
  // The list has no end.
  Options& ring() {
    list_.front().next = &list_.back();
    return *this;
  }
  const ncclCollConfig_t* config() {
    config_.ext = list_.empty() ? nullptr : &list_.back();
    return &config_;
  }

 private:
  ncclConfigExt_t& add(int option) {
    ncclConfigExt_t entry{};
    entry.next = list_.empty() ? nullptr : &list_.back();
    entry.key = {SCAPE_VENDOR_ID, option};
    list_.push_back(entry);
    return list_.back();
  }
  ncclCollConfig_t config_{};
  std::deque<ncclConfigExt_t> list_;
};

ncclResult_t call(std::vector<float>& buffer, ncclComm_t comm, const ncclCollConfig_t* config,
                  ncclRedOp_t op = ncclSum) {
  return ncclAllReduceConfig(buffer.data(), buffer.data(), buffer.size(), ncclFloat32, op, comm,
                             nullptr, config);
}

// What a call with options does is what a registration does, wherever its buffer is.
RANKED_CASE(call_options_as_a_registration, 3) {
  ncclComm_t comm = self.init();
  const scape_config as_registered = gradient_config("registered", 0.1);
  std::vector<float> registered(kCount);
  add(registered.data(), kCount, "registered", 0.1);
  Options options;
  options.pointer(SCAPE_CALL_CONFIG, &as_registered).name("own");
  std::vector<float> places[2] = {std::vector<float>(kCount), std::vector<float>(kCount)};
  Conservation conservation(kCount);
  for (int step = 0; step < 9; ++step) {
    std::vector<float>& own = places[step % 2];
    const std::vector<float> values = values_of(self, step, kCount);
    conservation.input(values);
    fill(own, values);
    fill(registered, values);
    NCCL(call(own, comm, options.config()));
    all_reduce(registered, comm);
    CHECK(own == registered);
    conservation.output(own);
  }
  const void* last = places[0].data();
  conservation.check(self, comm, last);
  CHECK(stats_of(last, kCount).sparse_calls == 8);
  std::vector<uint64_t> mask((kCount + 63) / 64), other(mask.size());
  SCAPE(scape_read_mask(last, kCount, mask.data(), mask.size()));
  SCAPE(scape_read_mask(registered.data(), kCount, other.data(), other.size()));
  CHECK(mask == other);
  // Without options the call is a dense one of nobody's.
  fill(places[0], std::vector<float>(kCount, 1));
  NCCL(call(places[0], comm, nullptr));
  CHECK(places[0] == std::vector<float>(kCount, 3));
  CHECK(stats_of(last, kCount).sparse_calls == 8);
  NCCL(ncclCommDestroy(comm));
}

// Role, sparsity and rule go before what the configuration says; the fused step finds the buffer.
RANKED_CASE(call_options_of_the_fused_role, 2) {
  ncclComm_t comm = self.init();
  scape_config config = gradient_config("left behind", 0.5);
  const double sparsity = 0.9;
  Options options;
  options.name("fused")
      .number(SCAPE_CALL_ROLE, SCAPE_ROLE_FUSED)
      .pointer(SCAPE_CALL_SPARSITY, &sparsity)
      .number(SCAPE_CALL_RULE, SCAPE_RULE_PLAIN)
      .pointer(SCAPE_CALL_CONFIG, &config)
      .number(7, 7)
      .of_vendor(4711);
  std::vector<float> gradient(kCount), param(kCount, 1);
  for (int step = 0; step < 6; ++step) {
    fill(gradient, values_of(self, step, kCount));
    NCCL(call(gradient, comm, options.config(), ncclAvg));
    SCAPE(scape_adams_step(gradient.data(), kCount, param.data(), 1e-3, 0.1, nullptr));
  }
  check_agreement(self, comm, param.data(), kCount * sizeof(float));
  const scape_stats stats = stats_of(gradient.data(), kCount);
  CHECK(stats.sparse_calls == 5);
  CHECK(stats.mask_elements >= kCount / 10 && stats.mask_elements <= kCount / 10 + 2);
  size_t needed = 0;
  SCAPE(scape_save_state(nullptr, 0, &needed));
  std::vector<char> state(needed);
  SCAPE(scape_save_state(state.data(), needed, &needed));
  CHECK(std::string(state.begin(), state.end()).find("fused") != std::string::npos);
  NCCL(ncclCommDestroy(comm));
}

void expect_refusal(ncclResult_t got, ncclResult_t expected, const char* part) {
  const std::string why = ncclGetLastError(nullptr);
  CHECK_SAYING(got == expected && contains(why, part), why + " (expected: " + part + ")");
}

RANKED_CASE(call_options_refused, 1) {
  ncclComm_t comm = self.init();
  std::vector<float> buffer(kCount), registered(kCount);
  add(registered.data(), kCount, "theirs", 0.1);
  const double much = 1.5, half = 0.5, most = 0.9;
  const auto refused = [&](Options& options, const char* part,
                           ncclResult_t expected = ncclInvalidArgument) {
    expect_refusal(call(buffer, comm, options.config()), expected, part);
  };
  refused(Options().pointer(SCAPE_CALL_SPARSITY, &half), "SCAPE_CALL_NAME");
  refused(Options().name("a").number(6, 1), "6 is no option");
  refused(Options().name("a").number(-1, 1), "-1 is no option");
  refused(Options().name("a").name("b"), "SCAPE_CALL_NAME twice");
  refused(Options().name(nullptr), "SCAPE_CALL_NAME is null");
  refused(Options().name(""), "0 bytes");
  refused(Options().name("a").pointer(SCAPE_CALL_SPARSITY, nullptr), "SCAPE_CALL_SPARSITY is null");
  refused(Options().name("a").pointer(SCAPE_CALL_SPARSITY, &much), "1.5");
  refused(Options().name("a").number(SCAPE_CALL_ROLE, 9), "config.role is 9");
  refused(Options().name("a").number(SCAPE_CALL_RULE, -1), "config.rule is -1");
  refused(Options().number(1, 1).of_vendor(1).number(1, 1).of_vendor(1).ring(), "null `next`");
  scape_config unset{};
  refused(Options().name("a").pointer(SCAPE_CALL_CONFIG, &unset), "scape_config_init");

  Options mine;
  mine.name("mine");
  expect_refusal(call(registered, comm, mine.config()), ncclInvalidUsage, "theirs");
  expect_refusal(call(buffer, comm, mine.config(), ncclMax), ncclInvalidArgument, "max");
  expect_refusal(ncclAllReduceConfig(buffer.data(), buffer.data(), 10, ncclInt32, ncclSum, comm,
                                     nullptr, mine.config()),
                 ncclInvalidArgument, "int32");
  expect_refusal(ncclBroadcastConfig(buffer.data(), buffer.data(), 10, ncclFloat32, 0, comm,
                                     nullptr, mine.config()),
                 ncclInvalidUsage, "only all-reduces");
  SCAPE(scape_next("next"));
  expect_refusal(call(buffer, comm, mine.config()), ncclInvalidUsage, "named twice");

  NCCL(call(buffer, comm, mine.config()));
  refused(Options().name("mine").pointer(SCAPE_CALL_SPARSITY, &most), "0.9 now", ncclInvalidUsage);
  buffer.resize(kCount / 2);
  refused(Options().name("mine"), "500 now", ncclInvalidUsage);
  std::vector<float> stranger(10);
  CHECK(scape_adams_step(stranger.data(), 10, stranger.data(), 1e-3, 0, nullptr) ==
        SCAPE_ERR_NOT_FOUND);
  CHECK(contains(scape_last_error(), "SCAPE_CALL_NAME"));
  NCCL(ncclCommDestroy(comm));
}

// One rank leaves the options out, or has others: both hear of it.
RANKED_CASE(call_options_on_one_rank, 2) {
  const double sparsity[] = {0.5, 0.9};
  for (const bool left_out : {true, false}) {
    ncclComm_t comm = self.init();
    std::vector<float> buffer(kCount, 1);
    const char* name = left_out ? "first" : "second";
    Options options;
    options.name(name).pointer(SCAPE_CALL_SPARSITY, &sparsity[self.rank]);
    const ncclCollConfig_t* const config = left_out && self.rank == 1 ? nullptr : options.config();
    ncclResult_t result = call(buffer, comm, config, ncclAvg);
    std::vector<float> param(kCount);
    for (int step = 0; step < 2 && result == ncclSuccess; ++step) {
      SCAPE(scape_adams_step(buffer.data(), kCount, param.data(), 1e-3, 0, nullptr));
      result = call(buffer, comm, config, ncclAvg);
    }
    const std::string why = ncclGetLastError(comm);
    CHECK_SAYING(result == ncclInvalidUsage && contains(why, name), why);
    CHECK_SAYING(left_out || (contains(why, "0.5") && contains(why, "0.9")), why);
    NCCL(ncclCommAbort(comm));
  }
}

}  // namespace
}  // namespace scape::cases
