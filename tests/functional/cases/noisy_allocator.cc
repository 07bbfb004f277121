// A preloaded library that stands in front of the C library's allocator and symbol look-up and
// counts: such a one comes back into whoever allocates while it is set up.
#include <dlfcn.h>

#include <atomic>
#include <cstddef>

extern "C" {

void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void __libc_free(void* memory);

__attribute__((visibility("default"))) std::atomic<long> allocations_seen;

__attribute__((visibility("default"))) void* malloc(size_t size) {
  ++allocations_seen;
  return __libc_malloc(size);
}
__attribute__((visibility("default"))) void* calloc(size_t count, size_t size) {
  ++allocations_seen;
  return __libc_calloc(count, size);
}
__attribute__((visibility("default"))) void free(void* memory) {
  if (memory != nullptr) ++allocations_seen;
  __libc_free(memory);
}
__attribute__((visibility("default"))) std::atomic<long> lookups_seen;
__attribute__((visibility("default"))) void* dlsym(void* handle, const char* name) {
  using Lookup = void* (*)(void*, const char*);
  ++lookups_seen;
  return reinterpret_cast<Lookup>(::dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34"))(handle, name);
}

}  // extern "C"
