#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* sched_getaffinity */
#endif
#include "src/cpu/pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* How long to look out before sleeping: about what it costs to be woken. */
enum { LOOK_OUT_NS = 10000 };

/* The gate: the number of the job in the upper half, then whether workers may enter, then how many are inside. */
#define OPEN 0x80000000u
#define INSIDE 0x7fffffffu

/* A thread's part of the job; each on a line of its own. */
typedef struct part {
    _Atomic int64_t next;
    int64_t end;
    char apart[48];
} part;

struct cpu_pool {
    int threads, started;
    pthread_t *worker;
    /* The job: written only while the gate is shut and nobody is inside. */
    cpu_task *task;
    void *arg;
    int64_t run;
    part *part; /* [threads] */
    char apart[64];
    _Atomic uint64_t gate;
    char gate_apart[64];
    pthread_mutex_t lock;
    pthread_cond_t opened, left;
    _Atomic int sleeping; /* workers that wait for `opened` */
    _Atomic int waiting;  /* the caller waits for `left` */
    bool quit;
};

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Takes runs until there are none: of its own part, then of the others'. */
static void work(cpu_pool *p, int thread)
{
    for (int i = 0; i < p->threads; i++) {
        part *a = &p->part[(thread + i) % p->threads];
        while (atomic_load_explicit(&a->next, memory_order_relaxed) < a->end) {
            int64_t from = atomic_fetch_add_explicit(&a->next, p->run, memory_order_relaxed), to = from + p->run;
            if (from < a->end)
                p->task(p->arg, from, to < a->end ? to : a->end, thread);
        }
    }
}

/* Enters if the gate is open for a job that this worker has not seen. */
static bool enter(cpu_pool *p, uint32_t *seen)
{
    uint64_t gate = atomic_load(&p->gate);
    while ((gate & OPEN) && (uint32_t)(gate >> 32) != *seen)
        if (atomic_compare_exchange_weak(&p->gate, &gate, gate + 1)) {
            *seen = (uint32_t)(gate >> 32);
            return true;
        }
    return false;
}

/* Waits for the next job; false: the pool closes. */
static bool await(cpu_pool *p, uint32_t *seen)
{
    bool entered;
    int64_t until = now_ns() + LOOK_OUT_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (enter(p, seen))
                return true;
            pause_briefly();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add(&p->sleeping, 1); /* before it looks at the gate again: cpu_pool_run, the other way round */
    while (!(entered = enter(p, seen)) && !p->quit)
        pthread_cond_wait(&p->opened, &p->lock);
    atomic_fetch_sub(&p->sleeping, 1);
    pthread_mutex_unlock(&p->lock);
    return entered;
}

static void leave(cpu_pool *p)
{
    uint64_t gate = atomic_fetch_sub(&p->gate, 1) - 1;
    if ((gate & (OPEN | INSIDE)) == 0 && atomic_load(&p->waiting)) {
        pthread_mutex_lock(&p->lock);
        pthread_cond_signal(&p->left);
        pthread_mutex_unlock(&p->lock);
    }
}

typedef struct birth {
    cpu_pool *p;
    int thread;
} birth;

static void *worker(void *with)
{
    birth b = *(birth *)with;
    uint32_t seen = 0;
    free(with);
    while (await(b.p, &seen)) {
        work(b.p, b.thread);
        leave(b.p);
    }
    return NULL;
}

/* Waits until nobody is inside the shut gate. */
static void await_workers(cpu_pool *p)
{
    int64_t until = now_ns() + LOOK_OUT_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if (!(atomic_load(&p->gate) & INSIDE))
                return;
            pause_briefly();
        }
    } while (now_ns() < until);
    pthread_mutex_lock(&p->lock);
    atomic_store(&p->waiting, 1);
    while (atomic_load(&p->gate) & INSIDE)
        pthread_cond_wait(&p->left, &p->lock);
    atomic_store(&p->waiting, 0);
    pthread_mutex_unlock(&p->lock);
}

void cpu_pool_run(cpu_pool *p, int64_t count, int64_t run, cpu_task *task, void *arg)
{
    if (count <= 0)
        return;
    if (p->threads == 1 || count <= run) {
        task(arg, 0, count, 0);
        return;
    }
    p->task = task;
    p->arg = arg;
    p->run = run;
    for (int i = 0; i < p->threads; i++) {
        atomic_store_explicit(&p->part[i].next, count * i / p->threads, memory_order_relaxed);
        p->part[i].end = count * (i + 1) / p->threads;
    }
    atomic_store(&p->gate, (uint64_t)((uint32_t)(atomic_load(&p->gate) >> 32) + 1) << 32 | OPEN);
    int64_t wake = (count - 1) / run, sleeping = atomic_load(&p->sleeping);
    wake = sleeping < wake ? sleeping : wake;
    if (wake > 0) {
        pthread_mutex_lock(&p->lock);
        for (int64_t i = 0; i < wake; i++)
            pthread_cond_signal(&p->opened);
        pthread_mutex_unlock(&p->lock);
    }
    work(p, 0);
    if (atomic_fetch_and(&p->gate, ~(uint64_t)OPEN) & INSIDE)
        await_workers(p);
}

int cpu_pool_cores(void)
{
    cpu_set_t mine;
    bool known = sched_getaffinity(0, sizeof mine, &mine) == 0; /* it does not on machines of more than 1024 */
    long n = known ? CPU_COUNT(&mine) : sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

static status start(cpu_pool *p)
{
    status st = OK;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (p->started < p->threads - 1 && st == OK) {
        birth *b = malloc(sizeof *b);
        if (b)
            *b = (birth){p, p->started + 1};
        int error = b ? pthread_create(&p->worker[p->started], NULL, worker, b) : ENOMEM;
        p->started += error == 0;
        if (error)
            free(b);
        if (error)
            st = status_fail(FAILED, __FILE__, __LINE__, "thread %d of %d does not start: %s; want fewer --threads",
                             p->started + 2, p->threads, strerror(error));
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return st;
}

status cpu_pool_open(cpu_pool **out, int threads)
{
    status st = OK;
    *out = NULL;
    cpu_pool *p = calloc(1, sizeof *p);
    if (!p)
        FAIL(FAILED, "out of memory");
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->opened, NULL);
    pthread_cond_init(&p->left, NULL);
    p->threads = threads;
    p->worker = calloc((size_t)threads, sizeof *p->worker);
    p->part = aligned_alloc(sizeof *p->part, (size_t)threads * sizeof *p->part);
    if (!p->worker || !p->part)
        FAIL(FAILED, "out of memory");
    TRY(start(p));
    *out = p;
    p = NULL;
out:
    cpu_pool_close(p);
    return st;
}

void cpu_pool_close(cpu_pool *p)
{
    if (!p)
        return;
    pthread_mutex_lock(&p->lock);
    p->quit = true;
    pthread_cond_broadcast(&p->opened);
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < p->started; i++)
        pthread_join(p->worker[i], NULL);
    pthread_cond_destroy(&p->left);
    pthread_cond_destroy(&p->opened);
    pthread_mutex_destroy(&p->lock);
    free(p->worker);
    free(p->part);
    free(p);
}
