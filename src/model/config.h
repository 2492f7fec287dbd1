/* config.json of a supported family as one checked struct. Every key that changes the computation is read or refused by
 * name; an unknown model_type is refused. The block-causal family is "llada2_moe"; "llada" with num_experts (LLaDA-MoE,
 * one bidirectional canvas) is recognised and refused by name.
 *
 * An absent key takes the default of the model's configuration class, a null only where the class gives null a meaning.
 * Read but without effect on inference, as in the models' own code: sliding_window and use_sliding_window (attention is
 * block-causal over the whole prefix), the dropouts, dtypes (each tensor has its own), pad and bos ids. */
#ifndef EPOCH_MODEL_CONFIG_H
#define EPOCH_MODEL_CONFIG_H

#include "src/base/status.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct model_config {
    int32_t layers, hidden, vocab, max_positions;
    int32_t heads, kv_heads, head_dim, rotary_dim;
    float rope_theta, norm_eps;
    bool qk_norm;
    int32_t dense_layers, dense_inner;       /* layers below dense_layers have one MLP of width dense_inner */
    int32_t experts, top_k, expert_inner;
    int32_t shared_inner;                    /* num_shared_experts * moe_intermediate_size; 0: none */
    int32_t groups, top_groups;
    float routed_scale;
    bool normalise;                          /* norm_topk_prob; false for top_k 1, as the authors' code has it */
    bool expert_bias;
    bool tied_head;                          /* lm_head is the embedding */
    int32_t eos_id, mask_id;                 /* config.json's, -1 where it says nothing */
    int32_t block_size;                      /* block_length, 0 where it says nothing */
    char *json;                              /* the file's text, for the results */
} model_config;

/* Reads DIR/config.json. BAD_INPUT names file, key, found and wanted. model_config_close frees what it holds. */
status model_config_open(model_config *out, const char *dir);
/* The same of a file by its path. */
status model_config_read(model_config *out, const char *path);
void model_config_close(model_config *c);

#endif
