#include "src/model/bpe.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_IDS = 1 << 24, ALPHABET = 256 + 68 };

typedef struct merge {
    uint64_t pair;    /* left id << 32 | right id */
    int32_t rank, id; /* id: the token they make; -1: a free slot */
} merge;

enum { MADE = 1, HIDDEN = 2 };

struct bpe {
    int32_t vocab;
    size_t *at; /* [vocab + 1] token i is bytes[at[i]] .. bytes[at[i + 1]] */
    char *bytes;
    unsigned char *mark;  /* [vocab] MADE: a merge or a byte makes it; HIDDEN: no whole word does */
    int32_t *word;        /* [words] id by bytes, open addressing; -1: free */
    merge *merge;         /* [merges] by pair, open addressing */
    size_t words, merges; /* powers of two, at most half full */
    int32_t single[256];
    bool ignore_merges;
};

/* tokenizer.json writes a byte as a visible character: itself where it is one in Latin-1, else the next from U+0100 on.
 * byte_of[character] is the byte, -1 for characters outside this alphabet. */
static void alphabet(int16_t byte_of[ALPHABET])
{
    int next = 256;
    for (int c = 0; c < ALPHABET; c++)
        byte_of[c] = -1;
    for (int b = 0; b < 256; b++) {
        bool visible = (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b != 0xad);
        byte_of[visible ? b : next++] = (int16_t)b;
    }
}

/* Writes the bytes that `name` (UTF-8) stands for; their number, or -1 where a character is not of the alphabet. */
static int64_t spell(char *to, const char *name, size_t length, const int16_t byte_of[ALPHABET])
{
    int64_t n = 0;
    for (size_t i = 0; i < length; i++) {
        unsigned c = (unsigned char)name[i];
        if (c >= 0xc0 && c < 0xe0 && i + 1 < length)
            c = (c & 0x1f) << 6 | ((unsigned char)name[++i] & 0x3f);
        else if (c >= 0x80)
            return -1;
        if (c >= ALPHABET || byte_of[c] < 0)
            return -1;
        to[n++] = (char)byte_of[c];
    }
    return n;
}

static size_t power_of_two(size_t least)
{
    size_t n = 16;
    while (n < least)
        n *= 2;
    return n;
}

/* The slot that holds these bytes, or the free one where they belong. */
static size_t word_slot(const bpe *b, const char *bytes, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ (unsigned char)bytes[i]) * 0x100000001b3u;
    h ^= h >> 29;
    for (size_t s = h & (b->words - 1);; s = (s + 1) & (b->words - 1)) {
        int32_t id = b->word[s];
        if (id < 0 || (b->at[id + 1] - b->at[id] == n && memcmp(b->bytes + b->at[id], bytes, n) == 0))
            return s;
    }
}

static merge *merge_slot(const bpe *b, int32_t left, int32_t right)
{
    uint64_t pair = (uint64_t)left << 32 | (uint32_t)right;
    for (size_t s = (pair * 0x9e3779b97f4a7c15u >> 32) & (b->merges - 1);; s = (s + 1) & (b->merges - 1))
        if (b->merge[s].id < 0 || b->merge[s].pair == pair)
            return &b->merge[s];
}

static const merge *merge_find(const bpe *b, int32_t left, int32_t right)
{
    const merge *m = merge_slot(b, left, right);
    return m->id < 0 ? NULL : m;
}

static status read_rules(bpe *b, const json_t *model, const char *where)
{
    status st = OK;
    const char *type, *prefix, *suffix;
    double dropout;
    bool fallback;
    TRY(json_text(&type, model, "type", "BPE", where));
    TRY(json_double(&dropout, model, "dropout", 0, where));
    TRY(json_text(&prefix, model, "continuing_subword_prefix", "", where));
    TRY(json_text(&suffix, model, "end_of_word_suffix", "", where));
    TRY(json_bool(&fallback, model, "byte_fallback", false, where));
    TRY(json_bool(&b->ignore_merges, model, "ignore_merges", false, where));
    if (strcmp(type, "BPE") != 0)
        FAIL(BAD_INPUT, "%s: a model of type \"%s\" is not supported, want \"BPE\"", where, type);
    if (dropout != 0)
        FAIL(BAD_INPUT, "%s: \"dropout\" is %g: merging at random is not supported, want null", where, dropout);
    if (*prefix)
        FAIL(BAD_INPUT, "%s: \"continuing_subword_prefix\" \"%s\" is not supported, want null", where, prefix);
    if (*suffix)
        FAIL(BAD_INPUT, "%s: \"end_of_word_suffix\" \"%s\" is not supported, want null", where, suffix);
    if (fallback)
        FAIL(BAD_INPUT, "%s: \"byte_fallback\" is not supported, want false (here every byte has a token)", where);
    /* unk_token and fuse_unk say what to do with a byte that has no token: there is none (read_vocab). */
out:
    return st;
}

static status read_vocab(bpe *b, const json_t *vocab, const int16_t byte_of[ALPHABET], const char *where)
{
    status st = OK;
    const char *name, **names = NULL;
    json_t *value;
    size_t total = 0, count = json_object_size(vocab);
    json_object_foreach((json_t *)vocab, name, value) {
        json_int_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id >= MOST_IDS)
            FAIL(BAD_INPUT, "%s: vocab: the id of \"%s\" is not an integer from 0 to %d", where, name, MOST_IDS - 1);
        if (id >= b->vocab)
            b->vocab = (int32_t)id + 1;
        total += strlen(name);
    }
    b->words = power_of_two(2 * count);
    names = calloc((size_t)b->vocab + 1, sizeof *names);
    b->at = calloc((size_t)b->vocab + 1, sizeof *b->at);
    b->mark = calloc((size_t)b->vocab + 1, 1);
    b->bytes = malloc(total + 1);
    b->word = malloc(b->words * sizeof *b->word);
    if (!names || !b->at || !b->mark || !b->bytes || !b->word)
        FAIL(FAILED, "%s: no memory for %zu tokens", where, count);
    memset(b->word, -1, b->words * sizeof *b->word);
    json_object_foreach((json_t *)vocab, name, value) {
        json_int_t id = json_integer_value(value);
        if (names[id])
            FAIL(BAD_INPUT, "%s: vocab: \"%s\" and \"%s\" both have id %lld", where, names[id], name, (long long)id);
        names[id] = name;
    }
    for (int32_t id = 0; id < b->vocab; id++) {
        size_t at = b->at[id], length = names[id] ? strlen(names[id]) : 0;
        int64_t n = spell(b->bytes + at, names[id], length, byte_of);
        b->at[id + 1] = at + (n < 0 ? length : (size_t)n);
        if (n > 0)
            b->word[word_slot(b, b->bytes + at, (size_t)n)] = id;
        else if (n < 0) /* no text is ever split into it; it stands for its own characters */
            memcpy(b->bytes + at, names[id], length);
    }
    for (int i = 0; i < 256; i++) {
        char byte = (char)i;
        b->single[i] = b->word[word_slot(b, &byte, 1)];
        if (b->single[i] < 0)
            FAIL(BAD_INPUT, "%s: vocab: no token for the byte 0x%02x, want one for every byte", where, i);
        b->mark[b->single[i]] |= MADE;
    }
out:
    free(names);
    return st;
}

/* The two names of a merge: "a b" or ["a", "b"]. */
static bool merge_names(const json_t *item, const char *name[2], size_t length[2])
{
    if (json_is_array(item) && json_array_size(item) == 2) {
        for (size_t k = 0; k < 2; k++) {
            name[k] = json_string_value(json_array_get(item, k));
            length[k] = json_string_length(json_array_get(item, k));
        }
        return name[0] && name[1];
    }
    const char *text = json_string_value(item), *space = text ? strchr(text, ' ') : NULL;
    if (!space || strchr(space + 1, ' '))
        return false;
    name[0] = text, length[0] = (size_t)(space - text);
    name[1] = space + 1, length[1] = strlen(space + 1);
    return true;
}

static status read_merges(bpe *b, const json_t *list, const int16_t byte_of[ALPHABET], const char *where)
{
    status st = OK;
    size_t count = json_array_size(list), longest = 1;
    char *buffer = NULL;
    for (int32_t id = 0; id < b->vocab; id++)
        if (b->at[id + 1] - b->at[id] > longest)
            longest = b->at[id + 1] - b->at[id];
    b->merges = power_of_two(2 * count);
    b->merge = malloc(b->merges * sizeof *b->merge);
    buffer = malloc(4 * longest); /* a byte takes one or two in a name */
    if (!b->merge || !buffer)
        FAIL(FAILED, "%s: no memory for %zu merges", where, count);
    for (size_t s = 0; s < b->merges; s++)
        b->merge[s].id = -1;
    for (size_t rank = 0; rank < count; rank++) {
        const char *name[2];
        size_t length[2], used = 0;
        int32_t id[3];
        if (!merge_names(json_array_get(list, rank), name, length))
            FAIL(BAD_INPUT, "%s: merges[%zu] is neither \"a b\" nor [\"a\", \"b\"]", where, rank);
        for (int k = 0; k < 2; k++) {
            int64_t n = length[k] <= 2 * longest ? spell(buffer + used, name[k], length[k], byte_of) : -1;
            id[k] = n > 0 ? b->word[word_slot(b, buffer + used, (size_t)n)] : -1;
            if (id[k] < 0)
                FAIL(BAD_INPUT, "%s: merges[%zu]: \"%.*s\" is not in the vocab", where, rank,
                     (int)(length[k] < 200 ? length[k] : 200), name[k]);
            used += (size_t)n;
        }
        id[2] = b->word[word_slot(b, buffer, used)];
        if (id[2] < 0)
            FAIL(BAD_INPUT, "%s: merges[%zu]: the result of \"%.*s\" and \"%.*s\" is not in the vocab", where, rank,
                 (int)length[0], name[0], (int)length[1], name[1]);
        *merge_slot(b, id[0], id[1]) = (merge){(uint64_t)id[0] << 32 | (uint32_t)id[1], (int32_t)rank, id[2]};
        b->mark[id[2]] |= MADE;
    }
out:
    free(buffer);
    return st;
}

status bpe_open(bpe **out, const json_t *model, const char *where)
{
    status st = OK;
    int16_t byte_of[ALPHABET];
    const json_t *vocab = json_object_get(model, "vocab"), *merges = json_object_get(model, "merges");
    bpe *b = calloc(1, sizeof *b);
    *out = NULL;
    if (!b)
        FAIL(FAILED, "%s: no memory for the vocabulary", where);
    if (!json_is_object(model))
        FAIL(BAD_INPUT, "%s: \"model\" is missing or not an object", where);
    TRY(read_rules(b, model, where));
    if (!json_is_object(vocab))
        FAIL(BAD_INPUT, "%s: \"vocab\" of the model is missing or not an object", where);
    if (!json_is_array(merges))
        FAIL(BAD_INPUT, "%s: \"merges\" of the model is missing or not an array", where);
    alphabet(byte_of);
    TRY(read_vocab(b, vocab, byte_of, where));
    TRY(read_merges(b, merges, byte_of, where));
    *out = b;
    b = NULL;
out:
    bpe_close(b);
    return st;
}

void bpe_close(bpe *b)
{
    if (!b)
        return;
    free(b->at);
    free(b->bytes);
    free(b->mark);
    free(b->word);
    free(b->merge);
    free(b);
}

int32_t bpe_vocab(const bpe *b)
{
    return b->vocab;
}

const char *bpe_token(const bpe *b, int32_t id, size_t *bytes)
{
    *bytes = id >= 0 && id < b->vocab ? b->at[id + 1] - b->at[id] : 0;
    return *bytes ? b->bytes + b->at[id] : "";
}

bool bpe_hide(bpe *b, int32_t id)
{
    if (id >= b->vocab)
        return true;
    b->mark[id] |= HIDDEN;
    return !(b->mark[id] & MADE);
}

void bpe_scratch_close(bpe_scratch *s)
{
    free(s->id);
    free(s->next);
    free(s->before);
    free(s->heap);
    *s = (bpe_scratch){0};
}

static status scratch_reserve(bpe_scratch *s, size_t room)
{
    status st = OK;
    if (room <= s->room)
        return OK;
    if (room >= (size_t)1 << 30)
        FAIL(FAILED, "a word of %zu bytes cannot be tokenized, want less than %zu", room, (size_t)1 << 30);
    bpe_scratch_close(s);
    room = power_of_two(room);
    s->id = malloc(room * sizeof *s->id);
    s->next = malloc(room * sizeof *s->next);
    s->before = malloc(room * sizeof *s->before);
    s->heap = malloc(2 * room * sizeof *s->heap); /* room - 1 pairs, and one more for each of room - 1 merges */
    if (!s->id || !s->next || !s->before || !s->heap) {
        bpe_scratch_close(s);
        FAIL(FAILED, "no memory to tokenize a word of %zu bytes", room);
    }
    s->room = room;
out:
    return st;
}

static void heap_push(uint64_t *heap, size_t *count, uint64_t key)
{
    size_t i = (*count)++;
    for (; i > 0 && heap[(i - 1) / 2] > key; i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = key;
}

static uint64_t heap_pop(uint64_t *heap, size_t *count)
{
    uint64_t top = heap[0], last = heap[--*count];
    size_t i = 0, child;
    while ((child = 2 * i + 1) < *count) {
        if (child + 1 < *count && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= last)
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

/* Notes the merge of the tokens at `left` and `right`, if there is one. */
static void note(const bpe *b, const bpe_scratch *s, size_t *noted, int32_t left, int32_t right)
{
    const merge *m = merge_find(b, s->id[left], s->id[right]);
    if (m)
        heap_push(s->heap, noted, (uint64_t)m->rank << 32 | (uint32_t)left);
}

status bpe_encode(const bpe *b, bpe_scratch *s, token_list *out, const char *word, size_t bytes)
{
    status st = OK;
    int32_t n = (int32_t)bytes;
    size_t noted = 0;
    if (b->ignore_merges) {
        int32_t whole = b->word[word_slot(b, word, bytes)];
        if (whole >= 0 && !(b->mark[whole] & HIDDEN))
            return token_list_add(out, whole);
    }
    TRY(scratch_reserve(s, bytes));
    for (int32_t i = 0; i < n; i++) {
        s->id[i] = b->single[(unsigned char)word[i]];
        s->next[i] = i + 1;
        s->before[i] = i - 1;
        if (i > 0)
            note(b, s, &noted, i - 1, i);
    }
    while (noted) {
        uint64_t top = heap_pop(s->heap, &noted);
        int32_t i = (int32_t)(top & 0xffffffff), j = s->next[i];
        const merge *m = s->id[i] >= 0 && j < n ? merge_find(b, s->id[i], s->id[j]) : NULL;
        if (!m || m->rank != (int32_t)(top >> 32))
            continue; /* a neighbour has changed since it was noted */
        s->id[i] = m->id;
        s->id[j] = -1;
        s->next[i] = s->next[j];
        if (s->next[i] < n) {
            s->before[s->next[i]] = i;
            note(b, s, &noted, i, s->next[i]);
        }
        if (s->before[i] >= 0)
            note(b, s, &noted, s->before[i], i);
    }
    for (int32_t i = 0; i < n; i = s->next[i])
        TRY(token_list_add(out, s->id[i]));
out:
    return st;
}
