/* Being asked to stop: SIGUSR1 and SIGTERM (SIGINT) set one flag, which the run looks at between forwards. SIGCONT,
 * which comes along with mpirun's SIGTERM, means nothing. A second request ends the process at once with the default
 * action: what was acknowledged is safe. */
#ifndef EPOCH_STOP_H
#define EPOCH_STOP_H

#include <stdbool.h>

void stop_listen(void);
bool stop_asked(void);

#endif
