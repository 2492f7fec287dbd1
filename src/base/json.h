/* A few helpers over Jansson: typed gets whose messages name the document, the key, what was found and what was wanted.
 */
#ifndef EPOCH_BASE_JSON_H
#define EPOCH_BASE_JSON_H

#include "src/base/status.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* Parses a whole file (at most `most` bytes). BAD_INPUT names file, line and column. json_decref the result. */
status json_file(json_t **out, const char *path, size_t most);

/* "an object", "a string", ... */
const char *json_type_name(const json_t *v);

/* Each get: the key's value; `fallback` where the key is absent or null. BAD_INPUT where the type is another. `where`
 * names the document in messages. Integers must lie in [low, high]. */
status json_int(int64_t *out, const json_t *object, const char *key, int64_t fallback, int64_t low, int64_t high,
                const char *where);
status json_double(double *out, const json_t *object, const char *key, double fallback, const char *where);
status json_bool(bool *out, const json_t *object, const char *key, bool fallback, const char *where);
/* Borrowed from the object. */
status json_text(const char **out, const json_t *object, const char *key, const char *fallback, const char *where);

#endif
