/* `epoch export FILE.h5 --format ...`: answers in the forms that other people's tools read, one JSON object a line.
 *
 * jsonl      one row a prompt and turn: ids, text, token ids, metrics
 * humaneval  samples.jsonl of the official harness: task_id, completion
 * lm-eval    samples of lm-evaluation-harness (--log_samples): one row a document and filter
 * mtbench    model answers of FastChat's llm_judge: one row a question with all its turns */
#ifndef EPOCH_RESULTS_EXPORT_H
#define EPOCH_RESULTS_EXPORT_H

#include "results/results.h"

#include <stdio.h>

typedef enum export_format {
    EXPORT_JSONL,
    EXPORT_HUMANEVAL,
    EXPORT_LM_EVAL,
    EXPORT_MTBENCH,
    EXPORT_FORMATS
} export_format;

extern const char *const export_format_names[EXPORT_FORMATS];

typedef struct export_order {
    export_format format;
    const char *dataset;  /* only rows of this dataset; NULL: all that fit the format */
    const char *model_id; /* mtbench; NULL: the last part of the model's path */
} export_order;

/* Writes the rows to `to`, and to `notes` what a reader of them must know (rows that failed, a partial run). BAD_INPUT:
 * no row fits, or a row's gold is damaged; FAILED: writing failed. */
status export_rows(const results_file *f, const export_order *o, FILE *to, FILE *notes);

/* The command; argv[0] is its name. Notes go to stderr. */
status export_command(int argc, char **argv);

#endif
