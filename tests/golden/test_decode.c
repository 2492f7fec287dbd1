/* Token sequences of other people's decoders on the golden checkpoints, and of the trained tiny model: reproduced token
 * for token; for the tiny model also the positions that each iteration committed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/base/json.h"
#include "tests/golden/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GOLDEN EPOCH_SOURCE "/tests/golden/vectors/"

static void must(status st)
{
    if (st != OK)
        fail_msg("%s", status_message());
}

static int32_t *ints(const json_t *list, int32_t *count)
{
    *count = (int32_t)json_array_size(list);
    int32_t *v = malloc(sizeof *v * (size_t)(*count + 1));
    for (int32_t i = 0; i < *count; i++)
        v[i] = (int32_t)json_integer_value(json_array_get(list, (size_t)i));
    return v;
}

static bool one_of(const char *runner)
{
    static const char *const ours[] = {"hf_llada2", "sglang_low_confidence", "dinfer_bd_cache", "dinfer_bd_mask"};
    for (int i = 0; i < 4; i++)
        if (strcmp(runner, ours[i]) == 0)
            return true;
    return false;
}

static int number(const json_t *c, const char *key)
{
    return (int)json_integer_value(json_object_get(c, key));
}

/* The peer's answer over P .. P + gen_length, before the first end token. */
static int32_t *peer_answer(const json_t *c, int prompt, int32_t *count)
{
    const json_t *out = json_object_get(c, "output");
    bool canvas = json_is_object(out);
    int32_t all, *v = ints(canvas ? json_object_get(out, "canvas") : out, &all);
    int from = canvas ? prompt : 0, n = 0, most = number(c, "gen_length"), eos = number(c, "eos_id");
    while (n < most && from + n < all && v[from + n] != eos)
        n++;
    memmove(v, v + from, sizeof *v * (size_t)n);
    *count = n;
    return v;
}

static void test_peers(void **state)
{
    (void)state;
    json_t *all;
    int cases = 0;
    must(json_file(&all, GOLDEN "generation.json", 1 << 20));
    size_t i;
    json_t *c;
    json_array_foreach(all, i, c)
    {
        if (!one_of(json_string_value(json_object_get(c, "runner"))) || json_object_get(c, "prompts"))
            continue;
        const json_t *t = json_object_get(c, "threshold");
        if (!t)
            t = json_object_get(json_object_get(c, "algorithm_config"), "threshold");
        plan_settings s = harness_settings(number(c, "block_length"), (float)json_number_value(t), number(c, "mask_id"),
                                           number(c, "eos_id"));
        harness h;
        must(harness_open(&h, GOLDEN "checkpoints/llada2-tiny-bf16", &s, 1, BF16));
        int32_t prompt_tokens, want_tokens, *prompt = ints(json_object_get(c, "prompt"), &prompt_tokens);
        int32_t *want = peer_answer(c, prompt_tokens, &want_tokens);
        decoded d = {.prompt = prompt, .prompt_tokens = prompt_tokens, .gen_len = number(c, "gen_length")};
        must(harness_decode(&h, &d, 1));
        if ((int32_t)d.flight.answer.count != want_tokens ||
            memcmp(d.flight.answer.id, want, sizeof *want * (size_t)want_tokens) != 0)
            fail_msg("case %s: other tokens", json_string_value(json_object_get(c, "id")));
        harness_forget(&d, 1);
        harness_close(&h);
        free(prompt);
        free(want);
        cases++;
    }
    print_message("%d cases\n", cases);
    assert_int_equal(cases, 28);
    json_decref(all);
}

/* Every forward's commits, block by block, against the recorded trace. */
static void same_trace(const decoded *d, const json_t *trace, const char *name)
{
    int at = 0;
    for (int block = d->prompt_tokens / 32;; block++) {
        char key[16];
        snprintf(key, sizeof key, "%d", block);
        const json_t *steps = json_object_get(trace, key);
        if (!steps)
            break;
        for (size_t i = 0; i < json_array_size(steps); i++, at++) {
            const json_t *positions = json_array_get(steps, i);
            uint64_t want = 0;
            for (size_t k = 0; k < json_array_size(positions); k++)
                want |= 1ull << json_integer_value(json_array_get(positions, k));
            if (at >= d->commits || d->commit[at].block != block || d->commit[at].positions != want)
                fail_msg("%s: block %d, iteration %d: other positions committed", name, block, (int)i);
        }
    }
    assert_int_equal(at, d->commits);
}

static void test_tiny_demo(void **state)
{
    (void)state;
    json_t *all;
    must(json_file(&all, GOLDEN "tiny_demo.json", 1 << 22));
    const json_t *cases = json_object_get(all, "cases");
    int count = (int)json_array_size(cases);
    decoded *d = calloc((size_t)count, sizeof *d);
    for (int i = 0; i < count; i++) {
        d[i].prompt = ints(json_object_get(json_array_get(cases, (size_t)i), "prompt_ids"), &d[i].prompt_tokens);
        d[i].gen_len = 256;
    }
    harness h;
    plan_settings s = harness_settings(32, 0.95f, 1522, 1521);
    must(harness_open(&h, EPOCH_SOURCE "/models/tiny", &s, 12, F32));
    must(harness_decode(&h, d, count));
    for (int i = 0; i < count; i++) {
        const json_t *c = json_array_get(cases, (size_t)i);
        char name[64];
        snprintf(name, sizeof name, "%s %d", json_string_value(json_object_get(c, "dataset")), number(c, "index"));
        int32_t n, *want = ints(json_object_get(c, "output_ids"), &n);
        if ((int32_t)d[i].flight.answer.count != n ||
            memcmp(d[i].flight.answer.id, want, sizeof *want * (size_t)n) != 0)
            fail_msg("%s: other tokens", name);
        assert_int_equal(d[i].flight.iterations, number(c, "iterations"));
        assert_int_equal(d[i].flight.blocks, number(c, "blocks"));
        assert_int_equal(d[i].flight.eos, json_is_true(json_object_get(c, "finished")));
        same_trace(&d[i], json_object_get(c, "trace"), name);
        free(want);
    }
    print_message("%d cases\n", count);
    assert_int_equal(count, 80);
    harness_close(&h);
    for (int i = 0; i < count; i++)
        free((void *)(uintptr_t)d[i].prompt);
    harness_forget(d, count);
    free(d);
    json_decref(all);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_peers), cmocka_unit_test(test_tiny_demo)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
