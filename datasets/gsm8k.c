/* GSM8K: a question, and a worked answer that ends in "#### N". */
#include "datasets/row.h"

static status parse(example *e, const char *text, const row_place *p)
{
    status st = OK;
    const char *question, *answer;
    json_t *row = NULL;
    TRY(row_object(&row, text, p->where));
    TRY(row_text(&question, row, "question", p->where));
    TRY(row_text(&answer, row, "answer", p->where));
    TRY(row_turn(e, question, "question", p->where));
    TRY(row_gold(e, json_pack("{s:s}", "answer", answer), p->where));
out:
    json_decref(row);
    return st;
}

const row_kind row_gsm8k = {
    .name = "gsm8k", .form = "{\"question\": text, \"answer\": text}", .own_ids = false, .parse = parse};
