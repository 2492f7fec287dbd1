#include "src/stage.h"

#include "src/device.h"
#include "src/exec/audit.h"
#include "src/memory.h"
#include "src/model/safetensors.h"

#include <stdlib.h>
#include <string.h>

#define MASK_TEXT "<|mask|>"
#define END_TEXT "<|endoftext|>"
enum { FAMILY_MASK = 156895, FAMILY_END = 156892 };
static const double WIDEN_MOST = 2e9; /* --weights auto: bytes of fp32 matrices a rank may hold */

/* A special id: the flag, else the added token of that text, else config.json, else the family's constant. What speaks
 * must agree. */
static status resolve(int32_t *out, const stage *s, const char *flag, int32_t asked, const char *text,
                      int32_t config_id, int32_t family)
{
    status st = OK;
    int32_t by_text = tokenizer_control(s->tokenizer, text);
    if (asked >= 0)
        *out = asked;
    else if (by_text >= 0 && config_id >= 0 && by_text != config_id)
        FAIL(BAD_INPUT, "%s: \"%s\" is id %d in tokenizer.json and %d in config.json: say which with --%s",
             s->options->model, text, by_text, config_id, flag);
    else
        *out = by_text >= 0 ? by_text : config_id >= 0 ? config_id : family;
    if (*out >= s->config.vocab)
        FAIL(BAD_INPUT, "the id of \"%s\" is %d, but the model has %d (vocab_size): set --%s", text, *out,
             s->config.vocab, flag);
out:
    return st;
}

static status check_rules(stage *s)
{
    status st = OK;
    const options *o = s->options;
    const model_config *c = &s->config;
    plan_settings p = {.mode = (plan_mode)o->mode,
                       .block_size = o->block_size,
                       .max_steps = o->max_steps,
                       .prefill_blocks = o->prefill_blocks,
                       .threshold = (float)o->threshold,
                       .refresh = o->refresh,
                       .update = o->update,
                       .coverage = (float)o->atlas_coverage,
                       .share = (float)o->atlas_share,
                       .mass = (float)o->atlas_mass,
                       .extra = o->atlas_extra,
                       .budget = o->atlas_budget,
                       .step = o->atlas_step};
    char *end;
    long cohort = strtol(o->cohort, &end, 10);
    if (strcmp(o->cohort, "batch") == 0)
        p.cohort = 0;
    else if (*end || cohort < 1 || cohort > 1 << 20)
        FAIL(BAD_INPUT, "--cohort is \"%s\", want a number of sequences or batch", o->cohort);
    else
        p.cohort = (int32_t)cohort;
    TRY(resolve(&p.mask_id, s, "mask-id", o->mask_id, MASK_TEXT, c->mask_id, FAMILY_MASK));
    TRY(resolve(&p.eos_id, s, "eos-id", o->eos_id, END_TEXT, c->eos_id, FAMILY_END));
    if (p.mask_id == p.eos_id)
        FAIL(BAD_INPUT, "mask and end token are both id %d: set --mask-id or --eos-id", p.mask_id);
    int size = s->world->size, total = o->batch_per_rank ? o->batch_per_rank * size : o->batch;
    s->slot_count = deal_evenly(total, size, s->world->rank);
    s->most_slots = deal_evenly(total, size, 0);
    s->rule = (executor_rule){.slot_count = s->slot_count, .max_tokens = c->max_positions};
    TRY(plan_rules(&s->rule.block, &s->rule.atlas, &p, c, s->slot_count));
    int32_t block = s->rule.block.block_size, longest = (c->max_positions + block - 1) / block;
    int64_t pages = o->kv_tokens ? o->kv_tokens / block : (int64_t)s->slot_count * ((1024 + block - 1) / block);
    if (o->kv_tokens && pages < longest)
        FAIL(BAD_INPUT, "--kv-tokens is %lld, want at least %d, one longest sequence (max_position_embeddings)",
             (long long)o->kv_tokens, longest * block);
    if (pages > (int64_t)s->slot_count * longest)
        pages = (int64_t)s->slot_count * longest;
    s->rule.page_count = (int32_t)(pages < longest && s->slot_count ? longest : pages);
out:
    return st;
}

/* auto: GPUs where this job can use them. */
static status check_device(stage *s)
{
    status st = OK;
    const options *o = s->options;
    TRY(device_choose(&s->cuda, s->world, o->device, o->transport != TRANSPORT_MPI && o->weights != WEIGHTS_F32));
    s->way = (transport_ask){.transport = o->transport,
                             .combine = o->combine == COMBINE_BF16 ? BF16 : F32,
                             .cuda = s->cuda,
                             .ranks = s->world->size,
                             .joins = transport_joins(),
                             .deadline = o->connect_timeout,
                             .timeout = o->timeout};
    TRY(transport_check(&s->way));
    if (s->cuda && o->weights == WEIGHTS_F32)
        FAIL(BAD_INPUT, "--weights f32 with --device cuda: matrices are BF16 there");
out:
    return st;
}

/* Of the rank that has most. */
static memory_plan plan_memory(const stage *s)
{
    memory_plan p;
    executor_rule most = s->rule;
    dtype activation = s->cuda ? BF16 : F32;
    most.slot_count = s->most_slots;
    memory_of(&p, &s->config, &most,
              &(memory_way){.tree = s->tree, .matrices = s->weight_rule.matrices, .activation = activation,
                            .transport = s->way.transport});
    double shadow = s->options->audit ? (double)audit_bytes(&most, &s->config, activation) : 0;
    p.activations += shadow;
    p.total += shadow;
    return p;
}

/* Is there room? opened: what is fixed was taken already. */
static status check_memory(const stage *s, double bytes, bool opened)
{
    memory_plan p = plan_memory(s);
    return memory_fits(&p, opened ? bytes + p.fixed : bytes);
}

status stage_check(stage *s, const options *o, world *w)
{
    status st = OK;
    *s = (stage){.options = o, .world = w};
    safetensors *files = NULL;
    dtype stored;
    double bytes;
    TRY(check_device(s));
    if (o->placement == PLACEMENT_TP)
        FAIL(BAD_INPUT, "--placement tp is not supported; want dp");
    TRY(model_config_open(&s->config, o->model));
    TRY(tokenizer_open(&s->tokenizer, o->model));
    TRY(chat_template_open(&s->chat, "llada2_moe", o->template_file));
    TRY(sum_tree_open(&s->tree, s->config.experts, s->config.groups, w->size));
    TRY(check_rules(s));
    TRY(safetensors_open(&files, o->model));
    s->checkpoint_hash = safetensors_hash(files);
    TRY(weights_dtype(&stored, o->model));
    s->weight_rule = (weight_rule){.matrices = s->cuda ? BF16 : F32, .tree = s->tree, .rank = w->rank};
    bool fits = (double)weights_bytes(&s->config, &s->weight_rule) <= WIDEN_MOST;
    if (!s->cuda && (o->weights == WEIGHTS_STORED || (o->weights == WEIGHTS_AUTO && !fits)))
        s->weight_rule.matrices = stored;
    TRY(weights_check(&s->config, o->model, &s->weight_rule));
    if (o->gpu_memory) {
        TRY(memory_bytes(&bytes, "gpu-memory", o->gpu_memory));
        TRY(check_memory(s, bytes, false));
    }
out:
    safetensors_close(files);
    return st;
}

status stage_device(stage *s)
{
    status st = device_open(&s->backend, s->world, s->cuda, s->options->threads);
    if (st == OK && s->heart)
        atomic_store(&s->heart->reached, s->backend->reached);
    return st;
}

/* Until the next stage the heart beats for transports. */
static void connecting(const stage *s, bool begins)
{
    if (s->heart)
        heartbeat_stage(s->heart, begins ? WATCH_CONNECT : WATCH_LOAD);
}

/* Without the number of rows. */
static lane_rule shape_of_rows(const stage *s)
{
    return (lane_rule){.hidden = s->config.hidden,
                       .top_k = s->config.top_k,
                       .tree = s->tree,
                       .payload = s->backend->activation,
                       .combine = s->way.combine};
}

status stage_join(stage *s)
{
    lane_rule lr = shape_of_rows(s);
    connecting(s, true);
    status st = transport_join(&s->joined, &s->way, &lr, s->world, s->backend);
    connecting(s, false);
    return st;
}

status stage_load(stage *s)
{
    status st = OK;
    if (s->backend->free_bytes > 0)
        TRY(check_memory(s, s->backend->free_bytes, true));
    s->weight_rule.heart = s->heart;
    TRY(weights_open(&s->weights, &s->config, s->options->model, s->backend, &s->weight_rule));
out:
    return st;
}

status stage_connect(stage *s)
{
    status st = OK;
    executor_rule most = s->rule;
    most.slot_count = s->most_slots;
    lane_rule lr = shape_of_rows(s);
    lr.max_rows = executor_max_rows(&most);
    connecting(s, true);
    TRY(transport_open(&s->lane, &s->way, &lr, s->backend, s->world, s->joined));
    connecting(s, false);
    TRY(executor_open(&s->executor, &s->rule, &s->config, s->weights, s->backend, s->lane));
    s->executor->heart = s->heart;
out:
    return st;
}

void stage_close(stage *s)
{
    executor_close(s->executor);
    if (s->lane)
        s->lane->close(s->lane);
    transport_leave(s->joined);
    weights_close(s->weights);
    if (s->backend)
        s->backend->close(s->backend);
    sum_tree_close(s->tree);
    chat_template_close(s->chat);
    tokenizer_close(s->tokenizer);
    model_config_close(&s->config);
    *s = (stage){0};
}

void stage_print(const stage *s, FILE *to)
{
    const model_config *c = &s->config;
    executor_rule r = s->rule;
    fprintf(to, "# %s: %d layers (%d sparse), hidden %d, %d experts, top %d\n", s->options->model, c->layers,
            c->layers - c->dense_layers, c->hidden, c->experts, c->top_k);
    fprintf(to, "%5s %12s %6s %12s %12s %12s %12s\n", "rank", "experts", "slots", "weights MB", "KV MB", "slots MB",
            "activ. MB");
    for (int rank = 0; rank < s->world->size; rank++) {
        int total = s->options->batch_per_rank ? s->options->batch_per_rank * s->world->size : s->options->batch;
        int32_t slot_count = deal_evenly(total, s->world->size, rank);
        weight_rule wr = s->weight_rule;
        wr.rank = rank;
        r.page_count =
            s->rule.slot_count ? (int32_t)((int64_t)s->rule.page_count * slot_count / s->rule.slot_count) : 0;
        r.slot_count = slot_count;
        executor_sizes z = executor_measure(&r, c, s->cuda ? BF16 : F32);
        if (s->options->audit)
            z.iteration += audit_bytes(&r, c, s->cuda ? BF16 : F32);
        char run[32];
        snprintf(run, sizeof run, "%d-%d", s->tree->rank_first[rank], s->tree->rank_first[rank + 1] - 1);
        fprintf(to, "%5d %12s %6d %12.1f %12.1f %12.1f %12.1f\n", rank, run, slot_count,
                (double)weights_bytes(c, &wr) / 1e6, (double)z.kv / 1e6, (double)z.slots / 1e6,
                (double)z.iteration / 1e6);
    }
    memory_plan p = plan_memory(s);
    fprintf(to, "# the rank that has most takes %.1f MB of its device: lane %.1f, scratch %.1f, CUDA itself %.1f, NCCL "
            "%.1f besides\n", p.total / 1e6, p.lane / 1e6, p.scratch / 1e6, p.fixed / 1e6, p.joined / 1e6);
}

json_t *stage_json(const stage *s)
{
    const block_rule *k = &s->rule.block;
    const atlas_rule *a = &s->rule.atlas;
    char hash[17];
    snprintf(hash, sizeof hash, "%016llx", (unsigned long long)s->checkpoint_hash);
    bool shares = plan_shares(k), half = s->way.combine == BF16 && s->world->size > 1;
    json_t *j = json_pack("{s:s, s:s, s:s, s:i, s:s, s:s, s:s, s:s}", "model", s->options->model, "model_config",
                          s->config.json ? s->config.json : "", "model_hash", hash, "mpi_size", s->world->size,
                          "device", s->cuda ? "cuda" : "cpu", "transport", s->lane ? s->lane->name : "",
                          "weights_dtype", dtype_name(s->weight_rule.matrices), "outputs_depend_on",
                          shares ? "batch, ranks" : half ? "ranks" : "checkpoint and settings alone");
    json_object_set_new(j, "rules",
                        json_pack("{s:i, s:i, s:i, s:i, s:f, s:i, s:i, s:i, s:b, s:b, s:i, s:f, s:f, s:f, s:i, s:i, s:s}",
                                  "block_size", k->block_size, "mask_id", k->mask_id, "eos_id", k->eos_id, "max_steps",
                                  k->max_steps, "threshold", (double)k->threshold, "refresh_every", k->refresh_every,
                                  "update_every", k->update_every, "cohort", shares ? k->cohort : 1, "restrict_experts",
                                  k->restrict_experts, "dense_lane", k->dense_lane, "atlas_extra", a->extra,
                                  "atlas_coverage", (double)a->coverage, "atlas_share", (double)a->covered_share,
                                  "atlas_mass", (double)a->mass_weight, "atlas_budget", a->budget, "atlas_step",
                                  a->repair_step, "combine", half ? "bf16" : "fp32"));
    return j;
}
