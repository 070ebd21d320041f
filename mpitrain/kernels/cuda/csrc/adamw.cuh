/* AdamW for four neighbours; behind rows.cuh. */

/* Of vectors that hold T numbers; the new weights are in `weights`, too. */
template <typename T>
static __device__ __forceinline__ void adamw_quad(const mt_quad &quad, T *p, const T *g, T *m, T *v,
                                                  const mt_adamw_numbers &numbers, REAL *weights) {
    REAL grads[4], first[4], second[4];
    quad.load(p, weights);
    quad.load(g, grads);
    quad.load(m, first);
    quad.load(v, second);
    for (int k = 0; k < 4; k++) MT_ADAMW(weights[k], grads[k], first[k], second[k], numbers);
    quad.store(m, first);
    quad.store(v, second);
    quad.store(p, weights);
}
