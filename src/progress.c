#include "src/progress.h"

#include "results/results.h"
#include "results/score_file.h"
#include "src/options.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct progress {
    bool bar;
    int64_t total, before;
    double shown; /* seconds of the last drawing */
};

status progress_open(progress **out, int how, int64_t total, int64_t before)
{
    status st = OK;
    *out = NULL;
    if (how == PROGRESS_OFF)
        return OK;
    progress *p = calloc(1, sizeof *p);
    if (!p)
        FAIL(FAILED, "out of memory");
    p->bar = how == PROGRESS_BAR || (how == PROGRESS_AUTO && isatty(STDERR_FILENO));
    p->total = total;
    p->before = before;
    p->shown = -1;
    *out = p;
out:
    return st;
}

static void draw(const progress *p, int64_t rows, int64_t tokens, double seconds)
{
    long long done = (long long)(p->before + rows), total = (long long)p->total;
    double per_second = seconds > 0 ? (double)tokens / seconds : 0;
    char left[48] = ""; /* nothing can be said before the first row is done */
    if (rows > 0)
        snprintf(left, sizeof left, ", about %.0f s left", seconds / (double)rows * (double)(total - done));
    if (p->bar) {
        enum { WIDE = 30 };
        char bar[WIDE + 1];
        int full = total > 0 ? (int)(WIDE * done / total) : WIDE;
        memset(bar, ' ', WIDE);
        memset(bar, '=', (size_t)(full < WIDE ? full : WIDE));
        bar[WIDE] = 0;
        fprintf(stderr, "\r[%s] %lld/%lld rows  %.0f tokens/s  %.0f s%s ", bar, done, total, per_second, seconds, left);
    } else {
        fprintf(stderr, "%lld/%lld rows, %.0f tokens/s, %.0f s%s\n", done, total, per_second, seconds, left);
    }
    fflush(stderr);
}

status progress_show(progress *p, int64_t rows, int64_t tokens, double seconds)
{
    bool last = p->before + rows >= p->total;
    if (p->shown >= 0 && !last && seconds - p->shown < (p->bar ? 0.2 : 10))
        return OK;
    if (p->shown >= 0 && last && p->shown > 1e17)
        return OK; /* the end has been drawn */
    draw(p, rows, tokens, seconds);
    p->shown = last ? 1e18 : seconds;
    return OK;
}

void progress_close(progress *p)
{
    if (p && p->bar)
        fputc('\n', stderr);
    free(p);
}

/* Answers in numbers are scored at once and the scores stored; programs are left to `epoch score`, which runs them. */
static status print_accuracy(results_file *f, const char *path)
{
    status st = OK;
    result_score *scores = NULL;
    int64_t count;
    bool programs = false;
    FILE *quiet = fopen("/dev/null", "w");
    if (!quiet)
        FAIL(FAILED, "/dev/null cannot be opened");
    TRY(score_file(&scores, &count, f, &(score_order){.no_programs = true}, quiet));
    for (int64_t i = 0; i < count; i++)
        if (strcmp(scores[i].rule, "numeric") == 0)
            printf("accuracy     %s %.4f (%lld of %lld rows; 95 %% interval %.3f to %.3f; rule numeric)\n",
                   scores[i].dataset, scores[i].score, (long long)scores[i].correct, (long long)scores[i].rows,
                   scores[i].low, scores[i].high);
    for (int64_t i = 0; i < f->rows; i++)
        programs |= strcmp(f->output[i].row.dataset, "humaneval") == 0;
    if (programs)
        printf("accuracy     humaneval: epoch score %s runs the programs\n", path);
    if (count) {
        f->scores = count;
        f->score = scores;
        TRY(results_write(path, f));
    }
out:
    if (quiet)
        fclose(quiet);
    free(scores);
    return st;
}

status progress_table(const char *path, int64_t total)
{
    status st = OK;
    results_file *f = NULL;
    TRY(results_read(&f, path));
    TRY(print_accuracy(f, path));
    int64_t failed = 0, tokens = 0, iterations = 0, blocks = f->blocks;
    double seconds = 0;
    for (int64_t i = 0; i < f->rows; i++) {
        failed += f->output[i].row.failed;
        tokens += f->output[i].row.tokens;
        iterations += f->output[i].row.iterations;
    }
    for (int64_t i = 0; i < f->sessions; i++)
        seconds += f->session[i].wall_seconds;
    printf("rows         %lld of %lld done, %lld failed, %lld left\n", (long long)(f->rows - failed), (long long)total,
           (long long)failed, (long long)(total - f->rows));
    printf("tokens       %lld generated, %.1f a forward, %.1f iterations a block\n", (long long)tokens,
           iterations ? (double)tokens / (double)iterations : 0, blocks ? (double)iterations / (double)blocks : 0);
    printf("speed        %.1f tokens/s over %.1f s of decoding\n", seconds > 0 ? (double)tokens / seconds : 0, seconds);
    printf("results      %s (%s%s)\n", path, f->state, f->rows < total ? ": --resume goes on" : "");
out:
    results_close(f);
    return st;
}
