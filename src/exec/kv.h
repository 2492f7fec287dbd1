/* Keys and values of finished blocks: which pages of the pool each slot holds. A page is one block's positions in every
 * layer. A sequence takes all its pages when it is admitted, so no forward ever runs out. */
#ifndef EPOCH_EXEC_KV_H
#define EPOCH_EXEC_KV_H

#include "src/base/status.h"

#include <stdint.h>

typedef struct page_table {
    int32_t page_count, free_count;
    int32_t *free;       /* a stack */
    int32_t slot_count, max_blocks;
    int32_t *held;       /* [slot_count, max_blocks] */
    int32_t *held_count; /* [slot_count] */
} page_table;

status pages_open(page_table *p, int32_t page_count, int32_t slot_count, int32_t max_blocks);
void pages_close(page_table *p);

/* Takes `blocks` pages for the slot (which holds none); the caller has checked free_count. */
void pages_take(page_table *p, int slot, int32_t blocks);
void pages_release(page_table *p, int slot);

#endif
