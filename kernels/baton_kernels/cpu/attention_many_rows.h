// Many rows of one sequence and KV head, such as a prompt's: rows in lanes, so that maxima and sums are lane by lane, and both
// products are small matrix products. Every row takes its sums in the order of attention.cpp, so that it does not
// matter which of the two a row runs by.
#pragma once
#include "attention.h"

namespace {

// sums[c] of N x 16 rows += sum over k of a[k][rows] * b[k * stride + c]. a: planes of [k][16 rows], `plane` words apart.
template <class T, int N, int C>
inline void multiply(__m512 (&sums)[C][N], const int32_t* a, long plane, const int32_t* b, long stride,
                     long count) {
    for (long k = 0; k < count; k++, a += 16, b += stride) {
        __m512i v[N];
        for (int n = 0; n < N; n++) v[n] = _mm512_load_si512(a + n * plane);
        for (int i = 0; i < C; i++) {
            const __m512i word = _mm512_set1_epi32(b[i]);
            for (int n = 0; n < N; n++) sums[i][n] = T::step(sums[i][n], v[n], word);
        }
    }
}

// What multiplies a word of values: the weights of one key, or of a pair of them.
template <class T>
struct Words;

template <>
struct Words<F32> {
    // Of the values at `own` and `dim` further on, `count` of which are there.
    static __m512i of_values(const float* own, long, __mmask16 m, int count) {
        return _mm512_castps_si512(F32::load(own, count > 0 ? m : 0));
    }
    static void store(int32_t* out, __m512 even, __m512 odd) {
        _mm512_store_ps(out, even);
        _mm512_store_ps(out + 16, odd);
    }
};

template <>
struct Words<BF16> {
    static __m512i of_values(const uint16_t* own, long dim, __mmask16 m, int count) {
        const __m256i even = _mm256_maskz_loadu_epi16(count > 0 ? m : 0, own);
        const __m256i odd = _mm256_maskz_loadu_epi16(count > 1 ? m : 0, own + dim);
        return _mm512_or_si512(_mm512_cvtepu16_epi32(even),
                               _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
    }
    static void store(int32_t* out, __m512 even, __m512 odd) {
        alignas(64) static const uint16_t turns[32] = {
            0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
            8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        _mm512_store_si512(out, _mm512_permutexvar_epi16(_mm512_load_si512(turns), both));
    }
};

// N x 16 rows of a task; the last ones may be none, and are then like its last row.
template <class T, int N>
class ManyRows {
    using E = typename T::element;
    static constexpr int kColumns = N == 3 ? 4 : 16 / N;  // keys or dimensions of a register tile
    static constexpr long kPlane = kMaxDim / T::per_word * 16;
    static constexpr long kWeightPlane = kStep / T::per_word * 16;

    const Attention& c;
    const Task& t;
    const long num_words = c.dim / T::per_word;
    const long stride = (c.dim + 15) / 16 * 16;      // of a line of values
    __m512i position[N];                             // int32
    __m512 top[N], largest[N];
    alignas(64) int32_t query[N * kPlane];           // [N][words][16 rows]
    alignas(64) int32_t keys[kPlane];                // [words][16 keys]
    alignas(64) int32_t values[kStep / T::per_word * kMaxDim];  // [keys or pairs][stride]
    alignas(64) float score[kStep][N][16];
    alignas(64) int32_t weight[N * kWeightPlane];    // [N][keys or pairs][16 rows]
    alignas(64) float sum[16][N][16];                // of the keys at positions that are alike modulo 16
    alignas(64) float out[kMaxDim][N][16];

    const long first_position = Place(c, t, 0).position;
    long at[N * 16];                                 // where rows lie in query and out

public:
    ManyRows(const Attention& call, const Task& task) : c(call), t(task) {
        for (int n = 0; n < N; n++) {
            const E* rows[16];
            alignas(64) int32_t positions[16];
            for (int i = 0; i < 16; i++) {
                const long row = n * 16 + i;
                const Place place(c, t, row < t.rows ? row : t.rows - 1);
                at[row] = place.at;
                rows[i] = (const E*)c.query + place.at;
                positions[i] = (int32_t)place.position;
            }
            turn<T>(c.dim, query + n * kPlane, [&](int j, long w, __mmask16 m) {
                return _mm512_maskz_loadu_epi32(m, (const int32_t*)rows[j] + w);
            });
            position[n] = _mm512_load_si512(positions);
            top[n] = largest[n] = _mm512_set1_ps(kLowest);
            for (int i = 0; i < 16; i++) _mm512_store_ps(sum[i][n], _mm512_setzero_ps());
            for (long d = 0; d < stride; d++) _mm512_store_ps(out[d][n], _mm512_setzero_ps());
        }
    }

    void attend(const Step<T>& step, const Step<T>& next) {
        const int low = step.low() * kGroup, high = step.high() * kGroup;
        for (int g = step.low(); g < step.high(); g++) {
            turn_keys<T>(step.keys[g], next.keys[g], c.dim, keys);
            for (int j = 0; j < kGroup; j += kColumns) find_scores(step.first, g * kGroup, j);
            turn_values(step, next, g);
        }
        for (int n = 0; n < N; n++) soften(n, low, high);
        add_values(low / T::per_word, (high - low) / T::per_word);
    }

    void finish() {
        for (int n = 0; n < N; n++) {
            for (int half = 8; half > 0; half /= 2)  // as _mm512_reduce_add_ps
                for (int i = 0; i < half; i++)
                    _mm512_store_ps(sum[i][n], _mm512_add_ps(_mm512_load_ps(sum[i][n]),
                                                             _mm512_load_ps(sum[i + half][n])));
            for (long d = 0; d < c.dim; d += 16) write(n, d);
        }
    }

private:
    // Scores of kColumns keys, from `key` of `keys` on: those of the step's lanes from low + key on.
    void find_scores(long first, int low, int key) {
        __m512 s[kColumns][N] = {};
        multiply<T, N, kColumns>(s, query, kPlane, keys + key, 16, num_words);
        const __m512 scale = _mm512_set1_ps(scale_of(c));
        const bool all_see = !c.window && first + kStep - 1 <= first_position;
        for (int j = 0; j < kColumns; j++)
            for (int n = 0; n < N; n++) {
                const int lane = low + key + j;
                __m512 x = _mm512_mul_ps(s[j][n], scale);
                if (!all_see)
                    x = _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), seen(first + lane, n), x);
                largest[n] = _mm512_max_ps(largest[n], x);
                _mm512_store_ps(score[lane][n], x);
            }
    }

    // Which of 16 rows see the key at a position.
    __mmask16 seen(long key, int n) const {
        const __m512i now = _mm512_set1_epi32((int32_t)key);
        const __mmask16 is_past = _mm512_cmple_epi32_mask(now, position[n]);
        if (!c.window) return is_past;
        const __m512i before = _mm512_sub_epi32(position[n], _mm512_set1_epi32((int32_t)c.window));
        return is_past & _mm512_cmpgt_epi32_mask(now, before);
    }

    // Values of a group become lines of words, and another's are fetched. Those past the newest key are zero.
    void turn_values(const Step<T>& step, const Step<T>& next, int g) {
        const int count = step.end - g * kGroup;
        for (int j = 0; j < kGroup; j += T::per_word) {
            const E *own = step.values[g] + j * c.dim, *ahead = next.values[g] + j * c.dim;
            for (long d = 0; d < c.dim; d += 16) {
                fetch(ahead + d * T::per_word);
                _mm512_store_si512(values + (g * kGroup + j) / T::per_word * stride + d,
                                   Words<T>::of_values(own + d, c.dim, first_lanes(c.dim - d), count - j));
            }
        }
    }

    // Scores of the step become weights.
    void soften(int n, int low, int high) {
        if (_mm512_cmp_ps_mask(largest[n], top[n], _CMP_NEQ_UQ)) shrink(n);
        for (int i = 0; i < 16; i += 2) {
            __m512 even = _mm512_load_ps(sum[i][n]), odd = _mm512_load_ps(sum[i + 1][n]);
            for (int j = low + i; j < high; j += 16) {
                const __m512 p = T::exp2(_mm512_sub_ps(_mm512_load_ps(score[j][n]), top[n]));
                const __m512 q = T::exp2(_mm512_sub_ps(_mm512_load_ps(score[j + 1][n]), top[n]));
                Words<T>::store(weight + n * kWeightPlane + j / T::per_word * 16, p, q);
                even = _mm512_add_ps(even, p);
                odd = _mm512_add_ps(odd, q);
            }
            _mm512_store_ps(sum[i][n], even);
            _mm512_store_ps(sum[i + 1][n], odd);
        }
    }

    void shrink(int n) {
        const __m512 by = T::exp2(_mm512_sub_ps(top[n], largest[n]));
        top[n] = largest[n];
        for (int i = 0; i < 16; i++)
            _mm512_store_ps(sum[i][n], _mm512_mul_ps(_mm512_load_ps(sum[i][n]), by));
        for (long d = 0; d < c.dim; d++)
            _mm512_store_ps(out[d][n], _mm512_mul_ps(_mm512_load_ps(out[d][n]), by));
    }

    // From line `first` of weights and values on.
    void add_values(long first, long count) {
        for (long d = 0; d < c.dim; d += kColumns) {
            __m512 s[kColumns][N];
            for (int i = 0; i < kColumns; i++)
                for (int n = 0; n < N; n++) s[i][n] = _mm512_load_ps(out[d + i][n]);
            multiply<T, N, kColumns>(s, weight + first * 16, kWeightPlane, values + first * stride + d,
                                     stride, count);
            for (int i = 0; i < kColumns; i++)
                for (int n = 0; n < N; n++) _mm512_store_ps(out[d + i][n], s[i][n]);
        }
    }

    // Dimensions [d, d + 16) of 16 rows.
    void write(int n, long d) {
        __m512i v[16];
        const __m512 total = _mm512_load_ps(sum[0][n]);
        for (int i = 0; i < 16; i++)
            v[i] = _mm512_castps_si512(_mm512_div_ps(_mm512_load_ps(out[d + i][n]), total));
        transpose(v);
        for (int i = 0; i < 16 && n * 16 + i < t.rows; i++)
            T::store((E*)c.out + at[n * 16 + i] + d, _mm512_castsi512_ps(v[i]),
                     first_lanes(c.dim - d));
    }
};

template <class T, int N>
void run_rows_in_lanes(const Attention& c, const Task& t, const Task* after) {
    ManyRows<T, N> rows(c, t);
    for_steps<T>(c, t, after, [&](const Step<T>& step, const Step<T>& next) { rows.attend(step, next); });
    rows.finish();
}

// Up to 64 rows.
template <class T>
void run_many_rows(const Attention& c, const Task& t, const Task* after) {
    switch ((t.rows + 15) / 16) {
        case 1: run_rows_in_lanes<T, 1>(c, t, after); break;
        case 2: run_rows_in_lanes<T, 2>(c, t, after); break;
        case 3: run_rows_in_lanes<T, 3>(c, t, after); break;
        default: run_rows_in_lanes<T, 4>(c, t, after); break;
    }
}

}  // namespace
