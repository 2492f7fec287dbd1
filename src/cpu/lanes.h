/* Sums, maxima and exponentials along one row, in an order that depends on its width alone: 16 lanes, folded in halves.
 * Written so that a compiler turns the inner loops into vector instructions without being allowed to reorder. */
#ifndef EPOCH_CPU_LANES_H
#define EPOCH_CPU_LANES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 16 };

/* e^x in fp32: 2^n times the Taylor sum of e^r to r^7, |r| <= ln2 / 2. Relative error below 2e-7. x is clamped to
 * [-87, 88], so the smallest result is 1.6e-38, never 0. NaN gives NaN. */
static inline float lane_exp(float x)
{
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* to the nearest integer */
    float r = x - n * 0.693359375f;                          /* ln2 in two parts: n times the first is exact */
    r = r + n * 2.12194440e-4f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    /* n as an integer lies in the low bits of n + 1.5 * 2^23: no conversion, so that NaN stays defined */
    float shifted = n + 12582912.0f, power;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127) << 23;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

static inline float lane_sigmoid(float x)
{
    return 1.0f / (1.0f + lane_exp(-x));
}

static inline float lane_fold(float *lane)
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] += lane[i + half];
    return lane[0];
}

static inline float lane_squares(const float *x, int64_t n)
{
    float lane[LANES] = {0};
    int64_t whole = n - n % LANES;
    for (int64_t k = 0; k < whole; k += LANES)
        for (int i = 0; i < LANES; i++)
            lane[i] += x[k + i] * x[k + i];
    for (int64_t k = whole; k < n; k++)
        lane[k - whole] += x[k] * x[k];
    return lane_fold(lane);
}

/* The sum of e^(x[i] - shift). */
static inline float lane_exp_sum(const float *x, int64_t n, float shift)
{
    float lane[LANES] = {0};
    int64_t whole = n - n % LANES;
    for (int64_t k = 0; k < whole; k += LANES)
        for (int i = 0; i < LANES; i++)
            lane[i] += lane_exp(x[k + i] - shift);
    for (int64_t k = whole; k < n; k++)
        lane[k - whole] += lane_exp(x[k] - shift);
    return lane_fold(lane);
}

/* Takes x among the two largest numbers so far. */
static inline void lane_rank(float *top, float *second, float x)
{
    float less = *top < x ? *top : x; /* a NaN is no rank */
    *second = less > *second ? less : *second;
    *top = x > *top ? x : *top;
}

/* The two largest of x[0..n), equal ones counted twice; -inf where there are none. */
static inline void lane_top(float *top, float *second, const float *x, int64_t n)
{
    float first[LANES], next[LANES];
    int64_t whole = n - n % LANES;
    for (int i = 0; i < LANES; i++)
        first[i] = next[i] = -INFINITY;
    for (int64_t k = 0; k < whole; k += LANES)
        for (int i = 0; i < LANES; i++)
            lane_rank(&first[i], &next[i], x[k + i]);
    for (int64_t k = whole; k < n; k++)
        lane_rank(&first[k - whole], &next[k - whole], x[k]);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) {
            next[i] = next[i + half] > next[i] ? next[i + half] : next[i];
            lane_rank(&first[i], &next[i], first[i + half]);
        }
    *top = first[0];
    *second = next[0];
}

/* y[i] = silu(gate[i]) * up[i] */
static inline void lane_swiglu(float *restrict y, const float *restrict gate, const float *restrict up, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = gate[i] * lane_sigmoid(gate[i]) * up[i];
}

#endif
