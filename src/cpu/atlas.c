/* Expert Atlas on the CPU: the coverage test and the construction of a support, per cohort and layer.
 *
 * For each fresh row t: I[t,j], W[t,j] its K + m best experts under the model's rule on unmasked scores. Sums along a
 * row are fp32, in order; sums over rows are in fixed point (atlas_fixed): a twin can repeat them bit for bit.
 *
 *     r_t = alpha * sum_{j<K} W[t,j]          C_t(S) = sum_{j: I[t,j] in S} W[t,j]
 *     p_e = sum of W over all candidate edges of e; S starts as the B most popular experts
 *     U   = { t : C_t(S) < r_t }
 *     G_e = sum_{t in U} sum_{j: I[t,j]=e} min(W[t,j], r_t - C_t)      H_e = #{ t in U : C_t + W >= r_t }
 *     score_e = H_e + beta * G_e; a round adds at most c experts of positive score; ties: the lower id
 *     done when |U| <= (1 - q) N; no positive score before that: the layer routes over all experts (universe). */
#include "src/cpu/cpu.h"
#include "src/cpu/plans.h"

#include <string.h>

enum { SUPPORT_NONE, SUPPORT_HOLDS, SUPPORT_UNIVERSE };

/* The candidates of one cohort's fresh rows. */
typedef struct candidates {
    int rows, width;  /* width: K + m */
    int top_k;
    int32_t *id;      /* [rows, width], -1 behind the last */
    float *score;     /* [rows, width] */
    float *floor;     /* [rows]: r_t */
    float *covered;   /* [rows]: C_t(S) */
} candidates;

static inline bool in(const uint32_t *set, int e)
{
    return set[e >> 5] >> (e & 31) & 1;
}

static inline void put(uint32_t *set, int e)
{
    set[e >> 5] |= 1u << (e & 31);
}

/* C_t(S) over the first `width` candidates of row t. */
static float covered(const candidates *c, int t, int width, const uint32_t *set)
{
    float sum = 0;
    for (int j = 0; j < width && c->id[t * c->width + j] >= 0; j++)
        if (in(set, c->id[t * c->width + j]))
            sum += c->score[t * c->width + j];
    return sum;
}

/* Rows below the floor with C over the unrestricted top-K: the coverage test. Logs it. */
static int test_coverage(const candidates *c, const uint32_t *set, float coverage, layer_log *log)
{
    int under = 0;
    int64_t share = 0;
    for (int t = 0; t < c->rows; t++) {
        float have = covered(c, t, c->top_k, set), all = c->floor[t] / coverage;
        under += have < c->floor[t];
        share += atlas_fixed(all > 0 ? have / all : 1);
    }
    log->covered = (float)((double)share / (double)ATLAS_ONE);
    log->tested = c->rows;
    log->under = under;
    return under;
}

/* Adds the best `most` experts not in the set by value, those above `above` only; returns how many. */
static int add_best(uint32_t *set, const int64_t *value, int experts, int most, int64_t above)
{
    int added = 0;
    while (added < most) {
        int best = -1;
        for (int e = 0; e < experts; e++)
            if (!in(set, e) && value[e] > above && (best < 0 || value[e] > value[best]))
                best = e;
        if (best < 0)
            break;
        put(set, best);
        added++;
    }
    return added;
}

/* Builds the support; false: it could not reach q (universe). */
static bool build(candidates *c, uint32_t *set, int64_t *value, int experts, const atlas_rule *a, layer_log *log)
{
    int allowed = atlas_allowed(c->rows, a->covered_share);
    memset(value, 0, (size_t)experts * sizeof *value);
    for (int i = 0; i < c->rows * c->width; i++)
        if (c->id[i] >= 0)
            value[c->id[i]] += atlas_fixed(c->score[i]);
    add_best(set, value, experts, a->budget, -1);
    for (;;) {
        int under = 0;
        memset(value, 0, (size_t)experts * sizeof *value);
        for (int t = 0; t < c->rows; t++) {
            c->covered[t] = covered(c, t, c->width, set);
            float need = c->floor[t] - c->covered[t];
            if (!(need > 0))
                continue;
            under++;
            for (int j = 0; j < c->width && c->id[t * c->width + j] >= 0; j++) {
                int e = c->id[t * c->width + j];
                float w = c->score[t * c->width + j];
                value[e] += atlas_fixed(a->mass_weight * (w < need ? w : need));
                if (c->covered[t] + w >= c->floor[t])
                    value[e] += ATLAS_ONE;
            }
        }
        if (under <= allowed)
            return true;
        log->rounds++;
        if (!add_best(set, value, experts, a->repair_step, 0))
            return false;
    }
}

static int size_of(const uint32_t *set, int words)
{
    int n = 0;
    for (int i = 0; i < words; i++)
        n += __builtin_popcount(set[i]);
    return n;
}

/* One cohort's support in one layer: test, and build where path or test ask for it. */
static void update(candidates *c, plans *p, int layer, int cohort, const slot *sl, const route_rule *r,
                   const atlas_rule *a, const block_rule *k, int64_t *value)
{
    int32_t *support = cpu_support_of(p, layer, cohort);
    layer_log *log = cpu_log_of(p, layer, cohort);
    int words = (int)p->support.cols - 1;
    int32_t *flag = support + words;
    bool cold = sl->path == PATH_COLD;
    bool wanted = cold || slot_update_due(sl->iteration, sl->since_update, k);
    if (!cold && *flag == SUPPORT_HOLDS) {
        int under = test_coverage(c, (uint32_t *)support, a->coverage, log);
        if (!wanted && under > atlas_allowed(c->rows, a->covered_share)) {
            wanted = true;
            log->rebuilt = 1;
        }
    }
    if (wanted && c->rows > 0) {
        memset(support, 0, (size_t)words * sizeof *support);
        log->updated = !log->rebuilt;
        *flag = build(c, (uint32_t *)support, value, r->experts, a, log) ? SUPPORT_HOLDS : SUPPORT_UNIVERSE;
    }
    log->universe = *flag == SUPPORT_UNIVERSE;
    log->support = !cold && *flag == SUPPORT_HOLDS ? size_of((uint32_t *)support, words) : r->experts;
}

typedef struct support_task {
    plans *p;
    int layer;
    const tensor *z, *bias;
    const slots *s;
    const route_rule *r;
    const atlas_rule *a;
    const block_rule *k;
    const int32_t *kept;  /* [rows]: their places among the fresh rows */
    const int32_t *first; /* [cohorts + 1]: the first row of each */
    candidates all;
} support_task;

static void find_candidates(void *arg, int64_t from, int64_t to, int thread)
{
    const support_task *w = arg;
    const candidates *c = &w->all;
    (void)thread;
    for (int64_t t = from; t < to; t++) {
        int32_t *id = c->id + t * c->width;
        float *score = c->score + t * c->width, sum = 0;
        int have = route_candidates(cpu_row(w->z, w->kept[t]), w->bias->data, w->r, c->width, id, score);
        for (int j = 0; j < c->top_k && j < have; j++)
            sum += score[j];
        c->floor[t] = w->a->coverage * sum;
        for (int j = have; j < c->width; j++)
            id[j] = -1;
    }
}

static void update_cohorts(void *arg, int64_t from, int64_t to, int thread)
{
    const support_task *w = arg;
    const candidates *all = &w->all;
    const slot *slot_of = w->s->slot.data;
    int32_t size = w->k->cohort;
    (void)thread;
    for (int c = (int)from; c < to; c++) {
        const slot *lead = NULL;
        for (int i = c * size; i < (c + 1) * size && i < w->s->slot_count && !lead; i++)
            if (slot_of[i].path >= PATH_COLD)
                lead = &slot_of[i];
        if (!lead)
            continue;
        int64_t value[SUM_TREE_EXPERTS];
        int32_t row = w->first[c];
        candidates mine = {.rows = w->first[c + 1] - row,
                           .width = all->width,
                           .top_k = all->top_k,
                           .id = all->id + (int64_t)row * all->width,
                           .score = all->score + (int64_t)row * all->width,
                           .floor = all->floor + row,
                           .covered = all->covered + row};
        update(&mine, w->p, w->layer, c, lead, w->r, w->a, w->k, value);
    }
}

status cpu_support(backend *b, plans *p, int layer, const tensor *z, const tensor *bias, const batch *in_batch,
                   const slots *s, const route_rule *r, const atlas_rule *a, const block_rule *k)
{
    if (!k->restrict_experts)
        return OK;
    status st = OK;
    const slot *all = s->slot.data;
    const int32_t *fresh = in_batch->fresh.data, *slot_of = in_batch->slot.data;
    const int32_t *role = in_batch->role.data, *position = in_batch->position.data;
    int width = r->top_k + a->extra < r->experts ? r->top_k + a->extra : r->experts;
    int64_t fresh_count = cpu_used(&in_batch->fresh);
    cpu *self = cpu_of(b);
    TRY(cpu_scratch(self, sizeof(int32_t) * (size_t)(fresh_count * (2 * width + 3) + p->cohort_count + 1), 0));
    /* Packed rows are in slot order, so a cohort's rows are one run of them. */
    int32_t *first = self->shared.data, *kept = first + p->cohort_count + 1, *id = kept + fresh_count;
    float *score = (float *)(id + fresh_count * width), *floors = score + fresh_count * width;
    int n = 0;
    for (int c = 0, i = 0; c < p->cohort_count; c++) {
        first[c] = n;
        for (; i < fresh_count && slot_of[fresh[i]] / k->cohort == c; i++) {
            int row = fresh[i];
            if (role[row] != ROW_SEALING && all[slot_of[row]].fresh >> (position[row] % k->block_size) & 1)
                kept[n++] = i;
        }
    }
    first[p->cohort_count] = n;
    support_task t = {.p = p,
                      .layer = layer,
                      .z = z,
                      .bias = bias,
                      .s = s,
                      .r = r,
                      .a = a,
                      .k = k,
                      .kept = kept,
                      .first = first,
                      .all = {n, width, r->top_k, id, score, floors, floors + fresh_count}};
    cpu_parallel(self, (double)n * r->experts * 6, n, find_candidates, &t);
    cpu_parallel(self, (double)n * width * 4, p->cohort_count, update_cohorts, &t);
out:
    return st;
}
