"""The links to workers over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    EngineFault,
    NoWorkers,
    WorkerLost,
)
from baton.events import Failed, is_last
from baton.rpc.status import from_rpc_error
from baton.types import FinishReason, KvSource, SequenceSpec
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.wire import (
    logprobs_from_proto,
    sample_from_proto,
    sequence_to_proto,
    step_from_proto,
)
from gateway.inbox import Inbox
from gateway.links import First, OnFirst, PrefillResult, Sink

#: How often a decode worker is told which of its sequences are known here, in seconds.
AUDIT_S = 5.0


def worker_error(error: grpc.RpcError, tier: str, address: str) -> BatonError:
    """What a failed call to a worker means here: one that cannot be reached is lost."""
    result = from_rpc_error(error, peer=f"{tier} worker", address=address)
    if isinstance(result, NoWorkers | Cancelled | DeadlineExceeded):
        return WorkerLost(result.message)
    return result


class GrpcPrefillLink:
    """A prefill worker's PrefillService on a channel that somebody else owns."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._address = address
        self._calls: set[asyncio.Future[None]] = set()
        self._lost: str | None = None

    async def prefill(
        self, spec: SequenceSpec, ticket: bytes, timeout_s: float, on_first: OnFirst
    ) -> None:
        """See gateway.links.PrefillLink."""
        if self._lost is not None:
            raise WorkerLost(self._lost)
        request = prefill_pb2.PrefillRequest(sequence=sequence_to_proto(spec), ticket=ticket)
        call = asyncio.ensure_future(self._call(request, timeout_s, on_first))
        self._calls.add(call)
        try:
            await asyncio.wait((call,))
            if call.cancelled():
                raise WorkerLost(self._lost or "the call was cancelled")
            call.result()
        except grpc.aio.AioRpcError as error:
            raise worker_error(error, "prefill", self._address) from error
        finally:
            self._calls.discard(call)
            call.cancel()

    def lose(self, reason: str) -> None:
        """The worker is gone: every call ends with WorkerLost. Idempotent."""
        self._lost = reason
        for call in list(self._calls):
            call.cancel()

    async def _call(
        self, request: prefill_pb2.PrefillRequest, timeout_s: float, on_first: OnFirst
    ) -> None:
        call = self._stub.Prefill(request, timeout=timeout_s)
        try:
            response = await call.read()
            if not isinstance(response, prefill_pb2.PrefillResponse):
                raise EngineFault(f"prefill worker at {self._address} ended without a first token")
            on_first(_result_of(response))
            await call.read()  # the end, or why it is none
        finally:
            call.cancel()


def _result_of(response: prefill_pb2.PrefillResponse) -> PrefillResult:
    return PrefillResult(
        firsts=tuple(
            First(sample_from_proto(first.token), FinishReason(first.finish_reason))
            for first in response.first_tokens
        ),
        num_cached_tokens=response.num_cached_tokens,
        queue_ms=response.queue_ms,
        compute_ms=response.compute_ms,
        prompt_logprobs=tuple(map(logprobs_from_proto, response.prompt_logprobs)),
    )


class GrpcDecodeLink:
    """One Decode stream to a decode worker, shared by all the sequences there."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._address = address
        self._commands: Inbox[decode_pb2.DecodeRequest] = Inbox()
        self._sinks: dict[int, Sink] = {}
        self._num_handles = 0
        self._lost: str | None = None

    def open(self, spec: SequenceSpec, source: KvSource, sinks: Sequence[Sink]) -> int:
        """See gateway.links.DecodeLink."""
        first = self._num_handles + 1
        self._num_handles += len(sinks)
        if self._lost is not None:
            failed = Failed(WorkerLost.reason, self._lost, is_retriable=True)
            loop = asyncio.get_running_loop()
            for sink in sinks:
                loop.call_soon(sink, failed)
            return first
        self._sinks.update(enumerate(sinks, start=first))
        opening = decode_pb2.OpenSequence(
            handle=first,
            sequence=sequence_to_proto(spec),
            source=decode_pb2.KvSource.ValueType(source),
        )
        self._commands.put(decode_pb2.DecodeRequest(open=opening))
        return first

    def abort(self, handle: int) -> None:
        """See gateway.links.DecodeLink."""
        if self._sinks.pop(handle, None) is not None and self._lost is None:
            abort = decode_pb2.AbortSequence(handle=handle)
            self._commands.put(decode_pb2.DecodeRequest(abort=abort))

    def pause(self, handle: int) -> None:
        """See gateway.links.DecodeLink."""
        self._tell(decode_pb2.DecodeRequest(pause=decode_pb2.PauseSequence(handle=handle)))

    def hand_off(self, handle: int, ticket: bytes) -> None:
        """See gateway.links.DecodeLink."""
        hand_off = decode_pb2.HandOffSequence(handle=handle, ticket=ticket)
        self._tell(decode_pb2.DecodeRequest(hand_off=hand_off))

    def resume(self, handle: int) -> None:
        """See gateway.links.DecodeLink."""
        self._tell(decode_pb2.DecodeRequest(resume=decode_pb2.ResumeSequence(handle=handle)))

    async def run(self) -> None:
        """Carry commands and events until the stream ends; always raises, WorkerLost or what the worker told.

        The owner calls `lose` afterwards: not before nobody places new sequences here any more.
        """
        call = self._stub.Decode()
        writer = asyncio.create_task(self._write(call))
        auditor = asyncio.create_task(self._tell_known())
        try:
            while isinstance(response := await call.read(), decode_pb2.DecodeResponse):
                self._distribute(response)
            raise WorkerLost(f"decode worker at {self._address} ended its stream")
        except grpc.aio.AioRpcError as error:
            raise worker_error(error, "decode", self._address) from error
        finally:
            writer.cancel()
            auditor.cancel()
            call.cancel()
            await asyncio.wait((writer, auditor))

    def lose(self, reason: str) -> None:
        """The worker is gone: tell every sequence. Idempotent."""
        self._lost = reason
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(Failed(WorkerLost.reason, reason, is_retriable=True))

    async def _tell_known(self) -> None:
        """Have the worker end what nobody waits for here: a sequence that a fault of ours forgot holds its blocks no longer."""
        while True:
            await asyncio.sleep(AUDIT_S)
            known = decode_pb2.KnownSequences(handles=self._sinks)
            self._tell(decode_pb2.DecodeRequest(known=known))

    def _tell(self, command: decode_pb2.DecodeRequest) -> None:
        if self._lost is None:
            self._commands.put(command)

    def _distribute(self, response: decode_pb2.DecodeResponse) -> None:
        for handle, event in step_from_proto(response):
            sink = self._sinks.get(handle)
            if sink is None:
                continue  # aborted here while this was on its way
            if is_last(event):
                del self._sinks[handle]
            sink(event)

    async def _write(self, call: Any) -> None:
        """Send commands in order. A stream that breaks is the reader's to tell."""
        try:
            while True:
                for command in await self._commands.take_all():
                    await call.write(command)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
