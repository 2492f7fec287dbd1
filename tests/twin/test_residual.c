/* The ends of sublayers: sums row by row, the norm as the op `norm` has it, packed copies where the list says. */
#include "tests/twin/fixture.h"

/* Copies of x's rows, to compare with. */
static tensor copy_of(const tensor *x)
{
    tensor t = *x;
    t.data = malloc((size_t)(x->rows * x->ld + 1) * sizeof(float));
    memcpy(t.data, x->data, (size_t)(x->rows * x->ld) * sizeof(float));
    return t;
}

/* h, and where it has data h_fresh, against the op `norm` of r's x. */
static void check_norm(backend *b, const residual *r, const batch *in, int rows)
{
    tensor want = copy_of(&r->h), x = r->x;
    x.used = &rows;
    assert_int_equal(b->norm(b, &want, &x, r->norm, r->eps), OK);
    for (int64_t i = 0; i < r->h.rows; i++)
        assert_true(same_rows(&r->h, i, &want, i));
    for (int i = 0; r->h_fresh.data && i < *in->fresh.used; i++)
        assert_true(same_rows(&r->h_fresh, i, &want, *int_at(&in->fresh, i)));
    free(want.data);
}

static void test_add_norm(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 2; threads++) {
        backend *b = fixture_backend(threads);
        for (int k = 0; k < SHAPES; k++) {
            int rows = shapes[k].rows, n = shapes[k].in, count = 0;
            tensor w = fixture_tensor(1, n, 1), y = fixture_tensor(rows + 1, n, 1), list = fixture_ints(rows + 1, 1);
            residual r = {fixture_tensor(rows + 1, n, 3), fixture_tensor(rows + 1, n, 1), {0}, &w, 1e-6f, 0};
            batch in = {.fresh = list, .place = fixture_ints(rows + 1, 1)};
            for (int i = 0; i < rows; i++) {
                *int_at(&in.place, i) = rand() % 3 ? count : -1;
                if (*int_at(&in.place, i) >= 0)
                    *int_at(&list, count++) = i;
            }
            in.fresh.used = &count;
            if (k % 3)
                r.h_fresh = fixture_tensor(count, n, 1);
            tensor old = copy_of(&r.x);
            r.x.used = &rows;
            assert_int_equal(b->add_norm(b, &r, &y, &in), OK);
            for (int i = 0; i <= rows; i++)
                for (int j = 0; j < n; j++)
                    assert_true(at(&r.x, i)[j] == at(&old, i)[j] + (i < rows ? at(&y, i)[j] : 0));
            check_norm(b, &r, &in, rows);
            free(w.data), free(y.data), free(list.data), free(in.place.data), free(old.data);
            free(r.x.data), free(r.h.data), free(r.h_fresh.data);
        }
        b->close(b);
    }
}

/* What every row gets, and every row of the cache, comes from where the masks say; with all rows dispatched too. */
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
            fixture_masks(&f, trial);
            const fixture_block blocks[] = {{0, 1, true}, {0, 2, false}, {1, 3, false}, {3, 0, false}};
            fixture_batch(&f, blocks, trial == 6 ? 0 : 4, dense);
            tensor packed = fixture_tensor(f.count[2], HIDDEN, 1), shared = fixture_tensor(4 * here, HIDDEN, 1);
            tensor w = fixture_tensor(1, HIDDEN, 1), y = fixture_tensor(1, HIDDEN, 1), none = {0};
            residual r = {fixture_tensor(4 * here, HIDDEN, 1), fixture_tensor(4 * here, HIDDEN, 1), {0}, &w, 1e-6f, 0};
            tensor cache = fixture_tensor((int64_t)LAYERS * SLOTS * here, HIDDEN, 1);
            tensor want = fixture_tensor(cache.rows, HIDDEN, 1), old = copy_of(&r.x);
            bool alone = trial / 2 % 2;
            r.x.used = &f.count[0];
            memcpy(want.data, cache.data, (size_t)(cache.rows * cache.ld) * sizeof(float));
            assert_int_equal(b->merge(b, &r, &packed, alone ? &none : &shared, &cache, layer, &f.in, &f.s, &k), OK);
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
                    memcpy(y.data, at(&packed, place), HIDDEN * sizeof(float));
                    if (!x->sealing && (of->decoded >> in_block & 1))
                        memcpy(at(&want, kept), at(&packed, place), HIDDEN * sizeof(float));
                } else {
                    memcpy(y.data, at(&want, kept), HIDDEN * sizeof(float));
                }
                for (int j = 0; j < HIDDEN; j++)
                    assert_true(at(&r.x, row)[j] ==
                                at(&old, row)[j] + (at(&y, 0)[j] + (alone ? 0 : at(&shared, row)[j])));
            }
            check_norm(b, &r, &f.in, f.count[0]);
            for (int64_t i = 0; i < cache.rows; i++)
                assert_true(same_rows(&cache, i, &want, i));
            free(packed.data), free(shared.data), free(y.data), free(w.data), free(cache.data), free(want.data);
            free(old.data), free(r.x.data), free(r.h.data);
            fixture_close(&f);
        }
    b->close(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_add_norm), cmocka_unit_test(test_merge)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
