// What the stub NCCL tells a test of itself.
#pragma once

#include <cstdint>

extern "C" {
// Calls so far of "ncclX", under either of its names.
uint64_t stub_nccl_calls(const char* function);
}

// The version that its ncclGetVersion gives: no real NCCL has it.
inline constexpr int kStubVersion = 22999;
