/* Each tensor's name, expected shape, and the slice this rank keeps, copied into one arena of the backend. */
#ifndef EPOCH_MODEL_WEIGHTS_H
#define EPOCH_MODEL_WEIGHTS_H

#include "src/backend.h"
#include "src/base/arena.h"
#include "src/base/watchdog.h"
#include "src/model/config.h"

typedef struct layer_weights {
    bool sparse;
    tensor input_norm, post_norm;   /* F32 [1, H] */
    tensor qkv, out;                /* [(heads + 2 kv) hd, H]; [H, heads hd] */
    tensor q_norm, k_norm;          /* F32 [1, hd]; no data without qk_norm */
    tensor gate_up, down;           /* dense layer: [2 dense_inner, H] (gate rows, then up rows), [H, dense_inner] */
    tensor router, router_bias;     /* sparse: F32 [E, H], F32 [1, E] (zeros without a bias) */
    tensor shared_gate_up, shared_down; /* sparse, with a shared expert */
    expert_set experts;             /* sparse: this rank's */
} layer_weights;

typedef struct weights {
    tensor embed, head;             /* [V, H]; one and the same with tied_head */
    tensor norm;                    /* F32 [1, H] */
    int32_t layer_count;
    layer_weights *layer;
    arena arena;
    size_t bytes;                   /* this rank's share in the backend */
    backend *owner;
} weights;

typedef struct weight_rule {
    dtype matrices;                 /* how 2-D weights are held: F32, or BF16/F16 as in the checkpoint; norms and the
                                       router are always F32 */
    const sum_tree *tree;
    int32_t rank;
    heartbeat *heart;               /* beats with every piece copied; NULL: nobody listens */
} weight_rule;

/* The dtype (F32, F16 or BF16) of most of the checkpoint's matrices, counted by elements. BAD_INPUT as
 * safetensors_open, and where there is no matrix. */
status weights_dtype(dtype *out, const char *dir);

/* Bytes this rank would hold: exactly what weights_open reserves. */
size_t weights_bytes(const model_config *c, const weight_rule *r);

/* The checks of weights_open alone: reads headers only and takes nothing, so that a bad checkpoint is refused early. */
status weights_check(const model_config *c, const char *dir, const weight_rule *r);

/* Checks every tensor (presence, shape, dtype; unknown names are refused, except *.inv_freq) before copying any, then
 * copies this rank's share. Accepts the checkpoint spellings of MODEL: per-expert, merged w1/w2, and stacked experts;
 * expert_bias or e_score_correction_bias. BAD_INPUT names file and tensor, found and wanted, and the config key it
 * follows from; where the backend has too little memory, its status. While copying, a few MB of the files are resident.
 * Owned by the caller; close accepts NULL. */
status weights_open(weights **out, const model_config *c, const char *dir, backend *b, const weight_rule *r);
/* Weights of that shape without a checkpoint: random by seed, matrices of variance 1 / width, norms 1; the router's
 * bias random in [-skew, skew), or 0. */
status weights_random(weights **out, const model_config *c, backend *b, const weight_rule *r, uint64_t seed,
                      float skew);
void weights_close(weights *w);

#endif
