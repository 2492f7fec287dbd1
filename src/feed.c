#include "src/feed.h"

#include "datasets/shots.h"
#include "src/base/hash.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct feed {
    feed_rule rule;
    dataset **file; /* [data_count] */
    shots *shots;
    int32_t at;     /* file being read */
    int64_t order;  /* of the next row */
};

void row_close(row *r)
{
    if (!r)
        return;
    example_close(&r->example);
    for (int i = 0; i < DATASET_TURNS; i++)
        free(r->answer[i]);
    free(r);
}

int32_t row_records(const row *r)
{
    return r->example.turns > 0 ? r->example.turns : 1;
}

status feed_open(feed **out, const feed_rule *r)
{
    status st = OK;
    *out = NULL;
    feed *f = calloc(1, sizeof *f);
    if (!f)
        FAIL(FAILED, "out of memory");
    f->rule = *r;
    f->file = calloc((size_t)r->data_count + 1, sizeof *f->file);
    if (!f->file)
        FAIL(FAILED, "out of memory");
    for (int32_t i = 0; i < r->data_count; i++) {
        TRY(dataset_open(&f->file[i], r->data[i], &r->dataset));
        for (int32_t k = 0; k < i; k++)
            if (strcmp(dataset_name(f->file[k]), dataset_name(f->file[i])) == 0)
                FAIL(
                    BAD_INPUT,
                    "--data %s: rows of %s would be called %s too, and a row is known by its dataset and id; give it a "
                    "run of its own",
                    r->data[i], dataset_path(f->file[k]), dataset_name(f->file[i]));
    }
    if (r->shots)
        TRY(shots_open(&f->shots, r->shots, NULL));
    *out = f;
    f = NULL;
out:
    feed_close(f);
    return st;
}

void feed_close(feed *f)
{
    if (!f)
        return;
    for (int32_t i = 0; f->file && i < f->rule.data_count; i++)
        dataset_close(f->file[i]);
    free(f->file);
    shots_close(f->shots);
    free(f);
}

/* The next example of any file into *e. */
static status next(feed *f, example *e, bool *more)
{
    status st = OK;
    *more = false;
    while (f->at < f->rule.data_count) {
        TRY(dataset_next(f->file[f->at], e, more));
        if (*more) {
            f->order++;
            break;
        }
        f->at++;
    }
out:
    return st;
}

status feed_next(feed *f, row **out)
{
    status st = OK;
    bool more;
    *out = NULL;
    row *r = calloc(1, sizeof *r);
    if (!r)
        FAIL(FAILED, "out of memory");
    TRY(next(f, &r->example, &more));
    if (more) {
        r->order = f->order - 1;
        r->dataset = dataset_name(f->file[f->at]);
        r->path = dataset_path(f->file[f->at]);
        *out = r;
        r = NULL;
    }
out:
    row_close(r);
    return st;
}

status feed_skip(feed *f, bool *more)
{
    example e = {0};
    status st = next(f, &e, more);
    example_close(&e);
    return st;
}

status feed_json(json_t **out, const feed *f)
{
    status st = OK;
    json_t *all = json_array();
    *out = NULL;
    for (int32_t i = 0; i < f->rule.data_count; i++) {
        const dataset *d = f->file[i];
        uint64_t hash;
        int64_t first, last;
        char hex[17], rows[48];
        TRY(dataset_hash(&hash, d));
        dataset_range(&first, &last, d);
        snprintf(hex, sizeof hex, "%016llx", (unsigned long long)hash);
        int n = snprintf(rows, sizeof rows, "%lld-", (long long)first);
        if (last < INT64_MAX)
            snprintf(rows + n, sizeof rows - (size_t)n, "%lld", (long long)last);
        json_t *one = json_pack("{s:s, s:s, s:s, s:s}", "name", dataset_name(d), "path", dataset_path(d), "hash", hex,
                                "rows", rows);
        if (strcmp(dataset_kind(d), "jsonl") == 0)
            json_object_set_new(one, "prompt_field", json_string(f->rule.dataset.prompt_field));
        json_array_append_new(all, one);
    }
    *out = all;
    all = NULL;
out:
    json_decref(all);
    return st;
}

uint64_t feed_shots_hash(const feed *f)
{
    uint64_t h = HASH_START;
    for (int32_t i = 0; f->shots && i < f->shots->count; i++) {
        h = hash_bytes(h, f->shots->question[i], strlen(f->shots->question[i]) + 1);
        h = hash_bytes(h, f->shots->answer[i], strlen(f->shots->answer[i]) + 1);
    }
    return f->shots ? h : 0;
}

status feed_encode(const feed *f, const row *r, const chat_template *c, const tokenizer *t, token_list *out)
{
    int before = f->shots ? f->shots->count : 0, n = 0;
    chat_turn *turn = calloc((size_t)(2 * before + 2 * DATASET_TURNS), sizeof *turn);
    if (!turn)
        return status_fail(FAILED, __FILE__, __LINE__, "out of memory");
    for (int i = 0; i < before; i++) {
        turn[n++] = (chat_turn){false, f->shots->question[i], strlen(f->shots->question[i])};
        turn[n++] = (chat_turn){true, f->shots->answer[i], strlen(f->shots->answer[i])};
    }
    for (int i = 0; i <= r->turn; i++) {
        turn[n++] = (chat_turn){false, r->example.turn[i], strlen(r->example.turn[i])};
        if (i < r->turn)
            turn[n++] = (chat_turn){true, r->answer[i], strlen(r->answer[i])};
    }
    status st = chat_encode(c, t, out, turn, n);
    free(turn);
    return st;
}
