#include "src/plan/plan.h"

static int32_t at_least_one(int32_t n)
{
    return n > 0 ? n : 1;
}

status plan_rules(block_rule *k, atlas_rule *a, const plan_settings *s, const model_config *c, int32_t slot_count)
{
    status st = OK;
    bool full = s->mode == PLAN_FULL;
    int32_t budget = s->budget >= 0 ? s->budget : at_least_one(c->experts * 3 / 8);
    *k = (block_rule){.block_size = s->block_size ? s->block_size : c->block_size ? c->block_size : 32,
                      .mask_id = s->mask_id,
                      .eos_id = s->eos_id,
                      .max_steps = s->max_steps,
                      .threshold = s->threshold,
                      .refresh_every = full || s->mode == PLAN_NO_LSP ? 1 : s->refresh,
                      .update_every = s->update,
                      .prefill_blocks = s->prefill_blocks,
                      .cohort = s->cohort > 0 && s->cohort < slot_count ? s->cohort : at_least_one(slot_count),
                      .restrict_experts = !full && s->mode != PLAN_NO_ATLAS,
                      .dense_lane = s->mode == PLAN_NO_LANE};
    *a = (atlas_rule){.extra = s->extra >= 0 ? s->extra : c->top_k,
                      .coverage = s->coverage,
                      .covered_share = s->share,
                      .mass_weight = s->mass,
                      .budget = budget < c->experts ? budget : c->experts,
                      .repair_step = s->step >= 0 ? at_least_one(s->step) : at_least_one(budget / 8)};
    if (k->block_size > BLOCK_MOST)
        FAIL(BAD_INPUT, "config.json: block_length is %d, want at most %d (--block-size overrides)", k->block_size,
             BLOCK_MOST);
    if (k->restrict_experts && a->budget < c->top_k)
        FAIL(BAD_INPUT, "--atlas-budget is %d, want at least %d, the experts of a token (num_experts_per_tok)", budget,
             c->top_k);
out:
    return st;
}

bool plan_shares(const block_rule *k)
{
    return k->restrict_experts && k->cohort > 1;
}
