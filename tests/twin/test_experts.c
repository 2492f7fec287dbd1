/* The routed experts of a rank against double loops, and the order of their sums bit by bit. */
#include "tests/twin/fixture.h"

#include "src/cpu/cpu.h"

static const struct layer {
    int experts, groups, top_k, hidden, inner;
} layers[] = {{32, 4, 4, 256, 64}, {16, 4, 4, 64, 32}, {20, 10, 3, 50, 37}, {8, 1, 8, 24, 300}};
enum { LAYERS = sizeof layers / sizeof *layers };

typedef struct model {
    tensor gate_up, down;
} model;

static model open_model(const struct layer *l)
{
    return (model){.gate_up = fixture_tensor(l->experts * 2 * l->inner, l->hidden, 1),
                   .down = fixture_tensor(l->experts * l->hidden, l->inner, 1)};
}

static expert_set rank_set(const model *m, const sum_tree *t, const struct layer *l, int rank)
{
    int first = t->rank_first[rank], count = t->rank_first[rank + 1] - first;
    return (expert_set){.gate_up = tensor_rows(&m->gate_up, first * 2 * l->inner, count * 2 * l->inner),
                        .down = tensor_rows(&m->down, first * l->hidden, count * l->hidden),
                        .first = first,
                        .count = count,
                        .inner = l->inner,
                        .tree = t,
                        .rank = rank};
}

/* Ascending ids, -1 behind the last. kind 0: top_k of all; 1: all tokens on one expert; 2: any number, none among them;
 * 3: only experts of the upper half. */
static void draw_edges(tensor *ids, tensor *weights, const struct layer *l, int kind)
{
    for (int64_t i = 0; i < ids->rows; i++) {
        int want = kind == 1 ? 1 : kind == 2 ? rand() % (l->top_k + 1) : l->top_k, n = 0;
        int first = kind == 1 ? l->experts / 3 : kind == 3 ? l->experts / 2 : 0;
        want = want < l->experts - first ? want : l->experts - first;
        for (int e = first; e < l->experts && n < want; e++)
            if (rand() % (l->experts - e) < want - n || kind == 1)
                int_at(ids, i)[n++] = e;
        for (int j = n; j < l->top_k; j++)
            int_at(ids, i)[j] = -1;
        for (int j = 0; j < l->top_k; j++)
            at(weights, i)[j] = j < n ? 1 + fixture_random() : 0;
    }
}

/* Gate and up are sums of H products of numbers below 1: off by at most a = (H + 1) 2^-24 H. |silu'| < 1.1 and both are
 * at most H, so their product is off by at most 2.1 a H + 2^-21 H^2, a down sum by I times that and (I + 1) 2^-24 of
 * its magnitude. Random numbers stay far below these worst cases; a thousandth of them is asserted. */
static double bound(const struct layer *l)
{
    double h = l->hidden, i = l->inner, a = (h + 1) * 0x1p-24 * h;
    return (i * (2.1 * a * h + 0x1p-21 * h * h) + (i + 1) * 0x1p-24 * i * h * h) * 2 * l->top_k / 1000;
}

static void want_token(double *y, const float *x, const int32_t *id, const float *weight, const model *m,
                       const struct layer *l)
{
    memset(y, 0, (size_t)l->hidden * sizeof *y);
    for (int j = 0; j < l->top_k && id[j] >= 0; j++) {
        double act[300];
        for (int o = 0; o < l->inner; o++) {
            double gate = 0, up = 0;
            for (int k = 0; k < l->hidden; k++) {
                gate += (double)at(&m->gate_up, id[j] * 2 * l->inner + o)[k] * (double)x[k];
                up += (double)at(&m->gate_up, id[j] * 2 * l->inner + l->inner + o)[k] * (double)x[k];
            }
            act[o] = gate / (1 + exp(-gate)) * up;
        }
        for (int o = 0; o < l->hidden; o++) {
            double sum = 0;
            for (int k = 0; k < l->inner; k++)
                sum += (double)at(&m->down, id[j] * l->hidden + o)[k] * act[k];
            y[o] += sum * (double)weight[j];
        }
    }
}

/* All ranks' units, folded: the whole layer, and the same bits for every number of ranks. */
static void test_layers(void **state)
{
    (void)state;
    static const int row_counts[] = {0, 1, 3, 33, 70};
    backend *b = fixture_backend(2);
    for (int n = 0; n < LAYERS; n++) {
        const struct layer *l = &layers[n];
        model m = open_model(l);
        for (int k = 0; k < 5; k++)
            for (int kind = 0; kind < 4; kind++) {
                int rows = row_counts[k];
                tensor x = fixture_tensor(rows, l->hidden, 1), ids = fixture_ints(rows, l->top_k);
                tensor weights = fixture_tensor(rows, l->top_k, 1), first = fixture_tensor(rows, l->hidden, 1);
                tensor mine = fixture_ints(rows, l->top_k), my_weights = fixture_tensor(rows, l->top_k, 1);
                draw_edges(&ids, &weights, l, kind);
                for (int ranks = 1; ranks <= 5; ranks++) {
                    sum_tree *t;
                    assert_int_equal(sum_tree_open(&t, l->experts, l->groups, ranks), OK);
                    tensor y = fixture_tensor(rows * t->unit_count, l->hidden, 1);
                    float nothing = 12345;
                    for (int64_t i = 0; i < y.rows; i++)
                        *at(&y, i) = nothing;
                    for (int r = 0; r < ranks; r++) {
                        expert_set e = rank_set(&m, t, l, r);
                        int units = t->rank_unit[r + 1] - t->rank_unit[r];
                        tensor part = tensor_rows(&y, rows * t->rank_unit[r], rows * units);
                        fixture_rank_edges(&mine, &my_weights, &ids, &weights, &e);
                        assert_int_equal(b->experts(b, &part, &x, &mine, &my_weights, &e), OK);
                    }
                    float *scratch = malloc((size_t)sum_tree_scratch(t) * (size_t)l->hidden * sizeof *scratch);
                    for (int i = 0; i < rows; i++) {
                        const float *term[64];
                        float got[300];
                        for (int r = 0; r < ranks; r++) {
                            int units = t->rank_unit[r + 1] - t->rank_unit[r];
                            for (int u = t->rank_unit[r]; u < t->rank_unit[r + 1]; u++) {
                                bool any = false;
                                for (int j = 0; j < l->top_k && int_at(&ids, i)[j] >= 0; j++)
                                    any |= t->unit_of[int_at(&ids, i)[j]] == u;
                                term[u] = at(&y, rows * t->rank_unit[r] + i * units + u - t->rank_unit[r]);
                                if (!any) { /* not written */
                                    assert_true(*term[u] == nothing);
                                    term[u] = NULL;
                                }
                            }
                        }
                        sum_tree_fold(t, got, term, l->hidden, scratch);
                        if (ranks == 1) {
                            double want[300];
                            memcpy(at(&first, i), got, (size_t)l->hidden * sizeof *got);
                            want_token(want, at(&x, i), int_at(&ids, i), at(&weights, i), &m, l);
                            for (int j = 0; j < l->hidden; j++)
                                assert_true(fabs((double)got[j] - want[j]) <= bound(l));
                        }
                        assert_memory_equal(at(&first, i), got, (size_t)l->hidden * sizeof *got);
                    }
                    free(scratch), free(y.data);
                    sum_tree_close(t);
                }
                free(x.data), free(ids.data), free(weights.data), free(first.data), free(mine.data),
                    free(my_weights.data);
            }
        free(m.gate_up.data), free(m.down.data);
    }
    b->close(b);
}

/* A token's edges one by one, summed here by the tree, are what the op gives for all of them at once, among neighbours
 * at any place, for weights held in 16 bits, and with two threads. */
static void test_bits(void **state)
{
    (void)state;
    backend *one = fixture_backend(1), *two = fixture_backend(2);
    for (int n = 0; n < LAYERS; n++)
        for (dtype type = F32; type <= F16; type++) {
            const struct layer *l = &layers[n];
            enum { ROWS = 70 };
            size_t bytes = (size_t)l->hidden * sizeof(float);
            model m = open_model(l), held = m;
            if (type != F32)
                held = (model){fixture_narrow(one, &m.gate_up, type), fixture_narrow(one, &m.down, type)};
            sum_tree *t;
            assert_int_equal(sum_tree_open(&t, l->experts, l->groups, 1), OK);
            assert_int_equal(t->unit_count, t->shards == 8 ? 1 : t->unit_count);
            expert_set e = rank_set(&m, t, l, 0), e16 = rank_set(&held, t, l, 0);
            tensor x = fixture_tensor(ROWS, l->hidden, 1), y = fixture_tensor(ROWS * t->unit_count, l->hidden, 1);
            tensor ids = fixture_ints(ROWS, l->top_k), weights = fixture_tensor(ROWS, l->top_k, 1);
            tensor single = fixture_ints(1, l->top_k), row = fixture_tensor(1, l->hidden, 1);
            tensor term = fixture_tensor(l->top_k, l->hidden, 1), part = fixture_tensor(t->unit_count, l->hidden, 1);
            float *scratch = malloc((size_t)sum_tree_scratch(t) * bytes), want[300];
            draw_edges(&ids, &weights, l, 0);
            for (int j = 0; j < l->top_k; j++) {
                tensor weight = tensor_of(calloc((size_t)l->top_k, sizeof(float)), F32, 1, l->top_k);
                for (int k = 0; k < l->top_k; k++)
                    *(int_at(&single, 0) + k) = k ? -1 : int_at(&ids, 0)[j];
                *at(&weight, 0) = at(&weights, 0)[j];
                assert_int_equal(one->experts(one, &part, &row, &single, &weight, &e), OK);
                memcpy(at(&term, j), at(&part, t->unit_of[int_at(&ids, 0)[j]]), bytes);
                free(weight.data);
            }
            for (int place = 0; place < ROWS; place += 1 + place / 8) {
                int32_t used = place + 1;
                memcpy(at(&x, place), row.data, bytes);
                memcpy(int_at(&ids, place), int_at(&ids, 0), (size_t)l->top_k * sizeof(int32_t));
                memcpy(at(&weights, place), at(&weights, 0), (size_t)l->top_k * sizeof(float));
                x.used = place % 2 ? &used : NULL;
                backend *b = place % 3 ? one : two;
                assert_int_equal(b->experts(b, &y, &x, &ids, &weights, &e16), OK);
                for (int u = 0; u < t->unit_count; u++) {
                    const float *terms[300];
                    bool any = false;
                    for (int j = 0; j < l->top_k; j++) {
                        terms[j] = at(&term, j);
                        any |= t->unit_of[int_at(&ids, 0)[j]] == u;
                    }
                    sum_tree_unit(t, u, want, int_at(&ids, 0), terms, l->top_k, l->hidden, scratch);
                    if (any)
                        assert_memory_equal(at(&y, place * t->unit_count + u), want, bytes);
                }
            }
            if (type != F32)
                free(held.gate_up.data), free(held.down.data);
            free(m.gate_up.data), free(m.down.data), free(x.data), free(y.data), free(ids.data), free(weights.data);
            free(single.data), free(row.data), free(term.data), free(part.data), free(scratch);
            sum_tree_close(t);
        }
    one->close(one);
    two->close(two);
}

/* Tiles are counted; experts without edges have none. */
static void test_tiles(void **state)
{
    (void)state;
    backend *b = fixture_backend(1);
    const struct layer *l = &layers[0];
    model m = open_model(l);
    sum_tree *t;
    assert_int_equal(sum_tree_open(&t, l->experts, l->groups, 1), OK);
    expert_set e = rank_set(&m, t, l, 0);
    for (int rows = 0; rows <= 40; rows += 8)
        for (int kind = 0; kind < 4; kind++) {
            tensor x = fixture_tensor(rows, l->hidden, 1), ids = fixture_ints(rows, l->top_k);
            tensor weights = fixture_tensor(rows, l->top_k, 1), y = fixture_tensor(rows, l->hidden, 1);
            int count[32] = {0}, want = 0;
            draw_edges(&ids, &weights, l, kind);
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < l->top_k && int_at(&ids, i)[j] >= 0; j++)
                    count[int_at(&ids, i)[j]]++;
            for (int k = 0; k < 32; k++)
                want += (count[k] + EXPERT_TILE - 1) / EXPERT_TILE;
            b->expert_tiles = 0;
            assert_int_equal(b->experts(b, &y, &x, &ids, &weights, &e), OK);
            assert_int_equal(b->expert_tiles, want);
            free(x.data), free(ids.data), free(weights.data), free(y.data);
        }
    free(m.gate_up.data), free(m.down.data);
    sum_tree_close(t);
    b->close(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_layers), cmocka_unit_test(test_bits),
                                       cmocka_unit_test(test_tiles)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
