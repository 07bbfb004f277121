// What the library knows about its own process: the first use, the last error of each thread, and
// the process that owns what was opened.
//
// Everything here may be called before any constructor has run and after main has returned: state
// is constant-initialised and never destroyed.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "base/float_environment.h"
#include "base/status.h"
#include "nccl/api.h"

namespace scape::interposer {

// Checks the settings; at the first call also warns of unknown SCAPE_* names and, where
// SCAPE_UNSET_PRELOAD asks for it, takes this library out of LD_PRELOAD. Every entry point that
// does work calls it first. Cheap after the first call.
Status begin_use();

// The sentence that scape_last_error() and ncclGetLastError() give to this thread; cut to fit. A
// thread that never failed has an empty one.
void set_last_error(const char* message);
const char* last_error();

// Remembers this process as the owner of communicators and registrations. In a child they are
// refused without touching a lock that another thread of the parent may have held: in every child
// with memory of its own, where the kernel has MADV_WIPEONFORK (Linux 4.14), else in those that
// fork() made.
void claim_process();
Status check_process();

// LD_PRELOAD's value without the entries that name `library`: equal paths, or equal file names.
// Order and separators of the others stay.
std::string without_preload(const std::string& value, const std::string& library);

// The file this code was loaded from, and where; empty and null when the linker cannot tell.
struct LoadedObject {
  std::string path;
  const void* base = nullptr;
};
LoadedObject object_of(const void* address);
const LoadedObject& own_object();

// What a status is to a caller of NCCL. Callers built with a header older than 2.32 do not know
// ncclTimeout and get ncclRemoteError (note_caller_version tells of newer ones).
nccl::ncclResult_t to_nccl(scape_status code);
void note_caller_version(unsigned version);

// Runs `body`, a callable that gives a Status, on behalf of the C function `name`: in the default
// floating-point environment whatever the caller's is; no exception leaves it, and an error becomes
// the thread's last error and a log line.
template <typename Body>
scape_status guarded(const char* name, Body&& body);

// Keeps and logs an error that `name` is about to return.
void report(const char* name, const Status& status);

template <typename Body>
scape_status guarded(const char* name, Body&& body) {
  const DefaultFloatEnvironment as_defined;
  try {
    const Status status = body();
    if (status.ok()) return SCAPE_OK;
    report(name, status);
    return status.code();
  } catch (const std::bad_alloc&) {
    set_last_error("out of memory");
    return SCAPE_ERR_MEMORY;
  } catch (const std::exception& exception) {
    set_last_error(exception.what());
    return SCAPE_ERR_INTERNAL;
  } catch (...) {
    set_last_error("an unknown exception reached the interface");
    return SCAPE_ERR_INTERNAL;
  }
}

}  // namespace scape::interposer
