/* Where a cohort's support and log lie, for the kernels. */
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

#endif
