/* What the results' own files share: the frames of a journal, the index over a folder of them, and a file's memory. */
#ifndef EPOCH_RESULTS_PRIVATE_H
#define EPOCH_RESULTS_PRIVATE_H

#include "results/results.h"

/* A journal is a row of frames, each [header][payload], every number little-endian:
 *     magic u32 | version u16 | kind u16 | payload bytes u32 | session u32 | rank u32 | sequence u32 | crc u32
 * The CRC-32 (zlib's) covers the 24 header bytes before it and the payload. Frame n of a journal has sequence n, so
 * that neither a lost nor a stale piece of the disk can pass for the next frame. */
enum {
    FRAME_MAGIC = 0x4a4f5045, /* "EPOJ" */
    FRAME_VERSION = 1,
    FRAME_HEADER = 28,
    FRAME_MOST = 1 << 28 /* payload bytes */
};

typedef enum frame_kind {
    FRAME_END,     /* the journal ends here, cleanly */
    FRAME_SESSION, /* the first frame: when the journal was opened */
    FRAME_ROW,     /* a prompt and turn with its tokens and blocks */
    FRAME_ITERATION,
    FRAME_COUNTERS, /* of the rank since its session's start: the last one counts */
    FRAME_AUDIT,
    FRAME_OBSERVED, /* like FRAME_COUNTERS */
    FRAME_TORN,     /* not a whole frame of this journal: its tail */
    FRAME_FOREIGN   /* whole, but of another format version or kind */
} frame_kind;

typedef struct frame {
    frame_kind kind;
    int version, found; /* as written in the header */
    const unsigned char *payload;
    size_t bytes;
} frame;

/* The frame at *at of a journal's bytes; moves *at behind it unless it is END, TORN or FOREIGN. */
frame frame_next(const unsigned char *bytes, size_t size, size_t *at, int session, int rank, uint32_t *sequence);

/* A journal of another time: journal_open and journal_commit, with their seconds since 1970. */
status journal_open_at(journal **out, const char *dir, int rank, int session, double started);
status journal_commit_at(journal *j, const result_phase *p, double now);

/* Decode a payload; false where it is not exactly what its kind says. Texts point into the payload. token [r->tokens]
 * and block [r->blocks] are filled where given: a first call with NULL tells the counts. */
bool frame_row(result_row *r, const frame *f, int32_t *token, result_block *block);
bool frame_iteration(result_iteration *i, const frame *f);
bool frame_counters(result_phase *p, double *seconds_since_1970, const frame *f);
bool frame_audit(result_audit *a, const frame *f);
bool frame_observed(result_observed *o, const frame *f);
bool frame_session(double *seconds_since_1970, const frame *f);

/* sNNNN.rNNNNN.jnl; and back: false where `name` is no journal's. */
void journal_name(char *name, size_t bytes, int session, int rank);
bool journal_of_name(const char *name, int *session, int *rank);

typedef struct index_journal { /* one journal, mapped */
    int session, rank;
    const unsigned char *bytes;
    size_t size, whole; /* whole: bytes of good frames */
    double started, ended;
    bool counted;       /* are there counters? */
    result_phase phase; /* the last ones */
    int64_t iterations, audits;
    bool observed; /* are there observations? */
    result_observed observation;
} index_journal;

typedef struct index_row { /* a key's first frame; the texts lie in the journal */
    uint64_t hash;
    const char *dataset, *id;
    int64_t order, source_line; /* the frame's, or what a later session says */
    int32_t turn, journal;
    bool failed;
    frame frame;
} index_row;

struct results_index {
    index_journal *journal; /* by session, then rank */
    int journals;
    index_row *row; /* in the order of discovery */
    int64_t rows, room;
    int64_t *slot; /* open addressing: 1 + row, 0: free; slot_count is a power of two */
    size_t slot_count;
};

/* The row of a key, or NULL. */
const index_row *index_find(const results_index *x, const char *dataset, const char *id, int turn);
/* Fills the slots from the rows. */
void index_fill(results_index *x);

/* Memory that a results_file owns: taken in pieces, given back at once. NULL: out of memory. */
typedef struct results_pool results_pool;
void *pool_take(results_pool **pool, size_t count, size_t each); /* zeroed */
const char *pool_text(results_pool **pool, const char *text, size_t bytes);
void pool_close(results_pool *pool);

/* DIR/NAME. */
status path_of(char *file, size_t bytes, const char *dir, const char *name);
/* fsync a folder, so that names made or changed in it last. */
status folder_sync(const char *folder);
/* The folder of a path, "." where it has none. */
void folder_of(char *folder, size_t bytes, const char *path);
/* fsync tmp, rename it to path, fsync the folder. */
status file_settle(const char *tmp, const char *path);
/* Keeps run_json in DIR as a session's. */
status folder_run_keep(const char *dir, const char *run_json, int session);
/* The run_json of one session in DIR, or of the newest that has one (number `sessions` may have begun, with no journal
 * yet); NULL where there is none. json_decref it. */
status folder_run(json_t **out, const char *dir, int session);
status folder_run_newest(json_t **out, const char *dir, int sessions);

/* In DIR while its journals are being written from the file and are not yet all: a run that took them for all there is
 * would publish fewer rows. Removed as a recovery is done, or a session begins with what there is. */
#define RECOVERING "recovering"
status recovery_end(const char *dir);

/* hdf5_file.c. A whole file at tmp, not yet synced; and the attributes of one, which is all that its standing needs. */
status hdf5_write(const char *tmp, const results_file *f);
status hdf5_attributes(json_t **out, const char *path);

#endif
