/* A small finished run for the tests of what reads results files: made through the journals, as a real one. */
#ifndef EPOCH_TESTS_MADE_RUN_H
#define EPOCH_TESTS_MADE_RUN_H

#include "results/results.h"

#include <dirent.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct made_row {
    const char *dataset, *id;
    int64_t line;
    int32_t turn;
    const char *prompt, *text, *gold;
    const char *finish; /* "eos", "length"; NULL: failed */
    int32_t tokens, iterations;
} made_row;

static char made_dir[256];

static inline int made_open(void **state)
{
    (void)state;
    const char *top = getenv("TMPDIR");
    snprintf(made_dir, sizeof made_dir, "%s/epoch-test-XXXXXX", top && *top ? top : "/tmp");
    return mkdtemp(made_dir) ? 0 : -1;
}

static inline void made_clear(const char *dir)
{
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        char at[1024];
        snprintf(at, sizeof at, "%.700s/%s", dir, e->d_name);
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 && unlink(at) != 0)
            made_clear(at);
    }
    if (d)
        closedir(d);
    rmdir(dir);
}

static inline int made_close(void **state)
{
    (void)state;
    made_clear(made_dir);
    return 0;
}

/* The place of NAME in the test's folder; valid until the fourth call from here. */
static inline const char *made_path(const char *name)
{
    static char place[4][512];
    static int turn;
    char *p = place[turn++ & 3];
    snprintf(p, sizeof place[0], "%s/%s", made_dir, name);
    return p;
}

/* Publishes NAME with these rows. Each row has one block of all its iterations, the first of them cold, a trace, and an
 * audit; the counters are given. */
static inline status make_run(const char *name, const char *run_json, const made_row *row, int rows,
                              const result_phase *counters, const char *state)
{
    status st = OK;
    char dir[600], file[512];
    int32_t token[256];
    int lock = -1;
    journal *j = NULL;
    snprintf(file, sizeof file, "%s", made_path(name));
    snprintf(dir, sizeof dir, "%s.d", file);
    for (int i = 0; i < 256; i++)
        token[i] = 1000 + i;
    made_clear(dir);
    TRY(results_lock(&lock, dir, true, 0));
    TRY(results_begin(file, dir, run_json, 0));
    TRY(journal_open(&j, dir, 0, 0));
    for (int i = 0; i < rows; i++) {
        const made_row *m = &row[i];
        int n = m->iterations;
        result_block block = {.iterations = n,
                              .cold = n > 0,
                              .refresh = n > 5,
                              .hot_skip = n - (n > 0) - (n > 5),
                              .layer_rebuilds = 1,
                              .rows_fallback = {0, 0, 0, 2},
                              .fresh_rows = 24 * n,
                              .cached_rows = 8 * n,
                              .support_size = n > 1 ? 16 : NAN,
                              .distinct_experts = n > 1 ? 8 : NAN,
                              .coverage = n > 1 ? 0.95f : NAN};
        result_row r = {.dataset = m->dataset,
                        .id = m->id,
                        .source_line = m->line,
                        .turn = m->turn,
                        .order = i,
                        .prompt = m->prompt,
                        .text = m->text,
                        .gold = m->gold,
                        .failed = !m->finish,
                        .message = m->finish ? "" : "too long",
                        .finish_reason = m->finish ? m->finish : "",
                        .prompt_tokens = 37,
                        .token = token,
                        .tokens = m->tokens,
                        .iterations = n,
                        .seconds = 0.5,
                        .block = &block,
                        .blocks = n > 0};
        for (int k = 0; k < n; k++) {
            int live = 32 - 32 * k / n, newly = k ? 32 / n : 0;
            result_iteration it = {.order = i,
                                   .turn = m->turn,
                                   .iteration = k,
                                   .path = k == 0 ? PATH_COLD : PATH_HOT_SKIP,
                                   .live = live,
                                   .newly = newly,
                                   .stable = 32 - live - newly,
                                   .fresh = live + newly,
                                   .commits = 32 / n,
                                   .forced = k == n - 1,
                                   .committed = 1,
                                   .support_size = k ? 16 : 32,
                                   .distinct_experts = k ? 8 : 14,
                                   .coverage = k ? 0.95f : 1.0f,
                                   .bytes_moved = 4096};
            TRY(journal_iteration(j, &it));
            result_audit a = {.order = i,
                              .turn = m->turn,
                              .iteration = k,
                              .live = live,
                              .held = live / 2,
                              .same = live,
                              .block_same = 1,
                              .max_difference = 0.25f * (float)(k + 1)};
            TRY(journal_audit(j, &a));
        }
        TRY(journal_row(j, &r));
    }
    result_observed seen = {.overlap_count = {0, 4, 4}, .overlap_sum = {0, 3, 2}};
    for (int kind = 0; kind < OBSERVED_KINDS; kind++)
        for (int age = 1; age < 4; age++) {
            seen.cosine_count[kind][age] = 10;
            seen.cosine_sum[kind][age] = 10 - (kind + 1) * age;
        }
    TRY(journal_observed(j, &seen));
    TRY(journal_commit(j, counters));
    journal_close(j);
    j = NULL;
    TRY(results_publish(file, dir, run_json, state));
out:
    journal_close(j);
    if (lock >= 0)
        close(lock);
    return st;
}

#endif
