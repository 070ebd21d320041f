/* What the CUDA sources share: how arrays are read and written, and sums over a block.
 *
 * A source is compiled once for each dtype that arrays hold.  Whoever compiles it defines
 *
 *     STORE            what arrays hold: float, double, mt_half (float16) or mt_brain (bfloat16)
 *     REAL             what is computed in: double for double, else float;  REAL_IS_FLOAT says which
 *
 * and puts numerics.h and this text in front of it.  There are no includes, so it needs no toolkit beside the compiler.
 * Without a GPU the same text is read by a C++ compiler, which defines CUDA's words itself.
 */

typedef long long mt_long;

struct mt_half { unsigned short bits; };
struct mt_brain { unsigned short bits; };

#ifndef MT_DYNAMIC_SHARED
/* The shared memory whose size the launch gives, as an array; once in a kernel. */
#define MT_DYNAMIC_SHARED(type, name)                                 \
    extern __shared__ __align__(16) unsigned char mt_dynamic_shared[]; \
    type *const name = reinterpret_cast<type *>(mt_dynamic_shared)
#endif

/* The loop that follows becomes straight code, so that arrays it counts through stay in registers. */
#ifdef __CUDACC__
#define MT_UNROLL _Pragma("unroll")
#else
#define MT_UNROLL
#endif

#if REAL_IS_FLOAT
#define MT_SQRT sqrtf
#define MT_LOG logf
#define MT_LOWEST (-3.402823466e+38f)
#define MT_INFINITY mt_from_bits(0x7f800000u)
#else
#define MT_SQRT sqrt
#define MT_LOG log
#define MT_LOWEST (-1.7976931348623157e+308)
#define MT_INFINITY mt_from_bits(0x7ff0000000000000ull)
#endif

/* ------------------------------------------------------------------------------------- halves to floats and back */

union mt_pun { unsigned int bits; float value; };

static __device__ __forceinline__ float mt_wide(mt_half x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
#else
    const unsigned int sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, fraction = x.bits & 0x3ffu;
    mt_pun u;
    if (exponent == 0u) { /* a fraction without its leading one: a multiple of 2^-24 */
        u.value = (float)fraction * 5.9604644775390625e-8f;
        u.bits |= sign;
    } else {
        u.bits = sign | ((exponent == 31u ? 255u : exponent + 112u) << 23) | (fraction << 13);
    }
    return u.value;
#endif
}

static __device__ __forceinline__ float mt_wide(mt_brain x) {
    mt_pun u;
    u.bits = (unsigned int)x.bits << 16;
    return u.value;
}

/* To the nearest, ties to even; beyond the range infinity; NaN stays NaN. */
static __device__ __forceinline__ void mt_narrow(float x, mt_half *out) {
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out->bits) : "f"(x));
#else
    mt_pun u;
    u.value = x;
    const unsigned int sign = (u.bits >> 16) & 0x8000u, size = u.bits & 0x7fffffffu;
    unsigned int half;
    if (size > 0x7f800000u) {
        half = 0x7fffu;
    } else if (size >= 0x477ff000u) { /* 65520 and more round to infinity */
        half = 0x7c00u;
    } else if (size < 0x38800000u) { /* below 2^-14: adding 0.5 leaves a multiple of 2^-24 in the low bits */
        u.bits = size;
        u.value += 0.5f;
        half = u.bits - 0x3f000000u;
    } else {
        half = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
    }
    out->bits = (unsigned short)(sign | half);
#endif
}

static __device__ __forceinline__ void mt_narrow(float x, mt_brain *out) {
    mt_pun u;
    u.value = x;
    const unsigned int size = u.bits & 0x7fffffffu;
    out->bits = (unsigned short)(size > 0x7f800000u ? (u.bits >> 16) | 0x40u
                                                    : (u.bits + 0x7fffu + ((u.bits >> 16) & 1u)) >> 16);
}

/* ----------------------------------------------------------------------------------------------- elements of arrays */

static __device__ __forceinline__ float mt_load(const float *p) { return *p; }
static __device__ __forceinline__ double mt_load(const double *p) { return *p; }
static __device__ __forceinline__ float mt_load(const mt_half *p) { return mt_wide(*p); }
static __device__ __forceinline__ float mt_load(const mt_brain *p) { return mt_wide(*p); }

static __device__ __forceinline__ void mt_store(float *p, float x) { *p = x; }
static __device__ __forceinline__ void mt_store(double *p, double x) { *p = x; }
static __device__ __forceinline__ void mt_store(mt_half *p, float x) { mt_narrow(x, p); }
static __device__ __forceinline__ void mt_store(mt_brain *p, float x) { mt_narrow(x, p); }

/* A value as an array would give it back. */
static __device__ __forceinline__ REAL mt_rounded(REAL x) {
    STORE y;
    mt_store(&y, x);
    return mt_load(&y);
}

/* a b + c with one rounding, said outright: the same bits whatever the compiler makes of the code around it. */
static __device__ __forceinline__ REAL mt_fma(REAL a, REAL b, REAL c) {
#if REAL_IS_FLOAT
    return fmaf(a, b, c);
#else
    return fma(a, b, c);
#endif
}

/* Four neighbours that are moved as one: 8 bytes of halves, 16 of floats, 32 of doubles. */
template <typename T>
struct alignas(4 * sizeof(T)) mt_four { T at[4]; };

/* Whether an array that begins here can be read by fours. */
template <typename T>
static __device__ __forceinline__ bool mt_by_fours(const T *p) {
    return reinterpret_cast<size_t>(p) % sizeof(mt_four<T>) == 0;
}

template <typename T>
static __device__ __forceinline__ void mt_load_four(const T *p, REAL *x) {
    const mt_four<T> four = *reinterpret_cast<const mt_four<T> *>(p);
    for (int k = 0; k < 4; k++) x[k] = (REAL)mt_load(&four.at[k]);
}

template <typename T>
static __device__ __forceinline__ void mt_store_four(T *p, const REAL *x) {
    mt_four<T> four;
    for (int k = 0; k < 4; k++) mt_store(&four.at[k], x[k]);
    *reinterpret_cast<mt_four<T> *>(p) = four;
}

/* Elements i, i + all threads, ... below n: one after the other whatever the grid. */
#define MT_EACH(i, n)                                                                         \
    for (mt_long i = (mt_long)blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += (mt_long)gridDim.x * blockDim.x)

/* -------------------------------------------------------------------- sums and maxima over a block, in a fixed order */

#define MT_ALL_LANES 0xffffffffu

template <typename T>
static __device__ __forceinline__ T mt_warp_sum(T x) {
    for (int far = 16; far; far >>= 1) x += __shfl_xor_sync(MT_ALL_LANES, x, far);
    return x;
}

template <typename T>
static __device__ __forceinline__ T mt_larger(T a, T b) { /* NaN, if either is */
    return a > b || a != a ? a : b;
}

template <typename T>
static __device__ __forceinline__ T mt_warp_max(T x) {
    for (int far = 16; far; far >>= 1) x = mt_larger(x, __shfl_xor_sync(MT_ALL_LANES, x, far));
    return x;
}

/* Every thread of a block of whole warps (blockDim.x alone) calls these, and gets the same number. */
template <typename T>
static __device__ __forceinline__ T mt_block_sum(T x) {
    __shared__ T parts[32];
    const int warps = blockDim.x >> 5;
    x = mt_warp_sum(x);
    if (warps == 1) return x;
    __syncthreads(); /* somebody may still read the parts of the last sum */
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
    __syncthreads();
    x = parts[0];
    for (int i = 1; i < warps; i++) x += parts[i];
    return x;
}

template <typename T>
static __device__ __forceinline__ T mt_block_max(T x) {
    __shared__ T parts[32];
    const int warps = blockDim.x >> 5;
    x = mt_warp_max(x);
    if (warps == 1) return x;
    __syncthreads();
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
    __syncthreads();
    x = parts[0];
    for (int i = 1; i < warps; i++) x = mt_larger(x, parts[i]);
    return x;
}
