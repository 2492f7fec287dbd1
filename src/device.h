/* What computes, and what is asked of it besides its ops: what `epoch run` and `epoch bench` have in common. */
#ifndef EPOCH_DEVICE_H
#define EPOCH_DEVICE_H

#include "src/backend.h"
#include "src/world.h"

#include <stdbool.h>

/* Is it a GPU on each rank? device: DEVICE_AUTO and so on, of options.h; may: auto may take GPUs. The same answer on
 * every rank; collective. BAD_INPUT: --device cuda of a program without CUDA. FAILED: no memory, or MPI. */
status device_choose(bool *cuda, world *w, int device, bool may);

/* This rank's backend; the caller's. threads: of a CPU; 0: the host's cores dealt to its ranks. Errors as those of
 * backend_cpu_open and backend_cuda_open. */
status device_open(backend **out, const world *w, bool cuda, int threads);

/* As backend_cuda_ceilings and backend_cuda_taken; of a CPU neither is known, and nothing is written. */
status device_ceilings(backend *b, bool cuda, double *copied, double *multiplied);
status device_taken(backend *b, bool cuda, double *bytes);

#endif
