/* epoch report: the metrics' definitions, the tables, the ablation, the plots. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "results/report.h"
#include "tests/unit/made_run.h"

/* The first row is the count: prompt 37 tokens, first EOS at generated index 10, 8 forwards. */
static const made_row rows[] = {{"gsm8k", "1", 1, 0, "q", "#### 29", "{\"answer\": \"#### 29\"}", "eos", 10, 8},
                                {"gsm8k", "2", 2, 0, "q", "#### 3", "{\"answer\": \"#### 5\"}", "length", 6, 4},
                                {"gsm8k", "3", 3, 0, "q", "", "{\"answer\": \"#### 5\"}", NULL, 0, 0}};

static result_phase counters(double scale)
{
    result_phase p = {.wall_seconds = 2 * scale,
                      .forwards = 100,
                      .rows_dispatched = 1000,
                      .bytes_dispatched = (int64_t)(6000 * scale),
                      .bytes_combined = (int64_t)(4000 * scale),
                      .expert_tiles = (int64_t)(500 * scale)};
    for (int k = 0; k < PHASES; k++)
        p.seconds[k] = 0.1 * (k + 1) * scale;
    for (int k = PATH_PREFILL; k < PATHS; k++) {
        p.rows_fresh[k] = 64 * k;
        p.rows_cached[k] = 8 * k;
    }
    return p;
}

static results_file *made(const char *name, const char *mode, double scale, int count)
{
    results_file *f;
    char run[200];
    result_phase p = counters(scale);
    snprintf(run, sizeof run, "{\"model\": \"models/tiny\", \"settings\": {\"mode\": \"%s\", \"refresh\": %d}}", mode,
             strcmp(mode, "full") == 0 ? 1 : 5);
    assert_int_equal(make_run(name, run, rows, count, &p, "complete"), OK);
    assert_int_equal(results_read(&f, made_path(name)), OK);
    return f;
}

static void test_definitions(void **state)
{
    (void)state;
    report_figures s;
    results_file *f = made("one.h5", "epoch", 1, 1);
    report_sum(&s, f);
    assert_int_equal(s.tokens, 10);
    assert_true(s.tokens_per_forward == 1.25);
    assert_true(s.tokens_per_second == 5);
    assert_true(s.iterations_per_block == 8);
    assert_true(s.ms_per_forward == 20);
    results_close(f);
    f = made("three.h5", "epoch", 1, 3);
    report_sum(&s, f);
    assert_int_equal(s.rows, 3);
    assert_int_equal(s.failed, 1);
    assert_int_equal(s.truncated, 1);
    assert_true(s.tokens_per_forward == 16.0 / 12);
    assert_true(s.iterations_per_block == 6);
    assert_true(s.cached_share == 0.25);
    assert_true(s.distinct_experts == 8 && s.support_size == 16 && fabs(s.coverage - 0.95) < 1e-6);
    assert_true(s.expert_loads == 8 * (7 + 3));
    assert_int_equal(s.rows_fallback[3], 2 + 2); /* the failed row has no block */
    results_close(f);
}

static void has(const char *text, const char *want)
{
    if (!strstr(text, want))
        fail_msg("\"%s\" is not in\n%s", want, text);
}

static void has_row(const char *text, const char *label, const char *a, const char *b)
{
    char line[200];
    snprintf(line, sizeof line, "\n%-26s %22s %22s\n", label, a, b);
    has(text, line);
}

static void test_tables(void **state)
{
    (void)state;
    results_file *f[2] = {made("full.h5", "full", 2, 3), made("epoch.h5", "epoch", 1, 3)};
    const char *name[] = {made_path("full.h5"), made_path("epoch.h5")};
    char *text;
    size_t size;
    result_score score = {
        .dataset = "gsm8k", .rule = "numeric", .rows = 3, .correct = 1, .score = 1 / 3.0, .low = 0.06, .high = 0.79};
    f[0]->rank[0].phase.expert_tiles = -1; /* a GPU's: not counted, and so of the whole file */
    f[1]->score = &score;
    f[1]->scores = 1;
    FILE *to = open_memstream(&text, &size);
    assert_int_equal(report_print((const results_file *const *)f, name, 2, to), OK);
    fclose(to);
    has(text, "# all files\n#   model              models/tiny\n");
    assert_null(strstr(text, "#   settings"));
    has(text, "decoding only, without model load and warm-up");
    has_row(text, "tokens/s", "4.000", "8.000");
    has_row(text, "tokens per forward", "1.333", "1.333");
    has_row(text, "gsm8k numeric", "-", "0.3333 1/3");
    has(text, "0.0600 - 0.7900");
    has_row(text, "experts", "1.000 s   7.6 %", "0.500 s   7.6 %");
    has_row(text, "cold", "128 / 16", "128 / 16");
    has_row(text, "expert tiles", "-", "500");
    has_row(text, "bytes dispatched", "12.00 kB", "6.00 kB");
    has(text, "\nbytes by path, of traced iterations\n");
    has_row(text, "rows: overdue", "4", "4");
    has_row(text, "live rows", "224", "224");
    has_row(text, "  decided alike", "224 100.000 %", "224 100.000 %");
    has_row(text, "  held, yet different", "0   0.000 %", "0   0.000 %");
    has_row(text, "largest logit difference", "2.000", "2.000");
    has_row(text, "overlap with iteration -1", "0.625", "0.625");
    has_row(text, "similarity, live, age 1", "0.800", "0.800");
    has(text, "\nsettings that differ\n");
    has_row(text, "mode", "\"full\"", "\"epoch\"");
    has_row(text, "refresh", "1", "5");
    free(text);
    for (int i = 0; i < 2; i++)
        results_close(f[i]);
}

static void test_identity(void **state)
{
    (void)state;
    results_file *f = made("one.h5", "epoch", 1, 1);
    const char *name = "one.h5";
    char *text;
    size_t size;
    FILE *to = open_memstream(&text, &size);
    assert_int_equal(report_print((const results_file *const *)&f, &name, 1, to), OK);
    fclose(to);
    has(text, "# one.h5\n#   model              models/tiny\n");
    has(text, "\n#   settings           mode=\"epoch\" refresh=5\n");
    has(text, "\n#   state              complete\n");
    has(text, "\nnot scored yet: epoch score FILE.h5\n");
    free(text);
    results_close(f);
}

static void test_ablation(void **state)
{
    (void)state;
    results_file *f[2] = {made("epoch.h5", "epoch", 0.5, 3), made("full.h5", "full", 1, 3)};
    const char *name[] = {"epoch.h5", "full.h5"};
    char *text;
    size_t size;
    FILE *to = open_memstream(&text, &size);
    assert_int_equal(report_ablation((const results_file *const *)f, name, 2, to), OK);
    fclose(to);
    has(text, "\nepoch           0.500         1.000       0.500    0.500  epoch.h5\n");
    has(text, "\nfull            1.000         1.000       1.000    1.000  full.h5\n");
    free(text);
    assert_int_equal(report_ablation((const results_file *const *)f, name, 1, stdout), BAD_INPUT);
    has(status_message(), "none of the 1 files is of --mode full");
    results_close(f[1]);
    f[1] = made("none.h5", "full", 1, 0);
    assert_int_equal(report_ablation((const results_file *const *)f, name, 2, stdout), BAD_INPUT);
    has(status_message(), "full.h5: holds no generated token");
    for (int i = 0; i < 2; i++)
        results_close(f[i]);
}

static void test_command(void **state)
{
    (void)state;
    static const struct {
        const char *a, *says;
    } wrong[] = {{"--bogus", "--bogus is unknown"},
                 {"--ablation", "want 1 to 64 FILE.h5, found 0"},
                 {"/nonexistent.h5", "/nonexistent.h5"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(report_command(2, (char *[]){"report", (char *)wrong[i].a, NULL}), BAD_INPUT);
        has(status_message(), wrong[i].says);
    }
}

static void test_plots(void **state)
{
    (void)state;
    results_file *f = made("run.h5", "epoch", 1, 3);
    results_close(f);
    char in[512], dir[512];
    snprintf(in, sizeof in, "%s", made_path("run.h5"));
    snprintf(dir, sizeof dir, "%s", made_path("plots"));
    status st = report_command(4, (char *[]){"report", in, "--plots", dir, NULL});
    if (st == BAD_INPUT && strstr(status_message(), "no python3 of PATH has h5py and matplotlib")) {
        print_message("skipped: %s\n", status_message());
    } else {
        assert_int_equal(st, OK);
        static const char *const drawn[] = {"phases", "rows", "commits", "support", "overlap", "similarity"};
        for (size_t i = 0; i < sizeof drawn / sizeof *drawn; i++) {
            char file[600];
            struct stat info;
            snprintf(file, sizeof file, "%s/%s.png", dir, drawn[i]);
            assert_int_equal(stat(file, &info), 0);
            assert_true(info.st_size > 10000);
        }
    }
    assert_int_equal(report_command(4, (char *[]){"report", in, "--plots=x", "--python=/bin/false", NULL}), BAD_INPUT);
    has(status_message(), "/bin/false: cannot import h5py and matplotlib");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_definitions), cmocka_unit_test(test_tables),  cmocka_unit_test(test_identity),
        cmocka_unit_test(test_ablation),    cmocka_unit_test(test_command), cmocka_unit_test(test_plots),
    };
    return cmocka_run_group_tests(tests, made_open, made_close);
}
