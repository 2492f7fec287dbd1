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

/* Where shard a lies among the leaves of a tree that has LEVELS everywhere and keeps together what the shards' does. */
template <int LEVELS> static __device__ __forceinline__ uint32_t leaf_of(int a, int shards)
{
    int lo = 0, hi = shards;
    uint32_t leaf = 0;
#pragma unroll
    for (int level = 0; level < LEVELS; level++) {
        int mid = hi - lo > 1 ? lo + (hi - lo) / 2 : hi;
        bool right = a >= mid;
        lo = right ? mid : lo;
        hi = right ? hi : mid;
        leaf = 2 * leaf + right;
    }
    return leaf;
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

static __device__ __forceinline__ uint4 halves_of_eight(const float (&x)[8])
{
    uint32_t two[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        __nv_bfloat162 v = __floats2bfloat162_rn(x[2 * k], x[2 * k + 1]);
        two[k] = *(const uint32_t *)&v;
    }
    return make_uint4(two[0], two[1], two[2], two[3]);
}

/* Eight sums of BF16, each rounded. */
static __device__ __forceinline__ uint4 add_eight(uint4 a, uint4 b)
{
    float x[8], y[8];
    eight_of(x, a);
    eight_of(y, b);
#pragma unroll
    for (int k = 0; k < 8; k++)
        x[k] += y[k];
    return halves_of_eight(x);
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
