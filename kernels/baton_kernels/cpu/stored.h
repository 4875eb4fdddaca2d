// Storage types of KV, 16 lanes at a time, and rows of them. Formulas: baton_kernels/quantize_rows.py.
#pragma once
#include "simd.h"

namespace {

// Each type defines: bytes per element; limit, the largest magnitude of a code, or 0 without scales; load and store of
// the first `count` of 16.
template <class T>
struct StoredAs {
    using E = typename T::element;
    static constexpr long size = sizeof(E);
    static constexpr float limit = 0;
    static f32x16 load(const char* p, long count) { return T::load((const E*)p, count); }
    static void store(char* p, f32x16 v, long count) { T::store((E*)p, v, count); }
};

struct StoredI8 {
    static constexpr long size = 1;
    static constexpr float limit = 127;
    static f32x16 load(const char* p, long count) { return to_float(load_i8(p, count)); }
    // Halves round up.
    static void store(char* p, f32x16 v, long count) {
        store_i8(p, to_int(floor(v + splat(0.5f))), count);
    }
};

// e4m3: 1 sign, 4 exponent bits of bias 7, 3 mantissa bits; no infinity, one NaN. Below 2^-6 codes are multiples of 2^-9.
struct StoredFp8 {
    static constexpr long size = 1;
    static constexpr float limit = 448;
    static f32x16 load(const char* p, long count) {
        const i32x16 code = load_u8(p, count), magnitude = code & splat(0x7F);
        const i32x16 normal = (magnitude << 20) + splat((127 - 7) << 23);
        const i32x16 small = bits_of(to_float(magnitude) * splat(1.0f / 512));
        const i32x16 sign = (code & splat(0x80)) << 24;
        const i32x16 number = select(greater(splat(8), magnitude), small, normal);
        const i32x16 nan = splat(0x7FC00000);
        return float_of_bits(select(equal(magnitude, splat(0x7F)), nan, number) | sign);
    }
    // |v| is at most 448, up to the rounding of a division by the scale. Rounds to nearest, ties to even.
    static void store(char* p, f32x16 v, long count) {
        const f32x16 size = abs(v);
        const i32x16 magnitude = bits_of(size);
        // Drops 20 bits of the mantissa and changes the bias to 7.
        const i32x16 up = ((magnitude >> 20) & splat(1)) + splat(0x7FFFF);
        const i32x16 normal = ((magnitude + up) >> 20) - splat((127 - 7) << 3);
        const i32x16 small = to_int(size * splat(512.0f));
        const i32x16 code = select(less(size, splat(1.0f / 64)), small, normal);
        store_i8(p, code | ((bits_of(v) >> 24) & splat(0x80)), count);
    }
};

// The scale of a row: NaN if the row is not finite.
template <class T, class S>
float row_scale(const typename T::element* row, long dim) {
    f32x16 peaks = splat(0x1p-100f), zero = zeros();
    for (long d = 0; d < dim; d += 16) {
        const f32x16 size = abs(T::load(row + d, dim - d));
        zero = zero + (size - size);  // NaN from the first non-finite value on
        peaks = max(peaks, size);
    }
    return reduce_add(zero) == 0 ? reduce_max(peaks) / S::limit : __builtin_nanf("");
}

// Writes a row [dim] into the pool; *scale: address of its scale, if there are scales.
template <class T, class S>
void put_row(const typename T::element* row, long dim, char* out, float* scale) {
    if constexpr (S::limit > 0) {
        *scale = row_scale<T, S>(row, dim);
        const f32x16 by = splat(*scale);
        // Codes of a row that is not finite are zero.
        const mask16 known = less(zeros(), by);
        for (long d = 0; d < dim; d += 16)
            S::store(out + d * S::size, select(known, T::load(row + d, dim - d) / by, zeros()), dim - d);
    } else {
        for (long d = 0; d < dim; d += 16)
            S::store(out + d * S::size, T::load(row + d, dim - d), dim - d);
    }
}

// Reads a row [dim] of the pool, rounded to the compute type.
template <class T, class S>
void take_row(const char* row, const float* scale, long dim, typename T::element* out) {
    const f32x16 by = splat(S::limit > 0 ? *scale : 1.0f);
    for (long d = 0; d < dim; d += 16) {
        const f32x16 v = S::load(row + d * S::size, dim - d);
        T::store(out + d, S::limit > 0 ? v * by : v, dim - d);
    }
}

template <class T>
using PutRow = void (*)(const typename T::element*, long, char*, float*);
template <class T>
using TakeRow = void (*)(const char*, const float*, long, typename T::element*);

template <class T>
PutRow<T> put_row_of(long stored) {
    switch (stored) {
        case kFloat32: return put_row<T, StoredAs<F32>>;
        case kBfloat16: return put_row<T, StoredAs<BF16>>;
        case kFloat16: return put_row<T, StoredAs<F16>>;
        case kInt8: return put_row<T, StoredI8>;
        default: return put_row<T, StoredFp8>;
    }
}

template <class T>
TakeRow<T> take_row_of(long stored) {
    switch (stored) {
        case kFloat32: return take_row<T, StoredAs<F32>>;
        case kBfloat16: return take_row<T, StoredAs<BF16>>;
        case kFloat16: return take_row<T, StoredAs<F16>>;
        case kInt8: return take_row<T, StoredI8>;
        default: return take_row<T, StoredFp8>;
    }
}

}  // namespace
