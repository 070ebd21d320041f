/* Attention of floats and doubles, block by block, forward and backward: nothing of size s t is ever in memory.
 * COLUMNS is defined by the source.
 *
 * A block of 16 by 16 threads owns OWN rows (queries; or keys, where their gradients are made) and streams through the
 * others, STREAM at a time.  Of each tile of scores a thread holds four rows and every sixteenth column; the weights
 * go through shared memory, transposed, and are multiplied with the values.  Of d a block makes COLUMNS columns: where
 * there are more, further blocks make the scores once more and the next columns.
 *
 * Forward keeps a running maximum and sum of each row; backward needs neither, since lse tells them.  dq, and dk with
 * dv, are made by kernels of their own, so that each number is a sum in one fixed order.
 *
 * Source: Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithms 1 and 4; the queries as outer loop: Dao 2023,
 * arXiv:2307.08691.
 */
#if !MT_HALVES

#define SIDE 16
#define OWN 64
#define STREAM (REAL_IS_FLOAT ? 64 : 32)
#define CHUNK (REAL_IS_FLOAT ? 32 : 16)     /* of d, that are multiplied from shared memory at a time */
#define PACK (16 / (int)sizeof(REAL))       /* numbers that are moved at once */
#define HELD (STREAM / SIDE)                /* columns of a tile that a thread holds */
#define LINE (CHUNK + PACK)                 /* from a staged row to the next: no two of eight lanes meet in a bank */
#define WEIGHTS (OWN + PACK)                /* from a column of weights to the next */
#define ROOM ((OWN + STREAM) * LINE)        /* staged rows of both factors; or of values */

#define RESIDENT (REAL_IS_FLOAT ? 2 : 1)    /* blocks that a multiprocessor is to hold at once */

struct alignas(16) mt_pack { REAL at[PACK]; };

/* Rows of d numbers of one head. */
struct mt_matrix {
    const REAL *data;
    mt_long step;
    int count;
};

/* Some columns of some rows of a matrix -> rows of shared memory, `line` apart; 0 where there are none. */
template <int WIDTH>
static __device__ __forceinline__ void stage(REAL *to, int line, int rows, const mt_matrix &x, int first, int column,
                                             int d, bool by_packs) {
    for (int i = threadIdx.x; i < rows * (WIDTH / PACK); i += SIDE * SIDE) {
        const int row = i / (WIDTH / PACK), at = i % (WIDTH / PACK) * PACK;
        const int width = first + row < x.count ? d - column - at : 0;
        const REAL *const from = x.data + (first + row) * x.step + column + at;
        mt_pack pack;
        if (by_packs && width > 0)
            pack = *reinterpret_cast<const mt_pack *>(from);
        else
            for (int e = 0; e < PACK; e++) pack.at[e] = e < width ? from[e] : REAL_C(0.0);
        *reinterpret_cast<mt_pack *>(to + row * line + at) = pack;
    }
}

/* The products of this thread's rows of `own` and `stream`, whose first are given: sums over d, in its order. */
static __device__ __forceinline__ void dots(REAL (*sums)[HELD], const mt_matrix &own, int row, const mt_matrix &stream,
                                            int column, int d, bool by_packs, REAL *room) {
    const REAL *const a = room + threadIdx.x / SIDE * 4 * LINE, *const b = room + (OWN + threadIdx.x % SIDE) * LINE;
    MT_UNROLL
    for (int r = 0; r < 4; r++) {
        MT_UNROLL
        for (int n = 0; n < HELD; n++) sums[r][n] = REAL_C(0.0);
    }
    for (int begin = 0; begin < d; begin += CHUNK) {
        __syncthreads();
        stage<CHUNK>(room, LINE, OWN, own, row, begin, d, by_packs);
        stage<CHUNK>(room + OWN * LINE, LINE, STREAM, stream, column, begin, d, by_packs);
        __syncthreads();
        MT_UNROLL
        for (int k = 0; k < CHUNK; k += PACK) {
            mt_pack left[4];
            MT_UNROLL
            for (int r = 0; r < 4; r++) left[r] = *reinterpret_cast<const mt_pack *>(a + r * LINE + k);
            MT_UNROLL
            for (int n = 0; n < HELD; n++) {
                const mt_pack right = *reinterpret_cast<const mt_pack *>(b + n * SIDE * LINE + k);
                MT_UNROLL
                for (int e = 0; e < PACK; e++) {
                    MT_UNROLL
                    for (int r = 0; r < 4; r++) sums[r][n] = mt_fma(left[r].at[e], right.at[e], sums[r][n]);
                }
            }
        }
    }
}

/* Hand the weights of this thread's rows and columns to the others: `weights` is (STREAM, OWN) in lines of WEIGHTS. */
static __device__ __forceinline__ void hand_out(REAL *weights, const REAL (*of)[HELD]) {
    REAL *const to = weights + threadIdx.x % SIDE * WEIGHTS + threadIdx.x / SIDE * 4;
    MT_UNROLL
    for (int n = 0; n < HELD; n++) {
        MT_UNROLL
        for (int r = 0; r < 4; r++) to[n * SIDE * WEIGHTS + r] = of[r][n];
    }
}

/* sums += weights x: of this thread's rows, and of its columns c / PACK * SIDE * PACK + c % PACK + its share. */
static __device__ __forceinline__ void gather(REAL (*sums)[COLUMNS / SIDE], const REAL *weights, const mt_matrix &x,
                                              int row, int column, int d, bool by_packs, REAL *room) {
    constexpr int AT_ONCE = (REAL_IS_FLOAT ? 4096 : 1024) / COLUMNS < STREAM ? (REAL_IS_FLOAT ? 4096 : 1024) / COLUMNS
                                                                            : STREAM;
    static_assert(AT_ONCE * COLUMNS <= ROOM, "values fit where factors lay");
    static_assert(STREAM % AT_ONCE == 0, "a stream is a whole number of times what fits");
    const REAL *const mine = weights + threadIdx.x / SIDE * 4, *const values = room + threadIdx.x % SIDE * PACK;
    for (int begin = 0; begin < STREAM; begin += AT_ONCE) {
        __syncthreads();
        stage<COLUMNS>(room, COLUMNS, AT_ONCE, x, row + begin, column, d, by_packs);
        __syncthreads();
        for (int j = 0; j < AT_ONCE; j++) {
            REAL weight[4];
            MT_UNROLL
            for (int r = 0; r < 4; r += PACK) {
                const mt_pack pack = *reinterpret_cast<const mt_pack *>(mine + (begin + j) * WEIGHTS + r);
                MT_UNROLL
                for (int e = 0; e < PACK; e++) weight[r + e] = pack.at[e];
            }
            MT_UNROLL
            for (int c = 0; c < COLUMNS / SIDE; c += PACK) {
                const mt_pack value = *reinterpret_cast<const mt_pack *>(values + j * COLUMNS + c * SIDE);
                MT_UNROLL
                for (int e = 0; e < PACK; e++) {
                    MT_UNROLL
                    for (int r = 0; r < 4; r++) sums[r][c + e] = mt_fma(weight[r], value.at[e], sums[r][c + e]);
                }
            }
        }
    }
}

/* Write a row of what `gather` made, times a number. */
static __device__ __forceinline__ void put(REAL *to, const REAL *sums, REAL by, int column, int d) {
    MT_UNROLL
    for (int c = 0; c < COLUMNS / SIDE; c++) {
        const int at = column + c / PACK * SIDE * PACK + threadIdx.x % SIDE * PACK + c % PACK;
        if (at < d) to[at] = sums[c] * by;
    }
}

/* A thread's share of a row is held by 16 lanes side by side. */
static __device__ __forceinline__ REAL row_max(REAL x) {
    for (int far = SIDE / 2; far; far >>= 1) x = mt_larger(x, __shfl_xor_sync(MT_ALL_LANES, x, far));
    return x;
}

static __device__ __forceinline__ REAL row_sum(REAL x) {
    for (int far = SIDE / 2; far; far >>= 1) x += __shfl_xor_sync(MT_ALL_LANES, x, far);
    return x;
}

#define NO_SUMS(sums)                                                            \
    MT_UNROLL                                                                    \
    for (int r = 0; r < 4; r++) {                                                \
        MT_UNROLL                                                                \
        for (int c = 0; c < COLUMNS / SIDE; c++) sums[r][c] = REAL_C(0.0);       \
    }

/* What is asked of each number of a thread's tile in turn, by code that is not repeated for each, and so leaves
 * registers to the sums: bit r HELD + n is that of row r and column n.  `own` and `other` are the first row and column.
 */
#ifdef __CUDACC__
#define ONE_BY_ONE _Pragma("unroll 1")
#else
#define ONE_BY_ONE
#endif

struct mt_score { int query, key; };

template <bool OWNS_QUERIES>
static __device__ __forceinline__ mt_score score_at(int at, int own, int other) {
    const int mine = own + at / HELD, its = other + at % HELD * SIDE;
    return OWNS_QUERIES ? mt_score{mine, its} : mt_score{its, mine};
}

/* Whether the query sees the key. */
template <bool OWNS_QUERIES>
static __device__ __forceinline__ mt_word seen_of(const mt_sight &sight, int own, int other) {
    mt_word seen = 0u;
    ONE_BY_ONE
    for (int at = 0; at < 4 * HELD; at++) {
        const mt_score of = score_at<OWNS_QUERIES>(at, own, other);
        const bool is_seen = of.key >= sight.first(of.query) && of.key < sight.last(of.query);
        seen |= (mt_word)(is_seen && sight.lets(of.query, of.key)) << at;
    }
    return seen;
}

/* Whether dropout keeps the weight. */
template <bool OWNS_QUERIES>
static __device__ __forceinline__ mt_word left_of(const mt_sight &sight, int own, int other) {
    if (!sight.rows) return ~0u;
    mt_word left = 0u;
    ONE_BY_ONE
    for (int at = 0; at < 4 * HELD; at++) {
        const mt_score of = score_at<OWNS_QUERIES>(at, own, other);
        left |= (mt_word)sight.keeps(sight.row(of.query), sight.column(of.key)) << at;
    }
    return left;
}

/* Scores to where they wait for backward, by way of this thread's own places among the weights. */
static __device__ __forceinline__ void keep(const mt_sight &sight, REAL *weights, const REAL (*scores)[HELD], int own,
                                            int other) {
    const REAL *const mine = weights + threadIdx.x % SIDE * WEIGHTS + threadIdx.x / SIDE * 4;
    hand_out(weights, scores);
    ONE_BY_ONE
    for (int at = 0; at < 4 * HELD; at++)
        sight.keep(own + at / HELD, other + at % HELD * SIDE, mine[at % HELD * SIDE * WEIGHTS + at / HELD]);
}

/* And back: of those that are seen. */
template <bool OWNS_QUERIES>
static __device__ __forceinline__ void recall(const mt_sight &sight, REAL *weights, REAL (*scores)[HELD], int own,
                                              int other, mt_word seen) {
    REAL *const mine = weights + threadIdx.x % SIDE * WEIGHTS + threadIdx.x / SIDE * 4;
    ONE_BY_ONE
    for (int at = 0; at < 4 * HELD; at++) {
        const mt_score of = score_at<OWNS_QUERIES>(at, own, other);
        mine[at % HELD * SIDE * WEIGHTS + at / HELD] = seen >> at & 1u ? *sight.kept(of.query, of.key) : REAL_C(0.0);
    }
    MT_UNROLL
    for (int n = 0; n < HELD; n++) {
        MT_UNROLL
        for (int r = 0; r < 4; r++) scores[r][n] = mine[n * SIDE * WEIGHTS + r];
    }
}

static __device__ __forceinline__ void scaled(REAL (*scores)[HELD], REAL scale) {
    MT_UNROLL
    for (int r = 0; r < 4; r++) {
        MT_UNROLL
        for (int n = 0; n < HELD; n++) scores[r][n] = mt_times(scores[r][n], scale);
    }
}

/* Own rows are queries; the last of them come first, which with causal attention have most to do. */
static __device__ __forceinline__ void forward(const mt_sight &sight, const mt_matrix &q, const mt_matrix &k,
                                               const mt_matrix &v, REAL *out, mt_long out_s, REAL *lse, REAL scale,
                                               int turn, bool by_packs) {
    __shared__ mt_pack room_packs[ROOM / PACK], weight_packs[STREAM * WEIGHTS / PACK];
    REAL *const room = &room_packs[0].at[0], *const weights = &weight_packs[0].at[0];
    const int blocks = (sight.s + OWN - 1) / OWN, query = (blocks - 1 - turn) * OWN, column = blockIdx.y * COLUMNS;
    const int own = query + threadIdx.x / SIDE * 4, lane = threadIdx.x % SIDE, d = sight.d;
    const mt_keys keys = mt_keys_of(sight, query, OWN);
    const int latest = mt_span_of(sight, query, OWN).latest;
    REAL sums[4][COLUMNS / SIDE], highest[4], total[4];
    NO_SUMS(sums)
    MT_UNROLL
    for (int r = 0; r < 4; r++) highest[r] = MT_LOWEST, total[r] = REAL_C(0.0);
    for (int key = keys.start / STREAM * STREAM; key < keys.stop; key += STREAM) {
        REAL p[4][HELD];
        dots(p, q, query, k, key, d, by_packs, room);
        scaled(p, scale);
        if (sight.scores && column == 0) keep(sight, weights, p, own, key + lane);
        const bool is_plain = all_seen(sight, query, OWN, key, STREAM, latest);
        const mt_word seen = is_plain ? ~0u : seen_of<true>(sight, own, key + lane);
        const mt_word left = left_of<true>(sight, own, key + lane);
        MT_UNROLL
        for (int r = 0; r < 4; r++) {
            REAL peak = highest[r];
            MT_UNROLL
            for (int n = 0; n < HELD; n++) {
                p[r][n] = seen >> (r * HELD + n) & 1u ? p[r][n] : -MT_INFINITY;
                peak = mt_larger(peak, p[r][n]);
            }
            peak = row_max(peak);
            const REAL factor = mt_exp(highest[r] - peak);
            highest[r] = peak, total[r] *= factor;
            MT_UNROLL
            for (int c = 0; c < COLUMNS / SIDE; c++) sums[r][c] *= factor;
            MT_UNROLL
            for (int n = 0; n < HELD; n++) {
                p[r][n] = mt_exp(p[r][n] - peak);
                total[r] += p[r][n];
                p[r][n] *= left >> (r * HELD + n) & 1u ? REAL_C(1.0) : REAL_C(0.0);
            }
        }
        hand_out(weights, p);
        gather(sums, weights, v, key, column, d, by_packs, room);
    }
    MT_UNROLL
    for (int r = 0; r < 4; r++) {
        REAL all = row_sum(total[r]);
        all = all < REAL_C(1.0) ? REAL_C(1.0) : all; /* the largest score contributes exactly 1 */
        if (own + r >= sight.s) continue;
        put(out + (own + r) * out_s, sums[r], sight.keep_scale / all, column, d);
        if (lane == 0 && column == 0) lse[own + r] = highest[r] + MT_LOG(all);
    }
}

/* From a score and dO v: p, as dropout leaves it, and the slope of the score. */
static __device__ __forceinline__ void weigh(REAL *p, REAL *slope, bool seen, bool left, REAL keep_scale, REAL lse,
                                             REAL delta) {
    const REAL kept = left ? keep_scale : REAL_C(0.0), weight = seen ? mt_exp(*p - lse) : REAL_C(0.0);
    *slope = seen ? weight * (*slope * kept - delta) : REAL_C(0.0);
    *p = weight * kept;
}

static __device__ __forceinline__ void backward_queries(const mt_sight &sight, const mt_matrix &grad,
                                                        const mt_matrix &q, const mt_matrix &k, const mt_matrix &v,
                                                        const REAL *lse, const REAL *delta, REAL *dq, mt_long dq_s,
                                                        REAL scale, int turn, bool by_packs) {
    __shared__ mt_pack room_packs[ROOM / PACK], weight_packs[STREAM * WEIGHTS / PACK];
    REAL *const room = &room_packs[0].at[0], *const weights = &weight_packs[0].at[0];
    const int blocks = (sight.s + OWN - 1) / OWN, query = (blocks - 1 - turn) * OWN, column = blockIdx.y * COLUMNS;
    const int own = query + threadIdx.x / SIDE * 4, lane = threadIdx.x % SIDE, d = sight.d;
    const mt_span span = mt_span_of(sight, query, OWN);
    const int stop = sight.last(mt_least(query + OWN, sight.s) - 1);
    REAL sums[4][COLUMNS / SIDE];
    NO_SUMS(sums)
    for (int key = span.earliest / STREAM * STREAM; key < stop; key += STREAM) {
        REAL p[4][HELD], dp[4][HELD];
        const bool is_plain = !sight.scores && all_seen(sight, query, OWN, key, STREAM, span.latest);
        const mt_word seen = is_plain ? ~0u : seen_of<true>(sight, own, key + lane);
        const mt_word left = left_of<true>(sight, own, key + lane);
        if (!sight.scores) {
            dots(p, q, query, k, key, d, by_packs, room);
            scaled(p, scale);
        }
        dots(dp, grad, query, v, key, d, by_packs, room);
        if (sight.scores) recall<true>(sight, weights, p, own, key + lane, seen);
        MT_UNROLL
        for (int r = 0; r < 4; r++) {
            const int i = own + r;
            const REAL shift = i < sight.s ? lse[i] : REAL_C(0.0), slope = i < sight.s ? delta[i] : REAL_C(0.0);
            MT_UNROLL
            for (int n = 0; n < HELD; n++) {
                const int at = r * HELD + n;
                weigh(&p[r][n], &dp[r][n], seen >> at & 1u, left >> at & 1u, sight.keep_scale, shift, slope);
            }
        }
        hand_out(weights, dp);
        gather(sums, weights, k, key, column, d, by_packs, room);
    }
    MT_UNROLL
    for (int r = 0; r < 4; r++)
        if (own + r < sight.s) put(dq + (own + r) * dq_s, sums[r], scale, column, d);
}

static __device__ __forceinline__ void backward_keys(const mt_sight &sight, const mt_matrix &grad, const mt_matrix &q,
                                                     const mt_matrix &k, const mt_matrix &v, const REAL *lse,
                                                     const REAL *delta, REAL *dk, mt_long dk_t, REAL *dv, mt_long dv_t,
                                                     REAL scale, int turn, bool by_packs) {
    __shared__ mt_pack room_packs[ROOM / PACK], weight_packs[STREAM * WEIGHTS / PACK];
    REAL *const room = &room_packs[0].at[0], *const weights = &weight_packs[0].at[0];
    const int key = turn * OWN, column = blockIdx.y * COLUMNS, d = sight.d;
    const int own = key + threadIdx.x / SIDE * 4, lane = threadIdx.x % SIDE;
    const mt_queries queries = mt_queries_of(sight, key, key + OWN);
    REAL of_keys[4][COLUMNS / SIDE], of_values[4][COLUMNS / SIDE];
    NO_SUMS(of_keys)
    NO_SUMS(of_values)
    for (int query = queries.start / STREAM * STREAM; query < queries.stop; query += STREAM) {
        const mt_span span = mt_span_of(sight, query, STREAM); /* alike in all warps */
        if (span.earliest >= key + OWN) continue;
        REAL p[4][HELD], dp[4][HELD];
        const bool is_plain = !sight.scores && query + STREAM <= sight.s &&
                              all_seen(sight, query, STREAM, key, OWN, span.latest);
        const mt_word seen = is_plain ? ~0u : seen_of<false>(sight, own, query + lane);
        const mt_word left = left_of<false>(sight, own, query + lane);
        if (!sight.scores) {
            dots(p, k, key, q, query, d, by_packs, room);
            scaled(p, scale);
        }
        dots(dp, v, key, grad, query, d, by_packs, room);
        if (sight.scores) recall<false>(sight, weights, p, own, query + lane, seen);
        MT_UNROLL
        for (int n = 0; n < HELD; n++) {
            const int i = query + lane + n * SIDE;
            const REAL shift = i < sight.s ? lse[i] : REAL_C(0.0), slope = i < sight.s ? delta[i] : REAL_C(0.0);
            MT_UNROLL
            for (int r = 0; r < 4; r++) {
                const int at = r * HELD + n;
                weigh(&p[r][n], &dp[r][n], seen >> at & 1u, left >> at & 1u, sight.keep_scale, shift, slope);
            }
        }
        hand_out(weights, p);
        gather(of_values, weights, grad, query, column, d, by_packs, room);
        __syncthreads();
        hand_out(weights, dp);
        gather(of_keys, weights, q, query, column, d, by_packs, room);
    }
    MT_UNROLL
    for (int r = 0; r < 4; r++) {
        if (own + r >= sight.t) continue;
        put(dk + (own + r) * dk_t, of_keys[r], scale, column, d);
        put(dv + (own + r) * dv_t, of_values[r], REAL_C(1.0), column, d);
    }
}

#define ARRAY(x) const REAL *__restrict__ x, mt_long x##_b, mt_long x##_h, mt_long x##_s
#define RESULT(x) REAL *__restrict__ x, mt_long x##_b, mt_long x##_h, mt_long x##_s
#define OF_HEAD(x) (x + sample * x##_b + head * x##_h)
#define ROWS_OF(x, length) const mt_matrix x##_rows = {OF_HEAD(x), x##_s, (int)length}

extern "C" __global__ void __launch_bounds__(SIDE *SIDE, RESIDENT)
    attention_forward(ARRAY(q), ARRAY(k), ARRAY(v), RESULT(out), REAL *__restrict__ lse, mt_long by_packs,
                      MT_SIGHT_PARAMETERS) {
    BLOCK_OF_HEADS;
    ROWS_OF(q, s);
    ROWS_OF(k, t);
    ROWS_OF(v, t);
    forward(sight, q_rows, k_rows, v_rows, OF_HEAD(out), out_s, lse + pair * s, scale, turn, by_packs != 0);
}

extern "C" __global__ void __launch_bounds__(SIDE *SIDE, RESIDENT)
    attention_queries(ARRAY(grad), ARRAY(q), ARRAY(k), ARRAY(v), const REAL *__restrict__ lse,
                      const REAL *__restrict__ delta, RESULT(dq), mt_long by_packs, MT_SIGHT_PARAMETERS) {
    BLOCK_OF_HEADS;
    ROWS_OF(grad, s);
    ROWS_OF(q, s);
    ROWS_OF(k, t);
    ROWS_OF(v, t);
    backward_queries(sight, grad_rows, q_rows, k_rows, v_rows, lse + pair * s, delta + pair * s, OF_HEAD(dq), dq_s,
                     scale, turn, by_packs != 0);
}

extern "C" __global__ void __launch_bounds__(SIDE *SIDE, RESIDENT)
    attention_keys(ARRAY(grad), ARRAY(q), ARRAY(k), ARRAY(v), const REAL *__restrict__ lse,
                   const REAL *__restrict__ delta, RESULT(dk), RESULT(dv), mt_long by_packs, MT_SIGHT_PARAMETERS) {
    BLOCK_OF_HEADS;
    ROWS_OF(grad, s);
    ROWS_OF(q, s);
    ROWS_OF(k, t);
    ROWS_OF(v, t);
    backward_keys(sight, grad_rows, q_rows, k_rows, v_rows, lse + pair * s, delta + pair * s, OF_HEAD(dk), dk_s,
                  OF_HEAD(dv), dv_s, scale, turn, by_packs != 0);
}

#endif
