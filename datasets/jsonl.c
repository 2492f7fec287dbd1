/* Any JSON lines: the prompt under a chosen key (a text, or an array of texts: the turns); perhaps "id", "answer". */
#include "datasets/row.h"

#include <stdlib.h>
#include <string.h>

/* A value as text: a string as it is; anything else as JSON, a real with the fewest digits that give it back. */
static char *value_text(const json_t *v)
{
    if (json_is_string(v))
        return strdup(json_string_value(v));
    if (!json_is_real(v))
        return json_dumps(v, JSON_ENCODE_ANY);
    char *text = NULL;
    for (size_t digits = 15; digits <= 17; digits++) {
        free(text);
        text = json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(digits));
        if (!text || strtod(text, NULL) == json_real_value(v))
            break;
    }
    return text;
}

static status parse(example *e, const char *text, const row_place *p)
{
    status st = OK;
    char *answer = NULL;
    json_t *row = NULL;
    TRY(row_object(&row, text, p->where));
    const json_t *id = json_object_get(row, "id"), *prompt = json_object_get(row, p->prompt_field),
                 *gold = json_object_get(row, "answer");
    if (id && !json_is_null(id))
        TRY(row_id(e, id, "id", p->where));
    if (!prompt)
        FAIL(BAD_INPUT, "%s: field \"%s\" is missing (--prompt-field names the key of the prompt)", p->where,
             p->prompt_field);
    if (json_is_array(prompt))
        TRY(row_turns(e, prompt, p->prompt_field, p->where));
    else if (json_is_string(prompt))
        TRY(row_turn(e, json_string_value(prompt), p->prompt_field, p->where));
    else
        FAIL(BAD_INPUT, "%s: \"%s\" is %s, want a string or an array of strings", p->where, p->prompt_field,
             json_type_name(prompt));
    if (!gold || json_is_null(gold))
        goto out;
    answer = value_text(gold);
    if (!answer)
        FAIL(FAILED, "%s: no memory", p->where);
    TRY(row_gold(e, json_pack("{s:s}", "answer", answer), p->where));
out:
    free(answer);
    json_decref(row);
    return st;
}

const row_kind row_jsonl = {.name = "jsonl",
                            .form = "an object whose prompt field is a text or an array of texts",
                            .own_ids = true,
                            .parse = parse};
