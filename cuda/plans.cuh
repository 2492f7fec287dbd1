/* Where a cohort's support and log lie, and what a row is, for the kernels. */
#ifndef EPOCH_CUDA_PLANS_CUH
#define EPOCH_CUDA_PLANS_CUH

#include "cuda/device.cuh"

enum { SUPPORT_NONE, SUPPORT_HOLDS, SUPPORT_UNIVERSE };

static __device__ __forceinline__ int32_t *support_of(const plans &p, int layer, int cohort)
{
    return row_of<int32_t>(p.support, (int64_t)layer * p.cohort_count + cohort);
}

static __device__ __forceinline__ layer_log *log_of(const plans &p, int layer, int cohort)
{
    return (layer_log *)p.log.data + (int64_t)layer * p.cohort_count + cohort;
}

/* A packed row: whose it is, the path of that slot, whether it belongs to a block that is being sealed, and whether it
 * counts: it is a row of an active block that is fresh by itself, not by the dense lane alone. */
typedef struct packed_row {
    int32_t owner, path;
    bool sealing, counts;
} packed_row;

/* Packed rows are dealt to the grid's warps, `count` a block, in runs of one length: this warp's are [from, to). How
 * many rows there are. Loads come past L1, as below. */
static __device__ __forceinline__ int deal_rows(const tensor &fresh, int count, int &from, int &to)
{
    int n = (int)used_rows_early(fresh), all = (int)gridDim.x * count, each = (n + all - 1) / all;
    from = ((int)blockIdx.x * count + (int)(threadIdx.x / WARP)) * each;
    to = from + each < n ? from + each : n;
    return n;
}

/* Packed row i. All loads come past L1: the kernels of a layer ask for their first row before after_previous(). */
static __device__ __forceinline__ packed_row packed_row_at(const batch &in, const slots &s, const block_rule &k,
                                                           int64_t i)
{
    int32_t row = __ldcg((const int32_t *)in.fresh.data + i);
    int32_t owner = __ldcg((const int32_t *)in.slot.data + row), role = __ldcg((const int32_t *)in.role.data + row);
    int32_t position = __ldcg((const int32_t *)in.position.data + row);
    const slot *x = (const slot *)s.slot.data + owner;
    bool sealing = role == ROW_SEALING;
    int32_t path = __ldcg(&x->path);
    uint64_t fresh = __ldcg(&x->fresh);
    return {owner, path, sealing, !sealing && (!k.dense_lane || (fresh >> position % k.block_size & 1))};
}

#endif
