/* The order in which a token's expert outputs are summed. It belongs to the model, never to the ranks, so that one
 * answer comes out for any number of them.
 *
 * Experts form V virtual shards of E / V consecutive ids (V = 8, or n_group where that is larger or 8 does not divide
 * E). Inside a shard: fp32, one after the other by ascending expert id. The V partials: a binary tree that halves
 * [lo, hi) at lo + (hi - lo) / 2. An absent expert or partial is skipped, not added as zero.
 *
 * Experts are dealt to R ranks in runs of consecutive ids, as evenly as possible. What a rank can sum alone without
 * changing the order are its units: the largest whole subtrees inside its run, and of a shard that the run cuts, the
 * leading part as one chain (if the run holds the shard's first expert) or each expert alone (if it does not).
 * Where V is a power of two and R divides it, a rank has exactly one unit: one fp32 row a token. */
#ifndef EPOCH_BASE_SUM_TREE_H
#define EPOCH_BASE_SUM_TREE_H

#include "src/base/status.h"

#include <stdint.h>

enum { SUM_TREE_EXPERTS = 1024 }; /* the most experts a layer may have */

typedef struct sum_unit {
    int32_t first, last;       /* experts [first, last) */
    int32_t shard_lo, shard_hi; /* shards [lo, hi): a subtree; hi == lo: a chain inside shard lo */
} sum_unit;

typedef struct sum_tree {
    int experts, shards, per_shard, ranks;
    int unit_count;
    sum_unit *unit;      /* [unit_count], ascending, over all ranks */
    int32_t *rank_unit;  /* [ranks + 1]: rank r has units rank_unit[r] .. rank_unit[r + 1] - 1 */
    int32_t *rank_first; /* [ranks + 1]: rank r has experts rank_first[r] .. rank_first[r + 1] - 1 */
    int32_t *unit_of;    /* [experts] */
    int32_t *rank_of;    /* [experts] */
} sum_tree;

/* Builds the tree and the deal. BAD_INPUT: more ranks than experts. Owned by the caller; sum_tree_close accepts NULL.
 */
status sum_tree_open(sum_tree **out, int experts, int n_group, int ranks);
void sum_tree_close(sum_tree *t);
/* Units of the rank that has most. */
int sum_tree_most_units(const sum_tree *t);

/* y[0..n) = the sum of the present terms of expert range or unit range, in the tree's order.
 * sum_tree_fold: over all units; term[u] is unit u's row of n floats, or NULL if absent.
 * sum_tree_unit: inside unit u, over edges: id[j] ascending expert ids (only those inside the unit count), term[j]
 * their weighted rows. `scratch` holds sum_tree_scratch(t) * n floats. Nothing present: y is zero. y may not alias a
 * term. */
int sum_tree_scratch(const sum_tree *t);
void sum_tree_fold(const sum_tree *t, float *y, const float *const *term, int64_t n, float *scratch);
void sum_tree_unit(const sum_tree *t, int u, float *y, const int32_t *id, const float *const *term, int edges,
                   int64_t n, float *scratch);

#endif
