#include "src/memory.h"

#include "src/model/weights.h"
#include "src/options.h"
#include "src/plan/scheduler.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 32 };
/* Bytes, as measured on two H200s with NCCL 2.28.3 on 2026-11-30. FIXED: context and kernels, staging. JOINED: two
 * communicators of one channel, and what a window takes beside its memory. SENDS: all channels in place of one, and the
 * kernels of the first send; then CHANNELS to each other rank. OLD_WAY: more, where NCCL_CUMEM_ENABLE is 0. */
static const double FIXED = 0.66e9, JOINED = 0.25e9, SENDS = 0.42e9, CHANNELS = 0.40e9, OLD_WAY = 0.36e9;

/* The windows of mpi/lane_lsa.c, without what is a few KB. */
static double window_bytes(const model_config *c, const sum_tree *t, double rows)
{
    return t->ranks * rows * (2.0 * c->hidden + 8.0 * c->top_k + 4.0 * sum_tree_most_units(t) * c->hidden);
}

/* The layouts of the other lanes, likewise. */
static double lane_bytes(const model_config *c, const sum_tree *t, double rows, dtype activation)
{
    double h = 4.0 * c->hidden, units = t->rank_unit[1], others = t->ranks - 1, there = t->unit_count - units;
    double row = (double)dtype_bytes(activation) * c->hidden + 8.0 * c->top_k;
    double y = t->ranks * rows * units * h;
    if (t->ranks == 1)
        return y;
    double packed = rows * fmin(c->top_k, others) * row, arrived = t->ranks * rows * row,
           partials = rows * fmin(c->top_k, there) * h,
           back = units > 1 ? others * rows * fmin(units, c->top_k) * h : 0;
    return packed + arrived + y + partials + back;
}

/* What the launchers in cuda/ take besides, for the worst case of rows: the routed experts' products for every edge
 * that may arrive, or what the head finds in each tile of ids. */
static double scratch_bytes(const model_config *c, const executor_rule *r, double rows, int ranks)
{
    double edges = rows * ranks * c->top_k + fmin(rows, RIDES_MOST); /* a shared expert's rows with them */
    double live = (double)r->slot_count * r->block.block_size;
    double experts = edges * (2.0 * (c->expert_inner + c->hidden) + 12), head = live * ((c->vocab + 255) / 256) * 16;
    return fmax(experts, head);
}

static bool old_way(void)
{
    const char *set = getenv("NCCL_CUMEM_ENABLE");
    return set && strcmp(set, "0") == 0;
}

void memory_of(memory_plan *out, const model_config *c, const executor_rule *r, const memory_way *way)
{
    const sum_tree *tree = way->tree;
    weight_rule wr = {.matrices = way->matrices, .tree = tree, .rank = 0};
    executor_sizes z = executor_measure(r, c, way->activation);
    double rows = (double)executor_max_rows(r);
    bool gpu = way->activation == BF16, named = way->transport == TRANSPORT_NCCL || way->transport == TRANSPORT_LSA;
    *out = (memory_plan){.weights = (double)weights_bytes(c, &wr),
                         .experts = 3.0 * tree->rank_first[1] * c->expert_inner * c->hidden *
                                    (double)dtype_bytes(way->matrices) * (c->layers - c->dense_layers),
                         .kv = (double)z.kv,
                         .slots = (double)z.slots,
                         .activations = (double)z.iteration,
                         .scratch = gpu ? scratch_bytes(c, r, rows, tree->ranks) : 0,
                         .fixed = gpu ? FIXED : 0};
    if (way->transport != TRANSPORT_LSA)
        out->lane = lane_bytes(c, tree, rows, way->activation);
    if (gpu && (way->transport == TRANSPORT_LSA || (way->transport == TRANSPORT_AUTO && tree->ranks > 1)))
        out->lane = fmax(out->lane, window_bytes(c, tree, rows));
    bool joins = gpu && (named || tree->ranks > 1);
    if (joins)
        out->joined = JOINED;
    if (joins && way->transport != TRANSPORT_LSA)
        out->joined += SENDS + CHANNELS * (tree->ranks - 1) + (old_way() ? OLD_WAY : 0);
    out->total = out->weights + out->kv + out->slots + out->activations + out->lane + out->scratch + out->fixed +
                 out->joined;
}

status memory_fits(const memory_plan *p, double bytes)
{
    status st = OK;
    const double gb = 1e9;
    if (p->total > bytes)
        FAIL(
            BAD_INPUT,
            "this job takes %.2f GB of each device, %.2f are there: weights %.2f (more ranks share them), KV pool %.2f "
            "(--kv-tokens) (bench: --prefix), slots %.2f (--batch), activations %.2f, lane %.2f and scratch %.2f (--batch, "
            "--prefill-blocks), CUDA %.2f, NCCL %.2f",
            p->total / gb, bytes / gb, p->weights / gb, p->kv / gb, p->slots / gb, p->activations / gb, p->lane / gb,
            p->scratch / gb, p->fixed / gb, p->joined / gb);
out:
    return st;
}

status memory_measure(memory_plan *out, const model_config *c, const memory_ask *o)
{
    status st = OK;
    sum_tree *tree = NULL;
    *out = (memory_plan){0};
    TRY(sum_tree_open(&tree, c->experts, c->groups, o->ranks));
    int32_t block = c->block_size ? c->block_size : BLOCK, slot_count = deal_evenly(o->batch, o->ranks, 0);
    executor_rule r = {.slot_count = slot_count,
                       .max_tokens = c->max_positions,
                       .page_count = slot_count * ((o->context + block - 1) / block),
                       .block = {.block_size = block, .prefill_blocks = o->prefill_blocks, .cohort = 1}};
    memory_of(out, c, &r,
              &(memory_way){.tree = tree, .matrices = o->matrices, .activation = o->activation,
                            .transport = o->transport});
out:
    sum_tree_close(tree);
    return st;
}

/* Of every edge that may arrive at once. */
static bool edges_fit(const model_config *c, int32_t sequences, const memory_ask *o)
{
    double rows = (2.0 * sequences + o->prefill_blocks) * (c->block_size ? c->block_size : BLOCK);
    return o->activation != BF16 ||
           rows * o->ranks * c->top_k * c->hidden <= experts_most(c->hidden);
}

status memory_largest_batch(int32_t *out, const model_config *c, const memory_ask *o)
{
    status st = OK;
    int32_t low = 0, high = 1 << 16; /* sequences a rank: low fits, high does not */
    while (high - low > 1) {
        memory_plan p;
        memory_ask one = *o;
        int32_t middle = low + (high - low) / 2;
        one.batch = middle * o->ranks;
        TRY(memory_measure(&p, c, &one));
        *(p.total <= o->device_bytes && edges_fit(c, middle, o) ? &low : &high) = middle;
    }
    *out = low * o->ranks;
out:
    return st;
}

static double parameters(const model_config *c, int32_t experts)
{
    double h = c->hidden, qkv = (double)(c->heads + 2 * c->kv_heads) * c->head_dim,
           sparse = c->layers - c->dense_layers;
    double attention = h * qkv + h * c->heads * c->head_dim, dense = 3.0 * h * c->dense_inner;
    double moe = h * c->experts + 3.0 * h * ((double)experts * c->expert_inner + c->shared_inner);
    return c->layers * attention + c->dense_layers * dense + sparse * moe + h * c->vocab * (c->tied_head ? 1 : 2);
}

status memory_bytes(double *out, const char *flag, const char *text)
{
    status st = OK;
    char *end;
    *out = strtod(text, &end);
    if (end != text && (*end == 'G' || *end == 'M') && !end[1])
        *out *= *end++ == 'G' ? 1e9 : 1e6;
    if (end == text || *end || !(*out >= 1e6)) /* 80 is no device's bytes */
        FAIL(BAD_INPUT, "--%s is \"%s\", want a size such as 80G", flag, text);
out:
    return st;
}

static status parse_count(int32_t *out, const char *flag, const char *text)
{
    status st = OK;
    char *end;
    errno = 0;
    long v = strtol(text, &end, 10);
    if (end == text || *end || errno || v < 1 || v > 1 << 20)
        FAIL(BAD_INPUT, "--%s is \"%s\", want a whole number from 1 to %d", flag, text, 1 << 20);
    *out = (int32_t)v;
out:
    return st;
}

static status parse_transport(int *out, const char *text)
{
    status st = OK;
    *out = strcmp(text, "lsa") == 0 ? TRANSPORT_LSA : strcmp(text, "nccl") == 0 ? TRANSPORT_NCCL : TRANSPORT_AUTO;
    if (*out == TRANSPORT_AUTO && strcmp(text, "auto") != 0)
        FAIL(BAD_INPUT, "--transport is \"%s\", want auto, nccl or lsa", text);
out:
    return st;
}

static void help(void)
{
    printf("usage: epoch model DIR [options]\n\n"
           "What the checkpoint in DIR holds, and the memory that a job on it takes; only config.json is read.\n\n"
           "  --ranks N          devices of the job [1]\n"
           "  --batch N          sequences in flight over the whole job [16]\n"
           "  --context N        positions of a sequence that the KV pool has room for [2048]\n"
           "  --prefill-blocks N prompt blocks of one rank in one forward [8]\n"
           "  --gpu-memory SIZE  memory of one device, for the largest batch that fits [80G]\n"
           "  --transport T      between GPUs: nccl or lsa; auto: the one that takes more [auto]\n"
           "  --cpu              the CPU backend's fp32 in place of a GPU's bf16\n");
}

static void print_plan(const model_config *c, const memory_ask *o, const memory_plan *p, int32_t largest)
{
    const double gb = 1e9;
    printf("layers       %d, the first %d dense; hidden %d, %d heads, %d key/value heads of %d\n", c->layers,
           c->dense_layers, c->hidden, c->heads, c->kv_heads, c->head_dim);
    printf("experts      %d a sparse layer, top %d, %d of %d groups, width %d; shared width %d\n", c->experts, c->top_k,
           c->top_groups, c->groups, c->expert_inner, c->shared_inner);
    printf("parameters   %.1f million, %.1f million active a token\n", parameters(c, c->experts) / 1e6,
           parameters(c, c->top_k) / 1e6);
    printf("# %d rank%s, batch %d, context %d, %s: bytes of the rank that holds most\n", o->ranks,
           o->ranks > 1 ? "s" : "", o->batch, o->context, dtype_name(o->activation));
    printf("weights      %9.3f GB, routed experts %.3f of it\n", p->weights / gb, p->experts / gb);
    printf("KV pool      %9.3f GB (--context or run --kv-tokens)\n", p->kv / gb);
    printf("slots        %9.3f GB, decoded caches among them (--batch)\n", p->slots / gb);
    printf("activations  %9.3f GB (--batch, --prefill-blocks)\n", p->activations / gb);
    printf("lane         %9.3f GB, all ranks' rows at once (--batch, --prefill-blocks)\n", p->lane / gb);
    if (p->scratch > 0)
        printf("scratch      %9.3f GB of the largest op; %.1f that CUDA itself holds\n", p->scratch / gb,
               p->fixed / gb);
    if (p->joined > 0)
        printf("NCCL         %9.3f GB of its own%s\n", p->joined / gb,
               o->transport == TRANSPORT_LSA ? "" : " (--transport lsa: less)");
    printf("total        %9.3f GB of %.1f: %s\n", p->total / gb, o->device_bytes / gb,
           p->total <= o->device_bytes ? "it fits" : "it does not fit");
    if (largest)
        printf("largest      batch %d on %d x %.1f GB, %d positions a sequence\n", largest, o->ranks,
               o->device_bytes / gb, o->context);
    else
        printf("largest      none on %d x %.1f GB: the weights alone take %.1f GB a rank; take more ranks\n", o->ranks,
               o->device_bytes / gb, p->weights / gb);
}

status model_command(int argc, char **argv)
{
    enum { RANKS = 256, BATCH, CONTEXT, PREFILL, MEMORY, TRANSPORT, CPU, HELP };
    static const struct option flags[] = {{"ranks", required_argument, NULL, RANKS},
                                          {"batch", required_argument, NULL, BATCH},
                                          {"context", required_argument, NULL, CONTEXT},
                                          {"prefill-blocks", required_argument, NULL, PREFILL},
                                          {"gpu-memory", required_argument, NULL, MEMORY},
                                          {"transport", required_argument, NULL, TRANSPORT},
                                          {"cpu", no_argument, NULL, CPU},
                                          {"help", no_argument, NULL, HELP},
                                          {NULL, 0, NULL, 0}};
    status st = OK;
    model_config c = {0};
    memory_ask o = {.ranks = 1,
                    .batch = 16,
                    .context = 2048,
                    .prefill_blocks = 8,
                    .matrices = BF16,
                    .activation = BF16,
                    .device_bytes = 80e9};
    memory_plan p;
    int32_t largest;
    opterr = 0;
    for (int flag; (flag = getopt_long(argc, argv, "h", flags, NULL)) != -1;) {
        if (flag == HELP || flag == 'h') {
            help();
            return OK;
        } else if (flag == RANKS) {
            TRY(parse_count(&o.ranks, "ranks", optarg));
        } else if (flag == BATCH) {
            TRY(parse_count(&o.batch, "batch", optarg));
        } else if (flag == CONTEXT) {
            TRY(parse_count(&o.context, "context", optarg));
        } else if (flag == PREFILL) {
            TRY(parse_count(&o.prefill_blocks, "prefill-blocks", optarg));
        } else if (flag == MEMORY) {
            TRY(memory_bytes(&o.device_bytes, "gpu-memory", optarg));
        } else if (flag == TRANSPORT) {
            TRY(parse_transport(&o.transport, optarg));
        } else if (flag == CPU) {
            o.matrices = o.activation = F32;
        } else {
            FAIL(BAD_INPUT, "%s: no such option, or its value is missing (epoch model --help)", argv[optind - 1]);
        }
    }
    if (optind + 1 != argc)
        FAIL(BAD_INPUT, "want one checkpoint folder: epoch model DIR (epoch model --help)");
    TRY(model_config_open(&c, argv[optind]));
    if (o.context > c.max_positions)
        o.context = c.max_positions;
    TRY(memory_measure(&p, &c, &o));
    TRY(memory_largest_batch(&largest, &c, &o));
    print_plan(&c, &o, &p, largest);
out:
    model_config_close(&c);
    return st;
}
