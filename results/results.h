/* The results of a run: per-rank journals while it goes on, one HDF5 file published from them.
 * Layout and meaning of every column: results/schema.md. */
#ifndef EPOCH_RESULTS_RESULTS_H
#define EPOCH_RESULTS_RESULTS_H

#include "src/base/counters.h"
#include "src/base/json.h"
#include "src/base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { RESULT_CAUSES = 4 }; /* rows fallbacks by cause: miss, version, illegal, overdue */

typedef struct result_block { /* one decoded block */
    int32_t block, iterations, cold, refresh, hot_update, hot_skip, forced;
    int32_t layer_rebuilds, universe, rows_fallback[RESULT_CAUSES];
    int32_t fresh_rows, cached_rows;
    float support_size, distinct_experts, coverage; /* means over hot iterations and sparse layers; NaN: none */
} result_block;

typedef struct result_row { /* one prompt and turn; everything is borrowed */
    const char *dataset;    /* dataset_name */
    const char *id;
    int64_t source_line;
    int32_t turn;  /* from 0 */
    int64_t order; /* position in the run's input: rows are published in this order, then by turn */
    const char *prompt, *text, *gold;
    bool failed;
    const char *message;       /* why it failed, or "" */
    const char *finish_reason; /* "eos", "length", or "" of a failed row */
    int32_t prompt_tokens;
    const int32_t *token; /* generated ids, before the first EOS */
    int32_t tokens;
    int32_t iterations; /* forwards in which it refined a block */
    double seconds;     /* from its first forward to its last */
    const result_block *block;
    int32_t blocks;
} result_row;

typedef struct result_phase { /* counters of one rank, since the session's start */
    double seconds[PHASES];
    int64_t forwards;
    int64_t rows_fresh[PATHS], rows_cached[PATHS]; /* by path of the slot; prefill counts sealing rows too */
    int64_t rows_dispatched, rows_received, bytes_dispatched, bytes_combined;
    int64_t expert_tiles; /* -1: the backend does not count them */
    double wall_seconds; /* of decoding: first forward to now */
    int64_t generated_tokens;
} result_phase;

typedef struct result_iteration { /* --trace: one slot's forward */
    int64_t order;
    int32_t turn, block, iteration, path, live, newly, stable, fresh, commits, forced;
    uint64_t committed;
    float support_size, distinct_experts, coverage; /* means over sparse layers */
    int64_t bytes_moved;
} result_iteration;

typedef struct result_audit { /* --audit: one slot's iteration against the dense executor on the same inputs */
    int64_t order;
    int32_t turn, block, iteration;
    int32_t live;       /* rows compared */
    int32_t held;       /* rows whose logit difference stayed below their margin */
    int32_t same;       /* rows with the same decision */
    int32_t broken;     /* rows that held and yet decided otherwise: must be 0 */
    int32_t block_same; /* 1: every row of the block decided alike */
    float max_difference, mean_difference; /* of logits, in the max norm over the vocabulary; over the live rows */
    float min_margin, mean_margin;
} result_audit;

enum {
    OBSERVED_STEPS = 64, /* what lies further is not observed */
    OBSERVED_KINDS = 2   /* of rows: 0 decoded, 1 live */
};

typedef struct result_observed { /* on request: the paper's own observations, of one rank since the session's start */
    /* Jaccard overlap of the experts that a layer touches in iterations i - 1 and i of a block, by i */
    int64_t overlap_count[OBSERVED_STEPS];
    double overlap_sum[OBSERVED_STEPS];
    /* cosine similarity of a row's routed output to its own of `age` iterations before, by kind and age */
    int64_t cosine_count[OBSERVED_KINDS][OBSERVED_STEPS];
    double cosine_sum[OBSERVED_KINDS][OBSERVED_STEPS];
} result_observed;

/* ---- While a run goes on: one journal a rank and session, an append-only file of checksummed frames. */

typedef struct journal journal;

/* Creates this rank's journal of one session in DIR, which results_lock has made. FAILED: it exists already (two runs
 * at once), or the file system refused. */
status journal_open(journal **out, const char *dir, int rank, int session);
/* All copy into the journal's buffer; a row counts as done only after journal_commit. */
status journal_row(journal *j, const result_row *r);
status journal_iteration(journal *j, const result_iteration *i);
status journal_audit(journal *j, const result_audit *a);
/* Before a commit; cumulative like its counters: the last one counts. */
status journal_observed(journal *j, const result_observed *o);
/* Group commit: what is buffered and the counters (cumulative since the session's start; NULL: none) by one write and
 * one fdatasync. After a failure the journal refuses every further call; what was committed before stays readable. */
status journal_commit(journal *j, const result_phase *p);
/* Bytes waiting for the next commit. */
size_t journal_pending(const journal *j);
void journal_close(journal *j); /* accepts NULL; does not commit */

/* ---- The folder DIR = FILE.h5.d */

/* Takes the run's lock on DIR, which it creates; waits wait_seconds for leftovers of a killed run, then BAD_INPUT names
 * the holder. Rank 0 calls it exclusively, then results_lock_share, and only then every other rank calls it shared.
 * Each holder is noted in DIR/lock by host, pid and command. The lock lives as long as *fd is open; it goes with the
 * process. */
status results_lock(int *fd, const char *dir, bool exclusive, double wait_seconds);
/* From exclusive to shared, with no gap that another run could enter. */
status results_lock_share(int fd);

/* Rank 0, under the exclusive lock: keeps run_json (a JSON object) in DIR as the session's, and sweeps away unfinished
 * FILE.h5.tmp.* of killed publishers. */
status results_begin(const char *path, const char *dir, const char *run_json, int session);

/* A row of earlier sessions that a session with other settings keeps, with its place in the input as it is now. */
typedef struct result_kept {
    const char *dataset, *id;
    int32_t turn;
    int64_t order, source_line;
} result_kept;
/* Rank 0, before results_begin: from this session on, of what earlier ones recorded only these rows count. NULL: all,
 * as they are. */
status results_keep(const char *dir, int session, const result_kept *kept, int64_t count);

typedef struct results_index results_index;

/* What the journals in DIR hold. A key is (dataset, id, turn); of a repeated key the first in the order of session,
 * rank and place counts. A journal ends at its first frame that is not whole: what lies behind was never acknowledged.
 */
typedef struct results_state {
    int sessions;         /* so far, and the number of the next one; a session counts from its first journal on */
    int64_t done, failed; /* rows, each key once */
    int64_t repeated;     /* rows dropped since their key was there already */
    int torn;             /* journals with a damaged or unfinished tail */
    int64_t torn_bytes;
    results_index *index;
} results_state;

/* A missing DIR is an empty state. BAD_INPUT: a journal of another format version. results_scan_close in any case. */
status results_scan(results_state *out, const char *dir);
void results_scan_close(results_state *s);
/* Takes out what the coming session does not keep; a scan does so by itself for sessions that have a journal. */
status results_drop(results_state *s, const char *dir, int session);
/* Is this row recorded, done or failed? */
bool results_done(const results_state *s, const char *dataset, const char *id, int turn);
/* The recorded row; false where there is none. Texts belong to the state. Its tokens and blocks are left out (NULL,
 * with their counts): this is for the answers of earlier turns. */
bool results_row(result_row *out, const results_state *s, const char *dataset, const char *id, int turn);

/* Writes PATH from the journals in DIR by atomic rename: PATH is at all times absent, the old file or the new one,
 * whole. The same journals give the same bytes. run_json: an object whose members become attributes of `/` (texts,
 * integers, numbers, booleans; objects and arrays as JSON text); NULL: the newest session's. state: "partial",
 * "complete", "interrupted". */
status results_publish(const char *path, const char *dir, const char *run_json, const char *state);

/* Rank 0, under the exclusive lock, before the scan of a resume: where DIR holds no journals, as after its removal, and
 * PATH is there, writes the journals anew from PATH, with its sessions and ranks as they were: publishing gives PATH's
 * rows again. It does nothing where there are journals or no PATH; one that was killed is begun again.
 * BAD_INPUT: as of results_read, or a row of a session or rank that the file does not have. */
status results_recover(const char *path, const char *dir);
/* The run_json of the newest session that has a journal; NULL where there is none. json_decref it. */
status results_run(json_t **out, const results_state *s, const char *dir);
/* A text as the file will hold it: U+FFFD for what is not UTF-8. malloc'd. */
status results_text(char **out, const char *text);

/* How a run stands: from the journals in PATH.d where there are any, else from PATH. BAD_INPUT: neither is there. */
typedef struct results_standing {
    bool running;     /* somebody holds the lock */
    char holder[512]; /* "pid N on HOST (command)", or "" */
    char state[16];   /* of the published file, or "" */
    bool current;     /* the published file holds all that the journals do */
    int sessions;
    int64_t done, failed;
    int64_t total, left; /* from the integer "rows_total" of run_json; -1 where unknown */
} results_standing;
status results_status(results_standing *out, const char *path);

/* ---- The published file, in memory: what score, report and export work upon. Everything belongs to the file. */

enum { RESULTS_SCHEMA = 1 }; /* schema_version */

typedef struct result_output { /* one row of /outputs */
    result_row row;            /* texts are valid UTF-8; token and block point into the file's arrays */
    int32_t session, rank;
    int32_t forced;       /* positions, over its blocks */
    int64_t token_offset; /* row.token - file->token */
} result_output;

typedef struct result_rank { /* one row of /phases: the last counters of a rank in a session */
    int32_t session, rank;
    result_phase phase;
} result_rank;

typedef struct result_session { /* one row of /sessions */
    int32_t session, ranks;
    double started, ended;        /* seconds since 1970: first journal opened, last commit */
    double wall_seconds;          /* of decoding: the longest of its ranks */
    int64_t done, failed, tokens; /* of its rows in /outputs */
    const char *run;              /* its run_json */
} result_session;

typedef struct result_trace { /* one row of /iterations */
    int64_t output_row;
    int32_t session, rank;
    result_iteration at;
} result_trace;

typedef struct result_audited { /* one row of /audit */
    int64_t output_row;
    int32_t session, rank;
    result_audit at;
} result_audited;

typedef struct result_observation { /* one row of /observed: the last of a rank in a session */
    int32_t session, rank;
    result_observed of;
} result_observation;

typedef struct result_score { /* one row of /scores; written by `epoch score` */
    const char *dataset, *rule;
    int32_t rule_version;
    int64_t rows, correct, no_answer, truncated, failed;
    double score, low, high; /* score and its 95 % interval */
} result_score;

typedef struct results_file {
    json_t *run; /* the attributes of `/`; objects and arrays are JSON text, as in the file */
    const char *state;
    int64_t rows;
    result_output *output; /* in input order, then by turn */
    int64_t tokens;
    int32_t *token; /* of all rows, one after the other */
    int64_t blocks;
    result_block *block; /* likewise */
    int64_t ranks;
    result_rank *rank; /* by session, then rank */
    int64_t sessions;
    result_session *session;
    int64_t iterations;
    result_trace *iteration; /* by output_row, block, iteration */
    int64_t audits;
    result_audited *audit; /* likewise */
    int64_t observations;
    result_observation *observation; /* by session, then rank */
    bool has_observed;
    result_observed observed; /* results_read: the sum of the observations */
    int64_t scores;
    result_score *score; /* may be replaced before results_write; what it was stays the file's */
    struct results_pool *pool;
} results_file;

/* BAD_INPUT: not there, not HDF5, another schema_version, or a column that is missing or does not fit its table. */
status results_read(results_file **out, const char *path);
void results_close(results_file *f); /* accepts NULL */
/* Writes PATH by atomic rename. FAILED where the file system refuses; PATH is then as it was. */
status results_write(const char *path, const results_file *f);

#endif
