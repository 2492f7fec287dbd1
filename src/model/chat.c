#include "src/model/chat.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SYSTEM, USER, ASSISTANT, PROMPT, PARTS, MOST_FILE_BYTES = 1 << 20 };

static const char *const part_name[PARTS] = {"system", "user", "assistant", "prompt"};
static const char *const placeholder[PARTS] = {[USER] = "{user}", [ASSISTANT] = "{assistant}"};

typedef struct chat_part {
    char *text;           /* NULL: the template leaves it out */
    size_t bytes, insert; /* the turn's text stands at byte `insert` */
} chat_part;

struct chat_template {
    chat_part part[PARTS];
};

static const char llada2_moe[] = "system: <role>SYSTEM</role>detailed thinking off<|role_end|>\n"
                                 "user: <role>HUMAN</role>{user}<|role_end|>\n"
                                 "assistant: <role>ASSISTANT</role>{assistant}<|role_end|>\n"
                                 "prompt: <role>ASSISTANT</role>\n";

/* The family's form, in the format of a template file; NULL if unknown. */
static const char *family_form(const char *family)
{
    if (strcmp(family, "llada2_moe") == 0)
        return llada2_moe;
    return strcmp(family, "llada_moe") == 0 ? strchr(llada2_moe, '\n') + 1 : NULL;
}

/* TEXT of one part: escapes and placeholder resolved. */
static status read_text(chat_part *p, int which, const char *text, size_t bytes, const char *where, int line)
{
    status st = OK;
    const char *hole = placeholder[which];
    bool filled = false;
    p->text = malloc(bytes + 1);
    if (!p->text)
        FAIL(FAILED, "%s:%d: no memory for the template", where, line);
    for (size_t i = 0; i < bytes; i++) {
        char c = text[i];
        if (c == '{') {
            size_t n = hole ? strlen(hole) : 0;
            if (!hole || n > bytes - i || strncmp(text + i, hole, n) != 0)
                FAIL(BAD_INPUT, "%s:%d: a brace that does not open %s in \"%s\"; write \\{ for a brace", where, line,
                     hole ? hole : "anything", part_name[which]);
            if (filled)
                FAIL(BAD_INPUT, "%s:%d: %s stands twice, want it once", where, line, hole);
            filled = true;
            p->insert = p->bytes;
            i += n - 1;
            continue;
        }
        if (c == '\\') {
            c = ++i < bytes ? text[i] : '\0';
            if (!c || !strchr("nt\\{", c))
                FAIL(BAD_INPUT, "%s:%d: \\%c is no escape, want \\n, \\t, \\\\ or \\{", where, line, c ? c : ' ');
            c = c == 'n' ? '\n' : c == 't' ? '\t' : c;
        }
        p->text[p->bytes++] = c;
    }
    if (hole && !filled)
        FAIL(BAD_INPUT, "%s:%d: %s is missing in \"%s\"", where, line, hole, part_name[which]);
out:
    return st;
}

static status read_line(chat_template *c, const char *text, size_t bytes, const char *where, int line)
{
    status st = OK;
    const char *colon = memchr(text, ':', bytes);
    size_t name = colon ? (size_t)(colon - text) : bytes, skip;
    int which = 0;
    while (which < PARTS && (strlen(part_name[which]) != name || memcmp(part_name[which], text, name) != 0))
        which++;
    if (!colon || which == PARTS)
        FAIL(BAD_INPUT, "%s:%d: found \"%.*s\", want \"system: \", \"user: \", \"assistant: \" or \"prompt: \"", where,
             line, (int)(name < 60 ? name : 60), text);
    if (c->part[which].text)
        FAIL(BAD_INPUT, "%s:%d: a second \"%s\"; write \\n for a line break inside a part", where, line,
             part_name[which]);
    skip = name + 1;
    if (skip < bytes && text[skip] == ' ')
        skip++;
    TRY(read_text(&c->part[which], which, text + skip, bytes - skip, where, line));
out:
    return st;
}

static status read_template(chat_template *c, const char *text, size_t bytes, const char *where)
{
    status st = OK;
    size_t valid = utf8_valid(text, bytes);
    int line = 1;
    for (size_t at = 0, n; at < bytes; at += n + 1, line++) {
        const char *end = memchr(text + at, '\n', bytes - at);
        n = end ? (size_t)(end - text) - at : bytes - at;
        if (at + n > valid || memchr(text + at, '\0', n))
            FAIL(BAD_INPUT, "%s:%d: not UTF-8 text", where, line);
        if (n && text[at + n - 1] == '\r')
            FAIL(BAD_INPUT, "%s:%d: a carriage return at the line's end, want line feeds alone", where, line);
        if (n && text[at] != '#')
            TRY(read_line(c, text + at, n, where, line));
    }
    if (!c->part[USER].text)
        FAIL(BAD_INPUT, "%s:%d: the template ends without \"user: ...{user}...\"", where, line);
out:
    return st;
}

status chat_template_open(chat_template **out, const char *family, const char *file)
{
    status st = OK;
    FILE *f = NULL;
    char *text = NULL;
    const char *form = file ? NULL : family_form(family);
    chat_template *c = calloc(1, sizeof *c);
    *out = NULL;
    if (!c)
        FAIL(FAILED, "no memory for the chat template");
    if (!file && !form)
        FAIL(BAD_INPUT, "no chat form for the family \"%s\", want llada2_moe or llada_moe: give one by --template FILE",
             family);
    if (form)
        TRY(read_template(c, form, strlen(form), family));
    else {
        size_t bytes;
        f = fopen(file, "rb");
        text = malloc(MOST_FILE_BYTES + 1);
        if (!text)
            FAIL(FAILED, "%s: no memory for the template", file);
        if (!f)
            FAIL(BAD_INPUT, "%s: %s", file, strerror(errno));
        bytes = fread(text, 1, MOST_FILE_BYTES + 1, f);
        if (ferror(f))
            FAIL(BAD_INPUT, "%s: %s", file, strerror(errno));
        if (bytes > MOST_FILE_BYTES)
            FAIL(BAD_INPUT, "%s: more than %d bytes, too long for a template", file, MOST_FILE_BYTES);
        TRY(read_template(c, text, bytes, file));
    }
    *out = c;
    c = NULL;
out:
    if (f)
        fclose(f);
    free(text);
    chat_template_close(c);
    return st;
}

void chat_template_close(chat_template *c)
{
    if (!c)
        return;
    for (int k = 0; k < PARTS; k++)
        free(c->part[k].text);
    free(c);
}

status chat_encode(const chat_template *c, const tokenizer *t, token_list *out, const chat_turn *turn, int turns)
{
    status st = OK;
    size_t used = 0;
    text_part *piece = malloc((2 + 3 * (size_t)turns) * sizeof *piece);
    const chat_part *system = &c->part[SYSTEM], *prompt = &c->part[PROMPT];
    if (!piece)
        FAIL(FAILED, "no memory for a conversation of %d turns", turns);
    piece[used++] = (text_part){system->text, system->bytes, true};
    for (int k = 0; k < turns; k++) {
        const chat_part *p = &c->part[turn[k].assistant ? ASSISTANT : USER];
        if (!p->text)
            FAIL(BAD_INPUT, "turn %d is the assistant's, and the template has no \"assistant: ...{assistant}...\"",
                 k + 1);
        piece[used++] = (text_part){p->text, p->insert, true};
        piece[used++] = (text_part){turn[k].text, turn[k].bytes, false};
        piece[used++] = (text_part){p->text + p->insert, p->bytes - p->insert, true};
    }
    piece[used++] = (text_part){prompt->text, prompt->bytes, true};
    TRY(tokenizer_encode_parts(t, out, piece, used));
out:
    free(piece);
    return st;
}
