/* The router: sigmoid scores, a bias that only chooses, group-limited top-k, over all experts or over a support. Twin
 * of src/cpu/route.c. A warp takes a run of rows. Which experts a cohort's rows chose gathers in `seen`, which `rows`
 * clears and `commit` counts. */
#include "cuda/plans.cuh"
#include "cuda/universe.cuh"

enum { WAVES = 8, FEW = 256 }; /* FEW: rows */

typedef struct routing {
    tensor ids, weights, z;
    const float *bias;
    plans p;
    int layer;
    batch in;
    slots s;
    route_rule r;
    block_rule k;
    grouping g;
    uint32_t *seen; /* [layers, cohorts, words] */
    bool settled;   /* cuda.settled, of the kernel before this one */
} routing;

/* The chosen by ascending id, with their weights. */
template <int N>
static __device__ __forceinline__ void write_row(const routing &a, int i, const universe<N> &u, uint32_t chosen,
                                                 float *picked)
{
    int lane = threadIdx.x % WARP, mine = __popc(chosen), at = warp_prefix(mine, lane);
    int32_t *ids = row_of<int32_t>(a.ids, i);
    float *weights = row_of<float>(a.weights, i), sum = 0;
    int count = __shfl_sync(EVERY_LANE, at, WARP - 1);
    at -= mine;
#pragma unroll
    for (int n = 0; n < N; n++)
        if (chosen >> n & 1) {
            ids[at] = lane * N + n;
            picked[at++] = u.score[n];
        }
    __syncwarp();
#pragma unroll 2
    for (int k = 0; k < count; k++)
        sum = __fadd_rn(sum, picked[k]);
    for (int k = lane; k < a.r.top_k; k += WARP) {
        float w = 0;
        if (k < count)
            w = __fmul_rn(a.r.normalise ? __fdiv_rn(picked[k], __fadd_rn(sum, 1e-20f)) : picked[k], a.r.scale);
        else
            ids[k] = -1;
        weights[k] = w;
    }
    __syncwarp();
}

template <int N>
static __global__ void __launch_bounds__(warps<N>::THREADS) route_kernel(const __grid_constant__ routing a)
{
    extern __shared__ __align__(16) uint32_t shared[];
    int words = (int)a.p.support.cols - 1, warp = threadIdx.x / WARP;
    uint32_t *room = shared + warp * (warps<N>::BYTES / sizeof *shared);
    float bias[N];
    lane_share(bias, a.bias, a.r.experts);
    int from = 0, to = 0;
    packed_row of = {};
    bool many = false;
    auto divide = [&] {
        many = deal_rows(a.in.fresh, warps<N>::COUNT, from, to) > FEW;
        if (from < to)
            of = packed_row_at(a.in, a.s, a.k, from);
    };
    if (a.settled)
        divide();
    after_previous();
    let_next();
    if (!a.settled)
        divide();
    uint32_t joined = 0; /* of this lane's experts, chosen by counted rows of `last` */
    int32_t last = -1;
    for (int i = from; i < to; i++) {
        float z[N];
        lane_share(z, row_of<float>(a.z, i), a.r.experts);
        if (i > from)
            of = packed_row_at(a.in, a.s, a.k, i);
        int32_t cohort = of.owner / a.k.cohort;
        const int32_t *support = support_of(a.p, a.layer, cohort);
        uint32_t eligible = lane_set<N>(NULL, a.r.experts);
        if (a.k.restrict_experts) {
            uint32_t mine = lane_set<N>(support, a.r.experts);
            if (!of.sealing && of.path != PATH_COLD && support[words] == SUPPORT_HOLDS)
                eligible = mine;
        }
        universe<N> u;
        universe_score(u, z);
        universe_open(u, bias, eligible);
        universe_limit(u, a.g, room);
        queue q;
        queue_open(q, u, room);
        uint32_t chosen = 0;
#pragma unroll 2
        for (int k = 0; k < a.r.top_k; k++) {
            uint32_t id;
            bool mine = queue_take(q, &id);
            chosen |= mine ? 1u << (id & (N - 1)) : 0;
        }
        __syncwarp();
        write_row(a, i, u, chosen, (float *)room);
        if (!of.counts)
            continue;
        if (cohort != last) {
            if (last >= 0)
                lane_join<N>(a.seen + ((int64_t)a.layer * a.p.cohort_count + last) * words, joined, words, many);
            last = cohort;
            joined = 0;
        }
        joined |= chosen;
    }
    if (last >= 0)
        lane_join<N>(a.seen + ((int64_t)a.layer * a.p.cohort_count + last) * words, joined, words, many);
}

template <int N> static status launch_route(cuda *c, routing a)
{
    const int count = warps<N>::COUNT;
    a.g = grouping_of<N>(a.r);
    return launch(c, "route", route_kernel<N>, cuda_grid(c, (a.in.fresh.rows + count - 1) / count, WAVES),
                  (unsigned)warps<N>::THREADS, count * (size_t)warps<N>::BYTES, a);
}

extern "C" status cuda_route(backend *b, tensor *ids, tensor *weights, const tensor *z, const tensor *bias, plans *p,
                             int layer, const batch *in, const slots *s, const route_rule *r, const block_rule *k)
{
    cuda *c = cuda_of(b);
    int words = (int)p->support.cols - 1;
    assert(z->type == F32 && bias->type == F32 && weights->type == F32 && ids->type == I32);
    assert(z->cols == r->experts && ids->cols == r->top_k);
    status st = universe_fits(r);
    if (st == OK)
        st = cuda_grow(c, &c->seen, sizeof(uint32_t) * (size_t)((int64_t)p->layers * p->cohort_count * words + 1),
                       "what the routers chose");
    if (st != OK)
        return st;
    c->experts = r->experts;
    routing a = {*ids, *weights, *z, (const float *)bias->data, *p, layer, *in, *s, *r, *k};
    a.seen = (uint32_t *)c->seen.data;
    a.settled = c->settled;
    UNIVERSE_LAUNCH(st, z, a.bias, launch_route, (c, a));
    c->settled = st == OK;
    return st;
}
