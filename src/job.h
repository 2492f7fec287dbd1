/* One run on this rank: everything it holds, from its first check to its last commit. run.c has the loop, landing.c
 * what becomes of a forward's reports; here is the way in and out. */
#ifndef EPOCH_JOB_H
#define EPOCH_JOB_H

#include "results/results.h"
#include "src/exec/audit.h"
#include "src/exec/observe.h"
#include "src/feed.h"
#include "src/flight.h"
#include "src/progress.h"
#include "src/stage.h"
#include "src/watch.h"

/* What a rank remembers of a forward until it reads what that forward did. */
typedef struct forward_note {
    bool fed;        /* the input was exhausted before it */
    int32_t asked;   /* rows that this rank asked for in its pulse */
    int32_t *pulses; /* [size][PULSE] */
} forward_note;

typedef struct job {
    const options *o;
    world *w;
    watch watch;
    stage stage;
    feed_rule feed_rule;
    feed *feed;
    bool fed;              /* the input is exhausted */
    bool over;             /* earlier sessions have done all rows */
    json_t *run_json;
    char dir[4096];        /* FILE.h5.d */
    int lock;
    results_state done;    /* of earlier sessions */
    int32_t session;       /* number of this one */
    journal *journal;
    flight *flight;        /* [slot_count] */
    slot_report *report;   /* [slot_count] */
    layer_log *log;        /* --trace: [sparse layers * cohorts] */
    row **queue;           /* rows waiting for a slot: [queue_room], the first queue_count */
    int32_t queue_count, queue_room;
    audit *audit;          /* --audit */
    audit_slot *audited;   /* [slot_count] */
    observer *observer;    /* --observe */
    int32_t *want;         /* [size] */
    bool late;             /* reports are read one forward late: while the next one runs */
    int64_t heard;         /* forwards that were read; counters.forwards were enqueued */
    forward_note note[2];  /* of the forward of that parity */
    result_phase counters;
    int64_t total, recorded, durable, failed; /* rows of the job; of this rank and session */
    double born, started, committed, commit_asked, published, looked;
    bool stop_file_seen;
    bool stopped;
    progress *progress;
} job;

/* What a row of this job is encoded by. */
flight_form job_form(const job *j);

/* Checks all input, claims the output, loads, opens this rank's journal: every stage ends with the ranks' agreement.
 * j->over: earlier sessions have done all rows, nothing was loaded. BAD_INPUT or FAILED, the same on every rank. */
status job_open(job *j, const char *command_line);
void job_close(job *j);
/* In its place where the process ends next: nothing is freed, for a device frees nothing that still waits for the other
 * ranks. */
void job_leave(job *j);

/* landing.c: records a turn that ended. A failed one takes with it the turns that wait for its answer. */
status job_record(job *j, flight *f, const char *text, const char *message);
status job_record_failed(job *j, flight *f, const char *text, const char *why);
/* landing.c: with --audit, the dense executor decides beside the forward that was. */
status job_shadow(job *j);
/* landing.c: takes in what every slot did in the forward that is heard now; finished turns land. */
status job_reports(job *j);
/* landing.c: with --observe, what was seen so far goes into the journal. */
status job_record_observed(job *j);
/* landing.c: adds the lane's traffic since the last call; *bytes: what this rank sent to others. */
status job_traffic(job *j, int64_t *bytes);

#endif
