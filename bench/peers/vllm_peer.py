"""vLLM on a CPU as a contender: `PYTHON -m bench.peers.vllm_peer FOLDER DTYPE THREADS CHUNK`, with
the Python of bench/peers/.venv-vllm.

Its engine in this process, a step at a time, so that the times are those of steps. Without prefix
caching, because rounds repeat the prompts.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import pairwise

from bench.peers.task import Answer, Task, prompts_of, serve

#: KV memory of the engine, in GiB.
_KV_GIB = "2"


class VllmContender:
    """All prompts at once, as a server would get them."""

    def __init__(self, folder: str, dtype: str, chunk: int) -> None:
        """chunk: tokens of a step."""
        from vllm import EngineArgs, LLMEngine

        arguments = EngineArgs(
            model=folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=2048,
            max_num_seqs=16,
            max_num_batched_tokens=chunk,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self._vocab_size = self._engine.model_config.get_vocab_size()
        self._num_tasks = 0

    def run(self, task: Task) -> Answer:
        from vllm import SamplingParams

        self._num_tasks += 1
        params = SamplingParams(
            temperature=0, max_tokens=task.num_tokens, ignore_eos=True, detokenize=False
        )
        started_s = time.perf_counter()
        for index, prompt in enumerate(prompts_of(task, self._vocab_size)):
            name = f"{self._num_tasks}-{index:04}"
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        written: dict[str, tuple[int, ...]] = {}
        times_s: list[float] = []
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                written[output.request_id] = tuple(output.outputs[0].token_ids)
            if len(written) == task.batch:
                times_s.append(time.perf_counter())
        steps_s = tuple(after - before for before, after in pairwise(times_s))
        return Answer(times_s[0] - started_s, steps_s, tuple(written[n] for n in sorted(written)))


def main() -> None:
    """Serve tasks until stdin ends."""
    folder, dtype, num_threads, chunk = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = _KV_GIB
    os.environ["OMP_NUM_THREADS"] = num_threads
    answers, sys.stdout = sys.stdout, sys.stderr  # its logs are no answers
    contender = VllmContender(folder, dtype, int(chunk))
    sys.stdout = answers
    serve(contender)


if __name__ == "__main__":
    main()
