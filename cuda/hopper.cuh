/* What the sm_90a kernels share: shared-memory barriers, bulk tensor copies, warpgroup products, in PTX.
 *
 * Tiles of shared memory are rows of 128 bytes (64 BF16 of the inner dimension), eight rows an atom of 1024 bytes, the
 * 16-byte chunks of a row permuted by its number: chunk c of row r lies at place c ^ (r & 7). The copy engine writes
 * that (SWIZZLE_128B) and the tensor cores read it. */
#ifndef EPOCH_CUDA_HOPPER_CUH
#define EPOCH_CUDA_HOPPER_CUH

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

enum { TILE_K = 64, TILE_ROW = 128, ATOM = 1024 }; /* elements and bytes of a tile's row; bytes of eight rows */

static __device__ __forceinline__ uint32_t shared_at(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- barriers in shared memory; `at` is a shared address */

static __device__ __forceinline__ void barrier_init(uint32_t at, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

/* Makes the barriers' beginnings visible to the copy engine. */
static __device__ __forceinline__ void barrier_init_done()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t at)
{
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}

/* Arrives, and lets the phase wait for `bytes` of bulk copies besides. */
static __device__ __forceinline__ void barrier_expect(uint32_t at, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

/* Waits for the phase of this parity to complete. A wait of some seconds is a broken pipeline: the kernel stops, and
 * the error names it, instead of hanging the job. */
static __device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t parity)
{
    int64_t since = 0;
    for (;;) {
        uint32_t done;
        asm volatile("{\n.reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(at), "r"(parity)
                     : "memory");
        if (done)
            return;
        if (since == 0)
            since = clock64();
        else if (clock64() - since > 1ll << 33)
            __trap();
    }
}

/* `threads` threads of the block meet at hardware barrier `id` (0 is __syncthreads). */
static __device__ __forceinline__ void meet(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* Adds one to a counter in device memory; what it was. What the caller wrote before, and others of the block whose
 * barrier it has waited for, is there for whoever reads that it has counted, and for those that meet him. */
static __device__ __forceinline__ int32_t count_in(int32_t *count)
{
    int32_t was;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(was) : "l"(count) : "memory");
    return was;
}

/* How many have counted so far; what they wrote before is there. */
static __device__ __forceinline__ int32_t counted_in(const int32_t *count)
{
    int32_t is;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(is) : "l"(count) : "memory");
    return is;
}

/* All threads of the cluster meet; what they wrote to shared memory before is visible to all behind it. */
static __device__ __forceinline__ void cluster_meet()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* The same in two steps, for who only wants to know that all have come so far, or set up their barriers. */
static __device__ __forceinline__ void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

static __device__ __forceinline__ void cluster_wait()
{
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

/* A shared address in the cluster's block `rank`. */
static __device__ __forceinline__ uint32_t cluster_at(uint32_t at, int rank)
{
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
    return there;
}

/* Eight or four bytes to the same shared address of the cluster's block `rank`, whose barrier counts them as it does
 * bulk copies. */
static __device__ __forceinline__ void cluster_send8(uint32_t at, uint32_t barrier, int rank, uint64_t value)
{
    uint32_t there = cluster_at(at, rank), barrier_there = cluster_at(barrier, rank);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];" ::"r"(there), "l"(value),
                 "r"(barrier_there)
                 : "memory");
}

static __device__ __forceinline__ void cluster_send4(uint32_t at, uint32_t barrier, int rank, uint32_t value)
{
    uint32_t there = cluster_at(at, rank), barrier_there = cluster_at(barrier, rank);
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(there), "r"(value),
                 "r"(barrier_there)
                 : "memory");
}

/* Four floats at the same shared address of the cluster's block `rank`. */
static __device__ __forceinline__ float4 cluster_load4(uint32_t at, int rank)
{
    uint32_t there = cluster_at(at, rank);
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(there)
                 : "memory");
    return v;
}

/* ---- copies */

/* How the L2 cache is to hold what a copy brings: as long as anything, or only until there is need of its place. The
 * latter is createpolicy's evict_first; with its evict_normal copies are slower than with none, with this word not. */
static __device__ __forceinline__ uint64_t cache_policy(bool passing)
{
    return passing ? 0x12f0000000000000 : 0x1000000000000000;
}

/* A box of a tensor of five dimensions into shared memory; completes on the barrier. One thread calls. */
static __device__ __forceinline__ void copy_box5(uint32_t to, const CUtensorMap *map, uint32_t barrier, int c0, int c1,
                                                 int c2, int c3, int c4)
{
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, "
        "%6, %7}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

/* The same with a cache_policy. */
static __device__ __forceinline__ void copy_box5(uint32_t to, const CUtensorMap *map, uint32_t barrier, int c0, int c1,
                                                 int c2, int c3, int c4, uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
        "{%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
        : "memory");
}

/* The same of two dimensions. */
static __device__ __forceinline__ void copy_box2(uint32_t to, const CUtensorMap *map, uint32_t barrier, int c0, int c1)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1)
        : "memory");
}

/* Bytes that lie together, the same way; a multiple of 16, and so both addresses. */
static __device__ __forceinline__ void copy_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

/* Asks for a box into the L2 cache. */
static __device__ __forceinline__ void prefetch_box5(const CUtensorMap *map, int c0, int c1, int c2, int c3, int c4)
{
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(c0),
                 "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

static __device__ __forceinline__ void prefetch_box2(const CUtensorMap *map, int c0, int c1)
{
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(c0), "r"(c1)
                 : "memory");
}

/* A box out of shared memory, where it has been made visible by fence_written and a barrier; of two dimensions. */
static __device__ __forceinline__ void bring_box2(const CUtensorMap *map, uint32_t from, int c0, int c1)
{
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
                 "r"(c0), "r"(c1)
                 : "memory");
}

/* Bytes that lie together, the same way; to any memory that this GPU reaches. */
static __device__ __forceinline__ void bring_bytes(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

static __device__ __forceinline__ void brought_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/* Until shared memory that this thread had brought out has been read, but for its newest LEFT commits. */
template <int LEFT = 0> static __device__ __forceinline__ void brought_wait_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

/* Until what this thread had brought out is in memory. */
static __device__ __forceinline__ void brought_wait()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* Asks for bytes to be in the cache soon; a multiple of 16, and so the address. */
static __device__ __forceinline__ void prefetch_bytes(const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* 16 bytes, asynchronously, past L1. */
static __device__ __forceinline__ void copy16(uint32_t to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

/* Until all of this thread's have come. */
static __device__ __forceinline__ void copies16_wait()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* The barrier sees this thread arrive when all its copies so far are there. Its count includes the thread. */
static __device__ __forceinline__ void copies_arrive(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* Shared memory that threads wrote or read (this one, or others whose barrier this one has waited for) may now be read
 * by the tensor cores and the copy engine, or written by that: for this thread, or behind a barrier for others. */
static __device__ __forceinline__ void fence_written()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* What this thread has seen to be in memory, the copy engine now reads so too. */
static __device__ __forceinline__ void fence_seen()
{
    asm volatile("fence.proxy.async.global;" ::: "memory");
}

/* ---- registers of a warpgroup's role */

template <int COUNT> static __device__ __forceinline__ void registers_more()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT> static __device__ __forceinline__ void registers_fewer()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* ---- a ring of stages: a place in it, and the parity of that pass */

typedef struct ring_place {
    int stage;
    uint32_t parity;
} ring_place;

static __device__ __forceinline__ void ring_next(ring_place &p, int stages)
{
    if (++p.stage == stages) {
        p.stage = 0;
        p.parity ^= 1;
    }
}

/* ---- products of a warpgroup */

/* An operand whose rows run along the inner dimension: atoms of eight rows, one behind the other. The next 16 of the
 * inner dimension are 32 bytes further (add 2). */
static __device__ __forceinline__ uint64_t operand(uint32_t at)
{
    return (uint64_t)(at >> 4 & 0x3fff) | 1ull << 16 | (uint64_t)(ATOM >> 4) << 32 | 1ull << 62;
}

/* An operand B stored the other way: rows of the tile are the product's inner dimension, 64 outer elements a row; the
 * next 64 outer elements are `block` bytes further. The next 16 of the inner dimension are 2 * ATOM bytes further. */
static __device__ __forceinline__ uint64_t operand_across(uint32_t at, uint32_t block)
{
    return (uint64_t)(at >> 4 & 0x3fff) | (uint64_t)(block >> 4) << 16 | (uint64_t)(ATOM >> 4) << 32 | 1ull << 62;
}

static __device__ __forceinline__ void products_begin()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

static __device__ __forceinline__ void products_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int LEFT> static __device__ __forceinline__ void products_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

/* Keeps the compiler from moving uses of accumulators across the asynchronous products. */
template <int COUNT> static __device__ __forceinline__ void hold(float (&d)[COUNT])
{
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

/* product<N>: d[64, N] = a[64, 16] b[N, 16]^T (+ d where `add`), one warpgroup, BF16 in, fp32 out. Thread t of the
 * warpgroup holds of rows 16 (t / 32) + (t % 32) / 4 and that + 8 the columns 8 j + 2 (t % 4) and the next:
 * d[4 j], d[4 j + 1] of the first row, d[4 j + 2], d[4 j + 3] of the second. */
template <int N> struct product;

/* The registers of an accumulator, named in the instruction and bound to it: list j has 4 (j + 1). */
#define EPOCH_R0 "%0,%1,%2,%3"
#define EPOCH_R1 EPOCH_R0 ",%4,%5,%6,%7"
#define EPOCH_R2 EPOCH_R1 ",%8,%9,%10,%11"
#define EPOCH_R3 EPOCH_R2 ",%12,%13,%14,%15"
#define EPOCH_R4 EPOCH_R3 ",%16,%17,%18,%19"
#define EPOCH_R5 EPOCH_R4 ",%20,%21,%22,%23"
#define EPOCH_R6 EPOCH_R5 ",%24,%25,%26,%27"
#define EPOCH_R7 EPOCH_R6 ",%28,%29,%30,%31"
#define EPOCH_R8 EPOCH_R7 ",%32,%33,%34,%35"
#define EPOCH_R9 EPOCH_R8 ",%36,%37,%38,%39"
#define EPOCH_R10 EPOCH_R9 ",%40,%41,%42,%43"
#define EPOCH_R11 EPOCH_R10 ",%44,%45,%46,%47"
#define EPOCH_R12 EPOCH_R11 ",%48,%49,%50,%51"
#define EPOCH_R13 EPOCH_R12 ",%52,%53,%54,%55"
#define EPOCH_R14 EPOCH_R13 ",%56,%57,%58,%59"
#define EPOCH_R15 EPOCH_R14 ",%60,%61,%62,%63"
#define EPOCH_R16 EPOCH_R15 ",%64,%65,%66,%67"
#define EPOCH_R17 EPOCH_R16 ",%68,%69,%70,%71"
#define EPOCH_R18 EPOCH_R17 ",%72,%73,%74,%75"
#define EPOCH_R19 EPOCH_R18 ",%76,%77,%78,%79"
#define EPOCH_R20 EPOCH_R19 ",%80,%81,%82,%83"
#define EPOCH_R21 EPOCH_R20 ",%84,%85,%86,%87"
#define EPOCH_R22 EPOCH_R21 ",%88,%89,%90,%91"
#define EPOCH_R23 EPOCH_R22 ",%92,%93,%94,%95"
#define EPOCH_R24 EPOCH_R23 ",%96,%97,%98,%99"
#define EPOCH_R25 EPOCH_R24 ",%100,%101,%102,%103"
#define EPOCH_R26 EPOCH_R25 ",%104,%105,%106,%107"
#define EPOCH_R27 EPOCH_R26 ",%108,%109,%110,%111"
#define EPOCH_R28 EPOCH_R27 ",%112,%113,%114,%115"
#define EPOCH_R29 EPOCH_R28 ",%116,%117,%118,%119"
#define EPOCH_R30 EPOCH_R29 ",%120,%121,%122,%123"
#define EPOCH_R31 EPOCH_R30 ",%124,%125,%126,%127"
#define EPOCH_BIND(j) "+f"(d[4 * (j)]), "+f"(d[4 * (j) + 1]), "+f"(d[4 * (j) + 2]), "+f"(d[4 * (j) + 3])
#define EPOCH_D0 EPOCH_BIND(0)
#define EPOCH_D1 EPOCH_D0, EPOCH_BIND(1)
#define EPOCH_D2 EPOCH_D1, EPOCH_BIND(2)
#define EPOCH_D3 EPOCH_D2, EPOCH_BIND(3)
#define EPOCH_D4 EPOCH_D3, EPOCH_BIND(4)
#define EPOCH_D5 EPOCH_D4, EPOCH_BIND(5)
#define EPOCH_D6 EPOCH_D5, EPOCH_BIND(6)
#define EPOCH_D7 EPOCH_D6, EPOCH_BIND(7)
#define EPOCH_D8 EPOCH_D7, EPOCH_BIND(8)
#define EPOCH_D9 EPOCH_D8, EPOCH_BIND(9)
#define EPOCH_D10 EPOCH_D9, EPOCH_BIND(10)
#define EPOCH_D11 EPOCH_D10, EPOCH_BIND(11)
#define EPOCH_D12 EPOCH_D11, EPOCH_BIND(12)
#define EPOCH_D13 EPOCH_D12, EPOCH_BIND(13)
#define EPOCH_D14 EPOCH_D13, EPOCH_BIND(14)
#define EPOCH_D15 EPOCH_D14, EPOCH_BIND(15)
#define EPOCH_D16 EPOCH_D15, EPOCH_BIND(16)
#define EPOCH_D17 EPOCH_D16, EPOCH_BIND(17)
#define EPOCH_D18 EPOCH_D17, EPOCH_BIND(18)
#define EPOCH_D19 EPOCH_D18, EPOCH_BIND(19)
#define EPOCH_D20 EPOCH_D19, EPOCH_BIND(20)
#define EPOCH_D21 EPOCH_D20, EPOCH_BIND(21)
#define EPOCH_D22 EPOCH_D21, EPOCH_BIND(22)
#define EPOCH_D23 EPOCH_D22, EPOCH_BIND(23)
#define EPOCH_D24 EPOCH_D23, EPOCH_BIND(24)
#define EPOCH_D25 EPOCH_D24, EPOCH_BIND(25)
#define EPOCH_D26 EPOCH_D25, EPOCH_BIND(26)
#define EPOCH_D27 EPOCH_D26, EPOCH_BIND(27)
#define EPOCH_D28 EPOCH_D27, EPOCH_BIND(28)
#define EPOCH_D29 EPOCH_D28, EPOCH_BIND(29)
#define EPOCH_D30 EPOCH_D29, EPOCH_BIND(30)
#define EPOCH_D31 EPOCH_D30, EPOCH_BIND(31)

#define EPOCH_PRODUCT(N, J, A, B, P)                                                                                   \
    template <> struct product<N> {                                                                                    \
        template <int COUNT>                                                                                           \
        static __device__ __forceinline__ void run(float (&d)[COUNT], uint64_t a, uint64_t b, int add)                 \
        {                                                                                                              \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                               \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" EPOCH_R##J "}, %" A ", %" B      \
                                                                                                 ", p, 1, 1, 0, 0;\n}" \
                         : EPOCH_D##J                                                                                  \
                         : "l"(a), "l"(b), "r"(add));                                                                  \
        }                                                                                                              \
    };
EPOCH_PRODUCT(8, 0, "4", "5", "6")
EPOCH_PRODUCT(16, 1, "8", "9", "10")
EPOCH_PRODUCT(32, 3, "16", "17", "18")
EPOCH_PRODUCT(48, 5, "24", "25", "26")
EPOCH_PRODUCT(64, 7, "32", "33", "34")
EPOCH_PRODUCT(80, 9, "40", "41", "42")
EPOCH_PRODUCT(96, 11, "48", "49", "50")
EPOCH_PRODUCT(112, 13, "56", "57", "58")
EPOCH_PRODUCT(128, 15, "64", "65", "66")
EPOCH_PRODUCT(144, 17, "72", "73", "74")
EPOCH_PRODUCT(160, 19, "80", "81", "82")
EPOCH_PRODUCT(176, 21, "88", "89", "90")
EPOCH_PRODUCT(192, 23, "96", "97", "98")
EPOCH_PRODUCT(208, 25, "104", "105", "106")
EPOCH_PRODUCT(224, 27, "112", "113", "114")
EPOCH_PRODUCT(240, 29, "120", "121", "122")
EPOCH_PRODUCT(256, 31, "128", "129", "130")

/* product_held<N>: the same with a in registers. Thread t of the warpgroup gives of rows 16 (t / 32) + (t % 32) / 4 and
 * that + 8 the columns 2 (t % 4) and the next: a[0], a[1]; and the columns 8 further: a[2], a[3]. Two column blocks of
 * an accumulator hold it so. */
template <int N> struct product_held;
/* product_across<N>: as product_held, with b[16, N], by operand_across. */
template <int N> struct product_across;
#define EPOCH_PRODUCT_HELD(NAME, ACROSS, N, J, A0, A1, A2, A3, B, P)                                           \
    template <> struct NAME<N> {                                                                               \
        template <int COUNT>                                                                                   \
        static __device__ __forceinline__ void run(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b,      \
                                                   int add)                                                    \
        {                                                                                                      \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\n"                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" EPOCH_R##J               \
                         "}, {%" A0 ", %" A1 ", %" A2 ", %" A3 "}, %" B ", p, 1, 1, " ACROSS ";\n}"            \
                         : EPOCH_D##J                                                                          \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                      \
        }                                                                                                      \
    };
EPOCH_PRODUCT_HELD(product_held, "0", 16, 1, "8", "9", "10", "11", "12", "13")
EPOCH_PRODUCT_HELD(product_held, "0", 32, 3, "16", "17", "18", "19", "20", "21")
EPOCH_PRODUCT_HELD(product_held, "0", 64, 7, "32", "33", "34", "35", "36", "37")
EPOCH_PRODUCT_HELD(product_held, "0", 128, 15, "64", "65", "66", "67", "68", "69")
EPOCH_PRODUCT_HELD(product_across, "1", 128, 15, "64", "65", "66", "67", "68", "69")

/* ---- the way out of an accumulator */

static __device__ __forceinline__ uint32_t pair(float low, float high)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *(const uint32_t *)&v;
}

/* 2^x to 2 ulp; 0 below 2^-126. */
static __device__ __forceinline__ float power2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Four 8 x 8 blocks, transposed: block i's column r (two to a thread) becomes the 16 bytes at the address that lane
 * 8 i + r gives. */
static __device__ __forceinline__ void store_across(uint32_t at, uint32_t v0, uint32_t v1, uint32_t v2, uint32_t v3)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v0), "r"(v1),
                 "r"(v2), "r"(v3)
                 : "memory");
}

/* The same of two blocks; lanes 0 to 15 give the addresses. */
static __device__ __forceinline__ void store_across(uint32_t at, uint32_t v0, uint32_t v1)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(v0), "r"(v1)
                 : "memory");
}

static __device__ __forceinline__ void shared_store4(uint32_t at, uint32_t v)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

static __device__ __forceinline__ uint32_t shared_load4(uint32_t at)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}

/* Adds where `adds`, without a branch; what there was, or 0. */
static __device__ __forceinline__ uint32_t shared_add_if(bool adds, uint32_t at, uint32_t v)
{
    uint32_t was;
    asm volatile("{\n.reg .pred p;\n"
                 "setp.ne.u32 p, %3, 0;\n"
                 "mov.u32 %0, 0;\n"
                 "@p atom.shared.add.u32 %0, [%1], %2;\n}"
                 : "=&r"(was)
                 : "r"(at), "r"(v), "r"((uint32_t)adds)
                 : "memory");
    return was;
}

static __device__ __forceinline__ float2 shared_load8(uint32_t at)
{
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

/* 16 bytes in one store, which the compiler may make four of. */
static __device__ __forceinline__ void global_store16(void *to, uint4 v)
{
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

static __device__ __forceinline__ uint4 shared_load16(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

#endif
