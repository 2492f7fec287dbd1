/* The router: sigmoid scores, a bias that only chooses, group-limited top-k, over all experts or over a support. Twin
 * of src/cpu/route.c. A warp a row. Which experts a cohort's rows chose gathers in `seen`, which `rows` clears and
 * `commit` counts. */
#include "cuda/plans.cuh"
#include "cuda/universe.cuh"

enum { THREADS = 256, WARPS = THREADS / WARP, WAVES = 8 };

typedef struct routing {
    tensor ids, weights, z;
    const float *bias;
    plans p;
    int layer;
    batch in;
    slots s;
    route_rule r;
    block_rule k;
    uint32_t *seen; /* [layers, cohorts, words] */
} routing;

template <int N> static __global__ void route_kernel(routing a)
{
    extern __shared__ uint32_t shared[];
    int lane = threadIdx.x % WARP, words = (int)a.p.support.cols - 1;
    uint32_t *room = shared + threadIdx.x / WARP * a.r.experts;
    float *picked = (float *)room; /* scores by ascending id */
    int64_t n = used_rows(a.in.fresh);
    for (int64_t i = blockIdx.x * WARPS + threadIdx.x / WARP; i < n; i += gridDim.x * WARPS) {
        int32_t row = ((const int32_t *)a.in.fresh.data)[i], owner = ((const int32_t *)a.in.slot.data)[row];
        int32_t cohort = owner / a.k.cohort;
        const slot *sl = (const slot *)a.s.slot.data + owner;
        bool sealing = ((const int32_t *)a.in.role.data)[row] == ROW_SEALING;
        const int32_t *support = NULL;
        if (a.k.restrict_experts && !sealing && sl->path != PATH_COLD) {
            support = support_of(a.p, a.layer, cohort);
            if (support[words] != SUPPORT_HOLDS)
                support = NULL;
        }
        universe<N> u;
        universe_open(u, row_of<float>(a.z, i), a.bias, support, a.r.experts);
        if (a.r.top_groups < a.r.groups)
            universe_limit(u, a.r, room);
        uint32_t chosen = 0, word = 0;
        int count = 0;
        float score;
        while (count < a.r.top_k && universe_take(u, &score, &chosen) >= 0)
            count++;
        int32_t *ids = row_of<int32_t>(a.ids, i);
        float *weights = row_of<float>(a.weights, i);
        int before = 0;
#pragma unroll
        for (int k = 0; k < N; k++) {
            uint32_t set = __ballot_sync(EVERY_LANE, chosen >> k & 1);
            if (chosen >> k & 1) {
                int at = before + __popc(set & ((1u << lane) - 1));
                ids[at] = k * WARP + lane;
                picked[at] = u.score[k];
            }
            before += __popc(set);
            word = lane == k ? set : word;
        }
        __syncwarp();
        float sum = 0;
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
        int32_t position = ((const int32_t *)a.in.position.data)[row];
        if (!sealing && (sl->fresh >> (position % a.k.block_size) & 1) && lane < words) {
            volatile uint32_t *seen = a.seen + ((int64_t)a.layer * a.p.cohort_count + cohort) * words + lane;
            if (word & ~*seen) /* most rows find their experts there already */
                atomicOr((uint32_t *)seen, word);
        }
    }
}

template <int N> static void launch(cuda *c, const routing &a, unsigned grid)
{
    route_kernel<N><<<grid, THREADS, WARPS * sizeof(float) * (size_t)a.r.experts, c->stream>>>(a);
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
    routing a = {*ids, *weights, *z, (const float *)bias->data, *p, layer, *in, *s, *r, *k, (uint32_t *)c->seen.data};
    UNIVERSE_LAUNCH(r->experts, launch, (c, a, cuda_grid(c, (in->fresh.rows + WARPS - 1) / WARPS, WAVES)));
    return CUDA_LAUNCHED("route");
}
