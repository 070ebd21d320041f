/* Attention of halves on tensor cores, forward and backward, for heads of up to MT_WIDTH numbers; that, and the sizes
 * below, are defined by the source.
 *
 * A warp owns rows (queries; or keys, where their gradients are made), 16 for each of its tiles, and the block streams
 * through the others; copies of the next tiles are on their way while it computes.  Of the scores a lane holds, in rows
 * g and g + 8 of the warp, two neighbours of every eight columns; rounded to halves, they are the left factor of the
 * next product without a detour through memory.  But for that rounding, forward of the weights, and backward of weights
 * and slopes, everything is computed in single precision.
 *
 * Forward keeps a running maximum and sum of each row; backward needs neither, since lse tells them.  dq, and dk with
 * dv, are made by kernels of their own, so that each number is a sum in one fixed order.
 *
 * Source: Dao 2023, "FlashAttention-2", arXiv:2307.08691, algorithms 1 and 2; the order of copies: that of its program.
 */

#if MT_HALVES

#define LOG2_E 1.44269504088896340736f
#define LN_2 0.693147180559945309417f

/* The lowest number instead of -inf, which times 0 or less itself is NaN; NaN stays. */
static __device__ __forceinline__ float finite_shift(float x) { return x < MT_LOWEST ? MT_LOWEST : x; }

/* A row of scores is held by four lanes side by side. */
static __device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(MT_ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(MT_ALL_LANES, x, 2));
}

static __device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(MT_ALL_LANES, x, 1);
    return x + __shfl_xor_sync(MT_ALL_LANES, x, 2);
}

/* Own rows are queries; the last of them come first, which with causal attention have most to do. */
template <int D, int TILES, int WARPS, int KEYS>
static __device__ __forceinline__ void forward(const mt_sight &sight, const mt_matrix &q, const mt_matrix &k,
                                               const mt_matrix &v, const mt_result &out, float *lse, float scale,
                                               int turn) {
    constexpr int OWN = 16 * TILES, ROWS = OWN * WARPS, THREADS = 32 * WARPS;
    __shared__ mt_chunk q_tile[ROWS * D / 8], k_tile[KEYS * D / 8], v_tile[KEYS * D / 8];
    const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * OWN, g = lane >> 2, m = lane & 3;
    const int query = ((sight.s + ROWS - 1) / ROWS - 1 - turn) * ROWS, own = query + row;
    const mt_keys keys = mt_keys_of(sight, query, ROWS);
    const int latest = mt_span_of(sight, own, OWN).latest;
    float sums[TILES][D / 8][4], shift[TILES][2], total[TILES][2]; /* shift: the largest score, times log2 e */
    mt_no_sums<D, TILES>(sums);
    MT_UNROLL
    for (int i = 0; i < TILES; i++) {
        shift[i][0] = shift[i][1] = MT_LOWEST;
        total[i][0] = total[i][1] = 0.0f;
    }
    mt_copies copies;
    const int start = keys.start / KEYS * KEYS;
    if (start < keys.stop) {
        q.fetch<D, ROWS, THREADS>(copies, q_tile, query);
        k.fetch<D, KEYS, THREADS>(copies, k_tile, start);
    }
    for (int key = start; key < keys.stop; key += KEYS) {
        copies.wait();
        __syncthreads(); /* keys are there, and nobody reads values any more */
        v.fetch<D, KEYS, THREADS>(copies, v_tile, key);
        const bool looks = sight.scores || !sight.causal || key < own + OWN;
        mt_word weights[KEYS / 16][TILES][4];
        if (looks) {
            float x[TILES][KEYS / 8][4];
            mt_no_sums<KEYS, TILES>(x);
            MT_UNROLL
            for (int c = 0; c < D / 16; c++) {
                mt_word left[TILES][4];
                MT_UNROLL
                for (int i = 0; i < TILES; i++) mt_left<D>(left[i], q_tile, row + 16 * i, c);
                mt_dots<D, KEYS, TILES>(x, left, k_tile, c);
            }
            const bool is_plain = !sight.scores && all_seen(sight, own, OWN, key, KEYS, latest);
            MT_UNROLL
            for (int i = 0; i < TILES; i++) {
                MT_UNROLL
                for (int h = 0; h < 2; h++) {
                    const int at = own + 16 * i + 8 * h + g;
                    float peak = -MT_INFINITY;
                    MT_UNROLL
                    for (int n = 0; n < KEYS / 8; n++) {
                        MT_UNROLL
                        for (int e = 0; e < 2; e++) x[i][n][2 * h + e] = mt_times(x[i][n][2 * h + e], scale);
                    }
                    if (!is_plain) {
                        const int first = sight.first(at), last = sight.last(at);
                        MT_UNROLL
                        for (int n = 0; n < KEYS / 8; n++) {
                            MT_UNROLL
                            for (int e = 0; e < 2; e++) {
                                const int j = key + 8 * n + 2 * m + e;
                                float *const score = &x[i][n][2 * h + e];
                                if (sight.scores) sight.keep(at, j, *score);
                                *score = j >= first && j < last && sight.lets(at, j) ? *score : -MT_INFINITY;
                            }
                        }
                    }
                    MT_UNROLL
                    for (int n = 0; n < KEYS / 8; n++) peak = fmaxf(peak, fmaxf(x[i][n][2 * h], x[i][n][2 * h + 1]));
                    peak = fmaxf(shift[i][h], row_max(peak) * LOG2_E);
                    const float factor = mt_exp2(shift[i][h] - peak);
                    shift[i][h] = peak, total[i][h] *= factor;
                    MT_UNROLL
                    for (int n = 0; n < D / 8; n++) sums[i][n][2 * h] *= factor, sums[i][n][2 * h + 1] *= factor;
                    MT_UNROLL
                    for (int n = 0; n < KEYS / 8; n++) {
                        MT_UNROLL
                        for (int e = 0; e < 2; e++) {
                            float *const p = &x[i][n][2 * h + e];
                            *p = mt_exp2(mt_fma(*p, LOG2_E, -peak));
                            total[i][h] += *p;
                        }
                    }
                    if (sight.rows) {
                        const mt_word hash = sight.row(at);
                        MT_UNROLL
                        for (int n = 0; n < KEYS / 8; n++) {
                            MT_UNROLL
                            for (int e = 0; e < 2; e++)
                                if (!sight.keeps(hash, sight.column(key + 8 * n + 2 * m + e)))
                                    x[i][n][2 * h + e] *= 0.0f;
                        }
                    }
                }
                MT_UNROLL
                for (int c = 0; c < KEYS / 16; c++) mt_as_left(weights[c][i], x[i], c);
            }
        }
        copies.wait();
        __syncthreads(); /* values are there, and nobody reads keys any more */
        if (key + KEYS < keys.stop) k.fetch<D, KEYS, THREADS>(copies, k_tile, key + KEYS);
        if (looks) {
            MT_UNROLL
            for (int c = 0; c < KEYS / 16; c++) mt_gather<D, D, TILES>(sums, weights[c], v_tile, c, 0);
        }
    }
    MT_UNROLL
    for (int i = 0; i < TILES; i++) {
        float by[2];
        MT_UNROLL
        for (int h = 0; h < 2; h++) {
            const int at = own + 16 * i + 8 * h + g;
            const float all = row_sum(total[i][h]);
            const bool is_blind = all == 0.0f; /* it saw no key */
            by[h] = is_blind ? 0.0f : sight.keep_scale / all;
            if (m == 0 && at < sight.s) lse[at] = is_blind ? MT_LOWEST : mt_fma(shift[i][h], LN_2, MT_LOG(all));
        }
        out.put_sums<D>(own + 16 * i, 0, sums[i], by[0], by[1]);
    }
}

/* From products that are a score, before the scale, and dO v: p, as dropout leaves it, and the slope of the score. */
static __device__ __forceinline__ void weigh(const mt_sight &sight, int i, int j, bool seen, float *x, float *y,
                                             float scale, float shift, float delta, mt_word row, mt_word column) {
    const float score = sight.scores && seen ? *sight.kept(i, j) : mt_times(*x, scale);
    const float p = seen ? mt_exp2(mt_fma(score, LOG2_E, -shift)) : 0.0f;
    const float kept = !sight.rows ? 1.0f : sight.keeps(row, column) ? sight.keep_scale : 0.0f;
    *y = seen ? p * (*y * kept - delta) : 0.0f;
    *x = p * kept;
}

/* The same where all is seen, and nothing dropped or kept. */
static __device__ __forceinline__ void weigh_plainly(float *x, float *y, float scale, float shift, float delta) {
    *x = mt_exp2(mt_fma(mt_times(*x, scale), LOG2_E, -shift));
    *y = *x * (*y - delta);
}

/* Both products of a tile of scores: x = a of the first factors, y that of the others.  Own tiles are held in registers
 * where these are many enough. */
template <int D>
struct mt_own {
    enum { HOLDS = D <= 64 };
    const mt_chunk *tile;
    int row;
    mt_word held[HOLDS ? D / 16 : 1][1][4];

    __device__ __forceinline__ void hold() {
        if (HOLDS) {
            MT_UNROLL
            for (int c = 0; c < D / 16; c++) mt_left<D>(held[HOLDS ? c : 0][0], tile, row, c);
        }
    }

    template <int COUNT>
    __device__ __forceinline__ void dots(float (*sums)[COUNT / 8][4], const mt_chunk *other) {
        mt_no_sums<COUNT, 1>(sums);
        MT_UNROLL
        for (int c = 0; c < D / 16; c++) {
            if (!HOLDS) mt_left<D>(held[0][0], tile, row, c);
            mt_dots<D, COUNT, 1>(sums, held[HOLDS ? c : 0], other, c);
        }
    }
};

template <int D, int WARPS, int KEYS, int STAGES>
static __device__ __forceinline__ void backward_queries(const mt_sight &sight, const mt_matrix &grad,
                                                        const mt_matrix &q, const mt_matrix &k, const mt_matrix &v,
                                                        const float *lse, const float *delta, const mt_result &dq,
                                                        float scale, int turn) {
    constexpr int ROWS = 16 * WARPS, THREADS = 32 * WARPS;
    __shared__ mt_chunk q_tile[ROWS * D / 8], g_tile[ROWS * D / 8];
    __shared__ mt_chunk k_tile[STAGES][KEYS * D / 8], v_tile[STAGES][KEYS * D / 8];
    const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16, g = lane >> 2, m = lane & 3;
    const int query = ((sight.s + ROWS - 1) / ROWS - 1 - turn) * ROWS, own = query + row;
    const int start = mt_span_of(sight, query, ROWS).earliest / KEYS * KEYS;
    const int stop = sight.last(mt_least(query + ROWS, sight.s) - 1), latest = mt_span_of(sight, own, 16).latest;
    float sums[1][D / 8][4], shift[2], slope[2];
    mt_word hash[2];
    mt_no_sums<D, 1>(sums);
    MT_UNROLL
    for (int h = 0; h < 2; h++) {
        const int at = own + 8 * h + g;
        shift[h] = at < sight.s ? finite_shift(lse[at] * LOG2_E) : 0.0f;
        slope[h] = at < sight.s ? delta[at] : 0.0f;
        hash[h] = sight.row(at);
    }
    mt_copies copies;
    mt_own<D> own_q = {q_tile, row}, own_g = {g_tile, row};
    if (start < stop) {
        q.fetch<D, ROWS, THREADS>(copies, q_tile, query);
        grad.fetch<D, ROWS, THREADS>(copies, g_tile, query);
        k.fetch<D, KEYS, THREADS>(copies, k_tile[0], start);
        v.fetch<D, KEYS, THREADS>(copies, v_tile[0], start);
        copies.wait();
        __syncthreads();
        own_q.hold();
        own_g.hold();
    }
    int stage = 0;
    for (int key = start; key < stop; key += KEYS) {
        copies.wait();
        __syncthreads(); /* this stage is there, and nobody reads the other one any more */
        const int next = (stage + 1) % STAGES;
        if (STAGES > 1 && key + KEYS < stop) {
            k.fetch<D, KEYS, THREADS>(copies, k_tile[next], key + KEYS);
            v.fetch<D, KEYS, THREADS>(copies, v_tile[next], key + KEYS);
        }
        if (!sight.causal || key < own + 16) {
            float x[1][KEYS / 8][4], y[1][KEYS / 8][4];
            if (!sight.scores) own_q.template dots<KEYS>(x, k_tile[stage]);
            own_g.template dots<KEYS>(y, v_tile[stage]);
            const bool is_plain = all_seen(sight, own, 16, key, KEYS, latest) && !sight.rows && !sight.scores;
            MT_UNROLL
            for (int h = 0; h < 2; h++) {
                if (is_plain) {
                    MT_UNROLL
                    for (int n = 0; n < KEYS / 8; n++) {
                        MT_UNROLL
                        for (int e = 2 * h; e < 2 * h + 2; e++)
                            weigh_plainly(&x[0][n][e], &y[0][n][e], scale, shift[h], slope[h]);
                    }
                    continue;
                }
                const int i = own + 8 * h + g, first = sight.first(i), last = sight.last(i);
                MT_UNROLL
                for (int n = 0; n < KEYS / 8; n++) {
                    MT_UNROLL
                    for (int e = 0; e < 2; e++) {
                        const int j = key + 8 * n + 2 * m + e;
                        const bool seen = j >= first && j < last && sight.lets(i, j);
                        const mt_word column = sight.rows ? sight.column(j) : 0u;
                        weigh(sight, i, j, seen, &x[0][n][2 * h + e], &y[0][n][2 * h + e], scale, shift[h], slope[h],
                              hash[h], column);
                    }
                }
            }
            MT_UNROLL
            for (int c = 0; c < KEYS / 16; c++) {
                mt_word slopes[1][4];
                mt_as_left(slopes[0], y[0], c);
                mt_gather<D, D, 1>(sums, slopes, k_tile[stage], c, 0);
            }
        }
        if (STAGES == 1 && key + KEYS < stop) {
            __syncthreads();
            k.fetch<D, KEYS, THREADS>(copies, k_tile[0], key + KEYS);
            v.fetch<D, KEYS, THREADS>(copies, v_tile[0], key + KEYS);
        }
        stage = next;
    }
    dq.put_sums<D>(own, 0, sums[0], scale, scale);
}

/* The first block of queries, from one on, of which any sees a key before `key`. */
template <int QUERIES>
static __device__ __forceinline__ int that_look(const mt_sight &sight, int query, int stop, int key) {
    while (sight.firsts && query < stop && mt_span_of(sight, query, QUERIES).earliest >= key) query += QUERIES;
    return query;
}

template <int D, int WARPS, int QUERIES, int STAGES, int COLUMNS>
static __device__ __forceinline__ void backward_keys(const mt_sight &sight, const mt_matrix &grad, const mt_matrix &q,
                                                     const mt_matrix &k, const mt_matrix &v, const float *lse,
                                                     const float *delta, const mt_result &dk, const mt_result &dv,
                                                     float scale, int turn) {
    constexpr int ROWS = 16 * WARPS, THREADS = 32 * WARPS;
    __shared__ mt_chunk k_tile[ROWS * D / 8], v_tile[ROWS * D / 8];
    __shared__ mt_chunk q_tile[STAGES][QUERIES * D / 8], g_tile[STAGES][QUERIES * D / 8];
    const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16, g = lane >> 2, m = lane & 3;
    const int key = turn * ROWS, own = key + row, column = blockIdx.y * COLUMNS;
    const mt_queries queries = mt_queries_of(sight, key, key + ROWS);
    float of_keys[1][COLUMNS / 8][4], of_values[1][COLUMNS / 8][4];
    mt_no_sums<COLUMNS, 1>(of_keys);
    mt_no_sums<COLUMNS, 1>(of_values);
    const mt_word hash[2] = {sight.rows ? sight.column(own + g) : 0u, sight.rows ? sight.column(own + g + 8) : 0u};
    mt_copies copies;
    mt_own<D> own_k = {k_tile, row}, own_v = {v_tile, row};
    int query = that_look<QUERIES>(sight, queries.start / QUERIES * QUERIES, queries.stop, key + ROWS), stage = 0;
    if (query < queries.stop) {
        k.fetch<D, ROWS, THREADS>(copies, k_tile, key);
        v.fetch<D, ROWS, THREADS>(copies, v_tile, key);
        q.fetch<D, QUERIES, THREADS>(copies, q_tile[0], query);
        grad.fetch<D, QUERIES, THREADS>(copies, g_tile[0], query);
        copies.wait();
        __syncthreads();
        own_k.hold();
        own_v.hold();
    }
    while (query < queries.stop) {
        copies.wait();
        __syncthreads(); /* this stage is there, and nobody reads the other one any more */
        const int then = that_look<QUERIES>(sight, query + QUERIES, queries.stop, key + ROWS);
        const int next = (stage + 1) % STAGES;
        if (STAGES > 1 && then < queries.stop) {
            q.fetch<D, QUERIES, THREADS>(copies, q_tile[next], then);
            grad.fetch<D, QUERIES, THREADS>(copies, g_tile[next], then);
        }
        if (!sight.causal || own < query + QUERIES) {
            /* What belongs to a query waits in the lane of its number. */
            const int asks = query + lane;
            const bool is_there = lane < QUERIES && asks < sight.s;
            const float its_shift = is_there ? finite_shift(lse[asks] * LOG2_E) : 0.0f;
            const float its_slope = is_there ? delta[asks] : 0.0f;
            float x[1][QUERIES / 8][4], y[1][QUERIES / 8][4]; /* keys by queries */
            if (!sight.scores) own_k.template dots<QUERIES>(x, q_tile[stage]);
            own_v.template dots<QUERIES>(y, g_tile[stage]);
            /* Of queries beyond the last nothing would come, but by a key that is infinite. */
            const int latest = mt_most(0, sight.since + query + QUERIES - 1);
            const bool is_plain = !sight.rows && !sight.scores && !sight.firsts && query + QUERIES <= sight.s &&
                                  all_seen(sight, query, QUERIES, own, 16, latest);
            if (is_plain) {
                MT_UNROLL
                for (int n = 0; n < QUERIES / 8; n++) {
                    MT_UNROLL
                    for (int e = 0; e < 2; e++) {
                        const float shift = __shfl_sync(MT_ALL_LANES, its_shift, 8 * n + 2 * m + e);
                        const float slope = __shfl_sync(MT_ALL_LANES, its_slope, 8 * n + 2 * m + e);
                        weigh_plainly(&x[0][n][e], &y[0][n][e], scale, shift, slope);
                        weigh_plainly(&x[0][n][2 + e], &y[0][n][2 + e], scale, shift, slope);
                    }
                }
            } else {
                const mt_word its_row = sight.row(asks);
                const int its_first = sight.first(asks), its_last = sight.last(asks);
                MT_UNROLL
                for (int n = 0; n < QUERIES / 8; n++) {
                    MT_UNROLL
                    for (int e = 0; e < 2; e++) {
                        const int of = 8 * n + 2 * m + e;
                        const float shift = __shfl_sync(MT_ALL_LANES, its_shift, of);
                        const float slope = __shfl_sync(MT_ALL_LANES, its_slope, of);
                        const mt_word word = __shfl_sync(MT_ALL_LANES, its_row, of);
                        const int first = __shfl_sync(MT_ALL_LANES, its_first, of);
                        const int last = __shfl_sync(MT_ALL_LANES, its_last, of);
                        MT_UNROLL
                        for (int h = 0; h < 2; h++) {
                            const int i = query + of, j = own + 8 * h + g;
                            const bool seen = j >= first && j < last && sight.lets(i, j);
                            weigh(sight, i, j, seen, &x[0][n][2 * h + e], &y[0][n][2 * h + e], scale, shift, slope,
                                  word, hash[h]);
                        }
                    }
                }
            }
            MT_UNROLL
            for (int c = 0; c < QUERIES / 16; c++) {
                mt_word left[1][4];
                mt_as_left(left[0], x[0], c);
                mt_gather<D, COLUMNS, 1>(of_values, left, g_tile[stage], c, column / 8);
                mt_as_left(left[0], y[0], c);
                mt_gather<D, COLUMNS, 1>(of_keys, left, q_tile[stage], c, column / 8);
            }
        }
        if (STAGES == 1 && then < queries.stop) {
            __syncthreads();
            q.fetch<D, QUERIES, THREADS>(copies, q_tile[0], then);
            grad.fetch<D, QUERIES, THREADS>(copies, g_tile[0], then);
        }
        query = then, stage = next;
    }
    dk.put_sums<COLUMNS>(own, column, of_keys[0], scale, scale);
    dv.put_sums<COLUMNS>(own, column, of_values[0], 1.0f, 1.0f);
}

#define ARRAY(x) const STORE *__restrict__ x, mt_long x##_b, mt_long x##_h, mt_long x##_s
#define RESULT(x) void *__restrict__ x, mt_long x##_b, mt_long x##_h, mt_long x##_s, mt_long x##_wide
#define ROWS_OF(x, length) \
    const mt_matrix x##_rows = {x + sample * x##_b + head * x##_h, x##_s, (int)length, (int)d, by_chunks != 0}
#define INTO(x, length)                                                                           \
    const mt_result x##_rows = {                                                                  \
        x##_wide ? (void *)(static_cast<float *>(x) + sample * x##_b + head * x##_h)              \
                 : (void *)(static_cast<STORE *>(x) + sample * x##_b + head * x##_h),             \
        x##_s, (int)length, (int)d, x##_wide != 0, by_chunks != 0}

extern "C" __global__ void __launch_bounds__(32 * FORWARD_WARPS)
    attention_forward(ARRAY(q), ARRAY(k), ARRAY(v), RESULT(out), float *__restrict__ lse, mt_long by_chunks,
              MT_SIGHT_PARAMETERS) {
    BLOCK_OF_HEADS;
    ROWS_OF(q, s);
    ROWS_OF(k, t);
    ROWS_OF(v, t);
    INTO(out, s);
    forward<MT_WIDTH, FORWARD_TILES, FORWARD_WARPS, FORWARD_KEYS>(sight, q_rows, k_rows, v_rows, out_rows,
                                                                  lse + pair * s, scale, turn);
}

extern "C" __global__ void __launch_bounds__(32 * BACKWARD_WARPS, 3)
    attention_queries(ARRAY(grad), ARRAY(q), ARRAY(k), ARRAY(v), const float *__restrict__ lse,
                      const float *__restrict__ delta, RESULT(dq), mt_long by_chunks, MT_SIGHT_PARAMETERS) {
    BLOCK_OF_HEADS;
    ROWS_OF(grad, s);
    ROWS_OF(q, s);
    ROWS_OF(k, t);
    ROWS_OF(v, t);
    INTO(dq, s);
    backward_queries<MT_WIDTH, BACKWARD_WARPS, BACKWARD_STREAM, BACKWARD_STAGES>(
        sight, grad_rows, q_rows, k_rows, v_rows, lse + pair * s, delta + pair * s, dq_rows, scale, turn);
}

extern "C" __global__ void __launch_bounds__(32 * BACKWARD_WARPS)
    attention_keys(ARRAY(grad), ARRAY(q), ARRAY(k), ARRAY(v), const float *__restrict__ lse,
                   const float *__restrict__ delta, RESULT(dk), RESULT(dv), mt_long by_chunks, MT_SIGHT_PARAMETERS) {
    BLOCK_OF_HEADS;
    ROWS_OF(grad, s);
    ROWS_OF(q, s);
    ROWS_OF(k, t);
    ROWS_OF(v, t);
    INTO(dk, t);
    INTO(dv, t);
    backward_keys<MT_WIDTH, BACKWARD_WARPS, BACKWARD_STREAM, BACKWARD_STAGES, BACKWARD_COLUMNS>(
        sight, grad_rows, q_rows, k_rows, v_rows, lse + pair * s, delta + pair * s, dk_rows, dv_rows, scale, turn);
}

#endif
