"""llama.cpp as a contender: `bench/peers/.venv/bin/python -m bench.peers.llama_cpp FILE.gguf
THREADS CHUNK`.

Through the C interface of the library that llama-cpp-python builds, so that the batches are ours
and no tokenizer is needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import llama_cpp as lib
import numpy as np

from bench.peers.task import Answer, Task, prompts_of, serve

#: Maximum tokens per call, as in llama.cpp's tools, which split it by default.
_BATCH_TOKENS = 2048


class LlamaCppContender:
    """One call per prompt, then one call per step for all. KV is float16, llama.cpp's default."""

    def __init__(self, path: str, num_threads: int, chunk: int) -> None:
        """chunk: tokens that are computed at once (n_ubatch)."""
        lib.llama_backend_init()
        model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._model = model
        self._num_threads = num_threads
        self._chunk = chunk
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    def run(self, task: Task) -> Answer:
        """Run a task in a context of its size."""
        params = lib.llama_context_default_params()
        params.n_seq_max = task.batch
        # Rounded up, because llama.cpp divides its cells among the sequences.
        params.n_ctx = task.batch * (-(-(task.context + task.num_tokens) // 256) * 256)
        params.n_batch, params.n_ubatch = _BATCH_TOKENS, self._chunk
        params.n_threads = params.n_threads_batch = self._num_threads
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp cannot make a context for {task}")
        batch = lib.llama_batch_init(max(task.context, task.batch), 0, 1)
        try:
            return self._run(task, context, batch)
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)

    def _run(self, task: Task, context: lib.llama_context_p, batch: lib.llama_batch) -> Answer:
        sequences = prompts_of(task, self._vocab_size)
        started = time.perf_counter()
        for index, sequence in enumerate(sequences):
            entries = [(token, place, index) for place, token in enumerate(sequence)]
            sequence.extend(self._compute(context, batch, entries, [len(entries) - 1]))
        prefill_s = time.perf_counter() - started
        times = []
        for _ in range(task.num_tokens - 1):
            started = time.perf_counter()
            entries = [(s[-1], len(s) - 1, index) for index, s in enumerate(sequences)]
            chosen = self._compute(context, batch, entries, range(task.batch))
            times.append(time.perf_counter() - started)
            for sequence, token in zip(sequences, chosen, strict=True):
                sequence.append(token)
        written = tuple(tuple(sequence[task.context :]) for sequence in sequences)
        return Answer(prefill_s, tuple(times), written)

    def _compute(
        self,
        context: lib.llama_context_p,
        batch: lib.llama_batch,
        entries: Sequence[tuple[int, int, int]],
        wanted: Sequence[int],
    ) -> list[int]:
        """entries: (token, position, sequence). Returns the likeliest next token at each of the
        entries `wanted`."""
        batch.n_tokens = len(entries)
        for row, (token, position, sequence) in enumerate(entries):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = row in wanted
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama.cpp cannot compute the batch")
        shape = (self._vocab_size,)
        logits = (
            np.ctypeslib.as_array(lib.llama_get_logits_ith(context, row), shape) for row in wanted
        )
        return [int(row.argmax()) for row in logits]


def main() -> None:
    """Serve tasks until stdin ends."""
    path, num_threads, chunk = sys.argv[1:]
    serve(LlamaCppContender(path, int(num_threads), int(chunk)))


if __name__ == "__main__":
    main()
