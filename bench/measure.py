"""Metrics of one request and of many. Pure.

All times of a record are in seconds from the start of the load. Latency is measured from the due
time, not from the send time, so a slow client does not improve the server's figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Record:
    """One request. pieces: (arrival time, number of tokens) of each chunk with tokens, in order.

    error: reason of a failure, else empty. Other fields are reported by the server.
    """

    due_s: float
    sent_s: float
    end_s: float
    num_prompt_tokens: int
    pieces: tuple[tuple[float, int], ...] = ()
    error: str = ""
    num_cached_tokens: int = 0
    transfer_bytes: int = 0
    transfer_exposed_ms: float = 0.0
    was_handed_over: bool = False

    @property
    def is_complete(self) -> bool:
        return not self.error and bool(self.pieces)

    @property
    def num_output_tokens(self) -> int:
        return sum(count for _, count in self.pieces)

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token, from the due time."""
        return (self.pieces[0][0] - self.due_s) * 1000 if self.pieces else None

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first chunk; None if there are no more."""
        num_later = self.num_output_tokens - (self.pieces[0][1] if self.pieces else 0)
        if num_later < 1:
            return None
        return (self.pieces[-1][0] - self.pieces[0][0]) * 1000 / num_later

    @property
    def itl_ms(self) -> tuple[float, ...]:
        """Inter-token latency of the stream: the times between chunks."""
        times = [time for time, _ in self.pieces]
        return tuple((after - before) * 1000 for before, after in pairwise(times))


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of values, in their unit; all zero without values."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds; None: no limit. A request is inside if it meets both."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met_by(self, record: Record) -> bool:
        """Failed requests do not meet it; requests with a single chunk meet any TPOT."""
        if not record.is_complete or record.ttft_ms is None:
            return False
        is_early = self.ttft_ms is None or record.ttft_ms <= self.ttft_ms
        return is_early and (
            self.tpot_ms is None or record.tpot_ms is None or record.tpot_ms <= self.tpot_ms
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """One load. Latencies in milliseconds, of complete requests; rates per second of `duration_s`,
    from the first due time to the last end."""

    num_requests: int
    num_complete: int
    num_handed_over: int
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    slo_attainment: float
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    total_ms: Distribution
    client_lag_ms: Distribution
    """From due to sent: large values mean that the load generator was too slow."""
    transfer_exposed_ms: Distribution
    """Handed-over requests: the part of the transfer not hidden by compute."""
    transfer_bytes: int
    errors: dict[str, int]
    """Number of failed requests by reason."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Percentile `share` (0..1) of ascending values, interpolated linearly.

    Raises ValueError for no values or a share outside 0..1.
    """
    if not ordered or not 0 <= share <= 1:
        raise ValueError("a percentile needs a value, and a share of 0 to 1")
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    part = place - low
    # In this form, rounding keeps the result between its neighbours.
    return (
        ordered[low]
        if part == 0
        else min(ordered[high], ordered[low] + (ordered[high] - ordered[low]) * part)
    )


def distribution(values: Iterable[float]) -> Distribution:
    """Statistics of the values, in any order."""
    ordered = sorted(values)
    if not ordered:
        return Distribution()
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Distribution(len(ordered), fmean(ordered), p50, p90, p99, ordered[-1])


def summarise(records: Sequence[Record], slo: Slo) -> Summary:
    """Summarise a load's requests. Raises ValueError if there are none."""
    if not records:
        raise ValueError("no request was made")
    complete = [record for record in records if record.is_complete]
    handed = [record for record in complete if record.was_handed_over]
    duration_s = max(record.end_s for record in records) - min(record.due_s for record in records)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    num_prompt = sum(record.num_prompt_tokens for record in complete)
    num_output = sum(record.num_output_tokens for record in complete)
    errors: dict[str, int] = {}
    for record in records:
        if not record.is_complete:
            reason = record.error or "NO_TOKENS"
            errors[reason] = errors.get(reason, 0) + 1
    return Summary(
        num_requests=len(records),
        num_complete=len(complete),
        num_handed_over=len(handed),
        duration_s=duration_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(record.num_cached_tokens for record in complete),
        num_output_tokens=num_output,
        requests_per_s=len(complete) * per_s,
        output_tokens_per_s=num_output * per_s,
        total_tokens_per_s=(num_prompt + num_output) * per_s,
        slo_attainment=sum(slo.is_met_by(record) for record in records) / len(records),
        ttft_ms=distribution(r.ttft_ms for r in complete if r.ttft_ms is not None),
        tpot_ms=distribution(r.tpot_ms for r in complete if r.tpot_ms is not None),
        itl_ms=distribution(gap for r in complete for gap in r.itl_ms),
        total_ms=distribution((r.end_s - r.due_s) * 1000 for r in complete),
        client_lag_ms=distribution((r.sent_s - r.due_s) * 1000 for r in records),
        transfer_exposed_ms=distribution(r.transfer_exposed_ms for r in handed),
        transfer_bytes=sum(record.transfer_bytes for record in handed),
        errors=errors,
    )


def goodputs_of(
    shares: Sequence[tuple[str, float, float]], wanted: float
) -> dict[str, float | None]:
    """Goodput by target. shares: (target, requests/s, share inside)."""
    return {
        target: goodput([(rate, share) for of, rate, share in shares if of == target], wanted)
        for target in dict.fromkeys(target for target, _, _ in shares)
    }


def goodput(attainment_by_rate: Sequence[tuple[float, float]], wanted: float = 0.9) -> float | None:
    """Highest measured rate up to which every measured rate has at least `wanted` of its requests
    inside the SLO.

    attainment_by_rate: (requests/s, share inside), in any order; repeated rates are averaged. None
    if the lowest rate fails.
    """
    shares: dict[float, list[float]] = {}
    for rate, share in attainment_by_rate:
        shares.setdefault(rate, []).append(share)
    best = None
    for rate, measured in sorted(shares.items()):
        if fmean(measured) < wanted:
            break
        best = rate
    return best
