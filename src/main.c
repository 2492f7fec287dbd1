/* epoch: one program, one command a purpose. Only this file prints an error and ends the process. */
#include "src/options.h"
#include "src/run.h"
#include "src/world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int usage(FILE *to)
{
    fprintf(to, "epoch %s: offline inference for block-diffusion mixture-of-experts models\n\n"
                "  mpirun -np R epoch run --model DIR --data KIND:PATH --out FILE.h5 [options]\n\n"
                "epoch run --help lists the options.\n",
            EPOCH_VERSION);
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

static int run_command(int argc, char **argv)
{
    char *line = joined(argc, argv);
    world *w = NULL;
    options o;
    bool help, together = true;
    status st = world_mpi_open(&w, &argc, &argv);
    if (st != OK) {
        fprintf(stderr, "epoch: %s\n", status_message());
        free(line);
        return st;
    }
    st = w->agree(w, options_parse(&o, &help, argc - 2, argv + 2));
    if (st == OK && help) {
        if (w->rank == 0)
            options_help(stdout);
    } else if (st == OK) {
        st = run(&o, w, line ? line : "", &together);
    }
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
    free(line);
    return st;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return usage(stderr);
    if (strcmp(argv[1], "run") == 0)
        return run_command(argc, argv);
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)
        return usage(stdout);
    if (strcmp(argv[1], "--version") == 0) {
        printf("epoch %s\n", EPOCH_VERSION);
        return OK;
    }
    fprintf(stderr, "epoch: \"%s\" is not a command\n", argv[1]);
    return usage(stderr);
}
