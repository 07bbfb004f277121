/* What NCCL does with CollNet, and what goes wrong with it. */
#ifndef SCAPE_TESTS_COLL_SCENARIOS_H
#define SCAPE_TESTS_COLL_SCENARIOS_H

void coll_types(void);
void coll_sizes(void);
void coll_requests(void);
void coll_ends(void);
void coll_wrong(void);
void coll_alone(void);
void coll_absent(void);
void coll_mismatch(void);
void coll_reload(void);
void coll_kill_small(void);
void coll_kill_large(void);
void coll_kill_first(void);

#define COLL_SCENARIOS                                                                       \
  {"coll_types", coll_types, 0, 0, -1}, {"coll_sizes", coll_sizes, 0, 0, -1},                \
      {"coll_requests", coll_requests, 0, 0, -1}, {"coll_ends", coll_ends, 3, 0, -1},        \
      {"coll_wrong", coll_wrong, 3, 0, -1}, {"coll_alone", coll_alone, 1, 0, -1},            \
      {"coll_absent", coll_absent, 3, 1, -1}, {"coll_mismatch", coll_mismatch, 2, 1, -1},    \
      {"coll_reload", coll_reload, 2, 1, -1}, {"coll_kill_small", coll_kill_small, 4, 0, 2}, \
      {"coll_kill_large", coll_kill_large, 4, 0, 2}, {                                       \
    "coll_kill_first", coll_kill_first, 4, 0, 0                                              \
  }

#endif
