// Device mode over the stub NCCL: what a program calls reaches it, once, and nothing else does.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "nccl/api.h"
#include "tests/support/stub_nccl.h"
#define SCAPE_LINKED  // for the types alone: the functions are looked up in the library under test
#include "scape/scape.h"

namespace scape::nccl {
namespace {

void* library(const char* path) {
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) ADD_FAILURE() << dlerror();
  return handle;
}

template <typename Function>
Function* find(const std::string& name) {
  static void* const scape = library(SCAPE_NCCL);
  void* found = dlsym(scape, name.c_str());
  EXPECT_NE(found, nullptr) << name;
  return reinterpret_cast<Function*>(found);
}

uint64_t calls(const char* name) {
  static void* const stub = library(STUB_NCCL);
  using Calls = uint64_t(const char*);
  return reinterpret_cast<Calls*>(dlsym(stub, "stub_nccl_calls"))(name);
}

template <typename R, typename... A>
R call_with_zeros(R (*function)(A...)) {
  return function(A{}...);
}

TEST(PassThrough, EveryFunctionArrivesOnceUnderBothNames){
#define SCAPE_NCCL_COMMON(type, name, params, args)
#define SCAPE_NCCL_FUNCTION(type, name, params, args)            \
  {                                                              \
    const uint64_t before = calls("nccl" #name);                 \
    call_with_zeros<type>(find<type params>("nccl" #name));      \
    EXPECT_EQ(calls("nccl" #name), before + 1) << "nccl" #name;  \
    call_with_zeros<type>(find<type params>("pnccl" #name));     \
    EXPECT_EQ(calls("nccl" #name), before + 2) << "pnccl" #name; \
  }
#include "nccl/function_list.h"
}

TEST(PassThrough, VersionAndIdAreTheRealOnes) {
  int version = 0;
  EXPECT_EQ(find<ncclResult_t(int*)>("ncclGetVersion")(&version), ncclSuccess);
  EXPECT_EQ(version, kStubVersion);
  EXPECT_EQ(find<ncclResult_t(int*)>("ncclGetVersion")(nullptr), ncclInvalidArgument);
  ncclUniqueId id{};
  EXPECT_EQ(find<ncclResult_t(ncclUniqueId*)>("ncclGetUniqueId")(&id), ncclSuccess);
  EXPECT_EQ(id.internal[17], 0x5b);
}

TEST(PassThrough, RegisteredBuffersTravelDenseAndSayWhy) {
  std::vector<float> buffer(1000, 1.5f), result(1000);
  scape_registration registration = nullptr;
  const auto add =
      find<scape_status(void*, size_t, scape_dtype, const scape_config*, scape_registration*)>(
          "scape_register");
  ASSERT_EQ(add(buffer.data(), buffer.size(), SCAPE_FLOAT32, nullptr, &registration), SCAPE_OK);
  const auto all_reduce = find<ncclResult_t(const void*, void*, size_t, ncclDataType_t, ncclRedOp_t,
                                            ncclComm_t, cudaStream_t)>("ncclAllReduce");
  ASSERT_EQ(all_reduce(buffer.data(), result.data(), 1000, ncclFloat32, ncclSum, nullptr, nullptr),
            ncclSuccess);
  EXPECT_EQ(result, buffer);
  scape_stats stats{};
  stats.size = sizeof stats;
  ASSERT_EQ(find<scape_status(const void*, size_t, scape_stats*)>("scape_get_stats")(buffer.data(),
                                                                                     0, &stats),
            SCAPE_OK);
  EXPECT_EQ(stats.intercepted_calls, 1u);
  EXPECT_EQ(stats.dense_calls, 1u);
  EXPECT_EQ(stats.fallback_calls, 1u);
  EXPECT_EQ(stats.sparse_calls, 0u);
  EXPECT_EQ(find<scape_status(scape_registration)>("scape_self_check")(registration),
            SCAPE_ERR_USAGE);
  const std::string why = find<const char*()>("scape_last_error")();
  EXPECT_NE(why.find("was not made through this library"), std::string::npos) << why;
  EXPECT_EQ(find<scape_status(scape_registration)>("scape_unregister")(registration), SCAPE_OK);
}

}  // namespace
}  // namespace scape::nccl
