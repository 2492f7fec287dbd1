/* Attention through the page table against double loops. */
#include "tests/twin/fixture.h"

static const attention_rule rules[] = {{8, 2, 32, 16, 10000, 1e-6f, true, 32},
                                       {4, 4, 20, 0, 10000, 1e-6f, false, 5},
                                       {3, 1, 16, 0, 10000, 1e-6f, false, 1},
                                       {2, 1, 128, 64, 10000, 1e-6f, true, 64}};
enum { RULES = sizeof rules / sizeof *rules, SLOTS = 3, BLOCKS = 6 };

static void want_row(double *y, const float *q, const kv_pool *kv, int layer, const int32_t *page, int block, int head,
                     const attention_rule *r)
{
    int size = r->block_size, d = r->head_dim, keys = (block + 1) * size;
    double score[BLOCKS * BLOCK_MOST], most = -INFINITY, sum = 0;
    for (int j = 0; j < keys; j++) {
        const float *k = at(&kv->k, (layer * kv->page_count + page[j / size]) * size + j % size) + head * d;
        score[j] = 0;
        for (int x = 0; x < d; x++)
            score[j] += (double)q[x] * (double)k[x];
        score[j] /= sqrt(d);
        most = score[j] > most ? score[j] : most;
    }
    memset(y, 0, (size_t)d * sizeof *y);
    for (int j = 0; j < keys; j++) {
        const float *v = at(&kv->v, (layer * kv->page_count + page[j / size]) * size + j % size) + head * d;
        double weight = exp(score[j] - most);
        sum += weight;
        for (int x = 0; x < d; x++)
            y[x] += weight * (double)v[x];
    }
    for (int x = 0; x < d; x++)
        y[x] /= sum;
}

static kv_pool open_pool(const fixture *f, const attention_rule *r, int layers)
{
    int64_t rows = (int64_t)layers * f->page_count * r->block_size;
    return (kv_pool){.k = fixture_tensor(rows, r->kv_heads * r->head_dim, 3),
                     .v = fixture_tensor(rows, r->kv_heads * r->head_dim, 1),
                     .page_count = f->page_count};
}

/* |q|, |k| <= 3, |v| <= 1. A score is off by at most e = (d + 2) 2^-24 9 sqrt(d), a weight relatively by 2 e + 2^-22
 * (the exponential), once more by 2^-22 for each rescaling; sums of n terms add n 2^-24 each, twice. */
static double bound(const attention_rule *r, int block)
{
    double d = r->head_dim, pages = block + 1;
    return 4 * (d + 2) * 0x1p-24 * 9 * sqrt(d) + pages * 0x1p-20 + 2 * pages * r->block_size * 0x1p-24;
}

static void test_attend(void **state)
{
    (void)state;
    const fixture_block blocks[] = {{0, 2, true}, {0, 3, false}, {1, 0, false}, {2, 5, false}};
    for (int k = 0; k < RULES; k++)
        for (int threads = 1; threads <= 2; threads++) {
            const attention_rule *r = &rules[k];
            int d = r->head_dim, group = r->heads / r->kv_heads;
            backend *b = fixture_backend(threads);
            fixture f;
            fixture_open(&f, SLOTS, BLOCKS, r->block_size);
            kv_pool kv = open_pool(&f, r, 2);
            for (int count = 0; count <= 4; count += 4) {
                fixture_batch(&f, blocks, count, true);
                tensor qkv = fixture_tensor(4 * r->block_size + 1, (r->heads + 2 * r->kv_heads) * d, 3);
                tensor y = fixture_tensor(qkv.rows, r->heads * d, 1), old = fixture_tensor(qkv.rows, r->heads * d, 1);
                memcpy(old.data, y.data, (size_t)(y.rows * y.ld) * sizeof(float));
                assert_int_equal(b->attend(b, &y, &qkv, &kv, 1, &f.in, &f.s, r), OK);
                for (int i = 0; i < count * r->block_size; i++) {
                    const fixture_block *x = &blocks[i / r->block_size];
                    for (int h = 0; h < r->heads; h++) {
                        double want[128];
                        want_row(want, at(&qkv, i) + h * d, &kv, 1, int_at(&f.s.page, x->slot), x->block, h / group, r);
                        for (int j = 0; j < d; j++)
                            assert_true(fabs((double)at(&y, i)[h * d + j] - want[j]) <= bound(r, x->block));
                    }
                }
                for (int i = count * r->block_size; i < y.rows; i++)
                    assert_true(same_rows(&y, i, &old, i));
                free(qkv.data), free(y.data), free(old.data);
            }
            free(kv.k.data), free(kv.v.data);
            fixture_close(&f);
            b->close(b);
        }
}

/* A block's bits are the same alone, behind others and before others, and with two threads. */
static void test_a_block_knows_no_neighbours(void **state)
{
    (void)state;
    backend *one = fixture_backend(1), *two = fixture_backend(2);
    for (int k = 0; k < RULES; k++) {
        const attention_rule *r = &rules[k];
        int size = r->block_size, cols = (r->heads + 2 * r->kv_heads) * r->head_dim;
        const fixture_block all[] = {{0, 2, false}, {1, 4, false}, {2, 1, false}};
        const fixture_block turned[] = {{2, 1, false}, {0, 2, false}, {1, 4, false}};
        fixture f;
        fixture_open(&f, SLOTS, BLOCKS, size);
        kv_pool kv = open_pool(&f, r, 1);
        tensor q = fixture_tensor(3 * size, cols, 3), moved = fixture_tensor(3 * size, cols, 3);
        tensor y = fixture_tensor(3 * size, r->heads * r->head_dim, 1), z = fixture_tensor(3 * size, y.cols, 1);
        fixture_batch(&f, all, 3, true);
        assert_int_equal(two->attend(two, &y, &q, &kv, 0, &f.in, &f.s, r), OK);
        for (int i = 0; i < 3; i++) { /* alone */
            fixture_batch(&f, &all[i], 1, true);
            tensor part = tensor_rows(&q, i * size, size);
            assert_int_equal(one->attend(one, &z, &part, &kv, 0, &f.in, &f.s, r), OK);
            for (int j = 0; j < size; j++)
                assert_true(same_rows(&y, i * size + j, &z, j));
        }
        for (int i = 0; i < 3; i++) /* in another order */
            memcpy(at(&moved, (i + 1) % 3 * size), at(&q, i * size), (size_t)(size * q.ld) * sizeof(float));
        fixture_batch(&f, turned, 3, true);
        assert_int_equal(one->attend(one, &z, &moved, &kv, 0, &f.in, &f.s, r), OK);
        for (int i = 0; i < 3 * size; i++)
            assert_true(same_rows(&y, i, &z, (i + size) % (3 * size)));
        free(kv.k.data), free(kv.v.data), free(q.data), free(moved.data), free(y.data), free(z.data);
        fixture_close(&f);
    }
    one->close(one);
    two->close(two);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_attend),
                                       cmocka_unit_test(test_a_block_knows_no_neighbours)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
