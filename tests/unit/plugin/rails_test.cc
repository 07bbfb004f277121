// Several rails under one connection of the net plugin: how messages are shared out, and what comes
// of it over transports that deliver, hold back and fail as they are told.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plugin/net/connection.h"
#include "plugin/net/device.h"
#include "plugin/net/stripes.h"
#include "plugin/net/worker.h"

namespace scape::net {
namespace {

using plugin::Operation;
using plugin::Outcome;

// --- arithmetic --------------------------------------------------------------------------------

TEST(Stripes, PartsFollowTheSpeeds) {
  const std::vector<std::vector<uint32_t>> kWeights = {
      {1},
      {10000, 10000},
      {100000, 25000},
      {1, 2, 5},
      {1, UINT32_MAX},
      {7, 7, 7, 7},
      {UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX,
       UINT32_MAX}};
  for (const auto& weights : kWeights) {
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    for (const size_t total :
         {size_t{23}, kStripedFrom + 1, size_t{1} << 20, (size_t{1} << 30) + 7, size_t{1} << 40}) {
      size_t parts[kMaxRails];
      cut(total, weights, parts);
      size_t begin = 0;
      for (size_t i = 0; i < weights.size(); ++i) {
        EXPECT_EQ(begin % 4096, 0u) << "part " << i << " of " << total;
        begin += parts[i];
        const double fair = static_cast<double>(total) * weights[i] / sum;
        EXPECT_NEAR(static_cast<double>(parts[i]), fair, 4096) << "part " << i << " of " << total;
      }
      EXPECT_EQ(begin, total);
    }
  }
}

TEST(Stripes, TurnsFollowTheSpeeds) {
  const auto counts = [](const std::vector<uint32_t>& weights) {
    std::vector<int> taken(weights.size());
    for (const uint8_t turn : turns_of(weights)) ++taken[turn];
    return taken;
  };
  EXPECT_EQ(counts({5}), (std::vector<int>{32}));
  EXPECT_EQ(counts({10000, 10000}), (std::vector<int>{16, 16}));
  EXPECT_EQ(counts({300, 100}), (std::vector<int>{24, 8}));
  EXPECT_EQ(counts({1, 1, 2}), (std::vector<int>{8, 8, 16}));
  const std::vector<uint32_t> alike(2, UINT32_MAX);
  const Turns turns = turns_of(alike);
  for (size_t i = 1; i < turns.size(); ++i) EXPECT_NE(turns[i], turns[i - 1]);
}

TEST(Stripes, HeadsAreTold) {
  std::byte bytes[kHeadBytes];
  StripeHead head, read;
  head.total = size_t{5} << 32;
  head.sequence = 77;
  head.write(bytes);
  ASSERT_TRUE(read.read(bytes));
  EXPECT_EQ(read.total, head.total);
  EXPECT_EQ(read.sequence, head.sequence);
  bytes[3] ^= std::byte{1};
  EXPECT_FALSE(read.read(bytes));
  head.total = 100;  // of what would have been sent whole
  head.write(bytes);
  EXPECT_FALSE(read.read(bytes));
  EXPECT_TRUE(is_striped(kHeadBytes) && is_striped(kStripedFrom + 1));
  EXPECT_TRUE(!is_striped(kHeadBytes - 1) && !is_striped(kStripedFrom) && !is_striped(0));
}

Device device_of(const std::string& name, int number, int speed_mbps) {
  Device device;
  device.transport.name = name;
  device.transport.largest_message = size_t{1} << (40 - number);
  device.guid = static_cast<uint64_t>(number) + 100;
  device.speed_mbps = speed_mbps;
  device.members = {number};
  return device;
}

TEST(JoinedDevices, LookLikeTheirSum) {
  const std::vector<Device> list = {device_of("mlx5_0:1", 0, 100000),
                                    device_of("mlx5_1:1", 1, 25000),
                                    device_of("mlx5_2:1", 2, INT_MAX)};
  const int two[] = {1, 0}, all[] = {0, 1, 2};
  const Device joined = join(list, two);
  EXPECT_EQ(joined.transport.name, "mlx5_1:1+mlx5_0:1");
  EXPECT_EQ(joined.speed_mbps, 125000);
  EXPECT_EQ(joined.guid, 101u);
  EXPECT_EQ(joined.members, (std::vector<int>{1, 0}));
  EXPECT_EQ(joined.transport.largest_message, size_t{1} << 39);
  EXPECT_EQ(join(list, all).speed_mbps, INT_MAX);
}

// --- connections over transports that do as they are told ----------------------------------------

class Wire;

// All wires there are, by the number that is their address; and what happens to those of a device.
struct Network {
  std::vector<Wire*> wires;
  std::set<std::string> held, broken;
  std::map<std::string, size_t> bytes;  // sent on each device

  static Network& instance() {
    static Network network;
    return network;
  }
};

class Wire final : public plugin::Transport {
 public:
  explicit Wire(std::string device) : device_(std::move(device)) {
    number_ = network().wires.size();
    network().wires.push_back(this);
  }
  ~Wire() override { network().wires[number_] = nullptr; }

  std::string_view name() const override { return "wire"; }
  Status address(std::vector<std::byte>* out) override {
    *out = {static_cast<std::byte>(number_)};
    return Status::Ok();
  }
  Status connect(std::span<const std::vector<std::byte>>) override { return Status::Ok(); }
  Status add_peer(const std::vector<std::byte>& address, const std::string&, int* peer) override {
    *peer = static_cast<int>(address[0]);
    return Status::Ok();
  }
  Status register_memory(void* data, size_t, void** region) override {
    *region = static_cast<std::byte*>(data) + number_;
    return Status::Ok();
  }
  void deregister_memory(void*) override {}

  void send(int peer, uint64_t tag, const void* data, size_t bytes, Operation* operation) override {
    begin(operation);
    if (network().broken.count(device_) != 0) return end(operation, Outcome::kFailed);
    network().bytes[device_] += bytes;
    const auto* from = static_cast<const std::byte*>(data);
    Wire* const to = network().wires[static_cast<size_t>(peer)];
    to->inbox_.push_back({tag, {from, from + bytes}});
    end(operation, Outcome::kDone);
  }
  void recv(int, uint64_t tag, void* data, size_t bytes, Operation* operation) override {
    begin(operation);
    posted_.push_back({tag, static_cast<std::byte*>(data), bytes, operation});
  }
  Operation* progress(bool* moved) override {
    if (network().broken.count(device_) != 0) {
      for (const Posted& posted : posted_) end(posted.operation, Outcome::kFailed);
      posted_.clear();
    }
    if (network().held.count(device_) == 0) deliver();
    *moved = ended_ != nullptr;
    return std::exchange(ended_, nullptr);
  }
  void cancel(Operation* operation) override {
    for (auto posted = posted_.begin(); posted != posted_.end(); ++posted) {
      if (posted->operation != operation) continue;
      posted_.erase(posted);
      return end(operation, Outcome::kCancelled);
    }
  }
  void abandon() override {}
  void flush(int) override {}
  int event_fd() const override { return -1; }
  bool arm() override { return false; }
  size_t room() const override { return SIZE_MAX; }
  plugin::TransportCounters counters() const override { return {}; }

 private:
  struct Message {
    uint64_t tag;
    std::vector<std::byte> bytes;
  };
  struct Posted {
    uint64_t tag;
    std::byte* data;
    size_t bytes;
    Operation* operation;
  };

  static Network& network() { return Network::instance(); }

  void begin(Operation* operation) {
    operation->outcome = Outcome::kPending;
    operation->received = 0;
  }
  void end(Operation* operation, Outcome outcome) {
    operation->outcome = outcome;
    operation->next = ended_;
    ended_ = operation;
  }
  // Each posted receive takes the first message of its tag.
  void deliver() {
    for (auto posted = posted_.begin(); posted != posted_.end();) {
      auto message = inbox_.begin();
      while (message != inbox_.end() && message->tag != posted->tag) ++message;
      if (message == inbox_.end()) {
        ++posted;
        continue;
      }
      const bool fits = message->bytes.size() <= posted->bytes;
      if (fits && !message->bytes.empty()) {
        std::memcpy(posted->data, message->bytes.data(), message->bytes.size());
      }
      posted->operation->received = message->bytes.size();
      end(posted->operation, fits ? Outcome::kDone : Outcome::kTruncated);
      inbox_.erase(message);
      posted = posted_.erase(posted);
    }
  }

  const std::string device_;
  size_t number_ = 0;
  std::deque<Message> inbox_;
  std::deque<Posted> posted_;
  Operation* ended_ = nullptr;
};

Status make_wire(const plugin::TransportOptions& options, std::unique_ptr<plugin::Transport>* out) {
  *out = std::make_unique<Wire>(options.device);
  return Status::Ok();
}
const plugin::TransportModule kWires = {plugin::kTransportAbi, "wires", make_wire, nullptr};

std::vector<std::byte> pattern(size_t bytes, unsigned salt) {
  std::vector<std::byte> data(bytes);
  for (size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<std::byte>(salt * 37 + i * 11 + (i >> 9));
  return data;
}

class Rails : public ::testing::Test {
 protected:
  void SetUp() override { Network::instance() = {}; }
  void TearDown() override {
    if (sender_ != nullptr) Connection::close(std::move(sender_));
    if (receiver_ != nullptr) Connection::close(std::move(receiver_));
  }

  // A connection between devices of rails with these speeds.
  void connect(const std::vector<int>& from, const std::vector<int>& to, uint32_t number = 3) {
    int ends[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    const std::shared_ptr<Worker> a = worker("a", from), b = worker("b", to);
    std::vector<Channel> there, back;
    ASSERT_TRUE(a->channels_to(b->addresses(), "the receiver", number, &there).ok());
    ASSERT_TRUE(b->channels_to(a->addresses(), "the sender", number, &back).ok());
    ASSERT_EQ(there.size(), std::min(from.size(), to.size()));
    sender_ = std::make_unique<Connection>(a, plugin::Socket(ends[0]), true, there, number,
                                           "the receiver");
    receiver_ =
        std::make_unique<Connection>(b, plugin::Socket(ends[1]), false, back, number, "the sender");
  }

  static std::shared_ptr<Worker> worker(const std::string& prefix, const std::vector<int>& speeds) {
    Devices devices;
    devices.library = "wires";
    devices.module = &kWires;
    std::vector<int> members;
    for (const int speed : speeds) {
      const int number = static_cast<int>(devices.list.size());
      devices.list.push_back(device_of(prefix + std::to_string(number), number, speed));
      members.push_back(number);
    }
    std::shared_ptr<Worker> made;
    EXPECT_TRUE(Worker::make(devices, join(devices.list, members), &made).ok());
    EXPECT_TRUE(made->take_place());
    return made;
  }

  struct Receive {
    std::vector<std::byte> data;
    Request* request = nullptr;
  };
  void post(Receive* receive, size_t room, int tag) {
    receive->data.assign(room + 64, std::byte{0xee});
    void* data = receive->data.data();
    Registration* memory = nullptr;
    ASSERT_TRUE(receiver_->receive(1, &data, &room, &tag, &memory, &receive->request).ok());
    ASSERT_NE(receive->request, nullptr);
  }
  // Waits for it, and sees that it is the message.
  void expect(Receive* receive, const std::vector<std::byte>& sent) {
    bool done = false;
    int size = -1;
    for (int i = 0; i < 100 && !done; ++i) {
      const Status status = Connection::test(receive->request, &done, &size);
      ASSERT_TRUE(status.ok()) << status.message();
    }
    ASSERT_TRUE(done) << sent.size() << " bytes";
    EXPECT_EQ(size, static_cast<int>(sent.size()));
    EXPECT_TRUE(std::equal(sent.begin(), sent.end(), receive->data.begin())) << sent.size();
    for (size_t i = sent.size(); i < receive->data.size(); ++i) {
      ASSERT_EQ(receive->data[i], std::byte{0xee}) << "byte " << i << " of " << sent.size();
    }
  }
  Status send(const std::vector<std::byte>& data, int tag, Request** request) {
    return sender_->send(const_cast<std::byte*>(data.data()), data.size(), tag, nullptr, request);
  }
  void finish(Request* request) {
    bool done = false;
    ASSERT_TRUE(Connection::test(request, &done, nullptr).ok());
    ASSERT_TRUE(done);
  }

  std::unique_ptr<Connection> sender_, receiver_;
};

TEST_F(Rails, CarryMessagesOfAllSizes) {
  for (const auto& [from, to] : std::vector<std::pair<std::vector<int>, std::vector<int>>>{
           {{100}, {100}},
           {{100, 100}, {100, 100}},
           {{100, 200, 500}, {100, 200, 500}},
           {{100, 200, 500}, {100}},
           {{100}, {100, 200}},
           {{1, 2, 3, 4, 5, 6, 7, 8}, {8, 7, 6, 5, 4, 3, 2, 1}},
           {{100, 100}, {100, 100, 100}}}) {
    SetUp();
    connect(from, to);
    unsigned salt = 0;
    for (const size_t size :
         {size_t{0}, size_t{1}, kHeadBytes - 1, kHeadBytes, kHeadBytes + 1, size_t{5000},
          kStripedFrom, kStripedFrom + 1, (size_t{1} << 20) + 17}) {
      const std::vector<std::byte> data = pattern(size, ++salt);
      Receive receive;
      Request* sending = nullptr;
      post(&receive, size + salt % 3 * 1000, 4);  // larger than what comes, but now and then
      ASSERT_TRUE(send(data, 4, &sending).ok());
      expect(&receive, data);
      finish(sending);
    }
    TearDown();
  }
}

TEST_F(Rails, AreUsedAsFastAsTheyAre) {
  connect({100, 300}, {400, 300});
  const std::vector<std::byte> large = pattern(size_t{4} << 20, 1), small = pattern(1000, 2);
  Receive receive;
  Request* sending = nullptr;
  post(&receive, large.size(), 0);
  ASSERT_TRUE(send(large, 0, &sending).ok());
  expect(&receive, large);
  finish(sending);
  std::map<std::string, size_t>& bytes = Network::instance().bytes;
  EXPECT_NEAR(static_cast<double>(bytes["a0"]), 1 << 20, 5000);
  EXPECT_NEAR(static_cast<double>(bytes["a1"]), 3 << 20, 5000);
  bytes.clear();
  for (int i = 0; i < 64; ++i) {
    post(&receive, small.size(), 0);
    ASSERT_TRUE(send(small, 0, &sending).ok());
    expect(&receive, small);
    finish(sending);
  }
  EXPECT_EQ(bytes["a0"], 16 * small.size());
  EXPECT_EQ(bytes["a1"], 48 * small.size());
}

// Messages of one tag keep their order, and groups their tags, however much later than the other
// one a rail delivers.
TEST_F(Rails, KeepOrderWhileOneIsLate) {
  connect({100, 100}, {100, 100});
  for (const char* late : {"b0", "b1"}) {
    std::vector<std::vector<std::byte>> data;
    std::vector<Receive> receives(8);
    std::vector<Request*> sending(12);
    // Tags 7, in order; and a group of two tags, the second of which is sent first.
    for (unsigned i = 0; i < 12; ++i) data.push_back(pattern(i % 3 == 0 ? 900 : 200000 + i, i));
    for (size_t i = 0; i < receives.size(); ++i) post(&receives[i], 300000, 7);
    std::vector<std::byte> parts[2][2];
    Request* grouped[2] = {};
    for (size_t g = 0; g < 2; ++g) {
      void* into[2];
      const size_t room[] = {300000, 300000};
      const int tags[] = {20, 21};
      for (size_t i = 0; i < 2; ++i) {
        parts[g][i].resize(room[i]);
        into[i] = parts[g][i].data();
      }
      ASSERT_TRUE(receiver_->receive(2, into, room, tags, nullptr, &grouped[g]).ok());
    }
    Network::instance().held = {late};
    for (size_t i = 0; i < 8; ++i) ASSERT_TRUE(send(data[i], 7, &sending[i]).ok());
    const int order[] = {21, 20, 20, 21};
    for (size_t i = 0; i < 4; ++i) ASSERT_TRUE(send(data[8 + i], order[i], &sending[8 + i]).ok());
    for (int i = 0; i < 20; ++i) {
      for (Receive& receive : receives) {
        bool done = false;
        if (receive.request == nullptr) continue;
        int size = 0;
        ASSERT_TRUE(Connection::test(receive.request, &done, &size).ok());
        if (!done) continue;
        const size_t which = static_cast<size_t>(&receive - receives.data());
        ASSERT_EQ(static_cast<size_t>(size), data[which].size());
        receive.request = nullptr;
      }
    }
    Network::instance().held.clear();
    for (size_t i = 0; i < receives.size(); ++i) {
      if (receives[i].request != nullptr) expect(&receives[i], data[i]);
      EXPECT_EQ(std::memcmp(receives[i].data.data(), data[i].data(), data[i].size()), 0) << i;
    }
    for (size_t g = 0; g < 2; ++g) {
      bool done = false;
      int sizes[2];
      for (int i = 0; i < 100 && !done; ++i) {
        ASSERT_TRUE(Connection::test(grouped[g], &done, sizes).ok());
      }
      ASSERT_TRUE(done);
      for (size_t i = 0; i < 2; ++i) {
        // What was sent with the tag 20 + i, the first or the second time.
        const std::vector<std::byte>& sent = data[g == 0 ? 9 - i : 10 + i];
        ASSERT_EQ(static_cast<size_t>(sizes[i]), sent.size());
        EXPECT_EQ(std::memcmp(parts[g][i].data(), sent.data(), sent.size()), 0);
      }
    }
    for (Request* one : sending) finish(one);
  }
}

TEST_F(Rails, RefuseWhatIsLongerThanItsBuffer) {
  for (const auto& [room, size] : std::vector<std::pair<size_t, size_t>>{
           {10, 11}, {10, kHeadBytes}, {10, 200000}, {100, 200000}, {199999, 200000}}) {
    SetUp();
    connect({100, 100}, {100, 100});
    Receive receive;
    Request* sending = nullptr;
    post(&receive, room, 0);
    ASSERT_TRUE(send(pattern(size, 1), 0, &sending).ok());
    bool done = false;
    Status status;
    for (int i = 0; i < 100 && status.ok() && !done; ++i) {
      status = Connection::test(receive.request, &done, nullptr);
    }
    EXPECT_EQ(status.code(), SCAPE_ERR_USAGE) << room << " for " << size;
    for (size_t i = room; i < receive.data.size(); ++i) {
      ASSERT_EQ(receive.data[i], std::byte{0xee}) << "byte " << i;
    }
    TearDown();
  }
}

TEST_F(Rails, ThatFailAreNamed) {
  for (const bool sends : {true, false}) {
    SetUp();
    connect({100, 100}, {100, 100});
    const std::vector<std::byte> data = pattern(300000, 1);
    Receive receive;
    Request* sending = nullptr;
    post(&receive, data.size(), 0);
    Network::instance().broken = {sends ? "a1" : "b1"};
    ASSERT_TRUE(send(data, 0, &sending).ok());
    bool done = false;
    Status status;
    for (int i = 0; i < 100 && status.ok() && !done; ++i) {
      status = Connection::test(sends ? sending : receive.request, &done, nullptr);
    }
    EXPECT_EQ(status.code(), SCAPE_ERR_SYSTEM);
    EXPECT_FALSE(done);
    EXPECT_NE(status.message().find(sends ? "over a1" : "over b1"), std::string::npos)
        << status.message();
    // It is the connection's end, and closing it is not kept up.
    Request* next = nullptr;
    void* into = receive.data.data();
    const size_t room = 1;
    const int tag = 0;
    EXPECT_FALSE(sends ? send(data, 0, &next).ok()
                       : receiver_->receive(1, &into, &room, &tag, nullptr, &next).ok());
    EXPECT_EQ(next, nullptr);
    TearDown();
  }
}

TEST_F(Rails, CloseWithReceivesThatNobodyAnswers) {
  connect({100, 100}, {100, 100});
  std::vector<Receive> receives(5);
  for (Receive& receive : receives) post(&receive, 1 << 20, 0);
  Request* sending = nullptr;
  const std::vector<std::byte> data = pattern(1 << 20, 1);
  Network::instance().held = {"b1"};  // its head comes, and one part does not
  ASSERT_TRUE(send(data, 0, &sending).ok());
  bool done = false;
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(Connection::test(receives[0].request, &done, nullptr).ok());
  }
  EXPECT_FALSE(done);
  Connection::close(std::move(receiver_));
}

// The side with more rails spreads its connections over them.
TEST_F(Rails, BeginWithAnotherOneEachTime) {
  std::set<int> used;
  for (uint32_t number = 0; number < 6; ++number) {
    const std::shared_ptr<Worker> three = worker("a", {1, 1, 1}), one = worker("b", {1});
    std::vector<Channel> channels;
    ASSERT_TRUE(three->channels_to(one->addresses(), "it", number, &channels).ok());
    ASSERT_EQ(channels.size(), 1u);
    used.insert(channels[0].rail);
    three->give_place_back();
    one->give_place_back();
  }
  EXPECT_EQ(used.size(), 3u);
}

}  // namespace
}  // namespace scape::net
