/* CUDA C++ for g++: what a kernel may use, on one thread of the host at a time.
 *
 * Read before every kernel (`emulation.py`).  A thread of a block is a fiber of `emulator.cpp`; it runs until it waits at
 * a barrier or a shuffle.  There is no <cmath> and no other header here, as in NVRTC; what is missing is missing on
 * purpose: float atomics (their sums depend on the run), cooperative groups, cuda_fp16.h.
 */
#pragma once

#define MT_EMULATED 1
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1

typedef decltype(sizeof(0)) size_t;

/* ------------------------------------------------------------------------------------------- words before functions */

#define __global__ __attribute__((noinline, used))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __inline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__))) /* read by emulation.py */
#define __align__(n) __attribute__((aligned(n)))
#define __constant__ static
#define __restrict __restrict__
#define __shared__ static __attribute__((section("emu_shared")))

/* ------------------------------------------------------------------------------------------------------ vector types */

#define EMU_VECTORS(T, name, align)                                                                                    \
    struct name##1 { T x; };                                                                                          \
    struct __align__(align * 2) name##2 { T x, y; };                                                                  \
    struct name##3 { T x, y, z; };                                                                                    \
    struct __align__(align * 4 > 16 ? 16 : align * 4) name##4 { T x, y, z, w; };                                      \
    static inline name##2 make_##name##2(T x, T y) { name##2 v = {x, y}; return v; }                                  \
    static inline name##3 make_##name##3(T x, T y, T z) { name##3 v = {x, y, z}; return v; }                          \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { name##4 v = {x, y, z, w}; return v; }
EMU_VECTORS(char, char, 1)
EMU_VECTORS(unsigned char, uchar, 1)
EMU_VECTORS(short, short, 2)
EMU_VECTORS(unsigned short, ushort, 2)
EMU_VECTORS(int, int, 4)
EMU_VECTORS(unsigned int, uint, 4)
EMU_VECTORS(long long, longlong, 8)
EMU_VECTORS(unsigned long long, ulonglong, 8)
EMU_VECTORS(float, float, 4)
EMU_VECTORS(double, double, 8)
#undef EMU_VECTORS

struct dim3 {
    unsigned int x, y, z;
};

/* -------------------------------------------------------------------------------------------------- threads, waiting */

struct emulator { /* as in emulator.cpp */
    uint3 thread, block;
    dim3 threads, blocks;
    void *dynamic;
    void (*barrier)(int line);
    int (*barrier_sum)(int line, int value, int how);
    unsigned long long (*exchange)(unsigned int mask, unsigned long long bits, int source, int line, int kind);
    void (*fail)(const char *why, int line);
};
static emulator *emu;

#define threadIdx (emu->thread)
#define blockIdx (emu->block)
#define blockDim (emu->threads)
#define gridDim (emu->blocks)
static const int warpSize = 32;

#define MT_DYNAMIC_SHARED(type, name) type *name = (type *)emu->dynamic

#define __syncthreads() emu->barrier(__LINE__)
#define __syncthreads_count(x) emu->barrier_sum(__LINE__, (x) != 0, 0)
#define __syncthreads_or(x) emu->barrier_sum(__LINE__, (x) != 0, 1)
#define __syncthreads_and(x) emu->barrier_sum(__LINE__, (x) != 0, 2)
#define __threadfence() ((void)0)
#define __threadfence_block() ((void)0)
#define __trap() emu->fail("the kernel called __trap()", __LINE__)

static inline int emu_lane() {
    return (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31u);
}

template <class T> static inline T emu_shuffle(unsigned int mask, T value, int source, int line, int kind) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    bits = emu->exchange(mask, bits, source, line, kind);
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}
/* The lane to read from; the own one where the hardware leaves the value alone. */
static inline int emu_from_xor(int other, int width) {
    const int lane = emu_lane(), to = lane ^ other;
    return to < (lane | (width - 1)) + 1 ? to : lane;
}
static inline int emu_from_down(int by, int width) {
    const int lane = emu_lane();
    return (lane & (width - 1)) + by < width ? lane + by : lane;
}
static inline int emu_from_up(int by, int width) {
    const int lane = emu_lane();
    return (lane & (width - 1)) >= by ? lane - by : lane;
}
static inline int emu_from_lane(int source, int width) {
    return (emu_lane() & ~(width - 1)) + (source & (width - 1));
}
#define EMU_PICK(_1, _2, _3, _4, name, ...) name
#define EMU_XOR3(m, v, s) emu_shuffle(m, v, emu_from_xor(s, 32), __LINE__, 1)
#define EMU_XOR4(m, v, s, w) emu_shuffle(m, v, emu_from_xor(s, w), __LINE__, 1)
#define EMU_DOWN3(m, v, s) emu_shuffle(m, v, emu_from_down((int)(s), 32), __LINE__, 2)
#define EMU_DOWN4(m, v, s, w) emu_shuffle(m, v, emu_from_down((int)(s), w), __LINE__, 2)
#define EMU_UP3(m, v, s) emu_shuffle(m, v, emu_from_up((int)(s), 32), __LINE__, 3)
#define EMU_UP4(m, v, s, w) emu_shuffle(m, v, emu_from_up((int)(s), w), __LINE__, 3)
#define EMU_LANE3(m, v, s) emu_shuffle(m, v, emu_from_lane(s, 32), __LINE__, 4)
#define EMU_LANE4(m, v, s, w) emu_shuffle(m, v, emu_from_lane(s, w), __LINE__, 4)
#define __shfl_xor_sync(...) EMU_PICK(__VA_ARGS__, EMU_XOR4, EMU_XOR3, , )(__VA_ARGS__)
#define __shfl_down_sync(...) EMU_PICK(__VA_ARGS__, EMU_DOWN4, EMU_DOWN3, , )(__VA_ARGS__)
#define __shfl_up_sync(...) EMU_PICK(__VA_ARGS__, EMU_UP4, EMU_UP3, , )(__VA_ARGS__)
#define __shfl_sync(...) EMU_PICK(__VA_ARGS__, EMU_LANE4, EMU_LANE3, , )(__VA_ARGS__)
#define EMU_PICK_MASK(_0, mask, ...) mask
#define __syncwarp(...) ((void)emu->exchange(EMU_PICK_MASK(_0 __VA_OPT__(, ) __VA_ARGS__, 0xFFFFFFFFu), 0, -1, __LINE__, 5))
#define __ballot_sync(m, x) ((unsigned int)emu->exchange(m, (x) != 0, -2, __LINE__, 6))
#define __any_sync(m, x) (__ballot_sync(m, x) != 0)
#define __all_sync(m, x) (__ballot_sync(m, !(x)) == 0)

/* ------------------------------------------------------------------------------------------------------- mathematics */

#define EMU_MATH1(name)                                                                                                \
    static inline float name(float x) { return __builtin_##name##f(x); }                                              \
    static inline double name(double x) { return __builtin_##name(x); }                                               \
    static inline float name##f(float x) { return __builtin_##name##f(x); }
#define EMU_MATH2(name)                                                                                                \
    static inline float name(float x, float y) { return __builtin_##name##f(x, y); }                                  \
    static inline double name(double x, double y) { return __builtin_##name(x, y); }                                  \
    static inline float name##f(float x, float y) { return __builtin_##name##f(x, y); }
EMU_MATH1(sqrt)
EMU_MATH1(exp)
EMU_MATH1(exp2)
EMU_MATH1(expm1)
EMU_MATH1(log)
EMU_MATH1(log2)
EMU_MATH1(log1p)
EMU_MATH1(tanh)
EMU_MATH1(sin)
EMU_MATH1(cos)
EMU_MATH1(erf)
EMU_MATH1(fabs)
EMU_MATH1(floor)
EMU_MATH1(ceil)
EMU_MATH1(rint)
EMU_MATH1(trunc)
EMU_MATH2(fmax)
EMU_MATH2(fmin)
EMU_MATH2(fmod)
EMU_MATH2(pow)
EMU_MATH2(copysign)
#undef EMU_MATH1
#undef EMU_MATH2
static inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
static inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
static inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
static inline float abs(float x) { return __builtin_fabsf(x); }
static inline double abs(double x) { return __builtin_fabs(x); }
static inline int abs(int x) { return x < 0 ? -x : x; }
static inline long long abs(long long x) { return x < 0 ? -x : x; }
static inline bool isnan(float x) { return x != x; }
static inline bool isnan(double x) { return x != x; }
static inline bool isinf(float x) { return __builtin_isinf(x); }
static inline bool isinf(double x) { return __builtin_isinf(x); }
static inline bool isfinite(float x) { return __builtin_isfinite(x); }
static inline bool isfinite(double x) { return __builtin_isfinite(x); }
#define EMU_MINMAX(T)                                                                                                  \
    static inline T min(T x, T y) { return y < x ? y : x; }                                                           \
    static inline T max(T x, T y) { return x < y ? y : x; }
EMU_MINMAX(int)
EMU_MINMAX(unsigned int)
EMU_MINMAX(long)
EMU_MINMAX(unsigned long)
EMU_MINMAX(long long)
EMU_MINMAX(unsigned long long)
#undef EMU_MINMAX
static inline float min(float x, float y) { return __builtin_fminf(x, y); }
static inline float max(float x, float y) { return __builtin_fmaxf(x, y); }
static inline double min(double x, double y) { return __builtin_fmin(x, y); }
static inline double max(double x, double y) { return __builtin_fmax(x, y); }

template <class T, class F> static inline T emu_bits_as(F value) {
    static_assert(sizeof(T) == sizeof(F), "as many bytes");
    T bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}
#define __float_as_uint(x) emu_bits_as<unsigned int, float>(x)
#define __float_as_int(x) emu_bits_as<int, float>(x)
#define __uint_as_float(x) emu_bits_as<float, unsigned int>(x)
#define __int_as_float(x) emu_bits_as<float, int>(x)
#define __double_as_longlong(x) emu_bits_as<long long, double>(x)
#define __longlong_as_double(x) emu_bits_as<double, long long>(x)
#define __expf(x) __builtin_expf(x)
#define __logf(x) __builtin_logf(x)
#define __fdividef(x, y) ((float)(x) / (float)(y))
#define __frcp_rn(x) (1.0f / (float)(x))
#define __fsqrt_rn(x) __builtin_sqrtf(x)
#define __fmaf_rn(x, y, z) __builtin_fmaf(x, y, z)
#define __fma_rn(x, y, z) __builtin_fma(x, y, z)
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
#define __float2int_rn(x) ((int)__builtin_rintf(x))
#define __clz(x) ((x) ? __builtin_clz((unsigned int)(x)) : 32)
#define __popc(x) __builtin_popcount((unsigned int)(x))
#define __ffs(x) __builtin_ffs((int)(x))
#define __umulhi(x, y) ((unsigned int)(((unsigned long long)(unsigned int)(x) * (unsigned int)(y)) >> 32))
template <class T> static inline T __ldg(const T *p) { return *p; }

/* Whole numbers only: a sum of floats would depend on which thread came first. */
#define EMU_ATOMICS(T)                                                                                                 \
    static inline T atomicAdd(T *p, T x) { const T old = *p; *p = old + x; return old; }                              \
    static inline T atomicMax(T *p, T x) { const T old = *p; *p = old < x ? x : old; return old; }                    \
    static inline T atomicMin(T *p, T x) { const T old = *p; *p = x < old ? x : old; return old; }                    \
    static inline T atomicOr(T *p, T x) { const T old = *p; *p = old | x; return old; }                               \
    static inline T atomicAnd(T *p, T x) { const T old = *p; *p = old & x; return old; }                              \
    static inline T atomicExch(T *p, T x) { const T old = *p; *p = x; return old; }                                   \
    static inline T atomicCAS(T *p, T is, T x) { const T old = *p; *p = old == is ? x : old; return old; }
EMU_ATOMICS(int)
EMU_ATOMICS(unsigned int)
EMU_ATOMICS(unsigned long long)
#undef EMU_ATOMICS

extern "C" int printf(const char *format, ...);

/* ------------------------------------------------------------------------------- what the emulator knows of a kernel */

struct emu_parameter {
    char kind;    /* i u f (numbers), s (a struct), p (a pointer) */
    char size;    /* in bytes, of what is pointed to where it is a pointer */
    char of;      /* the kind of what is pointed to */
    char is_const;
};
template <class T> struct emu_type { static constexpr emu_parameter is = {'s', (char)sizeof(T), 's', 0}; };
#define EMU_KIND(T, kind) \
    template <> struct emu_type<T> { static constexpr emu_parameter is = {kind, (char)sizeof(T), kind, 0}; };
EMU_KIND(bool, 'u')
EMU_KIND(char, 'i')
EMU_KIND(signed char, 'i')
EMU_KIND(unsigned char, 'u')
EMU_KIND(short, 'i')
EMU_KIND(unsigned short, 'u')
EMU_KIND(int, 'i')
EMU_KIND(unsigned int, 'u')
EMU_KIND(long, 'i')
EMU_KIND(unsigned long, 'u')
EMU_KIND(long long, 'i')
EMU_KIND(unsigned long long, 'u')
EMU_KIND(float, 'f')
EMU_KIND(double, 'f')
#undef EMU_KIND
template <class T> struct emu_type<const T> { static constexpr emu_parameter is = emu_type<T>::is; };
template <> struct emu_type<void> { static constexpr emu_parameter is = {'v', 0, 'v', 0}; };
template <class T> struct emu_type<T *> {
    static constexpr emu_parameter is = {'p', emu_type<T>::is.size, emu_type<T>::is.kind, 0};
};
template <class T> struct emu_type<const T *> {
    static constexpr emu_parameter is = {'p', emu_type<T>::is.size, emu_type<T>::is.kind, 1};
};

struct emu_kernel {
    const char *name;
    void (*invoke)(void **args);
    const emu_parameter *parameters;
    int count;
    int threads; /* of __launch_bounds__, or 0 */
};
template <class... T> static constexpr int emu_first(int first, T...) { return first; }
template <int... I> struct emu_numbers {};
template <auto K> struct emu_call;
template <class... A, void (*K)(A...)> struct emu_call<K> {
    static constexpr emu_parameter parameters[sizeof...(A) + 1] = {emu_type<A>::is...};
    static constexpr int count = sizeof...(A);
    template <int... I> static inline void unpack(void **args, emu_numbers<I...>) { K(*(A *)args[I]...); }
    static void invoke(void **args) { unpack(args, emu_numbers<__integer_pack((int)sizeof...(A))...>()); }
};
