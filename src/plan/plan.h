/* The settings of a plan: what the block clock goes by. A mode is nothing but a choice of these. */
#ifndef EPOCH_PLAN_PLAN_H
#define EPOCH_PLAN_PLAN_H

#include "src/backend.h"
#include "src/model/config.h"

typedef enum plan_mode { PLAN_EPOCH, PLAN_FULL, PLAN_NO_ATLAS, PLAN_NO_LSP, PLAN_NO_LANE } plan_mode;

typedef struct plan_settings {
    plan_mode mode;
    int32_t block_size, max_steps, prefill_blocks; /* block_size 0: the checkpoint's, else 32 */
    int32_t mask_id, eos_id;
    float threshold;
    int32_t refresh, update;
    int32_t cohort;                     /* 0: all slots of the rank */
    float coverage, share, mass;        /* alpha, q, beta */
    int32_t extra, budget, step;        /* m, B, c; -1: from the model */
} plan_settings;

/* The rules that follow. full: every row fresh, no support (the exact dense executor); no-atlas: no support; no-lsp:
 * every row fresh; no-lane: every row dispatched. Defaults by the model: m = K, B = 3 E / 8, c = B / 8, at least 1.
 * BAD_INPUT: a support smaller than K, a cohort larger than the rank's slots is simply all of them. */
status plan_rules(block_rule *k, atlas_rule *a, const plan_settings *s, const model_config *c, int32_t slot_count);

/* Can a sequence's output depend on its neighbours under these rules? */
bool plan_shares(const block_rule *k);

#endif
