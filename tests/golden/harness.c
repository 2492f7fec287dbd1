#include "tests/golden/harness.h"

#include <math.h>
#include <stdlib.h>

plan_settings harness_settings(int block_size, float threshold, int mask_id, int eos_id)
{
    return (plan_settings){.mode = PLAN_FULL,
                           .block_size = block_size,
                           .max_steps = 64,
                           .prefill_blocks = 4,
                           .mask_id = mask_id,
                           .eos_id = eos_id,
                           .threshold = threshold,
                           .refresh = 5,
                           .cohort = 1,
                           .coverage = 0.9f,
                           .share = 0.9f,
                           .mass = 1,
                           .extra = -1,
                           .budget = -1,
                           .step = -1};
}

bool harness_on_gpu;

#ifdef EPOCH_CUDA
static status open_backend(harness *h)
{
    return harness_on_gpu ? backend_cuda_open(&h->backend, 0) : backend_cpu_open(&h->backend, 0);
}

static status open_lane(harness *h, const lane_rule *r)
{
    return harness_on_gpu ? lane_self_cuda_open(&h->lane, r, h->backend) : lane_self_open(&h->lane, r, h->backend);
}
#else
static status open_backend(harness *h)
{
    return backend_cpu_open(&h->backend, 0);
}

static status open_lane(harness *h, const lane_rule *r)
{
    return lane_self_open(&h->lane, r, h->backend);
}
#endif

status harness_open(harness *h, const char *dir, const plan_settings *s, int slot_count, dtype matrices)
{
    status st = OK;
    *h = (harness){0};
    TRY(model_config_open(&h->config, dir));
    TRY(sum_tree_open(&h->tree, h->config.experts, h->config.groups, 1));
    TRY(open_backend(h));
    weight_rule wr = {.matrices = matrices, .tree = h->tree, .rank = 0};
    TRY(weights_open(&h->weights, &h->config, dir, h->backend, &wr));
    executor_rule r = {.slot_count = slot_count, .max_tokens = h->config.max_positions};
    TRY(plan_rules(&r.block, &r.atlas, s, &h->config, slot_count));
    r.page_count = slot_count * ((h->config.max_positions + r.block.block_size - 1) / r.block.block_size);
    lane_rule lr = {.hidden = h->config.hidden,
                    .top_k = h->config.top_k,
                    .max_rows = executor_max_rows(&r),
                    .tree = h->tree,
                    .payload = h->backend->activation};
    TRY(open_lane(h, &lr));
    TRY(executor_open(&h->executor, &r, &h->config, h->weights, h->backend, h->lane));
out:
    return st;
}

void harness_close(harness *h)
{
    audit_close(h->audit);
    executor_close(h->executor);
    if (h->lane)
        h->lane->close(h->lane);
    weights_close(h->weights);
    if (h->backend)
        h->backend->close(h->backend);
    sum_tree_close(h->tree);
    model_config_close(&h->config);
    *h = (harness){0};
}

static status note(decoded *d, const slot_report *rep)
{
    status st = OK;
    if (d->commits == d->commit_room) {
        d->commit_room = d->commit_room ? 2 * d->commit_room : 64;
        void *more = realloc(d->commit, sizeof *d->commit * (size_t)d->commit_room);
        if (!more)
            FAIL(FAILED, "out of memory");
        d->commit = more;
    }
    d->commit[d->commits].block = rep->block;
    d->commit[d->commits++].positions = rep->committed;
out:
    return st;
}

static void add_audit(audit_slot *sum, const audit_slot *a)
{
    if (a->live == 0)
        return;
    sum->min_margin = sum->live ? fminf(sum->min_margin, a->min_margin) : a->min_margin;
    sum->max_difference = fmaxf(sum->max_difference, a->max_difference);
    sum->live += a->live;
    sum->held += a->held;
    sum->same += a->same;
    sum->broken += a->broken;
}

status harness_decode(harness *h, decoded *d, int count)
{
    status st = OK;
    executor *x = h->executor;
    int slot_count = x->rule.slot_count, next = 0, done = 0;
    decoded **in = calloc((size_t)slot_count, sizeof *in);
    slot_report *rep = calloc((size_t)slot_count, sizeof *rep);
    audit_slot *audited = calloc((size_t)slot_count, sizeof *audited);
    if (!in || !rep || !audited)
        FAIL(FAILED, "out of memory");
    while (done < count) {
        for (int i = 0; i < slot_count && next < count; i++) {
            if (in[i])
                continue;
            in[i] = &d[next++];
            in[i]->flight = (flight){.end = in[i]->prompt_tokens + in[i]->gen_len};
            for (int k = 0; k < in[i]->prompt_tokens; k++)
                TRY(token_list_add(&in[i]->flight.prompt, in[i]->prompt[k]));
            TRY(executor_admit(x, i, in[i]->prompt, in[i]->prompt_tokens, in[i]->flight.end));
        }
        if (h->audit)
            TRY(audit_before(h->audit));
        TRY(executor_forward(x));
        TRY(executor_reports(x, rep));
        if (h->audit)
            TRY(audit_after(h->audit, audited));
        for (int i = 0; i < slot_count; i++)
            add_audit(&h->audited, &audited[i]);
        for (int i = 0; i < slot_count; i++) {
            if (!in[i] || rep[i].path == PATH_NONE)
                continue;
            if (rep[i].broken)
                FAIL(FAILED, "prompt %d: the logits are not finite", (int)(in[i] - d));
            if (rep[i].path >= PATH_COLD)
                TRY(note(in[i], &rep[i]));
            TRY(flight_report(&in[i]->flight, &rep[i], &x->rule.block));
            if (rep[i].sequence_done) {
                executor_release(x, i);
                in[i]->done = true;
                in[i] = NULL;
                done++;
            }
        }
    }
out:
    free(in);
    free(rep);
    free(audited);
    return st;
}

void harness_forget(decoded *d, int count)
{
    for (int i = 0; i < count; i++) {
        flight_clear(&d[i].flight);
        free(d[i].commit);
        d[i].commit = NULL;
    }
}
