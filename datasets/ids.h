/* The ids of a file and the lines they stand on: a set. */
#ifndef EPOCH_DATASETS_IDS_H
#define EPOCH_DATASETS_IDS_H

#include "src/base/status.h"

#include <stdint.h>

typedef struct ids { /* starts as zeros */
    struct id_slot {
        uint64_t hash;
        int64_t line; /* 0: free */
        size_t text;  /* offset in `text` */
    } *slot;
    size_t slots, count;
    char *text; /* every id, NUL-terminated, one behind the other */
    size_t text_bytes, text_room;
} ids;

/* Takes in id. *first: 0, or the line on which the same id came earlier (the set stays as it is). FAILED: no memory. */
status ids_add(ids *s, const char *id, int64_t line, int64_t *first);
void ids_close(ids *s);

#endif
