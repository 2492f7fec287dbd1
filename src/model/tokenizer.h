/* Byte-level BPE as tokenizer.json describes it, both directions. bpe.h holds its vocabulary and merges, split.h the
 * expression that cuts a text into words, chat.h the chat forms.
 * Text from a dataset is never turned into control tokens: what is not marked `control` is ordinary text. */
#ifndef EPOCH_MODEL_TOKENIZER_H
#define EPOCH_MODEL_TOKENIZER_H

#include "src/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct tokenizer tokenizer;

typedef struct token_list {
    int32_t *id; /* grows; free with token_list_close */
    size_t count, room;
} token_list;

/* FAILED: no memory. */
status token_list_add(token_list *l, int32_t id);
void token_list_close(token_list *l);

/* Reads DIR/tokenizer.json. BAD_INPUT names the file and what in it is not supported. Close accepts NULL. */
status tokenizer_open(tokenizer **out, const char *dir);
void tokenizer_close(tokenizer *t);

/* Appends the ids of `bytes` of UTF-8 text. control: added tokens written in the text become their ids; without it they
 * are ordinary text. BAD_INPUT: invalid UTF-8 (names the byte offset). After a failure the list is as before. A
 * tokenizer is only read: threads may share it. */
status tokenizer_encode(const tokenizer *t, token_list *out, const char *text, size_t bytes, bool control);

/* The same for a text in parts, of which some are control: the ids of the whole, normalised and cut into words across
 * the seams of the parts; an added token is recognised where it lies inside one control part. */
typedef struct text_part {
    const char *text;
    size_t bytes;
    bool control;
} text_part;

status tokenizer_encode_parts(const tokenizer *t, token_list *out, const text_part *part, size_t parts);

/* The bytes of the ids, special added tokens left out where skip_special; a malloc'd string with a NUL behind it, its
 * length in *bytes. Bytes are as the tokens give them: an answer cut inside a character may not be UTF-8. An id that no
 * token has (a model's vocabulary may be padded) stands for nothing. FAILED: no memory. */
status tokenizer_decode(const tokenizer *t, char **out, size_t *bytes, const int32_t *ids, size_t count,
                        bool skip_special);

int32_t tokenizer_vocab(const tokenizer *t);                     /* one past the largest id */
int32_t tokenizer_control(const tokenizer *t, const char *text); /* id of the added token of that text, or -1 */

/* How many leading bytes are valid UTF-8: `bytes` if all are. */
size_t utf8_valid(const char *text, size_t bytes);

#endif
