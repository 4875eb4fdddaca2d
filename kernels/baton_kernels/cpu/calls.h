// Functions and structs of the library; the Python files in this folder describe them to ctypes. dtype: compute type,
// float32, bfloat16 or float16, as numbered by baton_kernels.cpu.calling.
#pragma once
#include <stdint.h>

// Weights of a linear layer, packed as in linear.cpp. ctypes twin: baton_kernels.cpu.linear.
struct Weights {
    long num_out, num_in;
    long format;
    long group_size;      // values of k that share a scale; integers only
    const char* data;
    const float* scales;  // [tiles][groups][64]; integers only
    const float* zeros;   // like scales, or null if every zero point is `zero`
    float zero;
    const float* bias;    // [num_out] or null
    long has_group_inputs;  // whether x is rounded with a scale per group of k, not per row; integers only
};

// Arguments of attention. ctypes twin: baton_kernels.cpu.paged_attention.
struct Attention {
    const void* query;  // [tokens][heads][dim]
    void* out;          // like query
    const char* pool;   // [blocks][layers][parts][kv_heads][block_size][dim]: see baton_kernels.kv_write
    const char* scales; // null if the pool has none
    long stored, row_bytes, head_bytes;  // head_bytes: from one head's rows of a block to the next head's
    long layer, num_layers, parts, heads, kv_heads, block_size, dim;  // parts: 2 (keys and values), or 1: rows are both
    float scale;
    long window;        // positions that a token sees, itself included; 0: all
    long num_seqs;
    const int64_t* first_row;   // [seqs]: row of its first new token in query
    const int64_t* num_tokens;  // [seqs]
    const int64_t* start;       // [seqs]: position of the first new token
    const int64_t* tables;      // block tables, concatenated
    const int64_t* table_at;    // [seqs]: start of its table in `tables`
    const int64_t* task_at;     // [seqs + 1]: number of tasks of all earlier sequences
    // Terms that some models add: see baton_kernels.paged_attention.ScoreTerms.
    float softcap;       // 0: none
    const float* sinks;  // [heads] or null
    const float* slopes; // [heads] or null
};

// Arguments of RoPE and the KV write. ctypes twin: baton_kernels.cpu.rope_kv_write.
struct RopeKvWrite {
    const void *query, *key, *value;      // [tokens][heads or kv_heads][dim], tokens a stride apart
    long query_stride, key_stride, value_stride;  // elements
    const void *cos, *sin;                // [tokens][dim / 2]
    void *out, *key_out;                  // [tokens][heads or kv_heads][dim]
    char* pool;                           // see baton_kernels.kv_write
    float* scales;                        // null if the pool has none
    long stored, row_bytes, head_bytes;   // head_bytes: from one head's rows of a block to the next head's
    const int64_t* rows;                  // of the first head: see baton_kernels.kv_write.head_rows; negative: not written
    long row_stride;                      // from a token's row to the next token's, in `rows`
    long to_layer, to_values;             // rows from the first layer's keys to this layer's, and from these to its values
    long tokens, heads, kv_heads, dim, block_size;
};

// A range of tokens in consecutive table blocks, for some layers. ctypes twin: baton_kernels.cpu.checked_copy.
struct KvRange {
    char* pool;               // address of the first of the layers in block 0
    const long* block_ids;    // block with the first token, and those after it
    long block_bytes;         // from one block to the next
    long num_heads, head_bytes;  // heads of all the layers' keys and values; bytes from one head's rows of a block to the next head's
    long row_bytes, block_size;
    long first_token;         // within the first block
    long num_tokens;
};

// ctypes twin: baton_kernels.cpu.experts.
struct Route {
    const float* logits;   // [tokens][experts]
    const float* bias;     // [experts] or null
    int32_t* chosen;       // [tokens][num_chosen], ascending
    float* weights;        // like chosen
    long tokens, experts, num_chosen, groups, chosen_groups, group_top;
    int is_sigmoid, is_normalised;
    float scale;
};

// ctypes twin: baton_kernels.cpu.experts.
struct GroupedLinear {
    const Weights* const* experts;
    long num_experts;
    const int32_t* chosen;    // [rows]
    long rows, repeat;
    const char* x;            // [rows / repeat][num_in]
    char* out;                // [rows][num_out]
    int64_t* order;           // [rows + num_experts + 1]
    char *gathered, *products;  // [rows][num_in], [rows][num_out]
    void* scratch;            // for baton_linear
};

// Decoder layers: see layers.cpp. ctypes twin: baton_kernels.cpu.layers.
struct Layer {
    const void* input_norm;
    const Weights* qkv;
    const void *q_norm, *k_norm;  // both or neither are null
    const Weights* output;
    const void* post_norm;
    const Weights *gate_up, *down;
    long plan;                    // index in Stages::plans
};

struct Stages {
    const Layer* layers;
    long num_layers;
    const void* norm;  // norm after the last layer
    long hidden_size, intermediate_size, heads, kv_heads, dim;
    float eps;
    int is_wide;       // see baton_rms_norm
    const Attention* const* plans;  // of this step, without query, out and layer
    const RopeKvWrite* const* writes;  // per plan, without what depends on the layer, tokens or heads
    const int64_t* numbers;  // number of each layer in its pool
    long tokens;
    void* hidden;      // [tokens][hidden_size], in and out
    void* mixed;       // [tokens][heads][dim]: output of stage 1, input of stage 2
    // Scratch buffers of the stages, for `tokens` tokens:
    void* normalised;  // like hidden
    void* qkv;         // [tokens][heads + 2 kv_heads][dim]
    void* query;       // [tokens][heads][dim]
    void* key;         // [tokens][kv_heads][dim]
    void* gate_up;     // [tokens][2][intermediate_size]
    void* gated;       // [tokens][intermediate_size]
    void* scratch;     // for baton_linear
};

extern "C" {
// Scratch bytes per row that baton_linear needs.
void baton_linear_scratch(const Weights* w, int64_t* row_bytes);
// words [num_out][num_words], in the layout of Weights::data.
void baton_pack(const int32_t* words, long num_out, long num_words, int32_t* packed, int threads);
// residual may be null, or equal to `out`.
void baton_linear(const Weights* w, const void* x, const void* residual, void* out, long rows,
                  int dtype, int out_is_f32, void* scratch, int threads);
void baton_attention(const Attention* call, int dtype, int threads);
// out may equal x. is_wide: weight is float32, and the product is rounded once.
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
// Runs stages [first, end), counted over all layers; there are 3 num_layers + 1.
void baton_layers(const Stages* stages, long first, long end, int dtype, int threads);
// logits [rows][vocab], vocab below 2^31; chosen, verdicts [rows].
void baton_checked_argmax(const float* logits, long rows, long vocab, int64_t* chosen, int64_t* verdicts,
                          int threads);
// Draws, with temperature, top_k, top_p and min_p [rows] and keys [rows][2]: see draw_rows in
// baton_kernels/sampling.py.
void baton_draw_rows(const float* logits, long rows, long vocab, const float* temperature, const int64_t* top_k,
                     const float* top_p, const float* min_p, const int32_t* keys, int64_t* chosen,
                     int64_t* verdicts, int threads);
// words [count]; key: key of the first word.
void baton_word_sum(const uint64_t* words, long count, uint64_t key, uint64_t* sum);
// Copies between blocks of a pool and a payload of num_bytes > 240; returns its xxh3_64 with that seed.
void baton_checked_gather(const KvRange* range, char* packed, long num_bytes, uint64_t seed, uint64_t* checksum);
void baton_checked_scatter(const KvRange* range, char* packed, long num_bytes, uint64_t seed, uint64_t* checksum);
}
