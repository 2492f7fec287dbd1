#include "results/humaneval.h"

#include <ctype.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { INDENT = 4 }; /* of a body in the prompts; a tab counts as much */

typedef struct line {
    const char *text; /* first byte of the line */
    int bytes;        /* with its newline */
    int lead, indent; /* bytes and columns of its leading white space */
    bool blank, tabs;
} line;

typedef struct code { /* lines [first, last) of the answer; fenced: nothing but code is in there */
    int first, last, margin;
    bool fenced, python;
} code;

typedef struct answer {
    line *line;
    int lines;
    code *block;
    int blocks;
    const char *entry;
} answer;

/* ---- lines and fences */

static line line_at(const char *text, int bytes)
{
    line l = {.text = text, .bytes = bytes};
    while (l.lead < bytes && (text[l.lead] == ' ' || text[l.lead] == '\t')) {
        l.indent += text[l.lead] == '\t' ? INDENT : 1;
        l.tabs |= text[l.lead++] == '\t';
    }
    int i = l.lead;
    while (i < bytes && isspace((unsigned char)text[i]))
        i++;
    l.blank = i == bytes;
    return l;
}

/* Length of the fence that opens this line, 0 if none; *info: what follows it. */
static int fence_of(const line *l, char *mark, const char **info)
{
    const char *s = l->text + l->lead, *end = l->text + l->bytes;
    int n = 0;
    *mark = s < end ? *s : 0;
    if (*mark != '`' && *mark != '~')
        return 0;
    while (s < end && *s == *mark) {
        s++;
        n++;
    }
    if (n < 3 || (*mark == '`' && memchr(s, '`', (size_t)(end - s))))
        return 0;
    *info = s;
    return n;
}

static bool python_info(const char *s, const char *end)
{
    static const char *const names[] = {"", "python", "py", "python3", "py3"};
    while (s < end && isspace((unsigned char)*s))
        s++;
    size_t n = 0;
    while (s + n < end && isalnum((unsigned char)s[n]))
        n++;
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        size_t i = 0;
        while (i < n && names[k][i] && tolower((unsigned char)s[i]) == names[k][i])
            i++;
        if (i == n && !names[k][i])
            return true;
    }
    return false;
}

static void find_blocks(answer *a)
{
    code open = {.first = -1};
    char open_mark = 0;
    int open_length = 0;
    for (int i = 0; i <= a->lines; i++) {
        char mark = 0;
        const char *info = NULL;
        const line *l = a->line + i;
        int length = i < a->lines ? fence_of(l, &mark, &info) : 0;
        if (open.first < 0) {
            if (length) {
                open = (code){.first = i + 1, .margin = l->indent, .fenced = true};
                open.python = python_info(info, l->text + l->bytes);
                open_mark = mark;
                open_length = length;
            }
            continue;
        }
        bool bare = length && line_at(info, (int)(l->text + l->bytes - info)).blank;
        if (i < a->lines && !(bare && mark == open_mark && length >= open_length))
            continue;
        open.last = i;
        bool empty = true;
        for (int k = open.first; k < open.last; k++)
            empty &= a->line[k].blank;
        if (!empty)
            a->block[a->blocks++] = open;
        open.first = -1;
    }
}

/* ---- a little Python: which lines begin a statement at the top level */

typedef struct scan { /* what is open at the start of a line */
    int depth;
    char quote; /* of an open triple-quoted string */
    bool continued;
} scan;

static bool scan_inside(const scan *s)
{
    return s->depth > 0 || s->quote || s->continued;
}

static void scan_line(scan *s, const line *l)
{
    const char *p = l->text, *end = p + l->bytes;
    char quote = 0; /* of a string that ends on this line */
    s->continued = false;
    for (; p < end && *p != '\n'; p++) {
        bool triple = p + 2 < end && p[0] == p[1] && p[1] == p[2];
        if (s->quote || quote) {
            if (*p == '\\') {
                if (++p >= end || *p == '\n' || *p == '\r')
                    s->continued = quote != 0;
                if (p >= end || *p == '\n')
                    break;
            } else if (s->quote && *p == s->quote && triple) {
                s->quote = 0;
                p += 2;
            } else if (quote && *p == quote) {
                quote = 0;
            }
        } else if (*p == '#') {
            break;
        } else if (*p == '"' || *p == '\'') {
            if (triple) {
                s->quote = *p;
                p += 2;
            } else {
                quote = *p;
            }
        } else if (strchr("([{", *p)) {
            s->depth++;
        } else if (strchr(")]}", *p)) {
            s->depth -= s->depth > 0;
        } else if (*p == '\\' && p + 1 < end && (p[1] == '\n' || p[1] == '\r')) {
            s->continued = true;
        }
    }
}

static const char *skip_word(const char *s, const char *end, const char *word)
{
    size_t n = strlen(word);
    if ((size_t)(end - s) < n || memcmp(s, word, n) != 0)
        return NULL;
    s += n;
    if (s < end && (isalnum((unsigned char)*s) || *s == '_'))
        return NULL;
    while (s < end && (*s == ' ' || *s == '\t'))
        s++;
    return s;
}

static bool any_word(const char *s, const char *end, const char *const *words)
{
    for (; *words; words++)
        if (skip_word(s, end, *words))
            return true;
    return false;
}

static const char *name_end(const char *s, const char *end)
{
    if (s < end && !isdigit((unsigned char)*s))
        while (s < end && (isalnum((unsigned char)*s) || *s == '_' || (unsigned char)*s >= 0x80))
            s++;
    return s;
}

typedef enum kind { OTHER, DEFINITION, IMPORT, ASSIGNMENT, DECORATOR, COMMENT, CLAUSE } kind;

/* What the statement on this line is; for a definition, its name. */
static kind kind_of(const line *l, const char **name, int *name_bytes)
{
    static const char *const clauses[] = {"else", "elif", "except", "finally", NULL};
    const char *s = l->text + l->lead, *end = l->text + l->bytes, *p, *q;
    if (*s == '@')
        return DECORATOR;
    if (*s == '#')
        return COMMENT;
    if ((p = skip_word(s, end, "async")))
        s = p;
    if ((p = skip_word(s, end, "def")) || (p = skip_word(s, end, "class"))) {
        q = name_end(p, end);
        *name = p;
        *name_bytes = (int)(q - p);
        return q > p && (*q == '(' || *q == ':' || *q == ' ' || *q == '[') ? DEFINITION : OTHER;
    }
    if ((p = skip_word(s, end, "import")))
        return name_end(p, end) > p ? IMPORT : OTHER;
    if ((p = skip_word(s, end, "from"))) {
        while (p < end && !isspace((unsigned char)*p))
            p++;
        while (p < end && *p == ' ')
            p++;
        return skip_word(p, end, "import") ? IMPORT : OTHER;
    }
    if (any_word(s, end, clauses))
        return CLAUSE;
    q = name_end(s, end);
    if (q > s) {
        while (q < end && *q == ' ')
            q++;
        if (q < end && *q == ':') /* an annotated name */
            while (q < end && *q != '=')
                q++;
        if (q + 1 < end && q[0] == '=' && q[1] != '=')
            return ASSIGNMENT;
    }
    return OTHER;
}

/* Whether a line at the left margin reads like a statement rather than like prose. */
static bool reads_like_code(const line *l)
{
    static const char *const simple[] = {"return", "yield", "raise",    "pass",   "break", "continue",
                                         "global", "del",   "nonlocal", "assert", NULL};
    static const char *const compound[] = {"if", "for", "while", "with", "try", "match", NULL};
    const char *name, *s = l->text + l->lead, *end = l->text + l->bytes;
    int name_bytes;
    kind k = kind_of(l, &name, &name_bytes);
    if (k != OTHER)
        return true;
    if (any_word(s, end, simple))
        return true;
    if (any_word(s, end, compound))
        return memchr(s, ':', (size_t)(end - s)) != NULL;
    /* a target or a call: no two words side by side before the operator or the parenthesis */
    bool word = false, gap = false;
    for (; s < end && *s != '\n'; s++) {
        if (isalnum((unsigned char)*s) || *s == '_') {
            if (word && gap)
                return false;
            word = true;
            gap = false;
        } else if (*s == ' ') {
            gap = true;
        } else if (*s == '(') {
            return word && !gap;
        } else if (*s == '=' || strchr("+-*/%&|^", *s)) {
            return word;
        } else if (*s == ',' || *s == '[' || *s == ']') {
            word = gap = false;
        } else if (*s != '.' && *s != '"' && *s != '\'') {
            return false;
        }
    }
    return false;
}

static bool is_name(const char *name, int bytes, const char *want)
{
    return (size_t)bytes == strlen(want) && memcmp(name, want, (size_t)bytes) == 0;
}

/* Whether the lines define `want` at their own left margin. */
static bool defines(const answer *a, const code *c, const char *want)
{
    for (int i = c->first; i < c->last; i++) {
        const line *l = a->line + i;
        const char *name;
        int bytes;
        if (!l->blank && l->indent <= c->margin && kind_of(l, &name, &bytes) == DEFINITION &&
            is_name(name, bytes, want))
            return true;
    }
    return false;
}

/* ---- writing */

/* A line moved by `shift` columns; as it is inside a string or with nothing to move. */
static void put_line(FILE *f, const line *l, int shift, bool inside)
{
    if (inside || l->blank || (shift == 0 && !l->tabs)) {
        fwrite(l->text, 1, (size_t)l->bytes, f);
    } else {
        int indent = l->indent + shift > 0 ? l->indent + shift : 0;
        fprintf(f, "%*s", indent, "");
        fwrite(l->text + l->lead, 1, (size_t)(l->bytes - l->lead), f);
    }
}

typedef enum keep { KEEP_ALL, KEEP_DEFINITIONS, KEEP_NEW } keep;

/* Writes the statements of a block that belong to a module: definitions, imports, assignments; of fenced code in front
 * of the entry point everything. KEEP_NEW leaves out what `main` defines. */
static void put_module(FILE *f, const answer *a, const code *c, keep rule, const code *main_block)
{
    scan s = {0};
    bool keeping = false, past_entry = false, decorated = false;
    for (int i = c->first; i < c->last; i++) {
        const line *l = a->line + i;
        bool inside = scan_inside(&s);
        if (!inside && !l->blank && l->indent <= c->margin) {
            const char *name = NULL;
            int bytes = 0;
            kind k = kind_of(l, &name, &bytes);
            if (k == DECORATOR) { /* shares the fate of what it decorates */
                int next = i;
                while (next + 1 < c->last && k == DECORATOR)
                    k = kind_of(a->line + ++next, &name, &bytes);
                k = k == DEFINITION ? k : OTHER;
            }
            bool entry = k == DEFINITION && is_name(name, bytes, a->entry);
            if (k != CLAUSE && !decorated)
                keeping = k == DEFINITION || k == IMPORT || (k == ASSIGNMENT && (c->fenced || !past_entry)) ||
                          (c->fenced && (k == COMMENT || (k == OTHER && rule == KEEP_ALL && !past_entry)));
            if (k == DEFINITION && rule == KEEP_NEW) {
                char copy[256];
                snprintf(copy, sizeof copy, "%.*s", bytes, name);
                keeping = !defines(a, main_block, copy);
            } else if (rule == KEEP_NEW && k != IMPORT) {
                keeping = false;
            }
            past_entry |= entry;
            decorated = l->text[l->lead] == '@';
        }
        if (keeping)
            put_line(f, l, -c->margin, inside);
        if (keeping || c->fenced)
            scan_line(&s, l);
        else
            s = (scan){0}; /* prose has its own idea of quotes and brackets */
    }
}

static bool opens_block(const line *l)
{
    int n = l->bytes;
    while (n > 0 && isspace((unsigned char)l->text[n - 1]))
        n--;
    return n > 0 && l->text[n - 1] == ':';
}

/* Writes a body: columns moved so that it sits INDENT deep; behind it, at the left margin, helpers only. */
static void put_body(FILE *f, const answer *a, const code *c)
{
    int first = c->first, begin = c->first;
    while (first < c->last &&
           (a->line[first].blank || (!c->fenced && a->line[first].indent == 0 && !reads_like_code(a->line + first)))) {
        if (!a->line[first].blank)
            begin = first + 1;
        first++;
    }
    if (first == c->last)
        return;
    int second = first + 1;
    while (second < c->last && a->line[second].blank)
        second++;
    const line *head = a->line + first;
    int indent = head->indent - c->margin;
    int beyond = second < c->last ? a->line[second].indent - c->margin - indent : 0;
    /* the first line alone lost its indentation if the next one is too deep for it */
    bool lost = indent < INDENT && beyond > (opens_block(head) ? INDENT : 0);
    int shift = lost ? -c->margin : INDENT - indent - c->margin;
    bool flat = indent == 0 && !lost;

    scan s = {0};
    bool keeping = true;
    for (int i = begin; i < c->last; i++) {
        const line *l = a->line + i;
        bool inside = scan_inside(&s), margin = !inside && !l->blank && l->indent <= c->margin && i > first;
        if (margin && flat) {
            if (!c->fenced && !reads_like_code(l))
                return;
        } else if (margin) {
            const char *name;
            int bytes;
            kind k = kind_of(l, &name, &bytes);
            keeping = k == DEFINITION || k == IMPORT || k == DECORATOR;
            shift = -c->margin;
        }
        if (keeping)
            put_line(f, l, i == first && lost ? INDENT - indent - c->margin : shift, inside);
        if (keeping || c->fenced)
            scan_line(&s, l);
        else
            s = (scan){0};
    }
}

static bool ends_in_docstring(const char *prompt)
{
    size_t n = strlen(prompt);
    while (n > 0 && isspace((unsigned char)prompt[n - 1]))
        n--;
    return n >= 3 && (memcmp(prompt + n - 3, "\"\"\"", 3) == 0 || memcmp(prompt + n - 3, "'''", 3) == 0);
}

static void put_completion(FILE *f, const answer *a, const char *prompt)
{
    code whole = {.first = 0, .last = a->lines};
    int main_block = -1, body_block = -1;
    for (int b = a->blocks - 1; b >= 0; b--) {
        if (defines(a, a->block + b, a->entry))
            main_block = b;
        if (body_block < 0 || a->block[b].python || !a->block[body_block].python)
            body_block = b;
    }
    bool whole_defines = main_block < 0 && defines(a, &whole, a->entry);
    if (main_block < 0 && !whole_defines) {
        int first = 0;
        while (first < a->lines && a->line[first].blank)
            first++;
        char mark;
        const char *info;
        bool bare = first < a->lines && a->line[first].indent > 0 && !fence_of(a->line + first, &mark, &info);
        put_body(f, a, body_block < 0 || bare ? &whole : a->block + body_block);
        return;
    }
    /* the prompt's own function ends here, with its docstring as its body */
    fputs(ends_in_docstring(prompt) ? "\n\n" : "\n    pass\n\n\n", f);
    if (whole_defines) {
        put_module(f, a, &whole, KEEP_ALL, NULL);
        return;
    }
    for (int b = 0; b < a->blocks; b++) {
        keep rule = b < main_block ? KEEP_DEFINITIONS : b == main_block ? KEEP_ALL : KEEP_NEW;
        if (a->block[b].python || b == main_block)
            put_module(f, a, a->block + b, rule, a->block + main_block);
    }
}

/* A text built by a stream: closes it and tells whether all of it was written. */
static status stream_end(FILE *f, char **text)
{
    bool bad = ferror(f) != 0;
    if (fclose(f) == 0 && !bad)
        return OK;
    free(*text);
    *text = NULL;
    return status_fail(FAILED, __FILE__, __LINE__, "a HumanEval completion: out of memory");
}

status humaneval_completion(char **out, const char *text, const char *prompt, const char *entry_point)
{
    status st = OK;
    answer a = {.entry = entry_point};
    size_t count = 1, bytes = 0;
    FILE *f = NULL;
    *out = NULL;
    for (const char *s = text; *s; s++)
        count += *s == '\n';
    a.line = malloc(count * sizeof *a.line);
    a.block = malloc(count * sizeof *a.block);
    f = open_memstream(out, &bytes);
    if (!a.line || !a.block || !f)
        FAIL(FAILED, "a HumanEval completion: out of memory");
    for (const char *s = text; *s;) {
        const char *end = strchr(s, '\n');
        end = end ? end + 1 : s + strlen(s);
        a.line[a.lines++] = line_at(s, (int)(end - s));
        s = end;
    }
    find_blocks(&a);
    put_completion(f, &a, prompt);
out:
    if (f && st == OK)
        st = stream_end(f, out);
    free(a.line);
    free(a.block);
    return st;
}

status humaneval_program(char **out, const char *prompt, const char *completion, const char *test,
                         const char *entry_point)
{
    status st = OK;
    size_t bytes = 0;
    FILE *f = open_memstream(out, &bytes);
    if (!f)
        FAIL(FAILED, "a HumanEval program: out of memory");
    fprintf(f, "%s%s\n%s\ncheck(%s)\n", prompt, completion, test, entry_point);
    st = stream_end(f, out);
out:
    return st;
}

double humaneval_pass_at_k(int n, int c, int k)
{
    double miss = 1;
    if (n - c < k)
        return 1;
    for (int i = n - c + 1; i <= n; i++)
        miss *= 1 - (double)k / i;
    return 1 - miss;
}
