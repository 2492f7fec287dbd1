/* Chat forms: how the turns of a conversation become one prompt. The fixed pieces of a form may name control tokens;
 * the texts of the turns never do (tokenizer.h).
 *
 * A template file is plain text, one part a line, "PART: TEXT":
 *
 *     # a line that begins with # is a comment; empty lines do not count
 *     system: You answer in one sentence.\n
 *     user: Question: {user}\n
 *     assistant: Answer: {assistant}\n
 *     prompt: Answer:
 *
 * system comes first, once; then each turn through user or assistant; prompt ends it, where the model goes on. user is
 * needed, the rest may be left out (without assistant a conversation has one turn). TEXT begins after one space and
 * ends with the line, spaces included. \n, \t, \\ and \{ are a line break, a tab, a backslash and a brace; a brace
 * alone opens a placeholder: {user} stands once in user, {assistant} once in assistant, none elsewhere. */
#ifndef EPOCH_MODEL_CHAT_H
#define EPOCH_MODEL_CHAT_H

#include "src/model/tokenizer.h"

typedef struct chat_turn { /* one message; the answers of earlier turns stand between */
    bool assistant;        /* false: the user's */
    const char *text;      /* UTF-8 */
    size_t bytes;
} chat_turn;

typedef struct chat_template chat_template;

/* file: a template file, or NULL for the family's own form: "llada2_moe" (SYSTEM part, HUMAN and ASSISTANT roles) or
 * "llada_moe" (no SYSTEM part). BAD_INPUT: an unknown family, a file that cannot be read or is malformed (names file
 * and line). Owned by the caller; close accepts NULL. */
status chat_template_open(chat_template **out, const char *family, const char *file);
void chat_template_close(chat_template *c);

/* Appends the ids of the whole conversation and the generation prompt. BAD_INPUT: a text that is not UTF-8, or an
 * assistant's turn where the template has no form for it. */
status chat_encode(const chat_template *c, const tokenizer *t, token_list *out, const chat_turn *turn, int turns);

#endif
