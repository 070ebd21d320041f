/* RMS norm, alone and after the sum that ends a residual branch.  Read by kernels.c. */

/* One row: one over the root of its mean square, and the row times that, scaled. */
static inline void rms_row(const REAL *RESTRICT x, const REAL *RESTRICT weight, REAL eps, REAL *RESTRICT y,
                           REAL *RESTRICT rstd, len width) {
    const len whole = width - width % LANES;
    REAL square[LANES] = {0};
    for (len j = 0; j < whole; j += LANES)
        for (int l = 0; l < LANES; l++) square[l] += x[j + l] * x[j + l];
    for (len j = whole; j < width; j++) square[j - whole] += x[j] * x[j];
    const REAL r = REAL_C(1.0) / MT_SQRT(lanes_sum(square) / (REAL)width + eps);
    for (len j = 0; j < width; j++) y[j] = x[j] * r * weight[j];
    *rstd = r;
}

static void rms_norm(const void *x_, const void *weight, double eps, void *y_, void *rstd_, len rows, len width) {
    const REAL *x = x_;
    REAL *y = y_, *rstd = rstd_;
    for (len i = 0; i < rows; i++) rms_row(x + i * width, weight, (REAL)eps, y + i * width, rstd + i, width);
}

static void residual_rms_norm(const void *x_, const void *y_, const void *branch_bias, const uint64_t *hashes,
                              uint64_t threshold, double keep_scale, const void *weight, double eps, void *sum_,
                              void *out_, void *rstd_, len rows, len width) {
    const REAL *x = x_, *y = y_;
    REAL *sum = sum_, *out = out_, *rstd = rstd_;
    for (len i = 0; i < rows; i++) {
        const len at = i * width;
        residual(x + at, y + at, branch_bias, hashes ? hashes + i : NULL, threshold, keep_scale, sum + at, 1, width);
        rms_row(sum + at, weight, (REAL)eps, out + at, rstd + i, width);
    }
}

/* One row of the gradients: dx, and what it adds to dw.  Which product is rounded alone is said outright, as in
 * plus_dropped. */
static void rms_row_backward(const REAL *RESTRICT grad, const REAL *RESTRICT extra, const REAL *RESTRICT x,
                             const REAL *RESTRICT weight, REAL r, REAL share, REAL *RESTRICT dx, REAL *RESTRICT dw,
                             len width) {
    for (len j = 0; j < width; j++) {
        const REAL n = x[j] * r, off = MT_MULADD(-n, share, grad[j] * weight[j]);
        dx[j] = extra ? MT_MULADD(off, r, extra[j]) : off * r;
        dw[j] = MT_MULADD(grad[j], n, dw[j]);
    }
}

/* dx = rstd (h - n mean(h n)) + extra with n the normalised row and h = grad weight; dw = sum of grad n. */
static void rms_norm_backward(const void *grad_, const void *extra_, const void *x_, const void *rstd_,
                              const void *weight_, void *dx_, void *dw, void *group, len from, len rows, len all,
                              len width) {
    const REAL *RESTRICT grad = grad_, *RESTRICT extra = extra_, *RESTRICT x = x_;
    const REAL *RESTRICT rstd = rstd_, *RESTRICT weight = weight_;
    REAL *RESTRICT dx = dx_;
    const len whole = width - width % LANES;
    if (!all) begin_group(dw, group, 0, width);
    for (len i = 0; i < rows; i++, x += width, grad += width, dx += width) {
        begin_group(dw, group, from + i, width);
        const REAL r = rstd[i];
        REAL lane[LANES] = {0};
        for (len j = 0; j < whole; j += LANES)
            for (int l = 0; l < LANES; l++) lane[l] += (grad[j + l] * weight[j + l]) * (x[j + l] * r);
        for (len j = whole; j < width; j++) lane[j - whole] += (grad[j] * weight[j]) * (x[j] * r);
        rms_row_backward(grad, extra, x, weight, r, lanes_sum(lane) / (REAL)width, dx, group, width);
        if (extra) extra += width;
        end_group(dw, group, from + i, all, width);
    }
}
