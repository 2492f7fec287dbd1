#include "results/standing.h"

#include "results/results.h"

#include <stdio.h>
#include <string.h>

status standing_command(int argc, char **argv)
{
    status st = OK;
    results_standing s;
    if (argc == 2 && (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0)) {
        printf("usage: epoch status FILE.h5\n\nexit status: 0 all rows done, 1 done with failed rows, 75 rows left, "
               "2 no such results\n");
        return OK;
    }
    if (argc != 2)
        FAIL(BAD_INPUT, "epoch status: %d arguments, want one, the results file", argc - 1);
    TRY(results_status(&s, argv[1]));
    if (s.total >= 0)
        printf("rows         %lld of %lld done, %lld failed, %lld left\n", (long long)s.done, (long long)s.total,
               (long long)s.failed, (long long)s.left);
    else
        printf("rows         %lld done, %lld failed\n", (long long)s.done, (long long)s.failed);
    printf("sessions     %d\n", s.sessions);
    printf("run          %s%s\n", s.running ? "running: " : "not running", s.holder);
    printf("results      %s (%s%s)\n", argv[1], *s.state ? s.state : "not published yet",
           s.current || !*s.state ? "" : ", behind the journals: --resume brings it up to date");
    bool ended = s.current && strcmp(s.state, "complete") == 0;
    st = !ended ? STOPPED : s.failed > 0 ? ROWS_FAILED : OK;
out:
    return st;
}
