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

/* This lane's experts of a row of `experts` numbers, 0 behind its end. */
template <int N> static __device__ __forceinline__ void lane_share(float (&x)[N], const float *row, int experts)
{
    int first = threadIdx.x % WARP * N;
    if (N % 4 == 0 && first + N <= experts && (uintptr_t)row % 16 == 0) {
#pragma unroll
        for (int i = 0; i + 4 <= N; i += 4) {
            float4 v = *(const float4 *)(row + first + i);
            x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = first + i < experts ? row[first + i] : 0;
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

/* Adds a lane's experts to a set of all, in device memory; most are there already. */
template <int N> static __device__ __forceinline__ void lane_join(uint32_t *set, uint32_t mine, int words)
{
    int first = threadIdx.x % WARP * N;
    mine = N < 32 ? mine << (first % 32) : mine;
#pragma unroll
    for (int d = 1; d < 32 / N; d *= 2)
        mine |= __shfl_xor_sync(EVERY_LANE, mine, d);
    volatile uint32_t *word = set + first / 32;
    if (first % 32 == 0 && first / 32 < words && (mine & ~*word))
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

/* How groups lie on the lanes. */
typedef struct grouping {
    int groups, kept, size;
    int per;   /* lanes a group, a power of two; 0: a group is no whole number of lanes */
    int group; /* of this lane */
} grouping;

template <int N> static __device__ __forceinline__ grouping grouping_of(const route_rule &r)
{
    grouping g = {r.groups, r.top_groups, r.experts / r.groups};
    int per = g.size / N;
    g.per = g.size % N == 0 && (per & (per - 1)) == 0 ? per : 0;
    g.group = g.per ? (int)threadIdx.x % WARP / g.per : (int)threadIdx.x % WARP;
    return g;
}

/* Is this lane's group, whose two best these are, among those kept? Lane i * step has group i. */
static __device__ __forceinline__ bool is_kept(uint32_t first, uint32_t second, const grouping &g, int step)
{
    uint64_t mine = group_rank(first, second);
    int above = 0;
#pragma unroll 4
    for (int i = 0; i < g.groups; i++) {
        uint64_t other = __shfl_sync(EVERY_LANE, mine, i * step);
        above += other > mine || (other == mine && i < g.group);
    }
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
    bool kept = is_kept(first, second, g, 1);
    for (int e = lane * g.size; lane < g.groups && e < (lane + 1) * g.size; e++)
        order[e] = kept ? order[e] : 0;
    __syncwarp();
}

/* Takes the groups that are not kept out of the universe. room: a warp's. */
template <int N> static __device__ __forceinline__ void universe_limit(universe<N> &u, const grouping &g, uint32_t *room)
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
        bool kept = is_kept(first, second, g, g.per);
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
    uint2 *entry;   /* this lane's of [N + 1, WARP] in shared memory: order and score; the last is 0 */
    uint8_t *name;  /* of [N + 1, WARP]: which of its lane's it is */
    uint32_t order; /* the best that is left of this lane; 0: none is */
    float score;
    int at;
} queue;

/* Bytes of a warp's room: of its queue, of what universe_limit and route want before and after. */
template <int N> static __host__ __device__ constexpr size_t queue_bytes(void)
{
    return (N + 1) * WARP * (sizeof(uint2) + 1);
}

static __device__ __forceinline__ void queue_call(queue &q)
{
    uint2 e = *q.entry;
    q.at = *q.name;
    q.order = e.x;
    q.score = __uint_as_float(e.y);
}

/* A lane reads and writes its own column of the room only. */
template <int N> static __device__ __forceinline__ void queue_open(queue &q, const universe<N> &u, void *room)
{
    int lane = threadIdx.x % WARP, place[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        place[i] = i;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int j = i + 1; j < N; j++)
            if (u.order[j] > u.order[i]) {
                place[i]++;
                place[j]--;
            }
    q.entry = (uint2 *)room + lane;
    q.name = (uint8_t *)((uint2 *)room + (N + 1) * WARP) + lane;
#pragma unroll
    for (int i = 0; i < N; i++) {
        q.entry[place[i] * WARP] = uint2{u.order[i], __float_as_uint(u.score[i])};
        q.name[place[i] * WARP] = (uint8_t)i;
    }
    q.entry[N * WARP] = uint2{0, 0};
    queue_call(q);
}

/* Takes the best expert out: lane *lead's number *at, of this *score; both hold in that lane alone. False: none is
 * left. */
static __device__ __forceinline__ bool queue_take(queue &q, int *lead, int *at, float *score)
{
    uint32_t best = __reduce_max_sync(EVERY_LANE, q.order);
    *lead = __ffs((int)__ballot_sync(EVERY_LANE, q.order == best)) - 1;
    *at = q.at;
    *score = q.score;
    int step = best != 0 && (int)threadIdx.x % WARP == *lead ? WARP : 0;
    q.entry += step;
    q.name += step;
    queue_call(q);
    return best != 0;
}

/* Calls launch<N>(...) for the least N that holds the experts, into `st`. */
#define UNIVERSE_LAUNCH(st, experts, launch, ...) \
    do {                                          \
        if ((experts) <= 32)                      \
            st = launch<1> __VA_ARGS__;           \
        else if ((experts) <= 64)                 \
            st = launch<2> __VA_ARGS__;           \
        else if ((experts) <= 128)                \
            st = launch<4> __VA_ARGS__;           \
        else if ((experts) <= 256)                \
            st = launch<8> __VA_ARGS__;           \
        else if ((experts) <= 512)                \
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
