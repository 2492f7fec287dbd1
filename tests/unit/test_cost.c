/* The floor of `epoch bench`: bytes and FLOPs of each phase against numbers worked out by hand. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/cost.h"

static const model_config model = {.layers = 2,
                                   .hidden = 4,
                                   .vocab = 10,
                                   .heads = 2,
                                   .kv_heads = 1,
                                   .head_dim = 2,
                                   .dense_layers = 1,
                                   .dense_inner = 8,
                                   .experts = 4,
                                   .top_k = 1,
                                   .expert_inner = 4,
                                   .shared_inner = 2,
                                   .block_size = 32};
static const forward_load load = {.rows = 64, .seen = 96, .fresh = 48, .live = 20, .touched = 3, .edges = 48};

static void test_phases(void **state)
{
    (void)state;
    static const struct {
        phase p;
        double bytes, flops;
    } want[] = {
        /* qkv 1600, norms and rotary 2048, attention 1792, out 1056, residual 2048; 4096, 49152, 2048 FLOPs; 2 layers
         */
        {PHASE_ATTENTION, 2 * 8544, 2 * 55296},
        {PHASE_ROUTE, 1216, 1536},
        {PHASE_EXPERTS, 1056, 4608},
        {PHASE_MERGE, 256 + 2048, 0},
        {PHASE_SHARED, 1056 + 784 + 2688 + 1600 + 2048, 2048 + 1024 + 8192 + 4096},
        {PHASE_DECODE, 1024, 0},
        {PHASE_HEAD, 240, 1600},
        {PHASE_COVERAGE, 0, 0},
        {PHASE_DISPATCH, 0, 0},
        {PHASE_COMBINE, 0, 0},
        {PHASE_HOST, 0, 0},
    };
    cost by_phase[PHASES] = {{0}};
    double bytes = 0, flops = 0;
    for (int twice = 0; twice < 2; twice++)
        cost_add(by_phase, &model, &load, &(ceilings){0});
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        assert_true(by_phase[want[i].p].bytes == 2 * want[i].bytes);
        assert_true(by_phase[want[i].p].flops == 2 * want[i].flops);
        bytes += 2 * want[i].bytes;
        flops += 2 * want[i].flops;
    }
    cost all = cost_sum(by_phase);
    assert_true(all.bytes == bytes && all.flops == flops && all.seconds == 0); /* no ceilings, no floor */
}

/* An op takes the longer of the two; ops come one after the other. */
static void test_seconds(void **state)
{
    (void)state;
    cost by_phase[PHASES] = {{0}};
    cost_add(by_phase, &model, &load, &(ceilings){.bytes = 1, .flops = 4});
    assert_true(by_phase[PHASE_HEAD].seconds == 400);    /* FLOPs */
    assert_true(by_phase[PHASE_DECODE].seconds == 1024); /* bytes */
    assert_true(by_phase[PHASE_ROUTE].seconds == 1216);
    assert_true(by_phase[PHASE_ATTENTION].seconds == 2 * (1600 + 2048 + 49152 / 4 + 1056 + 2048));
    assert_true(by_phase[PHASE_COVERAGE].seconds == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_phases), cmocka_unit_test(test_seconds)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
