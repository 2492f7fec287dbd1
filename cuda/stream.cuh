/* Sums of rows that lie anywhere, many of them, in the tree's order (tree.cuh), by the copy engine of a Hopper GPU. One
 * warp of a block finds its sums' terms, each in a lane of its own, and asks for them, a ring ahead; eight warps add
 * them and have their columns of a sum brought to where it goes, be that another GPU. Loads never wait for stores so,
 * nor stores for loads: a link stays full while rows that need none are summed beside. */
#ifndef EPOCH_CUDA_STREAM_CUH
#define EPOCH_CUDA_STREAM_CUH

#include "cuda/hopper.cuh"
#include "cuda/maps.h"
#include "cuda/tree.cuh"

enum {
    STREAM_V = 8, /* columns of a thread */
    STREAM_WARPS = 8,
    STREAM_THREADS = (STREAM_WARPS + 1) * WARP,
    STREAM_COLUMNS = STREAM_WARPS * WARP * STREAM_V,
    STREAM_RING = 96 << 10, /* bytes of terms */
    STREAM_OUTS = 2,        /* sums on their way out */
    STREAM_OUT = STREAM_COLUMNS * (int)sizeof(float),
    STREAM_FEW = STREAM_RING / (STREAM_COLUMNS * (int)sizeof(float)), /* terms in the ring, if of F32 */
    STREAM_BEGUN = 1,                                                 /* hardware barriers */
    STREAM_OUT_FREE,
    STREAM_OUT_FULL,
    STREAM_AT_OUT = STREAM_RING,
    STREAM_AT_MARKS = STREAM_AT_OUT + STREAM_OUTS * STREAM_OUT,
    STREAM_AT_BARRIERS = STREAM_AT_MARKS + 2 * STREAM_FEW * 16,
    STREAM_SHARED = STREAM_AT_BARRIERS + 2 * STREAM_FEW * 16 /* two blocks a multiprocessor */
};

/* A lane's term. The lanes of a sum are neighbours, its terms in order. */
typedef struct stream_term {
    const char *from;    /* NULL: zero */
    char *to;            /* its sum goes there, if it is the last; else NULL */
    int way;             /* -2: it is the first; -1: in the shard of the one before; else joins it at this level */
    int cols;            /* a multiple of STREAM_V; 0: no term */
    bool half, half_out; /* BF16, not F32 */
} stream_term;

/* A term in the ring. */
typedef struct stream_mark {
    char *to;
    int16_t cols; /* < 0: no more terms */
    int8_t way;
    uint8_t size; /* bytes of a number; 0: zero */
    uint8_t size_out;
} stream_mark;

/* Columns of a piece of a row, and into how many pieces it goes. */
static inline __host__ __device__ int stream_pieces(int hidden)
{
    return (hidden + STREAM_COLUMNS - 1) / STREAM_COLUMNS;
}

static inline __host__ __device__ int stream_columns(int hidden)
{
    int pieces = stream_pieces(hidden);
    return ((hidden + pieces - 1) / pieces + STREAM_V - 1) / STREAM_V * STREAM_V;
}

/* Lanes of an item of up to `terms`. */
static inline __host__ __device__ int stream_lanes(int terms)
{
    int lanes = 1;
    while (lanes < terms)
        lanes *= 2;
    return lanes;
}

/* Before after_previous; all threads call. */
template <int SLOT> static __device__ __forceinline__ void stream_open(uint8_t *room)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    constexpr int SLOTS = STREAM_RING / SLOT;
    uint32_t full = shared_at(room + STREAM_AT_BARRIERS), empty = full + 8 * SLOTS;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < SLOTS; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, STREAM_WARPS);
        }
        barrier_init_done();
    }
    __syncthreads();
#endif
}

/* One warp. find(item, j, group): the term of lane j of an item, which has the lanes `group`; begin(): false where
 * nothing is to be summed. Both are called by all lanes, the terms of the first items are found before begin(). *taken:
 * zero before; a block whose first items are under way takes a turn, as many items as the warp has lanes for. NULL:
 * every block has its share. */
template <int SLOT, class FIND, class BEGIN>
static __device__ __forceinline__ void stream_feed(uint8_t *room, int items, int terms, int32_t *taken,
                                                   const FIND &find, const BEGIN &begin)
{
    constexpr uint32_t SLOTS = STREAM_RING / SLOT;
    uint32_t ring = shared_at(room), full = shared_at(room + STREAM_AT_BARRIERS), empty = full + 8 * SLOTS, filled = 0;
    stream_mark *mark = (stream_mark *)(room + STREAM_AT_MARKS);
    int lane = (int)threadIdx.x % WARP, lanes = stream_lanes(terms), j = lane % lanes, each = WARP / lanes;
    uint32_t group = (lanes == WARP ? EVERY_LANE : (1u << lanes) - 1) << (lane - j);
    int first = (int)blockIdx.x * each, step = (int)gridDim.x * each;
    stream_term t = find(first + lane / lanes, j, group);
    if (!begin())
        first = items;
    meet(STREAM_BEGUN, STREAM_THREADS);
    while (first < items) {
        int next = taken && lane == 0 ? atomicAdd(taken, 1) : 0; /* looked at behind what this turn asks for */
        uint32_t those = __ballot_sync(EVERY_LANE, t.cols > 0);
        uint32_t n = filled + (uint32_t)__popc(those & ((1u << lane) - 1)), stage = n % SLOTS;
        for (int turn = 0; turn < WARP; turn += lanes) { /* an item's terms all fit into the ring */
            if (lane - j == turn && t.cols > 0) {
                barrier_wait(empty + 8 * stage, n / SLOTS % 2 ^ 1);
                uint8_t size = t.half ? 2 : 4, size_out = t.half_out ? 2 : 4;
                mark[stage] = {t.to, (int16_t)t.cols, (int8_t)t.way, t.from ? size : (uint8_t)0, size_out};
                if (t.from) {
                    uint32_t bytes = (uint32_t)t.cols * size;
                    barrier_expect(full + 8 * stage, bytes);
                    copy_bytes(ring + stage * SLOT, t.from, bytes, full + 8 * stage);
                } else {
                    barrier_arrive(full + 8 * stage);
                }
            }
            __syncwarp();
        }
        filled += (uint32_t)__popc(those);
        first = taken ? ((int)gridDim.x + __shfl_sync(EVERY_LANE, next, 0)) * each : first + step;
        t = find(first + lane / lanes, j, group);
    }
    if (lane == 0) {
        uint32_t stage = filled % SLOTS;
        barrier_wait(empty + 8 * stage, filled / SLOTS % 2 ^ 1);
        mark[stage] = {NULL, -1, 0, 0, 0};
        barrier_arrive(full + 8 * stage);
    }
}

/* The other warps. */
template <int LEVELS, int SLOT> static __device__ __forceinline__ void stream_add(uint8_t *room)
{
    constexpr int SLOTS = STREAM_RING / SLOT;
    uint32_t ring = shared_at(room), full = shared_at(room + STREAM_AT_BARRIERS), empty = full + 8 * SLOTS;
    const stream_mark *mark = (const stream_mark *)(room + STREAM_AT_MARKS);
    int lane = (int)threadIdx.x % WARP, col = (int)threadIdx.x * STREAM_V, outs = 0;
    running_sum<LEVELS, STREAM_V> s;
    ring_place p = {0, 0};
    s.waiting = 0;
    meet(STREAM_BEGUN, STREAM_THREADS); /* however long that takes, which the ring's barriers would take amiss */
    for (;; ring_next(p, SLOTS)) {
        barrier_wait(full + 8 * (uint32_t)p.stage, p.parity);
        stream_mark m = mark[p.stage];
        uint32_t at = ring + (uint32_t)(p.stage * SLOT + col * m.size);
        float x[STREAM_V] = {};
        if (m.cols < 0)
            break;
        if (m.size > 0 && col < m.cols) {
            uint4 v = shared_load16(at);
            if (m.size == sizeof(bf16)) {
                eight_of(x, v);
            } else {
                four_of(x, v);
                four_of(x + 4, shared_load16(at + sizeof v));
            }
        }
        __syncwarp();
        if (lane == 0)
            barrier_arrive(empty + 8 * (uint32_t)p.stage);
        if (m.way == -2)
            s.begin(x);
        else if (m.way == -1)
            s.add(x);
        else
            s.turn(x, m.way);
        if (!m.to)
            continue;
        s.join(-1);
        uint8_t *out = room + STREAM_AT_OUT + outs * STREAM_OUT;
        outs = (outs + 1) % STREAM_OUTS;
        if (threadIdx.x == 0)
            brought_wait_read<STREAM_OUTS - 1>();
        meet(STREAM_OUT_FREE, STREAM_WARPS * WARP);
        if (m.size_out == sizeof(bf16))
            store_halves((bf16 *)out + col, s.newest);
        else
            store_floats((float *)out + col, s.newest);
        fence_written();
        meet(STREAM_OUT_FULL, STREAM_WARPS * WARP);
        if (threadIdx.x == 0) {
            bring_bytes(m.to, shared_at(out), (uint32_t)(m.cols * m.size_out));
            brought_commit();
        }
    }
    if (threadIdx.x == 0)
        brought_wait();
}

/* All threads of the block, behind stream_open. SLOT: bytes of a term's columns, at most. */
template <int LEVELS, int SLOT, class FIND, class BEGIN>
static __device__ __forceinline__ void stream_sums(uint8_t *room, int items, int terms, int32_t *taken,
                                                   const FIND &find, const BEGIN &begin)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if (__shfl_sync(EVERY_LANE, (int)threadIdx.x / WARP, 0) == STREAM_WARPS) { /* seen to be one for all lanes */
        stream_feed<SLOT>(room, items, terms, taken, find, begin);
    } else {
        stream_add<LEVELS, SLOT>(room);
    }
#else
    __trap(); /* stream_fits */
#endif
}

/* Terms of an item, at most. */
static inline bool stream_fits(const cuda *c, int terms)
{
    return cuda_is_hopper(c) && terms <= STREAM_FEW;
}

template <typename... PARAMETERS, typename... ARGUMENTS>
static status stream_launch(cuda *c, const char *what, void (*kernel)(PARAMETERS...), int64_t items, int terms,
                            int most_blocks, ARGUMENTS &&...arguments)
{
    int64_t each = WARP / stream_lanes(terms);
    unsigned grid = cuda_grid(c, (items + each - 1) / each, 2);
    status st = cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, STREAM_SHARED),
                           what, __FILE__, __LINE__);
    grid = grid < (unsigned)most_blocks ? grid : (unsigned)most_blocks;
    return st == OK ? launch(c, what, kernel, grid, STREAM_THREADS, STREAM_SHARED, arguments...) : st;
}

#endif
