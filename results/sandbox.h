/* Runs programs that a model wrote, where they can do no harm. Each gets its own session, process namespace, empty
 * temporary directory and limits; no network, a read-only file system and an unprivileged user as far as the machine
 * permits, and sandbox_describe says how far that was. It is a fence around careless programs, not a defence against
 * one that attacks the kernel. */
#ifndef EPOCH_RESULTS_SANDBOX_H
#define EPOCH_RESULTS_SANDBOX_H

#include "src/base/status.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct sandbox_rule { /* zero: the default in parentheses */
    const char *python;       /* interpreter (the first python3 in PATH that runs inside the sandbox) */
    int jobs;                 /* programs at once (1) */
    double cpu_seconds;       /* of one program (3, as the official harness gives) */
    double wall_seconds;      /* (4 times cpu_seconds) */
    size_t memory_bytes;      /* address space of a process (1 GiB) */
    size_t file_bytes;        /* largest file it may write (16 MiB) */
    bool unprotected;         /* run even where the user's own files cannot be protected */
} sandbox_rule;

typedef enum sandbox_verdict { SANDBOX_PASSED, SANDBOX_FAILED, SANDBOX_TIMED_OUT, SANDBOX_KILLED } sandbox_verdict;

typedef struct sandbox_task {
    const char *program;     /* Python source, borrowed */
    sandbox_verdict verdict; /* PASSED: it ran to its end; FAILED: it raised; KILLED: a signal or an early exit */
    char message[200];       /* "passed", "AssertionError: ...", "timed out", "killed by signal 11" */
    double seconds;          /* wall time */
} sandbox_task;

typedef struct sandbox sandbox;

/* Tries the interpreters and finds out what the machine permits. BAD_INPUT: no python3 runs in the sandbox (the message
 * says why of each), or the user's files cannot be protected and the rule does not say `unprotected`. */
status sandbox_open(sandbox **out, const sandbox_rule *rule);
void sandbox_close(sandbox *s); /* accepts NULL; removes the temporary directories */

/* One line for people: interpreter, user, what is shut off and what could not be. Owned by s. */
const char *sandbox_describe(const sandbox *s);

/* Runs `count` programs, `jobs` at a time, and fills in their verdicts. No process outlives the call.
 * FAILED: the sandbox itself broke (no process, no temporary directory). */
status sandbox_run(sandbox *s, sandbox_task *task, int count);

#endif
