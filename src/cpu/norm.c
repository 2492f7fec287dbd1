/* RMSNorm, and the rotation of queries and keys (half-split pairs, MODEL's "Rotary"). */
#include "src/cpu/cpu.h"
#include "src/cpu/lanes.h"

#include <assert.h>
#include <stdlib.h>

void cpu_norm_row(float *y, const float *x, const float *w, int64_t n, float eps)
{
    float scale = 1.0f / sqrtf(lane_squares(x, n) / (float)n + eps);
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = x[i] * scale * w[i];
}

typedef struct norm_task {
    tensor *y;
    const tensor *x, *w;
    float eps;
} norm_task;

static void norm_rows(void *arg, int64_t from, int64_t to, int thread)
{
    const norm_task *t = arg;
    (void)thread;
    for (int64_t i = from; i < to; i++)
        cpu_norm_row(cpu_row(t->y, i), cpu_row(t->x, i), t->w->data, t->x->cols, t->eps);
}

status cpu_norm(backend *b, tensor *y, const tensor *x, const tensor *w, float eps)
{
    int64_t n = cpu_used(x);
    assert(x->type == F32 && y->type == F32 && w->type == F32 && w->cols == x->cols && y->rows >= n);
    cpu_parallel(cpu_of(b), (double)n * (double)x->cols * 0.2, n, norm_rows, &(norm_task){y, x, w, eps});
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
        cpu_norm_row(y, x, weight, d, r->eps);
    else if (y != x)
        memcpy(y, x, (size_t)d * sizeof *y);
#pragma omp simd
    for (int j = 0; j < half; j++) {
        float u = y[j], v = y[j + half];
        y[j] = u * angle[j] - v * angle[half + j];
        y[j + half] = v * angle[j] + u * angle[half + j];
    }
}

typedef struct rotate_task {
    const cpu *c;
    tensor *qkv;
    kv_pool *kv;
    int layer;
    const float *q_norm, *k_norm; /* NULL: none */
    const batch *in;
    const slots *s;
    const attention_rule *r;
} rotate_task;

static void rotate_rows(void *arg, int64_t from, int64_t to, int thread)
{
    const rotate_task *t = arg;
    const attention_rule *r = t->r;
    const tensor *pages = &t->s->page;
    const int32_t *position = t->in->position.data, *of = t->in->slot.data, *page = pages->data;
    int64_t d = r->head_dim;
    (void)thread;
    for (int64_t i = from; i < to; i++) {
        const float *angle = (const float *)t->c->angles.data + (int64_t)position[i] * r->rotary_dim;
        int64_t at = page[of[i] * pages->ld + position[i] / r->block_size];
        at = (t->layer * (int64_t)t->kv->page_count + at) * r->block_size + position[i] % r->block_size;
        float *q = cpu_row(t->qkv, i), *key = cpu_row(&t->kv->k, at);
        for (int h = 0; h < r->heads; h++)
            rotate_head(q + h * d, q + h * d, t->q_norm, angle, r);
        const float *k = q + r->heads * d, *v = k + r->kv_heads * d;
        for (int h = 0; h < r->kv_heads; h++)
            rotate_head(key + h * d, k + h * d, t->k_norm, angle, r);
        memcpy(cpu_row(&t->kv->v, at), v, (size_t)(r->kv_heads * d) * sizeof *v);
    }
}

status cpu_rotate(backend *b, tensor *qkv, kv_pool *kv, int layer, const tensor *q_norm, const tensor *k_norm,
                  const batch *in, const slots *s, const attention_rule *r)
{
    status st = OK;
    cpu *c = cpu_of(b);
    int64_t n = cpu_used(&in->position);
    assert(qkv->type == F32 && kv->k.type == F32 && kv->v.type == F32);
    assert(qkv->cols == (r->heads + 2 * r->kv_heads) * r->head_dim);
    rotate_task t = {c, qkv, kv, layer, NULL, NULL, in, s, r};
    if (r->qk_norm) {
        t.q_norm = q_norm->data;
        t.k_norm = k_norm->data;
    }
    TRY(angles(c, s->max_blocks * r->block_size, r));
    cpu_parallel(c, (double)n * (double)qkv->cols * 0.5, n, rotate_rows, &t);
out:
    return st;
}
