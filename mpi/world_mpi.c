/* The ranks of an mpirun job as a world. */
#include "mpi/world_mpi.h"

#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ABORT_SECONDS = 3 }; /* how long MPI_Abort may take */

typedef struct world_mpi {
    MPI_Comm comm;
    char (*message)[STATUS_MESSAGE_BYTES]; /* [size] at rank 0; taken early: agree must not need memory */
} world_mpi;

MPI_Comm world_mpi_comm(const world *w)
{
    return ((const world_mpi *)w->self)->comm;
}

status world_mpi_fail(int code, const char *call, const char *file, int line)
{
    char words[MPI_MAX_ERROR_STRING] = "";
    int n = 0;
    if (MPI_Error_string(code, words, &n) != MPI_SUCCESS)
        snprintf(words, sizeof words, "error %d", code);
    return status_fail(FAILED, file, line, "%.*s: %s", (int)strcspn(call, "("), call, words);
}

static status bcast(world *w, void *bytes, size_t n, int root)
{
    status st = OK;
    for (size_t at = 0; at < n;) {
        int part = n - at < INT_MAX ? (int)(n - at) : INT_MAX;
        TRY_MPI(MPI_Bcast((char *)bytes + at, part, MPI_BYTE, root, world_mpi_comm(w)));
        at += (size_t)part;
    }
out:
    return st;
}

static status gather(world *w, void *all, const void *mine, size_t n)
{
    status st = OK;
    if (n > INT_MAX)
        FAIL(FAILED, "gather of %zu bytes a rank, at most %d", n, INT_MAX);
    TRY_MPI(MPI_Gather(mine, (int)n, MPI_BYTE, all, (int)n, MPI_BYTE, 0, world_mpi_comm(w)));
out:
    return st;
}

static status counts(world *w, int32_t *recv, const int32_t *send)
{
    status st = OK;
    TRY_MPI(MPI_Alltoall(send, 1, MPI_INT32_T, recv, 1, MPI_INT32_T, world_mpi_comm(w)));
out:
    return st;
}

/* Appends to the cut text; returns the new length. */
static size_t put(char *text, size_t at, const char *more)
{
    int n = snprintf(text + at, STATUS_MESSAGE_BYTES - at, "%s", more);
    return at + (size_t)n < STATUS_MESSAGE_BYTES ? at + (size_t)n : STATUS_MESSAGE_BYTES - 1;
}

/* Appends the ranks from `first` on that share first's message, as "0-3,6", and clears it with them. */
static size_t put_ranks(char *text, size_t at, char (*message)[STATUS_MESSAGE_BYTES], int first, int size)
{
    char shared[STATUS_MESSAGE_BYTES], run[16];
    memcpy(shared, message[first], sizeof shared);
    for (int r = first; r < size; r++) {
        int from = r;
        while (r < size && strcmp(message[r], shared) == 0)
            message[r++][0] = '\0';
        if (r == from)
            continue;
        snprintf(run, sizeof run, "%s%d", from > first ? "," : "", from);
        at = put(text, at, run);
        snprintf(run, sizeof run, "-%d", r - 1);
        at = put(text, at, r - from > 1 ? run : "");
    }
    return at;
}

/* Each distinct message once, a line each, led by who says it. Uses the messages up. */
static void join(char (*message)[STATUS_MESSAGE_BYTES], int size)
{
    char text[STATUS_MESSAGE_BYTES] = "", said[STATUS_MESSAGE_BYTES], total[16];
    size_t at = 0;
    snprintf(total, sizeof total, "/%d: ", size);
    for (int r = 0; r < size; r++) {
        if (!message[r][0])
            continue;
        memcpy(said, message[r], sizeof said);
        if (at > 0)
            at = put(text, at, "\n");
        if (size > 1) {
            int several = 0;
            for (int o = r + 1; o < size; o++)
                several |= strcmp(message[o], said) == 0;
            at = put(text, at, several ? "ranks " : "rank ");
            at = put_ranks(text, at, message, r, size);
            at = put(text, at, total);
        }
        at = put(text, at, said);
    }
    status_message_set(text);
}

static status agree(world *w, status mine)
{
    static const status by_weight[] = {OK, ROWS_FAILED, STOPPED, BAD_INPUT, FAILED};
    world_mpi *m = w->self;
    status st = OK;
    int weight = (int)(sizeof by_weight / sizeof *by_weight) - 1, worst;
    char text[STATUS_MESSAGE_BYTES] = "";
    while (weight > 0 && by_weight[weight] != mine)
        weight--;
    TRY_MPI(MPI_Allreduce(&weight, &worst, 1, MPI_INT, MPI_MAX, m->comm));
    if (worst == 0)
        return OK;
    if (mine != OK)
        snprintf(text, sizeof text, "%s", status_message());
    TRY_MPI(MPI_Gather(text, sizeof text, MPI_CHAR, m->message, sizeof text, MPI_CHAR, 0, m->comm));
    if (w->rank == 0)
        join(m->message, w->size);
    st = by_weight[worst];
out:
    return st;
}

static volatile sig_atomic_t abort_code;

static void abort_late(int sig)
{
    (void)sig;
    _exit(abort_code);
}

static void abort_job(world *w, status why)
{
    /* All of this may hang where something is already broken. */
    struct sigaction late = {.sa_handler = abort_late};
    sigset_t set;
    abort_code = why;
    sigemptyset(&late.sa_mask);
    sigaction(SIGALRM, &late, NULL);
    sigemptyset(&set);
    sigaddset(&set, SIGALRM);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    alarm(ABORT_SECONDS);
    if (w->at_abort)
        w->at_abort(w->with);
    fflush(NULL);
    MPI_Abort(world_mpi_comm(w), why);
    _exit(why);
}

static void close_world(world *w)
{
    if (!w)
        return;
    world_mpi *m = w->self;
    MPI_Comm_free(&m->comm);
    MPI_Finalize();
    free(m->message);
    free(m);
    free(w);
}

status world_mpi_open(world **out, int *argc, char ***argv)
{
    status st = OK;
    int provided = 0;
    MPI_Comm host = MPI_COMM_NULL;
    world *w = NULL;
    world_mpi *m = NULL;
    *out = NULL;
    TRY_MPI(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided));
    if (provided < MPI_THREAD_FUNNELED)
        FAIL(FAILED, "MPI offers thread level %d, want %d (MPI_THREAD_FUNNELED): use an MPI built with threads",
             provided, MPI_THREAD_FUNNELED);
    w = calloc(1, sizeof *w);
    m = calloc(1, sizeof *m);
    if (!w || !m)
        FAIL(FAILED, "out of memory");
    TRY_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    TRY_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &m->comm));
    TRY_MPI(MPI_Comm_rank(m->comm, &w->rank));
    TRY_MPI(MPI_Comm_size(m->comm, &w->size));
    TRY_MPI(MPI_Comm_split_type(m->comm, MPI_COMM_TYPE_SHARED, w->rank, MPI_INFO_NULL, &host));
    TRY_MPI(MPI_Comm_rank(host, &w->local_rank));
    TRY_MPI(MPI_Comm_size(host, &w->local_size));
    TRY_MPI(MPI_Comm_free(&host));
    if (w->rank == 0) {
        m->message = calloc((size_t)w->size, sizeof *m->message);
        if (!m->message)
            FAIL(FAILED, "out of memory");
    }
    w->self = m;
    w->bcast = bcast;
    w->gather = gather;
    w->counts = counts;
    w->agree = agree;
    w->abort = abort_job;
    w->close = close_world;
    *out = w;
    w = NULL;
    m = NULL;
out:
    /* No MPI_Finalize here: it would wait for ranks that do not know of this failure. */
    free(m);
    free(w);
    return st;
}
