/* Layer norm, alone and after the sum that ends a residual branch, and its gradients. */
#include "rows.cuh"
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
layer_norm(const STORE *x, const void *weight, mt_long weight_is_wide, const void *bias, mt_long bias_is_wide, REAL eps,
           STORE *y, REAL *center, REAL *rstd, mt_long rows, mt_long width) {
    const norm_input in = {x, nullptr, nullptr, 0, nullptr, 0, REAL_C(0.0), nullptr};
    norm_rows<false, false>(in, {weight, bias, weight_is_wide, bias_is_wide, eps, y, center, rstd}, rows, width);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
residual_norm(const STORE *x, const STORE *branch, const void *branch_bias, mt_long is_wide, const mt_row *hashes,
              mt_word threshold, REAL scale, const void *weight, mt_long weight_is_wide, const void *bias,
              mt_long bias_is_wide, REAL eps, STORE *sum, STORE *y, REAL *center, REAL *rstd, mt_long rows,
              mt_long width) {
    const norm_input in = {x, branch, branch_bias, is_wide, hashes, threshold, scale, sum};
    norm_rows<false, true>(in, {weight, bias, weight_is_wide, bias_is_wide, eps, y, center, rstd}, rows, width);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
layer_norm_backward(const STORE *grad, const STORE *extra, const STORE *x, const REAL *center, const REAL *rstd,
                    const void *weight, mt_long is_wide, STORE *dx, mt_long rows, mt_long width) {
    norm_rows_backward<false>({grad, extra, x, center, rstd, weight, is_wide, dx}, rows, width);
}

extern "C" __global__ void layer_norm_columns(const STORE *grad, const STORE *x, const REAL *center, const REAL *rstd,
                                              REAL *sums, mt_long rows, mt_long width) {
    norm_columns<false>(grad, x, center, rstd, sums, rows, width);
}
