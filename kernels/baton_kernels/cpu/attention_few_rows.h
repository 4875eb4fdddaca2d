// Attention of a few rows of one sequence and KV head, such as a decode step's: keys in lanes. Runs the same operations
// on the same numbers in the same order as attention_many_rows.h, so that both give the same bits.
#pragma once
#include "attention.h"

namespace {

// Order of dimensions in sums: see Values.
constexpr long padded(long dim) { return (dim + 31) / 32 * 32; }

// Maximum rows of a task that are multiplied at a time: their sums, one or two vectors each, fit into the registers.
constexpr int kTileRows = kVectors / 2 < 8 ? kVectors / 2 : 8;
constexpr int kPairedRows = kVectors / 4 < 8 ? kVectors / 4 : 8;

alignas(64) constexpr float kLanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
// The first lane only.
alignas(64) constexpr float kSinkWeight[16] = {1};

template <class T, int R>
struct Rows {
    using E = typename T::element;

    alignas(64) int32_t query[R][kMaxDim];  // words of operands
    long position[R];
    float slope[R];
    float top[R];
    f32x16 sum[R];            // the sum of weights, one part per lane
    alignas(64) float out[R][kMaxDim];
    alignas(64) float weight[R][kStep];

    // Scores of a group of keys at positions from `at`, for all rows; -inf for keys that a row does not see. Prefetches
    // another group. Handles as many rows at a time as have sums in registers, so that keys are transposed and
    // multiplied in one pass.
    void score_keys(const E* keys, const E* ahead, long at, int lane, const Attention& c) {
        f32x16 s[R];
        UNROLLED for (int r = 0; r < R; r++) s[r] = zeros();
        const long num_words = c.dim / kPerWord<T>;
        for_words<T>(
            c.dim,
            [&](int j, long d) {
                fetch(ahead + j * c.dim + d);
                return keys + j * c.dim + d;
            },
            [&](long w, i32x16 k) {
                if (w < num_words)
                    UNROLLED for (int r = 0; r < R; r++) s[r] = Operand<T>::step(s[r], k, splat(query[r][w]));
            });
        finish_scores<R>(s, at, lane, c, 0);
    }

    // The same for transposed keys and rows [first, first + N).
    template <int N>
    void score(const int32_t* words, long at, int lane, const Attention& c, int first) {
        f32x16 s[N];
        UNROLLED for (int r = 0; r < N; r++) s[r] = zeros();
        for (long w = 0; w < c.dim / kPerWord<T>; w++) {
            const i32x16 k = load_words(words + w * 16);
            UNROLLED for (int r = 0; r < N; r++) s[r] = Operand<T>::step(s[r], k, splat(query[first + r][w]));
        }
        finish_scores<N>(s, at, lane, c, first);
    }

    template <int N>
    void finish_scores(const f32x16 (&s)[N], long at, int lane, const Attention& c, int first) {
        UNROLLED for (int i = 0; i < N; i++) {
            // Lanes in (newest - window, newest]; clamping changes no comparison with 0..15.
            const int r = first + i;
            const long newest = position[r] - at, oldest = c.window ? newest - c.window : -1;
            const mask16 seen = greater(splat(clamp(newest + 1)), lane_numbers()) &
                                greater(lane_numbers(), splat(clamp(oldest)));
            f32x16 x = s[i] * splat(scale_of(c));
            if (c.softcap || c.slopes)
                x = with_terms(c, x, splat(slope[r]), F32::load(kLanes) - splat((float)newest));
            F32::store(weight[r] + lane, select(seen, x, splat(-__builtin_inff())));
        }
    }

    // Turns scores of the keys in lanes [first, end), both divisible by 16, into weights.
    void soften(int first, int end, long dim) {
        for (int r = 0; r < R; r++) {
            f32x16 largest = splat(top[r]);
            for (int j = first; j < end; j += 16) largest = max(largest, F32::load(weight[r] + j));
            const float next = reduce_max(largest);
            if (next != top[r]) shrink(r, next, dim);
            for (int j = first; j < end; j += 16) {
                const f32x16 p = T::exp2(F32::load(weight[r] + j) - splat(top[r]));
                F32::store(weight[r] + j, p);
                sum[r] = sum[r] + p;
            }
        }
    }

    void shrink(int r, float next, long dim) {
        const f32x16 by = T::exp2(splat(top[r] - next));
        sum[r] = sum[r] * by;
        for (long d = 0; d < padded(dim); d += 16) F32::store(out[r] + d, F32::load(out[r] + d) * by);
        top[r] = next;
    }

    static int clamp(long x) { return x < -1 ? -1 : x > 16 ? 16 : (int)x; }
};

// Calls f(first row, count) for tiles of a task's R rows; count is a constant.
template <int R, int Most = kTileRows, int First = 0, class F>
void for_tiles(F&& f) {
    constexpr int N = R - First < Most ? R - First : Most;
    f(First, std::integral_constant<int, N>());
    if constexpr (First + N < R) for_tiles<R, Most, First + N>(f);
}

// out[r] [dim] += weight[r][j] * values[j], key by key. Sums are kept in the order in which products produce them.
template <class P>
struct Values;

template <>
struct Values<F32> {
    template <class T, int R>
    static void add(Rows<T, R>& rows, const Step<T>& step, const Step<T>& next, long dim) {
        for_tiles<R>([&](int first, auto n) {
            // Vectors of dimensions per tile.
            constexpr int room = kVectors / 2 / n.value, D = room >= 4 ? 4 : room >= 2 ? 2 : 1;
            long d = 0;
            if constexpr (D > 1)
                for (; d + D * 16 <= dim; d += D * 16)
                    add_tile<T, R, n.value, D>(rows, step, next, dim, first, d);
            for (; d < dim; d += 16) add_tile<T, R, n.value, 1>(rows, step, next, dim, first, d);
        });
    }

    // Rows [first, first + N) and D vectors of dimensions from d on. With D = 1 the vector may be partial.
    template <class T, int R, int N, int D>
    static void add_tile(Rows<T, R>& rows, const Step<T>& step, const Step<T>& next, long dim, int first, long d) {
        using E = typename T::element;
        f32x16 o[N][D];
        UNROLLED for (int r = 0; r < N; r++)
            UNROLLED for (int i = 0; i < D; i++) o[r][i] = F32::load(rows.out[first + r] + d + i * 16);
        for (int g = step.low(); g < step.high(); g++) {
            const int lane = g * kGroup, end = step.end - lane < kGroup ? step.end - lane : kGroup;
            const E *value = step.values[g] + d, *ahead = next.values[g] + d;
            for (int j = 0; j < end; j++, value += dim, ahead += dim) {
                f32x16 v[D];
                UNROLLED for (int i = 0; i < D; i++)
                    v[i] = D > 1 ? T::load(value + i * 16) : T::load(value, dim - d);
                for (long i = 0; i < D * 16; i += 64 / sizeof(E)) fetch(ahead + i);
                UNROLLED for (int r = 0; r < N; r++) {
                    const f32x16 w = splat(rows.weight[first + r][lane + j]);
                    UNROLLED for (int i = 0; i < D; i++) o[r][i] = fma(w, v[i], o[r][i]);
                }
            }
        }
        UNROLLED for (int r = 0; r < N; r++)
            UNROLLED for (int i = 0; i < D; i++) F32::store(rows.out[first + r] + d + i * 16, o[r][i]);
    }

    static f32x16 in_order(const float* out, long d) { return F32::load(out + d); }
};

#if defined(HAS_BF16_DOT)
template <>
struct Values<BF16> {
    // Two keys at a time; weights are rounded to bfloat16.
    template <class T, int R>
    static void add(Rows<T, R>& rows, const Step<T>& step, const Step<T>& next, long dim) {
        alignas(64) uint16_t narrow[R][kStep];
        for (int r = 0; r < R; r++)
            for (int j = step.low() * kGroup; j < step.end; j += 16)
                BF16::store(narrow[r] + j, F32::load(rows.weight[r] + j));
        for_tiles<R, kPairedRows>([&](int from, auto n) {
            for (long d = 0; d < dim; d += 32) add_tile<T, R, n.value>(rows, narrow + from, step, next, dim, from, d);
        });
    }

    // Rows [from, from + N) and 32 dimensions from d on. weight: of these rows.
    template <class T, int R, int N>
    static void add_tile(Rows<T, R>& rows, const uint16_t (*weight)[kStep], const Step<T>& step, const Step<T>& next,
                         long dim, int from, long d) {
        f32x16 low[N], high[N];
        UNROLLED for (int r = 0; r < N; r++) {
            low[r] = F32::load(rows.out[from + r] + d);
            high[r] = F32::load(rows.out[from + r] + d + 16);
        }
        for (int g = step.low(); g < step.high(); g++) {
            const int lane = g * kGroup, end = step.end - lane < kGroup ? step.end - lane : kGroup;
            const uint16_t *value = step.values[g] + d, *ahead = next.values[g] + d;
            for (int j = 0; j < end; j += 2, value += 2 * dim, ahead += 2 * dim) {
                i32x16 first, second;
                // With an odd number of keys the last one has no partner.
                BF16::load_pairs(value, value + dim, dim - d, j + 1 < end, first, second);
                fetch(ahead);
                fetch(ahead + dim);
                UNROLLED for (int r = 0; r < N; r++) {
                    const i32x16 w = splat(*(const int32_t*)(weight[r] + lane + j));
                    low[r] = BF16::step(low[r], first, w);
                    high[r] = BF16::step(high[r], second, w);
                }
            }
        }
        UNROLLED for (int r = 0; r < N; r++) {
            F32::store(rows.out[from + r] + d, low[r]);
            F32::store(rows.out[from + r] + d + 16, high[r]);
        }
    }

    static f32x16 in_order(const float* out, long d) {
        const float* pair = out + d / 32 * 32;
        return BF16::in_order(F32::load(pair), F32::load(pair + 16), d % 32 != 0);
    }
};
#endif

template <class T, int R>
void attend_step(Rows<T, R>& rows, const Step<T>& step, const Step<T>& next, const Attention& c) {
    alignas(64) int32_t words[kMaxDim * 16];
    for (int g = step.low(); g < step.high(); g++) {
        const long at = step.first + g * kGroup;
        if constexpr (R <= kTileRows) {
            rows.score_keys(step.keys[g], next.keys[g], at, g * kGroup, c);
        } else {
            turn_keys<T>(step.keys[g], next.keys[g], c.dim, words);
            for_tiles<R>([&](int first, auto n) { rows.template score<n.value>(words, at, g * kGroup, c, first); });
        }
    }
    rows.soften(step.low() * kGroup, step.high() * kGroup, c.dim);
    Values<Operand<T>>::add(rows, step, next, c.dim);
}

template <class T, int R>
void run_few_rows(const Attention& c, const Task& t, const Task* after) {
    using E = typename T::element;
    Rows<T, R> rows;
    long at[R];
    for (int r = 0; r < R; r++) {
        const Place place(c, t, r);
        const E* query = (const E*)c.query + place.at;
        at[r] = place.at;
        if constexpr (kPerWord<T> == 2)
            memcpy(rows.query[r], query, c.dim * sizeof(E));
        else
            for (long d = 0; d < c.dim; d += 16)
                F32::store((float*)rows.query[r] + d, T::load(query + d, c.dim - d));
        rows.position[r] = place.position;
        rows.slope[r] = slope_of(c, place.head);
        rows.top[r] = first_top(c, place.head);
        rows.sum[r] = c.sinks ? F32::load(kSinkWeight) : zeros();
        for (long d = 0; d < padded(c.dim); d += 16) F32::store(rows.out[r] + d, zeros());
    }
    for_steps<T>(c, t, after, [&](const Step<T>& step, const Step<T>& next) {
        attend_step<T, R>(rows, step, next, c);
    });
    for (int r = 0; r < R; r++) {
        const f32x16 sum = splat(reduce_add(rows.sum[r]));
        for (long d = 0; d < c.dim; d += 16) {
            const f32x16 v = Values<Operand<T>>::in_order(rows.out[r], d);
            T::store((E*)c.out + at[r] + d, v / sum, c.dim - d);
        }
    }
}

}  // namespace
