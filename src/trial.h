/* One row of `epoch bench`: the forwards of one batch with random weights, timed, timed by phase, and looked into.
 * Slots start together behind a prefix of random K/V; a commit schedule takes the place of the decision rule. */
#ifndef EPOCH_TRIAL_H
#define EPOCH_TRIAL_H

#include "results/bench_file.h"
#include "src/cost.h"
#include "src/exec/executor.h"
#include "src/plan/plan.h"
#include "src/transport.h"
#include "src/world.h"

enum { TRIAL_BLOCK = 32, PATTERN_STEPS = 64 };

typedef struct trial_setup { /* of all rows */
    const model_config *config;
    world *world;
    bool *together; /* false from the first forward to the last: a rank that fails there fails alone */
    heartbeat *heart; /* NULL: nobody listens */
    bool gpu;
    transport_ask way;
    nccl_comm *joined;
    backend *backend;
    weights *weights;
    sum_tree *tree;
    ceilings most;
    const int32_t *pace; /* [patterns, PATTERN_STEPS], as in struct slots */
    int32_t patterns;
    uint64_t seed;
} trial_setup;

typedef struct trial_ask { /* of one row */
    plan_settings plan;    /* cohort among them: sequences of a rank, 0: all */
    int32_t batch, prefix; /* sequences of the job; positions before the active block */
    int32_t iterations;    /* forwards; 0: as many as the schedule takes for `blocks` blocks of each sequence */
    int32_t blocks;
} trial_ask;

/* Every rank calls it; the row is whole at rank 0. Mode, support, and ratios are the caller's. BAD_INPUT: more
 * positions than can be numbered. FAILED: no memory, logits that are no numbers, or what the transport says. */
status trial_run(bench_row *out, const trial_setup *s, const trial_ask *a);

#endif
