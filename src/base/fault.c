#include "src/base/fault.h"

#include "src/base/clock.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What stands behind "POINT:" in that variable, NULL where it is about another point. */
static const char *about(const char *variable, const char *point)
{
    const char *fault = getenv(variable);
    size_t n = strlen(point);
    return fault && strncmp(fault, point, n) == 0 && fault[n] == ':' ? fault + n + 1 : NULL;
}

void fault_point(const char *point)
{
    static int passed;
    const char *delay = about("EPOCH_FAULT_DELAY", point), *who = about("EPOCH_FAULT", point),
               *rank = getenv("OMPI_COMM_WORLD_RANK");
    if (delay) {
        struct timespec t = clock_span(strtod(delay, NULL));
        nanosleep(&t, NULL);
    }
    if (!who)
        return;
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

int fault_late(void)
{
    const char *late = getenv("EPOCH_FAULT_LATE");
    return late ? *late == '1' : -1;
}
