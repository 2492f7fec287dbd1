/* A rank's weights: what is copied where, in every spelling of the experts, and every tensor that is refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/model/weights.h"
#include "tests/unit/host_backend.h"
#include "tests/unit/scratch.h"

#define CHECKPOINTS EPOCH_SOURCE "/tests/golden/vectors/checkpoints"
#define GOLDEN CHECKPOINTS "/llada2-tiny-bf16"
#define GOLDEN_F32 CHECKPOINTS "/llada2-tiny-fp32"
#define TINY EPOCH_SOURCE "/models/tiny"

typedef struct loaded {
    model_config config;
    sum_tree *tree;
    host_memory memory;
    backend backend;
    weight_rule rule;
    weights *w;
} loaded;

/* Opens config and weights of `dir` as `rank` of `ranks`. */
static status load(loaded *m, const char *dir, dtype matrices, int rank, int ranks)
{
    status st = OK;
    size_t limit = m->memory.limit;
    *m = (loaded){.memory.limit = limit};
    m->backend = host_backend(&m->memory);
    TRY(model_config_open(&m->config, dir));
    TRY(sum_tree_open(&m->tree, m->config.experts, m->config.groups, ranks));
    m->rule = (weight_rule){.matrices = matrices, .tree = m->tree, .rank = rank};
    TRY(weights_open(&m->w, &m->config, dir, &m->backend, &m->rule));
    assert_int_equal(m->w->bytes, weights_bytes(&m->config, &m->rule));
    assert_int_equal(m->w->bytes, m->memory.reserved);
    assert_int_equal(m->w->arena.used, m->memory.reserved);
out:
    return st;
}

static void unload(loaded *m)
{
    weights_close(m->w);
    assert_int_equal(m->memory.slabs, 0);
    sum_tree_close(m->tree);
    model_config_close(&m->config);
}

static float at(const tensor *t, int64_t row, int64_t col)
{
    assert_in_range(row, 0, t->rows - 1);
    assert_in_range(col, 0, t->cols - 1);
    return host_widen(t->type, (const char *)t->data + (size_t)(row * t->ld + col) * dtype_bytes(t->type));
}

/* Values read from the files by another program: of the F32 files, and of the BF16 ones, which are those rounded. */
static void check_golden(const weights *w, bool matrices_rounded, bool others_rounded)
{
    const layer_weights *l = w->layer;
#define SAME(rounded, tensor, row, col, bf16, f32) assert_true(at(&(tensor), row, col) == (rounded ? bf16##f : f32##f))
#define MATRIX(...) SAME(matrices_rounded, __VA_ARGS__)
#define OTHER(...) SAME(others_rounded, __VA_ARGS__)
    MATRIX(w->embed, 300, 63, -0x1.a8p-2, -0x1.a7f516p-2);
    MATRIX(w->head, 311, 1, 0x1.6ep-1, 0x1.6e455ap-1);
    MATRIX(l[1].qkv, 127, 5, -0x1.1ap-4, -0x1.193f4ep-4);
    MATRIX(l[0].gate_up, 128 + 2, 7, 0x1.eap-7, 0x1.e94c7p-7);
    MATRIX(l[2].shared_gate_up, 32 + 1, 2, 0x1.ccp-6, 0x1.cbca7ep-6);
    MATRIX(l[1].experts.gate_up, 5 * 64 + 3, 7, -0x1.1cp-5, -0x1.1cc2c8p-5);
    MATRIX(l[1].experts.gate_up, 5 * 64 + 32 + 3, 7, -0x1.9cp-7, -0x1.9cee2ap-7);
    MATRIX(l[1].experts.down, 5 * 64 + 60, 31, -0x1.0cp-4, -0x1.0cd89p-4);
    MATRIX(l[2].experts.gate_up, 15 * 64 + 32 + 31, 63, 0x1.04p-4, 0x1.04d94ep-4);
    OTHER(w->norm, 0, 17, 0x1.5ap+0, 0x1.59fe18p+0);
    OTHER(l[1].k_norm, 0, 3, 0x1.48p+0, 0x1.47940cp+0);
    OTHER(l[2].router, 9, 33, 0x1.7ap-4, 0x1.799244p-4);
    OTHER(l[2].router_bias, 0, 11, 0x1.037eb4p-5, 0x1.037eb4p-5); /* stored in F32 in both */
}

static bool lies_behind(const tensor *t, const tensor *next)
{
    size_t bytes = (size_t)(t->rows * t->ld) * dtype_bytes(t->type);
    return (const char *)next->data == (const char *)t->data + bytes && next->ld == t->ld && next->cols == t->cols;
}

static void test_real_values(void **state)
{
    (void)state;
    loaded m = {0};
    for (int k = 0; k < 2; k++) {
        dtype held = k ? F32 : BF16;
        assert_int_equal(load(&m, GOLDEN, held, 0, 1), OK);
        check_golden(m.w, true, true);
        assert_int_equal(m.w->embed.type, held);
        assert_int_equal(m.w->layer[1].experts.down.type, held);
        assert_int_equal(m.w->layer[1].router.type, F32);
        assert_int_equal(m.w->layer[1].input_norm.type, F32);
        assert_false(m.w->layer[0].sparse);
        assert_null(m.w->layer[0].router.data);
        assert_true(m.w->layer[1].sparse && m.w->layer[2].sparse);
        assert_null(m.w->layer[1].gate_up.data);
        for (int i = 1; i < 3; i++) { /* or no shared expert would ride (backend.h) */
            const layer_weights *l = &m.w->layer[i];
            assert_true(lies_behind(&l->experts.gate_up, &l->shared_gate_up));
            assert_true(lies_behind(&l->experts.down, &l->shared_down));
        }
        unload(&m);
        assert_int_equal(load(&m, GOLDEN_F32, held, 0, 1), OK);
        check_golden(m.w, held == BF16, false);
        unload(&m);
    }
    assert_int_equal(load(&m, TINY, BF16, 0, 1), OK);
    assert_true(at(&m.w->embed, 300, 63) == -1.0625f);
    assert_true(at(&m.w->layer[1].experts.gate_up, 5 * 128 + 64 + 3, 7) == 0x1.14p-4f);
    assert_true(at(&m.w->layer[2].experts.gate_up, 15 * 128 + 64 + 31, 63) == -0x1.e8p-5f);
    assert_true(at(&m.w->layer[2].router_bias, 0, 11) == 0x1.2d1f4ep-2f);
    unload(&m);
    weights_close(NULL);
}

static void test_ranks_share_the_experts(void **state)
{
    (void)state;
    static const int ranks_of[] = {1, 2, 3, 7, 16};
    loaded all = {0}, mine = {0};
    assert_int_equal(load(&all, GOLDEN, BF16, 0, 1), OK);
    for (size_t k = 0; k < sizeof ranks_of / sizeof *ranks_of; k++) {
        int next = 0;
        for (int rank = 0; rank < ranks_of[k]; rank++) {
            assert_int_equal(load(&mine, GOLDEN, BF16, rank, ranks_of[k]), OK);
            for (int l = 1; l < 3; l++) {
                const expert_set *e = &mine.w->layer[l].experts, *whole = &all.w->layer[l].experts;
                assert_int_equal(e->first, next);
                assert_int_equal(e->inner, 32);
                assert_int_equal(e->rank, rank);
                assert_ptr_equal(e->tree, mine.tree);
                tensor part = tensor_rows(&whole->gate_up, e->first * 64, e->count * 64);
                assert_int_equal(e->gate_up.rows, part.rows);
                assert_memory_equal(e->gate_up.data, part.data, (size_t)(part.rows * part.cols) * 2);
                part = tensor_rows(&whole->down, e->first * 64, e->count * 64);
                assert_memory_equal(e->down.data, part.data, (size_t)(part.rows * part.cols) * 2);
                assert_memory_equal(mine.w->layer[l].router.data, all.w->layer[l].router.data, 16 * 64 * 4);
            }
            assert_memory_equal(mine.w->head.data, all.w->head.data, 320 * 64 * 2);
            next += mine.w->layer[1].experts.count;
            unload(&mine);
        }
        assert_int_equal(next, 16);
    }
    unload(&all);
}

/* ---- checkpoints made from the golden one */

typedef struct edited {
    safetensors *from;
    stored_tensor t[200];
    char name[40][96]; /* of those added */
    void *owned[40];
    int count, added;
} edited;

static void edit_open(edited *e)
{
    *e = (edited){0};
    assert_int_equal(safetensors_open(&e->from, GOLDEN), OK);
    for (int i = 0; i < safetensors_count(e->from); i++)
        e->t[e->count++] = *safetensors_at(e->from, i);
}

static stored_tensor *edit_find(edited *e, const char *name)
{
    for (int i = 0; i < e->count; i++)
        if (strcmp(e->t[i].name, name) == 0)
            return &e->t[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

static void edit_drop(edited *e, const char *name)
{
    stored_tensor *t = edit_find(e, name);
    *t = e->t[--e->count];
}

/* Appends a tensor; `data` must come from malloc, or be NULL for zeros. */
static void edit_add(edited *e, const char *name, dtype type, int dims, const int64_t *shape, void *data)
{
    stored_tensor *t = &e->t[e->count];
    assert_true(e->added < 40);
    *t = (stored_tensor){.name = e->name[e->added], .type = type, .dims = dims, .bytes = dtype_bytes(type)};
    snprintf(e->name[e->added], sizeof e->name[0], "%s", name);
    for (int d = 0; d < dims; d++) {
        t->shape[d] = shape[d];
        t->bytes *= (size_t)shape[d];
    }
    t->data = e->owned[e->added++] = data ? data : calloc(1, t->bytes);
    e->count++;
}

/* Writes the checkpoint into the scratch folder, beside the golden config.json with `config` applied. */
static void edit_close(edited *e, const char *config)
{
    scratch_clear();
    scratch_config(GOLDEN, config);
    scratch_tensors("model.safetensors", e->t, e->count);
    for (int i = 0; i < e->added; i++)
        free(e->owned[i]);
    safetensors_close(e->from);
}

/* Joins the golden per-expert matrices of layer l into one [16, parts * rows, cols] under `name`. */
static void join(edited *e, int l, const char *name, int parts, const char *const *part, int64_t rows, int64_t cols)
{
    const size_t bytes = (size_t)(rows * cols) * 2;
    char *data = malloc(16 * (size_t)parts * bytes), full[96];
    for (int id = 0; id < 16; id++)
        for (int p = 0; p < parts; p++) {
            snprintf(full, sizeof full, "model.layers.%d.mlp.experts.%d.%s_proj.weight", l, id, part[p]);
            memcpy(data + (size_t)(id * parts + p) * bytes, edit_find(e, full)->data, bytes);
            edit_drop(e, full);
        }
    snprintf(full, sizeof full, "model.layers.%d.mlp.%s", l, name);
    edit_add(e, full, BF16, 3, (const int64_t[]){16, parts * rows, cols}, data);
}

static void write_merged(void)
{
    static const char *const gate_up[] = {"gate", "up"}, *const down[] = {"down"};
    static edited e;
    edit_open(&e);
    for (int l = 1; l < 3; l++) {
        join(&e, l, "w1", 2, gate_up, 32, 64);
        join(&e, l, "w2", 1, down, 64, 32);
    }
    edit_find(&e, "model.layers.1.mlp.gate.expert_bias")->name = "model.layers.1.mlp.gate.e_score_correction_bias";
    edit_add(&e, "model.layers.1.attention.rotary_emb.inv_freq", F32, 1, (const int64_t[]){4}, NULL);
    edit_close(&e, "{}");
}

static void write_stacked(void)
{
    static const char *const gate[] = {"gate"}, *const up[] = {"up"}, *const down[] = {"down"};
    static edited e;
    edit_open(&e);
    join(&e, 1, "experts.gate_proj", 1, gate, 32, 64); /* layer 2 keeps the per-expert spelling */
    join(&e, 1, "experts.up_proj", 1, up, 32, 64);
    join(&e, 1, "experts.down_proj", 1, down, 64, 32);
    edit_close(&e, "{}");
}

static void test_spellings(void **state)
{
    (void)state;
    loaded plain = {0}, other = {0};
    for (int spelling = 0; spelling < 2; spelling++) {
        if (spelling == 0)
            write_merged();
        else
            write_stacked();
        for (int ranks = 1; ranks <= 3; ranks++)
            for (int rank = 0; rank < ranks; rank++) {
                assert_int_equal(load(&plain, GOLDEN, BF16, rank, ranks), OK);
                if (load(&other, scratch_dir, BF16, rank, ranks) != OK)
                    fail_msg("%s", status_message());
                assert_int_equal(plain.w->bytes, other.w->bytes);
                assert_memory_equal(plain.w->arena.slab, other.w->arena.slab, plain.w->bytes);
                unload(&plain);
                unload(&other);
            }
    }
}

static void test_config_variants(void **state)
{
    (void)state;
    static edited e;
    loaded m = {0};

    edit_open(&e);
    edit_drop(&e, "lm_head.weight");
    edit_close(&e, "{\"tie_word_embeddings\": true}");
    assert_int_equal(load(&m, scratch_dir, BF16, 0, 1), OK);
    assert_ptr_equal(m.w->head.data, m.w->embed.data);
    assert_int_equal(m.w->head.rows, 320);
    unload(&m);

    edit_open(&e);
    for (int l = 0; l < 3; l++) {
        char name[96];
        snprintf(name, sizeof name, "model.layers.%d.attention.query_layernorm.weight", l);
        edit_drop(&e, name);
        snprintf(name, sizeof name, "model.layers.%d.attention.key_layernorm.weight", l);
        edit_drop(&e, name);
    }
    edit_drop(&e, "model.layers.1.mlp.gate.expert_bias");
    edit_drop(&e, "model.layers.2.mlp.gate.expert_bias");
    edit_close(&e, "{\"use_qk_norm\": false, \"moe_router_enable_expert_bias\": false}");
    assert_int_equal(load(&m, scratch_dir, BF16, 0, 2), OK);
    assert_null(m.w->layer[1].q_norm.data);
    assert_null(m.w->layer[1].k_norm.data);
    for (int i = 0; i < 16; i++)
        assert_true(at(&m.w->layer[2].router_bias, 0, i) == 0);
    unload(&m);

    edit_open(&e);
    for (int l = 1; l < 3; l++)
        for (int p = 0; p < 3; p++) {
            char name[96];
            snprintf(name, sizeof name, "model.layers.%d.mlp.shared_experts.%s_proj.weight", l,
                     p == 0   ? "gate"
                     : p == 1 ? "up"
                              : "down");
            edit_drop(&e, name);
        }
    edit_close(&e, "{\"num_shared_experts\": 0}");
    assert_int_equal(load(&m, scratch_dir, BF16, 0, 1), OK);
    assert_null(m.w->layer[1].shared_gate_up.data);
    assert_null(m.w->layer[1].shared_down.data);
    unload(&m);
}

/* F16 matrices among the BF16 ones are widened like any other. */
static void test_mixed_dtypes(void **state)
{
    (void)state;
    static edited e;
    loaded m = {0};
    uint16_t *half = calloc(64 * 64, 2);
    half[0] = 0x3c01; /* 1 + 2^-10 */
    half[1] = 0x8001; /* -2^-24 */
    edit_open(&e);
    edit_drop(&e, "model.layers.0.attention.dense.weight");
    edit_add(&e, "model.layers.0.attention.dense.weight", F16, 2, (const int64_t[]){64, 64}, half);
    edit_close(&e, "{}");
    assert_int_equal(load(&m, scratch_dir, F32, 0, 1), OK);
    assert_true(at(&m.w->layer[0].out, 0, 0) == 0x1.004p+0f);
    assert_true(at(&m.w->layer[0].out, 0, 1) == -0x1p-24f);
    unload(&m);
}

static void refuse(const char *message)
{
    loaded m = {0};
    status st = load(&m, scratch_dir, BF16, 0, 2);
    if (st != BAD_INPUT || m.w || !strstr(status_message(), message))
        fail_msg("want %s: status %d, %s", message, st, status_message());
    assert_int_equal(m.memory.uploads, 0); /* checked before anything is copied */
    assert_int_equal(m.memory.reserved, 0);
    unload(&m);
}

static const struct {
    const char *name;
    int dims;
    int64_t shape[3];
    const char *message;
} bad_shape[] = {
    {"model.word_embeddings.weight", 2, {319, 64}, "is [319,64], want [320,64] (vocab_size in config.json) ["},
    {"lm_head.weight", 2, {320, 32}, "is [320,32], want [320,64] (hidden_size in config.json) ["},
    {"model.norm.weight", 1, {65}, "is [65], want [64] (hidden_size in config.json) ["},
    {"model.layers.2.input_layernorm.weight", 2, {1, 64}, "is [1,64], want [64] (hidden_size in config.json) ["},
    {"model.layers.0.attention.query_key_value.weight",
     2,
     {192, 64},
     "is [192,64], want [128,64] (num_attention_heads, num_key_value_heads, head_dim in config.json) ["},
    {"model.layers.1.attention.dense.weight",
     2,
     {64, 32},
     "is [64,32], want [64,64] (num_attention_heads, head_dim in config.json) ["},
    {"model.layers.1.attention.key_layernorm.weight", 1, {8}, "is [8], want [16] (head_dim in config.json) ["},
    {"model.layers.0.mlp.down_proj.weight",
     2,
     {64, 64},
     "is [64,64], want [64,128] (intermediate_size in config.json) ["},
    {"model.layers.1.mlp.gate.weight", 2, {8, 64}, "is [8,64], want [16,64] (num_experts in config.json) ["},
    {"model.layers.1.mlp.gate.expert_bias", 1, {8}, "is [8], want [16] (num_experts in config.json) ["},
    {"model.layers.2.mlp.shared_experts.up_proj.weight",
     2,
     {64, 64},
     "is [64,64], want [32,64] (num_shared_experts, moe_intermediate_size in config.json) ["},
    {"model.layers.2.mlp.experts.15.down_proj.weight",
     2,
     {64, 16}, /* of another rank, too */
     "is [64,16], want [64,32] (moe_intermediate_size in config.json) ["},
    {"model.layers.1.mlp.experts.0.up_proj.weight",
     1,
     {2048},
     "is [2048], want [32,64] (moe_intermediate_size, hidden_size in config.json) ["},
};

static void test_refused(void **state)
{
    (void)state;
    static edited e;
    char message[256];
    for (size_t i = 0; i < sizeof bad_shape / sizeof *bad_shape; i++) {
        edit_open(&e);
        edit_drop(&e, bad_shape[i].name);
        edit_add(&e, bad_shape[i].name, BF16, bad_shape[i].dims, bad_shape[i].shape, NULL);
        edit_close(&e, "{}");
        snprintf(message, sizeof message, "model.safetensors: tensor \"%s\" %s", bad_shape[i].name,
                 bad_shape[i].message);
        refuse(message);
    }
    write_merged();
    scratch_config(GOLDEN, "{\"moe_intermediate_size\": 16}");
    refuse("is [32,64], want [16,64] (num_shared_experts, moe_intermediate_size in config.json)");
    scratch_config(GOLDEN, "{\"moe_intermediate_size\": 16, \"num_shared_experts\": 2}");
    refuse(
        "model.safetensors: tensor \"model.layers.1.mlp.w1\" is [16,64,64], want [16,32,64] (moe_intermediate_size in");
    write_stacked();
    scratch_config(GOLDEN, "{\"moe_intermediate_size\": 16, \"num_shared_experts\": 2}");
    refuse("tensor \"model.layers.1.mlp.experts.gate_proj\" is [16,32,64], want [16,16,64] (moe_intermediate_size in");

    edit_open(&e);
    edit_drop(&e, "model.norm.weight");
    edit_add(&e, "model.norm.weight", I32, 1, (const int64_t[]){64}, NULL);
    edit_close(&e, "{}");
    refuse("model.safetensors: tensor \"model.norm.weight\" is I32, want F32, F16 or BF16");

    edit_open(&e);
    edit_drop(&e, "model.norm.weight");
    edit_close(&e, "{}");
    refuse(": tensor \"model.norm.weight\" is missing");
    scratch_config(GOLDEN, "{\"tie_word_embeddings\": true}");
    refuse(": tensor \"model.norm.weight\" is missing");

    edit_open(&e);
    edit_drop(&e, "model.word_embeddings.weight");
    edit_drop(&e, "model.layers.2.mlp.experts.3.up_proj.weight");
    edit_close(&e, "{}");
    refuse(": tensors \"model.word_embeddings.weight\", \"model.layers.2.mlp.experts.3.up_proj.weight\" are missing");

    edit_open(&e);
    edit_close(&e, "{\"num_hidden_layers\": 4}");
    refuse(": tensors \"model.layers.3.input_layernorm.weight\", \"model.layers.3.attention.query_key_value.weight\", "
           "\"model.layers.3.attention.query_layernorm.weight\" and 56 more are missing");
    scratch_config(GOLDEN, "{\"num_hidden_layers\": 2}");
    refuse("model.safetensors: tensor \"model.layers.2.attention.dense.weight\" is not part of the model that "
           "config.json");
    scratch_config(GOLDEN, "{\"tie_word_embeddings\": true}");
    refuse("tensor \"lm_head.weight\" is not part of the model");
    scratch_config(GOLDEN, "{\"use_qk_norm\": false}");
    refuse("attention.key_layernorm.weight\" is not part of the model");
    scratch_config(GOLDEN, "{\"moe_router_enable_expert_bias\": false}");
    refuse("tensor \"model.layers.1.mlp.gate.expert_bias\" is not part of the model");

    edit_open(&e);
    edit_add(&e, "model.layers.0.attention.dense.bias", BF16, 1, (const int64_t[]){64}, NULL);
    edit_close(&e, "{}");
    refuse("tensor \"model.layers.0.attention.dense.bias\" is not part of the model");

    scratch_clear();
    scratch_config(GOLDEN, "{}");
    refuse("neither model.safetensors nor");
}

static void test_no_room(void **state)
{
    (void)state;
    loaded m = {.memory.limit = 100000};
    assert_int_equal(load(&m, GOLDEN, BF16, 1, 2), FAILED);
    assert_null(m.w);
    char message[160];
    snprintf(message, sizeof message,
             "weights: no room for this rank's %zu bytes (on more ranks each holds fewer experts): no room for",
             weights_bytes(&m.config, &m.rule));
    assert_non_null(strstr(status_message(), message));
    assert_int_equal(weights_random(&m.w, &m.config, &m.backend, &m.rule, 1, 0), FAILED);
    assert_null(m.w);
    assert_non_null(strstr(status_message(), "(more ranks share them; --layers takes fewer): no room for"));
    unload(&m);
}

static void test_dtype(void **state)
{
    (void)state;
    dtype type;
    assert_int_equal(weights_dtype(&type, GOLDEN), OK);
    assert_int_equal(type, BF16);
    assert_int_equal(weights_dtype(&type, GOLDEN_F32), OK);
    assert_int_equal(type, F32);
    assert_int_equal(weights_dtype(&type, TINY), OK);
    assert_int_equal(type, BF16);

    static const char zeros[64];
    const stored_tensor t[3] = {{.name = "a", .type = F16, .dims = 2, .shape = {2, 4}, .data = zeros, .bytes = 16},
                                {.name = "b", .type = F32, .dims = 1, .shape = {16}, .data = zeros, .bytes = 64},
                                {.name = "c", .type = BF16, .dims = 2, .shape = {1, 4}, .data = zeros, .bytes = 8}};
    scratch_clear();
    scratch_tensors("model.safetensors", t, 3);
    assert_int_equal(weights_dtype(&type, scratch_dir), OK);
    assert_int_equal(type, F16);
    scratch_tensors("model.safetensors", t + 1, 1);
    assert_int_equal(weights_dtype(&type, scratch_dir), BAD_INPUT);
    assert_non_null(strstr(status_message(), ": no matrix in F32, F16 or BF16"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_real_values),  cmocka_unit_test(test_ranks_share_the_experts),
        cmocka_unit_test(test_spellings),    cmocka_unit_test(test_config_variants),
        cmocka_unit_test(test_mixed_dtypes), cmocka_unit_test(test_refused),
        cmocka_unit_test(test_no_room),      cmocka_unit_test(test_dtype)};
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
