/* Journals, the folder of a run, and the published file. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "results/results.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ---- a folder a test */

static char out_path[512], out_dir[520];

static void remove_all(const char *dir)
{
    char at[1024];
    DIR *d = opendir(dir);
    if (!d)
        return;
    for (struct dirent *e; (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0)
            continue;
        snprintf(at, sizeof at, "%s/%s", dir, e->d_name);
        if (unlink(at) < 0)
            remove_all(at);
    }
    closedir(d);
    rmdir(dir);
}

static char top[400];

static int fresh_folder(void **state)
{
    (void)state;
    const char *tmp = getenv("TMPDIR");
    snprintf(top, sizeof top, "%s/test_results.XXXXXX", tmp ? tmp : "/tmp");
    if (!mkdtemp(top))
        return -1;
    snprintf(out_path, sizeof out_path, "%s/out.h5", top);
    snprintf(out_dir, sizeof out_dir, "%s.d", out_path);
    return mkdir(out_dir, 0755);
}

static int drop_folder(void **state)
{
    (void)state;
    remove_all(top);
    return 0;
}

static void assert_ok(status st)
{
    if (st != OK)
        fail_msg("status %d: %s", st, status_message());
}

static void assert_says(status st, status want, const char *part)
{
    if (st != want || !strstr(status_message(), part))
        fail_msg("status %d, want %d; message \"%s\", want \"%s\" in it", st, want, status_message(), part);
}

/* ---- rows that are a function of their number */

enum { TOKENS_MOST = 300, BLOCKS_MOST = 12 };

typedef struct made { /* a row and what it borrows */
    result_row row;
    char id[32], prompt[256], text[4096], gold[64], message[64];
    int32_t token[TOKENS_MOST];
    result_block block[BLOCKS_MOST];
} made;

static uint32_t mix(uint32_t x)
{
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ x >> 16;
}

static result_row *make(made *m, int n, int turn)
{
    static const char *const texts[] = {"",
                                        "plain",
                                        "two\nlines\n\n",
                                        "tab\t \"quoted\" \\ back",
                                        "caf\xc3\xa9 \xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x99\x82",
                                        "cut \xe6\x97"};
    uint32_t h = mix((uint32_t)(2 * n + turn + 1));
    memset(m, 0, sizeof *m);
    snprintf(m->id, sizeof m->id, n % 3 ? "%d" : "HumanEval/%d", n);
    snprintf(m->prompt, sizeof m->prompt, "Question %d, turn %d:\n%s?", n, turn, texts[h % 5]);
    size_t at = (size_t)snprintf(m->text, sizeof m->text, "Answer %d\n%s", n, texts[h / 7 % 6]);
    for (uint32_t i = 0; i < h % 3000 && !(h & 64); i++)
        m->text[at++] = (char)('a' + (i + h) % 26);
    snprintf(m->gold, sizeof m->gold, "{\"answer\":\"%d\"}", n);
    bool failed = n % 11 == 5;
    if (failed)
        snprintf(m->message, sizeof m->message, "file.jsonl:%d: no \"question\"", n);
    int32_t tokens = failed ? 0 : (int32_t)(h % TOKENS_MOST), blocks = (tokens + 31) / 32;
    for (int32_t i = 0; i < tokens; i++)
        m->token[i] = (int32_t)(mix(h + (uint32_t)i) & 0x7fffffff);
    for (int32_t b = 0; b < blocks; b++)
        m->block[b] = (result_block){.block = b,
                                     .iterations = 1 + (int32_t)(h + (uint32_t)b) % 32,
                                     .cold = 1,
                                     .refresh = b,
                                     .hot_update = 2,
                                     .hot_skip = 3,
                                     .forced = b == 1,
                                     .layer_rebuilds = 4,
                                     .universe = 5,
                                     .rows_fallback = {6, 7, 8, b},
                                     .fresh_rows = 9,
                                     .cached_rows = 10,
                                     .support_size = 8.5f,
                                     .distinct_experts = 3.25f,
                                     .coverage = b ? .875f : NAN};
    m->row = (result_row){.dataset = n % 2 ? "gsm8k" : "mgsm_de",
                          .id = m->id,
                          .source_line = n + 1,
                          .turn = turn,
                          .order = n,
                          .prompt = m->prompt,
                          .text = m->text,
                          .gold = m->gold,
                          .failed = failed,
                          .message = m->message,
                          .finish_reason = failed  ? ""
                                           : n % 4 ? "eos"
                                                   : "length",
                          .prompt_tokens = n % 100,
                          .token = m->token,
                          .tokens = tokens,
                          .iterations = n % 77,
                          .seconds = n * .25,
                          .block = m->block,
                          .blocks = blocks};
    return &m->row;
}

static bool same_block(const result_block *a, const result_block *b)
{
    return memcmp(a, b, offsetof(result_block, coverage)) == 0 &&
           (a->coverage == b->coverage || (isnan(a->coverage) && isnan(b->coverage)));
}

/* Is `r` row n as the file shows it: what is not UTF-8 replaced, all else exact? */
static void assert_row(const result_row *r, int n, int turn)
{
    made m;
    const result_row *want = make(&m, n, turn);
    assert_string_equal(r->dataset, want->dataset);
    assert_string_equal(r->id, want->id);
    assert_int_equal(r->source_line, want->source_line);
    assert_int_equal(r->turn, turn);
    assert_int_equal(r->order, n);
    assert_string_equal(r->prompt, want->prompt);
    assert_string_equal(r->gold, want->gold);
    assert_int_equal(r->failed, want->failed);
    assert_string_equal(r->message, want->message);
    assert_string_equal(r->finish_reason, want->finish_reason);
    assert_int_equal(r->prompt_tokens, want->prompt_tokens);
    assert_int_equal(r->iterations, want->iterations);
    assert_true(r->seconds == want->seconds);
    assert_int_equal(r->tokens, want->tokens);
    if (r->tokens)
        assert_memory_equal(r->token, want->token, (size_t)r->tokens * sizeof *r->token);
    assert_int_equal(r->blocks, want->blocks);
    for (int32_t b = 0; b < r->blocks; b++)
        assert_true(same_block(&r->block[b], &want->block[b]));
    const char *cut = strstr(want->text, "cut \xe6\x97");
    if (cut) {
        size_t before = (size_t)(cut - want->text) + 4;
        assert_memory_equal(r->text, want->text, before);
        assert_memory_equal(r->text + before, "\xef\xbf\xbd", 3);
        assert_string_equal(r->text + before + 3, cut + 6);
    } else {
        assert_string_equal(r->text, want->text);
    }
}

/* A journal with rows [first, last), `group` rows a commit. */
static void write_rows(int session, int rank, int first, int last, int group)
{
    journal *j;
    made m;
    result_phase p = {.wall_seconds = session + .5};
    assert_ok(journal_open(&j, out_dir, rank, session));
    for (int n = first; n < last; n++) {
        assert_ok(journal_row(j, make(&m, n, 0)));
        p.forwards++;
        p.seconds[PHASE_HEAD] += .5;
        p.rows_fresh[PATH_COLD] += 32;
        if ((n - first + 1) % group == 0)
            assert_ok(journal_commit(j, &p));
    }
    assert_ok(journal_commit(j, &p));
    journal_close(j);
}

static const char run_json[] =
    "{\"program\":\"epoch\",\"rows_total\":12,\"threshold\":0.95,\"audit\":false,\"strict\":true,"
    "\"hosts\":[\"a\",\"b\"],\"model\":{\"layers\":8},\"none\":null,\"state\":\"mine\"}";

static void test_round_trip(void **state)
{
    (void)state;
    results_file *f;
    made m;
    journal *j;
    assert_ok(results_begin(out_path, out_dir, run_json, 0));
    write_rows(0, 1, 7, 40, 4);
    write_rows(0, 0, 0, 7, 1);
    assert_ok(journal_open(&j, out_dir, 2, 0));
    assert_ok(journal_row(j, make(&m, 3, 1))); /* a second turn, from another rank */
    assert_ok(journal_commit(j, NULL));
    assert_ok(journal_row(j, make(&m, 99, 0))); /* never committed */
    journal_close(j);
    assert_ok(results_publish(out_path, out_dir, NULL, "complete"));
    assert_ok(results_read(&f, out_path));
    assert_string_equal(f->state, "complete");
    assert_int_equal(f->rows, 41);
    for (int64_t i = 0, n = 0; i < f->rows; i++) {
        const result_output *o = &f->output[i];
        int turn = i == 4;
        assert_row(&o->row, (int)(i < 4 ? i : i - 1), turn);
        assert_int_equal(o->rank, turn ? 2 : i > 7);
        assert_int_equal(o->session, 0);
        assert_int_equal(o->token_offset, n);
        int32_t forced = 0;
        for (int32_t b = 0; b < o->row.blocks; b++)
            forced += o->row.block[b].forced;
        assert_int_equal(o->forced, forced);
        n += o->row.tokens;
    }
    assert_int_equal(f->ranks, 2);
    assert_int_equal(f->rank[1].rank, 1);
    assert_int_equal(f->rank[1].phase.forwards, 33);
    assert_true(f->rank[1].phase.seconds[PHASE_HEAD] == 16.5);
    assert_int_equal(f->rank[1].phase.rows_fresh[PATH_COLD], 33 * 32);
    assert_int_equal(f->sessions, 1);
    assert_int_equal(f->session[0].ranks, 3);
    assert_int_equal(f->session[0].done + f->session[0].failed, 41);
    assert_int_equal(f->session[0].tokens, f->tokens);
    assert_true(f->session[0].wall_seconds == .5);
    assert_true(f->session[0].ended >= f->session[0].started && f->session[0].started > 1.6e9);
    assert_non_null(strstr(f->session[0].run, "\"layers\":8"));
    assert_int_equal(json_integer_value(json_object_get(f->run, "rows_total")), 12);
    assert_true(json_real_value(json_object_get(f->run, "threshold")) == .95);
    assert_true(json_is_false(json_object_get(f->run, "audit")));
    assert_true(json_is_true(json_object_get(f->run, "strict")));
    assert_string_equal(json_string_value(json_object_get(f->run, "hosts")), "[\"a\",\"b\"]");
    assert_string_equal(json_string_value(json_object_get(f->run, "state")), "complete");
    assert_null(json_object_get(f->run, "none"));
    results_close(f);
}

static void test_no_rows(void **state)
{
    (void)state;
    results_file *f;
    results_standing s;
    assert_ok(results_publish(out_path, out_dir, "{}", "interrupted"));
    assert_ok(results_read(&f, out_path));
    assert_int_equal(f->rows + f->tokens + f->blocks + f->ranks + f->sessions + f->iterations + f->scores, 0);
    assert_string_equal(f->state, "interrupted");
    results_close(f);
    assert_ok(results_status(&s, out_path));
    assert_false(s.running);
    assert_int_equal(s.done + s.failed, 0);
    assert_int_equal(s.total, -1);
    results_close(NULL);
    journal_close(NULL);
}

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Far above what it takes: guards against a quadratic scan, not against a slow disk. */
static void test_many_rows(void **state)
{
    (void)state;
    results_file *f;
    double start = seconds();
    write_rows(0, 0, 0, 10000, 500);
    assert_ok(results_publish(out_path, out_dir, "{}", "complete"));
    assert_ok(results_read(&f, out_path));
    assert_int_equal(f->rows, 10000);
    assert_row(&f->output[9999].row, 9999, 0);
    results_close(f);
    print_message("10000 rows written, published and read in %.2f s\n", seconds() - start);
    assert_true(seconds() - start < 30);
}

/* ---- damage */

enum { FEW = 6 };

static char journal_path[600];

/* A journal of FEW rows; end[n] is where the frame of row n ends, end[-1] that of the session's frame. */
static off_t few_rows(off_t *end)
{
    journal *j;
    made m;
    struct stat about;
    snprintf(journal_path, sizeof journal_path, "%s/s0000.r00000.jnl", out_dir);
    assert_ok(journal_open(&j, out_dir, 0, 0));
    for (int n = -1; n < FEW; n++) {
        if (n >= 0) {
            result_row *r = make(&m, n, 0);
            r->tokens = r->tokens > 8 ? 8 : r->tokens;
            r->blocks = r->blocks > 1 ? 1 : r->blocks;
            r->text = n % 2 ? "short" : "";
            assert_ok(journal_row(j, r));
            assert_int_equal(journal_pending(j) > 0, true);
            assert_ok(journal_commit(j, NULL));
        }
        assert_int_equal(stat(journal_path, &about), 0);
        end[n] = about.st_size;
    }
    journal_close(j);
    return about.st_size;
}

/* Rows [0, rows) are there and what they were, and nothing else is. */
static void assert_holds(int rows, off_t torn_bytes)
{
    results_state s;
    made m;
    result_row r;
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.done + s.failed, rows);
    assert_int_equal(s.torn_bytes, torn_bytes);
    assert_int_equal(s.torn, torn_bytes > 0);
    for (int n = 0; n < FEW; n++) {
        const result_row *want = make(&m, n, 0);
        assert_int_equal(results_done(&s, want->dataset, want->id, 0), n < rows);
        assert_false(results_done(&s, want->dataset, want->id, 1));
        if (n >= rows)
            continue;
        assert_true(results_row(&r, &s, want->dataset, want->id, 0));
        assert_string_equal(r.prompt, want->prompt);
        assert_string_equal(r.text, n % 2 ? "short" : "");
        assert_int_equal(r.failed, want->failed);
        assert_int_equal(r.order, n);
    }
    results_scan_close(&s);
}

static void test_cut_at_every_byte(void **state)
{
    (void)state;
    off_t ends[FEW + 1], *end = ends + 1, size = few_rows(end);
    assert_holds(FEW, 0);
    for (off_t cut = size - 1; cut >= 0; cut--) {
        int rows = 0;
        assert_int_equal(truncate(journal_path, cut), 0);
        while (rows < FEW && end[rows] <= cut)
            rows++;
        assert_holds(rows, cut < end[-1] ? cut : cut - end[rows - 1]);
    }
}

static void test_flip_of_every_bit(void **state)
{
    (void)state;
    off_t ends[FEW + 1], *end = ends + 1, size = few_rows(end);
    int fd = open(journal_path, O_RDWR);
    assert_true(fd >= 0);
    for (off_t at = 0; at < size; at++) {
        unsigned char was, bad;
        int rows = 0;
        assert_int_equal(pread(fd, &was, 1, at), 1);
        while (rows < FEW && end[rows] <= at)
            rows++;
        for (int bit = 0; bit < 8; bit++) {
            bad = (unsigned char)(was ^ 1 << bit);
            assert_int_equal(pwrite(fd, &bad, 1, at), 1);
            assert_holds(rows, size - (at < end[-1] ? 0 : end[rows - 1]));
        }
        assert_int_equal(pwrite(fd, &was, 1, at), 1);
    }
    close(fd);
    assert_holds(FEW, 0);
}

/* Whole frames that are not the next ones: a second copy of one, one taken out, a journal under another's name. */
static void test_frames_out_of_place(void **state)
{
    (void)state;
    off_t ends[FEW + 1], *end = ends + 1, size = few_rows(end);
    char bytes[8192], other[600];
    int fd = open(journal_path, O_RDWR);
    assert_true(fd >= 0 && size < (off_t)sizeof bytes);
    assert_int_equal(pread(fd, bytes, (size_t)size, 0), size);
    assert_int_equal(pwrite(fd, bytes + end[1], (size_t)(end[2] - end[1]), size), end[2] - end[1]);
    assert_holds(FEW, end[2] - end[1]);
    assert_int_equal(pwrite(fd, bytes + end[2], (size_t)(size - end[2]), end[1]), size - end[2]);
    assert_int_equal(ftruncate(fd, size - (end[2] - end[1])), 0);
    assert_holds(2, size - end[2]);
    close(fd);
    snprintf(other, sizeof other, "%s/s0000.r00001.jnl", out_dir);
    assert_int_equal(rename(journal_path, other), 0);
    assert_holds(0, size - (end[2] - end[1]));
}

/* zlib's CRC-32, bit by bit. */
static uint32_t crc_of(const unsigned char *p, size_t n, uint32_t crc)
{
    crc = ~crc;
    for (; n; n--, p++) {
        crc ^= *p;
        for (int i = 0; i < 8; i++)
            crc = crc & 1 ? crc >> 1 ^ 0xedb88320u : crc >> 1;
    }
    return ~crc;
}

/* A journal of one frame with a right checksum, whatever its version, kind and payload. */
static void one_frame(unsigned version, unsigned kind, const void *payload, unsigned bytes)
{
    unsigned char h[28] = {'E', 'P', 'O', 'J', (unsigned char)version, 0, (unsigned char)kind, 0, (unsigned char)bytes};
    uint32_t crc = crc_of(payload, bytes, crc_of(h, 24, 0));
    for (int i = 0; i < 4; i++)
        h[24 + i] = (unsigned char)(crc >> 8 * i);
    snprintf(journal_path, sizeof journal_path, "%s/s0000.r00000.jnl", out_dir);
    FILE *f = fopen(journal_path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(h, 1, sizeof h, f), sizeof h);
    assert_int_equal(fwrite(payload, 1, bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

static void test_foreign_journals(void **state)
{
    (void)state;
    results_state s;
    one_frame(1, 1, "12345678", 8);
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.sessions, 1);
    results_scan_close(&s);
    one_frame(2, 1, "12345678", 8);
    assert_says(results_scan(&s, out_dir), BAD_INPUT,
                "s0000.r00000.jnl: frame 0 has format version 2, this program knows 1");
    results_scan_close(&s);
    one_frame(1, 9, "", 0);
    assert_says(results_scan(&s, out_dir), BAD_INPUT, "frame 0 has kind 9");
    results_scan_close(&s);
    /* payloads that lie about their lengths: a text, an array, too short, too long */
    static const struct {
        unsigned kind, bytes;
        const char *payload;
    } lies[] = {{2, 4, "\xff\xff\xff\xff"},
                {2, 8, "\x01\0\0\0xy\0\0"},
                {2, 0, ""},
                {1, 7, "1234567"},
                {1, 9, "123456789"},
                {3, 3, "123"},
                {5, 8, "12345678"},
                {6, 8, "\x40\0\0\0\x03\0\0\0"},
                {4, 16, "12345678\xff\xff\xff\xff\xff\xff\xff\x7f"}};
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        one_frame(1, lies[i].kind, lies[i].payload, lies[i].bytes);
        assert_says(results_scan(&s, out_dir), BAD_INPUT, "frame 0 is whole, but not what this program writes");
        results_scan_close(&s);
    }
    /* a row whose token count exceeds the frame */
    unsigned char row[4 * 7 + 7 + 8 + 4 + 8 + 1 + 4 + 4 + 8 + 4] = {0};
    memcpy(row + sizeof row - 4, "\xff\xff\xff\x7f", 4);
    one_frame(1, 2, row, 72);
    assert_says(results_scan(&s, out_dir), BAD_INPUT, "frame 0 is whole, but not what this program writes");
    results_scan_close(&s);
}

/* ---- resume */

static char *slurp(const char *file, size_t *bytes)
{
    FILE *f = fopen(file, "r");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *bytes = (size_t)ftell(f);
    rewind(f);
    char *p = malloc(*bytes + 1);
    assert_non_null(p);
    assert_int_equal(fread(p, 1, *bytes, f), *bytes);
    fclose(f);
    return p;
}

static void test_three_sessions(void **state)
{
    (void)state;
    results_state s;
    results_file *f;
    results_standing now;
    journal *j;
    made m;
    result_row r;
    static const int ranks[] = {2, 4, 1};
    assert_ok(results_scan(&s, "/nonexistent/dir"));
    assert_int_equal(s.sessions + s.done, 0);
    assert_false(results_done(&s, "gsm8k", "1", 0));
    results_scan_close(&s);
    for (int session = 0, next = 0; session < 3; session++) {
        char run[64];
        assert_ok(results_scan(&s, out_dir));
        assert_int_equal(s.sessions, session);
        results_scan_close(&s);
        snprintf(run, sizeof run, "{\"rows_total\":60,\"ranks\":%d}", ranks[session]);
        assert_ok(results_begin(out_path, out_dir, run, session));
        /* each session repeats the last five rows of the one before, with other seconds */
        int last = next + 20, first = next ? next - 5 : 0;
        for (int rank = 0; rank < ranks[session]; rank++) {
            assert_ok(journal_open(&j, out_dir, rank, session));
            for (int n = first; n < last; n++)
                if (n % ranks[session] == rank) {
                    result_row *row = make(&m, n, 0);
                    if (n < next)
                        row->seconds = -1;
                    assert_ok(journal_row(j, row));
                }
            assert_ok(journal_commit(j, NULL));
            journal_close(j);
        }
        next = last;
    }
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.sessions, 3);
    assert_int_equal(s.done, 55);
    assert_int_equal(s.failed, 5);
    assert_int_equal(s.repeated, 10);
    for (int n = 0; n < 70; n++) {
        const result_row *want = make(&m, n, 0);
        assert_int_equal(results_done(&s, want->dataset, want->id, 0), n < 60);
        assert_int_equal(results_row(&r, &s, want->dataset, want->id, 0), n < 60);
        if (n < 60)
            assert_true(r.seconds == want->seconds);
    }
    results_scan_close(&s);
    assert_ok(results_publish(out_path, out_dir, NULL, "partial"));
    size_t once_bytes, twice_bytes;
    char *once = slurp(out_path, &once_bytes);
    nanosleep(&(struct timespec){.tv_sec = 1}, NULL); /* HDF5 likes to write the time down */
    assert_ok(results_publish(out_path, out_dir, NULL, "partial"));
    char *twice = slurp(out_path, &twice_bytes);
    assert_int_equal(once_bytes, twice_bytes);
    assert_memory_equal(once, twice, once_bytes);
    assert_ok(results_read(&f, out_path));
    assert_int_equal(f->rows, 60);
    assert_int_equal(f->sessions, 3);
    for (int i = 0; i < 60; i++) {
        assert_row(&f->output[i].row, i, 0);
        assert_int_equal(f->output[i].session, i / 20);
    }
    for (int i = 0; i < 3; i++) {
        assert_int_equal(f->session[i].ranks, ranks[i]);
        assert_int_equal(f->session[i].done + f->session[i].failed, 20);
    }
    /* what was read is written as the same bytes; then with scores */
    assert_ok(results_write(out_path, f));
    free(twice);
    twice = slurp(out_path, &twice_bytes);
    assert_int_equal(once_bytes, twice_bytes);
    assert_memory_equal(once, twice, once_bytes);
    result_score score = {"gsm8k", "numeric", 1, 60, 30, 2, 1, 6, .5, .4, .6};
    f->score = &score;
    f->scores = 1;
    assert_ok(results_write(out_path, f));
    results_close(f);
    assert_ok(results_read(&f, out_path));
    assert_int_equal(f->scores, 1);
    assert_string_equal(f->score->rule, "numeric");
    assert_int_equal(f->score->correct, 30);
    assert_true(f->score->high == .6);
    results_close(f);
    free(once);
    free(twice);
    assert_ok(results_status(&now, out_path));
    assert_int_equal(now.sessions, 3);
    assert_int_equal(now.done, 55);
    assert_int_equal(now.failed, 5);
    assert_int_equal(now.total, 60);
    assert_int_equal(now.left, 0);
    assert_string_equal(now.state, "partial");
    remove_all(out_dir); /* the file alone tells the same */
    assert_ok(results_status(&now, out_path));
    assert_int_equal(now.sessions, 3);
    assert_int_equal(now.done, 55);
    assert_int_equal(now.failed, 5);
    assert_int_equal(now.left, 0);
}

static void test_trace(void **state)
{
    (void)state;
    results_file *f;
    made m;
    for (int rank = 0; rank < 2; rank++) {
        journal *j;
        assert_ok(journal_open(&j, out_dir, rank, 0));
        for (int n = 4; n >= 0; n--) {
            for (int i = 2; i >= 0; i--)
                assert_ok(journal_iteration(j, &(result_iteration){.order = n,
                                                                   .block = 1,
                                                                   .iteration = i,
                                                                   .path = PATH_HOT_SKIP,
                                                                   .live = 3,
                                                                   .newly = 1,
                                                                   .stable = 2,
                                                                   .fresh = 30,
                                                                   .commits = 1,
                                                                   .committed = 1ull << 63 | 5,
                                                                   .support_size = 4.5f,
                                                                   .coverage = rank,
                                                                   .bytes_moved = 1ll << 40}));
            if (n != 2 || rank) /* row 2 is finished by rank 1 alone; both finish the others */
                assert_ok(journal_row(j, make(&m, n, 0)));
        }
        assert_ok(journal_commit(j, NULL));
        journal_close(j);
    }
    assert_ok(results_publish(out_path, out_dir, "{}", "complete"));
    assert_ok(results_read(&f, out_path));
    assert_int_equal(f->rows, 5);
    assert_int_equal(f->iterations, 15);
    for (int i = 0; i < 15; i++) {
        const result_trace *t = &f->iteration[i];
        assert_int_equal(t->output_row, i / 3);
        assert_int_equal(t->at.order, i / 3);
        assert_int_equal(t->at.iteration, i % 3);
        assert_int_equal(t->rank, i / 3 == 2);
        assert_true(t->at.coverage == (float)t->rank);
        assert_true(t->at.committed == (1ull << 63 | 5));
        assert_true(t->at.bytes_moved == 1ll << 40);
    }
    results_close(f);
}

/* ---- audit and observations */

static result_audit audit_of(int order, int iteration)
{
    return (result_audit){.order = order,
                          .block = iteration / 2,
                          .iteration = iteration % 2,
                          .live = 32 - iteration,
                          .held = 20,
                          .same = 31 - iteration,
                          .broken = iteration == 3,
                          .block_same = iteration % 2,
                          .max_difference = .5f,
                          .mean_difference = .25f,
                          .min_margin = iteration ? .125f : NAN,
                          .mean_margin = (float)order};
}

/* Every number of it another, and another of every `of`. */
static result_observed observed_of(int of)
{
    result_observed o;
    for (int i = 0; i < OBSERVED_STEPS; i++) {
        o.overlap_count[i] = 1000 * of + i;
        o.overlap_sum[i] = of + i * .5;
        for (int k = 0; k < OBSERVED_KINDS; k++) {
            o.cosine_count[k][i] = 10000 * of + 100 * k + i;
            o.cosine_sum[k][i] = of + k * .25 - i;
        }
    }
    return o;
}

/* Two sessions of two ranks, rows 0 to 11 all told; each row with iterations and audits, each rank with counters and
 * observations. */
static void write_audited(void)
{
    made m;
    journal *j;
    for (int who = 0; who < 4; who++) {
        int session = who / 2, rank = who % 2;
        char run[64];
        snprintf(run, sizeof run, "{\"rows_total\":12,\"threshold\":0.9%d,\"name\":\"caf\xc3\xa9\"}", session);
        if (rank == 0)
            assert_ok(results_begin(out_path, out_dir, run, session));
        assert_ok(journal_open(&j, out_dir, rank, session));
        for (int n = 3 * who; n < 3 * who + 4; n++) { /* the last one is unfinished */
            for (int i = 3; i >= 0; i--) {
                result_audit a = audit_of(n, i);
                assert_ok(journal_audit(j, &a));
            }
            assert_ok(journal_iteration(j, &(result_iteration){.order = n, .path = n % PATHS, .live = 5}));
            if (n < 3 * who + 3)
                assert_ok(journal_row(j, make(&m, n, 0)));
            result_observed o = observed_of(100 * who + n);
            assert_ok(journal_observed(j, &o));
            assert_ok(journal_commit(j, &(result_phase){.forwards = n, .wall_seconds = who + .5}));
        }
        result_observed lost = observed_of(9);
        assert_ok(journal_observed(j, &lost)); /* never committed */
        journal_close(j);
    }
}

static void assert_audited(const results_file *f)
{
    assert_int_equal(f->rows, 12);
    assert_int_equal(f->audits, 48);
    for (int i = 0; i < 48; i++) {
        const result_audited *a = &f->audit[i];
        result_audit want = audit_of(i / 4, i % 4);
        assert_int_equal(a->output_row, i / 4);
        assert_int_equal(a->session, i / 24);
        assert_int_equal(a->rank, i / 12 % 2);
        assert_memory_equal(&a->at, &want, offsetof(result_audit, min_margin));
        assert_true(a->at.min_margin == want.min_margin || (isnan(a->at.min_margin) && isnan(want.min_margin)));
        assert_true(a->at.mean_margin == want.mean_margin);
    }
    assert_int_equal(f->observations, 4);
    assert_true(f->has_observed);
    double overlap = 0;
    int64_t live = 0;
    for (int who = 0; who < 4; who++) {
        result_observed want = observed_of(103 * who + 3);
        assert_int_equal(f->observation[who].session, who / 2);
        assert_int_equal(f->observation[who].rank, who % 2);
        assert_memory_equal(&f->observation[who].of, &want, sizeof want);
        overlap += want.overlap_sum[63];
        live += want.cosine_count[1][5];
    }
    assert_true(f->observed.overlap_sum[63] == overlap);
    assert_int_equal(f->observed.cosine_count[1][5], live);
}

static void test_audit_and_observations(void **state)
{
    (void)state;
    results_file *f;
    char copy[600];
    size_t bytes, again_bytes;
    write_audited();
    assert_ok(results_publish(out_path, out_dir, NULL, "complete"));
    assert_ok(results_read(&f, out_path));
    assert_audited(f);
    snprintf(copy, sizeof copy, "%s.copy", out_path);
    assert_ok(results_write(copy, f));
    results_close(f);
    char *first = slurp(out_path, &bytes), *again = slurp(copy, &again_bytes);
    assert_int_equal(bytes, again_bytes);
    assert_memory_equal(first, again, bytes);
    free(first);
    free(again);
}

/* ---- a folder that was removed */

/* Recovers, and publishes the same bytes as before. */
static void assert_recovers(const char *want, size_t want_bytes)
{
    size_t bytes;
    char again[600];
    snprintf(again, sizeof again, "%s.again", out_path);
    assert_ok(results_recover(out_path, out_dir));
    assert_ok(results_publish(again, out_dir, NULL, "partial"));
    char *found = slurp(again, &bytes);
    assert_int_equal(bytes, want_bytes);
    assert_memory_equal(found, want, bytes);
    free(found);
}

static void test_recover(void **state)
{
    (void)state;
    results_state s;
    results_file *f;
    results_standing now;
    journal *j;
    made m;
    size_t bytes;
    int fd;
    char file[600];
    assert_ok(results_recover(out_path, out_dir)); /* nothing there: nothing to do */
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.sessions, 0);
    results_scan_close(&s);
    write_audited();
    assert_ok(journal_open(&j, out_dir, 2, 1)); /* of a rank with a second turn and no counters */
    assert_ok(journal_row(j, make(&m, 4, 1)));
    assert_ok(journal_commit(j, NULL));
    journal_close(j);
    assert_ok(journal_open(&j, out_dir, 0, 2)); /* of a session that did nothing */
    journal_close(j);
    assert_ok(results_publish(out_path, out_dir, NULL, "partial"));
    char *want = slurp(out_path, &bytes);

    remove_all(out_dir);
    assert_ok(results_lock(&fd, out_dir, true, 0));
    assert_recovers(want, bytes);
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.sessions, 3);
    assert_int_equal(s.done + s.failed, 13);
    for (int n = 0; n < 12; n++) {
        const result_row *row = make(&m, n, 0);
        assert_true(results_done(&s, row->dataset, row->id, 0));
    }
    results_scan_close(&s);
    assert_ok(results_status(&now, out_path));
    assert_int_equal(now.total, 12);

    /* with journals there, it does nothing: these go on */
    write_rows(3, 0, 20, 25, 5);
    assert_ok(results_recover(out_path, out_dir));
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.done + s.failed, 18);
    results_scan_close(&s);

    /* one that was killed half-way is begun again; what it left is no session */
    snprintf(file, sizeof file, "%s/recovering", out_dir);
    fclose(fopen(file, "w"));
    snprintf(file, sizeof file, "%s/s0001.r00001.jnl", out_dir);
    assert_int_equal(unlink(file), 0);
    assert_ok(results_status(&now, out_path));
    assert_int_equal(now.done + now.failed, 13);
    assert_recovers(want, bytes);
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.done + s.failed, 13);
    results_scan_close(&s);
    snprintf(file, sizeof file, "%s/recovering", out_dir);
    assert_int_equal(access(file, F_OK), -1);

    /* a new session makes what is there its own */
    fclose(fopen(file, "w"));
    assert_ok(results_begin(out_path, out_dir, "{}", 3));
    assert_int_equal(access(file, F_OK), -1);

    /* a file that cannot be what a run wrote leaves the folder as it is */
    close(fd);
    remove_all(out_dir);
    assert_ok(results_lock(&fd, out_dir, true, 0));
    assert_ok(results_read(&f, out_path));
    f->output[3].session = 7;
    assert_ok(results_write(out_path, f));
    results_close(f);
    assert_says(results_recover(out_path, out_dir), BAD_INPUT, "out.h5: outputs row 3: no session 7 or no rank 1");
    fclose(fopen(out_path, "w"));
    assert_says(results_recover(out_path, out_dir), BAD_INPUT, "not an HDF5 file that can be opened");
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.sessions, 0);
    results_scan_close(&s);
    assert_int_equal(access(file, F_OK), -1);
    close(fd);
    free(want);
}

static void test_recovery_refused(void **state)
{
    (void)state;
    char mark[600], journal_folder[600];
    snprintf(mark, sizeof mark, "%s/recovering", out_dir);
    snprintf(journal_folder, sizeof journal_folder, "%s/s0005.r00000.jnl", out_dir);
    write_rows(0, 0, 0, 3, 3);
    assert_ok(results_publish(out_path, out_dir, NULL, "partial"));
    remove_all(out_dir);
    assert_says(results_recover(out_path, out_dir), BAD_INPUT, "out.h5.d: the folder cannot be read: No such file");
    assert_int_equal(mkdir(out_dir, 0755) + mkdir(mark, 0755), 0);
    assert_says(results_recover(out_path, out_dir), FAILED, "recovering: cannot be created: Is a directory");
    assert_says(results_begin(out_path, out_dir, "{}", 0), FAILED, "recovering: cannot be removed: Is a directory");
    assert_int_equal(rmdir(mark) + mkdir(journal_folder, 0755), 0);
    fclose(fopen(mark, "w"));
    assert_says(results_recover(out_path, out_dir), FAILED, "s0005.r00000.jnl: cannot be removed: Is a directory");
}

static void test_killed_recoveries(void **state)
{
    (void)state;
    size_t bytes;
    int finished = 0;
    unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
    srand(seed);
    for (int rank = 0; rank < 4; rank++)
        write_rows(0, rank, 50 * rank, 50 * rank + 50, 50);
    assert_ok(results_publish(out_path, out_dir, NULL, "partial"));
    char *want = slurp(out_path, &bytes);
    for (int round = 0; round < 10; round++) {
        int how;
        remove_all(out_dir);
        assert_int_equal(mkdir(out_dir, 0755), 0);
        fflush(NULL);
        pid_t child = fork();
        if (child == 0)
            _exit(results_recover(out_path, out_dir));
        nanosleep(&(struct timespec){.tv_nsec = rand() % 20000000}, NULL);
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, &how, 0), child);
        finished += WIFEXITED(how);
        assert_recovers(want, bytes);
    }
    print_message("%d of 10 recoveries killed\n", 10 - finished);
    free(want);
}

/* ---- a full disk; a killed writer */

/* Runs in a child that may not write files above `most` bytes; its exit code says what it saw. */
static int short_of_room(rlim_t most, int (*act)(void))
{
    int how;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGXFSZ, SIG_IGN);
        setrlimit(RLIMIT_FSIZE, &(struct rlimit){most, most});
        _exit(act());
    }
    assert_int_equal(waitpid(child, &how, 0), child);
    assert_true(WIFEXITED(how));
    return WEXITSTATUS(how);
}

static int commit_until_full(void)
{
    journal *j;
    made m;
    int n = 0;
    if (journal_open(&j, out_dir, 0, 0) != OK)
        return 101;
    for (status st = OK; st == OK && n < 100; n += st == OK)
        if (journal_row(j, make(&m, n, 0)) != OK || (st = journal_commit(j, NULL)) == FAILED)
            break;
    if (!strstr(status_message(), "s0000.r00000.jnl: ") ||
        !strstr(status_message(), "could not be written: File too large") ||
        !strstr(status_message(), "make room, then run again with --resume"))
        return 102;
    if (journal_row(j, make(&m, n, 0)) != FAILED || journal_commit(j, NULL) != FAILED ||
        !strstr(status_message(), "an earlier commit failed"))
        return 103;
    journal_close(j);
    return n;
}

static int publish_when_full(void)
{
    if (results_publish(out_path, out_dir, "{}", "complete") != FAILED)
        return 1;
    if (!strstr(status_message(), "out.h5.tmp.") ||
        !strstr(status_message(), "cannot be written: File too large; make room"))
        return 2;
    if (results_begin(out_path, out_dir, "{\"a\":\"0123456789012345678901234567890123456789\"}", 1) != FAILED)
        return 3;
    return strstr(status_message(), "session.tmp: cannot be written: File too large") ? 0 : 4;
}

static void test_full_disk(void **state)
{
    (void)state;
    results_state s;
    results_file *f;
    int done = short_of_room(20000, commit_until_full);
    assert_in_range(done, 3, 60);
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.done + s.failed, done);
    assert_int_equal(s.torn, 0); /* the failed commit was cut back */
    results_scan_close(&s);
    assert_ok(results_publish(out_path, out_dir, "{}", "partial"));
    assert_int_equal(short_of_room(16, publish_when_full), 0);
    assert_ok(results_read(&f, out_path)); /* the old one stands */
    assert_string_equal(f->state, "partial");
    assert_int_equal(f->rows, done);
    results_close(f);
    DIR *d = opendir(top);
    for (struct dirent *e; (e = readdir(d));)
        assert_null(strstr(e->d_name, ".tmp."));
    closedir(d);
}

static void test_killed_writers(void **state)
{
    (void)state;
    unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
    srand(seed);
    int rows = 0, torn = 0;
    for (int round = 0; round < 20; round++) {
        int acks[2], how, acked = 0, group = 1 + rand() % 8;
        long wait = rand() % 40000000;
        assert_int_equal(pipe(acks), 0);
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            journal *j;
            made m;
            if (journal_open(&j, out_dir, round, 0) != OK)
                _exit(1);
            for (int n = 0;;) {
                for (int i = 0; i < group; i++, n++)
                    if (journal_row(j, make(&m, 100000 * round + n, 0)) != OK)
                        _exit(1);
                if (journal_commit(j, &(result_phase){.forwards = n}) != OK || write(acks[1], &n, sizeof n) != sizeof n)
                    _exit(1);
            }
        }
        close(acks[1]);
        nanosleep(&(struct timespec){.tv_nsec = wait}, NULL);
        kill(child, SIGKILL);
        assert_int_equal(waitpid(child, &how, 0), child);
        assert_true(WIFSIGNALED(how));
        while (read(acks[0], &how, sizeof how) == sizeof how)
            acked = how;
        close(acks[0]);
        results_state s;
        made m;
        assert_ok(results_scan(&s, out_dir));
        for (int n = 0; n < acked; n++) {
            const result_row *want = make(&m, 100000 * round + n, 0);
            result_row r;
            assert_true(results_row(&r, &s, want->dataset, want->id, 0));
            assert_string_equal(r.text, want->text);
        }
        assert_true(s.done + s.failed >= rows + acked);
        rows = (int)(s.done + s.failed);
        torn = s.torn;
        results_scan_close(&s);
    }
    print_message("20 writers killed, %d rows, %d torn tails\n", rows, torn);
    assert_ok(results_publish(out_path, out_dir, "{}", "interrupted"));
    results_file *f;
    assert_ok(results_read(&f, out_path));
    assert_int_equal(f->rows, rows);
    for (int64_t i = 0; i < f->rows; i++)
        assert_row(&f->output[i].row, (int)f->output[i].row.order, 0);
    results_close(f);
}

static void test_killed_publishers(void **state)
{
    (void)state;
    unsigned seed = (unsigned)time(NULL);
    print_message("seed %u\n", seed);
    srand(seed);
    write_rows(0, 0, 0, 200, 200);
    assert_ok(results_publish(out_path, out_dir, "{}", "partial"));
    for (int round = 0; round < 10; round++) {
        results_file *f;
        fflush(NULL);
        pid_t child = fork();
        if (child == 0)
            for (;;)
                if (results_publish(out_path, out_dir, "{}", "partial") != OK)
                    _exit(1);
        nanosleep(&(struct timespec){.tv_nsec = rand() % 30000000}, NULL);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        assert_ok(results_read(&f, out_path));
        assert_int_equal(f->rows, 200);
        results_close(f);
    }
}

/* ---- the lock */

/* A child that holds the lock until it is killed, or for `hold` seconds. */
static pid_t holder(bool exclusive, double hold)
{
    int ready[2];
    char byte;
    assert_int_equal(pipe(ready), 0);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        int fd;
        if (results_lock(&fd, out_dir, true, 0) != OK || (!exclusive && results_lock_share(fd) != OK) ||
            write(ready[1], "x", 1) != 1)
            _exit(1);
        nanosleep(&(struct timespec){(time_t)hold, (long)((hold - (double)(time_t)hold) * 1e9)}, NULL);
        _exit(0);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return child;
}

static void test_lock(void **state)
{
    (void)state;
    int fd, other;
    char name[64];
    results_standing s;
    pid_t child = holder(true, 60);
    snprintf(name, sizeof name, "held by pid %ld on ", (long)child);
    assert_says(results_lock(&fd, out_dir, true, 0), BAD_INPUT, name);
    assert_non_null(strstr(status_message(), "test_results"));
    assert_says(results_lock(&fd, out_dir, false, .1), BAD_INPUT, "after 0.1 s of waiting");
    assert_ok(results_status(&s, out_path));
    assert_true(s.running);
    assert_non_null(strstr(s.holder, name + strlen("held by ")));
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);

    child = holder(false, 60); /* shared: the run's other ranks may enter, another run may not */
    assert_ok(results_lock(&fd, out_dir, false, 0));
    assert_says(results_lock(&other, out_dir, true, 0), BAD_INPUT, "and 1 more");
    close(fd);
    assert_ok(results_status(&s, out_path));
    assert_true(s.running);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);

    child = holder(false, .3); /* a leftover that ends in time */
    assert_ok(results_lock(&fd, out_dir, true, 10));
    waitpid(child, NULL, 0);
    assert_ok(results_lock_share(fd));
    close(fd);
    assert_says(results_status(&s, out_path), BAD_INPUT, "no results: neither the file nor journals in");
    assert_ok(results_begin(out_path, out_dir, "{\"rows_total\":7}", 0)); /* died while it loaded */
    assert_ok(results_status(&s, out_path));
    assert_int_equal(s.sessions, 0);
    assert_int_equal(s.left, 7);
}

/* ---- a session under other settings keeps some rows, at other places */

static void assert_kept(int session, const result_kept *kept, int64_t count)
{
    results_state s;
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.sessions, session);
    assert_ok(results_keep(out_dir, session, kept, count));
    assert_ok(results_drop(&s, out_dir, session));
    assert_int_equal(s.done + s.failed, count);
    results_scan_close(&s);
    assert_ok(results_begin(out_path, out_dir, "{\"rows_total\":8}", session));
}

static void test_keep(void **state)
{
    (void)state;
    results_state s;
    results_file *f;
    result_row r;
    made m;
    journal *j;
    write_rows(0, 0, 0, 6, 1); /* 5 failed */
    assert_ok(journal_open(&j, out_dir, 1, 0));
    assert_ok(journal_row(j, make(&m, 7, 0)));
    assert_ok(journal_iteration(j, &(result_iteration){.order = 7, .block = 3}));
    assert_ok(journal_iteration(j, &(result_iteration){.order = 2, .block = 4})); /* of a row that it did not finish */
    assert_ok(journal_commit(j, NULL));
    journal_close(j);
    char id[3][32];
    result_kept kept[3];
    for (int i = 0; i < 3; i++) { /* rows 7, 1 and 4 become the first three */
        static const int from[] = {7, 1, 4};
        const result_row *k = make(&m, from[i], 0);
        snprintf(id[i], sizeof id[i], "%s", k->id);
        kept[i] = (result_kept){k->dataset, id[i], 0, i, 100 + i};
    }
    assert_kept(1, kept, 3);
    assert_ok(results_scan(&s, out_dir)); /* the session has no journal yet: nothing is lost */
    assert_int_equal(s.done + s.failed, 7);
    results_scan_close(&s);
    assert_ok(results_keep(out_dir, 1, NULL, 0)); /* and another run may begin it otherwise */
    assert_ok(results_scan(&s, out_dir));
    assert_ok(results_drop(&s, out_dir, 1));
    assert_int_equal(s.done, 6);
    assert_int_equal(s.failed, 1);
    results_scan_close(&s);

    assert_kept(1, kept, 3);
    assert_ok(journal_open(&j, out_dir, 0, 1));
    result_row *again = make(&m, 0, 0);
    again->order = 3;
    again->text = "again";
    assert_ok(journal_row(j, again));
    assert_ok(journal_commit(j, NULL));
    journal_close(j);
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.done, 4);
    assert_int_equal(s.failed, 0);
    make(&m, 4, 0);
    assert_true(results_row(&r, &s, m.row.dataset, m.id, 0));
    assert_int_equal(r.order, 2);
    assert_int_equal(r.source_line, 102);
    make(&m, 3, 0);
    assert_false(results_done(&s, m.row.dataset, m.id, 0));
    results_scan_close(&s);
    assert_ok(results_publish(out_path, out_dir, NULL, "complete"));
    assert_ok(results_read(&f, out_path));
    assert_int_equal(f->rows, 4);
    assert_string_equal(f->output[0].row.id, id[0]);
    assert_string_equal(f->output[1].row.id, id[1]);
    assert_int_equal(f->output[1].row.source_line, 101);
    assert_string_equal(f->output[3].row.text, "again");
    assert_int_equal(f->output[3].session, 1);
    assert_int_equal(f->iterations, 1); /* it moved with its row */
    assert_int_equal(f->iteration[0].output_row, 0);
    assert_int_equal(f->iteration[0].at.block, 3);
    results_close(f);

    assert_kept(2, kept, 0); /* none stay */
    assert_ok(journal_open(&j, out_dir, 0, 2));
    journal_close(j);
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.done + s.failed, 0);
    results_scan_close(&s);
    char file[600];
    snprintf(file, sizeof file, "%s/s0002.keep", out_dir);
    FILE *bad = fopen(file, "w");
    assert_non_null(bad);
    fputs("[1]", bad);
    fclose(bad);
    assert_ok(journal_open(&j, out_dir, 0, 3));
    assert_ok(journal_row(j, make(&m, 1, 0)));
    assert_ok(journal_commit(j, NULL));
    journal_close(j);
    assert_says(results_scan(&s, out_dir), BAD_INPUT, "s0002.keep: entry 0 is no row; use the program that wrote it");
    results_scan_close(&s);
}

/* ---- messages that nothing above provokes */

static void test_messages(void **state)
{
    (void)state;
    int fd;
    journal *j, *again;
    results_file *f;
    results_state s;
    char file[600], junk[600];
    made m;
    assert_says(results_lock(&fd, "/nonexistent/out.h5.d", true, 0), BAD_INPUT,
                "/nonexistent/out.h5.d: the folder cannot be created: No such file or directory");
    assert_ok(journal_open(&j, out_dir, 0, 0));
    assert_says(journal_open(&again, out_dir, 0, 0), FAILED,
                "s0000.r00000.jnl: cannot be created: File exists; another run");
    char *huge = malloc((1u << 28) + 2);
    assert_non_null(huge);
    memset(huge, 'x', (1u << 28) + 1);
    huge[(1u << 28) + 1] = 0;
    result_row *r = make(&m, 1, 0);
    r->text = huge;
    assert_says(journal_row(j, r), FAILED, "above the 256 MiB that a journal takes");
    free(huge);
    assert_ok(journal_row(j, make(&m, 1, 0))); /* and goes on */
    assert_ok(journal_commit(j, NULL));
    journal_close(j);
    assert_ok(results_scan(&s, out_dir));
    assert_int_equal(s.done, 1);
    results_scan_close(&s);
    snprintf(file, sizeof file, "%s/no/folder", top);
    assert_says(journal_open(&j, file, 0, 0), FAILED, "cannot be created: No such file or directory");
    assert_says(results_begin(out_path, out_dir, "[1]", 0), BAD_INPUT, "no JSON object: another type");
    assert_says(results_begin(out_path, out_dir, "{", 0), BAD_INPUT, "no JSON object: ");
    snprintf(junk, sizeof junk, "%s.tmp.123", out_path);
    fclose(fopen(junk, "w"));
    assert_ok(results_begin(out_path, out_dir, "{}", 0));
    assert_int_equal(access(junk, F_OK), -1); /* swept */
    assert_says(results_publish(out_path, out_dir, "3", "partial"), BAD_INPUT, "no JSON object");
    assert_says(results_publish("/nonexistent/out.h5", out_dir, NULL, "partial"), FAILED,
                "cannot be created: No such file or directory");
    assert_says(results_read(&f, out_path), BAD_INPUT, "out.h5: cannot be read: No such file or directory");
    fclose(fopen(junk, "w"));
    assert_says(results_read(&f, junk), BAD_INPUT, "not an HDF5 file that can be opened: ");
    assert_says(results_scan(&s, junk), BAD_INPUT, "the folder cannot be read: Not a directory");
    results_scan_close(&s);
}

/* ---- for tests/unit/results_h5py.py: a file to check, and what reading another one says */

static int write_sample(const char *file)
{
    status st = OK;
    journal *j = NULL;
    made m;
    char hex[512], *run = NULL;
    int fd = -1;
    snprintf(out_dir, sizeof out_dir, "%s.d", file);
    run = malloc(300000);
    size_t at = (size_t)sprintf(
        run, "{\"rows_total\":40,\"threshold\":0.95,\"strict\":true,\"model\":{\"layers\":8},\"long\":\"");
    memset(run + at, 'y', 200000);
    strcpy(run + at + 200000, "\"}");
    TRY(results_lock(&fd, out_dir, true, 0));
    TRY(results_begin(file, out_dir, run, 0));
    TRY(journal_open(&j, out_dir, 0, 0));
    srand(7);
    for (int n = 0; n < 400; n++) {
        result_row *r = make(&m, n, 0);
        /* bytes that are rarely UTF-8, from the edges of its table; the right reading is Python's */
        static const char edges[] =
            "az\x7f\x80\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc2\xdf\xe0\xe1\xec\xed\xee\xef\xf0\xf1\xf3\xf4\xf5\xff";
        int bytes = rand() % 24;
        for (int i = 0; i < bytes; i++)
            m.text[i] = edges[(size_t)rand() % (sizeof edges - 1)];
        m.text[bytes] = 0;
        for (int i = 0; i < bytes; i++)
            sprintf(hex + 2 * i, "%02x", (unsigned char)m.text[i]);
        hex[2 * bytes] = 0;
        r->gold = hex;
        TRY(journal_row(j, r));
        TRY(journal_iteration(j, &(result_iteration){.order = n, .path = PATH_COLD}));
        result_audit a = audit_of(n, 1);
        TRY(journal_audit(j, &a));
    }
    result_observed o = observed_of(1);
    TRY(journal_observed(j, &o));
    TRY(journal_commit(j, &(result_phase){.seconds = {1, 2, 3}, .rows_fresh = {0, 7}}));
    TRY(results_publish(file, out_dir, NULL, "complete"));
out:
    if (st != OK)
        printf("%s\n", status_message());
    journal_close(j);
    free(run);
    if (fd >= 0)
        close(fd);
    return st;
}

static int read_sample(const char *file)
{
    results_file *f;
    status st = results_read(&f, file);
    printf("%s\n", st == OK ? "read" : status_message());
    if (st == OK)
        results_close(f);
    return st;
}

int main(int argc, char **argv)
{
    if (argc == 3)
        return strcmp(argv[1], "write") == 0 ? write_sample(argv[2]) : read_sample(argv[2]);
#define TEST(t) cmocka_unit_test_setup_teardown(t, fresh_folder, drop_folder)
    const struct CMUnitTest tests[] = {TEST(test_round_trip),
                                       TEST(test_no_rows),
                                       TEST(test_many_rows),
                                       TEST(test_cut_at_every_byte),
                                       TEST(test_flip_of_every_bit),
                                       TEST(test_frames_out_of_place),
                                       TEST(test_foreign_journals),
                                       TEST(test_three_sessions),
                                       TEST(test_trace),
                                       TEST(test_keep),
                                       TEST(test_audit_and_observations),
                                       TEST(test_recover),
                                       TEST(test_recovery_refused),
                                       TEST(test_killed_recoveries),
                                       TEST(test_full_disk),
                                       TEST(test_killed_writers),
                                       TEST(test_killed_publishers),
                                       TEST(test_lock),
                                       TEST(test_messages)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
