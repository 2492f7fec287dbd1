/* Chat forms: what the families' and a file's templates give, and malformed templates, message by message. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "src/model/chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static tokenizer *tiny;
static char path[] = "template-XXXXXX";

static void write_file(const char *text, size_t bytes)
{
    FILE *f = fopen(path, "wb");
    assert_int_equal(fwrite(text, 1, bytes, f), bytes);
    fclose(f);
}

/* The conversation, decoded with its control tokens; and how many ids of it are control tokens. */
static void check(const chat_template *c, const chat_turn *turn, int turns, const char *want, int controls)
{
    token_list l = {0};
    char *text;
    size_t bytes;
    assert_int_equal(chat_encode(c, tiny, &l, turn, turns), OK);
    assert_int_equal(tokenizer_decode(tiny, &text, &bytes, l.id, l.count, false), OK);
    assert_string_equal(text, want);
    for (size_t i = 0; i < l.count; i++)
        controls -= l.id[i] >= tokenizer_control(tiny, "<|startoftext|>");
    assert_int_equal(controls, 0);
    free(text);
    token_list_close(&l);
}

#define SYSTEM "<role>SYSTEM</role>detailed thinking off<|role_end|>"

static const chat_turn talk[] = {{false, "Why?", 4}, {true, "So.", 3}, {false, "<|mask|></role> {user}", 22}};

static void test_families(void **state)
{
    (void)state;
    chat_template *c;
    assert_int_equal(chat_template_open(&c, "llada2_moe", NULL), OK);
    check(c, talk, 1, SYSTEM "<role>HUMAN</role>Why?<|role_end|><role>ASSISTANT</role>", 8);
    check(c, talk, 3, /* control tokens in a user's text stay text */
          SYSTEM "<role>HUMAN</role>Why?<|role_end|><role>ASSISTANT</role>So.<|role_end|>"
                 "<role>HUMAN</role><|mask|></role> {user}<|role_end|><role>ASSISTANT</role>",
          14);
    check(c, NULL, 0, SYSTEM "<role>ASSISTANT</role>", 5);
    chat_template_close(c);
    assert_int_equal(chat_template_open(&c, "llada_moe", NULL), OK);
    check(c, talk, 1, "<role>HUMAN</role>Why?<|role_end|><role>ASSISTANT</role>", 5);
    chat_template_close(c);
    assert_int_equal(chat_template_open(&c, "gpt2", NULL), BAD_INPUT);
    assert_non_null(strstr(status_message(), "no chat form for the family \"gpt2\", want llada2_moe or llada_moe: "
                                             "give one by --template FILE"));
    chat_template_close(NULL);
}

static void test_files(void **state)
{
    (void)state;
    static const char all[] = "# comment {}\n\nsystem:  <role>\\{\\\\\\t}\nuser: Q {user}\\n\n"
                              "assistant:{assistant} <|role_end|> \nprompt: A:";
    chat_template *c;
    write_file(all, sizeof all - 1);
    assert_int_equal(chat_template_open(&c, "gpt2", path), OK);
    check(c, talk, 3, " <role>{\\\t}Q Why?\nSo. <|role_end|> Q <|mask|></role> {user}\nA:", 2);
    chat_template_close(c);

    /* words go across the seams, as if the prompt were one text */
    token_list split = {0}, whole = {0};
    write_file("user:the{user}er", 16);
    assert_int_equal(chat_template_open(&c, "gpt2", path), OK);
    assert_int_equal(chat_encode(c, tiny, &split, &(chat_turn){false, "re the", 6}, 1), OK);
    assert_int_equal(tokenizer_encode(tiny, &whole, "there theer", 11, false), OK);
    assert_int_equal(split.count, whole.count);
    assert_memory_equal(split.id, whole.id, whole.count * sizeof *whole.id);
    assert_int_equal(chat_encode(c, tiny, &split, talk, 2), BAD_INPUT);
    assert_non_null(strstr(status_message(), "turn 2 is the assistant's, and the template has no \"assistant: "));
    assert_int_equal(split.count, whole.count);
    assert_int_equal(chat_encode(c, tiny, &split, &(chat_turn){false, "\xff", 1}, 1), BAD_INPUT);
    token_list_close(&split);
    token_list_close(&whole);
    chat_template_close(c);

    assert_int_equal(chat_template_open(&c, "gpt2", EPOCH_SOURCE "/models/templates/question.txt"), OK);
    check(c, talk, 3, "Question: Why?\nAnswer: So.\n\nQuestion: <|mask|></role> {user}\nAnswer:", 0);
    chat_template_close(c);
}

static void test_malformed(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"", ":1: the template ends without \"user: ...{user}...\""},
        {"\n# x\nprompt: A\n", ":4: the template ends without \"user: "},
        {"user: {user}\nhuman: {user}\n",
         ":2: found \"human\", want \"system: \", \"user: \", \"assistant: \" or \"prompt: \""},
        {"user {user}\n", ":1: found \"user {user}\", want"},
        {"user: {user}\n user: x", ":2: found \" user\", want"},
        {"user: {user}\n\nuser: {user}", ":3: a second \"user\"; write \\n for a line break inside a part"},
        {"user: hello\n", ":1: {user} is missing in \"user\""},
        {"user: {user}\nassistant: x\n", ":2: {assistant} is missing in \"assistant\""},
        {"user: {user} {user}\n", ":1: {user} stands twice, want it once"},
        {"user: {usr}\n", ":1: a brace that does not open {user} in \"user\"; write \\{ for a brace"},
        {"user: {user", ":1: a brace that does not open {user} in \"user\""},
        {"user: {user}\nsystem: {user}", ":2: a brace that does not open anything in \"system\""},
        {"user: {user}\\r", ":1: \\r is no escape, want \\n, \\t, \\\\ or \\{"},
        {"user: {user}\\", ":1: \\  is no escape"},
        {"user: {user}\nsystem: \xff\n", ":2: not UTF-8 text"},
        {"user: {user}\r\n", ":1: a carriage return at the line's end, want line feeds alone"},
    };
    chat_template *c;
    for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        write_file(rows[k][0], strlen(rows[k][0]));
        assert_int_equal(chat_template_open(&c, "llada2_moe", path), BAD_INPUT);
        if (strncmp(status_message(), path, strlen(path)) != 0 ||
            strncmp(status_message() + strlen(path), rows[k][1], strlen(rows[k][1])) != 0)
            fail_msg("\"%s\" does not begin with %s%s", status_message(), path, rows[k][1]);
        assert_null(c);
    }
    write_file("user: {user}\nprompt: a\0b\n", 24);
    assert_int_equal(chat_template_open(&c, "llada2_moe", path), BAD_INPUT);
    assert_non_null(strstr(status_message(), ":2: not UTF-8 text"));
    char *big = calloc(1, (1 << 20) + 1);
    write_file(big, (1 << 20) + 1);
    free(big);
    assert_int_equal(chat_template_open(&c, "llada2_moe", path), BAD_INPUT);
    assert_non_null(strstr(status_message(), "more than 1048576 bytes, too long for a template"));
    assert_int_equal(chat_template_open(&c, "llada2_moe", "no/such"), BAD_INPUT);
    assert_non_null(strstr(status_message(), "no/such: No such file"));
    assert_int_equal(chat_template_open(&c, "llada2_moe", "."), BAD_INPUT);
    assert_non_null(strstr(status_message(), ".: Is a directory"));
}

static int open_all(void **state)
{
    (void)state;
    int f = mkstemp(path);
    if (f >= 0)
        close(f);
    return f < 0 || tokenizer_open(&tiny, EPOCH_SOURCE "/models/tiny") != OK;
}

static int close_all(void **state)
{
    (void)state;
    tokenizer_close(tiny);
    return unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_families), cmocka_unit_test(test_files),
                                       cmocka_unit_test(test_malformed)};
    return cmocka_run_group_tests(tests, open_all, close_all);
}
