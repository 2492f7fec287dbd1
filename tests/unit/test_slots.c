/* The two clocks: the path of a slot as a table, the life of a block, and each edge of the decision rule. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/cpu/cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MASK = 99, EOS = 98, B = 8, BLOCKS = 6, SLOTS = 4, ROWS = (2 * SLOTS + 8) * B };

static block_rule base_rule(void)
{
    return (block_rule){.block_size = B, .mask_id = MASK, .eos_id = EOS, .max_steps = 64, .threshold = 0.9f,
                        .refresh_every = 5, .prefill_blocks = 8, .cohort = 1, .restrict_experts = true};
}

static void test_path_table(void **state)
{
    (void)state;
    static const struct {
        int iteration, age, since, refresh, update;
        slot_way want;
    } row[] = {
        {0, 0, 0, 5, 0, PATH_COLD},      {0, 9, 9, 1, 1, PATH_COLD},       /* cold comes first */
        {1, 0, 0, 1, 0, PATH_REFRESH},   {1, 0, 0, 1, 1, PATH_REFRESH},    /* M_C = 1: never cached, whatever is due */
        {1, 0, 0, 2, 0, PATH_HOT_SKIP},  {2, 1, 1, 2, 0, PATH_REFRESH},    /* every second */
        {4, 3, 3, 5, 0, PATH_HOT_SKIP},  {5, 4, 4, 5, 0, PATH_REFRESH},    /* every fifth hot iteration */
        {1, 0, 0, 5, 1, PATH_HOT_UPDATE}, {2, 1, 1, 5, 2, PATH_HOT_UPDATE}, {2, 1, 0, 5, 2, PATH_HOT_SKIP},
        {5, 4, 4, 5, 5, PATH_REFRESH},   /* both due: refresh names the path (the update is still due) */
        {9, 7, 3, 5, 0, PATH_REFRESH},   /* overdue */
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        block_rule r = base_rule();
        r.refresh_every = row[i].refresh;
        r.update_every = row[i].update;
        assert_int_equal(slot_path(row[i].iteration, row[i].age, row[i].since, &r), row[i].want);
    }
    block_rule r = base_rule();
    r.update_every = 5;
    assert_true(slot_update_due(5, 4, &r));
    assert_false(slot_update_due(0, 4, &r));
    r.update_every = 0;
    assert_false(slot_update_due(5, 400, &r));
}

static void test_allowed(void **state)
{
    (void)state;
    assert_int_equal(atlas_allowed(10, 0.9f), 1);
    assert_int_equal(atlas_allowed(5, 0.8f), 1);
    assert_int_equal(atlas_allowed(20, 0.95f), 1);
    assert_int_equal(atlas_allowed(19, 0.95f), 0);
    assert_int_equal(atlas_allowed(32, 1.0f), 0);
    assert_int_equal(atlas_allowed(32, 0.0f), 32);
}

/* Everything the two ops touch, in plain memory. */
typedef struct bench {
    slot slot[SLOTS];
    int32_t token[SLOTS][BLOCKS * B], page[SLOTS][BLOCKS];
    slot_report report[SLOTS];
    int32_t support[2 * SLOTS][2];
    layer_log log[2 * SLOTS];
    int32_t row_token[ROWS], position[ROWS], slot_of[ROWS], role[ROWS], fresh[ROWS], place[ROWS], live[ROWS],
        span[ROWS / B][4], count[4];
    head_best best[ROWS];
    slots s;
    plans p;
    batch b;
    tensor best_of;
    block_rule r;
} bench;

static void open_bench(bench *t, int cohort)
{
    memset(t, 0, sizeof *t);
    t->r = base_rule();
    t->r.cohort = cohort;
    t->s = (slots){.slot = tensor_of(t->slot, U8, SLOTS, sizeof(slot)),
                   .token = tensor_of(t->token, I32, SLOTS, BLOCKS * B),
                   .page = tensor_of(t->page, I32, SLOTS, BLOCKS),
                   .report = tensor_of(t->report, U8, SLOTS, sizeof(slot_report)),
                   .slot_count = SLOTS,
                   .max_blocks = BLOCKS};
    int cohorts = SLOTS / cohort;
    t->p = (plans){tensor_of(t->support, I32, 2 * cohorts, 2), tensor_of(t->log, U8, 2 * cohorts, sizeof(layer_log)),
                   cohorts, 2};
    t->b = (batch){.token = tensor_of(t->row_token, I32, ROWS, 1),
                   .position = tensor_of(t->position, I32, ROWS, 1),
                   .slot = tensor_of(t->slot_of, I32, ROWS, 1),
                   .role = tensor_of(t->role, I32, ROWS, 1),
                   .span = tensor_of(t->span, I32, ROWS / B, 4),
                   .fresh = tensor_of(t->fresh, I32, ROWS, 1),
                   .place = tensor_of(t->place, I32, ROWS, 1),
                   .live = tensor_of(t->live, I32, ROWS, 1),
                   .count = tensor_of(t->count, I32, 4, 1)};
    t->best_of = tensor_of(t->best, U8, ROWS, sizeof(head_best));
}

static void admit(bench *t, int i, int prompt, int gen)
{
    t->slot[i] = (slot){.state = prompt < B ? SLOT_WAITING : SLOT_FILLING, .prompt_tokens = prompt, .end = prompt + gen,
                        .block = prompt / B, .cache_block = -1};
    for (int k = 0; k < BLOCKS * B; k++)
        t->token[i][k] = k < prompt ? k % 50 : MASK;
}

static void rows(bench *t)
{
    assert_int_equal(cpu_rows(NULL, &t->b, &t->s, &t->p, &t->r), OK);
    for (int i = 0, at = 0; i < t->count[0]; i++) { /* `place` is `fresh` turned about */
        bool listed = at < t->count[2] && t->fresh[at] == i;
        assert_int_equal(t->place[i], listed ? at++ : -1);
    }
}

static void commit(bench *t)
{
    assert_int_equal(cpu_commit(NULL, &t->s, &t->best_of, &t->b, &t->p, &t->r), OK);
}

/* Every live row says `id` with this probability. */
static void say(bench *t, int32_t id, float p)
{
    for (int i = 0; i < ROWS; i++)
        t->best[i] = (head_best){id, p, 1, 0};
}

static void test_life_of_a_sequence(void **state)
{
    (void)state;
    bench t;
    open_bench(&t, 1);
    admit(&t, 1, 2 * B + 3, 2 * B); /* two whole prompt blocks, three tokens in the third; ends inside block 4 */
    t.r.prefill_blocks = 1;
    rows(&t);
    say(&t, 7, 0.99f);
    assert_int_equal(t.slot[1].path, PATH_PREFILL);
    assert_int_equal(t.count[0], B);
    assert_int_equal(t.count[2], B);
    assert_int_equal(t.count[3], 0);
    commit(&t);
    assert_int_equal(t.report[1].path, PATH_PREFILL);
    assert_int_equal(t.report[0].path, PATH_NONE);
    rows(&t);
    assert_int_equal(t.span[0][1], 1);
    commit(&t);
    rows(&t); /* cold: no block is left to seal, the prompt's tail counts as decoded from the start */
    assert_int_equal(t.slot[1].path, PATH_COLD);
    assert_int_equal(t.count[0], B);
    assert_int_equal(t.count[2], B);
    assert_int_equal(t.count[3], B - 3);
    assert_int_equal(t.role[0], ROW_NEW);
    assert_int_equal(t.role[3], ROW_LIVE);
    say(&t, 7, 0.5f); /* nothing passes: exactly one commits, the lowest position on a tie */
    commit(&t);
    assert_int_equal(t.report[1].committed, 1 << 3);
    assert_int_equal(t.token[1][2 * B + 3], 7);
    assert_int_equal(t.token[1][2 * B + 4], MASK);
    rows(&t); /* the prompt's tail is stable now, the committed position new: fresh once */
    assert_int_equal(t.slot[1].path, PATH_HOT_SKIP);
    assert_int_equal(t.role[0], ROW_STABLE);
    assert_int_equal(t.role[3], ROW_NEW);
    assert_int_equal(t.count[2], B - 3);
    t.best[0].probability = 0.9f;  /* at the threshold is not above it */
    t.best[1].probability = 0.91f;
    t.best[2].probability = 0.95f;
    commit(&t);
    assert_int_equal(t.report[1].committed, 1 << 5 | 1 << 6);
    assert_int_equal(t.report[1].stable, 3);
    assert_int_equal(t.report[1].newly, 1);
    say(&t, 7, 0.99f);
    rows(&t);
    commit(&t);
    assert_true(t.report[1].block_done && !t.report[1].sequence_done);
    assert_int_equal(t.report[1].stats.iterations, 3);
    assert_int_equal(t.report[1].stats.fresh_rows + t.report[1].stats.cached_rows, 3 * B);
    assert_int_equal(t.report[1].stats.layer_iterations, 2 * 2); /* hot iterations x layers */
    rows(&t); /* the sealing pass is fused with the next block's cold iteration */
    assert_int_equal(t.slot[1].path, PATH_COLD);
    assert_int_equal(t.count[0], 2 * B);
    assert_int_equal(t.count[3], B);
    assert_int_equal(t.span[0][3], 1);
    assert_int_equal(t.span[1][1], 3);
    assert_int_equal(t.role[0], ROW_SEALING);
    commit(&t);
    assert_int_equal(t.slot[1].sealed, 3);
    assert_false(t.report[1].sequence_done);
    rows(&t);
    commit(&t); /* block 4 covers P + gen_len */
    assert_true(t.report[1].sequence_done && !t.report[1].saw_eos);
    assert_int_equal(t.slot[1].state, SLOT_IDLE);
    rows(&t);
    assert_int_equal(t.count[0], 0);
}

static void test_end_token(void **state)
{
    (void)state;
    bench t;
    open_bench(&t, 1);
    admit(&t, 0, 3, 3 * B);
    t.token[0][1] = EOS; /* one in the prompt means nothing */
    rows(&t);
    say(&t, 7, 0.99f);
    commit(&t);
    assert_true(t.report[0].block_done && !t.report[0].sequence_done && !t.report[0].saw_eos);
    rows(&t);
    t.best[2].id = EOS;
    t.best[0].probability = 0.1f; /* an end token does not stop a block that has masks left */
    commit(&t);
    assert_false(t.report[0].block_done);
    rows(&t);
    commit(&t);
    assert_true(t.report[0].block_done && t.report[0].sequence_done && t.report[0].saw_eos);
}

static void test_step_limit_and_broken_logits(void **state)
{
    (void)state;
    bench t;
    open_bench(&t, 1);
    t.r.max_steps = 2;
    admit(&t, 0, 3, B);
    admit(&t, 1, 3, B);
    rows(&t);
    say(&t, 7, 0.5f);
    commit(&t);
    rows(&t);
    t.best[1].probability = 0.95f; /* one passes, the other three are forced */
    t.best[5].probability = NAN;
    commit(&t);
    assert_true(t.report[0].block_done);
    assert_int_equal(t.report[0].forced, 3);
    assert_int_equal(t.report[0].stats.forced, 3);
    assert_true(t.report[1].broken && !t.report[1].block_done);
    assert_int_equal(t.slot[1].state, SLOT_IDLE);
}

static void test_row_fallbacks(void **state)
{
    (void)state;
    static const rows_cause cause[] = {ROWS_MISS, ROWS_VERSION, ROWS_ILLEGAL, ROWS_OVERDUE};
    for (int c = 0; c < 4; c++) {
        bench t;
        open_bench(&t, 1);
        admit(&t, 0, 3, B);
        rows(&t);
        say(&t, 7, 0.5f);
        commit(&t);
        rows(&t);
        commit(&t);
        if (cause[c] == ROWS_MISS)
            t.slot[0].cache_block = 5;
        else if (cause[c] == ROWS_VERSION)
            t.slot[0].cache_version++;
        else if (cause[c] == ROWS_ILLEGAL)
            t.token[0][3] = MASK;
        else
            t.slot[0].age = t.r.refresh_every;
        rows(&t);
        assert_int_equal(t.slot[0].cause, cause[c]);
        assert_int_equal(t.count[2], B); /* all rows, from layer 0 on */
        assert_int_equal(t.count[3], cause[c] == ROWS_ILLEGAL ? 4 : 3);
        commit(&t);
        assert_int_equal(t.slot[0].stats.rows_fallback[cause[c]], 1);
        assert_int_equal(t.slot[0].age, 0);
        rows(&t);
        assert_int_equal(t.slot[0].cause, ROWS_NONE); /* it heals */
        assert_true(t.count[2] < B);
    }
}

/* Random commits: ages stay below M_C, a newly decoded row is fresh once, every M_C-th hot iteration is fresh. */
static void test_ages(void **state)
{
    (void)state;
    srand(11);
    for (int trial = 0; trial < 200; trial++) {
        bench t;
        open_bench(&t, 1);
        t.r.refresh_every = 1 + rand() % 6;
        t.r.update_every = rand() % 4;
        admit(&t, 0, rand() % B, 3 * B);
        int hot = 0;
        uint64_t last = 0;
        for (int guard = 0; guard < 100; guard++) {
            rows(&t);
            if (t.slot[0].path == PATH_NONE)
                break;
            slot before = t.slot[0];
            hot = before.path == PATH_COLD ? 0 : hot + 1;
            assert_true(before.age >= 0 && before.age <= t.r.refresh_every - 1);
            assert_int_equal(before.path == PATH_REFRESH, hot > 0 && hot % t.r.refresh_every == 0);
            uint64_t cached = slot_mask(B) & ~before.fresh;
            assert_int_equal(cached & ~before.decoded, 0);
            if (before.path != PATH_COLD)
                assert_int_equal(cached & ~last, 0); /* cached only if it was decoded at the last forward already */
            last = before.decoded;
            for (int i = 0; i < ROWS; i++)
                t.best[i] = (head_best){rand() % 90, (float)(rand() % 100) / 99.0f, 1, 0};
            commit(&t);
        }
    }
}

static void test_cohorts_start_together(void **state)
{
    (void)state;
    bench t;
    open_bench(&t, 2);
    admit(&t, 0, 3, 3 * B);
    admit(&t, 1, B + 1, B);
    rows(&t); /* slot 1 is still being prefilled: its cohort waits */
    assert_int_equal(t.slot[0].path, PATH_NONE);
    assert_int_equal(t.slot[1].path, PATH_PREFILL);
    say(&t, 7, 0.5f);
    commit(&t);
    rows(&t);
    assert_int_equal(t.slot[0].path, PATH_COLD);
    assert_int_equal(t.slot[1].path, PATH_COLD);
    for (int i = 0; i < B - 3; i++)
        t.best[i].probability = 0.99f; /* slot 0 is through at once, and drops out */
    commit(&t);
    assert_true(t.report[0].block_done);
    rows(&t);
    assert_int_equal(t.slot[0].path, PATH_NONE);
    assert_int_equal(t.slot[1].path, PATH_HOT_SKIP);
    say(&t, 7, 0.99f);
    commit(&t);
    rows(&t);
    assert_int_equal(t.slot[0].path, PATH_COLD);
    assert_int_equal(t.slot[1].path, PATH_COLD);
}

static void test_dense_lane_sends_all(void **state)
{
    (void)state;
    bench t;
    open_bench(&t, 1);
    t.r.dense_lane = true;
    admit(&t, 0, 3, B);
    rows(&t);
    say(&t, 7, 0.5f);
    commit(&t);
    rows(&t);
    assert_int_equal(t.count[2], B);
    assert_int_equal(t.slot[0].fresh, slot_mask(B) & ~7ull); /* what the merge takes is unchanged */
}

/* What benchmarks run at: so many positions an iteration, the lowest, whatever the probabilities. */
static void test_pace(void **state)
{
    (void)state;
    static const int32_t pattern[3][3] = {{3, 0, 5}, {8, 0, 0}, {1, 6, 1}};
    bench t;
    open_bench(&t, 1);
    t.s.pace = tensor_of((void *)pattern, I32, 3, 3);
    assert_int_equal(slots_pace(&t.s, 1, 0, 0), 8); /* block b of slot s: pattern (s + b * slot_count) % patterns */
    assert_int_equal(slots_pace(&t.s, 0, 1, 0), 8);
    assert_int_equal(slots_pace(&t.s, 3, 2, 1), 6);
    assert_int_equal(slots_pace(&t.s, 0, 0, 3), 0); /* behind the last step */
    admit(&t, 0, 0, 2 * B);
    admit(&t, 1, 2, B);
    say(&t, 7, 0.99f); /* all would pass */
    static const uint64_t first[] = {7, 0, 0xf8};
    for (int i = 0; i < 3; i++) {
        rows(&t);
        if (i == 0)
            t.best[B].id = 6;
        commit(&t);
        assert_int_equal(t.report[0].committed, first[i]);
        assert_int_equal(t.report[0].iteration, i);
    }
    assert_true(t.report[0].block_done);
    assert_int_equal(t.token[1][2], 6);
    assert_int_equal(t.slot[1].block, 1); /* its block took all 6 at once: 8 were allowed, 2 were given */
    t.best[1].probability = NAN;
    rows(&t);
    commit(&t);
    assert_true(t.report[0].broken); /* no pace hides logits that are none */
}

static void test_boxes(void **state)
{
    (void)state;
    backend *b;
    int32_t table[3][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}}, out[6] = {0};
    tensor part = {.data = table[1], .rows = 2, .cols = 3, .ld = 4, .type = I32}, none = tensor_of(table, I32, 0, 4);
    assert_int_equal(backend_cpu_open(&b, 1), OK);
    assert_int_equal(b->post(b, 0, &part), OK);
    assert_int_equal(b->post(b, BOXES - 1, &none), OK);
    table[1][0] = 0; /* what was posted stays */
    assert_int_equal(b->fetch(b, out, BOXES - 1), OK);
    assert_int_equal(out[0], 0);
    assert_int_equal(b->fetch(b, out, 0), OK);
    assert_memory_equal(out, ((int32_t[]){5, 6, 7, 9, 10, 11}), sizeof out);
    b->close(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_path_table),
                                       cmocka_unit_test(test_allowed),
                                       cmocka_unit_test(test_life_of_a_sequence),
                                       cmocka_unit_test(test_end_token),
                                       cmocka_unit_test(test_step_limit_and_broken_logits),
                                       cmocka_unit_test(test_row_fallbacks),
                                       cmocka_unit_test(test_ages),
                                       cmocka_unit_test(test_cohorts_start_together),
                                       cmocka_unit_test(test_dense_lane_sends_all),
                                       cmocka_unit_test(test_pace),
                                       cmocka_unit_test(test_boxes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
