/* The lane between GPUs that write each other's memory. Alone (one rank, one GPU) the program plays several ranks in
 * one process: a lane and a stream each, windows in plain device memory; and joins a world of one by NCCL. Under mpirun
 * with a GPU a rank it is the real thing. Sums are compared bit by bit with a fold on the CPU over what the experts of
 * each rank make of a row, and with all experts on one GPU.
 *
 *   mpirun -n R test_lane_cuda               the tests
 *   mpirun -n R test_lane_cuda bench [PUSH FOLD [BF16]]   microseconds and GB/s, beside sends and receives */
#include "tests/ranks/ranks.h"

#include "mpi/lane_lsa.h"

#include <math.h>
#include <string.h>

enum { MOST = 4, MOST_EXPERTS = 64, SKIPPED = 77 };

static const size_t SCRATCH = (size_t)256 << 20;

/* One rank as this process plays it. */
typedef struct rig {
    int rank;
    backend *b;
    lane *l;
    char *window;
    void *slab;
    tensor x, ids, weights, y, used; /* of this rank's rows */
    tensor gate_up, down, partial;   /* of all experts; room of the check */
    uint16_t *x_host;
    int32_t *ids_host, n;
    float *weights_host;
    lane_load in; /* of the newest layer */
    cudaGraphExec_t graph;
} rig;

typedef struct fleet {
    int size, here; /* ranks; those in this process */
    int hidden, inner, experts, top_k;
    int64_t max_rows;
    bool sends; /* the lane of sends and receives, beside which the other is timed */
    sum_tree *tree, *alone;
    lane_rule rule;
    rig rig[MOST];
} fleet;

static void must(status st)
{
    if (st != OK)
        fail_msg("%s", status_message());
}

#define CUDA_MUST(call) must(cuda_check((call), #call, __FILE__, __LINE__))

static uint32_t seed = 1;

static uint32_t any(uint32_t below)
{
    seed ^= seed << 13;
    seed ^= seed >> 17;
    seed ^= seed << 5;
    return seed % below;
}

/* ---- a fleet */

static backend *gpu[MOST]; /* opened once */
static nccl_comm *joined;  /* so too */

static void open_gpus(int count)
{
    for (int i = 0; i < count; i++)
        if (!gpu[i]) {
            void *room;
            must(backend_cuda_open(&gpu[i], job->size == 1 ? 0 : job->local_rank));
            must(cuda_scratch(cuda_of(gpu[i]), &room, SCRATCH)); /* or it grows while others wait for this rank */
        }
}

static size_t place(size_t *at, size_t bytes)
{
    size_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

static tensor at(void *slab, size_t offset, dtype type, int64_t rows, int64_t cols)
{
    return tensor_of((char *)slab + offset, type, rows, cols);
}

static void open_rig(fleet *f, rig *g)
{
    int64_t n = f->max_rows, h = f->hidden, k = f->top_k, e = f->experts, units = 0;
    size_t all = 0;
    for (int r = 0; r < f->size; r++) {
        int64_t here = f->tree->rank_unit[r + 1] - f->tree->rank_unit[r];
        units = here > units ? here : units;
    }
    size_t x = place(&all, (size_t)(n * h) * 2), ids = place(&all, (size_t)(n * k) * 4);
    size_t weights = place(&all, (size_t)(n * k) * 4), y = place(&all, (size_t)(n * h) * 4), used = place(&all, 4);
    size_t gate_up = place(&all, (size_t)(e * 2 * f->inner * h) * 2);
    size_t down = place(&all, (size_t)(e * h * f->inner) * 2);
    size_t partial = place(&all, (size_t)(n * units * h) * 4);
    must(g->b->reserve(g->b, &g->slab, all));
    g->x = at(g->slab, x, BF16, n, h);
    g->ids = at(g->slab, ids, I32, n, k);
    g->weights = at(g->slab, weights, F32, n, k);
    g->y = at(g->slab, y, F32, n, h);
    g->used = at(g->slab, used, I32, 1, 1);
    g->gate_up = at(g->slab, gate_up, BF16, e * 2 * f->inner, h);
    g->down = at(g->slab, down, BF16, e * h, f->inner);
    g->partial = at(g->slab, partial, F32, n * units, h);
    g->x.used = g->ids.used = g->weights.used = g->y.used = g->used.data;
    must(g->b->random(g->b, &g->gate_up, 1, .5f));
    must(g->b->random(g->b, &g->down, 2, .5f));
    g->x_host = calloc((size_t)(n * h), sizeof *g->x_host);
    g->ids_host = calloc((size_t)(n * k), sizeof *g->ids_host);
    g->weights_host = calloc((size_t)(n * k), sizeof *g->weights_host);
}

/* size > 0: so many ranks in this process; 0: those of the job, joined by NCCL. */
static void open_fleet(fleet *f, int size, int experts, int n_group, int top_k, int64_t max_rows, dtype combine,
                       const lsa_blocks *blocks, double patience)
{
    char *window[MOST];
    f->size = size > 0 ? size : job->size;
    f->here = size > 0 ? size : 1;
    f->experts = experts;
    f->top_k = top_k;
    f->max_rows = max_rows;
    must(sum_tree_open(&f->tree, experts, n_group, f->size));
    must(sum_tree_open(&f->alone, experts, n_group, 1));
    f->rule = (lane_rule){.hidden = f->hidden, .top_k = top_k, .max_rows = max_rows, .tree = f->tree, .payload = BF16,
                          .combine = combine};
    open_gpus(f->here);
    for (int i = 0; i < f->here; i++) {
        rig *g = &f->rig[i];
        *g = (rig){.rank = size > 0 ? i : job->rank, .b = gpu[i]};
        open_rig(f, g);
        if (size > 0) {
            must(g->b->reserve(g->b, (void **)&g->window, lsa_window_bytes(&f->rule)));
            window[i] = g->window;
        }
    }
    if (size > 0) {
        for (int i = 0; i < f->here; i++)
            must(lsa_open(&f->rig[i].l, &f->rule, f->rig[i].b, i, window, blocks, patience));
    } else {
        if (!joined)
            must(nccl_open(&joined, job, gpu[0], true, 60));
        must(f->sends ? lane_nccl_open(&f->rig[0].l, &f->rule, gpu[0], job, joined)
                      : lsa_join(&f->rig[0].l, &f->rule, gpu[0], job, joined, blocks, patience));
    }
}

static void sync_all(fleet *f)
{
    for (int i = 0; i < f->here; i++)
        must(f->rig[i].b->sync(f->rig[i].b));
}

static void close_fleet(fleet *f)
{
    sync_all(f);
    must(job->agree(job, OK));
    for (int i = 0; i < f->here; i++) {
        rig *g = &f->rig[i];
        if (g->graph)
            cudaGraphExecDestroy(g->graph);
        g->l->close(g->l);
        g->b->release(g->b, g->window);
        g->b->release(g->b, g->slab);
        free(g->x_host);
        free(g->ids_host);
        free(g->weights_host);
    }
    sum_tree_close(f->tree);
    sum_tree_close(f->alone);
    *f = (fleet){.hidden = f->hidden, .inner = f->inner};
}

/* ---- rows */

/* n rows of up to top_k experts each; only >= 0: of that one. */
static void fill(const fleet *f, rig *g, int n, int only)
{
    g->n = n;
    for (int i = 0; i < n; i++) {
        char chosen[MOST_EXPERTS] = {0};
        int edges = 0, k = f->top_k, want = any(6) == 0 ? (int)any((uint32_t)k + 1) : k;
        int32_t *id = g->ids_host + (size_t)i * (size_t)k;
        float *w = g->weights_host + (size_t)i * (size_t)k;
        for (int h = 0; h < f->hidden; h++)
            g->x_host[(size_t)i * (size_t)f->hidden + (size_t)h] =
                (uint16_t)(0x3e00 + any(0x180) + (any(2) << 15)); /* .125 to 1, either sign */
        for (int j = 0; j < want; j++)
            chosen[only >= 0 ? (uint32_t)only : any((uint32_t)f->experts)] = 1;
        for (int e = 0; e < f->experts; e++)
            if (chosen[e]) {
                id[edges] = e;
                w[edges++] = (float)any(10007) / 10007.f;
            }
        for (; edges < k; edges++) {
            id[edges] = -1;
            w[edges] = 0;
        }
    }
}

static void put(const fleet *f, rig *g)
{
    tensor x = tensor_rows(&g->x, 0, g->n), ids = tensor_rows(&g->ids, 0, g->n), w = tensor_rows(&g->weights, 0, g->n);
    (void)f;
    must(g->b->upload(g->b, &x, g->x_host, BF16));
    must(g->b->upload(g->b, &ids, g->ids_host, I32));
    must(g->b->upload(g->b, &w, g->weights_host, F32));
    must(g->b->upload(g->b, &g->used, &g->n, I32));
}

static expert_set experts_of(const fleet *f, const rig *g, const sum_tree *t, int rank)
{
    int first = t->rank_first[rank], count = t->rank_first[rank + 1] - first;
    int64_t wide = 2 * f->inner;
    return (expert_set){.gate_up = tensor_rows(&g->gate_up, first * wide, count * wide),
                        .down = tensor_rows(&g->down, (int64_t)first * f->hidden, (int64_t)count * f->hidden),
                        .first = first, .count = count, .inner = f->inner, .tree = t, .rank = rank};
}

/* One layer: there, experts, back. */
static void layer(const fleet *f, rig *g)
{
    lane_load *in = &g->in;
    expert_set e = experts_of(f, g, f->tree, g->rank);
    must(g->l->dispatch(g->l, in, &g->x, &g->ids, &g->weights));
    e.away = in->away;
    must(g->b->experts(g->b, &in->y, &in->x, &in->ids, &in->weights, &e));
    must(g->l->combine(g->l, &g->y, in));
}

static void record(const fleet *f, rig *g, int layers)
{
    cuda *c = cuda_of(g->b);
    cudaGraph_t graph;
    CUDA_MUST(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
    c->capturing = true;
    for (int i = 0; i < layers; i++)
        layer(f, g);
    c->capturing = false;
    CUDA_MUST(cudaStreamEndCapture(c->stream, &graph));
    CUDA_MUST(cudaGraphInstantiate(&g->graph, graph, 0));
    CUDA_MUST(cudaGraphUpload(g->graph, c->stream));
    CUDA_MUST(cudaGraphDestroy(graph));
}

static float narrowed(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* y of a rank's rows against a fold on the CPU and, where sums travel whole, against all experts on one GPU. */
static void check_sums(const fleet *f, rig *g)
{
    int64_t n = g->n, h = f->hidden;
    size_t row = (size_t)h * sizeof(float);
    float *y = malloc((size_t)n * row + 1), *want = malloc((size_t)n * row + 1), *part[MOST] = {0};
    float *scratch = malloc((size_t)sum_tree_scratch(f->tree) * row), *sum = malloc(row);
    tensor got = tensor_rows(&g->y, 0, n), x = tensor_rows(&g->x, 0, n), ids = tensor_rows(&g->ids, 0, n);
    tensor w = tensor_rows(&g->weights, 0, n), p = g->partial;
    must(g->b->download(g->b, y, &got));
    for (int r = 0; r < f->size && n > 0; r++) {
        int units = f->tree->rank_unit[r + 1] - f->tree->rank_unit[r];
        expert_set e = experts_of(f, g, f->tree, r);
        p.rows = n * units;
        part[r] = malloc((size_t)(n * units) * row);
        must(g->b->experts(g->b, &p, &x, &ids, &w, &e));
        must(g->b->download(g->b, part[r], &p));
        for (int64_t i = 0; i < n * units * h && r != g->rank && f->rule.combine == BF16; i++)
            part[r][i] = narrowed(part[r][i]);
    }
    if (n > 0) {
        expert_set e = experts_of(f, g, f->alone, 0);
        p.rows = n;
        must(g->b->experts(g->b, &p, &x, &ids, &w, &e));
        must(g->b->download(g->b, want, &p));
    }
    for (int64_t i = 0; i < n; i++) {
        const float *term[MOST_EXPERTS] = {0};
        for (int j = 0; j < f->top_k && g->ids_host[i * f->top_k + j] >= 0; j++) {
            int id = g->ids_host[i * f->top_k + j], r = f->tree->rank_of[id], u = f->tree->unit_of[id];
            int first = f->tree->rank_unit[r], units = f->tree->rank_unit[r + 1] - first;
            term[u] = part[r] + (i * units + u - first) * h;
        }
        sum_tree_fold(f->tree, sum, term, h, scratch);
        if (memcmp(sum, y + i * h, row) != 0 || (f->rule.combine == F32 && memcmp(want + i * h, y + i * h, row) != 0)) {
            int64_t at_h = 0;
            while (at_h < h - 1 && sum[at_h] == y[i * h + at_h])
                at_h++;
            fail_msg("%d ranks, rank %d: row %lld of %lld, column %lld is %.9g, the fold says %.9g, one GPU %.9g",
                     f->size, g->rank, (long long)i, (long long)n, (long long)at_h, (double)y[i * h + at_h],
                     (double)sum[at_h], (double)want[i * h + at_h]);
        }
    }
    for (int r = 0; r < f->size; r++)
        free(part[r]);
    free(y);
    free(want);
    free(scratch);
    free(sum);
}

/* How many rows rank `rank` has in round k; every third of the later rounds is a small one. */
static int row_count(const fleet *f, int k, int rank)
{
    int most = (int)f->max_rows;
    switch (k) {
    case 0:
        return 0; /* everywhere */
    case 1:
        return rank == 0 ? most : 0;
    case 2:
        return rank == f->size - 1 ? 1 : most;
    case 3:
        return rank == 0 && f->size > 1 ? 0 : 7;
    default:
        return (int)any(k % 3 == 0 ? 40 : (uint32_t)most + 1);
    }
}

/* Distinct ranks, and units, of all rows. Ids and weights go to every rank. */
static void add_traffic(const fleet *f, const rig *g, lane_traffic *t)
{
    for (int i = 0; i < g->n; i++) {
        int rank = -1, unit = -1;
        t->bytes_dispatched += (f->size - 1) * 8 * f->top_k;
        for (int j = 0; j < f->top_k && g->ids_host[i * f->top_k + j] >= 0; j++) {
            int id = g->ids_host[i * f->top_k + j];
            t->rows_sent += f->tree->rank_of[id] != rank;
            t->bytes_dispatched += f->tree->rank_of[id] != rank && f->tree->rank_of[id] != g->rank ? 2 * f->hidden : 0;
            t->partials_received += f->tree->unit_of[id] != unit;
            rank = f->tree->rank_of[id];
            unit = f->tree->unit_of[id];
        }
    }
}

/* What the ranks counted since the last call, against what their rows say. */
static void check_traffic(fleet *f, const lane_traffic *want)
{
    lane_traffic got, all[MOST], sum = {0};
    for (int i = 0; i < f->here; i++) {
        rig *g = &f->rig[i];
        must(g->l->traffic(g->l, &got));
        assert_int_equal(got.rows_sent, want[i].rows_sent);
        assert_int_equal(got.rows_merged, want[i].rows_sent);
        assert_int_equal(got.partials_received, want[i].partials_received);
        assert_int_equal(got.bytes_dispatched, want[i].bytes_dispatched);
        all[i] = got;
    }
    if (f->here == 1)
        must(job->gather(job, all, &got, sizeof got));
    for (int r = 0; r < f->size && (f->here > 1 || job->rank == 0); r++) {
        sum.rows_sent += all[r].rows_sent;
        sum.rows_received += all[r].rows_received;
        sum.partials_sent += all[r].partials_sent;
        sum.partials_received += all[r].partials_received;
    }
    assert_int_equal(sum.rows_sent, sum.rows_received);
    assert_int_equal(sum.partials_sent, sum.partials_received);
}

/* What each rank says in round k, and what every rank heard of it. */
static void say(rig *g, int k)
{
    for (int i = 0; i < PULSE; i++)
        g->l->pulse[i] = 1000 * g->rank + 10 * k - i;
    must(g->b->upload(g->b, &g->l->said, g->l->pulse, I32));
}

static void check_heard(const fleet *f, rig *g, int k)
{
    int32_t heard[MOST][PULSE];
    must(g->b->download(g->b, heard, &g->l->heard));
    for (int r = 0; r < f->size; r++)
        for (int i = 0; i < PULSE; i++)
            assert_int_equal(heard[r][i], 1000 * r + 10 * k - i);
}

/* Row i of rank s lies at place i * size + s, and no edge behind the last row of a rank: rows[] has each rank's. */
static void check_arrived(const fleet *f, rig *g, const int *rows)
{
    int32_t used, most = 0, k = f->top_k;
    for (int r = 0; r < f->size; r++)
        most = rows[r] > most ? rows[r] : most;
    tensor count = tensor_of((void *)(uintptr_t)g->in.x.used, I32, 1, 1);
    must(g->b->download(g->b, &used, &count));
    assert_int_equal(used, most * f->size);
    int32_t *ids = malloc((size_t)(used * k) * sizeof *ids + 1);
    tensor here = tensor_rows(&g->in.ids, 0, used);
    must(g->b->download(g->b, ids, &here));
    for (int at = 0; at < used * k; at++) {
        int row = at / k / f->size, source = at / k % f->size;
        const rig *from = f->here > 1 ? &f->rig[source] : g;
        if (row >= rows[source])
            assert_int_equal(ids[at], -1);
        else if (from->rank == source)
            assert_int_equal(ids[at], from->ids_host[row * k + at % k]);
    }
    free(ids);
}

static void rounds(fleet *f, int count, bool replayed)
{
    int rows[MOST];
    lane_traffic want[MOST] = {{0}};
    for (int i = 0; i < f->here && replayed; i++)
        record(f, &f->rig[i], 1);
    for (int k = 0; k < count; k++) {
        int only = k == 2 ? 0 : k == 5 ? f->experts - 1 : -1;
        for (int i = 0; i < f->size; i++) { /* all ranks draw alike */
            rig *g = f->here == 1 ? &f->rig[0] : &f->rig[i];
            int n = rows[i] = row_count(f, k, i);
            uint32_t before = seed = seed + 77777u * (uint32_t)(i + 1);
            if (f->here > 1 || i == g->rank) {
                fill(f, g, n, only);
                put(f, g);
                say(g, k);
                add_traffic(f, g, &want[f->here == 1 ? 0 : i]);
            }
            seed = before + 13;
        }
        sync_all(f);
        for (int i = 0; i < f->here; i++) {
            rig *g = &f->rig[i];
            if (replayed)
                CUDA_MUST(cudaGraphLaunch(g->graph, cuda_of(g->b)->stream));
            else
                layer(f, g);
        }
        sync_all(f);
        for (int i = 0; i < f->here; i++) {
            must(f->rig[i].l->check(f->rig[i].l));
            check_heard(f, &f->rig[i], k);
            check_arrived(f, &f->rig[i], rows);
            check_sums(f, &f->rig[i]);
        }
        must(job->agree(job, OK)); /* before anybody's next rows */
    }
    check_traffic(f, want);
}

/* ---- the tests */

/* In one process all ranks share the GPU: none may keep the others from running. */
static const lsa_blocks FEW = {.push = 8, .fold = 8};

static const struct {
    int experts, n_group, top_k;
    int64_t max_rows;
    dtype combine;
} shape[] = {{16, 1, 4, 4096, F32}, {16, 4, 4, 300, F32}, {20, 10, 6, 600, F32}, {7, 1, 7, 100, F32},
             {64, 16, 5, 2000, F32}, {60, 1, 8, 1000, BF16}, {32, 8, 8, 500, BF16}, {4, 1, 1, 64, F32}};
enum { SHAPES = sizeof shape / sizeof *shape };

static void test_round_trips(void **state)
{
    (void)state;
    fleet f = {.hidden = 128, .inner = 64};
    for (int size = job->size > 1 ? 0 : 1; size <= (job->size > 1 ? 0 : MOST); size++)
        for (int k = 0; k < SHAPES; k++) {
            seed = 1234567u + (uint32_t)k;
            open_fleet(&f, size, shape[k].experts, shape[k].n_group, shape[k].top_k, shape[k].max_rows,
                       shape[k].combine, &FEW, 10);
            rounds(&f, 8, false);
            close_fleet(&f);
        }
}

/* Hidden sizes whose rows end within a warp's part, or span several. */
static void test_hidden_sizes(void **state)
{
    (void)state;
    static const struct {
        int hidden;
        int64_t max_rows;
        dtype combine;
    } size[] = {{8, 70, F32}, {264, 700, F32}, {2304, 70, BF16}, {2056, 1100, BF16}, {2312, 1100, F32}};
    for (int i = 0; i < 5; i++) {
        fleet f = {.hidden = size[i].hidden, .inner = 16};
        seed = 99u + (uint32_t)i;
        open_fleet(&f, job->size > 1 ? 0 : 2, 12, 1, 3, size[i].max_rows, size[i].combine, &FEW, 10);
        rounds(&f, 6, false);
        close_fleet(&f);
    }
}

static void test_replays(void **state)
{
    (void)state;
    fleet f = {.hidden = 128, .inner = 64};
    for (int most = 200; most <= 800; most += 600) { /* with and without the next kernel waiting beside */
        seed = 4242;
        open_fleet(&f, job->size > 1 ? 0 : 3, 24, 1, 4, most, F32, &FEW, 10);
        rounds(&f, most == 200 ? 300 : 60, true);
        close_fleet(&f);
    }
}

/* The world of one, or of all, joined by NCCL. */
static void test_nccl_windows(void **state)
{
    (void)state;
    fleet f = {.hidden = 128, .inner = 64};
    seed = 31337;
    open_fleet(&f, 0, 32, 1, 8, 1000, F32, NULL, 10);
    assert_string_equal(f.rig[0].l->name, "lsa");
    assert_true(f.rig[0].l->replays);
    rounds(&f, 10, true);
    close_fleet(&f);
}

static void expect(lane *l, const char *message)
{
    assert_int_equal(l->check(l), FAILED);
    if (!strstr(status_message(), message))
        fail_msg("\"%s\" does not say \"%s\"", status_message(), message);
}

/* Two ranks, of which the second stays away at some point: nobody waits for ever, and what follows does not wait. */
static void test_absent_rank(void **state)
{
    (void)state;
    fleet f = {.hidden = 128, .inner = 64};
    lane_load in;
    uint64_t word[1 + PULSE], ready = (uint64_t)1 << 32;
    for (int way = 0; way < 5; way++) {
        open_fleet(&f, 2, 16, 1, 4, 64, F32, &FEW, .05);
        rig *g = &f.rig[0], *other = &f.rig[1];
        seed = 5;
        fill(&f, g, 10, -1);
        fill(&f, other, 10, -1);
        put(&f, g);
        put(&f, other);
        sync_all(&f);
        for (int i = 0; i < 1 + PULSE; i++) /* of rank 1 at rank 0: rows, pulse */
            word[i] = ready;
        if (way == 1 || way == 2)
            word[0] = ready | (way == 1 ? 3 : 65);
        if (way > 0 && way < 4)
            CUDA_MUST(cudaMemcpy(g->window + sizeof word, word, sizeof word, cudaMemcpyHostToDevice));
        if (way == 3) { /* flags without the rows */
            uint64_t flag[8];
            for (int i = 0; i < 8; i++)
                flag[i] = ready | (i == 0 ? 2 : 0);
            CUDA_MUST(cudaMemcpy(g->window + 256 + sizeof flag, flag, sizeof flag, cudaMemcpyHostToDevice));
        }
        must(g->l->check(g->l));
        must(g->l->dispatch(g->l, &in, &g->x, &g->ids, &g->weights));
        if (way == 4) {
            must(other->l->dispatch(other->l, &in, &other->x, &other->ids, &other->weights));
            must(g->l->combine(g->l, &g->y, &in));
        }
        sync_all(&f);
        if (way < 2)
            expect(g->l, "the GPU waited 0.05 s for the rows of rank 1 in dispatch 1");
        else if (way == 2)
            expect(g->l, "rank 1 sends 65 rows in dispatch 1, the lane was opened for 64");
        else if (way == 3)
            expect(g->l, "lane received 2 rows from rank 1 in dispatch 1, which says that it has 0");
        else
            expect(g->l, "the GPU waited 0.05 s for the partial sums of rank 1 in dispatch 1");
        lane_traffic t;
        int32_t arrived;
        assert_int_equal(g->l->traffic(g->l, &t), FAILED);
        must(g->l->dispatch(g->l, &in, &g->x, &g->ids, &g->weights));
        must(g->l->combine(g->l, &g->y, &in));
        tensor used = tensor_of((void *)(uintptr_t)in.x.used, I32, 1, 1);
        must(g->b->download(g->b, &arrived, &used));
        assert_int_equal(arrived, 0);
        close_fleet(&f);
    }
}

/* More ranks than a warp has lanes, of which one is there: what it leaves in the windows of all. */
static void test_many_ranks(void **state)
{
    (void)state;
    enum { RANKS = 40, ROWS = 50, RANK = 1 };
    fleet f = {.hidden = 128, .inner = 64};
    char *window[RANKS];
    lane_load in;
    lane *l;
    sum_tree *many;
    open_fleet(&f, 1, 64, 1, 8, 64, F32, &FEW, 10);
    rig *g = &f.rig[0];
    lane_rule rule = f.rule;
    must(sum_tree_open(&many, 64, 1, RANKS));
    rule.tree = many;
    for (int r = 0; r < RANKS; r++)
        must(g->b->reserve(g->b, (void **)&window[r], lsa_window_bytes(&rule)));
    must(lsa_open(&l, &rule, g->b, RANK, window, &FEW, .05));
    fill(&f, g, ROWS, -1);
    put(&f, g);
    must(l->dispatch(l, &in, &g->x, &g->ids, &g->weights));
    sync_all(&f);
    expect(l, "the GPU waited 0.05 s for the rows of rank ");
    uint16_t *x = malloc((size_t)(ROWS * RANKS * f.hidden) * sizeof *x), *zero = calloc((size_t)f.hidden, sizeof *zero);
    int32_t *ids = malloc((size_t)(ROWS * RANKS * f.top_k) * sizeof *ids);
    for (int r = 0; r < RANKS; r++) {
        tensor x_there = at(window[r], (size_t)((char *)in.x.data - window[RANK]), BF16, ROWS * RANKS, f.hidden);
        tensor ids_there = at(window[r], (size_t)((char *)in.ids.data - window[RANK]), I32, ROWS * RANKS, f.top_k);
        must(g->b->download(g->b, x, &x_there));
        must(g->b->download(g->b, ids, &ids_there));
        for (int i = 0; i < ROWS; i++) {
            int place = i * RANKS + RANK;
            bool goes = false;
            for (int j = 0; j < f.top_k && g->ids_host[i * f.top_k + j] >= 0; j++)
                goes |= many->rank_of[g->ids_host[i * f.top_k + j]] == r;
            assert_memory_equal(ids + place * f.top_k, g->ids_host + i * f.top_k, (size_t)f.top_k * sizeof *ids);
            assert_memory_equal(x + place * f.hidden, goes ? g->x_host + i * f.hidden : zero,
                                (size_t)f.hidden * sizeof *x);
        }
    }
    free(x);
    free(zero);
    free(ids);
    l->close(l);
    for (int r = 0; r < RANKS; r++)
        g->b->release(g->b, window[r]);
    sum_tree_close(many);
    close_fleet(&f);
}

static void test_refusals(void **state)
{
    (void)state;
    fleet f = {.hidden = 128, .inner = 64};
    lane_load in;
    lane_traffic t;
    lane *l;
    open_fleet(&f, 1, 16, 1, 4, 64, F32, &FEW, 10);
    rig *g = &f.rig[0];
    lane_rule rule = f.rule;
    char *window[1] = {g->window};
    tensor x = g->x;
    x.rows = 65;
    tensor ids = g->ids;
    ids.rows = 65;
    assert_int_equal(g->l->dispatch(g->l, &in, &x, &ids, &g->weights), FAILED);
    assert_non_null(strstr(status_message(), "dispatch of up to 65 rows, the lane was opened for 64"));
    fill(&f, g, 3, 5);
    for (int i = 0; i < 3; i++) {
        g->ids_host[4 * i] = 5;
        g->ids_host[4 * i + 1] = -1;
    }
    put(&f, g);
    must(g->l->dispatch(g->l, &in, &g->x, &g->ids, &g->weights));
    g->ids_host[4] = -1;
    put(&f, g);
    must(g->l->combine(g->l, &g->y, &in));
    assert_int_equal(g->l->traffic(g->l, &t), FAILED);
    assert_non_null(strstr(status_message(), "lane merged 2 rows, dispatched 3: the expert ids changed before"));
    rule.hidden = 132;
    assert_int_equal(lsa_open(&l, &rule, g->b, 0, window, NULL, 1), BAD_INPUT);
    assert_non_null(strstr(status_message(), "the hidden size is 132 and top_k 4, want a multiple of 8"));
    assert_null(l);
    sum_tree *wide;
    must(sum_tree_open(&wide, 65, 1, 65));
    rule = f.rule;
    rule.tree = wide;
    assert_int_equal(lsa_open(&l, &rule, g->b, 0, window, NULL, 1), BAD_INPUT);
    assert_non_null(strstr(status_message(), "65 ranks, at most 64: take --transport nccl"));
    sum_tree_close(wide);
    close_fleet(&f);
}

/* ---- how fast */

enum { ROUND_TRIPS = 20, REPEATS = 10 };

static int by_size(const void *a, const void *b)
{
    double d = *(const double *)a - *(const double *)b;
    return (d > 0) - (d < 0);
}

typedef enum part { THERE, EXPERTS, BACK, ALONE, PARTS } part;
typedef enum pass { PLAIN, TIMED, EXPERTS_ALONE, PASSES } pass;

/* What a pass is made of. */
typedef struct course {
    const fleet *f;
    rig *g;
    tensor x, ids, w, y;
    expert_set e;
    lane_load in; /* of the newest dispatch */
    void *room;   /* where sums of experts alone go */
    cudaEvent_t event[3 * ROUND_TRIPS + 1];
} course;

static void note(course *o, pass kind, int i)
{
    cuda *c = cuda_of(o->g->b);
    if (kind == TIMED)
        CUDA_MUST(cudaEventRecordWithFlags(o->event[i], c->stream, o->g->l->replays ? cudaEventRecordExternal : 0));
}

static void enqueue_pass(course *o, pass kind)
{
    rig *g = o->g;
    int64_t units = o->f->tree->rank_unit[g->rank + 1] - o->f->tree->rank_unit[g->rank];
    note(o, kind, 0);
    for (int i = 0; i < ROUND_TRIPS; i++) {
        if (kind != EXPERTS_ALONE)
            must(g->l->dispatch(g->l, &o->in, &o->x, &o->ids, &o->w));
        note(o, kind, 3 * i + 1);
        lane_load load = o->in;
        o->e.away = kind != EXPERTS_ALONE ? load.away : NULL;
        load.x.rows = load.ids.rows = load.weights.rows = o->f->size * o->x.rows;
        load.y.rows = load.x.rows * units;
        if (load.away) /* nothing goes there then */
            load.y.data = o->room;
        must(g->b->experts(g->b, &load.y, &load.x, &load.ids, &load.weights, &o->e));
        note(o, kind, 3 * i + 2);
        if (kind != EXPERTS_ALONE)
            must(g->l->combine(g->l, &o->y, &o->in));
        note(o, kind, 3 * i + 3);
    }
}

/* Recorded once where the lane can be, else enqueued anew. */
static void go(course *o, cudaGraphExec_t exec[PASSES], pass kind)
{
    if (o->g->l->replays)
        CUDA_MUST(cudaGraphLaunch(exec[kind], cuda_of(o->g->b)->stream));
    else
        enqueue_pass(o, kind);
}

/* Rows of LLaDA2.0-mini between the ranks, with experts that do little but write their sums. Passes of ROUND_TRIPS
 * times the three, with an event at each and without, and of experts alone that write to a place of their own: what
 * they take longer to write to other ranks is the way back's. Microseconds there and back of 32 rows. */
static double bench(bool sends, int push, int fold, dtype combine)
{
    static const int rows[] = {32, 256, 2048, 4096, 8192};
    double first = 0;
    fleet f = {.hidden = 2048, .inner = 64, .sends = sends};
    lsa_blocks blocks = {push, fold};
    open_fleet(&f, 0, 64, 1, 8, 8192, combine, push > 0 ? &blocks : NULL, 20);
    rig *g = &f.rig[0];
    cuda *c = cuda_of(g->b);
    course o = {.f = &f, .g = g, .e = experts_of(&f, g, f.tree, g->rank)};
    int64_t units = f.tree->rank_unit[g->rank + 1] - f.tree->rank_unit[g->rank];
    must(g->b->reserve(g->b, &o.room, (size_t)(f.size * f.max_rows * units * f.hidden) * sizeof(float)));
    for (int i = 0; i <= 3 * ROUND_TRIPS; i++)
        CUDA_MUST(cudaEventCreate(&o.event[i]));
    for (int k = -1; k < 5; k++) { /* at first the largest once: scratch does not grow within graphs */
        double us[PARTS][ROUND_TRIPS * REPEATS], all[REPEATS], median[PARTS];
        cudaGraphExec_t exec[PASSES];
        lane_traffic t;
        int n = rows[k < 0 ? 4 : k];
        seed = 100u + (uint32_t)job->rank;
        fill(&f, g, n, -1);
        put(&f, g);
        o.x = tensor_rows(&g->x, 0, n);
        o.ids = tensor_rows(&g->ids, 0, n);
        o.w = tensor_rows(&g->weights, 0, n);
        o.y = tensor_rows(&g->y, 0, n);
        o.x.used = o.ids.used = o.w.used = o.y.used = g->used.data;
        if (k < 0) {
            enqueue_pass(&o, PLAIN);
            enqueue_pass(&o, EXPERTS_ALONE);
            must(g->b->sync(g->b));
            continue;
        }
        for (pass kind = PLAIN; kind < PASSES && g->l->replays; kind++) {
            cudaGraph_t graph;
            CUDA_MUST(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
            enqueue_pass(&o, kind);
            CUDA_MUST(cudaStreamEndCapture(c->stream, &graph));
            CUDA_MUST(cudaGraphInstantiate(&exec[kind], graph, 0));
            CUDA_MUST(cudaGraphDestroy(graph));
        }
        must(g->l->traffic(g->l, &t));
        for (int r = -1; r < REPEATS; r++) {
            float ms;
            int to = r < 0 ? 0 : r;
            must(job->agree(job, OK));
            go(&o, exec, TIMED);
            CUDA_MUST(cudaStreamSynchronize(c->stream));
            for (int i = 0; i < 3 * ROUND_TRIPS; i++) {
                CUDA_MUST(cudaEventElapsedTime(&ms, o.event[i], o.event[i + 1]));
                us[i % 3][to * ROUND_TRIPS + i / 3] = 1e3 * (double)ms;
            }
            must(job->agree(job, OK));
            go(&o, exec, PLAIN); /* so that the ranks begin together */
            CUDA_MUST(cudaEventRecord(o.event[0], c->stream));
            go(&o, exec, PLAIN);
            CUDA_MUST(cudaEventRecord(o.event[1], c->stream));
            go(&o, exec, EXPERTS_ALONE);
            CUDA_MUST(cudaEventRecord(o.event[2], c->stream));
            CUDA_MUST(cudaStreamSynchronize(c->stream));
            CUDA_MUST(cudaEventElapsedTime(&ms, o.event[0], o.event[1]));
            all[to] = 1e3 * (double)ms / ROUND_TRIPS;
            CUDA_MUST(cudaEventElapsedTime(&ms, o.event[1], o.event[2]));
            us[ALONE][to] = 1e3 * (double)ms / ROUND_TRIPS;
        }
        must(g->l->traffic(g->l, &t));
        double trips = 3 * ROUND_TRIPS * (REPEATS + 1);
        for (part p = THERE; p < PARTS; p++) {
            int count = p == ALONE ? REPEATS : ROUND_TRIPS * REPEATS;
            qsort(us[p], (size_t)count, sizeof(double), by_size);
            median[p] = us[p][count / 2];
        }
        qsort(all, REPEATS, sizeof *all, by_size);
        double back = all[REPEATS / 2] - median[THERE] - median[ALONE], both = all[REPEATS / 2] - median[ALONE];
        first = k == 0 ? both : first;
        printf("%-4s %-4s %d ranks, %5d rows each, blocks %d %d: dispatch %7.2f us %6.1f GB/s, sums and combine "
               "%7.2f us %6.1f GB/s, both %7.2f us; by events experts %7.2f combine %7.2f us, experts alone %7.2f us\n",
               g->l->name, dtype_name(combine), f.size, n, push, fold, median[THERE],
               (double)t.bytes_dispatched / trips / median[THERE] / 1e3, back,
               (double)t.bytes_combined / trips / back / 1e3, both, median[EXPERTS], median[BACK], median[ALONE]);
        fflush(stdout);
        for (pass kind = PLAIN; kind < PASSES && g->l->replays; kind++)
            CUDA_MUST(cudaGraphExecDestroy(exec[kind]));
    }
    for (int i = 0; i <= 3 * ROUND_TRIPS; i++)
        CUDA_MUST(cudaEventDestroy(o.event[i]));
    g->b->sync(g->b);
    g->b->release(g->b, o.room);
    close_fleet(&f);
    return first;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips), cmocka_unit_test(test_hidden_sizes), cmocka_unit_test(test_replays),
        cmocka_unit_test(test_nccl_windows), cmocka_unit_test(test_absent_rank), cmocka_unit_test(test_many_ranks),
        cmocka_unit_test(test_refusals),
    };
    const struct CMUnitTest joint[] = {
        cmocka_unit_test(test_round_trips), cmocka_unit_test(test_hidden_sizes), cmocka_unit_test(test_replays),
        cmocka_unit_test(test_nccl_windows),
    };
    setenv("CUDA_MODULE_LOADING", "EAGER", 1); /* loading waits for kernels, which in one process wait for others */
    ranks_open(&argc, &argv);
    int devices = backend_cuda_devices();
    if (devices < job->local_size) {
        printf("skipped: %d ranks of this host, %d GPUs\n", job->local_size, devices);
        job->close(job);
        return SKIPPED;
    }
    int failures = 0;
    if (argc > 1 && strcmp(argv[1], "bench") == 0) {
        int push = argc > 2 ? atoi(argv[2]) : 0, fold = argc > 3 ? atoi(argv[3]) : 0;
        double windows = bench(false, push, fold, argc > 4 ? BF16 : F32);
        double sends = bench(true, 0, 0, argc > 4 ? BF16 : F32);
        if (job->rank == 0)
            printf("32 rows there and back: lsa %.2f us, nccl %.2f us, %.2f times\n", windows, sends, sends / windows);
    } else if (job->size > 1) {
        failures = cmocka_run_group_tests(joint, NULL, NULL);
    } else {
        failures = cmocka_run_group_tests(tests, NULL, NULL);
    }
    nccl_close(joined);
    return ranks_close(failures);
}
