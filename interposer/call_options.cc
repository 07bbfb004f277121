#include "interposer/call_options.h"

#include <algorithm>

#include "plugin/masked/masked_buffer.h"

namespace scape::interposer {
namespace {

using nccl::ncclConfigExt_t;

constexpr const char* kNames[] = {"",
                                  "SCAPE_CALL_NAME",
                                  "SCAPE_CALL_ROLE",
                                  "SCAPE_CALL_SPARSITY",
                                  "SCAPE_CALL_RULE",
                                  "SCAPE_CALL_CONFIG"};
constexpr int kOptions = 5;

// A list is the caller's, and may be a ring by mistake.
constexpr int kLongestList = 1000;

Status collect(const ncclConfigExt_t* list, const ncclConfigExt_t* (&found)[kOptions + 1]) {
  int seen = 0;
  for (const ncclConfigExt_t* entry = list; entry != nullptr; entry = entry->next) {
    if (++seen > kLongestList) {
      return error(SCAPE_ERR_ARGUMENT,
                   "ncclCollConfig_t.ext has more than %d entries; end the list with a null `next`",
                   kLongestList);
    }
    if (entry->key.vendorId != SCAPE_VENDOR_ID) continue;
    const int option = entry->key.optionId;
    if (option < 1 || option > kOptions) {
      return error(SCAPE_ERR_ARGUMENT,
                   "ncclCollConfig_t.ext: %d is no option of Scape; scape_call_option has 1 .. %d",
                   option, kOptions);
    }
    if (found[option] != nullptr) {
      return error(SCAPE_ERR_ARGUMENT, "ncclCollConfig_t.ext has %s twice; leave one out",
                   kNames[option]);
    }
    const bool by_pointer =
        option == SCAPE_CALL_NAME || option == SCAPE_CALL_SPARSITY || option == SCAPE_CALL_CONFIG;
    if (by_pointer && entry->val.raw == nullptr) {
      return error(SCAPE_ERR_ARGUMENT, "%s is null; point it at its value", kNames[option]);
    }
    found[option] = entry;
  }
  return {};
}

}  // namespace

Status read_call_options(const nccl::ncclCollConfig_t* call, CallOptions* out) {
  constexpr size_t kReach = offsetof(nccl::ncclCollConfig_t, ext) + sizeof call->ext;
  if (call == nullptr || call->size < kReach) return {};
  const ncclConfigExt_t* found[kOptions + 1] = {};
  SCAPE_RETURN_IF_ERROR(collect(call->ext, found));
  out->present = std::any_of(std::begin(found), std::end(found),
                             [](const ncclConfigExt_t* entry) { return entry != nullptr; });
  if (!out->present) return {};
  if (found[SCAPE_CALL_NAME] == nullptr) {
    return error(SCAPE_ERR_ARGUMENT,
                 "the call has options of Scape but no SCAPE_CALL_NAME; name the buffer");
  }
  scape_config& config = out->config;
  plugin::default_config(&config);
  if (const auto* entry = found[SCAPE_CALL_CONFIG]; entry != nullptr) {
    SCAPE_RETURN_IF_ERROR(
        plugin::read_config(*static_cast<const scape_config*>(entry->val.raw), &config));
  }
  config.name = found[SCAPE_CALL_NAME]->val.s;
  if (const auto* entry = found[SCAPE_CALL_ROLE]; entry != nullptr) {
    config.role = static_cast<scape_role>(entry->val.i);
  }
  if (const auto* entry = found[SCAPE_CALL_SPARSITY]; entry != nullptr) {
    config.sparsity = *static_cast<const double*>(entry->val.raw);
  }
  if (const auto* entry = found[SCAPE_CALL_RULE]; entry != nullptr) {
    config.rule = static_cast<scape_rule>(entry->val.i);
  }
  return {};
}

Status refuse_call_options(const nccl::ncclCollConfig_t* config) {
  CallOptions options;
  SCAPE_RETURN_IF_ERROR(read_call_options(config, &options));
  if (!options.present) return {};
  return error(SCAPE_ERR_USAGE,
               "\"%s\": only all-reduces are made sparse; leave Scape's options out of this call",
               options.config.name);
}

}  // namespace scape::interposer
