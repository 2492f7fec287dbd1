/* The results of a run: per-rank journals while it goes on, one HDF5 file published from them.
 * Layout and meaning of every column: results/schema.md. */
#ifndef EPOCH_RESULTS_RESULTS_H
#define EPOCH_RESULTS_RESULTS_H

#include "src/base/counters.h"
#include "src/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RESULT_CAUSES = 4 }; /* rows fallbacks by cause: miss, version, illegal, overdue */

typedef struct result_block { /* one decoded block */
    int32_t block, iterations, cold, refresh, hot_update, hot_skip, forced;
    int32_t layer_rebuilds, universe, rows_fallback[RESULT_CAUSES];
    int32_t fresh_rows, cached_rows;
    float support_size, distinct_experts, coverage; /* means over hot iterations and sparse layers; NaN: none */
} result_block;

typedef struct result_row { /* one prompt and turn; everything is borrowed */
    const char *dataset;    /* dataset_name */
    const char *id;
    int64_t source_line;
    int32_t turn;           /* from 0 */
    int64_t order;          /* position in the run's input: rows are published in this order, then by turn */
    const char *prompt, *text, *gold;
    bool failed;
    const char *message;    /* why it failed, or "" */
    const char *finish_reason; /* "eos", "length", or "" of a failed row */
    int32_t prompt_tokens;
    const int32_t *token;   /* generated ids, before the first EOS */
    int32_t tokens;
    int32_t iterations;     /* forwards in which it refined a block */
    double seconds;         /* from its first forward to its last */
    const result_block *block;
    int32_t blocks;
} result_row;

typedef struct result_phase { /* counters of one rank, since the session's start */
    double seconds[PHASES];
    int64_t forwards;
    int64_t rows_fresh[PATHS], rows_cached[PATHS]; /* by path of the slot; prefill counts sealing rows too */
    int64_t rows_dispatched, rows_received, bytes_dispatched, bytes_combined;
    int64_t expert_tiles;
    double wall_seconds;    /* of decoding: first forward to now */
    int64_t generated_tokens;
} result_phase;

typedef struct result_iteration { /* --trace: one slot's forward */
    int64_t order;
    int32_t turn, block, iteration, path, live, newly, stable, fresh, commits, forced;
    uint64_t committed;
    float support_size, distinct_experts, coverage;  /* means over sparse layers */
    int64_t bytes_moved;
} result_iteration;

typedef struct journal journal;

/* This rank's journal of one session in DIR (FILE.h5.d, created where needed). */
status journal_open(journal **out, const char *dir, int rank, int session);
/* Buffers a row; it counts as done only after journal_commit. */
status journal_row(journal *j, const result_row *r);
status journal_iteration(journal *j, const result_iteration *i);
/* Writes what is buffered and the counters, then fdatasync: a group commit. */
status journal_commit(journal *j, const result_phase *p);
void journal_close(journal *j); /* accepts NULL; does not commit */

/* Takes the run's lock on DIR (creates it); waits wait_seconds for leftovers, then BAD_INPUT naming the holder. One rank
 * a host calls it with exclusive set, then every rank shares; the lock goes with the process. */
status results_lock(int *fd, const char *dir, bool exclusive, double wait_seconds);

/* What the journals in DIR hold: how many sessions so far, rows done and failed. A missing DIR is none. */
typedef struct results_state {
    int sessions;
    int64_t done, failed;
} results_state;
status results_scan(results_state *out, const char *dir);

/* Writes PATH from the journals in DIR by atomic rename. run_json: an object whose members become attributes of `/`
 * (texts, integers, numbers; objects and arrays as JSON text). state: "partial", "complete", "interrupted". */
status results_publish(const char *path, const char *dir, const char *run_json, const char *state);

#endif
