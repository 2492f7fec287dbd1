/* What the twin tests share: a backend, tensors of random numbers, and a batch built by hand from a list of blocks. */
#ifndef EPOCH_TWIN_FIXTURE_H
#define EPOCH_TWIN_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/backend.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Rows and widths that divide tiles and panels, and that do not. */
static const struct shape {
    int rows, in, out;
} shapes[] = {{0, 64, 48},     {1, 1, 1},      {1, 256, 384},  {2, 24, 20},     {7, 50, 37},
              {8, 64, 256},    {9, 256, 130},  {31, 300, 129}, {33, 64, 256},   {64, 256, 384},
              {130, 256, 128}, {65, 1030, 70}, {5, 2048, 100}, {12, 512, 1024}, {257, 16, 3}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static inline backend *fixture_backend(int threads)
{
    backend *b;
    assert_int_equal(backend_cpu_open(&b, threads), OK);
    return b;
}

static inline float fixture_random(void)
{
    return (float)rand() / (float)RAND_MAX * 2 - 1;
}

/* A tensor [rows, cols] of uniform numbers in [-scale, scale); ld is a little larger than cols. Free its data. */
static inline tensor fixture_tensor(int64_t rows, int64_t cols, float scale)
{
    tensor t = tensor_of(malloc((size_t)(rows * (cols + 3) + 1) * sizeof(float)), F32, rows, cols);
    t.ld = cols + 3;
    for (int64_t i = 0; i < rows * t.ld; i++)
        ((float *)t.data)[i] = scale * fixture_random();
    return t;
}

static inline tensor fixture_ints(int64_t rows, int64_t cols)
{
    return tensor_of(calloc((size_t)(rows * cols) + 1, sizeof(int32_t)), I32, rows, cols);
}

static inline float *at(const tensor *t, int64_t row)
{
    return (float *)t->data + row * t->ld;
}

static inline int32_t *int_at(const tensor *t, int64_t row)
{
    return (int32_t *)t->data + row * t->ld;
}

/* t held as BF16 or F16, and t's own numbers replaced by what that can hold. */
static inline tensor fixture_narrow(backend *b, tensor *t, dtype type)
{
    float *packed = malloc((size_t)(t->rows * t->cols) * sizeof(float) + 1);
    for (int64_t i = 0; i < t->rows; i++)
        memcpy(packed + i * t->cols, at(t, i), (size_t)t->cols * sizeof(float));
    tensor held = tensor_of(malloc((size_t)(t->rows * t->cols) * 2 + 1), type, t->rows, t->cols);
    assert_int_equal(b->upload(b, &held, packed, F32), OK);
    assert_int_equal(b->upload(b, t, held.data, type), OK);
    free(packed);
    return held;
}

static inline bool same_rows(const tensor *a, int64_t i, const tensor *b, int64_t j)
{
    return memcmp(at(a, i), at(b, j), (size_t)a->cols * sizeof(float)) == 0;
}

/* One block of a batch. */
typedef struct fixture_block {
    int slot, block;
    bool sealing;
} fixture_block;

/* slot_count slots of max_blocks blocks of B positions. Pages are dealt in a shuffled order. */
typedef struct fixture {
    int block_size, page_count;
    slots s;
    batch in;
    slot *slot;
    int32_t count[4];
} fixture;

static inline void fixture_open(fixture *f, int slot_count, int max_blocks, int block_size)
{
    memset(f, 0, sizeof *f);
    f->block_size = block_size;
    f->page_count = slot_count * max_blocks;
    f->slot = calloc((size_t)slot_count, sizeof *f->slot);
    f->s.slot_count = slot_count;
    f->s.max_blocks = max_blocks;
    f->s.slot = tensor_of(f->slot, U8, slot_count, sizeof(slot));
    f->s.page = fixture_ints(slot_count, max_blocks);
    int32_t *page = f->s.page.data;
    for (int i = 0; i < f->page_count; i++) {
        int j = rand() % (i + 1);
        page[i] = page[j];
        page[j] = i;
    }
}

static inline void fixture_close(fixture *f)
{
    free(f->slot);
    free(f->s.page.data);
    free(f->in.position.data);
    free(f->in.slot.data);
    free(f->in.role.data);
    free(f->in.span.data);
    free(f->in.fresh.data);
    free(f->in.place.data);
}

/* Lays out the rows of these blocks; tensors have room to spare, so that `used` matters. fresh: rows that are sealing,
 * or in their slot's fresh mask, or all with `dense`. Decoded rows are ROW_STABLE, others ROW_LIVE. */
static inline void fixture_batch(fixture *f, const fixture_block *block, int blocks, bool dense)
{
    int size = f->block_size, rows = blocks * size;
    batch *in = &f->in;
    free(in->position.data), free(in->slot.data), free(in->role.data), free(in->span.data), free(in->fresh.data);
    free(in->place.data);
    in->position = fixture_ints(rows + 5, 1);
    in->slot = fixture_ints(rows + 5, 1);
    in->role = fixture_ints(rows + 5, 1);
    in->fresh = fixture_ints(rows + 5, 1);
    in->place = fixture_ints(rows + 5, 1);
    in->span = fixture_ints(blocks + 2, 4);
    int fresh = 0;
    for (int i = 0; i < blocks; i++) {
        ((span *)in->span.data)[i] = (span){block[i].slot, block[i].block, i * size, block[i].sealing};
        const slot *x = &f->slot[block[i].slot];
        for (int j = 0; j < size; j++) {
            int row = i * size + j;
            *int_at(&in->position, row) = block[i].block * size + j;
            *int_at(&in->slot, row) = block[i].slot;
            *int_at(&in->role, row) = block[i].sealing ? ROW_SEALING : x->decoded >> j & 1 ? ROW_STABLE : ROW_LIVE;
            *int_at(&in->place, row) = -1;
            if (dense || block[i].sealing || (x->fresh >> j & 1)) {
                *int_at(&in->place, row) = fresh;
                *int_at(&in->fresh, fresh++) = row;
            }
        }
    }
    f->count[0] = rows;
    f->count[1] = blocks;
    f->count[2] = fresh;
    in->count = tensor_of(f->count, I32, 4, 1);
    in->position.used = in->slot.used = in->role.used = in->place.used = &f->count[0];
    in->span.used = &f->count[1];
    in->fresh.used = &f->count[2];
}

/* The ids and weights as the rank of e gets them: only its own edges, moved to the front. */
static inline void fixture_rank_edges(tensor *to, tensor *to_weights, const tensor *ids, const tensor *weights,
                                      const expert_set *e)
{
    for (int64_t i = 0; i < ids->rows; i++) {
        int n = 0;
        for (int64_t j = 0; j < ids->cols; j++)
            if (int_at(ids, i)[j] >= e->first && int_at(ids, i)[j] < e->first + e->count) {
                int_at(to, i)[n] = int_at(ids, i)[j];
                at(to_weights, i)[n++] = at(weights, i)[j];
            }
        for (; n < ids->cols; n++) {
            int_at(to, i)[n] = -1;
            at(to_weights, i)[n] = 0;
        }
    }
}

/* Masks of every slot. fresh: live rows always; of the decoded ones some; in trial 2 all, in trial 4 none. */
static inline void fixture_masks(fixture *f, int trial)
{
    int size = f->block_size;
    for (int i = 0; i < f->s.slot_count; i++) {
        uint64_t decoded = ((uint64_t)rand() << 33 ^ (uint64_t)rand()) & slot_mask(size);
        uint64_t some = trial == 2 ? ~0ull : trial == 4 ? 0 : (uint64_t)rand() << 33 ^ (uint64_t)rand();
        f->slot[i].decoded = decoded;
        f->slot[i].fresh = (~decoded | some) & slot_mask(size);
    }
}

#endif
