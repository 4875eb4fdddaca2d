// Vectors of 16 float32 lanes over memory that is float32 or bfloat16. AVX-512 with BF16 and VNNI.
#pragma once
#include <immintrin.h>
#include <stdint.h>

struct F32 {
    using element = float;
    static constexpr int per_word = 1;  // elements in the 32 bits that one lane multiplies at a time
    static __m512 load(const float* p) { return _mm512_loadu_ps(p); }
    static __m512 load(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
    static void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
    static void store(float* p, __m512 v, __mmask16 m) { _mm512_mask_storeu_ps(p, m, v); }
    static __m512 round(__m512 v) { return v; }
    // sum + a * b, lane by lane
    static __m512 step(__m512 sum, __m512i a, __m512i b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }
};

struct BF16 {
    using element = uint16_t;
    static constexpr int per_word = 2;
    static __m512 widen(__m256i v) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
    }
    static __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }
    static __m512 load(const uint16_t* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
    static __m512 load(const uint16_t* p, __mmask16 m) {
        return widen(_mm256_maskz_loadu_epi16(m, p));
    }
    static void store(uint16_t* p, __m512 v) { _mm256_storeu_si256((__m256i*)p, narrow(v)); }
    static void store(uint16_t* p, __m512 v, __mmask16 m) {
        _mm256_mask_storeu_epi16(p, m, narrow(v));
    }
    static __m512 round(__m512 v) { return widen(narrow(v)); }
    // sum + a0 * b0 + a1 * b1, lane by lane, each lane being a pair of bfloat16
    static __m512 step(__m512 sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
};

static inline __mmask16 first_lanes(long n) { return n >= 16 ? 0xFFFF : (__mmask16)((1u << n) - 1); }

// e^x for x <= 0, relative error below 2e-7; 0 below -87. Range reduction by ln 2, then Taylor's polynomial of degree 6.
static inline __m512 exp_nonpositive(__m512 x) {
    const __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), r);
    __m512 p = _mm512_set1_ps(1.0f / 720);
    const float coefficients[] = {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float c : coefficients) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return _mm512_maskz_scalef_ps(keep, p, n);
}
