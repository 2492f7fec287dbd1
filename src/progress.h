/* What a person sees of a run: a bar (or plain lines in a log) on stderr while it goes on, and the table at its end. */
#ifndef EPOCH_PROGRESS_H
#define EPOCH_PROGRESS_H

#include "src/base/status.h"

#include <stdint.h>

typedef struct progress progress;

/* how: PROGRESS_* of options.h. before: rows done in earlier sessions. */
status progress_open(progress **out, int how, int64_t total, int64_t before);
/* rows and tokens of this session so far. Draws at most five times a second (a line every ten seconds in a log). */
status progress_show(progress *p, int64_t rows, int64_t tokens, double seconds);
/* Ends the bar's line; accepts NULL. */
void progress_close(progress *p);

/* The final table on stdout, from the published file: rows, accuracy, rates, and the file's path. */
status progress_table(const char *path, int64_t total);

#endif
