/* SwiGLU, the gated activation.  Read by kernels.c. */

static void swiglu(const void *gate_, const void *up_, void *y_, len count) {
    const REAL *RESTRICT gate = gate_, *RESTRICT up = up_;
    REAL *RESTRICT y = y_;
    for (len i = 0; i < count; i++) y[i] = gate[i] * mt_sigmoid(gate[i]) * up[i];
}

/* With s the sigmoid of gate: d_gate = grad up s (1 + gate (1 - s)), d_up = grad gate s. */
static void swiglu_backward(const void *grad_, const void *gate_, const void *up_, void *d_gate_, void *d_up_,
                            len count) {
    const REAL *RESTRICT grad = grad_, *RESTRICT gate = gate_, *RESTRICT up = up_;
    REAL *RESTRICT d_gate = d_gate_, *RESTRICT d_up = d_up_;
    for (len i = 0; i < count; i++) {
        const REAL s = mt_sigmoid(gate[i]);
        d_gate[i] = MT_MULADD(gate[i], REAL_C(1.0) - s, REAL_C(1.0)) * s * up[i] * grad[i];
        d_up[i] = gate[i] * s * grad[i];
    }
}
