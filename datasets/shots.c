#include "datasets/shots.h"

#include "datasets/dataset.h"
#include "src/base/json.h"

#include <stdlib.h>
#include <string.h>

/* Takes the question out of e, and the answer out of its gold. */
static status add(shots *s, example *e, const char *path)
{
    status st = OK;
    const char *answer;
    json_t *gold = NULL;
    if (e->error)
        FAIL(BAD_INPUT, "%s", e->error);
    if (e->turns != 1)
        FAIL(BAD_INPUT, "%s:%lld: %d turns, want one question", path, (long long)e->line, (int)e->turns);
    gold = json_loads(e->gold, 0, NULL);
    if (!gold)
        FAIL(FAILED, "%s:%lld: no memory", path, (long long)e->line);
    TRY(json_text(&answer, gold, "answer", NULL, path));
    if (!answer)
        FAIL(BAD_INPUT, "%s:%lld: no answer, a shot wants one", path, (long long)e->line);
    s->answer[s->count] = strdup(answer);
    if (!s->answer[s->count])
        FAIL(FAILED, "%s:%lld: no memory", path, (long long)e->line);
    s->question[s->count++] = e->turn[0];
    e->turn[0] = NULL;
out:
    json_decref(gold);
    return st;
}

/* "KIND:PATH" as it is, "PATH" with gsm8k in front. */
static char *with_kind(const char *file)
{
    static const char *const kinds[] = {"gsm8k:", "mgsm:", "humaneval:", "mtbench:", "jsonl:"};
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        if (strncmp(file, kinds[k], strlen(kinds[k])) == 0)
            return strdup(file);
    size_t room = strlen("gsm8k:") + strlen(file) + 1;
    char *spec = malloc(room);
    if (spec)
        strcat(strcpy(spec, "gsm8k:"), file);
    return spec;
}

status shots_open(shots **out, const char *spec, const char *prompt_field)
{
    status st = OK;
    shots *s = calloc(1, sizeof *s);
    dataset *d = NULL;
    example e = {0};
    char *data = NULL, *colon;
    bool more = true;
    *out = NULL;
    long count = strtol(spec, &colon, 10);
    if (*spec < '0' || *spec > '9' || *colon != ':' || count < 1 || count > SHOTS_MOST)
        FAIL(BAD_INPUT, "--shots %s: want N:FILE, N from 1 to %d", spec, SHOTS_MOST);
    data = with_kind(colon + 1);
    if (!s || !data || !(s->question = calloc((size_t)count, sizeof(char *))) ||
        !(s->answer = calloc((size_t)count, sizeof(char *))))
        FAIL(FAILED, "--shots %s: no memory", spec);
    TRY(dataset_open(&d, data, &(dataset_rule){.prompt_field = prompt_field, .limit = count}));
    while (s->count < count) {
        TRY(dataset_next(d, &e, &more) == OK ? OK : BAD_INPUT); /* nothing has begun yet */
        if (!more)
            FAIL(BAD_INPUT, "--shots %s: %s gives %d rows", spec, dataset_path(d), (int)s->count);
        TRY(add(s, &e, dataset_path(d)));
        example_close(&e);
    }
    *out = s;
    s = NULL;
out:
    example_close(&e);
    dataset_close(d);
    free(data);
    shots_close(s);
    return st;
}

void shots_close(shots *s)
{
    if (!s)
        return;
    for (int32_t i = 0; i < s->count; i++) {
        free(s->question[i]);
        free(s->answer[i]);
    }
    free(s->question);
    free(s->answer);
    free(s);
}
