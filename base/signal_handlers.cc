#include "base/signal_handlers.h"

namespace scape {
namespace {

std::mutex& turn() {
  static std::mutex* const instance =
      new std::mutex;  // never destroyed: used until the last moment
  return *instance;
}

// Signals with numbers below the real-time ones, which nobody installs unasked.
constexpr int kSignals = 32;

bool same(const struct sigaction& a, const struct sigaction& b) {
  return a.sa_flags == b.sa_flags && a.sa_sigaction == b.sa_sigaction;
}

}  // namespace

KeepSignalHandlers::KeepSignalHandlers() : turn_(turn()), before_(kSignals) {
  for (int number = 1; number < kSignals; ++number) {
    ::sigaction(number, nullptr, &before_[static_cast<size_t>(number)]);
  }
}

KeepSignalHandlers::~KeepSignalHandlers() {
  for (int number = 1; number < kSignals; ++number) {
    const struct sigaction& before = before_[static_cast<size_t>(number)];
    struct sigaction now {};
    if (::sigaction(number, nullptr, &now) == 0 && !same(before, now)) {
      ::sigaction(number, &before, nullptr);
    }
  }
}

}  // namespace scape
