/* The settings of `epoch run`. One table holds flag, default, unit and help; it parses, prints --help, and is stored in
 * the results. A bad value is refused, never replaced by a default. */
#ifndef EPOCH_OPTIONS_H
#define EPOCH_OPTIONS_H

#include "src/base/status.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum { OPTIONS_DATA = 64 };

typedef struct options {
    const char *model, *out;
    const char *data[OPTIONS_DATA];
    int32_t data_count;
    const char *prompt_field, *template_file, *shots;
    int64_t limit;
    int32_t device, mode, placement, transport, combine, weights, progress; /* an index into the flag's choices */
    int32_t batch, batch_per_rank, threads;
    const char *cohort;
    double threshold;
    int32_t max_steps, gen_len, block_size, prefill_blocks;
    int64_t kv_tokens;
    int32_t mask_id, eos_id;
    int32_t refresh, update;
    int32_t atlas_extra, atlas_budget, atlas_step;
    double atlas_coverage, atlas_share, atlas_mass;
    int32_t resume;
    bool strict, trace, audit, observe, dry_run;
    double commit_every, publish_every, time_budget, lock_wait, timeout, connect_timeout;
    const char *stop_file, *gpu_memory;
} options;

enum { DEVICE_AUTO, DEVICE_CPU, DEVICE_CUDA };
enum { MODE_EPOCH, MODE_FULL, MODE_NO_ATLAS, MODE_NO_LSP, MODE_NO_LANE };
enum { PLACEMENT_DP, PLACEMENT_TP };
enum { TRANSPORT_AUTO, TRANSPORT_SELF, TRANSPORT_MPI, TRANSPORT_NCCL, TRANSPORT_LSA };
enum { COMBINE_FP32, COMBINE_BF16 };
enum { WEIGHTS_AUTO, WEIGHTS_STORED, WEIGHTS_F32 };
enum { PROGRESS_AUTO, PROGRESS_BAR, PROGRESS_LINES, PROGRESS_OFF };
enum { RESUME_NO, RESUME_YES, RESUME_CHANGED };

/* argv behind the command's name. *help: --help was asked for, nothing else is set. Texts are borrowed from argv. */
status options_parse(options *out, bool *help, int argc, char **argv);
void options_help(FILE *to);
/* Every flag's value by name, as JSON. Owned by the caller. */
json_t *options_json(const options *o);

#endif
