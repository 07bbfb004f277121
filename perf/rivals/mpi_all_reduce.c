/* mpi_all_reduce: times MPI_Allreduce of fp32 sums, for perf/compare_dense.py.
 *
 *   mpirun -n 2 mpi_all_reduce MIN_BYTES MAX_BYTES FACTOR SECONDS
 *
 * Calls each size for about SECONDS seconds, back to back, as compare_dense.py has the others do:
 * the same buffers in every call, out of place. Rank 0 prints a line per size: bytes, calls, and
 * the median over its calls in microseconds. A wrong sum ends it with status 1.
 */
#define _POSIX_C_SOURCE 200112L
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_CALLS = 2000, MIN_CALLS = 5 };

static int compare(const void* a, const void* b) {
  const double left = *(const double*)a, right = *(const double*)b;
  return (left > right) - (left < right);
}

static double one_call(const float* send, float* recv, int count) {
  const double start = MPI_Wtime();
  MPI_Allreduce(send, recv, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  return MPI_Wtime() - start;
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  if (argc != 5) {
    if (rank == 0) fprintf(stderr, "usage: %s MIN_BYTES MAX_BYTES FACTOR SECONDS\n", argv[0]);
    MPI_Finalize();
    return 2;
  }
  const size_t min_bytes = strtoull(argv[1], NULL, 10), max_bytes = strtoull(argv[2], NULL, 10);
  const size_t factor = strtoull(argv[3], NULL, 10);
  const double seconds = strtod(argv[4], NULL);
  float *send = NULL, *recv = NULL;
  if (min_bytes < sizeof *send || factor < 2 || max_bytes / sizeof *send > 0x7fffffff ||
      posix_memalign((void**)&send, 4096, max_bytes) != 0 ||
      posix_memalign((void**)&recv, 4096, max_bytes) != 0) {
    fprintf(stderr, "%s: sizes out of range, or no memory for them\n", argv[0]);
    MPI_Abort(MPI_COMM_WORLD, 2);
  }
  for (size_t i = 0; i < max_bytes / sizeof *send; ++i) send[i] = (float)(i % 1024 + (size_t)rank);
  memset(recv, 0, max_bytes);

  static double times[MAX_CALLS];
  for (size_t bytes = min_bytes; bytes <= max_bytes; bytes *= factor) {
    const int count = (int)(bytes / sizeof *send);
    one_call(send, recv, count);
    /* The number of calls must be the same on all ranks. */
    double calls = seconds / (one_call(send, recv, count) + 1e-9);
    MPI_Bcast(&calls, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
    const int timed = calls > MAX_CALLS ? MAX_CALLS : calls < MIN_CALLS ? MIN_CALLS : (int)calls;
    for (int i = 0; i < timed; ++i) times[i] = one_call(send, recv, count);
    for (int i = 0; i < count; ++i) {
      const float due =
          (float)((size_t)ranks * ((size_t)i % 1024) + (size_t)(ranks * (ranks - 1) / 2));
      if (recv[i] != due) {
        fprintf(stderr, "%s: element %d is %g, not %g\n", argv[0], i, (double)recv[i], (double)due);
        MPI_Abort(MPI_COMM_WORLD, 1);
      }
    }
    if (rank == 0) {
      qsort(times, (size_t)timed, sizeof times[0], compare);
      printf("%zu %d %.3f\n", bytes, timed, times[timed / 2] * 1e6);
      fflush(stdout);
    }
  }
  free(send);
  free(recv);
  MPI_Finalize();
  return 0;
}
