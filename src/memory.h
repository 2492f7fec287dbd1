/* `epoch model DIR`: what a checkpoint holds, and the memory plan of a job on it, computed from config.json alone by
 * the same layouts that a run takes its memory with. */
#ifndef EPOCH_MEMORY_H
#define EPOCH_MEMORY_H

#include "src/base/sum_tree.h"
#include "src/exec/executor.h"
#include "src/model/config.h"

typedef struct memory_way { /* how a job lies on its ranks */
    const sum_tree *tree;
    dtype matrices, activation; /* activation BF16: on GPUs */
    int transport;              /* of options.h; auto between GPUs: the one that takes more */
} memory_way;

typedef struct memory_ask {
    int32_t ranks;
    int transport;         /* as in memory_way */
    int32_t batch;         /* sequences over the whole job */
    int32_t context;       /* positions of a sequence that the KV pool has room for, on average */
    int32_t prefill_blocks;
    dtype matrices, activation;
    double device_bytes;   /* memory of one rank's device */
} memory_ask;

typedef struct memory_plan { /* bytes of the rank that holds most */
    double weights, experts; /* experts: the routed ones among the weights */
    double kv, slots, activations;
    double lane;           /* rows of all ranks arriving at once, and their partial sums back */
    double scratch;        /* a GPU's: of the op that wants most */
    double fixed;          /* a GPU's: context, kernels, libraries */
    double joined;         /* NCCL's own buffers, where it joins the GPUs */
    double total;
} memory_plan;

/* What rank 0, which has most, takes for these settings. */
void memory_of(memory_plan *out, const model_config *c, const executor_rule *r, const memory_way *way);
/* Does it fit into so many bytes? BAD_INPUT with the items and the flags that make them smaller. */
status memory_fits(const memory_plan *p, double bytes);

/* "80G", "141e9", "512M": bytes, a million at least. BAD_INPUT names the flag. */
status memory_bytes(double *out, const char *flag, const char *text);

/* The plan for one job. BAD_INPUT: more ranks than experts. */
status memory_measure(memory_plan *out, const model_config *c, const memory_ask *o);
/* The largest batch (a multiple of ranks) whose plan fits o->device_bytes; 0: not even one sequence a rank. */
status memory_largest_batch(int32_t *out, const model_config *c, const memory_ask *o);

/* The command; argv[0] is its name. */
status model_command(int argc, char **argv);

#endif
