#include "datasets/ids.h"

#include "src/base/hash.h"

#include <stdlib.h>
#include <string.h>

/* The slot of this id, or the free one where it belongs. */
static struct id_slot *find(const ids *s, uint64_t hash, const char *id)
{
    size_t i = (size_t)hash & (s->slots - 1);
    while (s->slot[i].line && (s->slot[i].hash != hash || strcmp(s->text + s->slot[i].text, id) != 0))
        i = (i + 1) & (s->slots - 1);
    return &s->slot[i];
}

/* At most half full, so that a search ends soon. */
static status widen(ids *s)
{
    status st = OK;
    ids wide = *s;
    wide.slots = s->slots ? 2 * s->slots : 256;
    wide.slot = calloc(wide.slots, sizeof *wide.slot);
    if (!wide.slot)
        FAIL(FAILED, "no memory for %zu row ids", wide.slots);
    for (size_t i = 0; i < s->slots; i++)
        if (s->slot[i].line)
            *find(&wide, s->slot[i].hash, s->text + s->slot[i].text) = s->slot[i];
    free(s->slot);
    *s = wide;
out:
    return st;
}

status ids_add(ids *s, const char *id, int64_t line, int64_t *first)
{
    status st = OK;
    size_t bytes = strlen(id) + 1;
    if (2 * (s->count + 1) > s->slots)
        TRY(widen(s));
    uint64_t hash = hash_bytes(HASH_START, id, bytes);
    struct id_slot *slot = find(s, hash, id);
    *first = slot->line;
    if (slot->line)
        goto out;
    if (s->text_bytes + bytes > s->text_room) {
        size_t room = 2 * (s->text_bytes + bytes);
        char *text = realloc(s->text, room);
        if (!text)
            FAIL(FAILED, "no memory for %zu bytes of row ids", room);
        s->text = text;
        s->text_room = room;
    }
    memcpy(s->text + s->text_bytes, id, bytes);
    *slot = (struct id_slot){.hash = hash, .line = line, .text = s->text_bytes};
    s->text_bytes += bytes;
    s->count++;
out:
    return st;
}

void ids_close(ids *s)
{
    free(s->slot);
    free(s->text);
    *s = (ids){0};
}
