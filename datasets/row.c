#include "datasets/row.h"

#include <stdlib.h>
#include <string.h>

status row_object(json_t **out, const char *text, const char *where)
{
    status st = OK;
    json_error_t e;
    *out = json_loads(text, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &e);
    if (!*out)
        FAIL(BAD_INPUT, "%s: column %d: not JSON: %s", where, e.column, e.text);
    if (!json_is_object(*out))
        FAIL(BAD_INPUT, "%s: the row is %s, want an object", where, json_type_name(*out));
out:
    if (st != OK) {
        json_decref(*out);
        *out = NULL;
    }
    return st;
}

status row_text(const char **out, const json_t *object, const char *key, const char *where)
{
    status st = OK;
    TRY(json_text(out, object, key, NULL, where));
    if (!*out)
        FAIL(BAD_INPUT, "%s: field \"%s\" is missing", where, key);
out:
    return st;
}

status row_id(example *e, const json_t *id, const char *key, const char *where)
{
    status st = OK;
    if (!json_is_string(id) && !json_is_integer(id))
        FAIL(BAD_INPUT, "%s: \"%s\" is %s, want a string or an integer", where, key, json_type_name(id));
    if (json_is_string(id) && json_string_length(id) == 0)
        FAIL(BAD_INPUT, "%s: \"%s\" is empty, want an id", where, key);
    e->id = json_is_string(id) ? strdup(json_string_value(id)) : json_dumps(id, JSON_ENCODE_ANY);
    if (!e->id)
        FAIL(FAILED, "%s: no memory", where);
out:
    return st;
}

status row_turn(example *e, const char *text, const char *key, const char *where)
{
    status st = OK;
    if (e->turns == DATASET_TURNS)
        FAIL(BAD_INPUT, "%s: \"%s\" holds more than %d turns", where, key, DATASET_TURNS);
    if (!*text)
        FAIL(BAD_INPUT, "%s: turn %d of \"%s\" is empty, want a text", where, (int)e->turns + 1, key);
    e->turn[e->turns] = strdup(text);
    if (!e->turn[e->turns])
        FAIL(FAILED, "%s: no memory", where);
    e->turns++;
out:
    return st;
}

status row_turns(example *e, const json_t *turns, const char *key, const char *where)
{
    status st = OK;
    if (json_array_size(turns) == 0)
        FAIL(BAD_INPUT, "%s: \"%s\" holds no turns, want 1 to %d", where, key, DATASET_TURNS);
    for (size_t i = 0; i < json_array_size(turns); i++) {
        const json_t *turn = json_array_get(turns, i);
        if (!json_is_string(turn))
            FAIL(BAD_INPUT, "%s: turn %zu of \"%s\" is %s, want a string", where, i + 1, key, json_type_name(turn));
        TRY(row_turn(e, json_string_value(turn), key, where));
    }
out:
    return st;
}

status row_gold(example *e, json_t *gold, const char *where)
{
    status st = OK;
    e->gold = json_dumps(gold, 0);
    if (!e->gold)
        FAIL(FAILED, "%s: no memory", where);
out:
    json_decref(gold);
    return st;
}

/* Bytes of the well-formed character at b, 0 if there is none (Unicode 15, table 3-7). */
static size_t character(const unsigned char *b, size_t left)
{
    size_t n = b[0] < 0x80 ? 1 : b[0] < 0xc2 ? 0 : b[0] < 0xe0 ? 2 : b[0] < 0xf0 ? 3 : b[0] < 0xf5 ? 4 : 0;
    if (n == 0 || n > left || b[0] == 0)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((b[i] & 0xc0) != 0x80)
            return 0;
    /* overlong forms, surrogates, beyond U+10FFFF */
    if ((b[0] == 0xe0 && b[1] < 0xa0) || (b[0] == 0xed && b[1] > 0x9f) || (b[0] == 0xf0 && b[1] < 0x90) ||
        (b[0] == 0xf4 && b[1] > 0x8f))
        return 0;
    return n;
}

int64_t row_bad_byte(const char *text, size_t bytes)
{
    const unsigned char *b = (const unsigned char *)text;
    for (size_t i = 0, n; i < bytes; i += n) {
        n = character(b + i, bytes - i);
        if (n == 0)
            return (int64_t)i;
    }
    return -1;
}
