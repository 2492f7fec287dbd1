/* The sandbox: verdicts, and programs that try to get out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "results/sandbox.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static sandbox *box;

static int open_box(void **state)
{
    (void)state;
    sandbox_rule rule = {.jobs = 4, .cpu_seconds = 1, .wall_seconds = 2};
    status st = sandbox_open(&box, &rule);
    printf("# %s\n", st == OK ? sandbox_describe(box) : status_message());
    return st;
}

static int close_box(void **state)
{
    (void)state;
    sandbox_close(box);
    return 0;
}

static sandbox_task run(const char *program)
{
    sandbox_task t = {.program = program};
    assert_int_equal(sandbox_run(box, &t, 1), OK);
    return t;
}

static void check(const char *program, sandbox_verdict verdict, const char *message)
{
    sandbox_task t = run(program);
    if (t.verdict != verdict || !strstr(t.message, message))
        fail_msg("%s\ngave %d, \"%s\"; want %d, \"%s\"", program, (int)t.verdict, t.message, (int)verdict, message);
}

static void test_verdicts(void **state)
{
    (void)state;
    check("", SANDBOX_PASSED, "passed");
    check("x = 1\nassert x == 1", SANDBOX_PASSED, "passed");
    check("assert 1 == 2, 'not so'", SANDBOX_FAILED, "AssertionError: not so");
    check("def f(:", SANDBOX_FAILED, "SyntaxError");
    check("raise ValueError('a\\nb')", SANDBOX_FAILED, "ValueError: a b");
    check("input()", SANDBOX_FAILED, "EOFError");
    check("print('x' * 1000000)\nimport sys\nsys.stderr.write('y' * 1000000)", SANDBOX_PASSED, "passed");
    check("assert __name__ != '__main__'", SANDBOX_PASSED, "passed"); /* as under the official harness */
}

static void test_leaving_early_is_no_pass(void **state)
{
    (void)state;
    check("import sys\nsys.exit(0)", SANDBOX_FAILED, "SystemExit");
    check("import os\nos._exit(0)", SANDBOX_KILLED, "exit code 0 before its end");
    check("import os\nos.write(3, b'passed')\nos._exit(0)", SANDBOX_KILLED, "before its end");
    assert_int_not_equal(run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\nassert False").verdict,
                         SANDBOX_PASSED);
    check("import ctypes\nctypes.string_at(0)", SANDBOX_KILLED, "signal 11");
}

static void test_endless_loops(void **state)
{
    (void)state;
    sandbox_task t[3] = {{.program = "while True: pass"},
                         {.program = "import time\ntime.sleep(1000)"},
                         {.program =
                              "import signal\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
                              "    except OSError: pass\nwhile True: pass"}};
    assert_int_equal(sandbox_run(box, t, 3), OK);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(t[i].verdict, SANDBOX_TIMED_OUT);
        assert_string_equal(t[i].message, "timed out");
        assert_true(t[i].seconds < 10);
    }
    assert_true(t[1].seconds >= 1.9); /* by the clock: it used no CPU time */
}

static void test_memory_and_files(void **state)
{
    (void)state;
    check("x = bytearray(10 << 30)", SANDBOX_FAILED, "MemoryError");
    check("x = []\nwhile True: x.append(bytes(64 << 20))", SANDBOX_FAILED, "MemoryError");
    check("f = open('big', 'wb')\nfor i in range(1000): f.write(bytes(1 << 20))", SANDBOX_FAILED, "OSError");
    check("import os\nf = [os.open('/dev/null', 0) for i in range(1000)]", SANDBOX_FAILED, "Too many open files");
    check("open('small', 'w').write('x')\nassert open('small').read() == 'x'", SANDBOX_PASSED, "");
    check("import os\nassert os.listdir('.') == []", SANDBOX_PASSED, ""); /* nothing of the program before */
}

static int processes_called(const char *mark)
{
    int n = 0;
    DIR *d = opendir("/proc");
    for (struct dirent *e; d && (e = readdir(d));) {
        char path[300], line[2048];
        snprintf(path, sizeof path, "/proc/%s/cmdline", e->d_name);
        FILE *f = e->d_name[0] >= '0' && e->d_name[0] <= '9' ? fopen(path, "r") : NULL;
        if (!f)
            continue;
        size_t got = fread(line, 1, sizeof line - 1, f);
        for (size_t i = 0; i < got; i++)
            line[i] = line[i] ? line[i] : ' ';
        line[got] = 0;
        n += strstr(line, mark) != NULL;
        fclose(f);
    }
    if (d)
        closedir(d);
    return n;
}

static void test_fork_bomb(void **state)
{
    (void)state;
    sandbox_task t[4] = {{.program = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"},
                         {.program = "import time\ntime.sleep(0.3)\nassert True"},
                         {.program = "import os\nfor i in range(1000): os.fork()"},
                         {.program = "assert sum(range(10)) == 45"}};
    assert_int_equal(sandbox_run(box, t, 4), OK);
    assert_int_equal(t[0].verdict, SANDBOX_TIMED_OUT);
    assert_int_equal(t[1].verdict, SANDBOX_PASSED); /* neighbours do not feel it */
    assert_int_not_equal(t[2].verdict, SANDBOX_PASSED);
    assert_int_equal(t[3].verdict, SANDBOX_PASSED);
    assert_int_equal(processes_called("nonce, program"), 0);
}

static void test_leftovers_die(void **state)
{
    (void)state;
    check("import os, time\n"
          "if os.fork() == 0:\n"
          "    os.setsid()\n"
          "    if os.fork() == 0:\n"
          "        time.sleep(600)\n"
          "    os._exit(0)\n",
          SANDBOX_PASSED, "");
    assert_int_equal(processes_called("nonce, program"), 0);
}

static void test_files_survive(void **state)
{
    (void)state;
    char path[] = "/tmp/epoch-keep-XXXXXX", file[64], program[1024];
    assert_non_null(mkdtemp(path));
    assert_int_equal(chmod(path, 0777), 0);
    snprintf(file, sizeof file, "%s/precious", path);
    FILE *f = fopen(file, "w");
    fputs("kept", f);
    fclose(f);
    assert_int_equal(chmod(file, 0666), 0);
    snprintf(
        program, sizeof program,
        "import os, shutil\n"
        "tries = [lambda: os.remove('%s'), lambda: open('%s', 'w'), lambda: os.truncate('%s', 0),\n"
        "         lambda: shutil.rmtree('%s'), lambda: os.rename('%s', '%s2'), lambda: open('/tmp/epoch-made', 'w')]\n"
        "for t in tries:\n"
        "    try: t()\n"
        "    except OSError: continue\n"
        "    raise SystemExit('a write went through')\n"
        "shutil.rmtree('/', ignore_errors=True)\n",
        file, file, file, path, file, file);
    sandbox_task t = run(program);
    struct stat info;
    assert_int_equal(stat(file, &info), 0);
    assert_int_equal(info.st_size, 4);
    if (strstr(sandbox_describe(box), "read-only file system"))
        assert_null(strstr(t.message, "a write went through"));
    unlink(file);
    rmdir(path);
}

static void test_network(void **state)
{
    (void)state;
    if (!strstr(sandbox_describe(box), "no network")) {
        print_message("skipped: this machine does not let the sandbox shut off the network\n");
        return;
    }
    check("import socket\n"
          "s = socket.socket()\n"
          "s.settimeout(1)\n"
          "s.connect(('127.0.0.1', 22))\n",
          SANDBOX_FAILED, "unreachable");
}

static void test_environment(void **state)
{
    (void)state;
    setenv("EPOCH_SECRET", "x", 1);
    check("import os\nassert 'EPOCH_SECRET' not in os.environ", SANDBOX_PASSED, "");
    check("import os\nassert sorted(int(f) for f in os.listdir('/proc/self/fd'))[:4] == [0, 1, 2, 3]\n"
          "assert len(os.listdir('/proc/self/fd')) <= 5",
          SANDBOX_PASSED, "");
    if (strstr(sandbox_describe(box), "an unprivileged user"))
        check("import os\nassert os.getuid() == 65534 and os.getgroups() == []\n"
              "try: os.setuid(0)\nexcept OSError: pass\nelse: assert False",
              SANDBOX_PASSED, "");
}

static void test_no_python(void **state)
{
    (void)state;
    sandbox *s;
    sandbox_rule rule = {.python = "/nonexistent/python3"};
    assert_int_equal(sandbox_open(&s, &rule), BAD_INPUT);
    assert_non_null(strstr(status_message(), "/nonexistent/python3 does not run in the sandbox"));
    char *path = strdup(getenv("PATH"));
    setenv("PATH", "/nonexistent", 1);
    assert_int_equal(sandbox_open(&s, &(sandbox_rule){0}), BAD_INPUT);
    assert_non_null(strstr(status_message(), "no python3 in PATH"));
    setenv("PATH", path, 1);
    free(path);
    setenv("TMPDIR", "/nonexistent", 1);
    assert_int_equal(sandbox_open(&s, &(sandbox_rule){0}), FAILED);
    assert_non_null(strstr(status_message(), "TMPDIR names its place"));
    unsetenv("TMPDIR");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_verdicts),      cmocka_unit_test(test_leaving_early_is_no_pass),
        cmocka_unit_test(test_endless_loops), cmocka_unit_test(test_memory_and_files),
        cmocka_unit_test(test_fork_bomb),     cmocka_unit_test(test_leftovers_die),
        cmocka_unit_test(test_files_survive), cmocka_unit_test(test_network),
        cmocka_unit_test(test_environment),   cmocka_unit_test(test_no_python),
    };
    return cmocka_run_group_tests(tests, open_box, close_box);
}
