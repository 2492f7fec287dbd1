#define _DEFAULT_SOURCE /* madvise: posix_madvise's DONTNEED does nothing */

#include "src/model/safetensors.h"

#include "src/base/hash.h"
#include "src/base/json.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { HEADER_MOST = 100000000, INDEX_MOST = 100000000, DIMS_MOST = 4, PATH_BYTES = 1024 };

/* A touched page may bring its neighbours in, up to the kernel's fault-around window; dropping takes them all out. */
enum { FAULT_WINDOW = 65536 };

typedef struct mapped {
    char *name; /* without the folder */
    char *base;
    size_t size, data_at; /* data_at: behind the header */
} mapped;

struct safetensors {
    mapped *file;
    int file_count, file_room;
    stored_tensor *tensor;
    int tensor_count, tensor_room;
};

static status grow(void **array, int *room, int count, size_t bytes)
{
    status st = OK;
    if (count == *room) {
        int more = *room ? 2 * *room : 64;
        void *p = realloc(*array, (size_t)more * bytes);
        if (!p)
            FAIL(FAILED, "out of memory");
        *array = p;
        *room = more;
    }
out:
    return st;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const stored_tensor *)a)->name, ((const stored_tensor *)b)->name);
}

static int by_place(const void *a, const void *b)
{
    const stored_tensor *s = a, *t = b;
    if (s->data != t->data)
        return (const char *)s->data < (const char *)t->data ? -1 : 1;
    return (s->bytes > t->bytes) - (s->bytes < t->bytes);
}

static int by_file(const void *a, const void *b)
{
    return strcmp(((const mapped *)a)->name, ((const mapped *)b)->name);
}

static bool dtype_of(dtype *out, const char *name)
{
    static const dtype known[] = {F32, BF16, F16, I32, U8};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(name, dtype_name(known[i])) == 0) {
            *out = known[i];
            return true;
        }
    return false;
}

/* Appends one tensor of file m, its entry checked on its own. `path` is for messages. */
static status add_tensor(safetensors *s, const mapped *m, const char *path, const char *name, const json_t *entry)
{
    status st = OK;
    stored_tensor t = {.file = m->name};
    const char *type = json_string_value(json_object_get(entry, "dtype"));
    const json_t *shape = json_object_get(entry, "shape"), *place = json_object_get(entry, "data_offsets");
    size_t room = m->size - m->data_at, elements = 1;
    json_int_t begin, end;
    if (!type || !json_is_array(shape) || json_array_size(place) != 2 || !json_is_integer(json_array_get(place, 0)) ||
        !json_is_integer(json_array_get(place, 1)))
        FAIL(BAD_INPUT, "%s: tensor \"%s\": want a dtype, a shape and two data_offsets", path, name);
    if (!dtype_of(&t.type, type))
        FAIL(BAD_INPUT, "%s: tensor \"%s\" is %s, want F32, F16, BF16, I32 or U8", path, name, type);
    if (json_array_size(shape) > DIMS_MOST)
        FAIL(BAD_INPUT, "%s: tensor \"%s\" has %zu dimensions, want at most %d", path, name, json_array_size(shape),
             DIMS_MOST);
    t.dims = (int)json_array_size(shape);
    for (int d = 0; d < t.dims; d++) {
        const json_t *n = json_array_get(shape, (size_t)d);
        if (!json_is_integer(n) || json_integer_value(n) < 0)
            FAIL(BAD_INPUT, "%s: tensor \"%s\": dimension %d of its shape is no count", path, name, d);
        t.shape[d] = json_integer_value(n);
        if (t.shape[d] > 0 && elements > SIZE_MAX / 8 / (size_t)t.shape[d])
            FAIL(BAD_INPUT, "%s: tensor \"%s\": its shape has more elements than 64 bits can count", path, name);
        elements *= (size_t)t.shape[d];
    }
    begin = json_integer_value(json_array_get(place, 0));
    end = json_integer_value(json_array_get(place, 1));
    if (begin < 0 || end < begin || (size_t)end > room)
        FAIL(BAD_INPUT,
             "%s: tensor \"%s\" lies at bytes %lld to %lld, but the file's data has %zu: truncated or damaged", path,
             name, (long long)begin, (long long)end, room);
    t.bytes = (size_t)(end - begin);
    if (t.bytes != elements * dtype_bytes(t.type))
        FAIL(BAD_INPUT, "%s: tensor \"%s\" has %zu bytes, want %zu (its shape in %s)", path, name, t.bytes,
             elements * dtype_bytes(t.type), type);
    t.data = m->base + m->data_at + begin;
    if ((m->data_at + (size_t)begin) % dtype_bytes(t.type) != 0)
        FAIL(BAD_INPUT,
             "%s: tensor \"%s\" starts at byte %zu of the file, want a multiple of %zu: save the file again "
             "with a current safetensors library",
             path, name, m->data_at + (size_t)begin, dtype_bytes(t.type));
    TRY(grow((void **)&s->tensor, &s->tensor_room, s->tensor_count, sizeof t));
    t.name = strdup(name);
    if (!t.name)
        FAIL(FAILED, "out of memory");
    s->tensor[s->tensor_count++] = t;
out:
    return st;
}

/* The tensors of one file, from `first` on, fill its data part from end to end. */
static status check_places(safetensors *s, int first, const mapped *m, const char *path)
{
    status st = OK;
    size_t at = 0, room = m->size - m->data_at;
    if (s->tensor_count > first)
        qsort(s->tensor + first, (size_t)(s->tensor_count - first), sizeof *s->tensor, by_place);
    for (int i = first; i < s->tensor_count; i++) {
        const stored_tensor *t = &s->tensor[i];
        size_t begin = (size_t)((const char *)t->data - m->base) - m->data_at;
        if (begin < at)
            FAIL(BAD_INPUT, "%s: tensors \"%s\" and \"%s\" overlap", path, t[-1].name, t->name);
        if (begin > at)
            FAIL(BAD_INPUT, "%s: data bytes %zu to %zu, before tensor \"%s\", belong to no tensor", path, at, begin,
                 t->name);
        at = begin + t->bytes;
    }
    if (at != room)
        FAIL(BAD_INPUT, "%s: %zu bytes behind the last tensor", path, room - at);
out:
    return st;
}

static status read_header(safetensors *s, mapped *m, const char *path)
{
    status st = OK;
    json_t *header = NULL, *entry;
    json_error_t e;
    const char *name;
    uint64_t length = 0;
    int first = s->tensor_count;
    if (m->size < 8)
        FAIL(BAD_INPUT, "%s: %zu bytes, too short for a safetensors file", path, m->size);
    for (int i = 7; i >= 0; i--)
        length = length << 8 | (unsigned char)m->base[i];
    if (length > HEADER_MOST || length > m->size - 8)
        FAIL(BAD_INPUT,
             "%s: a header of %llu bytes in a file of %zu, want at most %d: truncated, or not a safetensors "
             "file",
             path, (unsigned long long)length, m->size, HEADER_MOST);
    m->data_at = 8 + (size_t)length;
    header = json_loadb(m->base + 8, (size_t)length, JSON_REJECT_DUPLICATES, &e);
    if (!header)
        FAIL(BAD_INPUT, "%s: header: byte %d: not JSON: %s", path, e.position, e.text);
    if (!json_is_object(header))
        FAIL(BAD_INPUT, "%s: the header is not a JSON object", path);
    json_object_foreach(header, name, entry)
    {
        if (strcmp(name, "__metadata__") != 0)
            TRY(add_tensor(s, m, path, name, entry));
    }
    TRY(check_places(s, first, m, path));
out:
    json_decref(header);
    return st;
}

/* Maps one file and appends its tensors. */
static status add_file(safetensors *s, const char *path)
{
    status st = OK;
    struct stat info;
    mapped *m;
    const char *slash = strrchr(path, '/');
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info) != 0)
        FAIL(BAD_INPUT, "%s: %s", path, strerror(errno));
    if (!S_ISREG(info.st_mode))
        FAIL(BAD_INPUT, "%s: not a regular file", path);
    TRY(grow((void **)&s->file, &s->file_room, s->file_count, sizeof *s->file));
    m = &s->file[s->file_count];
    *m = (mapped){.name = strdup(slash ? slash + 1 : path), .size = (size_t)info.st_size};
    if (!m->name)
        FAIL(FAILED, "out of memory");
    s->file_count++;
    if (m->size > 0) {
        void *base = mmap(NULL, m->size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (base == MAP_FAILED)
            FAIL(FAILED, "%s: cannot be mapped: %s", path, strerror(errno));
        m->base = base;
    }
    TRY(read_header(s, m, path));
out:
    if (fd >= 0)
        close(fd);
    return st;
}

/* Puts the tensors in order of their names, each of which may come once. */
static status sort_names(safetensors *s)
{
    status st = OK;
    if (s->tensor_count > 0)
        qsort(s->tensor, (size_t)s->tensor_count, sizeof *s->tensor, by_name);
    for (int i = 1; i < s->tensor_count; i++)
        if (strcmp(s->tensor[i - 1].name, s->tensor[i].name) == 0)
            FAIL(BAD_INPUT, "tensor \"%s\" is in both %s and %s", s->tensor[i].name, s->tensor[i - 1].file,
                 s->tensor[i].file);
out:
    return st;
}

static bool has_file(const safetensors *s, const char *name)
{
    for (int i = s->file_count - 1; i >= 0; i--)
        if (strcmp(s->file[i].name, name) == 0)
            return true;
    return false;
}

static status open_shards(safetensors *s, const char *dir, const char *index)
{
    status st = OK;
    json_t *doc = NULL, *map, *value;
    const char *name;
    char path[PATH_BYTES];
    TRY(json_file(&doc, index, INDEX_MOST));
    map = json_object_get(doc, "weight_map");
    if (!json_is_object(map))
        FAIL(BAD_INPUT, "%s: \"weight_map\" is missing or not an object", index);
    json_object_foreach(map, name, value)
    {
        const char *file = json_string_value(value);
        if (!file || !*file || strchr(file, '/'))
            FAIL(BAD_INPUT, "%s: tensor \"%s\": want the name of a file in the same folder", index, name);
        if (has_file(s, file))
            continue;
        snprintf(path, sizeof path, "%s/%s", dir, file);
        if (access(path, R_OK) != 0)
            FAIL(BAD_INPUT, "%s: %s, where it says tensor \"%s\" is: %s", index, path, name, strerror(errno));
        TRY(add_file(s, path));
    }
    if (s->file_count > 0)
        qsort(s->file, (size_t)s->file_count, sizeof *s->file, by_file); /* the hash asks for one order */
    TRY(sort_names(s));
    json_object_foreach(map, name, value)
    {
        const stored_tensor *t = safetensors_find(s, name);
        if (!t || strcmp(t->file, json_string_value(value)) != 0)
            FAIL(BAD_INPUT, "%s: tensor \"%s\" is not in %s, where it says it is", index, name,
                 json_string_value(value));
    }
    for (int i = 0; i < s->tensor_count; i++)
        if (!json_object_get(map, s->tensor[i].name))
            FAIL(BAD_INPUT, "%s: tensor \"%s\" of %s is not in the index", index, s->tensor[i].name, s->tensor[i].file);
out:
    json_decref(doc);
    return st;
}

status safetensors_open(safetensors **out, const char *path)
{
    status st = OK;
    struct stat info;
    char single[PATH_BYTES], index[PATH_BYTES];
    safetensors *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        FAIL(FAILED, "out of memory");
    if (stat(path, &info) != 0)
        FAIL(BAD_INPUT, "%s: %s", path, strerror(errno));
    snprintf(single, sizeof single, "%s/model.safetensors", path);
    snprintf(index, sizeof index, "%s/model.safetensors.index.json", path);
    if (!S_ISDIR(info.st_mode) || access(single, F_OK) == 0) {
        TRY(add_file(s, S_ISDIR(info.st_mode) ? single : path));
        TRY(sort_names(s));
    } else if (access(index, F_OK) == 0) {
        TRY(open_shards(s, path, index));
    } else {
        FAIL(BAD_INPUT, "%s: neither model.safetensors nor model.safetensors.index.json is in this folder", path);
    }
    *out = s;
    s = NULL;
out:
    safetensors_close(s);
    return st;
}

void safetensors_close(safetensors *s)
{
    if (!s)
        return;
    for (int i = 0; i < s->tensor_count; i++)
        free((char *)s->tensor[i].name);
    for (int i = 0; i < s->file_count; i++) {
        if (s->file[i].base)
            munmap(s->file[i].base, s->file[i].size);
        free(s->file[i].name);
    }
    free(s->tensor);
    free(s->file);
    free(s);
}

const stored_tensor *safetensors_find(const safetensors *s, const char *name)
{
    stored_tensor key = {.name = name};
    return s->tensor_count ? bsearch(&key, s->tensor, (size_t)s->tensor_count, sizeof key, by_name) : NULL;
}

int safetensors_count(const safetensors *s)
{
    return s->tensor_count;
}

const stored_tensor *safetensors_at(const safetensors *s, int index)
{
    return &s->tensor[index];
}

void safetensors_done(const safetensors *s, const void *data, size_t bytes)
{
    const char *at = data;
    for (int i = 0; i < s->file_count; i++) {
        const mapped *m = &s->file[i];
        if (at < m->base || at >= m->base + m->size)
            continue;
        size_t first = (size_t)(at - m->base), last = first + bytes + FAULT_WINDOW - 1;
        first -= first % FAULT_WINDOW;
        last -= last % FAULT_WINDOW;
        madvise(m->base + first, (last < m->size ? last : m->size) - first, MADV_DONTNEED);
        return;
    }
}

uint64_t safetensors_hash(const safetensors *s)
{
    enum { SAMPLES = 64, SAMPLE_BYTES = 64 };
    uint64_t hash = HASH_START;
    for (int i = 0; i < s->file_count; i++) {
        const mapped *m = &s->file[i];
        size_t data = m->size - m->data_at, bytes = data < SAMPLE_BYTES ? data : SAMPLE_BYTES;
        unsigned char size[8];
        for (int k = 0; k < 8; k++)
            size[k] = (unsigned char)(m->size >> 8 * k);
        hash = hash_bytes(hash, m->base, m->data_at);
        hash = hash_bytes(hash, size, sizeof size);
        for (size_t k = 0; k < SAMPLES; k++)
            hash = hash_bytes(hash, m->base + m->data_at + (data - bytes) / (SAMPLES - 1) * k, bytes);
    }
    return hash;
}
