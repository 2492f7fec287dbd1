/* The life of blocks on the device: which rows a forward has, and what its decisions do to the slots. Twin of
 * src/cpu/slots.c: the same state machine (src/slot.h), the same order of rows.
 *
 * rows is two kernels. One block plans: it starts blocks whose cohort is ready, chooses paths and fresh masks, and
 * finds by prefix sums over the slots where each slot's spans, fresh and live rows begin. Then a block a slot lays its
 * rows out and clears what a new forward, or a new block, must not find. commit is two kernels. The logs of the routers
 * are completed, a warp a layer and cohort; then a warp decides for a slot, whose first live row is where `rows` of the
 * same forward put it. */
#include "cuda/device.cuh"
#include "cuda/plans.cuh"

enum { PLAN_THREADS = 1024, LAY_THREADS = 64, COMMIT_THREADS = 256, COMMIT_SLOTS = COMMIT_THREADS / WARP };

/* Where a slot's spans, fresh rows and live rows begin. */
typedef struct begins {
    int32_t span, fresh, live;
} begins;

/* Its cohort is ready: old plan and cache are gone. */
static __device__ void start_block(slot *sl, const block_rule &r)
{
    int given = sl->prompt_tokens - sl->block * r.block_size;
    sl->state = SLOT_REFINING;
    sl->iteration = sl->age = sl->since_update = 0;
    sl->version++;
    sl->cache_block = -1;
    sl->decoded = given > 0 ? slot_mask(given) : 0;
    sl->before = 0;
    uint32_t *stats = (uint32_t *)&sl->stats;
    for (unsigned i = 0; i < sizeof sl->stats / sizeof *stats; i++)
        stats[i] = 0;
}

/* Does this forward compute every row of the block, by plan or by fallback? */
static __device__ bool renews(const slot *sl)
{
    return sl->path == PATH_COLD || sl->path == PATH_REFRESH || sl->cause != ROWS_NONE;
}

/* The path of a refining slot, what the path relies on, and its fresh mask. */
static __device__ void choose(slot *sl, const int32_t *token, const block_rule &r)
{
    uint64_t all = slot_mask(r.block_size);
    sl->path = slot_path(sl->iteration, sl->age, sl->since_update, &r);
    sl->filling = sl->iteration == 0 ? sl->block - sl->sealed : 0;
    if (sl->path != PATH_COLD) {
        uint64_t masked = 0;
        for (int i = 0; i < r.block_size; i++)
            masked |= (uint64_t)(token[i] == r.mask_id) << i;
        if (sl->decoded & masked) {
            sl->cause = ROWS_ILLEGAL;
            sl->decoded &= ~masked;
        } else if (sl->cache_block != sl->block) {
            sl->cause = ROWS_MISS;
        } else if (sl->cache_version != sl->version) {
            sl->cause = ROWS_VERSION;
        } else if (sl->age >= r.refresh_every) {
            sl->cause = ROWS_OVERDUE;
        }
    }
    sl->fresh = renews(sl) ? all : all & ~(sl->decoded & sl->before);
}

static __global__ void plan_kernel(slots s, batch out, plans p, block_rule r, begins *begin, int64_t *routed)
{
    extern __shared__ uint32_t marks[]; /* of each cohort: one bit busy, then one bit waiting */
    __shared__ uint64_t room[WARP];
    int words = (p.cohort_count + 31) / 32;
    uint32_t *busy = marks, *waiting = marks + words;
    let_next();
    after_previous();
    slot *all = (slot *)s.slot.data;
    for (int i = threadIdx.x; i < 2 * words; i += PLAN_THREADS)
        marks[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < s.slot_count; i += PLAN_THREADS) {
        int state = all[i].state, c = i / r.cohort;
        if (state == SLOT_FILLING || state == SLOT_REFINING)
            atomicOr(&busy[c / 32], 1u << (c % 32));
        else if (state == SLOT_WAITING)
            atomicOr(&waiting[c / 32], 1u << (c % 32));
    }
    __syncthreads();
    uint64_t asked = 0,
             sums = 0; /* of the slots before: prompt blocks to fill; spans, fresh and live rows, 21 bits each */
    for (int base = 0; base < s.slot_count; base += PLAN_THREADS) {
        int i = base + threadIdx.x, c = i / r.cohort;
        bool mine = i < s.slot_count;
        slot *sl = all + (mine ? i : 0);
        uint64_t left = 0, total;
        if (mine) {
            if (sl->state == SLOT_WAITING && !(busy[c / 32] >> (c % 32) & 1))
                start_block(sl, r);
            sl->path = PATH_NONE;
            sl->cause = ROWS_NONE;
            sl->filling = 0;
            sl->fresh = 0;
            if (sl->state == SLOT_FILLING)
                left = sl->prompt_tokens / r.block_size - sl->sealed;
        }
        uint64_t before = asked + block_prefix(left, &total, room);
        asked += total;
        uint64_t counts = 0;
        if (mine) {
            if (left > 0) {
                int64_t budget = r.prefill_blocks - (int64_t)before;
                sl->filling = budget <= 0 ? 0 : (int32_t)(budget < (int64_t)left ? budget : (int64_t)left);
                sl->path = sl->filling ? PATH_PREFILL : PATH_NONE;
            }
            bool active = sl->state == SLOT_REFINING;
            if (active)
                choose(sl, row_of<int32_t>(s.token, i) + (int64_t)sl->block * r.block_size, r);
            uint64_t fresh = (uint64_t)sl->filling * r.block_size, live = 0;
            if (active) {
                fresh += r.dense_lane ? r.block_size : __popcll(sl->fresh);
                live = r.block_size - __popcll(sl->decoded);
            }
            counts = (uint64_t)(sl->filling + active) | fresh << 21 | live << 42;
        }
        uint64_t at = sums + block_prefix(counts, &total, room);
        sums += total;
        if (mine)
            begin[i] = begins{(int32_t)(at & 0x1fffff), (int32_t)(at >> 21 & 0x1fffff), (int32_t)(at >> 42)};
    }
    if (threadIdx.x == 0) {
        int32_t *count = (int32_t *)out.count.data;
        count[0] = (int32_t)(sums & 0x1fffff) * r.block_size;
        count[1] = (int32_t)(sums & 0x1fffff);
        count[2] = (int32_t)(sums >> 21 & 0x1fffff);
        count[3] = (int32_t)(sums >> 42);
        *routed += (int64_t)count[2] * p.layers;
    }
}

/* One query block into the batch. */
static __device__ void lay_span(const batch &b, const slots &s, const slot *sl, int index, int block, bool sealing,
                                int at, int32_t fresh, int32_t live, const block_rule &r)
{
    const int32_t *from = row_of<int32_t>(s.token, index) + (int64_t)block * r.block_size;
    if (threadIdx.x == 0) {
        int32_t *to = row_of<int32_t>(b.span, at); /* struct span */
        to[0] = index, to[1] = block, to[2] = at * r.block_size, to[3] = sealing;
    }
    for (int i = threadIdx.x; i < r.block_size; i += LAY_THREADS) {
        int32_t row = at * r.block_size + i;
        uint64_t bit = 1ull << i, below = bit - 1;
        bool decoded = sl->decoded & bit;
        ((int32_t *)b.token.data)[row] = from[i];
        ((int32_t *)b.position.data)[row] = block * r.block_size + i;
        ((int32_t *)b.slot.data)[row] = index;
        ((int32_t *)b.role.data)[row] = sealing    ? ROW_SEALING
                                        : !decoded ? ROW_LIVE
                                        : sl->before & bit ? ROW_STABLE
                                                           : ROW_NEW;
        int32_t place = sealing || r.dense_lane ? fresh + i
                        : sl->fresh & bit       ? fresh + __popcll(sl->fresh & below)
                                                : -1;
        ((int32_t *)b.place.data)[row] = place;
        if (place >= 0)
            ((int32_t *)b.fresh.data)[place] = row;
        if (!sealing && !decoded)
            ((int32_t *)b.live.data)[live + __popcll(~sl->decoded & below)] = row;
    }
}

static __global__ void lay_kernel(slots s, batch out, plans p, block_rule r, const begins *begin, uint32_t *seen,
                                  int words)
{
    int i = blockIdx.x, cohort = i / r.cohort, first = cohort * r.cohort;
    const slot *all = (const slot *)s.slot.data, *sl = all + i;
    let_next();
    after_previous();
    if (i == first)
        for (int l = 0; l < p.layers; l++) {
            uint32_t *log = (uint32_t *)log_of(p, l, cohort),
                     *set = seen + ((int64_t)l * p.cohort_count + cohort) * words;
            for (unsigned k = threadIdx.x; k < sizeof(layer_log) / sizeof *log; k += LAY_THREADS)
                log[k] = 0;
            for (int k = threadIdx.x; k < words; k += LAY_THREADS)
                set[k] = 0;
        }
    bool led = false; /* an earlier slot of the cohort goes cold too: it clears */
    if (sl->path == PATH_COLD) {
        for (int k = first + threadIdx.x; k < i; k += LAY_THREADS)
            led |= all[k].path == PATH_COLD;
        led = __syncthreads_or(led);
        for (int l = 0; !led && l < p.layers; l++)
            for (int k = threadIdx.x; k < p.support.cols; k += LAY_THREADS)
                support_of(p, l, cohort)[k] = 0;
    }
    for (int k = 0; k < sl->filling; k++)
        lay_span(out, s, sl, i, sl->sealed + k, true, begin[i].span + k, begin[i].fresh + k * r.block_size, 0, r);
    if (sl->state == SLOT_REFINING)
        lay_span(out, s, sl, i, sl->block, false, begin[i].span + sl->filling,
                 begin[i].fresh + sl->filling * r.block_size, begin[i].live, r);
}

extern "C" status cuda_rows(backend *b, batch *out, slots *s, plans *p, const block_rule *r)
{
    cuda *c = cuda_of(b);
    int words = (int)p->support.cols - 1;
    size_t marks = 2 * sizeof(uint32_t) * (size_t)((p->cohort_count + 31) / 32);
    assert(s->slot.ld == (int64_t)sizeof(slot) && p->log.ld == (int64_t)sizeof(layer_log) &&
           p->cohort_count <= 1 << 17);
    status st = cuda_grow(c, &c->begins, sizeof(begins) * (size_t)(s->slot_count + 1), "where each slot's rows begin");
    if (st == OK)
        st = cuda_grow(c, &c->seen, sizeof(uint32_t) * (size_t)((int64_t)p->layers * p->cohort_count * words + 1),
                       "what the routers chose");
    if (st != OK)
        return st;
    begins *begin = (begins *)c->begins.data;
    st = launch(c, "rows", plan_kernel, 1, PLAN_THREADS, marks, *s, *out, *p, *r, begin, c->routed);
    if (st == OK && s->slot_count > 0)
        st = launch(c, "rows", lay_kernel, s->slot_count, LAY_THREADS, 0, *s, *out, *p, *r, begin,
                    (uint32_t *)c->seen.data, words);
    return st;
}

/* ---- commit */

/* fresh, distinct and support of each layer and cohort, from what the routers left behind. */
static __global__ void log_kernel(slots s, plans p, block_rule r, const uint32_t *seen, int words, int experts)
{
    int64_t at = (blockIdx.x * (int64_t)COMMIT_THREADS + threadIdx.x) / WARP;
    int lane = threadIdx.x % WARP, cohort = (int)(at % p.cohort_count), layer = (int)(at / p.cohort_count);
    let_next();
    after_previous();
    if (layer >= p.layers)
        return;
    const slot *all = (const slot *)s.slot.data;
    int last = min((cohort + 1) * r.cohort, s.slot_count), fresh = 0, distinct = 0, size = 0;
    bool cold = false;
    for (int i = cohort * r.cohort + lane; i < last; i += WARP) {
        fresh += __popcll(all[i].fresh);
        cold |= all[i].fresh != 0 && all[i].path == PATH_COLD;
    }
    fresh = __reduce_add_sync(EVERY_LANE, fresh);
    cold = __any_sync(EVERY_LANE, cold);
    if (fresh == 0)
        return;
    const int32_t *set = support_of(p, layer, cohort);
    for (int k = lane; k < words; k += WARP) {
        distinct += __popc(seen[at * words + k]);
        size += __popc((uint32_t)set[k]);
    }
    distinct = __reduce_add_sync(EVERY_LANE, distinct);
    size = __reduce_add_sync(EVERY_LANE, size);
    if (lane == 0) {
        layer_log *log = log_of(p, layer, cohort);
        log->fresh = fresh;
        log->distinct = distinct;
        log->support = r.restrict_experts && !cold && set[words] == SUPPORT_HOLDS ? size : experts;
    }
}

/* Adds what the layers logged for this slot's cohort; a warp. The sum of `covered` goes layer by layer. */
static __device__ void fold_log(block_stats *t, const plans &p, int cohort)
{
    int lane = threadIdx.x % WARP;
    block_stats sum = {};
    double covered = lane == 0 ? t->covered : 0;
    for (int base = 0; base < p.layers; base += WARP) {
        float mine = 0;
        if (base + lane < p.layers) {
            const layer_log *g = log_of(p, base + lane, cohort);
            sum.support_size += g->support;
            sum.distinct += g->distinct;
            sum.tested_rows += g->tested;
            sum.under_rows += g->under;
            sum.layer_rebuilds += g->rebuilt;
            sum.universe += g->universe;
            mine = g->covered;
        }
        for (int l = 0; l < WARP && base + l < p.layers; l++)
            covered += (double)__shfl_sync(EVERY_LANE, mine, l);
    }
    int support = __reduce_add_sync(EVERY_LANE, (int)sum.support_size),
        distinct = __reduce_add_sync(EVERY_LANE, (int)sum.distinct);
    int tested = __reduce_add_sync(EVERY_LANE, (int)sum.tested_rows),
        under = __reduce_add_sync(EVERY_LANE, (int)sum.under_rows);
    int rebuilds = __reduce_add_sync(EVERY_LANE, sum.layer_rebuilds),
        universe = __reduce_add_sync(EVERY_LANE, sum.universe);
    if (lane == 0) {
        t->layer_iterations += p.layers;
        t->support_size += support;
        t->distinct += distinct;
        t->tested_rows += tested;
        t->under_rows += under;
        t->layer_rebuilds += rebuilds;
        t->universe += universe;
        t->covered = covered;
    }
}

static __device__ void count_iteration(slot *sl, int fresh, const block_rule &r)
{
    block_stats *t = &sl->stats;
    t->iterations++;
    t->cold += sl->path == PATH_COLD;
    t->refresh += sl->path == PATH_REFRESH;
    t->hot_update += sl->path == PATH_HOT_UPDATE;
    t->hot_skip += sl->path == PATH_HOT_SKIP;
    if (sl->cause != ROWS_NONE)
        t->rows_fallback[sl->cause]++;
    t->fresh_rows += fresh;
    t->cached_rows += r.block_size - fresh;
}

/* One slot, by one warp; lane i has the positions i and i + 32 of the block. mine: its first live row's best. */
static __device__ void commit_slot(slot *sl, slot_report *rep, int32_t *token, const head_best *mine, int pace,
                                   int cohort, const plans &p, const block_rule &r)
{
    int lane = threadIdx.x % WARP;
    uint64_t whole = slot_mask(r.block_size), live = whole & ~sl->decoded;
    head_best best[2];
    uint64_t pass = 0, broken = 0;
    float most = -1;
    int at = BLOCK_MOST; /* of most: the lowest position on a tie */
    for (int h = 0; h < 2; h++) {
        int i = lane + h * WARP;
        bool here = live >> i & 1;
        best[h].probability = -1;
        if (here) {
            best[h] = mine[__popcll(live & ((1ull << i) - 1))];
            if (best[h].probability > most) {
                most = best[h].probability;
                at = i;
            }
        }
        uint64_t passes = __ballot_sync(EVERY_LANE, here && best[h].probability > r.threshold);
        uint64_t breaks = __ballot_sync(EVERY_LANE, here && (!isfinite(best[h].probability) || best[h].id < 0));
        pass |= passes << (h * WARP);
        broken |= breaks << (h * WARP);
    }
    for (int d = WARP / 2; d > 0; d /= 2) {
        float other = __shfl_xor_sync(EVERY_LANE, most, d);
        int where = __shfl_xor_sync(EVERY_LANE, at, d);
        if (other > most || (other == most && where < at)) {
            most = other;
            at = where;
        }
    }
    uint64_t commit = pace >= 0 ? slot_lowest(live, pace) : pass ? pass : at < BLOCK_MOST ? 1ull << at : 0;
    int forced = 0;
    if (sl->iteration + 1 >= r.max_steps) {
        forced = __popcll(live & ~commit);
        commit = live;
    }
    uint64_t decoded = sl->decoded | commit;
    int fresh = __popcll(sl->fresh);
    if (lane == 0) {
        rep->block = sl->block;
        rep->iteration = sl->iteration;
        rep->cause = sl->cause;
        rep->live = __popcll(live);
        rep->stable = __popcll(sl->decoded & sl->before);
        rep->newly = __popcll(sl->decoded & ~sl->before);
        rep->fresh = fresh;
        rep->broken = broken != 0;
        if (broken)
            sl->state = SLOT_IDLE;
        else
            count_iteration(sl, fresh, r);
    }
    if (broken)
        return;
    __syncwarp();
    if (sl->iteration > 0)
        fold_log(&sl->stats, p, cohort);
    bool eos = false;
    int first = sl->block * r.block_size;
    for (int h = 0; h < 2; h++) {
        int i = lane + h * WARP;
        if (i >= r.block_size)
            continue;
        if (commit >> i & 1)
            token[i] = best[h].id;
        if (decoded == whole) {
            rep->token[i] = token[i];
            eos |= token[i] == r.eos_id && first + i >= sl->prompt_tokens;
        }
    }
    eos = __any_sync(EVERY_LANE, eos);
    if (lane != 0)
        return;
    rep->committed = commit;
    rep->forced = forced;
    sl->stats.forced += forced;
    if (renews(sl)) {
        sl->age = 0;
        sl->cache_block = sl->block;
        sl->cache_version = sl->version;
    } else {
        sl->age++;
    }
    bool updated = sl->iteration == 0 || slot_update_due(sl->iteration, sl->since_update, &r);
    sl->since_update = updated ? 0 : sl->since_update + 1;
    sl->iteration++;
    sl->before = sl->decoded;
    sl->decoded = decoded;
    if (decoded == whole) {
        rep->block_done = 1;
        rep->stats = sl->stats;
        rep->saw_eos = eos;
        rep->sequence_done = eos || first + r.block_size >= sl->end;
        sl->block += !rep->sequence_done;
        sl->state = rep->sequence_done ? SLOT_IDLE : SLOT_WAITING;
    }
}

static __global__ void commit_kernel(slots s, tensor best, plans p, block_rule r, const begins *begin)
{
    int lane = threadIdx.x % WARP, i = blockIdx.x * COMMIT_SLOTS + threadIdx.x / WARP;
    let_next();
    after_previous();
    if (i >= s.slot_count)
        return;
    slot *sl = (slot *)s.slot.data + i;
    slot_report *rep = (slot_report *)s.report.data + i;
    for (unsigned k = lane; k < sizeof *rep / sizeof(uint32_t); k += WARP)
        ((uint32_t *)rep)[k] = 0;
    __syncwarp();
    int path = sl->path, filling = sl->filling;
    __syncwarp();
    if (path == PATH_NONE)
        return;
    if (lane == 0) {
        rep->path = path;
        rep->filled = filling;
        sl->sealed += filling;
        if (path == PATH_PREFILL && sl->sealed == sl->prompt_tokens / r.block_size)
            sl->state = SLOT_WAITING;
    }
    __syncwarp();
    if (path != PATH_PREFILL)
        commit_slot(sl, rep, row_of<int32_t>(s.token, i) + (int64_t)sl->block * r.block_size,
                    (const head_best *)best.data + begin[i].live, slots_pace(&s, i, sl->block, sl->iteration),
                    i / r.cohort, p, r);
}

extern "C" status cuda_commit(backend *b, slots *s, const tensor *best, const batch *in, const plans *p,
                              const block_rule *r)
{
    cuda *c = cuda_of(b);
    int words = (int)p->support.cols - 1;
    (void)in;
    assert(s->report.ld == (int64_t)sizeof(slot_report) && best->ld == (int64_t)sizeof(head_best));
    if (s->slot_count == 0)
        return OK;
    status st = OK;
    int64_t logs = (int64_t)p->layers * p->cohort_count;
    unsigned warps = (unsigned)((logs + COMMIT_SLOTS - 1) / COMMIT_SLOTS),
             grid = (unsigned)((s->slot_count + COMMIT_SLOTS - 1) / COMMIT_SLOTS);
    if (logs > 0)
        st = launch(c, "commit", log_kernel, warps, COMMIT_THREADS, 0, *s, *p, *r, (const uint32_t *)c->seen.data,
                    words, c->experts);
    if (st == OK)
        st = launch(c, "commit", commit_kernel, grid, COMMIT_THREADS, 0, *s, *best, *p, *r,
                    (const begins *)c->begins.data);
    return st;
}
