/* A cmocka group that every rank of a job runs. Rank 0 alone prints; the exit code is that of the worst rank. A failed
 * assertion ends its process, and so the job: the others would wait for it in their next exchange. */
#ifndef EPOCH_TESTS_RANKS_H
#define EPOCH_TESTS_RANKS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/world.h"

#include <stdio.h>
#include <stdlib.h>

static world *job;

static inline void ranks_open(int *argc, char ***argv)
{
    if (world_mpi_open(&job, argc, argv) != OK) {
        fprintf(stderr, "%s\n", status_message());
        exit(FAILED);
    }
    setenv("CMOCKA_TEST_ABORT", "1", 1);
    if (job->rank > 0 && !freopen("/dev/null", "w", stdout))
        exit(FAILED);
}

#define ranks_run(tests) ranks_close(cmocka_run_group_tests(tests, NULL, NULL))

static inline int ranks_close(int failures)
{
    status st = job->agree(job, failures ? FAILED : OK);
    job->close(job);
    return st;
}

#endif
