/* GELU in its two forms, its gradient, and the error function. */
#include "rows.cuh"

template <bool EXACT>
static __device__ __forceinline__ void gelu_quad(REAL *x, REAL *slope) {
    for (int k = 0; k < 4; k++) x[k] = EXACT ? mt_gelu_erf(x[k], &slope[k]) : mt_gelu_tanh(x[k], &slope[k]);
}

template <bool EXACT>
static __device__ __forceinline__ void gelu(const STORE *__restrict__ x, STORE *__restrict__ y,
                                            STORE *__restrict__ slope, mt_long size) {
    const bool by_fours = mt_by_fours(x) && mt_by_fours(y) && mt_by_fours(slope);
    MT_EACH_QUAD(at, size) {
        const mt_quad quad = mt_quad_at(at, size, by_fours);
        REAL z[4], d[4];
        quad.load(x, z);
        gelu_quad<EXACT>(z, d);
        quad.store(y, z);
        quad.store(slope, d);
    }
}

template <bool EXACT>
static __device__ __forceinline__ void biased(const STORE *__restrict__ x, const void *bias, mt_long is_wide,
                                              STORE *__restrict__ y, STORE *__restrict__ slope, mt_long rows,
                                              mt_long width) {
    const mt_tile tile = mt_tile_of(width, mt_by_fours(x) && mt_by_fours(y) && mt_by_fours(slope));
    REAL b[4];
    mt_load_vector(tile.quad, bias, is_wide, b);
    for (mt_long i = tile.row; i < rows; i += tile.rows_apart) {
        REAL z[4], d[4];
        tile.quad.load(x + i * width, z);
        for (int k = 0; k < 4; k++) z[k] += b[k];
        gelu_quad<EXACT>(z, d);
        tile.quad.store(y + i * width, z);
        tile.quad.store(slope + i * width, d);
    }
}

#define GELU_KERNELS(NAME, EXACT)                                                                                     \
    extern "C" __global__ void NAME(const STORE *x, STORE *y, STORE *slope, mt_long size) {                           \
        gelu<EXACT>(x, y, slope, size);                                                                               \
    }                                                                                                                 \
    extern "C" __global__ void NAME##_biased(const STORE *x, const void *bias, mt_long is_wide, STORE *y,             \
                                             STORE *slope, mt_long rows, mt_long width) {                             \
        biased<EXACT>(x, bias, is_wide, y, slope, rows, width);                                                       \
    }

GELU_KERNELS(gelu_tanh, false)
GELU_KERNELS(gelu_erf, true)

/* dx = grad slope */
extern "C" __global__ void gelu_backward(const STORE *__restrict__ grad, const STORE *__restrict__ slope,
                                         STORE *__restrict__ dx, mt_long size) {
    const bool by_fours = mt_by_fours(grad) && mt_by_fours(slope) && mt_by_fours(dx);
    MT_EACH_QUAD(at, size) {
        const mt_quad quad = mt_quad_at(at, size, by_fours);
        REAL g[4], d[4];
        quad.load(grad, g);
        quad.load(slope, d);
        for (int k = 0; k < 4; k++) g[k] *= d[k];
        quad.store(dx, g);
    }
}

/* The same, and for each group of rows the sum of its products, before they are rounded: sums (groups, width). */
extern "C" __global__ void gelu_backward_sums(const STORE *__restrict__ grad, const STORE *__restrict__ slope,
                                              STORE *__restrict__ dx, REAL *__restrict__ sums, mt_long rows,
                                              mt_long width) {
    const mt_tile tile = mt_tile_of(width, mt_by_fours(grad) && mt_by_fours(slope) && mt_by_fours(dx));
    REAL total[4] = {REAL_C(0.0), REAL_C(0.0), REAL_C(0.0), REAL_C(0.0)};
    for (mt_long i = tile.row; i < rows; i += tile.rows_apart) {
        REAL g[4], d[4];
        tile.quad.load(grad + i * width, g);
        tile.quad.load(slope + i * width, d);
        for (int k = 0; k < 4; k++) {
            g[k] *= d[k];
            total[k] += g[k];
        }
        tile.quad.store(dx + i * width, g);
    }
    mt_sum_warps(total);
    if (threadIdx.x < 32) {
        const mt_quad one_by_one = {tile.quad.at, tile.quad.count, false};
        one_by_one.store(sums + tile.group * width, total);
    }
}

extern "C" __global__ void error_function(const STORE *__restrict__ x, STORE *__restrict__ y, mt_long size) {
    MT_EACH(i, size) mt_store(y + i, mt_erf(mt_load(x + i)));
}
