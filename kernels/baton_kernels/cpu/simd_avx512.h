// Registers of 16 lanes: AVX-512 F, BW, VL and DQ, and BF16 at levels that have it. Included by simd.h only.
#pragma once
#include <immintrin.h>

constexpr int kPartLanes = 16, kNumRegisters = 32;
typedef float PartF __attribute__((vector_size(64)));
typedef int32_t PartI __attribute__((vector_size(64)));
typedef __mmask16 PartMask;
typedef __m256i Half;

ALWAYS_INLINE PartF part_splat(float x) { return _mm512_set1_ps(x); }
ALWAYS_INLINE PartI part_splat(int32_t x) { return (PartI)_mm512_set1_epi32(x); }
ALWAYS_INLINE PartI part_shift_right(PartI v, int count) {
    return (PartI)_mm512_srli_epi32((__m512i)v, count);
}
ALWAYS_INLINE PartF part_abs(PartF v) { return _mm512_abs_ps(v); }
ALWAYS_INLINE PartF part_floor(PartF v) { return _mm512_floor_ps(v); }
ALWAYS_INLINE PartI part_to_int(PartF v) { return (PartI)_mm512_cvtps_epi32(v); }
ALWAYS_INLINE PartF part_to_float(PartI v) { return _mm512_cvtepi32_ps((__m512i)v); }
ALWAYS_INLINE PartF part_max(PartF a, PartF b) { return _mm512_max_ps(a, b); }
ALWAYS_INLINE PartF part_min(PartF a, PartF b) { return _mm512_min_ps(a, b); }
ALWAYS_INLINE PartF part_fma(PartF a, PartF b, PartF c) { return _mm512_fmadd_ps(a, b, c); }
ALWAYS_INLINE PartF part_fnma(PartF a, PartF b, PartF c) { return _mm512_fnmadd_ps(a, b, c); }
ALWAYS_INLINE PartMask part_less(PartF a, PartF b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
ALWAYS_INLINE PartMask part_equal(PartF a, PartF b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
ALWAYS_INLINE PartMask part_greater(PartI a, PartI b) {
    return _mm512_cmpgt_epi32_mask((__m512i)a, (__m512i)b);
}
ALWAYS_INLINE PartMask part_equal(PartI a, PartI b) {
    return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b);
}
ALWAYS_INLINE PartF part_select(PartMask m, PartF a, PartF b) { return _mm512_mask_mov_ps(b, m, a); }
ALWAYS_INLINE bool part_any(PartMask m) { return m != 0; }
ALWAYS_INLINE float part_reduce_add(PartF v) { return _mm512_reduce_add_ps(v); }
ALWAYS_INLINE float part_reduce_max(PartF v) { return _mm512_reduce_max_ps(v); }

// x - floor(x), and p * 2^floor(x) for x <= 0
ALWAYS_INLINE PartF part_fraction(PartF x) { return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF); }
ALWAYS_INLINE PartF part_scale(PartF p, PartF x) { return _mm512_scalef_ps(p, x); }

ALWAYS_INLINE PartI part_load_i8(const int8_t* p) {
    return (PartI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
ALWAYS_INLINE void part_store_i8(int8_t* p, PartI v) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
}

ALWAYS_INLINE void part_transpose(PartI (&rows)[16]) {
    __m512i v[16], t[16];
    for (int i = 0; i < 16; i++) v[i] = (__m512i)rows[i];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        rows[i] = (PartI)_mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        rows[i + 8] = (PartI)_mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// Part i of 16 values of 16 bits, zero-extended.
ALWAYS_INLINE PartI part_of_half(Half v, int) { return (PartI)_mm512_cvtepu16_epi32(v); }
// Bits of a float32 with the bfloat16 nearest to v in the upper half; the lower half is arbitrary.
ALWAYS_INLINE PartI part_bf16_bits(PartF v) {
#if defined(__AVX512BF16__)
    return (PartI)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)), 16);
#else
    const PartI bits = (PartI)v;
    const PartI rounded = bits + part_splat(0x7FFF) + (part_shift_right(bits, 16) & part_splat(1));
    const PartMask is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return (PartI)part_select(is_nan, (PartF)(bits | part_splat(0x400000)), (PartF)rounded);
#endif
}
ALWAYS_INLINE Half half_of_floats(const PartF (&v)[1]) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(v[0]);
#else
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)part_bf16_bits(v[0]), 16));
#endif
}
ALWAYS_INLINE PartF part_widen_f16(Half v, int) { return _mm512_cvtph_ps(v); }
ALWAYS_INLINE Half half_of_floats_f16(const PartF (&v)[1]) {
    return _mm512_cvtps_ph(v[0], _MM_FROUND_TO_NEAREST_INT);
}
#if defined(__AVX512BF16__)
#define HAS_BF16_DOT
ALWAYS_INLINE PartF part_dot_bf16(PartF sum, PartI a, PartI b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}
ALWAYS_INLINE PartI part_pairs(PartF even, PartF odd) {
    alignas(64) static const uint16_t turns[32] = {
        0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    return (PartI)_mm512_permutexvar_epi16(_mm512_load_si512(turns), both);
}
ALWAYS_INLINE void part_load_pairs(const void* a, const void* b, long count, bool has_b, PartI& low,
                                   PartI& high) {
    const __mmask32 m = count >= 32 ? ~0u : (1u << count) - 1;
    const __m512i x = _mm512_maskz_loadu_epi16(m, a), y = _mm512_maskz_loadu_epi16(has_b ? m : 0, b);
    low = (PartI)_mm512_unpacklo_epi16(x, y);
    high = (PartI)_mm512_unpackhi_epi16(x, y);
}
ALWAYS_INLINE PartF part_in_order(PartF low, PartF high, bool is_last) {
    const __m512i from = is_last
        ? _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)
        : _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    return _mm512_permutex2var_ps(low, from, high);
}
#endif

#if defined(__AVX512VNNI__)
#define HAS_QUAD_DOT
// sum + products of the four unsigned bytes of w and the four signed ones of x
ALWAYS_INLINE PartI part_dot_quads(PartI sum, PartI w, PartI x) {
    return (PartI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
#else
// a0 * b0 + a1 * b1 of the two int16 in each lane
ALWAYS_INLINE PartI part_dot_pairs(PartI a, PartI b) {
    return (PartI)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
#endif
