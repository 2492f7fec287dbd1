/* The routed experts of one rank: edges sorted by expert, the MLP of each expert over its rows in tiles of EXPERT_TILE
 * (zero-padded), the weighting, then each token's sum in the tree's order. An expert without edges is never touched. */
#include "src/cpu/cpu.h"
#include "src/cpu/lanes.h"

#include <assert.h>

/* The most rows that one task takes through an expert; a task widens the expert's weights once. */
enum { TASK_ROWS = 16 * EXPERT_TILE };

/* Edges by expert, each expert's run padded to whole tiles. */
typedef struct worklist {
    int32_t start[SUM_TREE_EXPERTS + 1];      /* places of each expert; all multiples of EXPERT_TILE */
    int32_t task_start[SUM_TREE_EXPERTS + 1]; /* tasks of each expert */
    int32_t *edge;                            /* [places]: the edge (token * top_k + j) at a place; -1: padding */
    int32_t *place;                           /* [tokens * top_k]: the place of an edge of this rank */
    float *y;                                 /* [places, H]: weighted outputs */
} worklist;

static int64_t most_places(int64_t edges, int count)
{
    return edges + (int64_t)(EXPERT_TILE - 1) * count;
}

static void sort_edges(worklist *w, const tensor *ids, int64_t tokens, const expert_set *e)
{
    int32_t count[SUM_TREE_EXPERTS] = {0}, next[SUM_TREE_EXPERTS];
    for (int64_t i = 0; i < tokens; i++)
        for (int64_t j = 0; j < ids->cols; j++) {
            int32_t id = ((const int32_t *)ids->data)[i * ids->ld + j] - e->first;
            if (id >= 0 && id < e->count)
                count[id]++;
        }
    w->start[0] = w->task_start[0] = 0;
    for (int x = 0; x < e->count; x++) {
        int32_t places = (count[x] + EXPERT_TILE - 1) / EXPERT_TILE * EXPERT_TILE;
        next[x] = w->start[x];
        w->start[x + 1] = w->start[x] + places;
        w->task_start[x + 1] = w->task_start[x] + (places + TASK_ROWS - 1) / TASK_ROWS;
        for (int32_t p = w->start[x] + count[x]; p < w->start[x + 1]; p++)
            w->edge[p] = -1;
    }
    for (int64_t i = 0; i < tokens; i++)
        for (int64_t j = 0; j < ids->cols; j++) {
            int32_t id = ((const int32_t *)ids->data)[i * ids->ld + j] - e->first;
            if (id >= 0 && id < e->count) {
                int32_t edge = (int32_t)(i * ids->cols + j);
                w->place[edge] = next[id];
                w->edge[next[id]++] = edge;
            }
        }
}

/* y[rows, outs] = x[rows, inner] times rows [first, first + outs) of w, tile by tile; rows: a multiple of the tile. */
static void product(float *y, const float *x, const tensor *w, int64_t first, int64_t outs, int rows, float *room)
{
    int inner = (int)w->cols, panel = cpu_panel(EXPERT_TILE, inner);
    for (int64_t out = 0; out < outs; out += panel) {
        int width = outs - out < panel ? (int)(outs - out) : panel;
        int64_t ldw;
        const float *wide = cpu_panel_of(w, first + out, width, room, &ldw);
        for (int row = 0; row < rows; row += EXPERT_TILE)
            cpu_product(y + row * outs + out, outs, x + (int64_t)row * inner, inner, wide, ldw, EXPERT_TILE, width,
                        inner, 1);
    }
}

static size_t panel_floats(const expert_set *e)
{
    size_t a = cpu_panel_floats(&e->gate_up, cpu_panel(EXPERT_TILE, e->gate_up.cols));
    size_t b = cpu_panel_floats(&e->down, cpu_panel(EXPERT_TILE, e->down.cols));
    return a > b ? a : b;
}

/* One expert over `rows` places from `first` on. room: gathered rows, gate and up, their product, a panel. */
static void expert(worklist *w, int x, int32_t first, int rows, const tensor *in, const tensor *weights,
                   const expert_set *e, float *room)
{
    int64_t hidden = in->cols, inner = e->inner, top_k = weights->cols;
    float *gathered = room, *gate_up = gathered + TASK_ROWS * hidden, *act = gate_up + TASK_ROWS * 2 * inner;
    float *panel = act + TASK_ROWS * inner, *y = w->y + first * hidden;
    for (int i = 0; i < rows; i++) {
        int32_t edge = w->edge[first + i];
        if (edge >= 0)
            memcpy(gathered + i * hidden, cpu_row(in, edge / top_k), (size_t)hidden * sizeof *gathered);
        else
            memset(gathered + i * hidden, 0, (size_t)hidden * sizeof *gathered);
    }
    product(gate_up, gathered, &e->gate_up, x * 2 * inner, 2 * inner, rows, panel);
    for (int i = 0; i < rows; i++)
        lane_swiglu(act + i * inner, gate_up + i * 2 * inner, gate_up + i * 2 * inner + inner, inner);
    product(y, act, &e->down, x * hidden, hidden, rows, panel);
    for (int i = 0; i < rows; i++) {
        int32_t edge = w->edge[first + i];
        float weight = edge < 0 ? 0 : cpu_row(weights, edge / top_k)[edge % top_k];
        for (int64_t j = 0; j < hidden; j++)
            y[i * hidden + j] *= weight;
    }
}

/* Token i's units. */
static void sum_token(tensor *y, int64_t i, const worklist *w, const tensor *ids, const expert_set *e, float *scratch)
{
    const sum_tree *t = e->tree;
    const int32_t *id = (const int32_t *)ids->data + i * ids->ld;
    int32_t mine[SUM_TREE_EXPERTS];
    const float *term[SUM_TREE_EXPERTS];
    int edges = 0, first = t->rank_unit[e->rank], units = t->rank_unit[e->rank + 1] - first;
    for (int64_t j = 0; j < ids->cols; j++)
        if (id[j] >= e->first && id[j] < e->first + e->count) {
            mine[edges] = id[j];
            term[edges++] = w->y + w->place[i * ids->cols + j] * y->cols;
        }
    for (int j = 0; j < edges;) {
        int u = t->unit_of[mine[j]];
        sum_tree_unit(t, u, cpu_row(y, i * units + u - first), mine, term, edges, y->cols, scratch);
        while (j < edges && t->unit_of[mine[j]] == u)
            j++;
    }
}

typedef struct experts_task {
    const cpu *c;
    worklist *w;
    tensor *y;
    const tensor *x, *ids, *weights;
    const expert_set *e;
} experts_task;

static void expert_runs(void *arg, int64_t from, int64_t to, int thread)
{
    const experts_task *a = arg;
    worklist *w = a->w;
    for (int32_t t = (int32_t)from; t < to; t++) {
        int n = 0;
        while (w->task_start[n + 1] <= t)
            n++;
        int32_t first = w->start[n] + (t - w->task_start[n]) * TASK_ROWS, left = w->start[n + 1] - first;
        expert(w, n, first, left < TASK_ROWS ? left : TASK_ROWS, a->x, a->weights, a->e, cpu_own(a->c, thread));
    }
}

static void sum_tokens(void *arg, int64_t from, int64_t to, int thread)
{
    const experts_task *a = arg;
    for (int64_t i = from; i < to; i++)
        sum_token(a->y, i, a->w, a->ids, a->e, cpu_own(a->c, thread));
}

static void *piece(char **at, size_t bytes)
{
    void *p = *at;
    *at += (bytes + 63) / 64 * 64;
    return p;
}

status cpu_experts(backend *b, tensor *y, const tensor *x, const tensor *ids, const tensor *weights,
                   const expert_set *e)
{
    status st = OK;
    cpu *c = cpu_of(b);
    int64_t tokens = cpu_used(x), edges = tokens * ids->cols, places = most_places(edges, e->count);
    assert(x->type == F32 && y->type == F32 && weights->type == F32 && ids->cols == weights->cols);
    assert(e->gate_up.cols == x->cols && e->down.cols == e->inner && y->cols == x->cols);
    size_t sums = (size_t)sum_tree_scratch(e->tree) * (size_t)x->cols;
    size_t own = (size_t)TASK_ROWS * (size_t)(x->cols + 3 * e->inner) + panel_floats(e);
    TRY(cpu_scratch(
        c, ((size_t)places + (size_t)edges) * sizeof(int32_t) + (size_t)(places * x->cols) * sizeof(float) + 256,
        (own > sums ? own : sums) * sizeof(float)));
    worklist w;
    char *at = c->shared.data;
    w.y = piece(&at, (size_t)(places * x->cols) * sizeof(float));
    w.edge = piece(&at, (size_t)places * sizeof(int32_t));
    w.place = piece(&at, (size_t)edges * sizeof(int32_t));
    sort_edges(&w, ids, tokens, e);
    b->expert_tiles += w.start[e->count] / EXPERT_TILE;
    experts_task t = {c, &w, y, x, ids, weights, e};
    double work = (double)w.start[e->count] * (double)x->cols;
    cpu_parallel(c, work * e->inner * 3 * 0.02, w.task_start[e->count], expert_runs, &t);
    cpu_parallel(c, work * 0.1, tokens, sum_tokens, &t);
out:
    return st;
}
