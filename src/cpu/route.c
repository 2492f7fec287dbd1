/* The router: sigmoid scores, a bias that only chooses, group-limited top-k, over all experts or over a support
 * (README.md, "Expert Atlas"). Ties go to the lower id everywhere. */
#include "src/cpu/cpu.h"
#include "src/cpu/lanes.h"
#include "src/cpu/plans.h"

#include <assert.h>

/* What one row chooses from. choice: score + bias, or -inf where ineligible. */
typedef struct universe {
    float score[SUM_TREE_EXPERTS], choice[SUM_TREE_EXPERTS];
} universe;

/* support NULL: every expert is eligible, but for those whose score is no number. */
static void universe_open(universe *u, const float *z, const float *bias, const int32_t *support, int experts)
{
    for (int e = 0; e < experts; e++) {
        u->score[e] = lane_sigmoid(z[e]);
        float choice = u->score[e] + bias[e];
        u->choice[e] = choice > -INFINITY ? choice : -INFINITY;
    }
    for (int e = 0; support && e < experts; e++)
        u->choice[e] = (uint32_t)support[e / 32] >> (e % 32) & 1 ? u->choice[e] : -INFINITY;
}

/* Takes the groups that are not kept out of the universe. A group ranks by how many eligible experts it has, counted up
 * to two, then by the sum of the best two. */
static void limit_groups(universe *u, const route_rule *r)
{
    float first[SUM_TREE_EXPERTS], second[SUM_TREE_EXPERTS];
    int32_t eligible[SUM_TREE_EXPERTS];
    bool keep[SUM_TREE_EXPERTS];
    int size = r->experts / r->groups;
    for (int g = 0; g < r->groups; g++)
        first[g] = second[g] = -INFINITY;
    for (int k = 0; k < size; k++)
#pragma omp simd
        for (int g = 0; g < r->groups; g++)
            lane_rank(&first[g], &second[g], u->choice[g * size + k]);
    for (int g = 0; g < r->groups; g++) {
        eligible[g] = (first[g] > -INFINITY) + (second[g] > -INFINITY);
        first[g] = eligible[g] > 1 ? first[g] + second[g] : first[g];
        keep[g] = false;
    }
    for (int n = 0; n < r->top_groups; n++) {
        int best = -1;
        for (int g = 0; g < r->groups; g++)
            if (!keep[g] && eligible[g] > 0 &&
                (best < 0 || eligible[g] > eligible[best] || (eligible[g] == eligible[best] && first[g] > first[best])))
                best = g;
        if (best < 0)
            break;
        keep[best] = true;
    }
    for (int g = 0; g < r->groups; g++)
        for (int e = g * size; !keep[g] && e < (g + 1) * size; e++)
            u->choice[e] = -INFINITY;
}

/* The n best of x[0..experts) into id[], descending, lower ids first among equals; how many there are above -inf.
 * Number and id become one integer, so that a round is one maximum without branches. */
static int choose(const float *x, int experts, int n, int32_t *id)
{
    int64_t key[SUM_TREE_EXPERTS], last = INT64_MAX;
    for (int e = 0; e < experts; e++) {
        float number = x[e] + 0.0f; /* no negative zero */
        int32_t bits;
        memcpy(&bits, &number, sizeof bits);
        bits ^= (bits >> 31) & INT32_MAX; /* the order of numbers as that of integers */
        key[e] = number > -INFINITY ? (int64_t)bits * (INT64_C(1) << 32) + (experts - e) : INT64_MIN;
    }
    for (int k = 0; k < n; k++) {
        int64_t best = INT64_MIN;
#pragma omp simd reduction(max : best)
        for (int e = 0; e < experts; e++) {
            int64_t left = key[e] < last ? key[e] : INT64_MIN;
            best = left > best ? left : best;
        }
        if (best == INT64_MIN)
            return k;
        id[k] = experts - (int32_t)(best & INT32_MAX);
        last = best;
    }
    return n;
}

static int choose_row(universe *u, const float *z, const float *bias, const int32_t *support, const route_rule *r,
                      int n, int32_t *id)
{
    universe_open(u, z, bias, support, r->experts);
    if (r->top_groups < r->groups)
        limit_groups(u, r);
    return choose(u->choice, r->experts, n, id);
}

int route_candidates(const float *z, const float *bias, const route_rule *r, int n, int32_t *id, float *score)
{
    universe u;
    int count = choose_row(&u, z, bias, NULL, r, n, id);
    for (int i = 0; i < count; i++)
        score[i] = u.score[id[i]];
    return count;
}

static void route_row(int32_t *id, float *weight, const float *z, const float *bias, const int32_t *support,
                      const route_rule *r)
{
    universe u;
    int count = choose_row(&u, z, bias, support, r, r->top_k, id);
    for (int i = 1; i < count; i++) /* ascending ids */
        for (int j = i; j > 0 && id[j] < id[j - 1]; j--) {
            int32_t swap = id[j];
            id[j] = id[j - 1];
            id[j - 1] = swap;
        }
    float sum = 0;
    for (int i = 0; i < count; i++)
        sum += u.score[id[i]];
    for (int i = 0; i < count; i++)
        weight[i] = (r->normalise ? u.score[id[i]] / (sum + 1e-20f) : u.score[id[i]]) * r->scale;
    for (int i = count; i < r->top_k; i++) {
        id[i] = -1;
        weight[i] = 0;
    }
}

/* The words of the support that this row is held to; NULL: none. */
static const int32_t *support_of(const plans *p, int layer, const slot *x, int32_t cohort, bool sealing,
                                 const block_rule *k)
{
    if (!k->restrict_experts || sealing || x->path == PATH_COLD)
        return NULL;
    const int32_t *words = cpu_support_of(p, layer, cohort);
    return words[p->support.cols - 1] == 1 ? words : NULL;
}

/* Counts for each cohort the fresh rows of active blocks and the experts they chose. Rows come in slot order, so those
 * of a cohort are neighbours. */
static void log_rows(const tensor *ids, plans *p, int layer, const batch *in, const slots *s, const route_rule *r,
                     const block_rule *k)
{
    const int32_t *row = in->fresh.data, *position = in->position.data, *of = in->slot.data, *role = in->role.data;
    const slot *slot_of = s->slot.data;
    uint32_t seen[SUM_TREE_EXPERTS / 32];
    layer_log *log = NULL;
    int32_t last = -1;
    for (int64_t i = 0; i < cpu_used(&in->fresh); i++) {
        const slot *x = &slot_of[of[row[i]]];
        int32_t cohort = of[row[i]] / k->cohort;
        if (role[row[i]] == ROW_SEALING || !(x->fresh >> (position[row[i]] % k->block_size) & 1))
            continue;
        if (cohort != last) {
            memset(seen, 0, sizeof seen);
            last = cohort;
            log = cpu_log_of(p, layer, cohort);
            log->fresh = log->distinct = 0;
            log->support = r->experts;
            const int32_t *words = support_of(p, layer, x, cohort, false, k);
            if (words) {
                log->support = 0;
                for (int e = 0; e < r->experts; e++)
                    log->support += (uint32_t)words[e / 32] >> (e % 32) & 1;
            }
        }
        log->fresh++;
        const int32_t *id = (const int32_t *)ids->data + i * ids->ld;
        for (int j = 0; j < r->top_k && id[j] >= 0; j++) {
            uint32_t bit = 1u << (id[j] % 32);
            log->distinct += !(seen[id[j] / 32] & bit);
            seen[id[j] / 32] |= bit;
        }
    }
}

typedef struct route_task {
    tensor *ids, *weights;
    const tensor *z, *bias;
    const plans *p;
    int layer;
    const batch *in;
    const slots *s;
    const route_rule *r;
    const block_rule *k;
} route_task;

static void route_rows(void *arg, int64_t from, int64_t to, int thread)
{
    const route_task *t = arg;
    const int32_t *row = t->in->fresh.data, *of = t->in->slot.data, *role = t->in->role.data;
    const slot *slot_of = t->s->slot.data;
    (void)thread;
    for (int64_t i = from; i < to; i++) {
        int32_t x = of[row[i]];
        const int32_t *support =
            support_of(t->p, t->layer, &slot_of[x], x / t->k->cohort, role[row[i]] == ROW_SEALING, t->k);
        route_row((int32_t *)t->ids->data + i * t->ids->ld, cpu_row(t->weights, i), cpu_row(t->z, i), t->bias->data,
                  support, t->r);
    }
}

status cpu_route(backend *b, tensor *ids, tensor *weights, const tensor *z, const tensor *bias, plans *p, int layer,
                 const batch *in, const slots *s, const route_rule *r, const block_rule *k)
{
    int64_t n = cpu_used(&in->fresh);
    route_task t = {ids, weights, z, bias, p, layer, in, s, r, k};
    assert(z->type == F32 && bias->type == F32 && weights->type == F32 && ids->type == I32);
    assert(z->cols == r->experts && ids->cols == r->top_k && r->experts <= SUM_TREE_EXPERTS);
    assert(p->log.ld == (int64_t)sizeof(layer_log));
    cpu_parallel(cpu_of(b), (double)n * r->experts * 6, n, route_rows, &t);
    log_rows(ids, p, layer, in, s, r, k);
    return OK;
}
