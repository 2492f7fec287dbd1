/* The LM head of live rows: argmax, its probability and the runner-up of h w^T, without the logits ever leaving the
 * chip.
 *
 * A tile is 256 ids of the vocabulary by up to 128 rows. Of each row it leaves the best and the second logit (the mask
 * id aside), the best one's id, and the sum of e^(logit - best); the mask id's logit is kept by itself. A second kernel
 * joins a row's tiles in their order. A logit is one accumulator over the inner dimension from its start, whatever the
 * rows.
 *
 * On a Hopper GPU the rows are the M side of the tensor cores' product, so that a thread holds 64 logits of a row. One
 * thread asks the copy engine for both operands, two warpgroups multiply 64 rows each. Otherwise, or where the width is
 * no multiple of 64: sums of fp32 in a plain kernel. */
#include "cuda/device.cuh"
#include "cuda/hopper.cuh"
#include "cuda/maps.h"

enum {
    IDS = 256,           /* of a tile */
    BOX = 64 * TILE_ROW, /* bytes of 64 rows by 64 of the inner dimension */
    STAGES = 5,          /* most stages */
    RING = 4 * (IDS / 64 + 2) * BOX,
    AT_BARRIERS = RING > 5 * (IDS / 64 + 1) * BOX ? RING : 5 * (IDS / 64 + 1) * BOX,
    SHARED = AT_BARRIERS + 2 * STAGES * 8,
    THREADS = 384,
    BAND = 16 /* row tiles that take turns at a tile of ids, so that both stay in the cache */
};

typedef struct head_op {
    const int32_t *used;
    int rows, vocab, width, mask_id;
    int tiles;     /* of ids */
    float4 *found; /* [rows, tiles]: best, second, sum, id (as bits) */
    float *masked; /* [rows]: the mask id's logit */
} head_op;

static __device__ __forceinline__ int head_rows(const head_op &op)
{
    int n = op.used ? *op.used : op.rows;
    return n < op.rows ? n : op.rows;
}

/* How the threads of a row hold its logits of a tile: LANES neighbouring lanes, COUNT each; value i in z[place(i)], of
 * the id first + id(i), `first` ascending with the lane inside every step. */
template <int HALF> struct of_accumulator { /* rows 0 and 8 of product<IDS> */
    enum { COUNT = IDS / 4, LANES = 4 };
    static __device__ constexpr int place(int i)
    {
        return i / 2 * 4 + i % 2 + 2 * HALF;
    }
    static __device__ constexpr int id(int i)
    {
        return i / 2 * 8 + i % 2;
    }
};

template <int STEP> struct of_steps {
    enum { COUNT = IDS / STEP, LANES = STEP };
    static __device__ constexpr int place(int i)
    {
        return i;
    }
    static __device__ constexpr int id(int i)
    {
        return i * STEP;
    }
};

/* All lanes of a warp call. */
template <class HOW, int SIZE>
static __device__ __forceinline__ void head_reduce(const head_op &op, float (&z)[SIZE], int row, int first, int tile,
                                                   int n)
{
    if (op.mask_id / IDS == tile || (tile + 1) * IDS > op.vocab) {
#pragma unroll
        for (int i = 0; i < HOW::COUNT; i++) {
            int id = first + HOW::id(i);
            if (id == op.mask_id && row < n)
                op.masked[row] = z[HOW::place(i)];
            if (id == op.mask_id || id >= op.vocab)
                z[HOW::place(i)] = -INFINITY;
        }
    }
    float best = -INFINITY, second = -INFINITY, sum = 0;
    int id = INT32_MAX;
#pragma unroll
    for (int i = 0; i < HOW::COUNT; i++) {
        second = fmaxf(second, fminf(best, z[HOW::place(i)]));
        best = fmaxf(best, z[HOW::place(i)]);
    }
#pragma unroll
    for (int half = 1; half < HOW::LANES; half *= 2) {
        float other = __shfl_xor_sync(EVERY_LANE, best, half), next = __shfl_xor_sync(EVERY_LANE, second, half);
        second = fmaxf(fminf(best, other), fmaxf(second, next));
        best = fmaxf(best, other);
    }
    const float shift = best == -INFINITY ? 0 : best;
#pragma unroll
    for (int i = HOW::COUNT - 1; i >= 0; i--) {
        if (z[HOW::place(i)] == best)
            id = HOW::id(i);
        sum += power2((z[HOW::place(i)] - shift) * 1.44269504f);
    }
    id = id == INT32_MAX ? id : id + first;
#pragma unroll
    for (int half = 1; half < HOW::LANES; half *= 2) {
        id = min(id, __shfl_xor_sync(EVERY_LANE, id, half));
        sum += __shfl_xor_sync(EVERY_LANE, sum, half);
    }
    if ((int)threadIdx.x % HOW::LANES == 0 && row < n)
        op.found[(int64_t)row * op.tiles + tile] = make_float4(best, second, sum, __int_as_float(id));
}

/* ---- tensor cores */

/* Tile t: of ids, and of rows. */
static __device__ __forceinline__ void head_tile(int t, int tiles, int row_tiles, int &ids, int &rows)
{
    int band = t / (tiles * BAND), left = row_tiles - band * BAND, high = left < BAND ? left : BAND;
    t -= band * tiles * BAND;
    ids = t / high;
    rows = band * BAND + t % high;
}

static __global__ void __launch_bounds__(THREADS, 1)
    head_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap inputs,
                const __grid_constant__ head_op op)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t room[];
    after_previous();
    let_next();
    const int n = head_rows(op), row_tiles = (n + 127) / 128, all = op.tiles * row_tiles, boxes = n <= 64 ? 1 : 2;
    const int stages = boxes == 1 ? 5 : 4, steps = op.width / TILE_K;
    const uint32_t ring = shared_at(room), full = shared_at(room + AT_BARRIERS), empty = full + STAGES * 8;
    const uint32_t stage_bytes = (uint32_t)(IDS / 64 + boxes) * BOX;
    if (threadIdx.x == 0) {
        prefetch_map(&weights);
        prefetch_map(&inputs);
        for (uint32_t i = 0; i < STAGES; i++) {
            barrier_init(full + 8 * i, 1);
            barrier_init(empty + 8 * i, 8); /* the warps that multiply */
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_fewer<40>();
        if (threadIdx.x == 0) {
            uint32_t stage = 0, parity = 1;
            for (int t = (int)blockIdx.x; t < all; t += (int)gridDim.x) {
                int ids, rows;
                head_tile(t, op.tiles, row_tiles, ids, rows);
                for (int k = 0; k < steps; k++) {
                    uint32_t to = ring + stage * stage_bytes, done = full + 8 * stage;
                    barrier_wait(empty + 8 * stage, parity);
                    barrier_expect(done, stage_bytes);
                    for (int i = 0; i < IDS / 64; i++)
                        copy_box2(to + (uint32_t)i * BOX, &weights, done, k * TILE_K, ids * IDS + i * 64);
                    for (int i = 0; i < boxes; i++)
                        copy_box2(to + (uint32_t)(IDS / 64 + i) * BOX, &inputs, done, k * TILE_K, rows * 128 + i * 64);
                    if (++stage == (uint32_t)stages) {
                        stage = 0;
                        parity ^= 1;
                    }
                }
            }
        }
    } else {
        registers_more<232>();
        const int side = (int)threadIdx.x / 128 - 1, lane = (int)threadIdx.x % WARP;
        uint32_t stage = 0, parity = 0;
        for (int t = (int)blockIdx.x; t < all; t += (int)gridDim.x) {
            int ids, rows;
            head_tile(t, op.tiles, row_tiles, ids, rows);
            float acc[IDS / 2];
            uint32_t before = 0;
            for (int k = 0; k < steps; k++) {
                uint32_t at = ring + stage * stage_bytes;
                barrier_wait(full + 8 * stage, parity);
                if (side < boxes) {
                    uint64_t w = operand(at), x = operand(at + (uint32_t)(IDS / 64 + side) * BOX);
                    products_begin();
#pragma unroll
                    for (int i = 0; i < TILE_K / 16; i++)
                        product<IDS>::run(acc, x + 2 * i, w + 2 * i, i > 0 ? 1 : k);
                    products_commit();
                    products_wait<1>();
                }
                if (k > 0 && lane == 0)
                    barrier_arrive(empty + 8 * before);
                before = stage;
                if (++stage == (uint32_t)stages) {
                    stage = 0;
                    parity ^= 1;
                }
            }
            products_wait<0>();
            hold(acc);
            if (lane == 0)
                barrier_arrive(empty + 8 * before);
            if (side >= boxes)
                continue;
            int row = rows * 128 + side * 64 + (int)threadIdx.x % 128 / WARP * 16 + lane / 4,
                first = ids * IDS + lane % 4 * 2;
            head_reduce<of_accumulator<0>>(op, acc, row, first, ids, n);
            head_reduce<of_accumulator<1>>(op, acc, row + 8, first, ids, n);
        }
    }
#else
    (void)weights, (void)inputs, (void)op;
    __trap(); /* the launcher asks cuda_is_hopper */
#endif
}

/* ---- any shape: a block takes PLAIN rows by a tile of ids, a thread every PLAIN-th id of its row */

enum { PLAIN = 16 };

static __global__ void __launch_bounds__(PLAIN *PLAIN) plain_kernel(tensor h, tensor w, head_op op)
{
    __shared__ float xs[PLAIN][2 * PLAIN + 1], ws[PLAIN][2 * PLAIN + 1];
    int a = (int)threadIdx.y, b = (int)threadIdx.x, n = head_rows(op), all = op.tiles * ((n + PLAIN - 1) / PLAIN);
    for (int t = (int)blockIdx.x; t < all; t += (int)gridDim.x) {
        int tile = t % op.tiles, row = t / op.tiles * PLAIN + a;
        float z[IDS / PLAIN];
#pragma unroll
        for (int j = 0; j < IDS / PLAIN; j++) {
            int first = tile * IDS + j * PLAIN;
            float sum = 0;
            for (int64_t k = 0; k < op.width; k += 2 * PLAIN) {
                for (int i = b; i < 2 * PLAIN; i += PLAIN) {
                    xs[a][i] = row < n && k + i < op.width ? widen(row_of<bf16>(h, row)[k + i]) : 0;
                    ws[a][i] = first + a < op.vocab && k + i < op.width ? widen(row_of<bf16>(w, first + a)[k + i]) : 0;
                }
                __syncthreads();
                for (int i = 0; i < 2 * PLAIN; i++)
                    sum = fmaf(xs[a][i], ws[b][i], sum);
                __syncthreads();
            }
            z[j] = sum;
        }
        head_reduce<of_steps<PLAIN>>(op, z, row, tile * IDS + b, tile, n);
    }
}

/* ---- a row's tiles together; a warp takes a row */

enum { JOIN_THREADS = 128 };

static __global__ void __launch_bounds__(JOIN_THREADS) join_kernel(tensor best, head_op op)
{
    after_previous();
    let_next();
    int lane = (int)threadIdx.x % WARP, n = head_rows(op), warps = (int)gridDim.x * (JOIN_THREADS / WARP);
    for (int row = (int)(blockIdx.x * (JOIN_THREADS / WARP) + threadIdx.x / WARP); row < n; row += warps) {
        const float4 *found = op.found + (int64_t)row * op.tiles;
        float top = -INFINITY, second = -INFINITY;
        int id = INT32_MAX;
        for (int t = lane; t < op.tiles; t += WARP) { /* ids ascend: an equal one that comes later is higher */
            float4 f = found[t];
            second = fmaxf(fminf(top, f.x), fmaxf(second, f.y));
            id = f.x > top ? __float_as_int(f.w) : id;
            top = fmaxf(top, f.x);
        }
        for (int half = WARP / 2; half > 0; half /= 2) {
            float other = __shfl_xor_sync(EVERY_LANE, top, half), next = __shfl_xor_sync(EVERY_LANE, second, half);
            int its = __shfl_xor_sync(EVERY_LANE, id, half);
            second = fmaxf(fminf(top, other), fmaxf(second, next));
            id = other > top || (other == top && its < id) ? its : id;
            top = fmaxf(top, other);
        }
        bool masks = op.mask_id >= 0 && op.mask_id < op.vocab;
        float mask = masks ? op.masked[row] : -INFINITY, peak = fmaxf(top, mask), sum = 0;
        for (int t = lane; t < op.tiles; t += WARP) {
            float4 f = found[t];
            if (f.z != 0) /* nothing but the mask id there */
                sum += f.z * expf(f.x - peak);
        }
        sum = warp_sum(sum);
        sum += masks ? expf(mask - peak) : 0;
        if (lane == 0)
            *(head_best *)row_of<uint8_t>(best, row) = {.id = id == INT32_MAX ? op.mask_id == 0
                                                                              : id, /* nothing compares with NaN */
                                                        .probability = expf(top - peak) / sum,
                                                        .top = top,
                                                        .second = second};
    }
}

extern "C" status cuda_head(backend *b, tensor *best, const tensor *h, const tensor *w, int32_t mask_id)
{
    status st = OK;
    cuda *c = cuda_of(b);
    assert(h->type == BF16 && w->type == BF16 && h->cols == w->cols && best->rows >= h->rows);
    assert(best->ld == (int64_t)sizeof(head_best));
    if (h->rows == 0)
        return OK;
    head_op op = {.used = h->used,
                  .rows = (int)h->rows,
                  .vocab = (int)w->rows,
                  .width = (int)h->cols,
                  .mask_id = mask_id,
                  .tiles = (int)((w->rows + IDS - 1) / IDS)};
    void *room;
    size_t found = (size_t)op.rows * (size_t)op.tiles * sizeof(float4);
    st = cuda_scratch(c, &room, found + (size_t)op.rows * sizeof(float));
    if (st != OK)
        return st;
    op.found = (float4 *)room;
    op.masked = (float *)((char *)room + found);
    bool aligned = (uintptr_t)h->data % 16 == 0 && (uintptr_t)w->data % 16 == 0 && h->ld % 8 == 0 && w->ld % 8 == 0;
    if (op.width % TILE_K == 0 && aligned && cuda_is_hopper(c)) {
        CUtensorMap weights, inputs;
        st = cuda_map_rows(&weights, w, 64);
        if (st == OK)
            st = cuda_map_rows(&inputs, h, 64);
        if (st != OK)
            return st;
        st = cuda_check(cudaFuncSetAttribute(head_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED), "head",
                        __FILE__, __LINE__);
        unsigned grid = cuda_grid(c, (int64_t)op.tiles * ((op.rows + 127) / 128), 1);
        if (st == OK)
            st = launch(c, "head", head_kernel, grid, THREADS, SHARED, weights, inputs, op);
    } else {
        unsigned grid = cuda_grid(c, (int64_t)op.tiles * ((op.rows + PLAIN - 1) / PLAIN), 8);
        plain_kernel<<<grid, dim3(PLAIN, PLAIN), 0, c->stream>>>(*h, *w, op);
        st = CUDA_LAUNCHED("head");
    }
    unsigned grid = cuda_grid(c, (op.rows + JOIN_THREADS / WARP - 1) / (JOIN_THREADS / WARP), 8);
    return st == OK ? launch(c, "head", join_kernel, grid, JOIN_THREADS, 0, *best, op) : st;
}
