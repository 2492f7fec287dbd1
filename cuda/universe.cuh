/* What one warp chooses from for one row of the router: score and order of every expert, expert e in register e / 32 of
 * lane e % 32. Twin of src/cpu/route.c: the same bits of scores, ties to the lower id. */
#ifndef EPOCH_CUDA_UNIVERSE_CUH
#define EPOCH_CUDA_UNIVERSE_CUH

#include "cuda/device.cuh"

enum { GROUPS_MOST = WARP }; /* a lane holds a group */

template <int N> struct universe {
    float score[N];
    uint32_t order[N]; /* of score + bias; 0: ineligible */
};

/* support NULL: every expert is eligible. */
template <int N>
static __device__ void universe_open(universe<N> &u, const float *z, const float *bias, const int32_t *support,
                                     int experts)
{
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < N; i++) {
        int e = i * WARP + lane;
        u.score[i] = 0;
        u.order[i] = 0;
        if (e < experts) {
            u.score[i] = lane_sigmoid(z[e]);
            if (!support || ((uint32_t)support[i] >> lane & 1))
                u.order[i] = order_of(__fadd_rn(u.score[i], bias[e]));
        }
    }
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

/* Takes the groups that are not kept out of the universe. room: `experts` words of this warp's. */
template <int N> static __device__ void universe_limit(universe<N> &u, const route_rule &r, uint32_t *room)
{
    int lane = threadIdx.x % WARP, size = r.experts / r.groups;
    uint64_t mine = 0; /* of group `lane` */
    bool whole = size % WARP == 0;
    if (whole) { /* a group is whole registers */
        uint32_t first = 0, second = 0;
        int per = size / WARP;
#pragma unroll
        for (int i = 0; i < N; i++) {
            uint32_t x = u.order[i];
            second = x > first ? first : x > second ? x : second;
            first = x > first ? x : first;
            if ((i + 1) % per == 0) {
                uint32_t best = __reduce_max_sync(EVERY_LANE, first);
                int lead = __ffs(__ballot_sync(EVERY_LANE, first == best)) - 1;
                uint32_t next = __reduce_max_sync(EVERY_LANE, lane == lead ? second : first);
                if (lane == i / per)
                    mine = group_rank(best, next);
                first = second = 0;
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (i * WARP + lane < r.experts)
                room[i * WARP + lane] = u.order[i];
        __syncwarp();
        if (lane < r.groups) {
            uint32_t first = 0, second = 0;
            for (int e = lane * size; e < (lane + 1) * size; e++) {
                uint32_t x = room[e];
                second = x > first ? first : x > second ? x : second;
                first = x > first ? x : first;
            }
            mine = group_rank(first, second);
        }
        __syncwarp();
    }
    int above = 0;
    for (int g = 0; g < r.groups; g++) {
        uint64_t other = __shfl_sync(EVERY_LANE, mine, g);
        above += other > mine || (other == mine && g < lane);
    }
    uint32_t kept = __ballot_sync(EVERY_LANE, lane < r.groups && mine != 0 && above < r.top_groups);
#pragma unroll
    for (int i = 0; i < N; i++) {
        int g = (i * WARP + lane) / size;
        if (g >= GROUPS_MOST || !(kept >> g & 1))
            u.order[i] = 0;
    }
}

/* Takes the best expert out: its id and score; -1: none is left. `chosen` gets bit i in the lane that holds it. */
template <int N> static __device__ int universe_take(universe<N> &u, float *score, uint32_t *chosen)
{
    int lane = threadIdx.x % WARP, at = 0;
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (u.order[i] > most) {
            most = u.order[i];
            at = i;
        }
    uint32_t best = __reduce_max_sync(EVERY_LANE, most);
    if (best == 0)
        return -1;
    int id = (int)__reduce_min_sync(EVERY_LANE, most == best ? (unsigned)(at * WARP + lane) : ~0u);
    float mine = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (i * WARP + lane == id) {
            u.order[i] = 0;
            mine = u.score[i];
            *chosen |= 1u << i;
        }
    *score = __shfl_sync(EVERY_LANE, mine, id % WARP);
    return id;
}

/* Calls launch<N>(...) for the least N that holds the experts. */
#define UNIVERSE_LAUNCH(experts, launch, ...) \
    do {                                      \
        if ((experts) <= 32)                  \
            launch<1> __VA_ARGS__;            \
        else if ((experts) <= 64)             \
            launch<2> __VA_ARGS__;            \
        else if ((experts) <= 128)            \
            launch<4> __VA_ARGS__;            \
        else if ((experts) <= 256)            \
            launch<8> __VA_ARGS__;            \
        else if ((experts) <= 512)            \
            launch<16> __VA_ARGS__;           \
        else                                  \
            launch<32> __VA_ARGS__;           \
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
