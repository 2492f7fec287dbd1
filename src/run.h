/* `epoch run`: prompts in, rows out. */
#ifndef EPOCH_RUN_H
#define EPOCH_RUN_H

#include "src/options.h"
#include "src/world.h"

/* Runs the whole job on this rank. *together: every rank knows of the outcome, so the ranks may leave in order;
 * otherwise this rank failed alone in mid-iteration and the job must be taken down (world.abort). OK, ROWS_FAILED,
 * STOPPED, BAD_INPUT or FAILED. */
status run(const options *o, world *w, const char *command_line, bool *together);

#endif
