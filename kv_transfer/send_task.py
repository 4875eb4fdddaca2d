"""What a sender's lanes are told to do, and what they tell at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.interface import KvPool
from baton.errors import BatonError
from baton.types import ANY_NUMERICS, KvLayout, KvRange, NumericsRule, Sample, WorkerIdentity
from kv_transfer.kv_secret import KvSecret
from kv_transfer.kv_ticket import KvTicket
from kv_transfer.transport.base import Connector


@dataclass(frozen=True, slots=True)
class SendDone:
    """The one end of a handoff, seen from its sender: it touches the blocks no more. No error: the
    receiver owns the sequence. num_bytes: KV that was sent."""

    key: str
    error: BatonError | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SenderConfig:
    """What all lanes of a sender have in common. Times in seconds."""

    identity: WorkerIdentity
    layout: KvLayout
    pool: KvPool
    connect: Connector
    clock: Callable[[], float]
    max_chunk_bytes: int
    connect_timeout_s: float
    ack_timeout_s: float
    idle_timeout_s: float
    secret: KvSecret | None = None
    rule: NumericsRule = ANY_NUMERICS


@dataclass(frozen=True, slots=True)
class Begin:
    """Open a handoff; `data` are the ticket's bytes."""

    key: str
    ticket: KvTicket
    data: bytes


@dataclass(frozen=True, slots=True)
class Send:
    """A range of the sequence with these blocks is computed."""

    key: str
    block_ids: tuple[int, ...]
    piece: KvRange


@dataclass(frozen=True, slots=True)
class Borrow:
    """Ask the receiver for the KV that it holds; `lend_to` are the bytes of a ticket of ours."""

    key: str
    lend_to: bytes


@dataclass(frozen=True, slots=True)
class Finish:
    """All is computed. prefill_end: when, by the sender's clock."""

    key: str
    num_tokens: int
    firsts: tuple[Sample, ...]
    prefill_end: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Give a handoff up."""

    key: str
    reason: str
    message: str


Task = Begin | Borrow | Send | Finish | Cancel
