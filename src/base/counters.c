#include "src/base/counters.h"

const char *const phase_names[PHASES] = {"attention", "route",  "coverage", "dispatch", "experts", "combine",
                                         "merge",     "shared", "head",     "decode",   "host"};

const char *const path_names[PATHS] = {"none", "prefill", "cold", "refresh", "hot_update", "hot_skip"};
