#include "mpi/lane_lsa.h"

#include "mpi/comm_nccl.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

enum { PUSH_BLOCKS = 32, FOLD_BLOCKS_AN_SM = 3, WHY = 256 };

typedef struct lane_lsa {
    lane_rule rule;
    backend *b;
    lsa m;
    sums_away away;
    int fold_blocks;
    double patience;
    tensor ids; /* of the newest dispatch */
    void *slab; /* what m points at on this GPU */
    /* where NCCL made the window */
    nccl_comm *n;
    ncclWindow_t window;
    void *memory;
} lane_lsa;

/* lsa_window.cu */
cudaError_t lsa_window_peers(cudaStream_t stream, ncclWindow_t window, int size, char **out);
int lsa_window_team(ncclComm_t comm);

/* ---- places */

static size_t take(size_t *at, size_t bytes)
{
    size_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

static size_t lay_window(lsa *m, const lane_rule *rule, int push_blocks)
{
    size_t at = 0, size = (size_t)rule->tree->ranks, rows = size * (size_t)rule->max_rows, h = (size_t)rule->hidden;
    size_t k = (size_t)rule->top_k;
    m->words = take(&at, size * (1 + PULSE) * sizeof(uint64_t));
    m->arrived = take(&at, LSA_KINDS * size * (size_t)push_blocks * sizeof(uint64_t));
    m->ready = take(&at, size * sizeof(uint64_t));
    m->x = take(&at, rows * h * dtype_bytes(BF16));
    m->ids = take(&at, rows * k * sizeof(int32_t));
    m->weights = take(&at, rows * k * sizeof(float));
    m->pitch = (size_t)rule->max_rows * (size_t)sum_tree_most_units(rule->tree) * h * sizeof(float);
    m->sums = take(&at, size * m->pitch);
    return at;
}

size_t lsa_window_bytes(const lane_rule *rule)
{
    lsa m;
    return lay_window(&m, rule, LSA_PUSH_MOST);
}

/* What m and away point at in this GPU's own memory, from `slab`; the bytes it takes. */
static size_t lay_slab(lsa *m, sums_away *away, const lane_rule *rule, char *slab)
{
    size_t at = 0, size = (size_t)rule->tree->ranks;
    size_t home = take(&at, (size_t)rule->tree->experts * sizeof(lsa_home));
    size_t used = take(&at, 2 * sizeof(int32_t));
    size_t to = take(&at, size * sizeof(char *));
    size_t epoch = take(&at, sizeof(uint32_t)), turn = take(&at, sizeof(int32_t));
    size_t said = take(&at, PULSE * sizeof(int32_t)), heard = take(&at, size * PULSE * sizeof(int32_t));
    size_t count = take(&at, LSA_COUNTERS * sizeof(int64_t)), broken = take(&at, sizeof(int32_t));
    if (slab) {
        m->home = (const lsa_home *)(void *)(slab + home);
        m->used = (int32_t *)(void *)(slab + used);
        away->to = (void *const *)(void *)(slab + to);
        m->epoch = (uint32_t *)(void *)(slab + epoch);
        m->turn = (int32_t *)(void *)(slab + turn);
        m->said = (int32_t *)(void *)(slab + said);
        m->heard = (int32_t *)(void *)(slab + heard);
        m->count = (int64_t *)(void *)(slab + count);
        m->broken = (int32_t *)(void *)(slab + broken);
    }
    return at;
}

/* Levels of the tree at which sums of different units meet in shards [lo, hi). */
static int levels_of(const sum_tree *t, int lo, int hi)
{
    if (hi - lo <= 1)
        return 0;
    for (int u = 0; u < t->unit_count; u++)
        if (t->unit[u].shard_lo <= lo && t->unit[u].shard_hi >= hi)
            return 0;
    int mid = lo + (hi - lo) / 2, left = levels_of(t, lo, mid), right = levels_of(t, mid, hi);
    return 1 + (left > right ? left : right);
}

static status upload_tables(lane_lsa *s)
{
    status st = OK;
    lsa *m = &s->m;
    char *piece[LSA_RANKS];
    tensor pieces = tensor_of((void *)(uintptr_t)s->away.to, U8, 1, m->size * (int64_t)sizeof *piece);
    const sum_tree *t = s->rule.tree;
    lsa_home *home = calloc((size_t)t->experts, sizeof *home);
    tensor to = tensor_of((void *)(uintptr_t)s->m.home, I32, t->experts, sizeof *home / sizeof(int32_t));
    if (!home)
        FAIL(FAILED, "out of memory");
    for (int e = 0; e < t->experts; e++) {
        int rank = t->rank_of[e], unit = t->unit_of[e];
        home[e] = (lsa_home){.rank = rank,
                             .unit = unit - t->rank_unit[rank],
                             .units = t->rank_unit[rank + 1] - t->rank_unit[rank],
                             .shard = t->unit[unit].shard_lo};
    }
    for (int r = 0; r < m->size; r++) /* rank r has a place for what comes from here */
        piece[r] = m->window[r] + m->sums + (size_t)m->rank * m->pitch;
    TRY(s->b->upload(s->b, &to, home, I32));
    TRY(s->b->upload(s->b, &pieces, piece, U8));
    TRY(s->b->sync(s->b));
out:
    free(home);
    return st;
}

/* ---- the lane */

static status dispatch(lane *l, lane_load *in, const tensor *x, const tensor *ids, const tensor *weights)
{
    status st = OK;
    lane_lsa *s = l->self;
    const lsa *m = &s->m;
    int64_t rows = (int64_t)m->size * m->max_rows;
    char *mine = m->window[m->rank];
    assert(x->type == BF16 && x->cols == m->hidden && x->ld % 8 == 0 && (uintptr_t)x->data % 16 == 0);
    assert(ids->cols == m->top_k && weights->cols == m->top_k && x->rows == ids->rows && x->used == ids->used);
    if (x->rows > m->max_rows)
        FAIL(FAILED, "dispatch of up to %lld rows, the lane was opened for %d", (long long)x->rows, (int)m->max_rows);
    s->ids = *ids;
    TRY(lsa_launch_dispatch(cuda_of(s->b), m, x, ids, weights));
    in->x = tensor_of(mine + m->x, BF16, rows, m->hidden);
    in->ids = tensor_of(mine + m->ids, I32, rows, m->top_k);
    in->weights = tensor_of(mine + m->weights, F32, rows, m->top_k);
    in->y = tensor_of(mine + m->sums, F32, rows * m->units, m->hidden);
    in->x.used = in->ids.used = in->weights.used = m->used;
    in->y.used = m->used + 1;
    in->away = &s->away;
out:
    return st;
}

static status combine(lane *l, tensor *y, const lane_load *out)
{
    lane_lsa *s = l->self;
    (void)out; /* what dispatch handed out, so all of it is known here */
    assert(y->type == F32 && y->cols == s->m.hidden && y->ld % 4 == 0 && (uintptr_t)y->data % 16 == 0);
    return lsa_launch_combine(cuda_of(s->b), &s->m, y, &s->ids, s->fold_blocks);
}

static status check(lane *l)
{
    status st = OK;
    lane_lsa *s = l->self;
    const lsa_fault *f = s->m.fault;
    static const char *const waited[] = {
        [LSA_NO_ROWS] = "rows", [LSA_NO_SUMS] = "partial sums"};
    switch (*(const volatile int32_t *)&f->what) {
    case LSA_FINE:
        break;
    case LSA_MANY_ROWS:
        FAIL(FAILED, "rank %d sends %d rows in dispatch %u, the lane was opened for %d", f->rank, f->found, f->epoch,
             f->wanted);
    case LSA_OTHER_ROWS:
        FAIL(FAILED, "lane received %d rows from rank %d in dispatch %u, which says that it has %d", f->found, f->rank,
             f->epoch, f->wanted);
    default:
        FAIL(FAILED, "the GPU waited %g s for the %s of rank %d in dispatch %u", s->patience, waited[f->what], f->rank,
             f->epoch);
    }
out:
    return st;
}

static status traffic(lane *l, lane_traffic *t)
{
    status st = OK;
    lane_lsa *s = l->self;
    cuda *c = cuda_of(s->b);
    int64_t n[LSA_COUNTERS], h = s->m.hidden;
    *t = (lane_traffic){0};
    CUDA_TRY(cudaMemcpyAsync(n, s->m.count, sizeof n, cudaMemcpyDeviceToHost, c->stream));
    CUDA_TRY(cudaMemsetAsync(s->m.count, 0, sizeof n, c->stream));
    CUDA_TRY(cudaStreamSynchronize(c->stream));
    TRY(check(l));
    t->rows_sent = n[LSA_SENT];
    t->rows_received = n[LSA_RECEIVED];
    t->rows_merged = n[LSA_MERGED];
    t->partials_sent = n[LSA_SUMS_SENT];
    t->partials_received = n[LSA_SUMS_RECEIVED];
    t->bytes_dispatched = n[LSA_ROWS_OUT] * h * (int64_t)dtype_bytes(BF16) + n[LSA_IDS_OUT] * 8 * s->m.top_k;
    t->bytes_combined = n[LSA_SUMS_OUT] * h * (int64_t)dtype_bytes(s->rule.combine);
    if (t->rows_merged != t->rows_sent)
        FAIL(FAILED, "lane merged %lld rows, dispatched %lld: the expert ids changed before combine",
             (long long)t->rows_merged, (long long)t->rows_sent);
out:
    return st;
}

/* The window that NCCL made, and its memory. An abort has ended the window. */
static void give_back(const lane_lsa *s)
{
    if (s->window && nccl_handle(s->n))
        ncclCommWindowDeregister(nccl_handle(s->n), s->window);
    if (s->memory)
        ncclMemFree(s->memory);
}

static void close_lane(lane *l)
{
    if (!l)
        return;
    lane_lsa *s = l->self;
    s->b->release(s->b, s->slab); /* the stream is through */
    give_back(s);
    cudaFreeHost(s->m.fault);
    free(s);
    free(l);
}

/* What is against the lane, the same on every rank; "": nothing. */
static void judge_rule(char why[WHY], const lane_rule *rule)
{
    why[0] = '\0';
    if (rule->tree->ranks > LSA_RANKS)
        snprintf(why, WHY, "%d ranks, at most %d", rule->tree->ranks, LSA_RANKS);
    else if (rule->hidden % 8 || rule->top_k > 32 || rule->payload != BF16)
        snprintf(why, WHY, "the hidden size is %d and top_k %d, want a multiple of 8 and at most 32", rule->hidden,
                 rule->top_k);
}

static status refuse(const char *why)
{
    return status_fail(BAD_INPUT, __FILE__, __LINE__, "--transport lsa: %s: take --transport nccl", why);
}

status lsa_open(lane **out, const lane_rule *rule, backend *b, int rank, char *const *window, const lsa_blocks *blocks,
                double patience)
{
    status st = OK;
    const sum_tree *t = rule->tree;
    lane_lsa *s = calloc(1, sizeof *s);
    lane *l = calloc(1, sizeof *l);
    char why[WHY];
    *out = NULL;
    if (!s || !l)
        FAIL(FAILED, "out of memory");
    s->rule = *rule;
    s->b = b;
    s->patience = patience;
    judge_rule(why, rule);
    if (why[0])
        TRY(refuse(why));
    lsa *m = &s->m;
    lay_window(m, rule, blocks ? blocks->push : PUSH_BLOCKS);
    m->push_blocks = blocks ? blocks->push : PUSH_BLOCKS;
    s->fold_blocks = blocks ? blocks->fold : FOLD_BLOCKS_AN_SM * cuda_of(b)->sm_count;
    m->rank = rank;
    m->size = t->ranks;
    m->hidden = rule->hidden;
    m->experts = t->experts;
    m->top_k = rule->top_k;
    m->units = t->rank_unit[rank + 1] - t->rank_unit[rank];
    m->shards = t->shards;
    m->max_rows = (int32_t)rule->max_rows;
    m->kinds = sum_tree_most_units(t) > 1 ? LSA_KINDS : 1;
    m->levels = levels_of(t, 0, t->shards);
    m->half = rule->combine == BF16;
    m->patience = (uint64_t)(patience * 1e9);
    for (int r = 0; r < m->size; r++)
        m->window[r] = window[r];
    s->away = (sums_away){.pieces = m->size, .whole = rank, .half = m->half};
    TRY(b->reserve(b, &s->slab, lay_slab(m, NULL, rule, NULL)));
    lay_slab(m, &s->away, rule, s->slab);
    TRY(upload_tables(s));
    CUDA_TRY(cudaHostAlloc((void **)&m->fault, sizeof *m->fault, cudaHostAllocMapped));
    *m->fault = (lsa_fault){.what = LSA_FINE};
    *l = (lane){.name = "lsa", .rank = rank, .size = m->size, .replays = true, .holds = m->push_blocks, .self = s,
                .dispatch = dispatch, .combine = combine, .check = check, .traffic = traffic, .close = close_lane};
    l->said = tensor_of(m->said, I32, 1, PULSE);
    l->heard = tensor_of(m->heard, I32, m->size, PULSE);
    *out = l;
    l = NULL;
    s = NULL;
out:
    if (s) {
        b->release(b, s->slab);
        cudaFreeHost(s->m.fault);
        free(s);
    }
    free(l);
    return st;
}

/* ---- windows of NCCL */

/* This rank's memory; what follows is for all ranks at once. mend: behind the message. */
static status take_memory(lane_lsa *s, size_t bytes, const char *mend)
{
    status st = OK;
    cuda *c = cuda_of(s->b);
    ncclResult_t r = ncclMemAlloc(&s->memory, bytes);
    if (r != ncclSuccess)
        FAIL(FAILED, "out of GPU memory: %zu bytes wanted for a window (%s)%s", bytes, ncclGetErrorString(r), mend);
    CUDA_TRY(cudaMemsetAsync(s->memory, 0, bytes, c->stream));
    CUDA_TRY(cudaStreamSynchronize(c->stream));
out:
    return st;
}

/* All ranks at once. why: what is against the lane; "": nothing. */
static status register_window(char why[WHY], lane_lsa *s, size_t bytes, const world *w)
{
    status st = OK;
    why[0] = '\0';
    ncclComm_t comm = nccl_handle(s->n);
    ncclResult_t r = ncclCommWindowRegister(comm, s->memory, bytes, &s->window, NCCL_WIN_COLL_SYMMETRIC);
    struct cudaPointerAttributes at = {0};
    if (r == ncclSuccess && s->window)
        CUDA_TRY(cudaPointerGetAttributes(&at, s->window));
    if (at.type != cudaMemoryTypeDevice) /* without symmetric memory it is a handle of the host's */
        snprintf(why, WHY, "NCCL makes no window here (%s%sNCCL_CUMEM_ENABLE=0, NCCL_WIN_ENABLE=0 and "
                 "NCCL_P2P_DISABLE=1 forbid it)", r == ncclSuccess ? "" : ncclGetErrorString(r),
                 r == ncclSuccess ? "" : "; ");
    else if (lsa_window_team(comm) != w->size)
        snprintf(why, WHY, "a GPU reaches the memory of %d of %d ranks, want all (one host, or one NVLink domain)",
                 lsa_window_team(comm), w->size);
out:
    return st;
}

status lsa_join(lane **out, const lane_rule *rule, backend *b, world *w, nccl_comm *n, const lsa_blocks *blocks,
                double patience)
{
    status st = OK;
    lane_lsa s = {.b = b, .n = n};
    cuda *c = cuda_of(b);
    char **window = NULL, why[WHY]; /* window: pinned */
    size_t bytes = lsa_window_bytes(rule);
    *out = NULL;
    st = take_memory(&s, bytes, ": lower --batch");
    if (st == OK)
        st = cuda_check(cudaHostAlloc((void **)&window, (size_t)w->size * sizeof *window, cudaHostAllocMapped),
                        "cudaHostAlloc", __FILE__, __LINE__);
    TRY(w->agree(w, st)); /* what follows takes all ranks */
    window[0] = s.memory;
    if (w->size > 1) { /* NCCL makes none for a GPU that is alone */
        st = register_window(why, &s, bytes, w);
        TRY(w->agree(w, st == OK && why[0] ? refuse(why) : st));
        CUDA_TRY(lsa_window_peers(c->stream, s.window, w->size, window));
        CUDA_TRY(cudaStreamSynchronize(c->stream));
    }
    TRY(lsa_open(out, rule, b, w->rank, window, blocks, patience));
    lane_lsa *made = (*out)->self;
    made->n = n;
    made->window = s.window;
    made->memory = s.memory;
    s.window = NULL;
    s.memory = NULL;
out:
    cudaFreeHost(window);
    give_back(&s);
    return st;
}

status lane_lsa_open(lane **out, const lane_rule *rule, backend *b, world *w, nccl_comm *n)
{
    return lsa_join(out, rule, b, w, n, NULL, rule->patience);
}

static status bare(const char *why)
{
    if (why[0])
        status_message_set(why);
    return why[0] ? BAD_INPUT : OK;
}

status lane_lsa_try(const lane_rule *rule, backend *b, world *w, nccl_comm *n)
{
    status st = OK;
    lane_lsa s = {.b = b, .n = n};
    const size_t bytes = 1 << 16;
    char why[WHY];
    judge_rule(why, rule);
    TRY(bare(why));
    TRY(w->agree(w, take_memory(&s, bytes, "")));
    st = register_window(why, &s, bytes, w);
    TRY(w->agree(w, st == OK ? bare(why) : st));
out:
    give_back(&s);
    return st;
}
