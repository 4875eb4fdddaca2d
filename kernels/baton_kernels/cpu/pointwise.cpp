// Pointwise operations between matrix products, one pass each. Formulas: the files of baton_kernels with the same
// names.
#include "calls.h"
#include "stored.h"

namespace {

template <class T>
void rms_norm(const void* x_, const void* weight_, bool is_wide, float eps, void* out_, long rows,
              long dim, int threads) {
    using E = typename T::element;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 32)
    for (long r = 0; r < rows; r++) {
        const E* x = (const E*)x_ + r * dim;
        E* out = (E*)out_ + r * dim;
        f32x16 squares = zeros();
        for (long i = 0; i < dim; i += 16) {
            const f32x16 v = T::load(x + i, dim - i);
            squares = fma(v, v, squares);
        }
        const float mean = reduce_add(squares) / (float)dim;
        const f32x16 scale = splat(1.0f / __builtin_sqrtf(mean + eps));
        for (long i = 0; i < dim; i += 16) {
            const f32x16 v = T::load(x + i, dim - i) * scale;
            const f32x16 y = is_wide ? v * F32::load((const float*)weight_ + i, dim - i)
                                     : T::round(v) * T::load((const E*)weight_ + i, dim - i);
            T::store(out + i, y, dim - i);
        }
    }
}

// g * sigmoid(x): sigmoid(x) = 1 / (1 + e) for x >= 0 and e / (1 + e) below, with e = exp(-|x|) <= 1.
template <class Exponent>
ALWAYS_INLINE f32x16 times_sigmoid(f32x16 g, f32x16 x) {
    const f32x16 one = splat(1.0f), e = Exponent::exp2(abs(x) * splat(-kLog2E));
    return g * (select(less(x, zeros()), e, one) / (one + e));
}

template <class T>
struct Silu {
    static f32x16 of(f32x16 g) { return times_sigmoid<T>(g, g); }
    static f32x16 of_up(f32x16 up) { return up; }
};

template <class T>
struct ClampedSilu {
    static f32x16 of(f32x16 g) {
        const f32x16 limit = splat(7.0f);
        g = select(less(limit, g), limit, g);
        return times_sigmoid<T>(g, splat(1.702f) * g);
    }
    static f32x16 of_up(f32x16 up) {
        const f32x16 limit = splat(7.0f), least = splat(-7.0f);
        up = select(less(limit, up), limit, up);
        return T::round(select(less(up, least), least, up) + splat(1.0f));
    }
};

struct Gelu {
    static f32x16 of_up(f32x16 up) { return up; }
    static f32x16 of(f32x16 g) {
        const f32x16 inner = splat(0.7978845608f) * (g + splat(0.044715f) * g * g * g);
        return times_sigmoid<F32>(g, inner + inner);  // (1 + tanh(x)) / 2 is the sigmoid of 2 x
    }
};

// Activation::of(gate) * Activation::of_up(up).
template <class T, class Activation>
void gated(const void* gate_up_, void* out_, long rows, long dim, int threads) {
    using E = typename T::element;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 32)
    for (long r = 0; r < rows; r++) {
        const E* gate = (const E*)gate_up_ + r * 2 * dim;
        E* out = (E*)out_ + r * dim;
        for (long i = 0; i < dim; i += 16) {
            const long n = dim - i;
            const f32x16 g = T::load(gate + i, n), up = T::load(gate + dim + i, n);
            T::store(out + i, T::round(Activation::of(g)) * Activation::of_up(up), n);
        }
    }
}

template <class T>
void rotate(const typename T::element* x, const typename T::element* cos,
            const typename T::element* sin, typename T::element* out, long half) {
    for (long i = 0; i < half; i += 16) {
        const long n = half - i;
        const f32x16 a = T::load(x + i, n), b = T::load(x + half + i, n);
        const f32x16 c = T::load(cos + i, n), s = T::load(sin + i, n);
        T::store(out + i, T::round(a * c) - T::round(b * s), n);
        T::store(out + half + i, T::round(b * c) + T::round(a * s), n);
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

extern "C" void baton_rms_norm(const void* x, const void* weight, int is_wide, float eps, void* out,
                               long rows, long dim, int dtype, int threads) {
    with_type(dtype, [=](auto t) {
        rms_norm<decltype(t)>(x, weight, is_wide != 0, eps, out, rows, dim, threads);
    });
}

extern "C" void baton_swiglu(const void* gate_up, void* out, long rows, long dim, int dtype,
                             int threads) {
    with_type(dtype, [=](auto t) {
        gated<decltype(t), Silu<decltype(t)>>(gate_up, out, rows, dim, threads);
    });
}

extern "C" void baton_clamped_swiglu(const void* gate_up, void* out, long rows, long dim, int dtype,
                                     int threads) {
    with_type(dtype, [=](auto t) {
        gated<decltype(t), ClampedSilu<decltype(t)>>(gate_up, out, rows, dim, threads);
    });
}

extern "C" void baton_geglu(const void* gate_up, void* out, long rows, long dim, int dtype,
                            int threads) {
    with_type(dtype, [=](auto t) { gated<decltype(t), Gelu>(gate_up, out, rows, dim, threads); });
}

extern "C" void baton_rope_kv_write(const RopeKvWrite* call, int dtype, int threads) {
    with_type(dtype, [=](auto t) { rope_kv_write<decltype(t)>(*call, threads); });
}
