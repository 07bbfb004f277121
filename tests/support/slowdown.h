// How much longer things may take in a sanitizer build.
#pragma once

#if defined(__SANITIZE_THREAD__)
#define SCAPE_SLOWDOWN 10.0
#elif defined(__SANITIZE_ADDRESS__)
#define SCAPE_SLOWDOWN 5.0
#else
#define SCAPE_SLOWDOWN 1.0
#endif

#if defined(__cplusplus)
namespace scape::test {

inline constexpr double kSlowdown = SCAPE_SLOWDOWN;

}  // namespace scape::test
#endif
