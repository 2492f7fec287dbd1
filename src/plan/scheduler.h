/* Which rank runs which row. Every rank reads the same input and hears every rank's pulse at the same moment, so all
 * compute the same deal and none needs to be told. */
#ifndef EPOCH_PLAN_SCHEDULER_H
#define EPOCH_PLAN_SCHEDULER_H

#include <stdint.h>

/* What a rank says of itself in each forward (lane.h: pulse). */
enum {
    PULSE_BUSY,   /* sequences in flight, and rows waiting for a slot */
    PULSE_WANT,   /* rows it could take */
    PULSE_STOP,   /* 1: it was asked to stop */
    PULSE_COMMIT, /* rank 0 alone, 1: all commit behind this forward, so that they wait for their disks together */
    PULSE_DONE,   /* rows it has made durable in this session, done or failed */
    PULSE_TOKENS, /* tokens it has generated in this session, modulo 2^31 */
    PULSE_STEPS   /* forwards it has been through */
};

/* One deal: rows go one at a time to the ranks that want one, in rank order, round after round. */
typedef struct deal {
    int32_t size, next;
    int32_t *want; /* [size], counted down */
} deal;

/* The rank that gets the next row; -1: nobody wants one. */
int deal_next(deal *d);

/* Slots of `rank` when `total` are dealt evenly over `size` ranks. */
int32_t deal_evenly(int32_t total, int size, int rank);

#endif
