/* Sums in the order of src/base/sum_tree.h, for terms that come one after the other from left to right. */
#ifndef EPOCH_CUDA_TREE_CUH
#define EPOCH_CUDA_TREE_CUH

#include "cuda/device.cuh"

#include "src/base/sum_tree.h"

/* Halvings of the shards that keep a < b together. */
static __device__ __forceinline__ int depth_of(int a, int b, int shards)
{
    int depth = 0, lo = 0, hi = shards;
    for (;;) {
        int mid = lo + (hi - lo) / 2;
        if (b < mid)
            hi = mid;
        else if (a >= mid)
            lo = mid;
        else
            return depth;
        depth++;
    }
}

/* A sum in the tree's order, its terms coming from left to right: the newest node, and of each level of the tree the
 * left node that waits for it. All threads of a warp have the same levels waiting. */
template <int LEVELS, int V> struct running_sum {
    float newest[V], left[LEVELS][V];
    uint32_t waiting; /* bit l: left[l] */

    __device__ __forceinline__ void begin(const float (&v)[V])
    {
        waiting = 0;
#pragma unroll
        for (int i = 0; i < V; i++)
            newest[i] = v[i];
    }

    /* Of the same shard as the newest. */
    __device__ __forceinline__ void add(const float (&v)[V])
    {
#pragma unroll
        for (int i = 0; i < V; i++)
            newest[i] += v[i];
    }

    /* Joins all that waits below `level`; -1: everything. */
    __device__ __forceinline__ void join(int level)
    {
#pragma unroll
        for (int l = LEVELS - 1; l >= 0; l--)
            if (l > level && (waiting >> l & 1)) {
#pragma unroll
                for (int i = 0; i < V; i++)
                    newest[i] = left[l][i] + newest[i];
                waiting &= ~(1u << l);
            }
    }

    /* The first of another shard, which meets the newest at this level. */
    __device__ __forceinline__ void turn(const float (&v)[V], int level)
    {
        join(level);
#pragma unroll
        for (int l = 0; l < LEVELS; l++)
#pragma unroll
            for (int i = 0; i < V; i++)
                left[l][i] = l == level ? newest[i] : left[l][i];
        waiting |= 1u << level;
#pragma unroll
        for (int i = 0; i < V; i++)
            newest[i] = v[i];
    }
};

/* Numbers of 16 bytes: four, or eight of BF16. */
static __device__ __forceinline__ void four_of(float *x, uint4 v)
{
    x[0] = __uint_as_float(v.x);
    x[1] = __uint_as_float(v.y);
    x[2] = __uint_as_float(v.z);
    x[3] = __uint_as_float(v.w);
}

static __device__ __forceinline__ void eight_of(float *x, uint4 v)
{
    const uint32_t two[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        x[2 * k] = __uint_as_float(two[k] << 16);
        x[2 * k + 1] = __uint_as_float(two[k] & 0xffff0000u);
    }
}

template <int V> static __device__ __forceinline__ void store_floats(float *to, const float (&v)[V])
{
#pragma unroll
    for (int i = 0; i < V; i++)
        to[i] = v[i];
}

template <> __device__ __forceinline__ void store_floats<4>(float *to, const float (&v)[4])
{
    *(float4 *)to = make_float4(v[0], v[1], v[2], v[3]);
}

template <> __device__ __forceinline__ void store_floats<8>(float *to, const float (&v)[8])
{
    ((float4 *)to)[0] = make_float4(v[0], v[1], v[2], v[3]);
    ((float4 *)to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

template <int V> static __device__ __forceinline__ void store_halves(bf16 *to, const float (&v)[V])
{
    pack_of<bf16, V> y;
#pragma unroll
    for (int i = 0; i < V; i++)
        narrow(&y.x[i], v[i]);
    *(pack_of<bf16, V> *)to = y;
}

#endif
