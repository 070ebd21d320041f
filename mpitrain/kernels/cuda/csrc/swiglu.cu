/* SwiGLU, the gated activation, and its gradients. */
#include "rows.cuh"

extern "C" __global__ void swiglu(const STORE *__restrict__ gate, const STORE *__restrict__ up, STORE *__restrict__ y,
                                  mt_long size) {
    const bool by_fours = mt_by_fours(gate) && mt_by_fours(up) && mt_by_fours(y);
    MT_EACH_QUAD(at, size) {
        const mt_quad quad = mt_quad_at(at, size, by_fours);
        REAL z[4], u[4];
        quad.load(gate, z);
        quad.load(up, u);
        for (int k = 0; k < 4; k++) z[k] = z[k] * mt_sigmoid(z[k]) * u[k];
        quad.store(y, z);
    }
}

/* With s the sigmoid of gate: d_gate = grad up s (1 + gate (1 - s)), d_up = grad gate s. */
extern "C" __global__ void swiglu_backward(const STORE *__restrict__ grad, const STORE *__restrict__ gate,
                                           const STORE *__restrict__ up, STORE *__restrict__ d_gate,
                                           STORE *__restrict__ d_up, mt_long size) {
    const bool by_fours = mt_by_fours(grad) && mt_by_fours(gate) && mt_by_fours(up) && mt_by_fours(d_gate) &&
                          mt_by_fours(d_up);
    MT_EACH_QUAD(at, size) {
        const mt_quad quad = mt_quad_at(at, size, by_fours);
        REAL g[4], z[4], u[4];
        quad.load(grad, g);
        quad.load(gate, z);
        quad.load(up, u);
        for (int k = 0; k < 4; k++) {
            const REAL s = mt_sigmoid(z[k]);
            u[k] = mt_fma(z[k], REAL_C(1.0) - s, REAL_C(1.0)) * s * u[k] * g[k];
            z[k] = z[k] * s * g[k];
        }
        quad.store(d_gate, u);
        quad.store(d_up, z);
    }
}
