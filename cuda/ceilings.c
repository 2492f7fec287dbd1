/* What this GPU can do at most, measured: copying on the device, and a large BF16 product of cuBLASLt on random data.
 */
#include "cuda/kernels.h"

#include <cublasLt.h>

enum { SIDE = 8192, TIMES = 10, WORKSPACE_BYTES = 32 << 20 };
static const size_t COPY_BYTES = (size_t)1 << 30;

static status check(cublasStatus_t e, const char *what, int line)
{
    return e == CUBLAS_STATUS_SUCCESS ? OK
                                      : status_fail(FAILED, __FILE__, line, "%s: %s", what, cublasLtGetStatusString(e));
}
#define LT_TRY(call) TRY(check((call), #call, __LINE__))

/* The shortest of TIMES runs, seconds. */
static status shortest(cuda *c, double *out, status (*run)(cuda *c, void *of), void *of)
{
    status st = OK;
    cudaEvent_t from = NULL, to = NULL;
    *out = 1e9;
    CUDA_TRY(cudaEventCreate(&from));
    CUDA_TRY(cudaEventCreate(&to));
    for (int i = 0; i < TIMES + 2; i++) {
        float ms;
        CUDA_TRY(cudaEventRecord(from, c->stream));
        TRY(run(c, of));
        CUDA_TRY(cudaEventRecord(to, c->stream));
        CUDA_TRY(cudaEventSynchronize(to));
        CUDA_TRY(cudaEventElapsedTime(&ms, from, to));
        if (i >= 2 && 1e-3 * (double)ms < *out)
            *out = 1e-3 * (double)ms;
    }
out:
    if (from)
        cudaEventDestroy(from);
    if (to)
        cudaEventDestroy(to);
    return st;
}

static status copy(cuda *c, void *of)
{
    char *room = of;
    return cuda_check(cudaMemcpyAsync(room, room + COPY_BYTES, COPY_BYTES, cudaMemcpyDeviceToDevice, c->stream), "copy",
                      __FILE__, __LINE__);
}

typedef struct product {
    cublasLtHandle_t lt;
    cublasLtMatmulDesc_t what;
    cublasLtMatrixLayout_t shape;
    cublasLtMatmulPreference_t limits;
    cublasLtMatmulHeuristicResult_t found;
    char *room; /* three matrices, and the workspace */
} product;

static status multiply(cuda *c, void *of)
{
    product *p = of;
    const float one = 1, zero = 0;
    const size_t each = (size_t)SIDE * SIDE * 2;
    return check(cublasLtMatmul(p->lt, p->what, &one, p->room, p->shape, p->room + each, p->shape, &zero,
                                p->room + 2 * each, p->shape, p->room + 2 * each, p->shape, &p->found.algo,
                                p->room + 3 * each, WORKSPACE_BYTES, c->stream),
                 "cublasLtMatmul", __LINE__);
}

status backend_cuda_ceilings(backend *b, double *copied, double *multiplied)
{
    status st = OK;
    cuda *c = cuda_of(b);
    product p = {0};
    void *room = NULL;
    double seconds;
    int found = 0;
    const size_t workspace = WORKSPACE_BYTES;
    const cublasOperation_t turned = CUBLAS_OP_T;
    TRY(b->reserve(b, &room, 2 * COPY_BYTES));
    p.room = room;
    tensor all = tensor_of(room, BF16, 3 * (int64_t)SIDE, SIDE);
    TRY(b->random(b, &all, 1, 1));
    LT_TRY(cublasLtCreate(&p.lt));
    LT_TRY(cublasLtMatmulDescCreate(&p.what, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    LT_TRY(cublasLtMatmulDescSetAttribute(p.what, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned));
    LT_TRY(cublasLtMatrixLayoutCreate(&p.shape, CUDA_R_16BF, SIDE, SIDE, SIDE));
    LT_TRY(cublasLtMatmulPreferenceCreate(&p.limits));
    LT_TRY(cublasLtMatmulPreferenceSetAttribute(p.limits, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                sizeof workspace));
    LT_TRY(cublasLtMatmulAlgoGetHeuristic(p.lt, p.what, p.shape, p.shape, p.shape, p.shape, p.limits, 1, &p.found,
                                          &found));
    if (found == 0)
        FAIL(FAILED, "cuBLASLt has no product of %d x %d matrices", SIDE, SIDE);
    TRY(shortest(c, &seconds, multiply, &p));
    *multiplied = 2.0 * SIDE * SIDE * SIDE / seconds;
    TRY(shortest(c, &seconds, copy, room));
    *copied = 2.0 * (double)COPY_BYTES / seconds;
out:
    if (p.limits)
        cublasLtMatmulPreferenceDestroy(p.limits);
    if (p.shape)
        cublasLtMatrixLayoutDestroy(p.shape);
    if (p.what)
        cublasLtMatmulDescDestroy(p.what);
    if (p.lt)
        cublasLtDestroy(p.lt);
    if (room)
        b->release(b, room);
    return st;
}
