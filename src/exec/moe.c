/* The MLP half of a layer. A sparse layer is a full shard in, a full shard out: the compacted rows never leave this
 * file and the lane. */
#include "src/exec/executor.h"
#include "src/exec/observe.h"

/* y = down(silu(gate h) * up h), for all rows of the batch. */
static status mlp(executor *x, tensor *y, const tensor *gate_up, const tensor *down)
{
    status st = OK;
    backend *b = x->backend;
    activations *v = &x->a;
    tensor both = v->gate_up, inner = v->inner; /* sized for the widest; here as wide as this layer's */
    both.cols = both.ld = gate_up->rows;
    inner.cols = inner.ld = down->cols;
    TRY(b->matmul(b, &both, &v->h, gate_up));
    TRY(b->swiglu(b, &inner, &both));
    TRY(b->matmul(b, y, &inner, down));
out:
    return st;
}

status dense_layer(executor *x, int layer)
{
    status st = OK;
    const layer_weights *w = &x->weights->layer[layer];
    TRY(mlp(x, &x->a.y, &w->gate_up, &w->down));
    TRY(x->backend->add(x->backend, &x->a.x, &x->a.y));
    TRY(executor_mark(x, layer, PHASE_SHARED));
out:
    return st;
}

status moe_layer(executor *x, int layer, int sparse)
{
    status st = OK;
    backend *b = x->backend;
    activations *v = &x->a;
    const layer_weights *w = &x->weights->layer[layer];
    const block_rule *k = &x->rule.block;
    lane_load here;
    TRY(b->pack(b, &v->x_fresh, &v->h, &x->batch.fresh));
    TRY(executor_mark(x, layer, PHASE_MERGE));
    TRY(b->matmul(b, &v->z, &v->x_fresh, &w->router));
    TRY(executor_mark(x, layer, PHASE_ROUTE));
    TRY(b->support(b, &x->plans, sparse, &v->z, &w->router_bias, &x->batch, &x->slots, &x->route, &x->rule.atlas, k));
    TRY(executor_mark(x, layer, PHASE_COVERAGE));
    TRY(b->route(b, &v->ids, &v->weights, &v->z, &w->router_bias, &x->plans, sparse, &x->batch, &x->slots, &x->route,
                 k));
    TRY(executor_mark(x, layer, PHASE_ROUTE));
    TRY(x->lane->dispatch(x->lane, &here, &v->x_fresh, &v->ids, &v->weights));
    TRY(executor_mark(x, layer, PHASE_DISPATCH));
    TRY(b->experts(b, &here.y, &here.x, &here.ids, &here.weights, &w->experts));
    TRY(executor_mark(x, layer, PHASE_EXPERTS));
    TRY(x->lane->combine(x->lane, &v->y_fresh, &here));
    TRY(executor_mark(x, layer, PHASE_COMBINE));
    TRY(b->merge(b, &v->y_shard, &v->y_fresh, &x->decoded_cache, sparse, &x->batch, &x->slots, k));
    TRY(executor_mark(x, layer, PHASE_MERGE));
    if (x->observer)
        TRY(observe_layer(x->observer, x, sparse));
    if (w->shared_gate_up.data) {
        TRY(mlp(x, &v->y, &w->shared_gate_up, &w->shared_down));
        TRY(b->add(b, &v->y_shard, &v->y));
    }
    TRY(b->add(b, &v->x, &v->y_shard));
    TRY(executor_mark(x, layer, PHASE_SHARED));
out:
    return st;
}
