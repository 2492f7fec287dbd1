/* Attention of query blocks over the pages of their slot: softmax(q k^T / sqrt(d)) v, page by page in ascending order
 * with a running maximum, in fp32. A block has no mask inside. A task is one span and one key head; the query heads
 * that share it stand one below the other as `rows` = heads * B rows. Scores lie key by key, [B, rows], so that maxima
 * and sums run along rows without crossing them. The shapes depend on the model and the block size alone. */
#include "src/cpu/cpu.h"
#include "src/cpu/lanes.h"

#include <assert.h>

/* A task's scratch. */
typedef struct state {
    int rows, keys, d;
    float *q;                   /* [d, rows], divided by sqrt(d) */
    float *score;               /* [keys, rows] of a page */
    float *most, *sum, *shrink; /* [rows]: running maximum and sum, and what the last page shrank both sums by */
    float *o;                   /* [rows, d]: not yet divided by `sum` */
} state;

static size_t room_floats(const attention_rule *r)
{
    size_t rows = (size_t)(r->heads / r->kv_heads * r->block_size);
    return rows * (size_t)(2 * r->head_dim + r->block_size + 3);
}

/* Reads the queries of heads [head, head + rows / B) of a block. */
static void state_open(state *t, const tensor *qkv, const span *at, int head, const attention_rule *r, float *room)
{
    int rows = r->heads / r->kv_heads * r->block_size, d = r->head_dim;
    float scale = 1.0f / sqrtf((float)d);
    *t = (state){.rows = rows, .keys = r->block_size, .d = d, .q = room};
    t->score = t->q + d * rows;
    t->most = t->score + t->keys * rows;
    t->sum = t->most + rows;
    t->shrink = t->sum + rows;
    t->o = t->shrink + rows;
    for (int i = 0; i < rows; i++) {
        t->most[i] = -INFINITY;
        t->sum[i] = 0;
    }
    for (int first = 0; first < rows; first += r->block_size) { /* head by head, stores side by side */
        const float *restrict q = cpu_row(qkv, at->row) + (head + first / r->block_size) * d;
        for (int j = 0; j < d; j++) {
            float *restrict to = t->q + j * rows + first;
            for (int i = 0; i < r->block_size; i++)
                to[i] = q[i * qkv->ld + j] * scale;
        }
    }
}

/* score = e^(score - most); most, sum and shrink move on. */
static void soften(const state *t)
{
    int rows = t->rows;
    float *restrict most = t->most, *restrict sum = t->sum, *restrict shrink = t->shrink;
    for (int i = 0; i < rows; i++)
        shrink[i] = most[i];
    for (int j = 0; j < t->keys; j++) {
        const float *restrict x = t->score + j * rows;
        for (int i = 0; i < rows; i++)
            most[i] = x[i] > most[i] ? x[i] : most[i];
    }
    for (int i = 0; i < rows; i++) {
        shrink[i] = lane_exp(shrink[i] - most[i]);
        sum[i] *= shrink[i];
    }
    for (int j = 0; j < t->keys; j++) {
        float *restrict x = t->score + j * rows;
        for (int i = 0; i < rows; i++) {
            x[i] = lane_exp(x[i] - most[i]);
            sum[i] += x[i];
        }
    }
}

static void add_page(const state *t, const float *k, const float *v, int64_t ldkv, bool first)
{
    cpu_mix(t->score, t->rows, k, ldkv, t->q, t->rows, t->keys, t->rows, t->d, false);
    soften(t);
    for (int i = 0; !first && i < t->rows; i++) {
        float *o = t->o + i * t->d, shrink = t->shrink[i];
        for (int j = 0; shrink != 1 && j < t->d; j++)
            o[j] *= shrink;
    }
    cpu_mix_turned(t->o, t->d, t->score, t->rows, v, ldkv, t->rows, t->d, t->keys, !first);
}

typedef struct attend_task {
    const cpu *c;
    tensor *y;
    const tensor *qkv;
    const kv_pool *kv;
    int layer;
    const batch *in;
    const slots *s;
    const attention_rule *r;
} attend_task;

/* One task: a span and a key head. */
static void span_head(const attend_task *a, const span *at, int kv_head, float *room)
{
    const attention_rule *r = a->r;
    const kv_pool *kv = a->kv;
    int head = kv_head * (r->heads / r->kv_heads), d = r->head_dim;
    const int32_t *page = (const int32_t *)a->s->page.data + at->slot * a->s->page.ld;
    state t;
    state_open(&t, a->qkv, at, head, r, room);
    for (int block = 0; block <= at->block; block++) {
        int64_t row = (a->layer * (int64_t)kv->page_count + page[block]) * r->block_size;
        add_page(&t, cpu_row(&kv->k, row) + kv_head * d, cpu_row(&kv->v, row) + kv_head * d, kv->k.ld, block == 0);
    }
    for (int i = 0; i < t.rows; i++) {
        const float *restrict o = t.o + i * d;
        float *restrict to = cpu_row(a->y, at->row + i % r->block_size) + (head + i / r->block_size) * d;
        float scale = 1.0f / t.sum[i];
        for (int j = 0; j < d; j++)
            to[j] = o[j] * scale;
    }
}

static void span_heads(void *arg, int64_t from, int64_t to, int thread)
{
    const attend_task *a = arg;
    const span *at = a->in->span.data;
    for (int64_t t = from; t < to; t++)
        span_head(a, &at[t / a->r->kv_heads], (int)(t % a->r->kv_heads), cpu_own(a->c, thread));
}

status cpu_attend(backend *b, tensor *y, const tensor *qkv, const kv_pool *kv, int layer, const batch *in,
                  const slots *s, const attention_rule *r)
{
    status st = OK;
    cpu *c = cpu_of(b);
    int64_t spans = cpu_used(&in->span);
    attend_task a = {c, y, qkv, kv, layer, in, s, r};
    assert(y->type == F32 && qkv->type == F32 && kv->k.type == F32 && kv->k.ld == kv->v.ld);
    assert(y->cols == r->heads * r->head_dim && r->heads % r->kv_heads == 0);
    TRY(cpu_scratch(c, 0, room_floats(r) * sizeof(float)));
    double work = (double)spans * r->block_size * r->block_size * y->cols * 0.1; /* of one page each, at least */
    cpu_parallel(c, work, spans * r->kv_heads, span_heads, &a);
out:
    return st;
}
