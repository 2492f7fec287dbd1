#include "src/job.h"

#include "src/base/fault.h"
#include "src/resume.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

flight_form job_form(const job *j)
{
    return (flight_form){j->stage.chat, j->stage.tokenizer, j->stage.rule.max_tokens, j->o->gen_len};
}

/* Rank 0: the records that the job leaves in all. --strict: BAD_INPUT at the first row that cannot run. */
static status count_rows(job *j)
{
    status st = OK;
    feed *f = NULL;
    flight one = {0};
    flight_form form = job_form(j);
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
             "%s was made otherwise: %s%s%s; take what it was made with, or --resume=changed, or another --out",
             j->o->out, change.text, *rows.first ? "; the first other prompt is " : "", rows.first);
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

status job_open(job *j, const char *command_line)
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
    TRY(w->agree(w, stage_device(&j->stage)));
    TRY(w->agree(w, stage_join(&j->stage)));
    if (w->rank == 0)
        transport_say(&j->stage.way, stderr);
    TRY(w->agree(w, stage_load(&j->stage)));
    TRY(w->agree(w, stage_connect(&j->stage)));
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
    j->queue_room = 2 * j->stage.slot_count + 1;
    j->queue = calloc((size_t)j->queue_room, sizeof *j->queue);
    j->want = calloc((size_t)w->size, sizeof *j->want);
    j->note[0].pulses = calloc((size_t)w->size * PULSE, sizeof(int32_t));
    j->note[1].pulses = calloc((size_t)w->size * PULSE, sizeof(int32_t));
    if (st == OK && (!j->flight || !j->report || !j->audited || !j->log || !j->queue || !j->want ||
                     !j->note[0].pulses || !j->note[1].pulses))
        st = status_fail(FAILED, __FILE__, __LINE__, "out of memory");
    if (st == OK && w->rank == 0)
        st = progress_open(&j->progress, o->progress, j->total, j->done.done + j->done.failed);
    TRY(w->agree(w, st));
out:
    free(text);
    return st;
}

void job_close(job *j)
{
    fault_point("close");
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
    free(j->note[0].pulses);
    free(j->note[1].pulses);
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

void job_leave(job *j)
{
    watch_close(&j->watch);
    progress_close(j->progress);
}
