// y = x W^T (+ bias) (+ residual), with W packed once and read as one stream.
//
// Outputs come in tiles of 64, four vectors of 16 lanes. A packed tile is [words of k][64 outputs][32 bits]: a word holds
// the 1, 2, 4 or 8 values of k of one output (float32, bfloat16, int8, int4), so that each step multiplies 64 bytes of W
// by one broadcast word of x. Every output is one chain of additions in ascending k, whatever the number of rows, of
// threads, and whichever rows run together: a row's result does not depend on the batch.
#include "calls.h"
#include "simd_old.h"
#include <string.h>

namespace {

constexpr long kTile = 64;
constexpr long kMaxRows = 6;        // rows of a register tile: 6 x 4 sums, 4 weights, 1 broadcast
constexpr long kMaxIntRows = 4;     // the same for integers, whose sums compilers copy at every step
constexpr long kChunkRows = 48;     // rows that a task takes through a tile, so that they find it in the L2 cache
constexpr long kChunkWords = 256;   // words of k that all rows go through before the next: 64 KiB

template <int N>
struct constant {
    static constexpr int value = N;
};

enum Format { kF32 = 0, kBF16 = 1, kInt8 = 2, kInt4 = 3 };

struct Call {
    const Weights* w;
    const char* x;  // [rows][num_in]: F32 or BF16, or int8 where the weights are integers
    const float* x_scales;        // [rows]; integers only
    const int32_t* x_sums;        // [rows][groups]: sums of the int8; integers only
    const void* residual;         // [rows][num_out] or null
    void* out;                    // [rows][num_out]
    long rows;
    bool out_is_f32;
};

// `ahead`: what is read next; a part of it, `lines` cache lines a step, is fetched meanwhile.
template <class T, int R>
void float_panel(const char* w, const int32_t* x, long stride, long words, float* sums,
                 const char* ahead, int lines) {
    __m512 s[R][4];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++) s[r][j] = _mm512_loadu_ps(sums + r * kTile + j * 16);
    for (long k = 0; k < words; k++, w += 256) {
        __m512i v[4];
        for (int j = 0; j < 4; j++) v[j] = _mm512_loadu_si512(w + j * 64);
        for (int i = 0; i < lines; i++, ahead += 64) fetch(ahead);
        for (int r = 0; r < R; r++) {
            const __m512i b = _mm512_set1_epi32(x[r * stride + k]);
            for (int j = 0; j < 4; j++) s[r][j] = T::step(s[r][j], v[j], b);
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++) _mm512_storeu_ps(sums + r * kTile + j * 16, s[r][j]);
}

// One group of k: sums += scale * (sum of w x - zero * sum of x), the inner sums being exact.
template <bool IsInt4, int R>
void int_panel(const char* w, const int32_t* x, long stride, long words, float* sums,
               const float* scale, const float* zero, const float* zero_dot) {
    __m512i s[R][4];
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++) s[r][j] = _mm512_setzero_si512();
    const __m512i nibble = _mm512_set1_epi8(15);
    // Unrolled, sums are copied between registers once in four steps and not in each.
#pragma GCC unroll 4
    for (long k = 0; k < words; k += IsInt4 ? 2 : 1, w += 256) {
        for (int j = 0; j < 4; j++) {
            const __m512i v = _mm512_loadu_si512(w + j * 64);
            const __m512i low = IsInt4 ? _mm512_and_si512(v, nibble) : v;
            const __m512i high = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
            for (int r = 0; r < R; r++) {
                s[r][j] = _mm512_dpbusd_epi32(s[r][j], low, _mm512_set1_epi32(x[r * stride + k]));
                if (IsInt4)
                    s[r][j] = _mm512_dpbusd_epi32(s[r][j], high,
                                                  _mm512_set1_epi32(x[r * stride + k + 1]));
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < 4; j++) {
            const __m512 exact = _mm512_cvtepi32_ps(s[r][j]);
            const __m512 z = _mm512_loadu_ps(zero + j * 16);
            const __m512 centred = _mm512_fnmadd_ps(z, _mm512_set1_ps(zero_dot[r]), exact);
            float* at = sums + r * kTile + j * 16;
            _mm512_storeu_ps(at, _mm512_fmadd_ps(centred, _mm512_loadu_ps(scale + j * 16),
                                                 _mm512_loadu_ps(at)));
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

// Panels of nearly equal height, of at most `most` rows.
template <class F>
void for_panels(long rows, long most, F&& f) {
    const long panels = num_panels(rows, most);
    for (long p = 0, first = 0; p < panels; p++) {
        const long count = (rows - first + panels - p - 1) / (panels - p);
        with_rows(count, [&](auto r) { f(first, r); });
        first += count;
    }
}

template <class T>
void float_tile(const Call& c, long tile, long first, long rows, float* sums) {
    const long words = c.w->num_in / T::per_word;
    const char* w = c.w->data + tile * words * 256;
    // One panel alone reads as fast as memory gives. Several pause the reading, unless they fetch what comes next.
    const long panels = num_panels(rows, kMaxRows);
    const int lines = panels == 1 ? 0 : (int)((4 + panels - 1) / panels);
    for (long k = 0; k < words; k += kChunkWords) {
        const long count = words - k < kChunkWords ? words - k : kChunkWords;
        const char *now = w + k * 256, *end = now + count * 256;
        const char* ahead = end;
        for_panels(rows, kMaxRows, [&](long row, auto r) {
            const int32_t* x = (const int32_t*)c.x + (first + row) * words + k;
            // A chunk is followed by one of its size; where this is the last of all, fetching past it does nothing.
            const bool fetches = ahead < end + count * 256;
            float_panel<T, decltype(r)::value>(now, x, words, count, sums + row * kTile, ahead,
                                               fetches ? lines : 0);
            ahead += lines * count * 64;
        });
    }
}

template <bool IsInt4>
void int_tile(const Call& c, long tile, long first, long rows, float* sums) {
    const long words = c.w->num_in / 4, group_words = c.w->group_size / 4;
    const long groups = words / group_words;
    const long group_bytes = group_words * (IsInt4 ? 128 : 256);
    const char* w = c.w->data + tile * groups * group_bytes;
    float constant_zero[kTile];
    for (float& z : constant_zero) z = c.w->zero;
    for (long g = 0; g < groups; g++) {
        const long at = (tile * groups + g) * kTile;
        const float* zero = c.w->zeros ? c.w->zeros + at : constant_zero;
        for_panels(rows, kMaxIntRows, [&](long row, auto r) {
            float dots[kMaxRows];
            for (int i = 0; i < r.value; i++) dots[i] = (float)c.x_sums[(first + row + i) * groups + g];
            const int32_t* x = (const int32_t*)c.x + (first + row) * words + g * group_words;
            int_panel<IsInt4, decltype(r)::value>(w + g * group_bytes, x, words, group_words,
                                                  sums + row * kTile, c.w->scales + at, zero, dots);
        });
    }
}

template <class T, class Out>
void finish(const Call& c, long tile, long first, long rows, const float* sums) {
    const long num_out = c.w->num_out;
    for (long r = 0; r < rows; r++) {
        const __m512 scale = _mm512_set1_ps(c.x_scales ? c.x_scales[first + r] : 1.0f);
        for (long n = tile * kTile; n < num_out && n < (tile + 1) * kTile; n += 16) {
            const __mmask16 m = first_lanes(num_out - n);
            const long at = (first + r) * num_out + n;
            __m512 y = _mm512_mul_ps(_mm512_loadu_ps(sums + r * kTile + n % kTile), scale);
            if (c.w->bias) y = _mm512_add_ps(y, F32::load(c.w->bias + n, m));
            if (c.residual) y = _mm512_add_ps(y, T::load((const typename T::element*)c.residual + at, m));
            Out::store((typename Out::element*)c.out + at, y, m);
        }
    }
}

template <class T>
void run_task(const Call& c, long tile, long first, long rows) {
    float sums[kChunkRows * kTile];
    memset(sums, 0, rows * kTile * sizeof(float));
    switch (c.w->format) {
        case kInt8: int_tile<false>(c, tile, first, rows, sums); break;
        case kInt4: int_tile<true>(c, tile, first, rows, sums); break;
        default: float_tile<T>(c, tile, first, rows, sums); break;
    }
    if (c.out_is_f32)
        finish<T, F32>(c, tile, first, rows, sums);
    else
        finish<T, T>(c, tile, first, rows, sums);
}

// Symmetric int8 by row: x is about q * scale with |q| <= 127.
template <class T>
void quantize_row(const typename T::element* x, long num_in, long group_size, int8_t* q,
                  float* scale, int32_t* sums) {
    __m512 top = _mm512_setzero_ps();
    for (long k = 0; k < num_in; k += 16)
        top = _mm512_max_ps(top, _mm512_abs_ps(T::load(x + k, first_lanes(num_in - k))));
    const float largest = _mm512_reduce_max_ps(top);
    *scale = largest / 127.0f;
    const __m512 factor = _mm512_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
    for (long k = 0; k < num_in; k += 16) {
        const __mmask16 m = first_lanes(num_in - k);
        const __m512i v = _mm512_cvtps_epi32(_mm512_mul_ps(T::load(x + k, m), factor));
        _mm512_mask_cvtsepi32_storeu_epi8(q + k, m, v);
    }
    for (long g = 0; g * group_size < num_in; g++) {
        int32_t sum = 0;
        for (long k = g * group_size; k < (g + 1) * group_size; k++) sum += q[k];
        sums[g] = sum;
    }
}

template <class T>
void linear(Call& c, char* scratch, int threads) {
    const Weights& w = *c.w;
    if (w.format >= kInt8) {
        const long groups = w.num_in / w.group_size;
        float* scales = (float*)scratch;
        int32_t* sums = (int32_t*)(scales + c.rows);
        int8_t* q = (int8_t*)(sums + c.rows * groups);
        const auto* x = (const typename T::element*)c.x;
#pragma omp parallel for num_threads(threads) if (threads > 1 && c.rows > 8)
        for (long r = 0; r < c.rows; r++)
            quantize_row<T>(x + r * w.num_in, w.num_in, w.group_size, q + r * w.num_in, scales + r,
                            sums + r * groups);
        c.x = (const char*)q;
        c.x_scales = scales;
        c.x_sums = sums;
    }
    const long tiles = (w.num_out + kTile - 1) / kTile;
    const long chunks = (c.rows + kChunkRows - 1) / kChunkRows;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (long task = 0; task < tiles * chunks; task++) {
        const long first = task % chunks * kChunkRows;
        const long left = c.rows - first;
        run_task<T>(c, task / chunks, first, left < kChunkRows ? left : kChunkRows);
    }
}

}  // namespace

extern "C" void baton_linear(const Weights* w, const void* x, const void* residual, void* out,
                             long rows, int is_bf16, int out_is_f32, void* scratch, int threads) {
    Call c{w, (const char*)x, nullptr, nullptr, residual, out, rows, out_is_f32 != 0};
    if (is_bf16)
        linear<BF16>(c, (char*)scratch, threads);
    else
        linear<F32>(c, (char*)scratch, threads);
}
