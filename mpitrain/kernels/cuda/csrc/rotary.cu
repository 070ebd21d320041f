/* Rotary positions: the pairs of queries and keys turned, values left as they are.
 *
 * Packed heads lie in groups: `queries` heads of queries, a key, a value.  Apart, queries lie in one array, and keys and
 * values in another.  A thread has four neighbouring pairs of a head, or of a value eight numbers.
 */
#include "rows.cuh"

/* Where a head of a row begins in the array that holds it. */
template <bool APART, typename T>
static __device__ __forceinline__ T *head_of(T *x, T *kv, mt_long row, int groups, int queries, int head, int d) {
    if (!APART) return x + (row * groups * (queries + 2) + head) * d;
    const int group = head / (queries + 2), member = head % (queries + 2);
    if (member < queries) return x + ((row * groups + group) * queries + member) * d;
    return kv + ((row * groups + group) * 2 + member - queries) * d;
}

template <bool APART_BEFORE, bool APART_AFTER>
static __device__ __forceinline__ void turn_heads(const STORE *x, const STORE *kv, const REAL *cosines,
                                                  const REAL *sines, STORE *y, STORE *new_kv, int groups, int queries,
                                                  int half, mt_long rows, mt_long positions) {
    const bool by_fours = half % 4 == 0 && mt_by_fours(x) && (!APART_BEFORE || mt_by_fours(kv)) && mt_by_fours(y) &&
                          (!APART_AFTER || mt_by_fours(new_kv));
    const bool tables_by_fours = half % 4 == 0 && mt_by_fours(cosines) && mt_by_fours(sines);
    const int quads = (half + 3) / 4, work = groups * (queries + 2) * quads;
    for (mt_long row = blockIdx.x; row < rows; row += gridDim.x) {
        const mt_long at = row % positions * half;
        for (int item = threadIdx.x; item < work; item += blockDim.x) {
            const int head = item / quads;
            const STORE *from = head_of<APART_BEFORE>(x, kv, row, groups, queries, head, 2 * half);
            STORE *to = head_of<APART_AFTER>(y, new_kv, row, groups, queries, head, 2 * half);
            const mt_quad quad = mt_quad_at(4 * (item % quads), half, by_fours);
            REAL first[4], second[4];
            quad.load(from, first);
            quad.load(from + half, second);
            if (head % (queries + 2) <= queries) {
                const mt_quad table = mt_quad_at(quad.at, half, tables_by_fours);
                REAL c[4], s[4];
                table.load(cosines + at, c);
                table.load(sines + at, s);
                for (int k = 0; k < 4; k++) { /* which product is rounded alone is said outright */
                    const REAL one = first[k];
                    first[k] = mt_fma(one, c[k], -(second[k] * s[k]));
                    second[k] = mt_fma(second[k], c[k], one * s[k]);
                }
            }
            quad.store(to, first);
            quad.store(to + half, second);
        }
    }
}

/* Tables have `positions` rows, and begin again with every sequence. */
extern "C" __global__ void rotary(const STORE *x, const REAL *cosines, const REAL *sines, STORE *y, mt_long groups,
                                  mt_long queries, mt_long half, mt_long rows, mt_long positions) {
    turn_heads<false, false>(x, nullptr, cosines, sines, y, nullptr, (int)groups, (int)queries, (int)half, rows,
                             positions);
}

extern "C" __global__ void rotary_pack(const STORE *q, const STORE *kv, const REAL *cosines, const REAL *sines,
                                       STORE *y, mt_long groups, mt_long queries, mt_long half, mt_long rows,
                                       mt_long positions) {
    turn_heads<true, false>(q, kv, cosines, sines, y, nullptr, (int)groups, (int)queries, (int)half, rows, positions);
}

extern "C" __global__ void rotary_unpack(const STORE *x, const REAL *cosines, const REAL *sines, STORE *q, STORE *kv,
                                         mt_long groups, mt_long queries, mt_long half, mt_long rows,
                                         mt_long positions) {
    turn_heads<false, true>(x, nullptr, cosines, sines, q, kv, (int)groups, (int)queries, (int)half, rows, positions);
}
