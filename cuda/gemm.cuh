/* One persistent product for all weights in BF16: y[token, out] = x[token, :] w[out, :]^T on Hopper's tensor cores.
 *
 * The weights are the M side: a block multiplies one or two boxes of 64 weight rows by up to 256 tokens, or 288, so
 * that few tokens waste nothing and the weights stream. The number of tokens a tile has only picks the width of the
 * instruction; the inner dimension always runs 16 by 16 from its start into one accumulator, and so a token's result
 * depends neither on its neighbours nor on the tiling. Where there are fewer boxes than multiprocessors and few tokens,
 * boxes may be narrow: fewer weight rows, multiplied by the same instruction, whose other rows hold whatever lies
 * behind the box.
 *
 * Three warpgroups. The first feeds a ring of stages (64 of the inner dimension each): one warp asks the copy engine
 * for weights, another for tokens that lie together; scattered ones are gathered by the three others, 16 bytes a copy.
 * The other two warpgroups multiply, each its own box of the weight. What they made waits in shared memory for the copy
 * engine to bring it out, while the next tile begins.
 *
 * A product is described by an op, a struct passed to the kernel. Its constants:
 *     GROUPS     groups of 8 rows, of one half, in a box
 *     TOKENS     most tokens of a tile: 256 or 288
 *     ROW        bytes that a box of 64 makes of a token: 128, or 64 (gated)
 *     ROOM       tokens whose results wait in shared memory at once, a multiple of 16
 *     GATHERS    1: a tile's tokens are scattered, source() says where; 0: they are neighbours in maps.rows16, rows64
 *     FACTORS    1: each token's results have a factor
 *     SETTLED    1: what shape, tile and factor read is older than the kernel before this one (device.cuh), and they
 *                read past L1; weights are asked for while that one ends. Only where GATHERS is 0
 * and its members:
 *     const bf16 *x                     the tokens; where GATHERS
 *     void before() const               by one warp, before what earlier kernels wrote may be touched
 *     gemm_shape shape() const          tiles and sizes; by one whole warp, may read counts from device memory
 *     gemm_tile tile(s, t) const        tile t, 0 <= t < s.tiles
 *     uint32_t source(tile, r) const    token row r of the tile is so many 16 bytes behind x; where GATHERS
 *     float factor(tile, r) const       of token row r of the tile; where FACTORS
 *     void finish(acc, tile, side, room, factor, maps) const
 *                                       the way out of one warpgroup's results, those of the box `side` by tile.rows
 *                                       tokens; room: its shared memory; factor: of each token row, there too */
#ifndef EPOCH_CUDA_GEMM_CUH
#define EPOCH_CUDA_GEMM_CUH

#include "cuda/device.cuh"
#include "cuda/hopper.cuh"
#include "cuda/maps.h"

enum {
    GEMM_THREADS = 384,
    GEMM_TOKENS = 256,        /* most tokens of an instruction */
    GEMM_BOX = 64 * TILE_ROW, /* bytes of a box of weights */
    GEMM_STAGES = 16,         /* most stages */
    GEMM_SHARED = 227 * 1024
};

/* Shared memory of an op: each warpgroup has its own room for the way out, and for factors. */
template <class OP> struct gemm_room {
    enum {
        OUT = OP::ROOM * OP::ROW,
        FACTOR = OP::FACTORS ? OP::TOKENS * 4 : 0,
        REST = 2 * OUT + 2 * FACTOR + 2 * GEMM_STAGES * 8 + 64,
        RING = (GEMM_SHARED - REST) / ATOM * ATOM,
        AT_OUT = RING,
        AT_FACTOR = AT_OUT + 2 * OUT,
        AT_BARRIER = AT_FACTOR + 2 * FACTOR,
        AT_SHAPE = AT_BARRIER + 2 * GEMM_STAGES * 8
    };
};

/* What the copy engine reads, boxes of weights, 64 rows and (where the op has them) narrow ones, and rows of tokens;
 * and what it writes. */
typedef struct gemm_maps {
    CUtensorMap weights, narrow, rows16, rows64, out8, out64;
} gemm_maps;

typedef struct gemm_shape {
    int tiles, blocks, tokens; /* most boxes and tokens of a tile (tokens a multiple of 8) */
    int steps;                 /* of the inner dimension */
    int outs;                  /* weight rows of a box: 64, or fewer: maps.narrow */
    bool passing;              /* the L2 cache has better use than to hold weights */
    int across, each, rows;    /* the op's own: tiles of one token range, tokens of each, tokens of all */
    uint32_t per;              /* gemm_per(across) */
} gemm_shape;

/* t / across is gemm_over(t, gemm_per(across)) while the product of both is below 2^31; a division of integers takes
 * 200 cycles, and between two tiles nothing else is done. */
static __device__ __forceinline__ uint32_t gemm_per(int across)
{
    return (0x80000000u + (uint32_t)across - 1) / (uint32_t)across;
}

static __device__ __forceinline__ int gemm_over(int t, uint32_t per)
{
    return (int)__umulhi(2 * (uint32_t)t, per);
}

typedef struct gemm_tile {
    int expert, group; /* where its boxes begin: groups of eight rows */
    int blocks, outs;  /* boxes, weight rows of each */
    int first, rows;   /* tokens */
} gemm_tile;

/* CASE(N) for each width of the instruction; above 256 they are two. */
#define GEMM_WIDTHS(CASE) \
    CASE(8) CASE(16) CASE(32) CASE(48) CASE(64) CASE(80) CASE(96) CASE(112) CASE(128) CASE(144) CASE(160) CASE(176) \
    CASE(192) CASE(208) CASE(224) CASE(240) CASE(256) CASE(272) CASE(288)

/* The width of the instruction for so many tokens. */
static __host__ __device__ __forceinline__ int gemm_width(int rows)
{
    return rows <= 8 ? 8 : (rows + 15) & ~15;
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
                                                        uint32_t full, int k, uint64_t policy)
{
    int lane = (int)threadIdx.x % WARP;
    if (lane < tile.blocks)
        copy_box5(to + (uint32_t)lane * GEMM_BOX, map, full, k * TILE_K, 0, 0, tile.group + lane * OP::GROUPS,
                  tile.expert, policy);
}

/* Weights, by one warp. */
template <class OP>
static __device__ void gemm_feed_weights(const OP &op, const gemm_shape &s, const gemm_ring &ring,
                                         const gemm_maps &maps)
{
    const CUtensorMap *map = s.outs == 64 ? &maps.weights : &maps.narrow;
    const uint64_t policy = cache_policy(s.passing);
    ring_place p = {0, 1};
    gemm_tile next = op.tile(s, (int)blockIdx.x);
    for (int t = (int)blockIdx.x; t < s.tiles; t += (int)gridDim.x) {
        gemm_tile tile = next;
        if (t + (int)gridDim.x < s.tiles) /* asked for early: it may come from device memory */
            next = op.tile(s, t + (int)gridDim.x);
        uint32_t bytes = (uint32_t)(tile.blocks * tile.outs) * TILE_ROW;
#pragma unroll 1
        for (int k = 0; k < s.steps; k++) {
            uint32_t to = ring.at + (uint32_t)(p.stage * ring.stage_bytes), full = ring.full + 8 * (uint32_t)p.stage;
            barrier_wait(ring.empty + 8 * (uint32_t)p.stage, p.parity);
            if (threadIdx.x == 0)
                barrier_expect(full, bytes);
            gemm_ask_weights<OP>(tile, map, to, full, k, policy);
            ring_next(p, ring.stages);
        }
    }
}

/* Tokens that lie together, by one warp. */
template <class OP>
static __device__ void gemm_feed_tokens(const OP &op, const gemm_shape &s, const gemm_ring &ring, const gemm_maps &maps)
{
    const int lane = (int)threadIdx.x % WARP;
    ring_place p = {0, 1};
    gemm_tile next = op.tile(s, (int)blockIdx.x);
    for (int t = (int)blockIdx.x; t < s.tiles; t += (int)gridDim.x) {
        gemm_tile tile = next;
        if (t + (int)gridDim.x < s.tiles)
            next = op.tile(s, t + (int)gridDim.x);
        int width = gemm_width(tile.rows), large = width / 64, boxes = large + (width % 64 + 15) / 16;
        uint32_t bytes = (uint32_t)(48 * large + 16 * boxes) * TILE_ROW;
        int row = lane < large ? 64 * lane : 48 * large + 16 * lane;
        const CUtensorMap *map = lane < large ? &maps.rows64 : &maps.rows16;
        uint32_t at = ring.at + (uint32_t)(ring.token_at + row * TILE_ROW);
#pragma unroll 1
        for (int k = 0; k < s.steps; k++) {
            uint32_t to = at + (uint32_t)(p.stage * ring.stage_bytes), full = ring.full + 8 * (uint32_t)p.stage;
            barrier_wait(ring.empty + 8 * (uint32_t)p.stage, p.parity);
            if (lane == 0)
                barrier_expect(full, bytes);
            if (lane < boxes)
                copy_box2(to, map, full, k * TILE_K, tile.first + row);
            ring_next(p, ring.stages);
        }
    }
}

/* Scattered tokens, by the three other warps: groups of eight rows in turn, lane 8 i + c chunk c of rows i and i + 4.
 * Rows behind the tile's last are copies of it. Where a warp's rows are, each lane asks for its share, a tile ahead. */
template <class OP> static __device__ void gemm_feed_scattered(const OP &op, const gemm_shape &s, const gemm_ring &ring)
{
    enum { WARPS = 3, EACH = (OP::TOKENS / 8 + WARPS - 1) / WARPS, MINE = (8 * EACH + WARP - 1) / WARP };
    ring_place p = {0, 1};
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP - 1, row = lane >> 3, chunk = lane & 7;
    const uint32_t at = ring.at + (uint32_t)(ring.token_at + warp * ATOM + row * TILE_ROW + ((chunk ^ row) << 4));
    const uint32_t second = (uint32_t)(4 * TILE_ROW) + ((chunk ^ row) & 4 ? -64u : 64u); /* chunk ^ (row + 4) */
    uint32_t mine[MINE]; /* of the warp's rows, lane + 32 i */
    auto find = [&](const gemm_tile &tile) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            int r = 8 * (warp + (lane / 8 + 4 * i) * WARPS) + lane % 8;
            mine[i] = op.source(tile, r < tile.rows ? r : tile.rows - 1);
        }
    };
    gemm_tile next = op.tile(s, (int)blockIdx.x);
    find(next);
    for (int t = (int)blockIdx.x; t < s.tiles; t += (int)gridDim.x) {
        const int groups = __shfl_sync(EVERY_LANE, ((next.rows + 7) / 8 - warp + WARPS - 1) / WARPS, 0);
        const bool more = t + (int)gridDim.x < s.tiles;
        uint32_t from[2 * EACH];
#pragma unroll
        for (int i = 0; i < 2 * EACH; i++)
            from[i] = __shfl_sync(EVERY_LANE, mine[i / 8], i % 8 * 4 + row) + (uint32_t)chunk;
        if (more)
            next = op.tile(s, t + (int)gridDim.x);
        const uint4 *x = (const uint4 *)op.x;
        asm volatile("" : "+l"(x)); /* in registers: an address is one instruction */
#pragma unroll 1
        for (int k = 0; k < s.steps; k++) {
            uint32_t to = at + (uint32_t)(p.stage * ring.stage_bytes);
            barrier_wait(ring.empty + 8 * (uint32_t)p.stage, p.parity);
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                if (i >= groups)
                    break;
                copy16(to + (uint32_t)(i * WARPS * ATOM), x + from[2 * i]);
                copy16(to + second + (uint32_t)(i * WARPS * ATOM), x + from[2 * i + 1]);
            }
            copies_arrive(ring.full + 8 * (uint32_t)p.stage);
            if (k == s.steps / 2 && more)
                find(next);
            x += TILE_ROW / 16;
            ring_next(p, ring.stages);
        }
    }
}

static __device__ __forceinline__ void gemm_release(const gemm_ring &ring, int stage)
{
    if (threadIdx.x % WARP == 0)
        barrier_arrive(ring.empty + 8 * (uint32_t)stage);
}

/* acc += w[64, 16] x[N, 16]^T. What is more than an instruction can take is a small one of its own: the accumulators of
 * all widths begin in the same registers so, without which the compiler lets no two products overlap. */
template <int N, int COUNT>
static __device__ __forceinline__ void gemm_product(float (&acc)[COUNT], uint64_t w, uint64_t x, int add)
{
    if constexpr (N <= GEMM_TOKENS) {
        product<N>::run(acc, w, x, add);
    } else {
        typedef float rest[COUNT - GEMM_TOKENS / 2];
        product<GEMM_TOKENS>::run(acc, w, x, add);
        product<N - GEMM_TOKENS>::run(*(rest *)(acc + GEMM_TOKENS / 2), w, x + (GEMM_TOKENS * TILE_ROW >> 4), add);
    }
}

/* One tile's products of one warpgroup. */
template <class OP, int N, int COUNT>
static __device__ __forceinline__ void gemm_multiply(float (&acc)[COUNT], const gemm_ring &ring, ring_place &p,
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
            gemm_product<N>(acc, w + 2 * i, x + 2 * i, i > 0 ? 1 : k);
        products_commit();
        if (k > 0) {
            products_wait<1>();
            gemm_release(ring, before);
        }
        before = p.stage;
        ring_next(p, ring.stages);
    }
    products_wait<0>();
    hold(acc);
    gemm_release(ring, before);
}

template <class OP>
static __device__ void gemm_consume(const OP &op, const gemm_shape &s, const gemm_ring &ring, const gemm_maps &maps,
                                    uint8_t *room, int side)
{
    enum { ROWS = (OP::TOKENS + 127) / 128 };
    typedef gemm_room<OP> at;
    float *factor = (float *)(room + at::AT_FACTOR) + side * OP::TOKENS;
    uint32_t out = shared_at(room + at::AT_OUT) + (uint32_t)(side * at::OUT);
    const int me = (int)threadIdx.x % 128;
    ring_place p = {0, 0};
    int t = (int)blockIdx.x;
    gemm_tile tile = op.tile(s, t);
    while (t < s.tiles) {
        gemm_tile next = tile;
        float f[ROWS] = {};
        t += (int)gridDim.x;
        if (t < s.tiles) /* asked for early, and so are the factors: they may come from device memory */
            next = op.tile(s, t);
        if constexpr (OP::FACTORS != 0) {
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (me + 128 * i < tile.rows)
                    f[i] = op.factor(tile, me + 128 * i);
        }
        if (side < tile.blocks) {
            float acc[OP::TOKENS / 2];
            switch (gemm_width(tile.rows)) {
#define EPOCH_CASE(N)                                          \
    case N:                                                    \
        if constexpr (N <= OP::TOKENS)                         \
            gemm_multiply<OP, N>(acc, ring, p, s.steps, side); \
        break;
                GEMM_WIDTHS(EPOCH_CASE)
#undef EPOCH_CASE
            }
            if (OP::FACTORS) {
#pragma unroll
                for (int i = 0; i < ROWS; i++)
                    if (me + 128 * i < OP::TOKENS)
                        factor[me + 128 * i] = f[i];
                meet(2 + side, 128);
            }
            op.finish(acc, tile, side, out, factor, maps);
        } else {
            for (int k = 0; k < s.steps; k++) {
                barrier_wait(ring.full + 8 * (uint32_t)p.stage, p.parity);
                gemm_release(ring, p.stage);
                ring_next(p, ring.stages);
            }
        }
        tile = next;
    }
    brought_wait();
}

template <class OP>
static __global__ void __launch_bounds__(GEMM_THREADS, 1)
    gemm_kernel(const __grid_constant__ gemm_maps maps, const __grid_constant__ OP op)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t room[];
    typedef gemm_room<OP> at;
    gemm_shape *found = (gemm_shape *)(room + at::AT_SHAPE);
    const uint32_t full = shared_at(room + at::AT_BARRIER), empty = full + GEMM_STAGES * 8;
    if (threadIdx.x == 0) {
        prefetch_map(&maps.weights);
        for (uint32_t i = 0; i < GEMM_STAGES; i++) {
            barrier_init(full + 8 * i, OP::GATHERS ? 97 : 2); /* who feeds */
            barrier_init(empty + 8 * i, 8);                   /* the warps that multiply */
        }
        barrier_init_done();
    } else if (threadIdx.x / WARP == 1) {
        op.before();
    }
    if (!OP::SETTLED) {
        after_previous();
        let_next();
    }
    if (threadIdx.x < WARP) {
        gemm_shape s = op.shape();
        if (threadIdx.x == 0)
            *found = s;
    }
    __syncthreads();
    const gemm_shape s = *found;
    if ((int)blockIdx.x >= s.tiles) {
        if (OP::SETTLED)
            after_previous();
        return;
    }
    gemm_ring ring = {.at = shared_at(room), .full = full, .empty = empty};
    ring.token_at = s.outs == 64 ? s.blocks * GEMM_BOX : s.outs * TILE_ROW;
    ring.stage_bytes = ring.token_at + (s.tokens + 15) / 16 * 16 * TILE_ROW;
    ring.stages = at::RING / ring.stage_bytes < GEMM_STAGES ? at::RING / ring.stage_bytes : (int)GEMM_STAGES;
    if (threadIdx.x < 128) {
        registers_fewer<72>();
        const int warp = __shfl_sync(EVERY_LANE, (int)threadIdx.x / WARP, 0); /* seen to be one for all lanes */
        if (warp == 0) {
            gemm_feed_weights(op, s, ring, maps);
        } else if constexpr (OP::GATHERS != 0) {
            gemm_feed_scattered(op, s, ring);
        } else if (warp == 1) {
            if (OP::SETTLED) { /* all others wait for tokens */
                after_previous();
                let_next();
            }
            gemm_feed_tokens(op, s, ring, maps);
        }
    } else {
        registers_more<216>();
        gemm_consume(op, s, ring, maps, room, (int)threadIdx.x / 128 - 1);
    }
#else
    (void)maps, (void)op;
    __trap(); /* the launchers ask cuda_is_hopper */
#endif
}

template <class OP>
static status gemm_launch(cuda *c, const gemm_maps &maps, const OP &op, int64_t most_tiles, const char *what)
{
    void (*kernel)(gemm_maps, OP) = gemm_kernel<OP>;
    status st = cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, GEMM_SHARED), what,
                           __FILE__, __LINE__);
    unsigned grid = cuda_grid(c, most_tiles, 1);
    return st == OK ? launch(c, what, kernel, grid, GEMM_THREADS, GEMM_SHARED, maps, op) : st;
}

/* Which 16 bytes of its row, of ROW bytes, chunk `chunk` of a token takes: as the copy engine's maps swizzle it. */
template <int ROW> static __device__ __forceinline__ int gemm_place(int token, int chunk)
{
    return ROW == TILE_ROW ? chunk ^ (token & 7) : chunk ^ (token >> 1 & 3);
}

/* The way out of whole boxes: a tile's rows of ROW bytes, swizzled, wait in the warpgroup's room while the copy engine
 * brings them out and the next tile begins; the last ones go first, where there are more than the room holds.
 * `put(from, end)` writes those from `from` on to its beginning, as many as it holds or up to `end`. Rows behind the
 * last eight go by hand. */
template <class OP, class PUT>
static __device__ __forceinline__ void gemm_boxes_out(const gemm_tile &tile, int side, uint32_t room,
                                                      const gemm_maps &maps, bf16 *y, int64_t ldy, int column,
                                                      const PUT &put)
{
    enum { ROW = OP::ROW, ROOM = OP::ROOM, CHUNKS = ROW / 16, PASSES = (OP::TOKENS + ROOM - 1) / ROOM };
    const int me = (int)threadIdx.x % 128, warp = me / WARP, lane = me % WARP;
#pragma unroll
    for (int pass = PASSES - 1; pass >= 0; pass--) {
        const int from = pass * ROOM, left = tile.rows - from, rows = left < ROOM ? left : (int)ROOM;
        if (rows <= 0)
            continue;
        brought_wait_read();
        meet(2 + side, 128); /* the room may be written again */
        put(from, from + ROOM < OP::TOKENS ? from + ROOM : (int)OP::TOKENS);
        fence_written();
        meet(2 + side, 128);
        int large = rows / 64, boxes = large + rows % 64 / 8, box = 4 * lane + warp;
        if (box < boxes) {
            int row = box < large ? 64 * box : 56 * large + 8 * box;
            bring_box2(box < large ? &maps.out64 : &maps.out8, room + (uint32_t)(row * ROW), column,
                       tile.first + from + row);
        }
        brought_commit();
        int token = (rows & ~7) + me / CHUNKS, chunk = me % CHUNKS;
        if (token < rows) {
            int place = gemm_place<ROW>(token, chunk);
            global_store16(y + (tile.first + from + token) * ldy + column + chunk * 8,
                           shared_load16(room + (uint32_t)(token * ROW + (place << 4))));
        }
    }
}

/* Tokens from 8 j on up to 8 end, at most 64, swizzled rows of 128 bytes from `to` on. `with` gives the factors of
 * tokens r, r + 1. All are made before the first is stored: a load of factors would wait for the store before it. */
template <int COUNT, class WITH>
static __device__ __forceinline__ void gemm_put_rows(const float (&acc)[COUNT], int j, int end, uint32_t to,
                                                     const WITH &with)
{
    const int warp = (int)threadIdx.x % 128 / WARP, lane = (int)threadIdx.x % WARP;
    const int token = 8 * (lane / 16) + lane % 8, chunk = 2 * warp + lane / 8 % 2;
    uint32_t v[4][4]; /* blocks: eight tokens of outs 0-7 and 8-15 of this warp, then the next eight tokens */
#pragma unroll
    for (int h = 0; h < 8; h++)
        if (j + h < end) {
            int b = 4 * (j + h), r = 8 * (j + h) + 2 * (lane % 4);
            float f0, f1;
            with(r, f0, f1);
            v[h / 2][h % 2 * 2] = pair(acc[b] * f0, acc[b + 1] * f1);
            v[h / 2][h % 2 * 2 + 1] = pair(acc[b + 2] * f0, acc[b + 3] * f1);
        }
#pragma unroll
    for (int h = 0; h < 4; h++)
        if (j + 2 * h < end)
            store_across(to + (uint32_t)((16 * h + token) * TILE_ROW + (gemm_place<TILE_ROW>(token, chunk) << 4)),
                         v[h][0], v[h][1], v[h][2], v[h][3]);
}

/* The way out of a box of any size, rows of ROW bytes, by tile.rows tokens, to y(first + token) + column, by hand: 64
 * tokens at a time, each half of some room in turn. put(j, to) writes those from 8 j on. */
template <int ROW, class PUT>
static __device__ __forceinline__ void gemm_by_hand(const gemm_tile &tile, int side, uint32_t room, bf16 *y,
                                                    int64_t ldy, int column, const PUT &put)
{
    enum { CHUNKS = ROW / 16, SHIFT = CHUNKS == 8 ? 3 : 2, AT_ONCE = 128 / CHUNKS };
    const int me = (int)threadIdx.x % 128, chunk = me & (CHUNKS - 1);
#pragma unroll
    for (int j = 0; j < GEMM_TOKENS / 8; j += 8) {
        if (8 * j >= tile.rows)
            break;
        uint32_t half = room + (uint32_t)((j / 8 & 1) * 64 * ROW);
        put(j, half);
        meet(2 + side, 128);
#pragma unroll
        for (int i = 0; i < 64 / AT_ONCE; i++) {
            int token = (me >> SHIFT) + AT_ONCE * i;
            int place = gemm_place<ROW>(token, chunk);
            if (8 * j + token < tile.rows && chunk * (8 * TILE_ROW / ROW) < tile.outs)
                global_store16(y + (tile.first + 8 * j + token) * ldy + column + chunk * 8,
                               shared_load16(half + (uint32_t)(token * ROW + (place << 4))));
        }
    }
    meet(2 + side, 128); /* the room may be written again */
}

template <int COUNT, class WITH>
static __device__ __forceinline__ void gemm_rows_by_hand(const float (&acc)[COUNT], const gemm_tile &tile, int side,
                                                         uint32_t room, bf16 *y, int64_t ldy, int column,
                                                         const WITH &with)
{
    gemm_by_hand<TILE_ROW>(tile, side, room, y, ldy, column,
                           [&](int j, uint32_t to) { gemm_put_rows(acc, j, j + 8, to, with); });
}

/* The way out of a box's outs by tile.rows tokens as they are, to y(first + token) + column. A narrow box's: by
 * hand. */
template <class OP, class WITH>
static __device__ __forceinline__ void gemm_rows_out(const float (&acc)[OP::TOKENS / 2], const gemm_tile &tile,
                                                     int side, uint32_t room, const gemm_maps &maps, bf16 *y,
                                                     int64_t ldy, int column, const WITH &with)
{
    if (tile.outs == 64) {
        gemm_boxes_out<OP>(tile, side, room, maps, y, ldy, column, [&](int from, int end) {
#pragma unroll
            for (int j = from / 8; j < end / 8; j += 8) {
                if (8 * j >= tile.rows)
                    break;
                gemm_put_rows(acc, j, end / 8, room + (uint32_t)((8 * j - from) * TILE_ROW), with);
            }
        });
        return;
    }
    gemm_rows_by_hand(acc, tile, side, room, y, ldy, column, with);
}

static __device__ __forceinline__ float silu(float x)
{
    return __fdividef(x, 1.0f + __expf(-x));
}

/* TOKENS, 16 or 32, from 8 j on, swizzled rows of 32 features from `to` on. */
template <int TOKENS = 32, int COUNT>
static __device__ __forceinline__ void gemm_put_gated(const float (&acc)[COUNT], int j, uint32_t to)
{
    const int warp = (int)threadIdx.x % 128 / WARP, lane = (int)threadIdx.x % WARP;
    uint32_t v[TOKENS / 8];
#pragma unroll
    for (int h = 0; h < TOKENS / 8; h++) {
        int b = 4 * (j + h);
        v[h] = pair(silu(acc[b]) * acc[b + 2], silu(acc[b + 1]) * acc[b + 3]);
    }
    int token = lane % TOKENS;
    uint32_t at = to + (uint32_t)(token * 64 + (gemm_place<64>(token, warp) << 4));
    if constexpr (TOKENS == 32)
        store_across(at, v[0], v[1], v[2], v[3]);
    else
        store_across(at, v[0], v[1]);
}

/* As gemm_gated_out, of a box of any size, by hand. */
template <int COUNT>
static __device__ __forceinline__ void gemm_gated_by_hand(const float (&acc)[COUNT], const gemm_tile &tile, int side,
                                                          uint32_t room, bf16 *y, int64_t ldy, int column)
{
    gemm_by_hand<64>(tile, side, room, y, ldy, column, [&](int j, uint32_t to) {
        gemm_put_gated(acc, j, to);
        gemm_put_gated(acc, j + 4, to + 32 * 64);
    });
}

/* The way out of a box that holds eight rows of gate, the eight of up that belong to them, and so on, so that a
 * thread's accumulator has both: silu(gate) * up of tile.rows tokens, half as many features as the box has rows. */
template <class OP>
static __device__ __forceinline__ void gemm_gated_out(const float (&acc)[OP::TOKENS / 2], const gemm_tile &tile,
                                                      int side, uint32_t room, const gemm_maps &maps, bf16 *y,
                                                      int64_t ldy, int column)
{
    if (tile.outs == 64) {
        gemm_boxes_out<OP>(tile, side, room, maps, y, ldy, column, [&](int from, int end) {
#pragma unroll
            for (int j = from / 8; j < end / 8; j += 4) {
                if (8 * j >= tile.rows)
                    break;
                uint32_t to = room + (uint32_t)((8 * j - from) * OP::ROW);
                if (8 * j + 32 <= end)
                    gemm_put_gated(acc, j, to);
                else
                    gemm_put_gated<16>(acc, j, to);
            }
        });
        return;
    }
    gemm_gated_by_hand(acc, tile, side, room, y, ldy, column);
}

#endif
