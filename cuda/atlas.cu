/* Expert Atlas on the device: the coverage test and the construction of a support, per cohort and layer. Twin of
 * src/cpu/atlas.c, which has the formulas; supports are bit for bit the same. Sums along a row are fp32, in order; sums
 * over rows are in fixed point (atlas_fixed), so that atomics may come in any order.
 *
 * Two kernels. A warp finds a fresh row's K + m candidates, leaves them in scratch, and tests the row against its
 * cohort's support on the way. Then a block a cohort reads the test's result; most find that the support holds. */
#include "cuda/plans.cuh"
#include "cuda/universe.cuh"

enum { THREADS = 256, WARPS = THREADS / WARP, WAVES = 4, BUILD_MOST = 1024, WORDS_MOST = SUM_TREE_EXPERTS / 32 };

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
    int width;       /* K + m */
    cohort_range *range;
    int32_t *id;     /* [fresh, width], -1 behind the last */
    float *score;    /* [fresh, width] */
    float *floor;    /* [fresh]: r_t; -1: not a row of an active block */
} building;

static __device__ __forceinline__ bool in_set(const uint32_t *set, int e)
{
    return set[e >> 5] >> (e & 31) & 1;
}

static __device__ int32_t cohort_of(const building &b, int64_t i)
{
    return ((const int32_t *)b.in.slot.data)[((const int32_t *)b.in.fresh.data)[i]] / b.k.cohort;
}

static __device__ void add_range(cohort_range *g, int rows, int under, int64_t covered)
{
    if (threadIdx.x % WARP != 0 || rows == 0)
        return;
    atomicAdd(&g->rows, rows);
    if (under > 0)
        atomicAdd(&g->under, under);
    if (covered > 0)
        atomicAdd((unsigned long long *)&g->covered, (unsigned long long)covered);
}

template <int N> static __global__ void candidates_kernel(building b)
{
    extern __shared__ uint32_t shared[];
    int lane = threadIdx.x % WARP, words = (int)b.p.support.cols - 1;
    uint32_t *room = shared + threadIdx.x / WARP * b.r.experts;
    int64_t n = used_rows(b.in.fresh), warps = (int64_t)gridDim.x * WARPS, each = (n + warps - 1) / warps;
    int64_t from = (blockIdx.x * (int64_t)WARPS + threadIdx.x / WARP) * each, to = from + each < n ? from + each : n;
    int32_t cohort = -1;
    int rows = 0, under = 0;
    int64_t share = 0;
    for (int64_t i = from; i < to; i++) { /* neighbours: mostly of one cohort */
        int32_t row = ((const int32_t *)b.in.fresh.data)[i], owner = ((const int32_t *)b.in.slot.data)[row];
        if (owner / b.k.cohort != cohort) {
            if (cohort >= 0)
                add_range(&b.range[cohort], rows, under, share);
            cohort = owner / b.k.cohort;
            rows = under = 0;
            share = 0;
        }
        if (lane == 0 && (i == 0 || cohort_of(b, i - 1) != cohort))
            b.range[cohort].first = (int32_t)i;
        if (lane == 0 && (i == n - 1 || cohort_of(b, i + 1) != cohort))
            b.range[cohort].last = (int32_t)i + 1;
        const slot *sl = (const slot *)b.s.slot.data + owner;
        int32_t position = ((const int32_t *)b.in.position.data)[row];
        if (((const int32_t *)b.in.role.data)[row] == ROW_SEALING || !(sl->fresh >> (position % b.k.block_size) & 1)) {
            if (lane == 0)
                b.floor[i] = -1;
            continue;
        }
        const uint32_t *set = (const uint32_t *)support_of(b.p, b.layer, cohort);
        bool tested = sl->path != PATH_COLD && set[words] == SUPPORT_HOLDS;
        universe<N> u;
        universe_open(u, row_of<float>(b.z, i), b.bias, NULL, b.r.experts);
        if (b.r.top_groups < b.r.groups)
            universe_limit(u, b.r, room);
        uint32_t chosen = 0;
        float sum = 0, have = 0, score = 0;
        for (int j = 0; j < b.width; j++) {
            int id = universe_take(u, &score, &chosen);
            if (id >= 0 && j < b.r.top_k) {
                sum = __fadd_rn(sum, score);
                if (tested && in_set(set, id))
                    have = __fadd_rn(have, score);
            }
            if (lane == 0) {
                b.id[i * b.width + j] = id;
                b.score[i * b.width + j] = score;
            }
        }
        float floor = __fmul_rn(b.a.coverage, sum), all = __fdiv_rn(floor, b.a.coverage);
        if (lane == 0)
            b.floor[i] = floor;
        rows++;
        if (tested) {
            under += have < floor;
            share += atlas_fixed(all > 0 ? __fdiv_rn(have, all) : 1.0f);
        }
    }
    if (cohort >= 0)
        add_range(&b.range[cohort], rows, under, share);
}

/* A block's workshop. */
typedef struct bench {
    uint32_t low[SUM_TREE_EXPERTS], high[SUM_TREE_EXPERTS]; /* of each expert's value: fixed point, never negative */
    uint32_t set[WORDS_MOST];
    int32_t lead, under, added;
} bench;

/* 64-bit sums in shared memory by 32-bit atomics, which the hardware has. */
static __device__ void add_value(bench *w, int e, int64_t x)
{
    uint32_t low = (uint32_t)x, old = atomicAdd(&w->low[e], low), high = (uint32_t)(x >> 32) + (old + low < old);
    if (high)
        atomicAdd(&w->high[e], high);
}

static __device__ uint64_t value_at(const bench *w, int e)
{
    return (uint64_t)w->high[e] << 32 | w->low[e];
}

/* Adds the best `most` experts not in the set by value, only those of positive value where `positive`; how many. An
 * expert is among them iff fewer than `most` others come before it. */
static __device__ int add_best(bench *w, int experts, int most, bool positive)
{
    uint32_t picked = 0; /* bit k: expert threadIdx.x + k * blockDim.x */
    if (threadIdx.x == 0)
        w->added = 0;
    __syncthreads();
    for (int e = threadIdx.x, k = 0; e < experts; e += blockDim.x, k++) {
        uint64_t mine = value_at(w, e);
        if (in_set(w->set, e) || (positive && mine == 0))
            continue;
        int before = 0;
        for (int x = 0; x < experts; x++)
            before += !in_set(w->set, x) && (value_at(w, x) > mine || (value_at(w, x) == mine && x < e));
        picked |= (uint32_t)(before < most) << k;
    }
    __syncthreads();
    for (int e = threadIdx.x, k = 0; e < experts; e += blockDim.x, k++)
        if (picked >> k & 1) {
            atomicOr(&w->set[e >> 5], 1u << (e & 31));
            atomicAdd(&w->added, 1);
        }
    __syncthreads();
    return w->added;
}

static __device__ void clear_values(bench *w, int experts)
{
    for (int e = threadIdx.x; e < experts; e += blockDim.x)
        w->low[e] = w->high[e] = 0;
    if (threadIdx.x == 0)
        w->under = 0;
    __syncthreads();
}

/* The rows below the floor, and what each expert would do for them. */
static __device__ int weigh(bench *w, const building &b, int first, int last)
{
    int under = 0;
    clear_values(w, b.r.experts);
    for (int t = first + threadIdx.x; t < last; t += blockDim.x) {
        const int32_t *id = b.id + (int64_t)t * b.width;
        const float *score = b.score + (int64_t)t * b.width;
        float floor = b.floor[t], covered = 0;
        if (floor < 0) /* not a row of an active block: it has no candidates */
            continue;
        for (int j = 0; j < b.width && id[j] >= 0; j++)
            if (in_set(w->set, id[j]))
                covered = __fadd_rn(covered, score[j]);
        float need = __fsub_rn(floor, covered);
        if (!(need > 0))
            continue;
        under++;
        for (int j = 0; j < b.width && id[j] >= 0; j++) {
            int64_t gain = atlas_fixed(__fmul_rn(b.a.mass_weight, score[j] < need ? score[j] : need));
            if (__fadd_rn(covered, score[j]) >= floor)
                gain += ATLAS_ONE;
            add_value(w, id[j], gain);
        }
    }
    under = __reduce_add_sync(EVERY_LANE, under);
    if (threadIdx.x % WARP == 0 && under > 0)
        atomicAdd(&w->under, under);
    __syncthreads();
    return w->under;
}

/* Builds the support; false: it could not reach q. */
static __device__ bool build(bench *w, const building &b, int first, int last, int rows, int *rounds)
{
    int allowed = atlas_allowed(rows, b.a.covered_share);
    clear_values(w, b.r.experts);
    for (int t = first * b.width + threadIdx.x; t < last * b.width; t += blockDim.x)
        if (b.floor[t / b.width] >= 0 && b.id[t] >= 0)
            add_value(w, b.id[t], atlas_fixed(b.score[t]));
    __syncthreads();
    add_best(w, b.r.experts, b.a.budget, false);
    for (;;) {
        if (weigh(w, b, first, last) <= allowed)
            return true;
        ++*rounds;
        if (add_best(w, b.r.experts, b.a.repair_step, true) == 0)
            return false;
    }
}

static __global__ void build_kernel(building b)
{
    __shared__ bench w;
    int cohort = blockIdx.x, words = (int)b.p.support.cols - 1;
    const slot *all = (const slot *)b.s.slot.data;
    cohort_range range = b.range[cohort];
    if (threadIdx.x == 0)
        w.lead = b.s.slot_count;
    if (threadIdx.x < WORDS_MOST)
        w.set[threadIdx.x] = 0;
    __syncthreads();
    int end = (cohort + 1) * b.k.cohort < b.s.slot_count ? (cohort + 1) * b.k.cohort : b.s.slot_count;
    for (int i = cohort * b.k.cohort + threadIdx.x; i < end; i += blockDim.x)
        if (all[i].path >= PATH_COLD)
            atomicMin(&w.lead, i);
    __syncthreads(); /* every thread has read the range */
    if (threadIdx.x == 0)
        b.range[cohort] = cohort_range{};
    if (w.lead == b.s.slot_count)
        return;
    const slot *lead = all + w.lead;
    int32_t *support = support_of(b.p, b.layer, cohort), flag = support[words];
    bool cold = lead->path == PATH_COLD, tested = !cold && flag == SUPPORT_HOLDS;
    bool wanted = cold || slot_update_due(lead->iteration, lead->since_update, &b.k);
    bool rebuilt = tested && !wanted && range.under > atlas_allowed(range.rows, b.a.covered_share);
    bool made = (wanted || rebuilt) && range.rows > 0;
    int rounds = 0;
    __syncthreads(); /* every thread has read the flag */
    if (made)
        flag = build(&w, b, range.first, range.last, range.rows, &rounds) ? SUPPORT_HOLDS : SUPPORT_UNIVERSE;
    if (threadIdx.x < WARP) {
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

template <int N> static void launch(cuda *c, const building &b)
{
    unsigned grid = cuda_grid(c, (b.in.fresh.rows + WARPS - 1) / WARPS, WAVES);
    candidates_kernel<N><<<grid, THREADS, WARPS * sizeof(uint32_t) * (size_t)b.r.experts, c->stream>>>(b);
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
        st = cuda_scratch(c, &room, rows * ((size_t)width * (sizeof(int32_t) + sizeof(float)) + sizeof(float)) + 256);
    if (st != OK)
        return st;
    building g = {*p, layer, *z, (const float *)bias->data, *in, *s, *r, *a, *k, width, (cohort_range *)c->ranges.data,
                  (int32_t *)room, NULL, NULL};
    g.score = (float *)(g.id + rows * (size_t)width);
    g.floor = g.score + rows * (size_t)width;
    UNIVERSE_LAUNCH(r->experts, launch, (c, g));
    int threads = (int64_t)k->cohort * k->block_size > 1024 ? BUILD_MOST : THREADS;
    build_kernel<<<(unsigned)p->cohort_count, threads, 0, c->stream>>>(g);
    return CUDA_LAUNCHED("support");
}
