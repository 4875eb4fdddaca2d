"""When requests come: arrival processes of an open loop, in which nobody waits for answers. Pure.

All functions return arrival times in seconds, ascending, the first at 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from random import Random


class ArrivalsError(ValueError):
    """No such arrivals can be made; says why."""


def poisson(num_requests: int, rate: float, rng: Random) -> tuple[float, ...]:
    """Independent arrivals at `rate` requests/s: gaps are exponential. Raises ArrivalsError for
    rate <= 0."""
    _check(num_requests, rate)
    gaps = (rng.expovariate(rate) for _ in range(num_requests - 1))
    return tuple(accumulate(gaps, initial=0.0))


def burst(num_requests: int, rate: float, burst_size: int, rng: Random) -> tuple[float, ...]:
    """`burst_size` requests at once, bursts themselves Poisson, `rate` requests/s in the mean.

    Raises ArrivalsError for rate <= 0 or burst_size < 1.
    """
    _check(num_requests, rate)
    if burst_size < 1:
        raise ArrivalsError(f"burst_size {burst_size}: give at least 1")
    num_bursts = -(-num_requests // burst_size)
    starts = poisson(num_bursts, rate / burst_size, rng)
    return tuple(start for start in starts for _ in range(burst_size))[:num_requests]


def replay(times_s: Sequence[float], rate: float | None = None) -> tuple[float, ...]:
    """Recorded arrivals, moved to begin at 0 and, if a rate is given, stretched to `rate`
    requests/s in the mean.

    Their pattern stays: every gap is multiplied by the same number. Raises ArrivalsError for times
    that do not ascend, and for a rate where all times are equal.
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
    """Requests/s between the first and the last arrival; None if no time passes between them."""
    if len(times_s) < 2 or times_s[-1] <= times_s[0]:
        return None
    return (len(times_s) - 1) / (times_s[-1] - times_s[0])


def _check(num_requests: int, rate: float) -> None:
    if num_requests < 1:
        raise ArrivalsError(f"num_requests {num_requests}: give at least 1")
    if not rate > 0:
        raise ArrivalsError(f"rate {rate}: give more than 0")
