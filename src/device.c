#include "src/device.h"

#include "src/options.h"
#include "src/transport.h"

#include <unistd.h>

static status open_cpu(backend **out, const world *w, int threads)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (threads == 0)
        threads = cores > w->local_size ? (int)(cores / w->local_size) : 1;
    return backend_cpu_open(out, threads);
}

#ifdef EPOCH_CUDA
status device_choose(bool *cuda, world *w, int device, bool may)
{
    status st = OK;
    *cuda = device == DEVICE_CUDA;
    if (device == DEVICE_AUTO && may && (w->size == 1 || transport_joins()))
        TRY(transport_gpus(cuda, w, backend_cuda_bus(w->local_rank)));
out:
    return st;
}

status device_open(backend **out, const world *w, bool cuda, int threads)
{
    return cuda ? backend_cuda_open(out, w->local_rank) : open_cpu(out, w, threads);
}

status device_ceilings(backend *b, bool cuda, double *copied, double *multiplied)
{
    return cuda ? backend_cuda_ceilings(b, copied, multiplied) : OK;
}

status device_taken(backend *b, bool cuda, double *bytes)
{
    return cuda ? backend_cuda_taken(b, bytes) : OK;
}
#else /* a CPU always */
status device_choose(bool *cuda, world *w, int device, bool may)
{
    status st = OK;
    (void)w, (void)may;
    *cuda = false;
    if (device == DEVICE_CUDA)
        FAIL(BAD_INPUT, "--device cuda: this program was built without CUDA (-DEPOCH_CUDA=ON)");
out:
    return st;
}

status device_open(backend **out, const world *w, bool cuda, int threads)
{
    (void)cuda;
    return open_cpu(out, w, threads);
}

status device_ceilings(backend *b, bool cuda, double *copied, double *multiplied)
{
    (void)b, (void)cuda, (void)copied, (void)multiplied;
    return OK;
}

status device_taken(backend *b, bool cuda, double *bytes)
{
    (void)b, (void)cuda, (void)bytes;
    return OK;
}
#endif
