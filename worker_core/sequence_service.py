"""SequenceService: one stream per gateway, commands in, steps out.

Steps that a slow stream missed travel together in its next message, where each sequence has one
entry for all of them: a gateway that falls behind gets fewer and longer entries, which cost it
less."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc.aio

from baton.errors import ClientStalled, InvalidRequest
from baton.events import AddressedEvent, Deferred, Tokens, joined
from baton.rpc.interceptor import send_headers
from baton.types import KvSource
from baton.v1 import sequence_service_pb2, sequence_service_pb2_grpc
from baton.wire import command_from_proto, known, sequence_from_proto, step_to_proto
from worker_core.commands import (
    Command,
    Destination,
    KnownSequences,
    Open,
    SequenceKey,
    StreamClosed,
    StreamCommand,
    StreamEvent,
)
from worker_core.state import failed

#: Events that may wait for a gateway that does not read, before its stream is ended: those of some
#: seconds of a large worker.
MAX_NUM_EVENTS = 2**18


class Outbox:
    """Filled by the engine loop's deliveries, emptied by the stream's writer; both in one asyncio
    loop."""

    def __init__(self) -> None:
        self._events: list[AddressedEvent] = []
        self._filled = asyncio.Event()
        self._is_closed = False

    def put(self, event: AddressedEvent) -> None:
        self._events.append(event)
        self._filled.set()

    def close(self) -> None:
        """No more events: take() returns what is there, then nothing."""
        self._is_closed = True
        self._filled.set()

    async def take(self) -> list[AddressedEvent]:
        """All events since the last call, at least one; empty when closed.

        Raises ClientStalled if the gateway fell behind too far.
        """
        if not self._is_closed:
            await self._filled.wait()
        self._filled.clear()
        events, self._events = self._events, []
        if len(events) > MAX_NUM_EVENTS:
            raise ClientStalled(f"the gateway left {len(events)} events unread")
        return events


def in_messages(events: Iterable[AddressedEvent]) -> Iterator[list[AddressedEvent]]:
    """Cut events so that each sequence's stay in order: a message has changes of state before
    tokens.

    What a sequence becomes after tokens of an earlier step, a pause above all, needs a message
    after theirs.
    """
    parts: list[tuple[list[AddressedEvent], dict[int, list[Tokens]]]] = [([], {})]
    for handle, event in events:
        changes, runs = parts[-1]
        if isinstance(event, Tokens):
            runs.setdefault(handle, []).append(event)
        elif handle in runs:
            parts.append(([(handle, event)], {}))
        else:
            changes.append((handle, event))
    for changes, runs in parts:
        tokens = ((handle, entry) for handle, run in runs.items() for entry in joined(run))
        if message := [*changes, *tokens]:
            yield message


#: Presents a ticket to its owner, under a sequence's key; returns how many leading tokens' KV the
#: owner holds. Raises InvalidRequest if it is none.
Present = Callable[[SequenceKey, bytes], int]


class SequenceServicer(sequence_service_pb2_grpc.SequenceServiceServicer):
    """Translates between streams and the core's commands and events."""

    def __init__(
        self,
        submit: Callable[[Command], None],
        has_room: Callable[[], bool],
        present: Present,
    ) -> None:
        """submit, has_room: the engine loop's. present: the KV sender's `begin`."""
        self._submit = submit
        self._has_room = has_room
        self._present = present
        self._outboxes: dict[int, Outbox] = {}
        self._next_stream = itertools.count()

    def deliver(self, events: Sequence[StreamEvent]) -> None:
        """Pass a step's events to the streams they belong to; a stream that is gone wants none."""
        for event in events:
            outbox = self._outboxes.get(event.stream)
            if outbox is not None:
                outbox.put((event.handle, event.event))

    async def Serve(  # noqa: N802
        self,
        request_iterator: AsyncIterator[sequence_service_pb2.ServeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[sequence_service_pb2.ServeResponse]:
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
        self,
        stream: int,
        requests: AsyncIterator[sequence_service_pb2.ServeRequest],
        outbox: Outbox,
    ) -> None:
        """Submit a stream's commands until it ends. Raises InvalidRequest if a handle is used
        twice."""
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
                        num_handles = max(1, request.open.sequence.num_choices)
                        last_handle = request.open.handle + num_handles - 1
                        self._open(stream, request.open, outbox)
                    case "known":
                        self._submit(KnownSequences(stream, frozenset(request.known.handles)))
                    case _:
                        if (addressed := command_from_proto(request)) is not None:
                            self._submit(StreamCommand(stream, *addressed))
        finally:
            outbox.close()

    def _open(
        self, stream: int, message: sequence_service_pb2.OpenSequence, outbox: Outbox
    ) -> None:
        """Submit a sequence, its ticket presented before: a step may take longer than the ticket's
        owner waits for that."""
        if not self._has_room():
            outbox.put((message.handle, Deferred("the engine loop's inbox is full")))
            return
        try:
            spec = sequence_from_proto(message.sequence)
            source = known(KvSource, message.source or KvSource.PREFILL, "source")
            destination = None
            if message.send_to:
                num_held_tokens = self._present((stream, message.handle), message.send_to)
                destination = Destination(num_held_tokens)
        except InvalidRequest as error:
            outbox.put((message.handle, failed(error)))
        else:
            self._submit(Open(stream, message.handle, spec, source, destination))
