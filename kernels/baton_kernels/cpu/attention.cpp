// Causal attention over the paged KV pool, read where the blocks lie. Only keys of another type than is computed in, of
// blocks that are no multiple of 16 tokens, or at the edge of a window are copied first, 64 at a time.
//
// Each step has the next one's keys and values brought into the L2 cache, line by line as it reads its own; the last step of a
// task those of the thread's next task.
//
// A task is up to kTaskRows query rows (tokens x the heads that share a KV head) of one sequence and KV head. It walks over
// the keys in steps of 64 at positions divisible by 64, with the running maximum and sum of the online softmax (Milakov
// and Gimelshein 2018, "Online normalizer calculation for softmax"; FlashAttention, Dao et al. 2022, section 3.1).
// A row's result depends on its query and the keys that it sees alone: not on the rows beside it, the chunk or the batch.
//
// A few rows, such as those of a decode step, run here with keys in lanes, many in attention_many_rows.h with rows in lanes.
// Both do the same operations on the same numbers in the same order: a row is the same to the bit by either.
#include "attention.h"
#include "attention_many_rows.h"

namespace {

constexpr long kTaskRows = 64;

// Dimensions as sums are kept: see Values.
constexpr long padded(long dim) { return (dim + 31) / 32 * 32; }

// Products of weights and values, into sums that are kept in the order in which the products come.
template <class T>
struct Values;

template <>
struct Values<F32> {
    // out[r] [dim] += weight[r][j] * values[j], key by key.
    template <int R>
    static void add(float (*out)[kMaxDim], const float (*weight)[kStep], const Step<F32>& step,
                    const Step<F32>& next, long dim) {
        for (long d = 0; d < dim; d += 16) {
            const __mmask16 m = first_lanes(dim - d);
            __m512 o[R];
            for (int r = 0; r < R; r++) o[r] = _mm512_load_ps(out[r] + d);
            for (int g = step.low(); g < step.high(); g++) {
                const int lane = g * kGroup, end = step.end - lane < kGroup ? step.end - lane : kGroup;
                const float *value = step.values[g] + d, *ahead = next.values[g] + d;
                for (int j = 0; j < end; j++, value += dim, ahead += dim) {
                    const __m512 v = F32::load(value, m);
                    fetch(ahead);
                    for (int r = 0; r < R; r++)
                        o[r] = _mm512_fmadd_ps(_mm512_set1_ps(weight[r][lane + j]), v, o[r]);
                }
            }
            for (int r = 0; r < R; r++) _mm512_store_ps(out[r] + d, o[r]);
        }
    }
    static __m512 sorted(const float* out, long d) { return _mm512_load_ps(out + d); }
};

template <>
struct Values<BF16> {
    // Two keys at a time, weights rounded to bfloat16. Pairs of 32 dimensions of two keys come out of the unpacking in
    // another order, which the sums keep; `sorted` undoes it.
    template <int R>
    static void add(float (*out)[kMaxDim], const float (*weight)[kStep], const Step<BF16>& step,
                    const Step<BF16>& next, long dim) {
        alignas(64) uint16_t narrow[R][kStep];
        for (int r = 0; r < R; r++)
            for (int j = step.low() * kGroup; j < step.end; j += 16)
                BF16::store(narrow[r] + j, _mm512_load_ps(weight[r] + j));
        for (long d = 0; d < dim; d += 32) {
            const __mmask32 m = dim - d >= 32 ? ~0u : (1u << (dim - d)) - 1;
            __m512 low[R], high[R];
            for (int r = 0; r < R; r++) {
                low[r] = _mm512_load_ps(out[r] + d);
                high[r] = _mm512_load_ps(out[r] + d + 16);
            }
            for (int g = step.low(); g < step.high(); g++) {
                const int lane = g * kGroup, end = step.end - lane < kGroup ? step.end - lane : kGroup;
                const uint16_t *value = step.values[g] + d, *ahead = next.values[g] + d;
                for (int j = 0; j < end; j += 2, value += 2 * dim, ahead += 2 * dim) {
                    const __m512i a = _mm512_maskz_loadu_epi16(m, value);
                    // The last key of an odd number has no partner.
                    const __m512i b = _mm512_maskz_loadu_epi16(j + 1 < end ? m : 0, value + dim);
                    fetch(ahead);
                    fetch(ahead + dim);
                    const __m512i first = _mm512_unpacklo_epi16(a, b), second = _mm512_unpackhi_epi16(a, b);
                    for (int r = 0; r < R; r++) {
                        const __m512i w = _mm512_set1_epi32(*(const int32_t*)(narrow[r] + lane + j));
                        low[r] = BF16::step(low[r], first, w);
                        high[r] = BF16::step(high[r], second, w);
                    }
                }
            }
            for (int r = 0; r < R; r++) {
                _mm512_store_ps(out[r] + d, low[r]);
                _mm512_store_ps(out[r] + d + 16, high[r]);
            }
        }
    }
    static __m512 sorted(const float* out, long d) {
        const float* pair = out + d / 32 * 32;
        const __m512 low = _mm512_load_ps(pair), high = _mm512_load_ps(pair + 16);
        const __m512i from = d % 32 == 0
            ? _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23)
            : _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        return _mm512_permutex2var_ps(low, from, high);
    }
};

template <class T, int R>
struct Rows {
    const int32_t* query[R];  // words
    long position[R];
    float top[R];
    __m512 sum[R];            // the sum of weights is that of the lanes
    alignas(64) float out[R][kMaxDim];
    alignas(64) float weight[R][kStep];

    // Scores of 16 keys at positions from `at`; -inf for those that a row does not see.
    void score(const int32_t* words, long at, int lane, const Attention& c) {
        __m512 s[R];
        for (int r = 0; r < R; r++) s[r] = _mm512_setzero_ps();
        for (long w = 0; w < c.dim / T::per_word; w++) {
            const __m512i k = _mm512_load_si512(words + w * 16);
            for (int r = 0; r < R; r++)
                s[r] = T::step(s[r], k, _mm512_set1_epi32(query[r][w]));
        }
        const __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        for (int r = 0; r < R; r++) {
            // Lanes in (newest - window, newest]; clamped, which changes no comparison with 0..15.
            const long newest = position[r] - at, oldest = c.window ? newest - c.window : -1;
            __mmask16 seen = _mm512_cmple_epi32_mask(index, _mm512_set1_epi32(clamp(newest)));
            seen &= _mm512_cmpgt_epi32_mask(index, _mm512_set1_epi32(clamp(oldest)));
            _mm512_store_ps(weight[r] + lane,
                            _mm512_mask_mul_ps(_mm512_set1_ps(-__builtin_inff()), seen, s[r],
                                               _mm512_set1_ps(scale_of(c))));
        }
    }

    // Scores of the keys in lanes [first, end), both divisible by 16, become weights.
    void soften(int first, int end, long dim) {
        for (int r = 0; r < R; r++) {
            __m512 largest = _mm512_set1_ps(top[r]);
            for (int j = first; j < end; j += 16)
                largest = _mm512_max_ps(largest, _mm512_load_ps(weight[r] + j));
            const float next = _mm512_reduce_max_ps(largest);
            if (next != top[r]) shrink(r, next, dim);
            for (int j = first; j < end; j += 16) {
                const __m512 x = _mm512_sub_ps(_mm512_load_ps(weight[r] + j), _mm512_set1_ps(top[r]));
                const __m512 p = T::exp2(x);
                _mm512_store_ps(weight[r] + j, p);
                sum[r] = _mm512_add_ps(sum[r], p);
            }
        }
    }

    void shrink(int r, float next, long dim) {
        const __m512 by = T::exp2(_mm512_set1_ps(top[r] - next));
        sum[r] = _mm512_mul_ps(sum[r], by);
        for (long d = 0; d < padded(dim); d += 16)
            _mm512_store_ps(out[r] + d, _mm512_mul_ps(_mm512_load_ps(out[r] + d), by));
        top[r] = next;
    }

    static int clamp(long x) { return x < -1 ? -1 : x > 16 ? 16 : (int)x; }
};

template <class T, int R>
void attend_step(Rows<T, R>& rows, const Step<T>& step, const Step<T>& next, const Attention& c) {
    alignas(64) int32_t words[kMaxDim * 16];
    for (int g = step.low(); g < step.high(); g++) {
        turn_keys<T>(step.keys[g], next.keys[g], c.dim, words);
        rows.score(words, step.first + g * kGroup, g * kGroup, c);
    }
    rows.soften(step.low() * kGroup, step.high() * kGroup, c.dim);
    Values<T>::template add<R>(rows.out, rows.weight, step, next, c.dim);
}

template <class T, int R>
void run_few_rows(const Attention& c, const Task& t, const Task* after) {
    using E = typename T::element;
    Rows<T, R> rows;
    long at[R];
    for (int r = 0; r < R; r++) {
        const Place place(c, t, r);
        at[r] = place.at;
        rows.query[r] = (const int32_t*)((const E*)c.query + place.at);
        rows.position[r] = place.position;
        rows.top[r] = kLowest;
        rows.sum[r] = _mm512_setzero_ps();
        for (long d = 0; d < padded(c.dim); d += 16) _mm512_store_ps(rows.out[r] + d, _mm512_setzero_ps());
    }
    for_steps<T>(c, t, after, [&](const Step<T>& step, const Step<T>& next) {
        attend_step<T, R>(rows, step, next, c);
    });
    for (int r = 0; r < R; r++) {
        const __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(rows.sum[r]));
        for (long d = 0; d < c.dim; d += 16)
            T::store((E*)c.out + at[r] + d, _mm512_div_ps(Values<T>::sorted(rows.out[r], d), sum),
                     first_lanes(c.dim - d));
    }
}

template <class T>
void run(const Attention& c, const Task& t, const Task* after) {
    switch (t.rows) {
        case 1: run_few_rows<T, 1>(c, t, after); break;
        case 2: run_few_rows<T, 2>(c, t, after); break;
        case 3: run_few_rows<T, 3>(c, t, after); break;
        case 4: run_few_rows<T, 4>(c, t, after); break;
        case 5: run_few_rows<T, 5>(c, t, after); break;
        case 6: run_few_rows<T, 6>(c, t, after); break;
        case 7: run_few_rows<T, 7>(c, t, after); break;
        case 8: run_few_rows<T, 8>(c, t, after); break;
        default: run_many_rows<T>(c, t, after); break;
    }
}

// Task number i of all.
Task task_of(const Attention& c, long i) {
    long low = 0, high = c.num_seqs;
    while (high - low > 1) {
        const long middle = (low + high) / 2;
        (c.task_at[middle] <= i ? low : high) = middle;
    }
    const long per_kv = c.heads / c.kv_heads, own = i - c.task_at[low];
    const long first = own / c.kv_heads * kTaskRows, left = c.num_tokens[low] * per_kv - first;
    const long rows = left < kTaskRows ? left : kTaskRows;
    const long first_position = c.start[low] + first / per_kv;
    const long oldest = c.window && first_position >= c.window ? first_position - c.window + 1 : 0;
    return {low, own % c.kv_heads, first, rows, oldest, c.start[low] + (first + rows - 1) / per_kv};
}

// Each thread takes a task while it still has one to run, so that it can fetch what comes next.
template <class T>
void attend(const Attention& c, int threads) {
    const long num_tasks = c.task_at[c.num_seqs];
    long taken = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (long i = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED); i < num_tasks;) {
        const long next = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
        const Task now = task_of(c, i), after = next < num_tasks ? task_of(c, next) : now;
        run<T>(c, now, next < num_tasks ? &after : nullptr);
        i = next;
    }
}

}  // namespace

extern "C" void baton_attention(const Attention* call, int is_bf16, int threads) {
    if (is_bf16)
        attend<BF16>(*call, threads);
    else
        attend<F32>(*call, threads);
}
