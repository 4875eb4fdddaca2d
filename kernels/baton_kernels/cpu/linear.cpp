// y = x W^T (+ bias) (+ residual), with W packed once and read as one stream.
//
// Outputs come in tiles of 64, four vectors of 16 lanes. A packed tile is [words of k][64 outputs][32 bits]: a word
// holds 1, 2, 4 or 8 values of k for one output (float32, bfloat16 or float16, int8, int4). A word of float16 is two
// planes: 16 outputs at one k, then the same at the next. Every output is one chain of additions in ascending k for any
// number of rows and threads, so a row's result does not depend on the batch.
//
// If the CPU cannot multiply 16-bit floats they are widened in registers, so that a step with few rows still reads 16
// bits per weight; for many rows a chunk of the tile is widened once, into the cache.
#include "calls.h"
#include "simd.h"
#include <type_traits>

namespace {

constexpr long kTile = 64, kWordBytes = kTile * 4;  // bytes of one word of k in a tile
constexpr int kVectors = kTile / 16;
constexpr bool kIsWide = kNumRegisters * kPartLanes >= 512;  // 24 vectors of sums fit into registers; otherwise 6
constexpr long kMaxRows = 6;        // rows per register tile
constexpr long kMaxIntRows = 4;     // the same for integers: compilers copy their sums at every step
constexpr long kStreamedRows = 10;  // maximum rows for which narrow levels widen weights in registers, not in memory
constexpr long kMostRows = 264;     // maximum rows that a task runs through a tile, if it widens the tile for them
constexpr long kChunkRows = 96;     // the same if it does not: they have to stay in the L2 cache
constexpr long kFewRows = 48;       // fewer rows are not split to get more tasks
constexpr long kTasks = 8;          // tasks wanted per thread for many rows, for balance
constexpr long kRowsAhead = 8;      // distance in rows from the row written to the row prefetched
constexpr long kChunkValues = 256;  // values of k that all rows run through before the next chunk
constexpr long kSmallChunk = 64;    // the same for few panels: the chunk stays in the L1 cache
constexpr long kFewValues = kIsWide ? 64 : 128;  // the same for widened chunks: 16 or 8 KiB
constexpr long kStop = 4;           // words of k between prefetches: at 8 CPUs stall
constexpr long kPackWords = 16;     // words of k packed at a time: one cache line per row
constexpr long kRowPad = 16;        // words of padding, so that rows do not map to the same cache lines

enum Format { kF32, kBF16, kF16, kI8, kI4 };

template <int N>
struct constant {
    static constexpr int value = N;
};

struct Call {
    const Weights* w;
    const int32_t* x;             // [rows][stride]: words in the layout of the weights' product
    long stride;
    const float* row_scales;      // [rows]: of the int8 inputs; null with group_scales, and for floats
    const float* group_scales;    // [rows][groups], or null
    const int32_t* x_sums;        // [rows][groups]: sums of the int8 inputs; integers only
    const void* residual;         // [rows][num_out] or null
    void* out;                    // [rows][num_out]
    long rows;
    bool out_is_f32;
};

// Multiplies a vector of packed words of 16 outputs: as `steps` vectors, each by one broadcast word of x. load: vector
// `step` of the words at p.
template <class T>
struct Factors;

template <>
struct Factors<F32> {
    using Sum = F32;
    static constexpr int steps = 1;
    static i32x16 load(const char* p, int) { return load_words(p); }
};

template <>
struct Factors<BF16> {
#if defined(HAS_BF16_DOT)
    using Sum = BF16;
    static constexpr int steps = 1;
    static i32x16 load(const char* p, int) { return load_words(p); }
#else
    using Sum = F32;
    static constexpr int steps = 2;
    static i32x16 load(const char* p, int step) {
        const i32x16 words = load_words(p);
        return bits_of(step ? BF16::odd(words) : BF16::even(words));
    }
#endif
};

template <>
struct Factors<F16> {
    using Sum = F32;
    static constexpr int steps = 2;
    static i32x16 load(const char* p, int step) { return bits_of(F16::load((const uint16_t*)p + 16 * step)); }
};

// Memory to prefetch meanwhile: `lines` cache lines per kStop words.
struct Ahead {
    const char* line;
    int lines;
};

// sums[R][V vectors of a tile] += x W over some words of k; `stride`: bytes between words of W.
template <class K, int R, int V>
void float_panel(const char* w, long stride, const int32_t* x, long x_stride, long words, float* sums,
                 Ahead& ahead) {
    f32x16 s[R][V];
    const int32_t* row[R];
UNROLLED
    for (int r = 0; r < R; r++) {
        row[r] = x + r * x_stride;
UNROLLED
        for (int j = 0; j < V; j++) s[r][j] = F32::load(sums + r * kTile + j * 16);
    }
    long k = 0;
    while (k < words) {
        for (int i = 0; i < ahead.lines; i++, ahead.line += 64) fetch(ahead.line);
        const long end = k + kStop < words ? k + kStop : words;
        for (; k < end; k++, w += stride) {
UNROLLED
            for (int j = 0; j < V; j++)
UNROLLED
                for (int i = 0; i < K::steps; i++) {
                    const i32x16 v = K::load(w + j * 64, i);
UNROLLED
                    for (int r = 0; r < R; r++)
                        s[r][j] = K::Sum::step(s[r][j], v, splat(row[r][k * K::steps + i]));
                    // Few registers: words are loaded again for their second step, so that they occupy none meanwhile.
                    if (!kIsWide && R > 3) asm volatile("" : "+r"(w));
                }
        }
    }
UNROLLED
    for (int r = 0; r < R; r++)
UNROLLED
        for (int j = 0; j < V; j++) F32::store(sums + r * kTile + j * 16, s[r][j]);
}

#if defined(HAS_BYTE_PAIRS)
constexpr bool kHasBytePairs = true;
constexpr long kPairQuads = 8;  // products of 4 and 8 bits, two by two, that an int16 holds: 8 * 2 * 15 * 127 < 2^15
#else
constexpr bool kHasBytePairs = false;
#endif

// Words of x per quad of k.
constexpr long quad_words(bool is_int4) { return is_int4 && kHasBytePairs ? 1 : kQuadWords; }

// s[R][V vectors of a tile] += w x over some quads of k.
template <bool IsInt4, int R, int V>
void int_products(const char* w, const int32_t* x, long stride, long quads, i32x16 (&s)[R][V]) {
    const i32x16 nibbles = splat(0x0F0F0F0F);
#if defined(HAS_BYTE_PAIRS)
    if constexpr (IsInt4) {
        for (long k = 0; k < quads;) {
            const long end = k + kPairQuads < quads ? k + kPairQuads : quads;
            i32x16 pairs[R][V];
UNROLLED
            for (int r = 0; r < R; r++)
UNROLLED
                for (int j = 0; j < V; j++) pairs[r][j] = splat(0);
            for (; k < end; k += 2, w += kWordBytes)
UNROLLED
                for (int j = 0; j < V; j++) {
                    const i32x16 v = load_words(w + j * 64);
                    const i32x16 low = v & nibbles, high = (v >> 4) & nibbles;
UNROLLED
                    for (int r = 0; r < R; r++) {
                        const int32_t* of_row = x + r * stride + k;
                        pairs[r][j] = add_byte_pairs(pairs[r][j], low, of_row[0]);
                        pairs[r][j] = add_byte_pairs(pairs[r][j], high, of_row[1]);
                    }
                }
UNROLLED
            for (int r = 0; r < R; r++)
UNROLLED
                for (int j = 0; j < V; j++) s[r][j] = add_pairs(s[r][j], pairs[r][j]);
        }
        return;
    }
#endif
    for (long k = 0; k < quads; k += IsInt4 ? 2 : 1, w += kWordBytes) {
UNROLLED
        for (int j = 0; j < V; j++) {
            const i32x16 v = load_words(w + j * 64);
            const Quads low = quads_of(IsInt4 ? v & nibbles : v);
UNROLLED
            for (int r = 0; r < R; r++) s[r][j] = dot(s[r][j], low, x + r * stride + k * kQuadWords);
            if constexpr (IsInt4) {
                const Quads high = quads_of((v >> 4) & nibbles);
UNROLLED
                for (int r = 0; r < R; r++)
                    s[r][j] = dot(s[r][j], high, x + r * stride + (k + 1) * kQuadWords);
            }
        }
    }
}

// One group of k: sums += scale * x's scale * (sum of w x - zero * sum of x); the inner sums are exact. x_scale: 1
// where a row has one scale.
template <bool IsInt4, int R, int V>
void int_panel(const char* w, const int32_t* x, long stride, long quads, float* sums, const float* scale,
               const float* zero, const float* zero_dot, const float* x_scale) {
    i32x16 s[R][V];
UNROLLED
    for (int r = 0; r < R; r++)
UNROLLED
        for (int j = 0; j < V; j++) s[r][j] = splat(0);
    int_products<IsInt4, R, V>(w, x, stride, quads, s);
UNROLLED
    for (int r = 0; r < R; r++)
UNROLLED
        for (int j = 0; j < V; j++) {
            const f32x16 centred = fnma(F32::load(zero + j * 16), splat(zero_dot[r]), to_float(s[r][j]));
            float* at = sums + r * kTile + j * 16;
            F32::store(at, fma(centred * splat(x_scale[r]), F32::load(scale + j * 16), F32::load(at)));
        }
}

template <class F>
void with_rows(long rows, F&& f) {
    switch (rows) {
        case 1: f(constant<1>()); break;
        case 2: f(constant<2>()); break;
        case 3: f(constant<3>()); break;
        case 4: f(constant<4>()); break;
        case 5: f(constant<5>()); break;
        default: f(constant<6>()); break;
    }
}

constexpr long num_panels(long rows, long most) { return (rows + most - 1) / most; }

// Splits rows into panels of nearly equal height, at most `most` rows each.
template <class F>
void for_panels(long rows, long most, F&& f) {
    const long panels = num_panels(rows, most);
    for (long p = 0, first = 0; p < panels; p++) {
        const long count = (rows - first + panels - p - 1) / (panels - p);
        with_rows(count, [&](auto r) { f(first, r); });
        first += count;
    }
}

// Vectors of outputs in a register tile of R rows.
constexpr int vectors_of(int rows) {
    if (kIsWide) return kVectors;
    return rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

// Multiplies a tile's words in place; all rows run through a chunk before the next.
template <class K>
void stream_tile(const Call& c, const char* w, long words, long first, long rows, float* sums) {
    const long panels = num_panels(rows, kMaxRows);
    const long slices = kVectors / vectors_of(panels == 1 ? rows : kMaxRows);
    const long calls = panels * slices;
    const long chunk = (slices > 1 ? kSmallChunk : kChunkValues) / K::steps;
    // A single panel reads at memory speed. Several panels interrupt the reading, unless they prefetch the next chunk.
    for (long k = 0; k < words; k += chunk) {
        const long count = words - k < chunk ? words - k : chunk;
        const char* now = w + k * kWordBytes;
        Ahead ahead{now + count * kWordBytes, calls == 1 ? 0 : (int)((4 * kStop + calls - 1) / calls)};
        for_panels(rows, kMaxRows, [&](long row, auto r) {
            constexpr int R = decltype(r)::value, V = vectors_of(R);
            const int32_t* x = c.x + (first + row) * c.stride + k * K::steps;
            // The next chunk has the same size; prefetching past the very last one is harmless.
            if (ahead.line >= now + 2 * count * kWordBytes) ahead.lines = 0;
            for (int j = 0; j < kVectors; j += V)
                float_panel<K, R, V>(now + j * 64, kWordBytes, x, c.stride, count,
                                     sums + row * kTile + j * 16, ahead);
        });
    }
}

// Widens some words of V vectors of a tile to float32, or copies them if one instruction multiplies them: [words *
// steps][V vectors].
template <class K, int V>
void widen_slice(const char* w, long words, float* out) {
    for (long k = 0; k < words; k++, w += kWordBytes, out += K::steps * V * 16)
UNROLLED
        for (int j = 0; j < V; j++)
UNROLLED
            for (int s = 0; s < K::steps; s++) store_words(out + (s * V + j) * 16, K::load(w + j * 64, s));
}

// stream_tile for many rows: widens the words of a register tile once per chunk, for all rows.
template <class K, long kValues>
void widen_tile(const Call& c, const char* w, long words, long first, long rows, float* sums) {
    constexpr int V = vectors_of(kMaxRows);
    constexpr long chunk = kValues / K::steps;
    using Widened = std::conditional_t<K::steps == 1, K, Factors<F32>>;
    alignas(64) float widened[kValues * V * 16];
    const long calls = num_panels(rows, kMaxRows) * (kVectors / V);
    for (long k = 0; k < words; k += chunk) {
        const long count = words - k < chunk ? words - k : chunk;
        const char* now = w + k * kWordBytes;
        const long stops = calls * (count * K::steps / kStop);
        Ahead ahead{now + count * kWordBytes, (int)((count * 4 + stops) / (stops + 1))};
        for (int j = 0; j < kVectors; j += V) {
            widen_slice<K, V>(now + j * 64, count, widened);
            for_panels(rows, kMaxRows, [&](long row, auto r) {
                constexpr int R = decltype(r)::value;
                const int32_t* x = c.x + (first + row) * c.stride + k * K::steps;
                if (ahead.line >= now + 2 * count * kWordBytes) ahead.lines = 0;
                float_panel<Widened, R, V>((const char*)widened, V * 64, x, c.stride, count * K::steps,
                                           sums + row * kTile + j * 16, ahead);
            });
        }
    }
}

template <class T>
void float_tile(const Call& c, long tile, long first, long rows, float* sums) {
    using K = Factors<T>;
    const long words = c.w->num_in * sizeof(typename T::element) / 4;
    const char* w = c.w->data + tile * words * kWordBytes;
    const long most = kIsWide ? (K::steps == 1 ? c.rows : 2 * kMaxRows) : kStreamedRows;
    if (rows <= most)
        stream_tile<K>(c, w, words, first, rows, sums);
    else if (rows <= 16)
        widen_tile<K, kFewValues>(c, w, words, first, rows, sums);
    else
        widen_tile<K, kChunkValues>(c, w, words, first, rows, sums);
}

template <bool IsInt4>
void int_tile(const Call& c, long tile, long first, long rows, float* sums) {
    const long group_quads = c.w->group_size / 4, groups = c.w->num_in / c.w->group_size;
    const long group_bytes = group_quads * (IsInt4 ? kWordBytes / 2 : kWordBytes);
    const char* w = c.w->data + tile * groups * group_bytes;
    float constant_zero[kTile];
    for (float& z : constant_zero) z = c.w->zero;
    for (long g = 0; g < groups; g++) {
        const long at = (tile * groups + g) * kTile;
        const float* zero = c.w->zeros ? c.w->zeros + at : constant_zero;
        for_panels(rows, kMaxIntRows, [&](long row, auto r) {
            constexpr int R = decltype(r)::value, V = vectors_of(R);
            float dots[R], x_scale[R];
            for (int i = 0; i < R; i++) {
                const long of_group = (first + row + i) * groups + g;
                dots[i] = (float)c.x_sums[of_group];
                x_scale[i] = c.group_scales ? c.group_scales[of_group] : 1.0f;
            }
            const int32_t* x = c.x + (first + row) * c.stride + g * group_quads * quad_words(IsInt4);
            for (int j = 0; j < kVectors; j += V)
                int_panel<IsInt4, R, V>(w + g * group_bytes + j * 64, x, c.stride, group_quads,
                                        sums + row * kTile + j * 16, c.w->scales + at + j * 16,
                                        zero + j * 16, dots, x_scale);
        });
    }
}

template <class E>
void fetch_tile(const E* row) {
    for (long i = 0; i < kTile; i += 64 / sizeof(E)) fetch(row + i);
}

template <class T, class Out>
void finish(const Call& c, long tile, long first, long rows, const float* sums) {
    const long num_out = c.w->num_out;
    for (long r = 0; r < rows; r++) {
        // Rows are too far apart for the hardware prefetcher.
        const long ahead = (first + r + kRowsAhead) * num_out + tile * kTile;
        if (r + kRowsAhead < rows) fetch_tile((typename Out::element*)c.out + ahead);
        if (r + kRowsAhead < rows && c.residual) fetch_tile((const typename T::element*)c.residual + ahead);
        const f32x16 scale = splat(c.row_scales ? c.row_scales[first + r] : 1.0f);
        for (long n = tile * kTile; n < num_out && n < (tile + 1) * kTile; n += 16) {
            const long count = num_out - n, at = (first + r) * num_out + n;
            f32x16 y = F32::load(sums + r * kTile + n % kTile) * scale;
            if (c.w->bias) y = y + F32::load(c.w->bias + n, count);
            if (c.residual) y = y + T::load((const typename T::element*)c.residual + at, count);
            Out::store((typename Out::element*)c.out + at, y, count);
        }
    }
}

template <class T>
void run_task(const Call& c, long tile, long first, long rows) {
    alignas(64) float sums[kMostRows * kTile];
    memset(sums, 0, rows * kTile * sizeof(float));
    switch (c.w->format) {
        case kI8: int_tile<false>(c, tile, first, rows, sums); break;
        case kI4: int_tile<true>(c, tile, first, rows, sums); break;
        default: float_tile<T>(c, tile, first, rows, sums); break;
    }
    if (c.out_is_f32)
        finish<T, F32>(c, tile, first, rows, sums);
    else
        finish<T, T>(c, tile, first, rows, sums);
}

// Symmetric int8 of some values: x is about q * scale with |q| <= 127.
template <class T>
float quantize_run(const typename T::element* x, long count, int8_t* q) {
    f32x16 top = zeros();
    for (long k = 0; k < count; k += 16) top = max(top, abs(T::load(x + k, count - k)));
    const float largest = reduce_max(top);
    const f32x16 factor = splat(largest > 0 ? 127.0f / largest : 0.0f);
    for (long k = 0; k < count; k += 16) store_i8(q + k, to_int(T::load(x + k, count - k) * factor), count - k);
    return largest / 127.0f;
}

// A row in runs of run_size, each with a scale.
template <class T>
void quantize_row(const typename T::element* x, long num_in, long group_size, long run_size, int8_t* q,
                  float* scales, int32_t* sums) {
    for (long k = 0; k < num_in; k += run_size) *scales++ = quantize_run<T>(x + k, run_size, q + k);
    for (long g = 0; g * group_size < num_in; g++) {
        int32_t sum = 0;
        for (long k = g * group_size; k < (g + 1) * group_size; k++) sum += q[k];
        sums[g] = sum;
    }
}

// Words of scratch memory per row of x, in the layout of the product.
long row_words(const Weights& w) {
    return (w.format >= kI8 ? w.num_in / 4 * quad_words(w.format == kI4) : w.num_in) + kRowPad;
}

long groups_of(const Weights& w) { return w.group_size ? w.num_in / w.group_size : 0; }

// Scales of a quantised row of x.
long x_scales_of(const Weights& w) { return w.has_group_inputs ? groups_of(w) : 1; }

template <class T>
void quantize(Call& c, const typename T::element* x, char* scratch, int threads) {
    const Weights& w = *c.w;
    const long groups = groups_of(w), stride = row_words(w), num_scales = x_scales_of(w);
    int32_t* words = (int32_t*)scratch;
    float* scales = (float*)(words + c.rows * stride);
    int32_t* sums = (int32_t*)(scales + c.rows * num_scales);
    int8_t* bytes = (int8_t*)(sums + c.rows * groups);
#pragma omp parallel for num_threads(threads) if (threads > 1 && c.rows > 8)
    for (long r = 0; r < c.rows; r++) {
        int8_t* q = bytes + r * w.num_in;
        quantize_row<T>(x + r * w.num_in, w.num_in, w.group_size, w.num_in / num_scales, q,
                        scales + r * num_scales, sums + r * groups);
        spread_quads(q, w.num_in / 4, words + r * stride, quad_words(w.format == kI4));
    }
    c.x = words;
    c.stride = stride;
    (w.has_group_inputs ? c.group_scales : c.row_scales) = scales;
    c.x_sums = sums;
}

// Widens x to float32.
template <class T>
void widen(Call& c, const typename T::element* x, char* scratch, int threads) {
    const long num_in = c.w->num_in, stride = row_words(*c.w);
    float* words = (float*)scratch;
#pragma omp parallel for num_threads(threads) if (threads > 1 && c.rows > 32)
    for (long r = 0; r < c.rows; r++)
        for (long k = 0; k < num_in; k += 16)
            F32::store(words + r * stride + k, T::load(x + r * num_in + k, num_in - k), num_in - k);
    c.x = (const int32_t*)words;
    c.stride = stride;
}

// Rows per task: `most`, or fewer to give every thread tasks; whole register tiles, except for the last.
long rows_of_task(long rows, long tiles, int threads, long most) {
    const long wanted = (kTasks * threads + tiles - 1) / tiles, possible = rows / kFewRows;
    const long needed = (rows + most - 1) / most, more = wanted < possible ? wanted : possible;
    const long chunks = more > needed ? more : needed;
    return ((rows + chunks - 1) / chunks + kMaxRows - 1) / kMaxRows * kMaxRows;
}

template <class T>
void linear(Call& c, const void* x_, char* scratch, int threads) {
    if (c.rows == 0) return;
    const Weights& w = *c.w;
    const auto* x = (const typename T::element*)x_;
    if (w.format >= kI8) {
        quantize<T>(c, x, scratch, threads);
    } else if (Factors<T>::steps > 1) {
        widen<T>(c, x, scratch, threads);
    } else {
        c.x = (const int32_t*)x;
        c.stride = w.num_in * sizeof(typename T::element) / 4;
    }
    const long tiles = (w.num_out + kTile - 1) / kTile;
    const bool is_widened = w.format < kI8 && (Factors<T>::steps > 1 || !kIsWide);
    const long chunk = rows_of_task(c.rows, tiles, threads, is_widened ? kMostRows : kChunkRows);
    const long chunks = (c.rows + chunk - 1) / chunk;
    const long tasks = tiles * chunks;
    long taken = 0;
    // Threads take tasks dynamically: cores of a shared machine differ in speed.
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (long task; (task = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < tasks;) {
        const long first = task % chunks * chunk, left = c.rows - first;
        run_task<T>(c, task / chunks, first, left < chunk ? left : chunk);
    }
}

}  // namespace

// Scratch bytes per row.
extern "C" void baton_linear_scratch(const Weights* w, int64_t* row_bytes) {
    const bool is_quantized = w->format >= kI8;
    const bool is_widened = (w->format == kBF16 && Factors<BF16>::steps > 1) || w->format == kF16;
    const long quantized = 4 * x_scales_of(*w) + 4 * groups_of(*w) + w->num_in;
    *row_bytes = (is_quantized || is_widened ? row_words(*w) * 4 : 0) + (is_quantized ? quantized : 0);
}

extern "C" void baton_pack(const int32_t* words, long num_out, long num_words, int32_t* packed, int threads) {
    const long tiles = (num_out + kTile - 1) / kTile, blocks = (num_words + kPackWords - 1) / kPackWords;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long task = 0; task < tiles * blocks; task++) {
        const long tile = task / blocks, first = task % blocks * kPackWords, left = num_words - first;
        const long count = left < kPackWords ? left : kPackWords;
        int32_t* out = packed + (tile * num_words + first) * kTile;
        for (long output = 0; output < kTile; output++) {
            const long row = tile * kTile + output;
            // Reads whole cache lines of rows and writes within a few pages, so that rows at any distance do not evict
            // each other's lines.
            for (long k = 0; k < count; k++) out[k * kTile + output] = row < num_out ? words[row * num_words + first + k] : 0;
        }
    }
}

extern "C" void baton_linear(const Weights* w, const void* x, const void* residual, void* out,
                             long rows, int dtype, int out_is_f32, void* scratch, int threads) {
    Call c{w, nullptr, 0, nullptr, nullptr, nullptr, residual, out, rows, out_is_f32 != 0};
    with_type(dtype, [&](auto t) { linear<decltype(t)>(c, x, (char*)scratch, threads); });
}
