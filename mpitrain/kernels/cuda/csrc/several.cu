/* The same for many parts of a few arrays at once: one launch for all parameters of a model.
 *
 * Parts are cut into chunks, a block has one.  A table tells where each part lies in each array, its size and the number
 * of its first chunk; parts without elements have none.
 */
#include "rows.cuh"
#include "adamw.cuh"

/* The part to which a chunk belongs: the last one whose first chunk is none behind it. */
static __device__ __forceinline__ mt_long part_of(const mt_long *chunks, mt_long columns, mt_long count, mt_long chunk) {
    mt_long low = 0, high = count - 1;
    while (low < high) {
        const mt_long middle = (low + high + 1) / 2;
        if (chunks[middle * columns] <= chunk)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* AdamW.  parts: offsets in p, g, m, v and halves, size, first chunk; rates: factor on lr, weight decay.  `step` is
 * sqrt(1 - beta2^t) / (1 - beta1^t). */
extern "C" __global__ void adamw_parts(REAL *p, const REAL *g, REAL *m, REAL *v, STORE *halves, const mt_long *parts,
                                       const double *rates, mt_long count, mt_long chunk, REAL beta1, REAL rest1,
                                       REAL beta2, REAL rest2, REAL eps, double lr, double step) {
    const mt_long which = part_of(parts + 6, 7, count, blockIdx.x), *part = parts + 7 * which;
    const double own = lr * rates[2 * which], keep = 1.0 - own * rates[2 * which + 1];
    const mt_adamw_numbers numbers = {beta1, rest1, beta2, rest2, eps, (REAL)(own * step), (REAL)keep};
    p += part[0], g += part[1], m += part[2], v += part[3];
    if (halves) halves += part[4];
    const mt_long begin = (blockIdx.x - part[6]) * chunk, end = part[5] < begin + chunk ? part[5] : begin + chunk;
    const bool by_fours = mt_by_fours(p) && mt_by_fours(g) && mt_by_fours(m) && mt_by_fours(v);
    const bool halves_by_fours = mt_by_fours(halves);
    for (mt_long at = begin + 4 * threadIdx.x; at < end; at += 4 * blockDim.x) {
        REAL weights[4];
        adamw_quad(mt_quad_at(at, end, by_fours), p, g, m, v, numbers, weights);
        if (halves) mt_quad_at(at, end, halves_by_fours).store(halves, weights);
    }
}

/* Gradient descent, without velocity where u is null.  parts: offsets in p, g, u and halves, size, first chunk; rates: as
 * above. */
extern "C" __global__ void sgd_parts(REAL *p, const REAL *g, REAL *u, STORE *halves, const mt_long *parts,
                                     const double *rates, mt_long count, mt_long chunk, double lr, REAL momentum,
                                     mt_long nesterov) {
    const mt_long which = part_of(parts + 5, 6, count, blockIdx.x), *part = parts + 6 * which;
    const double own = lr * rates[2 * which], own_decay = rates[2 * which + 1];
    const REAL rate = (REAL)own, decay = (REAL)own_decay, keep = (REAL)(1.0 - own * own_decay);
    const REAL ahead = (REAL)(own * (double)momentum);
    p += part[0], g += part[1];
    if (u) u += part[2];
    if (halves) halves += part[3];
    const mt_long begin = (blockIdx.x - part[5]) * chunk, end = part[4] < begin + chunk ? part[4] : begin + chunk;
    const bool by_fours = mt_by_fours(p) && mt_by_fours(g) && mt_by_fours(u), halves_by_fours = mt_by_fours(halves);
    for (mt_long at = begin + 4 * threadIdx.x; at < end; at += 4 * blockDim.x) {
        const mt_quad quad = mt_quad_at(at, end, by_fours);
        REAL w[4], d[4], velocity[4];
        quad.load(p, w);
        quad.load(g, d);
        if (u) {
            quad.load(u, velocity);
            for (int k = 0; k < 4; k++) {
                d[k] = mt_fma(decay, w[k], d[k]);
                velocity[k] = mt_fma(momentum, velocity[k], d[k]);
                w[k] = mt_fma(-rate, nesterov ? d[k] : velocity[k], w[k]);
                if (nesterov) w[k] = mt_fma(-ahead, velocity[k], w[k]);
            }
            quad.store(u, velocity);
        } else {
            for (int k = 0; k < 4; k++) w[k] = mt_fma(-rate, d[k], keep * w[k]);
        }
        quad.store(p, w);
        if (halves) mt_quad_at(at, end, halves_by_fours).store(halves, w);
    }
}

/* Each chunk's share of the squares of its part.  parts: offset in x, size, first chunk, number of the part's sum. */
extern "C" __global__ void squares_of_parts(const STORE *__restrict__ x, const mt_long *__restrict__ parts,
                                            double *__restrict__ sums, mt_long count, mt_long chunk) {
    const mt_long *part = parts + 4 * part_of(parts + 2, 4, count, blockIdx.x);
    x += part[0];
    const mt_long begin = (blockIdx.x - part[2]) * chunk, end = part[1] < begin + chunk ? part[1] : begin + chunk;
    const bool by_fours = mt_by_fours(x);
    double total = 0.0;
    for (mt_long at = begin + 4 * threadIdx.x; at < end; at += 4 * blockDim.x) {
        REAL v[4];
        mt_quad_at(at, end, by_fours).load(x, v);
        for (int k = 0; k < 4; k++) total += (double)v[k] * (double)v[k];
    }
    total = mt_block_sum(total);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

/* The sum of each part; a block for each.  `chunks` are all. */
extern "C" __global__ void sums_of_parts(const double *__restrict__ sums, const mt_long *__restrict__ parts,
                                         double *__restrict__ totals, mt_long count, mt_long chunks) {
    const mt_long *part = parts + 4 * (mt_long)blockIdx.x, end = blockIdx.x + 1 < count ? part[4 + 2] : chunks;
    double total = 0.0;
    for (mt_long i = part[2] + threadIdx.x; i < end; i += blockDim.x) total += sums[i];
    total = mt_block_sum(total);
    if (threadIdx.x == 0) totals[part[3]] = total;
}
