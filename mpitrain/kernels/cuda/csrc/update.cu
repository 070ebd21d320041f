/* What happens to weights and gradients once backward is done: long vectors. */
#include "rows.cuh"
#include "adamw.cuh"

extern "C" __global__ void adamw(STORE *p, const STORE *g, STORE *m, STORE *v, mt_long size, REAL beta1, REAL rest1,
                                 REAL beta2, REAL rest2, REAL eps, REAL rate, REAL keep) {
    const mt_adamw_numbers numbers = {beta1, rest1, beta2, rest2, eps, rate, keep};
    const bool by_fours = mt_by_fours(p) && mt_by_fours(g) && mt_by_fours(m) && mt_by_fours(v);
    MT_EACH_QUAD(at, size) {
        REAL weights[4];
        adamw_quad(mt_quad_at(at, size, by_fours), p, g, m, v, numbers, weights);
    }
}

/* Each block's share of the sum of all squares, in double precision. */
extern "C" __global__ void squares(const STORE *__restrict__ x, double *__restrict__ sums, mt_long size) {
    const bool by_fours = mt_by_fours(x);
    double total = 0.0;
    MT_EACH_QUAD(at, size) {
        REAL v[4];
        mt_quad_at(at, size, by_fours).load(x, v);
        for (int k = 0; k < 4; k++) total += (double)v[k] * (double)v[k];
    }
    total = mt_block_sum(total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

/* Their sum; one block. */
extern "C" __global__ void sum_of(const double *__restrict__ sums, double *__restrict__ total, mt_long count) {
    double all = 0.0;
    for (mt_long i = threadIdx.x; i < count; i += blockDim.x) all += sums[i];
    all = mt_block_sum(all);
    if (threadIdx.x == 0) *total = all;
}
