/* Being asked to stop: SIGUSR1 and SIGTERM (SIGINT) set one flag, which the run looks at between forwards. SIGCONT,
 * which comes along with mpirun's SIGTERM, means nothing. A second request ends the process at once with the signal's
 * default action: what was acknowledged is safe. Requests within a quarter of a second are one, which came by several
 * ways: Slurm signals mpirun and its ranks, and mpirun passes its own on. */
#ifndef EPOCH_STOP_H
#define EPOCH_STOP_H

#include <stdbool.h>

/* From the program's first lines on; also makes a write beyond a limit or into a closed pipe an error. */
void stop_listen(void);
bool stop_asked(void);

#endif
