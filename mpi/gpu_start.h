/* What must hold before the GPUs of several ranks may be joined. It takes no GPU to judge: the facts are gathered, the
 * first thing that is wrong becomes the message of all ranks. */
#ifndef EPOCH_MPI_GPU_START_H
#define EPOCH_MPI_GPU_START_H

#include "src/base/status.h"

/* Where a rank computes. */
typedef struct gpu_place {
    char host[160]; /* name and boot id: two machines of one name are told apart */
    char bus[32];   /* PCI bus id of its GPU */
} gpu_place;

/* This host's name and boot id into place->host. */
void gpu_host(gpu_place *place);

/* Versions as NCCL codes them. BAD_INPUT unless they are the same: structures that both sides share have changed within
 * one minor version. */
status gpu_versions_check(int headers, int library);
/* place[r] of rank r. BAD_INPUT: two ranks of a host have one GPU; names both. */
status gpu_places_check(const gpu_place *place, int size);

#endif
