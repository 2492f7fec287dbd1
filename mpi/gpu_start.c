#include "mpi/gpu_start.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

void gpu_host(gpu_place *place)
{
    char name[100] = "", boot[40] = "";
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (f) {
        if (!fgets(boot, sizeof boot, f))
            boot[0] = '\0';
        boot[strcspn(boot, "\n")] = '\0';
        fclose(f);
    }
    gethostname(name, sizeof name - 1);
    snprintf(place->host, sizeof place->host, "%s %s", name, boot);
}

static void version(char text[24], int code)
{
    snprintf(text, 24, "%d.%d.%d", code / 10000, code / 100 % 100, code % 100);
}

status gpu_versions_check(int headers, int library)
{
    status st = OK;
    char built[24], loaded[24];
    version(built, headers);
    version(loaded, library);
    if (headers != library)
        FAIL(BAD_INPUT,
             "the program was built with the headers of NCCL %s, the library loaded here is %s: build it on "
             "this machine, or put NCCL %s first in LD_LIBRARY_PATH",
             built, loaded, built);
out:
    return st;
}

status gpu_places_check(const gpu_place *place, int size)
{
    status st = OK;
    for (int r = 1; r < size; r++)
        for (int q = 0; q < r; q++)
            if (strcmp(place[q].host, place[r].host) == 0 && strcmp(place[q].bus, place[r].bus) == 0)
                FAIL(BAD_INPUT,
                     "ranks %d and %d of host %.*s both have the GPU at PCI bus %s: start one rank a GPU, "
                     "and let each see its own or all of them (CUDA_VISIBLE_DEVICES)",
                     q, r, (int)strcspn(place[r].host, " "), place[r].host, place[r].bus);
out:
    return st;
}
