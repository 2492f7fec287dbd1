/* FreshLane between GPUs by NCCL's sends and receives. Three exchanges a layer, as in lane_mpi.c:
 *
 *   greeting   how many rows follow, how many partial sums are wanted back, and the pulse; a fixed size from every rank
 *   rows       to each rank the tokens that have an expert there: [x | ids | weights] a token, back to back
 *   partials   back to each token's home the sums of its units, back to back in (token, unit) order
 *
 * The host waits for the greetings alone, to size the other two; meanwhile the GPU packs rows. What arrives lies in
 * ring order, this rank's own rows first. Sums are checked on the device, and read with the next greetings. */
#include "mpi/lane_nccl.h"

#include "mpi/comm_nccl.h"
#include "src/base/arena.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROW_ALIGN = 16,
    CHANNELS = 32 /* NCCL's blocks, at most, where rows are many */
};

typedef struct lane_nccl {
    lane_rule rule;
    cuda *c;
    backend *b;
    nccl_comm *n;
    nccl_board board;
    void *slab;
    size_t heard_bytes;
    char *heard; /* pinned: out, in and ledger of the board */
    const nccl_greeting *out, *in;
    const nccl_ledger *ledger;
    cudaEvent_t event;
    int32_t *pulses;      /* [size][PULSE] */
    tensor ids;           /* of the newest dispatch */
    int64_t arrived;      /* its rows here */
    int64_t sent, merged; /* token rows since the lane was opened; merged: up to the newest traffic */
    lane_traffic traffic;
} lane_nccl;

static int ring(const lane_nccl *m, int k)
{
    return (m->board.rank + k) % m->board.size;
}

static size_t partial_bytes(const lane_nccl *m)
{
    return (size_t)m->rule.hidden * (m->board.half ? sizeof(uint16_t) : sizeof(float));
}

/* Brings the board's counts to the host, once the stream is there. */
static status post_heard(lane_nccl *m)
{
    status st = OK;
    CUDA_TRY(cudaMemcpyAsync(m->heard, m->board.out, m->heard_bytes, cudaMemcpyDeviceToHost, m->c->stream));
    CUDA_TRY(cudaEventRecord(m->event, m->c->stream));
    m->c->ordered = true;
out:
    return st;
}

/* What the device found in what arrived, and merged, up to now. */
static status check_ledger(const lane_nccl *m)
{
    status st = OK;
    const nccl_ledger *g = m->ledger;
    if (g->broken == ARRIVED_ASTRAY)
        FAIL(FAILED, "lane received a row for expert %d from rank %d, this rank has %d to %d", g->have, g->rank,
             m->board.first, m->board.last - 1);
    if (g->broken == ARRIVED_MISCOUNTED)
        FAIL(FAILED, "the rows of rank %d make %d partial sums, counts said %d", g->rank, g->have, g->want);
    if (g->merged != m->sent)
        FAIL(FAILED, "lane merged %lld rows, dispatched %lld: the expert ids changed before combine",
             (long long)g->merged, (long long)m->sent);
out:
    return st;
}

static status wait_heard(lane_nccl *m)
{
    status st = OK;
    TRY(nccl_wait(m->n, m->event));
    TRY(check_ledger(m));
out:
    return st;
}

/* ---- dispatch */

static status exchange_greetings(lane_nccl *m)
{
    status st = OK;
    ncclComm_t comm = nccl_handle(m->n);
    NCCL_TRY(m->n, ncclGroupStart());
    for (int k = 1; k < m->board.size; k++) {
        int r = ring(m, k);
        NCCL_TRY(m->n, ncclSend(&m->board.out[r], sizeof *m->board.out, ncclInt8, r, comm, m->c->stream));
        NCCL_TRY(m->n, ncclRecv(&m->board.in[r], sizeof *m->board.in, ncclInt8, r, comm, m->c->stream));
    }
    NCCL_TRY(m->n, ncclGroupEnd());
    m->c->ordered = true; /* what follows a transfer waits for all of it */
out:
    return st;
}

static status exchange_rows(lane_nccl *m)
{
    status st = OK;
    ncclComm_t comm = nccl_handle(m->n);
    size_t each = (size_t)m->board.row_bytes;
    char *packed = m->board.packed, *arrived = m->board.arrived + (size_t)m->in[m->board.rank].rows * each;
    NCCL_TRY(m->n, ncclGroupStart());
    for (int k = 1; k < m->board.size; k++) {
        int r = ring(m, k);
        size_t out = (size_t)m->out[r].rows * each, in = (size_t)m->in[r].rows * each;
        if (out > 0)
            NCCL_TRY(m->n, ncclSend(packed, out, ncclInt8, r, comm, m->c->stream));
        if (in > 0)
            NCCL_TRY(m->n, ncclRecv(arrived, in, ncclInt8, r, comm, m->c->stream));
        packed += out;
        arrived += in;
    }
    NCCL_TRY(m->n, ncclGroupEnd());
    m->c->ordered = true; /* what follows a transfer waits for all of it */
out:
    return st;
}

/* The greetings have come: may what they announce come too? */
static status check_greetings(lane_nccl *m)
{
    status st = OK;
    int64_t most = m->rule.max_rows, sums = m->board.units < m->rule.top_k ? m->board.units : m->rule.top_k;
    m->arrived = 0;
    for (int r = 0; r < m->board.size; r++) {
        const nccl_greeting *g = &m->in[r];
        if (g->rows < 0 || g->rows > most)
            FAIL(FAILED, "rank %d sends %d rows, the lane was opened for %lld", r, g->rows, (long long)most);
        if (g->partials < g->rows || g->partials > g->rows * sums)
            FAIL(FAILED, "rank %d wants %d partial sums of %d rows, this rank has %d units", r, g->partials, g->rows,
                 m->board.units);
        memcpy(m->pulses + r * PULSE, g->pulse, sizeof g->pulse);
        m->arrived += g->rows;
        m->sent += m->out[r].rows;
        m->traffic.rows_sent += m->out[r].rows;
        m->traffic.bytes_dispatched += r == m->board.rank ? 0 : m->out[r].rows * m->board.row_bytes;
    }
    m->traffic.rows_received += m->arrived;
out:
    return st;
}

static status dispatch(lane *l, lane_load *in, const tensor *x, const tensor *ids, const tensor *weights)
{
    status st = OK;
    lane_nccl *m = l->self;
    const nccl_board *d = &m->board;
    if (x->rows > m->rule.max_rows)
        FAIL(FAILED, "dispatch of up to %lld rows, the lane was opened for %lld", (long long)x->rows,
             (long long)m->rule.max_rows);
    m->ids = *ids;
    TRY(lane_nccl_deal(m->c, d, ids, l->pulse));
    TRY(exchange_greetings(m));
    TRY(post_heard(m));
    TRY(lane_nccl_pack(m->c, d, x, ids, weights));
    TRY(wait_heard(m));
    TRY(check_greetings(m));
    TRY(exchange_rows(m));
    TRY(lane_nccl_arrive(m->c, d));
    int64_t rows = m->rule.max_rows * d->size;
    in->x = tensor_of(d->arrived, BF16, rows, m->rule.hidden);
    in->x.ld = d->row_bytes / (int64_t)sizeof(uint16_t);
    in->ids = tensor_of(d->arrived + d->ids_at, I32, rows, m->rule.top_k);
    in->weights = tensor_of(d->arrived + d->weights_at, F32, rows, m->rule.top_k);
    in->ids.ld = in->weights.ld = d->row_bytes / (int64_t)sizeof(float);
    in->y = tensor_of(d->y, F32, rows * d->units, m->rule.hidden);
    in->x.used = in->ids.used = in->weights.used = d->arrived_count;
out:
    return st;
}

/* ---- combine */

static status exchange_partials(lane_nccl *m)
{
    status st = OK;
    const nccl_board *d = &m->board;
    ncclComm_t comm = nccl_handle(m->n);
    size_t each = partial_bytes(m);
    /* with one unit, every row that arrived has one sum, where the experts left it */
    char *from = d->back ? d->back : (char *)(d->y + (int64_t)m->in[d->rank].rows * m->rule.hidden), *to = d->partials;
    NCCL_TRY(m->n, ncclGroupStart());
    for (int k = 1; k < d->size; k++) {
        int r = ring(m, k);
        size_t back = (size_t)m->in[r].partials * each, home = (size_t)m->out[r].partials * each;
        if (back > 0)
            NCCL_TRY(m->n, ncclSend(from, back, ncclInt8, r, comm, m->c->stream));
        if (home > 0)
            NCCL_TRY(m->n, ncclRecv(to, home, ncclInt8, r, comm, m->c->stream));
        from += back;
        to += home;
        m->traffic.bytes_combined += (int64_t)back;
    }
    NCCL_TRY(m->n, ncclGroupEnd());
    m->c->ordered = true; /* what follows a transfer waits for all of it */
out:
    return st;
}

static status combine(lane *l, tensor *y, const lane_load *out)
{
    status st = OK;
    lane_nccl *m = l->self;
    int64_t strangers = m->arrived - m->in[m->board.rank].rows;
    (void)out; /* what dispatch handed out, so all of it is known here */
    if (m->board.back && strangers > 0)
        TRY(lane_nccl_gather(m->c, &m->board, strangers));
    TRY(exchange_partials(m));
    TRY(lane_nccl_merge(m->c, &m->board, y, &m->ids));
    for (int r = 0; r < m->board.size; r++) {
        m->traffic.partials_sent += m->in[r].partials;
        m->traffic.partials_received += m->out[r].partials;
    }
out:
    return st;
}

/* The device counts what is merged; asking waits for the forwards so far. */
static status traffic(lane *l, lane_traffic *t)
{
    status st = OK;
    lane_nccl *m = l->self;
    TRY(post_heard(m));
    TRY(wait_heard(m));
    *t = m->traffic;
    t->rows_merged = m->ledger->merged - m->merged;
    m->merged = m->ledger->merged;
    m->traffic = (lane_traffic){0};
out:
    return st;
}

/* ---- open and close */

static void layout(lane_nccl *m, arena *a)
{
    const sum_tree *t = m->rule.tree;
    nccl_board *d = &m->board;
    int top_k = m->rule.top_k, others = d->size - 1, units_there = t->unit_count - d->units;
    size_t size = (size_t)d->size, rows = (size_t)m->rule.max_rows, hidden = (size_t)m->rule.hidden;
    a->used = 0;
    d->out = arena_take(a, m->heard_bytes);
    d->in = d->out ? d->out + size : NULL;
    d->ledger = d->out ? (nccl_ledger *)(void *)(d->out + 2 * size) : NULL;
    d->arrived_count = arena_take(a, sizeof *d->arrived_count);
    d->rank_of = arena_take(a, (size_t)t->experts * sizeof *d->rank_of);
    d->unit_of = arena_take(a, (size_t)t->experts * sizeof *d->unit_of);
    d->shard_of = arena_take(a, (size_t)t->unit_count * sizeof *d->shard_of);
    d->row_at = arena_take(a, rows * (size_t)top_k * sizeof *d->row_at);
    d->term_at = arena_take(a, rows * (size_t)top_k * sizeof *d->term_at);
    d->packed = arena_take(a, rows * (size_t)(top_k < others ? top_k : others) * (size_t)d->row_bytes);
    d->arrived = arena_take(a, size * rows * (size_t)d->row_bytes);
    d->y = arena_take(a, size * rows * (size_t)d->units * hidden * sizeof(float));
    d->partials = arena_take(a, rows * (size_t)(top_k < units_there ? top_k : units_there) * partial_bytes(m));
    if (d->units > 1 || d->half) {
        int sums = d->units < top_k ? d->units : top_k;
        d->back_at = arena_take(a, size * rows * sizeof *d->back_at);
        d->back = arena_take(a, (size_t)others * rows * (size_t)sums * partial_bytes(m));
    }
}

static status upload_tree(lane_nccl *m)
{
    status st = OK;
    const sum_tree *t = m->rule.tree;
    int32_t *shard = calloc((size_t)t->unit_count, sizeof *shard);
    if (!shard)
        FAIL(FAILED, "out of memory");
    for (int u = 0; u < t->unit_count; u++)
        shard[u] = t->unit[u].shard_lo;
    const struct {
        const int32_t *to, *from;
        int count;
    } all[] = {{m->board.rank_of, t->rank_of, t->experts},
               {m->board.unit_of, t->unit_of, t->experts},
               {m->board.shard_of, shard, t->unit_count}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        tensor to = tensor_of((void *)(uintptr_t)all[i].to, I32, 1, all[i].count);
        TRY(m->b->upload(m->b, &to, all[i].from, I32));
    }
out:
    free(shard);
    return st;
}

static void close_lane(lane *l)
{
    if (!l)
        return;
    lane_nccl *m = l->self;
    if (m->slab)
        m->b->release(m->b, m->slab);
    if (m->event)
        cudaEventDestroy(m->event);
    cudaFreeHost(m->heard);
    free(m->pulses);
    free(m);
    free(l);
}

status lane_nccl_open(lane **out, const lane_rule *rule, backend *b, world *w, nccl_comm *n)
{
    status st = OK;
    arena memory = {.name = "lane"};
    lane *l = calloc(1, sizeof *l);
    lane_nccl *m = calloc(1, sizeof *m);
    const sum_tree *t = rule->tree;
    *out = NULL;
    assert(t->ranks == w->size && rule->payload == BF16);
    if (!l || !m) {
        free(l);
        free(m);
        l = NULL;
        FAIL(FAILED, "out of memory");
    }
    *l = (lane){.name = "nccl",
                .rank = w->rank,
                .size = w->size,
                .holds = w->size > 1 ? CHANNELS : 0,
                .self = m,
                .dispatch = dispatch,
                .combine = combine,
                .traffic = traffic,
                .close = close_lane};
    m->rule = *rule;
    m->c = cuda_of(b);
    m->b = b;
    m->n = n;
    nccl_board *d = &m->board;
    d->rank = w->rank;
    d->size = w->size;
    d->top_k = rule->top_k;
    d->hidden = rule->hidden;
    d->experts = t->experts;
    d->first = t->rank_first[w->rank];
    d->last = t->rank_first[w->rank + 1];
    d->first_unit = t->rank_unit[w->rank];
    d->units = t->rank_unit[w->rank + 1] - d->first_unit;
    d->shards = t->shards;
    d->half = rule->combine == BF16;
    d->ids_at = ((int64_t)rule->hidden * (int64_t)sizeof(uint16_t) + 3) / 4 * 4;
    d->weights_at = d->ids_at + rule->top_k * (int64_t)sizeof(int32_t);
    d->row_bytes = (d->weights_at + rule->top_k * (int64_t)sizeof(float) + ROW_ALIGN - 1) / ROW_ALIGN * ROW_ALIGN;
    m->heard_bytes = 2 * (size_t)d->size * sizeof *d->out + sizeof *d->ledger;
    layout(m, &memory);
    memory.bytes = memory.used;
    if (b->reserve(b, &m->slab, memory.bytes) != OK)
        FAIL(FAILED, "no memory for the lane (%.1f MB): lower --batch or --prefill-blocks (%s)",
             (double)memory.bytes / 1e6, status_message());
    memory.slab = m->slab;
    layout(m, &memory);
    TRY(upload_tree(m));
    CUDA_TRY(cudaMallocHost((void **)&m->heard, m->heard_bytes));
    CUDA_TRY(cudaEventCreateWithFlags(&m->event, cudaEventDisableTiming));
    m->out = (const nccl_greeting *)(const void *)m->heard;
    m->in = m->out + d->size;
    m->ledger = (const nccl_ledger *)(const void *)(m->in + d->size);
    m->pulses = l->pulses = calloc((size_t)d->size * PULSE, sizeof *m->pulses);
    if (!m->pulses)
        FAIL(FAILED, "out of memory");
    *out = l;
    l = NULL;
out:
    close_lane(l);
    return st;
}
