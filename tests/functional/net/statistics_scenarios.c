#define _GNU_SOURCE
#include "tests/functional/net/statistics_scenarios.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/functional/net/harness.h"

/* What this process did, by what the calls gave back. */
static struct {
  unsigned long long sent_bytes, sent_messages, received_bytes, received_messages;
  unsigned long long send_nulls, receive_nulls, connect_nulls, accept_nulls;
  unsigned long long registrations, hits;
} did;

static void *listen_comms[MAX_LINKS], *sends[MAX_LINKS], *receives[MAX_LINKS];

/* `links` connections to the next rank, and as many from the one before. */
static void make_ring(void) {
  const int next = (rank + 1) % ranks;
  unsigned char handles[MAX_LINKS][NET_HANDLE_BYTES];
  for (int link = 0; link < links; ++link) {
    OK(api_listen(&api, 0, shared->handles[rank][0][link], &listen_comms[link]));
  }
  barrier();
  for (int link = 0; link < links; ++link) {
    memcpy(handles[link], shared->handles[next][0][link], NET_HANDLE_BYTES);
  }
  const double begin = now();
  for (int left = 2 * links; left > 0;) {
    for (int link = 0; link < links; ++link) {
      if (sends[link] == NULL) {
        OK(api_connect(&api, 0, handles[link], &sends[link]));
        if (sends[link] == NULL) ++did.connect_nulls;
        left -= sends[link] != NULL;
      }
      if (receives[link] == NULL) {
        OK(api_accept(&api, listen_comms[link], &receives[link]));
        if (receives[link] == NULL) ++did.accept_nulls;
        left -= receives[link] != NULL;
      }
    }
    CHECK(now() - begin < 60 * SCAPE_SLOWDOWN, "%d connections are not made in time", left);
    sched_yield();
  }
}

enum { LONGEST = 20000 };
static size_t size_of(int message) { return (size_t)(message * 7919) % (LONGEST + 1); }
static int group_of(int message) { return 1 + message % NET_MAX_RECEIVES; }

/* Messages of a link, `count` of them: as many sends at once as are taken, and now and then one
 * more; receives in groups. */
static void exchange(int link) {
  static unsigned char data[LONGEST], got[NET_MAX_REQUESTS][NET_MAX_RECEIVES][LONGEST];
  void *sending[NET_MAX_REQUESTS], *receiving[NET_MAX_REQUESTS];
  int sent = 0, sends_over = 0;      /* messages */
  int posted = 0, receives_over = 0; /* messages of groups */
  int groups_posted = 0, groups_over = 0;
  int groups[NET_MAX_REQUESTS];
  void* memory = NULL;
  OK(api_register(&api, sends[link], data, sizeof data, NET_POINTER_HOST, &memory));
  ++did.registrations;
  for (int hit = 0; hit < 3; ++hit) {
    void* again = NULL;
    OK(api_register(&api, sends[link], data, sizeof data, NET_POINTER_HOST, &again));
    OK(api_deregister(&api, sends[link], again));
    ++did.hits;
  }
  const double begin = now();
  while (sends_over < count || receives_over < count) {
    while (sent < count) {
      void* request = (void*)1;
      OK(api_isend(&api, sends[link], data, size_of(sent), sent, memory, &request));
      if (request == NULL) {
        ++did.send_nulls;
        CHECK(sent - sends_over == NET_MAX_REQUESTS, "no request with %d under way",
              sent - sends_over);
        break;
      }
      did.sent_bytes += size_of(sent);
      ++did.sent_messages;
      sending[sent++ % NET_MAX_REQUESTS] = request;
    }
    while (posted < count) {
      const int slot = groups_posted % NET_MAX_REQUESTS;
      int n = group_of(groups_posted), tags[NET_MAX_RECEIVES];
      if (n > count - posted) n = count - posted;
      void *into[NET_MAX_RECEIVES], *request = (void*)1;
      size_t room[NET_MAX_RECEIVES];
      for (int i = 0; i < n; ++i) {
        tags[i] = posted + i;
        into[i] = got[slot][i];
        room[i] = LONGEST;
      }
      OK(api_irecv(&api, receives[link], n, into, room, tags, NULL, &request));
      if (request == NULL) {
        ++did.receive_nulls;
        CHECK(groups_posted - groups_over == NET_MAX_REQUESTS, "no request with %d under way",
              groups_posted - groups_over);
        break;
      }
      groups[slot] = n;
      receiving[slot] = request;
      posted += n;
      ++groups_posted;
    }
    int done = 0, sizes[NET_MAX_RECEIVES];
    while (sends_over < sent) {
      OK(api_test(&api, sending[sends_over % NET_MAX_REQUESTS], &done, NULL));
      if (!done) break;
      ++sends_over;
    }
    while (groups_over < groups_posted) {
      const int slot = groups_over % NET_MAX_REQUESTS;
      OK(api_test(&api, receiving[slot], &done, sizes));
      if (!done) break;
      for (int i = 0; i < groups[slot]; ++i) {
        CHECK((size_t)sizes[i] == size_of(receives_over), "message %d has %d bytes", receives_over,
              sizes[i]);
        did.received_bytes += (size_t)sizes[i];
        ++did.received_messages;
        ++receives_over;
      }
      ++groups_over;
    }
    CHECK(now() - begin < 60 * SCAPE_SLOWDOWN, "%d messages are not there in time",
          count - receives_over);
    sched_yield();
  }
  OK(api_deregister(&api, sends[link], memory));
}

static void report(void) {
  /* One write: the lines of several processes do not mix. */
  char line[2048];
  const int length = snprintf(
      line, sizeof line,
      "DID {\"pid\": %d, \"sent_bytes\": %llu, \"sent_messages\": %llu, \"received_bytes\": %llu, "
      "\"received_messages\": %llu, \"send_nulls\": %llu, \"receive_nulls\": %llu, "
      "\"connect_nulls\": %llu, \"accept_nulls\": %llu, \"registrations\": %llu, \"hits\": %llu, "
      "\"links\": %d, \"warnings\": %d}\n",
      (int)getpid(), did.sent_bytes, did.sent_messages, did.received_bytes, did.received_messages,
      did.send_nulls, did.receive_nulls, did.connect_nulls, did.accept_nulls, did.registrations,
      did.hits, links, atomic_load(&warnings));
  CHECK(write(STDOUT_FILENO, line, (size_t)length) == length, "cannot report");
}

/* Everything is closed: with the last connection the file is complete, before finalize. */
void statistics_close(void) {
  make_ring();
  for (int link = 0; link < links; ++link) exchange(link);
  barrier();
  for (int link = 0; link < links; ++link) {
    OK(api_close_send(&api, sends[link]));
    OK(api_close_receive(&api, receives[link]));
    OK(api_close_listen(&api, listen_comms[link]));
    sends[link] = receives[link] = NULL;
  }
  report();
  /* Where the next version is tried, counters of the process go on, and so do these. */
}

/* The program ends with everything open. */
void statistics_exit(void) {
  make_ring();
  for (int link = 0; link < links; ++link) exchange(link);
  report();
  barrier();
  exit(0);
}

/* A process that does not get to any end, after half a second at least with messages now and then.
 */
void statistics_interval(void) {
  make_ring();
  for (int round = 0; round < 50; ++round) {
    usleep(10000);
    exchange(round % links);
    if (round == 40) report(); /* what has been written at the end is more than the start's */
  }
  barrier();
  _exit(0);
}
