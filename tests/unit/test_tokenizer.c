/* The tokenizer over a small tokenizer.json made here: 256 bytes, a few merges. Ids of bytes are 0 .. 255 in the order
 * of the bytes; the ids of the merges follow. Then what is refused, message by message. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/model/bpe.h"
#include "src/model/split.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[] = "tokenizer-XXXXXX", path[64];

#define FAMILY                                                                                                  \
    "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|" \
    "\\s+(?!\\S)|\\s+"

enum { HE = 256, LL, HELL, HELLO, SPACE_A, SPACES, ABC, AB, BC, PLAIN, CONTROL, LONG_CONTROL, NOT_SPECIAL, IDS };

/* The name of a byte in tokenizer.json: itself, or the next character from U+0100 on. */
static void byte_name(char name[3], int byte)
{
    int c = 256;
    for (int b = 0; b <= byte; b++) {
        bool visible = (b > 0x20 && b < 0x7f) || (b > 0xa0 && b != 0xad);
        if (b == byte && visible)
            c = b;
        else if (b < byte && !visible)
            c++;
    }
    if (c < 0x80)
        snprintf(name, 3, "%c", c);
    else
        snprintf(name, 3, "%c%c", 0xc0 | c >> 6, 0x80 | (c & 63));
}

static json_t *base(void)
{
    static const char rest[] =
        "{\"added_tokens\":["
        "{\"id\":266,\"content\":\"<c>\",\"special\":true,\"normalized\":false},"
        "{\"id\":267,\"content\":\"<c><d>\",\"special\":true,\"normalized\":false},"
        "{\"id\":268,\"content\":\"<n>\",\"special\":false,\"normalized\":true}],"
        "\"normalizer\":{\"type\":\"NFC\"},"
        "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},"
        "\"decoder\":{\"type\":\"ByteLevel\"},"
        "\"model\":{\"type\":\"BPE\",\"merges\":[\"h e\",\"l l\",\"he ll\",\"hell o\",\"\u0120 a\","
        "\"\u0120 \u0120\",\"b c\",\"a b\",\"a bc\"]}}";
    static const char *const made[] = {"he",           "ll",  "hell", "hello", "\u0120a",
                                       "\u0120\u0120", "abc", "ab",   "bc",    "plain"};
    json_t *root = json_loads(rest, 0, NULL), *vocab = json_object();
    assert_non_null(root);
    for (int b = 0; b < 256; b++) {
        char name[3];
        byte_name(name, b);
        json_object_set_new(vocab, name, json_integer(b));
    }
    for (int k = 0; k < PLAIN - HE + 1; k++)
        json_object_set_new(vocab, made[k], json_integer(HE + k));
    json_object_set_new(json_object_get(root, "model"), "vocab", vocab);
    return root;
}

static void write_json(json_t *root)
{
    assert_int_equal(json_dump_file(root, path, JSON_COMPACT), 0);
    json_decref(root);
}

/* The base with `change` merged into it, object by object. */
static tokenizer *open_with(const char *change)
{
    tokenizer *t;
    json_t *root = base(), *patch = json_loads(change, 0, NULL);
    assert_non_null(patch);
    assert_int_equal(json_object_update_recursive(root, patch), 0);
    json_decref(patch);
    write_json(root);
    if (tokenizer_open(&t, dir) != OK)
        fail_msg("%s", status_message());
    return t;
}

static void check(const tokenizer *t, const char *text, bool control, const int32_t *want, size_t count)
{
    token_list l = {0};
    assert_int_equal(tokenizer_encode(t, &l, text, strlen(text), control), OK);
    assert_int_equal(l.count, count);
    for (size_t i = 0; i < count; i++)
        assert_int_equal(l.id[i], want[i]);
    token_list_close(&l);
}

#define CHECK(t, text, control, ...) \
    check(t, text, control, (const int32_t[]){__VA_ARGS__}, sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))

static void test_merges(void **state)
{
    (void)state;
    tokenizer *t = open_with("{}");
    assert_int_equal(tokenizer_vocab(t), LONG_CONTROL + 2);
    check(t, "", true, NULL, 0);
    CHECK(t, "hello", false, HELLO);
    CHECK(t, "hellhe", false, HELL, HE);
    CHECK(t, "lll", false, LL, 'l'); /* the leftmost of equal rank */
    CHECK(t, "abc", false, ABC);     /* b c comes before a b */
    CHECK(t, "abab", false, AB, AB);
    CHECK(t, "plain", false, 'p', 'l', 'a', 'i', 'n'); /* in the vocabulary, but no merge makes it */
    CHECK(t, "   a", false, SPACES, SPACE_A);          /* the last space goes with the word */
    CHECK(t, "hello he", false, HELLO, ' ', HE);
    CHECK(t, "\U0001f642", false, 0xf0, 0x9f, 0x99, 0x82);
    CHECK(t, "e\u0301", false, 0xc3, 0xa9); /* NFC */
    tokenizer_close(t);

    t = open_with("{\"model\":{\"merges\":[[\"h\",\"e\"],[\"l\",\"l\"],[\"he\",\"ll\"],[\"a\",\"b\"],[\"l\",\"l\"]]}}");
    CHECK(t, "hell", false, HELL);
    CHECK(t, "ab", false, AB);
    tokenizer_close(t);

    t = open_with("{\"model\":{\"ignore_merges\":true}}");
    CHECK(t, "plain", false, PLAIN);
    CHECK(t, "plainhello", false, 'p', 'l', 'a', 'i', 'n', HELLO);
    tokenizer_close(t);
}

#define NFC "{\"type\":\"NFC\"}"

static void test_normalizers(void **state)
{
    (void)state;
    static const struct {
        const char *normalizer, *to;
    } rows[] = {{"null", "\u00e9e\u0301\ufb01"},
                {NFC, "\u00e9\u00e9\ufb01"},
                {"{\"type\":\"NFD\"}", "e\u0301e\u0301\ufb01"},
                {"{\"type\":\"NFKC\"}", "\u00e9\u00e9fi"},
                {"{\"type\":\"NFKD\"}", "e\u0301e\u0301fi"},
                {"{\"type\":\"Sequence\",\"normalizers\":[" NFC ",{\"type\":\"NFKC\"}]}", "\u00e9\u00e9fi"}};
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        char change[160], *back;
        size_t bytes;
        token_list l = {0};
        json_t *root = base();
        snprintf(change, sizeof change, "[%s]", rows[k].normalizer);
        json_t *part = json_loads(change, 0, NULL);
        json_object_set(root, "normalizer", json_array_get(part, 0));
        json_decref(part);
        write_json(root);
        tokenizer *t;
        assert_int_equal(tokenizer_open(&t, dir), OK);
        assert_int_equal(tokenizer_encode(t, &l, rows[0].to, strlen(rows[0].to), false), OK);
        assert_int_equal(tokenizer_decode(t, &back, &bytes, l.id, l.count, false), OK);
        assert_string_equal(back, rows[k].to);
        free(back);
        token_list_close(&l);
        tokenizer_close(t);
    }
}

static void test_control_tokens(void **state)
{
    (void)state;
    tokenizer *t = open_with("{}");
    assert_int_equal(tokenizer_control(t, "<c>"), CONTROL);
    assert_int_equal(tokenizer_control(t, "<x>"), -1);
    CHECK(t, "a<c>b", true, 'a', CONTROL, 'b');
    CHECK(t, "<c><d><c>", true, LONG_CONTROL, CONTROL); /* the longest at the leftmost place */
    CHECK(t, "he<n>llo", true, HE, NOT_SPECIAL, LL, 'o');
    CHECK(t, "a<c>b<n>", false, 'a', '<', 'c', '>', 'b', '<', 'n', '>');
    /* parts: control only where marked, never across a seam; words across seams */
    token_list l = {0};
    const text_part part[] = {{"he", 2, true},  {"<c>", 3, false}, {"<", 1, true},    {"c>", 2, false},
                              {"<c>", 3, true}, {"he", 2, true},   {"llo", 3, false}, {NULL, 0, true}};
    const int32_t want[] = {HE, '<', 'c', '>', '<', 'c', '>', CONTROL, HELLO};
    assert_int_equal(tokenizer_encode_parts(t, &l, part, sizeof part / sizeof *part), OK);
    assert_int_equal(l.count, sizeof want / sizeof *want);
    assert_memory_equal(l.id, want, sizeof want);
    token_list_close(&l);
    tokenizer_close(t);

    /* a control token whose text is a word of the vocabulary */
    t = open_with(
        "{\"added_tokens\":[{\"id\":265,\"content\":\"plain\",\"special\":true}],\"model\":{\"ignore_merges\":true}}");
    CHECK(t, "plain", false, 'p', 'l', 'a', 'i', 'n');
    CHECK(t, "plain", true, PLAIN);
    tokenizer_close(t);
}

static void test_decode(void **state)
{
    (void)state;
    tokenizer *t = open_with("{}");
    const int32_t ids[] = {HELLO, CONTROL, ' ', 0xf0, 0x9f, NOT_SPECIAL, 999999, -1, 0, PLAIN};
    char *text;
    size_t bytes;
    assert_int_equal(tokenizer_decode(t, &text, &bytes, ids, sizeof ids / sizeof *ids, true), OK);
    assert_int_equal(bytes, 17);
    assert_memory_equal(text, "hello \xf0\x9f<n>\0plain", 18);
    free(text);
    assert_int_equal(tokenizer_decode(t, &text, &bytes, ids, 2, false), OK);
    assert_string_equal(text, "hello<c>");
    free(text);
    assert_int_equal(tokenizer_decode(t, &text, &bytes, NULL, 0, true), OK);
    assert_string_equal(text, "");
    free(text);
    tokenizer_close(t);
}

static void test_invalid_utf8(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        size_t bytes, valid;
    } rows[] = {{"ab\xff", 3, 2},           {"\x80", 1, 0},         {"a\xc3", 2, 1},
                {"\xc0\xaf", 2, 0},         {"\xe2\x82", 2, 0},     {"\xed\xa0\x80", 3, 0},
                {"\xf4\x90\x80\x80", 4, 0}, {"\xc3\xa9\xc3", 3, 2}, {"\xf0\x9f\x99", 3, 0}};
    tokenizer *t = open_with("{}");
    token_list l = {0};
    assert_int_equal(token_list_add(&l, 7), OK);
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        char want[80];
        assert_int_equal(utf8_valid(rows[k].text, rows[k].bytes), rows[k].valid);
        assert_int_equal(tokenizer_encode(t, &l, rows[k].text, rows[k].bytes, false), BAD_INPUT);
        snprintf(want, sizeof want, "not UTF-8: byte 0x%02x at offset %zu of a text of %zu bytes",
                 (unsigned char)rows[k].text[rows[k].valid], rows[k].valid, rows[k].bytes);
        assert_non_null(strstr(status_message(), want));
        assert_int_equal(l.count, 1); /* as it was */
    }
    assert_int_equal(utf8_valid("a\0\xf0\x9f\x99\x82", 6), 6);
    token_list_close(&l);
    tokenizer_close(t);
}

/* Ids of random texts against joining by search, as the rule says it. */
static void test_merges_by_search(void **state)
{
    (void)state;
    static const int32_t rule[][3] = {{'h', 'e', HE},     {'l', 'l', LL},      {HE, LL, HELL},
                                      {HELL, 'o', HELLO}, {' ', 'a', SPACE_A}, {' ', ' ', SPACES},
                                      {'b', 'c', BC},     {'a', 'b', AB},      {'a', BC, ABC}};
    tokenizer *t =
        open_with("{\"normalizer\":{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":["
                  "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a-z ]+\"},\"behavior\":\"Isolated\"},"
                  "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]}}");
    srand(3);
    for (int trial = 0; trial < 2000; trial++) {
        char text[64];
        int32_t id[64];
        size_t n = 0;
        for (size_t bytes = (size_t)rand() % 60; n < bytes; n++) {
            text[n] = "helo abc"[rand() % 8];
            id[n] = text[n];
        }
        text[n] = '\0';
        for (bool joined = true; joined;) {
            joined = false;
            for (size_t r = 0; r < sizeof rule / sizeof *rule && !joined; r++)
                for (size_t i = 0; i + 1 < n && !joined; i++)
                    if (id[i] == rule[r][0] && id[i + 1] == rule[r][1]) {
                        id[i] = rule[r][2];
                        memmove(id + i + 1, id + i + 2, (n - i - 2) * sizeof *id);
                        n--;
                        joined = true;
                    }
        }
        check(t, text, false, id, n);
    }
    tokenizer_close(t);
}

/* Words joined by '|'. */
static status join(void *to, const char *text, size_t bytes)
{
    char *all = to;
    snprintf(all + strlen(all), 200 - strlen(all), "%s%.*s", *all ? "|" : "", (int)bytes, text);
    return OK;
}

static split *split_of(const char *expression)
{
    split *s;
    json_t *part = json_pack("{s:s, s:[{s:s, s:{s:s}, s:s}, {s:s, s:b, s:b}]}", "type", "Sequence", "pretokenizers",
                             "type", "Split", "pattern", "Regex", expression, "behavior", "Isolated", "type",
                             "ByteLevel", "add_prefix_space", 0, "use_regex", 0);
    assert_non_null(part);
    status st = split_open(&s, part, "f");
    json_decref(part);
    return st == OK ? s : NULL;
}

static void test_words(void **state)
{
    (void)state;
    static const struct {
        const char *text, *words;
    } rows[] = {
        {"He's 12 O'CLOCK", "He|'s| |1|2| O|'CLOCK"},
        {"I'LL we'Ve'", "I|'LL| we|'Ve|'"},
        {"a  b   ", "a| | b|   "},
        {"x\r\n\r\n  y\n z", "x|\r\n\r\n| | y|\n| z"},
        {"f(x):\n\n  r", "f|(x|):\n\n| | r"},
        {" .,\n;", " .,\n|;"},
        {"\xc2\x85 x", "\xc2\x85| x"},          /* U+0085 is white space */
        {"a\u180e b", "a|\u180e| b"},           /* U+180E is not, so it is a word of its own, */
        {" \u180e\n", " \u180e\n"},             /* and takes the space before and the line break behind */
        {"a\u200b\u200b", "a|\u200b\u200b"},    /* U+200B neither */
        {"\ufeffbom", "\ufeffbom"},             /* nor U+FEFF */
        {"a\u3000\u3000b", "a|\u3000|\u3000b"}, /* U+3000 is */
        {"\u0663\u0664x", "\u0663|\u0664|x"},
        {"'\u017f", "'\u017f"}, /* a long s is an s in any case */
    };
    split *s = split_of(FAMILY);
    assert_non_null(s);
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        char all[200] = "";
        assert_int_equal(split_words(s, rows[k].text, strlen(rows[k].text), join, all), OK);
        assert_string_equal(all, rows[k].words);
    }
    split_close(s);
    s = split_of("\\S{2}|[\\s\\-]+(?=x)|[^\\d]\\.");
    assert_non_null(s);
    char all[200] = "";
    assert_int_equal(split_words(s, "abc -x -d-.", 11, join, all), OK);
    assert_string_equal(all, "ab|c| -|x |-d|-.");
    split_close(s);
    s = split_of(".+"); /* a dot leaves out the line feed alone */
    assert_non_null(s);
    all[0] = '\0';
    assert_int_equal(split_words(s, "a\rb\n\u2028c", 8, join, all), OK);
    assert_string_equal(all, "a\rb|\n|\u2028c");
    split_close(s);
}

static status refuse(void *to, const char *text, size_t bytes)
{
    (void)to, (void)text;
    return bytes == 1 ? FAILED : OK;
}

/* A text without a place to cut, and one that takes the expression for ever. */
static void test_long_texts(void **state)
{
    (void)state;
    enum { BYTES = 1 << 20 };
    tokenizer *t = open_with("{}");
    token_list l = {0};
    char *text = malloc(BYTES);
    memset(text, 'l', BYTES);
    assert_int_equal(tokenizer_encode(t, &l, text, BYTES, false), OK);
    assert_int_equal(l.count, BYTES / 2);
    l.count = 0;
    memset(text, ' ', BYTES);
    text[BYTES - 1] = 'a';
    assert_int_equal(tokenizer_encode(t, &l, text, BYTES, false), OK);
    assert_int_equal(l.count, BYTES / 2);
    tokenizer_close(t);

    split *s = split_of("(?:a|b)+"); /* more than the compiled expression's stack holds */
    assert_non_null(s);
    memset(text, 'a', BYTES);
    assert_int_equal(split_words(s, text, BYTES, refuse, NULL), OK);
    split_close(s);

    s = split_of("(a+)+b|.");
    assert_non_null(s);
    memset(text, 'a', 100);
    assert_int_equal(split_words(s, text, 100, refuse, NULL), BAD_INPUT);
    assert_non_null(
        strstr(status_message(), "the split expression of tokenizer.json gave up at byte 0 of 100: match limit"));
    assert_int_equal(split_words(s, "caac", 4, refuse, NULL), FAILED); /* a word's failure ends it */
    split_close(s);
    token_list_close(&l);
    free(text);
}

static void test_refused_expressions(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"a|\\w+", "\\w+"},       {"\\bx", "\\bx"},       {"a\\x41", "\\x41"},
        {"(?i)a|b", "(?i)a|b"},   {"^a", "^a"},           {"a$", "$"},
        {"a{1,3}+", "{1,3}+"},    {"a{2}?", "{2}?"},      {"a{,3}", "{,3}"},
        {"[a[b]]", "[b]]"},       {"[a-z&&b]", "&&b]"},   {"[]a]", "[]a]"},
        {"[^\\S\\n]", "\\S\\n]"}, {"(?<n>a)", "(?<n>a)"}, {"(*UCP)a", "(*UCP)a"},
        {"\\p{L", "\\p{L"},       {"\\pL", "\\pL"},       {"a\\", "\\"},
    };
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        char want[120];
        assert_null(split_of(rows[k][0]));
        snprintf(want, sizeof want, "f: pre_tokenizer: not supported in a split expression, from here on: %s [",
                 rows[k][1]);
        assert_non_null(strstr(status_message(), want));
    }
    assert_null(split_of("(a"));
    assert_non_null(
        strstr(status_message(), "f: pre_tokenizer: the split expression (a is wrong: missing closing parenthesis"));
    assert_null(split_of("a*"));
    assert_non_null(strstr(status_message(), "the split expression a* matches the empty text, which is not supported"));
}

#define SEQUENCE(split, level)                                                                \
    "{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\"," split \
    "},{\"type\":\"ByteLevel\"" level "}]}}"
#define ADDED(token) "{\"added_tokens\":[" token "]}"

static void test_refused_files(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"{\"truncation\":{}}", "\"truncation\" is set, which is not supported: make it null"},
        {"{\"padding\":{}}", "\"padding\" is set, which is not supported: make it null"},
        {"{\"decoder\":{\"type\":\"Metaspace\"}}", "decoder \"Metaspace\" is not supported, want ByteLevel"},
        {"{\"decoder\":null}", "decoder \"null\" is not supported"},
        {"{\"normalizer\":{\"type\":\"Lowercase\"}}",
         "normalizer \"Lowercase\" is not supported, want null, NFC, NFD, NFKC, NFKD or a Sequence of them"},
        {"{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"NFC\"},{\"type\":\"Strip\"}]}}",
         "normalizer \"Strip\" is not supported"},
        {"{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[" NFC "," NFC "," NFC "," NFC "," NFC "," NFC "," NFC
         "," NFC "," NFC "]}}",
         "normalizer: a Sequence of more than 8 is not supported"},
        {"{\"pre_tokenizer\":null}", "pre_tokenizer: type \"null\" is not supported, want ByteLevel, or a Sequence"},
        {"{\"pre_tokenizer\":{\"type\":\"Whitespace\"}}", "pre_tokenizer: type \"Whitespace\" is not supported"},
        {"{\"pre_tokenizer\":{\"add_prefix_space\":true}}",
         "pre_tokenizer: ByteLevel with \"add_prefix_space\" is not supported, want false"},
        {"{\"pre_tokenizer\":{\"use_regex\":false}}",
         "pre_tokenizer: ByteLevel alone without \"use_regex\" is not supported, want true"},
        {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Digits\"},{\"type\":\"ByteLevel\"}]}"
         "}",
         "pre_tokenizer: a Sequence of 2, first \"Digits\", is not supported, want Split and ByteLevel"},
        {SEQUENCE("\"behavior\":\"Removed\"", ""),
         "Split with behavior \"Removed\" is not supported, want \"Isolated\""},
        {SEQUENCE("\"behavior\":\"Isolated\",\"invert\":true", ""),
         "Split with \"invert\" is not supported, want false"},
        {SEQUENCE("\"behavior\":\"Isolated\",\"pattern\":{\"String\":\" \"}", ""),
         "the pattern of Split is not {\"Regex\": \"...\"}"},
        {SEQUENCE("\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":\"a\"}", ",\"add_prefix_space\":false"),
         "ByteLevel with \"use_regex\" behind Split is not supported, want false"},
        {"{\"model\":null}", "\"model\" is missing or not an object"},
        {"{\"model\":{\"type\":\"Unigram\"}}", "a model of type \"Unigram\" is not supported, want \"BPE\""},
        {"{\"model\":{\"dropout\":0.1}}", "\"dropout\" is 0.1: merging at random is not supported, want null"},
        {"{\"model\":{\"continuing_subword_prefix\":\"##\"}}", "\"continuing_subword_prefix\" \"##\" is not supported"},
        {"{\"model\":{\"end_of_word_suffix\":\"</w>\"}}", "\"end_of_word_suffix\" \"</w>\" is not supported"},
        {"{\"model\":{\"byte_fallback\":true}}", "\"byte_fallback\" is not supported, want false"},
        {"{\"model\":{\"ignore_merges\":1}}", "\"ignore_merges\" is an integer, want true or false"},
        {"{\"model\":{\"vocab\":[]}}", "\"vocab\" of the model is missing or not an object"},
        {"{\"model\":{\"merges\":{}}}", "\"merges\" of the model is missing or not an array"},
        {"{\"model\":{\"vocab\":{\"x y\":-1}}}", "vocab: the id of \"x y\" is not an integer from 0 to 16777215"},
        {"{\"model\":{\"vocab\":{\"new\":65}}}", "vocab: \"A\" and \"new\" both have id 65"},
        {"{\"model\":{\"vocab\":{\"A\":300}}}", NULL}, /* ids may leave gaps */
        {"{\"model\":{\"merges\":[\"h e\",\"a\"]}}", "merges[1] is neither \"a b\" nor [\"a\", \"b\"]"},
        {"{\"model\":{\"merges\":[\"a b c\"]}}", "merges[0] is neither"},
        {"{\"model\":{\"merges\":[[\"a\"]]}}", "merges[0] is neither"},
        {"{\"model\":{\"merges\":[[\"a\",1]]}}", "merges[0] is neither"},
        {"{\"model\":{\"merges\":[\"a zz\"]}}", "merges[0]: \"zz\" is not in the vocab"},
        {"{\"model\":{\"merges\":[\"\u4e00 a\"]}}", "merges[0]: \"\u4e00\" is not in the vocab"},
        {"{\"model\":{\"merges\":[\" a\"]}}", "merges[0]: \"\" is not in the vocab"},
        {"{\"model\":{\"merges\":[\"z z\"]}}", "merges[0]: the result of \"z\" and \"z\" is not in the vocab"},
        {ADDED("{\"id\":300,\"content\":\"\"}"), "added_tokens: \"\" with id 300: want a text and an id"},
        {ADDED("{\"content\":\"<q>\"}"), "added_tokens: \"<q>\" with id -1: want a text and an id"},
        {ADDED("{\"id\":300,\"content\":\"<q>\",\"single_word\":true}"),
         "\"single_word\" (of \"<q>\") is not supported"},
        {ADDED("{\"id\":300,\"content\":\"<q>\",\"lstrip\":true}"),
         "\"lstrip\" (of \"<q>\") is not supported, want false"},
        {ADDED("{\"id\":300,\"content\":\"<q>\",\"rstrip\":true}"),
         "\"rstrip\" (of \"<q>\") is not supported, want false"},
        {ADDED("{\"id\":300,\"content\":\"plain\"}"), "added_tokens: \"plain\" has id 300, but 265 in the vocab"},
        {ADDED("{\"id\":65,\"content\":\"<q>\"}"), "added_tokens: \"<q>\" has id 65, which another token has too"},
        {ADDED("{\"id\":300,\"content\":\"<q>\"},{\"id\":300,\"content\":\"<r>\"}"),
         "has id 300, which another token has too"},
        {ADDED("{\"id\":300,\"content\":\"<q>\"},{\"id\":301,\"content\":\"<q>\"}"),
         "added_tokens: \"<q>\" is there twice"},
        {ADDED("{\"id\":256,\"content\":\"he\",\"special\":true}"), "\"he\" is special, but the merges make it too"},
    };
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        tokenizer *t;
        json_t *root = base(), *patch = json_loads(rows[k][0], 0, NULL);
        assert_non_null(patch);
        json_object_update_recursive(root, patch);
        json_decref(patch);
        write_json(root);
        status st = tokenizer_open(&t, dir);
        if (!rows[k][1]) {
            assert_int_equal(st, OK);
            tokenizer_close(t);
            continue;
        }
        assert_int_equal(st, BAD_INPUT);
        assert_null(t);
        if (!strstr(status_message(), rows[k][1]) || strncmp(status_message(), path, strlen(path)) != 0)
            fail_msg("\"%s\" does not hold \"%s\"", status_message(), rows[k][1]);
    }
}

static void test_damaged_files(void **state)
{
    (void)state;
    tokenizer *t;
    bpe *b;
    bpe_scratch scratch = {0};
    token_list l = {0};
    json_t *root = base();
    json_object_del(json_object_get(json_object_get(root, "model"), "vocab"), "A");
    write_json(root);
    assert_int_equal(tokenizer_open(&t, dir), BAD_INPUT);
    assert_non_null(strstr(status_message(), "vocab: no token for the byte 0x41"));

    FILE *f = fopen(path, "w");
    fputs("{\"model\":\n{]", f);
    fclose(f);
    assert_int_equal(tokenizer_open(&t, dir), BAD_INPUT);
    assert_non_null(strstr(status_message(), "tokenizer.json:2:2: not JSON"));
    write_json(json_array());
    assert_int_equal(tokenizer_open(&t, dir), BAD_INPUT);
    assert_non_null(strstr(status_message(), "tokenizer.json: not a JSON object"));
    assert_int_equal(tokenizer_open(&t, "no/such"), BAD_INPUT);
    assert_non_null(strstr(status_message(), "no/such/tokenizer.json: No such file"));
    tokenizer_close(NULL);

    root = base();
    assert_int_equal(bpe_open(&b, json_object_get(root, "model"), "f"), OK);
    assert_int_equal(bpe_encode(b, &scratch, &l, "", (size_t)1 << 30), FAILED);
    assert_non_null(strstr(status_message(), "a word of 1073741824 bytes cannot be tokenized"));
    bpe_close(b);
    json_decref(root);
}

static int open_dir(void **state)
{
    (void)state;
    if (!mkdtemp(dir))
        return 1;
    snprintf(path, sizeof path, "%s/tokenizer.json", dir);
    return 0;
}

static int close_dir(void **state)
{
    (void)state;
    unlink(path);
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merges),
        cmocka_unit_test(test_normalizers),
        cmocka_unit_test(test_control_tokens),
        cmocka_unit_test(test_decode),
        cmocka_unit_test(test_invalid_utf8),
        cmocka_unit_test(test_merges_by_search),
        cmocka_unit_test(test_words),
        cmocka_unit_test(test_long_texts),
        cmocka_unit_test(test_refused_expressions),
        cmocka_unit_test(test_refused_files),
        cmocka_unit_test(test_damaged_files),
    };
    return cmocka_run_group_tests(tests, open_dir, close_dir);
}
