/* From the journals of a folder to one file: rows in input order, each key once. */
#include "results/private.h"
#include "src/base/fault.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- memory of a results_file */

enum { PIECE = 1 << 20 };

struct results_pool {
    results_pool *next;
    size_t used, room;
    _Alignas(16) char bytes[];
};

void *pool_take(results_pool **pool, size_t count, size_t each)
{
    results_pool *p = *pool;
    if (each && count > (SIZE_MAX - 2 * PIECE) / each)
        return NULL;
    size_t bytes = (count * each + 15) / 16 * 16;
    if (!p || p->room - p->used < bytes) {
        size_t room = bytes > PIECE ? bytes : PIECE;
        p = calloc(1, sizeof *p + room);
        if (!p)
            return NULL;
        p->next = *pool;
        p->room = room;
        *pool = p;
    }
    p->used += bytes;
    return p->bytes + p->used - bytes;
}

const char *pool_text(results_pool **pool, const char *text, size_t bytes)
{
    char *copy = pool_take(pool, bytes + 1, 1);
    if (copy && bytes)
        memcpy(copy, text, bytes);
    return copy;
}

void pool_close(results_pool *pool)
{
    while (pool) {
        results_pool *next = pool->next;
        free(pool);
        pool = next;
    }
}

void results_close(results_file *f)
{
    if (!f)
        return;
    json_decref(f->run);
    pool_close(f->pool);
    free(f);
}

/* ---- valid UTF-8 */

/* The bytes of the UTF-8 character at p (NUL-terminated); negative: so many bytes that begin none, the longest run of
 * them that could have begun one (Unicode 15, section 3.9: what one U+FFFD stands for). */
static int utf8_step(const unsigned char *p)
{
    int more = *p < 0x80 ? 0 : *p < 0xc2 ? -1 : *p < 0xe0 ? 1 : *p < 0xf0 ? 2 : *p < 0xf5 ? 3 : -1;
    if (more < 0)
        return -1;
    for (int i = 1; i <= more; i++) {
        unsigned char low = 0x80, high = 0xbf;
        if (i == 1) {
            low = *p == 0xe0 ? 0xa0 : *p == 0xf0 ? 0x90 : low;   /* no longer forms of short characters */
            high = *p == 0xed ? 0x9f : *p == 0xf4 ? 0x8f : high; /* no surrogates, nothing above U+10FFFF */
        }
        if (p[i] < low || p[i] > high)
            return -i;
    }
    return more + 1;
}

/* *text with U+FFFD for what is not UTF-8 (a character that the end of an answer cut); itself where all is well. */
static status repair(const char **text, results_pool **pool)
{
    status st = OK;
    size_t bad = 0, bytes = 0;
    const unsigned char *p = (const unsigned char *)*text;
    for (int n; *p; p += n) {
        n = utf8_step(p);
        bad += n < 0;
        n = abs(n);
        bytes += (size_t)n;
    }
    if (!bad)
        goto out;
    char *fixed = pool_take(pool, bytes + 3 * bad + 1, 1), *to = fixed;
    if (!fixed)
        FAIL(FAILED, "no memory for a text of %zu bytes", bytes);
    p = (const unsigned char *)*text;
    for (int n; *p; p += abs(n)) {
        n = utf8_step(p);
        memcpy(to, n < 0 ? (const void *)"\xef\xbf\xbd" : (const void *)p, n < 0 ? 3 : (size_t)n);
        to += n < 0 ? 3 : n;
    }
    *text = fixed;
out:
    return st;
}

status results_text(char **out, const char *text)
{
    status st = OK;
    results_pool *pool = NULL;
    TRY(repair(&text, &pool));
    *out = strdup(text);
    if (!*out)
        FAIL(FAILED, "no memory for a text");
out:
    pool_close(pool);
    return st;
}

/* ---- gathering */

typedef struct place { /* of a row: what the sort needs */
    int64_t order, row;
    int32_t turn;
} place;

static int by_input(const void *a, const void *b)
{
    const place *x = a, *y = b;
    if (x->order != y->order)
        return (x->order > y->order) - (x->order < y->order);
    if (x->turn != y->turn)
        return (x->turn > y->turn) - (x->turn < y->turn);
    return (x->row > y->row) - (x->row < y->row);
}

static int compare_places(int64_t row, int64_t other_row, int32_t block, int32_t other_block, int32_t iteration,
                          int32_t other_iteration)
{
    if (row != other_row)
        return row < other_row ? -1 : 1;
    if (block != other_block)
        return block < other_block ? -1 : 1;
    return (iteration > other_iteration) - (iteration < other_iteration);
}

static int by_place(const void *a, const void *b)
{
    const result_trace *x = a, *y = b;
    return compare_places(x->output_row, y->output_row, x->at.block, y->at.block, x->at.iteration, y->at.iteration);
}

static int by_audited_place(const void *a, const void *b)
{
    const result_audited *x = a, *y = b;
    return compare_places(x->output_row, y->output_row, x->at.block, y->at.block, x->at.iteration, y->at.iteration);
}

#define TAKE(to, count)                                                                \
    do {                                                                               \
        (to) = pool_take(&f->pool, (size_t)(count), sizeof *(to));                     \
        if (!(to))                                                                     \
            FAIL(FAILED, "no memory for %lld records of results", (long long)(count)); \
    } while (0)

typedef struct origin { /* of a row: how iterations name it, which know nothing of later sessions */
    int32_t session, rank;
    int64_t order;
    int32_t turn;
    int64_t row; /* of /outputs */
} origin;

static int by_origin(const void *a, const void *b)
{
    const origin *x = a, *y = b;
    if (x->session != y->session)
        return x->session < y->session ? -1 : 1;
    if (x->rank != y->rank)
        return x->rank < y->rank ? -1 : 1;
    if (x->order != y->order)
        return x->order < y->order ? -1 : 1;
    return (x->turn > y->turn) - (x->turn < y->turn);
}

/* *out: where each row comes from, sorted. */
static status gather_rows(origin **out, results_file *f, const results_index *x)
{
    status st = OK;
    place *order;
    origin *origins = NULL;
    result_row r;
    f->rows = x->rows;
    TAKE(f->output, f->rows);
    TAKE(order, f->rows);
    TAKE(origins, f->rows);
    for (int64_t i = 0; i < x->rows; i++) {
        order[i] = (place){x->row[i].order, i, x->row[i].turn};
        frame_row(&r, &x->row[i].frame, NULL, NULL);
        f->tokens += r.tokens;
        f->blocks += r.blocks;
    }
    if (f->rows)
        qsort(order, (size_t)f->rows, sizeof *order, by_input);
    TAKE(f->token, f->tokens);
    TAKE(f->block, f->blocks);
    int64_t token = 0, block = 0;
    for (int64_t i = 0; i < f->rows; i++) {
        const index_row *from = &x->row[order[i].row];
        result_output *to = &f->output[i];
        frame_row(&to->row, &from->frame, f->token + token, f->block + block);
        to->session = x->journal[from->journal].session;
        to->rank = x->journal[from->journal].rank;
        origins[i] = (origin){to->session, to->rank, to->row.order, to->row.turn, i};
        to->row.order = from->order;
        to->row.source_line = from->source_line;
        to->token_offset = token;
        for (int32_t b = 0; b < to->row.blocks; b++)
            to->forced += to->row.block[b].forced;
        token += to->row.tokens;
        block += to->row.blocks;
        const char **text[] = {&to->row.dataset, &to->row.id,      &to->row.prompt,       &to->row.text,
                               &to->row.gold,    &to->row.message, &to->row.finish_reason};
        for (size_t t = 0; t < sizeof text / sizeof *text; t++)
            TRY(repair(text[t], &f->pool));
    }
    if (f->rows)
        qsort(origins, (size_t)f->rows, sizeof *origins, by_origin);
    *out = origins;
out:
    return st;
}

/* The row of /outputs that this rank finished in this session; -1: none (unfinished, or repeated elsewhere). */
static int64_t row_of(const origin *origins, int64_t rows, origin of)
{
    const origin *found = rows ? bsearch(&of, origins, (size_t)rows, sizeof of, by_origin) : NULL;
    return found ? found->row : -1;
}

/* Those of rows that are not in the file are left out. */
static status gather_iterations(results_file *f, const origin *origins, const results_index *x)
{
    status st = OK;
    int64_t iterations = 0, audits = 0;
    for (int j = 0; j < x->journals; j++) {
        iterations += x->journal[j].iterations;
        audits += x->journal[j].audits;
    }
    TAKE(f->iteration, iterations);
    TAKE(f->audit, audits);
    for (int j = 0; j < x->journals; j++) {
        const index_journal *from = &x->journal[j];
        uint32_t sequence = 0;
        for (size_t at = 0; at < from->whole && from->iterations + from->audits;) {
            frame fr = frame_next(from->bytes, from->size, &at, from->session, from->rank, &sequence);
            if (fr.kind == FRAME_ITERATION) {
                result_trace *t = &f->iteration[f->iterations];
                *t = (result_trace){.session = from->session, .rank = from->rank};
                frame_iteration(&t->at, &fr);
                t->output_row = row_of(origins, f->rows, (origin){t->session, t->rank, t->at.order, t->at.turn, 0});
                f->iterations += t->output_row >= 0;
            } else if (fr.kind == FRAME_AUDIT) {
                result_audited *a = &f->audit[f->audits];
                *a = (result_audited){.session = from->session, .rank = from->rank};
                frame_audit(&a->at, &fr);
                a->output_row = row_of(origins, f->rows, (origin){a->session, a->rank, a->at.order, a->at.turn, 0});
                f->audits += a->output_row >= 0;
            }
        }
    }
    if (f->iterations)
        qsort(f->iteration, (size_t)f->iterations, sizeof *f->iteration, by_place);
    if (f->audits)
        qsort(f->audit, (size_t)f->audits, sizeof *f->audit, by_audited_place);
out:
    return st;
}

static status gather_sessions(results_file *f, const results_index *x, const char *dir)
{
    status st = OK;
    json_t *run = NULL;
    char *text = NULL;
    TAKE(f->rank, x->journals);
    TAKE(f->observation, x->journals);
    TAKE(f->session, x->journals);
    for (int j = 0; j < x->journals; j++) {
        const index_journal *from = &x->journal[j];
        result_session *s = f->sessions ? &f->session[f->sessions - 1] : NULL;
        if (!s || s->session != from->session) {
            s = &f->session[f->sessions++];
            *s = (result_session){.session = from->session, .started = from->started};
            TRY(folder_run(&run, dir, from->session));
            text = run ? json_dumps(run, JSON_COMPACT) : NULL;
            s->run = pool_text(&f->pool, text ? text : "{}", text ? strlen(text) : 2);
            if (!s->run)
                FAIL(FAILED, "no memory for the settings of session %d", from->session);
            free(text);
            text = NULL;
            json_decref(run);
            run = NULL;
        }
        s->ranks++;
        if (from->started > 0 && (from->started < s->started || s->started <= 0))
            s->started = from->started;
        if (from->ended > s->ended)
            s->ended = from->ended;
        if (from->counted) {
            if (from->phase.wall_seconds > s->wall_seconds)
                s->wall_seconds = from->phase.wall_seconds;
            f->rank[f->ranks++] = (result_rank){from->session, from->rank, from->phase};
        }
        if (from->observed)
            f->observation[f->observations++] = (result_observation){from->session, from->rank, from->observation};
    }
    for (int64_t i = 0; i < f->rows; i++) {
        const result_output *o = &f->output[i];
        int64_t at = 0;
        while (f->session[at].session != o->session)
            at++;
        f->session[at].done += !o->row.failed;
        f->session[at].failed += o->row.failed;
        f->session[at].tokens += o->row.tokens;
    }
out:
    free(text);
    json_decref(run);
    return st;
}

status results_write(const char *file, const results_file *f)
{
    status st = OK;
    char tmp[PATH_MAX];
    bool made = false;
    if ((size_t)snprintf(tmp, sizeof tmp, "%s.tmp.%ld", file, (long)getpid()) >= sizeof tmp)
        FAIL(BAD_INPUT, "%s: the path is too long", file);
    made = true;
    TRY(hdf5_write(tmp, f));
    fault_point("publish");
    TRY(file_settle(tmp, file));
    made = false;
out:
    if (made)
        unlink(tmp);
    return st;
}

status results_publish(const char *file, const char *dir, const char *run_json, const char *state)
{
    status st = OK;
    results_state s = {0};
    origin *origins = NULL;
    json_error_t e;
    results_file *f = calloc(1, sizeof *f);
    if (!f)
        FAIL(FAILED, "%s: no memory", file);
    TRY(results_scan(&s, dir));
    if (run_json)
        f->run = json_loads(run_json, 0, &e);
    else
        TRY(folder_run_newest(&f->run, dir, s.sessions));
    if (!f->run && !run_json)
        f->run = json_object();
    if (!json_is_object(f->run))
        FAIL(BAD_INPUT, "%s: the run's settings are no JSON object: %s", file, f->run ? "another type" : e.text);
    f->state = state;
    TRY(gather_rows(&origins, f, s.index));
    TRY(gather_iterations(f, origins, s.index));
    TRY(gather_sessions(f, s.index, dir));
    TRY(results_write(file, f));
out:
    results_close(f);
    results_scan_close(&s);
    return st;
}
