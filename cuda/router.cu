/* The router on Hopper GPUs: y[n, E] = x[n, H] w[E, H]^T, BF16 activations and fp32 weights, on tensor cores.
 *
 * w = a + b + c, each BF16: 8 bits of its 24 a piece, so that the split is exact (down to 2^-110 or so), as every
 * product with a BF16 is in fp32. What is lost is lost in the sums of fp32.
 *
 * The weights are the M side: a warpgroup splits its 64 experts in registers on their way from shared memory, and
 * multiplies the three pieces by a tile of tokens. The inner dimension is cut into CHUNKS parts, by its length alone;
 * within a chunk one accumulator runs from its start, 16 by 16, the smallest piece first, and the chunks' sums are
 * added in order. Two kernels do that alike, so that a row's bits never depend on how many rows there are:
 *   few    a block a chunk of 64 experts by up to 128 tokens; the blocks of a cluster add their chunks up
 *   many   by the rows in use, so that most multiprocessors have one tile:
 *          a pair of blocks half of the chunks each of 64 experts by 64 tokens,
 *          or a block all chunks of them; in both its two warpgroups take chunks in turn;
 *          or a block goes through all chunks of 128 experts by 64 or 128 tokens, a warpgroup 64 of the experts
 * The worst case decides which of them is launched. */
#include "cuda/device.cuh"
#include "cuda/hopper.cuh"
#include "cuda/maps.h"

enum {
    CHUNKS = 8,
    EXPERTS = 64,             /* of a warpgroup */
    TOKENS = 128,             /* most of a tile */
    BOX = EXPERTS * TILE_ROW, /* bytes of 64 experts by 32 fp32 */
    FEW_ROWS = 1088,          /* up to so many possible rows are few: they are some half of it */
    FEW_THREADS = 128 + WARP, /* a warpgroup multiplies, a warp feeds */
    MANY_THREADS = 3 * 128,   /* the third warpgroup feeds */
    STAGES = 4,               /* most */
    FEW_RING = 96 * 1024,     /* two blocks an SM */
    SUMS = TOKENS / 2 * EXPERTS * 4, /* bytes of the sums of 64 tokens by 64 experts */
    PART_STAGE = 2 * BOX + TOKENS / 2 * TILE_ROW,
    PART_RING = STAGES * PART_STAGE, /* a warpgroup's own */
    MANY_RING = STAGES * (4 * BOX + TOKENS * TILE_ROW),
    MANY_SHARED = 2 * SUMS + 2 * PART_RING > MANY_RING ? 2 * SUMS + 2 * PART_RING : MANY_RING,
    SUMS_ROW = EXPERTS + 4 /* floats of a token in the room where the cluster adds up */
};

typedef struct router {
    tensor y, x;
    int experts, steps; /* steps of TILE_K of the inner dimension */
    int tokens;         /* of a tile */
} router;

static __device__ __forceinline__ int chunk_steps(const router &r)
{
    return (r.steps + CHUNKS - 1) / CHUNKS;
}

/* ---- the ring: a stage is TILE_K of the inner dimension, boxes of weights (side by side: 32 and 32 of a side's 64
 * experts, then the next side's) and a box of tokens */

typedef struct ring {
    uint32_t at, full, empty; /* barriers, 8 bytes a stage */
    int stages, stage_bytes, token_at;
} ring;

/* One thread sets it up. */
static __device__ void ring_open(const ring &g, uint32_t readers)
{
    for (int i = 0; i < g.stages; i++) {
        barrier_init(g.full + 8 * (uint32_t)i, 1);
        barrier_init(g.empty + 8 * (uint32_t)i, readers);
    }
    barrier_init_done();
}

/* Warps fill stages in turn: this is one of `ways`. */
typedef struct feeder {
    ring_place p;
    int turn, ways; /* steps to its next one */
} feeder;

/* Fills stages of steps [from, to): the experts of SIDES warpgroups, BOXES boxes of tokens; where there are two they
 * have TOKENS / 2 each. One thread asks, all lanes go the same way, so that what the copy engine is told lies in
 * uniform registers. */
template <int SIDES, int BOXES>
static __device__ void feed(const ring &g, feeder &f, const CUtensorMap *weights, const CUtensorMap *tokens, int expert,
                            int token, int from, int to)
{
#pragma unroll 1
    for (int k = from; k < to; k++) {
        if (f.turn-- == 0) {
            f.turn = f.ways - 1;
            uint32_t at = g.at + (uint32_t)(f.p.stage * g.stage_bytes), full = g.full + 8 * (uint32_t)f.p.stage;
            barrier_wait(g.empty + 8 * (uint32_t)f.p.stage, f.p.parity);
            if (threadIdx.x % WARP == 0) {
                barrier_expect(full, (uint32_t)g.stage_bytes);
#pragma unroll
                for (int b = 0; b < 2 * SIDES; b++) /* 32 fp32 are 64 elements of BF16 to the copy engine */
                    copy_box2(at + (uint32_t)(b * BOX), weights, full, (2 * k + b % 2) * TILE_K,
                              expert + b / 2 * EXPERTS);
#pragma unroll
                for (int b = 0; b < BOXES; b++)
                    copy_box2(at + (uint32_t)(g.token_at + b * (TOKENS / 2 * TILE_ROW)), tokens, full, k * TILE_K,
                              token + b * (TOKENS / 2));
            }
        }
        ring_next(f.p, g.stages);
    }
}

/* ---- products */

/* Two neighbours, split into three pairs: each piece is the upper half of what the one before it left. */
static __device__ __forceinline__ void split(float2 v, uint32_t &high, uint32_t &middle, uint32_t &low)
{
    uint32_t a = __float_as_uint(v.x), b = __float_as_uint(v.y);
    high = __byte_perm(a, b, 0x7632);
    float x = v.x - __uint_as_float(a & 0xffff0000u), y = v.y - __uint_as_float(b & 0xffff0000u);
    a = __float_as_uint(x), b = __float_as_uint(y);
    middle = __byte_perm(a, b, 0x7632);
    x -= __uint_as_float(a & 0xffff0000u), y -= __uint_as_float(b & 0xffff0000u);
    low = __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
}

/* Which of eight neighbouring experts the rows lane / 4 of a tile are: in this order the rows that a half warp reads
 * together lie in different banks. */
static __device__ __forceinline__ int expert_of_row(int lane)
{
    int g = lane / 4;
    return 2 * (g % 4) + g / 4;
}

/* This thread's part of 64 experts by 16 of the inner dimension. w: its first row in the box, at its place in the first
 * 8 fp32; chunk: of 16 bytes, where the 16 begin. */
static __device__ __forceinline__ void take(float2 (&v)[4], uint32_t w, uint32_t chunk)
{
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        v[i] = shared_load8((w ^ (chunk + i / 2 * 2) << 4) + i % 2 * ATOM);
}

/* The pieces of it, low to high. */
static __device__ __forceinline__ void split_all(uint32_t (&piece)[3][4], const float2 (&v)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        split(v[i], piece[2][i], piece[1][i], piece[0][i]);
}

/* The registers of a piece are in use until here. */
static __device__ __forceinline__ void keep(const uint32_t (&piece)[3][4])
{
#pragma unroll
    for (int i = 0; i < 3; i++)
        asm volatile("" ::"r"(piece[i][0]), "r"(piece[i][1]), "r"(piece[i][2]), "r"(piece[i][3]) : "memory");
}

static __device__ __forceinline__ void release(const ring &g, int stage)
{
    if (threadIdx.x % WARP == 0)
        barrier_arrive(g.empty + 8 * (uint32_t)stage);
}

/* acc[64 experts, N tokens] = the products of `steps` stages, steps > 0. */
template <int N, int COUNT>
static __device__ __forceinline__ void multiply(float (&acc)[COUNT], const ring &g, ring_place &p, int steps, int side)
{
    int lane = (int)threadIdx.x % WARP, row = (int)threadIdx.x % 128 / WARP * 16 + expert_of_row(lane), before = 0;
    uint32_t mine = (uint32_t)(2 * side * BOX + row * TILE_ROW + (((lane % 4 / 2) ^ (row & 7)) << 4) + lane % 2 * 8);
    uint32_t piece[2][3][4];
    for (int k = 0; k < steps; k++) {
        uint32_t at = g.at + (uint32_t)(p.stage * g.stage_bytes);
        uint64_t x = operand(at + (uint32_t)g.token_at);
        barrier_wait(g.full + 8 * (uint32_t)p.stage, p.parity);
        float2 v[4];
        take(v, at + mine, 0);
#pragma unroll
        for (int i = 0; i < TILE_K / 16; i++) {
            split_all(piece[i % 2], v);
            if (i + 1 < TILE_K / 16) /* under way before the products */
                take(v, at + mine + (uint32_t)((i + 1) / 2 * BOX), (uint32_t)((i + 1) % 2 * 4));
            products_begin();
            product_held<N>::run(acc, piece[i % 2][0], x + 2 * i, i > 0 ? 1 : k);
            product_held<N>::run(acc, piece[i % 2][1], x + 2 * i, 1);
            product_held<N>::run(acc, piece[i % 2][2], x + 2 * i, 1);
            products_commit();
            products_wait<1>(); /* the pieces of the products before these may be written again */
            keep(piece[(i + 1) % 2]);
            if (i == 0 && k > 0)
                release(g, before);
        }
        before = p.stage;
        ring_next(p, g.stages);
    }
    products_wait<0>();
    hold(acc);
    keep(piece[1]);
    release(g, before);
}

/* ---- few */

/* This chunk's sums into the room, [token, expert]. */
template <int N> static __device__ __forceinline__ void few_chunk(float *room, const ring &g, int steps)
{
    float acc[N / 2] = {};
    ring_place p = {0, 0};
    multiply<N>(acc, g, p, steps, 0);
    meet(1, 128); /* the room lies where the ring was */
    int lane = (int)threadIdx.x % WARP, row = (int)threadIdx.x / WARP * 16 + expert_of_row(lane);
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        room[(i / 4 * 8 + lane % 4 * 2 + i % 2) * SUMS_ROW + row + i % 4 / 2 * 8] = acc[i];
}

static __global__ void __launch_bounds__(FEW_THREADS, 2)
    few_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens, router r)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t room[];
    __shared__ uint64_t barrier[2 * STAGES];
    int rank = (int)blockIdx.x % CHUNKS, tile = (int)blockIdx.x / CHUNKS, across = (r.experts + EXPERTS - 1) / EXPERTS;
    int out = tile % across * EXPERTS, first = tile / across * r.tokens, per = chunk_steps(r), from = rank * per;
    int to = from + per < r.steps ? from + per : r.steps, chunks = (r.steps + per - 1) / per;
    ring g = {.at = shared_at(room), .full = shared_at(barrier), .token_at = 2 * BOX};
    g.empty = g.full + 8 * STAGES;
    g.stage_bytes = g.token_at + r.tokens * TILE_ROW;
    g.stages = FEW_RING / g.stage_bytes < STAGES ? FEW_RING / g.stage_bytes : STAGES;
    if (threadIdx.x == 128) {
        ring_open(g, 4);
        if (first == 0)
            for (int k = from; k < to; k++)
                for (int h = 0; h < 2; h++)
                    prefetch_box2(&weights, (2 * k + h) * TILE_K, out);
    }
    __syncthreads();
    after_previous();
    let_next();
    int n = (int)used_rows(r.x);
    if (first >= n)
        return;
    int rows = n - first < r.tokens ? n - first : r.tokens;
    if (threadIdx.x >= 128) {
        feeder f = {{0, 1}, 0, 1};
        feed<1, 1>(g, f, &weights, &tokens, out, first, from, to);
    } else if (from < to) {
        float *sums = (float *)room;
        if (rows <= 16)
            few_chunk<16>(sums, g, to - from);
        else if (rows <= 32)
            few_chunk<32>(sums, g, to - from);
        else if (rows <= 64)
            few_chunk<64>(sums, g, to - from);
        else
            few_chunk<128>(sums, g, to - from);
    }
    __syncwarp();
    cluster_meet();
    int part = (rows + CHUNKS - 1) / CHUNKS; /* tokens that this block adds up */
    for (int i = (int)threadIdx.x; i < part * (EXPERTS / 4); i += FEW_THREADS) {
        int token = rank * part + i / (EXPERTS / 4), e = i % (EXPERTS / 4) * 4;
        if (token >= rows)
            break;
        uint32_t at = g.at + (uint32_t)(token * SUMS_ROW + e) * 4;
        float4 v[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) /* all under way before the first is added */
            v[c] = cluster_load4(at, c < chunks ? c : 0);
        float4 sum = v[0];
#pragma unroll
        for (int c = 1; c < CHUNKS; c++)
            if (c < chunks)
                sum.x += v[c].x, sum.y += v[c].y, sum.z += v[c].z, sum.w += v[c].w;
        float *to_row = row_of<float>(r.y, first + token) + out + e, all[4] = {sum.x, sum.y, sum.z, sum.w};
        if (out + e + 4 <= r.experts && (uintptr_t)to_row % 16 == 0)
            *(float4 *)to_row = sum;
        else
            for (int j = 0; j < 4 && out + e + j < r.experts; j++)
                to_row[j] = all[j];
    }
    cluster_meet(); /* no block leaves while others read its sums */
#else
    (void)weights, (void)tokens, (void)r;
    __trap(); /* the launcher's caller asks cuda_is_hopper */
#endif
}

/* ---- many */

static __device__ __forceinline__ int chunk_length(const router &r, int chunk)
{
    int per = chunk_steps(r), left = r.steps - chunk * per;
    return left < per ? left > 0 ? left : 0 : per;
}

/* Four of a thread's sums, of 64 experts from `expert` on by the eight tokens from `token` on. */
static __device__ __forceinline__ void write_sums(const router &r, int n, int expert, int token, float4 sum)
{
    const float all[4] = {sum.x, sum.y, sum.z, sum.w};
    const int lane = (int)threadIdx.x % WARP;
    expert += (int)threadIdx.x % 128 / WARP * 16 + expert_of_row(lane);
    token += lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (token + i % 2 < n && expert + i / 2 * 8 < r.experts)
            row_of<float>(r.y, token + i % 2)[expert + i / 2 * 8] = all[i];
}

/* 64 experts by 64 tokens by this warpgroup and its neighbour. Of the chunks that are this block's each takes every
 * second one, from a ring of its own. The first block's sums go from one to the other and grow; the second block, which
 * cannot know those before its own, keeps each chunk's until the first has done its part: then they add up, each for
 * half of the tokens. */
static __device__ void middle(const router &r, const ring &g, uint8_t *room, int side, int rank, int parts, int expert,
                              int token, int n)
{
    enum { QUADS = TOKENS / 2 / 8, COUNT = 128 }; /* four numbers of a thread, threads */
    const int count = CHUNKS / parts, me = (int)threadIdx.x % 128;
    float4 *sums = (float4 *)room + me, *behind = (float4 *)(room + 2 * SUMS + side * PART_RING) + me;
    float acc[TOKENS / 4];
    ring_place p = {0, 0};
    for (int i = side; i < count; i += 2) {
        const int length = chunk_length(r, rank * count + i);
        if (length > 0)
            multiply<TOKENS / 2>(acc, g, p, length, 0);
        if (rank > 0) {
            if (i > 1)
                meet(3 + side, 128); /* the ring has been read to its end */
            float4 *to = i > 1 ? behind : sums + i * (SUMS / 16);
#pragma unroll
            for (int q = 0; q < QUADS; q++)
                to[q * COUNT] = make_float4(acc[4 * q], acc[4 * q + 1], acc[4 * q + 2], acc[4 * q + 3]);
            continue;
        }
        if (i > 0)
            meet(1 + side, 256); /* the other has put its sums there */
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            float4 v = make_float4(acc[4 * q], acc[4 * q + 1], acc[4 * q + 2], acc[4 * q + 3]);
            if (i > 0) {
                float4 sum = sums[q * COUNT];
                if (length > 0)
                    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
                v = sum;
            }
            if (i + 1 < CHUNKS)
                sums[q * COUNT] = v;
            else
                write_sums(r, n, expert, token + 8 * q, v);
        }
        if (i + 1 < count)
            asm volatile("bar.arrive %0, 256;" ::"r"(2 - side) : "memory");
    }
    if (parts == 1)
        return;
    cluster_meet(); /* those that feed have nothing left to do and leave */
    const uint32_t first = shared_at(room) + (uint32_t)me * 16;
    for (int i = side; i < QUADS / 2; i += 2) {
        const int q = rank * (QUADS / 2) + i;
        const uint32_t at = first + (uint32_t)(q * COUNT * 16);
        const float4 v[4] = {cluster_load4(at, 1), cluster_load4(at + SUMS, 1), cluster_load4(at + 2 * SUMS, 1),
                             cluster_load4(at + 2 * SUMS + PART_RING, 1)};
        float4 sum = cluster_load4(at, 0);
#pragma unroll
        for (int c = 0; c < CHUNKS / 2; c++)
            if (chunk_length(r, CHUNKS / 2 + c) > 0)
                sum.x += v[c].x, sum.y += v[c].y, sum.z += v[c].z, sum.w += v[c].w;
        write_sums(r, n, expert, token + 8 * q, sum);
    }
    cluster_meet(); /* no block leaves while the other reads its sums */
}

/* N tokens by the 64 experts of this warpgroup, tile by tile. */
template <int N>
static __device__ __forceinline__ void many_tiles(const router &r, const ring &g, int side, int tiles, int across,
                                                  int n)
{
    ring_place p = {0, 0};
    for (int t = (int)blockIdx.x; t < tiles; t += (int)gridDim.x) {
        float sum[N / 2];
        for (int c = 0; c < CHUNKS && chunk_length(r, c) > 0; c++) {
            float acc[N / 2];
            multiply<N>(acc, g, p, chunk_length(r, c), side);
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                sum[i] = c == 0 ? acc[i] : sum[i] + acc[i];
        }
#pragma unroll
        for (int q = 0; q < N / 8; q++)
            write_sums(r, n, (t % across * 2 + side) * EXPERTS, t / across * N + 8 * q,
                       make_float4(sum[4 * q], sum[4 * q + 1], sum[4 * q + 2], sum[4 * q + 3]));
    }
}

static __global__ void __launch_bounds__(MANY_THREADS, 1)
    many_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap tokens, router r)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t room[];
    __shared__ uint64_t barrier[6 * STAGES];
    const int side = __shfl_sync(EVERY_LANE, (int)threadIdx.x / 128, 0);
    const int feeds = __shfl_sync(EVERY_LANE, (int)threadIdx.x % 128 / WARP, 0); /* a warp of the third warpgroup */
    ring g = {.at = shared_at(room), .full = shared_at(barrier), .stages = STAGES, .token_at = 4 * BOX}, part = g;
    g.empty = g.full + 8 * STAGES;
    part.stage_bytes = PART_STAGE;
    part.token_at = 2 * BOX;
    const int of = side < 2 ? side : feeds / 2; /* whose part */
    part.at += (uint32_t)(2 * SUMS + of * PART_RING);
    part.full += (uint32_t)(8 * STAGES * (2 + 2 * of));
    part.empty = part.full + 8 * STAGES;
    if (threadIdx.x == 0)
        ring_open(g, 8);
    if (threadIdx.x % 128 == WARP && side < 2)
        ring_open(part, 4);
    __syncthreads();
    after_previous();
    let_next();
    const int n = (int)used_rows(r.x), across = (r.experts + EXPERTS - 1) / EXPERTS, half = TOKENS / 2;
    const int small = across * ((n + half - 1) / half), blocks = (int)gridDim.x;
    if (small <= blocks) {
        const int parts = 2 * small <= blocks ? 2 : 1, tile = (int)blockIdx.x / parts;
        const int rank = (int)blockIdx.x % parts, expert = tile % across * EXPERTS, token = tile / across * half;
        if (tile >= small)
            return;
        if (side < 2) {
            middle(r, part, room, side, rank, parts, expert, token, n);
        } else {
            feeder f = {{0, 1}, feeds % 2, 2};
            for (int c = rank * (CHUNKS / parts) + of; c < (rank + 1) * (CHUNKS / parts); c += 2)
                feed<1, 1>(part, f, &weights, &tokens, expert, token, c * chunk_steps(r),
                           c * chunk_steps(r) + chunk_length(r, c));
        }
        return;
    }
    const int wide = (r.experts + 2 * EXPERTS - 1) / (2 * EXPERTS);
    const int boxes = wide * ((n + half - 1) / half) <= blocks ? 1 : 2;
    const int tiles = wide * ((n + half * boxes - 1) / (half * boxes));
    g.stage_bytes = g.token_at + boxes * half * TILE_ROW;
    if (side == 2) {
        registers_fewer<40>();
        feeder f = {{0, 1}, feeds, 4};
        for (int t = (int)blockIdx.x; t < tiles; t += blocks)
            if (boxes == 1)
                feed<2, 1>(g, f, &weights, &tokens, t % wide * 2 * EXPERTS, t / wide * half, 0, r.steps);
            else
                feed<2, 2>(g, f, &weights, &tokens, t % wide * 2 * EXPERTS, t / wide * TOKENS, 0, r.steps);
        return;
    }
    registers_more<232>();
    if (boxes == 1)
        many_tiles<TOKENS / 2>(r, g, side, tiles, wide, n);
    else
        many_tiles<TOKENS>(r, g, side, tiles, wide, n);
#else
    (void)weights, (void)tokens, (void)r;
    __trap();
#endif
}

/* ---- the launcher */

static status launch_few(cuda *c, const CUtensorMap &weights, const CUtensorMap &tokens, const router &r, int64_t most)
{
    int64_t across = (r.experts + EXPERTS - 1) / EXPERTS, ranges = (most + r.tokens - 1) / r.tokens;
    cudaError_t e = cudaFuncSetAttribute(few_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_RING);
    if (e != cudaSuccess)
        return cuda_check(e, "router product", __FILE__, __LINE__);
    return launch_clusters(c, "router product", few_kernel, (unsigned)(across * ranges * CHUNKS), FEW_THREADS, FEW_RING,
                           CHUNKS, weights, tokens, r);
}

/* Pairs of blocks, a tile or more each. */
static status launch_many(cuda *c, const CUtensorMap &weights, const CUtensorMap &tokens, const router &r)
{
    int64_t half = TOKENS / 2, tiles = (r.experts + EXPERTS - 1) / EXPERTS * ((r.x.rows + half - 1) / half);
    cudaError_t e = cudaFuncSetAttribute(many_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MANY_SHARED);
    if (e != cudaSuccess)
        return cuda_check(e, "router product", __FILE__, __LINE__);
    return launch_clusters(c, "router product", many_kernel, (cuda_grid(c, 2 * tiles, 1) + 1) / 2 * 2, MANY_THREADS,
                           MANY_SHARED, 2, weights, tokens, r);
}

extern "C" status cuda_router(cuda *c, tensor *y, const tensor *x, const tensor *w)
{
    CUtensorMap weights, tokens;
    tensor as_bf16 = *w;
    as_bf16.type = BF16;
    as_bf16.cols *= 2;
    as_bf16.ld *= 2;
    if (x->rows == 0)
        return OK;
    router r = {*y, *x, (int)w->rows, (int)((w->cols + TILE_K - 1) / TILE_K)};
    const bool few = x->rows <= FEW_ROWS;
    /* Fewer tokens a tile where the blocks of the likely rows (half of the possible) find a multiprocessor each: slower
     * where one router follows another, faster in an iteration. */
    const int64_t half = TOKENS / 2, likely = (x->rows / 64 * 32 + half - 1) / half;
    const bool spread = likely * ((w->rows + EXPERTS - 1) / EXPERTS) * CHUNKS <= cuda_room(c);
    r.tokens = !few || spread ? TOKENS / 2 : TOKENS;
    status st = cuda_map_rows(&weights, &as_bf16, EXPERTS);
    if (st == OK)
        st = cuda_map_rows(&tokens, x, r.tokens);
    if (st == OK)
        st = few ? launch_few(c, weights, tokens, r, x->rows) : launch_many(c, weights, tokens, r);
    c->settled = st == OK; /* both let the next one begin behind after_previous() */
    return st;
}
