/* Attention of query blocks over the pages of their slot: softmax(q k^T / sqrt(d)) v, page by page in ascending order
 * with a running maximum, in fp32. A block has no mask inside. A task is one span and one key head: a page's keys and
 * values serve all query heads that share it. The shapes depend on the model and the block size alone. */
#include "src/cpu/cpu.h"
#include "src/cpu/lanes.h"

#include <assert.h>

/* Floats of scratch: scores of a page [B, B]; a maximum and a sum, and a result, for each row of each head. */
static size_t room_floats(const attention_rule *r)
{
    size_t b = (size_t)r->block_size, group = (size_t)(r->heads / r->kv_heads);
    return b * b + group * b * (2 + (size_t)r->head_dim);
}

/* One head's query block q [B, d] over one page; o [B, d] += softmax-weighted v, not yet divided by sum[]. */
static void page_step(float *o, float *most, float *sum, float *score, const float *q, int64_t ldq, const float *k,
                      const float *v, int64_t ldkv, bool first, const attention_rule *r)
{
    int rows = r->block_size, d = r->head_dim;
    cpu_product(score, rows, q, ldq, k, ldkv, rows, rows, d, 1.0f / sqrtf((float)d));
    for (int i = 0; i < rows; i++) {
        float *x = score + i * rows, peak = lane_max(x, rows);
        if (first) {
            most[i] = peak;
            sum[i] = 0;
        } else if (peak > most[i]) {
            float shrink = lane_exp(most[i] - peak);
            most[i] = peak;
            sum[i] *= shrink;
            for (int j = 0; j < d; j++)
                o[i * d + j] *= shrink;
        }
        sum[i] += lane_softmax(x, rows, most[i]);
    }
    cpu_mix(o, d, score, rows, v, ldkv, rows, d, rows, !first);
}

static void span_head(tensor *y, const tensor *qkv, const kv_pool *kv, int layer, const span *at, int head,
                      const slots *s, const attention_rule *r, float *room)
{
    int rows = r->block_size, d = r->head_dim, group = r->heads / r->kv_heads;
    float *score = room, *most = score + rows * rows, *sum = most + group * rows, *o = sum + group * rows;
    const int32_t *page = (const int32_t *)s->page.data + at->slot * s->page.ld;
    for (int block = 0; block <= at->block; block++) {
        int64_t row = (layer * (int64_t)kv->page_count + page[block]) * rows;
        const float *k = cpu_row(&kv->k, row) + head * d, *v = cpu_row(&kv->v, row) + head * d;
        for (int g = 0; g < group; g++)
            page_step(o + g * rows * d, most + g * rows, sum + g * rows, score,
                      cpu_row(qkv, at->row) + (head * group + g) * d, qkv->ld, k, v, kv->k.ld, block == 0, r);
    }
    for (int g = 0; g < group; g++)
        for (int i = 0; i < rows; i++) {
            float scale = 1.0f / sum[g * rows + i], *to = cpu_row(y, at->row + i) + (head * group + g) * d;
            for (int j = 0; j < d; j++)
                to[j] = o[(g * rows + i) * d + j] * scale;
        }
}

status cpu_attend(backend *b, tensor *y, const tensor *qkv, const kv_pool *kv, int layer, const batch *in,
                  const slots *s, const attention_rule *r)
{
    status st = OK;
    cpu *c = cpu_of(b);
    int64_t spans = cpu_used(&in->span);
    const span *at = in->span.data;
    assert(y->type == F32 && qkv->type == F32 && kv->k.type == F32 && kv->k.ld == kv->v.ld);
    assert(y->cols == r->heads * r->head_dim && r->heads % r->kv_heads == 0);
    TRY(cpu_scratch(c, 0, room_floats(r) * sizeof(float)));
#pragma omp parallel for schedule(dynamic) num_threads(spans > 0 ? c->threads : 1)
    for (int64_t t = 0; t < spans * r->kv_heads; t++)
        span_head(y, qkv, kv, layer, &at[t / r->kv_heads], (int)(t % r->kv_heads), s, r, cpu_own(c));
out:
    return st;
}
