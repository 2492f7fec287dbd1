#include "src/base/fault.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void fault_point(const char *point)
{
    static int passed;
    const char *fault = getenv("EPOCH_FAULT"), *rank = getenv("OMPI_COMM_WORLD_RANK");
    size_t n = strlen(point);
    if (!fault || strncmp(fault, point, n) != 0 || fault[n] != ':')
        return;
    const char *who = fault + n + 1;
    size_t length = strcspn(who, ":");
    if (who[length] != ':' || (*who != '*' && (!rank || strlen(rank) != length || memcmp(who, rank, length) != 0)))
        return;
    char *end;
    long number = strtol(who + length + 1, &end, 10), count = *end == ':' ? strtol(end + 1, NULL, 10) : 1;
    if (++passed == count)
        kill(number < 0 ? getppid() : getpid(), (int)labs(number));
}

int64_t fault_row(void)
{
    const char *row = getenv("EPOCH_FAULT_ROW");
    return row ? strtoll(row, NULL, 10) : -1;
}

const char *fault_plan(void)
{
    return getenv("EPOCH_FAULT_PLAN");
}
