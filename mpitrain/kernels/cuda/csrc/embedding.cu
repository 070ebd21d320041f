/* Rows added to those rows of a table whose numbers (ids) they have, repeated ones in the order in which they stand.
 *
 * First the ids are sorted.  Then blocks take PART of the sorted rows each, and add up each run of equal ids: a run that
 * lies within the part goes to the table at once, what sticks out on either side is kept, and a last kernel puts such
 * pieces together.  Every row of the table is written by one thread of one block, so nothing depends on who comes first.
 */
#include "rows.cuh"

#define SORT_THREADS 256
#define PART 32
#define AHEAD 8 /* rows that are loaded before the first of them is added */

/* The stable order of ids by counting: the place of a row is the number of rows that come before it.  A block has 32
 * rows, one to a lane, and its warps share out whom they are compared with.  n^2 comparisons: for up to 2^16 ids. */
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
sort_ids(const mt_long *__restrict__ ids, mt_long *__restrict__ order, mt_long *__restrict__ sorted, mt_long n) {
    __shared__ mt_long others[SORT_THREADS];
    __shared__ int before[SORT_THREADS / 32][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const mt_long mine = (mt_long)blockIdx.x * 32 + lane;
    const mt_long id = mine < n ? ids[mine] : 0;
    int count = 0;
    for (mt_long first = 0; first < n; first += SORT_THREADS) {
        const mt_long other = first + threadIdx.x;
        __syncthreads(); /* the last ones are compared */
        others[threadIdx.x] = other < n ? ids[other] : 0x7fffffffffffffffll; /* behind every id */
        __syncthreads();
        for (int k = warp * 32; k < warp * 32 + 32; k++)
            count += others[k] < id || (others[k] == id && first + k < mine);
    }
    before[warp][lane] = count;
    __syncthreads();
    if (warp == 0 && mine < n) {
        for (int w = 1; w < SORT_THREADS / 32; w++) count += before[w][lane];
        order[count] = mine;
        sorted[count] = id;
    }
}

/* table[id] += sum, of this thread's columns; ids that the table does not have write nothing. */
static __device__ __forceinline__ void add_to_table(void *table, mt_long is_wide, mt_long table_rows, mt_long width,
                                                    mt_long id, const mt_quad &quad, const REAL *sum) {
    if (id < 0 || id >= table_rows) return;
    REAL x[4];
    if (is_wide) {
        REAL *row = static_cast<REAL *>(table) + id * width;
        quad.load(row, x);
        for (int k = 0; k < 4; k++) x[k] += sum[k];
        quad.store(row, x);
    } else {
        STORE *row = static_cast<STORE *>(table) + id * width;
        quad.load(row, x);
        for (int k = 0; k < 4; k++) x[k] += sum[k];
        quad.store(row, x);
    }
}

/* The columns of a block are 4 blockDim.x.  Pieces (parts, 2, width): of the run that comes from the part before, and
 * of the one that begins here and goes on. */
extern "C" __global__ void add_rows(const mt_long *__restrict__ order, const mt_long *__restrict__ sorted,
                                    const STORE *__restrict__ rows, void *table, mt_long is_wide, mt_long table_rows,
                                    REAL *__restrict__ pieces, mt_long n, mt_long width, mt_long tiles) {
    const mt_long part = blockIdx.x / tiles, begin = part * PART, end = begin + PART < n ? begin + PART : n;
    const mt_long column = 4 * (blockIdx.x % tiles * blockDim.x + threadIdx.x);
    const bool by_fours = width % 4 == 0;
    const mt_quad from = mt_quad_at(column, width, by_fours && mt_by_fours(rows));
    const mt_quad into = mt_quad_at(column, width, by_fours && mt_by_fours(static_cast<REAL *>(table)));
    const mt_quad one_by_one = {column, from.count, false};
    REAL sum[4] = {REAL_C(0.0), REAL_C(0.0), REAL_C(0.0), REAL_C(0.0)};
    bool from_before = begin > 0 && sorted[begin - 1] == sorted[begin];
    for (mt_long first = begin; first < end; first += AHEAD) {
        REAL x[AHEAD][4];
        MT_UNROLL
        for (int k = 0; k < AHEAD; k++)
            if (first + k < end) from.load(rows + order[first + k] * width, x[k]);
        MT_UNROLL
        for (int k = 0; k < AHEAD; k++) {
            const mt_long at = first + k;
            if (at >= end) break;
            for (int c = 0; c < 4; c++) sum[c] += x[k][c];
            const mt_long id = sorted[at];
            const bool goes_on = at + 1 < n && sorted[at + 1] == id;
            if (goes_on && at + 1 < end) continue;
            if (from_before || goes_on) {
                one_by_one.store(pieces + (2 * part + !from_before) * width, sum);
            } else {
                add_to_table(table, is_wide, table_rows, width, id, into, sum);
            }
            for (int c = 0; c < 4; c++) sum[c] = REAL_C(0.0);
            from_before = false;
        }
    }
}

/* The runs of several parts: the block of the part in which one begins adds up its pieces. */
extern "C" __global__ void add_pieces(const mt_long *__restrict__ sorted, const REAL *__restrict__ pieces, void *table,
                                      mt_long is_wide, mt_long table_rows, mt_long n, mt_long width, mt_long tiles) {
    const mt_long part = blockIdx.x / tiles, begin = part * PART, end = begin + PART;
    if (end >= n) return;
    const mt_long id = sorted[end - 1];
    const bool begins_here = begin == 0 || sorted[begin - 1] != id;
    if (!begins_here || sorted[end] != id) return;
    mt_long low = end, high = n; /* the run ends behind `low`, not behind `high` */
    while (high - low > 1) {
        const mt_long middle = low + (high - low) / 2;
        if (sorted[middle] == id) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const mt_quad quad = mt_quad_at(4 * (blockIdx.x % tiles * blockDim.x + threadIdx.x), width, false);
    REAL sum[4], x[4];
    quad.load(pieces + (2 * part + 1) * width, sum);
    for (mt_long next = part + 1; next <= low / PART; next++) {
        quad.load(pieces + 2 * next * width, x);
        for (int c = 0; c < 4; c++) sum[c] += x[c];
    }
    add_to_table(table, is_wide, table_rows, width, id, quad, sum);
}
