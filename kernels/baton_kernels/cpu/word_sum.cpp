// The sum of baton_kernels/word_sum.py, eight words at a time.
#include <immintrin.h>
#include <stdint.h>

namespace {

constexpr uint64_t step = 0x9E3779B97F4A7C15;
constexpr uint64_t first_factor = 0xBF58476D1CE4E5B9, second_factor = 0x94D049BB133111EB;
constexpr long lanes = 8, unrolled = 4;

template <int count>
__m512i folded(__m512i x) {
    return _mm512_xor_si512(x, _mm512_srli_epi64(x, count));
}

__m512i term(__m512i words, __m512i keys) {
    __m512i x = _mm512_xor_si512(words, keys);
    x = _mm512_mullo_epi64(folded<32>(x), _mm512_set1_epi64(first_factor));
    x = _mm512_mullo_epi64(folded<29>(x), _mm512_set1_epi64(second_factor));
    return _mm512_mullo_epi64(folded<32>(x), _mm512_or_si512(keys, _mm512_set1_epi64(1)));
}

}  // namespace

// words [count]; key: that of the first of them.
extern "C" void baton_word_sum(const uint64_t* words, long count, uint64_t key, uint64_t* sum) {
    const __m512i numbers = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i offsets = _mm512_mullo_epi64(numbers, _mm512_set1_epi64(step));
    __m512i sums[unrolled] = {}, keys[unrolled];
    for (long u = 0; u < unrolled; u++)
        keys[u] = _mm512_add_epi64(offsets, _mm512_set1_epi64(key + u * lanes * step));
    const __m512i stride = _mm512_set1_epi64(unrolled * lanes * step);
    long i = 0;
    for (; i + unrolled * lanes <= count; i += unrolled * lanes)
        for (long u = 0; u < unrolled; u++) {
            sums[u] = _mm512_add_epi64(sums[u], term(_mm512_loadu_si512(words + i + u * lanes), keys[u]));
            keys[u] = _mm512_add_epi64(keys[u], stride);
        }
    for (; i < count; i += lanes) {
        const __mmask8 there = count - i < lanes ? (1 << (count - i)) - 1 : 0xff;
        const __m512i at = _mm512_add_epi64(offsets, _mm512_set1_epi64(key + i * step));
        const __m512i terms = term(_mm512_maskz_loadu_epi64(there, words + i), at);
        sums[0] = _mm512_mask_add_epi64(sums[0], there, sums[0], terms);
    }
    for (long u = 1; u < unrolled; u++) sums[0] = _mm512_add_epi64(sums[0], sums[u]);
    *sum = _mm512_reduce_add_epi64(sums[0]);
}
