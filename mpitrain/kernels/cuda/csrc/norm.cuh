/* Layer norm and RMS norm, alone and after the sum that ends a residual branch, and their gradients.
 *
 * A block has a row.  Up to NORM_THREADS threads keep it in registers between its passes, NORM_QUADS quads each; of a
 * longer row the passes read it again.  Column sums, of the gradients of weight and bias, are a kernel of their own.
 * Behind rows.cuh.
 */
#define NORM_THREADS 1024
#define NORM_QUADS 2

/* The columns of a thread: this quad of it, or none beyond the row. */
static __device__ __forceinline__ mt_quad norm_quad(int k, mt_long width, bool by_fours) {
    return mt_quad_at(4 * ((mt_long)k * blockDim.x + threadIdx.x), width, by_fours);
}

/* Elements of a vector that holds REALs, or STOREs. */
static __device__ __forceinline__ void norm_weights(const mt_quad &quad, const void *p, mt_long is_wide, REAL *x) {
    if (is_wide) {
        const REAL *wide = static_cast<const REAL *>(p);
        mt_quad_at(quad.at, quad.at + quad.count, mt_by_fours(wide)).load(wide, x);
    } else {
        const STORE *same = static_cast<const STORE *>(p);
        mt_quad_at(quad.at, quad.at + quad.count, mt_by_fours(same)).load(same, x);
    }
}

/* What a row is made of: x, or the sum x + dropout(y + bias), which is kept. */
struct norm_input {
    const STORE *x, *y;
    const void *bias;       /* of the branch; NULL: none */
    mt_long is_wide;
    const mt_row *hashes;   /* of the dropout; NULL: none */
    mt_word threshold;
    REAL scale;
    STORE *sum;
};

/* A quad of row i, which begins at `row`.  A sum is what its array gives back, as `residual` writes it. */
template <bool BRANCH>
static __device__ __forceinline__ void norm_load(const norm_input &in, mt_long i, mt_long row, const mt_quad &quad,
                                                 REAL *z) {
    quad.load(in.x + row, z);
    if (!BRANCH) return;
    REAL y[4];
    quad.load(in.y + row, y);
    if (in.bias) {
        REAL shift[4];
        norm_weights(quad, in.bias, in.is_wide, shift);
        for (int k = 0; k < 4; k++) y[k] += shift[k];
    }
    if (in.hashes) {
        const mt_word hash = mt_fold(in.hashes[i]);
        for (int k = 0; k < 4; k++) {
            const bool kept = mt_mix32(hash ^ mt_column((mt_word)(quad.at + k))) >= in.threshold;
            z[k] = mt_fma(kept ? y[k] : REAL_C(0.0), in.scale, z[k]);
        }
    } else {
        for (int k = 0; k < 4; k++) z[k] += y[k];
    }
    for (int k = 0; k < 4; k++) z[k] = mt_rounded(z[k]);
}

struct norm_output {
    const void *weight, *bias; /* no bias: RMS norm */
    mt_long weight_is_wide, bias_is_wide;
    REAL eps;
    STORE *y;
    REAL *center, *rstd;
};

/* Normalised, scaled and shifted. */
template <bool RMS>
static __device__ __forceinline__ void norm_finish(const norm_output &out, const mt_quad &quad, mt_long row, REAL first,
                                                   REAL mean, REAL r, const REAL *z) {
    REAL w[4], b[4], y[4];
    norm_weights(quad, out.weight, out.weight_is_wide, w);
    if (!RMS) norm_weights(quad, out.bias, out.bias_is_wide, b);
    for (int k = 0; k < 4; k++) y[k] = RMS ? z[k] * r * w[k] : ((z[k] - first) - mean) * r * w[k] + b[k];
    quad.store(out.y + row, y);
}

/* The squares of a quad's elements, less the mean. */
template <bool RMS>
static __device__ __forceinline__ REAL norm_squares(const mt_quad &quad, REAL first, REAL mean, const REAL *z) {
    REAL total = REAL_C(0.0);
    for (int k = 0; k < 4; k++) {
        const REAL off = RMS ? z[k] : (z[k] - first) - mean;
        total += k < quad.count ? off * off : REAL_C(0.0);
    }
    return total;
}

static __device__ __forceinline__ REAL norm_shifted(const mt_quad &quad, REAL first, const REAL *z) {
    REAL total = REAL_C(0.0);
    for (int k = 0; k < 4; k++) total += k < quad.count ? z[k] - first : REAL_C(0.0);
    return total;
}

/* LONG: the row is longer than what registers keep, and read again for each pass; of a branch its sum is, whose quads
 * each thread has written itself. */
template <bool RMS, bool BRANCH, bool LONG>
static __device__ __forceinline__ void norm_row(const norm_input &in, const norm_output &out, mt_long i, mt_long width,
                                                bool by_fours) {
    const mt_long row = i * width;
    const int quads = LONG ? (int)((width + 4 * blockDim.x - 1) / (4 * blockDim.x)) : NORM_QUADS;
    REAL kept[LONG ? 1 : NORM_QUADS][4];
    REAL first = REAL_C(0.0), mean = REAL_C(0.0), total = REAL_C(0.0);
    if (!RMS) {
        const mt_quad start = {0, 1, false};
        REAL z[4];
        norm_load<BRANCH>(in, i, row, start, z);
        first = z[0];
    }
    MT_UNROLL
    for (int q = 0; q < quads; q++) {
        const mt_quad quad = norm_quad(q, width, by_fours);
        REAL *z = kept[LONG ? 0 : q];
        norm_load<BRANCH>(in, i, row, quad, z);
        if (BRANCH) quad.store(in.sum + row, z);
        total += RMS ? norm_squares<RMS>(quad, first, mean, z) : norm_shifted(quad, first, z);
    }
    const STORE *again = BRANCH ? in.sum : in.x;
    if (!RMS) {
        mean = mt_block_sum(total) / (REAL)width;
        total = REAL_C(0.0);
        MT_UNROLL
        for (int q = 0; q < quads; q++) {
            const mt_quad quad = norm_quad(q, width, by_fours);
            REAL *z = kept[LONG ? 0 : q];
            if (LONG) quad.load(again + row, z);
            total += norm_squares<RMS>(quad, first, mean, z);
        }
    }
    const REAL r = REAL_C(1.0) / MT_SQRT(mt_block_sum(total) / (REAL)width + out.eps);
    MT_UNROLL
    for (int q = 0; q < quads; q++) {
        const mt_quad quad = norm_quad(q, width, by_fours);
        REAL *z = kept[LONG ? 0 : q];
        if (LONG) quad.load(again + row, z);
        norm_finish<RMS>(out, quad, row, first, mean, r, z);
    }
    if (threadIdx.x == 0) {
        if (!RMS) out.center[i] = mean;
        out.rstd[i] = r;
    }
}

template <bool RMS, bool BRANCH>
static __device__ __forceinline__ void norm_rows(const norm_input &in, const norm_output &out, mt_long rows,
                                                 mt_long width) {
    bool by_fours = width % 4 == 0 && mt_by_fours(in.x) && mt_by_fours(out.y);
    if (BRANCH) by_fours = by_fours && mt_by_fours(in.y) && mt_by_fours(in.sum);
    const bool is_long = width > 4 * NORM_QUADS * (mt_long)blockDim.x;
    for (mt_long i = blockIdx.x; i < rows; i += gridDim.x) {
        if (is_long) {
            norm_row<RMS, BRANCH, true>(in, out, i, width, by_fours);
        } else {
            norm_row<RMS, BRANCH, false>(in, out, i, width, by_fours);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- gradients */

struct norm_gradient {
    const STORE *grad, *extra, *x; /* no extra: NULL */
    const REAL *center, *rstd;     /* no center: RMS norm */
    const void *weight;
    mt_long is_wide;
    STORE *dx;
};

/* h = grad weight, and n, the normalised row; 0 beyond the row. */
template <bool RMS>
static __device__ __forceinline__ void norm_terms(const norm_gradient &of, const mt_quad &quad, mt_long row, REAL first,
                                                  REAL mean, REAL r, REAL *h, REAL *n) {
    REAL w[4];
    quad.load(of.grad + row, h);
    quad.load(of.x + row, n);
    norm_weights(quad, of.weight, of.is_wide, w);
    for (int k = 0; k < 4; k++) {
        h[k] = k < quad.count ? h[k] * w[k] : REAL_C(0.0);
        n[k] = k < quad.count ? (RMS ? n[k] * r : ((n[k] - first) - mean) * r) : REAL_C(0.0);
    }
}

/* dx = rstd (h - mean(h) - n mean(h n)) + extra; of RMS norm without mean(h). */
template <bool RMS, bool LONG>
static __device__ __forceinline__ void norm_row_backward(const norm_gradient &of, mt_long i, mt_long width,
                                                         bool by_fours) {
    const mt_long row = i * width;
    const int quads = LONG ? (int)((width + 4 * blockDim.x - 1) / (4 * blockDim.x)) : NORM_QUADS;
    REAL kept_h[LONG ? 1 : NORM_QUADS][4], kept_n[LONG ? 1 : NORM_QUADS][4];
    const REAL first = RMS ? REAL_C(0.0) : mt_load(of.x + row), mean = RMS ? REAL_C(0.0) : of.center[i];
    const REAL r = of.rstd[i];
    REAL sum_h = REAL_C(0.0), sum_hn = REAL_C(0.0);
    MT_UNROLL
    for (int q = 0; q < quads; q++) {
        REAL *h = kept_h[LONG ? 0 : q], *n = kept_n[LONG ? 0 : q];
        norm_terms<RMS>(of, norm_quad(q, width, by_fours), row, first, mean, r, h, n);
        for (int k = 0; k < 4; k++) {
            if (!RMS) sum_h += h[k];
            sum_hn += h[k] * n[k];
        }
    }
    const REAL mean_h = RMS ? REAL_C(0.0) : mt_block_sum(sum_h) / (REAL)width;
    const REAL mean_hn = mt_block_sum(sum_hn) / (REAL)width;
    MT_UNROLL
    for (int q = 0; q < quads; q++) {
        const mt_quad quad = norm_quad(q, width, by_fours);
        REAL *h = kept_h[LONG ? 0 : q], *n = kept_n[LONG ? 0 : q];
        if (LONG) norm_terms<RMS>(of, quad, row, first, mean, r, h, n);
        for (int k = 0; k < 4; k++) h[k] = (RMS ? h[k] - n[k] * mean_hn : h[k] - mean_h - n[k] * mean_hn) * r;
        if (of.extra) {
            quad.load(of.extra + row, n);
            for (int k = 0; k < 4; k++) h[k] += n[k];
        }
        quad.store(of.dx + row, h);
    }
}

template <bool RMS>
static __device__ __forceinline__ void norm_rows_backward(const norm_gradient &of, mt_long rows, mt_long width) {
    const bool by_fours = width % 4 == 0 && mt_by_fours(of.grad) && mt_by_fours(of.x) && mt_by_fours(of.dx) &&
                          (!of.extra || mt_by_fours(of.extra));
    const bool is_long = width > 4 * NORM_QUADS * (mt_long)blockDim.x;
    for (mt_long i = blockIdx.x; i < rows; i += gridDim.x) {
        if (is_long) {
            norm_row_backward<RMS, true>(of, i, width, by_fours);
        } else {
            norm_row_backward<RMS, false>(of, i, width, by_fours);
        }
    }
}

/* For each group of rows the sums of grad n and, of layer norm, of grad: sums (groups, 2 or 1, width). */
template <bool RMS>
static __device__ __forceinline__ void norm_columns(const STORE *__restrict__ grad, const STORE *__restrict__ x,
                                                    const REAL *__restrict__ center, const REAL *__restrict__ rstd,
                                                    REAL *__restrict__ sums, mt_long rows, mt_long width) {
    const mt_tile tile = mt_tile_of(width, mt_by_fours(grad) && mt_by_fours(x));
    const mt_quad one_by_one = {tile.quad.at, tile.quad.count, false};
    REAL dw[4] = {REAL_C(0.0), REAL_C(0.0), REAL_C(0.0), REAL_C(0.0)};
    REAL db[4] = {REAL_C(0.0), REAL_C(0.0), REAL_C(0.0), REAL_C(0.0)};
    for (mt_long i = tile.row; i < rows; i += tile.rows_apart) {
        const REAL first = RMS ? REAL_C(0.0) : mt_load(x + i * width), mean = RMS ? REAL_C(0.0) : center[i];
        const REAL r = rstd[i];
        REAL g[4], z[4];
        tile.quad.load(grad + i * width, g);
        tile.quad.load(x + i * width, z);
        for (int k = 0; k < 4; k++) {
            dw[k] += g[k] * (RMS ? z[k] * r : ((z[k] - first) - mean) * r);
            db[k] += g[k];
        }
    }
    sums += tile.group * (RMS ? 1 : 2) * width;
    mt_sum_warps(dw);
    if (threadIdx.x < 32) one_by_one.store(sums, dw);
    if (RMS) return;
    __syncthreads(); /* warp 0 has read what the other sums overwrite */
    mt_sum_warps(db);
    if (threadIdx.x < 32) one_by_one.store(sums + width, db);
}
