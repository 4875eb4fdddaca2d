"""Faults injected by bench.chaos: of processes, and on links by proxies.

Each names its victims by tier; the round selects one of the tier's two workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.check.process_faults import LASTS_S, PROCESS_FAULTS, Fault, Target
from bench.fault_proxy import FAIR, FaultProxy, ProxiedCluster, Way, Weather


@dataclass(frozen=True, slots=True)
class LinkedTarget(Target):
    """A target with links that may fail, too."""

    cluster: ProxiedCluster

    def link(self, victim: str) -> FaultProxy:
        """Proxy of a link; "kv decode" is the KV channel to the first decode worker."""
        return self.cluster.links[self.name_of(victim)]


Inject = Callable[[LinkedTarget], Awaitable[None]]


def _cutting(victim: str) -> Inject:
    async def inject(target: LinkedTarget) -> None:
        target.link(victim).cut()

    return inject


def _refusing(victim: str) -> Inject:
    async def inject(target: LinkedTarget) -> None:
        link = target.link(victim)
        link.refuse()
        link.cut()
        try:
            await asyncio.sleep(LASTS_S)
        finally:
            await link.accept()

    return inject


def _half_closing(victim: str, way: Way) -> Inject:
    async def inject(target: LinkedTarget) -> None:
        target.link(victim).half_close(way)

    return inject


def _weathering(victim: str, there: Weather = FAIR, back: Weather = FAIR) -> Inject:
    async def inject(target: LinkedTarget) -> None:
        link = target.link(victim)
        link.weather(there, back)
        try:
            await asyncio.sleep(LASTS_S)
        finally:
            link.heal()

    return inject


_SILENT = Weather(is_silent=True)
_SLOW = Weather(delay_s=0.05)
_THIN = Weather(bytes_per_s=200_000)
_FLIPPING = Weather(flip_every=20_000)


def _of_link(victim: str, text: str) -> tuple[Fault[LinkedTarget], ...]:
    """Faults of any link."""
    return (
        Fault(f"cut {text}", _cutting(victim)),
        Fault(f"refuse {text}", _refusing(victim)),
        Fault(f"silence {text}", _weathering(victim, _SILENT, _SILENT)),
        Fault(f"delay {text} by 50 ms each way", _weathering(victim, _SLOW, _SLOW)),
        Fault(f"throttle {text} to 200 kB/s", _weathering(victim, _THIN, _THIN)),
        Fault(f"half-close {text}", _half_closing(victim, Way.THERE)),
    )


FAULTS: tuple[Fault[LinkedTarget], ...] = (
    *(Fault[LinkedTarget](fault.name, fault.inject) for fault in PROCESS_FAULTS),
    *_of_link("prefill", "gateway - prefill"),
    *_of_link("decode", "gateway - decode"),
    Fault("silence gateway - decode one way", _weathering("decode", there=_SILENT)),
    *_of_link("kv decode", "prefill - decode (KV)"),
    Fault("flip bits of prefill - decode (KV)", _weathering("kv decode", there=_FLIPPING)),
    *_of_link("gateway", "client - gateway"),
)
