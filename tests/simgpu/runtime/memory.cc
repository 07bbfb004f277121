// Memory and copies.
#include <algorithm>
#include <cstring>

#include "runtime.h"
#include "settings.h"

using namespace simgpu;  // NOLINT: all here is CUDA's C API

struct CUmemPoolHandle_st {
  uint64_t release_threshold = 0;
  int reuse[3] = {1, 1, 1};
};

namespace {

cudaError_t allocate(Runtime& rt, void** out, size_t bytes, Place place) {
  if (out == nullptr) return cudaErrorInvalidValue;
  *out = nullptr;
  ++rt.counters.allocations;
  if (bytes == 0) return cudaSuccess;
  Device& device = rt.devices[static_cast<size_t>(current_device())];
  if (place == Place::kDevice && bytes > settings().memory - device.used) {
    return cudaErrorMemoryAllocation;
  }
  *out = rt.memory.allocate(bytes, place, current_device());
  if (*out == nullptr) return cudaErrorMemoryAllocation;
  if (place == Place::kDevice) {
    device.used += bytes;
    device.used_high = std::max(device.used_high, device.used);
  }
  return cudaSuccess;
}

// What can be freed: the beginning of a live allocation of that place.
Allocation* to_free(Runtime& rt, void* address, Place place) {
  Allocation* found = rt.memory.find_exact(address);
  if (found == nullptr || !found->live || found->place != place || found->registered ||
      found->freeing) {
    return nullptr;
  }
  return found;
}

void release(Runtime& rt, Allocation& allocation) {
  Device& device = rt.devices[static_cast<size_t>(allocation.device)];
  if (allocation.place == Place::kDevice) device.used -= allocation.bytes;
  if (!rt.memory.release(allocation) && device.broken == cudaSuccess) {
    device.broken = cudaErrorIllegalAddress;
  }
}

cudaError_t free_now(Runtime& rt, Lock& lock, void* address, Place place) {
  if (address == nullptr) return cudaSuccess;
  ++rt.counters.frees;
  ++rt.counters.host_syncs;
  Allocation* found = to_free(rt, address, place);
  if (found == nullptr) return cudaErrorInvalidValue;
  found->freeing = true;
  const int device = found->device;
  (void)wait_for_device(rt, lock, device);
  release(rt, *found);
  return rt.devices[static_cast<size_t>(device)].broken;
}

// One side of a copy.
struct Side {
  Place place = Place::kPageable;
  bool valid = false;  // all of it is in one live allocation, or it is the program's own memory
};
Side side_of(Runtime& rt, const void* address, size_t bytes) {
  const Allocation* found = rt.memory.find(address);
  if (found == nullptr) return {Place::kPageable, address != nullptr};
  const uintptr_t end = reinterpret_cast<uintptr_t>(address) + bytes;
  // Of the program's own memory only a part may be registered.
  const bool inside = found->live && (found->registered || end <= found->begin + found->bytes);
  return {found->place, inside};
}

cudaError_t check_copy(Side to, Side from, cudaMemcpyKind kind) {
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) {
    return cudaErrorInvalidMemcpyDirection;
  }
  if (!to.valid || !from.valid) return cudaErrorInvalidValue;
  if (kind == cudaMemcpyDefault) return cudaSuccess;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  // Page-locked memory has a device address too, its own.
  const auto fits = [](Side side, bool device) {
    return side.place == Place::kPinned || (side.place == Place::kDevice) == device;
  };
  return fits(to, to_device) && fits(from, from_device) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t copy(Runtime& rt, Lock& lock, void* to, const void* from, size_t bytes,
                 cudaMemcpyKind kind, cudaStream_t handle, bool blocking) {
  const StreamPtr stream = find_stream(rt, handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  const Side to_side = side_of(rt, to, bytes);
  const Side from_side = side_of(rt, from, bytes);
  if (const cudaError_t error = check_copy(to_side, from_side, kind); error != cudaSuccess) {
    return error;
  }
  ++rt.counters.copies;
  rt.counters.copied_bytes += bytes;
  Work work{cudaGraphNodeTypeMemcpy, [=] { std::memmove(to, from, bytes); }, nullptr, nullptr};
  if (stream->capture != nullptr) return submit(rt, stream, std::move(work));

  const bool on_device = to_side.place == Place::kDevice && from_side.place == Place::kDevice;
  const bool pageable = to_side.place == Place::kPageable || from_side.place == Place::kPageable;
  if (pageable || (blocking && !on_device)) ++rt.counters.host_syncs;
  bool wait = blocking && !on_device;
  if (pageable && from_side.place == Place::kPageable && to_side.place != Place::kPageable) {
    // The call reads it, into memory that the device can reach; the copy from there comes later.
    auto staged = std::make_shared<std::vector<unsigned char>>(bytes);
    lock.unlock();
    std::memcpy(staged->data(), from, bytes);
    lock.lock();
    work.body = [=] { std::memcpy(to, staged->data(), bytes); };
  } else if (pageable) {
    wait = true;
  }
  if (const cudaError_t error = submit(rt, stream, std::move(work)); error != cudaSuccess) {
    return error;
  }
  return wait ? wait_for(rt, lock, stream->last, stream->device) : cudaSuccess;
}

cudaError_t set(Runtime& rt, Lock& lock, void* to, int value, size_t bytes, cudaStream_t handle,
                bool blocking) {
  const StreamPtr stream = find_stream(rt, handle);
  if (stream == nullptr) return cudaErrorInvalidResourceHandle;
  if (bytes == 0) return cudaSuccess;
  const Side side = side_of(rt, to, bytes);
  if (!side.valid || side.place == Place::kPageable) return cudaErrorInvalidValue;
  ++rt.counters.memsets;
  const cudaError_t error = submit(
      rt, stream,
      Work{cudaGraphNodeTypeMemset, [=] { std::memset(to, value, bytes); }, nullptr, nullptr});
  if (error != cudaSuccess || !blocking || side.place == Place::kDevice) return error;
  ++rt.counters.host_syncs;
  return wait_for(rt, lock, stream->last, stream->device);
}

// One pool a device, which no allocation is taken from: all have their own pages.
CUmemPoolHandle_st pools[16];

cudaError_t pool_attribute(Runtime& rt, cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value,
                           bool write) {
  if (value == nullptr || pool < pools || pool >= pools + rt.devices.size()) {
    return cudaErrorInvalidValue;
  }
  Device& device = rt.devices[static_cast<size_t>(pool - pools)];
  switch (attribute) {
    case cudaMemPoolReuseFollowEventDependencies:
    case cudaMemPoolReuseAllowOpportunistic:
    case cudaMemPoolReuseAllowInternalDependencies: {
      int& reuse = pool->reuse[attribute - cudaMemPoolReuseFollowEventDependencies];
      write ? reuse = *static_cast<int*>(value) : *static_cast<int*>(value) = reuse;
      return cudaSuccess;
    }
    case cudaMemPoolAttrReleaseThreshold:
      write ? pool->release_threshold = *static_cast<uint64_t*>(value)
            : *static_cast<uint64_t*>(value) = pool->release_threshold;
      return cudaSuccess;
    case cudaMemPoolAttrReservedMemCurrent:
    case cudaMemPoolAttrUsedMemCurrent:
      if (write) return cudaErrorInvalidValue;
      *static_cast<uint64_t*>(value) = device.used;
      return cudaSuccess;
    case cudaMemPoolAttrReservedMemHigh:
    case cudaMemPoolAttrUsedMemHigh:
      write ? device.used_high = device.used : *static_cast<uint64_t*>(value) = device.used_high;
      return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

bool simgpu::reachable(const void* address, size_t bytes, int device) {
  Runtime& rt = runtime();
  const Lock lock(rt.mutex);
  const Side side = side_of(rt, address, bytes);
  const Allocation* found = rt.memory.find(address);
  return side.valid && (side.place == Place::kPinned ||
                        (side.place == Place::kDevice && found->device == device));
}

cudaError_t cudaMalloc(void** out, size_t bytes) {
  return call("cudaMalloc", kUnsafe,
              [&](Runtime& rt, Lock&) { return allocate(rt, out, bytes, Place::kDevice); });
}

cudaError_t cudaFree(void* address) {
  return call("cudaFree", kUnsafe,
              [&](Runtime& rt, Lock& lock) { return free_now(rt, lock, address, Place::kDevice); });
}

cudaError_t cudaMallocAsync(void** out, size_t bytes, cudaStream_t handle) {
  return call("cudaMallocAsync", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    const StreamPtr stream = find_stream(rt, handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (stream->capture != nullptr) {
      invalidate(*stream->capture);
      return cudaErrorStreamCaptureUnsupported;
    }
    return allocate(rt, out, bytes, Place::kDevice);
  });
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t handle) {
  return call("cudaFreeAsync", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    const StreamPtr stream = find_stream(rt, handle);
    if (stream == nullptr) return cudaErrorInvalidResourceHandle;
    if (stream->capture != nullptr) {
      invalidate(*stream->capture);
      return cudaErrorStreamCaptureUnsupported;
    }
    ++rt.counters.frees;
    Allocation* found = to_free(rt, address, Place::kDevice);
    if (found == nullptr) return cudaErrorInvalidValue;
    found->freeing = true;
    const auto give_back = [&rt, found] {
      const Lock lock(rt.mutex);
      release(rt, *found);
    };
    return submit(rt, stream, Work{cudaGraphNodeTypeEmpty, give_back, nullptr, nullptr});
  });
}

cudaError_t cudaHostAlloc(void** out, size_t bytes, unsigned flags) {
  return call("cudaHostAlloc", kUnsafe, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (flags > 7) return cudaErrorInvalidValue;
    return allocate(rt, out, bytes, Place::kPinned);
  });
}

cudaError_t cudaMallocHost(void** out, size_t bytes) {
  return call("cudaMallocHost", kUnsafe,
              [&](Runtime& rt, Lock&) { return allocate(rt, out, bytes, Place::kPinned); });
}

cudaError_t cudaFreeHost(void* address) {
  return call("cudaFreeHost", kUnsafe,
              [&](Runtime& rt, Lock& lock) { return free_now(rt, lock, address, Place::kPinned); });
}

cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned flags) {
  return call("cudaHostRegister", kUnsafe, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (address == nullptr || bytes == 0 || flags > 15) return cudaErrorInvalidValue;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(address);
    if (rt.memory.overlaps(begin, bytes)) return cudaErrorHostMemoryAlreadyRegistered;
    ++rt.counters.allocations;
    rt.memory.add_registered(begin, bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaHostUnregister(void* address) {
  return call("cudaHostUnregister", kUnsafe, [&](Runtime& rt, Lock& lock) -> cudaError_t {
    ++rt.counters.frees;
    ++rt.counters.host_syncs;
    const Allocation* found = rt.memory.find_exact(address);
    if (found == nullptr || !found->registered) return cudaErrorHostMemoryNotRegistered;
    const cudaError_t error = wait_for_device(rt, lock, current_device());
    rt.memory.remove_registered(reinterpret_cast<uintptr_t>(address));
    return error;
  });
}

cudaError_t cudaHostGetDevicePointer(void** out, void* address, unsigned flags) {
  return call("cudaHostGetDevicePointer", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (out == nullptr || flags != 0) return cudaErrorInvalidValue;
    const Allocation* found = rt.memory.find(address);
    if (found == nullptr || !found->live || found->place != Place::kPinned) {
      return cudaErrorInvalidValue;
    }
    *out = address;
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  return call("cudaPointerGetAttributes", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (attributes == nullptr) return cudaErrorInvalidValue;
    cudaPointerAttributes out{};
    const Allocation* found = rt.memory.find(address);
    if (found == nullptr || !found->live) {
      out.type = cudaMemoryTypeUnregistered;
      out.device = cudaInvalidDeviceId;
      out.hostPointer = const_cast<void*>(address);
    } else {
      const bool pinned = found->place == Place::kPinned;
      out.type = pinned ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
      out.device = found->device;
      out.devicePointer = const_cast<void*>(address);
      if (pinned) out.hostPointer = const_cast<void*>(address);
    }
    *attributes = out;
    return cudaSuccess;
  });
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  return call("cudaMemGetInfo", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (free == nullptr || total == nullptr) return cudaErrorInvalidValue;
    *total = settings().memory;
    *free = settings().memory - rt.devices[static_cast<size_t>(current_device())].used;
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  return call("cudaDeviceGetDefaultMemPool", kAnyTime, [&](Runtime& rt, Lock&) -> cudaError_t {
    if (pool == nullptr) return cudaErrorInvalidValue;
    if (device < 0 || static_cast<size_t>(device) >= rt.devices.size()) {
      return cudaErrorInvalidDevice;
    }
    *pool = &pools[device];
    return cudaSuccess;
  });
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return call("cudaMemPoolSetAttribute", kAnyTime,
              [&](Runtime& rt, Lock&) { return pool_attribute(rt, pool, attribute, value, true); });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void* value) {
  return call("cudaMemPoolGetAttribute", kAnyTime, [&](Runtime& rt, Lock&) {
    return pool_attribute(rt, pool, attribute, value, false);
  });
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return call("cudaMemcpy", kUnsafe, [&](Runtime& rt, Lock& lock) {
    return copy(rt, lock, to, from, bytes, kind, cudaStreamLegacy, true);
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return call("cudaMemcpyAsync", kAnyTime, [&](Runtime& rt, Lock& lock) {
    return copy(rt, lock, to, from, bytes, kind, stream, false);
  });
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return call("cudaMemset", kUnsafe, [&](Runtime& rt, Lock& lock) {
    return set(rt, lock, to, value, bytes, cudaStreamLegacy, true);
  });
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return call("cudaMemsetAsync", kAnyTime, [&](Runtime& rt, Lock& lock) {
    return set(rt, lock, to, value, bytes, stream, false);
  });
}
