/* What one warp chooses from for one row of the router: score and order of every expert, N neighbours a lane (expert e
 * in register e % N of lane e / N). Twin of src/cpu/route.c: the same bits of scores, ties to the lower id. */
#ifndef EPOCH_CUDA_UNIVERSE_CUH
#define EPOCH_CUDA_UNIVERSE_CUH

#include "cuda/device.cuh"

enum { GROUPS_MOST = WARP }; /* a lane holds a group */

template <int N> struct universe {
    float score[N];
    uint32_t order[N]; /* of score + bias; 0: ineligible */
};

/* This lane's experts of a row of `experts` numbers, 0 behind its end. Four at once where N is 4, 8 or 16: then lanes
 * are full or empty and rows start at 16 bytes (UNIVERSE_LAUNCH). */
template <int N> static __device__ __forceinline__ void lane_share(float (&x)[N], const float *row, int experts)
{
    int first = threadIdx.x % WARP * N;
    if constexpr (N >= 4 && N <= 16) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            float4 v = first < experts ? *(const float4 *)(row + first + i) : float4{0, 0, 0, 0};
            x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            x[i] = first + i < experts ? row[first + i] : 0;
    }
}

/* Which of its experts this lane finds in a set of all; NULL: the set of all. */
template <int N> static __device__ __forceinline__ uint32_t lane_set(const int32_t *set, int experts)
{
    int first = threadIdx.x % WARP * N, left = experts - first;
    if (left <= 0)
        return 0;
    uint32_t there = left < 32 ? (1u << left) - 1 : ~0u;
    return set ? there & (uint32_t)set[first / 32] >> (first % 32) : there;
}

/* Adds a lane's experts to a set of all, in device memory. Where many warps do so most are there already: look; where
 * few do, to wait for the look takes longer. */
template <int N> static __device__ __forceinline__ void lane_join(uint32_t *set, uint32_t mine, int words, bool look)
{
    int first = threadIdx.x % WARP * N;
    mine = N < 32 ? mine << (first % 32) : mine;
#pragma unroll
    for (int d = 1; d < 32 / N; d *= 2)
        mine |= __shfl_xor_sync(EVERY_LANE, mine, d);
    volatile uint32_t *word = set + first / 32;
    if (first % 32 == 0 && first / 32 < words && (look ? mine & ~*word : mine))
        atomicOr((uint32_t *)word, mine);
}

/* lane_sigmoid of each: the quotient by one Newton step, which is exact but for denominators beyond 2^125, so that the
 * chains of a lane's experts run side by side. */
template <int N> static __device__ __forceinline__ void universe_score(universe<N> &u, const float (&z)[N])
{
    float below[N];
    bool usual = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
        float x;
        below[i] = __fadd_rn(1.0f, lane_exp(-z[i]));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(below[i]));
        u.score[i] = __fmaf_rn(x, -__fmaf_rn(below[i], x, -1.0f), x);
        usual = usual && below[i] < 0x1p125f;
    }
    if (!usual)
#pragma unroll
        for (int i = 0; i < N; i++)
            u.score[i] = __frcp_rn(below[i]);
}

/* eligible: of this lane's experts. */
template <int N>
static __device__ __forceinline__ void universe_open(universe<N> &u, const float (&bias)[N], uint32_t eligible)
{
#pragma unroll
    for (int i = 0; i < N; i++)
        u.order[i] = eligible >> i & 1 ? order_of(__fadd_rn(u.score[i], bias[i])) : 0;
}

static __device__ __forceinline__ float value_of(uint32_t order)
{
    return __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

/* How a group ranks by its two best: how many they are, then their sum. */
static __device__ __forceinline__ uint64_t group_rank(uint32_t first, uint32_t second)
{
    float best = second ? __fadd_rn(value_of(first), value_of(second)) : value_of(first);
    return first == 0 ? 0 : (uint64_t)(1 + (second != 0)) << 32 | order_of(best);
}

/* How groups lie on the lanes, N experts each. */
typedef struct grouping {
    int groups, kept, size;
    int per, shift; /* lanes a group, 1 << shift; per 0: a group is no such number of whole lanes */
} grouping;

template <int N> static inline grouping grouping_of(const route_rule &r)
{
    grouping g = {r.groups, r.top_groups, r.experts / r.groups};
    int per = g.size / N;
    if (g.size % N == 0 && (per & (per - 1)) == 0)
        g.per = per;
    while (g.per > 1 << g.shift)
        g.shift++;
    return g;
}

/* Is this lane's group, whose two best these are, among those kept? Each group is known to `lanes` lanes, 1 << shift,
 * which share the comparisons. */
static __device__ __forceinline__ bool is_kept(uint32_t first, uint32_t second, const grouping &g, int lanes, int shift)
{
    uint64_t mine = group_rank(first, second);
    int lane = threadIdx.x % WARP, group = lane >> shift, above = 0;
#pragma unroll 2
    for (int base = 0; base < g.groups; base += lanes) {
        int i = base + (lane & (lanes - 1));
        uint64_t other = __shfl_sync(EVERY_LANE, mine, i << shift);
        above += i < g.groups && (other > mine || (other == mine && i < group));
    }
#pragma unroll 1
    for (int d = 1; d < lanes; d *= 2)
        above += __shfl_xor_sync(EVERY_LANE, above, d);
    return mine != 0 && above < g.kept;
}

/* The same as universe_limit, of orders in shared memory. */
static __device__ __noinline__ void limit_any(uint32_t *order, grouping g)
{
    int lane = threadIdx.x % WARP;
    uint32_t first = 0, second = 0;
    __syncwarp();
    for (int e = lane * g.size; lane < g.groups && e < (lane + 1) * g.size; e++) {
        second = max(second, min(first, order[e]));
        first = max(first, order[e]);
    }
    bool kept = is_kept(first, second, g, 1, 0);
    for (int e = lane * g.size; lane < g.groups && e < (lane + 1) * g.size; e++)
        order[e] = kept ? order[e] : 0;
    __syncwarp();
}

/* Takes the groups that are not kept out of the universe. room: a warp's. */
template <int N>
static __device__ __forceinline__ void universe_limit(universe<N> &u, const grouping &g, uint32_t *room)
{
    int first_of_lane = threadIdx.x % WARP * N;
    if (g.kept >= g.groups)
        return;
    if (g.per) {
        uint32_t first = 0, second = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            second = max(second, min(first, u.order[i]));
            first = max(first, u.order[i]);
        }
#pragma unroll 1
        for (int d = 1; d < g.per; d *= 2) {
            uint32_t a = __shfl_xor_sync(EVERY_LANE, first, d), b = __shfl_xor_sync(EVERY_LANE, second, d);
            second = max(min(first, a), max(second, b));
            first = max(first, a);
        }
        bool kept = is_kept(first, second, g, g.per, g.shift);
#pragma unroll
        for (int i = 0; i < N; i++)
            u.order[i] = kept ? u.order[i] : 0;
        return;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; i++)
        room[first_of_lane + i] = u.order[i];
    limit_any(room, g);
#pragma unroll
    for (int i = 0; i < N; i++)
        u.order[i] = room[first_of_lane + i];
    __syncwarp();
}

/* The experts of a universe, each lane's best first. */
typedef struct queue {
    uint2 *entry;       /* this lane's of [N + 1, WARP] in shared memory: order and id; the last is 0 */
    uint32_t order;     /* the best that is left of this lane; 0: none is */
    uint32_t id, below; /* whose; the lanes below this one */
} queue;

/* Warps of a block, and bytes of a warp's room: its queue, and behind it a score and the id of a candidate an expert.
 */
template <int N> struct warps {
    enum { COUNT = N > 16 ? 2 : 4, THREADS = COUNT * WARP };
    enum { QUEUE = (N + 1) * WARP * 8, BYTES = QUEUE + N * WARP * 6 };
};

static __device__ __forceinline__ void queue_call(queue &q)
{
    uint2 e = *q.entry;
    q.order = e.x;
    q.id = e.y;
}

/* A lane reads and writes its own column of the room only. */
template <int N> static __device__ __forceinline__ void queue_open(queue &q, const universe<N> &u, void *room)
{
    int lane = threadIdx.x % WARP, place[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        place[i] = i * WARP;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = i + 1; j < N; j++)
            if (u.order[j] > u.order[i]) {
                place[i] += WARP;
                place[j] -= WARP;
            }
    q.entry = (uint2 *)room + lane;
    q.below = (1u << lane) - 1;
#pragma unroll
    for (int i = 0; i < N; i++)
        q.entry[place[i]] = uint2{u.order[i], (uint32_t)(lane * N + i)};
    q.entry[N * WARP] = uint2{0, 0};
    queue_call(q);
}

/* Takes the best expert out; true in the lane that had it, as *id. */
static __device__ __forceinline__ bool queue_take(queue &q, uint32_t *id)
{
    uint32_t best = __reduce_max_sync(EVERY_LANE, q.order);
    uint32_t best_lanes = __ballot_sync(EVERY_LANE, q.order == best);
    bool mine = q.order == best && (best_lanes & q.below) == 0 && best != 0;
    *id = q.id;
    q.entry += mine ? WARP : 0;
    queue_call(q);
    return mine;
}

/* Can lanes of n experts read rows of the router four numbers at once? */
static inline bool lanes_fit(const tensor *z, const float *bias, int n)
{
    return z->cols <= n * WARP && z->cols % n == 0 && z->ld % 4 == 0 && (uintptr_t)z->data % 16 == 0 &&
           (uintptr_t)bias % 16 == 0;
}

/* Calls launch<N>(...) for the least N that holds the experts, into `st`. */
#define UNIVERSE_LAUNCH(st, z, bias, launch, ...) \
    do {                                          \
        if ((z)->cols <= 32)                      \
            st = launch<1> __VA_ARGS__;           \
        else if ((z)->cols <= 64)                 \
            st = launch<2> __VA_ARGS__;           \
        else if (lanes_fit(z, bias, 4))           \
            st = launch<4> __VA_ARGS__;           \
        else if (lanes_fit(z, bias, 8))           \
            st = launch<8> __VA_ARGS__;           \
        else if (lanes_fit(z, bias, 16))          \
            st = launch<16> __VA_ARGS__;          \
        else                                      \
            st = launch<32> __VA_ARGS__;          \
    } while (0)

/* Is the router of a shape that a warp can hold? */
static inline status universe_fits(const route_rule *r)
{
    if (r->experts <= SUM_TREE_EXPERTS && r->groups <= GROUPS_MOST)
        return OK;
    return status_fail(BAD_INPUT, __FILE__, __LINE__, "%d experts in %d groups; the CUDA router holds %d in %d at most",
                       r->experts, r->groups, SUM_TREE_EXPERTS, GROUPS_MOST);
}

#endif
