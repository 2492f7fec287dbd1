/* Audit: after each forward the exact dense executor runs in the shadow, on the same inputs, and what both would have
 * decided is compared. It shares the KV pool: what it writes for sealed blocks is bit for bit what the real forward
 * wrote, since prefill and sealing are exact in every mode; the pages of an active block are rewritten by each forward
 * of that block before anything reads them, so nothing of the shadow is ever seen by the real executor.
 *
 * Of a live row: d is the largest difference of its logits over the vocabulary; z1, z2 are the exact logits of the best
 * and the next token (mask id left out), L = logit(p) of the best, lambda = logit(tau). When logits move by d, z1 - z2
 * and L move by at most 2 d (L is a logit minus the log-sum-exp of the others, and the best of several such). So with
 *
 *     margin = 1/2 (min(z1 - z2, |L - lambda|) - slack)
 *
 * d < margin means: the same best token, and on the same side of tau. What a row's block mates do matters too:
 *  - Some row passes tau. A row that does not is left masked as long as any other still passes: it counts as held only
 *    where a passing row holds its own margin too.
 *  - No row passes: the one of highest L, b, commits alone. Both it and a rival may move by 2 d, in opposite
 * directions, so the margin is also at most 1/2 (gap / 2 - slack), half of what one row alone would need; gap is L_b -
 * L, and for b itself to the best rival. With d < margin at both, b stays ahead: L of b stays above, L of the other
 * below the middle between L_b and b's best rival. A rival counts as held where b holds too; b only where all rows do.
 * Then held implies decided alike, without exception, also in the iteration of the step limit, in which only the best
 * token matters.
 *
 * slack: decisions are taken on fp32 probabilities, which are off by a relative error of up to 1e-5 (of L: that by
 * 1 - tau). A block whose logits are the same bit for bit is held whatever its margins. */
#ifndef EPOCH_EXEC_AUDIT_H
#define EPOCH_EXEC_AUDIT_H

#include "src/exec/executor.h"

typedef struct audit audit;

/* One slot's iteration: its live rows. */
typedef struct audit_slot {
    int32_t live;   /* 0: nothing was decided, and nothing else is set */
    int32_t held;   /* rows whose decision could not differ */
    int32_t same;   /* rows decided alike: committed or not, and with the same token */
    int32_t broken; /* held, and yet decided otherwise */
    float max_difference, mean_difference, min_margin, mean_margin; /* logits */
} audit_slot;

/* Borrows the executor. FAILED: no memory. */
status audit_open(audit **out, executor *real);
/* What it takes of the backend: a second set of slots and activations, and logits of some rows. */
size_t audit_bytes(const executor_rule *r, const model_config *c, dtype activation);
void audit_close(audit *a); /* accepts NULL */

/* Around executor_forward(real), by every rank at once: the shadow's dispatches want all of them. `before` copies what
 * the forward starts from. `after` runs the shadow's forward and compares: found [slot_count]. Both wait. */
status audit_before(audit *a);
status audit_after(audit *a, audit_slot *found);

/* ---- the judgement, on host memory alone */

typedef struct audit_row {
    double difference;   /* d */
    double lead, odds;   /* z1 - z2, L */
    double margin;       /* by audit_judge */
    bool held;           /* by audit_judge */
} audit_row;

/* Sets difference, lead and odds from the logits [vocab] of both executors. A logit that is no number makes d infinite.
 */
void audit_compare(audit_row *r, const float *exact, const float *real, int32_t vocab, int32_t mask_id);
/* Sets margin and held of all live rows of a block. */
void audit_judge(audit_row *row, int rows, float threshold);

#endif
