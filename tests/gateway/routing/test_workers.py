"""Connections to workers over real gRPC: join, refusal, loss, return."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from baton.commands import Abort
from baton.errors import WorkerLost
from baton.events import Failed, Offered, SequenceEvent
from baton.types import KvSource, Tier
from gateway.routing.fleet import Fleet, WorkerState
from gateway.routing.workers import keep_connected
from tests.support.fake_workers import LAYOUT, make_info
from tests.support.gateway_world import make_spec
from tests.support.grpc_workers import GrpcWorker, serving
from tests.support.stub_link import StubLink

DECODE = make_info("d", Tier.DECODE)
PREFILL = make_info("p", Tier.PREFILL)


async def until(fleet: Fleet, is_so: Callable[[], bool]) -> None:
    """Wait for the fleet to change until `is_so`."""
    changed = asyncio.Event()
    fleet.listen(changed.set)
    while not is_so():
        changed.clear()
        await changed.wait()


@contextlib.asynccontextmanager
async def connected(fleet: Fleet, stall_timeout_s: float = 5.0) -> AsyncIterator[None]:
    tasks = [
        asyncio.create_task(
            keep_connected(fleet, a, stall_timeout_s=stall_timeout_s, draw=lambda: 0.99)
        )
        for a in fleet.workers
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def state(fleet: Fleet, address: str) -> WorkerState:
    return fleet.workers[address].state


async def test_workers_join_and_report_their_load() -> None:
    async with serving(GrpcWorker(DECODE)) as d, serving(GrpcWorker(PREFILL)) as p:
        fleet = Fleet([p.address], [d.address])
        async with connected(fleet):
            await until(fleet, lambda: all(w.is_ready for w in fleet.workers.values()))
            assert fleet.workers[d.address].info == DECODE
            assert fleet.workers[d.address].load.blocks.free == DECODE.num_blocks


async def test_a_worker_that_starts_later_joins_and_one_that_left_joins_again() -> None:
    async with serving(GrpcWorker(DECODE)) as running:
        address, port = running.address, running.port
    fleet = Fleet([], [address])
    async with connected(fleet):
        await until(fleet, lambda: "not reachable" in fleet.workers[address].reason)
        for generation in (1, 2):
            info = replace(DECODE, identity=replace(DECODE.identity, generation=generation))
            async with serving(GrpcWorker(info), port):
                await until(fleet, lambda: state(fleet, address) is WorkerState.READY)
                assert fleet.workers[address].info == info
            await until(fleet, lambda: state(fleet, address) is WorkerState.UNREACHABLE)


@pytest.mark.parametrize(
    ("info", "field"),
    [
        (replace(PREFILL, min_protocol_version=7, max_protocol_version=9), "protocol_version"),
        (replace(PREFILL, tier=Tier.DECODE), "tier"),
        (replace(PREFILL, model="another"), "model"),
        (replace(PREFILL, vocab_size=5), "vocab_size"),
        (replace(PREFILL, identity=DECODE.identity), "worker_id"),
        (replace(PREFILL, layout=replace(LAYOUT, fingerprint="other weights")), "fingerprint"),
        (replace(PREFILL, layout=replace(LAYOUT, num_kv_heads=7)), "num_kv_heads"),
    ],
)
async def test_a_worker_that_does_not_fit_is_refused_by_name(info: object, field: str) -> None:
    odd = GrpcWorker(info)  # type: ignore[arg-type]
    async with serving(GrpcWorker(DECODE)) as d, serving(odd) as p:
        fleet = Fleet([p.address], [d.address])
        fleet.join(d.address, DECODE, StubLink())
        fleet.report(d.address, fleet.workers[d.address].load)
        async with contextlib.AsyncExitStack() as stack:
            task = asyncio.create_task(keep_connected(fleet, p.address))
            stack.callback(task.cancel)
            await until(fleet, lambda: state(fleet, p.address) is WorkerState.REFUSED)
        reason = fleet.workers[p.address].reason
        assert field in reason
        assert p.address in reason
        assert not fleet.ready(Tier.PREFILL)


async def test_unequal_block_sizes_work_together() -> None:
    info = replace(PREFILL, layout=replace(LAYOUT, block_size=32))
    async with serving(GrpcWorker(DECODE)) as d, serving(GrpcWorker(info)) as p:
        fleet = Fleet([p.address], [d.address])
        async with connected(fleet):
            await until(fleet, lambda: all(w.is_ready for w in fleet.workers.values()))


async def test_a_worker_that_drains_takes_no_more_work() -> None:
    worker = GrpcWorker(DECODE)
    async with serving(worker) as d:
        fleet = Fleet([], [d.address])
        async with connected(fleet):
            await until(fleet, lambda: state(fleet, d.address) is WorkerState.READY)
            worker.is_draining = True
            await until(fleet, lambda: state(fleet, d.address) is WorkerState.DRAINING)
            assert not fleet.ready(Tier.DECODE)


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["old heartbeat", "silence", "stop"])
async def test_a_lost_worker_is_out_before_its_sequences_hear_of_it(
    cause: str,
) -> None:
    worker = GrpcWorker(DECODE, is_holding=True)
    async with serving(worker) as d:
        fleet = Fleet([], [d.address])
        async with connected(fleet, stall_timeout_s=0.6):
            await until(fleet, lambda: state(fleet, d.address) is WorkerState.READY)
            events: asyncio.Queue[tuple[SequenceEvent, WorkerState]] = asyncio.Queue()
            link = fleet.workers[d.address].link
            link.open(
                make_spec("a"),
                KvSource.PREFILL,
                [lambda e: events.put_nowait((e, state(fleet, d.address)))],
            )
            event, _ = await events.get()
            assert isinstance(event, Offered)
            if cause == "old heartbeat":
                worker.heartbeat_age_ms = 5000
            elif cause == "silence":
                worker.is_silent = True
            else:
                await d.stop()
            event, seen = await events.get()
            assert event == Failed(WorkerLost.reason, event.message, is_retriable=True)  # type: ignore[union-attr]
            assert seen is not WorkerState.READY
            # A link that was lost tells so itself, and not from within open.
            link.open(
                make_spec("b"),
                KvSource.PREFILL,
                [lambda e: events.put_nowait((e, seen))],
            )
            assert events.empty()
            assert isinstance((await events.get())[0], Failed)


@pytest.mark.slow
async def test_a_gateway_that_stood_still_itself_blames_no_worker() -> None:
    async with serving(GrpcWorker(DECODE)) as d:
        fleet = Fleet([], [d.address])
        async with connected(fleet, stall_timeout_s=0.6):
            await until(fleet, lambda: state(fleet, d.address) is WorkerState.READY)
            seen: list[WorkerState] = []
            fleet.listen(lambda: seen.append(state(fleet, d.address)))
            time.sleep(1.5)  # noqa: ASYNC251, this is what it is about
            await until(fleet, lambda: len(seen) >= 5)
            assert set(seen) == {WorkerState.READY}


async def test_a_worker_whose_steps_are_long_is_kept() -> None:
    worker = GrpcWorker(DECODE, heartbeat_age_ms=9_000, max_heartbeat_age_ms=10_000)
    async with serving(worker) as d:
        fleet = Fleet([], [d.address])
        async with connected(fleet, stall_timeout_s=0.6):
            await until(fleet, lambda: state(fleet, d.address) is WorkerState.READY)
            worker.max_heartbeat_age_ms = 8_000
            await until(fleet, lambda: state(fleet, d.address) is WorkerState.STALLED)


async def test_each_choice_has_a_handle_and_hears_of_a_loss() -> None:
    async with serving(GrpcWorker(DECODE)) as d:
        fleet = Fleet([], [d.address])
        async with connected(fleet):
            await until(fleet, lambda: state(fleet, d.address) is WorkerState.READY)
            link = fleet.workers[d.address].link
            inboxes = [asyncio.Queue[SequenceEvent]() for _ in range(3)]
            sinks = [inbox.put_nowait for inbox in inboxes]
            first = link.open(make_spec("a", num_choices=3), KvSource.PREFILL, sinks)
            assert isinstance(await inboxes[0].get(), Offered)
            assert link.open(make_spec("b"), KvSource.PREFILL, sinks[:1]) == first + 3
            assert isinstance(await inboxes[0].get(), Offered)
            await d.stop()
            for inbox in inboxes:
                assert isinstance(await inbox.get(), Failed)


async def test_an_abort_reaches_the_worker_and_silences_it() -> None:
    worker = GrpcWorker(DECODE, is_holding=True)
    async with serving(worker) as d:
        fleet = Fleet([], [d.address])
        async with connected(fleet):
            await until(fleet, lambda: state(fleet, d.address) is WorkerState.READY)
            link = fleet.workers[d.address].link
            events: list[SequenceEvent] = []
            handle = link.open(make_spec("a"), KvSource.LOCAL, [events.append])
            await worker.wait_until_holding(1)
            link.send(handle, Abort())
            link.send(handle, Abort())
            await worker.wait_until_holding(0)
            num_events = len(events)
            worker.is_holding = False
            worker.produce(handle)
            second: asyncio.Queue[SequenceEvent] = asyncio.Queue()
            link.open(make_spec("b"), KvSource.LOCAL, [second.put_nowait])
            await second.get()  # the stream is in order: what came before it was dropped
            assert len(events) == num_events
