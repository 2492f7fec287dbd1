/* Journals: frames out by group commit, frames in without trusting a length. */
#include "results/private.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <zlib.h>

/* One walk over the fields serves both directions, so that they cannot drift apart. Writing: appends to `data`.
 * Reading: takes from [at, end), and `bad` is set by the first thing that does not fit. */
typedef struct codec {
    bool writing, bad;
    unsigned char *data; /* writing */
    size_t used, room;
    const unsigned char *at, *end; /* reading */
} codec;

static unsigned char *code_room(codec *c, size_t n)
{
    if (c->bad)
        return NULL;
    if (c->room - c->used < n) {
        size_t room = 2 * c->room + n + 4096;
        unsigned char *data = realloc(c->data, room);
        if (!data) {
            c->bad = true;
            return NULL;
        }
        c->data = data;
        c->room = room;
    }
    c->used += n;
    return c->data + c->used - n;
}

static const unsigned char *code_from(codec *c, size_t n)
{
    if (c->bad || (size_t)(c->end - c->at) < n) {
        c->bad = true;
        return NULL;
    }
    c->at += n;
    return c->at - n;
}

static void put_number(unsigned char *p, uint64_t v, int n)
{
    for (int i = 0; i < n; i++)
        p[i] = (unsigned char)(v >> 8 * i);
}

static uint64_t get_number(const unsigned char *p, int n)
{
    uint64_t v = 0;
    for (int i = 0; i < n; i++)
        v |= (uint64_t)p[i] << 8 * i;
    return v;
}

static void code_number(codec *c, uint64_t *v, int n)
{
    if (c->writing) {
        unsigned char *p = code_room(c, (size_t)n);
        if (p)
            put_number(p, *v, n);
    } else {
        const unsigned char *p = code_from(c, (size_t)n);
        *v = p ? get_number(p, n) : 0;
    }
}

static void code_i32(codec *c, int32_t *v)
{
    uint64_t n = (uint32_t)*v;
    code_number(c, &n, 4);
    *v = (int32_t)(uint32_t)n;
}

static void code_i64(codec *c, int64_t *v)
{
    uint64_t n = (uint64_t)*v;
    code_number(c, &n, 8);
    *v = (int64_t)n;
}

static void code_f64(codec *c, double *v)
{
    uint64_t n;
    memcpy(&n, v, sizeof n);
    code_number(c, &n, 8);
    memcpy(v, &n, sizeof n);
}

static void code_f32(codec *c, float *v)
{
    uint32_t bits;
    memcpy(&bits, v, sizeof bits);
    uint64_t n = bits;
    code_number(c, &n, 4);
    bits = (uint32_t)n;
    memcpy(v, &bits, sizeof bits);
}

static void code_bool(codec *c, bool *v)
{
    uint64_t n = *v;
    code_number(c, &n, 1);
    c->bad |= n > 1;
    *v = n != 0;
}

/* Bytes and their NUL, so that a reader may point at them. */
static void code_text(codec *c, const char **text)
{
    if (c->writing) {
        const char *t = *text ? *text : "";
        size_t n = strlen(t);
        uint64_t length = n;
        if (n > FRAME_MOST) {
            c->bad = true;
            return;
        }
        code_number(c, &length, 4);
        unsigned char *p = code_room(c, n + 1);
        if (p)
            memcpy(p, t, n + 1);
    } else {
        uint64_t length;
        code_number(c, &length, 4);
        const unsigned char *p = code_from(c, (size_t)length + 1);
        c->bad |= p && p[length] != 0;
        *text = c->bad ? "" : (const char *)p;
    }
}

/* The length of an array whose elements take `each` bytes: one that the rest of the frame can hold. */
static void code_count(codec *c, int32_t *count, size_t each)
{
    code_i32(c, count);
    if (*count < 0 || (!c->writing && (size_t)*count > (size_t)(c->end - c->at) / each)) {
        c->bad = true;
        *count = 0;
    }
}

enum { BLOCK_BYTES = (9 + RESULT_CAUSES + 2 + 3) * 4 };

static void code_block(codec *c, result_block *b)
{
    code_i32(c, &b->block);
    code_i32(c, &b->iterations);
    code_i32(c, &b->cold);
    code_i32(c, &b->refresh);
    code_i32(c, &b->hot_update);
    code_i32(c, &b->hot_skip);
    code_i32(c, &b->forced);
    code_i32(c, &b->layer_rebuilds);
    code_i32(c, &b->universe);
    for (int i = 0; i < RESULT_CAUSES; i++)
        code_i32(c, &b->rows_fallback[i]);
    code_i32(c, &b->fresh_rows);
    code_i32(c, &b->cached_rows);
    code_f32(c, &b->support_size);
    code_f32(c, &b->distinct_experts);
    code_f32(c, &b->coverage);
}

static void code_row(codec *c, result_row *r, int32_t *token, result_block *block)
{
    code_text(c, &r->dataset);
    code_text(c, &r->id);
    code_i64(c, &r->source_line);
    code_i32(c, &r->turn);
    code_i64(c, &r->order);
    code_text(c, &r->prompt);
    code_text(c, &r->text);
    code_text(c, &r->gold);
    code_bool(c, &r->failed);
    code_text(c, &r->message);
    code_text(c, &r->finish_reason);
    code_i32(c, &r->prompt_tokens);
    code_i32(c, &r->iterations);
    code_f64(c, &r->seconds);
    code_count(c, &r->tokens, 4);
    for (int32_t i = 0; i < r->tokens; i++) {
        int32_t t = c->writing ? r->token[i] : 0;
        code_i32(c, &t);
        if (token)
            token[i] = t;
    }
    code_count(c, &r->blocks, BLOCK_BYTES);
    for (int32_t i = 0; i < r->blocks; i++) {
        result_block b = {0};
        if (c->writing)
            b = r->block[i];
        code_block(c, &b);
        if (block)
            block[i] = b;
    }
    if (!c->writing) {
        r->token = token;
        r->block = block;
    }
}

static void code_iteration(codec *c, result_iteration *i)
{
    code_i64(c, &i->order);
    code_i32(c, &i->turn);
    code_i32(c, &i->block);
    code_i32(c, &i->iteration);
    code_i32(c, &i->path);
    code_i32(c, &i->live);
    code_i32(c, &i->newly);
    code_i32(c, &i->stable);
    code_i32(c, &i->fresh);
    code_i32(c, &i->commits);
    code_i32(c, &i->forced);
    code_number(c, &i->committed, 8);
    code_f32(c, &i->support_size);
    code_f32(c, &i->distinct_experts);
    code_f32(c, &i->coverage);
    code_i64(c, &i->bytes_moved);
}

static void code_counters(codec *c, result_phase *p, double *now)
{
    int32_t phases = PHASES, paths = PATHS;
    code_f64(c, now);
    code_i32(c, &phases);
    code_i32(c, &paths);
    c->bad |= phases != PHASES || paths != PATHS;
    for (int i = 0; i < PHASES; i++)
        code_f64(c, &p->seconds[i]);
    code_i64(c, &p->forwards);
    for (int i = 0; i < PATHS; i++) {
        code_i64(c, &p->rows_fresh[i]);
        code_i64(c, &p->rows_cached[i]);
    }
    code_i64(c, &p->rows_dispatched);
    code_i64(c, &p->rows_received);
    code_i64(c, &p->bytes_dispatched);
    code_i64(c, &p->bytes_combined);
    code_i64(c, &p->expert_tiles);
    code_f64(c, &p->wall_seconds);
    code_i64(c, &p->generated_tokens);
}

static void code_audit(codec *c, result_audit *a)
{
    code_i64(c, &a->order);
    code_i32(c, &a->turn);
    code_i32(c, &a->block);
    code_i32(c, &a->iteration);
    code_i32(c, &a->live);
    code_i32(c, &a->held);
    code_i32(c, &a->same);
    code_i32(c, &a->broken);
    code_i32(c, &a->block_same);
    code_f32(c, &a->max_difference);
    code_f32(c, &a->mean_difference);
    code_f32(c, &a->min_margin);
    code_f32(c, &a->mean_margin);
}

static void code_observed(codec *c, result_observed *o)
{
    int32_t steps = OBSERVED_STEPS, kinds = OBSERVED_KINDS;
    code_i32(c, &steps);
    code_i32(c, &kinds);
    c->bad |= steps != OBSERVED_STEPS || kinds != OBSERVED_KINDS;
    for (int i = 0; i < OBSERVED_STEPS; i++) {
        code_i64(c, &o->overlap_count[i]);
        code_f64(c, &o->overlap_sum[i]);
    }
    for (int k = 0; k < OBSERVED_KINDS; k++)
        for (int i = 0; i < OBSERVED_STEPS; i++) {
            code_i64(c, &o->cosine_count[k][i]);
            code_f64(c, &o->cosine_sum[k][i]);
        }
}

/* ---- reading */

static uint32_t frame_crc(const unsigned char *header, const unsigned char *payload, size_t bytes)
{
    uLong crc = crc32(0, header, FRAME_HEADER - 4);
    return (uint32_t)(bytes ? crc32(crc, payload, (uInt)bytes) : crc);
}

frame frame_next(const unsigned char *bytes, size_t size, size_t *at, int session, int rank, uint32_t *sequence)
{
    frame f = {.kind = FRAME_TORN};
    const unsigned char *h = bytes + *at;
    size_t left = size - *at;
    if (!left)
        return (frame){.kind = FRAME_END};
    if (left < FRAME_HEADER || get_number(h, 4) != FRAME_MAGIC)
        return f;
    f.version = (int)get_number(h + 4, 2);
    f.bytes = (size_t)get_number(h + 8, 4);
    f.payload = h + FRAME_HEADER;
    if (f.bytes > FRAME_MOST || f.bytes > left - FRAME_HEADER || get_number(h + 12, 4) != (uint32_t)session ||
        get_number(h + 16, 4) != (uint32_t)rank || get_number(h + 20, 4) != *sequence ||
        get_number(h + 24, 4) != frame_crc(h, f.payload, f.bytes))
        return f;
    f.found = (int)get_number(h + 6, 2);
    if (f.version != FRAME_VERSION || f.found < FRAME_SESSION || f.found > FRAME_OBSERVED) {
        f.kind = FRAME_FOREIGN;
        return f;
    }
    f.kind = (frame_kind)f.found;
    *at += FRAME_HEADER + f.bytes;
    ++*sequence;
    return f;
}

static codec reading(const frame *f)
{
    return (codec){.at = f->payload, .end = f->payload + f->bytes};
}

static bool whole(const codec *c)
{
    return !c->bad && c->at == c->end;
}

bool frame_row(result_row *r, const frame *f, int32_t *token, result_block *block)
{
    codec c = reading(f);
    memset(r, 0, sizeof *r);
    code_row(&c, r, token, block);
    return whole(&c);
}

bool frame_iteration(result_iteration *i, const frame *f)
{
    codec c = reading(f);
    memset(i, 0, sizeof *i);
    code_iteration(&c, i);
    return whole(&c);
}

bool frame_counters(result_phase *p, double *seconds_since_1970, const frame *f)
{
    codec c = reading(f);
    memset(p, 0, sizeof *p);
    *seconds_since_1970 = 0;
    code_counters(&c, p, seconds_since_1970);
    return whole(&c);
}

bool frame_audit(result_audit *a, const frame *f)
{
    codec c = reading(f);
    memset(a, 0, sizeof *a);
    code_audit(&c, a);
    return whole(&c);
}

bool frame_observed(result_observed *o, const frame *f)
{
    codec c = reading(f);
    memset(o, 0, sizeof *o);
    code_observed(&c, o);
    return whole(&c);
}

bool frame_session(double *seconds_since_1970, const frame *f)
{
    codec c = reading(f);
    *seconds_since_1970 = 0;
    code_f64(&c, seconds_since_1970);
    return whole(&c);
}

/* ---- writing */

struct journal {
    char path[PATH_MAX];
    int fd;
    int session, rank;
    uint32_t sequence; /* of the next frame */
    codec out;         /* frames that wait for the next commit */
    off_t committed;   /* bytes on the disk */
    bool broken;       /* a commit failed: what the disk holds behind `committed` is unknown */
};

void journal_name(char *name, size_t bytes, int session, int rank)
{
    snprintf(name, bytes, "s%04d.r%05d.jnl", session, rank);
}

bool journal_of_name(const char *name, int *session, int *rank)
{
    char again[64];
    if (sscanf(name, "s%9d.r%9d.jnl", session, rank) != 2 || *session < 0 || *rank < 0)
        return false;
    journal_name(again, sizeof again, *session, *rank);
    return strcmp(again, name) == 0;
}

static double now_since_1970(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Room for a header; returns where the frame starts. */
static size_t frame_begin(journal *j)
{
    size_t start = j->out.used;
    code_room(&j->out, FRAME_HEADER);
    return start;
}

/* Fills the header in, or takes the frame back where it could not be built. */
static status frame_finish(journal *j, size_t start, frame_kind kind)
{
    status st = OK;
    size_t bytes = j->out.used - start - FRAME_HEADER;
    if (j->out.bad || bytes > FRAME_MOST) {
        j->out.used = start;
        j->out.bad = false;
        FAIL(FAILED, "%s: a record found no memory, or is above the 256 MiB that a journal takes", j->path);
    }
    unsigned char *h = j->out.data + start;
    put_number(h, FRAME_MAGIC, 4);
    put_number(h + 4, FRAME_VERSION, 2);
    put_number(h + 6, kind, 2);
    put_number(h + 8, bytes, 4);
    put_number(h + 12, (uint32_t)j->session, 4);
    put_number(h + 16, (uint32_t)j->rank, 4);
    put_number(h + 20, j->sequence++, 4);
    put_number(h + 24, frame_crc(h, h + FRAME_HEADER, bytes), 4);
out:
    return st;
}

static status refuse_broken(const journal *j)
{
    status st = OK;
    if (j->broken)
        FAIL(FAILED, "%s: an earlier commit failed; run again with --resume", j->path);
out:
    return st;
}

status journal_open(journal **out, const char *dir, int rank, int session)
{
    return journal_open_at(out, dir, rank, session, now_since_1970());
}

status journal_open_at(journal **out, const char *dir, int rank, int session, double started)
{
    status st = OK;
    char name[64];
    *out = NULL;
    journal *j = calloc(1, sizeof *j);
    if (!j)
        FAIL(FAILED, "%s: no memory for a journal", dir);
    j->fd = -1;
    j->rank = rank;
    j->session = session;
    j->out.writing = true;
    journal_name(name, sizeof name, session, rank);
    if (snprintf(j->path, sizeof j->path, "%s/%s", dir, name) >= (int)sizeof j->path)
        FAIL(BAD_INPUT, "%s: the path is too long", dir);
    j->fd = open(j->path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0644);
    if (j->fd < 0)
        FAIL(FAILED, "%s: cannot be created: %s%s", j->path, strerror(errno),
             errno == EEXIST ? "; another run writes here: stop it, or choose another --out" : "");
    size_t start = frame_begin(j);
    code_f64(&j->out, &started);
    TRY(frame_finish(j, start, FRAME_SESSION));
    TRY(journal_commit(j, NULL));
    TRY(folder_sync(dir));
    *out = j;
    j = NULL;
out:
    journal_close(j);
    return st;
}

status journal_row(journal *j, const result_row *r)
{
    status st = OK;
    TRY(refuse_broken(j));
    result_row copy = *r;
    size_t start = frame_begin(j);
    code_row(&j->out, &copy, NULL, NULL);
    TRY(frame_finish(j, start, FRAME_ROW));
out:
    return st;
}

status journal_iteration(journal *j, const result_iteration *i)
{
    status st = OK;
    TRY(refuse_broken(j));
    result_iteration copy = *i;
    size_t start = frame_begin(j);
    code_iteration(&j->out, &copy);
    TRY(frame_finish(j, start, FRAME_ITERATION));
out:
    return st;
}

status journal_audit(journal *j, const result_audit *a)
{
    status st = OK;
    TRY(refuse_broken(j));
    result_audit copy = *a;
    size_t start = frame_begin(j);
    code_audit(&j->out, &copy);
    TRY(frame_finish(j, start, FRAME_AUDIT));
out:
    return st;
}

status journal_observed(journal *j, const result_observed *o)
{
    status st = OK;
    TRY(refuse_broken(j));
    result_observed copy = *o;
    size_t start = frame_begin(j);
    code_observed(&j->out, &copy);
    TRY(frame_finish(j, start, FRAME_OBSERVED));
out:
    return st;
}

status journal_commit(journal *j, const result_phase *p)
{
    return journal_commit_at(j, p, now_since_1970());
}

status journal_commit_at(journal *j, const result_phase *p, double now)
{
    status st = OK;
    TRY(refuse_broken(j));
    if (p) {
        result_phase copy = *p;
        size_t start = frame_begin(j);
        code_counters(&j->out, &copy, &now);
        TRY(frame_finish(j, start, FRAME_COUNTERS));
    }
    if (!j->out.used)
        goto out;
    const char *what = "written";
    for (size_t done = 0; done < j->out.used;) {
        ssize_t n = write(j->fd, j->out.data + done, j->out.used - done);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            j->broken = true;
            break;
        }
        done += (size_t)n;
    }
    if (!j->broken && fdatasync(j->fd) < 0) {
        what = "synced to the disk";
        j->broken = true;
    }
    if (j->broken) {
        int error = errno;
        /* Leave no torn tail where that can be helped; readers know one anyway. */
        if (ftruncate(j->fd, j->committed) < 0)
            what = strcmp(what, "written") == 0 ? "written, nor cut back" : "synced, nor cut back";
        FAIL(FAILED,
             "%s: %zu bytes could not be %s: %s; what was committed before is safe: make room, then run again "
             "with --resume",
             j->path, j->out.used, what, strerror(error));
    }
    j->committed += (off_t)j->out.used;
    j->out.used = 0;
out:
    return st;
}

size_t journal_pending(const journal *j)
{
    return j->out.used;
}

void journal_close(journal *j)
{
    if (!j)
        return;
    if (j->fd >= 0)
        close(j->fd);
    free(j->out.data);
    free(j);
}
