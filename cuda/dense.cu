/* y[n,o] = x[n,i] w[o,i]^T, BF16 activations.
 *
 * Three kernels, chosen by type and shape of the weight alone, so that a row's bits never depend on how many there are:
 *   BF16 weight of whole 64 x 64 boxes on a Hopper GPU   the persistent product of gemm.cuh
 *   F32 weight (the router) on a Hopper GPU              tensor cores on an exact split of the weight: router.cu
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
    if (w->type == F32 && y->type == F32 && aligned(w) && aligned(x) && cuda_is_hopper(c))
        return cuda_router(c, y, x, w);
    unsigned grid = cuda_grid(c, (w->rows + PLAIN - 1) / PLAIN * ((x->rows + PLAIN - 1) / PLAIN), 8);
    if (w->type == BF16)
        plain_kernel<bf16><<<grid, dim3(PLAIN, PLAIN), 0, c->stream>>>(*y, *x, *w);
    else
        plain_kernel<float><<<grid, dim3(PLAIN, PLAIN), 0, c->stream>>>(*y, *x, *w);
    return CUDA_LAUNCHED("product");
}
