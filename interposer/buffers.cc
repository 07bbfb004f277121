#include "interposer/buffers.h"

#include <algorithm>
#include <cstdio>

#include "base/large_pages.h"
#include "base/log.h"
#include "base/settings.h"

namespace scape::interposer {
namespace {

using plugin::DataType;
using plugin::ReduceOp;

constinit thread_local char next_name[64] = "";
constinit std::atomic<uint64_t> call_order{0};

struct Retired {
  std::mutex mutex;
  scape_stats stats{};
};
Retired& retired() {
  static Retired* const instance = new Retired;  // never destroyed: used until the last moment
  return *instance;
}

bool is_sum(ReduceOp op) {
  return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kPremulSum;
}

// Why a call cannot be masked whatever the communicator; empty when it can.
std::string unfit(const Registration& registration, size_t byte_offset, const AllReduceCall& call) {
  const DataType registered = plugin::data_type_of(registration.dtype);
  if (call.type != registered) {
    return format("the call is of %s, the registration of %s", plugin::name_of(call.type),
                  plugin::name_of(registered));
  }
  if (!is_sum(call.op)) return format("%s is neither a sum nor a mean", plugin::name_of(call.op));
  if (byte_offset % registration.element_size() != 0) return "its address is between two elements";
  if (byte_offset / registration.element_size() + call.count > registration.count) {
    return format("%zu elements from element %zu on reach past the end of the %zu registered",
                  call.count, byte_offset / registration.element_size(), registration.count);
  }
  return "";
}

// The buffer of this call among those that calls have met; empty, with or without `why` set, where
// there is none. The caller holds the registration's mutex.
Status known_buffer(Registration& registration, const MaskedComm* comm, const void* address,
                    size_t offset, size_t count, const std::string& name,
                    std::shared_ptr<Buffer>* out, std::string* why) {
  for (const auto& buffer : registration.buffers) {
    if (buffer->comm.get() != comm || buffer->next_name != name) continue;
    if (!name.empty()) {
      if (buffer->count != count) {
        return error(SCAPE_ERR_USAGE,
                     "scape_next(\"%s\") named %zu elements before and %zu now; give each buffer a "
                     "name of its own",
                     name.c_str(), buffer->count, count);
      }
    } else if (buffer->offset != offset || buffer->count != count) {
      if (offset < buffer->offset + buffer->count && buffer->offset < offset + count) {
        *why = format(
            "elements %zu .. %zu overlap the buffer of elements %zu .. %zu that was called before",
            offset, offset + count, buffer->offset, buffer->offset + buffer->count);
        return {};
      }
      continue;
    }
    buffer->address = address;  // a named buffer may move
    buffer->offset = offset;
    buffer->last_used = ++call_order;
    *out = buffer;
    return {};
  }
  return {};
}

// A name, an offset and a count say which buffer this is to the other ranks and in saved state.
Status check_namesakes(const Buffer& buffer) {
  const plugin::BufferConfig& config = buffer.masked->config();
  for (const auto& registration : registry().all()) {
    const std::lock_guard lock(registration->mutex);
    for (const auto& other : registration->buffers) {
      const plugin::BufferConfig& its = other->masked->config();
      if (other->comm != buffer.comm || other->count != buffer.count || its.name != config.name ||
          its.offset != config.offset) {
        continue;
      }
      return error(SCAPE_ERR_USAGE,
                   "the buffers at %p and %p are both called \"%s\" and have %zu elements: neither "
                   "other ranks nor a saved state could tell them apart; give each a name of its "
                   "own",
                   other->address, buffer.address, config.name.c_str(), buffer.count);
    }
  }
  return {};
}

// The buffer of this call, made when it is new. An empty pointer with `why` set: it goes dense.
Status buffer_for(Registration& registration, const std::shared_ptr<MaskedComm>& comm,
                  const void* address, size_t offset, size_t count, const std::string& name,
                  std::shared_ptr<Buffer>* out, std::string* why) {
  {
    const std::lock_guard lock(registration.mutex);
    if (registration.dropped) return {};
    SCAPE_RETURN_IF_ERROR(
        known_buffer(registration, comm.get(), address, offset, count, name, out, why));
    if (*out != nullptr || !why->empty()) return {};
  }
  auto buffer = std::make_shared<Buffer>();
  buffer->comm = comm;
  buffer->address = address;
  buffer->offset = offset;
  buffer->count = count;
  buffer->next_name = name;
  plugin::BufferConfig config = registration.config;
  if (name.empty()) {
    config.offset = offset;
  } else {
    config.name = name;
    config.offset = 0;
  }
  {
    const auto hold = comm->hold();
    std::shared_ptr<plugin::Engine> engine;
    SCAPE_RETURN_IF_ERROR(comm->make_engine(&engine));
    buffer->masked = plugin::make_masked_buffer(std::move(engine), comm->shared(),
                                                comm->refresher(), std::move(config), count);
  }
  static std::mutex joining;  // one at a time looks for its name, then joins
  const std::lock_guard join(joining);
  SCAPE_RETURN_IF_ERROR(check_namesakes(*buffer));
  const std::lock_guard lock(registration.mutex);
  if (registration.dropped) return {};
  buffer->last_used = ++call_order;
  registration.buffers.push_back(buffer);
  *out = std::move(buffer);
  return {};
}

// All of a registration, whose first element is at `begin`, once.
void put_on_large_pages(const MaskedComm& comm, Registration& registration, const void* begin) {
  if (!comm.on_host() || !settings().large_pages || registration.on_large_pages.exchange(true))
    return;
  move_to_large_pages(begin, registration.bytes());
}

// A call met the registration: the waiting for one is over, and what it never covers is reported.
void note_hit(Registration& registration, size_t offset, size_t count) {
  registry().count_hit(registration);
  const uint64_t hits = registration.hits.load(std::memory_order_relaxed);
  size_t covered;
  {
    const std::lock_guard lock(registration.mutex);
    covered = cover(registration, offset, count);
  }
  if (hits < kPatience || covered_enough(covered, registration.count)) return;
  if (registration.warned_partial.exchange(true)) return;
  SCAPE_WARN(
      "registration \"%s\": after %llu calls only %zu of its %zu elements were ever in one; check "
      "that its count "
      "is in elements, and that each part is reduced",
      registration.name(), static_cast<unsigned long long>(hits), covered, registration.count);
}

}  // namespace

Buffer::~Buffer() {
  if (comm == nullptr) return;
  const auto hold = comm->hold();
  masked.reset();
}

bool covered_enough(size_t covered, size_t count) { return covered >= count - count / 100; }

void set_next_name(const char* name) { std::snprintf(next_name, sizeof next_name, "%s", name); }

std::string take_next_name() {
  if (next_name[0] == '\0') return {};
  std::string name = next_name;
  next_name[0] = '\0';
  return name;
}

void note_miss(size_t bytes) {
  std::vector<std::shared_ptr<Registration>> unmatched;
  registry().count_miss(bytes, &unmatched);
  for (const auto& registration : unmatched) {
    SCAPE_WARN(
        "registration \"%s\" (%zu elements at %p) met none of the last %llu calls of about its "
        "size: it saves "
        "nothing; register the address and the element count that the collective gets",
        registration->name(), registration->count, reinterpret_cast<void*>(registration->base),
        static_cast<unsigned long long>(kPatience));
  }
}

namespace {

void count_dense(Registration& registration, const Obstacle& obstacle) {
  registration.intercepted.fetch_add(1, std::memory_order_relaxed);
  registration.fallbacks.fetch_add(1, std::memory_order_relaxed);
  bool first;
  {
    const std::lock_guard lock(registration.mutex);
    first = registration.reasons.note(obstacle.why);
  }
  if (!first || obstacle.said) return;
  SCAPE_WARN("registration \"%s\": a call goes dense: %s (said once)", registration.name(),
             obstacle.why.c_str());
}

// The same for a range that may be a buffer's own: then the buffer counts it.
void count_dense(Registration& registration, const MaskedComm* comm, size_t byte_offset,
                 size_t bytes, const Obstacle& obstacle) {
  std::shared_ptr<Buffer> exact;
  {
    const std::lock_guard lock(registration.mutex);
    for (const auto& buffer : registration.buffers) {
      if (buffer->comm.get() == comm &&
          buffer->offset * registration.element_size() == byte_offset &&
          buffer->count * registration.element_size() == bytes) {
        exact = buffer;
      }
    }
  }
  if (exact == nullptr) {
    count_dense(registration, obstacle);
  } else {
    exact->masked->note_dense(obstacle.why.c_str());
  }
}

// The registration that a call's own options stand for.
Status registration_of_call(const CallOptions& options, const AllReduceCall& call,
                            const std::string& named, std::shared_ptr<Registration>* out) {
  const char* name = options.config.name;
  if (!named.empty()) {
    return error(SCAPE_ERR_USAGE,
                 "the call is named twice: \"%s\" by scape_next() and \"%s\" by SCAPE_CALL_NAME; "
                 "leave one out",
                 named.c_str(), name);
  }
  for (const void* address : {call.send, call.recv}) {
    if (const auto other = registry().find(address); other != nullptr) {
      return error(SCAPE_ERR_USAGE,
                   "the call's options name it \"%s\", but its buffer %p is in the registration "
                   "\"%s\"; leave the options out, or unregister that",
                   name, address, other->name());
    }
  }
  scape_dtype dtype = SCAPE_FLOAT32;
  if (call.type == DataType::kBfloat16) {
    dtype = SCAPE_BFLOAT16;
  } else if (call.type == DataType::kFloat16) {
    dtype = SCAPE_FLOAT16;
  } else if (call.type != DataType::kFloat32) {
    return error(
        SCAPE_ERR_ARGUMENT,
        "\"%s\" is a call of %s; float32, bfloat16 and float16 can be masked, so leave its "
        "options out",
        name, plugin::name_of(call.type));
  }
  if (!is_sum(call.op)) {
    return error(SCAPE_ERR_ARGUMENT,
                 "\"%s\" is a call of %s; sums and means can be masked, so leave its options out",
                 name, plugin::name_of(call.op));
  }
  plugin::BufferConfig config;
  SCAPE_RETURN_IF_ERROR(plugin::resolve_config(&options.config, dtype, &config));
  return registry().of_call(call.count, dtype, std::move(config), out);
}

Status find_obstacle(MaskedComm* comm, const AllReduceCall& call, Obstacle* out) {
  if (comm != nullptr) return comm->find_obstacle(call, out);
  out->why = "its communicator was not made through this library";
  return {};
}

}  // namespace

Status route_all_reduce(const std::shared_ptr<MaskedComm>& comm, const AllReduceCall& call,
                        const CallOptions& options, Route* out) {
  const std::string name = take_next_name();
  if (call.count == 0) return {};
  const size_t bytes = call.count * plugin::size_of(call.type);
  Obstacle obstacle;
  if (options.present && settings().enable) {
    std::shared_ptr<Registration> registration;
    SCAPE_RETURN_IF_ERROR(registration_of_call(options, call, name, &registration));
    out->registered = true;
    out->name = registration->name();
    SCAPE_RETURN_IF_ERROR(find_obstacle(comm.get(), call, &obstacle));
    if (!obstacle.why.empty()) {
      count_dense(*registration, comm.get(), 0, bytes, obstacle);
      return {};
    }
    std::string none;  // a buffer that is the whole registration overlaps no other
    SCAPE_RETURN_IF_ERROR(
        buffer_for(*registration, comm, call.send, 0, call.count, name, &out->buffer, &none));
    put_on_large_pages(*comm, *registration, call.send);
    return {};
  }
  const void* address = call.send;
  std::shared_ptr<Registration> registration = registry().find(call.send);
  if (registration == nullptr && call.recv != call.send) {
    address = call.recv;
    registration = registry().find(call.recv);
  }
  if (registration == nullptr) {
    note_miss(bytes);
    return {};
  }
  const size_t byte_offset = reinterpret_cast<uintptr_t>(address) - registration->base;
  obstacle.why = unfit(*registration, byte_offset, call);
  if (!obstacle.why.empty()) {
    count_dense(*registration, comm.get(), byte_offset, bytes, obstacle);
    return {};
  }
  const size_t offset = byte_offset / registration->element_size();
  note_hit(*registration, offset, call.count);
  out->registered = true;
  out->name = registration->name();
  SCAPE_RETURN_IF_ERROR(find_obstacle(comm.get(), call, &obstacle));
  if (!obstacle.why.empty()) {
    count_dense(*registration, comm.get(), byte_offset, bytes, obstacle);
    return {};
  }
  SCAPE_RETURN_IF_ERROR(buffer_for(*registration, comm, address, offset, call.count, name,
                                   &out->buffer, &obstacle.why));
  if (!obstacle.why.empty()) count_dense(*registration, obstacle);
  if (out->buffer != nullptr) {
    put_on_large_pages(*comm, *registration, reinterpret_cast<const void*>(registration->base));
  }
  return {};
}

void note_other_collective(const char* function, const void* send, const void* recv, size_t bytes) {
  take_next_name();
  std::shared_ptr<Registration> registration = registry().find(send);
  if (registration == nullptr && recv != send) registration = registry().find(recv);
  if (registration == nullptr) {
    note_miss(bytes);
  } else {
    count_dense(*registration, {format("%s is not made sparse", function), false});
  }
}

Status find_buffer(const void* address, size_t count, std::shared_ptr<Buffer>* out) {
  const std::shared_ptr<Registration> registration = registry().find(address);
  uint64_t latest = 0;
  const auto look = [&](Registration& at) {
    const std::lock_guard lock(at.mutex);
    for (const auto& buffer : at.buffers) {
      if (buffer->address != address || buffer->count != count || buffer->last_used <= latest)
        continue;
      latest = buffer->last_used;
      *out = buffer;
    }
  };
  if (registration != nullptr) {
    look(*registration);
  } else {
    for (const auto& of_call : registry().of_calls()) look(*of_call);
  }
  if (*out != nullptr) return {};
  if (registration == nullptr) {
    return error(SCAPE_ERR_NOT_FOUND,
                 "%p is in no registered range, and no call with SCAPE_CALL_NAME had it and %zu "
                 "elements; call scape_register() first",
                 address, count);
  }
  const size_t offset =
      (reinterpret_cast<uintptr_t>(address) - registration->base) / registration->element_size();
  std::string dense;
  {
    const std::lock_guard lock(registration->mutex);
    if (const std::string& last = registration->reasons.last(); !last.empty())
      dense = format(" (calls on it went dense: %s)", last.c_str());
  }
  return error(
      SCAPE_ERR_NOT_FOUND,
      "no all-reduce of %zu elements from element %zu of \"%s\" was masked yet%s; pass the "
      "address and count that the collective gets",
      count, offset, registration->name(), dense.c_str());
}

void drop_buffers_of(const MaskedComm& comm) {
  for (const auto& registration : registry().all()) {
    std::vector<std::shared_ptr<Buffer>> dropped;
    {
      const std::lock_guard lock(registration->mutex);
      auto& buffers = registration->buffers;
      const auto gone =
          std::stable_partition(buffers.begin(), buffers.end(),
                                [&](const auto& buffer) { return buffer->comm.get() != &comm; });
      dropped.assign(gone, buffers.end());
      buffers.erase(gone, buffers.end());
    }
    for (const auto& buffer : dropped) {
      const std::lock_guard busy(buffer->busy);
      buffer->dropped = true;
      const scape_stats stats = buffer->masked->stats();
      if (stats.sparse_calls > 0) {
        SCAPE_INFO(
            "buffer \"%s\": its communicator ends, and its state with it; scape_flush() sends the "
            "residual and scape_save_state() keeps all, before",
            buffer->masked->config().name.c_str());
      }
      const std::lock_guard lock(registration->mutex);
      add_stats(stats, &registration->retired);
    }
  }
}

double drop_buffers(Registration& registration) {
  std::vector<std::shared_ptr<Buffer>> dropped;
  {
    const std::lock_guard lock(registration.mutex);
    registration.dropped = true;
    dropped.swap(registration.buffers);
  }
  double residual = 0;
  scape_stats total = stats_of(registration);
  for (const auto& buffer : dropped) {
    const std::lock_guard busy(buffer->busy);
    buffer->dropped = true;
    const auto hold = buffer->comm->hold();
    residual += buffer->masked->residual_l1();
    add_stats(buffer->masked->stats(), &total);
  }
  const std::lock_guard lock(retired().mutex);
  add_stats(total, &retired().stats);
  return residual;
}

void add_stats(const scape_stats& from, scape_stats* to) {
  to->intercepted_calls += from.intercepted_calls;
  to->sparse_calls += from.sparse_calls;
  to->dense_calls += from.dense_calls;
  to->fallback_calls += from.fallback_calls;
  to->skipped_steps += from.skipped_steps;
  to->nonfinite_values += from.nonfinite_values;
  to->payload_bytes += from.payload_bytes;
  to->mask_bytes += from.mask_bytes;
  to->refreshes += from.refreshes;
  to->refresh_waits += from.refresh_waits;
  to->pack_ns += from.pack_ns;
  to->exchange_ns += from.exchange_ns;
  to->unpack_ns += from.unpack_ns;
  to->score_ns += from.score_ns;
  to->refresh_ns += from.refresh_ns;
  to->refresh_wait_ns += from.refresh_wait_ns;
  to->step_ns += from.step_ns;
  to->mask_elements += from.mask_elements;
  to->buffer_elements += from.buffer_elements;
  to->mask_overlap += from.mask_overlap;
  to->step = std::max(to->step, from.step);
}

scape_stats stats_of(Registration& registration) {
  scape_stats total{};
  std::vector<std::shared_ptr<Buffer>> buffers;
  {
    const std::lock_guard lock(registration.mutex);
    add_stats(registration.retired, &total);
    buffers = registration.buffers;
  }
  // Counters may be read during a call, so that a look at them waits for nobody.
  for (const auto& buffer : buffers) add_stats(buffer->masked->stats(), &total);
  const uint64_t fallbacks = registration.fallbacks.load(std::memory_order_relaxed);
  total.intercepted_calls += registration.intercepted.load(std::memory_order_relaxed);
  total.dense_calls += fallbacks;
  total.fallback_calls += fallbacks;
  return total;
}

scape_stats retired_stats() {
  const std::lock_guard lock(retired().mutex);
  return retired().stats;
}

}  // namespace scape::interposer
