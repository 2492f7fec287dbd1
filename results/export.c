#include "results/export.h"

#include "results/humaneval.h"
#include "results/score.h"
#include "results/sha256.h"

#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const export_format_names[EXPORT_FORMATS] = {"jsonl", "humaneval", "lm-eval", "mtbench"};

static status put(json_t *line, size_t flags, FILE *to)
{
    status st = OK;
    if (!line)
        FAIL(FAILED, "export: out of memory");
    if (json_dumpf(line, to, flags) != 0 || fputc('\n', to) == EOF)
        FAIL(FAILED, "export: %s", strerror(errno));
out:
    json_decref(line);
    return st;
}

static json_t *number(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static status gold_of(json_t **out, const result_row *r)
{
    status st = OK;
    json_error_t e;
    *out = json_loads(r->gold && *r->gold ? r->gold : "{}", 0, &e);
    if (!json_is_object(*out))
        FAIL(BAD_INPUT, "%s, row \"%s\": its gold is no JSON object: %s", r->dataset, r->id, e.text);
out:
    return st;
}

static const char *member(const json_t *gold, const char *key)
{
    return json_string_value(json_object_get(gold, key));
}

/* ---- one row of each format; *used tells whether it fits */

static status put_jsonl(const result_output *o, FILE *to, bool *used)
{
    status st = OK;
    const result_row *r = &o->row;
    json_t *gold = NULL, *tokens = NULL;
    *used = true;
    TRY(gold_of(&gold, r));
    tokens = json_array();
    for (int32_t i = 0; i < r->tokens; i++)
        json_array_append_new(tokens, json_integer(r->token[i]));
    TRY(put(json_pack(
                "{s:s, s:s, s:I, s:i, s:s, s:s, s:O, s:s, s:s, s:s, s:i, s:i, s:O, s:i, s:i, s:i, s:o, s:o, s:i, s:i}",
                "dataset", r->dataset, "id", r->id, "source_line", (json_int_t)r->source_line, "turn", r->turn,
                "prompt", r->prompt, "text", r->text, "gold", gold, "status", r->failed ? "failed" : "done", "message",
                r->message, "finish_reason", r->finish_reason, "n_prompt_tokens", r->prompt_tokens, "n_tokens",
                r->tokens, "tokens", tokens, "n_blocks", r->blocks, "n_iterations", r->iterations, "forced", o->forced,
                "tokens_per_forward", number(r->iterations ? (double)r->tokens / r->iterations : NAN), "seconds",
                number(r->seconds), "session", o->session, "rank", o->rank),
            0, to));
out:
    json_decref(tokens);
    json_decref(gold);
    return st;
}

static status put_humaneval(const result_row *r, FILE *to, bool *used)
{
    status st = OK;
    json_t *gold = NULL;
    char *completion = NULL;
    TRY(gold_of(&gold, r));
    const char *prompt = member(gold, "prompt"), *entry = member(gold, "entry_point");
    *used = prompt && entry && member(gold, "test");
    if (!*used)
        goto out;
    TRY(humaneval_completion(&completion, r->failed ? "" : r->text, prompt, entry));
    TRY(put(json_pack("{s:s, s:s}", "task_id", r->id, "completion", completion), JSON_ENSURE_ASCII, to));
out:
    free(completion);
    json_decref(gold);
    return st;
}

static json_t *hash_of(const char *text)
{
    char hex[65];
    sha256_hex(hex, text, strlen(text));
    return json_string(hex);
}

/* The document as its benchmark's file has it, and what the harness takes for its target. */
static status document(json_t **doc, json_t **target, const result_row *r, const json_t *gold)
{
    status st = OK;
    const char *answer = member(gold, "answer"), *test = member(gold, "test"), *entry = member(gold, "entry_point");
    if (test && entry) {
        *doc = json_pack("{s:s}", "task_id", r->id);
        static const char *const keys[] = {"prompt", "canonical_solution", "test", "entry_point"};
        for (size_t i = 0; *doc && i < sizeof keys / sizeof *keys; i++)
            if (json_object_get(gold, keys[i]))
                json_object_set(*doc, keys[i], json_object_get(gold, keys[i]));
        *target = json_sprintf("%s\ncheck(%s)", test, entry);
    } else {
        *doc = answer ? json_pack("{s:s, s:s}", "question", r->prompt, "answer", answer)
                      : json_pack("{s:s}", "question", r->prompt);
        *target = json_string(answer ? answer : "");
    }
    if (!*doc || !*target)
        FAIL(FAILED, "export: out of memory");
out:
    return st;
}

static status put_lm_eval(const result_row *r, const json_t *settings, FILE *to, bool *used)
{
    status st = OK;
    static const char *const filters[] = {"strict-match", "flexible-extract"};
    json_t *gold = NULL, *doc = NULL, *target = NULL;
    char *text = NULL, *answer = NULL;
    const char *prompt = r->prompt;
    TRY(gold_of(&gold, r));
    *used = true;
    TRY(document(&doc, &target, r, gold));
    text = json_dumps(doc, JSON_INDENT(2));
    if (!text)
        FAIL(FAILED, "export: out of memory");
    bool scored = member(gold, "answer") != NULL;
    for (int filter = 0; filter < (scored ? 2 : 1); filter++) {
        score_verdict verdict = SCORE_WRONG;
        const char *language = member(gold, "language");
        free(answer);
        answer = NULL;
        if (scored && !r->failed) {
            TRY(score_answer(&answer, (score_rule)filter, language, r->text));
            TRY(score_compare(&verdict, (score_rule)filter, language, r->text, member(gold, "answer")));
        }
        json_t *line =
            json_pack("{s:I, s:O, s:O, s:{s:{s:s, s:O}}, s:[[s]], s:[s], s:s, s:[], s:o, s:o, s:o, s:s}", "doc_id",
                      (json_int_t)(r->source_line - 1), "doc", doc, "target", target, "arguments", "gen_args_0",
                      "arg_0", prompt, "arg_1", settings, "resps", r->text, "filtered_resps",
                      !scored  ? r->text
                      : answer ? answer
                               : "[invalid]",
                      "filter", scored ? filters[filter] : "none", "metrics", "doc_hash", hash_of(text), "prompt_hash",
                      hash_of(prompt), "target_hash", hash_of(json_string_value(target)), "task", r->dataset);
        if (line && scored) {
            json_array_append_new(json_object_get(line, "metrics"), json_string("exact_match"));
            json_object_set_new(line, "exact_match", json_real(verdict == SCORE_RIGHT));
        }
        TRY(put(line, 0, to));
    }
out:
    free(text);
    free(answer);
    json_decref(doc);
    json_decref(target);
    json_decref(gold);
    return st;
}

/* ---- MT-Bench: the turns of a question stand one behind the other */

static int64_t turns_from(const results_file *f, int64_t row)
{
    const result_row *first = &f->output[row].row;
    int64_t n = 1;
    while (row + n < f->rows && f->output[row + n].row.turn > 0 && strcmp(f->output[row + n].row.id, first->id) == 0 &&
           strcmp(f->output[row + n].row.dataset, first->dataset) == 0)
        n++;
    return n;
}

static bool is_mtbench(const result_row *r)
{
    return strncmp(r->dataset, "mtbench", 7) == 0;
}

static const char *last_part(const char *file)
{
    size_t n = strlen(file);
    while (n > 1 && file[n - 1] == '/')
        n--;
    size_t at = n;
    while (at > 0 && file[at - 1] != '/')
        at--;
    return file + at;
}

static status put_question(const results_file *f, int64_t row, int64_t turns, const char *model_id, FILE *to)
{
    status st = OK;
    const result_output *first = &f->output[row];
    char seed[512], hash[65], *end;
    double ended = 0;
    json_t *texts = json_array();
    for (int64_t i = 0; i < turns; i++) {
        const result_row *r = &f->output[row + i].row;
        json_array_append_new(texts, json_string(r->failed ? "" : r->text));
    }
    for (int64_t i = 0; i < f->sessions; i++)
        if (f->session[i].session == first->session)
            ended = f->session[i].ended;
    snprintf(seed, sizeof seed, "%.300s/%.200s", model_id, first->row.id);
    sha256_hex(hash, seed, strlen(seed));
    hash[22] = 0; /* as long as the names that FastChat gives */
    long long id = strtoll(first->row.id, &end, 10);
    TRY(put(json_pack("{s:o, s:s, s:s, s:[{s:i, s:O}], s:f}", "question_id",
                      *end ? json_string(first->row.id) : json_integer(id), "answer_id", hash, "model_id", model_id,
                      "choices", "index", 0, "turns", texts, "tstamp", ended),
            JSON_ENSURE_ASCII, to));
out:
    json_decref(texts);
    return st;
}

static status put_mtbench(const results_file *f, const export_order *o, FILE *to, FILE *notes, int64_t *written)
{
    status st = OK;
    int64_t most = 0, cut = 0;
    const char *model = json_string_value(json_object_get(f->run, "model"));
    char model_id[256];
    snprintf(model_id, sizeof model_id, "%s", o->model_id ? o->model_id : model ? last_part(model) : "epoch");
    model_id[strcspn(model_id, "/")] = 0;
    for (int pass = 0; pass < 2; pass++) /* first: how many turns a question has */
        for (int64_t i = 0, n; i < f->rows; i += n) {
            const result_row *r = &f->output[i].row;
            n = 1;
            if (!(o->dataset ? strcmp(o->dataset, r->dataset) == 0 : is_mtbench(r)))
                continue;
            n = turns_from(f, i);
            if (pass == 0) {
                most = n > most ? n : most;
            } else if (n < most || r->turn != 0) {
                cut++;
            } else {
                TRY(put_question(f, i, n, model_id, to));
                ++*written;
            }
        }
    if (cut)
        fprintf(notes, "# %lld questions left out: not all of their turns are in the file\n", (long long)cut);
out:
    return st;
}

/* ---- the file */

/* The greedy settings of the run in the harness's words. */
static json_t *generation_settings(const results_file *f)
{
    json_t *settings = json_loads(json_string_value(json_object_get(f->run, "settings"))
                                      ? json_string_value(json_object_get(f->run, "settings"))
                                      : "{}",
                                  0, NULL);
    json_t *length = json_object_get(settings, "gen-len");
    json_t *out = json_pack("{s:b, s:[]}", "do_sample", 0, "until");
    if (out && json_is_integer(length))
        json_object_set(out, "max_gen_toks", length);
    json_decref(settings);
    return out;
}

status export_rows(const results_file *f, const export_order *o, FILE *to, FILE *notes)
{
    status st = OK;
    int64_t written = 0, failed = 0;
    json_t *settings = generation_settings(f);
    if (!settings)
        FAIL(FAILED, "export: out of memory");
    if (o->format == EXPORT_MTBENCH)
        TRY(put_mtbench(f, o, to, notes, &written));
    for (int64_t i = 0; i < f->rows; i++) {
        const result_output *r = &f->output[i];
        bool used = false;
        if (o->dataset && strcmp(o->dataset, r->row.dataset) != 0)
            continue;
        if (o->format == EXPORT_JSONL)
            TRY(put_jsonl(r, to, &used));
        else if (o->format == EXPORT_HUMANEVAL)
            TRY(put_humaneval(&r->row, to, &used));
        else if (o->format == EXPORT_LM_EVAL)
            TRY(put_lm_eval(&r->row, settings, to, &used));
        else
            used = o->dataset || is_mtbench(&r->row);
        written += o->format != EXPORT_MTBENCH && used;
        failed += used && r->row.failed;
    }
    if (!written)
        FAIL(BAD_INPUT, "export: no row%s%s fits --format %s", o->dataset ? " of dataset " : "",
             o->dataset ? o->dataset : "", export_format_names[o->format]);
    if (failed)
        fprintf(notes, "# %lld failed rows are among them, with an empty answer\n", (long long)failed);
    if (strcmp(f->state, "complete") != 0)
        fprintf(notes, "# partial: the run is not complete (%s)\n", f->state);
    if (fflush(to) != 0)
        FAIL(FAILED, "export: %s", strerror(errno));
out:
    json_decref(settings);
    return st;
}

/* ---- the command */

static const char help[] =
    "epoch export FILE.h5 --format FORMAT: answers in the forms of other tools, one JSON object a line\n\n"
    "  --format jsonl       one row a prompt and turn: ids, text, token ids, metrics\n"
    "           humaneval   samples.jsonl of the official harness\n"
    "           lm-eval     samples of lm-evaluation-harness\n"
    "           mtbench     model answers of FastChat's llm_judge\n"
    "  --out FILE           write there (standard output)\n"
    "  --dataset NAME       only this dataset of the file\n"
    "  --model-id NAME      mtbench: the model's name (the last part of its path)\n";

/* Answers would be lost: an older export may be replaced, a results file may not. */
static status spare_results(const char *out)
{
    status st = OK;
    char start[8] = "";
    FILE *f = fopen(out, "rb");
    if (f && fread(start, 1, sizeof start, f) == sizeof start && memcmp(start, "\211HDF\r\n\032\n", sizeof start) == 0)
        FAIL(BAD_INPUT, "--out %s is an HDF5 file: name another", out);
out:
    if (f)
        fclose(f);
    return st;
}

status export_command(int argc, char **argv)
{
    status st = OK;
    static const struct option flags[] = {
        {"format", required_argument, NULL, 'f'},  {"out", required_argument, NULL, 'o'},
        {"dataset", required_argument, NULL, 'd'}, {"model-id", required_argument, NULL, 'm'},
        {"help", no_argument, NULL, 'h'},          {0}};
    export_order o = {.format = EXPORT_FORMATS};
    results_file *f = NULL;
    const char *out = NULL;
    FILE *to = stdout;
    optind = 1;
    opterr = 0;
    for (int c; (c = getopt_long(argc, argv, "", flags, NULL)) != -1;) {
        switch (c) {
        case 'f':
            for (o.format = 0; o.format < EXPORT_FORMATS && strcmp(optarg, export_format_names[o.format]) != 0;)
                o.format++;
            if (o.format == EXPORT_FORMATS)
                FAIL(BAD_INPUT, "--format %s: want jsonl, humaneval, lm-eval or mtbench", optarg);
            break;
        case 'o':
            out = optarg;
            break;
        case 'd':
            o.dataset = optarg;
            break;
        case 'm':
            o.model_id = optarg;
            break;
        case 'h':
            fputs(help, stdout);
            return OK;
        default:
            FAIL(BAD_INPUT, "export: %s is unknown or lacks its value; epoch export --help lists the options",
                 argv[optind - 1]);
        }
    }
    if (argc - optind != 1)
        FAIL(BAD_INPUT, "export: want one FILE.h5, found %d; epoch export --help", argc - optind);
    if (o.format == EXPORT_FORMATS)
        FAIL(BAD_INPUT, "export: --format is missing: jsonl, humaneval, lm-eval or mtbench");
    if (out)
        TRY(spare_results(out));
    TRY(results_read(&f, argv[optind]));
    if (out && !(to = fopen(out, "w")))
        FAIL(BAD_INPUT, "--out %s: %s", out, strerror(errno));
    TRY(export_rows(f, &o, to, stderr));
out:
    if (to && to != stdout && fclose(to) != 0 && st == OK)
        st = status_fail(FAILED, __FILE__, __LINE__, "%s: %s", out, strerror(errno));
    if (to && to != stdout && st != OK)
        remove(out); /* half a file would pass for a whole one */
    results_close(f);
    return st;
}
