/* The elementwise mathematics, for one number at a time.
 *
 * Read by the C compiler and by NVRTC alike, so that what is tested on the CPU is what a GPU computes: no includes, no
 * libm, no branches (each function is straight code that a compiler turns into vector instructions).  The includer
 * defines REAL as float or double; REAL_IS_FLOAT says which.  NaN goes in and comes out everywhere.
 */
#ifndef MPITRAIN_NUMERICS_H
#define MPITRAIN_NUMERICS_H

#ifdef __CUDACC__
#define MT_INLINE static __device__ __forceinline__
#else
#define MT_INLINE static inline __attribute__((always_inline))
#endif

typedef unsigned int mt_word;        /* 32 bits */
typedef unsigned long long mt_row;   /* 64 bits */

#if REAL_IS_FLOAT
typedef mt_word mt_bits;
#define REAL_C(x) x##f
#else
typedef mt_row mt_bits;
#define REAL_C(x) x
#endif

MT_INLINE REAL mt_from_bits(mt_bits bits) {
    union { mt_bits bits; REAL value; } u;
    u.bits = bits;
    return u.value;
}

MT_INLINE mt_bits mt_to_bits(REAL value) {
    union { mt_bits bits; REAL value; } u;
    u.value = value;
    return u.bits;
}

/* ------------------------------------------------------------------------------------------------ exponential, erf */

/* e to the x, relative error below 2 units in the last place; results below 2^-125.5 (double: 2^-1021.5) are 0.
 *
 * x = n ln 2 + r with |r| <= ln(2)/2, e^r by its Taylor series, 2^n by its bits.  Adding and subtracting 1.5 * 2^23
 * rounds to a whole number, whose two's complement is left in the low bits: no conversion that NaN could break.
 */
MT_INLINE REAL mt_exp(REAL x) {
#if REAL_IS_FLOAT
    const REAL lowest = REAL_C(-87.5), highest = REAL_C(89.0), round = REAL_C(12582912.0);
    const REAL ln2_high = REAL_C(0.693359375), ln2_low = REAL_C(-2.12194440e-4); /* the high part times n is exact */
#else
    const REAL lowest = -708.3, highest = 710.0, round = 6755399441055744.0;
    const REAL ln2_high = 6.93145751953125e-1, ln2_low = 1.42860682030941723212e-6;
#endif
    x = x < lowest ? lowest : x;
    x = x > highest ? highest : x;
    const REAL shifted = x * REAL_C(1.44269504088896340736) + round;
    const REAL n = shifted - round;
    const REAL r = (x - n * ln2_high) - n * ln2_low;
#if REAL_IS_FLOAT
    REAL p = REAL_C(1.9841269841269841e-4); /* 1/7! */
#else
    REAL p = 1.6059043836821613e-10;   /* 1/13! */
    p = p * r + 2.0876756987868099e-9;
    p = p * r + 2.5052108385441719e-8;
    p = p * r + 2.7557319223985891e-7;
    p = p * r + 2.7557319223985893e-6;
    p = p * r + 2.4801587301587302e-5;
    p = p * r + 1.9841269841269841e-4;
#endif
    p = p * r + REAL_C(1.3888888888888889e-3);
    p = p * r + REAL_C(8.3333333333333333e-3);
    p = p * r + REAL_C(4.1666666666666667e-2);
    p = p * r + REAL_C(1.6666666666666667e-1);
    p = p * r + REAL_C(0.5);
    p = p * r + REAL_C(1.0);
    p = p * r + REAL_C(1.0);
    /* 2^(n-1) for n from -126 (whose bits are those of 0) to 128; then once more by 2. */
#if REAL_IS_FLOAT
    const REAL power = mt_from_bits((mt_to_bits(shifted) + 126u) << 23);
#else
    const REAL power = mt_from_bits((mt_to_bits(shifted) + 1022ull) << 52);
#endif
    return p * power * REAL_C(2.0);
}

/* Two rational functions, each as what is returned over *q: erf(z) is z N(z^2) below 0.46875, and from there on
 * 1 - exp(-z^2) F(z) with errors below 2e-16; F is good to nine digits from 4 on, where erfc is below 2e-8.
 *
 * W. J. Cody 1969, Rational Chebyshev Approximations for the Error Function, Mathematics of Computation 23:631-637;
 * coefficients as in his program CALERF of 1990.
 */
MT_INLINE REAL mt_erf_near(REAL square, REAL *q) {
    REAL p = REAL_C(1.85777706184603153e-1);
    p = p * square + REAL_C(3.16112374387056560e0);
    p = p * square + REAL_C(1.13864154151050156e2);
    p = p * square + REAL_C(3.77485237685302021e2);
    p = p * square + REAL_C(3.20937758913846947e3);
    REAL b = square + REAL_C(2.36012909523441209e1);
    b = b * square + REAL_C(2.44024637934444173e2);
    b = b * square + REAL_C(1.28261652607737228e3);
    b = b * square + REAL_C(2.84423683343917062e3);
    *q = b;
    return p;
}

MT_INLINE REAL mt_erf_far(REAL size, REAL *q) {
    REAL p = REAL_C(2.15311535474403846e-8);
    p = p * size + REAL_C(5.64188496988670089e-1);
    p = p * size + REAL_C(8.88314979438837594e0);
    p = p * size + REAL_C(6.61191906371416295e1);
    p = p * size + REAL_C(2.98635138197400131e2);
    p = p * size + REAL_C(8.81952221241769090e2);
    p = p * size + REAL_C(1.71204761263407058e3);
    p = p * size + REAL_C(2.05107837782607147e3);
    p = p * size + REAL_C(1.23033935479799725e3);
    REAL b = size + REAL_C(1.57449261107098347e1);
    b = b * size + REAL_C(1.17693950891312499e2);
    b = b * size + REAL_C(5.37181101862009858e2);
    b = b * size + REAL_C(1.62138957456669019e3);
    b = b * size + REAL_C(3.29079923573345963e3);
    b = b * size + REAL_C(4.36261909014324716e3);
    b = b * size + REAL_C(3.43936767414372164e3);
    b = b * size + REAL_C(1.23033935480374942e3);
    *q = b;
    return p;
}

/* The error function; its absolute error is below 2e-16, in float two units of the last place of 1. */
MT_INLINE REAL mt_erf(REAL z) {
    REAL size = z < REAL_C(0.0) ? -z : z;
    size = size > REAL_C(30.0) ? REAL_C(30.0) : size; /* exp(-900) is 0; the square must not overflow */
    const REAL far = size < REAL_C(0.46875) ? REAL_C(0.46875) : size;
    const REAL square = size > REAL_C(0.46875) ? REAL_C(0.46875) * REAL_C(0.46875) : size * size;
    REAL q;
    REAL p = mt_erf_far(far, &q);
    const REAL rest = REAL_C(1.0) - mt_exp(-far * far) * p / q;
    p = mt_erf_near(square, &q);
    const REAL near = z * p / q;
    const REAL away = z < REAL_C(0.0) ? -rest : rest;
    return size < REAL_C(0.46875) ? near : away;
}

/* The normal distribution function, Phi(x), and its density, phi(x).
 *
 * float: Abramowitz and Stegun 1964, Handbook of Mathematical Functions, 7.1.26, absolute error of Phi 7.5e-8 before
 * it is rounded.
 * double: as erf above; absolute error below 2e-16.
 */
MT_INLINE REAL mt_normal(REAL x, REAL *density) {
    const REAL z = x * REAL_C(0.70710678118654752440);
    REAL size = z < REAL_C(0.0) ? -z : z;
    size = size > REAL_C(30.0) ? REAL_C(30.0) : size; /* exp(-900) is 0; the square must not overflow */
    const REAL bell = mt_exp(-size * size);
    *density = bell * REAL_C(0.39894228040143267794);
#if REAL_IS_FLOAT
    const REAL t = REAL_C(1.0) / (REAL_C(1.0) + REAL_C(0.3275911) * size);
    REAL tail = REAL_C(1.061405429);
    tail = tail * t - REAL_C(1.453152027);
    tail = tail * t + REAL_C(1.421413741);
    tail = tail * t - REAL_C(0.284496736);
    tail = tail * t + REAL_C(0.254829592);
    tail = tail * t * bell * REAL_C(0.5); /* Phi(-|x|) */
    return z < REAL_C(0.0) ? tail : REAL_C(1.0) - tail;
#else
    const REAL far = size < 0.46875 ? 0.46875 : size;
    REAL q, p = mt_erf_far(far, &q);
    const REAL tail = 0.5 * bell * p / q;
    const REAL square = size > 0.46875 ? 0.46875 * 0.46875 : size * size;
    p = mt_erf_near(square, &q);
    const REAL near = 0.5 + 0.5 * z * p / q;
    const REAL away = z < 0.0 ? tail : 1.0 - tail;
    return size < 0.46875 ? near : away;
#endif
}

/* 1 / (1 + exp(-x)); below -88 (double: -708) it is 0. */
MT_INLINE REAL mt_sigmoid(REAL x) { return REAL_C(1.0) / (REAL_C(1.0) + mt_exp(-x)); }

/* ------------------------------------------------------------------------------------------------------------ GELU */

/* x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), and its slope.  (1 + tanh u)/2 is 1 / (1 + exp(-2u)), which
 * keeps its digits where tanh is near -1.  Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
 */
MT_INLINE REAL mt_gelu_tanh(REAL x, REAL *slope) {
    const REAL scale = REAL_C(1.59576912160573071176); /* 2 sqrt(2/pi) */
    REAL square = x * x;
    square = square > REAL_C(1e4) ? REAL_C(1e4) : square; /* from |x| = 100 on the gate is 0 or 1 to the last digit */
    const REAL e = mt_exp(-x * (scale + scale * REAL_C(0.044715) * square)); /* infinite where the gate is 0 */
    const REAL gate = REAL_C(1.0) / (REAL_C(1.0) + e);
    const REAL y = x * gate;
    /* 1 - gate, not e gate: that is 0 where the gate is 1, so that no x is large enough to matter there. */
    *slope = gate + y * (REAL_C(1.0) - gate) * (scale + scale * REAL_C(3.0) * REAL_C(0.044715) * square);
    return y;
}

/* x Phi(x), and its slope Phi(x) + x phi(x).  Source: as above. */
MT_INLINE REAL mt_gelu_erf(REAL x, REAL *slope) {
    REAL density;
    const REAL gate = mt_normal(x, &density);
    *slope = gate + x * density;
    return x * gate;
}

/* -------------------------------------------------------------------------------------------------- random numbers */

/* A bijection of 32-bit numbers with almost no bias.  Source: C. Wellons, hash-prospector ("lowbias32"). */
MT_INLINE mt_word mt_mix32(mt_word x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    x ^= x >> 16;
    return x;
}

/* A bijection of 64-bit numbers.  Source: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195. */
MT_INLINE mt_row mt_splitmix64(mt_row x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/* The word of a row (its 64-bit hash) and a global column; kept elements have a word of at least the threshold. */
MT_INLINE mt_word mt_fold(mt_row row) { return (mt_word)row ^ (mt_word)(row >> 32); }
MT_INLINE mt_word mt_column(mt_word column) { return mt_mix32(column + 1u); }

/* A uniform number between 1 - amount and 1 + amount, from a word: 1 + amount (2 (word + 1/2) / 2^32 - 1). */
MT_INLINE REAL mt_near_one(mt_word word, REAL amount) {
    const REAL middle = (REAL)(int)(word ^ 0x80000000u) + REAL_C(0.5); /* from -2^31 to 2^31 */
    return REAL_C(1.0) + amount * (middle * REAL_C(4.656612873077393e-10));
}

/* ----------------------------------------------------------------------------------------------------------- AdamW */

typedef struct {
    REAL beta1, rest1;  /* rest = 1 - beta */
    REAL beta2, rest2;
    REAL eps;           /* times sqrt(1 - beta2^t) */
    REAL rate;          /* lr sqrt(1 - beta2^t) / (1 - beta1^t) */
    REAL keep;          /* 1 - lr weight_decay */
} mt_adamw_numbers;

/* Kingma and Ba 2014, arXiv:1412.6980, algorithm 1; Loshchilov and Hutter 2017, arXiv:1711.05101, algorithm 2.  The
 * root comes from the includer: MT_SQRT. */
#define MT_ADAMW(p, g, m, v, c)                                  \
    do {                                                         \
        m = c.beta1 * m + c.rest1 * g;                           \
        v = c.beta2 * v + c.rest2 * (g * g);                     \
        p = c.keep * p - c.rate * (m / (MT_SQRT(v) + c.eps));    \
    } while (0)

#endif
