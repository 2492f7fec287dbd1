/* Right or wrong: numbers read out of texts, under named rules. Pure functions; no file, no floating point but the
 * interval's.
 *
 * strict    what lm-evaluation-harness calls strict-match: GSM8K's first "#### x"; for MGSM the sentence of its
 *           native_cot task ("Die Antwort lautet x"); x is -?[0-9.,]+
 * flexible  its flexible-extract: the last (-?[$0-9.,]{2,})|(-?[0-9]+)
 *           Both compare texts, normalised as its tasks do: GSM8K drops commas, dollars, all up to the last "#### "
 *           and a dot at the end; MGSM drops all ASCII punctuation, so signs and decimal points too.
 * numeric   our default: the first "#### x", where spaces and dollars may stand before x, else the last number. Commas
 *           between groups of three digits are dropped, the point is a dot, and numbers compare as decimals: 29.00
 *           is 29. A minus is a sign unless a letter, a digit or a closing bracket stands before it.
 * locale    numeric in the language of the answer: digits of other scripts (Arabic, Devanagari, Bengali, Telugu, Thai,
 *           full-width); in de, es, fr, ru a decimal comma, and groups set off by dots, spaces or apostrophes. There,
 *           what only the English reading uses up ("18.50", "1,234.56") is read as English; what both use up
 *           ("1,234", "70.000") is read in the language.
 *
 * A rule never changes its meaning under one SCORE_VERSION. */
#ifndef EPOCH_RESULTS_SCORE_H
#define EPOCH_RESULTS_SCORE_H

#include "src/base/status.h"

#include <stdint.h>

enum { SCORE_VERSION = 1 };

typedef enum score_rule { SCORE_STRICT, SCORE_FLEXIBLE, SCORE_NUMERIC, SCORE_LOCALE, SCORE_RULES } score_rule;

extern const char *const score_rule_names[SCORE_RULES];

typedef enum score_verdict {
    SCORE_WRONG,
    SCORE_RIGHT,
    SCORE_NO_ANSWER, /* the rule finds nothing in the text; counts as wrong */
    SCORE_NO_GOLD    /* the gold holds no number: the rule does not apply to this row */
} score_verdict;

/* `language` throughout: NULL for GSM8K and other files without one, else bn de en es fr ja ru sw te th zh; BAD_INPUT
 * for another. FAILED: no memory. Results are normalised texts that the caller frees. */

/* What the rule reads as the answer in a model's text; *out is NULL where it finds none. */
status score_answer(char **out, score_rule rule, const char *language, const char *text);

/* The gold answer in the same form: a bare number in English notation, or GSM8K's worked answer. *out is NULL where
 * numeric or locale find no number. */
status score_gold(char **out, score_rule rule, const char *language, const char *gold);

/* Both, compared. */
status score_compare(score_verdict *out, score_rule rule, const char *language, const char *text, const char *gold);

/* The 95 % interval of a share (Wilson's score interval), within [0, 1]; no rows: 0 to 1. */
void score_interval(double *low, double *high, int64_t right, int64_t rows);

#endif
