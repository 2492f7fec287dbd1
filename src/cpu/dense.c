/* y[n,o] = x[n,i] w[o,i]^T as tasks of one shape: DENSE_TILE rows of x by a panel of rows of w. BF16 and F16 weights
 * are widened panel by panel; the calls, and so the bits, are those of the same weight held in fp32. */
#include "src/cpu/cpu.h"

#include <assert.h>
#include <cblas.h>
#include <string.h>

void cpu_dense_open(void)
{
    openblas_set_num_threads(1);
}

void cpu_product(float *y, int64_t ldy, const float *x, int64_t ldx, const float *w, int64_t ldw, int rows, int outs,
                 int inner, float scale)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, rows, outs, inner, scale, x, (int)ldx, w, (int)ldw, 0, y,
                (int)ldy);
}

void cpu_mix(float *y, int64_t ldy, const float *x, int64_t ldx, const float *v, int64_t ldv, int rows, int outs,
             int inner, bool add)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, rows, outs, inner, 1, x, (int)ldx, v, (int)ldv,
                add ? 1.0f : 0.0f, y, (int)ldy);
}

void cpu_mix_turned(float *y, int64_t ldy, const float *x, int64_t ldx, const float *v, int64_t ldv, int rows, int outs,
                    int inner, bool add)
{
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, rows, outs, inner, 1, x, (int)ldx, v, (int)ldv,
                add ? 1.0f : 0.0f, y, (int)ldy);
}

/* OpenBLAS multiplies small matrices without packing them first, which at these sizes is twice as fast (105 against 50
 * GFLOP/s of a core's 106, AVX-512): up to 1024 results and 10^6 multiplications a call. */
int cpu_panel(int tile, int64_t inner)
{
    int panel = 1024 / tile;
    while (panel > 16 && (int64_t)tile * panel * inner > 1000000)
        panel /= 2;
    return panel;
}

size_t cpu_panel_floats(const tensor *w, int panel)
{
    return w->type == F32 ? 0 : ((size_t)panel * (size_t)w->cols + 15) / 16 * 16;
}

const float *cpu_panel_of(const tensor *w, int64_t first, int rows, float *room, int64_t *ld)
{
    if (w->type == F32) {
        *ld = w->ld;
        return cpu_row(w, first);
    }
    const uint16_t *data = w->data;
    for (int i = 0; i < rows; i++)
        cpu_widen(room + i * w->cols, data + (first + i) * w->ld, w->type, w->cols);
    *ld = w->cols;
    return room;
}

/* Rows [row, row + rows) of x by a panel; a tile that is not full goes through padded copies. */
static void tile(tensor *y, const tensor *x, int64_t row, int rows, int64_t out, int outs, const float *w, int64_t ldw,
                 float *room)
{
    int inner = (int)x->cols;
    float *to = cpu_row(y, row) + out;
    if (rows == DENSE_TILE) {
        cpu_product(to, y->ld, cpu_row(x, row), x->ld, w, ldw, DENSE_TILE, outs, inner, 1);
        return;
    }
    float *xs = room, *ys = room + DENSE_TILE * inner;
    for (int i = 0; i < rows; i++)
        memcpy(xs + i * inner, cpu_row(x, row + i), (size_t)inner * sizeof *xs);
    memset(xs + rows * inner, 0, (size_t)((DENSE_TILE - rows) * inner) * sizeof *xs);
    cpu_product(ys, outs, xs, inner, w, ldw, DENSE_TILE, outs, inner, 1);
    for (int i = 0; i < rows; i++)
        memcpy(to + i * y->ld, ys + i * outs, (size_t)outs * sizeof *ys);
}

typedef struct matmul_task {
    const cpu *c;
    tensor *y;
    const tensor *x, *w;
    int64_t rows, part; /* part: tiles of a thread's rows */
    int64_t panels;
    int panel;
} matmul_task;

/* Tasks: tile by tile of a panel, panel by panel of a part, part by part. A part may lack its last tiles. */
static void matmul_tiles(void *arg, int64_t from, int64_t to, int thread)
{
    const matmul_task *m = arg;
    const tensor *w = m->w;
    int64_t held = -1, ldw = 0;
    float *room = cpu_own(m->c, thread), *padded = room + cpu_panel_floats(w, m->panel);
    const float *wide = NULL;
    for (int64_t t = from; t < to; t++) {
        int64_t p = t / m->part % m->panels, out = p * m->panel;
        int64_t row = (t / (m->part * m->panels) * m->part + t % m->part) * DENSE_TILE;
        int width = w->rows - out < m->panel ? (int)(w->rows - out) : m->panel;
        int rows = m->rows - row < DENSE_TILE ? (int)(m->rows - row) : DENSE_TILE;
        if (rows <= 0)
            continue;
        if (p != held)
            wide = cpu_panel_of(w, out, width, room, &ldw);
        held = p;
        tile(m->y, m->x, row, rows, out, width, wide, ldw, padded);
    }
}

/* Whole panels of a part, so that each is widened once for its rows. */
static void matmul_panels(void *arg, int64_t from, int64_t to, int thread)
{
    const matmul_task *m = arg;
    matmul_tiles(arg, from * m->part, to * m->part, thread);
}

status cpu_matmul(backend *b, tensor *y, const tensor *x, const tensor *w)
{
    status st = OK;
    cpu *c = cpu_of(b);
    int64_t n = cpu_used(x), outs = w->rows, tiles = (n + DENSE_TILE - 1) / DENSE_TILE;
    assert(x->type == F32 && y->type == F32 && x->cols == w->cols && y->cols == outs && y->rows >= n);
    int panel = cpu_panel(DENSE_TILE, w->cols);
    /* Rows stay with the thread that made them, in its core's cache, unless there are too few to read a weight for. */
    int64_t parts = tiles >= 4 * c->threads ? c->threads : 1, panels = (outs + panel - 1) / panel;
    matmul_task m = {c, y, x, w, n, (tiles + parts - 1) / parts, panels, panel};
    size_t padded = (size_t)DENSE_TILE * (size_t)(w->cols + panel);
    double work = (double)n * (double)outs * (double)w->cols * 0.02;
    TRY(cpu_scratch(c, 0, (cpu_panel_floats(w, panel) + padded) * sizeof(float)));
    if (w->type == F32)
        cpu_parallel(c, work, parts * panels * m.part, matmul_tiles, &m);
    else
        cpu_parallel(c, work, parts * panels, matmul_panels, &m);
out:
    return st;
}
