/* What moves rows one by one: embedding, SiLU, and the compact form of a shard. */
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

static void swiglu_rows(void *arg, int64_t from, int64_t to, int thread)
{
    const rows_task *t = arg;
    (void)thread;
    for (int64_t i = from; i < to; i++)
        lane_swiglu(cpu_row(t->y, i), cpu_row(t->x, i), cpu_row(t->x, i) + t->y->cols, t->y->cols);
}

status cpu_gated(backend *b, tensor *y, tensor *both, const tensor *x, const tensor *w)
{
    status st = OK;
    int64_t n = cpu_used(x);
    assert(y->type == F32 && both->cols == 2 * y->cols && y->rows >= n);
    TRY(cpu_matmul(b, both, x, w));
    cpu_parallel(cpu_of(b), (double)n * (double)y->cols * 0.5, n, swiglu_rows, &(rows_task){.y = y, .x = both});
out:
    return st;
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
