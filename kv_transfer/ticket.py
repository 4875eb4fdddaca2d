"""Tickets of one worker: which sequence may be written into which blocks, by whom, until when.

    OFFERED ----> RESERVED ----> RECEIVING ----> COMMITTED ----> (forgotten)
       |   begin     |   pin         |   commit              release
       |             |               |
       +-------------+---------------+
             | abort, lease over, connection lost, broken rule
             v
          ABORTED ------------> (forgotten)
                     release

A ticket that needs no KV (all is cached) goes from RESERVED to COMMITTED. OFFERED waits for a sender, RESERVED has one
and belongs to its connection, RECEIVING has taken a first chunk. An offer must be taken up within `offer_s`: a sender presents
its ticket as soon as it has it, before it queues for anything. From then on each arrow but the last has the lease as its
deadline, which the sender renews however long its own queue is.

Who owns the blocks: the table from `offer` until the ticket's one event; from then on whoever gets the event. A writer
holds a pin, and may write before what it writes is verified: nobody reads the blocks before the commit. An abort that meets a pin refuses further ones at once, and tells TicketDead when the last is gone.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from baton.engine.kv_range import KvRange
from baton.errors import HandoffFailed, InvalidRequest
from baton.types import KvLayout, Sample, SequenceSpec, WorkerIdentity
from kv_transfer.coverage import Coverage
from kv_transfer.endpoint import Endpoint
from kv_transfer.kv_ticket import KvTicket, encode_ticket, is_genuine, parse_ticket

_EPOCH = 1
_MASK = (1 << 64) - 1


class TicketState(enum.Enum):
    """See the drawing above."""

    OFFERED = "offered"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    COMMITTED = "committed"
    ABORTED = "aborted"


_OPEN = frozenset({TicketState.OFFERED, TicketState.RESERVED, TicketState.RECEIVING})


@dataclass(frozen=True, slots=True)
class OfferedTicket:
    """A ticket's number, and its bytes for the sender."""

    ticket_id: int
    data: bytes


@dataclass(frozen=True, slots=True)
class TicketCommitted:
    """All KV of `num_tokens` tokens is in the blocks, which the hearer of this owns.

    firsts: the token after them, of each choice; none if the hearer knows it already.
    """

    ticket_id: int
    num_tokens: int
    firsts: tuple[Sample, ...]
    transfer_exposed_ms: float
    num_bytes: int
    reserved_s: float = 0.0
    """When the sender presented the ticket, by the table's clock."""
    receiving_s: float = 0.0
    """When its first chunk was taken; when the ticket was presented if none had to come."""


@dataclass(frozen=True, slots=True)
class TicketDead:
    """There will be no commit, and nothing writes the blocks any more. `reason` is one of baton.errors.BY_REASON."""

    ticket_id: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class LendAsked:
    """The sender that holds this open ticket wants the KV of the tokens that are here sent to the owner of `lend_to`."""

    ticket_id: int
    lend_to: bytes


TicketEvent = TicketCommitted | TicketDead | LendAsked


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a sender's frame was dropped: an answer for it, not an event of the ticket."""

    reason: str
    message: str


#: Told of a ticket's death, to warn its sender: ticket, epoch, and why.
OnDeath = Callable[[int, int, Rejection], None]


@dataclass(frozen=True, slots=True)
class Commit:
    """What a sender says at the end: `checksum` is the sum modulo 2^64 of its chunks' checksums."""

    ticket_id: int
    epoch: int
    num_tokens: int
    firsts: tuple[Sample, ...]
    checksum: int
    exposed_ms: float


@dataclass(slots=True)
class _Entry:
    """One ticket's state; read and written under the table's lock only."""

    block_ids: tuple[int, ...]
    min_tokens: int
    num_cached_tokens: int
    num_tokens: int
    coverage: Coverage
    deadline: float
    state: TicketState = TicketState.OFFERED
    connection: int | None = None
    on_death: OnDeath | None = None
    """Of that connection."""
    num_pins: int = 0
    checksum: int = 0
    num_bytes: int = 0
    death: TicketDead | None = None
    reserved_s: float = 0.0
    receiving_s: float = 0.0


class TicketTable:
    """All tickets of one worker's boot. Thread-safe. Tells exactly one end, TicketCommitted or TicketDead, per offered
    ticket."""

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        endpoints: tuple[Endpoint, ...],
        lease_s: float,
        on_event: Callable[[TicketEvent], None],
        clock: Callable[[], float],
        secret: bytes,
        draw_id: Callable[[], int],
        offer_s: float = math.inf,
    ) -> None:
        """on_event: called in any thread, holding no lock. clock: monotonic seconds. secret: 16 to 64 random bytes.

        draw_id: random numbers below 2^64. offer_s: how long an offer waits for its sender, never longer than the lease.
        """
        if not 16 <= len(secret) <= 64:
            raise ValueError("the secret must have 16 to 64 bytes")
        self._identity = identity
        self._layout = layout
        self._endpoints = endpoints
        self._lease_s = lease_s
        self._offer_s = min(offer_s, lease_s)
        self._on_event = on_event
        self._clock = clock
        self._secret = secret
        self._draw_id = draw_id
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}
        self._none_over_before_s = clock()
        """Deadlines are only ever put off, and new ones are at least `offer_s` away: this bound never needs to come down."""

    # What the owner of the blocks calls.

    @property
    def num_open(self) -> int:
        """Tickets whose event is still to come."""
        with self._lock:
            return sum(e.state in _OPEN or e.num_pins > 0 for e in self._entries.values())

    def state(self, ticket_id: int) -> TicketState | None:
        """None: unknown, or released."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            return entry.state if entry else None

    def offer(
        self,
        spec: SequenceSpec,
        block_ids: tuple[int, ...],
        num_cached_tokens: int,
        num_tokens: int,
    ) -> OfferedTicket:
        """Lend the blocks to a sender that will bring tokens [num_cached_tokens, num_tokens).

        A commit of fewer tokens is taken if it covers spec.num_tokens at least.
        Raises ValueError if the blocks have no such room.
        """
        room = len(block_ids) * self._layout.block_size
        if not 0 <= num_cached_tokens <= num_tokens <= room:
            raise ValueError(
                f"{num_cached_tokens} cached of {num_tokens} tokens in room for {room}"
            )
        with self._lock:
            ticket_id = self._draw_id()
            while ticket_id == 0 or ticket_id in self._entries:
                ticket_id = self._draw_id()
            self._entries[ticket_id] = _Entry(
                block_ids=block_ids,
                min_tokens=min(spec.num_tokens, num_tokens),
                num_cached_tokens=num_cached_tokens,
                num_tokens=num_tokens,
                coverage=Coverage(self._layout.num_layers),
                deadline=self._clock() + self._offer_s,
            )
        ticket = KvTicket(
            owner=self._identity,
            ticket_id=ticket_id,
            epoch=_EPOCH,
            request_id=spec.request_id,
            tenant=spec.tenant,
            num_cached_tokens=num_cached_tokens,
            num_tokens=num_tokens,
            layout=self._layout,
            endpoints=self._endpoints,
            lease_s=self._lease_s,
            traceparent=spec.traceparent,
        )
        return OfferedTicket(ticket_id, encode_ticket(ticket, self._secret))

    def abort(self, ticket_id: int, reason: str, message: str) -> None:
        """Give a ticket up, in whatever state; a second abort, or one after the commit, changes nothing."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            calls = self._kill(ticket_id, entry, reason, message) if entry else ()
        _call(calls)

    def abort_all(self, reason: str, message: str) -> None:
        """Give every ticket up whose event is still to come."""
        with self._lock:
            calls = tuple(
                call
                for ticket_id, entry in self._entries.items()
                for call in self._kill(ticket_id, entry, reason, message)
            )
        _call(calls)

    def expire(self) -> None:
        """Abort the tickets that nobody has presented in time, and those that no frame has come for within the lease."""
        with self._lock:
            now = self._clock()
            if now < self._none_over_before_s:
                return
            calls = tuple(
                call
                for ticket_id, entry in self._entries.items()
                if entry.state in _OPEN and now >= entry.deadline
                for call in self._kill(ticket_id, entry, HandoffFailed.reason, self._overdue(entry))
            )
            deadlines = (e.deadline for e in self._entries.values() if e.state in _OPEN)
            self._none_over_before_s = min((now + self._offer_s, *deadlines))
        _call(calls)

    def release(self, ticket_id: int) -> None:
        """Forget a ticket after its event. Raises ValueError before it; unknown tickets are ignored."""
        with self._lock:
            entry = self._entries.get(ticket_id)
            if entry is None:
                return
            if entry.state in _OPEN or entry.num_pins:
                raise ValueError(f"ticket {ticket_id} is {entry.state.value}: its event is to come")
            del self._entries[ticket_id]

    # What the receiver calls, in its connections' threads. `connection` numbers them.

    def begin(
        self, data: bytes, connection: int, on_death: OnDeath | None = None
    ) -> KvTicket | Rejection:
        """A sender presents a ticket: genuine, of this boot, live and for the first time, or it is rejected.

        on_death: called, in any thread and holding no lock, when the ticket dies by anything but a frame of the connection, or its
        end."""
        ticket = self._verified(data)
        if isinstance(ticket, Rejection):
            return ticket
        with self._lock:
            entry = self._entries.get(ticket.ticket_id)
            if entry is None or ticket.epoch != _EPOCH:
                return _UNKNOWN
            if entry.death:
                return Rejection(entry.death.reason, entry.death.message)
            if entry.state is not TicketState.OFFERED:
                return Rejection(HandoffFailed.reason, "the ticket has been used")
            entry.state = TicketState.RESERVED
            entry.connection = connection
            entry.on_death = on_death
            entry.reserved_s = entry.receiving_s = self._clock()
            self._renew(entry)
            return ticket

    def pin(
        self, ticket_id: int, epoch: int, connection: int, piece: KvRange
    ) -> tuple[int, ...] | Rejection:
        """The block table to write `piece` into, until unpin. A piece out of range or seen before kills the ticket."""
        with self._lock:
            entry = self._addressed(ticket_id, epoch, connection)
            if isinstance(entry, Rejection):
                return entry
            fault = self._fault(entry, piece)
            if not fault:
                if entry.state is TicketState.RESERVED:
                    entry.receiving_s = self._clock()
                entry.state = TicketState.RECEIVING
                entry.num_pins += 1
                self._renew(entry)
                return entry.block_ids
            events = self._die(ticket_id, entry, HandoffFailed.reason, fault)
        self._tell(events)
        return Rejection(HandoffFailed.reason, fault)

    def unpin(self, ticket_id: int, checksum: int, num_bytes: int) -> None:
        """The writer of one pin is done with the blocks."""
        with self._lock:
            entry = self._entries[ticket_id]
            entry.num_pins -= 1
            entry.checksum = (entry.checksum + checksum) & _MASK
            entry.num_bytes += num_bytes
            events = (entry.death,) if entry.death and not entry.num_pins else ()
        self._tell(events)

    def fail(
        self, ticket_id: int, epoch: int, connection: int, reason: str, message: str
    ) -> Rejection:
        """The sender broke a rule or gave up. Only the connection that holds the ticket can kill it so."""
        with self._lock:
            entry = self._addressed(ticket_id, epoch, connection)
            if isinstance(entry, Rejection):
                return entry
            events = self._die(ticket_id, entry, reason, message)
        self._tell(events)
        return Rejection(reason, message)

    def commit(self, commit: Commit, connection: int) -> Rejection | None:
        """The sender says that all is sent. None: so it is, and TicketCommitted has been told."""
        ticket_id = commit.ticket_id
        with self._lock:
            entry = self._addressed(ticket_id, commit.epoch, connection)
            if isinstance(entry, Rejection):
                return entry
            fault = _commit_fault(entry, commit)
            events: tuple[TicketEvent, ...]
            if fault:
                events = self._die(ticket_id, entry, HandoffFailed.reason, fault)
            else:
                entry.state = TicketState.COMMITTED
                events = (
                    TicketCommitted(
                        ticket_id,
                        commit.num_tokens,
                        commit.firsts,
                        commit.exposed_ms,
                        entry.num_bytes,
                        entry.reserved_s,
                        entry.receiving_s,
                    ),
                )
        self._tell(events)
        return Rejection(HandoffFailed.reason, fault) if fault else None

    def ask(self, ticket_id: int, epoch: int, connection: int, lend_to: bytes) -> Rejection | None:
        """The sender wants to borrow what the owner holds. LendAsked is told besides the ticket's one event, before it."""
        with self._lock:
            entry = self._addressed(ticket_id, epoch, connection)
            if isinstance(entry, Rejection):
                return entry
            self._renew(entry)
        self._tell((LendAsked(ticket_id, lend_to),))
        return None

    def renew(self, ticket_id: int, connection: int) -> Rejection | None:
        """The sender is still computing."""
        with self._lock:
            entry = self._addressed(ticket_id, _EPOCH, connection)
            if isinstance(entry, Rejection):
                return entry
            self._renew(entry)
            return None

    def close_connection(self, connection: int, message: str) -> None:
        """Abort what the connection had open."""
        with self._lock:
            events = tuple(
                event
                for ticket_id, entry in self._entries.items()
                if entry.connection == connection and entry.state in _OPEN
                for event in self._die(ticket_id, entry, HandoffFailed.reason, message)
            )
        self._tell(events)

    def _verified(self, data: bytes) -> KvTicket | Rejection:
        """The ticket, if this table made it."""
        try:
            ticket = parse_ticket(data)
        except InvalidRequest as error:
            return Rejection(HandoffFailed.reason, error.message)
        if ticket.owner != self._identity:
            return Rejection(
                HandoffFailed.reason,
                f"the ticket is of {ticket.owner.worker_id} generation {ticket.owner.generation}, "
                f"and this is {self._identity.worker_id} generation {self._identity.generation}",
            )
        if not is_genuine(data, self._secret):
            return Rejection(HandoffFailed.reason, "the ticket is not genuine")
        return ticket

    # Under the lock.

    def _addressed(self, ticket_id: int, epoch: int, connection: int) -> _Entry | Rejection:
        """The live ticket that a frame of `connection` may be about."""
        entry = self._entries.get(ticket_id)
        if entry is None or entry.connection != connection or epoch != _EPOCH:
            return _UNKNOWN
        if entry.death:
            return Rejection(entry.death.reason, entry.death.message)
        if entry.state is TicketState.COMMITTED:
            return Rejection(HandoffFailed.reason, "the ticket is committed")
        return entry

    def _fault(self, entry: _Entry, piece: KvRange) -> str:
        """What is wrong with a piece; none: it is counted as arrived."""
        if not (
            piece.num_tokens > 0
            and piece.num_layers > 0
            and entry.num_cached_tokens <= piece.first_token
            and piece.end_token <= entry.num_tokens
            and piece.first_layer >= 0
            and piece.end_layer <= self._layout.num_layers
        ):
            return f"a chunk outside of the reservation: {piece}"
        return "" if entry.coverage.add(piece) else f"a chunk that came before: {piece}"

    def _overdue(self, entry: _Entry) -> str:
        if entry.state is TicketState.OFFERED:
            return f"no sender presented the ticket within {self._offer_s:g} s"
        return f"no KV and no sign of life for {self._lease_s:g} s ({entry.state.value})"

    def _renew(self, entry: _Entry) -> None:
        entry.deadline = self._clock() + self._lease_s

    def _kill(
        self, ticket_id: int, entry: _Entry, reason: str, message: str
    ) -> tuple[Callable[[], None], ...]:
        """Give a ticket up from this side; what is to be called then, without the lock."""
        if entry.state not in _OPEN:
            return ()
        calls = [
            partial(self._on_event, event) for event in self._die(ticket_id, entry, reason, message)
        ]
        if entry.on_death:
            rejection = Rejection(reason, message)
            calls.append(partial(entry.on_death, ticket_id, _EPOCH, rejection))
        return tuple(calls)

    def _die(
        self, ticket_id: int, entry: _Entry, reason: str, message: str
    ) -> tuple[TicketEvent, ...]:
        """What to tell now: nothing if the ticket had its event, or a writer is still in the blocks."""
        if entry.state not in _OPEN:
            return ()
        entry.state = TicketState.ABORTED
        entry.death = TicketDead(ticket_id, reason, message)
        return () if entry.num_pins else (entry.death,)

    # Outside of the lock.

    def _tell(self, events: tuple[TicketEvent, ...]) -> None:
        for event in events:
            self._on_event(event)


def _call(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()


_UNKNOWN = Rejection(
    HandoffFailed.reason, "the ticket is not, or no more, known on this connection"
)


def _commit_fault(entry: _Entry, commit: Commit) -> str:
    if not entry.min_tokens <= commit.num_tokens <= entry.num_tokens:
        return (
            f"a commit of {commit.num_tokens} tokens for {entry.min_tokens} to {entry.num_tokens}"
        )
    if entry.num_pins or not entry.coverage.is_exactly(entry.num_cached_tokens, commit.num_tokens):
        return "a commit of KV that has not all arrived"
    if entry.checksum != commit.checksum:
        return "the checksum of all chunks differs from what the sender tells"
    return ""
