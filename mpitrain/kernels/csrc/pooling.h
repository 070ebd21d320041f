/* Maxima in a window that slides over images (b, h, w, c). */

#if REAL_IS_FLOAT
typedef int32_t place_t;
#else
typedef int64_t place_t;
#endif

enum { CHANNELS = 64 }; /* at a time */

/* The elements of a window that lie in the image, along one dim. */
static inline void inside(len place, len stride, len padding, len size, len window, len *from, len *to) {
    const len first = place * stride - padding;
    *from = first < 0 ? -first : 0;
    *to = least(window, size - first);
}

static void max_pool2d(const mt_convolution *a, const void *x_, void *y_, uint8_t *where) {
    const REAL *x = x_;
    REAL *y = y_;
    for (len n = 0; n < a->b; n++, x += a->h * a->w * a->c)
        for (len i = 0; i < a->oh; i++)
            for (len j = 0; j < a->ow; j++, y += a->c, where += a->c) {
                len top, bottom, left, right;
                inside(i, a->stride[0], a->padding[0], a->h, a->kh, &top, &bottom);
                inside(j, a->stride[1], a->padding[1], a->w, a->kw, &left, &right);
                const REAL *seen = x + ((i * a->stride[0] - a->padding[0]) * a->w + j * a->stride[1] - a->padding[1]) * a->c;
                for (len first = 0; first < a->c; first += CHANNELS) {
                    const len count = least(CHANNELS, a->c - first);
                    REAL best[CHANNELS];
                    place_t at[CHANNELS];
                    int met = 0;
                    for (len dy = top; dy < bottom; dy++)
                        for (len dx = left; dx < right; dx++) {
                            const REAL *from = seen + (dy * a->w + dx) * a->c + first;
                            const place_t here = (place_t)(dy * a->kw + dx);
                            if (!met)
                                for (len l = 0; l < count; l++) best[l] = from[l], at[l] = here;
                            else
                                for (len l = 0; l < count; l++) {
                                    const int is_odd = (from[l] != from[l]) & (best[l] == best[l]);
                                    const int better = (from[l] > best[l]) | is_odd;
                                    best[l] = better ? from[l] : best[l];
                                    at[l] = better ? here : at[l];
                                }
                            met = 1;
                        }
                    for (len l = 0; l < count; l++) y[first + l] = best[l], where[first + l] = (uint8_t)at[l];
                }
            }
}

/* dx is 0 where no window reaches, and where windows overlap what they want adds up. */
static void max_pool2d_backward(const mt_convolution *a, const void *grad_, const uint8_t *where, void *dx_) {
    const REAL *grad = grad_;
    REAL *dx = dx_;
    memset(dx, 0, (size_t)(a->b * a->h * a->w * a->c) * sizeof *dx);
    for (len n = 0; n < a->b; n++, dx += a->h * a->w * a->c)
        for (len i = 0; i < a->oh; i++)
            for (len j = 0; j < a->ow; j++, grad += a->c, where += a->c) {
                len top, bottom, left, right;
                inside(i, a->stride[0], a->padding[0], a->h, a->kh, &top, &bottom);
                inside(j, a->stride[1], a->padding[1], a->w, a->kw, &left, &right);
                REAL *seen = dx + ((i * a->stride[0] - a->padding[0]) * a->w + j * a->stride[1] - a->padding[1]) * a->c;
                for (len first = 0; first < a->c; first += CHANNELS) {
                    const len count = least(CHANNELS, a->c - first);
                    place_t at[CHANNELS];
                    for (len l = 0; l < count; l++) at[l] = where[first + l];
                    for (len dy = top; dy < bottom; dy++)
                        for (len dz = left; dz < right; dz++) {
                            REAL *RESTRICT into = seen + (dy * a->w + dz) * a->c + first;
                            const REAL *RESTRICT from = grad + first;
                            const place_t here = (place_t)(dy * a->kw + dz);
                            for (len l = 0; l < count; l++) into[l] += at[l] == here ? from[l] : REAL_C(0.0);
                        }
                }
            }
}
