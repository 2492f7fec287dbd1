/* Scores: every rule on the texts that it has to judge. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h wants the four above */
#include <cmocka.h>

#include "results/score.h"

#include <stdlib.h>
#include <string.h>

static const char *const verdict_names[] = {"wrong", "right", "no answer", "no gold"};

static void judge(score_rule rule, const char *language, const char *text, const char *gold, score_verdict want)
{
    score_verdict v;
    assert_int_equal(score_compare(&v, rule, language, text, gold), OK);
    if (v != want)
        fail_msg("%s, %s: \"%s\" against \"%s\" is %s, want %s", score_rule_names[rule], language ? language : "gsm8k",
                 text, gold, verdict_names[v], verdict_names[want]);
}

static void reads(score_rule rule, const char *language, const char *text, const char *want)
{
    char *answer;
    assert_int_equal(score_answer(&answer, rule, language, text), OK);
    if (!answer != !want || (want && strcmp(answer, want) != 0))
        fail_msg("%s, %s: \"%s\" reads %s, want %s", score_rule_names[rule], language ? language : "gsm8k", text,
                 answer ? answer : "nothing", want ? want : "nothing");
    free(answer);
}

static score_verdict verdict_of(char letter)
{
    return letter == 'y' ? SCORE_RIGHT : letter == 'n' ? SCORE_WRONG : SCORE_NO_ANSWER;
}

static void test_three_rules(void **state)
{
    (void)state;
    static const struct {
        const char *text, *gold, *want; /* yes, no or nothing (-) under strict, flexible, numeric */
    } c[] = {
        {"total is $29.00.", "29", "-ny"},
        {"#### 18\n\nQuestion: foo #### 99", "18", "yny"},
        {"The answer is 18.", "18", "-yy"},
        {"So she makes $70,000.", "70000", "-yy"},
        {"#### 1,450,000", "1,450,000", "yyy"},
        {"####18", "18", "-yy"},
        {"10 - 20 = -10.", "-10", "-yy"},
        {"#### $18", "18", "-yy"},
        {"", "18", "---"},
        {"No idea.", "18", "---"},
        /* a worked answer as gold */
        {"so 5.\n#### 18", "3 * 6 = <<3*6=18>>18\n#### 18", "yyy"},
        {"#### 17", "1 + 17 = <<1+17=18>>18\n#### 18", "nnn"},
        {"#### 70000", "#### 70,000", "yyy"},
        {"#### -3", "5 - 8\n#### -3", "yyy"},
        {"#### 3", "#### -3", "nnn"},
        /* one rule's weakness each */
        {"#### 18.", "18", "yyy"},
        {"#### 18.0", "18", "nny"},
        {"#### 018", "18", "nny"},
        {"#### 1,8", "18", "yyn"},
        {"#### 18 #### 19", "18", "yny"},
        {"18. Well...", "18", "-ny"},
        {"range 10-20", "20", "-ny"},
        {"18 \xe2\x88\x92 28 = \xe2\x88\x92"
         "10",
         "-10", "-ny"},
    };
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        for (score_rule rule = SCORE_STRICT; rule <= SCORE_NUMERIC; rule++)
            judge(rule, NULL, c[i].text, c[i].gold, verdict_of(c[i].want[rule]));
        judge(SCORE_NUMERIC, "en", c[i].text, c[i].gold, verdict_of(c[i].want[SCORE_NUMERIC]));
    }
    judge(SCORE_NUMERIC, NULL, "#### 18", "Paris", SCORE_NO_GOLD);
    judge(SCORE_LOCALE, "de", "18", "", SCORE_NO_GOLD);
    judge(SCORE_STRICT, NULL, "#### 18", "Paris", SCORE_WRONG);
}

static void test_harness_texts(void **state)
{
    (void)state;
    reads(SCORE_STRICT, NULL, "#### a #### -1,2.3. x", "-12.3");
    reads(SCORE_STRICT, NULL, "##### 7", "7");
    reads(SCORE_STRICT, NULL, "#### -", NULL);
    reads(SCORE_STRICT, NULL, "####  7", NULL);
    reads(SCORE_STRICT, NULL, "#### 7..", "7.");
    reads(SCORE_FLEXIBLE, NULL, "a -5", "-5");
    reads(SCORE_FLEXIBLE, NULL, "a --5", "-5");
    reads(SCORE_FLEXIBLE, NULL, "x5-7", "-7");
    reads(SCORE_FLEXIBLE, NULL, "-$5.50,", "-5.50");
    reads(SCORE_FLEXIBLE, NULL, "5 and -", "5");
    reads(SCORE_FLEXIBLE, NULL, "5, . $", "5");
    reads(SCORE_FLEXIBLE, NULL, "5 $$", "");
    reads(SCORE_FLEXIBLE, NULL, "\xd9\xa5", NULL); /* an Arabic digit */
    char *gold;
    assert_int_equal(score_gold(&gold, SCORE_STRICT, NULL, "a #### 1\nb,##$## 1,800.\n"), OK);
    assert_string_equal(gold, "1800\n");
    free(gold);
    assert_int_equal(score_gold(&gold, SCORE_FLEXIBLE, NULL, "."), OK);
    assert_string_equal(gold, "");
    free(gold);
}

/* The harness's MGSM tasks look for a sentence, and compare without punctuation. */
static void test_harness_mgsm(void **state)
{
    (void)state;
    static const struct {
        const char *language, *text;
    } c[] = {{"bn", "তাই উত্তর হল 5,600।"},   {"de", "Die Antwort lautet 5.600."},
             {"en", "The answer is 5600."},  {"es", "La respuesta es 5600."},
             {"fr", "La réponse est 5600."}, {"ja", "答えは5,600です。"},
             {"ru", "Ответ — 5600."},        {"sw", "Jibu ni 5600."},
             {"te", "సమాధానం 5600."},          {"th", "คำตอบคือ 5600"},
             {"zh", "答案是 5600。"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        judge(SCORE_STRICT, c[i].language, c[i].text, "5,600", SCORE_RIGHT);
        judge(SCORE_STRICT, c[i].language, "#### 5600", "5,600", SCORE_NO_ANSWER);
        judge(SCORE_FLEXIBLE, c[i].language, c[i].text, "5,600", SCORE_RIGHT);
    }
    judge(SCORE_STRICT, "ja", "答えは5600だ。答えは7です。", "7", SCORE_RIGHT);
    judge(SCORE_STRICT, "zh", "答案是 5600.", "5600", SCORE_NO_ANSWER);
    judge(SCORE_FLEXIBLE, "de", "18,5", "185", SCORE_RIGHT);
    judge(SCORE_FLEXIBLE, "de", "-3", "3", SCORE_RIGHT);
}

static void test_numeric(void **state)
{
    (void)state;
    static const char *const c[][2] = {{"#### 18 dollars and 5 cents", "18"},
                                       {"####$ 18", "18"},
                                       {"#### $-18", "-18"},
                                       {"#### -$18", "-18"},
                                       {"#### eighteen, 7", "7"},
                                       {"#### x #### 3, 4", "3"},
                                       {"##### 18, 19", "18"},
                                       {"#### .5", "0.5"},
                                       {"3 #### ", "3"},
                                       {"1,234,567.890", "1234567.89"},
                                       {"1234,567", "1234567"},
                                       {"1,2345", "2345"},
                                       {"1,23", "23"},
                                       {"70,000,5", "5"},
                                       {"1.2.3", "3"},
                                       {"...5", "5"},
                                       {"is .50", "0.5"},
                                       {"a.5", "5"},
                                       {"-0", "0"},
                                       {"-0.00", "0"},
                                       {"000", "0"},
                                       {"100", "100"},
                                       {"1.10", "1.1"},
                                       {"10.0", "10"},
                                       {"0.0012", "0.0012"},
                                       {"00.50", "0.5"},
                                       {"x-5", "5"},
                                       {"(1)-5", "5"},
                                       {"= -5", "-5"},
                                       {"=-5", "-5"},
                                       {"-$1,000.50", "-1000.5"},
                                       {"a$-7", "-7"},
                                       {"\xe6\x98\xaf-3", "-3"},
                                       {"-.5", "-0.5"},
                                       {"50%", "50"},
                                       {"\\boxed{18}", "18"},
                                       {"**18**", "18"},
                                       {"12:30", "30"},
                                       {"x^2", "2"},
                                       {"\xef\xbc\x91\xef\xbc\x98", NULL},
                                       {"-", NULL},
                                       {"$.,", NULL},
                                       {"####", NULL},
                                       {"70.000", "70"},
                                       {"123456789012345678901234567890.10", "123456789012345678901234567890.1"},
                                       {"\xe2\x88", NULL},
                                       {"\xff"
                                        "5",
                                        "5"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++)
        reads(SCORE_NUMERIC, NULL, c[i][0], c[i][1]);
    /* exact: these two are one floating-point number */
    judge(SCORE_NUMERIC, NULL, "9007199254740993", "9007199254740992", SCORE_WRONG);
    judge(SCORE_NUMERIC, NULL, "0.1000000000000000000001", "0.1", SCORE_WRONG);
}

static void test_locale(void **state)
{
    (void)state;
    judge(SCORE_LOCALE, "de", "Antwort: 70.000", "70000", SCORE_RIGHT);
    judge(SCORE_LOCALE, "fr", "5\u202f600", "5,600", SCORE_RIGHT);
    judge(SCORE_LOCALE, "de", "18,00", "18", SCORE_RIGHT);
    judge(SCORE_LOCALE, "en", "Answer: -3", "-3", SCORE_RIGHT);
    judge(SCORE_LOCALE, "bn", "উত্তর: ১৮", "18", SCORE_RIGHT);
    judge(SCORE_LOCALE, "bn", "উত্তর: ১,৪৫০.৫০।", "1450.5", SCORE_RIGHT);
    judge(SCORE_LOCALE, "th", "คำตอบ: ๑๘ บาท", "18", SCORE_RIGHT);
    judge(SCORE_LOCALE, "te", "సమాధానం: ౧౮", "18", SCORE_RIGHT);
    judge(SCORE_LOCALE, "zh", "答案是１８。", "18", SCORE_RIGHT);
    judge(SCORE_LOCALE, "de", "18,5", "185", SCORE_WRONG);
    judge(SCORE_LOCALE, "de", "keine", "185", SCORE_NO_ANSWER);
    static const char *const c[][3] = {{"ja", "－５，６００円", "-5600"},
                                       {"ja", "答えは１８．５", "18.5"},
                                       {"zh", "有3，500个", "500"},
                                       {"zh", "是-3", "-3"},
                                       {"en", "\u0661\u0668", "18"},
                                       {"en", "\u06f1\u06f8", "18"},
                                       {"en", "१८", "18"},
                                       {"en", "5\u00a0600", "5600"},
                                       {"en", "5 600", "600"},
                                       {"en", "18.500", "18.5"},
                                       {"en", "18,500", "18500"},
                                       {"sw", "18,500", "18500"},
                                       {"en", "3,5", "5"},
                                       {"en", "\u22123", "-3"},
                                       {"fr", "#### 5 600 euros", "5600"},
                                       {"fr", "1 234 567,50", "1234567.5"},
                                       {"fr", "5\u2009600", "5600"},
                                       {"fr", "10, 20", "20"},
                                       {"fr", "en 2020 100 chats", "100"},
                                       {"fr", "5 60", "60"},
                                       {"ru", "70\u00a0000 рублей", "70000"},
                                       {"de", "1.234,56", "1234.56"},
                                       {"de", "1,234.56", "1234.56"},
                                       {"de", "18.50", "18.5"},
                                       {"de", "18,500", "18.5"},
                                       {"de", "1,234,567", "1234567"},
                                       {"de", "70'000", "70000"},
                                       {"de", "70\u2019000", "70000"},
                                       {"de", "70.000.", "70000"},
                                       {"de", "18,- Euro", "18"},
                                       {"de", "-1.000", "-1000"},
                                       {"de", "1.000 000", "0"},
                                       {"de", "0,5", "0.5"},
                                       {"es", "$1.500,00", "1500"},
                                       {"de", "2,3,4", "4"},
                                       {"de", "1234.500", "1234.5"},
                                       {NULL, "#### 1,450", "1450"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++)
        reads(SCORE_LOCALE, c[i][0], c[i][1], c[i][2]);
    /* gold is written the English way in every language */
    judge(SCORE_LOCALE, "de", "5.600", "5,600", SCORE_RIGHT);
    judge(SCORE_LOCALE, "de", "5,600", "5,600", SCORE_WRONG);
}

static void test_languages(void **state)
{
    (void)state;
    char *out = (char *)&out;
    assert_int_equal(score_answer(&out, SCORE_LOCALE, "xx", "1"), BAD_INPUT);
    assert_null(out);
    assert_non_null(
        strstr(status_message(), "language \"xx\" is unknown, want one of bn de en es fr ja ru sw te th zh"));
    assert_int_equal(score_gold(&out, SCORE_STRICT, "", "1"), BAD_INPUT);
    score_verdict v;
    assert_int_equal(score_compare(&v, SCORE_NUMERIC, "DE", "1", "1"), BAD_INPUT);
}

static void test_interval(void **state)
{
    (void)state;
    static const struct {
        int64_t right, rows;
        double low, high;
    } c[] = {{0, 0, 0, 1},           {0, 10, 0, 0.2775328},
             {10, 10, 0.7224672, 1}, {5, 10, 0.2365931, 0.7634069},
             {1, 1, 0.2065493, 1},   {195, 200, 0.9428217, 0.9892753}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        double low, high;
        score_interval(&low, &high, c[i].right, c[i].rows);
        assert_float_equal(low, c[i].low, 1e-6);
        assert_float_equal(high, c[i].high, 1e-6);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_three_rules),  cmocka_unit_test(test_harness_texts),
                                       cmocka_unit_test(test_harness_mgsm), cmocka_unit_test(test_numeric),
                                       cmocka_unit_test(test_locale),       cmocka_unit_test(test_languages),
                                       cmocka_unit_test(test_interval)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
