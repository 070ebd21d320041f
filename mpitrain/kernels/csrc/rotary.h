/* Rotary positions: the pairs of queries and keys turned.  Read by kernels.c. */

/* Which product is rounded alone is said outright, as in plus_dropped. */
static inline void turn(const REAL *RESTRICT x, const REAL *RESTRICT cosine, const REAL *RESTRICT sine,
                        REAL *RESTRICT y, len half) {
    for (len i = 0; i < half; i++) {
        y[i] = MT_MULADD(x[i], cosine[i], -(x[half + i] * sine[i]));
        y[half + i] = MT_MULADD(x[half + i], cosine[i], x[i] * sine[i]);
    }
}

static inline void copy_head(const REAL *RESTRICT x, REAL *RESTRICT y, len half) {
    for (len j = 0; j < 2 * half; j++) y[j] = x[j];
}

/* Of each row `groups` times `members` heads, of which the last of each group, the values, stay as they are.  The tables
 * have `count` rows, and begin again with every sequence; `first` is the number of the first row. */
static void rotary(const void *x_, const void *cos_, const void *sin_, void *y_, len groups, len members, len half,
                   len first, len rows, len count) {
    const REAL *x = x_, *cosines = cos_, *sines = sin_;
    REAL *y = y_;
    for (len i = first; i < first + rows; i++) {
        const len at = i % count * half;
        for (len group = 0; group < groups; group++) {
            for (len head = 1; head < members; head++, x += 2 * half, y += 2 * half)
                turn(x, cosines + at, sines + at, y, half);
            copy_head(x, y, half);
            x += 2 * half, y += 2 * half;
        }
    }
}

/* The same of all rows, from queries and from keys and values that lie apart: `queries` heads of a group, a key, a value. */
static void rotary_pack(const void *q_, const void *kv_, const void *cos_, const void *sin_, void *y_, len groups,
                        len queries, len half, len rows, len count) {
    const REAL *q = q_, *kv = kv_, *cosines = cos_, *sines = sin_;
    REAL *y = y_;
    const len d = 2 * half;
    for (len i = 0; i < rows; i++) {
        const len at = i % count * half;
        for (len group = 0; group < groups; group++, kv += 2 * d, y += 2 * d) {
            for (len head = 0; head < queries; head++, q += d, y += d) turn(q, cosines + at, sines + at, y, half);
            turn(kv, cosines + at, sines + at, y, half);
            copy_head(kv + d, y + d, half);
        }
    }
}

/* The way back: from one array to two. */
static void rotary_unpack(const void *x_, const void *cos_, const void *sin_, void *q_, void *kv_, len groups,
                          len queries, len half, len rows, len count) {
    const REAL *x = x_, *cosines = cos_, *sines = sin_;
    REAL *q = q_, *kv = kv_;
    const len d = 2 * half;
    for (len i = 0; i < rows; i++) {
        const len at = i % count * half;
        for (len group = 0; group < groups; group++, kv += 2 * d, x += 2 * d) {
            for (len head = 0; head < queries; head++, q += d, x += d) turn(x, cosines + at, sines + at, q, half);
            turn(x, cosines + at, sines + at, kv, half);
            copy_head(x + d, kv + d, half);
        }
    }
}
