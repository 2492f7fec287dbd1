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

typedef struct flight_form { /* how a prompt becomes tokens, and how long a sequence may be */
    const chat_template *chat;
    const tokenizer *tokenizer;
    int32_t max_tokens, gen_len;
} flight_form;

/* The prompt of the row's present turn, and the sequence's end. BAD_INPUT: this row cannot run; file, line and why. */
status flight_encode(flight *f, const feed *rows, const flight_form *form);

/* Takes in what the slot did in one forward: a finished block's tokens (before the first end token, below `end`) and
 * its counters. */
status flight_report(flight *f, const slot_report *rep, const block_rule *k);

/* The record of a finished or failed sequence (message: why it failed, else NULL). text and message are borrowed. */
void flight_record(result_row *out, const flight *f, const char *text, const char *message, double now);

/* Idle again; frees the row too unless it was taken out. */
void flight_clear(flight *f);

#endif
