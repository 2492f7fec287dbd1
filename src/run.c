#include "src/run.h"

#include "src/base/clock.h"
#include "src/base/fault.h"
#include "src/job.h"
#include "src/plan/scheduler.h"
#include "src/resume.h"
#include "src/stop.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { STORE = 16 }; /* rows in store: one for so many slots */

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

/* Slots that neither hold a sequence nor have one waiting for them; negative where more wait. */
static int32_t free_slots(const job *j)
{
    int32_t n = j->stage.slot_count - j->queue_count;
    for (int32_t i = 0; i < j->stage.slot_count; i++)
        n -= j->flight[i].row != NULL;
    return n;
}

/* All ranks deal the rows that were asked for in the pulses they heard last; this rank queues its own. A rank that is
 * alone need not hear itself. */
static status deal_rows(job *j)
{
    status st = OK;
    if (j->w->size == 1)
        j->want[0] = free_slots(j); /* less than none: nobody wants one */
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

/* Puts waiting rows into idle slots. A row that cannot run is recorded as failed. */
static status fill_slots(job *j)
{
    status st = OK;
    executor *x = j->stage.executor;
    flight_form form = job_form(j);
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
                TRY(job_record_failed(j, f, NULL, status_message()));
                flight_clear(f);
                continue;
            }
            f->started = clock_seconds();
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
    double t = clock_seconds();
    if (j->o->stop_file && !j->stop_file_seen && t - j->looked >= .2) {
        j->stop_file_seen = access(j->o->stop_file, F_OK) == 0;
        j->looked = t;
    }
    return stop_asked() || j->stop_file_seen || (j->o->time_budget > 0 && t - j->born > j->o->time_budget);
}

/* What this rank says in the next forward. Rows that it asked for in a forward not yet heard are on their way. Where
 * asking takes some forwards, it keeps a few rows in store, so that no slot waits for them. */
static status set_pulse(job *j)
{
    status st = OK;
    lane *l = j->stage.lane;
    int32_t flying = 0, *p = l->pulse;
    for (int32_t i = 0; i < j->stage.slot_count; i++)
        flying += j->flight[i].row != NULL;
    int32_t want = free_slots(j) + (j->late ? (j->stage.slot_count + STORE - 1) / STORE : 0);
    for (int64_t n = j->heard; n < j->counters.forwards; n++)
        want -= j->note[n % 2].asked;
    p[PULSE_BUSY] = flying + j->queue_count;
    p[PULSE_WANT] = want > 0 ? want : 0;
    p[PULSE_STOP] = stop_wanted(j);
    p[PULSE_COMMIT] = j->w->rank == 0 && clock_seconds() - j->commit_asked >= j->o->commit_every;
    if (p[PULSE_COMMIT])
        j->commit_asked = clock_seconds();
    p[PULSE_DONE] = (int32_t)j->durable;
    p[PULSE_TOKENS] = (int32_t)(j->counters.generated_tokens & 0x7fffffff);
    p[PULSE_STEPS] = (int32_t)(j->counters.forwards & 0x7fffffff);
    if (l->said.data)
        TRY(j->stage.backend->upload(j->stage.backend, &l->said, p, I32));
out:
    return st;
}

/* Behind a forward that was enqueued: what it did goes to the host without a wait. */
static status note(job *j)
{
    status st = OK;
    const lane *l = j->stage.lane;
    int box = (int)(j->counters.forwards % 2);
    forward_note *n = &j->note[box];
    n->fed = j->fed;
    n->asked = l->pulse[PULSE_WANT];
    TRY(executor_post(j->stage.executor, box));
    if (l->heard.data)
        TRY(j->stage.backend->post(j->stage.backend, 2 + box, &l->heard));
    else
        memcpy(n->pulses, l->pulses, (size_t)j->w->size * PULSE * sizeof *n->pulses);
    j->counters.forwards++;
out:
    return st;
}

/* Takes in the oldest forward that was not: its pulses, and what its slots did. */
static status hear(job *j)
{
    status st = OK;
    int box = (int)(j->heard % 2);
    if (j->stage.lane->heard.data)
        TRY(j->stage.backend->fetch(j->stage.backend, j->note[box].pulses, 2 + box));
    if (j->stage.lane->check)
        TRY(j->stage.lane->check(j->stage.lane));
    TRY(job_reports(j));
    j->heard++;
    for (int r = 0; r < j->w->size; r++)
        j->want[r] = j->note[box].pulses[r * PULSE + PULSE_WANT];
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
    j->counters.expert_tiles = b->expert_tiles;
    TRY(b->laps(b, j->counters.seconds));
    TRY(job_traffic(j, &bytes));
    j->counters.wall_seconds = clock_seconds() - j->started;
    if (j->observer)
        TRY(job_record_observed(j));
    fault_point("commit");
    TRY(journal_commit(j->journal, &j->counters));
    fault_point("committed");
    j->committed = clock_seconds();
    j->durable = j->recorded;
out:
    return st;
}

/* What all ranks said before the forward that was heard last: the sums that progress and the end need. */
static int64_t pulse_sum(const job *j, int what)
{
    int64_t sum = 0;
    for (int r = 0; r < j->w->size && j->heard > 0; r++)
        sum += j->note[(j->heard - 1) % 2].pulses[r * PULSE + what];
    return sum;
}

/* The loop: every rank goes through the same forwards, since all hear the same pulses. Where the backend runs ahead, a
 * forward is heard while the next one runs: a slot that finished sits that one out, and is filled for the one behind.
 * Whoever looks into a forward besides (--trace, --audit, --observe) must do so before the next. */
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
    j->late = b->runs_ahead && !o->trace && !j->audit && !j->observer;
    if (fault_late() >= 0)
        j->late = fault_late();
    j->started = j->committed = j->commit_asked = j->published = clock_seconds();
    TRY(b->mark(b, PHASE_HOST));
    TRY(b->laps(b, ignored)); /* what came before the first forward */
    heartbeat_stage(&j->watch.heart, WATCH_RUN);
    for (;;) {
        heartbeat_iteration(&j->watch.heart, j->counters.forwards);
        fault_point("forward");
        TRY(deal_rows(j));
        TRY(fill_slots(j));
        TRY(set_pulse(j));
        TRY(b->mark(b, PHASE_HOST));
        if (j->audit)
            TRY(audit_before(j->audit));
        TRY(executor_forward(j->stage.executor));
        TRY(note(j));
        if (j->counters.forwards - j->heard <= j->late)
            continue;
        TRY(hear(j));
        const forward_note *heard = &j->note[(j->heard - 1) % 2];
        if (j->progress)
            TRY(progress_show(j->progress, pulse_sum(j, PULSE_DONE), pulse_sum(j, PULSE_TOKENS),
                              clock_seconds() - j->started));
        if (heard->fed && pulse_sum(j, PULSE_BUSY) == 0)
            break;
        if (pulse_sum(j, PULSE_STOP) > 0) {
            j->stopped = true;
            break;
        }
        if (heard->pulses[PULSE_COMMIT]) {
            j->commit_asked = clock_seconds();
            if (journal_pending(j->journal) > 0 || j->commit_asked - j->committed >= COUNTERS_EVERY)
                TRY(commit(j));
        }
        if (w->rank == 0 && o->publish_every > 0 && clock_seconds() - j->published >= o->publish_every) {
            heartbeat_stage(&j->watch.heart, WATCH_PUBLISH);
            TRY(results_publish(o->out, j->dir, NULL, "partial"));
            heartbeat_stage(&j->watch.heart, WATCH_RUN);
            j->published = clock_seconds();
        }
    }
    while (j->heard < j->counters.forwards)
        TRY(hear(j));
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
                               clock_seconds() - j->started);
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

status run(const options *o, world *w, const char *command_line, bool *together)
{
    status st = OK;
    job j = {.o = o, .w = w, .lock = -1, .born = clock_seconds()};
    *together = true;
    watch_alarm(&j.watch, w, o->timeout, o->lock_wait);
    TRY(job_open(&j, command_line));
    if (o->dry_run)
        goto out;
    if (!j.over) {
        *together = false;
        TRY(decode(&j));
        *together = true;
    }
    TRY(finish(&j));
out:
    if (*together)
        job_close(&j);
    else
        job_leave(&j);
    return st;
}
