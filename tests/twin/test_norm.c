/* RMSNorm and the rotation of queries and keys against double loops. */
#include "tests/twin/fixture.h"

/* A norm: 16 chains of squares, a square root, three products: relative error below (n / 16 + 10) 2^-24. */
static void test_norm(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 2; threads++) {
        backend *b = fixture_backend(threads);
        for (int k = 0; k < SHAPES; k++) {
            int rows = shapes[k].rows, n = shapes[k].in;
            tensor x = fixture_tensor(rows + 2, n, 3), w = fixture_tensor(1, n, 1), y = fixture_tensor(rows + 2, n, 1);
            tensor alone = fixture_tensor(1, n, 1);
            int32_t used = rows;
            x.used = &used;
            float untouched = at(&y, rows)[0];
            assert_int_equal(b->norm(b, &y, &x, &w, 1e-6f), OK);
            for (int i = 0; i < rows; i++) {
                double sum = 0;
                for (int j = 0; j < n; j++)
                    sum += (double)at(&x, i)[j] * (double)at(&x, i)[j];
                for (int j = 0; j < n; j++) {
                    double want = (double)at(&x, i)[j] / sqrt(sum / n + 1e-6) * (double)at(&w, 0)[j];
                    assert_true(fabs((double)at(&y, i)[j] - want) <= (n / 16 + 10) * 0x1p-24 * fabs(want));
                }
                tensor row = tensor_rows(&x, i, 1);
                assert_int_equal(b->norm(b, &alone, &row, &w, 1e-6f), OK);
                assert_true(same_rows(&y, i, &alone, 0));
            }
            assert_true(at(&y, rows)[0] == untouched);
            assert_int_equal(b->norm(b, &x, &x, &w, 1e-6f), OK); /* in place */
            for (int i = 0; i < rows; i++)
                assert_true(same_rows(&y, i, &x, i));
            free(x.data), free(w.data), free(y.data), free(alone.data);
        }
        b->close(b);
    }
}

/* The formula in double, but for the angle, which is fp32 by definition. The head's numbers are of size 1 after the
 * norm (of size 2 without): errors of the norm, of cosf and sinf, and of a sum of two products stay below 2e-6. */
static void want_head(double *y, const float *x, const float *w, int position, const attention_rule *r)
{
    double sum = 0;
    int half = r->rotary_dim / 2;
    for (int j = 0; j < r->head_dim; j++)
        sum += (double)x[j] * (double)x[j];
    for (int j = 0; j < r->head_dim; j++)
        y[j] = w ? (double)x[j] / sqrt(sum / r->head_dim + (double)r->eps) * (double)w[j] : (double)x[j];
    for (int j = 0; j < half; j++) {
        float angle = (float)position * powf(r->theta, -2.0f * (float)j / (float)r->rotary_dim);
        double u = y[j], v = y[j + half];
        y[j] = u * cos((double)angle) - v * sin((double)angle);
        y[j + half] = v * cos((double)angle) + u * sin((double)angle);
    }
}

static void assert_head(const float *y, const float *x, const float *w, int position, const attention_rule *r)
{
    double want[256];
    want_head(want, x, w, position, r);
    for (int j = 0; j < r->head_dim; j++)
        assert_true(fabs((double)y[j] - want[j]) <= 2e-6);
}

static void test_rotate(void **state)
{
    (void)state;
    static const attention_rule rules[] = {{8, 2, 32, 16, 10000, 1e-6f, true, 32},
                                           {4, 4, 20, 20, 600000, 1e-5f, true, 5},
                                           {2, 1, 16, 0, 10000, 1e-6f, false, 8},
                                           {6, 3, 128, 64, 600000, 1e-6f, false, 32}};
    const fixture_block blocks[] = {{0, 2, true}, {0, 3, false}, {2, 0, false}, {1, 7, false}};
    backend *b = fixture_backend(2);
    for (size_t k = 0; k < sizeof rules / sizeof *rules; k++) {
        const attention_rule *r = &rules[k];
        int d = r->head_dim, size = r->block_size, layer = 1;
        fixture f;
        fixture_open(&f, 3, 8, size);
        for (int count = 4; count >= 0; count -= 2) { /* 0 blocks: nothing happens */
            fixture_batch(&f, blocks, count, true);
            tensor qkv = fixture_tensor(4 * size + 3, (r->heads + 2 * r->kv_heads) * d, 2);
            tensor old = fixture_tensor(qkv.rows, qkv.cols, 1);
            memcpy(old.data, qkv.data, (size_t)(qkv.rows * qkv.ld) * sizeof(float));
            tensor qw = fixture_tensor(1, d, 1), kw = fixture_tensor(1, d, 1), none = {0};
            kv_pool kv = {.k = fixture_tensor(2 * f.page_count * size, r->kv_heads * d, 1),
                          .v = fixture_tensor(2 * f.page_count * size, r->kv_heads * d, 1),
                          .page_count = f.page_count};
            tensor keys = fixture_tensor(kv.k.rows, kv.k.cols, 1);
            memcpy(keys.data, kv.k.data, (size_t)(keys.rows * keys.ld) * sizeof(float));
            assert_int_equal(
                b->rotate(b, &qkv, &kv, layer, r->qk_norm ? &qw : &none, r->qk_norm ? &kw : &none, &f.in, &f.s, r), OK);
            char *written = calloc((size_t)kv.k.rows, 1);
            for (int i = 0; i < count * size; i++) {
                int position = *int_at(&f.in.position, i), owner = *int_at(&f.in.slot, i);
                int64_t row =
                    (layer * f.page_count + int_at(&f.s.page, owner)[position / size]) * size + position % size;
                written[row] = 1;
                for (int h = 0; h < r->heads; h++)
                    assert_head(at(&qkv, i) + h * d, at(&old, i) + h * d, r->qk_norm ? qw.data : NULL, position, r);
                for (int h = 0; h < r->kv_heads; h++)
                    assert_head(at(&kv.k, row) + h * d, at(&old, i) + (r->heads + h) * d, r->qk_norm ? kw.data : NULL,
                                position, r);
                assert_memory_equal(at(&kv.v, row), at(&old, i) + (r->heads + r->kv_heads) * d,
                                    (size_t)(r->kv_heads * d) * sizeof(float));
            }
            for (int64_t i = 0; i < kv.k.rows; i++)
                assert_true(written[i] || same_rows(&kv.k, i, &keys, i));
            for (int i = count * size; i < qkv.rows; i++)
                assert_true(same_rows(&qkv, i, &old, i));
            free(qkv.data), free(old.data), free(qw.data), free(kw.data), free(kv.k.data), free(kv.v.data),
                free(keys.data);
            free(written);
        }
        fixture_close(&f);
    }
    b->close(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_norm), cmocka_unit_test(test_rotate)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
