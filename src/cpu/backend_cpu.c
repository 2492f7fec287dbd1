#include "src/cpu/cpu.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- conversions */

static inline float of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The exponent is moved by a product, so that subnormal halves come out right. */
static inline float of_half(uint16_t h)
{
    float magnitude = of_bits((uint32_t)(h & 0x7fff) << 13) * 0x1p112f;
    uint32_t bits = to_bits(magnitude);
    bits = (h & 0x7c00) == 0x7c00 ? 0x7f800000u | (uint32_t)(h & 0x3ff) << 13 : bits;
    return of_bits(bits | (uint32_t)(h & 0x8000) << 16);
}

static inline uint16_t to_half(float x)
{
    uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) /* subnormal: the sum lets the hardware round at bit 2^-24 */
        return (uint16_t)(sign | (to_bits(of_bits(rest) + 0.5f) - to_bits(0.5f)));
    rest += 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | ((rest - 0x38000000) >> 13));
}

static inline uint16_t to_bfloat(float x)
{
    uint32_t bits = to_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

void cpu_widen(float *restrict y, const void *restrict x, dtype type, int64_t n)
{
    const uint16_t *h = x;
    if (type == F32)
        memcpy(y, x, (size_t)n * sizeof *y);
    else if (type == BF16)
        for (int64_t i = 0; i < n; i++)
            y[i] = of_bits((uint32_t)h[i] << 16);
    else
        for (int64_t i = 0; i < n; i++)
            y[i] = of_half(h[i]);
}

void cpu_narrow(void *restrict y, dtype type, const float *restrict x, int64_t n)
{
    uint16_t *h = y;
    if (type == F32)
        memcpy(y, x, (size_t)n * sizeof *x);
    else if (type == BF16)
        for (int64_t i = 0; i < n; i++)
            h[i] = to_bfloat(x[i]);
    else
        for (int64_t i = 0; i < n; i++)
            h[i] = to_half(x[i]);
}

/* ---- scratch and threads */

static status grow(cpu_buffer *s, size_t bytes)
{
    status st = OK;
    if (bytes <= s->bytes)
        return OK;
    bytes = (bytes + 255) / 256 * 256;
    free(s->data);
    s->bytes = 0;
    s->data = aligned_alloc(256, bytes);
    if (!s->data)
        FAIL(FAILED, "out of memory: %zu bytes of scratch for an op; a smaller --batch or --prefill-blocks needs less",
             bytes);
    s->bytes = bytes;
out:
    return st;
}

/* The shortest run of tasks: taking one costs some hundredths of it, waking a sleeping thread about all of it. */
static const double SHARE_NS = 4000;

status cpu_scratch(cpu *c, size_t shared, size_t own)
{
    status st = OK;
    TRY(grow(&c->shared, shared));
    for (int i = 0; i < c->threads; i++)
        TRY(grow(&c->own[i], own));
out:
    return st;
}

void *cpu_own(const cpu *c, int thread)
{
    return c->own[thread].data;
}

void cpu_parallel(cpu *c, double work, int64_t count, cpu_task *task, void *arg)
{
    double share = work / SHARE_NS; /* runs worth the taking */
    int64_t run = share < 2 ? count : share < (double)count ? (int64_t)((double)count / share) : 1;
    cpu_pool_run(c->pool, count, run, task, arg);
}

/* ---- memory and time */

enum { SLAB_ALIGN = 256 };

static status reserve(backend *b, void **slab, size_t bytes)
{
    status st = OK;
    (void)b;
    *slab = NULL;
    /* calloc: the system hands out large slabs as pages that are zero, and not there until they are touched. */
    char *whole = calloc(1, bytes + sizeof(void *) + SLAB_ALIGN);
    if (!whole)
        FAIL(FAILED, "out of memory: %zu bytes wanted", bytes);
    char *at = whole + sizeof(void *);
    at += -(uintptr_t)at % SLAB_ALIGN;
    memcpy(at - sizeof(void *), &whole, sizeof(void *)); /* for release */
    *slab = at;
out:
    return st;
}

static void release(backend *b, void *slab)
{
    (void)b;
    void *whole;
    if (!slab)
        return;
    memcpy(&whole, (char *)slab - sizeof(void *), sizeof(void *));
    free(whole);
}

typedef struct upload_task {
    const cpu *c;
    const tensor *dst;
    const char *src;
    dtype from;
} upload_task;

static void upload_rows(void *arg, int64_t from, int64_t to, int thread)
{
    const upload_task *t = arg;
    const tensor *dst = t->dst;
    float *wide = cpu_own(t->c, thread);
    for (int64_t i = from; i < to; i++) {
        char *at = (char *)dst->data + (size_t)(i * dst->ld) * dtype_bytes(dst->type);
        const char *row = t->src + (size_t)(i * dst->cols) * dtype_bytes(t->from);
        if (t->from == dst->type) {
            memcpy(at, row, (size_t)dst->cols * dtype_bytes(t->from));
        } else {
            cpu_widen(wide, row, t->from, dst->cols);
            cpu_narrow(at, dst->type, wide, dst->cols);
        }
    }
}

static status upload(backend *b, const tensor *dst, const void *src, dtype from)
{
    status st = OK;
    cpu *c = cpu_of(b);
    bool same = from == dst->type;
    assert(same || (from <= F16 && dst->type <= F16));
    TRY(cpu_scratch(c, 0, same ? 0 : (size_t)dst->cols * sizeof(float)));
    upload_task t = {c, dst, src, from};
    cpu_parallel(c, (double)dst->rows * (double)dst->cols * 0.3, dst->rows, upload_rows, &t);
out:
    return st;
}

static status fill_random(backend *b, const tensor *dst, uint64_t seed, float scale)
{
    (void)b;
    assert(dst->type <= F16);
    for (int64_t i = 0; i < dst->rows; i++)
        for (int64_t j = 0; j < dst->cols; j++) {
            float x = scale * random_at(seed, (uint64_t)(i * dst->cols + j));
            cpu_narrow((char *)dst->data + (size_t)(i * dst->ld + j) * dtype_bytes(dst->type), dst->type, &x, 1);
        }
    return OK;
}

static status download(backend *b, void *dst, const tensor *src)
{
    (void)b;
    size_t bytes = (size_t)src->cols * dtype_bytes(src->type);
    for (int64_t i = 0; i < src->rows; i++)
        memcpy((char *)dst + (size_t)i * bytes,
               (const char *)src->data + (size_t)(i * src->ld) * dtype_bytes(src->type), bytes);
    return OK;
}

static status post(backend *b, int box, const tensor *src)
{
    status st = OK;
    cpu_box *to = &cpu_of(b)->box[box];
    to->bytes = (size_t)(src->rows * src->cols) * dtype_bytes(src->type);
    TRY(grow(&to->room, to->bytes));
    TRY(download(b, to->room.data, src));
out:
    return st;
}

static status fetch(backend *b, void *dst, int box)
{
    const cpu_box *from = &cpu_of(b)->box[box];
    if (from->bytes > 0)
        memcpy(dst, from->room.data, from->bytes);
    return OK;
}

/* What waits or orders: every call is over when it returns. */
static status in_order(backend *b)
{
    (void)b;
    return OK;
}

static status aside(backend *b, int leave)
{
    (void)leave;
    return in_order(b);
}

static bool rides(backend *b, const tensor *x, const expert_set *e, const shared_set *s)
{
    (void)b, (void)x, (void)e, (void)s;
    return false;
}

static status mark(backend *b, phase p)
{
    cpu *c = cpu_of(b);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    c->seconds[p] += (double)(now.tv_sec - c->last.tv_sec) + 1e-9 * (double)(now.tv_nsec - c->last.tv_nsec);
    c->last = now;
    return OK;
}

static status laps(backend *b, double seconds[PHASES])
{
    cpu *c = cpu_of(b);
    for (int i = 0; i < PHASES; i++) {
        seconds[i] += c->seconds[i];
        c->seconds[i] = 0;
    }
    return OK;
}

static status repeat(backend *b, void **record, status (*call)(void *of), void *of)
{
    (void)b;
    (void)record;
    return call(of);
}

static void forget(backend *b, void *record)
{
    (void)b;
    (void)record;
}

static void close_cpu(backend *b)
{
    if (!b)
        return;
    cpu *c = cpu_of(b);
    cpu_pool_close(c->pool);
    for (int i = 0; c->own && i < c->threads; i++)
        free(c->own[i].data);
    free(c->own);
    free(c->shared.data);
    for (int i = 0; i < BOXES; i++)
        free(c->box[i].room.data);
    free(c->angles.data);
    free(c);
    free(b);
}

static const backend table = {
    .name = "cpu",
    .activation = F32,
    .timed_every = 1,
    .reserve = reserve,
    .release = release,
    .upload = upload,
    .random = fill_random,
    .download = download,
    .post = post,
    .fetch = fetch,
    .sync = in_order,
    .mark = mark,
    .laps = laps,
    .repeat = repeat,
    .forget = forget,
    .aside = aside,
    .back = in_order,
    .join = in_order,
    .rows = cpu_rows,
    .commit = cpu_commit,
    .embed = cpu_embed,
    .matmul = cpu_matmul,
    .gated = cpu_gated,
    .norm = cpu_norm,
    .add_norm = cpu_add_norm,
    .rotate = cpu_rotate,
    .attend = cpu_attend,
    .pack = cpu_pack,
    .support = cpu_support,
    .route = cpu_route,
    .rides = rides,
    .experts = cpu_experts,
    .merge = cpu_merge,
    .head = cpu_head,
    .close = close_cpu,
};

/* As the system calls it. */
static void name_processor(char *name, size_t room)
{
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "re");
    snprintf(name, room, "cpu");
    while (f && fgets(line, sizeof line, f)) {
        const char *text = strstr(line, ": ");
        if (strncmp(line, "model name", 10) == 0 && text) {
            snprintf(name, room, "%.*s", (int)(room - 1), text + 2);
            name[strcspn(name, "\n")] = 0;
            break;
        }
    }
    if (f)
        fclose(f);
}

status backend_cpu_open(backend **out, int threads)
{
    status st = OK;
    backend *b = NULL;
    *out = NULL;
    if (threads < 0)
        FAIL(BAD_INPUT, "%d threads, want at least 1, or 0 for one a core", threads);
    b = malloc(sizeof *b);
    cpu *c = calloc(1, sizeof *c);
    if (!b || !c) {
        free(b);
        free(c);
        b = NULL;
        FAIL(FAILED, "out of memory");
    }
    *b = table;
    b->self = c;
    int cores = cpu_pool_cores();
    c->threads = threads > 0 && threads < cores ? threads : cores;
    TRY(cpu_pool_open(&c->pool, c->threads));
    c->own = calloc((size_t)c->threads, sizeof *c->own);
    if (!c->own)
        FAIL(FAILED, "out of memory");
    clock_gettime(CLOCK_MONOTONIC, &c->last);
    name_processor(b->device, sizeof b->device);
    cpu_dense_open();
    *out = b;
    b = NULL;
out:
    close_cpu(b);
    return st;
}
