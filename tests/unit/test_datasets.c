/* Benchmark files: every kind, every message, and the texts as they stand in the file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "datasets/dataset.h"
#include "datasets/lines.h"
#include "datasets/shots.h"
#include "src/base/json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#define SAMPLES EPOCH_SOURCE "/datasets/samples/"
#define GSM8K "{\"question\": \"q\", \"answer\": \"#### 1\"}\n"

static const dataset_rule all = {0};
static char folder[] = "test_datasets.XXXXXX";
static char text[256]; /* the newest spec */

static const char *spec_of(const char *kind, const char *file, const char *range)
{
    snprintf(text, sizeof text, "%s:%s/%s%s", kind, folder, file, range);
    return text;
}

static void put(const char *file, const void *bytes, size_t n)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, file);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

static void put_text(const char *file, const char *s)
{
    put(file, s, strlen(s));
}

static void contains(const char *message, const char *want)
{
    if (!strstr(message, want))
        fail_msg("message \"%s\" does not hold \"%s\"", message, want);
}

static void refuses(const char *spec, const char *want)
{
    dataset *d = (dataset *)text;
    assert_int_equal(dataset_open(&d, spec, &all), BAD_INPUT);
    assert_null(d);
    contains(status_message(), want);
}

/* The file as a first row of this kind is refused; behind a good row, it is a row with an error. */
static void refuses_row(const char *kind, const char *good, const char *bad, const char *want)
{
    char both[1024], second[300];
    dataset *d;
    example e = {0};
    bool more;
    const char *file = strcmp(kind, "mgsm") == 0 ? "mgsm_de.tsv" : "row";
    put_text(file, bad);
    snprintf(second, sizeof second, ":1: %s", want);
    refuses(spec_of(kind, file, ""), second);
    contains(status_message(), "it is the first row, and a row of");
    snprintf(both, sizeof both, "%s%s\n%s", good, bad, strcmp(kind, "gsm8k") == 0 ? good : "");
    put_text(file, both);
    assert_int_equal(dataset_open(&d, spec_of(kind, file, ""), &all), OK);
    assert_int_equal(dataset_next(d, &e, &more), OK);
    assert_null(e.error);
    example_close(&e);
    assert_int_equal(dataset_next(d, &e, &more), OK);
    assert_true(more);
    assert_non_null(e.error);
    snprintf(second, sizeof second, "%s/%s:2: %s", folder, file, want);
    assert_int_equal(strncmp(e.error, second, strlen(second)), 0);
    assert_int_equal(e.turns, 0);
    assert_null(e.turn[0]);
    assert_non_null(e.id);
    assert_string_equal(e.gold, "{}");
    assert_int_equal(e.line, 2);
    example_close(&e);
    assert_int_equal(dataset_next(d, &e, &more), OK);
    assert_int_equal(more, strcmp(kind, "gsm8k") == 0);
    example_close(&e);
    dataset_close(d);
}

/* Reads a whole file; the last row is left in *last. Returns the rows, all without error, and checks the count. */
static int64_t rows_of(const char *spec, const dataset_rule *r, example *last, uint64_t *sum)
{
    dataset *d;
    example e = {0};
    bool more;
    int64_t rows = 0, count;
    if (dataset_open(&d, spec, r) != OK)
        fail_msg("%s", status_message());
    for (;;) {
        assert_int_equal(dataset_next(d, &e, &more), OK);
        if (!more)
            break;
        if (e.error)
            fail_msg("%s", e.error);
        assert_non_null(e.id);
        assert_in_range(e.turns, 1, DATASET_TURNS);
        if (sum)
            for (int t = 0; t < e.turns; t++)
                for (const char *c = e.turn[t]; *c; c++)
                    *sum = *sum * 31 + (unsigned char)*c;
        json_t *gold = json_loads(e.gold, 0, NULL);
        assert_true(json_is_object(gold));
        json_decref(gold);
        rows++;
        example_close(last);
        *last = e;
        e = (example){0};
    }
    assert_int_equal(dataset_next(d, &e, &more), OK); /* the end stays the end */
    assert_false(more);
    assert_int_equal(dataset_count(&count, d), OK);
    assert_int_equal(count, rows);
    dataset_close(d);
    return rows;
}

static int64_t rows(const char *spec)
{
    example last = {0};
    int64_t n = rows_of(spec, &all, &last, NULL);
    example_close(&last);
    return n;
}

static void test_samples(void **state)
{
    (void)state;
    static const char *const language[] = {"de", "en", "es", "fr", "ja", "zh"};
    dataset *d;
    example e = {0};
    bool more;
    assert_int_equal(rows("gsm8k:" SAMPLES "gsm8k_demo.jsonl"), 200);
    assert_int_equal(rows("humaneval:" SAMPLES "humaneval_demo.jsonl"), 50);
    for (size_t i = 0; i < sizeof language / sizeof *language; i++) {
        char spec[300], name[16];
        snprintf(spec, sizeof spec, "mgsm:%smgsm_%s.tsv", SAMPLES, language[i]);
        assert_int_equal(rows(spec), 50);
        snprintf(name, sizeof name, "mgsm_%s", language[i]);
        assert_int_equal(dataset_open(&d, spec, &all), OK);
        assert_string_equal(dataset_name(d), name);
        assert_string_equal(dataset_kind(d), "mgsm");
        assert_string_equal(dataset_path(d), spec + strlen("mgsm:"));
        dataset_close(d);
    }
    assert_int_equal(dataset_open(&d, "gsm8k:" SAMPLES "gsm8k_demo.jsonl", &all), OK);
    assert_string_equal(dataset_name(d), "gsm8k");
    assert_int_equal(dataset_next(d, &e, &more), OK);
    assert_string_equal(e.turn[0],
                        "Nora has $151. She saves $57 every week for 2 weeks. How much money does Nora have then?");
    assert_string_equal(e.gold,
                        "{\"answer\": \"In 2 weeks, Nora saves 57*2 = <<57*2=114>>114 dollars.\\nOkay. Then she "
                        "has 151+114 = <<151+114=265>>265 dollars. Fine.\\n#### 265\"}");
    assert_string_equal(e.id, "1");
    example_close(&e);
    dataset_close(d);
}

/* EPOCH_DATA: a folder with the real files, laid out as datasets/README.md says. */
static void test_real(void **state)
{
    (void)state;
    static const char *const language[] = {"bn", "de", "en", "es", "fr", "ja", "ru", "sw", "te", "th", "zh"};
    const char *data = getenv("EPOCH_DATA");
    char spec[1024];
    example last = {0};
    if (!data) {
        print_message("skipped: EPOCH_DATA names no folder of the real benchmark files\n");
        skip();
    }
    snprintf(spec, sizeof spec, "gsm8k:%s/gsm8k/test.jsonl", data);
    assert_int_equal(rows(spec), 1319);
    snprintf(spec, sizeof spec, "humaneval:%s/humaneval/HumanEval.jsonl.gz", data);
    assert_int_equal(rows_of(spec, &all, &last, NULL), 164);
    assert_string_equal(last.id, "HumanEval/163");
    snprintf(spec, sizeof spec, "mtbench:%s/mt_bench/question.jsonl", data);
    assert_int_equal(rows_of(spec, &all, &last, NULL), 80);
    assert_string_equal(last.id, "160");
    assert_int_equal(last.turns, 2);
    for (size_t i = 0; i < sizeof language / sizeof *language; i++) {
        snprintf(spec, sizeof spec, "mgsm:%s/mgsm/mgsm_%s.tsv", data, language[i]);
        assert_int_equal(rows_of(spec, &all, &last, NULL), 250);
    }
    example_close(&last);
}

static void test_nothing_is_trimmed(void **state)
{
    (void)state;
    example e = {0};
    put_text("row",
             "{\"task_id\": \"T/1\", \"prompt\": \"\\n  x \\t\\u00e9e\\u0301\\u200c\\r\\n\\n\", \"entry_point\": "
             "\"f\", \"test\": \" t\\n\", \"canonical_solution\": \"\\n s\"}");
    assert_int_equal(rows_of(spec_of("humaneval", "row", ""), &all, &e, NULL), 1);
    assert_string_equal(e.turn[0], "\n  x \t\xc3\xa9"
                                   "e\xcc\x81\xe2\x80\x8c\r\n\n");
    assert_string_equal(e.id, "T/1");
    assert_string_equal(e.gold, "{\"test\": \" t\\n\", \"entry_point\": \"f\", \"prompt\": \"\\n  x \\t\xc3\xa9"
                                "e\xcc\x81"
                                "\xe2\x80\x8c\\r\\n\\n\", \"canonical_solution\": \"\\n s\"}");
    put_text("mgsm_te.tsv.gz", "  \"zwei\"  \xe2\x80\x8c \t-1,234");
    assert_int_equal(rows_of(spec_of("mgsm", "mgsm_te.tsv.gz", ""), &all, &e, NULL), 1);
    assert_string_equal(e.turn[0], "  \"zwei\"  \xe2\x80\x8c ");
    assert_string_equal(e.gold, "{\"answer\": \"-1,234\", \"language\": \"te\"}");
    example_close(&e);
}

static void test_lines(void **state)
{
    (void)state;
    dataset *d;
    example e = {0};
    bool more;
    put_text("crlf", "\xef\xbb\xbf" GSM8K "\r\n \t\r\n\n{\"question\": \"a\\r\", \"answer\": \"\"}\r\n" GSM8K "  ");
    assert_int_equal(rows(spec_of("gsm8k", "crlf", "")), 3);
    assert_int_equal(dataset_open(&d, spec_of("gsm8k", "crlf", "@2-2"), &all), OK);
    assert_int_equal(dataset_next(d, &e, &more), OK);
    assert_int_equal(e.line, 5);
    assert_string_equal(e.id, "5");
    assert_string_equal(e.turn[0], "a\r");
    example_close(&e);
    assert_int_equal(dataset_next(d, &e, &more), OK);
    assert_false(more);
    dataset_close(d);
    put_text("mgsm_de.tsv", "a\t1\r\nb\t2");
    assert_int_equal(rows_of(spec_of("mgsm", "mgsm_de.tsv", ""), &all, &e, NULL), 2);
    assert_string_equal(e.gold, "{\"answer\": \"2\", \"language\": \"de\"}");
    example_close(&e);
    put_text("empty", "");
    assert_int_equal(rows(spec_of("gsm8k", "empty", "")), 0);
    put_text("blank", "\n\r\n \n");
    assert_int_equal(rows(spec_of("gsm8k", "blank", "")), 0);
    put_text("one", "\n");
    assert_int_equal(rows(spec_of("jsonl", "one", "")), 0);
    put_text("one", "\x1f"); /* half of gzip's mark */
    refuses(spec_of("jsonl", "one", ""), "column 1: not JSON");
    put_text("one", "{");
    refuses(spec_of("jsonl", "one", ""), "one:1: column 1: not JSON");
}

static void test_ranges(void **state)
{
    (void)state;
    static const struct {
        const char *range;
        int64_t limit, rows;
        const char *last;
    } c[] = {{"", 0, 5, "5"},     {"@1-", 0, 5, "5"},  {"@-5", 0, 5, "5"},      {"@-1", 0, 1, "1"},
             {"@5-5", 0, 1, "5"}, {"@5-", 0, 1, "5"},  {"@2-4", 0, 3, "4"},     {"@2-4", 2, 2, "3"},
             {"@2-4", 3, 3, "4"}, {"@2-4", 9, 3, "4"}, {"@4-99", 0, 2, "5"},    {"@6-", 0, 0, NULL},
             {"", 1, 1, "1"},     {"", 5, 5, "5"},     {"", INT64_MAX, 5, "5"}, {"@3-9223372036854775807", 0, 3, "5"}};
    put_text("five", GSM8K GSM8K GSM8K GSM8K GSM8K);
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        example e = {0};
        assert_int_equal(rows_of(spec_of("gsm8k", "five", c[i].range), &(dataset_rule){.limit = c[i].limit}, &e, NULL),
                         c[i].rows);
        if (c[i].last)
            assert_string_equal(e.id, c[i].last);
        example_close(&e);
    }
    static const char *const bad[] = {"@", "@-", "@5", "@1-2-3", "@--", "@99999999999999999999-"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refuses(spec_of("gsm8k", "five", bad[i]), "bad range, want @FROM-TO, @FROM- or @-TO");
    refuses(spec_of("gsm8k", "five", "@0-5"), "rows 0 to 5, want 1 <= FROM <= TO");
    refuses(spec_of("gsm8k", "five", "@3-2"), "rows 3 to 2, want 1 <= FROM <= TO");
    /* other uses of the two marks */
    put_text("a:b@host", GSM8K);
    assert_int_equal(rows(spec_of("gsm8k", "a:b@host", "")), 1);
    assert_int_equal(rows(spec_of("gsm8k", "a:b@host", "@1-1")), 1);
    put_text("a@1-2", GSM8K GSM8K);
    assert_int_equal(rows(spec_of("gsm8k", "a@1-2", "@2-")), 1);
    /* a row that is not asked for does no harm */
    put_text("five", "broken\n" GSM8K);
    assert_int_equal(rows(spec_of("gsm8k", "five", "@2-")), 1);
}

static void test_specs(void **state)
{
    (void)state;
    char path[64];
    refuses("gsm8k", "gsm8k: unknown kind, want KIND:PATH[@FROM-TO]");
    refuses("gsm:x", "unknown kind");
    refuses("gsm8kk:x", "unknown kind");
    refuses("", "unknown kind");
    refuses("gsm8k:", "no path");
    refuses("gsm8k:@1-2", "no path");
    refuses(spec_of("gsm8k", "none", ""), "none: No such file");
    snprintf(path, sizeof path, "%s/none@x", folder);
    refuses(spec_of("gsm8k", "none@x", ""), path);
    snprintf(path, sizeof path, "gsm8k:%s", folder);
    refuses(path, "not a regular file");
    refuses(spec_of("mgsm", "five", ""), "the file's name gives no language, want mgsm_LANG.tsv");
    refuses(spec_of("mgsm", "mgsm_de.txt", ""), "the file's name gives no language");
    refuses(spec_of("mgsm", "mgsm_", ""), "the file's name gives no language");
    refuses(spec_of("mgsm", "mgsm_xx.tsv", ""), "language \"xx\" is unknown, want one of bn de en es");
    refuses(spec_of("mgsm", "mgsm_n .tsv", ""), "language \"n \" is unknown");
    if (geteuid() == 0)
        return;
    put_text("secret", GSM8K);
    snprintf(path, sizeof path, "%s/secret", folder);
    chmod(path, 0);
    refuses(spec_of("gsm8k", "secret", ""), "secret: Permission denied");
}

static void test_row_messages(void **state)
{
    (void)state;
    static const char task[] = "{\"task_id\": \"T/1\", \"prompt\": \"p\", \"entry_point\": \"f\", \"test\": \"t\"}\n";
    static const char bench[] = "{\"question_id\": 1, \"category\": \"c\", \"turns\": [\"a\", \"b\"]}\n";
    static const char plain[] = "{\"prompt\": \"p\"}\n";
    refuses_row("gsm8k", GSM8K, "{\"question\": \"q\",", "column 17: not JSON: ");
    refuses_row("gsm8k", GSM8K, "{\"question\": \"q\", \"question\": \"r\", \"answer\": \"\"}",
                "column 28: not JSON: dupl");
    refuses_row("gsm8k", GSM8K, "{\"question\": \"a\\u0000b\", \"answer\": \"\"}",
                "column 23: not JSON: \\u0000 is not");
    refuses_row("gsm8k", GSM8K, "{\"question\": \"a\\ud800b\", \"answer\": \"\"}",
                "column 23: not JSON: invalid Unicode");
    refuses_row("gsm8k", GSM8K, "[1]", "the row is an array, want an object");
    refuses_row("gsm8k", GSM8K, "7", "the row is an integer, want an object");
    refuses_row("gsm8k", GSM8K, "{\"answer\": \"1\"}", "field \"question\" is missing");
    refuses_row("gsm8k", GSM8K, "{\"question\": \"1\", \"answer\": null}", "field \"answer\" is missing");
    refuses_row("gsm8k", GSM8K, "{\"question\": 1, \"answer\": \"1\"}", "\"question\" is an integer, want a string");
    refuses_row("gsm8k", GSM8K, "{\"question\": \"\", \"answer\": \"1\"}",
                "turn 1 of \"question\" is empty, want a text");
    static const char *const mangled[] = {"\xff",
                                          "\xc0\x80",
                                          "\xc3",
                                          "\xe0\x80\x80",
                                          "\xed\xa0\x80",
                                          "\xf0\x80\x80\x80",
                                          "\xf4\x90\x80\x80",
                                          "\xf5\x80\x80\x80",
                                          "\x80",
                                          "\xe2\x82"};
    for (size_t i = 0; i < sizeof mangled / sizeof *mangled; i++) {
        char row[64], want[64];
        snprintf(row, sizeof row, "{\"question\": \"%s\", \"answer\": \"\"}", mangled[i]);
        snprintf(want, sizeof want, "byte 15 of the line is 0x%02x, want UTF-8 without NUL",
                 (unsigned char)*mangled[i]);
        refuses_row("gsm8k", GSM8K, row, want);
    }
    refuses_row("mgsm", "q\t1\n", "q", "no tab, want question, tab, integer");
    refuses_row("mgsm", "q\t1\n", "q\t1\t2", "more than one tab, want question, tab, integer");
    static const char *const number[] = {"", "-", "x", "1.5", " 1", "1 ", "\"1\"", ",1", "--1"};
    for (size_t i = 0; i < sizeof number / sizeof *number; i++) {
        char row[16];
        snprintf(row, sizeof row, "q\t%s", number[i]);
        refuses_row("mgsm", "q\t1\n", row, "the text behind the tab is not an integer");
    }
    refuses_row("mgsm", "q\t1\n", "\t1", "turn 1 of \"question\" is empty");
    refuses_row("humaneval", task, "{\"task_id\": \"T/2\", \"prompt\": \"p\", \"entry_point\": \"f\"}",
                "field \"test\" is missing");
    refuses_row("humaneval", task, "{\"task_id\": 2, \"prompt\": \"p\"}", "\"task_id\" is an integer, want a string");
    refuses_row("humaneval", task, "{\"task_id\": \"\", \"prompt\": \"p\"}", "\"task_id\" is empty, want an id");
    refuses_row("mtbench", bench, "{\"question_id\": 2, \"category\": \"c\"}", "field \"turns\" is missing");
    refuses_row("mtbench", bench, "{\"category\": \"c\", \"turns\": []}", "field \"question_id\" is missing");
    refuses_row("mtbench", bench, "{\"question_id\": 2.5, \"category\": \"c\", \"turns\": []}",
                "\"question_id\" is a number, want a string or an integer");
    refuses_row("mtbench", bench, "{\"question_id\": 2, \"category\": \"c\", \"turns\": \"a\"}",
                "\"turns\" is a string, want an array of strings");
    refuses_row("mtbench", bench, "{\"question_id\": 2, \"category\": \"c\", \"turns\": []}",
                "\"turns\" holds no turns, want 1 to 8");
    refuses_row("mtbench", bench, "{\"question_id\": 2, \"category\": \"c\", \"turns\": [\"a\", 2]}",
                "turn 2 of \"turns\" is an integer, want a string");
    refuses_row("mtbench", bench, "{\"question_id\": 2, \"category\": \"c\", \"turns\": [\"a\", \"\"]}",
                "turn 2 of \"turns\" is empty, want a text");
    refuses_row("jsonl", plain, "{\"prompt\": [\"1\", \"2\", \"3\", \"4\", \"5\", \"6\", \"7\", \"8\", \"9\"]}",
                "\"prompt\" holds more than 8 turns");
    refuses_row("jsonl", plain, "{\"text\": \"p\"}", "field \"prompt\" is missing (--prompt-field names the key");
    refuses_row("jsonl", plain, "{\"prompt\": {}}", "\"prompt\" is an object, want a string or an array of strings");
    refuses_row("jsonl", plain, "{\"id\": [], \"prompt\": \"p\"}", "\"id\" is an array, want a string or an integer");
}

static void test_raw_nul(void **state)
{
    (void)state;
    static const char row[] = "{\"question\": \"a\0b\", \"answer\": \"1\"}\n";
    put("nul", row, sizeof row - 1);
    refuses(spec_of("gsm8k", "nul", ""), "byte 16 of the line is 0x00");
}

static void test_ids(void **state)
{
    (void)state;
    static const struct {
        const char *id, *error;
        int turns;
    } want[] = {{"a", NULL, 1},
                {"7", NULL, 1},
                {"3", NULL, 2},
                {"line 4", "id \"a\" stands on line 1 too", 0},
                {"line 5", "not JSON", 0},
                {"b", "is missing", 0},
                {"line 7", "id \"7\" stands on line 2 too", 0},
                {"line 8", "id \"b\" stands on line 6 too", 0}};
    dataset *d;
    example e;
    bool more;
    put_text("ids", "{\"id\": \"a\", \"prompt\": \"p\"}\n{\"id\": 7, \"prompt\": \"p\"}\n{\"prompt\": [\"p\", \"q\"]}\n"
                    "{\"id\": \"a\", \"prompt\": \"p\"}\nbroken\n{\"id\": \"b\"}\n{\"prompt\": \"p\"}\n"
                    "{\"id\": \"b\", \"prompt\": \"p\"}\n");
    assert_int_equal(dataset_open(&d, spec_of("jsonl", "ids", ""), &all), OK);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        e = (example){0};
        assert_int_equal(dataset_next(d, &e, &more), OK);
        assert_true(more);
        assert_string_equal(e.id, want[i].id);
        assert_int_equal(e.turns, want[i].turns);
        assert_int_equal(e.error != NULL, want[i].error != NULL);
        if (e.error)
            contains(e.error, want[i].error);
        example_close(&e);
    }
    dataset_close(d);
    /* a long id is cut between characters; many ids make the set grow */
    char *many = malloc(1 << 20), *end = many;
    for (int i = 0; i < 5000; i++)
        end += sprintf(end, "{\"id\": \"%d\xc3\xa9\", \"prompt\": \"p\"}\n", i);
    for (int k = 0; k < 2; k++) {
        end += sprintf(end, "{\"id\": \"x");
        for (int i = 0; i < 60; i++)
            end += sprintf(end, "\xc3\xa9");
        end += sprintf(end, "\", \"prompt\": \"p\"}\n");
    }
    put("ids", many, (size_t)(end - many));
    free(many);
    assert_int_equal(dataset_open(&d, spec_of("jsonl", "ids", ""), &all), OK);
    for (int i = 0; i < 5002; i++) {
        e = (example){0};
        assert_int_equal(dataset_next(d, &e, &more), OK);
        assert_int_equal(e.error == NULL, i < 5001);
        if (e.error)
            contains(e.error, "\xc3\xa9\" stands on line 5001 too, want each id once");
        example_close(&e);
    }
    dataset_close(d);
}

static void test_jsonl(void **state)
{
    (void)state;
    static const char *const row[][2] = {{"\" 1,0 \"", "{\"answer\": \" 1,0 \"}"},
                                         {"-12", "{\"answer\": \"-12\"}"},
                                         {"0.1", "{\"answer\": \"0.1\"}"},
                                         {"18.0", "{\"answer\": \"18.0\"}"},
                                         {"0.30000000000000004", "{\"answer\": \"0.30000000000000004\"}"},
                                         {"true", "{\"answer\": \"true\"}"},
                                         {"[1, \"a\"]", "{\"answer\": \"[1, \\\"a\\\"]\"}"},
                                         {"null", "{}"}};
    example e = {0};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        char one_row[200];
        snprintf(one_row, sizeof one_row, "{\"text\": \" p\\n\", \"prompt\": 1, \"answer\": %s}", row[i][0]);
        put_text("row", one_row);
        assert_int_equal(rows_of(spec_of("jsonl", "row", ""), &(dataset_rule){.prompt_field = "text"}, &e, NULL), 1);
        assert_string_equal(e.turn[0], " p\n");
        assert_string_equal(e.gold, row[i][1]);
    }
    put_text("row", "{\"question_id\": \"q1\", \"category\": \"c\", \"turns\": [\"a\"], \"reference\": [\"\", \"b\"]}");
    assert_int_equal(rows_of(spec_of("mtbench", "row", ""), &all, &e, NULL), 1);
    assert_string_equal(e.gold, "{\"category\": \"c\", \"reference\": [\"\", \"b\"]}");
    assert_string_equal(e.id, "q1");
    example_close(&e);
}

static void test_long_line(void **state)
{
    (void)state;
    /* exactly the limit passes; one byte more is this row's error alone */
    static const char head[] = "{\"answer\": \"1\", \"question\": \"";
    size_t most = LINES_MOST, n = 3 * most + 100;
    char *bytes = malloc(n), *b = bytes;
    dataset *d;
    example e = {0};
    bool more;
    for (size_t k = 0; k < 3; k++) {
        size_t want = most + (k == 1);
        memset(b, 'x', want);
        memcpy(b, head, sizeof head - 1);
        memcpy(b + want - 2, "\"}\n", 3);
        b += want + 1;
    }
    put("long", bytes, (size_t)(b - bytes));
    free(bytes);
    assert_int_equal(dataset_open(&d, spec_of("gsm8k", "long", ""), &all), OK);
    for (int k = 0; k < 3; k++) {
        assert_int_equal(dataset_next(d, &e, &more), OK);
        assert_int_equal(e.line, k + 1);
        if (k == 1)
            contains(e.error, "long:2: a line of 16777217 bytes, want at most 16777216");
        else
            assert_int_equal(strlen(e.turn[0]), most - (sizeof head - 1) - 2);
        example_close(&e);
    }
    assert_int_equal(dataset_next(d, &e, &more), OK);
    assert_false(more);
    dataset_close(d);
}

static void *read_all(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    char *bytes = malloc(1 << 20);
    *n = fread(bytes, 1, 1 << 20, f);
    fclose(f);
    return bytes;
}

static void test_gzip(void **state)
{
    (void)state;
    char path[64];
    size_t n;
    uint64_t plain = 0, packed = 0, h[3];
    dataset *d;
    example e = {0};
    bool more;
    char *bytes = read_all(SAMPLES "gsm8k_demo.jsonl", &n);
    snprintf(path, sizeof path, "%s/demo.gz", folder);
    for (int member = 0; member < 2; member++) { /* two members, one behind the other, are one file */
        gzFile z = gzopen(path, member ? "ab" : "wb");
        size_t half = n / 2, from = member ? half : 0, count = member ? n - half : half;
        assert_int_equal(gzwrite(z, bytes + from, (unsigned)count), count);
        gzclose(z);
    }
    free(bytes);
    assert_int_equal(rows_of("gsm8k:" SAMPLES "gsm8k_demo.jsonl", &all, &e, &plain), 200);
    assert_int_equal(rows_of(spec_of("gsm8k", "demo.gz", ""), &all, &e, &packed), 200);
    assert_true(plain == packed);
    example_close(&e);

    bytes = read_all(path, &n);
    for (int damage = 0; damage < 2; damage++) { /* cut off; a changed byte */
        if (damage)
            bytes[n - 5000] ^= 0x55;
        put("bad.gz", bytes, damage ? n : n - 3000);
        assert_int_equal(dataset_open(&d, spec_of("gsm8k", "bad.gz", ""), &all), OK);
        int64_t rows_read = 0;
        status st;
        while ((st = dataset_next(d, &e, &more)) == OK && more) {
            assert_true(damage || !e.error); /* no half row */
            example_close(&e);
            rows_read++;
        }
        assert_int_equal(st, FAILED);
        assert_in_range(rows_read, 1, 199);
        char want[100];
        snprintf(want, sizeof want, "bad.gz:%d: row %d cannot be read: the gzip data %s; fetch the file again",
                 (int)rows_read + 1, (int)rows_read + 1, damage ? "are damaged" : "end early");
        contains(status_message(), want);
        int64_t count;
        assert_int_equal(dataset_count(&count, d), BAD_INPUT);
        contains(status_message(), want);
        assert_int_equal(dataset_hash(&h[damage], d), OK);
        dataset_close(d);
    }
    put("bad.gz", bytes, 12);
    refuses(spec_of("gsm8k", "bad.gz", ""), "bad.gz:1: row 1 cannot be read: the gzip data end early");
    free(bytes);
    refuses("gsm8k:/proc/self/mem", "/proc/self/mem:1: row 1 cannot be read: Input/output error");

    assert_true(h[0] != h[1]);
    assert_int_equal(dataset_open(&d, spec_of("gsm8k", "demo.gz", "@1-1"), &all), OK);
    assert_int_equal(dataset_hash(&h[0], d), OK);
    assert_int_equal(dataset_hash(&h[1], d), OK);
    assert_true(h[0] == h[1]);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(dataset_hash(&h[2], d), BAD_INPUT);
    contains(status_message(), "demo.gz: No such file");
    int64_t count;
    assert_int_equal(dataset_count(&count, d), BAD_INPUT);
    assert_int_equal(mkdir(path, 0700), 0);
    assert_int_equal(dataset_hash(&h[2], d), BAD_INPUT);
    contains(status_message(), "demo.gz: cannot be read behind byte 0: Is a directory");
    assert_int_equal(rmdir(path), 0);
    dataset_close(d);
    /* the value is fixed: results files hold it */
    put_text("five", "a\n");
    assert_int_equal(dataset_open(&d, spec_of("jsonl", "five", "@2-"), &all), OK);
    assert_int_equal(dataset_hash(&h[0], d), OK);
    assert_true(h[0] == 0xb35e78f5762abdb0u);
    dataset_close(d);
}

static void refuses_shots(const char *spec, const char *want)
{
    shots *s = (shots *)text;
    assert_int_equal(shots_open(&s, spec, NULL), BAD_INPUT);
    assert_null(s);
    contains(status_message(), want);
}

static void test_shots(void **state)
{
    (void)state;
    shots *s;
    char spec[300];
    assert_int_equal(shots_open(&s, "3:" SAMPLES "gsm8k_demo.jsonl", NULL), OK);
    assert_int_equal(s->count, 3);
    contains(s->question[0], "Nora has $151. ");
    contains(s->answer[0], "265 dollars. Fine.\n#### 265");
    contains(s->question[1], "Max has $225. ");
    shots_close(s);
    put_text("shots", "{\"q\": \" a\", \"answer\": 5}\n{\"q\": \"b\"}\n{\"q\": [\"b\", \"c\"], \"answer\": 5}\nx\n");
    snprintf(spec, sizeof spec, "1:jsonl:%s/shots", folder);
    assert_int_equal(shots_open(&s, spec, "q"), OK);
    assert_string_equal(s->question[0], " a");
    assert_string_equal(s->answer[0], "5");
    shots_close(s);
    shots_close(NULL);
    static const struct {
        const char *range, *want;
    } bad[] = {{"@2-", "shots:2: no answer, a shot wants one"},
               {"@3-", "shots:3: 2 turns, want one question"},
               {"@1-1", "shots gives 1 rows"},
               {"", "shots:2: no answer"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(spec, sizeof spec, "2:jsonl:%s/shots%s", folder, bad[i].range);
        assert_int_equal(shots_open(&s, spec, "q"), BAD_INPUT);
        contains(status_message(), bad[i].want);
    }
    put_text("shots", GSM8K "x\n");
    snprintf(spec, sizeof spec, "2:%s/shots", folder);
    refuses_shots(spec, "shots:2: column 1: not JSON");
    static const char *const wrong[] = {"", "x:f", "0:f", "-1:f", " 1:f", "257:f", "4", "4f", "99999999999999999999:f"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        refuses_shots(wrong[i], "want N:FILE, N from 1 to 256");
    refuses_shots("4:nowhere", "nowhere: No such file");
}

static int make_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int drop_folder(void **state)
{
    (void)state;
    static const char *const made[] = {"row", "mgsm_de.tsv", "mgsm_te.tsv.gz", "crlf",  "empty",  "blank",
                                       "one", "five",        "a:b@host",       "a@1-2", "secret", "nul",
                                       "ids", "long",        "bad.gz",         "shots"};
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
        snprintf(text, sizeof text, "%s/%s", folder, made[i]);
        unlink(text);
    }
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_samples),
                                       cmocka_unit_test(test_real),
                                       cmocka_unit_test(test_nothing_is_trimmed),
                                       cmocka_unit_test(test_lines),
                                       cmocka_unit_test(test_ranges),
                                       cmocka_unit_test(test_specs),
                                       cmocka_unit_test(test_row_messages),
                                       cmocka_unit_test(test_raw_nul),
                                       cmocka_unit_test(test_ids),
                                       cmocka_unit_test(test_jsonl),
                                       cmocka_unit_test(test_long_line),
                                       cmocka_unit_test(test_gzip),
                                       cmocka_unit_test(test_shots)};
    return cmocka_run_group_tests(tests, make_folder, drop_folder);
}
