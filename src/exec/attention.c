/* The attention half of a layer: bidirectional within the block, over the prefix. */
#include "src/exec/executor.h"

status attention_layer(executor *x, int layer)
{
    status st = OK;
    backend *b = x->backend;
    activations *v = &x->a;
    const layer_weights *w = &x->weights->layer[layer];
    TRY(b->norm(b, &v->h, &v->x, &w->input_norm, x->config->norm_eps));
    TRY(b->matmul(b, &v->qkv, &v->h, &w->qkv));
    TRY(b->rotate(b, &v->qkv, &x->kv, layer, &w->q_norm, &w->k_norm, &x->batch, &x->slots, &x->attention));
    TRY(b->attend(b, &v->attended, &v->qkv, &x->kv, layer, &x->batch, &x->slots, &x->attention));
    TRY(b->matmul(b, &v->y, &v->attended, &w->out));
    TRY(b->add(b, &v->x, &v->y));
    TRY(b->norm(b, &v->h, &v->x, &w->post_norm, x->config->norm_eps));
    TRY(executor_mark(x, layer, PHASE_ATTENTION));
out:
    return st;
}
