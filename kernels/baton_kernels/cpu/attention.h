// What attention over the paged KV pool is asked for, and where a step's keys and values lie.
#pragma once
#include "calls.h"
#include "stored.h"

namespace {

constexpr long kStep = 64;
constexpr long kMaxDim = 256;
constexpr float kLowest = -1e30f;  // below any score, and finite: kLowest - kLowest is 0

struct Task {
    long seq, kv_head, first, rows;  // rows [first, first + rows) of the sequence's tokens x heads per KV head
};

// Rows of a 16 x 16 matrix of 32-bit words become its columns.
inline void transpose(__m512i v[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}

// rows: 16 pointers to keys or queries (null: none) -> words[dim / per_word][16 rows].
template <class T>
void turn(const typename T::element* const* rows, long dim, int32_t* words) {
    const long num_words = dim / T::per_word;
    for (long w = 0; w < num_words; w += 16) {
        const __mmask16 m = first_lanes(num_words - w);
        __m512i v[16];
        for (int j = 0; j < 16; j++)
            v[j] = rows[j] ? _mm512_maskz_loadu_epi32(m, (const int32_t*)rows[j] + w)
                           : _mm512_setzero_si512();
        transpose(v);
        for (int j = 0; j < 16; j++) _mm512_store_si512(words + (w + j) * 16, v[j]);
    }
}

// Where a row of a task lies in query and out, and its token's position.
struct Place {
    long at, position;

    Place(const Attention& c, const Task& t, long row) {
        const long per_kv = c.heads / c.kv_heads, own = t.first + row;
        const long head = t.kv_head * per_kv + own % per_kv;
        at = ((c.first_row[t.seq] + own / per_kv) * c.heads + head) * c.dim;
        position = c.start[t.seq] + own / per_kv;
    }
};

// Where a step's keys lie. Keys that no row sees are absent: they may lie in blocks that were given up.
template <class E>
struct Step {
    long first;         // position of key 0, divisible by kStep
    int begin, end;     // keys [begin, end) are there
    const char* rows[kStep];     // where keys lie in the pool
    const float* scales[kStep];
    const E* keys[kStep];        // the same to compute with: see take
    long to_values;              // elements from a key to its value

    void locate(const Attention& c, const Task& t, long at, long oldest, long newest) {
        first = at;
        begin = oldest > at ? (int)(oldest - at) : 0;
        end = newest - at + 1 < kStep ? (int)(newest - at + 1) : (int)kStep;
        const int64_t* table = c.tables + c.table_at[t.seq];
        long block = (at + begin) / c.block_size, offset = (at + begin) % c.block_size;
        for (int j = begin; j < end; block++, offset = 0) {
            const long head = (table[block] * c.num_layers + c.layer) * 2 * c.kv_heads + t.kv_head;
            const char* row = c.pool + head * c.head_bytes + offset * c.row_bytes;
            const float* scale = (const float*)(c.scales + head * c.head_bytes) + offset;
            for (; offset < c.block_size && j < end; offset++, j++, row += c.row_bytes) {
                rows[j] = row;
                scales[j] = scale++;
            }
        }
    }

    // Has keys and values where they lie, or, of a pool of another type, in `memory`.
    template <class T>
    void take(const Attention& c, E* memory) {
        const long to_value_bytes = c.kv_heads * c.head_bytes;
        if (c.stored == T::stored) {
            to_values = to_value_bytes / (long)sizeof(E);
            for (int j = begin; j < end; j++) keys[j] = (const E*)rows[j];
            return;
        }
        const auto take_row = take_row_of<T>(c.stored);
        to_values = kStep * c.dim;
        for (int j = begin; j < end; j++) {
            E* key = memory + j * c.dim;
            const auto* value_scale = (const float*)((const char*)scales[j] + to_value_bytes);
            take_row(rows[j], scales[j], c.dim, key);
            take_row(rows[j] + to_value_bytes, value_scale, c.dim, key + to_values);
            keys[j] = key;
        }
    }

    // The 16 keys from `low` on, which is divisible by 16; null where there is none.
    void sixteen(int low, const E** out) const {
        for (int j = low; j < low + 16; j++) out[j - low] = j >= begin && j < end ? keys[j] : nullptr;
    }

    // Keys and values of lanes [low, low + 16).
    void prefetch(int low, const Attention& c) const {
        const int stop = low + 16 < end ? low + 16 : end;
        for (int j = low > begin ? low : begin; j < stop; j++)
            for (long at = 0; at < c.row_bytes; at += 64) {
                _mm_prefetch(rows[j] + at, _MM_HINT_T1);
                _mm_prefetch(rows[j] + c.kv_heads * c.head_bytes + at, _MM_HINT_T1);
            }
    }
};

// Calls attend(step, the one after it) for all steps that a task's rows see keys of.
template <class T, class F>
void for_steps(const Attention& c, const Task& t, F&& attend) {
    using E = typename T::element;
    const long newest = Place(c, t, t.rows - 1).position, first_row = Place(c, t, 0).position;
    const long oldest = c.window && first_row >= c.window ? first_row - c.window + 1 : 0;
    alignas(64) E taken[2 * kStep * kMaxDim];
    Step<E> steps[2];
    long first = oldest / kStep * kStep;
    steps[0].locate(c, t, first, oldest, newest);
    for (int now = 0; first <= newest; first += kStep, now ^= 1) {
        Step<E>& next = steps[now ^ 1];
        if (first + kStep <= newest)
            next.locate(c, t, first + kStep, oldest, newest);
        else
            next.begin = next.end = 0;
        steps[now].template take<T>(c, taken);
        attend(steps[now], next);
    }
}

// Scores are taken to the base of 2.
inline float scale_of(const Attention& c) { return c.scale * kLog2E; }

}  // namespace
