/* The router against the rule spelled out in double: an expert is chosen iff fewer than K eligible ones beat it. */
#include "tests/twin/fixture.h"

#include "src/cpu/cpu.h"

enum { MOST = 256 };

/* Is a above b? Exact ties are decided by the ids; what lies closer than fp32 can be trusted to tell sets `near`. */
static bool above(double a, int id_a, double b, int id_b, bool *near)
{
    if (a != b && fabs(a - b) < 1e-5)
        *near = true;
    return a > b || (a == b && id_a < id_b);
}

/* chosen[e]: how many eligible experts beat e, or -1 where e is ineligible. score[e] as the model defines it. */
static void want_order(int *beaten, double *score, const float *z, const float *bias, const bool *eligible,
                       const route_rule *r, bool *near)
{
    double choice[MOST], best[MOST];
    bool open[MOST], keep[MOST];
    int size = r->experts / r->groups, count[MOST];
    for (int e = 0; e < r->experts; e++) {
        score[e] = 1 / (1 + exp(-(double)z[e]));
        choice[e] = score[e] + (double)bias[e];
        open[e] = eligible[e] && !isnan(z[e]); /* is never chosen, nor counted in its group */
    }
    for (int g = 0; g < r->groups; g++) {
        count[g] = 0;
        best[g] = 0;
        for (int e = g * size; e < (g + 1) * size; e++) {
            int over = 0;
            for (int x = g * size; x < (g + 1) * size; x++)
                over += open[x] && x != e && above(choice[x], x, choice[e], e, near);
            if (open[e] && over < 2) {
                count[g]++;
                best[g] += choice[e];
            }
        }
    }
    for (int g = 0; g < r->groups; g++) {
        int over = 0;
        for (int x = 0; x < r->groups; x++)
            if (x != g && count[x] > 0)
                over += count[x] > count[g] || (count[x] == count[g] && above(best[x], x, best[g], g, near));
        keep[g] = count[g] > 0 && over < r->top_groups;
    }
    for (int e = 0; e < r->experts; e++)
        open[e] = open[e] && keep[e / size];
    for (int e = 0; e < r->experts; e++) {
        beaten[e] = open[e] ? 0 : -1;
        for (int x = 0; open[e] && x < r->experts; x++)
            beaten[e] += open[x] && x != e && above(choice[x], x, choice[e], e, near);
    }
}

/* A score is off by at most 2^-21 of itself (exponential and quotient), a sum of K and the quotient likewise. */
static bool close_to(float a, double want)
{
    return fabs((double)a - want) <= 0x1p-19 * fabs(want);
}

static const route_rule rules[] = {{32, 4, 4, 2, 2.5f, true},  {256, 8, 8, 4, 2.5f, true}, {16, 4, 4, 2, 2.5f, true},
                                   {20, 6, 1, 1, 1.0f, false}, {12, 2, 12, 3, 1, true},    {6, 6, 3, 2, 2, true},
                                   {40, 1, 4, 4, 2.5f, false}, {33, 5, 3, 1, 1, true}};
enum { RULES = sizeof rules / sizeof *rules };

/* In odd trials few different logits and no bias: ties between experts and between groups. In the others a NaN a row. */
static void draw(tensor *z, tensor *bias, int trial)
{
    for (int64_t i = 0; i < z->rows; i++)
        for (int64_t e = 0; e < z->cols; e++)
            at(z, i)[e] = trial % 2 ? (float)(rand() % 6 - 3) : 6 * fixture_random();
    for (int64_t i = 0; i < z->rows && trial % 2 == 0; i++)
        at(z, i)[rand() % z->cols] = NAN;
    for (int64_t e = 0; e < z->cols; e++)
        at(bias, 0)[e] = trial % 2 ? 0 : 0.3f * fixture_random();
}

static void test_route(void **state)
{
    (void)state;
    enum { SLOTS = 6, SIZE = 8 };
    int rows = 0, skipped = 0, short_rows = 0;
    for (int n = 0; n < RULES; n++)
        for (int trial = 0; trial < 12; trial++) {
            const route_rule *r = &rules[n];
            int layers = 2, layer = trial % 2, words = (r->experts + 31) / 32;
            block_rule k = {.block_size = SIZE, .cohort = 1 + trial / 2 % 3, .restrict_experts = trial != 6};
            backend *b = fixture_backend(1 + trial % 2);
            fixture f;
            fixture_open(&f, SLOTS, 4, SIZE);
            plans p = {.cohort_count = (SLOTS + k.cohort - 1) / k.cohort, .layers = layers};
            p.support = fixture_ints(layers * p.cohort_count, words + 1);
            p.log = tensor_of(calloc((size_t)(layers * p.cohort_count), sizeof(layer_log)), U8, layers * p.cohort_count,
                              sizeof(layer_log));
            for (int i = 0; i < layers * p.cohort_count; i++) {
                int one_in = 1 + rand() % 12; /* supports from all experts down to a few or none */
                for (int e = 0; e < r->experts; e++)
                    if (rand() % one_in == 0)
                        int_at(&p.support, i)[e / 32] |= (int32_t)(1u << (e % 32));
                int_at(&p.support, i)[words] = rand() % 4 ? 1 : rand() % 2 * 2;
            }
            for (int i = 0; i < SLOTS; i++) {
                f.slot[i].path = i / k.cohort == 1 ? PATH_COLD : PATH_HOT_SKIP;
                f.slot[i].fresh = (uint64_t)rand() & slot_mask(SIZE);
            }
            const fixture_block blocks[] = {{0, 0, false}, {1, 1, true},  {1, 2, false},
                                            {2, 3, false}, {4, 0, false}, {5, 1, false}};
            fixture_batch(&f, blocks, trial == 4 ? 0 : 6, trial % 3 == 2);
            int fresh = f.count[2];
            tensor z = fixture_tensor(fresh, r->experts, 1), bias = fixture_tensor(1, r->experts, 1);
            tensor weights = fixture_tensor(fresh + 1, r->top_k, 1), ids = fixture_ints(fresh + 1, r->top_k);
            draw(&z, &bias, trial);
            *int_at(&ids, fresh) = 77;
            assert_int_equal(b->route(b, &ids, &weights, &z, &bias, &p, layer, &f.in, &f.s, r, &k), OK);
            assert_int_equal(*int_at(&ids, fresh), 77);
            layer_log want_log[SLOTS] = {{0}};
            bool seen[SLOTS][MOST] = {{false}};
            for (int i = 0; i < fresh; i++) {
                int row = *int_at(&f.in.fresh, i), owner = *int_at(&f.in.slot, row), cohort = owner / k.cohort;
                bool sealing = *int_at(&f.in.role, row) == ROW_SEALING, near = false, eligible[MOST];
                const int32_t *s = int_at(&p.support, layer * p.cohort_count + cohort);
                bool restricted = k.restrict_experts && f.slot[owner].path != PATH_COLD && s[words] == 1;
                int size = 0;
                for (int e = 0; e < r->experts; e++) {
                    eligible[e] = sealing || !restricted || ((uint32_t)s[e / 32] >> (e % 32) & 1);
                    size += eligible[e];
                }
                int beaten[MOST], edges = 0;
                double score[MOST], sum = 0;
                want_order(beaten, score, at(&z, i), at(&bias, 0), eligible, r, &near);
                rows++;
                skipped += near;
                for (int e = 0; e < r->experts; e++)
                    if (beaten[e] >= 0 && beaten[e] < r->top_k)
                        sum += score[e];
                for (int e = 0; !near && e < r->experts; e++)
                    if (beaten[e] >= 0 && beaten[e] < r->top_k) {
                        assert_int_equal(int_at(&ids, i)[edges], e);
                        double want = (r->normalise ? score[e] / sum : score[e]) * (double)r->scale;
                        assert_true(close_to(at(&weights, i)[edges++], want));
                    }
                short_rows += !near && edges < r->top_k;
                for (int j = edges; !near && j < r->top_k; j++) {
                    assert_int_equal(int_at(&ids, i)[j], -1);
                    assert_true(at(&weights, i)[j] == 0);
                }
                if (sealing || !(f.slot[owner].fresh >> (*int_at(&f.in.position, row) % SIZE) & 1))
                    continue;
                want_log[cohort].fresh++;
                want_log[cohort].support = size;
                for (int j = 0; j < r->top_k && int_at(&ids, i)[j] >= 0; j++) {
                    want_log[cohort].distinct += !seen[cohort][int_at(&ids, i)[j]];
                    seen[cohort][int_at(&ids, i)[j]] = true;
                }
            }
            for (int c = 0; c < p.cohort_count; c++) {
                const layer_log *log = (const layer_log *)p.log.data + layer * p.cohort_count + c;
                assert_memory_equal(log, &want_log[c], sizeof *log);
            }
            free(z.data), free(bias.data), free(weights.data), free(ids.data), free(p.support.data), free(p.log.data);
            fixture_close(&f);
            b->close(b);
        }
    assert_true(rows > 2000 && skipped < rows / 10);
    assert_true(short_rows > 50); /* fewer than K were eligible */
}

static void test_candidates(void **state)
{
    (void)state;
    for (int n = 0; n < RULES; n++)
        for (int trial = 0; trial < 20; trial++) {
            const route_rule *r = &rules[n];
            tensor z = fixture_tensor(1, r->experts, 1), bias = fixture_tensor(1, r->experts, 1);
            draw(&z, &bias, trial);
            bool all[MOST], near = false;
            int beaten[MOST], count = 0;
            double score[MOST];
            memset(all, true, sizeof all);
            want_order(beaten, score, at(&z, 0), at(&bias, 0), all, r, &near);
            for (int e = 0; e < r->experts; e++)
                count += beaten[e] >= 0;
            for (int ask = r->top_k; ask <= r->experts; ask += r->top_k + 1) {
                int32_t id[MOST];
                float got[MOST];
                assert_int_equal(route_candidates(at(&z, 0), at(&bias, 0), r, ask, id, got), ask < count ? ask : count);
                for (int i = 0; !near && i < ask && i < count; i++) {
                    assert_int_equal(beaten[id[i]], i);
                    assert_true(close_to(got[i], score[id[i]]));
                }
            }
            free(z.data), free(bias.data);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_route), cmocka_unit_test(test_candidates)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
