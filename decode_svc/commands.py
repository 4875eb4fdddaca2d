"""What the decode core is told, and how its answers are addressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton.cache.ledger import ListBlocks
from baton.events import DecodeEvent
from baton.types import KvSource, SequenceSpec
from kv_transfer.sender import SendDone
from kv_transfer.ticket import LendAsked, TicketCommitted, TicketDead


@dataclass(frozen=True, slots=True)
class Open:
    """A gateway asks for room. `stream` names its Decode stream, `handle` the sequence in it.

    A sequence of several choices has as many handles, from `handle` on.
    """

    stream: int
    handle: int
    spec: SequenceSpec
    source: KvSource


@dataclass(frozen=True, slots=True)
class Abort:
    """A gateway gives a sequence, or one choice of it, up, in whatever stage it is."""

    stream: int
    handle: int


@dataclass(frozen=True, slots=True)
class Pause:
    """A gateway wants a sequence to stand still, to move it."""

    stream: int
    handle: int


@dataclass(frozen=True, slots=True)
class HandOff:
    """A gateway wants a paused sequence's KV sent to the owner of `ticket`."""

    stream: int
    handle: int
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Resume:
    """A gateway lets a paused sequence go on here."""

    stream: int
    handle: int


@dataclass(frozen=True, slots=True)
class Known:
    """A gateway tells the handles of all outputs of its stream that it waits for. Streams keep their order: what it opened
    before this is here, and what it gave up before this is not."""

    stream: int
    handles: frozenset[int]


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """A gateway is gone, and all its sequences with it."""

    stream: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more sequences."""


DecodeCommand = (
    Open
    | Abort
    | Pause
    | HandOff
    | Resume
    | StreamClosed
    | Drain
    | TicketCommitted
    | TicketDead
    | LendAsked
    | SendDone
    | ListBlocks
    | Known
)


class StreamEvent(NamedTuple):
    """An event and the gateway stream it belongs to. As cheap as Tokens, and as many."""

    stream: int
    handle: int
    event: DecodeEvent
