/* What durability costs: rows a second by rows a commit, and the time to publish and to read 100 000 rows.
 * usage: bench_results FOLDER   (on the file system in question; leaves nothing behind but FOLDER/bench.h5*) */
#include "results/results.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Rows like those of GSM8K: 128 tokens in 5 blocks, some 700 bytes of text. */
static status bench(const char *folder)
{
    status st = OK;
    static const int group[] = {1, 8, 64, 1000};
    static const int rows[] = {300, 2400, 19200, 100000 - 300 - 2400 - 19200};
    char file[512], dir[520], id[32], text[512], prompt[256];
    static int32_t token[128];
    static result_block block[5];
    journal *j = NULL;
    results_file *f = NULL;
    int lock, n = 0;
    memset(text, 't', sizeof text - 1);
    memset(prompt, 'p', sizeof prompt - 1);
    text[sizeof text - 1] = prompt[sizeof prompt - 1] = 0;
    snprintf(file, sizeof file, "%s/bench.h5", folder);
    snprintf(dir, sizeof dir, "%s.d", file);
    TRY(results_lock(&lock, dir, true, 0));
    TRY(journal_open(&j, dir, 0, 0));
    for (int g = 0; g < 4; g++) {
        result_phase p = {0};
        double start = now();
        for (int i = 0; i < rows[g]; i++, n++) {
            snprintf(id, sizeof id, "%d", n);
            TRY(journal_row(j, &(result_row){.dataset = "gsm8k",
                                             .id = id,
                                             .order = n,
                                             .prompt = prompt,
                                             .text = text,
                                             .gold = "{\"answer\":\"18\"}",
                                             .finish_reason = "eos",
                                             .token = token,
                                             .tokens = 128,
                                             .block = block,
                                             .blocks = 5}));
            if ((i + 1) % group[g] == 0)
                TRY(journal_commit(j, &p));
        }
        TRY(journal_commit(j, &p));
        double took = now() - start;
        printf("%4d rows a commit: %9.0f rows/s, %8.1f us a commit\n", group[g], rows[g] / took,
               1e6 * took * group[g] / rows[g]);
    }
    double start = now();
    results_state s;
    st = results_scan(&s, dir);
    results_scan_close(&s);
    TRY(st);
    printf("scan    %d rows: %.2f s\n", n, now() - start);
    start = now();
    TRY(results_publish(file, dir, "{}", "complete"));
    struct stat about;
    stat(file, &about);
    printf("publish %d rows: %.2f s, %.0f MB\n", n, now() - start, (double)about.st_size / 1e6);
    start = now();
    TRY(results_read(&f, file));
    printf("read    %d rows: %.2f s\n", n, now() - start);
out:
    results_close(f);
    journal_close(j);
    return st;
}

int main(int argc, char **argv)
{
    status st = argc == 2 ? bench(argv[1]) : BAD_INPUT;
    if (st != OK)
        fprintf(stderr, "%s\n", argc == 2 ? status_message() : "usage: bench_results FOLDER");
    return st;
}
