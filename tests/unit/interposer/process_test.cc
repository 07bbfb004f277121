#include "interposer/process.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>

namespace scape::interposer {
namespace {

TEST(WithoutPreload, TakesOutThisLibraryAndKeepsTheRest) {
  const std::string own = "/opt/scape/lib/libscape_nccl.so";
  EXPECT_EQ(without_preload(own, own), "");
  EXPECT_EQ(without_preload("/a.so:" + own + ":/b.so", own), "/a.so:/b.so");
  EXPECT_EQ(without_preload("/a.so " + own + " /b.so", own), "/a.so /b.so");
  EXPECT_EQ(without_preload(own + ":/b.so", own), "/b.so");
  EXPECT_EQ(without_preload("/a.so:/b.so", own), "/a.so:/b.so");
  EXPECT_EQ(without_preload("libscape_nccl.so:/b.so", own), "/b.so");
  EXPECT_EQ(without_preload("/other/libscape_nccl.so.old", own), "/other/libscape_nccl.so.old");
  EXPECT_EQ(without_preload("::" + own + ": ", own), "");
}

TEST(LastError, BelongsToTheThreadAndIsCutToFit) {
  set_last_error("mine");
  std::thread([] {
    EXPECT_STREQ(last_error(), "");
    set_last_error(std::string(5000, 'x').c_str());
    EXPECT_EQ(std::string(last_error()).size(), 1023u);
  }).join();
  EXPECT_STREQ(last_error(), "mine");
}

TEST(Guarded, TurnsEveryEndIntoACode) {
  EXPECT_EQ(guarded("f", [] { return Status(); }), SCAPE_OK);
  EXPECT_EQ(guarded("f", [] { return error(SCAPE_ERR_USAGE, "used wrongly"); }), SCAPE_ERR_USAGE);
  EXPECT_STREQ(last_error(), "used wrongly");
  EXPECT_EQ(guarded("f", []() -> Status { throw std::bad_alloc(); }), SCAPE_ERR_MEMORY);
  EXPECT_EQ(guarded("f", []() -> Status { throw std::runtime_error("thrown"); }),
            SCAPE_ERR_INTERNAL);
  EXPECT_STREQ(last_error(), "thrown");
  EXPECT_EQ(guarded("f", []() -> Status { throw 7; }), SCAPE_ERR_INTERNAL);
}

TEST(ToNccl, KeepsTimeOutsFromCallersThatDoNotKnowThem) {
  EXPECT_EQ(to_nccl(SCAPE_OK), nccl::ncclSuccess);
  EXPECT_EQ(to_nccl(SCAPE_ERR_ARGUMENT), nccl::ncclInvalidArgument);
  EXPECT_EQ(to_nccl(SCAPE_ERR_MISMATCH), nccl::ncclInvalidUsage);
  EXPECT_EQ(to_nccl(SCAPE_ERR_SYSTEM), nccl::ncclSystemError);
  EXPECT_EQ(to_nccl(SCAPE_ERR_REMOTE), nccl::ncclRemoteError);
  note_caller_version(22809);
  EXPECT_EQ(to_nccl(SCAPE_ERR_TIMEOUT), nccl::ncclRemoteError);
  note_caller_version(23203);
  EXPECT_EQ(to_nccl(SCAPE_ERR_TIMEOUT), nccl::ncclTimeout);
}

TEST(OwnObject, IsThisFile) {
  EXPECT_NE(own_object().base, nullptr);
  EXPECT_EQ(object_of(reinterpret_cast<const void*>(&guarded<Status (*)()>)).base,
            own_object().base);
  EXPECT_EQ(object_of(nullptr).base, nullptr);
}

}  // namespace
}  // namespace scape::interposer
