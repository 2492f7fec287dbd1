/* Seam: one rank's memory and arithmetic. A table of ops, chosen at start by --device; every member is required.
 *
 * Every tensor an op takes lives in the backend's memory. Calls enqueue on `stream`; only download, fetch, sync and
 * laps wait. Row counts live there too (tensor.used): an op launches for `rows` and touches the rows used. The dtype of
 * the activations is the backend's: F32 on the CPU, BF16 on a GPU (`activation`); sums are always fp32.
 * A row's result never depends on how many rows share a call, nor on its place among them. */
#ifndef EPOCH_BACKEND_H
#define EPOCH_BACKEND_H

#include "src/base/counters.h"
#include "src/base/status.h"
#include "src/base/sum_tree.h"
#include "src/base/tensor.h"
#include "src/slot.h"

/* The sequences in flight on this rank. */
typedef struct slots {
    tensor slot;    /* U8 [slot_count, sizeof(slot)] */
    tensor token;   /* I32 [slot_count, max_blocks * B]: prompt, then masks and committed tokens */
    tensor page;    /* I32 [slot_count, max_blocks]: the KV page of each block */
    tensor report;  /* U8 [slot_count, sizeof(slot_report)] */
    tensor pace;    /* I32 [patterns, steps]: how many positions iteration i of a block commits, in place of the
                       decision rule; no data, as opened: the rule decides. Block b of slot s follows pattern
                       (s + b * slot_count) % patterns. What benchmarks run at. */
    int32_t slot_count, max_blocks;
} slots;

/* What the pace asks for; -1: the rule decides. */
static inline EPOCH_BOTH int32_t slots_pace(const slots *s, int32_t index, int32_t block, int32_t iteration)
{
    if (!s->pace.data)
        return -1;
    if (iteration >= s->pace.cols)
        return 0;
    int64_t pattern = (index + (int64_t)block * s->slot_count) % s->pace.rows;
    return ((const int32_t *)s->pace.data)[pattern * s->pace.ld + iteration];
}

/* The lowest n positions of a mask. */
static inline EPOCH_BOTH uint64_t slot_lowest(uint64_t mask, int32_t n)
{
    uint64_t taken = 0;
    for (; n > 0 && mask; n--, mask &= mask - 1)
        taken |= mask & (~mask + 1);
    return taken;
}

/* A number in [-1, 1), by seed and place alone. */
static inline EPOCH_BOTH float random_at(uint64_t seed, uint64_t place)
{
    uint64_t x = (place + 1) * 0x9e3779b97f4a7c15u + seed * 0xd1342543de82ef95u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (float)(x >> 40) * 0x1p-23f - 1.0f;
}

/* Keys and values of all layers: page p of layer l is rows [(l * page_count + p) * B, + B). Keys after norm and rotary.
 */
typedef struct kv_pool {
    tensor k, v;    /* [layers * page_count * B, kv_heads * head_dim] */
    int32_t page_count;
} kv_pool;

enum row_role { ROW_SEALING, ROW_LIVE, ROW_NEW, ROW_STABLE }; /* sealing: prefill or the block before a cold one */

/* One query block of a forward. */
typedef struct span {
    int32_t slot, block;    /* queries of `block` see the keys of blocks 0 .. block */
    int32_t row;            /* its first row of the batch; it has B rows */
    int32_t sealing;
} span;

/* The rows of one forward, written by the op `rows`. Spans, and so rows, are in slot order, a sealed block before the
 * active one. The lists hold ascending row numbers of the batch. */
typedef struct batch {
    tensor token;    /* I32 [rows, 1], used: row_count */
    tensor position; /* I32 [rows, 1], used: row_count; from 0 of the sequence */
    tensor slot;     /* I32 [rows, 1], used: row_count */
    tensor role;     /* I32 [rows, 1], used: row_count; row_role */
    tensor span;     /* I32 [spans, 4], used: span_count; struct span */
    tensor fresh;    /* I32 [rows, 1], used: fresh_count; rows dispatched to routed experts, sealing rows among them
                        (all rows with block_rule.dense_lane) */
    tensor place;    /* I32 [rows, 1], used: row_count; where in `fresh` the row stands, -1: nowhere */
    tensor live;     /* I32 [rows, 1], used: live_count */
    tensor count;    /* I32 [4, 1]: row_count, span_count, fresh_count, live_count; what the `used` above point at */
} batch;

/* Where a sublayer ends and the next one begins: x += y; h = RMSNorm(x) weight. All in the activation dtype, each sum
 * rounded to it. */
typedef struct residual {
    tensor x, h;     /* [rows, H]: the residual stream; what the next sublayer reads */
    tensor h_fresh;  /* [fresh, H]: the rows of h that batch.fresh lists, in its order; no data: nobody wants them */
    const tensor *norm; /* F32 [1, H] */
    float eps;
    int32_t through;    /* layer * PHASES + phase: what is done once this op begins (backend.reached) */
} residual;

typedef struct attention_rule {
    int32_t heads, kv_heads, head_dim, rotary_dim;
    float theta, eps;
    bool qk_norm;
    int32_t block_size;
} attention_rule;

typedef struct route_rule {
    int32_t experts, top_k;
    int32_t groups, top_groups; /* 1, 1: no group limit */
    float scale;                /* routed_scaling_factor */
    bool normalise;
} route_rule;

/* Expert Atlas. All fp32. */
typedef struct atlas_rule {
    int32_t extra;        /* m: candidates beyond top_k */
    float coverage;       /* alpha */
    float covered_share;  /* q */
    float mass_weight;    /* beta */
    int32_t budget;       /* B */
    int32_t repair_step;  /* c */
} atlas_rule;

/* What one layer did for one cohort in one forward (active-block rows of hot iterations; cold: distinct only). */
typedef struct layer_log {
    int32_t fresh;        /* fresh rows of active blocks routed */
    int32_t distinct;     /* different experts they were routed to */
    int32_t support;      /* |S_l| they were routed with; experts where unrestricted */
    int32_t tested, under; /* rows tested for coverage before any rebuild, and of them below the floor */
    int32_t rebuilt;      /* 1: coverage failed and the support was rebuilt at once */
    int32_t updated;      /* 1: rebuilt by count, or built in the cold iteration */
    int32_t universe;     /* 1: this layer routes over all experts because construction could not reach q */
    float covered;        /* sum over tested rows of C_t(S) / sum of the unrestricted top-k scores */
    int32_t rounds;       /* repair rounds of the construction in this forward */
} layer_log;

/* The supports of all plans. Built in the backend, never seen by the host but through layer_log. */
typedef struct plans {
    tensor support;  /* I32 [layers * cohort_count, words + 1]: ceil(experts / 32) words of the bit mask S_l, then a
                        flag:  0 none built (routes over all), 1 S_l holds, 2 universe fallback until the next update */
    tensor log;      /* U8 [layers * cohort_count, sizeof(layer_log)]; row layer * cohort_count + cohort */
    int32_t cohort_count, layers; /* sparse layers, counted from 0 */
} plans;

/* Where the sums of an op `experts` go in place of y: by piece, as rows of other ranks come. Row i of x is row
 * i / pieces of piece i % pieces. Rows without an edge to this rank's experts have no sum. */
typedef struct sums_away {
    void *const *to;       /* [pieces]: the sums of a piece's rows, as in y; memory that the backend reaches */
    int32_t pieces, whole; /* F32; where `half` is set, piece `whole` alone is, the others BF16 */
    bool half;
} sums_away;

/* A layer's shared expert, and the rows that it takes. */
typedef struct shared_set {
    tensor gate_up, down; /* [2I, H], [H, I] */
    tensor h;             /* [rows, H] */
} shared_set;

/* One rank's share of a layer's experts. */
typedef struct expert_set {
    tensor gate_up;       /* [count * 2I, H]: of each expert I gate rows, then I up rows */
    tensor down;          /* [count * H, I] */
    int32_t first, count; /* experts [first, first + count) */
    int32_t inner;        /* I */
    const sum_tree *tree; /* order of sums */
    int32_t rank;         /* whose units */
    const sums_away *away; /* NULL: the sums go to y */
    const shared_set *shared; /* it goes along with them (see rides); NULL: none does */
} expert_set;

/* Possible rows up to which a shared expert `rides` on CUDA; of more, two products beside are as fast. */
enum { RIDES_MOST = 1088 };

/* Edges times H that the CUDA `experts` takes at most at once: it numbers them in 32 bits, four columns together, or
 * one where H is no multiple of eight. */
static inline double experts_most(int64_t hidden)
{
    return (hidden % 8 ? 1.0 : 4.0) * (double)UINT32_MAX;
}

typedef struct head_best { /* of one live row */
    int32_t id;           /* argmax of the logits, the mask id never chosen; ties: the lower id */
    float probability;    /* of id: fp32 softmax over the whole vocabulary, the mask id included */
    float top, second;    /* the best and the runner-up logit (mask id excluded) */
} head_best;

enum { BOXES = 4 };

typedef struct backend {
    const char *name;
    void *stream, *self;  /* stream: cudaStream_t; NULL on the CPU */
    dtype activation;     /* F32 or BF16 */
    char device[64];      /* the machine's name of what computes */
    double free_bytes;    /* of the device's memory, behind the opening; 0: not known */
    int32_t timed_every;  /* where calls are recorded: one replay in so many is timed by phase, and stands for others */
    const volatile int32_t *reached; /* where runs_ahead: in host memory, `through` of the newest add_norm or merge that
                                        began; -1: none yet. NULL where calls return when their work is done */
    bool runs_ahead;      /* calls return before their work is done: what a forward did is best read one forward late */
    bool late_sums;       /* `experts` can leave its sums to `merge`, which makes them in passing */
    int64_t expert_tiles; /* row tiles that `experts` computed since it was opened; -1: this backend does not count */

    /* memory and time */
    /* Zeroed; once per arena. Pages that nobody touches cost nothing on the CPU. FAILED: no memory. */
    status (*reserve)(struct backend *b, void **slab, size_t bytes);
    void (*release)(struct backend *b, void *slab);
    /* dst[all rows, contiguous in src as `from`] converted to dst's dtype (F32, F16, BF16 among each other; I32 and U8
     * as they are). src is host memory and may be reused on return. */
    status (*upload)(struct backend *b, const tensor *dst, const void *src, dtype from);
    /* dst[i, j] = scale * random_at(seed, i * cols + j) */
    status (*random)(struct backend *b, const tensor *dst, uint64_t seed, float scale);
    status (*download)(struct backend *b, void *dst, const tensor *src); /* all rows, contiguous, src's dtype */
    /* Copies src (all rows, contiguous), as the work enqueued so far leaves it, into a box of host memory,
     * 0 .. BOXES - 1, without waiting. fetch waits for the newest copy into that box, for nothing enqueued behind it,
     * and takes it out: as many bytes as were posted. */
    status (*post)(struct backend *b, int box, const tensor *src);
    status (*fetch)(struct backend *b, void *dst, int box);
    status (*sync)(struct backend *b);
    /* The work since the last mark was p's. Between aside and back: nothing; what that work cost is join's wait. */
    status (*mark)(struct backend *b, phase p);
    /* Adds to seconds[] those of each phase that were marked since the last call, then forgets them. */
    status (*laps)(struct backend *b, double seconds[PHASES]);
    /* Runs call(of), which enqueues the same work at every call, its tensors and settings included. A backend may
     * record that work, and later enqueue the record instead of calling. *record: NULL at first, then the backend's
     * own; forget gives it back, and accepts NULL. */
    status (*repeat)(struct backend *b, void **record, status (*call)(void *of), void *of);
    void (*forget)(struct backend *b, void *record);
    /* What is enqueued from aside to back may run beside what follows back, until join, which all that comes later
     * waits for. It sees all that was enqueued before aside; neither writes what the other touches. One at a time.
     * leave: multiprocessors that what runs beside leaves to the others, as far as its ops take as many as there are;
     * 0: none. A backend without any takes it for nothing. */
    status (*aside)(struct backend *b, int leave);
    status (*back)(struct backend *b);
    status (*join)(struct backend *b);

    /* the life of blocks */
    /* Chooses every slot's path, starts blocks whose cohort is ready, lays out the rows of this forward, and for each
     * slot sets path, cause, filling, fresh. Clears plans' log, and the support flags of cohorts that go cold. */
    status (*rows)(struct backend *b, batch *out, slots *s, plans *p, const block_rule *r);
    /* Applies the decision rule to every refining slot: best[i] belongs to batch.live[i]. Writes tokens, advances slots
     * (end of block, EOS and length test, next block's masks), folds plans' log into block stats, writes reports. */
    status (*commit)(struct backend *b, slots *s, const tensor *best, const batch *in, const plans *p,
                     const block_rule *r);

    /* dense */
    status (*embed)(struct backend *b, tensor *y, const tensor *table, const tensor *ids);  /* y[i] = table[ids[i]] */
    status (*matmul)(struct backend *b, tensor *y, const tensor *x, const tensor *w); /* y[n,o] = x[n,i] w[o,i]^T */
    /* y[n, I] = silu(x w[0:I]^T) * (x w[I:2I]^T); both [n, 2I]: room for the two products, left as it may be */
    status (*gated)(struct backend *b, tensor *y, tensor *both, const tensor *x, const tensor *w);
    /* RMSNorm; w F32 [1, H] */
    status (*norm)(struct backend *b, tensor *y, const tensor *x, const tensor *w, float eps);
    status (*add_norm)(struct backend *b, const residual *r, const tensor *y, const batch *in);

    /* attention */
    /* qkv [rows, (heads + 2 kv_heads) head_dim]: norms and rotates q in place; norms and rotates k, and writes k and v
     * into layer `layer` of the pool at the page of the row's block. q_norm, k_norm F32 [1, head_dim]. */
    status (*rotate)(struct backend *b, tensor *qkv, kv_pool *kv, int layer, const tensor *q_norm, const tensor *k_norm,
                     const batch *in, const slots *s, const attention_rule *r);
    /* y[rows, heads * head_dim]: each span over blocks 0 .. span.block of its slot, no mask inside. KV-splits: one
     * page. */
    status (*attend)(struct backend *b, tensor *y, const tensor *qkv, const kv_pool *kv, int layer, const batch *in,
                     const slots *s, const attention_rule *r);

    /* the MoE layer; `layer` counts sparse layers from 0 */
    /* packed[i] = full[rows[i]] */
    status (*pack)(struct backend *b, tensor *packed, const tensor *full, const tensor *rows);
    /* From the router logits z F32 [fresh, E] of the packed fresh rows: tests each cohort's support, builds or rebuilds
     * it where the path or the test asks for it (README.md: Expert Atlas). bias F32 [1, E]. Does nothing unless
     * block_rule.restrict_experts. */
    status (*support)(struct backend *b, plans *p, int layer, const tensor *z, const tensor *bias, const batch *in,
                      const slots *s, const route_rule *r, const atlas_rule *a, const block_rule *k);
    /* ids I32 [fresh, K] by ascending expert id, -1 behind the last edge; weights F32 [fresh, K], 0 there. Sealing and
     * cold rows route over all experts, others over their cohort's support. Logs fresh, distinct, support, by the end
     * of the forward's commit. */
    status (*route)(struct backend *b, tensor *ids, tensor *weights, const tensor *z, const tensor *bias, plans *p,
                    int layer, const batch *in, const slots *s, const route_rule *r, const block_rule *k);
    /* Can `experts` of x, with late_sums, take this shared expert along? What that makes of its rows is left to `merge`
     * and has the bits that gated and matmul give it. */
    bool (*rides)(struct backend *b, const tensor *x, const expert_set *e, const shared_set *s);
    /* y F32 [n * units, H], units of this rank: row i * units + u is the weighted sum of token i's edges inside unit
     * u, in the tree's order; not written where it has none. ids hold -1 for edges of other ranks. y without data
     * (late_sums, and a tree of one unit): `merge` makes the sums, before any other op but join. */
    status (*experts)(struct backend *b, tensor *y, const tensor *x, const tensor *ids, const tensor *weights,
                      const expert_set *e);
    /* add_norm of what a sparse layer gives each row, y[row] (+ shared[row], where shared has data). y[row] =
     * packed[i] for row = fresh[i] unless the slot's `fresh` mask lacks it (dense_lane); other rows of active blocks
     * come from the decoded cache. Rows that are decoded and fresh are written into the cache. packed F32
     * [fresh, H], without data: the sums that `experts` left to be made, and what it left of a shared expert; shared
     * [rows, H]; cache [sparse layers * slot_count * B, H], row (layer * slot_count + slot) * B + position in the
     * block. */
    status (*merge)(struct backend *b, const residual *r, const tensor *packed, const tensor *shared, tensor *cache,
                    int layer, const batch *in, const slots *s, const block_rule *k);

    /* the end of a forward */
    /* best U8 [live, sizeof(head_best)]; h [live, H] is normed; w [V, H]. Logits are never kept. */
    status (*head)(struct backend *b, tensor *best, const tensor *h, const tensor *w, int32_t mask_id);

    void (*close)(struct backend *b); /* accepts NULL */
} backend;

/* threads: 0, or more than the cores this process may run on: one for each of them. BAD_INPUT: fewer than
 * 0. FAILED: no memory, or no thread. */
status backend_cpu_open(backend **out, int threads);
/* The GPU of that number among the visible ones, or the only visible one. BAD_INPUT: no driver or GPU, a driver too
 * old, a GPU that the program was not built for, several GPUs but fewer than ranks of this host. FAILED: no
 * memory. */
status backend_cuda_open(backend **out, int local_rank);
/* How many GPUs are visible; 0 without a driver. */
int backend_cuda_devices(void);
/* PCI bus id of the GPU that backend_cuda_open would take; "": none. The module's, until the next call. */
const char *backend_cuda_bus(int local_rank);
/* What this GPU can do at most, measured in some milliseconds: bytes read and written a second by a copy, FLOP a second
 * by a product of 8192 x 8192 BF16 matrices. Wants 2 GB for the while. */
status backend_cuda_ceilings(backend *b, double *copied, double *multiplied);
/* Bytes of this GPU's memory that are taken now, by whomever: what this program has, where it is alone. */
status backend_cuda_taken(backend *b, double *bytes);

#endif
