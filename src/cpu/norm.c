/* RMSNorm, and the rotation of queries and keys (half-split pairs, MODEL's "Rotary"). */
#include "src/cpu/cpu.h"
#include "src/cpu/lanes.h"

#include <assert.h>
#include <stdlib.h>

/* y = x / sqrt(mean(x^2) + eps) * w; y may be x */
static void norm_row(float *y, const float *x, const float *w, int64_t n, float eps)
{
    float scale = 1.0f / sqrtf(lane_squares(x, n) / (float)n + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = x[i] * scale * w[i];
}

status cpu_norm(backend *b, tensor *y, const tensor *x, const tensor *w, float eps)
{
    int64_t n = cpu_used(x);
    assert(x->type == F32 && y->type == F32 && w->type == F32 && w->cols == x->cols && y->rows >= n);
#pragma omp parallel for num_threads(cpu_threads(cpu_of(b), (double)n * (double)x->cols))
    for (int64_t i = 0; i < n; i++)
        norm_row(cpu_row(y, i), cpu_row(x, i), w->data, x->cols, eps);
    return OK;
}

/* cos and sin of positions 0 .. count - 1: computed once, since all layers and heads use the same. */
static status angles(cpu *c, int32_t count, const attention_rule *r)
{
    status st = OK;
    int half = r->rotary_dim / 2;
    if (c->angle_dim == r->rotary_dim && c->angle_theta == r->theta && count <= c->angle_count)
        return OK;
    free(c->angles.data);
    c->angles.bytes = 0;
    c->angle_count = 0;
    c->angles.data = malloc((size_t)count * (size_t)r->rotary_dim * sizeof(float) + 1);
    if (!c->angles.data)
        FAIL(FAILED, "out of memory: rotary angles of %d positions", count);
    float *at = c->angles.data;
    for (int32_t p = 0; p < count; p++, at += r->rotary_dim)
        for (int j = 0; j < half; j++) {
            float angle = (float)p * powf(r->theta, -2.0f * (float)j / (float)r->rotary_dim);
            at[j] = cosf(angle);
            at[half + j] = sinf(angle);
        }
    c->angle_count = count;
    c->angle_dim = r->rotary_dim;
    c->angle_theta = r->theta;
out:
    return st;
}

/* One head: y = rotated norm of x; y may be x. weight NULL: no norm. */
static void rotate_head(float *y, const float *x, const float *weight, const float *angle, const attention_rule *r)
{
    int d = r->head_dim, half = r->rotary_dim / 2;
    if (weight)
        norm_row(y, x, weight, d, r->eps);
    else if (y != x)
        memcpy(y, x, (size_t)d * sizeof *y);
#pragma omp simd
    for (int j = 0; j < half; j++) {
        float u = y[j], v = y[j + half];
        y[j] = u * angle[j] - v * angle[half + j];
        y[j + half] = v * angle[j] + u * angle[half + j];
    }
}

status cpu_rotate(backend *b, tensor *qkv, kv_pool *kv, int layer, const tensor *q_norm, const tensor *k_norm,
                  const batch *in, const slots *s, const attention_rule *r)
{
    status st = OK;
    cpu *c = cpu_of(b);
    int64_t n = cpu_used(&in->position), d = r->head_dim;
    assert(qkv->type == F32 && kv->k.type == F32 && kv->v.type == F32 && qkv->cols == (r->heads + 2 * r->kv_heads) * d);
    const int32_t *position = in->position.data, *of = in->slot.data, *page = s->page.data;
    const float *qw = r->qk_norm ? q_norm->data : NULL, *kw = r->qk_norm ? k_norm->data : NULL;
    TRY(angles(c, s->max_blocks * r->block_size, r));
#pragma omp parallel for num_threads(cpu_threads(c, (double)n * (double)qkv->cols))
    for (int64_t i = 0; i < n; i++) {
        const float *angle = (const float *)c->angles.data + (int64_t)position[i] * r->rotary_dim;
        int64_t at = page[of[i] * s->page.ld + position[i] / r->block_size];
        at = (layer * (int64_t)kv->page_count + at) * r->block_size + position[i] % r->block_size;
        float *q = cpu_row(qkv, i), *key = cpu_row(&kv->k, at);
        for (int h = 0; h < r->heads; h++)
            rotate_head(q + h * d, q + h * d, qw, angle, r);
        const float *k = q + r->heads * d, *v = k + r->kv_heads * d;
        for (int h = 0; h < r->kv_heads; h++)
            rotate_head(key + h * d, k + h * d, kw, angle, r);
        memcpy(cpu_row(&kv->v, at), v, (size_t)(r->kv_heads * d) * sizeof *v);
    }
out:
    return st;
}
