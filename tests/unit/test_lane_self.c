/* The lane of one rank: nothing is copied on the way in, rows without edges come back as zero. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/lane.h"

#include <stdlib.h>
#include <string.h>

enum { H = 5, K = 3, ROWS = 4, LD = 7 };

static int slabs;

static status reserve(backend *b, void **slab, size_t bytes)
{
    status st = OK;
    if (b->self)
        FAIL(FAILED, "no memory for %zu bytes", bytes);
    *slab = calloc(1, bytes);
    slabs++;
out:
    return st;
}

static void release(backend *b, void *slab)
{
    (void)b;
    slabs--;
    free(slab);
}

static void test_round_trip(void **state)
{
    (void)state;
    backend b = {.reserve = reserve, .release = release};
    sum_tree *t;
    lane *l;
    lane_load in;
    lane_traffic moved;
    float x[ROWS * LD], w[ROWS * K] = {.5f, 0, 0, 0, 0, 0, .25f, .75f, 0}, y[ROWS * LD];
    int32_t id[ROWS * K] = {7, -1, -1, -1, -1, -1, 0, 3, -1}, used = 3;
    tensor xt = tensor_of(x, F32, ROWS, H), it = tensor_of(id, I32, ROWS, K), wt = tensor_of(w, F32, ROWS, K),
           yt = tensor_of(y, F32, ROWS, H);
    xt.ld = yt.ld = LD;
    xt.used = &used;
    assert_int_equal(sum_tree_open(&t, 8, 1, 1), OK);
    lane_rule rule = {.hidden = H, .top_k = K, .max_rows = ROWS, .tree = t, .payload = F32};
    assert_int_equal(lane_self_open(&l, &rule, &b), OK);
    assert_int_equal(l->rank, 0);
    assert_int_equal(l->size, 1);
    for (int round = 0; round < 2; round++) { /* the second finds the sums of the first in its room */
        memset(y, 0xff, sizeof y);
        for (int i = 0; i < PULSE; i++)
            l->pulse[i] = 10 * round + i;
        assert_int_equal(l->dispatch(l, &in, &xt, &it, &wt), OK);
        assert_memory_equal(l->pulses, l->pulse, sizeof l->pulse);
        assert_ptr_equal(in.x.data, x);
        assert_ptr_equal(in.ids.data, id);
        assert_ptr_equal(in.weights.data, w);
        assert_int_equal(in.x.rows, 3);
        assert_int_equal(in.y.rows, 3);
        for (int i = 0; i < 3; i++)
            for (int h = 0; h < H && i != 1; h++)
                ((float *)in.y.data)[i * in.y.ld + h] = (float)(100 * round + 10 * i + h);
        assert_int_equal(l->combine(l, &yt, &in), OK);
        for (int i = 0; i < 3; i++)
            for (int h = 0; h < H; h++)
                assert_true(y[i * LD + h] == (i == 1 ? 0 : (float)(100 * round + 10 * i + h)));
        assert_int_equal(((unsigned char *)&y[3 * LD])[0], 0xff); /* beyond used */
    }
    assert_int_equal(l->traffic(l, &moved), OK);
    assert_int_equal(moved.rows_sent, 4);
    assert_int_equal(moved.rows_received, 4);
    assert_int_equal(moved.rows_merged, 4);
    assert_int_equal(moved.partials_sent, 4);
    assert_int_equal(moved.partials_received, 4);
    assert_int_equal(moved.bytes_dispatched + moved.bytes_combined, 0);
    assert_int_equal(l->traffic(l, &moved), OK);
    assert_int_equal(moved.rows_sent, 0);

    used = 0;
    assert_int_equal(l->dispatch(l, &in, &xt, &it, &wt), OK);
    assert_int_equal(in.x.rows, 0);
    assert_int_equal(l->combine(l, &yt, &in), OK);

    used = ROWS + 1;
    assert_int_equal(l->dispatch(l, &in, &xt, &it, &wt), FAILED);
    assert_non_null(strstr(status_message(), "dispatch of 5 rows, the lane was opened for 4"));
    l->close(NULL);
    l->close(l);
    assert_int_equal(slabs, 0);

    b.self = &b;
    assert_int_equal(lane_self_open(&l, &rule, &b), FAILED);
    assert_non_null(strstr(status_message(), "no memory for 80 bytes"));
    assert_null(l);
    sum_tree_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_round_trip)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
