/* Four neighbours at a time: passes over elements, and over rows by threads that keep their columns.
 *
 * A warp has 128 neighbours, four to a lane.  They are moved as one where an array begins at a multiple of four
 * elements, else one by one: who computes what, and so every bit of the results, is the same in both cases.
 */

#define MT_TILE 128

/* Up to four neighbours of arrays that all have as many elements. */
struct mt_quad {
    mt_long at; /* the first */
    int count;
    bool as_one;

    template <typename T>
    __device__ __forceinline__ void load(const T *p, REAL *x) const {
        if (as_one) {
            mt_load_four(p + at, x);
        } else {
            for (int k = 0; k < 4; k++) x[k] = k < count ? mt_load(p + at + k) : REAL_C(0.0);
        }
    }

    template <typename T>
    __device__ __forceinline__ void store(T *p, const REAL *x) const {
        if (as_one) {
            mt_store_four(p + at, x);
        } else {
            for (int k = 0; k < 4; k++)
                if (k < count) mt_store(p + at + k, x[k]);
        }
    }
};

/* The quad that begins at element `at` of `size`. */
static __device__ __forceinline__ mt_quad mt_quad_at(mt_long at, mt_long size, bool by_fours) {
    const mt_long left = size - at;
    const int count = left < 0 ? 0 : left < 4 ? (int)left : 4;
    return {at, count, by_fours && count == 4};
}

/* The first elements of a thread's quads, over all of `size`. */
#define MT_EACH_QUAD(at, size)                                                                              \
    for (mt_long at = 4 * ((mt_long)blockIdx.x * blockDim.x + threadIdx.x); at < (size);                    \
         at += 4 * (mt_long)gridDim.x * blockDim.x)

/* Blocks of a pass over rows are numbered by tiles of columns and groups of rows; the warps of a group take its rows in
 * turn.  The launcher makes a whole number of groups. */
struct mt_tile {
    mt_quad quad;           /* this thread's columns */
    mt_long row, rows_apart; /* its first row, and how far it is to the next */
    mt_long group;
};

static __device__ __forceinline__ mt_tile mt_tile_of(mt_long width, bool by_fours) {
    const int tiles = (int)((width + MT_TILE - 1) / MT_TILE), warps = (int)blockDim.x >> 5;
    const int tile = (int)blockIdx.x % tiles, group = (int)blockIdx.x / tiles, groups = (int)gridDim.x / tiles;
    const mt_long column = (mt_long)tile * MT_TILE + 4 * (threadIdx.x & 31);
    const mt_quad quad = mt_quad_at(column, width, by_fours && width % 4 == 0);
    return {quad, (mt_long)group * warps + (threadIdx.x >> 5), (mt_long)groups * warps, group};
}

/* Elements of a vector that holds REAL numbers, or STOREs as the arrays beside it; 0 without one. */
static __device__ __forceinline__ void mt_load_vector(const mt_quad &quad, const void *p, mt_long is_wide, REAL *x) {
    const mt_quad one_by_one = {quad.at, quad.count, false};
    if (p && is_wide) {
        one_by_one.load(static_cast<const REAL *>(p), x);
    } else if (p) {
        one_by_one.load(static_cast<const STORE *>(p), x);
    } else {
        for (int k = 0; k < 4; k++) x[k] = REAL_C(0.0);
    }
}

/* The hashes of a quad's columns. */
static __device__ __forceinline__ void mt_hash_columns(const mt_quad &quad, mt_word *hashes) {
    for (int k = 0; k < 4; k++) hashes[k] = mt_column((mt_word)(quad.at + k));
}

/* Per column the sum over a block's warps of what each has, of `quad`; whole once warp 0 has it.  Blocks have
 * MT_SUM_WARPS warps. */
#define MT_SUM_WARPS 8

static __device__ __forceinline__ void mt_sum_warps(REAL *x) {
    __shared__ REAL parts[MT_SUM_WARPS][MT_TILE];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    for (int k = 0; k < 4; k++) parts[warp][4 * lane + k] = x[k];
    __syncthreads();
    if (warp == 0)
        for (int k = 0; k < 4; k++)
            for (int other = 1; other < MT_SUM_WARPS; other++) x[k] += parts[other][4 * lane + k];
}
