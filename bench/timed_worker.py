"""A decode worker that notes when its engine's steps begin and end, and leaves the times in the
file $STEP_TIMES.

Run as a child of `bench.stations`, in place of decode_svc, with its options.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.config import DecodeOptions
from baton.engine.interface import Batch, Engine, KvPool, Launched, LayersDone
from baton.service import OnReady, main
from baton.types import Sample
from baton.worker.build import build_engine
from decode_svc.server import serve_decode

#: Names the file.
STEP_TIMES = "STEP_TIMES"

#: Of a step: begin and end in seconds of the machine's monotonic clock; its new tokens; and the
#: sequences that got one of them, each by its first block and the token's position.
StepTimes = tuple[float, float, int, Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class _TimedLaunch:
    """Implements baton.engine.interface.Launched."""

    launched: Launched
    begin_s: float
    batch: Batch
    steps: list[StepTimes]

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        samples = self.launched.samples()
        end_s = time.monotonic()
        decoded = [(p.block_table[0], p.start) for p in self.batch.slices if len(p.token_ids) == 1]
        self.steps.append((self.begin_s, end_s, self.batch.num_tokens, decoded))
        return samples


class TimedEngine:
    """Implements baton.engine.interface.Engine by another one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.spec = engine.spec
        self.steps: list[StepTimes] = []

    @property
    def kv(self) -> KvPool:
        return self._engine.kv

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        begin_s = time.monotonic()
        return _TimedLaunch(self._engine.launch(batch, layers_done), begin_s, batch, self.steps)

    def forward(
        self, batch: Batch, layers_done: LayersDone | None = None
    ) -> tuple[tuple[Sample, ...], ...]:
        return self.launch(batch, layers_done).samples()


async def serve_timed(options: DecodeOptions, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Decode worker that notes its steps."""
    engines: list[TimedEngine] = []

    def make_engine(own_options: DecodeOptions) -> Engine:
        engines.append(TimedEngine(build_engine(own_options)))
        return engines[-1]

    await serve_decode(options, stop, on_ready, make_engine)
    _leave([step for engine in engines for step in engine.steps])


def _leave(steps: Sequence[StepTimes]) -> None:
    Path(os.environ[STEP_TIMES]).write_text(json.dumps(steps), encoding="utf-8")


def read_steps(path: Path, begin_s: float) -> list[StepTimes]:
    """What a worker left in the file: the steps that began then or later."""
    return [step for step in json.loads(path.read_text(encoding="utf-8")) if step[0] >= begin_s]


if __name__ == "__main__":
    main(DecodeOptions, serve_timed, "decode")
