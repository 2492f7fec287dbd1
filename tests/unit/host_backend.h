/* A backend of host memory alone: what loading weights needs, and a count of what was asked of it. */
#ifndef EPOCH_TESTS_HOST_BACKEND_H
#define EPOCH_TESTS_HOST_BACKEND_H

#include "src/backend.h"

#include <stdlib.h>
#include <string.h>

typedef struct host_memory {
    size_t limit, reserved; /* limit 0: none */
    int slabs, uploads;
} host_memory;

static inline status host_reserve(backend *b, void **slab, size_t bytes)
{
    status st = OK;
    host_memory *m = b->self;
    *slab = NULL;
    if (m->limit && bytes > m->limit)
        FAIL(FAILED, "no room for %zu bytes", bytes);
    *slab = calloc(bytes, 1);
    if (!*slab)
        FAIL(FAILED, "out of memory");
    m->slabs++;
    m->reserved = bytes;
out:
    return st;
}

static inline void host_release(backend *b, void *slab)
{
    ((host_memory *)b->self)->slabs--;
    free(slab);
}

static inline float host_widen(dtype type, const void *p)
{
    uint32_t bits = 0;
    float f;
    if (type == F32) {
        memcpy(&f, p, 4);
        return f;
    }
    uint16_t half;
    memcpy(&half, p, 2);
    if (type == BF16) {
        bits = (uint32_t)half << 16;
        memcpy(&f, &bits, 4);
        return f;
    }
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    f = exponent == 0 ? (float)mantissa / 16777216.0f : 0; /* 2^-24 */
    if (exponent != 0) {
        bits = (uint32_t)(exponent == 31 ? 255 : exponent + 112) << 23 | (uint32_t)mantissa << 13;
        memcpy(&f, &bits, 4);
    }
    return half & 0x8000 ? -f : f;
}

static inline void host_narrow(dtype type, void *p, float f)
{
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if (type == F32) {
        memcpy(p, &f, 4);
    } else { /* BF16, to nearest, ties to even */
        uint16_t half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        memcpy(p, &half, 2);
    }
}

static inline status host_upload(backend *b, const tensor *dst, const void *src, dtype from)
{
    status st = OK;
    const size_t in = dtype_bytes(from), out_bytes = dtype_bytes(dst->type);
    ((host_memory *)b->self)->uploads++;
    if (dst->type == F16 && from != F16)
        FAIL(FAILED, "the host backend does not narrow to F16");
    for (int64_t r = 0; r < dst->rows; r++) {
        const char *x = (const char *)src + (size_t)(r * dst->cols) * in;
        char *y = (char *)dst->data + (size_t)(r * dst->ld) * out_bytes;
        if (from == dst->type)
            memcpy(y, x, (size_t)dst->cols * in);
        else
            for (int64_t c = 0; c < dst->cols; c++)
                host_narrow(dst->type, y + (size_t)c * out_bytes, host_widen(from, x + (size_t)c * in));
    }
out:
    return st;
}

static inline backend host_backend(host_memory *m)
{
    return (backend){.name = "host",
                     .self = m,
                     .activation = F32,
                     .reserve = host_reserve,
                     .release = host_release,
                     .upload = host_upload};
}

#endif
