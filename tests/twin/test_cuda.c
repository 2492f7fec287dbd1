/* Every op of the CUDA backend but the products against its CPU twin, on identical inputs rounded to BF16. Integers,
 * choices and copies are exact. A float of BF16 is off by one step at most where both sum in fp32 in different orders:
 * half a step by rounding, and fp32 noise can move a number over the edge between two. */
#include "tests/twin/cuda_fixture.h"

static const double STEP = 0x1p-7; /* of BF16: 8 bits */

/* To BF16 and back. */
static float rounded(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- what a forward works on */

static plans make_plans(int layers, int cohorts, int experts)
{
    plans p = {.cohort_count = cohorts, .layers = layers};
    p.support = fixture_ints(layers * cohorts, (experts + 31) / 32 + 1);
    p.log = tensor_of(calloc((size_t)(layers * cohorts), sizeof(layer_log)), U8, layers * cohorts, sizeof(layer_log));
    return p;
}

static plans mirror_plans(plans *p)
{
    plans g = *p;
    g.support = mirror_same(&p->support);
    g.log = mirror_same(&p->log);
    return g;
}

typedef struct life {
    int slot_count, blocks;
    block_rule k;
    slots s;
    plans p;
    batch in;
    tensor best;
} life;

static void open_life(life *x, int slot_count, int blocks, block_rule k, int layers, int experts)
{
    int rows = (2 * slot_count + k.prefill_blocks) * k.block_size;
    *x = (life){.slot_count = slot_count, .blocks = blocks, .k = k};
    x->s = (slots){.slot_count = slot_count, .max_blocks = blocks};
    x->s.slot = tensor_of(calloc((size_t)slot_count, sizeof(slot)), U8, slot_count, sizeof(slot));
    x->s.report = tensor_of(calloc((size_t)slot_count, sizeof(slot_report)), U8, slot_count, sizeof(slot_report));
    x->s.token = fixture_ints(slot_count, blocks * k.block_size);
    x->s.page = fixture_ints(slot_count, blocks);
    x->p = make_plans(layers, (slot_count + k.cohort - 1) / k.cohort, experts);
    x->in.count = fixture_ints(4, 1);
    tensor *list[] = {&x->in.token, &x->in.position, &x->in.slot, &x->in.role, &x->in.fresh, &x->in.place, &x->in.live};
    for (int i = 0; i < 7; i++)
        *list[i] = fixture_ints(rows, 1);
    x->in.span = fixture_ints(rows / k.block_size, 4);
    x->best = tensor_of(calloc((size_t)(slot_count * k.block_size), sizeof(head_best)), U8,
                        (int64_t)slot_count * k.block_size, sizeof(head_best));
}

/* The lists, in the order of batch's counters: 0 row_count, 1 span_count, 2 fresh_count, 3 live_count. */
static void link_counts(life *x)
{
    const int32_t *count = x->in.count.data;
    x->in.token.used = x->in.position.used = x->in.slot.used = x->in.role.used = x->in.place.used = count;
    x->in.span.used = count + 1;
    x->in.fresh.used = count + 2;
    x->in.live.used = x->best.used = count + 3;
}

static life mirror_life(life *x)
{
    life g = *x;
    tensor *all[] = {&g.s.slot, &g.s.report, &g.s.token, &g.s.page, &g.in.count, &g.in.token, &g.in.position,
                     &g.in.slot, &g.in.role, &g.in.fresh, &g.in.place, &g.in.live, &g.in.span, &g.best};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        *all[i] = mirror_same(all[i]);
    g.p = mirror_plans(&x->p);
    return g;
}

static void close_life(life *x)
{
    tensor *all[] = {&x->s.slot,   &x->s.report,    &x->s.token, &x->s.page,    &x->in.count,
                     &x->in.token, &x->in.position, &x->in.slot, &x->in.role,   &x->in.fresh,
                     &x->in.place, &x->in.live,     &x->in.span, &x->best,      &x->p.support, &x->p.log};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]->data);
}

/* ---- memory */

static void test_transfers(void **state)
{
    (void)state;
    static const int64_t shape[][3] = {{1, 1, 1}, {3, 5, 8}, {100, 64, 64}, {7, 1000003, 1000003}, {3000, 4097, 4100}};
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
        for (int to = F32; to <= F16; to++)
            for (int from = F32; from <= F16; from++) {
                int64_t rows = shape[i][0], cols = shape[i][1];
                if (rows * cols > 1000000 && (to != BF16 || from == F16)) /* the large ones as weights are loaded */
                    continue;
                size_t n = (size_t)(rows * cols);
                float *x = malloc(n * sizeof *x + 1);
                char *stored = malloc(n * 4 + 1), *here = malloc(n * 4 + 1), *there = malloc(n * 4 + 1);
                for (size_t k = 0; k < n; k++)
                    x[k] = fixture_random() * (k % 5 ? 1 : 1e-6f);
                tensor s = tensor_of(stored, from, rows, cols), h = tensor_of(here, to, rows, cols);
                must_be(both.cpu->upload(both.cpu, &s, x, F32));
                must_be(both.cpu->upload(both.cpu, &h, stored, from));
                tensor d = h;
                d.ld = shape[i][2];
                d.data = mirror_bytes((size_t)(rows * d.ld) * dtype_bytes(to));
                must_be(both.gpu->upload(both.gpu, &d, stored, from));
                memset(stored, 0x55, n * 4); /* it may be reused */
                must_be(both.gpu->download(both.gpu, there, &d));
                assert_memory_equal(here, there, n * dtype_bytes((dtype)to));
                free(x), free(stored), free(here), free(there);
                mirror_forget();
            }
}

/* What was posted is what stood there, whatever is enqueued behind it; boxes grow, hold parts of rows, and nothing. */
static void test_boxes(void **state)
{
    (void)state;
    int32_t table[3][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}, {9, 10, 11, 12}}, other[12] = {0}, out[12] = {0};
    tensor whole = tensor_of(mirror_bytes(sizeof table), I32, 3, 4);
    must_be(both.gpu->upload(both.gpu, &whole, table, I32));
    tensor part = tensor_rows(&whole, 1, 2), none = tensor_rows(&whole, 0, 0);
    part.cols = 3;
    for (int again = 0; again < 2; again++) {
        must_be(both.gpu->upload(both.gpu, &whole, table, I32));
        must_be(both.gpu->post(both.gpu, 0, &part));
        must_be(both.gpu->post(both.gpu, BOXES - 1, &none));
        must_be(both.gpu->upload(both.gpu, &whole, other, I32));
        must_be(both.gpu->fetch(both.gpu, out, BOXES - 1));
        assert_int_equal(out[again], 0);
        must_be(both.gpu->fetch(both.gpu, out, 0));
        assert_memory_equal(out, ((int32_t[]){5, 6, 7, 9, 10, 11}), 6 * sizeof *out);
        memset(out, 0, sizeof out);
    }
    must_be(both.gpu->post(both.gpu, 0, &whole));
    must_be(both.gpu->fetch(both.gpu, out, 0));
    assert_memory_equal(out, other, sizeof out);
    mirror_forget();
}

static void test_random(void **state)
{
    (void)state;
    for (int type = F32; type <= F16; type++) {
        tensor x = fixture_tensor(37, 300, 1), m = mirror_as(&x, (dtype)type, 305), have = fixture_tensor(37, 300, 1);
        tensor held = fixture_narrow(both.cpu, &x, (dtype)type == F32 ? BF16 : (dtype)type);
        must_be(both.gpu->random(both.gpu, &m, 12345678901, 0.3f));
        tensor want = type == F32 ? x : held;
        must_be(both.cpu->random(both.cpu, &want, 12345678901, 0.3f));
        if (type != F32)
            for (int i = 0; i < 37; i++) {
                tensor row = tensor_rows(&held, i, 1), to = tensor_rows(&x, i, 1);
                must_be(both.cpu->upload(both.cpu, &to, row.data, (dtype)type));
            }
        mirror_read(&have, &m);
        double sum = 0;
        for (int i = 0; i < 37; i++) {
            assert_true(same_rows(&have, i, &x, i));
            for (int j = 0; j < 300; j++)
                sum += (double)at(&x, i)[j] * (double)at(&x, i)[j];
        }
        assert_true(fabs(sum / (37 * 300) - 0.09 / 3) < 0.003); /* uniform */
        free(x.data), free(held.data), free(have.data);
        mirror_forget();
    }
}

static void test_out_of_memory(void **state)
{
    (void)state;
    void *slab = &slab;
    assert_int_equal(both.gpu->reserve(both.gpu, &slab, (size_t)1 << 50), FAILED);
    assert_null(slab);
    assert_non_null(strstr(status_message(), "out of GPU memory"));
    must_be(both.gpu->sync(both.gpu)); /* it left no error behind */
}

/* x += y, and its norm. */
static status sum_up(const tensor *x, const tensor *y, const tensor *h, const tensor *w)
{
    residual r = {.x = *x, .h = *h, .norm = w, .eps = 1e-6f};
    return both.gpu->add_norm(both.gpu, &r, y, &(batch){0});
}

/* Of each phase since the last call. */
static void laps(double seconds[PHASES])
{
    memset(seconds, 0, PHASES * sizeof *seconds);
    must_be(both.gpu->laps(both.gpu, seconds));
}

static void test_time(void **state)
{
    (void)state;
    double seconds[PHASES];
    laps(seconds);
    must_be(both.gpu->mark(both.gpu, PHASE_HOST));
    tensor big = tensor_of(mirror_bytes(64 << 20), BF16, 4096, 4096), same = big;
    tensor weight = tensor_of(mirror_bytes(4096 * sizeof(float)), F32, 1, 4096);
    for (int i = 0; i < 6000; i++) { /* more marks than are held at a time */
        if (i < 100)
            must_be(sum_up(&big, &same, &same, &weight));
        must_be(both.gpu->mark(both.gpu, i < 100 ? PHASE_SHARED : PHASE_HEAD));
    }
    laps(seconds);
    assert_true(seconds[PHASE_SHARED] > 100 * 64e6 / 20e12 && seconds[PHASE_SHARED] < 1);
    assert_true(seconds[PHASE_HEAD] > 0 && seconds[PHASE_ROUTE] == 0);
    laps(seconds);
    assert_true(seconds[PHASE_SHARED] == 0);
    mirror_forget();
}

/* ---- recorded work */

typedef struct work {
    tensor y, x, z, h, weight, list;
    life *grows; /* its rows, which want more scratch than there is */
    int calls;
} work;

static status work_call(void *of)
{
    status st = OK;
    work *w = of;
    if (w->calls++ > 0 && w->grows)
        TRY(both.gpu->rows(both.gpu, &w->grows->in, &w->grows->s, &w->grows->p, &w->grows->k));
    TRY(sum_up(&w->y, &w->x, &w->h, &w->weight));
    TRY(both.gpu->mark(both.gpu, PHASE_SHARED));
    TRY(both.gpu->aside(both.gpu, 1)); /* z = y, while y is normed */
    TRY(both.gpu->pack(both.gpu, &w->z, &w->y, &w->list));
    TRY(both.gpu->mark(both.gpu, PHASE_HEAD));
    TRY(both.gpu->back(both.gpu));
    TRY(both.gpu->norm(both.gpu, &w->h, &w->y, &w->weight, 1e-6f));
    TRY(both.gpu->join(both.gpu));
    TRY(sum_up(&w->y, &w->z, &w->h, &w->weight));
    TRY(both.gpu->mark(both.gpu, PHASE_MERGE));
out:
    return st;
}

static work make_work(const tensor *y, const tensor *x)
{
    tensor w = fixture_tensor(1, x->cols, 1), list = fixture_ints(x->rows, 1), z = *y, from = *x;
    for (int i = 0; i < list.rows; i++)
        *int_at(&list, i) = i;
    work made = {.y = mirror(&z), .x = mirror(&from), .z = mirror(&z), .h = mirror(&z), .weight = mirror_same(&w),
                 .list = mirror_same(&list)};
    free(w.data), free(list.data);
    return made;
}

/* Each repeat does the work once, whether called or replayed, in order but for what is put aside; its time falls to the
 * phases that were marked. */
static void test_repeat(void **state)
{
    (void)state;
    enum { TIMES = 100 };
    tensor x = fixture_tensor(512, 2048, 1), y = fixture_tensor(512, 2048, 1);
    for (int64_t i = 0; i < x.rows; i++)
        for (int64_t j = 0; j < x.cols; j++)
            at(&x, i)[j] = 0x1p-100f, at(&y, i)[j] = 0;
    work w = make_work(&y, &x);
    void *record = NULL;
    double seconds[PHASES];
    laps(seconds);
    for (int i = 0; i < TIMES; i++)
        must_be(both.gpu->repeat(both.gpu, &record, work_call, &w));
    laps(seconds);
    assert_true(w.calls < TIMES / 10);
    assert_true(seconds[PHASE_SHARED] > 0 && seconds[PHASE_MERGE] > 0 && seconds[PHASE_HEAD] == 0);
    mirror_read(&y, &w.y);
    float want = 0; /* y = 2 (y + x), rounded */
    for (int i = 0; i < TIMES; i++)
        want = 2 * rounded(want + 0x1p-100f);
    for (int64_t i = 0; i < y.rows; i++)
        for (int64_t j = 0; j < y.cols; j++)
            assert_true(at(&y, i)[j] == want);
    both.gpu->forget(both.gpu, record);
    both.gpu->forget(both.gpu, NULL);
    free(x.data), free(y.data);
    mirror_forget();
}

static void test_record_that_grows(void **state)
{
    (void)state;
    tensor x = fixture_tensor(4, 64, 1), y = fixture_tensor(4, 64, 1);
    life big;
    open_life(&big, 4000, 2, (block_rule){.block_size = 2, .cohort = 1}, 1, 16);
    life g = mirror_life(&big);
    link_counts(&g);
    work w = make_work(&y, &x);
    w.grows = &g;
    void *record = NULL;
    must_be(both.gpu->repeat(both.gpu, &record, work_call, &w));
    assert_int_equal(both.gpu->repeat(both.gpu, &record, work_call, &w), FAILED);
    assert_non_null(strstr(status_message(), "while a graph is captured"));
    must_be(both.gpu->sync(both.gpu));
    both.gpu->forget(both.gpu, record);
    close_life(&big);
    free(x.data), free(y.data);
    mirror_forget();
}

/* ---- rows one by one */

static void test_embed(void **state)
{
    (void)state;
    for (int k = 0; k < SHAPES; k++) {
        int rows = shapes[k].rows, cols = shapes[k].in, vocab = shapes[k].out;
        tensor table = fixture_tensor(vocab, cols, 1), y = fixture_tensor(rows + 1, cols, 1),
               ids = fixture_ints(rows + 1, 1);
        for (int i = 0; i < rows; i++)
            *int_at(&ids, i) = i == 0 ? vocab - 1 : rand() % vocab;
        int32_t used = rows;
        ids.used = &used;
        tensor gt = k % 2 ? mirror(&table) : mirror_as(&table, BF16, cols), gy = mirror(&y), gids = mirror_same(&ids);
        must_be(both.cpu->embed(both.cpu, &y, &table, &ids));
        must_be(both.gpu->embed(both.gpu, &gy, &gt, &gids));
        tensor have = fixture_tensor(rows + 1, cols, 1);
        mirror_read(&have, &gy);
        for (int i = 0; i <= rows; i++)
            assert_true(same_rows(&have, i, &y, i));
        free(table.data), free(y.data), free(ids.data), free(have.data);
        mirror_forget();
    }
}

/* SiLU is one rounding of what the CPU has in fp32; the product with a unit matrix is exact. */
static void test_gated(void **state)
{
    (void)state;
    for (int k = 0; k < SHAPES; k++) {
        int rows = shapes[k].rows, cols = shapes[k].out;
        int32_t used = rows;
        tensor y = fixture_tensor(rows + 1, cols, 1), x = fixture_tensor(rows + 1, 2 * cols, 1);
        tensor products = fixture_tensor(rows + 1, 2 * cols, 1), w = fixture_tensor(2 * cols, 2 * cols, 0);
        tensor have = fixture_tensor(rows + 1, cols, 1);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++)
                at(&x, i)[j] *= powf(10, (float)(j % 4) - 1);
        for (int j = 0; j < 2 * cols; j++)
            at(&w, j)[j] = 1;
        x.used = &used;
        tensor gx = mirror(&x), gy = mirror(&y), gproducts = mirror(&products), gw = mirror_as(&w, BF16, 2 * cols);
        must_be(both.cpu->gated(both.cpu, &y, &products, &x, &w));
        must_be(both.gpu->gated(both.gpu, &gy, &gproducts, &gx, &gw));
        mirror_read(&have, &gy);
        for (int i = 0; i < rows; i++)
            assert_true(near_row(at(&have, i), at(&y, i), cols, STEP / 2, 1e-30));
        assert_true(same_rows(&have, rows, &y, rows));
        free(x.data), free(y.data), free(products.data), free(w.data), free(have.data);
        mirror_forget();
    }
}

static void test_pack(void **state)
{
    (void)state;
    for (int k = 0; k < SHAPES; k++) {
        int rows = shapes[k].rows, cols = shapes[k].in, count = 0;
        tensor full = fixture_tensor(rows, cols, 1), packed = fixture_tensor(rows + 1, cols, 1),
               list = fixture_ints(rows + 1, 1);
        for (int i = 0; i < rows; i++)
            if (rand() % 3)
                *int_at(&list, count++) = i;
        list.used = &count;
        tensor gf = mirror(&full), gp = mirror(&packed), gl = mirror_same(&list),
               have = fixture_tensor(rows + 1, cols, 1);
        must_be(both.cpu->pack(both.cpu, &packed, &full, &list));
        must_be(both.gpu->pack(both.gpu, &gp, &gf, &gl));
        mirror_read(&have, &gp);
        for (int i = 0; i <= rows; i++)
            assert_true(same_rows(&have, i, &packed, i));
        free(full.data), free(packed.data), free(list.data), free(have.data);
        mirror_forget();
    }
}

/* ---- the ends of sublayers */

/* A residual on both sides; x and h are what they hold on the GPU. */
static void make_residual(residual *r, residual *g, int64_t rows, int64_t cols, int64_t fresh, tensor *w, tensor *gw)
{
    *w = fixture_tensor(1, cols, 1);
    *gw = mirror_as(w, F32, cols);
    *r = (residual){fixture_tensor(rows, cols, 3), fixture_tensor(rows, cols, 1), {0}, w, 1e-6f, 0};
    *g = (residual){mirror(&r->x), mirror(&r->h), {0}, gw, 1e-6f, 7 * PHASES + PHASE_COMBINE};
    if (fresh > 0) {
        r->h_fresh = fixture_tensor(fresh, cols, 1);
        g->h_fresh = mirror(&r->h_fresh);
    }
}

/* x, want [rows, cols]: the sums, rounded as they should be; h: the op `norm` of them; h_fresh: as the list says. Rows
 * from `used` on are untouched. */
static void check_residual(residual *g, const tensor *want, int used, const batch *in)
{
    must_be(both.gpu->sync(both.gpu));
    assert_int_equal(*both.gpu->reached, 7 * PHASES + PHASE_COMBINE); /* the watchdog's */
    tensor have = fixture_tensor(want->rows, want->cols, 1), norm = fixture_tensor(want->rows, want->cols, 1);
    tensor x = g->x, h = g->h, all = g->x;
    x.used = h.used = NULL;
    mirror_read(&have, &x);
    for (int64_t i = 0; i < want->rows; i++)
        assert_true(same_rows(&have, i, want, i));
    tensor again = mirror(&norm);
    mirror_read(&norm, &h);
    mirror_write(&again, &norm);
    all.used = g->x.used;
    must_be(both.gpu->norm(both.gpu, &again, &all, g->norm, g->eps));
    mirror_read(&have, &again);
    for (int64_t i = 0; i < want->rows; i++)
        assert_true(same_rows(&norm, i, &have, i));
    if (g->h_fresh.data) {
        tensor packed = fixture_tensor(g->h_fresh.rows, want->cols, 1);
        mirror_read(&packed, &g->h_fresh);
        for (int i = 0; i < used; i++)
            if (*int_at(&in->place, i) >= 0)
                assert_true(same_rows(&packed, *int_at(&in->place, i), &have, i));
        free(packed.data);
    }
    free(have.data), free(norm.data);
}

static void close_residual(residual *r, tensor *w)
{
    free(r->x.data), free(r->h.data), free(r->h_fresh.data), free(w->data);
}

static void test_add_norm(void **state)
{
    (void)state;
    static const struct shape many[] = {{9001, 64, 0}, {1100, 2048, 0}, {700, 4104, 0}, {700, 50, 0}};
    for (int k = 0; k < SHAPES + 4; k++) {
        const struct shape *shape = k < SHAPES ? &shapes[k] : &many[k - SHAPES];
        int rows = shape->rows, cols = shape->in, count = 0;
        int32_t used = rows;
        tensor y = fixture_tensor(rows + 1, cols, 1), w, gw, place = fixture_ints(rows + 1, 1);
        for (int i = 0; i < rows; i++)
            *int_at(&place, i) = rand() % 3 ? count++ : -1;
        residual r, g;
        make_residual(&r, &g, rows + 1, cols, k % 3 ? count : 0, &w, &gw);
        tensor counter = tensor_of(&used, I32, 1, 1), there = mirror_same(&counter), gy = mirror(&y);
        g.x.used = there.data;
        batch in = {.place = place}, gin = {.place = mirror_same(&place)};
        must_be(both.gpu->add_norm(both.gpu, &g, &gy, &gin));
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++)
                at(&r.x, i)[j] = rounded(at(&r.x, i)[j] + at(&y, i)[j]);
        check_residual(&g, &r.x, rows, &in);
        r.x.used = &used;
        for (int i = 0; i < rows; i++) /* the twin, whose x this is already */
            memset(at(&y, i), 0, (size_t)cols * sizeof(float));
        must_be(both.cpu->add_norm(both.cpu, &r, &y, &in));
        tensor have = fixture_tensor(rows + 1, cols, 1);
        mirror_read(&have, &g.h);
        for (int i = 0; i < rows; i++)
            assert_true(near_row(at(&have, i), at(&r.h, i), cols, STEP, 1e-30));
        free(y.data), free(place.data), free(have.data);
        close_residual(&r, &w);
        mirror_forget();
    }
}

/* Blocks of `here` rows, each of a slot of its own, but for the first slot's, which has two. */
static void merge_case(int count, int here, int trial, int width)
{
    enum { LAYERS = 3, MOST = 70 };
    bool dense = trial % 2, alone = trial % 4 > 1;
    int layer = trial % LAYERS, rows = count * here;
    block_rule k = {.block_size = here, .cohort = 1, .dense_lane = dense};
    fixture f, m;
    fixture_open(&f, count, 4, here);
    fixture_masks(&f, trial);
    fixture_block blocks[MOST] = {{0, 1, true}};
    for (int i = 1; i < count; i++)
        blocks[i] = (fixture_block){i - 1 + (i == count - 1), (i + 1) % 4, i > 3 && i % 5 == 0};
    fixture_batch(&f, blocks, trial == 6 ? 0 : count, dense);
    mirror_fixture(&m, &f);
    tensor packed = fixture_tensor(f.count[2], width, 1), shared = fixture_tensor(rows, width, 1);
    tensor cache = fixture_tensor((int64_t)LAYERS * count * here, width, 1), w, gw, none = {0};
    residual r, g;
    make_residual(&r, &g, rows, width, trial % 3 ? f.count[2] : 0, &w, &gw);
    mirror(&packed); /* rounded */
    tensor gp = mirror_as(&packed, F32, (width + 7) / 8 * 8), gs = mirror(&shared), gc = mirror(&cache);
    tensor x = fixture_tensor(rows, width, 0), was = r.x;
    g.x.used = m.in.position.used;
    r.x = x; /* from zero: what the routed experts give, exactly */
    r.x.used = f.in.position.used;
    must_be(both.cpu->merge(both.cpu, &r, &packed, &none, &cache, layer, &f.in, &f.s, &k));
    must_be(both.gpu->merge(both.gpu, &g, &gp, alone ? &none : &gs, &gc, layer, &m.in, &m.s, &k));
    for (int i = 0; i < f.count[0]; i++)
        for (int j = 0; j < width; j++) {
            float y = at(&x, i)[j];
            y = alone ? y : rounded(y + at(&shared, i)[j]);
            at(&was, i)[j] = rounded(at(&was, i)[j] + y);
        }
    check_residual(&g, &was, f.count[0], &f.in);
    tensor kept = fixture_tensor(cache.rows, width, 1);
    mirror_read(&kept, &gc);
    for (int64_t i = 0; i < cache.rows; i++)
        assert_true(same_rows(&kept, i, &cache, i));
    free(packed.data), free(shared.data), free(cache.data), free(kept.data), free(was.data);
    close_residual(&r, &w);
    fixture_close(&f);
    mirror_forget();
}

static void test_merge(void **state)
{
    (void)state;
    static const int sizes[] = {1, 5, 32, BLOCK_MOST}, widths[] = {37, 64, 2056};
    for (int n = 0; n < 4; n++)
        for (int trial = 0; trial < 12; trial++)
            merge_case(4, sizes[n], trial, widths[trial / 2 % 3]);
    for (int trial = 0; trial < 7; trial++)
        merge_case(trial == 5 ? 11 : 70, BLOCK_MOST - (trial == 4), trial, trial == 5 ? 2056 : trial == 6 ? 37 : 64);
}

/* ---- norm and rotation */

static void test_norm(void **state)
{
    (void)state;
    for (int k = 0; k < SHAPES; k++) {
        int rows = shapes[k].rows, cols = shapes[k].in;
        int32_t used = rows;
        tensor x = fixture_tensor(rows + 1, cols, 3), y = fixture_tensor(rows + 1, cols, 1),
               w = fixture_tensor(1, cols, 1);
        tensor have = fixture_tensor(rows + 1, cols, 1);
        x.used = &used;
        tensor gx = k % 3 ? mirror(&x) : mirror_as(&x, BF16, cols + 1), gy = mirror(&y), gw = mirror_same(&w);
        must_be(both.cpu->norm(both.cpu, &y, &x, &w, 1e-6f));
        must_be(both.gpu->norm(both.gpu, &gy, &gx, &gw, 1e-6f));
        mirror_read(&have, &gy);
        for (int i = 0; i < rows; i++)
            assert_true(near_row(at(&have, i), at(&y, i), cols, STEP, 1e-30));
        assert_true(same_rows(&have, rows, &y, rows)); /* not used, not written */
        free(x.data), free(y.data), free(w.data), free(have.data);
        mirror_forget();
    }
}

/* A turned number is the difference of two products: off by a step of itself and by fp32 noise of its pair. */
static void test_rotate(void **state)
{
    (void)state;
    enum { SLOTS = 3, BLOCKS = 5, LAYERS = 2 };
    static const attention_rule rules[] = {
        {4, 2, 16, 8, 10000, 1e-6f, true, 8},    {2, 1, 64, 64, 600000, 1e-5f, true, 32},
        {3, 3, 128, 64, 600000, 1e-6f, true, 5}, {2, 2, 256, 128, 1e4f, 1e-6f, true, 4},
        {4, 1, 128, 128, 1e4f, 1e-6f, false, 8}, {1, 1, 40, 20, 1e4f, 1e-6f, true, 3},
        {2, 1, 64, 20, 1e4f, 1e-6f, true, 8},    {16, 4, 128, 64, 600000, 1e-6f, true, 32},
        {8, 2, 128, 128, 1e4f, 1e-6f, false, 8}, {8, 4, 64, 32, 1e4f, 1e-6f, true, 5},
        {4, 2, 128, 64, 1e4f, 1e-6f, true, 1}};
    for (size_t n = 0; n < sizeof rules / sizeof *rules; n++) {
        const attention_rule *r = &rules[n];
        int d = r->head_dim, width = (r->heads + 2 * r->kv_heads) * d, layer = (int)n % LAYERS;
        fixture f, g;
        fixture_open(&f, SLOTS, BLOCKS, r->block_size);
        const fixture_block blocks[] = {{0, 1, true}, {0, 2, false}, {1, 4, false}, {2, 0, false}};
        fixture_batch(&f, blocks, 4, true);
        mirror_fixture(&g, &f);
        tensor qkv = fixture_tensor(f.count[0] + 1, width, 2), qn = fixture_tensor(1, d, 1),
               kn = fixture_tensor(1, d, 1);
        kv_pool pool = {.page_count = f.page_count}, gpool = pool;
        pool.k = fixture_tensor((int64_t)LAYERS * f.page_count * r->block_size, r->kv_heads * d, 1);
        pool.v = fixture_tensor(pool.k.rows, pool.k.cols, 1);
        tensor gqkv = mirror(&qkv), gqn = mirror_same(&qn), gkn = mirror_same(&kn);
        gpool.k = mirror(&pool.k), gpool.v = mirror(&pool.v);
        must_be(both.cpu->rotate(both.cpu, &qkv, &pool, layer, &qn, &kn, &f.in, &f.s, r));
        must_be(both.gpu->rotate(both.gpu, &gqkv, &gpool, layer, &gqn, &gkn, &g.in, &g.s, r));
        tensor have = fixture_tensor(qkv.rows, width, 1), k = fixture_tensor(pool.k.rows, pool.k.cols, 1);
        tensor v = fixture_tensor(pool.v.rows, pool.v.cols, 1);
        mirror_read(&have, &gqkv), mirror_read(&k, &gpool.k), mirror_read(&v, &gpool.v);
        for (int64_t i = 0; i < qkv.rows; i++)
            assert_true(near_row(at(&have, i), at(&qkv, i), width, STEP, 0x1p-18));
        for (int64_t i = 0; i < k.rows; i++) {
            assert_true(near_row(at(&k, i), at(&pool.k, i), k.cols, STEP, 0x1p-18));
            assert_true(same_rows(&v, i, &pool.v, i));
        }
        free(qkv.data), free(qn.data), free(kn.data), free(pool.k.data), free(pool.v.data);
        free(have.data), free(k.data), free(v.data);
        fixture_close(&f);
        mirror_forget();
    }
}

/* Few rows and many are shared out among warps in other ways. */
static void test_rotate_among_many(void **state)
{
    (void)state;
    enum { SLOTS = 3, BLOCKS = 40, FEW = 4 };
    static const attention_rule rules[] = {{16, 4, 128, 64, 600000, 1e-6f, true, 32},
                                           {32, 4, 128, 64, 600000, 1e-6f, true, 32},
                                           {16, 8, 64, 64, 1e4f, 1e-6f, true, 64},
                                           {4, 2, 256, 128, 1e4f, 1e-6f, true, 64}};
    for (size_t n = 0; n < sizeof rules / sizeof *rules; n++) {
        const attention_rule *r = &rules[n];
        int size = r->block_size, width = (r->heads + 2 * r->kv_heads) * r->head_dim;
        fixture f, g;
        fixture_open(&f, SLOTS, BLOCKS, size);
        fixture_block blocks[BLOCKS];
        for (int i = 0; i < BLOCKS; i++)
            blocks[i] = (fixture_block){i % SLOTS, i, false};
        tensor qn = fixture_tensor(1, r->head_dim, 1), kn = fixture_tensor(1, r->head_dim, 1);
        tensor qkv = fixture_tensor(BLOCKS * size, width, 2), have[2], k[2], v[2], gqkv[2];
        tensor old = fixture_tensor((int64_t)f.page_count * size, r->kv_heads * r->head_dim, 1);
        tensor gqn = mirror_same(&qn), gkn = mirror_same(&kn);
        for (int time = 0; time < 2; time++) {
            kv_pool pool = {.k = mirror(&old), .v = mirror(&old), .page_count = f.page_count};
            gqkv[time] = mirror(&qkv);
            for (int first = 0; first < BLOCKS; first += time ? FEW : BLOCKS) {
                int count = time ? FEW : BLOCKS;
                tensor part = tensor_rows(&gqkv[time], (int64_t)first * size, (int64_t)count * size);
                fixture_batch(&f, blocks + first, count, true);
                mirror_fixture(&g, &f);
                must_be(both.gpu->rotate(both.gpu, &part, &pool, 0, &gqn, &gkn, &g.in, &g.s, r));
            }
            have[time] = fixture_tensor(qkv.rows, width, 1);
            k[time] = fixture_tensor(old.rows, old.cols, 1), v[time] = fixture_tensor(old.rows, old.cols, 1);
            mirror_read(&have[time], &gqkv[time]), mirror_read(&k[time], &pool.k), mirror_read(&v[time], &pool.v);
        }
        for (int64_t i = 0; i < qkv.rows; i++)
            assert_true(same_rows(&have[0], i, &have[1], i));
        for (int64_t i = 0; i < old.rows; i++)
            assert_true(same_rows(&k[0], i, &k[1], i) && same_rows(&v[0], i, &v[1], i));
        for (int i = 0; i < 2; i++)
            free(have[i].data), free(k[i].data), free(v[i].data);
        free(qkv.data), free(qn.data), free(kn.data), free(old.data);
        fixture_close(&f);
        mirror_forget();
    }
}

/* ---- router and Atlas */

static const route_rule rules[] = {{32, 4, 4, 2, 2.5f, true},  {256, 8, 8, 4, 2.5f, true}, {16, 4, 4, 2, 2.5f, true},
                                   {20, 6, 1, 1, 1.0f, false}, {12, 2, 12, 3, 1, true},    {6, 6, 3, 2, 2, true},
                                   {40, 1, 4, 4, 2.5f, false}, {33, 5, 3, 1, 1, true},     {512, 40, 8, 3, 1, true},
                                   {1024, 8, 32, 4, 2, true},  {64, 6, 1, 1, 1, true},     {128, 8, 2, 1, 2.5f, true}};
enum { RULES = sizeof rules / sizeof *rules };

/* In odd trials few different logits and no bias: ties between experts and between groups. */
static void draw(tensor *z, tensor *bias, int trial)
{
    for (int64_t i = 0; i < z->rows; i++)
        for (int64_t e = 0; e < z->cols; e++)
            at(z, i)[e] = trial % 2 ? (float)(rand() % 6 - 3) : 6 * fixture_random();
    for (int64_t e = 0; e < z->cols; e++)
        at(bias, 0)[e] = trial % 2 ? 0 : 0.3f * fixture_random();
}

/* The same bytes, whatever the type. */
static bool equal_bytes(const tensor *gpu, const tensor *cpu)
{
    size_t each = (size_t)gpu->cols * dtype_bytes(gpu->type), step = (size_t)cpu->ld * dtype_bytes(cpu->type);
    char *v = malloc((size_t)gpu->rows * each + 1);
    must_be(both.gpu->download(both.gpu, v, gpu));
    bool same = true;
    for (int64_t i = 0; i < gpu->rows; i++)
        same &= memcmp(v + (size_t)i * each, (const char *)cpu->data + (size_t)i * step, each) == 0;
    free(v);
    return same;
}

static void test_route(void **state)
{
    (void)state;
    enum { SLOTS = 6, SIZE = 8 };
    for (int n = 0; n < RULES; n++)
        for (int trial = 0; trial < 8; trial++) {
            const route_rule *r = &rules[n];
            int layers = 2, layer = trial % 2, words = (r->experts + 31) / 32;
            block_rule k = {.block_size = SIZE, .cohort = 1 + trial / 2 % 3, .restrict_experts = trial != 6};
            fixture f, g;
            fixture_open(&f, SLOTS, 4, SIZE);
            plans p = make_plans(layers, (SLOTS + k.cohort - 1) / k.cohort, r->experts);
            for (int i = 0; i < p.support.rows; i++) {
                int one_in = 1 + rand() % 12;
                for (int e = 0; e < r->experts; e++)
                    if (rand() % one_in == 0)
                        int_at(&p.support, i)[e / 32] |= (int32_t)(1u << (e % 32));
                int_at(&p.support, i)[words] = rand() % 4 ? 1 : rand() % 2 * 2;
            }
            for (int i = 0; i < SLOTS; i++) {
                f.slot[i].path = i / k.cohort == 1 ? PATH_COLD : PATH_HOT_SKIP;
                f.slot[i].fresh = (uint64_t)rand() & slot_mask(SIZE);
            }
            const fixture_block blocks[] = {{0, 0, false}, {1, 1, true},  {1, 2, false},
                                            {2, 3, false}, {4, 0, false}, {5, 1, false}};
            fixture_batch(&f, blocks, trial == 4 ? 0 : 6, trial % 3 == 2);
            mirror_fixture(&g, &f);
            int fresh = f.count[2];
            tensor z = fixture_tensor(fresh, r->experts, 1), bias = fixture_tensor(1, r->experts, 1);
            tensor weights = fixture_tensor(fresh + 1, r->top_k, 1), ids = fixture_ints(fresh + 1, r->top_k);
            draw(&z, &bias, trial);
            if (trial == 0 && fresh > 0)
                at(&z, 0)[rand() % r->experts] = NAN; /* is never chosen */
            *int_at(&ids, fresh) = 77;
            tensor gz = mirror_same(&z), gbias = mirror_same(&bias), gw = mirror_same(&weights),
                   gids = mirror_same(&ids);
            plans gp = mirror_plans(&p);
            must_be(both.cpu->route(both.cpu, &ids, &weights, &z, &bias, &p, layer, &f.in, &f.s, r, &k));
            must_be(both.gpu->route(both.gpu, &gids, &gw, &gz, &gbias, &gp, layer, &g.in, &g.s, r, &k));
            assert_true(equal_bytes(&gids, &ids));
            assert_true(equal_bytes(&gw, &weights));
            free(z.data), free(bias.data), free(weights.data), free(ids.data), free(p.support.data), free(p.log.data);
            fixture_close(&f);
            mirror_forget();
        }
}

/* Supports and logs of several forwards in a row: cold, then tested and rebuilt on drifting logits. */
static void test_support(void **state)
{
    (void)state;
    enum { SLOTS = 40, FEW_SLOTS = 16, SIZE = 32 };
    static const int cohorts[] = {1, 3, SLOTS}; /* the last so large that several blocks build its support */
    int rebuilt = 0, held = 0, universe = 0;
    for (int n = 0; n < RULES; n++)
        for (int trial = 0; trial < 9; trial++) {
            const route_rule *r = &rules[n];
            int slot_count = trial % 3 == 2 ? SLOTS : FEW_SLOTS;
            block_rule k = {.block_size = SIZE,
                            .cohort = cohorts[trial % 3],
                            .restrict_experts = true,
                            .refresh_every = 5,
                            .update_every = trial == 5 ? 2 : 0,
                            .dense_lane = trial == 4};
            atlas_rule a = {.extra = rand() % (r->top_k + 1),
                            .coverage = 0.5f + 0.25f * (fixture_random() + 1),
                            .covered_share = trial % 4 == 3 ? 1.0f : 0.8f + 0.1f * (fixture_random() + 1),
                            .mass_weight = trial % 5 ? 0.7f + fixture_random() / 2 : 0,
                            .budget =
                                r->top_k < r->experts ? r->top_k + rand() % (r->experts - r->top_k) / 2 : r->top_k,
                            .repair_step = 1 + rand() % 4};
            fixture f, g;
            fixture_open(&f, slot_count, 4, SIZE);
            plans p = make_plans(2, (slot_count + k.cohort - 1) / k.cohort, r->experts);
            plans gp = mirror_plans(&p);
            tensor z = fixture_tensor(slot_count * SIZE * 2, r->experts, 1), bias = fixture_tensor(1, r->experts, 1);
            draw(&z, &bias, trial);
            for (int step = 0; step < 4; step++) {
                fixture_block blocks[2 * SLOTS];
                int count = 0;
                for (int i = 0; i < slot_count; i++) {
                    bool idle = i / k.cohort % 4 == 3 && i % 2; /* some of a cohort are through */
                    f.slot[i].path = idle ? PATH_NONE : step == 0 ? PATH_COLD : PATH_HOT_SKIP;
                    f.slot[i].iteration = step;
                    f.slot[i].since_update = step > 0 ? step - 1 : 0;
                    f.slot[i].fresh = idle ? 0 : step == 0 ? slot_mask(SIZE) : (uint64_t)rand() & (uint64_t)rand();
                    f.slot[i].decoded = ~f.slot[i].fresh & slot_mask(SIZE);
                    if (!idle && step == 0 && i % 3 == 0)
                        blocks[count++] = (fixture_block){i, 0, true};
                    if (!idle)
                        blocks[count++] = (fixture_block){i, 1, false};
                }
                fixture_batch(&f, blocks, count, k.dense_lane);
                mirror_fixture(&g, &f);
                for (int64_t i = 0; step > 0 && i < z.rows; i++)
                    for (int e = 0; e < r->experts; e++)
                        at(&z, i)[e] += trial % 2 ? (float)(rand() % 2) : fixture_random();
                tensor gz = mirror_same(&z), gbias = mirror_same(&bias);
                memset(p.log.data, 0, (size_t)p.log.rows * sizeof(layer_log));
                mirror_write(&gp.log, &p.log);
                must_be(both.cpu->support(both.cpu, &p, 1, &z, &bias, &f.in, &f.s, r, &a, &k));
                must_be(both.gpu->support(both.gpu, &gp, 1, &gz, &gbias, &g.in, &g.s, r, &a, &k));
                assert_true(equal_bytes(&gp.support, &p.support));
                assert_true(equal_bytes(&gp.log, &p.log));
                for (int c = 0; c < p.cohort_count; c++) {
                    const layer_log *log = (const layer_log *)p.log.data + p.cohort_count + c;
                    rebuilt += log->rebuilt;
                    held += log->tested > 0 && !log->rebuilt;
                    universe += log->universe;
                }
            }
            free(z.data), free(bias.data), free(p.support.data), free(p.log.data);
            fixture_close(&f);
            mirror_forget();
        }
    print_message("%d supports rebuilt, %d held, %d universe\n", rebuilt, held, universe);
    assert_true(rebuilt > 100 && held > 100 && universe > 10);
}

/* ---- the life of blocks */

/* The used part of a list. */
static bool equal_list(const tensor *gpu, const tensor *cpu)
{
    int64_t n = *cpu->used;
    tensor a = tensor_rows(gpu, 0, n), b = tensor_rows(cpu, 0, n);
    return equal_bytes(&a, &b);
}

static void admit(life *x, int i, int mask)
{
    int size = x->k.block_size, most = x->blocks * size, prompt = 1 + rand() % (most / 2),
        *token = int_at(&x->s.token, i);
    for (int j = 0; j < most; j++)
        token[j] = j < prompt ? rand() % 50 : mask;
    int end = prompt + 1 + rand() % (most - prompt);
    ((slot *)x->s.slot.data)[i] = (slot){.state = prompt < size ? SLOT_WAITING : SLOT_FILLING, .prompt_tokens = prompt,
                                         .end = end, .block = prompt / size, .cache_block = -1};
}

/* Both backends live through the same decisions, on random logits of the head and of the routers; or at a random pace.
 */
static void live(int slot_count, block_rule k, const route_rule *r, int layers, int forwards, bool paced)
{
    life x;
    atlas_rule a = {.extra = r->top_k / 2, .coverage = 0.9f, .covered_share = 0.9f, .mass_weight = 1,
                    .budget = r->top_k + r->experts / 4, .repair_step = 2};
    open_life(&x, slot_count, 6, k, layers, r->experts);
    link_counts(&x);
    tensor pace = fixture_ints(7, 9);
    for (int i = 0; i < 7 * 9; i++)
        ((int32_t *)pace.data)[i] = rand() % 5;
    life g = mirror_life(&x);
    link_counts(&g);
    if (paced) {
        x.s.pace = pace;
        g.s.pace = mirror_same(&pace);
    }
    tensor z = fixture_tensor(x.in.fresh.rows, r->experts, 1), bias = fixture_tensor(1, r->experts, 1);
    tensor ids = fixture_ints(z.rows, r->top_k), weights = fixture_tensor(z.rows, r->top_k, 1);
    tensor gz = mirror_same(&z), gbias = mirror_same(&bias), gids = mirror_same(&ids), gweights = mirror_same(&weights);
    int done = 0, broken = 0, hot = 0;
    for (int step = 0; step < forwards || (!done && step < 50 * forwards); step++) { /* few slots may need longer */
        slot *all = x.s.slot.data;
        for (int i = 0; i < slot_count; i++)
            if (all[i].state == SLOT_IDLE && rand() % 3) {
                admit(&x, i, k.mask_id);
                tensor row = tensor_rows(&g.s.slot, i, 1), token = tensor_rows(&g.s.token, i, 1);
                must_be(both.gpu->upload(both.gpu, &row, &all[i], U8));
                must_be(both.gpu->upload(both.gpu, &token, int_at(&x.s.token, i), I32));
            } else if (all[i].state == SLOT_REFINING && all[i].iteration > 0 && rand() % 40 == 0) {
                /* what no path does by itself: a decoded position is masked again, a cache is not what it should be */
                if (rand() % 2)
                    int_at(&x.s.token, i)[all[i].block * k.block_size] = k.mask_id;
                else
                    all[i].cache_version -= rand() % 2, all[i].cache_block += rand() % 2;
                tensor row = tensor_rows(&g.s.slot, i, 1), token = tensor_rows(&g.s.token, i, 1);
                must_be(both.gpu->upload(both.gpu, &row, &all[i], U8));
                must_be(both.gpu->upload(both.gpu, &token, int_at(&x.s.token, i), I32));
            }
        must_be(both.cpu->rows(both.cpu, &x.in, &x.s, &x.p, &k));
        must_be(both.gpu->rows(both.gpu, &g.in, &g.s, &g.p, &k));
        assert_true(equal_bytes(&g.in.count, &x.in.count));
        assert_true(equal_list(&g.in.token, &x.in.token));
        assert_true(equal_list(&g.in.position, &x.in.position));
        assert_true(equal_list(&g.in.slot, &x.in.slot));
        assert_true(equal_list(&g.in.role, &x.in.role));
        assert_true(equal_list(&g.in.fresh, &x.in.fresh));
        assert_true(equal_list(&g.in.place, &x.in.place));
        assert_true(equal_list(&g.in.live, &x.in.live));
        assert_true(equal_list(&g.in.span, &x.in.span));
        assert_true(equal_bytes(&g.s.slot, &x.s.slot));
        assert_true(equal_bytes(&g.p.support, &x.p.support));
        for (int l = 0; l < layers; l++) {
            for (int64_t i = 0; i < z.rows; i++) /* a few experts are liked, others drift */
                for (int e = 0; e < r->experts; e++)
                    at(&z, i)[e] = (e * 7 % 5 == l ? 2.0f : 0.0f) + 2 * fixture_random();
            mirror_write(&gz, &z);
            must_be(both.cpu->support(both.cpu, &x.p, l, &z, &bias, &x.in, &x.s, r, &a, &k));
            must_be(both.gpu->support(both.gpu, &g.p, l, &gz, &gbias, &g.in, &g.s, r, &a, &k));
            must_be(both.cpu->route(both.cpu, &ids, &weights, &z, &bias, &x.p, l, &x.in, &x.s, r, &k));
            must_be(both.gpu->route(both.gpu, &gids, &gweights, &gz, &gbias, &g.p, l, &g.in, &g.s, r, &k));
        }
        for (int i = 0; i < *int_at(&x.in.count, 3); i++)
            ((head_best *)x.best.data)[i] = (head_best){
                .id = rand() % 60, .probability = rand() % 4000 == 0 ? NAN : (float)(rand() % 100) / 100.0f};
        mirror_write(&g.best, &x.best);
        must_be(both.cpu->commit(both.cpu, &x.s, &x.best, &x.in, &x.p, &k));
        must_be(both.gpu->commit(both.gpu, &g.s, &g.best, &g.in, &g.p, &k));
        assert_true(equal_bytes(&g.s.report, &x.s.report));
        assert_true(equal_bytes(&g.s.slot, &x.s.slot));
        assert_true(equal_bytes(&g.s.token, &x.s.token));
        assert_true(equal_bytes(&g.p.support, &x.p.support));
        assert_true(equal_bytes(&g.p.log, &x.p.log));
        for (int i = 0; i < slot_count; i++) {
            const slot_report *rep = (const slot_report *)x.s.report.data + i;
            done += rep->sequence_done;
            broken += rep->broken;
            hot += rep->path == PATH_HOT_SKIP;
        }
    }
    print_message("%d slots, cohort %d: %d sequences done, %d broken, %d hot iterations\n", slot_count, k.cohort, done,
                  broken, hot);
    assert_true(done > 0);
    free(z.data), free(bias.data), free(ids.data), free(weights.data), free(pace.data);
    close_life(&x);
    mirror_forget();
}

static void test_life(void **state)
{
    (void)state;
    block_rule k = {.block_size = 8, .mask_id = 99, .eos_id = 58, .max_steps = 6, .threshold = 0.9f, .refresh_every = 4,
                    .prefill_blocks = 5, .cohort = 1, .restrict_experts = true};
    live(9, k, &rules[2], 2, 60, false);
    live(9, k, &rules[2], 2, 60, true);
    k.cohort = 4;
    live(9, k, &rules[2], 2, 60, false);
    k.dense_lane = true;
    k.update_every = 2;
    live(9, k, &rules[2], 2, 60, false);
    k = (block_rule){.block_size = 32,
                     .mask_id = 99,
                     .eos_id = 58,
                     .max_steps = 64,
                     .threshold = 0.95f,
                     .refresh_every = 5,
                     .prefill_blocks = 40,
                     .cohort = 64,
                     .restrict_experts = true};
    live(64, k, &rules[0], 1, 40, false);
    k.block_size = BLOCK_MOST;
    k.cohort = 1;
    k.restrict_experts = false;
    live(5, k, &rules[0], 1, 40, false);
    k.block_size = 2;
    k.prefill_blocks = 700;
    live(1500, k, &rules[2], 1, 12, false); /* more slots than a block of threads plans at once */
}

/* No slots at all: a rank that only serves its experts. */
static void test_no_slots(void **state)
{
    (void)state;
    block_rule k = {.block_size = 8, .mask_id = 99, .eos_id = 58, .max_steps = 6, .threshold = 0.9f, .refresh_every = 4,
                    .cohort = 1, .restrict_experts = true};
    life x;
    open_life(&x, 0, 2, k, 2, 16);
    life g = mirror_life(&x);
    link_counts(&g);
    must_be(both.gpu->rows(both.gpu, &g.in, &g.s, &g.p, &k));
    must_be(both.gpu->commit(both.gpu, &g.s, &g.best, &g.in, &g.p, &k));
    int32_t count[4];
    must_be(both.gpu->download(both.gpu, count, &g.in.count));
    assert_true(!count[0] && !count[1] && !count[2] && !count[3]);
    close_life(&x);
    mirror_forget();
}

/* ---- a row knows no neighbours */

static void test_alone_and_among_many(void **state)
{
    (void)state;
    enum { MANY = 3000, COLS = 2048 };
    tensor x = fixture_tensor(MANY, COLS, 1), w = fixture_tensor(1, COLS, 1), y = fixture_tensor(MANY, COLS, 1);
    tensor gx = mirror(&x), gw = mirror_same(&w), gy = mirror(&y), gone = mirror(&y),
           one = fixture_tensor(MANY, COLS, 1);
    must_be(both.gpu->norm(both.gpu, &gy, &gx, &gw, 1e-6f));
    mirror_read(&y, &gy);
    for (int i = 0; i < MANY; i += 371) {
        tensor row = tensor_rows(&gx, i, 1), to = tensor_rows(&gone, i, 1);
        must_be(both.gpu->norm(both.gpu, &to, &row, &gw, 1e-6f));
    }
    mirror_read(&one, &gone);
    for (int i = 0; i < MANY; i += 371)
        assert_true(same_rows(&one, i, &y, i));
    free(x.data), free(w.data), free(y.data), free(one.data);
    mirror_forget();
}

int main(int argc, char **argv) /* argv[1]: only the tests of that name */
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_transfers),
                                       cmocka_unit_test(test_random),
                                       cmocka_unit_test(test_out_of_memory),
                                       cmocka_unit_test(test_time),
                                       cmocka_unit_test(test_boxes),
                                       cmocka_unit_test(test_repeat),
                                       cmocka_unit_test(test_record_that_grows),
                                       cmocka_unit_test(test_embed),
                                       cmocka_unit_test(test_gated),
                                       cmocka_unit_test(test_pack),
                                       cmocka_unit_test(test_add_norm),
                                       cmocka_unit_test(test_merge),
                                       cmocka_unit_test(test_norm),
                                       cmocka_unit_test(test_rotate),
                                       cmocka_unit_test(test_rotate_among_many),
                                       cmocka_unit_test(test_route),
                                       cmocka_unit_test(test_support),
                                       cmocka_unit_test(test_life),
                                       cmocka_unit_test(test_no_slots),
                                       cmocka_unit_test(test_alone_and_among_many)};
    pair_open();
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    srand(7);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
