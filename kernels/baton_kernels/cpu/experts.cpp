// Mixtures of experts: formulas in baton_kernels/experts.py. Rows are sorted by expert, and each expert's rows are one
// product, so that only the weights of chosen experts are read. A row's result depends on the row alone.
#include "calls.h"
#include "stored.h"
#include <string.h>

namespace {

constexpr long kMaxExperts = 1024;

// x[n] -> softmax or sigmoid; x has room for whole vectors.
void score(const float* logits, long n, bool is_sigmoid, float* scores) {
    const f32x16 one = splat(1.0f);
    if (is_sigmoid) {
        for (long i = 0; i < n; i += 16) {
            const f32x16 x = F32::load(logits + i, n - i);
            const f32x16 e = F32::exp2(abs(x) * splat(-kLog2E));
            F32::store(scores + i, select(less(x, zeros()), e, one) / (one + e));
        }
        return;
    }
    float largest = logits[0], sum = 0;
    for (long i = 1; i < n; i++) largest = logits[i] > largest ? logits[i] : largest;
    for (long i = 0; i < n; i += 16)
        F32::store(scores + i, F32::exp2((F32::load(logits + i, n - i) - splat(largest)) * splat(kLog2E)));
    for (long i = 0; i < n; i++) sum += scores[i];
    for (long i = 0; i < n; i++) scores[i] /= sum;
}

// Index of the largest untaken value (ties go to the lower index); marks it as taken.
long take_largest(const float* x, long n, bool* taken) {
    long best = -1;
    for (long i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || x[i] > x[best])) best = i;
    taken[best] = true;
    return best;
}

void keep_groups(const Route& c, const float* ranked, bool* taken) {
    const long size = c.experts / c.groups;
    float best[kMaxExperts];
    bool is_kept[kMaxExperts] = {};
    for (long g = 0; g < c.groups; g++) {
        float first = -__builtin_inff(), second = -__builtin_inff();
        for (long i = 0; i < size; i++) {
            const float x = ranked[g * size + i];
            if (x > first) {
                second = first;
                first = x;
            } else if (x > second) {
                second = x;
            }
        }
        best[g] = c.group_top > 1 && size > 1 ? first + second : first;
    }
    for (long g = 0; g < c.chosen_groups; g++) take_largest(best, c.groups, is_kept);
    for (long i = 0; i < c.experts; i++) taken[i] = !is_kept[i / size];
}

void route_token(const Route& c, long token) {
    alignas(64) float scores[kMaxExperts + 16], ranked[kMaxExperts];
    bool taken[kMaxExperts] = {}, is_chosen[kMaxExperts] = {};
    score(c.logits + token * c.experts, c.experts, c.is_sigmoid != 0, scores);
    for (long i = 0; i < c.experts; i++) ranked[i] = c.bias ? scores[i] + c.bias[i] : scores[i];
    if (c.groups > 1) keep_groups(c, ranked, taken);
    for (long j = 0; j < c.num_chosen; j++) is_chosen[take_largest(ranked, c.experts, taken)] = true;
    int32_t* chosen = c.chosen + token * c.num_chosen;
    float* weights = c.weights + token * c.num_chosen;
    float sum = 0;
    for (long i = 0, j = 0; i < c.experts; i++)
        if (is_chosen[i]) {
            chosen[j] = (int32_t)i;
            weights[j] = scores[i];
            sum += scores[i];
            j++;
        }
    for (long j = 0; j < c.num_chosen; j++)
        weights[j] = (c.is_normalised ? weights[j] / (sum + 1e-20f) : weights[j]) * c.scale;
}

// order[first[e] .. first[e + 1]): rows of expert e, ascending.
void sort_rows(const GroupedLinear& c, int64_t* order, int64_t* first) {
    memset(first, 0, (c.num_experts + 1) * sizeof(int64_t));
    for (long r = 0; r < c.rows; r++) first[c.chosen[r] + 1]++;
    for (long e = 0; e < c.num_experts; e++) first[e + 1] += first[e];
    for (long r = 0; r < c.rows; r++) order[first[c.chosen[r]]++] = r;
    for (long e = c.num_experts; e > 0; e--) first[e] = first[e - 1];
    first[0] = 0;
}

void grouped(const GroupedLinear& c, int dtype, int threads) {
    const bool is_f32 = dtype == 0;
    const long size = is_f32 ? 4 : 2;
    int64_t *order = c.order, *first = c.order + c.rows;
    sort_rows(c, order, first);
    for (long e = 0; e < c.num_experts; e++) {
        const long count = first[e + 1] - first[e];
        if (count == 0) continue;
        const Weights* w = c.experts[e];
        const long in_bytes = w->num_in * size, out_bytes = w->num_out * size;
        const int64_t* rows = order + first[e];
        if (count == 1) {
            baton_linear(w, c.x + rows[0] / c.repeat * in_bytes, nullptr, c.out + rows[0] * out_bytes, 1, dtype,
                         is_f32, c.scratch, threads);
            continue;
        }
        for (long i = 0; i < count; i++)
            memcpy(c.gathered + i * in_bytes, c.x + rows[i] / c.repeat * in_bytes, in_bytes);
        baton_linear(w, c.gathered, nullptr, c.products, count, dtype, is_f32, c.scratch, threads);
        for (long i = 0; i < count; i++)
            memcpy(c.out + rows[i] * out_bytes, c.products + i * out_bytes, out_bytes);
    }
}

template <class T>
void combine(const void* parts_, const float* weights, const void* shared_, const void* residual_, void* out_,
             long tokens, long chosen, long dim, int threads) {
    using E = typename T::element;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && tokens > 8)
    for (long t = 0; t < tokens; t++) {
        const E* parts = (const E*)parts_ + t * chosen * dim;
        const float* weight = weights + t * chosen;
        for (long i = 0; i < dim; i += 16) {
            const long n = dim - i;
            f32x16 sum = T::load(parts + i, n) * splat(weight[0]);
            for (long j = 1; j < chosen; j++) sum = sum + T::load(parts + j * dim + i, n) * splat(weight[j]);
            if (shared_) sum = sum + T::load((const E*)shared_ + t * dim + i, n);
            if (residual_) sum = sum + T::load((const E*)residual_ + t * dim + i, n);
            T::store((E*)out_ + t * dim + i, sum, n);
        }
    }
}

}  // namespace

extern "C" void baton_route(const Route* call, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && call->tokens > 8)
    for (long t = 0; t < call->tokens; t++) route_token(*call, t);
}

extern "C" void baton_grouped_linear(const GroupedLinear* call, int dtype, int threads) {
    grouped(*call, dtype, threads);
}

extern "C" void baton_combine(const void* parts, const float* weights, const void* shared, const void* residual,
                              void* out, long tokens, long chosen, long dim, int dtype, int threads) {
    with_type(dtype, [=](auto t) {
        combine<decltype(t)>(parts, weights, shared, residual, out, tokens, chosen, dim, threads);
    });
}
