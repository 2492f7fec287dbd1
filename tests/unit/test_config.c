/* config.json: what is read, what is taken where it is silent, and what is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/model/config.h"
#include "tests/unit/scratch.h"

#define GOLDEN EPOCH_SOURCE "/tests/golden/vectors/checkpoints/llada2-tiny-bf16"

static void test_real_files(void **state)
{
    (void)state;
    model_config c;
    assert_int_equal(model_config_open(&c, GOLDEN), OK);
    assert_int_equal(c.layers, 3);
    assert_int_equal(c.hidden, 64);
    assert_int_equal(c.vocab, 320);
    assert_int_equal(c.max_positions, 512);
    assert_int_equal(c.heads, 4);
    assert_int_equal(c.kv_heads, 2);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.rotary_dim, 8);
    assert_true(c.rope_theta == 600000 && c.norm_eps == 1e-6f);
    assert_true(c.qk_norm);
    assert_int_equal(c.dense_layers, 1);
    assert_int_equal(c.dense_inner, 128);
    assert_int_equal(c.experts, 16);
    assert_int_equal(c.top_k, 4);
    assert_int_equal(c.expert_inner, 32);
    assert_int_equal(c.shared_inner, 32);
    assert_int_equal(c.groups, 4);
    assert_int_equal(c.top_groups, 2);
    assert_true(c.routed_scale == 2.5f && c.normalise && c.expert_bias && !c.tied_head);
    assert_int_equal(c.eos_id, -1);
    assert_int_equal(c.mask_id, -1);
    assert_int_equal(c.block_size, 0);
    assert_non_null(strstr(c.json, "\"num_experts\": 16,\n"));
    model_config_close(&c);
    assert_null(c.json);
    assert_int_equal(model_config_open(&c, EPOCH_SOURCE "/models/tiny"), OK);
    assert_int_equal(c.eos_id, 1521);
    assert_int_equal(c.mask_id, 1522);
    assert_int_equal(c.block_size, 32);
    assert_int_equal(c.experts, 32);
    assert_int_equal(c.rotary_dim, 16);
    assert_true(c.rope_theta == 10000);
    model_config_close(&c);
}

static void test_defaults(void **state)
{
    (void)state;
    static const char text[] =
        "{\"model_type\": \"llada2_moe\", \"num_key_value_heads\": 4, \"moe_intermediate_size\": 512}";
    model_config c;
    scratch_write("config.json", text, sizeof text - 1);
    assert_int_equal(model_config_open(&c, scratch_dir), OK);
    assert_int_equal(c.layers, 24);
    assert_int_equal(c.hidden, 1024);
    assert_int_equal(c.vocab, 30592);
    assert_int_equal(c.max_positions, 16384);
    assert_int_equal(c.heads, 16);
    assert_int_equal(c.head_dim, 64);
    assert_int_equal(c.rotary_dim, 32);
    assert_true(c.rope_theta == 10000 && c.norm_eps == 1e-5f && c.routed_scale == 2.5f);
    assert_int_equal(c.dense_layers, 0);
    assert_int_equal(c.experts, 16);
    assert_int_equal(c.top_k, 2);
    assert_int_equal(c.shared_inner, 0);
    assert_int_equal(c.groups, 8);
    assert_int_equal(c.top_groups, 4);
    assert_true(c.qk_norm && c.normalise && c.expert_bias && !c.tied_head);
    assert_string_equal(c.json, text);
    model_config_close(&c);
}

static model_config accept(const char *edits)
{
    model_config c;
    scratch_config(GOLDEN, edits);
    if (model_config_open(&c, scratch_dir) != OK)
        fail_msg("%s: %s", edits, status_message());
    free(c.json);
    return c;
}

static void test_accepted(void **state)
{
    (void)state;
    assert_int_equal(accept("{\"model_type\": \"llada2_moe_veomni\"}").hidden, 64);
    assert_true(accept("{\"tie_word_embeddings\": true}").tied_head);
    assert_false(accept("{\"use_qk_norm\": false}").qk_norm);
    assert_false(accept("{\"norm_topk_prob\": false}").normalise);
    assert_false(accept("{\"num_experts_per_tok\": 1}").normalise);
    assert_false(accept("{\"moe_router_enable_expert_bias\": false}").expert_bias);
    assert_int_equal(accept("{\"num_shared_experts\": null}").shared_inner, 0);
    assert_int_equal(accept("{\"num_shared_experts\": 2}").shared_inner, 64);
    assert_int_equal(accept("{\"head_dim\": null}").head_dim, 16);
    assert_int_equal(accept("{\"num_experts_per_tok\": 8}").top_k, 8); /* all the experts of two groups of four */
    assert_int_equal(accept("{\"sliding_window\": 4096, \"use_sliding_window\": true}").hidden, 64);
    assert_int_equal(accept("{\"use_bias\": \"-\", \"eos_token_id\": 0, \"mask_token_id\": 319}").mask_id, 319);
    assert_int_equal(accept("{\"block_length\": 32}").block_size, 32);
    assert_int_equal(accept("{\"first_k_dense_replace\": 0, \"intermediate_size\": \"-\"}").dense_inner, 0);

    assert_int_equal(accept("{\"rotary_dim\": \"-\"}").rotary_dim, 8);
    assert_int_equal(accept("{\"rotary_dim\": 12, \"partial_rotary_factor\": \"-\"}").rotary_dim, 12);
    assert_int_equal(accept("{\"rotary_dim\": 16, \"partial_rotary_factor\": 1}").rotary_dim, 16);
    model_config c =
        accept("{\"rope_theta\": \"-\", \"partial_rotary_factor\": \"-\", \"rotary_dim\": null, \"rope_parameters\": "
               "{\"rope_type\": \"default\", \"rope_theta\": 5000, \"partial_rotary_factor\": 0.25}}");
    assert_int_equal(c.rotary_dim, 4);
    assert_true(c.rope_theta == 5000);
    c = accept("{\"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 600000.0}}");
    assert_true(c.rope_theta == 600000 && c.rotary_dim == 8);
    assert_true(accept("{\"rope_scaling\": {\"type\": \"default\"}}").rope_theta == 600000);
}

static const struct {
    const char *edits, *message;
} refused[] = {
    {"{\"model_type\": \"-\"}", "\"model_type\" is missing, want \"llada2_moe\""},
    {"{\"model_type\": null}", "\"model_type\" is missing"},
    {"{\"model_type\": \"llama\"}", "\"model_type\" is \"llama\", want \"llada2_moe\" or \"llada2_moe_veomni\""},
    {"{\"model_type\": \"llada\"}",
     "\"llada\" with num_experts: LLaDA-MoE (one bidirectional canvas) is not supported yet"},
    {"{\"model_type\": \"lladamoe\"}", "\"lladamoe\" with num_experts: LLaDA-MoE"},
    {"{\"model_type\": \"llada\", \"num_experts\": \"-\"}", "\"model_type\" is \"llada\", want \"llada2_moe\" or"},
    {"{\"hidden_act\": \"gelu\"}", "\"hidden_act\" is \"gelu\", want \"silu\""},
    {"{\"score_function\": \"softmax\"}", "\"score_function\" is \"softmax\", want \"sigmoid\""},
    {"{\"router_dtype\": \"bf16\"}", "\"router_dtype\" is \"bf16\", want \"fp32\""},
    {"{\"router_dtype\": null}", "\"router_dtype\" is null, want a value"},
    {"{\"use_bias\": true}", "\"use_bias\" is true, want false"},
    {"{\"use_qkv_bias\": true}", "\"use_qkv_bias\" is true, want false"},
    {"{\"attention_bias\": true}", "\"attention_bias\" is true, want false"},
    {"{\"norm_head\": true}", "\"norm_head\" is true, want false"},
    {"{\"quantization_config\": {}}", "\"quantization_config\" is set: want weights in F32, F16 or BF16"},
    {"{\"num_experts\": \"16\"}", "\"num_experts\" is a string, want an integer"},
    {"{\"num_experts\": 2048}", "\"num_experts\" is 2048, want 1 to 1024"},
    {"{\"num_experts\": 0}", "\"num_experts\" is 0, want 1 to 1024"},
    {"{\"n_group\": null}", "\"n_group\" is null, want a value"},
    {"{\"num_key_value_heads\": \"-\"}", "\"num_key_value_heads\" is missing"},
    {"{\"moe_intermediate_size\": \"-\"}", "\"moe_intermediate_size\" is missing"},
    {"{\"intermediate_size\": \"-\"}", "\"intermediate_size\" is missing"},
    {"{\"num_key_value_heads\": 3}", "\"num_attention_heads\" is 4, want a multiple of num_key_value_heads 3"},
    {"{\"first_k_dense_replace\": 3}", "\"first_k_dense_replace\" is 3, want less than num_hidden_layers 3"},
    {"{\"n_group\": 3}", "\"n_group\" is 3, want a divisor of num_experts 16"},
    {"{\"topk_group\": 5}", "\"topk_group\" is 5, want at most n_group 4"},
    {"{\"num_experts_per_tok\": 9}", "\"num_experts_per_tok\" is 9, want at most the 8 experts of 2 of 4 groups"},
    {"{\"head_dim\": \"-\", \"num_attention_heads\": 6}",
     "\"head_dim\" is missing, and hidden_size 64 is no multiple of"},
    {"{\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4}}",
     "\"rope_scaling\" has rope_type \"yarn\", want null or \"default\""},
    {"{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 4}}", "\"rope_scaling\" has rope_type \"linear\""},
    {"{\"rope_scaling\": {\"factor\": 4}}", "\"rope_scaling\" holds \"factor\", which is not supported"},
    {"{\"rope_scaling\": 4}", "\"rope_scaling\" is neither null nor an object"},
    {"{\"rope_parameters\": {\"rope_type\": \"llama3\"}}", "\"rope_parameters\" has rope_type \"llama3\""},
    {"{\"rope_parameters\": {\"rope_type\": 1}}", "rope_parameters: \"rope_type\" is an integer, want a string"},
    {"{\"rope_parameters\": {\"rope_theta\": 10000}}", "\"rope_theta\" is 600000, but 10000 in \"rope_parameters\""},
    {"{\"rope_parameters\": {\"partial_rotary_factor\": 1}}",
     "\"partial_rotary_factor\" is 0.5, but 1 in \"rope_parameters\""},
    {"{\"rope_theta\": -1}", "\"rope_theta\" is -1, want a number above 0"},
    {"{\"rope_theta\": null}", "\"rope_theta\" is null, want a value"},
    {"{\"rms_norm_eps\": 0}", "\"rms_norm_eps\" is 0, want a number above 0"},
    {"{\"routed_scaling_factor\": 1e300}",
     "\"routed_scaling_factor\" is 1e+300, want a number above 0 that fp32 can hold"},
    {"{\"rotary_dim\": 16}", "\"rotary_dim\" is 16, but head_dim 16 times partial_rotary_factor 0.5 is 8"},
    {"{\"partial_rotary_factor\": 1.5}", "\"partial_rotary_factor\" is 1.5, want at most 1"},
    {"{\"rotary_dim\": \"-\", \"partial_rotary_factor\": 0.2}", "3 numbers of a head are rotated"},
    {"{\"rotary_dim\": 18}", "\"rotary_dim\" is 18, want 2 to 16"},
    {"{\"norm_topk_prob\": 1}", "\"norm_topk_prob\" is an integer, want true or false"},
    {"{\"eos_token_id\": 320}", "\"eos_token_id\" is 320, want 0 to 319"},
    {"{\"mask_token_id\": -1}", "\"mask_token_id\" is -1, want 0 to 319"},
    {"{\"block_length\": 0}", "\"block_length\" is 0, want 1 to 512"},
};

static void test_refused(void **state)
{
    (void)state;
    model_config c;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        scratch_config(GOLDEN, refused[i].edits);
        assert_int_equal(model_config_open(&c, scratch_dir), BAD_INPUT);
        if (!strstr(status_message(), refused[i].message) || !strstr(status_message(), "/config.json: "))
            fail_msg("%s: %s", refused[i].edits, status_message());
        assert_null(c.json);
    }
    assert_int_equal(model_config_open(&c, EPOCH_SOURCE "/tests/golden/vectors/checkpoints/llada_moe-tiny-bf16"),
                     BAD_INPUT);
    assert_non_null(strstr(status_message(), "LLaDA-MoE"));
}

static void refuse_file(const char *dir, const char *message)
{
    model_config c;
    assert_int_equal(model_config_open(&c, dir), BAD_INPUT);
    if (!strstr(status_message(), message))
        fail_msg("want %s: %s", message, status_message());
}

static void test_damaged_files(void **state)
{
    (void)state;
    scratch_clear();
    refuse_file(scratch_dir, "config.json: No such file");
    scratch_write("config.json", "{\"a\": 1,\n}", 10);
    refuse_file(scratch_dir, "config.json:2:1: not JSON");
    scratch_write("config.json", "[1]", 3);
    refuse_file(scratch_dir, "config.json: want a JSON object");
    char *big = calloc(1, (1 << 20) + 1);
    memset(big, ' ', (1 << 20) + 1);
    scratch_write("config.json", big, (1 << 20) + 1);
    free(big);
    refuse_file(scratch_dir, "config.json: more than 1048576 bytes");
    remove(scratch_path("config.json"));
    assert_int_equal(mkdir(scratch_path("config.json"), 0700), 0);
    refuse_file(scratch_dir, "config.json: cannot be read: Is a directory");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_real_files), cmocka_unit_test(test_defaults),
                                       cmocka_unit_test(test_accepted), cmocka_unit_test(test_refused),
                                       cmocka_unit_test(test_damaged_files)};
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
