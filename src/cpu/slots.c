/* The life of blocks on the CPU: which rows a forward has, and what its decisions do to the slots. */
#include "src/cpu/cpu.h"
#include "src/cpu/plans.h"

#include <math.h>
#include <string.h>

static inline int bits(uint64_t m)
{
    return __builtin_popcountll(m);
}

/* Blocks of cohorts whose members are all ready begin: old plan and cache are gone. */
static void start_blocks(slots *s, plans *p, const block_rule *r)
{
    slot *all = s->slot.data;
    for (int first = 0; first < s->slot_count; first += r->cohort) {
        int last = first + r->cohort < s->slot_count ? first + r->cohort : s->slot_count;
        bool ready = true, any = false;
        for (int i = first; i < last; i++) {
            ready &= all[i].state != SLOT_FILLING && all[i].state != SLOT_REFINING;
            any |= all[i].state == SLOT_WAITING;
        }
        if (!ready || !any)
            continue;
        for (int i = first; i < last; i++) {
            slot *sl = &all[i];
            if (sl->state != SLOT_WAITING)
                continue;
            int given = sl->prompt_tokens - sl->block * r->block_size;
            sl->state = SLOT_REFINING;
            sl->iteration = sl->age = sl->since_update = 0;
            sl->version++;
            sl->cache_block = -1;
            sl->decoded = given > 0 ? slot_mask(given) : 0;
            sl->before = 0;
            memset(&sl->stats, 0, sizeof sl->stats);
        }
        for (int l = 0; l < p->layers; l++)
            memset(cpu_support_of(p, l, first / r->cohort), 0, (size_t)p->support.cols * sizeof(int32_t));
    }
}

/* Does this forward compute every row of the block, by plan or by fallback? */
static inline bool renews(const slot *sl)
{
    return sl->path == PATH_COLD || sl->path == PATH_REFRESH || sl->cause != ROWS_NONE;
}

/* Chooses the path of a refining slot, checks what the path relies on, and sets its fresh mask. */
static void choose(slot *sl, const int32_t *token, const block_rule *r)
{
    uint64_t all = slot_mask(r->block_size);
    sl->path = slot_path(sl->iteration, sl->age, sl->since_update, r);
    sl->filling = sl->iteration == 0 ? sl->block - sl->sealed : 0;
    if (sl->path != PATH_COLD) {
        uint64_t masked = 0;
        for (int i = 0; i < r->block_size; i++)
            if (token[i] == r->mask_id)
                masked |= 1ull << i;
        if (sl->decoded & masked) {
            sl->cause = ROWS_ILLEGAL;
            sl->decoded &= ~masked;
        } else if (sl->cache_block != sl->block) {
            sl->cause = ROWS_MISS;
        } else if (sl->cache_version != sl->version) {
            sl->cause = ROWS_VERSION;
        } else if (sl->age >= r->refresh_every) {
            sl->cause = ROWS_OVERDUE;
        }
    }
    sl->fresh = renews(sl) ? all : all & ~(sl->decoded & sl->before);
}

/* Appends one query block to the batch. */
static void add_span(batch *b, const slots *s, const slot *sl, int index, int block, bool sealing, const block_rule *r)
{
    int32_t *count = b->count.data; /* rows, spans, fresh, live */
    int32_t *token = b->token.data, *position = b->position.data, *slot_of = b->slot.data, *role = b->role.data;
    int32_t *fresh = b->fresh.data, *place = b->place.data, *live = b->live.data;
    const int32_t *from = (const int32_t *)s->token.data + index * s->token.ld + (int64_t)block * r->block_size;
    ((span *)b->span.data)[count[1]++] = (span){.slot = index, .block = block, .row = count[0], .sealing = sealing};
    for (int i = 0; i < r->block_size; i++) {
        int32_t row = count[0]++;
        uint64_t bit = 1ull << i;
        token[row] = from[i];
        position[row] = block * r->block_size + i;
        slot_of[row] = index;
        if (sealing)
            role[row] = ROW_SEALING;
        else if (!(sl->decoded & bit))
            role[row] = ROW_LIVE;
        else
            role[row] = sl->before & bit ? ROW_STABLE : ROW_NEW;
        place[row] = -1;
        if (sealing || r->dense_lane || (sl->fresh & bit)) {
            place[row] = count[2];
            fresh[count[2]++] = row;
        }
        if (role[row] == ROW_LIVE)
            live[count[3]++] = row;
    }
}

status cpu_rows(backend *b, batch *out, slots *s, plans *p, const block_rule *r)
{
    (void)b;
    slot *all = s->slot.data;
    int budget = r->prefill_blocks;
    memset(out->count.data, 0, 4 * sizeof(int32_t));
    memset(p->log.data, 0, (size_t)p->log.rows * sizeof(layer_log));
    start_blocks(s, p, r);
    for (int i = 0; i < s->slot_count; i++) {
        slot *sl = &all[i];
        sl->path = PATH_NONE;
        sl->cause = ROWS_NONE;
        sl->filling = 0;
        sl->fresh = 0;
        if (sl->state == SLOT_FILLING) {
            int left = sl->prompt_tokens / r->block_size - sl->sealed;
            sl->filling = left < budget ? left : budget;
            budget -= sl->filling;
            sl->path = sl->filling ? PATH_PREFILL : PATH_NONE;
        } else if (sl->state == SLOT_REFINING) {
            choose(sl, (const int32_t *)s->token.data + i * s->token.ld + (int64_t)sl->block * r->block_size, r);
        }
        for (int k = 0; k < sl->filling; k++)
            add_span(out, s, sl, i, sl->sealed + k, true, r);
        if (sl->state == SLOT_REFINING)
            add_span(out, s, sl, i, sl->block, false, r);
    }
    return OK;
}

/* The decision rule (greedy threshold decoding): positions to commit of a block's live ones. best[k] belongs to the
 * k-th live position. *forced counts those that only the step limit let through. pace >= 0: so many, the lowest. */
static uint64_t decide(const slot *sl, uint64_t live, const head_best *best, const block_rule *r, int32_t pace,
                       int32_t *forced)
{
    uint64_t pass = 0, single = 0;
    float most = -1;
    int k = 0;
    for (int i = 0; i < r->block_size; i++) {
        if (!(live >> i & 1))
            continue;
        float p = best[k++].probability;
        if (p > r->threshold)
            pass |= 1ull << i;
        if (p > most) { /* the lowest position on a tie */
            most = p;
            single = 1ull << i;
        }
    }
    uint64_t commit = pace >= 0 ? slot_lowest(live, pace) : pass ? pass : single;
    *forced = 0;
    if (sl->iteration + 1 >= r->max_steps) {
        *forced = bits(live & ~commit);
        commit = live;
    }
    return commit;
}

/* Adds what the layers logged for this slot's cohort. */
static void fold_log(block_stats *t, const plans *p, int cohort)
{
    for (int l = 0; l < p->layers; l++) {
        const layer_log *g = cpu_log_of(p, l, cohort);
        t->layer_iterations++;
        t->support_size += g->support;
        t->distinct += g->distinct;
        t->tested_rows += g->tested;
        t->under_rows += g->under;
        t->covered += g->covered;
        t->layer_rebuilds += g->rebuilt;
        t->universe += g->universe;
    }
}

static void count_iteration(slot *sl, int fresh, const block_rule *r)
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
    t->cached_rows += r->block_size - fresh;
}

/* Ends a block whose last mask is gone: reports it, and either readies the next one or ends the sequence. */
static void end_block(slot *sl, slot_report *rep, const int32_t *token, const block_rule *r)
{
    int at = sl->block * r->block_size;
    rep->block_done = 1;
    rep->stats = sl->stats;
    memcpy(rep->token, token, (size_t)r->block_size * sizeof *token);
    for (int k = 0; k < r->block_size; k++)
        rep->saw_eos |= token[k] == r->eos_id && at + k >= sl->prompt_tokens;
    rep->sequence_done = rep->saw_eos || at + r->block_size >= sl->end;
    sl->block += !rep->sequence_done;
    sl->state = rep->sequence_done ? SLOT_IDLE : SLOT_WAITING;
}

status cpu_commit(backend *b, slots *s, const tensor *best, const batch *in, const plans *p, const block_rule *r)
{
    (void)b;
    (void)in;
    slot *all = s->slot.data;
    const head_best *next = best->data;
    uint64_t whole = slot_mask(r->block_size);
    for (int i = 0; i < s->slot_count; i++) {
        slot *sl = &all[i];
        slot_report *rep = (slot_report *)s->report.data + i;
        memset(rep, 0, sizeof *rep);
        if (sl->path == PATH_NONE)
            continue;
        rep->path = sl->path;
        rep->filled = sl->filling;
        sl->sealed += sl->filling;
        if (sl->path == PATH_PREFILL) {
            if (sl->sealed == sl->prompt_tokens / r->block_size)
                sl->state = SLOT_WAITING;
            continue;
        }
        int32_t *token = (int32_t *)s->token.data + i * s->token.ld + (int64_t)sl->block * r->block_size;
        uint64_t live = whole & ~sl->decoded;
        const head_best *mine = next;
        next += bits(live);
        rep->block = sl->block;
        rep->iteration = sl->iteration;
        rep->cause = sl->cause;
        rep->live = bits(live);
        rep->stable = bits(sl->decoded & sl->before);
        rep->newly = bits(sl->decoded & ~sl->before);
        rep->fresh = bits(sl->fresh);
        for (int k = 0; k < rep->live; k++)
            rep->broken |= !isfinite(mine[k].probability) || mine[k].id < 0;
        if (rep->broken) {
            sl->state = SLOT_IDLE;
            continue;
        }
        count_iteration(sl, rep->fresh, r);
        if (sl->iteration > 0)
            fold_log(&sl->stats, p, i / r->cohort);
        rep->committed = decide(sl, live, mine, r, slots_pace(s, i, sl->block, sl->iteration), &rep->forced);
        sl->stats.forced += rep->forced;
        for (int k = 0; k < r->block_size; k++)
            if (live >> k & 1) {
                if (rep->committed >> k & 1)
                    token[k] = mine->id;
                mine++;
            }
        if (renews(sl)) {
            sl->age = 0;
            sl->cache_block = sl->block;
            sl->cache_version = sl->version;
        } else {
            sl->age++;
        }
        bool updated = sl->iteration == 0 || slot_update_due(sl->iteration, sl->since_update, r);
        sl->since_update = updated ? 0 : sl->since_update + 1;
        sl->iteration++;
        sl->before = sl->decoded;
        sl->decoded |= rep->committed;
        if (sl->decoded == whole)
            end_block(sl, rep, token, r);
    }
    return OK;
}
