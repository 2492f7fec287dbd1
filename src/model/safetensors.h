/* Mapped weight files, tensors by name: DIR/model.safetensors, or else the shards of DIR/model.safetensors.index.json.
 * Pages are read when touched, so a rank pays only for what it copies.
 *
 * A header is checked whole before anything in it is trusted: its length against the file and a cap of 100 MB, JSON
 * without repeated names, dtypes (F32, F16, BF16, I32, U8; another is refused by name), at most four dimensions, shape
 * times dtype equal to the bytes, and the tensors filling the data part exactly: no overlap, no hole, nothing behind
 * the last one, each aligned to its dtype. An index and its shards must name the same tensors. What is not guarded
 * against is a file that shrinks while it is open. */
#ifndef EPOCH_MODEL_SAFETENSORS_H
#define EPOCH_MODEL_SAFETENSORS_H

#include "src/base/status.h"
#include "src/base/tensor.h"

#include <stdbool.h>

typedef struct safetensors safetensors;

typedef struct stored_tensor { /* borrowed from the open files */
    const char *name, *file;   /* file: without its folder */
    dtype type;
    int dims;
    int64_t shape[4];
    const void *data; /* aligned to its dtype */
    size_t bytes;
} stored_tensor;

/* `path`: a folder, or one .safetensors file. BAD_INPUT names file and tensor. Owned by the caller; close accepts
 * NULL. */
status safetensors_open(safetensors **out, const char *path);
void safetensors_close(safetensors *s);

/* The tensor of that name, or NULL. */
const stored_tensor *safetensors_find(const safetensors *s, const char *name);
/* All tensors, ascending by name: index 0 .. count - 1. */
int safetensors_count(const safetensors *s);
const stored_tensor *safetensors_at(const safetensors *s, int index);

/* Tells the kernel that these bytes of a tensor are no longer needed (their pages leave the resident set; a neighbour's
 * on the same pages are read again when touched). */
void safetensors_done(const safetensors *s, const void *data, size_t bytes);

/* 64-bit hash over all headers (names, shapes, offsets), file sizes, and samples of the weights spread over each file:
 * what the results file records of a checkpoint. Cheap: 64 pages a file, so a change of few weights may stay unseen. */
uint64_t safetensors_hash(const safetensors *s);

#endif
