/* The lane of one rank with one GPU: no row moves. The experts write each row's sum, zeros where it has no edge, and
 * combine hands that memory on; nothing is launched and nothing waits. */
#include "cuda/kernels.h"
#include "src/lane.h"

#include <assert.h>
#include <stdlib.h>

typedef struct lane_self {
    lane_rule rule;
    backend *b;
    void *room; /* F32 [max_rows, H] */
} lane_self;

static status dispatch(lane *l, lane_load *in, const tensor *x, const tensor *ids, const tensor *weights)
{
    status st = OK;
    lane_self *s = l->self;
    if (x->rows > s->rule.max_rows)
        FAIL(FAILED, "dispatch of up to %lld rows, the lane was opened for %lld", (long long)x->rows,
             (long long)s->rule.max_rows);
    in->x = *x;
    in->ids = *ids;
    in->weights = *weights;
    in->y = tensor_of(s->room, F32, x->rows, s->rule.hidden);
    in->y.used = x->used;
out:
    return st;
}

static status combine(lane *l, tensor *y, const lane_load *out)
{
    (void)l;
    y->data = out->y.data;
    y->ld = out->y.ld;
    return OK;
}

/* The op `rows` counts on the device; asking waits for the forwards so far. */
static status traffic(lane *l, lane_traffic *t)
{
    status st = OK;
    cuda *c = cuda_of(((lane_self *)l->self)->b);
    int64_t rows = 0;
    *t = (lane_traffic){0};
    CUDA_TRY(cudaMemcpyAsync(&rows, c->routed, sizeof rows, cudaMemcpyDeviceToHost, c->stream));
    CUDA_TRY(cudaMemsetAsync(c->routed, 0, sizeof rows, c->stream));
    CUDA_TRY(cudaStreamSynchronize(c->stream));
    t->rows_sent = t->rows_received = t->rows_merged = t->partials_sent = t->partials_received = rows;
out:
    return st;
}

static void close_lane(lane *l)
{
    if (!l)
        return;
    lane_self *s = l->self;
    s->b->release(s->b, s->room);
    free(s);
    free(l);
}

status lane_self_cuda_open(lane **out, const lane_rule *rule, backend *b)
{
    status st = OK;
    lane *l = calloc(1, sizeof *l);
    lane_self *s = calloc(1, sizeof *s);
    *out = NULL;
    assert(rule->tree->ranks == 1 && rule->tree->unit_count == 1);
    if (!l || !s)
        FAIL(FAILED, "out of memory");
    TRY(b->reserve(b, &s->room, (size_t)(rule->max_rows * rule->hidden) * sizeof(float)));
    s->rule = *rule;
    s->b = b;
    *l = (lane){.name = "self", .rank = 0, .size = 1, .replays = true, .passes = true, .self = s, .dispatch = dispatch,
                .combine = combine, .traffic = traffic, .close = close_lane};
    l->pulses = l->pulse; /* what this rank says, all ranks have heard */
    *out = l;
    l = NULL;
    s = NULL;
out:
    free(s);
    free(l);
    return st;
}
