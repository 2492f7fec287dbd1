/* HumanEval: from an answer to a completion, and the verdict of the tests. With EPOCH_DATA (a folder that holds
 * humaneval/HumanEval.jsonl.gz) the 164 tasks of the benchmark; else the demo's 50. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "results/humaneval.h"
#include "results/sandbox.h"
#include "src/base/json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

enum { TASKS = 200 };

typedef struct problem {
    const char *id, *prompt, *solution, *test, *entry;
} problem;

static json_t *row[TASKS];
static problem task[TASKS];
static int tasks;
static bool real;
static sandbox *box;

static int load(const char *path)
{
    static char text[1 << 20];
    gzFile f = gzopen(path, "rb"); /* reads plain files too */
    while (f && tasks < TASKS && gzgets(f, text, sizeof text)) {
        json_t *o = row[tasks] = json_loads(text, 0, NULL);
        problem *p = task + tasks++;
        if (json_unpack(o, "{s:s, s:s, s:s, s:s, s:s}", "task_id", &p->id, "prompt", &p->prompt, "canonical_solution",
                        &p->solution, "test", &p->test, "entry_point", &p->entry) != 0)
            return 1;
    }
    if (f)
        gzclose(f);
    return tasks == 0;
}

static int setup(void **state)
{
    (void)state;
    const char *data = getenv("EPOCH_DATA");
    char path[4096];
    snprintf(path, sizeof path, "%s/humaneval/HumanEval.jsonl.gz", data ? data : "");
    real = data && load(path) == 0;
    if (!real) {
        print_message("skipped: the 164 tasks of HumanEval (EPOCH_DATA names no folder with humaneval/"
                      "HumanEval.jsonl.gz); the demo's 50 stand in\n");
        if (load(EPOCH_SOURCE "/datasets/samples/humaneval_demo.jsonl") != 0)
            return 1;
    }
    sandbox_rule rule = {.jobs = 2, .cpu_seconds = 10, .wall_seconds = 30};
    if (sandbox_open(&box, &rule) == OK)
        return 0;
    print_error("%s\n", status_message());
    return 1;
}

static int teardown(void **state)
{
    (void)state;
    sandbox_close(box);
    for (int i = 0; i < tasks; i++)
        json_decref(row[i]);
    return 0;
}

static char *completion(const char *text, const char *prompt, const char *entry)
{
    char *c;
    assert_int_equal(humaneval_completion(&c, text, prompt, entry), OK);
    return c;
}

static sandbox_task judged(const char *answer, const char *prompt, const char *test, const char *entry)
{
    char *c = completion(answer, prompt, entry), *program;
    assert_int_equal(humaneval_program(&program, prompt, c, test, entry), OK);
    sandbox_task t = {.program = program};
    assert_int_equal(sandbox_run(box, &t, 1), OK);
    if (t.verdict != SANDBOX_PASSED && getenv("EPOCH_SHOW"))
        print_message("---- %s\n%s", t.message, program);
    free(c);
    free(program);
    t.program = NULL;
    return t;
}

/* A task in the manner of the benchmark's, with a helper in its prompt. */
static const char prompt[] = "from typing import List\n\n\n"
                             "def is_even(n: int) -> bool:\n"
                             "    \"\"\" Is n even? \"\"\"\n"
                             "    return n % 2 == 0\n\n\n"
                             "def evens(numbers: List[int]) -> List[int]:\n"
                             "    \"\"\" The even ones.\n"
                             "    >>> evens([1, 2])\n"
                             "    [2]\n"
                             "    \"\"\"\n";
static const char test[] = "def check(candidate):\n"
                           "    assert candidate([1, 2, 3, 4]) == [2, 4]\n"
                           "    assert candidate([]) == []\n";

static void passes(const char *answer)
{
    sandbox_task t = judged(answer, prompt, test, "evens");
    if (t.verdict != SANDBOX_PASSED)
        fail_msg("%s\ngave \"%s\"; the completion was\n%s", answer, t.message, completion(answer, prompt, "evens"));
}

static void fails(const char *answer)
{
    if (judged(answer, prompt, test, "evens").verdict == SANDBOX_PASSED)
        fail_msg("%s\npassed; the completion was\n%s", answer, completion(answer, prompt, "evens"));
}

static void test_bare_bodies(void **state)
{
    (void)state;
    static const char *const kept[] = {
        "    return [n for n in numbers if is_even(n)]\n",
        "    return [n for n in numbers if is_even(n)]",
        "\n\n    out = []\n\n    for n in numbers:\n        if is_even(n):\n            out.append(n)\n    return "
        "out\n",
        "    return pick(numbers)\n\n\ndef pick(numbers):\n    return [n for n in numbers if is_even(n)]\n",
        "    text = '''\nreturn nothing\n'''\n    return [n for n in numbers if is_even(n)]\n",
        "    return [\nn for n in numbers if is_even(n)\n]\n",
        "    # ```\n    return [n for n in numbers if is_even(n)]\n"};
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        char *c = completion(kept[i], prompt, "evens");
        assert_string_equal(c, kept[i]); /* to the letter */
        free(c);
        passes(kept[i]);
    }
    passes("    return [n for n in numbers if is_even(n)]\n\nThis keeps the even numbers (it's simple.\n");
    passes("    return [n for n in numbers if is_even(n)]\n```\n\nIt works.\n");
    passes("    return [n for n in numbers if is_even(n)]\n\nprint(evens([1]))\nassert evens([1]) == [1]\n");
    /* indentation that was lost, whole or of the first line */
    passes("return [n for n in numbers if is_even(n)]");
    passes("return [n for n in numbers if is_even(n)]\n\nThat is all.\n");
    passes("out = []\n    for n in numbers:\n        if is_even(n):\n            out.append(n)\n    return out\n");
    passes("out = []\nfor n in numbers:\n    if is_even(n):\n        out.append(n)\nreturn out\n");
    passes("for n in [1]:\n        out = numbers\n    return [n for n in out if is_even(n)]\n");
    passes("  out = numbers\n  return [n for n in out if is_even(n)]\n");
    passes("\tout = numbers\n\treturn [n for n in out if is_even(n)]\n");
    passes("Here is the body of the function:\n\n    return [n for n in numbers if is_even(n)]\n");
    fails("    return numbers\n");
    fails("");
    fails("\n\n");
    fails("I cannot answer this (sorry");
    fails("```python\n```");
}

static void test_fences(void **state)
{
    (void)state;
    static const char function[] = "def evens(numbers: List[int]) -> List[int]:\n"
                                   "    \"\"\" The even ones. \"\"\"\n"
                                   "    return [n for n in numbers if is_even(n)]\n";
    static const char *const around[][2] = {
        {"```python\n", "```\n"},
        {"Here it is, it's easy:\n\n```python\n", "```\n\nIt calls `is_even`; don't worry (really.\n"},
        {"```\n", "```"},
        {"~~~py\n", "~~~"},
        {"````Python\n", "````"},
        {"```python\nfrom typing import List\n\n", "```"},
        {"Sure!\n```python\n", ""},                                 /* the fence never closes */
        {"```python\n", "\nprint(evens([1, 2]))\nassert evens([1"}, /* cut in the examples behind the function */
        {"```python\n", "\nif __name__ == '__main__':\n    print(evens(input()))\n```\n"},
        {"First, install it:\n```bash\npip install evens\n```\nThen:\n```python\n", "```\n"},
        {"", ""},
        {"Here is my answer:\n\n", "\nThe function filters the list. It isn't slow (linear.\n"},
        {"", "```\nDone.\n"}, /* the opening fence belonged to the prompt */
    };
    for (size_t i = 0; i < sizeof around / sizeof *around; i++) {
        char text[2048];
        snprintf(text, sizeof text, "%s%s%s", around[i][0], function, around[i][1]);
        passes(text);
    }
    passes("1. Like so:\n   ```python\n   def evens(numbers):\n       return [n for n in numbers if is_even(n)]\n   "
           "```\n");
    passes("```python\n    return [n for n in numbers if is_even(n)]\n```\n");
    passes("```python\nreturn [n for n in numbers if is_even(n)]\n```\n");
    passes("The body:\n```python\n    return [n for n in numbers if is_even(n)]");
    passes("```python\r\ndef evens(numbers):\r\n    return [n for n in numbers if is_even(n)]\r\n```\r\n");
    fails("```python\ndef evens(numbers):\n    return [n for n in numb"); /* cut inside the function */
    fails("```python\ndef odds(numbers):\n    return [n for n in numbers if is_even(n)]\n```");
}

static void test_helpers(void **state)
{
    (void)state;
    passes("```python\nimport functools\n\nLIMIT = 2\n\ndef halves(n):\n    return n % LIMIT == 0\n\n"
           "@functools.lru_cache(None)\ndef good(n):\n    return halves(n)\n\n"
           "def evens(numbers):\n    return [n for n in numbers if good(n)]\n```\n");
    passes("```python\ndef evens(numbers):\n    return [n for n in numbers if good(n)]\n\n"
           "def good(n):\n    return n % 2 == 0\n```\n");
    passes("A helper first:\n```python\ndef good(n):\n    return n % 2 == 0\nprint(good(1), evens)\n```\nThen\n"
           "```python\ndef evens(numbers):\n    return [n for n in numbers if good(n)]\n```\n");
    passes("```python\ndef evens(numbers):\n    return [n for n in numbers if good(n)]\n```\nwith\n"
           "```python\ndef good(n):\n    return n % 2 == 0\n```\nExample:\n```python\nraise SystemExit\n```\n");
    /* the first definition counts, not a second thought */
    passes("```python\ndef evens(numbers):\n    return [n for n in numbers if is_even(n)]\n```\nWorse is\n"
           "```python\ndef evens(numbers):\n    return []\n```\n");
    passes("import functools\n\n@functools.cache\ndef good(n):\n    return n % 2 == 0\n\n"
           "def evens(numbers):\n    return [n for n in numbers if good(n)]\n\nThis uses good.\n");
    passes(
        "```python\ntry:\n    import numpy_is_not_here\nexcept ImportError:\n    pass\nelse:\n    raise SystemExit\n\n"
        "def evens(numbers):\n    return [n for n in numbers if is_even(n)]\n```");
    /* a prompt that does not end in a docstring still ends before the answer's function */
    sandbox_task t = judged("```python\ndef evens(numbers):\n    return [2, 4] if numbers else []\n```",
                            "def evens(numbers):\n    # the even ones", test, "evens");
    assert_int_equal(t.verdict, SANDBOX_PASSED);
}

/* A signature to repeat: the prompt's last function up to its body, written out with the solution. */
static void repeat(char *out, size_t bytes, const problem *p, const char *before, const char *after)
{
    char head[64];
    snprintf(head, sizeof head, "def %s(", p->entry);
    const char *def = strstr(p->prompt, head);
    assert_non_null(def);
    assert_true((size_t)snprintf(out, bytes, "%s%s%s%s", before, def, p->solution, after) < bytes);
}

static void judge_all(char **answer, sandbox_verdict *verdict)
{
    sandbox_task t[TASKS];
    char *program[TASKS];
    for (int i = 0; i < tasks; i++) {
        char *c = completion(answer[i], task[i].prompt, task[i].entry);
        assert_int_equal(humaneval_program(program + i, task[i].prompt, c, task[i].test, task[i].entry), OK);
        t[i] = (sandbox_task){.program = program[i]};
        free(c);
    }
    assert_int_equal(sandbox_run(box, t, tasks), OK);
    for (int i = 0; i < tasks; i++) {
        verdict[i] = t[i].verdict;
        if (t[i].verdict != SANDBOX_PASSED && getenv("EPOCH_SHOW"))
            print_message("---- %s: %s\n%s", task[i].id, t[i].message, program[i]);
        free(program[i]);
    }
}

static void test_canonical_solutions(void **state)
{
    (void)state;
    char *answer[TASKS];
    sandbox_verdict verdict[TASKS];
    for (int i = 0; i < tasks; i++) {
        char *c = completion(task[i].solution, task[i].prompt, task[i].entry);
        assert_string_equal(c, task[i].solution);
        free(c);
        answer[i] = (char *)task[i].solution;
    }
    judge_all(answer, verdict);
    for (int i = 0; i < tasks; i++)
        if (verdict[i] != SANDBOX_PASSED)
            fail_msg("%s: its canonical solution did not pass", task[i].id);
    /* the same as an instructed model writes it, cut off before the fence closes for every other one */
    for (int i = 0; i < tasks; i++) {
        answer[i] = malloc(1 << 14);
        assert_non_null(answer[i]);
        repeat(answer[i], 1 << 14, task + i, "Here's the function:\n\n```python\n",
               i % 2 ? "" : "```\n\nIt isn't hard to see (from the examples.\n");
    }
    judge_all(answer, verdict);
    for (int i = 0; i < tasks; i++) {
        if (verdict[i] != SANDBOX_PASSED)
            fail_msg("%s: its canonical solution in a fence did not pass", task[i].id);
        free(answer[i]);
    }
}

static void test_broken_solutions(void **state)
{
    (void)state;
    static char *const wrong[] = {"    return None\n", "    raise ValueError\n", "    return [\n",
                                  "    import sys\n    sys.exit(0)\n"};
    char *answer[TASKS];
    sandbox_verdict verdict[TASKS];
    for (int i = 0; i < tasks; i++)
        answer[i] = wrong[i % 4];
    judge_all(answer, verdict);
    for (int i = 0; i < tasks; i++)
        if (verdict[i] == SANDBOX_PASSED)
            fail_msg("%s passed with %s", task[i].id, answer[i]);
}

static void test_named_tasks(void **state)
{
    (void)state;
    if (!real) {
        print_message("skipped: HumanEval/0, 10, 32, 38 and 50 need EPOCH_DATA\n");
        return;
    }
    static const int named[] = {0, 10, 32, 38, 50};
    static const char *const around[][2] = {{"", ""},
                                            {"Sure:\n```python\n", "```\nThat's it.\n"},
                                            {"Sure:\n```python\n", ""},
                                            {"```python\n", "\n# Test\nprint(1 +"}};
    for (size_t n = 0; n < sizeof named / sizeof *named; n++) {
        const problem *p = task + named[n];
        char text[1 << 14];
        assert_int_equal(judged(p->solution, p->prompt, p->test, p->entry).verdict, SANDBOX_PASSED);
        for (size_t i = 0; i < sizeof around / sizeof *around; i++) {
            repeat(text, sizeof text, p, around[i][0], around[i][1]);
            sandbox_task t = judged(text, p->prompt, p->test, p->entry);
            if (t.verdict != SANDBOX_PASSED)
                fail_msg("%s, form %zu: %s", p->id, i, t.message);
        }
        /* the whole prompt again, helpers included */
        snprintf(text, sizeof text, "```python\n%s%s```\n", p->prompt, p->solution);
        assert_int_equal(judged(text, p->prompt, p->test, p->entry).verdict, SANDBOX_PASSED);
        snprintf(text, sizeof text, "```python\n%s%.20s", p->prompt, p->solution);
        assert_int_not_equal(judged(text, p->prompt, p->test, p->entry).verdict, SANDBOX_PASSED);
    }
}

static void test_pass_at_k(void **state)
{
    (void)state;
    assert_true(humaneval_pass_at_k(1, 1, 1) == 1);
    assert_true(humaneval_pass_at_k(1, 0, 1) == 0);
    assert_true(fabs(humaneval_pass_at_k(10, 3, 1) - 0.3) < 1e-12);
    assert_true(fabs(humaneval_pass_at_k(5, 2, 3) - 0.9) < 1e-12); /* 1 - C(3,3) / C(5,3) */
    assert_true(humaneval_pass_at_k(10, 0, 10) == 0);
    assert_true(humaneval_pass_at_k(10, 1, 10) == 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bare_bodies),      cmocka_unit_test(test_fences),
        cmocka_unit_test(test_helpers),          cmocka_unit_test(test_canonical_solutions),
        cmocka_unit_test(test_broken_solutions), cmocka_unit_test(test_named_tasks),
        cmocka_unit_test(test_pass_at_k),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
