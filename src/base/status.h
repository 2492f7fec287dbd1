/* The one error convention. Whatever can fail returns a status and gives its result through an out-parameter.
 * A failing function writes one message (what was found, what was wanted, the mend); callers pass the status on
 * with TRY and leave through one `out:` label. Only main.c prints a message and ends the process. */
#ifndef EPOCH_BASE_STATUS_H
#define EPOCH_BASE_STATUS_H

#include <stddef.h>

/* The values are the program's exit codes (README.md). */
typedef enum status {
    OK = 0,
    ROWS_FAILED = 1, /* everything ran, some rows were recorded as failed */
    BAD_INPUT = 2,   /* usage, a file or a setting: nothing was started */
    FAILED = 3,      /* broke while running; finished rows are safe */
    STOPPED = 75     /* stopped on request with work left */
} status;

#if defined(__GNUC__)
#define EPOCH_PRINTF(a, b) __attribute__((format(printf, a, b)))
#else
#define EPOCH_PRINTF(a, b)
#endif

/* Stores the message of this thread's newest failure, with " [file:line]" behind it; returns `code`. */
status status_fail(status code, const char *file, int line, const char *format, ...) EPOCH_PRINTF(4, 5);

/* The newest failure's message on this thread; "" before any. Owned by the module; valid until the next failure. */
const char *status_message(void);

/* Replaces the newest failure's message, cut to what fits (used where ranks join their messages). */
void status_message_set(const char *text);

#define STATUS_MESSAGE_BYTES 4096

#define FAIL(code, ...)                                          \
    do {                                                         \
        st = status_fail((code), __FILE__, __LINE__, __VA_ARGS__); \
        goto out;                                                \
    } while (0)

#define TRY(call)            \
    do {                     \
        st = (call);         \
        if (st != OK)        \
            goto out;        \
    } while (0)

#endif
