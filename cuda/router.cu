/* The router: y[n, E] = x[n, H] w[E, H]^T, BF16 activations and fp32 weights, for weights of whole 16 x 32 pieces.
 *
 * w = a + b + c, each BF16: 8 bits of its 24 a piece, so that the split is exact (down to 2^-110 or so), as every
 * product with a BF16 is in fp32. What is lost is lost in the sums of fp32.
 *
 * A block of eight warps takes MT x 16 experts by NT x 8 tokens; warp i the pieces of 32 of the inner dimension whose
 * number is i modulo 8, and the eight sums are added in order. Lane q of a group of four takes eight neighbours of the
 * 32, for both operands alike: a product does not care which of its terms comes where. */
#include "cuda/device.cuh"
#include "cuda/hopper.cuh"

enum { ROUTER_WARPS = 8, ROUTER_THREADS = ROUTER_WARPS * WARP };

static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Two neighbours, split into three pairs. */
static __device__ __forceinline__ void split(float x, float y, uint32_t &high, uint32_t &middle, uint32_t &low)
{
    __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    float x1 = x - __low2float(h), y1 = y - __high2float(h);
    __nv_bfloat162 m = __floats2bfloat162_rn(x1, y1);
    high = *(uint32_t *)&h;
    middle = *(uint32_t *)&m;
    low = pair(x1 - __low2float(m), y1 - __high2float(m));
}

template <int MT, int NT>
static __device__ __forceinline__ void router_tile(tensor &y, const tensor &x, const tensor &w, int64_t n, int64_t out,
                                                   int64_t first, float *room)
{
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, row = lane / 4, quad = lane % 4;
    float sums[MT][NT][4] = {};
    for (int64_t k = warp * 32 + quad * 8; k < x.cols; k += ROUTER_WARPS * 32) {
        uint4 b[NT];
#pragma unroll
        for (int j = 0; j < NT; j++) {
            int64_t token = first + 8 * j + row;
            b[j] = token < n ? *(const uint4 *)(row_of<bf16>(x, token) + k) : uint4{0, 0, 0, 0};
        }
#pragma unroll
        for (int i = 0; i < MT; i++) {
            const float4 *w0 = (const float4 *)(row_of<float>(w, out + 16 * i + row) + k);
            const float4 *w1 = (const float4 *)(row_of<float>(w, out + 16 * i + row + 8) + k);
#pragma unroll
            for (int h = 0; h < 2; h++) { /* four of the eight neighbours: one product of 16 */
                uint32_t high[4], middle[4], low[4];
                float4 u = w0[h], v = w1[h];
                split(u.x, u.y, high[0], middle[0], low[0]);
                split(v.x, v.y, high[1], middle[1], low[1]);
                split(u.z, u.w, high[2], middle[2], low[2]);
                split(v.z, v.w, high[3], middle[3], low[3]);
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    uint32_t b0 = h ? b[j].z : b[j].x, b1 = h ? b[j].w : b[j].y;
                    mma(sums[i][j], low, b0, b1);
                    mma(sums[i][j], middle, b0, b1);
                    mma(sums[i][j], high, b0, b1);
                }
            }
        }
    }
    enum { EXPERTS = 16 * MT, TOKENS = 8 * NT, STEP = EXPERTS + 1 };
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                room[(warp * TOKENS + 8 * j + 2 * quad + e % 2) * STEP + 16 * i + row + e / 2 * 8] = sums[i][j][e];
    __syncthreads();
    for (int at = (int)threadIdx.x; at < EXPERTS * TOKENS; at += ROUTER_THREADS) {
        int token = at / EXPERTS, e = at % EXPERTS;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < ROUTER_WARPS; i++)
            sum += room[(i * TOKENS + token) * STEP + e];
        if (first + token < n)
            row_of<float>(y, first + token)[out + e] = sum;
    }
    __syncthreads();
}

template <int MT, int NT>
static __device__ __forceinline__ void router_tiles(tensor &y, const tensor &x, const tensor &w, int64_t n, float *room)
{
    int64_t across = w.rows / (16 * MT), tiles = across * ((n + 8 * NT - 1) / (8 * NT));
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x)
        router_tile<MT, NT>(y, x, w, n, t % across * 16 * MT, t / across * 8 * NT, room);
}

enum { ROUTER_WIDE = 4 * 16, ROUTER_TOKENS = 8 * 8 }; /* a large tile's experts and tokens */

/* Small tiles fill the device while there are few tokens; every element is summed alike in both. */
static __global__ void __launch_bounds__(ROUTER_THREADS) router_kernel(tensor y, tensor x, tensor w)
{
    extern __shared__ float router_room[];
    int64_t n = used_rows(x);
    if (w.rows % ROUTER_WIDE != 0 || w.rows / 16 * ((n + 15) / 16) <= 4 * (int64_t)gridDim.x)
        router_tiles<1, 2>(y, x, w, n, router_room);
    else
        router_tiles<4, 8>(y, x, w, n, router_room);
}

extern "C" status cuda_router(cuda *c, tensor *y, const tensor *x, const tensor *w)
{
    int room = ROUTER_WARPS * ROUTER_TOKENS * (ROUTER_WIDE + 1) * (int)sizeof(float);
    cudaError_t e = cudaFuncSetAttribute(router_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
    if (e != cudaSuccess)
        return cuda_check(e, "router product", __FILE__, __LINE__);
    router_kernel<<<cuda_grid(c, w->rows / 16 * ((x->rows + 15) / 16), 1), ROUTER_THREADS, (size_t)room, c->stream>>>(
        *y, *x, *w);
    return CUDA_LAUNCHED("router product");
}
