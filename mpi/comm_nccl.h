/* The GPUs of a world joined by NCCL: what the lanes share that work on it. One communicator, opened with a deadline,
 * its errors looked for wherever the host waits, and its end when the job is taken down. NVLink multicast is never
 * used. src/lane.h declares nccl_open and nccl_close. */
#ifndef EPOCH_MPI_COMM_NCCL_H
#define EPOCH_MPI_COMM_NCCL_H

#include "cuda/kernels.h"
#include "src/lane.h"

#include <nccl.h>

/* Every rank of the world, in its order; NULL once it is aborted. Groups on it return when they are enqueued.
 * Borrowed. */
ncclComm_t nccl_handle(const nccl_comm *n);

/* FAILED unless `r`, what a call on the communicator returned, is success; waits while it is in progress. */
status nccl_check(nccl_comm *n, ncclResult_t r, const char *what, const char *file, int line);
#define NCCL_TRY(n, call) TRY(nccl_check((n), (call), #call, __FILE__, __LINE__))

/* Waits until `event` has come to pass. FAILED: the device or NCCL reports an error meanwhile, such as a rank that is
 * gone; the communicator is then aborted. */
status nccl_wait(nccl_comm *n, cudaEvent_t event);

#endif
