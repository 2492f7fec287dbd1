/* What must hold before GPUs are joined: judged without one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "mpi/gpu_start.h"

#include <string.h>

static void test_versions(void **state)
{
    (void)state;
    assert_int_equal(gpu_versions_check(22803, 22803), OK);
    assert_int_equal(gpu_versions_check(22809, 22803), BAD_INPUT);
    assert_non_null(strstr(status_message(), "the headers of NCCL 2.28.9, the library loaded here is 2.28.3: build it "
                                             "on this machine, or put NCCL 2.28.9 first in LD_LIBRARY_PATH"));
    assert_int_equal(gpu_versions_check(22803, 22900), BAD_INPUT);
}

static void test_places(void **state)
{
    (void)state;
    gpu_place a[4] = {{"node1 b1", "0000:19:00.0"},
                      {"node1 b1", "0000:3B:00.0"},
                      {"node2 b2", "0000:19:00.0"},
                      {"node2 b2", "0000:3B:00.0"}};
    assert_int_equal(gpu_places_check(a, 4), OK);
    assert_int_equal(gpu_places_check(a, 1), OK);
    strcpy(a[3].bus, a[2].bus);
    assert_int_equal(gpu_places_check(a, 4), BAD_INPUT);
    assert_non_null(strstr(status_message(), "ranks 2 and 3 of host node2 both have the GPU at PCI bus 0000:19:00.0: "
                                             "start one rank a GPU"));
    strcpy(a[3].host, "node2 b3"); /* another machine of that name */
    assert_int_equal(gpu_places_check(a, 4), OK);
}

static void test_host(void **state)
{
    (void)state;
    gpu_place a = {"", ""}, b = {"", ""};
    gpu_host(&a);
    gpu_host(&b);
    assert_true(strcspn(a.host, " ") > 0);
    assert_string_equal(a.host, b.host);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_versions), cmocka_unit_test(test_places),
                                       cmocka_unit_test(test_host)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
