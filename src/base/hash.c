#include "src/base/hash.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

uint64_t hash_bytes(uint64_t h, const void *bytes, size_t n)
{
    const unsigned char *b = bytes;
    for (size_t i = 0; i < n; i++)
        h = (h ^ b[i]) * 0x100000001b3u;
    return h;
}

status hash_file(uint64_t *out, const char *path)
{
    status st = OK;
    unsigned char chunk[1 << 14];
    uint64_t bytes = 0;
    size_t n;
    FILE *f = fopen(path, "rb");
    *out = HASH_START;
    if (!f)
        FAIL(BAD_INPUT, "%s: %s", path, strerror(errno));
    while ((n = fread(chunk, 1, sizeof chunk, f)) > 0) {
        *out = hash_bytes(*out, chunk, n);
        bytes += n;
    }
    if (ferror(f))
        FAIL(BAD_INPUT, "%s: cannot be read behind byte %llu: %s", path, (unsigned long long)bytes, strerror(errno));
    for (int i = 0; i < 8; i++)
        chunk[i] = (unsigned char)(bytes >> 8 * i); /* the same on every machine */
    *out = hash_bytes(*out, chunk, 8);
out:
    if (f)
        fclose(f);
    return st;
}
