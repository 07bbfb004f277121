// How much longer things may take in a sanitizer build.
#pragma once

namespace scape::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr double kSlowdown = 10;
#elif defined(__SANITIZE_ADDRESS__)
inline constexpr double kSlowdown = 5;
#else
inline constexpr double kSlowdown = 1;
#endif

}  // namespace scape::test
