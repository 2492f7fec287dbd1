#include "src/base/watchdog.h"

#include "src/base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char *const stage_names[WATCH_STAGES] = {"load", "connect", "run", "publish", "left"};

/* One rank in the file, at rank * sizeof. The file is opened anew for each look, so that one on a network file system
 * is written through and read afresh. */
typedef struct record {
    char magic[8];
    uint64_t ticks; /* looks of this rank's watchdog: a process that is stopped or dead no longer counts them up */
    uint64_t beats;
    int64_t iteration;
    int32_t stage, layer, phase;
    int32_t fired; /* it has written the message, or is about to */
    char room[16];
} record;

static const char magic[8] = "epochhb";

typedef struct seen {
    record last;   /* zero until the first */
    double silent; /* seconds without a beat */
    double deaf;   /* seconds without a tick */
    bool heard;    /* has ticked while this rank watched: the record is not of a former job */
} seen;

struct watchdog {
    watchdog_rule rule;
    const heartbeat *mine;
    seen *rank;   /* [size] */
    record *read; /* [size] */
    char *text;   /* the message, TEXT_BYTES a rank and for the head */
    size_t at;
    uint64_t ticks;
    int32_t fired;
    int stuck;         /* looks in a row that found the job stuck */
    double others;     /* seconds since another rank was seen to have written the message */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool stop;
};

enum { TEXT_BYTES = 256 };

static record own_record(const watchdog *w)
{
    const heartbeat *h = w->mine;
    const volatile int32_t *reached = atomic_load_explicit(&h->reached, memory_order_acquire);
    int32_t at = reached ? *reached : -1;
    record r = {.ticks = w->ticks,
                .beats = atomic_load_explicit(&h->beats, memory_order_relaxed),
                .iteration = atomic_load_explicit(&h->iteration, memory_order_relaxed),
                .stage = atomic_load_explicit(&h->stage, memory_order_relaxed),
                .layer = at >= 0 ? at / PHASES : atomic_load_explicit(&h->layer, memory_order_relaxed),
                .phase = at >= 0 ? at % PHASES : atomic_load_explicit(&h->phase, memory_order_relaxed),
                .fired = w->fired};
    memcpy(r.magic, magic, sizeof magic);
    return r;
}

static status write_record(const watchdog *w, const record *r)
{
    status st = OK;
    int fd = open(w->rule.file, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    bool written = fd >= 0 && pwrite(fd, r, sizeof *r, (off_t)w->rule.rank * (off_t)sizeof *r) == (ssize_t)sizeof *r;
    if (fd >= 0 && close(fd) != 0)
        written = false;
    if (!written)
        FAIL(FAILED, "%s: heartbeats cannot be written: %s", w->rule.file, strerror(errno));
out:
    return st;
}

/* The ranks' newest records into read[]; those that cannot be had are as they were. */
static void read_records(watchdog *w, const record *own)
{
    for (int r = 0; r < w->rule.size; r++)
        w->read[r] = w->rank[r].last;
    int fd = open(w->rule.file, O_RDONLY | O_CLOEXEC);
    for (int r = 0; fd >= 0 && r < w->rule.size; r++) {
        record one;
        if (pread(fd, &one, sizeof one, (off_t)r * (off_t)sizeof one) == (ssize_t)sizeof one &&
            memcmp(one.magic, magic, sizeof magic) == 0 && one.stage >= 0 && one.stage < WATCH_STAGES)
            w->read[r] = one;
    }
    if (fd >= 0)
        close(fd);
    w->read[w->rule.rank] = *own;
}

/* Seconds that rank r may be silent; of a rank not heard of yet, as many as this one. */
static double limit(const watchdog *w, int r)
{
    const record *a = &w->rank[r].last, *own = &w->rank[w->rule.rank].last;
    return w->rule.seconds[a->magic[0] ? a->stage : own->stage];
}

static bool deaf(const watchdog *w, int r)
{
    return w->rank[r].deaf > limit(w, r) / 2;
}

/* Takes in the newest records; is every rank silent for longer than it may be? */
static bool look(watchdog *w, double elapsed)
{
    bool all = true;
    w->ticks++;
    record own = own_record(w);
    write_record(w, &own); /* a failure costs the others this rank's place, no more */
    read_records(w, &own);
    for (int r = 0; r < w->rule.size; r++) {
        seen *s = &w->rank[r];
        const record *a = &w->read[r], *b = &s->last;
        bool moved = a->beats != b->beats || a->iteration != b->iteration || a->stage != b->stage ||
                     a->layer != b->layer || a->phase != b->phase;
        s->silent = moved ? 0 : s->silent + elapsed;
        s->heard |= b->magic[0] && a->ticks != b->ticks;
        s->deaf = a->ticks != b->ticks ? 0 : s->deaf + elapsed;
        s->last = *a;
        if (a->stage != WATCH_LEFT && (limit(w, r) <= 0 || s->silent <= limit(w, r)))
            all = false;
    }
    return all;
}

/* ---- the end */

static void put(watchdog *w, const char *format, ...) EPOCH_PRINTF(2, 3);

static void put(watchdog *w, const char *format, ...)
{
    size_t room = (size_t)(w->rule.size + 1) * TEXT_BYTES - w->at;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(w->text + w->at, room, format, args);
    va_end(args);
    w->at += n < 0 ? 0 : (size_t)n < room ? (size_t)n : room - 1;
}

/* Is rank a further behind than b? A process that does not answer is behind all others. */
static int behind(const watchdog *w, int a, int b)
{
    const record *x = &w->rank[a].last, *y = &w->rank[b].last;
    if (deaf(w, a) != deaf(w, b))
        return deaf(w, a) ? 1 : -1;
    if (x->iteration != y->iteration) /* first of all: one may still publish while the others are in the next */
        return x->iteration < y->iteration ? 1 : -1;
    if (x->stage != y->stage)
        return x->stage < y->stage ? 1 : -1;
    return (x->beats < y->beats) - (x->beats > y->beats);
}

/* All ranks beat alike in a forward, so the one with the fewest beats is the one that the others wait for. */
static void compose(watchdog *w)
{
    int last = w->rule.rank, same = 0, here = 0;
    for (int r = 0; r < w->rule.size; r++)
        if (w->rank[r].last.stage != WATCH_LEFT && behind(w, r, last) > 0)
            last = r;
    for (int r = 0; r < w->rule.size; r++) {
        here += w->rank[r].last.stage != WATCH_LEFT;
        same += w->rank[r].last.stage != WATCH_LEFT && behind(w, r, last) == 0;
    }
    put(w, "the job is stuck: no rank has moved for %.1f s (--timeout)", w->rank[w->rule.rank].silent);
    if (same == 1 && here > 1)
        put(w, "; the others wait for rank %d/%d", last, w->rule.size);
    put(w, "\n");
    for (int r = 0; r < w->rule.size; r++) {
        const seen *s = &w->rank[r];
        const record *a = &s->last;
        put(w, "rank %d/%d: ", r, w->rule.size);
        if (!a->magic[0]) {
            put(w, "never heard of\n");
            continue;
        }
        put(w, "%s", stage_names[a->stage]);
        if (a->stage == WATCH_RUN) {
            put(w, ", iteration %lld", (long long)a->iteration);
            if (a->layer >= 0)
                put(w, ", layer %d", a->layer);
            if (a->phase >= 0 && a->phase < PHASES)
                put(w, ", %s done", phase_names[a->phase]);
        }
        if (a->stage != WATCH_LEFT)
            put(w, ", silent for %.1f s%s", s->silent, deaf(w, r) ? ", its process does not answer" : "");
        put(w, "\n");
    }
}

static void pause_for(double seconds)
{
    struct timespec t = clock_span(seconds);
    while (nanosleep(&t, &t) != 0 && errno == EINTR)
        ;
}

static void *call_abort(void *self)
{
    const watchdog *w = self;
    w->rule.abort(w->rule.with);
    return NULL;
}

static void leave(watchdog *w)
{
    pthread_t helper;
    record own;
    w->fired = 1;
    own = own_record(w);
    write_record(w, &own);
    compose(w);
    /* Not through stdio: the stuck thread may hold its lock. */
    if (write(STDERR_FILENO, w->text, w->at) < 0)
        w->at = 0;
    if (!w->rule.abort || pthread_create(&helper, NULL, call_abort, w) == 0)
        pause_for(w->rule.abort_seconds);
    _exit(FAILED);
}

/* The job is stuck: the first rank that answers writes the message; the next take over if it does not. */
static void act(watchdog *w, double elapsed)
{
    int turn = 0;
    bool written = false;
    for (int r = 0; r < w->rule.size; r++) {
        const seen *s = &w->rank[r];
        turn += r < w->rule.rank && s->heard && s->last.stage != WATCH_LEFT && !deaf(w, r);
        written |= r != w->rule.rank && s->heard && s->last.fired;
    }
    if (written) {
        w->others += elapsed;
        if (w->others > w->rule.abort_seconds)
            _exit(FAILED);
    } else if (w->stuck > 3 * turn) {
        leave(w);
    }
}

static void *watch(void *self)
{
    watchdog *w = self;
    double before = clock_seconds();
    pthread_mutex_lock(&w->lock);
    while (!w->stop) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        double end = (double)until.tv_nsec * 1e-9 + w->rule.tick;
        until.tv_sec += (time_t)end;
        until.tv_nsec = (long)((end - (double)(time_t)end) * 1e9);
        pthread_cond_timedwait(&w->wake, &w->lock, &until);
        if (w->stop)
            break;
        pthread_mutex_unlock(&w->lock);
        /* What is longer than a tick was spent stopped, or without a core. */
        double elapsed = clock_seconds() - before;
        before += elapsed;
        if (elapsed > 2 * w->rule.tick)
            elapsed = 2 * w->rule.tick;
        w->stuck = look(w, elapsed) ? w->stuck + 1 : 0;
        if (w->stuck > 0)
            act(w, elapsed);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

status watchdog_open(watchdog **out, const watchdog_rule *rule, const heartbeat *mine)
{
    status st = OK;
    sigset_t all, before;
    pthread_condattr_t clock;
    watchdog *w = calloc(1, sizeof *w);
    *out = NULL;
    if (!w)
        FAIL(FAILED, "out of memory");
    w->rule = *rule;
    w->mine = mine;
    w->rank = calloc((size_t)rule->size, sizeof *w->rank);
    w->read = calloc((size_t)rule->size, sizeof *w->read);
    w->text = calloc((size_t)rule->size + 1, TEXT_BYTES);
    if (!w->rank || !w->read || !w->text)
        FAIL(FAILED, "out of memory");
    record own = own_record(w);
    TRY(write_record(w, &own));
    pthread_mutex_init(&w->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&w->wake, &clock);
    pthread_condattr_destroy(&clock);
    sigfillset(&all); /* signals are for the thread that works */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&w->thread, NULL, watch, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        FAIL(FAILED, "no thread for the watchdog: %s", strerror(error));
    *out = w;
    w = NULL;
out:
    if (w) {
        free(w->rank);
        free(w->read);
        free(w->text);
        free(w);
    }
    return st;
}

void watchdog_close(watchdog *w)
{
    if (!w)
        return;
    pthread_mutex_lock(&w->lock);
    w->stop = true;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    record own = own_record(w);
    own.stage = WATCH_LEFT;
    write_record(w, &own);
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->lock);
    free(w->rank);
    free(w->read);
    free(w->text);
    free(w);
}
