/* The ends of sublayers: what was computed joins the residual stream, and the next sublayer's input is normed from it.
 */
#include "src/cpu/cpu.h"

#include <assert.h>
#include <string.h>

typedef struct residual_task {
    const residual *r;
    const tensor *y;      /* add_norm: of each row; merge: of each packed row */
    const tensor *shared; /* merge: NULL: none */
    tensor *cache;
    int layer;
    const batch *in;
    const slots *s;
    const block_rule *k;
} residual_task;

static void norm_into(const residual_task *t, int64_t row)
{
    const residual *r = t->r;
    int64_t n = r->x.cols;
    float *h = cpu_row(&r->h, row);
    cpu_norm_row(h, cpu_row(&r->x, row), r->norm->data, n, r->eps);
    if (!r->h_fresh.data)
        return;
    int32_t place = ((const int32_t *)t->in->place.data)[row];
    if (place >= 0)
        memcpy(cpu_row(&r->h_fresh, place), h, (size_t)n * sizeof *h);
}

static void add_rows(void *arg, int64_t from, int64_t to, int thread)
{
    const residual_task *t = arg;
    (void)thread;
    for (int64_t i = from; i < to; i++) {
        float *restrict x = cpu_row(&t->r->x, i);
        const float *restrict y = cpu_row(t->y, i);
        for (int64_t j = 0; j < t->r->x.cols; j++)
            x[j] += y[j];
        norm_into(t, i);
    }
}

static void assert_residual(const residual *r)
{
    assert(r->x.type == F32 && r->h.type == F32 && r->norm->type == F32);
    assert(r->h.cols == r->x.cols && r->norm->cols == r->x.cols && r->h.rows >= r->x.rows);
    (void)r;
}

status cpu_add_norm(backend *b, const residual *r, const tensor *y, const batch *in)
{
    int64_t n = cpu_used(&r->x);
    assert_residual(r);
    assert(y->type == F32 && y->cols == r->x.cols && y->rows >= n);
    residual_task t = {.r = r, .y = y, .in = in};
    cpu_parallel(cpu_of(b), (double)n * (double)y->cols * 0.3, n, add_rows, &t);
    return OK;
}

/* What the routed experts give row i, this time or at an earlier one. */
static const float *routed(const residual_task *t, int64_t i)
{
    int32_t size = t->k->block_size, in_block = ((const int32_t *)t->in->position.data)[i] % size;
    int32_t of = ((const int32_t *)t->in->slot.data)[i], place = ((const int32_t *)t->in->place.data)[i];
    if (((const int32_t *)t->in->role.data)[i] == ROW_SEALING)
        return cpu_row(t->y, place);
    const slot *x = (const slot *)t->s->slot.data + of;
    float *kept = cpu_row(t->cache, ((int64_t)t->layer * t->s->slot_count + of) * size + in_block);
    uint64_t bit = 1ull << in_block;
    if (!(x->fresh & bit))
        return kept;
    if (x->decoded & bit)
        memcpy(kept, cpu_row(t->y, place), (size_t)t->y->cols * sizeof *kept);
    return cpu_row(t->y, place);
}

static void merge_rows(void *arg, int64_t from, int64_t to, int thread)
{
    const residual_task *t = arg;
    (void)thread;
    for (int64_t i = from; i < to; i++) {
        float *restrict x = cpu_row(&t->r->x, i);
        const float *restrict y = routed(t, i), *restrict z = t->shared ? cpu_row(t->shared, i) : NULL;
        for (int64_t j = 0; j < t->r->x.cols; j++)
            x[j] += z ? y[j] + z[j] : y[j];
        norm_into(t, i);
    }
}

status cpu_merge(backend *b, const residual *r, const tensor *packed, const tensor *shared, tensor *cache, int layer,
                 const batch *in, const slots *s, const block_rule *k)
{
    int64_t n = cpu_used(&in->position);
    assert_residual(r);
    assert(packed->type == F32 && cache->type == F32 && packed->cols == r->x.cols && cache->cols == r->x.cols);
    assert(!shared->data || (shared->type == F32 && shared->cols == r->x.cols));
    residual_task t = {r, packed, shared->data ? shared : NULL, cache, layer, in, s, k};
    cpu_parallel(cpu_of(b), (double)n * (double)r->x.cols * 0.3, n, merge_rows, &t);
    return OK;
}
