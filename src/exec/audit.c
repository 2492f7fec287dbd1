#include "src/exec/audit.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 32 };               /* rows whose logits are held at once */
static const double ROUNDING = 1e-5; /* relative, of an fp32 softmax probability */

struct audit {
    executor *real, *exact;
    int32_t chunk;                           /* rows of the logits */
    void *slab;                              /* of these two */
    tensor z_real, z_exact;                  /* F32 [chunk, V] */
    arena host;                              /* of all that follows */
    float *real_logit, *exact_logit;         /* [chunk, V] */
    void *slot, *token;                      /* what the forward starts from, as in struct slots */
    slot_report *real_report, *exact_report; /* [slot_count] */
    head_best *real_best, *exact_best;       /* [live] */
    int32_t *real_live, *exact_live;         /* [live]: rows of the batch */
    int32_t *slot_of, *position;             /* [rows] */
    audit_row *row;                          /* [live] */
};

/* `live`: the most that a forward can have. */
static int32_t chunk_rows(int64_t live)
{
    return live < CHUNK ? (int32_t)live : CHUNK;
}

size_t audit_bytes(const executor_rule *r, const model_config *c, dtype activation)
{
    executor_sizes z = executor_measure(r, c, activation);
    int64_t live = (int64_t)r->slot_count * r->block.block_size;
    return z.slots + z.iteration + 2 * (size_t)chunk_rows(live) * (size_t)c->vocab * sizeof(float);
}

static void lay_host(audit *a, arena *m)
{
    const executor *x = a->real;
    size_t n = (size_t)x->slots.slot_count, rows = (size_t)x->batch.slot.rows, live = (size_t)x->a.best.rows;
    size_t logits = (size_t)a->chunk * (size_t)x->config->vocab * sizeof(float);
    a->real_logit = arena_take(m, logits);
    a->exact_logit = arena_take(m, logits);
    a->slot = arena_take(m, n * (size_t)x->slots.slot.cols);
    a->token = arena_take(m, n * (size_t)x->slots.token.cols * sizeof(int32_t));
    a->real_report = arena_take(m, n * sizeof *a->real_report);
    a->exact_report = arena_take(m, n * sizeof *a->exact_report);
    a->real_best = arena_take(m, live * sizeof *a->real_best);
    a->exact_best = arena_take(m, live * sizeof *a->exact_best);
    a->real_live = arena_take(m, live * sizeof *a->real_live);
    a->exact_live = arena_take(m, live * sizeof *a->exact_live);
    a->slot_of = arena_take(m, rows * sizeof *a->slot_of);
    a->position = arena_take(m, rows * sizeof *a->position);
    a->row = arena_take(m, live * sizeof *a->row);
}

status audit_open(audit **out, executor *real)
{
    status st = OK;
    backend *b = real->backend;
    int64_t vocab = real->config->vocab;
    *out = NULL;
    audit *a = calloc(1, sizeof *a);
    if (!a)
        FAIL(FAILED, "out of memory");
    a->real = real;
    a->chunk = chunk_rows(real->a.best.rows);
    size_t logits = (size_t)a->chunk * (size_t)vocab * sizeof(float);
    TRY(executor_open_shadow(&a->exact, real));
    TRY(b->reserve(b, &a->slab, 2 * logits));
    a->z_real = tensor_of(a->slab, F32, a->chunk, vocab);
    a->z_exact = tensor_of((char *)a->slab + logits, F32, a->chunk, vocab);
    lay_host(a, &a->host);
    a->host = (arena){.name = "audit", .bytes = a->host.used, .slab = malloc(a->host.used + 1)};
    if (!a->host.slab)
        FAIL(FAILED, "out of memory for --audit: %zu bytes wanted", a->host.bytes);
    lay_host(a, &a->host);
    *out = a;
    a = NULL;
out:
    audit_close(a);
    return st;
}

void audit_close(audit *a)
{
    if (!a)
        return;
    if (a->slab)
        a->real->backend->release(a->real->backend, a->slab);
    executor_close(a->exact);
    free(a->host.slab);
    free(a);
}

status audit_before(audit *a)
{
    status st = OK;
    backend *b = a->real->backend;
    TRY(b->download(b, a->slot, &a->real->slots.slot));
    TRY(b->download(b, a->token, &a->real->slots.token));
    TRY(b->upload(b, &a->exact->slots.slot, a->slot, U8));
    TRY(b->upload(b, &a->exact->slots.token, a->token, I32));
out:
    return st;
}

void audit_compare(audit_row *r, const float *exact, const float *real, int32_t vocab, int32_t mask_id)
{
    int32_t best = -1, second = -1;
    double peak = -INFINITY, sum = 0;
    *r = (audit_row){0};
    for (int32_t v = 0; v < vocab; v++) {
        double d = fabs((double)exact[v] - (double)real[v]);
        r->difference = d <= r->difference ? r->difference : isnan(d) ? INFINITY : d;
        if (v == mask_id)
            continue;
        if (best < 0 || exact[v] > exact[best]) {
            second = best;
            best = v;
        } else if (second < 0 || exact[v] > exact[second]) {
            second = v;
        }
    }
    r->lead = second < 0 ? INFINITY : (double)exact[best] - (double)exact[second];
    for (int32_t v = 0; v < vocab; v++)
        if (v != best && exact[v] > peak)
            peak = exact[v];
    for (int32_t v = 0; v < vocab; v++)
        sum += v == best ? 0 : exp((double)exact[v] - peak);
    r->odds = best < 0 ? -INFINITY : exact[best] - (peak + log(sum));
}

void audit_judge(audit_row *row, int rows, float threshold)
{
    double tau = (double)threshold, at = log(tau) - log1p(-tau), slack = ROUNDING / (1 - tau), rival = -INFINITY;
    int first = 0; /* the most probable row */
    bool alike = true, safe_pass = false, all = true;
    for (int i = 1; i < rows; i++)
        if (row[i].odds > row[first].odds)
            first = i;
    for (int i = 0; i < rows; i++)
        if (i != first && row[i].odds > rival)
            rival = row[i].odds;
    bool passes = rows > 0 && row[first].odds > at;
    for (int i = 0; i < rows; i++) {
        audit_row *r = &row[i];
        double room = fmin(r->lead, fabs(r->odds - at));
        if (!passes)
            room = fmin(room, (row[first].odds - (i == first ? rival : r->odds)) / 2);
        r->margin = room > slack ? (room - slack) / 2 : 0;
        r->held = r->difference < r->margin; /* so far: by its own logits */
        alike &= r->difference == 0;
        all &= r->held;
        safe_pass |= r->held && r->odds > at;
    }
    bool leader = rows > 0 && row[first].held;
    for (int i = 0; i < rows; i++) {
        bool company = passes ? safe_pass : i == first ? all : leader;
        row[i].held = alike || (row[i].held && company);
    }
}

/* The rows' logits, CHUNK by CHUNK. */
static status compare(audit *a, int64_t live)
{
    status st = OK;
    backend *b = a->real->backend;
    const tensor *head = &a->real->weights->head;
    int32_t vocab = a->real->config->vocab;
    for (int64_t first = 0; first < live; first += a->chunk) {
        int64_t n = live - first < a->chunk ? live - first : a->chunk;
        tensor real = tensor_rows(&a->z_real, 0, n), exact = tensor_rows(&a->z_exact, 0, n);
        tensor h_real = tensor_rows(&a->real->a.n_live, first, n), h_exact = tensor_rows(&a->exact->a.n_live, first, n);
        TRY(b->matmul(b, &real, &h_real, head));
        TRY(b->matmul(b, &exact, &h_exact, head));
        TRY(b->download(b, a->real_logit, &real));
        TRY(b->download(b, a->exact_logit, &exact));
        for (int64_t i = 0; i < n; i++)
            audit_compare(&a->row[first + i], a->exact_logit + i * vocab, a->real_logit + i * vocab, vocab,
                          a->real->rule.block.mask_id);
    }
out:
    return st;
}

/* Live rows [first, first + rows) are those of slot i. */
static void sum_up(audit_slot *to, const audit *a, int32_t i, int64_t first, int rows)
{
    const block_rule *k = &a->real->rule.block;
    const slot_report *real = &a->real_report[i], *exact = &a->exact_report[i];
    *to = (audit_slot){0};
    if (real->broken || rows == 0)
        return;
    audit_judge(a->row + first, rows, k->threshold);
    double differences = 0, margins = 0, least = INFINITY, most = 0;
    for (int64_t r = first; r < first + rows; r++) {
        uint64_t bit = 1ull << (a->position[a->real_live[r]] % k->block_size);
        bool commits = real->committed & bit, would = exact->committed & bit;
        bool same = commits == would && (!commits || a->real_best[r].id == a->exact_best[r].id);
        to->held += a->row[r].held;
        to->same += same;
        to->broken += a->row[r].held && !same;
        differences += a->row[r].difference;
        margins += a->row[r].margin;
        most = fmax(most, a->row[r].difference);
        least = fmin(least, a->row[r].margin);
    }
    to->live = rows;
    to->max_difference = (float)most;
    to->mean_difference = (float)(differences / rows);
    to->min_margin = (float)least;
    to->mean_margin = (float)(margins / rows);
}

/* The live rows of a forward; how many. */
static status live_rows(const executor *x, int32_t *row, int32_t *count)
{
    status st = OK;
    backend *b = x->backend;
    int32_t counts[4];
    TRY(b->download(b, counts, &x->batch.count));
    *count = counts[3];
    tensor live = tensor_rows(&x->batch.live, 0, *count);
    TRY(b->download(b, row, &live));
out:
    return st;
}

status audit_after(audit *a, audit_slot *found)
{
    status st = OK;
    executor *real = a->real, *exact = a->exact;
    backend *b = real->backend;
    int32_t live, exact_live;
    TRY(executor_forward(exact));
    TRY(live_rows(real, a->real_live, &live));
    TRY(live_rows(exact, a->exact_live, &exact_live));
    if (live != exact_live || memcmp(a->real_live, a->exact_live, (size_t)live * sizeof *a->real_live) != 0)
        FAIL(FAILED,
             "--audit: %d live rows, the dense executor has %d, or other ones: they started from different slots", live,
             exact_live);
    TRY(b->download(b, a->slot_of, &real->batch.slot));
    TRY(b->download(b, a->position, &real->batch.position));
    TRY(b->download(b, a->real_best, &real->a.best));
    TRY(b->download(b, a->exact_best, &exact->a.best));
    TRY(executor_reports(real, a->real_report));
    TRY(executor_reports(exact, a->exact_report));
    TRY(compare(a, live));
    for (int32_t i = 0, first = 0, rows; i < real->slots.slot_count; i++, first += rows) {
        for (rows = 0; first + rows < live && a->slot_of[a->real_live[first + rows]] == i;)
            rows++;
        sum_up(&found[i], a, i, first, rows);
    }
out:
    return st;
}
