#include "src/trial.h"

#include "src/base/clock.h"
#include "src/base/fault.h"
#include "src/device.h"
#include "src/memory.h"
#include "src/plan/scheduler.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    BLOCK = TRIAL_BLOCK,
    WARM_UP = 3,
    LOOKED = 6, /* forwards in which nothing commits: cold, and up to the first refresh */
    STEADY = 48,
    BLOCKS_MOST = 32
};

typedef struct trial {
    const trial_setup *with;
    const trial_ask *ask;
    executor_rule rule;
    lane *lane;
    executor *executor;
    void *pace_slab;
    int32_t blocks, skipped;  /* of each sequence; forwards that pass before the others */
    int32_t forwards, looked; /* timed; timed by phase and looked into */
    int64_t begun;            /* forwards so far */
    double seconds, part[PHASES];
} trial;

/* What one rank adds to the row. */
typedef struct share {
    double seconds, part[PHASES];
    double rows, fresh, live, experts, committed, active; /* sums over the forwards; experts: of all ranks */
    double dispatched, combined;                          /* bytes to other ranks, likewise */
    cost least[PHASES];
} share;

/* ---- opening */

static int pattern_steps(const int32_t *pattern)
{
    int n = 0;
    while (n < PATTERN_STEPS && pattern[n] > 0)
        n++;
    return n;
}

/* The cohort's size on a rank with so many slots. */
static int32_t cohort_of(const trial *x, int32_t slot_count)
{
    int32_t asked = x->ask->plan.cohort;
    return asked > 0 && asked < slot_count ? asked : slot_count;
}

/* The fewest forwards that a cohort of a rank with so many slots is busy for with so many blocks. */
static int32_t busy(const trial *x, int32_t slot_count, int32_t blocks)
{
    int32_t cohort = cohort_of(x, slot_count), first = x->ask->prefix / BLOCK, least = INT32_MAX;
    for (int32_t c = 0; c < slot_count; c += cohort) {
        int32_t all = 0;
        for (int32_t b = first; b < first + blocks; b++) {
            int32_t longest = 0;
            for (int32_t i = c; i < c + cohort && i < slot_count; i++) {
                int64_t pattern = (i + (int64_t)b * slot_count) % x->with->patterns;
                int32_t steps = pattern_steps(x->with->pace + pattern * PATTERN_STEPS);
                longest = steps > longest ? steps : longest;
            }
            all += longest;
        }
        least = all < least ? all : least;
    }
    return least;
}

/* How many forwards are timed, the same on every rank, and how many blocks each sequence then has. One cohort a rank:
 * until its last slot is through. Several: as long as all of them are busy, as they would be in a run that refills
 * slots; there are blocks enough for STEADY forwards, of which the first third, in which the cohorts are not yet spread
 * over their blocks' iterations, passes untimed. */
static void count_forwards(trial *x)
{
    int32_t size = x->with->world->size, most = deal_evenly(x->ask->batch, size, 0),
            fewest = deal_evenly(x->ask->batch, size, size - 1), all = 0;
    bool several = cohort_of(x, most) < most;
    x->blocks = x->ask->iterations > 0 ? 1 : x->ask->blocks;
    x->forwards = x->ask->iterations;
    x->looked = x->forwards > LOOKED ? LOOKED : x->forwards;
    if (x->ask->iterations > 0)
        return;
    for (;; x->blocks++) {
        all = busy(x, most, x->blocks);
        int32_t other = busy(x, fewest, x->blocks);
        all = other < all ? other : all;
        if (!several || all >= STEADY || x->blocks == BLOCKS_MOST)
            break;
    }
    x->skipped = several ? all / 3 : 0;
    x->forwards = x->looked = all - x->skipped;
}

static status open_batch(trial *x)
{
    status st = OK;
    const trial_setup *s = x->with;
    const trial_ask *a = x->ask;
    backend *b = s->backend;
    int32_t slot_count = deal_evenly(a->batch, s->world->size, s->world->rank);
    x->rule.slot_count = slot_count;
    TRY(plan_rules(&x->rule.block, &x->rule.atlas, &a->plan, s->config, slot_count));
    count_forwards(x);
    x->rule.max_tokens = a->prefix + x->blocks * BLOCK;
    int64_t pages = (int64_t)slot_count * (x->rule.max_tokens / BLOCK);
    if (pages > INT32_MAX)
        FAIL(BAD_INPUT, "%d sequences of %d positions have more blocks than a rank can number: lower --batch or "
             "--prefix", slot_count, x->rule.max_tokens);
    x->rule.page_count = (int32_t)pages;
    executor_rule most = x->rule;
    most.slot_count = deal_evenly(a->batch, s->world->size, 0);
    lane_rule lr = {.hidden = s->config->hidden,
                    .top_k = s->config->top_k,
                    .max_rows = executor_max_rows(&most),
                    .tree = s->tree,
                    .payload = b->activation,
                    .combine = s->way.combine};
    TRY(transport_open(&x->lane, &s->way, &lr, b, s->world, s->joined));
    TRY(executor_open(&x->executor, &x->rule, s->config, s->weights, b, x->lane));
    x->executor->heart = s->heart;
    if (fault_row() >= 0 && fault_row() % s->world->size == s->world->rank)
        x->executor->spoiled = (int)fault_row() / s->world->size;
    TRY(b->random(b, &x->executor->kv.k, s->seed + 1, 1.7f));
    TRY(b->random(b, &x->executor->kv.v, s->seed + 2, 1.7f));
    tensor pace = tensor_of(NULL, I32, s->patterns, PATTERN_STEPS);
    TRY(b->reserve(b, &x->pace_slab, (size_t)(pace.rows * pace.cols) * sizeof(int32_t)));
    pace.data = x->pace_slab;
    TRY(b->upload(b, &pace, s->pace, I32));
    x->executor->slots.pace = pace;
out:
    return st;
}

static void close_batch(trial *x)
{
    fault_point("close");
    executor_close(x->executor);
    if (x->lane)
        x->lane->close(x->lane);
    if (x->pace_slab)
        x->with->backend->release(x->with->backend, x->pace_slab);
}

/* All slots at the start of a block behind the same prefix; tokens are random, so that rows are as unlike as a text's.
 */
static status reset(trial *x)
{
    status st = OK;
    executor *e = x->executor;
    backend *k = x->with->backend;
    const int32_t n = x->rule.slot_count, blocks = e->slots.max_blocks, first = x->ask->prefix / BLOCK;
    const uint64_t seed = x->with->seed + 1000 * (uint64_t)x->with->world->rank;
    slot *s = calloc((size_t)n + 1, sizeof *s);
    int32_t *token = calloc((size_t)(n * e->slots.token.cols) + 1, sizeof *token);
    int32_t *page = calloc((size_t)n * (size_t)blocks + 1, sizeof *page);
    if (!s || !token || !page)
        FAIL(FAILED, "out of memory");
    for (int32_t i = 0; i < n; i++)
        s[i] = (slot){.state = SLOT_WAITING,
                      .prompt_tokens = x->ask->prefix,
                      .end = blocks * BLOCK,
                      .sealed = first,
                      .block = first,
                      .cache_block = -1};
    for (int64_t i = 0; i < n * e->slots.token.cols; i++)
        token[i] = (int32_t)((random_at(seed, (uint64_t)i) + 1) / 2 * (float)(x->with->config->vocab - 1));
    for (int32_t i = 0; i < n * blocks; i++)
        page[i] = i;
    TRY(k->upload(k, &e->slots.slot, s, U8));
    TRY(k->upload(k, &e->slots.token, token, I32));
    TRY(k->upload(k, &e->slots.page, page, I32));
    TRY(k->sync(k));
out:
    free(s);
    free(token);
    free(page);
    return st;
}

/* ---- timing */

static void begin(trial *x)
{
    if (x->with->heart)
        heartbeat_iteration(x->with->heart, x->begun++);
}

static status whole_forward(trial *x)
{
    begin(x);
    return executor_forward(x->executor);
}

/* The ranks begin together, behind the forwards that are skipped. */
static status together(trial *x)
{
    status st = OK;
    TRY(reset(x));
    for (int32_t i = 0; i < x->skipped; i++)
        TRY(whole_forward(x));
    TRY(x->with->backend->sync(x->with->backend));
    TRY(x->with->world->agree(x->with->world, OK));
out:
    return st;
}

/* Undisturbed: the whole alone is timed. */
static status time_forwards(trial *x)
{
    status st = OK;
    backend *b = x->with->backend;
    TRY(reset(x));
    for (int i = 0; i < WARM_UP; i++)
        TRY(whole_forward(x));
    TRY(together(x));
    double from = clock_seconds();
    for (int32_t i = 0; i < x->forwards; i++)
        TRY(whole_forward(x));
    TRY(b->sync(b));
    x->seconds = clock_seconds() - from;
out:
    return st;
}

/* The same again, every forward by phase. */
static status time_phases(trial *x)
{
    status st = OK;
    backend *b = x->with->backend;
    int32_t every = b->timed_every;
    b->timed_every = 1;
    TRY(together(x));
    TRY(b->mark(b, PHASE_HOST));
    TRY(b->laps(b, x->part));
    memset(x->part, 0, sizeof x->part);
    for (int32_t i = 0; i < x->looked; i++) {
        TRY(whole_forward(x));
        TRY(b->laps(b, x->part));
    }
out:
    b->timed_every = every;
    return st;
}

/* ---- looking */

/* Of the newest forward: different experts that all ranks' rows chose, those of them that this rank has, and the edges
 * to these; over its layers. */
typedef struct touched {
    double distinct, here, edges;
} touched;

typedef struct look {
    int32_t *ids;
    span *spans;
    slot_report *report;
    int32_t *chosen; /* [size][experts]: edges to each; rank 0 gathers them */
    touched touched;
} look;

/* Of the newest routed layer. */
static status count_touched(const trial *x, int32_t fresh, look *k)
{
    status st = OK;
    world *w = x->with->world;
    backend *b = x->with->backend;
    int32_t mine[SUM_TREE_EXPERTS] = {0}, experts = x->with->config->experts;
    size_t bytes = sizeof *mine * (size_t)experts;
    tensor used = tensor_rows(&x->executor->a.ids, 0, fresh);
    TRY(b->download(b, k->ids, &used));
    for (int64_t i = 0; i < fresh * used.cols; i++)
        if (k->ids[i] >= 0)
            mine[k->ids[i]]++;
    TRY(w->gather(w, k->chosen, mine, bytes));
    for (int r = 1; r < w->size && w->rank == 0; r++)
        for (int e = 0; e < experts; e++)
            k->chosen[e] += k->chosen[r * experts + e];
    TRY(w->bcast(w, k->chosen, bytes, 0));
    for (int e = 0; e < experts; e++) {
        bool here = x->with->tree->rank_of[e] == w->rank;
        k->touched.distinct += k->chosen[e] > 0;
        k->touched.here += here && k->chosen[e] > 0;
        k->touched.edges += here ? k->chosen[e] : 0;
    }
out:
    return st;
}

/* One forward, layer by layer with a look between. */
static status forward(trial *x, look *k, int32_t count[4])
{
    status st = OK;
    executor *e = x->executor;
    backend *b = x->with->backend;
    begin(x);
    k->touched = (touched){0};
    TRY(executor_begin(e));
    TRY(b->download(b, count, &e->batch.count));
    for (int l = 0, s = 0; l < x->with->config->layers; l++) {
        TRY(attention_layer(e, l));
        if (!e->weights->layer[l].sparse) {
            TRY(dense_layer(e, l));
            continue;
        }
        TRY(moe_layer(e, l, s++));
        TRY(count_touched(x, count[2], k));
    }
    TRY(executor_end(e));
    TRY(b->download(b, k->spans, &e->batch.span));
    TRY(executor_reports(e, k->report));
out:
    return st;
}

/* The same forwards once more: what they are made of. Nothing of it is timed. */
static status look_into(trial *x, share *mine)
{
    status st = OK;
    executor *e = x->executor;
    const trial_setup *s = x->with;
    int sparse = s->config->layers - s->config->dense_layers;
    lane_traffic t;
    look k = {.ids = malloc(sizeof *k.ids * (size_t)(e->a.ids.rows * e->a.ids.cols + 1)),
              .spans = malloc(sizeof *k.spans * (size_t)(e->batch.span.rows + 1)),
              .report = malloc(sizeof *k.report * (size_t)(x->rule.slot_count + 1)),
              .chosen = calloc((size_t)s->world->size * SUM_TREE_EXPERTS, sizeof *k.chosen)};
    if (!k.ids || !k.spans || !k.report || !k.chosen)
        FAIL(FAILED, "out of memory");
    TRY(together(x));
    TRY(x->lane->traffic(x->lane, &t));
    for (int32_t n = 0; n < x->looked; n++) {
        int32_t count[4];
        TRY(forward(x, &k, count));
        forward_load f = {
            .rows = count[0], .fresh = count[2], .live = count[3], .touched = k.touched.here, .edges = k.touched.edges};
        for (int32_t i = 0; i < count[1]; i++)
            f.seen += (k.spans[i].block + 1) * BLOCK;
        for (int32_t i = 0; i < x->rule.slot_count; i++) {
            mine->committed += __builtin_popcountll(k.report[i].committed);
            mine->active += k.report[i].path >= PATH_COLD;
            if (k.report[i].broken)
                FAIL(FAILED, "the logits of slot %d are not finite", i);
        }
        mine->rows += f.rows;
        mine->fresh += f.fresh;
        mine->live += f.live;
        mine->experts += k.touched.distinct / (sparse ? sparse : 1);
        cost_add(mine->least, s->config, &f, &s->most);
    }
    TRY(x->lane->traffic(x->lane, &t));
    mine->dispatched = (double)t.bytes_dispatched;
    mine->combined = (double)t.bytes_combined;
out:
    free(k.ids);
    free(k.spans);
    free(k.report);
    free(k.chosen);
    return st;
}

/* ---- the row */

static double planned(const trial *x)
{
    memory_plan p;
    const trial_setup *s = x->with;
    memory_of(&p, s->config, &x->rule,
              &(memory_way){.tree = s->tree, .matrices = s->gpu ? BF16 : F32, .activation = s->backend->activation,
                            .transport = s->way.transport});
    return p.total;
}

/* The floor is that of the rank that has most to do: the others wait for it. */
static void fill(bench_row *out, const trial *x, const share *all, int ranks)
{
    double n = x->looked, seconds = 0, committed = 0, active = 0;
    int heaviest = 0;
    *out = (bench_row){.prefix = x->ask->prefix,
                       .batch = x->ask->batch,
                       .cohort = x->rule.block.cohort,
                       .forwards = x->forwards,
                       .skipped = x->skipped,
                       .blocks = x->blocks,
                       .experts = all[0].experts / n};
    for (int r = 0; r < ranks; r++) {
        cost least = cost_sum(all[r].least);
        heaviest = least.seconds > cost_sum(all[heaviest].least).seconds ? r : heaviest;
        seconds = all[r].seconds > seconds ? all[r].seconds : seconds;
        for (int p = 0; p < PHASES; p++)
            out->phase_ms[p] =
                1e3 * all[r].part[p] / n > out->phase_ms[p] ? 1e3 * all[r].part[p] / n : out->phase_ms[p];
        out->rows += all[r].rows / n;
        out->fresh += all[r].fresh / n;
        out->live += all[r].live / n;
        out->dispatched += all[r].dispatched / n;
        out->combined += all[r].combined / n;
        out->bytes += least.bytes / n;
        out->flops += least.flops / n;
        committed += all[r].committed;
        active += all[r].active;
    }
    cost least = cost_sum(all[heaviest].least);
    bool known = least.seconds > 0;
    out->ms = 1e3 * seconds / x->forwards;
    out->ms_block = committed > 0 ? 1e3 * seconds * x->ask->batch * BLOCK / committed : NAN;
    out->floor_ms = known ? 1e3 * least.seconds / n : NAN;
    out->percent = 100 * out->floor_ms / out->ms;
    for (int p = 0; p < PHASES; p++)
        out->phase_floor_ms[p] = known ? 1e3 * all[heaviest].least[p].seconds / n : NAN;
    out->tokens_per_second = committed > 0 ? committed / seconds : NAN;
    out->idle = 1 - active / (n * x->ask->batch);
    out->planned = planned(x);
    out->taken = out->ratio = out->floor_ratio = NAN;
}

status trial_run(bench_row *out, const trial_setup *s, const trial_ask *a)
{
    status st = OK;
    world *w = s->world;
    trial x = {.with = s, .ask = a};
    share mine = {0}, *all = calloc((size_t)w->size, sizeof *all);
    TRY(w->agree(w, all ? OK : status_fail(FAILED, __FILE__, __LINE__, "out of memory")));
    TRY(w->agree(w, open_batch(&x)));
    *s->together = false;
    if (s->heart)
        heartbeat_stage(s->heart, WATCH_RUN);
    TRY(time_forwards(&x));
    TRY(time_phases(&x));
    TRY(look_into(&x, &mine));
    mine.seconds = x.seconds;
    memcpy(mine.part, x.part, sizeof mine.part);
    TRY(w->gather(w, all, &mine, sizeof mine));
    if (w->rank == 0) {
        fill(out, &x, all, w->size);
        TRY(device_taken(s->backend, s->gpu, &out->taken));
    }
    *s->together = true;
    if (s->heart)
        heartbeat_stage(s->heart, WATCH_LOAD);
    snprintf(out->lane, sizeof out->lane, "%s", x.lane->name);
out:
    if (*s->together) /* else the job is taken down: a device frees nothing that still waits for the other ranks */
        close_batch(&x);
    free(all);
    return st;
}
