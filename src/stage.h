/* What a run stands on: checkpoint, tokenizer, rules, backend, lane and executor of this rank. */
#ifndef EPOCH_STAGE_H
#define EPOCH_STAGE_H

#include "src/exec/executor.h"
#include "src/lane.h"
#include "src/model/chat.h"
#include "src/model/tokenizer.h"
#include "src/options.h"
#include "src/plan/plan.h"
#include "src/plan/scheduler.h"
#include "src/transport.h"
#include "src/world.h"

#include <jansson.h>

typedef struct stage {
    const options *options;
    world *world;
    heartbeat *heart;               /* set before stage_load; NULL: nobody listens */
    model_config config;
    tokenizer *tokenizer;
    chat_template *chat;
    uint64_t checkpoint_hash;
    int32_t slot_count, most_slots; /* of this rank, and of the rank that has most */
    bool cuda;                      /* what computes: the CUDA backend, or the CPU */
    executor_rule rule;
    weight_rule weight_rule;
    sum_tree *tree;
    backend *backend;
    weights *weights;
    transport_ask way;
    nccl_comm *joined;              /* the ranks' GPUs; NULL: none, or not joined */
    lane *lane;
    executor *executor;
} stage;

/* Reads and checks everything that is cheap: config, headers, tokenizer, chat form, ids, rules, the deal of experts.
 * BAD_INPUT. Collective. The stage borrows options and world; stage_close in any case. */
status stage_check(stage *s, const options *o, world *w);
/* Opens the backend; errors as backend_cpu_open's and backend_cuda_open's. */
status stage_device(stage *s);
/* Joins the ranks' GPUs where there are several; collective, so every rank must have its device. Errors as nccl_open's.
 */
status stage_join(stage *s);
/* Takes memory for this rank's weights and loads them. BAD_INPUT: the job does not fit into the device. FAILED: no
 * memory, or a weight file cannot be read. */
status stage_load(stage *s);
/* Opens lane and executor; collective too. Errors as transport_open's and executor_open's. */
status stage_connect(stage *s);
void stage_close(stage *s);

/* --dry-run: shards and memory of every rank, as text. */
void stage_print(const stage *s, FILE *to);
/* Settings that decide the outputs, the model and where it runs: attributes of the results. Owned by the caller. */
json_t *stage_json(const stage *s);

#endif
