/* FNV-1a over bytes and files: names for contents, not for secrets. */
#ifndef EPOCH_BASE_HASH_H
#define EPOCH_BASE_HASH_H

#include "src/base/status.h"

#include <stdint.h>

#define HASH_START 0xcbf29ce484222325u

/* Goes on from h over n bytes. */
uint64_t hash_bytes(uint64_t h, const void *bytes, size_t n);

/* Of a file's bytes as stored and their number. BAD_INPUT: it cannot be read. */
status hash_file(uint64_t *out, const char *path);

#endif
