/* The CUDA backend: one GPU, one stream and one beside it. Memory, transfers, time and the replay of forwards are here;
 * the ops are launchers in the .cu files. */
#include "cuda/kernels.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

status cuda_check(cudaError_t e, const char *what, const char *file, int line)
{
    return e == cudaSuccess
               ? OK
               : status_fail(FAILED, file, line, "%s: %s (%s)", what, cudaGetErrorString(e), cudaGetErrorName(e));
}

/* ---- memory */

static status take(cuda *c, void **out, size_t bytes, const char *what)
{
    status st = OK;
    cudaError_t e = cudaMalloc(out, bytes);
    if (e == cudaErrorMemoryAllocation) {
        size_t left = 0, whole = 0;
        cudaGetLastError(); /* this one is told and done with */
        cudaMemGetInfo(&left, &whole);
        *out = NULL;
        FAIL(FAILED, "out of GPU memory: %zu bytes wanted for %s, %zu of %zu are free", bytes, what, left, whole);
    }
    TRY(cuda_check(e, "cudaMalloc", __FILE__, __LINE__));
    CUDA_TRY(cudaMemsetAsync(*out, 0, bytes, c->stream));
out:
    return st;
}

status cuda_grow(cuda *c, cuda_buffer *b, size_t bytes, const char *what)
{
    status st = OK;
    if (bytes <= b->bytes)
        return OK;
    if (c->capturing)
        FAIL(FAILED, "%zu bytes more wanted for %s while a graph is captured: a forward must come first", bytes, what);
    CUDA_TRY(cudaStreamSynchronize(c->stream));
    if (b->data)
        CUDA_TRY(cudaFree(b->data));
    *b = (cuda_buffer){0};
    TRY(take(c, &b->data, bytes, what));
    b->bytes = bytes;
out:
    return st;
}

status cuda_scratch(cuda *c, void **out, size_t bytes)
{
    cuda_buffer *own = &c->scratch[c->stream == c->beside];
    status st = cuda_grow(c, own, bytes, "the scratch of an op");
    *out = own->data;
    return st;
}

static status reserve(backend *b, void **slab, size_t bytes)
{
    status st = OK;
    *slab = NULL;
    TRY(take(cuda_of(b), slab, bytes > 0 ? bytes : 256, "an arena"));
    CUDA_TRY(cudaStreamSynchronize(cuda_of(b)->stream));
out:
    return st;
}

static void release(backend *b, void *slab)
{
    cudaStreamSynchronize(cuda_of(b)->stream);
    cudaFree(slab);
}

/* ---- transfers */

enum { HALF_BYTES = 16 << 20 };

/* Two halves, filled in turn: while one is on its way, the host fills the other. A half is filled anew when the copies
 * that were enqueued from it are through. On the device lies a twin of each, for what is converted there. */
struct cuda_staging {
    char *pinned, *device; /* [2 * HALF_BYTES] */
    cudaEvent_t gone[2];
    int half;
    size_t at;             /* in this half */
};

static status open_staging(cuda *c)
{
    status st = OK;
    cuda_staging *s = c->staging = calloc(1, sizeof *s);
    if (!s)
        FAIL(FAILED, "out of memory");
    CUDA_TRY(cudaMallocHost((void **)&s->pinned, 2 * (size_t)HALF_BYTES));
    TRY(take(c, (void **)&s->device, 2 * (size_t)HALF_BYTES, "uploads"));
    for (int i = 0; i < 2; i++)
        CUDA_TRY(cudaEventCreateWithFlags(&s->gone[i], cudaEventDisableTiming));
out:
    return st;
}

static void close_staging(cuda_staging *s)
{
    if (!s)
        return;
    for (int i = 0; i < 2; i++)
        if (s->gone[i])
            cudaEventDestroy(s->gone[i]);
    cudaFreeHost(s->pinned);
    cudaFree(s->device);
    free(s);
}

/* Room for `bytes` of staging, at *offset in both twins. */
static status stage(cuda *c, size_t bytes, size_t *offset)
{
    status st = OK;
    cuda_staging *s = c->staging;
    bytes = (bytes + 255) / 256 * 256;
    if (s->at + bytes > HALF_BYTES) {
        CUDA_TRY(cudaEventRecord(s->gone[s->half], c->stream));
        s->half ^= 1;
        s->at = 0;
        CUDA_TRY(cudaEventSynchronize(s->gone[s->half]));
    }
    *offset = (size_t)s->half * HALF_BYTES + s->at;
    s->at += bytes;
out:
    return st;
}

static status upload(backend *b, const tensor *dst, const void *src, dtype from)
{
    status st = OK;
    cuda *c = cuda_of(b);
    size_t width = (size_t)dst->cols * dtype_bytes(from), pitch = (size_t)dst->ld * dtype_bytes(dst->type), at;
    assert(from == dst->type || (from <= F16 && dst->type <= F16));
    if (dst->rows == 0 || width == 0)
        return OK;
    if (width > HALF_BYTES)
        FAIL(FAILED, "upload of rows of %zu bytes, want at most %d", width, HALF_BYTES);
    int64_t most = (int64_t)(HALF_BYTES / 2 / width) > 0 ? (int64_t)(HALF_BYTES / 2 / width) : 1;
    for (int64_t row = 0; row < dst->rows; row += most) {
        int64_t n = dst->rows - row < most ? dst->rows - row : most;
        TRY(stage(c, (size_t)n * width, &at));
        char *pinned = c->staging->pinned + at, *to = (char *)dst->data + (size_t)row * pitch;
        memcpy(pinned, (const char *)src + (size_t)row * width, (size_t)n * width);
        if (from == dst->type) {
            CUDA_TRY(cudaMemcpy2DAsync(to, pitch, pinned, width, width, (size_t)n, cudaMemcpyHostToDevice, c->stream));
        } else {
            tensor part = tensor_rows(dst, row, n);
            CUDA_TRY(
                cudaMemcpyAsync(c->staging->device + at, pinned, (size_t)n * width, cudaMemcpyHostToDevice, c->stream));
            TRY(cuda_convert(c, &part, c->staging->device + at, from));
        }
    }
out:
    return st;
}

static status download(backend *b, void *dst, const tensor *src)
{
    status st = OK;
    cuda *c = cuda_of(b);
    size_t width = (size_t)src->cols * dtype_bytes(src->type), pitch = (size_t)src->ld * dtype_bytes(src->type);
    if (src->rows > 0 && width > 0)
        CUDA_TRY(cudaMemcpy2DAsync(dst, width, src->data, pitch, width, (size_t)src->rows, cudaMemcpyDeviceToHost,
                                   c->stream));
    CUDA_TRY(cudaStreamSynchronize(c->stream));
out:
    return st;
}

static status post(backend *b, int box, const tensor *src)
{
    status st = OK;
    cuda *c = cuda_of(b);
    cuda_box *to = &c->box[box];
    size_t width = (size_t)src->cols * dtype_bytes(src->type), pitch = (size_t)src->ld * dtype_bytes(src->type);
    to->bytes = (size_t)src->rows * width;
    if (!to->there)
        CUDA_TRY(cudaEventCreateWithFlags(&to->there, cudaEventDisableTiming));
    if (to->bytes > to->room) {
        CUDA_TRY(cudaStreamSynchronize(c->stream));
        CUDA_TRY(cudaFreeHost(to->pinned));
        *to = (cuda_box){.bytes = to->bytes, .there = to->there};
        CUDA_TRY(cudaMallocHost(&to->pinned, to->bytes));
        to->room = to->bytes;
    }
    if (to->bytes > 0)
        CUDA_TRY(cudaMemcpy2DAsync(to->pinned, width, src->data, pitch, width, (size_t)src->rows,
                                   cudaMemcpyDeviceToHost, c->stream));
    CUDA_TRY(cudaEventRecord(to->there, c->stream));
out:
    return st;
}

static status fetch(backend *b, void *dst, int box)
{
    status st = OK;
    const cuda_box *from = &cuda_of(b)->box[box];
    CUDA_TRY(cudaEventSynchronize(from->there));
    if (from->bytes > 0)
        memcpy(dst, from->pinned, from->bytes);
out:
    return st;
}

static status sync_stream(backend *b)
{
    status st = OK;
    CUDA_TRY(cudaStreamSynchronize(cuda_of(b)->stream));
out:
    return st;
}

/* ---- time, and forwards that are replayed */

enum { MARKS_MOST = 4096, RECORD_MARKS = 4096, TIMED_EVERY = 32 };

/* A call recorded as two graphs: bare, and with an event at each mark. One replay in timed_every is the timed one; how
 * its time falls to the phases is taken for the others too, whose whole time alone is measured. */
typedef struct cuda_record {
    int64_t calls;
    cudaGraphExec_t plain, timed;
    cudaEvent_t event[RECORD_MARKS]; /* of the timed graph: its begin, then its marks */
    int phase[RECORD_MARKS];
    int count;
} cuda_record;

/* Event i > 0 ends what mark i named; event 0 is where the first began. */
struct cuda_marks {
    cudaEvent_t event[MARKS_MOST];
    int phase[MARKS_MOST];  /* PHASES: a whole replay */
    int made, count;        /* events there are; in use */
    double seconds[PHASES], share[PHASES];
    cuda_record *recording; /* the record whose timed graph is being captured */
    cuda_record *pending;   /* the record whose newest timed replay has not been read */
};

static status read_timed(cuda_marks *m)
{
    status st = OK;
    cuda_record *r = m->pending;
    double part[PHASES] = {0}, sum = 0;
    m->pending = NULL;
    if (!r || r->count < 2)
        return OK;
    CUDA_TRY(cudaEventSynchronize(r->event[r->count - 1]));
    for (int i = 1; i < r->count; i++) {
        float ms;
        CUDA_TRY(cudaEventElapsedTime(&ms, r->event[i - 1], r->event[i]));
        part[r->phase[i]] += (double)ms;
        sum += (double)ms;
    }
    for (int p = 0; p < PHASES; p++)
        m->share[p] = sum > 0 ? part[p] / sum : 0;
out:
    return st;
}

/* Waits for the marks and adds them up; the last one becomes the first. */
static status fold(cuda_marks *m)
{
    status st = OK;
    if (m->count < 2)
        return OK;
    CUDA_TRY(cudaEventSynchronize(m->event[m->count - 1]));
    TRY(read_timed(m));
    for (int i = 1; i < m->count; i++) {
        float ms;
        CUDA_TRY(cudaEventElapsedTime(&ms, m->event[i - 1], m->event[i]));
        for (int p = 0; p < PHASES; p++)
            m->seconds[p] += 1e-3 * (double)ms * (m->phase[i] == PHASES ? m->share[p] : m->phase[i] == p);
    }
    cudaEvent_t last = m->event[m->count - 1];
    m->event[m->count - 1] = m->event[0];
    m->event[0] = last;
    m->count = 1;
out:
    return st;
}

static status mark_as(cuda *c, int whose)
{
    status st = OK;
    cuda_marks *m = c->marks;
    if (m->count == MARKS_MOST)
        TRY(fold(m));
    if (m->count == m->made) {
        CUDA_TRY(cudaEventCreate(&m->event[m->made]));
        m->made++;
    }
    CUDA_TRY(cudaEventRecord(m->event[m->count], c->stream));
    m->phase[m->count++] = whose;
    c->ordered = true;
out:
    return st;
}

static status record_mark(cuda *c, cuda_record *r, int whose)
{
    status st = OK;
    if (r->count == RECORD_MARKS)
        FAIL(FAILED, "a recorded forward has more than %d marks", RECORD_MARKS);
    CUDA_TRY(cudaEventCreate(&r->event[r->count]));
    r->phase[r->count] = whose;
    CUDA_TRY(cudaEventRecordWithFlags(r->event[r->count++], c->stream, cudaEventRecordExternal));
    c->ordered = true;
out:
    return st;
}

static status mark(backend *b, phase p)
{
    cuda *c = cuda_of(b);
    if (c->stream == c->beside)
        return OK;
    if (c->marks->recording)
        return record_mark(c, c->marks->recording, p);
    return c->capturing ? OK : mark_as(c, p);
}

static status laps(backend *b, double seconds[PHASES])
{
    status st = OK;
    cuda_marks *m = cuda_of(b)->marks;
    TRY(fold(m));
    for (int i = 0; i < PHASES; i++)
        seconds[i] += m->seconds[i];
    memset(m->seconds, 0, sizeof m->seconds);
out:
    return st;
}

static status capture(cuda *c, cudaGraphExec_t *exec, cuda_record *timed, status (*call)(void *of), void *of)
{
    status st = OK;
    cudaGraph_t graph = NULL;
    CUDA_TRY(cudaStreamBeginCapture(c->stream, cudaStreamCaptureModeThreadLocal));
    c->capturing = true;
    c->marks->recording = timed;
    if (timed)
        st = record_mark(c, timed, PHASE_HOST);
    if (st == OK)
        st = call(of);
    c->capturing = false;
    c->marks->recording = NULL;
    c->stream = c->main; /* where the call failed beside */
    c->leave = 0;
    cudaError_t e = cudaStreamEndCapture(c->stream, &graph); /* also where the call failed */
    TRY(st);
    TRY(cuda_check(e, "the capture of a forward", __FILE__, __LINE__));
    CUDA_TRY(cudaGraphInstantiate(exec, graph, 0));
    CUDA_TRY(cudaGraphUpload(*exec, c->stream));
out:
    if (graph)
        cudaGraphDestroy(graph);
    return st;
}

/* The first call runs as it is, so that all scratch is there and all kernels are loaded; the second is recorded. */
static status repeat(backend *b, void **record, status (*call)(void *of), void *of)
{
    status st = OK;
    cuda *c = cuda_of(b);
    if (!*record && !(*record = calloc(1, sizeof(cuda_record))))
        FAIL(FAILED, "out of memory");
    cuda_record *r = *record;
    int64_t n = r->calls++;
    if (n == 0)
        return call(of);
    if (n == 1) {
        TRY(capture(c, &r->plain, NULL, call, of));
        TRY(capture(c, &r->timed, r, call, of));
    }
    bool timed = (n - 1) % b->timed_every == 0;
    if (timed)
        TRY(read_timed(c->marks));
    if (c->marks->count == 0)
        TRY(mark_as(c, PHASE_HOST));
    CUDA_TRY(cudaGraphLaunch(timed ? r->timed : r->plain, c->stream));
    if (timed)
        c->marks->pending = r;
    TRY(mark_as(c, PHASES));
out:
    return st;
}

static void forget(backend *b, void *record)
{
    cuda *c = cuda_of(b);
    cuda_record *r = record;
    if (!r)
        return;
    cudaStreamSynchronize(c->stream);
    if (c->marks->pending == r)
        c->marks->pending = NULL;
    if (r->plain)
        cudaGraphExecDestroy(r->plain);
    if (r->timed)
        cudaGraphExecDestroy(r->timed);
    for (int i = 0; i < r->count; i++)
        cudaEventDestroy(r->event[i]);
    free(r);
}

/* ---- two streams */

static status aside(backend *b, int leave)
{
    status st = OK;
    cuda *c = cuda_of(b);
    assert(c->stream == c->main);
    CUDA_TRY(cudaEventRecord(c->parted, c->main));
    CUDA_TRY(cudaStreamWaitEvent(c->beside, c->parted, 0));
    c->stream = c->beside;
    c->leave = leave < c->sm_count / 2 ? leave : c->sm_count / 2;
out:
    return st;
}

static status back(backend *b)
{
    status st = OK;
    cuda *c = cuda_of(b);
    assert(c->stream == c->beside);
    CUDA_TRY(cudaEventRecord(c->joined, c->beside));
    c->stream = c->main;
    c->leave = 0;
out:
    return st;
}

static status join(backend *b)
{
    status st = OK;
    cuda *c = cuda_of(b);
    CUDA_TRY(cudaStreamWaitEvent(c->main, c->joined, 0));
out:
    return st;
}

/* ---- the device */

static void close_cuda(backend *b)
{
    if (!b)
        return;
    cuda *c = cuda_of(b);
    for (int i = 0; c->marks && i < c->marks->made; i++)
        cudaEventDestroy(c->marks->event[i]);
    free(c->marks);
    close_staging(c->staging);
    cudaFreeHost(c->reached);
    for (int i = 0; i < BOXES; i++) {
        if (c->box[i].there)
            cudaEventDestroy(c->box[i].there);
        cudaFreeHost(c->box[i].pinned);
    }
    cudaFree(c->routed);
    cuda_buffer *const all[] = {&c->scratch[0], &c->scratch[1], &c->angles, &c->begins, &c->seen, &c->ranges};
    for (int i = 0; i < 6; i++)
        cudaFree(all[i]->data);
    if (c->parted)
        cudaEventDestroy(c->parted);
    if (c->joined)
        cudaEventDestroy(c->joined);
    if (c->main)
        cudaStreamDestroy(c->main);
    if (c->beside)
        cudaStreamDestroy(c->beside);
    free(c);
    free(b);
}

static const backend table = {
    .name = "cuda",
    .activation = BF16,
    .timed_every = TIMED_EVERY,
    .runs_ahead = true,
    .late_sums = true,
    .expert_tiles = -1,
    .reserve = reserve,
    .release = release,
    .upload = upload,
    .random = cuda_random,
    .download = download,
    .post = post,
    .fetch = fetch,
    .sync = sync_stream,
    .mark = mark,
    .laps = laps,
    .repeat = repeat,
    .forget = forget,
    .aside = aside,
    .back = back,
    .join = join,
    .rows = cuda_rows,
    .commit = cuda_commit,
    .embed = cuda_embed,
    .matmul = cuda_matmul,
    .gated = cuda_gated,
    .norm = cuda_norm,
    .add_norm = cuda_add_norm,
    .rotate = cuda_rotate,
    .attend = cuda_attend,
    .pack = cuda_pack,
    .support = cuda_support,
    .route = cuda_route,
    .rides = cuda_rides,
    .experts = cuda_experts,
    .merge = cuda_merge,
    .head = cuda_head,
    .close = close_cuda,
};

int backend_cuda_devices(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return n;
}

status backend_cuda_taken(backend *b, double *bytes)
{
    status st = OK;
    size_t left, whole;
    CUDA_TRY(cudaStreamSynchronize(cuda_of(b)->stream));
    CUDA_TRY(cudaMemGetInfo(&left, &whole));
    *bytes = (double)(whole - left);
out:
    return st;
}

/* Of `count` visible ones; a launcher may show each rank its own alone. */
static int device_of(int local_rank, int count)
{
    return count == 1 ? 0 : local_rank;
}

const char *backend_cuda_bus(int local_rank)
{
    static char bus[32];
    int count = backend_cuda_devices(), device = device_of(local_rank, count);
    bus[0] = '\0';
    if (device < count && cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess)
        bus[0] = '\0';
    return bus;
}

/* Why is there no device? */
static status no_device(cudaError_t e)
{
    int driver = 0, runtime = 0;
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0)
        return status_fail(BAD_INPUT, __FILE__, __LINE__,
                           "--device cuda: no NVIDIA driver is installed here; --device cpu runs without");
    if (e == cudaErrorInsufficientDriver)
        return status_fail(
            BAD_INPUT, __FILE__, __LINE__,
            "--device cuda: the driver is too old: it knows CUDA %d.%d, the program was built with %d.%d; "
            "install a newer driver, or build with an older toolkit",
            driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    return status_fail(BAD_INPUT, __FILE__, __LINE__,
                       "--device cuda: no GPU is visible (CUDA_VISIBLE_DEVICES is %s): %s",
                       visible ? visible : "not set", cudaGetErrorString(e));
}

static status open_device(backend *b, int local_rank)
{
    status st = OK;
    cuda *c = cuda_of(b);
    int count = 0;
    size_t left, whole;
    struct cudaDeviceProp prop;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e != cudaSuccess || count == 0)
        TRY(no_device(e));
    c->device = device_of(local_rank, count);
    if (c->device >= count)
        FAIL(BAD_INPUT, "--device cuda: rank %d of this host would share a GPU, %d are visible: start one rank a GPU",
             local_rank, count);
    CUDA_TRY(cudaSetDevice(c->device));
    CUDA_TRY(cudaGetDeviceProperties(&prop, c->device));
    e = cuda_probe();
    if (e == cudaErrorNoKernelImageForDevice)
        FAIL(BAD_INPUT, "--device cuda: %s has compute capability %d.%d, the program was built for others: build with "
             "-DCMAKE_CUDA_ARCHITECTURES=%d%d", prop.name, prop.major, prop.minor, prop.major, prop.minor);
    TRY(cuda_check(e, "the first kernel", __FILE__, __LINE__));
    snprintf(b->device, sizeof b->device, "%.63s", prop.name);
    c->sm_count = prop.multiProcessorCount;
    c->overlaps = prop.major >= 9;
    int least, most; /* what runs beside takes what room the main stream leaves */
    CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &most));
    CUDA_TRY(cudaStreamCreateWithPriority(&c->main, cudaStreamNonBlocking, most));
    CUDA_TRY(cudaStreamCreateWithPriority(&c->beside, cudaStreamNonBlocking, least));
    CUDA_TRY(cudaEventCreateWithFlags(&c->parted, cudaEventDisableTiming));
    CUDA_TRY(cudaEventCreateWithFlags(&c->joined, cudaEventDisableTiming));
    c->stream = c->main;
    TRY(take(c, (void **)&c->routed, sizeof *c->routed, "a counter"));
    TRY(open_staging(c));
    CUDA_TRY(cudaMallocHost((void **)&c->reached, sizeof *c->reached));
    *c->reached = -1;
    b->reached = c->reached;
    c->marks = calloc(1, sizeof *c->marks);
    if (!c->marks)
        FAIL(FAILED, "out of memory");
    CUDA_TRY(cudaMemGetInfo(&left, &whole));
    b->free_bytes = (double)left;
    CUDA_TRY(cudaStreamSynchronize(c->stream));
out:
    return st;
}

status backend_cuda_open(backend **out, int local_rank)
{
    status st = OK;
    *out = NULL;
    backend *b = malloc(sizeof *b);
    cuda *c = calloc(1, sizeof *c);
    if (!b || !c) {
        free(b);
        free(c);
        b = NULL;
        FAIL(FAILED, "out of memory");
    }
    *b = table;
    b->self = c;
    TRY(open_device(b, local_rank));
    b->stream = c->stream;
    *out = b;
    b = NULL;
out:
    close_cuda(b);
    return st;
}
