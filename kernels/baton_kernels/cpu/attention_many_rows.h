// Attention of many rows of one sequence and KV head, such as a prompt's: rows in lanes, so that maxima and sums are
// lane by lane, and both products are small matrix products. Every row takes its sums in the order of
// attention_few_rows.h, so that both give the same bits.
#pragma once
#include "attention.h"

namespace {

// sums[c] of N x 16 rows += sum over k of a[k][rows] * b[k * stride + c]. a: planes of [k][16 rows], `plane` words apart.
template <class P, int N, int C>
inline void multiply(f32x16 (&sums)[C][N], const int32_t* a, long plane, const int32_t* b, long stride,
                     long count) {
    f32x16 own[C][N];  // GCC keeps a local array in registers, but stores to a reference after each product
    UNROLLED for (int i = 0; i < C; i++)
        UNROLLED for (int n = 0; n < N; n++) own[i][n] = sums[i][n];
    for (long k = 0; k < count; k++, a += 16, b += stride) {
        i32x16 v[N];
        UNROLLED for (int n = 0; n < N; n++) v[n] = load_words(a + n * plane);
        UNROLLED for (int i = 0; i < C; i++) {
            const i32x16 word = splat(b[i]);
            UNROLLED for (int n = 0; n < N; n++) own[i][n] = P::step(own[i][n], v[n], word);
        }
    }
    UNROLLED for (int i = 0; i < C; i++)
        UNROLLED for (int n = 0; n < N; n++) sums[i][n] = own[i][n];
}

// N x 16 rows of a task; missing rows repeat the last one.
template <class T, int N>
class ManyRows {
    using E = typename T::element;
    using P = Operand<T>;
    // A register tile: vectors of rows by keys or dimensions.
    static constexpr int kTileRows = kVectors >= 32 ? N : 1;
    static constexpr int kColumns = kTileRows == 3 ? 4 : kVectors / 2 / kTileRows;
    static constexpr long kPlane = kMaxDim / kPerWord<T> * 16;
    static constexpr long kWeightPlane = kStep / kPerWord<T> * 16;

    const Attention& c;
    const Task& t;
    const long num_words = c.dim / kPerWord<T>;
    const long stride = (c.dim + 15) / 16 * 16;      // elements per line of values
    i32x16 position[N];
    f32x16 place[N], slope[N];                       // position as a float
    f32x16 top[N], largest[N];
    alignas(64) int32_t query[N * kPlane];           // [N][words][16 rows]
    alignas(64) int32_t keys[kPlane];                // [words][16 keys]
    alignas(64) int32_t values[kStep / kPerWord<T> * kMaxDim];  // [keys or pairs][stride]
    alignas(64) float score[kStep][N][16];
    alignas(64) int32_t weight[N * kWeightPlane];    // [N][keys or pairs][16 rows]
    alignas(64) float sum[16][N][16];                // sums over the keys with equal position modulo 16
    alignas(64) float out[kMaxDim][N][16];

    const long first_position = Place(c, t, 0).position;
    long at[N * 16];                                 // offsets of rows in query and out

public:
    ManyRows(const Attention& call, const Task& task) : c(call), t(task) {
        for (int n = 0; n < N; n++) {
            const E* rows[16];
            int32_t positions[16];
            alignas(64) float places[16], slopes[16], tops[16];
            for (int i = 0; i < 16; i++) {
                const long row = n * 16 + i;
                const Place own(c, t, row < t.rows ? row : t.rows - 1);
                at[row] = own.at;
                rows[i] = (const E*)c.query + own.at;
                positions[i] = (int32_t)own.position;
                places[i] = (float)own.position;
                slopes[i] = slope_of(c, own.head);
                tops[i] = first_top(c, own.head);
            }
            turn<T>(c.dim, query + n * kPlane, [&](int j, long d) { return rows[j] + d; });
            position[n] = load_words(positions);
            place[n] = F32::load(places);
            slope[n] = F32::load(slopes);
            top[n] = largest[n] = F32::load(tops);
            // Lane 0 has the sink's weight, as in attention_few_rows.h.
            for (int i = 0; i < 16; i++) F32::store(sum[i][n], splat(c.sinks && i == 0 ? 1.0f : 0.0f));
            for (long d = 0; d < stride; d++) F32::store(out[d][n], zeros());
        }
    }

    void attend(const Step<T>& step, const Step<T>& next) {
        const int low = step.low() * kGroup, high = step.high() * kGroup;
        for (int g = step.low(); g < step.high(); g++) {
            turn_keys<T>(step.keys[g], next.keys[g], c.dim, keys);
            for (int j = 0; j < kGroup; j += kColumns)
                for (int n = 0; n < N; n += kTileRows) find_scores(step.first, g * kGroup, j, n);
            turn_values(step, next, g);
        }
        for (int n = 0; n < N; n++) soften(n, low, high);
        for (int n = 0; n < N; n += kTileRows)
            add_values(low / kPerWord<T>, (high - low) / kPerWord<T>, n);
    }

    void finish() {
        for (int n = 0; n < N; n++) {
            for (int half = 8; half > 0; half /= 2)  // same order as reduce_add
                for (int i = 0; i < half; i++)
                    F32::store(sum[i][n], F32::load(sum[i][n]) + F32::load(sum[i + half][n]));
            for (long d = 0; d < c.dim; d += 16) write(n, d);
        }
    }

private:
    // Scores of kColumns keys, from `key` of `keys` on (the step's lanes from low + key on), for rows from vector n on.
    void find_scores(long first, int low, int key, int n) {
        f32x16 s[kColumns][kTileRows];
        UNROLLED for (int j = 0; j < kColumns; j++)
            UNROLLED for (int i = 0; i < kTileRows; i++) s[j][i] = zeros();
        multiply<P, kTileRows, kColumns>(s, query + n * kPlane, kPlane, keys + key, 16, num_words);
        const f32x16 scale = splat(scale_of(c));
        const bool all_see = !c.window && first + kStep - 1 <= first_position;
        UNROLLED for (int j = 0; j < kColumns; j++)
            UNROLLED for (int i = 0; i < kTileRows; i++) {
                const int lane = low + key + j;
                f32x16 x = s[j][i] * scale;
                if (c.softcap || c.slopes)
                    x = with_terms(c, x, slope[n + i], splat((float)(first + lane)) - place[n + i]);
                if (!all_see) x = select(seen(first + lane, n + i), x, splat(-__builtin_inff()));
                largest[n + i] = max(largest[n + i], x);
                F32::store(score[lane][n + i], x);
            }
    }

    // Mask of the 16 rows that see the key at a position.
    mask16 seen(long key, int n) const {
        const i32x16 now = splat((int32_t)key);
        const mask16 is_past = greater(position[n] + splat(1), now);
        if (!c.window) return is_past;
        return is_past & greater(now, position[n] - splat((int32_t)c.window));
    }

    // Turns values of a group into lines of words and prefetches another group. Values past the newest key are zero.
    void turn_values(const Step<T>& step, const Step<T>& next, int g) {
        const int count = step.end - g * kGroup;
        for (int j = 0; j < kGroup; j += kPerWord<T>) {
            const E *own = step.values[g] + j * c.dim, *ahead = next.values[g] + j * c.dim;
            int32_t* words = values + (g * kGroup + j) / kPerWord<T> * stride;
            for (long d = 0; d < c.dim; d += 16) {
                fetch(ahead + d * kPerWord<T>);
                const i32x16 first = bits_of(T::load(own + d, j < count ? c.dim - d : 0));
                if constexpr (kPerWord<T> == 2) {
                    const f32x16 second = T::load(own + c.dim + d, j + 1 < count ? c.dim - d : 0);
                    store_words(words + d, (first >> 16) | bits_of(second));
                } else {
                    store_words(words + d, first);
                }
            }
        }
    }

    // Turns scores of the step into weights.
    void soften(int n, int low, int high) {
        if (any(less(top[n], largest[n]))) shrink(n);
        int32_t* own = weight + n * kWeightPlane;
        for (int i = 0; i < 16; i += 2) {
            f32x16 even = F32::load(sum[i][n]), odd = F32::load(sum[i + 1][n]);
            for (int j = low + i; j < high; j += 16) {
                const f32x16 p = T::exp2(F32::load(score[j][n]) - top[n]);
                const f32x16 q = T::exp2(F32::load(score[j + 1][n]) - top[n]);
                if constexpr (kPerWord<T> == 2) {
                    store_words(own + j * 8, BF16::pairs(p, q));
                } else {
                    store_words(own + j * 16, bits_of(p));
                    store_words(own + j * 16 + 16, bits_of(q));
                }
                even = even + p;
                odd = odd + q;
            }
            F32::store(sum[i][n], even);
            F32::store(sum[i + 1][n], odd);
        }
    }

    void shrink(int n) {
        const f32x16 by = T::exp2(top[n] - largest[n]);
        top[n] = largest[n];
        for (int i = 0; i < 16; i++) F32::store(sum[i][n], F32::load(sum[i][n]) * by);
        for (long d = 0; d < c.dim; d++) F32::store(out[d][n], F32::load(out[d][n]) * by);
    }

    // For rows from vector n on; weights and values from line `first` on.
    void add_values(long first, long count, int n) {
        for (long d = 0; d < c.dim; d += kColumns) {
            f32x16 s[kColumns][kTileRows];
            UNROLLED for (int i = 0; i < kColumns; i++)
                UNROLLED for (int r = 0; r < kTileRows; r++) s[i][r] = F32::load(out[d + i][n + r]);
            multiply<P, kTileRows, kColumns>(s, weight + n * kWeightPlane + first * 16, kWeightPlane,
                                             values + first * stride + d, stride, count);
            UNROLLED for (int i = 0; i < kColumns; i++)
                UNROLLED for (int r = 0; r < kTileRows; r++) F32::store(out[d + i][n + r], s[i][r]);
        }
    }

    // Dimensions [d, d + 16) of 16 rows.
    void write(int n, long d) {
        i32x16 v[16];
        const f32x16 total = F32::load(sum[0][n]);
        UNROLLED for (int i = 0; i < 16; i++) v[i] = bits_of(F32::load(out[d + i][n]) / total);
        transpose(v);
        for (int i = 0; i < 16 && n * 16 + i < t.rows; i++)
            T::store((E*)c.out + at[n * 16 + i] + d, float_of_bits(v[i]), c.dim - d);
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
