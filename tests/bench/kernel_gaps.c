/* How much of an iteration passes between kernels, and in which, seen by CUPTI: a library that the driver loads into a
 * program.
 *
 *     CUDA_INJECTION64_PATH=$PWD/build-cuda/libkernel_gaps.so build-cuda/epoch bench --batch 1 --iterations 300
 *
 * At the end it prints, over all kernels in the order of their begin: the time in which at least one ran, and that of the
 * gaps between them. A gap of more than HOST_US is the host's (setting up, waiting, another batch) and left out. Kernels
 * of replayed graphs count one by one. The names of those behind which most of the gaps lie follow, then of those that
 * take longest, with how often each ran and how long at a time. Where a kernel begins before the one ahead of it has
 * ended, its waiting counts as its own. Tracing itself lengthens gaps a little. */
#include <cupti.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HOST_US = 50, BUFFER = 8 << 20, SHOWN = 8, LONGEST = 24 };

typedef struct run { /* of a kernel, ns */
    uint64_t from, to;
    const char *name;
    size_t times;
} run;

static run *runs;
static size_t count, room;

static void CUPTIAPI give(uint8_t **buffer, size_t *size, size_t *most)
{
    *buffer = aligned_alloc(8, BUFFER);
    *size = *buffer ? BUFFER : 0;
    *most = 0;
}

static void CUPTIAPI take(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    CUpti_Activity *record = NULL;
    (void)context, (void)stream, (void)size;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        const CUpti_ActivityKernel9 *k = (const void *)record;
        if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL)
            continue;
        if (count == room) {
            room = room ? 2 * room : 1 << 16;
            runs = realloc(runs, room * sizeof *runs);
            if (!runs)
                abort();
        }
        runs[count++] = (run){k->start, k->end, strdup(k->name ? k->name : "?"), 1};
    }
    free(buffer);
}

static int by_begin(const void *a, const void *b)
{
    const run *x = a, *y = b;
    return x->from < y->from ? -1 : x->from > y->from;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const run *)a)->name, ((const run *)b)->name);
}

static int by_length(const void *a, const void *b)
{
    uint64_t x = ((const run *)a)->to - ((const run *)a)->from, y = ((const run *)b)->to - ((const run *)b)->from;
    return x > y ? -1 : x < y;
}

/* Sums by name, the longest first, in place; how many names. */
static size_t add_up(run *of, size_t n)
{
    size_t names = 0;
    qsort(of, n, sizeof *of, by_name);
    for (size_t i = 0; i < n; i++)
        if (names > 0 && strcmp(of[names - 1].name, of[i].name) == 0) {
            of[names - 1].to += of[i].to - of[i].from;
            of[names - 1].times++;
        } else {
            of[names++] = of[i];
        }
    qsort(of, names, sizeof *of, by_length);
    return names;
}

static void report(void)
{
    uint64_t busy = 0, idle = 0, host = 0, end = 0;
    size_t gaps = 0;
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    run *gap = malloc((count + 1) * sizeof *gap);
    if (!gap || count == 0)
        return;
    qsort(runs, count, sizeof *runs, by_begin);
    for (size_t i = 0; i < count; i++) {
        const run *k = &runs[i];
        if (end > 0 && k->from > end) {
            uint64_t length = k->from - end;
            if (length > HOST_US * 1000) {
                host += length;
            } else {
                idle += length;
                gap[gaps++] = (run){end, k->from, k->name, 1};
            }
        }
        if (k->to > end) {
            busy += k->to - (k->from > end ? k->from : end);
            end = k->to;
        }
    }
    fprintf(stderr, "kernels %zu, busy %.3f ms, gaps %.3f ms (%zu): %.2f %% of the two; longer ones %.3f ms\n", count,
            (double)busy / 1e6, (double)idle / 1e6, gaps, 100 * (double)idle / (double)(busy + idle), (double)host / 1e6);
    size_t names = add_up(gap, gaps); /* each gap has the name of the kernel behind it */
    for (size_t i = 0; i < names && i < SHOWN; i++)
        fprintf(stderr, "    %8.1f us before %.80s\n", (double)(gap[i].to - gap[i].from) / 1e3, gap[i].name);
    names = add_up(runs, count);
    for (size_t i = 0; i < names && i < LONGEST; i++) {
        double us = (double)(runs[i].to - runs[i].from) / 1e3;
        fprintf(stderr, "    %10.1f us in %6zu x %8.2f us %.80s\n", us, runs[i].times, us / (double)runs[i].times,
                runs[i].name);
    }
    free(gap);
}

/* The driver calls it as the program first uses CUDA. */
int InitializeInjection(void);
int InitializeInjection(void)
{
    static int called;
    if (called++) /* it may come twice */
        return 1;
    if (cuptiActivityRegisterCallbacks(give, take) != CUPTI_SUCCESS ||
        cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) != CUPTI_SUCCESS) {
        fprintf(stderr, "kernel_gaps: CUPTI does not trace here\n");
        return 0;
    }
    atexit(report);
    return 1;
}
