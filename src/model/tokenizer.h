/* Byte-level BPE as tokenizer.json describes it, and the chat form of each family, both directions.
 * Text from a dataset is never turned into control tokens: tokenizer_encode knows no added token; only the pieces of a
 * chat form that are not the user's text do. */
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

status token_list_add(token_list *l, int32_t id);
void token_list_close(token_list *l);

/* Reads DIR/tokenizer.json. BAD_INPUT names the file and what in it is not supported. Close accepts NULL. */
status tokenizer_open(tokenizer **out, const char *dir);
void tokenizer_close(tokenizer *t);

/* Appends the ids of `bytes` of UTF-8 text. control: added tokens written in the text become their ids; without it they
 * are ordinary text. BAD_INPUT: invalid UTF-8 (names the byte offset). */
status tokenizer_encode(const tokenizer *t, token_list *out, const char *text, size_t bytes, bool control);

/* The bytes of the ids, special added tokens left out where skip_special; a malloc'd string with a NUL behind it, its
 * length in *bytes. Bytes are as the tokens give them: an answer cut inside a character may not be UTF-8. */
status tokenizer_decode(const tokenizer *t, char **out, size_t *bytes, const int32_t *ids, size_t count, bool skip_special);

int32_t tokenizer_vocab(const tokenizer *t); /* one past the largest id */
int32_t tokenizer_control(const tokenizer *t, const char *text); /* id of the added token of that text, or -1 */

/* Chat forms. A turn is one message; the answers of earlier turns stand between. */
typedef struct chat_turn {
    bool assistant;   /* false: the user's */
    const char *text;
    size_t bytes;
} chat_turn;

typedef struct chat_template chat_template;

/* family: "llada2_moe" (SYSTEM part, HUMAN/ASSISTANT roles) or "llada_moe" (no SYSTEM part). file: NULL, or a template in
 * plain text that overrides it: a part before the first {user} line... see the .c file and README ("--template"). */
status chat_template_open(chat_template **out, const char *family, const char *file);
void chat_template_close(chat_template *c);

/* Appends the ids of the whole conversation and the generation prompt. */
status chat_encode(const chat_template *c, const tokenizer *t, token_list *out, const chat_turn *turn, int turns);

#endif
