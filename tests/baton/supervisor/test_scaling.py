"""As many workers as are wanted: missing ones start together, others are drained."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from baton.supervisor import Cluster
from baton.supervisor.scaling import Scaling

if TYPE_CHECKING:
    from conftest import Stage

NAMES = ["prefill-0", "decode-0", "decode-1", "decode-2"]


class Workers:
    """Workers that start and end when the test says so."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.may_end = asyncio.Event()
        self.stopped: list[str] = []

    def start(self, name: str) -> None:
        self.started.append(name)

    async def stop(self, name: str) -> None:
        self.stopped.append(name)
        await self.may_end.wait()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_missing_workers_start_together_and_the_last_ones_go() -> None:
    workers = Workers()
    scaling = Scaling(NAMES, NAMES[:2], workers.start, workers.stop)
    running = asyncio.create_task(scaling.run())
    scaling.want(99)
    await settled()
    assert workers.started == NAMES[2:], "at most those that there may be"
    scaling.want(0)
    await settled()
    assert workers.stopped == NAMES[1:], "one is kept"
    scaling.want(3)
    await settled()
    assert workers.started == NAMES[2:], "no second process of one that has not ended"
    workers.may_end.set()
    await settled()
    assert workers.started == [*NAMES[2:], *NAMES[1:3]]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def until(stage: Stage, is_so: Callable[[list[str]], bool]) -> None:
    """Return once the fakes' journal is so."""
    async with asyncio.timeout(60):
        while not is_so(stage.journal()):
            await asyncio.sleep(0.01)


def say(stage: Stage, number: int, model: str = "") -> str:
    """A gateway's line; of a model by its name, or of the only one."""
    return json.dumps({"model": model or str(stage.folder), "workers": number}) + "\n"


def scaled(stage: Stage, number: int) -> Cluster:
    (stage.folder / "number").write_text(say(stage, number))
    return stage.cluster(planner="on", slo_ttft_ms=500, max_workers=4)


@pytest.mark.slow
async def test_the_gateway_says_how_many_workers_run_and_hears_of_each(stage: Stage) -> None:
    async with scaled(stage, 4) as cluster:
        assert len(cluster.names) >= 3
        await until(stage, lambda journal: sum("heard DECODE" in line for line in journal) == 3)
        assert {*cluster.names} == {*NAMES, "gateway"}
        address = cluster.address_of("decode-2")
        # Another leader says fewer.
        (stage.folder / "number").write_text(say(stage, 3))
        os.kill(cluster.pid_of("gateway"), signal.SIGKILL)
        await until(stage, lambda journal: f"gateway lost {address}" in journal)
        await until(stage, lambda journal: "decode-2 stopped" in journal)
        await until(stage, lambda _: "decode-2" not in cluster.names)
        assert "decode-1 stopped" not in stage.journal()


@pytest.mark.slow
async def test_a_worker_that_fails_to_start_later_holds_no_other_up(stage: Stage) -> None:
    stage.misbehave("decode-1", "crash")
    async with scaled(stage, 4) as cluster:
        await until(stage, lambda journal: any("decode-2 started" in line for line in journal))
        assert "decode-1" in cluster.names
        assert not any("decode-1 started" in line for line in stage.journal())
        (stage.folder / "decode-1").unlink()
        await until(stage, lambda journal: any("decode-1 started" in line for line in journal))


@pytest.mark.slow
async def test_a_start_that_hangs_has_a_deadline(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under it, another process of the worker is tried."""
    monkeypatch.setattr("baton.supervisor.cluster._START_S", 2.0)
    stage.misbehave("decode-1", "hang")
    async with scaled(stage, 3) as cluster:
        child = cluster._children
        async with asyncio.timeout(60):
            while "decode-1" not in child:
                await asyncio.sleep(0.01)
            first = child["decode-1"]._process
            while child["decode-1"]._process in (first, None):
                await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_each_model_has_as_many_workers_as_it_is_said_to(stage: Stage) -> None:
    lines = (say(stage, 3, "one"), say(stage, 1, "two"), say(stage, 9, "three"), "no line\n")
    (stage.folder / "number").write_text("".join(lines))
    two = f"two={stage.folder}:max_workers=2"
    options = {"planner": "on", "slo_ttft_ms": 500, "max_workers": 4, "num_gateways": 2}
    async with stage.cluster(served_model_name="one", more_models=two, **options) as cluster:
        # Prefill workers come first, and those of the first model; a later one of it is decode-1.
        await until(stage, lambda journal: any("decode-1 started" in line for line in journal))
        await until(stage, lambda journal: "decode-3 stopped" in journal)
        await until(stage, lambda _: "decode-3" not in cluster.names)
        assert {"prefill-0", "prefill-1", "decode-0", "decode-1"} <= {*cluster.names}
        assert not any("decode-2 started" in line for line in stage.journal())
