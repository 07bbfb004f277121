// A library that calls NCCL and Scape from its constructor: before main, before the program's own
// start.
#include <cstdio>

#include "scape/scape.h"
#include "tests/support/nccl_prototypes.h"

using namespace scape::nccl;

namespace {

int answers[3] = {-1, -1, -1};
float buffer[16];

__attribute__((constructor)) void call_early() {
  int version = 0;
  answers[0] = ncclGetVersion(&version) == ncclSuccess && version > 20000 ? 0 : 1;
  ncclUniqueId id;
  answers[1] = ncclGetUniqueId(&id);
  scape_registration registration = nullptr;
  answers[2] = scape_register(buffer, 16, SCAPE_FLOAT32, nullptr, &registration);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void print_early_answers() {
  std::printf("early calls: %d %d %d\n", answers[0], answers[1], answers[2]);
}
