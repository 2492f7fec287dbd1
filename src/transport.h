/* Which transport carries a job's rows, and its opening: what `epoch run` and `epoch bench` have in common. */
#ifndef EPOCH_TRANSPORT_H
#define EPOCH_TRANSPORT_H

#include "src/lane.h"

#include <stdbool.h>

typedef struct transport_ask {
    int transport; /* TRANSPORT_AUTO and so on, of options.h */
    dtype combine; /* of partial sums between GPUs: F32 or BF16 */
    bool cuda;
    int ranks;
    bool joins;      /* this program can join GPUs: transport_joins */
    double deadline; /* seconds: --connect-timeout */
} transport_ask;

/* Was the program built with NCCL? */
bool transport_joins(void);

/* BAD_INPUT where what is asked for does not go together; judged without any device. */
status transport_check(const transport_ask *a);

/* Has every rank a GPU of its own? bus: PCI bus id of the one this rank would take, "" for none. The same answer on
 * every rank; collective. FAILED: no memory, or MPI. */
status transport_gpus(bool *out, world *w, const char *bus);

/* Collective: joins the GPUs where the transport needs it. *out is NULL where it does not. Errors as nccl_open's. */
status transport_join(nccl_comm **out, const transport_ask *a, world *w, backend *b);
/* The lane; n as transport_join left it. Collective where GPUs are joined. BAD_INPUT: more rows than a GPU's experts
 * can take at once (the same on every rank); else errors as those of its opening (lane.h). */
status transport_open(lane **out, const transport_ask *a, const lane_rule *r, backend *b, world *w, nccl_comm *n);
/* Behind the lane's close; accepts NULL. */
void transport_leave(nccl_comm *n);

#endif
