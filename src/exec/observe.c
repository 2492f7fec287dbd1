#include "src/exec/observe.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS = SUM_TREE_EXPERTS / 32 };

typedef struct expert_mask {
    uint32_t word[WORDS];
} expert_mask;

struct observer {
    executor *of;
    observation sums;
    arena host;
    expert_mask *touched, *now; /* [layers, slots]: in the iteration before; [slots]: in this one */
    float *reference;           /* [layers, slots, B, H]: what a row's output is compared with */
    int32_t *since;             /* [layers, slots, B]: the iteration it is of */
    /* of this forward */
    slot *slot;                                  /* [slots] */
    int32_t *slot_of, *position, *role, *fresh;  /* [rows] */
    int32_t counts[4];                           /* as in struct batch */
    int32_t *ids;                                /* [fresh, K] */
    float *y;                                    /* [fresh, H] */
};

static void lay_host(observer *o, arena *m)
{
    const executor *x = o->of;
    size_t layers = (size_t)x->plans.layers, n = (size_t)x->slots.slot_count, rows = (size_t)x->batch.slot.rows,
           block = (size_t)x->rule.block.block_size, hidden = (size_t)x->config->hidden;
    o->touched = arena_take(m, layers * n * sizeof *o->touched);
    o->now = arena_take(m, n * sizeof *o->now);
    o->reference = arena_take(m, layers * n * block * hidden * sizeof *o->reference);
    o->since = arena_take(m, layers * n * block * sizeof *o->since);
    o->slot = arena_take(m, n * sizeof *o->slot);
    o->slot_of = arena_take(m, rows * sizeof *o->slot_of);
    o->position = arena_take(m, rows * sizeof *o->position);
    o->role = arena_take(m, rows * sizeof *o->role);
    o->fresh = arena_take(m, rows * sizeof *o->fresh);
    o->ids = arena_take(m, rows * (size_t)x->config->top_k * sizeof *o->ids);
    o->y = arena_take(m, rows * hidden * sizeof *o->y);
}

status observer_open(observer **out, executor *x)
{
    status st = OK;
    *out = NULL;
    observer *o = calloc(1, sizeof *o);
    if (!o)
        FAIL(FAILED, "out of memory");
    o->of = x;
    lay_host(o, &o->host);
    o->host = (arena){.name = "observer", .bytes = o->host.used, .slab = malloc(o->host.used + 1)};
    if (!o->host.slab)
        FAIL(FAILED, "out of memory for --observe: %zu bytes wanted; a smaller --batch needs less", o->host.bytes);
    lay_host(o, &o->host);
    *out = x->observer = o;
    o = NULL;
out:
    observer_close(o);
    return st;
}

void observer_close(observer *o)
{
    if (!o)
        return;
    o->of->observer = NULL;
    free(o->host.slab);
    free(o);
}

const observation *observer_sums(const observer *o)
{
    return &o->sums;
}

/* What all layers of a forward share. */
static status begin(observer *o, const executor *x)
{
    status st = OK;
    backend *b = x->backend;
    TRY(b->download(b, o->counts, &x->batch.count));
    TRY(b->download(b, o->slot, &x->slots.slot));
    TRY(b->download(b, o->slot_of, &x->batch.slot));
    TRY(b->download(b, o->position, &x->batch.position));
    TRY(b->download(b, o->role, &x->batch.role));
    TRY(b->download(b, o->fresh, &x->batch.fresh));
out:
    return st;
}

static void add_cosine(observer *o, int kind, int age, const float *a, const float *b, int64_t n)
{
    double ab = 0, aa = 0, bb = 0;
    for (int64_t i = 0; i < n; i++) {
        ab += (double)a[i] * b[i];
        aa += (double)a[i] * a[i];
        bb += (double)b[i] * b[i];
    }
    if (age >= OBSERVE_STEPS || !(aa > 0 && bb > 0))
        return;
    o->sums.cosine_count[kind][age]++;
    o->sums.cosine_sum[kind][age] += ab / sqrt(aa * bb);
}

/* Overlap with the iteration before; then this one is the one before. */
static void add_overlap(observer *o, int iteration, expert_mask *before, const expert_mask *now)
{
    int both = 0, any = 0;
    for (int w = 0; w < WORDS; w++) {
        both += __builtin_popcount(before->word[w] & now->word[w]);
        any += __builtin_popcount(before->word[w] | now->word[w]);
    }
    *before = *now;
    if (iteration == 0 || iteration >= OBSERVE_STEPS || any == 0)
        return;
    o->sums.overlap_count[iteration]++;
    o->sums.overlap_sum[iteration] += (double)both / any;
}

status observe_layer(observer *o, const executor *x, int sparse)
{
    status st = OK;
    int32_t n = x->slots.slot_count, block = x->rule.block.block_size, top_k = x->config->top_k;
    int64_t hidden = x->config->hidden;
    if (sparse == 0)
        TRY(begin(o, x));
    tensor ids = tensor_rows(&x->a.ids, 0, o->counts[2]), y = tensor_rows(&x->a.y_fresh, 0, o->counts[2]);
    TRY(x->backend->download(x->backend, o->ids, &ids));
    TRY(x->backend->download(x->backend, o->y, &y));
    if (n > 0)
        memset(o->now, 0, (size_t)n * sizeof *o->now);
    for (int32_t i = 0; i < o->counts[2]; i++) {
        int32_t row = o->fresh[i], at = o->position[row] % block, of = o->slot_of[row];
        const slot *s = &o->slot[of];
        if (o->role[row] == ROW_SEALING || !(s->fresh >> at & 1))
            continue;
        for (int j = 0; j < top_k && o->ids[(int64_t)i * top_k + j] >= 0; j++) {
            int32_t e = o->ids[(int64_t)i * top_k + j];
            o->now[of].word[e / 32] |= 1u << (e % 32);
        }
        int64_t place = ((int64_t)sparse * n + of) * block + at;
        float *reference = o->reference + place * hidden;
        const float *given = o->y + i * hidden;
        if (s->iteration == 0 || o->role[row] == ROW_NEW) {
            memcpy(reference, given, (size_t)hidden * sizeof *given);
            o->since[place] = s->iteration;
        } else {
            add_cosine(o, o->role[row] == ROW_LIVE, s->iteration - o->since[place], reference, given, hidden);
        }
    }
    for (int32_t i = 0; i < n; i++)
        if (o->slot[i].path >= PATH_COLD)
            add_overlap(o, o->slot[i].iteration, &o->touched[(int64_t)sparse * n + i], &o->now[i]);
out:
    return st;
}
