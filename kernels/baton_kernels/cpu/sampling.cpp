// Each row's largest logit and whether the row is finite, in one pass: see checked_argmax in baton_kernels/sampling.py.
#include <immintrin.h>
#include <stdint.h>

namespace {

constexpr long lanes = 16, unrolled = 4;
constexpr int no_number = 0x01 | 0x08 | 0x10 | 0x80;  // of vfpclass: quiet NaN, +inf, -inf, signalling NaN
constexpr long small = 1 << 18;  // logits that are not worth a second thread

struct Best {
    __m512 value;
    __m512i id;  // the lowest that has it in this lane
    __mmask16 broken;

    void see(__m512 values, long first, __mmask16 there) {
        const __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __mmask16 larger = _mm512_mask_cmp_ps_mask(there, values, value, _CMP_GT_OQ);
        value = _mm512_mask_mov_ps(value, larger, values);
        id = _mm512_mask_add_epi32(id, larger, numbers, _mm512_set1_epi32(first));
        broken |= _mm512_mask_fpclass_ps_mask(there, values, no_number);
    }
};

void checked_argmax(const float* row, long vocab, int64_t* chosen, int64_t* verdict) {
    Best best[unrolled];
    for (Best& b : best) b = {_mm512_set1_ps(-__builtin_inff()), _mm512_setzero_si512(), 0};
    long i = 0;
    for (; i + unrolled * lanes <= vocab; i += unrolled * lanes)
        for (long u = 0; u < unrolled; u++)
            best[u].see(_mm512_loadu_ps(row + i + u * lanes), i + u * lanes, 0xffff);
    for (; i < vocab; i += lanes) {
        const __mmask16 there = vocab - i < lanes ? (1 << (vocab - i)) - 1 : 0xffff;
        best[0].see(_mm512_maskz_loadu_ps(there, row + i), i, there);
    }
    float largest = -__builtin_inff();
    int32_t lowest = 0;
    __mmask16 broken = 0;
    for (const Best& b : best) {
        float values[lanes];
        int32_t ids[lanes];
        _mm512_storeu_ps(values, b.value);
        _mm512_storeu_si512(ids, b.id);
        for (long k = 0; k < lanes; k++)
            if (values[k] > largest || (values[k] == largest && ids[k] < lowest))
                largest = values[k], lowest = ids[k];
        broken |= b.broken;
    }
    *chosen = lowest;
    *verdict = broken ? -1 : lowest;
}

}  // namespace

// logits [rows][vocab], vocab below 2^31; chosen, verdicts [rows].
extern "C" void baton_checked_argmax(const float* logits, long rows, long vocab, int64_t* chosen,
                                     int64_t* verdicts, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1 && rows * vocab > small)
    for (long r = 0; r < rows; r++)
        checked_argmax(logits + r * vocab, vocab, chosen + r, verdicts + r);
}
