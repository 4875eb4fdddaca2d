// Element types that KV is stored in, 16 lanes at a time, and rows of them. Formulas: baton_kernels/quantize_rows.py.
#pragma once
#include "simd_old.h"

namespace {

// Each type: bytes of an element; limit, the largest magnitude of a code, or 0 if there are no scales; load and store of 16.
struct StoredF32 {
    static constexpr long size = 4;
    static constexpr float limit = 0;
    static __m512 load(const char* p, __mmask16 m) { return F32::load((const float*)p, m); }
    static void store(char* p, __m512 v, __mmask16 m) { F32::store((float*)p, v, m); }
};

struct StoredBF16 {
    static constexpr long size = 2;
    static constexpr float limit = 0;
    static __m512 load(const char* p, __mmask16 m) { return BF16::load((const uint16_t*)p, m); }
    static void store(char* p, __m512 v, __mmask16 m) { BF16::store((uint16_t*)p, v, m); }
};

struct StoredF16 {
    static constexpr long size = 2;
    static constexpr float limit = 0;
    static __m512 load(const char* p, __mmask16 m) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, p));
    }
    static void store(char* p, __m512 v, __mmask16 m) {
        _mm256_mask_storeu_epi16(p, m, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    }
};

struct StoredI8 {
    static constexpr long size = 1;
    static constexpr float limit = 127;
    static __m512 load(const char* p, __mmask16 m) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(m, p)));
    }
    // Halves round up.
    static void store(char* p, __m512 v, __mmask16 m) {
        const __m512 whole = _mm512_floor_ps(_mm512_add_ps(v, _mm512_set1_ps(0.5f)));
        _mm_mask_storeu_epi8(p, m, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole)));
    }
};

// e4m3: 1 sign, 4 exponent bits of bias 7, 3 mantissa bits; no infinity, one NaN.
struct StoredFp8 {
    static constexpr long size = 1;
    static constexpr float limit = 448;
    static __m512 load(const char* p, __mmask16 m) {
        const __m256i code = _mm256_cvtepu8_epi16(_mm_maskz_loadu_epi8(m, p));
        const __m256i magnitude = _mm256_and_si256(code, _mm256_set1_epi16(0x7F));
        const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(code, _mm256_set1_epi16(0x80)), 8);
        // Exponent and mantissa are those of a float16 of bias 15: 2^-8 of the value, subnormal ones included.
        const __m512 v = _mm512_cvtph_ps(_mm256_or_si256(_mm256_slli_epi16(magnitude, 7), sign));
        const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7F));
        return _mm512_mask_mov_ps(_mm512_mul_ps(v, _mm512_set1_ps(256.0f)), is_nan,
                                  _mm512_set1_ps(__builtin_nanf("")));
    }
    // |v| at most 448, but for the rounding of a division by the scale. To the nearest, ties to even.
    static void store(char* p, __m512 v, __mmask16 m) {
        const __m512i bits = _mm512_castps_si512(v);
        const __m512 size = _mm512_abs_ps(v);
        const __m512i magnitude = _mm512_castps_si512(size);
        // 20 bits of the mantissa are dropped, and the bias becomes 7.
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
        const __m512i up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFFF));
        const __m512i normal = _mm512_sub_epi32(_mm512_srli_epi32(_mm512_add_epi32(magnitude, up), 20),
                                                _mm512_set1_epi32((127 - 7) << 3));
        // Below 2^-6 codes are multiples of 2^-9.
        const __m512i small = _mm512_cvtps_epi32(_mm512_mul_ps(size, _mm512_set1_ps(512.0f)));
        const __mmask16 is_small =
            _mm512_cmp_ps_mask(size, _mm512_set1_ps(1.0f / 64), _CMP_LT_OQ);
        const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
        const __m512i code = _mm512_or_si512(_mm512_mask_mov_epi32(normal, is_small, small), sign);
        _mm_mask_storeu_epi8(p, m, _mm512_cvtepi32_epi8(code));
    }
};

// The scale of a row: NaN if the row is not finite.
template <class T, class S>
float row_scale(const typename T::element* row, long dim) {
    const __m512 infinity = _mm512_set1_ps(__builtin_inff());
    __m512 peaks = _mm512_set1_ps(0x1p-100f);
    __mmask16 broken = 0;
    for (long d = 0; d < dim; d += 16) {
        const __m512 size = _mm512_abs_ps(T::load(row + d, first_lanes(dim - d)));
        broken |= _mm512_cmp_ps_mask(size, infinity, _CMP_NLT_UQ);
        peaks = _mm512_max_ps(peaks, size);
    }
    return broken ? __builtin_nanf("") : _mm512_reduce_max_ps(peaks) / S::limit;
}

// Writes a row [dim] into the pool; *scale is its scale's place there, if it has one.
template <class T, class S>
void put_row(const typename T::element* row, long dim, char* out, float* scale) {
    if constexpr (S::limit > 0) {
        *scale = row_scale<T, S>(row, dim);
        // Codes of a row that is not finite are zero.
        const __mmask16 known = *scale > 0 ? 0xFFFF : 0;
        for (long d = 0; d < dim; d += 16) {
            const __mmask16 m = first_lanes(dim - d);
            const __m512 v = T::load(row + d, m);
            S::store(out + d * S::size, _mm512_maskz_div_ps(known, v, _mm512_set1_ps(*scale)), m);
        }
    } else {
        for (long d = 0; d < dim; d += 16) {
            const __mmask16 m = first_lanes(dim - d);
            S::store(out + d * S::size, T::load(row + d, m), m);
        }
    }
}

// Reads a row [dim] of the pool, rounded to the type that is computed in.
template <class T, class S>
void take_row(const char* row, const float* scale, long dim, typename T::element* out) {
    const __m512 by = _mm512_set1_ps(S::limit > 0 ? *scale : 1.0f);
    const auto take = [&](long d, __mmask16 m) {
        const __m512 v = S::load(row + d * S::size, m);
        return S::limit > 0 ? _mm512_mul_ps(v, by) : v;
    };
    long d = 0;
    for (; d + 32 <= dim; d += 32) T::store(out + d, take(d, 0xFFFF), take(d + 16, 0xFFFF));
    for (; d < dim; d += 16) T::store(out + d, take(d, first_lanes(dim - d)), first_lanes(dim - d));
}

template <class T>
using PutRow = void (*)(const typename T::element*, long, char*, float*);
template <class T>
using TakeRow = void (*)(const char*, const float*, long, typename T::element*);

template <class T>
PutRow<T> put_row_of(long stored) {
    switch (stored) {
        case kFloat32: return put_row<T, StoredF32>;
        case kBfloat16: return put_row<T, StoredBF16>;
        case kFloat16: return put_row<T, StoredF16>;
        case kInt8: return put_row<T, StoredI8>;
        default: return put_row<T, StoredFp8>;
    }
}

template <class T>
TakeRow<T> take_row_of(long stored) {
    switch (stored) {
        case kFloat32: return take_row<T, StoredF32>;
        case kBfloat16: return take_row<T, StoredBF16>;
        case kFloat16: return take_row<T, StoredF16>;
        case kInt8: return take_row<T, StoredI8>;
        default: return take_row<T, StoredFp8>;
    }
}

}  // namespace
