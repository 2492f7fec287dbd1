/* The block clock's state, shared by host and device: one slot is a sequence in flight and its active block.
 * Slots live in the backend's memory and advance there (ops `rows` and `commit`); the host only fills them and reads
 * what they report. The functions here are pure, so that the host, the CPU backend and a kernel decide alike. */
#ifndef EPOCH_SLOT_H
#define EPOCH_SLOT_H

#include "src/base/counters.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDACC__
#define EPOCH_BOTH __host__ __device__
#else
#define EPOCH_BOTH
#endif

enum { BLOCK_MOST = 64 }; /* the largest block: liveness is a 64-bit mask */

typedef enum slot_state {
    SLOT_IDLE,    /* no sequence */
    SLOT_FILLING, /* whole prompt blocks are being prefilled */
    SLOT_WAITING, /* ready for its next block; starts when its cohort does */
    SLOT_REFINING /* an active block with masks left */
} slot_state;

/* Why a hot iteration ran all rows although its path did not ask for it; counted, never an error. */
typedef enum rows_cause { ROWS_NONE, ROWS_MISS, ROWS_VERSION, ROWS_ILLEGAL, ROWS_OVERDUE, ROWS_CAUSES } rows_cause;

/* What a block did; the sums of layer figures are over its hot iterations and sparse layers (`layer_iterations` of
 * them), so means are sum / layer_iterations. */
typedef struct block_stats {
    int32_t iterations, cold, refresh, hot_update, hot_skip, forced;
    int32_t layer_rebuilds, universe;     /* layer-iterations */
    int32_t rows_fallback[ROWS_CAUSES];   /* iterations, by cause */
    int32_t fresh_rows, cached_rows;      /* together block_size * iterations */
    int32_t layer_iterations;
    int64_t support_size, distinct;       /* sums of |S_l| and of experts touched */
    int64_t under_rows, tested_rows;      /* fresh rows below the floor, and tested */
    double covered;                       /* sum over tested rows of C_t(S) / sum of the unrestricted top-k scores */
} block_stats;

typedef struct slot {
    int32_t state;         /* slot_state */
    int32_t prompt_tokens; /* P */
    int32_t end;           /* P + gen_len, clamped: positions from here on are dropped */
    int32_t sealed;        /* blocks whose K/V are exact */
    int32_t block;         /* the active block, counted from position 0 of the sequence */
    int32_t iteration;     /* refinements of this block so far */
    int32_t age;           /* forwards since all rows of the block were fresh */
    int32_t since_update;  /* hot iterations since an update was last due */
    int32_t version;       /* of the decoded cache; counts up with each block */
    int32_t cache_block, cache_version; /* what the decoded cache holds; must match block and version */
    int32_t path;          /* this forward: enum slot_way */
    int32_t cause;         /* this forward: rows_cause */
    int32_t filling;       /* this forward: blocks being sealed (prefill, or the one before a cold block) */
    uint64_t decoded;      /* D_i: positions of the active block that hold a token; the prompt's from the start */
    uint64_t before;       /* D_{i-1}: decoded at the last forward */
    uint64_t fresh;        /* this forward: F, positions that go through routed experts */
    block_stats stats;
} slot;

/* What a slot did in one forward, read by the host (one iteration late on a GPU). */
typedef struct slot_report {
    int32_t path;  /* PATH_NONE: not in the forward; nothing else is set */
    int32_t block, iteration; /* of this forward, iteration counted from 0 */
    int32_t cause, filled;    /* rows_cause; blocks sealed or prefilled */
    int32_t live, newly, stable, fresh; /* rows of the active block before the commit */
    uint64_t committed;       /* positions committed */
    int32_t forced;           /* of them, because of the step limit */
    int32_t block_done, sequence_done, saw_eos;
    int32_t broken;           /* the logits were not finite: the sequence was given up, nothing committed */
    block_stats stats;        /* with block_done: the whole block's */
    int32_t token[BLOCK_MOST]; /* with block_done: the block's tokens */
} slot_report;

/* The settings that the life of a block depends on. */
typedef struct block_rule {
    int32_t block_size;     /* B, 1 .. BLOCK_MOST */
    int32_t mask_id, eos_id;
    int32_t max_steps;      /* the iteration in which what is left commits */
    float threshold;        /* tau: a probability above it commits */
    int32_t refresh_every;  /* M_C >= 1: every M_C-th hot iteration runs all rows; 1: no row is ever cached */
    int32_t update_every;   /* supports are rebuilt by count every so many hot iterations; 0: never */
    int32_t prefill_blocks; /* most prompt blocks of all slots in one forward */
    int32_t cohort;         /* slots [i * cohort, (i + 1) * cohort) share supports and start blocks together */
    bool restrict_experts; /* Atlas on: supports are built, tested and used; off: every layer routes over all experts */
    bool dense_lane;        /* no-lane: every row is dispatched and computed; what the merge takes is unchanged */
} block_rule;

/* How many of n rows may stay under-covered: floor((1 - q) n), safe against q's rounding. */
static inline EPOCH_BOTH int32_t atlas_allowed(int32_t n, float covered_share)
{
    return (int32_t)((1.0 - (double)covered_share) * n + 1e-5);
}

/* The Atlas sums scores over rows in fixed point, units of 2^-32, so that no order of rows or threads shows in a
 * support. */
#define ATLAS_ONE (INT64_C(1) << 32)

static inline EPOCH_BOTH int64_t atlas_fixed(float x)
{
    return (int64_t)(x * 4294967296.0f);
}

/* Positions 0 .. n-1 as a mask. */
static inline EPOCH_BOTH uint64_t slot_mask(int n)
{
    return n >= 64 ? ~0ull : (1ull << n) - 1;
}

/* Is an update of the supports due by count, `since_update` hot iterations after the last? */
static inline EPOCH_BOTH bool slot_update_due(int iteration, int since_update, const block_rule *r)
{
    return iteration > 0 && r->update_every > 0 && since_update + 1 >= r->update_every;
}

/* The path of a slot that refines a block: a pure function of its counters. Precedence: cold, refresh, hot-update,
 * hot-skip. `age` is that of the cached rows at the last forward; serving them now makes it age + 1, which may be at
 * most refresh_every - 1. */
static inline EPOCH_BOTH slot_way slot_path(int iteration, int age, int since_update, const block_rule *r)
{
    if (iteration == 0)
        return PATH_COLD;
    if (age + 1 >= r->refresh_every)
        return PATH_REFRESH;
    if (slot_update_due(iteration, since_update, r))
        return PATH_HOT_UPDATE;
    return PATH_HOT_SKIP;
}

#endif
