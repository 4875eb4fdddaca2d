"""The order of runs, and the requests of each: arrivals of an open loop. Pure, except for reading
the trace file.

Arrival times are in seconds, ascending, the first at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Literal

from bench.workload import LoadRequest, fitted, requests_of, synthetic_entries
from engine.plan.trace import TraceEntry, read_trace


class ArrivalsError(ValueError):
    """The arrivals cannot be generated; the message has the reason."""


def poisson(num_requests: int, rate: float, rng: Random) -> tuple[float, ...]:
    """Independent arrivals at `rate` requests/s: gaps are exponential. Raises ArrivalsError for
    rate <= 0."""
    _check(num_requests, rate)
    gaps = (rng.expovariate(rate) for _ in range(num_requests - 1))
    return tuple(accumulate(gaps, initial=0.0))


def burst(num_requests: int, rate: float, burst_size: int, rng: Random) -> tuple[float, ...]:
    """`burst_size` requests at once, with Poisson bursts; `rate` is the mean in requests/s.

    Raises ArrivalsError for rate <= 0 or burst_size < 1.
    """
    _check(num_requests, rate)
    if burst_size < 1:
        raise ArrivalsError(f"burst_size {burst_size}: give at least 1")
    num_bursts = -(-num_requests // burst_size)
    starts = poisson(num_bursts, rate / burst_size, rng)
    return tuple(start for start in starts for _ in range(burst_size))[:num_requests]


def replay(times_s: Sequence[float], rate: float | None = None) -> tuple[float, ...]:
    """Recorded arrivals, shifted to begin at 0 and scaled to a mean of `rate` requests/s, if given.

    All gaps are scaled by the same factor. Raises ArrivalsError for times that do not ascend, and
    for a rate if all times are equal.
    """
    if any(later < earlier for earlier, later in pairwise(times_s)):
        raise ArrivalsError("arrival times must ascend")
    if not times_s:
        return ()
    factor = 1.0
    if rate is not None:
        _check(len(times_s), rate)
        own = mean_rate(times_s)
        if own is None:
            raise ArrivalsError("all arrivals are at one moment: they have no rate to change")
        factor = own / rate
    return tuple((time_s - times_s[0]) * factor for time_s in times_s)


def mean_rate(times_s: Sequence[float]) -> float | None:
    """Requests/s between the first and the last arrival; None if they coincide."""
    if len(times_s) < 2 or times_s[-1] <= times_s[0]:
        return None
    return (len(times_s) - 1) / (times_s[-1] - times_s[0])


def _check(num_requests: int, rate: float) -> None:
    if num_requests < 1:
        raise ArrivalsError(f"num_requests {num_requests}: give at least 1")
    if not rate > 0:
        raise ArrivalsError(f"rate {rate}: give more than 0")


Arrivals = Literal["poisson", "burst", "trace"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Parameters of a load. Lengths in tokens; rates in requests/s.

    trace: source of lengths, shared prefixes and, for arrivals "trace", arrivals; without it
    lengths are drawn. max_model_len: None: the model's own.
    """

    arrivals: Arrivals = "poisson"
    num_requests: int = 100
    num_input_tokens: int = 256
    num_output_tokens: int = 64
    length_spread: float = 0.5
    burst_size: int = 8
    trace: Path | None = None
    input_scale: float = 1.0
    output_scale: float = 1.0
    max_model_len: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One load against one target. rate: None for the trace's own."""

    target: str
    rate: float | None
    repetition: int


def runs_of(
    targets: Sequence[str], rates: Sequence[float | None], num_repetitions: int
) -> tuple[Run, ...]:
    """Runs at every rate, ascending, num_repetitions times on every target. Targets take turns and
    alternate in order, so that disturbances affect all."""
    runs: list[Run] = []
    num_rounds = 0
    for rate in sorted(rates, key=lambda rate: rate or 0.0):
        for repetition in range(num_repetitions):
            order = targets if num_rounds % 2 == 0 else targets[::-1]
            runs += (Run(target, rate, repetition) for target in order)
            num_rounds += 1
    return tuple(runs)


def entries_of(options: LoadOptions, max_model_len: int) -> tuple[TraceEntry, ...]:
    """The load's requests without times, equal for all rates. Raises TraceError, OSError."""
    limit = min(max_model_len, options.max_model_len or max_model_len)
    if options.trace is not None:
        entries = read_trace(options.trace, options.num_requests)
    else:
        entries = synthetic_entries(
            options.num_requests,
            options.num_input_tokens,
            options.num_output_tokens,
            options.length_spread,
            Random(f"{options.seed}/lengths"),
        )
    return tuple(
        fitted(entry, options.input_scale, options.output_scale, limit) for entry in entries
    )


def due_times(
    options: LoadOptions, entries: Sequence[TraceEntry], run: Run
) -> tuple[tuple[float, ...], float]:
    """Send times in seconds, and the mean rate; equal for all targets. Raises ArrivalsError."""
    rng = Random(f"{options.seed}/arrivals/{run.rate}/{run.repetition}")
    if options.arrivals == "trace":
        times = replay([entry.arrival_s for entry in entries], run.rate)
        return times, run.rate or mean_rate(times) or 0.0
    if run.rate is None:
        raise ArrivalsError(f"arrivals {options.arrivals}: give a rate")
    if options.arrivals == "burst":
        return burst(len(entries), run.rate, options.burst_size, rng), run.rate
    return poisson(len(entries), run.rate, rng), run.rate


def load_of(
    options: LoadOptions, entries: Sequence[TraceEntry], run: Run, vocab_size: int
) -> tuple[tuple[LoadRequest, ...], float]:
    """Requests of one run, and its rate. Raises ArrivalsError."""
    due_s, rate = due_times(options, entries, run)
    return requests_of(entries, due_s, vocab_size, options.seed), rate
