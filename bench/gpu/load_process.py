"""Background load: an engine that keeps this device busy while its process lives. See `beside`.

Standard output: JSON objects, one per line, {"tokens": count, "ms": time}, for each prompt of 8K
tokens or each round of decode steps. The first one signals that the load is running.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from bench.gpu.engine_speed import BLOCK_SIZE, load_model
from bench.gpu.graph_speed import Replayed
from bench.gpu.interpreter import mend_interpreter, on_kernels
from bench.gpu.setting import Setting
from engine.interface import Batch

_STEPS_OF_ROUND = 20


@contextmanager
def beside(kind: str, setting: Setting) -> Iterator[Callable[[], float]]:
    """Run a background load in another process on this device: prompts of 8K tokens in chunks of 2K
    (`prefill`), or decode steps of 64 sequences of 1K tokens with graphs (`decode`). The yielded
    function ends it and returns its tokens per second since it started working."""
    command = [sys.executable, "-m", "bench.gpu.load_process", kind]
    command += [str(setting.seed), str(setting.device)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as other,
    ):

        def end() -> float:
            other.kill()
            rounds = [json.loads(line) for line in other.stdout or () if line.endswith(b"}\n")]
            seconds = sum(done["ms"] for done in rounds) / 1000
            return sum(done["tokens"] for done in rounds) / seconds if rounds else 0.0

        try:
            if other.stdout is None or not other.stdout.readline():
                errors.seek(0)
                raise RuntimeError(errors.read().decode(errors="replace")[-800:])
            yield end
        finally:
            other.kill()


def _prefill(setting: Setting) -> None:
    chunk, total = setting.pick(2048, 8), setting.pick(8192, 16)
    model = load_model(setting, 2 * total)

    def run() -> None:
        for at in range(0, total, chunk):
            model.engine.forward(Batch((model.part(0, at, chunk),)))

    _repeat(run, total)


def _decode(setting: Setting) -> None:
    num_seqs, cached = setting.pick(64, 1), setting.pick(1023, 9)
    model = load_model(setting, num_seqs * (cached + 1 + BLOCK_SIZE))
    batch = model.batch(num_seqs, cached, 1)
    with on_kernels(setting):
        found = Replayed(setting, model, model.decoder, num_seqs, setting.pick(2048, 64))

        def run() -> None:
            for _ in range(setting.pick(_STEPS_OF_ROUND, 1)):
                found.engine.forward(batch)

        _repeat(run, num_seqs * setting.pick(_STEPS_OF_ROUND, 1))


def _repeat(run: Callable[[], None], num_tokens: int) -> None:
    while True:
        start = time.perf_counter()
        run()
        ms = (time.perf_counter() - start) * 1000
        print(json.dumps({"tokens": num_tokens, "ms": ms}), flush=True)


def main() -> None:
    kind, seed, name = sys.argv[1:]
    device = torch.device(name)
    half = torch.bfloat16
    if device.type == "cpu":
        mend_interpreter()
        half = torch.float16
    with torch.inference_mode():
        {"prefill": _prefill, "decode": _decode}[kind](Setting(device, half, int(seed)))


if __name__ == "__main__":
    main()
