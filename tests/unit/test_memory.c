/* The memory plan: the published shapes on 8 x 80 GB, and that it is made of what a run takes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/memory.h"
#include "src/options.h"

#include <string.h>

#define SHAPES EPOCH_SOURCE "/models/shapes/"

/* Do the CUDA experts lose count with so many sequences a rank? They number 8 columns of every edge in 32 bits. */
static bool too_many_edges(const model_config *c, const memory_ask *o)
{
    double rows = (2.0 * o->batch / o->ranks + o->prefill_blocks) * 32 * o->ranks;
    return o->activation == BF16 && rows * c->top_k * c->hidden > 8.0 * (double)UINT32_MAX;
}

static memory_plan plan(const char *shape, memory_ask o, int32_t *largest)
{
    model_config c;
    memory_plan p;
    assert_int_equal(model_config_open(&c, shape), OK);
    assert_int_equal(memory_measure(&p, &c, &o), OK);
    assert_int_equal(memory_largest_batch(largest, &c, &o), OK);
    o.batch = *largest;
    memory_plan at;
    assert_int_equal(memory_measure(&at, &c, &o), OK);
    assert_true(!*largest || at.total <= o.device_bytes); /* it fits, and one sequence a rank more does not */
    o.batch += o.ranks;
    assert_int_equal(memory_measure(&at, &c, &o), OK);
    assert_true(at.total > o.device_bytes || too_many_edges(&c, &o));
    model_config_close(&c);
    return p;
}

static const memory_ask gpu = {.ranks = 8, .batch = 512, .context = 2048, .prefill_blocks = 8, .matrices = BF16,
                               .activation = BF16, .device_bytes = 80e9};

static void test_published_shapes(void **state)
{
    (void)state;
    int32_t largest;
    memory_plan p = plan(SHAPES "llada2-mini", gpu, &largest);
    assert_true(p.total < 80e9 && largest >= 512);
    p = plan(SHAPES "llada2-flash", gpu, &largest);
    assert_true(p.total < 80e9 && largest >= 512);
    assert_true(p.experts > 24.9e9 && p.experts < 25.0e9); /* 31 layers x 32 experts x 3 x 4096 x 1024 x 2 bytes */
    memory_ask one = gpu;
    one.ranks = 1;
    p = plan(SHAPES "llada2-flash", one, &largest);
    assert_true(p.weights > 205e9 && p.weights < 207e9);
    assert_int_equal(largest, 0);
    one.device_bytes = 141e9;
    p = plan(SHAPES "llada2-mini", one, &largest); /* batch 512 with 2k of context on one 141 GB device */
    assert_true(p.total < 141e9 && largest >= 512);
}

/* The plan is made of what the executor and the lanes lay out, and says so where it does not fit. */
static void test_fits(void **state)
{
    (void)state;
    int32_t largest;
    memory_plan p = plan(SHAPES "llada2-mini", gpu, &largest);
    double sum = p.weights + p.kv + p.slots + p.activations + p.lane + p.scratch + p.fixed + p.joined;
    assert_true(p.total == sum && p.scratch > 1e9 && p.lane > 0.5e9);
    assert_int_equal(memory_fits(&p, p.total), OK);
    assert_int_equal(memory_fits(&p, p.total * 0.9), BAD_INPUT);
    for (const char *const *part = (const char *const[]){"this job takes ", "KV pool ", "(--kv-tokens)", "(--batch)",
                                                         "--prefill-blocks", NULL}; *part; part++)
        assert_non_null(strstr(status_message(), *part));
    memory_ask cpu = gpu;
    cpu.activation = cpu.matrices = F32;
    p = plan(SHAPES "llada2-mini", cpu, &largest);
    assert_true(p.scratch == 0 && p.fixed == 0 && p.joined == 0);
}

/* Windows take less than sends and receives with their buffers; what is not yet chosen is planned as the one that takes
 * more; GPUs that are not joined have nothing of NCCL's. */
static void test_transports(void **state)
{
    (void)state;
    int32_t largest[3];
    memory_plan p[3];
    const int way[] = {TRANSPORT_AUTO, TRANSPORT_NCCL, TRANSPORT_LSA};
    for (int ranks = 2; ranks <= 8; ranks *= 2) {
        for (int i = 0; i < 3; i++) {
            memory_ask ask = gpu;
            ask.ranks = ranks;
            ask.transport = way[i];
            p[i] = plan(SHAPES "llada2-mini", ask, &largest[i]);
        }
        assert_true(p[2].joined > 0 && p[1].joined > p[2].joined && p[0].joined == p[1].joined);
        assert_true(p[2].lane < p[1].lane && p[0].lane == p[1].lane);
        assert_true(largest[2] > largest[1] && largest[0] == largest[1]);
    }
    memory_ask one = gpu;
    one.ranks = 1;
    one.batch = 8;
    assert_true(plan(SHAPES "llada2-mini", one, largest).joined == 0);
    one.transport = TRANSPORT_LSA;
    assert_true(plan(SHAPES "llada2-mini", one, largest).joined > 0);
}

static void test_refusals(void **state)
{
    (void)state;
    char *shape = SHAPES "llada2-mini";
    struct {
        char *word[5];
        const char *says;
    } bad[] = {
        {{"model", "--ranks", "0", shape}, "--ranks is \"0\", want a whole number"},
        {{"model", "--gpu-memory", "80T", shape}, "--gpu-memory is \"80T\", want a size such as 80G"},
        {{"model", "--gpu-memory", "80", shape}, "--gpu-memory is \"80\", want a size such as 80G"},
        {{"model", "--ranks", "257", shape}, "257 ranks, but the model has 256 experts"},
        {{"model", "--transport", "mpi", shape}, "--transport is \"mpi\", want auto, nccl or lsa"},
        {{"model", "--what", shape}, "no such option"},
        {{"model"}, "want one checkpoint folder"},
        {{"model", "/nowhere"}, "/nowhere/config.json"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        int n = 0;
        while (n < 5 && bad[i].word[n])
            n++;
        extern int optind;
        optind = 0; /* start anew */
        assert_int_equal(model_command(n, bad[i].word), BAD_INPUT);
        if (!strstr(status_message(), bad[i].says))
            fail_msg("%s", status_message());
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_published_shapes), cmocka_unit_test(test_fits),
                                       cmocka_unit_test(test_transports),
                                       cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
