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
    BUILD_THREADS = 512, /* of a small cohort's block */
    SPREAD_THREADS = 1024,
    SPREAD = 8,       /* blocks of a large cohort's cluster */
    SMALL_ROWS = 256, /* of a cohort, at most */
    WORDS_MOST = SUM_TREE_EXPERTS / 32,
    PARTS = 4, /* lanes of a row that is weighed, each with */
    EACH = 4,  /* neighbouring candidates at a time */
    ABREAST = PARTS * EACH,
    BESIDE = WARP / PARTS,     /* rows that a warp has at a time */
    LANES = 4,                 /* of a rival */
    NEAR = WARP / LANES,       /* rivals of a warp */
    APART = 4,                 /* puts an expert's places into different banks, where experts are a multiple of 32 */
    NOBODY = SUM_TREE_EXPERTS, /* no candidate; a support that is being built holds it */
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
    int width, pitch; /* K + m; up to a multiple of ABREAST */
    cohort_range *range;
    int copies;   /* of the places where a build's values gather */
    uint16_t *id; /* [fresh rows, pitch]: candidates; NOBODY behind the last */
    float *score; /* theirs; 0 there */
    float *floor; /* of each fresh row: r_t; -1: not a row of an active block, it has no candidates */
    bool settled; /* cuda.settled, of the kernel before the test */
} building;

static __device__ __forceinline__ int32_t owner_of(const building &b, int64_t i)
{
    return __ldcg((const int32_t *)b.in.slot.data + __ldcg((const int32_t *)b.in.fresh.data + i));
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

/* One row of an active block; word: this lane's of the support that it is tested against, where it is tested. */
template <int N>
static __device__ __forceinline__ void test_row(const building &b, int i, const universe<N> &u, bool tested,
                                                uint32_t word, uint8_t *room, tally &t)
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
    for (int j = lane; j < b.pitch; j += WARP)
        taken[j] = NOBODY;
    __syncwarp();
#pragma unroll 2
    for (int j = 0; j < b.width; j++) {
        uint32_t id;
        if (queue_take(q, &id))
            taken[j] = (uint16_t)id;
    }
    __syncwarp();
    for (int base = 0; base < b.pitch; base += WARP) { /* a lane a candidate */
        int j = base + lane, id = j < b.pitch ? taken[j] : NOBODY;
        float score = id != NOBODY ? scores[id] : 0;
        uint32_t mine = __shfl_sync(EVERY_LANE, word, id / 32 % WARP);
        uint32_t inside = __ballot_sync(EVERY_LANE, tested && id != NOBODY && (mine >> id % 32 & 1));
        if (j < b.pitch) {
            b.id[(int64_t)i * b.pitch + j] = (uint16_t)id;
            b.score[(int64_t)i * b.pitch + j] = score;
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
    if (tested) {
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
    int32_t before = -1, after = INT32_MAX, cohort = -1, flag = 0;
    uint32_t word = 0; /* this lane's of the cohort's support */
    packed_row of = {};
    auto turn_to = [&](int32_t mine) {
        const int32_t *support = support_of(b.p, b.layer, mine);
        cohort = mine;
        flag = support[words];
        word = lane < words ? (uint32_t)support[lane] : 0;
    };
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
    turn_to(of.owner / b.k.cohort);
    if (lane == 0 && before < cohort * b.k.cohort)
        b.range[cohort].first = from;
    tally t = {};
    for (int i = from; i < to; i++) {
        float z[N];
        lane_share(z, row_of<float>(b.z, i), b.r.experts);
        if (i > from)
            of = packed_row_at(b.in, b.s, b.k, i);
        int32_t mine = of.owner / b.k.cohort;
        if (mine != cohort) { /* a cohort's rows are neighbours */
            add_tally(&b.range[cohort], t);
            if (lane == 0)
                b.range[cohort].last = b.range[mine].first = i;
            t = tally{};
            turn_to(mine);
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
        test_row(b, i, u, of.path != PATH_COLD && flag == SUPPORT_HOLDS, word, (uint8_t *)room, t);
    }
    if (lane == 0 && after >= (cohort + 1) * b.k.cohort)
        b.range[cohort].last = to;
    add_tally(&b.range[cohort], t);
}

/* ---- construction */

/* A block's workshop. Values are in fixed point, never negative. What a block's rows would gain goes into `low` and
 * `high`, where neighbouring rows, which often choose alike, have `copies` places an expert; the sums of it each block
 * of a cluster sends to all, in two banks by turns, so that one may be written while the other is still read. */
typedef struct bench {
    uint64_t *inbox;      /* [2, blocks, experts + 1]: each block's sums, and its rows below the floor */
    uint32_t arrived;     /* barriers of the two banks */
    uint64_t *value;      /* over the whole cluster */
    uint64_t *rival;      /* values of the experts that may join, 0 behind them, */
    uint16_t *name;       /* and who they are */
    uint32_t *low, *high; /* [copies, experts + APART]: the halves of 64 bits; zero but where rows are weighed */
    int copies;
    uint32_t *set, *may; /* [WORDS_MOST]; set has a word more, for NOBODY */
    int32_t *under;      /* rows of this block below the floor */
    int32_t *rivals;     /* how many */
} bench;

static inline int copies_of(int experts)
{
    return experts <= 256 ? 8 : experts <= 512 ? 4 : 2;
}

/* Bytes of a block's workshop. */
static inline size_t bench_bytes(int experts, int blocks)
{
    int values = 2 * experts + NEAR + (blocks > 1 ? 2 * blocks * (experts + 1) : 0);
    int halves = 2 * copies_of(experts) * (experts + APART);
    return (size_t)values * sizeof(uint64_t) + (size_t)halves * sizeof(uint32_t) + (size_t)experts * sizeof(uint16_t);
}

/* A lane's candidates of a row. */
typedef struct share {
    uint32_t id[EACH];
    float score[EACH];
    uint32_t inside; /* bit n: candidate n is in the set */
} share;

/* set: a shared address. */
static __device__ __forceinline__ share take_share(const building &b, uint32_t set, int row, int j)
{
    uint32_t at = (uint32_t)(row * b.pitch + j);
    ushort4 id = *(const ushort4 *)(b.id + at);
    float4 score = *(const float4 *)(b.score + at);
    share x = {{id.x, id.y, id.z, id.w}, {score.x, score.y, score.z, score.w}, 0};
    uint32_t word[EACH];
#pragma unroll
    for (int n = 0; n < EACH; n++)
        x.id[n] = min(x.id[n], (uint32_t)NOBODY); /* rows of no active block hold anything */
#pragma unroll
    for (int n = 0; n < EACH; n++)
        word[n] = shared_load4(set + x.id[n] / 32 * 4);
#pragma unroll
    for (int n = 0; n < EACH; n++)
        x.inside |= (word[n] >> x.id[n] % 32 & 1) << n;
    return x;
}

/* What one round weighs: this block's rows below the floor, and what each expert outside would do for them; first: all
 * rows, and the scores. done: this lane's rows that have been above the floor; they stay so, as the set only grows. */
template <int BLOCKS>
static __device__ __forceinline__ void weigh(const bench &w, const building &b, const cohort_range &range, bool first,
                                             uint32_t &done)
{
    int lane = threadIdx.x % WARP, part = lane % PARTS, under = 0;
    int step = (int)(blockDim.x / WARP) * BLOCKS * BESIDE;
    int from = range.first + (int)(threadIdx.x / WARP * BLOCKS + blockIdx.x % BLOCKS) * BESIDE; /* neighbours a warp */
    uint32_t set = shared_at(w.set), copy = (uint32_t)(lane / PARTS & (w.copies - 1));
    uint32_t low_at = shared_at(w.low + copy * (uint32_t)(b.r.experts + APART)), bit = 1;
    uint32_t to_high = shared_at(w.high) - shared_at(w.low);
#pragma unroll 1
    for (; from < range.last; from += step, bit <<= 1) {
        int row = from + lane / PARTS, mine = row < range.last ? row : from;
        float floor = b.floor[mine], covered = 0;
        bool open = row < range.last && floor >= 0 && !(done & bit);
        if (!__any_sync(EVERY_LANE, open))
            continue;
        share x = take_share(b, set, mine, part * EACH);
        for (int j = part * EACH;;) {
#pragma unroll
            for (int p = 0; p < PARTS; p++) { /* in order: from part to part */
                float sum = covered;
#pragma unroll
                for (int n = 0; n < EACH; n++)
                    sum = __fadd_rn(sum, x.inside >> n & 1 ? x.score[n] : 0.0f);
                covered = __shfl_sync(EVERY_LANE, sum, (lane & ~(PARTS - 1)) | p);
            }
            j += ABREAST;
            if (j >= b.pitch)
                break;
            x = take_share(b, set, mine, j);
        }
        float need = __fsub_rn(floor, covered);
        if (!first) {
            open = open && need > 0;
            done |= open ? 0 : bit;
            under += open && part == 0;
        }
        if (!__any_sync(EVERY_LANE, open))
            continue;
        for (int j = part * EACH; j < b.pitch; j += ABREAST) {
            if (b.pitch > ABREAST)
                x = take_share(b, set, mine, j);
            uint32_t place[EACH], low[EACH], high[EACH], old[EACH];
            bool adds[EACH];
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                float s = x.score[n];
                int64_t gain = atlas_fixed(first ? s : __fmul_rn(b.a.mass_weight, s < need ? s : need));
                low[n] = (uint32_t)gain;
                high[n] = (uint32_t)(gain >> 32) + (!first && __fadd_rn(covered, s) >= floor);
                place[n] = low_at + x.id[n] * 4;
                adds[n] = open && !(x.inside >> n & 1);
            }
#pragma unroll
            for (int n = 0; n < EACH; n++) /* 32-bit atomics, which the hardware has, all under way together */
                old[n] = shared_add_if(adds[n], place[n], low[n]);
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                high[n] += old[n] + low[n] < old[n];
                shared_add_if(adds[n] && high[n] > 0, place[n] + to_high, high[n]);
            }
        }
    }
    under = __reduce_add_sync(EVERY_LANE, under);
    if (lane == 0 && under > 0)
        atomicAdd(w.under, under);
}

/* What an expert's places hold; they are empty then. */
static __device__ __forceinline__ uint64_t collect(const bench &w, int e, int experts)
{
    uint64_t sum = 0;
#pragma unroll 4
    for (int c = 0, at = e; c < w.copies; c++, at += experts + APART) {
        sum += (uint64_t)w.high[at] << 32;
        sum += w.low[at];
        w.low[at] = w.high[at] = 0;
    }
    return sum;
}

/* An expert's value over the whole cluster, and whether it may join: one outside the set, of positive value where
 * `positive`. Whole warps call. */
static __device__ __forceinline__ void settle(const bench &w, int e, int experts, uint64_t value, bool positive)
{
    uint32_t word = __ballot_sync(EVERY_LANE, e < experts && (value > 0 || !positive)) & ~w.set[e / 32];
    if (e < experts)
        w.value[e] = value;
    if (threadIdx.x % WARP == 0)
        w.may[e / 32] = word;
}

/* What all blocks weighed in round `turn`, of the experts outside the set, which `inside` are in; how many rows of the
 * cohort are below the floor. */
template <int BLOCKS>
static __device__ __forceinline__ int32_t gather(const bench &w, int turn, int experts, int inside, bool positive)
{
    int whole = (experts + 31) / 32 * 32, under = 0;
    __syncthreads();
    if (BLOCKS == 1) {
        under = *w.under;
        for (int e = threadIdx.x; e < whole; e += blockDim.x)
            settle(w, e, experts, e < experts ? collect(w, e, experts) : 0, positive);
    }
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1) {
        int bank = turn % 2, row = experts + 1;
        uint64_t *box = w.inbox + bank * BLOCKS * row;
        uint32_t mine = shared_at(box + blockIdx.x % BLOCKS * row), barrier = w.arrived + 8 * bank;
        auto outside = [&](int e) { return !(w.set[e / 32] >> e % 32 & 1); };
        for (int e = threadIdx.x; e <= experts; e += blockDim.x) {
            if (e < experts && !outside(e))
                continue;
            uint64_t sum = e < experts ? collect(w, e, experts) : (uint64_t)*w.under;
#pragma unroll
            for (int k = 0; k < BLOCKS; k++)
                cluster_send8(mine + 8 * e, barrier, k, sum);
        }
        if (threadIdx.x == 0)
            barrier_expect(barrier, (uint32_t)(BLOCKS * (row - inside)) * sizeof *box);
        barrier_wait(barrier, turn / 2 % 2);
        for (int e = threadIdx.x; e < whole; e += blockDim.x) {
            bool counts = e < experts && outside(e);
            uint64_t sum = 0;
#pragma unroll
            for (int k = 0; k < BLOCKS; k++)
                sum += counts ? box[k * row + e] : 0;
            settle(w, e, experts, sum, positive);
        }
#pragma unroll
        for (int k = 0; k < BLOCKS; k++)
            under += (int32_t)box[k * row + experts];
    }
#endif
    __syncthreads();
    if (threadIdx.x == 0)
        *w.under = 0; /* all threads meet before rows are weighed again */
    return under;
}

/* Adds the best `most` of those that may join; how many. An expert is among them iff fewer than `most` others come
 * before it; LANES lanes count. */
static __device__ __forceinline__ int add_best(const bench &w, int experts, int most)
{
    int lane = threadIdx.x % WARP, part = threadIdx.x % LANES, here = 0, to = 0;
    if ((int)threadIdx.x - lane < experts) {
        here = lane * 32 < experts ? __popc(w.may[lane]) : 0;
        to = warp_prefix(here, lane);
    }
    if (threadIdx.x < WARP) {
        int all = __shfl_sync(EVERY_LANE, to, WARP - 1);
        *w.rivals = all;
        if (lane < NEAR)
            w.rival[all + lane] = 0;
    }
    for (int e = threadIdx.x; e - lane < experts; e += blockDim.x) { /* the rivals in order */
        uint32_t word = w.may[e / 32];
        int at = __shfl_sync(EVERY_LANE, to - here, e / 32) + __popc(word & ((1u << lane) - 1));
        if (word >> lane & 1) {
            w.rival[at] = w.value[e];
            w.name[at] = (uint16_t)e;
        }
    }
    __syncthreads();
    const int rivals = *w.rivals;
    for (int near = threadIdx.x / WARP * NEAR; near < rivals; near += blockDim.x / LANES) {
        int i = near + lane / LANES, before = 0; /* the warp's are near .. near + NEAR - 1 */
        int64_t mine = (int64_t)w.rival[i];
        auto above = [&](int x, int64_t value) { return (int)((uint64_t)(value - (int64_t)w.rival[x]) >> 63); };
#pragma unroll 4
        for (int x = part; x < near; x += LANES)
            before += above(x, mine - 1);
#pragma unroll
        for (int x = part; x < NEAR; x += LANES)
            before += above(near + x, mine - (near + x < i));
#pragma unroll 4
        for (int x = near + NEAR + part; x < rivals; x += LANES)
            before += above(x, mine);
#pragma unroll
        for (int d = 1; d < LANES; d *= 2)
            before += __shfl_xor_sync(EVERY_LANE, before, d);
        if (i < rivals && before < most && part == 0)
            atomicOr(&w.set[w.name[i] >> 5], 1u << (w.name[i] & 31));
    }
    __syncthreads();
    return rivals < most ? rivals : most;
}

/* Builds the support into each block's set; false: it could not reach q. */
template <int BLOCKS>
static __device__ __forceinline__ bool build(const bench &w, const building &b, const cohort_range &range, int *rounds)
{
    int allowed = atlas_allowed(range.rows, b.a.covered_share), size = 0;
    uint32_t done = 0;
#pragma unroll 1
    for (int turn = 0;; turn++) {
        bool first = turn == 0;
        weigh<BLOCKS>(w, b, range, first, done);
        int under = gather<BLOCKS>(w, turn, b.r.experts, size, !first);
        if (!first && under <= allowed)
            return true;
        *rounds += !first;
        int more = add_best(w, b.r.experts, first ? b.a.budget : b.a.repair_step);
        if (more == 0 && !first)
            return false;
        size += more;
    }
}

/* The slot that speaks for a cohort: its first one in this forward. */
typedef struct leader {
    bool there, cold;
    int32_t iteration, since; /* of its last update */
} leader;

/* All threads call; at: shared. Loads come past L1: this may stand before after_previous(). */
static __device__ __forceinline__ leader find_leader(const building &b, int cohort, int32_t *at)
{
    const slot *all = (const slot *)b.s.slot.data;
    int slot_count = b.s.slot_count, end = (cohort + 1) * b.k.cohort;
    end = end < slot_count ? end : slot_count;
    if (threadIdx.x == 0)
        *at = slot_count;
    __syncthreads();
    for (int i = cohort * b.k.cohort + threadIdx.x; i < end; i += blockDim.x)
        if (__ldcg(&all[i].path) >= PATH_COLD)
            atomicMin(at, i);
    __syncthreads();
    const slot *first = all + *at;
    if (*at >= slot_count)
        return leader{};
    return leader{true, __ldcg(&first->path) == PATH_COLD, __ldcg(&first->iteration), __ldcg(&first->since_update)};
}

/* What becomes of a support, whose flag was `flag`. */
typedef struct verdict {
    bool tested, rebuilt, made;
} verdict;

static __device__ __forceinline__ verdict judge(const building &b, const leader &lead, int32_t flag,
                                                const cohort_range &range)
{
    verdict v;
    bool wanted = lead.cold || slot_update_due(lead.iteration, lead.since, &b.k);
    v.tested = !lead.cold && flag == SUPPORT_HOLDS;
    v.rebuilt = v.tested && !wanted && range.under > atlas_allowed(range.rows, b.a.covered_share);
    v.made = (wanted || v.rebuilt) && range.rows > 0;
    return v;
}

/* The plan and its log, by a warp; flag: the new one, word: this lane's of the old support. */
static __device__ __forceinline__ void write_plan(const building &b, int cohort, const leader &lead, const verdict &v,
                                                  const cohort_range &range, const uint32_t *set, uint32_t word,
                                                  int32_t flag, int rounds)
{
    int lane = threadIdx.x % WARP, words = (int)b.p.support.cols - 1;
    int32_t *support = support_of(b.p, b.layer, cohort);
    if (v.made && lane < words)
        support[lane] = (int32_t)(word = set[lane]);
    int size = __reduce_add_sync(EVERY_LANE, __popc(word));
    if (lane != 0)
        return;
    layer_log *log = log_of(b.p, b.layer, cohort);
    if (v.made) {
        support[words] = flag;
        log->updated = !v.rebuilt;
    }
    if (v.tested) {
        log->tested = range.rows;
        log->under = range.under;
        log->covered = (float)((double)range.covered / (double)ATLAS_ONE);
        log->rebuilt = v.rebuilt;
    }
    if (rounds > 0)
        log->rounds += rounds;
    log->universe = flag == SUPPORT_UNIVERSE;
    log->support = !lead.cold && flag == SUPPORT_HOLDS ? size : b.r.experts;
}

/* What of a workshop does not depend on the number of experts. */
typedef struct bench_head {
    uint32_t set[WORDS_MOST + 1], may[WORDS_MOST];
    int32_t under, rivals, lead;
    uint64_t arrived[2];
} bench_head;

/* In `room`; all threads call and meet afterwards. */
template <int BLOCKS> static __device__ __forceinline__ bench open_bench(const building &b, void *room, bench_head *h)
{
    const int experts = b.r.experts, places = (experts + APART) * b.copies;
    bench w = {.copies = b.copies, .set = h->set, .may = h->may, .under = &h->under, .rivals = &h->rivals};
    w.value = (uint64_t *)room;
    w.rival = w.value + experts;
    w.inbox = w.rival + experts + NEAR;
    w.low = (uint32_t *)(w.inbox + (BLOCKS > 1 ? 2 * BLOCKS * (experts + 1) : 0));
    w.high = w.low + places;
    w.name = (uint16_t *)(w.high + places);
    w.arrived = shared_at(h->arrived);
    if (threadIdx.x <= WORDS_MOST)
        h->set[threadIdx.x] = threadIdx.x < NOBODY / 32 ? 0 : 1;
    if (threadIdx.x == 0)
        h->under = 0;
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1 && threadIdx.x == 0) {
        barrier_init(w.arrived, 1);
        barrier_init(w.arrived + 8, 1);
        barrier_init_done();
    }
#endif
    for (int i = threadIdx.x; i < 2 * places; i += blockDim.x)
        w.low[i] = 0;
    return w;
}

template <int BLOCKS>
static __global__ void __launch_bounds__(BLOCKS > 1 ? SPREAD_THREADS : BUILD_THREADS, 1)
    build_kernel(const __grid_constant__ building b)
{
    extern __shared__ __align__(16) uint32_t shared[];
    __shared__ bench_head head;
    __shared__ cohort_range found;
    bench w = open_bench<BLOCKS>(b, shared, &head);
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1)
        cluster_arrive(); /* the barriers are ready */
#endif
    int cohort = blockIdx.x / BLOCKS, words = (int)b.p.support.cols - 1, rounds = 0;
    bool first_block = blockIdx.x % BLOCKS == 0;
    /* behind the test, which waits before it lets this begin: the slots and the support are as they were */
    const int32_t *support = support_of(b.p, b.layer, cohort);
    int32_t flag = __ldcg(support + words);
    uint32_t word = threadIdx.x < words ? (uint32_t)__ldcg(support + threadIdx.x) : 0;
    leader lead = find_leader(b, cohort, &head.lead);
    after_previous();
    let_next();
    if (threadIdx.x == 0)
        found = b.range[cohort];
    __syncthreads();
#if __CUDA_ARCH__ >= 900
    if (BLOCKS > 1) {
        cluster_wait();
        cluster_arrive(); /* this block knows range and flag */
    }
#endif
    if (lead.there) {
        cohort_range range = found;
        verdict v = judge(b, lead, flag, range);
        if (v.made)
            flag = build<BLOCKS>(w, b, range, &rounds) ? SUPPORT_HOLDS : SUPPORT_UNIVERSE;
        if (BLOCKS == 1 && threadIdx.x < WARP)
            write_plan(b, cohort, lead, v, range, head.set, word, flag, rounds);
#if __CUDA_ARCH__ >= 900
        if (BLOCKS > 1) {
            cluster_wait();
            if (first_block && threadIdx.x < WARP)
                write_plan(b, cohort, lead, v, range, head.set, word, flag, rounds);
        }
#endif
    }
    if (first_block && threadIdx.x == 0)
        b.range[cohort] = cohort_range{};
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
    int pitch = (width + ABREAST - 1) / ABREAST * ABREAST;
    size_t candidates = rows * (size_t)pitch;
    if (st == OK)
        st = cuda_scratch(c, &room, candidates * (sizeof(float) + sizeof(uint16_t)) + rows * sizeof(float) + 256);
    if (st != OK)
        return st;
    building g = {*p, layer, *z, (const float *)bias->data, *in, *s, *r, *a, *k};
    g.width = width;
    g.pitch = pitch;
    g.copies = copies_of(r->experts);
    g.range = (cohort_range *)c->ranges.data;
    g.score = (float *)room;
    g.floor = g.score + candidates;
    g.id = (uint16_t *)(g.floor + (rows + 1) / 2 * 2); /* read eight bytes at a time */
    g.settled = c->settled;
    bool large = c->overlaps && (int64_t)k->cohort * k->block_size > SMALL_ROWS;
    UNIVERSE_LAUNCH(st, z, g.bias, launch_test, (c, g));
    if (st != OK)
        return st;
    const int blocks = large ? SPREAD : 1;
    auto kernel = large ? build_kernel<SPREAD> : build_kernel<1>;
    st = cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         (int)bench_bytes(SUM_TREE_EXPERTS, blocks)), /* one limit for all threads */
                    "support", __FILE__, __LINE__);
    if (st != OK)
        return st;
    st = launch_clusters(c, "support", kernel, (unsigned)(p->cohort_count * blocks),
                         large ? SPREAD_THREADS : BUILD_THREADS, bench_bytes(r->experts, blocks), (unsigned)blocks, g);
    c->settled = st == OK;
    return st;
}
