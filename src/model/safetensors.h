/* Mapped weight files, tensors by name: DIR/model.safetensors, or the shards of DIR/model.safetensors.index.json.
 * A header is checked whole (length, JSON, dtypes, shapes, offsets inside the file, no overlap, no gap in arithmetic)
 * before anything in it is trusted. Pages are read when touched, so a rank pays only for what it copies. */
#ifndef EPOCH_MODEL_SAFETENSORS_H
#define EPOCH_MODEL_SAFETENSORS_H

#include "src/base/status.h"
#include "src/base/tensor.h"

#include <stdbool.h>

typedef struct safetensors safetensors;

typedef struct stored_tensor { /* borrowed from the open files */
    const char *name, *file;
    dtype type;
    int dims;
    int64_t shape[4];
    const void *data;
    size_t bytes;
} stored_tensor;

/* BAD_INPUT names file and tensor. Owned by the caller; close accepts NULL. */
status safetensors_open(safetensors **out, const char *dir);
void safetensors_close(safetensors *s);

/* The tensor of that name, or NULL. */
const stored_tensor *safetensors_find(const safetensors *s, const char *name);
/* All tensors, in no particular order: index 0 .. count - 1. */
int safetensors_count(const safetensors *s);
const stored_tensor *safetensors_at(const safetensors *s, int index);

/* Tells the kernel that these bytes of a tensor are no longer needed (their pages leave the resident set). */
void safetensors_done(const safetensors *s, const void *data, size_t bytes);

/* 64-bit hash over all headers (names, shapes, offsets) and file sizes: what the results file records of a checkpoint
 * together with config.json's. Cheap: it reads no weights. */
uint64_t safetensors_hash(const safetensors *s);

#endif
