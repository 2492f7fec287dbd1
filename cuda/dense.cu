/* y[n,o] = x[n,i] w[o,i]^T, BF16 activations.
 *
 * Three kernels, chosen by type and shape of the weight alone, so that a row's bits never depend on how many there are:
 *   BF16 weight of whole 64 x 64 boxes on a Hopper GPU   the persistent product of gemm.cuh
 *   F32 weight (the router) of whole 16 x 32 pieces      tensor cores on an exact split of the weight, below
 *   anything else                                        a tile of shared memory and fp32 sums, below */
#include "cuda/gemm.cuh"

/* ---- whole boxes */

struct dense_op {
    enum { GROUPS = 8, FACTORS = 0 };
    const bf16 *x;
    tensor in, y;
    int outs, inner, sm_count;

    /* Tokens of a tile and boxes of a block, so that the device is full and no weight is read more often than needed.
     * What a step of the inner dimension costs a block, in cycles: its products, or its bytes at some 40 a cycle; a
     * tile costs some steps more to begin and to bring out. Each lane of a warp judges one number of tokens. */
    __device__ gemm_shape shape() const
    {
        int n = (int)used_rows(in), lane = (int)threadIdx.x % WARP, best = 0;
        gemm_shape s = {.steps = inner / TILE_K};
        if (n == 0)
            return s;
        float least = 0;
        for (int blocks = 1; blocks <= 2; blocks++) {
            int each = 8 * (lane + 1), ranges = (n + each - 1) / each, across = (outs / 64 + blocks - 1) / blocks;
            int waves = (ranges * across + sm_count - 1) / sm_count;
            float bytes = (float)(blocks * GEMM_BOX + each * TILE_ROW) / 40, products = 4.0f * (float)gemm_width(each);
            float cost =
                (float)waves * ((float)s.steps * (bytes > products ? bytes : products) + 1000 + 5.0f * (float)each);
            if (blocks == 1 || cost < least) {
                least = cost;
                best = blocks;
            }
        }
        int from = lane;
        for (int half = WARP / 2; half > 0; half /= 2) {
            float cost = __shfl_xor_sync(EVERY_LANE, least, half);
            int other = __shfl_xor_sync(EVERY_LANE, from, half), blocks = __shfl_xor_sync(EVERY_LANE, best, half);
            if (cost < least || (cost == least && other > from)) {
                least = cost;
                from = other;
                best = blocks;
            }
        }
        s.blocks = best;
        s.each = 8 * (from + 1);
        s.tokens = gemm_width(s.each);
        s.across = (outs / 64 + s.blocks - 1) / s.blocks;
        s.tiles = s.across * ((n + s.each - 1) / s.each);
        return s;
    }

    __device__ gemm_tile tile(const gemm_shape &s, int t) const
    {
        int box = t % s.across * s.blocks, first = t / s.across * s.each, left = (int)used_rows(in) - first;
        int rows = left < s.each ? left : s.each;
        return {.expert = 0,
                .group = box * 8,
                .blocks = outs / 64 - box < s.blocks ? outs / 64 - box : s.blocks,
                .first = first,
                .rows = rows};
    }

    __device__ uint32_t source(const gemm_tile &tile, int r) const
    {
        return (uint32_t)((tile.first + r) * (in.ld / 8));
    }

    __device__ float factor(const gemm_tile &, int) const
    {
        return 1;
    }

    __device__ void finish(const float (&acc)[GEMM_TOKENS / 2], const gemm_tile &tile, int side, uint32_t room,
                           const float *) const
    {
        int out = tile.group * 8 + side * 64;
        if (y.type == BF16) {
            gemm_rows_out(acc, tile, side, room, (bf16 *)y.data + out, y.ld,
                          [](int, float &a, float &b) { a = b = 1; });
            return;
        }
        int warp = (int)threadIdx.x % 128 / WARP, lane = (int)threadIdx.x % WARP;
        float *to = (float *)y.data + out + 16 * warp + lane / 4;
#pragma unroll
        for (int i = 0; i < GEMM_TOKENS / 2; i++) {
            int r = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (r < tile.rows)
                to[(tile.first + r) * y.ld + i % 4 / 2 * 8] = acc[i];
        }
    }
};

/* ---- the router: fp32 weights
 * w = a + b + c, each BF16: 8 bits of its 24 a piece, so that the split is exact (down to 2^-110 or so), as every
 * product with a BF16 is in fp32. What is lost is lost in the sums of fp32.
 *
 * A block of eight warps takes MT x 16 experts by NT x 8 tokens; warp i the pieces of 32 of the inner dimension whose
 * number is i modulo 8, and the eight sums are added in order. Lane q of a group of four takes eight neighbours of the
 * 32, for both operands alike: a product does not care which of its terms comes where. */

enum { ROUTER_WARPS = 8, ROUTER_THREADS = ROUTER_WARPS * WARP };

static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two neighbours, split into three pairs. */
static __device__ __forceinline__ void split(float x, float y, uint32_t &high, uint32_t &middle, uint32_t &low)
{
    __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    float x1 = x - __low2float(h), y1 = y - __high2float(h);
    __nv_bfloat162 m = __floats2bfloat162_rn(x1, y1);
    high = *(uint32_t *)&h;
    middle = *(uint32_t *)&m;
    low = pair(x1 - __low2float(m), y1 - __high2float(m));
}

template <int MT, int NT>
static __device__ __forceinline__ void router_tile(tensor &y, const tensor &x, const tensor &w, int64_t n, int64_t out,
                                                   int64_t first, float *room)
{
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, row = lane / 4, quad = lane % 4;
    float sums[MT][NT][4] = {};
    for (int64_t k = warp * 32 + quad * 8; k < x.cols; k += ROUTER_WARPS * 32) {
        uint4 b[NT];
#pragma unroll
        for (int j = 0; j < NT; j++) {
            int64_t token = first + 8 * j + row;
            b[j] = token < n ? *(const uint4 *)(row_of<bf16>(x, token) + k) : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int i = 0; i < MT; i++) {
            const float4 *w0 = (const float4 *)(row_of<float>(w, out + 16 * i + row) + k);
            const float4 *w1 = (const float4 *)(row_of<float>(w, out + 16 * i + row + 8) + k);
#pragma unroll
            for (int h = 0; h < 2; h++) { /* four of the eight neighbours: one product of 16 */
                uint32_t high[4], middle[4], low[4];
                float4 u = w0[h], v = w1[h];
                split(u.x, u.y, high[0], middle[0], low[0]);
                split(v.x, v.y, high[1], middle[1], low[1]);
                split(u.z, u.w, high[2], middle[2], low[2]);
                split(v.z, v.w, high[3], middle[3], low[3]);
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    uint32_t b0 = h ? b[j].z : b[j].x, b1 = h ? b[j].w : b[j].y;
                    mma(sums[i][j], low, b0, b1);
                    mma(sums[i][j], middle, b0, b1);
                    mma(sums[i][j], high, b0, b1);
                }
            }
        }
    }
    enum { EXPERTS = 16 * MT, TOKENS = 8 * NT, STEP = EXPERTS + 1 };
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                room[(warp * TOKENS + 8 * j + 2 * quad + e % 2) * STEP + 16 * i + row + e / 2 * 8] = sums[i][j][e];
    __syncthreads();
    for (int at = (int)threadIdx.x; at < EXPERTS * TOKENS; at += ROUTER_THREADS) {
        int token = at / EXPERTS, e = at % EXPERTS;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < ROUTER_WARPS; i++)
            sum += room[(i * TOKENS + token) * STEP + e];
        if (first + token < n)
            row_of<float>(y, first + token)[out + e] = sum;
    }
    __syncthreads();
}

template <int MT, int NT>
static __device__ __forceinline__ void router_tiles(tensor &y, const tensor &x, const tensor &w, int64_t n, float *room)
{
    int64_t across = w.rows / (16 * MT), tiles = across * ((n + 8 * NT - 1) / (8 * NT));
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x)
        router_tile<MT, NT>(y, x, w, n, t % across * 16 * MT, t / across * 8 * NT, room);
}

enum { ROUTER_WIDE = 4 * 16, ROUTER_TOKENS = 8 * 8 }; /* a large tile's experts and tokens */

/* Small tiles fill the device while there are few tokens; every element is summed alike in both. */
static __global__ void __launch_bounds__(ROUTER_THREADS) router_kernel(tensor y, tensor x, tensor w)
{
    extern __shared__ float router_room[];
    int64_t n = used_rows(x);
    if (w.rows % ROUTER_WIDE != 0 || w.rows / 16 * ((n + 15) / 16) <= 4 * (int64_t)gridDim.x)
        router_tiles<1, 2>(y, x, w, n, router_room);
    else
        router_tiles<4, 8>(y, x, w, n, router_room);
}

static status router(cuda *c, tensor *y, const tensor *x, const tensor *w)
{
    int room = ROUTER_WARPS * ROUTER_TOKENS * (ROUTER_WIDE + 1) * (int)sizeof(float);
    cudaError_t e = cudaFuncSetAttribute(router_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
    if (e != cudaSuccess)
        return cuda_check(e, "router product", __FILE__, __LINE__);
    router_kernel<<<cuda_grid(c, w->rows / 16 * ((x->rows + 15) / 16), 1), ROUTER_THREADS, (size_t)room, c->stream>>>(
        *y, *x, *w);
    return CUDA_LAUNCHED("router product");
}

/* ---- any shape */

enum { PLAIN = 16 }; /* a block of PLAIN x PLAIN threads: as many rows by as many outs */

template <typename W> static __global__ void plain_kernel(tensor y, tensor x, tensor w)
{
    __shared__ float xs[PLAIN][2 * PLAIN + 1], ws[PLAIN][2 * PLAIN + 1];
    int64_t n = used_rows(x), across = (w.rows + PLAIN - 1) / PLAIN, tiles = across * ((n + PLAIN - 1) / PLAIN);
    int a = (int)threadIdx.y, b = (int)threadIdx.x;
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
        int64_t row = t / across * PLAIN + a, out = t % across * PLAIN;
        float sum = 0;
        for (int64_t k = 0; k < x.cols; k += 2 * PLAIN) {
            for (int64_t i = b; i < 2 * PLAIN; i += PLAIN) {
                xs[a][i] = row < n && k + i < x.cols ? widen(row_of<bf16>(x, row)[k + i]) : 0;
                ws[a][i] = out + a < w.rows && k + i < x.cols ? widen(row_of<W>(w, out + a)[k + i]) : 0;
            }
            __syncthreads();
            for (int i = 0; i < 2 * PLAIN; i++)
                sum = fmaf(xs[a][i], ws[b][i], sum);
            __syncthreads();
        }
        if (row < n && out + b < w.rows) {
            if (y.type == F32)
                row_of<float>(y, row)[out + b] = sum;
            else
                narrow(&row_of<bf16>(y, row)[out + b], sum);
        }
    }
}

static bool aligned(const tensor *t)
{
    return (uintptr_t)t->data % 16 == 0 && (uint64_t)t->ld * dtype_bytes(t->type) % 16 == 0;
}

extern "C" status cuda_matmul(backend *b, tensor *y, const tensor *x, const tensor *w)
{
    cuda *c = cuda_of(b);
    assert(x->type == BF16 && (w->type == BF16 || w->type == F32) && (y->type == BF16 || y->type == F32));
    assert(x->cols == w->cols && y->cols == w->rows && y->rows >= x->rows);
    if (w->type == BF16 && w->rows % 64 == 0 && w->cols % TILE_K == 0 && aligned(w) && aligned(x) && aligned(y) &&
        cuda_is_hopper(c)) {
        CUtensorMap map;
        status st = cuda_map_weights(&map, w, 1, 1);
        dense_op op = {(const bf16 *)x->data, *x, *y, (int)w->rows, (int)w->cols, c->sm_count};
        return st == OK ? gemm_launch(c, map, op, w->rows / 64 * ((x->rows + 7) / 8), "product") : st;
    }
    if (w->type == F32 && y->type == F32 && w->rows % 16 == 0 && w->cols % 32 == 0 && aligned(w) && aligned(x))
        return router(c, y, x, w);
    unsigned grid = cuda_grid(c, (w->rows + PLAIN - 1) / PLAIN * ((x->rows + PLAIN - 1) / PLAIN), 8);
    if (w->type == BF16)
        plain_kernel<bf16><<<grid, dim3(PLAIN, PLAIN), 0, c->stream>>>(*y, *x, *w);
    else
        plain_kernel<float><<<grid, dim3(PLAIN, PLAIN), 0, c->stream>>>(*y, *x, *w);
    return CUDA_LAUNCHED("product");
}
