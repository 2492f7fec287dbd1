/* FreshLane over MPI, in host memory. Three exchanges a layer:
 *
 *   greeting   how many rows follow, how many partial sums are wanted back, and the pulse; a fixed size from every rank
 *   rows       to each rank the tokens that have an expert there: [x | ids | weights] a token, back to back
 *   partials   back to each token's home the fp32 sums of its units, back to back in (token, unit) order
 *
 * Which units of a token are not empty follows from its expert ids, which both sides know, so partials carry no names.
 * What a rank receives lies in ring order: its own rows first (copied, never sent), then those of rank + 1, rank + 2
 * and so on. The experts read rows and write sums where they lie. */
#include "mpi/world_mpi.h"
#include "src/base/arena.h"
#include "src/lane.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

typedef struct greeting {
    int32_t rows, partials, pulse[PULSE];
} greeting;

enum { GREETING_INTS = sizeof(greeting) / sizeof(int32_t) };

enum { TAG_ROWS, TAG_PARTIALS };

typedef struct lane_mpi {
    lane_rule rule;
    backend *b;
    int rank, size, first_unit, units; /* units of this rank */
    MPI_Comm comm;             /* the world's; only the tags here are used between two ranks */
    MPI_Datatype row, partial; /* of whole rows: their number fits an int where their bytes do not */
    size_t ids_at, weights_at, row_bytes;
    tensor ids; /* of the newest dispatch */
    int64_t n;  /* its rows */
    lane_traffic traffic;
    int posted; /* requests */
    arena memory;
    /* taken from memory */
    greeting *out, *in;   /* [size]: to and from every rank */
    int32_t *pulses;      /* [size][PULSE] */
    int64_t *arrived_at;  /* [size]: the first row in `arrived` of each rank */
    char **place;         /* [size]: where the next row to each rank goes */
    float **next;         /* [size]: the next partial from each rank */
    MPI_Request *request; /* [2 * size] */
    int32_t *peer;        /* [2 * size]: of each request */
    int32_t *wanted;      /* [2 * size]: rows that a receive must bring; -1: a send */
    const float **term;   /* [unit_count] */
    float *scratch;       /* of sum_tree_fold */
    char *packed;         /* [max_rows * most other ranks of a token] rows */
    char *arrived;        /* [size * max_rows] rows */
    float *y;             /* [size * max_rows * units, H] */
    float *partials;      /* [max_rows * most units of a token at other ranks, H] */
} lane_mpi;

static int ring(const lane_mpi *m, int k)
{
    return (m->rank + k) % m->size;
}

static const int32_t *id_row(const tensor *ids, int64_t i)
{
    return (const int32_t *)ids->data + i * ids->ld;
}

/* The ids of arrived row i. */
static const int32_t *arrived_ids(const lane_mpi *m, int64_t i)
{
    return (const int32_t *)(const void *)(m->arrived + (size_t)i * m->row_bytes + m->ids_at);
}

/* ---- requests: `count` rows of `type`; none for zero rows, which both sides know */

static status post_receive(lane_mpi *m, void *to, int32_t count, MPI_Datatype type, int from, int tag)
{
    status st = OK;
    if (count > 0) {
        m->peer[m->posted] = from;
        m->wanted[m->posted] = count;
        TRY_MPI(MPI_Irecv(to, count, type, from, tag, m->comm, &m->request[m->posted++]));
    }
out:
    return st;
}

static status post_send(lane_mpi *m, const void *rows, int32_t count, MPI_Datatype type, int to, int tag)
{
    status st = OK;
    if (count > 0) {
        m->peer[m->posted] = to;
        m->wanted[m->posted] = -1;
        TRY_MPI(MPI_Isend(rows, count, type, to, tag, m->comm, &m->request[m->posted++]));
    }
out:
    return st;
}

/* One by one: MPI_Waitall of Open MPI 4.1 never returns once a message was longer than its receive. */
static status finish(lane_mpi *m, MPI_Datatype type, const char *what)
{
    status st = OK;
    int posted = m->posted, got, kind;
    MPI_Status ended;
    m->posted = 0;
    for (int i = 0; i < posted; i++) {
        int from = m->peer[i], want = m->wanted[i], code = MPI_Wait(&m->request[i], &ended);
        if (code != MPI_SUCCESS && MPI_Error_class(code, &kind) == MPI_SUCCESS && kind == MPI_ERR_TRUNCATE)
            FAIL(FAILED, "lane received more %s from rank %d than the %d that counts said", what, from, want);
        if (code != MPI_SUCCESS) {
            st = world_mpi_fail(code, "MPI_Wait", __FILE__, __LINE__);
            goto out;
        }
        if (want < 0)
            continue;
        TRY_MPI(MPI_Get_count(&ended, type, &got));
        if (got != want)
            FAIL(FAILED, "lane received %d %s from rank %d, counts said %d", got, what, from, want);
    }
out:
    return st;
}

/* ---- dispatch */

static void greet(lane_mpi *m, const int32_t *pulse)
{
    const sum_tree *t = m->rule.tree;
    for (int r = 0; r < m->size; r++) {
        m->out[r].rows = m->out[r].partials = 0;
        memcpy(m->out[r].pulse, pulse, sizeof m->out[r].pulse);
    }
    for (int64_t i = 0; i < m->n; i++) {
        const int32_t *id = id_row(&m->ids, i);
        int rank = -1, unit = -1;
        for (int j = 0; j < m->rule.top_k && id[j] >= 0; j++) {
            assert(id[j] < t->experts && (j == 0 || id[j] > id[j - 1]));
            greeting *to = &m->out[t->rank_of[id[j]]];
            to->rows += t->rank_of[id[j]] != rank;
            to->partials += t->unit_of[id[j]] != unit;
            rank = t->rank_of[id[j]];
            unit = t->unit_of[id[j]];
        }
    }
}

/* Packs each row once for each of its ranks; this rank's own go straight to where arrived rows lie. */
static void pack(lane_mpi *m, const tensor *x, const tensor *weights)
{
    const sum_tree *t = m->rule.tree;
    size_t element = dtype_bytes(m->rule.payload), x_bytes = (size_t)m->rule.hidden * element;
    int top_k = m->rule.top_k;
    for (int64_t i = 0; i < m->n; i++) {
        const char *x_row = (const char *)x->data + (size_t)(i * x->ld) * element;
        const int32_t *id = id_row(&m->ids, i);
        const float *w = (const float *)weights->data + i * weights->ld;
        for (int j = 0; j < top_k && id[j] >= 0;) {
            int rank = t->rank_of[id[j]], edges = 0;
            char *row = m->place[rank];
            int32_t *id_to = (int32_t *)(void *)(row + m->ids_at);
            float *w_to = (float *)(void *)(row + m->weights_at);
            m->place[rank] += m->row_bytes;
            memcpy(row, x_row, x_bytes);
            for (; j < top_k && id[j] >= 0 && t->rank_of[id[j]] == rank; j++, edges++) {
                id_to[edges] = id[j];
                w_to[edges] = w[j];
            }
            for (; edges < top_k; edges++) {
                id_to[edges] = -1;
                w_to[edges] = 0;
            }
        }
    }
}

/* Do the ids of the rows from `rank` lie here, and do they make as many partials as that rank waits for? */
static status check_arrived(const lane_mpi *m, int rank)
{
    status st = OK;
    const sum_tree *t = m->rule.tree;
    int first = t->rank_first[m->rank], last = t->rank_first[m->rank + 1], partials = 0;
    for (int64_t i = m->arrived_at[rank]; i < m->arrived_at[rank] + m->in[rank].rows; i++) {
        const int32_t *id = arrived_ids(m, i);
        int unit = -1;
        for (int j = 0; j < m->rule.top_k && id[j] >= 0; j++) {
            if (id[j] < first || id[j] >= last)
                FAIL(FAILED, "lane received a row for expert %d from rank %d, this rank has %d to %d", id[j], rank,
                     first, last - 1);
            partials += t->unit_of[id[j]] != unit;
            unit = t->unit_of[id[j]];
        }
    }
    if (partials != m->in[rank].partials)
        FAIL(FAILED, "the rows of rank %d make %d partial sums, counts said %d", rank, partials, m->in[rank].partials);
out:
    return st;
}

static status dispatch(lane *l, lane_load *in, const tensor *x, const tensor *ids, const tensor *weights)
{
    status st = OK;
    lane_mpi *m = l->self;
    int64_t rows = 0, most = m->rule.max_rows, ld = (int64_t)m->row_bytes;
    char *packed = m->packed;
    m->ids = *ids;
    m->n = x->used ? *x->used : x->rows;
    if (m->n > most)
        FAIL(FAILED, "dispatch of %lld rows, the lane was opened for %lld", (long long)m->n, (long long)most);
    greet(m, l->pulse);
    m->place[m->rank] = m->arrived;
    for (int k = 1; k < m->size; k++) {
        m->place[ring(m, k)] = packed;
        packed += (size_t)m->out[ring(m, k)].rows * m->row_bytes;
    }
    pack(m, x, weights);
    /* Rows leave before the greetings are read: nobody needs an answer to send. */
    for (int k = 1; k < m->size; k++) {
        int r = ring(m, k);
        int32_t count = m->out[r].rows;
        TRY(post_send(m, m->place[r] - (size_t)count * m->row_bytes, count, m->row, r, TAG_ROWS));
        m->traffic.bytes_dispatched += count * ld;
    }
    TRY_MPI(MPI_Alltoall(m->out, GREETING_INTS, MPI_INT32_T, m->in, GREETING_INTS, MPI_INT32_T, m->comm));
    for (int k = 0; k < m->size; k++) {
        int r = ring(m, k);
        if (m->in[r].rows < 0 || m->in[r].rows > most)
            FAIL(FAILED, "rank %d sends %d rows, the lane was opened for %lld", r, m->in[r].rows, (long long)most);
        memcpy(m->pulses + r * PULSE, m->in[r].pulse, sizeof m->in[r].pulse);
        m->arrived_at[r] = rows;
        if (k > 0)
            TRY(post_receive(m, m->arrived + (size_t)rows * m->row_bytes, m->in[r].rows, m->row, r, TAG_ROWS));
        rows += m->in[r].rows;
        m->traffic.rows_sent += m->out[r].rows;
    }
    m->traffic.rows_received += rows;
    TRY(finish(m, m->row, "rows"));
    for (int k = 1; k < m->size; k++)
        TRY(check_arrived(m, ring(m, k)));
    in->x = tensor_of(m->arrived, m->rule.payload, rows, m->rule.hidden);
    in->x.ld = ld / (int64_t)dtype_bytes(m->rule.payload);
    in->ids = tensor_of(m->arrived + m->ids_at, I32, rows, m->rule.top_k);
    in->weights = tensor_of(m->arrived + m->weights_at, F32, rows, m->rule.top_k);
    in->ids.ld = in->weights.ld = ld / 4;
    in->y = tensor_of(m->y, F32, rows * m->units, m->rule.hidden);
out:
    return st;
}

/* ---- combine */

/* Moves the partials of rank r's rows together, in place; returns the first. */
static float *gather_partials(const lane_mpi *m, int r)
{
    const sum_tree *t = m->rule.tree;
    int64_t h = m->rule.hidden, first = m->arrived_at[r];
    float *block = m->y + first * m->units * h, *to = block;
    if (m->units == 1) /* every row that arrived has an edge */
        return block;
    for (int64_t i = first; i < first + m->in[r].rows; i++) {
        const int32_t *id = arrived_ids(m, i);
        int unit = -1;
        for (int j = 0; j < m->rule.top_k && id[j] >= 0; j++) {
            if (t->unit_of[id[j]] == unit)
                continue;
            unit = t->unit_of[id[j]];
            const float *from = m->y + (i * m->units + unit - m->first_unit) * h;
            if (to != from)
                memcpy(to, from, (size_t)h * sizeof *to);
            to += h;
        }
    }
    return block;
}

/* y[i] = the tree's sum of row i's partials: this rank's own where the experts left them, others in arriving order. */
static int64_t merge(lane_mpi *m, tensor *y)
{
    const sum_tree *t = m->rule.tree;
    int64_t h = m->rule.hidden, own_rows = 0, merged = 0;
    for (int64_t i = 0; i < m->n; i++) {
        const int32_t *id = id_row(&m->ids, i);
        int rank = -1;
        memset(m->term, 0, (size_t)t->unit_count * sizeof *m->term);
        for (int j = 0; j < m->rule.top_k && id[j] >= 0; j++) {
            int unit = t->unit_of[id[j]];
            if (t->rank_of[id[j]] != rank) {
                rank = t->rank_of[id[j]];
                own_rows += rank == m->rank;
                merged++;
            }
            if (m->term[unit])
                continue;
            if (rank == m->rank) {
                m->term[unit] = m->y + ((own_rows - 1) * m->units + unit - m->first_unit) * h;
            } else {
                m->term[unit] = m->next[rank];
                m->next[rank] += h;
            }
        }
        sum_tree_fold(t, (float *)y->data + i * y->ld, m->term, h, m->scratch);
    }
    return merged;
}

static status combine(lane *l, tensor *y, const lane_load *out)
{
    status st = OK;
    lane_mpi *m = l->self;
    int64_t h = m->rule.hidden, sent = 0, merged;
    float *partials = m->partials;
    (void)out; /* what dispatch handed out, so all of it is known here */
    for (int k = 1; k < m->size; k++) {
        int r = ring(m, k);
        m->next[r] = partials;
        TRY(post_receive(m, partials, m->out[r].partials, m->partial, r, TAG_PARTIALS));
        partials += m->out[r].partials * h;
    }
    for (int k = 1; k < m->size; k++) {
        int r = ring(m, k);
        TRY(post_send(m, gather_partials(m, r), m->in[r].partials, m->partial, r, TAG_PARTIALS));
        m->traffic.bytes_combined += m->in[r].partials * h * (int64_t)sizeof(float);
    }
    TRY(finish(m, m->partial, "partial sums"));
    merged = merge(m, y);
    for (int r = 0; r < m->size; r++) {
        sent += m->out[r].rows;
        m->traffic.partials_sent += m->in[r].partials;
        m->traffic.partials_received += m->out[r].partials;
    }
    m->traffic.rows_merged += merged;
    if (merged != sent)
        FAIL(FAILED, "lane merged %lld rows, dispatched %lld: the expert ids changed before combine", (long long)merged,
             (long long)sent);
out:
    return st;
}

static status traffic(lane *l, lane_traffic *t)
{
    lane_mpi *m = l->self;
    *t = m->traffic;
    m->traffic = (lane_traffic){0};
    return OK;
}

/* ---- open and close */

static void layout(lane_mpi *m)
{
    const sum_tree *t = m->rule.tree;
    arena *a = &m->memory;
    int top_k = m->rule.top_k, others = m->size - 1, units_there = t->unit_count - m->units;
    size_t size = (size_t)m->size, rows = (size_t)m->rule.max_rows, h_bytes = (size_t)m->rule.hidden * sizeof(float);
    a->used = 0;
    m->out = arena_take(a, size * sizeof *m->out);
    m->in = arena_take(a, size * sizeof *m->in);
    m->pulses = arena_take(a, size * PULSE * sizeof *m->pulses);
    m->arrived_at = arena_take(a, size * sizeof *m->arrived_at);
    m->place = arena_take(a, size * sizeof *m->place);
    m->next = arena_take(a, size * sizeof *m->next);
    m->request = arena_take(a, 2 * size * sizeof *m->request);
    m->peer = arena_take(a, 2 * size * sizeof *m->peer);
    m->wanted = arena_take(a, 2 * size * sizeof *m->wanted);
    m->term = arena_take(a, (size_t)t->unit_count * sizeof *m->term);
    m->scratch = arena_take(a, (size_t)sum_tree_scratch(t) * h_bytes);
    m->packed = arena_take(a, rows * (size_t)(top_k < others ? top_k : others) * m->row_bytes);
    m->arrived = arena_take(a, size * rows * m->row_bytes);
    m->y = arena_take(a, size * rows * (size_t)m->units * h_bytes);
    m->partials = arena_take(a, rows * (size_t)(top_k < units_there ? top_k : units_there) * h_bytes);
}

static void close_lane(lane *l)
{
    if (!l)
        return;
    lane_mpi *m = l->self;
    MPI_Type_free(&m->row);
    MPI_Type_free(&m->partial);
    m->b->release(m->b, m->memory.slab);
    free(m);
    free(l);
}

status lane_mpi_open(lane **out, const lane_rule *rule, backend *b, world *w)
{
    status st = OK;
    void *slab = NULL;
    lane *l = calloc(1, sizeof *l);
    lane_mpi *m = calloc(1, sizeof *m);
    *out = NULL;
    assert(rule->tree->ranks == w->size);
    if (!l || !m)
        FAIL(FAILED, "out of memory");
    m->rule = *rule;
    m->b = b;
    m->rank = w->rank;
    m->size = w->size;
    m->first_unit = rule->tree->rank_unit[w->rank];
    m->units = rule->tree->rank_unit[w->rank + 1] - m->first_unit;
    m->ids_at = ((size_t)rule->hidden * dtype_bytes(rule->payload) + 3) / 4 * 4;
    m->weights_at = m->ids_at + (size_t)rule->top_k * sizeof(int32_t);
    m->row_bytes = m->weights_at + (size_t)rule->top_k * sizeof(float);
    m->memory.name = "lane";
    layout(m);
    m->memory.bytes = m->memory.used;
    TRY(b->reserve(b, &slab, m->memory.bytes));
    m->memory.slab = slab;
    layout(m);
    m->comm = world_mpi_comm(w);
    TRY_MPI(MPI_Type_contiguous((int)m->row_bytes, MPI_BYTE, &m->row));
    TRY_MPI(MPI_Type_commit(&m->row));
    TRY_MPI(MPI_Type_contiguous(rule->hidden, MPI_FLOAT, &m->partial));
    TRY_MPI(MPI_Type_commit(&m->partial));
    *l = (lane){.name = "mpi", .rank = m->rank, .size = m->size, .self = m, .pulses = m->pulses, .dispatch = dispatch,
                .combine = combine, .traffic = traffic, .close = close_lane};
    *out = l;
    l = NULL;
    m = NULL;
    slab = NULL;
out:
    if (slab)
        b->release(b, slab);
    free(m);
    free(l);
    return st;
}
