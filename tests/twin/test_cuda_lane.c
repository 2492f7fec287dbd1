/* The lane between GPUs with all its ranks on one: a thread a rank, and in place of NCCL's calls copies on that GPU.
 * What must hold to the bit: a row's sum is what one rank makes of it, for any number of ranks and any deal of rows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "mpi/comm_nccl.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NO_GPU = 77 /* CTest: skipped */, RANKS = 8, MAX_ROWS = 300, ROUNDS = 8, POSTS = 2 * RANKS };

/* ---- what stands for NCCL */

typedef struct post {
    void *data;
    size_t bytes;
    int peer;
    bool send;
} post;

struct nccl_comm {
    int rank, count, groups;
    cudaStream_t stream;
    post posted[POSTS];
};

static struct nccl_comm comm[RANKS];
static pthread_barrier_t meet;
static _Thread_local struct nccl_comm *mine;
enum { ROWS_GROUP = 2 }; /* of a lane's first dispatch */
static size_t spoil_at;  /* byte of the first rows that come to rank 1, where an id becomes 0; 0: none */

ncclResult_t ncclGroupStart(void); /* nccl.h leaves the void out */
ncclResult_t ncclGroupEnd(void);

ncclComm_t nccl_handle(const nccl_comm *n)
{
    return (ncclComm_t)(uintptr_t)n;
}

status nccl_check(nccl_comm *n, ncclResult_t r, const char *what, const char *file, int line)
{
    (void)n;
    return r == ncclSuccess ? OK : status_fail(FAILED, file, line, "%s: %d", what, (int)r);
}

status nccl_wait(nccl_comm *n, cudaEvent_t event)
{
    (void)n;
    return cuda_check(cudaEventSynchronize(event), "the forward", __FILE__, __LINE__);
}

static ncclResult_t put(void *data, size_t bytes, int peer, bool send, cudaStream_t s)
{
    mine->stream = s;
    mine->posted[mine->count++] = (post){data, bytes, peer, send};
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void)
{
    mine->count = 0;
    return ncclSuccess;
}

ncclResult_t ncclSend(const void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s)
{
    (void)type;
    (void)c;
    return put((void *)(uintptr_t)data, count, peer, true, s);
}

ncclResult_t ncclRecv(void *data, size_t count, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t s)
{
    (void)type;
    (void)c;
    return put(data, count, peer, false, s);
}

/* Every receive takes the one send that its peer posted to this rank, of the same size. */
ncclResult_t ncclGroupEnd(void)
{
    ncclResult_t r = ncclSuccess;
    mine->groups++;
    cudaError_t e = mine->stream ? cudaStreamSynchronize(mine->stream) : cudaSuccess;
    pthread_barrier_wait(&meet);
    for (int i = 0; i < mine->count; i++) {
        const post *p = &mine->posted[i], *other = NULL;
        for (int k = 0; k < comm[p->peer].count; k++) {
            const post *q = &comm[p->peer].posted[k];
            if (q->peer == mine->rank && q->send != p->send)
                other = q;
        }
        if (!other || other->bytes != p->bytes)
            r = ncclInvalidArgument;
        else if (!p->send && e == cudaSuccess)
            e = cudaMemcpyAsync(p->data, other->data, p->bytes, cudaMemcpyDeviceToDevice, mine->stream);
        if (!p->send && spoil_at && mine->groups == ROWS_GROUP && mine->rank == 1 && e == cudaSuccess)
            e = cudaMemsetAsync((char *)p->data + spoil_at, 0, sizeof(int32_t), mine->stream);
    }
    if (e == cudaSuccess && mine->stream)
        e = cudaStreamSynchronize(mine->stream);
    pthread_barrier_wait(&meet);
    mine->count = 0;
    return e != cudaSuccess ? ncclUnhandledCudaError : r;
}

/* ---- one rank */

typedef struct shape {
    int experts, groups, top_k, hidden, inner;
} shape;

static const shape shapes[] = {
    {16, 4, 4, 64, 32}, {21, 7, 3, 50, 37}, {256, 8, 8, 128, 64}, {40, 20, 6, 72, 64}, {64, 1, 8, 256, 64}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

typedef struct party {
    int rank, size;
    dtype combine;
    bool spoil;
    status st;
    char message[300];
} party;

/* Rows of a rank in a round. */
static int32_t row_count(int rank, int round)
{
    switch (round) {
    case 0:
        return 70 + 13 * rank;
    case 1:
        return rank == 0 ? MAX_ROWS : 0;
    case 2:
        return 0;
    case 3:
        return 1;
    case 4:
        return rank % 2 ? 33 : 0;
    default:
        return rand() % (MAX_ROWS + 1);
    }
}

/* Ascending ids, -1 behind the last; round 3: none; 5: all tokens on one expert; 6: any number, none among them. */
static void draw(int32_t *id, float *w, const shape *s, int round)
{
    int want = round == 3 ? 0 : round == 5 ? 1 : round == 6 ? rand() % (s->top_k + 1) : s->top_k, n = 0;
    for (int e = round == 5 ? s->experts / 2 : 0; e < s->experts && n < want; e++)
        if (round == 5 || rand() % (s->experts - e) < want - n)
            id[n++] = e;
    for (int j = 0; j < s->top_k; j++) {
        w[j] = j < n ? .1f + (float)(rand() % 1000) / 1000 : 0;
        if (j >= n)
            id[j] = -1;
    }
}

static status take(backend *b, tensor *t, dtype type, int64_t rows, int64_t cols)
{
    *t = tensor_of(NULL, type, rows, cols);
    return b->reserve(b, &t->data, (size_t)(rows * cols) * dtype_bytes(type));
}

static expert_set shard(const tensor *gate_up, const tensor *down, const sum_tree *t, const shape *s, int rank)
{
    int first = t->rank_first[rank], count = t->rank_first[rank + 1] - first;
    return (expert_set){.gate_up = tensor_rows(gate_up, first * 2 * s->inner, count * 2 * s->inner),
                        .down = tensor_rows(down, (int64_t)first * s->hidden, (int64_t)count * s->hidden),
                        .first = first,
                        .count = count,
                        .inner = s->inner,
                        .tree = t,
                        .rank = rank};
}

/* The sums of one round by `l`, brought to `to`. */
static status round_trip(backend *b, lane *l, const expert_set *e, const tensor *x, const tensor *ids,
                         const tensor *weights, tensor y, float *to)
{
    status st = OK;
    lane_load in;
    TRY(l->dispatch(l, &in, x, ids, weights));
    TRY(b->experts(b, &in.y, &in.x, &in.ids, &in.weights, e));
    TRY(l->combine(l, &y, &in));
    TRY(b->download(b, to, &y));
out:
    return st;
}

static status compare(const float *have, const float *want, int32_t rows, const shape *s, const party *p, int round)
{
    status st = OK;
    for (int64_t i = 0; i < rows; i++) {
        const float *a = have + i * s->hidden, *c = want + i * s->hidden;
        double off = 0, all = 0;
        for (int k = 0; k < s->hidden; k++) {
            off += ((double)a[k] - (double)c[k]) * ((double)a[k] - (double)c[k]);
            all += (double)c[k] * (double)c[k];
        }
        if (p->combine == BF16 ? !(off <= 0x1p-14 * all) : memcmp(a, c, sizeof *a * (size_t)s->hidden) != 0)
            FAIL(FAILED, "%d experts, hidden %d, round %d: row %lld of rank %d/%d is off by %g of its length",
                 s->experts, s->hidden, round, (long long)i, p->rank, p->size, sqrt(off / (all > 0 ? all : 1)));
    }
out:
    return st;
}

static status run_shape(backend *b, const party *p, const shape *s)
{
    status st = OK;
    world w = {.rank = p->rank, .size = p->size};
    sum_tree *t = NULL, *alone = NULL;
    lane *l = NULL, *self = NULL;
    lane_traffic traffic;
    tensor gate_up = {0}, down = {0}, x = {0}, ids = {0}, weights = {0}, y = {0}, count = {0};
    int32_t id[MAX_ROWS * 8], rows;
    float factor[MAX_ROWS * 8], *have = calloc(MAX_ROWS * (size_t)s->hidden, sizeof *have),
                                *want = calloc(MAX_ROWS * (size_t)s->hidden, sizeof *want);
    int64_t edges = 0;
    TRY(sum_tree_open(&t, s->experts, s->groups, p->size));
    TRY(sum_tree_open(&alone, s->experts, s->groups, 1));
    lane_rule r = {.hidden = s->hidden,
                   .top_k = s->top_k,
                   .max_rows = MAX_ROWS,
                   .tree = t,
                   .payload = BF16,
                   .combine = p->combine},
              one = r;
    one.tree = alone;
    TRY(lane_nccl_open(&l, &r, b, &w, mine));
    TRY(lane_self_cuda_open(&self, &one, b));
    TRY(take(b, &gate_up, BF16, (int64_t)s->experts * 2 * s->inner, s->hidden));
    TRY(take(b, &down, BF16, (int64_t)s->experts * s->hidden, s->inner));
    TRY(take(b, &x, BF16, MAX_ROWS, s->hidden));
    TRY(take(b, &ids, I32, MAX_ROWS, s->top_k));
    TRY(take(b, &weights, F32, MAX_ROWS, s->top_k));
    TRY(take(b, &y, F32, MAX_ROWS, s->hidden));
    TRY(take(b, &count, I32, 1, 1));
    TRY(b->random(b, &gate_up, 11, .3f));
    TRY(b->random(b, &down, 12, .3f));
    expert_set every = shard(&gate_up, &down, alone, s, 0), part = shard(&gate_up, &down, t, s, p->rank);
    x.used = ids.used = weights.used = count.data;
    for (int round = 0; round < (p->spoil ? 1 : ROUNDS); round++) {
        srand(1000u * (unsigned)round + 7u * (unsigned)p->rank);
        rows = row_count(p->rank, round);
        for (int32_t i = 0; i < rows; i++) {
            draw(id + i * s->top_k, factor + i * s->top_k, s, round);
            int rank = -1;
            for (int j = 0; j < s->top_k && id[i * s->top_k + j] >= 0; j++) {
                edges += t->rank_of[id[i * s->top_k + j]] != rank;
                rank = t->rank_of[id[i * s->top_k + j]];
            }
        }
        tensor some_ids = tensor_rows(&ids, 0, rows), some_weights = tensor_rows(&weights, 0, rows);
        TRY(b->random(b, &x, 100 + (uint64_t)(round * RANKS + p->rank), 1));
        TRY(b->upload(b, &some_ids, id, I32));
        TRY(b->upload(b, &some_weights, factor, F32));
        TRY(b->upload(b, &count, &rows, I32));
        for (int i = 0; i < PULSE; i++)
            l->pulse[i] = 1000 * p->rank + 10 * round + i;
        TRY(round_trip(b, l, &part, &x, &ids, &weights, y, have));
        TRY(round_trip(b, self, &every, &x, &ids, &weights, y, want));
        if (!p->spoil)
            TRY(compare(have, want, rows, s, p, round));
        for (int q = 0; q < p->size; q++)
            for (int i = 0; i < PULSE; i++)
                if (l->pulses[q * PULSE + i] != 1000 * q + 10 * round + i)
                    FAIL(FAILED, "round %d: rank %d hears pulse %d of rank %d as %d", round, p->rank, i, q,
                         l->pulses[q * PULSE + i]);
    }
    TRY(l->traffic(l, &traffic));
    if (traffic.rows_sent != edges || traffic.rows_merged != edges)
        FAIL(FAILED, "rank %d sent %lld rows and merged %lld, want %lld", p->rank, (long long)traffic.rows_sent,
             (long long)traffic.rows_merged, (long long)edges);
out:
    free(have);
    free(want);
    if (l)
        l->close(l);
    if (self)
        self->close(self);
    tensor *const all[] = {&gate_up, &down, &x, &ids, &weights, &y, &count};
    for (int i = 0; i < 7; i++)
        if (all[i]->data)
            b->release(b, all[i]->data);
    sum_tree_close(t);
    sum_tree_close(alone);
    return st;
}

static void *attend(void *self)
{
    party *p = self;
    backend *b = NULL;
    mine = &comm[p->rank];
    *mine = (struct nccl_comm){.rank = p->rank};
    p->st = backend_cuda_open(&b, 0);
    if (p->st == OK && p->spoil)
        p->st = run_shape(b, p, &shapes[0]);
    for (int i = 0; i < SHAPES && p->st == OK && !p->spoil; i++)
        if (shapes[i].experts >= p->size)
            p->st = run_shape(b, p, &shapes[i]);
    snprintf(p->message, sizeof p->message, "%s", p->st == OK ? "" : status_message());
    if (p->st != OK && !p->spoil) { /* the others wait for this one */
        printf("%s\n", p->message);
        fflush(stdout);
        _Exit(1);
    }
    if (b)
        b->close(b);
    return NULL;
}

static void run(party *p, int size, dtype combine, bool spoil)
{
    pthread_t thread[RANKS];
    pthread_barrier_init(&meet, NULL, (unsigned)size);
    for (int r = 0; r < size; r++) {
        p[r] = (party){.rank = r, .size = size, .combine = combine, .spoil = spoil};
        assert_int_equal(pthread_create(&thread[r], NULL, attend, &p[r]), 0);
    }
    for (int r = 0; r < size; r++)
        pthread_join(thread[r], NULL);
    pthread_barrier_destroy(&meet);
}

static void test_same_sums(void **state)
{
    (void)state;
    static const int sizes[] = {1, 2, 3, 4, 8};
    party p[RANKS];
    for (int i = 0; i < 5; i++)
        run(p, sizes[i], F32, false);
}

static void test_half_sums(void **state)
{
    (void)state;
    party p[RANKS];
    run(p, 2, BF16, false);
    run(p, 3, BF16, false);
}

static void test_astray(void **state)
{
    (void)state;
    party p[RANKS];
    spoil_at = (size_t)shapes[0].hidden * sizeof(uint16_t);
    run(p, 2, F32, true);
    spoil_at = 0;
    assert_int_equal(p[0].st, OK);
    assert_int_equal(p[1].st, FAILED);
    assert_non_null(strstr(p[1].message, "lane received a row for expert 0 from rank 0, this rank has 8 to 15"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_same_sums), cmocka_unit_test(test_half_sums),
                                       cmocka_unit_test(test_astray)};
    if (backend_cuda_devices() == 0) {
        printf("skipped: no GPU\n");
        return NO_GPU;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
