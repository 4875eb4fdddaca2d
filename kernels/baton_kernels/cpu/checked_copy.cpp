// Copies between blocks of a pool and one contiguous payload, and computes the payload's xxh3_64 (the published
// algorithm, for inputs of more than 240 bytes) in the same pass: each byte is read once.
//
// A whole block is one piece; otherwise each head's rows are one. Pieces are multiples of 64 bytes, the stripe of the
// hash.
#include "calls.h"
#include "words.h"

namespace {

constexpr long stripe_bytes = 64, stripes_per_block = 16, secret_bytes = 192;
constexpr uint64_t prime32_1 = 0x9E3779B1, prime32_2 = 0x85EBCA77, prime32_3 = 0xC2B2AE3D;
constexpr uint64_t prime64_1 = 0x9E3779B185EBCA87, prime64_2 = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t prime64_3 = 0x165667B19E3779F9, prime64_4 = 0x85EBCA77C2B2AE63;
constexpr uint64_t prime64_5 = 0x27D4EB2F165667C5;

// The algorithm's constant secret; the seed is alternately added and subtracted.
constexpr uint8_t default_secret[secret_bytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

// Cached copy, into memory that is read again soon.
struct Cached {
    static void store(char* p, u64x8 v) { store_u64(p, v); }
    static void finish() {}
};

// Streaming copy, into memory that is not read soon: avoids reading the lines to overwrite. Aligned to 64 bytes.
struct Streamed {
    static void store(char* p, u64x8 v) { stream_u64(p, v); }
    static void finish() { end_stream(); }
};

struct Hash {
    alignas(64) char secret[secret_bytes];
    u64x8 sums;
    long stripe = 0;  // within its block of stripes
    long num_bytes = 0;

    explicit Hash(uint64_t seed) {
        for (long i = 0; i < secret_bytes; i += 16) {
            uint64_t low, high;
            memcpy(&low, default_secret + i, 8);
            memcpy(&high, default_secret + i + 8, 8);
            low += seed, high -= seed;
            memcpy(secret + i, &low, 8);
            memcpy(secret + i + 8, &high, 8);
        }
        const uint64_t first[8] = {prime32_3, prime64_1, prime64_2, prime64_3,
                                   prime64_4, prime32_2, prime64_5, prime32_1};
        sums = load_u64(first);
    }

    u64x8 secret_at(long i) const { return load_u64(secret + i); }

    // sums[i ^ 1] += data[i]; sums[i] += low(keyed[i]) * high(keyed[i])
    void add(u64x8 data, u64x8 key) {
        sums = sums + (multiply_halves(data ^ key) + swap_neighbours(data));
    }

    void scramble() {
        const u64x8 mixed = sums ^ (sums >> 47);
        sums = multiply_by(mixed ^ secret_at(secret_bytes - stripe_bytes), prime32_1);
    }

    // Copies stripes, except the payload's last one.
    template <class Target>
    void copy(const char* source, char* target, long num_stripes) {
        num_bytes += num_stripes * stripe_bytes;
        for (long i = 0; i < num_stripes; i++) {
            const u64x8 data = load_u64(source + i * stripe_bytes);
            Target::store(target + i * stripe_bytes, data);
            add(data, secret_at(8 * stripe));
            if (++stripe == stripes_per_block) {
                scramble();
                stripe = 0;
            }
        }
    }

    // Copies the last stripe and returns the hash of all.
    template <class Target>
    uint64_t finish(const char* source, char* target) {
        const u64x8 data = load_u64(source);
        Target::store(target, data);
        Target::finish();
        add(data, secret_at(secret_bytes - stripe_bytes - 7));
        num_bytes += stripe_bytes;
        uint64_t lanes[8], keys[8];
        store_u64(lanes, sums);
        memcpy(keys, secret + 11, sizeof keys);
        uint64_t hash = (uint64_t)num_bytes * prime64_1;
        for (int i = 0; i < 8; i += 2) {
            const unsigned __int128 product =
                (unsigned __int128)(lanes[i] ^ keys[i]) * (lanes[i + 1] ^ keys[i + 1]);
            hash += (uint64_t)product ^ (uint64_t)(product >> 64);
        }
        hash ^= hash >> 37;
        hash *= 0x165667919E3779F9;
        return hash ^ (hash >> 32);
    }
};

// Pieces of a payload; the last one finishes the hash.
template <class Target>
struct Pass {
    Hash hash;
    long left;  // remaining bytes of the payload
    uint64_t checksum = 0;

    Pass(uint64_t seed, long payload_bytes) : hash(seed), left(payload_bytes) {}

    void copy(const char* source, char* target, long num_bytes) {
        left -= num_bytes;
        const long last = num_bytes - stripe_bytes;
        hash.copy<Target>(source, target, (left ? num_bytes : last) / stripe_bytes);
        if (!left) checksum = hash.finish<Target>(source + last, target + last);
    }
};

// Calls copy(address in the pool, address in the payload, bytes) for each piece of a range, in the payload's order.
template <class Copy>
void for_pieces(const KvRange& range, char* packed, Copy copy) {
    const auto give = [&](char* in_pool, long num_bytes) {
        copy(in_pool, packed, num_bytes);
        packed += num_bytes;
    };
    long token = range.first_token, left = range.num_tokens;
    for (const long* id = range.block_ids; left; id++, token = 0) {
        char* block = range.pool + *id * range.block_bytes;
        const long count = left < range.block_size - token ? left : range.block_size - token;
        if (count == range.block_size) {
            give(block, range.num_heads * range.head_bytes);
        } else {
            for (long head = 0; head < range.num_heads; head++)
                give(block + head * range.head_bytes + token * range.row_bytes, count * range.row_bytes);
        }
        left -= count;
    }
}

}  // namespace

extern "C" void baton_checked_gather(const KvRange* range, char* packed, long num_bytes, uint64_t seed,
                                     uint64_t* checksum) {
    Pass<Cached> pass(seed, num_bytes);
    for_pieces(*range, packed, [&](char* in_pool, char* in_payload, long n) { pass.copy(in_pool, in_payload, n); });
    *checksum = pass.checksum;
}

extern "C" void baton_checked_scatter(const KvRange* range, char* packed, long num_bytes, uint64_t seed,
                                      uint64_t* checksum) {
    Pass<Streamed> pass(seed, num_bytes);
    for_pieces(*range, packed, [&](char* in_pool, char* in_payload, long n) { pass.copy(in_payload, in_pool, n); });
    *checksum = pass.checksum;
}
