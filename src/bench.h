/* `epoch bench`: forwards of a real shape with random weights, timed without a checkpoint, beside the floor that the
 * bytes and FLOPs of each op set at the ceilings of this very device. Everything it prints is synthetic and says so. */
#ifndef EPOCH_BENCH_H
#define EPOCH_BENCH_H

#include "src/base/status.h"

/* The command; argv[0] is its name. */
status bench_command(int argc, char **argv);

#endif
