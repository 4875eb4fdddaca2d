// Arguments of attention over the paged KV pool, and access to the keys and values of a step.
#pragma once
#include "calls.h"
#include "stored.h"
#include <type_traits>

namespace {

constexpr long kStep = 64;
constexpr int kGroup = 16;  // consecutive keys that are processed together as one vector
// Vectors that fit into a level's registers; half of them hold sums.
constexpr int kVectors = kNumRegisters / kParts;
constexpr long kMaxDim = 576;  // multi-head latent attention of DeepSeek; other models have up to 256
constexpr float kLowest = -1e30f;  // below any score, and finite: kLowest - kLowest is 0

// Rows [first, first + rows) of a sequence's tokens x heads per KV head.
struct Task {
    long seq, kv_head, first, rows;
    long oldest, newest;  // positions of keys that some row sees, both included

    long first_step() const { return oldest / kStep * kStep; }
};

// Operand type of both products of attention, by T: pairs of bfloat16 if the CPU multiplies them. Other types are
// widened to float32 first, when rows are transposed, so that products run at float32 speed.
template <class T>
using Operand = std::conditional_t<kHasBf16Dot && std::is_same_v<T, BF16>, BF16, F32>;

// Elements of a row per operand word.
template <class T>
constexpr long kPerWord = Operand<T>::per_word;

// Calls take(w, words) for each word w of 16 rows of operands, in order; words holds that word of each row. row(j, d):
// address of row j's elements from d on.
template <class T, class F, class G>
ALWAYS_INLINE void for_words(long dim, F&& row, G&& take) {
    constexpr bool is_split = std::is_same_v<T, BF16> && kPerWord<T> == 1;
    constexpr long step = is_split ? 32 : 16 * kPerWord<T>;
    for (long d = 0, w = 0; d < dim; d += step, w += step / kPerWord<T>) {
        i32x16 v[16];
        UNROLLED for (int j = 0; j < 16; j++) {
            if constexpr (std::is_same_v<T, F16>)
                v[j] = bits_of(T::load(row(j, d), dim - d));
            else
                v[j] = load_words(row(j, d), (dim - d) * (long)sizeof(typename T::element) / 4);
        }
        transpose(v);
        UNROLLED for (int j = 0; j < 16; j++) {
            if constexpr (is_split) {
                take(w + j * 2, bits_of(BF16::even(v[j])));
                take(w + j * 2 + 1, bits_of(BF16::odd(v[j])));
            } else {
                take(w + j, v[j]);
            }
        }
    }
}

// 16 rows -> words[dim / kPerWord][16 rows].
template <class T, class F>
void turn(long dim, int32_t* words, F&& row) {
    for_words<T>(dim, row, [&](long w, i32x16 v) { store_words(words + w * 16, v); });
}

// Transposes a group of keys and prefetches another.
template <class T>
OUTLINED void turn_keys(const typename T::element* keys, const typename T::element* ahead, long dim, int32_t* words) {
    turn<T>(dim, words, [&](int j, long d) {
        fetch(ahead + j * dim + d);
        return keys + j * dim + d;
    });
}

// Offset of a task's row in query and out, and the position of its token.
struct Place {
    long at, position, head;

    Place(const Attention& c, const Task& t, long row) {
        const long per_kv = c.heads / c.kv_heads, own = t.first + row;
        head = t.kv_head * per_kv + own % per_kv;
        at = ((c.first_row[t.seq] + own / per_kv) * c.heads + head) * c.dim;
        position = c.start[t.seq] + own / per_kv;
    }
};

// Bytes from a key to its value.
inline long to_values(const Attention& c) { return (c.parts - 1) * c.kv_heads * c.head_bytes; }

// Calls f(position, row of the pool, its scale) for a task's keys at positions [begin, end).
template <class F>
void for_keys(const Attention& c, const Task& t, long begin, long end, F&& f) {
    const int64_t* table = c.tables + c.table_at[t.seq];
    long block = begin / c.block_size, offset = begin % c.block_size;
    for (long at = begin; at < end; block++, offset = 0) {
        const long head = (table[block] * c.num_layers + c.layer) * c.parts * c.kv_heads + t.kv_head;
        const char* rows = c.pool + head * c.head_bytes;
        const float* scales = (const float*)(c.scales + head * c.head_bytes);
        for (; offset < c.block_size && at < end; offset++, at++)
            f(at, rows + offset * c.row_bytes, scales + offset);
    }
}

// A step's keys and values, in groups of 16. Keys that no row sees are absent: their blocks may have been freed, so
// their place may hold any number, except that values before `begin` are zero.
template <class T>
struct Step {
    using E = typename T::element;

    const Task* task;
    long first;         // position of key 0, divisible by kStep
    int begin, end;     // keys [begin, end) are present
    const E* keys[kStep / kGroup];    // [16][dim] each; an absent group points to another group
    const E* values[kStep / kGroup];
    bool is_taken[kStep / kGroup];    // to be copied from the pool to keys[g] and values[g]

    int low() const { return begin / kGroup; }
    int high() const { return (end + kGroup - 1) / kGroup; }

    // Points groups into the pool, or into memory [2][kStep][dim] if they have to be copied.
    OUTLINED void locate(const Attention& c, const Task& t, long at, E* memory) {
        task = &t;
        first = at;
        begin = t.oldest > at ? (int)(t.oldest - at) : 0;
        end = t.newest - at + 1 < kStep ? (int)(t.newest - at + 1) : (int)kStep;
        const bool is_whole = c.stored == T::stored && c.block_size % kGroup == 0;
        for (int g = low(); g < high(); g++) {
            is_taken[g] = !is_whole || g * kGroup < begin;
            keys[g] = memory + g * kGroup * c.dim;
            values[g] = keys[g] + kStep * c.dim;
            if (is_taken[g]) continue;
            const long position = at + g * kGroup;
            for_keys(c, t, position, position + 1, [&](long, const char* row, const float*) {
                keys[g] = (const E*)row;
                values[g] = (const E*)(row + to_values(c));
            });
        }
        for (int g = 0; g < kStep / kGroup; g++) {
            if (g >= low() && g < high()) continue;
            keys[g] = keys[low()];
            values[g] = values[low()];
        }
    }

    // Copies the groups that cannot be read from the pool directly, and prefetches those of the next step.
    OUTLINED void take(const Attention& c, const Step& next, E* memory) const {
        const auto take_row = take_row_of<T>(c.stored);
        const long to_value = to_values(c);
        for (int g = low(); g < high(); g++) {
            if (!is_taken[g]) continue;
            E *key = memory + g * kGroup * c.dim, *value = key + kStep * c.dim;
            if (g * kGroup < begin) memset(value, 0, kGroup * c.dim * sizeof(E));
            next.for_group(c, g, [&](long, const char* row, const float*) {
                for (long at = 0; at < c.row_bytes; at += 64) {
                    fetch(row + at);
                    fetch(row + to_value + at);
                }
            });
            for_group(c, g, [&](long position, const char* row, const float* scale) {
                const long at = (position - first) % kGroup * c.dim;
                const float* value_scale = (const float*)((const char*)scale + to_value);
                take_row(row, scale, c.dim, key + at);
                take_row(row + to_value, value_scale, c.dim, value + at);
            });
        }
    }

    // Like for_keys, for the present keys of a group.
    template <class F>
    void for_group(const Attention& c, int g, F&& f) const {
        const long from = first + (g * kGroup > begin ? g * kGroup : begin);
        const long to = first + ((g + 1) * kGroup < end ? (g + 1) * kGroup : end);
        for_keys(c, *task, from, to, f);
    }
};

// Calls attend(step, next step) for all steps with keys that the task's rows see. The next of the last step is the
// first step of the next task, or the step itself: steps prefetch the memory of their next.
template <class T, class F>
void for_steps(const Attention& c, const Task& t, const Task* after, F&& attend) {
    alignas(64) typename T::element taken[2 * kStep * kMaxDim];
    Step<T> steps[2];
    long first = t.first_step();
    steps[0].locate(c, t, first, taken);
    for (int now = 0; first <= t.newest; first += kStep, now ^= 1) {
        Step<T>* next = &steps[now ^ 1];
        if (first + kStep <= t.newest)
            next->locate(c, t, first + kStep, taken);
        else if (after)
            next->locate(c, *after, after->first_step(), taken);
        else
            next = &steps[now];
        steps[now].take(c, *next, taken);
        attend(steps[now], *next);
    }
}

// Scores are to base 2.
inline float scale_of(const Attention& c) { return c.scale * kLog2E; }

// Initial maximum of a row: its sink, with weight 1, or a value below any score.
inline float first_top(const Attention& c, long head) { return c.sinks ? c.sinks[head] * kLog2E : kLowest; }

inline float slope_of(const Attention& c, long head) { return c.slopes ? c.slopes[head] * kLog2E : 0.0f; }

inline f32x16 tanh(f32x16 x) {
    const f32x16 low = zeros() - max(x, zeros() - x);  // -|x|
    const f32x16 e = F32::exp2(low * splat(2 * kLog2E));
    const f32x16 y = (splat(1.0f) - e) / (splat(1.0f) + e);
    return select(less(x, zeros()), zeros() - y, y);
}

// Score terms of some models, to base 2. distance: from a row's position to the key's, at most 0.
inline f32x16 with_terms(const Attention& c, f32x16 x, f32x16 slope, f32x16 distance) {
    if (c.softcap) {
        const float cap = c.softcap * kLog2E;
        x = splat(cap) * tanh(x / splat(cap));
    }
    return c.slopes ? fma(slope, distance, x) : x;
}

}  // namespace

// One call, by attention_tasks.h.
template <class T>
void attend(const Attention& c, int threads);
