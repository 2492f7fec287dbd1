/* The journals of a run whose folder was removed, anew from its published file. */
#include "results/private.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    COMMIT_AT = 16 << 20, /* bytes that wait */
    RANKS_MOST = 1 << 20
};

static status each_journal(int *count, const char *dir, bool remove)
{
    status st = OK;
    char file[PATH_MAX];
    int session, rank;
    *count = 0;
    DIR *d = opendir(dir);
    if (!d)
        FAIL(BAD_INPUT, "%s: the folder cannot be read: %s", dir, strerror(errno));
    for (struct dirent *e; (e = readdir(d));) {
        const char *dot = strrchr(e->d_name, '.');
        bool is_journal = journal_of_name(e->d_name, &session, &rank);
        *count += is_journal;
        if (!remove || !(is_journal || (dot && strcmp(dot, ".keep") == 0)))
            continue;
        TRY(path_of(file, sizeof file, dir, e->d_name));
        if (unlink(file) < 0)
            FAIL(FAILED, "%s: cannot be removed: %s", file, strerror(errno));
    }
out:
    if (d)
        closedir(d);
    return st;
}

static status check_who(const results_file *f, const char *table, int64_t row, int32_t session, int32_t rank,
                        const char *file)
{
    status st = OK;
    int64_t at = 0;
    while (at < f->sessions && f->session[at].session != session)
        at++;
    if (at == f->sessions || session < 0 || rank < 0 || rank >= RANKS_MOST)
        FAIL(BAD_INPUT, "%s: %s row %lld: no session %d or no rank %d", file, table, (long long)row, session, rank);
out:
    return st;
}

static status check(const results_file *f, const char *file)
{
    status st = OK;
    for (int64_t i = 0; i < f->rows; i++)
        TRY(check_who(f, "outputs", i, f->output[i].session, f->output[i].rank, file));
    for (int64_t i = 0; i < f->ranks; i++)
        TRY(check_who(f, "phases", i, f->rank[i].session, f->rank[i].rank, file));
    for (int64_t i = 0; i < f->observations; i++)
        TRY(check_who(f, "observed", i, f->observation[i].session, f->observation[i].rank, file));
out:
    return st;
}

/* Ranks 0 to the greatest that the session names. */
static int32_t ranks_of(const results_file *f, const result_session *s)
{
    int32_t ranks = s->ranks;
#define NAMED(array, count)                                                 \
    for (int64_t i = 0; i < f->count; i++)                                  \
        if (f->array[i].session == s->session && f->array[i].rank >= ranks) \
            ranks = f->array[i].rank + 1;
    NAMED(output, rows)
    NAMED(rank, ranks)
    NAMED(observation, observations)
#undef NAMED
    return ranks;
}

static status write_session(const results_file *f, const result_session *s, const char *dir)
{
    status st = OK;
    int32_t ranks = ranks_of(f, s);
    journal **j = calloc((size_t)ranks + 1, sizeof *j);
    if (!j)
        FAIL(FAILED, "%s: no memory for %d journals", dir, ranks);
    if (strcmp(s->run, "{}") != 0)
        TRY(folder_run_keep(dir, s->run, s->session));
    for (int32_t r = 0; r < ranks; r++) /* the first to start and the last to end make the session's times */
        TRY(journal_open_at(&j[r], dir, r, s->session, r ? s->ended : s->started));
    for (int64_t i = 0; i < f->rows; i++) {
        const result_output *o = &f->output[i];
        if (o->session != s->session)
            continue;
        TRY(journal_row(j[o->rank], &o->row));
        if (journal_pending(j[o->rank]) > COMMIT_AT)
            TRY(journal_commit(j[o->rank], NULL));
    }
    for (int64_t i = 0; i < f->iterations; i++) {
        const result_trace *t = &f->iteration[i];
        if (t->session == s->session && t->rank >= 0 && t->rank < ranks)
            TRY(journal_iteration(j[t->rank], &t->at));
    }
    for (int64_t i = 0; i < f->audits; i++) {
        const result_audited *a = &f->audit[i];
        if (a->session == s->session && a->rank >= 0 && a->rank < ranks)
            TRY(journal_audit(j[a->rank], &a->at));
    }
    for (int64_t i = 0; i < f->observations; i++)
        if (f->observation[i].session == s->session)
            TRY(journal_observed(j[f->observation[i].rank], &f->observation[i].of));
    for (int64_t i = 0; i < f->ranks; i++)
        if (f->rank[i].session == s->session)
            TRY(journal_commit_at(j[f->rank[i].rank], &f->rank[i].phase, s->ended));
    for (int32_t r = 0; r < ranks; r++)
        TRY(journal_commit(j[r], NULL));
out:
    for (int32_t r = 0; j && r < ranks; r++)
        journal_close(j[r]);
    free(j);
    return st;
}

static status recovery_begin(const char *mark, const char *dir)
{
    status st = OK;
    int journals, fd = open(mark, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0)
        FAIL(FAILED, "%s: cannot be created: %s", mark, strerror(errno));
    TRY(folder_sync(dir));
    TRY(each_journal(&journals, dir, true));
out:
    if (fd >= 0)
        close(fd);
    return st;
}

status recovery_end(const char *dir)
{
    status st = OK;
    char mark[PATH_MAX];
    TRY(path_of(mark, sizeof mark, dir, RECOVERING));
    if (unlink(mark) == 0)
        TRY(folder_sync(dir));
    else if (errno != ENOENT)
        FAIL(FAILED, "%s: cannot be removed: %s", mark, strerror(errno));
out:
    return st;
}

status results_recover(const char *file, const char *dir)
{
    status st = OK;
    char mark[PATH_MAX];
    int journals;
    results_file *f = NULL;
    TRY(path_of(mark, sizeof mark, dir, RECOVERING));
    TRY(each_journal(&journals, dir, false));
    if (access(file, F_OK) != 0 || (journals && access(mark, F_OK) != 0))
        goto out;
    TRY(results_read(&f, file));
    TRY(check(f, file));
    TRY(recovery_begin(mark, dir));
    for (int64_t i = 0; i < f->sessions; i++)
        TRY(write_session(f, &f->session[i], dir));
    TRY(recovery_end(dir));
out:
    results_close(f);
    return st;
}
