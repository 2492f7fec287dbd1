#include "src/options.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef enum kind { TEXT, LIST, INT, LONG, REAL, SWITCH, CHOICE } kind;

typedef struct flag {
    const char *name;
    kind kind;
    size_t at;            /* in struct options */
    const char *fallback; /* as on the command line; NULL: not set */
    const char *choices;  /* CHOICE: a|b|c */
    double low, high;
    const char *unit, *help;
} flag;

#define AT(member) offsetof(options, member)
#define ANY_INT 2147483647.0

static const flag table[] = {
    {"model", TEXT, AT(model), NULL, NULL, 0, 0, "DIR",
     "checkpoint folder (config.json, *.safetensors, tokenizer.json); needed"},
    {"data", LIST, AT(data), NULL, NULL, 0, 0, "KIND:PATH[@FROM-TO]",
     "rows to run; may be given several times. Kinds: gsm8k, mgsm, humaneval, mtbench, jsonl; needed"},
    {"out", TEXT, AT(out), NULL, NULL, 0, 0, "FILE.h5", "results file; must not exist unless --resume; needed"},
    {"limit", LONG, AT(limit), "0", NULL, 0, 1e15, "rows", "at most so many rows of each --data; 0: all"},
    {"prompt-field", TEXT, AT(prompt_field), "prompt", NULL, 0, 0, "KEY", "jsonl: the key that holds the prompt"},
    {"shots", TEXT, AT(shots), NULL, NULL, 0, 0, "N:FILE", "put N solved examples of a gsm8k file before each prompt"},
    {"template", TEXT, AT(template_file), NULL, NULL, 0, 0, "FILE", "chat form in place of the family's own"},
    {"device", CHOICE, AT(device), "auto", "auto|cpu|cuda", 0, 0, "", "what computes"},
    {"threads", INT, AT(threads), "0", NULL, 0, 1024, "",
     "CPU threads of each rank, at most the cores it may run on; 0: the host's cores dealt to its ranks"},
    {"mode", CHOICE, AT(mode), "epoch", "epoch|full|no-atlas|no-lsp|no-lane", 0, 0, "",
     "epoch; full: the exact dense executor; or epoch without one of its three parts"},
    {"batch", INT, AT(batch), "16", NULL, 1, 1 << 20, "sequences",
     "in flight over the whole job, dealt evenly to the ranks"},
    {"batch-per-rank", INT, AT(batch_per_rank), "0", NULL, 0, 1 << 20, "sequences",
     "in flight on each rank, in place of --batch"},
    {"cohort", TEXT, AT(cohort), "1", NULL, 0, 0, "N|batch",
     "sequences that share supports in lock-step; above 1, outputs depend on the batch"},
    {"gen-len", INT, AT(gen_len), "256", NULL, 1, ANY_INT, "tokens", "longest answer"},
    {"threshold", REAL, AT(threshold), "0.95", NULL, 0, 1, "", "tau: a position commits above this probability"},
    {"max-steps", INT, AT(max_steps), "64", NULL, 1, ANY_INT, "iterations",
     "of one block; in the last one all that is left commits"},
    {"block-size", INT, AT(block_size), "0", NULL, 0, 64, "positions", "0: the checkpoint's own, else 32"},
    {"prefill-blocks", INT, AT(prefill_blocks), "8", NULL, 1, 1 << 16, "blocks",
     "prompt blocks of one rank in one forward, at most"},
    {"mask-id", INT, AT(mask_id), "-1", NULL, -1, ANY_INT, "id", "mask token; -1: the checkpoint's"},
    {"eos-id", INT, AT(eos_id), "-1", NULL, -1, ANY_INT, "id", "end token; -1: the checkpoint's"},
    {"refresh", INT, AT(refresh), "5", NULL, 1, ANY_INT, "iterations",
     "M_C: every so many hot iterations all rows are computed afresh"},
    {"update", INT, AT(update), "0", NULL, 0, ANY_INT, "iterations",
     "rebuild supports by count; 0: only where the coverage test asks"},
    {"atlas-coverage", REAL, AT(atlas_coverage), "0.98", NULL, 0.001, 1, "",
     "alpha: share of its top-k score that a row must keep"},
    {"atlas-share", REAL, AT(atlas_share), "0.98", NULL, 0, 1, "", "q: share of the rows that must keep it"},
    {"atlas-extra", INT, AT(atlas_extra), "-1", NULL, -1, 1024, "experts",
     "m: candidates beyond top-k; -1: as many as top-k"},
    {"atlas-budget", INT, AT(atlas_budget), "-1", NULL, -1, 1024, "experts",
     "B: experts a support starts with; -1: three eighths of them"},
    {"atlas-step", INT, AT(atlas_step), "-1", NULL, -1, 1024, "experts",
     "c: most experts a repair round adds; -1: an eighth of B"},
    {"atlas-mass", REAL, AT(atlas_mass), "1", NULL, 0, 1e9, "",
     "beta: weight of the mass gained beside the rows rescued"},
    {"placement", CHOICE, AT(placement), "dp", "dp|tp", 0, 0, "", "dp: attention by sequence, experts sharded"},
    {"transport", CHOICE, AT(transport), "auto", "auto|self|mpi|nccl|lsa", 0, 0, "",
     "how rows travel: within a rank, in host memory, between GPUs, or those of one host; auto: lsa if it can"},
    {"combine", CHOICE, AT(combine), "fp32", "fp32|bf16", 0, 0, "",
     "partial sums between GPUs; bf16 halves their bytes, and answers then depend on the number of ranks"},
    {"weights", CHOICE, AT(weights), "auto", "auto|stored|f32", 0, 0, "",
     "CPU: matrices as stored, or widened once; auto: widened where that takes at most 2 GB a rank"},
    {"kv-tokens", LONG, AT(kv_tokens), "0", NULL, 0, 1e12, "positions",
     "KV pool of each rank; 0: 1024 a sequence, at least one longest"},
    {"resume", CHOICE, AT(resume), "no", "no|yes|changed", 0, 0, "", "go on with --out: done rows are kept"},
    {"gpu-memory", TEXT, AT(gpu_memory), NULL, NULL, 0, 0, "SIZE",
     "refuse a job that takes more of a device, for example 80G; without: more than is free on the GPU"},
    {"strict", SWITCH, AT(strict), NULL, NULL, 0, 0, "", "read all data first; a bad row refuses the run"},
    {"trace", SWITCH, AT(trace), NULL, NULL, 0, 0, "", "record every iteration in /iterations"},
    {"audit", SWITCH, AT(audit), NULL, NULL, 0, 0, "",
     "compare each decision with the dense executor's on the same inputs (/audit); each forward twice, untimed"},
    {"observe", SWITCH, AT(observe), NULL, NULL, 0, 0, "",
     "record overlap of experts and drift of routed outputs over iterations (/observed); slow; see all with --mode "
     "full"},
    {"dry-run", SWITCH, AT(dry_run), NULL, NULL, 0, 0, "", "print shards and memory, then leave"},
    {"commit-every", REAL, AT(commit_every), "1", NULL, 0, 3600, "s",
     "finished rows are made durable at least so often"},
    {"publish-every", REAL, AT(publish_every), "300", NULL, 0, 1e9, "s",
     "the results file is brought up to date so often; 0: at the end"},
    {"time-budget", REAL, AT(time_budget), "0", NULL, 0, 1e9, "s", "stop by itself after so long, resumable; 0: never"},
    {"stop-file", TEXT, AT(stop_file), NULL, NULL, 0, 0, "PATH", "stop, resumable, once this file exists"},
    {"lock-wait", REAL, AT(lock_wait), "30", NULL, 0, 1e6, "s", "wait so long for what a killed run left behind"},
    {"timeout", REAL, AT(timeout), "300", NULL, 0, 1e6, "s",
     "end the job once no rank has moved for so long (four times in loading and publishing); 0: never"},
    {"connect-timeout", REAL, AT(connect_timeout), "60", NULL, 1, 1e6, "s",
     "give up where the ranks' GPUs are not joined by then"},
    {"progress", CHOICE, AT(progress), "auto", "auto|bar|lines|off", 0, 0, "", "on stderr, by rank 0"},
};
enum { FLAGS = sizeof table / sizeof *table };

static int choice_index(const flag *f, const char *value)
{
    int i = 0;
    size_t n = strlen(value);
    for (const char *c = f->choices; c; i++) {
        size_t len = strcspn(c, "|");
        if (len == n && memcmp(c, value, n) == 0)
            return i;
        c = c[len] ? c + len + 1 : NULL;
    }
    return -1;
}

static status set(options *o, const flag *f, const char *value)
{
    status st = OK;
    char *to = (char *)o + f->at, *end = NULL;
    errno = 0;
    switch (f->kind) {
    case TEXT:
        *(const char **)(void *)to = value;
        break;
    case LIST:
        if (o->data_count == OPTIONS_DATA)
            FAIL(BAD_INPUT, "--%s: given more than %d times", f->name, OPTIONS_DATA);
        o->data[o->data_count++] = value;
        break;
    case SWITCH:
        *(bool *)to = true;
        break;
    case CHOICE: {
        int i = choice_index(f, value);
        if (i < 0)
            FAIL(BAD_INPUT, "--%s is \"%s\", want %s", f->name, value, f->choices);
        *(int32_t *)(void *)to = i;
        break;
    }
    case INT:
    case LONG: {
        long long v = strtoll(value, &end, 10);
        if (!*value || *end || errno || (double)v < f->low || (double)v > f->high)
            FAIL(BAD_INPUT, "--%s is \"%s\", want a whole number from %.0f to %.0f", f->name, value, f->low, f->high);
        if (f->kind == INT)
            *(int32_t *)(void *)to = (int32_t)v;
        else
            *(int64_t *)(void *)to = v;
        break;
    }
    case REAL: {
        double v = strtod(value, &end);
        if (!*value || *end || errno || !isfinite(v) || v < f->low || v > f->high)
            FAIL(BAD_INPUT, "--%s is \"%s\", want a number from %g to %g", f->name, value, f->low, f->high);
        *(double *)(void *)to = v;
        break;
    }
    }
out:
    return st;
}

static const flag *find(const char *name, size_t n)
{
    for (int i = 0; i < FLAGS; i++)
        if (strlen(table[i].name) == n && memcmp(table[i].name, name, n) == 0)
            return &table[i];
    return NULL;
}

status options_parse(options *out, bool *help, int argc, char **argv)
{
    status st = OK;
    *out = (options){0};
    *help = false;
    for (int i = 0; i < FLAGS; i++)
        if (table[i].fallback)
            TRY(set(out, &table[i], table[i].fallback));
    for (int i = 0; i < argc; i++) {
        const char *word = argv[i];
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            *help = true;
            return OK;
        }
        if (strncmp(word, "--", 2) != 0 || !word[2])
            FAIL(BAD_INPUT, "\"%s\" is not an option: options start with -- (epoch run --help lists them)", word);
        size_t n = strcspn(word + 2, "=");
        const flag *f = find(word + 2, n);
        if (!f)
            FAIL(BAD_INPUT, "--%.*s: no such option (epoch run --help lists them)", (int)n, word + 2);
        const char *value = word[2 + n] ? word + 3 + n : NULL;
        if (f->kind == SWITCH) {
            if (value)
                FAIL(BAD_INPUT, "--%s takes no value", f->name);
        } else if (!value) {
            /* --resume stands alone too */
            bool alone = f->at == AT(resume) && (i + 1 == argc || strncmp(argv[i + 1], "--", 2) == 0);
            if (alone)
                value = "yes";
            else if (i + 1 == argc)
                FAIL(BAD_INPUT, "--%s wants a value: %s", f->name, f->choices ? f->choices : f->unit);
            else
                value = argv[++i];
        }
        TRY(set(out, f, value));
    }
    if (!out->model)
        FAIL(BAD_INPUT, "--model is missing: the checkpoint folder");
    if (!out->data_count)
        FAIL(BAD_INPUT, "--data is missing: KIND:PATH, for example gsm8k:datasets/samples/gsm8k_demo.jsonl");
    if (!out->out && !out->dry_run)
        FAIL(BAD_INPUT, "--out is missing: the results file to write");
out:
    return st;
}

void options_help(FILE *to)
{
    fprintf(to, "usage: mpirun -np R epoch run --model DIR --data KIND:PATH [--data ...] --out FILE.h5 [options]\n\n");
    for (int i = 0; i < FLAGS; i++) {
        const flag *f = &table[i];
        char head[120];
        snprintf(head, sizeof head, "--%s %s", f->name, f->choices ? f->choices : f->unit);
        fprintf(to, "  %-42s %s", head, f->help);
        if (f->fallback)
            fprintf(to, " [%s]", f->fallback);
        fputc('\n', to);
    }
}

json_t *options_json(const options *o)
{
    json_t *all = json_object();
    for (int i = 0; i < FLAGS; i++) {
        const flag *f = &table[i];
        const char *at = (const char *)o + f->at;
        json_t *v = NULL;
        switch (f->kind) {
        case TEXT: {
            const char *text = *(const char *const *)(const void *)at;
            v = text ? json_string_nocheck(text) : json_null();
            break;
        }
        case LIST:
            v = json_array();
            for (int k = 0; k < o->data_count; k++)
                json_array_append_new(v, json_string_nocheck(o->data[k]));
            break;
        case SWITCH:
            v = json_boolean(*(const bool *)at);
            break;
        case CHOICE: {
            const char *c = f->choices;
            for (int k = *(const int32_t *)(const void *)at; k > 0; k--)
                c = strchr(c, '|') + 1;
            v = json_stringn(c, strcspn(c, "|"));
            break;
        }
        case INT:
            v = json_integer(*(const int32_t *)(const void *)at);
            break;
        case LONG:
            v = json_integer(*(const int64_t *)(const void *)at);
            break;
        case REAL:
            v = json_real(*(const double *)(const void *)at);
            break;
        }
        json_object_set_new(all, f->name, v);
    }
    return all;
}
