/* What moves or combines rows one by one: embedding, residuals, SiLU, conversion, and the compact and full forms of a
 * shard. A block takes a row at a time, a thread V neighbouring elements; nothing here sums over a row. */
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
    if (vectors_fit(*y, VECTOR) && vectors_fit(*x, VECTOR))
        gather_kernel<VECTOR><<<grid, THREADS, 0, c->stream>>>(*y, *x, *index);
    else
        gather_kernel<1><<<grid, THREADS, 0, c->stream>>>(*y, *x, *index);
    return CUDA_LAUNCHED(what);
}

extern "C" status cuda_embed(backend *b, tensor *y, const tensor *table, const tensor *ids)
{
    return gather(b, y, table, ids, "embed");
}

extern "C" status cuda_pack(backend *b, tensor *packed, const tensor *full, const tensor *rows)
{
    return gather(b, packed, full, rows, "pack");
}

/* ---- y += x, SiLU */

template <int V> static __global__ void add_kernel(tensor y, tensor x)
{
    typedef pack_of<bf16, V> pack;
    int64_t n = min(used_rows(y), used_rows(x)), width = y.cols / V;
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        pack *to = (pack *)row_of<bf16>(y, i);
        const pack *from = (const pack *)row_of<bf16>(x, i);
        for (int64_t j = threadIdx.x; j < width; j += blockDim.x) {
            pack a = to[j], z = from[j];
            for (int k = 0; k < V; k++)
                narrow(&a.x[k], widen(a.x[k]) + widen(z.x[k]));
            to[j] = a;
        }
    }
}

extern "C" status cuda_add(backend *b, tensor *y, const tensor *x)
{
    cuda *c = cuda_of(b);
    assert(y->type == BF16 && x->type == BF16 && y->cols == x->cols);
    unsigned grid = cuda_grid(c, y->rows < x->rows ? y->rows : x->rows, WAVES);
    if (vectors_fit(*y, VECTOR) && vectors_fit(*x, VECTOR))
        add_kernel<VECTOR><<<grid, THREADS, 0, c->stream>>>(*y, *x);
    else
        add_kernel<1><<<grid, THREADS, 0, c->stream>>>(*y, *x);
    return CUDA_LAUNCHED("add");
}

template <int V> static __global__ void swiglu_kernel(tensor y, tensor gate_up)
{
    typedef pack_of<bf16, V> pack;
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

extern "C" status cuda_swiglu(backend *b, tensor *y, const tensor *gate_up)
{
    cuda *c = cuda_of(b);
    assert(y->type == BF16 && gate_up->type == BF16 && gate_up->cols == 2 * y->cols && y->rows >= gate_up->rows);
    unsigned grid = cuda_grid(c, gate_up->rows, WAVES);
    if (vectors_fit(*y, VECTOR) && vectors_fit(*gate_up, VECTOR))
        swiglu_kernel<VECTOR><<<grid, THREADS, 0, c->stream>>>(*y, *gate_up);
    else
        swiglu_kernel<1><<<grid, THREADS, 0, c->stream>>>(*y, *gate_up);
    return CUDA_LAUNCHED("swiglu");
}

/* ---- merge */

/* The first items are the packed rows: each goes to its row of y, and to the cache where it is decoded. The others are
 * the rows of the batch: those that the forward did not make anew come from the cache. */
template <int V>
static __global__ void merge_kernel(tensor y, tensor packed, tensor cache, int layer, batch in, slots s, block_rule k)
{
    typedef pack_of<bf16, V> pack;
    typedef pack_of<float, V> wide;
    int64_t fresh = used_rows(in.fresh), rows = used_rows(in.position), width = y.cols / V;
    const int32_t *role = (const int32_t *)in.role.data, *position = (const int32_t *)in.position.data;
    const int32_t *owner = (const int32_t *)in.slot.data, *listed = (const int32_t *)in.fresh.data;
    for (int64_t i = blockIdx.x; i < fresh + rows; i += gridDim.x) {
        int64_t row = i < fresh ? listed[i] : i - fresh;
        bool sealing = role[row] == ROW_SEALING;
        int32_t in_block = position[row] % k.block_size;
        const slot *x = (const slot *)s.slot.data + owner[row];
        bool anew = sealing || (x->fresh >> in_block & 1);
        if (anew != (i < fresh))
            continue;
        pack *to = (pack *)row_of<bf16>(y, row);
        pack *kept =
            (pack *)row_of<bf16>(cache, ((int64_t)layer * s.slot_count + owner[row]) * k.block_size + in_block);
        if (!anew) {
            for (int64_t j = threadIdx.x; j < width; j += blockDim.x)
                to[j] = kept[j];
            continue;
        }
        bool keep = !sealing && (x->decoded >> in_block & 1);
        const wide *from = (const wide *)row_of<float>(packed, i);
        for (int64_t j = threadIdx.x; j < width; j += blockDim.x) {
            wide a = from[j];
            pack r;
            for (int n = 0; n < V; n++)
                narrow(&r.x[n], a.x[n]);
            to[j] = r;
            if (keep)
                kept[j] = r;
        }
    }
}

extern "C" status cuda_merge(backend *b, tensor *y, const tensor *packed, tensor *cache, int layer, const batch *in,
                             const slots *s, const block_rule *k)
{
    cuda *c = cuda_of(b);
    assert(y->type == BF16 && packed->type == F32 && cache->type == BF16);
    assert(y->cols == packed->cols && y->cols == cache->cols);
    unsigned grid = cuda_grid(c, in->fresh.rows + in->position.rows, WAVES);
    if (vectors_fit(*y, VECTOR) && vectors_fit(*packed, VECTOR) && vectors_fit(*cache, VECTOR))
        merge_kernel<VECTOR><<<grid, THREADS, 0, c->stream>>>(*y, *packed, *cache, layer, *in, *s, *k);
    else
        merge_kernel<1><<<grid, THREADS, 0, c->stream>>>(*y, *packed, *cache, layer, *in, *s, *k);
    return CUDA_LAUNCHED("merge");
}
