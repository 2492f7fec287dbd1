/* What moves or combines rows one by one: embedding, residuals, SiLU, and the compact and full forms of a shard. */
#include "src/cpu/cpu.h"
#include "src/cpu/lanes.h"

#include <assert.h>

typedef struct rows_task {
    tensor *y;
    const tensor *x, *rows;
} rows_task;

static void embed_rows(void *arg, int64_t from, int64_t to, int thread)
{
    const rows_task *t = arg;
    const tensor *table = t->x;
    (void)thread;
    for (int64_t i = from; i < to; i++) {
        int64_t id = ((const int32_t *)t->rows->data)[i * t->rows->ld];
        assert(id >= 0 && id < table->rows);
        cpu_widen(cpu_row(t->y, i), (const char *)table->data + (size_t)(id * table->ld) * dtype_bytes(table->type),
                  table->type, table->cols);
    }
}

status cpu_embed(backend *b, tensor *y, const tensor *table, const tensor *ids)
{
    int64_t n = cpu_used(ids);
    assert(y->type == F32 && y->cols == table->cols && y->rows >= n);
    cpu_parallel(cpu_of(b), (double)n * (double)y->cols * 0.1, n, embed_rows, &(rows_task){y, table, ids});
    return OK;
}

static void add_rows(void *arg, int64_t first, int64_t last, int thread)
{
    const rows_task *t = arg;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        float *restrict to = cpu_row(t->y, i);
        const float *restrict from = cpu_row(t->x, i);
        for (int64_t j = 0; j < t->y->cols; j++)
            to[j] += from[j];
    }
}

status cpu_add(backend *b, tensor *y, const tensor *x)
{
    int64_t n = cpu_used(x), used = cpu_used(y);
    n = used < n ? used : n;
    assert(y->type == F32 && x->type == F32 && y->cols == x->cols);
    cpu_parallel(cpu_of(b), (double)n * (double)y->cols * 0.1, n, add_rows, &(rows_task){.y = y, .x = x});
    return OK;
}

static void swiglu_rows(void *arg, int64_t from, int64_t to, int thread)
{
    const rows_task *t = arg;
    (void)thread;
    for (int64_t i = from; i < to; i++)
        lane_swiglu(cpu_row(t->y, i), cpu_row(t->x, i), cpu_row(t->x, i) + t->y->cols, t->y->cols);
}

status cpu_swiglu(backend *b, tensor *y, const tensor *gate_up)
{
    int64_t n = cpu_used(gate_up);
    assert(y->type == F32 && gate_up->type == F32 && gate_up->cols == 2 * y->cols && y->rows >= n);
    cpu_parallel(cpu_of(b), (double)n * (double)y->cols * 0.5, n, swiglu_rows, &(rows_task){.y = y, .x = gate_up});
    return OK;
}

static void pack_rows(void *arg, int64_t from, int64_t to, int thread)
{
    const rows_task *t = arg;
    (void)thread;
    for (int64_t i = from; i < to; i++) {
        int32_t row = ((const int32_t *)t->rows->data)[i * t->rows->ld];
        memcpy(cpu_row(t->y, i), cpu_row(t->x, row), (size_t)t->x->cols * sizeof(float));
    }
}

status cpu_pack(backend *b, tensor *packed, const tensor *full, const tensor *rows)
{
    int64_t n = cpu_used(rows);
    assert(packed->type == F32 && full->type == F32 && packed->cols == full->cols && packed->rows >= n);
    cpu_parallel(cpu_of(b), (double)n * (double)full->cols * 0.1, n, pack_rows, &(rows_task){packed, full, rows});
    return OK;
}

typedef struct merge_task {
    tensor *y;
    const tensor *packed;
    tensor *cache;
    int layer;
    const batch *in;
    const slots *s;
    const block_rule *k;
    const int32_t *at; /* of each row: its place in `packed`, or -1 */
} merge_task;

static void merge_rows(void *arg, int64_t from, int64_t to, int thread)
{
    const merge_task *t = arg;
    const int32_t *position = t->in->position.data, *of = t->in->slot.data, *role = t->in->role.data, *at = t->at;
    size_t bytes = (size_t)t->y->cols * sizeof(float);
    int32_t size = t->k->block_size;
    (void)thread;
    for (int64_t i = from; i < to; i++) {
        if (role[i] == ROW_SEALING) {
            memcpy(cpu_row(t->y, i), cpu_row(t->packed, at[i]), bytes);
            continue;
        }
        int32_t in_block = position[i] % size;
        const slot *x = (const slot *)t->s->slot.data + of[i];
        float *kept = cpu_row(t->cache, ((int64_t)t->layer * t->s->slot_count + of[i]) * size + in_block);
        uint64_t bit = 1ull << in_block;
        if (x->fresh & bit) {
            memcpy(cpu_row(t->y, i), cpu_row(t->packed, at[i]), bytes);
            if (x->decoded & bit)
                memcpy(kept, cpu_row(t->packed, at[i]), bytes);
        } else {
            memcpy(cpu_row(t->y, i), kept, bytes);
        }
    }
}

status cpu_merge(backend *b, tensor *y, const tensor *packed, tensor *cache, int layer, const batch *in, const slots *s,
                 const block_rule *k)
{
    status st = OK;
    cpu *c = cpu_of(b);
    int64_t n = cpu_used(&in->position), fresh = cpu_used(&in->fresh);
    const int32_t *row = in->fresh.data;
    assert(y->type == F32 && packed->type == F32 && cache->type == F32);
    TRY(cpu_scratch(c, (size_t)n * sizeof(int32_t), 0));
    int32_t *at = c->shared.data;
    for (int64_t i = 0; i < n; i++)
        at[i] = -1;
    for (int64_t i = 0; i < fresh; i++)
        at[row[i]] = (int32_t)i;
    merge_task t = {y, packed, cache, layer, in, s, k, at};
    cpu_parallel(c, (double)n * (double)y->cols * 0.1, n, merge_rows, &t);
out:
    return st;
}
