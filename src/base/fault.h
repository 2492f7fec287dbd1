/* Faults on purpose, for the tests of jobs that survive. Only the test program `epoch_faults` has them; elsewhere
 * the points are nothing.
 *
 * EPOCH_FAULT=POINT:RANK:SIGNAL[:COUNT]
 *     the process of RANK (of every rank: *) sends itself SIGNAL, or mpirun -SIGNAL, when it passes POINT for the
 *     COUNT-th time (1)
 * EPOCH_FAULT_DELAY=POINT:SECONDS
 *     each passing of POINT takes so long
 * EPOCH_FAULT_ROW=ORDER
 *     the row of that order gets activations that are no numbers; in epoch bench slot ORDER / R of rank ORDER % R
 * EPOCH_FAULT_PLAN=CAUSE
 *     miss, version, illegal, overdue or universe: each plan gets a reason to fall back (exec/executor.c)
 * EPOCH_FAULT_LATE=0|1
 *     reports are read behind each forward, or one forward late (run.c) */
#ifndef EPOCH_BASE_FAULT_H
#define EPOCH_BASE_FAULT_H

#include <stdint.h>

#ifdef EPOCH_FAULTS
void fault_point(const char *point);
int64_t fault_row(void); /* -1: none */
const char *fault_plan(void); /* NULL: none */
int fault_late(void); /* -1: as the backend has it */
#else
#define fault_point(point) ((void)0)
#define fault_row() ((int64_t)-1)
#define fault_late() (-1)
#endif

#endif
