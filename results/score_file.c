#include "results/score_file.h"

#include "results/humaneval.h"
#include "results/score.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PASS_KS = 3 };
static const int pass_k[PASS_KS] = {1, 10, 100};
static const char *const pass_names[PASS_KS] = {"pass@1", "pass@10", "pass@100"};

typedef struct sheet { /* the scores so far */
    result_score *score;
    int64_t count, room;
} sheet;

static status sheet_add(sheet *s, const result_score *one)
{
    status st = OK;
    if (s->count == s->room) {
        int64_t room = s->room ? 2 * s->room : 16;
        result_score *more = realloc(s->score, (size_t)room * sizeof *more);
        if (!more)
            FAIL(FAILED, "scores: out of memory");
        s->score = more;
        s->room = room;
    }
    s->score[s->count++] = *one;
out:
    return st;
}

typedef struct group { /* the rows of one dataset */
    const char *dataset;
    const results_file *file;
    int64_t *row; /* [rows]: of file->output */
    json_t **gold;
    int64_t rows;
} group;

static const result_row *group_row(const group *g, int64_t i)
{
    return &g->file->output[g->row[i]].row;
}

static const char *gold_text(const group *g, int64_t i, const char *key)
{
    return json_string_value(json_object_get(g->gold[i], key));
}

/* The key's text in the first row that has it: a row that failed while it was read has no gold. */
static const char *group_text(const group *g, const char *key)
{
    const char *text = NULL;
    for (int64_t i = 0; i < g->rows && !text; i++)
        text = gold_text(g, i, key);
    return text;
}

static void group_close(group *g)
{
    for (int64_t i = 0; i < g->rows; i++)
        json_decref(g->gold[i]);
    free(g->gold);
    free(g->row);
}

static status group_open(group *g, const results_file *f, const char *dataset)
{
    status st = OK;
    size_t most = (size_t)f->rows + 1;
    *g = (group){.dataset = dataset, .file = f};
    g->row = malloc(most * sizeof *g->row);
    g->gold = malloc(most * sizeof *g->gold);
    if (!g->row || !g->gold)
        FAIL(FAILED, "scores: out of memory");
    for (int64_t i = 0; i < f->rows; i++) {
        const result_row *r = &f->output[i].row;
        if (strcmp(r->dataset, dataset) != 0)
            continue;
        json_error_t e;
        json_t *gold = json_loads(r->gold && *r->gold ? r->gold : "{}", 0, &e);
        if (!json_is_object(gold)) {
            json_decref(gold);
            FAIL(BAD_INPUT, "%s, row \"%s\": its gold is no JSON object: %s", dataset, r->id, e.text);
        }
        g->row[g->rows] = i;
        g->gold[g->rows++] = gold;
    }
out:
    return st;
}

static void count_row(result_score *s, const result_row *r)
{
    s->rows++;
    s->failed += r->failed;
    s->truncated += !r->failed && r->finish_reason && strcmp(r->finish_reason, "length") == 0;
}

/* ---- numbers */

static const char *verdict_word(score_verdict v)
{
    static const char *const words[] = {"no", "yes", "none", "-"};
    return words[v];
}

static status list_row(const group *g, int64_t i, const score_verdict *verdict, int rules, FILE *to)
{
    status st = OK;
    const result_row *r = group_row(g, i);
    const char *language = gold_text(g, i, "language");
    char *read = NULL;
    fprintf(to, "%s\t%s\t%lld", g->dataset, r->id, (long long)r->source_line);
    TRY(score_gold(&read, SCORE_NUMERIC, language, gold_text(g, i, "answer")));
    fprintf(to, "\tgold %s", read ? read : "-");
    for (int rule = 0; rule < rules; rule++) {
        free(read);
        read = NULL;
        TRY(score_answer(&read, (score_rule)rule, language, r->text));
        fprintf(to, "\t%s %s%s%s", score_rule_names[rule], verdict_word(verdict[rule]), read ? " " : "",
                read ? read : "");
    }
    fprintf(to, "\n");
out:
    free(read);
    return st;
}

static status score_numbers(sheet *s, const group *g, const score_order *o, FILE *lists)
{
    status st = OK;
    const char *language = group_text(g, "language");
    int rules = language ? SCORE_RULES : SCORE_LOCALE;
    result_score score[SCORE_RULES] = {{0}};
    for (int rule = 0; rule < rules; rule++) {
        score[rule].dataset = g->dataset;
        score[rule].rule = score_rule_names[rule];
        score[rule].rule_version = SCORE_VERSION;
    }
    for (int64_t i = 0; i < g->rows; i++) {
        const result_row *r = group_row(g, i);
        const char *answer = gold_text(g, i, "answer");
        score_verdict verdict[SCORE_RULES];
        bool split = false;
        for (int rule = 0; rule < rules; rule++) {
            verdict[rule] = SCORE_WRONG;
            if (!answer && !r->failed)
                verdict[rule] = SCORE_NO_GOLD;
            else if (!r->failed)
                TRY(score_compare(&verdict[rule], (score_rule)rule, language, r->text, answer));
            split |= verdict[rule] != SCORE_NO_GOLD && (verdict[rule] == SCORE_RIGHT) != (verdict[0] == SCORE_RIGHT);
            if (verdict[rule] == SCORE_NO_GOLD)
                continue;
            count_row(&score[rule], r);
            score[rule].correct += verdict[rule] == SCORE_RIGHT;
            score[rule].no_answer += verdict[rule] == SCORE_NO_ANSWER;
        }
        if (answer && !r->failed &&
            ((o->disagreements && split) || (o->wrong && verdict[SCORE_NUMERIC] != SCORE_RIGHT)))
            TRY(list_row(g, i, verdict, rules, lists));
    }
    for (int rule = 0; rule < rules; rule++) {
        result_score *one = &score[rule];
        one->score = one->rows ? (double)one->correct / (double)one->rows : NAN;
        score_interval(&one->low, &one->high, one->correct, one->rows);
        TRY(sheet_add(s, one));
    }
out:
    return st;
}

/* ---- programs */

static bool blank(const char *s)
{
    while (isspace((unsigned char)*s))
        s++;
    return !*s;
}

typedef struct sample { /* one row's verdict, to be gathered by task */
    const char *id;
    bool passed;
} sample;

static int by_id(const void *a, const void *b)
{
    return strcmp(((const sample *)a)->id, ((const sample *)b)->id);
}

/* pass@k over the tasks, where every task has at least k samples; *tasks is their number, `fewest` samples the rule. */
static void pass_at(result_score *s, const sample *all, int64_t count, int k, int64_t *tasks, int64_t *fewest)
{
    double sum = 0, squares = 0;
    int64_t most = 0;
    *tasks = 0;
    *fewest = count;
    for (int64_t i = 0, n; i < count; i += n) {
        int passed = 0;
        for (n = 0; i + n < count && strcmp(all[i].id, all[i + n].id) == 0; n++)
            passed += all[i + n].passed;
        if (n >= k) {
            double p = humaneval_pass_at_k((int)n, passed, k);
            sum += p;
            squares += p * p;
        }
        *fewest = n < *fewest ? n : *fewest;
        most = n > most ? n : most;
        ++*tasks;
    }
    s->score = sum / (double)*tasks;
    score_interval(&s->low, &s->high, s->correct, s->rows);
    if (most > 1) { /* not one trial a task: the spread over the tasks */
        double spread =
            *tasks > 1 ? sqrt(fmax(squares / (double)*tasks - s->score * s->score, 0) / (double)(*tasks - 1)) : 1;
        s->low = fmax(0, s->score - 1.96 * spread);
        s->high = fmin(1, s->score + 1.96 * spread);
    }
}

static status score_programs(sheet *s, const group *g, const score_order *o, sandbox *box, FILE *to, FILE *lists)
{
    status st = OK;
    result_score base = {.dataset = g->dataset, .rule_version = PROGRAM_RULE_VERSION};
    sandbox_task *task = calloc((size_t)g->rows, sizeof *task);
    sample *all = calloc((size_t)g->rows, sizeof *all);
    int64_t *row = calloc((size_t)g->rows, sizeof *row);
    char **program = calloc((size_t)g->rows, sizeof *program), *completion = NULL;
    int count = 0;
    if (!task || !all || !row || !program)
        FAIL(FAILED, "scores: out of memory");
    for (int64_t i = 0; i < g->rows; i++) {
        const result_row *r = group_row(g, i);
        const char *prompt = gold_text(g, i, "prompt"), *test = gold_text(g, i, "test"),
                   *entry = gold_text(g, i, "entry_point");
        count_row(&base, r);
        all[i].id = r->id;
        if (r->failed)
            continue;
        if (!prompt || !test || !entry)
            FAIL(BAD_INPUT, "%s, row \"%s\": its gold lacks prompt, test or entry_point", g->dataset, r->id);
        TRY(humaneval_completion(&completion, r->text, prompt, entry));
        base.no_answer += blank(completion);
        TRY(humaneval_program(&program[count], prompt, completion, test, entry));
        task[count].program = program[count];
        row[count++] = i;
        free(completion);
        completion = NULL;
    }
    TRY(sandbox_run(box, task, count));
    for (int c = 0; c < count; c++) {
        const result_row *r = group_row(g, row[c]);
        all[row[c]].passed = task[c].verdict == SANDBOX_PASSED;
        base.correct += all[row[c]].passed;
        if (o->wrong && !all[row[c]].passed)
            fprintf(lists, "%s\t%s\t%lld\t%s\n", g->dataset, r->id, (long long)r->source_line, task[c].message);
    }
    qsort(all, (size_t)g->rows, sizeof *all, by_id);
    int64_t tasks, fewest;
    for (int k = 0; k < PASS_KS; k++) {
        result_score one = base;
        one.rule = pass_names[k];
        pass_at(&one, all, g->rows, pass_k[k], &tasks, &fewest);
        if (fewest >= pass_k[k])
            TRY(sheet_add(s, &one));
    }
    if (strncmp(all[0].id, "HumanEval/", 10) == 0 && tasks < 164)
        fprintf(to, "# %s: partial: %lld of the benchmark's 164 tasks\n", g->dataset, (long long)tasks);
out:
    for (int c = 0; program && c < count; c++)
        free(program[c]);
    free(completion);
    free(program);
    free(row);
    free(all);
    free(task);
    return st;
}

/* ---- the file */

static bool first_of_dataset(const results_file *f, int64_t row)
{
    for (int64_t i = row - 1; i >= 0; i--) /* backwards: most rows follow one of their own */
        if (strcmp(f->output[i].row.dataset, f->output[row].row.dataset) == 0)
            return false;
    return true;
}

static void print_scores(const sheet *s, FILE *to)
{
    if (!s->count)
        return;
    fprintf(to, "%-12s %-9s %7s %7s %7s  %-15s %9s %9s %6s\n", "dataset", "rule", "rows", "right", "score",
            "95 % interval", "no answer", "truncated", "failed");
    for (int64_t i = 0; i < s->count; i++) {
        const result_score *r = &s->score[i];
        fprintf(to, "%-12s %-9s %7lld %7lld %7.4f  %.4f - %.4f %9lld %9lld %6lld\n", r->dataset, r->rule,
                (long long)r->rows, (long long)r->correct, r->score, r->low, r->high, (long long)r->no_answer,
                (long long)r->truncated, (long long)r->failed);
    }
}

static void print_state(const results_file *f, FILE *to)
{
    json_int_t total = json_integer_value(json_object_get(f->run, "rows_total"));
    if (strcmp(f->state, "complete") != 0 && total > 0)
        fprintf(to, "# partial (%s): %lld of %lld rows\n", f->state, (long long)f->rows, (long long)total);
    else if (strcmp(f->state, "complete") != 0)
        fprintf(to, "# partial (%s): %lld rows\n", f->state, (long long)f->rows);
}

status score_file(result_score **out, int64_t *count, const results_file *f, const score_order *o, FILE *to)
{
    status st = OK;
    sheet s = {0};
    group g = {0};
    sandbox *box = NULL;
    char *lists = NULL;
    size_t list_bytes = 0;
    FILE *list = open_memstream(&lists, &list_bytes); /* the tables come first */
    *out = NULL;
    *count = 0;
    if (!list)
        FAIL(FAILED, "scores: out of memory");
    print_state(f, to);
    fprintf(to, "# rules of version %d; failed rows count as wrong; 95 %% interval: Wilson\n", SCORE_VERSION);
    for (int64_t i = 0; i < f->rows; i++) {
        if (!first_of_dataset(f, i))
            continue;
        TRY(group_open(&g, f, f->output[i].row.dataset));
        if (group_text(&g, "test")) {
            if (!o->no_programs && !box) {
                TRY(sandbox_open(&box, &o->sandbox));
                fprintf(to, "# sandbox: %s\n", sandbox_describe(box));
            }
            if (box)
                TRY(score_programs(&s, &g, o, box, to, list));
            else
                fprintf(to, "# %s: not scored, its programs were left out\n", g.dataset);
        } else if (group_text(&g, "answer")) {
            TRY(score_numbers(&s, &g, o, list));
        } else {
            fprintf(to, "# %s: not scored, its rows have no gold answer\n", g.dataset);
        }
        group_close(&g);
        g = (group){0};
    }
    print_scores(&s, to);
    if (fflush(list) != 0)
        FAIL(FAILED, "scores: out of memory");
    if (list_bytes > 0)
        fprintf(to, "# dataset, id, line, and what was found\n%s", lists);
    *out = s.score;
    *count = s.count;
    s.score = NULL;
out:
    group_close(&g);
    sandbox_close(box);
    free(s.score);
    if (list)
        fclose(list);
    free(lists);
    return st;
}

/* ---- the command */

static const char help[] =
    "epoch score FILE.h5 [FILE.h5 ...]: accuracy per dataset under named rules; HumanEval by a sandbox\n\n"
    "  --list-disagreements   list the rows on which the rules disagree\n"
    "  --list-wrong           list the rows that are wrong under numeric, or fail their tests\n"
    "  --no-programs          leave HumanEval out\n"
    "  --jobs N               programs at once (the processors)\n"
    "  --timeout S            CPU seconds of a program (3); four times as much by the clock\n"
    "  --python PATH          interpreter (the first python3 of PATH that runs in the sandbox)\n"
    "  --unprotected          run programs even where your own files cannot be protected from them\n"
    "  --no-save              print only; otherwise the scores are stored in their FILE.h5\n";

static status parse(score_order *o, bool *save, int *first, bool *helped, int argc, char **argv)
{
    status st = OK;
    static const struct option flags[] = {{"list-disagreements", no_argument, NULL, 'd'},
                                          {"list-wrong", no_argument, NULL, 'w'},
                                          {"no-programs", no_argument, NULL, 'n'},
                                          {"jobs", required_argument, NULL, 'j'},
                                          {"timeout", required_argument, NULL, 't'},
                                          {"python", required_argument, NULL, 'p'},
                                          {"unprotected", no_argument, NULL, 'u'},
                                          {"no-save", no_argument, NULL, 's'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    *o = (score_order){.sandbox.jobs = processors > 0 ? (int)processors : 1};
    *save = true;
    *helped = false;
    optind = 1;
    opterr = 0;
    for (int c; (c = getopt_long(argc, argv, "", flags, NULL)) != -1;) {
        char *end = NULL;
        switch (c) {
        case 'd':
            o->disagreements = true;
            break;
        case 'w':
            o->wrong = true;
            break;
        case 'n':
            o->no_programs = true;
            break;
        case 'j': {
            long n = strtol(optarg, &end, 10);
            if (*end || end == optarg || n < 1 || n > 64)
                FAIL(BAD_INPUT, "--jobs %s: want 1 to 64", optarg);
            o->sandbox.jobs = (int)n;
            break;
        }
        case 't':
            o->sandbox.cpu_seconds = strtod(optarg, &end);
            if (*end || end == optarg || !(o->sandbox.cpu_seconds >= 0.1 && o->sandbox.cpu_seconds <= 3600))
                FAIL(BAD_INPUT, "--timeout %s: want 0.1 to 3600 seconds", optarg);
            break;
        case 'p':
            o->sandbox.python = optarg;
            break;
        case 'u':
            o->sandbox.unprotected = true;
            break;
        case 's':
            *save = false;
            break;
        case 'h':
            *helped = true;
            return OK;
        default:
            FAIL(BAD_INPUT, "score: %s is unknown or lacks its value; epoch score --help lists the options",
                 argv[optind - 1]);
        }
    }
    if (optind == argc)
        FAIL(BAD_INPUT, "score: FILE.h5 is missing; epoch score --help");
    *first = optind;
out:
    return st;
}

static status score_one(const char *file, const score_order *o, bool save)
{
    status st = OK;
    results_file *f = NULL;
    result_score *score = NULL;
    results_standing now;
    int64_t count;
    TRY(results_read(&f, file));
    printf("# %s\n", file);
    TRY(score_file(&score, &count, f, o, stdout));
    if (!save)
        goto out;
    TRY(results_status(&now, file));
    if (now.running)
        FAIL(FAILED,
             "%s: the scores were not stored, as the run still writes it (%s); score it again when it is done, or give "
             "--no-save",
             file, now.holder);
    f->score = score;
    f->scores = count;
    TRY(results_write(file, f));
out:
    results_close(f);
    free(score);
    return st;
}

status score_command(int argc, char **argv)
{
    status st = OK;
    score_order o;
    bool save, helped;
    int first = argc;
    TRY(parse(&o, &save, &first, &helped, argc, argv));
    if (helped) {
        fputs(help, stdout);
        return OK;
    }
    for (int i = first; i < argc; i++)
        TRY(score_one(argv[i], &o, save));
out:
    return st;
}
