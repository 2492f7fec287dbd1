/* What becomes of a forward: reports are counted, traced and audited, finished turns recorded. */
#include "src/base/clock.h"
#include "src/base/fault.h"
#include "src/job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

status job_record(job *j, flight *f, const char *text, const char *message)
{
    result_row r;
    flight_record(&r, f, text, message, clock_seconds());
    bool again = results_done(&j->done, r.dataset, r.id, r.turn); /* killed before it said so of the turns behind it */
    j->recorded += !again;
    j->failed += !again && r.failed;
    j->counters.generated_tokens += r.tokens;
    return journal_row(j->journal, &r);
}

/* This turn failed, and so do those that wait for its answer. The row is done. */
status job_record_failed(job *j, flight *f, const char *text, const char *why)
{
    status st = OK;
    char message[600];
    TRY(job_record(j, f, text, why));
    flight rest = {.row = f->row};
    snprintf(message, sizeof message, "%.500s:%lld: turn %d failed, whose answer this one wants", f->row->path,
             (long long)f->row->example.line, (int)f->row->turn + 1);
    while (++f->row->turn < row_records(f->row))
        TRY(job_record(j, &rest, NULL, message));
out:
    return st;
}

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
        TRY(job_record_failed(j, f, text, message));
    } else {
        TRY(job_record(j, f, text, NULL));
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
status job_traffic(job *j, int64_t *bytes)
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
    TRY(job_traffic(j, &bytes));
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
status job_shadow(job *j)
{
    status st = OK;
    int64_t bytes;
    lane_traffic ignored_traffic;
    double ignored[PHASES] = {0}, began = clock_seconds();
    backend *b = j->stage.backend;
    TRY(b->mark(b, PHASE_HOST));
    TRY(b->laps(b, j->counters.seconds));
    TRY(job_traffic(j, &bytes));
    TRY(audit_after(j->audit, j->audited));
    TRY(b->mark(b, PHASE_HOST));
    TRY(b->laps(b, ignored));
    TRY(j->stage.lane->traffic(j->stage.lane, &ignored_traffic));
    j->started += clock_seconds() - began;
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

status job_record_observed(job *j)
{
    const observation *o = observer_sums(j->observer);
    result_observed r;
    _Static_assert((int)OBSERVE_STEPS == (int)OBSERVED_STEPS && (int)OBSERVE_KINDS == (int)OBSERVED_KINDS,
                   "the same table");
    memcpy(r.overlap_count, o->overlap_count, sizeof r.overlap_count);
    memcpy(r.overlap_sum, o->overlap_sum, sizeof r.overlap_sum);
    memcpy(r.cosine_count, o->cosine_count, sizeof r.cosine_count);
    memcpy(r.cosine_sum, o->cosine_sum, sizeof r.cosine_sum);
    return journal_observed(j->journal, &r);
}

status job_reports(job *j)
{
    status st = OK;
    executor *x = j->stage.executor;
    const block_rule *k = &j->stage.rule.block;
    double bytes_a_row = 0;
    TRY(executor_fetch(x, j->report, (int)(j->heard % 2)));
    if (j->o->trace) {
        TRY(x->backend->download(x->backend, j->log, &x->plans.log));
        TRY(traced_bytes(j, &bytes_a_row));
    }
    if (j->audit)
        TRY(job_shadow(j));
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
