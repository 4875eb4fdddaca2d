// Each row's largest logit and whether the row is finite, in one pass: see checked_argmax in baton_kernels/sampling.py.
#include "calls.h"
#include "simd.h"

namespace {

constexpr long lanes = 16, unrolled = 4;
constexpr long small = 1 << 18;  // logits that are not worth a second thread

struct Best {
    f32x16 value = splat(-__builtin_inff());
    i32x16 id = splat(0);    // the lowest that has it in this lane
    f32x16 zero = zeros();   // NaN from the first value on that is not finite

    void see(f32x16 values, long first, mask16 larger) {
        value = select(larger, values, value);
        id = select(larger, lane_numbers() + splat((int32_t)first), id);
        zero = zero + (values - values);
    }
};

void checked_argmax(const float* row, long vocab, int64_t* chosen, int64_t* verdict) {
    Best best[unrolled];
    long i = 0;
    for (; i + unrolled * lanes <= vocab; i += unrolled * lanes)
        UNROLLED for (long u = 0; u < unrolled; u++) {
            const f32x16 values = F32::load(row + i + u * lanes);
            best[u].see(values, i + u * lanes, less(best[u].value, values));
        }
    for (; i < vocab; i += lanes) {
        const f32x16 values = F32::load(row + i, vocab - i);
        best[0].see(values, i, less(best[0].value, values) & first_lanes(vocab - i));
    }
    float largest = -__builtin_inff(), zero = 0;
    int32_t lowest = 0;
    for (const Best& b : best) {
        float values[lanes];
        int32_t ids[lanes];
        F32::store(values, b.value);
        store_words(ids, b.id);
        for (long k = 0; k < lanes; k++)
            if (values[k] > largest || (values[k] == largest && ids[k] < lowest))
                largest = values[k], lowest = ids[k];
        zero += reduce_add(b.zero);
    }
    *chosen = lowest;
    *verdict = zero == 0 ? lowest : -1;
}

}  // namespace

extern "C" void baton_checked_argmax(const float* logits, long rows, long vocab, int64_t* chosen,
                                     int64_t* verdicts, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1 && rows * vocab > small)
    for (long r = 0; r < rows; r++)
        checked_argmax(logits + r * vocab, vocab, chosen + r, verdicts + r);
}
