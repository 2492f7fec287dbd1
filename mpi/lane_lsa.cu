/* FreshLane between GPUs that reach each other's memory. Every rank has a window, which all ranks can write:
 *
 *   words     [source][2 R + PULSE] of 64 bits, epoch << 32 | value: rows to each rank, sums wanted of each, the pulse
 *   arrived   [source][block]       epoch << 32 | rows that this block of the source has written here
 *   ready     [source]              epoch << 32: all sums of that rank are here
 *   x, ids, weights                 the rows that arrived: by source, in each source's order, back to back
 *   sums      [source]              what that rank's experts made of this rank's rows, in the order they were sent:
 *                                   F32 [rows * units, H], or BF16, but for this rank's own
 *
 * dispatch, in one kernel (two for many rows: `plan` goes first):
 *   1. Count this rank's rows by rank, and give each its place among them. The counts go to every rank, as words that
 *      carry their epoch, so nobody needs a flag to trust them.
 *   2. From all counts follows where each source's rows begin at each rank. Blocks write their rows there, 16 bytes a
 *      store, then their flag.
 *   3. The first block waits for the flags of all blocks of all ranks. So when the kernel has ended all rows are here,
 *      and the experts run by the order of the stream.
 * The experts write each sum straight to where its row came from (sums_away). combine, in one kernel: say `ready` to
 * all, wait until all are, and add each row's sums in the tree's order.
 *
 * Epochs count dispatches, on the device, so that a graph can be replayed. A window needs no second copy of anything:
 * each of the two exchanges is complete on a rank only when every rank has reached it (zero rows are told like others).
 * A rank that writes for dispatch e + 1 has ended combine e; for that every rank had said `ready`, after its experts
 * read the rows and after it read all words of dispatch e. A rank whose experts write the sums of e + 1 has ended
 * dispatch e + 1; for that every rank had sent its rows, after its combine e read the sums of e. In return nobody may
 * rely on arrived rows once it has called combine.
 *
 * Nothing waits for ever: a wait that lasts longer than `patience` leaves a note for the host, and from then on no
 * kernel of this rank waits. Waiting blocks never keep the awaited from running: dispatch waits for what other ranks
 * enqueued before, its own blocks write before they wait, and they are few; and between ready and ready lies no work.
 */
#include "mpi/lane_lsa.h"

#include "cuda/hopper.cuh"
#include "cuda/tree.cuh"

enum {
    PUSH_WARPS = 16, PUSH_THREADS = PUSH_WARPS * WARP,
    PLAN_WARPS = 32, PLAN_THREADS = PLAN_WARPS * WARP, PLAN_BLOCKS = 8,
    FOLD_WARPS = 8, FOLD_THREADS = FOLD_WARPS * WARP,
    ALONE_ENTRIES = 8192 /* of the index, in a block's shared memory */
};

/* ---- memory that other GPUs write */

static __device__ __forceinline__ void tell(uint64_t *to, uint32_t epoch, uint32_t value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"((uint64_t)epoch << 32 | value) : "memory");
}

/* Behind all that this thread, and threads that it met before, have written. */
static __device__ __forceinline__ void tell_behind(uint64_t *to, uint32_t epoch, uint32_t value)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"((uint64_t)epoch << 32 | value) : "memory");
}

static __device__ __forceinline__ uint64_t nanoseconds()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
}

static __device__ void complain(const lsa &m, lsa_what what, int rank, int32_t found, int32_t wanted, uint32_t epoch)
{
    if (atomicCAS(m.broken, 0, 1) != 0)
        return;
    m.fault->rank = rank;
    m.fault->found = found;
    m.fault->wanted = wanted;
    m.fault->epoch = epoch;
    __threadfence_system();
    *(volatile int32_t *)&m.fault->what = what;
    __threadfence_system();
}

/* The value that `word` has in this epoch, once it is there; what was written before it is then visible. */
static __device__ uint32_t hear(const lsa &m, const uint64_t *word, uint32_t epoch, lsa_what what, int rank, bool *fine)
{
    uint64_t since = 0;
    for (uint32_t looks = 1;; looks++) {
        uint64_t now;
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(now) : "l"(word) : "memory");
        if ((int32_t)((uint32_t)(now >> 32) - epoch) >= 0)
            return (uint32_t)now;
        if (looks % 512)
            continue;
        uint64_t t = nanoseconds();
        since = since ? since : t;
        bool over = *(volatile int32_t *)m.broken;
        if (!over && t - since <= m.patience)
            continue;
        if (!over)
            complain(m, what, rank, 0, 0, epoch);
        *fine = false;
        return 0;
    }
}

static __device__ __forceinline__ uint64_t *word_at(const lsa &m, int rank, int source, int i)
{
    return (uint64_t *)(m.window[rank] + m.words) + source * (2 * m.size + PULSE) + i;
}

static __device__ __forceinline__ uint64_t *arrived_at(const lsa &m, int rank, int source, int block)
{
    return (uint64_t *)(m.window[rank] + m.arrived) + source * m.push_blocks + block;
}

static __device__ __forceinline__ uint64_t *ready_at(const lsa &m, int rank, int source)
{
    return (uint64_t *)(m.window[rank] + m.ready) + source;
}

/* ---- the plan of a dispatch */

template <int WARPS> struct plan_room {
    int32_t count[WARPS][LSA_RANKS]; /* rows of each warp by rank, then of the warps before it */
    int32_t here[LSA_RANKS], sums_here[LSA_RANKS]; /* of this block */
    int32_t before[LSA_RANKS];                     /* rows of the blocks before it */
    int32_t all[LSA_RANKS], sums[LSA_RANKS];
};

/* The ranks that a row goes to, as bits. What it wants back from each is added to sums[], unless that is NULL. */
static __device__ __forceinline__ uint64_t ranks_of(const lsa &m, const tensor &ids, int64_t row, int32_t *sums)
{
    const int32_t *id = row_of<int32_t>(ids, row);
    uint64_t ranks = 0;
    int32_t rank = -1, unit = -1;
#pragma unroll 8
    for (int j = 0; j < m.top_k; j++) {
        if (id[j] < 0)
            continue;
        lsa_home h = m.home[id[j]];
        ranks |= 1ull << h.rank;
        if (sums && (h.rank != rank || h.unit != unit))
            atomicAdd(&sums[h.rank], 1);
        rank = h.rank;
        unit = h.unit;
    }
    return ranks;
}

/* index[row * size + rank], and r.all, r.sums, by one block, or by the blocks of one cluster. Each warp owns a run of
 * rows. */
template <int WARPS, bool CLUSTER>
static __device__ void make_plan(const lsa &m, const tensor &ids, int32_t *index, plan_room<WARPS> &r)
{
    int me = (int)threadIdx.x, lane = me % WARP, warp = me / WARP;
    int blocks = CLUSTER ? (int)gridDim.x : 1, block = CLUSTER ? (int)blockIdx.x : 0;
    int n = (int)used_rows(ids), each = blocks * WARPS * WARP, run = (n + each - 1) / each * WARP;
    int from = (block * WARPS + warp) * run, to = from + run < n ? from + run : n;
    int32_t mine[2] = {0, 0};
    uint64_t ranks = 0;
    if (me < m.size)
        r.sums_here[me] = 0;
    __syncthreads();
    for (int base = from; base < to; base += WARP) {
        ranks = base + lane < to ? ranks_of(m, ids, base + lane, m.many_units ? r.sums_here : NULL) : 0;
        for (int k = 0; k < m.size; k++) {
            int rows = __popc(__ballot_sync(EVERY_LANE, ranks >> k & 1));
            mine[0] += lane == k ? rows : 0;
            mine[1] += lane + WARP == k ? rows : 0;
        }
    }
    r.count[warp][lane] = mine[0];
    r.count[warp][lane + WARP] = mine[1];
    __syncthreads();
    if (me < m.size) {
        int32_t sum = 0;
        for (int w = 0; w < WARPS; w++) {
            int32_t rows = r.count[w][me];
            r.count[w][me] = sum;
            sum += rows;
        }
        r.here[me] = sum;
    }
    if (CLUSTER) {
        cluster_meet();
        if (me < m.size) {
            int32_t before = 0, all = 0, sums = 0;
            for (int b = 0; b < blocks; b++) {
                int32_t rows = cluster_load(shared_at(&r.here[me]), b);
                before += b < block ? rows : 0;
                all += rows;
                sums += cluster_load(shared_at(&r.sums_here[me]), b);
            }
            r.before[me] = before;
            r.all[me] = all;
            r.sums[me] = m.many_units ? sums : all;
        }
        cluster_meet(); /* no block leaves while others read its counts */
    } else if (me < m.size) {
        r.before[me] = 0;
        r.all[me] = r.here[me];
        r.sums[me] = m.many_units ? r.sums_here[me] : r.here[me];
    }
    __syncthreads();
    for (int i = 0; i < 2; i++)
        mine[i] = lane + i * WARP < m.size ? r.count[warp][lane + i * WARP] + r.before[lane + i * WARP] : 0;
    for (int base = from; base < to; base += WARP) {
        if (run > WARP)
            ranks = base + lane < to ? ranks_of(m, ids, base + lane, NULL) : 0;
        for (int k = 0; k < m.size; k++) {
            bool goes = ranks >> k & 1;
            uint32_t all = __ballot_sync(EVERY_LANE, goes);
            int32_t first = __shfl_sync(EVERY_LANE, k < WARP ? mine[0] : mine[1], k % WARP);
            if (base + lane < to)
                index[(int64_t)(base + lane) * m.size + k] = goes ? first + __popc(all & ((1u << lane) - 1)) : -1;
            mine[0] += lane == k ? __popc(all) : 0;
            mine[1] += lane + WARP == k ? __popc(all) : 0;
        }
    }
    __syncthreads();
}

/* One block tells every rank how many rows and sums go where. */
template <int WARPS> static __device__ void tell_counts(const lsa &m, const plan_room<WARPS> &r, uint32_t epoch)
{
    for (int i = (int)threadIdx.x; i < 2 * m.size * m.size; i += WARPS * WARP) {
        int to = i / (2 * m.size), k = i % (2 * m.size);
        tell(word_at(m, to, m.rank, k), epoch, (uint32_t)(k < m.size ? r.all[k] : r.sums[k - m.size]));
    }
}

static __global__ void __launch_bounds__(PLAN_THREADS, 1) plan_kernel(const __grid_constant__ lsa m, tensor ids)
{
    __shared__ plan_room<PLAN_WARPS> room;
    after_previous();
    make_plan<PLAN_WARPS, true>(m, ids, m.index, room);
    if (blockIdx.x == 0)
        tell_counts(m, room, *m.epoch + 1);
}

/* ---- rows out */

typedef struct push_counts { /* by rank */
    int32_t out[LSA_RANKS], start[LSA_RANKS];  /* this rank's rows there: how many, and where they begin */
    int32_t wanted[LSA_RANKS], got[LSA_RANKS]; /* rows from there: as told, and as arrived */
    int32_t sums[LSA_RANKS];                   /* that it wants back */
    int32_t pushed[LSA_RANKS];                 /* by this block */
} push_counts;

/* What all ranks told of their rows. False: one did not. */
static __device__ bool hear_counts(const lsa &m, push_counts &c, uint32_t epoch)
{
    bool fine = true;
    for (int i = (int)threadIdx.x; i < m.size * m.size; i += PUSH_THREADS) {
        int source = i / m.size, to = i % m.size;
        int32_t rows = (int32_t)hear(m, word_at(m, m.rank, source, to), epoch, LSA_NO_COUNTS, source, &fine);
        if (rows < 0 || rows > m.max_rows) {
            complain(m, LSA_MANY_ROWS, source, rows, m.max_rows, epoch);
            fine = false;
        }
        if (source < m.rank)
            atomicAdd(&c.start[to], rows);
        if (source == m.rank)
            c.out[to] = rows;
        if (to == m.rank) {
            c.wanted[source] = rows;
            c.sums[source] =
                (int32_t)hear(m, word_at(m, m.rank, source, m.size + to), epoch, LSA_NO_COUNTS, source, &fine);
        }
    }
    return !__syncthreads_or(!fine);
}

enum { AT_ONCE = 8 }; /* vectors a thread holds */

static __device__ void push_rows(const lsa &m, const tensor &x, const tensor &ids, const tensor &weights,
                                 const int32_t *index, push_counts &c)
{
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, n = (int)used_rows(ids);
    int vectors = m.hidden / 8, blocks = (int)gridDim.x;
    for (int row = (int)blockIdx.x + blocks * warp; row < n; row += blocks * PUSH_WARPS) {
        int32_t id = lane < m.top_k ? row_of<int32_t>(ids, row)[lane] : -1;
        float weight = lane < m.top_k ? row_of<float>(weights, row)[lane] : 0;
        const int4 *from = (const int4 *)row_of<bf16>(x, row);
        int rank = id >= 0 ? m.home[id].rank : -1;
        uint32_t edges = __ballot_sync(EVERY_LANE, id >= 0);
        for (int part = 0; part < vectors; part += AT_ONCE * WARP) {
            int4 v[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (part + i * WARP + lane < vectors)
                    v[i] = from[part + i * WARP + lane];
            for (uint32_t left = edges; left;) {
                int to = __shfl_sync(EVERY_LANE, rank, __ffs((int)left) - 1);
                uint32_t those = __ballot_sync(EVERY_LANE, rank == to), before = (1u << lane) - 1;
                int64_t place = c.start[to] + index[(int64_t)row * m.size + to];
                char *window = m.window[to];
                int4 *there = (int4 *)(window + m.x) + place * vectors;
                left &= ~those;
#pragma unroll
                for (int i = 0; i < AT_ONCE; i++)
                    if (part + i * WARP + lane < vectors)
                        there[part + i * WARP + lane] = v[i];
                if (part > 0)
                    continue;
                bool its = those >> lane & 1;
                int edge = its ? __popc(those & before) : __popc(those) + __popc(~those & before);
                if (lane < m.top_k) {
                    ((int32_t *)(window + m.ids))[place * m.top_k + edge] = its ? id : -1;
                    ((float *)(window + m.weights))[place * m.top_k + edge] = its ? weight : 0;
                }
                if (lane == 0)
                    atomicAdd(&c.pushed[to], 1);
            }
        }
    }
}

/* The first block, at the end: are all rows here? */
static __device__ void take_in(const lsa &m, push_counts &c, uint32_t epoch)
{
    bool fine = true;
    int me = (int)threadIdx.x;
    for (int i = me; i < m.size * m.push_blocks; i += PUSH_THREADS) {
        int source = i / m.push_blocks;
        uint32_t rows = hear(m, arrived_at(m, m.rank, 0, i), epoch, LSA_NO_ROWS, source, &fine);
        atomicAdd(&c.got[source], (int32_t)rows);
    }
    for (int i = me; i < m.size * PULSE; i += PUSH_THREADS) {
        int source = i / PULSE;
        uint64_t *word = word_at(m, m.rank, source, 2 * m.size + i % PULSE);
        int32_t said = (int32_t)hear(m, word, epoch, LSA_NO_COUNTS, source, &fine);
        m.heard[i] = said;
    }
    fine = !__syncthreads_or(!fine);
    if (fine && me < m.size && c.got[me] != c.wanted[me]) {
        complain(m, LSA_OTHER_ROWS, me, c.got[me], c.wanted[me], epoch);
        fine = false;
    }
    fine = !__syncthreads_or(!fine);
    if (me > 0)
        return;
    int32_t all = 0;
    int64_t sent = 0, sums = 0;
    for (int r = 0; r < m.size; r++) {
        m.first[r] = all;
        all += c.wanted[r];
        sent += c.out[r];
        sums += c.sums[r];
    }
    m.used[0] = fine ? all : 0;
    m.used[1] = fine ? all * m.units : 0;
    m.count[LSA_SENT] += sent;
    m.count[LSA_RECEIVED] += all;
    m.count[LSA_SUMS_SENT] += sums;
    m.count[LSA_ROWS_OUT] += sent - c.out[m.rank];
    m.count[LSA_SUMS_OUT] += sums - c.sums[m.rank];
    *m.epoch = epoch; /* all blocks have read the old one: their flags came */
}

/* ALONE: each block makes the whole plan for itself, of few rows. */
template <bool ALONE>
static __global__ void __launch_bounds__(PUSH_THREADS, 1)
    push_kernel(const __grid_constant__ lsa m, tensor x, tensor ids, tensor weights)
{
    extern __shared__ int32_t index_room[];
    __shared__ push_counts c;
    int me = (int)threadIdx.x;
    bool first = blockIdx.x == 0, last = blockIdx.x == gridDim.x - 1;
    after_previous();
    uint32_t epoch = *m.epoch + 1;
    for (int i = me; i < (int)(sizeof c / sizeof(int32_t)); i += PUSH_THREADS)
        ((int32_t *)&c)[i] = 0;
    __syncthreads();
    if constexpr (ALONE) {
        __shared__ plan_room<PUSH_WARPS> room;
        make_plan<PUSH_WARPS, false>(m, ids, index_room, room);
        if (first) {
            tell_counts(m, room, epoch);
            for (int64_t i = me; i < used_rows(ids) * m.size; i += PUSH_THREADS)
                m.index[i] = index_room[i];
        }
    }
    if (last)
        for (int i = me; i < m.size * PULSE; i += PUSH_THREADS)
            tell(word_at(m, i / PULSE, m.rank, 2 * m.size + i % PULSE), epoch,
                 (uint32_t)m.said[i % PULSE]);
    if (!hear_counts(m, c, epoch)) {
        if (first && me < 2)
            m.used[me] = 0;
        return;
    }
    push_rows(m, x, ids, weights, ALONE ? index_room : m.index, c);
    __syncthreads();
    if (me < m.size)
        tell_behind(arrived_at(m, me, m.rank, (int)blockIdx.x), epoch, (uint32_t)c.pushed[me]);
    if (first)
        take_in(m, c, epoch);
}

/* ---- sums together */

/* 16 bytes that are read once. */
static __device__ __forceinline__ uint4 fetch(const void *from)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

enum { V = 8, PART = V * WARP, TERMS = 4 }; /* columns of a thread and a warp; terms on their way */

/* The eight columns of a lane within a part: neighbours where rows of BF16 are read, else two fours. */
template <bool HALF> static __device__ __forceinline__ int column(int lane, int four)
{
    return HALF ? lane * V + four * 4 : four * (PART / 2) + lane * 4;
}

/* A warp takes `parts` parts of a row. Lane j knows edge j: whether it opens a unit, where the unit's sum lies, and how
 * it joins the one before. Rows of BF16 have bit 0 of their address set. */
template <int LEVELS, bool HALF>
static __global__ void __launch_bounds__(FOLD_THREADS, LEVELS > 3 ? 1 : 2)
    fold_kernel(const __grid_constant__ lsa m, tensor y, tensor ids, int parts)
{
    __shared__ int32_t merged[2];
    int me = (int)threadIdx.x, lane = me % WARP, warp = me / WARP;
    bool fine = true;
    after_previous();
    uint32_t epoch = *m.epoch;
    if (me < 2)
        merged[me] = 0;
    if (me < m.size && blockIdx.x == 0)
        tell_behind(ready_at(m, me, m.rank), epoch, 0);
    if (me < m.size)
        hear(m, ready_at(m, m.rank, me), epoch, LSA_NO_SUMS, me, &fine);
    if (__syncthreads_or(!fine))
        return;
    int slices = (m.hidden + parts * PART - 1) / (parts * PART), rows = 0, sums = 0;
    int64_t items = used_rows(ids) * slices, warps = (int64_t)gridDim.x * FOLD_WARPS;
    for (int64_t item = (int64_t)blockIdx.x * FOLD_WARPS + warp; item < items; item += warps) {
        int64_t row = item / slices;
        int first = (int)(item % slices) * parts * PART;
        int32_t id = lane < m.top_k ? row_of<int32_t>(ids, row)[lane] : -1;
        lsa_home h = {-1, -1, 0, -1};
        const char *from = NULL;
        if (id >= 0) {
            h = m.home[id];
            int64_t place = (int64_t)m.index[row * m.size + h.rank] * h.units + h.unit;
            from = m.window[m.rank] + m.sums + (size_t)h.rank * m.pitch;
            from += place * m.hidden * (int64_t)sizeof(float) / (HALF && h.rank != m.rank ? 2 : 1);
            from += HALF && h.rank != m.rank;
        }
        int rank = __shfl_up_sync(EVERY_LANE, h.rank, 1), unit = __shfl_up_sync(EVERY_LANE, h.unit, 1);
        int shard = __shfl_up_sync(EVERY_LANE, h.shard, 1);
        bool opens_rank = id >= 0 && (lane == 0 || h.rank != rank), opens = opens_rank || (id >= 0 && h.unit != unit);
        int way = opens && lane > 0 && h.shard != shard ? depth_of(shard, h.shard, m.shards) : -1;
        uint32_t all = __ballot_sync(EVERY_LANE, opens);
        if (first == 0) {
            rows += __popc(__ballot_sync(EVERY_LANE, opens_rank));
            sums += __popc(all);
        }
        for (int part = first; part < first + parts * PART && part < m.hidden; part += PART) {
            running_sum<LEVELS, V> s;
            const float zero[V] = {};
            bool empty = true;
            s.begin(zero);
            for (uint32_t left = all; left;) {
                float term[TERMS][V];
                int how[TERMS];
#pragma unroll
                for (int t = 0; t < TERMS; t++) {
                    how[t] = -2;
                    if (!left)
                        continue;
                    int j = __ffs((int)left) - 1;
                    const char *p = (const char *)__shfl_sync(EVERY_LANE, (unsigned long long)from, j);
                    how[t] = __shfl_sync(EVERY_LANE, way, j);
                    left &= left - 1;
                    if (HALF && ((uintptr_t)p & 1)) {
                        int col = part + column<HALF>(lane, 0);
                        if (col < m.hidden) {
                            uint4 v = fetch(p - 1 + (size_t)col * sizeof(bf16));
                            const uint32_t two[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                            for (int k = 0; k < 4; k++) {
                                term[t][2 * k] = __uint_as_float(two[k] << 16);
                                term[t][2 * k + 1] = __uint_as_float(two[k] & 0xffff0000u);
                            }
                        }
                        continue;
                    }
#pragma unroll
                    for (int four = 0; four < 2; four++) {
                        int col = part + column<HALF>(lane, four);
                        if (col < m.hidden) {
                            uint4 v = fetch(p + (size_t)col * sizeof(float));
                            term[t][4 * four] = __uint_as_float(v.x);
                            term[t][4 * four + 1] = __uint_as_float(v.y);
                            term[t][4 * four + 2] = __uint_as_float(v.z);
                            term[t][4 * four + 3] = __uint_as_float(v.w);
                        }
                    }
                }
#pragma unroll
                for (int t = 0; t < TERMS; t++) {
                    if (how[t] == -2)
                        continue;
                    if (empty)
                        s.begin(term[t]);
                    else if (how[t] == -1)
                        s.add(term[t]);
                    else
                        s.turn(term[t], how[t]);
                    empty = false;
                }
            }
            s.join(-1);
#pragma unroll
            for (int four = 0; four < 2; four++) {
                int col = part + column<HALF>(lane, four);
                if (col < m.hidden)
                    *(float4 *)(row_of<float>(y, row) + col) =
                        make_float4(s.newest[4 * four], s.newest[4 * four + 1], s.newest[4 * four + 2],
                                    s.newest[4 * four + 3]);
            }
        }
    }
    if (lane == 0 && rows + sums > 0) {
        atomicAdd(&merged[0], rows);
        atomicAdd(&merged[1], sums);
    }
    __syncthreads();
    if (me < 2 && merged[me] > 0)
        atomicAdd((unsigned long long *)&m.count[me == 0 ? LSA_MERGED : LSA_SUMS_RECEIVED],
                  (unsigned long long)merged[me]);
}

/* ---- launchers */

static status launch_plan(cuda *c, const lsa *m, const tensor *ids)
{
    unsigned blocks = (unsigned)((ids->rows + PLAN_THREADS - 1) / PLAN_THREADS);
    blocks = blocks < PLAN_BLOCKS ? blocks : (unsigned)PLAN_BLOCKS;
    return launch_clusters(c, "the plan of a dispatch", plan_kernel, blocks, PLAN_THREADS, 0, blocks, *m, *ids);
}

extern "C" status lsa_launch_dispatch(cuda *c, const lsa *m, const tensor *x, const tensor *ids, const tensor *weights)
{
    status st = OK;
    bool alone = ids->rows <= PUSH_THREADS && ids->rows * m->size <= ALONE_ENTRIES;
    dim3 grid((unsigned)m->push_blocks), block(PUSH_THREADS);
    if (alone)
        return launch(c, "dispatch", push_kernel<true>, grid, block, (size_t)(ids->rows * m->size) * sizeof(int32_t),
                      *m, *x, *ids, *weights);
    st = launch_plan(c, m, ids);
    return st == OK ? launch(c, "dispatch", push_kernel<false>, grid, block, 0, *m, *x, *ids, *weights) : st;
}

template <int LEVELS>
static status launch_fold(cuda *c, const lsa *m, const tensor *y, const tensor *ids, int fold_blocks)
{
    int parts = ids->rows > PUSH_THREADS ? 4 : 1; /* many rows: fewer looks at each row's edges */
    int64_t slices = (m->hidden + parts * PART - 1) / (parts * PART);
    int64_t blocks = (ids->rows * slices + FOLD_WARPS - 1) / FOLD_WARPS;
    dim3 grid((unsigned)(blocks < 1 ? 1 : blocks < fold_blocks ? blocks : fold_blocks)), block(FOLD_THREADS);
    return launch(c, "combine", m->half ? fold_kernel<LEVELS, true> : fold_kernel<LEVELS, false>, grid, block, 0, *m,
                  *y, *ids, parts);
}

extern "C" status lsa_launch_combine(cuda *c, const lsa *m, const tensor *y, const tensor *ids, int fold_blocks)
{
    return m->levels <= 1   ? launch_fold<1>(c, m, y, ids, fold_blocks)
           : m->levels <= 3 ? launch_fold<3>(c, m, y, ids, fold_blocks)
                            : launch_fold<10>(c, m, y, ids, fold_blocks);
}
