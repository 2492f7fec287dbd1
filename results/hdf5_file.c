/* A results_file as HDF5 and back. One table of columns a group serves both directions; schema.md tells their meaning.
 */
#include "results/bench_file.h"
#include "results/private.h"

#include <errno.h>
#include <hdf5.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef enum column_type {
    COLUMN_I32,
    COLUMN_I64,
    COLUMN_U64,
    COLUMN_F32,
    COLUMN_F64,
    COLUMN_TEXT,
    COLUMN_FAILED
} column_type;

typedef struct column { /* one dataset [n] or [n, width] of a group */
    const char *name;
    column_type type;
    int width;        /* 1: one-dimensional */
    size_t at;        /* of the field in its struct; COLUMN_FAILED: a bool, "failed" or "done" in the file */
    const char *unit; /* attribute of the dataset, or NULL */
} column;

typedef struct table {
    const char *name;
    const column *column;
    int columns;
    size_t stride; /* bytes of a struct */
} table;

#define TABLE(name, columns, type)                                              \
    {                                                                           \
        name, columns, (int)(sizeof(columns) / sizeof *(columns)), sizeof(type) \
    }

#define AT(field) offsetof(result_output, field)
static const column output_columns[] = {
    {"dataset", COLUMN_TEXT, 1, AT(row.dataset), NULL},
    {"id", COLUMN_TEXT, 1, AT(row.id), NULL},
    {"source_line", COLUMN_I64, 1, AT(row.source_line), NULL},
    {"turn", COLUMN_I32, 1, AT(row.turn), NULL},
    {"order", COLUMN_I64, 1, AT(row.order), NULL},
    {"prompt", COLUMN_TEXT, 1, AT(row.prompt), NULL},
    {"text", COLUMN_TEXT, 1, AT(row.text), NULL},
    {"gold", COLUMN_TEXT, 1, AT(row.gold), NULL},
    {"status", COLUMN_FAILED, 1, AT(row.failed), NULL},
    {"message", COLUMN_TEXT, 1, AT(row.message), NULL},
    {"finish_reason", COLUMN_TEXT, 1, AT(row.finish_reason), NULL},
    {"n_prompt_tokens", COLUMN_I32, 1, AT(row.prompt_tokens), "tokens"},
    {"n_tokens", COLUMN_I32, 1, AT(row.tokens), "tokens"},
    {"token_offset", COLUMN_I64, 1, AT(token_offset), "tokens"},
    {"n_blocks", COLUMN_I32, 1, AT(row.blocks), "blocks"},
    {"n_iterations", COLUMN_I32, 1, AT(row.iterations), "forwards"},
    {"forced", COLUMN_I32, 1, AT(forced), "positions"},
    {"seconds", COLUMN_F64, 1, AT(row.seconds), "s"},
    {"session", COLUMN_I32, 1, AT(session), NULL},
    {"rank", COLUMN_I32, 1, AT(rank), NULL},
};
#undef AT

#define AT(field) offsetof(result_block, field)
static const column block_columns[] = {
    {"block", COLUMN_I32, 1, AT(block), NULL},
    {"iterations", COLUMN_I32, 1, AT(iterations), "forwards"},
    {"cold", COLUMN_I32, 1, AT(cold), "forwards"},
    {"refresh", COLUMN_I32, 1, AT(refresh), "forwards"},
    {"hot_update", COLUMN_I32, 1, AT(hot_update), "forwards"},
    {"hot_skip", COLUMN_I32, 1, AT(hot_skip), "forwards"},
    {"forced", COLUMN_I32, 1, AT(forced), "positions"},
    {"layer_rebuilds", COLUMN_I32, 1, AT(layer_rebuilds), "layer-iterations"},
    {"universe", COLUMN_I32, 1, AT(universe), "layer-iterations"},
    {"rows_miss", COLUMN_I32, 1, AT(rows_fallback[0]), "forwards"},
    {"rows_version", COLUMN_I32, 1, AT(rows_fallback[1]), "forwards"},
    {"rows_illegal", COLUMN_I32, 1, AT(rows_fallback[2]), "forwards"},
    {"rows_overdue", COLUMN_I32, 1, AT(rows_fallback[3]), "forwards"},
    {"fresh_rows", COLUMN_I32, 1, AT(fresh_rows), "rows"},
    {"cached_rows", COLUMN_I32, 1, AT(cached_rows), "rows"},
    {"support_size", COLUMN_F32, 1, AT(support_size), "experts"},
    {"distinct_experts", COLUMN_F32, 1, AT(distinct_experts), "experts"},
    {"coverage", COLUMN_F32, 1, AT(coverage), NULL},
};
#undef AT

#define AT(field) offsetof(result_rank, field)
static const column phase_columns[] = {
    {"session", COLUMN_I32, 1, AT(session), NULL},
    {"rank", COLUMN_I32, 1, AT(rank), NULL},
    {"seconds", COLUMN_F64, PHASES, AT(phase.seconds), "s"},
    {"forwards", COLUMN_I64, 1, AT(phase.forwards), "forwards"},
    {"rows_fresh", COLUMN_I64, PATHS, AT(phase.rows_fresh), "rows"},
    {"rows_cached", COLUMN_I64, PATHS, AT(phase.rows_cached), "rows"},
    {"rows_dispatched", COLUMN_I64, 1, AT(phase.rows_dispatched), "rows"},
    {"rows_received", COLUMN_I64, 1, AT(phase.rows_received), "rows"},
    {"bytes_dispatched", COLUMN_I64, 1, AT(phase.bytes_dispatched), "bytes"},
    {"bytes_combined", COLUMN_I64, 1, AT(phase.bytes_combined), "bytes"},
    {"expert_tiles", COLUMN_I64, 1, AT(phase.expert_tiles), "tiles"},
    {"wall_seconds", COLUMN_F64, 1, AT(phase.wall_seconds), "s"},
    {"generated_tokens", COLUMN_I64, 1, AT(phase.generated_tokens), "tokens"},
};
#undef AT

#define AT(field) offsetof(result_session, field)
static const column session_columns[] = {
    {"session", COLUMN_I32, 1, AT(session), NULL},
    {"ranks", COLUMN_I32, 1, AT(ranks), NULL},
    {"started", COLUMN_F64, 1, AT(started), "s since 1970-01-01 UTC"},
    {"ended", COLUMN_F64, 1, AT(ended), "s since 1970-01-01 UTC"},
    {"wall_seconds", COLUMN_F64, 1, AT(wall_seconds), "s"},
    {"done", COLUMN_I64, 1, AT(done), "rows"},
    {"failed", COLUMN_I64, 1, AT(failed), "rows"},
    {"tokens", COLUMN_I64, 1, AT(tokens), "tokens"},
    {"run", COLUMN_TEXT, 1, AT(run), NULL},
};
#undef AT

#define AT(field) offsetof(result_trace, field)
static const column iteration_columns[] = {
    {"output_row", COLUMN_I64, 1, AT(output_row), NULL},
    {"session", COLUMN_I32, 1, AT(session), NULL},
    {"rank", COLUMN_I32, 1, AT(rank), NULL},
    {"block", COLUMN_I32, 1, AT(at.block), NULL},
    {"iteration", COLUMN_I32, 1, AT(at.iteration), NULL},
    {"path", COLUMN_I32, 1, AT(at.path), NULL},
    {"live", COLUMN_I32, 1, AT(at.live), "rows"},
    {"newly", COLUMN_I32, 1, AT(at.newly), "rows"},
    {"stable", COLUMN_I32, 1, AT(at.stable), "rows"},
    {"fresh", COLUMN_I32, 1, AT(at.fresh), "rows"},
    {"commits", COLUMN_I32, 1, AT(at.commits), "positions"},
    {"forced", COLUMN_I32, 1, AT(at.forced), "positions"},
    {"committed", COLUMN_U64, 1, AT(at.committed), NULL},
    {"support_size", COLUMN_F32, 1, AT(at.support_size), "experts"},
    {"distinct_experts", COLUMN_F32, 1, AT(at.distinct_experts), "experts"},
    {"coverage", COLUMN_F32, 1, AT(at.coverage), NULL},
    {"bytes_moved", COLUMN_I64, 1, AT(at.bytes_moved), "bytes"},
};
#undef AT

#define AT(field) offsetof(result_audited, field)
static const column audit_columns[] = {
    {"output_row", COLUMN_I64, 1, AT(output_row), NULL},
    {"session", COLUMN_I32, 1, AT(session), NULL},
    {"rank", COLUMN_I32, 1, AT(rank), NULL},
    {"block", COLUMN_I32, 1, AT(at.block), NULL},
    {"iteration", COLUMN_I32, 1, AT(at.iteration), NULL},
    {"live", COLUMN_I32, 1, AT(at.live), "rows"},
    {"held", COLUMN_I32, 1, AT(at.held), "rows"},
    {"same", COLUMN_I32, 1, AT(at.same), "rows"},
    {"broken", COLUMN_I32, 1, AT(at.broken), "rows"},
    {"block_same", COLUMN_I32, 1, AT(at.block_same), NULL},
    {"max_difference", COLUMN_F32, 1, AT(at.max_difference), "logits"},
    {"mean_difference", COLUMN_F32, 1, AT(at.mean_difference), "logits"},
    {"min_margin", COLUMN_F32, 1, AT(at.min_margin), "logits"},
    {"mean_margin", COLUMN_F32, 1, AT(at.mean_margin), "logits"},
};
#undef AT

#define AT(field) offsetof(result_observation, field)
static const column observed_columns[] = {
    {"session", COLUMN_I32, 1, AT(session), NULL},
    {"rank", COLUMN_I32, 1, AT(rank), NULL},
    {"overlap_count", COLUMN_I64, OBSERVED_STEPS, AT(of.overlap_count), "layer-iterations"},
    {"overlap_sum", COLUMN_F64, OBSERVED_STEPS, AT(of.overlap_sum), NULL},
    {"decoded_count", COLUMN_I64, OBSERVED_STEPS, AT(of.cosine_count[0]), "layer-rows"},
    {"decoded_sum", COLUMN_F64, OBSERVED_STEPS, AT(of.cosine_sum[0]), NULL},
    {"live_count", COLUMN_I64, OBSERVED_STEPS, AT(of.cosine_count[1]), "layer-rows"},
    {"live_sum", COLUMN_F64, OBSERVED_STEPS, AT(of.cosine_sum[1]), NULL},
};
#undef AT

#define AT(field) offsetof(result_score, field)
static const column score_columns[] = {
    {"dataset", COLUMN_TEXT, 1, AT(dataset), NULL},
    {"rule", COLUMN_TEXT, 1, AT(rule), NULL},
    {"rule_version", COLUMN_I32, 1, AT(rule_version), NULL},
    {"rows", COLUMN_I64, 1, AT(rows), "rows"},
    {"correct", COLUMN_I64, 1, AT(correct), "rows"},
    {"no_answer", COLUMN_I64, 1, AT(no_answer), "rows"},
    {"truncated", COLUMN_I64, 1, AT(truncated), "rows"},
    {"failed", COLUMN_I64, 1, AT(failed), "rows"},
    {"score", COLUMN_F64, 1, AT(score), NULL},
    {"low", COLUMN_F64, 1, AT(low), NULL},
    {"high", COLUMN_F64, 1, AT(high), NULL},
};
#undef AT

#define AT(field) offsetof(bench_row, field)
static const column bench_columns[] = {
    {"mode", COLUMN_TEXT, 1, AT(mode), NULL},
    {"prefix", COLUMN_I32, 1, AT(prefix), "positions"},
    {"batch", COLUMN_I32, 1, AT(batch), "sequences"},
    {"cohort", COLUMN_I32, 1, AT(cohort), "sequences"},
    {"support", COLUMN_I32, 1, AT(support), "experts"},
    {"forwards", COLUMN_I32, 1, AT(forwards), "forwards"},
    {"skipped", COLUMN_I32, 1, AT(skipped), "forwards"},
    {"blocks", COLUMN_I32, 1, AT(blocks), "blocks"},
    {"ms", COLUMN_F64, 1, AT(ms), "ms"},
    {"ms_block", COLUMN_F64, 1, AT(ms_block), "ms"},
    {"floor_ms", COLUMN_F64, 1, AT(floor_ms), "ms"},
    {"percent", COLUMN_F64, 1, AT(percent), "%"},
    {"phase_ms", COLUMN_F64, PHASES, AT(phase_ms), "ms"},
    {"phase_floor_ms", COLUMN_F64, PHASES, AT(phase_floor_ms), "ms"},
    {"rows", COLUMN_F64, 1, AT(rows), "rows"},
    {"fresh", COLUMN_F64, 1, AT(fresh), "rows"},
    {"live", COLUMN_F64, 1, AT(live), "rows"},
    {"experts", COLUMN_F64, 1, AT(experts), "experts"},
    {"bytes", COLUMN_F64, 1, AT(bytes), "bytes"},
    {"flops", COLUMN_F64, 1, AT(flops), "FLOP"},
    {"dispatched", COLUMN_F64, 1, AT(dispatched), "bytes"},
    {"combined", COLUMN_F64, 1, AT(combined), "bytes"},
    {"tokens_per_second", COLUMN_F64, 1, AT(tokens_per_second), "tokens/s"},
    {"idle", COLUMN_F64, 1, AT(idle), NULL},
    {"taken", COLUMN_F64, 1, AT(taken), "bytes"},
    {"planned", COLUMN_F64, 1, AT(planned), "bytes"},
    {"ratio", COLUMN_F64, 1, AT(ratio), NULL},
    {"floor_ratio", COLUMN_F64, 1, AT(floor_ratio), NULL},
};
#undef AT

static const table bench_table = TABLE("bench", bench_columns, bench_row);
static const table outputs_table = TABLE("outputs", output_columns, result_output);
static const table blocks_table = TABLE("blocks", block_columns, result_block);
static const table phases_table = TABLE("phases", phase_columns, result_rank);
static const table sessions_table = TABLE("sessions", session_columns, result_session);
static const table iterations_table = TABLE("iterations", iteration_columns, result_trace);
static const table audit_table = TABLE("audit", audit_columns, result_audited);
static const table observed_table = TABLE("observed", observed_columns, result_observation);
static const table scores_table = TABLE("scores", score_columns, result_score);

static const column plain_i32 = {.type = COLUMN_I32, .width = 1}, plain_i64 = {.type = COLUMN_I64, .width = 1},
                    plain_text = {.type = COLUMN_TEXT, .width = 1};

/* ---- HDF5's errors and handles */

static herr_t keep_reason(unsigned n, const H5E_error2_t *e, void *out)
{
    (void)n;
    if (e->desc && *e->desc)
        snprintf(out, 200, "%s", e->desc);
    return 0;
}

/* What the innermost call of the last failure said. */
static const char *reason(void)
{
    static _Thread_local char text[200];
    snprintf(text, sizeof text, "unknown reason");
    H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep_reason, text);
    return text;
}

#define WROTE(call, what)                                                          \
    do {                                                                           \
        if ((call) < 0)                                                            \
            FAIL(FAILED, "%s: %s cannot be written: %s", where, (what), reason()); \
    } while (0)

#define GOT(call, what)                                                            \
    do {                                                                           \
        if ((call) < 0)                                                            \
            FAIL(BAD_INPUT, "%s: %s cannot be read: %s", where, (what), reason()); \
    } while (0)

static void drop(hid_t id)
{
    if (id >= 0)
        H5Idec_ref(id);
}

static hid_t text_type(void)
{
    hid_t t = H5Tcopy(H5T_C_S1);
    if (t >= 0 && (H5Tset_size(t, H5T_VARIABLE) < 0 || H5Tset_cset(t, H5T_CSET_UTF8) < 0)) {
        drop(t);
        t = -1;
    }
    return t;
}

/* The type of a column in memory; a new handle. In the file it is the same in little-endian. */
static hid_t memory_type(column_type t)
{
    switch (t) {
    case COLUMN_I32:
        return H5Tcopy(H5T_NATIVE_INT32);
    case COLUMN_I64:
        return H5Tcopy(H5T_NATIVE_INT64);
    case COLUMN_U64:
        return H5Tcopy(H5T_NATIVE_UINT64);
    case COLUMN_F32:
        return H5Tcopy(H5T_NATIVE_FLOAT);
    case COLUMN_F64:
        return H5Tcopy(H5T_NATIVE_DOUBLE);
    default:
        return text_type();
    }
}

static size_t field_bytes(column_type t)
{
    return t == COLUMN_I32 || t == COLUMN_F32 ? 4 : t == COLUMN_TEXT ? sizeof(char *) : 8;
}

/* ---- writing */

static status write_text_attribute(hid_t at, const char *name, const char *text, const char *where)
{
    status st = OK;
    hid_t type = text_type(), space = H5Screate(H5S_SCALAR), a = -1;
    WROTE(a = H5Acreate2(at, name, type, space, H5P_DEFAULT, H5P_DEFAULT), name);
    WROTE(H5Awrite(a, type, &text), name);
out:
    drop(a);
    drop(space);
    drop(type);
    return st;
}

static status write_number_attribute(hid_t at, const char *name, hid_t file_type, hid_t type, const void *value,
                                     const char *where)
{
    status st = OK;
    hid_t space = H5Screate(H5S_SCALAR), a = -1;
    WROTE(a = H5Acreate2(at, name, file_type, space, H5P_DEFAULT, H5P_DEFAULT), name);
    WROTE(H5Awrite(a, type, value), name);
out:
    drop(a);
    drop(space);
    return st;
}

/* A boolean as h5py writes and reads one. */
static status write_bool_attribute(hid_t at, const char *name, bool value, const char *where)
{
    status st = OK;
    int8_t no = 0, yes = 1, v = value;
    hid_t type = H5Tenum_create(H5T_NATIVE_INT8);
    WROTE(type < 0 ? -1 : H5Tenum_insert(type, "FALSE", &no), name);
    WROTE(H5Tenum_insert(type, "TRUE", &yes), name);
    TRY(write_number_attribute(at, name, type, type, &v, where));
out:
    drop(type);
    return st;
}

static status write_attribute(hid_t at, const char *name, const json_t *v, const char *where)
{
    status st = OK;
    char *text = NULL;
    if (json_is_string(v)) {
        TRY(write_text_attribute(at, name, json_string_value(v), where));
    } else if (json_is_integer(v)) {
        int64_t n = json_integer_value(v);
        TRY(write_number_attribute(at, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &n, where));
    } else if (json_is_real(v)) {
        double x = json_real_value(v);
        TRY(write_number_attribute(at, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &x, where));
    } else if (json_is_boolean(v)) {
        TRY(write_bool_attribute(at, name, json_is_true(v), where));
    } else if (!json_is_null(v)) {
        text = json_dumps(v, JSON_COMPACT);
        if (!text)
            FAIL(FAILED, "%s: no memory for the attribute %s", where, name);
        TRY(write_text_attribute(at, name, text, where));
    }
out:
    free(text);
    return st;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The members of an object as attributes, by name: so a file that is read is written as the same bytes. */
static status write_attributes(hid_t file, json_t *all, const char *where)
{
    status st = OK;
    const char *name, **names = calloc(json_object_size(all) + 1, sizeof *names);
    json_t *v;
    size_t count = 0;
    if (!names)
        FAIL(FAILED, "%s: no memory for attributes", where);
    json_object_foreach(all, name, v) names[count++] = name;
    qsort(names, count, sizeof *names, by_name);
    for (size_t i = 0; i < count; i++)
        TRY(write_attribute(file, names[i], json_object_get(all, names[i]), where));
out:
    free(names);
    return st;
}

/* The members of f->run, and what the file says of itself. */
static status write_run(hid_t file, const results_file *f, const char *where)
{
    status st = OK;
    json_t *all = json_copy(f->run);
    int64_t done = 0;
    for (int64_t i = 0; i < f->rows; i++)
        done += !f->output[i].row.failed;
    if (json_object_set_new(all, "schema_version", json_integer(RESULTS_SCHEMA)) < 0 ||
        json_object_set_new(all, "state", json_string(f->state)) < 0 ||
        json_object_set_new(all, "sessions", json_integer(f->sessions)) < 0 ||
        json_object_set_new(all, "rows", json_integer(f->rows)) < 0 ||
        json_object_set_new(all, "rows_done", json_integer(done)) < 0 ||
        json_object_set_new(all, "rows_failed", json_integer(f->rows - done)) < 0)
        FAIL(FAILED, "%s: no memory for attributes", where);
    TRY(write_attributes(file, all, where));
out:
    json_decref(all);
    return st;
}

/* One dataset from the field at c->at of n structs. */
static status write_column(hid_t group, const char *name, const column *c, const void *rows, size_t stride, int64_t n,
                           const char *where)
{
    status st = OK;
    static const char *const names[] = {"done", "failed"};
    size_t each = c->type == COLUMN_FAILED ? sizeof(char *) : field_bytes(c->type) * (size_t)c->width;
    hsize_t dims[2] = {(hsize_t)n, (hsize_t)c->width};
    hid_t type = memory_type(c->type), file_type = -1, space = H5Screate_simple(c->width > 1 ? 2 : 1, dims, NULL);
    hid_t made = H5Pcreate(H5P_DATASET_CREATE), data = -1;
    char *values = malloc((size_t)n * each + 1);
    if (!values)
        FAIL(FAILED, "%s: no memory to write %s", where, name);
    for (int64_t i = 0; i < n; i++) {
        const char *field = (const char *)rows + (size_t)i * stride + c->at;
        if (c->type == COLUMN_FAILED)
            memcpy(values + (size_t)i * each, &names[*(const bool *)field], each);
        else
            memcpy(values + (size_t)i * each, field, each);
    }
    file_type = H5Tcopy(type);
    if (c->type != COLUMN_TEXT && c->type != COLUMN_FAILED)
        H5Tset_order(file_type, H5T_ORDER_LE);
    WROTE(H5Pset_obj_track_times(made, false), name);
    WROTE(data = H5Dcreate2(group, name, file_type, space, H5P_DEFAULT, made, H5P_DEFAULT), name);
    if (n)
        WROTE(H5Dwrite(data, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), name);
    if (c->unit)
        TRY(write_text_attribute(data, "unit", c->unit, where));
out:
    free(values);
    drop(data);
    drop(made);
    drop(space);
    drop(file_type);
    drop(type);
    return st;
}

static status write_table(hid_t file, const table *t, const void *rows, int64_t n, const char *where)
{
    status st = OK;
    hid_t group = -1, made = H5Pcreate(H5P_GROUP_CREATE);
    WROTE(H5Pset_obj_track_times(made, false), t->name);
    WROTE(group = H5Gcreate2(file, t->name, H5P_DEFAULT, made, H5P_DEFAULT), t->name);
    for (int i = 0; i < t->columns; i++)
        TRY(write_column(group, t->column[i].name, &t->column[i], rows, t->stride, n, where));
out:
    drop(group);
    drop(made);
    return st;
}

static status write_tables(hid_t file, const results_file *f, const char *where)
{
    status st = OK;
    int64_t *output_row = malloc((size_t)f->blocks * sizeof *output_row + 1), at = 0;
    if (!output_row)
        FAIL(FAILED, "%s: no memory to write blocks", where);
    for (int64_t i = 0; i < f->rows; i++)
        for (int32_t b = 0; b < f->output[i].row.blocks; b++)
            output_row[at++] = i;
    TRY(write_table(file, &outputs_table, f->output, f->rows, where));
    TRY(write_column(file, "tokens", &plain_i32, f->token, sizeof *f->token, f->tokens, where));
    TRY(write_table(file, &blocks_table, f->block, f->blocks, where));
    TRY(write_column(file, "blocks/output_row", &plain_i64, output_row, sizeof *output_row, f->blocks, where));
    TRY(write_table(file, &phases_table, f->rank, f->ranks, where));
    TRY(write_column(file, "phases/phase_names", &plain_text, phase_names, sizeof *phase_names, PHASES, where));
    TRY(write_column(file, "phases/path_names", &plain_text, path_names, sizeof *path_names, PATHS, where));
    TRY(write_table(file, &sessions_table, f->session, f->sessions, where));
    if (f->iterations)
        TRY(write_table(file, &iterations_table, f->iteration, f->iterations, where));
    if (f->audits)
        TRY(write_table(file, &audit_table, f->audit, f->audits, where));
    if (f->observations)
        TRY(write_table(file, &observed_table, f->observation, f->observations, where));
    if (f->scores)
        TRY(write_table(file, &scores_table, f->score, f->scores, where));
out:
    free(output_row);
    return st;
}

/* The file is built in memory and taken from HDF5 as it closes: a full disk must never be HDF5's affair, which crashes
 * the process at its end with whatever it could not flush. (H5Fget_file_image will not do: of a file that is open for
 * writing it leaves the superblock's checksum wrong.) */
typedef struct image {
    unsigned char *bytes;
    size_t size;
} image;

static void *image_resize(void *old, size_t size, H5FD_file_image_op_t op, void *of)
{
    image *m = of;
    unsigned char *bytes = realloc(old, size);
    (void)op;
    if (!bytes)
        return NULL;
    if (size > m->size)
        memset(bytes + m->size, 0, size - m->size); /* the same rows give the same bytes */
    *m = (image){bytes, size};
    return bytes;
}

static void *image_new(size_t size, H5FD_file_image_op_t op, void *of)
{
    return image_resize(NULL, size, op, of);
}

static void *image_copy(void *to, const void *from, size_t size, H5FD_file_image_op_t op, void *of)
{
    (void)op, (void)of;
    return memcpy(to, from, size);
}

static herr_t image_keep(void *bytes, H5FD_file_image_op_t op, void *of)
{
    (void)bytes, (void)op, (void)of;
    return 0;
}

static void *image_share(void *of)
{
    return of;
}

static herr_t image_unshare(void *of)
{
    (void)of;
    return 0;
}

static status write_image(const char *where, const unsigned char *bytes, size_t size)
{
    status st = OK;
    FILE *to = fopen(where, "we");
    if (!to)
        FAIL(FAILED, "%s: cannot be created: %s", where, strerror(errno));
    if (fwrite(bytes, 1, size, to) != size || fflush(to) != 0)
        FAIL(FAILED, "%s: %zu bytes cannot be written: %s; make room, then run again with --resume", where, size,
             strerror(errno));
out:
    if (to)
        fclose(to);
    return st;
}

static status write_file(const char *where, status (*fill)(hid_t file, const void *from, const char *where),
                         const void *from)
{
    status st = OK;
    hid_t made = -1, how = -1, file = -1;
    image m = {0};
    H5FD_file_image_callbacks_t calls = {image_new,     image_copy, image_resize, image_keep, image_share,
                                         image_unshare, &m};
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    made = H5Pcreate(H5P_FILE_CREATE);
    how = H5Pcreate(H5P_FILE_ACCESS);
    WROTE(H5Pset_obj_track_times(made, false),
          "the format"); /* here as everywhere: the same rows give the same bytes */
    WROTE(H5Pset_libver_bounds(how, H5F_LIBVER_V18, H5F_LIBVER_V110), "the format"); /* V18: attributes above 64 KiB */
    WROTE(H5Pset_fapl_core(how, 4 << 20, false), "the image");
    WROTE(H5Pset_file_image_callbacks(how, &calls), "the image");
    WROTE(file = H5Fcreate(where, H5F_ACC_TRUNC, made, how), "the file");
    TRY(fill(file, from, where));
    WROTE(H5Fflush(file, H5F_SCOPE_GLOBAL), "the image");
    ssize_t size = H5Fget_file_image(file, NULL, 0); /* without the room behind the last byte */
    herr_t closed = H5Fclose(file);
    file = -1;
    WROTE(closed, "the image");
    WROTE(size < 0 || (size_t)size > m.size ? -1 : 0, "the image");
    TRY(write_image(where, m.bytes, (size_t)size));
out:
    if (file >= 0)
        H5Fclose(file);
    free(m.bytes);
    drop(how);
    drop(made);
    return st;
}

static status fill_results(hid_t file, const void *from, const char *where)
{
    status st = OK;
    TRY(write_run(file, from, where));
    TRY(write_tables(file, from, where));
out:
    return st;
}

status hdf5_write(const char *where, const results_file *f)
{
    return write_file(where, fill_results, f);
}

typedef struct bench_rows {
    const json_t *about;
    const bench_row *row;
    int64_t rows;
} bench_rows;

static status fill_bench(hid_t file, const void *from, const char *where)
{
    status st = OK;
    const bench_rows *b = from;
    json_t *all = json_copy((json_t *)b->about);
    if (json_object_set_new(all, "bench_schema_version", json_integer(BENCH_SCHEMA)) < 0)
        FAIL(FAILED, "%s: no memory for attributes", where);
    TRY(write_attributes(file, all, where));
    TRY(write_table(file, &bench_table, b->row, b->rows, where));
    TRY(write_column(file, "bench/phase_names", &plain_text, phase_names, sizeof *phase_names, PHASES, where));
out:
    json_decref(all);
    return st;
}

status bench_save(const char *path, const json_t *about, const bench_row *row, int64_t rows)
{
    status st = OK;
    char tmp[4096];
    if ((size_t)snprintf(tmp, sizeof tmp, "%s.tmp.%ld", path, (long)getpid()) >= sizeof tmp)
        FAIL(BAD_INPUT, "%s: the path is too long", path);
    TRY(write_file(tmp, fill_bench, &(bench_rows){about, row, rows}));
    TRY(file_settle(tmp, path));
out:
    if (st != OK)
        unlink(tmp);
    return st;
}

/* ---- reading */

static status open_file(hid_t *out, const char *where)
{
    status st = OK;
    H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    *out = -1;
    if (access(where, R_OK) != 0)
        FAIL(BAD_INPUT, "%s: cannot be read: %s", where, strerror(errno));
    *out = H5Fopen(where, H5F_ACC_RDONLY, H5P_DEFAULT);
    if (*out < 0)
        FAIL(BAD_INPUT, "%s: not an HDF5 file that can be opened: %s", where, reason());
out:
    return st;
}

typedef struct attribute_walk {
    json_t *run;
    status st;
    const char *where;
} attribute_walk;

static status read_attribute(json_t *run, hid_t file, const char *name, const char *where)
{
    status st = OK;
    hid_t a = -1, type = -1, memory = -1, space = -1;
    char *text = NULL;
    json_t *v = NULL;
    GOT(a = H5Aopen(file, name, H5P_DEFAULT), name);
    GOT(type = H5Aget_type(a), name);
    GOT(space = H5Aget_space(a), name);
    if (H5Sget_simple_extent_npoints(space) != 1)
        goto out; /* somebody else's attribute */
    H5T_class_t kind = H5Tget_class(type);
    if (kind == H5T_STRING && H5Tis_variable_str(type) > 0) {
        memory = text_type();
        GOT(H5Aread(a, memory, &text), name);
        v = json_string(text ? text : "");
    } else if (kind == H5T_INTEGER) {
        int64_t n;
        GOT(H5Aread(a, H5T_NATIVE_INT64, &n), name);
        v = json_integer(n);
    } else if (kind == H5T_FLOAT) {
        double x;
        GOT(H5Aread(a, H5T_NATIVE_DOUBLE, &x), name);
        v = json_real(x);
    } else if (kind == H5T_ENUM && H5Tget_size(type) == 1) {
        int8_t b;
        GOT(H5Aread(a, type, &b), name);
        v = json_boolean(b != 0);
    }
    if (v && json_object_set(run, name, v) < 0)
        FAIL(FAILED, "%s: no memory for the attribute %s", where, name);
out:
    json_decref(v);
    if (text)
        H5free_memory(text);
    drop(memory);
    drop(space);
    drop(type);
    drop(a);
    return st;
}

static herr_t each_attribute(hid_t file, const char *name, const H5A_info_t *info, void *walk)
{
    attribute_walk *w = walk;
    (void)info;
    w->st = read_attribute(w->run, file, name, w->where);
    return w->st == OK ? 0 : -1;
}

static status read_run(json_t **out, hid_t file, const char *where)
{
    status st = OK;
    attribute_walk w = {json_object(), OK, where};
    hsize_t at = 0;
    int64_t version;
    *out = NULL;
    if (!w.run)
        FAIL(FAILED, "%s: no memory for attributes", where);
    herr_t walked = H5Aiterate2(file, H5_INDEX_NAME, H5_ITER_INC, &at, each_attribute, &w);
    TRY(w.st);
    GOT(walked, "attributes");
    TRY(json_int(&version, w.run, "schema_version", 0, INT64_MIN, INT64_MAX, where));
    if (version != RESULTS_SCHEMA)
        FAIL(BAD_INPUT, "%s: schema_version %lld, want %d: %s", where, (long long)version, RESULTS_SCHEMA,
             version ? "use the program that wrote it" : "not a results file of epoch");
    *out = w.run;
    w.run = NULL;
out:
    json_decref(w.run);
    return st;
}

status hdf5_attributes(json_t **out, const char *where)
{
    status st = OK;
    hid_t file = -1;
    *out = NULL;
    TRY(open_file(&file, where));
    TRY(read_run(out, file, where));
out:
    if (file >= 0)
        H5Fclose(file);
    return st;
}

/* The length of a column's dataset, whose shape and type must be the column's. A new handle in *out. */
static status open_column(hid_t *out, int64_t *n, hid_t group, const char *name, const column *c, const char *where)
{
    status st = OK;
    hsize_t dims[2] = {0, 1};
    hid_t space = -1, type = -1;
    GOT(*out = H5Dopen2(group, name, H5P_DEFAULT), name);
    GOT(space = H5Dget_space(*out), name);
    GOT(type = H5Dget_type(*out), name);
    int axes = H5Sget_simple_extent_ndims(space), want = c->width > 1 ? 2 : 1;
    if (axes != want)
        FAIL(BAD_INPUT, "%s: %s has %d axes, want %d", where, name, axes, want);
    H5Sget_simple_extent_dims(space, dims, NULL);
    if (dims[1] != (hsize_t)c->width)
        FAIL(BAD_INPUT, "%s: %s has %llu values a row, want %d", where, name, (unsigned long long)dims[1], c->width);
    H5T_class_t kind = H5Tget_class(type);
    bool text = c->type == COLUMN_TEXT || c->type == COLUMN_FAILED;
    bool real = c->type == COLUMN_F32 || c->type == COLUMN_F64;
    if (text ? kind != H5T_STRING || H5Tis_variable_str(type) <= 0 : kind != (real ? H5T_FLOAT : H5T_INTEGER))
        FAIL(BAD_INPUT, "%s: %s holds another type, want %s", where, name,
             text   ? "texts of variable length"
             : real ? "floating-point numbers"
                    : "integers");
    *n = (int64_t)dims[0];
out:
    drop(type);
    drop(space);
    return st;
}

/* The n values of a column into the field at c->at of n structs. */
static status read_column(hid_t group, const char *name, const column *c, void *rows, size_t stride, int64_t n,
                          results_pool **pool, const char *where)
{
    status st = OK;
    bool text = c->type == COLUMN_TEXT || c->type == COLUMN_FAILED;
    size_t each = text ? sizeof(char *) : field_bytes(c->type) * (size_t)c->width;
    hid_t data = -1, space = -1, type = memory_type(c->type);
    char *values = NULL;
    bool filled = false;
    int64_t found;
    TRY(open_column(&data, &found, group, name, c, where));
    if (found != n)
        FAIL(BAD_INPUT, "%s: %s has %lld rows, its table has %lld", where, name, (long long)found, (long long)n);
    if (!n)
        goto out;
    values = calloc((size_t)n, each);
    if (!values)
        FAIL(FAILED, "%s: no memory for the %lld rows of %s", where, (long long)n, name);
    GOT(space = H5Dget_space(data), name);
    GOT(H5Dread(data, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, values), name);
    filled = true;
    for (int64_t i = 0; i < n; i++) {
        char *field = (char *)rows + (size_t)i * stride + c->at;
        if (!text) {
            memcpy(field, values + (size_t)i * each, each);
            continue;
        }
        const char *t = ((char **)(void *)values)[i], *kept;
        t = t ? t : "";
        if (c->type == COLUMN_FAILED) {
            *(bool *)field = strcmp(t, "failed") == 0;
            continue;
        }
        kept = pool_text(pool, t, strlen(t));
        if (!kept)
            FAIL(FAILED, "%s: no memory for the texts of %s", where, name);
        memcpy(field, &kept, sizeof kept);
    }
out:
    if (filled && text)
        H5Dvlen_reclaim(type, space, H5P_DEFAULT, values);
    free(values);
    drop(space);
    drop(data);
    drop(type);
    return st;
}

/* A whole table into new structs of the pool; its first column tells how many. */
static status read_table(void **rows, int64_t *n, hid_t file, const table *t, results_pool **pool, const char *where)
{
    status st = OK;
    hid_t group = -1, first = -1;
    GOT(group = H5Gopen2(file, t->name, H5P_DEFAULT), t->name);
    TRY(open_column(&first, n, group, t->column[0].name, &t->column[0], where));
    *rows = pool_take(pool, (size_t)*n, t->stride);
    if (!*rows)
        FAIL(FAILED, "%s: no memory for the %lld rows of %s", where, (long long)*n, t->name);
    for (int i = 0; i < t->columns; i++)
        TRY(read_column(group, t->column[i].name, &t->column[i], *rows, t->stride, *n, pool, where));
out:
    drop(first);
    drop(group);
    return st;
}

static bool has(hid_t file, const char *name)
{
    return H5Lexists(file, name, H5P_DEFAULT) > 0;
}

static status read_tables(results_file *f, hid_t file, const char *where)
{
    status st = OK;
    hid_t tokens = -1;
    void *rows = NULL;
#define READ(field, count, table)                                           \
    do {                                                                    \
        TRY(read_table(&rows, &f->count, file, &(table), &f->pool, where)); \
        f->field = rows;                                                    \
    } while (0)
    READ(output, rows, outputs_table);
    READ(block, blocks, blocks_table);
    READ(rank, ranks, phases_table);
    READ(session, sessions, sessions_table);
    if (has(file, "iterations"))
        READ(iteration, iterations, iterations_table);
    if (has(file, "audit"))
        READ(audit, audits, audit_table);
    if (has(file, "observed"))
        READ(observation, observations, observed_table);
    if (has(file, "scores"))
        READ(score, scores, scores_table);
#undef READ
    TRY(open_column(&tokens, &f->tokens, file, "tokens", &plain_i32, where));
    f->token = pool_take(&f->pool, (size_t)f->tokens, sizeof *f->token);
    if (!f->token)
        FAIL(FAILED, "%s: no memory for %lld tokens", where, (long long)f->tokens);
    TRY(read_column(file, "tokens", &plain_i32, f->token, sizeof *f->token, f->tokens, &f->pool, where));
out:
    drop(tokens);
    return st;
}

/* Points the rows at their tokens and blocks. */
static status join(results_file *f, hid_t file, const char *where)
{
    status st = OK;
    int64_t at = 0;
    int64_t *output_row = pool_take(&f->pool, (size_t)f->blocks, sizeof *output_row);
    if (!output_row)
        FAIL(FAILED, "%s: no memory for %lld blocks", where, (long long)f->blocks);
    TRY(read_column(file, "blocks/output_row", &plain_i64, output_row, sizeof *output_row, f->blocks, &f->pool, where));
    for (int64_t i = 0; i < f->rows; i++) {
        result_output *o = &f->output[i];
        if (o->row.tokens < 0 || o->token_offset < 0 || o->token_offset > f->tokens - o->row.tokens)
            FAIL(BAD_INPUT, "%s: outputs row %lld: tokens %lld + %d, but the file has %lld", where, (long long)i,
                 (long long)o->token_offset, o->row.tokens, (long long)f->tokens);
        o->row.token = f->token + o->token_offset;
        o->row.block = f->block + at;
        for (int32_t b = 0; b < o->row.blocks; b++, at++)
            if (at >= f->blocks || output_row[at] != i)
                FAIL(BAD_INPUT, "%s: outputs row %lld: want %d rows of blocks, found %d", where, (long long)i,
                     o->row.blocks, b);
    }
    if (at != f->blocks)
        FAIL(BAD_INPUT, "%s: blocks has %lld rows, its outputs have %lld", where, (long long)f->blocks, (long long)at);
    for (int64_t i = 0; i < f->iterations; i++) {
        result_trace *t = &f->iteration[i];
        if (t->output_row < 0 || t->output_row >= f->rows || t->at.path < 0 || t->at.path >= PATHS)
            FAIL(BAD_INPUT, "%s: iterations row %lld: output_row %lld, path %d: no such row or path", where,
                 (long long)i, (long long)t->output_row, t->at.path);
        t->at.order = f->output[t->output_row].row.order;
        t->at.turn = f->output[t->output_row].row.turn;
    }
    for (int64_t i = 0; i < f->audits; i++) {
        result_audited *a = &f->audit[i];
        if (a->output_row < 0 || a->output_row >= f->rows)
            FAIL(BAD_INPUT, "%s: audit row %lld: output_row %lld, but outputs has %lld rows", where, (long long)i,
                 (long long)a->output_row, (long long)f->rows);
        a->at.order = f->output[a->output_row].row.order;
        a->at.turn = f->output[a->output_row].row.turn;
    }
out:
    return st;
}

static void sum_observations(results_file *f)
{
    result_observed *sum = &f->observed;
    f->has_observed = f->observations > 0;
    for (int64_t n = 0; n < f->observations; n++) {
        const result_observed *o = &f->observation[n].of;
        for (int i = 0; i < OBSERVED_STEPS; i++) {
            sum->overlap_count[i] += o->overlap_count[i];
            sum->overlap_sum[i] += o->overlap_sum[i];
            for (int k = 0; k < OBSERVED_KINDS; k++) {
                sum->cosine_count[k][i] += o->cosine_count[k][i];
                sum->cosine_sum[k][i] += o->cosine_sum[k][i];
            }
        }
    }
}

status results_read(results_file **out, const char *where)
{
    status st = OK;
    hid_t file = -1;
    *out = NULL;
    results_file *f = calloc(1, sizeof *f);
    if (!f)
        FAIL(FAILED, "%s: no memory", where);
    TRY(open_file(&file, where));
    TRY(read_run(&f->run, file, where));
    f->state = json_string_value(json_object_get(f->run, "state"));
    f->state = f->state ? f->state : "";
    TRY(read_tables(f, file, where));
    TRY(join(f, file, where));
    sum_observations(f);
    *out = f;
    f = NULL;
out:
    if (file >= 0)
        H5Fclose(file);
    results_close(f);
    return st;
}
