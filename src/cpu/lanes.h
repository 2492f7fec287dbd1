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
    float r = x - n * 0.693359375f; /* ln2 in two parts: n times the first is exact */
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

static inline float lane_max(const float *x, int64_t n)
{
    float lane[LANES];
    for (int i = 0; i < LANES; i++)
        lane[i] = -INFINITY;
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES)
        for (int i = 0; i < LANES; i++)
            lane[i] = x[k + i] > lane[i] ? x[k + i] : lane[i];
    for (int i = 0; k < n; i++, k++)
        lane[i] = x[k] > lane[i] ? x[k] : lane[i];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lane[i] = lane[i + half] > lane[i] ? lane[i + half] : lane[i];
    return lane[0];
}

static inline float lane_squares(const float *x, int64_t n)
{
    float lane[LANES] = {0};
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES)
        for (int i = 0; i < LANES; i++)
            lane[i] += x[k + i] * x[k + i];
    for (int i = 0; k < n; i++, k++)
        lane[i] += x[k] * x[k];
    return lane_fold(lane);
}

/* x[i] = e^(x[i] - shift); their sum. */
static inline float lane_softmax(float *x, int64_t n, float shift)
{
    float lane[LANES] = {0};
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES)
        for (int i = 0; i < LANES; i++) {
            x[k + i] = lane_exp(x[k + i] - shift);
            lane[i] += x[k + i];
        }
    for (int i = 0; k < n; i++, k++) {
        x[k] = lane_exp(x[k] - shift);
        lane[i] += x[k];
    }
    return lane_fold(lane);
}

/* y[i] = silu(gate[i]) * up[i] */
static inline void lane_swiglu(float *restrict y, const float *restrict gate, const float *restrict up, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = gate[i] * lane_sigmoid(gate[i]) * up[i];
}

#endif
