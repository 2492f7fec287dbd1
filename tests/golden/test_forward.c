/* Forward and K/V vectors of the models' reference code (tests/golden/vectors/README.md), on fp32 arithmetic: hidden
 * states within 2e-5, logits within 1e-4 (fp32 against fp64 there: 2.1e-6 and 1.2e-5), expert ids exact as a set. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/model/safetensors.h"
#include "tests/golden/harness.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GOLDEN EPOCH_SOURCE "/tests/golden/vectors/"

static safetensors *vectors;

static void must(status st)
{
    if (st != OK)
        fail_msg("%s", status_message());
}

static void open_vectors(const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, GOLDEN "%s", name);
    must(safetensors_open(&vectors, path));
}

static const stored_tensor *vector(const char *name)
{
    const stored_tensor *t = safetensors_find(vectors, name);
    if (!t)
        fail_msg("no vector %s", name);
    return t;
}

static void near(const char *name, const float *have, int64_t ld, int64_t rows, int64_t cols, double bound)
{
    const stored_tensor *t = vector(name);
    const float *want = t->data;
    double worst = 0;
    assert_int_equal(t->bytes, (size_t)(rows * cols) * sizeof(float));
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            worst = fmax(worst, fabs((double)have[i * ld + j] - (double)want[i * cols + j]));
    print_message("%-24s %.2e (at most %.0e)\n", name, worst, bound);
    assert_true(worst <= bound);
}

static void near_tensor(const char *name, const tensor *t, int64_t rows, double bound)
{
    near(name, t->data, t->ld, rows, t->cols, bound);
}

/* Prefills the vector's tokens, its masks as they stand, layer by layer. */
static void start(harness *h, const plan_settings *s, const char *checkpoint, int tokens)
{
    char dir[4096];
    snprintf(dir, sizeof dir, GOLDEN "checkpoints/%s", checkpoint);
    must(harness_open(h, dir, s, 1, strstr(checkpoint, "bf16") ? BF16 : F32));
    must(executor_admit(h->executor, 0, vector("input_ids")->data, tokens, tokens + 1));
    executor *x = h->executor;
    must(executor_begin(x));
    assert_int_equal(((int32_t *)x->batch.count.data)[0], tokens);
}

static void logits_near(harness *h, const char *name, int rows, double bound)
{
    executor *x = h->executor;
    backend *b = x->backend;
    int64_t vocab = x->config->vocab;
    float *room = malloc(sizeof *room * (size_t)(rows * vocab));
    tensor y = tensor_of(room, F32, rows, vocab);
    tensor hidden = tensor_rows(&x->a.h, 0, rows);
    must(b->matmul(b, &y, &hidden, &x->weights->head));
    near_tensor(name, &y, rows, bound);
    free(room);
}

static int ascending(const void *a, const void *b)
{
    return *(const int32_t *)a - *(const int32_t *)b;
}

static void test_block_causal(void **state)
{
    (void)state;
    enum { N = 32 };
    harness h;
    plan_settings s = harness_settings(8, 0.95f, 319, 318);
    open_vectors("llada2_forward_b8.safetensors");
    start(&h, &s, "llada2-tiny-bf16", N);
    executor *x = h.executor;
    near_tensor("hidden_0", &x->a.x, N, 0);
    must(attention_layer(x, 0));
    must(dense_layer(x, 0));
    near_tensor("hidden_1", &x->a.x, N, 2e-5);
    must(attention_layer(x, 1));
    near_tensor("layer1_attention_out", &x->a.y, N, 2e-5);
    must(moe_layer(x, 1, 0));
    near_tensor("router_logits", &x->a.z, N, 2e-5);
    for (int64_t i = 0; i < N * x->a.y.cols; i++) /* the shared expert's, and the routed ones' */
        ((float *)x->a.y.data)[i] += ((const float *)x->a.y_fresh.data)[i];
    near_tensor("layer1_moe_out", &x->a.y, N, 2e-5);
    near_tensor("hidden_2", &x->a.x, N, 2e-5);
    const stored_tensor *ids = vector("router_topk_ids"), *weights_of = vector("router_topk_weights");
    for (int i = 0; i < N; i++) {
        int32_t want[4], order[4];
        memcpy(want, (const int32_t *)ids->data + 4 * i, sizeof want);
        memcpy(order, want, sizeof want);
        qsort(want, 4, sizeof *want, ascending);
        assert_memory_equal((int32_t *)x->a.ids.data + 4 * i, want, sizeof want);
        for (int k = 0; k < 4; k++)
            for (int j = 0; j < 4; j++)
                if (order[j] == want[k])
                    assert_true(fabsf(((float *)x->a.weights.data)[4 * i + k] -
                                      ((const float *)weights_of->data)[4 * i + j]) < 2e-6f);
    }
    must(attention_layer(x, 2));
    must(moe_layer(x, 2, 1));
    logits_near(&h, "logits", N, 1e-4);
    near_tensor("hidden_3", &x->a.h, N, 2e-5);
    logits_near(&h, "logits_fp64", N, 1e-4);
    harness_close(&h);
    safetensors_close(vectors);
}

static void test_one_block(void **state)
{
    (void)state;
    harness h;
    plan_settings s = harness_settings(32, 0.95f, 319, 318);
    open_vectors("llada2_forward_fp32_b32.safetensors");
    start(&h, &s, "llada2-tiny-fp32", 32);
    must(attention_layer(h.executor, 0));
    must(dense_layer(h.executor, 0));
    for (int l = 1; l < 3; l++) {
        must(attention_layer(h.executor, l));
        must(moe_layer(h.executor, l, l - 1));
    }
    logits_near(&h, "logits", 32, 1e-4);
    harness_close(&h);
    safetensors_close(vectors);
}

/* The pool's keys or values of one layer, gathered as [kv heads, positions, head_dim]. */
static void pool_near(harness *h, const char *name, const tensor *pool, int layer, int positions)
{
    executor *x = h->executor;
    int hd = x->config->head_dim, heads = x->config->kv_heads, block = x->rule.block.block_size;
    float *have = malloc(sizeof *have * (size_t)(heads * positions * hd));
    for (int n = 0; n < heads; n++)
        for (int p = 0; p < positions; p++) {
            int64_t at = ((int64_t)layer * x->kv.page_count + x->pages.held[p / block]) * block + p % block;
            memcpy(have + ((int64_t)n * positions + p) * hd, (float *)pool->data + at * pool->ld + n * hd,
                   sizeof *have * (size_t)hd);
        }
    near(name, have, hd, (int64_t)heads * positions, hd, 2e-5);
    free(have);
}

static void test_keys_and_values(void **state)
{
    (void)state;
    harness h;
    plan_settings s = harness_settings(8, 0.5f, 319, 318);
    open_vectors("llada2_kv_after_run.safetensors");
    char dir[] = GOLDEN "checkpoints/llada2-tiny-bf16";
    must(harness_open(&h, dir, &s, 1, BF16));
    const stored_tensor *prompt = vector("prompt"), *tokens = vector("final_tokens");
    decoded d = {.prompt = prompt->data, .prompt_tokens = (int32_t)prompt->shape[prompt->dims - 1]};
    int total = (int)tokens->shape[tokens->dims - 1];
    d.gen_len = total - d.prompt_tokens + 8; /* one block more, so that the last of these is sealed */
    must(harness_decode(&h, &d, 1));
    for (int i = 0; i < total - d.prompt_tokens; i++)
        assert_int_equal(d.flight.answer.id[i], ((const int32_t *)tokens->data)[d.prompt_tokens + i]);
    harness_forget(&d, 1);
    /* The pages are free again but still hold the run's keys; page order is that of admission. */
    pool_near(&h, "k_layer0", &h.executor->kv.k, 0, 24);
    pool_near(&h, "v_layer0", &h.executor->kv.v, 0, 24);
    pool_near(&h, "k_layer2", &h.executor->kv.k, 2, 24);
    pool_near(&h, "v_layer2", &h.executor->kv.v, 2, 24);
    harness_close(&h);
    safetensors_close(vectors);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_block_causal), cmocka_unit_test(test_one_block),
                                       cmocka_unit_test(test_keys_and_values)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
