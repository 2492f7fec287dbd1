#include "src/bench.h"

#include "results/bench_file.h"
#include "src/base/json.h"
#include "src/device.h"
#include "src/options.h"
#include "src/plan/scheduler.h"
#include "src/trial.h"
#include "src/watch.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LIST = 16, MODES = 5, CONNECT_SECONDS = 60 };

static const char *const modes[MODES] = {"epoch", "full", "no-atlas", "no-lsp", "no-lane"}; /* as plan_mode */

/* ---- what is asked */

typedef struct list {
    int32_t at[LIST], count;
} list;

typedef struct ask {
    const char *shape, *schedule, *out;
    int device, transport, combine; /* of options.h */
    list batch, prefix, cohort, support, mode;
    bool per_rank; /* batch: of each rank, not of the job */
    int32_t iterations, blocks, layers, seed;
    double skew, timeout;
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

/* Shapes by name; any other name is a config.json, or a folder that holds one. LLaDA-MoE is a stand-in: its sizes, but
 * block-causal and with the router of the other family. */
static status find_shape(model_config *c, const char *name)
{
    struct stat is;
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
    if (stat(name, &is) != 0)
        return status_fail(BAD_INPUT, __FILE__, __LINE__,
                           "--shape is \"%s\", want llada2-mini, llada2-flash, llada-moe, a config.json, or its folder",
                           name);
    return S_ISREG(is.st_mode) ? model_config_read(c, name) : model_config_open(c, name);
}

static bool stand_in(const ask *a)
{
    return strcmp(a->shape, "llada-moe") == 0;
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
            json_int_t n = json_integer_value(json_array_get(commits, k));
            if (n < 1 || n > TRIAL_BLOCK)
                FAIL(BAD_INPUT, "%s: iteration %zu of block %zu commits %lld positions, want 1 to %d", path, k, i,
                     (long long)n, TRIAL_BLOCK);
            (*pace)[*patterns * PATTERN_STEPS + (int32_t)k] = (int32_t)n;
            sum += (size_t)n;
        }
        if (sum != TRIAL_BLOCK)
            FAIL(BAD_INPUT, "%s: block %zu commits %zu positions, want %d", path, i, sum, TRIAL_BLOCK);
        ++*patterns;
    }
    if (*patterns == 0)
        FAIL(BAD_INPUT, "%s: no block of which nothing is given", path);
out:
    json_decref(all);
    return st;
}

/* ---- the settings of one row */

static bool restricts(int32_t mode)
{
    return mode != PLAN_FULL && mode != PLAN_NO_ATLAS;
}

/* A forced support never changes: all rows may stay below the floor, so that the test always holds, and nothing is
 * added. */
static plan_settings settings(const model_config *c, int32_t mode, int32_t cohort, int32_t support)
{
    return (plan_settings){.mode = (plan_mode)mode,
                           .block_size = TRIAL_BLOCK,
                           .max_steps = 1 << 30,
                           .prefill_blocks = 1,
                           .mask_id = c->vocab - 1,
                           .eos_id = -1,
                           .threshold = 0.95f,
                           .refresh = 5,
                           .cohort = cohort,
                           .coverage = support ? 1e-6f : 0.98f,
                           .share = support ? 0 : 0.98f,
                           .mass = 1,
                           .extra = -1,
                           .budget = support ? support : -1,
                           .step = -1};
}

/* ---- text */

static void print_head(const trial_setup *s, const ask *a, const char *lane_name)
{
    const model_config *c = s->config;
    printf("# synthetic: random weights and tokens, seed %d; no model's output\n", a->seed);
    printf("# shape %s%s: %d layers, hidden %d, %d experts, top %d; %s (%s)\n", a->shape,
           stand_in(a) ? " (block-causal stand-in for LLaDA-MoE)" : "", c->layers, c->hidden, c->experts, c->top_k,
           s->backend->name, s->backend->device);
    printf(
        "# %d rank%s, transport %s, combine %s; batch and rows are the job's, times the slowest rank's, the floor that "
        "of the rank with most to do\n",
        s->world->size, s->world->size > 1 ? "s" : "", lane_name, s->way.combine == BF16 ? "bf16" : "fp32");
    if (a->schedule)
        printf("# commit schedule %s, %d patterns; %d blocks a sequence, more where there are several cohorts\n",
               a->schedule, s->patterns, a->blocks);
    else
        printf("# nothing commits: all rows live, %d forwards\n", a->iterations);
    if (a->skew > 0)
        printf("# router bias in [-%g, %g)\n", a->skew, a->skew);
    if (s->most.bytes > 0)
        printf("# ceilings measured here: %.2f TB/s copied, %.0f TFLOP/s multiplied (BF16, 8192)\n",
               s->most.bytes / 1e12, s->most.flops / 1e12);
    printf("# floor (ms), GB and TFLOP: what an iteration needs at least (src/cost.h); %%: floor over ms/iter\n"
           "# rows, fresh, live: of an iteration; experts: different ones a layer; support -: as the Atlas builds it,\n"
           "# or none; idle: slots that wait for their cohort\n");
    printf("# below each row, ms of every phase%s, from %s once more with clocks between%s\n",
           s->most.bytes > 0 ? " and of its floor" : "", a->schedule ? "the same forwards" : "the first forwards",
           s->gpu ? ": kernels that overlap are cut" : "");
    if (s->gpu)
        printf("# apart, so that phases add up to more than ms/iter; shared: dense layers, and what is left behind "
               "combine of shared\n# experts, which run beside %s\n",
               s->world->size > 1 ? "dispatch"
                                  : "route and coverage, or, without coverage, beside the experts' sort; where few\n"
                                    "# rows are possible they are among the experts");
    printf("%-8s %6s %6s %6s %7s %8s %9s %9s %6s %9s %9s %6s %7s %7s %7s %7s %8s %8s\n", "mode", "prefix", "batch",
           "cohort", "support", "forwards", "ms/iter", "floor", "%", "ms/block", "tokens/s", "idle %", "rows", "fresh",
           "live", "experts", "GB", "TFLOP");
}

/* A number, or - where there is none. */
static void cell(int width, int digits, double x)
{
    if (isnan(x))
        printf(" %*s", width, "-");
    else
        printf(" %*.*f", width, digits, x);
}

static void print_row(const bench_row *r, int ranks)
{
    printf("%-8s %6d %6d %6d", r->mode, r->prefix, r->batch, r->cohort);
    cell(7, 0, r->support ? r->support : NAN);
    printf(" %8d", r->forwards);
    cell(9, 3, r->ms);
    cell(9, 3, r->floor_ms);
    cell(6, 1, r->percent);
    cell(9, 2, r->ms_block);
    cell(9, 0, r->tokens_per_second);
    cell(6, 1, 100 * r->idle);
    cell(7, 0, r->rows);
    cell(7, 0, r->fresh);
    cell(7, 0, r->live);
    cell(7, 1, r->experts);
    cell(8, 3, r->bytes / 1e9);
    cell(8, 3, r->flops / 1e12);
    printf("\n         ms%s:", isnan(r->floor_ms) ? "" : " of floor");
    for (int p = 0; p < PHASES; p++)
        if (r->phase_ms[p] > 0) {
            printf(" %s %.3f", phase_names[p], r->phase_ms[p]);
            if (r->phase_floor_ms[p] > 0)
                printf(" of %.3f", r->phase_floor_ms[p]);
        }
    printf("\n");
    if (!isnan(r->taken))
        printf("         memory: %.2f GB taken, %.2f planned\n", r->taken / 1e9, r->planned / 1e9);
    if (r->dispatched > 0) {
        double there = r->phase_ms[PHASE_DISPATCH], back = r->phase_ms[PHASE_COMBINE], all = 0;
        for (int p = 0; p < PHASES; p++)
            all += r->phase_ms[p]; /* of the same pass: it may take longer than r->ms */
        printf(
            "         lane: %.1f %% of the phases; all ranks' rows %.3f MB, sums back %.3f MB; %.1f and %.1f GB/s a "
            "rank\n",
            100 * (there + back) / all, r->dispatched / 1e6, r->combined / 1e6, r->dispatched / ranks / there / 1e6,
            r->combined / ranks / back / 1e6);
    }
    if (!isnan(r->ratio)) {
        printf("         full takes %.2f times as long", r->ratio);
        if (!isnan(r->floor_ratio))
            printf(", its floor %.2f times: %.0f %%", r->floor_ratio, 100 * r->ratio / r->floor_ratio);
        printf("\n");
    }
    fflush(stdout);
}

/* ---- file */

static json_t *about(const trial_setup *s, const ask *a, const char *lane_name, int argc, char **argv)
{
    char host[256] = "", started[32], line[4096] = "epoch";
    for (int i = 0; i < argc; i++)
        snprintf(line + strlen(line), sizeof line - strlen(line), " %s", argv[i]);
    time_t t = time(NULL);
    struct tm utc;
    gethostname(host, sizeof host - 1);
    strftime(started, sizeof started, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&t, &utc));
    return json_pack(
        "{s:s, s:s, s:s, s:s, s:s, s:s, s:b, s:s, s:b, s:i, s:s, s:s, s:s, s:i, s:i, s:f, s:s, s:i, s:f, s:f}",
        "program", "epoch bench", "version", EPOCH_VERSION, "command_line", line, "started", started, "transport",
        lane_name, "combine", s->way.combine == BF16 ? "bf16" : "fp32", "synthetic", 1, "shape", a->shape, "stand_in",
        stand_in(a), "layers", s->config->layers, "device", s->backend->name, "device_name", s->backend->device, "host",
        host, "ranks", s->world->size, "seed", a->seed, "skew", a->skew, "schedule", a->schedule ? a->schedule : "",
        "blocks", a->schedule ? a->blocks : 0, "copied_bytes_per_second", s->most.bytes, "bf16_flops_per_second",
        s->most.flops);
}

/* ---- the command */

static void help(void)
{
    printf(
        "usage: [mpirun -np R] epoch bench [options]\n\n"
        "Forwards of a real shape with random weights: ms an iteration beside its floor. All of it is synthetic. LISTs "
        "are "
        "numbers\nor names with commas between; every combination is a row.\n\n"
        "  --shape NAME       llada2-mini, llada2-flash, llada-moe (block-causal stand-in), a config.json, or its "
        "folder "
        "[llada2-mini]\n"
        "  --layers N         only the first N layers [all]\n"
        "  --device D         auto, cpu or cuda [auto]\n"
        "  --mode LIST        epoch, full, no-atlas, no-lsp, no-lane; a mode behind full is compared with it [full]\n"
        "  --batch LIST       sequences in flight over the whole job [1,8,32,128,256,512]\n"
        "  --batch-per-rank LIST  the same of each rank, in place of --batch\n"
        "  --transport T      between ranks: auto, self, mpi, nccl or lsa, as in epoch run [auto]\n"
        "  --combine F        partial sums between GPUs: fp32 or bf16 [fp32]\n"
        "  --prefix LIST      positions before the active block, multiples of 32 [256]\n"
        "  --cohort LIST      sequences that share supports in lock-step; 0: all of a rank [1]\n"
        "  --support LIST     supports of N experts, never rebuilt; 0: as the Atlas builds them [0]\n"
        "  --schedule FILE    commits of each iteration (tests/bench/schedule.json); without: nothing commits, all "
        "rows live\n"
        "  --blocks N         blocks of each sequence with a schedule; more where several cohorts shall be busy side "
        "by side [3]\n"
        "  --iterations N     forwards timed without a schedule [20]\n"
        "  --skew X           a random router bias up to X, so that some experts are liked [0]\n"
        "  --seed N           of all that is random [1]\n"
        "  --timeout S        end the job once no rank has moved for so long (four times in loading); 0: never [300]\n"
        "  --out FILE.h5      all of it as a table too; must not exist\n");
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

static status parse_list(list *out, const char *flag, const char *text, long low, long high)
{
    status st = OK;
    out->count = 0;
    for (const char *at = text;;) {
        char *end;
        errno = 0;
        long n = strtol(at, &end, 10);
        if (end == at || errno || n < low || n > high || (*end && *end != ',') || out->count == LIST)
            FAIL(BAD_INPUT, "--%s is \"%s\", want at most %d numbers from %ld to %ld with commas between", flag, text,
                 LIST, low, high);
        out->at[out->count++] = (int32_t)n;
        if (!*end)
            break;
        at = end + 1;
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

static status parse_modes(list *out, const char *text)
{
    status st = OK;
    char one[16];
    out->count = 0;
    for (const char *at = text; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        int mode = 0;
        snprintf(one, sizeof one, "%.*s", (int)strcspn(at, ","), at);
        TRY(choose(&mode, "mode", one, modes, MODES));
        if (out->count == LIST)
            FAIL(BAD_INPUT, "--mode is \"%s\", want at most %d names", text, LIST);
        out->at[out->count++] = mode;
    }
out:
    return st;
}

static status parse(ask *a, bool *helped, int argc, char **argv)
{
    enum {
        SHAPE = 256,
        SCHEDULE,
        OUT,
        DEVICE,
        TRANSPORT,
        COMBINE,
        MODE,
        PER_RANK,
        BATCH,
        PREFIX,
        COHORT,
        SUPPORT,
        LAYERS,
        ITERATIONS,
        BLOCKS,
        SEED,
        SKEW,
        TIMEOUT,
        HELP
    };
#define FLAG(name, value)                    \
    {                                        \
        name, required_argument, NULL, value \
    }
    static const struct option flags[] = {FLAG("shape", SHAPE),
                                          FLAG("schedule", SCHEDULE),
                                          FLAG("out", OUT),
                                          FLAG("device", DEVICE),
                                          FLAG("transport", TRANSPORT),
                                          FLAG("combine", COMBINE),
                                          FLAG("mode", MODE),
                                          FLAG("batch-per-rank", PER_RANK),
                                          FLAG("batch", BATCH),
                                          FLAG("prefix", PREFIX),
                                          FLAG("cohort", COHORT),
                                          FLAG("support", SUPPORT),
                                          FLAG("layers", LAYERS),
                                          FLAG("iterations", ITERATIONS),
                                          FLAG("blocks", BLOCKS),
                                          FLAG("seed", SEED),
                                          FLAG("skew", SKEW),
                                          FLAG("timeout", TIMEOUT),
                                          {"help", no_argument, NULL, HELP},
                                          {NULL, 0, NULL, 0}};
#undef FLAG
    static const char *const devices[] = {"auto", "cpu", "cuda"}, *const combines[] = {"fp32", "bf16"},
                             *const transports[] = {"auto", "self", "mpi", "nccl", "lsa"}; /* as in options.h */
    *a = (ask){.shape = "llada2-mini",
               .batch = {{1, 8, 32, 128, 256, 512}, 6},
               .prefix = {{256}, 1},
               .cohort = {{1}, 1},
               .support = {{0}, 1},
               .mode = {{PLAN_FULL}, 1},
               .iterations = 20,
               .blocks = 3,
               .seed = 1,
               .timeout = 300};
    const char **const texts[] = {&a->shape, &a->schedule, &a->out};
    const struct {
        list *to;
        long low, high;
    } lists[] = {{&a->batch, 1, 1 << 16},
                 {&a->prefix, 0, 1 << 20},
                 {&a->cohort, 0, 1 << 16},
                 {&a->support, 0, SUM_TREE_EXPERTS}};
    int32_t *const whole[] = {&a->layers, &a->iterations, &a->blocks, &a->seed};
    status st = OK;
    double n;
    opterr = 0;
    optind = 1;
    for (int flag; (flag = getopt_long(argc, argv, "", flags, NULL)) != -1;) {
        const char *name = flag >= SHAPE ? flags[flag - SHAPE].name : "";
        if (flag < SHAPE)
            FAIL(BAD_INPUT, "epoch bench: \"%s\" is not understood (epoch bench --help)", argv[optind - 1]);
        else if (flag <= OUT)
            *texts[flag - SHAPE] = optarg;
        else if (flag == DEVICE)
            TRY(choose(&a->device, name, optarg, devices, 3));
        else if (flag == TRANSPORT)
            TRY(choose(&a->transport, name, optarg, transports, 5));
        else if (flag == COMBINE)
            TRY(choose(&a->combine, name, optarg, combines, 2));
        else if (flag == MODE)
            TRY(parse_modes(&a->mode, optarg));
        else if (flag <= SUPPORT) {
            int at = flag == PER_RANK ? 0 : flag - BATCH;
            TRY(parse_list(lists[at].to, name, optarg, lists[at].low, lists[at].high));
            a->per_rank = flag == PER_RANK || (a->per_rank && flag != BATCH);
        } else if (flag <= SEED) {
            TRY(parse_number(&n, name, optarg, 1, 1 << 20));
            *whole[flag - LAYERS] = (int32_t)n;
            if (n != *whole[flag - LAYERS])
                FAIL(BAD_INPUT, "--%s is \"%s\", want a whole number", name, optarg);
        } else if (flag == SKEW)
            TRY(parse_number(&a->skew, name, optarg, 0, 100));
        else if (flag == TIMEOUT)
            TRY(parse_number(&a->timeout, name, optarg, 0, 1e6));
        else
            *helped = true;
    }
    if (optind < argc)
        FAIL(BAD_INPUT, "epoch bench: \"%s\" is not an option (epoch bench --help)", argv[optind]);
    for (int32_t i = 0; i < a->prefix.count; i++)
        if (a->prefix.at[i] % TRIAL_BLOCK)
            FAIL(BAD_INPUT, "--prefix is %d, want a multiple of %d", a->prefix.at[i], TRIAL_BLOCK);
out:
    return st;
}

static status choose_device(trial_setup *s, const ask *a)
{
    status st = OK;
    TRY(device_choose(&s->gpu, s->world, a->device, a->transport != TRANSPORT_MPI));
    s->way = (transport_ask){.transport = a->transport,
                             .combine = a->combine == COMBINE_BF16 ? BF16 : F32,
                             .cuda = s->gpu,
                             .ranks = s->world->size,
                             .joins = transport_joins(),
                             .deadline = CONNECT_SECONDS,
                             .timeout = a->timeout};
    TRY(transport_check(&s->way));
out:
    return st;
}

/* Before the forwards, not after them. */
static status check_out(const char *out)
{
    status st = OK;
    const char *slash = strrchr(out, '/');
    char folder[4096] = ".";
    if (slash && (size_t)snprintf(folder, sizeof folder, "%.*s", (int)(slash - out) + 1, out) >= sizeof folder)
        FAIL(BAD_INPUT, "%s: the path is too long", out);
    if (access(out, F_OK) == 0)
        FAIL(BAD_INPUT, "%s exists already: name another --out", out);
    if (access(folder, W_OK) != 0)
        FAIL(BAD_INPUT, "%s cannot be created: %s: %s; want a folder that exists and is writable", out, folder,
             strerror(errno));
out:
    return st;
}

/* Shape, schedule and what the two must agree on; the same on every rank. */
static status check(trial_setup *s, model_config *c, int32_t **pace, const ask *a)
{
    status st = OK;
    TRY(find_shape(c, a->shape));
    if (a->layers > c->layers)
        FAIL(BAD_INPUT, "--layers is %d, the shape has %d", a->layers, c->layers);
    c->layers = a->layers ? a->layers : c->layers;
    c->dense_layers = c->dense_layers < c->layers ? c->dense_layers : c->layers;
    c->block_size = TRIAL_BLOCK;
    for (int32_t i = 0; i < a->support.count; i++)
        if (a->support.at[i] > c->experts || (a->support.at[i] > 0 && a->support.at[i] < c->top_k))
            FAIL(BAD_INPUT, "--support is %d, want %d to %d, a token's experts to all of the shape, or 0",
                 a->support.at[i], c->top_k, c->experts);
    if (a->schedule) {
        TRY(read_schedule(pace, &s->patterns, a->schedule));
    } else {
        s->patterns = 1;
        *pace = calloc(PATTERN_STEPS, sizeof **pace);
        if (!*pace)
            FAIL(FAILED, "out of memory");
    }
    s->pace = *pace;
    TRY(sum_tree_open(&s->tree, c->experts, c->groups, s->world->size));
out:
    return st;
}

/* All but the forwards: every rank comes to the same end. */
static status open_setup(trial_setup *s, const ask *a)
{
    status st = OK;
    world *w = s->world;
    TRY(w->agree(w, choose_device(s, a)));
    TRY(w->agree(w, device_open(&s->backend, w, s->gpu, 0)));
    if (s->heart)
        atomic_store(&s->heart->reached, s->backend->reached);
    lane_rule shape = {.hidden = s->config->hidden, .top_k = s->config->top_k, .tree = s->tree,
                       .payload = s->backend->activation};
    TRY(w->agree(w, transport_join(&s->joined, &s->way, &shape, w, s->backend)));
    if (w->rank == 0)
        transport_say(&s->way, stderr);
    TRY(w->agree(w, device_ceilings(s->backend, s->gpu, &s->most.bytes, &s->most.flops)));
    weight_rule wr = {.matrices = s->gpu ? BF16 : F32, .tree = s->tree, .rank = w->rank};
    TRY(w->agree(w, weights_random(&s->weights, s->config, s->backend, &wr, (uint64_t)a->seed, (float)a->skew)));
out:
    return st;
}

/* The ratios to mode full among the rows before. */
static void compare(bench_row *row, int64_t at)
{
    bench_row *r = &row[at];
    for (int64_t i = 0; i < at && strcmp(r->mode, "full") != 0; i++)
        if (strcmp(row[i].mode, "full") == 0 && row[i].prefix == r->prefix && row[i].batch == r->batch &&
            row[i].cohort == r->cohort) {
            r->ratio = row[i].ms / r->ms;
            r->floor_ratio = row[i].floor_ms / r->floor_ms;
        }
}

static status run_row(bench_row *row, int64_t *rows, const trial_setup *s, const ask *a, trial_ask one, int32_t mode,
                      int32_t cohort, int32_t support)
{
    status st = OK;
    one.plan = settings(s->config, mode, cohort, support);
    TRY(trial_run(&row[*rows], s, &one));
    row[*rows].mode = modes[mode];
    row[*rows].support = support;
    compare(row, *rows);
    if (s->world->rank == 0) {
        if (*rows == 0)
            print_head(s, a, row->lane);
        print_row(&row[*rows], s->world->size);
    }
    ++*rows;
out:
    return st;
}

static int32_t sequences(const world *w, const ask *a, int at)
{
    return a->batch.at[at] * (a->per_rank ? w->size : 1);
}

static int32_t whole_cohort(const world *w, int32_t batch_of_job, int32_t cohort)
{
    int32_t most = deal_evenly(batch_of_job, w->size, 0);
    return cohort == 0 || cohort > most ? most : cohort;
}

/* Every combination once: a cohort may be all of a rank by two names, and a forced support means nothing where none is
 * used. */
static status run_rows(bench_row *row, int64_t *rows, const trial_setup *s, const ask *a)
{
    status st = OK;
    trial_ask one = {.iterations = a->schedule ? 0 : a->iterations, .blocks = a->blocks};
    for (int p = 0; p < a->prefix.count; p++)
        for (int c = 0; c < a->cohort.count; c++)
            for (int b = 0; b < a->batch.count; b++)
                for (int m = 0; m < a->mode.count; m++)
                    for (int k = 0; k < a->support.count; k++) {
                        bool used = restricts(a->mode.at[m]);
                        bool again = !used && k > 0;
                        for (int e = 0; e < c && !again; e++)
                            again = whole_cohort(s->world, sequences(s->world, a, b), a->cohort.at[e]) ==
                                    whole_cohort(s->world, sequences(s->world, a, b), a->cohort.at[c]);
                        if (again)
                            continue;
                        one.prefix = a->prefix.at[p];
                        one.batch = sequences(s->world, a, b);
                        TRY(run_row(row, rows, s, a, one, a->mode.at[m], a->cohort.at[c], used ? a->support.at[k] : 0));
                    }
out:
    return st;
}

/* Rank 0 alone has the rows. */
static status run_and_save(const trial_setup *s, const ask *a, int argc, char **argv)
{
    status st = OK;
    int64_t rows = 0,
            most = (int64_t)a->prefix.count * a->cohort.count * a->batch.count * a->mode.count * a->support.count;
    bench_row *row = calloc((size_t)most, sizeof *row);
    json_t *text = NULL;
    world *w = s->world;
    TRY(w->agree(w, row ? OK : status_fail(FAILED, __FILE__, __LINE__, "out of memory")));
    TRY(run_rows(row, &rows, s, a));
    if (a->out && w->rank == 0) {
        text = about(s, a, row->lane, argc, argv);
        st = bench_save(a->out, text, row, rows);
    }
    TRY(w->agree(w, st));
out:
    json_decref(text);
    free(row);
    return st;
}

/* ---- the watchdog */

typedef struct guard {
    watch watch;
    char folder[4000]; /* of its heartbeats: beside --out, or where the job was started; left by a job that is killed */
    bool made;         /* the same on every rank */
} guard;

/* Where hosts do not share the place, each has a folder of that name. */
static status join_folder(guard *g, const world *w)
{
    status st = OK;
    g->watch.folder = g->folder;
    if (w->rank > 0 && mkdir(g->folder, 0700) == 0)
        fprintf(stderr, "rank %d/%d: %s is not the folder of rank 0: the watchdog sees this host's ranks alone\n",
                w->rank, w->size, g->folder);
    else if (w->rank > 0 && errno != EEXIST)
        FAIL(BAD_INPUT, "%s: the watchdog's folder cannot be made: %s; name a folder that all hosts see, or "
             "--timeout 0", g->folder, strerror(errno));
    TRY(watch_open(&g->watch, g->folder));
out:
    return st;
}

/* Where there are several ranks: one alone waits for nobody. */
static status open_guard(guard *g, trial_setup *s, const ask *a)
{
    status st = OK;
    world *w = s->world;
    if (w->size == 1 || a->timeout <= 0)
        return OK;
    watch_alarm(&g->watch, w, a->timeout, 0);
    snprintf(g->folder, sizeof g->folder, "%s.watch-XXXXXX", a->out ? a->out : "bench");
    if (w->rank == 0 && !mkdtemp(g->folder))
        st = status_fail(BAD_INPUT, __FILE__, __LINE__,
                         "%s: the watchdog's folder cannot be made: %s; start where files can be written, or with "
                         "--timeout 0", g->folder, strerror(errno));
    TRY(w->agree(w, st));
    TRY(w->bcast(w, g->folder, sizeof g->folder, 0));
    g->made = true;
    TRY(w->agree(w, join_folder(g, w)));
    s->heart = &g->watch.heart;
out:
    return st;
}

static void close_guard(guard *g, world *w, bool together)
{
    if (!g->made)
        return;
    watch_close(&g->watch);
    if (together)
        w->agree(w, OK); /* nobody writes there any more */
    watch_sweep(&g->watch);
}

status bench(world *w, int argc, char **argv, bool *together)
{
    status st = OK;
    ask a;
    model_config c = {0};
    trial_setup s = {.config = &c, .world = w, .together = together};
    guard g = {0};
    int32_t *pace = NULL;
    bool helped = false;
    *together = true;
    TRY(w->agree(w, parse(&a, &helped, argc, argv)));
    if (helped) {
        if (w->rank == 0)
            help();
        goto out;
    }
    s.seed = (uint64_t)a.seed;
    TRY(w->agree(w, check(&s, &c, &pace, &a)));
    TRY(w->agree(w, a.out && w->rank == 0 ? check_out(a.out) : OK));
    TRY(open_guard(&g, &s, &a));
    TRY(open_setup(&s, &a));
    TRY(run_and_save(&s, &a, argc, argv));
out:
    close_guard(&g, w, *together);
    if (!*together) /* as in trial_run: nothing is freed */
        return st;
    transport_leave(s.joined);
    weights_close(s.weights);
    if (s.backend)
        s.backend->close(s.backend);
    sum_tree_close(s.tree);
    model_config_close(&c);
    free(pace);
    return st;
}
