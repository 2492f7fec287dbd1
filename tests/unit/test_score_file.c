/* epoch score: rules side by side, counts, intervals, HumanEval, partial runs, scores kept in the file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "results/score_file.h"
#include "tests/unit/made_run.h"

#include <sys/wait.h>

#define EVEN "def even(n):\n    \"\"\" Is n even? \"\"\"\n"
#define EVEN_GOLD                                                                                             \
    "{\"prompt\": \"def even(n):\\n    \\\"\\\"\\\" Is n even? \\\"\\\"\\\"\\n\", \"entry_point\": \"even\"," \
    " \"test\": \"def check(f):\\n    assert f(2) and not f(3)\\n\"}"

static const made_row rows[] = {
    {"gsm8k", "1", 1, 0, "q", "total is $29.00.", "{\"answer\": \"#### 29\"}", "eos", 6, 4},
    {"gsm8k", "2", 2, 0, "q", "#### 18", "{\"answer\": \"9 + 9\\n#### 18\"}", "eos", 4, 2},
    {"gsm8k", "3", 3, 0, "q", "", "{\"answer\": \"#### 5\"}", "eos", 0, 1},
    {"gsm8k", "4", 4, 0, "q", "I think 7 or 8", "{\"answer\": \"#### 5\"}", "length", 9, 3},
    {"gsm8k", "5", 5, 0, "q", "", "{\"answer\": \"#### 5\"}", NULL, 0, 0},
    {"mgsm_de", "1", 1, 0, "q", "Antwort: 70.000", "{\"answer\": \"70000\", \"language\": \"de\"}", "eos", 5, 2},
    {"humaneval", "Demo/0", 1, 0, EVEN, "```python\ndef even(n):\n    return n % 2 == 0\n```", EVEN_GOLD, "eos", 9, 5},
    {"humaneval", "Demo/1", 2, 0, EVEN, "    return True\n", EVEN_GOLD, "eos", 4, 2},
    {"humaneval", "Demo/2", 3, 0, EVEN, "", EVEN_GOLD, "length", 0, 2},
    {"mtbench", "81", 1, 0, "Write.", "Well.", "{\"category\": \"writing\"}", "eos", 3, 2}};
enum { ROWS = sizeof rows / sizeof *rows };

static const result_phase counters = {.wall_seconds = 2};

static const result_score *find(const result_score *s, int64_t n, const char *dataset, const char *rule)
{
    for (int64_t i = 0; i < n; i++)
        if (strcmp(s[i].dataset, dataset) == 0 && strcmp(s[i].rule, rule) == 0)
            return &s[i];
    return NULL;
}

static void expect(const result_score *s, int64_t all, int64_t right, int64_t none, int64_t truncated, int64_t failed)
{
    assert_non_null(s);
    assert_int_equal(s->rows, all);
    assert_int_equal(s->correct, right);
    assert_int_equal(s->no_answer, none);
    assert_int_equal(s->truncated, truncated);
    assert_int_equal(s->failed, failed);
    assert_true(fabs(s->score - (double)right / (double)all) < 1e-12);
    assert_true(s->low <= s->score && s->score <= s->high && s->low >= 0 && s->high <= 1);
}

static void test_rules_side_by_side(void **state)
{
    (void)state;
    results_file *f;
    result_score *s;
    int64_t n;
    char *text;
    size_t size;
    assert_int_equal(make_run("a.h5", "{\"rows_total\": 10}", rows, ROWS, &counters, "complete"), OK);
    assert_int_equal(results_read(&f, made_path("a.h5")), OK);
    FILE *to = open_memstream(&text, &size);
    score_order o = {.disagreements = true, .wrong = true, .sandbox.jobs = 2};
    assert_int_equal(score_file(&s, &n, f, &o, to), OK);
    fclose(to);
    expect(find(s, n, "gsm8k", "strict"), 5, 1, 3, 1, 1);
    expect(find(s, n, "gsm8k", "flexible"), 5, 1, 1, 1, 1);
    expect(find(s, n, "gsm8k", "numeric"), 5, 2, 1, 1, 1);
    assert_null(find(s, n, "gsm8k", "locale"));
    expect(find(s, n, "mgsm_de", "numeric"), 1, 0, 0, 0, 0);
    expect(find(s, n, "mgsm_de", "locale"), 1, 1, 0, 0, 0);
    expect(find(s, n, "humaneval", "pass@1"), 3, 1, 1, 1, 0);
    assert_null(find(s, n, "humaneval", "pass@10"));
    assert_null(find(s, n, "mtbench", "numeric"));
    assert_non_null(strstr(text, "# mtbench: not scored, its rows have no gold answer"));
    assert_non_null(strstr(text, "# sandbox: python 3."));
    assert_non_null(strstr(text, "gsm8k\t1\t1\tgold 29\tstrict none\tflexible no"));
    assert_non_null(strstr(text, "gsm8k\t4\t4\tgold 5\t"));
    assert_null(strstr(text, "gsm8k\t2\t2\t"));
    assert_non_null(strstr(text, "humaneval\tDemo/1\t2\tAssertionError"));
    assert_null(strstr(text, "partial"));
    free(text);
    free(s);
    results_close(f);
}

static void test_command_keeps_scores(void **state)
{
    (void)state;
    results_file *f;
    assert_int_equal(make_run("b.h5", "{\"rows_total\": 10}", rows, ROWS, &counters, "complete"), OK);
    char *file = (char *)made_path("b.h5");
    assert_int_equal(score_command(4, (char *[]){"score", file, "--no-programs", "--no-save", NULL}), OK);
    assert_int_equal(results_read(&f, file), OK);
    assert_int_equal(f->scores, 0);
    results_close(f);
    assert_int_equal(score_command(4, (char *[]){"score", "--no-programs", file, "--jobs=2", NULL}), OK);
    assert_int_equal(results_read(&f, file), OK);
    const result_score *s = find(f->score, f->scores, "gsm8k", "numeric");
    expect(s, 5, 2, 1, 1, 1);
    assert_int_equal(s->rule_version, 1);
    assert_int_equal(f->rows, ROWS); /* nothing else changed */
    assert_string_equal(f->output[0].row.text, "total is $29.00.");
    assert_null(find(f->score, f->scores, "humaneval", "pass@1"));
    results_close(f);
}

static void test_partial_says_so(void **state)
{
    (void)state;
    results_file *f;
    result_score *s;
    int64_t n;
    char *text;
    size_t size;
    made_row one = rows[6];
    one.id = "HumanEval/0";
    assert_int_equal(make_run("c.h5", "{\"rows_total\": 164}", &one, 1, &counters, "interrupted"), OK);
    assert_int_equal(results_read(&f, made_path("c.h5")), OK);
    FILE *to = open_memstream(&text, &size);
    assert_int_equal(score_file(&s, &n, f, &(score_order){0}, to), OK);
    fclose(to);
    assert_non_null(strstr(text, "# partial (interrupted): 1 of 164 rows"));
    assert_non_null(strstr(text, "# humaneval: partial: 1 of the benchmark's 164 tasks"));
    free(text);
    free(s);
    results_close(f);
}

static void test_errors(void **state)
{
    (void)state;
    results_file *f;
    result_score *s;
    int64_t n;
    FILE *null = fopen("/dev/null", "w");
    made_row bad = rows[0];
    bad.gold = "{\"answer\"";
    assert_int_equal(make_run("d.h5", "{}", &bad, 1, &counters, "complete"), OK);
    assert_int_equal(results_read(&f, made_path("d.h5")), OK);
    assert_int_equal(score_file(&s, &n, f, &(score_order){0}, null), BAD_INPUT);
    assert_non_null(strstr(status_message(), "gsm8k, row \"1\": its gold is no JSON object"));
    results_close(f);
    bad = rows[6];
    bad.gold = "{\"test\": \"\", \"prompt\": \"\"}";
    assert_int_equal(make_run("e.h5", "{}", &bad, 1, &counters, "complete"), OK);
    assert_int_equal(results_read(&f, made_path("e.h5")), OK);
    assert_int_equal(score_file(&s, &n, f, &(score_order){0}, null), BAD_INPUT);
    assert_non_null(strstr(status_message(), "lacks prompt, test or entry_point"));
    results_close(f);
    fclose(null);

    static const struct {
        const char *a, *b, *says;
    } wrong[] = {{"--jobs=0", "x", "want 1 to 64"},
                 {"--timeout=x", "x", "want 0.1 to 3600 seconds"},
                 {"--bogus", "x", "--bogus is unknown or lacks its value"},
                 {"--no-save", "--no-programs", "FILE.h5 is missing"},
                 {"--no-programs", "/nonexistent.h5", "/nonexistent.h5"}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *argv[] = {"score", (char *)wrong[i].a, (char *)wrong[i].b, NULL};
        assert_int_equal(score_command(3, argv), BAD_INPUT);
        if (!strstr(status_message(), wrong[i].says))
            fail_msg("\"%s\" does not say \"%s\"", status_message(), wrong[i].says);
    }
}

static void test_running_run_is_not_touched(void **state)
{
    (void)state;
    int lock;
    char dir[600];
    assert_int_equal(make_run("f.h5", "{}", rows, 2, &counters, "partial"), OK);
    snprintf(dir, sizeof dir, "%s.d", made_path("f.h5"));
    assert_int_equal(results_lock(&lock, dir, true, 0), OK);
    pid_t p = fork(); /* another process, as the lock goes with the process */
    if (p == 0) {
        char *argv[] = {"score", (char *)made_path("f.h5"), NULL};
        _exit(score_command(2, argv) == FAILED && strstr(status_message(), "the scores were not stored") ? 0 : 1);
    }
    int wait_status;
    assert_int_equal(waitpid(p, &wait_status, 0), p);
    assert_int_equal(wait_status, 0);
    close(lock);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rules_side_by_side),
        cmocka_unit_test(test_command_keeps_scores),
        cmocka_unit_test(test_partial_says_so),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_running_run_is_not_touched),
    };
    return cmocka_run_group_tests(tests, made_open, made_close);
}
