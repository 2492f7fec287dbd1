/* The ends of sublayers: what was computed joins the residual stream, and the next sublayer's input is normed from it,
 * in one pass. Twin of src/cpu/residual.c. A block takes a row at a time, a thread V neighbours; a thread keeps the
 * first vector of its row, and reads again what it wrote of the others. Each sum is rounded to BF16 before the next.
 * Where the experts left their terms, a row's sum over them is made here, in the tree's order (tree.cuh). */
#include "cuda/device.cuh"
#include "cuda/hopper.cuh"
#include "cuda/tree.cuh"

enum { THREADS = 256, WAVES = 16, VECTOR = 8, TERMS_AT_ONCE = 8, EARLY_ROWS = 1024 };

/* Where y comes from: a row of its own; the packed rows; the terms of a packed row, in a tree of up to 3 levels, or
 * more. */
enum { FROM_ROWS, FROM_PACKED, FROM_TERMS, FROM_MANY_TERMS };

typedef struct residual_op {
    residual r;
    const float *norm;
    tensor y, shared, cache; /* add_norm has y alone; shared without data: none */
    int layer;
    batch in;
    slots s;
    block_rule k;
    cuda_terms t;
    volatile int32_t *reached; /* in host memory: one write across the bus, for which nothing waits */
} residual_op;

/* What decides where the routed experts' output of a row comes from; all loads of one depth stand side by side. EARLY,
 * here and below: before after_previous(), and so past L1. */
typedef struct routed_row {
    int32_t place, in_block;
    bool sealing;
    uint64_t fresh, decoded; /* of its slot */
    bf16 *cache;
} routed_row;

template <bool EARLY, typename T> static __device__ __forceinline__ T look_up(const T *at)
{
    return EARLY ? __ldcg(at) : *at;
}

template <bool EARLY> static __device__ __forceinline__ routed_row find_routed(const residual_op &a, int64_t row)
{
    int32_t position = look_up<EARLY>((const int32_t *)a.in.position.data + row);
    int32_t owner = look_up<EARLY>((const int32_t *)a.in.slot.data + row);
    int32_t place = look_up<EARLY>((const int32_t *)a.in.place.data + row);
    int32_t role = look_up<EARLY>((const int32_t *)a.in.role.data + row);
    const slot *x = (const slot *)a.s.slot.data + owner;
    int32_t in_block = position % a.k.block_size;
    return {place,
            in_block,
            role == ROW_SEALING,
            look_up<EARLY>(&x->fresh),
            look_up<EARLY>(&x->decoded),
            row_of<bf16>(a.cache, ((int64_t)a.layer * a.s.slot_count + owner) * a.k.block_size + in_block)};
}

/* The edges of a packed row, edge j in lane j: its place among the terms, and how it meets those before it. -2: it is
 * the first; -1: in their shard; else at this level of the tree. */
typedef struct row_edges {
    uint32_t present;
    int place, way;
} row_edges;

template <bool EARLY> static __device__ __forceinline__ row_edges find_edges(const cuda_terms &t, int64_t row)
{
    int lane = (int)threadIdx.x % WARP, edges = (int)t.ids.cols, id = -1, place = 0;
    if (lane < edges) { /* the place may be none: it counts where the id is one */
        id = look_up<EARLY>(row_of<int32_t>(t.ids, row) + lane);
        place = look_up<EARLY>(t.place_of + row * edges + lane);
    }
    row_edges e = {__ballot_sync(EVERY_LANE, id >= 0), place, -2};
    uint32_t earlier = e.present & ((1u << lane) - 1);
    int before = __shfl_sync(EVERY_LANE, id, earlier ? 31 - __clz((int)earlier) : lane);
    if (id >= 0 && earlier) {
        int a = before / t.per_shard, b = id / t.per_shard;
        e.way = a == b ? -1 : depth_of(a, b, t.shards);
    }
    return e;
}

/* Their sum, of vector j of the terms; no number where that is not inside. All lanes call: they know the edges. Terms
 * wait in shared memory, each thread's in its own column of `room`, since registers for all of them would leave the
 * multiprocessor to a row or two. */
template <int LEVELS, int V>
static __device__ __forceinline__ void sum_terms(float (&sum)[V], const cuda_terms &t, const row_edges &e, int64_t j,
                                                 int64_t width, bool inside, pack_of<bf16, V> (*room)[THREADS])
{
    typedef pack_of<bf16, V> pack;
    const float zero[V] = {};
    running_sum<LEVELS, V> s;
    s.begin(zero);
    for (int first = 0; first < WARP && e.present >> first; first += TERMS_AT_ONCE) {
#pragma unroll
        for (int i = 0; i < TERMS_AT_ONCE; i++) {
            int64_t place = __shfl_sync(EVERY_LANE, e.place, first + i);
            const pack *from = (const pack *)t.term + place * width + j;
            if (!inside || !(e.present >> (first + i) & 1))
                continue;
            if constexpr (sizeof(pack) == 16)
                copy16(shared_at(&room[i][threadIdx.x]), from);
            else
                room[i][threadIdx.x] = *from;
        }
        copies16_wait();
#pragma unroll 1
        for (int i = 0; i < TERMS_AT_ONCE; i++) {
            if (!(e.present >> (first + i) & 1))
                continue;
            int way = __shfl_sync(EVERY_LANE, e.way, first + i);
            pack v = room[i][threadIdx.x];
            float x[V];
#pragma unroll
            for (int k = 0; k < V; k++)
                x[k] = widen(v.x[k]);
            if (way == -2)
                s.begin(x);
            else if (way == -1)
                s.add(x);
            else
                s.turn(x, way);
        }
    }
    s.join(-1);
#pragma unroll
    for (int k = 0; k < V; k++)
        sum[k] = s.newest[k];
}

template <int V> static __device__ __forceinline__ void add(pack_of<bf16, V> &a, const pack_of<bf16, V> &b)
{
#pragma unroll
    for (int k = 0; k < V; k++)
        narrow(&a.x[k], widen(a.x[k]) + widen(b.x[k]));
}

/* With three blocks a multiprocessor, one's rows come while others are summed up. */
template <int V, int FROM, bool EARLY>
static __global__ void __launch_bounds__(THREADS, FROM == FROM_MANY_TERMS ? 1 : 3) residual_kernel(residual_op a)
{
    typedef pack_of<bf16, V> pack;
    typedef pack_of<float, V> wide;
    constexpr bool TERMS = FROM == FROM_TERMS || FROM == FROM_MANY_TERMS;
    __shared__ float room[THREADS / WARP];
    __shared__ pack terms[TERMS ? TERMS_AT_ONCE : 1][THREADS];
    let_next();
    const int64_t width = a.r.x.cols / V;
    wide weight = {};
    if (threadIdx.x < width)
        weight = ((const wide *)a.norm)[threadIdx.x];
    routed_row routed = {};
    row_edges edges = {};
    if (EARLY && blockIdx.x < used_rows_early(a.r.x)) {
        routed = find_routed<true>(a, blockIdx.x);
        if (routed.place >= 0)
            edges = find_edges<true>(a.t, routed.place);
    }
    after_previous();
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *a.reached = a.r.through;
    const int64_t n = used_rows(a.r.x);
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        pack *x = (pack *)row_of<bf16>(a.r.x, i), *h = (pack *)row_of<bf16>(a.r.h, i), first = {};
        const pack *shared = a.shared.data ? (const pack *)row_of<bf16>(a.shared, i) : NULL;
        const bool known = EARLY && i == blockIdx.x;
        if (!known)
            edges = {};
        if (FROM != FROM_ROWS && !known)
            routed = find_routed<false>(a, i);
        if (TERMS && !known && routed.place >= 0)
            edges = find_edges<false>(a.t, routed.place);
        const bool anew = routed.sealing || (routed.fresh >> routed.in_block & 1);
        const bool keep = !routed.sealing && (routed.decoded >> routed.in_block & 1);
        float sum = 0;
        for (int64_t base = 0; base < width; base += THREADS) {
            const int64_t j = base + threadIdx.x;
            const bool inside = j < width;
            pack to = {}, more = {}, z = {};
            if (inside) {
                to = x[j];
                if (FROM == FROM_ROWS)
                    more = ((const pack *)row_of<bf16>(a.y, i))[j];
                else if (shared)
                    z = shared[j];
            }
            if (FROM != FROM_ROWS && anew) {
                float f[V] = {};
                if (TERMS) {
                    sum_terms<FROM == FROM_TERMS ? 3 : 10>(f, a.t, edges, j, width, inside, terms);
                } else if (inside) {
                    wide packed = ((const wide *)row_of<float>(a.y, routed.place))[j];
#pragma unroll
                    for (int k = 0; k < V; k++)
                        f[k] = packed.x[k];
                }
#pragma unroll
                for (int k = 0; k < V; k++)
                    narrow(&more.x[k], f[k]);
                if (inside && keep)
                    ((pack *)routed.cache)[j] = more;
            } else if (FROM != FROM_ROWS && inside) {
                more = ((const pack *)routed.cache)[j];
            }
            if (FROM != FROM_ROWS && shared)
                add(more, z);
            add(to, more);
            if (base == 0)
                first = to;
            if (inside) {
                x[j] = to;
#pragma unroll
                for (int k = 0; k < V; k++)
                    sum = fmaf(widen(to.x[k]), widen(to.x[k]), sum);
            }
        }
        float scale = 1.0f / sqrtf(block_sum<THREADS>(sum, room) / (float)a.r.x.cols + a.r.eps);
        int32_t place = a.r.h_fresh.data ? ((const int32_t *)a.in.place.data)[i] : -1;
        pack *packed = place >= 0 ? (pack *)row_of<bf16>(a.r.h_fresh, place) : NULL;
        for (int64_t j = threadIdx.x; j < width; j += THREADS) {
            pack to = j == threadIdx.x ? first : x[j];
            wide w = j == threadIdx.x ? weight : ((const wide *)a.norm)[j];
#pragma unroll
            for (int k = 0; k < V; k++)
                narrow(&to.x[k], widen(to.x[k]) * scale * w.x[k]);
            h[j] = to;
            if (packed)
                packed[j] = to;
        }
    }
}

static bool wide_rows(const tensor *t)
{
    return !t->data || vectors_fit(*t, VECTOR);
}

template <int FROM> static status end(cuda *c, residual_op &a, const char *what)
{
    a.reached = c->reached;
    const residual &r = a.r;
    const tensor *all[] = {&r.x, &r.h, &r.h_fresh, r.norm, &a.y, &a.shared, &a.cache};
    bool wide = true;
    for (const tensor *t : all)
        wide = wide && wide_rows(t);
    assert(r.x.type == BF16 && r.h.type == BF16 && r.norm->type == F32 && r.h.rows >= r.x.rows);
    assert(r.h.cols == r.x.cols && r.norm->cols == r.x.cols && a.y.cols == r.x.cols);
    assert(!r.h_fresh.data || (r.h_fresh.type == BF16 && r.h_fresh.cols == r.x.cols));
    constexpr bool FEW = FROM == FROM_TERMS; /* of many rows most are not a block's first, and registers are short */
    auto kernel = !wide                                         ? residual_kernel<1, FROM, false>
                  : FEW && c->settled && r.x.rows <= EARLY_ROWS ? residual_kernel<VECTOR, FROM, FEW>
                                                                : residual_kernel<VECTOR, FROM, false>;
    return launch(c, what, kernel, cuda_grid(c, r.x.rows, WAVES), THREADS, 0, a);
}

extern "C" status cuda_add_norm(backend *b, const residual *r, const tensor *y, const batch *in)
{
    residual_op a = {};
    a.r = *r;
    a.norm = (const float *)r->norm->data;
    a.y = *y;
    a.in = *in;
    assert(y->type == BF16 && y->rows >= r->x.rows);
    return end<FROM_ROWS>(cuda_of(b), a, "add and norm");
}

extern "C" status cuda_merge(backend *b, const residual *r, const tensor *packed, const tensor *shared, tensor *cache,
                             int layer, const batch *in, const slots *s, const block_rule *k)
{
    cuda *c = cuda_of(b);
    residual_op a = {*r, (const float *)r->norm->data, *packed, *shared, *cache, layer, *in, *s, *k, c->terms};
    assert(packed->type == F32 && cache->type == BF16 && cache->cols == r->x.cols);
    assert(!shared->data || (shared->type == BF16 && shared->cols == r->x.cols && shared->rows >= r->x.rows));
    if (packed->data)
        return end<FROM_PACKED>(c, a, "merge");
    return c->terms.shards <= 8 ? end<FROM_TERMS>(c, a, "merge") : end<FROM_MANY_TERMS>(c, a, "merge");
}
