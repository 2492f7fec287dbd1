#define _XOPEN_SOURCE 700 /* SIGXFSZ */
#include "src/stop.h"

#include <signal.h>
#include <stddef.h>
#include <time.h>

static const double ONE_REQUEST = .25; /* seconds */

static volatile sig_atomic_t asked;
static struct timespec first;

static void on_signal(int number)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (!asked) {
        first = now;
        asked = 1;
    } else if ((double)(now.tv_sec - first.tv_sec) + 1e-9 * (double)(now.tv_nsec - first.tv_nsec) > ONE_REQUEST) {
        signal(number, SIG_DFL);
        raise(number);
    }
}

void stop_listen(void)
{
    static const int requests[] = {SIGUSR1, SIGTERM, SIGINT}, ignored[] = {SIGPIPE, SIGXFSZ};
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, ignore = {.sa_handler = SIG_IGN};
    sigemptyset(&a.sa_mask);
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++)
        sigaddset(&a.sa_mask, requests[i]);
    for (size_t i = 0; i < sizeof requests / sizeof *requests; i++)
        sigaction(requests[i], &a, NULL);
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++)
        sigaction(ignored[i], &ignore, NULL);
}

bool stop_asked(void)
{
    return asked != 0;
}
