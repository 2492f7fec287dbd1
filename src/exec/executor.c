#include "src/exec/executor.h"

#include "src/base/fault.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int sparse_layers(const model_config *c)
{
    return c->layers - c->dense_layers;
}

static int32_t max_blocks(const executor_rule *r)
{
    return (r->max_tokens + r->block.block_size - 1) / r->block.block_size;
}

static int32_t cohorts(const executor_rule *r)
{
    return (r->slot_count + r->block.cohort - 1) / r->block.cohort;
}

int64_t executor_max_rows(const executor_rule *r)
{
    if (r->slot_count == 0)
        return 0;
    return (2 * (int64_t)r->slot_count + r->block.prefill_blocks) * r->block.block_size;
}

static void lay_kv(executor *x, arena *a)
{
    const model_config *c = x->config;
    int64_t rows = (int64_t)c->layers * x->rule.page_count * x->rule.block.block_size;
    int64_t width = (int64_t)c->kv_heads * c->head_dim;
    x->kv.page_count = x->rule.page_count;
    x->kv.k = arena_tensor(a, x->backend->activation, rows, width);
    x->kv.v = arena_tensor(a, x->backend->activation, rows, width);
}

static void lay_slots(executor *x, arena *a)
{
    const executor_rule *r = &x->rule;
    const model_config *c = x->config;
    int64_t n = r->slot_count, layers = sparse_layers(c), groups = cohorts(r);
    x->slots.slot_count = r->slot_count;
    x->slots.max_blocks = max_blocks(r);
    x->slots.slot = arena_tensor(a, U8, n, sizeof(slot));
    x->slots.token = arena_tensor(a, I32, n, (int64_t)max_blocks(r) * r->block.block_size);
    x->slots.page = arena_tensor(a, I32, n, max_blocks(r));
    x->slots.report = arena_tensor(a, U8, n, sizeof(slot_report));
    x->plans.cohort_count = (int32_t)groups;
    x->plans.layers = (int32_t)layers;
    x->plans.support = arena_tensor(a, I32, layers * groups, (c->experts + 31) / 32 + 1);
    x->plans.log = arena_tensor(a, U8, layers * groups, sizeof(layer_log));
    x->decoded_cache = arena_tensor(a, x->backend->activation, layers * n * r->block.block_size, c->hidden);
}

/* Then the list `fresh` names every row, and packing would be a copy. */
static bool always_fresh(const block_rule *k)
{
    return k->refresh_every == 1 || k->dense_lane;
}

static tensor counted(tensor t, const int32_t *used)
{
    t.used = used;
    return t;
}

static void lay_iteration(executor *x, arena *a)
{
    const executor_rule *r = &x->rule;
    const model_config *c = x->config;
    dtype t = x->backend->activation;
    int64_t rows = executor_max_rows(r), live = (int64_t)r->slot_count * r->block.block_size, h = c->hidden;
    int64_t wide = c->dense_inner > c->shared_inner ? c->dense_inner : c->shared_inner;
    batch *b = &x->batch;
    b->count = arena_tensor(a, I32, 4, 1);
    const int32_t *count = b->count.data;
    const int32_t *row_count = count, *span_count = count ? count + 1 : NULL, *fresh_count = count ? count + 2 : NULL,
                  *live_count = count ? count + 3 : NULL;
    b->token = counted(arena_tensor(a, I32, rows, 1), row_count);
    b->position = counted(arena_tensor(a, I32, rows, 1), row_count);
    b->slot = counted(arena_tensor(a, I32, rows, 1), row_count);
    b->role = counted(arena_tensor(a, I32, rows, 1), row_count);
    b->span = counted(arena_tensor(a, I32, rows / r->block.block_size, sizeof(span) / sizeof(int32_t)), span_count);
    b->fresh = counted(arena_tensor(a, I32, rows, 1), fresh_count);
    b->place = counted(arena_tensor(a, I32, rows, 1), row_count);
    b->live = counted(arena_tensor(a, I32, rows, 1), live_count);
    activations *v = &x->a;
    v->x = counted(arena_tensor(a, t, rows, h), row_count);
    v->h = counted(arena_tensor(a, t, rows, h), row_count);
    v->y = counted(arena_tensor(a, t, rows, h), row_count);
    v->qkv = counted(arena_tensor(a, t, rows, (int64_t)(c->heads + 2 * c->kv_heads) * c->head_dim), row_count);
    v->attended = counted(arena_tensor(a, t, rows, (int64_t)c->heads * c->head_dim), row_count);
    v->gate_up = counted(arena_tensor(a, t, rows, 2 * wide), row_count);
    v->inner = counted(arena_tensor(a, t, rows, wide), row_count);
    v->z = counted(arena_tensor(a, F32, rows, c->experts), fresh_count);
    v->ids = counted(arena_tensor(a, I32, rows, c->top_k), fresh_count);
    v->weights = counted(arena_tensor(a, F32, rows, c->top_k), fresh_count);
    v->x_fresh = counted(always_fresh(&r->block) ? v->h : arena_tensor(a, t, rows, h), fresh_count);
    v->y_fresh = counted(arena_tensor(a, F32, rows, h), fresh_count);
    v->n_live = counted(arena_tensor(a, t, live, h), live_count);
    v->best = counted(arena_tensor(a, U8, live, sizeof(head_best)), live_count);
}

/* Runs one layout over an empty arena: its bytes. */
static size_t measure(executor *x, void (*lay)(executor *, arena *))
{
    arena a = {0};
    lay(x, &a);
    return a.used;
}

executor_sizes executor_measure(const executor_rule *r, const model_config *c, dtype activation)
{
    backend b = {.activation = activation};
    executor x = {.rule = *r, .config = c, .backend = &b};
    return (executor_sizes){measure(&x, lay_kv), measure(&x, lay_slots), measure(&x, lay_iteration)};
}

static status take(executor *x, arena *a, const char *name, const char *flag, void (*lay)(executor *, arena *))
{
    status st = OK;
    void *slab = NULL;
    *a = (arena){.name = name, .bytes = measure(x, lay)};
    if (x->backend->reserve(x->backend, &slab, a->bytes) != OK)
        FAIL(FAILED, "no memory for %s (%.1f MB): lower %s (%s)", name, (double)a->bytes / 1e6, flag, status_message());
    a->slab = slab;
    lay(x, a);
out:
    return st;
}

/* An executor that holds no memory of the backend yet. */
static status prepare(executor **out, const executor_rule *r, const model_config *c, const weights *w, backend *b,
                      lane *l)
{
    status st = OK;
    executor *x = *out = calloc(1, sizeof *x);
    if (!x)
        FAIL(FAILED, "out of memory");
    x->rule = *r;
    x->config = c;
    x->weights = w;
    x->backend = b;
    x->lane = l;
    x->spoiled = -1;
    x->attention = (attention_rule){.heads = c->heads,
                                    .kv_heads = c->kv_heads,
                                    .head_dim = c->head_dim,
                                    .rotary_dim = c->rotary_dim,
                                    .theta = c->rope_theta,
                                    .eps = c->norm_eps,
                                    .qk_norm = c->qk_norm,
                                    .block_size = r->block.block_size};
    x->route = (route_rule){.experts = c->experts,
                            .top_k = c->top_k,
                            .groups = c->groups,
                            .top_groups = c->top_groups,
                            .scale = c->routed_scale,
                            .normalise = c->normalise};
out:
    return st;
}

status executor_open(executor **out, const executor_rule *r, const model_config *c, const weights *w, backend *b,
                     lane *l)
{
    status st = OK;
    executor *x = NULL;
    *out = NULL;
    TRY(prepare(&x, r, c, w, b, l));
    TRY(pages_open(&x->pages, r->page_count, r->slot_count, max_blocks(r)));
    TRY(take(x, &x->pool, "the KV pool", "--kv-tokens", lay_kv));
    TRY(take(x, &x->slot, "slots and decoded caches", "--batch", lay_slots));
    TRY(take(x, &x->iteration, "activations", "--batch or --prefill-blocks", lay_iteration));
    *out = x;
    x = NULL;
out:
    executor_close(x);
    return st;
}

status executor_open_shadow(executor **out, const executor *of)
{
    status st = OK;
    executor *x = NULL;
    executor_rule r = of->rule;
    *out = NULL;
    r.block.refresh_every = 1;
    r.block.restrict_experts = r.block.dense_lane = false;
    TRY(prepare(&x, &r, of->config, of->weights, of->backend, of->lane));
    TRY(take(x, &x->slot, "the slots of --audit", "--batch", lay_slots));
    TRY(take(x, &x->iteration, "the activations of --audit", "--batch or --prefill-blocks", lay_iteration));
    x->heart = of->heart;
    x->kv = of->kv;
    x->slots.page = of->slots.page;
    *out = x;
    x = NULL;
out:
    executor_close(x);
    return st;
}

void executor_close(executor *x)
{
    if (!x)
        return;
    pages_close(&x->pages);
    if (x->record)
        x->backend->forget(x->backend, x->record);
    arena *const all[] = {&x->pool, &x->slot, &x->iteration};
    for (int i = 0; i < 3; i++)
        if (all[i]->slab)
            x->backend->release(x->backend, all[i]->slab);
    free(x);
}

static int32_t blocks_of(const executor *x, int32_t end)
{
    return (end + x->rule.block.block_size - 1) / x->rule.block.block_size;
}

bool executor_has_room(const executor *x, int32_t end)
{
    return blocks_of(x, end) <= x->pages.free_count;
}

status executor_admit(executor *x, int index, const int32_t *prompt, int32_t prompt_tokens, int32_t end)
{
    status st = OK;
    const block_rule *r = &x->rule.block;
    int64_t width = x->slots.token.cols;
    int32_t *token = malloc(sizeof *token * (size_t)width);
    if (!token)
        FAIL(FAILED, "out of memory");
    memcpy(token, prompt, sizeof *token * (size_t)prompt_tokens);
    for (int64_t i = prompt_tokens; i < width; i++)
        token[i] = r->mask_id;
    pages_take(&x->pages, index, blocks_of(x, end));
    slot s = {.state = prompt_tokens < r->block_size ? SLOT_WAITING : SLOT_FILLING,
              .prompt_tokens = prompt_tokens,
              .end = end,
              .block = prompt_tokens / r->block_size,
              .cache_block = -1};
    tensor slot_row = tensor_rows(&x->slots.slot, index, 1), token_row = tensor_rows(&x->slots.token, index, 1),
           page_row = tensor_rows(&x->slots.page, index, 1);
    TRY(x->backend->upload(x->backend, &slot_row, &s, U8));
    TRY(x->backend->upload(x->backend, &token_row, token, I32));
    TRY(x->backend->upload(x->backend, &page_row, x->pages.held + (int64_t)index * x->pages.max_blocks, I32));
out:
    free(token);
    return st;
}

void executor_release(executor *x, int index)
{
    pages_release(&x->pages, index);
}

status executor_mark(executor *x, int layer, phase p)
{
    if (x->heart)
        heartbeat_phase(x->heart, layer, p);
    return x->backend->mark(x->backend, p);
}

#ifdef EPOCH_FAULTS
/* In host memory alone. */
static void spoil(executor *x)
{
    const int32_t *slot_of = x->batch.slot.data;
    if (x->spoiled < 0)
        return;
    for (int64_t i = 0; i < *x->batch.slot.used; i++)
        for (int64_t k = 0; slot_of[i] == x->spoiled && k < x->a.x.cols; k++)
            ((float *)x->a.x.data)[i * x->a.x.ld + k] = NAN;
}

/* Before every hot iteration: what a plan relies on no longer holds. `illegal` comes once a block: an answer's token is
 * masked again. */
static void upset_plans(executor *x)
{
    const char *what = fault_plan();
    const block_rule *k = &x->rule.block;
    for (int i = 0; what && i < x->rule.slot_count; i++) {
        slot *s = (slot *)x->slots.slot.data + i;
        if (s->state != SLOT_REFINING || s->iteration == 0)
            continue;
        if (strcmp(what, "miss") == 0)
            s->cache_block = -1;
        else if (strcmp(what, "version") == 0)
            s->cache_version = -1;
        else if (strcmp(what, "overdue") == 0)
            s->age = k->refresh_every;
        else if (strcmp(what, "illegal") == 0 && s->iteration == 2)
            for (int at = s->block * k->block_size, end = at + k->block_size; at < end; at++)
                if (at >= s->prompt_tokens && s->decoded >> at % k->block_size & 1) {
                    ((int32_t *)x->slots.token.data)[i * x->slots.token.ld + at] = k->mask_id;
                    break;
                }
    }
    for (int64_t r = 0; what && strcmp(what, "universe") == 0 && r < x->plans.support.rows; r++) {
        int32_t *support = (int32_t *)x->plans.support.data + r * x->plans.support.ld;
        support[x->plans.support.cols - 1] = support[x->plans.support.cols - 1] ? 2 : 0;
    }
}
#else
#define spoil(x) ((void)0)
#define upset_plans(x) ((void)0)
#endif

residual executor_residual(const executor *x, const tensor *norm, int layer, phase done)
{
    return (residual){.x = x->a.x,
                      .h = x->a.h,
                      .norm = norm,
                      .eps = x->config->norm_eps,
                      .through = layer * PHASES + (int32_t)done};
}

const tensor *executor_norm_after(const executor *x, int layer)
{
    return layer + 1 < x->config->layers ? &x->weights->layer[layer + 1].input_norm : &x->weights->norm;
}

status executor_begin(executor *x)
{
    status st = OK;
    backend *b = x->backend;
    activations *v = &x->a;
    TRY(b->rows(b, &x->batch, &x->slots, &x->plans, &x->rule.block));
    TRY(b->embed(b, &v->x, &x->weights->embed, &x->batch.token));
    spoil(x);
    TRY(b->norm(b, &v->h, &v->x, executor_norm_after(x, -1), x->config->norm_eps));
    TRY(executor_mark(x, -1, PHASE_DECODE));
out:
    return st;
}

status executor_end(executor *x)
{
    status st = OK;
    backend *b = x->backend;
    activations *v = &x->a;
    TRY(b->pack(b, &v->n_live, &v->h, &x->batch.live));
    TRY(b->head(b, &v->best, &v->n_live, &x->weights->head, x->rule.block.mask_id));
    TRY(executor_mark(x, -1, PHASE_HEAD));
    TRY(b->commit(b, &x->slots, &v->best, &x->batch, &x->plans, &x->rule.block));
    TRY(executor_mark(x, -1, PHASE_DECODE));
out:
    return st;
}

static status enqueue(void *of)
{
    status st = OK;
    executor *x = of;
    int sparse = 0;
    upset_plans(x);
    TRY(executor_begin(x));
    for (int l = 0; l < x->config->layers; l++) {
        TRY(attention_layer(x, l));
        if (x->weights->layer[l].sparse)
            TRY(moe_layer(x, l, sparse++));
        else
            TRY(dense_layer(x, l));
    }
    TRY(executor_end(x));
out:
    return st;
}

status executor_forward(executor *x)
{
    return x->lane->replays && !x->observer ? x->backend->repeat(x->backend, &x->record, enqueue, x) : enqueue(x);
}

status executor_reports(executor *x, slot_report *out)
{
    return x->backend->download(x->backend, out, &x->slots.report);
}

status executor_post(executor *x, int box)
{
    return x->backend->post(x->backend, box, &x->slots.report);
}

status executor_fetch(executor *x, slot_report *out, int box)
{
    return x->backend->fetch(x->backend, out, box);
}
