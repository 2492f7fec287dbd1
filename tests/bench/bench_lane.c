/* Times dispatch + combine without experts, under mpirun with any number of ranks:
 *     mpirun --oversubscribe -n 2 bench_lane
 * Each rank sends `rows` tokens of H 256 with 4 of 32 experts (the tiny model's layer).
 * Zero rows: the least that a layer costs. */
#include "src/lane.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { H = 256, K = 4, E = 32, MOST = 512, WARM = 200, ROUNDS = 2000 };

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static status reserve(backend *b, void **slab, size_t bytes)
{
    status st = OK;
    (void)b;
    *slab = calloc(1, bytes);
    if (!*slab)
        FAIL(FAILED, "no memory for %zu bytes", bytes);
out:
    return st;
}

static void release(backend *b, void *slab)
{
    (void)b;
    free(slab);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static status bench(world *w)
{
    static float x[MOST * H], weights[MOST * K], y[MOST * H];
    static int32_t ids[MOST * K];
    static double seconds[ROUNDS];
    static const int32_t rows[] = {0, 1, 32, 512};
    status st = OK;
    backend memory = {.reserve = reserve, .release = release};
    sum_tree *tree = NULL;
    lane *l = NULL;
    lane_load in;
    lane_traffic moved;
    int32_t n = 0;
    TRY(sum_tree_open(&tree, E, 4, w->size));
    lane_rule rule = {.hidden = H, .top_k = K, .max_rows = MOST, .tree = tree, .payload = F32};
    TRY(lane_mpi_open(&l, &rule, &memory, w));
    for (int i = 0; i < MOST; i++)
        for (int j = 0; j < K; j++) /* an expert of each quarter */
            ids[i * K + j] = j * E / K + (7 * i + 3 * j + w->rank) % (E / K);
    tensor xt = tensor_of(x, F32, MOST, H), it = tensor_of(ids, I32, MOST, K), wt = tensor_of(weights, F32, MOST, K);
    xt.used = &n;
    if (w->rank == 0)
        printf("# dispatch + combine, %d ranks, H %d, top %d of %d experts, fp32; us: median (5 %% .. 95 %%)\n"
               "# rows a rank   us                         crossing KiB a rank\n",
               w->size, H, K, E);
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        int rounds = rows[k] > 100 ? ROUNDS / 4 : ROUNDS;
        n = rows[k];
        tensor yt = tensor_of(y, F32, n, H);
        for (int i = -WARM; i < rounds; i++) {
            if (i == 0)
                TRY(l->traffic(l, &moved)); /* the warm-up's */
            double start = now();
            TRY(l->dispatch(l, &in, &xt, &it, &wt));
            TRY(l->combine(l, &yt, &in));
            if (i >= 0)
                seconds[i] = now() - start;
        }
        TRY(l->traffic(l, &moved));
        qsort(seconds, (size_t)rounds, sizeof *seconds, by_value);
        if (w->rank == 0)
            printf("  %9d %8.1f (%7.1f .. %8.1f) %12.1f\n", n, 1e6 * seconds[rounds / 2], 1e6 * seconds[rounds / 20],
                   1e6 * seconds[rounds - 1 - rounds / 20],
                   (double)(moved.bytes_dispatched + moved.bytes_combined) / rounds / 1024);
    }
out:
    if (l)
        l->close(l);
    sum_tree_close(tree);
    return st;
}

int main(int argc, char **argv)
{
    world *w;
    status st = world_mpi_open(&w, &argc, &argv);
    if (st != OK) {
        fprintf(stderr, "%s\n", status_message());
        return st;
    }
    st = bench(w);
    if (st != OK) {
        fprintf(stderr, "rank %d: %s\n", w->rank, status_message());
        w->abort(w, st);
    }
    w->close(w);
    return st;
}
