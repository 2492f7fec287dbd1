/* The phases of an iteration and the paths of a block: names that counters, trace and report share. */
#ifndef EPOCH_BASE_COUNTERS_H
#define EPOCH_BASE_COUNTERS_H

#include <stdint.h>

typedef enum phase {
    PHASE_ATTENTION, /* norms, projections, rotary, attention */
    PHASE_ROUTE,     /* router product and top-k */
    PHASE_COVERAGE,  /* Atlas: coverage test and support build */
    PHASE_DISPATCH,
    PHASE_EXPERTS,
    PHASE_COMBINE,
    PHASE_MERGE, /* fresh set, pack, merge */
    PHASE_SHARED, /* shared experts and dense MLP layers */
    PHASE_HEAD,
    PHASE_DECODE, /* commit and the life of blocks */
    PHASE_HOST,   /* everything the host does between forwards */
    PHASES
} phase;

extern const char *const phase_names[PHASES];

/* Path of a slot in one forward; PATH_NONE: the slot is not in this forward. */
typedef enum slot_way {
    PATH_NONE,
    PATH_PREFILL,
    PATH_COLD,
    PATH_REFRESH,
    PATH_HOT_UPDATE,
    PATH_HOT_SKIP,
    PATHS
} slot_way;

extern const char *const path_names[PATHS];

#endif
