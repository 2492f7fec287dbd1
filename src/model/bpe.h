/* The "model" part of tokenizer.json: a vocabulary over the 256 bytes and the ranked merges that build it.
 * A word becomes its bytes; then, as long as two neighbours form a merge, the one of lowest rank (the leftmost of
 * equals) is joined. Every byte must have a token, so that any text can be written and read back. */
#ifndef EPOCH_MODEL_BPE_H
#define EPOCH_MODEL_BPE_H

#include "src/base/json.h"
#include "src/model/tokenizer.h"

typedef struct bpe bpe;

/* Reads {"type": "BPE", "vocab", "merges", ...}; `where` names the file in messages. BAD_INPUT: what is not supported,
 * a byte without a token, a merge whose parts or result the vocabulary lacks. Owned by the caller; close takes NULL. */
status bpe_open(bpe **out, const json_t *model, const char *where);
void bpe_close(bpe *b);

int32_t bpe_vocab(const bpe *b); /* one past the largest id */

/* The bytes of token `id`, their number in *bytes; 0 bytes where no token has that id. Borrowed from b. */
const char *bpe_token(const bpe *b, int32_t id, size_t *bytes);

/* Keeps words from becoming token `id` as a whole (ignore_merges). False: a merge or a single byte makes it anyway. */
bool bpe_hide(bpe *b, int32_t id);

/* Working memory of bpe_encode; start from zero, reuse for any number of words. */
typedef struct bpe_scratch {
    int32_t *id, *next, *before; /* [room] the word as a linked list of tokens; id -1: joined to its left neighbour */
    uint64_t *heap;              /* [2 room] merges that were possible when noted: rank << 32 | place */
    size_t room;
} bpe_scratch;

void bpe_scratch_close(bpe_scratch *s);

/* Appends the ids of one word, in time bytes * log(bytes). FAILED: no memory, or a word of 2^30 bytes or more. */
status bpe_encode(const bpe *b, bpe_scratch *s, token_list *out, const char *word, size_t bytes);

#endif
