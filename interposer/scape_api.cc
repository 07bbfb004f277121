// The exported functions of scape.h.
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <set>
#include <string>

#include "base/log.h"
#include "base/settings.h"
#include "interposer/buffers.h"
#include "interposer/process.h"
#include "interposer/reentry.h"
#include "interposer/saved_state.h"
#include "plugin/host_communicator.h"
#include "plugin/masked/masked_buffer.h"
#include "scape/scape.h"

namespace scape::interposer {
namespace {

uint64_t id_of(scape_registration registration) {
  return reinterpret_cast<uintptr_t>(registration);
}
scape_registration handle_of(uint64_t id) { return reinterpret_cast<scape_registration>(id); }

// What every function that needs the library enabled begins with.
Status begin() {
  SCAPE_RETURN_IF_ERROR(begin_use());
  SCAPE_RETURN_IF_ERROR(check_process());
  if (settings().enable) return {};
  return error(SCAPE_ERR_INACTIVE,
               "SCAPE_ENABLE=0: the program trains dense; unset it to register buffers");
}

Status check_pointer(const void* pointer, const char* what) {
  if (pointer != nullptr) return {};
  return error(SCAPE_ERR_ARGUMENT, "%s is null; pass its address", what);
}

Status check_path(const char* path) {
  SCAPE_RETURN_IF_ERROR(check_pointer(path, "path"));
  if (path[0] != '\0') return {};
  return error(SCAPE_ERR_ARGUMENT, "path is empty; pass a file's path");
}

// Runs `use`, a callable that takes the Buffer, on the buffer of the last call of (address, count).
template <typename Use>
Status with_buffer(const void* address, size_t count, Use&& use) {
  SCAPE_RETURN_IF_ERROR(begin());
  std::shared_ptr<Buffer> buffer;
  SCAPE_RETURN_IF_ERROR(find_buffer(address, count, &buffer));
  const std::lock_guard busy(buffer->busy);
  if (buffer->dropped) {
    return error(SCAPE_ERR_NOT_FOUND, "the buffer at %p was unregistered meanwhile", address);
  }
  const Entered entered;
  const auto hold = buffer->comm->hold();
  return use(*buffer);
}

// The same for a step: `step` takes the buffer and the stream that orders what it does to these
// addresses.
template <typename Step>
Status with_step(const void* address, size_t count, void* stream,
                 std::initializer_list<const void*> addresses, Step&& step) {
  return with_buffer(address, count, [&](Buffer& buffer) -> Status {
    plugin::Stream ordered;
    SCAPE_RETURN_IF_ERROR(buffer.comm->begin_step(stream, addresses, &ordered));
    return step(buffer, ordered);
  });
}

Status do_register(void* buffer, size_t count, scape_dtype dtype, const scape_config* config,
                   scape_registration* registration) {
  SCAPE_RETURN_IF_ERROR(begin());
  SCAPE_RETURN_IF_ERROR(check_pointer(registration, "registration"));
  *registration = nullptr;
  plugin::BufferConfig resolved;
  SCAPE_RETURN_IF_ERROR(plugin::resolve_config(config, dtype, &resolved));
  std::shared_ptr<Registration> made;
  SCAPE_RETURN_IF_ERROR(registry().add(buffer, count, dtype, std::move(resolved), &made));
  claim_process();
  *registration = handle_of(made->id);
  SCAPE_INFO("registration \"%s\": %zu elements at %p, sparsity %g", made->name(), count, buffer,
             made->config.sparsity);
  return {};
}

Status do_unregister(scape_registration registration) {
  SCAPE_RETURN_IF_ERROR(begin());
  std::shared_ptr<Registration> removed;
  SCAPE_RETURN_IF_ERROR(registry().remove(id_of(registration), &removed));
  std::set<std::string> names{removed->config.name};
  {
    const std::lock_guard lock(removed->mutex);
    for (const auto& buffer : removed->buffers) names.insert(buffer->masked->config().name);
  }
  const double residual = drop_buffers(*removed);
  forget_state(names);
  if (residual > 0) {
    SCAPE_WARN(
        "registration \"%s\": unregistered with a residual of %g (sum of magnitudes) that was "
        "never sent; "
        "scape_flush() sends it",
        removed->name(), residual);
  }
  return {};
}

Status do_self_check(scape_registration registration) {
  SCAPE_RETURN_IF_ERROR(begin());
  const std::shared_ptr<Registration> found = registry().by_id(id_of(registration));
  if (found == nullptr) return error(SCAPE_ERR_NOT_FOUND, "no such registration; register first");
  if (found->hits.load() == 0 && found->fallbacks.load() == 0) {
    return error(SCAPE_ERR_USAGE,
                 "registration \"%s\" has met no collective yet; pass the address and the element "
                 "count that "
                 "ncclAllReduce gets, and see that its calls go through the preloaded library",
                 found->name());
  }
  if (const uint64_t misses = registry().misses_of(*found); misses >= kPatience) {
    return error(SCAPE_ERR_USAGE,
                 "registration \"%s\" has met none of the last %llu collectives of about its size; "
                 "its memory moved, or "
                 "another buffer is reduced",
                 found->name(), static_cast<unsigned long long>(misses));
  }
  size_t covered = 0;
  std::string reason;
  {
    const std::lock_guard lock(found->mutex);
    for (const auto& [from, to] : found->covered) covered += to - from;
    reason = found->reasons.last();
    for (const auto& buffer : found->buffers) {
      SCAPE_RETURN_IF_ERROR(buffer->masked->failure());
      if (reason.empty()) reason = buffer->masked->dense_reason();
    }
  }
  const scape_stats stats = stats_of(*found);
  if (stats.fallback_calls == stats.intercepted_calls && stats.intercepted_calls > 0) {
    return error(SCAPE_ERR_USAGE, "registration \"%s\" travels dense: %s", found->name(),
                 reason.c_str());
  }
  if (!covered_enough(covered, found->count)) {
    return error(SCAPE_ERR_USAGE,
                 "registration \"%s\": only %zu of its %zu elements were ever in a collective; "
                 "check that its count is in "
                 "elements",
                 found->name(), covered, found->count);
  }
  return {};
}

// Whether a range that is registered, or will be a buffer of its own inside one, has had no call.
// USAGE where state was loaded for it: only a call says in which communicator it lives.
Status before_first_call(const void* address, size_t count, bool* before) {
  *before = false;
  std::shared_ptr<Buffer> buffer;
  if (find_buffer(address, count, &buffer).ok()) return {};
  const std::shared_ptr<Registration> registration = registry().find(address);
  if (registration == nullptr) return {};
  const size_t bytes = reinterpret_cast<uintptr_t>(address) - registration->base;
  *before = count <= (registration->bytes() - bytes) / registration->element_size();
  if (*before && registration->config.sparsity > 0 &&
      state_waits(registration->config.name, bytes / registration->element_size(), count)) {
    return error(SCAPE_ERR_USAGE,
                 "the state loaded for buffer \"%s\" waits for the buffer's first all-reduce: "
                 "flush after that step, or before saving",
                 registration->name());
  }
  return {};
}

// What was loaded for the buffer is what waits to be sent.
Status do_flush(Buffer& buffer, void* data, float* param, double lr, double weight_decay,
                plugin::Stream stream) {
  if (const Status status = claim_saved_state(buffer); !status.ok()) {
    // The others are in the flush, or will be, where the state itself is refused.
    if (status.code() != SCAPE_ERR_USAGE) buffer.comm->shared()->abort(status);
    return status;
  }
  return buffer.masked->flush(data, param, lr, weight_decay, stream);
}

Status do_next(const char* name) {
  SCAPE_RETURN_IF_ERROR(begin());
  SCAPE_RETURN_IF_ERROR(check_pointer(name, "name"));
  SCAPE_RETURN_IF_ERROR(plugin::check_name("name", name));
  set_next_name(name);
  return {};
}

Status do_get_stats(const void* buffer, size_t count, scape_stats* out) {
  SCAPE_RETURN_IF_ERROR(begin_use());
  SCAPE_RETURN_IF_ERROR(check_pointer(out, "stats"));
  constexpr size_t kSmallest = offsetof(scape_stats, intercepted_calls);
  const size_t size = out->size;
  if (size < kSmallest || size > 65536) {
    return error(SCAPE_ERR_ARGUMENT,
                 "stats->size is %zu; set it to sizeof(scape_stats) before the call", size);
  }
  SCAPE_RETURN_IF_ERROR(check_process());
  scape_stats total{};
  if (buffer == nullptr) {
    total = retired_stats();
    for (const auto& registration : registry().all()) add_stats(stats_of(*registration), &total);
    const plugin::ByteCounters bytes = plugin::process_counters();
    total.wire_bytes_sent = bytes.sent_bytes;
    total.wire_bytes_received = bytes.received_bytes;
  } else if (count == 0) {
    const std::shared_ptr<Registration> registration = registry().find(buffer);
    if (registration == nullptr)
      return error(SCAPE_ERR_NOT_FOUND, "%p is in no registered range", buffer);
    total = stats_of(*registration);
  } else {
    std::shared_ptr<Buffer> found;
    SCAPE_RETURN_IF_ERROR(find_buffer(buffer, count, &found));
    total = found->masked->stats();
  }
  // A caller with an older, shorter structure gets what it has room for.
  total.size = size;
  std::memset(out, 0, size);
  std::memcpy(out, &total, std::min(size, sizeof total));
  out->size = size;
  return {};
}

// True when buffers were masked whose communicators are gone.
bool had_buffers() {
  for (const auto& registration : registry().all()) {
    const std::lock_guard lock(registration->mutex);
    if (registration->retired.sparse_calls > 0) return true;
  }
  return false;
}

Status do_save(std::vector<std::byte>* out) {
  SCAPE_RETURN_IF_ERROR(begin());
  const Entered entered;
  std::vector<SavedBuffer> buffers;
  SCAPE_RETURN_IF_ERROR(collect_state(&buffers));
  if (buffers.empty() && had_buffers()) {
    SCAPE_WARN(
        "the saved state is empty: the communicators of all buffers have ended, and their state "
        "with them; save before ncclCommDestroy");
  }
  *out = encode_saved(buffers);
  return {};
}

Status do_load(std::span<const std::byte> data) {
  std::vector<SavedBuffer> buffers;
  SCAPE_RETURN_IF_ERROR(decode_saved(data, &buffers));
  return accept_state(std::move(buffers));
}

}  // namespace
}  // namespace scape::interposer

using scape::Status;
using scape::interposer::before_first_call;
using scape::interposer::begin;
using scape::interposer::Buffer;
using scape::interposer::check_path;
using scape::interposer::check_pointer;
using scape::interposer::do_flush;
using scape::interposer::guarded;
using scape::interposer::with_buffer;
using scape::interposer::with_step;
using scape::plugin::Stream;

extern "C" {

int scape_is_active(void) {
  bool active = false;
  (void)guarded("scape_is_active", [&]() -> Status {
    active = scape::interposer::begin_use().ok() && scape::settings().enable;
    return {};
  });
  return active ? 1 : 0;
}

int scape_version(void) { return SCAPE_VERSION_CODE; }

const char* scape_status_string(scape_status status) {
  switch (status) {
    case SCAPE_OK:
      return "ok";
    case SCAPE_ERR_INACTIVE:
      return "scape is not active";
    case SCAPE_ERR_ARGUMENT:
      return "invalid argument";
    case SCAPE_ERR_USAGE:
      return "call does not fit the state";
    case SCAPE_ERR_NOT_FOUND:
      return "not found";
    case SCAPE_ERR_MISMATCH:
      return "ranks disagree";
    case SCAPE_ERR_MEMORY:
      return "out of memory or buffer too small";
    case SCAPE_ERR_SYSTEM:
      return "system error";
    case SCAPE_ERR_REMOTE:
      return "another rank failed";
    case SCAPE_ERR_TIMEOUT:
      return "time-out waiting for peers";
    case SCAPE_ERR_DATA:
      return "saved state is damaged or foreign";
    case SCAPE_ERR_INTERNAL:
      return "internal error";
  }
  return "unknown status";
}

const char* scape_last_error(void) { return scape::interposer::last_error(); }

scape_status scape_config_init(scape_config* config, size_t size) {
  return guarded("scape_config_init", [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(scape::interposer::begin_use());
    SCAPE_RETURN_IF_ERROR(check_pointer(config, "config"));
    if (size < sizeof config->size || size > 65536) {
      return scape::error(SCAPE_ERR_ARGUMENT, "size %zu is not sizeof(scape_config)", size);
    }
    // total_steps, dense_steps and ramp_steps are 0: the settings' values, unless the run's length
    // is given.
    scape_config filled;
    scape::plugin::default_config(&filled);
    filled.size = size;
    std::memset(static_cast<void*>(config), 0, size);
    std::memcpy(static_cast<void*>(config), &filled, std::min(size, sizeof filled));
    return {};
  });
}

scape_status scape_register(void* buffer, size_t count, scape_dtype dtype,
                            const scape_config* config, scape_registration* registration) {
  const scape_status status = guarded("scape_register", [&] {
    return scape::interposer::do_register(buffer, count, dtype, config, registration);
  });
  if (status != SCAPE_OK && scape::settings().required) {
    std::fprintf(stderr, "scape: SCAPE_REQUIRED=1 and a registration was refused: %s\n",
                 scape_last_error());
    ::_exit(1);
  }
  return status;
}

scape_status scape_unregister(scape_registration registration) {
  return guarded("scape_unregister",
                 [&] { return scape::interposer::do_unregister(registration); });
}

scape_status scape_next(const char* name) {
  return guarded("scape_next", [&] { return scape::interposer::do_next(name); });
}

scape_status scape_self_check(scape_registration registration) {
  return guarded("scape_self_check",
                 [&] { return scape::interposer::do_self_check(registration); });
}

scape_status scape_adams_step(void* buffer, size_t count, float* param, double lr,
                              double weight_decay, void* stream) {
  return guarded("scape_adams_step", [&] {
    return with_step(buffer, count, stream, {param}, [&](Buffer& found, Stream ordered) {
      return found.masked->adams_step(param, lr, weight_decay, ordered);
    });
  });
}

scape_status scape_post_step(void* buffer, size_t count, size_t offset, size_t length,
                             const float* before, float* param, double lr, double weight_decay,
                             void* stream) {
  return guarded("scape_post_step", [&] {
    return with_step(buffer, count, stream, {before, param}, [&](Buffer& found, Stream ordered) {
      return found.masked->post_step(offset, length, before, param, lr, weight_decay, ordered);
    });
  });
}

scape_status scape_clear_masked(void* buffer, size_t count, void* stream) {
  return guarded("scape_clear_masked", [&] {
    return with_step(buffer, count, stream, {buffer}, [&](Buffer& found, Stream ordered) {
      return found.masked->clear_masked(buffer, ordered);
    });
  });
}

scape_status scape_flush(void* buffer, size_t count, float* param, double lr, double weight_decay,
                         void* stream) {
  return guarded("scape_flush", [&]() -> Status {
    bool before = false;
    SCAPE_RETURN_IF_ERROR(before_first_call(buffer, count, &before));
    if (before) return {};
    return with_step(buffer, count, stream, {buffer, param}, [&](Buffer& found, Stream ordered) {
      return do_flush(found, buffer, param, lr, weight_decay, ordered);
    });
  });
}

scape_status scape_read_mask(const void* buffer, size_t count, uint64_t* words, size_t capacity) {
  return guarded("scape_read_mask", [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_pointer(words, "words"));
    return with_buffer(buffer, count,
                       [&](Buffer& found) { return found.masked->read_mask(words, capacity); });
  });
}

scape_status scape_read_ages(const void* buffer, size_t count, uint16_t* ages, size_t capacity) {
  return guarded("scape_read_ages", [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_pointer(ages, "ages"));
    return with_buffer(buffer, count,
                       [&](Buffer& found) { return found.masked->read_ages(ages, capacity); });
  });
}

scape_status scape_read_residual(const void* buffer, size_t count, float* out, size_t capacity) {
  return guarded("scape_read_residual", [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_pointer(out, "out"));
    return with_buffer(buffer, count,
                       [&](Buffer& found) { return found.masked->read_residual(out, capacity); });
  });
}

scape_status scape_read_moment(const void* buffer, size_t count, float* out, size_t capacity) {
  return guarded("scape_read_moment", [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_pointer(out, "out"));
    return with_buffer(buffer, count,
                       [&](Buffer& found) { return found.masked->read_moment(out, capacity); });
  });
}

scape_status scape_get_stats(const void* buffer, size_t count, scape_stats* stats) {
  return guarded("scape_get_stats",
                 [&] { return scape::interposer::do_get_stats(buffer, count, stats); });
}

scape_status scape_save_state(void* data, size_t capacity, size_t* needed) {
  return guarded("scape_save_state", [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_pointer(needed, "needed"));
    *needed = 0;
    std::vector<std::byte> state;
    SCAPE_RETURN_IF_ERROR(scape::interposer::do_save(&state));
    *needed = state.size();
    if (data == nullptr) return {};
    if (capacity < state.size()) {
      return scape::error(SCAPE_ERR_MEMORY, "capacity %zu is less than the %zu bytes needed",
                          capacity, state.size());
    }
    std::memcpy(data, state.data(), state.size());
    return {};
  });
}

scape_status scape_save_state_file(const char* path) {
  return guarded("scape_save_state_file", [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(check_path(path));
    std::vector<std::byte> state;
    SCAPE_RETURN_IF_ERROR(scape::interposer::do_save(&state));
    return scape::interposer::write_file(path, state);
  });
}

scape_status scape_load_state(const void* data, size_t size) {
  return guarded("scape_load_state", [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(begin());
    SCAPE_RETURN_IF_ERROR(check_pointer(data, "data"));
    return scape::interposer::do_load({static_cast<const std::byte*>(data), size});
  });
}

scape_status scape_load_state_file(const char* path) {
  return guarded("scape_load_state_file", [&]() -> Status {
    SCAPE_RETURN_IF_ERROR(begin());
    SCAPE_RETURN_IF_ERROR(check_path(path));
    std::vector<std::byte> state;
    SCAPE_RETURN_IF_ERROR(scape::interposer::read_file(path, &state));
    return scape::interposer::do_load(state);
  });
}

}  // extern "C"
