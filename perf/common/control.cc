#include "perf/common/control.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>

namespace scape::perf {
namespace {

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Status system_error(const char* what) {
  return error(SCAPE_ERR_SYSTEM, "%s: %s", what, strerror(errno));
}

Status send_all(int socket, const void* data, size_t size) {
  const char* bytes = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t sent = ::send(socket, bytes, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return error(SCAPE_ERR_REMOTE, "another rank has left: %s", strerror(errno));
    bytes += sent;
    size -= static_cast<size_t>(sent);
  }
  return Status::Ok();
}

Status receive_all(int socket, void* data, size_t size) {
  char* bytes = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t received = ::recv(socket, bytes, size, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0) return error(SCAPE_ERR_REMOTE, "another rank has left: %s", strerror(errno));
    if (received == 0) return error(SCAPE_ERR_REMOTE, "another rank has left");
    bytes += received;
    size -= static_cast<size_t>(received);
  }
  return Status::Ok();
}

// A descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int value = -1) : value_(value) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : value_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    reset();
    value_ = other.release();
    return *this;
  }
  int get() const { return value_; }
  int release() { return std::exchange(value_, -1); }
  void reset() {
    if (value_ >= 0) close(value_);
    value_ = -1;
  }

 private:
  int value_;
};

// The first thing on a new connection: proves that both ends belong to one run.
struct Hello {
  char magic[8];
  uint64_t cookie;
  int32_t rank;
  int32_t ranks;
};
constexpr char kMagic[9] = "scapeprf";

bool receive_hello(int socket, double seconds, Hello* hello) {
  timeval limit{};
  limit.tv_sec = static_cast<time_t>(seconds);
  limit.tv_usec = static_cast<suseconds_t>((seconds - static_cast<double>(limit.tv_sec)) * 1e6);
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  const bool got = receive_all(socket, hello, sizeof *hello).ok();
  const timeval none{};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &none, sizeof none);
  return got && std::memcmp(hello->magic, kMagic, sizeof hello->magic) == 0;
}

struct AddressList {
  addrinfo* first = nullptr;
  ~AddressList() {
    if (first != nullptr) freeaddrinfo(first);
  }
};

Status resolve(const std::string& address, bool listening, AddressList* out) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos) {
    return error(SCAPE_ERR_ARGUMENT, "address '%s' is not host:port", address.c_str());
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = listening ? AI_PASSIVE : 0;
  const int result = getaddrinfo(host.empty() ? nullptr : host.c_str(),
                                 address.substr(colon + 1).c_str(), &hints, &out->first);
  if (result != 0) {
    return error(SCAPE_ERR_SYSTEM, "cannot resolve '%s': %s", address.c_str(),
                 gai_strerror(result));
  }
  return Status::Ok();
}

Status listen_at(const std::string& address, Descriptor* out) {
  AddressList list;
  SCAPE_RETURN_IF_ERROR(resolve(address, true, &list));
  for (const addrinfo* at = list.first; at != nullptr; at = at->ai_next) {
    Descriptor listener(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (listener.get() < 0) continue;
    const int on = 1;
    setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener.get(), at->ai_addr, at->ai_addrlen) == 0 &&
        listen(listener.get(), 1024) == 0) {
      *out = std::move(listener);
      return Status::Ok();
    }
  }
  return error(SCAPE_ERR_SYSTEM,
               "cannot listen at %s for the other ranks: %s; set MASTER_PORT to a port whose "
               "successor is free, or use --id-file",
               address.c_str(), strerror(errno));
}

// One attempt to reach rank 0; an invalid descriptor when nobody answers yet.
Descriptor connect_once(const std::string& address) {
  AddressList list;
  if (!resolve(address, false, &list).ok()) return Descriptor();
  for (const addrinfo* at = list.first; at != nullptr; at = at->ai_next) {
    Descriptor peer(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (peer.get() >= 0 && ::connect(peer.get(), at->ai_addr, at->ai_addrlen) == 0) return peer;
  }
  return Descriptor();
}

// Rank 0: takes the connections of all other ranks.
Status accept_ranks(int listener, uint64_t cookie, int ranks, double deadline,
                    std::vector<int>* sockets) {
  std::vector<Descriptor> peers(static_cast<size_t>(ranks - 1));
  for (int missing = ranks - 1; missing > 0;) {
    pollfd waiting{listener, POLLIN, 0};
    const double left = deadline - now_s();
    if (left <= 0) {
      std::string names;
      for (int rank = 1; rank < ranks; ++rank) {
        if (peers[static_cast<size_t>(rank - 1)].get() < 0) {
          names += format(names.empty() ? "%d" : ", %d", rank);
        }
      }
      return error(SCAPE_ERR_TIMEOUT, "rank %s did not come to rank 0 in time; are all %d started?",
                   names.c_str(), ranks);
    }
    if (poll(&waiting, 1, static_cast<int>(std::min(left * 1e3 + 1, 1e6))) <= 0) continue;
    Descriptor peer(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
    Hello hello;
    // A stranger is turned away; ranks of the run go on.
    if (peer.get() < 0 || !receive_hello(peer.get(), 5, &hello) || hello.cookie != cookie) continue;
    if (hello.ranks != ranks || hello.rank < 1 || hello.rank >= ranks ||
        peers[static_cast<size_t>(hello.rank - 1)].get() >= 0) {
      return error(SCAPE_ERR_MISMATCH, "rank %d of %d came to a run of %d%s", hello.rank,
                   hello.ranks, ranks, hello.ranks == ranks ? ", a second time" : "");
    }
    const Hello answer{{'s', 'c', 'a', 'p', 'e', 'p', 'r', 'f'}, cookie, 0, ranks};
    SCAPE_RETURN_IF_ERROR(send_all(peer.get(), &answer, sizeof answer));
    peers[static_cast<size_t>(hello.rank - 1)] = std::move(peer);
    --missing;
  }
  for (Descriptor& peer : peers) sockets->push_back(peer.release());
  return Status::Ok();
}

// What rank 0 writes to the file that the others read: "cookie host:port".
Status write_address_file(const std::string& path, uint64_t cookie, const std::string& address) {
  const std::string draft = path + "." + std::to_string(getpid());
  FILE* file = std::fopen(draft.c_str(), "we");
  if (file == nullptr) return system_error(("cannot write --id-file '" + draft + "'").c_str());
  const bool written = std::fprintf(file, "%016llx %s\n", static_cast<unsigned long long>(cookie),
                                    address.c_str()) > 0;
  if (std::fclose(file) != 0 || !written || std::rename(draft.c_str(), path.c_str()) != 0) {
    return system_error(("cannot write --id-file '" + path + "'").c_str());
  }
  return Status::Ok();
}

bool read_address_file(const std::string& path, uint64_t* cookie, std::string* address) {
  FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return false;
  unsigned long long number = 0;
  char text[300];
  const bool good = std::fscanf(file, "%16llx %299s", &number, text) == 2;
  std::fclose(file);
  *cookie = number;
  *address = good ? text : "";
  return good;
}

Status host_meet(const Launch& launch, double deadline, std::vector<int>* sockets) {
  Descriptor listener;
  if (launch.file.empty()) {
    if (const Status here = listen_at(launch.address, &listener); !here.ok()) {
      // The others' name for this host may be no address of its own (containers, NAT).
      const std::string anywhere = launch.address.substr(launch.address.rfind(':'));
      if (!listen_at(anywhere, &listener).ok()) return here;
    }
    return accept_ranks(listener.get(), 0, launch.ranks, deadline, sockets);
  }
  SCAPE_RETURN_IF_ERROR(listen_at("0.0.0.0:0", &listener));
  sockaddr_in bound{};
  socklen_t length = sizeof bound;
  if (getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    return system_error("getsockname");
  }
  char host[256] = "127.0.0.1";
  if (launch.address.empty() && gethostname(host, sizeof host - 1) != 0) {
    return system_error("gethostname");
  }
  std::random_device random;
  const uint64_t cookie = (uint64_t{random()} << 32) | random();
  const std::string address = (launch.address.empty() ? std::string(host) : launch.address) + ":" +
                              std::to_string(ntohs(bound.sin_port));
  SCAPE_RETURN_IF_ERROR(write_address_file(launch.file, cookie, address));
  const Status met = accept_ranks(listener.get(), cookie, launch.ranks, deadline, sockets);
  unlink(launch.file.c_str());
  return met;
}

Status join_host(const Launch& launch, double deadline, std::vector<int>* sockets) {
  while (now_s() < deadline) {
    uint64_t cookie = 0;
    std::string address = launch.address;
    if (launch.file.empty() || read_address_file(launch.file, &cookie, &address)) {
      Descriptor peer = connect_once(address);
      Hello hello{{'s', 'c', 'a', 'p', 'e', 'p', 'r', 'f'}, cookie, launch.rank, launch.ranks};
      // A stale file may lead to a port that is someone else's now: whoever answers must know the
      // cookie.
      if (peer.get() >= 0 && send_all(peer.get(), &hello, sizeof hello).ok() &&
          receive_hello(peer.get(), std::max(1.0, deadline - now_s()), &hello) &&
          hello.cookie == cookie && hello.rank == 0) {
        sockets->push_back(peer.release());
        return Status::Ok();
      }
    }
    usleep(20000);
  }
  return error(SCAPE_ERR_TIMEOUT, "rank %d found no rank 0 at %s (%s) in time; is it started?",
               launch.rank, launch.file.empty() ? launch.address.c_str() : launch.file.c_str(),
               launch.origin.c_str());
}

// Reads an integer variable; false when it is not set.
bool read_variable(const char* name, int* out, Status* status) {
  const char* text = getenv(name);
  if (text == nullptr || *text == '\0') return false;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (*end != '\0' || value < 0 || value > 1000000) {
    *status =
        error(SCAPE_ERR_ARGUMENT, "%s is '%s', not a number of a rank or of ranks", name, text);
  }
  *out = static_cast<int>(value);
  return true;
}

// The rank that the launcher's environment gives this process.
Status launch_from_environment(const std::string& id_file, Launch* out) {
  struct Source {
    const char* rank;
    const char* ranks;
    const char* origin;
  };
  static constexpr Source kSources[] = {
      {"RANK", "WORLD_SIZE", "torchrun's environment"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI's environment"},
      {"PMI_RANK", "PMI_SIZE", "PMI's environment"},
  };
  bool found = false;
  for (const Source& source : kSources) {
    int rank = 0, ranks = 0;
    Status status;
    const bool has_rank = read_variable(source.rank, &rank, &status);
    const bool has_ranks = read_variable(source.ranks, &ranks, &status);
    SCAPE_RETURN_IF_ERROR(status);
    if (!has_rank && !has_ranks) continue;
    if (!has_rank || !has_ranks || rank >= ranks) {
      return error(SCAPE_ERR_ARGUMENT, "%s and %s must both be set, the first below the second",
                   source.rank, source.ranks);
    }
    out->rank = rank;
    out->ranks = ranks;
    out->origin = source.origin;
    found = true;
    break;
  }
  if (!found) {
    out->origin = "alone";
    return Status::Ok();
  }
  if (!id_file.empty()) {
    out->file = id_file;
    return Status::Ok();
  }
  const char* master = getenv("MASTER_ADDR");
  int port = 0;
  Status status;
  if (master != nullptr && read_variable("MASTER_PORT", &port, &status)) {
    SCAPE_RETURN_IF_ERROR(status);
    // MASTER_PORT itself is the launcher's own store.
    out->address = std::string(master) + ":" + std::to_string(port + 1);
    return Status::Ok();
  }
  // mpirun names no address. Ranks that one daemon started on one host share its process id; more
  // hosts need --id-file or MASTER_ADDR.
  int local = 0;
  if (read_variable("OMPI_COMM_WORLD_LOCAL_SIZE", &local, &status) && local != out->ranks) {
    return error(
        SCAPE_ERR_ARGUMENT,
        "the %d ranks are on several hosts: set MASTER_ADDR and MASTER_PORT on all of them "
        "(mpirun -x), or name a file that they share with --id-file",
        out->ranks);
  }
  const char* folder = getenv("TMPDIR");
  out->file = format("%s/scape-perf-%u-%d", folder != nullptr ? folder : "/tmp",
                     static_cast<unsigned>(getuid()), static_cast<int>(getppid()));
  out->address = "127.0.0.1";
  return Status::Ok();
}

// The value of "--worker".
Status launch_from_worker_option(const std::string& value, Launch* out) {
  int rank = -1, ranks = 0, used = 0;
  if (std::sscanf(value.c_str(), "%d/%d%n", &rank, &ranks, &used) != 2) {
    return error(SCAPE_ERR_ARGUMENT, "--worker '%s' is not rank/ranks:sockets", value.c_str());
  }
  out->rank = rank;
  out->ranks = ranks;
  out->origin = "-g";
  for (const char* at = value.c_str() + used; *at != '\0';) {
    char* end = nullptr;
    const int socket = static_cast<int>(std::strtol(at + 1, &end, 10));
    if (end == at + 1 || fcntl(socket, F_SETFD, FD_CLOEXEC) != 0) {
      return error(SCAPE_ERR_ARGUMENT, "--worker '%s' names no open socket", value.c_str());
    }
    out->sockets.push_back(socket);
    at = end;
  }
  return Status::Ok();
}

}  // namespace

Status find_launch(const std::string& worker, const std::string& id_file, int local_ranks,
                   Launch* out) {
  if (!worker.empty()) return launch_from_worker_option(worker, out);
  SCAPE_RETURN_IF_ERROR(launch_from_environment(id_file, out));
  if (local_ranks == 1 || out->ranks == 1) return Status::Ok();
  return error(SCAPE_ERR_USAGE,
               "-g %d under a launcher: each of its processes is one rank; leave -g out",
               local_ranks);
}

int run_local_ranks(int ranks, int argc, char** argv, double grace_s) {
  std::vector<int> hub, spokes;  // socket r - 1 joins rank 0 and rank r
  for (int rank = 1; rank < ranks; ++rank) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
      std::fprintf(stderr, "%s: socketpair for rank %d: %s\n", argv[0], rank, strerror(errno));
      return kExitFailed;
    }
    hub.push_back(pair[0]);
    spokes.push_back(pair[1]);
  }
  const pid_t parent = getpid();
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<int> own = hub;
    if (rank > 0) own = {spokes[static_cast<size_t>(rank - 1)]};
    std::string option = format("--worker=%d/%d", rank, ranks);
    for (int socket : own) option += format(":%d", socket);
    std::vector<char*> arguments(argv, argv + argc);
    arguments.push_back(option.data());
    arguments.push_back(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      // Ranks never outlive the command that the user ends.
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(kExitFailed);
      for (int socket : own) fcntl(socket, F_SETFD, 0);
      execv("/proc/self/exe", arguments.data());
      _exit(kExitFailed);
    }
    if (child < 0) {
      std::fprintf(stderr, "%s: fork of rank %d: %s\n", argv[0], rank, strerror(errno));
      for (pid_t started : children) kill(started, SIGKILL);
      while (waitpid(-1, nullptr, 0) > 0) {
      }
      return kExitFailed;
    }
    children.push_back(child);
  }
  for (int socket : hub) close(socket);
  for (int socket : spokes) close(socket);

  int result = kExitOk;
  double deadline = 0;
  for (size_t running = children.size(); running > 0;) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, deadline > 0 ? WNOHANG : 0);
    if (ended == 0) {
      if (now_s() > deadline) {
        for (pid_t child : children) {
          if (child > 0) kill(child, SIGKILL);
        }
        deadline = now_s() + 3600;  // what is left of them only needs reaping
      }
      usleep(10000);
      continue;
    }
    if (ended < 0) {
      if (errno == EINTR) continue;
      break;
    }
    --running;
    const auto at = std::find(children.begin(), children.end(), ended);
    const long rank = at - children.begin();
    *at = 0;
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (code == 0) continue;
    if (result == kExitOk) {
      result = code;
      if (WIFSIGNALED(status)) {
        std::fprintf(stderr, "%s: rank %ld was ended by signal %d (%s)\n", argv[0], rank,
                     WTERMSIG(status), strsignal(WTERMSIG(status)));
      }
      deadline = now_s() + grace_s;
    }
  }
  return result;
}

Status Control::connect(const Launch& launch, double timeout_s, double grace_s,
                        std::unique_ptr<Control>* out) {
  std::vector<int> sockets = launch.sockets;
  if (launch.ranks > 1 && sockets.empty()) {
    const double deadline = now_s() + timeout_s;
    if (launch.rank == 0) {
      SCAPE_RETURN_IF_ERROR(host_meet(launch, deadline, &sockets));
    } else {
      SCAPE_RETURN_IF_ERROR(join_host(launch, deadline, &sockets));
    }
    const int on = 1;
    for (int socket : sockets) setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  out->reset(new Control(launch.rank, launch.ranks, std::move(sockets), grace_s));
  return Status::Ok();
}

Control::Control(int rank, int ranks, std::vector<int> sockets, double grace_s)
    : rank_(rank), ranks_(ranks), sockets_(std::move(sockets)), grace_s_(grace_s) {
  if (pipe2(wake_, O_CLOEXEC | O_NONBLOCK) == 0) watcher_ = std::thread([this] { watch(); });
}

Control::~Control() {
  finished_ = true;
  if (watcher_.joinable()) {
    const char byte = 0;
    (void)!write(wake_[1], &byte, 1);
    watcher_.join();
  }
  for (int socket : sockets_) close(socket);
  for (int end : wake_) {
    if (end >= 0) close(end);
  }
}

void Control::watch() {
  std::vector<pollfd> watched;
  watched.push_back({wake_[0], POLLIN, 0});
  for (int socket : sockets_) watched.push_back({socket, POLLRDHUP, 0});
  double lost_at = 0;
  std::string lost;
  while (!finished_) {
    double limit = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      limit = deadline_;
      if (limit > 0 && now_s() > limit) {
        std::fprintf(stderr, "rank %d: %s took too long; raise -T\n", rank_,
                     deadline_what_.c_str());
        _exit(kExitFailed);
      }
    }
    // The rank that saw the failure reports it; the others leave the library time to notice.
    if (lost_at > 0 && now_s() > lost_at + grace_s_) {
      std::fprintf(stderr, "rank %d: %s has left; stopping\n", rank_, lost.c_str());
      _exit(kExitFailed);
    }
    double wait = 3600;
    if (limit > 0) wait = std::min(wait, limit - now_s());
    if (lost_at > 0) wait = std::min(wait, lost_at + grace_s_ - now_s());
    if (poll(watched.data(), watched.size(), static_cast<int>(std::max(wait, 0.0) * 1e3) + 1) <=
        0) {
      continue;
    }
    if ((watched[0].revents & POLLIN) != 0) {
      char drained[64];
      while (read(wake_[0], drained, sizeof drained) > 0) {
      }
    }
    for (size_t i = 1; i < watched.size(); ++i) {
      if (watched[i].revents == 0) continue;
      watched[i].fd = -1;
      if (lost_at > 0) continue;
      lost_at = now_s();
      lost = rank_ == 0 ? format("rank %zu", i) : std::string("rank 0");
    }
  }
}

Status Control::all_gather(const void* data, size_t size, std::vector<std::byte>* all) {
  all->resize(size * static_cast<size_t>(ranks_));
  std::memcpy(all->data() + size * static_cast<size_t>(rank_), data, size);
  if (rank_ == 0) {
    for (size_t peer = 0; peer < sockets_.size(); ++peer) {
      SCAPE_RETURN_IF_ERROR(receive_all(sockets_[peer], all->data() + size * (peer + 1), size));
    }
    for (int socket : sockets_) {
      SCAPE_RETURN_IF_ERROR(send_all(socket, all->data(), all->size()));
    }
    return Status::Ok();
  }
  SCAPE_RETURN_IF_ERROR(send_all(sockets_[0], data, size));
  return receive_all(sockets_[0], all->data(), all->size());
}

Status Control::barrier() {
  std::vector<char> all;
  return all_gather(char{0}, &all);
}

void Control::set_deadline(double seconds, const std::string& what) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    deadline_ = seconds > 0 ? now_s() + seconds : 0;
    deadline_what_ = what;
  }
  const char byte = 0;
  (void)!write(wake_[1], &byte, 1);
}

Status Control::finish() {
  SCAPE_RETURN_IF_ERROR(barrier());
  finished_ = true;
  return Status::Ok();
}

}  // namespace scape::perf
