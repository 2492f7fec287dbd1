/* A row-major matrix view. It owns nothing; the memory belongs to an arena of the backend that computes on it. */
#ifndef EPOCH_BASE_TENSOR_H
#define EPOCH_BASE_TENSOR_H

#include <stddef.h>
#include <stdint.h>

typedef enum dtype { F32, BF16, F16, I32, U8 } dtype;

static inline size_t dtype_bytes(dtype t)
{
    return t == F32 || t == I32 ? 4 : t == U8 ? 1 : 2;
}

static inline const char *dtype_name(dtype t)
{
    static const char *const names[] = {"F32", "BF16", "F16", "I32", "U8"};
    return names[t];
}

typedef struct tensor {
    void *data;
    int64_t rows, cols, ld; /* ld: elements from one row to the next */
    dtype type;
    const int32_t *used; /* valid rows, in the backend's own memory; NULL: all. Ops launch for `rows`, touch `used` */
} tensor;

static inline tensor tensor_of(void *data, dtype type, int64_t rows, int64_t cols)
{
    return (tensor){.data = data, .rows = rows, .cols = cols, .ld = cols, .type = type};
}

/* Rows [first, first + rows) of t, all valid. */
static inline tensor tensor_rows(const tensor *t, int64_t first, int64_t rows)
{
    tensor v = *t;
    v.data = (char *)t->data + (size_t)(first * t->ld) * dtype_bytes(t->type);
    v.rows = rows;
    v.used = NULL;
    return v;
}

#endif
