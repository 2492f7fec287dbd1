/* unshare, memfd_create, setgroups and pipe2 are Linux's own */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "results/sandbox.h"

#include "src/base/clock.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <grp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { JOBS = 64, PROCESSES = 16, OPEN_FILES = 64, VERDICT_FD = 3, NOBODY = 65534 };

enum guard {                      /* what a run was fenced with */
             GUARD_USER = 1,      /* an unprivileged user of its own */
             GUARD_NETWORK = 2,   /* no network */
             GUARD_PROCESSES = 4, /* sees and signals its own processes only; all die with its first */
             GUARD_FILES = 8      /* writes nowhere but in its temporary directory */
};

typedef struct report { /* from a supervisor to us, in one write */
    int verdict, guards;
    double seconds;
    char message[200];
} report;

typedef struct job {
    pid_t supervisor; /* 0: idle */
    int pipe;
    sandbox_task *task;
    char dir[288]; /* its temporary directory */
} job;

struct sandbox {
    sandbox_rule rule;
    char *python;
    uid_t uid; /* whom the programs run as; ours where nobody else can be had */
    gid_t gid;
    int guards, runs;
    char describe[600];
    char base[256];
    job job[JOBS];
};

/* Reads "NONCE\nPROGRAM" from stdin, runs the program in an empty namespace as the official harness does, and writes
 * "NONCE" (it came to its end) or "!" and the exception. Nothing but this line decides, so leaving early is no pass. */
static const char driver[] = "import os, sys\n"
                             "nonce, program = sys.stdin.buffer.read().split(b'\\n', 1)\n"
                             "os.set_inheritable(3, False)\n"
                             "try:\n"
                             "    exec(compile(program.decode(), '<answer>', 'exec'), {})\n"
                             "    said = nonce\n"
                             "except BaseException as e:\n"
                             "    said = ('!%s: %s' % (type(e).__name__, e)).encode('utf-8', 'replace')[:180]\n"
                             "os.write(3, said)\n"
                             "os._exit(0)\n";

/* ---- the temporary directories */

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *where)
{
    (void)info;
    (void)where;
    return type == FTW_DP || type == FTW_DNR ? rmdir(path) : unlink(path);
}

static int open_up(const char *path, const struct stat *info, int type, struct FTW *where)
{
    (void)info;
    (void)where;
    return type == FTW_D || type == FTW_DNR ? chmod(path, 0700) : 0;
}

/* Removes a tree that a program left, directories it closed to its owner included. */
static void remove_tree(const char *path)
{
    for (int i = 0; i < 8 && nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS) != 0 && errno != ENOENT; i++)
        nftw(path, open_up, 16, FTW_PHYS);
}

static status make_dir(const sandbox *s, const job *j)
{
    status st = OK;
    if (mkdir(j->dir, 0700) != 0 || (s->uid != geteuid() && chown(j->dir, s->uid, s->gid) != 0))
        FAIL(FAILED, "%s: %s (wanted: an empty directory for a program under test)", j->dir, strerror(errno));
out:
    return st;
}

/* ---- inside the supervisor: fences. Each returns whether it stands */

static bool write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool good = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    return close(fd) == 0 && good;
}

static bool become(const sandbox *s)
{
    return setgroups(0, NULL) == 0 && setresgid(s->gid, s->gid, s->gid) == 0 && setresuid(s->uid, s->uid, s->uid) == 0;
}

/* A user namespace in which this user keeps its number and may make the other namespaces. */
static bool own_user_namespace(void)
{
    char map[64];
    uid_t uid = geteuid();
    gid_t gid = getegid();
    prctl(PR_SET_DUMPABLE, 1); /* else /proc/self belongs to root after a change of user */
    if (unshare(CLONE_NEWUSER) != 0)
        return false;
    write_file("/proc/self/setgroups", "deny");
    snprintf(map, sizeof map, "%u %u 1", (unsigned)uid, (unsigned)uid);
    if (!write_file("/proc/self/uid_map", map))
        return false;
    snprintf(map, sizeof map, "%u %u 1", (unsigned)gid, (unsigned)gid);
    return write_file("/proc/self/gid_map", map);
}

/* Makes every mount read-only but for a small memory file system on the temporary directory. */
static bool read_only_mounts(const sandbox *s, const char *dir)
{
#ifdef SYS_mount_setattr
    struct {
        uint64_t set, clear, propagation, userns;
    } read_only = {.set = 1 /* MOUNT_ATTR_RDONLY */ | 2 /* MOUNT_ATTR_NOSUID */};
    char options[96];
    if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0)
        return false;
    snprintf(options, sizeof options, "size=64m,mode=0700,uid=%u,gid=%u", (unsigned)s->uid, (unsigned)s->gid);
    if (syscall(SYS_mount_setattr, AT_FDCWD, "/", 0x8000 /* AT_RECURSIVE */, &read_only, sizeof read_only) != 0)
        return false;
    return mount("tmpfs", dir, "tmpfs", MS_NOSUID | MS_NODEV, options) == 0;
#else
    (void)s;
    (void)dir;
    return false;
#endif
}

/* The same without a mount: Landlock refuses every write that is not beneath the temporary directory. Before its third
 * version it let truncate() pass. */
static bool landlocked(const char *dir)
{
#ifdef SYS_landlock_create_ruleset
    const uint64_t writes = 2 | 0x1ff0 | 0x4000; /* write a file; remove and make things of every kind; truncate */
    struct {
        uint64_t handled;
    } rules = {writes};
    struct {
        uint64_t allowed;
        int32_t parent;
    } beneath = {writes, open(dir, O_PATH | O_CLOEXEC)};
    bool good = false;
    int set = -1;
    if (syscall(SYS_landlock_create_ruleset, NULL, 0, 1 /* which version? */) >= 3)
        set = (int)syscall(SYS_landlock_create_ruleset, &rules, sizeof rules, 0);
    if (set >= 0 && beneath.parent >= 0)
        good = syscall(SYS_landlock_add_rule, set, 1 /* a path and what is beneath */, &beneath, 0) == 0 &&
               prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && syscall(SYS_landlock_restrict_self, set, 0) == 0;
    if (set >= 0)
        close(set);
    if (beneath.parent >= 0)
        close(beneath.parent);
    return good;
#else
    (void)dir;
    return false;
#endif
}

static int put_up_fences(const sandbox *s, const char *dir)
{
    int guards = 0;
    if (unshare(CLONE_NEWNET) == 0) {
        guards |= GUARD_NETWORK;
    } else { /* not privileged enough: a namespace of its own gives the privilege, and the user goes first */
        if (s->uid != geteuid() && become(s))
            guards |= GUARD_USER;
        if (own_user_namespace() && unshare(CLONE_NEWNET) == 0)
            guards |= GUARD_NETWORK;
    }
    unshare(CLONE_NEWIPC);
    if (read_only_mounts(s, dir))
        guards |= GUARD_FILES;
    if (unshare(CLONE_NEWPID) == 0)
        guards |= GUARD_PROCESSES;
    return guards;
}

/* ---- inside the program's process */

static bool limit(int what, rlim_t soft, rlim_t hard)
{
    struct rlimit l = {soft, hard};
    return setrlimit(what, &l) == 0;
}

static void close_from(int first)
{
#ifdef SYS_close_range
    if (syscall(SYS_close_range, first, ~0U, 0) == 0)
        return;
#endif
    long last = sysconf(_SC_OPEN_MAX);
    for (int fd = first; fd < (last < 65536 ? last : 65536); fd++)
        close(fd);
}

static _Noreturn void run_program(const sandbox *s, const char *dir, int input, int verdict, int guards, int jobs)
{
    char home[304];
    char *argv[] = {s->python, "-I", "-B", "-c", (char *)driver, NULL};
    char *env[] = {"PATH=/usr/bin:/bin", "LC_ALL=C.UTF-8", "OPENBLAS_NUM_THREADS=1", home, NULL};
    const char *step = "its standard streams";
    int say = verdict;
    snprintf(home, sizeof home, "HOME=%s", dir);
    int null = open("/dev/null", O_WRONLY);
    /* above every number that is about to be overwritten */
    int in = fcntl(input, F_DUPFD, 10), out = fcntl(verdict, F_DUPFD, 10);
    if (null < 0 || in < 0 || out < 0 || dup2(in, 0) < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0 ||
        dup2(out, VERDICT_FD) < 0)
        goto broken;
    say = VERDICT_FD;
    close_from(VERDICT_FD + 1);
    step = "a session of its own";
    if (setsid() < 0)
        goto broken;
    if (guards & GUARD_PROCESSES && guards & GUARD_FILES) /* the mounts are ours to change */
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, NULL);
    step = "its directory";
    umask(077);
    if (chdir(dir) != 0)
        goto broken;
    step = "its user";
    if (geteuid() != s->uid) {
        if (!become(s))
            goto broken;
        guards |= GUARD_USER;
    } else if (geteuid() == 0 && (prctl(PR_GET_SECUREBITS) & 3) != 3 && prctl(PR_SET_SECUREBITS, 3) != 0) {
        /* 3: being root gives no power, for good */
        goto broken;
    }
    if (!(guards & GUARD_FILES) && landlocked(dir))
        guards |= GUARD_FILES;
    step = "its limits";
    rlim_t cpu = (rlim_t)(s->rule.cpu_seconds + 0.999);
    /* NPROC comes after the change of user, so that neighbours of the same user cannot make exec fail */
    if (!limit(RLIMIT_CPU, cpu, cpu) || !limit(RLIMIT_FSIZE, s->rule.file_bytes, s->rule.file_bytes) ||
        !limit(RLIMIT_CORE, 0, 0) || !limit(RLIMIT_NPROC, PROCESSES + (rlim_t)jobs, PROCESSES + (rlim_t)jobs) ||
        !limit(RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES))
        goto broken;
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    for (int sig = 1; sig < NSIG; sig++)
        signal(sig, SIG_DFL);
    dprintf(say, "%d\n", guards);
    /* last: a build with sanitizers lives in more memory than this */
    if (!limit(RLIMIT_AS, s->rule.memory_bytes, s->rule.memory_bytes))
        goto broken;
    step = "the interpreter";
    execve(s->python, argv, env);
broken:
    dprintf(say, "?%s: %s", step, strerror(errno));
    _exit(1);
}

/* ---- the supervisor: one process a program; waits, ends, cleans up, reports */

/* Kills whatever a program left behind. As their subreaper we inherit the orphans, so the children of this process are
 * all there is; some may fork while we look, hence the rounds. */
static void end_leftovers(void)
{
    for (int round = 0; round < 1000; round++) {
        pid_t p;
        while ((p = waitpid(-1, NULL, WNOHANG)) > 0)
            ;
        if (p < 0)
            return;
        char path[64], list[4096];
        snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t n = fd < 0 ? -1 : read(fd, list, sizeof list - 1);
        if (fd >= 0)
            close(fd);
        if (n > 0) {
            list[n] = 0;
            for (char *at = list, *end; *at; at = end + (*end != 0)) {
                long child = strtol(at, &end, 10);
                if (end == at)
                    break;
                kill((pid_t)child, SIGKILL);
            }
        }
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

static void read_verdict(report *r, const char *said, const char *nonce, int wait_status, bool late)
{
    char *rest = NULL;
    r->guards = (int)strtol(said, &rest, 10);
    rest += *rest == '\n';
    if (*rest == '?') {
        r->verdict = SANDBOX_KILLED;
        snprintf(r->message, sizeof r->message, "the sandbox could not set up %s", rest + 1);
    } else if (late || (WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGXCPU)) {
        r->verdict = SANDBOX_TIMED_OUT;
        snprintf(r->message, sizeof r->message, "timed out");
    } else if (strcmp(rest, nonce) == 0) {
        r->verdict = SANDBOX_PASSED;
        snprintf(r->message, sizeof r->message, "passed");
    } else if (*rest == '!') {
        r->verdict = SANDBOX_FAILED;
        snprintf(r->message, sizeof r->message, "%s", rest + 1);
        for (char *c = r->message; *c; c++)
            if (iscntrl((unsigned char)*c))
                *c = ' ';
    } else if (WIFSIGNALED(wait_status)) {
        r->verdict = SANDBOX_KILLED;
        snprintf(r->message, sizeof r->message, "killed by signal %d", WTERMSIG(wait_status));
    } else {
        r->verdict = SANDBOX_KILLED;
        snprintf(r->message, sizeof r->message, "left with exit code %d before its end", WEXITSTATUS(wait_status));
    }
}

static _Noreturn void supervise(const sandbox *s, const job *j, int input, int report_fd, const char *nonce)
{
    report r = {.verdict = SANDBOX_KILLED};
    int said[2] = {-1, -1}, wait_status = 0;
    sigset_t child_ends;
    sigemptyset(&child_ends);
    sigaddset(&child_ends, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child_ends, NULL);
    signal(SIGCHLD, SIG_DFL);
    setsid();
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    int guards = put_up_fences(s, j->dir);
    prctl(PR_SET_PDEATHSIG, SIGKILL); /* after put_up_fences: a change of user clears it */
    double start = clock_seconds();
    pid_t program = pipe2(said, O_CLOEXEC | O_NONBLOCK) == 0 ? fork() : -1;
    if (program == 0)
        run_program(s, j->dir, input, said[1], guards, s->rule.jobs);
    if (program < 0) {
        snprintf(r.message, sizeof r.message, "the sandbox could not start a process: %s", strerror(errno));
    } else {
        bool ended = false;
        double left;
        while (!(ended = waitpid(program, &wait_status, WNOHANG) == program) &&
               (left = start + s->rule.wall_seconds - clock_seconds()) > 0) {
            struct timespec t = clock_span(left);
            sigtimedwait(&child_ends, NULL, &t);
        }
        r.seconds = clock_seconds() - start;
        kill(program, SIGKILL);
        kill(-program, SIGKILL);
        if (!ended)
            waitpid(program, &wait_status, 0);
        end_leftovers();
        char text[256];
        ssize_t n = read(said[0], text, sizeof text - 1);
        text[n > 0 ? n : 0] = 0;
        /* the limit on CPU time kills outright; it counts ticks, so the time used may come out as less */
        struct rusage used;
        getrusage(RUSAGE_CHILDREN, &used);
        double cpu = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                     1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
        bool spent = WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGKILL && cpu >= 0.5 * s->rule.cpu_seconds;
        read_verdict(&r, text, nonce, wait_status, !ended || spent);
    }
    ssize_t n = write(report_fd, &r, sizeof r);
    _exit(n == (ssize_t)sizeof r ? 0 : 1);
}

/* ---- ourselves */

static void make_nonce(char *out, size_t bytes)
{
    unsigned char random[8] = {0};
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (read(fd, random, sizeof random) < 0)
            random[0] = (unsigned char)getpid();
        close(fd);
    }
    int n = 0;
    for (size_t i = 0; i < sizeof random && (size_t)n + 3 < bytes; i++)
        n += snprintf(out + n, bytes - (size_t)n, "%02x", random[i]);
}

static status start_job(sandbox *s, job *j, sandbox_task *task)
{
    status st = OK;
    int ends[2] = {-1, -1};
    char nonce[24];
    int input = memfd_create("program", MFD_CLOEXEC);
    make_nonce(nonce, sizeof nonce);
    if (input < 0 || dprintf(input, "%s\n%s", nonce, task->program) < 0 || lseek(input, 0, SEEK_SET) != 0)
        FAIL(FAILED, "a program for the sandbox: %s (wanted: memory to hand it over in)", strerror(errno));
    snprintf(j->dir, sizeof j->dir, "%s/%d", s->base, s->runs++);
    TRY(make_dir(s, j));
    if (pipe2(ends, O_CLOEXEC) != 0)
        FAIL(FAILED, "the sandbox: no pipe: %s", strerror(errno));
    pid_t us = getpid(), p = fork();
    if (p == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != us)
            _exit(1);
        supervise(s, j, input, ends[1], nonce);
    }
    if (p < 0)
        FAIL(FAILED, "the sandbox: no process: %s", strerror(errno));
    j->supervisor = p;
    j->pipe = ends[0];
    j->task = task;
    ends[0] = -1;
out:
    if (input >= 0)
        close(input);
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0)
            close(ends[i]);
    return st;
}

static status end_job(sandbox *s, job *j)
{
    status st = OK;
    report r;
    ssize_t n;
    do
        n = read(j->pipe, &r, sizeof r);
    while (n < 0 && errno == EINTR);
    if (n != (ssize_t)sizeof r)
        kill(j->supervisor, SIGKILL);
    close(j->pipe);
    while (waitpid(j->supervisor, NULL, 0) < 0 && errno == EINTR)
        ;
    j->supervisor = 0;
    remove_tree(j->dir);
    if (n != (ssize_t)sizeof r)
        FAIL(FAILED, "the sandbox: a supervisor ended without a verdict");
    j->task->verdict = (sandbox_verdict)r.verdict;
    j->task->seconds = r.seconds;
    snprintf(j->task->message, sizeof j->task->message, "%s", r.message);
    s->guards &= r.guards;
out:
    return st;
}

status sandbox_run(sandbox *s, sandbox_task *task, int count)
{
    status st = OK;
    int started = 0, running = 0;
    while (started < count || running > 0) {
        struct pollfd wait[JOBS];
        int of[JOBS], n = 0;
        for (int i = 0; i < s->rule.jobs; i++) {
            if (!s->job[i].supervisor && started < count) {
                TRY(start_job(s, s->job + i, task + started++));
                running++;
            }
            if (s->job[i].supervisor) {
                wait[n] = (struct pollfd){.fd = s->job[i].pipe, .events = POLLIN};
                of[n++] = i;
            }
        }
        if (poll(wait, (nfds_t)n, -1) < 0 && errno != EINTR)
            FAIL(FAILED, "the sandbox: poll: %s", strerror(errno));
        for (int i = 0; i < n; i++)
            if (wait[i].revents) {
                running--;
                TRY(end_job(s, s->job + of[i]));
            }
    }
out:
    for (int i = 0; st != OK && i < s->rule.jobs; i++)
        if (s->job[i].supervisor)
            end_job(s, s->job + i);
    return st;
}

/* Whether a child of ours could become s->uid: root may not, where a user namespace holds no one else. */
static bool can_become(const sandbox *s)
{
    int wait_status = 1;
    pid_t p = fork();
    if (p == 0)
        _exit(become(s) ? 0 : 1);
    while (p > 0 && waitpid(p, &wait_status, 0) < 0 && errno == EINTR)
        ;
    return p > 0 && WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == 0;
}

/* Tries s->python; *version is its version, or why it does not run. */
static status probe(sandbox *s, bool *runs, char *version, size_t bytes)
{
    status st = OK;
    static const char says[] = "SystemExit: ";
    sandbox_task t = {.program = "import sys\nraise SystemExit('%d.%d.%d' % sys.version_info[:3])\n"};
    s->guards = ~0;
    TRY(sandbox_run(s, &t, 1));
    *runs = strncmp(t.message, says, sizeof says - 1) == 0;
    snprintf(version, bytes, "%s", t.message + (*runs ? sizeof says - 1 : 0));
out:
    return st;
}

static status find_python(sandbox *s, char *version, size_t bytes)
{
    status st = OK;
    char tried[1024] = "", path[512];
    const char *path_list = getenv("PATH");
    bool runs = false;
    if (s->rule.python) {
        s->python = strdup(s->rule.python);
        if (!s->python)
            FAIL(FAILED, "the sandbox: out of memory");
        TRY(probe(s, &runs, version, bytes));
        if (!runs)
            FAIL(BAD_INPUT, "%s does not run in the sandbox (%s); name another with --python", s->python, version);
        goto out;
    }
    for (const char *dir = path_list ? path_list : "/usr/bin:/bin"; *dir && !runs;) {
        int n = (int)strcspn(dir, ":");
        snprintf(path, sizeof path, "%.*s/python3", n, dir);
        dir += n + (dir[n] == ':');
        if (n == 0 || access(path, X_OK) != 0)
            continue;
        free(s->python);
        s->python = strdup(path);
        if (!s->python)
            FAIL(FAILED, "the sandbox: out of memory");
        TRY(probe(s, &runs, version, bytes));
        size_t at = strlen(tried);
        if (!runs)
            snprintf(tried + at, sizeof tried - at, "%s%.300s: %.200s", at ? "; " : "", path, version);
    }
    if (!runs && !*tried)
        FAIL(BAD_INPUT, "no python3 in PATH, and HumanEval's tests are Python: install it or name one with --python");
    if (!runs)
        FAIL(BAD_INPUT, "no python3 of PATH runs in the sandbox (%s): name one with --python that every user may run",
             tried);
out:
    return st;
}

static void describe(sandbox *s, const char *version)
{
    static const struct {
        int guard;
        const char *stands, *missing;
    } guards[] = {{GUARD_USER, "an unprivileged user", "runs as this user"},
                  {GUARD_NETWORK, "no network", "the network is within reach"},
                  {GUARD_PROCESSES, "own process namespace", "sees other processes"},
                  {GUARD_FILES, "read-only file system", "may write where its user may"}};
    size_t at = (size_t)snprintf(s->describe, sizeof s->describe, "python %s (%s)", version, s->python);
    for (int stands = 1; stands >= 0; stands--) {
        const char *before = stands ? ", " : "; not fenced: ";
        for (size_t i = 0; i < sizeof guards / sizeof *guards && at < sizeof s->describe; i++)
            if (!!(s->guards & guards[i].guard) == stands) {
                at += (size_t)snprintf(s->describe + at, sizeof s->describe - at, "%s%s", before,
                                       stands ? guards[i].stands : guards[i].missing);
                before = ", ";
            }
    }
}

status sandbox_open(sandbox **out, const sandbox_rule *rule)
{
    status st = OK;
    char version[200] = "";
    const char *tmp = getenv("TMPDIR");
    sandbox *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s)
        FAIL(FAILED, "the sandbox: out of memory");
    s->rule = *rule;
    s->rule.jobs = rule->jobs < 1 ? 1 : rule->jobs > JOBS ? JOBS : rule->jobs;
    s->rule.cpu_seconds = rule->cpu_seconds > 0 ? rule->cpu_seconds : 3;
    s->rule.wall_seconds = rule->wall_seconds > 0 ? rule->wall_seconds : 4 * s->rule.cpu_seconds;
    s->rule.memory_bytes = rule->memory_bytes ? rule->memory_bytes : (size_t)1 << 30;
    s->rule.file_bytes = rule->file_bytes ? rule->file_bytes : (size_t)16 << 20;
    s->uid = NOBODY;
    s->gid = NOBODY;
    if (geteuid() != 0 || !can_become(s)) {
        s->uid = geteuid();
        s->gid = getegid();
    }
    snprintf(s->base, sizeof s->base, "%s/epoch-score-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(s->base) || chmod(s->base, 0711) != 0)
        FAIL(FAILED, "%s: %s (wanted: a temporary directory; TMPDIR names its place)", s->base, strerror(errno));
    TRY(find_python(s, version, sizeof version));
    if (!(s->guards & (GUARD_USER | GUARD_FILES)) && !rule->unprotected)
        FAIL(BAD_INPUT, "programs that a model wrote would run here with all your rights over your files (no user "
                        "namespaces, no Landlock): export them with --format humaneval and test them in a container, "
                        "or give --unprotected");
    describe(s, version);
    *out = s;
    s = NULL;
out:
    sandbox_close(s);
    return st;
}

void sandbox_close(sandbox *s)
{
    if (!s)
        return;
    if (*s->base)
        remove_tree(s->base);
    free(s->python);
    free(s);
}

const char *sandbox_describe(const sandbox *s)
{
    return s->describe;
}
