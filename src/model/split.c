#include "src/model/split.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

/* What ByteLevel with use_regex stands for. */
static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

/* Unicode's White_Space, as the inside of a character class. */
#define WHITE "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"

struct split {
    pcre2_code *code;
};

/* Groups that mean the same to both engines. (?i) without a colon does not: its reach differs. */
static size_t group_length(const char *p)
{
    static const char *const known[] = {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:", "(?-i:"};
    for (size_t k = 0; k < sizeof known / sizeof *known; k++)
        if (strncmp(p, known[k], strlen(known[k])) == 0)
            return strlen(known[k]);
    return p[1] == '?' || p[1] == '*' ? 0 : 1;
}

/* {n}, {n,} or {n,m}, not followed by ? or +: those make {n}? optional, {n}+ a repeat of repeats in Oniguruma. */
static size_t bound_length(const char *p)
{
    size_t n = 1 + strspn(p + 1, "0123456789");
    if (n == 1)
        return 0;
    if (p[n] == ',')
        n += 1 + strspn(p + n + 1, "0123456789");
    return p[n] == '}' && p[n + 1] != '?' && p[n + 1] != '+' ? n + 1 : 0;
}

/* The length of the escape at p, 0 if unknown; *as is what to write instead, or NULL for itself. */
static size_t escape_length(const char *p, bool in_class, const char **as)
{
    if (p[1] == 's')
        *as = in_class ? WHITE : "[" WHITE "]";
    if (p[1] == 'S' && !in_class)
        *as = "[^" WHITE "]";
    if (*as || (p[1] && strchr("rntfdD", p[1])))
        return 2;
    if ((p[1] == 'p' || p[1] == 'P') && p[2] == '{')
        return strcspn(p, "}") + 1;
    return ispunct((unsigned char)p[1]) ? 2 : 0;
}

/* Copies the expression item by item, \s and \S spelled out. BAD_INPUT shows the rest from the unknown item on. */
static status translate(char **out, const char *pattern, const char *where)
{
    status st = OK;
    bool in_class = false;
    size_t used = 0;
    *out = malloc(strlen(pattern) * sizeof("[^" WHITE "]") + 1);
    if (!*out)
        FAIL(FAILED, "%s: no memory for the split expression", where);
    for (const char *p = pattern; *p;) {
        const char *as = NULL;
        size_t n = 1;
        if (*p == '\\')
            n = escape_length(p, in_class, &as);
        else if (in_class && (*p == '[' || (p[0] == '&' && p[1] == '&')))
            n = 0;
        else if (in_class)
            in_class = *p != ']';
        else if (*p == '[') {
            in_class = true;
            n = p[1] == '^' ? 2 : 1;
            n = p[n] == ']' ? 0 : n;
        } else if (*p == '(')
            n = group_length(p);
        else if (*p == '{')
            n = bound_length(p);
        else if (*p == '^' || *p == '$')
            n = 0;
        if (n == 0 || n > strlen(p))
            FAIL(BAD_INPUT, "%s: pre_tokenizer: not supported in a split expression, from here on: %s", where, p);
        if (!as)
            as = p;
        else
            p += n, n = strlen(as);
        memcpy(*out + used, as, n);
        used += n;
        if (as == p)
            p += n;
    }
    (*out)[used] = '\0';
out:
    return st;
}

static status compile(split *s, const char *pattern, const char *where)
{
    status st = OK;
    int error;
    uint32_t empty = 0;
    PCRE2_SIZE at;
    char *text = NULL;
    pcre2_compile_context *rules = pcre2_compile_context_create(NULL);
    TRY(translate(&text, pattern, where));
    if (!rules)
        FAIL(FAILED, "%s: no memory for the split expression", where);
    pcre2_set_newline(rules, PCRE2_NEWLINE_LF); /* what a dot leaves out */
    s->code = pcre2_compile((PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &error, &at, rules);
    if (!s->code) {
        char why[128];
        pcre2_get_error_message(error, (PCRE2_UCHAR *)why, sizeof why);
        FAIL(BAD_INPUT, "%s: pre_tokenizer: the split expression %s is wrong: %s", where, pattern, why);
    }
    pcre2_pattern_info(s->code, PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty)
        FAIL(BAD_INPUT, "%s: pre_tokenizer: the split expression %s matches the empty text, which is not supported",
             where, pattern);
    pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE); /* where it fails the interpreter does the same, slower */
out:
    free(text);
    pcre2_compile_context_free(rules);
    return st;
}

static status read_byte_level(const json_t *part, bool *own, const char *where)
{
    status st = OK;
    bool prefix;
    TRY(json_bool(&prefix, part, "add_prefix_space", true, where));
    TRY(json_bool(own, part, "use_regex", true, where));
    if (prefix)
        FAIL(BAD_INPUT, "%s: pre_tokenizer: ByteLevel with \"add_prefix_space\" is not supported, want false", where);
out:
    return st;
}

static status read_split(const json_t *part, const char **pattern, const char *where)
{
    status st = OK;
    const char *behavior;
    bool invert;
    TRY(json_text(&behavior, part, "behavior", "", where));
    TRY(json_bool(&invert, part, "invert", false, where));
    if (strcmp(behavior, "Isolated") != 0)
        FAIL(BAD_INPUT, "%s: pre_tokenizer: Split with behavior \"%s\" is not supported, want \"Isolated\"", where,
             behavior);
    if (invert)
        FAIL(BAD_INPUT, "%s: pre_tokenizer: Split with \"invert\" is not supported, want false", where);
    *pattern = json_string_value(json_object_get(json_object_get(part, "pattern"), "Regex"));
    if (!*pattern)
        FAIL(BAD_INPUT, "%s: pre_tokenizer: the pattern of Split is not {\"Regex\": \"...\"}, which alone is supported",
             where);
out:
    return st;
}

static const char *type_of(const json_t *part)
{
    const char *type = json_string_value(json_object_get(part, "type"));
    return type ? type : "null";
}

status split_open(split **out, const json_t *pre_tokenizer, const char *where)
{
    status st = OK;
    const json_t *parts = json_object_get(pre_tokenizer, "pretokenizers"), *first = json_array_get(parts, 0),
                 *second = json_array_get(parts, 1);
    const char *type = type_of(pre_tokenizer), *pattern = gpt2;
    bool own;
    split *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        FAIL(FAILED, "%s: no memory for the split expression", where);
    if (strcmp(type, "ByteLevel") == 0) {
        TRY(read_byte_level(pre_tokenizer, &own, where));
        if (!own)
            FAIL(BAD_INPUT, "%s: pre_tokenizer: ByteLevel alone without \"use_regex\" is not supported, want true",
                 where);
    } else if (strcmp(type, "Sequence") == 0) {
        if (json_array_size(parts) != 2 || strcmp(type_of(first), "Split") != 0 ||
            strcmp(type_of(second), "ByteLevel") != 0)
            FAIL(BAD_INPUT,
                 "%s: pre_tokenizer: a Sequence of %zu, first \"%s\", is not supported, want Split and ByteLevel",
                 where, json_array_size(parts), type_of(first));
        TRY(read_split(first, &pattern, where));
        TRY(read_byte_level(second, &own, where));
        if (own)
            FAIL(BAD_INPUT, "%s: pre_tokenizer: ByteLevel with \"use_regex\" behind Split is not supported, want false",
                 where);
    } else
        FAIL(BAD_INPUT,
             "%s: pre_tokenizer: type \"%s\" is not supported, want ByteLevel, or a Sequence of Split and ByteLevel",
             where, type);
    TRY(compile(s, pattern, where));
    *out = s;
    s = NULL;
out:
    split_close(s);
    return st;
}

void split_close(split *s)
{
    if (!s)
        return;
    pcre2_code_free(s->code);
    free(s);
}

status split_words(const split *s, const char *text, size_t bytes,
                   status (*word)(void *to, const char *text, size_t bytes), void *to)
{
    status st = OK;
    pcre2_match_data *match = pcre2_match_data_create(1, NULL);
    if (!match)
        FAIL(FAILED, "no memory to split a text of %zu bytes", bytes);
    const PCRE2_SIZE *span = pcre2_get_ovector_pointer(match);
    for (size_t at = 0; at < bytes;) {
        PCRE2_SPTR subject = (PCRE2_SPTR)text;
        int found = pcre2_match(s->code, subject, bytes, at, PCRE2_NO_UTF_CHECK, match, NULL);
        if (found == PCRE2_ERROR_JIT_STACKLIMIT) /* the interpreter keeps its stack on the heap */
            found = pcre2_match(s->code, subject, bytes, at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match, NULL);
        if (found < 0 && found != PCRE2_ERROR_NOMATCH) {
            char why[128];
            pcre2_get_error_message(found, (PCRE2_UCHAR *)why, sizeof why);
            FAIL(BAD_INPUT, "the split expression of tokenizer.json gave up at byte %zu of %zu: %s", at, bytes, why);
        }
        size_t from = found < 0 ? bytes : span[0], end = found < 0 ? bytes : span[1];
        if (from > at)
            TRY(word(to, text + at, from - at));
        if (end > from)
            TRY(word(to, text + from, end - from));
        at = end;
    }
out:
    pcre2_match_data_free(match);
    return st;
}
