#include "datasets/dataset.h"

#include "datasets/ids.h"
#include "datasets/lines.h"
#include "datasets/row.h"
#include "src/base/hash.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const row_kind *const kinds[] = {&row_gsm8k, &row_mgsm, &row_humaneval, &row_mtbench, &row_jsonl};
enum { KINDS = sizeof kinds / sizeof *kinds };

struct dataset {
    const row_kind *kind;
    char *path, *prompt_field;
    char language[3], name[16];
    int64_t first, last; /* rows to give, inclusive; last < first: none */
    int64_t row;         /* the last one read */
    lines *lines;
    ids seen;
    char *where; /* room for PATH:LINE */
    size_t where_room;
    example held; /* the first row, read by dataset_open */
    bool holds;
};

void example_close(example *e)
{
    for (int t = 0; t < DATASET_TURNS; t++)
        free(e->turn[t]);
    free(e->id);
    free(e->gold);
    free(e->error);
    *e = (example){0};
}

/* A row number, or *out as it was where there are no digits. */
static status parse_number(int64_t *out, const char *digits, size_t n, const char *spec)
{
    status st = OK;
    char text[20];
    if (n == 0)
        return OK;
    if (n >= sizeof text || strspn(digits, "0123456789") < n)
        FAIL(BAD_INPUT, "%s: bad range, want @FROM-TO, @FROM- or @-TO in decimal", spec);
    memcpy(text, digits, n);
    text[n] = '\0';
    *out = strtoll(text, NULL, 10);
out:
    return st;
}

/* PATH[@FROM-TO]: the text behind the last '@' is a range if it holds nothing but digits and '-'. */
static status parse_range(dataset *d, const char *rest, const char *spec)
{
    status st = OK;
    const char *at = strrchr(rest, '@');
    d->first = 1;
    d->last = INT64_MAX;
    if (at && at[1 + strspn(at + 1, "0123456789-")] != '\0')
        at = NULL;
    d->path = at ? strndup(rest, (size_t)(at - rest)) : strdup(rest);
    if (!d->path)
        FAIL(FAILED, "%s: no memory", spec);
    if (!*d->path)
        FAIL(BAD_INPUT, "%s: no path, want KIND:PATH[@FROM-TO]", spec);
    if (!at)
        goto out;
    const char *from = at + 1, *minus = strchr(from, '-');
    if (!minus || strlen(from) == 1)
        FAIL(BAD_INPUT, "%s: bad range, want @FROM-TO, @FROM- or @-TO in decimal", spec);
    TRY(parse_number(&d->first, from, (size_t)(minus - from), spec));
    TRY(parse_number(&d->last, minus + 1, strlen(minus + 1), spec));
    if (d->first < 1 || d->last < d->first)
        FAIL(BAD_INPUT, "%s: rows %" PRId64 " to %" PRId64 ", want 1 <= FROM <= TO", spec, d->first, d->last);
out:
    return st;
}

static status parse_spec(dataset *d, const char *spec)
{
    status st = OK;
    const char *colon = strchr(spec, ':');
    for (int k = 0; colon && k < KINDS; k++)
        if (strlen(kinds[k]->name) == (size_t)(colon - spec) &&
            strncmp(spec, kinds[k]->name, strlen(kinds[k]->name)) == 0)
            d->kind = kinds[k];
    if (!d->kind)
        FAIL(BAD_INPUT,
             "%s: unknown kind, want KIND:PATH[@FROM-TO], KIND one of gsm8k, mgsm, humaneval, mtbench, jsonl",
             spec);
    TRY(parse_range(d, colon + 1, spec));
out:
    return st;
}

/* Fills e from a line. BAD_INPUT: the row is wrong. */
static status parse_row(dataset *d, example *e, const line *l)
{
    status st = OK;
    if (l->bytes > LINES_MOST)
        FAIL(BAD_INPUT, "%s: a line of %zu bytes, want at most %d", d->where, l->bytes, LINES_MOST);
    int64_t bad = row_bad_byte(l->text, l->bytes);
    if (bad >= 0)
        FAIL(BAD_INPUT, "%s: byte %" PRId64 " of the line is 0x%02x, want UTF-8 without NUL", d->where, bad + 1,
             (unsigned)(unsigned char)l->text[bad]);
    const row_place place = {.where = d->where, .prompt_field = d->prompt_field, .language = d->language};
    TRY(d->kind->parse(e, l->text, &place));
out:
    return st;
}

static status number_id(example *e, const char *form, int64_t number)
{
    status st = OK;
    char text[40];
    snprintf(text, sizeof text, form, number);
    e->id = strdup(text);
    if (!e->id)
        FAIL(FAILED, "no memory for a row id");
out:
    return st;
}

/* The row's id: its own, else its line's number. BAD_INPUT: an earlier row has it; it is taken away then. */
static status settle_id(dataset *d, example *e, int64_t number)
{
    status st = OK;
    int64_t first = 0;
    if (!e->id && !(d->kind->own_ids && e->error))
        TRY(number_id(e, "%" PRId64, number));
    if (d->kind->own_ids && e->id)
        TRY(ids_add(&d->seen, e->id, number, &first));
    if (first) {
        int shown = (int)strnlen(e->id, 80);
        while (((unsigned char)e->id[shown] & 0xc0) == 0x80) /* not inside a character */
            shown--;
        st = status_fail(BAD_INPUT, __FILE__, __LINE__,
                         "%s: id \"%.*s\" stands on line %" PRId64 " too, want each id once", d->where, shown, e->id,
                         first);
        free(e->id);
        e->id = NULL;
    }
out:
    return st;
}

/* Turns a row that failed with BAD_INPUT into one that says why: the first reason stays. Other failures pass. */
static status spoil(example *e, status st)
{
    if (st != BAD_INPUT)
        return st;
    st = OK;
    for (int t = 0; t < e->turns; t++) {
        free(e->turn[t]);
        e->turn[t] = NULL;
    }
    e->turns = 0;
    free(e->gold);
    e->gold = NULL;
    if (!e->error && !(e->error = strdup(status_message())))
        FAIL(FAILED, "no memory for the message of a row");
out:
    return st;
}

/* BAD_INPUT: the file cannot be read on. */
static status read_row(dataset *d, example *e, bool *more)
{
    status st = OK;
    example x = {0};
    line l = {0};
    *more = false;
    for (; d->row < d->last && l.row < d->first; d->row = l.row) {
        TRY(lines_next(d->lines, &l));
        if (!l.text)
            l.row = INT64_MAX; /* the end, also of the next call */
    }
    if (!l.text)
        goto out;
    x.line = l.number;
    snprintf(d->where, d->where_room, "%s:%" PRId64, d->path, l.number);
    TRY(spoil(&x, parse_row(d, &x, &l)));
    TRY(spoil(&x, settle_id(d, &x, l.number)));
    if (!x.id) /* not the bare number: that may well be another row's own id */
        TRY(number_id(&x, "line %" PRId64, l.number));
    if (!x.gold && !(x.gold = strdup("{}")))
        FAIL(FAILED, "no memory for a row");
    *e = x;
    x = (example){0};
    *more = true;
out:
    example_close(&x);
    return st;
}

status dataset_open(dataset **out, const char *spec, const dataset_rule *r)
{
    status st = OK;
    dataset *d = calloc(1, sizeof *d);
    *out = NULL;
    if (!d)
        FAIL(FAILED, "%s: no memory", spec);
    TRY(parse_spec(d, spec));
    if (d->kind == &row_mgsm)
        TRY(mgsm_language(d->language, d->path));
    snprintf(d->name, sizeof d->name, "%s%s%s", d->kind->name, *d->language ? "_" : "", d->language);
    if (r->limit > 0 && d->last - d->first >= r->limit)
        d->last = d->first + r->limit - 1;
    d->prompt_field = strdup(r->prompt_field ? r->prompt_field : "prompt");
    d->where_room = strlen(d->path) + 32;
    d->where = malloc(d->where_room);
    if (!d->prompt_field || !d->where)
        FAIL(FAILED, "%s: no memory", spec);
    TRY(lines_open(&d->lines, d->path));
    TRY(read_row(d, &d->held, &d->holds));
    if (d->holds && d->held.error)
        FAIL(BAD_INPUT, "%s; it is the first row, and a row of %s is %s", d->held.error, d->kind->name, d->kind->form);
    *out = d;
    d = NULL;
out:
    dataset_close(d);
    return st;
}

void dataset_close(dataset *d)
{
    if (!d)
        return;
    example_close(&d->held);
    lines_close(d->lines);
    ids_close(&d->seen);
    free(d->path);
    free(d->prompt_field);
    free(d->where);
    free(d);
}

status dataset_next(dataset *d, example *e, bool *more)
{
    *more = d->holds;
    if (d->holds) {
        *e = d->held;
        d->held = (example){0};
        d->holds = false;
        return OK;
    }
    status st = read_row(d, e, more);
    return st == BAD_INPUT ? FAILED : st; /* by now work has begun */
}

const char *dataset_kind(const dataset *d)
{
    return d->kind->name;
}

const char *dataset_name(const dataset *d)
{
    return d->name;
}

const char *dataset_path(const dataset *d)
{
    return d->path;
}

status dataset_hash(uint64_t *out, const dataset *d)
{
    return hash_file(out, d->path);
}

void dataset_range(int64_t *first, int64_t *last, const dataset *d)
{
    *first = d->first;
    *last = d->last;
}

status dataset_count(int64_t *out, const dataset *d)
{
    status st = OK;
    lines *again = NULL;
    line l = {.row = 0};
    *out = 0;
    TRY(lines_open(&again, d->path));
    do {
        TRY(lines_next(again, &l));
        *out += l.text && l.row >= d->first;
    } while (l.text && l.row < d->last);
out:
    lines_close(again);
    return st;
}
