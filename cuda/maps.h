/* Descriptions of matrices for the bulk copy engine of Hopper GPUs (sm_90), and whether this device is one. Boxes are
 * 64 elements wide and swizzled as hopper.cuh says. */
#ifndef EPOCH_CUDA_MAPS_H
#define EPOCH_CUDA_MAPS_H

#include "cuda/kernels.h"

#include <cuda.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Can the kernels of hopper.cuh run here (compute capability 9.0, a driver that describes matrices)? */
bool cuda_is_hopper(const cuda *c);

/* BF16 rows t [rows, cols]: boxes of box_rows rows by 64 columns, zero outside. Wants 16-byte rows and address. */
status cuda_map_rows(CUtensorMap *m, const tensor *t, int box_rows);

/* The same with 32 columns: rows of 64 bytes, chunk c of row r at place c ^ (r / 2 & 3). */
status cuda_map_half_rows(CUtensorMap *m, const tensor *t, int box_rows);

/* BF16 weights t [count * halves * (rows of a half), cols] of `count` experts. A box is box_rows rows by 64 columns:
 * with one half neighbouring rows; with two, half of them from each half, eight by eight in turn. Coordinates: column,
 * 0, 0, first row of the half / 8, expert. A half is a whole number of 8 rows, a box of 8 * halves; cols a multiple of
 * 64. */
status cuda_map_weights(CUtensorMap *m, const tensor *t, int64_t count, int halves, int box_rows);

#ifdef __cplusplus
}
#endif

#endif
