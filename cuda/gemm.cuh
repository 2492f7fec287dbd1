/* One persistent product for all weights in BF16: y[token, out] = x[token, :] w[out, :]^T on Hopper's tensor cores.
 *
 * The weights are the M side: a block multiplies one or two boxes of 64 weight rows by up to 256 tokens, so that few
 * tokens waste nothing and the weights stream. The number of tokens a tile has only picks the width of the instruction;
 * the inner dimension always runs 16 by 16 from its start into one accumulator, and so a token's result depends neither
 * on its neighbours nor on the tiling. Where there are fewer boxes than multiprocessors and few tokens, boxes may be
 * narrow: fewer weight rows, multiplied by the same instruction, whose other rows hold whatever lies behind the box.
 *
 * Three warpgroups. The first feeds a ring of stages (64 of the inner dimension each): one warp asks the copy engine for
 * weights, another for tokens that lie together; scattered ones are gathered by all its threads, 16 bytes a copy. The other two multiply, each its own box of the weight, and bring the result out through `finish`.
 *
 * With PAIR 2 two blocks of a cluster take neighbouring weights for the same tokens. Each asks for every other box of
 * tokens, and the copy engine writes it into both.
 *
 * A product is described by an op, a struct passed to the kernel:
 *     GROUPS                            groups of 8 rows, of one half, in a box
 *     GATHERS                           tokens are scattered: source() says where; else they are rows of maps.rows16
 *     FACTORS                           each token's results have a factor
 *     gemm_shape shape(pair) const      tiles and sizes, by one whole warp; may read counts from device memory
 *     gemm_tile tile(s, t) const        tile t, 0 <= t < s.tiles; those of a pair have the same tokens
 *     uint32_t source(tile, r) const    token row r of the tile: where in `x`, in units of 16 bytes
 *     float factor(tile, r) const
 *     void finish(acc, tile, side, room, factor) const      results of one warpgroup: the box `side` by tile.rows tokens
 *     void before() const               by one warp, before what earlier kernels wrote may be touched */
#ifndef EPOCH_CUDA_GEMM_CUH
#define EPOCH_CUDA_GEMM_CUH

#include "cuda/device.cuh"
#include "cuda/hopper.cuh"
#include "cuda/maps.h"

enum {
    GEMM_THREADS = 384,
    GEMM_TOKENS = 256,        /* most tokens of a tile */
    GEMM_BOX = 64 * TILE_ROW, /* bytes of a box of weights */
    GEMM_STAGES = 16,         /* most stages */
    GEMM_ROOM = 16384,        /* bytes of a warpgroup's way out: two halves */
    GEMM_RING = 192 * 1024,
    GEMM_AT_ROOM = GEMM_RING,
    GEMM_AT_FACTOR = GEMM_AT_ROOM + 2 * GEMM_ROOM,
    GEMM_AT_BARRIER = GEMM_AT_FACTOR + 2 * GEMM_TOKENS * 4,
    GEMM_AT_SHAPE = GEMM_AT_BARRIER + 2 * GEMM_STAGES * 8,
    GEMM_SHARED = GEMM_AT_SHAPE + 64
};

/* What the copy engine reads: boxes of weights, 64 rows and (where the op has them) narrow ones, and rows of tokens. */
typedef struct gemm_maps {
    CUtensorMap weights, narrow, rows16, rows64;
} gemm_maps;

typedef struct gemm_shape {
    int tiles, blocks, tokens; /* most boxes and tokens of a tile (tokens a multiple of 8) */
    int steps;                 /* of the inner dimension */
    int outs;                  /* weight rows of a box: 64, or fewer: maps.narrow */
    int across, each, rows;    /* the op's own: tiles of one token range, tokens of each, tokens of all */
} gemm_shape;

typedef struct gemm_tile {
    int expert, group; /* where its boxes begin: groups of eight rows */
    int blocks, outs;  /* boxes (0: none, to fill a pair), weight rows of each */
    int first, rows;   /* tokens */
} gemm_tile;

/* The width of the instruction for so many tokens. */
static __device__ __forceinline__ int gemm_width(int rows)
{
    return rows <= 8 ? 8 : (rows + 15) & ~15;
}

/* A ring position: stage and the parity of its pass. */
typedef struct gemm_place {
    int stage;
    uint32_t parity;
} gemm_place;

static __device__ __forceinline__ void gemm_next(gemm_place &p, int stages)
{
    if (++p.stage == stages) {
        p.stage = 0;
        p.parity ^= 1;
    }
}

typedef struct gemm_ring {
    uint32_t at;          /* of the ring */
    uint32_t full, empty; /* barriers, 8 bytes a stage */
    int stages, stage_bytes, token_at;
} gemm_ring;

/* Boxes are asked for by as many lanes of a warp: each knows its own, and the loop is short. That bytes come before the
 * barrier expects them does no harm: it waits for that arrival too. */
template <class OP>
static __device__ __forceinline__ void gemm_ask_weights(const gemm_tile &tile, const CUtensorMap *map, uint32_t to,
                                                        uint32_t full, int k)
{
    int lane = (int)threadIdx.x % WARP;
    if (lane < tile.blocks)
        copy_box5(to + (uint32_t)lane * GEMM_BOX, map, full, k * TILE_K, 0, 0, tile.group + lane * OP::GROUPS,
                  tile.expert);
}

/* Weights, by one warp. */
template <class OP>
static __device__ void gemm_feed_weights(const OP &op, const gemm_shape &s, const gemm_ring &ring,
                                         const gemm_maps &maps)
{
    const CUtensorMap *map = s.outs == 64 ? &maps.weights : &maps.narrow;
    gemm_place p = {0, 1};
    for (int t = (int)blockIdx.x; t < s.tiles; t += (int)gridDim.x) {
        gemm_tile tile = op.tile(s, t);
        uint32_t bytes = (uint32_t)(tile.blocks * tile.outs) * TILE_ROW;
#pragma unroll 1
        for (int k = 0; k < s.steps; k++) {
            uint32_t to = ring.at + (uint32_t)(p.stage * ring.stage_bytes), full = ring.full + 8 * (uint32_t)p.stage;
            barrier_wait(ring.empty + 8 * (uint32_t)p.stage, p.parity);
            if (threadIdx.x == 0)
                barrier_expect(full, bytes);
            gemm_ask_weights<OP>(tile, map, to, full, k);
            gemm_next(p, ring.stages);
        }
    }
}

/* Tokens that lie together, by one warp. */
template <class OP, int PAIR>
static __device__ void gemm_feed_tokens(const OP &op, const gemm_shape &s, const gemm_ring &ring,
                                        const gemm_maps &maps)
{
    const int lane = (int)threadIdx.x % WARP;
    gemm_place p = {0, 1};
    for (int t = (int)blockIdx.x; t < s.tiles; t += (int)gridDim.x) {
        gemm_tile tile = op.tile(s, t);
        int width = gemm_width(tile.rows), large = width / 64, boxes = large + (width % 64 + 15) / 16;
        uint32_t bytes = (uint32_t)(48 * large + 16 * boxes) * TILE_ROW;
        int mine = PAIR > 1 ? (int)(blockIdx.x % PAIR) + PAIR * lane : lane;
        int row = mine < large ? 64 * mine : 48 * large + 16 * mine;
        const CUtensorMap *map = mine < large ? &maps.rows64 : &maps.rows16;
        uint32_t at = ring.at + (uint32_t)(ring.token_at + row * TILE_ROW);
#pragma unroll 1
        for (int k = 0; k < s.steps; k++) {
            uint32_t to = at + (uint32_t)(p.stage * ring.stage_bytes), full = ring.full + 8 * (uint32_t)p.stage;
            barrier_wait(ring.empty + 8 * (uint32_t)p.stage, p.parity);
            if (lane == 0)
                barrier_expect(full, bytes);
            if (mine < boxes) {
                if (PAIR > 1)
                    copy_box2_both(to, map, full, k * TILE_K, tile.first + row);
                else
                    copy_box2(to, map, full, k * TILE_K, tile.first + row);
            }
            gemm_next(p, ring.stages);
        }
    }
}

/* Weights by the first warp, and scattered tokens by all four: thread 8 i + c copies chunk c of rows i, i + 16, ... */
template <class OP>
static __device__ void gemm_feed_scattered(const OP &op, const gemm_shape &s, const gemm_ring &ring,
                                           const gemm_maps &maps)
{
    enum { EACH = GEMM_TOKENS / 16 };
    gemm_place p = {0, 1};
    const int row = (int)threadIdx.x >> 3, chunk = (int)threadIdx.x & 7;
    const uint32_t at = (uint32_t)(ring.token_at + row * TILE_ROW + ((chunk ^ (row & 7)) << 4));
    for (int t = (int)blockIdx.x; t < s.tiles; t += (int)gridDim.x) {
        gemm_tile tile = op.tile(s, t);
        const int left = tile.rows - row;
        uint32_t from[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++)
            from[i] = 16 * i < left ? op.source(tile, row + 16 * i) + (uint32_t)chunk : 0;
        const uint4 *x = (const uint4 *)op.x;
        asm volatile("" : "+l"(x)); /* in registers: an address is one instruction */
#pragma unroll 1
        for (int k = 0; k < s.steps; k++) {
            uint32_t to = ring.at + (uint32_t)(p.stage * ring.stage_bytes), full = ring.full + 8 * (uint32_t)p.stage;
            barrier_wait(ring.empty + 8 * (uint32_t)p.stage, p.parity);
            if (threadIdx.x == 0) {
                barrier_expect(full, (uint32_t)(tile.blocks * tile.outs) * TILE_ROW);
                for (int b = 0; b < tile.blocks; b++)
                    copy_box5(to + (uint32_t)b * GEMM_BOX, &maps.weights, full, k * TILE_K, 0, 0,
                              tile.group + b * OP::GROUPS, tile.expert);
            }
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (16 * i < left)
                    copy16(to + at + (uint32_t)(i * 16 * TILE_ROW), x + from[i]);
            copies_arrive(full);
            x += TILE_ROW / 16;
            gemm_next(p, ring.stages);
        }
    }
}

/* The stage may be filled again, as far as this warp is concerned: told to every block that fills it. */
template <int PAIR> static __device__ __forceinline__ void gemm_release(const gemm_ring &ring, int stage)
{
    uint32_t lane = threadIdx.x % WARP, at = ring.empty + 8 * (uint32_t)stage;
    if (PAIR == 1 && lane == 0)
        barrier_arrive(at);
    if (PAIR > 1 && lane < PAIR)
        barrier_arrive_there(shared_there(at, lane));
}

/* One tile's products of one warpgroup. */
template <class OP, int PAIR, int N, int COUNT>
static __device__ __forceinline__ void gemm_multiply(float (&acc)[COUNT], const gemm_ring &ring, gemm_place &p,
                                                     int steps, int side)
{
    int before = 0;
    for (int k = 0; k < steps; k++) {
        uint32_t at = ring.at + (uint32_t)(p.stage * ring.stage_bytes);
        uint64_t w = operand(at + (uint32_t)side * GEMM_BOX), x = operand(at + (uint32_t)ring.token_at);
        barrier_wait(ring.full + 8 * (uint32_t)p.stage, p.parity);
        if (OP::GATHERS)
            fence_written();
        products_begin();
#pragma unroll
        for (int i = 0; i < TILE_K / 16; i++)
            product<N>::run(acc, w + 2 * i, x + 2 * i, i > 0 ? 1 : k);
        products_commit();
        if (k > 0) {
            products_wait<1>();
            gemm_release<PAIR>(ring, before);
        }
        before = p.stage;
        gemm_next(p, ring.stages);
    }
    products_wait<0>();
    hold(acc);
    gemm_release<PAIR>(ring, before);
}

template <class OP, int PAIR>
static __device__ void gemm_consume(const OP &op, const gemm_shape &s, const gemm_ring &ring, uint8_t *room, int side)
{
    enum { ROWS = GEMM_TOKENS / 128 };
    float *factor = (float *)(room + GEMM_AT_FACTOR) + side * GEMM_TOKENS;
    uint32_t out = shared_at(room + GEMM_AT_ROOM) + (uint32_t)side * GEMM_ROOM;
    const int me = (int)threadIdx.x % 128;
    gemm_place p = {0, 0};
    int t = (int)blockIdx.x;
    gemm_tile tile = op.tile(s, t);
    while (t < s.tiles) {
        gemm_tile next = tile;
        float f[ROWS] = {};
        t += (int)gridDim.x;
        if (t < s.tiles) /* asked for early, and so are the factors: they may come from device memory */
            next = op.tile(s, t);
#pragma unroll
        for (int i = 0; OP::FACTORS && i < ROWS; i++)
            if (me + 128 * i < tile.rows)
                f[i] = op.factor(tile, me + 128 * i);
        if (side < tile.blocks) {
            float acc[GEMM_TOKENS / 2];
            switch (gemm_width(tile.rows)) {
#define EPOCH_CASE(N)                                            \
    case N:                                                      \
        gemm_multiply<OP, PAIR, N>(acc, ring, p, s.steps, side); \
        break;
                EPOCH_CASE(8)
                EPOCH_CASE(16)
                EPOCH_CASE(32)
                EPOCH_CASE(48)
                EPOCH_CASE(64)
                EPOCH_CASE(80)
                EPOCH_CASE(96)
                EPOCH_CASE(112)
                EPOCH_CASE(128)
                EPOCH_CASE(144)
                EPOCH_CASE(160)
                EPOCH_CASE(176)
                EPOCH_CASE(192)
                EPOCH_CASE(208)
                EPOCH_CASE(224)
                EPOCH_CASE(240)
                EPOCH_CASE(256)
#undef EPOCH_CASE
            }
            if (OP::FACTORS) {
#pragma unroll
                for (int i = 0; i < ROWS; i++)
                    factor[me + 128 * i] = f[i];
                meet(2 + side, 128);
            }
            op.finish(acc, tile, side, out, factor);
        } else {
            for (int k = 0; k < s.steps; k++) {
                barrier_wait(ring.full + 8 * (uint32_t)p.stage, p.parity);
                gemm_release<PAIR>(ring, p.stage);
                gemm_next(p, ring.stages);
            }
        }
        tile = next;
    }
}

template <class OP, int PAIR>
static __global__ void __launch_bounds__(GEMM_THREADS, 1)
    gemm_kernel(const __grid_constant__ gemm_maps maps, const __grid_constant__ OP op)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t room[];
    gemm_shape *found = (gemm_shape *)(room + GEMM_AT_SHAPE);
    const uint32_t full = shared_at(room + GEMM_AT_BARRIER), empty = full + GEMM_STAGES * 8;
    if (threadIdx.x == 0) {
        prefetch_map(&maps.weights);
        for (uint32_t i = 0; i < GEMM_STAGES; i++) {
            barrier_init(full + 8 * i, OP::GATHERS ? 129 : 2); /* who feeds */
            barrier_init(empty + 8 * i, 8 * PAIR); /* the warps that multiply */
        }
        barrier_init_done();
    } else if (threadIdx.x / WARP == 1) {
        op.before();
    }
    after_previous();
    let_next();
    if (threadIdx.x < WARP) {
        gemm_shape s = op.shape(PAIR);
        if (threadIdx.x == 0)
            *found = s;
    }
    if (PAIR > 1)
        cluster_meet();
    else
        __syncthreads();
    const gemm_shape s = *found;
    if ((int)(blockIdx.x / PAIR * PAIR) >= s.tiles)
        return;
    gemm_ring ring = {.at = shared_at(room), .full = full, .empty = empty};
    ring.token_at = s.outs == 64 ? s.blocks * GEMM_BOX : s.outs * TILE_ROW;
    ring.stage_bytes = ring.token_at + (s.tokens + 15) / 16 * 16 * TILE_ROW;
    ring.stages = GEMM_RING / ring.stage_bytes < GEMM_STAGES ? GEMM_RING / ring.stage_bytes : GEMM_STAGES;
    if (threadIdx.x < 128) {
        registers_fewer<72>();
        if constexpr (OP::GATHERS != 0)
            gemm_feed_scattered(op, s, ring, maps);
        else if (threadIdx.x < WARP)
            gemm_feed_weights(op, s, ring, maps);
        else if (threadIdx.x < 2 * WARP)
            gemm_feed_tokens<OP, PAIR>(op, s, ring, maps);
    } else {
        registers_more<216>();
        gemm_consume<OP, PAIR>(op, s, ring, room, (int)threadIdx.x / 128 - 1);
    }
    if (PAIR > 1) /* no block leaves while the other writes to it */
        cluster_meet();
#else
    (void)maps, (void)op;
    __trap(); /* the launchers ask cuda_is_hopper */
#endif
}

/* PAIR blocks at a time take the tiles, at most `most_tiles`. */
template <int PAIR, class OP>
static status gemm_launch(cuda *c, const gemm_maps &maps, const OP &op, int64_t most_tiles, const char *what)
{
    void (*kernel)(gemm_maps, OP) = gemm_kernel<OP, PAIR>;
    status st = cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, GEMM_SHARED), what,
                           __FILE__, __LINE__);
    unsigned pairs = cuda_grid(c, (most_tiles + PAIR - 1) / PAIR * PAIR, 1) / PAIR;
    return st == OK ? launch_clusters(c, what, kernel, pairs * PAIR, GEMM_THREADS, GEMM_SHARED, PAIR, maps, op) : st;
}

/* The way out of a box's outs by tile.rows tokens as they are: room for 64 tokens at a time, each half of the room in
 * turn, then rows of 128 bytes to y(first + token). `with` gives the factors of tokens r and r + 1. */
template <class WITH>
static __device__ __forceinline__ void gemm_rows_out(const float (&acc)[GEMM_TOKENS / 2], const gemm_tile &tile,
                                                     int side, uint32_t room, bf16 *y, int64_t ldy, const WITH &with)
{
    int me = (int)threadIdx.x % 128, warp = me / WARP, lane = me % WARP;
    const bool inside = (me & 7) * 8 < tile.outs;
#pragma unroll
    for (int j = 0; j < GEMM_TOKENS / 8; j += 8) {
        if (8 * j >= tile.rows)
            break;
        uint32_t half = room + (uint32_t)(j / 8 & 1) * (GEMM_ROOM / 2);
#pragma unroll
        for (int i = 0; i < 8; i += 2) { /* blocks: tokens j + i outs 0-7 and 8-15 of this warp, then the next tokens */
            uint32_t v[4];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int b = 4 * (j + i + h), r = 8 * (j + i + h) + 2 * (lane % 4);
                float f0, f1;
                with(r, f0, f1);
                v[2 * h] = pair(acc[b] * f0, acc[b + 1] * f1);
                v[2 * h + 1] = pair(acc[b + 2] * f0, acc[b + 3] * f1);
            }
            int token = 8 * (i + lane / 16) + lane % 8, chunk = 2 * warp + lane / 8 % 2;
            store_across(half + (uint32_t)(token * TILE_ROW + ((chunk ^ (token & 7)) << 4)), v[0], v[1], v[2], v[3]);
        }
        meet(2 + side, 128);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int token = (me >> 3) + 16 * i, chunk = me & 7;
            if (8 * j + token < tile.rows && inside)
                *(uint4 *)(y + (tile.first + 8 * j + token) * ldy + chunk * 8) =
                    shared_load16(half + (uint32_t)(token * TILE_ROW + ((chunk ^ (token & 7)) << 4)));
        }
    }
    meet(2 + side, 128); /* the room may be written again */
}

static __device__ __forceinline__ float silu(float x)
{
    return __fdividef(x, 1.0f + __expf(-x));
}

/* The way out of a box that holds eight rows of gate, the eight of up that belong to them, and so on, so that a
 * thread's accumulator has both: silu(gate) * up of tile.rows tokens, half as many features as the box has rows. 128
 * tokens at a time, each half of the room in turn: rows of 32 features, 64 bytes, two to a line of banks. */
static __device__ __forceinline__ void gemm_gated_out(const float (&acc)[GEMM_TOKENS / 2], const gemm_tile &tile,
                                                      int side, uint32_t room, bf16 *y, int64_t ldy)
{
    int me = (int)threadIdx.x % 128, warp = me / WARP, lane = me % WARP;
    const bool inside = (me & 3) * 16 < tile.outs;
#pragma unroll
    for (int j = 0; j < GEMM_TOKENS / 8; j += 16) {
        if (8 * j >= tile.rows)
            break;
        uint32_t half = room + (uint32_t)(j / 16 & 1) * (GEMM_ROOM / 2);
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            if (8 * (j + i) >= tile.rows)
                break;
            uint32_t v[4];
#pragma unroll
            for (int h = 0; h < 4; h++) {
                int b = 4 * (j + i + h);
                v[h] = pair(silu(acc[b]) * acc[b + 2], silu(acc[b + 1]) * acc[b + 3]);
            }
            int token = 8 * (i + lane / 8) + lane % 8;
            store_across(half + (uint32_t)(token * 64 + ((warp ^ (token >> 1 & 3)) << 4)), v[0], v[1], v[2], v[3]);
        }
        meet(2 + side, 128);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int token = (me >> 2) + 32 * i, chunk = me & 3;
            if (8 * j + token < tile.rows && inside)
                *(uint4 *)(y + (int64_t)(tile.first + 8 * j + token) * ldy + chunk * 8) =
                    shared_load16(half + (uint32_t)(token * 64 + ((chunk ^ (token >> 1 & 3)) << 4)));
        }
    }
    meet(2 + side, 128); /* the room may be written again */
}

#endif
