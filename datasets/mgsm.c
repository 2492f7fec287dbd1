/* MGSM: question, tab, integer; no header, no quoting. The language stands in the file's name. */
#include "datasets/row.h"

#include <stdlib.h>
#include <string.h>

static status parse(example *e, const char *text, const row_place *p)
{
    status st = OK;
    char *question = NULL;
    const char *tab = strchr(text, '\t');
    if (!tab || strchr(tab + 1, '\t'))
        FAIL(BAD_INPUT, "%s: %s tab, want question, tab, integer", p->where, tab ? "more than one" : "no");
    const char *answer = tab + 1, *digits = answer + (*answer == '-');
    if (!*digits || *digits == ',' || digits[strspn(digits, "0123456789,")])
        FAIL(BAD_INPUT, "%s: the text behind the tab is not an integer (digits, a minus before them, commas inside)",
             p->where);
    question = strndup(text, (size_t)(tab - text));
    if (!question)
        FAIL(FAILED, "%s: no memory", p->where);
    TRY(row_turn(e, question, "question", p->where));
    TRY(row_gold(e, json_pack("{s:s, s:s}", "answer", answer, "language", p->language), p->where));
out:
    free(question);
    return st;
}

status mgsm_language(char out[3], const char *path)
{
    static const char known[] = "bn de en es fr ja ru sw te th zh";
    status st = OK;
    const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
    size_t stem = strlen("mgsm_xx");
    if (strncmp(name, "mgsm_", 5) != 0 || strlen(name) < stem ||
        (strcmp(name + stem, ".tsv") != 0 && strcmp(name + stem, ".tsv.gz") != 0))
        FAIL(BAD_INPUT, "%s: the file's name gives no language, want mgsm_LANG.tsv, LANG one of %s: rename it", path,
             known);
    memcpy(out, name + 5, 2);
    out[2] = '\0';
    if (!strstr(known, out) || strchr(out, ' '))
        FAIL(BAD_INPUT, "%s: language \"%s\" is unknown, want one of %s", path, out, known);
out:
    return st;
}

const row_kind row_mgsm = {.name = "mgsm", .form = "question, tab, integer", .own_ids = false, .parse = parse};
