/* Dropout, the sum that ends a residual branch, and noise: what hashes of rows and columns decide. */
#include "rows.cuh"

extern "C" __global__ void dropout(const STORE *__restrict__ x, const mt_row *__restrict__ hashes,
                                   STORE *__restrict__ y, mt_long rows, mt_long width, mt_word threshold, REAL scale) {
    const mt_tile tile = mt_tile_of(width, mt_by_fours(x) && mt_by_fours(y));
    mt_word columns[4];
    mt_hash_columns(tile.quad, columns);
    for (mt_long i = tile.row; i < rows; i += tile.rows_apart) {
        const mt_word row = mt_fold(hashes[i]);
        REAL v[4];
        tile.quad.load(x + i * width, v);
        for (int k = 0; k < 4; k++) v[k] = mt_mix32(row ^ columns[k]) >= threshold ? v[k] * scale : REAL_C(0.0);
        tile.quad.store(y + i * width, v);
    }
}

/* out = x + y */
extern "C" __global__ void residual(const STORE *__restrict__ x, const STORE *__restrict__ y, STORE *__restrict__ out,
                                    mt_long size) {
    const bool by_fours = mt_by_fours(x) && mt_by_fours(y) && mt_by_fours(out);
    MT_EACH_QUAD(at, size) {
        const mt_quad quad = mt_quad_at(at, size, by_fours);
        REAL a[4], b[4];
        quad.load(x, a);
        quad.load(y, b);
        for (int k = 0; k < 4; k++) a[k] += b[k];
        quad.store(out, a);
    }
}

/* out = x + dropout(y + bias), where there is a bias, and dropout where there are hashes. */
extern "C" __global__ void residual_branch(const STORE *__restrict__ x, const STORE *__restrict__ y, const void *bias,
                                           mt_long is_wide, const mt_row *__restrict__ hashes, STORE *__restrict__ out,
                                           mt_long rows, mt_long width, mt_word threshold, REAL scale) {
    const mt_tile tile = mt_tile_of(width, mt_by_fours(x) && mt_by_fours(y) && mt_by_fours(out));
    mt_word columns[4];
    REAL shift[4];
    mt_hash_columns(tile.quad, columns);
    mt_load_vector(tile.quad, bias, is_wide, shift);
    for (mt_long i = tile.row; i < rows; i += tile.rows_apart) {
        REAL a[4], b[4];
        tile.quad.load(x + i * width, a);
        tile.quad.load(y + i * width, b);
        for (int k = 0; k < 4; k++) b[k] += shift[k];
        if (hashes) {
            const mt_word row = mt_fold(hashes[i]);
            for (int k = 0; k < 4; k++)
                a[k] = mt_fma(mt_mix32(row ^ columns[k]) >= threshold ? b[k] : REAL_C(0.0), scale, a[k]);
        } else {
            for (int k = 0; k < 4; k++) a[k] += b[k];
        }
        tile.quad.store(out + i * width, a);
    }
}

/* y = x times a number between 1 - amount and 1 + amount, another for each element. */
extern "C" __global__ void jitter(const STORE *__restrict__ x, const mt_row *__restrict__ hashes,
                                  STORE *__restrict__ y, mt_long rows, mt_long width, REAL amount) {
    const mt_tile tile = mt_tile_of(width, mt_by_fours(x) && mt_by_fours(y));
    mt_word columns[4];
    mt_hash_columns(tile.quad, columns);
    for (mt_long i = tile.row; i < rows; i += tile.rows_apart) {
        const mt_word row = mt_fold(hashes[i]);
        REAL v[4];
        tile.quad.load(x + i * width, v);
        for (int k = 0; k < 4; k++) v[k] *= mt_near_one(mt_mix32(row ^ columns[k]), amount);
        tile.quad.store(y + i * width, v);
    }
}
