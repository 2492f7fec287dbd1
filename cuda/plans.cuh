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

/* Is this row of an active block fresh by itself, not by the dense lane alone? */
static __device__ __forceinline__ bool is_fresh(const batch &in, const block_rule &k, int32_t row, const slot *owner)
{
    return owner->fresh >> (((const int32_t *)in.position.data)[row] % k.block_size) & 1;
}

#endif
