/* Token ids against those of the reference implementation (tests/tools/tokenizer_hashes.py writes them and says what a
 * hash covers). The benchmark files are read from $EPOCH_DATA; without it that part says skipped. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/model/chat.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#define SAMPLES EPOCH_SOURCE "/datasets/samples"
#define TINY EPOCH_SOURCE "/models/tiny"
#define GOLDEN EPOCH_SOURCE "/tests/golden"

typedef struct summary {
    uint64_t ids, normal;
    int64_t texts, tokens, changed;
} summary;

static const summary nothing = {.ids = 0xcbf29ce484222325u, .normal = 0xcbf29ce484222325u};

static tokenizer *tiny;
static json_t *hashes, *strings;

static void hash(uint64_t *h, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        *h = (*h ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
}

static void hash_ids(uint64_t *h, const token_list *l)
{
    for (size_t i = 0; i < l->count; i++) {
        uint32_t id = (uint32_t)l->id[i];
        unsigned char b[4] = {id & 255, id >> 8 & 255, id >> 16 & 255, id >> 24};
        hash(h, b, 4);
    }
    hash(h, "\xff\xff\xff\xff", 4);
}

/* Encodes, decodes, and adds both to the summary. */
static void add(summary *s, const tokenizer *t, const char *text, size_t bytes)
{
    token_list ids = {0};
    char *back;
    size_t length;
    assert_int_equal(tokenizer_encode(t, &ids, text, bytes, false), OK);
    assert_int_equal(tokenizer_decode(t, &back, &length, ids.id, ids.count, true), OK);
    hash_ids(&s->ids, &ids);
    hash(&s->normal, back, length);
    hash(&s->normal, "\xff", 1);
    s->texts++;
    s->tokens += (int64_t)ids.count;
    s->changed += length != bytes || memcmp(back, text, bytes) != 0;
    free(back);
    token_list_close(&ids);
}

static int64_t number(const json_t *item, const char *key)
{
    assert_true(json_is_integer(json_object_get(item, key)));
    return json_integer_value(json_object_get(item, key));
}

static const char *text_of(const json_t *item, const char *key)
{
    assert_true(json_is_string(json_object_get(item, key)));
    return json_string_value(json_object_get(item, key));
}

static void compare(const summary *s, const json_t *want, const char *name)
{
    char ids[17], normal[17];
    snprintf(ids, sizeof ids, "%016llx", (unsigned long long)s->ids);
    snprintf(normal, sizeof normal, "%016llx", (unsigned long long)s->normal);
    if (s->texts != number(want, "texts") || s->tokens != number(want, "tokens") ||
        strcmp(ids, text_of(want, "ids")) != 0)
        fail_msg("%s: %lld texts, %lld tokens, ids %s, want %lld, %lld, %s", name, (long long)s->texts,
                 (long long)s->tokens, ids, (long long)number(want, "texts"), (long long)number(want, "tokens"),
                 text_of(want, "ids"));
    /* decode(encode(text)) is the normalised text, byte for byte, and for all but `changed` texts the text itself */
    assert_string_equal(normal, text_of(want, "normal"));
    assert_int_equal(s->changed, number(want, "changed"));
}

static char *read_file(const char *path, size_t *bytes)
{
    gzFile f = gzopen(path, "rb"); /* plain files too */
    if (!f)
        fail_msg("%s cannot be opened", path);
    char *text = malloc(1 << 24);
    int n = gzread(f, text, 1 << 24);
    assert_in_range(n, 1, (1 << 24) - 1);
    gzclose(f);
    *bytes = (size_t)n;
    return text;
}

static void add_row(summary *s, const char *line, size_t bytes)
{
    static const char *const fields[] = {"question", "answer", "prompt", "canonical_solution", "test", "turns"};
    json_t *row = json_loadb(line, bytes, 0, NULL), *turn;
    assert_non_null(row);
    for (size_t k = 0; k < sizeof fields / sizeof *fields; k++) {
        size_t i;
        const json_t *v = json_object_get(row, fields[k]);
        if (json_is_string(v))
            add(s, tiny, json_string_value(v), json_string_length(v));
        json_array_foreach(v, i, turn) {
            add(s, tiny, json_string_value(turn), json_string_length(turn));
        }
    }
    json_decref(row);
}

static void check_files(const json_t *list, const char *folder)
{
    size_t i, bytes;
    json_t *item;
    assert_true(json_array_size(list) > 0);
    json_array_foreach(list, i, item) {
        char path[1024];
        snprintf(path, sizeof path, "%s/%s", folder, text_of(item, "file"));
        char *text = read_file(path, &bytes);
        summary s = nothing;
        for (size_t at = 0, n; at < bytes; at += n + 1) {
            const char *end = memchr(text + at, '\n', bytes - at), *tab;
            n = end ? (size_t)(end - text) - at : bytes - at;
            if (strstr(path, ".json"))
                add_row(&s, text + at, n);
            else if ((tab = memchr(text + at, '\t', n)) != NULL)
                add(&s, tiny, text + at, (size_t)(tab - text) - at);
        }
        compare(&s, item, path);
        if (s.changed)
            print_message("%s: %lld of %lld texts are not NFC and come back as their NFC form\n", path,
                          (long long)s.changed, (long long)s.texts);
        free(text);
    }
}

static void test_samples(void **state)
{
    (void)state;
    check_files(json_object_get(hashes, "samples"), SAMPLES);
}

static void test_benchmarks(void **state)
{
    (void)state;
    const char *folder = getenv("EPOCH_DATA");
    if (!folder) {
        print_message("skipped: EPOCH_DATA does not name a folder with the benchmark files\n");
        skip();
    }
    check_files(json_object_get(hashes, "benchmarks"), folder);
}

static void test_characters(void **state)
{
    (void)state;
    summary s = nothing;
    for (unsigned c = 0; c < 0x10000; c++) {
        char text[6] = "a";
        size_t n = 1;
        if (c >= 0xd800 && c < 0xe000)
            continue;
        if (c < 0x80)
            text[n++] = (char)c;
        else {
            if (c < 0x800)
                text[n++] = (char)(0xc0 | c >> 6);
            else {
                text[n++] = (char)(0xe0 | c >> 12);
                text[n++] = (char)(0x80 | (c >> 6 & 63));
            }
            text[n++] = (char)(0x80 | (c & 63));
        }
        text[n++] = 'b';
        add(&s, tiny, text, n);
    }
    compare(&s, json_array_get(json_object_get(hashes, "characters"), 0), "characters");
}

static uint64_t draw(uint64_t *x, size_t n)
{
    *x = *x * 6364136223846793005u + 1442695040888963407u;
    return (*x >> 33) % n;
}

static void test_random_texts(void **state)
{
    (void)state;
    const json_t *item = json_array_get(json_object_get(hashes, "random"), 0);
    const json_t *pieces = json_object_get(item, "pieces");
    summary s = nothing;
    uint64_t x = 1;
    for (int64_t left = number(item, "texts"); left > 0; left--) {
        char text[40 * 16];
        size_t bytes = 0;
        for (uint64_t n = draw(&x, 40); n > 0; n--) {
            const json_t *piece = json_array_get(pieces, draw(&x, json_array_size(pieces)));
            memcpy(text + bytes, json_string_value(piece), json_string_length(piece));
            bytes += json_string_length(piece);
        }
        add(&s, tiny, text, bytes);
    }
    compare(&s, item, "random texts");
}

static void check_ids(const token_list *l, const json_t *want, const char *name)
{
    size_t n = json_array_size(want);
    for (size_t i = 0; i < l->count && i < n; i++)
        if (l->id[i] != json_integer_value(json_array_get(want, i)))
            fail_msg("%s: id %zu is %d, want %lld", name, i, l->id[i],
                     (long long)json_integer_value(json_array_get(want, i)));
    if (l->count != n)
        fail_msg("%s: %zu ids, want %zu", name, l->count, n);
}

static void test_strings(void **state)
{
    (void)state;
    size_t i;
    json_t *item;
    json_array_foreach(json_object_get(strings, "strings"), i, item) {
        const json_t *text = json_object_get(item, "text"), *ids = json_object_get(item, "ids"),
                     *known = json_object_get(item, "control_ids");
        token_list l = {0};
        assert_int_equal(tokenizer_encode(tiny, &l, json_string_value(text), json_string_length(text), false), OK);
        check_ids(&l, ids, json_string_value(text));
        l.count = 0;
        assert_int_equal(tokenizer_encode(tiny, &l, json_string_value(text), json_string_length(text), true), OK);
        check_ids(&l, known ? known : ids, json_string_value(text));
        token_list_close(&l);
    }
}

/* Other kinds of tokenizer: the tiny one with parts of its file replaced. */
static void test_variants(void **state)
{
    (void)state;
    size_t i, k;
    json_t *variant, *item;
    char dir[] = "tokenizer-XXXXXX", path[64];
    assert_non_null(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    assert_true(json_array_size(json_object_get(hashes, "variants")) > 0);
    json_array_foreach(json_object_get(hashes, "variants"), i, variant) {
        tokenizer *t;
        summary s = nothing;
        json_t *root = json_load_file(TINY "/tokenizer.json", 0, NULL);
        assert_int_equal(json_object_update(root, json_object_get(variant, "parts")), 0);
        assert_int_equal(json_dump_file(root, path, JSON_COMPACT), 0);
        json_decref(root);
        assert_int_equal(tokenizer_open(&t, dir), OK);
        json_array_foreach(json_object_get(strings, "strings"), k, item) {
            const json_t *text = json_object_get(item, "text");
            add(&s, t, json_string_value(text), json_string_length(text));
        }
        compare(&s, variant, text_of(variant, "name"));
        tokenizer_close(t);
    }
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(dir), 0);
}

/* The user's text in row `index` of a sample file, malloc'd. */
static char *sample_prompt(const char *dataset, int64_t index)
{
    char path[1024], *prompt;
    size_t bytes;
    bool table = strncmp(dataset, "mgsm", 4) == 0;
    snprintf(path, sizeof path, table ? "%s/%s.tsv" : "%s/%s_demo.jsonl", SAMPLES, dataset);
    char *text = read_file(path, &bytes), *line = text;
    text[bytes] = '\0';
    while (index--)
        line = strchr(line, '\n') + 1;
    if (table)
        prompt = strndup(line, strcspn(line, "\t"));
    else {
        json_t *row = json_loadb(line, strcspn(line, "\n"), 0, NULL);
        prompt = strdup(text_of(row, strcmp(dataset, "humaneval") == 0 ? "prompt" : "question"));
        json_decref(row);
    }
    free(text);
    return prompt;
}

static void test_chat_prompts(void **state)
{
    (void)state;
    size_t i;
    json_t *item, *demo = json_load_file(GOLDEN "/vectors/tiny_demo.json", 0, NULL);
    chat_template *c;
    assert_non_null(demo);
    assert_int_equal(chat_template_open(&c, "llada2_moe", NULL), OK);
    assert_true(json_array_size(json_object_get(demo, "cases")) > 0);
    json_array_foreach(json_object_get(demo, "cases"), i, item) {
        char *prompt = sample_prompt(text_of(item, "dataset"), number(item, "index"));
        token_list l = {0};
        assert_int_equal(chat_encode(c, tiny, &l, &(chat_turn){false, prompt, strlen(prompt)}, 1), OK);
        check_ids(&l, json_object_get(item, "prompt_ids"), prompt);
        token_list_close(&l);
        free(prompt);
    }
    chat_template_close(c);
    json_decref(demo);
}

static int open_all(void **state)
{
    (void)state;
    hashes = json_load_file(GOLDEN "/tokenizer_hashes.json", JSON_ALLOW_NUL, NULL);
    strings = json_load_file(GOLDEN "/tokenizer_strings.json", JSON_ALLOW_NUL, NULL);
    return !hashes || !strings || tokenizer_open(&tiny, TINY) != OK;
}

static int close_all(void **state)
{
    (void)state;
    json_decref(hashes);
    json_decref(strings);
    tokenizer_close(tiny);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_samples),      cmocka_unit_test(test_benchmarks), cmocka_unit_test(test_characters),
        cmocka_unit_test(test_random_texts), cmocka_unit_test(test_strings),    cmocka_unit_test(test_variants),
        cmocka_unit_test(test_chat_prompts),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
