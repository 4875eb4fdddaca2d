"""OpenVINO GenAI as a contender: `PYTHON -m bench.peers.openvino_peer FOLDER DTYPE THREADS CHUNK`,
with the Python of bench/peers/.venv-openvino.

Its continuous batching in this process, a step at a time. The model is exported by optimum-intel
to bench/peers/.models, once for each type. Without prefix caching, because rounds repeat the
prompts.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.task import Answer, Task, prompts_of, serve

_MADE = Path(__file__).with_name(".models")
#: KV memory, in GiB.
_KV_GIB = 2
#: Its IR has no bfloat16.
_WEIGHTS = {"bfloat16": "fp16", "float32": "fp32"}
_PRECISION = {"bfloat16": "bf16", "float32": "f32"}


def exported(folder: Path, dtype: str) -> Path:
    """The checkpoint as OpenVINO reads it. Raises CalledProcessError."""
    output = _MADE / f"{folder.name}-openvino-{dtype}"
    if not output.exists():
        part = output.with_name(f"{output.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        options = ["--task", "text-generation-with-past", "--weight-format", _WEIGHTS[dtype]]
        subprocess.run(
            [*command, "--model", str(folder), *options, str(part)], check=True, stdout=sys.stderr
        )
        part.rename(output)
    return output


class OpenVinoContender:
    """All prompts at once, as a server would get them."""

    def __init__(self, folder: Path, dtype: str, num_threads: int, chunk: int) -> None:
        """chunk: tokens of a step."""
        import openvino_genai as genai

        scheduler: Any = genai.SchedulerConfig()
        scheduler.cache_size = _KV_GIB
        scheduler.max_num_seqs = 16
        scheduler.max_num_batched_tokens = chunk
        scheduler.enable_prefix_caching = False
        settings = {
            "INFERENCE_NUM_THREADS": num_threads,
            "INFERENCE_PRECISION_HINT": _PRECISION[dtype],
        }
        path = str(exported(folder, dtype))
        self._pipeline: Any = genai.ContinuousBatchingPipeline(path, scheduler, "CPU", settings)
        self._vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        self._num_requests = 0

    def run(self, task: Task) -> Answer:
        import openvino
        import openvino_genai as genai

        rules: Any = genai.GenerationConfig()
        rules.max_new_tokens, rules.ignore_eos, rules.do_sample = task.num_tokens, True, False
        written: list[list[int]] = [[] for _ in range(task.batch)]
        started_s = time.perf_counter()
        handles = []
        for prompt in prompts_of(task, self._vocab_size):
            self._num_requests += 1
            ids = openvino.Tensor(np.array([prompt], np.int64))
            handles.append(self._pipeline.add_request(self._num_requests, ids, rules))
        times_s: list[float] = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            at_s = time.perf_counter()
            for tokens, handle in zip(written, handles, strict=True):
                if handle.can_read():
                    tokens.extend(*(output.generated_ids for output in handle.read().values()))
            if all(written):
                times_s.append(at_s)
        steps_s = tuple(after - before for before, after in pairwise(times_s))
        return Answer(times_s[0] - started_s, steps_s, tuple(map(tuple, written)))


def main() -> None:
    """Serve tasks until stdin ends."""
    folder, dtype, num_threads, chunk = sys.argv[1:]
    serve(OpenVinoContender(Path(folder), dtype, int(num_threads), int(chunk)))


if __name__ == "__main__":
    main()
