/* The ends of sublayers: what was computed joins the residual stream, and the next sublayer's input is normed from it,
 * in one pass. Twin of src/cpu/residual.c. A block takes a row at a time, a thread V neighbours; a thread keeps the
 * first vector of its row, and reads again what it wrote of the others. Each sum is rounded to BF16 before the next. */
#include "cuda/device.cuh"

enum { THREADS = 256, WAVES = 16, VECTOR = 8 };

typedef struct residual_op {
    residual r;
    const float *norm;
    tensor y, shared, cache; /* add_norm has y alone; shared without data: none */
    int layer;
    batch in;
    slots s;
    block_rule k;
    volatile int32_t *reached; /* in host memory: one write across the bus, for which nothing waits */
} residual_op;

/* What the routed experts give a row: from `packed` (fp32), where the forward computed it, else from the cache; `keep`:
 * packed goes into the cache too. */
typedef struct routed_row {
    const float *packed;
    bf16 *cache;
    bool keep;
} routed_row;

static __device__ __forceinline__ routed_row find_routed(const residual_op &a, int64_t row)
{
    int32_t in_block = ((const int32_t *)a.in.position.data)[row] % a.k.block_size;
    int32_t owner = ((const int32_t *)a.in.slot.data)[row], place = ((const int32_t *)a.in.place.data)[row];
    bool sealing = ((const int32_t *)a.in.role.data)[row] == ROW_SEALING;
    const slot *x = (const slot *)a.s.slot.data + owner;
    uint64_t fresh = x->fresh, decoded = x->decoded;
    bool anew = sealing || (fresh >> in_block & 1);
    return {anew ? row_of<float>(a.y, place) : NULL,
            row_of<bf16>(a.cache, ((int64_t)a.layer * a.s.slot_count + owner) * a.k.block_size + in_block),
            !sealing && (decoded >> in_block & 1)};
}

template <int V> static __device__ __forceinline__ void add(pack_of<bf16, V> &a, const pack_of<bf16, V> &b)
{
#pragma unroll
    for (int k = 0; k < V; k++)
        narrow(&a.x[k], widen(a.x[k]) + widen(b.x[k]));
}

template <int V, bool MERGE> static __global__ void __launch_bounds__(THREADS) residual_kernel(residual_op a)
{
    typedef pack_of<bf16, V> pack;
    typedef pack_of<float, V> wide;
    __shared__ float room[THREADS / WARP];
    let_next();
    const int64_t width = a.r.x.cols / V;
    wide weight = {};
    if (threadIdx.x < width)
        weight = ((const wide *)a.norm)[threadIdx.x];
    after_previous();
    if (blockIdx.x == 0 && threadIdx.x == 0)
        *a.reached = a.r.through;
    const int64_t n = used_rows(a.r.x);
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        pack *x = (pack *)row_of<bf16>(a.r.x, i), *h = (pack *)row_of<bf16>(a.r.h, i), first = {};
        const pack *y = MERGE ? NULL : (const pack *)row_of<bf16>(a.y, i);
        const pack *shared = MERGE && a.shared.data ? (const pack *)row_of<bf16>(a.shared, i) : NULL;
        routed_row routed = {};
        if (MERGE)
            routed = find_routed(a, i);
        float sum = 0;
        for (int64_t j = threadIdx.x; j < width; j += THREADS) {
            pack to = x[j], more;
            if (!MERGE) {
                more = y[j];
            } else {
                pack z;
                if (shared)
                    z = shared[j];
                if (routed.packed) {
                    wide f = ((const wide *)routed.packed)[j];
#pragma unroll
                    for (int k = 0; k < V; k++)
                        narrow(&more.x[k], f.x[k]);
                    if (routed.keep)
                        ((pack *)routed.cache)[j] = more;
                } else {
                    more = ((const pack *)routed.cache)[j];
                }
                if (shared)
                    add(more, z);
            }
            add(to, more);
            x[j] = to;
            if (j == threadIdx.x)
                first = to;
#pragma unroll
            for (int k = 0; k < V; k++)
                sum = fmaf(widen(to.x[k]), widen(to.x[k]), sum);
        }
        float scale = 1.0f / sqrtf(block_sum<THREADS>(sum, room) / (float)a.r.x.cols + a.r.eps);
        int32_t place = a.r.h_fresh.data ? ((const int32_t *)a.in.place.data)[i] : -1;
        pack *packed = place >= 0 ? (pack *)row_of<bf16>(a.r.h_fresh, place) : NULL;
        for (int64_t j = threadIdx.x; j < width; j += THREADS) {
            pack to = j == threadIdx.x ? first : x[j];
            wide w = j == threadIdx.x ? weight : ((const wide *)a.norm)[j];
#pragma unroll
            for (int k = 0; k < V; k++)
                narrow(&to.x[k], widen(to.x[k]) * scale * w.x[k]);
            h[j] = to;
            if (packed)
                packed[j] = to;
        }
    }
}

static bool wide_rows(const tensor *t)
{
    return !t->data || vectors_fit(*t, VECTOR);
}

template <bool MERGE> static status end(cuda *c, residual_op &a, const char *what)
{
    a.reached = c->reached;
    const residual &r = a.r;
    const tensor *all[] = {&r.x, &r.h, &r.h_fresh, r.norm, &a.y, &a.shared, &a.cache};
    bool wide = true;
    for (const tensor *t : all)
        wide = wide && wide_rows(t);
    assert(r.x.type == BF16 && r.h.type == BF16 && r.norm->type == F32 && r.h.rows >= r.x.rows);
    assert(r.h.cols == r.x.cols && r.norm->cols == r.x.cols && a.y.cols == r.x.cols);
    assert(!r.h_fresh.data || (r.h_fresh.type == BF16 && r.h_fresh.cols == r.x.cols));
    auto kernel = wide ? residual_kernel<VECTOR, MERGE> : residual_kernel<1, MERGE>;
    return launch(c, what, kernel, cuda_grid(c, r.x.rows, WAVES), THREADS, 0, a);
}

extern "C" status cuda_add_norm(backend *b, const residual *r, const tensor *y, const batch *in)
{
    residual_op a = {};
    a.r = *r;
    a.norm = (const float *)r->norm->data;
    a.y = *y;
    a.in = *in;
    assert(y->type == BF16 && y->rows >= r->x.rows);
    return end<false>(cuda_of(b), a, "add and norm");
}

extern "C" status cuda_merge(backend *b, const residual *r, const tensor *packed, const tensor *shared, tensor *cache,
                             int layer, const batch *in, const slots *s, const block_rule *k)
{
    residual_op a = {*r, (const float *)r->norm->data, *packed, *shared, *cache, layer, *in, *s, *k};
    assert(packed->type == F32 && cache->type == BF16 && cache->cols == r->x.cols);
    assert(!shared->data || (shared->type == BF16 && shared->cols == r->x.cols && shared->rows >= r->x.rows));
    return end<true>(cuda_of(b), a, "merge");
}
