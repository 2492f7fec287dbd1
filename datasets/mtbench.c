/* MT-Bench: a conversation of two user turns; the second sees the first answer. Some rows have reference answers. */
#include "datasets/row.h"

static status parse(example *e, const char *text, const row_place *p)
{
    status st = OK;
    const char *category;
    json_t *row = NULL;
    TRY(row_object(&row, text, p->where));
    json_t *id = json_object_get(row, "question_id"), *turns = json_object_get(row, "turns");
    if (!id || !turns)
        FAIL(BAD_INPUT, "%s: field \"%s\" is missing", p->where, id ? "turns" : "question_id");
    TRY(row_id(e, id, "question_id", p->where));
    TRY(row_text(&category, row, "category", p->where));
    if (!json_is_array(turns))
        FAIL(BAD_INPUT, "%s: \"turns\" is %s, want an array of strings", p->where, json_type_name(turns));
    TRY(row_turns(e, turns, "turns", p->where));
    TRY(row_gold(e, json_pack("{s:s, s:O*}", "category", category, "reference", json_object_get(row, "reference")),
                 p->where));
out:
    json_decref(row);
    return st;
}

const row_kind row_mtbench = {.name = "mtbench",
                              .form = "{\"question_id\": integer, \"category\": text, \"turns\": [text, text]}",
                              .own_ids = true,
                              .parse = parse};
