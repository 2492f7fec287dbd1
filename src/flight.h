/* One sequence in flight: what has been answered so far, and its record at the end. */
#ifndef EPOCH_FLIGHT_H
#define EPOCH_FLIGHT_H

#include "results/results.h"
#include "src/feed.h"
#include "src/slot.h"

typedef struct flight {
    row *row;                /* NULL: the slot is idle */
    token_list prompt, answer;
    int32_t end;             /* prompt tokens + gen_len, clamped */
    bool eos;
    int32_t iterations;
    result_block *block;
    int32_t blocks, block_room;
    double started;          /* seconds, any clock */
} flight;

/* Takes in what the slot did in one forward: a finished block's tokens (before the first end token, below `end`) and its
 * counters. */
status flight_report(flight *f, const slot_report *rep, const block_rule *k);

/* The record of a finished or failed sequence (message: why it failed, else NULL). text and message are borrowed. */
void flight_record(result_row *out, const flight *f, const char *text, const char *message, double now);

/* Idle again; frees the row too unless it was taken out. */
void flight_clear(flight *f);

#endif
