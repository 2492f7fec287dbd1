/* Seam: the ranks of the job, and the few host collectives that bootstrap, agree and report. */
#ifndef EPOCH_WORLD_H
#define EPOCH_WORLD_H

#include "src/base/status.h"

#include <stdint.h>

typedef struct world {
    int rank, size;
    int local_rank, local_size; /* among the ranks of this host */
    void *self;
    /* bytes[0..n) of `root` to every rank. */
    status (*bcast)(struct world *w, void *bytes, size_t n, int root);
    /* n bytes of every rank, in rank order, at rank 0; `all` may be NULL elsewhere. */
    status (*gather)(struct world *w, void *all, const void *mine, size_t n);
    /* One int to and from every rank: recv[r] is what rank r had in send[me]. */
    status (*counts)(struct world *w, int32_t *recv, const int32_t *send);
    /* The worst status of all ranks, on every rank (order: FAILED, BAD_INPUT, STOPPED, ROWS_FAILED, OK). At rank 0
     * status_message() then holds each distinct message once, one per line, each led by "rank R/N: ". */
    status (*agree)(struct world *w, status mine);
    /* Takes the whole job down at once with exit code `why`; does not return. */
    void (*abort)(struct world *w, status why);
    /* What abort ends first: a transport of its own. It may hang; abort goes on. NULL, as opened: nothing. */
    void (*at_abort)(void *with);
    void *with;
    /* Finalizes; accepts NULL. */
    void (*close)(struct world *w);
} world;

/* Starts MPI (MPI_THREAD_FUNNELED); a program started without mpirun is a world of one rank. */
status world_mpi_open(world **out, int *argc, char ***argv);

#endif
