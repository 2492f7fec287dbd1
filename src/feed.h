/* The rows of a run, in order: every --data file one after the other, each row numbered from 0. Rows become prompts
 * (token ids) only on the rank that runs them. */
#ifndef EPOCH_FEED_H
#define EPOCH_FEED_H

#include "datasets/dataset.h"
#include "src/model/chat.h"
#include "src/model/tokenizer.h"

#include <jansson.h>

typedef struct feed feed;

/* A row on its way: which turn of it comes next, and what was answered before. Free with row_close. */
typedef struct row {
    int64_t order;                /* number of the row in the run */
    const char *dataset, *path;   /* dataset_name, dataset_path; the feed's */
    example example;
    int32_t turn;
    char *answer[DATASET_TURNS];  /* of the turns before */
} row;

void row_close(row *r); /* frees it; accepts NULL */
/* How many records it leaves: its turns; one where it cannot run. */
int32_t row_records(const row *r);

typedef struct feed_rule {
    const char *const *data;
    int32_t data_count;
    dataset_rule dataset;
    const char *shots;            /* N:FILE, or NULL */
} feed_rule;

/* Opens every file, so that what is not there or not of its kind is refused before any work. */
status feed_open(feed **out, const feed_rule *r);
void feed_close(feed *f);

/* The next row; *out is NULL at the end. Owned by the caller. */
status feed_next(feed *f, row **out);
/* Counts past the next row without keeping it; *more is false at the end. */
status feed_skip(feed *f, bool *more);

/* [{"name", "path", "hash", "rows"}, ...] for the results; jsonl has its "prompt_field" too. Owned by the caller. */
status feed_json(json_t **out, const feed *f);
/* Of the solved examples, 0 where there are none. */
uint64_t feed_shots_hash(const feed *f);

/* Token ids of the row's present turn: shots, then the earlier turns with their answers, then the turn itself, in the
 * chat form. BAD_INPUT: what is wrong with the row (invalid UTF-8, an empty prompt). */
status feed_encode(const feed *f, const row *r, const chat_template *c, const tokenizer *t, token_list *out);

#endif
