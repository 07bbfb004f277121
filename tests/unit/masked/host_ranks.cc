#include "host_ranks.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <thread>

#include "plugin/host_communicator.h"
#include "tests/support/run_ranks.h"

namespace scape::plugin::test {
namespace {

// Where rank 0 leaves the unique id for the others.
struct Shared {
  std::atomic<bool> there{false};
  UniqueId id;
};

Status meet(Shared* shared, int rank, int ranks, std::shared_ptr<Communicator>* out) {
  if (rank == 0) {
    SCAPE_RETURN_IF_ERROR(make_unique_id(&shared->id));
    shared->there.store(true, std::memory_order_release);
  }
  while (!shared->there.load(std::memory_order_acquire)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return create_communicator(shared->id, rank, ranks, out);
}

}  // namespace

void run_host_ranks(int ranks,
                    const std::function<std::string(std::shared_ptr<Communicator>)>& body,
                    double limit_s, const std::map<std::string, std::string>& environment) {
  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* shared = new (memory) Shared;
  const auto results = scape::test::run_ranks(
      ranks,
      [&](int rank, int size) -> std::string {
        for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
        std::shared_ptr<Communicator> communicator;
        if (Status status = meet(shared, rank, size, &communicator); !status.ok())
          return status.message();
        return body(std::move(communicator));
      },
      limit_s);
  EXPECT_TRUE(scape::test::all_well(results)) << scape::test::text_of(results);
  ::munmap(memory, sizeof(Shared));
}

}  // namespace scape::plugin::test
