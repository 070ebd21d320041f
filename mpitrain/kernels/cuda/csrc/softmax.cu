/* Softmax along any dim, and its gradient.
 *
 * What is added up is a line: `length` elements, `inner` apart.  A block has one, or each thread has one: where they
 * are short, and where neighbours belong to different lines, so that neighbouring threads read neighbours.
 */

/* The lines of an array, and which elements of one this thread has. */
struct lines {
    mt_long length, inner, count;
    bool of_blocks;

    __device__ __forceinline__ mt_long first() const {
        return of_blocks ? (mt_long)blockIdx.x : (mt_long)blockIdx.x * blockDim.x + threadIdx.x;
    }
    __device__ __forceinline__ mt_long step() const {
        return of_blocks ? (mt_long)gridDim.x : (mt_long)gridDim.x * blockDim.x;
    }
    __device__ __forceinline__ mt_long begin(mt_long line) const {
        return line / inner * length * inner + line % inner;
    }
    __device__ __forceinline__ mt_long element() const { return of_blocks ? threadIdx.x : 0; }
    __device__ __forceinline__ mt_long apart() const { return of_blocks ? blockDim.x : 1; }
    __device__ __forceinline__ REAL sum(REAL x) const { return of_blocks ? mt_block_sum(x) : x; }
    __device__ __forceinline__ REAL max(REAL x) const { return of_blocks ? mt_block_max(x) : x; }
};

/* Where the mask has a line: the lines as up to three dims, and how far apart their elements lie, and those of a line.
 * NULL: there is none. */
struct line_mask {
    const unsigned char *p;
    mt_long middle, last;                  /* lengths of the second and the third dim */
    mt_long far, between, near, along;

    __device__ __forceinline__ const unsigned char *at(mt_long line) const {
        return p + line / (middle * last) * far + line / last % middle * between + line % last * near;
    }
};

/* exp(x - highest) is added up while the highest is still looked for: one pass over memory. */
extern "C" __global__ void softmax(const STORE *__restrict__ x, STORE *__restrict__ y, mt_long count, mt_long length,
                                   mt_long inner, mt_long of_blocks, const unsigned char *__restrict__ mask,
                                   mt_long middle, mt_long last, mt_long far, mt_long between, mt_long near,
                                   mt_long along) {
    const lines all = {length, inner, count, of_blocks != 0};
    const line_mask masked = {mask, middle, last, far, between, near, along};
    for (mt_long line = all.first(); line < count; line += all.step()) {
        const mt_long begin = all.begin(line);
        const unsigned char *seen = mask ? masked.at(line) : nullptr;
        REAL highest = MT_LOWEST, total = REAL_C(0.0);
        for (mt_long j = all.element(); j < length; j += all.apart()) {
            if (seen && !seen[j * along]) continue;
            const REAL z = mt_load(x + begin + j * inner);
            if (z > highest) {
                total *= mt_exp(highest - z);
                highest = z;
            }
            total += mt_exp(z - highest); /* NaN is no maximum: it comes out of the sum */
        }
        const REAL top = all.max(highest);
        total = all.sum(total * mt_exp(highest - top));
        total = total < REAL_C(1.0) ? REAL_C(1.0) : total; /* the largest element contributes 1, unless there is none */
        for (mt_long j = all.element(); j < length; j += all.apart()) {
            const mt_long at = begin + j * inner;
            const bool sees = !seen || seen[j * along];
            mt_store(y + at, sees ? mt_exp(mt_load(x + at) - top) / total : REAL_C(0.0) / total);
        }
    }
}

/* dx = y (grad - sum of grad y) */
extern "C" __global__ void softmax_backward(const STORE *__restrict__ grad, const STORE *__restrict__ y,
                                            STORE *__restrict__ dx, mt_long count, mt_long length, mt_long inner,
                                            mt_long of_blocks) {
    const lines all = {length, inner, count, of_blocks != 0};
    for (mt_long line = all.first(); line < count; line += all.step()) {
        const mt_long begin = all.begin(line);
        REAL total = REAL_C(0.0);
        for (mt_long j = all.element(); j < length; j += all.apart()) {
            const mt_long at = begin + j * inner;
            total += mt_load(grad + at) * mt_load(y + at);
        }
        total = all.sum(total);
        for (mt_long j = all.element(); j < length; j += all.apart()) {
            const mt_long at = begin + j * inner;
            mt_store(dx + at, mt_load(y + at) * (mt_load(grad + at) - total));
        }
    }
}
