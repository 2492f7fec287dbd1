/* What fills or moves rows one by one: conversion, random numbers, rows by an index (embed, pack), SiLU. A block
 * takes a row at a time; nothing here sums over a row. */
#include "cuda/device.cuh"

enum { THREADS = 256, WAVES = 16, VECTOR = 8 }; /* 8 BF16: 16 bytes */

/* ---- conversion */

template <typename Y, typename X>
static __global__ void convert_kernel(tensor y, const X *x)
{
    for (int64_t row = blockIdx.x; row < y.rows; row += gridDim.x) {
        Y *to = row_of<Y>(y, row);
        const X *from = x + row * y.cols;
        for (int64_t j = threadIdx.x; j < y.cols; j += blockDim.x)
            narrow(&to[j], widen(from[j]));
    }
}

template <typename Y> static void convert_to(cuda *c, const tensor *dst, const void *src, dtype from)
{
    unsigned grid = cuda_grid(c, dst->rows, WAVES);
    if (from == F32)
        convert_kernel<Y, float><<<grid, THREADS, 0, c->stream>>>(*dst, (const float *)src);
    else if (from == BF16)
        convert_kernel<Y, bf16><<<grid, THREADS, 0, c->stream>>>(*dst, (const bf16 *)src);
    else
        convert_kernel<Y, __half><<<grid, THREADS, 0, c->stream>>>(*dst, (const __half *)src);
}

extern "C" status cuda_convert(cuda *c, const tensor *dst, const void *src, dtype from)
{
    assert(from <= F16 && dst->type <= F16);
    c->settled = false;
    if (dst->type == F32)
        convert_to<float>(c, dst, src, from);
    else if (dst->type == BF16)
        convert_to<bf16>(c, dst, src, from);
    else
        convert_to<__half>(c, dst, src, from);
    return CUDA_LAUNCHED("conversion");
}

template <typename T> static __global__ void random_kernel(tensor t, uint64_t seed, float scale)
{
    for (int64_t row = blockIdx.x; row < t.rows; row += gridDim.x)
        for (int64_t j = threadIdx.x; j < t.cols; j += blockDim.x)
            narrow(&row_of<T>(t, row)[j], __fmul_rn(scale, random_at(seed, (uint64_t)(row * t.cols + j))));
}

extern "C" status cuda_random(backend *b, const tensor *dst, uint64_t seed, float scale)
{
    cuda *c = cuda_of(b);
    unsigned grid = cuda_grid(c, dst->rows, WAVES);
    assert(dst->type <= F16);
    c->settled = false;
    if (dst->type == F32)
        random_kernel<float><<<grid, THREADS, 0, c->stream>>>(*dst, seed, scale);
    else if (dst->type == BF16)
        random_kernel<bf16><<<grid, THREADS, 0, c->stream>>>(*dst, seed, scale);
    else
        random_kernel<__half><<<grid, THREADS, 0, c->stream>>>(*dst, seed, scale);
    return CUDA_LAUNCHED("random");
}

extern "C" cudaError_t cuda_probe(void)
{
    struct cudaFuncAttributes a;
    cudaError_t e = cudaFuncGetAttributes(&a, convert_kernel<bf16, float>);
    if (e != cudaSuccess)
        cudaGetLastError();
    return e;
}

/* ---- rows by an index */

/* y[i] = x[index[i]], rows of BF16 */
template <int V> static __global__ void gather_kernel(tensor y, tensor x, tensor index)
{
    typedef pack_of<bf16, V> pack;
    let_next();
    after_previous();
    int64_t n = used_rows(index), width = y.cols / V;
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        const pack *from = (const pack *)row_of<bf16>(x, *row_of<int32_t>(index, i));
        pack *to = (pack *)row_of<bf16>(y, i);
        for (int64_t j = threadIdx.x; j < width; j += blockDim.x)
            to[j] = from[j];
    }
}

static status gather(backend *b, const tensor *y, const tensor *x, const tensor *index, const char *what)
{
    cuda *c = cuda_of(b);
    assert(y->type == BF16 && x->type == BF16 && index->type == I32 && y->cols == x->cols);
    unsigned grid = cuda_grid(c, index->rows, WAVES);
    auto kernel = vectors_fit(*y, VECTOR) && vectors_fit(*x, VECTOR) ? gather_kernel<VECTOR> : gather_kernel<1>;
    return launch(c, what, kernel, grid, THREADS, 0, *y, *x, *index);
}

extern "C" status cuda_embed(backend *b, tensor *y, const tensor *table, const tensor *ids)
{
    return gather(b, y, table, ids, "embed");
}

extern "C" status cuda_pack(backend *b, tensor *packed, const tensor *full, const tensor *rows)
{
    return gather(b, packed, full, rows, "pack");
}

/* ---- SiLU */

template <int V> static __global__ void swiglu_kernel(tensor y, tensor gate_up)
{
    typedef pack_of<bf16, V> pack;
    let_next();
    after_previous();
    int64_t n = used_rows(gate_up), width = y.cols / V;
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        const pack *gate = (const pack *)row_of<bf16>(gate_up, i),
                   *up = (const pack *)(row_of<bf16>(gate_up, i) + y.cols);
        pack *to = (pack *)row_of<bf16>(y, i);
        for (int64_t j = threadIdx.x; j < width; j += blockDim.x) {
            pack g = gate[j], u = up[j];
            for (int k = 0; k < V; k++) {
                float x = widen(g.x[k]);
                narrow(&g.x[k], x * lane_sigmoid(x) * widen(u.x[k]));
            }
            to[j] = g;
        }
    }
}

extern "C" status cuda_swiglu(cuda *c, tensor *y, const tensor *gate_up)
{
    assert(y->type == BF16 && gate_up->type == BF16 && gate_up->cols == 2 * y->cols && y->rows >= gate_up->rows);
    auto kernel = vectors_fit(*y, VECTOR) && vectors_fit(*gate_up, VECTOR) ? swiglu_kernel<VECTOR> : swiglu_kernel<1>;
    return launch(c, "swiglu", kernel, cuda_grid(c, gate_up->rows, WAVES), THREADS, 0, *y, *gate_up);
}
