/* What the files of this room share: the communicator behind a world, and MPI's failures as statuses. */
#ifndef EPOCH_MPI_WORLD_MPI_H
#define EPOCH_MPI_WORLD_MPI_H

#include "src/world.h"

#include <mpi.h>

/* Borrowed; every rank of the world, errors returned. */
MPI_Comm world_mpi_comm(const world *w);

/* FAILED with the name of the call and MPI's own words for `code`. */
status world_mpi_fail(int code, const char *call, const char *file, int line);

#define TRY_MPI(call)                                                  \
    do {                                                               \
        int mpi_code = (call);                                         \
        if (mpi_code != MPI_SUCCESS) {                                 \
            st = world_mpi_fail(mpi_code, #call, __FILE__, __LINE__);  \
            goto out;                                                  \
        }                                                              \
    } while (0)

#endif
