/* Stands for NCCL where several ranks must share one GPU, which NCCL refuses: preloaded into the program, it carries
 * groups of sends and receives through host memory and MPI, and gives each rank's GPU a PCI bus id of its own. Slow,
 * and exact: whatever depends on ranks but not on the wire can be tested with it. It makes no windows of GPU memory.
 *   STAND_IN=version   the library is not the headers' version
 *   STAND_IN=hangs     the start is never over
 *   STAND_IN=fails     rank 1's hundredth group fails */
#include <cuda_runtime_api.h>
#include <mpi.h>
#include <nccl.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

ncclResult_t ncclGroupStart(void); /* nccl.h leaves the void out */
ncclResult_t ncclGroupEnd(void);

enum { POSTS = 256, TAG = 77 };

struct ncclComm {
    MPI_Comm mpi;
};

typedef struct post {
    void *device, *host;
    size_t bytes;
    int peer, send;
} post;

static post posted[POSTS];
static int count, depth;
static cudaStream_t stream;
static struct ncclComm *on;

static int told(const char *what)
{
    const char *how = getenv("STAND_IN");
    return how && strcmp(how, what) == 0;
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int bytes, int device)
{
    int rank;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    snprintf(id, (size_t)bytes, "stand-in:%d:%d", rank, device);
    return cudaSuccess;
}

ncclResult_t ncclGetVersion(int *version)
{
    *version = NCCL_VERSION_CODE - told("version");
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    memset(id, 0, sizeof *id);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    (void)size;
    (void)id;
    (void)rank;
    (void)config;
    *comm = NULL;
    if (told("hangs"))
        return ncclInProgress;
    *comm = malloc(sizeof **comm);
    return *comm && MPI_Comm_dup(MPI_COMM_WORLD, &(*comm)->mpi) == MPI_SUCCESS ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config)
{
    ncclUniqueId none;
    (void)comm;
    memset(&none, 0, sizeof none);
    return ncclCommInitRankConfig(out, 0, none, color + key, config);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *r)
{
    (void)comm;
    *r = told("hangs") ? ncclInProgress : ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    (void)comm;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    MPI_Comm_free(&comm->mpi);
    free(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    (void)comm;
    return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void **memory, size_t bytes)
{
    return cudaMalloc(memory, bytes) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclMemFree(void *memory)
{
    return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *memory, size_t bytes, ncclWindow_t *window, int flags)
{
    (void)comm;
    (void)memory;
    (void)bytes;
    (void)flags;
    *window = NULL;
    return ncclSuccess;
}

static ncclResult_t put(void *data, size_t bytes, int peer, int send, ncclComm_t comm, cudaStream_t s)
{
    if (count == POSTS || depth == 0)
        return ncclInvalidUsage;
    on = comm;
    stream = s;
    posted[count++] = (post){data, NULL, bytes, peer, send};
    return ncclSuccess;
}

/* The lanes send bytes. */
ncclResult_t ncclSend(const void *data, size_t bytes, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t s)
{
    return type == ncclInt8 ? put((void *)(size_t)data, bytes, peer, 1, comm, s) : ncclInvalidArgument;
}

ncclResult_t ncclRecv(void *data, size_t bytes, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t s)
{
    return type == ncclInt8 ? put(data, bytes, peer, 0, comm, s) : ncclInvalidArgument;
}

ncclResult_t ncclGroupStart(void)
{
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    MPI_Request request[POSTS];
    cudaError_t e = cudaSuccess;
    static int groups;
    int bad = 0, rank;
    if (--depth > 0 || count == 0)
        return ncclSuccess;
    MPI_Comm_rank(on->mpi, &rank);
    if (rank == 1 && ++groups == 100 && told("fails"))
        return ncclRemoteError;
    for (int i = 0; i < count; i++) {
        post *p = &posted[i];
        p->host = malloc(p->bytes);
        if (p->send && e == cudaSuccess)
            e = cudaMemcpyAsync(p->host, p->device, p->bytes, cudaMemcpyDeviceToHost, stream);
    }
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(stream);
    for (int i = 0; i < count; i++) {
        const post *p = &posted[i];
        bad |= p->send ? MPI_Isend(p->host, (int)p->bytes, MPI_BYTE, p->peer, TAG, on->mpi, &request[i])
                       : MPI_Irecv(p->host, (int)p->bytes, MPI_BYTE, p->peer, TAG, on->mpi, &request[i]);
    }
    bad |= MPI_Waitall(count, request, MPI_STATUSES_IGNORE);
    for (int i = 0; i < count; i++) {
        const post *p = &posted[i];
        if (!p->send && e == cudaSuccess)
            e = cudaMemcpyAsync(p->device, p->host, p->bytes, cudaMemcpyHostToDevice, stream);
    }
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(stream);
    for (int i = 0; i < count; i++)
        free(posted[i].host);
    count = 0;
    return e != cudaSuccess ? ncclUnhandledCudaError : bad ? ncclSystemError : ncclSuccess;
}
