/* Sums over rows in two passes of this kernel, whose order does not depend on the device. */
#include "rows.cuh"

/* For each group of rows their sum: total (groups, width).  One group sums what the groups of a first pass gave. */
extern "C" __global__ void fold_rows(const STORE *__restrict__ x, REAL *__restrict__ total, mt_long rows,
                                     mt_long width) {
    const mt_tile tile = mt_tile_of(width, mt_by_fours(x));
    REAL sum[4] = {REAL_C(0.0), REAL_C(0.0), REAL_C(0.0), REAL_C(0.0)};
    for (mt_long i = tile.row; i < rows; i += tile.rows_apart) {
        REAL v[4];
        tile.quad.load(x + i * width, v);
        for (int k = 0; k < 4; k++) sum[k] += v[k];
    }
    mt_sum_warps(sum);
    const mt_quad one_by_one = {tile.quad.at, tile.quad.count, false};
    if (threadIdx.x < 32) one_by_one.store(total + tile.group * width, sum);
}
