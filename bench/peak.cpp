// The most products that a core does in a second at the level that this is compiled for: chains of steps in registers,
// enough of them to hide their latency. See bench/roof.py.
#include "simd.h"

#if defined(__AVX512BF16__)
using Product = BF16;
#else
using Product = F32;
#endif

constexpr int kChains = 12 / kParts > 3 ? 12 / kParts : 3;

// Operations of `steps` steps on each of `threads` threads, a multiplication and an addition counted as two.
extern "C" double baton_peak(long steps, int threads) {
    double operations = 0;
#pragma omp parallel num_threads(threads) reduction(+ : operations)
    {
        f32x16 sums[kChains];
        // Of numbers that differ, or compilers compute one chain for all.
        UNROLLED for (int i = 0; i < kChains; i++) sums[i] = to_float(lane_numbers() + splat(i * 16));
        i32x16 a = splat(0x3F803F80), b = splat(0x30003000);
        for (long k = 0; k < steps; k++) {
            UNROLLED for (int i = 0; i < kChains; i++) sums[i] = Product::step(sums[i], a, b);
        }
        float total = 0;
        UNROLLED for (int i = 0; i < kChains; i++) total += reduce_add(sums[i]);
        // The sum is finite: said to the compiler only so that it is computed.
        operations += total > 0 ? 2.0 * 16 * Product::per_word * kChains * steps : 0;
    }
    return operations;
}
