/* epoch export: each format read back as its tool would. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "results/export.h"
#include "results/sha256.h"
#include "tests/unit/made_run.h"

#define EVEN_GOLD                                                                                             \
    "{\"prompt\": \"def even(n):\\n    \\\"\\\"\\\" Is n even? \\\"\\\"\\\"\\n\", \"entry_point\": \"even\"," \
    " \"test\": \"def check(f):\\n    assert f(2) and not f(3)\\n\"}"

/* The first row is the count: prompt 37 tokens, 10 tokens before the first EOS, 8 forwards. */
static const made_row rows[] = {
    {"gsm8k", "1", 1, 0, "How many?", "It's \xe2\x82\xac 29.\n#### 29", "{\"answer\": \"20 + 9\\n#### 29\"}", "eos", 10,
     8},
    {"gsm8k", "2", 2, 0, "How few?", "", "{\"answer\": \"#### 5\"}", NULL, 0, 0},
    {"humaneval", "Demo/0", 1, 0, "p", "\n    return n % 2 == 0", EVEN_GOLD, "eos", 9, 5},
    {"humaneval", "Demo/1", 2, 0, "p", "```python\ndef even(n):\n    return True\n```", EVEN_GOLD, "eos", 4, 2},
    {"mtbench", "81", 1, 0, "Write.", "Well.", "{}", "eos", 3, 2},
    {"mtbench", "81", 1, 1, "Again.", "Caf\xc3\xa9.", "{}", "eos", 3, 2},
    {"mtbench", "82", 2, 0, "Sing.", "La.", "{}", "eos", 3, 2}};
enum { ROWS = sizeof rows / sizeof *rows };

static results_file *file;

static int open_run(void **state)
{
    static const result_phase counters = {.wall_seconds = 2};
    if (made_open(state) != 0)
        return -1;
    if (make_run("a.h5", "{\"model\": \"models/tiny/\", \"settings\": {\"gen-len\": 64}}", rows, ROWS, &counters,
                 "complete") != OK ||
        results_read(&file, made_path("a.h5")) != OK) {
        print_error("%s\n", status_message());
        return -1;
    }
    return 0;
}

static int close_run(void **state)
{
    results_close(file);
    return made_close(state);
}

/* The exported lines; an array of objects. */
static json_t *exported(const export_order *o, char **notes)
{
    char *text, *said, *rest;
    size_t size, said_size;
    FILE *to = open_memstream(&text, &size), *note = open_memstream(&said, &said_size);
    assert_int_equal(export_rows(file, o, to, note), OK);
    fclose(to);
    fclose(note);
    json_t *lines = json_array();
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        json_t *one = json_loads(line, 0, NULL);
        assert_non_null(one);
        json_array_append_new(lines, one);
    }
    free(text);
    if (notes)
        *notes = said;
    else
        free(said);
    return lines;
}

static const char *text_at(const json_t *lines, size_t i, const char *key)
{
    const char *text = json_string_value(json_object_get(json_array_get(lines, i), key));
    assert_non_null(text);
    return text;
}

static void test_jsonl(void **state)
{
    (void)state;
    char *notes;
    json_t *lines = exported(&(export_order){.format = EXPORT_JSONL}, &notes), *first = json_array_get(lines, 0);
    assert_int_equal(json_array_size(lines), ROWS);
    assert_int_equal(json_integer_value(json_object_get(first, "n_prompt_tokens")), 37);
    assert_int_equal(json_integer_value(json_object_get(first, "n_tokens")), 10);
    assert_int_equal(json_integer_value(json_object_get(first, "n_iterations")), 8);
    assert_true(json_real_value(json_object_get(first, "tokens_per_forward")) == 1.25);
    assert_int_equal(json_array_size(json_object_get(first, "tokens")), 10);
    assert_int_equal(json_integer_value(json_array_get(json_object_get(first, "tokens"), 9)), 1009);
    assert_string_equal(text_at(lines, 0, "text"), rows[0].text);
    assert_string_equal(json_string_value(json_object_get(json_object_get(first, "gold"), "answer")),
                        "20 + 9\n#### 29");
    assert_string_equal(text_at(lines, 1, "status"), "failed");
    assert_string_equal(text_at(lines, 1, "message"), "too long");
    assert_true(json_is_null(json_object_get(json_array_get(lines, 1), "tokens_per_forward")));
    assert_int_equal(json_integer_value(json_object_get(json_array_get(lines, 5), "turn")), 1);
    assert_non_null(strstr(notes, "1 failed rows"));
    free(notes);
    json_decref(lines);
    lines = exported(&(export_order){.format = EXPORT_JSONL, .dataset = "gsm8k"}, NULL);
    assert_int_equal(json_array_size(lines), 2);
    json_decref(lines);
}

static void test_humaneval(void **state)
{
    (void)state;
    json_t *lines = exported(&(export_order){.format = EXPORT_HUMANEVAL}, NULL);
    assert_int_equal(json_array_size(lines), 2);
    assert_int_equal(json_object_size(json_array_get(lines, 0)), 2);
    assert_string_equal(text_at(lines, 0, "task_id"), "Demo/0");
    assert_string_equal(text_at(lines, 0, "completion"), "\n    return n % 2 == 0");
    assert_string_equal(text_at(lines, 1, "completion"), "\n\ndef even(n):\n    return True\n");
    json_decref(lines);
}

static void test_lm_eval(void **state)
{
    (void)state;
    json_t *lines = exported(&(export_order){.format = EXPORT_LM_EVAL, .dataset = "gsm8k"}, NULL);
    static const char *const filter[] = {"strict-match", "flexible-extract", "strict-match", "flexible-extract"};
    assert_int_equal(json_array_size(lines), 4);
    for (size_t i = 0; i < 4; i++) {
        const json_t *l = json_array_get(lines, i);
        assert_string_equal(text_at(lines, i, "filter"), filter[i]);
        assert_int_equal(json_integer_value(json_object_get(l, "doc_id")), (int)i / 2);
        assert_true(json_real_value(json_object_get(l, "exact_match")) == (i < 2));
        assert_string_equal(json_string_value(json_array_get(json_object_get(l, "metrics"), 0)), "exact_match");
    }
    const json_t *l = json_array_get(lines, 0);
    assert_string_equal(json_string_value(json_array_get(json_array_get(json_object_get(l, "resps"), 0), 0)),
                        rows[0].text);
    assert_string_equal(json_string_value(json_array_get(json_object_get(l, "filtered_resps"), 0)), "29");
    assert_string_equal(json_string_value(json_object_get(json_object_get(l, "doc"), "question")), "How many?");
    assert_string_equal(text_at(lines, 0, "target"), "20 + 9\n#### 29");
    /* hashlib.sha256(json.dumps(doc, indent=2, ensure_ascii=False).encode()), and of the target */
    assert_string_equal(text_at(lines, 0, "doc_hash"),
                        "be14a1f46a5205ecbe51fb229600ab22dea6152b166328aa7a810340aa1aeee9");
    assert_string_equal(text_at(lines, 0, "target_hash"),
                        "26a3ad1e171817fc6e59223f8cfc9eecd44ab0490376f1315c40be6377bf0554");
    const json_t *call = json_object_get(json_object_get(l, "arguments"), "gen_args_0");
    assert_string_equal(json_string_value(json_object_get(call, "arg_0")), "How many?");
    assert_int_equal(json_integer_value(json_object_get(json_object_get(call, "arg_1"), "max_gen_toks")), 64);
    json_decref(lines);
    lines = exported(&(export_order){.format = EXPORT_LM_EVAL, .dataset = "humaneval"}, NULL);
    assert_int_equal(json_array_size(lines), 2);
    assert_string_equal(text_at(lines, 0, "filter"), "none");
    assert_string_equal(text_at(lines, 0, "target"), "def check(f):\n    assert f(2) and not f(3)\n\ncheck(even)");
    json_decref(lines);
}

static void test_mtbench(void **state)
{
    (void)state;
    char *notes;
    json_t *lines = exported(&(export_order){.format = EXPORT_MTBENCH}, &notes);
    assert_int_equal(json_array_size(lines), 1);
    const json_t *l = json_array_get(lines, 0), *choice = json_array_get(json_object_get(l, "choices"), 0),
                 *turns = json_object_get(choice, "turns");
    assert_int_equal(json_integer_value(json_object_get(l, "question_id")), 81);
    assert_string_equal(text_at(lines, 0, "model_id"), "tiny");
    assert_int_equal(strlen(text_at(lines, 0, "answer_id")), 22);
    assert_true(json_real_value(json_object_get(l, "tstamp")) > 1e9);
    assert_true(json_is_integer(json_object_get(choice, "index")));
    assert_int_equal(json_array_size(turns), 2);
    assert_string_equal(json_string_value(json_array_get(turns, 1)), "Caf\xc3\xa9.");
    assert_non_null(strstr(notes, "1 questions left out"));
    free(notes);
    json_decref(lines);
    lines = exported(&(export_order){.format = EXPORT_MTBENCH, .model_id = "mine"}, NULL);
    assert_string_equal(text_at(lines, 0, "model_id"), "mine");
    json_decref(lines);
}

static void test_sha256(void **state)
{
    (void)state;
    char hex[65], long_text[120];
    memset(long_text, 'a', sizeof long_text);
    sha256_hex(hex, "", 0);
    assert_string_equal(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    sha256_hex(hex, "abc", 3);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    sha256_hex(hex, long_text, 119); /* the last block overflows into another */
    assert_string_equal(hex, "31eba51c313a5c08226adf18d4a359cfdfd8d2e816b13f4af952f7ea6584dcfb");
}

static void test_command(void **state)
{
    (void)state;
    char in[512], out[512], line[256];
    snprintf(in, sizeof in, "%s", made_path("a.h5"));
    snprintf(out, sizeof out, "%s", made_path("samples.jsonl"));
    assert_int_equal(export_command(6, (char *[]){"export", in, "--format", "humaneval", "--out", out, NULL}), OK);
    FILE *f = fopen(out, "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    assert_string_equal(line, "{\"task_id\": \"Demo/0\", \"completion\": \"\\n    return n % 2 == 0\"}\n");
    fclose(f);

    char onto[600];
    snprintf(onto, sizeof onto, "--out=%s", in);
    const struct {
        const char *a, *b, *c;
        status st;
        const char *says;
    } wrong[] = {{"--format", "xml", "x", BAD_INPUT, "--format xml: want jsonl, humaneval, lm-eval or mtbench"},
                 {"--dataset", "x", "y", BAD_INPUT, "--format is missing"},
                 {"--format", "jsonl", "--bogus", BAD_INPUT, "--bogus is unknown"},
                 {"--format=jsonl", "x", "y", BAD_INPUT, "want one FILE.h5, found 2"},
                 {"--format=jsonl", "--dataset=none", in, BAD_INPUT, "no row of dataset none fits --format jsonl"},
                 {"--format=jsonl", "--out=/nonexistent/x", in, BAD_INPUT, "--out /nonexistent/x: No such file"},
                 {"--format=jsonl", onto, in, BAD_INPUT, "is an HDF5 file: name another"},
                 {"--format=jsonl", "--dataset=none", in, BAD_INPUT, "no row of dataset none"}}; /* it is still there */
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char *argv[] = {"export", (char *)wrong[i].a, (char *)wrong[i].b, (char *)wrong[i].c, NULL};
        assert_int_equal(export_command(4, argv), wrong[i].st);
        if (!strstr(status_message(), wrong[i].says))
            fail_msg("\"%s\" does not say \"%s\"", status_message(), wrong[i].says);
    }
    if (access("/dev/full", W_OK) == 0) {
        f = fopen("/dev/full", "w");
        assert_int_equal(export_rows(file, &(export_order){.format = EXPORT_JSONL}, f, stderr), FAILED);
        assert_non_null(strstr(status_message(), "No space left"));
        fclose(f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_jsonl),   cmocka_unit_test(test_humaneval), cmocka_unit_test(test_lm_eval),
        cmocka_unit_test(test_mtbench), cmocka_unit_test(test_sha256),    cmocka_unit_test(test_command),
    };
    return cmocka_run_group_tests(tests, open_run, close_run);
}
