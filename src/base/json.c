#include "src/base/json.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

status json_file(json_t **out, const char *path, size_t most)
{
    status st = OK;
    json_error_t e;
    struct stat info;
    *out = NULL;
    if (stat(path, &info) != 0)
        FAIL(BAD_INPUT, "%s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        FAIL(BAD_INPUT, "%s: not a regular file", path);
    if ((size_t)info.st_size > most)
        FAIL(BAD_INPUT, "%s: %lld bytes, want at most %zu", path, (long long)info.st_size, most);
    *out = json_load_file(path, 0, &e);
    if (!*out)
        FAIL(BAD_INPUT, "%s:%d:%d: not JSON: %s", path, e.line, e.column, e.text);
out:
    return st;
}

const char *json_type_name(const json_t *v)
{
    static const char *const names[] = {"an object", "an array", "a string", "an integer",
                                        "a number",  "true",     "false",    "null"};
    return names[json_typeof(v)];
}

static const json_t *present(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return v && !json_is_null(v) ? v : NULL;
}

status json_int(int64_t *out, const json_t *object, const char *key, int64_t fallback, int64_t low, int64_t high,
                const char *where)
{
    status st = OK;
    const json_t *v = present(object, key);
    *out = fallback;
    if (!v)
        return OK;
    if (!json_is_integer(v))
        FAIL(BAD_INPUT, "%s: \"%s\" is %s, want an integer", where, key, json_type_name(v));
    *out = json_integer_value(v);
    if (*out < low || *out > high)
        FAIL(BAD_INPUT, "%s: \"%s\" is %lld, want %lld to %lld", where, key, (long long)*out, (long long)low,
             (long long)high);
out:
    return st;
}

status json_double(double *out, const json_t *object, const char *key, double fallback, const char *where)
{
    status st = OK;
    const json_t *v = present(object, key);
    *out = fallback;
    if (!v)
        return OK;
    if (!json_is_number(v))
        FAIL(BAD_INPUT, "%s: \"%s\" is %s, want a number", where, key, json_type_name(v));
    *out = json_number_value(v);
out:
    return st;
}

status json_bool(bool *out, const json_t *object, const char *key, bool fallback, const char *where)
{
    status st = OK;
    const json_t *v = present(object, key);
    *out = fallback;
    if (!v)
        return OK;
    if (!json_is_boolean(v))
        FAIL(BAD_INPUT, "%s: \"%s\" is %s, want true or false", where, key, json_type_name(v));
    *out = json_is_true(v);
out:
    return st;
}

status json_text(const char **out, const json_t *object, const char *key, const char *fallback, const char *where)
{
    status st = OK;
    const json_t *v = present(object, key);
    *out = fallback;
    if (!v)
        return OK;
    if (!json_is_string(v))
        FAIL(BAD_INPUT, "%s: \"%s\" is %s, want a string", where, key, json_type_name(v));
    *out = json_string_value(v);
out:
    return st;
}
