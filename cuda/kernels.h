/* Inside the CUDA backend: what its files share. backend_cuda.c (C) opens the device, owns memory, streams and time,
 * and puts the launchers into the table; each .cu file holds the kernels of one family and one launcher an op, with the
 * op's own signature (backend.h), so the table takes it as it is. A launcher checks shapes by assert, enqueues on the
 * backend's stream, and returns the checked status; it never waits and never reads device memory.
 *
 * Activations and matrices are BF16, sums, router and softmax fp32. Row counts live in device memory: `rows` of a
 * tensor is the worst case that the grid covers, `used` (a device pointer, or NULL: all rows) says how many there are.
 * Kernels stride over their grid and stop at the rows used, so that the worst case costs next to nothing. Tensors
 * travel to kernels by value.
 *
 * Everything a forward enqueues may be captured in a graph and replayed: launchers take no decision from data, allocate
 * nothing once an eager forward has sized the scratch, and keep their parameters (pointers, grids) a function of
 * shapes. */
#ifndef EPOCH_CUDA_KERNELS_H
#define EPOCH_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "src/backend.h"

typedef struct cuda_buffer {
    void *data;
    size_t bytes;
} cuda_buffer;

/* What `experts` left to be summed, in its scratch. */
typedef struct cuda_terms {
    tensor ids;
    const void *term;        /* BF16 [places, H] */
    const int32_t *place_of; /* [edges]; of an edge to no expert of this rank: anything */
    int32_t shards, per_shard; /* of the tree */
    tensor shared;           /* what a shared expert that rode made of its rows; no data: none did */
} cuda_terms;

typedef struct cuda_box { /* post and fetch: pinned host memory, and when the newest copy into it is there */
    void *pinned;
    size_t room, bytes; /* bytes: posted */
    cudaEvent_t there;
} cuda_box;

typedef struct cuda_staging cuda_staging; /* upload: pinned halves and their twins on the device (backend_cuda.c) */
typedef struct cuda_marks cuda_marks;     /* mark and laps: recorded events (backend_cuda.c) */

typedef struct cuda {
    int device, sm_count;
    int leave;                /* of these, what ops leave free now: from aside to back */
    cudaStream_t stream;      /* what ops enqueue on: main, or beside between aside and back */
    cudaStream_t main, beside;
    cudaEvent_t parted, joined; /* aside waits for the one, join for the other */
    bool capturing;           /* what is enqueued now becomes a graph */
    bool ordered;             /* the next launch follows an event: nothing to overlap with */
    bool overlaps;            /* kernels may start while the one before them ends: device.cuh, launch */
    bool settled;             /* what came before the newest launch has ended when the next one begins: same place */
    cuda_buffer scratch[2];   /* of one op at a time, on main and beside; see cuda_scratch */
    cuda_buffer angles;       /* rotary: F32 [positions, rotary_dim], cos then sin of rotary_dim / 2 angles */
    int32_t angle_count, angle_dim;
    float angle_theta;
    cuda_buffer begins;       /* where each slot's rows begin, from rows to commit (slots.cu) */
    cuda_terms terms;         /* of the newest experts whose y had no data */
    int32_t experts;          /* of the newest route: what the logs call all experts */
    cuda_buffer seen;         /* bit masks of the experts chosen in this forward, by layer and cohort (route.cu) */
    cuda_buffer ranges;       /* of each cohort, between the kernels of the Atlas; clean between ops (atlas.cu) */
    int64_t *routed;          /* on the device: rows dispatched to routed experts since the lane last asked */
    cuda_staging *staging;
    cuda_marks *marks;
    int32_t *reached;         /* pinned host memory that kernels write: backend.reached */
    cuda_box box[BOXES];
} cuda;

static inline cuda *cuda_of(const backend *b)
{
    return (cuda *)b->self;
}

/* Device memory for the op that asks, until the next op on its stream asks. It grows at need, by the worst case of the
 * op's shapes, so that only the first forward allocates. FAILED: out of memory, or growth while a graph is captured. */
status cuda_scratch(cuda *c, void **out, size_t bytes);
/* The same for a buffer that holds longer; its content is lost when it grows. */
status cuda_grow(cuda *c, cuda_buffer *b, size_t bytes, const char *what);
/* FAILED with the op's name where `e` is no success. */
status cuda_check(cudaError_t e, const char *what, const char *file, int line);

/* The end of a launcher: was the launch accepted? */
#define CUDA_LAUNCHED(what) cuda_check(cudaGetLastError(), what, __FILE__, __LINE__)
/* Inside functions of the error convention (C only). */
#define CUDA_TRY(call) TRY(cuda_check((call), #call, __FILE__, __LINE__))

/* Multiprocessors that an op may take. */
static inline int cuda_room(const cuda *c)
{
    return c->sm_count - c->leave;
}

/* Blocks for so many items: one each, but no more than fill its room `waves` times; 1 for none. */
static inline unsigned cuda_grid(const cuda *c, int64_t items, int waves)
{
    int64_t most = (int64_t)cuda_room(c) * waves;
    int64_t n = items < most ? items : most;
    return (unsigned)(n > 0 ? n : 1);
}

/* ---- the ops, as backend.h describes them */

/* slots.cu */
status cuda_rows(backend *b, batch *out, slots *s, plans *p, const block_rule *r);
status cuda_commit(backend *b, slots *s, const tensor *best, const batch *in, const plans *p, const block_rule *r);
/* rows.cu */
status cuda_random(backend *b, const tensor *dst, uint64_t seed, float scale);
status cuda_embed(backend *b, tensor *y, const tensor *table, const tensor *ids);
/* y[n,I] = silu(gate_up[n,0:I]) * gate_up[n,I:2I]. */
status cuda_swiglu(cuda *c, tensor *y, const tensor *gate_up);
status cuda_pack(backend *b, tensor *packed, const tensor *full, const tensor *rows);
/* dst [rows, cols] strided = src [rows, cols] contiguous on the device, as `from`, converted. */
status cuda_convert(cuda *c, const tensor *dst, const void *src, dtype from);
/* Is there machine code for this device in the program? */
cudaError_t cuda_probe(void);
/* norm.cu */
status cuda_norm(backend *b, tensor *y, const tensor *x, const tensor *w, float eps);
status cuda_rotate(backend *b, tensor *qkv, kv_pool *kv, int layer, const tensor *q_norm, const tensor *k_norm,
                   const batch *in, const slots *s, const attention_rule *r);
/* residual.cu */
status cuda_add_norm(backend *b, const residual *r, const tensor *y, const batch *in);
status cuda_merge(backend *b, const residual *r, const tensor *packed, const tensor *shared, tensor *cache, int layer,
                  const batch *in, const slots *s, const block_rule *k);
/* route.cu, atlas.cu */
status cuda_route(backend *b, tensor *ids, tensor *weights, const tensor *z, const tensor *bias, plans *p, int layer,
                  const batch *in, const slots *s, const route_rule *r, const block_rule *k);
status cuda_support(backend *b, plans *p, int layer, const tensor *z, const tensor *bias, const batch *in,
                    const slots *s, const route_rule *r, const atlas_rule *a, const block_rule *k);
/* dense.cu. x BF16; w BF16 (y BF16 or F32), or F32 (the router; y F32, products and sums of fp32 accuracy). */
status cuda_matmul(backend *b, tensor *y, const tensor *x, const tensor *w);
/* router.cu: its product with an F32 weight on a Hopper GPU, rows of x and w at 16 bytes; y F32. */
status cuda_router(cuda *c, tensor *y, const tensor *x, const tensor *w);
/* dense.cu. `both` is used where the shapes are not those of the one kernel. */
status cuda_gated(backend *b, tensor *y, tensor *both, const tensor *x, const tensor *w);
/* experts.cu. A token without an edge in a unit: its row is written as zeros where the rank has one unit, so that the
 * lane of one rank hands the sums on without touching them; otherwise it is not written. y without data: the terms stay
 * in the scratch, c->terms says where, and cuda_merge sums them. */
status cuda_experts(backend *b, tensor *y, const tensor *x, const tensor *ids, const tensor *weights,
                    const expert_set *e);
bool cuda_rides(backend *b, const tensor *x, const expert_set *e, const shared_set *s);
/* attention.cu */
status cuda_attend(backend *b, tensor *y, const tensor *qkv, const kv_pool *kv, int layer, const batch *in,
                   const slots *s, const attention_rule *r);
/* vocab.cu */
status cuda_head(backend *b, tensor *best, const tensor *h, const tensor *w, int32_t mask_id);

#ifdef __cplusplus
}
#endif

#endif
