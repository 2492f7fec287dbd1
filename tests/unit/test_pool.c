/* The threads of a rank: every task once, on one thread at a time, seen by all; whatever the threads are doing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_setaffinity */
#endif
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/cpu/pool.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

enum { MOST = 1000, THREADS = 7 };

typedef struct job {
    int threads, of;
    int64_t run;
    int32_t times[MOST], seen[MOST]; /* plain memory: a race would show under the thread sanitizer */
    int64_t done[THREADS];           /* tasks of each thread */
    int32_t value;
    _Atomic int wrong;
    long nap; /* ns that a task takes on thread 0 */
} job;

static void nap(long ns)
{
    nanosleep(&(struct timespec){0, ns}, NULL);
}

static void once(void *arg, int64_t from, int64_t to, int thread)
{
    job *j = arg;
    if (thread < 0 || thread >= j->threads || from >= to || (to - from > j->run && j->threads > 1 && j->of > j->run))
        atomic_fetch_add(&j->wrong, 1);
    for (int64_t i = from; i < to; i++) {
        j->times[i]++;
        j->seen[i] = j->value;
        j->done[thread]++;
    }
    if (thread == 0 && j->nap)
        nap(j->nap);
}

static void check(cpu_pool *p, job *j, int count, int run)
{
    memset(j->times, 0, sizeof j->times);
    memset(j->done, 0, sizeof j->done);
    j->of = count;
    j->run = run;
    j->value++;
    cpu_pool_run(p, count, run, once, j);
    int64_t sum = 0;
    for (int i = 0; i < MOST; i++) {
        assert_int_equal(j->times[i], i < count);
        assert_true(i >= count || j->seen[i] == j->value);
    }
    for (int i = 0; i < THREADS; i++)
        sum += j->done[i];
    assert_int_equal(sum, count);
    assert_int_equal(j->wrong, 0);
}

static void test_every_task_once(void **state)
{
    (void)state;
    static const int counts[] = {0, 1, 2, 3, 17, 100, 999, MOST}, runs[] = {1, 3, 64, MOST};
    for (int threads = 1; threads <= THREADS; threads++) {
        cpu_pool *p;
        job j = {.threads = threads};
        assert_int_equal(cpu_pool_open(&p, threads), OK);
        for (int repeat = 0; repeat < 30; repeat++)
            for (size_t n = 0; n < sizeof counts / sizeof *counts; n++)
                for (size_t r = 0; r < sizeof runs / sizeof *runs; r++)
                    check(p, &j, counts[n], runs[r]);
        cpu_pool_close(p);
    }
}

/* Workers fall asleep between the calls, and so does the caller while they end theirs. */
static void test_sleepers_wake(void **state)
{
    (void)state;
    cpu_pool *p;
    job j = {.threads = 3};
    assert_int_equal(cpu_pool_open(&p, 3), OK);
    for (int i = 0; i < 20; i++) {
        nap(1000000);
        check(p, &j, 40, 1);
    }
    j.nap = 300000; /* the caller's share is slow: the others do theirs meanwhile, once they are awake */
    int64_t helped = 0;
    for (int i = 0; i < 20; i++) {
        nap(1000000);
        check(p, &j, 40, 1);
        helped += j.done[1] + j.done[2];
    }
    assert_true(helped > 0);
    cpu_pool_close(p);
}

static void slow_elsewhere(void *arg, int64_t from, int64_t to, int thread)
{
    once(arg, from, to, thread);
    nap(thread ? 2000000 : 100000);
}

/* The call waits for what another thread has begun. */
static void test_waits_for_the_last(void **state)
{
    (void)state;
    cpu_pool *p;
    job j = {.threads = 2, .of = 8, .run = 1};
    assert_int_equal(cpu_pool_open(&p, 2), OK);
    for (int repeat = 0; repeat < 5; repeat++) {
        memset(j.times, 0, sizeof j.times);
        cpu_pool_run(p, 8, 1, slow_elsewhere, &j);
        for (int i = 0; i < 8; i++)
            assert_int_equal(j.times[i], 1);
    }
    cpu_pool_close(p);
}

static void test_open_and_close(void **state)
{
    (void)state;
    for (int i = 0; i < 50; i++) {
        cpu_pool *p;
        assert_int_equal(cpu_pool_open(&p, 1 + i % THREADS), OK);
        if (i % 3 == 0) {
            job j = {.threads = 1 + i % THREADS};
            check(p, &j, 5, 1);
        }
        cpu_pool_close(p);
    }
    cpu_pool_close(NULL);
}

static void test_cores(void **state)
{
    (void)state;
    cpu_set_t before, one;
    assert_int_equal(sched_getaffinity(0, sizeof before, &before), 0);
    assert_int_equal(cpu_pool_cores(), CPU_COUNT(&before));
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; i++)
        if (CPU_ISSET(i, &before))
            CPU_SET(i, &one);
    assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
    assert_int_equal(cpu_pool_cores(), 1);
    assert_int_equal(sched_setaffinity(0, sizeof before, &before), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_task_once), cmocka_unit_test(test_sleepers_wake),
                                       cmocka_unit_test(test_waits_for_the_last), cmocka_unit_test(test_open_and_close),
                                       cmocka_unit_test(test_cores)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
