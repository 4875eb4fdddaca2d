// Causal attention over the paged KV pool, block by block where the blocks lie: nothing is gathered.
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
constexpr long kFewRows = 8;  // at most so many run with keys in lanes

// Dimensions as sums are kept: see Values.
constexpr long padded(long dim) { return (dim + 31) / 32 * 32; }

// Products of weights and values, into sums that are kept in the order in which the products come.
template <class T>
struct Values;

template <>
struct Values<F32> {
    // out[r] [dim] += weight[r][j] * values[j], key by key.
    template <int R>
    static void add(float (*out)[kMaxDim], const float (*weight)[kStep], const float* const* values,
                    int first, int end, long dim) {
        for (long d = 0; d < dim; d += 16) {
            const __mmask16 m = first_lanes(dim - d);
            __m512 o[R];
            for (int r = 0; r < R; r++) o[r] = _mm512_load_ps(out[r] + d);
            for (int j = first; j < end; j++) {
                const __m512 v = F32::load(values[j] + d, m);
                for (int r = 0; r < R; r++)
                    o[r] = _mm512_fmadd_ps(_mm512_set1_ps(weight[r][j]), v, o[r]);
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
    static void add(float (*out)[kMaxDim], const float (*weight)[kStep],
                    const uint16_t* const* values, int first_key, int end, long dim) {
        alignas(64) uint16_t narrow[R][kStep];
        for (int r = 0; r < R; r++)
            for (int j = first_key; j < end; j += 16)
                BF16::store(narrow[r] + j, _mm512_load_ps(weight[r] + j));
        for (long d = 0; d < dim; d += 32) {
            const __mmask32 m = dim - d >= 32 ? ~0u : (1u << (dim - d)) - 1;
            __m512 low[R], high[R];
            for (int r = 0; r < R; r++) {
                low[r] = _mm512_load_ps(out[r] + d);
                high[r] = _mm512_load_ps(out[r] + d + 16);
            }
            for (int j = first_key; j < end; j += 2) {
                const __m512i a = _mm512_maskz_loadu_epi16(m, values[j] + d);
                // The last key of an odd number has no partner.
                const __m512i b = j + 1 < end ? _mm512_maskz_loadu_epi16(m, values[j + 1] + d)
                                                   : _mm512_setzero_si512();
                const __m512i first = _mm512_unpacklo_epi16(a, b), second = _mm512_unpackhi_epi16(a, b);
                for (int r = 0; r < R; r++) {
                    const __m512i w = _mm512_set1_epi32(*(const int32_t*)(narrow[r] + j));
                    low[r] = BF16::step(low[r], first, w);
                    high[r] = BF16::step(high[r], second, w);
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
void attend_step(Rows<T, R>& rows, const Step<typename T::element>& step,
                 const Step<typename T::element>& next, const Attention& c) {
    using E = typename T::element;
    alignas(64) int32_t words[kMaxDim * 16];
    const int low = step.begin / 16 * 16, high = (step.end + 15) / 16 * 16;
    for (int lane = low; lane < high; lane += 16) {
        next.prefetch(lane, c);
        const E* keys[16];
        step.sixteen(lane, keys);
        turn<T>(keys, c.dim, words);
        rows.score(words, step.first + lane, lane, c);
    }
    rows.soften(low, high, c.dim);
    // Values are taken in pairs that begin at even positions, so that a row's sums do not depend on `begin`.
    const E* values[kStep];
    for (int j = low; j < step.end; j++)
        values[j] = step.keys[j < step.begin ? step.begin : j] + step.to_values;
    float(*weight)[kStep] = rows.weight;
    Values<T>::template add<R>(rows.out, weight, values, low, step.end, c.dim);
}

template <class T, int R>
void run(const Attention& c, const Task& t) {
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
    for_steps<T>(c, t, [&](const Step<E>& step, const Step<E>& next) {
        attend_step<T, R>(rows, step, next, c);
    });
    for (int r = 0; r < R; r++) {
        const __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(rows.sum[r]));
        for (long d = 0; d < c.dim; d += 16)
            T::store((E*)c.out + at[r] + d, _mm512_div_ps(Values<T>::sorted(rows.out[r], d), sum),
                     first_lanes(c.dim - d));
    }
}

// Rows that are left over from larger parts run in ever smaller ones.
template <class T>
void run_few_rows(const Attention& c, const Task& t) {
    for (long done = 0; done < t.rows;) {
        const long left = t.rows - done;
        Task part{t.seq, t.kv_head, t.first + done, left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1};
        switch (part.rows) {
            case 8: run<T, 8>(c, part); break;
            case 4: run<T, 4>(c, part); break;
            case 2: run<T, 2>(c, part); break;
            default: run<T, 1>(c, part); break;
        }
        done += part.rows;
    }
}

template <class T>
void attend(const Attention& c, int threads) {
    const long per_kv = c.heads / c.kv_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (long i = 0; i < c.task_at[c.num_seqs]; i++) {
        long low = 0, high = c.num_seqs;
        while (high - low > 1) {
            const long middle = (low + high) / 2;
            (c.task_at[middle] <= i ? low : high) = middle;
        }
        const long own = i - c.task_at[low], rows = c.num_tokens[low] * per_kv;
        const long first = own / c.kv_heads * kTaskRows;
        const long left = rows - first;
        const Task task{low, own % c.kv_heads, first, left < kTaskRows ? left : kTaskRows};
        (task.rows > kFewRows ? run_many_rows<T> : run_few_rows<T>)(c, task);
    }
}

}  // namespace

extern "C" void baton_attention(const Attention* call, int is_bf16, int threads) {
    if (is_bf16)
        attend<BF16>(*call, threads);
    else
        attend<F32>(*call, threads);
}
