/* y[n,o] = x[n,i] w[o,i]^T, BF16 activations; and silu(gate) * up of the two halves of such a product.
 *
 * Three kernels, chosen by type and shape of the weight alone, so that a row's bits never depend on how many there are:
 *   BF16 weight of whole 64 x 64 boxes on a Hopper GPU   the persistent product of gemm.cuh, or a small form, below
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

static __device__ __forceinline__ uint32_t lowest(uint32_t x)
{
#if __CUDA_ARCH__ >= 800
    return __reduce_min_sync(EVERY_LANE, x);
#else
    return x; /* the launchers ask cuda_is_hopper */
#endif
}

/* A product of rows that lie together by one matrix. */
struct dense_op {
    enum { GATHERS = 0, FACTORS = 0, SETTLED = 0, TOKENS = GEMM_TOKENS, ROOM = TOKENS };
    tensor in, y, w;
    int narrow, sm_count;
    int across[3]; /* tiles of one token range: of narrow boxes, of one box, of two */

    /* The weight is fetched into the cache while the kernel before this one ends, each block its share. */
    __device__ void before() const
    {
        for (int64_t row = blockIdx.x + (int64_t)gridDim.x * (threadIdx.x % WARP); row < w.rows;
             row += (int64_t)gridDim.x * WARP)
            prefetch_bytes(row_of<bf16>(w, row), (uint32_t)w.cols * 2);
    }

    /* Tokens of a tile and weight rows of a block, so that the device is full and no weight is read more often than
     * needed. What a step of the inner dimension costs a block, in cycles: its products, or its bytes at some 40 a
     * cycle; a tile costs some steps more to begin and to bring out. Each lane of a warp judges one number of tokens;
     * what does not depend on the rows is known before they are. */
    __device__ gemm_shape shape() const
    {
        const int lane = (int)threadIdx.x % WARP, each = 8 * (lane + 1), width = gemm_width(each);
        const float part = 1.0f / (float)each, per_device = 1.0f / (float)sm_count;
        float tile_cost[3];
        gemm_shape s = {.steps = (int)w.cols / TILE_K};
#pragma unroll
        for (int kind = 0; kind <= 2; kind++) { /* narrow, one box, two */
            float bytes = (float)((kind > 0 ? 64 * kind : narrow) + width) * (TILE_ROW / 40.0f);
            float products = fmaxf(110, 2.0f * (float)((kind > 1 ? 2 : 1) * width));
            tile_cost[kind] = (float)s.steps * fmaxf(bytes, products) + 1000 + 5.0f * (float)each;
        }
        const int n = (int)used_rows(in);
        int ranges = (int)((float)n * part) - 1; /* of `each` rows; less than two too few */
#pragma unroll
        for (int i = 0; i < 3; i++)
            ranges += ranges * each < n;
        uint32_t least = UINT32_MAX; /* the cost, as bits that ascend with it; then most tokens first, then the kind */
#pragma unroll
        for (int kind = 0; kind <= 2; kind++) {
            float waves = ceilf((float)(ranges * across[kind]) * per_device - 1e-3f);
            uint32_t cost = __float_as_uint(waves * tile_cost[kind]) & ~127u;
            least = min(least, cost | (uint32_t)(WARP - 1 - lane) << 2 | (uint32_t)kind);
        }
        least = lowest(least);
        const int from = WARP - 1 - (int)(least >> 2 & (WARP - 1)), best = (int)(least & 3);
        s.rows = n;
        s.blocks = best > 1 ? 2 : 1;
        s.outs = best > 0 ? 64 : narrow;
        s.each = 8 * (from + 1);
        s.tokens = gemm_width(s.each);
        s.across = best > 1 ? across[2] : best > 0 ? across[1] : across[0];
        s.tiles = s.across * __shfl_sync(EVERY_LANE, ranges, from);
        return s;
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
            gemm_rows_out<matmul_op>(acc, tile, side, room, maps, (bf16 *)y.data, y.ld, out,
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
        gemm_gated_out<gated_op>(acc, tile, side, room, maps, (bf16 *)y.data, y.ld, tile.group * 8 + side * 32);
    }
};

/* ---- few rows
 *
 * The same products, bit by bit, in blocks so small that those of the next kernel fit beside them and fetch their
 * weights while this one is under way. A block takes one narrow box of the weight by all rows, N at a time: where more
 * are possible than there mostly are (a block to seal, a prompt), the weight comes again for each N. One warp feeds a
 * ring of stages of 128 of the inner dimension, a warpgroup multiplies. */

enum {
    FEW_ROWS = 64,  /* most at a time */
    FEW_HALF = 192, /* up to so many possible rows half of that at a time: one sequence, or two */
    FEW_MOST = 320, /* possible rows */
    FEW_THREADS = 160,
    FEW_STAGES = 16,               /* most stages */
    FEW_OUT = FEW_ROWS * TILE_ROW, /* bytes of the way out, and of what a box reads behind its rows */
    FEW_RING = 100 * 1024,
    FEW_AT_BARRIER = FEW_RING + FEW_OUT,
    FEW_SHARED = FEW_AT_BARRIER + 2 * FEW_STAGES * 8
};

struct few_op {
    tensor in, y;
    int outs, steps; /* weight rows of a box; of 64 of the inner dimension */
};

template <int N, bool GATED>
static __global__ void __launch_bounds__(FEW_THREADS)
    few_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap rows,
               const __grid_constant__ few_op op)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(1024) uint8_t few_room[];
    const int outs = op.outs, steps = op.steps, all = (steps + 1) / 2;
    const int token_at = 2 * outs * TILE_ROW, stage_bytes = token_at + 2 * N * TILE_ROW;
    const int stages = FEW_RING / stage_bytes < FEW_STAGES ? FEW_RING / stage_bytes : (int)FEW_STAGES;
    const uint32_t ring = shared_at(few_room), full = shared_at(few_room + FEW_AT_BARRIER);
    const uint32_t empty = full + FEW_STAGES * 8;
    const int warp = __shfl_sync(EVERY_LANE, (int)threadIdx.x / WARP, 0), lane = (int)threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < FEW_STAGES; i++) {
            barrier_init(full + 8 * i, 2);  /* weights and tokens */
            barrier_init(empty + 8 * i, 4); /* the warps that multiply */
        }
        barrier_init_done();
    }
    __syncthreads();
    let_next();
    const int box = (int)blockIdx.x * (outs / (GATED ? 16 : 8));
    if (warp == 4) { /* lane i asks for a stage's half i */
        ring_place p = {0, 1};
        for (int k = 0; k < all && k < stages; k++) {
            if (lane == 0)
                barrier_expect(full + 8 * (uint32_t)k, (uint32_t)((2 * k + 1 < steps ? 2 : 1) * outs * TILE_ROW));
            if (lane < 2 && 2 * k + lane < steps)
                copy_box5(ring + (uint32_t)(k * stage_bytes + lane * outs * TILE_ROW), &weights, full + 8 * (uint32_t)k,
                          (2 * k + lane) * TILE_K, 0, 0, box, 0);
        }
        after_previous();
        const int n = (int)used_rows(op.in);
        int ahead = stages; /* whose weights are asked for */
        for (int first = 0; first == 0 || first < n; first += N)
#pragma unroll 1
            for (int k = 0; k < all; k++, ahead--) {
                uint32_t to = ring + (uint32_t)(p.stage * stage_bytes), done = full + 8 * (uint32_t)p.stage;
                int halves = 2 * k + 1 < steps ? 2 : 1, column = (2 * k + lane) * TILE_K;
                if (first > 0 || ahead <= 0) {
                    barrier_wait(empty + 8 * (uint32_t)p.stage, p.parity);
                    if (lane == 0)
                        barrier_expect(done, (uint32_t)(halves * outs * TILE_ROW));
                    if (lane < halves)
                        copy_box5(to + (uint32_t)(lane * outs * TILE_ROW), &weights, done, column, 0, 0, box, 0);
                }
                if (lane == 0)
                    barrier_expect(done, (uint32_t)(halves * N * TILE_ROW));
                if (lane < halves)
                    copy_box2(to + (uint32_t)(token_at + lane * N * TILE_ROW), &rows, done, column, first);
                ring_next(p, stages);
            }
        return;
    }
    float acc[GEMM_TOKENS / 2];
    ring_place p = {0, 0};
    const uint32_t out = ring + FEW_RING;
    enum { CHUNKS = GATED ? 4 : 8 };
    const int me = (int)threadIdx.x, wide = outs / (GATED ? 16 : 8); /* chunks of 16 bytes a token */
    after_previous();
    const int n = (int)used_rows(op.in);
    for (int first = 0; first == 0 || first < n; first += N) {
        int before = 0;
#pragma unroll 1
        for (int k = 0; k < all; k++) {
            uint32_t at = ring + (uint32_t)(p.stage * stage_bytes);
            barrier_wait(full + 8 * (uint32_t)p.stage, p.parity);
            products_begin();
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint64_t w = operand(at + (uint32_t)(half * outs * TILE_ROW));
                uint64_t x = operand(at + (uint32_t)(token_at + half * N * TILE_ROW));
                if (half == 0 || 2 * k + 1 < steps)
#pragma unroll
                    for (int i = 0; i < TILE_K / 16; i++)
                        product<N>::run(acc, w + 2 * i, x + 2 * i, half + i > 0 ? 1 : k);
            }
            products_commit();
            if (k > 0) {
                products_wait<1>();
                if (lane == 0)
                    barrier_arrive(empty + 8 * (uint32_t)before);
            }
            before = p.stage;
            ring_next(p, stages);
        }
        products_wait<0>();
        hold(acc);
        if (lane == 0)
            barrier_arrive(empty + 8 * (uint32_t)before);
        if (first > 0)
            meet(1, 128); /* all have read what the rows before left there */
        if (GATED) {
#pragma unroll
            for (int j = 0; j < N / 8; j += 4)
                gemm_put_gated(acc, j, out + (uint32_t)(8 * j * 64));
        } else {
#pragma unroll
            for (int j = 0; j < N / 8; j += 8)
                gemm_put_rows(acc, j, (N + 15) / 16 * 2, out + (uint32_t)(8 * j * TILE_ROW),
                              [](int, float &a, float &b) { a = b = 1; });
        }
        meet(1, 128);
        bf16 *y = (bf16 *)op.y.data + first * op.y.ld + box * 8;
        const int here = n - first < N ? n - first : N;
        for (int i = me; i < here * CHUNKS; i += 128) {
            int token = i / CHUNKS, chunk = i % CHUNKS, place = gemm_place<CHUNKS * 16>(token, chunk);
            if (chunk < wide)
                global_store16(y + token * op.y.ld + chunk * 8,
                               shared_load16(out + (uint32_t)(token * CHUNKS * 16 + (place << 4))));
        }
    }
#else
    (void)weights, (void)rows, (void)op;
    __trap(); /* the launchers ask cuda_is_hopper */
#endif
}

template <bool GATED>
static status few(cuda *c, const tensor *y, const tensor *x, const tensor *w, const CUtensorMap &weights, int outs,
                  const char *what)
{
    CUtensorMap rows;
    void (*kernel)(CUtensorMap, CUtensorMap, few_op);
    const int possible = (int)x->rows;
    const int width = possible <= 8          ? 8
                      : possible <= FEW_ROWS ? (possible + 15) / 16 * 16
                      : possible <= FEW_HALF ? FEW_ROWS / 2
                                             : (int)FEW_ROWS;
    switch (width) {
    case 8:
        kernel = few_kernel<8, GATED>;
        break;
    case 16:
        kernel = few_kernel<16, GATED>;
        break;
    case 32:
        kernel = few_kernel<32, GATED>;
        break;
    case 48:
        kernel = few_kernel<48, GATED>;
        break;
    default:
        kernel = few_kernel<64, GATED>;
    }
    few_op op = {*x, *y, outs, (int)w->cols / TILE_K};
    status st = cuda_map_rows(&rows, x, width);
    if (st == OK)
        st = cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, FEW_SHARED), what,
                        __FILE__, __LINE__);
    return st == OK ? launch(c, what, kernel, (unsigned)(w->rows / outs), FEW_THREADS, FEW_SHARED, weights, rows, op)
                    : st;
}

/* ---- some hundred rows
 *
 * As for few rows, and the rows in ranges: a block takes one of them, or several where more rows are in use than
 * likely, and the weights come again. A ring of stages of 64 of the inner dimension; the weights of the first ones are
 * asked for before the kernel before this one has ended, and no product waits for the number of rows. A block has a
 * multiprocessor for itself, or some would share one while others stand empty; but for those of one warpgroup that run
 * beside, which leave room. */

enum {
    SOME_STAGES = 16,
    SOME_FEEDERS = 4,             /* warps: two for weights, two for tokens, each every second step */
    SOME_OUT = 2 * 64 * TILE_ROW, /* of a warpgroup */
    SOME_BESIDE = 96 * 1024       /* ring beside: two blocks fit a multiprocessor */
};

/* SIDES warpgroups multiply, each its own box. */
template <int SIDES> struct some_room {
    enum {
        TOKENS = SIDES > 1 ? 256 : 64, /* most at a time */
        THREADS = 128 * SIDES + SOME_FEEDERS * WARP,
        RING = (GEMM_SHARED - SIDES * SOME_OUT - 2 * SOME_STAGES * 8) / ATOM * ATOM
    };
};

struct some_op {
    tensor in, y;
    int outs, steps;  /* weight rows of a box; of 64 of the inner dimension */
    int ranges, each; /* of tokens; token rows of each */
    int stages, ring; /* of the ring; its bytes */
};

/* Steps of a feeder: every second one, through all passes over the inner dimension. */
struct some_steps {
    int stage, k, pass;
    uint32_t parity;

    __device__ __forceinline__ void next(int stages, int steps)
    {
        stage += 2;
        if (stage >= stages) {
            stage -= stages;
            parity ^= 1;
        }
        k += 2;
        while (k >= steps) {
            k -= steps;
            pass++;
        }
    }
};

/* A step of few tokens is shorter than the way from one that has ended to the one that may begin then: so two of them
 * are under way while the next are asked for. Stages are more than that. */
template <int N>
static __device__ __forceinline__ void some_multiply(float (&acc)[GEMM_TOKENS / 2], const gemm_ring &ring,
                                                     ring_place &p, ring_place &done, uint32_t box_at, int steps)
{
    enum { LAG = N <= 128 ? 2 : 1 };
#pragma unroll 1
    for (int k = 0; k < steps; k++) {
        uint32_t at = ring.at + (uint32_t)(p.stage * ring.stage_bytes);
        uint64_t w = operand(at + box_at), x = operand(at + (uint32_t)ring.token_at);
        barrier_wait(ring.full + 8 * (uint32_t)p.stage, p.parity);
        products_begin();
#pragma unroll
        for (int i = 0; i < TILE_K / 16; i++)
            product<N>::run(acc, w + 2 * i, x + 2 * i, i > 0 ? 1 : k);
        products_commit();
        ring_next(p, ring.stages);
        if (k >= LAG) {
            products_wait<LAG>();
            gemm_release(ring, done.stage);
            ring_next(done, ring.stages);
        }
    }
    products_wait<0>();
    hold(acc);
#pragma unroll 1
    for (; done.stage != p.stage; ring_next(done, ring.stages))
        gemm_release(ring, done.stage);
}

template <bool GATED, int SIDES>
static __global__ void __launch_bounds__(some_room<SIDES>::THREADS)
    some_kernel(const __grid_constant__ CUtensorMap box, const __grid_constant__ CUtensorMap rows,
                const __grid_constant__ some_op op)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    enum { MOST = some_room<SIDES>::TOKENS };
    extern __shared__ __align__(1024) uint8_t some_space[];
    const int warp = __shfl_sync(EVERY_LANE, (int)threadIdx.x / WARP, 0), lane = (int)threadIdx.x % WARP;
    const int box_groups = op.outs / (GATED ? 16 : 8), group = (int)blockIdx.x * SIDES * box_groups;
    const int steps = op.steps, each = op.each, feeder = warp - 4 * SIDES;
    const uint32_t out = shared_at(some_space) + (uint32_t)op.ring, barriers = out + SIDES * SOME_OUT;
    gemm_ring ring = {.at = shared_at(some_space),
                      .full = barriers,
                      .empty = barriers + SOME_STAGES * 8,
                      .stages = op.stages,
                      .token_at = SIDES * op.outs * TILE_ROW};
    ring.stage_bytes = ring.token_at + (each + 15) / 16 * 16 * TILE_ROW;
    if (threadIdx.x == 0) {
        prefetch_map(&rows);
        for (uint32_t i = 0; i < SOME_STAGES; i++) {
            barrier_init(ring.full + 8 * i, 2);          /* weights and tokens */
            barrier_init(ring.empty + 8 * i, 4 * SIDES); /* the warps that multiply */
        }
        barrier_init_done();
    }
    __syncthreads();
    let_next();
    const int begin = (int)blockIdx.y * each, stride = op.ranges * each;
    /* The first pass is made in any case: what is asked for must come, and asking waits for no number of rows. */
    auto passes_of = [&](int n) { return begin < n ? (n - begin + stride - 1) / stride : 1; };
    if (feeder >= 0) {
        const bool weighs = feeder < 2;
        some_steps s = {feeder % 2, feeder % 2, 0, 1};
        while (s.k >= steps) {
            s.k -= steps;
            s.pass++;
        }
        if (feeder == 3) /* weights behind the first stages' into the cache, shared by the ranges */
            for (int k = ring.stages + (int)blockIdx.y + op.ranges * lane; k < steps; k += op.ranges * WARP)
#pragma unroll
                for (int b = 0; b < SIDES; b++)
                    prefetch_box5(&box, k * TILE_K, 0, 0, group + b * box_groups, 0);
        if (!weighs)
            after_previous();
        for (int known = 0, passes = 1; known < 2; known++) {
#pragma unroll 1
            for (; s.pass < passes; s.next(ring.stages, steps)) {
                uint32_t done = ring.full + 8 * (uint32_t)s.stage;
                uint32_t to = ring.at + (uint32_t)(s.stage * ring.stage_bytes);
                barrier_wait(ring.empty + 8 * (uint32_t)s.stage, s.parity);
                if (lane == 0 && weighs) {
                    barrier_expect(done, (uint32_t)ring.token_at);
#pragma unroll
                    for (int b = 0; b < SIDES; b++)
                        copy_box5(to + (uint32_t)(b * op.outs * TILE_ROW), &box, done, s.k * TILE_K, 0, 0,
                                  group + b * box_groups, 0);
                } else if (lane == 0) {
                    barrier_expect(done, (uint32_t)(each * TILE_ROW));
                    copy_box2(to + (uint32_t)ring.token_at, &rows, done, s.k * TILE_K, begin + s.pass * stride);
                }
            }
            if (weighs && known == 0)
                after_previous();
            passes = passes_of(__shfl_sync(EVERY_LANE, (int)used_rows(op.in), 0));
        }
        return;
    }
    after_previous();
    const int used = op.in.used ? *op.in.used : (int)op.in.rows; /* on its way until the first pass is made */
    float acc[GEMM_TOKENS / 2];
    ring_place p = {0, 0}, done = {0, 0};
    const int side = warp / 4, column = (group + side * box_groups) * 8;
    const uint32_t box_at = (uint32_t)(side * op.outs * TILE_ROW), mine = out + (uint32_t)(side * SOME_OUT);
    bf16 *y = (bf16 *)op.y.data;
    for (int pass = 0, passes = 1; pass < passes; pass++) {
        switch (gemm_width(each)) {
#define EPOCH_CASE(N)                                            \
    case N:                                                      \
        if constexpr (N <= MOST)                                 \
            some_multiply<N>(acc, ring, p, done, box_at, steps); \
        break;
            GEMM_WIDTHS(EPOCH_CASE)
#undef EPOCH_CASE
        }
        const int n = __shfl_sync(EVERY_LANE, used < (int)op.in.rows ? used : (int)op.in.rows, 0);
        const int first = begin + pass * stride, left = n - first;
        gemm_tile tile = {.group = group, .blocks = 1, .outs = op.outs, .first = first};
        tile.rows = left < each ? left : each;
        passes = passes_of(n);
        if (GATED)
            gemm_gated_by_hand(acc, tile, side, mine, y, op.y.ld, column);
        else
            gemm_rows_by_hand(acc, tile, side, mine, y, op.y.ld, column, [](int, float &a, float &b) { a = b = 1; });
    }
#else
    (void)box, (void)rows, (void)op;
    __trap(); /* the launchers ask cuda_is_hopper */
#endif
}

/* How a product is cut. */
typedef struct some_cut {
    int sides, outs, ranges, each; /* warpgroups, weight rows of each one's box; likely rows of a range */
} some_cut;

/* No more blocks than multiprocessors, and the least of what bounds a step: its bytes, which come at some 64 a cycle,
 * or its products. Likely are half of the possible rows, which every sequence's sealed block makes twice as many.
 * False: too many for that. */
static bool some_fit(int room, int64_t possible, int64_t outs, int step, some_cut *cut)
{
    int likely = (int)(possible / 64 * 32), least = INT32_MAX;
    for (int sides = 1; sides <= 2; sides++)
        for (int rows = step; rows <= 64; rows += step)
            for (int ranges = 1; outs % (sides * rows) == 0 && outs / (sides * rows) * ranges <= room; ranges++) {
                int each = ((likely + ranges - 1) / ranges + 7) & ~7, width = gemm_width(each);
                int bytes = (sides * rows + width) * (TILE_ROW / 64), products = 2 * sides * width;
                int cost = bytes > products ? bytes : products; /* of equals, the fewest ranges and warpgroups */
                if (each <= (sides > 1 ? 224 : 64) && cost < least) {
                    least = cost;
                    *cut = {sides, rows, ranges, each};
                }
            }
    return least < INT32_MAX;
}

template <bool GATED, int SIDES>
static status some(cuda *c, const tensor *y, const tensor *x, const tensor *w, const some_cut &cut, const char *what)
{
    const int most = some_room<SIDES>::RING, behind = SIDES * SOME_OUT + 2 * SOME_STAGES * 8;
    const int ring = SIDES == 1 && c->stream == c->beside ? (int)SOME_BESIDE : most;
    CUtensorMap box, rows;
    void (*kernel)(CUtensorMap, CUtensorMap, some_op) = some_kernel<GATED, SIDES>;
    const int stages = ring / ((SIDES * cut.outs + (cut.each + 15) / 16 * 16) * TILE_ROW);
    some_op op = {*x, *y, cut.outs, (int)w->cols / TILE_K, cut.ranges, cut.each};
    op.stages = stages < SOME_STAGES ? stages : (int)SOME_STAGES;
    op.ring = ring;
    assert(op.stages > 2 && cut.each <= some_room<SIDES>::TOKENS);
    status st = cuda_map_weights(&box, w, 1, GATED ? 2 : 1, cut.outs);
    if (st == OK)
        st = cuda_map_rows(&rows, x, op.each);
    if (st == OK)
        st = cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most + behind), what,
                        __FILE__, __LINE__); /* one limit for both rings */
    return st == OK ? launch(c, what, kernel, dim3((unsigned)(w->rows / (SIDES * cut.outs)), (unsigned)cut.ranges),
                             some_room<SIDES>::THREADS, (size_t)(ring + behind), box, rows, op)
                    : st;
}

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
    op.sm_count = cuda_room(c);
    st = cuda_map_weights(&maps.narrow, w, 1, halves, op.narrow);
    if (st == OK && x->rows <= FEW_MOST && y->type == BF16)
        return halves == 1 ? few<false>(c, y, x, w, maps.narrow, op.narrow, what)
                           : few<true>(c, y, x, w, maps.narrow, op.narrow, what);
    some_cut cut = {};
    if (st == OK && y->type == BF16 && some_fit(cuda_room(c), x->rows, w->rows, 8 * halves, &cut)) {
        if (halves == 1)
            return cut.sides > 1 ? some<false, 2>(c, y, x, w, cut, what) : some<false, 1>(c, y, x, w, cut, what);
        return cut.sides > 1 ? some<true, 2>(c, y, x, w, cut, what) : some<true, 1>(c, y, x, w, cut, what);
    }
    if (st == OK)
        st = cuda_map_weights(&maps.weights, w, 1, halves, 64);
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
    for (int kind = 0; kind <= 2; kind++) {
        int64_t rows = kind > 0 ? 64 * kind : op.narrow;
        op.across[kind] = (int)((w->rows + rows - 1) / rows);
    }
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
