// The sum of baton_kernels/word_sum.py, eight words at a time.
#include "words.h"

namespace {

constexpr uint64_t step = 0x9E3779B97F4A7C15;
constexpr uint64_t first_factor = 0xBF58476D1CE4E5B9, second_factor = 0x94D049BB133111EB;
constexpr long lanes = 8, unrolled = 4;

u64x8 term(u64x8 words, u64x8 keys) {
    u64x8 x = words ^ keys;
    x = (x ^ (x >> 32)) * splat_word(first_factor);
    x = (x ^ (x >> 29)) * splat_word(second_factor);
    return (x ^ (x >> 32)) * (keys | splat_word(1));
}

}  // namespace

// words [count]; key: key of the first word.
extern "C" void baton_word_sum(const uint64_t* words, long count, uint64_t key, uint64_t* sum) {
    const uint64_t numbers[lanes] = {0, 1, 2, 3, 4, 5, 6, 7};
    const u64x8 offsets = load_u64(numbers) * splat_word(step);
    u64x8 sums[unrolled], keys[unrolled];
    for (long u = 0; u < unrolled; u++) {
        sums[u] = splat_word(0);
        keys[u] = offsets + splat_word(key + u * lanes * step);
    }
    const u64x8 stride = splat_word(unrolled * lanes * step);
    long i = 0;
    for (; i + unrolled * lanes <= count; i += unrolled * lanes)
        for (long u = 0; u < unrolled; u++) {
            sums[u] = sums[u] + term(load_u64(words + i + u * lanes), keys[u]);
            keys[u] = keys[u] + stride;
        }
    uint64_t total = 0;
    for (long u = 0; u < unrolled; u++) total += sum_of_words(sums[u]);
    for (; i < count; i += lanes) {
        const long rest = count - i < lanes ? count - i : lanes;
        uint64_t last[lanes] = {}, terms[lanes];
        memcpy(last, words + i, rest * 8);
        store_u64(terms, term(load_u64(last), offsets + splat_word(key + i * step)));
        for (long k = 0; k < rest; k++) total += terms[k];
    }
    *sum = total;
}
