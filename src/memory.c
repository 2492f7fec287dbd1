#include "src/memory.h"

#include "src/model/weights.h"
#include "src/plan/scheduler.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 32 };

static double least(double a, double b)
{
    return a < b ? a : b;
}

/* The lane's rows and partial sums at rank 0, `rows` at most from each rank (mpi/lane_mpi.c, mpi/lane_nccl.c). */
static double lane_bytes(const model_config *c, const memory_ask *o, const sum_tree *t, double rows)
{
    double sum = 4.0 * c->hidden, units = t->rank_unit[1], others = o->ranks - 1, k = c->top_k;
    double row = c->hidden * (double)dtype_bytes(o->activation) + 8 * k;
    if (o->ranks == 1)
        return rows * sum;
    return rows * (o->ranks * (row + units * sum)                  /* arrived, and the experts' sums of it */
                   + least(k, others) * row                        /* packed for others */
                   + least(k, t->unit_count - units) * sum         /* partial sums from others */
                   + (units > 1) * others * least(k, units) * sum); /* and to them, where they do not lie together */
}

status memory_measure(memory_plan *out, const model_config *c, const memory_ask *o)
{
    status st = OK;
    sum_tree *tree = NULL;
    *out = (memory_plan){0};
    TRY(sum_tree_open(&tree, c->experts, c->groups, o->ranks));
    weight_rule wr = {.matrices = o->matrices, .tree = tree, .rank = 0}; /* rank 0 has the most experts and sequences */
    int32_t block = c->block_size ? c->block_size : BLOCK, slot_count = deal_evenly(o->batch, o->ranks, 0);
    executor_rule r = {.slot_count = slot_count,
                       .max_tokens = c->max_positions,
                       .page_count = slot_count * ((o->context + block - 1) / block),
                       .block = {.block_size = block, .prefill_blocks = o->prefill_blocks, .cohort = 1}};
    executor_sizes z = executor_measure(&r, c, o->activation);
    int64_t share = tree->rank_first[1];
    out->weights = (double)weights_bytes(c, &wr);
    out->experts = 3.0 * (double)share * c->expert_inner * c->hidden * (double)dtype_bytes(o->matrices) *
                   (c->layers - c->dense_layers);
    out->kv = (double)z.kv;
    out->slots = (double)z.slots;
    out->activations = (double)z.iteration;
    out->lane = lane_bytes(c, o, tree, (double)executor_max_rows(&r));
    if (o->activation == BF16) /* on a GPU: what lies between the experts' products, for all ranks' rows at once */
        out->scratch = 2.0 * (double)executor_max_rows(&r) * o->ranks * c->top_k * (c->hidden + c->expert_inner);
    out->total = out->weights + out->kv + out->slots + out->activations + out->lane + out->scratch;
out:
    sum_tree_close(tree);
    return st;
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
        *(p.total <= o->device_bytes ? &low : &high) = middle;
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

/* "80G", "141e9", "512M": bytes. */
static status parse_bytes(double *out, const char *text)
{
    status st = OK;
    char *end;
    *out = strtod(text, &end);
    if (end != text && (*end == 'G' || *end == 'M') && !end[1])
        *out *= *end++ == 'G' ? 1e9 : 1e6;
    if (end == text || *end || !(*out > 0))
        FAIL(BAD_INPUT, "--gpu-memory is \"%s\", want a size such as 80G", text);
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

static void help(void)
{
    printf("usage: epoch model DIR [options]\n\n"
           "What the checkpoint in DIR holds, and the memory that a job on it takes; only config.json is read.\n\n"
           "  --ranks N          devices of the job [1]\n"
           "  --batch N          sequences in flight over the whole job [16]\n"
           "  --context N        positions of a sequence that the KV pool has room for [2048]\n"
           "  --prefill-blocks N prompt blocks of one rank in one forward [8]\n"
           "  --gpu-memory SIZE  memory of one device, for the largest batch that fits [80G]\n"
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
    printf("lane         %9.3f GB, all ranks' rows at once\n", p->lane / gb);
    if (p->scratch > 0)
        printf("scratch      %9.3f GB, of the experts\n", p->scratch / gb);
    printf("total        %9.3f GB of %.1f: %s\n", p->total / gb, o->device_bytes / gb,
           p->total <= o->device_bytes ? "it fits" : "it does not fit");
    if (largest)
        printf("largest      batch %d\n", largest);
    else
        printf("largest      none: the weights alone take %.1f GB a rank; take more ranks\n", p->weights / gb);
}

status model_command(int argc, char **argv)
{
    enum { RANKS = 256, BATCH, CONTEXT, PREFILL, MEMORY, CPU, HELP };
    static const struct option flags[] = {
        {"ranks", required_argument, NULL, RANKS},      {"batch", required_argument, NULL, BATCH},
        {"context", required_argument, NULL, CONTEXT},  {"prefill-blocks", required_argument, NULL, PREFILL},
        {"gpu-memory", required_argument, NULL, MEMORY}, {"cpu", no_argument, NULL, CPU},
        {"help", no_argument, NULL, HELP},              {NULL, 0, NULL, 0}};
    status st = OK;
    model_config c = {0};
    memory_ask o = {.ranks = 1, .batch = 16, .context = 2048, .prefill_blocks = 8, .matrices = BF16, .activation = BF16,
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
            TRY(parse_bytes(&o.device_bytes, optarg));
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
