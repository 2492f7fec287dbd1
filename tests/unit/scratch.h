/* A folder of its own for one test program, and files in it. */
#ifndef EPOCH_TESTS_SCRATCH_H
#define EPOCH_TESTS_SCRATCH_H

#include "src/model/safetensors.h"

#include <dirent.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SCRATCH_BYTES = 512 };

static char scratch_dir[SCRATCH_BYTES / 2];

static inline const char *scratch_path(const char *name)
{
    static char place[SCRATCH_BYTES];
    snprintf(place, sizeof place, "%s/%s", scratch_dir, name);
    return place;
}

/* Removes the files in the folder. */
static inline void scratch_clear(void)
{
    DIR *d = opendir(scratch_dir);
    struct dirent *e;
    while (d && (e = readdir(d)))
        if (e->d_name[0] != '.')
            remove(scratch_path(e->d_name));
    if (d)
        closedir(d);
}

static inline int scratch_open(void **state)
{
    const char *top = getenv("TMPDIR");
    (void)state;
    snprintf(scratch_dir, sizeof scratch_dir, "%s/epoch-test-XXXXXX", top && *top ? top : "/tmp");
    return mkdtemp(scratch_dir) ? 0 : -1;
}

static inline int scratch_close(void **state)
{
    (void)state;
    scratch_clear();
    return rmdir(scratch_dir);
}

static inline void scratch_write(const char *name, const void *bytes, size_t n)
{
    remove(scratch_path(name)); /* truncating a file in place makes some file systems wait for the disk */
    FILE *f = fopen(scratch_path(name), "wb");
    if (!f || fwrite(bytes, 1, n, f) != n || fclose(f) != 0)
        abort();
}

/* Writes a safetensors file whose header is `text` and whose data part is `n` bytes. */
static inline void scratch_raw(const char *name, const char *text, const void *data, size_t n)
{
    size_t length = strlen(text);
    unsigned char *all = calloc(1, 8 + length + n);
    if (!all)
        abort();
    for (int i = 0; i < 8; i++)
        all[i] = (unsigned char)(length >> 8 * i);
    memcpy(all + 8, text, length);
    if (n)
        memcpy(all + 8 + length, data, n);
    scratch_write(name, all, 8 + length + n);
    free(all);
}

/* Writes `count` tensors in the order given. */
static inline void scratch_tensors(const char *name, const stored_tensor *t, int count)
{
    json_t *header = json_object();
    size_t at = 0;
    for (int i = 0; i < count; i++) {
        json_t *shape = json_array();
        for (int d = 0; d < t[i].dims; d++)
            json_array_append_new(shape, json_integer(t[i].shape[d]));
        json_object_set_new(header, t[i].name,
                            json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype_name(t[i].type), "shape", shape,
                                      "data_offsets", (json_int_t)at, (json_int_t)(at + t[i].bytes)));
        at += t[i].bytes;
    }
    char *packed = json_dumps(header, JSON_COMPACT), *data = malloc(at + 1);
    size_t length = packed ? strlen(packed) : 0;
    char *text = malloc(length + 9);
    if (!packed || !data || !text)
        abort();
    snprintf(text, length + 9, "%s%*s", packed, (int)(7 - (length + 7) % 8), ""); /* aligns the data */
    at = 0;
    for (int i = 0; i < count; i++) {
        memcpy(data + at, t[i].data, t[i].bytes);
        at += t[i].bytes;
    }
    scratch_raw(name, text, data, at);
    free(text);
    free(data);
    free(packed);
    json_decref(header);
}

/* Writes config.json: the one in `from`, with the keys of `edits` (JSON) set, and those removed whose value is "-". */
static inline void scratch_config(const char *from, const char *edits)
{
    char place[SCRATCH_BYTES];
    const char *key;
    json_t *value, *change = json_loads(edits, 0, NULL), *doc;
    snprintf(place, sizeof place, "%s/config.json", from);
    doc = json_load_file(place, 0, NULL);
    if (!doc || !change)
        abort();
    json_object_foreach(change, key, value)
    {
        if (json_is_string(value) && strcmp(json_string_value(value), "-") == 0)
            json_object_del(doc, key);
        else
            json_object_set(doc, key, value);
    }
    remove(scratch_path("config.json"));
    if (json_dump_file(doc, scratch_path("config.json"), 0) != 0)
        abort();
    json_decref(change);
    json_decref(doc);
}

#endif
