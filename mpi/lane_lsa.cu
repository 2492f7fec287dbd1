/* FreshLane between GPUs that reach each other's memory. Every rank has a window, which all ranks can write:
 *
 *   words     [source][1 + PULSE] of 64 bits, epoch << 32 | value: its rows, the pulse
 *   arrived   [kind][source][block]  epoch << 32 | rows, and sums wanted of them, that this block of the source has
 *                                    written here
 *   ready     [source]               epoch << 32: all sums of that rank are here
 *   x, ids, weights                  place i * R + s is that of row i of source s
 *   sums      [source]               what that rank's experts made of this rank's rows, in their order:
 *                                    F32 [rows * units, H], or BF16, but for this rank's own
 *
 * dispatch, in one kernel:
 *   1. Every row has its place at every rank, so nobody needs to know anything of others to send. Blocks write the ids
 *      and weights of each row to all ranks and its x to those of its experts, 16 bytes a store, then their flags. A
 *      place whose row has no expert of the rank keeps an old x, which no edge leads to.
 *   2. The first block waits for the flags of all blocks of all ranks, and takes the edges out of places behind the
 *      last row of a source that has fewer than others. So when the kernel has ended all rows are here, and the experts
 *      run by the order of the stream.
 * The experts write each sum straight to where its row came from (sums_away). combine, in one kernel: say `ready` to
 * all, wait until all are, and add each row's sums in the tree's order.
 *
 * Epochs count dispatches, on the device, so that a graph can be replayed. A window needs no second copy of anything:
 * each of the two exchanges is complete on a rank only when every rank has reached it (zero rows are told like others).
 * A rank that writes for dispatch e + 1 has ended combine e; for that every rank had said `ready`, after its dispatch e
 * had read all words and flags and its experts the rows. A rank whose experts write the sums of e + 1 has ended
 * dispatch e + 1; for that every rank had sent its flags, after its combine e read the sums of e. In return nobody may
 * rely on arrived rows once it has called combine.
 *
 * Nothing waits for ever: a wait that lasts longer than `patience` leaves a note for the host, and from then on no
 * kernel of this rank waits, and none sends rows: a rank that was only late finds nothing of a later dispatch among
 * what it waits for. Waiting blocks never keep the awaited from running: dispatch waits for what other ranks enqueued
 * before, its own blocks write before they wait, and they are few; and between ready and ready lies no work.
 */
#include "mpi/lane_lsa.h"

#include "cuda/stream.cuh"

enum {
    PUSH_WARPS = 6, /* of more, the last has a longer way to its end; fewer are idle while other kernels read memory */
    PUSH_THREADS = PUSH_WARPS * WARP,
    FOLD_WARPS = 8, FOLD_THREADS = FOLD_WARPS * WARP,
    FEW_EDGES = 4096 /* with which the kernel behind a dispatch is of few blocks and may wait on the GPU */
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

/* Not where it is called: what it holds in registers would be room that waiting and sending need. */
static __device__ __noinline__ void complain(const lsa &m, lsa_what what, int rank, int32_t found, int32_t wanted,
                                             uint32_t epoch)
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
    return (uint64_t *)(m.window[rank] + m.words) + source * (1 + PULSE) + i;
}

static __device__ __forceinline__ uint64_t *arrived_at(const lsa &m, int rank, int kind, int source, int block)
{
    return (uint64_t *)(m.window[rank] + m.arrived) + (kind * m.size + source) * m.push_blocks + block;
}

static __device__ __forceinline__ uint64_t *ready_at(const lsa &m, int rank, int source)
{
    return (uint64_t *)(m.window[rank] + m.ready) + source;
}

/* 16 bytes that are read once. They are asked for where this stands, however soon they are needed. */
static __device__ __forceinline__ uint4 fetch(const void *from)
{
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

static __device__ __forceinline__ int32_t fetch_word(const void *from)
{
    int32_t v;
    asm volatile("ld.global.L1::no_allocate.s32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

/* ---- rows out */

typedef struct push_counts { /* by rank */
    int32_t sent[LSA_KINDS][LSA_RANKS];      /* by this block */
    int32_t rows[LSA_RANKS], got[LSA_RANKS]; /* that it has; that came from it */
} push_counts;
static_assert((int)PUSH_THREADS >= (int)LSA_KINDS * LSA_RANKS, "each of a block's counts has a thread");

enum { AT_ONCE = 8 /* vectors a thread holds of a row */, WORDS = 16 /* at least 1 + PULSE */ };

typedef struct row_part { /* as a warp holds it: of a row, vectors from `begin` on */
    int row, begin;
    int32_t id, weight;
    uint4 v[AT_ONCE];
} row_part;

static __device__ __forceinline__ void ask(row_part &p, const lsa &m, const tensor &x, const tensor &ids,
                                           const tensor &weights, int row, int begin)
{
    int lane = (int)threadIdx.x % WARP, left = m.hidden / 8 - begin - lane;
    const uint4 *from = (const uint4 *)row_of<bf16>(x, row) + begin + lane;
    p.row = row;
    p.begin = begin;
    p.id = lane < m.top_k ? fetch_word(row_of<int32_t>(ids, row) + lane) : -1;
    p.weight = lane < m.top_k ? fetch_word(row_of<int32_t>(weights, row) + lane) : 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        if (i * WARP < left)
            p.v[i] = fetch(from + i * WARP);
}

static __device__ __forceinline__ void send(const row_part &p, const lsa &m, const lsa_home *home, push_counts &c)
{
    int lane = (int)threadIdx.x % WARP, vectors = m.hidden / 8, left = vectors - p.begin - lane;
    int64_t place = (int64_t)p.row * m.size + m.rank, edge = (place * m.top_k + lane) * (int64_t)sizeof(int32_t);
    int64_t piece = (place * vectors + p.begin + lane) * (int64_t)sizeof(uint4);
    int rank = -1, unit = -1;
    if (p.id >= 0) {
        rank = home[p.id].rank;
        unit = home[p.id].unit;
    }
    uint32_t low = __reduce_or_sync(EVERY_LANE, rank >= 0 && rank < WARP ? 1u << rank : 0);
    uint32_t high = m.size > WARP ? __reduce_or_sync(EVERY_LANE, rank >= WARP ? 1u << (rank - WARP) : 0) : 0;
    int rank_before = __shfl_up_sync(EVERY_LANE, rank, 1), unit_before = __shfl_up_sync(EVERY_LANE, unit, 1);
    bool opens = rank >= 0 && (lane == 0 || rank != rank_before || unit != unit_before);
#pragma unroll 1
    for (int k = 1; k <= m.size; k++) { /* this rank last: the way to others is longer */
        int to = m.rank + k < m.size ? m.rank + k : m.rank + k - m.size;
        char *window = m.window[to];
        if (p.begin == 0 && lane < m.top_k) {
            *(int32_t *)(window + m.ids + edge) = p.id;
            *(int32_t *)(window + m.weights + edge) = p.weight;
        }
        if (!((to < WARP ? low >> to : high >> (to - WARP)) & 1))
            continue;
        uint4 *there = (uint4 *)(window + m.x + piece);
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (i * WARP < left)
                there[i * WARP] = p.v[i];
        if (p.begin > 0)
            continue;
        int sums = __popc(__ballot_sync(EVERY_LANE, opens && rank == to));
        if (lane < LSA_KINDS)
            atomicAdd(&c.sent[lane][to], lane == 0 ? 1 : sums);
    }
}

/* The n rows, none where `broken` is set. A warp's first one is its number, and asked for before the warp waits for
 * these two and for `home`; further ones are whose turn it is, since some blocks get more of the link than others. All
 * threads call. */
static __device__ void push_rows(const lsa &m, const tensor &x, const tensor &ids, const tensor &weights,
                                 const lsa_home *home, int &n, int &broken, push_counts &c)
{
    int lane = (int)threadIdx.x % WARP, warps = (int)gridDim.x * PUSH_WARPS, turn = 0;
    row_part p;
    p.row = (int)blockIdx.x + (int)gridDim.x * ((int)threadIdx.x / WARP);
    if (p.row < (int)ids.rows)
        ask(p, m, x, ids, weights, p.row, 0);
    if (lane == 0 && (int)ids.rows > warps)
        turn = atomicAdd(m.turn, 1);
    copies16_wait();
    __syncthreads(); /* home is here */
    asm volatile("" : "+r"(n), "+r"(broken)); /* looked at from here on */
    n = n < (int)ids.rows ? n : (int)ids.rows;
    while (!broken && p.row < n) {
        send(p, m, home, c);
        bool more = p.begin + AT_ONCE * WARP < m.hidden / 8;
        int row = more ? p.row : warps + __shfl_sync(EVERY_LANE, turn, 0);
        if (row >= n)
            break;
        ask(p, m, x, ids, weights, row, more ? p.begin + AT_ONCE * WARP : 0);
        if (lane == 0 && !more)
            turn = atomicAdd(m.turn, 1); /* of the row behind this one */
    }
}

static __device__ __forceinline__ void count_up(const lsa &m, int which, int32_t by)
{
    if (by > 0)
        atomicAdd((unsigned long long *)&m.count[which], (unsigned long long)by);
}

/* The first block, at the end: are all rows here? A warp listens to a source's words, or to its flags of one kind: what
 * comes last is heard by whoever waits for it alone. */
static __device__ void take_in(const lsa &m, push_counts &c, uint32_t epoch)
{
    int me = (int)threadIdx.x, lane = me % WARP;
    bool fine = true;
    for (int i = me / WARP; i < m.size * (1 + m.kinds); i += PUSH_WARPS) {
        int source = i % m.size, kind = i / m.size - 1;
        if (kind < 0) {
            int32_t word = 0;
            if (lane < 1 + PULSE)
                word = (int32_t)hear(m, word_at(m, m.rank, source, lane), epoch, LSA_NO_ROWS, source, &fine);
            if (lane > 0 && lane < 1 + PULSE)
                m.heard[source * PULSE + lane - 1] = word;
            if (lane > 0)
                continue;
            c.rows[source] = word;
            if (word < 0 || word > m.max_rows) {
                complain(m, LSA_MANY_ROWS, source, word, m.max_rows, epoch);
                fine = false;
            }
            continue;
        }
        const uint64_t *flags = arrived_at(m, m.rank, kind, source, 0);
        int32_t got = 0;
        for (int b = lane; b < m.push_blocks; b += WARP)
            got += (int32_t)hear(m, &flags[b], epoch, LSA_NO_ROWS, source, &fine);
        got = (int32_t)__reduce_add_sync(EVERY_LANE, got);
        if (lane > 0)
            continue;
        if (kind == 0) {
            c.got[source] = got;
            count_up(m, LSA_RECEIVED, got);
        }
        if (kind == m.kinds - 1) {
            count_up(m, LSA_SUMS_SENT, got);
            count_up(m, LSA_SUMS_OUT, source == m.rank ? 0 : got);
        }
    }
    fine = !__syncthreads_or(!fine);
    int32_t most = 0, other = -1;
    for (int r = 0; r < m.size && fine; r++) {
        most = c.rows[r] > most ? c.rows[r] : most;
        other = c.got[r] > c.rows[r] ? r : other;
    }
    if (other >= 0) {
        if (me == 0)
            complain(m, LSA_OTHER_ROWS, other, c.got[other], c.rows[other], epoch);
        fine = false;
        most = 0;
    }
    int32_t *ids = (int32_t *)(m.window[m.rank] + m.ids);
    for (int r = 0; r < m.size && fine; r++)
        for (int i = me; i < (most - c.rows[r]) * m.top_k; i += PUSH_THREADS)
            ids[((int64_t)(c.rows[r] + i / m.top_k) * m.size + r) * m.top_k + i % m.top_k] = -1;
    if (me > 0)
        return;
    m.used[0] = most * m.size;
    m.used[1] = most * m.size * m.units;
    if (!fine) /* no `ready` follows: nobody takes this rank's sums */
        return;
    *m.epoch = epoch; /* all blocks have read the old one, and taken their turns: their flags came */
    *m.turn = 0;
}

static __global__ void __launch_bounds__(PUSH_THREADS, 1)
    push_kernel(const __grid_constant__ lsa m, tensor x, tensor ids, tensor weights, bool few)
{
    __shared__ lsa_home home[SUM_TREE_EXPERTS];
    __shared__ push_counts c;
    int me = (int)threadIdx.x, block = (int)blockIdx.x;
#pragma unroll 1
    for (int i = me; i < m.experts; i += PUSH_THREADS)
        copy16(shared_at(&home[i]), &m.home[i]);
    if (me < LSA_KINDS * LSA_RANKS)
        (&c.sent[0][0])[me] = 0;
    after_previous();
    if (few)
        let_next();
    int broken = fetch_word(m.broken), n = ids.used ? fetch_word(ids.used) : (int)ids.rows;
    uint32_t epoch = (uint32_t)fetch_word(m.epoch) + 1;
    int word = me % WORDS, said = word > 0 && word <= PULSE ? fetch_word(&m.said[word - 1]) : 0;
    push_rows(m, x, ids, weights, home, n, broken, c);
    if (__syncthreads_or(broken)) {
        if (block == 0 && me < 2)
            m.used[me] = 0;
        return;
    }
    if (block == (int)gridDim.x - 1)
        for (int to = me / WORDS; to < m.size && word <= PULSE; to += PUSH_THREADS / WORDS)
            tell(word_at(m, to, m.rank, word), epoch, (uint32_t)(word == 0 ? n : said));
    if (block == 0 && me == 0)
        count_up(m, LSA_IDS_OUT, n * (m.size - 1));
    int teller = PUSH_THREADS - 1 - me, to = teller % LSA_RANKS, kind = teller / LSA_RANKS; /* the last warps tell */
    if (to < m.size && kind < m.kinds) {
        tell_behind(arrived_at(m, to, kind, m.rank, block), epoch, (uint32_t)c.sent[kind][to]);
        if (kind == 0) {
            count_up(m, LSA_SENT, c.sent[0][to]);
            count_up(m, LSA_ROWS_OUT, to == m.rank ? 0 : c.sent[0][to]);
        }
    }
    if (block == 0)
        take_in(m, c, epoch);
}

/* ---- sums together */

enum { V = 8, PART = V * WARP, TERMS = 4 }; /* columns of a thread and a warp; terms on their way */

/* The eight columns of a lane within a part: neighbours where rows of BF16 are read, else two fours. */
template <bool HALF> static __device__ __forceinline__ int column(int lane, int four)
{
    return HALF ? lane * V + four * 4 : four * (PART / 2) + lane * 4;
}

/* An edge of a row, in a lane of its own: the lanes of a row are neighbours. Where the sum of its unit lies, if it
 * opens one, and how that joins the one before: -2, there is none; -1, in the same shard; else at this level. Rows of
 * BF16 have bit 0 of their address set. */
typedef struct fold_edge {
    const char *from;
    int way;
    bool opens, opens_rank;
} fold_edge;

/* Of edge j; all lanes call. It reads nothing that other ranks write. */
template <bool HALF>
static __device__ __forceinline__ fold_edge find_edge(const lsa &m, const tensor &ids, int64_t row, int j, bool there)
{
    int32_t id = there && j < m.top_k ? row_of<int32_t>(ids, row)[j] : -1;
    lsa_home h = {-1, -1, 0, -1};
    fold_edge e = {NULL, -2, false, false};
    if (id >= 0) {
        h = m.home[id];
        int64_t place = row * h.units + h.unit;
        e.from = m.window[m.rank] + m.sums + (size_t)h.rank * m.pitch;
        e.from += place * m.hidden * (int64_t)sizeof(float) / (HALF && h.rank != m.rank ? 2 : 1);
        e.from += HALF && h.rank != m.rank;
    }
    int rank = __shfl_up_sync(EVERY_LANE, h.rank, 1), unit = __shfl_up_sync(EVERY_LANE, h.unit, 1);
    int shard = __shfl_up_sync(EVERY_LANE, h.shard, 1);
    e.opens_rank = id >= 0 && (j == 0 || h.rank != rank);
    e.opens = e.opens_rank || (id >= 0 && h.unit != unit);
    if (e.opens && j > 0)
        e.way = h.shard == shard ? -1 : depth_of(shard, h.shard, m.shards);
    return e;
}

/* A warp takes a part of a row, and knows where its first one's sums lie when they come. */
template <int LEVELS, bool HALF>
static __global__ void __launch_bounds__(FOLD_THREADS, LEVELS > 3 ? 1 : 2)
    fold_kernel(const __grid_constant__ lsa m, tensor y, tensor ids)
{
    __shared__ int32_t merged[2];
    int me = (int)threadIdx.x, lane = me % WARP, warp = me / WARP;
    bool fine = true;
    after_previous();
    uint32_t epoch = *m.epoch;
    if (me < 2)
        merged[me] = 0;
    if (blockIdx.x == 0 && me < m.size) /* before all else: others wait for it */
        tell_behind(ready_at(m, me, m.rank), epoch, 0);
    int parts = (m.hidden + PART - 1) / PART, rows = 0, sums = 0;
    int64_t items = used_rows(ids) * parts, warps = (int64_t)gridDim.x * FOLD_WARPS;
    int64_t item = (int64_t)blockIdx.x * FOLD_WARPS + warp;
    fold_edge e = find_edge<HALF>(m, ids, item / parts, lane, item < items);
    if (me < m.size)
        hear(m, ready_at(m, m.rank, me), epoch, LSA_NO_SUMS, me, &fine);
    if (__syncthreads_or(!fine))
        return;
    while (item < items) {
        int64_t row = item / parts;
        int part = (int)(item % parts) * PART;
        uint32_t all = __ballot_sync(EVERY_LANE, e.opens), ranks = __ballot_sync(EVERY_LANE, e.opens_rank);
        rows += part == 0 ? __popc(ranks) : 0;
        sums += part == 0 ? __popc(all) : 0;
        running_sum<LEVELS, V> s;
        const float zero[V] = {};
        s.begin(zero);
        for (uint32_t left = all; left;) {
            float term[TERMS][V];
            int how[TERMS];
#pragma unroll
            for (int t = 0; t < TERMS; t++) {
                how[t] = -3;
                if (!left)
                    continue;
                int j = __ffs((int)left) - 1;
                const char *p = (const char *)__shfl_sync(EVERY_LANE, (unsigned long long)e.from, j);
                how[t] = __shfl_sync(EVERY_LANE, e.way, j);
                left &= left - 1;
                if (HALF && ((uintptr_t)p & 1)) {
                    int col = part + column<HALF>(lane, 0);
                    if (col < m.hidden)
                        eight_of(term[t], fetch(p - 1 + (size_t)col * sizeof(bf16)));
                    continue;
                }
#pragma unroll
                for (int four = 0; four < 2; four++) {
                    int col = part + column<HALF>(lane, four);
                    if (col < m.hidden)
                        four_of(&term[t][4 * four], fetch(p + (size_t)col * sizeof(float)));
                }
            }
#pragma unroll
            for (int t = 0; t < TERMS; t++) {
                if (how[t] == -3)
                    continue;
                if (how[t] == -2)
                    s.begin(term[t]);
                else if (how[t] == -1)
                    s.add(term[t]);
                else
                    s.turn(term[t], how[t]);
            }
        }
        s.join(-1);
#pragma unroll
        for (int four = 0; four < 2; four++) {
            int col = part + column<HALF>(lane, four);
            if (col < m.hidden)
                *(float4 *)(row_of<float>(y, row) + col) = make_float4(
                    s.newest[4 * four], s.newest[4 * four + 1], s.newest[4 * four + 2], s.newest[4 * four + 3]);
        }
        item += warps;
        e = find_edge<HALF>(m, ids, item / parts, lane, item < items);
    }
    if (lane == 0 && rows + sums > 0) {
        atomicAdd(&merged[0], rows);
        atomicAdd(&merged[1], sums);
    }
    __syncthreads();
    if (me < 2)
        count_up(m, me == 0 ? LSA_MERGED : LSA_SUMS_RECEIVED, merged[me]);
}

/* Many rows: the same by stream.cuh, a piece of a row an item. */
enum { FOLD_MANY = 1024, FOLD_SLOT = STREAM_COLUMNS * (int)sizeof(float) };

template <int LEVELS, bool HALF>
static __global__ void __launch_bounds__(STREAM_THREADS, LEVELS > 3 ? 1 : 2)
    fold_stream(const __grid_constant__ lsa m, tensor y, tensor ids)
{
    extern __shared__ __align__(1024) uint8_t room[];
    stream_open<FOLD_SLOT>(room);
    after_previous();
    int lane = (int)threadIdx.x % WARP;
    for (int r = (int)threadIdx.x; r < m.size && blockIdx.x == 0; r += STREAM_THREADS) /* first: others wait */
        tell_behind(ready_at(m, r, m.rank), *m.epoch, 0);
    int pieces = stream_pieces(m.hidden), columns = stream_columns(m.hidden), rows = 0, sums = 0;
    int items = (int)used_rows(ids) * pieces;
    auto find = [&](int item, int j, uint32_t group) {
        int row = item / pieces, col = item % pieces * columns;
        bool there = item < items;
        fold_edge e = find_edge<HALF>(m, ids, row, j, there);
        uint32_t all = __ballot_sync(EVERY_LANE, e.opens), ranks = __ballot_sync(EVERY_LANE, e.opens_rank && col == 0);
        uint32_t units = __ballot_sync(EVERY_LANE, e.opens && col == 0);
        stream_term t = {NULL, NULL, e.way, 0, false, false};
        rows += __popc(ranks);
        sums += __popc(units);
        if (e.opens) {
            t.half = HALF && ((uintptr_t)e.from & 1);
            t.from = t.half ? e.from - 1 + (size_t)col * sizeof(bf16) : e.from + (size_t)col * sizeof(float);
        }
        if (e.opens || (there && j == 0 && !(all & group))) /* without an edge: zero */
            t.cols = m.hidden - col < columns ? m.hidden - col : columns;
        if (t.cols > 0 && !(all & group & ~((2u << lane) - 1)))
            t.to = (char *)(row_of<float>(y, row) + col);
        return t;
    };
    auto begin = [&] {
        bool fine = true;
        for (int r = lane; r < m.size; r += WARP)
            hear(m, ready_at(m, m.rank, r), *m.epoch, LSA_NO_SUMS, r, &fine);
        fence_seen();
        return __all_sync(EVERY_LANE, fine) != 0;
    };
    stream_sums<LEVELS, FOLD_SLOT>(room, items, m.top_k, NULL, find, begin);
    if (lane == 0) {
        count_up(m, LSA_MERGED, rows);
        count_up(m, LSA_SUMS_RECEIVED, sums);
    }
}

/* ---- launchers */

extern "C" status lsa_launch_dispatch(cuda *c, const lsa *m, const tensor *x, const tensor *ids, const tensor *weights)
{
    bool few = (int64_t)m->max_rows * m->size * m->top_k <= FEW_EDGES;
    return launch(c, "dispatch", push_kernel, dim3((unsigned)m->push_blocks), dim3(PUSH_THREADS), 0, *m, *x, *ids,
                  *weights, few);
}

template <int LEVELS>
static status launch_fold(cuda *c, const lsa *m, const tensor *y, const tensor *ids, int fold_blocks)
{
    int64_t parts = (m->hidden + PART - 1) / PART, blocks = (ids->rows * parts + FOLD_WARPS - 1) / FOLD_WARPS;
    dim3 grid((unsigned)(blocks < 1 ? 1 : blocks < fold_blocks ? blocks : fold_blocks)), block(FOLD_THREADS);
    if (ids->rows >= FOLD_MANY && stream_fits(c, m->top_k))
        return stream_launch(c, "combine", m->half ? fold_stream<LEVELS, true> : fold_stream<LEVELS, false>,
                             ids->rows * stream_pieces(m->hidden), m->top_k, fold_blocks, *m, *y, *ids);
    return launch(c, "combine", m->half ? fold_kernel<LEVELS, true> : fold_kernel<LEVELS, false>, grid, block, 0, *m,
                  *y, *ids);
}

extern "C" status lsa_launch_combine(cuda *c, const lsa *m, const tensor *y, const tensor *ids, int fold_blocks)
{
    return m->levels <= 1   ? launch_fold<1>(c, m, y, ids, fold_blocks)
           : m->levels <= 3 ? launch_fold<3>(c, m, y, ids, fold_blocks)
                            : launch_fold<10>(c, m, y, ids, fold_blocks);
}
