#include "results/report.h"

#include "results/plots.h"

#include <getopt.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { LABEL = 26, CELL = 22, FILES = 64 };

/* ---- figures */

static double ratio(double a, double b)
{
    return b > 0 ? a / b : NAN;
}

static void sum_blocks(report_figures *s, const results_file *f)
{
    double support = 0, distinct = 0, coverage = 0;
    int64_t measured = 0;
    for (int64_t i = 0; i < f->blocks; i++) {
        const result_block *b = &f->block[i];
        int32_t hot = b->refresh + b->hot_update + b->hot_skip;
        s->fresh_rows += b->fresh_rows;
        s->cached_rows += b->cached_rows;
        s->layer_rebuilds += b->layer_rebuilds;
        s->universe += b->universe;
        s->forced += b->forced;
        s->hot_iterations += hot;
        for (int c = 0; c < RESULT_CAUSES; c++)
            s->rows_fallback[c] += b->rows_fallback[c];
        if (hot == 0 || isnan(b->distinct_experts))
            continue;
        measured += hot;
        support += (double)hot * (double)b->support_size;
        distinct += (double)hot * (double)b->distinct_experts;
        coverage += (double)hot * (double)b->coverage;
    }
    s->blocks = f->blocks;
    s->cached_share = ratio((double)s->cached_rows, (double)(s->cached_rows + s->fresh_rows));
    s->expert_loads = distinct;
    s->support_size = ratio(support, (double)measured);
    s->distinct_experts = ratio(distinct, (double)measured);
    s->coverage = ratio(coverage, (double)measured);
}

static void sum_ranks(report_figures *s, const results_file *f)
{
    for (int64_t i = 0; i < f->ranks; i++) {
        const result_phase *p = &f->rank[i].phase;
        for (int k = 0; k < PHASES; k++)
            s->seconds[k] += p->seconds[k];
        for (int k = 0; k < PATHS; k++) {
            s->rows_fresh[k] += p->rows_fresh[k];
            s->rows_cached[k] += p->rows_cached[k];
        }
        s->forwards += p->forwards;
        s->rows_dispatched += p->rows_dispatched;
        s->bytes_dispatched += p->bytes_dispatched;
        s->bytes_combined += p->bytes_combined;
        s->expert_tiles = s->expert_tiles < 0 || p->expert_tiles < 0 ? -1 : s->expert_tiles + p->expert_tiles;
    }
    s->ranks = f->ranks;
}

static void sum_audit(report_figures *s, const results_file *f)
{
    s->audits = f->audits;
    for (int64_t i = 0; i < f->audits; i++) {
        const result_audit *a = &f->audit[i].at;
        s->audit_blocks_same += a->block_same;
        s->audit_live += a->live;
        s->audit_held += a->held;
        s->audit_same += a->same;
        s->audit_broken += a->broken;
        s->audit_difference = fmax(s->audit_difference, (double)a->max_difference);
    }
}

static void sum_observed(report_figures *s, const results_file *f)
{
    const result_observed *o = &f->observed;
    double sum = 0;
    int64_t n = 0;
    for (int i = 0; i < OBSERVED_STEPS; i++) {
        sum += o->overlap_sum[i];
        n += o->overlap_count[i];
    }
    s->overlap = ratio(sum, (double)n);
    for (int kind = 0; kind < OBSERVED_KINDS; kind++)
        s->similarity[kind] = ratio(o->cosine_sum[kind][1], (double)o->cosine_count[kind][1]);
}

void report_sum(report_figures *out, const results_file *f)
{
    report_figures s = {0};
    s.rows = f->rows;
    for (int64_t i = 0; i < f->rows; i++) {
        const result_row *r = &f->output[i].row;
        s.failed += r->failed;
        s.truncated += strcmp(r->finish_reason, "length") == 0;
        s.tokens += r->tokens;
        s.row_iterations += r->iterations;
    }
    for (int64_t i = 0; i < f->sessions; i++)
        s.wall_seconds += f->session[i].wall_seconds;
    sum_blocks(&s, f);
    sum_ranks(&s, f);
    sum_audit(&s, f);
    sum_observed(&s, f);
    for (int64_t i = 0; i < f->ranks; i++)
        s.rank_seconds += f->rank[i].phase.wall_seconds;
    s.tokens_per_second = ratio((double)s.tokens, s.wall_seconds);
    s.iterations_per_block = ratio((double)s.row_iterations, (double)s.blocks);
    s.tokens_per_forward = ratio((double)s.tokens, (double)s.row_iterations);
    s.ms_per_forward = 1e3 * ratio(s.rank_seconds, (double)s.forwards);
    *out = s;
}

/* ---- a table: a label, then a cell a file */

static void label(FILE *to, const char *text)
{
    fprintf(to, "\n%-*s", LABEL, text);
}

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void
cell(FILE *to, const char *format, ...)
{
    char text[128];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(to, " %*s", CELL, text);
}

static void number(FILE *to, double x, const char *unit)
{
    int digits = fabs(x) >= 1000 ? 0 : fabs(x) >= 100 ? 1 : fabs(x) >= 10 ? 2 : 3;
    if (isnan(x))
        cell(to, "-");
    else
        cell(to, "%.*f%s%s", digits, x, *unit ? " " : "", unit);
}

static void bytes(FILE *to, double x)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
    int u = 0;
    for (; x >= 1000 && u < 4; u++)
        x /= 1000;
    cell(to, u ? "%.2f %s" : "%.0f %s", x, units[u]);
}

static const char *attribute(const results_file *f, const char *key)
{
    const char *text = json_string_value(json_object_get(f->run, key));
    return text ? text : "";
}

/* ---- identity */

enum { KEY = 18, SCREEN = 100 };

/* An object's members as key=value, in lines of a screen. */
static void print_members(FILE *to, const char *key, const json_t *o)
{
    const char *name;
    json_t *v;
    size_t at = 0;
    fprintf(to, "#   %-*s", KEY, key);
    json_object_foreach((json_t *)o, name, v)
    {
        char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(6));
        size_t n = strlen(name) + 2 + (text ? strlen(text) : 1);
        if (at > 0 && at + n > SCREEN) {
            fprintf(to, "\n#   %-*s", KEY, "");
            at = 0;
        }
        fprintf(to, " %s=%s", name, text ? text : "?");
        at += n;
        free(text);
    }
    fputc('\n', to);
}

static void print_attribute(FILE *to, const char *key, const json_t *v)
{
    if (json_is_string(v)) {
        const char *text = json_string_value(v);
        json_t *o = *text == '{' ? json_loads(text, 0, NULL) : NULL;
        if (strcmp(key, "model_config") == 0) /* belongs in the file, not on a screen */
            fprintf(to, "#   %-*s (%zu bytes)\n", KEY, key, strlen(text));
        else if (json_is_object(o))
            print_members(to, key, o);
        else if (*text)
            fprintf(to, "#   %-*s %.*s\n", KEY, key, (int)strcspn(text, "\n"), text);
        json_decref(o);
    } else if (json_is_integer(v)) {
        fprintf(to, "#   %-*s %lld\n", KEY, key, (long long)json_integer_value(v));
    } else if (json_is_real(v)) {
        fprintf(to, "#   %-*s %g\n", KEY, key, json_real_value(v));
    } else if (json_is_boolean(v)) {
        fprintf(to, "#   %-*s %s\n", KEY, key, json_is_true(v) ? "true" : "false");
    }
}

/* Objects stand in the file as JSON text: *out is a new reference, an empty object where there is none. */
static json_t *object_of(const results_file *f, const char *key)
{
    json_t *v = json_object_get(f->run, key);
    json_t *o =
        json_is_object(v) ? json_incref(v) : json_loads(json_is_string(v) ? json_string_value(v) : "{}", 0, NULL);
    if (!json_is_object(o)) {
        json_decref(o);
        o = json_object();
    }
    return o;
}

/* Is this attribute the same in all files? */
static bool shared(const results_file *const *file, int count, const char *key)
{
    for (int i = 1; i < count; i++)
        if (!json_equal(json_object_get(file[0]->run, key), json_object_get(file[i]->run, key)))
            return false;
    return true;
}

/* What is common to the files once, then each one's own; in what settings they differ is a table of its own. */
static void print_identity(const results_file *const *file, const char *const *name, int count, FILE *to)
{
    const char *key;
    json_t *v;
    if (count > 1)
        fprintf(to, "# all files\n");
    for (int i = count > 1 ? -1 : 0; i < count; i++) {
        if (i >= 0)
            fprintf(to, "# %s\n", name[i]);
        json_object_foreach(file[i > 0 ? i : 0]->run, key, v)
        {
            if (count == 1 || ((i < 0) == shared(file, count, key) && strcmp(key, "settings") != 0))
                print_attribute(to, key, v);
        }
    }
}

/* The settings in which the files differ, a row each. */
static void print_differences(const results_file *const *file, int count, FILE *to)
{
    json_t *all[FILES], *v;
    const char *key;
    for (int i = 0; i < count; i++)
        all[i] = object_of(file[i], "settings");
    fprintf(to, "\n\nsettings that differ");
    json_object_foreach(all[0], key, v)
    {
        bool differ = false;
        for (int i = 1; i < count; i++)
            differ |= !json_equal(v, json_object_get(all[i], key));
        if (!differ || strcmp(key, "out") == 0)
            continue;
        label(to, key);
        for (int i = 0; i < count; i++) {
            char *text = json_dumps(json_object_get(all[i], key), JSON_ENCODE_ANY);
            cell(to, "%.*s", CELL, text ? text : "-");
            free(text);
        }
    }
    for (int i = 0; i < count; i++)
        json_decref(all[i]);
}

/* ---- the sections */

#define ROW(title, print)                    \
    do {                                     \
        label(to, title);                    \
        for (int i = 0; i < count; i++) {    \
            const report_figures *s = &f[i]; \
            print;                           \
        }                                    \
    } while (0)

static void print_rates(const report_figures *f, int count, FILE *to)
{
    ROW("rows", cell(to, "%lld", (long long)s->rows));
    ROW("  failed", cell(to, "%lld", (long long)s->failed));
    ROW("  truncated", cell(to, "%lld", (long long)s->truncated));
    ROW("generated tokens", cell(to, "%lld", (long long)s->tokens));
    fprintf(to, "\n\nrates: decoding only, without model load and warm-up");
    ROW("decoding time", number(to, s->wall_seconds, "s"));
    ROW("tokens/s", number(to, s->tokens_per_second, ""));
    ROW("tokens per forward", number(to, s->tokens_per_forward, ""));
    ROW("iterations per block", number(to, s->iterations_per_block, ""));
    ROW("time per forward", number(to, s->ms_per_forward, "ms"));
    ROW("forced commits", cell(to, "%lld", (long long)s->forced));
}

static void print_phases(const report_figures *f, int count, FILE *to)
{
    fprintf(to, "\n\ntime by phase: seconds over all ranks, and share");
    for (int p = 0; p < PHASES; p++) {
        label(to, phase_names[p]);
        for (int i = 0; i < count; i++) {
            double all = 0;
            for (int k = 0; k < PHASES; k++)
                all += f[i].seconds[k];
            if (all > 0)
                cell(to, "%.3f s %5.1f %%", f[i].seconds[p], 100 * f[i].seconds[p] / all);
            else
                cell(to, "-");
        }
    }
    ROW("in no phase", {
        double rest = s->rank_seconds;
        for (int k = 0; k < PHASES; k++)
            rest -= s->seconds[k];
        cell(to, "%.3f s        ", rest);
    });
}

static void print_traced_bytes(const results_file *const *file, int count, FILE *to)
{
    bool any = false;
    for (int i = 0; i < count; i++)
        for (int64_t k = 0; k < file[i]->iterations; k++)
            any |= file[i]->iteration[k].at.bytes_moved > 0;
    if (!any)
        return;
    fprintf(to, "\n\nbytes by path, of traced iterations");
    for (int p = PATH_PREFILL; p < PATHS; p++) {
        label(to, path_names[p]);
        for (int i = 0; i < count; i++) {
            double sum = 0;
            for (int64_t k = 0; k < file[i]->iterations; k++)
                sum += file[i]->iteration[k].at.path == p ? (double)file[i]->iteration[k].at.bytes_moved : 0;
            bytes(to, sum);
        }
    }
}

static void print_traffic(const results_file *const *file, const report_figures *f, int count, FILE *to)
{
    fprintf(to, "\n\nrows by path: fresh (through experts) / served from the cache");
    for (int p = PATH_PREFILL; p < PATHS; p++)
        ROW(path_names[p], cell(to, "%lld / %lld", (long long)s->rows_fresh[p], (long long)s->rows_cached[p]));
    ROW("cached share of blocks", number(to, s->cached_share, ""));
    fprintf(to, "\n\nFreshLane, over layers");
    ROW("rows dispatched", cell(to, "%lld", (long long)s->rows_dispatched));
    ROW("bytes dispatched", bytes(to, (double)s->bytes_dispatched));
    ROW("bytes combined", bytes(to, (double)s->bytes_combined));
    print_traced_bytes(file, count, to);
    fprintf(to, "\n\nexperts: means over hot iterations and sparse layers");
    ROW("support", number(to, s->support_size, "experts"));
    ROW("distinct", number(to, s->distinct_experts, "experts"));
    ROW("coverage", number(to, s->coverage, ""));
    ROW("expert tiles", s->expert_tiles < 0 ? cell(to, "-") : cell(to, "%lld", (long long)s->expert_tiles));
    ROW("layer rebuilds", cell(to, "%lld", (long long)s->layer_rebuilds));
    bool observed = false;
    for (int i = 0; i < count; i++)
        observed |= file[i]->has_observed;
    if (observed) {
        ROW("overlap with iteration -1", number(to, s->overlap, ""));
        ROW("similarity, decoded, age 1", number(to, s->similarity[0], ""));
        ROW("similarity, live, age 1", number(to, s->similarity[1], ""));
    }
    fprintf(to, "\n\nfallbacks by cause");
    ROW("universe (layers)", cell(to, "%lld", (long long)s->universe));
    static const char *const causes[RESULT_CAUSES] = {"rows: cache miss", "rows: version", "rows: illegal",
                                                      "rows: overdue"};
    for (int c = 0; c < RESULT_CAUSES; c++)
        ROW(causes[c], cell(to, "%lld", (long long)s->rows_fallback[c]));
}

static const result_score *score_of(const results_file *f, const char *dataset, const char *rule)
{
    for (int64_t i = 0; i < f->scores; i++)
        if (strcmp(f->score[i].dataset, dataset) == 0 && strcmp(f->score[i].rule, rule) == 0)
            return &f->score[i];
    return NULL;
}

static void print_accuracy(const results_file *const *file, int count, FILE *to)
{
    bool none = true;
    fprintf(to, "\n\naccuracy: right / rows; 95 %% interval");
    for (int i = 0; i < count; i++)
        for (int64_t k = 0; k < file[i]->scores; k++) {
            const result_score *named = &file[i]->score[k];
            bool seen = false;
            for (int j = 0; j < i; j++)
                seen |= score_of(file[j], named->dataset, named->rule) != NULL;
            if (seen)
                continue;
            none = false;
            char title[2 * LABEL];
            snprintf(title, sizeof title, "%s %s", named->dataset, named->rule);
            label(to, title);
            for (int j = 0; j < count; j++) {
                const result_score *s = score_of(file[j], named->dataset, named->rule);
                if (s)
                    cell(to, "%.4f %lld/%lld", s->score, (long long)s->correct, (long long)s->rows);
                else
                    cell(to, "-");
            }
            label(to, "");
            for (int j = 0; j < count; j++) {
                const result_score *s = score_of(file[j], named->dataset, named->rule);
                if (s)
                    cell(to, "%.4f - %.4f", s->low, s->high);
                else
                    cell(to, "-");
            }
        }
    if (none)
        fprintf(to, "\nnot scored yet: epoch score FILE.h5");
}

static void share(FILE *to, int64_t part, int64_t all)
{
    if (all > 0)
        cell(to, "%lld %7.3f %%", (long long)part, 100 * (double)part / (double)all);
    else
        cell(to, "-");
}

static void print_audit(const report_figures *f, int count, FILE *to)
{
    int64_t any = 0;
    for (int i = 0; i < count; i++)
        any += f[i].audits;
    fprintf(to, "\n\naudit: against the dense executor on the same inputs");
    if (!any) {
        fprintf(to, "\nnone recorded (epoch run --audit)");
        return;
    }
    ROW("iterations", cell(to, "%lld", (long long)s->audits));
    ROW("  block decided alike", share(to, s->audit_blocks_same, s->audits));
    ROW("live rows", cell(to, "%lld", (long long)s->audit_live));
    ROW("  held", share(to, s->audit_held, s->audit_live));
    ROW("  decided alike", share(to, s->audit_same, s->audit_live));
    ROW("  held, yet different", share(to, s->audit_broken, s->audit_live));
    ROW("largest logit difference", number(to, s->audits ? s->audit_difference : NAN, ""));
}

static status figures_of(report_figures **out, const results_file *const *file, int count)
{
    status st = OK;
    *out = calloc((size_t)count, sizeof **out);
    if (!*out)
        FAIL(FAILED, "report: out of memory");
    for (int i = 0; i < count; i++)
        report_sum(*out + i, file[i]);
out:
    return st;
}

static void print_names(const char *const *name, int count, FILE *to)
{
    fprintf(to, "%-*s", LABEL, "");
    for (int i = 0; i < count; i++) {
        const char *slash = strrchr(name[i], '/'), *base = slash ? slash + 1 : name[i];
        cell(to, "%.*s", CELL, base);
    }
}

status report_print(const results_file *const *file, const char *const *name, int count, FILE *to)
{
    status st = OK;
    report_figures *f = NULL;
    TRY(figures_of(&f, file, count));
    print_identity(file, name, count, to);
    print_names(name, count, to);
    print_rates(f, count, to);
    print_accuracy(file, count, to);
    print_phases(f, count, to);
    print_traffic(file, f, count, to);
    print_audit(f, count, to);
    if (count > 1)
        print_differences(file, count, to);
    fputc('\n', to);
out:
    free(f);
    return st;
}

/* ---- ablation */

static void mode_of(char *out, size_t room, const results_file *f)
{
    json_t *settings = object_of(f, "settings");
    const char *mode = json_string_value(json_object_get(settings, "mode"));
    snprintf(out, room, "%s", mode ? mode : "?");
    json_decref(settings);
}

status report_ablation(const results_file *const *file, const char *const *name, int count, FILE *to)
{
    status st = OK;
    report_figures *f = NULL;
    int full = -1;
    bool tiles = true;
    char mode[32];
    TRY(figures_of(&f, file, count));
    for (int i = 0; i < count; i++) {
        mode_of(mode, sizeof mode, file[i]);
        if (full < 0 && strcmp(mode, "full") == 0)
            full = i;
        tiles &= f[i].expert_tiles > 0;
        if (f[i].tokens == 0)
            FAIL(BAD_INPUT, "%s: holds no generated token, so nothing can be told per token", name[i]);
    }
    if (full < 0)
        FAIL(BAD_INPUT, "--ablation: none of the %d files is of --mode full, to which the others are compared", count);
    for (int i = 0; i < count; i++)
        if (strcmp(attribute(file[i], "model_hash"), attribute(file[full], "model_hash")) != 0 ||
            f[i].rows != f[full].rows)
            fprintf(
                to,
                "# %s is of another model or number of rows than %s: figures per token still compare work, not runs\n",
                name[i], name[full]);
    fprintf(
        to,
        "# relative to mode full, per generated token. FLOPs: of routed experts, %s; expert bytes: distinct experts\n"
        "# of a block and hot iteration; lane bytes: dispatched and combined between ranks; time: of decoding\n",
        tiles ? "in computed tiles" : "in rows dispatched");
    fprintf(to, "%-10s %10s %13s %11s %8s  %s\n", "mode", "FLOPs", "expert bytes", "lane bytes", "time", "file");
    for (int i = 0; i < count; i++) {
        const report_figures *a = &f[i], *b = &f[full];
        double scale = (double)b->tokens / (double)a->tokens;
        double of[4] = {
            tiles ? ratio((double)a->expert_tiles, (double)b->expert_tiles)
                  : ratio((double)a->rows_dispatched, (double)b->rows_dispatched),
            ratio(a->expert_loads, b->expert_loads),
            ratio((double)(a->bytes_dispatched + a->bytes_combined), (double)(b->bytes_dispatched + b->bytes_combined)),
            ratio(a->wall_seconds, b->wall_seconds)};
        static const int width[4] = {10, 13, 11, 8};
        mode_of(mode, sizeof mode, file[i]);
        fprintf(to, "%-10s", mode);
        for (int k = 0; k < 4; k++)
            if (isnan(of[k]))
                fprintf(to, " %*s", width[k], "-");
            else
                fprintf(to, " %*.3f", width[k], of[k] * scale);
        fprintf(to, "  %s\n", name[i]);
    }
out:
    free(f);
    return st;
}

/* ---- the command */

static const char help[] =
    "epoch report FILE.h5 [FILE.h5 ...]: identity, accuracy, rates, time by phase, rows and bytes by path, experts,\n"
    "fallbacks, audit; several files side by side\n\n"
    "  --ablation      FLOPs, expert bytes, lane bytes and time of each file relative to the one of mode full\n"
    "  --plots DIR     draw into DIR, which is created (Python 3 with h5py and matplotlib)\n"
    "  --python PATH   interpreter for --plots (the first python3 of PATH that has both)\n";

status report_command(int argc, char **argv)
{
    status st = OK;
    static const struct option flags[] = {{"ablation", no_argument, NULL, 'a'},
                                          {"plots", required_argument, NULL, 'p'},
                                          {"python", required_argument, NULL, 'y'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    results_file *file[FILES] = {0};
    const char *plots = NULL, *python = NULL;
    bool ablation = false;
    int count = 0;
    optind = 1;
    opterr = 0;
    for (int c; (c = getopt_long(argc, argv, "", flags, NULL)) != -1;) {
        switch (c) {
        case 'a':
            ablation = true;
            break;
        case 'p':
            plots = optarg;
            break;
        case 'y':
            python = optarg;
            break;
        case 'h':
            fputs(help, stdout);
            return OK;
        default:
            FAIL(BAD_INPUT, "report: %s is unknown or lacks its value; epoch report --help lists the options",
                 argv[optind - 1]);
        }
    }
    int wanted = argc - optind;
    if (wanted < 1 || wanted > FILES)
        FAIL(BAD_INPUT, "report: want 1 to %d FILE.h5, found %d; epoch report --help", FILES, wanted);
    for (; count < wanted; count++)
        TRY(results_read(&file[count], argv[optind + count]));
    const results_file *const *read = (const results_file *const *)file;
    const char *const *name = (const char *const *)(argv + optind);
    if (ablation)
        TRY(report_ablation(read, name, count, stdout));
    else
        TRY(report_print(read, name, count, stdout));
    if (plots) {
        fflush(stdout);
        TRY(plots_draw(plots, python, name, count));
    }
out:
    for (int i = 0; i < count; i++)
        results_close(file[i]);
    return st;
}
