/* Tokens on their way back from experts: what a token's choices made of it, weighted, and the gradients of that.
 *
 * A block has a token, its threads four columns each.  A place below 0 is a choice that came to nothing.
 */
#include "rows.cuh"

/* y[i] = sum over j of gates[i, j] out[places[i, j]], added in the order of j, rounded once. */
extern "C" __global__ void combine(const STORE *__restrict__ out, const REAL *__restrict__ gates,
                                   const mt_long *__restrict__ places, STORE *__restrict__ y, mt_long tokens,
                                   mt_long choices, mt_long width) {
    const bool by_fours = width % 4 == 0 && mt_by_fours(out) && mt_by_fours(y);
    for (mt_long i = blockIdx.x; i < tokens; i += gridDim.x) {
        for (mt_long column = 4 * threadIdx.x; column < width; column += 4 * blockDim.x) {
            const mt_quad quad = mt_quad_at(column, width, by_fours);
            REAL sum[4] = {REAL_C(0.0), REAL_C(0.0), REAL_C(0.0), REAL_C(0.0)};
            for (mt_long j = 0; j < choices; j++) {
                const mt_long place = places[i * choices + j];
                if (place < 0) continue;
                const REAL gate = gates[i * choices + j];
                REAL v[4];
                quad.load(out + place * width, v);
                for (int k = 0; k < 4; k++) sum[k] = mt_fma(gate, v[k], sum[k]);
            }
            quad.store(y + i * width, sum);
        }
    }
}

/* d_out[places[i, j]] = gates[i, j] grad[i], other rows are left as they are; d_gates[i, j] = <grad[i], out[...]>. */
extern "C" __global__ void combine_backward(const STORE *__restrict__ grad, const STORE *__restrict__ out,
                                            const REAL *__restrict__ gates, const mt_long *__restrict__ places,
                                            STORE *__restrict__ d_out, REAL *__restrict__ d_gates, mt_long tokens,
                                            mt_long choices, mt_long width) {
    const bool by_fours = width % 4 == 0 && mt_by_fours(grad) && mt_by_fours(out) && mt_by_fours(d_out);
    for (mt_long i = blockIdx.x; i < tokens; i += gridDim.x) {
        for (mt_long j = 0; j < choices; j++) {
            const mt_long place = places[i * choices + j];
            REAL product = REAL_C(0.0);
            if (place >= 0) { /* the same for all threads of the block */
                const REAL gate = gates[i * choices + j];
                for (mt_long column = 4 * threadIdx.x; column < width; column += 4 * blockDim.x) {
                    const mt_quad quad = mt_quad_at(column, width, by_fours);
                    REAL g[4], v[4];
                    quad.load(grad + i * width, g);
                    quad.load(out + place * width, v);
                    for (int k = 0; k < 4; k++) {
                        product = mt_fma(g[k], v[k], product);
                        g[k] *= gate;
                    }
                    quad.store(d_out + place * width, g);
                }
                product = mt_block_sum(product);
            }
            if (threadIdx.x == 0) d_gates[i * choices + j] = product;
        }
    }
}
