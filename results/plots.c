#include "results/plots.h"

#include "results/plots_py.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PLOT_FILES = 64 };

/* Runs python with `script` as its program; its exit code, or -1. */
static int run_python(const char *python, const char *script, const char *dir, const char *const *file, int count,
                      bool quiet)
{
    const char *argv[PLOT_FILES + 5] = {python, "-c", script, dir};
    int n = dir ? 4 : 3, wait_status = 0;
    for (int i = 0; i < count; i++)
        argv[n++] = file[i];
    pid_t p = fork();
    if (p == 0) {
        if (quiet && (!freopen("/dev/null", "w", stderr) || !freopen("/dev/null", "w", stdout)))
            _exit(126);
        execv(python, (char *const *)argv);
        _exit(127);
    }
    if (p < 0)
        return -1;
    while (waitpid(p, &wait_status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
}

static bool can_draw(const char *python)
{
    return access(python, X_OK) == 0 && run_python(python, "import h5py, matplotlib", NULL, NULL, 0, true) == 0;
}

static bool find_python(char *out, size_t room)
{
    const char *all = getenv("PATH");
    for (const char *dir = all ? all : "/usr/bin:/bin"; *dir;) {
        int n = (int)strcspn(dir, ":");
        snprintf(out, room, "%.*s/python3", n, dir);
        dir += n + (dir[n] == ':');
        if (n > 0 && can_draw(out))
            return true;
    }
    return false;
}

status plots_draw(const char *dir, const char *python, const char *const *file, int count)
{
    status st = OK;
    char found[1024];
    if (count > PLOT_FILES)
        FAIL(BAD_INPUT, "--plots: %d files, want at most %d", count, PLOT_FILES);
    if (python && !can_draw(python))
        FAIL(BAD_INPUT, "--python %s: cannot import h5py and matplotlib", python);
    if (!python && !find_python(found, sizeof found))
        FAIL(BAD_INPUT, "--plots: no python3 of PATH has h5py and matplotlib (Debian, Ubuntu: apt-get install "
                        "python3-h5py python3-matplotlib)");
    int code = run_python(python ? python : found, plots_py, dir, file, count, false);
    if (code != 0)
        FAIL(FAILED, "--plots %s: Python ended with exit code %d; its messages stand above", dir, code);
out:
    return st;
}
