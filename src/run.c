#include "src/run.h"

#include "results/results.h"
#include "src/base/fault.h"
#include "src/exec/audit.h"
#include "src/exec/observe.h"
#include "src/feed.h"
#include "src/flight.h"
#include "src/plan/scheduler.h"
#include "src/progress.h"
#include "src/resume.h"
#include "src/stage.h"
#include "src/stop.h"
#include "src/watch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

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
    result_phase counters;
    int64_t total, recorded, durable, failed; /* rows of the job; of this rank and session */
    double born, started, committed, commit_asked, published, looked;
    bool stop_file_seen;
    bool stopped;
    progress *progress;
} job;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- before the first forward */

static status describe(job *j, const char *command_line)
{
    status st = OK;
    json_t *data = NULL, *inputs = NULL, *all = j->run_json = stage_json(&j->stage);
    json_object_set_new(all, "program", json_string("epoch"));
    json_object_set_new(all, "version", json_string(EPOCH_VERSION));
    json_object_set_new(all, "command_line", json_string(command_line));
    json_object_set_new(all, "settings", options_json(j->o));
    json_object_set_new(all, "rows_total", json_integer(j->total));
    TRY(feed_json(&data, j->feed));
    json_object_set_new(all, "datasets", data);
    TRY(resume_inputs(&inputs, j->o, j->feed));
    json_object_set_new(all, "inputs", inputs);
    char host[256] = "";
    gethostname(host, sizeof host - 1);
    json_object_set_new(all, "hosts", json_string(host));
out:
    return st;
}

static flight_form form_of(const job *j)
{
    return (flight_form){j->stage.chat, j->stage.tokenizer, j->stage.rule.max_tokens, j->o->gen_len};
}

/* Rank 0: the records that the job leaves in all. --strict: BAD_INPUT at the first row that cannot run. */
static status count_rows(job *j)
{
    status st = OK;
    feed *f = NULL;
    flight one = {0};
    flight_form form = form_of(j);
    TRY(feed_open(&f, &j->feed_rule));
    for (;;) {
        TRY(feed_next(f, &one.row));
        if (!one.row)
            break;
        if (j->o->strict && (st = flight_encode(&one, f, &form)) == BAD_INPUT)
            FAIL(BAD_INPUT, "%s (--strict refuses a file with a bad row)", status_message());
        TRY(st);
        j->total += row_records(one.row);
        flight_clear(&one);
    }
out:
    flight_clear(&one);
    feed_close(f);
    return st;
}

/* Rank 0: may this run go on with what is there, and with how much of it? */
static status take_over(job *j)
{
    status st = OK;
    json_t *before = NULL;
    resume_change change;
    resume_rows rows = {0};
    TRY(results_run(&before, &j->done, j->dir));
    TRY(resume_compare(&change, before, j->run_json));
    if (j->o->resume == RESUME_CHANGED || change.prompts)
        TRY(resume_keep(&rows, &j->done, &j->feed_rule));
    if (j->o->resume != RESUME_CHANGED && (change.answers || change.prompts))
        FAIL(BAD_INPUT,
             "%s was made otherwise: %s%s%s; take what it was made with, or --resume=changed, or another --out", j->o->out,
             change.text, *rows.first ? "; the first other prompt is " : "", rows.first);
    bool all = j->o->resume != RESUME_CHANGED || (rows.all && !change.answers);
    j->over = all && j->done.done + j->done.failed == j->total;
    TRY(results_keep(j->dir, j->session, all ? NULL : rows.kept, change.answers ? 0 : rows.count));
    TRY(results_drop(&j->done, j->dir, j->session));
out:
    json_decref(before);
    resume_rows_close(&rows);
    return st;
}

/* Rank 0: is the output free, and whose turn is it? */
static status claim_output(job *j)
{
    status st = OK;
    if (access(j->o->out, F_OK) == 0 && !j->o->resume)
        FAIL(BAD_INPUT, "%s exists already: --resume goes on with it, or name another --out", j->o->out);
    TRY(results_lock(&j->lock, j->dir, true, j->o->lock_wait));
    if (j->o->resume)
        TRY(results_recover(j->o->out, j->dir));
    TRY(results_scan(&j->done, j->dir));
    if (j->done.sessions > 0 && !j->o->resume)
        FAIL(BAD_INPUT, "%s holds %lld rows of an unfinished run: --resume goes on with it, or remove it", j->dir,
             (long long)(j->done.done + j->done.failed));
    j->session = j->done.sessions;
    if (j->session > 0)
        TRY(take_over(j));
    else
        TRY(results_keep(j->dir, 0, NULL, 0));
out:
    return st;
}

static status open_job(job *j, const char *command_line)
{
    status st = OK;
    world *w = j->w;
    const options *o = j->o;
    char *text = NULL;
    TRY(w->agree(w, stage_check(&j->stage, o, w)));
    fault_point("check");
    j->feed_rule = (feed_rule){.data = o->data,
                               .data_count = o->data_count,
                               .dataset = {.prompt_field = o->prompt_field, .limit = o->limit},
                               .shots = o->shots};
    st = feed_open(&j->feed, &j->feed_rule);
    if (st == OK && w->rank == 0)
        st = count_rows(j);
    TRY(w->agree(w, st));
    TRY(w->bcast(w, &j->total, sizeof j->total, 0));
    if (o->dry_run) {
        if (w->rank == 0)
            stage_print(&j->stage, stdout);
        return OK;
    }
    snprintf(j->dir, sizeof j->dir, "%s.d", o->out);
    if (w->rank == 0) {
        st = describe(j, command_line);
        if (st == OK)
            st = claim_output(j);
    }
    TRY(w->agree(w, st));
    TRY(w->bcast(w, &j->session, sizeof j->session, 0));
    TRY(w->bcast(w, &j->over, sizeof j->over, 0));
    TRY(w->bcast(w, &j->done.failed, sizeof j->done.failed, 0));
    if (j->over)
        return OK;
    j->stage.heart = &j->watch.heart;
    TRY(w->agree(w, watch_open(&j->watch, j->dir)));
    fault_point("load");
    TRY(w->agree(w, stage_load(&j->stage)));
    st = o->audit ? audit_open(&j->audit, j->stage.executor) : OK;
    if (st == OK && o->observe)
        st = observer_open(&j->observer, j->stage.executor);
    TRY(w->agree(w, st));
    if (w->rank == 0) {
        json_t *loaded = stage_json(&j->stage); /* it knows the device now */
        json_object_update(j->run_json, loaded);
        json_decref(loaded);
        text = json_dumps(j->run_json, JSON_SORT_KEYS);
        st = results_begin(o->out, j->dir, text, j->session);
        if (st == OK)
            st = results_lock_share(j->lock);
    }
    TRY(w->agree(w, st));
    fault_point("begin");
    st = w->rank == 0 ? OK : results_lock(&j->lock, j->dir, false, o->lock_wait);
    if (st == OK && w->rank != 0)
        st = results_scan(&j->done, j->dir);
    if (st == OK && w->rank != 0)
        st = results_drop(&j->done, j->dir, j->session);
    TRY(w->agree(w, st));
    st = journal_open(&j->journal, j->dir, w->rank, j->session);
    fault_point("open");
    size_t n = (size_t)j->stage.slot_count;
    j->flight = calloc(n + 1, sizeof *j->flight);
    j->report = calloc(n + 1, sizeof *j->report);
    j->audited = calloc(n + 1, sizeof *j->audited);
    j->log = calloc((size_t)j->stage.executor->plans.log.rows + 1, sizeof *j->log);
    j->queue_room = j->stage.slot_count + 1;
    j->queue = calloc((size_t)j->queue_room, sizeof *j->queue);
    j->want = calloc((size_t)w->size, sizeof *j->want);
    if (st == OK && (!j->flight || !j->report || !j->audited || !j->log || !j->queue || !j->want))
        st = status_fail(FAILED, __FILE__, __LINE__, "out of memory");
    TRY(w->agree(w, st));
    if (w->rank == 0)
        TRY(progress_open(&j->progress, o->progress, j->total, j->done.done + j->done.failed));
out:
    free(text);
    return st;
}

/* ---- between forwards */

/* The next row that is still to run; *out is NULL at the end, and where the row is for another rank (`mine` false). */
static status next_row(job *j, bool mine, row **out)
{
    status st = OK;
    *out = NULL;
    if (!mine && j->session == 0) {
        bool more;
        TRY(feed_skip(j->feed, &more));
        j->fed = !more;
        return OK;
    }
    for (bool left = false; !left;) {
        row_close(*out);
        TRY(feed_next(j->feed, out));
        if (!*out)
            break;
        TRY(resume_row(&left, *out, &j->done));
    }
    j->fed = !*out;
    if (!mine) {
        row_close(*out);
        *out = NULL;
    }
out:
    return st;
}

/* All ranks deal the rows that were asked for in the newest pulses; this rank queues its own. */
static status deal_rows(job *j)
{
    status st = OK;
    deal d = {.size = j->w->size, .want = j->want};
    for (int rank; !j->fed && (rank = deal_next(&d)) >= 0;) {
        row *r;
        TRY(next_row(j, rank == j->w->rank, &r));
        if (r)
            j->queue[j->queue_count++] = r;
    }
out:
    return st;
}

static status record(job *j, flight *f, const char *text, const char *message)
{
    result_row r;
    flight_record(&r, f, text, message, now());
    bool again = results_done(&j->done, r.dataset, r.id, r.turn); /* killed before it said so of the turns behind it */
    j->recorded += !again;
    j->failed += !again && r.failed;
    j->counters.generated_tokens += r.tokens;
    return journal_row(j->journal, &r);
}

/* This turn failed, and so do those that wait for its answer. The row is done. */
static status record_failed(job *j, flight *f, const char *text, const char *why)
{
    status st = OK;
    char message[600];
    TRY(record(j, f, text, why));
    flight rest = {.row = f->row};
    snprintf(message, sizeof message, "%.500s:%lld: turn %d failed, whose answer this one wants", f->row->path,
             (long long)f->row->example.line, (int)f->row->turn + 1);
    while (++f->row->turn < row_records(f->row))
        TRY(record(j, &rest, NULL, message));
out:
    return st;
}

/* Puts waiting rows into idle slots. A row that cannot run is recorded as failed. */
static status fill_slots(job *j)
{
    status st = OK;
    executor *x = j->stage.executor;
    flight_form form = form_of(j);
    for (int32_t i = 0; i < j->stage.slot_count && j->queue_count > 0; i++) {
        flight *f = &j->flight[i];
        while (!f->row && j->queue_count > 0) {
            f->row = j->queue[0];
            st = flight_encode(f, j->feed, &form);
            bool bad = st == BAD_INPUT;
            if (!bad)
                TRY(st);
            if (!bad && !executor_has_room(x, f->end)) { /* it waits until pages are free */
                f->row = NULL;
                flight_clear(f);
                return OK;
            }
            memmove(j->queue, j->queue + 1, sizeof *j->queue * (size_t)--j->queue_count);
            if (bad) {
                TRY(record_failed(j, f, NULL, status_message()));
                flight_clear(f);
                continue;
            }
            f->started = now();
            TRY(executor_admit(x, i, f->prompt.id, (int32_t)f->prompt.count, f->end));
            if (f->row->order == fault_row())
                x->spoiled = i;
        }
    }
out:
    return st;
}

/* Was this rank asked to stop? The stop file is looked for five times a second: it may lie far away. */
static bool stop_wanted(job *j)
{
    double t = now();
    if (j->o->stop_file && !j->stop_file_seen && t - j->looked >= .2) {
        j->stop_file_seen = access(j->o->stop_file, F_OK) == 0;
        j->looked = t;
    }
    return stop_asked() || j->stop_file_seen || (j->o->time_budget > 0 && t - j->born > j->o->time_budget);
}

static void set_pulse(job *j)
{
    int32_t flying = 0, *p = j->stage.lane->pulse;
    for (int32_t i = 0; i < j->stage.slot_count; i++)
        flying += j->flight[i].row != NULL;
    int32_t free_slots = j->stage.slot_count - flying - j->queue_count;
    p[PULSE_BUSY] = flying + j->queue_count;
    p[PULSE_WANT] = free_slots > 0 ? free_slots : 0;
    p[PULSE_STOP] = stop_wanted(j);
    p[PULSE_COMMIT] = j->w->rank == 0 && now() - j->commit_asked >= j->o->commit_every;
    p[PULSE_DONE] = (int32_t)j->durable;
    p[PULSE_TOKENS] = (int32_t)(j->counters.generated_tokens & 0x7fffffff);
    p[PULSE_STEPS] = (int32_t)(j->counters.forwards & 0x7fffffff);
}

/* ---- after a forward */

/* A finished turn: its answer is recorded; a row with another turn goes back to the front of the queue. */
static status land(job *j, int32_t index, const char *why)
{
    status st = OK;
    flight *f = &j->flight[index];
    char *text = NULL;
    size_t bytes;
    executor_release(j->stage.executor, index);
    if (f->row->order == fault_row())
        j->stage.executor->spoiled = -1;
    TRY(tokenizer_decode(j->stage.tokenizer, &text, &bytes, f->answer.id, f->answer.count, true));
    if (why) {
        char message[600];
        snprintf(message, sizeof message, "%.500s:%lld: %s", f->row->path, (long long)f->row->example.line, why);
        TRY(record_failed(j, f, text, message));
    } else {
        TRY(record(j, f, text, NULL));
    }
    if (!why && f->row->turn + 1 < f->row->example.turns) {
        row *r = f->row;
        TRY(results_text(&r->answer[r->turn], text));
        f->row = NULL;
        r->turn++;
        memmove(j->queue + 1, j->queue, sizeof *j->queue * (size_t)j->queue_count++);
        j->queue[0] = r;
    }
    flight_clear(f);
out:
    free(text);
    return st;
}

/* One slot's part of the job's counters. */
static void count(job *j, const slot_report *rep)
{
    int32_t block = j->stage.rule.block.block_size;
    j->counters.rows_fresh[PATH_PREFILL] += (int64_t)rep->filled * block;
    if (rep->path >= PATH_COLD) {
        j->counters.rows_fresh[rep->path] += rep->fresh;
        j->counters.rows_cached[rep->path] += block - rep->fresh;
    }
}

/* Adds the lane's traffic since the last call; *bytes: what this rank sent to others. */
static status take_traffic(job *j, int64_t *bytes)
{
    lane_traffic t;
    status st = j->stage.lane->traffic(j->stage.lane, &t);
    if (st != OK)
        return st;
    j->counters.rows_dispatched += t.rows_sent;
    j->counters.rows_received += t.rows_received;
    j->counters.bytes_dispatched += t.bytes_dispatched;
    j->counters.bytes_combined += t.bytes_combined;
    *bytes = t.bytes_dispatched + t.bytes_combined;
    return OK;
}

/* What the lane moved in the newest forward, dealt to this rank's slots by their fresh rows: bytes a fresh row. */
static status traced_bytes(job *j, double *bytes_a_row)
{
    status st = OK;
    int64_t bytes, rows = 0;
    TRY(take_traffic(j, &bytes));
    for (int32_t i = 0; i < j->stage.slot_count; i++)
        rows += j->report[i].fresh + (int64_t)j->report[i].filled * j->stage.rule.block.block_size;
    *bytes_a_row = rows ? (double)bytes / (double)rows : 0;
out:
    return st;
}

static status trace(job *j, const flight *f, int32_t index, const slot_report *rep, double bytes_a_row)
{
    const plans *p = &j->stage.executor->plans;
    int32_t cohort = index / j->stage.rule.block.cohort, layers = p->layers;
    double support = 0, distinct = 0, covered = 0, tested = 0;
    for (int32_t l = 0; l < layers; l++) {
        const layer_log *g = &j->log[l * p->cohort_count + cohort];
        support += g->support;
        distinct += g->distinct;
        covered += g->covered;
        tested += g->tested;
    }
    result_iteration it = {.order = f->row->order,
                           .turn = f->row->turn,
                           .block = rep->block,
                           .iteration = rep->iteration,
                           .path = rep->path,
                           .live = rep->live,
                           .newly = rep->newly,
                           .stable = rep->stable,
                           .fresh = rep->fresh,
                           .commits = __builtin_popcountll(rep->committed),
                           .forced = rep->forced,
                           .committed = rep->committed,
                           .support_size = (float)(support / layers),
                           .distinct_experts = (float)(distinct / layers),
                           .coverage = (float)(tested > 0 ? covered / tested : 1),
                           .bytes_moved = (int64_t)(bytes_a_row * rep->fresh + 0.5)};
    return journal_iteration(j->journal, &it);
}

/* The dense executor goes through the same forward. Neither its traffic nor its time counts. */
static status shadow(job *j)
{
    status st = OK;
    int64_t bytes;
    lane_traffic ignored_traffic;
    double ignored[PHASES] = {0}, began = now();
    backend *b = j->stage.backend;
    TRY(b->mark(b, PHASE_HOST));
    TRY(b->laps(b, j->counters.seconds));
    TRY(take_traffic(j, &bytes));
    TRY(audit_after(j->audit, j->audited));
    TRY(b->mark(b, PHASE_HOST));
    TRY(b->laps(b, ignored));
    TRY(j->stage.lane->traffic(j->stage.lane, &ignored_traffic));
    j->started += now() - began;
out:
    return st;
}

static status record_audit(job *j, const flight *f, const slot_report *rep, const audit_slot *a)
{
    result_audit r = {.order = f->row->order,
                      .turn = f->row->turn,
                      .block = rep->block,
                      .iteration = rep->iteration,
                      .live = a->live,
                      .held = a->held,
                      .same = a->same,
                      .broken = a->broken,
                      .block_same = a->same == a->live,
                      .max_difference = a->max_difference,
                      .mean_difference = a->mean_difference,
                      .min_margin = a->min_margin,
                      .mean_margin = a->mean_margin};
    return journal_audit(j->journal, &r);
}

static status record_observed(job *j)
{
    const observation *o = observer_sums(j->observer);
    result_observed r;
    _Static_assert((int)OBSERVE_STEPS == (int)OBSERVED_STEPS && (int)OBSERVE_KINDS == (int)OBSERVED_KINDS, "the same table");
    memcpy(r.overlap_count, o->overlap_count, sizeof r.overlap_count);
    memcpy(r.overlap_sum, o->overlap_sum, sizeof r.overlap_sum);
    memcpy(r.cosine_count, o->cosine_count, sizeof r.cosine_count);
    memcpy(r.cosine_sum, o->cosine_sum, sizeof r.cosine_sum);
    return journal_observed(j->journal, &r);
}

static status take_reports(job *j)
{
    status st = OK;
    executor *x = j->stage.executor;
    const block_rule *k = &j->stage.rule.block;
    double bytes_a_row = 0;
    TRY(executor_reports(x, j->report));
    if (j->o->trace) {
        TRY(x->backend->download(x->backend, j->log, &x->plans.log));
        TRY(traced_bytes(j, &bytes_a_row));
    }
    if (j->audit)
        TRY(shadow(j));
    for (int32_t i = 0; i < j->stage.slot_count; i++) {
        const slot_report *rep = &j->report[i];
        flight *f = &j->flight[i];
        if (!f->row || rep->path == PATH_NONE)
            continue;
        count(j, rep);
        TRY(flight_report(f, rep, k));
        if (j->o->trace && rep->path >= PATH_COLD && !rep->broken)
            TRY(trace(j, f, i, rep, bytes_a_row));
        if (j->audit && j->audited[i].live > 0)
            TRY(record_audit(j, f, rep, &j->audited[i]));
        if (rep->broken)
            TRY(land(j, i, "the logits are not finite"));
        else if (rep->sequence_done)
            TRY(land(j, i, NULL));
    }
out:
    return st;
}

static const double COUNTERS_EVERY = 30; /* s: without rows to commit, the counters are */

static status commit(job *j)
{
    status st = OK;
    int64_t bytes;
    backend *b = j->stage.backend;
    TRY(b->mark(b, PHASE_HOST));
    TRY(b->laps(b, j->counters.seconds));
    TRY(take_traffic(j, &bytes));
    j->counters.wall_seconds = now() - j->started;
    if (j->observer)
        TRY(record_observed(j));
    fault_point("commit");
    TRY(journal_commit(j->journal, &j->counters));
    fault_point("committed");
    j->committed = now();
    j->durable = j->recorded;
out:
    return st;
}

/* What all ranks said before this forward: the sums that progress and the end need. */
static int64_t pulse_sum(const job *j, int what)
{
    int64_t sum = 0;
    for (int r = 0; r < j->w->size; r++)
        sum += j->stage.lane->pulses[r * PULSE + what];
    return sum;
}

/* The loop: every rank goes through the same forwards, since all hear the same pulses. */
static status decode(job *j)
{
    status st = OK;
    world *w = j->w;
    backend *b = j->stage.backend;
    const options *o = j->o;
    double ignored[PHASES] = {0};
    for (int r = 0; r < w->size; r++) {
        int total = o->batch_per_rank ? o->batch_per_rank * w->size : o->batch;
        j->want[r] = deal_evenly(total, w->size, r);
    }
    j->started = j->committed = j->commit_asked = j->published = now();
    TRY(b->mark(b, PHASE_HOST));
    TRY(b->laps(b, ignored)); /* what came before the first forward */
    heartbeat_stage(&j->watch.heart, WATCH_RUN);
    for (;;) {
        heartbeat_iteration(&j->watch.heart, j->counters.forwards);
        fault_point("forward");
        TRY(deal_rows(j));
        TRY(fill_slots(j));
        set_pulse(j);
        TRY(b->mark(b, PHASE_HOST));
        if (j->audit)
            TRY(audit_before(j->audit));
        TRY(executor_forward(j->stage.executor));
        j->counters.forwards++;
        TRY(take_reports(j));
        for (int r = 0; r < w->size; r++)
            j->want[r] = j->stage.lane->pulses[r * PULSE + PULSE_WANT];
        if (j->progress)
            TRY(progress_show(j->progress, pulse_sum(j, PULSE_DONE), pulse_sum(j, PULSE_TOKENS), now() - j->started));
        if (j->fed && pulse_sum(j, PULSE_BUSY) == 0)
            break;
        if (pulse_sum(j, PULSE_STOP) > 0) {
            j->stopped = true;
            break;
        }
        if (j->stage.lane->pulses[PULSE_COMMIT]) {
            j->commit_asked = now();
            if (journal_pending(j->journal) > 0 || j->commit_asked - j->committed >= COUNTERS_EVERY)
                TRY(commit(j));
        }
        if (w->rank == 0 && o->publish_every > 0 && now() - j->published >= o->publish_every) {
            heartbeat_stage(&j->watch.heart, WATCH_PUBLISH);
            TRY(results_publish(o->out, j->dir, NULL, "partial"));
            heartbeat_stage(&j->watch.heart, WATCH_RUN);
            j->published = now();
        }
    }
    TRY(commit(j));
out:
    return st;
}

/* ---- the end */

/* Does the file hold all that the journals do? Then it stays as it is, with its scores. */
static bool published(const char *out)
{
    results_standing s;
    return results_status(&s, out) == OK && s.current && strcmp(s.state, "complete") == 0;
}

static status finish(job *j)
{
    status st = OK;
    world *w = j->w;
    heartbeat_stage(&j->watch.heart, WATCH_PUBLISH);
    int64_t mine[] = {j->recorded, j->failed}, recorded = 0, failed = 0;
    int64_t(*all)[2] = calloc((size_t)w->size, sizeof *all);
    TRY(w->agree(w, all ? OK : status_fail(FAILED, __FILE__, __LINE__, "out of memory")));
    TRY(w->gather(w, all, mine, sizeof mine)); /* so every rank has committed its last rows before they are published */
    for (int r = 0; r < w->size && w->rank == 0; r++) {
        recorded += all[r][0];
        failed += all[r][1];
    }
    if (w->rank == 0) {
        j->stopped = j->stopped && recorded + j->done.done + j->done.failed < j->total;
        if (j->progress && !j->stopped)
            st = progress_show(j->progress, j->total - j->done.done - j->done.failed, pulse_sum(j, PULSE_TOKENS),
                               now() - j->started);
        progress_close(j->progress);
        j->progress = NULL;
        if (st == OK && !(j->over && published(j->o->out)))
            st = results_publish(j->o->out, j->dir, NULL, j->stopped ? "interrupted" : "complete");
        if (st == OK)
            st = progress_table(j->o->out, j->total);
    }
    fault_point("published");
    TRY(w->agree(w, st));
    TRY(w->bcast(w, &failed, sizeof failed, 0));
    TRY(w->bcast(w, &j->stopped, sizeof j->stopped, 0));
    st = j->stopped ? STOPPED : failed + j->done.failed > 0 ? ROWS_FAILED : OK;
out:
    free(all);
    return st;
}

static void close_job(job *j)
{
    watch_close(&j->watch);
    progress_close(j->progress);
    for (int32_t i = 0; j->flight && i < j->stage.slot_count; i++)
        flight_clear(&j->flight[i]);
    for (int32_t i = 0; i < j->queue_count; i++)
        row_close(j->queue[i]);
    free(j->flight);
    free(j->report);
    free(j->audited);
    free(j->log);
    free(j->queue);
    free(j->want);
    journal_close(j->journal);
    results_scan_close(&j->done);
    json_decref(j->run_json);
    feed_close(j->feed);
    audit_close(j->audit);
    observer_close(j->observer);
    stage_close(&j->stage);
    if (j->lock >= 0)
        close(j->lock);
}

status run(const options *o, world *w, const char *command_line, bool *together)
{
    status st = OK;
    job j = {.o = o, .w = w, .lock = -1, .born = now()};
    *together = true;
    watch_alarm(&j.watch, w, o->timeout, o->lock_wait);
    TRY(open_job(&j, command_line));
    if (o->dry_run)
        goto out;
    if (!j.over) {
        *together = false;
        TRY(decode(&j));
        *together = true;
    }
    TRY(finish(&j));
out:
    close_job(&j);
    return st;
}
