/* RMSNorm, and the rotation of queries and keys (half-split pairs). Statistics in fp32. */
#include "cuda/device.cuh"

#include <math.h>
#include <stdlib.h>

enum { THREADS = 256, WAVES = 16, VECTOR = 8, ROTATE_WAVES = 5 };

/* y = x / sqrt(mean(x^2) + eps) * w; a thread keeps its first vector of a row in registers. y may be x. */
template <int V> static __global__ void norm_kernel(tensor y, tensor x, const float *w, float eps)
{
    typedef pack_of<bf16, V> pack;
    __shared__ float room[THREADS / WARP];
    let_next();
    after_previous();
    int64_t n = used_rows(x), width = x.cols / V;
    for (int64_t i = blockIdx.x; i < n; i += gridDim.x) {
        const pack *from = (const pack *)row_of<bf16>(x, i);
        pack *to = (pack *)row_of<bf16>(y, i);
        pack first;
        float sum = 0;
        for (int64_t j = threadIdx.x; j < width; j += THREADS) {
            pack a = from[j];
            if (j == threadIdx.x)
                first = a;
            for (int k = 0; k < V; k++)
                sum = fmaf(widen(a.x[k]), widen(a.x[k]), sum);
        }
        float scale = 1.0f / sqrtf(block_sum<THREADS>(sum, room) / (float)x.cols + eps);
        for (int64_t j = threadIdx.x; j < width; j += THREADS) {
            pack a = j == threadIdx.x ? first : from[j];
            for (int k = 0; k < V; k++)
                narrow(&a.x[k], widen(a.x[k]) * scale * w[j * V + k]);
            to[j] = a;
        }
    }
}

extern "C" status cuda_norm(backend *b, tensor *y, const tensor *x, const tensor *w, float eps)
{
    cuda *c = cuda_of(b);
    assert(x->type == BF16 && y->type == BF16 && w->type == F32 && w->cols == x->cols && y->rows >= x->rows);
    unsigned grid = cuda_grid(c, x->rows, WAVES);
    if (vectors_fit(*y, VECTOR) && vectors_fit(*x, VECTOR))
        return launch(c, "norm", norm_kernel<VECTOR>, grid, THREADS, 0, *y, *x, (const float *)w->data, eps);
    return launch(c, "norm", norm_kernel<1>, grid, THREADS, 0, *y, *x, (const float *)w->data, eps);
}

/* cos and sin of positions 0 .. count - 1, from the host: the same numbers as the CPU backend's. Computed once. */
static status angles(cuda *c, int32_t count, const attention_rule *r)
{
    int half = r->rotary_dim / 2;
    if (c->angle_dim == r->rotary_dim && c->angle_theta == r->theta && count <= c->angle_count)
        return OK;
    size_t floats = (size_t)count * (size_t)r->rotary_dim;
    float *host = (float *)malloc(floats * sizeof *host + 1), *at = host;
    if (!host)
        return status_fail(FAILED, __FILE__, __LINE__, "out of memory: rotary angles of %d positions", count);
    for (int32_t p = 0; p < count; p++, at += r->rotary_dim)
        for (int j = 0; j < half; j++) {
            float angle = (float)p * powf(r->theta, -2.0f * (float)j / (float)r->rotary_dim);
            at[j] = cosf(angle);
            at[half + j] = sinf(angle);
        }
    status st = cuda_grow(c, &c->angles, floats * sizeof *host, "rotary angles");
    if (st == OK)
        st = cuda_check(cudaStreamSynchronize(c->stream), "rotary angles", __FILE__, __LINE__);
    if (st == OK)
        st = cuda_check(cudaMemcpy(c->angles.data, host, floats * sizeof *host, cudaMemcpyHostToDevice),
                        "rotary angles", __FILE__, __LINE__);
    free(host);
    c->angle_count = st == OK ? count : 0;
    c->angle_dim = r->rotary_dim;
    c->angle_theta = r->theta;
    return st;
}

typedef struct rotation {
    tensor qkv;
    kv_pool kv;
    int layer;
    const float *q_norm, *k_norm, *angle; /* norms NULL: none */
    batch in;
    slots s;
    attention_rule r;
} rotation;

/* The page where head h of a row leaves its key or value; queries have none. */
static __device__ __forceinline__ int64_t page_of(const rotation &a, int h, int32_t position, int32_t owner)
{
    return h < a.r.heads ? 0 : row_of<int32_t>(a.s.page, owner)[position / a.r.block_size];
}

/* Where head h of row i goes: queries in place, keys and values to that page. */
static __device__ __forceinline__ bf16 *target(const rotation &a, int64_t i, int h, int32_t position, int64_t page)
{
    if (h < a.r.heads)
        return row_of<bf16>(a.qkv, i) + h * a.r.head_dim;
    int64_t at = (a.layer * (int64_t)a.kv.page_count + page) * a.r.block_size + position % a.r.block_size;
    h -= a.r.heads;
    return h < a.r.kv_heads ? row_of<bf16>(a.kv.k, at) + h * a.r.head_dim
                            : row_of<bf16>(a.kv.v, at) + (h - a.r.kv_heads) * a.r.head_dim;
}

/* Both kernels let the next one begin only behind after_previous(): cuda.settled (device.cuh).
 *
 * One warp a head of a row; a lane holds N neighbours (head_dim 32 N), and a pair's other half lies in another lane. */
template <int N> static __global__ void rotate_kernel(rotation a)
{
    typedef pack_of<bf16, N> pack;
    int heads = a.r.heads + 2 * a.r.kv_heads, lane = threadIdx.x % WARP, half = a.r.rotary_dim / 2;
    after_previous();
    let_next();
    int64_t items = used_rows(a.in.position) * heads, most = a.in.position.rows * heads;
    for (int64_t t = (blockIdx.x * (int64_t)THREADS + threadIdx.x) / WARP; t < most;
         t += gridDim.x * (int64_t)(THREADS / WARP)) {
        /* loads take most of the time: these beside the count of rows, and the others beside each other */
        int64_t i = t / heads;
        int h = (int)(t % heads);
        int32_t position = __ldcg((const int32_t *)a.in.position.data + i);
        int32_t owner = __ldcg((const int32_t *)a.in.slot.data + i);
        if ((t >= items) | ((position | owner) < 0)) /* never below 0: asked so that they do not wait for the count */
            break;
        int64_t page = page_of(a, h, position, owner);
        pack p = ((const pack *)(row_of<bf16>(a.qkv, i) + h * a.r.head_dim))[lane];
        const bool turns = h < a.r.heads + a.r.kv_heads;
        const float *w = h < a.r.heads ? a.q_norm : a.k_norm;
        if (turns) {
            const float *angle = a.angle + (int64_t)position * a.r.rotary_dim;
            int e = lane * N, step = half / N;
            bool low = e < half, turned = e < 2 * half;
            int j = low ? e : e - half, other = low ? lane + step : turned ? lane - step : lane;
            float x[N], weight[N], c[N], s[N], sum = 0;
            for (int n = 0; n < N; n++) {
                weight[n] = w ? w[lane * N + n] : 1;
                c[n] = turned ? angle[j + n] : 1;
                s[n] = turned ? angle[half + j + n] : 0;
            }
            for (int n = 0; n < N; n++) {
                x[n] = widen(p.x[n]);
                sum = fmaf(x[n], x[n], sum);
            }
            if (w) {
                float scale = 1.0f / sqrtf(warp_sum(sum) / (float)a.r.head_dim + a.r.eps);
                for (int n = 0; n < N; n++)
                    x[n] = x[n] * scale * weight[n];
            }
            for (int n = 0; n < N; n++) {
                float y = __shfl_sync(EVERY_LANE, x[n], other);
                if (turned)
                    x[n] = low ? x[n] * c[n] - y * s[n] : x[n] * c[n] + y * s[n];
            }
            for (int n = 0; n < N; n++)
                narrow(&p.x[n], x[n]);
        }
        ((pack *)target(a, i, h, position, page))[lane] = p;
    }
}

/* Any shape: the head lies in shared memory between norm and rotation. */
static __global__ void rotate_any_kernel(rotation a)
{
    extern __shared__ float room[];
    int d = a.r.head_dim, heads = a.r.heads + 2 * a.r.kv_heads, lane = threadIdx.x % WARP, half = a.r.rotary_dim / 2;
    float *x = room + threadIdx.x / WARP * d;
    after_previous();
    let_next();
    int64_t items = used_rows(a.in.position) * heads;
    for (int64_t t = (blockIdx.x * (int64_t)THREADS + threadIdx.x) / WARP; t < items;
         t += gridDim.x * (int64_t)(THREADS / WARP)) {
        int64_t i = t / heads;
        int h = (int)(t % heads);
        int32_t position = ((const int32_t *)a.in.position.data)[i];
        const bf16 *from = row_of<bf16>(a.qkv, i) + h * d;
        bf16 *to = target(a, i, h, position, page_of(a, h, position, ((const int32_t *)a.in.slot.data)[i]));
        bool turned = h < a.r.heads + a.r.kv_heads;
        const float *w = !turned ? NULL : h < a.r.heads ? a.q_norm : a.k_norm;
        const float *angle = a.angle + (int64_t)position * a.r.rotary_dim;
        float sum = 0;
        for (int e = lane; e < d; e += WARP) {
            x[e] = widen(from[e]);
            sum = fmaf(x[e], x[e], sum);
        }
        float scale = 1.0f / sqrtf(warp_sum(sum) / (float)d + a.r.eps);
        for (int e = lane; w && e < d; e += WARP)
            x[e] = x[e] * scale * w[e];
        __syncwarp();
        for (int e = lane; e < d; e += WARP) {
            float y = x[e];
            if (turned && e < half)
                y = y * angle[e] - x[e + half] * angle[half + e];
            else if (turned && e < 2 * half)
                y = y * angle[e - half] + x[e - half] * angle[e];
            narrow(&to[e], y);
        }
        __syncwarp();
    }
}

extern "C" status cuda_rotate(backend *b, tensor *qkv, kv_pool *kv, int layer, const tensor *q_norm,
                              const tensor *k_norm, const batch *in, const slots *s, const attention_rule *r)
{
    cuda *c = cuda_of(b);
    int d = r->head_dim, heads = r->heads + 2 * r->kv_heads, half = r->rotary_dim / 2, n = d / WARP;
    assert(qkv->type == BF16 && kv->k.type == BF16 && kv->v.type == BF16 && qkv->cols == (int64_t)heads * d);
    status st = angles(c, s->max_blocks * r->block_size, r);
    if (st != OK)
        return st;
    rotation a = {*qkv, *kv, layer, r->qk_norm ? (const float *)q_norm->data : NULL,
                  r->qk_norm ? (const float *)k_norm->data : NULL, (const float *)c->angles.data, *in, *s, *r};
    /* no more blocks than find room at once: the next kernel begins when the last of them has begun */
    unsigned grid = cuda_grid(c, (in->position.rows * heads + THREADS / WARP - 1) / (THREADS / WARP), ROTATE_WAVES);
    bool whole = (d == 64 || d == 128 || d == 256) && half % n == 0 && qkv->ld % n == 0 && kv->k.ld % n == 0 &&
                 kv->v.ld % n == 0;
    auto kernel = !whole ? rotate_any_kernel : n == 2 ? rotate_kernel<2> : n == 4 ? rotate_kernel<4> : rotate_kernel<8>;
    size_t room = whole ? 0 : (size_t)d * (THREADS / WARP) * sizeof(float);
    st = launch(c, "rotate", kernel, grid, THREADS, room, a);
    c->settled = st == OK;
    return st;
}
