/* Expert Atlas on the device: the coverage test and the construction of a support, per cohort and layer. Twin of
 * src/cpu/atlas.c, which has the formulas; supports are bit for bit the same. Sums along a row are fp32, in order; sums
 * over rows are in fixed point (atlas_fixed), so that atomics may come in any order.
 *
 * Two kernels. A warp finds the K + m candidates of a run of fresh rows, leaves them in scratch, and tests the rows
 * against their cohort's support on the way. Then a block a cohort, or a cluster of blocks where cohorts are large,
 * reads the test's result; most find that the support holds. */
#include "cuda/hopper.cuh"
#include "cuda/plans.cuh"
#include "cuda/universe.cuh"

enum {
    WAVES = 8,
    BUILD_THREADS = 256, /* of a small cohort's block */
    SPREAD_THREADS = 1024,
    SPREAD = 8,       /* blocks of a large cohort's cluster */
    SMALL_ROWS = 256, /* of a cohort, at most */
    WORDS_MOST = SUM_TREE_EXPERTS / 32,
    NOBODY = 0xffff /* no candidate */
};

/* What the first kernel leaves of a cohort; zero between ops. */
typedef struct cohort_range {
    int64_t covered;     /* sum of the rows' covered shares, in fixed point */
    int32_t first, last; /* its packed rows */
    int32_t rows, under; /* of these, those of active blocks; below the floor */
} cohort_range;

typedef struct building {
    plans p;
    int layer;
    tensor z;
    const float *bias;
    batch in;
    slots s;
    route_rule r;
    atlas_rule a;
    block_rule k;
    grouping g;
    int width; /* K + m */
    cohort_range *range;
    int64_t stride; /* candidate j of fresh row i is number j * stride + i */
    uint16_t *id;   /* NOBODY behind the last */
    float *score;
    float *floor; /* of each fresh row: r_t; -1: not a row of an active block, it has no candidates */
    bool settled; /* cuda.settled, of the kernel before the test */
} building;

static __device__ __forceinline__ int32_t owner_of(const building &b, int64_t i)
{
    return __ldcg((const int32_t *)b.in.slot.data + __ldcg((const int32_t *)b.in.fresh.data + i));
}

static __device__ __forceinline__ bool in_words(const int32_t *set, int e)
{
    return (uint32_t)set[e >> 5] >> (e & 31) & 1;
}

/* ---- candidates and the coverage test */

/* What a run of rows found out of one cohort. */
typedef struct tally {
    int rows, under;
    int64_t covered;
} tally;

static __device__ __forceinline__ void add_tally(cohort_range *g, const tally &t)
{
    if (threadIdx.x % WARP != 0 || t.rows == 0)
        return;
    atomicAdd(&g->rows, t.rows);
    if (t.under > 0)
        atomicAdd(&g->under, t.under);
    if (t.covered > 0)
        atomicAdd((unsigned long long *)&g->covered, (unsigned long long)t.covered);
}

/* One row of an active block; set: the support that it is tested against, or NULL. */
template <int N>
static __device__ __forceinline__ void test_row(const building &b, int i, const universe<N> &u, const int32_t *set,
                                                uint8_t *room, tally &t)
{
    int lane = threadIdx.x % WARP;
    float *scores = (float *)(room + warps<N>::QUEUE), sum = 0, have = 0;
    uint16_t *taken = (uint16_t *)(scores + N * WARP);
    queue q;
    queue_open(q, u, room);
#pragma unroll
    for (int k = 0; k < N; k++)
        scores[lane * N + k] = u.score[k];
#pragma unroll 1
    for (int j = lane; j < b.width; j += WARP)
        taken[j] = NOBODY;
    __syncwarp();
#pragma unroll 2
    for (int j = 0; j < b.width; j++) {
        uint32_t id;
        if (queue_take(q, &id))
            taken[j] = (uint16_t)id;
    }
    __syncwarp();
    for (int base = 0; base < b.width; base += WARP) { /* a lane a candidate */
        int j = base + lane, id = j < b.width ? taken[j] : NOBODY;
        float score = id != NOBODY ? scores[id] : 0;
        uint32_t inside = __ballot_sync(EVERY_LANE, set && id != NOBODY && in_words(set, id));
        if (j < b.width) {
            b.id[j * b.stride + i] = (uint16_t)id;
            b.score[j * b.stride + i] = score;
        }
        int most = b.r.top_k - base < WARP ? b.r.top_k - base : WARP;
#pragma unroll 2
        for (int k = 0; k < most; k++) {
            float s = __shfl_sync(EVERY_LANE, score, k);
            sum = __fadd_rn(sum, s);
            have = inside >> k & 1 ? __fadd_rn(have, s) : have;
        }
    }
    __syncwarp(); /* the room is free */
    float floor = __fmul_rn(b.a.coverage, sum), all = __fdiv_rn(floor, b.a.coverage);
    if (lane == 0)
        b.floor[i] = floor;
    t.rows++;
    if (set) {
        t.under += have < floor;
        t.covered += atlas_fixed(all > 0 ? __fdiv_rn(have, all) : 1.0f);
    }
}

template <int N>
static __global__ void __launch_bounds__(warps<N>::THREADS) test_kernel(const __grid_constant__ building b)
{
    extern __shared__ __align__(16) uint32_t shared[];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, words = (int)b.p.support.cols - 1;
    uint32_t *room = shared + warp * (warps<N>::BYTES / sizeof *shared), whole = lane_set<N>(NULL, b.r.experts);
    float bias[N];
    lane_share(bias, b.bias, b.r.experts);
    int from = 0, to = 0;
    int32_t before = -1, after = INT32_MAX;
    packed_row of = {};
    auto divide = [&] {
        int n = deal_rows(b.in.fresh, warps<N>::COUNT, from, to);
        if (from >= to)
            return;
        of = packed_row_at(b.in, b.s, b.k, from);
        before = from > 0 ? owner_of(b, from - 1) : -1;
        after = to < n ? owner_of(b, to) : INT32_MAX;
    };
    if (b.settled)
        divide();
    after_previous();
    let_next();
    if (!b.settled)
        divide();
    if (from >= to)
        return;
    int32_t cohort = -1;
    tally t = {};
    for (int i = from; i < to; i++) {
        float z[N];
        lane_share(z, row_of<float>(b.z, i), b.r.experts);
        if (i > from)
            of = packed_row_at(b.in, b.s, b.k, i);
        int32_t mine = of.owner / b.k.cohort;
        const int32_t *support = support_of(b.p, b.layer, mine);
        bool tested = of.path != PATH_COLD && support[words] == SUPPORT_HOLDS;
        if (mine != cohort) { /* a cohort's rows are neighbours */
            if (lane == 0 && i > from)
                b.range[cohort].last = i;
            if (lane == 0 && (i > from || before < mine * b.k.cohort))
                b.range[mine].first = i;
            if (i > from)
                add_tally(&b.range[cohort], t);
            t = tally{};
            cohort = mine;
        }
        if (!of.counts) {
            if (lane == 0)
                b.floor[i] = -1;
            continue;
        }
        universe<N> u;
        universe_score(u, z);
        universe_open(u, bias, whole);
        universe_limit(u, b.g, room);
        test_row(b, i, u, tested ? support : NULL, (uint8_t *)room, t);
    }
    if (lane == 0 && after >= (cohort + 1) * b.k.cohort)
        b.range[cohort].last = to;
    add_tally(&b.range[cohort], t);
}

/* ---- construction */

/* A block's workshop. Values are in fixed point, never negative. Each block of a cluster adds those of its rows up in
 * `low` and `high`, in two banks by turns, so that one may be cleared while others still read the other. */
typedef struct bench {
    uint32_t low[2][SUM_TREE_EXPERTS], high[2][SUM_TREE_EXPERTS];
    uint64_t value[SUM_TREE_EXPERTS]; /* over the whole cluster */
    uint64_t rival[SUM_TREE_EXPERTS]; /* values of the experts that may join, */
    uint16_t name[SUM_TREE_EXPERTS];  /* and who they are */
    uint32_t set[WORDS_MOST], may[WORDS_MOST];
    int32_t lead, under[2], all_under;
} bench;

static __device__ __forceinline__ bool in_set(const bench *w, int e)
{
    return w->set[e >> 5] >> (e & 31) & 1;
}

/* 64-bit sums in shared memory by 32-bit atomics, which the hardware has. */
static __device__ __forceinline__ void add_value(bench *w, int bank, int e, int64_t x)
{
    uint32_t low = (uint32_t)x, old = atomicAdd(&w->low[bank][e], low);
    uint32_t high = (uint32_t)(x >> 32) + (old + low < old);
    if (high)
        atomicAdd(&w->high[bank][e], high);
}

/* All threads of the cohort's blocks meet. */
template <int BLOCKS> static __device__ __forceinline__ void meet_all()
{
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1) {
        cluster_meet();
        return;
    }
#endif
    __syncthreads();
}

template <int BLOCKS> static __device__ __forceinline__ uint32_t word_of(const void *at, int block)
{
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1)
        return (uint32_t)cluster_load(shared_at(at), block);
#endif
    (void)block;
    return *(const uint32_t *)at;
}

/* The sums over all blocks of what `bank` gathered; clears the other bank. */
template <int BLOCKS> static __device__ void gather(bench *w, int bank, int experts)
{
    meet_all<BLOCKS>();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        uint64_t sum = 0;
#pragma unroll
        for (int k = 0; k < BLOCKS; k++)
            sum += (uint64_t)word_of<BLOCKS>(&w->high[bank][e], k) << 32 | word_of<BLOCKS>(&w->low[bank][e], k);
        w->value[e] = sum;
        w->low[bank ^ 1][e] = w->high[bank ^ 1][e] = 0;
    }
    if (threadIdx.x == blockDim.x - 1) {
        int32_t sum = 0;
#pragma unroll
        for (int k = 0; k < BLOCKS; k++)
            sum += (int32_t)word_of<BLOCKS>(&w->under[bank], k);
        w->all_under = sum;
        w->under[bank ^ 1] = 0;
    }
    __syncthreads();
}

/* Adds the best `most` experts not in the set by value, only those of positive value where `positive`; how many. An
 * expert is among them iff fewer than `most` others come before it; LANES lanes count. */
static __device__ int add_best(bench *w, int experts, int most, bool positive)
{
    enum { LANES = 4 };
    int lane = threadIdx.x % WARP, part = threadIdx.x % LANES;
    for (int e = threadIdx.x; e < (experts + 31) / 32 * 32; e += blockDim.x) {
        bool may = e < experts && !in_set(w, e) && (w->value[e] > 0 || !positive);
        uint32_t word = __ballot_sync(EVERY_LANE, may);
        if (lane == 0)
            w->may[e / 32] = word;
    }
    __syncthreads();
    int rivals = 0;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) { /* the rivals in order */
        int at = __popc(w->may[e / 32] & ((1u << lane) - 1));
        for (int k = 0; k < e / 32; k++)
            at += __popc(w->may[k]);
        if (w->may[e / 32] >> lane & 1) {
            w->rival[at] = w->value[e];
            w->name[at] = (uint16_t)e;
        }
    }
    for (int k = 0; k < (experts + 31) / 32; k++)
        rivals += __popc(w->may[k]);
    __syncthreads();
    for (int base = 0; base < rivals; base += blockDim.x / LANES) {
        int i = base + threadIdx.x / LANES, before = 0;
        uint64_t mine = i < rivals ? w->rival[i] : 0;
#pragma unroll 4
        for (int x = part; x < rivals; x += LANES)
            before += w->rival[x] + (x < i) > mine;
        for (int d = 1; d < LANES; d *= 2)
            before += __shfl_xor_sync(EVERY_LANE, before, d);
        if (i < rivals && before < most && part == 0)
            atomicOr(&w->set[w->name[i] >> 5], 1u << (w->name[i] & 31));
    }
    __syncthreads();
    return rivals < most ? rivals : most;
}

/* This thread's rows below the floor, and what each expert outside would do for them. done: rows that have been above;
 * they stay so, since the set only grows. */
static __device__ void weigh(bench *w, int bank, const building &b, int64_t from, int64_t last, int64_t step,
                             uint64_t *done)
{
    int under = 0, k = 0;
    for (int64_t t = from; t < last; t += step, k++) {
        uint64_t bit = k < 64 ? 1ull << k : 0;
        if (*done & bit)
            continue;
        const uint16_t *id = b.id + t;
        const float *score = b.score + t;
        float floor = b.floor[t], covered = 0;
        if (floor >= 0) {
#pragma unroll 8
            for (int j = 0; j < b.width; j++) {
                int e = id[j * b.stride];
                float s = score[j * b.stride];
                covered = e != NOBODY && in_set(w, e) ? __fadd_rn(covered, s) : covered;
            }
        }
        float need = __fsub_rn(floor, covered);
        if (!(need > 0)) {
            *done |= bit;
            continue;
        }
        under++;
#pragma unroll 8
        for (int j = 0; j < b.width; j++) {
            int e = id[j * b.stride];
            float s = score[j * b.stride];
            if (e == NOBODY || in_set(w, e))
                continue;
            int64_t gain = atlas_fixed(__fmul_rn(b.a.mass_weight, s < need ? s : need));
            if (__fadd_rn(covered, s) >= floor)
                gain += ATLAS_ONE;
            add_value(w, bank, e, gain);
        }
    }
    under = __reduce_add_sync(EVERY_LANE, under);
    if (threadIdx.x % WARP == 0 && under > 0)
        atomicAdd(&w->under[bank], under);
}

/* Builds the support into each block's set; false: it could not reach q. */
template <int BLOCKS> static __device__ bool build(bench *w, const building &b, const cohort_range &range, int *rounds)
{
    int allowed = atlas_allowed(range.rows, b.a.covered_share), bank = 0;
    int64_t from = range.first + (int)(blockIdx.x % BLOCKS * blockDim.x + threadIdx.x), step = BLOCKS * blockDim.x;
    uint64_t done = 0;
    bool reached = false;
    for (int64_t t = from; t < range.last; t += step)
        if (b.floor[t] >= 0)
#pragma unroll 8
            for (int j = 0; j < b.width; j++) {
                int e = b.id[j * b.stride + t];
                if (e != NOBODY)
                    add_value(w, bank, e, atlas_fixed(b.score[j * b.stride + t]));
            }
    gather<BLOCKS>(w, bank, b.r.experts);
    add_best(w, b.r.experts, b.a.budget, false);
    for (;;) {
        bank ^= 1;
        weigh(w, bank, b, from, range.last, step, &done);
        gather<BLOCKS>(w, bank, b.r.experts);
        reached = w->all_under <= allowed;
        if (reached)
            break;
        ++*rounds;
        if (add_best(w, b.r.experts, b.a.repair_step, true) == 0)
            break;
    }
    meet_all<BLOCKS>(); /* no block leaves while others read its values */
    return reached;
}

template <int BLOCKS>
static __global__ void __launch_bounds__(BLOCKS > 1 ? SPREAD_THREADS : BUILD_THREADS, 1)
    build_kernel(const __grid_constant__ building b)
{
    __shared__ bench w;
    int cohort = blockIdx.x / BLOCKS, words = (int)b.p.support.cols - 1, slot_count = b.s.slot_count;
    bool first_block = blockIdx.x % BLOCKS == 0;
    const slot *all = (const slot *)b.s.slot.data;
    if (threadIdx.x == 0)
        w.lead = slot_count;
    if (threadIdx.x < WORDS_MOST)
        w.set[threadIdx.x] = 0;
    if (threadIdx.x < 2)
        w.under[threadIdx.x] = 0;
    for (int e = threadIdx.x; e < b.r.experts; e += blockDim.x)
        w.low[0][e] = w.high[0][e] = 0;
    __syncthreads();
    /* behind the test, which waits before it lets this begin: the slots and the support are as they were */
    int32_t *support = support_of(b.p, b.layer, cohort), flag = __ldcg(support + words);
    int end = (cohort + 1) * b.k.cohort < slot_count ? (cohort + 1) * b.k.cohort : slot_count;
    for (int i = cohort * b.k.cohort + threadIdx.x; i < end; i += blockDim.x)
        if (__ldcg(&all[i].path) >= PATH_COLD)
            atomicMin(&w.lead, i);
    __syncthreads();
    const slot *lead = w.lead < slot_count ? all + w.lead : NULL;
    bool cold = lead && __ldcg(&lead->path) == PATH_COLD;
    int32_t iteration = lead ? __ldcg(&lead->iteration) : 0, since = lead ? __ldcg(&lead->since_update) : 0;
    after_previous();
    let_next();
    cohort_range range = b.range[cohort];
    meet_all<BLOCKS>(); /* every thread has read range and flag */
    if (first_block && threadIdx.x == 0)
        b.range[cohort] = cohort_range{};
    if (!lead)
        return;
    bool tested = !cold && flag == SUPPORT_HOLDS;
    bool wanted = cold || slot_update_due(iteration, since, &b.k);
    bool rebuilt = tested && !wanted && range.under > atlas_allowed(range.rows, b.a.covered_share);
    bool made = (wanted || rebuilt) && range.rows > 0;
    int rounds = 0;
    if (made)
        flag = build<BLOCKS>(&w, b, range, &rounds) ? SUPPORT_HOLDS : SUPPORT_UNIVERSE;
    if (first_block && threadIdx.x < WARP) {
        int lane = threadIdx.x, size = 0;
        for (int k = lane; k < words; k += WARP) {
            if (made)
                support[k] = (int32_t)w.set[k];
            size += __popc((uint32_t)support[k]);
        }
        size = __reduce_add_sync(EVERY_LANE, size);
        if (lane == 0) {
            layer_log *log = log_of(b.p, b.layer, cohort);
            if (made) {
                support[words] = flag;
                log->updated = !rebuilt;
            }
            if (tested) {
                log->tested = range.rows;
                log->under = range.under;
                log->covered = (float)((double)range.covered / (double)ATLAS_ONE);
                log->rebuilt = rebuilt;
            }
            log->rounds += rounds;
            log->universe = flag == SUPPORT_UNIVERSE;
            log->support = !cold && flag == SUPPORT_HOLDS ? size : b.r.experts;
        }
    }
}

template <int N> static status launch_test(cuda *c, building b)
{
    const int count = warps<N>::COUNT;
    b.g = grouping_of<N>(b.r);
    return launch(c, "coverage test", test_kernel<N>, cuda_grid(c, (b.in.fresh.rows + count - 1) / count, WAVES),
                  (unsigned)warps<N>::THREADS, count * (size_t)warps<N>::BYTES, b);
}

extern "C" status cuda_support(backend *b, plans *p, int layer, const tensor *z, const tensor *bias, const batch *in,
                               const slots *s, const route_rule *r, const atlas_rule *a, const block_rule *k)
{
    if (!k->restrict_experts || p->cohort_count == 0)
        return OK;
    cuda *c = cuda_of(b);
    int width = r->top_k + a->extra < r->experts ? r->top_k + a->extra : r->experts;
    size_t rows = (size_t)in->fresh.rows;
    void *room;
    assert(z->type == F32 && bias->type == F32 && z->cols == r->experts);
    status st = universe_fits(r);
    if (st == OK)
        st = cuda_grow(c, &c->ranges, sizeof(cohort_range) * (size_t)p->cohort_count, "the cohorts of the Atlas");
    if (st == OK)
        st = cuda_scratch(c, &room, rows * ((size_t)width * (sizeof(float) + sizeof(uint16_t)) + sizeof(float)) + 256);
    if (st != OK)
        return st;
    building g = {*p, layer, *z, (const float *)bias->data, *in, *s, *r, *a, *k};
    g.width = width;
    g.range = (cohort_range *)c->ranges.data;
    g.stride = (int64_t)rows;
    g.floor = (float *)room;
    g.score = g.floor + rows;
    g.id = (uint16_t *)(g.score + rows * (size_t)width);
    g.settled = c->settled;
    UNIVERSE_LAUNCH(st, z, g.bias, launch_test, (c, g));
    if (st != OK)
        return st;
    bool large = c->overlaps && (int64_t)k->cohort * k->block_size > SMALL_ROWS;
    st = large ? launch_clusters(c, "support", build_kernel<SPREAD>, (unsigned)p->cohort_count * SPREAD, SPREAD_THREADS,
                                 0, SPREAD, g)
               : launch(c, "support", build_kernel<1>, (unsigned)p->cohort_count, BUILD_THREADS, 0, g);
    c->settled = st == OK;
    return st;
}
