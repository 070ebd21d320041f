/* The fused kernels, in one precision for one CPU level.
 *
 * Compiled once for each pair of LEVEL (a suffix) and REAL (float or double).  Sums run over a fixed number of lanes
 * that are added in a fixed tree, whatever the width of the vectors: the order is part of the result, and a compiler
 * that may not reorder floating-point sums can still use vectors.
 */
#include <float.h>
#include <math.h>
#include <string.h>
#include "numerics.h"
#include "table.h"

#if REAL_IS_FLOAT
#define PRECISION float
#define MT_SQRT sqrtf
#define MT_FMA __builtin_fmaf
#define MT_LOG logf
#define REAL_LOWEST (-FLT_MAX)
#else
#define PRECISION double
#define MT_SQRT sqrt
#define MT_FMA __builtin_fma
#define MT_LOG log
#define REAL_LOWEST (-DBL_MAX)
#endif

#ifdef __FMA__
#define MT_MULADD(a, b, c) MT_FMA(a, b, c)
#else /* a call of the library */
#define MT_MULADD(a, b, c) ((a) * (b) + (c))
#endif

#define LANES 16
#define RESTRICT restrict

enum { GROUP = 64 }; /* rows that are summed before the sum is added to the whole: rounding grows with its root */

static inline REAL lanes_sum(const REAL *lane) {
    REAL s[8];
    for (int i = 0; i < 8; i++) s[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; i++) s[i] += s[i + 4];
    return (s[0] + s[2]) + (s[1] + s[3]);
}

/* ----------------------------------------------------------------------------------------- GELU, residual, dropout */

#define GELU_ROWS(FORMULA)                                                                 \
    for (len i = 0; i < rows; i++, x += width, y += width, slope += width) {               \
        if (bias)                                                                          \
            for (len j = 0; j < width; j++) y[j] = FORMULA(x[j] + bias[j], &slope[j]);     \
        else                                                                               \
            for (len j = 0; j < width; j++) y[j] = FORMULA(x[j], &slope[j]);               \
    }

static void gelu(int exact, const void *x_, const void *bias_, void *y_, void *slope_, len rows, len width) {
    const REAL *RESTRICT x = x_, *RESTRICT bias = bias_;
    REAL *RESTRICT y = y_, *RESTRICT slope = slope_;
    if (exact) {
        GELU_ROWS(mt_gelu_erf)
    } else {
        GELU_ROWS(mt_gelu_tanh)
    }
}

/* Sums over rows are made in groups, and rows may come in blocks: those from `first` on of `all` rows.  The groups are
 * those of all rows, so the sums do not depend on the blocks. */
static inline void begin_group(REAL *sum, REAL *group, len row, len width) {
    if (row == 0)
        for (len j = 0; j < width; j++) sum[j] = REAL_C(0.0);
    if (row % GROUP == 0)
        for (len j = 0; j < width; j++) group[j] = REAL_C(0.0);
}

static inline void end_group(REAL *sum, const REAL *group, len row, len all, len width) {
    if ((row + 1) % GROUP == 0 || row + 1 == all)
        for (len j = 0; j < width; j++) sum[j] += group[j];
}

static void add_row(const REAL *RESTRICT x, REAL *RESTRICT sum, len width) {
    for (len j = 0; j < width; j++) sum[j] += x[j];
}

static void sum_rows(const void *x_, void *sum_, void *group, len first, len rows, len all, len width) {
    const REAL *x = x_;
    if (!all) begin_group(sum_, group, 0, width);
    for (len i = first; i < first + rows; i++, x += width) {
        begin_group(sum_, group, i, width);
        add_row(x, group, width);
        end_group(sum_, group, i, all, width);
    }
}

/* dx = grad slope, and db its sum over the rows unless that is NULL. */
static void product_row(const REAL *RESTRICT grad, const REAL *RESTRICT slope, REAL *RESTRICT dx, REAL *RESTRICT sum,
                        len width) {
    for (len j = 0; j < width; j++) {
        dx[j] = grad[j] * slope[j];
        sum[j] += dx[j];
    }
}

static void gelu_backward(const void *grad_, const void *slope_, void *dx_, void *db, void *group, len first, len rows,
                          len all, len width) {
    const REAL *RESTRICT grad = grad_, *RESTRICT slope = slope_;
    REAL *RESTRICT dx = dx_;
    if (!db) {
        for (len i = 0; i < rows * width; i++) dx[i] = grad[i] * slope[i];
        return;
    }
    if (!all) begin_group(db, group, 0, width);
    for (len i = first; i < first + rows; i++, grad += width, slope += width, dx += width) {
        begin_group(db, group, i, width);
        product_row(grad, slope, dx, group, width);
        end_group(db, group, i, all, width);
    }
}

/* x keep_scale where the word of (row, hash of the column) reaches the threshold, else 0.  NaN is dropped like any
 * number. */
static inline REAL dropped(REAL x, mt_word row, mt_word column, uint64_t threshold, REAL keep_scale) {
    const mt_word limit = (mt_word)threshold;
    return mt_mix32(row ^ column) >= limit ? x * keep_scale : REAL_C(0.0);
}

static void dropout(const void *x_, const uint64_t *hashes, uint64_t threshold, double keep_scale, void *out_, len rows,
                    len width) {
    const REAL *RESTRICT x = x_;
    REAL *RESTRICT out = out_;
    for (len i = 0; i < rows; i++, x += width, out += width) {
        const mt_word row = mt_fold(hashes[i]);
        for (len j = 0; j < width; j++) out[j] = dropped(x[j], row, mt_column((mt_word)j), threshold, (REAL)keep_scale);
    }
}

/* x + dropout(y), with one rounding where there is an instruction for it.  Said outright: left to the compiler, the
 * body of a loop and its end would round in different ways, and ranks that hold the same numbers at other addresses too. */
static inline REAL plus_dropped(REAL x, REAL y, mt_word row, mt_word column, uint64_t threshold, REAL keep_scale) {
    const mt_word limit = (mt_word)threshold;
    return MT_MULADD(mt_mix32(row ^ column) >= limit ? y : REAL_C(0.0), keep_scale, x);
}

static void residual_row(const REAL *RESTRICT x, const REAL *RESTRICT y, const REAL *RESTRICT bias, REAL *RESTRICT out,
                         len width) {
    if (bias)
        for (len j = 0; j < width; j++) out[j] = x[j] + (y[j] + bias[j]);
    else
        for (len j = 0; j < width; j++) out[j] = x[j] + y[j];
}

static void residual_dropout_row(const REAL *RESTRICT x, const REAL *RESTRICT y, const REAL *RESTRICT bias, mt_word row,
                                 uint64_t threshold, REAL keep_scale, REAL *RESTRICT out, len width) {
    if (bias)
        for (len j = 0; j < width; j++)
            out[j] = plus_dropped(x[j], y[j] + bias[j], row, mt_column((mt_word)j), threshold, keep_scale);
    else
        for (len j = 0; j < width; j++)
            out[j] = plus_dropped(x[j], y[j], row, mt_column((mt_word)j), threshold, keep_scale);
}

/* out = x + dropout(y + bias) */
static void residual(const void *x_, const void *y_, const void *bias, const uint64_t *hashes, uint64_t threshold,
                     double keep_scale, void *out_, len rows, len width) {
    const REAL *x = x_, *y = y_;
    REAL *out = out_;
    for (len i = 0; i < rows; i++, x += width, y += width, out += width)
        if (hashes)
            residual_dropout_row(x, y, bias, mt_fold(hashes[i]), threshold, (REAL)keep_scale, out, width);
        else
            residual_row(x, y, bias, out, width);
}

/* ------------------------------------------------------------------------------------------------------ layer norm */

/* One row: its mean less its first element (which is taken off, so that rows far from zero keep their digits), one over
 * its standard deviation, and the row normalised, scaled and shifted. */
static inline void norm_row(const REAL *RESTRICT x, const REAL *RESTRICT weight, const REAL *RESTRICT bias, REAL eps,
                            REAL *RESTRICT y, REAL *RESTRICT center, REAL *RESTRICT rstd, len width) {
    const len whole = width - width % LANES;
    const REAL first = x[0];
    REAL sum[LANES] = {0}, square[LANES] = {0};
    for (len j = 0; j < whole; j += LANES)
        for (int l = 0; l < LANES; l++) sum[l] += x[j + l] - first;
    for (len j = whole; j < width; j++) sum[j - whole] += x[j] - first;
    const REAL mean = lanes_sum(sum) / (REAL)width;
    for (len j = 0; j < whole; j += LANES)
        for (int l = 0; l < LANES; l++) {
            const REAL z = (x[j + l] - first) - mean;
            square[l] += z * z;
        }
    for (len j = whole; j < width; j++) {
        const REAL z = (x[j] - first) - mean;
        square[j - whole] += z * z;
    }
    const REAL r = REAL_C(1.0) / MT_SQRT(lanes_sum(square) / (REAL)width + eps);
    for (len j = 0; j < width; j++) y[j] = ((x[j] - first) - mean) * r * weight[j] + bias[j];
    *center = mean;
    *rstd = r;
}

static void layer_norm(const void *x_, const void *weight, const void *bias, double eps, void *y_, void *center_,
                       void *rstd_, len rows, len width) {
    const REAL *x = x_;
    REAL *y = y_, *center = center_, *rstd = rstd_;
    for (len i = 0; i < rows; i++)
        norm_row(x + i * width, weight, bias, (REAL)eps, y + i * width, center + i, rstd + i, width);
}

/* The sum that ends a residual branch, and its norm while the row is at hand. */
static void residual_norm(const void *x_, const void *y_, const void *branch_bias, const uint64_t *hashes,
                          uint64_t threshold, double keep_scale, const void *weight, const void *bias, double eps,
                          void *sum_, void *out_, void *center_, void *rstd_, len rows, len width) {
    const REAL *x = x_, *y = y_;
    REAL *sum = sum_, *out = out_, *center = center_, *rstd = rstd_;
    for (len i = 0; i < rows; i++) {
        const len at = i * width;
        residual(x + at, y + at, branch_bias, hashes ? hashes + i : NULL, threshold, keep_scale, sum + at, 1, width);
        norm_row(sum + at, weight, bias, (REAL)eps, out + at, center + i, rstd + i, width);
    }
}

/* One row of the gradients: dx, and what it adds to dw and db. */
static void norm_row_backward(const REAL *RESTRICT grad, const REAL *RESTRICT x, const REAL *RESTRICT weight,
                              REAL first, REAL mean, REAL r, REAL mean_h, REAL mean_hn, REAL *RESTRICT dx,
                              REAL *RESTRICT dw, REAL *RESTRICT db, len width) {
    for (len j = 0; j < width; j++) {
        const REAL g = grad[j], n = ((x[j] - first) - mean) * r;
        dx[j] = (g * weight[j] - mean_h - n * mean_hn) * r;
        dw[j] += g * n;
        db[j] += g;
    }
}

/* dx = rstd (h - mean(h) - n mean(h n)) + extra with n the normalised row and h = grad weight; dw = sum of grad n,
 * db = sum of grad. */
static void layer_norm_backward(const void *grad_, const void *extra_, const void *x_, const void *center_,
                                const void *rstd_, const void *weight_, void *dx_, void *dw, void *db, void *groups,
                                len from, len rows, len all, len width) {
    const REAL *RESTRICT grad = grad_, *RESTRICT extra = extra_, *RESTRICT x = x_;
    const REAL *RESTRICT center = center_, *RESTRICT rstd = rstd_, *RESTRICT weight = weight_;
    REAL *RESTRICT dx = dx_, *RESTRICT group_w = groups, *RESTRICT group_b = group_w + width;
    const len whole = width - width % LANES;
    if (!all) begin_group(dw, group_w, 0, width), begin_group(db, group_b, 0, width);
    for (len i = 0; i < rows; i++, x += width, grad += width, dx += width) {
        begin_group(dw, group_w, from + i, width), begin_group(db, group_b, from + i, width);
        const REAL first = x[0], mean = center[i], r = rstd[i];
        REAL sum_h[LANES] = {0}, sum_hn[LANES] = {0};
        for (len j = 0; j < whole; j += LANES)
            for (int l = 0; l < LANES; l++) {
                const REAL h = grad[j + l] * weight[j + l];
                sum_h[l] += h;
                sum_hn[l] += h * (((x[j + l] - first) - mean) * r);
            }
        for (len j = whole; j < width; j++) {
            const REAL h = grad[j] * weight[j];
            sum_h[j - whole] += h;
            sum_hn[j - whole] += h * (((x[j] - first) - mean) * r);
        }
        const REAL mean_h = lanes_sum(sum_h) / (REAL)width, mean_hn = lanes_sum(sum_hn) / (REAL)width;
        norm_row_backward(grad, x, weight, first, mean, r, mean_h, mean_hn, dx, group_w, group_b, width);
        if (extra) {
            for (len j = 0; j < width; j++) dx[j] += extra[j];
            extra += width;
        }
        end_group(dw, group_w, from + i, all, width), end_group(db, group_b, from + i, all, width);
    }
}

/* -------------------------------------------------------------------------------------------- softmax and its loss */

static inline REAL row_max(const REAL *x, len width) {
    REAL lane[LANES], highest;
    const len whole = width - width % LANES;
    for (int l = 0; l < LANES; l++) lane[l] = -(REAL)INFINITY;
    for (len j = 0; j < whole; j += LANES)
        for (int l = 0; l < LANES; l++) lane[l] = x[j + l] > lane[l] ? x[j + l] : lane[l];
    for (len j = whole; j < width; j++) lane[j - whole] = x[j] > lane[j - whole] ? x[j] : lane[j - whole];
    highest = lane[0];
    for (int l = 1; l < LANES; l++) highest = lane[l] > highest ? lane[l] : highest;
    return highest; /* NaN is passed over here: it comes out of the sum of exponentials */
}

/* The sum of exp(x - highest) over a row, which is written to y unless that is NULL. */
static inline REAL row_exp(const REAL *RESTRICT x, REAL highest, REAL *RESTRICT y, len width) {
    REAL lane[LANES] = {0};
    const len whole = width - width % LANES;
    if (y) {
        for (len j = 0; j < width; j++) y[j] = mt_exp(x[j] - highest);
        for (len j = 0; j < whole; j += LANES)
            for (int l = 0; l < LANES; l++) lane[l] += y[j + l];
        for (len j = whole; j < width; j++) lane[j - whole] += y[j];
    } else {
        for (len j = 0; j < whole; j += LANES)
            for (int l = 0; l < LANES; l++) lane[l] += mt_exp(x[j + l] - highest);
        for (len j = whole; j < width; j++) lane[j - whole] += mt_exp(x[j] - highest);
    }
    return lanes_sum(lane);
}

static void softmax(const void *x_, void *y_, len rows, len width) {
    const REAL *RESTRICT x = x_;
    REAL *RESTRICT y = y_;
    for (len i = 0; i < rows; i++, x += width, y += width) {
        REAL highest = row_max(x, width);
        if (highest == -(REAL)INFINITY) highest = REAL_C(0.0); /* a row of -inf: exp gives 0 everywhere, as it should */
        REAL total = row_exp(x, highest, y, width);
        total = total < REAL_C(1.0) ? REAL_C(1.0) : total; /* the largest element contributes 1, unless there is none */
        for (len j = 0; j < width; j++) y[j] /= total;
    }
}

static void softmax_backward(const void *grad_, const void *y_, void *dx_, len rows, len width) {
    const REAL *RESTRICT grad = grad_, *RESTRICT y = y_;
    REAL *RESTRICT dx = dx_;
    const len whole = width - width % LANES;
    for (len i = 0; i < rows; i++, grad += width, y += width, dx += width) {
        REAL lane[LANES] = {0};
        for (len j = 0; j < whole; j += LANES)
            for (int l = 0; l < LANES; l++) lane[l] += grad[j + l] * y[j + l];
        for (len j = whole; j < width; j++) lane[j - whole] += grad[j] * y[j];
        const REAL total = lanes_sum(lane);
        for (len j = 0; j < width; j++) dx[j] = y[j] * (grad[j] - total);
    }
}

/* A target below 0 that is not `ignore` counts, but its logit is held elsewhere: nothing is subtracted for it. */
static double cross_entropy(const void *logits_, const int64_t *targets, int64_t ignore, void *lse_, len rows,
                            len width) {
    const REAL *RESTRICT logits = logits_;
    REAL *RESTRICT lse = lse_;
    double loss = 0.0;
    for (len i = 0; i < rows; i++, logits += width) {
        REAL highest = row_max(logits, width);
        highest = highest < REAL_LOWEST ? REAL_LOWEST : highest; /* a row of -inf: exp gives 0 everywhere */
        REAL total = row_exp(logits, highest, NULL, width);
        total = total < REAL_C(1.0) ? REAL_C(1.0) : total; /* the largest element contributes 1, unless there is none */
        lse[i] = MT_LOG(total) + highest;
        if (targets[i] != ignore) loss += (double)(targets[i] < 0 ? lse[i] : lse[i] - logits[targets[i]]);
    }
    return loss;
}

static void cross_entropy_backward(double grad, const void *logits_, const int64_t *targets, const void *lse_,
                                   int64_t ignore, void *out_, len rows, len width) {
    const REAL *RESTRICT logits = logits_, *RESTRICT lse = lse_;
    REAL *RESTRICT out = out_;
    const REAL scale = (REAL)grad;
    for (len i = 0; i < rows; i++, logits += width, out += width) {
        if (targets[i] == ignore) {
            for (len j = 0; j < width; j++) out[j] = REAL_C(0.0);
            continue;
        }
        const REAL l = lse[i];
        for (len j = 0; j < width; j++) out[j] = mt_exp(logits[j] - l) * scale;
        if (targets[i] >= 0) out[targets[i]] = (mt_exp(logits[targets[i]] - l) - REAL_C(1.0)) * scale;
    }
}

/* --------------------------------------------------------------------------------------------------------- experts */

/* Row `at` of an array that is read; of halves its numbers, in spare row `which`. */
static inline const REAL *picked(const mt_rows *kind, const void *x, len at, int which, len width) {
    if (!kind->widen) return (const REAL *)x + at * width;
    float *spare = kind->spare + which * width;
    kind->widen((const uint16_t *)x + at * width, spare, width);
    return (const REAL *)(void *)spare; /* halves come to the table of floats only */
}

static void scaled_row(const REAL *RESTRICT x, REAL scale, REAL *RESTRICT y, len width) {
    for (len j = 0; j < width; j++) y[j] = scale * x[j];
}

/* With one rounding where there is an instruction for it, said outright as in plus_dropped. */
static void add_scaled_row(const REAL *RESTRICT x, REAL scale, REAL *RESTRICT y, len width) {
    for (len j = 0; j < width; j++) y[j] = MT_MULADD(scale, x[j], y[j]);
}

static REAL dot_row(const REAL *RESTRICT x, const REAL *RESTRICT y, len width) {
    REAL lane[LANES] = {0};
    const len whole = width - width % LANES;
    for (len j = 0; j < whole; j += LANES)
        for (int l = 0; l < LANES; l++) lane[l] += x[j + l] * y[j + l];
    for (len j = whole; j < width; j++) lane[j - whole] += x[j] * y[j];
    return lanes_sum(lane);
}

/* y[i] = sum over j of gates[i, j] out[places[i, j]]; a place below 0 adds nothing. */
static void combine(mt_rows kind, const void *out, const void *gates_, const int64_t *places, void *y_, len rows,
                    len choices, len width) {
    const REAL *gates = gates_;
    for (len i = 0; i < rows; i++, gates += choices, places += choices) {
        REAL *y = kind.widen ? (REAL *)(void *)(kind.spare + width) : (REAL *)y_ + i * width;
        int terms = 0;
        for (len j = 0; j < choices; j++) {
            if (places[j] < 0) continue;
            const REAL *row = picked(&kind, out, places[j], 0, width);
            if (terms++)
                add_scaled_row(row, gates[j], y, width);
            else
                scaled_row(row, gates[j], y, width);
        }
        if (!terms)
            for (len j = 0; j < width; j++) y[j] = REAL_C(0.0);
        if (kind.widen) kind.narrow(kind.spare + width, (uint16_t *)y_ + i * width, width);
    }
}

/* d_out[places[i, j]] = gates[i, j] grad[i], other rows are left as they are; d_gates[i, j] = <grad[i], out[...]>. */
static void combine_backward(mt_rows kind, const void *grad_, const void *out, const void *gates_,
                             const int64_t *places, void *d_out, void *d_gates_, len rows, len choices, len width) {
    const REAL *gates = gates_;
    REAL *d_gates = d_gates_;
    for (len i = 0; i < rows; i++, gates += choices, d_gates += choices, places += choices) {
        const REAL *grad = picked(&kind, grad_, i, 0, width);
        for (len j = 0; j < choices; j++) {
            const len place = (len)places[j];
            if (place < 0) {
                d_gates[j] = REAL_C(0.0);
                continue;
            }
            d_gates[j] = dot_row(grad, picked(&kind, out, place, 1, width), width);
            if (kind.widen) {
                scaled_row(grad, gates[j], (REAL *)(void *)(kind.spare + width), width);
                kind.narrow(kind.spare + width, (uint16_t *)d_out + place * width, width);
            } else {
                scaled_row(grad, gates[j], (REAL *)d_out + place * width, width);
            }
        }
    }
}

static void jitter(const void *x_, const uint64_t *hashes, double amount, void *out_, len rows, len width) {
    const REAL *RESTRICT x = x_;
    REAL *RESTRICT out = out_;
    for (len i = 0; i < rows; i++, x += width, out += width) {
        const mt_word row = mt_fold(hashes[i]);
        for (len j = 0; j < width; j++) out[j] = x[j] * mt_near_one(mt_mix32(row ^ mt_column((mt_word)j)), (REAL)amount);
    }
}

/* ----------------------------------------------------------------------------------------- embedding and optimizer */

static void row_sum(const int64_t *ids, const void *rows_, void *out_, len count, len width) {
    const REAL *RESTRICT rows = rows_;
    REAL *RESTRICT out = out_;
    for (len i = 0; i < count; i++, rows += width) {
        if (ids[i] < 0) continue; /* nobody's */
        REAL *RESTRICT into = out + ids[i] * width;
        for (len j = 0; j < width; j++) into[j] += rows[j];
    }
}

static void adamw(void *p_, const void *g_, void *m_, void *v_, len count, const double *n) {
    REAL *RESTRICT p = p_, *RESTRICT m = m_, *RESTRICT v = v_;
    const REAL *RESTRICT g = g_;
    const mt_adamw_numbers c = {(REAL)n[0], (REAL)n[1], (REAL)n[2], (REAL)n[3], (REAL)n[4], (REAL)n[5], (REAL)n[6]};
    /* Buffers of one allocator begin alike, so that aligning one aligns all: a load that straddles two cache lines
     * counts double.  What comes next is fetched by hand: seven streams are more than the processor follows. */
    enum { AHEAD = 128 };
    len head = (len)((64 - (uintptr_t)p % 64) % 64 / sizeof(REAL));
    head = head < count ? head : count;
    const len stop = head + (count - head) / LANES * LANES;
    for (len i = 0; i < head; i++) MT_ADAMW(p[i], g[i], m[i], v[i], c);
    for (len i = head; i < stop; i += LANES) {
        __builtin_prefetch(p + i + AHEAD, 1);
        __builtin_prefetch(g + i + AHEAD, 0);
        __builtin_prefetch(m + i + AHEAD, 1);
        __builtin_prefetch(v + i + AHEAD, 1);
        for (len l = i; l < i + LANES; l++) MT_ADAMW(p[l], g[l], m[l], v[l], c);
    }
    for (len i = stop; i < count; i++) MT_ADAMW(p[i], g[i], m[i], v[i], c);
}

static double sum_of_squares(const void *x_, len count) {
    const REAL *RESTRICT x = x_;
    double lane[LANES] = {0}, total = 0.0;
    const len whole = count - count % LANES;
    for (len i = 0; i < whole; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] += (double)x[i + l] * (double)x[i + l];
    for (len i = whole; i < count; i++) lane[i - whole] += (double)x[i] * (double)x[i];
    for (int l = 0; l < LANES; l++) total += lane[l];
    return total;
}

#include "attention.h"
#include "convolution.h"
#include "pooling.h"
#include "rms_norm.h"
#include "rotary.h"
#include "swiglu.h"

const mt_table MT_PASTE(mt_table, PRECISION, LEVEL) = {
    .level = MT_LEVEL_NAME,
    .itemsize = sizeof(REAL),
    .sum_rows = sum_rows,
    .gelu = gelu,
    .gelu_backward = gelu_backward,
    .residual = residual,
    .dropout = dropout,
    .layer_norm = layer_norm,
    .residual_norm = residual_norm,
    .layer_norm_backward = layer_norm_backward,
    .rms_norm = rms_norm,
    .residual_rms_norm = residual_rms_norm,
    .rms_norm_backward = rms_norm_backward,
    .swiglu = swiglu,
    .swiglu_backward = swiglu_backward,
    .rotary = rotary,
    .rotary_pack = rotary_pack,
    .rotary_unpack = rotary_unpack,
    .softmax = softmax,
    .softmax_backward = softmax_backward,
    .cross_entropy = cross_entropy,
    .cross_entropy_backward = cross_entropy_backward,
    .row_sum = row_sum,
    .combine = combine,
    .combine_backward = combine_backward,
    .jitter = jitter,
    .adamw = adamw,
    .sum_of_squares = sum_of_squares,
    .convolution_scratch = convolution_scratch,
    .conv2d = conv2d,
    .conv2d_filters = conv2d_filters,
    .max_pool2d = max_pool2d,
    .max_pool2d_backward = max_pool2d_backward,
    .attention_scratch = attention_scratch,
    .attention = attention,
    .attention_backward = attention_backward,
};
