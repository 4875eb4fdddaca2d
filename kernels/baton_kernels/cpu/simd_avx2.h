// Registers of 8 lanes: AVX2, FMA and F16C. Included by simd.h only.
#pragma once
#include <immintrin.h>

constexpr int kPartLanes = 8, kNumRegisters = 16;
typedef float PartF __attribute__((vector_size(32)));
typedef int32_t PartI __attribute__((vector_size(32)));
typedef PartI PartMask;
typedef __m256i Half;

ALWAYS_INLINE PartF part_splat(float x) { return _mm256_set1_ps(x); }
ALWAYS_INLINE PartI part_splat(int32_t x) { return (PartI)_mm256_set1_epi32(x); }
ALWAYS_INLINE PartI part_shift_right(PartI v, int count) {
    return (PartI)_mm256_srli_epi32((__m256i)v, count);
}
ALWAYS_INLINE PartF part_abs(PartF v) { return (PartF)((PartI)v & part_splat(0x7FFFFFFF)); }
ALWAYS_INLINE PartF part_floor(PartF v) { return _mm256_floor_ps(v); }
ALWAYS_INLINE PartI part_to_int(PartF v) { return (PartI)_mm256_cvtps_epi32(v); }
ALWAYS_INLINE PartF part_to_float(PartI v) { return _mm256_cvtepi32_ps((__m256i)v); }
ALWAYS_INLINE PartF part_max(PartF a, PartF b) { return _mm256_max_ps(a, b); }
ALWAYS_INLINE PartF part_min(PartF a, PartF b) { return _mm256_min_ps(a, b); }
ALWAYS_INLINE PartF part_fma(PartF a, PartF b, PartF c) { return _mm256_fmadd_ps(a, b, c); }
ALWAYS_INLINE PartF part_fnma(PartF a, PartF b, PartF c) { return _mm256_fnmadd_ps(a, b, c); }
ALWAYS_INLINE PartMask part_less(PartF a, PartF b) { return a < b; }
ALWAYS_INLINE PartMask part_equal(PartF a, PartF b) { return a == b; }
ALWAYS_INLINE PartMask part_greater(PartI a, PartI b) { return a > b; }
ALWAYS_INLINE PartMask part_equal(PartI a, PartI b) { return a == b; }
ALWAYS_INLINE PartF part_select(PartMask m, PartF a, PartF b) {
    return _mm256_blendv_ps(b, a, (__m256)m);
}
ALWAYS_INLINE bool part_any(PartMask m) { return _mm256_movemask_ps((__m256)m) != 0; }
ALWAYS_INLINE float part_reduce_add(PartF v) {
    const __m128 four = _mm256_castps256_ps128(v) + _mm256_extractf128_ps(v, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
}
ALWAYS_INLINE float part_reduce_max(PartF v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return two[0] > two[1] ? two[0] : two[1];
}

// x - floor(x), and p * 2^floor(x) for x <= 0; flushes to 0 below 2^-126, where the exponent field is 0.
ALWAYS_INLINE PartF part_bounded(PartF x) { return part_max(part_splat(-127.0f), x); }
ALWAYS_INLINE PartF part_fraction(PartF x) { return part_bounded(x) - part_floor(part_bounded(x)); }
ALWAYS_INLINE PartF part_scale(PartF p, PartF x) {
    return p * (PartF)((part_to_int(part_floor(part_bounded(x))) + part_splat(127)) << 23);
}

ALWAYS_INLINE PartI part_load_i8(const int8_t* p) {
    return (PartI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
ALWAYS_INLINE void part_store_i8(int8_t* p, PartI v) {
    const __m256i bytes = (__m256i)(v & part_splat(0xFF));
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(words, words));
}

ALWAYS_INLINE void part_transpose(PartI (&rows)[8]) {
    __m256i t[8], v[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        v[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = (PartI)_mm256_permute2x128_si256(v[i], v[i + 4], 0x20);
        rows[i + 4] = (PartI)_mm256_permute2x128_si256(v[i], v[i + 4], 0x31);
    }
}

ALWAYS_INLINE __m128i eight_of_half(Half v, int i) {
    return i ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v);
}
// Part i of 16 values of 16 bits, zero-extended.
ALWAYS_INLINE PartI part_of_half(Half v, int i) {
    return (PartI)_mm256_cvtepu16_epi32(eight_of_half(v, i));
}
// Bits of a float32 with the bfloat16 nearest to v in the upper half; the lower half is arbitrary.
ALWAYS_INLINE PartI part_bf16_bits(PartF v) {
    const PartI bits = (PartI)v;
    const PartI rounded = bits + part_splat(0x7FFF) + (part_shift_right(bits, 16) & part_splat(1));
    return (PartI)part_select((PartMask)(v != v), (PartF)(bits | part_splat(0x400000)), (PartF)rounded);
}
ALWAYS_INLINE Half half_of_floats(const PartF (&v)[2]) {
    const PartI low = part_shift_right(part_bf16_bits(v[0]), 16);
    const PartI high = part_shift_right(part_bf16_bits(v[1]), 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)low, (__m256i)high), 0xD8);
}
ALWAYS_INLINE PartF part_widen_f16(Half v, int i) { return _mm256_cvtph_ps(eight_of_half(v, i)); }
ALWAYS_INLINE Half half_of_floats_f16(const PartF (&v)[2]) {
    return _mm256_set_m128i(_mm256_cvtps_ph(v[1], _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(v[0], _MM_FROUND_TO_NEAREST_INT));
}

// a0 * b0 + a1 * b1 and a2 * b2 + a3 * b3 of four unsigned and four signed bytes in each lane: two int16, saturated
#define HAS_BYTE_PAIRS
ALWAYS_INLINE PartI part_dot_byte_pairs(PartI a, PartI b) {
    return (PartI)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}
ALWAYS_INLINE PartI part_add_pairs(PartI a, PartI b) {
    return (PartI)_mm256_add_epi16((__m256i)a, (__m256i)b);
}
// a0 * b0 + a1 * b1 of the two int16 in each lane
ALWAYS_INLINE PartI part_dot_pairs(PartI a, PartI b) {
    return (PartI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
