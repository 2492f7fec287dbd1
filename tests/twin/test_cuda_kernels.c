/* The heavy kernels of the CUDA backend against their CPU twins on the same BF16 numbers: products, router, experts,
 * attention, head. And what holds to the bit: a row's result is the same alone and among any others, for any number of
 * ranks, and rows that are not used are neither read (they hold NaN here) nor written. */
#include "tests/twin/cuda_fixture.h"

/* |a - b| / |b| over a row; NaN where either has one. */
static double distance(const float *a, const float *b, int64_t n)
{
    double off = 0, all = 0;
    for (int64_t i = 0; i < n; i++) {
        off += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        all += (double)b[i] * (double)b[i];
    }
    return off == 0 ? 0 : sqrt(off / all);
}

static void must_be_near(const float *a, const float *b, int64_t n, double bound, const char *what, int64_t row)
{
    double d = distance(a, b, n);
    if (!(d <= bound)) {
        int64_t worst = 0;
        for (int64_t i = 0; i < n; i++)
            if (!(fabs((double)a[i] - (double)b[i]) <= fabs((double)a[worst] - (double)b[worst])))
                worst = i;
        fail_msg("%s: row %lld is off by %.3g of its length, want at most %.3g; worst column %lld of %lld: %g, CPU %g",
                 what, (long long)row, d, bound, (long long)worst, (long long)n, (double)a[worst], (double)b[worst]);
    }
}

static const float untouched = 12288; /* a BF16 number */

static void fill(const tensor *t, int64_t from, float x)
{
    for (int64_t i = from; i < t->rows; i++)
        for (int64_t j = 0; j < t->cols; j++)
            at(t, i)[j] = x;
}

/* A tensor of random numbers whose rows from `used` on are NaN; *used stays where it is. */
static tensor partly(int64_t rows, int64_t cols, const int32_t *used)
{
    tensor t = fixture_tensor(rows, cols, 1);
    fill(&t, *used, NAN);
    t.used = used;
    return t;
}

/* ---- products */

enum { SPARE = 3 };

/* y of x's rows [first, first + rows), on the GPU, with up to `spare` rows more that are not used. */
static tensor gpu_product(const tensor *x, int64_t first, int32_t rows, int64_t spare, const tensor *w, dtype type)
{
    tensor part = tensor_rows(x, first, rows), counter = tensor_of(&rows, I32, 1, 1), there = mirror_same(&counter);
    part.rows = rows + spare <= x->rows - first ? rows + spare : x->rows - first;
    part.used = there.data;
    tensor y = fixture_tensor(part.rows, w->rows, 1);
    fill(&y, 0, untouched);
    tensor m = mirror_as(&y, type, (w->rows + 7) / 8 * 8);
    must_be(both.gpu->matmul(both.gpu, &m, &part, w));
    mirror_read(&y, &m);
    for (int64_t i = rows; i < y.rows; i++)
        for (int64_t j = 0; j < y.cols; j++)
            assert_true(at(&y, i)[j] == untouched);
    return y;
}

/* BF16 results are rounded: 2^-9 of each number at most, a little over half of that in a row's length. fp32 results
 * have only the sums' rounding, which tensor cores cut off instead: some 10^-6 of a row; weights in BF16 would be 10^-3
 * off. */
static void product_case(int out, int in, const int *row_counts, int counts, dtype weight, dtype result)
{
    char what[64];
    for (int k = 0; k < counts; k++) {
        int32_t rows = row_counts[k];
        snprintf(what, sizeof what, "product [%d, %d] x [%d, %d], %s -> %s", rows, in, out, in, dtype_name(weight),
                 dtype_name(result));
        tensor x = partly(rows + SPARE, in, &rows), w = fixture_tensor(out, in, 1), y = fixture_tensor(rows, out, 1);
        tensor xm = mirror(&x), wm = mirror_as(&w, weight, (in + 7) / 8 * 8);
        must_be(both.cpu->matmul(both.cpu, &y, &x, &w));
        tensor got = gpu_product(&xm, 0, rows, SPARE, &wm, result);
        for (int64_t i = 0; i < rows; i++)
            must_be_near(at(&got, i), at(&y, i), out, result == BF16 ? 0x1p-8 : 1e-5, what, i);
        const struct {
            int first, rows;
        } parts[] = {{0, 1},         {rows - 1, 1},    {rows / 2, rows / 3}, {rows / 3, 17},
                     {1, rows - 1}, {0, rows / 4},    {0, rows / 2}}; /* the last two with as many to spare */
        for (int p = 0; p < 7; p++) {
            if (parts[p].first < 0 || parts[p].rows <= 0 || parts[p].first + parts[p].rows > rows)
                continue;
            tensor some = gpu_product(&xm, parts[p].first, parts[p].rows, p < 5 ? SPARE : rows, &wm, result);
            for (int64_t i = 0; i < parts[p].rows; i++)
                if (!same_rows(&some, i, &got, parts[p].first + i))
                    fail_msg("%s: row %lld differs among %d rows from %d on", what, (long long)(parts[p].first + i),
                             parts[p].rows, parts[p].first);
            free(some.data);
        }
        free(x.data), free(w.data), free(y.data), free(got.data);
        mirror_forget();
    }
}

static void test_products(void **state)
{
    (void)state;
    static const int all[] = {0, 1, 7, 8, 9, 33, 64, 100, 129, 257, 600}, few[] = {1, 32, 100, 600};
    static const int many[] = {1, 40, 600, 2100}, some[] = {190, 256, 290, 544, 2100};
    static const int shape[][2] = {{64, 64}, {192, 128}, {320, 256}, {100, 50}, {64, 72}, {37, 64}};
    for (int i = 0; i < 6; i++)
        product_case(shape[i][0], shape[i][1], all, 11, BF16, BF16);
    product_case(256, 256, all, 11, BF16, F32);
    product_case(3072, 2048, few, 4, BF16, BF16); /* narrow boxes among them */
    product_case(2048, 512, many, 4, BF16, BF16);
    product_case(3072, 256, some, 5, BF16, BF16);
    product_case(2048, 320, some, 4, BF16, BF16);
    product_case(512, 128, many, 4, BF16, F32);
}

/* y of x's rows [first, first + rows), on the GPU, with rows more that are not used. */
static tensor gpu_gated(const tensor *x, int64_t first, int32_t rows, const tensor *w)
{
    tensor part = tensor_rows(x, first, rows), counter = tensor_of(&rows, I32, 1, 1), there = mirror_same(&counter);
    part.rows = rows + SPARE <= x->rows - first ? rows + SPARE : x->rows - first;
    part.used = there.data;
    tensor y = fixture_tensor(part.rows, w->rows / 2, 1), room = fixture_tensor(part.rows, w->rows, 1);
    fill(&y, 0, untouched);
    tensor m = mirror(&y), room_m = mirror(&room);
    must_be(both.gpu->gated(both.gpu, &m, &room_m, &part, w));
    mirror_read(&y, &m);
    for (int64_t i = rows; i < y.rows; i++)
        for (int64_t j = 0; j < y.cols; j++)
            assert_true(at(&y, i)[j] == untouched);
    free(room.data);
    return y;
}

/* As for experts. Where boxes do not fit gate and up are BF16 before they meet: three roundings of 2^-8 at most, of
 * which that of the gate counts up to 1.28 times, and a row may be little more than one number. */
static void gated_case(int inner, int hidden, const int *row_counts, int counts)
{
    char what[64];
    for (int k = 0; k < counts; k++) {
        int32_t rows = row_counts[k];
        snprintf(what, sizeof what, "gated product [%d, %d] x 2 [%d, %d]", rows, hidden, inner, hidden);
        tensor x = partly(rows + SPARE, hidden, &rows), w = fixture_tensor(2 * inner, hidden, 1);
        tensor xm = mirror(&x), wm = mirror(&w), halves = fixture_tensor(rows, 2 * inner, 1);
        tensor y = fixture_tensor(rows, inner, 1), used = tensor_rows(&x, 0, rows);
        must_be(both.cpu->gated(both.cpu, &y, &halves, &used, &w));
        tensor got = gpu_gated(&xm, 0, rows, &wm);
        for (int64_t i = 0; i < rows; i++)
            must_be_near(at(&got, i), at(&y, i), inner, inner % 32 || hidden % 64 ? 3.3 * 0x1p-8 : 0x1p-7, what, i);
        must_be(both.gpu->aside(both.gpu, 50)); /* on fewer multiprocessors */
        tensor beside = gpu_gated(&xm, 0, rows, &wm);
        must_be(both.gpu->back(both.gpu));
        must_be(both.gpu->join(both.gpu));
        for (int64_t i = 0; i < rows; i++)
            if (!same_rows(&beside, i, &got, i))
                fail_msg("%s: row %lld differs aside", what, (long long)i);
        free(beside.data);
        const int parts[][2] = {{0, 1}, {rows - 1, 1}, {rows / 3, 17}, {rows / 2, rows / 3}};
        for (int p = 0; p < 4; p++) {
            int from = parts[p][0], some = parts[p][1];
            if (from < 0 || some <= 0 || from + some > rows)
                continue;
            tensor part = gpu_gated(&xm, from, some, &wm);
            for (int64_t i = 0; i < some; i++)
                if (!same_rows(&part, i, &got, from + i))
                    fail_msg("%s: row %lld differs among %d rows from %d on", what, (long long)(from + i), some, from);
            free(part.data);
        }
        free(x.data), free(w.data), free(halves.data), free(y.data), free(got.data);
        mirror_forget();
    }
}

static void test_gated(void **state)
{
    (void)state;
    static const int all[] = {0, 1, 7, 33, 64, 100, 257, 600}, few[] = {1, 32, 600, 1500, 2600};
    static const int shape[][2] = {{32, 64}, {96, 128}, {160, 256}, {50, 50}, {37, 64}};
    for (int i = 0; i < 5; i++)
        gated_case(shape[i][0], shape[i][1], all, 8);
    gated_case(512, 2048, few, 3);
    gated_case(512, 256, few, 5);
}

static void test_router_products(void **state)
{
    (void)state;
    static const int all[] = {0, 1, 15, 33, 300, 1100}, many[] = {2000, 3072, 5000};
    static const int shape[][2] = {{256, 2048}, {32, 256}, {64, 96}, {130, 1100}, {16, 32}, {20, 50}};
    for (int i = 0; i < 6; i++)
        product_case(shape[i][0], shape[i][1], all, 6, F32, F32);
    product_case(256, 2048, many, 3, F32, F32); /* each count is cut another way */
    product_case(130, 100, many, 3, F32, F32);
}

/* ---- experts */

typedef struct layer {
    int experts, groups, top_k, hidden, inner, most_rows;
} layer;

static const layer layers[] = {{16, 4, 4, 64, 32, 70},    {20, 10, 3, 50, 37, 70},   {32, 4, 4, 256, 64, 1100},
                               {24, 8, 6, 320, 192, 1100}, {256, 8, 8, 128, 64, 2500}, {8, 1, 8, 2048, 512, 33},
                               {24, 12, 6, 320, 64, 70},  {40, 8, 10, 320, 64, 70}};
enum { LAYERS = sizeof layers / sizeof *layers, KINDS = 4 };

/* Ascending ids, -1 behind the last. kind 0: top_k of all; 1: all tokens on one expert; 2: any number, none among them;
 * 3: only experts of the upper half. */
static void draw_edges(tensor *ids, tensor *weights, const layer *l, int kind)
{
    for (int64_t i = 0; i < ids->rows; i++) {
        int want = kind == 1 ? 1 : kind == 2 ? rand() % (l->top_k + 1) : l->top_k, n = 0;
        int first = kind == 1 ? l->experts / 3 : kind == 3 ? l->experts / 2 : 0;
        want = want < l->experts - first ? want : l->experts - first;
        for (int e = first; e < l->experts && n < want; e++)
            if (rand() % (l->experts - e) < want - n || kind == 1)
                int_at(ids, i)[n++] = e;
        for (int j = 0; j < l->top_k; j++) {
            at(weights, i)[j] = j < n ? 1 + fixture_random() : 0;
            if (j >= n)
                int_at(ids, i)[j] = -1;
        }
    }
}

static expert_set rank_set(const tensor *gate_up, const tensor *down, const sum_tree *t, const layer *l, int rank)
{
    int first = t->rank_first[rank], count = t->rank_first[rank + 1] - first;
    return (expert_set){.gate_up = tensor_rows(gate_up, first * 2 * l->inner, count * 2 * l->inner),
                        .down = tensor_rows(down, first * l->hidden, count * l->hidden),
                        .first = first,
                        .count = count,
                        .inner = l->inner,
                        .tree = t,
                        .rank = rank};
}

/* All units of all ranks, folded: sum [rows, hidden]. NULL where a unit must not have been written. */
static void gpu_layer(tensor *sum, const tensor *x, const tensor *gate_up, const tensor *down, const tensor *ids,
                      const tensor *weights, const layer *l, int ranks)
{
    sum_tree *t;
    int64_t rows = sum->rows;
    int32_t used = (int32_t)rows;
    must_be(sum_tree_open(&t, l->experts, l->groups, ranks));
    tensor y = fixture_tensor((rows + SPARE) * t->unit_count, l->hidden, 1);
    for (int r = 0; r < ranks; r++) {
        int units = t->rank_unit[r + 1] - t->rank_unit[r];
        expert_set e = rank_set(gate_up, down, t, l, r);
        tensor mine = fixture_ints(rows + SPARE, l->top_k), my = fixture_tensor(rows + SPARE, l->top_k, 1);
        tensor part = fixture_tensor((rows + SPARE) * units, l->hidden, 1), counter = tensor_of(&used, I32, 1, 1);
        fixture_rank_edges(&mine, &my, ids, weights, &e); /* spare rows keep expert 0: they are not used */
        fill(&part, 0, untouched);
        tensor in = *x, mine_m = mirror_same(&mine), my_m = mirror_same(&my), part_m = mirror_same(&part);
        tensor there = mirror_same(&counter);
        in.used = mine_m.used = my_m.used = there.data;
        must_be(both.gpu->experts(both.gpu, &part_m, &in, &mine_m, &my_m, &e));
        mirror_read(&part, &part_m);
        for (int64_t i = 0; i < (rows + SPARE) * units; i++)
            memcpy(at(&y, (rows + SPARE) * t->rank_unit[r] + i), at(&part, i), (size_t)l->hidden * sizeof(float));
        free(mine.data), free(my.data), free(part.data);
    }
    float *scratch = malloc((size_t)sum_tree_scratch(t) * (size_t)l->hidden * sizeof *scratch);
    for (int64_t i = 0; i < rows + SPARE; i++) {
        const float *term[1024];
        for (int r = 0; r < ranks; r++) {
            int units = t->rank_unit[r + 1] - t->rank_unit[r];
            for (int u = t->rank_unit[r]; u < t->rank_unit[r + 1]; u++) {
                bool any = false;
                for (int j = 0; i < rows && j < l->top_k && int_at(ids, i)[j] >= 0; j++)
                    any |= t->unit_of[int_at(ids, i)[j]] == u;
                term[u] = at(&y, (rows + SPARE) * t->rank_unit[r] + i * units + u - t->rank_unit[r]);
                if (!any) { /* not written; but zero where it is the rank's only unit, for the lane of one rank */
                    float want = i < rows && units == 1 ? 0 : untouched;
                    for (int j = 0; j < l->hidden; j++)
                        assert_true(term[u][j] == want);
                    term[u] = NULL;
                }
            }
        }
        if (i < rows)
            sum_tree_fold(t, at(sum, i), term, l->hidden, scratch);
    }
    free(scratch), free(y.data);
    sum_tree_close(t);
}

/* Gate, up and what they make are BF16 before down, and each expert's output before the sum: two roundings of 2^-9 each
 * at most, and the result's length in fp32. */
static void experts_case(const layer *l, int rows, int kind)
{
    char what[96];
    snprintf(what, sizeof what, "experts [%d of %d, %d, %d], %d rows, edges of kind %d", l->top_k, l->experts,
             l->hidden, l->inner, rows, kind);
    int32_t used = rows;
    sum_tree *t;
    must_be(sum_tree_open(&t, l->experts, l->groups, 1));
    tensor gate_up = fixture_tensor(l->experts * 2 * l->inner, l->hidden, 1);
    tensor down = fixture_tensor(l->experts * l->hidden, l->inner, 1), x = partly(rows + SPARE, l->hidden, &used);
    tensor ids = fixture_ints(rows, l->top_k), weights = fixture_tensor(rows, l->top_k, 1);
    draw_edges(&ids, &weights, l, kind);
    tensor gate_up_m = mirror(&gate_up), down_m = mirror(&down), x_m = mirror(&x);
    expert_set whole = rank_set(&gate_up, &down, t, l, 0);
    int units = t->unit_count;
    tensor want = fixture_tensor(rows * units, l->hidden, 1), sum = fixture_tensor(rows, l->hidden, 1);
    tensor first = fixture_tensor(rows, l->hidden, 1);
    tensor plain = tensor_rows(&x, 0, rows);
    must_be(both.cpu->experts(both.cpu, &want, &plain, &ids, &weights, &whole));
    for (int ranks = 1; ranks <= 3; ranks++) {
        gpu_layer(ranks == 1 ? &first : &sum, &x_m, &gate_up_m, &down_m, &ids, &weights, l, ranks);
        for (int64_t i = 0; ranks == 1 && units == 1 && i < rows; i++)
            if (int_at(&ids, i)[0] >= 0)
                must_be_near(at(&first, i), at(&want, i), l->hidden, 0x1p-7, what, i);
        for (int64_t i = 0; ranks > 1 && i < rows; i++)
            if (!same_rows(&sum, i, &first, i))
                fail_msg("%s: row %lld differs for %d ranks", what, (long long)i, ranks);
    }
    for (int k = 0; k < 3 && rows > 1; k++) { /* among fewer */
        int from = k == 0 ? 0 : k == 1 ? rows / 2 : rows - 1, some = k == 1 ? (rows + 3) / 4 : 1;
        tensor part = tensor_rows(&sum, from, some), x_part = tensor_rows(&x_m, from, some + SPARE);
        tensor i_part = tensor_rows(&ids, from, some), w_part = tensor_rows(&weights, from, some);
        gpu_layer(&part, &x_part, &gate_up_m, &down_m, &i_part, &w_part, l, 1);
        for (int64_t i = 0; i < some; i++)
            if (!same_rows(&part, i, &first, from + i))
                fail_msg("%s: row %lld differs among %d rows", what, (long long)(from + i), some);
    }
    free(gate_up.data), free(down.data), free(x.data), free(ids.data), free(weights.data);
    free(want.data), free(sum.data), free(first.data);
    sum_tree_close(t);
    mirror_forget();
}

static void test_experts(void **state)
{
    (void)state;
    /* on one expert: tiles of 272 and of 273; the last: so many edges that two kernels sort them */
    static const int row_counts[] = {0, 1, 3, 33, 70, 1090, 2500};
    for (int n = 0; n < LAYERS; n++)
        for (int k = 0; k < 7 && row_counts[k] <= layers[n].most_rows; k++) {
            int kinds = layers[n].hidden < 2048 && row_counts[k] < 2500 ? KINDS : 1; /* the host is slow at others */
            for (int kind = 0; kind < kinds; kind++)
                experts_case(&layers[n], row_counts[k], kind);
        }
}

/* Sums that merge makes are those that experts would have made. */
static void late_case(const layer *l, int kind, int count)
{
    enum { SIZE = 8, MOST = 330 };
    fixture_block blocks[MOST];
    const block_rule k = {.block_size = SIZE, .cohort = 1};
    int64_t rows = count * SIZE, h = l->hidden;
    sum_tree *t;
    fixture f, m;
    must_be(sum_tree_open(&t, l->experts, l->groups, 1));
    fixture_open(&f, count, 4, SIZE);
    for (int i = 0; i < count; i++) {
        blocks[i] = (fixture_block){i > 0 ? i - (i < count - 1) : 0, (i + 1) % 4, i % 5 == 0};
        f.slot[i].decoded = (uint64_t)rand() & slot_mask(SIZE);
        f.slot[i].fresh = (~f.slot[i].decoded | (uint64_t)rand()) & slot_mask(SIZE);
    }
    fixture_batch(&f, blocks, count, false);
    mirror_fixture(&m, &f);
    tensor gate_up = fixture_tensor(l->experts * 2 * l->inner, h, 1),
           down = fixture_tensor(l->experts * h, l->inner, 1);
    tensor x = fixture_tensor(f.count[2], h, 1), ids = fixture_ints(f.count[2], l->top_k),
           weights = fixture_tensor(f.count[2], l->top_k, 1), y = fixture_tensor(f.count[2], h, 1);
    tensor norm = fixture_tensor(1, h, 1), shared = fixture_tensor(rows, h, 1);
    draw_edges(&ids, &weights, l, kind);
    tensor gate_up_m = mirror(&gate_up), down_m = mirror(&down), x_m = mirror(&x), y_m = mirror_same(&y);
    tensor ids_m = mirror_same(&ids), weights_m = mirror_same(&weights), norm_m = mirror_same(&norm),
           shared_m = mirror(&shared);
    expert_set e = rank_set(&gate_up_m, &down_m, t, l, 0);
    tensor got[2][3], of[3] = {fixture_tensor(rows, h, 3), fixture_tensor(rows, h, 1),
                               fixture_tensor(rows, h, 1)}; /* x, h, the cache */
    for (int late = 0; late < 2; late++) {
        tensor there[3], none = y_m;
        none.data = NULL;
        for (int i = 0; i < 3; i++)
            there[i] = mirror(&of[i]);
        residual r = {.x = there[0], .h = there[1], .norm = &norm_m, .eps = 1e-6f};
        must_be(both.gpu->experts(both.gpu, late ? &none : &y_m, &x_m, &ids_m, &weights_m, &e));
        must_be(both.gpu->merge(both.gpu, &r, late ? &none : &y_m, &shared_m, &there[2], 0, &m.in, &m.s, &k));
        for (int i = 0; i < 3; i++) {
            got[late][i] = fixture_tensor(of[i].rows, h, 1);
            mirror_read(&got[late][i], &there[i]);
        }
    }
    for (int i = 0; i < 3; i++)
        for (int64_t row = 0; row < of[i].rows; row++)
            if (!same_rows(&got[0][i], row, &got[1][i], row))
                fail_msg("late sums of [%d of %d, %d], %d rows, edges of kind %d: row %lld of %d differs",
                         l->top_k, l->experts, l->hidden, (int)rows, kind, (long long)row, i);
    tensor *all[] = {&gate_up, &down, &x, &ids, &weights, &y, &norm, &shared, &of[0], &of[1], &of[2],
                     &got[0][0], &got[0][1], &got[0][2], &got[1][0], &got[1][1], &got[1][2]};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]->data);
    fixture_close(&f);
    sum_tree_close(t);
    mirror_forget();
}

static void test_late_sums(void **state)
{
    (void)state;
    static const layer two_pieces = {12, 6, 5, 2304, 64, 0}; /* of a row, to residual.cu */
    for (int kind = 0; kind < KINDS; kind++) {
        for (int n = 0; n < LAYERS; n++) {
            late_case(&layers[n], kind, 4);
            if (kind % 2 == 0 && layers[n].hidden < 2048) /* the host is slow to fill it */
                late_case(&layers[n], kind, 330);
        }
        late_case(&two_pieces, kind, kind == 2 ? 140 : 4);
    }
}

/* A shared expert that rides with the others gives merge what two dense products of all rows give it. packed: the fresh
 * rows lie apart; else every row is one of them. */
static void riding_case(const layer *l, int blocks, int kind, bool packed)
{
    enum { SIZE = 32, MOST = 24 };
    const block_rule k = {.block_size = SIZE, .cohort = 1};
    int64_t rows = blocks * SIZE, h = l->hidden, two = 2 * l->inner;
    fixture_block block[MOST];
    sum_tree *t;
    fixture f, m;
    must_be(sum_tree_open(&t, l->experts, l->groups, 1));
    fixture_open(&f, blocks, 4, SIZE);
    for (int i = 0; i < blocks; i++) {
        f.slot[i].decoded = ((uint64_t)rand() << 16 ^ (uint64_t)rand()) & slot_mask(SIZE);
        f.slot[i].fresh = packed ? ~f.slot[i].decoded & slot_mask(SIZE) : slot_mask(SIZE);
        block[i] = (fixture_block){i, i % 4, i % 5 == 0};
    }
    fixture_batch(&f, block, blocks, false);
    mirror_fixture(&m, &f);
    int64_t fresh = f.count[2];
    tensor gate_up = fixture_tensor((l->experts + 1) * two, h, 1),
           down = fixture_tensor((l->experts + 1) * h, l->inner, 1);
    tensor all = fixture_tensor(rows + SPARE, h, 1), some = fixture_tensor(fresh, h, 1);
    tensor all_m = mirror(&all), ids = fixture_ints(fresh, l->top_k), weights = fixture_tensor(fresh, l->top_k, 1);
    for (int64_t i = 0; i < fresh; i++)
        memcpy(at(&some, i), at(&all, *int_at(&f.in.fresh, i)), (size_t)h * sizeof(float));
    draw_edges(&ids, &weights, l, kind);
    tensor gate_up_m = mirror(&gate_up), down_m = mirror(&down), some_m = packed ? mirror(&some) : all_m;
    tensor ids_m = mirror_same(&ids), weights_m = mirror_same(&weights);
    tensor norm = fixture_tensor(1, h, 1), inner = fixture_tensor(rows + SPARE, l->inner, 1),
           room = fixture_tensor(rows + SPARE, two, 1), y = fixture_tensor(rows + SPARE, h, 1);
    tensor norm_m = mirror_same(&norm), inner_m = mirror(&inner), room_m = mirror(&room), y_m = mirror(&y);
    all_m.used = inner_m.used = m.in.count.data;
    some_m.rows = fresh;
    expert_set e = rank_set(&gate_up_m, &down_m, t, l, 0);
    shared_set set = {tensor_rows(&gate_up_m, l->experts * two, two), tensor_rows(&down_m, l->experts * h, h), all_m};
    if (!both.gpu->rides(both.gpu, &some_m, &e, &set))
        skip(); /* not a Hopper GPU */
    shared_set elsewhere = set, many = set;
    elsewhere.down = tensor_rows(&down_m, 0, h);
    many.h.rows = RIDES_MOST + 1;
    assert_false(both.gpu->rides(both.gpu, &some_m, &e, &elsewhere) || both.gpu->rides(both.gpu, &some_m, &e, &many));
    tensor got[2][3], of[3] = {fixture_tensor(rows, h, 3), fixture_tensor(rows, h, 1),
                               fixture_tensor(blocks * SIZE, h, 1)}; /* x, h, the cache */
    for (int ride = 0; ride < 2; ride++) {
        tensor there[3], none = tensor_of(NULL, F32, fresh, h), left = y_m;
        for (int i = 0; i < 3; i++)
            there[i] = mirror(&of[i]);
        residual r = {.x = there[0], .h = there[1], .norm = &norm_m, .eps = 1e-6f};
        if (ride) {
            e.shared = &set;
            left.data = NULL;
        } else {
            must_be(both.gpu->gated(both.gpu, &inner_m, &room_m, &all_m, &set.gate_up));
            must_be(both.gpu->matmul(both.gpu, &y_m, &inner_m, &set.down));
        }
        must_be(both.gpu->experts(both.gpu, &none, &some_m, &ids_m, &weights_m, &e));
        must_be(both.gpu->merge(both.gpu, &r, &none, &left, &there[2], 0, &m.in, &m.s, &k));
        for (int i = 0; i < 3; i++) {
            got[ride][i] = fixture_tensor(of[i].rows, h, 1);
            mirror_read(&got[ride][i], &there[i]);
        }
    }
    for (int i = 0; i < 3; i++)
        for (int64_t row = 0; row < of[i].rows; row++)
            if (!same_rows(&got[0][i], row, &got[1][i], row))
                fail_msg("a shared expert that rides, [%d of %d, %d, %d], %d blocks, edges of kind %d: row %lld of %d "
                         "differs",
                         l->top_k, l->experts, l->hidden, l->inner, blocks, kind, (long long)row, i);
    tensor *these[] = {&gate_up, &down, &all, &some, &ids, &weights, &norm, &inner, &room, &y, &of[0], &of[1], &of[2],
                       &got[0][0], &got[0][1], &got[0][2], &got[1][0], &got[1][1], &got[1][2]};
    for (size_t i = 0; i < sizeof these / sizeof *these; i++)
        free(these[i]->data);
    fixture_close(&f);
    sum_tree_close(t);
    mirror_forget();
}

static void test_riding(void **state)
{
    (void)state;
    static const int block_counts[] = {1, 3, 9, 24};
    for (int n = 0; n < LAYERS; n++)
        for (int i = 0; i < (layers[n].hidden < 2048 ? 4 : 2); i++) /* the host is slow to fill it */
            for (int packed = 0; packed < 2 && layers[n].hidden % 64 == 0 && layers[n].inner % 64 == 0; packed++)
                riding_case(&layers[n], block_counts[i], (n + i) % KINDS, packed);
}

/* ---- attention */

static const attention_rule rules[] = {
    {4, 2, 16, 16, 10000, 1e-6f, true, 8},    {4, 4, 20, 0, 10000, 1e-6f, false, 5},
    {8, 4, 32, 16, 10000, 1e-6f, true, 32},   {16, 4, 128, 64, 10000, 1e-6f, true, 32},
    {32, 4, 128, 64, 10000, 1e-6f, true, 32}, {16, 4, 128, 64, 10000, 1e-6f, true, 64},
    {16, 4, 128, 64, 10000, 1e-6f, true, 8},  {8, 8, 128, 64, 10000, 1e-6f, true, 16},
};
enum { RULES = sizeof rules / sizeof *rules, SLOTS = 3, BLOCKS = 40, MANY = 40, FEW = 4 };

/* y of the blocks, from rows of qkv that begin with the first block's. */
static tensor gpu_attention(fixture *f, const fixture_block *block, int blocks, const tensor *qkv, const kv_pool *kv,
                            const attention_rule *r)
{
    fixture g;
    fixture_batch(f, block, blocks, true);
    mirror_fixture(&g, f);
    tensor y = fixture_tensor(blocks * r->block_size + SPARE, r->heads * r->head_dim, 1);
    fill(&y, 0, untouched);
    tensor m = mirror(&y);
    must_be(both.gpu->attend(both.gpu, &m, qkv, kv, 1, &g.in, &g.s, r));
    mirror_read(&y, &m);
    for (int64_t i = blocks * r->block_size; i < y.rows; i++)
        for (int64_t j = 0; j < y.cols; j++)
            assert_true(at(&y, i)[j] == untouched);
    return y;
}

/* Weights are BF16 before they meet the values, and so is the result: 2^-9 of each at most. */
static void test_attention(void **state)
{
    (void)state;
    for (int k = 0; k < RULES; k++) {
        const attention_rule *r = &rules[k];
        char what[96];
        snprintf(what, sizeof what, "attention of %d / %d heads of %d, blocks of %d", r->heads, r->kv_heads,
                 r->head_dim, r->block_size);
        int size = r->block_size, width = r->kv_heads * r->head_dim;
        fixture f;
        fixture_open(&f, SLOTS, BLOCKS, size);
        kv_pool kv = {.k = fixture_tensor(2 * f.page_count * size, width, 2),
                      .v = fixture_tensor(2 * f.page_count * size, width, 1),
                      .page_count = f.page_count};
        kv_pool kv_m = {.k = mirror(&kv.k), .v = mirror(&kv.v), .page_count = f.page_count};
        fixture_block all[MANY];
        for (int i = 0; i < MANY; i++)
            all[i] = (fixture_block){rand() % SLOTS, i < 12 ? i : rand() % BLOCKS, i % 3 == 0};
        all[MANY / 2] = (fixture_block){1, BLOCKS - 1, false};
        tensor qkv = fixture_tensor(MANY * size, (r->heads + 2 * r->kv_heads) * r->head_dim, 2);
        tensor qkv_m = mirror(&qkv), want = fixture_tensor(MANY * size, r->heads * r->head_dim, 1);
        tensor got = gpu_attention(&f, all, MANY, &qkv_m, &kv_m, r);
        must_be(both.cpu->attend(both.cpu, &want, &qkv, &kv, 1, &f.in, &f.s, r));
        for (int i = 0; i < MANY * size; i++)
            must_be_near(at(&got, i), at(&want, i), want.cols, 0x1p-7, what, i);
        for (int from = 0; from < MANY; from += FEW) { /* a few at a time: other blocks of the device share the keys */
            int some = from % (2 * FEW) ? 1 : FEW;
            tensor part = tensor_rows(&qkv_m, from * size, some * size);
            tensor y = gpu_attention(&f, all + from, some, &part, &kv_m, r);
            for (int i = 0; i < some * size; i++)
                if (!same_rows(&y, i, &got, from * size + i))
                    fail_msg("%s: row %d (block %d of its slot) differs among %d blocks", what, from * size + i,
                             all[from + i / size].block, some);
            free(y.data);
        }
        tensor none = gpu_attention(&f, all, 0, &qkv_m, &kv_m, r);
        free(kv.k.data), free(kv.v.data), free(qkv.data), free(want.data), free(got.data), free(none.data);
        fixture_close(&f);
        mirror_forget();
    }
}

/* A forward's chain of product, rotation and attention, several times over with other numbers, spans and pages: the
 * same bits as attention that begins behind everything. What rotation writes holds NaN before, so that keys read too
 * early show; what it does not write is read while it runs (cuda.settled). */
static void test_rotated_attention(void **state)
{
    (void)state;
    enum { HIDDEN = 64, TIMES = 12 };
    struct {
        int blocks;
        fixture_block block[MANY];
    } batches[] = {
        {1, {{0, 8, false}}},               /* one block, two chunks */
        {2, {{0, 7, true}, {0, 8, false}}}, /* the one before it sealed */
        {1, {{1, 32, false}}},              /* five chunks */
        {6, {{0, 0, true}, {0, 1, true}, {0, 2, true}, {0, 3, true}, {0, 4, true}, {0, 5, true}}}, /* a prompt */
        {5, {{0, 38, true}, {0, 39, false}, {1, 9, false}, {2, 0, true}, {2, 1, false}}},
        {MANY, {{0, 0, false}}}, /* more than a warp looks over */
    };
    enum { BATCHES = sizeof batches / sizeof *batches };
    for (int i = 0; i < MANY; i++)
        batches[BATCHES - 1].block[i] = (fixture_block){2, i, true};
    for (int k = 0; k < RULES; k++) {
        const attention_rule *r = &rules[k];
        int size = r->block_size, width = r->kv_heads * r->head_dim, out = (r->heads + 2 * r->kv_heads) * r->head_dim;
        if (r->rotary_dim == 0)
            continue;
        fixture f;
        fixture_open(&f, SLOTS, BLOCKS, size);
        tensor k_old = fixture_tensor(2 * f.page_count * size, width, 1), w = fixture_tensor(out, HIDDEN, 0.2f),
               v_old = fixture_tensor(2 * f.page_count * size, width, 1), norm = fixture_tensor(1, r->head_dim, 1),
               none = fixture_tensor(size, width, 1);
        fill(&none, 0, NAN);
        kv_pool kv = {.k = mirror(&k_old), .v = mirror(&v_old), .page_count = f.page_count};
        tensor wm = mirror(&w), norms = mirror_same(&norm);
        for (int n = 0; n < BATCHES; n++) {
            fixture g;
            fixture_batch(&f, batches[n].block, batches[n].blocks, true);
            mirror_fixture(&g, &f);
            int rows = f.count[0];
            tensor x = fixture_tensor(rows, HIDDEN, 1), qkv = fixture_tensor(rows, out, 1), y[2], ym[2];
            tensor xm = mirror(&x), qkv_m = mirror(&qkv);
            for (int i = 0; i < 2; i++)
                y[i] = fixture_tensor(rows, r->heads * r->head_dim, 1), ym[i] = mirror(&y[i]);
            for (int time = 0; time < (batches[n].blocks < MANY ? TIMES : 2); time++) {
                for (int i = 0; i < SLOTS; i++) {
                    int32_t *page = int_at(&f.s.page, i), *other = page + 1 + time, first = *page;
                    *page = *other;
                    *other = first;
                }
                mirror_write(&g.s.page, &f.s.page);
                for (int i = 0; i < batches[n].blocks; i++) {
                    const fixture_block *b = &batches[n].block[i];
                    int64_t row = (int64_t)(f.page_count + int_at(&f.s.page, b->slot)[b->block]) * size; /* layer 1 */
                    tensor to = tensor_rows(&kv.k, row, size);
                    mirror_write(&to, &none);
                    to = tensor_rows(&kv.v, row, size);
                    mirror_write(&to, &none);
                }
                for (int64_t i = 0; i < rows; i++)
                    for (int j = 0; j < HIDDEN; j++)
                        at(&x, i)[j] = fixture_random();
                mirror_write(&xm, &x);
                must_be(both.gpu->sync(both.gpu));
                must_be(both.gpu->matmul(both.gpu, &qkv_m, &xm, &wm));
                must_be(both.gpu->rotate(both.gpu, &qkv_m, &kv, 1, &norms, &norms, &g.in, &g.s, r));
                must_be(both.gpu->attend(both.gpu, &ym[0], &qkv_m, &kv, 1, &g.in, &g.s, r));
                must_be(both.gpu->sync(both.gpu));
                must_be(both.gpu->attend(both.gpu, &ym[1], &qkv_m, &kv, 1, &g.in, &g.s, r));
                mirror_read(&y[0], &ym[0]), mirror_read(&y[1], &ym[1]);
                for (int i = 0; i < rows; i++)
                    for (int64_t j = 0; j < y[0].cols; j++)
                        if (!isfinite(at(&y[0], i)[j]) || at(&y[0], i)[j] != at(&y[1], i)[j])
                            fail_msg("rule %d, batch %d, time %d: row %d column %lld is %g behind rotation, %g behind "
                                     "everything",
                                     k, n, time, i, (long long)j, (double)at(&y[0], i)[j], (double)at(&y[1], i)[j]);
            }
            free(x.data), free(qkv.data), free(y[0].data), free(y[1].data);
        }
        free(k_old.data), free(v_old.data), free(w.data), free(norm.data), free(none.data);
        fixture_close(&f);
        mirror_forget();
    }
}

/* ---- head */

static tensor gpu_head(const tensor *h, int64_t first, int32_t rows, const tensor *w, int mask)
{
    tensor part = tensor_rows(h, first, rows), counter = tensor_of(&rows, I32, 1, 1), there = mirror_same(&counter);
    part.rows = rows + SPARE <= h->rows - first ? rows + SPARE : h->rows - first;
    part.used = there.data;
    tensor best = tensor_of(malloc((size_t)(part.rows + 1) * sizeof(head_best)), U8, part.rows, sizeof(head_best));
    memset(best.data, 0x5a, (size_t)part.rows * sizeof(head_best));
    tensor m = mirror_same(&best);
    must_be(both.gpu->head(both.gpu, &m, &part, w, mask));
    must_be(both.gpu->download(both.gpu, best.data, &m));
    for (size_t i = (size_t)rows * sizeof(head_best); i < (size_t)part.rows * sizeof(head_best); i++)
        assert_true(((const uint8_t *)best.data)[i] == 0x5a);
    return best;
}

/* Logits are sums of H products below 1: fp32 sums, cut off by tensor cores, are off by some H 2^-21 at most; that much
 * absolutely moves a probability relatively. */
static void head_case(int vocab, int hidden, int rows, int mask, bool integers)
{
    char what[96];
    snprintf(what, sizeof what, "head [%d, %d] x [%d, %d], mask id %d%s", rows, hidden, vocab, hidden, mask,
             integers ? ", integers" : "");
    int32_t used = rows;
    double e = integers ? 0 : hidden * 0x1p-21;
    tensor h = partly(rows + SPARE, hidden, &used), w = fixture_tensor(vocab, hidden, 1);
    for (int64_t i = 0; integers && i < rows; i++)
        for (int j = 0; j < hidden; j++)
            at(&h, i)[j] = (float)(rand() % 3 - 1);
    for (int64_t i = 0; integers && i < vocab; i++)
        for (int j = 0; j < hidden; j++)
            at(&w, i)[j] = (float)(rand() % 3 - 1);
    if (rows > 0 && mask % 2 == 0) /* the mask id would win */
        memcpy(at(&w, mask), at(&h, 0), (size_t)hidden * sizeof(float));
    tensor h_m = mirror(&h), w_m = mirror(&w);
    tensor want = tensor_of(malloc((size_t)(rows + 1) * sizeof(head_best)), U8, rows, sizeof(head_best));
    must_be(both.cpu->head(both.cpu, &want, &h, &w, mask));
    tensor got = gpu_head(&h_m, 0, rows, &w_m, mask);
    const head_best *a = got.data, *b = want.data;
    for (int i = 0; i < rows; i++) {
        bool near = (a[i].id == b[i].id || (double)b[i].top - (double)b[i].second <= 2 * e) &&
                    fabs((double)a[i].top - (double)b[i].top) <= e &&
                    (a[i].second == b[i].second || fabs((double)a[i].second - (double)b[i].second) <= e) &&
                    fabs((double)a[i].probability - (double)b[i].probability) <=
                        (3 * e + 0x1p-16) * (double)b[i].probability + 0x1p-100;
        if (!near || (integers && a[i].id != b[i].id))
            fail_msg("%s: row %d: id %d (%d), probability %g (%g), best %g (%g), second %g (%g); CPU in brackets", what,
                     i, a[i].id, b[i].id, (double)a[i].probability, (double)b[i].probability, (double)a[i].top,
                     (double)b[i].top, (double)a[i].second, (double)b[i].second);
    }
    for (int k = 0; k < 3 && rows > 2; k++) {
        int first = k == 0 ? 0 : k == 1 ? rows - 1 : rows / 2, some = k < 2 ? 1 : rows / 3;
        tensor part = gpu_head(&h_m, first, some, &w_m, mask);
        if (memcmp(part.data, a + first, (size_t)some * sizeof *a) != 0)
            fail_msg("%s: rows from %d on differ among %d", what, first, some);
        free(part.data);
    }
    free(h.data), free(w.data), free(want.data), free(got.data);
    mirror_forget();
}

static void test_head(void **state)
{
    (void)state;
    static const int row_counts[] = {0, 1, 5, 64, 65, 130, 300};
    static const int shape[][2] = {{2, 64}, {97, 50}, {256, 64}, {1000, 256}, {5001, 128}, {32000, 256}, {3000, 2048}};
    for (int n = 0; n < 7; n++)
        for (int k = 0; k < 7; k++)
            head_case(shape[n][0], shape[n][1], row_counts[k], k == 2 ? shape[n][0] - 1 : rand() % shape[n][0], false);
    for (int k = 0; k < 7; k++) { /* every product and sum is exact: equal logits are equal, and ties abound */
        head_case(1000, 64, row_counts[k], rand() % 1000, true);
        head_case(300, 16, row_counts[k], rand() % 300, true);
    }
}

int main(int argc, char **argv) /* argv[1]: only the tests of that name */
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_products), cmocka_unit_test(test_gated),
                                       cmocka_unit_test(test_router_products), cmocka_unit_test(test_experts),
                                       cmocka_unit_test(test_late_sums), cmocka_unit_test(test_riding),
                                       cmocka_unit_test(test_attention),
                                       cmocka_unit_test(test_rotated_attention),
                                       cmocka_unit_test(test_head)};
    pair_open();
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    srand(11);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
