/* The ends of sublayers: what was computed joins the residual stream, and the next sublayer's input is normed from it,
 * in one pass. Twin of src/cpu/residual.c. A block takes a row at a time, a thread V neighbours; a thread keeps the
 * first vector of its row, and reads again what it wrote of the others. Each sum is rounded to BF16 before the next.
 * Where the experts left their terms, a row's sum over them is made here, in the tree's order (tree.cuh). One kernel
 * for every shape and GPU; one for a Hopper GPU, which has its rows brought while it makes others. */
#include "cuda/device.cuh"
#include "cuda/hopper.cuh"
#include "cuda/maps.h"
#include "cuda/tree.cuh"

enum { THREADS = 256, WAVES = 16, VECTOR = 8, TERMS_AT_ONCE = 8, LEVELS = 3, LEAVES = 1 << LEVELS };

/* Where y comes from: a row of its own; the packed rows; the terms of a packed row, in a tree of up to LEVELS, or
 * more. */
enum { FROM_ROWS, FROM_PACKED, FROM_TERMS, FROM_MANY_TERMS };

typedef struct residual_op {
    residual r;
    const float *norm;
    tensor y, shared, cache; /* add_norm has y alone; shared without data: none */
    int layer;
    batch in;
    slots s;
    block_rule k;
    cuda_terms t;
    bool settled;              /* what find_part reads is there before after_previous() */
    volatile int32_t *reached; /* in host memory: one write across the bus, for which nothing waits */
} residual_op;

/* What decides where the routed experts' output of a row comes from; all loads of one depth stand side by side, past
 * L1, as what stands before after_previous() must. */
typedef struct routed_row {
    int32_t place, in_block;
    bool sealing;
    uint64_t fresh, decoded; /* of its slot */
    bf16 *cache;
} routed_row;

static __device__ __forceinline__ routed_row find_routed(const residual_op &a, int64_t row)
{
    int32_t position = __ldcg((const int32_t *)a.in.position.data + row);
    int32_t owner = __ldcg((const int32_t *)a.in.slot.data + row);
    int32_t place = __ldcg((const int32_t *)a.in.place.data + row);
    int32_t role = __ldcg((const int32_t *)a.in.role.data + row);
    const slot *x = (const slot *)a.s.slot.data + owner;
    int32_t in_block = position % a.k.block_size;
    return {place,
            in_block,
            role == ROW_SEALING,
            __ldcg(&x->fresh),
            __ldcg(&x->decoded),
            row_of<bf16>(a.cache, ((int64_t)a.layer * a.s.slot_count + owner) * a.k.block_size + in_block)};
}

/* The edges of a packed row, edge j in lane j: its place among the terms, and how it meets those before it. -2: it is
 * the first; -1: in their shard; else at this level of the tree. */
typedef struct row_edges {
    uint32_t present;
    int place, way;
} row_edges;

static __device__ __forceinline__ row_edges find_edges(const cuda_terms &t, int64_t row)
{
    int lane = (int)threadIdx.x % WARP, edges = (int)t.ids.cols, id = -1, place = 0;
    if (lane < edges) { /* the place may be none: it counts where the id is one */
        id = __ldcg(row_of<int32_t>(t.ids, row) + lane);
        place = __ldcg(t.place_of + row * edges + lane);
    }
    row_edges e = {__ballot_sync(EVERY_LANE, id >= 0), place, -2};
    uint32_t earlier = e.present & ((1u << lane) - 1);
    int before = __shfl_sync(EVERY_LANE, id, earlier ? 31 - __clz((int)earlier) : lane);
    if (id >= 0 && earlier) {
        int a = before / t.per_shard, b = id / t.per_shard;
        e.way = a == b ? -1 : depth_of(a, b, t.shards);
    }
    return e;
}

/* Their sum, of vector j of the terms; no number where that is not inside. All lanes call: they know the edges. Terms
 * wait in shared memory, each thread's in its own column of `room`, since registers for all of them would leave the
 * multiprocessor to a row or two. */
template <int LEVELS, int V>
static __device__ __forceinline__ void sum_terms(float (&sum)[V], const cuda_terms &t, const row_edges &e, int64_t j,
                                                 int64_t width, bool inside, pack_of<bf16, V> (*room)[THREADS])
{
    typedef pack_of<bf16, V> pack;
    const float zero[V] = {};
    running_sum<LEVELS, V> s;
    s.begin(zero);
    for (int first = 0; first < WARP && e.present >> first; first += TERMS_AT_ONCE) {
#pragma unroll
        for (int i = 0; i < TERMS_AT_ONCE; i++) {
            int64_t place = __shfl_sync(EVERY_LANE, e.place, first + i);
            const pack *from = (const pack *)t.term + place * width + j;
            if (!inside || !(e.present >> (first + i) & 1))
                continue;
            if constexpr (sizeof(pack) == 16)
                copy16(shared_at(&room[i][threadIdx.x]), from);
            else
                room[i][threadIdx.x] = *from;
        }
        copies16_wait();
#pragma unroll 1
        for (int i = 0; i < TERMS_AT_ONCE; i++) {
            if (!(e.present >> (first + i) & 1))
                continue;
            int way = __shfl_sync(EVERY_LANE, e.way, first + i);
            pack v = room[i][threadIdx.x];
            float x[V];
#pragma unroll
            for (int k = 0; k < V; k++)
                x[k] = widen(v.x[k]);
            if (way == -2)
                s.begin(x);
            else if (way == -1)
                s.add(x);
            else
                s.turn(x, way);
        }
    }
    s.join(-1);
#pragma unroll
    for (int k = 0; k < V; k++)
        sum[k] = s.newest[k];
}

template <int V> static __device__ __forceinline__ void add(pack_of<bf16, V> &a, const pack_of<bf16, V> &b)
{
#pragma unroll
    for (int k = 0; k < V; k++)
        narrow(&a.x[k], widen(a.x[k]) + widen(b.x[k]));
}

/* With three blocks a multiprocessor, one's rows come while others are summed up. */
template <int V, int FROM>
static __global__ void __launch_bounds__(THREADS, FROM == FROM_MANY_TERMS ? 1 : 3) residual_kernel(residual_op a)
{
    typedef pack_of<bf16, V> pack;
    typedef pack_of<float, V> wide;
    constexpr bool TERMS = FROM == FROM_TERMS || FROM == FROM_MANY_TERMS;
    __shared__ float room[THREADS / WARP];
    __shared__ pack terms[TERMS ? TERMS_AT_ONCE : 1][THREADS];
    let_next();
    const int64_t width = a.r.x.cols / V;
    wide weight = {};
    if (threadIdx.x < width)
        weight = ((const wide *)a.norm)[threadIdx.x];
    after_previous();
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *a.reached = a.r.through;
    const int64_t n = used_rows(a.r.x);
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        pack *x = (pack *)row_of<bf16>(a.r.x, i), *h = (pack *)row_of<bf16>(a.r.h, i), first = {};
        const pack *shared = a.shared.data ? (const pack *)row_of<bf16>(a.shared, i) : NULL;
        routed_row routed = {};
        row_edges edges = {};
        if (FROM != FROM_ROWS)
            routed = find_routed(a, i);
        if (TERMS && routed.place >= 0)
            edges = find_edges(a.t, routed.place);
        const bool anew = routed.sealing || (routed.fresh >> routed.in_block & 1);
        const bool keep = !routed.sealing && (routed.decoded >> routed.in_block & 1);
        float sum = 0;
        for (int64_t base = 0; base < width; base += THREADS) {
            const int64_t j = base + threadIdx.x;
            const bool inside = j < width;
            pack to = {}, more = {}, z = {};
            if (inside) {
                to = x[j];
                if (FROM == FROM_ROWS)
                    more = ((const pack *)row_of<bf16>(a.y, i))[j];
                else if (shared)
                    z = shared[j];
            }
            if (FROM != FROM_ROWS && anew) {
                float f[V] = {};
                if (TERMS) {
                    sum_terms<FROM == FROM_TERMS ? LEVELS : 10>(f, a.t, edges, j, width, inside, terms);
                } else if (inside) {
                    wide packed = ((const wide *)row_of<float>(a.y, routed.place))[j];
#pragma unroll
                    for (int k = 0; k < V; k++)
                        f[k] = packed.x[k];
                }
#pragma unroll
                for (int k = 0; k < V; k++)
                    narrow(&more.x[k], f[k]);
                if (inside && keep)
                    ((pack *)routed.cache)[j] = more;
            } else if (FROM != FROM_ROWS && inside) {
                more = ((const pack *)routed.cache)[j];
            }
            if (FROM != FROM_ROWS && shared)
                add(more, z);
            add(to, more);
            if (base == 0)
                first = to;
            if (inside) {
                x[j] = to;
#pragma unroll
                for (int k = 0; k < V; k++)
                    sum = fmaf(widen(to.x[k]), widen(to.x[k]), sum);
            }
        }
        float scale = 1.0f / sqrtf(block_sum<THREADS>(sum, room) / (float)a.r.x.cols + a.r.eps);
        int32_t place = a.r.h_fresh.data ? ((const int32_t *)a.in.place.data)[i] : -1;
        pack *packed = place >= 0 ? (pack *)row_of<bf16>(a.r.h_fresh, place) : NULL;
        for (int64_t j = threadIdx.x; j < width; j += THREADS) {
            pack to = j == threadIdx.x ? first : x[j];
            wide w = j == threadIdx.x ? weight : ((const wide *)a.norm)[j];
#pragma unroll
            for (int k = 0; k < V; k++)
                narrow(&to.x[k], widen(to.x[k]) * scale * w.x[k]);
            h[j] = to;
            if (packed)
                packed[j] = to;
        }
    }
}

/* ---- by the copy engine of a Hopper GPU
 *
 * One warp of a block finds out about its next rows, a group of lanes a row, and asks for all that a row's piece of
 * RING_COLUMNS columns is made of, but for the shared expert's: a stage of the ring. Eight warps, a thread VECTOR
 * columns as above, make the piece of it. The results are the same to the bit. */

enum {
    RING_COLUMNS = THREADS * VECTOR,
    RING_THREADS = THREADS + WARP,
    RING_SLOT = RING_COLUMNS * (int)sizeof(bf16),
    RING_MEET = 1 /* hardware barrier */
};

/* A stage holds what makes y, then x. BLOCKS of a multiprocessor all but fill it with their stages: were there room for
 * more, few rows would crowd on the multiprocessors that are free first. */
template <int FROM> struct ring {
    enum {
        SLOTS = FROM == FROM_TERMS ? TERMS_AT_ONCE + 1 : FROM == FROM_PACKED ? 3 : 2,
        STAGES = FROM == FROM_TERMS ? 3 : FROM == FROM_PACKED ? 4 : 6,
        BLOCKS = FROM == FROM_TERMS ? 2 : 4,
        STAGE = SLOTS * RING_SLOT,
        BYTES = STAGES * STAGE
    };
};

typedef struct ring_at { /* in shared memory */
    uint32_t stages, full, empty;
} ring_at;

/* What a stage is. */
typedef struct stage_mark {
    bf16 *cache;     /* y goes there too; NULL: nowhere */
    uint32_t leaves; /* of its terms, four bits each, the first one lowest: 1 + the leaf of the tree */
    int32_t place;   /* of the row in h_fresh; -1: none */
    bool anew;       /* y is to be made, or it is there */
} stage_mark;

/* Of terms one behind the other in the stage, those under the node of SPAN leaves from LEAF on: as running_sum
 * (tree.cuh) has it, since an empty leaf's -0 changes no sum. `next` is the first of the terms that are left. */
template <int LEAF, int SPAN>
static __device__ __forceinline__ void sum_node(float (&sum)[VECTOR], uint32_t &leaves, uint4 &next, uint32_t &at)
{
    if constexpr (SPAN == 1) {
        float x[VECTOR];
        auto take = [&](float (&to)[VECTOR]) {
            eight_of(to, next);
            at += RING_SLOT;
            next = shared_load16(at); /* behind the last one lies x */
            leaves >>= 4;
            return (leaves & 15) == LEAF + 1;
        };
        if ((leaves & 15) != LEAF + 1) {
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                sum[k] = -0.0f;
            return;
        }
        bool more = take(sum);
#pragma unroll 1
        while (more) {
            more = take(x);
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                sum[k] += x[k];
        }
    } else {
        float right[VECTOR];
        sum_node<LEAF, SPAN / 2>(sum, leaves, next, at);
        sum_node<LEAF + SPAN / 2, SPAN / 2>(right, leaves, next, at);
#pragma unroll
        for (int k = 0; k < VECTOR; k++)
            sum[k] += right[k];
    }
}

/* A lane's part of a row: a term, or what else y is made of. */
typedef struct row_part {
    const char *from; /* NULL: nothing */
    stage_mark mark;
    uint32_t slot; /* in the stage */
    int size;      /* of a number */
} row_part;

template <int FROM> static __device__ __forceinline__ row_part find_part(const residual_op &a, int64_t row, int64_t n)
{
    constexpr int LANES = FROM == FROM_TERMS ? TERMS_AT_ONCE : 1;
    int lane = (int)threadIdx.x % WARP, j = lane % LANES, id = -1, at = 0;
    row_part part = {NULL, {NULL, 0, -1, false}, 0, sizeof(bf16)};
    routed_row routed = {-1, 0, false, 0, 0, NULL};
    if (FROM == FROM_ROWS) {
        if (row < n) {
            part.from = (const char *)row_of<bf16>(a.y, row);
            part.mark.place = a.r.h_fresh.data ? __ldcg((const int32_t *)a.in.place.data + row) : -1;
        }
        return part;
    }
    if (row < n)
        routed = find_routed(a, row);
    part.mark.anew = routed.sealing || (routed.fresh >> routed.in_block & 1);
    if (part.mark.anew && !routed.sealing && (routed.decoded >> routed.in_block & 1))
        part.mark.cache = routed.cache;
    part.mark.place = a.r.h_fresh.data ? routed.place : -1;
    if (!part.mark.anew) {
        part.from = row < n && j == 0 ? (const char *)routed.cache : NULL;
    } else if (FROM == FROM_PACKED) {
        part.from = (const char *)row_of<float>(a.y, routed.place);
        part.size = sizeof(float);
    }
    if (FROM != FROM_TERMS)
        return part;
    if (part.mark.anew && j < (int)a.t.ids.cols) {
        id = __ldcg(row_of<int32_t>(a.t.ids, routed.place) + j);
        at = __ldcg(a.t.place_of + (int64_t)routed.place * a.t.ids.cols + j);
    }
    uint32_t present = __ballot_sync(EVERY_LANE, id >= 0) >> (lane - j);
    if (id >= 0) {
        part.from = (const char *)((const bf16 *)a.t.term + (int64_t)at * a.r.x.cols);
        part.slot = (uint32_t)__popc(present & ((1u << j) - 1));
        part.mark.leaves = (1 + leaf_of<LEVELS>(id / a.t.per_shard, a.t.shards)) << 4 * part.slot;
    }
    for (int other = 1; other < LANES; other *= 2)
        part.mark.leaves |= __shfl_xor_sync(EVERY_LANE, part.mark.leaves, other);
    return part;
}

/* The warp that asks. */
template <int FROM>
static __device__ __forceinline__ void ask_rows(const residual_op &a, const ring_at &room, stage_mark *mark)
{
    typedef ring<FROM> of;
    constexpr int LANES = FROM == FROM_TERMS ? TERMS_AT_ONCE : 1, AT_ONCE = WARP / LANES;
    const int lane = (int)threadIdx.x % WARP, mine = lane / LANES;
    const bool leads = lane % LANES == 0;
    const int64_t step = gridDim.x;
    if (!a.settled)
        after_previous();
    const int64_t n = used_rows_early(a.r.x);
    ring_place p = {0, 0};
#pragma unroll 1
    for (int64_t first = blockIdx.x; first < n; first += AT_ONCE * step) {
        const row_part part = find_part<FROM>(a, first + mine * step, n);
        after_previous();
#pragma unroll 1
        for (int turn = 0; turn < AT_ONCE && first + turn * step < n; turn++) {
            const char *x = (const char *)row_of<bf16>(a.r.x, first + turn * step);
            const bool my_turn = mine == turn;
            const int parts = __popc(__ballot_sync(EVERY_LANE, my_turn && part.from));
            for (int col = 0; col < (int)a.r.x.cols; col += RING_COLUMNS, ring_next(p, of::STAGES)) {
                const int cols = min((int)a.r.x.cols - col, (int)RING_COLUMNS);
                const uint32_t at = room.stages + (uint32_t)(p.stage * of::STAGE);
                const uint32_t there = room.full + 8 * (uint32_t)p.stage;
                barrier_wait(room.empty + 8 * (uint32_t)p.stage, p.parity ^ 1);
                if (my_turn && leads) {
                    mark[p.stage] = part.mark;
                    barrier_expect(there, (uint32_t)(cols * (parts * part.size + (int)sizeof(bf16))));
                }
                __syncwarp();
                if (my_turn && part.from)
                    copy_bytes(at + part.slot * RING_SLOT, part.from + (int64_t)col * part.size,
                               (uint32_t)(cols * part.size), there);
                if (my_turn && leads)
                    copy_bytes(at + of::STAGE - RING_SLOT, x + (int64_t)col * (int)sizeof(bf16),
                               (uint32_t)cols * (uint32_t)sizeof(bf16), there);
            }
        }
    }
}

/* The others. */
template <int FROM>
static __device__ __forceinline__ void make_rows(const residual_op &a, const ring_at &room, const stage_mark *mark,
                                                 float (*sums)[THREADS / WARP])
{
    typedef ring<FROM> of;
    typedef pack_of<float, VECTOR> wide;
    const int me = (int)threadIdx.x, width = (int)a.r.x.cols / VECTOR, step = (int)gridDim.x;
    const float cols = (float)a.r.x.cols;
    const bool shared = FROM != FROM_ROWS && a.shared.data;
    after_previous();
    if (blockIdx.x == 0 && me == 0)
        *a.reached = a.r.through;
    const int n = (int)used_rows(a.r.x);
    ring_place p = {0, 0};
    uint4 z = {};
    int turn = 0;
    if (shared && (int)blockIdx.x < n && me < width)
        z = ((const uint4 *)row_of<bf16>(a.shared, blockIdx.x))[me];
    for (int i = (int)blockIdx.x; i < n; i += step, turn ^= 1) {
        uint4 *x = (uint4 *)row_of<bf16>(a.r.x, i), *h = (uint4 *)row_of<bf16>(a.r.h, i), first = {};
        float sum = 0;
        int32_t place = -1;
#pragma unroll 1
        for (int base = 0; base < width; base += THREADS) {
            const int j = base + me;
            const bool inside = j < width, last = base + THREADS >= width;
            const int row = last ? i + step : i, then = last ? me : j + THREADS;
            uint4 z_next = {};
            if (shared && row < n && then < width)
                z_next = ((const uint4 *)row_of<bf16>(a.shared, row))[then];
            uint32_t at = room.stages + (uint32_t)(p.stage * of::STAGE + me * (int)sizeof(uint4));
            barrier_wait(room.full + 8 * (uint32_t)p.stage, p.parity);
            const stage_mark m = mark[p.stage];
            uint4 to = shared_load16(at + of::STAGE - RING_SLOT), more;
            if (FROM != FROM_ROWS && m.anew) {
                float f[VECTOR] = {};
                if (FROM == FROM_PACKED) {
                    at += (uint32_t)(me * (int)sizeof(uint4));
                    four_of(f, shared_load16(at));
                    four_of(f + 4, shared_load16(at + (uint32_t)sizeof(uint4)));
                } else if (m.leaves) {
                    uint32_t leaves = m.leaves;
                    uint4 next = shared_load16(at);
                    sum_node<0, LEAVES>(f, leaves, next, at);
                }
                more = halves_of_eight(f);
            } else {
                more = shared_load16(at);
            }
            __syncwarp();
            if (me % WARP == 0)
                barrier_arrive(room.empty + 8 * (uint32_t)p.stage);
            ring_next(p, of::STAGES);
            place = m.place;
            if (FROM != FROM_ROWS && m.cache && inside)
                ((uint4 *)m.cache)[j] = more;
            if (shared)
                more = add_eight(more, z);
            z = z_next;
            to = add_eight(to, more);
            if (base == 0)
                first = to;
            if (inside) {
                float f[VECTOR];
                eight_of(f, to);
                x[j] = to;
#pragma unroll
                for (int k = 0; k < VECTOR; k++)
                    sum = fmaf(f[k], f[k], sum);
            }
        }
        wide w = {};
        if (me < width)
            w = ((const wide *)a.norm)[me];
        sum = warp_sum(sum);
        if (me % WARP == 0)
            sums[turn][me / WARP] = sum;
        meet(RING_MEET, THREADS);
        sum = 0;
#pragma unroll
        for (int warp = 0; warp < THREADS / WARP; warp++)
            sum += sums[turn][warp];
        const float scale = 1.0f / sqrtf(sum / cols + a.r.eps);
        uint4 *packed = place >= 0 ? (uint4 *)row_of<bf16>(a.r.h_fresh, place) : NULL;
#pragma unroll 1
        for (int j = me; j < width; j += THREADS) {
            if (j > me) {
                first = x[j];
                w = ((const wide *)a.norm)[j];
            }
            float f[VECTOR];
            eight_of(f, first);
#pragma unroll
            for (int k = 0; k < VECTOR; k++)
                f[k] = f[k] * scale * w.x[k];
            const uint4 y = halves_of_eight(f);
            h[j] = y;
            if (packed)
                packed[j] = y;
        }
    }
}

template <int FROM>
static __global__ void __launch_bounds__(RING_THREADS, ring<FROM>::BLOCKS)
    residual_stream(const __grid_constant__ residual_op a)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    enum { STAGES = ring<FROM>::STAGES };
    extern __shared__ __align__(128) uint8_t stages[];
    __shared__ uint64_t barriers[2][STAGES];
    __shared__ stage_mark mark[STAGES];
    __shared__ float sums[2][THREADS / WARP];
    const ring_at room = {shared_at(stages), shared_at(barriers[0]), shared_at(barriers[1])};
    let_next();
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < STAGES; i++) {
            barrier_init(room.full + 8 * i, 1);
            barrier_init(room.empty + 8 * i, THREADS / WARP);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (__shfl_sync(EVERY_LANE, (int)threadIdx.x / WARP, 0) == THREADS / WARP) { /* seen to be one for all lanes */
        ask_rows<FROM>(a, room, mark);
    } else {
        make_rows<FROM>(a, room, mark, sums);
    }
#else
    __trap(); /* the launcher asks cuda_is_hopper */
#endif
}

static bool wide_rows(const tensor *t)
{
    return !t->data || vectors_fit(*t, VECTOR);
}

template <int FROM> static status end(cuda *c, residual_op &a, const char *what)
{
    a.reached = c->reached;
    const residual &r = a.r;
    const tensor *all[] = {&r.x, &r.h, &r.h_fresh, r.norm, &a.y, &a.shared, &a.cache};
    bool wide = true;
    for (const tensor *t : all)
        wide = wide && wide_rows(t);
    assert(r.x.type == BF16 && r.h.type == BF16 && r.norm->type == F32 && r.h.rows >= r.x.rows);
    assert(r.h.cols == r.x.cols && r.norm->cols == r.x.cols && a.y.cols == r.x.cols);
    assert(!r.h_fresh.data || (r.h_fresh.type == BF16 && r.h_fresh.cols == r.x.cols));
    if constexpr (FROM != FROM_MANY_TERMS) {
        if (wide && (FROM != FROM_TERMS || a.t.ids.cols <= TERMS_AT_ONCE) && cuda_is_hopper(c)) {
            typedef ring<FROM> of;
            auto stream = residual_stream<FROM>;
            status st = cuda_check(cudaFuncSetAttribute(stream, cudaFuncAttributeMaxDynamicSharedMemorySize, of::BYTES),
                                   what, __FILE__, __LINE__);
            a.settled = FROM == FROM_TERMS && c->settled;
            return st == OK ? launch(c, what, stream, cuda_grid(c, r.x.rows, of::BLOCKS), RING_THREADS, of::BYTES, a)
                            : st;
        }
    }
    auto kernel = wide ? residual_kernel<VECTOR, FROM> : residual_kernel<1, FROM>;
    return launch(c, what, kernel, cuda_grid(c, r.x.rows, WAVES), THREADS, 0, a);
}

extern "C" status cuda_add_norm(backend *b, const residual *r, const tensor *y, const batch *in)
{
    residual_op a = {};
    a.r = *r;
    a.norm = (const float *)r->norm->data;
    a.y = *y;
    a.in = *in;
    assert(y->type == BF16 && y->rows >= r->x.rows);
    return end<FROM_ROWS>(cuda_of(b), a, "add and norm");
}

extern "C" status cuda_merge(backend *b, const residual *r, const tensor *packed, const tensor *shared, tensor *cache,
                             int layer, const batch *in, const slots *s, const block_rule *k)
{
    cuda *c = cuda_of(b);
    residual_op a = {*r, (const float *)r->norm->data, *packed, *shared, *cache, layer, *in, *s, *k, c->terms};
    assert(packed->type == F32 && cache->type == BF16 && cache->cols == r->x.cols);
    if (!packed->data && !shared->data)
        a.shared = c->terms.shared;
    assert(!a.shared.data || (a.shared.type == BF16 && a.shared.cols == r->x.cols && a.shared.rows >= r->x.rows));
    if (packed->data)
        return end<FROM_PACKED>(c, a, "merge");
    return c->terms.shards <= LEAVES ? end<FROM_TERMS>(c, a, "merge") : end<FROM_MANY_TERMS>(c, a, "merge");
}
