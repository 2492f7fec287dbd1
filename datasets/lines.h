/* The lines of a file, plain or gzip, one at a time. Memory: the longest line, at most LINES_MOST bytes. */
#ifndef EPOCH_DATASETS_LINES_H
#define EPOCH_DATASETS_LINES_H

#include "src/base/status.h"

#include <stdint.h>

enum { LINES_MOST = 16 << 20 };

typedef struct line {
    const char *text; /* NUL-terminated, borrowed until the next call; NULL at the end of the file */
    size_t bytes;     /* its length; above LINES_MOST: the line is too long and `text` is its beginning */
    int64_t number;   /* from 1, blank lines counted */
    int64_t row;      /* from 1, blank lines not counted */
} line;

typedef struct lines lines;

/* BAD_INPUT: missing, unreadable, or not a regular file. Close accepts NULL. */
status lines_open(lines **out, const char *path);
void lines_close(lines *l);

/* The next line that is not blank (spaces, tabs), without its "\n" or "\r\n"; a byte order mark before the first line
 * is passed over. BAD_INPUT: reading fails or the gzip data is damaged; a line cut off by that is not given out. */
status lines_next(lines *l, line *out);

#endif
