/* Half precision to single and back, for one CPU level. */
#include <string.h>
#include "table.h"
#ifdef __F16C__
#include <immintrin.h>
#endif

/* IEEE half to single: exact.  A half that is subnormal is a whole number of 2^-24. */
static inline float half_value(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7FFFu;
    const float small = (float)(int32_t)rest * 0x1p-24f;
    uint32_t small_bits;
    memcpy(&small_bits, &small, 4);
    const uint32_t normal = (rest << 13) + ((127u - 15u) << 23);
    const uint32_t special = (rest << 13) | 0x7F800000u | (rest > 0x7C00u ? 0x00400000u : 0u); /* a quiet NaN */
    const uint32_t bits = sign | (rest < 0x0400u ? small_bits : rest >= 0x7C00u ? special : normal);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Single to half, to the nearest, ties to even; what is too large becomes infinity. */
static inline uint16_t half_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint32_t sign = (bits >> 16) & 0x8000u, size = bits & 0x7FFFFFFFu;
    float magnitude, shifted;
    memcpy(&magnitude, &size, 4);
    shifted = magnitude + 0.5f; /* the last bit of a sum from 0.5 on is worth 2^-24, as that of a subnormal half */
    uint32_t small;
    memcpy(&small, &shifted, 4);
    small -= 0x3F000000u;
    const uint32_t normal = (size - ((127u - 15u) << 23) + 0x0FFFu + ((size >> 13) & 1u)) >> 13;
    const uint32_t special = size > 0x7F800000u ? 0x7E00u | ((size >> 13) & 0x03FFu) : 0x7C00u;
    const uint32_t rest = size < 0x38800000u ? small : size >= 0x47800000u ? special : normal;
    return (uint16_t)(sign | rest);
}

static void half_to_float(const uint16_t *restrict x, float *restrict y, len count) {
    len i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i))));
#endif
#ifdef __F16C__
    for (; i + 8 <= count; i += 8) _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
#endif
    for (; i < count; i++) y[i] = half_value(x[i]);
}

static void float_to_half(const float *restrict x, uint16_t *restrict y, len count) {
    len i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= count; i += 16)
        _mm256_storeu_si256((__m256i *)(y + i), _mm512_cvtps_ph(_mm512_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
#ifdef __F16C__
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; i++) y[i] = half_bits(x[i]);
}

static void bfloat_to_float(const uint16_t *restrict x, float *restrict y, len count) {
    for (len i = 0; i < count; i++) {
        const uint32_t bits = (uint32_t)x[i] << 16;
        memcpy(y + i, &bits, 4);
    }
}

/* Single to bfloat16: the upper half, to the nearest, ties to even; NaN stays NaN. */
static void float_to_bfloat(const float *restrict x, uint16_t *restrict y, len count) {
    for (len i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
        y[i] = (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits >> 16) | 0x0040u : rounded);
    }
}

const mt_halves MT_PASTE(mt_halves, any, LEVEL) = {half_to_float, float_to_half, bfloat_to_float, float_to_bfloat};
