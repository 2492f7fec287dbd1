#include "src/transport.h"

#include "mpi/gpu_start.h"
#include "src/options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double FOR_EVER = 1e9; /* s: thirty years */

/* One rank's rows stay where they are, unless the way between GPUs is asked for by name. */
static bool alone(const transport_ask *a)
{
    return a->ranks == 1 && (a->transport == TRANSPORT_AUTO || a->transport == TRANSPORT_SELF);
}

bool transport_joins(void)
{
#ifdef EPOCH_NCCL
    return true;
#else
    return false;
#endif
}

status transport_check(const transport_ask *a)
{
    status st = OK;
    bool between = a->transport == TRANSPORT_NCCL || a->transport == TRANSPORT_LSA;
    if (a->transport == TRANSPORT_SELF && a->ranks > 1)
        FAIL(BAD_INPUT, "--transport self carries one rank, there are %d: want auto or %s", a->ranks,
             a->cuda ? "nccl" : "mpi");
    if (a->cuda && a->transport == TRANSPORT_MPI)
        FAIL(BAD_INPUT, "--transport mpi carries rows in host memory: want --transport %s with --device cuda",
             a->ranks > 1 ? "nccl" : "self");
    if (!a->cuda && between)
        FAIL(BAD_INPUT, "--transport %s carries rows between GPUs: want --device cuda, with a GPU for each rank, or "
             "--transport mpi", a->transport == TRANSPORT_NCCL ? "nccl" : "lsa");
    if (!a->cuda && a->combine != F32)
        FAIL(BAD_INPUT, "--combine bf16 halves what GPUs exchange: want --combine fp32, or --device cuda");
    if (a->cuda && !alone(a) && !a->joins)
        FAIL(BAD_INPUT, "--device cuda on %d ranks: this program was built without NCCL (-DEPOCH_NCCL=ON)", a->ranks);
out:
    return st;
}

status transport_gpus(bool *out, world *w, const char *bus)
{
    status st = OK;
    gpu_place mine, *all = calloc((size_t)w->size, sizeof *all);
    TRY(w->agree(w, all ? OK : status_fail(FAILED, __FILE__, __LINE__, "out of memory")));
    gpu_host(&mine);
    snprintf(mine.bus, sizeof mine.bus, "%s", bus);
    TRY(w->gather(w, all, &mine, sizeof mine));
    *out = w->rank != 0 || gpu_places_check(all, w->size) == OK;
    for (int r = 0; r < w->size && w->rank == 0; r++)
        *out = *out && all[r].bus[0];
    TRY(w->bcast(w, out, sizeof *out, 0));
out:
    free(all);
    return st;
}

#ifdef EPOCH_CUDA
static status open_self(lane **out, const transport_ask *a, const lane_rule *r, backend *b)
{
    return a->cuda ? lane_self_cuda_open(out, r, b) : lane_self_open(out, r, b);
}
#else
static status open_self(lane **out, const transport_ask *a, const lane_rule *r, backend *b)
{
    (void)a;
    return lane_self_open(out, r, b);
}
#endif

#ifdef EPOCH_NCCL
/* What stands against lsa is no error: it is kept, and rows go by nccl. */
static status choose(transport_ask *a, const lane_rule *r, world *w, backend *b, nccl_comm *n)
{
    status st = lane_lsa_try(r, b, w, n);
    if (st != OK && st != BAD_INPUT)
        return st;
    a->settled = true;
    a->transport = st == OK ? TRANSPORT_LSA : TRANSPORT_NCCL;
    if (st != OK) { /* of ranks that give different reasons, the first */
        snprintf(a->against, sizeof a->against, "%.*s", (int)strcspn(status_message(), "\n"), status_message());
        st = nccl_widen(n);
    }
    return st;
}

status transport_join(nccl_comm **out, transport_ask *a, const lane_rule *r, world *w, backend *b)
{
    status st = OK;
    *out = NULL;
    if (!a->cuda || alone(a))
        return OK;
    TRY(nccl_open(out, w, b, a->transport == TRANSPORT_NCCL, a->deadline));
    if (a->transport == TRANSPORT_AUTO)
        TRY(choose(a, r, w, b, *out));
out:
    return st;
}

void transport_leave(nccl_comm *n)
{
    nccl_close(n);
}

static status open_joined(lane **out, const transport_ask *a, const lane_rule *r, backend *b, world *w, nccl_comm *n)
{
    return a->transport == TRANSPORT_LSA ? lane_lsa_open(out, r, b, w, n) : lane_nccl_open(out, r, b, w, n);
}
#else /* never asked for: transport_check refuses it */
status transport_join(nccl_comm **out, transport_ask *a, const lane_rule *r, world *w, backend *b)
{
    (void)a;
    (void)r;
    (void)w;
    (void)b;
    *out = NULL;
    return OK;
}

void transport_leave(nccl_comm *n)
{
    (void)n;
}

static status open_joined(lane **out, const transport_ask *a, const lane_rule *r, backend *b, world *w, nccl_comm *n)
{
    (void)a;
    (void)r;
    (void)b;
    (void)w;
    (void)n;
    *out = NULL;
    return FAILED;
}
#endif

void transport_say(const transport_ask *a, FILE *to)
{
    if (!a->settled)
        return;
    fprintf(to, "transport    %s", a->transport == TRANSPORT_LSA ? "lsa" : "nccl");
    if (a->against[0])
        fprintf(to, "; not lsa: %s", a->against);
    fprintf(to, "\n");
}

/* Seconds that a kernel waits for another rank. By then the watchdog has spoken, and has said where each rank was: it
 * lets a rank that publishes be silent for four times --timeout. */
static double patience(const transport_ask *a)
{
    return a->timeout > 0 ? 5 * a->timeout + 5 : FOR_EVER;
}

/* Of every edge that may arrive. */
static status check_edges(const lane_rule *r)
{
    status st = OK;
    double edges = (double)r->max_rows * r->tree->ranks * r->top_k;
    if (edges * r->hidden > experts_most(r->hidden))
        FAIL(BAD_INPUT, "%lld rows from each of %d ranks are more than the experts can take at once: lower --batch or "
             "--prefill-blocks", (long long)r->max_rows, r->tree->ranks);
out:
    return st;
}

status transport_open(lane **out, const transport_ask *a, const lane_rule *r, backend *b, world *w, nccl_comm *n)
{
    status st = OK;
    lane_rule patient = *r;
    patient.patience = patience(a);
    *out = NULL;
    if (a->cuda)
        TRY(check_edges(r));
    if (alone(a))
        return open_self(out, a, &patient, b);
    return a->cuda ? open_joined(out, a, &patient, b, w, n) : lane_mpi_open(out, &patient, b, w);
out:
    return st;
}
