"""The links to workers over gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from baton.errors import BatonError, Cancelled, DeadlineExceeded, NoWorkers, WorkerLost
from baton.events import Failed, is_last
from baton.rpc.status import from_rpc_error
from baton.types import FinishReason, Sample, SequenceSpec
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from baton.wire import logprobs_from_proto, sequence_to_proto, step_from_proto
from gateway.inbox import Inbox
from gateway.links import PrefillResult, Sink


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
        self._calls: set[asyncio.Future[prefill_pb2.PrefillResponse]] = set()
        self._lost: str | None = None

    async def prefill(self, spec: SequenceSpec, ticket: bytes, timeout_s: float) -> PrefillResult:
        """See gateway.links.PrefillLink."""
        if self._lost is not None:
            raise WorkerLost(self._lost)
        request = prefill_pb2.PrefillRequest(sequence=sequence_to_proto(spec), ticket=ticket)
        call = asyncio.ensure_future(self._call(request, timeout_s))
        self._calls.add(call)
        try:
            await asyncio.wait((call,))
            if call.cancelled():
                raise WorkerLost(self._lost or "the call was cancelled")
            response = call.result()
        except grpc.aio.AioRpcError as error:
            raise worker_error(error, "prefill", self._address) from error
        finally:
            self._calls.discard(call)
            call.cancel()
        logprobs = response.logprobs if response.HasField("logprobs") else None
        return PrefillResult(
            sample=Sample(response.token_id, logprobs and logprobs_from_proto(logprobs)),
            finish=FinishReason(response.finish_reason),
            num_cached_tokens=response.num_cached_tokens,
            queue_ms=response.queue_ms,
            compute_ms=response.compute_ms,
        )

    def lose(self, reason: str) -> None:
        """The worker is gone: every call ends with WorkerLost. Idempotent."""
        self._lost = reason
        for call in list(self._calls):
            call.cancel()

    async def _call(
        self, request: prefill_pb2.PrefillRequest, timeout_s: float
    ) -> prefill_pb2.PrefillResponse:
        return await self._stub.Prefill(request, timeout=timeout_s)


class GrpcDecodeLink:
    """One Decode stream to a decode worker, shared by all the sequences there."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._address = address
        self._commands: Inbox[decode_pb2.DecodeRequest] = Inbox()
        self._sinks: dict[int, Sink] = {}
        self._num_handles = 0
        self._lost: str | None = None

    def open(self, spec: SequenceSpec, prefill_here: bool, sink: Sink) -> int:
        """See gateway.links.DecodeLink."""
        self._num_handles += 1
        handle = self._num_handles
        if self._lost is not None:
            failed = Failed(WorkerLost.reason, self._lost, is_retriable=True)
            asyncio.get_running_loop().call_soon(sink, failed)
            return handle
        self._sinks[handle] = sink
        self._commands.put(
            decode_pb2.DecodeRequest(
                open=decode_pb2.OpenSequence(
                    handle=handle, sequence=sequence_to_proto(spec), prefill_here=prefill_here
                )
            )
        )
        return handle

    def abort(self, handle: int) -> None:
        """See gateway.links.DecodeLink."""
        if self._sinks.pop(handle, None) is not None and self._lost is None:
            abort = decode_pb2.AbortSequence(handle=handle)
            self._commands.put(decode_pb2.DecodeRequest(abort=abort))

    async def run(self) -> None:
        """Carry commands and events until the stream ends; always raises, WorkerLost or what the worker told.

        The owner calls `lose` afterwards: not before nobody places new sequences here any more.
        """
        call = self._stub.Decode()
        writer = asyncio.create_task(self._write(call))
        try:
            while isinstance(response := await call.read(), decode_pb2.DecodeResponse):
                self._distribute(response)
            raise WorkerLost(f"decode worker at {self._address} ended its stream")
        except grpc.aio.AioRpcError as error:
            raise worker_error(error, "decode", self._address) from error
        finally:
            writer.cancel()
            call.cancel()
            await asyncio.wait((writer,))

    def lose(self, reason: str) -> None:
        """The worker is gone: tell every sequence. Idempotent."""
        self._lost = reason
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(Failed(WorkerLost.reason, reason, is_retriable=True))

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
