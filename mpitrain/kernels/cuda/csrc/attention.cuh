/* What the kernels of attention have in common: which keys a query sees, which weights dropout leaves, where kept
 * scores lie, and the sum that backward takes from each query's slopes.
 *
 * Arrays are (samples, heads, s or t, d) with any strides, in elements, but that of d, which is 1.
 */

#define MT_STRIPE 64 /* queries whose kept scores are as long as those of the last of them, with causal attention */

static __device__ __forceinline__ int mt_least(mt_long a, mt_long b) { return (int)(a < b ? a : b); }
static __device__ __forceinline__ int mt_most(mt_long a, mt_long b) { return (int)(a > b ? a : b); }

/* A product that is rounded before anything is added to it: a score has the same bits whoever makes it. */
static __device__ __forceinline__ REAL mt_times(REAL a, REAL b) {
#ifndef __CUDA_ARCH__
    return a * b;
#elif REAL_IS_FLOAT
    return __fmul_rn(a, b);
#else
    return __dmul_rn(a, b);
#endif
}

/* One head's setting. */
struct mt_sight {
    int s, t, d;
    bool causal;
    mt_long since;             /* query i sees no key before since + i */
    const mt_long *firsts;     /* (s) nor one before this; or NULL */
    const unsigned char *mask; /* nonzero where a query may look, or NULL */
    mt_long mask_s, mask_t;    /* bytes to the next query, and key */
    const mt_row *rows;        /* (s) hashes of the queries' dropout, or NULL */
    mt_word threshold;         /* a weight whose word is at least this is kept */
    REAL keep_scale;           /* 1 / (1 - p) */
    const mt_long *keys;       /* (t) columns of the keys in the dropout's mask; NULL: 0, 1, ... */
    REAL *scores;              /* scale q k^T, kept from forward to backward; or NULL */

    /* The keys that a query sees, if the mask lets it, are first .. last - 1; a row past the last query sees none. */
    __device__ __forceinline__ int first(int i) const {
        if (i >= s) return t;
        const mt_long told = firsts ? firsts[i] : 0, slid = since + i, later = told > slid ? told : slid;
        return later < 0 ? 0 : mt_least(later, t);
    }

    __device__ __forceinline__ int last(int i) const { return i >= s ? 0 : causal ? i + 1 : t; }

    __device__ __forceinline__ bool lets(int i, int j) const { return !mask || mask[i * mask_s + j * mask_t]; }

    /* Dropout: the words of a query and of a key, and whether their weight is kept. */
    __device__ __forceinline__ mt_word row(int i) const { return rows && i < s ? mt_fold(rows[i]) : 0u; }

    __device__ __forceinline__ mt_word column(int j) const {
        return mt_column((mt_word)(keys && j < t ? keys[j] : (mt_long)j));
    }

    __device__ __forceinline__ bool keeps(mt_word row, mt_word column) const {
        return mt_mix32(row ^ column) >= threshold;
    }

    /* The first key of the stripe of a query, and that after the last, with kept scores. */
    __device__ __forceinline__ int stripe_start(int i) const {
        return causal ? mt_most(0, since + i / MT_STRIPE * MT_STRIPE) : 0;
    }

    __device__ __forceinline__ int stripe_stop(int i) const {
        return causal ? mt_least(s, i / MT_STRIPE * MT_STRIPE + MT_STRIPE) : t;
    }

    /* Where the score of a query and a key of its stripe is kept.  The keys of stripes grow until the first leaves. */
    __device__ __forceinline__ REAL *kept(int i, int j) const {
        if (!causal) return scores + (mt_long)i * t + j;
        const mt_long stripe = i / MT_STRIPE, grown = -since / MT_STRIPE + 1, growing = stripe < grown ? stripe : grown;
        const mt_long before = MT_STRIPE * (MT_STRIPE * (growing * (growing + 1) / 2) +
                                            (stripe - growing) * (MT_STRIPE - since));
        const int start = stripe_start(i);
        return scores + before + (i - stripe * MT_STRIPE) * (stripe_stop(i) - start) + (j - start);
    }

    /* Keep a score for backward: what a query does not see is never read, but nothing saved is left to chance. */
    __device__ __forceinline__ void keep(int i, int j, REAL score) const {
        if (i < s && j >= stripe_start(i) && j < stripe_stop(i))
            *kept(i, j) = j >= first(i) && j < last(i) ? score : REAL_C(0.0);
    }
};

/* The parameters of a kernel from which it makes the sight of a head. */
#define MT_SIGHT_PARAMETERS                                                                                          \
    mt_long samples, mt_long heads, mt_long s, mt_long t, mt_long d, REAL scale, mt_long causal, mt_long since,      \
        const mt_long *firsts, const unsigned char *mask, mt_long mask_b, mt_long mask_h, mt_long mask_s,            \
        mt_long mask_t, const mt_row *rows, mt_long threshold, REAL keep_scale, const mt_long *keys, REAL *scores,   \
        mt_long scores_b, mt_long scores_h

#define MT_SIGHT(sample, head)                                                                                     \
    {(int)s, (int)t, (int)d, causal != 0, since, firsts ? firsts + sample * s : firsts,                            \
     mask ? mask + sample * mask_b + head * mask_h : mask, mask_s, mask_t,                                         \
     rows ? rows + (sample * heads + head) * s : rows, (mt_word)threshold, keep_scale, keys,                       \
     scores ? scores + sample * scores_b + head * scores_h : scores}

/* Which head a block works on, and in which turn; the numbers of blocks count heads first. */
#define BLOCK_OF_HEADS                                                                               \
    const mt_long pair = blockIdx.x % (samples * heads), sample = pair / heads, head = pair % heads; \
    const int turn = (int)(blockIdx.x / (samples * heads));                                          \
    const mt_sight sight = MT_SIGHT(sample, head)

/* The first of the keys that any of some queries sees, and the first that all of them see if it is before their last;
 * the same in each lane. */
struct mt_span { int earliest, latest; };

static __device__ __forceinline__ mt_span mt_span_of(const mt_sight &sight, int query, int count) {
    int earliest = sight.t, latest = 0;
    for (int i = query + (threadIdx.x & 31); i < query + count && i < sight.s; i += 32) {
        const int first = sight.first(i);
        earliest = mt_least(earliest, first);
        latest = mt_most(latest, first);
    }
    return {-mt_warp_max(-earliest), mt_warp_max(latest)};
}

/* Whether all of some queries see all of some keys; no query there begins later than `latest`. */
static __device__ __forceinline__ bool all_seen(const mt_sight &sight, int query, int queries, int key, int keys,
                                                int latest) {
    return !sight.mask && key + keys <= sight.t && latest <= key && (!sight.causal || key + keys <= query + 1);
}

/* The first and the last key that a block of queries has to look at: with kept scores all of its stripes. */
struct mt_keys { int start, stop; };

static __device__ __forceinline__ mt_keys mt_keys_of(const mt_sight &sight, int query, int count) {
    const int last = mt_least(query + count, sight.s) - 1;
    if (sight.scores) return {sight.stripe_start(query), sight.stripe_stop(last)};
    return {mt_span_of(sight, query, count).earliest, sight.last(last)};
}

/* The queries that may see any of the keys start .. stop - 1. */
struct mt_queries { int start, stop; };

static __device__ __forceinline__ mt_queries mt_queries_of(const mt_sight &sight, int start, int stop) {
    const mt_long beyond = mt_least(stop, sight.t) - sight.since; /* the first whose keys begin after these */
    return {sight.causal ? start : 0, mt_least(sight.s, mt_most(0, beyond))};
}

/* delta (samples, heads, s): the sum over d of grad y, a warp to a row. */
extern "C" __global__ void delta_of(const STORE *__restrict__ grad, mt_long grad_b, mt_long grad_h, mt_long grad_s,
                                    const STORE *__restrict__ y, mt_long y_b, mt_long y_h, mt_long y_s,
                                    REAL *__restrict__ delta, mt_long samples, mt_long heads, mt_long s, mt_long d) {
    const mt_long warps = (mt_long)gridDim.x * (blockDim.x >> 5);
    for (mt_long row = (mt_long)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); row < samples * heads * s;
         row += warps) {
        const mt_long sample = row / (heads * s), head = row / s % heads, i = row % s;
        const STORE *const g = grad + sample * grad_b + head * grad_h + i * grad_s;
        const STORE *const o = y + sample * y_b + head * y_h + i * y_s;
        REAL sum = REAL_C(0.0);
        for (mt_long j = threadIdx.x & 31; j < d; j += 32) sum = mt_fma(mt_load(g + j), mt_load(o + j), sum);
        sum = mt_warp_sum(sum);
        if ((threadIdx.x & 31) == 0) delta[row] = sum;
    }
}
