/* A stuck job ends in time, with exit code 3 and one message that says where each rank was; one that moves does not.
 * Ranks are forked processes that share the file of heartbeats, as ranks of a job do. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/base/watchdog.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 4 };
static const double TIMEOUT = 0.4, TICK = 0.02;

static char path[] = "heartbeats.XXXXXX";

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_for(double seconds)
{
    struct timespec t = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

typedef struct job {
    int present, said; /* said: the read end of all stderrs */
    pid_t pid[MOST];
    double started;
} job;

typedef void (*life)(heartbeat *h, int rank);

static void (*abort_with)(void *);

static void rank_main(int rank, int size, life body)
{
    heartbeat h = {.layer = -1, .phase = -1};
    watchdog *w;
    watchdog_rule rule = {.rank = rank,
                          .size = size,
                          .file = path,
                          .seconds = {TIMEOUT, TIMEOUT, TIMEOUT, 3 * TIMEOUT},
                          .tick = TICK,
                          .abort = abort_with,
                          .abort_seconds = 0.3};
    alarm(20);
    if (watchdog_open(&w, &rule, &h) != OK)
        _exit(99);
    body(&h, rank);
    watchdog_close(w);
    _exit(0);
}

/* The first `present` ranks of a job of `size`. */
static job start(int size, int present, life body)
{
    job j = {.present = present, .started = now()};
    int fd[2];
    unlink(path);
    assert_int_equal(pipe(fd), 0);
    fflush(NULL);
    for (int r = 0; r < present; r++) {
        j.pid[r] = fork();
        assert_true(j.pid[r] >= 0);
        if (j.pid[r] == 0) {
            dup2(fd[1], STDERR_FILENO);
            close(fd[0]);
            close(fd[1]);
            rank_main(r, size, body);
        }
    }
    close(fd[1]);
    j.said = fd[0];
    return j;
}

/* Waits for all; their exit codes, what they said, how long it took. */
static double finish(job *j, int *code, char *said, size_t room)
{
    size_t at = 0;
    for (int r = 0; r < j->present; r++) {
        int how;
        assert_int_equal(waitpid(j->pid[r], &how, 0), j->pid[r]);
        code[r] = WIFEXITED(how) ? WEXITSTATUS(how) : 128 + WTERMSIG(how);
    }
    double seconds = now() - j->started;
    for (ssize_t n; at < room - 1 && (n = read(j->said, said + at, room - 1 - at)) > 0;)
        at += (size_t)n;
    said[at] = '\0';
    close(j->said);
    return seconds;
}

static int count(const char *text, const char *what)
{
    int n = 0;
    for (; (text = strstr(text, what)); text++)
        n++;
    return n;
}

static void forward(heartbeat *h, int64_t iteration, int layers, double seconds)
{
    heartbeat_stage(h, WATCH_RUN);
    heartbeat_iteration(h, iteration);
    for (int l = 0; l < layers; l++)
        for (phase p = PHASE_ATTENTION; p <= PHASE_COMBINE; p++) {
            heartbeat_phase(h, l, p);
            sleep_for(seconds);
        }
}

static void hang(void)
{
    for (;;)
        pause();
}

static void alone(heartbeat *h, int rank)
{
    (void)rank;
    for (int i = 0; i < 2; i++)
        forward(h, i, 2, 0.025); /* together longer than the timeout */
    heartbeat_iteration(h, 17);
    heartbeat_phase(h, 5, PHASE_EXPERTS);
    hang();
}

static void test_a_stuck_thread_is_noticed(void **state)
{
    (void)state;
    char said[4096];
    int code[MOST];
    job j = start(1, 1, alone);
    double seconds = finish(&j, code, said, sizeof said);
    assert_int_equal(code[0], FAILED);
    assert_non_null(strstr(said, "the job is stuck: no rank has moved for 0.4"));
    assert_null(strstr(said, "the others wait for"));
    assert_non_null(strstr(said, "\nrank 0/1: run, iteration 17, layer 5, experts done, silent for 0.4"));
    assert_true(seconds > 0.6 + TIMEOUT);
    assert_true(seconds < 0.6 + TIMEOUT + 3); /* a busy machine is slow, not endless */
}

/* The thread has enqueued a forward and waits for it; where the device is, it says itself. */
static void behind_a_device(heartbeat *h, int rank)
{
    static volatile int32_t reached = -1;
    (void)rank;
    heartbeat_stage(h, WATCH_RUN);
    atomic_store(&h->reached, &reached);
    heartbeat_iteration(h, 21);
    for (int layer = 0; layer < 4; layer++) { /* it moves, and so excuses the thread */
        sleep_for(TIMEOUT / 2);
        reached = layer * PHASES + PHASE_ATTENTION;
    }
    hang();
}

static void test_the_device_says_where_it_is(void **state)
{
    (void)state;
    char said[4096];
    int code[MOST];
    job j = start(1, 1, behind_a_device);
    double seconds = finish(&j, code, said, sizeof said);
    assert_int_equal(code[0], FAILED);
    assert_non_null(strstr(said, "\nrank 0/1: run, iteration 21, layer 3, attention done, silent for 0.4"));
    assert_true(seconds > 3 * TIMEOUT);
}

/* Rank 1 hangs in its experts; the others finish theirs and wait for it. */
static void one_hangs(heartbeat *h, int rank)
{
    forward(h, 8, 2, 0.001);
    heartbeat_iteration(h, 9);
    heartbeat_phase(h, 0, PHASE_DISPATCH);
    if (rank != 1)
        heartbeat_phase(h, 0, PHASE_EXPERTS);
    hang();
}

static void test_the_rank_that_others_wait_for(void **state)
{
    (void)state;
    char said[4096];
    int code[MOST];
    job j = start(3, 3, one_hangs);
    finish(&j, code, said, sizeof said);
    for (int r = 0; r < 3; r++)
        assert_int_equal(code[r], FAILED);
    assert_int_equal(count(said, "the job is stuck"), 1);
    assert_non_null(strstr(said, "; the others wait for rank 1/3\n"));
    assert_non_null(strstr(said, "\nrank 0/3: run, iteration 9, layer 0, experts done, silent for "));
    assert_non_null(strstr(said, "\nrank 1/3: run, iteration 9, layer 0, dispatch done, silent for "));
    assert_non_null(strstr(said, "\nrank 2/3: run, iteration 9, layer 0, experts done, silent for "));
}

/* All are at the same place, but the process of rank 0 does not run. */
static void same_place(heartbeat *h, int rank)
{
    forward(h, 3, 1, 0.01);
    sleep_for(TIMEOUT / 2); /* its watchdog tells of it */
    if (rank == 0)
        raise(SIGSTOP);
    hang();
}

static void test_a_stopped_process(void **state)
{
    (void)state;
    char said[4096];
    int code[MOST];
    job j = start(3, 3, same_place);
    sleep_for(TIMEOUT + 1);
    kill(j.pid[0], SIGKILL);
    finish(&j, code, said, sizeof said);
    assert_int_equal(code[0], 128 + SIGKILL);
    assert_int_equal(code[1], FAILED);
    assert_int_equal(code[2], FAILED);
    assert_int_equal(count(said, "the job is stuck"), 1);
    assert_non_null(strstr(said, "; the others wait for rank 0/3\n"));
    assert_int_equal(count(said, "its process does not answer"), 1);
    assert_non_null(strstr(said, "\nrank 0/3: run, iteration 3, layer 0, combine done, silent for "));
}

/* Rank 1 loads for long, but moves: rank 0, which waits for it, is excused. Rank 2 left early. */
static void one_is_slow(heartbeat *h, int rank)
{
    if (rank == 2)
        return;
    for (int i = 0; i < 20 && rank == 1; i++) { /* until rank 0 has left, however late it began */
        sleep_for(0.1);
        heartbeat_beat(h);
    }
    if (rank == 0)
        sleep_for(1);
}

static void test_who_moves_excuses_the_others(void **state)
{
    (void)state;
    char said[4096];
    int code[MOST];
    job j = start(3, 3, one_is_slow);
    finish(&j, code, said, sizeof said);
    for (int r = 0; r < 3; r++)
        assert_int_equal(code[r], 0);
    assert_string_equal(said, "");
}

/* Rank 0 publishes (which may take 3 timeouts), rank 1 is in the next forward. */
static void one_publishes(heartbeat *h, int rank)
{
    heartbeat_stage(h, WATCH_RUN);
    heartbeat_iteration(h, 5);
    if (rank == 0)
        heartbeat_stage(h, WATCH_PUBLISH);
    else
        heartbeat_iteration(h, 6);
    hang();
}

static void test_each_stage_has_its_deadline(void **state)
{
    (void)state;
    char said[4096];
    int code[MOST];
    job j = start(2, 2, one_publishes);
    double seconds = finish(&j, code, said, sizeof said);
    assert_true(seconds > 3 * TIMEOUT);
    assert_int_equal(code[0], FAILED);
    assert_int_equal(code[1], FAILED);
    assert_non_null(strstr(said, "; the others wait for rank 0/2\nrank 0/2: publish, silent for "));
    assert_non_null(strstr(said, "\nrank 1/2: run, iteration 6, silent for "));
}

static void hangs_early(heartbeat *h, int rank)
{
    (void)h;
    (void)rank;
    hang();
}

static void test_a_rank_never_heard_of(void **state)
{
    (void)state;
    char said[4096];
    int code[MOST];
    job j = start(2, 1, hangs_early);
    finish(&j, code, said, sizeof said);
    assert_int_equal(code[0], FAILED);
    assert_non_null(strstr(said, "; the others wait for rank 1/2\nrank 0/2: load, silent for "));
    assert_non_null(strstr(said, "\nrank 1/2: never heard of\n"));
}

static void own_word(void *with)
{
    (void)with;
    if (write(STDERR_FILENO, "aborting\n", 9) == 9)
        hang();
}

static void test_abort_is_tried_and_may_hang(void **state)
{
    (void)state;
    char said[4096];
    int code[MOST];
    abort_with = own_word;
    job j = start(1, 1, hangs_early);
    finish(&j, code, said, sizeof said);
    abort_with = NULL;
    assert_int_equal(code[0], FAILED);
    assert_non_null(strstr(said, "rank 0/1: load, silent for "));
    assert_non_null(strstr(said, "s\naborting\n"));
}

/* A whole job that was stopped (by a debugger, by Slurm) goes on where it was. */
static void stops_itself(heartbeat *h, int rank)
{
    (void)rank;
    forward(h, 1, 1, 0.01);
    raise(SIGSTOP);
    sleep_for(TIMEOUT / 3);
    forward(h, 2, 1, 0.01);
}

static void test_stopped_time_does_not_count(void **state)
{
    (void)state;
    char said[4096];
    int code[MOST];
    job j = start(1, 1, stops_itself);
    sleep_for(2 * TIMEOUT);
    kill(j.pid[0], SIGCONT);
    finish(&j, code, said, sizeof said);
    assert_int_equal(code[0], 0);
    assert_string_equal(said, "");
}

static void test_open_and_close(void **state)
{
    (void)state;
    heartbeat h = {.layer = -1, .phase = -1};
    watchdog *w;
    watchdog_rule rule = {.rank = 0, .size = 1, .file = "no/such/folder/beats", .seconds = {9, 9, 9, 9}, .tick = 10};
    assert_int_equal(watchdog_open(&w, &rule, &h), FAILED);
    assert_non_null(strstr(status_message(), "no/such/folder/beats: heartbeats cannot be written: No such file"));
    assert_null(w);
    if (access("/dev/full", W_OK) == 0) {
        rule.file = "/dev/full";
        assert_int_equal(watchdog_open(&w, &rule, &h), FAILED);
        assert_non_null(strstr(status_message(), "/dev/full: heartbeats cannot be written: No space left"));
    }
    rule.file = path;
    double began = now();
    assert_int_equal(watchdog_open(&w, &rule, &h), OK);
    watchdog_close(w);
    watchdog_close(NULL);
    assert_true(now() - began < 5); /* without waiting for the tick */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_stuck_thread_is_noticed),     cmocka_unit_test(test_the_device_says_where_it_is),
        cmocka_unit_test(test_the_rank_that_others_wait_for), cmocka_unit_test(test_a_stopped_process),
        cmocka_unit_test(test_who_moves_excuses_the_others),  cmocka_unit_test(test_each_stage_has_its_deadline),
        cmocka_unit_test(test_a_rank_never_heard_of),         cmocka_unit_test(test_abort_is_tried_and_may_hang),
        cmocka_unit_test(test_stopped_time_does_not_count),   cmocka_unit_test(test_open_and_close),
    };
    int fd = mkstemp(path);
    if (fd < 0)
        return FAILED;
    close(fd);
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failures;
}
