/* The observer, on two slots and layers made by hand: which rows count, what they are compared with, and the sums. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/exec/observe.h"
#include "tests/unit/host_backend.h"

#include <math.h>

enum { SLOTS = 2, LAYERS = 2, BLOCK = 2, HIDDEN = 2, TOP_K = 2, ROWS = 8 };

static status download(backend *b, void *dst, const tensor *src)
{
    (void)b;
    size_t width = (size_t)src->cols * dtype_bytes(src->type);
    for (int64_t i = 0; i < src->rows; i++)
        memcpy((char *)dst + (size_t)i * width, (char *)src->data + (size_t)(i * src->ld) * dtype_bytes(src->type),
               width);
    return OK;
}

/* An executor as it stands after a merge. */
typedef struct made {
    backend backend;
    model_config config;
    executor x;
    observer *observer;
    slot slot[SLOTS];
    int32_t counts[4], slot_of[ROWS], position[ROWS], role[ROWS], fresh[ROWS], ids[ROWS * TOP_K];
    float y[ROWS * HIDDEN]; /* of the fresh rows */
} made;

static void make(made *m)
{
    *m = (made){.backend = {.download = download}, .config = {.hidden = HIDDEN, .top_k = TOP_K, .experts = 64}};
    executor *x = &m->x;
    x->backend = &m->backend;
    x->config = &m->config;
    x->rule.block.block_size = BLOCK;
    x->slots.slot_count = SLOTS;
    x->slots.slot = tensor_of(m->slot, U8, SLOTS, sizeof(slot));
    x->plans.layers = LAYERS;
    x->batch.count = tensor_of(m->counts, I32, 4, 1);
    x->batch.slot = tensor_of(m->slot_of, I32, ROWS, 1);
    x->batch.position = tensor_of(m->position, I32, ROWS, 1);
    x->batch.role = tensor_of(m->role, I32, ROWS, 1);
    x->batch.fresh = tensor_of(m->fresh, I32, ROWS, 1);
    x->a.ids = tensor_of(m->ids, I32, ROWS, TOP_K);
    x->a.y_fresh = tensor_of(m->y, F32, ROWS, HIDDEN);
    assert_int_equal(observer_open(&m->observer, x), OK);
    assert_ptr_equal(x->observer, m->observer);
}

/* A row of slot `of`, fresh: touches experts e and 40, gives (u, v). */
static void add_row(made *m, int of, int position, int role, int e, float u, float v)
{
    int row = m->counts[0]++;
    m->slot_of[row] = of;
    m->position[row] = position;
    m->role[row] = role;
    m->y[m->counts[2] * HIDDEN] = u;
    m->y[m->counts[2] * HIDDEN + 1] = v;
    m->fresh[m->counts[2]] = row;
    m->ids[m->counts[2] * TOP_K] = e;
    m->ids[m->counts[2]++ * TOP_K + 1] = e < 40 ? 40 : -1;
    if (role != ROW_SEALING)
        m->slot[of].fresh |= 1ull << (position % BLOCK);
}

static void start(made *m, int iteration)
{
    memset(m->counts, 0, sizeof m->counts);
    for (int i = 0; i < SLOTS; i++)
        m->slot[i] = (slot){.path = i == 0 ? PATH_REFRESH : PATH_PREFILL, .iteration = iteration};
    add_row(m, 0, 2, ROW_SEALING, 63, 9, 9); /* no row of the active block */
    add_row(m, 1, 0, ROW_SEALING, 63, 9, 9);
}

static void look(made *m)
{
    for (int layer = 0; layer < LAYERS; layer++)
        assert_int_equal(observe_layer(m->observer, &m->x, layer), OK);
}

static void expect(double sum, int64_t count, double want_mean)
{
    assert_int_equal(count, LAYERS);
    assert_true(fabs(sum / LAYERS - want_mean) < 1e-6);
}

static void test_sums(void **state)
{
    (void)state;
    made m;
    make(&m);
    const observation *o = observer_sums(m.observer);
    start(&m, 0); /* cold: nothing to compare with */
    add_row(&m, 0, 4, ROW_NEW, 1, 1, 0);
    add_row(&m, 0, 5, ROW_LIVE, 2, 0, 2);
    look(&m);
    start(&m, 1); /* {1, 2, 40} and {1, 3, 40} */
    add_row(&m, 0, 4, ROW_STABLE, 1, 3, 4);
    add_row(&m, 0, 5, ROW_LIVE, 3, 0, -1);
    look(&m);
    expect(o->overlap_sum[1], o->overlap_count[1], 2.0 / 4);
    expect(o->cosine_sum[0][1], o->cosine_count[0][1], 0.6);
    expect(o->cosine_sum[1][1], o->cosine_count[1][1], -1);
    start(&m, 2); /* position 5 was decoded: this is its first pass. Position 4 is dispatched, but not fresh */
    add_row(&m, 0, 4, ROW_STABLE, 5, 1, 1);
    add_row(&m, 0, 5, ROW_NEW, 3, 4, 3);
    m.slot[0].fresh = 2;
    look(&m);
    expect(o->overlap_sum[2], o->overlap_count[2], 2.0 / 3); /* {1, 3, 40} and {3, 40} */
    start(&m, 3);
    add_row(&m, 0, 4, ROW_STABLE, 41, 0, 1); /* three iterations after its own */
    add_row(&m, 0, 5, ROW_STABLE, 41, 1, 0); /* one after its own */
    look(&m);
    expect(o->overlap_sum[3], o->overlap_count[3], 0);
    expect(o->cosine_sum[0][3], o->cosine_count[0][3], 0);
    assert_int_equal(o->cosine_count[0][1], 2 * LAYERS);
    assert_true(fabs(o->cosine_sum[0][1] / LAYERS - 0.6 - 0.8) < 1e-6);
    start(&m, 64); /* too far */
    add_row(&m, 0, 4, ROW_STABLE, 41, 0, 1);
    look(&m);
    start(&m, 0); /* the next block starts anew */
    add_row(&m, 0, 6, ROW_LIVE, 41, 0, 1);
    look(&m);
    int64_t all = 0;
    for (int i = 0; i < OBSERVE_STEPS; i++)
        all += o->overlap_count[i] + o->cosine_count[0][i] + o->cosine_count[1][i];
    assert_int_equal(all, (3 + 3 + 1) * LAYERS);
    observer_close(m.observer);
    assert_null(m.x.observer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sums)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
