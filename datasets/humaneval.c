/* HumanEval: the beginning of a function to complete, and the test for it. */
#include "datasets/row.h"

static status parse(example *e, const char *text, const row_place *p)
{
    status st = OK;
    const char *id, *prompt, *entry, *test, *solution;
    json_t *row = NULL;
    TRY(row_object(&row, text, p->where));
    TRY(row_text(&id, row, "task_id", p->where));
    TRY(row_id(e, json_object_get(row, "task_id"), "task_id", p->where));
    TRY(row_text(&prompt, row, "prompt", p->where));
    TRY(row_text(&entry, row, "entry_point", p->where));
    TRY(row_text(&test, row, "test", p->where));
    TRY(json_text(&solution, row, "canonical_solution", NULL, p->where));
    TRY(row_turn(e, prompt, "prompt", p->where));
    TRY(row_gold(e,
                 json_pack("{s:s, s:s, s:s, s:s*}", "test", test, "entry_point", entry, "prompt", prompt,
                           "canonical_solution", solution),
                 p->where));
out:
    json_decref(row);
    return st;
}

const row_kind row_humaneval = {.name = "humaneval",
                                .form = "{\"task_id\": text, \"prompt\": text, \"entry_point\": text, \"test\": text}",
                                .own_ids = true,
                                .parse = parse};
