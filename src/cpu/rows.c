/* What moves or combines rows one by one: embedding, residuals, SiLU, and the compact and full forms of a shard. */
#include "src/cpu/cpu.h"
#include "src/cpu/lanes.h"

#include <assert.h>

status cpu_embed(backend *b, tensor *y, const tensor *table, const tensor *ids)
{
    int64_t n = cpu_used(ids);
    const int32_t *id = ids->data;
    assert(y->type == F32 && y->cols == table->cols && y->rows >= n);
#pragma omp parallel for num_threads(cpu_threads(cpu_of(b), (double)n * (double)y->cols))
    for (int64_t i = 0; i < n; i++) {
        assert(id[i * ids->ld] >= 0 && id[i * ids->ld] < table->rows);
        cpu_widen(cpu_row(y, i),
                  (const char *)table->data + (size_t)(id[i * ids->ld] * table->ld) * dtype_bytes(table->type),
                  table->type, y->cols);
    }
    return OK;
}

status cpu_add(backend *b, tensor *y, const tensor *x)
{
    int64_t n = cpu_used(x), used = cpu_used(y);
    n = used < n ? used : n;
    assert(y->type == F32 && x->type == F32 && y->cols == x->cols);
#pragma omp parallel for num_threads(cpu_threads(cpu_of(b), (double)n * (double)y->cols))
    for (int64_t i = 0; i < n; i++) {
        float *restrict to = cpu_row(y, i);
        const float *restrict from = cpu_row(x, i);
        for (int64_t j = 0; j < y->cols; j++)
            to[j] += from[j];
    }
    return OK;
}

status cpu_swiglu(backend *b, tensor *y, const tensor *gate_up)
{
    int64_t n = cpu_used(gate_up), inner = y->cols;
    assert(y->type == F32 && gate_up->type == F32 && gate_up->cols == 2 * inner && y->rows >= n);
#pragma omp parallel for num_threads(cpu_threads(cpu_of(b), (double)n * (double)inner * 4))
    for (int64_t i = 0; i < n; i++)
        lane_swiglu(cpu_row(y, i), cpu_row(gate_up, i), cpu_row(gate_up, i) + inner, inner);
    return OK;
}

status cpu_pack(backend *b, tensor *packed, const tensor *full, const tensor *rows)
{
    int64_t n = cpu_used(rows);
    const int32_t *row = rows->data;
    assert(packed->type == F32 && full->type == F32 && packed->cols == full->cols && packed->rows >= n);
#pragma omp parallel for num_threads(cpu_threads(cpu_of(b), (double)n * (double)full->cols))
    for (int64_t i = 0; i < n; i++)
        memcpy(cpu_row(packed, i), cpu_row(full, row[i * rows->ld]), (size_t)full->cols * sizeof(float));
    return OK;
}

status cpu_merge(backend *b, tensor *y, const tensor *packed, tensor *cache, int layer, const batch *in, const slots *s,
                 const block_rule *k)
{
    status st = OK;
    cpu *c = cpu_of(b);
    int64_t n = cpu_used(&in->position), fresh = cpu_used(&in->fresh);
    size_t bytes = (size_t)y->cols * sizeof(float);
    const int32_t *row = in->fresh.data, *position = in->position.data, *of = in->slot.data, *role = in->role.data;
    const slot *slot_of = s->slot.data;
    assert(y->type == F32 && packed->type == F32 && cache->type == F32);
    TRY(cpu_scratch(c, (size_t)n * sizeof(int32_t), 0));
    int32_t *at = c->shared.data; /* of each row: its place in `packed`, or -1 */
    for (int64_t i = 0; i < n; i++)
        at[i] = -1;
    for (int64_t i = 0; i < fresh; i++)
        at[row[i]] = (int32_t)i;
#pragma omp parallel for num_threads(cpu_threads(c, (double)n * (double)y->cols))
    for (int64_t i = 0; i < n; i++) {
        if (role[i] == ROW_SEALING) {
            memcpy(cpu_row(y, i), cpu_row(packed, at[i]), bytes);
            continue;
        }
        int32_t in_block = position[i] % k->block_size;
        const slot *x = &slot_of[of[i]];
        float *kept = cpu_row(cache, ((int64_t)layer * s->slot_count + of[i]) * k->block_size + in_block);
        uint64_t bit = 1ull << in_block;
        if (x->fresh & bit) {
            memcpy(cpu_row(y, i), cpu_row(packed, at[i]), bytes);
            if (x->decoded & bit)
                memcpy(kept, cpu_row(packed, at[i]), bytes);
        } else {
            memcpy(cpu_row(y, i), kept, bytes);
        }
    }
out:
    return st;
}
