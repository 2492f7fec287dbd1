/* Embedding, residuals, SiLU, and the compact and full forms of a shard. */
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
 * for what is larger, so a gate below -88 gives up to 1e-36 in place of 0. */
static void test_swiglu_and_add(void **state)
{
    (void)state;
    backend *b = fixture_backend(2);
    for (int k = 0; k < SHAPES; k++) {
        int rows = shapes[k].rows, inner = shapes[k].out;
        tensor gu = fixture_tensor(rows + 1, 2 * inner, 1), y = fixture_tensor(rows + 1, inner, 1);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < inner; j++)
                at(&gu, i)[j] *= powf(10, (float)(j % 4) - 1); /* gates up to 100 */
        int32_t used = rows;
        float last = at(&y, rows)[0];
        gu.used = &used;
        assert_int_equal(b->swiglu(b, &y, &gu), OK);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < inner; j++) {
                double g = (double)at(&gu, i)[j], want = g / (1 + exp(-g)) * (double)at(&gu, i)[inner + j];
                assert_true(fabs((double)at(&y, i)[j] - want) <= 0x1p-21 * fabs(want) + 1e-35);
            }
        tensor x = fixture_tensor(rows + 1, inner, 1), sum = fixture_tensor(rows + 1, inner, 1);
        memcpy(sum.data, y.data, (size_t)(y.rows * y.ld) * sizeof(float));
        y.used = &used;
        assert_int_equal(b->add(b, &y, &x), OK);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < inner; j++)
                assert_true(at(&y, i)[j] == at(&sum, i)[j] + at(&x, i)[j]);
        assert_true(at(&y, rows)[0] == last);
        free(gu.data), free(y.data), free(x.data), free(sum.data);
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

/* Every row of y, and every row of the cache, comes from where the masks say; with all rows dispatched too. */
static void test_merge(void **state)
{
    (void)state;
    enum { SLOTS = 4, HIDDEN = 37, LAYERS = 3 };
    backend *b = fixture_backend(2);
    static const int sizes[] = {1, 5, 32, BLOCK_MOST};
    for (int n = 0; n < 4; n++)
        for (int trial = 0; trial < 8; trial++) {
            bool dense = trial % 2;
            int here = sizes[n], layer = trial % LAYERS;
            block_rule k = {.block_size = here, .cohort = 1, .dense_lane = dense};
            fixture f;
            fixture_open(&f, SLOTS, 4, here);
            for (int i = 0; i < SLOTS; i++) {
                f.slot[i].decoded = ((uint64_t)rand() << 33 ^ (uint64_t)rand()) & slot_mask(here);
                /* fresh: live rows always; of the decoded ones some; in trial 2 all, in trial 4 none */
                uint64_t some = trial == 2 ? ~0ull : trial == 4 ? 0 : (uint64_t)rand() << 33 ^ (uint64_t)rand();
                f.slot[i].fresh = (~f.slot[i].decoded | some) & slot_mask(here);
            }
            const fixture_block blocks[] = {{0, 1, true}, {0, 2, false}, {1, 3, false}, {3, 0, false}};
            fixture_batch(&f, blocks, trial == 6 ? 0 : 4, dense);
            tensor packed = fixture_tensor(f.count[2], HIDDEN, 1), y = fixture_tensor(4 * here, HIDDEN, 1);
            tensor cache = fixture_tensor((int64_t)LAYERS * SLOTS * here, HIDDEN, 1);
            tensor want = fixture_tensor(cache.rows, HIDDEN, 1);
            memcpy(want.data, cache.data, (size_t)(cache.rows * cache.ld) * sizeof(float));
            assert_int_equal(b->merge(b, &y, &packed, &cache, layer, &f.in, &f.s, &k), OK);
            for (int row = 0, at_fresh = 0; row < f.count[0]; row++) {
                bool sent = at_fresh < f.count[2] && *int_at(&f.in.fresh, at_fresh) == row;
                int place = at_fresh;
                at_fresh += sent;
                const fixture_block *x = &blocks[row / here];
                const slot *of = &f.slot[x->slot];
                int in_block = row % here;
                int64_t kept = ((int64_t)layer * SLOTS + x->slot) * here + in_block;
                if (x->sealing || (of->fresh >> in_block & 1)) {
                    assert_true(sent);
                    assert_true(same_rows(&y, row, &packed, place));
                    if (!x->sealing && (of->decoded >> in_block & 1))
                        memcpy(at(&want, kept), at(&packed, place), HIDDEN * sizeof(float));
                } else {
                    assert_true(same_rows(&y, row, &want, kept));
                }
            }
            for (int64_t i = 0; i < cache.rows; i++)
                assert_true(same_rows(&cache, i, &want, i));
            free(packed.data), free(y.data), free(cache.data), free(want.data);
            fixture_close(&f);
        }
    b->close(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_embed), cmocka_unit_test(test_swiglu_and_add),
                                       cmocka_unit_test(test_pack), cmocka_unit_test(test_merge)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
