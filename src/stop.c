#include "src/stop.h"

#include <signal.h>
#include <stddef.h>

static volatile sig_atomic_t asked;

static void on_signal(int number)
{
    asked = 1;
    (void)number;
}

void stop_listen(void)
{
    static const int numbers[] = {SIGUSR1, SIGTERM, SIGINT};
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = (int)(SA_RESTART | SA_RESETHAND)};
    for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++)
        sigaction(numbers[i], &a, NULL);
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    sigaction(SIGPIPE, &ignore, NULL);
}

bool stop_asked(void)
{
    return asked != 0;
}
