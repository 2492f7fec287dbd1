/* A job that no longer moves ends, and says where each rank was.
 *
 * The thread that works leaves its place in a heartbeat; a second thread looks at it, and through a small shared file
 * at those of the other ranks. One rank that stops soon stops them all, for they wait for it in the next exchange; and
 * a rank that is slow but moves excuses those that wait for it. So the job is stuck once every rank has been silent for
 * longer than its stage allows. One rank then writes the message, the processes try `abort`, and leave with exit code 3
 * (FAILED): this and main.c are the places that print an error and end the process. Time in which the process itself
 * was stopped does not count. */
#ifndef EPOCH_BASE_WATCHDOG_H
#define EPOCH_BASE_WATCHDOG_H

#include "src/base/counters.h"
#include "src/base/status.h"

#include <stdatomic.h>
#include <stdint.h>

typedef enum watch_stage {
    WATCH_LOAD,    /* files, weights, memory; before the first forward */
    WATCH_CONNECT, /* transports that need a start of their own */
    WATCH_RUN,     /* forwards */
    WATCH_PUBLISH, /* the results file */
    WATCH_LEFT,    /* closed: never missed (set by watchdog_close) */
    WATCH_STAGES
} watch_stage;

/* Where a rank is. One thread writes, without order; it starts as {.layer = -1, .phase = -1}. */
typedef struct heartbeat {
    _Atomic uint64_t beats; /* calls below since the iteration began */
    _Atomic int64_t iteration;
    _Atomic int32_t stage, layer, phase; /* layer, phase: the newest that was finished; -1: none of this iteration */
    /* Where a device does the work behind the thread's back: layer * PHASES + phase of the newest that it finished,
     * which then stands for both; -1: none. NULL, as it starts: no such device. */
    _Atomic(const volatile int32_t *) reached;
} heartbeat;

/* Something was done; for stages that have no layers. */
static inline void heartbeat_beat(heartbeat *h)
{
    atomic_store_explicit(&h->beats, atomic_load_explicit(&h->beats, memory_order_relaxed) + 1, memory_order_relaxed);
}

static inline void heartbeat_phase(heartbeat *h, int layer, phase done)
{
    atomic_store_explicit(&h->layer, layer, memory_order_relaxed);
    atomic_store_explicit(&h->phase, (int32_t)done, memory_order_relaxed);
    heartbeat_beat(h);
}

/* Forward number `iteration` of this rank begins. */
static inline void heartbeat_iteration(heartbeat *h, int64_t iteration)
{
    atomic_store_explicit(&h->iteration, iteration, memory_order_relaxed);
    atomic_store_explicit(&h->layer, -1, memory_order_relaxed);
    atomic_store_explicit(&h->phase, -1, memory_order_relaxed);
    atomic_store_explicit(&h->beats, 0, memory_order_relaxed);
}

static inline void heartbeat_stage(heartbeat *h, watch_stage stage)
{
    atomic_store_explicit(&h->stage, (int32_t)stage, memory_order_relaxed);
    heartbeat_beat(h);
}

typedef struct watchdog_rule {
    int rank, size;
    const char *file;              /* of the job's heartbeats, where all ranks see it; 64 bytes a rank */
    double seconds[WATCH_STAGES];  /* how long a rank may be silent, by its stage; 0: for ever */
    double tick;                   /* seconds between looks */
    void (*abort)(void *with);     /* takes the job down; on a thread of its own, may hang; NULL: none */
    void *with;
    double abort_seconds;          /* until _exit after the message */
} watchdog_rule;

typedef struct watchdog watchdog;

/* Starts to watch. Borrows the heartbeat and what the rule points to; every rank calls it before the first exchange
 * that is to be watched. FAILED: the file cannot be written, no thread. Once it runs, a file that fails costs only the
 * places of the other ranks in the message. */
status watchdog_open(watchdog **out, const watchdog_rule *rule, const heartbeat *mine);
/* Stops watching; the others no longer miss this rank. Accepts NULL. The file stays: it is the folder's owner's. */
void watchdog_close(watchdog *w);

#endif
