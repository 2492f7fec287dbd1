/* A session that works under other settings names the rows of earlier sessions that still hold: sSSSS.keep in the
 * folder. It is settled before the session's first journal, so a session has all of it or none. */
#include "results/private.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { KEEP_MOST = 1 << 30 }; /* bytes of the file */

static status keep_path(char *file, size_t bytes, const char *dir, int session)
{
    status st = OK;
    if ((size_t)snprintf(file, bytes, "%s/s%04d.keep", dir, session) >= bytes)
        FAIL(BAD_INPUT, "%s/s%04d.keep: the path is too long", dir, session);
out:
    return st;
}

status results_keep(const char *dir, int session, const result_kept *kept, int64_t count)
{
    status st = OK;
    char file[PATH_MAX], tmp[PATH_MAX];
    json_t *rows = NULL;
    TRY(keep_path(file, sizeof file, dir, session));
    if (!kept) {
        if (unlink(file) < 0 && errno != ENOENT)
            FAIL(FAILED, "%s: cannot be removed: %s", file, strerror(errno));
        return folder_sync(dir);
    }
    if ((size_t)snprintf(tmp, sizeof tmp, "%s/keep.tmp", dir) >= sizeof tmp)
        FAIL(BAD_INPUT, "%s/keep.tmp: the path is too long", dir);
    rows = json_array();
    for (int64_t i = 0; i < count; i++) {
        const result_kept *k = &kept[i];
        if (json_array_append_new(rows, json_pack("[s, s, i, I, I]", k->dataset, k->id, (int)k->turn,
                                                  (json_int_t)k->order, (json_int_t)k->source_line)) < 0)
            FAIL(FAILED, "no memory for a list of %lld rows", (long long)count);
    }
    if (json_dump_file(rows, tmp, JSON_COMPACT) < 0)
        FAIL(FAILED, "%s: cannot be written: %s", tmp, strerror(errno));
    TRY(file_settle(tmp, file));
out:
    json_decref(rows);
    return st;
}

status results_drop(results_state *s, const char *dir, int session)
{
    status st = OK;
    char file[PATH_MAX];
    results_index *x = s->index;
    index_row *row = NULL;
    int64_t rows = 0;
    json_t *list = NULL;
    TRY(keep_path(file, sizeof file, dir, session));
    if (access(file, F_OK) < 0)
        goto out;
    TRY(json_file(&list, file, KEEP_MOST));
    row = calloc((size_t)x->rows + 1, sizeof *row);
    if (!row)
        FAIL(FAILED, "no memory for an index of %lld rows", (long long)x->rows);
    s->done = s->failed = 0;
    for (size_t i = 0; i < json_array_size(list) && rows < x->rows; i++) {
        const char *dataset, *id;
        int turn;
        json_int_t order, line;
        if (json_unpack(json_array_get(list, i), "[s, s, i, I, I]", &dataset, &id, &turn, &order, &line) < 0)
            FAIL(BAD_INPUT, "%s: entry %zu is no row; use the program that wrote it", file, i);
        const index_row *had = index_find(x, dataset, id, turn);
        if (!had) /* lost since: it will be done again */
            continue;
        row[rows] = *had;
        row[rows].order = order;
        row[rows++].source_line = line;
        s->failed += had->failed;
        s->done += !had->failed;
    }
    free(x->row);
    x->row = row;
    row = NULL;
    x->room = x->rows;
    x->rows = rows;
    index_fill(x);
out:
    free(row);
    json_decref(list);
    return st;
}
