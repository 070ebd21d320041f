/* Tiles of halves in shared memory, and their products by tensor cores: one warp, 16 rows, fp32 sums.
 *
 * A tile has D columns, in chunks of eight halves.  Chunk c of a row lies at c ^ (row % 8), so that the same chunk of
 * eight rows, which is what an instruction takes at once, is spread over all banks.
 *
 * Fragments are as the PTX ISA has them, of mma.m16n8k16 and ldmatrix.  With g = lane / 4 and m = lane % 4, each lane
 * has, two neighbours to a word, the first in the low half,
 *
 *     a (16 x 16)   a[0] row g,     columns 2m, 2m + 1      a[2] row g,     columns 2m + 8, 2m + 9
 *                   a[1] row g + 8, columns 2m, 2m + 1      a[3] row g + 8, columns 2m + 8, 2m + 9
 *     b (16 x 8)    b[0] rows 2m, 2m + 1, column g          b[1] rows 2m + 8, 2m + 9, column g
 *     c (16 x 8)    c[0], c[1] row g, columns 2m, 2m + 1    c[2], c[3] row g + 8, columns 2m, 2m + 1
 *
 * so sums of 16 columns, rounded, are the left factor of another product as they lie.
 *
 * The instructions want sm_80.  The other branches do the same, lane by lane, where there is no GPU: copies arrive when
 * they are waited for, and not before.
 */

#define MT_JOIN_(a, b) a##b
#define MT_JOIN(a, b) MT_JOIN_(a, b)
#define MT_HALVES_mt_half 1
#define MT_HALVES_mt_brain 1
#define MT_BRAIN_mt_brain 1
#define MT_HALVES MT_JOIN(MT_HALVES_, STORE)
#define MT_BRAIN MT_JOIN(MT_BRAIN_, STORE)

#if MT_HALVES

struct alignas(16) mt_chunk { mt_word at[4]; };

template <int D>
static __device__ __forceinline__ int mt_place(int row, int chunk) {
    return row * (D / 8) + (chunk ^ (row & 7));
}

/* Two floats, each rounded to the nearest half, as a word. */
static __device__ __forceinline__ mt_word mt_pair(float low, float high) {
#ifdef __CUDA_ARCH__
    mt_word pair;
#if MT_BRAIN
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
    return pair;
#else
    STORE a, b;
    mt_store(&a, low);
    mt_store(&b, high);
    return (mt_word)a.bits | (mt_word)b.bits << 16;
#endif
}

/* 2 to the x, to about 2^-22; infinities are its limits. */
static __device__ __forceinline__ float mt_exp2(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return mt_exp(x * 0.693147180559945309417f);
#endif
}

/* ------------------------------------------------------------------------------------- from memory to shared memory */

#ifdef __CUDA_ARCH__

struct mt_copies {
    /* Begin to copy a chunk; 0 where there is none. */
    __device__ __forceinline__ void add(mt_chunk *to, const STORE *from, bool there) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((mt_word)__cvta_generic_to_shared(to)),
                     "l"(from), "r"(there ? 16 : 0));
    }

    /* Until what this thread began is there. */
    __device__ __forceinline__ void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
};

#else

struct mt_copies {
    struct { mt_chunk *to; const STORE *from; } late[128];
    int count = 0;

    __device__ __forceinline__ void add(mt_chunk *to, const STORE *from, bool there) {
        late[count].to = to;
        late[count++].from = there ? from : nullptr;
    }

    __device__ __forceinline__ void wait() {
        for (int i = 0; i < count; i++)
            *late[i].to = late[i].from ? *reinterpret_cast<const mt_chunk *>(late[i].from) : mt_chunk{{0, 0, 0, 0}};
        count = 0;
    }
};

#endif

/* Rows of d halves of one head. */
struct mt_matrix {
    const STORE *data;
    mt_long step;
    int count, d;
    bool by_chunks; /* whether every row begins at a multiple of 16 bytes and has a whole number of chunks */

    /* Begin to bring ROWS rows, from `first` on, into a tile; 0 where there are none. */
    template <int D, int ROWS, int THREADS>
    __device__ __forceinline__ void fetch(mt_copies &copies, mt_chunk *tile, int first) const {
        MT_UNROLL
        for (int i = threadIdx.x; i < ROWS * (D / 8); i += THREADS) {
            const int row = first + i / (D / 8), chunk = i % (D / 8), width = row < count ? d - 8 * chunk : 0;
            mt_chunk *const to = tile + mt_place<D>(i / (D / 8), chunk);
            const STORE *const from = width > 0 ? data + row * step + 8 * chunk : data;
            if (by_chunks) {
                copies.add(to, from, width > 0);
            } else {
                mt_chunk made = {{0, 0, 0, 0}};
                MT_UNROLL
                for (int e = 0; e < 8; e++)
                    if (e < width) made.at[e / 2] |= (mt_word)from[e].bits << (e % 2 * 16);
                *to = made;
            }
        }
    }
};

/* -------------------------------------------------------------------------------------------------- one instruction */

/* Four 8 x 8 matrices; lane 8 i + r says where row r of matrix i lies.  Word i of a lane are the two neighbours 2m and
 * 2m + 1 of row g of matrix i; transposed, of its column g. */
template <bool TRANSPOSED>
static __device__ __forceinline__ void mt_matrices(mt_word *to, const mt_chunk *row) {
#ifdef __CUDA_ARCH__
    const mt_word at = (mt_word)__cvta_generic_to_shared(row);
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(at));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(at));
#else
    __shared__ const mt_chunk *rows[32][32];
    const int lane = threadIdx.x & 31, g = lane >> 2, m = lane & 3;
    const mt_chunk **const of_warp = rows[threadIdx.x >> 5];
    of_warp[lane] = row;
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        if (TRANSPOSED) {
            const mt_word low = of_warp[8 * i + 2 * m]->at[g / 2], high = of_warp[8 * i + 2 * m + 1]->at[g / 2];
            to[i] = (low >> (g % 2 * 16) & 0xffffu) | high >> (g % 2 * 16) << 16;
        } else {
            to[i] = of_warp[8 * i + g]->at[m];
        }
    }
    __syncwarp();
#endif
}

/* c += a b. */
static __device__ __forceinline__ void mt_multiply(float *c, const mt_word *a, const mt_word *b) {
#ifdef __CUDA_ARCH__
#if MT_BRAIN
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
#endif
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    __shared__ mt_word left[32][16][8], right[32][8][8]; /* rows of a, and columns of b, two neighbours to a word */
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, m = lane & 3;
    for (int i = 0; i < 4; i++) left[warp][g + i % 2 * 8][m + i / 2 * 4] = a[i];
    for (int i = 0; i < 2; i++) right[warp][g][m + i * 4] = b[i];
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const mt_word *const row = left[warp][g + i / 2 * 8], *const column = right[warp][2 * m + i % 2];
        for (int k = 0; k < 16; k++) {
            const STORE x = {(unsigned short)(row[k / 2] >> (k % 2 * 16))};
            const STORE y = {(unsigned short)(column[k / 2] >> (k % 2 * 16))};
            c[i] = mt_fma(mt_load(&x), mt_load(&y), c[i]);
        }
    }
    __syncwarp();
#endif
}

/* -------------------------------------------------------------------------------------- products of tiles by a warp */

/* Rows row .. row + 15 of a tile, of its columns 16 k .. 16 k + 15, as a left factor. */
template <int D>
static __device__ __forceinline__ void mt_left(mt_word *a, const mt_chunk *tile, int row, int k) {
    const int lane = threadIdx.x & 31;
    mt_matrices<false>(a, tile + mt_place<D>(row + (lane & 15), 2 * k + (lane >> 4)));
}

/* sums (16 x COUNT) += left (16 x 16) times the transpose of the first COUNT rows of a tile, of its columns 16 k to
 * 16 k + 15: for TILES sums and left factors, with what is fetched once. */
template <int D, int COUNT, int TILES>
static __device__ __forceinline__ void mt_dots(float (*sums)[COUNT / 8][4], const mt_word (*left)[4],
                                               const mt_chunk *tile, int k) {
    const int lane = threadIdx.x & 31, row = (lane & 7) + (lane >> 4) * 8, chunk = 2 * k + (lane >> 3 & 1);
    MT_UNROLL
    for (int n = 0; n < COUNT / 16; n++) {
        mt_word b[4]; /* of rows 16 n .. 16 n + 7, then of the next eight */
        mt_matrices<false>(b, tile + mt_place<D>(16 * n + row, chunk));
        MT_UNROLL
        for (int i = 0; i < TILES; i++) {
            mt_multiply(sums[i][2 * n], left[i], b);
            mt_multiply(sums[i][2 * n + 1], left[i], b + 2);
        }
    }
}

/* sums (16 x COLUMNS) += left (16 x 16) times rows 16 k .. 16 k + 15 of a tile, of its columns from 8 `first` on. */
template <int D, int COLUMNS, int TILES>
static __device__ __forceinline__ void mt_gather(float (*sums)[COLUMNS / 8][4], const mt_word (*left)[4],
                                                 const mt_chunk *tile, int k, int first) {
    const int lane = threadIdx.x & 31, row = 16 * k + (lane & 15), chunk = first + (lane >> 4);
    MT_UNROLL
    for (int n = 0; n < COLUMNS / 16; n++) {
        mt_word b[4]; /* of columns 16 n .. 16 n + 7, then of the next eight */
        mt_matrices<true>(b, tile + mt_place<D>(row, chunk + 2 * n));
        MT_UNROLL
        for (int i = 0; i < TILES; i++) {
            mt_multiply(sums[i][2 * n], left[i], b);
            mt_multiply(sums[i][2 * n + 1], left[i], b + 2);
        }
    }
}

/* Sums as the left factor of the next product: of columns 16 k .. 16 k + 15. */
static __device__ __forceinline__ void mt_as_left(mt_word *a, const float (*sums)[4], int k) {
    a[0] = mt_pair(sums[2 * k][0], sums[2 * k][1]);
    a[1] = mt_pair(sums[2 * k][2], sums[2 * k][3]);
    a[2] = mt_pair(sums[2 * k + 1][0], sums[2 * k + 1][1]);
    a[3] = mt_pair(sums[2 * k + 1][2], sums[2 * k + 1][3]);
}

/* Where a kernel writes rows of d numbers: halves, or floats. */
struct mt_result {
    void *data;
    mt_long step;
    int count, d;
    bool is_wide, by_chunks;

    /* Two neighbours of a row. */
    __device__ __forceinline__ void put(int row, int column, float low, float high) const {
        if (row >= count || column >= d) return;
        const mt_long at = row * step + column;
        if (is_wide) {
            float *const to = static_cast<float *>(data) + at;
            to[0] = low;
            if (column + 1 < d) to[1] = high;
        } else if (by_chunks) {
            *reinterpret_cast<mt_word *>(static_cast<STORE *>(data) + at) = mt_pair(low, high);
        } else {
            STORE *const to = static_cast<STORE *>(data) + at;
            mt_store(to, low);
            if (column + 1 < d) mt_store(to + 1, high);
        }
    }

    /* What a warp has of rows row .. row + 15, times one number for the first eight and one for the others. */
    template <int COLUMNS>
    __device__ __forceinline__ void put_sums(int row, int column, const float (*sums)[4], float by,
                                             float by_other) const {
        const int lane = threadIdx.x & 31, of = row + (lane >> 2);
        MT_UNROLL
        for (int n = 0; n < COLUMNS / 8; n++) {
            const int at = column + 8 * n + 2 * (lane & 3);
            put(of, at, sums[n][0] * by, sums[n][1] * by);
            put(of + 8, at, sums[n][2] * by_other, sums[n][3] * by_other);
        }
    }
};

template <int COLUMNS, int TILES>
static __device__ __forceinline__ void mt_no_sums(float (*sums)[COLUMNS / 8][4]) {
    MT_UNROLL
    for (int i = 0; i < TILES; i++) {
        MT_UNROLL
        for (int n = 0; n < COLUMNS / 8; n++) {
            MT_UNROLL
            for (int e = 0; e < 4; e++) sums[i][n][e] = 0.0f;
        }
    }
}

#endif
