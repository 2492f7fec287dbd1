/* Which transports go with which device and number of ranks: judged without any device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "mpi/gpu_start.h"
#include "src/options.h"
#include "src/transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void test_choices(void **state)
{
    (void)state;
    const struct {
        transport_ask ask;
        const char *says; /* NULL: it may be */
    } cases[] = {
        {{.transport = TRANSPORT_AUTO, .ranks = 1}, NULL},
        {{.transport = TRANSPORT_AUTO, .ranks = 4}, NULL},
        {{.transport = TRANSPORT_MPI, .ranks = 1}, NULL},
        {{.transport = TRANSPORT_SELF, .ranks = 1}, NULL},
        {{.transport = TRANSPORT_SELF, .ranks = 2}, "--transport self carries one rank, there are 2: want auto or mpi"},
        {{.transport = TRANSPORT_NCCL, .ranks = 2}, "--transport nccl carries rows between GPUs: want --device cuda"},
        {{.transport = TRANSPORT_LSA, .ranks = 2}, "--transport lsa carries rows between GPUs: want --device cuda"},
        {{.transport = TRANSPORT_LSA, .ranks = 2, .cuda = true, .joins = true, .combine = BF16}, NULL},
        {{.transport = TRANSPORT_AUTO, .ranks = 2, .combine = BF16}, "--combine bf16 halves what GPUs exchange"},
        {{.transport = TRANSPORT_AUTO, .ranks = 1, .cuda = true}, NULL},
        {{.transport = TRANSPORT_AUTO, .ranks = 1, .cuda = true, .combine = BF16}, NULL},
        {{.transport = TRANSPORT_SELF, .ranks = 1, .cuda = true}, NULL},
        {{.transport = TRANSPORT_NCCL, .ranks = 1, .cuda = true, .joins = true}, NULL},
        {{.transport = TRANSPORT_AUTO, .ranks = 8, .cuda = true, .joins = true}, NULL},
        {{.transport = TRANSPORT_NCCL, .ranks = 8, .cuda = true, .joins = true, .combine = BF16}, NULL},
        {{.transport = TRANSPORT_SELF, .ranks = 2, .cuda = true, .joins = true}, "there are 2: want auto or nccl"},
        {{.transport = TRANSPORT_MPI, .ranks = 1, .cuda = true}, "want --transport self with --device cuda"},
        {{.transport = TRANSPORT_MPI, .ranks = 2, .cuda = true}, "want --transport nccl with --device cuda"},
        {{.transport = TRANSPORT_AUTO, .ranks = 2, .cuda = true},
         "--device cuda on 2 ranks: this program was built "
         "without NCCL (-DEPOCH_NCCL=ON)"},
        {{.transport = TRANSPORT_NCCL, .ranks = 1, .cuda = true}, "this program was built without NCCL"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        status st = transport_check(&cases[i].ask);
        if (st != (cases[i].says ? BAD_INPUT : OK) || (st != OK && !strstr(status_message(), cases[i].says)))
            fail_msg("case %zu: %s", i, st == OK ? "accepted" : status_message());
    }
}

/* A world whose rank 0 hears of two more, on this host. */
static char others[2][32];

static status gather(world *w, void *all, const void *mine, size_t n)
{
    gpu_place *place = all;
    assert_int_equal(n, sizeof *place);
    (void)w;
    for (int r = 0; r < 3; r++)
        memcpy(&place[r], mine, n);
    for (int r = 1; r < 3; r++)
        strcpy(place[r].bus, others[r - 1]);
    return OK;
}

static status bcast(world *w, void *bytes, size_t n, int root)
{
    (void)w;
    (void)bytes;
    (void)n;
    (void)root;
    return OK;
}

static status agree(world *w, status mine)
{
    (void)w;
    return mine;
}

static void test_a_gpu_each(void **state)
{
    (void)state;
    world w = {.size = 3, .local_size = 3, .gather = gather, .bcast = bcast, .agree = agree};
    bool all;
    strcpy(others[0], "0000:02:00.0");
    strcpy(others[1], "0000:03:00.0");
    assert_int_equal(transport_gpus(&all, &w, "0000:01:00.0"), OK);
    assert_true(all);
    assert_int_equal(transport_gpus(&all, &w, ""), OK);
    assert_false(all);
    assert_int_equal(transport_gpus(&all, &w, "0000:03:00.0"), OK);
    assert_false(all);
}

static void says(const transport_ask *a, const char *want)
{
    char text[600] = "";
    FILE *to = fmemopen(text, sizeof text, "w");
    transport_say(a, to);
    fclose(to);
    assert_string_equal(text, want);
}

static void test_says(void **state)
{
    (void)state;
    says(&(transport_ask){.transport = TRANSPORT_NCCL}, "");
    says(&(transport_ask){.transport = TRANSPORT_LSA, .settled = true}, "transport    lsa\n");
    says(&(transport_ask){.transport = TRANSPORT_NCCL, .settled = true, .against = "no window"},
         "transport    nccl; not lsa: no window\n");
}

/* Neither a rank alone nor CPUs are joined: there is nothing to choose. */
static void test_nothing_to_join(void **state)
{
    (void)state;
    transport_ask alone = {.ranks = 1, .cuda = true, .joins = true}, cpus = {.ranks = 4};
    nccl_comm *n;
    assert_int_equal(transport_join(&n, &alone, NULL, NULL, NULL), OK);
    assert_true(!n && !alone.settled && alone.transport == TRANSPORT_AUTO);
    assert_int_equal(transport_join(&n, &cpus, NULL, NULL, NULL), OK);
    assert_true(!n && !cpus.settled && cpus.transport == TRANSPORT_AUTO);
}

#ifdef EPOCH_NCCL
/* Rows that the kernels cannot carry are refused before anything is taken, and in the same way on every rank. */
static void test_rows_against_lsa(void **state)
{
    (void)state;
    const struct {
        int32_t hidden, top_k, ranks;
        const char *says;
    } cases[] = {{132, 8, 2, "the hidden size is 132 and top_k 8, want a multiple of 8 and at most 32"},
                 {128, 33, 2, "the hidden size is 128 and top_k 33, want a multiple of 8 and at most 32"},
                 {128, 8, 65, "65 ranks, at most 64"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sum_tree *t;
        assert_int_equal(sum_tree_open(&t, 128, 1, cases[i].ranks), OK);
        lane_rule r = {.hidden = cases[i].hidden, .top_k = cases[i].top_k, .tree = t, .payload = BF16};
        assert_int_equal(lane_lsa_try(&r, NULL, NULL, NULL), BAD_INPUT);
        assert_string_equal(status_message(), cases[i].says);
        sum_tree_close(t);
    }
}
#endif

/* Refused before anything is opened: the experts of a GPU count edges in 32 bits. */
static void test_too_many_rows(void **state)
{
    (void)state;
    const transport_ask ask = {.transport = TRANSPORT_LSA, .ranks = 8, .cuda = true, .joins = true};
    lane_rule r = {.hidden = 4096, .top_k = 8};
    lane *l;
    sum_tree *t;
    assert_int_equal(sum_tree_open(&t, 256, 8, 8), OK);
    r.tree = t;
    r.max_rows = 131072;
    assert_int_equal(transport_open(&l, &ask, &r, NULL, NULL, NULL), BAD_INPUT);
    assert_null(l);
    assert_non_null(strstr(status_message(), "131072 rows from each of 8 ranks are more than the experts can take at "
                                             "once: lower --batch or --prefill-blocks"));
    sum_tree_close(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_choices), cmocka_unit_test(test_a_gpu_each),
                                       cmocka_unit_test(test_too_many_rows), cmocka_unit_test(test_says),
                                       cmocka_unit_test(test_nothing_to_join),
#ifdef EPOCH_NCCL
                                       cmocka_unit_test(test_rows_against_lsa),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
