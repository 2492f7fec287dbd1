/* Benchmark files, plain or gzip, as a stream of prompts. KIND:PATH[@FROM-TO]; kinds: gsm8k, mgsm, humaneval, mtbench,
 * jsonl. Nothing inside a text is trimmed or normalised. A bad row is a row with an error, not the end of the file.
 * Memory: the longest line (at most 16 MiB) and, where rows have ids of their own, the ids.
 *
 * KIND ends at the first ':'; the path may hold more of them. The text behind the last '@' is a range if it holds
 * nothing but digits and '-': rows FROM to TO, from 1, inclusive, blank lines not counted; either number may be left
 * out. So a path that itself ends in such a text wants "@1-" behind it, and any other '@' is part of the path. */
#ifndef EPOCH_DATASETS_DATASET_H
#define EPOCH_DATASETS_DATASET_H

#include "src/base/status.h"

#include <stdbool.h>
#include <stdint.h>

enum { DATASET_TURNS = 8 };

typedef struct example { /* one row; its texts are owned by it: example_close */
    char *id;            /* task_id, question_id, id, or the line's number in decimal; "line N" if it is unreadable */
    int64_t line;        /* 1-based line of the file */
    int32_t turns;
    char *turn[DATASET_TURNS]; /* the user's turns, verbatim, NUL-terminated UTF-8 */
    char *gold;                /* JSON object as text, "{}" if none (datasets/README.md) */
    char *error;               /* NULL, or why this row cannot run ("FILE:LINE: ..."); turns is 0 then */
} example;

/* Frees the texts and leaves zeros. */
void example_close(example *e);

typedef struct dataset_rule {
    const char *prompt_field; /* jsonl: the key that holds the prompt; NULL: "prompt" */
    int64_t limit;            /* rows at most of this file; 0: all */
} dataset_rule;

typedef struct dataset dataset;

/* Opens and reads the first row. BAD_INPUT, before any work: unknown kind, missing or unreadable file, bad range, or a
 * first row (of the range) that is not of its kind. No rows at all are no error. Close accepts NULL. */
status dataset_open(dataset **out, const char *spec, const dataset_rule *r);
void dataset_close(dataset *d);

/* The next row, in the file's order; *more is false and e untouched at the end. FAILED only when reading itself fails
 * (I/O, damaged gzip, no memory); gzip checks its sum at the very end, so count first where that matters. An id that an
 * earlier row given out had is an error of the later row. */
status dataset_next(dataset *d, example *e, bool *more);

const char *dataset_kind(const dataset *d); /* "gsm8k", ... */
const char *dataset_name(const dataset *d); /* kind, or kind_LANG for mgsm (mgsm_de): what the results call it */
const char *dataset_path(const dataset *d);

/* 64-bit hash of the file's bytes as stored and their number, for the results; reads the file once. BAD_INPUT: I/O. */
status dataset_hash(uint64_t *out, const dataset *d);
/* The rows asked for, from 1: the range, cut by the limit; *last is INT64_MAX where nothing cuts it. */
void dataset_range(int64_t *first, int64_t *last, const dataset *d);
/* Rows it gives in all, bad ones too, counted by reading the file once. BAD_INPUT: I/O, damaged gzip. */
status dataset_count(int64_t *out, const dataset *d);

#endif
