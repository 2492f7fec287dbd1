/* What a forward needs at least: the bytes and FLOPs of each op, and the time they take at a device's ceilings. An op
 * reads each input and writes each output once; it takes the longer of its bytes and its FLOPs, and ops come one after
 * the other. Weights, K/V and activations are BF16 (2 bytes), the router's weights and logits fp32. In full, one layer
 * with r rows, f of them fresh, of hidden size H, q and kv the widths of queries and of keys:
 *
 *   attention  qkv    r [H] x [q + 2 kv, H]         norms, rotary, K/V: 2 r (q + 2 kv) elements
 *              keys and values of every query block once, queries, outputs; 4 q FLOPs a query and key
 *              out    r [q] x [H, q]                 residual and norm: 4 r H elements
 *   route      f [H] x [E, H]
 *   experts    the weights of the experts that are touched, f rows in and out; 6 H I FLOPs an edge (K a row)
 *   merge      cached rows in and out: 2 (r - f) H   residual and norm: 4 r H elements
 *   shared     gate, up and down for r rows; a dense layer's MLP likewise
 *   decode     the embedding of r rows
 *   head       live rows [H] x [V, H]
 *
 * Nothing is counted for the Atlas, for packing, for the experts' inner activations, or for the lane. */
#ifndef EPOCH_COST_H
#define EPOCH_COST_H

#include "src/base/counters.h"
#include "src/model/config.h"

typedef struct ceilings { /* of one device; 0: not known */
    double bytes;         /* read and written a second */
    double flops;         /* a second, BF16 */
} ceilings;

typedef struct forward_load { /* of one rank in one forward */
    double rows;              /* of sealing and active blocks */
    double seen;              /* keys, summed over the query blocks */
    double fresh, live;
    double touched; /* different experts of this rank, summed over the sparse layers */
    double edges;   /* rows times experts that this rank computes, summed over the sparse layers */
} forward_load;

typedef struct cost {
    double bytes, flops;
    double seconds; /* 0 where the ceilings are not known */
} cost;

/* Adds a forward's to each phase. */
void cost_add(cost by_phase[PHASES], const model_config *c, const forward_load *f, const ceilings *most);
cost cost_sum(const cost by_phase[PHASES]);

#endif
