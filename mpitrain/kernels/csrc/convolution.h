/* Convolution of images (b, h, w, c) by one product of matrices that is never laid out.
 *
 * What a filter sees from a place are runs of numbers that lie together: a row of its window is kw c of them, where
 * dilation is 1 and all channels are in one group.  So the register tile of attention.h, MR places times two vectors of
 * filters, reads images where they lie: of each place it knows where its window begins, and of the window where its
 * runs begin.  Images are copied once, one or a few at a time, to have their padding around them.
 *
 * The gradient of images is a convolution as well, of the gradient with filters that are turned around; that of the
 * filters has places for the dim that is summed over, so its tiles are MR numbers of a run times two vectors of filters.
 * Sums over places are made in blocks, whose sums are added: rounding grows with the length of a block.
 *
 * With one channel and one filter a group there is no matrix: channels are the vectors then.
 */

typedef REAL loose __attribute__((vector_size(VEC_BYTES), aligned(sizeof(REAL)), may_alias)); /* at any address */

enum { PLACES = 256 }; /* of a block: what it reads and writes stays in cache while all filters pass */

static inline len least(len x, len y) { return x < y ? x : y; }

/* The places and the memory of a call. */
typedef struct {
    len height, width; /* of an image with its padding */
    len image;         /* numbers in it */
    len runs, length;  /* of the window of one group */
    len k;             /* numbers that a filter sees */
    len panels;        /* numbers of a row of panels: the filters of a group, up to a whole vector */
} Form;

static Form form_of(const mt_convolution *a) {
    Form f;
    f.height = a->h + 2 * a->padding[0], f.width = a->w + 2 * a->padding[1];
    f.image = f.height * f.width * a->groups * a->c;
    const int whole = a->groups == 1 && a->dilation[1] == 1;
    f.runs = whole ? a->kh : a->kh * a->kw;
    f.length = whole ? a->kw * a->c : a->c;
    f.k = f.runs * f.length;
    f.panels = up(a->out, V);
    return f;
}

/* Where a run begins, counted from the first number of the first channel that the window of group 0 sees. */
static inline len run_at(const mt_convolution *a, const Form *f, len run) {
    const len channels = a->groups * a->c;
    if (f->runs == a->kh && f->length == a->kw * a->c) return run * a->dilation[0] * f->width * channels;
    return ((run / a->kw) * a->dilation[0] * f->width + (run % a->kw) * a->dilation[1]) * channels;
}

static inline len place_at(const mt_convolution *a, const Form *f, len place) {
    return (place / a->ow * a->stride[0] * f->width + place % a->ow * a->stride[1]) * a->groups * a->c;
}

/* One image with its padding, which is 0 already. */
static void put_image(const mt_convolution *a, const Form *f, const REAL *x, REAL *out) {
    const len row = a->w * a->groups * a->c;
    out += (a->padding[0] * f->width + a->padding[1]) * a->groups * a->c;
    for (len i = 0; i < a->h; i++, x += row, out += f->width * a->groups * a->c)
        memcpy(out, x, (size_t)row * sizeof *x);
}

static inline REAL *aligned(void *scratch) {
    return (REAL *)(((uintptr_t)scratch + VEC_BYTES - 1) / VEC_BYTES * VEC_BYTES);
}

static int is_by_channel(const mt_convolution *a) { return a->c == 1 && a->out == 1 && a->groups > 1; }

/* Numbers of scratch that both passes need. */
static len convolution_scratch(const mt_convolution *a, int backward) {
    const Form f = form_of(a);
    const len images = backward ? 1 + 8192 / (f.image + 1) : 1;
    const len filters = is_by_channel(a) ? a->kh * a->kw * a->groups : a->groups * f.k * f.panels;
    const len places = backward ? (images * a->oh * a->ow + PLACES) * f.panels : 0;
    return 2 * V + up(filters, V) + up(images * f.image + MR, V) + up(places, V);
}

/* ----------------------------------------------------------------------------------------------------- the forward pass */

/* sums (MR places, `vectors` of filters) of one panel; places count from x. */
static inline __attribute__((always_inline)) void see(int vectors, const mt_convolution *a, const Form *f,
                                                      const REAL *x, const len *places, const REAL *b,
                                                      vec sum[MR][2]) {
    len at[MR];
    for (int i = 0; i < MR; i++) at[i] = places[i];
    for (len run = 0; run < f->runs; run++) {
        const REAL *from = x + run_at(a, f, run);
        for (len p = 0; p < f->length; p++, from++, b += vectors * V) {
            const vec b0 = *(const vec *)b, b1 = vectors > 1 ? *(const vec *)(b + V) : (vec){0};
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) {
                const REAL value = from[at[i]];
                sum[i][0] += value * b0;
                if (vectors > 1) sum[i][1] += value * b1;
            }
        }
    }
}

/* Some places of an image, with the filters of one panel, of which `real` are none of the padding. */
static inline __attribute__((always_inline)) void panel_of(int vectors, const mt_convolution *a, const Form *f,
                                                           const REAL *x, len first, len last, const REAL *b,
                                                           const REAL *bias, REAL *y, len real) {
    const len row = a->groups * a->out;
    REAL begin[2 * NR], end[2 * NR];
    for (len j = 0; j < vectors * V; j++) begin[j] = bias && j < real ? bias[j] : REAL_C(0.0);
    for (len place = first; place < last; place += MR) {
        const int count = (int)least(MR, last - place);
        len places[MR];
        for (int i = 0; i < MR; i++) places[i] = place_at(a, f, place + (i < count ? i : 0));
        vec sum[MR][2];
        for (int i = 0; i < MR; i++) {
            sum[i][0] = *(const loose *)begin;
            sum[i][1] = *(const loose *)(begin + V);
        }
        see(vectors, a, f, x, places, b, sum);
        REAL *into = y + place * row;
        if (count == MR && real == vectors * V) {
#pragma GCC unroll 8
            for (int i = 0; i < MR; i++) {
                *(loose *)(into + i * row) = sum[i][0];
                if (vectors > 1) *(loose *)(into + i * row + V) = sum[i][1];
            }
        } else {
            for (int i = 0; i < count; i++) {
                *(loose *)end = sum[i][0];
                if (vectors > 1) *(loose *)(end + V) = sum[i][1];
                memcpy(into + i * row, end, (size_t)real * sizeof *end);
            }
        }
    }
}

static void panel_of_one(const mt_convolution *a, const Form *f, const REAL *x, len first, len last, const REAL *b,
                         const REAL *bias, REAL *y, len real) {
    panel_of(1, a, f, x, first, last, b, bias, y, real);
}

static void panel_of_two(const mt_convolution *a, const Form *f, const REAL *x, len first, len last, const REAL *b,
                         const REAL *bias, REAL *y, len real) {
    panel_of(2, a, f, x, first, last, b, bias, y, real);
}

/* Panels of the filters of a group: NR of them side by side, the last panel a vector where that holds it.
 *
 * w is (out, kh kw, c), or turned (c, kh kw, out) with its elements in the order of the last one first. */
static void pack_filters(const mt_convolution *a, const REAL *w, int turned, REAL *panel) {
    const len elements = a->kh * a->kw, k = elements * a->c;
    for (len j = 0; j < a->out; j += NR) {
        const len real = least(NR, a->out - j), width = real > V ? NR : V;
        for (len e = 0; e < elements; e++)
            for (len i = 0; i < a->c; i++, panel += width) {
                const REAL *from = turned ? w + (i * elements + elements - 1 - e) * a->out + j : w + j * k + e * a->c + i;
                const len step = turned ? 1 : k;
                for (len l = 0; l < real; l++) panel[l] = from[l * step];
                for (len l = real; l < width; l++) panel[l] = REAL_C(0.0);
            }
    }
}

/* Filters of one channel each, (channels, elements), with the channels last. */
static void pack_by_channel(const REAL *w, len channels, len elements, int turned, REAL *y) {
    for (len i = 0; i < channels; i++)
        for (len e = 0; e < elements; e++) y[e * channels + i] = w[i * elements + (turned ? elements - 1 - e : e)];
}

static void by_channel(const mt_convolution *a, const Form *f, const REAL *x, const REAL *w, const REAL *bias, REAL *y) {
    const len channels = a->groups;
    for (len place = 0; place < a->oh * a->ow; place++, y += channels) {
        const REAL *seen = x + place_at(a, f, place);
        for (len j = 0; j < channels; j++) y[j] = bias ? bias[j] : REAL_C(0.0);
        for (len e = 0; e < a->kh * a->kw; e++) {
            const REAL *RESTRICT from = seen + run_at(a, f, e), *RESTRICT filter = w + e * channels;
            for (len j = 0; j < channels; j++) y[j] += from[j] * filter[j];
        }
    }
}

static void conv2d(const mt_convolution *a, const void *x_, const void *w_, const void *bias_, void *y_, int turned,
                   void *scratch) {
    const Form f = form_of(a);
    const REAL *x = x_, *w = w_, *bias = bias_;
    REAL *y = y_, *filters = aligned(scratch);
    const len places = a->oh * a->ow, of_group = f.k * f.panels, one = is_by_channel(a);
    REAL *padded = filters + up(one ? f.k * a->groups : a->groups * of_group, V);
    if (one)
        pack_by_channel(w, a->groups, f.k, turned, filters);
    else
        for (len g = 0; g < a->groups; g++)
            pack_filters(a, w + g * a->out * f.k, turned, filters + g * of_group);
    const int pads = a->padding[0] || a->padding[1];
    if (pads) memset(padded, 0, (size_t)f.image * sizeof *padded);
    for (len n = 0; n < a->b; n++, x += a->h * a->w * a->groups * a->c, y += places * a->groups * a->out) {
        if (pads) put_image(a, &f, x, padded);
        const REAL *from = pads ? padded : x;
        if (one) {
            by_channel(a, &f, from, filters, bias, y);
            continue;
        }
        for (len first = 0; first < places; first += PLACES)
            for (len g = 0; g < a->groups; g++) {
                const REAL *b = filters + g * of_group;
                for (len j = 0; j < a->out; j += NR, b += f.k * NR) {
                    const len real = least(NR, a->out - j), to = least(first + PLACES, places);
                    (real > V ? panel_of_two : panel_of_one)(a, &f, from + g * a->c, first, to, b,
                                                             bias ? bias + g * a->out + j : NULL,
                                                             y + g * a->out + j, real);
                }
            }
    }
}

/* ---------------------------------------------------------------------------------------------------------- the filters */

/* sums += of `images` images, the rows of places from `first` to `last`: MR numbers from x on times a panel of grad. */
static inline __attribute__((always_inline)) void weigh(int vectors, const mt_convolution *a, const Form *f,
                                                        const REAL *x, len images, len first, len last, const REAL *b,
                                                        REAL *total, len count) {
    const len step = a->stride[1] * a->groups * a->c, down = a->stride[0] * f->width * a->groups * a->c;
    vec sum[MR][2];
    for (int i = 0; i < MR; i++) sum[i][0] = sum[i][1] = (vec){0};
    for (len n = 0; n < images; n++)
        for (len i = first; i < last; i++) {
            const REAL *from = x + n * f->image + i * down;
            for (len j = 0; j < a->ow; j++, from += step, b += vectors * V) {
                const vec b0 = *(const vec *)b, b1 = vectors > 1 ? *(const vec *)(b + V) : (vec){0};
#pragma GCC unroll 8
                for (int l = 0; l < MR; l++) {
                    sum[l][0] += from[l] * b0;
                    if (vectors > 1) sum[l][1] += from[l] * b1;
                }
            }
        }
#pragma GCC unroll 8
    for (int l = 0; l < MR; l++)
        if (l < count) {
            *(loose *)(total + l * vectors * V) += sum[l][0];
            if (vectors > 1) *(loose *)(total + l * vectors * V + V) += sum[l][1];
        }
}

static void weigh_one(const mt_convolution *a, const Form *f, const REAL *x, len images, len first, len last,
                      const REAL *b, REAL *total, len count) {
    weigh(1, a, f, x, images, first, last, b, total, count);
}

static void weigh_two(const mt_convolution *a, const Form *f, const REAL *x, len images, len first, len last,
                      const REAL *b, REAL *total, len count) {
    weigh(2, a, f, x, images, first, last, b, total, count);
}

/* Of some images the gradients at rows of places, of one panel: `width` numbers a place. */
static void pack_grad(const mt_convolution *a, const REAL *grad, len images, len first, len last, len real, len width,
                      REAL *panel) {
    const len row = a->groups * a->out;
    for (len n = 0; n < images; n++, grad += a->oh * a->ow * row) {
        const REAL *from = grad + first * a->ow * row;
        for (len place = first * a->ow; place < last * a->ow; place++, from += row, panel += width) {
            for (len l = 0; l < real; l++) panel[l] = from[l];
            for (len l = real; l < width; l++) panel[l] = REAL_C(0.0);
        }
    }
}

static void by_channel_back(const mt_convolution *a, const Form *f, const REAL *x, const REAL *grad, REAL *total) {
    const len channels = a->groups;
    for (len place = 0; place < a->oh * a->ow; place++, grad += channels) {
        const REAL *seen = x + place_at(a, f, place);
        for (len e = 0; e < a->kh * a->kw; e++) {
            const REAL *RESTRICT from = seen + run_at(a, f, e), *RESTRICT wanted = grad;
            REAL *RESTRICT into = total + e * channels;
            for (len j = 0; j < channels; j++) into[j] += from[j] * wanted[j];
        }
    }
}

static void conv2d_filters(const mt_convolution *a, const void *x_, const void *grad_, void *out_, int add,
                           void *scratch) {
    const Form f = form_of(a);
    const REAL *x = x_, *grad = grad_;
    REAL *out = out_, *totals = aligned(scratch);
    const len one = is_by_channel(a), of_group = f.k * f.panels, numbers = one ? f.k * a->groups : a->groups * of_group;
    const len some = 1 + 8192 / (f.image + 1), rows = some > 1 ? a->oh : 1 + (PLACES - 1) / a->ow;
    REAL *padded = totals + up(numbers, V), *panel = padded + up(some * f.image + MR, V);
    memset(totals, 0, (size_t)numbers * sizeof *totals);
    memset(padded, 0, (size_t)(some * f.image + MR) * sizeof *padded);
    for (len n = 0; n < a->b; n += some) {
        const len images = least(some, a->b - n), size = a->h * a->w * a->groups * a->c;
        const REAL *wanted = grad + n * a->oh * a->ow * a->groups * a->out;
        for (len i = 0; i < images; i++) put_image(a, &f, x + (n + i) * size, padded + i * f.image);
        if (one) {
            for (len i = 0; i < images; i++)
                by_channel_back(a, &f, padded + i * f.image, wanted + i * a->oh * a->ow * a->groups, totals);
            continue;
        }
        for (len first = 0; first < a->oh; first += rows)
            for (len g = 0; g < a->groups; g++) {
                REAL *total = totals + g * of_group;
                const len last = least(first + rows, a->oh);
                for (len j = 0; j < a->out; j += NR) {
                    const len real = least(NR, a->out - j), width = real > V ? NR : V;
                    pack_grad(a, wanted + g * a->out + j, images, first, last, real, width, panel);
                    for (len run = 0; run < f.runs; run++) {
                        const REAL *from = padded + run_at(a, &f, run) + g * a->c;
                        for (len p = 0; p < f.length; p += MR) {
                            const len count = least(MR, f.length - p);
                            (real > V ? weigh_two : weigh_one)(a, &f, from + p, images, first, last, panel, total,
                                                               count);
                            total += count * width;
                        }
                    }
                }
            }
    }
    for (len g = 0; g < a->groups; g++) {
        if (one) {
            for (len e = 0; e < f.k; e++) out[g * f.k + e] = totals[e * a->groups + g] + (add ? out[g * f.k + e] : 0);
            continue;
        }
        const REAL *total = totals + g * of_group;
        for (len j = 0; j < a->out; j += NR) {
            const len real = least(NR, a->out - j), width = real > V ? NR : V;
            REAL *into = out + (g * a->out + j) * f.k;
            for (len p = 0; p < f.k; p++, total += width)
                for (len l = 0; l < real; l++) into[l * f.k + p] = total[l] + (add ? into[l * f.k + p] : 0);
        }
    }
}
