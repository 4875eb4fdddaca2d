"""A gateway that reads late: its worker keeps what it did not take, and tells it in few
messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.events import SequenceEvent, Tokens
from baton.rpc.channel import aio_channel
from baton.types import KvSource, Sampling, SequenceSpec, Tier
from baton.v1 import sequence_service_pb2, sequence_service_pb2_grpc, worker_pb2, worker_pb2_grpc
from engine.oracle import oracle_tokens
from gateway.links.worker_link import WorkerLink
from gateway.routing.fleet import Fleet
from gateway.routing.workers import RECEIVE_WINDOW_BYTES, keep_connected
from tests.support.live_tiers import decode_worker

NUM_SEQUENCES = 8
MAX_TOKENS = 100


_Stub = sequence_service_pb2_grpc.SequenceServiceStub


class LateReader:
    """A Serve call that reads nothing until it may. Implements what the gateway uses of it."""

    def __init__(self, call: Any, may_read: asyncio.Event) -> None:
        self._call = call
        self._may_read = may_read
        self.write = call.write
        self.cancel = call.cancel
        self.messages: list[sequence_service_pb2.ServeResponse] = []

    async def read(self) -> Any:
        await self._may_read.wait()
        message = await self._call.read()
        if isinstance(message, sequence_service_pb2.ServeResponse):
            self.messages.append(message)
        return message


class Readers:
    """Makes every Serve call of the gateway a late reader."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.calls: list[LateReader] = []

    def stub_over(self, channel: grpc.aio.Channel) -> Readers:
        self._stub = _Stub(channel)
        return self

    def Serve(self) -> LateReader:  # noqa: N802, the name in the .proto
        self.calls.append(LateReader(self._stub.Serve(), self.may_read))
        return self.calls[-1]


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[WorkerLink]:
    """The link that a gateway has to the worker."""
    fleet = Fleet()
    worker = fleet.add(address, Tier.DECODE)
    changed = asyncio.Event()
    fleet.listen(changed.set)
    keeping = asyncio.create_task(keep_connected(fleet, address))
    try:
        while not worker.is_ready:
            changed.clear()
            await changed.wait()
        yield worker.link
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))


async def until_all_ended(address: str) -> int:
    """Steps that the worker took until it had ended all its sequences."""
    async with aio_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        async for load in stub.WatchLoad(worker_pb2.WatchLoadRequest()):
            if load.num_steps >= MAX_TOKENS and not load.num_running + load.num_waiting:
                return int(load.num_steps)
    raise AssertionError("the load stream ended")


@pytest.mark.slow
async def test_steps_that_a_late_gateway_missed_come_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers = Readers()
    monkeypatch.setattr(
        "gateway.links.grpc_link.sequence_service_pb2_grpc.SequenceServiceStub", readers.stub_over
    )
    told: list[list[SequenceEvent]] = [[] for _ in range(NUM_SEQUENCES)]
    ended = asyncio.Event()

    def hear(number: int, event: SequenceEvent) -> None:
        told[number].append(event)
        if all(e and isinstance(e[-1], Tokens) and e[-1].finish for e in told):
            ended.set()

    sampling = Sampling(max_tokens=MAX_TOKENS, logprobs=20)
    prompts = [(number, 1, 2) for number in range(NUM_SEQUENCES)]
    async with decode_worker() as address, connected(address) as link:
        for number, prompt in enumerate(prompts):
            spec = SequenceSpec(f"r{number}", prompt, sampling)
            link.open(spec, KvSource.LOCAL, [partial(hear, number)])
        num_steps = await until_all_ended(address)
        readers.may_read.set()
        await ended.wait()
    (call,) = readers.calls
    sizes = [message.ByteSize() for message in call.messages]
    assert sum(sizes) - max(sizes) <= 2 * RECEIVE_WINDOW_BYTES, "what was on its way step by step"
    largest = call.messages[sizes.index(max(sizes))].tokens
    assert max(sizes) > RECEIVE_WINDOW_BYTES
    assert sorted(largest.handles) == sorted(set(largest.handles)), "one entry for each sequence"
    assert len(call.messages) < num_steps
    for prompt, events in zip(prompts, told, strict=True):
        tokens = [e for e in events if isinstance(e, Tokens)]
        assert [s.token_id for e in tokens for s in e.samples] == oracle_tokens(
            prompt, sampling, 1000
        )
