"""Where a decode step of one sequence spends its time on a CPU: its parts beside their floors. See
bench/README.md.

    python -m bench.step_profile [--model 125m] [--dtype bfloat16] [--context 512] [--steps 60]
        [--threads N] [--json FILE]

Parts are timed from outside, one call for each stage of each layer, which makes a step a little
longer: steps that nobody looks into take turns with those. The floor of a part is reading its
weights, or its KV, once at the roof measured before.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import ParamSpec, TypeVar
from unittest.mock import patch

from baton.engine import step_runner, torch_engine
from baton.engine.load_engine import load_engine
from baton.engine.torch_engine import TorchEngine
from baton.model.config import ModelConfig, read_config
from baton.model.decoder import Decoder
from baton_kernels.cpu.layers import NUM_STAGES, RunningLayers
from baton_kernels.cpu.library import library
from bench.machine import document_of, now, publish
from bench.peers.comparison import use_cores
from bench.peers.models import NAMES, checkpoint
from bench.peers.ours import next_tokens
from bench.roof import Roof, measure_roof
from bench.suite.engine_tables import profile_table

_BLOCK_TOKENS = 16

METADATA, LOGITS, DRAWING, REST = "metadata", "output layer", "drawing", "the rest"
#: Of a layer, in their order.
STAGES = (
    "norm, queries, keys and values, RoPE, KV written",
    "attention",
    "output of attention, norm, gate and up, SwiGLU, down",
)
PARTS = (METADATA, *STAGES, LOGITS, DRAWING, REST)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Stopwatch:
    """Seconds by part, of what runs while it watches."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Native layers run stage by stage meanwhile."""
        calls = (
            (step_runner, "pack_batch", METADATA),
            (Decoder, "logits", LOGITS),
            (torch_engine, "draw", DRAWING),
        )
        with ExitStack() as stack:
            for owner, name, part in calls:
                timed = self._timed(part, getattr(owner, name))
                stack.enter_context(patch.object(owner, name, timed))
            stack.enter_context(patch.object(RunningLayers, "run", self._by_stage()))
            yield

    def _timed(self, part: str, call: Callable[_P, _R]) -> Callable[_P, _R]:
        def run(*arguments: _P.args, **named: _P.kwargs) -> _R:
            begin_s = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds[part] += time.perf_counter() - begin_s

        return run

    def _by_stage(self) -> Callable[[RunningLayers, int, int], None]:
        stages = [self._timed(part, RunningLayers.run) for part in STAGES]

        def run(running: RunningLayers, first: int, end: int) -> None:
            for stage in range(first, end):
                stages[stage % NUM_STAGES](running, stage, stage + 1)

        return run


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds, medians. step_ms: of steps that nobody looked into; parts_ms: of those that
    were, by PARTS."""

    step_ms: float
    parts_ms: Mapping[str, float]


def profile_steps(engine: TorchEngine, context: int, num_steps: int) -> Profile:
    """Of one sequence with `context` tokens and more, in shuffled blocks: num_steps of each kind,
    by turns."""
    num_blocks = -(-(context + 2 * num_steps + 3) // engine.spec.layout.block_size)
    table = random.Random(0).sample(range(num_blocks), num_blocks)
    tokens = [random.Random(context).randrange(10, engine.spec.vocab_size) for _ in range(context)]
    tokens += next_tokens(engine, [(tokens, 0, table)])
    alone_s: list[float] = []
    watched: list[dict[str, float]] = []
    for index in range(2 + 2 * num_steps):
        stopwatch = Stopwatch()
        is_watched = bool(index % 2)
        with stopwatch.watching() if is_watched else nullcontext():
            begin_s = time.perf_counter()
            tokens += next_tokens(engine, [(tokens, len(tokens) - 1, table)])
            seconds = time.perf_counter() - begin_s
        if index < 2:
            continue
        if is_watched:
            watched.append({REST: seconds - sum(stopwatch.seconds.values()), **stopwatch.seconds})
        else:
            alone_s.append(seconds)
    parts_ms = {part: median(one[part] for one in watched) * 1e3 for part in PARTS}
    return Profile(median(alone_s) * 1e3, parts_ms)


def floors_ms(config: ModelConfig, dtype: str, context: int, roof: Roof) -> dict[str, float]:
    """Of each part, for one sequence with KV in bfloat16; 0 for what reads next to nothing. dtype:
    of weights, bfloat16 or int8."""
    hidden, dim = config.hidden_size, config.head_dim
    weight_bytes = 1 if dtype == "int8" else 2
    num_qkv = hidden * (config.num_heads + 2 * config.num_kv_heads) * dim
    num_others = config.num_heads * dim * hidden + 3 * hidden * config.intermediate_size
    num_read = {
        STAGES[0]: config.num_layers * num_qkv * weight_bytes,
        STAGES[1]: config.num_layers * 2 * config.num_kv_heads * dim * context * 2,
        STAGES[2]: config.num_layers * num_others * weight_bytes,
        LOGITS: config.vocab_size * hidden * weight_bytes,
    }
    return {part: num_read.get(part, 0) / roof.read_bytes_per_s * 1e3 for part in PARTS}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=NAMES, default="125m")
    parser.add_argument("--dtype", choices=("bfloat16", "int8"), default="bfloat16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    if library() is None:
        parser.error(
            "there are no native kernels on this machine, whose stages could be timed apart"
        )
    started = now()
    use_cores(given.threads)
    folder = checkpoint(given.model, given.dtype)
    engine = load_engine(
        str(folder),
        dtype="bfloat16",
        num_blocks=-(-(given.context + 2 * given.steps + 3) // _BLOCK_TOKENS),
        block_size=_BLOCK_TOKENS,
        num_threads=given.threads,
        progress=lambda _: None,
    )
    roof = measure_roof()
    profile = profile_steps(engine, given.context, given.steps)
    floors = floors_ms(read_config(folder), given.dtype, given.context + given.steps, roof)
    data = {
        "model": given.model,
        "dtype": given.dtype,
        "context": given.context + given.steps,
        "num_threads": given.threads,
        "roof": dataclasses.asdict(roof),
        "floors_ms": floors,
        **dataclasses.asdict(profile),
    }
    publish(document_of("bench.step_profile", started, data), given.json, profile_table)


if __name__ == "__main__":
    main()
