"""What the worker core is asked to do, and how its events are addressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton.commands import SequenceCommand
from baton.events import SequenceEvent
from baton.types import KvSource, SequenceSpec
from engine.interface import DeviceLost
from engine.kv.ledger import ListBlocks
from kv_transfer.sender import SendDone
from kv_transfer.ticket import PrefixRequested, TicketAborted, TicketCommitted
from worker_core.policy import Policy

#: The stream and the handle of a sequence: its name in this boot of the worker, to the KV sender
#: too.
SequenceKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a sequence goes after its first tokens. The KV sender knows the ticket, under the
    sequence's key.

    num_held_tokens: leading tokens whose KV the ticket's owner has already; they are not sent.
    """

    num_held_tokens: int


@dataclass(frozen=True, slots=True)
class Open:
    """A gateway asks for room. `stream` names its stream, `handle` the sequence in it.

    A sequence of several choices has as many handles, from `handle` on. destination: the ticket has
    been presented by then, under the sequence's key, because its owner waits for that no longer
    than a step may take here; one SendDone is owed to the core from then on.
    """

    stream: int
    handle: int
    spec: SequenceSpec
    source: KvSource
    destination: Destination | None = None


@dataclass(frozen=True, slots=True)
class StreamCommand:
    """A command and the sequence of a gateway's stream that it is for."""

    stream: int
    handle: int
    command: SequenceCommand


@dataclass(frozen=True, slots=True)
class KnownSequences:
    """The handles of all outputs of a stream that its gateway waits for. Streams keep their order:
    what it opened before this is here, and what it gave up before this is not."""

    stream: int
    handles: frozenset[int]


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """A gateway is gone, and all its sequences with it."""

    stream: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more sequences."""


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Go on by another policy: the worker changes its role. What runs here runs on."""

    policy: Policy


Command = (
    Open
    | StreamCommand
    | StreamClosed
    | Drain
    | SetPolicy
    | TicketCommitted
    | TicketAborted
    | PrefixRequested
    | SendDone
    | ListBlocks
    | KnownSequences
    | DeviceLost
)


class StreamEvent(NamedTuple):
    """An event and the gateway stream it belongs to. As cheap as Tokens, and as many."""

    stream: int
    handle: int
    event: SequenceEvent
