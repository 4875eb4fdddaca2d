"""The split of devices into prefill and decode workers with the best goodput. Pure.

Goodput is the highest rate at which 90 % of requests keep both SLOs (DistServe, arXiv 2401.09670).
Prompts wait in one line for the prefill workers, first come, first served; each decode worker runs
as many sequences as its KV memory and the time per token allow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import product
from random import Random

from engine.ranks.mesh import Degrees

#: Share of the requests that keep the SLOs.
ATTAINMENT = 0.9
#: Requests that are drawn for given mean lengths, and taken from a trace at most.
NUM_REQUESTS = 2000
#: Halvings of the interval of rates.
_NUM_HALVINGS = 14
#: Pairs of shapes that are simulated: those with the best bounds.
_NUM_SIMULATED = 6


@dataclass(frozen=True, slots=True)
class Request:
    """Lengths in tokens; arrival in seconds from the first request."""

    arrival_s: float
    num_input: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in milliseconds."""

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True, slots=True)
class Worker:
    """What one worker of these degrees does. prompt_s: seconds of a prompt by its length; step_s:
    of a step, by batch and context; num_users: sequences of so many tokens in its memory, and at
    most what it runs."""

    degrees: Degrees
    prompt_s: Callable[[int], float]
    step_s: Callable[[int, int], float]
    num_users: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Tier:
    """Workers of one tier. requests_per_s: that all of them take within the SLO."""

    degrees: Degrees
    num_workers: int
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Split:
    """The best split. goodput: requests/s; ttft_p90_ms: at that rate; batch, step_ms: of a decode
    worker at its limit."""

    prefill: Tier
    decode: Tier
    goodput: float
    ttft_p90_ms: float
    batch: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class NoSplit:
    """Why there is no split within the SLO."""

    reason: str


def drawn_requests(num_input: int, num_output: int, seed: int = 0) -> tuple[Request, ...]:
    """Requests of these lengths that arrive independently, one a second in the mean."""
    rng, now, found = Random(seed), 0.0, []
    for _ in range(NUM_REQUESTS):
        found.append(Request(now, num_input, num_output))
        now += rng.expovariate(1.0)
    return tuple(found)


def mean_rate(requests: Sequence[Request]) -> float:
    """Requests/s between the first and the last arrival."""
    return (len(requests) - 1) / max(1e-9, requests[-1].arrival_s - requests[0].arrival_s)


def ttfts_s(
    requests: Sequence[Request], services_s: Sequence[float], num_workers: int, stretch: float
) -> list[float]:
    """Time to first token of each request: arrivals are stretched by a factor, each waits for the
    first free of the workers, then for its own prompt."""
    free_s = [0.0] * num_workers
    heapify(free_s)
    found = []
    for request, service_s in zip(requests, services_s, strict=True):
        due = request.arrival_s * stretch
        end = max(due, free_s[0]) + service_s
        heapreplace(free_s, end)
        found.append(end - due)
    return found


def best_split(
    workers: Sequence[Worker], requests: Sequence[Request], slo: Slo, num_devices: int
) -> Split | NoSplit:
    """The split with the best goodput over num_devices devices. workers: shapes to choose from."""
    if num_devices < 2:
        return NoSplit("two tiers need two devices; one device serves colocated")
    services = {w.degrees: [_interpolated(w, r.num_input) for r in requests] for w in workers}
    decodes = {worker.degrees: decode_limit(worker, requests, slo) for worker in workers}
    if not any(limit.requests_per_s for limit in decodes.values()):
        fastest = min(worker.step_s(1, _mean_context(requests)) for worker in workers)
        return NoSplit(
            f"slo_tpot_ms={slo.tpot_ms:g}: the fastest step takes {fastest * 1e3:.3g} ms"
        )
    bounds = sorted(_bounds(services, decodes, num_devices), key=lambda pair: pair[0], reverse=True)
    best: Split | None = None
    for _, prefill, decode in bounds[:_NUM_SIMULATED]:
        limit = decodes[decode.degrees]
        found = _simulated(requests, services[prefill.degrees], prefill, decode, limit, slo)
        if found is not None and (best is None or found.goodput > best.goodput):
            best = found
    if best is None:
        return NoSplit(f"slo_ttft_ms={slo.ttft_ms:g}: no shape computes 90 % of the prompts in it")
    return best


@dataclass(frozen=True, slots=True)
class DecodeLimit:
    """One decode worker at its limit: the largest batch within the time per token."""

    batch: int
    step_ms: float
    requests_per_s: float


def decode_limit(worker: Worker, requests: Sequence[Request], slo: Slo) -> DecodeLimit:
    """The largest batch of sequences of mean length that keeps the SLO and fits the KV memory."""
    context = _mean_context(requests)
    most = worker.num_users(_mean(r.num_input + r.num_output for r in requests))
    batch = _largest(most, lambda n: worker.step_s(n, context) * 1e3 <= slo.tpot_ms)
    if batch == 0:
        return DecodeLimit(0, 0.0, 0.0)
    step_s = worker.step_s(batch, context)
    num_output = _mean(r.num_output for r in requests)
    return DecodeLimit(batch, step_s * 1e3, batch / (num_output * step_s))


def _bounds(
    services: Mapping[Degrees, Sequence[float]],
    decodes: Mapping[Degrees, DecodeLimit],
    num_devices: int,
) -> list[tuple[float, Tier, Tier]]:
    """The split of each pair of shapes with the highest bound: the rate of its slower tier without
    queues."""
    found = []
    for prefill, decode in product(services, decodes):
        limit = decodes[decode].requests_per_s
        rate = len(services[prefill]) / sum(services[prefill])
        best: tuple[float, Tier, Tier] | None = None
        for num_prefill in range(1, num_devices // prefill.num_ranks + 1):
            num_decode = (num_devices - num_prefill * prefill.num_ranks) // decode.num_ranks
            bound = min(num_prefill * rate, num_decode * limit)
            if bound > (best[0] if best else 0.0):
                tiers = (
                    Tier(prefill, num_prefill, num_prefill * rate),
                    Tier(decode, num_decode, num_decode * limit),
                )
                best = (bound, *tiers)
        if best:
            found.append(best)
    return found


def _simulated(
    requests: Sequence[Request],
    services_s: Sequence[float],
    prefill: Tier,
    decode: Tier,
    limit: DecodeLimit,
    slo: Slo,
) -> Split | None:
    """The highest rate that both tiers keep, by halving; None if not even a slow one is kept."""
    own, num = mean_rate(requests), prefill.num_workers

    def p90_ms(rate: float) -> float:
        found = sorted(ttfts_s(requests, services_s, num, own / rate))
        return found[int(ATTAINMENT * (len(found) - 1))] * 1e3

    high = min(prefill.requests_per_s, decode.requests_per_s)
    low = high / 1000
    if p90_ms(low) > slo.ttft_ms:
        return None
    if p90_ms(high) <= slo.ttft_ms:
        low = high
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if p90_ms(middle) <= slo.ttft_ms else (low, middle)
    return Split(prefill, decode, low, p90_ms(low), limit.batch, limit.step_ms)


def _interpolated(worker: Worker, num_tokens: int) -> float:
    """Seconds of a prompt, between the two nearest powers of two."""
    high = 1 << max(0, (num_tokens - 1).bit_length())
    low = max(1, high // 2)
    if high == low:
        return worker.prompt_s(high)
    part = (num_tokens - low) / (high - low)
    return worker.prompt_s(low) * (1 - part) + worker.prompt_s(high) * part


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest n of 0..most for which holds(n), which is true up to some n."""
    return bisect_left(range(1, most + 1), True, key=lambda n: not holds(n))


def _mean(values: Iterable[int]) -> int:
    numbers = list(values)
    return max(1, round(sum(numbers) / len(numbers)))


def _mean_context(requests: Sequence[Request]) -> int:
    """Context of a running sequence, in the mean over time: prompt and half of the answer, weighted
    by the length of the answer."""
    weight = sum(r.num_output for r in requests)
    total = sum(r.num_output * (r.num_input + r.num_output / 2) for r in requests)
    return max(1, round(total / weight))
