/* The lane of one rank, in host memory: no row moves. */
#include "src/lane.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

typedef struct lane_self {
    lane_rule rule;
    backend *b;
    void *room; /* F32 [max_rows, H] */
    int32_t pulses[PULSE];
    lane_traffic traffic;
} lane_self;

static status dispatch(lane *l, lane_load *in, const tensor *x, const tensor *ids, const tensor *weights)
{
    status st = OK;
    lane_self *s = l->self;
    int64_t n = x->used ? *x->used : x->rows;
    if (n > s->rule.max_rows)
        FAIL(FAILED, "dispatch of %lld rows, the lane was opened for %lld", (long long)n, (long long)s->rule.max_rows);
    in->x = *x;
    in->ids = *ids;
    in->weights = *weights;
    in->y = tensor_of(s->room, F32, n, s->rule.hidden);
    in->x.rows = in->ids.rows = in->weights.rows = n;
    in->x.used = in->ids.used = in->weights.used = NULL;
    memcpy(s->pulses, l->pulse, sizeof s->pulses);
out:
    return st;
}

static status combine(lane *l, tensor *y, const lane_load *out)
{
    lane_self *s = l->self;
    size_t bytes = (size_t)s->rule.hidden * sizeof(float);
    int64_t merged = 0;
    for (int64_t i = 0; i < out->y.rows; i++) {
        const int32_t *id = (const int32_t *)out->ids.data + i * out->ids.ld;
        float *row = (float *)y->data + i * y->ld;
        if (id[0] < 0) { /* no edge: the experts wrote nothing */
            memset(row, 0, bytes);
            continue;
        }
        memcpy(row, (const float *)out->y.data + i * out->y.ld, bytes);
        merged++;
    }
    /* As between ranks, a row without edges counts as not sent. */
    s->traffic.rows_sent += merged;
    s->traffic.rows_received += merged;
    s->traffic.rows_merged += merged;
    s->traffic.partials_sent += merged;
    s->traffic.partials_received += merged;
    return OK;
}

static status traffic(lane *l, lane_traffic *t)
{
    lane_self *s = l->self;
    *t = s->traffic;
    s->traffic = (lane_traffic){0};
    return OK;
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

status lane_self_open(lane **out, const lane_rule *rule, backend *b)
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
    *l = (lane){.name = "self", .rank = 0, .size = 1, .self = s, .pulses = s->pulses, .dispatch = dispatch,
                .combine = combine, .traffic = traffic, .close = close_lane};
    *out = l;
    l = NULL;
    s = NULL;
out:
    free(s);
    free(l);
    return st;
}
