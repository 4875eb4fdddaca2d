"""One choice's part of an attempt: what it is told there, and how it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.choice import Left, SeatEvent
from gateway.inbox import Inbox
from gateway.links import DecodeLink
from gateway.placement import Placement

#: Stands in a seat's inbox for something to be done when all before it was taken; tells if the seat is lost by it.
Nudge = Callable[[], Left | None]


class SeatOwner(Protocol):
    """What a seat needs of its attempt."""

    @property
    def placement(self) -> Placement: ...

    @property
    def has_parted_there(self) -> bool:
        """Whether each choice runs under a handle of its own on the decode worker."""
        ...

    def link_to(self, number: int) -> tuple[DecodeLink, int]:
        """The decode worker of an open seat, and the choice's handle there."""
        ...

    def close_seat(self, number: int) -> None:
        """End one choice on the workers, whatever state it is in. Idempotent."""
        ...


class Seat:
    """number: among those of the attempt."""

    def __init__(self, owner: SeatOwner, number: int) -> None:
        self._owner = owner
        self._number = number
        self.inbox: Inbox[SeatEvent | Nudge] = Inbox()

    @property
    def placement(self) -> Placement:
        return self._owner.placement

    @property
    def is_decoding(self) -> bool:
        """Whether the decode worker runs it as a sequence of its own."""
        return self._owner.has_parted_there

    def pause(self) -> None:
        """See DecodeLink, as for the next two. Only while it decodes."""
        link, handle = self._owner.link_to(self._number)
        link.pause(handle)

    def hand_off(self, ticket: bytes) -> None:
        link, handle = self._owner.link_to(self._number)
        link.hand_off(handle, ticket)

    def resume(self) -> None:
        link, handle = self._owner.link_to(self._number)
        link.resume(handle)

    def close(self) -> None:
        """End the choice on the workers. Idempotent."""
        self._owner.close_seat(self._number)
