"""Host work per decode step that launching steps ahead hides. See bench/README.md.

    python -m bench.ahead [--num-seqs 64 ...] [--step-ms 6] [--json FILE]

A decode core over an engine with steps of --step-ms that use no CPU, as on a device: milliseconds
from step to step, first when each step waits for the previous tokens, then when it is launched
before they exist.

    python -m bench.ahead --context 1024 8192 32768 [--num-seqs 1 64 256]

The same core over the real engine on a stub device that takes no time: host milliseconds per step,
by sequences and tokens of context, and the part of Engine.launch.

    python -m bench.ahead --prompts 64 512 8192 [--chunk 2048] [--step-ms 20]

A prefill core over the real engine on a stub device that takes --step-ms per step of --chunk
tokens: milliseconds from step to step while prompts of each length are computed and handed off,
without and with launching ahead.

    python -m bench.ahead --prefill 512 --context 1024 8192 32768 [--num-seqs 1 64 256]

Time of Engine.launch for steps with --prefill tokens of a prompt and decoding sequences of
--context tokens: with block tables kept on the device, and with tables sent in each step.
"""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from baton.events import HandedOff
from baton.types import KvSource, Sample, Sampling
from bench.host_rig import HostRig, draw_spec, prefill_core
from bench.machine import document_of, now, write_json
from bench.stub_device import StubDeviceEngine
from bench.stub_engine import BLOCK_SIZE
from engine.interface import Batch, Launched, LayersDone, SampleRow, SequenceSlice
from engine.kv.block_table import BlockTable
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from worker_core.admission import CoreLimits
from worker_core.commands import Command, Destination, Open
from worker_core.worker import collect_garbage_less_often

#: Consecutive steps of one variant before those of the other, so that disturbances affect both.
_ROUND = 20


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Median milliseconds from step to step. engine_ms: time of the engine itself."""

    num_seqs: int
    engine_ms: float
    waiting_ms: float
    ahead_ms: float

    @property
    def hidden_share(self) -> float:
        """Hidden share of the host time that a waiting step adds."""
        return (self.waiting_ms - self.ahead_ms) / (self.waiting_ms - self.engine_ms)


def measure_ahead(num_seqs: int, engine_ms: float, num_rounds: int) -> StepTimes:
    """Measure both variants in turns, in this process."""
    collect_garbage_less_often(num_seqs)
    num_tokens = 2 * BLOCK_SIZE + (num_rounds + 1) * _ROUND
    num_blocks = num_seqs * (num_tokens // BLOCK_SIZE + 2)
    rigs = [
        HostRig(num_seqs, 2 * BLOCK_SIZE, num_blocks, engine_ms / 1e3, num_launches)
        for num_launches in (1, 2)
    ]
    for rig in rigs:
        rig.step(rig.opening)
        rig.step()
    times_ms: list[list[float]] = [[], []]
    for _ in range(num_rounds):
        for rig, own_ms in zip(rigs, times_ms, strict=True):
            rig.step()  # all earlier launches are complete
            own_ms += [_step_ms(rig) for _ in range(_ROUND - 1)]
    waiting_ms, ahead_ms = map(median, times_ms)
    return StepTimes(num_seqs, engine_ms, waiting_ms, ahead_ms)


def _step_ms(rig: HostRig) -> float:
    begin_s = time.perf_counter()
    rig.step()
    return (time.perf_counter() - begin_s) * 1e3


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Median host milliseconds of a step launched ahead. launch_ms: Engine.launch."""

    num_seqs: int
    context: int
    step_ms: float
    launch_ms: float


def measure_host(num_seqs: int, context: int, num_steps: int) -> HostTimes:
    """Host time per step. Raises RuntimeError if a step is not replayed."""
    collect_garbage_less_often(num_seqs)
    num_tokens = context + num_steps + 2 * BLOCK_SIZE
    num_blocks = num_seqs * (num_tokens // BLOCK_SIZE + 2)
    engine = _TimedEngine(num_blocks, num_seqs, num_tokens, 2)
    rig = HostRig(num_seqs, context, num_blocks, max_num_launches=2, engine=engine)
    rig.step(rig.opening)
    for _ in range(4):
        rig.step()
    num_eager = engine.num_eager_steps
    engine.launches_ms.clear()
    step_ms = median([_step_ms(rig) for _ in range(num_steps)])
    if engine.num_eager_steps > num_eager:
        raise RuntimeError("a decode step was not replayed")
    return HostTimes(num_seqs, context, step_ms, median(engine.launches_ms))


class _TimedEngine(StubDeviceEngine):
    """launches_ms: time of each launch."""

    def __init__(self, *sizes: int, has_tables: bool = True) -> None:
        super().__init__(*sizes, has_tables=has_tables)
        self.launches_ms: list[float] = []

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        begin_s = time.perf_counter()
        launched = super().launch(batch, layers_done)
        self.launches_ms.append((time.perf_counter() - begin_s) * 1e3)
        return launched


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Median milliseconds of Engine.launch for a step with a prompt chunk and decoding sequences.
    sent_ms: with all block tables sent; ms: with tables kept on the device."""

    num_seqs: int
    context: int
    num_new: int
    sent_ms: float
    ms: float


def measure_prefill(num_seqs: int, context: int, num_new: int, num_steps: int) -> PrefillTimes:
    """Measure both variants in turns. num_seqs: including the prompt."""
    length = context + num_new + num_steps
    per_seq = -(-length // BLOCK_SIZE)
    num_blocks = num_seqs * per_seq
    engines = [
        _TimedEngine(num_blocks, num_seqs, length, 1, has_tables=has_tables)
        for has_tables in (False, True)
    ]
    tables = [
        BlockTable(range(index * per_seq, (index + 1) * per_seq), num_blocks)
        for index in range(num_seqs)
    ]
    for step in range(num_steps):
        batch = Batch(
            tuple(
                _slice(table, context + step, 1 if index else num_new)
                for index, table in enumerate(tables)
            )
        )
        for engine in engines:
            engine.forward(batch)
    # The first step sends the tables in both variants.
    sent_ms, ms = (median(engine.launches_ms[1:]) for engine in engines)
    return PrefillTimes(num_seqs, context, num_new, sent_ms, ms)


def _slice(table: BlockTable, start: int, num_new: int) -> SequenceSlice:
    row = SampleRow(num_new - 1, Sampling(), (), 0)
    return SequenceSlice((0,) * num_new, start, table, (row,))


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Mean milliseconds from step to step of a prefill core, over all prompts. engine_ms: time of
    the device."""

    num_prompt_tokens: int
    chunk: int
    engine_ms: float
    waiting_ms: float
    ahead_ms: float


def measure_prompts(
    num_prompt_tokens: int, chunk: int, engine_ms: float, num_steps: int, num_rounds: int
) -> PromptTimes:
    """Measure both variants in turns. num_steps: per variant and round."""
    num_prompts = num_steps * chunk // num_prompt_tokens
    collect_garbage_less_often(num_prompts)
    times_ms: list[list[float]] = [[], []]
    for _ in range(num_rounds):
        for num_launches, own_ms in zip((1, 2), times_ms, strict=True):
            own_ms.append(
                _prompts_ms(num_prompts, num_prompt_tokens, chunk, engine_ms, num_launches)
                / num_steps
            )
    waiting_ms, ahead_ms = map(median, times_ms)
    return PromptTimes(num_prompt_tokens, chunk, engine_ms, waiting_ms, ahead_ms)


def _prompts_ms(
    num_prompts: int, num_prompt_tokens: int, chunk: int, engine_ms: float, num_launches: int
) -> float:
    """Seconds from the first step until all prompts are handed off."""
    num_blocks = num_prompts * (num_prompt_tokens // BLOCK_SIZE + 2)
    engine = _BusyDevice(num_blocks, num_prompts, num_prompt_tokens + 2, engine_ms / 1e3)
    pool = BlockPool(num_blocks, whole_blocks(BLOCK_SIZE), secret=secrets.token_bytes(32))
    commands: list[Command] = []
    core = prefill_core(engine, pool, CoreLimits(num_prompts, chunk, num_launches), commands)
    commands += [
        Open(0, handle, draw_spec(handle, num_prompt_tokens), KvSource.LOCAL, Destination(0))
        for handle in range(num_prompts)
    ]
    num_left = num_prompts
    # The first step admits all prompts, in both variants alike.
    begin_s = time.perf_counter()
    while num_left:
        taken, commands[:] = tuple(commands), ()
        events = core.step(taken).events
        num_left -= sum(isinstance(emitted.event, HandedOff) for emitted in events)
    return (time.perf_counter() - begin_s) * 1e3


class _BusyDevice(StubDeviceEngine):
    """Takes the given time for each step, one after the other."""

    def __init__(
        self, num_blocks: int, largest_batch: int, max_model_len: int, step_s: float
    ) -> None:
        super().__init__(num_blocks, largest_batch, max_model_len, 2)
        self._step_s = step_s
        self._end_s = 0.0

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        launched = super().launch(batch, layers_done)
        self._end_s = max(self._end_s, time.perf_counter()) + self._step_s
        return _BusyLaunch(launched, self._end_s)


@dataclass(frozen=True, slots=True)
class _BusyLaunch:
    """Implements Launched. end_s: time at which the device completes it."""

    inner: Launched
    end_s: float

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        if (rest_s := self.end_s - time.perf_counter()) > 0:
            time.sleep(rest_s)
        return self.inner.samples()


def prompts_table(found: Sequence[PromptTimes]) -> Table:
    """Markdown, in milliseconds."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("prompt", "chunk", "engine", "waiting", "ahead"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        times = (one.engine_ms, one.waiting_ms, one.ahead_ms)
        table.add_row(str(one.num_prompt_tokens), str(one.chunk), *(f"{t:.2f}" for t in times))
    return table


def prefill_table(found: Sequence[PrefillTimes]) -> Table:
    """Markdown, in milliseconds."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("sequences", "context", "new tokens", "tables sent", "on the device"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        counts = (one.num_seqs, one.context, one.num_new)
        table.add_row(*map(str, counts), f"{one.sent_ms:.3f}", f"{one.ms:.3f}")
    return table


def host_table(found: Sequence[HostTimes]) -> Table:
    """Markdown, in milliseconds."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("sequences", "context", "step", "launch"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        times = (f"{one.step_ms:.3f}", f"{one.launch_ms:.3f}")
        table.add_row(str(one.num_seqs), str(one.context), *times)
    return table


def steps_table(found: Sequence[StepTimes]) -> Table:
    """Markdown, in milliseconds."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("sequences", "engine", "waiting", "ahead", "hidden"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        times = (one.engine_ms, one.waiting_ms, one.ahead_ms)
        table.add_row(str(one.num_seqs), *(f"{t:.2f}" for t in times), f"{one.hidden_share:.0%}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--step-ms", type=float, default=6.0)
    parser.add_argument("--context", type=int, nargs="+", default=[])
    parser.add_argument("--prefill", type=int, default=0)
    parser.add_argument("--prompts", type=int, nargs="+", default=[])
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    started = now()
    if arguments.prompts:
        prompts = [
            measure_prompts(length, arguments.chunk, arguments.step_ms, _ROUND, arguments.rounds)
            for length in arguments.prompts
        ]
        Console().print(prompts_table(prompts))
        if arguments.json:
            rows = [dataclasses.asdict(one) for one in prompts]
            write_json(arguments.json, document_of("bench.ahead", started, {"prompts": rows}))
        return
    if arguments.prefill:
        prefills = [
            measure_prefill(num_seqs, context, arguments.prefill, arguments.rounds)
            for context in arguments.context
            for num_seqs in arguments.num_seqs
        ]
        Console().print(prefill_table(prefills))
        if arguments.json:
            rows = [dataclasses.asdict(one) for one in prefills]
            write_json(arguments.json, document_of("bench.ahead", started, {"prefill": rows}))
        return
    if arguments.context:
        host = [
            measure_host(num_seqs, context, arguments.rounds * _ROUND)
            for context in arguments.context
            for num_seqs in arguments.num_seqs
        ]
        Console().print(host_table(host))
        if arguments.json:
            rows = [dataclasses.asdict(one) for one in host]
            write_json(arguments.json, document_of("bench.ahead", started, {"host": rows}))
        return
    found = [
        measure_ahead(num_seqs, arguments.step_ms, arguments.rounds)
        for num_seqs in arguments.num_seqs
    ]
    Console().print(steps_table(found))
    if arguments.json:
        steps = [{**dataclasses.asdict(one), "hidden_share": one.hidden_share} for one in found]
        write_json(arguments.json, document_of("bench.ahead", started, {"steps": steps}))


if __name__ == "__main__":
    main()
