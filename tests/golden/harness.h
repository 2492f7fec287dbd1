/* A checkpoint without a tokenizer on one rank: what the golden tests drive. */
#ifndef EPOCH_TESTS_HARNESS_H
#define EPOCH_TESTS_HARNESS_H

#include "src/exec/audit.h"
#include "src/exec/executor.h"
#include "src/feed.h"
#include "src/flight.h"
#include "src/plan/plan.h"

typedef struct harness {
    model_config config;
    sum_tree *tree;
    backend *backend;
    weights *weights;
    lane *lane;
    executor *executor;
    audit *audit;       /* opened by a test that wants every forward audited; closed here */
    audit_slot audited; /* over all iterations so far: sums, the largest difference, the smallest margin */
} harness;

/* The exact dense executor's settings; change what a test is about. */
plan_settings harness_settings(int block_size, float threshold, int mask_id, int eos_id);

/* What harness_open opens: the CPU backend, or the CUDA backend of a build that has it. */
extern bool harness_on_gpu;

status harness_open(harness *h, const char *dir, const plan_settings *s, int slot_count, dtype matrices);
void harness_close(harness *h);

/* One prompt to run: its answer before the first EOS, and what each forward committed. */
typedef struct decoded {
    const int32_t *prompt;
    int32_t prompt_tokens, gen_len;
    flight flight;             /* answer, eos, iterations, blocks; harness_forget frees it */
    struct {
        int32_t block;
        uint64_t positions;
    } *commit;                 /* [commits], one an iteration */
    int32_t commits, commit_room;
    bool done;
} decoded;

/* Runs all of them through the slots, continuous batching as the run does it. */
status harness_decode(harness *h, decoded *d, int count);
void harness_forget(decoded *d, int count);

#endif
