#include "src/cost.h"

/* n ops of so many bytes and FLOPs each. */
static void add(cost *to, double n, double bytes, double flops, const ceilings *most)
{
    to->bytes += n * bytes;
    to->flops += n * flops;
    if (most->bytes > 0 && most->flops > 0) {
        double moved = bytes / most->bytes, computed = flops / most->flops;
        to->seconds += n * (moved > computed ? moved : computed);
    }
}

/* n products of rows [inner] by [outs, inner]. */
static void add_product(cost *to, double n, double rows, double outs, double inner, const ceilings *most)
{
    add(to, n, 2 * (outs * inner + rows * (outs + inner)), 2 * rows * outs * inner, most);
}

void cost_add(cost by_phase[PHASES], const model_config *c, const forward_load *f, const ceilings *most)
{
    double h = c->hidden, q = (double)c->heads * c->head_dim, kv = (double)c->kv_heads * c->head_dim, r = f->rows;
    double layers = c->layers, dense = c->dense_layers, sparse = layers - dense, block = c->block_size;
    cost *attention = &by_phase[PHASE_ATTENTION], *shared = &by_phase[PHASE_SHARED], *merge = &by_phase[PHASE_MERGE];
    add_product(attention, layers, r, q + 2 * kv, h, most);
    add(attention, layers, 2 * 2 * r * (q + 2 * kv), 0, most);
    add(attention, layers, 2 * (2 * f->seen * kv + 2 * r * q), 4 * f->seen * block * q, most);
    add_product(attention, layers, r, h, q, most);
    add(attention, layers, 2 * 4 * r * h, 0, most);
    add(&by_phase[PHASE_ROUTE], sparse, 4 * c->experts * h + f->fresh * (2 * h + 4.0 * c->experts),
        2 * f->fresh * c->experts * h, most);
    add(&by_phase[PHASE_EXPERTS], 1, 2 * (f->touched * 3 * h * c->expert_inner + sparse * 2 * f->fresh * h),
        6 * f->edges * h * c->expert_inner, most);
    add(merge, sparse, 2 * 2 * (r - f->fresh) * h, 0, most);
    add(merge, sparse, 2 * 4 * r * h, 0, most);
    if (c->shared_inner) {
        add_product(shared, sparse, r, 2.0 * c->shared_inner, h, most);
        add_product(shared, sparse, r, h, c->shared_inner, most);
    }
    add_product(shared, dense, r, 2.0 * c->dense_inner, h, most);
    add_product(shared, dense, r, h, c->dense_inner, most);
    add(shared, dense, 2 * 4 * r * h, 0, most);
    add(&by_phase[PHASE_DECODE], 1, 2 * 2 * r * h, 0, most);
    add(&by_phase[PHASE_HEAD], 1, 2 * (c->vocab * h + f->live * h), 2 * f->live * c->vocab * h, most);
}

cost cost_sum(const cost by_phase[PHASES])
{
    cost all = {0};
    for (int p = 0; p < PHASES; p++) {
        all.bytes += by_phase[p].bytes;
        all.flops += by_phase[p].flops;
        all.seconds += by_phase[p].seconds;
    }
    return all;
}
