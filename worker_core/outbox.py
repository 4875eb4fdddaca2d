"""What one gateway has not been told yet. Steps that a slow stream missed travel together in its
next message, where each sequence has one entry for all of them: a gateway that falls behind gets
fewer and longer entries, which cost it less."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from baton.errors import ClientStalled
from baton.events import AddressedEvent, Tokens, joined

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
    """Cut events so that each sequence's stay in order: a message tells changes of state before
    tokens.

    What a sequence becomes after tokens of an earlier step, a pause above all, needs a message
    after theirs.
    """
    changes: list[AddressedEvent] = []
    runs: dict[int, list[Tokens]] = {}
    for handle, event in events:
        if isinstance(event, Tokens):
            runs.setdefault(handle, []).append(event)
            continue
        if handle in runs:
            yield _message(changes, runs)
            changes, runs = [], {}
        changes.append((handle, event))
    if changes or runs:
        yield _message(changes, runs)


def _message(
    changes: list[AddressedEvent], runs: Mapping[int, list[Tokens]]
) -> list[AddressedEvent]:
    tokens = ((handle, entry) for handle, run in runs.items() for entry in joined(run))
    return [*changes, *tokens]
