#include "src/model/config.h"

#include "src/base/json.h"
#include "src/base/sum_tree.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REQUIRED = INT32_MIN, FILE_MOST = 1 << 20 };

/* The sizes. The upper ends keep every product of them inside 64 bits. */
static const struct {
    const char *key;
    size_t at;
    int32_t fallback, low, high;
} sizes[] = {
    {"num_hidden_layers", offsetof(model_config, layers), 24, 1, 1024},
    {"hidden_size", offsetof(model_config, hidden), 1024, 1, 1 << 18},
    {"vocab_size", offsetof(model_config, vocab), 30592, 1, 1 << 24},
    {"max_position_embeddings", offsetof(model_config, max_positions), 16384, 1, 1 << 30},
    {"num_attention_heads", offsetof(model_config, heads), 16, 1, 1024},
    {"num_key_value_heads", offsetof(model_config, kv_heads), REQUIRED, 1, 1024},
    {"first_k_dense_replace", offsetof(model_config, dense_layers), 0, 0, 1024},
    {"num_experts", offsetof(model_config, experts), 16, 1, SUM_TREE_EXPERTS},
    {"num_experts_per_tok", offsetof(model_config, top_k), 2, 1, SUM_TREE_EXPERTS},
    {"moe_intermediate_size", offsetof(model_config, expert_inner), REQUIRED, 1, 1 << 18},
    {"n_group", offsetof(model_config, groups), 8, 1, SUM_TREE_EXPERTS},
    {"topk_group", offsetof(model_config, top_groups), 4, 1, SUM_TREE_EXPERTS},
};

/* Keys with one supported value; absent means that value. (use_bias is true by default in the class, but a bias would
 * be a tensor of its own, which the loader refuses by name.) */
static const struct {
    const char *key, *want;
} texts[] = {{"hidden_act", "silu"}, {"score_function", "sigmoid"}, {"router_dtype", "fp32"}};
static const char *const false_only[] = {"use_bias", "use_qkv_bias", "attention_bias", "norm_head"};

static const char *const never_null[] = {"rope_theta",
                                         "partial_rotary_factor",
                                         "rms_norm_eps",
                                         "routed_scaling_factor",
                                         "norm_topk_prob",
                                         "use_qk_norm",
                                         "tie_word_embeddings",
                                         "hidden_act",
                                         "moe_router_enable_expert_bias",
                                         "score_function",
                                         "router_dtype",
                                         "model_type"};

/* The whole file as text. Owned by the caller. */
static status read_text(char **out, size_t *length, const char *path)
{
    status st = OK;
    char *text = malloc(FILE_MOST + 1);
    FILE *f = fopen(path, "rb");
    if (!text)
        FAIL(FAILED, "out of memory");
    if (!f)
        FAIL(BAD_INPUT, "%s: %s; want a folder that holds a model's config.json", path, strerror(errno));
    *length = fread(text, 1, FILE_MOST + 1, f);
    if (ferror(f))
        FAIL(BAD_INPUT, "%s: cannot be read: %s", path, strerror(errno));
    if (*length > FILE_MOST)
        FAIL(BAD_INPUT, "%s: more than %d bytes: not the configuration of a model", path, FILE_MOST);
    text[*length] = '\0';
    *out = text;
    text = NULL;
out:
    free(text);
    if (f)
        fclose(f);
    return st;
}

static status not_null(const json_t *doc, const char *key, const char *where)
{
    status st = OK;
    if (json_is_null(json_object_get(doc, key)))
        FAIL(BAD_INPUT, "%s: \"%s\" is null, want a value", where, key);
out:
    return st;
}

static status read_size(int32_t *out, const json_t *doc, const char *key, int32_t fallback, int32_t low, int32_t high,
                        const char *where)
{
    status st = OK;
    int64_t v;
    *out = fallback;
    TRY(json_int(&v, doc, key, fallback, low, high, where));
    if (v == REQUIRED)
        FAIL(BAD_INPUT, "%s: \"%s\" is missing", where, key);
    *out = (int32_t)v;
out:
    return st;
}

static status read_positive(double *out, const json_t *doc, const char *key, double fallback, const char *where)
{
    status st = OK;
    TRY(json_double(out, doc, key, fallback, where));
    if (!(*out > 0) || !isfinite((float)*out))
        FAIL(BAD_INPUT, "%s: \"%s\" is %g, want a number above 0 that fp32 can hold", where, key, *out);
out:
    return st;
}

static status check_family(const json_t *doc, const char *where)
{
    status st = OK;
    const char *type;
    bool moe = json_is_integer(json_object_get(doc, "num_experts"));
    TRY(json_text(&type, doc, "model_type", NULL, where));
    if (!type)
        FAIL(BAD_INPUT, "%s: \"model_type\" is missing, want \"llada2_moe\"", where);
    if (moe && (strcmp(type, "llada") == 0 || strcmp(type, "lladamoe") == 0))
        FAIL(BAD_INPUT,
             "%s: \"model_type\" is \"%s\" with num_experts: LLaDA-MoE (one bidirectional canvas) is not "
             "supported yet, want \"llada2_moe\"",
             where, type);
    if (strcmp(type, "llada2_moe") != 0 && strcmp(type, "llada2_moe_veomni") != 0)
        FAIL(BAD_INPUT, "%s: \"model_type\" is \"%s\", want \"llada2_moe\" or \"llada2_moe_veomni\"", where, type);
out:
    return st;
}

/* The newer spelling of the rotary keys: an object of type "default" that may repeat the flat keys, but not differ. */
static status merge_rope(const json_t *doc, const char *key, double *theta, double *factor, const char *where)
{
    status st = OK;
    const json_t *rope = json_object_get(doc, key), *v;
    const char *inner, *type;
    char place[1024];
    if (!rope || json_is_null(rope))
        return OK;
    if (!json_is_object(rope))
        FAIL(BAD_INPUT, "%s: \"%s\" is neither null nor an object", where, key);
    snprintf(place, sizeof place, "%s: %s", where, key);
    TRY(json_text(&type, rope, "type", "default", place));
    TRY(json_text(&type, rope, "rope_type", type, place));
    if (strcmp(type, "default") != 0)
        FAIL(BAD_INPUT, "%s: \"%s\" has rope_type \"%s\", want null or \"default\"", where, key, type);
    json_object_foreach((json_t *)rope, inner, v)
    {
        double *flat = strcmp(inner, "rope_theta") == 0              ? theta
                       : strcmp(inner, "partial_rotary_factor") == 0 ? factor
                                                                     : NULL;
        double nested;
        if (strcmp(inner, "type") == 0 || strcmp(inner, "rope_type") == 0)
            continue;
        if (!flat)
            FAIL(BAD_INPUT, "%s: \"%s\" holds \"%s\", which is not supported", where, key, inner);
        TRY(read_positive(&nested, rope, inner, 0, place));
        if (*flat != 0 && *flat != nested)
            FAIL(BAD_INPUT, "%s: \"%s\" is %g, but %g in \"%s\"", where, inner, *flat, nested, key);
        *flat = nested;
    }
out:
    return st;
}

static status read_rotary(model_config *c, const json_t *doc, const char *where)
{
    status st = OK;
    double theta = 0, factor = 0; /* 0: not said */
    int32_t rotary;
    if (json_object_get(doc, "rope_theta"))
        TRY(read_positive(&theta, doc, "rope_theta", 0, where));
    if (json_object_get(doc, "partial_rotary_factor"))
        TRY(read_positive(&factor, doc, "partial_rotary_factor", 0, where));
    TRY(merge_rope(doc, "rope_scaling", &theta, &factor, where));
    TRY(merge_rope(doc, "rope_parameters", &theta, &factor, where));
    TRY(read_size(&rotary, doc, "rotary_dim", 0, 2, c->head_dim, where));
    if (factor > 1)
        FAIL(BAD_INPUT, "%s: \"partial_rotary_factor\" is %g, want at most 1", where, factor);
    c->rope_theta = (float)(theta != 0 ? theta : 10000);
    c->rotary_dim = rotary;
    if (factor != 0 || rotary == 0) {
        c->rotary_dim = (int32_t)(c->head_dim * (factor != 0 ? factor : 0.5));
        if (rotary != 0 && rotary != c->rotary_dim)
            FAIL(BAD_INPUT, "%s: \"rotary_dim\" is %d, but head_dim %d times partial_rotary_factor %g is %d", where,
                 rotary, c->head_dim, factor, c->rotary_dim);
    }
    if (c->rotary_dim < 2 || c->rotary_dim % 2 != 0)
        FAIL(BAD_INPUT,
             "%s: %d numbers of a head are rotated (head_dim, partial_rotary_factor), want an even number "
             "from 2",
             where, c->rotary_dim);
out:
    return st;
}

static status check_sizes(const model_config *c, const char *where)
{
    status st = OK;
    if (c->heads % c->kv_heads != 0)
        FAIL(BAD_INPUT, "%s: \"num_attention_heads\" is %d, want a multiple of num_key_value_heads %d", where, c->heads,
             c->kv_heads);
    if (c->dense_layers >= c->layers)
        FAIL(BAD_INPUT,
             "%s: \"first_k_dense_replace\" is %d, want less than num_hidden_layers %d: a model without "
             "sparse layers is not supported",
             where, c->dense_layers, c->layers);
    if (c->experts % c->groups != 0)
        FAIL(BAD_INPUT, "%s: \"n_group\" is %d, want a divisor of num_experts %d", where, c->groups, c->experts);
    if (c->top_groups > c->groups)
        FAIL(BAD_INPUT, "%s: \"topk_group\" is %d, want at most n_group %d", where, c->top_groups, c->groups);
    if (c->top_k > c->top_groups * (c->experts / c->groups))
        FAIL(BAD_INPUT, "%s: \"num_experts_per_tok\" is %d, want at most the %d experts of %d of %d groups", where,
             c->top_k, c->top_groups * (c->experts / c->groups), c->top_groups, c->groups);
out:
    return st;
}

static status read_config(model_config *c, const json_t *doc, const char *where)
{
    status st = OK;
    const char *text;
    double eps, scale;
    bool flag;
    int32_t shared;
    TRY(check_family(doc, where));
    for (size_t i = 0; i < sizeof never_null / sizeof *never_null; i++)
        TRY(not_null(doc, never_null[i], where));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        TRY(not_null(doc, sizes[i].key, where));
        TRY(read_size((int32_t *)((char *)c + sizes[i].at), doc, sizes[i].key, sizes[i].fallback, sizes[i].low,
                      sizes[i].high, where));
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        TRY(json_text(&text, doc, texts[i].key, texts[i].want, where));
        if (strcmp(text, texts[i].want) != 0)
            FAIL(BAD_INPUT, "%s: \"%s\" is \"%s\", want \"%s\"", where, texts[i].key, text, texts[i].want);
    }
    for (size_t i = 0; i < sizeof false_only / sizeof *false_only; i++) {
        TRY(json_bool(&flag, doc, false_only[i], false, where));
        if (flag)
            FAIL(BAD_INPUT, "%s: \"%s\" is true, want false", where, false_only[i]);
    }
    if (json_object_get(doc, "quantization_config") && !json_is_null(json_object_get(doc, "quantization_config")))
        FAIL(BAD_INPUT, "%s: \"quantization_config\" is set: want weights in F32, F16 or BF16", where);
    TRY(check_sizes(c, where));
    if (c->dense_layers > 0)
        TRY(read_size(&c->dense_inner, doc, "intermediate_size", REQUIRED, 1, 1 << 18, where));
    TRY(read_size(&shared, doc, "num_shared_experts", 0, 0, 64, where));
    c->shared_inner = shared * c->expert_inner;
    TRY(read_size(&c->head_dim, doc, "head_dim", 0, 1, 1024, where));
    if (c->head_dim == 0) {
        if (c->hidden % c->heads != 0)
            FAIL(BAD_INPUT, "%s: \"head_dim\" is missing, and hidden_size %d is no multiple of num_attention_heads %d",
                 where, c->hidden, c->heads);
        c->head_dim = c->hidden / c->heads;
    }
    TRY(read_rotary(c, doc, where));
    TRY(read_positive(&eps, doc, "rms_norm_eps", 1e-5, where));
    TRY(read_positive(&scale, doc, "routed_scaling_factor", 2.5, where));
    c->norm_eps = (float)eps;
    c->routed_scale = (float)scale;
    TRY(json_bool(&c->qk_norm, doc, "use_qk_norm", true, where));
    TRY(json_bool(&c->normalise, doc, "norm_topk_prob", true, where));
    c->normalise = c->normalise && c->top_k > 1;
    TRY(json_bool(&c->expert_bias, doc, "moe_router_enable_expert_bias", true, where));
    TRY(json_bool(&c->tied_head, doc, "tie_word_embeddings", false, where));
    TRY(read_size(&c->eos_id, doc, "eos_token_id", -1, 0, c->vocab - 1, where));
    TRY(read_size(&c->mask_id, doc, "mask_token_id", -1, 0, c->vocab - 1, where));
    TRY(read_size(&c->block_size, doc, "block_length", 0, 1, c->max_positions, where));
out:
    return st;
}

status model_config_open(model_config *out, const char *dir)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/config.json", dir);
    return model_config_read(out, path);
}

status model_config_read(model_config *out, const char *path)
{
    status st = OK;
    model_config c = {0};
    json_t *doc = NULL;
    json_error_t e;
    size_t length = 0;
    *out = (model_config){0};
    TRY(read_text(&c.json, &length, path));
    doc = json_loadb(c.json, length, 0, &e);
    if (!doc)
        FAIL(BAD_INPUT, "%s:%d:%d: not JSON: %s", path, e.line, e.column, e.text);
    if (!json_is_object(doc))
        FAIL(BAD_INPUT, "%s: want a JSON object", path);
    TRY(read_config(&c, doc, path));
    *out = c;
    c.json = NULL;
out:
    free(c.json);
    json_decref(doc);
    return st;
}

void model_config_close(model_config *c)
{
    free(c->json);
    *c = (model_config){0};
}
