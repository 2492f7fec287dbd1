#include "src/watch.h"

#include "src/base/clock.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* How often --timeout a stage may take without a sign: loading and publishing show few. */
static const double patience[WATCH_STAGES] = {[WATCH_LOAD] = 4, [WATCH_CONNECT] = 1, [WATCH_RUN] = 1,
                                              [WATCH_PUBLISH] = 4};
static const double ABORT_SECONDS = 3, TICK_MOST = 1;

static char alarm_text[200];

static void on_alarm(int number)
{
    (void)number;
    if (write(STDERR_FILENO, alarm_text, strlen(alarm_text)) < 0)
        _exit(FAILED);
    _exit(FAILED);
}

void watch_alarm(watch *h, world *w, double seconds, double more)
{
    struct sigaction a = {.sa_handler = on_alarm};
    h->world = w;
    h->seconds = seconds;
    if (seconds <= 0)
        return;
    snprintf(alarm_text, sizeof alarm_text,
             "rank %d/%d: waited %g s for the other ranks, before the run or behind it (--timeout)\n", w->rank, w->size,
             seconds + more);
    sigaction(SIGALRM, &a, NULL);
    alarm((unsigned)(seconds + more) + 1);
}

void watch_sweep(const watch *h)
{
    if (!h->folder)
        return;
    unlink(h->file);
    rmdir(h->folder);
}

static double tick(const watch *h)
{
    return h->seconds / 20 < TICK_MOST ? h->seconds / 20 : TICK_MOST;
}

/* The folder goes once the other ranks have seen there that the message is written. */
static void take_down(void *with)
{
    const watch *h = with;
    struct timespec more = clock_span(1.2 * tick(h));
    if (h->folder)
        nanosleep(&more, NULL);
    watch_sweep(h);
    h->world->abort(h->world, FAILED);
}

status watch_open(watch *h, const char *dir)
{
    status st = OK;
    if (h->seconds <= 0)
        return OK;
    atomic_store(&h->heart.layer, -1);
    atomic_store(&h->heart.phase, -1);
    if ((size_t)snprintf(h->file, sizeof h->file, "%s/heartbeats", dir) >= sizeof h->file)
        FAIL(BAD_INPUT, "%s/heartbeats: the path is too long", dir);
    watchdog_rule rule = {.rank = h->world->rank,
                          .size = h->world->size,
                          .file = h->file,
                          .tick = tick(h),
                          .abort = take_down,
                          .with = h,
                          .abort_seconds = ABORT_SECONDS};
    for (int s = 0; s < WATCH_STAGES; s++)
        rule.seconds[s] = patience[s] * h->seconds;
    TRY(watchdog_open(&h->dog, &rule, &h->heart));
    alarm(0);
out:
    return st;
}

void watch_close(watch *h)
{
    if (!h->dog)
        return;
    watch_alarm(h, h->world, h->seconds, 0);
    watchdog_close(h->dog);
    h->dog = NULL;
}
