"""A gateway whose own event loop is late blames no worker; one that is on time does."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import WorkerLost
from gateway.routing.workers import _Silence
from tests.support.virtual_loop import VirtualLoop, run_virtual

STALL_S = 1.5


def stand_still(seconds: float) -> None:
    """One turn of the loop that takes so long."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop._now_s += seconds


async def be_busy(turn_s: float) -> None:
    while True:
        await asyncio.sleep(0)
        stand_still(turn_s)


def lost_after_s(turn_s: float, report_s: float = 1e9) -> float:
    """Seconds until the worker counts as lost. turn_s: of each turn of the loop. report_s: when its
    only report is read."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        silence = _Silence(STALL_S)
        busy = asyncio.create_task(be_busy(turn_s)) if turn_s else None
        loop.call_later(report_s, silence.broken)
        with pytest.raises(WorkerLost):
            await silence.run()
        if busy:
            busy.cancel()
        return loop.time()

    return run_virtual(main(), max_time_s=1e12)


def test_a_silent_worker_is_lost_soon() -> None:
    assert STALL_S < lost_after_s(0) < 1.2 * STALL_S + 0.01
    assert STALL_S < lost_after_s(0.01) < 1.3 * STALL_S


@pytest.mark.parametrize("turn_s", [0.2, 0.4])
def test_a_report_that_a_late_loop_reads_late_is_not_missed(turn_s: float) -> None:
    assert lost_after_s(turn_s, report_s=12.0) > 12.0 + STALL_S


@pytest.mark.parametrize("turn_s", [0.1, 0.3, 1.0])
def test_a_dead_worker_is_lost_even_then(turn_s: float) -> None:
    assert lost_after_s(turn_s) < 100.0
