/* Benchmark files as a stream of prompts. KIND:PATH[@FROM-TO]; kinds: gsm8k, mgsm, humaneval, mtbench, jsonl.
 * Nothing inside a text is trimmed or normalised. A bad row is a row with an error, not the end of the file. */
#ifndef EPOCH_DATASETS_DATASET_H
#define EPOCH_DATASETS_DATASET_H

#include "src/base/status.h"

#include <stdbool.h>
#include <stdint.h>

enum { DATASET_TURNS = 8 };

typedef struct example {   /* one row; its texts are owned by it: example_close */
    char *id;              /* task_id, question_id, or the line's number in decimal */
    int64_t line;          /* 1-based line of the file */
    int32_t turns;
    char *turn[DATASET_TURNS]; /* the user's turns, verbatim, NUL-terminated UTF-8 */
    char *gold;            /* JSON object: {"answer": ...} or {"test":, "entry_point":, "prompt":} ...; "{}" if none */
    char *error;           /* NULL, or why this row cannot run ("FILE:LINE: ..."); turns is 0 then */
} example;

void example_close(example *e);

typedef struct dataset_rule {
    const char *prompt_field; /* jsonl: the key that holds the prompt; NULL: "prompt" */
    int64_t limit;            /* rows at most of this file; 0: all */
} dataset_rule;

typedef struct dataset dataset;

/* Opens and reads the first row. BAD_INPUT, before any work: unknown kind, missing or unreadable file, bad range, or a
 * first row that is not of its kind. Close accepts NULL. */
status dataset_open(dataset **out, const char *spec, const dataset_rule *r);
void dataset_close(dataset *d);

/* The next row; *more is false and e untouched at the end. FAILED only when reading itself fails (I/O, damaged gzip). */
status dataset_next(dataset *d, example *e, bool *more);

const char *dataset_kind(const dataset *d); /* "gsm8k", ... */
const char *dataset_name(const dataset *d); /* kind, or kind_LANG for mgsm (mgsm_de): what the results call it */
const char *dataset_path(const dataset *d);

/* 64-bit hash of the file's bytes and size, for the results; reads the file once. */
status dataset_hash(uint64_t *out, const dataset *d);
/* Rows it would give, counted by reading it once, within range and limit. */
status dataset_count(int64_t *out, const dataset *d);

#endif
