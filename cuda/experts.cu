/* The routed experts of one rank: edges sorted by expert; of each expert act = silu(gate x) * (up x) over its tokens,
 * then term = weight * (down act), both BF16; then each token's sum over its terms, fp32 in the tree's order
 * (sum_tree.h), unless it is left to the op `merge` (residual.cu).
 *
 * An edge's place is its rank in the sorted order. A tile is a run of places of one expert: at most 288 of them where
 * gemm.cuh multiplies (a Hopper GPU, whole 64 x 64 boxes), which reads each weight of a touched expert once a tile and
 * no others at all; at most 16 in the plain kernel for any shape. 288, so that experts of 256 tokens each, or of some
 * 512, seldom need a tile more than the mean does. A place's result is the same wherever it lies.
 *
 * A layer's shared expert of the same shape may ride: it is the expert behind the last one, all rows have a place with
 * it, behind those of the edges, and the factor 1. What it makes of them stays there for `merge`. Two products of its
 * own would hold multiprocessors for which route and sort wait. */
#include "cuda/gemm.cuh"
#include "cuda/stream.cuh"

enum { EXPERT_TOKENS = 288 }; /* most places of a tile */

typedef struct worklist {
    int32_t *head;     /* tiles, the widest one's tokens (a multiple of 8), turns taken by sums, places */
    int4 *tile;        /* expert of this rank, first place, places; the most places first */
    int32_t *token_at; /* [edges], by place: of the routed experts' places alone */
    float *factor_at;  /* [edges], likewise: the edge's weight */
    int32_t *place_of; /* [edges]; of an edge to another rank or none: not written */
    int32_t *counted;  /* [SORT_BLOCKS, experts of this rank]: edges of each block's run, where several sort */
    tensor all;        /* the shared expert's rows; no rows: none rides */
    int32_t shared, shared_first; /* its number, or -1; its first place */
} worklist;

/* ---- the sort */

enum {
    SORT_BLOCKS = 128,
    SORT_WARPS = 32,
    SORT_THREADS = SORT_WARPS * WARP,
    SORT_CLUSTER = 8,
    SORT_FEW = 17 << 10, /* possible edges, some half of them there, that one cluster sorts sooner than two kernels */
    SORT_FEWEST = 4096,  /* the same of one block, on a GPU without clusters */
    SHARED_TILE = 64 /* most rows of the shared expert's tiles: wider ones would leave the others' a shorter ring */
};

/* The sum of x over the threads before this one; `sums` has SORT_WARPS. All threads call. */
static __device__ __forceinline__ int32_t sum_before(int32_t x, int32_t *sums)
{
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP;
    int32_t sum = warp_prefix(x, lane), before = 0;
    if (lane == WARP - 1)
        sums[warp] = sum;
    __syncthreads();
    for (int i = 0; i < warp; i++)
        before += sums[i];
    return before + sum - x;
}

/* The expert of this rank that edge i goes to; -1: none. */
static __device__ __forceinline__ int edge_expert(const tensor &ids, uint32_t i, uint32_t edges, int first, int count)
{
    if (i >= edges)
        return -1;
    int id = __ldcg(row_of<int32_t>(ids, i / (uint32_t)ids.cols) + i % (uint32_t)ids.cols) - first;
    return id >= 0 && id < count ? id : -1;
}

/* A stable counting sort. Each warp owns a run of edges: it counts them by expert, learns where its own of each expert
 * begin, and goes over them again. The blocks of one cluster tell each other what they counted, but for so few edges
 * that the first block has a thread each; many blocks do it in two kernels: the first leaves the counts, and the second
 * counts its own edges while that runs (settled: it may read them past L1, device.cuh). */
enum sort_part { SORT_ALL, SORT_COUNT, SORT_PLACE };

template <sort_part PART>
static __global__ void __launch_bounds__(SORT_THREADS, 1)
    sort_kernel(tensor ids, tensor weights, int first, int count, int most, bool settled, worklist w)
{
    extern __shared__ int32_t sort_room[]; /* [SORT_WARPS, count] counts, [count] starts, [cluster, count] */
    __shared__ int32_t sums[2][SORT_WARPS], widest, longer[EXPERT_TOKENS]; /* tiles of most - i places, then of more */
#if __CUDA_ARCH__ >= 900
    __shared__ uint64_t told; /* a barrier */
#endif
    int32_t *start = sort_room + SORT_WARPS * count;
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, me = (int)threadIdx.x;
    int32_t *mine = sort_room + warp * count;
    for (int i = me; i < SORT_WARPS * count; i += SORT_THREADS)
        sort_room[i] = 0;
    for (int i = me; i < EXPERT_TOKENS; i += SORT_THREADS)
        longer[i] = 0;
    if (me == 0)
        widest = 8;
#if __CUDA_ARCH__ >= 900
    if (PART == SORT_ALL && gridDim.x > 1) {
        if (me == 0) {
            barrier_init(shared_at(&told), 1);
            barrier_init_done();
        }
        cluster_arrive();
        cluster_wait();
    }
#endif
    __syncthreads();
    int64_t rows = settled ? used_rows_early(ids) : 0, riding = settled ? used_rows_early(w.all) : 0;
    if (PART != SORT_PLACE) {
        after_previous();
        let_next();
    }
    rows = settled ? rows : used_rows(ids);
    riding = settled ? riding : used_rows(w.all);
    uint32_t edges = (uint32_t)(rows * ids.cols);
    bool alone = PART == SORT_ALL && edges <= SORT_THREADS;
    if (alone && blockIdx.x > 0)
        return;
    uint32_t threads = (alone ? 1 : gridDim.x) * SORT_THREADS, run = (edges + threads - 1) / threads * WARP;
    uint32_t from = (blockIdx.x * SORT_WARPS + (uint32_t)warp) * run, same = 0;
    bool once = run <= WARP; /* a thread an edge, known from the first look on */
    int e = -1;
    float factor = 0;
    auto factor_of = [&](uint32_t edge) {
        return __ldcg(row_of<float>(weights, edge / (uint32_t)ids.cols) + edge % (uint32_t)ids.cols);
    };
    for (uint32_t i = from; i < from + run && i < edges; i += WARP) {
        e = edge_expert(ids, i + (uint32_t)lane, edges, first, count);
        if (PART != SORT_COUNT && once && e >= 0)
            factor = factor_of(i + (uint32_t)lane);
        same = __match_any_sync(EVERY_LANE, e);
        if (e >= 0 && lane == __ffs((int)same) - 1)
            mine[e] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
    if (PART == SORT_PLACE) {
        after_previous();
        let_next();
    }
    int32_t all = 0, before = 0;
    if (me < count) {
#pragma unroll 8
        for (int i = 0; i < SORT_WARPS; i++) {
            int32_t here = sort_room[i * count + me];
            sort_room[i * count + me] = all;
            all += here;
        }
    }
    if (PART == SORT_COUNT) {
        if (me < count)
            w.counted[(int)blockIdx.x * count + me] = all;
        return;
    }
    if (PART == SORT_PLACE && me < count) {
        all = 0;
#pragma unroll 8
        for (int i = 0; i < (int)gridDim.x; i++) {
            int32_t theirs = w.counted[i * count + me];
            before += i < (int)blockIdx.x ? theirs : 0;
            all += theirs;
        }
    }
#if __CUDA_ARCH__ >= 900
    if (PART == SORT_ALL && gridDim.x > 1 && !alone) {
        int32_t *total = start + count;
        if (me < count)
#pragma unroll
            for (int i = 0; i < SORT_CLUSTER; i++)
                cluster_send4(shared_at(&total[(int)blockIdx.x * count + me]), shared_at(&told), i, (uint32_t)all);
        if (me == 0)
            barrier_expect(shared_at(&told), SORT_CLUSTER * (uint32_t)count * sizeof *total);
        barrier_wait(shared_at(&told), 0);
        all = 0;
        if (me < count)
#pragma unroll
            for (int i = 0; i < SORT_CLUSTER; i++) {
                int32_t theirs = total[i * count + me];
                before += i < (int)blockIdx.x ? theirs : 0;
                all += theirs;
            }
    }
#endif
    const bool rides = me == w.shared;
    const int32_t there = rides ? (int32_t)riding : all, cut = rides ? SHARED_TILE : most;
    const int32_t tiles = (there + cut - 1) / cut;
    const int32_t longest = tiles > 0 ? (there + tiles - 1) / tiles : most;
    if (blockIdx.x == 0 && tiles > 0) {
        atomicAdd(&longer[most - longest], tiles);
        atomicMax(&widest, gemm_width(longest));
    }
    int32_t begin = sum_before(all, sums[0]);
    if (me < count)
        start[me] = begin + before;
    if (blockIdx.x == 0) {
        /* Blocks take tiles in turn: where those of a turn are alike, none has more to do than another. */
        int32_t alike = me < most ? longer[me] : 0, before_these = sum_before(alike, sums[1]);
        if (me < most)
            longer[me] = before_these;
        __syncthreads();
        int32_t tile = tiles > 0 ? atomicAdd(&longer[most - longest], tiles) : 0;
        for (int32_t i = 0, at = rides ? w.shared_first : begin; i < tiles; i++) {
            int32_t places = there / tiles + (i < there % tiles);
            w.tile[tile + i] = make_int4(me, at, places, 0);
            at += places;
        }
        if (me == SORT_THREADS - 1) {
            w.head[0] = before_these + alike;
            w.head[1] = widest;
            w.head[2] = 0;
            w.head[3] = begin + all;
        }
    }
    __syncthreads();
    for (uint32_t i = from; i < from + run && i < edges; i += WARP) {
        uint32_t edge = i + (uint32_t)lane, token = edge / (uint32_t)ids.cols;
        if (!once) {
            e = edge_expert(ids, edge, edges, first, count);
            factor = e >= 0 ? factor_of(edge) : 0;
            same = __match_any_sync(EVERY_LANE, e);
        }
        int32_t place = e >= 0 ? start[e] + mine[e] + __popc(same & ((1u << lane) - 1)) : 0;
        __syncwarp();
        if (e >= 0) {
            w.token_at[place] = (int32_t)token;
            w.factor_at[place] = factor;
            w.place_of[edge] = place;
            if (lane == __ffs((int)same) - 1)
                mine[e] += __popc(same);
        }
        __syncwarp();
    }
}

/* ---- products on whole boxes */

/* So many numbers of terms the L2 cache holds from product to sum, if the weights only pass through it: 40 of 50 MB. Of
 * more, the weights have no less use of it. */
enum { TERMS_HELD = 20000000 };

/* A box holds 32 features: eight gate rows, their eight up rows, and so on. A gather waits longer for what it asked for
 * than the copy engine: with half the room for results there are four stages of the widest tile in place of three. */
struct gate_up_op {
    enum { GROUPS = 4, TOKENS = EXPERT_TOKENS, ROW = 64, ROOM = TOKENS / 2, GATHERS = 1, FACTORS = 0, SETTLED = 0 };
    const bf16 *x; /* the lower of the routed rows and the shared expert's: each begin so many 16 bytes behind it */
    uint32_t routed_at, all_at;
    worklist w;
    bf16 *act;
    int ld, hidden, inner;

    __device__ void before() const
    {
    }

    __device__ gemm_shape shape() const
    {
        return {.tiles = w.head[0] * (inner / 64),
                .blocks = 2,
                .tokens = w.head[1],
                .steps = hidden / TILE_K,
                .outs = 64,
                .passing = (int64_t)w.head[3] * hidden <= TERMS_HELD,
                .across = inner / 64,
                .per = gemm_per(inner / 64)};
    }

    __device__ gemm_tile tile(const gemm_shape &s, int t) const
    {
        const int of = gemm_over(t, s.per);
        int4 run = w.tile[of];
        return {
            .expert = run.x, .group = (t - of * s.across) * 8, .blocks = 2, .outs = 64, .first = run.y, .rows = run.z};
    }

    __device__ uint32_t source(const gemm_tile &tile, int r) const
    {
        bool shared = tile.expert == w.shared;
        int32_t row = shared ? tile.first - w.shared_first + r : w.token_at[tile.first + r];
        return (shared ? all_at : routed_at) + (uint32_t)row * (uint32_t)(ld / 8);
    }

    __device__ void finish(const float (&acc)[TOKENS / 2], const gemm_tile &tile, int side, uint32_t room,
                           const float *, const gemm_maps &maps) const
    {
        gemm_gated_out<gate_up_op>(acc, tile, side, room, maps, act, inner, tile.group * 8 + side * 32);
    }
};

/* The tokens are the rows of act, by place. The sort has ended when gate and up are under way. */
struct down_op {
    enum { GROUPS = 8, TOKENS = EXPERT_TOKENS, ROW = 128, ROOM = 256, GATHERS = 0, FACTORS = 1, SETTLED = 1 };
    worklist w;
    bf16 *term;
    int hidden, inner;

    __device__ void before() const
    {
    }

    __device__ gemm_shape shape() const
    {
        int across = (hidden / 64 + 1) / 2;
        int4 head = __ldcg((const int4 *)w.head);
        return {.tiles = head.x * across,
                .blocks = 2,
                .tokens = head.y,
                .steps = inner / TILE_K,
                .outs = 64,
                .passing = (int64_t)head.w * hidden <= TERMS_HELD,
                .across = across,
                .per = gemm_per(across)};
    }

    __device__ gemm_tile tile(const gemm_shape &s, int t) const
    {
        const int of = gemm_over(t, s.per);
        int4 run = __ldcg(&w.tile[of]);
        int box = (t - of * s.across) * 2, boxes = hidden / 64 - box;
        return {.expert = run.x,
                .group = box * 8,
                .blocks = boxes < 2 ? boxes : 2,
                .outs = 64,
                .first = run.y,
                .rows = run.z};
    }

    __device__ float factor(const gemm_tile &tile, int r) const
    {
        return tile.expert == w.shared ? 1 : __ldcg(&w.factor_at[tile.first + r]);
    }

    __device__ void finish(const float (&acc)[TOKENS / 2], const gemm_tile &tile, int side, uint32_t room,
                           const float *factor, const gemm_maps &maps) const
    {
        gemm_rows_out<down_op>(acc, tile, side, room, maps, term, hidden, tile.group * 8 + side * 64,
                               [=](int r, float &a, float &b) {
                                   a = factor[r];
                                   b = factor[r + 1];
                               });
    }
};

/* ---- products of any shape: a block takes a tile's places (at most PLAIN) by PLAIN outs */

enum { PLAIN = 16 };

/* The sum over k of x's row for place `a` and w's row `out + b`; all threads of the block call. */
static __device__ float plain_sum(const bf16 *row, const bf16 *w, int64_t ldw, int64_t outs, int64_t width)
{
    __shared__ float xs[PLAIN][2 * PLAIN + 1], ws[PLAIN][2 * PLAIN + 1];
    int a = (int)threadIdx.y, b = (int)threadIdx.x;
    float sum = 0;
    for (int64_t k = 0; k < width; k += 2 * PLAIN) {
        for (int64_t i = b; i < 2 * PLAIN; i += PLAIN) {
            xs[a][i] = row && k + i < width ? widen(row[k + i]) : 0;
            ws[a][i] = a < outs && k + i < width ? widen(w[a * ldw + k + i]) : 0;
        }
        __syncthreads();
        for (int i = 0; i < 2 * PLAIN; i++)
            sum = fmaf(xs[a][i], ws[b][i], sum);
        __syncthreads();
    }
    return sum;
}

static __global__ void plain_gate_up(worklist w, tensor x, tensor gate_up, int inner, bf16 *act)
{
    int across = (inner + PLAIN - 1) / PLAIN, a = (int)threadIdx.y, b = (int)threadIdx.x;
    for (int t = (int)blockIdx.x; t < w.head[0] * across; t += (int)gridDim.x) {
        int4 run = w.tile[t / across];
        int64_t out = t % across * PLAIN, first = (int64_t)run.x * 2 * inner + out;
        const bf16 *row = a < run.z ? row_of<bf16>(x, w.token_at[run.y + a]) : NULL;
        float gate = plain_sum(row, row_of<bf16>(gate_up, first), gate_up.ld, inner - out, x.cols);
        float up = plain_sum(row, row_of<bf16>(gate_up, first + inner), gate_up.ld, inner - out, x.cols);
        if (row && out + b < inner)
            narrow(&act[(int64_t)(run.y + a) * inner + out + b], silu(gate) * up);
    }
}

static __global__ void plain_down(worklist w, tensor down, int hidden, const bf16 *act, bf16 *term)
{
    int across = (hidden + PLAIN - 1) / PLAIN, a = (int)threadIdx.y, b = (int)threadIdx.x;
    for (int t = (int)blockIdx.x; t < w.head[0] * across; t += (int)gridDim.x) {
        int4 run = w.tile[t / across];
        int64_t out = t % across * PLAIN;
        const bf16 *row = a < run.z ? act + (run.y + a) * down.cols : NULL;
        float sum = plain_sum(row, row_of<bf16>(down, (int64_t)run.x * hidden + out), down.ld, hidden - out, down.cols);
        if (row && out + b < hidden)
            narrow(&term[(int64_t)(run.y + a) * hidden + out + b], sum * w.factor_at[run.y + a]);
    }
}

/* ---- sums */

typedef struct sum_order {
    int first, count, units, unit_first, shards, per_shard;
    uint16_t unit_of[SUM_TREE_EXPERTS]; /* by expert of this rank */
} sum_order;

enum { SUM_SLICE = 2, SUM_THREADS = 256, SUM_AT_ONCE = 8 }; /* a warp takes a token's SUM_SLICE * 32 * V columns */

/* Where a token's sums go: row `row`. */
typedef struct sum_rows {
    char *data;
    int32_t row;
    bool half;
} sum_rows;

static __device__ __forceinline__ sum_rows piece_of(const sums_away &a, int32_t token)
{
    int32_t piece = token % a.pieces;
    return {(char *)a.to[piece], token / a.pieces, a.half && piece != a.whole};
}

/* Lane j of a warp knows edge j: its place, its unit, and how it joins the edge before it. */
template <int LEVELS, int V, bool AWAY>
static __global__ void __launch_bounds__(SUM_THREADS, LEVELS > 3 ? 1 : 2)
    sum_kernel(tensor y, tensor ids, worklist w, const bf16 *term, const __grid_constant__ sum_order o, sums_away away)
{
    after_previous();
    let_next();
    int hidden = (int)y.cols, slice = SUM_SLICE * WARP * V, slices = (hidden + slice - 1) / slice;
    int lane = (int)threadIdx.x % WARP, edges = (int)ids.cols, tokens = (int)used_rows(ids);
    int warps = (int)gridDim.x * (SUM_THREADS / WARP), items = tokens * slices;
    for (int at = (int)(blockIdx.x * (SUM_THREADS / WARP) + threadIdx.x / WARP); at < items; at += warps) {
        int64_t token = at / slices;
        sum_rows rows = {};
        if (AWAY)
            rows = piece_of(away, (int32_t)token);
        int id = lane < edges ? row_of<int32_t>(ids, token)[lane] - o.first : -1;
        int place = lane < edges ? w.place_of[token * edges + lane] : 0; /* that of an edge to others is no place */
        bool mine = id >= 0 && id < o.count;
        uint32_t present = __ballot_sync(EVERY_LANE, mine);
        if (AWAY && !present)
            continue;
        uint32_t earlier = present & ((1u << lane) - 1);
        int before = __shfl_sync(EVERY_LANE, id, earlier ? 31 - __clz((int)earlier) : lane);
        int unit = mine ? o.unit_of[id] : -1, way = -2;
        if (mine && earlier &&
            o.unit_of[before] == unit) { /* -2: opens a unit; -1: same shard; else the joint's depth */
            int a = (before + o.first) / o.per_shard, b = (id + o.first) / o.per_shard;
            way = a == b ? -1 : depth_of(a, b, o.shards);
        }
        for (int part = 0; part < SUM_SLICE; part++) {
            int col = at % slices * slice + (part * WARP + lane) * V;
            bool inside = col < hidden; /* all lanes stay: they know the edges */
            running_sum<LEVELS, V> s;
            int open = -1; /* the unit whose terms are coming */
            auto put = [&] {
                s.join(-1);
                if (!inside)
                    return;
                int64_t at_row = (AWAY ? rows.row : token) * o.units + open - o.unit_first;
                if (!AWAY)
                    store_floats(row_of<float>(y, at_row) + col, s.newest);
                else if (!rows.half)
                    store_floats((float *)rows.data + at_row * hidden + col, s.newest);
                else
                    store_halves((bf16 *)rows.data + at_row * hidden + col, s.newest);
            };
            for (int j = 0; j < edges; j += SUM_AT_ONCE) {
                pack_of<bf16, V> v[SUM_AT_ONCE];
#pragma unroll
                for (int i = 0; i < SUM_AT_ONCE; i++) {
                    uint32_t from = (uint32_t)__shfl_sync(EVERY_LANE, place, (j + i) % WARP) * (uint32_t)(hidden / V);
                    if (inside && (present >> (j + i) & 1))
                        v[i] = ((const pack_of<bf16, V> *)term)[from + (uint32_t)(col / V)];
                }
#pragma unroll
                for (int i = 0; i < SUM_AT_ONCE; i++) {
                    if (!(present >> (j + i) & 1))
                        continue;
                    int how = __shfl_sync(EVERY_LANE, way, j + i), of = __shfl_sync(EVERY_LANE, unit, j + i);
                    float x[V];
#pragma unroll
                    for (int e = 0; e < V; e++)
                        x[e] = widen(v[i].x[e]);
                    if (how == -1) {
                        s.add(x);
                    } else if (how >= 0) {
                        s.turn(x, how);
                    } else {
                        if (open >= 0)
                            put();
                        open = of;
                        s.begin(x);
                    }
                }
            }
            if (open < 0) { /* no edge here: the only unit is zero, several stay as they are */
                const float zero[V] = {};
                s.begin(zero);
                if (o.units == 1)
                    open = o.unit_first;
            }
            if (open >= 0)
                put();
        }
    }
}

/* Many tokens: the same sums by stream.cuh, a piece of a token's row an item, in turns, since a sum that goes to
 * another GPU takes longer. No away.pieces: to y. */
enum { SUM_MANY = 1024, SUM_SLOT = STREAM_COLUMNS * (int)sizeof(bf16) };

template <int LEVELS>
static __global__ void __launch_bounds__(STREAM_THREADS, LEVELS > 3 ? 1 : 2)
    sum_stream(tensor y, tensor ids, worklist w, const bf16 *term, const __grid_constant__ sum_order o, sums_away away)
{
    extern __shared__ __align__(1024) uint8_t room[];
    stream_open<SUM_SLOT>(room);
    after_previous();
    let_next();
    int hidden = (int)y.cols, pieces = stream_pieces(hidden), columns = stream_columns(hidden), edges = (int)ids.cols;
    int items = (int)used_rows(ids) * pieces, lane = (int)threadIdx.x % WARP;
    auto find = [&](int item, int j, uint32_t group) {
        int token = item / pieces, col = item % pieces * columns;
        bool there = item < items;
        int id = there && j < edges ? row_of<int32_t>(ids, token)[j] - o.first : -1;
        bool mine = id >= 0 && id < o.count;
        int place = there && j < edges ? w.place_of[(int64_t)token * edges + j] : 0;
        int unit = mine ? o.unit_of[id] : o.unit_first;
        uint32_t present = __ballot_sync(EVERY_LANE, mine) & group, earlier = present & ((1u << lane) - 1);
        uint32_t later = present & ~earlier & ~(1u << lane);
        int before = __shfl_sync(EVERY_LANE, id, earlier ? 31 - __clz((int)earlier) : lane);
        int beyond = __shfl_sync(EVERY_LANE, unit, later ? __ffs((int)later) - 1 : lane);
        stream_term t = {NULL, NULL, -2, 0, true, false};
        bool zero = there && j == 0 && !present && o.units == 1 && !away.pieces; /* as sum_kernel has it */
        if (!mine && !zero)
            return t;
        t.cols = hidden - col < columns ? hidden - col : columns;
        if (mine)
            t.from = (const char *)(term + (int64_t)place * hidden + col);
        if (mine && earlier && o.unit_of[before] == unit) {
            int a = (before + o.first) / o.per_shard, b = (id + o.first) / o.per_shard;
            t.way = a == b ? -1 : depth_of(a, b, o.shards);
        }
        if (later && beyond == unit)
            return t;
        int64_t at_row = (int64_t)token * o.units + unit - o.unit_first;
        if (!away.pieces) {
            t.to = (char *)(row_of<float>(y, at_row) + col);
            return t;
        }
        sum_rows rows = piece_of(away, token);
        at_row = (int64_t)rows.row * o.units + unit - o.unit_first;
        t.half_out = rows.half;
        t.to = rows.data + (at_row * hidden + col) * (rows.half ? 2 : 4);
        return t;
    };
    stream_sums<LEVELS, SUM_SLOT>(room, items, edges, &w.head[2], find, [] { return true; });
}

template <int LEVELS>
static status launch_sum(cuda *c, const tensor *y, const tensor *ids, const worklist &w, const bf16 *term,
                         const sum_order &o, const sums_away *away)
{
    int v = !vectors_fit(*y, 8) ? 1 : away ? 4 : 8; /* stores of 16 bytes side by side travel best */
    int64_t slice = SUM_SLICE * WARP * v, items = ids->rows * ((y->cols + slice - 1) / slice);
    unsigned grid = cuda_grid(c, (items + SUM_THREADS / WARP - 1) / (SUM_THREADS / WARP), 16);
    sums_away nowhere = {};
    if (v > 1 && ids->rows >= SUM_MANY && stream_fits(c, (int)ids->cols))
        return stream_launch(c, "sums of experts", sum_stream<LEVELS>, ids->rows * stream_pieces((int)y->cols),
                             (int)ids->cols, INT_MAX, *y, *ids, w, term, o, away ? *away : nowhere);
    auto kernel = v == 1 ? (away ? sum_kernel<LEVELS, 1, true> : sum_kernel<LEVELS, 1, false>)
                         : (away ? sum_kernel<LEVELS, 4, true> : sum_kernel<LEVELS, 8, false>);
    return launch(c, "sums of experts", kernel, grid, SUM_THREADS, 0, *y, *ids, w, term, o, away ? *away : nowhere);
}

static status sums(cuda *c, const tensor *y, const tensor *ids, const worklist &w, const bf16 *term,
                   const expert_set *e)
{
    const sum_tree *t = e->tree;
    sum_order o = {.first = e->first,
                   .count = e->count,
                   .units = t->rank_unit[e->rank + 1] - t->rank_unit[e->rank],
                   .unit_first = t->rank_unit[e->rank],
                   .shards = t->shards,
                   .per_shard = t->per_shard};
    for (int i = 0; i < e->count; i++)
        o.unit_of[i] = (uint16_t)t->unit_of[e->first + i];
    return t->shards <= 8 ? launch_sum<3>(c, y, ids, w, term, o, e->away)
                          : launch_sum<10>(c, y, ids, w, term, o, e->away);
}

/* ---- the op */

static status sort(cuda *c, const tensor *ids, const tensor *weights, const expert_set *e, int most, const worklist &w)
{
    status st = OK;
    void (*const part[])(tensor, tensor, int, int, int, bool,
                         worklist) = {sort_kernel<SORT_ALL>, sort_kernel<SORT_COUNT>, sort_kernel<SORT_PLACE>};
    const int columns = SORT_WARPS + 1 + (cuda_is_hopper(c) ? SORT_CLUSTER : 0);
    const int most_room = columns * SUM_TREE_EXPERTS * (int)sizeof(int32_t); /* one limit for all threads */
    size_t room = (size_t)columns * (size_t)e->count * sizeof(int32_t);
    int64_t edges = ids->rows * ids->cols, blocks = (edges + SORT_THREADS - 1) / SORT_THREADS;
    bool few = edges <= (cuda_is_hopper(c) ? SORT_FEW : SORT_FEWEST);
    unsigned cluster = few && cuda_is_hopper(c) ? SORT_CLUSTER : 1;
    blocks = few ? cluster : blocks < SORT_BLOCKS ? blocks : (int64_t)SORT_BLOCKS;
    for (int i = few ? 0 : 1; st == OK && i < (few ? 1 : 3); i++) {
        bool settled = c->settled || i == 2;
        st = cuda_check(cudaFuncSetAttribute(part[i], cudaFuncAttributeMaxDynamicSharedMemorySize, most_room),
                        "sort of edges by expert", __FILE__, __LINE__);
        if (st == OK)
            st = launch_clusters(c, "sort of edges by expert", part[i], (unsigned)blocks, SORT_THREADS, room, cluster,
                                 *ids, *weights, e->first, e->count, most, settled, w);
    }
    return st;
}

static size_t take(size_t *at, size_t bytes)
{
    size_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

static bool whole_boxes(const cuda *c, const tensor *x, const expert_set *e)
{
    return cuda_is_hopper(c) && x->cols % 64 == 0 && e->inner % 64 == 0 && x->ld % 8 == 0 &&
           (uintptr_t)x->data % 16 == 0 && e->gate_up.ld % 8 == 0 && e->down.ld % 8 == 0;
}

/* Do the rows of `next` go on where those of t end? */
static bool goes_on(const tensor *t, const tensor *next, int64_t rows)
{
    return next->rows == rows && next->cols == t->cols && next->ld == t->ld && next->type == t->type &&
           (char *)next->data == (char *)t->data + t->rows * t->ld * (int64_t)dtype_bytes(t->type);
}

extern "C" bool cuda_rides(backend *b, const tensor *x, const expert_set *e, const shared_set *s)
{
    const tensor *h = &s->h;
    intptr_t apart = (intptr_t)h->data - (intptr_t)x->data, rows = (x->rows + h->rows) * x->ld * 2;
    return h->rows <= RIDES_MOST && whole_boxes(cuda_of(b), x, e) && e->count + 1 < SORT_THREADS &&
           goes_on(&e->gate_up, &s->gate_up, 2 * e->inner) && goes_on(&e->down, &s->down, x->cols) &&
           h->type == BF16 && h->cols == x->cols && h->ld == x->ld && apart % 16 == 0 &&
           (apart < 0 ? -apart : apart) + rows <= 16 * (intptr_t)UINT32_MAX;
}

extern "C" status cuda_experts(backend *b, tensor *y, const tensor *x, const tensor *ids, const tensor *weights,
                               const expert_set *e)
{
    status st = OK;
    cuda *c = cuda_of(b);
    int64_t hidden = x->cols, inner = e->inner, edges = ids->rows * ids->cols;
    assert(x->type == BF16 && y->type == F32 && weights->type == F32 && ids->cols == weights->cols &&
           ids->cols <= WARP);
    assert(e->gate_up.type == BF16 && e->down.type == BF16 && e->count <= SUM_TREE_EXPERTS);
    assert(e->gate_up.cols == hidden && e->down.cols == inner && y->cols == hidden);
    assert((double)(edges * hidden) <= experts_most(hidden) && x->rows * x->ld <= 8 * (int64_t)UINT32_MAX);
    assert(!e->shared || (cuda_rides(b, x, e, e->shared) && !y->data && !e->away));
    if (ids->rows == 0)
        return OK;
    bool boxes = whole_boxes(c, x, e);
    int most = boxes ? (int)EXPERT_TOKENS : (int)PLAIN;
    tensor all = e->shared ? e->shared->h : tensor{};
    size_t bytes = 0, tiles = (size_t)(e->count + edges / most + 1 + (all.rows + SHARED_TILE - 1) / SHARED_TILE);
    size_t at_head = take(&bytes, 4 * sizeof(int32_t)), at_tile = take(&bytes, tiles * sizeof(int4));
    size_t at_token = take(&bytes, (size_t)edges * sizeof(int32_t)),
           at_factor = take(&bytes, (size_t)edges * sizeof(float)),
           at_counted = take(&bytes, (size_t)(SORT_BLOCKS * e->count) * sizeof(int32_t)),
           at_place = take(&bytes, (size_t)edges * sizeof(int32_t));
    int64_t places = edges + all.rows;
    size_t at_act = take(&bytes, (size_t)(places * inner) * sizeof(bf16));
    size_t at_term = take(&bytes, (size_t)(places * hidden) * sizeof(bf16));
    void *room;
    st = cuda_scratch(c, &room, bytes);
    if (st != OK)
        return st;
    char *at = (char *)room;
    worklist w = {.head = (int32_t *)(at + at_head),
                  .tile = (int4 *)(at + at_tile),
                  .token_at = (int32_t *)(at + at_token),
                  .factor_at = (float *)(at + at_factor),
                  .place_of = (int32_t *)(at + at_place),
                  .counted = (int32_t *)(at + at_counted),
                  .all = all,
                  .shared = e->shared ? e->count : -1,
                  .shared_first = (int32_t)edges};
    bf16 *act = (bf16 *)(at + at_act), *term = (bf16 *)(at + at_term);
    st = sort(c, ids, weights, e, most, w);
    if (st == OK && boxes) {
        uintptr_t routed_at = (uintptr_t)x->data, all_at = e->shared ? (uintptr_t)all.data : routed_at;
        uintptr_t base = routed_at < all_at ? routed_at : all_at;
        gate_up_op g = {.x = (const bf16 *)base,
                        .routed_at = (uint32_t)((routed_at - base) / 16),
                        .all_at = (uint32_t)((all_at - base) / 16),
                        .w = w,
                        .act = act,
                        .ld = (int)x->ld,
                        .hidden = (int)hidden,
                        .inner = (int)inner};
        down_op d = {w, term, (int)hidden, (int)inner};
        gemm_maps gate_up = {}, down = {};
        tensor rows = tensor_of(act, BF16, places, inner), terms = tensor_of(term, BF16, places, hidden);
        tensor gate_ups = e->gate_up, downs = e->down;
        int count = e->count;
        if (e->shared) {
            gate_ups.rows += 2 * inner;
            downs.rows += hidden;
            count++;
        }
        st = cuda_map_weights(&gate_up.weights, &gate_ups, count, 2, 64);
        if (st == OK)
            st = cuda_map_weights(&down.weights, &downs, count, 1, 64);
        if (st == OK)
            st = cuda_map_rows(&down.rows16, &rows, 16);
        if (st == OK)
            st = cuda_map_rows(&down.rows64, &rows, 64);
        if (st == OK)
            st = cuda_map_half_rows(&gate_up.out8, &rows, 8);
        if (st == OK)
            st = cuda_map_half_rows(&gate_up.out64, &rows, 64);
        if (st == OK)
            st = cuda_map_rows(&down.out8, &terms, 8);
        if (st == OK)
            st = cuda_map_rows(&down.out64, &terms, 64);
        if (st == OK)
            st = gemm_launch(c, gate_up, g, (int64_t)tiles * (inner / 64), "gate and up of experts");
        if (st == OK)
            st = gemm_launch(c, down, d, (int64_t)tiles * ((hidden / 64 + 1) / 2), "down of experts");
    } else if (st == OK) {
        dim3 threads(PLAIN, PLAIN);
        unsigned grid = cuda_grid(c, (int64_t)tiles * ((hidden + PLAIN - 1) / PLAIN), 8);
        plain_gate_up<<<grid, threads, 0, c->stream>>>(w, *x, e->gate_up, (int)inner, act);
        plain_down<<<grid, threads, 0, c->stream>>>(w, e->down, (int)hidden, act, term);
        st = CUDA_LAUNCHED("experts");
    }
    if (st == OK && !y->data && !e->away) {
        assert(e->tree->unit_count == 1);
        tensor left = tensor_of(e->shared ? term + edges * hidden : NULL, BF16, all.rows, hidden);
        c->terms = {*ids, term, w.place_of, e->tree->shards, e->tree->per_shard, left};
        c->settled = boxes; /* gemm.cuh */
        return OK;
    }
    return st == OK ? sums(c, y, ids, w, term, e) : st;
}
