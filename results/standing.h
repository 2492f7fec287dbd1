/* `epoch status FILE.h5`: how a run stands, for people and for job scripts. */
#ifndef EPOCH_RESULTS_STANDING_H
#define EPOCH_RESULTS_STANDING_H

#include "src/base/status.h"

/* argv[0] is the command's name. Prints rows done, failed and left, who runs it, and what the file holds. OK: all rows
 * are done and published; ROWS_FAILED: likewise, some as failed; STOPPED: `epoch run --resume` has work left;
 * BAD_INPUT: usage, or no such results. */
status standing_command(int argc, char **argv);

#endif
