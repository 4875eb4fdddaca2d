// The native kernels' own test: every function of the library, on odd sizes, against plain scalar loops in double; and whether
// a row has the same bits alone and in company, with one thread and with two. It needs no Python, so that it also runs where
// there is none: compiled for another CPU, under an emulator.
#include "calls.h"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace {

// ------------------------------------------------------------------ numbers

// As baton_kernels.cpu.calling numbers types, and as `Format` does the first three.
enum Type { F32, BF16, F16, I8, FP8 };
constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "int8", "fp8"};
constexpr long kSizes[] = {4, 2, 2, 1, 1};
// What is computed in.
constexpr Type kComputed[] = {F32, BF16, F16};
// Of a result: half a unit in the last place of the type, and what sums of about 1 lose.
constexpr double kTolerance[] = {3e-5, 1.2e-2, 2e-3};

struct SmallFloat {
    int exponent_bits, mantissa_bits;

    int bias() const { return (1 << (exponent_bits - 1)) - 1; }

    float decode(unsigned code) const {
        const unsigned mantissa = code & ((1u << mantissa_bits) - 1);
        const int field = code >> mantissa_bits & ((1 << exponent_bits) - 1);
        const double size = field
            ? ldexp((double)(mantissa | 1u << mantissa_bits), field - bias() - mantissa_bits)
            : ldexp((double)mantissa, 1 - bias() - mantissa_bits);
        return (float)(code >> (mantissa_bits + exponent_bits) ? -size : size);
    }

    // Of a finite number, to the nearest, ties to even.
    unsigned encode(float x) const {
        const unsigned sign = std::signbit(x) ? 1u << (mantissa_bits + exponent_bits) : 0;
        if (x == 0) return sign;
        int exponent = ilogb(x);
        if (exponent < 1 - bias()) exponent = 1 - bias();
        // Where rounding carries, the sum carries into the exponent.
        const unsigned mantissa = (unsigned)nearbyint(ldexp(fabs((double)x), mantissa_bits - exponent));
        return sign | (((unsigned)(exponent + bias() - 1) << mantissa_bits) + mantissa);
    }
};

SmallFloat small_float(Type type) {
    return type == BF16 ? SmallFloat{8, 7} : type == F16 ? SmallFloat{5, 10} : SmallFloat{4, 3};
}

// Random numbers, alike on every machine.
struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed * 2654435761u + 88172645463325252u) {}
    uint64_t next() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return state;
    }
    long below(long n) { return (long)(next() >> 33) % n; }
    float number() { return (float)((double)(next() >> 11) / (1ull << 52) - 1); }  // in [-1, 1)
};

// Memory that begins with a line of the cache, all bits set: NaN in every type that has one.
struct Memory {
    std::unique_ptr<char, void (*)(void*)> bytes{nullptr, free};
    long size;
    explicit Memory(long num_bytes) : size((num_bytes + 63) / 64 * 64 + 64) {
        bytes.reset((char*)aligned_alloc(64, size));
        memset(bytes.get(), 255, size);
    }
    char* data() const { return bytes.get(); }
    bool operator==(const Memory& other) const {
        return size == other.size && !memcmp(data(), other.data(), size);
    }
};

struct Array {
    Type type;
    long count;
    Memory memory;
    Array(Type type, long count) : type(type), count(count), memory(count * kSizes[type]) {}
    Array(Type type, long count, Random& random, float size = 1) : Array(type, count) {
        for (long i = 0; i < count; i++) set(i, size * random.number());
    }
    void* data() const { return memory.data(); }
    void* at(long i) const { return memory.data() + i * kSizes[type]; }
    float get(long i) const {
        float value;
        if (type == F32) return memcpy(&value, at(i), 4), value;
        uint16_t code;
        return memcpy(&code, at(i), 2), small_float(type).decode(code);
    }
    void set(long i, float value) {
        if (type == F32) {
            memcpy(at(i), &value, 4);
        } else {
            const uint16_t code = (uint16_t)small_float(type).encode(value);
            memcpy(at(i), &code, 2);
        }
    }
};

// x rounded to a type that is computed in
float rounded(Type type, float x) {
    return type == F32 ? x : small_float(type).decode(small_float(type).encode(x));
}

// ------------------------------------------------------------------ checks

long failures = 0, checks = 0;

void fail(const std::string& what, const std::string& why) {
    failures++;
    if (failures <= 40) printf("FAILED %s: %s\n", what.c_str(), why.c_str());
}

void check(bool holds, const std::string& what, const char* why) {
    checks++;
    if (!holds) fail(what, why);
}

// Of all bits of results since it was last shown (FNV-1a).
uint64_t digest = 0xCBF29CE484222325;

void add_to_digest(const void* data, long num_bytes) {
    for (long i = 0; i < num_bytes; i++) digest = (digest ^ ((const uint8_t*)data)[i]) * 0x100000001B3;
}

// tests/kernels/cpu/test_program.py holds it to what it was when NUMERICS_VERSION was last raised.
void show_digest(const char* what) {
    printf("bits of %s %016llx\n", what, (unsigned long long)digest);
    digest = 0xCBF29CE484222325;
}

// One failure at most: the first number that is too far from what is wanted.
void check_close(const std::string& what, const Array& got, const std::vector<double>& wanted,
                 double tolerance) {
    checks++;
    add_to_digest(got.data(), (long)wanted.size() * kSizes[got.type]);
    for (long i = 0; i < (long)wanted.size(); i++) {
        const double value = got.get(i);
        if (!(fabs(value - wanted[i]) <= tolerance * (1 + fabs(wanted[i])))) {
            char why[160];
            snprintf(why, sizeof why, "element %ld is %.9g, not %.9g", i, value, wanted[i]);
            return fail(what, why);
        }
    }
}

void check_same(const std::string& what, const Array& one, const Array& other, const char* why) {
    check(one.memory == other.memory, what, why);
}

std::string named(const char* what, Type type, std::initializer_list<long> sizes) {
    std::string name = std::string(what) + " " + kNames[type];
    for (long size : sizes) name += " " + std::to_string(size);
    return name;
}

// ------------------------------------------------------------------ linear

enum Format { kF32, kBF16, kF16, kInt8, kInt4 };
constexpr const char* kFormats[] = {"float32", "bfloat16", "float16", "int8", "int4"};

// Weights of a linear layer, plain and packed as linear.cpp has them.
struct Linear {
    long num_out, num_in, group, groups;
    Format format;
    std::vector<float> plain;             // [num_out][num_in], as the packed ones are, or levels
    std::vector<float> scale, zero;       // [num_out][groups]; integers only
    std::vector<float> bias;
    std::vector<uint32_t> packed;
    std::vector<float> packed_scale, packed_zero;
    Weights weights = {};

    Linear(long num_out, long num_in, Format format, long group, bool has_bias, bool has_zeros, Random& random)
        : num_out(num_out), num_in(num_in), group(group), groups(num_in / group), format(format) {
        const bool is_int = format >= kInt8;
        for (long i = 0; i < num_out * num_in; i++)
            plain.push_back(is_int ? (float)random.below(format == kInt8 ? 256 : 16)
                                   : rounded((Type)format, random.number()));
        for (long i = 0; is_int && i < num_out * groups; i++) {
            scale.push_back(0.01f + 0.01f * fabsf(random.number()));
            zero.push_back(has_zeros ? (float)random.below(9) + 3 : format == kInt8 ? 128.0f : 8.0f);
        }
        for (long i = 0; has_bias && i < num_out; i++) bias.push_back(random.number());
        pack();
        weights = {num_out, num_in, format, group, (const char*)packed.data(), nullptr, nullptr, 0, nullptr};
        if (has_bias) weights.bias = bias.data();
        if (!is_int) return;
        weights.scales = packed_scale.data();
        weights.zeros = has_zeros ? packed_zero.data() : nullptr;
        weights.zero = format == kInt8 ? 128.0f : 8.0f;
    }

    uint32_t code(long n, long k) const {
        if (n >= num_out) return 0;
        const float value = plain[n * num_in + k];
        if (format >= kInt8) return (uint32_t)value;
        if (format != kF32) return small_float((Type)format).encode(value);
        uint32_t bits;
        return memcpy(&bits, &value, 4), bits;
    }

    void pack() {
        const long per_word = format == kF32 ? 1 : format == kInt8 ? 4 : format == kInt4 ? 8 : 2;
        const long tiles = (num_out + 63) / 64, words = num_in / per_word;
        packed.assign(tiles * words * 64, 0);
        for (long t = 0; t < tiles; t++)
            for (long w = 0; w < words; w++)
                for (long o = 0; o < 64; o++)
                    for (long i = 0; i < per_word; i++) {
                        const uint32_t value = code(t * 64 + o, w * per_word + i);
                        uint32_t* word = packed.data() + (t * words + w) * 64;
                        if (format == kF16)  // 16 outputs at one k, then the same at the next
                            ((uint16_t*)(word + o / 16 * 16))[i * 16 + o % 16] = (uint16_t)value;
                        else if (format == kInt4)  // bytes of k (low) and k + 4 (high)
                            word[o] |= value << (i % 4 * 8 + i / 4 * 4);
                        else
                            word[o] |= value << (i * (32 / per_word) % 32);
                    }
        if (format < kInt8) return;
        packed_scale.assign(tiles * groups * 64, 0);
        packed_zero.assign(tiles * groups * 64, 0);
        for (long n = 0; n < num_out; n++)
            for (long g = 0; g < groups; g++) {
                const long at = (n / 64 * groups + g) * 64 + n % 64;
                packed_scale[at] = scale[n * groups + g];
                packed_zero[at] = zero[n * groups + g];
            }
    }

    // Rows [first, first + rows) of x.
    void run(const Array& x, long first, long rows, const Array* residual, Array& out, int threads) const {
        int64_t row_bytes = 0;
        baton_linear_scratch(&weights, &row_bytes);
        Memory scratch(rows * row_bytes);
        baton_linear(&weights, x.at(first * num_in), residual ? residual->at(first * num_out) : nullptr,
                     out.at(first * num_out), rows, x.type, out.type == F32, scratch.data(), threads);
    }

    std::vector<double> expected(const Array& x, long rows, const Array* residual) const {
        std::vector<double> out;
        for (long r = 0; r < rows; r++) {
            std::vector<double> input;
            float largest = 0;
            for (long k = 0; k < num_in; k++) largest = fmaxf(largest, fabsf(x.get(r * num_in + k)));
            for (long k = 0; k < num_in; k++) {
                const float value = x.get(r * num_in + k);
                input.push_back(format >= kInt8 ? nearbyintf(value * (127.0f / largest)) : value);
            }
            for (long n = 0; n < num_out; n++) {
                double sum = 0;
                for (long k = 0; k < num_in; k++) {
                    const long g = n * groups + k / group;
                    const double weight = plain[n * num_in + k];
                    sum += input[k] * (format >= kInt8 ? (weight - zero[g]) * scale[g] : weight);
                }
                if (format >= kInt8) sum *= largest / 127.0;
                if (!bias.empty()) sum += bias[n];
                if (residual) sum += residual->get(r * num_out + n);
                out.push_back(sum);
            }
        }
        return out;
    }
};

void test_linear() {
    struct Shape {
        long num_out, num_in, rows;
    };
    for (Type type : kComputed)
        for (int format = 0; format <= kInt4; format++) {
            // Weights are of the type that is computed in, or integers.
            if (format < kInt8 && format != (int)type) continue;
            for (Shape s : {Shape{1, 16, 1}, Shape{70, 48, 7}, Shape{64, 528, 3}, Shape{130, 1056, 53}}) {
                Random random(s.num_in + format);
                const bool is_int = format >= kInt8, is_odd = s.rows % 2;
                const long group = is_int && s.num_in > 16 ? s.num_in / 3 / 8 * 8 : s.num_in;
                const long whole = s.num_in % group ? s.num_in : group;
                const Linear linear(s.num_out, s.num_in, (Format)format, whole, is_odd, is_odd, random);
                const Array x(type, s.rows * s.num_in, random), residual(type, s.rows * s.num_out, random);
                const Array* added = s.rows > 3 ? &residual : nullptr;
                for (Type out_type : {type, F32}) {
                    const std::string what = named(kFormats[format], out_type, {s.num_out, s.num_in, s.rows});
                    Array out(out_type, s.rows * s.num_out), other(out_type, s.rows * s.num_out);
                    linear.run(x, 0, s.rows, added, out, 1);
                    check_close("linear " + what, out, linear.expected(x, s.rows, added),
                                kTolerance[out_type] * (out_type == F32 ? s.num_in / 16 : 1));
                    linear.run(x, 0, s.rows, added, other, 2);
                    check_same("linear " + what, out, other, "two threads give other bits");
                    Array alone(out_type, s.rows * s.num_out);
                    for (long r = 0; r < s.rows; r++) linear.run(x, r, 1, added, alone, 1);
                    check_same("linear " + what, out, alone, "a row alone has other bits");
                }
            }
        }
}

// ------------------------------------------------------------------ the KV pool

float limit_of(Type stored) { return stored == I8 ? 127 : stored == FP8 ? 448 : 0; }

struct Pool {
    Type stored;
    long blocks, layers, kv_heads, block_size, dim;
    long row_bytes = dim * kSizes[stored];
    long head_bytes = block_size * (row_bytes + (limit_of(stored) ? 4 : 0));
    Memory memory{blocks * layers * 2 * kv_heads * head_bytes};

    char* head(long block, long layer, long kind, long kv_head) const {
        return memory.data() + (((block * layers + layer) * 2 + kind) * kv_heads + kv_head) * head_bytes;
    }
    char* scales() const { return limit_of(stored) ? memory.data() + block_size * row_bytes : nullptr; }

    // Element d of the row at `offset` of a head.
    float get(const char* head, long offset, long d) const {
        const char* row = head + offset * row_bytes;
        float scale, wide;
        uint16_t half;
        memcpy(&wide, row + d * 4 * (stored == F32), 4);
        memcpy(&half, row + d * 2 * (kSizes[stored] == 2), 2);
        memcpy(&scale, head + block_size * row_bytes + offset * 4 * (limit_of(stored) > 0), limit_of(stored) ? 4 : 0);
        switch (stored) {
            case F32: return wide;
            case I8: return scale * (float)((const int8_t*)row)[d];
            case FP8: return scale * small_float(FP8).decode((uint8_t)row[d]);
            default: return small_float(stored).decode(half);
        }
    }
};

// ------------------------------------------------------------------ attention

struct Sequence {
    long start, count;  // the new tokens are at positions [start, start + count)
};

struct Attending {
    long heads, window;
    Pool pool;
    Type type;
    std::vector<Sequence> sequences;
    std::vector<std::vector<int64_t>> tables;
    long num_tokens = 0;
    std::unique_ptr<Array> query;
    static constexpr long kLayer = 1;

    Attending(Type type, Type stored, std::vector<Sequence> all, long heads, long kv_heads, long dim,
              long block_size, long window)
        : heads(heads), window(window), pool{stored, blocks_of(all, block_size) + 1, 2, kv_heads, block_size, dim},
          type(type), sequences(all) {
        Random random(all.size() * 1000 + dim + block_size);
        std::vector<int64_t> ids;
        for (long i = 0; i < pool.blocks; i++) ids.insert(ids.begin() + random.below(i + 1), i);
        for (const Sequence& s : sequences) {
            const long needed = (s.start + s.count + block_size - 1) / block_size;
            tables.emplace_back(ids.end() - needed, ids.end());
            ids.resize(ids.size() - needed);
            num_tokens += s.count;
            write(tables.back(), s, random);
        }
        query.reset(new Array(type, num_tokens * heads * dim, random, 2));
    }

    static long blocks_of(const std::vector<Sequence>& all, long size) {
        long blocks = 0;
        for (const Sequence& s : all) blocks += (s.start + s.count + size - 1) / size;
        return blocks;
    }

    // Keys and values that some token sees, through the library: test_rope_kv_write checks how it rounds.
    void write(const std::vector<int64_t>& table, const Sequence& s, Random& random) {
        const long oldest = window && s.start >= window ? s.start - window + 1 : 0;
        const long tokens = s.start + s.count - oldest, dim = pool.dim, width = pool.kv_heads * dim;
        const Array key(type, tokens * width, random, 2), value(type, tokens * width, random);
        Array cos(type, tokens * dim / 2), sin(type, tokens * dim / 2), key_out(type, tokens * width);
        std::vector<int64_t> rows;
        for (long t = 0; t < tokens; t++) {
            const long at = oldest + t, size = pool.block_size;
            rows.push_back(table[at / size] * pool.layers * 2 * pool.kv_heads * size + at % size);
            for (long d = 0; d < dim / 2; d++) cos.set(t * dim / 2 + d, 1), sin.set(t * dim / 2 + d, 0);
        }
        const RopeKvWrite call = {
            nullptr, key.data(), value.data(), 0, width, width, cos.data(), sin.data(), nullptr, key_out.data(),
            pool.memory.data(), (float*)pool.scales(), pool.stored, pool.row_bytes, pool.head_bytes, rows.data(), 1,
            kLayer * 2 * pool.kv_heads * pool.block_size, pool.kv_heads * pool.block_size, tokens, 0,
            pool.kv_heads, dim, pool.block_size};
        baton_rope_kv_write(&call, type, 1);
    }

    // Tokens [first, first + count) of sequence i alone, or all of all.
    void run(Array& out, int threads, long i = -1, long first = 0, long count = 0) const {
        std::vector<int64_t> first_row, num, start, all_tables, table_at, task_at{0};
        long row = 0;
        for (long s = 0; s < (long)sequences.size(); s++) {
            if (i < 0 || i == s) {
                first_row.push_back(row + first);
                num.push_back(i < 0 ? sequences[s].count : count);
                start.push_back(sequences[s].start + first);
                table_at.push_back((long)all_tables.size());
                all_tables.insert(all_tables.end(), tables[s].begin(), tables[s].end());
                const long rows = num.back() * (heads / pool.kv_heads);
                task_at.push_back(task_at.back() + (rows + 63) / 64 * pool.kv_heads);
            }
            row += sequences[s].count;
        }
        const Attention call = {
            query->data(), out.data(), pool.memory.data(), pool.scales(), pool.stored, pool.row_bytes,
            pool.head_bytes, kLayer, pool.layers, 2, heads, pool.kv_heads, pool.block_size, pool.dim, 0.3f, window,
            (long)num.size(), first_row.data(), num.data(), start.data(), all_tables.data(), table_at.data(),
            task_at.data()};
        baton_attention(&call, type, threads);
    }

    std::vector<double> expected() const {
        std::vector<double> out;
        const long dim = pool.dim;
        for (long s = 0; s < (long)sequences.size(); s++) {
            const std::vector<double> keys = numbers(s, 0), values = numbers(s, 1);
            for (long t = 0; t < sequences[s].count; t++)
                for (long h = 0; h < heads; h++) {
                    const long at = sequences[s].start + t, g = h / (heads / pool.kv_heads);
                    const long oldest = window && at >= window ? at - window + 1 : 0;
                    std::vector<double> row, sums(dim, 0.0), scores;
                    for (long d = 0; d < dim; d++) row.push_back(query->get((long)out.size() + d));
                    double top = -1e300, total = 0;
                    for (long p = oldest; p <= at; p++) {
                        double score = 0;
                        for (long d = 0; d < dim; d++) score += row[d] * keys[(p * pool.kv_heads + g) * dim + d];
                        scores.push_back(score * 0.3f);
                        top = fmax(top, scores.back());
                    }
                    for (long p = oldest; p <= at; p++) {
                        const double weight = exp(scores[p - oldest] - top);
                        total += weight;
                        for (long d = 0; d < dim; d++) sums[d] += weight * values[(p * pool.kv_heads + g) * dim + d];
                    }
                    for (double sum : sums) out.push_back(sum / total);
                }
        }
        return out;
    }

    // What a sequence's rows see of its keys (kind 0) or values (1): [positions][kv_heads][dim].
    std::vector<double> numbers(long s, long kind) const {
        std::vector<double> all;
        for (long p = 0; p < sequences[s].start + sequences[s].count; p++)
            for (long g = 0; g < pool.kv_heads; g++) {
                const char* head = pool.head(tables[s][p / pool.block_size], kLayer, kind, g);
                for (long d = 0; d < pool.dim; d++)
                    all.push_back(rounded(type, pool.get(head, p % pool.block_size, d)));
            }
        return all;
    }
};

void test_attention() {
    struct Case {
        std::vector<Sequence> sequences;
        long heads, kv_heads, dim, block_size, window;
        std::vector<Type> stored;
    };
    const std::vector<Case> cases = {
        {{{0, 70}, {130, 1}, {63, 2}}, 6, 2, 40, 16, 0, {F32, BF16, F16, I8, FP8}},
        {{{0, 19}, {200, 1}}, 8, 1, 64, 5, 37, {F32, BF16, I8}},
        {{{0, 1}, {17, 5}}, 5, 1, 18, 1, 0, {F32, BF16}},
        {{{64, 33}}, 2, 2, 128, 32, 64, {F32, BF16}},
        {{{3, 2}, {90, 3}}, 7, 1, 250, 3, 50, {F32, BF16}},
    };
    for (const Case& c : cases)
        for (Type stored : c.stored)
            for (Type type : kComputed) {
                const Attending a(type, stored, c.sequences, c.heads, c.kv_heads, c.dim, c.block_size, c.window);
                const long width = c.heads * c.dim;
                Array out(type, a.num_tokens * width), other(type, a.num_tokens * width);
                Array alone(type, a.num_tokens * width), parts(type, a.num_tokens * width);
                const std::string what = named("attention", type, {c.heads, c.kv_heads, c.dim, c.block_size, c.window})
                    + " over " + kNames[stored];
                a.run(out, 1);
                check_close(what, out, a.expected(), kTolerance[type]);
                a.run(other, 2);
                check_same(what, out, other, "two threads give other bits");
                // Each token as a decode step has it, and prompts in two chunks.
                for (long s = 0; s < (long)c.sequences.size(); s++) {
                    const long count = c.sequences[s].count, half = (count + 2) / 3;
                    for (long t = 0; t < count; t++) a.run(alone, 1, s, t, 1);
                    a.run(parts, 1, s, 0, half);
                    if (half < count) a.run(parts, 1, s, half, count - half);
                }
                check_same(what, out, alone, "a token alone has other bits");
                check_same(what, out, parts, "a prompt in chunks has other bits");
            }
}

// ------------------------------------------------------------------ small operations

void test_rms_norm() {
    for (Type type : kComputed)
        for (long dim : {1L, 7L, 33L, 256L}) {
            const long rows = 35;
            Random random(dim);
            const Array x(type, rows * dim, random, 3), weight(type, dim, random);
            Array out(type, rows * dim), other(type, rows * dim);
            const std::string what = named("rms_norm", type, {dim});
            baton_rms_norm(x.data(), weight.data(), 0, 1e-5f, out.data(), rows, dim, type, 1);
            std::vector<double> wanted;
            for (long r = 0; r < rows; r++) {
                double squares = 0;
                for (long i = 0; i < dim; i++) squares += (double)x.get(r * dim + i) * x.get(r * dim + i);
                for (long i = 0; i < dim; i++)
                    wanted.push_back(x.get(r * dim + i) / sqrt(squares / dim + 1e-5) * weight.get(i));
            }
            check_close(what, out, wanted, kTolerance[type]);
            for (long r = 0; r < rows; r++)
                baton_rms_norm(x.at(r * dim), weight.data(), 0, 1e-5f, other.at(r * dim), 1, dim, type, 1);
            check_same(what, out, other, "a row alone has other bits");
            baton_rms_norm(x.data(), weight.data(), 0, 1e-5f, other.data(), rows, dim, type, 2);
            check_same(what, out, other, "two threads give other bits");
        }
}

void test_swiglu() {
    for (Type type : kComputed)
        for (long dim : {1L, 19L, 96L}) {
            const long rows = 35;
            Random random(dim);
            const Array x(type, rows * 2 * dim, random, 30);
            Array out(type, rows * dim), other(type, rows * dim);
            const std::string what = named("swiglu", type, {dim});
            baton_swiglu(x.data(), out.data(), rows, dim, type, 1);
            std::vector<double> wanted;
            for (long r = 0; r < rows; r++)
                for (long i = 0; i < dim; i++) {
                    const double gate = x.get(r * 2 * dim + i);
                    wanted.push_back(gate / (1 + exp(-gate)) * x.get(r * 2 * dim + dim + i));
                }
            check_close(what, out, wanted, kTolerance[type]);
            baton_swiglu(x.data(), other.data(), rows, dim, type, 2);
            check_same(what, out, other, "two threads give other bits");
        }
}

// How far a stored number may lie from the one that was given. scale: of its row, where it has one.
double step_of(Type stored, float scale, double size) {
    if (stored == F32) return 0;
    if (stored == I8) return 0.5001 * scale;
    const SmallFloat f = small_float(stored);
    const double unit = stored == FP8 ? scale : 1;
    return 0.5001 * fmax(size * pow(2, -f.mantissa_bits), unit * pow(2, 1 - f.bias() - f.mantissa_bits));
}

void test_rope_kv_write() {
    for (Type type : kComputed)
        for (Type stored : {F32, BF16, F16, I8, FP8})
            for (long dim : {2L, 18L, 64L}) {
                const long tokens = 37, heads = 3, kv_heads = 2, size = 5, half = dim / 2;
                const Pool pool{stored, 9, 3, kv_heads, size, dim}, other_pool{stored, 9, 3, kv_heads, size, dim};
                Random random(dim + stored);
                const long width = (heads + 2 * kv_heads) * dim;
                const Array fused(type, tokens * width, random, 3);
                const Array cos(type, tokens * half, random), sin(type, tokens * half, random);
                std::vector<int64_t> rows;
                for (long t = 0; t < tokens; t++)
                    rows.push_back(t == 7 ? -1 : (8 - t / size) * pool.layers * 2 * kv_heads * size + t % size);
                Array query(type, tokens * heads * dim), key(type, tokens * kv_heads * dim);
                Array other_query(type, tokens * heads * dim), other_key(type, tokens * kv_heads * dim);
                RopeKvWrite call = {
                    fused.data(), fused.at(heads * dim), fused.at((heads + kv_heads) * dim), width, width, width,
                    cos.data(), sin.data(), query.data(), key.data(), pool.memory.data(), (float*)pool.scales(),
                    stored, pool.row_bytes, pool.head_bytes, rows.data(), 1, 2 * kv_heads * size, kv_heads * size,
                    tokens, heads, kv_heads, dim, size};
                baton_rope_kv_write(&call, type, 1);
                call.out = other_query.data(), call.key_out = other_key.data();
                call.pool = other_pool.memory.data(), call.scales = (float*)other_pool.scales();
                baton_rope_kv_write(&call, type, 2);
                const std::string what = named("rope_kv_write", type, {dim}) + " into " + kNames[stored];
                check(query.memory == other_query.memory && key.memory == other_key.memory &&
                          pool.memory == other_pool.memory, what, "two threads give other bits");
                std::vector<double> turned;
                for (long t = 0; t < tokens; t++)
                    for (long h = 0; h < heads + kv_heads; h++)
                        for (long d = 0; d < dim; d++) {
                            const long row = t * width + h * dim, i = d % half;
                            const double c = cos.get(t * half + i), s = sin.get(t * half + i);
                            const double a = fused.get(row + i), b = fused.get(row + half + i);
                            turned.push_back(d < half ? a * c - b * s : b * c + a * s);
                        }
                std::vector<double> wanted_query, wanted_key;
                for (long i = 0; i < (long)turned.size(); i++)
                    (i / dim % (heads + kv_heads) < heads ? wanted_query : wanted_key).push_back(turned[i]);
                check_close(what, query, wanted_query, 2 * kTolerance[type]);
                check_close(what, key, wanted_key, 2 * kTolerance[type]);
                add_to_digest(pool.memory.data(), pool.memory.size);
                bool is_near = true;
                for (long t = 0; t < tokens; t++)
                    for (long i = 0; t != 7 && i < 2 * kv_heads * dim; i++) {
                        const long kind = i / (kv_heads * dim), h = i / dim % kv_heads, d = i % dim;
                        const char* head = pool.head(8 - t / size, 1, kind, h);
                        float scale = 1;
                        if (limit_of(stored)) memcpy(&scale, head + size * pool.row_bytes + t % size * 4, 4);
                        const double given = kind ? fused.get(t * width + heads * dim + i)
                                                  : key.get((t * kv_heads + h) * dim + d);
                        const double off = fabs(pool.get(head, t % size, d) - given);
                        is_near = is_near && off <= step_of(stored, scale, fabs(given)) + 1e-6 * fabs(given);
                    }
                check(is_near, what, "a stored number is not the nearest");
            }
}

void test_checked_argmax() {
    const long rows = 6, vocab = 301;
    Array logits(F32, rows * vocab);
    Random random(3);
    for (long i = 0; i < rows * vocab; i++) logits.set(i, (float)random.below(50));
    for (long id : {250L, 77L, 78L}) logits.set(1 * vocab + id, 60);
    logits.set(2 * vocab + 300, 70);
    logits.set(3 * vocab + 5, NAN);
    logits.set(4 * vocab + 299, INFINITY);
    for (long i = 0; i < vocab; i++) logits.set(5 * vocab + i, -1000);
    std::vector<int64_t> chosen(rows), verdicts(rows);
    baton_checked_argmax((const float*)logits.data(), rows, vocab, chosen.data(), verdicts.data(), 1);
    check(chosen[1] == 77 && verdicts[1] == 77, "checked_argmax", "the lowest of several best is taken");
    check(chosen[2] == 300 && verdicts[2] == 300, "checked_argmax", "the last may be the best");
    check(verdicts[3] == -1 && verdicts[4] == -1, "checked_argmax", "what is not finite is noticed");
    check(chosen[5] == 0 && verdicts[5] == 0, "checked_argmax", "of equal ones the first");
    const float* row = (const float*)logits.data();
    long best = 0;
    for (long i = 1; i < vocab; i++) best = row[i] > row[best] ? i : best;
    check(chosen[0] == best, "checked_argmax", "of many");
}

// ------------------------------------------------------------------ copies and sums

void test_word_sum() {
    for (long count : {1L, 7L, 8L, 31L, 32L, 100L}) {
        Random random(count);
        std::vector<uint64_t> words;
        uint64_t wanted = 0, got = 0, key = random.next();
        for (long i = 0; i < count; i++) {
            words.push_back(random.next());
            const uint64_t at = key + (uint64_t)i * 0x9E3779B97F4A7C15;
            uint64_t x = words.back() ^ at;
            x = (x ^ x >> 32) * 0xBF58476D1CE4E5B9;
            x = (x ^ x >> 29) * 0x94D049BB133111EB;
            wanted += (x ^ x >> 32) * (at | 1);
        }
        baton_word_sum(words.data(), count, key, &got);
        check(got == wanted, "word_sum " + std::to_string(count), "another sum");
    }
}

void test_checked_copy() {
    // xxh3_64 of bytes i * 131 % 251 with seed 99, by the reference implementation.
    struct Known {
        long piece, count;
        uint64_t hash;
    };
    for (const Known& k : {Known{256, 1, 0xFCA7F66C1FB5141E}, Known{1088, 1, 0x2FF3A2BFB9FE86F3},
                           Known{64, 5, 0x60B52B502C3D1FA1}, Known{1024, 3, 0x4F71E8F6B43A135E},
                           Known{4160, 7, 0x2717B22A6C63B881}}) {
        // Blocks of one head and one row, and blocks of two heads of three rows each, of which the first and the
        // last of the sequence are in the range in part.
        for (long heads : {1L, 2L}) {
            const long size = heads == 1 ? 1 : 3, skipped = size / 2;
            if (k.piece % (64 * heads)) continue;
            const long row = k.piece / heads, head = size * row, blocks = k.count + 2, block_bytes = heads * head + 128;
            Memory pool(blocks * block_bytes), packed(k.piece * k.count), other(blocks * block_bytes);
            std::vector<long> ids;
            for (long i = 0; i < k.count; i++) ids.push_back(blocks - 1 - i);
            // As the payload lies: block by block, head by head, token by token.
            long at = 0;
            for (long begin = skipped, end; begin < skipped + k.count; begin = end) {
                const long block = begin / size;
                end = std::min((block + 1) * size, skipped + k.count);
                for (long h = 0; h < heads; h++)
                    for (long t = begin - block * size; t < end - block * size; t++)
                        for (long i = 0; i < row; i++, at++)
                            pool.data()[64 + ids[block] * block_bytes + h * head + t * row + i] =
                                (char)(at * 131 % 251);
            }
            uint64_t sent = 0, received = 0;
            const std::string what = "checked copy of " + std::to_string(k.piece) + " x " + std::to_string(k.count) +
                                     ", heads " + std::to_string(heads);
            KvRange range{pool.data() + 64, ids.data(), block_bytes, heads, head, row, size, skipped, k.count};
            baton_checked_gather(&range, packed.data(), k.piece * k.count, 99, &sent);
            check(sent == k.hash, what, "gather gives another checksum");
            for (long i = 0; i < k.piece * k.count; i++)
                if ((uint8_t)packed.data()[i] != i * 131 % 251) return fail(what, "gather gives other bytes");
            range.pool = other.data() + 64;
            baton_checked_scatter(&range, packed.data(), k.piece * k.count, 99, &received);
            check(received == k.hash, what, "scatter gives another checksum");
            check(other == pool, what, "scatter gives other bytes");
        }
    }
}

// ------------------------------------------------------------------ layers

// Two layers by one call of baton_layers, and by the operations one after the other.
void test_layers() {
    const long tokens = 5, hidden = 48, heads = 3, kv_heads = 1, dim = 16, middle = 40, blocks = 3, size = 4;
    const long all = (heads + 2 * kv_heads) * dim;
    for (Type type : kComputed) {
        Random random(type);
        std::vector<std::unique_ptr<Linear>> linears;
        std::vector<std::unique_ptr<Array>> norms;
        std::vector<Layer> layers;
        const auto linear = [&](long num_out, long num_in) {
            linears.emplace_back(new Linear(num_out, num_in, (Format)type, num_in, false, false, random));
            return &linears.back()->weights;
        };
        const auto norm = [&](long width) {
            norms.emplace_back(new Array(type, width, random));
            return norms.back()->data();
        };
        for (long i = 0; i < 2; i++) {
            const Weights *qkv = linear(all, hidden), *output = linear(hidden, heads * dim);
            const Weights *gate_up = linear(2 * middle, hidden), *down = linear(hidden, middle);
            const void *q_norm = i ? norm(dim) : nullptr, *k_norm = i ? norm(dim) : nullptr;
            layers.push_back({norm(hidden), qkv, q_norm, k_norm, output, norm(hidden), gate_up, down, 0});
        }
        const void* last = norm(hidden);
        const Pool pools[2] = {{type, blocks, 2, kv_heads, size, dim}, {type, blocks, 2, kv_heads, size, dim}};
        const int64_t first_row[1] = {0}, num[1] = {tokens}, start[1] = {0}, table[2] = {2, 0}, table_at[1] = {0};
        const int64_t task_at[2] = {0, 1};
        const Array cos(type, tokens * dim / 2, random), sin(type, tokens * dim / 2, random);
        std::vector<int64_t> rows;
        for (long t = 0; t < tokens; t++)
            rows.push_back(table[t / size] * 2 * 2 * kv_heads * size + t % size);
        const Array given(type, tokens * hidden, random);
        Array normalised(type, tokens * hidden), qkv(type, tokens * all), query(type, tokens * heads * dim);
        Array key(type, tokens * kv_heads * dim), gate_up(type, tokens * 2 * middle), gated(type, tokens * middle);
        Array mixed(type, tokens * heads * dim);
        int64_t row_bytes = 0, most = 0;
        for (const auto& l : linears) {
            baton_linear_scratch(&l->weights, &row_bytes);
            most = row_bytes > most ? row_bytes : most;
        }
        Memory scratch(tokens * most);
        const auto attention_over = [&](const Pool& pool) {
            return Attention{query.data(), mixed.data(), pool.memory.data(), nullptr, type, pool.row_bytes,
                             pool.head_bytes, 0, 2, 2, heads, kv_heads, size, dim, 0.25f, 0, 1, first_row, num, start,
                             table, table_at, task_at};
        };
        const auto write_into = [&](const Pool& pool) {
            return RopeKvWrite{qkv.data(), qkv.at(heads * dim), qkv.at((heads + kv_heads) * dim), all, all, all,
                               cos.data(), sin.data(), query.data(), key.data(), pool.memory.data(), nullptr, type,
                               pool.row_bytes, pool.head_bytes, rows.data(), 1, 0, kv_heads * size, tokens, heads,
                               kv_heads, dim, size};
        };
        const Attention plan = attention_over(pools[0]);
        const Attention* plans[1] = {&plan};
        const RopeKvWrite of_step = write_into(pools[0]);
        const RopeKvWrite* writes[1] = {&of_step};
        const int64_t numbers[2] = {0, 1};
        Array x(type, tokens * hidden);
        memcpy(x.data(), given.data(), x.memory.size);
        const Stages stages = {layers.data(), 2, last, hidden, middle, heads, kv_heads, dim, 1e-5f, 0, plans, writes,
                               numbers, tokens, x.data(), mixed.data(), normalised.data(), qkv.data(), query.data(),
                               key.data(), gate_up.data(), gated.data(), scratch.data()};
        baton_layers(&stages, 0, 4, type, 1);
        baton_layers(&stages, 4, 7, type, 2);
        Array y(type, tokens * hidden);
        memcpy(y.data(), given.data(), y.memory.size);
        const auto run = [&](const Weights* w, const Array& in, const Array* residual, Array& out) {
            baton_linear(w, in.data(), residual ? residual->data() : nullptr, out.data(), tokens, type, type == F32,
                         scratch.data(), 1);
        };
        for (long i = 0; i < 2; i++) {
            const Layer& l = layers[i];
            baton_rms_norm(y.data(), l.input_norm, 0, 1e-5f, normalised.data(), tokens, hidden, type, 1);
            run(l.qkv, normalised, nullptr, qkv);
            for (long t = 0; l.q_norm && t < tokens; t++) {
                void *q = qkv.at(t * all), *k = qkv.at(t * all + heads * dim);
                baton_rms_norm(q, l.q_norm, 0, 1e-5f, q, heads, dim, type, 1);
                baton_rms_norm(k, l.k_norm, 0, 1e-5f, k, kv_heads, dim, type, 1);
            }
            RopeKvWrite write = write_into(pools[1]);
            write.to_layer = i * 2 * kv_heads * size;
            baton_rope_kv_write(&write, type, 1);
            Attention attention = attention_over(pools[1]);
            attention.layer = i;
            baton_attention(&attention, type, 1);
            run(l.output, mixed, &y, y);
            baton_rms_norm(y.data(), l.post_norm, 0, 1e-5f, normalised.data(), tokens, hidden, type, 1);
            run(l.gate_up, normalised, nullptr, gate_up);
            baton_swiglu(gate_up.data(), gated.data(), tokens, middle, type, 1);
            run(l.down, gated, &y, y);
        }
        baton_rms_norm(y.data(), last, 0, 1e-5f, y.data(), tokens, hidden, type, 1);
        check_same(named("layers", type, {}), x, y, "not what its operations give");
        check(pools[0].memory == pools[1].memory, named("layers", type, {}), "not the KV that its operations write");
    }
}

}  // namespace

int main() {
    test_linear();
    show_digest("linear");
    test_attention();
    show_digest("attention");
    test_rms_norm();
    show_digest("rms_norm");
    test_swiglu();
    show_digest("swiglu");
    test_rope_kv_write();
    show_digest("rope_kv_write");
    test_checked_argmax();
    test_word_sum();
    test_checked_copy();
    test_layers();
    printf("%ld checks, %ld failed\n", checks, failures);
    return failures ? 1 : 0;
}
