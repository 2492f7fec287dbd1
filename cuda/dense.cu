/* y[n,o] = x[n,i] w[o,i]^T, BF16 activations; and silu(gate) * up of the two halves of such a product.
 *
 * Three kernels, chosen by type and shape of the weight alone, so that a row's bits never depend on how many there are:
 *   BF16 weight of whole 64 x 64 boxes on a Hopper GPU   the persistent product of gemm.cuh
 *   F32 weight (the router) on a Hopper GPU              tensor cores on an exact split of the weight: router.cu
 *   anything else                                        a tile of shared memory and fp32 sums, below */
#include "cuda/gemm.cuh"

/* ---- whole boxes */

/* Weight rows of a narrow box: as many boxes as there are multiprocessors, or fewer. 64: narrow ones are no use. */
static int narrow_rows(const cuda *c, int64_t outs, int step)
{
    for (int rows = step; rows < 64; rows += step)
        if (outs % rows == 0 && outs / rows <= c->sm_count)
            return rows;
    return 64;
}

/* A product of rows that lie together by one matrix. */
struct dense_op {
    enum { GATHERS = 0, FACTORS = 0 };
    tensor in, y, w;
    int narrow, sm_count;

    /* The weight is fetched into the cache while the kernel before this one ends, each block its share. */
    __device__ void before() const
    {
        for (int64_t row = blockIdx.x + (int64_t)gridDim.x * (threadIdx.x % WARP); row < w.rows;
             row += (int64_t)gridDim.x * WARP)
            prefetch_bytes(row_of<bf16>(w, row), (uint32_t)w.cols * 2);
    }

    /* Tokens of a tile and weight rows of a block, so that the device is full and no weight is read more often than
     * needed. What a step of the inner dimension costs a block, in cycles: its products, or its bytes at some 40 a
     * cycle; a tile costs some steps more to begin and to bring out. Each lane of a warp judges one number of tokens.
     */
    __device__ gemm_shape shape() const
    {
        int n = (int)used_rows(in), lane = (int)threadIdx.x % WARP, best = 0;
        gemm_shape s = {.steps = (int)w.cols / TILE_K, .rows = n};
        if (n == 0)
            return s;
        float least = 0;
        for (int kind = 0; kind <= 2; kind++) { /* narrow, one box, two */
            int each = 8 * (lane + 1), ranges = (n + each - 1) / each, across = across_of(kind);
            int waves = (ranges * across + sm_count - 1) / sm_count, width = gemm_width(each);
            float bytes = (float)((kind > 0 ? 64 * kind : narrow) + width) * (TILE_ROW / 40.0f);
            float products = fmaxf(110, 2.0f * (float)((kind > 1 ? 2 : 1) * width));
            float cost = (float)waves * ((float)s.steps * fmaxf(bytes, products) + 1000 + 5.0f * (float)each);
            if (kind == 0 || cost < least) {
                least = cost;
                best = kind;
            }
        }
        int from = lane;
        for (int half = WARP / 2; half > 0; half /= 2) {
            float cost = __shfl_xor_sync(EVERY_LANE, least, half);
            int other = __shfl_xor_sync(EVERY_LANE, from, half), kind = __shfl_xor_sync(EVERY_LANE, best, half);
            if (cost < least || (cost == least && other > from)) {
                least = cost;
                from = other;
                best = kind;
            }
        }
        s.blocks = best > 1 ? 2 : 1;
        s.outs = best > 0 ? 64 : narrow;
        s.each = 8 * (from + 1);
        s.tokens = gemm_width(s.each);
        s.across = across_of(best);
        s.tiles = s.across * ((n + s.each - 1) / s.each);
        return s;
    }

    __device__ int across_of(int kind) const
    {
        int rows = kind > 0 ? 64 * kind : narrow;
        return ((int)w.rows + rows - 1) / rows;
    }

    __device__ gemm_tile tile_by(const gemm_shape &s, int t, int groups) const
    {
        int box = t % s.across * s.blocks, first = t / s.across * s.each, left = s.rows - first;
        int boxes = (int)w.rows / s.outs - box;
        return {.expert = 0,
                .group = box * groups,
                .blocks = boxes < s.blocks ? boxes : s.blocks,
                .outs = s.outs,
                .first = first,
                .rows = left < s.each ? left : s.each};
    }

    __device__ float factor(const gemm_tile &, int) const
    {
        return 1;
    }
};

struct matmul_op : dense_op {
    enum { GROUPS = 8, ROW = 128 };

    __device__ gemm_tile tile(const gemm_shape &s, int t) const
    {
        return tile_by(s, t, s.outs / 8);
    }

    __device__ void finish(const float (&acc)[GEMM_TOKENS / 2], const gemm_tile &tile, int side, uint32_t room,
                           const float *, const gemm_maps &maps) const
    {
        int out = tile.group * 8 + side * 64;
        if (y.type == BF16) {
            gemm_rows_out(acc, tile, side, room, maps, (bf16 *)y.data, y.ld, out,
                          [](int, float &a, float &b) { a = b = 1; });
            return;
        }
        int warp = (int)threadIdx.x % 128 / WARP, lane = (int)threadIdx.x % WARP, row = 16 * warp + lane / 4;
        float *to = (float *)y.data + out + row;
#pragma unroll
        for (int i = 0; i < GEMM_TOKENS / 2; i++) {
            int r = i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (r < tile.rows && row + i % 4 / 2 * 8 < tile.outs)
                to[(tile.first + r) * y.ld + i % 4 / 2 * 8] = acc[i];
        }
    }
};

/* silu(gate) * up of a matrix whose first half is gate, its second up. */
struct gated_op : dense_op {
    enum { GROUPS = 4, ROW = 64 };

    __device__ gemm_tile tile(const gemm_shape &s, int t) const
    {
        return tile_by(s, t, s.outs / 16);
    }

    __device__ void finish(const float (&acc)[GEMM_TOKENS / 2], const gemm_tile &tile, int side, uint32_t room,
                           const float *, const gemm_maps &maps) const
    {
        gemm_gated_out(acc, tile, side, room, maps, (bf16 *)y.data, y.ld, tile.group * 8 + side * 32);
    }
};

template <class OP>
static status dense(cuda *c, const tensor *y, const tensor *x, const tensor *w, int halves, const char *what)
{
    status st = OK;
    gemm_maps maps = {};
    OP op;
    if (x->rows == 0)
        return OK;
    op.in = *x;
    op.y = *y;
    op.w = *w;
    op.narrow = narrow_rows(c, w->rows, 8 * halves);
    op.sm_count = c->sm_count;
    st = cuda_map_weights(&maps.weights, w, 1, halves, 64);
    if (st == OK)
        st = cuda_map_weights(&maps.narrow, w, 1, halves, op.narrow);
    if (st == OK)
        st = cuda_map_rows(&maps.rows16, x, 16);
    if (st == OK)
        st = cuda_map_rows(&maps.rows64, x, 64);
    if (st == OK && y->type == BF16)
        st = halves == 1 ? cuda_map_rows(&maps.out8, y, 8) : cuda_map_half_rows(&maps.out8, y, 8);
    if (st == OK && y->type == BF16)
        st = halves == 1 ? cuda_map_rows(&maps.out64, y, 64) : cuda_map_half_rows(&maps.out64, y, 64);
    if (st != OK)
        return st;
    int64_t tiles = w->rows / op.narrow * ((x->rows + 7) / 8);
    return gemm_launch(c, maps, op, tiles, what);
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

/* Can gemm.cuh multiply these? */
static bool whole_boxes(const cuda *c, const tensor *y, const tensor *x, const tensor *w)
{
    return w->type == BF16 && w->rows % 64 == 0 && w->cols % TILE_K == 0 && aligned(w) && aligned(x) && aligned(y) &&
           cuda_is_hopper(c);
}

extern "C" status cuda_matmul(backend *b, tensor *y, const tensor *x, const tensor *w)
{
    cuda *c = cuda_of(b);
    assert(x->type == BF16 && (w->type == BF16 || w->type == F32) && (y->type == BF16 || y->type == F32));
    assert(x->cols == w->cols && y->cols == w->rows && y->rows >= x->rows);
    if (whole_boxes(c, y, x, w))
        return dense<matmul_op>(c, y, x, w, 1, "product");
    if (w->type == F32 && y->type == F32 && aligned(w) && aligned(x) && cuda_is_hopper(c))
        return cuda_router(c, y, x, w);
    unsigned grid = cuda_grid(c, (w->rows + PLAIN - 1) / PLAIN * ((x->rows + PLAIN - 1) / PLAIN), 8);
    if (w->type == BF16)
        plain_kernel<bf16><<<grid, dim3(PLAIN, PLAIN), 0, c->stream>>>(*y, *x, *w);
    else
        plain_kernel<float><<<grid, dim3(PLAIN, PLAIN), 0, c->stream>>>(*y, *x, *w);
    return CUDA_LAUNCHED("product");
}

extern "C" status cuda_gated(backend *b, tensor *y, tensor *both, const tensor *x, const tensor *w)
{
    status st = OK;
    cuda *c = cuda_of(b);
    assert(x->type == BF16 && w->type == BF16 && y->type == BF16 && w->rows % 2 == 0);
    assert(x->cols == w->cols && y->cols == w->rows / 2 && y->rows >= x->rows);
    if (whole_boxes(c, y, x, w))
        return dense<gated_op>(c, y, x, w, 2, "gated product");
    assert(both->type == BF16 && both->cols == w->rows && both->rows >= x->rows);
    st = cuda_matmul(b, both, x, w);
    if (st != OK)
        return st;
    tensor products = *both;
    products.rows = x->rows;
    products.used = x->used;
    return cuda_swiglu(c, y, &products);
}
