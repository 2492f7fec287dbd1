/* `epoch report FILE.h5 [FILE.h5 ...]`: what runs were, how right and how fast they were, and where the time went. The
 * figures are those of results/schema.md. */
#ifndef EPOCH_RESULTS_REPORT_H
#define EPOCH_RESULTS_REPORT_H

#include "results/results.h"

#include <stdio.h>

typedef struct report_figures { /* of one file; sums over its rows, blocks, ranks and sessions */
    int64_t rows, failed, truncated;
    int64_t tokens;            /* generated: committed before the first EOS */
    int64_t row_iterations;    /* forwards in which a row refined a block, over rows */
    double wall_seconds;       /* decoding only: load and warm-up are outside */
    double tokens_per_second;  /* NaN where no time was recorded; so below */
    double tokens_per_forward; /* of a row */
    int64_t blocks, fresh_rows, cached_rows;
    double cached_share; /* prefill and sealing do not count */
    double iterations_per_block;
    double ms_per_forward;  /* of a rank */
    double rank_seconds;    /* decoding, over ranks */
    int64_t ranks;          /* rows of /phases */
    double seconds[PHASES]; /* over ranks */
    int64_t forwards, rows_fresh[PATHS], rows_cached[PATHS];
    int64_t rows_dispatched, bytes_dispatched, bytes_combined, expert_tiles;
    int64_t hot_iterations; /* of blocks; the next three are means over them */
    double support_size, distinct_experts, coverage;
    double
        expert_loads; /* distinct experts over hot iterations: a layer's weights, in experts, that blocks asked for */
    int64_t layer_rebuilds, universe, rows_fallback[RESULT_CAUSES], forced;
    int64_t audits, audit_blocks_same;                        /* iterations of slots */
    int64_t audit_live, audit_held, audit_same, audit_broken; /* rows */
    double audit_difference;                                  /* the largest, of logits */
    double overlap;                    /* Jaccard, of the experts touched in consecutive iterations */
    double similarity[OBSERVED_KINDS]; /* of routed outputs one iteration apart */
} report_figures;

void report_sum(report_figures *out, const results_file *f);

/* Prints everything about one file, or several side by side; name[i] stands for file[i]. */
status report_print(const results_file *const *file, const char *const *name, int count, FILE *to);

/* What each mode costs relative to mode full, per generated token: expert FLOPs, expert bytes, lane bytes, time.
 * BAD_INPUT: no file of mode full among them, or one without tokens. */
status report_ablation(const results_file *const *file, const char *const *name, int count, FILE *to);

/* The command; argv[0] is its name. */
status report_command(int argc, char **argv);

#endif
