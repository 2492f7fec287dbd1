/* Inside lane_nccl: what its host half (lane_nccl.c) and its kernels (lane_nccl.cu) share. */
#ifndef EPOCH_MPI_LANE_NCCL_H
#define EPOCH_MPI_LANE_NCCL_H

#include "cuda/kernels.h"
#include "src/lane.h"

#ifdef __cplusplus
extern "C" {
#endif

/* From one rank to another, before its rows: how many, how many partial sums it wants back, and its pulse. */
typedef struct nccl_greeting {
    int32_t rows, partials, pulse[PULSE];
} nccl_greeting;

enum { ARRIVED_WELL, ARRIVED_ASTRAY, ARRIVED_MISCOUNTED };

/* What the kernels found; the host reads it with the next greetings. */
typedef struct nccl_ledger {
    int32_t broken, rank, have, want; /* the first thing that was wrong, and the rank whose rows it was */
    int64_t merged;                   /* token rows, once a rank, since the lane was opened */
} nccl_ledger;

/* All pointers are the device's. Ring order is this rank, rank + 1, rank + 2 and so on. */
typedef struct nccl_board {
    int rank, size, top_k, hidden, units, first_unit, shards;
    int experts, first, last;              /* of all ranks; of this one: [first, last) */
    int64_t row_bytes, ids_at, weights_at; /* a row that travels: [x BF16 | ids I32 | weights F32] */
    bool half;                             /* partial sums travel as BF16 */
    const int32_t *rank_of, *unit_of;      /* [experts] */
    const int32_t *shard_of;               /* [units of all ranks]: the first */
    nccl_greeting *out, *in;               /* [size]: to and from every rank, this one too */
    nccl_ledger *ledger;
    int32_t *arrived_count;    /* rows in `arrived` */
    int32_t *row_at, *term_at; /* [max_rows, top_k], of the edge that is first of a rank, of a unit:
                                  row among those to that rank; partial sum among those from that
                                  rank, or the row of y where it is this one */
    int32_t *back_at;          /* [size * max_rows]: of an arrived row, its first partial sum among
                                  those to that rank */
    char *packed;              /* rows to others, in ring order, each rank's in the batch's order */
    char *arrived;             /* rows in ring order, this rank's own first */
    float *y;                  /* [size * max_rows * units, H]: the experts' sums */
    void *back;                /* partial sums to others, in ring order; NULL: they leave from y */
    void *partials;            /* partial sums from others, in ring order */
} nccl_board;

/* Fills out, row_at, term_at; this rank's own entry of `in` too. */
status lane_nccl_deal(cuda *c, const nccl_board *m, const tensor *ids, const int32_t pulse[PULSE]);
/* Fills packed, and this rank's rows of arrived. */
status lane_nccl_pack(cuda *c, const nccl_board *m, const tensor *x, const tensor *ids, const tensor *weights);
/* Once all rows are in arrived: checks them against what the greetings said; fills arrived_count and back_at. */
status lane_nccl_arrive(cuda *c, const nccl_board *m);
/* Moves y's partial sums for other ranks to back, at most `rows` arrived rows. */
status lane_nccl_gather(cuda *c, const nccl_board *m, int64_t rows);
/* y F32 [n, H]: each row's sum over its units, in the tree's order. */
status lane_nccl_merge(cuda *c, const nccl_board *m, const tensor *y, const tensor *ids);

#ifdef __cplusplus
}
#endif

#endif
