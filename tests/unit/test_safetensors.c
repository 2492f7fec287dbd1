/* Weight files: real ones, and every way in which a header or an index may be wrong. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/model/safetensors.h"
#include "tests/unit/scratch.h"

#define GOLDEN EPOCH_SOURCE "/tests/golden/vectors"
#define SHARDED GOLDEN "/checkpoints/llada2-tiny-bf16"
#define FILE_OF_TEST "model.safetensors"

static void test_real_files(void **state)
{
    (void)state;
    safetensors *s;
    const stored_tensor *t;
    float f;
    uint16_t half;
    assert_int_equal(safetensors_open(&s, SHARDED), OK);
    assert_int_equal(safetensors_count(s), 130);
    t = safetensors_find(s, "model.layers.1.mlp.gate.expert_bias");
    assert_string_equal(t->file, "model-00002-of-00002.safetensors");
    assert_int_equal(t->type, F32);
    assert_int_equal(t->dims, 1);
    assert_int_equal(t->shape[0], 16);
    assert_int_equal(t->bytes, 64);
    t = safetensors_find(s, "model.word_embeddings.weight");
    assert_string_equal(t->file, "model-00001-of-00002.safetensors");
    assert_int_equal(t->type, BF16);
    assert_int_equal(t->dims, 2);
    assert_int_equal(t->shape[0], 320);
    assert_int_equal(t->shape[1], 64);
    memcpy(&half, (const char *)t->data + 2 * (300 * 64 + 63), 2);
    assert_int_equal(half, 0xbed4); /* -0.4140625 */
    assert_null(safetensors_find(s, "model.word_embeddings"));
    for (int i = 0; i < safetensors_count(s); i++)
        assert_ptr_equal(safetensors_find(s, safetensors_at(s, i)->name), safetensors_at(s, i));
    safetensors_close(s);

    /* one file by its name; three dimensions; integers */
    assert_int_equal(safetensors_open(&s, GOLDEN "/llada2_forward_b8.safetensors"), OK);
    t = safetensors_find(s, "logits");
    assert_int_equal(t->dims, 3);
    assert_int_equal(t->shape[1], 32);
    memcpy(&f, t->data, sizeof f);
    assert_true(f > -20 && f < 20);
    assert_int_equal(safetensors_find(s, "input_ids")->type, I32);
    safetensors_close(s);
    safetensors_close(NULL);
}

static void refuse(const char *path, const char *message)
{
    safetensors *s;
    status st = safetensors_open(&s, path);
    if (st != BAD_INPUT || s || !strstr(status_message(), message))
        fail_msg("want %s: status %d, %s", message, st, status_message());
}

static void accept(const char *header, size_t bytes, int tensors)
{
    safetensors *s;
    static const char zeros[256];
    scratch_raw(FILE_OF_TEST, header, zeros, bytes);
    if (safetensors_open(&s, scratch_dir) != OK)
        fail_msg("%s: %s", header, status_message());
    assert_int_equal(safetensors_count(s), tensors);
    safetensors_close(s);
}

static void test_accepted_headers(void **state)
{
    (void)state;
    scratch_clear();
    accept("{}", 0, 0);
    accept("{\"__metadata__\": {\"format\": \"pt\"}}      ", 0, 0);
    accept("{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3],\"more\":1}}   ", 3, 1);
    accept("{\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}      ", 4, 1);
    accept("{\"none\":{\"dtype\":\"F32\",\"shape\":[0,7],\"data_offsets\":[0,0]}}     ", 0, 1);
}

/* Headers of one line each, with the data bytes that stand behind them. */
static const struct {
    const char *header;
    size_t bytes;
    const char *message;
} bad_header[] = {
    {"{\"a\": nothing}", 0, "model.safetensors: header: byte 13: not JSON: "},
    {"[]", 0, "the header is not a JSON object"},
    {"{\"a\": 1, \"a\": 2}", 0, "not JSON: duplicate object key"},
    {"{\"a\": 1}", 0, "tensor \"a\": want a dtype, a shape and two data_offsets"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "want a dtype, a shape and two"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4, "want a dtype, a shape and two"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4.0]}}", 4, "want a dtype, a shape and two"},
    {"{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
     "tensor \"a\" is F8_E4M3, want F32, F16, BF16, I32 or U8"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, "has 5 dimensions, want at most 4"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,-1],\"data_offsets\":[0,1]}}", 1, "dimension 1 of its shape is no count"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[\"1\"],\"data_offsets\":[0,1]}}", 1, "dimension 0 of its shape is no count"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
     "its shape has more elements than 64 bits can count"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0,
     "its shape has more elements than 64 bits can count"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[9],\"data_offsets\":[0,9]}}", 8,
     "tensor \"a\" lies at bytes 0 to 9, but the file's data has 8: truncated or damaged"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[-1,0]}}", 8, "lies at bytes -1 to 0"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,1]}}", 8, "lies at bytes 2 to 1"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2,2],\"data_offsets\":[0,4]}}", 4,
     "tensor \"a\" has 4 bytes, want 8 (its shape in BF16)"},
    {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[0,2]}}", 2,
     "tensor \"a\" starts at byte 63 of the file, want a multiple of 2: save the file again"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_"
     "offsets\":[1,3]}}",
     3, "tensors \"a\" and \"b\" overlap"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_"
     "offsets\":[3,5]}}",
     5, "data bytes 2 to 3, before tensor \"b\", belong to no tensor"},
    {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 5, "3 bytes behind the last tensor"},
};

static void test_refused_headers(void **state)
{
    (void)state;
    static const char zeros[16];
    scratch_clear();
    for (size_t i = 0; i < sizeof bad_header / sizeof *bad_header; i++) {
        scratch_raw(FILE_OF_TEST, bad_header[i].header, zeros, bad_header[i].bytes);
        refuse(scratch_dir, bad_header[i].message);
    }
    scratch_write(FILE_OF_TEST, "", 0);
    refuse(scratch_dir, "0 bytes, too short for a safetensors file");
    scratch_write(FILE_OF_TEST, "\xff\xff\xff\xff\xff\xff\xff\xff{}", 10);
    refuse(scratch_dir,
           "a header of 18446744073709551615 bytes in a file of 10, want at most 100000000: truncated, or not");

    /* a header beyond the cap in a file that is long enough for it (sparse) */
    scratch_write(FILE_OF_TEST, "\x01\xe1\xf5\x05\0\0\0\0", 8);
    assert_int_equal(truncate(scratch_path(FILE_OF_TEST), 120000000), 0);
    refuse(scratch_dir, "a header of 100000001 bytes");

    scratch_clear();
    assert_int_equal(mkdir(scratch_path(FILE_OF_TEST), 0700), 0);
    refuse(scratch_dir, "model.safetensors: not a regular file");
    scratch_clear();
    refuse(scratch_dir, "neither model.safetensors nor model.safetensors.index.json is in this folder");
    refuse(scratch_path("absent"), "absent: No such file");
}

static void index_of(const char *text)
{
    scratch_write("model.safetensors.index.json", text, strlen(text));
}

static void test_shards(void **state)
{
    (void)state;
    safetensors *s;
    static const float numbers[3] = {1, 2, 3};
    stored_tensor a = {.name = "a", .type = F32, .dims = 1, .shape = {2}, .data = numbers, .bytes = 8};
    stored_tensor b = {.name = "b", .type = F32, .dims = 1, .shape = {1}, .data = numbers + 2, .bytes = 4};
    scratch_clear();
    scratch_tensors("one.safetensors", &a, 1);
    scratch_tensors("two.safetensors", &b, 1);
    index_of("{\"weight_map\": {\"b\": \"two.safetensors\", \"a\": \"one.safetensors\"}}");
    assert_int_equal(safetensors_open(&s, scratch_dir), OK);
    assert_int_equal(safetensors_count(s), 2);
    assert_memory_equal(safetensors_find(s, "a")->data, numbers, 8);
    assert_memory_equal(safetensors_find(s, "b")->data, numbers + 2, 4);
    assert_string_equal(safetensors_find(s, "b")->file, "two.safetensors");
    uint64_t hash = safetensors_hash(s), other;
    safetensors_close(s);

    /* the hash: not of the index's order, but of the weights, of a shape and of a size */
    static const float others[3] = {7, 8, 9};
    a.data = others;
    scratch_tensors("one.safetensors", &a, 1);
    index_of("{\"weight_map\": {\"a\": \"one.safetensors\", \"b\": \"two.safetensors\"}}");
    assert_int_equal(safetensors_open(&s, scratch_dir), OK);
    assert_true(safetensors_hash(s) != hash);
    safetensors_close(s);
    a.data = numbers;
    scratch_tensors("one.safetensors", &a, 1);
    assert_int_equal(safetensors_open(&s, scratch_dir), OK);
    assert_true(safetensors_hash(s) == hash);
    safetensors_close(s);
    a.dims = 2;
    a.shape[1] = 1;
    scratch_tensors("one.safetensors", &a, 1);
    assert_int_equal(safetensors_open(&s, scratch_dir), OK);
    other = safetensors_hash(s);
    assert_true(other != hash);
    safetensors_close(s);

    index_of("{\"weight_map\": {\"a\": \"one.safetensors\", \"b\": \"three.safetensors\"}}");
    refuse(scratch_dir, "/three.safetensors, where it says tensor \"b\" is: No such file");
    index_of("{\"weight_map\": {\"a\": \"one.safetensors\", \"b\": \"one.safetensors\"}}");
    refuse(scratch_dir, "index.json: tensor \"b\" is not in one.safetensors, where it says it is");
    index_of("{\"weight_map\": {\"a\": \"two.safetensors\", \"b\": \"one.safetensors\"}}");
    refuse(scratch_dir, "index.json: tensor \"a\" is not in two.safetensors, where it says it is");
    index_of("{\"weight_map\": {\"a\": \"../one.safetensors\"}}");
    refuse(scratch_dir, "tensor \"a\": want the name of a file in the same folder");
    index_of("{\"weight_map\": {\"a\": 1}}");
    refuse(scratch_dir, "tensor \"a\": want the name of a file in the same folder");
    index_of("{\"weight_map\": []}");
    refuse(scratch_dir, "\"weight_map\" is missing or not an object");
    index_of("{");
    refuse(scratch_dir, "index.json:1:1: not JSON");
    const stored_tensor both[2] = {a, b};
    scratch_tensors("two.safetensors", both, 2);
    index_of("{\"weight_map\": {\"a\": \"one.safetensors\", \"b\": \"two.safetensors\"}}");
    refuse(scratch_dir, "tensor \"a\" is in both ");
    index_of("{\"weight_map\": {\"b\": \"two.safetensors\"}}");
    refuse(scratch_dir, "index.json: tensor \"a\" of two.safetensors is not in the index");
}

/* A small file with tensors of several dtypes; its bytes in memory. */
static size_t sample(unsigned char *bytes, size_t room)
{
    static const float numbers[16] = {1};
    const stored_tensor t[3] = {
        {.name = "model.norm.weight", .type = F32, .dims = 1, .shape = {4}, .data = numbers, .bytes = 16},
        {.name = "lm_head.weight", .type = BF16, .dims = 2, .shape = {3, 4}, .data = numbers, .bytes = 24},
        {.name = "rest", .type = U8, .dims = 3, .shape = {1, 2, 3}, .data = numbers, .bytes = 6}};
    scratch_clear();
    scratch_tensors(FILE_OF_TEST, t, 3);
    FILE *f = fopen(scratch_path(FILE_OF_TEST), "rb");
    size_t n = fread(bytes, 1, room, f);
    fclose(f);
    return n;
}

/* Opens it, and if it opens reads every byte that it claims to hold. */
static bool opens(void)
{
    safetensors *s;
    status st = safetensors_open(&s, scratch_dir);
    if (st != OK) {
        assert_int_equal(st, BAD_INPUT);
        assert_null(s);
        return false;
    }
    volatile unsigned sum = 0;
    for (int i = 0; i < safetensors_count(s); i++)
        for (size_t k = 0; k < safetensors_at(s, i)->bytes; k++)
            sum += ((const unsigned char *)safetensors_at(s, i)->data)[k];
    safetensors_close(s);
    return true;
}

static void test_truncated_anywhere(void **state)
{
    (void)state;
    unsigned char bytes[1024];
    size_t n = sample(bytes, sizeof bytes);
    assert_true(opens());
    for (size_t cut = 0; cut < n; cut++) {
        scratch_write(FILE_OF_TEST, bytes, cut);
        assert_false(opens());
    }
    bytes[n] = 0;
    scratch_write(FILE_OF_TEST, bytes, n + 1);
    assert_false(opens());

    /* and a real shard, at places spread over header and data */
    FILE *f = fopen(SHARDED "/model-00002-of-00002.safetensors", "rb");
    static unsigned char shard[400000];
    n = fread(shard, 1, sizeof shard, f);
    fclose(f);
    scratch_write(FILE_OF_TEST, shard, n);
    assert_true(opens());
    for (size_t cut = 1; cut < n; cut += cut < 8000 ? 97 : 16411) {
        scratch_write(FILE_OF_TEST, shard, cut);
        assert_false(opens());
    }
}

static void test_flipped_bytes(void **state)
{
    (void)state;
    unsigned char bytes[1024], flipped[1024];
    size_t n = sample(bytes, sizeof bytes), header = 8 + bytes[0] + 256u * bytes[1];
    int opened = 0;
    srand(3);
    for (int trial = 0; trial < 3000; trial++) {
        memcpy(flipped, bytes, n);
        for (int k = 0; k <= trial % 3; k++)
            flipped[(size_t)rand() % header] = (unsigned char)(trial % 2 ? rand() : '0' + rand() % 10);
        scratch_write(FILE_OF_TEST, flipped, n);
        opened += opens();
    }
    assert_in_range(opened, 1, 2000); /* a changed name still opens; most changes do not */
}

/* Resident pages of files, on tmpfs or elsewhere; -1 where the kernel does not tell. */
static long resident_kb(void)
{
    char line[256];
    long kb, sum = -1;
    FILE *f = fopen("/proc/self/status", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "RssFile: %ld", &kb) == 1 || sscanf(line, "RssShmem: %ld", &kb) == 1)
            sum = kb + (sum < 0 ? 0 : sum);
    if (f)
        fclose(f);
    return sum;
}

static void touch(const safetensors *s, bool drop)
{
    volatile unsigned sum = 0;
    for (int i = 0; i < safetensors_count(s); i++) {
        const stored_tensor *t = safetensors_at(s, i);
        for (size_t k = 0; k < t->bytes; k += 1024)
            sum += ((const unsigned char *)t->data)[k];
        if (drop)
            safetensors_done(s, t->data, t->bytes);
    }
}

static void test_done_drops_pages(void **state)
{
    (void)state;
    safetensors *s;
    long before = resident_kb();
    if (before < 0) {
        print_message("skipped: no RssFile in /proc/self/status\n");
        skip();
    }
    assert_int_equal(safetensors_open(&s, EPOCH_SOURCE "/models/tiny"), OK);
    touch(s, false);
    assert_true(resident_kb() - before > 25000); /* the two shards hold 27.9 MB */
    touch(s, true);
    assert_true(resident_kb() - before < 2500);
    safetensors_close(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_real_files),         cmocka_unit_test(test_accepted_headers),
        cmocka_unit_test(test_refused_headers),    cmocka_unit_test(test_shards),
        cmocka_unit_test(test_truncated_anywhere), cmocka_unit_test(test_flipped_bytes),
        cmocka_unit_test(test_done_drops_pages)};
    return cmocka_run_group_tests(tests, scratch_open, scratch_close);
}
