/* What kernels share: rows in use, conversions, vectors of a row's elements, launches that overlap, sums over a warp or
 * a block in an order that depends on the width alone, and the CPU backend's exponential. */
#ifndef EPOCH_CUDA_DEVICE_CUH
#define EPOCH_CUDA_DEVICE_CUH

#include "cuda/kernels.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <assert.h>

typedef __nv_bfloat16 bf16;

enum { WARP = 32 };
#define EVERY_LANE 0xffffffffu

/* Rows of t that are in use. */
static __device__ __forceinline__ int64_t used_rows(const tensor &t)
{
    int64_t n = t.used ? *t.used : t.rows;
    return n < t.rows ? n : t.rows;
}

/* The same past L1, for what stands before after_previous() (below). */
static __device__ __forceinline__ int64_t used_rows_early(const tensor &t)
{
    int64_t n = t.used ? __ldcg(t.used) : t.rows;
    return n < t.rows ? n : t.rows;
}

template <typename T> static __device__ __forceinline__ T *row_of(const tensor &t, int64_t row)
{
    return (T *)t.data + row * t.ld;
}

static __device__ __forceinline__ float widen(float x) { return x; }
static __device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
static __device__ __forceinline__ float widen(__half x) { return __half2float(x); }
static __device__ __forceinline__ void narrow(float *y, float x) { *y = x; }
static __device__ __forceinline__ void narrow(bf16 *y, float x) { *y = __float2bfloat16_rn(x); }
static __device__ __forceinline__ void narrow(__half *y, float x) { *y = __float2half_rn(x); }

/* V neighbours of a row, moved at once. */
template <typename T, int V> struct alignas(sizeof(T) * V) pack_of {
    T x[V];
};

/* Is every row of t a whole number of vectors of v elements, and starts where such a vector may? */
static inline bool vectors_fit(const tensor &t, int v)
{
    return t.cols % v == 0 && t.ld % v == 0 && (uintptr_t)t.data % ((size_t)v * dtype_bytes(t.type)) == 0;
}

/* ---- launches that overlap
 *
 * A kernel launched by `launch` may start as soon as every block of the one before it on the stream has called
 * let_next() or ended, so that its launch, its barriers and whatever no earlier kernel writes (weights) cost no time of
 * their own. The rule: every thread that touches memory which kernels write, or which kernels still under way may read,
 * calls after_previous() first; all kernels launched this way have threads that do. Then all earlier kernels have ended
 * and what they wrote is visible: each waits for the one before it, and so for all.
 *
 * A kernel K that calls let_next() only behind after_previous() lets the next one, N, begin when a thread of each of
 * its blocks has seen all before K end. So N, before its own after_previous(), may already read what kernels before K
 * wrote and K does not write; past L1, which nothing has emptied for it. The launcher of K says so behind its launch:
 * cuda.settled holds until the next launch, whose launcher is N's. */

static __device__ __forceinline__ void after_previous()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

static __device__ __forceinline__ void let_next()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* The same in clusters of `cluster` blocks; 1: none. */
template <typename... PARAMETERS, typename... ARGUMENTS>
static status launch_clusters(cuda *c, const char *what, void (*kernel)(PARAMETERS...), dim3 grid, dim3 block,
                              size_t shared, unsigned cluster, ARGUMENTS &&...arguments)
{
    cudaLaunchConfig_t how = {};
    cudaLaunchAttribute set[2] = {};
    how.gridDim = grid;
    how.blockDim = block;
    how.dynamicSmemBytes = shared;
    how.stream = c->stream;
    how.attrs = set;
    if (c->overlaps && !c->ordered && c->stream != c->beside) { /* what waits beside would only take room */
        set[how.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        set[how.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        set[how.numAttrs].id = cudaLaunchAttributeClusterDimension;
        set[how.numAttrs].val.clusterDim.x = cluster;
        set[how.numAttrs].val.clusterDim.y = set[how.numAttrs].val.clusterDim.z = 1;
        how.numAttrs++;
    }
    c->ordered = c->settled = false;
    return cuda_check(cudaLaunchKernelEx(&how, kernel, PARAMETERS(arguments)...), what, __FILE__, __LINE__);
}

template <typename... PARAMETERS, typename... ARGUMENTS>
static status launch(cuda *c, const char *what, void (*kernel)(PARAMETERS...), dim3 grid, dim3 block, size_t shared,
                     ARGUMENTS &&...arguments)
{
    return launch_clusters(c, what, kernel, grid, block, shared, 1, arguments...);
}

static __device__ __forceinline__ float warp_sum(float x)
{
    for (int half = WARP / 2; half > 0; half /= 2)
        x += __shfl_xor_sync(EVERY_LANE, x, half);
    return x;
}

/* The sum over a block of THREADS, for every thread: warps first, then the warps' sums in order. */
template <int THREADS> static __device__ __forceinline__ float block_sum(float x, float *room)
{
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0)
        room[threadIdx.x / WARP] = x;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < THREADS / WARP; i++)
        sum += room[i];
    __syncthreads();
    return sum;
}

/* The sum of x over the lanes up to this one, which is `lane`. */
template <typename T> static __device__ __forceinline__ T warp_prefix(T x, int lane)
{
    for (int step = 1; step < WARP; step *= 2) {
        T other = __shfl_up_sync(EVERY_LANE, x, step);
        x += lane >= step ? other : 0;
    }
    return x;
}

/* Exclusive prefix sums over a block of 1024 threads, all of which call; *total: of all. room: a number a warp. */
static inline __device__ uint64_t block_prefix(uint64_t x, uint64_t *total, uint64_t *room)
{
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    uint64_t sum = warp_prefix(x, lane);
    if (lane == WARP - 1)
        room[warp] = sum;
    __syncthreads();
    if (warp == 0)
        room[lane] = warp_prefix(room[lane], lane);
    __syncthreads();
    uint64_t before = warp > 0 ? room[warp - 1] : 0;
    *total = room[WARP - 1];
    __syncthreads();
    return before + sum - x;
}

/* e^x as the CPU backend computes it (src/cpu/lanes.h), product by product, so that router scores are the same bits. */
static __device__ __forceinline__ float lane_exp(float x)
{
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = __fadd_rn(__fmaf_rn(x, 1.44269504f, 12582912.0f), -12582912.0f);
    float r = __fmaf_rn(n, -0.693359375f, x);
    r = __fmaf_rn(n, 2.12194440e-4f, r);
    float p = 1.0f / 5040;
    p = __fmaf_rn(p, r, 1.0f / 720);
    p = __fmaf_rn(p, r, 1.0f / 120);
    p = __fmaf_rn(p, r, 1.0f / 24);
    p = __fmaf_rn(p, r, 1.0f / 6);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    return __fmul_rn(p, __uint_as_float((__float_as_uint(__fadd_rn(n, 12582912.0f)) + 127u) << 23));
}

static __device__ __forceinline__ float lane_sigmoid(float x)
{
    return __frcp_rn(__fadd_rn(1.0f, lane_exp(-x)));
}

/* Ascending with the number; 0 for -inf's stand-in and NaN, which are never the largest. */
static __device__ __forceinline__ uint32_t order_of(float x)
{
    uint32_t bits = __float_as_uint(x);
    if (x != x || bits == 0xff800000u)
        return 0;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

#endif
