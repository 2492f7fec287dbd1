/* Products against double loops; what a row's bits may depend on; conversions of dtypes; memory and clocks. */
#include "tests/twin/fixture.h"

#include "src/cpu/cpu.h"

#include <time.h>

/* fp32 sums of k products, in any order: the error is below (k + 1) 2^-24 times the sum of the magnitudes. */
static void assert_product(const tensor *y, const tensor *x, const tensor *w, int64_t rows)
{
    for (int64_t i = 0; i < rows; i++)
        for (int64_t o = 0; o < w->rows; o++) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < w->cols; k++) {
                double term = (double)at(x, i)[k] * (double)at(w, o)[k];
                sum += term;
                size += fabs(term);
            }
            assert_true(fabs((double)at(y, i)[o] - sum) <= (double)(w->cols + 1) * 0x1p-24 * size);
        }
}

static void test_products(void **state)
{
    (void)state;
    for (int threads = 1; threads <= 2; threads++) {
        backend *b = fixture_backend(threads);
        for (int k = 0; k < SHAPES; k++) {
            struct shape s = shapes[k];
            tensor x = fixture_tensor(s.rows + 3, s.in, 1), w = fixture_tensor(s.out, s.in, 1);
            tensor y = fixture_tensor(s.rows + 3, s.out, 1), before = fixture_tensor(s.rows + 3, s.out, 1);
            memcpy(before.data, y.data, (size_t)(y.rows * y.ld) * sizeof(float));
            int32_t used = s.rows;
            x.used = &used;
            assert_int_equal(b->matmul(b, &y, &x, &w), OK);
            assert_product(&y, &x, &w, s.rows);
            for (int i = s.rows; i < s.rows + 3; i++) /* rows that are not used stay as they were */
                assert_true(same_rows(&y, i, &before, i));
            free(x.data), free(w.data), free(y.data), free(before.data);
        }
        b->close(b);
    }
}

static void test_held_weights_give_the_same_bits(void **state)
{
    (void)state;
    backend *b = fixture_backend(2);
    for (int k = 0; k < SHAPES; k++)
        for (dtype type = BF16; type <= F16; type++) {
            struct shape s = shapes[k];
            tensor x = fixture_tensor(s.rows, s.in, 1), w = fixture_tensor(s.out, s.in, 1);
            tensor held = fixture_narrow(b, &w, type), y = fixture_tensor(s.rows, s.out, 1),
                   z = fixture_tensor(s.rows, s.out, 1);
            assert_int_equal(b->matmul(b, &y, &x, &w), OK);
            assert_int_equal(b->matmul(b, &z, &x, &held), OK);
            for (int i = 0; i < s.rows; i++)
                assert_true(same_rows(&y, i, &z, i));
            free(x.data), free(w.data), free(held.data), free(y.data), free(z.data);
        }
    b->close(b);
}

/* A row alone, and among 64 at each place, with one thread and with two. */
static void test_a_row_knows_no_neighbours(void **state)
{
    (void)state;
    backend *one = fixture_backend(1), *two = fixture_backend(2);
    for (int k = 0; k < SHAPES; k++) {
        struct shape s = shapes[k];
        tensor x = fixture_tensor(64, s.in, 1), w = fixture_tensor(s.out, s.in, 1);
        tensor y = fixture_tensor(64, s.out, 1), z = fixture_tensor(64, s.out, 1), alone = fixture_tensor(1, s.out, 1);
        tensor row = fixture_tensor(1, s.in, 1);
        assert_int_equal(one->matmul(one, &alone, &row, &w), OK);
        for (int place = 0; place < 64; place++) {
            memcpy(at(&x, place), row.data, (size_t)s.in * sizeof(float));
            backend *b = place % 2 ? one : two;
            assert_int_equal(b->matmul(b, &y, &x, &w), OK);
            for (int i = 0; i <= place; i++) /* by now rows 0 .. place are all this row */
                assert_true(same_rows(&y, i, &alone, 0));
        }
        for (int rows = 1; rows < 64; rows += 6) {
            int32_t used = rows;
            x.used = &used;
            assert_int_equal(two->matmul(two, &z, &x, &w), OK);
            for (int i = 0; i < rows; i++)
                assert_true(same_rows(&z, i, &alone, 0));
        }
        free(x.data), free(w.data), free(y.data), free(z.data), free(alone.data), free(row.data);
    }
    one->close(one);
    two->close(two);
}

/* The tile of the experts, on its own. */
static void test_places_in_a_tile(void **state)
{
    (void)state;
    for (int tile = EXPERT_TILE; tile <= DENSE_TILE; tile *= 2)
        for (int k = 0; k < SHAPES; k++) {
            int in = shapes[k].in, panel = cpu_panel(tile, in), outs = shapes[k].out < panel ? shapes[k].out : panel;
            tensor x = fixture_tensor(DENSE_TILE, in, 1), w = fixture_tensor(outs, in, 1);
            tensor y = fixture_tensor(DENSE_TILE, outs, 1), want = fixture_tensor(DENSE_TILE, outs, 1);
            for (int place = 0; place < tile; place++) {
                tensor moved = fixture_tensor(DENSE_TILE, in, 1);
                memcpy(at(&moved, place), at(&x, 0), (size_t)in * sizeof(float));
                cpu_product(y.data, y.ld, moved.data, moved.ld, w.data, w.ld, tile, outs, in, 1);
                if (place == 0)
                    memcpy(want.data, y.data, (size_t)outs * sizeof(float));
                assert_true(same_rows(&y, place, &want, 0));
                free(moved.data);
            }
            free(x.data), free(w.data), free(y.data), free(want.data);
        }
}

static void test_conversions(void **state)
{
    (void)state;
    backend *b = fixture_backend(2);
    static float wide[65536];
    static uint16_t half[65536], again[65536];
    for (int i = 0; i < 65536; i++)
        half[i] = (uint16_t)i;
    for (dtype type = BF16; type <= F16; type++) { /* every 16-bit number survives the way to fp32 and back */
        tensor f = tensor_of(wide, F32, 256, 256), h = tensor_of(again, type, 256, 256);
        assert_int_equal(b->upload(b, &f, half, type), OK);
        assert_int_equal(b->upload(b, &h, wide, F32), OK);
        int bits = type == F16 ? 10 : 7, most = (1 << (15 - bits)) - 1;
        for (int i = 0; i < 65536; i++) {
            int exponent = i >> bits & most, fraction = i & ((1 << bits) - 1);
            double value = exponent ? ldexp(1 + ldexp(fraction, -bits), exponent - most / 2)
                                    : ldexp(fraction, 1 - most / 2 - bits);
            if (exponent == most) {
                assert_true(fraction ? isnan(wide[i]) : isinf(wide[i]));
                assert_true(fraction ? (again[i] & 0x7fff) > (most << bits) : again[i] == i);
            } else {
                assert_true((double)wide[i] == (i & 0x8000 ? -value : value));
                assert_int_equal(again[i], i);
            }
        }
        /* between two neighbours: to the nearer, from the middle to the even one; past the last: infinity */
        tensor n = tensor_of(again, type, 1, 1);
        for (int i = 0; i < most << bits; i++) {
            double low = (double)wide[i], high = i + 1 < most << bits ? (double)wide[i + 1] : ldexp(1, (most + 1) / 2);
            float middle = (float)((low + high) / 2);
            if ((double)middle != (low + high) / 2)
                continue; /* fp32 has no such number: between the smallest of BF16 */
            const float at3[3] = {nextafterf(middle, 0), middle, nextafterf(middle, INFINITY)};
            const int want[3] = {i, i + (i & 1), i + 1};
            for (int j = 0; j < 3; j++) {
                assert_int_equal(b->upload(b, &n, &at3[j], F32), OK);
                assert_int_equal(again[0], want[j]);
            }
        }
    }
    /* BF16 to F16, and a view with a larger ld */
    uint16_t bf[6] = {0x3f80, 0xc000, 0x3e80, 0x7f80, 0x4780, 0}, f16[8] = {0};
    tensor view = tensor_of(f16, F16, 2, 3);
    view.ld = 4;
    assert_int_equal(b->upload(b, &view, bf, BF16), OK);
    const uint16_t want[8] = {0x3c00, 0xc000, 0x3400, 0, 0x7c00, 0x7c00, 0, 0};
    assert_memory_equal(f16, want, sizeof want);
    uint16_t out[6];
    assert_int_equal(b->download(b, out, &view), OK);
    assert_memory_equal(out, want, 6);
    assert_memory_equal(out + 3, want + 4, 6);
    b->close(b);
}

static void test_memory_and_clocks(void **state)
{
    (void)state;
    backend *b;
    assert_int_equal(backend_cpu_open(&b, -1), BAD_INPUT);
    assert_non_null(strstr(status_message(), "-1 threads, want at least 1"));
    b = fixture_backend(0);
    void *slab;
    assert_int_equal(b->reserve(b, &slab, 1000), OK);
    for (int i = 0; i < 1000; i++)
        assert_int_equal(((char *)slab)[i], 0);
    b->release(b, slab);
#ifndef __SANITIZE_ADDRESS__ /* which ends the program instead */
    assert_int_equal(b->reserve(b, &slab, (size_t)1 << 60), FAILED);
    assert_non_null(strstr(status_message(), "out of memory: 1152921504606846976 bytes wanted"));
    cpu *c = b->self;
    assert_int_equal(cpu_scratch(c, (size_t)1 << 60, 0), FAILED);
    assert_non_null(strstr(status_message(), "bytes of scratch for an op"));
#endif
    double seconds[PHASES] = {0};
    assert_int_equal(b->mark(b, PHASE_HOST), OK);
    assert_int_equal(b->laps(b, seconds), OK);
    memset(seconds, 0, sizeof seconds);
    struct timespec nap = {0, 20 * 1000 * 1000};
    nanosleep(&nap, NULL);
    assert_int_equal(b->mark(b, PHASE_HEAD), OK);
    assert_int_equal(b->mark(b, PHASE_ROUTE), OK);
    assert_int_equal(b->sync(b), OK);
    assert_int_equal(b->laps(b, seconds), OK);
    assert_true(seconds[PHASE_HEAD] >= 0.02 && seconds[PHASE_ROUTE] < 0.02 && seconds[PHASE_HOST] == 0);
    double before = seconds[PHASE_HEAD]; /* laps adds */
    assert_int_equal(b->laps(b, seconds), OK);
    assert_true(seconds[PHASE_HEAD] == before);
    nanosleep(&nap, NULL);
    assert_int_equal(b->mark(b, PHASE_HEAD), OK);
    assert_int_equal(b->laps(b, seconds), OK);
    assert_true(seconds[PHASE_HEAD] >= before + 0.02);
    void (*close)(backend *) = b->close;
    close(b);
    close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_products),
                                       cmocka_unit_test(test_held_weights_give_the_same_bits),
                                       cmocka_unit_test(test_a_row_knows_no_neighbours),
                                       cmocka_unit_test(test_places_in_a_tile),
                                       cmocka_unit_test(test_conversions),
                                       cmocka_unit_test(test_memory_and_clocks)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
