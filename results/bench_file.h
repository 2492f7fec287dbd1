/* The file of `epoch bench --out`: one table, a row for each batch that was timed. results/schema.md tells the columns.
 */
#ifndef EPOCH_RESULTS_BENCH_FILE_H
#define EPOCH_RESULTS_BENCH_FILE_H

#include "src/base/counters.h"
#include "src/base/json.h"
#include "src/base/status.h"

#include <stdint.h>

enum { BENCH_SCHEMA = 1 };

/* Means over the timed forwards; rows, bytes and FLOPs over all ranks, times of the slowest. NaN: does not apply, or is
 * not known. */
typedef struct bench_row {
    const char *mode;
    char lane[8];
    int32_t prefix, batch, cohort; /* positions; sequences of the whole job; cohort: sequences, of one rank at most */
    int32_t support;               /* experts of a forced support; 0: as the Atlas builds them, or none */
    int32_t forwards, skipped, blocks; /* timed; passed before them; of each sequence */
    double ms, ms_block;                             /* an iteration; a block of each sequence */
    double floor_ms, percent;                        /* floor over ms */
    double phase_ms[PHASES], phase_floor_ms[PHASES]; /* of a second pass, in which every forward is timed by phase */
    double rows, fresh, live;                        /* an iteration */
    double experts;                                  /* different ones a sparse layer */
    double bytes, flops;                             /* that the floor is made of */
    double dispatched, combined;                     /* bytes to other ranks: rows, and sums back */
    double tokens_per_second;                        /* committed, over the time that idle slots take too */
    double idle;               /* share of slots that a forward left out: they wait for their cohort */
    double taken, planned; /* bytes of rank 0's device: as its driver says, and as the memory plan has it */
    double ratio, floor_ratio; /* of mode full, timed before at the same prefix, batch and cohort, to this */
} bench_row;

/* Writes PATH by atomic rename: `about` as attributes of `/`, the rows as /bench. FAILED where the file system refuses.
 */
status bench_save(const char *path, const json_t *about, const bench_row *row, int64_t rows);

#endif
