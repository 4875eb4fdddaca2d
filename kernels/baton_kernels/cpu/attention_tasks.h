// Causal attention over the paged KV pool, read in place. Keys are copied first, 64 at a time, only if their type is
// not the compute type, if a block is no multiple of 16 tokens, or at the edge of a window.
//
// Each step prefetches the keys and values of the next one into the L2 cache, line by line while it reads its own. The
// last step of a task prefetches for the thread's next task.
//
// A task is up to kTaskRows query rows (tokens x heads that share a KV head) of one sequence and KV head. It processes
// keys in steps of 64, at positions divisible by 64, with the running maximum and sum of the online softmax (Milakov
// and Gimelshein 2018, "Online normalizer calculation for softmax"; FlashAttention, Dao et al. 2022, section 3.1). A
// row's result depends on its query and the keys that it sees alone, not on other rows, the chunk or the batch.
//
// Few rows (a decode step) run with keys in lanes (attention_few_rows.h), many with rows in lanes
// (attention_many_rows.h). Both run the same operations on the same numbers in the same order, so their results are
// bit-identical.
#pragma once
#include "attention_few_rows.h"
#include "attention_many_rows.h"

namespace {

constexpr long kTaskRows = 64;

template <class T>
void run(const Attention& c, const Task& t, const Task* after) {
    switch (t.rows) {
        case 1: run_few_rows<T, 1>(c, t, after); break;
        case 2: run_few_rows<T, 2>(c, t, after); break;
        case 3: run_few_rows<T, 3>(c, t, after); break;
        case 4: run_few_rows<T, 4>(c, t, after); break;
        case 5: run_few_rows<T, 5>(c, t, after); break;
        case 6: run_few_rows<T, 6>(c, t, after); break;
        case 7: run_few_rows<T, 7>(c, t, after); break;
        case 8: run_few_rows<T, 8>(c, t, after); break;
        default: run_many_rows<T>(c, t, after); break;
    }
}

// Task i of the call.
Task task_of(const Attention& c, long i) {
    long low = 0, high = c.num_seqs;
    while (high - low > 1) {
        const long middle = (low + high) / 2;
        (c.task_at[middle] <= i ? low : high) = middle;
    }
    const long per_kv = c.heads / c.kv_heads, own = i - c.task_at[low];
    const long first = own / c.kv_heads * kTaskRows, left = c.num_tokens[low] * per_kv - first;
    const long rows = left < kTaskRows ? left : kTaskRows;
    const long first_position = c.start[low] + first / per_kv;
    const long oldest = c.window && first_position >= c.window ? first_position - c.window + 1 : 0;
    return {low, own % c.kv_heads, first, rows, oldest, c.start[low] + (first + rows - 1) / per_kv};
}

}  // namespace

// Each thread reserves its next task before it runs the current one, to prefetch for it.
template <class T>
void attend(const Attention& c, int threads) {
    const long num_tasks = c.task_at[c.num_seqs];
    long taken = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (long i = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED); i < num_tasks;) {
        const long next = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
        const Task now = task_of(c, i), after = next < num_tasks ? task_of(c, next) : now;
        run<T>(c, now, next < num_tasks ? &after : nullptr);
        i = next;
    }
}
