/* demo_vs_blas OPTIONS OF epoch run: the run itself, beside its products alone. While the run decodes, every product is
 * noted: shape and weight. Before the weights are given back, the same products are done again in the same order, as
 * plain sgemm calls of their whole shapes on as many threads, and timed: what is above that is the program's overhead.
 * Attention's products are per key head and page, as long as the pages allow. Weights are held in fp32.
 *     mpirun -np 1 demo_vs_blas --model models/tiny --data gsm8k:FILE --out FILE.h5 --mode full
 * CPU seconds are those of all threads; a rank that waits for others spends them too. */
#include "src/cpu/cpu.h"
#include "src/options.h"
#include "src/run.h"
#include "src/world.h"

#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct product {
    const float *w; /* [outs, inner]; NULL: attention over `outs` pages, `rows` queries below each other, width inner */
    int32_t rows, outs, inner;
} product;

enum { PASSES = 3 };

static struct {
    backend real;
    product *list;
    size_t count, room;
    double wall, cpu, began_wall, began_cpu; /* from the first forward to the last commit */
    double blas_wall, blas_cpu, work;        /* work: multiplications */
    int64_t most_x, most_y;
    int block_size, threads;
    bool replayed;
} noted;

status __real_backend_cpu_open(backend **out, int threads);
status __wrap_backend_cpu_open(backend **out, int threads);

static double seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void note(const float *w, int64_t rows, int64_t outs, int64_t inner)
{
    if (rows == 0)
        return;
    if (noted.count == noted.room) {
        noted.room = noted.room ? 2 * noted.room : 1 << 16;
        noted.list = realloc(noted.list, noted.room * sizeof *noted.list);
        if (!noted.list)
            abort();
    }
    noted.list[noted.count++] = (product){w, (int32_t)rows, (int32_t)outs, (int32_t)inner};
    int64_t wide = w ? outs : noted.block_size; /* attention: a page of scores, then its values */
    wide = !w && inner > wide ? inner : wide;
    noted.most_x = rows * inner > noted.most_x ? rows * inner : noted.most_x;
    noted.most_y = rows * wide > noted.most_y ? rows * wide : noted.most_y;
}

static status rows(backend *b, batch *out, slots *s, plans *p, const block_rule *r)
{
    if (noted.began_wall == 0) {
        noted.began_wall = seconds(CLOCK_MONOTONIC);
        noted.began_cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);
    }
    noted.block_size = r->block_size;
    return noted.real.rows(b, out, s, p, r);
}

static status commit(backend *b, slots *s, const tensor *best, const batch *in, const plans *p, const block_rule *r)
{
    status st = noted.real.commit(b, s, best, in, p, r);
    noted.wall = seconds(CLOCK_MONOTONIC) - noted.began_wall;
    noted.cpu = seconds(CLOCK_PROCESS_CPUTIME_ID) - noted.began_cpu;
    return st;
}

static status matmul(backend *b, tensor *y, const tensor *x, const tensor *w)
{
    if (w->type != F32) {
        fprintf(stderr, "demo_vs_blas wants --weights f32\n");
        exit(BAD_INPUT);
    }
    note(w->data, cpu_used(x), w->rows, w->cols);
    return noted.real.matmul(b, y, x, w);
}

static status attend(backend *b, tensor *y, const tensor *qkv, const kv_pool *kv, int layer, const batch *in,
                     const slots *s, const attention_rule *r)
{
    const span *at = in->span.data;
    for (int64_t i = 0; i < cpu_used(&in->span); i++)
        for (int h = 0; h < r->kv_heads; h++)
            note(NULL, (int64_t)(r->heads / r->kv_heads) * r->block_size, at[i].block + 1, r->head_dim);
    return noted.real.attend(b, y, qkv, kv, layer, in, s, r);
}

static status experts(backend *b, tensor *y, const tensor *x, const tensor *ids, const tensor *weights,
                      const expert_set *e)
{
    int32_t count[SUM_TREE_EXPERTS] = {0};
    for (int64_t i = 0; i < cpu_used(x); i++)
        for (int64_t j = 0; j < ids->cols; j++) {
            int32_t id = ((const int32_t *)ids->data)[i * ids->ld + j] - e->first;
            if (id >= 0 && id < e->count)
                count[id]++;
        }
    for (int n = 0; n < e->count; n++) {
        note(cpu_row(&e->gate_up, (int64_t)n * 2 * e->inner), count[n], 2 * e->inner, e->gate_up.cols);
        note(cpu_row(&e->down, n * e->down.rows / e->count), count[n], e->down.rows / e->count, e->inner);
    }
    return noted.real.experts(b, y, x, ids, weights, e);
}

static status head(backend *b, tensor *best, const tensor *h, const tensor *w, int32_t mask_id)
{
    note(w->data, cpu_used(h), w->rows, w->cols);
    return noted.real.head(b, best, h, w, mask_id);
}

static void replay(float *x, float *y)
{
    for (size_t i = 0; i < noted.count; i++) {
        const product *p = &noted.list[i];
        int page = noted.block_size;
        if (p->w)
            cpu_product(y, p->outs, x, p->inner, p->w, p->inner, p->rows, p->outs, p->inner, 1);
        for (int k = 0; !p->w && k < p->outs; k++) {
            cpu_mix(y, p->rows, x, p->inner, x, p->rows, page, p->rows, p->inner, false);
            cpu_mix_turned(y, p->inner, x, p->rows, x, p->inner, p->rows, p->inner, page, k > 0);
        }
        noted.work += p->w ? (double)p->rows * p->outs * p->inner : 2.0 * p->rows * p->outs * page * p->inner;
    }
}

/* The run gives its memory back: the first time, the weights are still there. */
static void release(backend *b, void *slab)
{
    int64_t floats = noted.most_x > noted.most_y ? noted.most_x : noted.most_y;
    float *x = calloc((size_t)floats + 1, sizeof *x), *y = calloc((size_t)floats + 1, sizeof *y);
    openblas_set_num_threads(noted.threads);
    for (int pass = 0; x && y && !noted.replayed && pass < PASSES; pass++) {
        double wall = seconds(CLOCK_MONOTONIC), work = seconds(CLOCK_PROCESS_CPUTIME_ID);
        noted.work = 0;
        replay(x, y);
        wall = seconds(CLOCK_MONOTONIC) - wall;
        work = seconds(CLOCK_PROCESS_CPUTIME_ID) - work;
        noted.blas_wall = pass == 0 || wall < noted.blas_wall ? wall : noted.blas_wall;
        noted.blas_cpu = pass == 0 || work < noted.blas_cpu ? work : noted.blas_cpu;
    }
    noted.replayed = true;
    free(x);
    free(y);
    noted.real.release(b, slab);
}

status __wrap_backend_cpu_open(backend **out, int threads)
{
    status st = OK;
    TRY(__real_backend_cpu_open(out, threads));
    noted.real = **out;
    noted.threads = cpu_of(*out)->threads;
    (*out)->rows = rows;
    (*out)->commit = commit;
    (*out)->matmul = matmul;
    (*out)->attend = attend;
    (*out)->experts = experts;
    (*out)->head = head;
    (*out)->release = release;
out:
    return st;
}

typedef struct figures {
    double wall, cpu, blas_wall, blas_cpu, work;
    int64_t products;
    int threads;
} figures;

int main(int argc, char **argv)
{
    world *w;
    options o;
    bool help, together = true;
    status st = world_mpi_open(&w, &argc, &argv);
    if (st == OK)
        st = options_parse(&o, &help, argc - 1, argv + 1);
    if (st == OK)
        st = run(&o, w, "demo_vs_blas", &together);
    if (st != OK) {
        fprintf(stderr, "demo_vs_blas: %s\n", status_message());
        return st;
    }
    figures mine = {.wall = noted.wall,
                    .cpu = noted.cpu,
                    .blas_wall = noted.blas_wall,
                    .blas_cpu = noted.blas_cpu,
                    .work = noted.work,
                    .products = (int64_t)noted.count,
                    .threads = noted.threads};
    figures *all = calloc((size_t)w->size, sizeof *all);
    if (!all || w->gather(w, all, &mine, sizeof mine) != OK)
        return FAILED;
    if (w->rank == 0)
        printf("# decode loop, and its products alone as whole sgemm calls: seconds\n"
               "%5s %8s %9s %9s %10s %10s %9s %9s %8s %8s\n",
               "rank", "threads", "wall", "cpu", "blas wall", "blas cpu", "products", "GFLOP/s", "w/blas", "c/blas");
    for (int r = 0; r < w->size && w->rank == 0; r++)
        printf("%5d %8d %9.3f %9.3f %10.3f %10.3f %9lld %9.1f %8.2f %8.2f\n", r, all[r].threads, all[r].wall,
               all[r].cpu, all[r].blas_wall, all[r].blas_cpu, (long long)all[r].products,
               2e-9 * all[r].work / all[r].blas_cpu, all[r].wall / all[r].blas_wall, all[r].cpu / all[r].blas_cpu);
    free(all);
    free(noted.list);
    w->close(w);
    return OK;
}
