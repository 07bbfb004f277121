/* Scenarios that count what they do, for tests of the plugin's own counters. */
#ifndef SCAPE_TESTS_STATISTICS_SCENARIOS_H
#define SCAPE_TESTS_STATISTICS_SCENARIOS_H

void statistics_close(void);
void statistics_exit(void);
void statistics_interval(void);

#define STATISTICS_SCENARIOS                             \
  {"statistics_close", statistics_close, 0, 0, -1},      \
      {"statistics_exit", statistics_exit, 0, 0, -1}, {  \
    "statistics_interval", statistics_interval, 0, 0, -1 \
  }

#endif
