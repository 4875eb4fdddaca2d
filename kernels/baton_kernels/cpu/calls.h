// What the library offers, as the Python files beside this one describe it to ctypes. dtype: what is computed in, float32,
// bfloat16 or float16, as baton_kernels.cpu.calling numbers types.
#pragma once
#include <stdint.h>

// Weights of a linear layer, packed as linear.cpp reads them. As baton_kernels.cpu.linear describes it to ctypes.
struct Weights {
    long num_out, num_in;
    long format;
    long group_size;      // values of k that share a scale; integers only
    const char* data;
    const float* scales;  // [tiles][groups][64]; integers only
    const float* zeros;   // like scales, or null where every zero point is `zero`
    float zero;
    const float* bias;    // [num_out] or null
};

// As baton_kernels.cpu.paged_attention describes it to ctypes.
struct Attention {
    const void* query;  // [tokens][heads][dim]
    void* out;          // like query
    const char* pool;   // [blocks][layers][parts][kv_heads][block_size][dim]: see baton_kernels.kv_write
    const char* scales; // null if the pool has none
    long stored, row_bytes, head_bytes;  // head_bytes: from a block's rows of one head to those of the next
    long layer, num_layers, parts, heads, kv_heads, block_size, dim;  // parts: keys and values, or 1: rows are both
    float scale;
    long window;        // positions that a token sees, itself included; 0: all
    long num_seqs;
    const int64_t* first_row;   // [seqs]: of its new tokens in query
    const int64_t* num_tokens;  // [seqs]
    const int64_t* start;       // [seqs]: position of the first new token
    const int64_t* tables;      // block tables, one after the other
    const int64_t* table_at;    // [seqs]: where each begins
    const int64_t* task_at;     // [seqs + 1]: number of tasks of the sequences before
    // Terms that only some models have: see baton_kernels.paged_attention.ScoreTerms.
    float softcap;       // 0: none
    const float* sinks;  // [heads] or null
    const float* slopes; // [heads] or null
};

// As baton_kernels.cpu.rope_kv_write describes it to ctypes.
struct RopeKvWrite {
    const void *query, *key, *value;      // [tokens][heads or kv_heads][dim], tokens a stride apart
    long query_stride, key_stride, value_stride;  // elements
    const void *cos, *sin;                // [tokens][dim / 2]
    void *out, *key_out;                  // [tokens][heads or kv_heads][dim]
    char* pool;                           // see baton_kernels.kv_write
    float* scales;                        // null if the pool has none
    long stored, row_bytes, head_bytes;   // head_bytes: from a block's rows of one head to those of the next
    const int64_t* rows;                  // of the first head: see baton_kernels.kv_write.head_rows; negative: not written
    long row_stride;                      // from a token's row to the next token's, in `rows`
    long to_layer, to_values;             // rows from the first layer's keys to this one's, and on to its values
    long tokens, heads, kv_heads, dim, block_size;
};

// Tokens of blocks one after the other, of some layers. As baton_kernels.cpu.checked_copy describes it to ctypes.
struct KvRange {
    char* pool;               // the first of the layers in block 0
    const long* block_ids;    // of the block with the first token, and those behind it
    long block_bytes;         // from one block to the next
    long num_heads, head_bytes;  // heads of all the layers' keys and values; from one's rows in a block to the next's
    long row_bytes, block_size;
    long first_token;         // within the first block
    long num_tokens;
};

// As baton_kernels.cpu.experts describes it to ctypes.
struct Route {
    const float* logits;   // [tokens][experts]
    const float* bias;     // [experts] or null
    int32_t* chosen;       // [tokens][num_chosen], ascending
    float* weights;        // like chosen
    long tokens, experts, num_chosen, groups, chosen_groups, group_top;
    int is_sigmoid, is_normalised;
    float scale;
};

// As baton_kernels.cpu.experts describes it to ctypes.
struct GroupedLinear {
    const Weights* const* experts;
    long num_experts;
    const int32_t* chosen;    // [rows]
    long rows, repeat;
    const char* x;            // [rows / repeat][num_in]
    char* out;                // [rows][num_out]
    int64_t* order;           // [rows + num_experts + 1]
    char *gathered, *products;  // [rows][num_in], [rows][num_out]
    void* scratch;            // as baton_linear takes it
};

// A decoder's layers: see layers.cpp. As baton_kernels.cpu.layers describes it to ctypes.
struct Layer {
    const void* input_norm;
    const Weights* qkv;
    const void *q_norm, *k_norm;  // or null, both
    const Weights* output;
    const void* post_norm;
    const Weights *gate_up, *down;
    long plan;                    // which of Stages::plans
};

struct Stages {
    const Layer* layers;
    long num_layers;
    const void* norm;  // of the last layer's results
    long hidden_size, intermediate_size, heads, kv_heads, dim;
    float eps;
    int is_wide;       // see baton_rms_norm
    const Attention* const* plans;  // of this step; all but query, out and layer are filled in
    const RopeKvWrite* const* writes;  // for the layers of each plan; all but what is of one layer, tokens and heads
    const int64_t* numbers;  // of each layer, in the pool that it is in
    long tokens;
    void* hidden;      // [tokens][hidden_size], in and out
    void* mixed;       // [tokens][heads][dim]: out of stage 1, into stage 2
    // What stages need within, for `tokens`:
    void* normalised;  // like hidden
    void* qkv;         // [tokens][heads + 2 kv_heads][dim]
    void* query;       // [tokens][heads][dim]
    void* key;         // [tokens][kv_heads][dim]
    void* gate_up;     // [tokens][2][intermediate_size]
    void* gated;       // [tokens][intermediate_size]
    void* scratch;     // as baton_linear takes it
};

extern "C" {
// Bytes of scratch memory that baton_linear needs for each row.
void baton_linear_scratch(const Weights* w, int64_t* row_bytes);
// words [num_out][num_words], as a Weights' data wants them.
void baton_pack(const int32_t* words, long num_out, long num_words, int32_t* packed, int threads);
// residual, or null, may be `out`.
void baton_linear(const Weights* w, const void* x, const void* residual, void* out, long rows,
                  int dtype, int out_is_f32, void* scratch, int threads);
void baton_attention(const Attention* call, int dtype, int threads);
// out may be x. is_wide: weight is float32, and the product is rounded once.
void baton_rms_norm(const void* x, const void* weight, int is_wide, float eps, void* out, long rows,
                    long dim, int dtype, int threads);
void baton_swiglu(const void* gate_up, void* out, long rows, long dim, int dtype, int threads);
void baton_geglu(const void* gate_up, void* out, long rows, long dim, int dtype, int threads);
void baton_clamped_swiglu(const void* gate_up, void* out, long rows, long dim, int dtype,
                          int threads);
void baton_rope_kv_write(const RopeKvWrite* call, int dtype, int threads);
void baton_route(const Route* call, int threads);
void baton_grouped_linear(const GroupedLinear* call, int dtype, int threads);
// parts [tokens * chosen][dim]; weights [tokens][chosen]; shared, residual [tokens][dim] or null.
void baton_combine(const void* parts, const float* weights, const void* shared, const void* residual,
                   void* out, long tokens, long chosen, long dim, int dtype, int threads);
// Stages [first, end), counted over all layers; their number is at most 3 num_layers + 1.
void baton_layers(const Stages* stages, long first, long end, int dtype, int threads);
// logits [rows][vocab], vocab below 2^31; chosen, verdicts [rows].
void baton_checked_argmax(const float* logits, long rows, long vocab, int64_t* chosen, int64_t* verdicts,
                          int threads);
// The same, temperature, top_k, top_p and min_p [rows], keys [rows][2]: see draw_rows in baton_kernels/sampling.py.
void baton_draw_rows(const float* logits, long rows, long vocab, const float* temperature, const int64_t* top_k,
                     const float* top_p, const float* min_p, const int32_t* keys, int64_t* chosen,
                     int64_t* verdicts, int threads);
// words [count]; key: that of the first of them.
void baton_word_sum(const uint64_t* words, long count, uint64_t key, uint64_t* sum);
// Between blocks of a pool and a payload of num_bytes, more than 240; its xxh3_64 with that seed.
void baton_checked_gather(const KvRange* range, char* packed, long num_bytes, uint64_t seed, uint64_t* checksum);
void baton_checked_scatter(const KvRange* range, char* packed, long num_bytes, uint64_t seed, uint64_t* checksum);
}
