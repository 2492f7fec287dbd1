/* RMSNorm, and the rotation of queries and keys (half-split pairs). Statistics in fp32. */
#include "cuda/device.cuh"

#include <math.h>
#include <stdlib.h>

enum { THREADS = 256, WAVES = 16, VECTOR = 8, ROTATE_WAVES = 2 };

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
    int rows;           /* at most */
    int page_base;      /* the layer's first page */
    uint32_t per_block; /* 2^32 / block_size, rounded up */
    const float *q_norm, *k_norm, *angle; /* norms NULL: none */
    batch in;
    slots s;
    attention_rule r;
} rotation;

/* Both kernels let the next one begin only behind after_previous(): cuda.settled (device.cuh).
 *
 * A lane holds VECTOR neighbours of a head, so that a warp holds a group of heads, and a pair's other half lies in
 * another lane. A warp takes EACH groups of a row at once: of its queries, or half as many of its keys and of its
 * values; and the same ones of further rows. A head's arithmetic is the same for any EACH. */
template <int D, int EACH> struct rotate_shape {
    enum { LANES = D / VECTOR, HEADS = WARP / LANES, QUERIES = EACH * HEADS, KEYS = QUERIES / 2 };

    /* Warps of a row. */
    static __host__ __device__ int parts(const attention_rule &r)
    {
        return r.heads / QUERIES + r.kv_heads / KEYS;
    }

    static bool fits(const attention_rule &r)
    {
        return r.head_dim == D && r.heads % QUERIES == 0 && r.kv_heads % KEYS == 0;
    }
};

/* What a lane knows of its place in a head. Where it is turned, lane `other` holds what belongs to its numbers. */
typedef struct turning {
    bool norm, turned;
    int other;
    float eps, weight[VECTOR], c[VECTOR], s[VECTOR];
} turning;

typedef pack_of<bf16, VECTOR> head_part;

static __device__ __forceinline__ void load_floats(float (&x)[VECTOR], const float *from)
{
    for (int n = 0; n < VECTOR; n += 4) {
        float4 v = __ldcg((const float4 *)(from + n));
        x[n] = v.x, x[n + 1] = v.y, x[n + 2] = v.z, x[n + 3] = v.w;
    }
}

/* Turns two groups, side by side. */
template <int D> static __device__ __forceinline__ void turn(head_part &first, head_part &second, const turning &t)
{
    head_part *const p[2] = {&first, &second};
    float x[2][VECTOR], sum[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < 2; n++)
        for (int k = 0; k < VECTOR; k++) {
            x[n][k] = widen(p[n]->x[k]);
            sum[n] = __fmaf_rn(x[n][k], x[n][k], sum[n]);
        }
    if (t.norm) {
#pragma unroll
        for (int step = D / VECTOR / 2; step > 0; step /= 2)
            for (int n = 0; n < 2; n++)
                sum[n] += __shfl_xor_sync(EVERY_LANE, sum[n], step);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float scale = rsqrtf(__fmaf_rn(sum[n], 1.0f / D, t.eps));
            for (int k = 0; k < VECTOR; k++)
                x[n][k] = __fmul_rn(__fmul_rn(x[n][k], scale), t.weight[k]);
        }
    }
#pragma unroll
    for (int n = 0; n < 2; n++)
        for (int k = 0; k < VECTOR; k++) {
            float y = __shfl_sync(EVERY_LANE, x[n][k], t.other);
            if (t.turned)
                x[n][k] = __fmaf_rn(x[n][k], t.c[k], __fmul_rn(y, t.s[k]));
            narrow(&p[n]->x[k], x[n][k]);
        }
}

template <int D, int EACH> static __global__ void __launch_bounds__(THREADS, ROTATE_WAVES) rotate_kernel(rotation a)
{
    typedef rotate_shape<D, EACH> shape;
    enum { HALF = EACH / 2, STEP = shape::HEADS * D };
    const int lane = (int)threadIdx.x % WARP, e = lane % shape::LANES * VECTOR, half = a.r.rotary_dim / 2;
    const int warp = (int)blockIdx.x * (THREADS / WARP) +
                     __shfl_sync(EVERY_LANE, (int)threadIdx.x / WARP, 0); /* seen to be one for all lanes */
    const int parts = shape::parts(a.r), part = warp % parts, step = (int)gridDim.x * (THREADS / WARP) / parts;
    const int behind = part - a.r.heads / shape::QUERIES;
    const bool keys = behind >= 0, low = e < half;
    const int head = (keys ? behind * shape::KEYS : part * shape::QUERIES) + lane / shape::LANES;
    const int second = keys ? a.r.kv_heads * D : HALF * STEP, first = head * D + e, ld = (int)a.qkv.ld;
    const float *w = keys ? a.k_norm : a.q_norm;
    turning t;
    t.norm = w != NULL;
    t.turned = e < 2 * half;
    t.other = low ? lane + half / VECTOR : t.turned ? lane - half / VECTOR : lane;
    t.eps = a.r.eps;
    if (w)
        load_floats(t.weight, w + e);
    const float *angle = a.angle + (low ? e : t.turned ? e - half : 0);
    const int32_t *positions = (const int32_t *)a.in.position.data, *owners = (const int32_t *)a.in.slot.data;
    bf16 *qkv = (bf16 *)a.qkv.data + first + (keys ? a.r.heads * D : 0);
    int i = warp / parts, position, owner, page, in_block;
    bf16 *row;
    head_part p[EACH];
    /* A row's loads wait for nothing but its position and slot, which are asked for one row before. */
    const auto ask_heads = [&] {
        row = qkv + (int64_t)i * ld;
#pragma unroll
        for (int n = 0; n < EACH; n++)
            *(uint4 *)&p[n] = __ldcg((const uint4 *)(row + n / HALF * second + n % HALF * STEP));
    };
    const auto ask_place = [&] {
        const float *from = angle + (int64_t)position * a.r.rotary_dim;
        load_floats(t.c, from);
        load_floats(t.s, from + half);
        int block = (int)__umulhi((uint32_t)position, a.per_block), next = i + step < a.rows ? i + step : i;
        page = __ldcg((const int32_t *)a.s.page.data + (int64_t)owner * (int)a.s.page.ld + block);
        in_block = position - block * a.r.block_size;
        position = __ldcg(positions + next);
        owner = __ldcg(owners + next);
    };
    after_previous();
    let_next();
    if (i >= a.rows || i >= step) /* warps beyond whole rows */
        return;
    position = __ldcg(positions + i);
    owner = __ldcg(owners + i);
    ask_heads();
    const int used = (int)used_rows_early(a.in.position);
    position = i < used ? position : 0; /* no branch before the loads are under way, though they be for nothing */
    owner = i < used ? owner : 0;
    ask_place();
    for (;;) {
        for (int k = 0; k < VECTOR; k++)
            t.s[k] = low ? -t.s[k] : t.s[k];
#pragma unroll
        for (int n = 0; n < EACH; n += 2)
            if (n < HALF || !keys) {
                head_part value = p[n + 1];
                turn<D>(p[n], p[n + 1], t);
                if (n + 1 == HALF && keys)
                    p[n + 1] = value;
            }
        int64_t to = (int64_t)((a.page_base + page) * a.r.block_size + in_block) * (int)a.kv.k.ld + first;
        bf16 *left = keys ? (bf16 *)a.kv.k.data + to : row, *right = keys ? (bf16 *)a.kv.v.data + to : row + second;
#pragma unroll
        for (int n = 0; n < EACH; n++)
            if (i < used)
                *(uint4 *)((n < HALF ? left : right) + n % HALF * STEP) = *(const uint4 *)&p[n];
        i += step;
        if (i >= used)
            break;
        ask_heads();
        ask_place();
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
        bf16 *to = (bf16 *)from;
        if (h >= a.r.heads) {
            const tensor &pool = h < a.r.heads + a.r.kv_heads ? a.kv.k : a.kv.v;
            int32_t owner = ((const int32_t *)a.in.slot.data)[i], block = position / a.r.block_size;
            int64_t page = a.page_base + row_of<int32_t>(a.s.page, owner)[block];
            to = row_of<bf16>(pool, page * a.r.block_size + position % a.r.block_size);
            to += (h - a.r.heads) % a.r.kv_heads * d;
        }
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

/* So many warps, but no more blocks than find room at once: the next kernel begins when the last of them has begun. */
static unsigned rotate_grid(const cuda *c, int64_t warps)
{
    return cuda_grid(c, (warps + THREADS / WARP - 1) / (THREADS / WARP), ROTATE_WAVES);
}

/* Few rows go to more warps, of fewer heads. false: not with heads of D. */
template <int D> static bool rotate_wide(cuda *c, const rotation &a, status *st)
{
    typedef rotate_shape<D, 2> few;
    typedef rotate_shape<D, 4> many;
    int64_t warps = (int64_t)a.rows * few::parts(a.r);
    if (!few::fits(a.r))
        return false;
    if (!many::fits(a.r) || warps <= (int64_t)cuda_room(c) * (THREADS / WARP))
        *st = launch(c, "rotate", rotate_kernel<D, 2>, rotate_grid(c, warps), THREADS, 0, a);
    else
        *st = launch(c, "rotate", rotate_kernel<D, 4>, rotate_grid(c, (int64_t)a.rows * many::parts(a.r)), THREADS, 0,
                     a);
    return true;
}

extern "C" status cuda_rotate(backend *b, tensor *qkv, kv_pool *kv, int layer, const tensor *q_norm,
                              const tensor *k_norm, const batch *in, const slots *s, const attention_rule *r)
{
    cuda *c = cuda_of(b);
    int d = r->head_dim, heads = r->heads + 2 * r->kv_heads, size = r->block_size;
    assert(qkv->type == BF16 && kv->k.type == BF16 && kv->v.type == BF16 && qkv->cols == (int64_t)heads * d);
    status st = angles(c, s->max_blocks * size, r);
    if (st != OK)
        return st;
    int64_t rows = in->position.rows < qkv->rows ? in->position.rows : qkv->rows;
    rotation a = {.qkv = *qkv,
                  .kv = *kv,
                  .rows = s->slot_count > 0 ? (int)rows : 0,
                  .page_base = layer * kv->page_count,
                  .per_block = size > 1 ? UINT32_MAX / (uint32_t)size + 1 : 0,
                  .q_norm = r->qk_norm ? (const float *)q_norm->data : NULL,
                  .k_norm = r->qk_norm ? (const float *)k_norm->data : NULL,
                  .angle = (const float *)c->angles.data,
                  .in = *in,
                  .s = *s,
                  .r = *r};
    bool whole = r->rotary_dim > 0 && r->rotary_dim % (2 * VECTOR) == 0 && vectors_fit(*qkv, VECTOR) &&
                 vectors_fit(kv->k, VECTOR) && vectors_fit(kv->v, VECTOR) && kv->k.ld == kv->v.ld &&
                 (uintptr_t)a.q_norm % 16 == 0 && (uintptr_t)a.k_norm % 16 == 0 && size > 1 &&
                 (int64_t)s->max_blocks * size * size <= UINT32_MAX; /* so that per_block divides exactly */
    if (!whole || !(rotate_wide<64>(c, a, &st) || rotate_wide<128>(c, a, &st) || rotate_wide<256>(c, a, &st)))
        st = launch(c, "rotate", rotate_any_kernel, rotate_grid(c, in->position.rows * heads), THREADS,
                    (size_t)d * (THREADS / WARP) * sizeof(float), a);
    c->settled = st == OK;
    return st;
}
