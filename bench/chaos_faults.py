"""The faults that bench.chaos inflicts: on processes, by signals, and on links, by proxies.

Each names its victims by tier; the round decides which of the two workers it is.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.fault_proxy import FAIR, FaultProxy, ProxiedCluster, Way, Weather

#: How long a fault of a link, or a frozen process, lasts, in seconds.
LASTS_S = 4.0


@dataclass(frozen=True, slots=True)
class Scene:
    """What a fault is inflicted on. first, second: the two workers' numbers, the other way round in
    the next round."""

    cluster: ProxiedCluster
    first: int
    second: int

    def name_of(self, victim: str) -> str:
        """ "decode" is one of the decode workers, "other decode" the other; "kv decode" the way of
        KV to the first."""
        if victim == "gateway":
            return victim
        if victim.startswith("other "):
            return f"{victim.removeprefix('other ')}-{self.second}"
        return f"{victim}-{self.first}"

    def signal(self, victim: str, signum: signal.Signals) -> None:
        os.kill(self.cluster.pid_of(self.name_of(victim)), signum)

    def link(self, victim: str) -> FaultProxy:
        return self.cluster.links[self.name_of(victim)]


Inflict = Callable[[Scene], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens. `inflict` returns when it is over, healing apart."""

    name: str
    inflict: Inflict


def _killing(*victims: str, pause_s: float = 0.0) -> Inflict:
    """Kill one after the other."""

    async def inflict(scene: Scene) -> None:
        for victim in victims:
            scene.signal(victim, signal.SIGKILL)
            await asyncio.sleep(pause_s)

    return inflict


def _terminating(*victims: str, pause_s: float = 0.0) -> Inflict:
    async def inflict(scene: Scene) -> None:
        for victim in victims:
            scene.signal(victim, signal.SIGTERM)
            await asyncio.sleep(pause_s)

    return inflict


def _freezing(victim: str, seconds: float) -> Inflict:
    async def inflict(scene: Scene) -> None:
        scene.signal(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            scene.signal(victim, signal.SIGCONT)

    return inflict


def _cutting(victim: str) -> Inflict:
    async def inflict(scene: Scene) -> None:
        scene.link(victim).cut()

    return inflict


def _refusing(victim: str) -> Inflict:
    async def inflict(scene: Scene) -> None:
        link = scene.link(victim)
        link.refuse()
        link.cut()
        try:
            await asyncio.sleep(LASTS_S)
        finally:
            await link.accept()

    return inflict


def _half_closing(victim: str, way: Way) -> Inflict:
    async def inflict(scene: Scene) -> None:
        scene.link(victim).half_close(way)

    return inflict


def _weathering(victim: str, there: Weather = FAIR, back: Weather = FAIR) -> Inflict:
    async def inflict(scene: Scene) -> None:
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


def _of_link(victim: str, text: str) -> tuple[Fault, ...]:
    """What may happen to any link."""
    return (
        Fault(f"cut {text}", _cutting(victim)),
        Fault(f"refuse {text}", _refusing(victim)),
        Fault(f"silence {text}", _weathering(victim, _SILENT, _SILENT)),
        Fault(f"delay {text} by 50 ms each way", _weathering(victim, _SLOW, _SLOW)),
        Fault(f"throttle {text} to 200 kB/s", _weathering(victim, _THIN, _THIN)),
        Fault(f"half-close {text}", _half_closing(victim, Way.THERE)),
    )


FAULTS = (
    Fault("kill a prefill worker", _killing("prefill")),
    Fault("kill a decode worker", _killing("decode")),
    Fault("freeze a decode worker", _freezing("decode", LASTS_S)),
    Fault("freeze a prefill worker", _freezing("prefill", LASTS_S)),
    Fault("kill one of each tier", _killing("other prefill", "other decode")),
    Fault("kill a decode worker, then the other", _killing("decode", "other decode", pause_s=0.5)),
    Fault("stall a decode worker for 1 s", _freezing("other decode", 1.0)),
    Fault("terminate a decode worker", _terminating("decode")),
    Fault("terminate a prefill worker", _terminating("prefill")),
    Fault("kill the whole prefill tier", _killing("prefill", "other prefill")),
    Fault("kill the whole decode tier", _killing("decode", "other decode")),
    Fault("kill the gateway", _killing("gateway")),
    *_of_link("prefill", "gateway - prefill"),
    *_of_link("decode", "gateway - decode"),
    Fault("silence gateway - decode one way", _weathering("decode", there=_SILENT)),
    *_of_link("kv decode", "prefill - decode (KV)"),
    Fault("flip bits of prefill - decode (KV)", _weathering("kv decode", there=_FLIPPING)),
    *_of_link("gateway", "client - gateway"),
)
