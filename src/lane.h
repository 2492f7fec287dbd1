/* Seam: FreshLane transport. Fresh rows travel to the ranks of their experts and the partial sums come back.
 * A token crosses once to a rank, whatever the number of its experts there. Zero rows are ordinary.
 * Each dispatch also carries a small header of every rank, the pulse, so that all ranks know the same things about the
 * job at the same moment: that is how they decide alike, without a collective of their own. */
#ifndef EPOCH_LANE_H
#define EPOCH_LANE_H

#include "src/base/sum_tree.h"
#include "src/base/tensor.h"

#include "src/backend.h"
#include "src/world.h"

enum { PULSE = 8 }; /* ints in a rank's header; their meaning is the scheduler's */

typedef struct lane_rule {
    int32_t hidden, top_k;
    int64_t max_rows;      /* most rows any rank dispatches at once; the same on every rank */
    const sum_tree *tree;  /* who owns which expert, and the order of sums */
    dtype payload;         /* of x: the backend's activation dtype */
    dtype combine;         /* of partial sums between ranks: F32, or BF16, with which sums depend on the ranks (GPUs) */
    double patience;       /* seconds that a kernel of lsa waits for another rank before it gives up */
} lane_rule;

/* What arrived for this rank's experts; the tensors belong to the lane and hold until the next dispatch. Their rows may
 * lie further apart than their columns ask for (ld > cols). A row without an expert of this rank may be among them: its
 * x is then anything. */
typedef struct lane_load {
    tensor x;        /* [n, H] */
    tensor ids;      /* I32 [n, K]: the row's experts (global ids), ascending, all of this rank among them; -1: none */
    tensor weights;  /* F32 [n, K] */
    tensor y;        /* F32 [n * units, H]: room for the experts' partial sums; combine uses them up */
    const sums_away *away; /* where they go instead; NULL: to y */
} lane_load;

typedef struct lane_traffic { /* since the last call */
    int64_t rows_sent, rows_received, rows_merged; /* token rows, once a rank; this rank's own too */
    int64_t partials_sent, partials_received;      /* fp32 rows of combine */
    int64_t bytes_dispatched, bytes_combined;      /* to other ranks only */
} lane_traffic;

typedef struct lane {
    const char *name;
    int rank, size;
    bool replays;          /* dispatch and combine only enqueue, the same work at every call: they may be recorded */
    bool passes;           /* one rank: combine hands on the y of the load as it is, be it without data */
    int holds;             /* multiprocessors that dispatch takes while rows travel: what runs beside it leaves them; 0:
                              none travel */
    void *self;
    int32_t pulse[PULSE];  /* what this rank says in its next dispatches */
    int32_t *pulses;       /* [size][PULSE]: what every rank said in the newest dispatch */
    /* A lane that works in the device's memory has both there instead, I32 [1, PULSE] and [size, PULSE]; whoever drives
     * it uploads `said` before a forward and reads `heard` behind it. No data: the two above hold. */
    tensor said, heard;
    /* x [n, H], ids I32 [n, K] ascending with -1 behind the last, weights F32 [n, K]; n is x->used. Borrowed until
     * combine. FAILED when a count and what arrived do not agree. */
    status (*dispatch)(struct lane *l, lane_load *in, const tensor *x, const tensor *ids, const tensor *weights);
    /* y F32 [n, H], row i the tree's sum of the partials of dispatched row i (zero where it had no edge). A lane may
     * point y at rows of its own, which hold until the next dispatch. FAILED when rows sent, received and merged do not
     * agree. */
    status (*combine)(struct lane *l, tensor *y, const lane_load *out);
    /* FAILED where an exchange on the device went wrong, as far as it has come; waits for nothing. What forwards left
     * behind counts only if it is OK after them. NULL: dispatch and combine tell themselves. */
    status (*check)(struct lane *l);
    status (*traffic)(struct lane *l, lane_traffic *t);
    void (*close)(struct lane *l); /* accepts NULL */
} lane;

/* The first two work in host memory: self for one rank, mpi for any number. They borrow rule->tree, the backend and the
 * world. All room is reserved here, for the worst case; what no row ever reaches is never touched, so where untouched
 * pages cost nothing the job pays for what it uses. Opening is not collective: agree on the status. FAILED: no memory.
 */
status lane_self_open(lane **out, const lane_rule *rule, backend *b);
status lane_mpi_open(lane **out, const lane_rule *rule, backend *b, world *w);
/* One rank on the CUDA backend: the rows stay where they are. FAILED: no memory. */
status lane_self_cuda_open(lane **out, const lane_rule *rule, backend *b);

/* The GPUs of all ranks, joined; every rank of the world calls it, before any rank may fail alone. All of it is over
 * within `deadline` seconds. sends: with channels for lane_nccl, which lane_lsa does without. BAD_INPUT: NCCL's headers
 * and library differ, two ranks share a GPU (the same message on every rank); FAILED: NCCL does not start. While it is
 * open, the world's abort ends it first. Borrows world and backend. close accepts NULL, and is not collective after an
 * abort. */
typedef struct nccl_comm nccl_comm;
status nccl_open(nccl_comm **out, world *w, backend *b, bool sends, double deadline);
/* Channels for one that was opened without; again all ranks at once, and over by the same moment. FAILED on every rank,
 * with the communicator aborted: they are not made. */
status nccl_widen(nccl_comm *n);
void nccl_close(nccl_comm *n);
/* Rows by grouped sends and receives, any number of ranks on any number of hosts. The host reads the counts of every
 * dispatch, so nothing is recorded. Borrows backend and communicator. FAILED: no memory; agree on the status. */
status lane_nccl_open(lane **out, const lane_rule *rule, backend *b, world *w, nccl_comm *n);

/* Rows by kernels that write straight into the memory of the other ranks' GPUs, which must all reach each other: one
 * host, or one NVLink domain. Nothing waits on the host. Every rank calls it at once. BAD_INPUT: a GPU does not reach
 * all others, too many ranks, a hidden size that is no multiple of 8. FAILED: no memory; agree on the status. Close
 * it when every rank's last combine is over. Borrows backend and communicator. */
status lane_lsa_open(lane **out, const lane_rule *rule, backend *b, world *w, nccl_comm *n);
/* Would it open for this tree and shape of rows? Every rank calls it at once and has the same answer: OK, or BAD_INPUT
 * with the bare reason for message, at rank 0 those of all ranks. A window of a few bytes is made and given back.
 * FAILED: no memory, or CUDA. */
status lane_lsa_try(const lane_rule *rule, backend *b, world *w, nccl_comm *n);

#endif
