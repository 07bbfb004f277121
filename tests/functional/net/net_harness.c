/* Plays NCCL to the net plugin: loads it as NCCL does, in two and more processes, and drives it
 * with NCCL's habits.
 *
 *   net_harness LIBRARY SCENARIO [version=N|all] [ranks=N] [count=N] [links=N] [seed=N]
 *               [largest=BYTES] [warnings=N] [join=N]
 *
 * With join, connections are made on a device of that many of the plugin's, from version 9 on.
 *
 * The exit status is 0 when everything was as it has to be. */
#define _GNU_SOURCE
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/functional/net/coll_scenarios.h"
#include "tests/functional/net/harness.h"
#include "tests/functional/net/statistics_scenarios.h"

struct shared* shared;
const char* library;
int rank, ranks = 2, count = 100, links = 1;
int device; /* that connections are made on */
size_t largest = 64 << 20;
unsigned seed = 1;
struct api api;
atomic_int warnings;
char last_warning[1024];

static int joined; /* of how many devices that one is made; 0: it is the first there is */
static int expected_warnings = -1;
static int barriers_passed;
/* Sent bytes and messages, received bytes and messages, of all devices since they were loaded. */
static unsigned long long counters[4];

double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void quit(const char* file, int line, const char* format, ...) {
  va_list args;
  fprintf(stderr, "%s:%d: rank %d, version %d: ", file, line, rank, api.version);
  va_start(args, format);
  vfprintf(stderr, format, args);
  va_end(args);
  fprintf(stderr, "\n");
  _exit(1);
}

void logger(int level, unsigned long flags, const char* file, int line, const char* format, ...) {
  char text[1024];
  va_list args;
  (void)flags;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (level == NET_LOG_WARN) {
    atomic_fetch_add(&warnings, 1);
    memcpy(last_warning, text, sizeof last_warning);
  }
  unsigned long long c[4];
  const char* const words = strstr(text, ": sent ");
  if (words != NULL &&
      sscanf(words, ": sent %llu bytes in %llu messages, received %llu bytes in %llu", &c[0], &c[1],
             &c[2], &c[3]) == 4) {
    for (int i = 0; i < 4; ++i) counters[i] += c[i];
  }
  if (getenv("NET_HARNESS_LOG") != NULL) {
    fprintf(stderr, "[%d] level %d %s:%d %s\n", rank, level, file, line, text);
  }
}

unsigned next_random(unsigned* state) {
  *state = *state * 1664525u + 1013904223u;
  return *state >> 8;
}

void barrier(void) {
  atomic_int* const here = &shared->arrived[barriers_passed++ % MAX_BARRIERS];
  atomic_fetch_add(here, 1);
  while (atomic_load(here) < ranks) sched_yield();
}

void load(int version) {
  const char* const reason = api_load(&api, library);
  CHECK(reason == NULL, "%s", reason);
  CHECK(api_choose(&api, version) == 0, "%s has no table of version %d", library, version);
  CHECK(strcmp(api_name(&api), "scape") == 0, "the name is %s", api_name(&api));
  int devices = 0;
  OK(api_init(&api, logger));
  OK(api_devices(&api, &devices));
  CHECK(devices >= 1, "%d devices", devices);
  device = 0;
  if (joined == 0 || version < 9) return;
  int members[NET_MAX_MEMBERS];
  CHECK(joined <= devices, "%d devices are there, not %d", devices, joined);
  for (int i = 0; i < joined; ++i) members[i] = i;
  OK(api_make_device(&api, &device, members, joined));
}

void unload(void) {
  OK(api_finalize(&api));
  api_close(&api);
}

/* --- links ------------------------------------------------------------------------------------ */

struct incoming {
  void* listen_comm;
  void* comm;
};
struct outgoing {
  unsigned char handle[NET_HANDLE_BYTES];
  void* comm;
};

static void make_links(struct incoming in[MAX_RANKS][MAX_LINKS],
                       struct outgoing out[MAX_RANKS][MAX_LINKS]) {
  for (int peer = 0; peer < ranks; ++peer) {
    for (int link = 0; link < links && peer != rank; ++link) {
      in[peer][link].comm = NULL;
      OK(api_listen(&api, device, shared->handles[rank][peer][link], &in[peer][link].listen_comm));
    }
  }
  barrier();
  for (int peer = 0; peer < ranks; ++peer) {
    for (int link = 0; link < links && peer != rank; ++link) {
      out[peer][link].comm = NULL;
      memcpy(out[peer][link].handle, shared->handles[peer][rank][link], NET_HANDLE_BYTES);
    }
  }
  /* Whichever comes first: no order of connects and accepts may hang. */
  const double begin = now();
  unsigned state = seed + (unsigned)rank;
  int left = 2 * (ranks - 1) * links;
  while (left > 0) {
    CHECK(now() - begin < 30 * SCAPE_SLOWDOWN, "%d connections are not made in time", left);
    const int peer = (int)(next_random(&state) % (unsigned)ranks);
    const int link = (int)(next_random(&state) % (unsigned)links);
    if (peer == rank) continue;
    const double before = now();
    if (next_random(&state) % 2 == 0) {
      struct outgoing* const o = &out[peer][link];
      if (o->comm != NULL) continue;
      OK(api_connect(&api, device, o->handle, &o->comm));
      if (o->comm != NULL) --left;
    } else {
      struct incoming* const i = &in[peer][link];
      if (i->comm != NULL) continue;
      OK(api_accept(&api, i->listen_comm, &i->comm));
      if (i->comm != NULL) --left;
    }
    CHECK(now() - before < 5 * SCAPE_SLOWDOWN, "connect or accept took %.1f s", now() - before);
    sched_yield();
  }
}

static void close_links(struct incoming in[MAX_RANKS][MAX_LINKS],
                        struct outgoing out[MAX_RANKS][MAX_LINKS]) {
  for (int peer = 0; peer < ranks; ++peer) {
    for (int link = 0; link < links && peer != rank; ++link) {
      OK(api_close_send(&api, out[peer][link].comm));
      OK(api_close_receive(&api, in[peer][link].comm));
      OK(api_close_listen(&api, in[peer][link].listen_comm));
    }
  }
}

/* --- messages --------------------------------------------------------------------------------- */

static unsigned char byte_at(unsigned salt, size_t i) {
  return (unsigned char)(salt * 131 + i * 7 + (i >> 8));
}
static void fill(unsigned char* data, size_t size, unsigned salt) {
  for (size_t i = 0; i < size; ++i) data[i] = byte_at(salt, i);
}
static void verify(const unsigned char* data, size_t size, size_t room, unsigned salt) {
  for (size_t i = 0; i < size; ++i) {
    CHECK(data[i] == byte_at(salt, i), "byte %zu of %zu is %u, not %u", i, size, data[i],
          byte_at(salt, i));
  }
  for (size_t i = size; i < room; ++i) CHECK(data[i] == 0xee, "byte %zu beyond the message", i);
}

enum { MAX_OPEN = 2 * MAX_RANKS * MAX_LINKS * NET_MAX_REQUESTS };

/* One request under way, a send or a group of receives. */
struct open_request {
  void* request;
  int n, sends;
  void* comm;
  int* under_way;
  unsigned char* data[NET_MAX_RECEIVES];
  size_t sizes[NET_MAX_RECEIVES], room[NET_MAX_RECEIVES];
  void* memory[NET_MAX_RECEIVES];
  unsigned salt[NET_MAX_RECEIVES];
};
static struct open_request open_requests[MAX_OPEN];
static int open_count;

static void release(struct open_request* r) {
  for (int i = 0; i < r->n; ++i) {
    if (r->memory[i] != NULL) OK(api_deregister(&api, r->comm, r->memory[i]));
    free(r->data[i]);
  }
}

/* Tests one of those under way, any of them. */
static void test_one(unsigned* state) {
  if (open_count == 0) return;
  const int which = (int)(next_random(state) % (unsigned)open_count);
  struct open_request* const r = &open_requests[which];
  int done = -1;
  int sizes[NET_MAX_RECEIVES];
  memset(sizes, 0x77, sizeof sizes);
  OK(api_test(&api, r->request, &done, sizes));
  CHECK(done == 0 || done == 1, "done is %d", done);
  if (done == 0) {
    sched_yield();
    return;
  }
  for (int i = 0; i < r->n; ++i) {
    CHECK((size_t)sizes[i] == r->sizes[i], "size %d of %d is %d, not %zu", i, r->n, sizes[i],
          r->sizes[i]);
    if (!r->sends) verify(r->data[i], r->sizes[i], r->room[i], r->salt[i]);
  }
  if (!r->sends) {
    void* flush = (void*)1;
    OK(api_iflush(&api, r->comm, r->n, (void**)r->data, sizes, r->memory, &flush));
    CHECK(flush == NULL, "a flush of host memory has a request");
  }
  release(r);
  --*r->under_way;
  *r = open_requests[--open_count];
}

/* The messages of one link, the same sequence on both sides. */
struct script {
  void* comm;
  int sends;
  unsigned state; /* the same on both sides */
  int left;       /* groups */
  int group, at;  /* receives in this group; how many of its sends have begun */
  size_t sizes[NET_MAX_RECEIVES];
  int tags[NET_MAX_RECEIVES], order[NET_MAX_RECEIVES];
  unsigned salts[NET_MAX_RECEIVES];
  int under_way, nulls;
};

static void next_group(struct script* s) {
  static const size_t kSizes[] = {0, 1, 23, 64, 1000, 4096, 8193, 65536, 300000};
  s->group = 1 + (int)(next_random(&s->state) % NET_MAX_RECEIVES);
  if (next_random(&s->state) % 2 == 0) s->group = 1;
  s->at = 0;
  for (int i = 0; i < s->group; ++i) {
    const unsigned pick = next_random(&s->state) % 24;
    s->sizes[i] = kSizes[pick < 9 ? pick : pick % 6];
    s->tags[i] = 10 + i;
    s->salts[i] = next_random(&s->state);
    s->order[i] = i;
  }
  for (int i = s->group - 1; i > 0; --i) {
    const int j = (int)(next_random(&s->state) % (unsigned)(i + 1));
    const int kept = s->order[i];
    s->order[i] = s->order[j];
    s->order[j] = kept;
  }
  --s->left;
}

/* Begins the next request of the script; 0 when it was not taken. */
static int begin_next(struct script* s, unsigned* state) {
  struct open_request* const r = &open_requests[open_count];
  memset(r, 0, sizeof *r);
  r->comm = s->comm;
  r->sends = s->sends;
  r->under_way = &s->under_way;
  r->n = s->sends ? 1 : s->group;
  int tags[NET_MAX_RECEIVES];
  for (int i = 0; i < r->n; ++i) {
    const int which = s->sends ? s->order[s->at] : i;
    r->sizes[i] = s->sizes[which];
    r->salt[i] = s->salts[which];
    tags[i] = s->tags[which];
    /* Receives are posted larger than what comes. */
    r->room[i] = r->sizes[i] + (s->sends ? 0 : next_random(state) % 5000);
    r->data[i] = malloc(r->room[i] + 1);
    if (s->sends) {
      fill(r->data[i], r->sizes[i], r->salt[i]);
    } else {
      memset(r->data[i], 0xee, r->room[i]);
    }
    if (next_random(state) % 2 == 0) {
      OK(api_register(&api, s->comm, r->data[i], r->room[i] + 1, NET_POINTER_HOST, &r->memory[i]));
    }
  }
  r->request = (void*)1; /* the marker that reports may be left out */
  if (s->sends) {
    OK(api_isend(&api, s->comm, r->data[0], r->sizes[0], tags[0], r->memory[0], &r->request));
  } else {
    OK(api_irecv(&api, s->comm, r->n, (void**)r->data, r->room, tags, r->memory, &r->request));
  }
  if (r->request == NULL) {
    CHECK(s->under_way >= NET_MAX_REQUESTS, "no request with %d under way", s->under_way);
    ++s->nulls;
    release(r);
    return 0;
  }
  CHECK(s->under_way < NET_MAX_REQUESTS, "request %d on a connection", s->under_way + 1);
  ++open_count;
  ++s->under_way;
  return 1;
}

static void run_scripts(struct script* scripts, int n, unsigned* state) {
  for (;;) {
    int left = 0;
    for (int i = 0; i < n; ++i) left += scripts[i].left > 0 || scripts[i].at < scripts[i].group;
    if (left == 0 && open_count == 0) return;
    struct script* const s = &scripts[next_random(state) % (unsigned)n];
    /* In bursts, so that the requests of a connection run out now and then. */
    const int burst = next_random(state) % 8 == 0 ? 40 : 2;
    for (int i = 0; i < burst; ++i) {
      if (s->at >= s->group) {
        if (s->left == 0) break;
        next_group(s);
      }
      if (!begin_next(s, state)) break;
      s->at += s->sends ? 1 : s->group;
    }
    for (int i = 0; i < burst; ++i) test_one(state);
  }
}

/* All to all, several links, groups, sizes, tests in any order. */
static void scenario_messages(void) {
  static struct incoming in[MAX_RANKS][MAX_LINKS];
  static struct outgoing out[MAX_RANKS][MAX_LINKS];
  struct script scripts[2 * MAX_RANKS * MAX_LINKS];
  memset(scripts, 0, sizeof scripts);
  make_links(in, out);
  int n = 0;
  for (int peer = 0; peer < ranks; ++peer) {
    for (int link = 0; link < links && peer != rank; ++link) {
      scripts[n].comm = out[peer][link].comm;
      scripts[n].sends = 1;
      scripts[n].state = seed + (unsigned)(rank * 64 + peer * 8 + link);
      scripts[n++].left = count;
      scripts[n].comm = in[peer][link].comm;
      scripts[n].state = seed + (unsigned)(peer * 64 + rank * 8 + link);
      scripts[n++].left = count;
    }
  }
  unsigned state = seed + 77 * (unsigned)rank;
  run_scripts(scripts, n, &state);
  int nulls = 0;
  for (int i = 0; i < n; ++i) nulls += scripts[i].nulls;
  CHECK(nulls > 0 || count < 50, "requests never ran out");
  close_links(in, out);
}

/* Waits for one request; its sizes. */
static void wait_for(void* request, int* sizes) {
  int done = 0;
  const double begin = now();
  while (!done) {
    OK(api_test(&api, request, &done, sizes));
    if (!done) sched_yield();
    CHECK(now() - begin < 60 * SCAPE_SLOWDOWN, "a request is not over in time");
  }
}

/* Each size there is, up to the largest, to the next rank. */
static void scenario_sizes(void) {
  static struct incoming in[MAX_RANKS][MAX_LINKS];
  static struct outgoing out[MAX_RANKS][MAX_LINKS];
  make_links(in, out);
  const int to = (rank + 1) % ranks, from = (rank + ranks - 1) % ranks;
  unsigned char* const sent = malloc(largest);
  unsigned char* const got = malloc(largest + 64);
  void *send_memory = NULL, *receive_memory = NULL;
  CHECK(sent != NULL && got != NULL, "no memory");
  OK(api_register(&api, out[to][0].comm, sent, largest, NET_POINTER_HOST, &send_memory));
  OK(api_register(&api, in[from][0].comm, got, largest + 64, NET_POINTER_HOST, &receive_memory));
  fill(sent, largest, 5);
  for (size_t size = 1; size <= largest; size *= 4) {
    void *send = NULL, *receive = NULL;
    void* data = got;
    size_t room = size + 64;
    int tag = 3, sizes = -1;
    memset(got, 0xee, room);
    while (receive == NULL) {
      OK(api_irecv(&api, in[from][0].comm, 1, &data, &room, &tag, &receive_memory, &receive));
    }
    while (send == NULL) {
      OK(api_isend(&api, out[to][0].comm, sent, size, tag, send_memory, &send));
    }
    int both = 0, done = 0;
    const double begin = now();
    while (both != 3) {
      if ((both & 1) == 0) {
        OK(api_test(&api, send, &done, NULL));
        if (done) both |= 1;
      }
      if ((both & 2) == 0) {
        OK(api_test(&api, receive, &done, &sizes));
        if (done) both |= 2;
      }
      if (!done) sched_yield();
      CHECK(now() - begin < 60 * SCAPE_SLOWDOWN, "%zu bytes are not there in time", size);
    }
    CHECK((size_t)sizes == size, "%d bytes came, not %zu", sizes, size);
    verify(got, size, room, 5);
  }
  OK(api_deregister(&api, out[to][0].comm, send_memory));
  OK(api_deregister(&api, in[from][0].comm, receive_memory));
  free(sent);
  free(got);
  close_links(in, out);
}

/* A great many small messages, from even ranks to the next. */
static void scenario_small(void) {
  static struct incoming in[MAX_RANKS][MAX_LINKS];
  static struct outgoing out[MAX_RANKS][MAX_LINKS];
  make_links(in, out);
  const int sends = rank % 2 == 0;
  const int peer = sends ? rank + 1 : rank - 1;
  void* requests[NET_MAX_REQUESTS] = {0};
  unsigned char data[NET_MAX_REQUESTS][64];
  int begun = 0, over = 0;
  while (over < count) {
    if (begun < count && begun - over < NET_MAX_REQUESTS) {
      const int slot = begun % NET_MAX_REQUESTS;
      const size_t size = (size_t)(begun % 65);
      if (sends) {
        fill(data[slot], size, (unsigned)begun);
        OK(api_isend(&api, out[peer][0].comm, data[slot], size, 0, NULL, &requests[slot]));
      } else {
        void* into = data[slot];
        size_t room = 64;
        int tag = 0;
        memset(data[slot], 0xee, 64);
        OK(api_irecv(&api, in[peer][0].comm, 1, &into, &room, &tag, NULL, &requests[slot]));
      }
      if (requests[slot] != NULL) {
        ++begun;
        continue;
      }
    }
    int done = 0, size = 0;
    OK(api_test(&api, requests[over % NET_MAX_REQUESTS], &done, &size));
    if (!done) {
      sched_yield();
      continue;
    }
    CHECK(size == over % 65, "message %d has %d bytes", over, size);
    if (!sends) verify(data[over % NET_MAX_REQUESTS], (size_t)size, 64, (unsigned)over);
    ++over;
  }
  close_links(in, out);
  /* The counters, said with a device's last connection: exactly what was sent or received here. On
   * a joined device messages that are as long as a head have one. */
  unsigned long long bytes = 0, messages = 0;
  for (int i = 0; i < count; ++i) {
    const unsigned times = device != 0 && i % 65 == 23 ? 2 : 1;
    bytes += times * (unsigned)(i % 65);
    messages += times;
  }
  const unsigned long long* const here = counters + (sends ? 0 : 2);
  const unsigned long long* const none = counters + (sends ? 2 : 0);
  CHECK(here[0] == bytes && here[1] == messages, "%llu bytes in %llu messages, not %llu in %llu",
        here[0], here[1], bytes, messages);
  CHECK(none[0] == 0 && none[1] == 0, "%llu bytes the wrong way", none[0]);
}

/* --- a connection to oneself, as NCCL makes within a process of several devices ----------------
 */

static void connect_self(void** listen_comm, void** send, void** receive) {
  unsigned char handle[NET_HANDLE_BYTES];
  *send = *receive = NULL;
  OK(api_listen(&api, device, handle, listen_comm));
  const double begin = now();
  while (*send == NULL || *receive == NULL) {
    if (*send == NULL) OK(api_connect(&api, device, handle, send));
    if (*receive == NULL) OK(api_accept(&api, *listen_comm, receive));
    CHECK(now() - begin < 30 * SCAPE_SLOWDOWN, "not connected in time");
  }
}

static void one_message(void* send, void* receive, unsigned char* data, size_t size,
                        unsigned salt) {
  unsigned char* const got = malloc(size + 1);
  void *sending = NULL, *receiving = NULL, *into = got, *memory = NULL;
  size_t room = size;
  int tag = 1, done = 0, sizes = 0;
  fill(data, size, salt);
  OK(api_register(&api, send, data, size, NET_POINTER_HOST, &memory));
  OK(api_irecv(&api, receive, 1, &into, &room, &tag, NULL, &receiving));
  OK(api_isend(&api, send, data, size, tag, memory, &sending));
  const double begin = now();
  for (int left = 3; left != 0;) {
    if ((left & 1) != 0) {
      OK(api_test(&api, sending, &done, NULL));
      if (done) left &= ~1;
    }
    if ((left & 2) != 0) {
      OK(api_test(&api, receiving, &done, &sizes));
      if (done) left &= ~2;
    }
    CHECK(now() - begin < 30 * SCAPE_SLOWDOWN, "a message to oneself is not there in time");
  }
  CHECK((size_t)sizes == size, "%d bytes came, not %zu", sizes, size);
  verify(got, size, size, salt);
  OK(api_deregister(&api, send, memory));
  free(got);
}

int entries_of(const char* folder) {
  DIR* const directory = opendir(folder);
  int entries = 0;
  while (readdir(directory) != NULL) ++entries;
  closedir(directory);
  return entries;
}

/* What network libraries keep for good is there after the first time. */
static void check_left_open(int round) {
  static int threads, descriptors;
  const int now_threads = entries_of("/proc/self/task");
  const int now_descriptors = entries_of("/proc/self/fd");
  if (round == 0) {
    threads = now_threads;
    descriptors = now_descriptors;
    CHECK(threads == 3, "%d threads are left", threads - 3);
  }
  CHECK(now_threads == threads, "%d more threads after %d times", now_threads - threads, round + 1);
  CHECK(now_descriptors <= descriptors, "%d more descriptors after %d times",
        now_descriptors - descriptors, round + 1);
}

/* Loaded and unloaded again and again: every version, no thread and no descriptor left. */
static void scenario_reload(void) {
  for (int i = 0; i < count; ++i) {
    void *listen_comm, *send, *receive;
    unsigned char data[5000];
    load(OLDEST_VERSION + i % (NEWEST_VERSION - OLDEST_VERSION + 1));
    connect_self(&listen_comm, &send, &receive);
    one_message(send, receive, data, sizeof data, (unsigned)i);
    OK(api_close_send(&api, send));
    OK(api_close_receive(&api, receive));
    OK(api_close_listen(&api, listen_comm));
    unload();
    check_left_open(i);
  }
}

/* Memory that is freed and mapped again at its old address is the new memory. */
static void scenario_remap(void) {
  void *listen_comm, *send, *receive;
  const size_t size = 1 << 20;
  connect_self(&listen_comm, &send, &receive);
  unsigned char* where = NULL;
  for (unsigned i = 0; i < 20; ++i) {
    unsigned char* const mapped =
        mmap(where, size, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | (where != NULL ? MAP_FIXED_NOREPLACE : 0), -1, 0);
    CHECK(mapped != MAP_FAILED && (where == NULL || mapped == where), "not mapped again");
    where = mapped;
    one_message(send, receive, mapped, size, i);
    munmap(mapped, size);
  }
  /* Handles on the same bytes are counted, and a handle is given back once. */
  unsigned char data[100];
  void *first = NULL, *second = NULL;
  OK(api_register(&api, send, data, sizeof data, NET_POINTER_HOST, &first));
  OK(api_register(&api, receive, data, sizeof data, NET_POINTER_HOST, &second));
  OK(api_deregister(&api, send, first));
  OK(api_deregister(&api, receive, second));
  CHECK(api_deregister(&api, receive, second) != NET_SUCCESS, "a handle is given back twice");
  OK(api_close_send(&api, send));
  OK(api_close_receive(&api, receive));
  OK(api_close_listen(&api, listen_comm));
}

/* Ends of a connection in every order, with the last message not yet taken where that can be. */
static void scenario_close(void) {
  static const char* const kOrders[] = {"LRS", "LSR", "RLS", "RSL", "SLR", "SRL"};
  for (int order = 0; order < 6; ++order) {
    static struct incoming in[MAX_RANKS][MAX_LINKS];
    static struct outgoing out[MAX_RANKS][MAX_LINKS];
    const int peer = 1 - rank;
    make_links(in, out);
    unsigned char data[3000], got[3000];
    void *sending = NULL, *receiving = NULL, *into = got;
    size_t room = sizeof got;
    int tag = 9, sizes = 0;
    fill(data, sizeof data, 4);
    OK(api_isend(&api, out[peer][0].comm, data, sizeof data, tag, NULL, &sending));
    OK(api_irecv(&api, in[peer][0].comm, 1, &into, &room, &tag, NULL, &receiving));
    int pending = 1;
    for (const char* step = kOrders[order]; *step != '\0'; ++step) {
      if (*step == 'L') OK(api_close_listen(&api, in[peer][0].listen_comm));
      if (*step == 'S') {
        wait_for(sending, NULL);
        OK(api_close_send(&api, out[peer][0].comm));
      }
      if (*step == 'R') {
        wait_for(receiving, &sizes);
        pending = 0;
        CHECK(sizes == (int)sizeof data, "%d bytes came", sizes);
        verify(got, sizeof got, sizeof got, 4);
        OK(api_close_receive(&api, in[peer][0].comm));
      }
    }
    CHECK(pending == 0, "no message");
    barrier();
  }
  /* A receive that nobody answers does not keep a connection from being closed. */
  void *listen_comm, *send, *receive, *receiving = NULL;
  connect_self(&listen_comm, &send, &receive);
  unsigned char data[100];
  void* into = data;
  size_t room = sizeof data;
  int tag = 0;
  OK(api_irecv(&api, receive, 1, &into, &room, &tag, NULL, &receiving));
  OK(api_close_receive(&api, receive));
  OK(api_close_send(&api, send));
  OK(api_close_listen(&api, listen_comm));
  /* A listener that is closed before it has accepted: connect says so, within its time. */
  unsigned char handle[NET_HANDLE_BYTES];
  OK(api_listen(&api, device, handle, &listen_comm));
  send = NULL;
  OK(api_connect(&api, device, handle, &send));
  CHECK(send == NULL, "connected without an accept");
  OK(api_close_listen(&api, listen_comm));
  const double begin = now();
  int result = NET_SUCCESS;
  while (result == NET_SUCCESS && now() - begin < 10 * SCAPE_SLOWDOWN) {
    result = api_connect(&api, device, handle, &send);
    CHECK(send == NULL, "connected to nobody");
  }
  CHECK(result == NET_REMOTE_ERROR, "connect to a closed listener gives %d", result);
  barrier();
}

/* One process is killed in the middle; the other hears of it, each way, and can go on. */
static void kill_with(int sends, size_t size) {
  static struct incoming in[MAX_RANKS][MAX_LINKS];
  static struct outgoing out[MAX_RANKS][MAX_LINKS];
  const int peer = 1 - rank;
  make_links(in, out);
  unsigned char* const data = malloc(size);
  void *request = NULL, *into = data;
  int tag = 2, done = 0;
  memset(data, 1, size);
  /* A first message each way, so that all is warm. */
  void *sending = NULL, *receiving = NULL;
  size_t room = 1;
  unsigned char byte = 0;
  void* into_byte = &byte;
  OK(api_isend(&api, out[peer][0].comm, data, 1, 0, NULL, &sending));
  OK(api_irecv(&api, in[peer][0].comm, 1, &into_byte, &room, &done, NULL, &receiving));
  wait_for(receiving, NULL);
  wait_for(sending, NULL);
  barrier();
  if (rank == 1) raise(SIGKILL);
  const double begin = now();
  int result = NET_SUCCESS;
  room = size;
  while (result == NET_SUCCESS && now() - begin < 20 * SCAPE_SLOWDOWN) {
    if (request == NULL) {
      result = sends ? api_isend(&api, out[peer][0].comm, data, size, tag, NULL, &request)
                     : api_irecv(&api, in[peer][0].comm, 1, &into, &room, &tag, NULL, &request);
    } else {
      result = api_test(&api, request, &done, NULL);
      if (done) request = NULL;
    }
    sched_yield();
  }
  const double seconds = now() - begin;
  CHECK(result != NET_SUCCESS, "nothing heard of the death after %.1f s", seconds);
  CHECK(seconds < 5, "heard of the death after %.1f s", seconds);
  CHECK(result == NET_REMOTE_ERROR || result == NET_SYSTEM_ERROR, "the death gives %d", result);
  CHECK(atomic_load(&warnings) > 0, "no word about the death");
  close_links(in, out);
  void *listen_comm, *send, *receive;
  unsigned char again[100];
  connect_self(&listen_comm, &send, &receive);
  one_message(send, receive, again, sizeof again, 8);
  OK(api_close_send(&api, send));
  OK(api_close_receive(&api, receive));
  OK(api_close_listen(&api, listen_comm));
  free(data);
}

static void scenario_kill_receiver_waits(void) { kill_with(0, 1000); }
static void scenario_kill_small_sends(void) { kill_with(1, 1000); }
static void scenario_kill_large_sends(void) { kill_with(1, 32 << 20); }

/* --- one process ------------------------------------------------------------------------------ */

static void scenario_properties(void) {
  int devices = 0;
  OK(api_devices(&api, &devices));
  for (int i = 0; i < devices; ++i) {
    struct net_properties_v12 p;
    OK(api_properties(&api, i, &p));
    printf("version %d: device %d: %s pci %s guid %016llx %d Mb/s port %d\n", api.version, i,
           p.name, p.pci_path != NULL ? p.pci_path : "-", (unsigned long long)p.guid, p.speed,
           p.port);
    CHECK(p.name != NULL && p.name[0] != '\0', "no name");
    CHECK(p.pci_path == NULL || access(p.pci_path, F_OK) == 0, "%s is not there", p.pci_path);
    CHECK(p.guid != 0, "no guid");
    CHECK(p.pointer_support == NET_POINTER_HOST, "pointers %d", p.pointer_support);
    CHECK(p.speed > 0 && p.port >= 1 && p.latency >= 0, "speed, port or latency");
    CHECK(p.max_comms > 0 && p.max_receives == NET_MAX_RECEIVES, "comms or receives");
    CHECK(p.device_type == NET_DEVICE_HOST && p.device_version == 0, "not the host's");
    if (api.version >= 9) {
      CHECK(p.members.count == 1 && p.members.devices[0] == i, "members");
      CHECK(p.max_p2p_bytes >= (size_t)1 << 30, "largest message %zu", p.max_p2p_bytes);
      CHECK(p.registration_is_global == 0 && p.force_flush == 0, "flags");
    }
    if (api.version >= 12) {
      CHECK(p.max_multi_request_size == 1 && p.rail_id == -1 && p.plane_id == -1, "version 12");
    }
  }
}

/* A device of several: counted after the others, the same when it is asked for again, with what it
 * is made of. What cannot be joined is refused. */
static void scenario_joined(void) {
  struct net_properties_v12 p, all;
  int devices = 0, more = 0, again = -1, other = -1;
  char name[256] = "";
  int speed = 0;
  CHECK(joined >= 2, "give join=N");
  OK(api_devices(&api, &devices));
  OK(api_properties(&api, device, &all));
  CHECK(device == joined && devices == joined + 1, "device %d of %d", device, devices);
  for (int i = 0; i < joined; ++i) {
    OK(api_properties(&api, i, &p));
    snprintf(name + strlen(name), sizeof name - strlen(name), "%s%s", i > 0 ? "+" : "", p.name);
    speed += p.speed;
    CHECK(all.members.devices[i] == i, "member %d is %d", i, all.members.devices[i]);
    CHECK(p.members.count == 1 && p.members.devices[0] == i, "a physical device's members");
    if (i == 0)
      CHECK(all.guid == p.guid && all.port == p.port, "not the first one's guid and port");
  }
  CHECK(all.members.count == joined, "%d members", all.members.count);
  CHECK(strcmp(all.name, name) == 0, "the name is %s, not %s", all.name, name);
  CHECK(all.speed == speed, "%d Mb/s, not %d", all.speed, speed);
  const int backwards[] = {1, 0}, twice[] = {0, 0}, unknown[] = {0, 1000}, negative[] = {-1, 0};
  const int nested[] = {0, device}, forwards[] = {0, 1, 2, 3, 4, 5, 6, 7};
  const struct {
    const int* members;
    int count;
  } wrong[] = {{forwards, 0}, {forwards, -1}, {twice, 2},    {unknown, 2},
               {negative, 2}, {nested, 2},    {forwards, 9}, {forwards, 1 << 30}};
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; ++i) {
    const int before = atomic_load(&warnings);
    const int result = api_make_device(&api, &other, wrong[i].members, wrong[i].count);
    CHECK(result == NET_INVALID_ARGUMENT, "wrong members %zu give %d", i, result);
    CHECK(atomic_load(&warnings) == before + 1, "wrong members %zu are not explained", i);
    CHECK(strstr(last_warning, "makeVDevice") != NULL, "%s", last_warning);
  }
  OK(api_make_device(&api, &again, forwards, joined));
  CHECK(again == device, "the same members give %d, not %d", again, device);
  OK(api_make_device(&api, &other, forwards, 1));
  CHECK(other == 0, "one device gives %d", other);
  OK(api_make_device(&api, &other, backwards, 2));
  OK(api_devices(&api, &more));
  CHECK(other == devices && more == devices + 1, "another one is %d of %d", other, more);
  /* From version 11 on the plugin hears when it is let go: then NCCL counts anew. */
  if (api.version < 11) return;
  OK(api_finalize(&api));
  OK(api_init(&api, logger));
  OK(api_devices(&api, &more));
  CHECK(more == joined, "%d devices after finalize, not %d", more, joined);
  OK(api_properties(&api, device, &all));
  CHECK(strcmp(all.name, name) == 0, "the old number is %s's now", all.name);
}

/* Each wrong call is refused with a code and a line, and nothing breaks. */
static void scenario_wrong(void) {
  struct net_properties_v12 p;
  void *listen_comm = NULL, *send = NULL, *receive = NULL, *request = NULL, *memory = NULL;
  unsigned char handle[NET_HANDLE_BYTES], data[64] = {0};
  size_t room = sizeof data;
  void* into[9] = {data, data, data, data, data, data, data, data, data};
  int tags[9] = {0}, done = 0;
  REFUSED(api_properties(&api, -1, &p));
  REFUSED(api_properties(&api, 1000, &p));
  REFUSED(api_listen(&api, 1000, handle, &listen_comm));
  REFUSED(api_listen(&api, device, NULL, &listen_comm));
  memset(handle, 0, sizeof handle);
  REFUSED(api_connect(&api, device, handle, &send));
  memset(handle, 0xff, sizeof handle);
  REFUSED(api_connect(&api, device, handle, &send));
  REFUSED(api_accept(&api, NULL, &receive));
  connect_self(&listen_comm, &send, &receive);
  REFUSED(api_register(&api, send, data, sizeof data, NET_POINTER_CUDA, &memory));
  REFUSED(api_register(&api, send, NULL, sizeof data, NET_POINTER_HOST, &memory));
  REFUSED(api_deregister(&api, send, NULL));
  REFUSED(api_isend(&api, send, NULL, 8, 0, NULL, &request));
  REFUSED(api_isend(&api, receive, data, 8, 0, NULL, &request));
  REFUSED(api_irecv(&api, send, 1, into, &room, tags, NULL, &request));
  REFUSED(api_irecv(&api, receive, 0, into, &room, tags, NULL, &request));
  REFUSED(api_test(&api, NULL, &done, NULL));
  if (api.version <= 8) REFUSED(api_isend(&api, send, data, (size_t)-1, 0, NULL, &request));
  REFUSED(api_close_send(&api, NULL));
  /* A message longer than its buffer is an error of the receiver's, and nothing is overwritten. */
  void *sending = NULL, *receiving = NULL;
  unsigned char small[64];
  memset(small, 0xee, sizeof small);
  into[0] = small;
  room = 16;
  OK(api_irecv(&api, receive, 1, into, &room, tags, NULL, &receiving));
  OK(api_isend(&api, send, data, sizeof data, 0, NULL, &sending));
  int result = NET_SUCCESS;
  const double begin = now();
  while (result == NET_SUCCESS && !done && now() - begin < 10 * SCAPE_SLOWDOWN) {
    result = api_test(&api, receiving, &done, NULL);
  }
  CHECK(result == NET_INVALID_USAGE, "a message that is too long gives %d", result);
  verify(small + 16, 0, sizeof small - 16, 0);
  OK(api_close_send(&api, send));
  OK(api_close_receive(&api, receive));
  OK(api_close_listen(&api, listen_comm));
}

/* Strangers who knock at a listener, with a word of their own or none, keep nobody out. */
static void scenario_stranger(void) {
  enum { STRANGERS = 5 };
  unsigned char handle[NET_HANDLE_BYTES];
  void *listen_comm, *send = NULL, *receive = NULL;
  int sockets[STRANGERS];
  /* One address, so that strangers come by the one that is listened on. */
  setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
  load(api.version);
  /* The handle does not say its port to anybody else: ask the system which ports this process has.
   */
  OK(api_listen(&api, device, handle, &listen_comm));
  struct sockaddr_storage address;
  socklen_t length = 0;
  for (int fd = 3; fd < 1000 && length == 0; ++fd) {
    int listens = 0;
    socklen_t size = sizeof listens;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || !listens) continue;
    length = sizeof address;
    getsockname(fd, (struct sockaddr*)&address, &length);
  }
  CHECK(length != 0, "no listening socket");
  /* A wildcard address is reached at loopback, which the listener drops: the same to be survived.
   */
  for (int i = 0; i < STRANGERS; ++i) {
    sockets[i] = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(connect(sockets[i], (struct sockaddr*)&address, length) == 0, "cannot knock");
    if (i % 2 == 0) continue;
    CHECK(write(sockets[i], "GET / HTTP/1.1\r\n\r\n", 18) == 18, "cannot speak");
  }
  const double begin = now();
  while (send == NULL || receive == NULL) {
    if (send == NULL) OK(api_connect(&api, device, handle, &send));
    if (receive == NULL) OK(api_accept(&api, listen_comm, &receive));
    CHECK(now() - begin < 8 * SCAPE_SLOWDOWN, "strangers keep a connection from being made");
  }
  unsigned char data[100];
  one_message(send, receive, data, sizeof data, 3);
  for (int i = 0; i < STRANGERS; ++i) close(sockets[i]);
  OK(api_close_send(&api, send));
  OK(api_close_receive(&api, receive));
  OK(api_close_listen(&api, listen_comm));
  unload();
}

/* Processes that take different network libraries hear so, both of them. */
static void scenario_mismatch(void) {
  setenv("SCAPE_NET", rank == 0 ? "ucx" : "ofi", 1);
  load(api.version);
  void *listen_comm = NULL, *comm = NULL;
  if (rank == 0) OK(api_listen(&api, device, shared->handles[0][0][0], &listen_comm));
  barrier();
  unsigned char handle[NET_HANDLE_BYTES];
  memcpy(handle, shared->handles[0][0][0], sizeof handle);
  int result = NET_SUCCESS;
  const double begin = now();
  while (result == NET_SUCCESS) {
    result =
        rank == 0 ? api_accept(&api, listen_comm, &comm) : api_connect(&api, device, handle, &comm);
    CHECK(comm == NULL, "connected");
    CHECK(now() - begin < 10 * SCAPE_SLOWDOWN, "no word of it in time");
    sched_yield();
  }
  CHECK(result == NET_INVALID_USAGE, "different libraries give %d", result);
  CHECK(strstr(last_warning, "ucx") != NULL && strstr(last_warning, "ofi") != NULL, "%s",
        last_warning);
  barrier();
  if (rank == 0) OK(api_close_listen(&api, listen_comm));
  unload();
}

/* As NCCL: connections are made, and memory registered, by one thread while another moves messages.
 */
struct proxy {
  void *send, *receive;
  int messages;
};
static void* proxy_body(void* argument) {
  const struct proxy* const p = argument;
  static unsigned char data[20000];
  for (int i = 0; i < p->messages; ++i) {
    one_message(p->send, p->receive, data, 1 + (size_t)(i * 97) % sizeof data, (unsigned)i);
  }
  return NULL;
}
static void scenario_threads(void) {
  void *listen_comm, *listen_more, *more_send, *more_receive;
  struct proxy p = {.messages = count};
  connect_self(&listen_comm, &p.send, &p.receive);
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, proxy_body, &p) == 0, "no thread");
  for (int i = 0; i < count; ++i) {
    unsigned char other[300];
    void* memory = NULL;
    OK(api_register(&api, p.receive, other, sizeof other, NET_POINTER_HOST, &memory));
    if (i % 10 == 0) {
      connect_self(&listen_more, &more_send, &more_receive);
      one_message(more_send, more_receive, other, sizeof other, (unsigned)i);
      OK(api_close_send(&api, more_send));
      OK(api_close_receive(&api, more_receive));
      OK(api_close_listen(&api, listen_more));
    }
    OK(api_deregister(&api, p.receive, memory));
  }
  pthread_join(thread, NULL);
  OK(api_close_send(&api, p.send));
  OK(api_close_receive(&api, p.receive));
  OK(api_close_listen(&api, listen_comm));
}

/* The libraries that are hidden are named in as many lines as expected, and what is left works;
 * each time that the plugin is opened. */
static void scenario_hidden(void) {
  const int version = api.version;
  for (int i = 0; i < count; ++i) {
    atomic_store(&warnings, 0);
    CHECK(api_load(&api, library) == NULL, "not loaded");
    for (int unknown = 0; unknown < 100; ++unknown) {
      if (unknown == OLDEST_VERSION) unknown = NEWEST_VERSION + 1;
      CHECK(api_choose(&api, unknown) != 0, "has a table of version %d", unknown);
    }
    CHECK(api_choose(&api, version) == 0, "has no table of version %d", version);
    const int result = api_init(&api, logger);
    /* What is served is chosen, and said, once; an error each time. */
    const int expected = i > 0 && result == NET_SUCCESS ? 0 : expected_warnings;
    CHECK(atomic_load(&warnings) == expected, "%d lines at time %d", atomic_load(&warnings), i + 1);
    if (i == 0) printf("init gives %d: %s\n", result, last_warning);
    if (result != NET_SUCCESS) {
      int devices = 7;
      CHECK(api_devices(&api, &devices) != NET_SUCCESS && devices == 0, "%d devices", devices);
      api_close(&api);
    } else {
      void *listen_comm, *send, *receive;
      unsigned char data[100];
      connect_self(&listen_comm, &send, &receive);
      one_message(send, receive, data, sizeof data, 8);
      OK(api_close_send(&api, send));
      OK(api_close_receive(&api, receive));
      OK(api_close_listen(&api, listen_comm));
      unload();
    }
    check_left_open(i);
  }
}

/* --- running ---------------------------------------------------------------------------------- */

static const struct scenario kScenarios[] = {
    {"messages", scenario_messages, 0, 0, -1},
    {"sizes", scenario_sizes, 0, 0, -1},
    {"small", scenario_small, 0, 0, -1},
    {"close", scenario_close, 2, 0, -1},
    {"kill_receiver_waits", scenario_kill_receiver_waits, 2, 0, 1},
    {"kill_small_sends", scenario_kill_small_sends, 2, 0, 1},
    {"kill_large_sends", scenario_kill_large_sends, 2, 0, 1},
    {"reload", scenario_reload, 1, 1, -1},
    {"remap", scenario_remap, 1, 0, -1},
    {"properties", scenario_properties, 1, 0, -1},
    {"joined", scenario_joined, 1, 0, -1},
    {"wrong", scenario_wrong, 1, 0, -1},
    {"stranger", scenario_stranger, 1, 1, -1},
    {"mismatch", scenario_mismatch, 2, 1, -1},
    {"threads", scenario_threads, 1, 0, -1},
    {"hidden", scenario_hidden, 1, 1, -1},
    STATISTICS_SCENARIOS,
    COLL_SCENARIOS,
};

static int value_of(const char* argument, const char* name, const char** value) {
  const size_t length = strlen(name);
  if (strncmp(argument, name, length) != 0 || argument[length] != '=') return 0;
  *value = argument + length + 1;
  return 1;
}

static void run_rank(const struct scenario* scenario, int first, int last) {
  for (int version = first; version <= last; ++version) {
    api.version = version;
    if (!scenario->loads) load(version);
    scenario->run();
    if (!scenario->loads) {
      if (scenario->killed < 0) barrier();
      unload();
    }
  }
  fflush(stdout);
  _exit(0);
}

/* 0 when every process ended as it has to. */
static int run(const struct scenario* scenario, int first, int last) {
  pid_t children[MAX_RANKS];
  for (int i = 0; i < ranks; ++i) {
    children[i] = fork();
    if (children[i] == 0) {
      rank = i;
      run_rank(scenario, first, last);
    }
  }
  int bad = 0;
  for (int left = ranks; left > 0; --left) {
    int status = 0;
    const pid_t child = wait(&status);
    int which = 0;
    while (which < ranks && children[which] != child) ++which;
    const int as_meant = which == scenario->killed
                             ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                             : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (as_meant) continue;
    if (!bad) fprintf(stderr, "rank %d ended with status 0x%x\n", which, (unsigned)status);
    bad = 1;
    /* The others would wait for it. */
    for (int i = 0; i < ranks; ++i) {
      if (i != which) kill(children[i], SIGKILL);
    }
  }
  return bad;
}

int main(int argc, char** argv) {
  int first = NEWEST_VERSION, last = NEWEST_VERSION;
  const struct scenario* scenario = NULL;
  for (size_t i = 0; argc >= 3 && i < sizeof kScenarios / sizeof *kScenarios; ++i) {
    if (strcmp(argv[2], kScenarios[i].name) == 0) scenario = &kScenarios[i];
  }
  if (scenario == NULL) {
    fprintf(stderr, "usage: net_harness LIBRARY SCENARIO [name=value ...], scenarios:");
    for (size_t i = 0; i < sizeof kScenarios / sizeof *kScenarios; ++i) {
      fprintf(stderr, " %s", kScenarios[i].name);
    }
    fprintf(stderr, "\n");
    return 2;
  }
  library = argv[1];
  for (int i = 3; i < argc; ++i) {
    const char* value = NULL;
    if (value_of(argv[i], "version", &value)) {
      first = strcmp(value, "all") == 0 ? OLDEST_VERSION : atoi(value);
      last = strcmp(value, "all") == 0 ? NEWEST_VERSION : first;
    } else if (value_of(argv[i], "ranks", &value)) {
      ranks = atoi(value);
    } else if (value_of(argv[i], "count", &value)) {
      count = atoi(value);
    } else if (value_of(argv[i], "links", &value)) {
      links = atoi(value);
    } else if (value_of(argv[i], "seed", &value)) {
      seed = (unsigned)atoi(value);
    } else if (value_of(argv[i], "largest", &value)) {
      largest = strtoull(value, NULL, 10);
    } else if (value_of(argv[i], "join", &value)) {
      joined = atoi(value);
    } else if (value_of(argv[i], "warnings", &value)) {
      expected_warnings = atoi(value);
    } else {
      fprintf(stderr, "net_harness: %s is not an option\n", argv[i]);
      return 2;
    }
  }
  if (scenario->ranks != 0) ranks = scenario->ranks;
  if (ranks < 1 || ranks > MAX_RANKS || links < 1 || links > MAX_LINKS) {
    fprintf(stderr, "net_harness: at most %d ranks and %d links\n", MAX_RANKS, MAX_LINKS);
    return 2;
  }
  shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return 2;
  if (scenario->killed < 0) return run(scenario, first, last);
  /* Who is killed is not there for the next version. */
  for (int version = first; version <= last; ++version) {
    memset(shared, 0, sizeof *shared);
    if (run(scenario, version, version) != 0) return 1;
  }
  return 0;
}
