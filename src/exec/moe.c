/* The MLP half of a layer. A sparse layer is a full shard in, a full shard out: the compacted rows never leave this
 * file and the lane. */
#include "src/exec/executor.h"
#include "src/exec/observe.h"

/* y = down(silu(gate h) * up h), for all rows of the batch. */
static status mlp(executor *x, const tensor *gate_up, const tensor *down)
{
    status st = OK;
    backend *b = x->backend;
    activations *v = &x->a;
    tensor both = v->gate_up, inner = v->inner; /* sized for the widest; here as wide as this layer's */
    both.cols = both.ld = gate_up->rows;
    inner.cols = inner.ld = down->cols;
    TRY(b->gated(b, &inner, &both, &v->h, gate_up));
    TRY(b->matmul(b, &v->y, &inner, down));
out:
    return st;
}

status dense_layer(executor *x, int layer)
{
    status st = OK;
    const layer_weights *w = &x->weights->layer[layer];
    residual after = executor_residual(x, executor_norm_after(x, layer), layer, PHASE_SHARED);
    TRY(mlp(x, &w->gate_up, &w->down));
    TRY(x->backend->add_norm(x->backend, &after, &x->a.y, &x->batch));
    TRY(executor_mark(x, layer, PHASE_SHARED));
out:
    return st;
}

/* It needs h alone. Where it does not ride with the routed experts, it runs beside their way: beside rows that travel,
 * which take a link and few multiprocessors; where none do, beside the coverage test, or, without one, beside the sort
 * of the edges. */
static status shared_expert(executor *x, int layer)
{
    status st = OK;
    backend *b = x->backend;
    const layer_weights *w = &x->weights->layer[layer];
    TRY(b->aside(b, x->lane->holds));
    TRY(mlp(x, &w->shared_gate_up, &w->shared_down));
    TRY(executor_mark(x, layer, PHASE_SHARED));
    TRY(b->back(b));
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
    residual after = executor_residual(x, executor_norm_after(x, layer), layer, PHASE_COMBINE);
    tensor shared = w->shared_gate_up.data ? v->y : (tensor){0};
    lane_load here = {0};
    expert_set experts = w->experts;
    const shared_set rider = {w->shared_gate_up, w->shared_down, v->h};
    bool late = x->lane->holds > 0 || !k->restrict_experts;
    bool sums_wait = b->late_sums && x->lane->passes && !x->observer;
    if (shared.data && sums_wait && b->rides(b, &v->x_fresh, &experts, &rider)) {
        experts.shared = &rider;
        shared.data = NULL;
    }
    if (shared.data && !late)
        TRY(shared_expert(x, layer));
    TRY(b->matmul(b, &v->z, &v->x_fresh, &w->router));
    TRY(executor_mark(x, layer, PHASE_ROUTE));
    TRY(b->support(b, &x->plans, sparse, &v->z, &w->router_bias, &x->batch, &x->slots, &x->route, &x->rule.atlas, k));
    TRY(executor_mark(x, layer, PHASE_COVERAGE));
    TRY(b->route(b, &v->ids, &v->weights, &v->z, &w->router_bias, &x->plans, sparse, &x->batch, &x->slots, &x->route,
                 k));
    TRY(executor_mark(x, layer, PHASE_ROUTE));
    if (shared.data && late)
        TRY(shared_expert(x, layer));
    TRY(x->lane->dispatch(x->lane, &here, &v->x_fresh, &v->ids, &v->weights));
    TRY(executor_mark(x, layer, PHASE_DISPATCH));
    if (sums_wait)
        here.y.data = NULL;
    experts.away = here.away;
    TRY(b->experts(b, &here.y, &here.x, &here.ids, &here.weights, &experts));
    TRY(executor_mark(x, layer, PHASE_EXPERTS));
    TRY(x->lane->combine(x->lane, &v->y_fresh, &here));
    TRY(executor_mark(x, layer, PHASE_COMBINE));
    if (x->observer)
        TRY(observe_layer(x->observer, x, sparse));
    if (shared.data) {
        TRY(b->join(b));
        TRY(executor_mark(x, layer, PHASE_SHARED));
    }
    TRY(b->merge(b, &after, &v->y_fresh, &shared, &x->decoded_cache, sparse, &x->batch, &x->slots, k));
    TRY(executor_mark(x, layer, PHASE_MERGE));
out:
    return st;
}
