/* Cross-entropy of rows of logits, and its gradient: one pass over the logits each.
 *
 * A block has a row, a thread two times four of its elements at a time.  Four are neighbours, which are moved as one
 * where they may be, or (of a width that is no multiple of four, whose rows begin anywhere) elements a block apart,
 * which a warp reads next to each other.
 */
#define LOSS_FOURS 2 /* that are on their way to a thread at once */

struct loss_row {
    mt_long width;
    mt_long thread_apart, apart; /* from a thread's elements to the next one's, and between its four */
    bool as_one;

    __device__ __forceinline__ mt_long first() const { return threadIdx.x * thread_apart; }
    __device__ __forceinline__ mt_long next(mt_long at) const { return at + 4 * (mt_long)blockDim.x; }

    /* The four elements from `at` on; beyond the row -inf, whose exponential is 0. */
    __device__ __forceinline__ void load(const STORE *row, mt_long at, REAL *x) const {
        if (as_one && at < width) {
            mt_load_four(row + at, x);
        } else {
            for (int k = 0; k < 4; k++) x[k] = at + k * apart < width ? mt_load(row + at + k * apart) : -MT_INFINITY;
        }
    }
    __device__ __forceinline__ void store(STORE *row, mt_long at, const REAL *x) const {
        if (as_one && at < width) {
            mt_store_four(row + at, x);
        } else {
            for (int k = 0; k < 4; k++)
                if (at + k * apart < width) mt_store(row + at + k * apart, x[k]);
        }
    }
};

static __device__ __forceinline__ loss_row loss_row_of(mt_long width, bool by_fours) {
    if (width % 4 == 0) return {width, 4, 1, by_fours};
    return {width, 1, (mt_long)blockDim.x, false};
}

/* lse, the logarithm of the sum of exponentials of each row, and its loss: lse less the logit of the target, lse alone
 * where that is held elsewhere, 0 where the row does not count; NaN of a target that is no column. */
extern "C" __global__ void cross_entropy(const STORE *__restrict__ logits, const mt_long *__restrict__ targets,
                                         mt_long ignore, REAL *__restrict__ lse, REAL *__restrict__ losses,
                                         mt_long rows, mt_long width) {
    const loss_row elements = loss_row_of(width, mt_by_fours(logits));
    for (mt_long i = blockIdx.x; i < rows; i += gridDim.x) {
        const STORE *row = logits + i * width;
        /* The exponentials are added up while the highest logit is still looked for. */
        REAL highest = MT_LOWEST, total = REAL_C(0.0);
        for (mt_long at = elements.first(); at < width;) {
            REAL x[LOSS_FOURS][4];
            for (int f = 0; f < LOSS_FOURS; f++, at = elements.next(at)) elements.load(row, at, x[f]);
            REAL top = highest;
            for (int f = 0; f < LOSS_FOURS; f++)
                for (int k = 0; k < 4; k++) top = x[f][k] > top ? x[f][k] : top; /* NaN is passed over here */
            if (top > highest) {
                total *= mt_exp(highest - top);
                highest = top;
            }
            for (int f = 0; f < LOSS_FOURS; f++)
                for (int k = 0; k < 4; k++) total += mt_exp(x[f][k] - highest); /* ... and comes out of the sum */
        }
        const REAL top = mt_block_max(highest);
        total = mt_block_sum(total * mt_exp(highest - top));
        if (threadIdx.x == 0) {
            total = total < REAL_C(1.0) ? REAL_C(1.0) : total; /* the highest contributes 1, unless there is none */
            const REAL log_sum = MT_LOG(total) + top;
            const mt_long target = targets[i];
            REAL loss = target < 0 ? log_sum : MT_INFINITY - MT_INFINITY;
            if (target >= 0 && target < width) loss = log_sum - mt_load(row + target);
            lse[i] = log_sum;
            losses[i] = target == ignore ? REAL_C(0.0) : loss;
        }
    }
}

/* The sum of the losses, formed in double; one block. */
extern "C" __global__ void __launch_bounds__(1024)
cross_entropy_total(const REAL *__restrict__ losses, REAL *__restrict__ total, mt_long rows) {
    double sum = 0.0;
    for (mt_long i = threadIdx.x; i < rows; i += blockDim.x) sum += (double)losses[i];
    sum = mt_block_sum(sum);
    if (threadIdx.x == 0) *total = (REAL)sum;
}

/* grad (exp(logits - lse) - one_hot(target)); 0 in rows that do not count, whatever stands in them. */
extern "C" __global__ void cross_entropy_backward(const REAL *__restrict__ grad, const STORE *__restrict__ logits,
                                                  const mt_long *__restrict__ targets, const REAL *__restrict__ lse,
                                                  mt_long ignore, STORE *__restrict__ out, mt_long rows,
                                                  mt_long width) {
    const loss_row elements = loss_row_of(width, mt_by_fours(logits) && mt_by_fours(out));
    const REAL scale = *grad;
    for (mt_long i = blockIdx.x; i < rows; i += gridDim.x) {
        const STORE *row = logits + i * width;
        const mt_long target = targets[i];
        const REAL log_sum = lse[i];
        if (target == ignore) {
            const REAL zeros[4] = {REAL_C(0.0), REAL_C(0.0), REAL_C(0.0), REAL_C(0.0)};
            for (mt_long at = elements.first(); at < width; at = elements.next(at))
                elements.store(out + i * width, at, zeros);
            continue;
        }
        for (mt_long begin = elements.first(); begin < width;) {
            REAL x[LOSS_FOURS][4];
            mt_long at = begin;
            for (int f = 0; f < LOSS_FOURS; f++, at = elements.next(at)) elements.load(row, at, x[f]);
            for (int f = 0; f < LOSS_FOURS; f++, begin = elements.next(begin)) {
                for (int k = 0; k < 4; k++) {
                    const REAL p = mt_exp(x[f][k] - log_sum);
                    x[f][k] = (begin + k * elements.apart == target ? p - REAL_C(1.0) : p) * scale;
                }
                elements.store(out + i * width, begin, x[f]);
            }
        }
    }
}
