// The small operations between matrix products, one pass each. Formulas: the files of baton_kernels that are named alike.
#include "calls.h"
#include "stored.h"

namespace {

template <class T>
void rms_norm(const void* x_, const void* weight_, float eps, void* out_, long rows, long dim,
              int threads) {
    using E = typename T::element;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 32)
    for (long r = 0; r < rows; r++) {
        const E* x = (const E*)x_ + r * dim;
        E* out = (E*)out_ + r * dim;
        __m512 squares = _mm512_setzero_ps();
        for (long i = 0; i < dim; i += 16) {
            const __m512 v = T::load(x + i, first_lanes(dim - i));
            squares = _mm512_fmadd_ps(v, v, squares);
        }
        const float mean = _mm512_reduce_add_ps(squares) / (float)dim;
        const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
        for (long i = 0; i < dim; i += 16) {
            const __mmask16 m = first_lanes(dim - i);
            const __m512 v = T::round(_mm512_mul_ps(T::load(x + i, m), scale));
            T::store(out + i, _mm512_mul_ps(v, T::load((const E*)weight_ + i, m)), m);
        }
    }
}

template <class T>
void swiglu(const void* gate_up_, void* out_, long rows, long dim, int threads) {
    using E = typename T::element;
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 32)
    for (long r = 0; r < rows; r++) {
        const E* gate = (const E*)gate_up_ + r * 2 * dim;
        E* out = (E*)out_ + r * dim;
        for (long i = 0; i < dim; i += 16) {
            const __mmask16 m = first_lanes(dim - i);
            const __m512 g = T::load(gate + i, m), up = T::load(gate + dim + i, m);
            // sigmoid(g) = 1 / (1 + e) for g >= 0 and e / (1 + e) below, with e = exp(-|g|) <= 1.
            const __m512 e = T::exp2(_mm512_mul_ps(_mm512_abs_ps(g), _mm512_set1_ps(-kLog2E)));
            const __mmask16 negative = _mm512_cmp_ps_mask(g, zero, _CMP_LT_OQ);
            const __m512 top = _mm512_mask_mov_ps(one, negative, e);
            const __m512 silu = _mm512_mul_ps(g, _mm512_div_ps(top, _mm512_add_ps(one, e)));
            T::store(out + i, _mm512_mul_ps(T::round(silu), up), m);
        }
    }
}

template <class T>
void rotate(const typename T::element* x, const typename T::element* cos,
            const typename T::element* sin, typename T::element* out, long half) {
    for (long i = 0; i < half; i += 16) {
        const __mmask16 m = first_lanes(half - i);
        const __m512 a = T::load(x + i, m), b = T::load(x + half + i, m);
        const __m512 c = T::load(cos + i, m), s = T::load(sin + i, m);
        const __m512 ac = T::round(_mm512_mul_ps(a, c)), bs = T::round(_mm512_mul_ps(b, s));
        const __m512 bc = T::round(_mm512_mul_ps(b, c)), as = T::round(_mm512_mul_ps(a, s));
        T::store(out + i, _mm512_sub_ps(ac, bs), m);
        T::store(out + half + i, _mm512_add_ps(bc, as), m);
    }
}

template <class T>
void rope_kv_write(const RopeKvWrite& c, int threads) {
    using E = typename T::element;
    const long half = c.dim / 2;
    const auto put_row = put_row_of<T>(c.stored);
    const auto put = [&](const E* row, long at) {
        const long head = at / c.block_size * c.head_bytes, offset = at % c.block_size;
        float* scale = c.scales ? (float*)((char*)c.scales + head) + offset : nullptr;
        put_row(row, c.dim, c.pool + head + offset * c.row_bytes, scale);
    };
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && c.tokens > 32)
    for (long t = 0; t < c.tokens; t++) {
        const E *cos = (const E*)c.cos + t * half, *sin = (const E*)c.sin + t * half;
        const E* query = (const E*)c.query + t * c.query_stride;
        const E* new_key = (const E*)c.key + t * c.key_stride;
        const E* new_value = (const E*)c.value + t * c.value_stride;
        for (long h = 0; h < c.heads; h++)
            rotate<T>(query + h * c.dim, cos, sin, (E*)c.out + (t * c.heads + h) * c.dim, half);
        for (long h = 0; h < c.kv_heads; h++) {
            const long row = c.rows[t * c.row_stride] + h * c.block_size, slot = row + c.to_layer;
            E* key = (E*)c.key_out + (t * c.kv_heads + h) * c.dim;
            rotate<T>(new_key + h * c.dim, cos, sin, key, half);
            if (row < 0) continue;
            put(key, slot);
            put(new_value + h * c.dim, slot + c.to_values);
        }
    }
}

}  // namespace

extern "C" void baton_rms_norm(const void* x, const void* weight, float eps, void* out, long rows,
                               long dim, int is_bf16, int threads) {
    (is_bf16 ? rms_norm<BF16> : rms_norm<F32>)(x, weight, eps, out, rows, dim, threads);
}

extern "C" void baton_swiglu(const void* gate_up, void* out, long rows, long dim, int is_bf16,
                             int threads) {
    (is_bf16 ? swiglu<BF16> : swiglu<F32>)(gate_up, out, rows, dim, threads);
}

extern "C" void baton_rope_kv_write(const RopeKvWrite* call, int is_bf16, int threads) {
    (is_bf16 ? rope_kv_write<BF16> : rope_kv_write<F32>)(*call, threads);
}
