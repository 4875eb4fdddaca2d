"""Both tiers' services over real gRPC and a real KV channel, driven as a gateway drives them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.errors import InvalidRequest
from baton.events import (
    AddressedEvent,
    Committed,
    Failed,
    HandedOff,
    LocalPrefill,
    Offered,
    Prefilled,
    SequenceEvent,
    Tokens,
    is_last,
)
from baton.rpc.channel import aio_channel
from baton.rpc.status import from_rpc_error
from baton.types import FinishReason, KvSource, Sampling, SequenceSpec
from baton.v1 import (
    sequence_service_pb2,
    sequence_service_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from baton.wire import info_from_proto, sequence_to_proto, step_from_proto
from engine.oracle import oracle_tokens
from tests.support.live_tiers import decode_worker, prefill_worker

PROMPT = tuple(range(1, 40))


def spec_of(max_tokens: int = 12, **sampling: Any) -> SequenceSpec:
    return SequenceSpec("r", PROMPT, Sampling(max_tokens=max_tokens, **sampling))


class Stream:
    """One stream, as a gateway holds it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = sequence_service_pb2_grpc.SequenceServiceStub(channel).Serve()
        self._handles = itertools.count(1)
        self._events = self._read()

    async def open(
        self, spec: SequenceSpec, handle: int | None = None, send_to: bytes = b""
    ) -> int:
        handle = handle or next(self._handles)
        source = KvSource.LOCAL if send_to else KvSource.PREFILL
        message = sequence_service_pb2.OpenSequence(
            handle=handle,
            sequence=sequence_to_proto(spec),
            source=sequence_service_pb2.KvSource.ValueType(source),
            send_to=send_to,
        )
        await self.call.write(sequence_service_pb2.ServeRequest(open=message))
        return handle

    async def abort(self, handle: int) -> None:
        message = sequence_service_pb2.AbortSequence(handle=handle)
        await self.call.write(sequence_service_pb2.ServeRequest(abort=message))

    async def next(self) -> SequenceEvent:
        return (await anext(self._events))[1]

    async def _read(self) -> AsyncIterator[AddressedEvent]:
        async for response in self.call:
            for addressed in step_from_proto(response):
                yield addressed


async def prefill(channel: grpc.aio.Channel, spec: SequenceSpec, ticket: bytes) -> int:
    """The first token, once the KV is delivered."""
    stream = Stream(channel)
    await stream.open(spec, send_to=ticket)
    assert isinstance(await stream.next(), LocalPrefill)
    assert isinstance(await stream.next(), Prefilled)
    first = await stream.next()
    assert isinstance(first, Tokens)
    assert isinstance(await stream.next(), HandedOff)
    stream.call.cancel()
    return first.samples[0].token_id


async def until_idle(channel: grpc.aio.Channel) -> worker_pb2.WatchLoadResponse:
    """The first load report in which no block is leased."""
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    async for load in stub.WatchLoad(worker_pb2.WatchLoadRequest()):
        if load.num_leased_blocks == load.num_running == load.num_open_tickets == 0:
            return load
    raise AssertionError("the load stream ended")


@asynccontextmanager
async def tiers(
    max_local_prefill_tokens: int = 0, **options: Any
) -> AsyncIterator[tuple[grpc.aio.Channel, grpc.aio.Channel]]:
    decode_options = {"max_local_prefill_tokens": max_local_prefill_tokens, **options}
    async with (
        decode_worker(**decode_options) as decode_address,
        prefill_worker(**options) as prefill_address,
        aio_channel(decode_address) as decode_channel,
        aio_channel(prefill_address) as prefill_channel,
    ):
        yield decode_channel, prefill_channel


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 7, "logprobs": 2}])
async def test_a_sequence_is_handed_over_and_decoded(
    transport: str, sampling: dict[str, Any]
) -> None:
    async with tiers(kv_transport=transport) as (decode_channel, prefill_channel):
        stream = Stream(decode_channel)
        spec = spec_of(**sampling)
        await stream.open(spec)
        offered = await stream.next()
        assert isinstance(offered, Offered)
        first = await prefill(prefill_channel, spec, offered.ticket)
        committed = await stream.next()
        assert isinstance(committed, Committed)
        assert committed.transfer_bytes == len(PROMPT) * 4 * 2 * 2 * 8
        tokens: list[int] = []
        finish = FinishReason.NONE
        while finish is FinishReason.NONE:
            event = await stream.next()
            assert isinstance(event, Tokens)
            assert event.token_index == len(tokens)
            assert all((s.logprobs is not None) == ("logprobs" in sampling) for s in event.samples)
            tokens += [sample.token_id for sample in event.samples]
            finish = event.finish
        assert tokens == oracle_tokens(PROMPT, spec.sampling, 1000)
        assert tokens[0] == first
        await until_idle(decode_channel)
        await until_idle(prefill_channel)


async def test_the_end_of_a_stream_frees_all_its_sequences() -> None:
    async with tiers() as (decode_channel, prefill_channel):
        stream = Stream(decode_channel)
        spec = spec_of(max_tokens=3000)
        await stream.open(spec)
        await stream.open(spec)
        first = await stream.next()
        assert isinstance(first, Offered)
        await prefill(prefill_channel, spec, first.ticket)
        assert isinstance(await stream.next(), Offered)
        stream.call.cancel()
        await until_idle(decode_channel)
        await until_idle(prefill_channel)


async def test_an_abort_ends_one_sequence_and_no_other() -> None:
    async with tiers(max_local_prefill_tokens=100) as (decode_channel, _):
        stream = Stream(decode_channel)
        await stream.open(spec_of(max_tokens=3000))
        await stream.next()
        await stream.abort(1)
        await stream.open(spec_of())
        tokens = []
        while True:
            handle, event = await anext(stream._events)
            if handle == 2 and isinstance(event, Tokens):
                tokens += [sample.token_id for sample in event.samples]
                if is_last(event):
                    break
        assert tokens == oracle_tokens(PROMPT, Sampling(max_tokens=12), 1000)
        await until_idle(decode_channel)


async def test_a_cancelled_prefill_kills_its_ticket() -> None:
    async with tiers(oracle_step_ms=50.0, max_num_batched_tokens=4, max_num_seqs=4) as (
        decode_channel,
        channel,
    ):
        stream = Stream(decode_channel)
        await stream.open(spec_of())
        offered = await stream.next()
        assert isinstance(offered, Offered)
        prompt = Stream(channel)
        await prompt.open(spec_of(), send_to=offered.ticket)
        loads = worker_pb2_grpc.WorkerServiceStub(channel).WatchLoad(worker_pb2.WatchLoadRequest())
        async for load in loads:
            if load.num_running:
                break
        loads.cancel()
        await prompt.abort(1)
        failed = await stream.next()
        assert isinstance(failed, Failed)
        assert failed.is_retriable
        await until_idle(decode_channel)
        await until_idle(channel)


async def test_bad_calls_are_refused_and_disturb_nothing() -> None:
    async with tiers() as (decode_channel, prefill_channel):
        prompts = Stream(prefill_channel)
        await prompts.open(spec_of(), send_to=b"no ticket")
        event = await prompts.next()
        assert isinstance(event, Failed)
        assert event.reason == "INVALID_REQUEST"
        stream = Stream(decode_channel)
        await stream.open(SequenceSpec("r", (1, 5000), Sampling()))
        event = await stream.next()
        assert isinstance(event, Failed)
        assert event.reason == "INVALID_REQUEST"
        assert "5000" in event.message
        await stream.open(SequenceSpec("r", (), Sampling()))
        event = await stream.next()
        assert isinstance(event, Failed)
        assert event.reason == "INVALID_REQUEST"
        await stream.open(spec_of(), handle=1)  # used before
        with pytest.raises(grpc.RpcError) as refused:
            await stream.next()
        assert isinstance(from_rpc_error(refused.value), InvalidRequest)
        await until_idle(decode_channel)


async def test_workers_describe_themselves_and_drain() -> None:
    async with tiers(max_local_prefill_tokens=100, oracle_step_ms=1.0) as (channel, _):
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        info = info_from_proto(await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest()))
        assert (info.model, info.layout.block_size) == ("oracle", 4)
        assert info.max_local_prefill_tokens == 100
        stream = Stream(channel)
        await stream.open(spec_of(max_tokens=100))
        await stream.next()
        drained = asyncio.ensure_future(stub.Drain(worker_pb2.DrainRequest(), timeout=30))
        async for load in stub.WatchLoad(worker_pb2.WatchLoadRequest()):
            if load.state == worker_pb2.WORKER_STATE_DRAINING:
                break
        await stream.open(spec_of())
        num_tokens = 0
        refused: Failed | None = None
        while num_tokens < 100 or refused is None:
            event = await stream.next()
            num_tokens += len(event.samples) if isinstance(event, Tokens) else 0
            refused = event if isinstance(event, Failed) else refused
        assert (refused.reason, refused.is_retriable) == ("DRAINING", True)
        assert (await drained).num_remaining == 0
