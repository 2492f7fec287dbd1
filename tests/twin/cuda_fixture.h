/* What the tests of the CUDA backend share: both backends, and mirrors on the GPU of what the CPU works on. */
#ifndef EPOCH_TWIN_CUDA_FIXTURE_H
#define EPOCH_TWIN_CUDA_FIXTURE_H

#include "tests/twin/fixture.h"

#include <stdio.h>

enum { MIRRORS = 512, NO_GPU = 77 /* CTest: skipped */ };

typedef struct pair {
    backend *cpu, *gpu;
    void *slab[MIRRORS]; /* of the GPU; mirror_forget frees them */
    int slabs;
} pair;

static pair both; /* opened once a program: a context costs a second */

static inline void must_be(status st)
{
    if (st != OK)
        fail_msg("%s", status_message());
}

/* In main, before the tests: leaves the program where there is no GPU. */
static inline void pair_open(void)
{
    if (backend_cuda_devices() == 0) {
        status st = backend_cuda_open(&both.gpu, 0);
        printf("skipped: %s (status %d)\n", status_message(), (int)st);
        exit(NO_GPU);
    }
    if (backend_cuda_open(&both.gpu, 0) != OK || backend_cpu_open(&both.cpu, 2) != OK) {
        printf("%s\n", status_message());
        exit(1);
    }
}

static inline void *mirror_bytes(size_t bytes)
{
    void *slab;
    assert_true(both.slabs < MIRRORS);
    must_be(both.gpu->reserve(both.gpu, &slab, bytes));
    both.slab[both.slabs++] = slab;
    return slab;
}

static inline void mirror_forget(void)
{
    while (both.slabs > 0)
        both.gpu->release(both.gpu, both.slab[--both.slabs]);
}

/* Writes t's rows (host) to m (GPU). */
static inline void mirror_write(const tensor *m, const tensor *t)
{
    size_t each = (size_t)t->cols * dtype_bytes(t->type);
    char *packed = malloc((size_t)t->rows * each + 1);
    for (int64_t i = 0; i < t->rows; i++)
        memcpy(packed + (size_t)i * each, (const char *)t->data + (size_t)(i * t->ld) * dtype_bytes(t->type), each);
    must_be(both.gpu->upload(both.gpu, m, packed, t->type));
    free(packed);
}

/* t's rows from m: BF16 comes back widened where t is F32. */
static inline void mirror_read(tensor *t, const tensor *m)
{
    size_t each = (size_t)m->cols * dtype_bytes(m->type);
    char *packed = malloc((size_t)m->rows * each + 1);
    must_be(both.gpu->download(both.gpu, packed, m));
    must_be(both.cpu->upload(both.cpu, t, packed, m->type));
    free(packed);
}

/* A tensor of t's shape on the GPU, held as `type`, rows `ld` elements apart (0: t's columns); t's numbers are replaced
 * by what it holds. `used`, where t has it, is a counter there. */
static inline tensor mirror_as(tensor *t, dtype type, int64_t ld)
{
    tensor m = *t;
    m.type = type;
    m.ld = ld ? ld : t->cols;
    m.data = mirror_bytes((size_t)(m.rows * m.ld) * dtype_bytes(type) + 1);
    mirror_write(&m, t);
    if (t->type == F32 && type != F32)
        mirror_read(t, &m);
    if (t->used) {
        tensor counter = tensor_of((void *)(uintptr_t)t->used, I32, 1, 1);
        tensor there = counter;
        there.data = mirror_bytes(sizeof(int32_t));
        mirror_write(&there, &counter);
        m.used = there.data;
    }
    return m;
}

/* An activation: BF16 in rows that start at 16 bytes. */
static inline tensor mirror(tensor *t)
{
    return mirror_as(t, BF16, (t->cols + 7) / 8 * 8);
}

/* As it is. */
static inline tensor mirror_same(tensor *t)
{
    return mirror_as(t, t->type, t->cols);
}

/* The batch and slots of a fixture; the counters are those of `count`. */
static inline void mirror_fixture(fixture *g, fixture *f)
{
    *g = *f;
    g->in.count = mirror_same(&f->in.count);
    const int32_t *count = g->in.count.data;
    tensor *from[] = {&f->in.position, &f->in.slot, &f->in.role, &f->in.place, &f->in.span, &f->in.fresh};
    tensor *to[] = {&g->in.position, &g->in.slot, &g->in.role, &g->in.place, &g->in.span, &g->in.fresh};
    for (int i = 0; i < 6; i++) {
        tensor plain = *from[i];
        plain.used = NULL;
        *to[i] = mirror_same(&plain);
        to[i]->used = i < 4 ? count : i == 4 ? count + 1 : count + 2;
    }
    g->s.slot = mirror_same(&f->s.slot);
    g->s.page = mirror_same(&f->s.page);
}

/* The largest difference of two rows of `cols`, where neighbouring values of BF16 near x lie within 2^-7 |x|. */
static inline bool near_row(const float *a, const float *b, int64_t cols, double relative, double absolute)
{
    for (int64_t j = 0; j < cols; j++)
        if (!(fabs((double)a[j] - (double)b[j]) <= relative * fabs((double)b[j]) + absolute))
            return false;
    return true;
}

#endif
