/* What the scenarios share: the options, what NCCL would be, the other processes. */
#ifndef SCAPE_TESTS_NET_HARNESS_H
#define SCAPE_TESTS_NET_HARNESS_H

#include <stdatomic.h>
#include <stddef.h>

#include "plugin/net/abi/net_api.h"
#include "tests/support/slowdown.h"

enum { MAX_RANKS = 8, MAX_LINKS = 8, MAX_BARRIERS = 4096 };

/* What the processes share. */
struct shared {
  atomic_int arrived[MAX_BARRIERS];
  unsigned char handles[MAX_RANKS][MAX_RANKS][MAX_LINKS][NET_HANDLE_BYTES];
};
extern struct shared* shared;

/* From the command line. */
extern const char* library;
extern int rank, ranks, count, links;
extern size_t largest;
extern unsigned seed;

/* The loaded plugin, and what it has said. */
extern struct api api;
extern atomic_int warnings;
extern char last_warning[1024];
void logger(int level, unsigned long flags, const char* file, int line, const char* format, ...);
void load(int version);
void unload(void);

double now(void); /* seconds */
unsigned next_random(unsigned* state);
void barrier(void); /* waits for all processes */
int entries_of(const char* folder);

_Noreturn void quit(const char* file, int line, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
#define CHECK(condition, ...)                                \
  do {                                                       \
    if (!(condition)) quit(__FILE__, __LINE__, __VA_ARGS__); \
  } while (0)
#define OK(call)                                                                     \
  do {                                                                               \
    const int result_ = (call);                                                      \
    CHECK(result_ == NET_SUCCESS, "%s gives %d (%s)", #call, result_, last_warning); \
  } while (0)
/* A wrong call: a code and one line. */
#define REFUSED(call)                                                           \
  do {                                                                          \
    const int before_ = atomic_load(&warnings);                                 \
    const int result_ = (call);                                                 \
    CHECK(result_ != NET_SUCCESS, "%s is not refused", #call);                  \
    CHECK(atomic_load(&warnings) == before_ + 1, "%s is not explained", #call); \
  } while (0)

struct scenario {
  const char* name;
  void (*run)(void);
  int ranks;  /* 0: as asked for */
  int loads;  /* by itself */
  int killed; /* the rank that does not end well, or -1 */
};

#endif
