/* From a model's answer to a HumanEval verdict: what the official harness appends to the prompt, the program it runs,
 * and its estimate of pass@k. Running the program is the sandbox's work. */
#ifndef EPOCH_RESULTS_HUMANEVAL_H
#define EPOCH_RESULTS_HUMANEVAL_H

#include "src/base/status.h"

/* The completion in an answer: prompt + completion is a module that defines entry_point as the answer meant it.
 * - A bare body is kept to the letter, leading newlines included; prose behind it is dropped, helper functions stay.
 *   A body that lost its indentation (of its first line or of all) gets it back.
 * - An answer that repeats the signature, in a code fence (closed or not) or between prose, comes as whole definitions
 *   behind the prompt: its function replaces the prompt's unfinished one, while the prompt's helpers and imports and
 *   the answer's own stay. Statements behind the function (examples, a main guard) are dropped.
 * An empty or useless answer gives a completion that fails its tests. *out is malloced; FAILED: out of memory. */
status humaneval_completion(char **out, const char *text, const char *prompt, const char *entry_point);

/* The program as the harness composes it: prompt, completion, tests, check(entry_point). *out is malloced. */
status humaneval_program(char **out, const char *prompt, const char *completion, const char *test,
                         const char *entry_point);

/* 1 - C(n - c, k) / C(n, k): the unbiased estimate of pass@k from n samples of which c pass (Chen et al. 2021).
 * n >= k >= 1. */
double humaneval_pass_at_k(int n, int c, int k);

#endif
