#include "interposer/process.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cfenv>
#include <cstdlib>
#include <limits>
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

#if defined(__x86_64__)
TEST(Guarded, RunsInTheDefaultFloatingPointEnvironmentAndPutsTheCallersBack) {
  const unsigned flushing = 0x1f80 | 0x8040;  // denormals are zeros, on the way in and out
  volatile float denormal = std::numeric_limits<float>::denorm_min();
  float sum = 0;
  _mm_setcsr(flushing);
  std::fesetround(FE_UPWARD);
  const unsigned callers = _mm_getcsr();
  guarded("f", [&] {
    sum = denormal + denormal;
    EXPECT_EQ(_mm_getcsr() & ~0x3fu, 0x1f80u);
    return Status();
  });
  const unsigned afterwards = _mm_getcsr();
  const float flushed = denormal + denormal;
  _mm_setcsr(0x1f80);
  EXPECT_EQ(sum, 2 * std::numeric_limits<float>::denorm_min());
  EXPECT_EQ(flushed, 0);
  EXPECT_EQ(afterwards, callers);
}
#endif

// Of a forked child that asks whether it may use what is open.
int status_of_child(pid_t child) {
  if (child == 0) ::_exit(check_process().code());
  int state = 0;
  EXPECT_EQ(::waitpid(child, &state, 0), child);
  return WIFEXITED(state) ? WEXITSTATUS(state) : -1;
}
TEST(CheckProcess, RefusesChildrenHoweverTheyWereMade) {
  EXPECT_EQ(status_of_child(::fork()), SCAPE_OK) << "nothing is open yet";
  claim_process();
  EXPECT_TRUE(check_process().ok());
  EXPECT_EQ(status_of_child(::fork()), SCAPE_ERR_USAGE);
  void* page = ::mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (::madvise(page, 4096, MADV_WIPEONFORK) == 0) {
    const auto bare =
        static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, 0));
    EXPECT_EQ(status_of_child(bare), SCAPE_ERR_USAGE);
  }
  ::munmap(page, 4096);
  EXPECT_TRUE(check_process().ok()) << "the parent goes on";
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
