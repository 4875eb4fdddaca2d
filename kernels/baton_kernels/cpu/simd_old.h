// Vectors of 16 float32 lanes over memory that is float32 or bfloat16. AVX-512 with BF16 and VNNI.
#pragma once
#include <immintrin.h>
#include <stdint.h>

// As baton_kernels.cpu.stored numbers the types that KV is stored in.
enum Stored : long { kFloat32, kBfloat16, kFloat16, kInt8, kFp8 };

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 0, by a polynomial of x - floor(x) in [0, 1), the highest power first; the last coefficient is 1, so that
// 2^0 = 1. Coefficients: least relative error (Lawson's iteration). -inf gives 0, NaN stays.
template <int N>
static inline __m512 exp2_nonpositive(__m512 x, const float (&coefficients)[N]) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_set1_ps(coefficients[0]);
    for (int i = 1; i < N; i++) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(coefficients[i]));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
}

// Has a line of memory brought into the L2 cache. In assembly, for GCC 12 takes functions of nothing but
// _mm_prefetch to do nothing, and drops their calls.
static inline void fetch(const void* line) { asm volatile("prefetcht1 %0" : : "m"(*(const char*)line)); }

struct F32 {
    using element = float;
    static constexpr long stored = kFloat32;
    static constexpr int per_word = 1;  // elements in the 32 bits that one lane multiplies at a time
    static __m512 load(const float* p) { return _mm512_loadu_ps(p); }
    static __m512 load(const float* p, __mmask16 m) { return _mm512_maskz_loadu_ps(m, p); }
    static void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
    static void store(float* p, __m512 v, __mmask16 m) { _mm512_mask_storeu_ps(p, m, v); }
    static void store(float* p, __m512 v, __m512 w) { store(p, v), store(p + 16, w); }
    static __m512 round(__m512 v) { return v; }
    // 2^x for x <= 0, relative error of the polynomial 2e-9
    static __m512 exp2(__m512 x) {
        return exp2_nonpositive(x, {2.16129176e-4f, 1.24678457e-3f, 9.67545164e-3f, 5.54852806e-2f,
                                    2.40229306e-1f, 6.93147044e-1f});
    }
    // sum + a * b, lane by lane
    static __m512 step(__m512 sum, __m512i a, __m512i b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }
};

struct BF16 {
    using element = uint16_t;
    static constexpr long stored = kBfloat16;
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
    static void store(uint16_t* p, __m512 v, __m512 w) {
        _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(w, v));
    }
    static __m512 round(__m512 v) { return widen(narrow(v)); }
    // 2^x for x <= 0, relative error 9e-5: a twentieth of what rounding to bfloat16 may lose
    static __m512 exp2(__m512 x) {
        return exp2_nonpositive(x, {7.70670604e-2f, 2.27644971e-1f, 6.95116791e-1f});
    }
    // sum + a0 * b0 + a1 * b1, lane by lane, each lane being a pair of bfloat16
    static __m512 step(__m512 sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
};

static inline __mmask16 first_lanes(long n) { return n >= 16 ? 0xFFFF : (__mmask16)((1u << n) - 1); }
