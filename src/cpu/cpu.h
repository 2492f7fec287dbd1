/* Inside the CPU backend: what its files share. Every op is a plain function here, and backend_cpu.c puts them in the
 * table. Row independence comes from two habits: every product of a weight is made of sgemm calls of one shape (a tile
 * of rows, zero-padded, times a panel of the weight), and every other loop sums inside one row, in an order given by
 * the row's width alone. So neither the neighbours of a row, nor its place, nor the threads can change its bits. */
#ifndef EPOCH_CPU_H
#define EPOCH_CPU_H

#include "src/backend.h"
#include "src/cpu/pool.h"

#include <time.h>

/* Rows of a product's tile. A multiple of 4 up to 8: OpenBLAS runs all of these on one code path in every kernel it has
 * for x86; from 12 rows on, its AVX2 kernels treat the rows of one call unlike (tests/twin/test_dense.c would tell). */
enum { DENSE_TILE = 8, EXPERT_TILE = 4 };

typedef struct cpu_buffer {
    void *data;
    size_t bytes;
} cpu_buffer;

typedef struct cpu_box { /* of post and fetch */
    cpu_buffer room;
    size_t bytes; /* posted */
} cpu_box;

typedef struct cpu {
    int threads;
    cpu_pool *pool;
    cpu_buffer shared, *own; /* scratch of a call: one for all threads, one for each; they grow and never shrink */
    cpu_buffer angles;       /* rotary: cos, then sin, of rotary_dim / 2 angles for each position */
    int32_t angle_count, angle_dim;
    float angle_theta;
    double seconds[PHASES];
    struct timespec last; /* of the last mark */
    cpu_box box[BOXES];
} cpu;

static inline cpu *cpu_of(const backend *b)
{
    return b->self;
}

/* Rows of t that are in use. */
static inline int64_t cpu_used(const tensor *t)
{
    return t->used && *t->used < t->rows ? *t->used : t->rows;
}

static inline float *cpu_row(const tensor *t, int64_t row)
{
    return (float *)t->data + row * t->ld;
}

/* Scratch for this call: `shared` bytes for all threads, `own` bytes for each. FAILED: out of memory. */
status cpu_scratch(cpu *c, size_t shared, size_t own);
/* That of a task's thread. */
void *cpu_own(const cpu *c, int thread);
/* Does the tasks [0, count) on this rank's threads. work: of all tasks, in nanoseconds of one thread, roughly; a plain
 * call where it is not worth sharing. */
void cpu_parallel(cpu *c, double work, int64_t count, cpu_task *task, void *arg);

/* y[0..n) = x[0..n) as fp32; x is F32, BF16 or F16. */
void cpu_widen(float *y, const void *x, dtype type, int64_t n);
/* The other way, to the nearest, ties to even. */
void cpu_narrow(void *y, dtype type, const float *x, int64_t n);

/* dense.c: the products. All matrices are row-major fp32.
 * cpu_product: y[rows, outs] = scale * x[rows, inner] w[outs, inner]^T, one sgemm call of just this shape.
 * cpu_mix: y[rows, outs] (+)= x[rows, inner] v[inner, outs]; cpu_mix_turned: the same of x given as [inner, rows]. */
void cpu_product(float *y, int64_t ldy, const float *x, int64_t ldx, const float *w, int64_t ldw, int rows, int outs,
                 int inner, float scale);
void cpu_mix(float *y, int64_t ldy, const float *x, int64_t ldx, const float *v, int64_t ldv, int rows, int outs,
             int inner, bool add);
void cpu_mix_turned(float *y, int64_t ldy, const float *x, int64_t ldx, const float *v, int64_t ldv, int rows, int outs,
                    int inner, bool add);
/* The rows of a weight that go into one call, for a tile of `tile` rows: depends on the weight's width alone. */
int cpu_panel(int tile, int64_t inner);
/* Floats of room that cpu_panel_of wants for a panel of this weight. */
size_t cpu_panel_floats(const tensor *w, int panel);
/* Rows [first, first + rows) of w as fp32: in place, or widened into `room`. */
const float *cpu_panel_of(const tensor *w, int64_t first, int rows, float *room, int64_t *ld);

/* norm.c: y[0..n) = x / sqrt(mean(x^2) + eps) * w; y may be x. */
void cpu_norm_row(float *y, const float *x, const float *w, int64_t n, float eps);

/* route.c: the n best experts of one row under the model's own rule without a support: group limits and bias decide the
 * order, score[] is the score without bias, not normalised. z, bias [experts]. Descending order; ties to the lower id.
 * Returns how many there are: fewer than n where the kept groups hold fewer. */
int route_candidates(const float *z, const float *bias, const route_rule *r, int n, int32_t *id, float *score);

/* The ops, as backend.h describes them. */
status cpu_rows(backend *b, batch *out, slots *s, plans *p, const block_rule *r);
status cpu_commit(backend *b, slots *s, const tensor *best, const batch *in, const plans *p, const block_rule *r);
status cpu_embed(backend *b, tensor *y, const tensor *table, const tensor *ids);
status cpu_matmul(backend *b, tensor *y, const tensor *x, const tensor *w);
status cpu_gated(backend *b, tensor *y, tensor *both, const tensor *x, const tensor *w);
status cpu_norm(backend *b, tensor *y, const tensor *x, const tensor *w, float eps);
status cpu_add_norm(backend *b, const residual *r, const tensor *y, const batch *in);
status cpu_rotate(backend *b, tensor *qkv, kv_pool *kv, int layer, const tensor *q_norm, const tensor *k_norm,
                  const batch *in, const slots *s, const attention_rule *r);
status cpu_attend(backend *b, tensor *y, const tensor *qkv, const kv_pool *kv, int layer, const batch *in,
                  const slots *s, const attention_rule *r);
status cpu_pack(backend *b, tensor *packed, const tensor *full, const tensor *rows);
status cpu_support(backend *b, plans *p, int layer, const tensor *z, const tensor *bias, const batch *in,
                   const slots *s, const route_rule *r, const atlas_rule *a, const block_rule *k);
status cpu_route(backend *b, tensor *ids, tensor *weights, const tensor *z, const tensor *bias, plans *p, int layer,
                 const batch *in, const slots *s, const route_rule *r, const block_rule *k);
status cpu_experts(backend *b, tensor *y, const tensor *x, const tensor *ids, const tensor *weights,
                   const expert_set *e);
status cpu_merge(backend *b, const residual *r, const tensor *packed, const tensor *shared, tensor *cache, int layer,
                 const batch *in, const slots *s, const block_rule *k);
status cpu_head(backend *b, tensor *best, const tensor *h, const tensor *w, int32_t mask_id);

/* Sets OpenBLAS to one thread: the tasks are spread by this backend. */
void cpu_dense_open(void);

#endif
