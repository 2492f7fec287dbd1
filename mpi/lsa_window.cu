/* Where the windows of all ranks lie, as this GPU sees them: NCCL tells it to kernels only. */
#include <nccl_device.h>

#include <cuda_runtime_api.h>

static __global__ void peers_kernel(ncclWindow_t window, int size, char **out)
{
    for (int i = (int)threadIdx.x; i < size; i += (int)blockDim.x)
        out[i] = (char *)ncclGetLsaPointer(window, 0, i);
}

/* out[size]: memory that the device can write. */
extern "C" cudaError_t lsa_window_peers(cudaStream_t stream, ncclWindow_t window, int size, char **out)
{
    peers_kernel<<<1, 32, 0, stream>>>(window, size, out);
    return cudaGetLastError();
}

/* Ranks whose memory this one reaches, itself among them. */
extern "C" int lsa_window_team(ncclComm_t comm)
{
    return ncclTeamLsa(comm).nRanks;
}
