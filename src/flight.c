#include "src/flight.h"

#include <math.h>
#include <stdlib.h>

static float mean(double sum, double n)
{
    return n > 0 ? (float)(sum / n) : NAN;
}

static void to_result(result_block *b, int32_t block, const block_stats *t)
{
    *b = (result_block){.block = block,
                        .iterations = t->iterations,
                        .cold = t->cold,
                        .refresh = t->refresh,
                        .hot_update = t->hot_update,
                        .hot_skip = t->hot_skip,
                        .forced = t->forced,
                        .layer_rebuilds = t->layer_rebuilds,
                        .universe = t->universe,
                        .fresh_rows = t->fresh_rows,
                        .cached_rows = t->cached_rows,
                        .support_size = mean((double)t->support_size, t->layer_iterations),
                        .distinct_experts = mean((double)t->distinct, t->layer_iterations),
                        .coverage = mean(t->covered, (double)t->tested_rows)};
    for (int c = ROWS_MISS; c < ROWS_CAUSES; c++)
        b->rows_fallback[c - ROWS_MISS] = t->rows_fallback[c];
}

status flight_encode(flight *f, const feed *rows, const flight_form *form)
{
    status st = OK;
    const example *e = &f->row->example;
    long long line = e->line;
    if (e->error) {
        status_message_set(e->error);
        return BAD_INPUT;
    }
    if (!*e->turn[f->row->turn])
        FAIL(BAD_INPUT, "%s:%lld: the prompt is empty", f->row->path, line);
    st = feed_encode(rows, f->row, form->chat, form->tokenizer, &f->prompt);
    if (st == BAD_INPUT)
        FAIL(BAD_INPUT, "%s:%lld: %s", f->row->path, line, status_message());
    TRY(st);
    if (f->prompt.count >= (size_t)form->max_tokens)
        FAIL(BAD_INPUT, "%s:%lld: the prompt has %zu tokens, which leaves no room for an answer: want fewer than %d "
             "(max_position_embeddings)", f->row->path, line, f->prompt.count, form->max_tokens);
    int64_t end = (int64_t)f->prompt.count + form->gen_len;
    f->end = (int32_t)(end < form->max_tokens ? end : form->max_tokens);
out:
    return st;
}

status flight_report(flight *f, const slot_report *rep, const block_rule *k)
{
    status st = OK;
    if (rep->path >= PATH_COLD && !rep->broken)
        f->iterations++;
    if (!rep->block_done)
        return OK;
    if (f->blocks == f->block_room) {
        int32_t room = f->block_room ? 2 * f->block_room : 8;
        result_block *more = realloc(f->block, sizeof *more * (size_t)room);
        if (!more)
            FAIL(FAILED, "out of memory");
        f->block = more;
        f->block_room = room;
    }
    to_result(&f->block[f->blocks++], rep->block, &rep->stats);
    for (int i = 0; i < k->block_size && !f->eos; i++) {
        int32_t at = rep->block * k->block_size + i;
        if (at < (int32_t)f->prompt.count || at >= f->end)
            continue;
        f->eos = rep->token[i] == k->eos_id;
        if (!f->eos)
            TRY(token_list_add(&f->answer, rep->token[i]));
    }
out:
    return st;
}

void flight_record(result_row *out, const flight *f, const char *text, const char *message, double now)
{
    const row *r = f->row;
    *out = (result_row){.dataset = r->dataset,
                        .id = r->example.id,
                        .source_line = r->example.line,
                        .turn = r->turn,
                        .order = r->order,
                        .prompt = r->turn < r->example.turns ? r->example.turn[r->turn] : "",
                        .text = text ? text : "",
                        .gold = r->example.gold ? r->example.gold : "{}",
                        .failed = message != NULL,
                        .message = message ? message : "",
                        .finish_reason = message ? "" : f->eos ? "eos" : "length",
                        .prompt_tokens = (int32_t)f->prompt.count,
                        .token = f->answer.id,
                        .tokens = (int32_t)f->answer.count,
                        .iterations = f->iterations,
                        .seconds = f->started > 0 ? now - f->started : 0,
                        .block = f->block,
                        .blocks = f->blocks};
}

void flight_clear(flight *f)
{
    row_close(f->row);
    token_list_close(&f->prompt);
    token_list_close(&f->answer);
    free(f->block);
    *f = (flight){0};
}
