// Causal attention over the paged KV pool, block by block where the blocks lie: nothing is gathered.
//
// A task is up to kMaxRows query rows (tokens x the heads that share a KV head) of one sequence and KV head. It walks over
// the keys in steps of 64 at positions divisible by 64, with the running maximum and sum of the online softmax (Milakov
// and Gimelshein 2018, "Online normalizer calculation for softmax"; FlashAttention, Dao et al. 2022, section 3.1).
// A row's result depends on its query and the keys that it sees alone: not on the rows beside it, the chunk or the batch.
#include "simd.h"

// As baton_kernels.cpu.paged_attention describes it to ctypes.
struct Attention {
    const void* query;  // [tokens][heads][dim]
    void* out;          // like query
    const void* pool;   // [blocks][layers][2][kv_heads][block_size][dim]
    long layer, num_layers, heads, kv_heads, block_size, dim;
    float scale;
    long window;        // positions that a token sees, itself included; 0: all
    long num_seqs;
    const int64_t* first_row;   // [seqs]: of its new tokens in query
    const int64_t* num_tokens;  // [seqs]
    const int64_t* start;       // [seqs]: position of the first new token
    const int64_t* tables;      // block tables, one after the other
    const int64_t* table_at;    // [seqs]: where each begins
    const int64_t* task_at;     // [seqs + 1]: number of tasks of the sequences before
};

namespace {

constexpr long kMaxRows = 8;
constexpr long kStep = 64;
constexpr long kMaxDim = 256;
constexpr float kLowest = -1e30f;  // below any score, and finite: kLowest - kLowest is 0

// Dimensions as sums are kept: see Values.
constexpr long padded(long dim) { return (dim + 31) / 32 * 32; }

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

// keys: 16 pointers (null: no key) -> words[dim / per_word][16 keys].
template <class T>
void turn_keys(const typename T::element* const* keys, long dim, int32_t* words) {
    const long num_words = dim / T::per_word;
    for (long w = 0; w < num_words; w += 16) {
        const __mmask16 m = first_lanes(num_words - w);
        __m512i v[16];
        for (int j = 0; j < 16; j++)
            v[j] = keys[j] ? _mm512_maskz_loadu_epi32(m, (const int32_t*)keys[j] + w)
                           : _mm512_setzero_si512();
        transpose(v);
        for (int j = 0; j < 16; j++) _mm512_store_si512(words + (w + j) * 16, v[j]);
    }
}

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

// Where a step's keys lie. Keys that no row sees are absent: they may lie in blocks that were given up.
template <class E>
struct Step {
    long first;         // position of key 0, divisible by kStep
    int begin, end;     // keys [begin, end) are there
    const E* keys[kStep];

    void locate(const Attention& c, const Task& t, long at, long oldest, long newest) {
        first = at;
        begin = oldest > at ? (int)(oldest - at) : 0;
        end = newest - at + 1 < kStep ? (int)(newest - at + 1) : (int)kStep;
        const int64_t* table = c.tables + c.table_at[t.seq];
        long block = (at + begin) / c.block_size, offset = (at + begin) % c.block_size;
        for (int j = begin; j < end; block++, offset = 0) {
            const long head = (table[block] * c.num_layers + c.layer) * 2 * c.kv_heads + t.kv_head;
            const E* key = (const E*)c.pool + (head * c.block_size + offset) * c.dim;
            for (; offset < c.block_size && j < end; offset++, j++, key += c.dim) keys[j] = key;
        }
    }

    // Keys and values of lanes [low, low + 16).
    void prefetch(int low, long dim, long to_values) const {
        const int stop = low + 16 < end ? low + 16 : end;
        for (int j = low > begin ? low : begin; j < stop; j++)
            for (long d = 0; d < dim; d += 64 / (long)sizeof(E)) {
                _mm_prefetch((const char*)(keys[j] + d), _MM_HINT_T1);
                _mm_prefetch((const char*)(keys[j] + to_values + d), _MM_HINT_T1);
            }
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
                                               _mm512_set1_ps(c.scale)));
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
                // A NaN must stay one: compared, it would count as a key not seen.
                const __mmask16 broken = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
                const __m512 p = _mm512_mask_mov_ps(exp_nonpositive(x), broken, x);
                _mm512_store_ps(weight[r] + j, p);
                sum[r] = _mm512_add_ps(sum[r], p);
            }
        }
    }

    void shrink(int r, float next, long dim) {
        const __m512 by = exp_nonpositive(_mm512_set1_ps(top[r] - next));
        sum[r] = _mm512_mul_ps(sum[r], by);
        for (long d = 0; d < padded(dim); d += 16)
            _mm512_store_ps(out[r] + d, _mm512_mul_ps(_mm512_load_ps(out[r] + d), by));
        top[r] = next;
    }

    static int clamp(long x) { return x < -1 ? -1 : x > 16 ? 16 : (int)x; }
};

template <class T, int R>
void attend_step(Rows<T, R>& rows, const Step<typename T::element>& step,
                 const Step<typename T::element>& next, const Attention& c, long to_values) {
    using E = typename T::element;
    alignas(64) int32_t words[kMaxDim * 16];
    const int low = step.begin / 16 * 16, high = (step.end + 15) / 16 * 16;
    for (int lane = low; lane < high; lane += 16) {
        next.prefetch(lane, c.dim, to_values);
        const E* keys[16];
        for (int j = 0; j < 16; j++)
            keys[j] = lane + j >= step.begin && lane + j < step.end ? step.keys[lane + j] : nullptr;
        turn_keys<T>(keys, c.dim, words);
        rows.score(words, step.first + lane, lane, c);
    }
    rows.soften(low, high, c.dim);
    // Values are taken in pairs that begin at even positions, so that a row's sums do not depend on `begin`.
    const E* values[kStep];
    for (int j = low; j < step.end; j++)
        values[j] = step.keys[j < step.begin ? step.begin : j] + to_values;
    float(*weight)[kStep] = rows.weight;
    Values<T>::template add<R>(rows.out, weight, values, low, step.end, c.dim);
}

template <class T, int R>
void run(const Attention& c, const Task& t) {
    using E = typename T::element;
    const long per_kv = c.heads / c.kv_heads;
    Rows<T, R> rows;
    long at[R];
    for (int r = 0; r < R; r++) {
        const long token = (t.first + r) / per_kv, head = t.kv_head * per_kv + (t.first + r) % per_kv;
        at[r] = ((c.first_row[t.seq] + token) * c.heads + head) * c.dim;
        rows.query[r] = (const int32_t*)((const E*)c.query + at[r]);
        rows.position[r] = c.start[t.seq] + token;
        rows.top[r] = kLowest;
        rows.sum[r] = _mm512_setzero_ps();
        for (long d = 0; d < padded(c.dim); d += 16) _mm512_store_ps(rows.out[r] + d, _mm512_setzero_ps());
    }
    const long to_values = c.kv_heads * c.block_size * c.dim;
    const long newest = rows.position[R - 1];
    const long oldest = c.window && rows.position[0] >= c.window ? rows.position[0] - c.window + 1 : 0;
    Step<E> steps[2];
    long first = oldest / kStep * kStep;
    steps[0].locate(c, t, first, oldest, newest);
    for (int now = 0; first <= newest; first += kStep, now ^= 1) {
        Step<E>& next = steps[now ^ 1];
        if (first + kStep <= newest)
            next.locate(c, t, first + kStep, oldest, newest);
        else
            next.begin = next.end = 0;
        attend_step<T, R>(rows, steps[now], next, c, to_values);
    }
    for (int r = 0; r < R; r++) {
        const __m512 sum = _mm512_set1_ps(_mm512_reduce_add_ps(rows.sum[r]));
        for (long d = 0; d < c.dim; d += 16)
            T::store((E*)c.out + at[r] + d, _mm512_div_ps(Values<T>::sorted(rows.out[r], d), sum),
                     first_lanes(c.dim - d));
    }
}

// Rows of `rows` that are left over from larger ones run in ever smaller parts.
template <class T>
void run_task(const Attention& c, Task t) {
    while (t.rows > 0) {
        long done = 1;
        if (t.rows >= 8)
            run<T, 8>(c, t), done = 8;
        else if (t.rows >= 4)
            run<T, 4>(c, t), done = 4;
        else if (t.rows >= 2)
            run<T, 2>(c, t), done = 2;
        else
            run<T, 1>(c, t);
        t.first += done;
        t.rows -= done;
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
        const long first = own / c.kv_heads * kMaxRows;
        const long left = rows - first;
        run_task<T>(c, Task{low, own % c.kv_heads, first, left < kMaxRows ? left : kMaxRows});
    }
}

}  // namespace

extern "C" void baton_attention(const Attention* call, int is_bf16, int threads) {
    if (is_bf16)
        attend<BF16>(*call, threads);
    else
        attend<F32>(*call, threads);
}
