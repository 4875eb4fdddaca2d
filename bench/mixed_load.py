"""A mixed load: answers that are written all the time, and bursts of long prompts that come among
them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.measure import Distribution, Record, Slo, distribution
from bench.plan import burst
from bench.workload import LoadRequest, TraceEntry, requests_of


@dataclass(frozen=True, slots=True)
class Steady:
    """Requests with short prompts at even gaps. rate: requests/s."""

    rate: float = 4.0
    num_input_tokens: int = 64
    num_output_tokens: int = 256


@dataclass(frozen=True, slots=True)
class MixedLoad:
    """steady, bursts: in order of their times; the two overlap."""

    steady: tuple[LoadRequest, ...]
    bursts: tuple[LoadRequest, ...]


@dataclass(frozen=True, slots=True)
class MixedSummary:
    """Latencies in milliseconds. itl_ms, tpot_ms: of the steady requests. attainment: of all
    requests, the share that is complete and inside the SLO."""

    num_steady: int
    num_bursts: int
    num_failed: int
    itl_ms: Distribution
    tpot_ms: Distribution
    steady_ttft_ms: Distribution
    burst_ttft_ms: Distribution
    attainment: float


def mixed_load(
    steady: Steady,
    long_entries: Sequence[TraceEntry],
    rate: float,
    burst_size: int,
    vocab_size: int,
    seed: int,
) -> MixedLoad:
    """Long prompts come at `rate` requests/s in the mean, for as long as it takes; steady ones from
    before the first of them until after the last. Raises ArrivalsError."""
    lead_s = 2 / steady.rate
    rng = Random(f"{seed}/bursts/{rate}")
    times = [lead_s + time_s for time_s in burst(len(long_entries), rate, burst_size, rng)]
    num_steady = max(2, round((times[-1] + lead_s) * steady.rate))
    entry = TraceEntry(0.0, steady.num_input_tokens, steady.num_output_tokens)
    even = [index / steady.rate for index in range(num_steady)]
    return MixedLoad(
        requests_of([entry] * num_steady, even, vocab_size, seed),
        requests_of(long_entries, times, vocab_size, seed + 1),
    )


def summarise_mixed(steady: Sequence[Record], bursts: Sequence[Record], slo: Slo) -> MixedSummary:
    """Of one run's records. Raises ValueError if there are none."""
    records = (*steady, *bursts)
    if not records:
        raise ValueError("no request was made")
    written = [record for record in steady if record.is_complete]
    return MixedSummary(
        num_steady=len(steady),
        num_bursts=len(bursts),
        num_failed=sum(not record.is_complete for record in records),
        itl_ms=distribution(gap for record in written for gap in record.itl_ms),
        tpot_ms=distribution(r.tpot_ms for r in written if r.tpot_ms is not None),
        steady_ttft_ms=distribution(r.ttft_ms for r in written if r.ttft_ms is not None),
        burst_ttft_ms=distribution(
            r.ttft_ms for r in bursts if r.is_complete and r.ttft_ms is not None
        ),
        attainment=sum(slo.is_met_by(record) for record in records) / len(records),
    )
