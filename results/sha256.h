/* SHA-256 (FIPS 180-4) as text: lm-evaluation-harness names documents, prompts and targets by it. */
#ifndef EPOCH_RESULTS_SHA256_H
#define EPOCH_RESULTS_SHA256_H

#include <stddef.h>

/* 64 hexadecimal digits and a NUL. */
void sha256_hex(char out[65], const void *bytes, size_t count);

#endif
