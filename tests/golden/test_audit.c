/* The audit: what it counts as held is decided alike, without exception. On made logits, moved as far as the margins
 * allow; on the trained tiny model, in the exact modes and in the default one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/base/json.h"
#include "tests/golden/harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static void must(status st)
{
    if (st != OK)
        fail_msg("%s", status_message());
}

/* ---- made logits */

enum { VOCAB = 7, MASK = 3, ROWS = 4, CASES = 200000 };

static uint64_t state = 88172645463325252ull;

static double chance(void) /* in [0, 1) */
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (double)(state >> 11) / 9007199254740992.0;
}

/* The decision rule in double: 0 stays masked, else the token + 1. */
static void decide(int *out, float (*z)[VOCAB], double tau)
{
    double p[ROWS], most = -1;
    int id[ROWS], single = 0;
    bool any = false;
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        id[r] = -1;
        for (int v = 0; v < VOCAB; v++)
            if (v != MASK && (id[r] < 0 || z[r][v] > z[r][id[r]]))
                id[r] = v;
        for (int v = 0; v < VOCAB; v++)
            sum += exp((double)z[r][v] - (double)z[r][id[r]]);
        p[r] = 1 / sum;
        any |= p[r] > tau;
        if (p[r] > most) {
            most = p[r];
            single = r;
        }
    }
    for (int r = 0; r < ROWS; r++)
        out[r] = (any ? p[r] > tau : r == single) ? id[r] + 1 : 0;
}

/* Moves a row by d: up or down as a whole (all but its best against it, which moves L by 2 d), or each logit by chance.
 */
static void move(float *to, const float *from, double d)
{
    int best = MASK == 0, way = (int)(chance() * 3);
    for (int v = 0; v < VOCAB; v++)
        if (v != MASK && from[v] > from[best])
            best = v;
    for (int v = 0; v < VOCAB; v++) {
        double sign = way == 2 ? 2 * chance() - 1 : (v == best) == (way == 0) ? 1 : -1;
        to[v] = (float)((double)from[v] + sign * d);
    }
}

static void test_held_is_alike(void **unused)
{
    (void)unused;
    static const float taus[] = {0.95f, 0.5f, 0.2f, 0.999f};
    int held = 0, different = 0, edge = 0;
    for (int n = 0; n < CASES; n++) {
        float exact[ROWS][VOCAB], real[ROWS][VOCAB], tau = taus[n % 4];
        double at = log((double)tau / (1 - (double)tau));
        audit_row judged[ROWS];
        int a[ROWS], b[ROWS];
        for (int r = 0; r < ROWS; r++) {
            /* near the threshold as often as not, and not far from each other */
            for (int v = 0; v < VOCAB; v++)
                exact[r][v] = (float)(2 * chance());
            exact[r][(int)(chance() * VOCAB)] += (float)(chance() < 0.5 ? at + 2.5 + 0.5 * chance() : 6 * chance());
            audit_compare(&judged[r], exact[r], exact[r], VOCAB, MASK);
        }
        audit_judge(judged, ROWS, tau);
        /* some rows just inside their margin, some just outside, some far */
        for (int r = 0; r < ROWS; r++) {
            double far = chance(), d = judged[r].margin * (far < 0.7 ? 0.999 : far < 0.85 ? 1.05 : 4);
            move(real[r], exact[r], d);
            audit_compare(&judged[r], exact[r], real[r], VOCAB, MASK);
        }
        audit_judge(judged, ROWS, tau);
        decide(a, exact, (double)tau);
        decide(b, real, (double)tau);
        for (int r = 0; r < ROWS; r++) {
            held += judged[r].held;
            different += a[r] != b[r];
            edge += judged[r].held && judged[r].difference > 0.99 * judged[r].margin;
            if (judged[r].held && a[r] != b[r])
                fail_msg("case %d, row %d, tau %g: held (difference %g, margin %g), yet decided otherwise", n, r,
                         (double)tau, judged[r].difference, judged[r].margin);
        }
    }
    print_message("%d of %d rows held, %d of them at the edge of their margin; %d decided otherwise\n", held,
                  CASES * ROWS, edge, different);
    assert_true(edge > CASES && different > CASES / 10);
}

static void test_edges(void **unused)
{
    (void)unused;
    float z[VOCAB] = {1, 0, 0, 9, 0, 0, 0}, y[VOCAB] = {1, 0, 0, 9.5f, 0, 0, 0};
    audit_row r;
    audit_compare(&r, z, y, VOCAB, MASK); /* the mask id is never chosen, but it is in the sum and in the difference */
    assert_true(fabs(r.difference - 0.5) < 1e-6 && fabs(r.lead - 1) < 1e-6 &&
                fabs(r.odds + 8 + log1p(5 * exp(-9.0))) < 1e-6);
    audit_judge(&r, 1, 0.95f);
    assert_true(fabs(r.margin - 0.5) < 1e-3); /* alone: by its lead */
    y[2] = NAN;
    audit_compare(&r, z, y, VOCAB, MASK);
    audit_judge(&r, 1, 0.95f);
    assert_true(isinf(r.difference) && !r.held);
    audit_row twins[2];
    for (int i = 0; i < 2; i++)
        audit_compare(&twins[i], z, z, VOCAB, MASK);
    audit_judge(twins, 2, 0.95f); /* no margin between equal rows; but no difference either */
    assert_true(twins[0].margin == 0 && twins[0].held && twins[1].held);
    twins[1].difference = 1e-9;
    audit_judge(twins, 2, 0.95f);
    assert_true(!twins[0].held && !twins[1].held);
}

/* ---- the tiny model */

enum { PROMPTS = 12, FEW = 4 };

static int32_t *prompt_ids(const json_t *list, int32_t *count)
{
    *count = (int32_t)json_array_size(list);
    int32_t *v = malloc(sizeof *v * (size_t)(*count + 1));
    for (int32_t i = 0; i < *count; i++)
        v[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    return v;
}

/* Prompts of all sets, through three slots, so that they join and leave at different times. */
static void decode(decoded *d, int count, audit_slot *audited, plan_settings s)
{
    json_t *all;
    harness h;
    must(json_file(&all, EPOCH_SOURCE "/tests/golden/vectors/tiny_demo.json", 1 << 22));
    const json_t *cases = json_object_get(all, "cases");
    must(harness_open(&h, EPOCH_SOURCE "/models/tiny", &s, 3, F32));
    if (audited)
        must(audit_open(&h.audit, h.executor));
    for (int i = 0; i < count; i++) {
        const json_t *c = json_array_get(cases, (size_t)i * json_array_size(cases) / (size_t)count);
        d[i] = (decoded){.gen_len = 96};
        d[i].prompt = prompt_ids(json_object_get(c, "prompt_ids"), &d[i].prompt_tokens);
    }
    must(harness_decode(&h, d, count));
    if (audited)
        *audited = h.audited;
    harness_close(&h);
    json_decref(all);
}

static void forget(decoded *d, int count)
{
    for (int i = 0; i < count; i++)
        free((void *)(uintptr_t)d[i].prompt);
    harness_forget(d, count);
}

static plan_settings tiny_settings(plan_mode mode)
{
    plan_settings s = harness_settings(32, 0.95f, 1522, 1521);
    s.mode = mode;
    return s;
}

/* No support and every row fresh; a support of all experts and every row fresh. */
static void test_exact_modes(void **unused)
{
    (void)unused;
    for (int i = 0; i < 2; i++) {
        plan_settings s = tiny_settings(i == 0 ? PLAN_FULL : PLAN_NO_LSP);
        s.budget = 1024;
        decoded d[FEW];
        audit_slot a;
        decode(d, FEW, &a, s);
        assert_true(a.max_difference == 0);
        assert_true(a.live > 1000);
        assert_int_equal(a.held, a.live);
        assert_int_equal(a.same, a.live);
        assert_int_equal(a.broken, 0);
        forget(d, FEW);
    }
}

static void test_relaxed_modes(void **unused)
{
    (void)unused;
    static const struct {
        const char *name;
        plan_mode mode;
        int prompts;
    } modes[] = {{"epoch", PLAN_EPOCH, PROMPTS}, {"no-atlas", PLAN_NO_ATLAS, FEW}, {"no-lsp", PLAN_NO_LSP, FEW}};
    for (int m = 0; m < 3; m++) {
        decoded d[PROMPTS];
        audit_slot a;
        decode(d, modes[m].prompts, &a, tiny_settings(modes[m].mode));
        print_message("%s: %d live rows, held %.4f, decided alike %.4f, largest difference %.3g logits\n",
                      modes[m].name, a.live, (double)a.held / a.live, (double)a.same / a.live,
                      (double)a.max_difference);
        assert_int_equal(a.broken, 0);
        assert_true(a.max_difference > 0.01f);
        assert_true(a.held > a.live / 10 && a.held < a.live);
        assert_true(a.same > a.live * 9 / 10);
        forget(d, modes[m].prompts);
    }
}

/* The shadow leaves nothing behind. */
static void test_same_answers(void **unused)
{
    (void)unused;
    decoded with[FEW], without[FEW];
    audit_slot a;
    decode(with, FEW, &a, tiny_settings(PLAN_EPOCH));
    decode(without, FEW, NULL, tiny_settings(PLAN_EPOCH));
    for (int i = 0; i < FEW; i++) {
        const flight *x = &with[i].flight, *y = &without[i].flight;
        assert_int_equal(x->answer.count, y->answer.count);
        assert_memory_equal(x->answer.id, y->answer.id, x->answer.count * sizeof *x->answer.id);
        assert_int_equal(with[i].commits, without[i].commits);
        for (int k = 0; k < with[i].commits; k++)
            assert_true(with[i].commit[k].positions == without[i].commit[k].positions);
    }
    forget(with, FEW);
    forget(without, FEW);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_held_is_alike), cmocka_unit_test(test_edges),
                                       cmocka_unit_test(test_exact_modes), cmocka_unit_test(test_relaxed_modes),
                                       cmocka_unit_test(test_same_answers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
