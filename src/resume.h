/* Going on with the results of earlier sessions: whether the settings allow it, which rows stay, and where a row that
 * was begun goes on. */
#ifndef EPOCH_RESUME_H
#define EPOCH_RESUME_H

#include "results/results.h"
#include "src/feed.h"
#include "src/options.h"

/* What decides an answer beside the weights and run_json's "rules": run_json's "inputs". BAD_INPUT: a file of the
 * options cannot be read. Owned by the caller. */
status resume_inputs(json_t **out, const options *o, const feed *f);

/* How the settings of a run differ from those of the session before. */
typedef struct resume_change {
    bool answers;    /* checkpoint, rules or inputs: every answer might be another */
    bool prompts;    /* data, or how prompts are taken from it: some rows may be others */
    char text[1500]; /* which, with both values */
} resume_change;
status resume_compare(resume_change *out, const json_t *before, const json_t *now);

/* Which recorded rows an input still has as they are: done, prompts and gold the same. The texts belong to `done`. */
typedef struct resume_rows {
    result_kept *kept;
    int64_t count, room;
    bool all;           /* nothing recorded is dropped or moved */
    char first[600];    /* "FILE:LINE" of the first row with another prompt, or "" */
} resume_rows;
status resume_keep(resume_rows *out, const results_state *done, const feed_rule *input);
void resume_rows_close(resume_rows *r);

/* Sets the row to the turn it goes on with, and the answers of those before. *left is false where nothing is left:
 * every turn is recorded, done or failed. */
status resume_row(bool *left, row *r, const results_state *done);

#endif
