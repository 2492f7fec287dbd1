/* Which transport carries a job's rows, and its opening: what `epoch run` and `epoch bench` have in common. */
#ifndef EPOCH_TRANSPORT_H
#define EPOCH_TRANSPORT_H

#include "src/lane.h"

#include <stdbool.h>
#include <stdio.h>

typedef struct transport_ask {
    int transport; /* TRANSPORT_AUTO and so on, of options.h */
    dtype combine; /* of partial sums between GPUs: F32 or BF16 */
    bool cuda;
    int ranks;
    bool joins;      /* this program can join GPUs: transport_joins */
    double deadline; /* seconds: --connect-timeout */
    double timeout;  /* seconds: --timeout; 0: for ever */
    bool settled;    /* transport was auto until transport_join chose between GPUs */
    char against[512]; /* rank 0: what was against lsa then; "": nothing */
} transport_ask;

/* Was the program built with NCCL? */
bool transport_joins(void);

/* BAD_INPUT where what is asked for does not go together; judged without any device. */
status transport_check(const transport_ask *a);

/* Has every rank a GPU of its own? bus: PCI bus id of the one this rank would take, "" for none. The same answer on
 * every rank; collective. FAILED: no memory, or MPI. */
status transport_gpus(bool *out, world *w, const char *bus);

/* Collective: joins the GPUs where the transport needs it. *out is NULL where it does not. auto between GPUs becomes lsa
 * where they all reach each other's memory, else nccl; of r tree, hidden, top_k and payload count. Errors as
 * nccl_open's; FAILED as lane_lsa_try's. */
status transport_join(nccl_comm **out, transport_ask *a, const lane_rule *r, world *w, backend *b);
/* What auto has chosen between GPUs and, where that is not lsa, why; a line, at rank 0. Nothing where it had no choice. */
void transport_say(const transport_ask *a, FILE *to);
/* The lane; n as transport_join left it; r->patience follows a->timeout. Collective where GPUs are joined. BAD_INPUT:
 * more rows than a GPU's experts can take at once (the same on every rank); else errors as those of its opening
 * (lane.h). */
status transport_open(lane **out, const transport_ask *a, const lane_rule *r, backend *b, world *w, nccl_comm *n);
/* Behind the lane's close; accepts NULL. */
void transport_leave(nccl_comm *n);

#endif
