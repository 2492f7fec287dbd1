/* Where a cohort's support and log lie, for the ops that run on the host. */
#ifndef EPOCH_CPU_PLANS_H
#define EPOCH_CPU_PLANS_H

#include "src/backend.h"

static inline int32_t *cpu_support_of(const plans *p, int layer, int cohort)
{
    return (int32_t *)p->support.data + ((int64_t)layer * p->cohort_count + cohort) * p->support.ld;
}

static inline layer_log *cpu_log_of(const plans *p, int layer, int cohort)
{
    return (layer_log *)p->log.data + (int64_t)layer * p->cohort_count + cohort;
}

#endif
