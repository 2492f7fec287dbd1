#include "src/base/arena.h"

#include <assert.h>

void *arena_take(arena *a, size_t bytes)
{
    size_t at = a->used;
    a->used += (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    if (!a->slab)
        return NULL;
    assert(a->used <= a->bytes);
    return a->slab + at;
}

tensor arena_tensor(arena *a, dtype type, int64_t rows, int64_t cols)
{
    return tensor_of(arena_take(a, (size_t)rows * (size_t)cols * dtype_bytes(type)), type, rows, cols);
}
