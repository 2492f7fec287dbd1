/* `epoch bench`: forwards of a real shape with random weights, timed without a checkpoint, beside the floor that the
 * bytes and FLOPs of each op set at the ceilings of this very device. Everything it prints is synthetic and says so. */
#ifndef EPOCH_BENCH_H
#define EPOCH_BENCH_H

#include "src/world.h"

#include <stdbool.h>

/* The command on every rank of the world; argv[0] is its name. *together as run's. */
status bench(world *w, int argc, char **argv, bool *together);

#endif
