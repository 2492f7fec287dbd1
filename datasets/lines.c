#include "datasets/lines.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

enum { CHUNK = 1 << 14 };

struct lines {
    gzFile file; /* zlib passes a file without the gzip header through as it is */
    char *path, *text;
    size_t room; /* bytes at text */
    int64_t number, row;
    size_t at, have; /* the unread part of chunk */
    char chunk[CHUNK];
};

status lines_open(lines **out, const char *path)
{
    status st = OK;
    struct stat info;
    lines *l = NULL;
    *out = NULL;
    if (stat(path, &info) != 0)
        FAIL(BAD_INPUT, "%s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode)) /* it is read more than once, and by every rank */
        FAIL(BAD_INPUT, "%s: not a regular file", path);
    l = calloc(1, sizeof *l);
    if (!l || !(l->path = strdup(path)))
        FAIL(FAILED, "%s: no memory", path);
    l->file = gzopen(path, "rb");
    if (!l->file)
        FAIL(BAD_INPUT, "%s: %s", path, strerror(errno));
    *out = l;
    l = NULL;
out:
    lines_close(l);
    return st;
}

void lines_close(lines *l)
{
    if (!l)
        return;
    if (l->file)
        gzclose(l->file);
    free(l->path);
    free(l->text);
    free(l);
}

static status fill(lines *l)
{
    status st = OK;
    int error = Z_OK;
    int n = gzread(l->file, l->chunk, CHUNK);
    int why = errno;
    if (n <= 0)
        gzerror(l->file, &error); /* gzip data that end early give 0, as a whole file does, and leave only this code */
    if (error != Z_OK && error != Z_STREAM_END)
        FAIL(BAD_INPUT, "%s:%lld: row %lld cannot be read: %s", l->path, (long long)l->number + 1,
             (long long)l->row + 1,
             error == Z_ERRNO       ? strerror(why)
             : error == Z_BUF_ERROR ? "the gzip data end early; fetch the file again"
                                    : "the gzip data are damaged; fetch the file again");
    l->at = 0;
    l->have = (size_t)n;
out:
    return st;
}

/* Puts n bytes behind the `before` bytes of the line, as far as the limit allows, and ends it. */
static status keep(lines *l, size_t before, const char *bytes, size_t n)
{
    status st = OK;
    if (before >= LINES_MOST)
        return OK;
    if (n > LINES_MOST - before)
        n = LINES_MOST - before;
    if (before + n + 1 > l->room) {
        size_t room = 2 * (before + n + 1);
        char *text = realloc(l->text, room);
        if (!text)
            FAIL(FAILED, "%s:%lld: no memory for a line of %zu bytes", l->path, (long long)l->number + 1, room);
        l->text = text;
        l->room = room;
    }
    memcpy(l->text + before, bytes, n);
    l->text[before + n] = '\0';
out:
    return st;
}

/* One line as it stands into l->text, its length to *bytes; *more is false at the end of the file. */
static status read_line(lines *l, size_t *bytes, bool *more)
{
    status st = OK;
    *bytes = 0;
    *more = false;
    for (bool ended = false; !ended;) {
        if (l->at == l->have)
            TRY(fill(l));
        if (l->have == 0)
            break;
        const char *start = l->chunk + l->at, *end = memchr(start, '\n', l->have - l->at);
        ended = end != NULL;
        size_t n = ended ? (size_t)(end - start) : l->have - l->at;
        TRY(keep(l, *bytes, start, n));
        *bytes += n;
        l->at += n + ended;
        *more = true;
    }
out:
    return st;
}

status lines_next(lines *l, line *out)
{
    status st = OK;
    bool blank = true, more;
    const char *text;
    size_t bytes;
    *out = (line){0};
    while (blank) {
        TRY(read_line(l, &bytes, &more));
        if (!more)
            goto out;
        text = l->text;
        if (l->number++ == 0 && bytes >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) {
            text += 3;
            bytes -= 3;
        }
        if (bytes > 0 && bytes <= LINES_MOST && text[bytes - 1] == '\r')
            l->text[text - l->text + (ptrdiff_t)--bytes] = '\0';
        blank = strspn(text, " \t") == bytes;
    }
    *out = (line){.text = text, .bytes = bytes, .number = l->number, .row = ++l->row};
out:
    return st;
}
