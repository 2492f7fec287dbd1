/* The error convention, and the order of sums. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/base/status.h"
#include "src/base/sum_tree.h"

#include <stdlib.h>
#include <string.h>

static status deep(int bad)
{
    status st = OK;
    if (bad)
        FAIL(BAD_INPUT, "file.txt:%d: found %s, want %s", 7, "this", "that");
out:
    return st;
}

static status outer(int bad)
{
    status st = OK;
    TRY(deep(bad));
out:
    return st;
}

static void test_status_message(void **state)
{
    (void)state;
    assert_int_equal(outer(0), OK);
    assert_int_equal(outer(1), BAD_INPUT);
    assert_non_null(strstr(status_message(), "file.txt:7: found this, want that [tests/unit/test_base.c:"));
    status_fail(FAILED, "f", 1, "again: %s", status_message());
    assert_non_null(strstr(status_message(), "again: file.txt:7"));
}

/* The definition, spelled out over a dense array: leaf[e] or absent. */
static int naive(const float *leaf, const char *present, int per_shard, int lo, int hi, float *sum)
{
    int have = 0;
    if (hi - lo == 1) {
        for (int e = lo * per_shard; e < hi * per_shard; e++)
            if (present[e]) {
                *sum = have ? *sum + leaf[e] : leaf[e];
                have = 1;
            }
        return have;
    }
    int mid = lo + (hi - lo) / 2;
    float a, b;
    int left = naive(leaf, present, per_shard, lo, mid, &a), right = naive(leaf, present, per_shard, mid, hi, &b);
    if (left && right)
        *sum = a + b;
    else if (left || right)
        *sum = left ? a : b;
    return left || right;
}

static void test_sums_do_not_depend_on_ranks(void **state)
{
    (void)state;
    static const int shape[][2] = {{16, 4}, {32, 4}, {256, 8}, {20, 10}, {12, 3}, {64, 1}, {8, 2}, {96, 12}};
    srand(5);
    for (size_t k = 0; k < sizeof shape / sizeof *shape; k++) {
        int experts = shape[k][0];
        for (int ranks = 1; ranks <= experts && ranks <= 17; ranks++) {
            sum_tree *t;
            assert_int_equal(sum_tree_open(&t, experts, shape[k][1], ranks), OK);
            if (t->shards % ranks == 0 && (t->shards & (t->shards - 1)) == 0)
                assert_int_equal(t->unit_count, ranks);
            float *scratch = malloc(sizeof(float) * (size_t)sum_tree_scratch(t) * 2);
            for (int trial = 0; trial < 30; trial++) {
                float leaf[256], pair[256][2];
                char present[256] = {0};
                int32_t id[256];
                const float *edge[256], *term[256];
                float unit[256][2];
                int edges = 0;
                for (int e = 0; e < experts; e++) {
                    leaf[e] = (float)rand() / 1e4f - 1e5f;
                    pair[e][0] = leaf[e];
                    pair[e][1] = -leaf[e];
                    present[e] = rand() % experts < (trial % 3 == 0 ? experts : 8);
                    if (present[e]) {
                        id[edges] = e;
                        edge[edges++] = pair[e];
                    }
                }
                for (int u = 0; u < t->unit_count; u++) {
                    int any = 0;
                    for (int e = t->unit[u].first; e < t->unit[u].last; e++)
                        any |= present[e];
                    term[u] = any ? unit[u] : NULL;
                    if (any)
                        sum_tree_unit(t, u, unit[u], id, edge, edges, 2, scratch);
                }
                float y[2], want = 0;
                sum_tree_fold(t, y, term, 2, scratch);
                naive(leaf, present, t->per_shard, 0, t->shards, &want);
                assert_memory_equal(&y[0], &want, sizeof want);
                assert_true(y[1] == -want);
            }
            for (int r = 0; r < ranks; r++) {
                int n = t->rank_first[r + 1] - t->rank_first[r];
                assert_true(n >= experts / ranks && n <= experts / ranks + 1);
                for (int e = t->rank_first[r]; e < t->rank_first[r + 1]; e++) {
                    assert_int_equal(t->rank_of[e], r);
                    assert_in_range(t->unit_of[e], t->rank_unit[r], t->rank_unit[r + 1] - 1);
                }
            }
            free(scratch);
            sum_tree_close(t);
        }
    }
    sum_tree *t;
    assert_int_equal(sum_tree_open(&t, 8, 2, 9), BAD_INPUT);
    assert_non_null(strstr(status_message(), "9 ranks, but the model has 8 experts"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_status_message),
                                       cmocka_unit_test(test_sums_do_not_depend_on_ranks)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
