/* What each build of the kernels offers: one table a CPU level and precision.
 *
 * All arrays are C-contiguous unless strides are given; lengths and strides count elements.  No kernel allocates: what
 * scratch it needs is handed in.  None keeps a state, and none uses more than one thread.
 */
#ifndef MPITRAIN_TABLE_H
#define MPITRAIN_TABLE_H

#include <stddef.h>
#include <stdint.h>

typedef ptrdiff_t len;

/* Rows of halves that a kernel picks by number: it widens and narrows them itself, one at a time. */
typedef struct {
    void (*widen)(const uint16_t *x, float *y, len count); /* NULL where rows are of the precision of the call */
    void (*narrow)(const float *x, uint16_t *y, len count);
    float *spare; /* two rows */
} mt_rows;

/* (b, h, s, d) with any strides but that of d, which is 1. */
typedef struct {
    void *data;
    len b, h, s;
    int half; /* 16 bits a number, whatever the precision of the call */
} mt_heads;

/* Queries whose kept scores are as long as those of the last of them, with causal attention. */
#define MT_STRIPE 64

typedef struct {
    len b, h, s, t, d;       /* s queries, t keys */
    double scale;
    int causal;              /* only where s is t */
    len since;               /* query i sees no key before since + i; -s, or lower, where it sees all of them */
    const int64_t *firsts;   /* (b, s) a key of each query before which it sees none either, or NULL */
    const uint8_t *mask;     /* nonzero where a query may look, or NULL */
    len mask_strides[4];     /* bytes; 0 where the mask is broadcast */
    const uint64_t *rows;    /* (b, h, s) hashes of the queries' dropout, or NULL */
    const int64_t *keys;     /* (t) columns of the keys in the mask of the dropout, or NULL for 0, 1, ... */
    uint64_t threshold;      /* keep a weight whose word is at least this, which is below 2^32 */
    double keep_scale;       /* 1 / (1 - p) */
    void *scratch;           /* of attention_scratch bytes */
    void *scores;            /* scale q k^T, kept from forward to backward in rows, as kept_row tells; or NULL */
    len scores_b, scores_h;  /* from a sample, and a head, to the next */
    void (*widen)(const uint16_t *x, float *y, len count); /* what `half` stands for; only in single precision */
    void (*narrow)(const float *x, uint16_t *y, len count);
} mt_attention;

/* The first key that a query sees, if it is not told of a later one. */
static inline len mt_since(const mt_attention *a, len query) {
    const len first = query + a->since;
    return first < 0 ? 0 : first > a->t ? a->t : first;
}

/* How many scores are kept of the whole stripes before this one, with causal attention: of each query those from the
 * first key of the stripe's first to the last of its last.  The keys of stripes grow until the first one leaves. */
static inline len mt_kept_before(const mt_attention *a, len stripe) {
    const len grown = -a->since / MT_STRIPE + 1, growing = stripe < grown ? stripe : grown;
    return MT_STRIPE * (MT_STRIPE * (growing * (growing + 1) / 2) + (stripe - growing) * (MT_STRIPE - a->since));
}

/* Windows on images: filters of a convolution, or of a pool, which has one group and `c` channels. */
typedef struct {
    len b, h, w, c;       /* images, their pixels, the channels of a group */
    len groups, out;      /* and the filters of a group */
    len kh, kw;           /* of the window */
    len oh, ow;           /* places */
    len stride[2], padding[2], dilation[2];
} mt_convolution;

typedef struct {
    const char *level;
    len itemsize;

    /* Where sums over rows are made, those from `first` on of `all` rows come: a sum goes on where the last call left
     * it, `sum` and `group` (as long) being the same.  layer_norm_backward has two of each. */
    void (*sum_rows)(const void *x, void *sum, void *group, len first, len rows, len all, len width);
    void (*gelu)(int exact, const void *x, const void *bias, void *y, void *slope, len rows, len width);
    void (*gelu_backward)(const void *grad, const void *slope, void *dx, void *db, void *group, len first, len rows,
                          len all, len width);
    void (*residual)(const void *x, const void *y, const void *bias, const uint64_t *hashes, uint64_t threshold,
                     double keep_scale, void *out, len rows, len width);
    void (*dropout)(const void *x, const uint64_t *hashes, uint64_t threshold, double keep_scale, void *out, len rows,
                    len width);
    void (*layer_norm)(const void *x, const void *weight, const void *bias, double eps, void *y, void *center,
                       void *rstd, len rows, len width);
    void (*residual_norm)(const void *x, const void *y, const void *branch_bias, const uint64_t *hashes,
                          uint64_t threshold, double keep_scale, const void *weight, const void *bias, double eps,
                          void *sum, void *out, void *center, void *rstd, len rows, len width);
    void (*layer_norm_backward)(const void *grad, const void *extra, const void *x, const void *center,
                                const void *rstd, const void *weight, void *dx, void *dw, void *db, void *groups,
                                len first, len rows, len all, len width);
    void (*rms_norm)(const void *x, const void *weight, double eps, void *y, void *rstd, len rows, len width);
    void (*residual_rms_norm)(const void *x, const void *y, const void *branch_bias, const uint64_t *hashes,
                              uint64_t threshold, double keep_scale, const void *weight, double eps, void *sum,
                              void *out, void *rstd, len rows, len width);
    void (*rms_norm_backward)(const void *grad, const void *extra, const void *x, const void *rstd, const void *weight,
                              void *dx, void *dw, void *group, len first, len rows, len all, len width);
    void (*swiglu)(const void *gate, const void *up, void *y, len count);
    void (*swiglu_backward)(const void *grad, const void *gate, const void *up, void *d_gate, void *d_up, len count);
    void (*rotary)(const void *x, const void *cos, const void *sin, void *y, len groups, len members, len half,
                   len first, len rows, len count);
    void (*rotary_pack)(const void *q, const void *kv, const void *cos, const void *sin, void *y, len groups,
                        len queries, len half, len rows, len count);
    void (*rotary_unpack)(const void *x, const void *cos, const void *sin, void *q, void *kv, len groups, len queries,
                          len half, len rows, len count);
    void (*softmax)(const void *x, void *y, len rows, len width);
    void (*softmax_backward)(const void *grad, const void *y, void *dx, len rows, len width);
    double (*cross_entropy)(const void *logits, const int64_t *targets, int64_t ignore, void *lse, len rows, len width);
    void (*cross_entropy_backward)(double grad, const void *logits, const int64_t *targets, const void *lse,
                                   int64_t ignore, void *out, len rows, len width);
    void (*row_sum)(const int64_t *ids, const void *rows, void *out, len count, len width);
    void (*combine)(mt_rows kind, const void *out, const void *gates, const int64_t *places, void *y, len rows,
                    len choices, len width);
    void (*combine_backward)(mt_rows kind, const void *grad, const void *out, const void *gates, const int64_t *places,
                             void *d_out, void *d_gates, len rows, len choices, len width);
    void (*jitter)(const void *x, const uint64_t *hashes, double amount, void *out, len rows, len width);
    void (*adamw)(void *p, const void *g, void *m, void *v, len count, const double *numbers);
    double (*sum_of_squares)(const void *x, len count);
    len (*convolution_scratch)(const mt_convolution *a, int backward); /* numbers */
    void (*conv2d)(const mt_convolution *a, const void *x, const void *w, const void *bias, void *y, int turned,
                   void *scratch);
    void (*conv2d_filters)(const mt_convolution *a, const void *x, const void *grad, void *out, int add, void *scratch);
    void (*max_pool2d)(const mt_convolution *a, const void *x, void *y, uint8_t *where);
    void (*max_pool2d_backward)(const mt_convolution *a, const void *grad, const uint8_t *where, void *dx);
    len (*attention_scratch)(len s, len t, len d, int backward);
    void (*attention)(const mt_attention *a, mt_heads q, mt_heads k, mt_heads v, mt_heads out, void *lse);
    void (*attention_backward)(const mt_attention *a, mt_heads grad, mt_heads q, mt_heads k, mt_heads v, mt_heads y,
                               const void *lse, mt_heads dq, mt_heads dk, mt_heads dv);
} mt_table;

/* Half precision is storage only: it is widened to float, computed with, and narrowed. */
typedef struct {
    void (*half_to_float)(const uint16_t *x, float *y, len count);
    void (*float_to_half)(const float *x, uint16_t *y, len count);
    void (*bfloat_to_float)(const uint16_t *x, float *y, len count);
    void (*float_to_bfloat)(const float *x, uint16_t *y, len count);
} mt_halves;

#define MT_PASTE2(a, b, c) a##_##b##_##c
#define MT_PASTE(a, b, c) MT_PASTE2(a, b, c)

#endif
