"""Small workers over real gRPC, in the test's own process and event loop, without engines or KV.

Each knows its partner by the ticket's text. What a test wants to see is counted; what it wants to
happen is a method.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from baton.events import (
    Committed,
    Deferred,
    HandedOff,
    LocalPrefill,
    Offered,
    Prefilled,
    SequenceEvent,
    Tokens,
)
from baton.rpc.server import RunningServer, start_server
from baton.types import (
    BlockCounts,
    FinishReason,
    KvSource,
    Sample,
    SequenceSpec,
    WorkerInfo,
    WorkerLoad,
)
from baton.v1 import (
    sequence_service_pb2,
    sequence_service_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from baton.wire import (
    info_to_proto,
    load_to_proto,
    sequence_from_proto,
    step_to_proto,
)
from tests.support.fake_workers import expected_output, next_sample

_HEARTBEAT_S = 0.2


@dataclass(eq=False)
class GrpcWorker(
    worker_pb2_grpc.WorkerServiceServicer,
    sequence_service_pb2_grpc.SequenceServiceServicer,
):
    """Either tier, as `info` says. `is_holding`: sequences stay open without a token until they are
    aborted."""

    info: WorkerInfo
    is_holding: bool = False
    is_silent: bool = False
    heartbeat_age_ms: int = 0
    max_heartbeat_age_ms: int = 1500
    is_draining: bool = False
    num_opened: int = 0
    open_handles: set[int] = field(default_factory=set)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    responses: dict[int, asyncio.Queue[sequence_service_pb2.ServeResponse]] = field(
        default_factory=dict
    )
    specs: dict[int, SequenceSpec] = field(default_factory=dict)

    async def wait_until_holding(self, num_sequences: int) -> None:
        """Until so many sequences are open here."""
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.open_handles) == num_sequences)

    # The services.

    async def GetWorkerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        return info_to_proto(self.info)

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802, ARG002
        while True:
            if not self.is_silent:
                blocks = BlockCounts(self.info.num_blocks - len(self.open_handles), 0, 0)
                load = WorkerLoad(
                    num_running=len(self.open_handles), blocks=blocks, is_draining=self.is_draining
                )
                yield load_to_proto(load, self.heartbeat_age_ms, self.max_heartbeat_age_ms)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_S), self.changed:
                    await self.changed.wait()

    async def Serve(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802, ARG002
        outgoing: asyncio.Queue[sequence_service_pb2.ServeResponse] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, outgoing))
        try:
            while True:
                yield await outgoing.get()
        finally:
            reader.cancel()
            self.open_handles.clear()

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        self.is_draining = True
        return worker_pb2.DrainResponse(num_remaining=len(self.open_handles))

    # What it does.

    def commit(self, handle: int) -> None:
        """KV of a whole prompt has come, and the first tokens, which the gateway has from the
        sender as well."""
        self._send(handle, Committed(1.5, 64))
        self.produce(handle)

    async def _read(self, requests: Any, outgoing: Any) -> None:
        async for request in requests:
            if request.HasField("abort"):
                self.open_handles.discard(request.abort.handle)
            elif request.HasField("open"):
                self._open(request.open, outgoing)
            async with self.changed:
                self.changed.notify_all()

    def _open(self, request: sequence_service_pb2.OpenSequence, outgoing: Any) -> None:
        handle = request.handle
        self.num_opened += 1
        self.open_handles.add(handle)
        self.responses[handle] = outgoing
        self.specs[handle] = sequence_from_proto(request.sequence)
        if self.info.num_blocks < len(self.open_handles):
            self._send(handle, Deferred("full"))
        elif request.send_to:
            self._hand_off(handle, request.send_to)
        elif request.source == KvSource.LOCAL:
            self._send(handle, LocalPrefill(0))
            if not self.is_holding:
                self._send(handle, Prefilled(0, 0, 0.0, 0.0))
            self.produce(handle)
        else:
            ticket = f"{self.info.identity.worker_id}/{handle}".encode()
            _TICKETS[ticket] = (self, handle)
            self._send(handle, Offered(ticket, 2))

    def _hand_off(self, handle: int, ticket: bytes) -> None:
        """The prompt is computed, and its KV sent, at once."""
        group = self.specs[handle]
        self._send(handle, Prefilled(1, 0, 2.0, 0.0))
        for number in range(group.num_choices):
            spec = group.choice_alone(number)
            first = Tokens(len(spec.output_token_ids), (next_sample(spec, spec.token_ids),))
            self._send_at(handle, number, first)
        worker, other = _TICKETS[ticket]
        worker.commit(other)
        self._send(handle, HandedOff())
        self.open_handles.discard(handle)

    def produce(self, handle: int) -> None:
        """All the rest of the output of each choice, in two messages."""
        if self.is_holding:
            return
        group = self.specs[handle]
        for number in range(group.num_choices):
            spec = group.choice_alone(number)
            first = len(spec.output_token_ids)
            rest = [Sample(token_id) for token_id in expected_output(spec)[first:]]
            middle = len(rest) // 2
            own, outgoing = handle + number, self.responses[handle]
            if middle:
                _put(outgoing, own, Tokens(first, tuple(rest[:middle])))
            _put(outgoing, own, Tokens(first + middle, tuple(rest[middle:]), FinishReason.LENGTH))
        self.open_handles.discard(handle)

    def _send(self, handle: int, event: SequenceEvent) -> None:
        _put(self.responses[handle], handle, event)

    def _send_at(self, handle: int, number: int, event: SequenceEvent) -> None:
        _put(self.responses[handle], handle + number, event)


def _put(
    outgoing: asyncio.Queue[sequence_service_pb2.ServeResponse], handle: int, event: SequenceEvent
) -> None:
    outgoing.put_nowait(step_to_proto([(handle, event)]))


_TICKETS: dict[bytes, tuple[GrpcWorker, int]] = {}


@contextlib.asynccontextmanager
async def serving(worker: GrpcWorker, port: int = 0) -> AsyncIterator[RunningServer]:
    """`worker` behind a port of this host."""

    def register(server: grpc.aio.Server) -> Sequence[str]:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        sequence_service_pb2_grpc.add_SequenceServiceServicer_to_server(worker, server)
        return ("baton.v1.WorkerService",)

    running = await start_server(f"127.0.0.1:{port}", register)
    try:
        yield running
    finally:
        await running.stop()
