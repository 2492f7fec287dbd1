/* No hang: a rank that waits in vain ends. Before the results folder is this run's, and once the run is over, an alarm
 * clock watches; in between the watchdog, which also knows where each rank was. */
#ifndef EPOCH_WATCH_H
#define EPOCH_WATCH_H

#include "src/base/watchdog.h"
#include "src/world.h"

typedef struct watch {
    world *world;
    double seconds; /* 0: for ever */
    heartbeat heart;
    watchdog *dog;
    char file[4096]; /* of the heartbeats */
    const char *folder; /* to be removed with its file where the watchdog ends the job; NULL: it stays. Borrowed */
} watch;

/* Sets the alarm: this process ends with FAILED and a message unless watch_open or watch_alarm comes within `seconds`
 * and `more`. 0 seconds: no alarm, and no watchdog. Borrows the world. */
void watch_alarm(watch *h, world *w, double seconds, double more);
/* From here on the watchdog: DIR/heartbeats, in stage WATCH_LOAD. */
status watch_open(watch *h, const char *dir);
/* Back to the alarm. */
void watch_close(watch *h);
/* Removes `folder` and the heartbeats in it. */
void watch_sweep(const watch *h);

#endif
