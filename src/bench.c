#include "src/bench.h"

#include "src/base/json.h"
#include "src/exec/executor.h"
#include "src/model/config.h"
#include "src/options.h"
#include "src/plan/plan.h"
#include "src/transport.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BLOCK = 32, BATCHES = 16, WARM_UP = 3, PATTERN_STEPS = 64, CONNECT_SECONDS = 60 };

static const char *const modes[] = {"epoch", "full", "no-atlas", "no-lsp", "no-lane"}; /* as plan_mode */

/* ---- what is asked */

typedef struct ask {
    const char *shape, *schedule;
    int device, transport, combine; /* of options.h */
    bool steady;            /* nothing commits, every row of every block is live */
    plan_settings plan;
    int32_t batch[BATCHES], batch_count; /* of each rank */
    int32_t prefix, iterations, blocks, layers, support, cohort, seed;
    double skew;
} ask;

static const model_config mini = {.layers = 20,
                                  .hidden = 2048,
                                  .vocab = 157184,
                                  .max_positions = 32768,
                                  .heads = 16,
                                  .kv_heads = 4,
                                  .head_dim = 128,
                                  .rotary_dim = 64,
                                  .rope_theta = 600000,
                                  .norm_eps = 1e-6f,
                                  .qk_norm = true,
                                  .dense_layers = 1,
                                  .dense_inner = 5120,
                                  .experts = 256,
                                  .top_k = 8,
                                  .expert_inner = 512,
                                  .shared_inner = 512,
                                  .groups = 8,
                                  .top_groups = 4,
                                  .routed_scale = 2.5f,
                                  .normalise = true,
                                  .expert_bias = true};

/* Shapes by name; any other name is a folder with a config.json. LLaDA-MoE is a stand-in: its sizes, but block-causal
 * and with the router of the other family. */
static status find_shape(model_config *c, const char *name)
{
    *c = mini;
    if (strcmp(name, "llada2-mini") == 0)
        return OK;
    if (strcmp(name, "llada2-flash") == 0) {
        c->layers = 32;
        c->hidden = 4096;
        c->heads = 32;
        c->dense_inner = 9216;
        c->expert_inner = c->shared_inner = 1024;
        return OK;
    }
    if (strcmp(name, "llada-moe") == 0) {
        c->layers = 16;
        c->heads = c->kv_heads = 16;
        c->rotary_dim = 128;
        c->dense_layers = 0;
        c->vocab = 157184;
        c->experts = 64;
        c->expert_inner = 1024;
        c->shared_inner = 0;
        c->groups = c->top_groups = 1;
        return OK;
    }
    return model_config_open(c, name);
}

/* The commit schedule: one pattern a block that the prompt does not reach into. */
static status read_schedule(int32_t **pace, int32_t *patterns, const char *path)
{
    status st = OK;
    json_t *all = NULL;
    const json_t *blocks;
    *patterns = 0;
    TRY(json_file(&all, path, 1 << 24));
    blocks = json_object_get(all, "blocks");
    if (!json_is_array(blocks) || json_array_size(blocks) == 0)
        FAIL(BAD_INPUT, "%s: \"blocks\" is no list of blocks", path);
    *pace = calloc(json_array_size(blocks) * PATTERN_STEPS, sizeof **pace);
    if (!*pace)
        FAIL(FAILED, "out of memory");
    for (size_t i = 0; i < json_array_size(blocks); i++) {
        const json_t *b = json_array_get(blocks, i), *commits = json_object_get(b, "commits");
        size_t steps = json_array_size(commits), sum = 0;
        if (json_integer_value(json_object_get(b, "given")) != 0)
            continue;
        for (size_t k = 0; k < steps && k < PATTERN_STEPS; k++) {
            (*pace)[*patterns * PATTERN_STEPS + (int32_t)k] = (int32_t)json_integer_value(json_array_get(commits, k));
            sum += (size_t)json_integer_value(json_array_get(commits, k));
        }
        if (sum != BLOCK)
            FAIL(BAD_INPUT, "%s: block %zu commits %zu positions, want %d", path, i, sum, BLOCK);
        ++*patterns;
    }
    if (*patterns == 0)
        FAIL(BAD_INPUT, "%s: no block of which nothing is given", path);
out:
    json_decref(all);
    return st;
}

static int pattern_steps(const int32_t *pattern)
{
    int n = 0;
    while (n < PATTERN_STEPS && pattern[n] > 0)
        n++;
    return n;
}

/* ---- one batch */

/* What the timed forwards of a rank came to, and were made of: sums over them. */
typedef struct tally {
    double rows, fresh, live, distinct, floor, committed; /* distinct: mean over sparse layers, of all ranks */
    double seconds, wall, part[PHASES];
    double dispatched, combined; /* bytes to other ranks */
} tally;

typedef struct benchmark {
    const ask *ask;
    const model_config *config;
    world *world;
    bool gpu;
    transport_ask way;
    nccl_comm *joined;
    backend *backend;
    weights *weights;
    sum_tree *tree;
    double copied, multiplied; /* ceilings; 0: not known */
    int32_t *pace, patterns;
    /* of this batch */
    executor_rule rule;
    lane *lane;
    executor *executor;
    void *pace_slab;
    int32_t forwards;
    tally t;
} benchmark;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* All slots at the start of a block behind the same prefix; tokens are random, so that rows are as unlike as a text's.
 */
static status reset(benchmark *x)
{
    status st = OK;
    executor *e = x->executor;
    const int32_t slots_here = x->rule.slot_count, blocks = e->slots.max_blocks, first = x->ask->prefix / BLOCK;
    slot *s = calloc((size_t)slots_here, sizeof *s);
    int32_t *token = calloc((size_t)slots_here * (size_t)e->slots.token.cols, sizeof *token);
    int32_t *page = calloc((size_t)slots_here * (size_t)blocks, sizeof *page);
    if (!s || !token || !page)
        FAIL(FAILED, "out of memory");
    for (int32_t i = 0; i < slots_here; i++)
        s[i] = (slot){.state = SLOT_WAITING,
                      .prompt_tokens = x->ask->prefix,
                      .end = blocks * BLOCK,
                      .sealed = first,
                      .block = first,
                      .cache_block = -1};
    for (int64_t i = 0; i < slots_here * e->slots.token.cols; i++)
        token[i] = (int32_t)((random_at((uint64_t)(x->ask->seed + x->world->rank), (uint64_t)i) + 1) / 2 * (float)(x->config->vocab - 1));
    for (int32_t i = 0; i < slots_here * blocks; i++)
        page[i] = i;
    TRY(x->backend->upload(x->backend, &e->slots.slot, s, U8));
    TRY(x->backend->upload(x->backend, &e->slots.token, token, I32));
    TRY(x->backend->upload(x->backend, &e->slots.page, page, I32));
out:
    free(s);
    free(token);
    free(page);
    return st;
}

#ifdef EPOCH_CUDA
static status open_backend(benchmark *x)
{
    return x->gpu ? backend_cuda_open(&x->backend, x->world->local_rank) : backend_cpu_open(&x->backend, 0);
}

static status measure_ceilings(benchmark *x)
{
    return x->gpu ? backend_cuda_ceilings(x->backend, &x->copied, &x->multiplied) : OK;
}

static int gpus(void)
{
    return backend_cuda_devices();
}
#else
static status open_backend(benchmark *x)
{
    return backend_cpu_open(&x->backend, 0);
}

static status measure_ceilings(benchmark *x)
{
    (void)x;
    return OK;
}

static int gpus(void)
{
    return 0;
}
#endif

/* How many forwards are timed. Lock-step cohorts: until the last slot is through its blocks. Cohorts of one: as long as
 * every slot is still busy, as it would be in a run that refills them. */
static int32_t count_forwards(const benchmark *x)
{
    if (x->ask->steady)
        return x->ask->iterations;
    int32_t n = x->rule.slot_count, cohort = x->rule.block.cohort, first = x->ask->prefix / BLOCK, most = 0,
            least = 1 << 30;
    for (int32_t c = 0; c < n; c += cohort) {
        int32_t all = 0;
        for (int32_t b = first; b < first + x->ask->blocks; b++) {
            int32_t longest = 0;
            for (int32_t i = c; i < c + cohort && i < n; i++) {
                int64_t pattern = (i + (int64_t)b * n) % x->patterns;
                int32_t steps = pattern_steps(x->pace + pattern * PATTERN_STEPS);
                longest = steps > longest ? steps : longest;
            }
            all += longest;
        }
        most = all > most ? all : most;
        least = all < least ? all : least;
    }
    return cohort > 1 ? most : least;
}

static status open_batch(benchmark *x, int32_t slot_count)
{
    status st = OK;
    const ask *a = x->ask;
    plan_settings p = a->plan;
    p.cohort = a->cohort;
    x->rule = (executor_rule){.slot_count = slot_count, .max_tokens = a->prefix + a->blocks * BLOCK};
    x->rule.page_count = slot_count * (x->rule.max_tokens / BLOCK);
    TRY(plan_rules(&x->rule.block, &x->rule.atlas, &p, x->config, slot_count));
    lane_rule lr = {.hidden = x->config->hidden, .top_k = x->config->top_k, .max_rows = executor_max_rows(&x->rule),
                    .tree = x->tree, .payload = x->backend->activation, .combine = x->way.combine};
    TRY(transport_open(&x->lane, &x->way, &lr, x->backend, x->world, x->joined));
    TRY(executor_open(&x->executor, &x->rule, x->config, x->weights, x->backend, x->lane));
    TRY(x->backend->random(x->backend, &x->executor->kv.k, (uint64_t)a->seed + 1, 1.7f));
    TRY(x->backend->random(x->backend, &x->executor->kv.v, (uint64_t)a->seed + 2, 1.7f));
    tensor pace = tensor_of(NULL, I32, x->patterns, PATTERN_STEPS);
    TRY(x->backend->reserve(x->backend, &x->pace_slab, (size_t)(pace.rows * pace.cols) * sizeof(int32_t)));
    pace.data = x->pace_slab;
    TRY(x->backend->upload(x->backend, &pace, x->pace, I32));
    x->executor->slots.pace = pace;
    x->forwards = count_forwards(x);
out:
    return st;
}

static void close_batch(benchmark *x)
{
    executor_close(x->executor);
    if (x->lane)
        x->lane->close(x->lane);
    if (x->pace_slab)
        x->backend->release(x->backend, x->pace_slab);
    x->executor = NULL;
    x->lane = NULL;
    x->pace_slab = NULL;
}

/* ---- the floor */

/* Seconds that one op needs at least: its bytes, each input read and each output written once, or its FLOPs. */
static double at_least(const benchmark *x, double bytes, double flops)
{
    double moved = bytes / x->copied, multiplied = flops / x->multiplied;
    return moved > multiplied ? moved : multiplied;
}

/* rows by w[outs, inner], BF16 */
static double product_floor(const benchmark *x, double rows, double outs, double inner)
{
    return at_least(x, 2 * (outs * inner + rows * (outs + inner)), 2 * rows * outs * inner);
}

/* One forward: r rows in `spans` blocks that see `seen` keys in all, f of them fresh, l live; `touched` experts of this
 * rank and `edges` to them, summed over the sparse layers. */
static double forward_floor(const benchmark *x, double r, double seen, double f, double l, double touched, double edges)
{
    const model_config *c = x->config;
    double h = c->hidden, q = (double)c->heads * c->head_dim, kv = (double)c->kv_heads * c->head_dim, sum = 0;
    double sparse = c->layers - c->dense_layers;
    sum += at_least(x, 4 * r * h, 0); /* embedding */
    sum += c->layers * product_floor(x, r, q + 2 * kv, h);
    sum += c->layers * at_least(x, 2 * (2 * r * (q + 2 * kv)), 0); /* norms, rotary, K/V */
    sum += c->layers * at_least(x, 2 * (2 * seen * kv + 2 * r * q), 4 * seen * BLOCK * q);           /* attention */
    sum += c->layers * product_floor(x, r, h, q);
    sum += c->layers * 2 * at_least(x, 2 * 4 * r * h, 0); /* residual and norm */
    sum += c->dense_layers * (product_floor(x, r, 2.0 * c->dense_inner, h) + product_floor(x, r, h, c->dense_inner));
    sum += sparse *
           at_least(x, 4.0 * c->experts * h + f * (2 * h + 4.0 * c->experts), 2 * f * c->experts * h); /* router */
    sum += at_least(x, 2 * (touched * 3 * h * c->expert_inner + sparse * 2 * f * h), 6 * edges * h * c->expert_inner);
    sum += sparse * at_least(x, 2 * 2 * (r - f) * h, 0); /* rows out of the cache */
    if (c->shared_inner)
        sum += sparse * (product_floor(x, r, 2.0 * c->shared_inner, h) + product_floor(x, r, h, c->shared_inner));
    return sum + at_least(x, 2 * (c->vocab * h + l * h), 2 * l * c->vocab * h);
}

/* ---- what the forwards are made of */

/* Of the newest routed layer: different experts that all ranks' rows chose, those of them that this rank has, and the
 * edges to these. */
typedef struct touched {
    double distinct, here, edges;
} touched;

static status count_touched(benchmark *x, int32_t fresh, int32_t *ids, touched *sum)
{
    status st = OK;
    enum { MOST = SUM_TREE_EXPERTS };
    world *w = x->world;
    int32_t chosen[MOST] = {0}, *all = NULL;
    size_t bytes = sizeof *chosen * (size_t)x->config->experts;
    tensor used = tensor_rows(&x->executor->a.ids, 0, fresh);
    TRY(x->backend->download(x->backend, ids, &used));
    for (int64_t i = 0; i < fresh * used.cols; i++)
        if (ids[i] >= 0)
            chosen[ids[i]]++;
    if (w->size > 1) {
        all = malloc(bytes * (size_t)w->size);
        if (!all)
            FAIL(FAILED, "out of memory");
        TRY(w->gather(w, all, chosen, bytes));
        for (int r = 1; r < w->size && w->rank == 0; r++)
            for (int e = 0; e < x->config->experts; e++)
                all[e] += all[r * x->config->experts + e];
        TRY(w->bcast(w, all, bytes, 0));
        memcpy(chosen, all, bytes);
    }
    for (int e = 0; e < x->config->experts; e++) {
        bool here = x->tree->rank_of[e] == w->rank;
        sum->distinct += chosen[e] > 0;
        sum->here += here && chosen[e] > 0;
        sum->edges += here ? chosen[e] : 0;
    }
out:
    free(all);
    return st;
}

/* The same forwards again, layer by layer with a look between: nothing of this is timed. */
static status look(benchmark *x)
{
    status st = OK;
    executor *e = x->executor;
    backend *b = x->backend;
    activations *v = &e->a;
    int sparse = x->config->layers - x->config->dense_layers;
    int32_t *ids = malloc(sizeof *ids * (size_t)(v->ids.rows * v->ids.cols + 1));
    span *spans = malloc(sizeof *spans * (size_t)(e->batch.span.rows + 1));
    slot_report *rep = malloc(sizeof *rep * (size_t)x->rule.slot_count);
    tally *t = &x->t;
    t->rows = t->fresh = t->live = t->distinct = t->floor = t->committed = 0;
    if (!ids || !spans || !rep)
        FAIL(FAILED, "out of memory");
    TRY(reset(x));
    int32_t times = x->ask->steady ? 1 : x->forwards;
    for (int32_t n = 0; n < times; n++) {
        int32_t count[4];
        touched touch = {0};
        double seen = 0;
        TRY(executor_begin(e));
        TRY(b->download(b, count, &e->batch.count));
        for (int l = 0, s = 0; l < x->config->layers; l++) {
            TRY(attention_layer(e, l));
            if (!e->weights->layer[l].sparse) {
                TRY(dense_layer(e, l));
                continue;
            }
            TRY(moe_layer(e, l, s++));
            TRY(count_touched(x, count[2], ids, &touch));
        }
        TRY(executor_end(e));
        TRY(b->download(b, spans, &e->batch.span));
        TRY(executor_reports(e, rep));
        for (int32_t i = 0; i < count[1]; i++)
            seen += (spans[i].block + 1) * BLOCK;
        for (int32_t i = 0; i < x->rule.slot_count; i++) {
            t->committed += __builtin_popcountll(rep[i].committed);
            if (rep[i].broken)
                FAIL(FAILED, "the logits of slot %d are not finite", i);
        }
        t->rows += count[0];
        t->fresh += count[2];
        t->live += count[3];
        t->distinct += touch.distinct / (sparse ? sparse : 1);
        if (x->copied > 0)
            t->floor += forward_floor(x, count[0], seen, count[2], count[3], touch.here, touch.edges);
    }
    double *const sums[] = {&t->rows, &t->fresh, &t->live, &t->distinct, &t->floor, &t->committed};
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++)
        *sums[i] *= (double)x->forwards / times;
out:
    free(ids);
    free(spans);
    free(rep);
    return st;
}

static status time_forwards(benchmark *x)
{
    status st = OK;
    backend *b = x->backend;
    world *w = x->world;
    tally *t = &x->t;
    lane_traffic traffic;
    *t = (tally){0};
    TRY(reset(x));
    for (int i = 0; i < WARM_UP; i++)
        TRY(executor_forward(x->executor));
    TRY(reset(x));
    TRY(b->sync(b));
    TRY(x->lane->traffic(x->lane, &traffic));
    TRY(b->mark(b, PHASE_HOST));
    TRY(b->laps(b, t->part));
    memset(t->part, 0, sizeof t->part);
    TRY(w->agree(w, OK)); /* all begin together */
    double from = now();
    for (int32_t i = 0; i < x->forwards; i++)
        TRY(executor_forward(x->executor));
    TRY(b->sync(b));
    t->wall = now() - from;
    TRY(b->laps(b, t->part));
    for (int p = 0; p < PHASES; p++)
        t->seconds += t->part[p];
    TRY(x->lane->traffic(x->lane, &traffic));
    t->dispatched = (double)traffic.bytes_dispatched;
    t->combined = (double)traffic.bytes_combined;
out:
    return st;
}

/* ---- tables */

static void print_head(const benchmark *x)
{
    const ask *a = x->ask;
    const model_config *c = x->config;
    char cohort[16];
    snprintf(cohort, sizeof cohort, "%d", a->cohort);
    printf("# synthetic: random weights and tokens, seed %d; no model's output\n", a->seed);
    if (x->world->size > 1)
        printf("# %d ranks, transport %s, combine %s; batch and rows are a rank's, ms the slowest rank's, tokens/s all "
               "ranks'\n", x->world->size, x->lane->name, x->way.combine == BF16 ? "bf16" : "fp32");
    printf("# shape %s%s: %d layers, hidden %d, %d experts, top %d; device %s; mode %s, cohort %s, prefix %d\n",
           a->shape, strcmp(a->shape, "llada-moe") == 0 ? " (block-causal stand-in)" : "", c->layers, c->hidden,
           c->experts, c->top_k, x->backend->name, modes[a->plan.mode], a->cohort ? cohort : "batch", a->prefix);
    if (a->steady)
        printf("# nothing commits: all rows live, %d forwards\n", a->iterations);
    else
        printf("# commit schedule %s, %d patterns; %d blocks a slot\n", a->schedule, x->patterns, a->blocks);
    if (a->support)
        printf("# support of %d experts, never rebuilt\n", a->support);
    if (a->skew > 0)
        printf("# router bias in [-%g, %g)\n", a->skew, a->skew);
    if (x->copied > 0)
        printf("# ceilings measured here: %.2f TB/s copied, %.0f TFLOP/s multiplied (BF16, 8192)\n", x->copied / 1e12,
               x->multiplied / 1e12);
    printf("%6s %9s %9s %9s %6s %9s %10s %8s %8s %8s %8s\n", "batch", "forwards", "ms/iter", "floor", "%", "wall ms",
           "tokens/s", "rows", "fresh", "live", "experts");
}

/* t: of the slowest rank; tokens committed by all ranks. */
static void print_batch(const benchmark *x, const tally *t, double committed)
{
    double n = x->forwards, ms = 1e3 * t->seconds / n, least = 1e3 * t->floor / n;
    printf("%6d %9d %9.3f %9.3f %6.1f %9.3f %10.0f %8.0f %8.0f %8.0f %8.1f\n", x->rule.slot_count, x->forwards, ms,
           least, 100 * least / ms, 1e3 * t->wall / n, committed / t->seconds, t->rows / n, t->fresh / n, t->live / n,
           t->distinct / n);
    printf("       ");
    for (int p = 0; p < PHASES; p++)
        if (t->part[p] > 0)
            printf(" %s %.3f", phase_names[p], 1e3 * t->part[p] / n);
    printf("\n");
    if (x->world->size > 1) {
        double there = t->part[PHASE_DISPATCH], back = t->part[PHASE_COMBINE];
        printf("        lane %.1f %% of an iteration; dispatch %.3f MB at %.1f GB/s, combine %.3f MB at %.1f GB/s\n",
               100 * (there + back) / t->seconds, t->dispatched / n / 1e6, there > 0 ? t->dispatched / there / 1e9 : 0,
               t->combined / n / 1e6, back > 0 ? t->combined / back / 1e9 : 0);
    }
    fflush(stdout);
}

/* Rank 0 prints what all ranks came to. */
static status report(benchmark *x)
{
    status st = OK;
    world *w = x->world;
    tally *all = calloc((size_t)w->size, sizeof *all);
    if (!all)
        FAIL(FAILED, "out of memory");
    TRY(w->gather(w, all, &x->t, sizeof x->t));
    if (w->rank == 0) {
        int slowest = 0;
        double committed = 0, floor = 0;
        for (int r = 0; r < w->size; r++) {
            slowest = all[r].seconds > all[slowest].seconds ? r : slowest;
            floor = all[r].floor > floor ? all[r].floor : floor;
            committed += all[r].committed;
        }
        all[slowest].floor = floor; /* all wait for the rank that has most to do */
        print_batch(x, &all[slowest], committed);
    }
out:
    free(all);
    return st;
}

/* ---- the command */

static void help(void)
{
    printf("usage: [mpirun -np R] epoch bench [options]\n\n"
           "Forwards of a real shape with random weights: ms an iteration beside its floor. All of it is synthetic.\n\n"
           "  --shape NAME       llada2-mini, llada2-flash, llada-moe (block-causal stand-in), or a folder with "
           "config.json [llada2-mini]\n"
           "  --layers N         only the first N layers [all]\n"
           "  --device D         auto, cpu or cuda [auto]\n"
           "  --mode M           epoch, full, no-atlas, no-lsp, no-lane [full]\n"
           "  --transport T      between ranks: auto, self, mpi or nccl [auto]\n"
           "  --combine F        partial sums between GPUs: fp32 or bf16 [fp32]\n"
           "  --batch LIST       sequences in flight on each rank, for example 1,8,32 [1,8,32,128,256,512]\n"
           "  --prefix N         positions before the active block, a multiple of 32 [256]\n"
           "  --schedule FILE    commits of each iteration (tests/bench/schedule.json); without: nothing commits, all "
           "rows live\n"
           "  --iterations N     forwards timed without a schedule [20]\n"
           "  --blocks N         blocks of each sequence with a schedule [3]\n"
           "  --cohort N         sequences that share supports in lock-step; 0: the batch [1]\n"
           "  --support N        supports of N experts, never rebuilt; without: as the Atlas builds them\n"
           "  --skew X           a random router bias up to X, so that some experts are liked [0]\n"
           "  --seed N           of all that is random [1]\n");
}

static status parse_number(double *out, const char *flag, const char *text, double low, double high)
{
    status st = OK;
    char *end;
    errno = 0;
    *out = strtod(text, &end);
    if (end == text || *end || errno || !(*out >= low && *out <= high))
        FAIL(BAD_INPUT, "--%s is \"%s\", want a number from %g to %g", flag, text, low, high);
out:
    return st;
}

static status parse_batches(ask *a, const char *text)
{
    status st = OK;
    a->batch_count = 0;
    for (const char *at = text; *at;) {
        char *end;
        long n = strtol(at, &end, 10);
        if (end == at || n < 1 || n > 1 << 16 || (*end && *end != ',') || a->batch_count == BATCHES)
            FAIL(BAD_INPUT, "--batch is \"%s\", want at most %d numbers from 1 to 65536 with commas between", text,
                 BATCHES);
        a->batch[a->batch_count++] = (int32_t)n;
        at = *end ? end + 1 : end;
    }
out:
    return st;
}

static status choose(int *out, const char *flag, const char *text, const char *const *names, int count)
{
    for (int i = 0; i < count; i++)
        if (strcmp(text, names[i]) == 0) {
            *out = i;
            return OK;
        }
    return status_fail(BAD_INPUT, __FILE__, __LINE__, "--%s is \"%s\": no such choice (epoch bench --help)", flag,
                       text);
}

static status parse(ask *a, bool *helped, int argc, char **argv)
{
    enum {
        SHAPE = 256,
        LAYERS,
        DEVICE,
        MODE,
        BATCH,
        PREFIX,
        SCHEDULE,
        ITERATIONS,
        BLOCKS,
        COHORT,
        SUPPORT,
        SKEW,
        SEED,
        TRANSPORT,
        COMBINE,
        HELP
    };
    static const struct option flags[] = {
        {"shape", required_argument, NULL, SHAPE},       {"layers", required_argument, NULL, LAYERS},
        {"device", required_argument, NULL, DEVICE},     {"mode", required_argument, NULL, MODE},
        {"batch", required_argument, NULL, BATCH},       {"prefix", required_argument, NULL, PREFIX},
        {"schedule", required_argument, NULL, SCHEDULE}, {"iterations", required_argument, NULL, ITERATIONS},
        {"blocks", required_argument, NULL, BLOCKS},     {"cohort", required_argument, NULL, COHORT},
        {"support", required_argument, NULL, SUPPORT},   {"skew", required_argument, NULL, SKEW},
        {"seed", required_argument, NULL, SEED},         {"transport", required_argument, NULL, TRANSPORT},
        {"combine", required_argument, NULL, COMBINE},   {"help", no_argument, NULL, HELP},
        {NULL, 0, NULL, 0}};
    int32_t *const whole[SEED - SHAPE + 1] = {
        [LAYERS - SHAPE] = &a->layers, [PREFIX - SHAPE] = &a->prefix,   [ITERATIONS - SHAPE] = &a->iterations,
        [BLOCKS - SHAPE] = &a->blocks, [COHORT - SHAPE] = &a->cohort, [SUPPORT - SHAPE] = &a->support,
        [SEED - SHAPE] = &a->seed};
    status st = OK;
    static const char *const devices[] = {"auto", "cpu", "cuda"}, *const combines[] = {"fp32", "bf16"},
                      *const transports[] = {"auto", "self", "mpi", "nccl"}; /* as in options.h */
    int flag, mode = PLAN_FULL;
    double n;
    *a = (ask){.shape = "llada2-mini",
               .batch = {1, 8, 32, 128, 256, 512},
               .batch_count = 6,
               .prefix = 256,
               .iterations = 20,
               .blocks = 3,
               .cohort = 1,
               .seed = 1};
    a->plan = (plan_settings){.block_size = BLOCK,
                              .max_steps = 1 << 30,
                              .prefill_blocks = 1,
                              .eos_id = -1,
                              .threshold = 0.95f,
                              .refresh = 5,
                              .coverage = 0.98f,
                              .share = 0.98f,
                              .mass = 1,
                              .extra = -1,
                              .budget = -1,
                              .step = -1};
    opterr = 0;
    optind = 1;
    while ((flag = getopt_long(argc, argv, "", flags, NULL)) != -1) {
        const char *name = flag >= SHAPE ? flags[flag - SHAPE].name : "";
        if (flag == SHAPE)
            a->shape = optarg;
        else if (flag == DEVICE)
            TRY(choose(&a->device, name, optarg, devices, 3));
        else if (flag == TRANSPORT)
            TRY(choose(&a->transport, name, optarg, transports, 4));
        else if (flag == COMBINE)
            TRY(choose(&a->combine, name, optarg, combines, 2));
        else if (flag == MODE)
            TRY(choose(&mode, name, optarg, modes, 5));
        else if (flag == BATCH)
            TRY(parse_batches(a, optarg));
        else if (flag == SCHEDULE)
            a->schedule = optarg;
        else if (flag == HELP)
            *helped = true;
        else if (flag == SKEW)
            TRY(parse_number(&a->skew, name, optarg, 0, 100));
        else if (flag >= SHAPE) {
            TRY(parse_number(&n, name, optarg, flag == COHORT ? 0 : 1, 1 << 20));
            *whole[flag - SHAPE] = (int32_t)n;
        } else
            FAIL(BAD_INPUT, "epoch bench: \"%s\" is not understood (epoch bench --help)", argv[optind - 1]);
    }
    if (optind < argc)
        FAIL(BAD_INPUT, "epoch bench: \"%s\" is not an option (epoch bench --help)", argv[optind]);
    if (a->prefix % BLOCK)
        FAIL(BAD_INPUT, "--prefix is %d, want a multiple of %d", a->prefix, BLOCK);
    a->steady = !a->schedule;
    a->plan.mode = (plan_mode)mode;
    if (a->support) {
        a->plan.budget = a->support;
        a->plan.coverage = 1e-6f; /* every row is covered: nothing is added, nothing rebuilt */
    }
out:
    return st;
}

static status choose_device(benchmark *x)
{
    status st = OK;
    const ask *a = x->ask;
#ifndef EPOCH_CUDA
    if (a->device == DEVICE_CUDA)
        FAIL(BAD_INPUT, "--device cuda: this program was built without CUDA (-DEPOCH_CUDA=ON)");
#endif
    if (a->device == DEVICE_AUTO && a->transport != TRANSPORT_MPI && (x->world->size == 1 || transport_joins()))
        TRY(transport_gpus(&x->gpu, x->world, gpus()));
    x->gpu |= a->device == DEVICE_CUDA;
    x->way = (transport_ask){.transport = a->transport,
                             .combine = a->combine == COMBINE_BF16 ? BF16 : F32,
                             .cuda = x->gpu,
                             .ranks = x->world->size,
                             .joins = transport_joins(),
                             .deadline = CONNECT_SECONDS};
    TRY(transport_check(&x->way));
out:
    return st;
}

/* All but the forwards: every rank comes to the same end. */
static status prepare(benchmark *x)
{
    status st = OK;
    const ask *a = x->ask;
    world *w = x->world;
    st = sum_tree_open(&x->tree, x->config->experts, x->config->groups, w->size);
    if (st == OK && !a->steady)
        st = read_schedule(&x->pace, &x->patterns, a->schedule);
    if (st == OK && a->steady) {
        x->patterns = 1;
        x->pace = calloc(PATTERN_STEPS, sizeof *x->pace);
        if (!x->pace)
            st = status_fail(FAILED, __FILE__, __LINE__, "out of memory");
    }
    TRY(w->agree(w, st));
    TRY(w->agree(w, choose_device(x)));
    TRY(w->agree(w, open_backend(x)));
    TRY(w->agree(w, transport_join(&x->joined, &x->way, w, x->backend)));
    TRY(w->agree(w, measure_ceilings(x)));
    weight_rule wr = {.matrices = x->gpu ? BF16 : F32, .tree = x->tree, .rank = w->rank};
    TRY(w->agree(w, weights_random(&x->weights, x->config, x->backend, &wr, (uint64_t)a->seed, (float)a->skew)));
out:
    return st;
}

status bench(world *w, int argc, char **argv, bool *together)
{
    status st = OK;
    ask a;
    model_config c = {0};
    benchmark x = {.ask = &a, .config = &c, .world = w};
    bool helped = false;
    *together = true;
    st = parse(&a, &helped, argc, argv);
    if (st == OK && !helped)
        st = find_shape(&c, a.shape);
    TRY(w->agree(w, st));
    if (helped) {
        if (w->rank == 0)
            help();
        goto out;
    }
    if (a.layers > 0 && a.layers < c.layers)
        c.layers = a.layers;
    a.plan.mask_id = c.vocab - 1;
    TRY(prepare(&x));
    for (int32_t i = 0; i < a.batch_count; i++) {
        TRY(w->agree(w, open_batch(&x, a.batch[i])));
        if (w->rank == 0 && i == 0)
            print_head(&x);
        *together = false;
        TRY(time_forwards(&x));
        TRY(look(&x));
        TRY(report(&x));
        *together = true;
        close_batch(&x);
    }
out:
    if (!*together && w->at_abort)
        w->at_abort(w->with);
    close_batch(&x);
    transport_leave(x.joined);
    weights_close(x.weights);
    if (x.backend)
        x.backend->close(x.backend);
    sum_tree_close(x.tree);
    model_config_close(&c);
    free(x.pace);
    return st;
}
