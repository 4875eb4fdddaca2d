// Attention over the paged KV pool: see attention_tasks.h.
#include "attention.h"

extern "C" void baton_attention(const Attention* call, int dtype, int threads) {
    with_type(dtype, [=](auto t) { attend<decltype(t)>(*call, threads); });
}
