/* Times the loading of one rank's weights and compares the memory it took at most with the rank's share:
 *     bench_loader DIR [RANKS [RANK [f32]]]
 * DIR from tests/tools/make_checkpoint.py. f32: matrices are widened. Run it twice: the first run fills the page cache.
 */
#include "src/model/weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A line of /proc/self/status, in bytes; 0 where there is none. */
static double memory(const char *key)
{
    char line[256];
    double bytes = 0;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0)
            bytes = 1024 * atof(line + strlen(key));
    if (f)
        fclose(f);
    return bytes;
}

static status bench(int argc, char **argv)
{
    status st = OK;
    model_config c = {0};
    sum_tree *tree = NULL;
    backend *b = NULL;
    weights *w = NULL;
    weight_rule rule = {0};
    int ranks = argc > 2 ? atoi(argv[2]) : 1;
    double before, start, seconds, peak;
    if (argc < 2 || ranks < 1)
        FAIL(BAD_INPUT, "usage: bench_loader DIR [RANKS [RANK [f32]]]");
    rule.rank = argc > 3 ? atoi(argv[3]) : 0;
    if (rule.rank < 0 || rule.rank >= ranks)
        FAIL(BAD_INPUT, "rank %d, want 0 to %d", rule.rank, ranks - 1);
    TRY(model_config_open(&c, argv[1]));
    TRY(sum_tree_open(&tree, c.experts, c.groups, ranks));
    TRY(backend_cpu_open(&b, 0));
    rule.tree = tree;
    before = memory("VmRSS:");
    start = now();
    TRY(weights_dtype(&rule.matrices, argv[1]));
    if (argc > 4 && strcmp(argv[4], "f32") == 0)
        rule.matrices = F32;
    TRY(weights_open(&w, &c, argv[1], b, &rule));
    seconds = now() - start;
    peak = memory("VmHWM:");
    printf("rank %d of %d, matrices %s: share %.1f MB in %.2f s, %.2f GB/s; resident at most %.1f MB (%.1f before), "
           "%.3f of the share\n",
           rule.rank, ranks, dtype_name(rule.matrices), (double)w->bytes / 1e6, seconds,
           (double)w->bytes / 1e9 / seconds, peak / 1e6, before / 1e6, peak / (double)w->bytes);
out:
    weights_close(w);
    if (b)
        b->close(b);
    sum_tree_close(tree);
    model_config_close(&c);
    return st;
}

int main(int argc, char **argv)
{
    status st = bench(argc, argv);
    if (st != OK)
        fprintf(stderr, "%s\n", status_message());
    return (int)st;
}
