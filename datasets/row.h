/* One row of each kind: what its parser is given, and what the parsers share. */
#ifndef EPOCH_DATASETS_ROW_H
#define EPOCH_DATASETS_ROW_H

#include "datasets/dataset.h"
#include "src/base/json.h"

typedef struct row_place {    /* where a row stands */
    const char *where;        /* "FILE:LINE", the beginning of every message */
    const char *prompt_field; /* jsonl */
    const char *language;     /* mgsm */
} row_place;

typedef struct row_kind {
    const char *name, *form; /* form: what a row looks like, for messages */
    bool own_ids;            /* rows may carry an id: e->id is set by parse, or stays NULL */
    /* Fills id, turns and gold of a zeroed example from a line of valid UTF-8 without NUL. BAD_INPUT: this row is wrong
     * (what it has filled so far stays, and the caller closes it). FAILED: no memory. */
    status (*parse)(example *e, const char *text, const row_place *p);
} row_kind;

extern const row_kind row_gsm8k, row_mgsm, row_humaneval, row_mtbench, row_jsonl;

/* The language of mgsm_LANG.tsv, 2 letters and NUL. BAD_INPUT: another file name or language. */
status mgsm_language(char out[3], const char *path);

/* The row as a JSON object; json_decref it. */
status row_object(json_t **out, const char *text, const char *where);
/* Its text under `key`, borrowed; BAD_INPUT where it is missing or no string. */
status row_text(const char **out, const json_t *object, const char *key, const char *where);
/* e->id from a string or an integer. */
status row_id(example *e, const json_t *id, const char *key, const char *where);
/* One more turn: a copy. BAD_INPUT where it is empty or one too many. */
status row_turn(example *e, const char *text, const char *key, const char *where);
/* All turns of a JSON array of strings. */
status row_turns(example *e, const json_t *turns, const char *key, const char *where);
/* e->gold as text; takes the object over. NULL (json_pack found no memory): FAILED. */
status row_gold(example *e, json_t *gold, const char *where);

/* Byte offset of the first byte that is no UTF-8, or is NUL; -1 where all is well. */
int64_t row_bad_byte(const char *text, size_t bytes);

#endif
