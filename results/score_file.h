/* `epoch score FILE.h5 [...]`: accuracy of a results file, without the model. Numbers under the named rules of score.h
 * side by side, programs by the sandbox; the scores go back into the file. Failed rows count as wrong and are shown. */
#ifndef EPOCH_RESULTS_SCORE_FILE_H
#define EPOCH_RESULTS_SCORE_FILE_H

#include "results/results.h"
#include "results/sandbox.h"

#include <stdio.h>

enum { PROGRAM_RULE_VERSION = 1 }; /* of pass@k: humaneval_completion's meaning */

typedef struct score_order {
    bool disagreements; /* list the rows on which the rules disagree */
    bool wrong;         /* list the rows that numeric, or the tests, find wrong */
    bool no_programs;   /* leave HumanEval out */
    sandbox_rule sandbox;
} score_order;

/* Scores every dataset of the file in order of appearance and prints tables and lists to `to`. *out: malloced, *count
 * rows; their texts belong to the file or to nobody. BAD_INPUT: a row's gold is damaged, or the sandbox cannot open. */
status score_file(result_score **out, int64_t *count, const results_file *f, const score_order *o, FILE *to);

/* The command; argv[0] is its name. BAD_INPUT: usage or a file that cannot be read; FAILED: scores not stored. */
status score_command(int argc, char **argv);

#endif
