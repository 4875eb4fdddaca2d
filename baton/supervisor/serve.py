"""The service behind `baton serve`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

from baton.config import ServeOptions
from baton.rpc.bind import check_bindable
from baton.service import OnReady, ReadyReport, describe_phases
from baton.supervisor.cluster import Cluster


async def serve_cluster(options: ServeOptions, stop: asyncio.Event, on_ready: OnReady) -> None:
    """Start a gateway and workers of both tiers on this machine, and serve until stopped."""
    check_bindable(options.host, options.port)
    cluster = Cluster(options)
    starting = asyncio.create_task(cluster.start(), name="start")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            on_ready(ReadyReport(cluster.address, cluster.phases))
            await stopping
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.gather(starting, stopping, return_exceptions=True)
        await cluster.stop()


def print_ready(report: ReadyReport) -> None:
    """One line on stdout: where to send requests, and where the time went."""
    sys.stdout.write(f"Baton is ready at {report.address} ({describe_start(report.phases)})\n")
    sys.stdout.flush()


def describe_start(phases: Mapping[str, float]) -> str:
    """Cluster.phases in words, each child's own phases behind it: "decode-0 2.1 s (load 1.9 s), total 3.0 s"."""
    parts = []
    for name, seconds in phases.items():
        if " " in name:
            continue
        own = {
            phase.removeprefix(f"{name} "): spent
            for phase, spent in phases.items()
            if phase.startswith(f"{name} ")
        }
        told = describe_phases({name: seconds})
        parts.append(f"{told} ({describe_phases(own)})" if own else told)
    return ", ".join(parts)
