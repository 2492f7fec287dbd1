/* One iteration: every slot of this rank on its own path, layer by layer. The executor knows the order of the ops and
 * owns what they work on; what depends on an iteration's data is decided inside the ops. */
#ifndef EPOCH_EXEC_EXECUTOR_H
#define EPOCH_EXEC_EXECUTOR_H

#include "src/backend.h"
#include "src/base/arena.h"
#include "src/base/watchdog.h"
#include "src/exec/kv.h"
#include "src/lane.h"
#include "src/model/config.h"
#include "src/model/weights.h"

typedef struct executor_rule {
    int32_t slot_count;  /* sequences in flight on this rank; may be 0 */
    int32_t max_tokens;  /* the longest sequence, prompt and answer: max_position_embeddings or less */
    int32_t page_count;  /* KV pages of block_size positions, at least one longest sequence's */
    block_rule block;
    atlas_rule atlas;
} executor_rule;

/* What one forward works on; sized once from the worst case. */
typedef struct activations {
    tensor x, h;           /* residual stream; normed, for the next sublayer [rows, H] */
    tensor qkv, attended;  /* [rows, (heads + 2 kv) hd], [rows, heads hd] */
    tensor y;              /* [rows, H]: what attention, a dense MLP or the shared expert adds to x */
    tensor gate_up, inner; /* dense layers and the shared expert */
    tensor z, ids, weights; /* [fresh, E] F32, [fresh, K] I32, [fresh, K] F32 */
    tensor x_fresh, y_fresh; /* [fresh, H], F32 [fresh, H]; x_fresh is h itself where every row is always fresh */
    tensor n_live, best;     /* [live, H]: of the last norm; head_best [live] */
} activations;

typedef struct executor {
    executor_rule rule;
    const model_config *config;
    const weights *weights;
    backend *backend;
    lane *lane;
    void *record;          /* the backend's, of a forward, where the lane may be recorded */
    int spoiled;           /* a slot whose activations a test makes no numbers; -1, as opened: none */
    heartbeat *heart;      /* beats with every phase of a layer; NULL, as opened: nobody listens */
    struct observer *observer; /* sees every sparse layer's routed outputs (exec/observe.h); NULL, as opened: nobody */
    attention_rule attention;
    route_rule route;
    slots slots;
    plans plans;
    batch batch;
    kv_pool kv;
    tensor decoded_cache;  /* [sparse layers * slot_count * B, H] */
    activations a;
    page_table pages;      /* which KV pages are free */
    arena pool, slot, iteration; /* by clock: KV; slots, plans and caches; activations */
} executor;

/* Most rows one forward can have: every slot with a sealed and an active block, and the prefill budget. */
int64_t executor_max_rows(const executor_rule *r);

/* Bytes of the three arenas for these settings, without taking any: KV, slots, activations. */
typedef struct executor_sizes {
    size_t kv, slots, iteration;
} executor_sizes;
executor_sizes executor_measure(const executor_rule *r, const model_config *c, dtype activation);

/* Borrows all it is given. FAILED: no memory, naming the arena and the flag that shrinks it. close accepts NULL. */
status executor_open(executor **out, const executor_rule *r, const model_config *c, const weights *w, backend *b,
                     lane *l);
void executor_close(executor *x);
/* The exact dense executor in the shadow of another: every row fresh, all experts. Slots, plans and activations are its
 * own, and whoever drives it fills the slots before each forward (exec/audit.h); never admit to it. Weights, backend,
 * lane, KV pool and page lists are those of `of`, which must outlive it. FAILED: no memory. */
status executor_open_shadow(executor **out, const executor *of);

/* Can a sequence of `end` positions be admitted now (are there KV pages)? */
bool executor_has_room(const executor *x, int32_t end);
/* Puts a sequence into an idle slot: prompt [prompt_tokens], answered up to position `end` (exclusive). */
status executor_admit(executor *x, int index, const int32_t *prompt, int32_t prompt_tokens, int32_t end);
/* The sequence of that slot is over; its pages are free. */
void executor_release(executor *x, int index);

/* Enqueues one forward over all slots. The lane's pulse is set before. */
status executor_forward(executor *x);
/* What each slot did in the newest forward [slot_count]; waits for it. */
status executor_reports(executor *x, slot_report *out);
/* The same in two halves: posted behind that forward into a box of the backend, and read when another one is under way.
 */
status executor_post(executor *x, int box);
status executor_fetch(executor *x, slot_report *out, int box);

/* What was enqueued since the last mark was this phase's; layer -1: of no layer. */
status executor_mark(executor *x, int layer, phase p);

/* The parts of a forward, in order: begin, the halves of each layer (attention.c, moe.c; `sparse` counts sparse layers
 * from 0), end. A half finds its input in a.h, and leaves there what the next one reads. */
status executor_begin(executor *x);
status attention_layer(executor *x, int layer);
status dense_layer(executor *x, int layer);
status moe_layer(executor *x, int layer, int sparse);
status executor_end(executor *x);

/* The end of a sublayer, whose `done` is through by then; norm: the next one's. Nothing is packed. */
residual executor_residual(const executor *x, const tensor *norm, int layer, phase done);
/* The norm that follows a layer: the next one's, or the last. */
const tensor *executor_norm_after(const executor *x, int layer);

#endif
