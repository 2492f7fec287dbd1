#include "results/score.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

const char *const score_rule_names[SCORE_RULES] = {"strict", "flexible", "numeric", "locale"};

#define DIGITS "0123456789"

/* ---- languages */

typedef struct language {
    const char *name;
    const char *before, *after; /* around the number that `strict` looks for */
    bool comma;                 /* the decimal mark is a comma */
} language;

static const language gsm8k = {"", "#### ", "", false};
static const language languages[] = {
    {"bn", "উত্তর হল ", "", false},        {"de", "Die Antwort lautet ", "", true}, {"en", "The answer is ", "", false},
    {"es", "La respuesta es ", "", true}, {"fr", "La réponse est ", "", true},     {"ja", "答えは", "です。", false},
    {"ru", "Ответ — ", "", true},         {"sw", "Jibu ni ", "", false},           {"te", "సమాధానం ", "", false},
    {"th", "คำตอบคือ ", "", false},        {"zh", "答案是 ", "。", false}};

static status find_language(const language **out, const char *name)
{
    status st = OK;
    *out = name ? NULL : &gsm8k;
    for (size_t i = 0; name && i < sizeof languages / sizeof *languages; i++)
        if (strcmp(languages[i].name, name) == 0)
            *out = &languages[i];
    if (!*out)
        FAIL(BAD_INPUT, "language \"%s\" is unknown, want one of bn de en es fr ja ru sw te th zh", name);
out:
    return st;
}

static status copy(char **out, const char *text, size_t n)
{
    status st = OK;
    *out = strndup(text, n);
    if (!*out)
        FAIL(FAILED, "no memory for a text of %zu bytes", n);
out:
    return st;
}

/* ---- strict and flexible */

/* The bytes of the first number with the language's words around it; *found NULL: none. */
static size_t find_strict(const char **found, const char *text, const language *l)
{
    *found = NULL;
    for (const char *s = strstr(text, l->before); s; s = strstr(s + 1, l->before)) {
        const char *number = s + strlen(l->before);
        size_t sign = *number == '-', n = strspn(number + sign, DIGITS ".,");
        if (n > 0 && strncmp(number + sign + n, l->after, strlen(l->after)) == 0) {
            *found = number;
            return sign + n;
        }
    }
    return 0;
}

/* The last match of (-?[$0-9.,]{2,})|(-?[0-9]+). */
static size_t find_flexible(const char **found, const char *text)
{
    size_t bytes = 0;
    *found = NULL;
    for (const char *s = text; *s;) {
        size_t sign = *s == '-', n = strspn(s + sign, DIGITS "$.,");
        if (n < 2)
            n = strspn(s + sign, DIGITS);
        if (n > 0) {
            *found = s;
            bytes = sign + n;
        }
        s += n > 0 ? sign + n : 1;
    }
    return bytes;
}

static void drop_all(char *text, const char *bytes)
{
    char *to = text;
    for (const char *s = text; *s; s++)
        if (!strchr(bytes, *s))
            *to++ = *s;
    *to = '\0';
}

static void normalise(char *text, const language *l)
{
    if (l != &gsm8k) {
        drop_all(text, "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~");
        return;
    }
    drop_all(text, ",$");
    const char *from = text;
    for (const char *s = text; (s = strstr(s, "#### ")) != NULL; s++)
        from = s + 5;
    memmove(text, from, strlen(from) + 1);
    /* the expression is \.$, and $ stands before a newline at the end too */
    size_t n = strlen(text), end = n > 0 && text[n - 1] == '\n' ? n - 1 : n;
    if (end > 0 && text[end - 1] == '.')
        memmove(text + end - 1, text + end, n - end + 1);
}

/* ---- numeric and locale */

enum { WIDE_SPACE = '\x01' }; /* a no-break or thin space in a folded text */

typedef struct style {
    const char *groups; /* what may stand between groups of three digits: one kind in a number */
    char point;
    size_t head; /* the most digits before the first group */
} style;

static const style english = {",", '.', SIZE_MAX};
static const style comma_style = {".' \x01", ',', 3};
static const style point_style = {",\x01", '.', SIZE_MAX};

/* The code point at s and its bytes; a malformed byte is itself. */
static unsigned code_point(const char *s, size_t *bytes)
{
    const unsigned char *b = (const unsigned char *)s;
    size_t n = b[0] < 0xc2 ? 1 : b[0] < 0xe0 ? 2 : b[0] < 0xf0 ? 3 : b[0] < 0xf5 ? 4 : 1;
    unsigned c = n == 1 ? b[0] : b[0] & (0x7fu >> n);
    for (size_t i = 1; i < n; i++) {
        if ((b[i] & 0xc0) != 0x80) {
            *bytes = 1;
            return b[0];
        }
        c = c << 6 | (b[i] & 0x3fu);
    }
    *bytes = n;
    return c;
}

/* The value of a digit of one of the scripts, or -1. */
static int digit_value(unsigned c)
{
    static const unsigned zero[] = {'0', 0x660, 0x6f0, 0x966, 0x9e6, 0xc66, 0xe50, 0xff10};
    for (size_t i = 0; i < sizeof zero / sizeof *zero; i++)
        if (c >= zero[i] && c <= zero[i] + 9)
            return (int)(c - zero[i]);
    return -1;
}

/* The ASCII character that stands for c, or 0. A full-width comma is one inside a full-width number only. */
static char fold_one(unsigned c, unsigned next, bool all)
{
    if (c == 0x2212) /* minus */
        return '-';
    if (!all)
        return 0;
    if (digit_value(c) >= 0)
        return (char)('0' + digit_value(c));
    bool wide_next = next >= 0xff10 && next <= 0xff19;
    switch (c) {
    case 0xff0d:
        return '-';
    case 0xff0c:
        return wide_next ? ',' : 0;
    case 0xff0e:
        return wide_next ? '.' : 0;
    case 0x2019:
        return '\'';
    case 0xa0:
    case 0x2009:
    case 0x202f:
        return WIDE_SPACE;
    default:
        return 0;
    }
}

/* A copy in which other forms of minus and, if `all`, of digits and separators are ASCII. Never longer. */
static status fold(char **out, const char *text, bool all)
{
    status st = OK;
    TRY(copy(out, text, strlen(text)));
    char *to = *out;
    for (size_t n, ahead; *text; text += n) {
        unsigned c = code_point(text, &n);
        char as = fold_one(c, code_point(text + n, &ahead), all);
        if (as)
            *to++ = as;
        else
            for (size_t i = 0; i < n; i++)
                *to++ = text[i];
    }
    *to = '\0';
out:
    return st;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

static bool is_word(char c)
{
    return is_digit(c) || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z');
}

/* Bytes of the unsigned number at s: digits, groups of three, a fraction; or a fraction alone. 0: none. */
static size_t number_length(const char *s, const style *y)
{
    size_t n = strspn(s, DIGITS);
    if (n > 0 && n <= y->head && s[n] && strchr(y->groups, s[n]))
        for (char group = s[n]; s[n] == group && strspn(s + n + 1, DIGITS) == 3;)
            n += 4;
    if ((n > 0 ? s[n] == y->point : s[0] == '.') && is_digit(s[n + 1]))
        n += 1 + strspn(s + n + 1, DIGITS);
    return n;
}

typedef struct number {
    const char *text;
    size_t bytes; /* 0: none */
    char point;
    bool negative;
} number;

/* The unsigned number at s. In a language with a decimal comma the English reading counts if it reaches further. */
static number number_at(const char *s, const style *y)
{
    number x = {.text = s, .bytes = number_length(s, y), .point = y->point};
    size_t other = number_length(s, &english);
    if (other > x.bytes) {
        x.bytes = other;
        x.point = '.';
    }
    return x;
}

/* The first "#### x". */
static number find_marked(const char *text, const style *y)
{
    for (const char *s = strstr(text, "####"); s; s = strstr(s + 1, "####")) {
        const char *at = s + 4 + strspn(s + 4, " $\x01");
        bool negative = *at == '-';
        at += negative;
        number x = number_at(at + (negative && *at == '$'), y);
        x.negative = negative;
        if (x.bytes > 0)
            return x;
    }
    return (number){0};
}

/* A minus directly before the number, or before its dollar, that joins nothing. */
static bool is_negative(const char *text, const char *at)
{
    if (at > text && at[-1] == '$')
        at--;
    return at > text && at[-1] == '-' && (at - 1 == text || !(is_word(at[-2]) || strchr(")]}", at[-2])));
}

static number find_last(const char *text, const style *y)
{
    number last = {0};
    for (const char *s = text; *s;) {
        number x = {0};
        bool starts = is_digit(*s) || (*s == '.' && (s == text || !(is_word(s[-1]) || s[-1] == '.')));
        if (starts)
            x = number_at(s, y);
        if (x.bytes > 0) {
            last = x;
            last.negative = is_negative(text, s);
        }
        s += x.bytes > 0 ? x.bytes : 1;
    }
    return last;
}

/* Sign, digits, and a fraction if there is one: no zeros before the first digit that counts, none behind the last. */
static status canonical(char **out, const number *x)
{
    status st = OK;
    char *to = NULL;
    *out = malloc(x->bytes + 3); /* a sign, a zero before the point, the end */
    if (!*out)
        FAIL(FAILED, "no memory for a number of %zu digits", x->bytes);
    char *start = *out + 1;
    to = start;
    bool fraction = false;
    for (size_t i = 0; i < x->bytes; i++) {
        char c = x->text[i];
        if (c == x->point || (i == 0 && c == '.')) {
            if (to == start)
                *to++ = '0';
            *to++ = '.';
            fraction = true;
        } else if (is_digit(c) && (to > start || c != '0'))
            *to++ = c;
    }
    while (fraction && to[-1] == '0')
        to--;
    if (fraction && to[-1] == '.')
        to--;
    if (to == start)
        *to++ = '0';
    *to = '\0';
    if (x->negative && strcmp(start, "0") != 0)
        **out = '-';
    else
        memmove(*out, start, strlen(start) + 1);
out:
    return st;
}

static status read_number(char **out, const char *text, const style *y, bool all)
{
    status st = OK;
    char *folded = NULL;
    TRY(fold(&folded, text, all));
    number x = find_marked(folded, y);
    if (x.bytes == 0)
        x = find_last(folded, y);
    if (x.bytes > 0)
        TRY(canonical(out, &x));
out:
    free(folded);
    return st;
}

/* ---- the rules */

status score_answer(char **out, score_rule rule, const char *language_name, const char *text)
{
    status st = OK;
    const language *l;
    *out = NULL;
    TRY(find_language(&l, language_name));
    if (rule == SCORE_NUMERIC || rule == SCORE_LOCALE) {
        bool locale = rule == SCORE_LOCALE;
        TRY(read_number(out, text, !locale ? &english : l->comma ? &comma_style : &point_style, locale));
        goto out;
    }
    const char *found;
    size_t n = rule == SCORE_STRICT ? find_strict(&found, text, l) : find_flexible(&found, text);
    if (!found)
        goto out;
    TRY(copy(out, found, n));
    normalise(*out, l);
out:
    return st;
}

status score_gold(char **out, score_rule rule, const char *language_name, const char *gold)
{
    status st = OK;
    const language *l;
    *out = NULL;
    TRY(find_language(&l, language_name));
    if (rule == SCORE_NUMERIC || rule == SCORE_LOCALE) {
        TRY(read_number(out, gold, &english, false));
        goto out;
    }
    TRY(copy(out, gold, strlen(gold)));
    normalise(*out, l);
out:
    return st;
}

status score_compare(score_verdict *out, score_rule rule, const char *language_name, const char *text, const char *gold)
{
    status st = OK;
    char *answer = NULL, *want = NULL;
    TRY(score_answer(&answer, rule, language_name, text));
    TRY(score_gold(&want, rule, language_name, gold));
    *out = !want ? SCORE_NO_GOLD : !answer ? SCORE_NO_ANSWER : strcmp(answer, want) == 0 ? SCORE_RIGHT : SCORE_WRONG;
out:
    free(answer);
    free(want);
    return st;
}

void score_interval(double *low, double *high, int64_t right, int64_t rows)
{
    *low = 0;
    *high = 1;
    if (rows <= 0)
        return;
    const double z = 1.959963984540054; /* 97.5 % of a normal distribution lie below */
    double n = (double)rows, p = (double)right / n, share = z * z / n;
    double centre = (p + share / 2) / (1 + share), half = z * sqrt(p * (1 - p) / n + share / (4 * n)) / (1 + share);
    *low = right == 0 ? 0 : centre - half;
    *high = right == rows ? 1 : centre + half;
}
