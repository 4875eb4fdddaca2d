"""Decode steps launched before the tokens of the step before are known: correctness, absence of
waits, and speed-up."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from baton.types import Sampling
from bench.gpu.engine_speed import BLOCK_SIZE, SMALL, Model
from bench.gpu.graph_speed import Replayed, load_replayed
from bench.gpu.interpreter import on_kernels
from bench.gpu.setting import Result, Setting
from engine.families.read import parse_config
from engine.interface import (
    FOLLOWING,
    Batch,
    Engine,
    Launched,
    SampleRow,
    SequenceSlice,
)

_GREEDY = Sampling()
#: One of each kind of sampling that can be launched ahead.
_MIXED = (
    _GREEDY,
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.8, top_k=5, seed=2),
    Sampling(temperature=1.2, top_p=0.9, min_p=0.01, seed=3, logprobs=2),
)

_Launch = Callable[[Batch], Launched]


class _Waited(Exception):
    """A launch waited for the device. Text: the location."""


@dataclass(frozen=True, slots=True)
class _Sequences:
    """One sequence per sampling, each with `cached` tokens and blocks with room for num_steps
    more."""

    samplings: Sequence[Sampling]
    cached: int
    num_steps: int
    vocab_size: int

    def first_tokens(self) -> list[list[int]]:
        """Tokens of the first step, per sequence."""
        return [[7 * i % self.vocab_size] for i in range(len(self.samplings))]

    def batch(self, step: int, tokens: Sequence[Sequence[int]]) -> Batch:
        """tokens: per sequence, the first token and those drawn so far; if the last one is missing,
        the step follows the one before."""
        return Batch(tuple(self._part(i, step, own) for i, own in enumerate(tokens)))

    def _part(self, index: int, step: int, tokens: Sequence[int]) -> SequenceSlice:
        num_undrawn = step + 1 - len(tokens)
        width = -(-(self.cached + self.num_steps) // BLOCK_SIZE)
        row = SampleRow(0, self.samplings[index], tokens, 1, num_undrawn_tokens=num_undrawn)
        return SequenceSlice(
            FOLLOWING if num_undrawn else (tokens[-1],),
            self.cached + step,
            range(index * width, (index + 1) * width),
            (row,),
            follows=index if num_undrawn else None,
        )


def _decode(launch: _Launch, sequences: _Sequences, depth: int) -> list[list[int]]:
    """Tokens of all steps, with at most `depth` launches in progress."""
    tokens = sequences.first_tokens()
    flight: deque[Launched] = deque()
    for step in range(sequences.num_steps):
        flight.append(launch(sequences.batch(step, tokens)))
        if len(flight) == depth:
            _collect(flight.popleft(), tokens)
    while flight:
        _collect(flight.popleft(), tokens)
    return tokens


def _collect(launched: Launched, tokens: list[list[int]]) -> None:
    for own, (sample,) in zip(tokens, launched.samples(), strict=True):
        own.append(sample.token_id)


@contextmanager
def _no_waits(setting: Setting) -> Iterator[None]:
    """Make waits for the device raise RuntimeError within the context. No effect on a CPU."""
    if setting.is_dry:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _launch_without_wait(engine: Engine, setting: Setting, batch: Batch) -> Launched:
    """Launch; raise _Waited if the launch waits for the device."""
    try:
        with _no_waits(setting):
            return engine.launch(batch)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        where = " > ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames)
        raise _Waited(where) from error


def _check(setting: Setting) -> Result:
    """Compare the draws of a small engine with one launch ahead with those without, eager and with
    graphs."""
    found: dict[str, str] = {}
    with on_kernels(setting):
        config = parse_config(dict(SMALL))
        model = Model(setting, config, 16, std=0.2)
        replayed = Replayed(setting, model, model.decoder, len(_MIXED), 64)
        for way, steps in (("eager", replayed.eager), ("graphs", replayed.steps)):
            engines = [replayed.engine_of(steps, depth) for depth in (1, 2)]
            for kind, samplings in (("greedy", [_GREEDY] * len(_MIXED)), ("mixed", _MIXED)):
                sequences = _Sequences(samplings, 20, setting.pick(20, 3), config.vocab_size)
                found[f"{way} {kind}"] = _verdict(engines, model, sequences, setting)
    is_right = all(verdict == "right" for verdict in found.values())
    return {**found, "verdict": "right" if is_right else "WRONG"}


def _verdict(
    engines: Sequence[Engine], model: Model, sequences: _Sequences, setting: Setting
) -> str:
    """engines: limited to one launch in progress, and to two."""
    waiting, ahead = engines
    checked = partial(_launch_without_wait, ahead, setting)
    drawn = []
    for launch, depth in ((waiting.launch, 1), (ahead.launch, 2), (checked, 2)):
        # Overwrite KV of the previous run, which would hide a missing write.
        model.kv.tensor.normal_(generator=setting.generator())
        try:
            drawn.append(_decode(launch, sequences, depth))
        except _Waited as error:
            return f"waits at {error}"
    return "right" if drawn[0] == drawn[1] == drawn[2] else "other tokens"


def _speed(num_seqs: int, setting: Setting) -> Result:
    """Greedy steps with graphs. ms: interval of steps with one launched ahead; waiting_ms: interval
    if each is collected before the next; launch_ms: host time of Engine.launch."""
    num_seqs, cached, num_steps = (
        setting.pick(num_seqs, 2),
        setting.pick(1000, 20),
        setting.pick(24, 3),
    )
    with on_kernels(setting):
        found = load_replayed(setting)
        vocab_size = found.model.config.vocab_size
        sequences = _Sequences([_GREEDY] * num_seqs, cached, num_steps, vocab_size)
        engines = [found.engine_of(found.steps, depth) for depth in (1, 2)]
        launches_ms: list[float] = []
        launch_waiting = partial(_timed_launch, engines[0], launches_ms)
        times_ms: list[list[float]] = [[], []]
        for _ in range(setting.pick(5, 1)):
            times_ms[0].append(_step_ms(launch_waiting, sequences, 1))
            times_ms[1].append(_step_ms(engines[1].launch, sequences, 2))
    waiting_ms, ahead_ms = map(median, times_ms)
    return {
        "ms": ahead_ms,
        "waiting_ms": waiting_ms,
        "hidden_ms": waiting_ms - ahead_ms,
        "launch_ms": median(launches_ms),
        **found.model.step_floor(num_seqs, cached + num_steps // 2, 1),
    }


def _timed_launch(engine: Engine, times_ms: list[float], batch: Batch) -> Launched:
    start = time.perf_counter()
    launched = engine.launch(batch)
    times_ms.append((time.perf_counter() - start) * 1000)
    return launched


def _step_ms(launch: _Launch, sequences: _Sequences, depth: int) -> float:
    start = time.perf_counter()
    _decode(launch, sequences, depth)
    return (time.perf_counter() - start) * 1000 / sequences.num_steps


CHECKS: Mapping[str, Callable[[Setting], Result]] = {"check launch waits for nothing": _check}

ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    "engine ahead 64 x 1K": partial(_speed, 64),
    "engine ahead 256 x 1K": partial(_speed, 256),
}
