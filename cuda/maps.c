#include "cuda/maps.h"

#include <assert.h>

typedef CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                 const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's encoder; NULL: none. The driver library is not linked, so that the program starts without one. */
static encode_tiled encoder(void)
{
    static encode_tiled found;
    if (!found) {
        void *entry = NULL;
        enum cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
        cudaError_t e =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
        if (e == cudaSuccess && result == cudaDriverEntryPointSuccess)
            found = (encode_tiled)(uintptr_t)entry;
    }
    return found;
}

bool cuda_is_hopper(const cuda *c)
{
    int major = 0, minor = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, c->device) != cudaSuccess ||
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, c->device) != cudaSuccess)
        return false;
    return major == 9 && minor == 0 && encoder() != NULL;
}

static status encode(CUtensorMap *m, const tensor *t, unsigned rank, const cuuint64_t *dims, const cuuint64_t *strides,
                     const cuuint32_t *box, CUtensorMapSwizzle swizzle)
{
    status st = OK;
    static const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUresult r = encoder()(m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, t->data, dims, strides, box, steps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                           CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        FAIL(FAILED, "the driver refused to describe a matrix [%lld, %lld] of row length %lld at %p (CUresult %d)",
             (long long)t->rows, (long long)t->cols, (long long)t->ld, t->data, (int)r);
out:
    return st;
}

status cuda_map_rows(CUtensorMap *m, const tensor *t, int box_rows)
{
    assert(t->type == BF16 && t->ld % 8 == 0);
    const cuuint64_t dims[2] = {(cuuint64_t)t->cols, (cuuint64_t)t->rows}, strides[1] = {(cuuint64_t)t->ld * 2};
    const cuuint32_t box[2] = {64, (cuuint32_t)box_rows};
    return encode(m, t, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

status cuda_map_half_rows(CUtensorMap *m, const tensor *t, int box_rows)
{
    assert(t->type == BF16 && t->ld % 8 == 0);
    const cuuint64_t dims[2] = {(cuuint64_t)t->cols, (cuuint64_t)t->rows}, strides[1] = {(cuuint64_t)t->ld * 2};
    const cuuint32_t box[2] = {32, (cuuint32_t)box_rows};
    return encode(m, t, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_64B);
}

status cuda_map_weights(CUtensorMap *m, const tensor *t, int64_t count, int halves, int box_rows)
{
    cuuint64_t row = (cuuint64_t)t->ld * 2,
               rows = (cuuint64_t)(t->rows / count / halves); /* bytes of a row; rows of a half */
    assert(t->type == BF16 && t->cols % 64 == 0 && rows % 8 == 0 && box_rows % (8 * halves) == 0);
    const cuuint64_t dims[5] = {(cuuint64_t)t->cols, 8, (cuuint64_t)halves, rows / 8, (cuuint64_t)count};
    const cuuint64_t strides[4] = {row, rows * row, 8 * row, rows * (cuuint64_t)halves * row};
    const cuuint32_t box[5] = {64, 8, (cuuint32_t)halves, (cuuint32_t)(box_rows / 8 / halves), 1};
    return encode(m, t, 5, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}
