#include "src/resume.h"

#include "src/base/hash.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- settings */

static json_t *hex_or_null(bool there, uint64_t hash)
{
    char hex[17];
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)hash);
    return there ? json_string(hex) : json_null();
}

status resume_inputs(json_t **out, const options *o, const feed *f)
{
    status st = OK;
    static const char *const files[] = {"config.json", "tokenizer.json"};
    char path[4096];
    uint64_t hash = 0;
    json_t *all = json_object();
    *out = NULL;
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "%s/%s", o->model, files[i]);
        TRY(hash_file(&hash, path));
        json_object_set_new(all, files[i], hex_or_null(true, hash));
    }
    if (o->template_file)
        TRY(hash_file(&hash, o->template_file));
    json_object_set_new(all, "template", hex_or_null(o->template_file, hash));
    json_object_set_new(all, "shots", hex_or_null(o->shots, feed_shots_hash(f)));
    json_object_set_new(all, "gen_len", json_integer(o->gen_len));
    *out = all;
    all = NULL;
out:
    json_decref(all);
    return st;
}

static void say(resume_change *c, const char *format, ...) EPOCH_PRINTF(2, 3);

static void say(resume_change *c, const char *format, ...)
{
    size_t n = strlen(c->text);
    va_list args;
    if (n + 4 < sizeof c->text && n > 0)
        n += (size_t)snprintf(c->text + n, sizeof c->text - n, "; ");
    va_start(args, format);
    vsnprintf(c->text + n, sizeof c->text - n, format, args);
    va_end(args);
}

/* "NAME was A, is B". */
static void say_values(resume_change *c, const char *name, const json_t *a, const json_t *b)
{
    enum { DIGITS = 6 };
    char *x = a ? json_dumps(a, JSON_ENCODE_ANY | JSON_REAL_PRECISION(DIGITS)) : NULL,
         *y = b ? json_dumps(b, JSON_ENCODE_ANY | JSON_REAL_PRECISION(DIGITS)) : NULL;
    say(c, "%s was %s, is %s", name, x ? x : "not recorded", y ? y : "not set");
    free(x);
    free(y);
}

/* Rules that decide nothing: how rows travel, the Atlas where it is off, and one that was not there yet. */
static bool idle_rule(const char *name, const json_t *before, const json_t *now)
{
    const char *combine = json_string_value(json_object_get(now, "combine"));
    if (strcmp(name, "combine") == 0 && !json_object_get(before, name) && combine && strcmp(combine, "fp32") == 0)
        return true;
    bool atlas = json_is_true(json_object_get(before, "restrict_experts")) ||
                 json_is_true(json_object_get(now, "restrict_experts"));
    return strcmp(name, "dense_lane") == 0 || (!atlas && strncmp(name, "atlas_", 6) == 0);
}

static void compare_members(resume_change *c, const json_t *before, const json_t *now)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)now, name, value)
    {
        const json_t *had = json_object_get(before, name);
        if (json_equal(had, value) || idle_rule(name, before, now))
            continue;
        c->answers = true;
        say_values(c, name, had, value);
    }
}

static void compare_data(resume_change *c, const json_t *before, const json_t *now)
{
    static const char *const field[] = {"rows", "prompt_field", "hash"};
    size_t was = json_array_size(before), is = json_array_size(now);
    if (was != is) {
        c->prompts = true;
        say(c, "there were %zu --data, are %zu", was, is);
    }
    for (size_t i = 0; i < was && i < is; i++) {
        const json_t *a = json_array_get(before, i), *b = json_array_get(now, i);
        const char *path = json_string_value(json_object_get(b, "path"));
        char name[400];
        if (!json_equal(json_object_get(a, "name"), json_object_get(b, "name"))) {
            c->prompts = true;
            say_values(c, "--data", json_object_get(a, "name"), json_object_get(b, "name"));
            continue;
        }
        for (size_t k = 0; k < sizeof field / sizeof *field; k++) {
            const json_t *x = json_object_get(a, field[k]), *y = json_object_get(b, field[k]);
            if (x == y || json_equal(x, y))
                continue;
            c->prompts = true;
            snprintf(name, sizeof name, "%s of %.300s", field[k], path ? path : "?");
            say_values(c, name, x, y);
        }
    }
}

status resume_compare(resume_change *out, const json_t *before, const json_t *now)
{
    *out = (resume_change){0};
    const json_t *hash = json_object_get(now, "model_hash"), *had = json_object_get(before, "model_hash");
    if (!json_equal(hash, had)) {
        out->answers = true;
        say_values(out, "the checkpoint's hash", had, hash);
    }
    compare_members(out, json_object_get(before, "rules"), json_object_get(now, "rules"));
    compare_members(out, json_object_get(before, "inputs"), json_object_get(now, "inputs"));
    compare_data(out, json_object_get(before, "datasets"), json_object_get(now, "datasets"));
    return OK;
}

/* ---- rows */

static status keep(resume_rows *k, const result_row *had, const row *r)
{
    status st = OK;
    if (k->count == k->room) {
        int64_t room = k->room ? 2 * k->room : 256;
        result_kept *more = realloc(k->kept, (size_t)room * sizeof *more);
        if (!more)
            FAIL(FAILED, "no memory for a list of %lld rows", (long long)room);
        k->kept = more;
        k->room = room;
    }
    k->kept[k->count++] = (result_kept){had->dataset, had->id, had->turn, r->order, r->example.line};
    k->all = k->all && had->order == r->order && had->source_line == r->example.line;
out:
    return st;
}

status resume_keep(resume_rows *out, const results_state *done, const feed_rule *input)
{
    status st = OK;
    feed *f = NULL;
    row *r = NULL;
    *out = (resume_rows){.all = true};
    out->kept = calloc(1, sizeof *out->kept); /* an empty list is one too */
    out->room = out->kept ? 1 : 0;
    TRY(feed_open(&f, input));
    for (;; row_close(r), r = NULL) {
        TRY(feed_next(f, &r));
        if (!r)
            break;
        result_row had;
        for (int32_t t = 0; t < row_records(r) && results_row(&had, done, r->dataset, r->example.id, t); t++) {
            bool same = !r->example.error && strcmp(had.prompt, r->example.turn[t]) == 0 &&
                        strcmp(had.gold, r->example.gold) == 0;
            if (!same && !had.failed && !*out->first)
                snprintf(out->first, sizeof out->first, "%.500s:%lld", r->path, (long long)r->example.line);
            if (!same || had.failed)
                break; /* the turns behind it saw its answer */
            TRY(keep(out, &had, r));
        }
    }
    out->all = out->all && out->count == done->done + done->failed;
out:
    row_close(r);
    feed_close(f);
    return st;
}

void resume_rows_close(resume_rows *r)
{
    free(r->kept);
    *r = (resume_rows){0};
}

status resume_row(bool *left, row *r, const results_state *done)
{
    status st = OK;
    int32_t turns = row_records(r), recorded = 0;
    result_row had;
    *left = true;
    while (recorded < turns && results_done(done, r->dataset, r->example.id, recorded))
        recorded++;
    if (recorded == turns) {
        *left = false;
        goto out;
    }
    for (; r->turn < recorded; r->turn++) {
        if (!results_row(&had, done, r->dataset, r->example.id, r->turn) || had.failed)
            break; /* failed, and killed before it said so of the turns behind it */
        TRY(results_text(&r->answer[r->turn], had.text));
    }
out:
    return st;
}
