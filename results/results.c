/* The folder of a run: its lock, its sessions, and what its journals hold. */
#define _GNU_SOURCE /* F_OFD_*: locks that belong to an open file, not to a process */
#include "results/private.h"
#include "src/base/clock.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { RUN_JSON_MOST = 64 << 20 };

/* ---- files */

status path_of(char *file, size_t bytes, const char *dir, const char *name)
{
    status st = OK;
    if ((size_t)snprintf(file, bytes, "%s/%s", dir, name) >= bytes)
        FAIL(BAD_INPUT, "%s/%s: the path is too long", dir, name);
out:
    return st;
}

void folder_of(char *folder, size_t bytes, const char *file)
{
    const char *slash = strrchr(file, '/');
    if (!slash)
        snprintf(folder, bytes, ".");
    else
        snprintf(folder, bytes, "%.*s", slash == file ? 1 : (int)(slash - file), file);
}

status folder_sync(const char *folder)
{
    status st = OK;
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* Some file systems know no fsync of folders (EINVAL) and keep names safe by themselves. */
    if (fd < 0 || (fsync(fd) < 0 && errno != EINVAL))
        FAIL(FAILED, "%s: the folder cannot be synced: %s", folder, strerror(errno));
out:
    if (fd >= 0)
        close(fd);
    return st;
}

status file_settle(const char *tmp, const char *file)
{
    status st = OK;
    char folder[PATH_MAX];
    int fd = open(tmp, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) < 0)
        FAIL(FAILED, "%s: cannot be synced: %s", tmp, strerror(errno));
    if (rename(tmp, file) < 0)
        FAIL(FAILED, "%s: cannot be renamed to %s: %s", tmp, file, strerror(errno));
    folder_of(folder, sizeof folder, file);
    TRY(folder_sync(folder));
out:
    if (fd >= 0)
        close(fd);
    return st;
}

static status folder_make(const char *dir)
{
    status st = OK;
    char parent[PATH_MAX];
    if (mkdir(dir, 0755) == 0) {
        folder_of(parent, sizeof parent, dir);
        TRY(folder_sync(parent));
    } else if (errno != EEXIST) {
        FAIL(BAD_INPUT, "%s: the folder cannot be created: %s; choose an --out in a folder that exists and is writable",
             dir, strerror(errno));
    }
out:
    return st;
}

/* ---- the lock */

static int lock_try(int fd, int type)
{
    struct flock l = {.l_type = (short)type, .l_whence = SEEK_SET};
    return fcntl(fd, F_OFD_SETLK, &l);
}

/* One line a holder: host, pid, command. Only a note for messages: failures to write it are no failures. */
static void lock_note(int fd)
{
    char host[256] = "?", command[512] = "?", line[1024];
    gethostname(host, sizeof host - 1);
    int from = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    if (from >= 0) {
        ssize_t n = read(from, command, sizeof command - 1);
        close(from);
        if (n > 0 && command[n - 1] == 0)
            n--;
        command[n > 0 ? n : 0] = 0;
        for (ssize_t i = 0; i < n; i++)
            if ((unsigned char)command[i] < ' ')
                command[i] = ' ';
    }
    int n = snprintf(line, sizeof line, "%s %ld %s\n", host, (long)getpid(), command);
    if (write(fd, line, (size_t)n) < 0)
        errno = 0;
}

/* "pid N on HOST (command)" of the first noted holder that may be alive, and how many more; dead ones of this host are
 * passed over. */
static void lock_holder(char *out, size_t bytes, const char *lock)
{
    char host[256] = "?", line[1024];
    int more = 0;
    gethostname(host, sizeof host - 1);
    snprintf(out, bytes, "an unknown process");
    FILE *f = fopen(lock, "re");
    if (!f)
        return;
    while (fgets(line, sizeof line, f)) {
        char at[256];
        long pid;
        int skip = 0;
        if (sscanf(line, "%255s %ld %n", at, &pid, &skip) < 2 || !skip ||
            (strcmp(at, host) == 0 && kill((pid_t)pid, 0) < 0 && errno == ESRCH))
            continue;
        line[strcspn(line, "\n")] = 0;
        if (more++ == 0)
            snprintf(out, bytes, "pid %ld on %s (%.300s)", pid, at, line + skip);
    }
    fclose(f);
    if (more > 1) {
        size_t n = strlen(out);
        snprintf(out + n, bytes - n, " and %d more", more - 1);
    }
}

status results_lock(int *fd, const char *dir, bool exclusive, double wait_seconds)
{
    status st = OK;
    char lock[PATH_MAX], holder[600];
    int got = -1;
    double start;
    *fd = -1;
    TRY(folder_make(dir));
    TRY(path_of(lock, sizeof lock, dir, "lock"));
    got = open(lock, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (got < 0)
        FAIL(BAD_INPUT, "%s: cannot be opened: %s; choose an --out in a writable folder", lock, strerror(errno));
    start = clock_seconds();
    while (lock_try(got, exclusive ? F_WRLCK : F_RDLCK) < 0) {
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN && errno != EACCES)
            FAIL(BAD_INPUT, "%s: cannot be locked: %s; choose an --out on a file system with locks", lock,
                 strerror(errno));
        if (clock_seconds() - start >= wait_seconds) {
            lock_holder(holder, sizeof holder, lock);
            FAIL(BAD_INPUT,
                 "%s: held by %s after %g s of waiting; let that run end or stop it, or choose another --out", lock,
                 holder, wait_seconds);
        }
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    if (exclusive && ftruncate(got, 0) < 0)
        FAIL(FAILED, "%s: cannot be emptied: %s", lock, strerror(errno));
    lock_note(got);
    *fd = got;
    got = -1;
out:
    if (got >= 0)
        close(got);
    return st;
}

status results_lock_share(int fd)
{
    status st = OK;
    if (lock_try(fd, F_RDLCK) < 0)
        FAIL(FAILED, "the lock of the results cannot be shared: %s", strerror(errno));
out:
    return st;
}

/* ---- sessions */

static void session_name(char *name, size_t bytes, int session)
{
    snprintf(name, bytes, "s%04d.json", session);
}

/* Removes PATH.tmp.*: only publishers that died leave them, since one runs under the lock. */
static void sweep(const char *file)
{
    char folder[PATH_MAX], prefix[PATH_MAX], victim[2 * PATH_MAX];
    const char *slash = strrchr(file, '/');
    folder_of(folder, sizeof folder, file);
    int length = snprintf(prefix, sizeof prefix, "%s.tmp.", slash ? slash + 1 : file);
    DIR *d = opendir(folder);
    if (!d)
        return;
    for (struct dirent *e; (e = readdir(d));)
        if (strncmp(e->d_name, prefix, (size_t)length) == 0) {
            snprintf(victim, sizeof victim, "%s/%s", folder, e->d_name);
            unlink(victim);
        }
    closedir(d);
}

status folder_run_keep(const char *dir, const char *run_json, int session)
{
    status st = OK;
    char name[64], at[PATH_MAX], tmp[PATH_MAX];
    FILE *f = NULL;
    session_name(name, sizeof name, session);
    TRY(path_of(at, sizeof at, dir, name));
    TRY(path_of(tmp, sizeof tmp, dir, "session.tmp"));
    f = fopen(tmp, "we");
    if (!f || fputs(run_json, f) < 0 || fflush(f) != 0)
        FAIL(FAILED, "%s: cannot be written: %s", tmp, strerror(errno));
    TRY(file_settle(tmp, at));
out:
    if (f)
        fclose(f);
    return st;
}

status results_begin(const char *file, const char *dir, const char *run_json, int session)
{
    status st = OK;
    json_error_t e;
    json_t *run = json_loads(run_json, 0, &e);
    if (!json_is_object(run))
        FAIL(BAD_INPUT, "the run's settings are no JSON object: %s", run ? "another type" : e.text);
    sweep(file);
    TRY(recovery_end(dir));
    TRY(folder_run_keep(dir, run_json, session));
out:
    json_decref(run);
    return st;
}

status folder_run(json_t **out, const char *dir, int session)
{
    status st = OK;
    char name[64], file[PATH_MAX];
    *out = NULL;
    session_name(name, sizeof name, session);
    TRY(path_of(file, sizeof file, dir, name));
    if (access(file, F_OK) == 0)
        TRY(json_file(out, file, RUN_JSON_MOST));
out:
    return st;
}

status folder_run_newest(json_t **out, const char *dir, int sessions)
{
    status st = OK;
    *out = NULL;
    for (int s = sessions; s >= 0 && !*out; s--)
        TRY(folder_run(out, dir, s));
out:
    return st;
}

/* ---- the scan */

static uint64_t key_hash(const char *dataset, const char *id, int turn)
{
    uint64_t h = 0xcbf29ce484222325u; /* FNV-1a, the texts' NULs included */
    for (const char *p = dataset;; p++) {
        h = (h ^ (unsigned char)*p) * 0x100000001b3u;
        if (!*p)
            break;
    }
    for (const char *p = id;; p++) {
        h = (h ^ (unsigned char)*p) * 0x100000001b3u;
        if (!*p)
            break;
    }
    h = (h ^ (uint32_t)turn) * 0x100000001b3u;
    return h ^ h >> 32;
}

/* The slot of a key: its own, or the free one where it belongs. */
static size_t key_slot(const results_index *x, uint64_t hash, const char *dataset, const char *id, int turn)
{
    size_t at = (size_t)hash & (x->slot_count - 1);
    while (x->slot[at]) {
        const index_row *r = &x->row[x->slot[at] - 1];
        if (r->hash == hash && r->turn == turn && strcmp(r->id, id) == 0 && strcmp(r->dataset, dataset) == 0)
            break;
        at = (at + 1) & (x->slot_count - 1);
    }
    return at;
}

void index_fill(results_index *x)
{
    memset(x->slot, 0, x->slot_count * sizeof *x->slot);
    for (int64_t i = 0; i < x->rows; i++) {
        const index_row *r = &x->row[i];
        x->slot[key_slot(x, r->hash, r->dataset, r->id, r->turn)] = i + 1;
    }
}

const index_row *index_find(const results_index *x, const char *dataset, const char *id, int turn)
{
    if (!x || !x->slot_count)
        return NULL;
    int64_t row = x->slot[key_slot(x, key_hash(dataset, id, turn), dataset, id, turn)];
    return row ? &x->row[row - 1] : NULL;
}

/* Keeps at most half of the slots filled. */
static status index_grow(results_index *x)
{
    status st = OK;
    if (x->rows == x->room) {
        int64_t room = x->room ? 2 * x->room : 256;
        index_row *row = realloc(x->row, (size_t)room * sizeof *row);
        if (!row)
            FAIL(FAILED, "no memory for an index of %lld rows", (long long)room);
        x->row = row;
        x->room = room;
        free(x->slot);
        x->slot_count = 2 * (size_t)room;
        x->slot = calloc(x->slot_count, sizeof *x->slot);
        if (!x->slot) {
            x->slot_count = 0;
            FAIL(FAILED, "no memory for an index of %lld rows", (long long)room);
        }
        index_fill(x);
    }
out:
    return st;
}

static status scan_row(results_state *s, int from, const frame *f, bool *good)
{
    status st = OK;
    results_index *x = s->index;
    result_row r;
    *good = frame_row(&r, f, NULL, NULL);
    if (!*good)
        goto out;
    TRY(index_grow(x));
    uint64_t hash = key_hash(r.dataset, r.id, r.turn);
    size_t at = key_slot(x, hash, r.dataset, r.id, r.turn);
    if (x->slot[at]) {
        s->repeated++;
        goto out;
    }
    x->row[x->rows] = (index_row){hash, r.dataset, r.id, r.order, r.source_line, r.turn, from, r.failed, *f};
    x->slot[at] = ++x->rows;
    if (r.failed)
        s->failed++;
    else
        s->done++;
out:
    return st;
}

static status scan_journal(results_state *s, int which, const char *dir)
{
    status st = OK;
    char name[64], file[PATH_MAX];
    index_journal *j = &s->index->journal[which];
    struct stat about;
    uint32_t sequence = 0;
    size_t at = 0;
    int fd = -1;
    journal_name(name, sizeof name, j->session, j->rank);
    TRY(path_of(file, sizeof file, dir, name));
    fd = open(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &about) < 0)
        FAIL(FAILED, "%s: cannot be read: %s", file, strerror(errno));
    if (about.st_size > 0) {
        void *bytes = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (bytes == MAP_FAILED)
            FAIL(FAILED, "%s: cannot be mapped: %s", file, strerror(errno));
        j->bytes = bytes;
        j->size = (size_t)about.st_size;
    }
    for (;;) {
        frame f = frame_next(j->bytes, j->size, &at, j->session, j->rank, &sequence);
        bool good = true;
        if (f.kind == FRAME_END || f.kind == FRAME_TORN)
            break;
        if (f.kind == FRAME_FOREIGN && f.version != FRAME_VERSION)
            FAIL(BAD_INPUT, "%s: frame %u has format version %d, this program knows %d; use the program that wrote it",
                 file, sequence, f.version, FRAME_VERSION);
        if (f.kind == FRAME_FOREIGN)
            FAIL(BAD_INPUT, "%s: frame %u has kind %d, unknown to this program; use the program that wrote it", file,
                 sequence, f.found);
        if (f.kind == FRAME_SESSION) {
            good = frame_session(&j->started, &f);
            j->ended = j->started;
        } else if (f.kind == FRAME_ROW) {
            TRY(scan_row(s, which, &f, &good));
        } else if (f.kind == FRAME_COUNTERS) {
            good = frame_counters(&j->phase, &j->ended, &f);
            j->counted = true;
        } else if (f.kind == FRAME_AUDIT) {
            result_audit a;
            good = frame_audit(&a, &f);
            j->audits++;
        } else if (f.kind == FRAME_OBSERVED) {
            good = frame_observed(&j->observation, &f);
            j->observed = true;
        } else {
            result_iteration i;
            good = frame_iteration(&i, &f);
            j->iterations++;
        }
        if (!good)
            FAIL(BAD_INPUT, "%s: frame %u is whole, but not what this program writes; use the program that wrote it",
                 file, sequence - 1);
    }
    j->whole = at;
    if (at < j->size) {
        s->torn++;
        s->torn_bytes += (int64_t)(j->size - at);
    }
out:
    if (fd >= 0)
        close(fd);
    return st;
}

static int by_session_and_rank(const void *a, const void *b)
{
    const index_journal *x = a, *y = b;
    return x->session != y->session ? (x->session > y->session) - (x->session < y->session)
                                    : (x->rank > y->rank) - (x->rank < y->rank);
}

status results_scan(results_state *out, const char *dir)
{
    status st = OK;
    int room = 0;
    DIR *d = NULL;
    memset(out, 0, sizeof *out);
    results_index *x = out->index = calloc(1, sizeof *x);
    if (!x)
        FAIL(FAILED, "no memory for an index");
    d = opendir(dir);
    if (!d && errno == ENOENT)
        goto out;
    if (!d)
        FAIL(BAD_INPUT, "%s: the folder cannot be read: %s", dir, strerror(errno));
    for (struct dirent *e; (e = readdir(d));) {
        int session, rank;
        if (!journal_of_name(e->d_name, &session, &rank))
            continue;
        if (session >= out->sessions)
            out->sessions = session + 1;
        if (x->journals == room) {
            room = room ? 2 * room : 16;
            index_journal *journals = realloc(x->journal, (size_t)room * sizeof *journals);
            if (!journals)
                FAIL(FAILED, "no memory for an index of %d journals", room);
            x->journal = journals;
        }
        x->journal[x->journals++] = (index_journal){.session = session, .rank = rank};
    }
    if (x->journals)
        qsort(x->journal, (size_t)x->journals, sizeof *x->journal, by_session_and_rank);
    for (int j = 0; j < x->journals; j++) {
        if (j == 0 || x->journal[j].session != x->journal[j - 1].session)
            TRY(results_drop(out, dir, x->journal[j].session));
        TRY(scan_journal(out, j, dir));
    }
out:
    if (d)
        closedir(d);
    return st;
}

void results_scan_close(results_state *s)
{
    results_index *x = s->index;
    if (!x)
        return;
    for (int j = 0; j < x->journals; j++)
        if (x->journal[j].bytes)
            munmap((void *)x->journal[j].bytes, x->journal[j].size);
    free(x->journal);
    free(x->row);
    free(x->slot);
    free(x);
    s->index = NULL;
}

bool results_done(const results_state *s, const char *dataset, const char *id, int turn)
{
    return index_find(s->index, dataset, id, turn) != NULL;
}

bool results_row(result_row *out, const results_state *s, const char *dataset, const char *id, int turn)
{
    const index_row *r = index_find(s->index, dataset, id, turn);
    if (!r || !frame_row(out, &r->frame, NULL, NULL))
        return false;
    out->order = r->order;
    out->source_line = r->source_line;
    return true;
}

status results_run(json_t **out, const results_state *s, const char *dir)
{
    return folder_run_newest(out, dir, s->sessions - 1);
}

/* ---- how a run stands */

static bool lock_held(const char *lock)
{
    int fd = open(lock, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    bool held = fcntl(fd, F_OFD_GETLK, &l) == 0 && l.l_type != F_UNLCK;
    close(fd);
    return held;
}

status results_status(results_standing *out, const char *file)
{
    status st = OK;
    char dir[PATH_MAX], lock[PATH_MAX], mark[PATH_MAX];
    results_state s = {0};
    json_t *run = NULL, *of_file = NULL;
    bool published = access(file, F_OK) == 0;
    memset(out, 0, sizeof *out);
    out->total = out->left = -1;
    if ((size_t)snprintf(dir, sizeof dir, "%s.d", file) >= sizeof dir)
        FAIL(BAD_INPUT, "%s: the path is too long", file);
    TRY(path_of(lock, sizeof lock, dir, "lock"));
    TRY(path_of(mark, sizeof mark, dir, RECOVERING));
    out->running = lock_held(lock);
    if (out->running)
        lock_holder(out->holder, sizeof out->holder, lock);
    if (!published || access(mark, F_OK) != 0)
        TRY(results_scan(&s, dir));
    TRY(folder_run_newest(&run, dir, s.sessions));
    if (!run && !s.sessions && !published && !out->running)
        FAIL(BAD_INPUT, "%s: no results: neither the file nor journals in %s", file, dir);
    if (published) {
        TRY(hdf5_attributes(&of_file, file));
        const char *text = json_string_value(json_object_get(of_file, "state"));
        snprintf(out->state, sizeof out->state, "%s", text ? text : "");
        out->sessions = (int)json_integer_value(json_object_get(of_file, "sessions"));
        out->done = json_integer_value(json_object_get(of_file, "rows_done"));
        out->failed = json_integer_value(json_object_get(of_file, "rows_failed"));
        out->current = !s.sessions || (out->sessions == s.sessions && out->done == s.done && out->failed == s.failed);
    }
    if (s.sessions || !published) {
        out->sessions = s.sessions;
        out->done = s.done;
        out->failed = s.failed;
    }
    TRY(json_int(&out->total, run ? run : of_file, "rows_total", -1, -1, INT64_MAX, file));
    if (out->total >= 0)
        out->left = out->total - out->done - out->failed;
out:
    results_scan_close(&s);
    json_decref(run);
    json_decref(of_file);
    return st;
}
