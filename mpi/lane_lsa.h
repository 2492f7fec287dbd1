/* Inside the lane of kernels that write to each other's GPUs: what its host side (lane_lsa.c) and its kernels
 * (lane_lsa.cu) share. The protocol is told in lane_lsa.cu. It needs no more than memory that every rank can reach, a
 * window of each: NCCL's symmetric windows between processes, plain device memory where one process plays all ranks. */
#ifndef EPOCH_MPI_LANE_LSA_H
#define EPOCH_MPI_LANE_LSA_H

#include "cuda/kernels.h"
#include "src/lane.h"

enum { LSA_RANKS = 64, LSA_PUSH_MOST = 128, LSA_KINDS = 2 };

/* What went wrong on the device: in the host's memory, written once, `what` last. */
typedef enum lsa_what { LSA_FINE, LSA_NO_ROWS, LSA_NO_SUMS, LSA_MANY_ROWS, LSA_OTHER_ROWS } lsa_what;

typedef struct lsa_fault {
    int32_t what, rank; /* the rank waited for, or whose numbers do not agree */
    int32_t found, wanted;
    uint32_t epoch;
} lsa_fault;

/* Sums on the device since the lane last asked. */
enum {
    LSA_SENT, LSA_RECEIVED, LSA_MERGED, LSA_SUMS_SENT, LSA_SUMS_RECEIVED,
    LSA_ROWS_OUT, LSA_IDS_OUT, LSA_SUMS_OUT, /* to other ranks: x of so many rows, ids and weights, sums */
    LSA_COUNTERS
};

/* How many blocks; the same on every rank. */
typedef struct lsa_blocks {
    int push, fold; /* that send rows, at most LSA_PUSH_MOST; that add sums, at most */
} lsa_blocks;

/* Where an expert's sums come from; 16 bytes, which kernels copy at once. */
typedef struct lsa_home {
    int32_t rank, unit, units, shard; /* unit: of the rank's, which has `units`; its first shard */
} lsa_home;

/* What kernels know, by value. Offsets hold in every window alike. */
typedef struct lsa {
    int32_t rank, size, hidden, top_k, units, shards, push_blocks;
    int32_t max_rows, experts;
    int32_t kinds;  /* of counts: rows, and sums wanted of them where some rank has several units */
    int32_t levels;     /* of the tree, where sums of different units meet */
    int32_t half;       /* sums travel as BF16 */
    uint64_t patience;  /* ns */
    size_t words, arrived, ready, x, ids, weights, sums;
    size_t pitch; /* of sums, from one source to the next */
    char *window[LSA_RANKS];
    const lsa_home *home; /* [experts] */
    int32_t *used;        /* places of x in use; of sums */
    uint32_t *epoch;      /* of the newest dispatch */
    int32_t *turn;        /* of the next row to be sent, behind the first ones of all warps */
    int32_t *said, *heard; /* [PULSE], [size, PULSE] */
    int64_t *count;       /* [LSA_COUNTERS] */
    int32_t *broken;      /* not 0: nothing waits any more */
    lsa_fault *fault;     /* the host's memory */
} lsa;

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of every rank's window, to be zero before any rank dispatches. */
size_t lsa_window_bytes(const lane_rule *rule);

/* The lane of rank `rank` over window[rule->tree->ranks], as this GPU sees them; borrowed. b runs on that GPU. blocks
 * NULL: as measured to be best. patience: seconds that a kernel waits for another rank. BAD_INPUT: more than LSA_RANKS
 * ranks, a hidden size that is no multiple of 8, a top_k above 32. FAILED: no memory. */
status lsa_open(lane **out, const lane_rule *rule, backend *b, int rank, char *const *window, const lsa_blocks *blocks,
                double patience);

/* lane_lsa_open with these: windows by NCCL. */
status lsa_join(lane **out, const lane_rule *rule, backend *b, world *w, nccl_comm *n, const lsa_blocks *blocks,
                double patience);

/* ---- lane_lsa.cu: launchers on the backend's stream */

status lsa_launch_dispatch(cuda *c, const lsa *m, const tensor *x, const tensor *ids, const tensor *weights);
status lsa_launch_combine(cuda *c, const lsa *m, const tensor *y, const tensor *ids, int fold_blocks);

#ifdef __cplusplus
}
#endif

#endif
