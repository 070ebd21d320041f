/* Attention for one sample and head at a time, on tiles that stay in cache.
 *
 * The products are small (a few dozen queries times d), so they are made here, by a register tile of MR rows and two
 * vectors: calling a BLAS for each would cost more than it computes.  Its right operand is packed once a head, columns
 * in panels of NR; its left one is read where it lies, one number at a time, and so may be transposed for nothing.
 *
 * Queries and keys may be of different number: keys that other ranks hold come in calls of their own, and the results
 * are put together by the logarithms of the sums.
 *
 * Halves are widened a few rows at a time, into scratch that stays in the nearest cache, and results are narrowed row
 * by row: what is computed, and in which order, is the same for all.
 *
 * Source: Dao et al. 2022, "FlashAttention", arXiv:2205.14135, algorithms 1 and 4.  A block of queries sees all its
 * keys at once, so forward needs no running maximum.
 */

#if defined(__AVX512F__)
#define VEC_BYTES 64
#define MR 8
#elif defined(__AVX__)
#define VEC_BYTES 32
#define MR 6
#else
#define VEC_BYTES 16
#define MR 4
#endif
#define V ((len)(VEC_BYTES / sizeof(REAL))) /* numbers in a vector */
#define NR (2 * V)
#define BLOCK (4 * MR) /* queries of a block: with causal attention small ones compute less in vain */
#define TILE 128 /* keys of a tile, backward */
#define PIECE 64 /* rows that are packed at a time: a multiple of every NR */

typedef REAL vec __attribute__((vector_size(VEC_BYTES)));

static inline len up(len n, len step) { return (n + step - 1) / step * step; }

/* c (rows, NR) = or += a (rows, k) b (k, NR); a by strides, b a panel, c in rows of ldc. */
static inline __attribute__((always_inline)) void tile(int rows, int add, len k, const REAL *a, len a_row, len a_k,
                                                       const REAL *b, REAL *c, len ldc) {
    vec sum[MR][2];
    for (int i = 0; i < rows; i++) {
        sum[i][0] = add ? *(const vec *)(c + i * ldc) : (vec){0};
        sum[i][1] = add ? *(const vec *)(c + i * ldc + V) : (vec){0};
    }
    for (len p = 0; p < k; p++, a += a_k, b += NR) {
        const vec b0 = *(const vec *)b, b1 = *(const vec *)(b + V);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const REAL x = a[i * a_row];
            sum[i][0] += x * b0;
            sum[i][1] += x * b1;
        }
    }
    for (int i = 0; i < rows; i++) {
        *(vec *)(c + i * ldc) = sum[i][0];
        *(vec *)(c + i * ldc + V) = sum[i][1];
    }
}

/* c (m, n) = or += a (m, k) b (k, n): b in panels of NR columns, panel_step numbers apart; c's rows hold up(n, NR). */
static void multiply(int add, len m, len n, len k, const REAL *a, len a_row, len a_k, const REAL *b, len panel_step,
                     REAL *c, len ldc) {
    for (len j = 0; j < n; j += NR, b += panel_step) {
        len i = 0;
        for (; i + MR <= m; i += MR) {
            if (add)
                tile(MR, 1, k, a + i * a_row, a_row, a_k, b, c + i * ldc + j, ldc);
            else
                tile(MR, 0, k, a + i * a_row, a_row, a_k, b, c + i * ldc + j, ldc);
        }
        for (; i + 2 <= m; i += 2) tile(2, add, k, a + i * a_row, a_row, a_k, b, c + i * ldc + j, ldc);
        for (; i < m; i++) tile(1, add, k, a + i * a_row, a_row, a_k, b, c + i * ldc + j, ldc);
    }
}

/* x (s, d) in rows of ldx -> rows of panels of NR columns, which begin panel_step apart; columns past d are 0. */
static void pack(const REAL *x, len ldx, len s, len d, REAL *panel, len panel_step) {
    for (len j = 0; j < d; j += NR, panel += panel_step) {
        const len width = d - j < NR ? d - j : NR;
        REAL *out = panel;
        for (len i = 0; i < s; i++, out += NR) {
            for (len l = 0; l < width; l++) out[l] = x[i * ldx + j + l];
            for (len l = width; l < NR; l++) out[l] = REAL_C(0.0);
        }
    }
}

/* The transpose of x, (d, s), in panels of NR of its columns, each (d, NR); columns past s are 0. */
static void pack_transposed(const REAL *x, len ldx, len s, len d, REAL *out) {
    for (len j = 0; j < s; j += NR, out += d * NR) {
        const len width = s - j < NR ? s - j : NR;
        const REAL *row = x + j * ldx;
        for (len k = 0; k < d; k++) {
            for (len l = 0; l < width; l++) out[k * NR + l] = row[l * ldx + k];
            for (len l = width; l < NR; l++) out[k * NR + l] = REAL_C(0.0);
        }
    }
}

static inline char *at(mt_heads x, len sample, len head, len row) {
    const len size = x.half ? 2 : (len)sizeof(REAL);
    return (char *)x.data + (sample * x.b + head * x.h + row * x.s) * size;
}

/* Rows first .. first + n - 1 of a head, to be read: where they lie, or widened into `room`, (n, d); *ld apart. */
static inline const REAL *rows_of(const mt_attention *a, mt_heads x, len sample, len head, len first, len n, REAL *room,
                                  len *ld) {
    const void *row = at(x, sample, head, first);
    *ld = x.s;
#if REAL_IS_FLOAT
    if (x.half) {
        for (len i = 0; i < n; i++) a->widen((const uint16_t *)row + i * x.s, room + i * a->d, a->d);
        *ld = a->d;
        return room;
    }
#else
    (void)a, (void)n, (void)room; /* halves are computed with in single precision */
#endif
    return row;
}

/* Rows of ldx numbers, of which d count -> rows first .. first + n - 1 of a head. */
static void unpack(const mt_attention *a, const REAL *x, len ldx, mt_heads out, len sample, len head, len first,
                   len n) {
    const len d = a->d;
    void *rows = at(out, sample, head, first);
#if REAL_IS_FLOAT
    if (out.half) {
        for (len i = 0; i < n; i++) a->narrow(x + i * ldx, (uint16_t *)rows + i * out.s, d);
        return;
    }
#endif
    REAL *y = rows;
    for (len i = 0; i < n; i++)
        for (len j = 0; j < d; j++) y[i * out.s + j] = x[i * ldx + j];
}

/* Where a query may not look, and what dropout does to it. */
typedef struct {
    const uint8_t *mask; /* of this query, or NULL */
    len mask_step;
    len since, visible;  /* keys since .. visible - 1 */
    int drops;
    mt_word row;
} mt_query;

/* The first key that a query sees; not after the last one that there is for it. */
static inline len first_of(const mt_attention *a, len sample, len query) {
    const len first = mt_since(a, query), stop = a->causal ? query + 1 : a->t;
    if (!a->firsts) return first;
    const int64_t later = a->firsts[sample * a->s + query];
    return later > stop ? stop : later > first ? (len)later : first;
}

/* The beginning of the panel with the first key that any of the queries start .. start + m - 1 sees. */
static inline len first_panel(const mt_attention *a, len sample, len start, len m) {
    len first = first_of(a, sample, start);
    for (len i = 1; a->firsts && i < m; i++) {
        const len other = first_of(a, sample, start + i);
        first = other < first ? other : first;
    }
    return first / NR * NR;
}

static inline mt_query query_of(const mt_attention *a, len sample, len head, len query) {
    mt_query q = {NULL, 0, first_of(a, sample, query), a->causal ? query + 1 : a->t, a->rows != NULL, 0};
    if (a->mask) {
        q.mask = a->mask + sample * a->mask_strides[0] + head * a->mask_strides[1] + query * a->mask_strides[2];
        q.mask_step = a->mask_strides[3];
    }
    if (q.drops) q.row = mt_fold(a->rows[(sample * a->h + head) * a->s + query]);
    return q;
}

/* -inf for the keys first .. first + n - 1 of a row of scores that the query may not see; the row holds `room`. */
static inline void hide(REAL *scores, const mt_query *q, len first, len n, len room) {
    if (q->mask)
        for (len j = 0; j < n; j++) scores[j] = q->mask[(first + j) * q->mask_step] ? scores[j] : -(REAL)INFINITY;
    len visible = q->visible - first, hidden = q->since - first;
    visible = visible < 0 ? 0 : visible > n ? n : visible;
    hidden = hidden > visible ? visible : hidden;
    for (len j = 0; j < hidden; j++) scores[j] = -(REAL)INFINITY;
    for (len j = visible; j < room; j++) scores[j] = -(REAL)INFINITY;
}

static REAL *carve(char **memory, len count) {
    char *at = (char *)(((uintptr_t)*memory + 63) & ~(uintptr_t)63);
    *memory = at + count * (len)sizeof(REAL);
    return (REAL *)at;
}

/* The sizes here are those that are carved below. */
static len attention_scratch(len s, len t, len d, int backward) {
    const len keys = up(t, NR), queries = up(s, NR), width = up(d, NR);
    const len counts = backward ? 2 * keys * d + 3 * (keys + queries) * width + 2 * BLOCK * up(TILE, NR) + BLOCK
                                : keys * d + keys * width + BLOCK * keys + BLOCK * width;
    const len widened = (PIECE + (backward ? 3 : 1) * BLOCK) * d;
    return (counts + keys + widened) * (len)sizeof(REAL) + 20 * 64;
}

/* The hashes of the keys' columns in the mask of the dropout, and of as many more as a panel has. */
static mt_word *columns_of(const mt_attention *a, char **memory) {
    const len keys = up(a->t, NR);
    mt_word *columns = (mt_word *)carve(memory, keys); /* a word is no larger than a number */
    for (len j = 0; a->rows && j < keys; j++)
        columns[j] = mt_column((mt_word)(a->keys && j < a->t ? a->keys[j] : j));
    return columns;
}

/* The scores of one query, for keys from *start to *stop: all, or with causal attention those of its stripe. */
static inline REAL *kept_row(const mt_attention *a, len sample, len head, len query, len *start, len *stop) {
    REAL *row = (REAL *)a->scores + sample * a->scores_b + head * a->scores_h;
    *start = 0, *stop = a->t;
    if (!a->causal) return row + query * a->t;
    const len stripe = query / MT_STRIPE, first = stripe * MT_STRIPE;
    *start = mt_since(a, first), *stop = first + MT_STRIPE < a->s ? first + MT_STRIPE : a->s;
    return row + mt_kept_before(a, stripe) + (query - first) * (*stop - *start);
}

/* Keep what backward would make again: the product, and then, rounded once more, that times the scale.  What a query
 * does not see is never read, but nothing saved is left to chance.  product[j] is that with key `first` + j. */
static void keep(const mt_attention *a, len sample, len head, len query, len first, const REAL *RESTRICT product) {
    len start, stop;
    REAL *RESTRICT row = kept_row(a, sample, head, query, &start, &stop);
    const len since = first_of(a, sample, query), visible = a->causal ? query + 1 : a->t;
    const REAL scale = (REAL)a->scale;
    for (len j = start; j < since; j++) row[j - start] = REAL_C(0.0);
    for (len j = since; j < visible; j++) row[j - start] = product[j - first] * scale;
    for (len j = visible; j < stop; j++) row[j - start] = REAL_C(0.0);
}

/* Keys first .. first + n - 1 of the scores that were kept, as far as the query sees any. */
static void recall(const mt_attention *a, len sample, len head, len query, len first, len n, REAL *RESTRICT scores) {
    len start, stop;
    const REAL *RESTRICT row = kept_row(a, sample, head, query, &start, &stop);
    len since = first_of(a, sample, query), visible = a->causal ? query + 1 : a->t;
    since = since < first ? first : since, visible = visible > first + n ? first + n : visible;
    for (len j = since; j < visible; j++) scores[j - first] = row[j - start];
}

/* Ask for rows first .. first + n - 1 of a head ahead of their use.  A head's rows lie a whole token apart, which no
 * processor foresees, and waiting for each would take longer than computing with it. */
static inline void fetch(mt_heads x, len sample, len head, len first, len n, len d, int write) {
    const char *row = at(x, sample, head, first);
    const len size = x.half ? 2 : (len)sizeof(REAL);
    for (len i = 0; i < n; i++, row += x.s * size)
        for (len byte = 0; byte < d * size; byte += 64) {
            if (write)
                __builtin_prefetch(row + byte, 1);
            else
                __builtin_prefetch(row + byte, 0);
        }
}

/* Where the share of the keys begins that goes with the queries from `start` on: all lie as far along as those do. */
static inline len beside(const mt_attention *a, len start) { return start * a->t / a->s; }

/* The head after this one; false after the last. */
static inline int next_head(const mt_attention *a, len *sample, len *head) {
    if (++*head == a->h) *head = 0, ++*sample;
    return *sample < a->b;
}

static void attention(const mt_attention *a, mt_heads q, mt_heads k, mt_heads v, mt_heads out, void *lse_) {
    const len s = a->s, t = a->t, d = a->d, width = up(d, NR), ldp = up(t, NR);
    const REAL scale = (REAL)a->scale;
    char *memory = a->scratch;
    REAL *keys = carve(&memory, ldp * d), *values = carve(&memory, ldp * width);
    REAL *p = carve(&memory, BLOCK * ldp), *o = carve(&memory, BLOCK * width);
    const mt_word *columns = columns_of(a, &memory);
    REAL *piece = carve(&memory, PIECE * d), *q_room = carve(&memory, BLOCK * d);
    REAL *lse = lse_;
    len ld;
    for (len sample = 0; sample < a->b; sample++)
        for (len head = 0; head < a->h; head++, lse += s) {
            for (len first = 0; first < t; first += PIECE) {
                const len n = t - first < PIECE ? t - first : PIECE;
                const REAL *rows = rows_of(a, k, sample, head, first, n, piece, &ld);
                pack_transposed(rows, ld, n, d, keys + first * d);
                rows = rows_of(a, v, sample, head, first, n, piece, &ld);
                pack(rows, ld, n, d, values + first * NR, t * NR);
            }
            len then = sample, after = head;
            const int goes_on = next_head(a, &then, &after);
            for (len start = 0; start < s; start += BLOCK) {
                const len m = s - start < BLOCK ? s - start : BLOCK;
                fetch(out, sample, head, start, m, d, 1);
                if (goes_on) {
                    const len from = beside(a, start), count = beside(a, start + m) - from;
                    fetch(k, then, after, from, count, d, 0);
                    fetch(v, then, after, from, count, d, 0);
                    fetch(q, then, after, start, m, d, 0);
                }
                /* Of the keys those that the block sees, from the beginning of a panel on. */
                const len lo = first_panel(a, sample, start, m), n = (a->causal ? start + m : t) - lo, room = up(n, NR);
                REAL factor[BLOCK];
                const REAL *queries = rows_of(a, q, sample, head, start, m, q_room, &ld);
                multiply(0, m, n, d, queries, ld, 1, keys + lo * d, d * NR, p, ldp);
                for (len i = 0; a->scores && i < m; i++) keep(a, sample, head, start + i, lo, p + i * ldp);
                for (len i = 0; i < m; i++) {
                    REAL *RESTRICT row = p + i * ldp;
                    const mt_query query = query_of(a, sample, head, start + i);
                    const len seen = query.visible - lo, live = seen < n ? up(seen, NR) : room; /* the rest: exp(-inf) */
                    hide(row, &query, lo, n, live);
                    const REAL highest = row_max(row, live);
                    /* Without any key the maximum is -inf; less a finite number that stays -inf, and its exp is 0. */
                    const REAL peak = highest < REAL_LOWEST ? REAL_LOWEST : highest;
                    REAL lane[LANES] = {0};
                    for (len j = 0; j < live; j++) row[j] = mt_exp((row[j] - peak) * scale);
                    for (len j = live; j < room; j++) row[j] = REAL_C(0.0);
                    const len whole = live - live % LANES;
                    for (len j = 0; j < whole; j += LANES)
                        for (int l = 0; l < LANES; l++) lane[l] += row[j + l];
                    for (len j = whole; j < live; j++) lane[j - whole] += row[j];
                    REAL total = lanes_sum(lane);
                    total = total < REAL_C(1.0) ? REAL_C(1.0) : total; /* the largest score contributes exactly 1 */
                    factor[i] = REAL_C(1.0) / total;
                    lse[start + i] = highest < REAL_LOWEST ? REAL_LOWEST : highest * scale + MT_LOG(total);
                    if (query.drops) {
                        factor[i] *= (REAL)a->keep_scale;
                        for (len j = 0; j < live; j++)
                            row[j] = dropped(row[j], query.row, columns[lo + j], a->threshold, REAL_C(1.0));
                    }
                }
                multiply(0, m, d, n, p, ldp, 1, values + lo * NR, t * NR, o, width);
                for (len i = 0; i < m; i++)
                    for (len j = 0; j < d; j++) o[i * width + j] *= factor[i];
                unpack(a, o, width, out, sample, head, start, m);
            }
        }
}

/* With P the probabilities and M the scaled dropout mask: dV = (P M)^T dO, dP = M (dO V^T), dS = scale P (dP - delta),
 * delta = rowsum(dO O), dQ = dS K, dK = dS^T Q. */
static void attention_backward(const mt_attention *a, mt_heads grad, mt_heads q, mt_heads k, mt_heads v, mt_heads y,
                               const void *lse_, mt_heads dq_, mt_heads dk_, mt_heads dv_) {
    const len s = a->s, t = a->t, d = a->d, width = up(d, NR), ldp = up(TILE, NR);
    const len keys = up(t, NR), rows = up(s, NR);
    const REAL scale = (REAL)a->scale;
    const REAL *lse = lse_;
    char *memory = a->scratch;
    REAL *k_t = carve(&memory, keys * d), *v_t = carve(&memory, keys * d);
    REAL *k_panels = carve(&memory, keys * width), *q_panels = carve(&memory, rows * width);
    REAL *g_panels = carve(&memory, rows * width);
    REAL *dq = carve(&memory, rows * width), *dk = carve(&memory, keys * width), *dv = carve(&memory, keys * width);
    REAL *p = carve(&memory, BLOCK * ldp), *dp = carve(&memory, BLOCK * ldp), *delta = carve(&memory, BLOCK);
    const mt_word *columns = columns_of(a, &memory);
    REAL *piece = carve(&memory, PIECE * d), *q_room = carve(&memory, BLOCK * d);
    REAL *g_room = carve(&memory, BLOCK * d), *y_room = carve(&memory, BLOCK * d);
    len ld, ldq, ldg, ldy;
    for (len sample = 0; sample < a->b; sample++)
        for (len head = 0; head < a->h; head++, lse += s) {
            for (len first = 0; first < t; first += PIECE) {
                const len n = t - first < PIECE ? t - first : PIECE;
                const REAL *from = rows_of(a, k, sample, head, first, n, piece, &ld);
                pack_transposed(from, ld, n, d, k_t + first * d);
                pack(from, ld, n, d, k_panels + first * NR, t * NR);
                from = rows_of(a, v, sample, head, first, n, piece, &ld);
                pack_transposed(from, ld, n, d, v_t + first * d);
            }
            for (len first = 0; first < s; first += PIECE) {
                const len n = s - first < PIECE ? s - first : PIECE;
                const REAL *from = rows_of(a, q, sample, head, first, n, piece, &ld);
                pack(from, ld, n, d, q_panels + first * NR, s * NR);
                from = rows_of(a, grad, sample, head, first, n, piece, &ld);
                pack(from, ld, n, d, g_panels + first * NR, s * NR);
            }
            for (len i = 0; i < s * width; i++) dq[i] = REAL_C(0.0);
            for (len i = 0; i < t * width; i++) dk[i] = dv[i] = REAL_C(0.0);
            len then = sample, after = head;
            const int goes_on = next_head(a, &then, &after);
            for (len start = 0; start < s; start += BLOCK) {
                const len m = s - start < BLOCK ? s - start : BLOCK, visible = a->causal ? start + m : t;
                const len from = beside(a, start), count = beside(a, start + m) - from;
                fetch(dq_, sample, head, start, m, d, 1);
                fetch(dk_, sample, head, from, count, d, 1);
                fetch(dv_, sample, head, from, count, d, 1);
                if (goes_on) {
                    fetch(k, then, after, from, count, d, 0);
                    fetch(v, then, after, from, count, d, 0);
                    fetch(q, then, after, start, m, d, 0);
                    fetch(grad, then, after, start, m, d, 0);
                    fetch(y, then, after, start, m, d, 0);
                }
                const REAL *queries = rows_of(a, q, sample, head, start, m, q_room, &ldq);
                const REAL *gradient = rows_of(a, grad, sample, head, start, m, g_room, &ldg);
                const REAL *output = rows_of(a, y, sample, head, start, m, y_room, &ldy);
                for (len i = 0; i < m; i++) {
                    const REAL *RESTRICT g = gradient + i * ldg, *RESTRICT o = output + i * ldy;
                    REAL lane[LANES] = {0};
                    const len whole = d - d % LANES;
                    for (len j = 0; j < whole; j += LANES)
                        for (int l = 0; l < LANES; l++) lane[l] += g[j + l] * o[j + l];
                    for (len j = whole; j < d; j++) lane[j - whole] += g[j] * o[j];
                    delta[i] = lanes_sum(lane);
                }
                for (len first = first_panel(a, sample, start, m); first < visible; first += TILE) {
                    const len n = visible - first < TILE ? visible - first : TILE, room = up(n, NR);
                    if (!a->scores) multiply(0, m, n, d, queries, ldq, 1, k_t + first * d, d * NR, p, ldp);
                    multiply(0, m, n, d, gradient, ldg, 1, v_t + first * d, d * NR, dp, ldp);
                    for (len i = 0; i < m; i++) {
                        REAL *RESTRICT prob = p + i * ldp, *RESTRICT slope = dp + i * ldp;
                        const mt_query query = query_of(a, sample, head, start + i);
                        const REAL l = lse[start + i], shift = delta[i], by = (REAL)a->keep_scale;
                        if (a->scores)
                            recall(a, sample, head, start + i, first, n, prob);
                        else /* a pass of its own: fused with the difference, it would not be rounded as in lse */
                            for (len j = 0; j < room; j++) prob[j] *= scale;
                        hide(prob, &query, first, n, room);
                        for (len j = 0; j < room; j++) {
                            const REAL below = prob[j] - l; /* above 0 only by the rounding of a large score */
                            prob[j] = mt_exp(below > REAL_C(0.0) ? REAL_C(0.0) : below);
                        }
                        if (!query.drops) {
                            for (len j = 0; j < room; j++) slope[j] = prob[j] * (slope[j] - shift) * scale;
                            continue;
                        }
                        for (len j = 0; j < room; j++) {
                            const REAL kept = dropped(REAL_C(1.0), query.row, columns[first + j], a->threshold, by);
                            slope[j] = prob[j] * (slope[j] * kept - shift) * scale;
                            prob[j] *= kept;
                        }
                    }
                    multiply(1, n, d, m, p, 1, ldp, g_panels + start * NR, s * NR, dv + first * width, width);
                    multiply(1, n, d, m, dp, 1, ldp, q_panels + start * NR, s * NR, dk + first * width, width);
                    multiply(1, m, d, n, dp, ldp, 1, k_panels + first * NR, t * NR, dq + start * width, width);
                }
            }
            unpack(a, dq, width, dq_, sample, head, 0, s);
            unpack(a, dk, width, dk_, sample, head, 0, t);
            unpack(a, dv, width, dv_, sample, head, 0, t);
        }
}
