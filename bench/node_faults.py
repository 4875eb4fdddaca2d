"""Faults of workers of two hosts: of a rank, of a host, and of the network between hosts.

A fault that ends a worker returns once it has, and records how long that took.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from baton.check.process_faults import Fault
from bench.namespaces import Wire
from bench.node_site import ENDS_S, NodeWorker, Site

#: Text in the command line of a rank other than 0.
_RANK = "engine.follow"
#: Seconds for which a network fault lasts.
LASTS_S = 5.0


@dataclass(frozen=True, slots=True)
class SiteTarget:
    """ended_after_s: by fault, the seconds in which it ended a worker; None if it did not."""

    site: Site
    ended_after_s: dict[str, float | None] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        return self.site.num_workers

    def worker(self, name: str) -> NodeWorker:
        return self.site.workers[name]

    def between(self, some: str, *others: str) -> list[Wire]:
        """Wires between hosts with names that begin so."""
        return [
            wire
            for (one, other), wire in self.site.wires.items()
            if one.startswith(some) and other.startswith(others)
        ]


async def _ending(
    name: str, tier: str, node: int, harm: Callable[[NodeWorker], None], target: SiteTarget
) -> None:
    """Harm host `node` of a worker, and wait until that worker has ended: its host 0, or the other
    one if that was hit itself."""
    worker = target.worker(tier)
    waiting = asyncio.create_task(worker.until_ended([worker.hosts[1 if node == 0 else 0]], ENDS_S))
    await asyncio.sleep(0)  # it waits from here on
    harm(worker)
    begin_s = time.monotonic()
    end_s = await waiting
    target.ended_after_s[name] = None if end_s is None else end_s - begin_s


def _signalling(
    name: str, tier: str, node: int, signum: signal.Signals, program: str = ""
) -> Fault[SiteTarget]:
    def harm(worker: NodeWorker) -> None:
        worker.hosts[node].signal(signum, program)

    return Fault(name, partial(_ending, name, tier, node, harm))


def _unplugging(name: str, tier: str, node: int) -> Fault[SiteTarget]:
    async def inject(target: SiteTarget) -> None:
        host = target.worker(tier).hosts[node]
        try:
            await _ending(name, tier, node, lambda _: host.plug(is_in=False), target)
        finally:
            host.plug(is_in=True)

    return Fault(name, inject)


def _parting(name: str, tier: str) -> Fault[SiteTarget]:
    """The two hosts of a worker do not reach each other; others reach both."""

    async def inject(target: SiteTarget) -> None:
        (wire,) = target.between(f"{tier}0", f"{tier}1")

        def harm(_: NodeWorker) -> None:
            wire.loss = 1.0

        try:
            await _ending(name, tier, 1, harm, target)
        finally:
            wire.loss = 0.0

    return Fault(name, inject)


def _weathering(
    name: str, some: str, *others: str, delay_s: float = 0.0, loss: float = 0.0, rate: str = ""
) -> Fault[SiteTarget]:
    """Wires lose and delay packets, and carry less, for LASTS_S: no worker ends."""

    async def inject(target: SiteTarget) -> None:
        wires = target.between(some, *others)
        _set(wires, delay_s, loss)
        for wire in wires if rate else ():
            wire.limit(rate)
        try:
            await asyncio.sleep(LASTS_S)
        finally:
            _set(wires, 0.0, 0.0)
            for wire in wires if rate else ():
                wire.limit("")

    return Fault(name, inject)


def _set(wires: Iterable[Wire], delay_s: float, loss: float) -> None:
    for wire in wires:
        wire.delay_s, wire.loss = delay_s, loss


def _of_worker(tier: str) -> tuple[Fault[SiteTarget], ...]:
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    ends = f"{tier} hosts 0 and 1"
    return (
        _signalling(f"kill a rank of {tier} host 1", tier, 1, kill, _RANK),
        _signalling(f"freeze a rank of {tier} host 1", tier, 1, stop, _RANK),
        _signalling(f"kill {tier} host 1", tier, 1, kill),
        _signalling(f"freeze {tier} host 1", tier, 1, stop),
        _signalling(f"kill {tier} host 0", tier, 0, kill),
        _signalling(f"freeze {tier} host 0", tier, 0, stop),
        _unplugging(f"unplug {tier} host 1", tier, 1),
        _unplugging(f"unplug {tier} host 0", tier, 0),
        _parting(f"no packet between {ends}", tier),
        _weathering(
            f"20 ms, 2 % lost between {ends}", f"{tier}0", f"{tier}1", delay_s=0.02, loss=0.02
        ),
        _weathering(f"2 Mbit/s between {ends}", f"{tier}0", f"{tier}1", rate="2mbit"),
    )


FAULTS: tuple[Fault[SiteTarget], ...] = (
    *_of_worker("prefill"),
    *_of_worker("decode"),
    _weathering("no packet between tiers", "prefill", "decode", "spare", loss=1.0),
    _weathering("20 ms, 2 % lost between tiers", "prefill", "decode", delay_s=0.02, loss=0.02),
    _weathering("2 Mbit/s between tiers", "prefill", "decode", rate="2mbit"),
)
