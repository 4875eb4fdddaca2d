"""The faults that bench.chaos inflicts: those of processes, and on links, by proxies.

Each names its victims by tier; the round decides which of the two workers it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from baton.check.process_faults import LASTS_S, PROCESS_FAULTS, Fault, Scene
from bench.fault_proxy import FAIR, FaultProxy, ProxiedCluster, Way, Weather


@dataclass(frozen=True, slots=True)
class LinkedScene(Scene):
    """Whose links may fail, too."""

    cluster: ProxiedCluster

    def link(self, victim: str) -> FaultProxy:
        """ "kv decode" is the way of KV to the first decode worker."""
        return self.cluster.links[self.name_of(victim)]


Inflict = Callable[[LinkedScene], Awaitable[None]]


def _cutting(victim: str) -> Inflict:
    async def inflict(scene: LinkedScene) -> None:
        scene.link(victim).cut()

    return inflict


def _refusing(victim: str) -> Inflict:
    async def inflict(scene: LinkedScene) -> None:
        link = scene.link(victim)
        link.refuse()
        link.cut()
        try:
            await asyncio.sleep(LASTS_S)
        finally:
            await link.accept()

    return inflict


def _half_closing(victim: str, way: Way) -> Inflict:
    async def inflict(scene: LinkedScene) -> None:
        scene.link(victim).half_close(way)

    return inflict


def _weathering(victim: str, there: Weather = FAIR, back: Weather = FAIR) -> Inflict:
    async def inflict(scene: LinkedScene) -> None:
        link = scene.link(victim)
        link.weather(there, back)
        try:
            await asyncio.sleep(LASTS_S)
        finally:
            link.heal()

    return inflict


_SILENT = Weather(is_silent=True)
_SLOW = Weather(delay_s=0.05)
_THIN = Weather(bytes_per_s=200_000)
_FLIPPING = Weather(flip_every=20_000)


def _of_link(victim: str, text: str) -> tuple[Fault[LinkedScene], ...]:
    """What may happen to any link."""
    return (
        Fault(f"cut {text}", _cutting(victim)),
        Fault(f"refuse {text}", _refusing(victim)),
        Fault(f"silence {text}", _weathering(victim, _SILENT, _SILENT)),
        Fault(f"delay {text} by 50 ms each way", _weathering(victim, _SLOW, _SLOW)),
        Fault(f"throttle {text} to 200 kB/s", _weathering(victim, _THIN, _THIN)),
        Fault(f"half-close {text}", _half_closing(victim, Way.THERE)),
    )


FAULTS: tuple[Fault[LinkedScene], ...] = (
    *(Fault[LinkedScene](fault.name, fault.inflict) for fault in PROCESS_FAULTS),
    *_of_link("prefill", "gateway - prefill"),
    *_of_link("decode", "gateway - decode"),
    Fault("silence gateway - decode one way", _weathering("decode", there=_SILENT)),
    *_of_link("kv decode", "prefill - decode (KV)"),
    Fault("flip bits of prefill - decode (KV)", _weathering("kv decode", there=_FLIPPING)),
    *_of_link("gateway", "client - gateway"),
)
