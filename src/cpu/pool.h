/* The threads of one rank. They share the tasks of one call at a time; the caller takes part. A worker without work
 * looks out for more for some microseconds and then sleeps, so that threads that outnumber the cores cost little, and a
 * call never waits for a worker that has not woken up: whoever is awake does the tasks. */
#ifndef EPOCH_CPU_POOL_H
#define EPOCH_CPU_POOL_H

#include "src/base/status.h"

#include <stdint.h>

typedef struct cpu_pool cpu_pool;

/* Does the tasks [from, to). thread: 0 .. threads - 1, of the calling thread, for scratch of its own. */
typedef void cpu_task(void *arg, int64_t from, int64_t to, int thread);

/* Starts threads - 1 workers, which block all signals. FAILED: no memory, no thread. close accepts NULL. */
status cpu_pool_open(cpu_pool **out, int threads);
void cpu_pool_close(cpu_pool *p);

/* Does the tasks [0, count) in runs of `run` and returns when all are done. Thread i begins with the i-th part of them,
 * as long as the others, so that calls of the same count find rows where the last one left them, in that core's cache;
 * then it helps the others with theirs. What was written before the call is seen by the tasks, and what they wrote
 * after it. One thread, or one run: a plain call. Only one thread may call, and no task. */
void cpu_pool_run(cpu_pool *p, int64_t count, int64_t run, cpu_task *task, void *arg);

/* The cores that this process may run on (its affinity), at least 1. */
int cpu_pool_cores(void);

#endif
