"""DecodeService: one stream per gateway, commands in, steps out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from baton.errors import InvalidRequest
from baton.events import Deferred
from baton.rpc.interceptor import send_headers
from baton.types import KvSource
from baton.v1 import decode_pb2, decode_pb2_grpc
from baton.wire import sequence_from_proto, step_to_proto
from decode_svc.commands import (
    Abort,
    DecodeCommand,
    HandOff,
    Known,
    Open,
    Pause,
    Resume,
    StreamClosed,
    StreamEvent,
)
from decode_svc.outbox import Outbox, in_messages


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Translates between streams and the core's commands and events."""

    def __init__(
        self, submit: Callable[[DecodeCommand], None], has_room: Callable[[], bool]
    ) -> None:
        """submit, has_room: the engine loop's."""
        self._submit = submit
        self._has_room = has_room
        self._outboxes: dict[int, Outbox] = {}
        self._next_stream = itertools.count()

    def deliver(self, events: Sequence[StreamEvent]) -> None:
        """Hand a step's events to the streams they belong to; a stream that is gone wants none."""
        for event in events:
            outbox = self._outboxes.get(event.stream)
            if outbox is not None:
                outbox.put((event.handle, event.event))

    async def Decode(  # noqa: N802
        self,
        request_iterator: AsyncIterator[decode_pb2.DecodeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        stream = next(self._next_stream)
        outbox = self._outboxes[stream] = Outbox()
        await send_headers(context)
        reader = asyncio.create_task(self._read(stream, request_iterator, outbox))
        try:
            while events := await outbox.take():
                for message in in_messages(events):
                    yield step_to_proto(message)
            await reader
        finally:
            reader.cancel()
            del self._outboxes[stream]
            self._submit(StreamClosed(stream))

    async def _read(
        self, stream: int, requests: AsyncIterator[decode_pb2.DecodeRequest], outbox: Outbox
    ) -> None:
        """Pass commands on until the gateway ends the stream. Raises InvalidRequest if a handle is used twice."""
        last_handle = -1
        try:
            async for request in requests:
                match request.WhichOneof("command"):
                    case "open":
                        if request.open.handle <= last_handle:
                            raise InvalidRequest(
                                f"open.handle: {request.open.handle} is not above {last_handle}; "
                                "handles of a stream must rise"
                            )
                        opened = _open(stream, request.open)
                        last_handle = opened.handle + opened.spec.num_choices - 1
                        self._admit(opened, outbox)
                    case "abort":
                        self._submit(Abort(stream, request.abort.handle))
                    case "pause":
                        self._submit(Pause(stream, request.pause.handle))
                    case "hand_off":
                        hand_off = request.hand_off
                        self._submit(HandOff(stream, hand_off.handle, hand_off.ticket))
                    case "resume":
                        self._submit(Resume(stream, request.resume.handle))
                    case "known":
                        self._submit(Known(stream, frozenset(request.known.handles)))
        finally:
            outbox.close()

    def _admit(self, opened: Open, outbox: Outbox) -> None:
        if self._has_room():
            self._submit(opened)
        else:
            outbox.put((opened.handle, Deferred("the engine loop's inbox is full")))


def _open(stream: int, message: decode_pb2.OpenSequence) -> Open:
    source = KvSource(message.source) if message.source else KvSource.PREFILL_WORKER
    return Open(stream, message.handle, sequence_from_proto(message.sequence), source)
