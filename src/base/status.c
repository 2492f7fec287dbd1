#include "src/base/status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char message[STATUS_MESSAGE_BYTES];

status status_fail(status code, const char *file, int line, const char *format, ...)
{
    /* The arguments may point into the present message (a caller adding context), so build beside it. */
    char text[STATUS_MESSAGE_BYTES];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (n < 0)
        n = 0;
    if ((size_t)n >= sizeof text)
        n = (int)sizeof text - 1;
    snprintf(text + n, sizeof text - (size_t)n, " [%s:%d]", file, line);
    status_message_set(text);
    return code;
}

const char *status_message(void)
{
    return message;
}

void status_message_set(const char *text)
{
    snprintf(message, sizeof message, "%s", text);
}
