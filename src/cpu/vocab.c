/* The LM head of live rows, reduced as it is computed: argmax, its probability, the runner-up. A task is a fixed run of
 * vocabulary panels; what the tasks found of a row is joined in ascending order. */
#include "src/cpu/cpu.h"
#include "src/cpu/lanes.h"

#include <assert.h>

enum { MOST_TASKS = 64 };

/* Of one row, over a part of the vocabulary. */
typedef struct partial {
    int32_t id;        /* of top */
    float top, second; /* without the mask id */
    float peak, sum;   /* the largest logit, the mask id included, and the sum of e^(logit - peak) */
} partial;

static const partial nothing = {-1, -INFINITY, -INFINITY, -INFINITY, 0};

/* Joins b, of higher ids, to a. */
static void join(partial *a, const partial *b)
{
    if (b->top > a->top) {
        a->second = b->second > a->top ? b->second : a->top;
        a->top = b->top;
        a->id = b->id;
    } else if (b->top > a->second) {
        a->second = b->top;
    }
    if (b->peak > a->peak) {
        a->sum = a->sum * lane_exp(a->peak - b->peak) + b->sum;
        a->peak = b->peak;
    } else {
        a->sum += b->sum * lane_exp(b->peak - a->peak);
    }
}

/* Adds logits z of ids first .. first + n - 1. */
static void take(partial *p, float *z, int32_t first, int n, int32_t mask_id)
{
    partial q = {.id = -1};
    bool masked = mask_id >= first && mask_id < first + n;
    float mask = masked ? z[mask_id - first] : -INFINITY;
    if (masked)
        z[mask_id - first] = -INFINITY;
    lane_top(&q.top, &q.second, z, n);
    if (q.top > p->top)
        for (q.id = first; z[q.id - first] != q.top;)
            q.id++;
    if (masked)
        z[mask_id - first] = mask;
    q.peak = mask > q.top ? mask : q.top;
    q.sum = lane_exp_sum(z, n, q.peak);
    join(p, &q);
}

/* Rows [0, rows) of h by vocabulary rows [from, to); found[i * tasks] is row i's. room: a padded tile, its logits, a
 * widened panel. */
static void part(partial *found, int64_t tasks, const tensor *h, int64_t rows, const tensor *w, int64_t from,
                 int64_t to, int panel, int32_t mask_id, float *room)
{
    int inner = (int)h->cols;
    float *padded = room, *logits = padded + DENSE_TILE * inner, *wide = logits + DENSE_TILE * panel;
    for (int64_t i = 0; i < rows; i++)
        found[i * tasks] = nothing;
    for (int64_t v = from; v < to; v += panel) {
        int width = to - v < panel ? (int)(to - v) : panel;
        int64_t ldw;
        const float *weights = cpu_panel_of(w, v, width, wide, &ldw);
        for (int64_t row = 0; row < rows; row += DENSE_TILE) {
            const float *x = cpu_row(h, row);
            int64_t ldx = h->ld;
            int valid = rows - row < DENSE_TILE ? (int)(rows - row) : DENSE_TILE;
            if (valid < DENSE_TILE) {
                memset(padded, 0, (size_t)(DENSE_TILE * inner) * sizeof *padded);
                for (int i = 0; i < valid; i++)
                    memcpy(padded + i * inner, cpu_row(h, row + i), (size_t)inner * sizeof *padded);
                x = padded;
                ldx = inner;
            }
            cpu_product(logits, panel, x, ldx, weights, ldw, DENSE_TILE, width, inner, 1);
            for (int i = 0; i < valid; i++)
                take(&found[(row + i) * tasks], logits + i * panel, (int32_t)v, width, mask_id);
        }
    }
}

typedef struct head_task {
    const cpu *c;
    partial *found; /* [rows, tasks] */
    int64_t rows, tasks, step;
    const tensor *h, *w;
    int panel;
    int32_t mask_id;
} head_task;

static void parts(void *arg, int64_t first, int64_t last, int thread)
{
    const head_task *a = arg;
    for (int64_t t = first; t < last; t++) {
        int64_t from = t * a->step, to = from + a->step < a->w->rows ? from + a->step : a->w->rows;
        part(a->found + t, a->tasks, a->h, a->rows, a->w, from, to, a->panel, a->mask_id, cpu_own(a->c, thread));
    }
}

status cpu_head(backend *b, tensor *best, const tensor *h, const tensor *w, int32_t mask_id)
{
    status st = OK;
    cpu *c = cpu_of(b);
    int64_t n = cpu_used(h), vocab = w->rows;
    int panel = cpu_panel(DENSE_TILE, w->cols);
    int64_t panels = (vocab + panel - 1) / panel, step = (panels + MOST_TASKS - 1) / MOST_TASKS * panel;
    int64_t tasks = (vocab + step - 1) / step;
    assert(h->type == F32 && h->cols == w->cols && best->ld == (int64_t)sizeof(head_best) && best->rows >= n);
    TRY(cpu_scratch(c, (size_t)(n * tasks) * sizeof(partial),
                    ((size_t)DENSE_TILE * (size_t)(w->cols + panel) + cpu_panel_floats(w, panel)) * sizeof(float)));
    partial *found = c->shared.data;
    head_task a = {c, found, n, tasks, step, h, w, panel, mask_id};
    cpu_parallel(c, (double)n * (double)vocab * (double)w->cols * 0.02, tasks, parts, &a);
    for (int64_t i = 0; i < n; i++) {
        partial p = found[i * tasks];
        for (int64_t t = 1; t < tasks; t++)
            join(&p, &found[i * tasks + t]);
        ((head_best *)best->data)[i] = (head_best){.id = p.id < 0 ? mask_id == 0 : p.id, /* nothing compares with NaN */
                                                   .probability = lane_exp(p.top - p.peak) / p.sum,
                                                   .top = p.top,
                                                   .second = p.second};
    }
out:
    return st;
}
