/* Seconds of a clock that nobody sets: for time that passes, not for the time of day. */
#ifndef EPOCH_BASE_CLOCK_H
#define EPOCH_BASE_CLOCK_H

#include <time.h>

static inline double clock_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* So many seconds, at least 0, as what sleeps wants them. */
static inline struct timespec clock_span(double seconds)
{
    return (struct timespec){(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
}

#endif
