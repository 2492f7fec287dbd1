#include "src/model/weights.h"

#include "src/model/safetensors.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK_BYTES = 8 << 20, NAME_BYTES = 160, MISSING_SHOWN = 3 };

/* A tensor's expected shape, each dimension with the config.json keys it follows from. */
typedef struct shape {
    int dims;
    int64_t n[3];
    const char *key[3];
} shape;

#define SHAPE1(a, ka) ((shape){1, {a}, {ka}})
#define SHAPE2(a, ka, b, kb) ((shape){2, {a, b}, {ka, kb}})
#define SHAPE3(a, ka, b, kb, c, kc) ((shape){3, {a, b, c}, {ka, kb, kc}})
#define HIDDEN "hidden_size"
#define EXPERTS "num_experts"
#define INNER "moe_intermediate_size"
#define SHARED "num_shared_experts, moe_intermediate_size"

/* Rows of a stored tensor that go to rows of one of ours. */
typedef struct copy {
    const stored_tensor *from;
    const char *data;
    const tensor *to;
    int64_t row, rows;
} copy;

/* One load: everything is checked and planned before anything is copied. */
typedef struct loading {
    const model_config *c;
    const weight_rule *r;
    safetensors *s;
    const char *dir;
    bool *known; /* by index of the stored tensor: it has a place in the model */
    copy *plan;
    int copy_count, copy_room;
    int missing;
    char first_missing[MISSING_SHOWN * (NAME_BYTES + 4)];
    char name[NAME_BYTES];
} loading;

/* ---- layout */

static void lay_layer(layer_weights *w, arena *a, const model_config *c, const weight_rule *r, bool sparse)
{
    const dtype m = r->matrices;
    const int64_t hidden = c->hidden, heads = c->heads, hd = c->head_dim;
    *w = (layer_weights){.sparse = sparse};
    w->input_norm = arena_tensor(a, F32, 1, hidden);
    w->qkv = arena_tensor(a, m, (heads + 2 * c->kv_heads) * hd, hidden);
    if (c->qk_norm) {
        w->q_norm = arena_tensor(a, F32, 1, hd);
        w->k_norm = arena_tensor(a, F32, 1, hd);
    }
    w->out = arena_tensor(a, m, hidden, heads * hd);
    w->post_norm = arena_tensor(a, F32, 1, hidden);
    if (!sparse) {
        w->gate_up = arena_tensor(a, m, 2 * (int64_t)c->dense_inner, hidden);
        w->down = arena_tensor(a, m, hidden, c->dense_inner);
        return;
    }
    w->router = arena_tensor(a, F32, c->experts, hidden);
    w->router_bias = arena_tensor(a, F32, 1, c->experts);
    expert_set *e = &w->experts;
    e->first = r->tree->rank_first[r->rank];
    e->count = r->tree->rank_first[r->rank + 1] - e->first;
    e->inner = c->expert_inner;
    e->tree = r->tree;
    e->rank = r->rank;
    e->gate_up = arena_tensor(a, m, (int64_t)e->count * 2 * e->inner, hidden);
    if (c->shared_inner) /* behind the experts, as if it were one more (cuda/experts.cu) */
        w->shared_gate_up = arena_tensor(a, m, 2 * (int64_t)c->shared_inner, hidden);
    e->down = arena_tensor(a, m, e->count * hidden, e->inner);
    if (c->shared_inner)
        w->shared_down = arena_tensor(a, m, hidden, c->shared_inner);
}

/* w->layer may be NULL: the bytes alone. */
static void lay(weights *w, arena *a, const model_config *c, const weight_rule *r)
{
    layer_weights unused;
    w->embed = arena_tensor(a, r->matrices, c->vocab, c->hidden);
    for (int l = 0; l < c->layers; l++)
        lay_layer(w->layer ? &w->layer[l] : &unused, a, c, r, l >= c->dense_layers);
    w->norm = arena_tensor(a, F32, 1, c->hidden);
    w->head = c->tied_head ? w->embed : arena_tensor(a, r->matrices, c->vocab, c->hidden);
}

size_t weights_bytes(const model_config *c, const weight_rule *r)
{
    weights w = {0};
    arena a = {.name = "weights"};
    lay(&w, &a, c, r);
    return a.used;
}

/* ---- checks and plan */

static const char *layer_name(loading *g, int layer, const char *tail)
{
    snprintf(g->name, sizeof g->name, "model.layers.%d.%s", layer, tail);
    return g->name;
}

static bool has(loading *g, int layer, const char *tail)
{
    return safetensors_find(g->s, layer_name(g, layer, tail)) != NULL;
}

static void shape_text(char *text, size_t room, int dims, const int64_t *n)
{
    size_t at = 0;
    text[0] = '\0';
    for (int d = 0; d < dims; d++)
        at += (size_t)snprintf(text + at, room - at, "%s%lld", d ? "," : "", (long long)n[d]);
}

/* The stored tensor of that name, known and checked; NULL where it is missing, which is counted. */
static status check(loading *g, const stored_tensor **out, const char *name, shape want)
{
    status st = OK;
    const stored_tensor *t = safetensors_find(g->s, name);
    *out = t;
    if (!t) {
        size_t at = strlen(g->first_missing);
        if (g->missing++ < MISSING_SHOWN)
            snprintf(g->first_missing + at, sizeof g->first_missing - at, "%s\"%s\"", at ? ", " : "", name);
        return OK;
    }
    g->known[t - safetensors_at(g->s, 0)] = true;
    if (t->type != F32 && t->type != F16 && t->type != BF16)
        FAIL(BAD_INPUT, "%s: tensor \"%s\" is %s, want F32, F16 or BF16", t->file, name, dtype_name(t->type));
    bool same = t->dims == want.dims;
    char keys[160] = "", found[96], wanted[96];
    for (int d = 0; d < want.dims; d++)
        if (t->dims != want.dims || t->shape[d] != want.n[d]) {
            size_t at = strlen(keys);
            same = false;
            snprintf(keys + at, sizeof keys - at, "%s%s", at ? ", " : "", want.key[d]);
        }
    shape_text(found, sizeof found, t->dims, t->shape);
    shape_text(wanted, sizeof wanted, want.dims, want.n);
    if (!same)
        FAIL(BAD_INPUT, "%s: tensor \"%s\" is [%s], want [%s] (%s in config.json)", t->file, name, found, wanted, keys);
out:
    return st;
}

/* Plans rows [from_row, from_row + rows) of t, seen as rows of to's width, into to at `row`. */
static status place(loading *g, const stored_tensor *t, int64_t from_row, const tensor *to, int64_t row, int64_t rows)
{
    status st = OK;
    if (!t)
        return OK;
    if (g->copy_count == g->copy_room) {
        int room = g->copy_room ? 2 * g->copy_room : 1024;
        copy *p = realloc(g->plan, (size_t)room * sizeof *p);
        if (!p)
            FAIL(FAILED, "out of memory");
        g->plan = p;
        g->copy_room = room;
    }
    const char *data = (const char *)t->data + (size_t)(from_row * to->cols) * dtype_bytes(t->type);
    g->plan[g->copy_count++] = (copy){t, data, to, row, rows};
out:
    return st;
}

/* A stored tensor that becomes rows of ours from `row` on. */
static status take(loading *g, const char *name, shape want, const tensor *to, int64_t row)
{
    status st = OK;
    const stored_tensor *t;
    TRY(check(g, &t, name, want));
    TRY(place(g, t, 0, to, row, want.dims == 1 ? 1 : want.n[0]));
out:
    return st;
}

/* An MLP's three matrices under `prefix`, gate and up joined. */
static status plan_mlp(loading *g, int l, const char *prefix, int64_t inner, const char *key, const tensor *gate_up,
                       const tensor *down)
{
    status st = OK;
    const int64_t hidden = g->c->hidden;
    char tail[96];
    snprintf(tail, sizeof tail, "%s.gate_proj.weight", prefix);
    TRY(take(g, layer_name(g, l, tail), SHAPE2(inner, key, hidden, HIDDEN), gate_up, 0));
    snprintf(tail, sizeof tail, "%s.up_proj.weight", prefix);
    TRY(take(g, layer_name(g, l, tail), SHAPE2(inner, key, hidden, HIDDEN), gate_up, inner));
    snprintf(tail, sizeof tail, "%s.down_proj.weight", prefix);
    TRY(take(g, layer_name(g, l, tail), SHAPE2(hidden, HIDDEN, inner, key), down, 0));
out:
    return st;
}

/* One matrix a expert: mlp.experts.e.gate_proj.weight and so on. All are checked, this rank's are planned. */
static status plan_single_experts(loading *g, int l, const expert_set *e)
{
    status st = OK;
    static const char *const part[] = {"gate", "up", "down"};
    const int64_t hidden = g->c->hidden, inner = e->inner;
    const stored_tensor *t;
    char tail[96];
    for (int id = 0; id < g->c->experts; id++)
        for (int p = 0; p < 3; p++) {
            int64_t local = id - e->first;
            snprintf(tail, sizeof tail, "mlp.experts.%d.%s_proj.weight", id, part[p]);
            TRY(check(g, &t, layer_name(g, l, tail),
                      p < 2 ? SHAPE2(inner, INNER, hidden, HIDDEN) : SHAPE2(hidden, HIDDEN, inner, INNER)));
            if (local < 0 || local >= e->count)
                continue;
            if (p < 2)
                TRY(place(g, t, 0, &e->gate_up, (2 * local + p) * inner, inner));
            else
                TRY(place(g, t, 0, &e->down, local * hidden, hidden));
        }
out:
    return st;
}

static status plan_experts(loading *g, int l, const expert_set *e)
{
    status st = OK;
    const int64_t hidden = g->c->hidden, inner = e->inner, experts = g->c->experts;
    const stored_tensor *gate, *up, *down;
    bool merged = has(g, l, "mlp.w1") || has(g, l, "mlp.w2"), stacked = has(g, l, "mlp.experts.gate_proj");
    if (!merged && !stacked) {
        TRY(plan_single_experts(g, l, e));
        return OK;
    }
    if (merged) {
        TRY(check(g, &gate, layer_name(g, l, "mlp.w1"), SHAPE3(experts, EXPERTS, 2 * inner, INNER, hidden, HIDDEN)));
        TRY(place(g, gate, e->first * 2 * inner, &e->gate_up, 0, e->count * 2 * inner));
    } else {
        TRY(check(g, &gate, layer_name(g, l, "mlp.experts.gate_proj"),
                  SHAPE3(experts, EXPERTS, inner, INNER, hidden, HIDDEN)));
        TRY(check(g, &up, layer_name(g, l, "mlp.experts.up_proj"),
                  SHAPE3(experts, EXPERTS, inner, INNER, hidden, HIDDEN)));
        for (int64_t i = 0; i < e->count; i++) {
            TRY(place(g, gate, (e->first + i) * inner, &e->gate_up, 2 * i * inner, inner));
            TRY(place(g, up, (e->first + i) * inner, &e->gate_up, (2 * i + 1) * inner, inner));
        }
    }
    TRY(check(g, &down, layer_name(g, l, merged ? "mlp.w2" : "mlp.experts.down_proj"),
              SHAPE3(experts, EXPERTS, hidden, HIDDEN, inner, INNER)));
    TRY(place(g, down, e->first * hidden, &e->down, 0, e->count * hidden));
out:
    return st;
}

static status plan_layer(loading *g, int l, const layer_weights *w)
{
    status st = OK;
    const model_config *c = g->c;
    const int64_t hidden = c->hidden, heads = c->heads, hd = c->head_dim;
    const shape norm = SHAPE1(hidden, HIDDEN), head_norm = SHAPE1(hd, "head_dim");
    TRY(take(g, layer_name(g, l, "input_layernorm.weight"), norm, &w->input_norm, 0));
    TRY(take(
        g, layer_name(g, l, "attention.query_key_value.weight"),
        SHAPE2((heads + 2 * c->kv_heads) * hd, "num_attention_heads, num_key_value_heads, head_dim", hidden, HIDDEN),
        &w->qkv, 0));
    if (c->qk_norm) {
        TRY(take(g, layer_name(g, l, "attention.query_layernorm.weight"), head_norm, &w->q_norm, 0));
        TRY(take(g, layer_name(g, l, "attention.key_layernorm.weight"), head_norm, &w->k_norm, 0));
    }
    TRY(take(g, layer_name(g, l, "attention.dense.weight"),
             SHAPE2(hidden, HIDDEN, heads * hd, "num_attention_heads, head_dim"), &w->out, 0));
    TRY(take(g, layer_name(g, l, "post_attention_layernorm.weight"), norm, &w->post_norm, 0));
    if (!w->sparse) {
        TRY(plan_mlp(g, l, "mlp", c->dense_inner, "intermediate_size", &w->gate_up, &w->down));
        return OK;
    }
    TRY(take(g, layer_name(g, l, "mlp.gate.weight"), SHAPE2(c->experts, EXPERTS, hidden, HIDDEN), &w->router, 0));
    if (c->expert_bias) {
        const char *tail =
            has(g, l, "mlp.gate.e_score_correction_bias") ? "mlp.gate.e_score_correction_bias" : "mlp.gate.expert_bias";
        TRY(take(g, layer_name(g, l, tail), SHAPE1(c->experts, EXPERTS), &w->router_bias, 0));
    }
    if (c->shared_inner)
        TRY(plan_mlp(g, l, "mlp.shared_experts", c->shared_inner, SHARED, &w->shared_gate_up, &w->shared_down));
    TRY(plan_experts(g, l, &w->experts));
out:
    return st;
}

static status plan(loading *g, const weights *w)
{
    status st = OK;
    const model_config *c = g->c;
    const shape table = SHAPE2(c->vocab, "vocab_size", c->hidden, HIDDEN);
    TRY(take(g, "model.word_embeddings.weight", table, &w->embed, 0));
    for (int l = 0; l < c->layers; l++)
        TRY(plan_layer(g, l, &w->layer[l]));
    TRY(take(g, "model.norm.weight", SHAPE1(c->hidden, HIDDEN), &w->norm, 0));
    if (!c->tied_head)
        TRY(take(g, "lm_head.weight", table, &w->head, 0));
    if (g->missing > MISSING_SHOWN)
        FAIL(BAD_INPUT, "%s: tensors %s and %d more are missing", g->dir, g->first_missing, g->missing - MISSING_SHOWN);
    if (g->missing > 0)
        FAIL(BAD_INPUT, "%s: tensor%s %s %s missing", g->dir, g->missing > 1 ? "s" : "", g->first_missing,
             g->missing > 1 ? "are" : "is");
    for (int i = 0; i < safetensors_count(g->s); i++) {
        const stored_tensor *t = safetensors_at(g->s, i);
        if (!g->known[i] && !strstr(t->name, "inv_freq"))
            FAIL(BAD_INPUT, "%s: tensor \"%s\" is not part of the model that config.json describes", t->file, t->name);
    }
out:
    return st;
}

/* ---- copying */

static int by_address(const void *a, const void *b)
{
    const char *s = ((const copy *)a)->data, *t = ((const copy *)b)->data;
    return (s > t) - (s < t);
}

/* In the order of the files, piece by piece, so that few of their pages are resident at a time. */
static status copy_all(loading *g, backend *b)
{
    status st = OK;
    qsort(g->plan, (size_t)g->copy_count, sizeof *g->plan, by_address);
    for (int i = 0; i < g->copy_count; i++) {
        const copy *p = &g->plan[i];
        size_t row_bytes = (size_t)p->to->cols * dtype_bytes(p->from->type);
        int64_t step = (int64_t)(CHUNK_BYTES / row_bytes) + 1;
        for (int64_t at = 0; at < p->rows; at += step) {
            int64_t rows = p->rows - at < step ? p->rows - at : step;
            tensor to = tensor_rows(p->to, p->row + at, rows);
            const char *from = p->data + (size_t)at * row_bytes;
            TRY(b->upload(b, &to, from, p->from->type));
            safetensors_done(g->s, from, (size_t)rows * row_bytes);
            if (g->r->heart)
                heartbeat_beat(g->r->heart);
        }
    }
out:
    return st;
}

/* Reads the headers, measures this rank's share and checks every tensor; nothing of the backend's memory is taken. */
static status prepare(loading *g, weights **out)
{
    status st = OK;
    weights *w = NULL;
    assert(g->r->tree->experts == g->c->experts);
    TRY(safetensors_open(&g->s, g->dir));
    g->known = calloc((size_t)safetensors_count(g->s) + 1, sizeof *g->known);
    *out = w = calloc(1, sizeof *w);
    if (!g->known || !w)
        FAIL(FAILED, "out of memory");
    w->layer_count = g->c->layers;
    w->layer = calloc((size_t)g->c->layers, sizeof *w->layer);
    if (!w->layer)
        FAIL(FAILED, "out of memory");
    w->arena = (arena){.name = "weights"};
    lay(w, &w->arena, g->c, g->r);
    TRY(plan(g, w));
    w->bytes = w->arena.used;
out:
    return st;
}

static void end_loading(loading *g)
{
    safetensors_close(g->s);
    free(g->known);
    free(g->plan);
}

status weights_check(const model_config *c, const char *dir, const weight_rule *r)
{
    weights *w = NULL;
    loading g = {.c = c, .r = r, .dir = dir};
    status st = prepare(&g, &w);
    weights_close(w);
    end_loading(&g);
    return st;
}

status weights_open(weights **out, const model_config *c, const char *dir, backend *b, const weight_rule *r)
{
    status st = OK;
    weights *w = NULL;
    loading g = {.c = c, .r = r, .dir = dir};
    void *slab;
    *out = NULL;
    TRY(prepare(&g, &w));
    st = b->reserve(b, &slab, w->bytes);
    if (st != OK)
        FAIL(st, "weights: no room for this rank's %zu bytes (on more ranks each holds fewer experts): %s", w->bytes,
             status_message());
    w->owner = b;
    w->arena = (arena){.name = "weights", .slab = slab, .bytes = w->bytes};
    lay(w, &w->arena, c, r);
    TRY(copy_all(&g, b));
    *out = w;
    w = NULL;
out:
    weights_close(w);
    end_loading(&g);
    return st;
}

/* ---- without a checkpoint */

typedef struct making {
    backend *b;
    uint64_t seed; /* counts up with each matrix */
    status st;     /* the first failure */
} making;

/* Uniform numbers of variance 1 / cols, or in [-high, high) where high > 0. */
static void make(making *m, const tensor *t, float high)
{
    if (m->st == OK && t->data)
        m->st = m->b->random(m->b, t, m->seed++, high > 0 ? high : sqrtf(3.0f / (float)t->cols));
}

static void make_ones(making *m, const tensor *t)
{
    if (m->st != OK || !t->data)
        return;
    float *one = malloc((size_t)t->cols * sizeof *one);
    if (!one) {
        m->st = status_fail(FAILED, __FILE__, __LINE__, "out of memory");
        return;
    }
    for (int64_t i = 0; i < t->cols; i++)
        one[i] = 1;
    m->st = m->b->upload(m->b, t, one, F32);
    free(one);
}

status weights_random(weights **out, const model_config *c, backend *b, const weight_rule *r, uint64_t seed, float skew)
{
    status st = OK;
    making m = {.b = b, .seed = seed << 32};
    weights *w = calloc(1, sizeof *w);
    void *slab;
    *out = NULL;
    if (!w || !(w->layer = calloc((size_t)c->layers, sizeof *w->layer)))
        FAIL(FAILED, "out of memory");
    w->layer_count = c->layers;
    w->bytes = weights_bytes(c, r);
    if (b->reserve(b, &slab, w->bytes) != OK)
        FAIL(FAILED, "weights: no room for this rank's %.1f GB (more ranks share them; --layers takes fewer): %s",
             (double)w->bytes / 1e9, status_message());
    w->owner = b;
    w->arena = (arena){.name = "weights", .slab = slab, .bytes = w->bytes};
    lay(w, &w->arena, c, r);
    make(&m, &w->embed, 1);
    make_ones(&m, &w->norm);
    make(&m, &w->head, 0);
    for (int l = 0; l < c->layers; l++) {
        layer_weights *x = &w->layer[l];
        const tensor *norms[] = {&x->input_norm, &x->post_norm, &x->q_norm, &x->k_norm};
        const tensor *matrices[] = {&x->qkv,    &x->out,            &x->gate_up,     &x->down,           &x->router,
                                    &x->shared_gate_up, &x->shared_down, &x->experts.gate_up, &x->experts.down};
        for (size_t i = 0; i < sizeof norms / sizeof *norms; i++)
            make_ones(&m, norms[i]);
        for (size_t i = 0; i < sizeof matrices / sizeof *matrices; i++)
            make(&m, matrices[i], 0);
        if (skew > 0)
            make(&m, &x->router_bias, skew);
    }
    TRY(m.st);
    *out = w;
    w = NULL;
out:
    weights_close(w);
    return st;
}

void weights_close(weights *w)
{
    if (!w)
        return;
    if (w->arena.slab)
        w->owner->release(w->owner, w->arena.slab);
    free(w->layer);
    free(w);
}

status weights_dtype(dtype *out, const char *dir)
{
    status st = OK;
    static const dtype known[] = {BF16, F16, F32};
    safetensors *s = NULL;
    double elements[3] = {0};
    int best = 0;
    TRY(safetensors_open(&s, dir));
    for (int i = 0; i < safetensors_count(s); i++) {
        const stored_tensor *t = safetensors_at(s, i);
        for (int k = 0; k < 3; k++)
            if (t->dims > 1 && t->type == known[k])
                elements[k] += (double)t->bytes / (double)dtype_bytes(t->type);
    }
    for (int k = 1; k < 3; k++)
        if (elements[k] > elements[best])
            best = k;
    if (elements[best] == 0)
        FAIL(BAD_INPUT, "%s: no matrix in F32, F16 or BF16", dir);
    *out = known[best];
out:
    safetensors_close(s);
    return st;
}
