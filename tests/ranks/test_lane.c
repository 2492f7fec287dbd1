/* The lane between ranks against one process that sums everything itself: bitwise, for every deal of experts; what it
 * counts against what MPI was given to carry; and each way in which an exchange can go wrong. */
#include "tests/ranks/ranks.h"

#include "src/lane.h"

#include <math.h>
#include <mpi.h>
#include <string.h>

enum { H = 23, MAX_ROWS = 40, MOST_K = 8, RANKS_MOST = 64, SENT_INTS = 2 + PULSE };

/* ---- faults, between the program and the library (MPI's profiling interface) */

static struct {
    int rank;              /* the one that errs */
    int rows, to;          /* its messages to rank `to` have so many rows more */
    int id;                /* >= 0: the first expert of its first row to `to` */
    int say_rows, say_partials; /* what it adds in its greeting to `to` */
    int alltoall, isend, wait; /* the error returned */
} fault;

static int64_t alltoalls, bytes_sent;

static void faults_off(void)
{
    memset(&fault, 0, sizeof fault);
    fault.rank = fault.id = -1;
}

int MPI_Isend(const void *rows, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request)
{
    int size;
    if (fault.isend)
        return fault.isend;
    PMPI_Type_size(type, &size);
    bytes_sent += (int64_t)n * size;
    if (job->rank == fault.rank && to == fault.to) {
        n += fault.rows;
        if (fault.id >= 0)
            memcpy((char *)(uintptr_t)rows + H * sizeof(float), &fault.id, sizeof fault.id);
    }
    return PMPI_Isend(rows, n, type, to, tag, comm, request);
}

int MPI_Alltoall(const void *send, int n, MPI_Datatype type, void *recv, int m, MPI_Datatype to_type, MPI_Comm comm)
{
    alltoalls++;
    if (fault.alltoall)
        return fault.alltoall;
    if (job->rank == fault.rank && n == SENT_INTS) {
        ((int32_t *)(uintptr_t)send)[fault.to * n] += fault.say_rows;
        ((int32_t *)(uintptr_t)send)[fault.to * n + 1] += fault.say_partials;
    }
    return PMPI_Alltoall(send, n, type, recv, m, to_type, comm);
}

int MPI_Wait(MPI_Request *request, MPI_Status *ended)
{
    return fault.wait ? fault.wait : PMPI_Wait(request, ended);
}

/* ---- a backend that only has memory */

static int memory_left = 1, slabs;

static status reserve(backend *b, void **slab, size_t bytes)
{
    status st = OK;
    (void)b;
    if (!memory_left)
        FAIL(FAILED, "no memory for %zu bytes", bytes);
    *slab = calloc(1, bytes);
    slabs++;
out:
    return st;
}

static void release(backend *b, void *slab)
{
    (void)b;
    slabs -= slab != NULL;
    free(slab);
}

static backend memory = {.reserve = reserve, .release = release};

/* ---- rows and experts */

static uint32_t seed;

static uint32_t any(uint32_t below)
{
    seed ^= seed << 13;
    seed ^= seed >> 17;
    seed ^= seed << 5;
    return seed % below;
}

typedef struct rows {
    int n;
    float x[MAX_ROWS][H + 2]; /* ld > cols */
    uint16_t half[MAX_ROWS][H + 3];
    int32_t id[MAX_ROWS][MOST_K + 1];
    float w[MAX_ROWS][MOST_K];
} rows;

static float widen(uint16_t bf16)
{
    uint32_t bits = (uint32_t)bf16 << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* n rows with up to top_k experts each; `only` >= 0: all on that one. Small integers where `exact`. */
static void fill(rows *r, int n, int experts, int top_k, int only, bool exact)
{
    r->n = n;
    for (int i = 0; i < n; i++) {
        char chosen[SUM_TREE_EXPERTS] = {0};
        int edges = 0, want = any(6) == 0 ? (int)any((uint32_t)top_k + 1) : top_k;
        for (int h = 0; h < H; h++) {
            uint32_t bits = (uint32_t)0x3f80 + any(0x100) + (any(2) << 15);
            r->half[i][h] = (uint16_t)bits;
            r->x[i][h] = exact ? (float)any(100) - 50 : (float)any(1000003) / 997.f - 500.f;
        }
        for (int j = 0; j < want; j++)
            chosen[only >= 0 ? (uint32_t)only : any((uint32_t)experts)] = 1;
        for (int e = 0; e < experts; e++)
            if (chosen[e]) {
                r->id[i][edges] = e;
                r->w[i][edges++] = exact ? (float)any(16) : (float)any(10007) / 10007.f;
            }
        for (; edges < top_k; edges++) {
            r->id[i][edges] = -1;
            r->w[i][edges] = 0;
        }
    }
}

/* What "expert" e makes of a row. */
static void expert(float *y, int e, const void *x, dtype type, float w)
{
    for (int h = 0; h < H; h++)
        y[h] = w * ((type == F32 ? ((const float *)x)[h] : widen(((const uint16_t *)x)[h])) + (float)(e * 3 + h % 5));
}

/* The sum of a row's edges inside unit u of t, or false. */
static bool unit_sum(float *y, const sum_tree *t, int u, const int32_t *id, const float *w, int top_k, const void *x,
                     dtype type)
{
    float edge[MOST_K][H], scratch[16 * H];
    const float *term[MOST_K];
    int edges = 0, inside = 0;
    for (; edges < top_k && id[edges] >= 0; edges++) {
        expert(edge[edges], id[edges], x, type, w[edges]);
        term[edges] = edge[edges];
        inside += id[edges] >= t->unit[u].first && id[edges] < t->unit[u].last;
    }
    if (inside)
        sum_tree_unit(t, u, y, id, term, edges, H, scratch);
    return inside > 0;
}

/* The experts of this rank: the unit rows that have an edge, NaN in the others. */
static void experts(const lane *l, const lane_load *in, const lane_rule *rule)
{
    const sum_tree *t = rule->tree;
    int first = t->rank_unit[l->rank], units = t->rank_unit[l->rank + 1] - first;
    assert_int_equal(in->y.rows, in->x.rows * units);
    assert_int_equal(in->x.cols, H);
    assert_int_equal(in->ids.cols, rule->top_k);
    for (int64_t i = 0; i < in->x.rows; i++) {
        const int32_t *id = (const int32_t *)in->ids.data + i * in->ids.ld;
        const float *w = (const float *)in->weights.data + i * in->weights.ld;
        const char *x = (const char *)in->x.data + (size_t)(i * in->x.ld) * dtype_bytes(in->x.type);
        int edges = 0;
        for (; edges < rule->top_k && id[edges] >= 0; edges++) {
            assert_in_range(id[edges], t->rank_first[l->rank], t->rank_first[l->rank + 1] - 1);
            assert_true(edges == 0 || id[edges] > id[edges - 1]);
        }
        assert_true(edges > 0);
        for (; edges < rule->top_k; edges++)
            assert_true(id[edges] == -1 && w[edges] == 0);
        for (int u = 0; u < units; u++) {
            float *y = (float *)in->y.data + (i * units + u) * in->y.ld;
            if (!unit_sum(y, t, first + u, id, w, rule->top_k, x, in->x.type))
                for (int h = 0; h < H; h++)
                    y[h] = NAN;
        }
    }
}

static tensor x_of(rows *r, dtype type, const int32_t *used)
{
    tensor x = type == F32 ? tensor_of(r->x, F32, MAX_ROWS, H) : tensor_of(r->half, BF16, MAX_ROWS, H);
    x.ld = type == F32 ? H + 2 : H + 3;
    x.used = used;
    return x;
}

static tensor ids_of(rows *r, int top_k)
{
    tensor t = tensor_of(r->id, I32, MAX_ROWS, top_k);
    t.ld = MOST_K + 1;
    return t;
}

static tensor weights_of(rows *r, int top_k)
{
    tensor t = tensor_of(r->w, F32, MAX_ROWS, top_k);
    t.ld = MOST_K;
    return t;
}

/* One layer: there, experts, back; y against a tree that knows no ranks. */
static void round_trip(lane *l, const lane_rule *rule, const sum_tree *alone, rows *r, bool exact)
{
    static float y[MAX_ROWS][H + 1];
    int32_t used = r->n;
    lane_load in;
    tensor x = x_of(r, rule->payload, &used), ids = ids_of(r, rule->top_k), w = weights_of(r, rule->top_k);
    tensor out = tensor_of(y, F32, used, H);
    out.ld = H + 1;
    memset(y, 0xff, sizeof y);
    assert_int_equal(l->dispatch(l, &in, &x, &ids, &w), OK);
    experts(l, &in, rule);
    assert_int_equal(l->combine(l, &out, &in), OK);
    for (int i = 0; i < r->n; i++) {
        const void *row = rule->payload == F32 ? (const void *)r->x[i] : (const void *)r->half[i];
        float want[H] = {0}, edge[H];
        unit_sum(want, alone, 0, r->id[i], r->w[i], rule->top_k, row, rule->payload);
        assert_memory_equal(y[i], want, sizeof want);
        if (!exact)
            continue;
        memset(want, 0, sizeof want);
        for (int j = 0; j < rule->top_k && r->id[i][j] >= 0; j++) {
            expert(edge, r->id[i][j], row, rule->payload, r->w[i][j]);
            for (int h = 0; h < H; h++)
                want[h] += edge[h];
        }
        for (int h = 0; h < H; h++)
            assert_true(y[i][h] == want[h]);
    }
}

/* Rows and bytes of all ranks: sent, received and merged agree with each other, with the ids, and with MPI. */
static void check_traffic(lane *l, int64_t rows_want, int64_t row_bytes)
{
    lane_traffic mine, all[RANKS_MOST], sum = {0};
    int64_t own[2] = {rows_want, bytes_sent}, each[RANKS_MOST][2], rows_all = 0, bytes_all = 0;
    assert_int_equal(l->traffic(l, &mine), OK);
    assert_int_equal(mine.rows_sent, rows_want);
    assert_int_equal(mine.rows_merged, rows_want);
    assert_int_equal(mine.bytes_dispatched % row_bytes, 0);
    assert_int_equal(mine.bytes_combined % (H * 4), 0);
    job->gather(job, all, &mine, sizeof mine);
    job->gather(job, each, own, sizeof own);
    for (int r = 0; r < job->size && job->rank == 0; r++) {
        sum.rows_sent += all[r].rows_sent;
        sum.rows_received += all[r].rows_received;
        sum.rows_merged += all[r].rows_merged;
        sum.partials_sent += all[r].partials_sent;
        sum.partials_received += all[r].partials_received;
        sum.bytes_dispatched += all[r].bytes_dispatched;
        sum.bytes_combined += all[r].bytes_combined;
        rows_all += each[r][0];
        bytes_all += each[r][1];
    }
    if (job->rank == 0) {
        assert_int_equal(sum.rows_sent, rows_all);
        assert_int_equal(sum.rows_received, rows_all);
        assert_int_equal(sum.rows_merged, rows_all);
        assert_int_equal(sum.partials_sent, sum.partials_received);
        assert_true(sum.partials_sent >= sum.rows_sent);
        assert_int_equal(sum.bytes_dispatched + sum.bytes_combined, bytes_all);
        assert_true((bytes_all == 0) == (sum.bytes_dispatched == 0));
    }
    assert_int_equal(l->traffic(l, &mine), OK);
    assert_int_equal(mine.rows_sent + mine.rows_received + mine.rows_merged + mine.bytes_dispatched, 0);
}

/* Distinct ranks of each row. */
static int64_t rows_sent(const rows *r, const sum_tree *t, int top_k)
{
    int64_t sum = 0;
    for (int i = 0; i < r->n; i++) {
        char there[RANKS_MOST] = {0};
        for (int j = 0; j < top_k && r->id[i][j] >= 0; j++)
            there[t->rank_of[r->id[i][j]]] = 1;
        for (int k = 0; k < t->ranks; k++)
            sum += there[k];
    }
    return sum;
}

/* How many rows this rank has in round k. */
static int row_count(int k)
{
    switch (k) {
    case 0:
        return 0; /* everywhere */
    case 1:
        return job->rank == 0 ? MAX_ROWS : 0;
    case 2:
        return job->rank == job->size - 1 ? 1 : MAX_ROWS;
    case 3:
        return job->rank == 0 && job->size > 1 ? 0 : 7;
    default:
        return (int)any(MAX_ROWS + 1);
    }
}

static void test_round_trips(void **state)
{
    (void)state;
    static const struct {
        int experts, n_group, top_k;
        dtype payload;
    } shape[] = {{8, 1, 2, F32},  {16, 4, 4, F32},  {32, 4, 8, F32}, {20, 10, 6, F32}, {12, 4, 3, F32},
                 {7, 1, 7, F32},  {32, 8, 8, BF16}, {4, 1, 1, BF16}, {64, 16, 5, F32}};
    static rows r;
    for (size_t k = 0; k < sizeof shape / sizeof *shape; k++) {
        int experts_count = shape[k].experts, top_k = shape[k].top_k;
        sum_tree *t, *alone;
        lane *l;
        int64_t want = 0, row_bytes = (int64_t)((H * dtype_bytes(shape[k].payload) + 3) / 4 * 4) + 8 * top_k;
        assert_int_equal(sum_tree_open(&t, experts_count, shape[k].n_group, job->size), OK);
        assert_int_equal(sum_tree_open(&alone, experts_count, shape[k].n_group, 1), OK);
        lane_rule rule = {.hidden = H, .top_k = top_k, .max_rows = MAX_ROWS, .tree = t, .payload = shape[k].payload};
        assert_int_equal(lane_mpi_open(&l, &rule, &memory, job), OK);
        assert_int_equal(l->rank, job->rank);
        assert_int_equal(l->size, job->size);
        seed = 1000u * (uint32_t)job->rank + 7 + (uint32_t)k;
        bytes_sent = 0;
        for (int round = 0; round < 12; round++) {
            bool exact = round % 2 == 1;
            int only = round == 2 ? 0 : round == 4 ? experts_count - 1 : round == 5 ? experts_count / 2 : -1;
            int32_t says[PULSE];
            fill(&r, row_count(round), experts_count, top_k, only, exact);
            want += rows_sent(&r, t, top_k);
            for (int i = 0; i < PULSE; i++)
                l->pulse[i] = 1000 * job->rank + 10 * round + i;
            alltoalls = 0;
            round_trip(l, &rule, alone, &r, exact && rule.payload == F32);
            assert_int_equal(alltoalls, 1);
            for (int p = 0; p < job->size; p++) {
                for (int i = 0; i < PULSE; i++)
                    says[i] = 1000 * p + 10 * round + i;
                assert_memory_equal(l->pulses + p * PULSE, says, sizeof says);
            }
            if (round == 0)
                assert_int_equal(bytes_sent, 0);
        }
        check_traffic(l, want, row_bytes);
        l->close(l);
        sum_tree_close(t);
        sum_tree_close(alone);
    }
    assert_int_equal(slabs, 0);
}

/* ---- what goes wrong */

enum { FAULT_E = 16, FAULT_K = 2, FAULT_ROWS = 4 };

/* Rank 1 errs towards rank 0: opens a lane, sends `n` rows from there to the first and the last expert, and tells what
 * dispatch or combine made of it. */
static status provoke(int n, bool back)
{
    static rows r;
    static float y[MAX_ROWS][H];
    sum_tree *t;
    lane *l;
    lane_load in;
    status st = OK;
    int32_t used = job->rank == (back ? 0 : 1) ? n : 0;
    assert_int_equal(sum_tree_open(&t, FAULT_E, 1, job->size), OK);
    lane_rule rule = {.hidden = H, .top_k = FAULT_K, .max_rows = FAULT_ROWS, .tree = t, .payload = F32};
    assert_int_equal(lane_mpi_open(&l, &rule, &memory, job), OK);
    for (int i = 0; i < n; i++) {
        r.id[i][0] = back ? t->rank_first[1] : 0;
        r.id[i][1] = -1;
        r.w[i][0] = 1;
    }
    tensor x = x_of(&r, F32, &used), ids = ids_of(&r, FAULT_K), w = weights_of(&r, FAULT_K);
    tensor out = tensor_of(y, F32, used, H);
    if (back) { /* only the way back goes wrong */
        int more = fault.rows;
        fault.rows = 0;
        TRY(l->dispatch(l, &in, &x, &ids, &w));
        fault.rows = more;
        TRY(l->combine(l, &out, &in));
    } else {
        TRY(l->dispatch(l, &in, &x, &ids, &w));
    }
out:
    faults_off();
    l->close(l);
    sum_tree_close(t);
    return st;
}

/* Every rank learns of it, rank 0 says what it was. */
static void expect(status mine, const char *message)
{
    char want[200];
    assert_int_equal(mine, job->rank == 0 ? FAILED : OK);
    if (job->rank == 0)
        assert_non_null(strstr(status_message(), message));
    assert_int_equal(job->agree(job, mine), FAILED);
    snprintf(want, sizeof want, "rank 0/%d: %s", job->size, message);
    if (job->rank == 0)
        assert_non_null(strstr(status_message(), want));
}

static void err_to_rank_0(void)
{
    faults_off();
    fault.rank = 1;
    fault.to = 0;
}

static void test_faults_between_ranks(void **state)
{
    (void)state;
    if (job->size == 1) {
        printf("skipped: takes two ranks\n");
        skip();
    }
    err_to_rank_0();
    fault.rows = -1;
    expect(provoke(3, false), "lane received 2 rows from rank 1, counts said 3 [mpi/lane_mpi.c:");
    err_to_rank_0();
    fault.rows = 1;
    expect(provoke(3, false), "lane received more rows from rank 1 than the 3 that counts said");
    err_to_rank_0();
    fault.say_partials = 2;
    expect(provoke(3, false), "the rows of rank 1 make 3 partial sums, counts said 5");
    err_to_rank_0();
    fault.say_rows = FAULT_ROWS + 1;
    expect(provoke(0, false), "rank 1 sends 5 rows, the lane was opened for 4");
    err_to_rank_0();
    fault.id = FAULT_E - 1;
    char want[100];
    sum_tree *t;
    assert_int_equal(sum_tree_open(&t, FAULT_E, 1, job->size), OK);
    snprintf(want, sizeof want, "lane received a row for expert 15 from rank 1, this rank has 0 to %d",
             t->rank_first[1] - 1);
    sum_tree_close(t);
    expect(provoke(2, false), want);
    err_to_rank_0();
    fault.rows = -1;
    expect(provoke(4, true), "lane received 3 partial sums from rank 1, counts said 4");
    err_to_rank_0();
    assert_int_equal(provoke(4, true), OK); /* and without a fault: */
}

static void test_faults_alone(void **state)
{
    (void)state;
    static rows r;
    static float y[MAX_ROWS][H];
    sum_tree *t;
    lane *l;
    lane_load in;
    int32_t used = 3;
    assert_int_equal(sum_tree_open(&t, FAULT_E, 1, job->size), OK);
    lane_rule rule = {.hidden = H, .top_k = FAULT_K, .max_rows = FAULT_ROWS, .tree = t, .payload = F32};
    memory_left = 0;
    assert_int_equal(lane_mpi_open(&l, &rule, &memory, job), FAILED);
    assert_non_null(strstr(status_message(), "no memory for "));
    assert_null(l);
    memory_left = 1;
    assert_int_equal(lane_mpi_open(&l, &rule, &memory, job), OK);
    fill(&r, used, FAULT_E, FAULT_K, 5, false);
    for (int i = 0; i < used; i++)
        r.id[i][0] = 5;
    tensor x = x_of(&r, F32, &used), ids = ids_of(&r, FAULT_K), w = weights_of(&r, FAULT_K);
    tensor out = tensor_of(y, F32, used, H);

    fault.alltoall = MPI_ERR_COMM;
    used = 0;
    assert_int_equal(l->dispatch(l, &in, &x, &ids, &w), FAILED);
    assert_non_null(strstr(status_message(), "MPI_Alltoall: MPI_ERR_COMM: invalid communicator"));
    faults_off();
    if (job->size > 1) { /* one rank sends nothing */
        used = 3;
        for (int i = 0; i < used; i++)
            r.id[i][0] = job->rank == 0 ? FAULT_E - 1 : 0;
        fault.isend = MPI_ERR_TAG;
        assert_int_equal(l->dispatch(l, &in, &x, &ids, &w), FAILED);
        assert_non_null(strstr(status_message(), "MPI_Isend: MPI_ERR_TAG: invalid tag"));
        faults_off();
        fault.wait = MPI_ERR_INTERN;
        assert_int_equal(l->dispatch(l, &in, &x, &ids, &w), FAILED);
        assert_non_null(strstr(status_message(), "MPI_Wait: MPI_ERR_INTERN"));
        faults_off();
    }

    used = FAULT_ROWS + 1;
    assert_int_equal(l->dispatch(l, &in, &x, &ids, &w), FAILED);
    assert_non_null(strstr(status_message(), "dispatch of 5 rows, the lane was opened for 4"));

    used = 3;
    assert_int_equal(l->dispatch(l, &in, &x, &ids, &w), OK);
    r.id[1][0] = -1;
    assert_int_equal(l->combine(l, &out, &in), FAILED);
    assert_non_null(strstr(status_message(), "lane merged 2 rows, dispatched 3: the expert ids changed before"));
    l->close(NULL);
    l->close(l);
    sum_tree_close(t);
    assert_int_equal(slabs, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trips),
        cmocka_unit_test(test_faults_between_ranks),
        cmocka_unit_test(test_faults_alone),
    };
    ranks_open(&argc, &argv);
    faults_off();
    return ranks_run(tests);
}
