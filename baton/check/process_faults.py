"""Faults of a cluster's processes: kills, freezes and drains.

Each fault names its victims by tier; the round selects one of the two workers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from baton.supervisor import Cluster

#: Seconds for which a process is frozen.
LASTS_S = 4.0


class FaultTarget(Protocol):
    """What a fault is injected into."""

    @property
    def num_workers(self) -> int:
        """Workers that are ready again once the fault has healed."""


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a fault. first, second: numbers of the two workers, swapped in the next round."""

    cluster: Cluster
    first: int
    second: int

    @property
    def num_workers(self) -> int:
        return sum(not name.startswith("gateway") for name in self.cluster.names)

    def name_of(self, victim: str) -> str:
        """Process name of a victim: "decode" is one of the decode workers, "other decode" the
        other."""
        if victim == "gateway":
            return victim
        if victim.startswith("other "):
            return f"{victim.removeprefix('other ')}-{self.second}"
        return f"{victim}-{self.first}"

    def signal(self, victim: str, signum: signal.Signals) -> None:
        os.kill(self.cluster.pid_of(self.name_of(victim)), signum)


TargetT = TypeVar("TargetT", bound=FaultTarget)


@dataclass(frozen=True)
class Fault(Generic[TargetT]):
    """A kind of fault. `inject` returns at its end, not counting recovery."""

    name: str
    inject: Callable[[TargetT], Awaitable[None]]


InjectIntoProcesses = Callable[[Target], Awaitable[None]]


def _signalling(signum: signal.Signals, *victims: str, pause_s: float = 0.0) -> InjectIntoProcesses:
    """Signal the victims, one after the other."""

    async def inject(target: Target) -> None:
        for victim in victims:
            target.signal(victim, signum)
            await asyncio.sleep(pause_s)

    return inject


def _freezing(victim: str, seconds: float) -> InjectIntoProcesses:
    async def inject(target: Target) -> None:
        target.signal(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            target.signal(victim, signal.SIGCONT)

    return inject


_KILL, _TERM = signal.SIGKILL, signal.SIGTERM
PROCESS_FAULTS: tuple[Fault[Target], ...] = (
    Fault("kill a prefill worker", _signalling(_KILL, "prefill")),
    Fault("kill a decode worker", _signalling(_KILL, "decode")),
    Fault("freeze a decode worker", _freezing("decode", LASTS_S)),
    Fault("freeze a prefill worker", _freezing("prefill", LASTS_S)),
    Fault("kill one of each tier", _signalling(_KILL, "other prefill", "other decode")),
    Fault(
        "kill a decode worker, then the other",
        _signalling(_KILL, "decode", "other decode", pause_s=0.5),
    ),
    Fault("stall a decode worker for 1 s", _freezing("other decode", 1.0)),
    Fault("terminate a decode worker", _signalling(_TERM, "decode")),
    Fault("terminate a prefill worker", _signalling(_TERM, "prefill")),
    Fault("kill the whole prefill tier", _signalling(_KILL, "prefill", "other prefill")),
    Fault("kill the whole decode tier", _signalling(_KILL, "decode", "other decode")),
    Fault("kill the gateway", _signalling(_KILL, "gateway")),
)
