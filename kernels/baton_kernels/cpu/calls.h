// What the library offers, as the Python files beside this one describe it to ctypes. is_bf16: bfloat16, or else float32.
#pragma once
#include <stdint.h>

struct Weights;  // see linear.cpp

// As baton_kernels.cpu.paged_attention describes it to ctypes.
struct Attention {
    const void* query;  // [tokens][heads][dim]
    void* out;          // like query
    const char* pool;   // [blocks][layers][2][kv_heads][block_size][dim]: see baton_kernels.kv_write
    const char* scales; // null if the pool has none
    long stored, row_bytes, head_bytes;  // head_bytes: from a block's rows of one head to those of the next
    long layer, num_layers, heads, kv_heads, block_size, dim;
    float scale;
    long window;        // positions that a token sees, itself included; 0: all
    long num_seqs;
    const int64_t* first_row;   // [seqs]: of its new tokens in query
    const int64_t* num_tokens;  // [seqs]
    const int64_t* start;       // [seqs]: position of the first new token
    const int64_t* tables;      // block tables, one after the other
    const int64_t* table_at;    // [seqs]: where each begins
    const int64_t* task_at;     // [seqs + 1]: number of tasks of the sequences before
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

extern "C" {
// Bytes of scratch memory that baton_linear needs for each row.
void baton_linear_scratch(const Weights* w, int64_t* row_bytes);
// residual, or null, may be `out`.
void baton_linear(const Weights* w, const void* x, const void* residual, void* out, long rows,
                  int is_bf16, int out_is_f32, void* scratch, int threads);
void baton_attention(const Attention* call, int is_bf16, int threads);
// out may be x.
void baton_rms_norm(const void* x, const void* weight, float eps, void* out, long rows, long dim,
                    int is_bf16, int threads);
void baton_swiglu(const void* gate_up, void* out, long rows, long dim, int is_bf16, int threads);
void baton_rope_kv_write(const RopeKvWrite* call, int is_bf16, int threads);
}
