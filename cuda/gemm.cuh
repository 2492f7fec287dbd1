/* One persistent product for all weights in BF16: y[token, out] = x[token, :] w[out, :]^T on Hopper's tensor cores.
 *
 * The weights are the M side: a block multiplies one or two 64-row boxes of a weight by up to 256 tokens, so that few
 * tokens waste nothing and the weights stream. The number of tokens a tile has only picks the width of the instruction;
 * the inner dimension always runs 16 by 16 from its start into one accumulator, and so a token's result depends neither
 * on its neighbours nor on the tiling.
 *
 * Three warpgroups. The first feeds a ring of stages (64 of the inner dimension each): one thread asks the copy engine
 * for boxes of weights, three warps gather the rows of tokens, 16 bytes a copy. The other two multiply, each its own 64
 * rows of the weight, and bring the result out through `finish`.
 *
 * A product is described by an op, a struct passed to the kernel:
 *     gemm_shape shape() const                       tiles and sizes, by one whole warp; may read counts from device
 * memory gemm_tile tile(s, t) const                     tile t, 0 <= t < s.tiles uint32_t source(tile, r) const token
 * row r of the tile: where in `x`, in units of 16 bytes void finish(acc, tile, side, room, factor)     results of one
 * warpgroup: 64 outs (side 0: the first) by tile.rows tokens x, GROUPS (groups of 8 rows, of one half, in a box),
 * factor(tile, r) where FACTORS */
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
    GEMM_GATHERERS = 96,      /* threads that gather tokens */
    GEMM_BEHIND = 2,          /* a gathered stage is handed over when so many later ones are under way */
    GEMM_ROOM = 8192,         /* bytes of a warpgroup's way out: two halves */
    GEMM_RING = 207 * 1024,
    GEMM_AT_ROOM = GEMM_RING,
    GEMM_AT_LIST = GEMM_AT_ROOM + 2 * GEMM_ROOM,
    GEMM_AT_FACTOR = GEMM_AT_LIST + GEMM_TOKENS * 4,
    GEMM_AT_BARRIER = GEMM_AT_FACTOR + 2 * GEMM_TOKENS * 4,
    GEMM_AT_SHAPE = GEMM_AT_BARRIER + 2 * GEMM_STAGES * 8,
    GEMM_SHARED = GEMM_AT_SHAPE + 64
};

typedef struct gemm_shape {
    int tiles, blocks, tokens,
        steps;        /* most boxes and tokens of a tile (tokens a multiple of 8), steps of the inner dimension */
    int across, each; /* the op's own: tiles of one token range, tokens of each */
} gemm_shape;

typedef struct gemm_tile {
    int expert, group; /* where its boxes begin: groups of eight rows */
    int blocks;        /* boxes of 64 rows */
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

template <class OP>
static __device__ void gemm_feed_weights(const OP &op, const gemm_shape &s, const gemm_ring &ring,
                                         const CUtensorMap *map)
{
    gemm_place p = {0, 1};
    for (int t = (int)blockIdx.x; t < s.tiles; t += (int)gridDim.x) {
        gemm_tile tile = op.tile(s, t);
        for (int k = 0; k < s.steps; k++) {
            uint32_t to = ring.at + (uint32_t)(p.stage * ring.stage_bytes), full = ring.full + 8 * (uint32_t)p.stage;
            barrier_wait(ring.empty + 8 * (uint32_t)p.stage, p.parity);
            barrier_expect(full, (uint32_t)tile.blocks * GEMM_BOX);
            for (int b = 0; b < tile.blocks; b++)
                copy_box5(to + (uint32_t)b * GEMM_BOX, map, full, k * TILE_K, 0, 0, tile.group + b * OP::GROUPS,
                          tile.expert);
            gemm_next(p, ring.stages);
        }
    }
}

/* Hands over the oldest of the stages gathered. */
static __device__ __forceinline__ void gemm_hand_over(const gemm_ring &ring, int &oldest)
{
    fence_written();
    barrier_arrive(ring.full + 8 * (uint32_t)oldest);
    oldest = oldest + 1 == ring.stages ? 0 : oldest + 1;
}

template <class OP>
static __device__ void gemm_feed_tokens(const OP &op, const gemm_shape &s, const gemm_ring &ring, uint32_t *list,
                                        int me)
{
    gemm_place p = {0, 1};
    int oldest = 0, behind = 0, chunk = me & 7;
    for (int t = (int)blockIdx.x; t < s.tiles; t += (int)gridDim.x) {
        gemm_tile tile = op.tile(s, t);
        copies_wait<0>();
        for (; behind > 0; behind--)
            gemm_hand_over(ring, oldest);
        meet(1, GEMM_GATHERERS); /* nobody reads the old list any more */
        for (int r = me; r < tile.rows; r += GEMM_GATHERERS)
            list[r] = op.source(tile, r);
        meet(1, GEMM_GATHERERS);
        for (int k = 0; k < s.steps; k++) {
            uint32_t to = ring.at + (uint32_t)(p.stage * ring.stage_bytes + ring.token_at);
            barrier_wait(ring.empty + 8 * (uint32_t)p.stage, p.parity);
            for (int r = me >> 3; r < tile.rows; r += GEMM_GATHERERS / 8)
                copy16(to + (uint32_t)(r * TILE_ROW + ((chunk ^ (r & 7)) << 4)),
                       op.x + ((int64_t)list[r] + k * 8 + chunk) * 8);
            copies_commit();
            gemm_next(p, ring.stages);
            if (behind == GEMM_BEHIND) {
                copies_wait<GEMM_BEHIND>();
                gemm_hand_over(ring, oldest);
            } else {
                behind++;
            }
        }
    }
    copies_wait<0>();
    for (; behind > 0; behind--)
        gemm_hand_over(ring, oldest);
}

static __device__ __forceinline__ void gemm_release(const gemm_ring &ring, int stage)
{
    if (threadIdx.x % WARP == 0)
        barrier_arrive(ring.empty + 8 * (uint32_t)stage);
}

/* One tile's products of one warpgroup. */
template <int N, int COUNT>
static __device__ __forceinline__ void gemm_multiply(float (&acc)[COUNT], const gemm_ring &ring, gemm_place &p,
                                                     int steps, int side)
{
    int before = 0;
    for (int k = 0; k < steps; k++) {
        uint32_t at = ring.at + (uint32_t)(p.stage * ring.stage_bytes);
        uint64_t w = operand(at + (uint32_t)side * GEMM_BOX), x = operand(at + (uint32_t)ring.token_at);
        barrier_wait(ring.full + 8 * (uint32_t)p.stage, p.parity);
        products_begin();
#pragma unroll
        for (int i = 0; i < TILE_K / 16; i++)
            product<N>::run(acc, w + 2 * i, x + 2 * i, i > 0 ? 1 : k);
        products_commit();
        if (k > 0) {
            products_wait<1>();
            gemm_release(ring, before);
        }
        before = p.stage;
        gemm_next(p, ring.stages);
    }
    products_wait<0>();
    hold(acc);
    gemm_release(ring, before);
}

template <class OP>
static __device__ void gemm_consume(const OP &op, const gemm_shape &s, const gemm_ring &ring, uint8_t *room, int side)
{
    float *factor = (float *)(room + GEMM_AT_FACTOR) + side * GEMM_TOKENS;
    uint32_t out = shared_at(room + GEMM_AT_ROOM) + (uint32_t)side * GEMM_ROOM;
    gemm_place p = {0, 0};
    int t = (int)blockIdx.x;
    gemm_tile tile = op.tile(s, t);
    while (t < s.tiles) {
        gemm_tile next = tile;
        t += (int)gridDim.x;
        if (t < s.tiles) /* asked for early: it may come from device memory */
            next = op.tile(s, t);
        if (OP::FACTORS)
            for (int r = (int)threadIdx.x % 128; r < tile.rows; r += 128)
                factor[r] = op.factor(tile, r);
        if (OP::FACTORS)
            meet(2 + side, 128);
        if (side < tile.blocks) {
            float acc[GEMM_TOKENS / 2];
            switch (gemm_width(tile.rows)) {
#define EPOCH_CASE(N)                                  \
    case N:                                            \
        gemm_multiply<N>(acc, ring, p, s.steps, side); \
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
            op.finish(acc, tile, side, out, factor);
        } else {
            for (int k = 0; k < s.steps; k++) {
                barrier_wait(ring.full + 8 * (uint32_t)p.stage, p.parity);
                gemm_release(ring, p.stage);
                gemm_next(p, ring.stages);
            }
        }
        tile = next;
    }
}

template <class OP>
static __global__ void __launch_bounds__(GEMM_THREADS, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap map, const __grid_constant__ OP op)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t room[];
    gemm_shape *found = (gemm_shape *)(room + GEMM_AT_SHAPE);
    const uint32_t full = shared_at(room + GEMM_AT_BARRIER), empty = full + GEMM_STAGES * 8;
    if (threadIdx.x < WARP) {
        gemm_shape s = op.shape();
        if (threadIdx.x == 0) {
            *found = s;
            prefetch_map(&map);
            for (uint32_t i = 0; i < GEMM_STAGES; i++) {
                barrier_init(full + 8 * i, GEMM_GATHERERS + 1);
                barrier_init(empty + 8 * i, 8); /* the warps that multiply */
            }
            barrier_init_done();
        }
    }
    __syncthreads();
    const gemm_shape s = *found;
    if ((int)blockIdx.x >= s.tiles)
        return;
    gemm_ring ring = {.at = shared_at(room), .full = full, .empty = empty, .token_at = s.blocks * GEMM_BOX};
    ring.stage_bytes = ring.token_at + s.tokens * TILE_ROW;
    ring.stages = GEMM_RING / ring.stage_bytes < GEMM_STAGES ? GEMM_RING / ring.stage_bytes : GEMM_STAGES;
    if (threadIdx.x < 128) {
        registers_fewer<40>();
        if (threadIdx.x >= WARP)
            gemm_feed_tokens(op, s, ring, (uint32_t *)(room + GEMM_AT_LIST), (int)threadIdx.x - WARP);
        else if (threadIdx.x == 0)
            gemm_feed_weights(op, s, ring, &map);
    } else {
        registers_more<232>();
        gemm_consume(op, s, ring, room, (int)threadIdx.x / 128 - 1);
    }
#else
    (void)map, (void)op;
    __trap(); /* the launchers ask cuda_is_hopper */
#endif
}

template <class OP>
static status gemm_launch(cuda *c, const CUtensorMap &map, const OP &op, int64_t most_tiles, const char *what)
{
    cudaError_t e = cudaFuncSetAttribute(gemm_kernel<OP>, cudaFuncAttributeMaxDynamicSharedMemorySize, GEMM_SHARED);
    if (e != cudaSuccess)
        return cuda_check(e, what, __FILE__, __LINE__);
    gemm_kernel<OP><<<cuda_grid(c, most_tiles, 1), GEMM_THREADS, GEMM_SHARED, c->stream>>>(map, op);
    return CUDA_LAUNCHED(what);
}

/* The way out of 64 outs by tile.rows tokens as they are: room for 32 tokens at a time, each half of the room in turn,
 * then rows of 128 bytes to y(first + token) + out. `with` changes a pair of values of tokens r and r + 1. */
template <class WITH>
static __device__ __forceinline__ void gemm_rows_out(const float (&acc)[GEMM_TOKENS / 2], const gemm_tile &tile,
                                                     int side, uint32_t room, bf16 *y, int64_t ldy, const WITH &with)
{
    int me = (int)threadIdx.x % 128, warp = me / WARP, lane = me % WARP;
#pragma unroll
    for (int j = 0; j < GEMM_TOKENS / 8; j += 4) {
        if (8 * j >= tile.rows)
            break;
        uint32_t half = room + (uint32_t)(j / 4 & 1) * (GEMM_ROOM / 2);
#pragma unroll
        for (int i = 0; i < 4; i += 2) { /* blocks: tokens j + i outs 0-7 and 8-15 of this warp, then the next tokens */
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
        for (int i = 0; i < 2; i++) {
            int token = (me >> 3) + 16 * i, chunk = me & 7;
            if (8 * j + token < tile.rows)
                *(uint4 *)(y + (tile.first + 8 * j + token) * ldy + chunk * 8) =
                    shared_load16(half + (uint32_t)(token * TILE_ROW + ((chunk ^ (token & 7)) << 4)));
        }
    }
    meet(2 + side, 128); /* the room may be written again */
}

#endif
