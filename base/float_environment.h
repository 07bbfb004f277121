// The floating-point environment in which the bits of results are defined: round to nearest even,
// denormals kept, no traps. A program may have set another one for its threads
// (torch.set_flush_denormal(True) does), and threads inherit it; ranks would then disagree in bits
// that have to be alike.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace scape {

// While one lives its thread has the default environment; afterwards the one it had before. Costs a
// few cycles where it is the default already.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() : before_(read()) {
    if (changes()) write(kDefault);
  }
  ~DefaultFloatEnvironment() {
    if (changes()) write(before_);
  }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  using Control = uint32_t;
  static constexpr Control kDefault = 0x1f80;  // MXCSR at the start of a program
  static constexpr Control kFlags = 0x3f;      // what has happened so far, not what is asked for
  static Control read() { return _mm_getcsr(); }
  static void write(Control value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Control = uint64_t;
  static constexpr Control kDefault = 0;  // FPCR at the start of a program
  static constexpr Control kFlags = 0;    // in a register of their own
  static Control read() {
    Control value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Control value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
#error "no floating-point control register is known for this processor"
#endif

  bool changes() const { return (before_ & ~kFlags) != kDefault; }

  const Control before_;
};

}  // namespace scape
