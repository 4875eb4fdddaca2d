// Decoder layers: one call runs any number of consecutive stages. A layer has three:
//   0  norm, queries, keys and values, RoPE; keys and values go into the KV pool
//   1  attention
//   2  output layer, norm, gate and up, SwiGLU, down
// The stage after the last layer's is the final norm, in place. Each stage calls the operations of this library in the
// order of engine.torch.decoder.
#include "calls.h"

namespace {

struct Run {
    const Stages& s;
    int dtype, threads;

    bool is_f32() const { return dtype == 0; }

    void linear(const Weights* w, const void* x, const void* residual, void* out) const {
        baton_linear(w, x, residual, out, s.tokens, dtype, is_f32(), s.scratch, threads);
    }

    void norm(const void* x, const void* weight, void* out) const {
        baton_rms_norm(x, weight, s.is_wide, s.eps, out, s.tokens, s.hidden_size, dtype, threads);
    }

    char* head(void* x, long at) const { return (char*)x + at * s.dim * (is_f32() ? 4 : 2); }

    void norm_heads(const Layer& l) const {
        const long all = s.heads + 2 * s.kv_heads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1 && s.tokens > 32)
        for (long t = 0; t < s.tokens; t++) {
            char *query = head(s.qkv, t * all), *key = head(s.qkv, t * all + s.heads);
            baton_rms_norm(query, l.q_norm, s.is_wide, s.eps, query, s.heads, s.dim, dtype, 1);
            baton_rms_norm(key, l.k_norm, s.is_wide, s.eps, key, s.kv_heads, s.dim, dtype, 1);
        }
    }

    void write_kv(const Layer& l, long number) const {
        norm(s.hidden, l.input_norm, s.normalised);
        linear(l.qkv, s.normalised, nullptr, s.qkv);
        if (l.q_norm) norm_heads(l);
        RopeKvWrite write = *s.writes[l.plan];
        write.query = s.qkv;
        write.key = head(s.qkv, s.heads);
        write.value = head(s.qkv, s.heads + s.kv_heads);
        write.query_stride = write.key_stride = write.value_stride = (s.heads + 2 * s.kv_heads) * s.dim;
        write.out = s.query;
        write.key_out = s.key;
        write.to_layer = number * 2 * write.to_values;
        write.tokens = s.tokens;
        write.heads = s.heads;
        baton_rope_kv_write(&write, dtype, threads);
    }

    void attend(const Layer& l, long number) const {
        Attention attention = *s.plans[l.plan];
        attention.query = s.query;
        attention.out = s.mixed;
        attention.layer = number;
        baton_attention(&attention, dtype, threads);
    }

    void feed_forward(const Layer& l) const {
        linear(l.output, s.mixed, s.hidden, s.hidden);
        norm(s.hidden, l.post_norm, s.normalised);
        linear(l.gate_up, s.normalised, nullptr, s.gate_up);
        baton_swiglu(s.gate_up, s.gated, s.tokens, s.intermediate_size, dtype, threads);
        linear(l.down, s.gated, s.hidden, s.hidden);
    }
};

}  // namespace

extern "C" void baton_layers(const Stages* stages, long first, long end, int dtype, int threads) {
    const Run run{*stages, dtype, threads};
    for (long stage = first; stage < end; stage++) {
        const long index = stage / 3;
        if (index == stages->num_layers) {
            run.norm(stages->hidden, stages->norm, stages->hidden);
            continue;
        }
        const Layer& layer = stages->layers[index];
        const long number = stages->numbers[index];
        switch (stage % 3) {
            case 0: run.write_kv(layer, number); break;
            case 1: run.attend(layer, number); break;
            default: run.feed_forward(layer); break;
        }
    }
}
