"""Commands to the worker core, and the addressing of its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from baton.commands import SequenceCommand
from baton.events import SequenceEvent
from baton.types import KvSource, SequenceSpec
from engine.interface import DeviceLost
from engine.kv.ledger import ListBlocks
from engine.kv.tiers.stack import TierReport
from kv_transfer.sender import SendDone
from kv_transfer.ticket import PrefixRequested, TicketAborted, TicketCommitted, TicketOffered
from worker_core.policy import Policy
from worker_core.swap import SwapDone

#: (stream, handle): identifies a sequence within this boot of the worker, also to the KV sender.
SequenceKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Destination:
    """The worker that a sequence moves to after its first tokens. The KV sender stores the ticket
    under the sequence's key.

    num_held_tokens: leading tokens that the ticket's owner holds already; they are not sent.
    """

    num_held_tokens: int


@dataclass(frozen=True, slots=True)
class Open:
    """Open a sequence: `handle` in the gateway's stream `stream`.

    A sequence of several choices takes consecutive handles, starting with `handle`.
    destination: its ticket was presented before this command, under the sequence's key, because the
    owner's lease is shorter than a step may take; the core receives one SendDone for it.
    """

    stream: int
    handle: int
    spec: SequenceSpec
    source: KvSource
    destination: Destination | None = None


@dataclass(frozen=True, slots=True)
class StreamCommand:
    """A command for one sequence of a gateway's stream."""

    stream: int
    handle: int
    command: SequenceCommand


@dataclass(frozen=True, slots=True)
class KnownSequences:
    """All handles of a stream that its gateway still tracks. Commands keep their order, so a
    sequence opened before this and missing from it was lost by the gateway."""

    stream: int
    handles: frozenset[int]


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The gateway's stream has ended; all its sequences end."""

    stream: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Admit no more sequences."""


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Change the policy with the worker's role. Running sequences continue.

    num_threads: CPU threads to compute with, where they can change; 0: those of the start.
    """

    policy: Policy
    num_threads: int = 0


Command = (
    Open
    | StreamCommand
    | StreamClosed
    | Drain
    | SetPolicy
    | TicketOffered
    | TicketCommitted
    | TicketAborted
    | PrefixRequested
    | SendDone
    | ListBlocks
    | KnownSequences
    | DeviceLost
    | TierReport
    | SwapDone
)


class StreamEvent(NamedTuple):
    """An event and its gateway stream. A NamedTuple, because one is created per Tokens event."""

    stream: int
    handle: int
    event: SequenceEvent
