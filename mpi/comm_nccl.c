#include "mpi/comm_nccl.h"

#include "mpi/gpu_start.h"
#include "src/base/clock.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* `start` does not block, so that its beginning can be given up. But each group on such a communicator starts a thread
 * inside NCCL; the lanes work on `comm`, made from it, whose groups do not. What carries no sends has a single channel:
 * of 24 each takes 8 MB at once. */
struct nccl_comm {
    world *w;
    ncclComm_t start, comm;
    double deadline, until; /* of the beginning: seconds, and when they are over */
    bool aborted;
};

/* What a rank says before NCCL starts, and what becomes of it on all ranks. */
typedef struct hello {
    gpu_place place;
    status st;
    char message[512];
} hello;

typedef struct verdict {
    ncclUniqueId id;
    status st;
    char message[512];
} verdict;

static void pause_briefly(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* ---- errors */

static status failed(ncclComm_t comm, ncclResult_t r, const char *what, const char *file, int line)
{
    const char *more = ncclGetLastError(comm);
    return status_fail(FAILED, file, line, "%.*s: %s%s%s", (int)strcspn(what, "("), what, ncclGetErrorString(r),
                       more && *more ? ": " : "", more ? more : "");
}

/* Waits while r is in progress. */
static ncclResult_t settled(ncclComm_t comm, ncclResult_t r)
{
    while (r == ncclInProgress) {
        ncclResult_t asked = ncclCommGetAsyncError(comm, &r);
        if (asked != ncclSuccess)
            return asked;
        sched_yield();
    }
    return r;
}

status nccl_check(nccl_comm *n, ncclResult_t r, const char *what, const char *file, int line)
{
    r = settled(n->comm, r);
    return r == ncclSuccess ? OK : failed(n->comm, r, what, file, line);
}

/* Ends what is under way on this rank's GPU; the other ranks see an error, or their watchdogs do. */
static void nccl_abort(void *self)
{
    nccl_comm *n = self;
    if (n->aborted)
        return;
    n->aborted = true;
    if (n->comm)
        ncclCommAbort(n->comm);
    if (n->start)
        ncclCommAbort(n->start);
    n->comm = n->start = NULL;
}

enum { LOOKS = 2000 }; /* at an event, for one at the communicator */

status nccl_wait(nccl_comm *n, cudaEvent_t event)
{
    status st = OK;
    cudaError_t e;
    for (int64_t i = 1; (e = cudaEventQuery(event)) == cudaErrorNotReady; i++) {
        ncclResult_t r = ncclSuccess;
        if (i % LOOKS)
            continue;
        NCCL_TRY(n, ncclCommGetAsyncError(n->comm, &r));
        if (r != ncclSuccess && r != ncclInProgress) {
            st = failed(n->comm, r, "a transfer between GPUs", __FILE__, __LINE__);
            nccl_abort(n);
            goto out;
        }
        sched_yield();
    }
    TRY(cuda_check(e, "the forward", __FILE__, __LINE__));
out:
    return st;
}

/* ---- start */

static status introduce(gpu_place *place, int device)
{
    status st = OK;
    int library = 0;
    gpu_host(place);
    if (ncclGetVersion(&library) != ncclSuccess)
        FAIL(FAILED, "NCCL does not tell its version");
    TRY(gpu_versions_check(NCCL_VERSION_CODE, library));
    CUDA_TRY(cudaDeviceGetPCIBusId(place->bus, sizeof place->bus, device));
out:
    return st;
}

/* Rank 0: the first thing that is wrong, else the id of the new communicator. */
static void judge(verdict *v, const hello *all, int size)
{
    status st = OK;
    ncclResult_t r;
    gpu_place *place = calloc((size_t)size, sizeof *place);
    if (!place)
        FAIL(FAILED, "out of memory");
    for (int i = 0; i < size; i++) {
        place[i] = all[i].place;
        if (all[i].st != OK) {
            status_message_set(all[i].message);
            st = all[i].st;
            goto out;
        }
    }
    TRY(gpu_places_check(place, size));
    if ((r = ncclGetUniqueId(&v->id)) != ncclSuccess)
        st = failed(NULL, r, "ncclGetUniqueId", __FILE__, __LINE__);
out:
    v->st = st;
    if (st != OK)
        snprintf(v->message, sizeof v->message, "%s", status_message());
    free(place);
}

/* Polls what began on n->start until it is over, *made there, or n->until has come. A split calls itself a success
 * before it is done. */
static status begun(nccl_comm *n, ncclResult_t r, ncclComm_t *made, const char *what)
{
    status st = OK;
    while (r == ncclInProgress || (r == ncclSuccess && !*(ncclComm_t volatile *)made)) {
        if (clock_seconds() > n->until)
            FAIL(FAILED,
                 "%s is not over after %g s (--connect-timeout): a rank, or the network between hosts, does "
                 "not answer; NCCL_DEBUG=INFO says more",
                 what, n->deadline);
        ncclResult_t asked = ncclCommGetAsyncError(n->start, &r);
        if (asked != ncclSuccess)
            r = asked;
        pause_briefly();
    }
    if (r != ncclSuccess)
        st = failed(n->start, r, what, __FILE__, __LINE__);
out:
    return st;
}

/* A communicator from `start` for the lanes. */
static status split(nccl_comm *n, ncclComm_t *comm, bool sends)
{
    ncclConfig_t plain = NCCL_CONFIG_INITIALIZER;
    plain.blocking = 1;
    if (!sends)
        plain.maxCTAs = 1;
    return begun(n, ncclCommSplit(n->start, 0, n->w->rank, comm, &plain), comm, "the second start of NCCL");
}

status nccl_open(nccl_comm **out, world *w, backend *b, bool sends, double deadline)
{
    status st = OK;
    hello mine = {.st = OK}, *all = NULL;
    verdict v = {.st = OK};
    nccl_comm *n = calloc(1, sizeof *n);
    *out = NULL;
    setenv("NCCL_NVLS_ENABLE", "0", 1); /* multicast is not to be used, whatever the environment says */
    all = calloc((size_t)w->size, sizeof *all);
    TRY(w->agree(w, n && all ? OK : status_fail(FAILED, __FILE__, __LINE__, "out of memory")));
    mine.st = introduce(&mine.place, cuda_of(b)->device);
    if (mine.st != OK)
        snprintf(mine.message, sizeof mine.message, "%s", status_message());
    TRY(w->gather(w, all, &mine, sizeof mine));
    if (w->rank == 0)
        judge(&v, all, w->size);
    TRY(w->bcast(w, &v, sizeof v, 0));
    if (v.st != OK) {
        status_message_set(v.message);
        st = v.st;
        goto out;
    }
    n->w = w;
    n->deadline = deadline;
    n->until = clock_seconds() + deadline;
    ncclConfig_t patient = NCCL_CONFIG_INITIALIZER;
    patient.blocking = 0;
    patient.maxCTAs = 1;
    TRY(begun(n, ncclCommInitRankConfig(&n->start, w->size, v.id, w->rank, &patient), &n->start,
              "the start of NCCL"));
    TRY(split(n, &n->comm, sends));
    w->at_abort = nccl_abort;
    w->with = n;
    *out = n;
    n = NULL;
out:
    if (n)
        nccl_abort(n);
    free(n);
    free(all);
    return st;
}

status nccl_widen(nccl_comm *n)
{
    status st = OK;
    ncclComm_t wide = NULL;
    TRY(n->w->agree(n->w, split(n, &wide, true))); /* what follows takes all ranks */
    ncclCommDestroy(n->comm);
    n->comm = wide;
out:
    if (st != OK)
        nccl_abort(n);
    return st;
}

ncclComm_t nccl_handle(const nccl_comm *n)
{
    return n->comm;
}

void nccl_close(nccl_comm *n)
{
    if (!n)
        return;
    n->w->at_abort = NULL;
    if (!n->aborted) {
        ncclCommDestroy(n->comm);
        settled(n->start, ncclCommFinalize(n->start));
        ncclCommDestroy(n->start);
    }
    free(n);
}
