// Vectors of 8 words of 64 bits, for copies and checksums of KV transfer. Results go over the wire and are the same at
// every CPU level.
//
// As in simd.h, a vector takes as many registers as the level needs.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define WORD_REGISTER_BYTES 64
#elif defined(__AVX2__)
#include <immintrin.h>
#define WORD_REGISTER_BYTES 32
#elif defined(__aarch64__)
#include <arm_neon.h>
#define WORD_REGISTER_BYTES 16
#else
#error "no such level: see baton_kernels/cpu/library.py"
#endif

#define WORDS_INLINE static inline __attribute__((always_inline))

typedef uint64_t WordRegister __attribute__((vector_size(WORD_REGISTER_BYTES)));

constexpr long kRegisterWords = WORD_REGISTER_BYTES / 8, kNumRegistersOfWords = 8 / kRegisterWords;

#define FOR_REGISTERS _Pragma("GCC unroll 4") for (int r = 0; r < kNumRegistersOfWords; r++)

struct u64x8 {
    WordRegister reg[kNumRegistersOfWords];
};

WORDS_INLINE u64x8 splat_word(uint64_t x) {
    u64x8 v;
    FOR_REGISTERS v.reg[r] = WordRegister{} + x;
    return v;
}
// At any alignment.
WORDS_INLINE u64x8 load_u64(const void* p) {
    u64x8 v;
    FOR_REGISTERS memcpy(&v.reg[r], (const char*)p + r * WORD_REGISTER_BYTES, WORD_REGISTER_BYTES);
    return v;
}
WORDS_INLINE void store_u64(void* p, u64x8 v) {
    FOR_REGISTERS memcpy((char*)p + r * WORD_REGISTER_BYTES, &v.reg[r], WORD_REGISTER_BYTES);
}
// Streaming store (bypasses caches) where the CPU has one; aligned to 64 bytes. Arm cores detect fully written lines
// themselves.
WORDS_INLINE void stream_u64(void* p, u64x8 v) {
    FOR_REGISTERS {
        char* at = (char*)p + r * WORD_REGISTER_BYTES;
#if defined(__AVX512F__)
        _mm512_stream_si512((__m512i*)at, (__m512i)v.reg[r]);
#elif defined(__AVX2__)
        _mm256_stream_si256((__m256i*)at, (__m256i)v.reg[r]);
#else
        memcpy(at, &v.reg[r], WORD_REGISTER_BYTES);
#endif
    }
}
// Orders streaming stores before all later stores.
WORDS_INLINE void end_stream() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

#define WORDS_BINARY(OPERATOR)                                      \
    WORDS_INLINE u64x8 operator OPERATOR(u64x8 a, u64x8 b) {        \
        FOR_REGISTERS a.reg[r] = a.reg[r] OPERATOR b.reg[r];        \
        return a;                                                   \
    }
WORDS_BINARY(+)
WORDS_BINARY(^)
WORDS_BINARY(|)
WORDS_BINARY(*)  // modulo 2^64
#undef WORDS_BINARY

WORDS_INLINE u64x8 operator>>(u64x8 v, int count) {
    FOR_REGISTERS v.reg[r] = v.reg[r] >> count;
    return v;
}
// Product of the lower and the upper half of each word.
WORDS_INLINE u64x8 multiply_halves(u64x8 v) {
    FOR_REGISTERS {
#if defined(__AVX512F__)
        const __m512i x = (__m512i)v.reg[r];
        v.reg[r] = (WordRegister)_mm512_mul_epu32(x, _mm512_srli_epi64(x, 32));
#elif defined(__AVX2__)
        const __m256i x = (__m256i)v.reg[r];
        v.reg[r] = (WordRegister)_mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
#else
        const uint64x2_t x = (uint64x2_t)v.reg[r];
        v.reg[r] = (WordRegister)vmull_u32(vmovn_u64(x), vshrn_n_u64(x, 32));
#endif
    }
    return v;
}
// Product with 32 bits, modulo 2^64.
WORDS_INLINE u64x8 multiply_by(u64x8 v, uint32_t factor) {
    FOR_REGISTERS {
#if defined(__AVX512DQ__)
        v.reg[r] = v.reg[r] * factor;
#elif defined(__AVX2__)
        const __m256i x = (__m256i)v.reg[r], f = _mm256_set1_epi64x(factor);
        const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), f);
        const __m256i low = _mm256_mul_epu32(x, f);
        v.reg[r] = (WordRegister)_mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
#else
        const uint64x2_t x = (uint64x2_t)v.reg[r];
        const uint64x2_t high = vmull_n_u32(vshrn_n_u64(x, 32), factor);
        const uint64x2_t low = vmull_n_u32(vmovn_u64(x), factor);
        v.reg[r] = (WordRegister)vaddq_u64(low, vshlq_n_u64(high, 32));
#endif
    }
    return v;
}
// Swaps neighbours: 0 and 1, 2 and 3, ...
WORDS_INLINE u64x8 swap_neighbours(u64x8 v) {
    FOR_REGISTERS {
#if defined(__AVX512F__)
        const _MM_PERM_ENUM order = (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2);
        v.reg[r] = (WordRegister)_mm512_shuffle_epi32((__m512i)v.reg[r], order);
#elif defined(__AVX2__)
        const int order = _MM_SHUFFLE(1, 0, 3, 2);
        v.reg[r] = (WordRegister)_mm256_shuffle_epi32((__m256i)v.reg[r], order);
#else
        const uint64x2_t x = (uint64x2_t)v.reg[r];
        v.reg[r] = (WordRegister)vextq_u64(x, x, 1);
#endif
    }
    return v;
}
WORDS_INLINE uint64_t sum_of_words(u64x8 v) {
    uint64_t words[8], sum = 0;
    memcpy(words, &v, sizeof words);
    for (int i = 0; i < 8; i++) sum += words[i];
    return sum;
}
