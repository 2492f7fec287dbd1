/* Memory by clock: one slab a lifetime (program, slot, iteration), its size computed before it is taken.
 * A layout function runs twice over the same arena: first with no slab, which only adds up the bytes, then with it. */
#ifndef EPOCH_BASE_ARENA_H
#define EPOCH_BASE_ARENA_H

#include "src/base/tensor.h"

enum { ARENA_ALIGN = 256 };

typedef struct arena {
    const char *name;
    char *slab; /* NULL while measuring */
    size_t bytes, used;
} arena;

/* The next `bytes` of the arena, aligned to ARENA_ALIGN; NULL while measuring. Never takes more than was measured. */
void *arena_take(arena *a, size_t bytes);

/* A tensor [rows, cols] in the arena. */
tensor arena_tensor(arena *a, dtype type, int64_t rows, int64_t cols);

#endif
