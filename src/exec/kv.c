#include "src/exec/kv.h"

#include <assert.h>
#include <stdlib.h>

status pages_open(page_table *p, int32_t page_count, int32_t slot_count, int32_t max_blocks)
{
    status st = OK;
    *p = (page_table){
        .page_count = page_count, .free_count = page_count, .slot_count = slot_count, .max_blocks = max_blocks};
    p->free = malloc(sizeof *p->free * (size_t)(page_count + 1));
    p->held = malloc(sizeof *p->held * ((size_t)slot_count * (size_t)max_blocks + 1));
    p->held_count = calloc((size_t)slot_count + 1, sizeof *p->held_count);
    if (!p->free || !p->held || !p->held_count)
        FAIL(FAILED, "out of memory for the tables of %d KV pages", page_count);
    for (int32_t i = 0; i < page_count; i++) /* low pages first */
        p->free[i] = page_count - 1 - i;
out:
    return st;
}

void pages_close(page_table *p)
{
    free(p->free);
    free(p->held);
    free(p->held_count);
    *p = (page_table){0};
}

void pages_take(page_table *p, int slot, int32_t blocks)
{
    assert(p->held_count[slot] == 0 && blocks <= p->free_count && blocks <= p->max_blocks);
    for (int32_t i = 0; i < blocks; i++)
        p->held[(int64_t)slot * p->max_blocks + i] = p->free[--p->free_count];
    p->held_count[slot] = blocks;
}

void pages_release(page_table *p, int slot)
{
    while (p->held_count[slot] > 0)
        p->free[p->free_count++] = p->held[(int64_t)slot * p->max_blocks + --p->held_count[slot]];
}
