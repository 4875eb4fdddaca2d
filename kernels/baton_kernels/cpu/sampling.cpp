// Argmax and draws from logits; filters of draws look at the best tokens only. Defined by baton_kernels/sampling.py.
#include <math.h>

#include <algorithm>
#include <vector>

#include "calls.h"
#include "simd.h"

namespace {

constexpr long lanes = 16, unrolled = 4;
constexpr long block = unrolled * lanes;  // tokens per block; the first pass keeps the maximum of each block only
constexpr long small = 1 << 18;           // logits below which a second thread does not pay
constexpr float infinity = __builtin_inff();

struct Best {
    f32x16 value = splat(-infinity);
    i32x16 id = splat(0);  // lowest id with the maximum of this lane

    void see(f32x16 values, i32x16 ids, mask16 larger) {
        value = select(larger, values, value);
        id = select(larger, ids, id);
    }
    void see(f32x16 values, i32x16 ids) { see(values, ids, less(value, values)); }
};

// Lowest id of the largest value.
template <int N>
int32_t best_id(const Best (&best)[N]) {
    float largest = -infinity;
    int32_t lowest = 0;
    for (const Best& b : best) {
        float values[lanes];
        int32_t ids[lanes];
        F32::store(values, b.value);
        store_words(ids, b.id);
        for (long k = 0; k < lanes; k++)
            if (values[k] > largest || (values[k] == largest && ids[k] < lowest))
                largest = values[k], lowest = ids[k];
    }
    return lowest;
}

ALWAYS_INLINE i32x16 ids_from(long first) { return lane_numbers() + splat((int32_t)first); }

void checked_argmax(const float* row, long vocab, int64_t* chosen, int64_t* verdict) {
    Best best[unrolled];
    f32x16 zero[unrolled];  // NaN from the first non-finite value on
    for (f32x16& z : zero) z = zeros();
    long i = 0;
    for (; i + block <= vocab; i += block)
        UNROLLED for (long u = 0; u < unrolled; u++) {
            const f32x16 values = F32::load(row + i + u * lanes);
            best[u].see(values, ids_from(i + u * lanes));
            zero[u] = zero[u] + (values - values);
        }
    for (; i < vocab; i += lanes) {
        const f32x16 values = F32::load(row + i, vocab - i);
        best[0].see(values, ids_from(i), less(best[0].value, values) & first_lanes(vocab - i));
        zero[0] = zero[0] + (values - values);
    }
    float of_all = 0;
    for (const f32x16& z : zero) of_all += reduce_add(z);
    *chosen = best_id(best);
    *verdict = of_all == 0 ? *chosen : -1;
}

// log(x) for normal x > 0: x = m * 2^e with m in [sqrt(1/2), sqrt(2)), and log m = 2 atanh((m - 1) / (m + 1)) by its
// series, with a relative truncation error below 2e-9.
ALWAYS_INLINE f32x16 log(f32x16 x) {
    const i32x16 root = splat(0x3F3504F3), one = splat(0x3F800000);  // bits of sqrt(1/2) and 1
    const i32x16 above = bits_of(x) - root;
    const f32x16 e = to_float(((above + one) >> 23) - splat(127));
    const f32x16 m = float_of_bits((above & splat(0x7FFFFF)) + root);
    const f32x16 y = (m - splat(1.0f)) / (m + splat(1.0f)), z = y * y;
    f32x16 series = splat(1.0f / 9);
    series = fma(series, z, splat(1.0f / 7));
    series = fma(series, z, splat(1.0f / 5));
    series = fma(series, z, splat(1.0f / 3));
    const f32x16 twice = y + y;
    return fma(e, splat(0.693147181f), fma(twice * z, series, twice));
}

ALWAYS_INLINE i32x16 mix(i32x16 x) {
    x = (x ^ (x >> 16)) * splat((int32_t)0x7FEB352D);
    x = (x ^ (x >> 15)) * splat((int32_t)0x846CA68B);
    return x ^ (x >> 16);
}

// Noise of the tokens of a row's draw: the twin's `hash_uniform`, and Gumbel noise to a few units in the last place.
struct Noise {
    i32x16 first, second;

    explicit Noise(const int32_t* key) : first(splat(key[0])), second(splat(key[1])) {}

    inline __attribute__((always_inline)) f32x16 of(i32x16 ids) const {
        const i32x16 word = mix(mix((ids * splat((int32_t)0x9E3779B1)) ^ first) ^ second);
        const mask16 is_high = greater(splat((int32_t)0), word);
        const f32x16 number = to_float(word) + select(is_high, splat(0x1p32f), splat(0.5f));
        const f32x16 u = min(max(number * splat(0x1p-32f), splat(0x1p-33f)), splat(1 - 0x1p-24f));
        // -log(1 - u), accurate for small u (Kahan).
        const f32x16 one = splat(1.0f), rest = one - u;
        const mask16 is_tiny = equal(rest, one);
        const f32x16 exact = log(rest) * (u / select(is_tiny, one, rest - one));
        return zeros() - log(select(is_tiny, u, exact));
    }
};

struct Candidate {
    float scaled;
    int32_t id;

    bool operator<(const Candidate& other) const {
        return scaled > other.scaled || (scaled == other.scaled && id < other.id);
    }
};

// A row to draw from: (logits - maximum) / temperature.
struct Row {
    const float* logits;
    long vocab;
    float temperature, largest = -infinity;
    bool is_finite;
    std::vector<float> maxima;  // maxima of the blocks of logits

    Row(const float* logits, long vocab, float temperature)
        : logits(logits), vocab(vocab), temperature(temperature), maxima((vocab + block - 1) / block) {
        f32x16 zero = zeros();
        for (size_t b = 0; b < maxima.size(); b++) {
            f32x16 most = splat(-infinity);
            for (long i = b * block; i < std::min((long)(b + 1) * block, vocab); i += lanes) {
                const f32x16 values = F32::load(logits + i, vocab - i);
                most = max(select(first_lanes(vocab - i), values, splat(-infinity)), most);
                zero = zero + (values - values);
            }
            maxima[b] = reduce_max(most);
            largest = std::max(largest, maxima[b]);
        }
        is_finite = reduce_add(zero) == 0;
    }

    float scaled(float logit) const { return (logit - largest) / temperature; }

    inline __attribute__((always_inline)) f32x16 scaled_at(long i) const {
        const f32x16 values = (F32::load(logits + i, vocab - i) - splat(largest)) / splat(temperature);
        return select(first_lanes(vocab - i), values, splat(-infinity));
    }

    // Sum of exp(scaled).
    double total() const {
        double sum = 0;
        for (long i = 0; i < vocab;) {
            f32x16 part = zeros();
            for (const long end = std::min(i + 64 * lanes, vocab); i < end; i += lanes)
                part = part + F32::exp2(scaled_at(i) * splat(kLog2E));
            sum += reduce_add(part);
        }
        return sum;
    }

    // Collects best tokens in order: at least `wanted`, with all ties of the last; all tokens if there are fewer
    // than `wanted` blocks. Returns whether it collected all.
    bool best(long wanted, std::vector<Candidate>& found) const {
        float bound = -infinity;
        if (wanted <= (long)maxima.size()) {
            std::vector<float> sorted = maxima;
            std::nth_element(sorted.begin(), sorted.begin() + wanted - 1, sorted.end(), std::greater<float>());
            bound = scaled(sorted[wanted - 1]);
        }
        found.clear();
        for (size_t b = 0; b < maxima.size(); b++) {
            if (!(scaled(maxima[b]) >= bound)) continue;
            for (long i = b * block; i < std::min((long)(b + 1) * block, vocab); i += lanes) {
                float values[lanes];
                F32::store(values, scaled_at(i));
                for (long k = 0; k < std::min(lanes, vocab - i); k++)
                    if (values[k] >= bound) found.push_back({values[k], (int32_t)(i + k)});
            }
        }
        std::sort(found.begin(), found.end());
        return bound == -infinity;
    }
};

double total_of(const std::vector<Candidate>& tokens) {
    double total = 0;
    for (const Candidate& token : tokens) total += exp((double)token.scaled);
    return total;
}

// Cutoff of a row: keeps tokens above `scaled`, and those equal to it with ids up to `id`.
struct End {
    float scaled;
    int32_t id;
};

// Cutoff of the smallest set of best tokens with a total of exp(scaled) of at least `mass`. Sums are taken over
// intervals of the scale; only the interval with the cutoff is sorted.
End end_of_nucleus(const Row& row, double mass) {
    constexpr long stretches = 1024, per_unit = 16;
    const f32x16 lowest = splat((float)(1 - stretches) / per_unit);
    const auto stretch_of = [&](f32x16 scaled) { return to_int(floor(max(scaled, lowest) * splat(-(float)per_unit))); };
    std::vector<double> sums(stretches);
    int32_t stretch[lanes];
    float values[lanes];
    for (long i = 0; i < row.vocab; i += lanes) {
        const f32x16 scaled = row.scaled_at(i);
        store_words(stretch, stretch_of(scaled));
        F32::store(values, F32::exp2(scaled * splat(kLog2E)));
        for (long k = 0; k < lanes; k++) sums[stretch[k]] += values[k];
    }
    double before = 0;
    long last = 0;
    while (last < stretches - 1 && before + sums[last] < mass) before += sums[last++];
    std::vector<Candidate> found;
    for (long i = 0; i < row.vocab; i += lanes) {
        const f32x16 scaled = row.scaled_at(i);
        const i32x16 own = stretch_of(scaled);
        if (!any(equal(own, splat((int32_t)last)) & first_lanes(row.vocab - i))) continue;
        store_words(stretch, own);
        F32::store(values, scaled);
        for (long k = 0; k < std::min(lanes, row.vocab - i); k++)
            if (stretch[k] == last) found.push_back({values[k], (int32_t)(i + k)});
    }
    std::sort(found.begin(), found.end());
    End end{0, 0};
    for (size_t i = 0; i < found.size() && (i == 0 || before < mass); i++) {
        end = {found[i].scaled, found[i].id};
        before += exp((double)found[i].scaled);
    }
    return end;
}

int32_t draw_of(const std::vector<Candidate>& kept, const Noise& noise) {
    Best best[1];
    for (size_t i = 0; i < kept.size(); i += lanes) {
        float values[lanes];
        int32_t ids[lanes];
        for (size_t k = 0; k < (size_t)lanes; k++) {
            const Candidate c = i + k < kept.size() ? kept[i + k] : Candidate{-infinity, 0};
            values[k] = c.scaled, ids[k] = c.id;
        }
        // Candidates are not ordered by id: on ties, choose the lowest id.
        const i32x16 words = load_words(ids);
        const f32x16 noisy = F32::load(values) + noise.of(words);
        const mask16 is_lower = equal(best[0].value, noisy) & greater(best[0].id, words);
        best[0].see(noisy, words, less(best[0].value, noisy) | is_lower);
    }
    return best_id(best);
}

// Draws from all tokens up to the cutoff.
int32_t draw_of_all(const Row& row, End end, const Noise& noise) {
    constexpr int apart = 2;  // independent chains of instructions that a processor overlaps
    Best best[apart];
    const f32x16 last = splat(end.scaled);
    for (long i = 0; i < row.vocab; i += apart * lanes)
        UNROLLED for (long u = 0; u < apart; u++) {
            const i32x16 ids = ids_from(i + u * lanes);
            const f32x16 scaled = row.scaled_at(i + u * lanes), noisy = scaled + noise.of(ids);
            const mask16 is_last = equal(scaled, last) & greater(splat(end.id) + splat((int32_t)1), ids);
            best[u].see(noisy, ids, less(best[u].value, noisy) & (less(last, scaled) | is_last));
        }
    return best_id(best);
}

// Cutoff of the filters; top_k 0, top_p 1 and min_p 0 keep all.
int32_t draw(const Row& row, long top_k, float top_p, float min_p, const Noise& noise) {
    constexpr long few = 64;
    constexpr int32_t any_id = INT32_MAX - 1;
    const float least = min_p > 0 ? logf(min_p) : -infinity;
    std::vector<Candidate> best;
    if (top_k) {
        row.best(top_k, best);
        if (best.empty()) return 0;  // no logit is a number
        const float last = best[std::min((size_t)top_k, best.size()) - 1].scaled;
        while (best.back().scaled < last) best.pop_back();
    } else if (top_p == 1) {
        return draw_of_all(row, {least, any_id}, noise);
    }
    if (top_p < 1) {
        const double mass = top_p * (top_k ? total_of(best) : row.total());
        // A nucleus mostly has few tokens, in few blocks.
        const bool is_whole = top_k || row.best(std::min(few, (long)row.maxima.size() / 4 + 1), best);
        double before = 0;
        size_t num = 0;
        for (; num < best.size() && (num == 0 || before < mass); num++) before += exp((double)best[num].scaled);
        if (!is_whole && before < mass) {
            const End end = end_of_nucleus(row, mass);
            return draw_of_all(row, least > end.scaled ? End{least, any_id} : end, noise);
        }
        best.resize(num);
    }
    while (best.size() > 1 && best.back().scaled < least) best.pop_back();
    return draw_of(best, noise);
}

}  // namespace

extern "C" void baton_checked_argmax(const float* logits, long rows, long vocab, int64_t* chosen,
                                     int64_t* verdicts, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && rows > 1 && rows * vocab > small)
    for (long r = 0; r < rows; r++)
        checked_argmax(logits + r * vocab, vocab, chosen + r, verdicts + r);
}

extern "C" void baton_draw_rows(const float* logits, long rows, long vocab, const float* temperature, const int64_t* top_k,
                                const float* top_p, const float* min_p, const int32_t* keys, int64_t* chosen,
                                int64_t* verdicts, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1 && rows > 1 && rows * vocab > small)
    for (long r = 0; r < rows; r++) {
        if (temperature[r] == 0) {
            checked_argmax(logits + r * vocab, vocab, chosen + r, verdicts + r);
            continue;
        }
        const Row row(logits + r * vocab, vocab, temperature[r]);
        chosen[r] = draw(row, top_k[r], top_p[r], min_p[r], Noise(keys + 2 * r));
        verdicts[r] = row.is_finite ? chosen[r] : -1;
    }
}
