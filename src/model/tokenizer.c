#include "src/model/tokenizer.h"
#include "src/model/bpe.h"
#include "src/model/split.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

enum { FORMS = 8, MOST_FILE_BYTES = 1 << 28 };

typedef struct added_token {
    char *text;
    size_t bytes;
    int32_t id;
    bool special, normalized; /* normalized: looked for in the normalised text, else before */
} added_token;

struct tokenizer {
    bpe *bpe;
    split *split;
    int form[FORMS], forms; /* normalisation forms, one after the other, as options of utf8proc_map */
    added_token *added;     /* [count] longest first: the first that fits is the one */
    int32_t count, vocab;
    int32_t *added_at; /* [vocab] index of the added token of that id, or -1 */
};

status token_list_add(token_list *l, int32_t id)
{
    status st = OK;
    if (l->count == l->room) {
        size_t room = l->room ? 2 * l->room : 64;
        int32_t *grown = realloc(l->id, room * sizeof *grown);
        if (!grown)
            FAIL(FAILED, "no memory for %zu token ids", room);
        l->id = grown;
        l->room = room;
    }
    l->id[l->count++] = id;
out:
    return st;
}

void token_list_close(token_list *l)
{
    free(l->id);
    *l = (token_list){0};
}

size_t utf8_valid(const char *text, size_t bytes)
{
    size_t i = 0;
    while (i < bytes) {
        utf8proc_int32_t c;
        utf8proc_ssize_t n = 1;
        if ((unsigned char)text[i] >= 0x80)
            n = utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(bytes - i), &c);
        if (n <= 0)
            break;
        i += (size_t)n;
    }
    return i;
}

static status read_normalizer(tokenizer *t, const json_t *part, const char *where)
{
    static const struct form {
        const char *name;
        int options;
    } known[] = {{"NFC", UTF8PROC_COMPOSE},
                 {"NFD", UTF8PROC_DECOMPOSE},
                 {"NFKC", UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
                 {"NFKD", UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT}};
    status st = OK;
    const char *type;
    if (!part || json_is_null(part))
        return OK;
    TRY(json_text(&type, part, "type", "", where));
    if (strcmp(type, "Sequence") == 0) {
        size_t i;
        json_t *item;
        json_array_foreach(json_object_get(part, "normalizers"), i, item) {
            TRY(read_normalizer(t, item, where));
        }
        return OK;
    }
    for (size_t k = 0; k < sizeof known / sizeof *known; k++)
        if (strcmp(type, known[k].name) == 0) {
            if (t->forms == FORMS)
                FAIL(BAD_INPUT, "%s: normalizer: a Sequence of more than %d is not supported", where, FORMS);
            t->form[t->forms++] = known[k].options | UTF8PROC_STABLE;
            return OK;
        }
    FAIL(BAD_INPUT, "%s: normalizer \"%s\" is not supported, want null, NFC, NFD, NFKC, NFKD or a Sequence of them",
         where, type);
out:
    return st;
}

static int longest_first(const void *a, const void *b)
{
    size_t x = ((const added_token *)a)->bytes, y = ((const added_token *)b)->bytes;
    return (x < y) - (x > y);
}

static status read_added_token(added_token *a, const json_t *item, const char *where)
{
    status st = OK;
    const char *text;
    int64_t id;
    bool word, left, right;
    TRY(json_text(&text, item, "content", "", where));
    TRY(json_int(&id, item, "id", -1, -1, (1 << 24) - 1, where));
    TRY(json_bool(&a->special, item, "special", false, where));
    TRY(json_bool(&a->normalized, item, "normalized", !a->special, where));
    TRY(json_bool(&word, item, "single_word", false, where));
    TRY(json_bool(&left, item, "lstrip", false, where));
    TRY(json_bool(&right, item, "rstrip", false, where));
    if (!*text || id < 0)
        FAIL(BAD_INPUT, "%s: added_tokens: \"%s\" with id %lld: want a text and an id", where, text, (long long)id);
    if (word || left || right)
        FAIL(BAD_INPUT, "%s: added_tokens: \"%s\" (of \"%s\") is not supported, want false", where,
             word ? "single_word" : left ? "lstrip" : "rstrip", text);
    a->id = (int32_t)id;
    a->bytes = strlen(text);
    a->text = malloc(a->bytes + 1);
    if (!a->text)
        FAIL(FAILED, "%s: no memory for the added tokens", where);
    memcpy(a->text, text, a->bytes + 1);
out:
    return st;
}

/* Agreement of the added tokens with the vocabulary and among themselves; the way back from ids. */
static status place_added_tokens(tokenizer *t, const json_t *vocab, const char *where)
{
    status st = OK;
    t->vocab = bpe_vocab(t->bpe);
    for (int32_t i = 0; i < t->count; i++)
        if (t->added[i].id >= t->vocab)
            t->vocab = t->added[i].id + 1;
    t->added_at = malloc(((size_t)t->vocab + 1) * sizeof *t->added_at);
    if (!t->added_at)
        FAIL(FAILED, "%s: no memory for the added tokens", where);
    memset(t->added_at, -1, ((size_t)t->vocab + 1) * sizeof *t->added_at);
    for (int32_t i = 0; i < t->count; i++) {
        const added_token *a = &t->added[i];
        const json_t *same = json_object_get(vocab, a->text);
        size_t bytes;
        bpe_token(t->bpe, a->id, &bytes);
        if (same && json_integer_value(same) != a->id)
            FAIL(BAD_INPUT, "%s: added_tokens: \"%s\" has id %d, but %lld in the vocab", where, a->text, a->id,
                 (long long)json_integer_value(same));
        if ((!same && bytes) || t->added_at[a->id] >= 0)
            FAIL(BAD_INPUT, "%s: added_tokens: \"%s\" has id %d, which another token has too", where, a->text, a->id);
        if (tokenizer_control(t, a->text) != a->id)
            FAIL(BAD_INPUT, "%s: added_tokens: \"%s\" is there twice", where, a->text);
        if (a->special && !bpe_hide(t->bpe, a->id))
            FAIL(BAD_INPUT, "%s: added_tokens: \"%s\" is special, but the merges make it too: any text could hold it",
                 where, a->text);
        t->added_at[a->id] = i;
    }
out:
    return st;
}

static status read_added_tokens(tokenizer *t, const json_t *list, const json_t *vocab, const char *where)
{
    status st = OK;
    size_t count = json_array_size(list);
    t->added = calloc(count + 1, sizeof *t->added);
    if (!t->added)
        FAIL(FAILED, "%s: no memory for the added tokens", where);
    for (size_t i = 0; i < count; i++) {
        t->count++;
        TRY(read_added_token(&t->added[i], json_array_get(list, i), where));
    }
    qsort(t->added, count, sizeof *t->added, longest_first);
    TRY(place_added_tokens(t, vocab, where));
out:
    return st;
}

/* What is left: settings that would change a text's ids, and the decoder. The post_processor adds tokens around a text
 * for callers who ask for it; a chat form never does. */
static status read_rest(const json_t *root, const char *where)
{
    static const char *const unset[] = {"truncation", "padding"};
    status st = OK;
    const char *type = json_string_value(json_object_get(json_object_get(root, "decoder"), "type"));
    for (size_t k = 0; k < sizeof unset / sizeof *unset; k++) {
        const json_t *v = json_object_get(root, unset[k]);
        if (v && !json_is_null(v))
            FAIL(BAD_INPUT, "%s: \"%s\" is set, which is not supported: make it null", where, unset[k]);
    }
    if (!type || strcmp(type, "ByteLevel") != 0)
        FAIL(BAD_INPUT, "%s: decoder \"%s\" is not supported, want ByteLevel", where, type ? type : "null");
out:
    return st;
}

status tokenizer_open(tokenizer **out, const char *dir)
{
    status st = OK;
    json_t *root = NULL;
    const json_t *model;
    tokenizer *t = calloc(1, sizeof *t);
    size_t room = strlen(dir) + sizeof "/tokenizer.json";
    char *where = malloc(room);
    *out = NULL;
    if (!t || !where)
        FAIL(FAILED, "no memory for the tokenizer of %s", dir);
    snprintf(where, room, "%s/tokenizer.json", dir);
    TRY(json_file(&root, where, MOST_FILE_BYTES));
    if (!json_is_object(root))
        FAIL(BAD_INPUT, "%s: not a JSON object", where);
    model = json_object_get(root, "model");
    TRY(read_rest(root, where));
    TRY(read_normalizer(t, json_object_get(root, "normalizer"), where));
    TRY(split_open(&t->split, json_object_get(root, "pre_tokenizer"), where));
    TRY(bpe_open(&t->bpe, model, where));
    TRY(read_added_tokens(t, json_object_get(root, "added_tokens"), json_object_get(model, "vocab"), where));
    *out = t;
    t = NULL;
out:
    tokenizer_close(t);
    json_decref(root);
    free(where);
    return st;
}

void tokenizer_close(tokenizer *t)
{
    if (!t)
        return;
    for (int32_t i = 0; i < t->count; i++)
        free(t->added[i].text);
    free(t->added);
    free(t->added_at);
    split_close(t->split);
    bpe_close(t->bpe);
    free(t);
}

int32_t tokenizer_vocab(const tokenizer *t)
{
    return t->vocab;
}

int32_t tokenizer_control(const tokenizer *t, const char *text)
{
    for (int32_t i = 0; i < t->count; i++)
        if (strcmp(t->added[i].text, text) == 0)
            return t->added[i].id;
    return -1;
}

/* One text on its way: `run` collects it from one added token to the next. */
typedef struct encoder {
    const tokenizer *t;
    token_list *out;
    bpe_scratch scratch;
    char *run;
    size_t used, room;
} encoder;

static status run_append(encoder *e, const char *text, size_t bytes)
{
    status st = OK;
    if (bytes > e->room - e->used) {
        size_t room = 2 * e->room + bytes;
        char *grown = realloc(e->run, room);
        if (!grown)
            FAIL(FAILED, "no memory to tokenize a text of %zu bytes", room);
        e->run = grown;
        e->room = room;
    }
    if (bytes)
        memcpy(e->run + e->used, text, bytes);
    e->used += bytes;
out:
    return st;
}

static status add_word(void *to, const char *text, size_t bytes)
{
    encoder *e = to;
    return bpe_encode(e->t->bpe, &e->scratch, e->out, text, bytes);
}

static bool is_ascii(const char *text, size_t bytes)
{
    unsigned char all = 0;
    for (size_t i = 0; i < bytes; i++)
        all |= (unsigned char)text[i];
    return all < 0x80;
}

/* Appends the ids of the run and empties it. No form changes ASCII. A character newer than the tables of utf8proc is
 * left as it is; so does the reference, whose tables are older. */
static status run_flush(encoder *e)
{
    status st = OK;
    utf8proc_uint8_t *text = NULL;
    for (int k = 0; k < e->t->forms && !is_ascii(e->run, e->used); k++) {
        utf8proc_ssize_t n = utf8proc_map((utf8proc_uint8_t *)e->run, (utf8proc_ssize_t)e->used, &text,
                                          (utf8proc_option_t)e->t->form[k]);
        if (n < 0)
            FAIL(FAILED, "a text of %zu bytes could not be normalised: %s", e->used, utf8proc_errmsg(n));
        e->used = 0;
        TRY(run_append(e, (const char *)text, (size_t)n));
        free(text);
        text = NULL;
    }
    TRY(split_words(e->t->split, e->run, e->used, add_word, e));
    e->used = 0;
out:
    free(text);
    return st;
}

/* The added token that the text begins with: the longest of those looked for at this pass, or NULL. */
static const added_token *added_token_at(const tokenizer *t, const char *text, size_t bytes, bool normalized)
{
    for (int32_t i = 0; i < t->count; i++) {
        const added_token *a = &t->added[i];
        if (a->normalized == normalized && a->bytes <= bytes && memcmp(a->text, text, a->bytes) == 0)
            return a;
    }
    return NULL;
}

/* Pass 0 looks for the added tokens that come before normalisation, pass 1 for the others in what is left of the text.
 * (A control part is taken to be normalised: it is a program's text.) */
static status add_text(encoder *e, const char *text, size_t bytes, int pass)
{
    status st = OK;
    size_t from = 0;
    if (pass == 2)
        return run_append(e, text, bytes);
    for (size_t i = 0; i < bytes;) {
        const added_token *a = added_token_at(e->t, text + i, bytes - i, pass == 1);
        if (!a) {
            i++;
            continue;
        }
        TRY(add_text(e, text + from, i - from, pass + 1));
        TRY(run_flush(e));
        TRY(token_list_add(e->out, a->id));
        i += a->bytes;
        from = i;
    }
    TRY(add_text(e, text + from, bytes - from, pass + 1));
out:
    return st;
}

status tokenizer_encode_parts(const tokenizer *t, token_list *out, const text_part *part, size_t parts)
{
    status st = OK;
    size_t before = out->count;
    encoder e = {.t = t, .out = out};
    for (size_t k = 0; k < parts; k++) {
        size_t valid = utf8_valid(part[k].text, part[k].bytes);
        if (valid < part[k].bytes)
            FAIL(BAD_INPUT, "not UTF-8: byte 0x%02x at offset %zu of a text of %zu bytes",
                 (unsigned char)part[k].text[valid], valid, part[k].bytes);
        if (valid)
            TRY(add_text(&e, part[k].text, part[k].bytes, part[k].control ? 0 : 2));
    }
    TRY(run_flush(&e));
out:
    if (st != OK)
        out->count = before;
    bpe_scratch_close(&e.scratch);
    free(e.run);
    return st;
}

status tokenizer_encode(const tokenizer *t, token_list *out, const char *text, size_t bytes, bool control)
{
    return tokenizer_encode_parts(t, out, &(text_part){text, bytes, control}, 1);
}

static const char *token_bytes(const tokenizer *t, int32_t id, size_t *bytes, bool skip_special)
{
    const added_token *a = id >= 0 && id < t->vocab && t->added_at[id] >= 0 ? &t->added[t->added_at[id]] : NULL;
    if (!a)
        return bpe_token(t->bpe, id, bytes);
    *bytes = skip_special && a->special ? 0 : a->bytes;
    return a->text;
}

status tokenizer_decode(const tokenizer *t, char **out, size_t *bytes, const int32_t *ids, size_t count,
                        bool skip_special)
{
    status st = OK;
    size_t n, total = 0;
    for (size_t i = 0; i < count; i++) {
        token_bytes(t, ids[i], &n, skip_special);
        total += n;
    }
    *bytes = 0;
    *out = malloc(total + 1);
    if (!*out)
        FAIL(FAILED, "no memory for a text of %zu bytes", total);
    for (size_t i = 0; i < count; i++) {
        const char *token = token_bytes(t, ids[i], &n, skip_special);
        memcpy(*out + *bytes, token, n);
        *bytes += n;
    }
    (*out)[total] = '\0';
out:
    return st;
}
