/* The world's collectives, what agree says, and that abort ends the job even where MPI_Abort hangs.
 * With an argument the job ends with exit code 3: `abort`; `hang`: MPI_Abort does; `stuck`, `stopped`: the last rank,
 * or its whole process, and the watchdogs of the others find out. */
#include "tests/ranks/ranks.h"

#include "src/base/watchdog.h"

#include <mpi.h>
#include <signal.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int abort_hangs, allreduce_fails;

/* MPI's profiling interface: faults are put between the program and the library. */
int MPI_Abort(MPI_Comm comm, int code)
{
    while (abort_hangs)
        pause();
    return PMPI_Abort(comm, code);
}

int MPI_Allreduce(const void *send, void *recv, int n, MPI_Datatype type, MPI_Op op, MPI_Comm comm)
{
    return allreduce_fails ? MPI_ERR_INTERN : PMPI_Allreduce(send, recv, n, type, op, comm);
}

static void test_places(void **state)
{
    (void)state;
    int32_t mine[2] = {job->rank, job->local_rank}, all[64][2];
    assert_in_range(job->rank, 0, job->size - 1);
    assert_in_range(job->local_rank, 0, job->local_size - 1);
    assert_int_equal(job->local_size, job->size); /* tests run on one host */
    assert_int_equal(job->gather(job, job->rank == 0 ? all : NULL, mine, sizeof mine), OK);
    for (int r = 0; r < job->size && job->rank == 0; r++) {
        assert_int_equal(all[r][0], r);
        assert_int_equal(all[r][1], r);
    }
}

static void test_bcast(void **state)
{
    (void)state;
    size_t n = 3000001;
    unsigned char *bytes = malloc(n);
    for (int root = 0; root < job->size; root++) {
        memset(bytes, job->rank == root ? 17 + root : 0, n);
        assert_int_equal(job->bcast(job, bytes, n, root), OK);
        for (size_t i = 0; i < n; i += 1000)
            assert_int_equal(bytes[i], 17 + root);
    }
    assert_int_equal(job->bcast(job, NULL, 0, 0), OK);
    assert_int_equal(job->gather(job, NULL, NULL, 0), OK);
    free(bytes);
}

static void test_counts(void **state)
{
    (void)state;
    int32_t send[64], recv[64];
    for (int r = 0; r < job->size; r++)
        send[r] = 100 * job->rank + r;
    assert_int_equal(job->counts(job, recv, send), OK);
    for (int r = 0; r < job->size; r++)
        assert_int_equal(recv[r], 100 * r + job->rank);
}

static void test_agree_takes_the_worst(void **state)
{
    (void)state;
    static const status order[] = {OK, ROWS_FAILED, STOPPED, BAD_INPUT, FAILED};
    for (int worst = 0; worst < 5; worst++)
        for (int who = 0; who < job->size; who++) {
            status_message_set("");
            /* the others hold anything up to the worst */
            status mine = job->rank == who ? order[worst] : order[(job->rank * 7 + who) % (worst + 1)];
            assert_int_equal(job->agree(job, mine), order[worst]);
            assert_string_equal(status_message(), "");
        }
}

static void test_agree_joins_messages(void **state)
{
    (void)state;
    char want[STATUS_MESSAGE_BYTES];

    /* one rank fails; what another said long ago is not told again */
    status_message_set(job->rank == job->size - 1 ? "no such file" : "an old failure");
    assert_int_equal(job->agree(job, job->rank == job->size - 1 ? BAD_INPUT : OK), BAD_INPUT);
    if (job->size == 1)
        snprintf(want, sizeof want, "no such file");
    else
        snprintf(want, sizeof want, "rank %d/%d: no such file", job->size - 1, job->size);
    if (job->rank == 0)
        assert_string_equal(status_message(), want);

    /* all fail alike */
    status_message_set("bad flag");
    assert_int_equal(job->agree(job, BAD_INPUT), BAD_INPUT);
    if (job->size == 1)
        snprintf(want, sizeof want, "bad flag");
    else
        snprintf(want, sizeof want, "ranks 0-%d/%d: bad flag", job->size - 1, job->size);
    if (job->rank == 0)
        assert_string_equal(status_message(), want);

    /* two kinds, interleaved; a rank without a word */
    if (job->size == 4) {
        static const char *const say[] = {"first", "second", "", "first"};
        status_message_set(say[job->rank]);
        assert_int_equal(job->agree(job, job->rank == 1 ? FAILED : STOPPED), FAILED);
        if (job->rank == 0)
            assert_string_equal(status_message(), "ranks 0,3/4: first\nrank 1/4: second");
        status_message_set(job->rank == 2 ? "other" : "same");
        assert_int_equal(job->agree(job, FAILED), FAILED);
        if (job->rank == 0)
            assert_string_equal(status_message(), "ranks 0-1,3/4: same\nrank 2/4: other");
    }

    /* more than fits is cut */
    memset(want, 'a' + job->rank, sizeof want - 1);
    want[sizeof want - 1] = '\0';
    status_message_set(want);
    assert_int_equal(job->agree(job, FAILED), FAILED);
    if (job->rank == 0)
        assert_int_equal(strlen(status_message()), STATUS_MESSAGE_BYTES - 1);
}

static void test_failures_of_mpi(void **state)
{
    (void)state;
    char byte = 0;
    assert_int_equal(job->bcast(job, &byte, 1, job->size), FAILED);
    assert_non_null(strstr(status_message(), "MPI_Bcast: MPI_ERR_ROOT: invalid root [mpi/world_mpi.c:"));
    assert_int_equal(job->gather(job, NULL, NULL, (size_t)1 << 31), FAILED);
    assert_non_null(strstr(status_message(), "gather of 2147483648 bytes a rank, at most 2147483647"));
    allreduce_fails = 1;
    assert_int_equal(job->agree(job, OK), FAILED);
    allreduce_fails = 0;
    assert_non_null(strstr(status_message(), "MPI_Allreduce: "));
}

static void give_up(void *with)
{
    world *w = with;
    w->abort(w, FAILED);
}

static void end_badly(const char *way)
{
    bool last = job->rank == job->size - 1;
    heartbeat h = {.layer = -1, .phase = -1};
    watchdog *w;
    watchdog_rule rule = {.rank = job->rank,
                          .size = job->size,
                          .file = strcmp(way, "stuck") == 0 ? "test_world_stuck.beats" : "test_world_stopped.beats",
                          .seconds = {1, 1, 1, 1},
                          .tick = .1,
                          .abort = give_up,
                          .with = job,
                          .abort_seconds = 5};
    abort_hangs = strcmp(way, "hang") == 0;
    if (last && (abort_hangs || strcmp(way, "abort") == 0))
        job->abort(job, FAILED);
    if (watchdog_open(&w, &rule, &h) != OK)
        _exit(99);
    heartbeat_stage(&h, WATCH_RUN);
    heartbeat_iteration(&h, 4);
    if (!last)
        heartbeat_phase(&h, 2, PHASE_ROUTE);
    if (last && strcmp(way, "stopped") == 0) {
        struct timespec tick = {.tv_nsec = 300000000};
        nanosleep(&tick, NULL);
        raise(SIGSTOP);
    }
    if (last)
        pause();
    job->agree(job, OK);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places),           cmocka_unit_test(test_bcast),
        cmocka_unit_test(test_counts),           cmocka_unit_test(test_agree_takes_the_worst),
        cmocka_unit_test(test_agree_joins_messages), cmocka_unit_test(test_failures_of_mpi),
    };
    ranks_open(&argc, &argv);
    if (argc > 1)
        end_badly(argv[1]);
    job->close(NULL);
    return ranks_run(tests);
}
