/* What a block's iterations have in common (`--observe`): per sparse layer, how far the experts that the active rows
 * touch overlap from one iteration to the next, and how a row's routed output (weighted and scaled, before the shared
 * expert) drifts from an earlier one. Only rows computed afresh count, so it says most where all are: --mode full.
 * Everything is downloaded and done on the host, layer by layer: times mean nothing. */
#ifndef EPOCH_EXEC_OBSERVE_H
#define EPOCH_EXEC_OBSERVE_H

#include "src/exec/executor.h"

enum { OBSERVE_STEPS = 64, OBSERVE_KINDS = 2 }; /* what lies further is left out; kinds: 0 decoded, 1 live */

typedef struct observation {
    /* Jaccard overlap of the experts that a block touched in iterations i - 1 and i, by i; one each layer and slot */
    int64_t overlap_count[OBSERVE_STEPS];
    double overlap_sum[OBSERVE_STEPS];
    /* Cosine similarity of a row's output to its own of `age` iterations before, by kind and age >= 1. A decoded row is
     * compared with its first pass as a decoded row, a live one with the block's cold iteration. */
    int64_t cosine_count[OBSERVE_KINDS][OBSERVE_STEPS];
    double cosine_sum[OBSERVE_KINDS][OBSERVE_STEPS];
} observation;

typedef struct observer observer;

/* Starts to observe x; observer_close ends it, before the executor closes. FAILED: no memory. close accepts NULL. */
status observer_open(observer **out, executor *x);
void observer_close(observer *o);
/* The sums so far. */
const observation *observer_sums(const observer *o);

/* After the combine of a sparse layer (counted from 0): ids and y_fresh are there. Waits. */
status observe_layer(observer *o, const executor *x, int sparse);

#endif
