// Registers of 4 lanes: any aarch64, and BF16 and I8MM at levels that have them. Included by simd.h only.
#pragma once
#include <arm_neon.h>

constexpr int kPartLanes = 4, kNumRegisters = 32;
typedef float PartF __attribute__((vector_size(16)));
typedef int32_t PartI __attribute__((vector_size(16)));
typedef PartI PartMask;
typedef uint16_t Half __attribute__((vector_size(32)));

ALWAYS_INLINE PartF part_splat(float x) { return (PartF)vdupq_n_f32(x); }
ALWAYS_INLINE PartI part_splat(int32_t x) { return (PartI)vdupq_n_s32(x); }
ALWAYS_INLINE PartI part_shift_right(PartI v, int count) {
    return (PartI)((uint32x4_t)v >> (uint32_t)count);
}
ALWAYS_INLINE PartF part_abs(PartF v) { return (PartF)vabsq_f32((float32x4_t)v); }
ALWAYS_INLINE PartF part_floor(PartF v) { return (PartF)vrndmq_f32((float32x4_t)v); }
ALWAYS_INLINE PartI part_to_int(PartF v) { return (PartI)vcvtnq_s32_f32((float32x4_t)v); }
ALWAYS_INLINE PartF part_to_float(PartI v) { return (PartF)vcvtq_f32_s32((int32x4_t)v); }
ALWAYS_INLINE PartF part_select(PartMask m, PartF a, PartF b) {
    return (PartF)vbslq_f32((uint32x4_t)m, (float32x4_t)a, (float32x4_t)b);
}
ALWAYS_INLINE PartF part_max(PartF a, PartF b) { return part_select((PartMask)(a > b), a, b); }
ALWAYS_INLINE PartF part_min(PartF a, PartF b) { return part_select((PartMask)(a < b), a, b); }
ALWAYS_INLINE PartF part_fma(PartF a, PartF b, PartF c) {
    return (PartF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
ALWAYS_INLINE PartF part_fnma(PartF a, PartF b, PartF c) {
    return (PartF)vfmsq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
ALWAYS_INLINE PartMask part_less(PartF a, PartF b) { return a < b; }
ALWAYS_INLINE PartMask part_equal(PartF a, PartF b) { return a == b; }
ALWAYS_INLINE PartMask part_greater(PartI a, PartI b) { return a > b; }
ALWAYS_INLINE PartMask part_equal(PartI a, PartI b) { return a == b; }
ALWAYS_INLINE bool part_any(PartMask m) { return vmaxvq_u32((uint32x4_t)m) != 0; }
ALWAYS_INLINE float part_reduce_add(PartF v) { return (v[0] + v[2]) + (v[1] + v[3]); }
ALWAYS_INLINE float part_reduce_max(PartF v) {
    const float even = v[0] > v[2] ? v[0] : v[2], odd = v[1] > v[3] ? v[1] : v[3];
    return even > odd ? even : odd;
}

// x - floor(x), and p * 2^floor(x) for x <= 0; flushes to 0 below 2^-126, where the exponent field is 0.
ALWAYS_INLINE PartF part_bounded(PartF x) { return part_max(part_splat(-127.0f), x); }
ALWAYS_INLINE PartF part_fraction(PartF x) { return part_bounded(x) - part_floor(part_bounded(x)); }
ALWAYS_INLINE PartF part_scale(PartF p, PartF x) {
    return p * (PartF)((part_to_int(part_floor(part_bounded(x))) + part_splat(127)) << 23);
}

ALWAYS_INLINE PartI part_load_i8(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return (PartI)vmovl_s16(vget_low_s16(vmovl_s8((int8x8_t)vdup_n_s32(four))));
}
ALWAYS_INLINE void part_store_i8(int8_t* p, PartI v) {
    const int16x4_t words = vmovn_s32((int32x4_t)v);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    memcpy(p, &bytes, 4);
}

ALWAYS_INLINE void part_transpose(PartI (&rows)[4]) {
    const int32x4_t a = vzip1q_s32((int32x4_t)rows[0], (int32x4_t)rows[2]);
    const int32x4_t b = vzip2q_s32((int32x4_t)rows[0], (int32x4_t)rows[2]);
    const int32x4_t c = vzip1q_s32((int32x4_t)rows[1], (int32x4_t)rows[3]);
    const int32x4_t d = vzip2q_s32((int32x4_t)rows[1], (int32x4_t)rows[3]);
    rows[0] = (PartI)vzip1q_s32(a, c);
    rows[1] = (PartI)vzip2q_s32(a, c);
    rows[2] = (PartI)vzip1q_s32(b, d);
    rows[3] = (PartI)vzip2q_s32(b, d);
}

ALWAYS_INLINE uint16x4_t four_of_half(Half v, int i) {
    uint16x4_t parts[4];
    memcpy(parts, &v, sizeof v);
    return parts[i];
}
// Part i of 16 values of 16 bits, zero-extended.
ALWAYS_INLINE PartI part_of_half(Half v, int i) { return (PartI)vmovl_u16(four_of_half(v, i)); }
// Bits of a float32 with the bfloat16 nearest to v in the upper half; the lower half is arbitrary.
ALWAYS_INLINE PartI part_bf16_bits(PartF v) {
    const PartI bits = (PartI)v;
    const PartI rounded = bits + part_splat(0x7FFF) + (part_shift_right(bits, 16) & part_splat(1));
    return (PartI)part_select((PartMask)(v != v), (PartF)(bits | part_splat(0x400000)), (PartF)rounded);
}
ALWAYS_INLINE Half half_of_floats(const PartF (&v)[4]) {
    uint16x4_t parts[4];
    for (int i = 0; i < 4; i++) parts[i] = vshrn_n_u32((uint32x4_t)part_bf16_bits(v[i]), 16);
    Half all;
    memcpy(&all, parts, sizeof all);
    return all;
}
ALWAYS_INLINE PartF part_widen_f16(Half v, int i) {
    return (PartF)vcvt_f32_f16((float16x4_t)four_of_half(v, i));
}
ALWAYS_INLINE Half half_of_floats_f16(const PartF (&v)[4]) {
    float16x4_t parts[4];
    for (int i = 0; i < 4; i++) parts[i] = vcvt_f16_f32((float32x4_t)v[i]);
    Half all;
    memcpy(&all, parts, sizeof all);
    return all;
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_BF16_DOT
ALWAYS_INLINE PartF part_dot_bf16(PartF sum, PartI a, PartI b) {
    return (PartF)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
// Part i of 16 pairs; the values of a come first.
ALWAYS_INLINE PartI part_pairs_of_halves(Half a, Half b, int i) {
    const uint16x4_t x = four_of_half(a, i), y = four_of_half(b, i);
    return (PartI)vcombine_u16(vzip1_u16(x, y), vzip2_u16(x, y));
}
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define HAS_QUAD_DOT
// sum + products of the four unsigned bytes of w and the four signed ones of x
ALWAYS_INLINE PartI part_dot_quads(PartI sum, PartI w, PartI x) {
    return (PartI)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, (int8x16_t)x);
}
#else
// a0 * b0 + a1 * b1 of the two int16 in each lane
ALWAYS_INLINE PartI part_dot_pairs(PartI a, PartI b) {
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y));
    return (PartI)vpaddq_s32(low, vmull_high_s16(x, y));
}
#endif
