/* The attention half of a layer: bidirectional within the block, over the prefix. */
#include "src/exec/executor.h"

status attention_layer(executor *x, int layer)
{
    status st = OK;
    backend *b = x->backend;
    activations *v = &x->a;
    const layer_weights *w = &x->weights->layer[layer];
    residual after = executor_residual(x, &w->post_norm, layer, PHASE_ATTENTION);
    if (w->sparse && v->x_fresh.data != v->h.data)
        after.h_fresh = v->x_fresh;
    TRY(b->matmul(b, &v->qkv, &v->h, &w->qkv));
    TRY(b->rotate(b, &v->qkv, &x->kv, layer, &w->q_norm, &w->k_norm, &x->batch, &x->slots, &x->attention));
    TRY(b->attend(b, &v->attended, &v->qkv, &x->kv, layer, &x->batch, &x->slots, &x->attention));
    TRY(b->matmul(b, &v->y, &v->attended, &w->out));
    TRY(b->add_norm(b, &after, &v->y, &x->batch));
    TRY(executor_mark(x, layer, PHASE_ATTENTION));
out:
    return st;
}
