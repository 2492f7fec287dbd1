/* bench_cpu [threads] [prefix blocks] [bf16]: microseconds of each CPU op at the tiny model's shapes, for forwards of
 * 32 to 2048 rows (blocks of 32, one a slot), beside the same products as plain sgemm calls without tiles or padding
 * (left out for weights held in 16 bits); then what a whole forward takes. Each figure is the least of several runs. */
#include "src/cpu/cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { H = 256, HEADS = 8, KV_HEADS = 2, D = 32, QKV = (HEADS + 2 * KV_HEADS) * D, B = 32, V = 1536, MASK = 1522 };
enum { EXPERTS = 32, TOP_K = 4, INNER = 64, DENSE_INNER = 512, LAYERS = 8, MOST = 2048, SLOTS = MOST / B };

static const attention_rule attention = {HEADS, KV_HEADS, D, D / 2, 10000, 1e-6f, true, B};
static const route_rule routing = {EXPERTS, TOP_K, 4, 2, 2.5f, true};
static const block_rule block = {.block_size = B, .cohort = 1};

/* All that the ops work on, for `rows` rows. */
typedef struct bench {
    backend *b;
    int prefix;
    int32_t count[4];
    tensor x, y, h, qkv, attended, both, inner, z, ids, weights, sums, best, cache;
    tensor w_qkv, w_out, w_both, w_inner, w_down, w_router, w_head, w_dense, w_dense_down, norm, head_norm, bias;
    expert_set experts;
    kv_pool kv;
    slots s;
    batch in;
    plans p;
} bench;

static void stop(status st)
{
    if (st != OK) {
        fprintf(stderr, "bench_cpu: %s\n", status_message());
        exit(st);
    }
}

static tensor numbers(int64_t rows, int64_t cols, float scale)
{
    tensor t = tensor_of(malloc((size_t)(rows * cols) * sizeof(float)), F32, rows, cols);
    for (int64_t i = 0; i < rows * cols; i++)
        ((float *)t.data)[i] = ((float)rand() / (float)RAND_MAX - 0.5f) * scale;
    return t;
}

static tensor zeros(dtype type, int64_t rows, int64_t cols)
{
    return tensor_of(calloc((size_t)(rows * cols), dtype_bytes(type)), type, rows, cols);
}

/* A matrix of weights, held as `type`. */
static tensor matrix(backend *b, int64_t rows, int64_t cols, dtype type)
{
    tensor wide = numbers(rows, cols, .1f), held = zeros(type, rows, cols);
    stop(b->upload(b, &held, wide.data, F32));
    free(wide.data);
    return held;
}

static void open_bench(bench *x, int threads, int prefix, dtype held, const sum_tree *tree)
{
    memset(x, 0, sizeof *x);
    stop(backend_cpu_open(&x->b, threads));
    x->prefix = prefix;
    x->x = numbers(MOST, H, 2), x->y = numbers(MOST, H, 2), x->h = numbers(MOST, H, 2);
    x->qkv = numbers(MOST, QKV, 2), x->attended = numbers(MOST, H, 2);
    x->both = numbers(MOST, 2 * DENSE_INNER, 2), x->inner = numbers(MOST, DENSE_INNER, 2);
    x->z = numbers(MOST, EXPERTS, 4), x->ids = zeros(I32, MOST, TOP_K), x->weights = numbers(MOST, TOP_K, 1);
    x->sums = numbers(MOST, H, 1), x->best = zeros(U8, MOST, sizeof(head_best)), x->cache = numbers(MOST, H, 1);
    x->w_qkv = matrix(x->b, QKV, H, held), x->w_out = matrix(x->b, H, H, held),
    x->w_router = matrix(x->b, EXPERTS, H, F32);
    x->w_both = matrix(x->b, 2 * INNER, H, held), x->w_down = matrix(x->b, H, INNER, held);
    x->w_dense = matrix(x->b, 2 * DENSE_INNER, H, held), x->w_dense_down = matrix(x->b, H, DENSE_INNER, held);
    x->w_head = matrix(x->b, V, H, held), x->norm = numbers(1, H, 1), x->head_norm = numbers(1, D, 1);
    x->bias = zeros(F32, 1, EXPERTS);
    x->experts = (expert_set){.gate_up = matrix(x->b, EXPERTS * 2 * INNER, H, held),
                              .down = matrix(x->b, EXPERTS * H, INNER, held),
                              .count = EXPERTS,
                              .inner = INNER,
                              .tree = tree};
    x->kv.k = numbers((int64_t)SLOTS * (prefix + 1) * B, KV_HEADS * D, 2);
    x->kv.v = numbers((int64_t)SLOTS * (prefix + 1) * B, KV_HEADS * D, 2);
    x->kv.page_count = SLOTS * (prefix + 1);
    x->s = (slots){.slot_count = SLOTS, .max_blocks = prefix + 1};
    x->s.slot = zeros(U8, SLOTS, sizeof(slot)), x->s.page = zeros(I32, SLOTS, prefix + 1);
    for (int i = 0; i < x->kv.page_count; i++)
        ((int32_t *)x->s.page.data)[i] = i;
    x->p = (plans){.cohort_count = SLOTS, .layers = 1};
    x->p.support = zeros(I32, SLOTS, 2), x->p.log = zeros(U8, SLOTS, sizeof(layer_log));
    batch *in = &x->in;
    in->token = zeros(I32, MOST, 1), in->position = zeros(I32, MOST, 1), in->slot = zeros(I32, MOST, 1);
    in->role = zeros(I32, MOST, 1), in->span = zeros(I32, SLOTS, 4), in->fresh = zeros(I32, MOST, 1);
    in->place = zeros(I32, MOST, 1);
    for (int i = 0; i < MOST; i++) {
        ((int32_t *)in->position.data)[i] = prefix * B + i % B;
        ((int32_t *)in->slot.data)[i] = i / B;
        ((int32_t *)in->role.data)[i] = ROW_LIVE;
        ((int32_t *)in->fresh.data)[i] = ((int32_t *)in->place.data)[i] = i;
        ((int32_t *)in->token.data)[i] = i % V;
        ((span *)in->span.data)[i / B] = (span){i / B, prefix, i / B * B, 0};
        ((slot *)x->s.slot.data)[i / B].fresh = ~0ull;
        ((slot *)x->s.slot.data)[i / B].path = PATH_COLD;
    }
    tensor *of_rows[] = {&x->x,      &x->y,         &x->h,     &x->qkv,     &x->attended, &x->both,
                         &x->inner,  &x->z,         &x->ids,   &x->weights, &x->sums,     &x->best,
                         &in->token, &in->position, &in->slot, &in->role,   &in->fresh};
    for (size_t i = 0; i < sizeof of_rows / sizeof *of_rows; i++)
        of_rows[i]->used = &x->count[0];
    in->span.used = &x->count[1];
}

static tensor columns(tensor t, int64_t cols)
{
    t.cols = t.ld = cols;
    return t;
}

/* One of everything that a forward does; `blas` runs its products as plain calls. */
typedef enum op {
    EMBED,
    NORM,
    QKV_MATMUL,
    ROTATE,
    ATTEND,
    OUT_MATMUL,
    ADD_NORM,
    DENSE_MLP,
    SHARED_MLP,
    ROUTER_MATMUL,
    ROUTE,
    PACK,
    EXPERT_MLP,
    MERGE,
    HEAD,
    OPS
} op;

/* Name, and how often a forward of the tiny model (1 dense layer, 7 sparse ones) does it. */
static const struct {
    const char *name;
    int times;
} ops[OPS] = {{"embed", 1},
              {"norm", 1},
              {"qkv", LAYERS},
              {"rotate", LAYERS},
              {"attend", LAYERS},
              {"out", LAYERS},
              {"add and norm", LAYERS + 1},
              {"dense mlp", 1},
              {"shared mlp", LAYERS - 1},
              {"router", LAYERS - 1},
              {"route", LAYERS - 1},
              {"pack", LAYERS - 1},
              {"experts", LAYERS - 1},
              {"merge", LAYERS - 1},
              {"head", 1}};

static void mlp(bench *x, const tensor *w_both, const tensor *w_down)
{
    tensor both = columns(x->both, w_both->rows), inner = columns(x->inner, w_down->cols);
    stop(x->b->gated(x->b, &inner, &both, &x->x, w_both));
    stop(x->b->matmul(x->b, &x->y, &inner, w_down));
}

static void run_op(bench *x, op o)
{
    backend *b = x->b;
    residual after = {.x = x->x, .h = x->h, .norm = &x->norm, .eps = 1e-6f};
    switch (o) {
    case EMBED:
        stop(b->embed(b, &x->y, &x->w_head, &x->in.token));
        break;
    case NORM:
        stop(b->norm(b, &x->y, &x->x, &x->norm, 1e-6f));
        break;
    case QKV_MATMUL:
        stop(b->matmul(b, &x->qkv, &x->x, &x->w_qkv));
        break;
    case ROTATE:
        stop(b->rotate(b, &x->qkv, &x->kv, 0, &x->head_norm, &x->head_norm, &x->in, &x->s, &attention));
        break;
    case ATTEND:
        stop(b->attend(b, &x->attended, &x->qkv, &x->kv, 0, &x->in, &x->s, &attention));
        break;
    case OUT_MATMUL:
        stop(b->matmul(b, &x->y, &x->attended, &x->w_out));
        break;
    case ADD_NORM:
        stop(b->add_norm(b, &after, &x->y, &x->in));
        break;
    case DENSE_MLP:
        mlp(x, &x->w_dense, &x->w_dense_down);
        break;
    case SHARED_MLP:
        mlp(x, &x->w_both, &x->w_down);
        break;
    case ROUTER_MATMUL:
        stop(b->matmul(b, &x->z, &x->x, &x->w_router));
        break;
    case ROUTE:
        stop(b->route(b, &x->ids, &x->weights, &x->z, &x->bias, &x->p, 0, &x->in, &x->s, &routing, &block));
        break;
    case PACK:
        stop(b->pack(b, &x->h, &x->x, &x->in.fresh));
        break;
    case EXPERT_MLP:
        stop(b->experts(b, &x->sums, &x->x, &x->ids, &x->weights, &x->experts));
        break;
    case MERGE:
        stop(b->merge(b, &after, &x->sums, &x->y, &x->cache, 0, &x->in, &x->s, &block));
        break;
    case HEAD:
        stop(b->head(b, &x->best, &x->x, &x->w_head, MASK));
        break;
    case OPS:
        break;
    }
}

static void plain(const tensor *y, const tensor *x, const tensor *w, int rows)
{
    cpu_product(y->data, w->rows, x->data, w->cols, w->data, w->cols, rows, (int)w->rows, (int)w->cols, 1);
}

static void plain_attend(bench *x, int spans)
{
    static float score[B * B];
    for (int i = 0; i < spans * HEADS * (x->prefix + 1); i++) {
        const float *k = x->kv.k.data, *q = x->qkv.data;
        cpu_product(score, B, q, QKV, k, KV_HEADS * D, B, B, D, 1);
        cpu_mix(x->attended.data, D, score, B, k, KV_HEADS * D, B, D, B, true);
    }
}

static void plain_experts(bench *x, int rows)
{
    int count[EXPERTS] = {0};
    for (int i = 0; i < rows * TOP_K; i++)
        count[((int32_t *)x->ids.data)[i]]++;
    for (int e = 0; e < EXPERTS; e++) {
        tensor up = tensor_rows(&x->experts.gate_up, e * 2 * INNER, 2 * INNER),
               down = tensor_rows(&x->experts.down, e * H, H);
        if (count[e]) {
            plain(&x->both, &x->x, &up, count[e]);
            plain(&x->y, &x->inner, &down, count[e]);
        }
    }
}

/* Returns whether the op has products. */
static int run_plain(bench *x, op o, int rows)
{
    switch (o) {
    case QKV_MATMUL:
        plain(&x->qkv, &x->x, &x->w_qkv, rows);
        return 1;
    case ATTEND:
        plain_attend(x, rows / B);
        return 1;
    case OUT_MATMUL:
        plain(&x->y, &x->attended, &x->w_out, rows);
        return 1;
    case DENSE_MLP:
        plain(&x->both, &x->x, &x->w_dense, rows);
        plain(&x->y, &x->inner, &x->w_dense_down, rows);
        return 1;
    case SHARED_MLP:
        plain(&x->both, &x->x, &x->w_both, rows);
        plain(&x->y, &x->inner, &x->w_down, rows);
        return 1;
    case ROUTER_MATMUL:
        plain(&x->z, &x->x, &x->w_router, rows);
        return 1;
    case EXPERT_MLP:
        plain_experts(x, rows);
        return 1;
    case HEAD:
        for (int i = 0; i < rows; i += 64) { /* logits of 64 rows at a time, thrown away */
            tensor part = tensor_rows(&x->x, i, rows - i < 64 ? rows - i : 64);
            plain(&x->both, &part, &x->w_head, (int)part.rows);
        }
        return 1;
    default:
        return 0;
    }
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* The least time of one call over at least 5 runs and 15 ms; 0 where a plain op has no products. */
static double least(bench *x, op o, int rows, int blas)
{
    double best = 1e30, begin = now();
    for (int i = 0; i < 5 || now() - begin < 15000; i++) {
        double from = now();
        if (blas && !run_plain(x, o, rows))
            return 0;
        if (!blas)
            run_op(x, o);
        double took = now() - from;
        best = took < best ? took : best;
    }
    return best;
}

int main(int argc, char **argv)
{
    static const int row_counts[] = {32, 64, 512, 2048};
    enum { COUNTS = sizeof row_counts / sizeof *row_counts };
    int threads = argc > 1 ? atoi(argv[1]) : 1, prefix = argc > 2 ? atoi(argv[2]) : 8;
    sum_tree *tree;
    stop(sum_tree_open(&tree, EXPERTS, 4, 1));
    static bench x;
    dtype held = argc > 3 && !strcmp(argv[3], "bf16") ? BF16 : F32;
    open_bench(&x, threads, prefix, held, tree);
    double sum[COUNTS][2] = {{0}};
    printf("# %d threads, prefix of %d blocks; us a call, then us of its products as plain sgemm on one thread\n%-11s",
           threads, prefix, "op x times");
    for (int n = 0; n < COUNTS; n++)
        printf(" %8d rows   sgemm", row_counts[n]);
    printf("\n");
    for (op o = 0; o < OPS; o++) {
        printf("%-11s", ops[o].name);
        for (int n = 0; n < COUNTS; n++) {
            x.count[0] = row_counts[n];
            x.count[1] = row_counts[n] / B;
            double us[2] = {least(&x, o, row_counts[n], 0), held == F32 ? least(&x, o, row_counts[n], 1) : 0};
            printf(" %13.1f %7.1f", us[0], us[1]);
            sum[n][0] += us[0] * ops[o].times;
            sum[n][1] += us[1] * ops[o].times;
        }
        printf("  x %d\n", ops[o].times);
    }
    printf("%-11s", "forward");
    for (int n = 0; n < COUNTS; n++)
        printf(" %13.0f %7.0f", sum[n][0], sum[n][1]);
    printf("\n");
    x.b->close(x.b);
    sum_tree_close(tree);
    return 0;
}
