/* Few-shot examples: questions with their answers, put before every prompt as earlier user and assistant turns. */
#ifndef EPOCH_DATASETS_SHOTS_H
#define EPOCH_DATASETS_SHOTS_H

#include "src/base/status.h"

#include <stdint.h>

enum { SHOTS_MOST = 256 };

typedef struct shots {
    int32_t count;
    char **question, **answer; /* [count], verbatim, NUL-terminated UTF-8 */
} shots;

/* The first N rows of FILE from spec "N:FILE", N from 1 to SHOTS_MOST. FILE is a gsm8k file, or KIND:PATH of a kind
 * whose rows have an answer (gsm8k, mgsm, jsonl), a range behind it if wanted; prompt_field as in dataset_rule.
 * BAD_INPUT: a bad spec or file, fewer rows, a bad row, a row of several turns or without an answer. Close accepts
 * NULL. */
status shots_open(shots **out, const char *spec, const char *prompt_field);
void shots_close(shots *s);

#endif
