/* The "pre_tokenizer" part of tokenizer.json: the expression that cuts a text into words, which the merges never cross.
 * Either a Sequence of Split (a regular expression, every match and every stretch between matches a word) and ByteLevel
 * without an expression of its own, or ByteLevel alone with GPT-2's.
 *
 * The files are written for Oniguruma; here PCRE2 reads them. Constructs that the two understand differently are
 * rewritten (\s: PCRE2 counts U+180E as white space, Oniguruma does not) or refused. Letters and digits are those of
 * the Unicode version that PCRE2 was built with. */
#ifndef EPOCH_MODEL_SPLIT_H
#define EPOCH_MODEL_SPLIT_H

#include "src/base/json.h"

typedef struct split split;

/* `where` names the file in messages. BAD_INPUT: what is not supported. Owned by the caller; close accepts NULL. */
status split_open(split **out, const json_t *pre_tokenizer, const char *where);
void split_close(split *s);

/* Calls word(to, text, bytes) for each word of valid UTF-8 text, in order; together they are the text. Ends with the
 * first failure of `word`. BAD_INPUT: the expression needs too many steps on this text. */
status split_words(const split *s, const char *text, size_t bytes,
                   status (*word)(void *to, const char *text, size_t bytes), void *to);

#endif
