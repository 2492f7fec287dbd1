/* epoch: one program, one command a purpose. Only this file prints an error and ends the process. */
#include "results/export.h"
#include "results/report.h"
#include "results/score_file.h"
#include "results/standing.h"
#include "src/base/fault.h"
#include "src/bench.h"
#include "src/memory.h"
#include "src/options.h"
#include "src/run.h"
#include "src/stop.h"
#include "src/world.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The commands; those of all ranks, which start MPI, have none here. argv[0] of `command` is its name. */
static const struct {
    const char *name, *use, *help;
    status (*command)(int argc, char **argv);
} commands[] = {
    {"status", "FILE.h5", "rows done, failed and left; running or not", standing_command},
    {"score", "FILE.h5 [...]", "accuracy under named rules; HumanEval pass@1", score_command},
    {"report", "FILE.h5 [...]", "tables, comparison, plots", report_command},
    {"export", "FILE.h5 --format F", "jsonl, humaneval, lm-eval or mtbench", export_command},
    {"bench", "[options]", "forwards of a real shape with random weights, timed", NULL},
    {"model", "DIR", "what a checkpoint holds, and the memory plan of a job", model_command},
};
enum { COMMANDS = sizeof commands / sizeof *commands };

/* Without MPI up, mpirun's variable tells: what concerns all processes is printed by one. */
static bool speaks(void)
{
    const char *rank = getenv("OMPI_COMM_WORLD_RANK");
    return !rank || strcmp(rank, "0") == 0;
}

static int usage(FILE *to)
{
    if (!speaks())
        return to == stdout ? OK : BAD_INPUT;
    fprintf(to, "epoch %s: offline inference for block-diffusion mixture-of-experts models\n\n"
                "  mpirun -np R epoch run --model DIR --data KIND:PATH --out FILE.h5 [options]\n",
            EPOCH_VERSION);
    for (int i = 0; i < COMMANDS; i++)
        fprintf(to, "  epoch %-6s %-24s %s\n", commands[i].name, commands[i].use, commands[i].help);
    fprintf(to, "\nepoch run --help lists the options.\n");
    return to == stdout ? OK : BAD_INPUT;
}

static char *joined(int argc, char **argv)
{
    size_t n = 1;
    for (int i = 0; i < argc; i++)
        n += strlen(argv[i]) + 1;
    char *all = calloc(n, 1);
    for (int i = 0; all && i < argc; i++) {
        if (i)
            strcat(all, " ");
        strcat(all, argv[i]);
    }
    return all;
}

/* `run`. */
static status run_ranks(world *w, int argc, char **argv, bool *together)
{
    status st = OK;
    options o;
    bool help;
    char *line = joined(argc, argv);
    *together = true;
    TRY(w->agree(w, options_parse(&o, &help, argc - 2, argv + 2)));
    if (help) {
        if (w->rank == 0)
            options_help(stdout);
        goto out;
    }
    st = run(&o, w, line ? line : "", together);
out:
    free(line);
    return st;
}

static status bench_ranks(world *w, int argc, char **argv, bool *together)
{
    return bench(w, argc - 1, argv + 1, together);
}

/* A command of all ranks: starts MPI, says each failure once, and takes the job down where this rank fails alone. */
static int world_command(int argc, char **argv, status (*command)(world *, int, char **, bool *))
{
    world *w = NULL;
    bool together = true;
    status st = world_mpi_open(&w, &argc, &argv);
    if (st != OK) {
        fprintf(stderr, "epoch: %s\n", status_message());
        return st;
    }
    st = command(w, argc, argv, &together);
    if (st == BAD_INPUT || st == FAILED) {
        if (!together)
            fprintf(stderr, "rank %d/%d: %s\n", w->rank, w->size, status_message());
        else if (w->rank == 0)
            fprintf(stderr, "%s\n", status_message());
    }
    fflush(NULL);
    if (!together)
        w->abort(w, st);
    w->close(w);
    return st;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return usage(stderr);
    if (strcmp(argv[1], "run") == 0) {
        stop_listen();
        fault_point("start");
        return world_command(argc, argv, run_ranks);
    }
    if (strcmp(argv[1], "bench") == 0)
        return world_command(argc, argv, bench_ranks);
    for (int i = 0; i < COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name) != 0)
            continue;
        status st = commands[i].command(argc - 1, argv + 1);
        if (st == BAD_INPUT || st == FAILED)
            fprintf(stderr, "%s\n", status_message());
        return st;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
        return usage(stdout);
    if (strcmp(argv[1], "--version") == 0) {
        printf("epoch %s\n", EPOCH_VERSION);
        return OK;
    }
    if (speaks())
        fprintf(stderr, "epoch: \"%s\" is not a command\n", argv[1]);
    return usage(stderr);
}
