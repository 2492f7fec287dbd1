/* The kernels of lane_nccl.c. A block a rank deals out the rows, and goes through those that arrived, by prefix sums in
 * the batch's order; a warp a row moves them; a warp a slice of a row merges, in the order of cuda/tree.cuh. */
#include "cuda/tree.cuh"
#include "mpi/lane_nccl.h"

enum { DEAL_THREADS = 1024, ROW_THREADS = 256, ROW_WARPS = ROW_THREADS / WARP, WAVES = 16 };

/* ---- places in ring order */

static __device__ __forceinline__ int64_t arrived_before(const nccl_board &m, int rank)
{
    int64_t sum = 0;
    for (int r = m.rank; r != rank; r = (r + 1) % m.size)
        sum += m.in[r].rows;
    return sum;
}

static __device__ __forceinline__ int64_t packed_before(const nccl_board &m, int rank)
{
    int64_t sum = 0;
    for (int r = (m.rank + 1) % m.size; r != rank; r = (r + 1) % m.size)
        sum += m.out[r].rows;
    return sum;
}

static __device__ __forceinline__ int64_t partials_before(const nccl_board &m, int rank)
{
    int64_t sum = 0;
    for (int r = (m.rank + 1) % m.size; r != rank; r = (r + 1) % m.size)
        sum += m.out[r].partials;
    return sum;
}

static __device__ __forceinline__ const int32_t *arrived_ids(const nccl_board &m, int64_t row)
{
    return (const int32_t *)(m.arrived + row * m.row_bytes + m.ids_at);
}

/* Whose an expert is, where a block's threads ask often. */
typedef struct owners {
    uint16_t rank[SUM_TREE_EXPERTS], unit[SUM_TREE_EXPERTS];
} owners;

/* All threads of the block call. */
static __device__ __forceinline__ void read_owners(owners *to, const nccl_board &m)
{
    for (int e = (int)threadIdx.x; e < m.experts; e += (int)blockDim.x) {
        to->rank[e] = (uint16_t)m.rank_of[e];
        to->unit[e] = (uint16_t)m.unit_of[e];
    }
    __syncthreads();
}

/* Calls visit(j, expert) for each edge of a row; the loads do not wait for each other. */
template <typename VISIT> static __device__ __forceinline__ void each_edge(const int32_t *id, int top_k, VISIT visit)
{
    enum { AT_ONCE = 8 };
    for (int j = 0; j < top_k; j += AT_ONCE) {
        int32_t e[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            e[i] = j + i < top_k ? id[j + i] : -1;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (e[i] >= 0)
                visit(j + i, e[i]);
    }
}

/* ---- dispatch */

typedef struct pulse_words {
    int32_t word[PULSE];
} pulse_words;

static __global__ void __launch_bounds__(DEAL_THREADS)
    deal_kernel(tensor ids, const __grid_constant__ nccl_board m, pulse_words pulse)
{
    __shared__ uint64_t room[WARP];
    __shared__ owners of;
    int to = (int)blockIdx.x, me = (int)threadIdx.x;
    int64_t n = used_rows(ids);
    read_owners(&of, m);
    uint64_t before = 0; /* rows, then partial sums in the low half */
    for (int64_t base = 0; base < n; base += DEAL_THREADS) {
        int64_t i = base + me;
        const int32_t *id = row_of<int32_t>(ids, i);
        uint64_t mine = 0, total;
        int first = -1, unit = -1;
        if (i < n)
            each_edge(id, m.top_k, [&](int j, int e) {
                if (of.rank[e] != to)
                    return;
                first = first < 0 ? j : first;
                mine += of.unit[e] != unit;
                unit = of.unit[e];
            });
        if (first >= 0)
            mine |= (uint64_t)1 << 32;
        uint64_t at = before + block_prefix(mine, &total, room);
        before += total;
        if (first < 0)
            continue;
        int32_t row = (int32_t)(at >> 32), term = (int32_t)at;
        m.row_at[i * m.top_k + first] = row;
        unit = -1;
        each_edge(id, m.top_k, [&](int j, int e) {
            if (of.rank[e] != to || of.unit[e] == unit)
                return;
            unit = of.unit[e];
            m.term_at[i * m.top_k + j] = to == m.rank ? row * m.units + unit - m.first_unit : term++;
        });
    }
    if (me < (int)(sizeof(nccl_greeting) / sizeof(int32_t))) {
        int32_t word = me == 0 ? (int32_t)(before >> 32) : me == 1 ? (int32_t)before : pulse.word[me - 2];
        ((int32_t *)&m.out[to])[me] = word;
        if (to == m.rank)
            ((int32_t *)&m.in[to])[me] = word;
    }
}

extern "C" status lane_nccl_deal(cuda *c, const nccl_board *m, const tensor *ids, const int32_t pulse[PULSE])
{
    pulse_words p;
    for (int i = 0; i < PULSE; i++)
        p.word[i] = pulse[i];
    deal_kernel<<<(unsigned)m->size, DEAL_THREADS, 0, c->stream>>>(*ids, *m, p);
    return CUDA_LAUNCHED("deal of rows to ranks");
}

/* T: what a row's x is moved by. */
template <typename T>
static __global__ void __launch_bounds__(ROW_THREADS)
    pack_kernel(tensor x, tensor ids, tensor weights, const __grid_constant__ nccl_board m)
{
    int lane = (int)threadIdx.x % WARP, words = m.hidden * (int)sizeof(bf16) / (int)sizeof(T);
    int64_t n = used_rows(ids);
    for (int64_t i = blockIdx.x * ROW_WARPS + threadIdx.x / WARP; i < n; i += (int64_t)gridDim.x * ROW_WARPS) {
        int id = lane < m.top_k ? row_of<int32_t>(ids, i)[lane] : -1;
        float w = id >= 0 ? row_of<float>(weights, i)[lane] : 0;
        int rank = id >= 0 ? m.rank_of[id] : -1, left = __shfl_up_sync(EVERY_LANE, rank, 1);
        bool opens = id >= 0 && (lane == 0 || rank != left);
        char *to = NULL;
        if (opens) {
            int64_t at = m.row_at[i * m.top_k + lane];
            to = rank == m.rank ? m.arrived + at * m.row_bytes : m.packed + (packed_before(m, rank) + at) * m.row_bytes;
        }
        const T *from = (const T *)row_of<bf16>(x, i);
        for (uint32_t rest = __ballot_sync(EVERY_LANE, opens); rest; rest &= rest - 1) {
            int opener = __ffs((int)rest) - 1, r = __shfl_sync(EVERY_LANE, rank, opener);
            char *row = (char *)__shfl_sync(EVERY_LANE, (unsigned long long)to, opener);
            for (int k = lane; k < words; k += WARP)
                ((T *)row)[k] = from[k];
            uint32_t there = __ballot_sync(EVERY_LANE, rank == r);
            int32_t *id_to = (int32_t *)(row + m.ids_at);
            float *w_to = (float *)(row + m.weights_at);
            if (rank == r) {
                int at = __popc(there & ((1u << lane) - 1));
                id_to[at] = id;
                w_to[at] = w;
            }
            if (lane >= __popc(there) && lane < m.top_k) {
                id_to[lane] = -1;
                w_to[lane] = 0;
            }
        }
    }
}

extern "C" status lane_nccl_pack(cuda *c, const nccl_board *m, const tensor *x, const tensor *ids,
                                 const tensor *weights)
{
    unsigned grid = cuda_grid(c, (ids->rows + ROW_WARPS - 1) / ROW_WARPS, WAVES);
    if (vectors_fit(*x, 8))
        pack_kernel<uint4><<<grid, ROW_THREADS, 0, c->stream>>>(*x, *ids, *weights, *m);
    else
        pack_kernel<uint16_t><<<grid, ROW_THREADS, 0, c->stream>>>(*x, *ids, *weights, *m);
    return CUDA_LAUNCHED("pack of rows for ranks");
}

static __device__ void complain(const nccl_board &m, int what, int rank, int have, int want)
{
    if (atomicCAS(&m.ledger->broken, ARRIVED_WELL, what) != ARRIVED_WELL)
        return;
    m.ledger->rank = rank;
    m.ledger->have = have;
    m.ledger->want = want;
}

static __global__ void __launch_bounds__(DEAL_THREADS) arrive_kernel(const __grid_constant__ nccl_board m)
{
    __shared__ uint64_t room[WARP];
    __shared__ owners of;
    int from = (int)blockIdx.x, me = (int)threadIdx.x, n = m.in[from].rows;
    int64_t first = arrived_before(m, from), before = 0;
    if (from == m.rank) { /* nothing to check: its rows never left */
        if (me == 0)
            *m.arrived_count = (int32_t)(arrived_before(m, (m.rank + m.size - 1) % m.size) +
                                         m.in[(m.rank + m.size - 1) % m.size].rows);
        return;
    }
    read_owners(&of, m);
    for (int base = 0; base < n; base += DEAL_THREADS) {
        int i = base + me, unit = -1;
        uint64_t mine = 0, total;
        if (i < n)
            each_edge(arrived_ids(m, first + i), m.top_k, [&](int, int e) {
                if (e < m.first || e >= m.last) {
                    complain(m, ARRIVED_ASTRAY, from, e, 0);
                    return;
                }
                mine += of.unit[e] != unit;
                unit = of.unit[e];
            });
        uint64_t at = block_prefix(mine, &total, room);
        if (i < n && m.back_at)
            m.back_at[first + i] = (int32_t)(before + (int64_t)at);
        before += (int64_t)total;
    }
    if (me == 0 && before != m.in[from].partials)
        complain(m, ARRIVED_MISCOUNTED, from, (int)before, m.in[from].partials);
}

extern "C" status lane_nccl_arrive(cuda *c, const nccl_board *m)
{
    arrive_kernel<<<(unsigned)m->size, DEAL_THREADS, 0, c->stream>>>(*m);
    return CUDA_LAUNCHED("check of arrived rows");
}

/* ---- combine */

/* V columns at a time; T: what partial sums travel as. */
template <typename T, int V>
static __global__ void __launch_bounds__(ROW_THREADS) gather_kernel(const __grid_constant__ nccl_board m)
{
    int lane = (int)threadIdx.x % WARP;
    int64_t own = m.in[m.rank].rows, n = *m.arrived_count;
    for (int64_t i = own + blockIdx.x * ROW_WARPS + threadIdx.x / WARP; i < n; i += (int64_t)gridDim.x * ROW_WARPS) {
        int64_t rows = own, partials = 0; /* before those of the rank that row i came from */
        for (int r = (m.rank + 1) % m.size; i >= rows + m.in[r].rows; r = (r + 1) % m.size) {
            rows += m.in[r].rows;
            partials += m.in[r].partials;
        }
        int id = lane < m.top_k ? arrived_ids(m, i)[lane] : -1, unit = id >= 0 ? m.unit_of[id] : -1;
        int left = __shfl_up_sync(EVERY_LANE, unit, 1);
        uint32_t opens = __ballot_sync(EVERY_LANE, id >= 0 && (lane == 0 || unit != left));
        T *to = (T *)m.back + (partials + m.back_at[i]) * m.hidden;
        for (; opens; opens &= opens - 1, to += m.hidden) {
            int u = __shfl_sync(EVERY_LANE, unit, __ffs((int)opens) - 1);
            const float *from = m.y + (i * m.units + u - m.first_unit) * m.hidden;
            for (int k = lane * V; k < m.hidden; k += WARP * V) {
                pack_of<float, V> x = *(const pack_of<float, V> *)(from + k);
                pack_of<T, V> z;
#pragma unroll
                for (int e = 0; e < V; e++)
                    narrow(&z.x[e], x.x[e]);
                *(pack_of<T, V> *)(to + k) = z;
            }
        }
    }
}

extern "C" status lane_nccl_gather(cuda *c, const nccl_board *m, int64_t rows)
{
    unsigned grid = cuda_grid(c, (rows + ROW_WARPS - 1) / ROW_WARPS, WAVES);
    bool wide = m->hidden % 4 == 0;
    if (wide && m->half)
        gather_kernel<bf16, 4><<<grid, ROW_THREADS, 0, c->stream>>>(*m);
    else if (wide)
        gather_kernel<float, 4><<<grid, ROW_THREADS, 0, c->stream>>>(*m);
    else if (m->half)
        gather_kernel<bf16, 1><<<grid, ROW_THREADS, 0, c->stream>>>(*m);
    else
        gather_kernel<float, 1><<<grid, ROW_THREADS, 0, c->stream>>>(*m);
    return CUDA_LAUNCHED("gathering of partial sums");
}

enum { MERGE_AT_ONCE = 4, NO_TERM = -3, FIRST_TERM = -2 };

/* Lane j of a warp knows the unit that edge j opens: where its partial sum lies, and how it joins the one before it. */
template <int LEVELS, int V, typename T>
static __global__ void __launch_bounds__(ROW_THREADS)
    merge_kernel(tensor y, tensor ids, const __grid_constant__ nccl_board m)
{
    __shared__ int merged;
    int hidden = m.hidden, slice = WARP * V, slices = (hidden + slice - 1) / slice, lane = (int)threadIdx.x % WARP;
    int64_t items = used_rows(ids) * slices;
    int rows = 0;
    if (threadIdx.x == 0)
        merged = 0;
    __syncthreads();
    for (int64_t at = blockIdx.x * ROW_WARPS + threadIdx.x / WARP; at < items; at += (int64_t)gridDim.x * ROW_WARPS) {
        int64_t token = at / slices, place = 0;
        int col = (int)(at % slices) * slice + lane * V;
        bool inside = col < hidden; /* all lanes stay: they know the edges */
        int id = lane < m.top_k ? row_of<int32_t>(ids, token)[lane] : -1;
        int unit = id >= 0 ? m.unit_of[id] : -1, rank = id >= 0 ? m.rank_of[id] : -1;
        int left_unit = __shfl_up_sync(EVERY_LANE, unit, 1), left_rank = __shfl_up_sync(EVERY_LANE, rank, 1);
        bool opens = id >= 0 && (lane == 0 || unit != left_unit);
        if (at % slices == 0)
            rows += __popc(__ballot_sync(EVERY_LANE, id >= 0 && (lane == 0 || rank != left_rank)));
        uint32_t present = __ballot_sync(EVERY_LANE, opens), earlier = present & ((1u << lane) - 1);
        int before = __shfl_sync(EVERY_LANE, unit, earlier ? 31 - __clz((int)earlier) : lane), way = FIRST_TERM;
        if (opens) {
            place = m.term_at[token * m.top_k + lane] + (rank == m.rank ? 0 : partials_before(m, rank));
            if (earlier) {
                int a = m.shard_of[before], b = m.shard_of[unit];
                way = a == b ? -1 : depth_of(a, b, m.shards);
            }
        }
        running_sum<LEVELS, V> s;
        if (!present) {
            const float zero[V] = {};
            s.begin(zero);
        }
        while (present) {
            float x[MERGE_AT_ONCE][V];
            int how[MERGE_AT_ONCE];
#pragma unroll
            for (int i = 0; i < MERGE_AT_ONCE; i++) {
                int j = present ? __ffs((int)present) - 1 : 0;
                int64_t from = __shfl_sync(EVERY_LANE, place, j) * hidden + col;
                bool own = __shfl_sync(EVERY_LANE, rank, j) == m.rank;
                how[i] = __shfl_sync(EVERY_LANE, way, j);
                if (!present)
                    how[i] = NO_TERM;
                else if (inside && own) {
                    pack_of<float, V> v = *(const pack_of<float, V> *)(m.y + from);
#pragma unroll
                    for (int e = 0; e < V; e++)
                        x[i][e] = v.x[e];
                } else if (inside) {
                    pack_of<T, V> v = *(const pack_of<T, V> *)((const T *)m.partials + from);
#pragma unroll
                    for (int e = 0; e < V; e++)
                        x[i][e] = widen(v.x[e]);
                }
                present &= present - 1;
            }
#pragma unroll
            for (int i = 0; i < MERGE_AT_ONCE; i++)
                if (how[i] == FIRST_TERM)
                    s.begin(x[i]);
                else if (how[i] == -1)
                    s.add(x[i]);
                else if (how[i] >= 0)
                    s.turn(x[i], how[i]);
        }
        s.join(-1);
        if (inside) {
            pack_of<float, V> sum;
#pragma unroll
            for (int e = 0; e < V; e++)
                sum.x[e] = s.newest[e];
            *(pack_of<float, V> *)(row_of<float>(y, token) + col) = sum;
        }
    }
    if (lane == 0 && rows > 0)
        atomicAdd(&merged, rows);
    __syncthreads();
    if (threadIdx.x == 0 && merged > 0)
        atomicAdd((unsigned long long *)&m.ledger->merged, (unsigned long long)merged);
}

template <int LEVELS, int V, typename T>
static void launch_merge(cuda *c, const nccl_board *m, const tensor *y, const tensor *ids)
{
    int64_t items = ids->rows * ((m->hidden + WARP * V - 1) / (WARP * V));
    merge_kernel<LEVELS, V, T>
        <<<cuda_grid(c, (items + ROW_WARPS - 1) / ROW_WARPS, WAVES), ROW_THREADS, 0, c->stream>>>(*y, *ids, *m);
}

template <int LEVELS, int V>
static void launch_merge_of(cuda *c, const nccl_board *m, const tensor *y, const tensor *ids)
{
    if (m->half)
        launch_merge<LEVELS, V, bf16>(c, m, y, ids);
    else
        launch_merge<LEVELS, V, float>(c, m, y, ids);
}

extern "C" status lane_nccl_merge(cuda *c, const nccl_board *m, const tensor *y, const tensor *ids)
{
    bool wide = vectors_fit(*y, 4) && m->hidden % 4 == 0;
    if (m->shards <= 8 && wide)
        launch_merge_of<3, 4>(c, m, y, ids);
    else if (m->shards <= 8)
        launch_merge_of<3, 1>(c, m, y, ids);
    else
        launch_merge_of<10, 1>(c, m, y, ids);
    return CUDA_LAUNCHED("merge of partial sums");
}
