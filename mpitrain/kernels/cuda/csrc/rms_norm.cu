/* RMS norm, alone and after the sum that ends a residual branch, and its gradients. */
#include "rows.cuh"
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
rms_norm(const STORE *x, const void *weight, mt_long is_wide, REAL eps, STORE *y, REAL *rstd, mt_long rows,
         mt_long width) {
    const norm_input in = {x, nullptr, nullptr, 0, nullptr, 0, REAL_C(0.0), nullptr};
    norm_rows<true, false>(in, {weight, nullptr, is_wide, 0, eps, y, nullptr, rstd}, rows, width);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
residual_rms_norm(const STORE *x, const STORE *branch, const void *branch_bias, mt_long is_wide, const mt_row *hashes,
                  mt_word threshold, REAL scale, const void *weight, mt_long weight_is_wide, REAL eps, STORE *sum,
                  STORE *y, REAL *rstd, mt_long rows, mt_long width) {
    const norm_input in = {x, branch, branch_bias, is_wide, hashes, threshold, scale, sum};
    norm_rows<true, true>(in, {weight, nullptr, weight_is_wide, 0, eps, y, nullptr, rstd}, rows, width);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS)
rms_norm_backward(const STORE *grad, const STORE *extra, const STORE *x, const REAL *rstd, const void *weight,
                  mt_long is_wide, STORE *dx, mt_long rows, mt_long width) {
    norm_rows_backward<true>({grad, extra, x, nullptr, rstd, weight, is_wide, dx}, rows, width);
}

extern "C" __global__ void rms_norm_columns(const STORE *grad, const STORE *x, const REAL *rstd, REAL *sums,
                                            mt_long rows, mt_long width) {
    norm_columns<true>(grad, x, nullptr, rstd, sums, rows, width);
}
