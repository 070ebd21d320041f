/* Half precision to single and back. */
#include "rows.cuh"

extern "C" __global__ void widen(const STORE *__restrict__ x, REAL *__restrict__ y, mt_long size) {
    const bool by_fours = mt_by_fours(x) && mt_by_fours(y);
    MT_EACH_QUAD(at, size) {
        const mt_quad quad = mt_quad_at(at, size, by_fours);
        REAL v[4];
        quad.load(x, v);
        quad.store(y, v);
    }
}

extern "C" __global__ void narrow(const REAL *__restrict__ x, STORE *__restrict__ y, mt_long size) {
    const bool by_fours = mt_by_fours(x) && mt_by_fours(y);
    MT_EACH_QUAD(at, size) {
        const mt_quad quad = mt_quad_at(at, size, by_fours);
        REAL v[4];
        quad.load(x, v);
        quad.store(y, v);
    }
}
