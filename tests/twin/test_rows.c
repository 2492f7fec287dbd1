/* Embedding, SiLU, and the compact form of a shard. */
#include "tests/twin/fixture.h"

static void test_embed(void **state)
{
    (void)state;
    backend *b = fixture_backend(2);
    for (int k = 0; k < SHAPES; k++) {
        int rows = shapes[k].rows, cols = shapes[k].in, vocab = shapes[k].out;
        tensor table = fixture_tensor(vocab, cols, 1), half = fixture_narrow(b, &table, F16);
        tensor bf16 = fixture_narrow(b, &table, BF16); /* the table now holds what both can */
        free(half.data);
        half = fixture_narrow(b, &table, F16);
        tensor ids = fixture_ints(rows + 1, 1), y = fixture_tensor(rows + 1, cols, 1), old = fixture_tensor(1, cols, 1);
        memcpy(old.data, at(&y, rows), (size_t)cols * sizeof(float));
        for (int i = 0; i < rows; i++)
            *int_at(&ids, i) = i == 0 ? vocab - 1 : rand() % vocab;
        int32_t used = rows;
        ids.used = &used;
        const tensor *tables[] = {&table, &half, &bf16};
        for (int t = 0; t < 3; t++) {
            assert_int_equal(b->embed(b, &y, tables[t], &ids), OK);
            for (int i = 0; i < rows; i++)
                assert_true(same_rows(&y, i, &table, *int_at(&ids, i)));
            assert_true(same_rows(&y, rows, &old, 0));
        }
        free(table.data), free(half.data), free(bf16.data), free(ids.data), free(y.data), free(old.data);
    }
    b->close(b);
}

/* silu: the exponential to 2e-7, a sum, a quotient and two products, each to 2^-24: below 2^-21 in all. e^88 stands in
 * for what is larger, so a gate below -88 gives up to 1e-36 in place of 0. The product with a unit matrix is exact. */
static void test_gated(void **state)
{
    (void)state;
    backend *b = fixture_backend(2);
    for (int k = 0; k < SHAPES; k++) {
        int rows = shapes[k].rows, inner = shapes[k].out;
        tensor x = fixture_tensor(rows + 1, 2 * inner, 1), y = fixture_tensor(rows + 1, inner, 1),
               both = fixture_tensor(rows + 1, 2 * inner, 1), w = fixture_tensor(2 * inner, 2 * inner, 0);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < inner; j++)
                at(&x, i)[j] *= powf(10, (float)(j % 4) - 1); /* gates up to 100 */
        for (int j = 0; j < 2 * inner; j++)
            at(&w, j)[j] = 1;
        int32_t used = rows;
        float last = at(&y, rows)[0];
        x.used = &used;
        assert_int_equal(b->gated(b, &y, &both, &x, &w), OK);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < inner; j++) {
                double g = (double)at(&x, i)[j], want = g / (1 + exp(-g)) * (double)at(&x, i)[inner + j];
                assert_true(fabs((double)at(&y, i)[j] - want) <= 0x1p-21 * fabs(want) + 1e-35);
            }
        assert_true(at(&y, rows)[0] == last);
        free(x.data), free(y.data), free(both.data), free(w.data);
    }
    b->close(b);
}

static void test_pack(void **state)
{
    (void)state;
    backend *b = fixture_backend(2);
    for (int k = 0; k < SHAPES; k++) {
        int rows = shapes[k].rows, cols = shapes[k].in, count = 0;
        tensor full = fixture_tensor(rows, cols, 1), packed = fixture_tensor(rows + 1, cols, 1);
        tensor list = fixture_ints(rows + 1, 1), old = fixture_tensor(rows + 1, cols, 1);
        memcpy(old.data, packed.data, (size_t)(old.rows * old.ld) * sizeof(float));
        for (int i = 0; i < rows; i++)
            if (rand() % 3)
                *int_at(&list, count++) = i;
        list.used = &count;
        assert_int_equal(b->pack(b, &packed, &full, &list), OK);
        for (int i = 0; i <= rows; i++)
            assert_true(i < count ? same_rows(&packed, i, &full, *int_at(&list, i)) : same_rows(&packed, i, &old, i));
        free(full.data), free(packed.data), free(list.data), free(old.data);
    }
    b->close(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_embed), cmocka_unit_test(test_gated),
                                       cmocka_unit_test(test_pack)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
