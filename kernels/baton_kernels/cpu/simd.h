// Vectors of 16 float32 lanes over float32, bfloat16 or float16 memory, at every CPU level.
//
// The compiler's target sets the level. A vector is held in kParts registers of kPartLanes lanes, so that packed
// layouts, lanes and the order of sums are the same at every level. Operations that GCC's vector extension lacks, or
// compiles badly, are in the one file that each level includes: simd_avx512.h, simd_avx2.h or simd_neon.h.
#pragma once
#include <stdint.h>
#include <string.h>

// KV storage types, as numbered by baton_kernels.cpu.calling.
enum Stored : long { kFloat32, kBfloat16, kFloat16, kInt8, kFp8 };

constexpr float kLog2E = 1.44269504f;

#define ALWAYS_INLINE static inline __attribute__((always_inline))
// For functions that many templates call: keeps compilers from inlining a copy into each.
#define OUTLINED __attribute__((noinline))

// Each level defines: kPartLanes, kNumRegisters, PartF (float), PartI (int32), PartMask, Half (16 values of 16 bits),
// and operations on these. HAS_BF16_DOT: defines part_dot_bf16, products of pairs of bfloat16 in one instruction.
// HAS_QUAD_DOT: defines part_dot_quads, the same for four bytes; levels without it define part_dot_pairs.
// HAS_BYTE_PAIRS: defines part_dot_byte_pairs and part_add_pairs, for bytes of four bits.
#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(__aarch64__)
#include "simd_neon.h"
#else
#error "no such level: see baton_kernels/cpu/library.py"
#endif

constexpr int kParts = 16 / kPartLanes;
#if defined(HAS_BF16_DOT)
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif

#define FOR_PARTS _Pragma("GCC unroll 4") for (int i = 0; i < kParts; i++)
// Before loops over arrays of vectors that should stay in registers: compilers must unroll these early.
#define UNROLLED _Pragma("GCC unroll 16")

struct f32x16 {
    PartF part[kParts];
};
struct i32x16 {  // int32, or any 32 bits; >> is logical
    PartI part[kParts];
};
struct mask16 {
    PartMask part[kParts];
};

// Memory access at any alignment, whatever the type of its objects (may_alias).
typedef PartI LoosePart __attribute__((aligned(1), may_alias));
typedef Half LooseHalf __attribute__((aligned(1), may_alias));

ALWAYS_INLINE f32x16 splat(float x) {
    f32x16 v;
    FOR_PARTS v.part[i] = part_splat(x);
    return v;
}
ALWAYS_INLINE i32x16 splat(int32_t x) {
    i32x16 v;
    FOR_PARTS v.part[i] = part_splat(x);
    return v;
}
ALWAYS_INLINE f32x16 zeros() { return splat(0.0f); }
// 0, 1, ... 15
ALWAYS_INLINE i32x16 lane_numbers() {
    static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    i32x16 v;
    FOR_PARTS v.part[i] = ((const LoosePart*)numbers)[i];
    return v;
}

// Reinterprets 32 bits; no conversion.
ALWAYS_INLINE i32x16 bits_of(f32x16 v) {
    i32x16 w;
    FOR_PARTS w.part[i] = (PartI)v.part[i];
    return w;
}
ALWAYS_INLINE f32x16 float_of_bits(i32x16 v) {
    f32x16 w;
    FOR_PARTS w.part[i] = (PartF)v.part[i];
    return w;
}

#define BINARY(V, OPERATOR)                                       \
    ALWAYS_INLINE V operator OPERATOR(V a, V b) {                 \
        FOR_PARTS a.part[i] = a.part[i] OPERATOR b.part[i];       \
        return a;                                                 \
    }
BINARY(f32x16, +)
BINARY(f32x16, -)
BINARY(f32x16, *)
BINARY(f32x16, /)
BINARY(i32x16, +)
BINARY(i32x16, -)
BINARY(i32x16, *)
BINARY(i32x16, &)
BINARY(i32x16, |)
BINARY(i32x16, ^)
BINARY(mask16, &)
BINARY(mask16, |)
#undef BINARY

ALWAYS_INLINE i32x16 operator<<(i32x16 v, int count) {
    FOR_PARTS v.part[i] = v.part[i] << count;
    return v;
}
ALWAYS_INLINE i32x16 operator>>(i32x16 v, int count) {
    FOR_PARTS v.part[i] = part_shift_right(v.part[i], count);
    return v;
}

#define PER_PART(RESULT, NAME, V)                                 \
    ALWAYS_INLINE RESULT NAME(V a) {                              \
        RESULT v;                                                 \
        FOR_PARTS v.part[i] = part_##NAME(a.part[i]);             \
        return v;                                                 \
    }
#define PER_TWO_PARTS(RESULT, NAME, V)                            \
    ALWAYS_INLINE RESULT NAME(V a, V b) {                         \
        RESULT v;                                                 \
        FOR_PARTS v.part[i] = part_##NAME(a.part[i], b.part[i]);  \
        return v;                                                 \
    }
PER_PART(f32x16, abs, f32x16)
PER_PART(f32x16, floor, f32x16)
PER_PART(i32x16, to_int, f32x16)      // to the nearest, ties to even
PER_PART(f32x16, to_float, i32x16)
PER_TWO_PARTS(f32x16, max, f32x16)    // a > b ? a : b; b if either is NaN
PER_TWO_PARTS(f32x16, min, f32x16)    // a < b ? a : b
PER_TWO_PARTS(mask16, less, f32x16)   // false if either is NaN
PER_TWO_PARTS(mask16, equal, f32x16)
PER_TWO_PARTS(mask16, greater, i32x16)
PER_TWO_PARTS(mask16, equal, i32x16)
#undef PER_PART
#undef PER_TWO_PARTS

// a * b + c, rounded once
ALWAYS_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
    FOR_PARTS c.part[i] = part_fma(a.part[i], b.part[i], c.part[i]);
    return c;
}
// c - a * b, rounded once
ALWAYS_INLINE f32x16 fnma(f32x16 a, f32x16 b, f32x16 c) {
    FOR_PARTS c.part[i] = part_fnma(a.part[i], b.part[i], c.part[i]);
    return c;
}
// m ? a : b
ALWAYS_INLINE f32x16 select(mask16 m, f32x16 a, f32x16 b) {
    FOR_PARTS a.part[i] = part_select(m.part[i], a.part[i], b.part[i]);
    return a;
}
ALWAYS_INLINE i32x16 select(mask16 m, i32x16 a, i32x16 b) {
    return bits_of(select(m, float_of_bits(a), float_of_bits(b)));
}
ALWAYS_INLINE bool any(mask16 m) {
    PartMask all = m.part[0];
    for (int i = 1; i < kParts; i++) all = all | m.part[i];
    return part_any(all);
}
// Lanes [0, count).
ALWAYS_INLINE mask16 first_lanes(long count) {
    return greater(splat((int32_t)(count < 0 ? 0 : count > 16 ? 16 : count)), lane_numbers());
}

// Folds lanes in halves: 16 to 8, to 4, to 2, to 1. The same order at every level.
ALWAYS_INLINE float reduce_add(f32x16 v) {
    for (int n = kParts / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) v.part[i] = v.part[i] + v.part[i + n];
    return part_reduce_add(v.part[0]);
}
ALWAYS_INLINE float reduce_max(f32x16 v) {
    for (int n = kParts / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) v.part[i] = part_max(v.part[i], v.part[i + n]);
    return part_reduce_max(v.part[0]);
}

// Transposes a 16 x 16 matrix of 32-bit words.
ALWAYS_INLINE void transpose(i32x16 (&v)[16]) {
    UNROLLED for (int row = 0; row < kParts; row++)
        UNROLLED for (int column = 0; column <= row; column++) {
            PartI a[kPartLanes], b[kPartLanes];
            UNROLLED for (int k = 0; k < kPartLanes; k++) {
                a[k] = v[row * kPartLanes + k].part[column];
                b[k] = v[column * kPartLanes + k].part[row];
            }
            part_transpose(a);
            if (row != column) part_transpose(b);
            UNROLLED for (int k = 0; k < kPartLanes; k++) {
                v[column * kPartLanes + k].part[row] = a[k];
                if (row != column) v[row * kPartLanes + k].part[column] = b[k];
            }
        }
}

// 16 words of 32 bits, at any alignment; with `count`, the other words are zero or not written.
ALWAYS_INLINE i32x16 load_words(const void* p) {
    i32x16 v;
    FOR_PARTS v.part[i] = ((const LoosePart*)p)[i];
    return v;
}
ALWAYS_INLINE void store_words(void* p, i32x16 v) {
    FOR_PARTS((LoosePart*)p)[i] = v.part[i];
}
// The same for 16 bits.
ALWAYS_INLINE Half load_half(const void* p) { return *(const LooseHalf*)p; }
ALWAYS_INLINE void store_half(void* p, Half v) { *(LooseHalf*)p = v; }

#if defined(__AVX512F__)
ALWAYS_INLINE i32x16 load_words(const void* p, long count) {
    if (count >= 16) return load_words(p);
    return {{(PartI)_mm512_maskz_loadu_epi32(first_lanes(count).part[0], p)}};
}
ALWAYS_INLINE void store_words(void* p, i32x16 v, long count) {
    if (count >= 16) return store_words(p, v);
    _mm512_mask_storeu_epi32(p, first_lanes(count).part[0], (__m512i)v.part[0]);
}
ALWAYS_INLINE Half load_half(const void* p, long count) {
    if (count >= 16) return load_half(p);
    return _mm256_maskz_loadu_epi16(first_lanes(count).part[0], p);
}
ALWAYS_INLINE void store_half(void* p, Half v, long count) {
    if (count >= 16) return store_half(p, v);
    _mm256_mask_storeu_epi16(p, first_lanes(count).part[0], v);
}
#else
ALWAYS_INLINE i32x16 load_words(const void* p, long count) {
    if (count >= 16) return load_words(p);
    int32_t words[16] = {};
    if (count > 0) memcpy(words, p, count * 4);
    return load_words(words);
}
ALWAYS_INLINE void store_words(void* p, i32x16 v, long count) {
    if (count >= 16) return store_words(p, v);
    int32_t words[16];
    store_words(words, v);
    if (count > 0) memcpy(p, words, count * 4);
}
ALWAYS_INLINE Half load_half(const void* p, long count) {
    if (count >= 16) return load_half(p);
    uint16_t halves[16] = {};
    if (count > 0) memcpy(halves, p, count * 2);
    return load_half(halves);
}
ALWAYS_INLINE void store_half(void* p, Half v, long count) {
    if (count >= 16) return store_half(p, v);
    uint16_t halves[16];
    store_half(halves, v);
    if (count > 0) memcpy(p, halves, count * 2);
}
#endif

// 16 bytes, sign- or zero-extended; stores write the low byte of each word.
ALWAYS_INLINE i32x16 load_i8(const void* p, long count = 16) {
    int8_t bytes[16] = {};
    if (count < 16) {
        if (count > 0) memcpy(bytes, p, count);
        p = bytes;
    }
    i32x16 v;
    FOR_PARTS v.part[i] = part_load_i8((const int8_t*)p + i * kPartLanes);
    return v;
}
ALWAYS_INLINE i32x16 load_u8(const void* p, long count = 16) {
    return load_i8(p, count) & splat(0xFF);
}
ALWAYS_INLINE void store_i8(void* p, i32x16 v, long count = 16) {
    int8_t bytes[16];
    int8_t* out = count >= 16 ? (int8_t*)p : bytes;
    FOR_PARTS part_store_i8(out + i * kPartLanes, v.part[i]);
    if (count < 16 && count > 0) memcpy(p, bytes, count);
}

// 2^x for x <= 0, by a polynomial of x - floor(x) in [0, 1), the highest power first; the last coefficient is 1, so that
// 2^0 = 1. Coefficients: least relative error (Lawson's iteration). -inf gives 0, NaN stays.
template <int N>
ALWAYS_INLINE f32x16 exp2_nonpositive(f32x16 x, const float (&coefficients)[N]) {
    f32x16 v;
    FOR_PARTS {
        const PartF r = part_fraction(x.part[i]);
        PartF p = part_splat(coefficients[0]);
        for (int k = 1; k < N; k++) p = part_fma(p, r, part_splat(coefficients[k]));
        p = part_fma(p, r, part_splat(1.0f));
        v.part[i] = part_scale(p, x.part[i]);
    }
    return v;
}

// Prefetches a cache line into L2. Written in assembly: GCC 12 considers functions that only prefetch to be empty and
// drops calls of them.
ALWAYS_INLINE void fetch(const void* line) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(*(const char*)line));
#else
    asm volatile("prfm pldl2keep, %0" : : "Q"(*(const char*)line));
#endif
}

struct F32 {
    using element = float;
    static constexpr long stored = kFloat32;
    static constexpr int per_word = 1;  // elements in the 32 bits that a lane multiplies at a time
    static f32x16 load(const float* p) { return float_of_bits(load_words(p)); }
    static f32x16 load(const float* p, long count) { return float_of_bits(load_words(p, count)); }
    static void store(float* p, f32x16 v) { store_words(p, bits_of(v)); }
    static void store(float* p, f32x16 v, long count) { store_words(p, bits_of(v), count); }
    static void store(float* p, f32x16 v, f32x16 w) { store(p, v), store(p + 16, w); }
    static f32x16 round(f32x16 v) { return v; }
    // 2^x for x <= 0, relative error of the polynomial 2e-9
    static f32x16 exp2(f32x16 x) {
        return exp2_nonpositive(x, {2.16129176e-4f, 1.24678457e-3f, 9.67545164e-3f, 5.54852806e-2f,
                                    2.40229306e-1f, 6.93147044e-1f});
    }
    // sum + a * b, lane by lane
    static f32x16 step(f32x16 sum, i32x16 a, i32x16 b) {
        return fma(float_of_bits(a), float_of_bits(b), sum);
    }
};

struct BF16 {
    using element = uint16_t;
    static constexpr long stored = kBfloat16;
    static constexpr int per_word = 2;
    static f32x16 widen(Half v) {
        f32x16 w;
        FOR_PARTS w.part[i] = (PartF)(part_of_half(v, i) << 16);
        return w;
    }
    // To the nearest, ties to even; NaN stays NaN.
    static Half narrow(f32x16 v) { return half_of_floats(v.part); }
    static f32x16 load(const uint16_t* p) { return widen(load_half(p)); }
    static f32x16 load(const uint16_t* p, long count) { return widen(load_half(p, count)); }
    static void store(uint16_t* p, f32x16 v) { store_half(p, narrow(v)); }
    static void store(uint16_t* p, f32x16 v, long count) { store_half(p, narrow(v), count); }
    static void store(uint16_t* p, f32x16 v, f32x16 w) { store(p, v), store(p + 16, w); }
    static f32x16 round(f32x16 v) { return widen(narrow(v)); }
    // 2^x for x <= 0, relative error 9e-5: a twentieth of what rounding to bfloat16 may lose
    static f32x16 exp2(f32x16 x) {
        return exp2_nonpositive(x, {7.70670604e-2f, 2.27644971e-1f, 6.95116791e-1f});
    }
    // The first and the second value of each lane's pair, widened.
    static f32x16 even(i32x16 words) { return float_of_bits(words << 16); }
    static f32x16 odd(i32x16 words) { return float_of_bits(words & splat((int32_t)0xFFFF0000)); }
    // Rounded pairs.
    static i32x16 pairs(f32x16 even, f32x16 odd) {
#if defined(__AVX512BF16__)
        return {{part_pairs(even.part[0], odd.part[0])}};
#endif
        i32x16 v;
        FOR_PARTS v.part[i] = part_shift_right(part_bf16_bits(even.part[i]), 16) |
                              (part_bf16_bits(odd.part[i]) & part_splat((int32_t)0xFFFF0000));
        return v;
    }
    // sum + a0 * b0 + a1 * b1 per lane; each lane is a pair of bfloat16
    static f32x16 step(f32x16 sum, i32x16 a, i32x16 b) {
#if defined(HAS_BF16_DOT)
        FOR_PARTS sum.part[i] = part_dot_bf16(sum.part[i], a.part[i], b.part[i]);
        return sum;
#else
        return fma(odd(a), odd(b), fma(even(a), even(b), sum));
#endif
    }
#if defined(HAS_BF16_DOT)
    // Pairs of the first `count` of 32 elements of two rows, in the cheapest order; without b, pairs of a and zero.
    static void load_pairs(const uint16_t* a, const uint16_t* b, long count, bool has_b, i32x16& low,
                           i32x16& high) {
#if defined(__AVX512BF16__)
        part_load_pairs(a, b, count, has_b, low.part[0], high.part[0]);
#else
        const long count_b = has_b ? count : 0;
        const Half a_low = load_half(a, count), a_high = load_half(a + 16, count - 16);
        const Half b_low = load_half(b, count_b), b_high = load_half(b + 16, count_b - 16);
        FOR_PARTS low.part[i] = part_pairs_of_halves(a_low, b_low, i);
        FOR_PARTS high.part[i] = part_pairs_of_halves(a_high, b_high, i);
#endif
    }
    // Lanes of low and high in the order of load_pairs -> the first 16 in order, or the last 16.
    static f32x16 in_order(f32x16 low, f32x16 high, bool is_last) {
#if defined(__AVX512BF16__)
        return {{part_in_order(low.part[0], high.part[0], is_last)}};
#else
        return is_last ? high : low;
#endif
    }
#endif
};

struct F16 {
    using element = uint16_t;
    static constexpr long stored = kFloat16;
    static f32x16 widen(Half v) {
        f32x16 w;
        FOR_PARTS w.part[i] = part_widen_f16(v, i);
        return w;
    }
    static Half narrow(f32x16 v) { return half_of_floats_f16(v.part); }
    static f32x16 load(const uint16_t* p) { return widen(load_half(p)); }
    static f32x16 load(const uint16_t* p, long count) { return widen(load_half(p, count)); }
    static void store(uint16_t* p, f32x16 v) { store_half(p, narrow(v)); }
    static void store(uint16_t* p, f32x16 v, long count) { store_half(p, narrow(v), count); }
    static void store(uint16_t* p, f32x16 v, f32x16 w) { store(p, v), store(p + 16, w); }
    static f32x16 round(f32x16 v) { return widen(narrow(v)); }
    // Relative error as for F32: less than a thousandth of the rounding error of float16.
    static f32x16 exp2(f32x16 x) { return F32::exp2(x); }
};

// Calls f with an object of the compute type for a number of `Stored`.
template <class F>
static inline void with_type(long stored, F&& f) {
    switch (stored) {
        case kBfloat16: f(BF16()); break;
        case kFloat16: f(F16()); break;
        default: f(F32()); break;
    }
}

// Exact products of four unsigned bytes (`Quads`) and four signed bytes per lane. The signed ones are kQuadWords words
// made by `spread_quads`.
#if defined(HAS_QUAD_DOT)
constexpr int kQuadWords = 1;
#else
constexpr int kQuadWords = 2;
#endif

struct Quads {
    i32x16 word[kQuadWords];
};
ALWAYS_INLINE Quads quads_of(i32x16 bytes) {
#if defined(HAS_QUAD_DOT)
    return {{bytes}};
#else  // bytes 0 and 2, and 1 and 3, as int16
    return {{bytes & splat(0x00FF00FF), (bytes >> 8) & splat(0x00FF00FF)}};
#endif
}
ALWAYS_INLINE i32x16 dot(i32x16 sum, const Quads& w, const int32_t* x) {
    FOR_PARTS {
#if defined(HAS_QUAD_DOT)
        sum.part[i] = part_dot_quads(sum.part[i], w.word[0].part[i], part_splat(x[0]));
#else
        sum.part[i] = sum.part[i] + part_dot_pairs(w.word[0].part[i], part_splat(x[0]));
        sum.part[i] = sum.part[i] + part_dot_pairs(w.word[1].part[i], part_splat(x[1]));
#endif
    }
    return sum;
}
#if defined(HAS_BYTE_PAIRS)
// pairs: two int16 in each lane; bytes: four unsigned ones; x: four signed ones.
ALWAYS_INLINE i32x16 add_byte_pairs(i32x16 pairs, i32x16 bytes, int32_t x) {
    FOR_PARTS pairs.part[i] = part_add_pairs(pairs.part[i], part_dot_byte_pairs(bytes.part[i], part_splat(x)));
    return pairs;
}
ALWAYS_INLINE i32x16 add_pairs(i32x16 sum, i32x16 pairs) {
    FOR_PARTS sum.part[i] = sum.part[i] + part_dot_pairs(pairs.part[i], part_splat(0x00010001));
    return sum;
}
#endif
static inline void spread_quads(const int8_t* bytes, long num_quads, int32_t* words, long quad_words) {
    if (quad_words == 1) {
        memcpy(words, bytes, num_quads * 4);
    } else {
        int16_t* out = (int16_t*)words;
        for (long i = 0; i < num_quads; i++, bytes += 4, out += 4) {
            out[0] = bytes[0], out[1] = bytes[2];
            out[2] = bytes[1], out[3] = bytes[3];
        }
    }
}
