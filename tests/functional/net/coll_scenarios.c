#define _GNU_SOURCE
#include "tests/functional/net/coll_scenarios.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/functional/net/coll_api.h"
#include "tests/functional/net/harness.h"

enum { SUM = 0, PROD = 1, MAX = 2, MIN = 3, OPS = 4, TYPES = 12 };
enum { INT8 = 0, INT64 = 4, FLOAT32 = 7 };
enum { REQUESTS = 128 /* of a group, at once */ };

static struct coll_api coll;

/* As NCCL: beside the net plugin, which is there already. */
static void coll_load(void) {
  CHECK(coll_open(&coll, library, api.version) == 0, "no CollNet of version %d", api.version);
  CHECK(strcmp(coll_name(&coll), "scape") == 0, "the name is %s", coll_name(&coll));
  int devices = 0;
  OK(coll_init(&coll, logger));
  OK(coll_devices(&coll, &devices));
  CHECK(devices >= 1, "%d devices", devices);
}

static void coll_unload(void) {
  OK(coll_finalize(&coll));
  coll_close_library(&coll);
}

/* --- groups ----------------------------------------------------------------------------------- */

static void listen_for(int link, void** listen_comm) {
  OK(coll_listen(&coll, 0, shared->handles[rank][0][link], listen_comm));
}

static int try_connect(int link, void* listen_comm, void** comm) {
  unsigned char copies[MAX_RANKS][NET_HANDLE_BYTES];
  void* handles[MAX_RANKS];
  for (int r = 0; r < ranks; ++r) {
    memcpy(copies[r], shared->handles[r][0][link], NET_HANDLE_BYTES);
    handles[r] = copies[r];
  }
  return coll_connect(&coll, handles, ranks, rank, listen_comm, comm);
}

static void join(int link, void** listen_comm, void** comm) {
  *comm = NULL;
  listen_for(link, listen_comm);
  barrier();
  OK(try_connect(link, *listen_comm, comm));
  CHECK(*comm != NULL, "no group");
}

/* A group of this process alone. */
static void join_alone(void** listen_comm, void** comm) {
  unsigned char handle[NET_HANDLE_BYTES];
  void* handles[] = {handle};
  OK(coll_listen(&coll, 0, handle, listen_comm));
  OK(coll_connect(&coll, handles, 1, 0, *listen_comm, comm));
}

/* --- values, exact in every order --------------------------------------------------------------
 */

struct type {
  size_t size;
  int is_float, is_signed;
  int exponent, mantissa; /* bits */
};
static const struct type kTypes[TYPES] = {
    {1, 0, 1, 0, 0},   {1, 0, 0, 0, 0}, {4, 0, 1, 0, 0},  {4, 0, 0, 0, 0},
    {8, 0, 1, 0, 0},   {8, 0, 0, 0, 0}, {2, 1, 1, 5, 10}, {4, 1, 1, 8, 23},
    {8, 1, 1, 11, 52}, {2, 1, 1, 8, 7}, {1, 1, 1, 4, 3},  {1, 1, 1, 5, 2},
};

static uint64_t hash(unsigned salt, int r, size_t i) {
  uint64_t x = ((uint64_t)salt << 40) ^ ((uint64_t)r << 56) ^ i;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

static unsigned char byte_of(unsigned salt, int r, size_t i) {
  return (unsigned char)(salt * 131 + (unsigned)r * 29 + i * 7 + (i >> 8) * 3);
}

/* Small integers that even 8-bit floats hold, and their sums or products over a few ranks. */
static int small_value(int type, int op, uint64_t bits) {
  const int reach = op == SUM ? (kTypes[type].size == 1 ? 2 : 50) : 7;
  if (op == PROD) return (bits & 1 ? 1 : 2) * (bits & 2 ? 1 : -1);
  return (int)(bits % (unsigned)(2 * reach + 1)) - reach;
}

static uint64_t encode(const struct type* type, int value) {
  if (value == 0) return 0;
  const uint64_t sign = value < 0;
  uint64_t magnitude = (uint64_t)abs(value);
  int exponent = 0;
  while (magnitude >> (exponent + 1) != 0) ++exponent;
  /* The values are such that nothing is cut off. */
  const int shift = type->mantissa - exponent;
  const uint64_t fraction = (shift >= 0 ? magnitude << shift : magnitude >> -shift) &
                            ((UINT64_C(1) << type->mantissa) - 1);
  const uint64_t bias = (UINT64_C(1) << (type->exponent - 1)) - 1;
  return sign << (type->exponent + type->mantissa) | ((uint64_t)exponent + bias) << type->mantissa |
         fraction;
}

static int64_t extended(const struct type* type, uint64_t bits) {
  const int unused = 64 - 8 * (int)type->size;
  return type->is_signed ? (int64_t)(bits << unused) >> unused
                         : (int64_t)((bits << unused) >> unused);
}

/* Element i of rank r. */
static uint64_t element_of(int type, int op, unsigned salt, int r, size_t i) {
  const uint64_t bits = hash(salt, r, i);
  return kTypes[type].is_float ? encode(&kTypes[type], small_value(type, op, bits)) : bits;
}

/* What the reduction over all ranks gives. */
static uint64_t reduced(int type, int op, unsigned salt, size_t i) {
  const struct type* const t = &kTypes[type];
  int64_t result = 0;
  for (int r = 0; r < ranks; ++r) {
    const uint64_t bits = hash(salt, r, i);
    const int64_t value = t->is_float ? small_value(type, op, bits) : extended(t, bits);
    const int less =
        t->is_float || t->is_signed ? value < result : (uint64_t)value < (uint64_t)result;
    if (r == 0) {
      result = value;
    } else if (op == SUM) {
      result = (int64_t)((uint64_t)result + (uint64_t)value);
    } else if (op == PROD) {
      result = (int64_t)((uint64_t)result * (uint64_t)value);
    } else if (op == MIN ? less : !less) {
      result = value;
    }
  }
  return t->is_float ? encode(t, (int)result) : (uint64_t)result;
}

static void store(unsigned char* out, const struct type* type, uint64_t bits) {
  memcpy(out, &bits, type->size); /* little-endian, as all that NCCL runs on */
}

/* --- calls ------------------------------------------------------------------------------------ */

enum kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, KINDS };

struct job {
  enum kind kind;
  int type, op;
  size_t count; /* all-reduce */
  struct coll_window window;
  unsigned salt;
  int in_place, registered, parts;

  void* comm;
  void* request;
  struct collnet_part_v12 part[COLL_MAX_PARTS]; /* the side with all of the window */
  unsigned char *send, *receive;                /* what is in one piece */
  size_t send_bytes, receive_bytes;
  void *send_memory, *receive_memory;
  unsigned char* owned[COLL_MAX_PARTS + 2];
  int owned_count;
};

enum { GUARD = 16 };

static unsigned char* make_buffer(struct job* job, size_t bytes) {
  unsigned char* const buffer = malloc(bytes + GUARD);
  CHECK(buffer != NULL, "no memory");
  memset(buffer, 0xee, bytes + GUARD);
  job->owned[job->owned_count++] = buffer;
  return buffer;
}

static void* register_for(const struct job* job, void* data, size_t bytes) {
  void* memory = NULL;
  if (!job->registered || bytes == 0) return NULL;
  OK(coll_register(&coll, job->comm, data, bytes, NET_POINTER_HOST, &memory));
  return memory;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* This rank's block, cut to the window: where it begins in the window, and its bytes. */
static size_t own_block(const struct job* job, size_t* bytes) {
  const struct coll_window* const w = &job->window;
  const size_t block = (size_t)rank * w->bytes_per_rank;
  const size_t from = block > w->offset ? block : w->offset;
  const size_t to = least(block + w->bytes_per_rank, w->offset + w->bytes);
  *bytes = to > from ? to - from : 0;
  return *bytes > 0 ? from - w->offset : 0;
}

/* Fills n elements with this rank's, from element `first` on. */
static void fill_elements(const struct job* job, unsigned char* out, size_t first, size_t n) {
  const struct type* const type = &kTypes[job->type];
  for (size_t i = 0; i < n; ++i) {
    store(out + i * type->size, type, element_of(job->type, job->op, job->salt, rank, first + i));
  }
}

/* Buffers for the call. A window in several parts has them of different sizes. */
static void prepare(struct job* job) {
  const size_t size = kTypes[job->type].size;
  job->owned_count = 0;
  job->request = NULL;
  if (job->kind == ALL_REDUCE) {
    job->send_bytes = job->receive_bytes = job->count * size;
    job->receive = make_buffer(job, job->receive_bytes);
    job->send = job->in_place ? job->receive : make_buffer(job, job->send_bytes);
    fill_elements(job, job->send, 0, job->count);
    job->send_memory = register_for(job, job->send, job->send_bytes);
    job->receive_memory = register_for(job, job->receive, job->receive_bytes);
    return;
  }
  const int gathers = job->kind == ALL_GATHER;
  if (gathers) job->type = INT8;
  size_t own = 0;
  const size_t own_at = own_block(job, &own);
  size_t at = 0;
  const size_t element = gathers ? 1 : size;
  for (int p = 0; p < job->parts; ++p) {
    struct collnet_part_v12* const part = &job->part[p];
    const size_t left = job->window.bytes - at;
    part->size = p + 1 == job->parts ? left : left / element / (size_t)(p + 2) * element;
    part->address = make_buffer(job, part->size);
    if (!gathers) {
      fill_elements(job, part->address, (job->window.offset + at) / size, part->size / size);
    }
    part->memory = register_for(job, part->address, part->size);
    at += part->size;
  }
  unsigned char* const inside = (unsigned char*)job->part[0].address + own_at;
  const int in_place = job->in_place && job->parts == 1;
  job->send_bytes = gathers ? own : job->window.bytes;
  job->receive_bytes = gathers ? job->window.bytes : own;
  if (gathers) {
    job->send = in_place ? inside : make_buffer(job, own);
    const size_t first = job->window.offset + own_at - (size_t)rank * job->window.bytes_per_rank;
    for (size_t i = 0; i < own; ++i) job->send[i] = byte_of(job->salt, rank, first + i);
    job->send_memory = register_for(job, job->send, own);
    job->receive_memory = NULL;
  } else {
    job->receive = in_place ? inside : make_buffer(job, own);
    job->receive_memory = register_for(job, job->receive, own);
    job->send_memory = NULL;
  }
}

/* 0 when the call was not taken. */
static int begin(struct job* job) {
  job->request = (void*)1;
  switch (job->kind) {
    case ALL_REDUCE:
      OK(coll_all_reduce(&coll, job->comm, job->send, job->receive, job->count, job->type, job->op,
                         job->send_memory, job->receive_memory, &job->request));
      break;
    case ALL_GATHER:
      OK(coll_all_gather(&coll, job->comm, job->send, job->parts, job->part, job->window,
                         job->send_memory, &job->request));
      break;
    default:
      OK(coll_reduce_scatter(&coll, job->comm, job->parts, job->part, job->receive, job->window,
                             job->type, job->op, job->receive_memory, &job->request));
      break;
  }
  return job->request != NULL;
}

static void verify_elements(const struct job* job, const unsigned char* got, size_t first,
                            size_t n) {
  const struct type* const type = &kTypes[job->type];
  for (size_t i = 0; i < n; ++i) {
    unsigned char expected[8];
    store(expected, type, reduced(job->type, job->op, job->salt, first + i));
    CHECK(memcmp(got + i * type->size, expected, type->size) == 0,
          "kind %d, type %d, op %d: element %zu of %zu is wrong (%d parts, in place %d)",
          (int)job->kind, job->type, job->op, i, n, job->parts, job->in_place);
  }
}

static void verify_gathered(const struct job* job) {
  size_t at = job->window.offset;
  for (int p = 0; p < job->parts; ++p) {
    const unsigned char* const got = job->part[p].address;
    for (size_t i = 0; i < job->part[p].size; ++i, ++at) {
      const int r = (int)(at / job->window.bytes_per_rank);
      CHECK(got[i] == byte_of(job->salt, r, at % job->window.bytes_per_rank),
            "gathered byte %zu of part %d is wrong", i, p);
    }
    for (int i = 0; i < GUARD; ++i)
      CHECK(got[job->part[p].size + (size_t)i] == 0xee, "beyond a part");
  }
}

/* Of a call that is over: everything is as it has to be, and is given back. */
static void finish(struct job* job, int size) {
  const size_t element = kTypes[job->type].size;
  CHECK((size_t)size == job->receive_bytes, "the size is %d, not %zu", size, job->receive_bytes);
  if (job->kind == ALL_GATHER) {
    verify_gathered(job);
  } else {
    size_t own = 0;
    const size_t first = job->kind == ALL_REDUCE ? 0 : job->window.offset + own_block(job, &own);
    verify_elements(job, job->receive, first / element, job->receive_bytes / element);
    if (!job->in_place || job->parts > 1) {
      for (int i = 0; i < GUARD; ++i) {
        CHECK(job->receive[job->receive_bytes + (size_t)i] == 0xee, "beyond what is received");
      }
    }
  }
  void* flush = (void*)1;
  OK(coll_flush(&coll, job->comm, job->receive, size, job->receive_memory, &flush));
  CHECK(flush == NULL, "a flush of host memory has a request");
  if (job->send_memory != NULL) OK(coll_deregister(&coll, job->comm, job->send_memory));
  if (job->receive_memory != NULL) OK(coll_deregister(&coll, job->comm, job->receive_memory));
  for (int p = 0; job->kind != ALL_REDUCE && p < job->parts; ++p) {
    if (job->part[p].memory == NULL) continue;
    OK(coll_deregister(&coll, job->comm, job->part[p].memory));
  }
  for (int i = 0; i < job->owned_count; ++i) free(job->owned[i]);
}

/* Tests the call; 1 when it is over, and was right. */
static int test_job(struct job* job) {
  int done = -1, size = -1;
  OK(coll_test(&coll, job->request, &done, &size));
  CHECK(done == 0 || done == 1, "done is %d", done);
  if (done) finish(job, size);
  return done;
}

static void run_jobs(struct job* jobs, int n) {
  int left = n;
  for (int i = 0; i < n; ++i) {
    prepare(&jobs[i]);
    CHECK(begin(&jobs[i]), "call %d of %d is not taken", i, n);
  }
  const double since = now();
  while (left > 0) {
    for (int i = 0; i < n; ++i) {
      if (jobs[i].request == NULL || !test_job(&jobs[i])) continue;
      jobs[i].request = NULL;
      --left;
    }
    sched_yield();
    CHECK(now() - since < 60 * SCAPE_SLOWDOWN, "%d of %d calls are not over in time", left, n);
  }
}

/* --- scenarios ---------------------------------------------------------------------------------
 */

/* Every type and reduction, in and out of place, whole vectors and windows of them. */
void coll_types(void) {
  void *listen_comm, *comm;
  coll_load();
  join(0, &listen_comm, &comm);
  OK(coll_close_listen(&coll, listen_comm)); /* as NCCL, at once */
  const int windows = api.version >= OLDEST_WINDOWS;
  for (int type = 0; type <= TYPES; ++type) {
    struct job jobs[12 * OPS];
    int n = 0;
    memset(jobs, 0, sizeof jobs);
    for (int op = 0; op <= OPS; ++op) {
      int supported = -1;
      OK(coll_reduce_support(&coll, type, op, &supported));
      CHECK(supported == (type < TYPES && op < OPS), "type %d, op %d: %d", type, op, supported);
      if (!supported) continue;
      const size_t size = kTypes[type].size;
      static const size_t kCounts[] = {1, 7, 3001};
      for (int i = 0; i < (windows ? 12 : 6); ++i) {
        struct job* const job = &jobs[n++];
        job->comm = comm;
        job->type = type;
        job->op = op;
        job->salt = seed + (unsigned)(type * 1000 + op * 100 + i);
        job->registered = i % 3 == 0;
        job->in_place = i % 2;
        if (i < 6) {
          job->count = kCounts[i / 2];
          continue;
        }
        job->kind = i < 10 ? REDUCE_SCATTER : ALL_GATHER;
        job->parts = 1 + i / 2 % 2;
        job->window.bytes_per_rank = 501 * size;
        job->window.offset = i % 4 < 2 ? 0 : 250 * size;
        job->window.bytes = (size_t)ranks * job->window.bytes_per_rank - 2 * job->window.offset;
      }
    }
    run_jobs(jobs, n);
  }
  barrier();
  OK(coll_close(&coll, comm));
  coll_unload();
}

/* Each size, from nothing to the largest, in registered memory. */
void coll_sizes(void) {
  void *listen_comm, *comm;
  coll_load();
  join(0, &listen_comm, &comm);
  size_t limit = 0;
  OK(coll_largest(&coll, 0, &limit));
  CHECK(api.version < 9 || limit >= largest, "at most %zu bytes", limit);
  for (size_t size = 0; size <= largest; size = size == 0 ? 1 : size * 4) {
    struct job jobs[6];
    int n = 0;
    memset(jobs, 0, sizeof jobs);
    /* Wide elements where there would be very many. */
    const int type = size < 65536 ? INT8 : INT64;
    const size_t element = kTypes[type].size;
    jobs[n].type = type;
    jobs[n++].count = size / element;
    jobs[n].in_place = 1;
    jobs[n].type = FLOAT32;
    jobs[n++].count = size / kTypes[FLOAT32].size;
    for (int i = 0; api.version >= OLDEST_WINDOWS && size > 0 && i < 4; ++i) {
      struct job* const job = &jobs[n++];
      const size_t blocks = size / element;
      job->kind = i < 2 ? REDUCE_SCATTER : ALL_GATHER;
      job->type = type;
      job->parts = 1;
      /* Within all blocks, and over one edge. */
      job->window.bytes_per_rank = (i % 2 == 0 ? blocks / (size_t)ranks + 1 : blocks) * element;
      job->window.offset = (i % 2 == 0 ? 1 : blocks / 2) * element;
      job->window.bytes =
          least(blocks * element, (size_t)ranks * job->window.bytes_per_rank - job->window.offset);
    }
    for (int i = 0; i < n; ++i) {
      jobs[i].comm = comm;
      jobs[i].salt = seed + (unsigned)i + (unsigned)size;
      jobs[i].registered = 1;
    }
    run_jobs(jobs, n);
  }
  OK(coll_close(&coll, comm));
  OK(coll_close_listen(&coll, listen_comm));
  coll_unload();
}

/* One group's calls, the same sequence on all ranks. */
struct sequence {
  void *listen_comm, *comm;
  unsigned state; /* the same on all ranks */
  int left;
  int has_next; /* prepared, but not taken yet */
  struct job next;
  struct job open[REQUESTS];
  int open_count, nulls;
};

static void make_next(struct sequence* s) {
  struct job* const job = &s->next;
  memset(job, 0, sizeof *job);
  job->comm = s->comm;
  job->kind = api.version >= OLDEST_WINDOWS ? next_random(&s->state) % KINDS : ALL_REDUCE;
  job->type = (int)(next_random(&s->state) % TYPES);
  job->op = (int)(next_random(&s->state) % OPS);
  job->salt = next_random(&s->state);
  const unsigned pick = next_random(&s->state) % 40;
  const size_t most = pick == 0 ? 400000 : pick < 8 ? 20000 : 600;
  job->count = next_random(&s->state) % (most + 1);
  const size_t size = job->kind == ALL_GATHER ? 1 : kTypes[job->type].size;
  const size_t block = 1 + next_random(&s->state) % most;
  const size_t all = block * (size_t)ranks;
  const size_t offset = next_random(&s->state) % all;
  job->window.bytes_per_rank = block * size;
  job->window.offset = offset * size;
  job->window.bytes = (1 + next_random(&s->state) % (all - offset)) * size;
  --s->left;
  /* What each rank chooses for itself. */
  unsigned mine = job->salt + 7919u * (unsigned)rank;
  job->in_place = next_random(&mine) % 2 == 0;
  job->registered = next_random(&mine) % 2 == 0;
  job->parts = next_random(&mine) % 2 == 0 ? 1 : 1 + (int)(next_random(&mine) % COLL_MAX_PARTS);
  prepare(job);
  s->has_next = 1;
}

/* Memory is registered by another thread meanwhile, as by NCCL. */
struct registering {
  void* comm;
  atomic_int stop;
};
static void* register_again_and_again(void* argument) {
  struct registering* const r = argument;
  static unsigned char data[10000];
  while (!atomic_load(&r->stop)) {
    void* memory = NULL;
    OK(coll_register(&coll, r->comm, data, sizeof data, NET_POINTER_HOST, &memory));
    OK(coll_deregister(&coll, r->comm, memory));
    usleep(1000);
  }
  return NULL;
}

/* Several groups at once, many requests under way in each, tests in any order. */
void coll_requests(void) {
  static struct sequence sequences[MAX_LINKS];
  coll_load();
  memset(sequences, 0, sizeof sequences);
  for (int link = 0; link < links; ++link) {
    struct sequence* const s = &sequences[link];
    join(link, &s->listen_comm, &s->comm);
    s->state = seed + (unsigned)link;
    s->left = count;
  }
  struct registering registering = {.comm = sequences[0].comm};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, register_again_and_again, &registering) == 0, "no thread");
  unsigned state = seed + 77 * (unsigned)rank;
  double since = now();
  for (int left = 1; left != 0;) {
    struct sequence* const s = &sequences[next_random(&state) % (unsigned)links];
    /* In bursts, so that the requests run out now and then. */
    const int burst = next_random(&state) % 6 == 0 ? REQUESTS + 10 : 3;
    for (int i = 0; i < burst && (s->left > 0 || s->has_next); ++i) {
      if (!s->has_next) make_next(s);
      if (!begin(&s->next)) {
        CHECK(s->open_count == REQUESTS, "no request with %d under way", s->open_count);
        ++s->nulls;
        break;
      }
      CHECK(s->open_count < REQUESTS, "request %d", s->open_count + 1);
      s->open[s->open_count++] = s->next;
      s->has_next = 0;
    }
    for (int i = 0; i < 2 * burst && s->open_count > 0; ++i) {
      const int which = (int)(next_random(&state) % (unsigned)s->open_count);
      if (!test_job(&s->open[which])) continue;
      s->open[which] = s->open[--s->open_count];
      since = now();
    }
    sched_yield();
    left = 0;
    for (int link = 0; link < links; ++link) {
      left += sequences[link].left + sequences[link].has_next + sequences[link].open_count;
    }
    CHECK(now() - since < 60 * SCAPE_SLOWDOWN, "nothing has ended in time, %d calls are left",
          left);
  }
  atomic_store(&registering.stop, 1);
  pthread_join(thread, NULL);
  int nulls = 0;
  for (int link = 0; link < links; ++link) {
    nulls += sequences[link].nulls;
    OK(coll_close(&coll, sequences[link].comm));
    OK(coll_close_listen(&coll, sequences[link].listen_comm));
  }
  CHECK(nulls > 0 || count < 2 * REQUESTS, "requests never ran out");
  coll_unload();
}

static void all_reduce_once(void* comm, size_t n) {
  struct job job;
  memset(&job, 0, sizeof job);
  job.comm = comm;
  job.type = INT64;
  job.count = n;
  job.salt = 5;
  run_jobs(&job, 1);
}

/* Waits for the failure of a call that cannot end; the line about it must hold the words. */
static void expect_failure(void* comm, void* request, int result, int code, const char* words) {
  const double since = now();
  int done = 0, size = 0;
  while (result == NET_SUCCESS && !done) {
    result = coll_test(&coll, request, &done, &size);
    CHECK(now() - since < 20 * SCAPE_SLOWDOWN, "nothing heard of it in time");
    sched_yield();
  }
  CHECK(!done, "the call has ended well");
  CHECK(now() - since < 5 * SCAPE_SLOWDOWN, "heard of it after %.1f s", now() - since);
  CHECK(result == code, "the failure gives %d, not %d (%s)", result, code, last_warning);
  CHECK(strstr(last_warning, words) != NULL, "no word of %s: %s", words, last_warning);
  /* From then on it fails at once. */
  static unsigned char data[8];
  CHECK(coll_all_reduce(&coll, comm, data, data, 1, INT64, SUM, NULL, NULL, &request) == code,
        "begins another call");
}

/* Begins an all-reduce in memory that stays. */
static int begin_one(void* comm, size_t n, void** request) {
  static unsigned char* memory;
  static size_t room;
  *request = NULL;
  if (8 * n > room) {
    room = 8 * n;
    memory = calloc(1, room);
  }
  return coll_all_reduce(&coll, comm, memory, memory, n, INT64, SUM, NULL, NULL, request);
}

/* Groups end in every order, and in the middle of a call. */
void coll_ends(void) {
  static const int kOrders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                    {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
  coll_load();
  for (int order = 0; order < 6; ++order) {
    void *listen_comm, *comm;
    join(0, &listen_comm, &comm);
    all_reduce_once(comm, 100 + 30000 * (size_t)(order % 2));
    if (order < 3) OK(coll_close_listen(&coll, listen_comm));
    for (int i = 0; i < 3; ++i) {
      if (kOrders[order][i] == rank) OK(coll_close(&coll, comm));
      if (order % 2 == 0) barrier(); /* else as it comes */
    }
    if (order >= 3) OK(coll_close_listen(&coll, listen_comm));
    barrier();
  }
  /* One rank leaves in the middle: without having begun its own call, and with it, of which only a
   * large one cannot end all the same. */
  for (int begun = 0; begun < (largest >= 1 << 20 ? 2 : 1); ++begun) {
    void *listen_comm, *comm, *request;
    join(0, &listen_comm, &comm);
    all_reduce_once(comm, 10);
    if (rank != 1 || begun) {
      const int result = begin_one(comm, least(largest / 8, 1 << 20), &request);
      if (rank != 1)
        expect_failure(comm, request, result, begun ? NET_INVALID_USAGE : NET_REMOTE_ERROR,
                       "rank 1");
    }
    OK(coll_close(&coll, comm));
    OK(coll_close_listen(&coll, listen_comm));
    barrier();
  }
  /* A listener that is never connected to; one whose group is never made. */
  void* listen_comm;
  listen_for(0, &listen_comm);
  OK(coll_close_listen(&coll, listen_comm));
  coll_unload();
}

/* Ranks that do not call the same hear so, with both named. */
void coll_wrong(void) {
  coll_load();
  for (int how = 0; how < 2; ++how) {
    void *listen_comm, *comm, *request;
    join(0, &listen_comm, &comm);
    all_reduce_once(comm, 10);
    static unsigned char data[4096];
    const size_t n = rank == 1 && how == 0 ? 101 : 100;
    const int op = rank == 1 && how == 1 ? MAX : SUM;
    const int result = coll_all_reduce(&coll, comm, data, data, n, INT64, op, NULL, NULL, &request);
    expect_failure(comm, request, result, NET_INVALID_USAGE, how == 0 ? "count 101" : "max");
    CHECK(strstr(last_warning, "rank 1") != NULL, "%s", last_warning);
    OK(coll_close(&coll, comm));
    OK(coll_close_listen(&coll, listen_comm));
    barrier();
  }
  /* Handles in another order on one rank: its own is not where it has to be. */
  void *listen_comm, *comm = NULL;
  listen_for(0, &listen_comm);
  barrier();
  if (rank == 2) {
    void* handles[3] = {shared->handles[2][0][0], shared->handles[1][0][0],
                        shared->handles[0][0][0]};
    REFUSED(coll_connect(&coll, handles, 3, 2, listen_comm, &comm));
  }
  barrier();
  OK(coll_close_listen(&coll, listen_comm));
  coll_unload();
}

/* A group of one rank does all that others do; wrong calls are refused with a code and a line. */
void coll_alone(void) {
  unsigned char handle[NET_HANDLE_BYTES], data[64] = {0};
  void *handles[] = {handle}, *no_handles[] = {NULL};
  void *listen_comm = NULL, *comm = NULL, *request = NULL, *memory = NULL;
  int done = 0, size = 0;
  size_t limit = 0;
  coll_load();
  REFUSED(coll_largest(&coll, 1000, &limit));
  REFUSED(coll_listen(&coll, -1, handle, &listen_comm));
  REFUSED(coll_listen(&coll, 0, NULL, &listen_comm));
  OK(coll_listen(&coll, 0, handle, &listen_comm));
  REFUSED(coll_connect(&coll, handles, 1, 1, listen_comm, &comm));
  REFUSED(coll_connect(&coll, NULL, 1, 0, listen_comm, &comm));
  OK(coll_connect(&coll, handles, 1, 0, listen_comm, &comm));
  void* another = NULL;
  REFUSED(coll_connect(&coll, handles, 1, 0, listen_comm, &another));
  OK(coll_close_listen(&coll, listen_comm));
  OK(coll_listen(&coll, 0, handle, &listen_comm));
  REFUSED(coll_connect(&coll, no_handles, 1, 0, listen_comm, &another));
  OK(coll_close_listen(&coll, listen_comm));
  REFUSED(coll_reduce_support(&coll, 0, 0, NULL));
  REFUSED(coll_register(&coll, comm, data, sizeof data, NET_POINTER_CUDA, &memory));
  REFUSED(coll_register(&coll, comm, NULL, 8, NET_POINTER_HOST, &memory));
  OK(coll_register(&coll, comm, data, sizeof data, NET_POINTER_HOST, &memory));
  REFUSED(coll_all_reduce(&coll, NULL, data, data, 1, INT64, SUM, NULL, NULL, &request));
  REFUSED(coll_all_reduce(&coll, comm, NULL, data, 1, INT64, SUM, NULL, NULL, &request));
  REFUSED(coll_all_reduce(&coll, comm, data, data, 1, TYPES, SUM, NULL, NULL, &request));
  REFUSED(coll_all_reduce(&coll, comm, data, data, 1, INT64, OPS, NULL, NULL, &request));
  REFUSED(
      coll_all_reduce(&coll, comm, data, data, (size_t)1 << 28, INT64, SUM, NULL, NULL, &request));
  REFUSED(coll_all_reduce(&coll, comm, data, data, 9, INT64, SUM, memory, NULL, &request));
  if (api.version < 9) {
    REFUSED(coll_all_reduce(&coll, comm, data, data, (size_t)-1, INT64, SUM, NULL, NULL, &request));
  }
  struct collnet_part_v12 part = {memory, data, 32};
  if (api.version >= OLDEST_WINDOWS) {
    static const struct coll_window kBad[] = {
        {32, 8, 32}, {32, 0, 24}, {32, 33, 0}, {(size_t)-1, 0, 32}, {32, 0, (size_t)-8}};
    for (size_t i = 0; i < sizeof kBad / sizeof *kBad; ++i) {
      REFUSED(coll_all_gather(&coll, comm, data, 1, &part, kBad[i], NULL, &request));
    }
    const struct coll_window good = {32, 0, 32}, uneven = {30, 0, 30};
    REFUSED(coll_all_gather(&coll, comm, NULL, 1, &part, good, NULL, &request));
    REFUSED(coll_all_gather(&coll, comm, data, -1, &part, good, NULL, &request));
    REFUSED(
        coll_reduce_scatter(&coll, comm, 1, &part, data + 8, uneven, INT64, SUM, NULL, &request));
    part.size = 65;
    const struct coll_window long_one = {65, 0, 65};
    REFUSED(coll_all_gather(&coll, comm, data, 1, &part, long_one, NULL, &request));
  }
  OK(coll_deregister(&coll, comm, memory));
  REFUSED(coll_deregister(&coll, comm, memory));
  REFUSED(coll_test(&coll, NULL, &done, &size));
  REFUSED(coll_close(&coll, NULL));
  struct job jobs[3];
  memset(jobs, 0, sizeof jobs);
  for (int i = 0; i < (api.version >= OLDEST_WINDOWS ? 3 : 1); ++i) {
    jobs[i].kind = (enum kind)i;
    jobs[i].comm = comm;
    jobs[i].parts = 1 + i;
    jobs[i].count = 5000;
    jobs[i].registered = 1;
    jobs[i].window.bytes_per_rank = 10000;
    jobs[i].window.offset = 10;
    jobs[i].window.bytes = 9000;
    run_jobs(&jobs[i], 1);
  }
  OK(coll_all_reduce(&coll, comm, data, data, 1, INT64, SUM, NULL, NULL, &request));
  OK(coll_test(&coll, request, &done, &size));
  CHECK(done && size == 8, "done %d, size %d", done, size);
  REFUSED(coll_test(&coll, request, &done, &size));
  OK(coll_close(&coll, comm));
  coll_unload();
}

/* Processes that take different network libraries hear so, all of them, at once. */
void coll_mismatch(void) {
  setenv("SCAPE_NET", rank == 1 ? "ofi" : "ucx", 1);
  load(api.version);
  coll_load();
  void *listen_comm, *comm = NULL;
  listen_for(0, &listen_comm);
  barrier();
  const double since = now();
  const int result = try_connect(0, listen_comm, &comm);
  CHECK(result == NET_INVALID_USAGE && comm == NULL, "different libraries give %d", result);
  CHECK(now() - since < 5 * SCAPE_SLOWDOWN, "connect took %.1f s", now() - since);
  CHECK(strstr(last_warning, "ucx") != NULL && strstr(last_warning, "ofi") != NULL, "%s",
        last_warning);
  OK(coll_close_listen(&coll, listen_comm));
  coll_unload();
  unload();
}

/* A rank that does not come is named by the others when the time is over. */
void coll_absent(void) {
  setenv("SCAPE_BOOTSTRAP_TIMEOUT", "2", 1);
  load(api.version);
  coll_load();
  static const struct { int rank, closes; } kAbsent[] = {{2, 0}, {0, 0}, {0, 1}, {1, 1}};
  for (int i = 0; i < 4; ++i) {
    void *listen_comm, *comm = NULL;
    listen_for(0, &listen_comm);
    barrier();
    if (rank == kAbsent[i].rank && kAbsent[i].closes) OK(coll_close_listen(&coll, listen_comm));
    barrier();
    if (rank != kAbsent[i].rank) {
      const double since = now();
      char words[16];
      snprintf(words, sizeof words, "rank %d", kAbsent[i].rank);
      const int result = try_connect(0, listen_comm, &comm);
      CHECK(result == NET_REMOTE_ERROR && comm == NULL, "connect gives %d", result);
      CHECK(now() - since < 8 * SCAPE_SLOWDOWN, "connect took %.1f s", now() - since);
      const char* const reason = strstr(last_warning, "joins no group: ");
      CHECK(reason != NULL && strstr(reason, words) != NULL, "no word of %s: %s", words,
            last_warning);
    }
    barrier();
    if (rank != kAbsent[i].rank || !kAbsent[i].closes) OK(coll_close_listen(&coll, listen_comm));
  }
  /* With all there it works. */
  void *listen_comm, *comm;
  join(0, &listen_comm, &comm);
  all_reduce_once(comm, 1000);
  OK(coll_close(&coll, comm));
  OK(coll_close_listen(&coll, listen_comm));
  coll_unload();
  unload();
}

/* Loaded and unloaded again and again, each version: no thread and no descriptor left. */
void coll_reload(void) {
  int threads = 0, descriptors = 0;
  for (int i = 0; i < count; ++i) {
    void *listen_comm, *comm;
    api.version = OLDEST_VERSION + i % (NEWEST_VERSION - OLDEST_VERSION + 1);
    load(api.version);
    coll_load();
    join(0, &listen_comm, &comm);
    OK(coll_close_listen(&coll, listen_comm));
    all_reduce_once(comm, 5000);
    OK(coll_close(&coll, comm));
    coll_unload();
    unload();
    /* What network libraries keep for good is there after the first time. */
    const int now_threads = entries_of("/proc/self/task");
    const int now_descriptors = entries_of("/proc/self/fd");
    if (i == 0) {
      threads = now_threads;
      descriptors = now_descriptors;
      CHECK(threads == 3, "%d threads are left", threads - 3);
    }
    CHECK(now_threads == threads, "%d more threads after %d times", now_threads - threads, i + 1);
    CHECK(now_descriptors <= descriptors, "%d more descriptors after %d times",
          now_descriptors - descriptors, i + 1);
    barrier();
  }
}

/* One process is killed in the middle of a call; all others hear which. */
static void kill_one(int killed, size_t n) {
  void *listen_comm, *comm, *request;
  coll_load();
  join(0, &listen_comm, &comm);
  for (int i = 0; i < 3; ++i) all_reduce_once(comm, n);
  barrier();
  const int result = begin_one(comm, n, &request);
  if (rank == killed) raise(SIGKILL);
  char words[16];
  snprintf(words, sizeof words, "rank %d", killed);
  /* A call may still end well without the one that died, but not the one after it. */
  int done = 0, size = 0, latest = result;
  const double since = now();
  while (latest == NET_SUCCESS && now() - since < 20 * SCAPE_SLOWDOWN) {
    if (done) latest = begin_one(comm, n, &request);
    if (latest == NET_SUCCESS) latest = coll_test(&coll, request, &done, &size);
    sched_yield();
  }
  CHECK(now() - since < 5 * SCAPE_SLOWDOWN, "heard of the death after %.1f s", now() - since);
  expect_failure(comm, request, latest, NET_REMOTE_ERROR, words);
  OK(coll_close(&coll, comm));
  OK(coll_close_listen(&coll, listen_comm));
  /* The process goes on. */
  const int all = ranks;
  ranks = 1;
  const int as = rank;
  rank = 0;
  join_alone(&listen_comm, &comm);
  all_reduce_once(comm, 100);
  OK(coll_close(&coll, comm));
  OK(coll_close_listen(&coll, listen_comm));
  ranks = all;
  rank = as;
  coll_unload();
}

void coll_kill_small(void) { kill_one(2, 100); }
void coll_kill_large(void) { kill_one(2, 1 << 20); }
void coll_kill_first(void) { kill_one(0, 10000); }
