#include "src/base/sum_tree.h"

#include <stdlib.h>
#include <string.h>

/* Appends the units of shards [lo, hi) that lie whole in experts [first, last), left to right. */
static void whole_units(sum_tree *t, int lo, int hi, int first, int last)
{
    int a = lo * t->per_shard, b = hi * t->per_shard;
    if (a >= first && b <= last) {
        t->unit[t->unit_count++] = (sum_unit){a, b, lo, hi};
        return;
    }
    if (b <= first || a >= last)
        return;
    if (hi - lo == 1) { /* a cut shard */
        int from = a > first ? a : first, to = b < last ? b : last;
        if (from == a) {
            t->unit[t->unit_count++] = (sum_unit){from, to, lo, lo};
        } else {
            for (int e = from; e < to; e++)
                t->unit[t->unit_count++] = (sum_unit){e, e + 1, lo, lo};
        }
        return;
    }
    int mid = lo + (hi - lo) / 2;
    whole_units(t, lo, mid, first, last);
    whole_units(t, mid, hi, first, last);
}

status sum_tree_open(sum_tree **out, int experts, int n_group, int ranks)
{
    status st = OK;
    sum_tree *t = NULL;
    *out = NULL;
    if (ranks > experts)
        FAIL(BAD_INPUT, "%d ranks, but the model has %d experts a layer: start at most %d ranks", ranks, experts,
             experts);
    if (experts > SUM_TREE_EXPERTS)
        FAIL(BAD_INPUT, "%d experts a layer, at most %d are supported", experts, SUM_TREE_EXPERTS);
    t = calloc(1, sizeof *t);
    if (!t)
        FAIL(FAILED, "out of memory");
    t->experts = experts;
    t->ranks = ranks;
    t->shards = n_group > 8 || experts % 8 != 0 ? n_group : 8;
    t->per_shard = experts / t->shards;
    t->unit = calloc((size_t)experts, sizeof *t->unit);
    t->rank_unit = calloc((size_t)ranks + 1, sizeof *t->rank_unit);
    t->rank_first = calloc((size_t)ranks + 1, sizeof *t->rank_first);
    t->unit_of = calloc((size_t)experts, sizeof *t->unit_of);
    t->rank_of = calloc((size_t)experts, sizeof *t->rank_of);
    if (!t->unit || !t->rank_unit || !t->rank_first || !t->unit_of || !t->rank_of)
        FAIL(FAILED, "out of memory");
    for (int r = 0, e = 0; r < ranks; r++) {
        int count = experts / ranks + (r < experts % ranks);
        t->rank_first[r] = e;
        t->rank_unit[r] = t->unit_count;
        whole_units(t, 0, t->shards, e, e + count);
        for (int i = e; i < e + count; i++)
            t->rank_of[i] = r;
        e += count;
    }
    t->rank_first[ranks] = experts;
    t->rank_unit[ranks] = t->unit_count;
    for (int u = 0; u < t->unit_count; u++)
        for (int e = t->unit[u].first; e < t->unit[u].last; e++)
            t->unit_of[e] = u;
    *out = t;
    t = NULL;
out:
    sum_tree_close(t);
    return st;
}

int sum_tree_most_units(const sum_tree *t)
{
    int most = 0;
    for (int r = 0; r < t->ranks; r++) {
        int units = t->rank_unit[r + 1] - t->rank_unit[r];
        most = units > most ? units : most;
    }
    return most;
}

void sum_tree_close(sum_tree *t)
{
    if (!t)
        return;
    free(t->unit);
    free(t->rank_unit);
    free(t->rank_first);
    free(t->unit_of);
    free(t->rank_of);
    free(t);
}

int sum_tree_scratch(const sum_tree *t)
{
    int depth = 2;
    for (int n = t->shards; n > 1; n = n - n / 2)
        depth++;
    return depth;
}

/* The terms of one sum, ascending by their first expert; `next` is the first not yet taken. */
typedef struct terms {
    const int32_t *id;           /* first expert of each term */
    const int32_t *last;         /* one past its last expert; NULL: one expert each */
    const float *const *row;
    int count, next;
    int64_t n;
} terms;

/* The sum of the terms in shards [lo, hi), as a pointer to a term or to `to`, where a node leaves its n floats; NULL if
 * none is present. The right side's go to scratch, so that a left sum survives. */
static const float *node(const sum_tree *t, terms *s, int lo, int hi, float *to, float *scratch)
{
    int end = hi * t->per_shard;
    if (s->next >= s->count || s->id[s->next] >= end)
        return NULL;
    if (s->last && s->last[s->next] == end && s->id[s->next] == lo * t->per_shard)
        return s->row[s->next++]; /* the whole node came as one term */
    if (hi - lo == 1) {
        const float *sum = s->row[s->next++];
        while (s->next < s->count && s->id[s->next] < end) {
            const float *add = s->row[s->next++];
            for (int64_t i = 0; i < s->n; i++)
                to[i] = sum[i] + add[i];
            sum = to;
        }
        return sum;
    }
    int mid = lo + (hi - lo) / 2;
    const float *left = node(t, s, lo, mid, to, scratch);
    const float *right = left ? node(t, s, mid, hi, scratch, scratch + s->n) : node(t, s, mid, hi, to, scratch);
    if (!left || !right)
        return left ? left : right;
    for (int64_t i = 0; i < s->n; i++)
        to[i] = left[i] + right[i];
    return to;
}

static void take(float *y, const float *sum, int64_t n)
{
    if (sum && sum != y)
        memcpy(y, sum, (size_t)n * sizeof *y);
    else if (!sum)
        memset(y, 0, (size_t)n * sizeof *y);
}

void sum_tree_fold(const sum_tree *t, float *y, const float *const *term, int64_t n, float *scratch)
{
    int32_t id[SUM_TREE_EXPERTS], last[SUM_TREE_EXPERTS];
    const float *row[SUM_TREE_EXPERTS];
    int count = 0;
    for (int u = 0; u < t->unit_count; u++)
        if (term[u]) {
            id[count] = t->unit[u].first;
            last[count] = t->unit[u].last;
            row[count++] = term[u];
        }
    terms s = {.id = id, .last = last, .row = row, .count = count, .n = n};
    take(y, node(t, &s, 0, t->shards, y, scratch), n);
}

void sum_tree_unit(const sum_tree *t, int u, float *y, const int32_t *id, const float *const *term, int edges,
                   int64_t n, float *scratch)
{
    const sum_unit *unit = &t->unit[u];
    int from = 0, to = edges;
    while (from < edges && id[from] < unit->first)
        from++;
    while (to > from && id[to - 1] >= unit->last)
        to--;
    terms s = {.id = id + from, .row = term + from, .count = to - from, .n = n};
    int lo = unit->shard_lo, hi = unit->shard_hi > lo ? unit->shard_hi : lo + 1;
    take(y, node(t, &s, lo, hi, y, scratch), n);
}
