/* The LM head, reduced as it is computed, against all logits in double. */
#include "tests/twin/fixture.h"

static const int vocabs[] = {2, 97, 128, 1536, 9001};
enum { VOCABS = sizeof vocabs / sizeof *vocabs };

static tensor open_best(int64_t rows)
{
    return tensor_of(calloc((size_t)rows + 1, sizeof(head_best)), U8, rows, sizeof(head_best));
}

static const head_best *best_at(const tensor *t, int64_t row)
{
    return (const head_best *)t->data + row;
}

/* Logits are sums of H products below 1, off by at most e = (H + 1) 2^-24 H; a random one by a hundredth of it.
 * A probability is off by twice that and a few 2^-22 for exponentials, rescalings and sums;
 * none is below e^-87, the exponential's least result. */
static void test_head(void **state)
{
    (void)state;
    static const int row_counts[] = {0, 1, 7, 8, 33};
    int compared = 0, rows_seen = 0;
    for (int n = 0; n < VOCABS; n++)
        for (int k = 0; k < 5; k++) {
            int vocab = vocabs[n], hidden = k % 2 ? 256 : 50, rows = row_counts[k];
            int mask = k == 0 ? 0 : k == 1 ? vocab - 1 : rand() % vocab;
            double e = (hidden + 1) * 0x1p-24 * hidden / 100;
            backend *b = fixture_backend(1 + k % 2);
            tensor h = fixture_tensor(rows + 1, hidden, 1), w = fixture_tensor(vocab, hidden, 1);
            tensor best = open_best(rows + 1);
            if (k > 1) /* the mask id would win */
                for (int j = 0; j < hidden; j++)
                    at(&w, mask)[j] = at(&h, 0)[j];
            int32_t used = rows;
            h.used = &used;
            assert_int_equal(b->head(b, &best, &h, &w, mask), OK);
            for (int i = 0; i < rows; i++) {
                double *z = malloc((size_t)vocab * sizeof *z), sum = 0, top = -INFINITY, second = -INFINITY;
                int id = -1;
                for (int v = 0; v < vocab; v++) {
                    z[v] = 0;
                    for (int j = 0; j < hidden; j++)
                        z[v] += (double)at(&h, i)[j] * (double)at(&w, v)[j];
                    if (v != mask && z[v] > top) {
                        second = top;
                        top = z[v];
                        id = v;
                    } else if (v != mask && z[v] > second) {
                        second = z[v];
                    }
                }
                for (int v = 0; v < vocab; v++)
                    sum += exp(z[v] - top);
                const head_best *x = best_at(&best, i);
                rows_seen++;
                if (top - second > 4 * e) {
                    assert_int_equal(x->id, id);
                    compared++;
                }
                assert_true(fabs((double)x->top - top) <= e);
                assert_true(vocab == 2 ? x->second == -INFINITY : fabs((double)x->second - second) <= e);
                assert_true(fabs((double)x->probability - 1 / sum) <= (3 * e + 0x1p-18) / sum + 0x1p-125);
                free(z);
            }
            assert_true(best_at(&best, rows)->top == 0); /* not used, not written */
            free(h.data), free(w.data), free(best.data);
            b->close(b);
        }
    assert_true(compared >= rows_seen - rows_seen / 20);
}

/* Small integers: every product and sum is exact, so that equal logits are equal. */
static void test_ties(void **state)
{
    (void)state;
    backend *b = fixture_backend(2);
    for (int n = 1; n < VOCABS; n++)
        for (int trial = 0; trial < 10; trial++) {
            int vocab = vocabs[n], hidden = 16, mask = trial % 3 ? rand() % vocab : 0;
            tensor h = fixture_tensor(20, hidden, 1), w = fixture_tensor(vocab, hidden, 1), best = open_best(20);
            for (int i = 0; i < 20; i++)
                for (int j = 0; j < hidden; j++)
                    at(&h, i)[j] = (float)(rand() % 3 - 1);
            for (int v = 0; v < vocab; v++)
                for (int j = 0; j < hidden; j++)
                    at(&w, v)[j] = trial == 9 ? 1 : (float)(rand() % 3 - 1); /* trial 9: all logits are equal */
            assert_int_equal(b->head(b, &best, &h, &w, mask), OK);
            for (int i = 0; i < 20; i++) {
                int id = -1;
                float top = -INFINITY, second = -INFINITY;
                for (int v = 0; v < vocab; v++) {
                    float z = 0;
                    for (int j = 0; j < hidden; j++)
                        z += at(&h, i)[j] * at(&w, v)[j];
                    if (v != mask && z > top) {
                        second = top;
                        top = z;
                        id = v;
                    } else if (v != mask && z > second) {
                        second = z;
                    }
                }
                const head_best *x = best_at(&best, i);
                assert_int_equal(x->id, id);
                assert_true(x->top == top && x->second == second);
            }
            free(h.data), free(w.data), free(best.data);
        }
    b->close(b);
}

static void test_a_row_knows_no_neighbours(void **state)
{
    (void)state;
    backend *one = fixture_backend(1), *two = fixture_backend(2);
    for (int n = 0; n < VOCABS; n++) {
        int vocab = vocabs[n], hidden = 256, mask = vocab / 2;
        tensor h = fixture_tensor(64, hidden, 1), w = fixture_tensor(vocab, hidden, 0.2f);
        tensor held = fixture_narrow(one, &w, BF16);
        tensor alone = open_best(1), best = open_best(64), row = fixture_tensor(1, hidden, 1);
        assert_int_equal(one->head(one, &alone, &row, &w, mask), OK);
        for (int place = 0; place < 64; place += 1 + place / 9) {
            memcpy(at(&h, place), row.data, (size_t)hidden * sizeof(float));
            backend *b = place % 2 ? one : two;
            assert_int_equal(b->head(b, &best, &h, place % 3 ? &w : &held, mask), OK);
            assert_memory_equal(best_at(&best, place), best_at(&alone, 0), sizeof(head_best));
        }
        free(h.data), free(w.data), free(held.data), free(alone.data), free(best.data), free(row.data);
    }
    one->close(one);
    two->close(two);
}

/* A row of NaN still names a token that exists and is not the mask. */
static void test_nan(void **state)
{
    (void)state;
    backend *b = fixture_backend(1);
    tensor h = fixture_tensor(2, 16, 1), w = fixture_tensor(300, 16, 1), best = open_best(2);
    at(&h, 0)[3] = NAN;
    for (int mask = 0; mask <= 5; mask += 5) {
        assert_int_equal(b->head(b, &best, &h, &w, mask), OK);
        assert_int_equal(best_at(&best, 0)->id, mask == 0);
        assert_false(best_at(&best, 0)->probability > 0);
        assert_true(best_at(&best, 1)->probability > 0);
    }
    free(h.data), free(w.data), free(best.data);
    b->close(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_head), cmocka_unit_test(test_ties),
                                       cmocka_unit_test(test_a_row_knows_no_neighbours), cmocka_unit_test(test_nan)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
