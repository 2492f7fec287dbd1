/* Draws the plots of `epoch report --plots DIR`: runs results/plots.py, whose text is built into the program. */
#ifndef EPOCH_RESULTS_PLOTS_H
#define EPOCH_RESULTS_PLOTS_H

#include "src/base/status.h"

/* Draws into `dir`, created where needed; what was drawn and what had no data goes to stdout. python: an interpreter,
 * or NULL: the first python3 of PATH that has h5py and matplotlib. BAD_INPUT: there is none; FAILED: it could not draw.
 */
status plots_draw(const char *dir, const char *python, const char *const *file, int count);

#endif
