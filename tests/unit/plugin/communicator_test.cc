// Communicators between real processes: the collectives besides all-reduce, point to point, several
// communicators and threads, and what is made from a communicator.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <numeric>
#include <thread>

#include "tests/unit/plugin/testing.h"

namespace scape::plugin::test {
namespace {

using scape::test::all_well;
using scape::test::run_rank_threads;
using scape::test::run_ranks;
using scape::test::text_of;

// A body that gets a ready communicator.
std::vector<scape::test::RankResult> with_communicators(
    int ranks, const std::function<std::string(std::shared_ptr<Communicator>)>& body) {
  const UniqueId id = new_id();
  return run_ranks(ranks, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> communicator;
    SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
    return body(std::move(communicator));
  });
}

int64_t value(int rank, size_t i) { return static_cast<int64_t>(i) * 131 + rank * 1000003; }

std::vector<int64_t> values(int rank, size_t count) {
  std::vector<int64_t> result(count);
  for (size_t i = 0; i < count; ++i) result[i] = value(rank, i);
  return result;
}

class Communicators : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Communicators, testing::Values(1, 2, 3, 4, 7));

TEST_P(Communicators, EveryCollectiveMovesEverythingToItsPlace) {
  const auto results =
      with_communicators(GetParam(), [](std::shared_ptr<Communicator> c) -> std::string {
        const int rank = c->rank(), size = c->size();
        const size_t ranks = static_cast<size_t>(size), me = static_cast<size_t>(rank);
        const DataType type = DataType::kInt64;
        WorkPtr work;
        for (const size_t count : {size_t{0}, size_t{1}, size_t{3}, size_t{1001}, size_t{200003}}) {
          const std::vector<int64_t> own = values(rank, count), whole = values(rank, count * ranks);
          std::vector<int64_t> out(count), wide(count * ranks, -1);
          SCAPE_RANK_OK(finish(
              *c, c->reduce_scatter(whole.data(), out.data(), count, type, {}, {}, &work), work));
          for (size_t i = 0; i < count; ++i) {
            int64_t sum = 0;
            for (int r = 0; r < size; ++r) sum += value(r, me * count + i);
            SCAPE_RANK_EXPECT(out[i] == sum);
          }
          // In place: the receiving buffer inside the sending one.
          std::vector<int64_t> both = whole;
          SCAPE_RANK_OK(finish(
              *c,
              c->reduce_scatter(both.data(), both.data() + me * count, count, type, {}, {}, &work),
              work));
          SCAPE_RANK_EXPECT(std::equal(out.begin(), out.end(),
                                       both.begin() + static_cast<std::ptrdiff_t>(me * count)));
          SCAPE_RANK_OK(
              finish(*c, c->all_gather(own.data(), wide.data(), count, type, {}, &work), work));
          for (int r = 0; r < size; ++r) {
            for (size_t i = 0; i < count; ++i)
              SCAPE_RANK_EXPECT(wide[static_cast<size_t>(r) * count + i] == value(r, i));
          }
          both.assign(count * ranks, -1);
          std::copy(own.begin(), own.end(), both.begin() + static_cast<std::ptrdiff_t>(me * count));
          SCAPE_RANK_OK(finish(
              *c, c->all_gather(both.data() + me * count, both.data(), count, type, {}, &work),
              work));
          SCAPE_RANK_EXPECT(both == wide);
          std::vector<size_t> counts(ranks);
          for (size_t r = 0; r < ranks; ++r) counts[r] = r % 2 == 0 ? count / (r + 1) : 0;
          std::vector<int64_t> parts(std::accumulate(counts.begin(), counts.end(), size_t{0}), -1);
          SCAPE_RANK_OK(
              finish(*c, c->all_gather_v(own.data(), parts.data(), counts, type, {}, &work), work));
          size_t at = 0;
          for (int r = 0; r < size; ++r) {
            for (size_t i = 0; i < counts[static_cast<size_t>(r)]; ++i)
              SCAPE_RANK_EXPECT(parts[at++] == value(r, i));
          }
          out.assign(counts[me], -1);
          SCAPE_RANK_OK(
              finish(*c, c->reduce_scatter_v(whole.data(), out.data(), counts, type, {}, {}, &work),
                     work));
          const size_t before = std::accumulate(counts.begin(), counts.begin() + rank, size_t{0});
          for (size_t i = 0; i < counts[me]; ++i) {
            int64_t sum = 0;
            for (int r = 0; r < size; ++r) sum += value(r, before + i);
            SCAPE_RANK_EXPECT(out[i] == sum);
          }
          both = whole;
          SCAPE_RANK_OK(finish(
              *c,
              c->reduce_scatter_v(both.data(), both.data() + before, counts, type, {}, {}, &work),
              work));
          SCAPE_RANK_EXPECT(std::equal(out.begin(), out.end(),
                                       both.begin() + static_cast<std::ptrdiff_t>(before)));
          SCAPE_RANK_OK(
              finish(*c, c->all_to_all(whole.data(), wide.data(), count, type, {}, &work), work));
          for (int r = 0; r < size; ++r) {
            for (size_t i = 0; i < count; ++i) {
              SCAPE_RANK_EXPECT(wide[static_cast<size_t>(r) * count + i] ==
                                value(r, me * count + i));
            }
          }
          both = whole;
          SCAPE_RANK_OK(
              finish(*c, c->all_to_all(both.data(), both.data(), count, type, {}, &work), work));
          SCAPE_RANK_EXPECT(both == wide);
          for (int root = 0; root < size; root += 2) {
            const bool at_root = rank == root;
            out.assign(count, -1);
            SCAPE_RANK_OK(finish(
                *c, c->broadcast(own.data(), out.data(), count, type, root, {}, &work), work));
            SCAPE_RANK_EXPECT(out == values(root, count));
            std::vector<int64_t> sum(count, -1);
            SCAPE_RANK_OK(finish(
                *c, c->reduce(own.data(), sum.data(), count, type, {}, root, {}, &work), work));
            for (size_t i = 0; i < count; ++i) {
              int64_t expected = 0;
              for (int r = 0; r < size; ++r) expected += value(r, i);
              SCAPE_RANK_EXPECT(sum[i] == (at_root ? expected : -1));
            }
            std::vector<int64_t> gathered(count * ranks, -1);
            SCAPE_RANK_OK(finish(*c,
                                 c->gather(own.data(), at_root ? gathered.data() : nullptr, count,
                                           type, root, {}, &work),
                                 work));
            for (int r = 0; r < size && at_root; ++r) {
              for (size_t i = 0; i < count; ++i) {
                SCAPE_RANK_EXPECT(gathered[static_cast<size_t>(r) * count + i] == value(r, i));
              }
            }
            SCAPE_RANK_OK(finish(*c,
                                 c->scatter(at_root ? whole.data() : nullptr, out.data(), count,
                                            type, root, {}, &work),
                                 work));
            for (size_t i = 0; i < count; ++i)
              SCAPE_RANK_EXPECT(out[i] == value(root, me * count + i));
          }
        }
        return "";
      });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST_P(Communicators, PointToPointIsMatchedInOrder) {
  const auto results =
      with_communicators(GetParam(), [](std::shared_ptr<Communicator> c) -> std::string {
        // Everyone sends to everyone, itself included; receives are asked for before and after the
        // sends.
        std::vector<std::vector<int64_t>> out, in;
        std::vector<WorkPtr> works;
        const size_t counts[] = {1, 1000, 300000, 5};
        for (int peer = 0; peer < c->size(); ++peer) {
          for (const size_t count : counts) {
            out.push_back(values(c->rank() * 10 + peer, count));
            in.emplace_back(count, -1);
          }
        }
        const auto post = [&](bool sending) -> std::string {
          for (size_t i = 0; i < out.size(); ++i) {
            const int peer = static_cast<int>(i / std::size(counts));
            WorkPtr work;
            SCAPE_RANK_OK(sending
                              ? c->send(out[i].data(), out[i].size(), DataType::kInt64, peer, &work)
                              : c->recv(in[i].data(), in[i].size(), DataType::kInt64, peer, &work));
            works.push_back(work);
          }
          return "";
        };
        const std::string first = post(c->rank() % 2 == 0);
        const std::string second = post(c->rank() % 2 != 0);
        if (!first.empty() || !second.empty()) return first + second;
        for (const WorkPtr& work : works) SCAPE_RANK_OK(wait(*c, *work));
        for (size_t i = 0; i < in.size(); ++i) {
          const int peer = static_cast<int>(i / std::size(counts));
          SCAPE_RANK_EXPECT(in[i] == values(peer * 10 + c->rank(), in[i].size()));
        }
        return "";
      });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(Communicator, ManyWorksFlyAtOnceAndCountNothingWorksAnywhere) {
  const auto results = with_communicators(3, [](std::shared_ptr<Communicator> c) -> std::string {
    constexpr size_t kCalls = 600;
    std::vector<std::vector<float>> buffers(kCalls, std::vector<float>(33, 1));
    std::vector<WorkPtr> works(2 * kCalls);
    for (size_t i = 0; i < kCalls; ++i) {
      SCAPE_RANK_OK(c->all_reduce(buffers[i].data(), buffers[i].data(), 33, DataType::kFloat32, {},
                                  {}, &works[2 * i]));
      SCAPE_RANK_OK(
          c->all_reduce(nullptr, nullptr, 0, DataType::kFloat32, {}, {}, &works[2 * i + 1]));
      SCAPE_RANK_EXPECT(works[2 * i + 1]->done());
    }
    for (const WorkPtr& work : works) SCAPE_RANK_OK(wait(*c, *work));
    for (const auto& buffer : buffers) {
      for (const float sum : buffer) SCAPE_RANK_EXPECT(sum == 3);
    }
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(Communicator, RefusesBadArgumentsAndGoesOn) {
  const auto results = with_communicators(2, [](std::shared_ptr<Communicator> c) -> std::string {
    std::vector<float> buffer(200, 1);
    WorkPtr work;
    const auto refused = [&](const Status& status, const char* part) {
      return status.code() == SCAPE_ERR_ARGUMENT && contains(status.message(), part);
    };
    float* const data = buffer.data();
    SCAPE_RANK_EXPECT(
        refused(c->all_reduce(nullptr, data, 10, DataType::kFloat32, {}, {}, &work), "null"));
    SCAPE_RANK_EXPECT(
        refused(c->all_reduce(data, data + 8, 100, DataType::kFloat32, {}, {}, &work), "overlap"));
    SCAPE_RANK_EXPECT(
        refused(c->all_reduce(data, data, 10, static_cast<DataType>(12), {}, {}, &work), "12"));
    SCAPE_RANK_EXPECT(
        refused(c->broadcast(data, data, 10, DataType::kFloat32, 2, {}, &work), "root 2"));
    SCAPE_RANK_EXPECT(refused(c->send(data, 10, DataType::kFloat32, 2, &work), "peer 2"));
    SCAPE_RANK_EXPECT(refused(
        c->all_reduce(data, data, SIZE_MAX / 2, DataType::kFloat32, {}, {}, &work), "count"));
    return sum_ones(*c);
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(Communicator, TwoInOneProcessWorkInOppositeOrder) {
  const UniqueId first = new_id(), second = new_id();
  const auto results = run_ranks(2, [&](int rank, int size) -> std::string {
    std::shared_ptr<Communicator> a, b;
    SCAPE_RANK_OK(create_communicator(first, rank, size, &a));
    SCAPE_RANK_OK(create_communicator(second, rank, size, &b));
    std::vector<float> x(300000, 1), y(300000, 2);
    WorkPtr one, other;
    for (int i = 0; i < 20; ++i) {
      std::fill(x.begin(), x.end(), 1.0f);
      std::fill(y.begin(), y.end(), 2.0f);
      Communicator& p = rank == 0 ? *a : *b;
      Communicator& q = rank == 0 ? *b : *a;
      auto& p_data = rank == 0 ? x : y;
      auto& q_data = rank == 0 ? y : x;
      SCAPE_RANK_OK(p.all_reduce(p_data.data(), p_data.data(), p_data.size(), DataType::kFloat32,
                                 {}, {}, &one));
      SCAPE_RANK_OK(q.all_reduce(q_data.data(), q_data.data(), q_data.size(), DataType::kFloat32,
                                 {}, {}, &other));
      while (!one->done() || !other->done()) {
        const bool moved_one = p.progress(), moved_other = q.progress();
        if (!moved_one && !moved_other) std::this_thread::yield();
      }
      SCAPE_RANK_OK(one->status());
      SCAPE_RANK_OK(other->status());
      for (const float sum : x) SCAPE_RANK_EXPECT(sum == 2);
      for (const float sum : y) SCAPE_RANK_EXPECT(sum == 4);
    }
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(Communicator, ThreadsOfOneRankTakeTurns) {
  const auto results = with_communicators(2, [](std::shared_ptr<Communicator> c) -> std::string {
    // Two threads exchange messages in both directions over one communicator, with different peers'
    // numbering.
    std::vector<std::string> problems(2);
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        problems[static_cast<size_t>(t)] = [&]() -> std::string {
          const bool sends = (c->rank() + t) % 2 == 0;
          for (int i = 0; i < 300; ++i) {
            std::vector<int64_t> data = sends ? values(i, 777) : std::vector<int64_t>(777, -1);
            WorkPtr work;
            SCAPE_RANK_OK(finish(
                *c,
                sends ? c->send(data.data(), data.size(), DataType::kInt64, 1 - c->rank(), &work)
                      : c->recv(data.data(), data.size(), DataType::kInt64, 1 - c->rank(), &work),
                work));
            SCAPE_RANK_EXPECT(data == values(i, 777));
          }
          return "";
        }();
      });
    }
    for (std::thread& thread : threads) thread.join();
    return problems[0] + problems[1] + sum_ones(*c);
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(Communicator, RanksMayBeThreadsOfOneProcess) {
  const auto results = run_ranks(1, [](int, int) -> std::string {
    UniqueId id;
    SCAPE_RANK_OK(make_unique_id(&id));
    const auto ranks = run_rank_threads(4, [&](int rank, int size) -> std::string {
      std::shared_ptr<Communicator> communicator;
      SCAPE_RANK_OK(create_communicator(id, rank, size, &communicator));
      return sum_ones(*communicator) + sum_ones(*communicator, 100000);
    });
    return all_well(ranks) ? "" : text_of(ranks);
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(Communicator, CountsBytes) {
  const auto results = with_communicators(2, [](std::shared_ptr<Communicator> c) -> std::string {
    const ByteCounters before = c->counters();
    const size_t count = 1 << 20;
    const std::string problem = sum_ones(*c, count);
    if (!problem.empty()) return problem;
    const ByteCounters after = c->counters();
    // Half the buffer as operands, half as results; headers included.
    SCAPE_RANK_EXPECT(after.sent_bytes - before.sent_bytes >= count * 4);
    SCAPE_RANK_EXPECT(after.sent_bytes - before.sent_bytes <= count * 4 + 65536);
    SCAPE_RANK_EXPECT(after.received_bytes - before.received_bytes >= count * 4);
    SCAPE_RANK_EXPECT(process_counters().sent_bytes >= after.sent_bytes);
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

// ---- made from a communicator ----

TEST(SideChannel, WakesItsOwner) {
  for (const int ranks : {1, 3}) {
    const auto results =
        with_communicators(ranks, [](std::shared_ptr<Communicator> c) -> std::string {
          std::shared_ptr<Communicator> side;
          WorkPtr work;
          SCAPE_RANK_OK(finish(*c, c->side_channel(&side, &work), work));
          SCAPE_RANK_EXPECT(side != nullptr && side->size() == c->size() &&
                            side->rank() == c->rank());
          // A sleeping thread serves the side channel while the main one computes.
          std::string problem;
          std::thread sleeper([&] {
            problem = [&]() -> std::string {
              for (int i = 0; i < 20; ++i) {
                if (side->rank() == 0) ::usleep(5000);
                std::vector<float> data(50000, 1);
                WorkPtr mine;
                SCAPE_RANK_OK(side->all_reduce(data.data(), data.data(), data.size(),
                                               DataType::kFloat32, {}, {}, &mine));
                const auto start = Clock::now();
                while (!mine->done()) {
                  side->progress();
                  if (!mine->done()) side->wait_event(10000);
                }
                SCAPE_RANK_OK(mine->status());
                SCAPE_RANK_EXPECT(seconds_since(start) < 5);
                for (const float sum : data)
                  SCAPE_RANK_EXPECT(sum == static_cast<float>(side->size()));
              }
              return "";
            }();
          });
          std::string own;
          for (int i = 0; i < 50 && own.empty(); ++i) own = sum_ones(*c, 20000);
          sleeper.join();
          return own + problem;
        });
    EXPECT_TRUE(all_well(results)) << text_of(results);
  }
}

TEST(Split, MakesGroupsThatOutliveTheParent) {
  const auto results = with_communicators(5, [](std::shared_ptr<Communicator> c) -> std::string {
    // Colors 0, 1, 0, none, 1; keys turn the order round.
    const int colors[] = {0, 1, 0, -1, 1};
    const int rank = c->rank();
    std::shared_ptr<Communicator> part, single;
    SCAPE_RANK_OK(split_communicator(*c, colors[rank], -rank, &part));
    const std::string used = sum_ones(*c);
    if (!used.empty()) return used;
    SCAPE_RANK_OK(split_communicator(*c, rank, 0, &single));
    SCAPE_RANK_EXPECT(single != nullptr && single->size() == 1);
    c.reset();
    if (rank == 3) {
      SCAPE_RANK_EXPECT(part == nullptr);
      return "";
    }
    SCAPE_RANK_EXPECT(part->size() == 2);
    SCAPE_RANK_EXPECT(part->rank() == (rank == 0 || rank == 1 ? 1 : 0));
    for (int i = 0; i < 5; ++i) {
      const std::string problem = sum_ones(*part);
      if (!problem.empty()) return problem;
    }
    return sum_ones(*single);
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(Shrink, SurvivorsOfADeathGoOn) {
  const auto results = with_communicators(4, [](std::shared_ptr<Communicator> c) -> std::string {
    if (c->rank() == 1) ::raise(SIGKILL);
    SCAPE_RANK_EXPECT(contains(sum_ones(*c, 300000), "rank 1"));
    std::shared_ptr<Communicator> rest;
    const int dead[] = {1};
    SCAPE_RANK_OK(shrink_communicator(*c, dead, &rest));
    SCAPE_RANK_EXPECT(rest->size() == 3 && rest->rank() == (c->rank() == 0 ? 0 : c->rank() - 1));
    c.reset();
    return sum_ones(*rest);
  });
  for (const size_t r : {0, 2, 3})
    EXPECT_TRUE(results[r].ended && results[r].text.empty()) << text_of(results);
}

TEST(Grow, NewRanksJoin) {
  const UniqueId id = new_id(), more = new_id();
  const auto results = run_ranks(4, [&](int rank, int) -> std::string {
    std::shared_ptr<Communicator> old, grown;
    if (rank < 2) {
      SCAPE_RANK_OK(create_communicator(id, rank, 2, &old));
      SCAPE_RANK_OK(grow_communicator(old.get(), rank == 1 ? &more : nullptr, -1, 4, &grown));
    } else {
      SCAPE_RANK_OK(grow_communicator(nullptr, &more, rank, 4, &grown));
    }
    SCAPE_RANK_EXPECT(grown->rank() == rank && grown->size() == 4);
    return sum_ones(*grown) + (old != nullptr ? sum_ones(*old) : "");
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

TEST(Abort, ReachesEveryRank) {
  const auto results = with_communicators(3, [](std::shared_ptr<Communicator> c) -> std::string {
    if (c->rank() == 1) {
      ::usleep(200000);
      c->abort(Status(SCAPE_ERR_REMOTE, "the user gave up"));
      return "";
    }
    const auto start = Clock::now();
    SCAPE_RANK_EXPECT(contains(sum_ones(*c), "the user gave up"));
    SCAPE_RANK_EXPECT(seconds_since(start) < 10);
    return "";
  });
  EXPECT_TRUE(all_well(results)) << text_of(results);
}

}  // namespace
}  // namespace scape::plugin::test
