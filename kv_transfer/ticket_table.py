"""All tickets of one worker. Ticket states are drawn in kv_transfer.ticket."""

from __future__ import annotations

import hmac
import math
import secrets
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from baton.errors import HandoffFailed, InvalidRequest, StartupError
from baton.types import KvLayout, SequenceSpec, WorkerIdentity
from baton.v1 import kv_pb2
from engine.kv.part import KvPart
from engine.kv.range import KvRange
from kv_transfer.ticket import (
    MAX_TICKET_BYTES,
    Commit,
    Endpoint,
    OfferedTicket,
    OnAborted,
    OwnerRank,
    ParkedChunk,
    PrefixRequested,
    Rejection,
    Reservation,
    Ticket,
    TicketAborted,
    TicketEvent,
    TicketState,
    common_fields,
    signed_ticket,
    ticket_message,
    verify_ticket,
)

_EPOCH = 1


class Pinned(NamedTuple):
    """Blocks that may be written once `mark` is done; see KvPool. block_ids: None if the piece has
    no blocks yet and must be parked."""

    block_ids: tuple[int, ...] | None
    mark: object


def _draw_id() -> int:
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class TicketRules:
    """Creation and lifetime of tickets.

    lease_s: seconds that a ticket waits for its commit, from its begin.
    offer_s: maximum wait of an offer for its sender, capped by the lease.
    secret: of the tickets' digests, 16 to 64 random bytes.
    draw_id: returns random numbers below 2^64.
    """

    lease_s: float = 30.0
    offer_s: float = math.inf
    secret: bytes = field(default_factory=partial(secrets.token_bytes, 32), repr=False)
    draw_id: Callable[[], int] = _draw_id


class LateTickets(Protocol):
    """Tickets that get their blocks while the KV arrives. Chunks without blocks are parked in host
    memory, for which the caller has room. Called in the engine's thread."""

    def offer(
        self,
        spec: SequenceSpec,
        block_ids: tuple[int, ...],
        num_cached_tokens: int,
        num_tokens: int,
        *,
        is_late: bool,
    ) -> OfferedTicket:
        """See TicketTable. block_ids: the first of the blocks, or none."""
        ...

    def extend(self, ticket_id: int, block_ids: tuple[int, ...]) -> None:
        """Replace the ticket's blocks by a longer table that begins with them."""
        ...

    def arrived_end(self, ticket_id: int) -> int:
        """End of the last token that has arrived, in any layer; 0 before the first."""
        ...


#: Bytes of a ticket for what differs from one to the next: the request's id, its trace, numbers.
_OWN_BYTES = 1024


class TicketMint:
    """Makes the tickets of one boot of a worker. Not thread-safe."""

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        endpoints: tuple[Endpoint, ...],
        rules: TicketRules,
        ranks: tuple[OwnerRank, ...] = (),
    ) -> None:
        """layout: of the whole model. ranks: if there are several; endpoints are then empty. Raises
        StartupError if tickets of so many ranks would be too long."""
        if not 16 <= len(rules.secret) <= 64:
            raise ValueError("the secret must have 16 to 64 bytes")
        self._block_size = layout.block_size
        self._common = common_fields(identity, layout, endpoints, ranks)
        room, taken = MAX_TICKET_BYTES - _OWN_BYTES, self._common.ByteSize()
        if taken > room:
            raise StartupError(
                f"the addresses of {len(ranks)} ranks take {taken} bytes of each KV ticket, of at "
                f"most {room}; use at most {len(ranks) * room // taken} ranks a worker, or one "
                "--kv-transport"
            )
        self._rules = rules

    def reserve(
        self,
        spec: SequenceSpec,
        block_ids: tuple[int, ...],
        num_cached_tokens: int,
        num_tokens: int,
        lease_s: float,
        held_start: int,
        taken: Container[int],
        is_late: bool = False,
    ) -> Reservation:
        """See TicketTable.offer. taken: ids in use."""
        room = num_tokens if is_late else len(block_ids) * self._block_size
        if not 0 <= num_cached_tokens <= num_tokens <= room:
            raise ValueError(
                f"{num_cached_tokens} cached of {num_tokens} tokens in room for {room}"
            )
        lease_s = min(lease_s, self._rules.lease_s)
        ticket_id = self._rules.draw_id()
        while ticket_id == 0 or ticket_id in taken:
            ticket_id = self._rules.draw_id()
        shown = kv_pb2.KvTicket(
            ticket_id=ticket_id,
            epoch=_EPOCH,
            request_id=spec.request_id,
            tenant=spec.tenant,
            num_cached_tokens=num_cached_tokens,
            num_tokens=num_tokens,
            lease_ms=max(1, round(lease_s * 1000)),
            traceparent=spec.traceparent,
        )
        shown.MergeFrom(self._common)
        return Reservation(
            ticket_id,
            signed_ticket(shown, self._rules.secret),
            block_ids,
            num_cached_tokens,
            num_tokens,
            min(spec.num_tokens, num_tokens),
            lease_s,
            held_start,
        )


class TicketTable:
    """All tickets of one boot of a worker, or of one of its ranks. Thread-safe. Reports exactly one
    end, TicketCommitted or TicketAborted, per offered ticket."""

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        endpoints: tuple[Endpoint, ...],
        rules: TicketRules,
        on_event: Callable[[TicketEvent], None],
        clock: Callable[[], float],
        mark: Callable[[], object] = lambda: None,
        part: KvPart | None = None,
    ) -> None:
        """layout: of the pool.
        on_event: called in any thread, without a lock held.
        clock: monotonic seconds.
        mark: of the pool of the blocks; see KvPool.
        part: of the model, that a rank's pool holds; None if it holds all."""
        self._mint = TicketMint(identity, layout, endpoints, rules)
        self._identity = identity
        self._layout = layout
        self._part = part or KvPart.whole(layout)
        self._lease_s = rules.lease_s
        self._offer_s = min(rules.offer_s, rules.lease_s)
        self._on_event = on_event
        self._clock = clock
        self._secret = rules.secret
        self._mark = mark
        self._lock = threading.Lock()
        self._tickets: dict[int, Ticket] = {}
        self._warnings: list[Callable[[], None]] = []
        """Pending notifications of senders; owned by the holder of the lock."""
        self._none_over_before_s = clock()
        """Lower bound of all deadlines. Deadlines only move later, so only a new ticket lowers
        it."""

    # Called by the owner of the blocks

    @property
    def num_open(self) -> int:
        """Tickets without an end event."""
        with self._lock:
            return sum(not ticket.is_settled for ticket in self._tickets.values())

    def state(self, ticket_id: int) -> TicketState | None:
        """The ticket's state; None if unknown or released."""
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            return ticket.state if ticket else None

    def offer(
        self,
        spec: SequenceSpec,
        block_ids: tuple[int, ...],
        num_cached_tokens: int,
        num_tokens: int,
        lease_s: float = math.inf,
        held_start: int = 0,
        *,
        is_late: bool = False,
    ) -> OfferedTicket:
        """Let a sender write tokens [num_cached_tokens, num_tokens) into the blocks. Called in the
        engine's thread.

        A commit must cover at least spec.num_tokens.
        lease_s: a lease shorter than the table's.
        held_start: first token with a block; see BlockLease.
        is_late: see LateTickets.
        Raises ValueError if the blocks are too few.
        """
        with self._lock:
            reservation = self._mint.reserve(
                *(spec, block_ids, num_cached_tokens, num_tokens, lease_s, held_start),
                taken=self._tickets,
                is_late=is_late,
            )
            self._put(reservation)
        return OfferedTicket(reservation.ticket_id, reservation.data)

    def extend(self, ticket_id: int, block_ids: tuple[int, ...]) -> None:
        """See LateTickets."""
        with self._lock:
            if ticket := self._tickets.get(ticket_id):
                ticket.block_ids, ticket.mark = block_ids, self._mark()

    def arrived_end(self, ticket_id: int) -> int:
        """See LateTickets."""
        ticket = self._tickets.get(ticket_id)
        return ticket.arrived_end if ticket else 0

    def put(self, reservation: Reservation, mark: object = None) -> bool:
        """Accept a ticket that the worker's rank 0 has made under the same secret. mark: writes to
        its blocks follow it, see KvPool.mark; by default, one of now. Return True, see
        RankTickets."""
        with self._lock:
            self._put(reservation, mark)
        return True

    def _put(self, reservation: Reservation, mark: object = None) -> None:
        """Requires the lock."""
        deadline = self._clock() + min(reservation.lease_s, self._offer_s)
        self._none_over_before_s = min(self._none_over_before_s, deadline)
        self._tickets[reservation.ticket_id] = Ticket(
            *(reservation, self._layout, self._part, deadline),
            mark=self._mark() if mark is None else mark,
        )

    def abort(self, ticket_id: int, reason: str, message: str) -> None:
        """Abort a ticket in any state. No-op after an abort or the commit."""
        with self._locked() as events:
            ticket = self._tickets.get(ticket_id)
            if ticket and ticket.is_open:
                events.append(self._abort(ticket, reason, message))

    def abort_all(self, reason: str, message: str) -> None:
        """Abort all tickets without an end event."""
        with self._locked() as events:
            events += [self._abort(ticket, reason, message) for ticket in self._open()]

    def expire(self) -> None:
        """Abort tickets not presented within offer_s, and tickets without a frame within the
        lease."""
        with self._locked() as events:
            now = self._clock()
            if now < self._none_over_before_s:
                return
            for ticket in self._open():
                if now >= ticket.deadline:
                    overdue = self._overdue(ticket)
                    events.append(self._abort(ticket, HandoffFailed.reason, overdue))
            deadlines = (ticket.deadline for ticket in self._open())
            self._none_over_before_s = min((now + self._offer_s, *deadlines))

    def release(self, ticket_id: int) -> None:
        """Forget a ticket after its event. Raises ValueError before it; unknown tickets are
        ignored."""
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            if ticket is None:
                return
            if not ticket.is_settled:
                raise ValueError(
                    f"ticket {ticket_id} is {ticket.state.value}: its event is to come"
                )
            del self._tickets[ticket_id]

    # Called by the receiver, in its connections' threads. connection: its number.

    def begin(
        self,
        data: bytes,
        connection: int,
        on_aborted: OnAborted | None = None,
        part: KvPart | None = None,
    ) -> Rejection | None:
        """Present a part of a ticket. It must be genuine, of this boot, open and not presented
        before; otherwise return the rejection.

        part: what the connection brings, within the rank's part; None for all of that.

        on_aborted: called in any thread, without a lock held, when the ticket is aborted by
        anything but a frame of the connection or its end.
        """
        try:
            # Identical bytes need no digest check.
            ticket_id = ticket_message(data).ticket_id
            with self._lock:
                ticket = self._tickets.get(ticket_id)
            if ticket is None or not hmac.compare_digest(ticket.reserved.data, data):
                shown = verify_ticket(data, self._identity, self._secret)
                if shown.epoch != _EPOCH:
                    return _UNKNOWN
        except InvalidRequest as error:
            return Rejection(HandoffFailed.reason, error.message)
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            if ticket is None:
                return _UNKNOWN
            return ticket.present(connection, part or self._part, on_aborted, self._clock())

    def pin(
        self, ticket_id: int, epoch: int, connection: int, piece: KvRange
    ) -> Pinned | Rejection:
        """Pin the blocks of `piece` for writing until unpin. A piece out of range, or seen before,
        aborts the ticket."""
        with self._locked() as events:
            ticket = self._addressed(ticket_id, epoch, connection)
            if isinstance(ticket, Rejection):
                return ticket
            fault = ticket.pin(connection, piece, self._clock())
            if not fault:
                block_ids = ticket.block_ids if ticket.has_blocks(piece) else None
                return Pinned(block_ids, ticket.mark)
            events.append(self._abort(ticket, HandoffFailed.reason, fault, connection))
            return Rejection(HandoffFailed.reason, fault)

    def has_blocks(self, ticket_id: int, piece: KvRange) -> bool:
        """Whether `piece` need not be parked."""
        ticket = self._tickets.get(ticket_id)
        return ticket is None or ticket.has_blocks(piece)

    def park(self, ticket_id: int, parked: ParkedChunk) -> None:
        """Keep a pinned piece that has no blocks yet."""
        with self._lock:
            self._tickets[ticket_id].parked.append(parked)

    def unpin(self, ticket_id: int, connection: int, checksum: int, num_bytes: int) -> None:
        """Release one pin."""
        with self._locked() as events:
            events.append(self._tickets[ticket_id].unpin(connection, checksum, num_bytes))

    def fail(
        self, ticket_id: int, epoch: int, connection: int, reason: str, message: str
    ) -> Rejection:
        """Abort a ticket because of its sender. Only the connection that holds the ticket can do
        so."""
        with self._locked() as events:
            ticket = self._addressed(ticket_id, epoch, connection)
            if isinstance(ticket, Rejection):
                return ticket
            events.append(self._abort(ticket, reason, message, connection))
            return Rejection(reason, message)

    def commit(self, commit: Commit, connection: int) -> Rejection | None:
        """Complete the connection's part of a ticket, and report TicketCommitted after the last
        one. On success return None, else the rejection."""
        with self._locked() as events:
            ticket = self._addressed(commit.ticket_id, commit.epoch, connection)
            if isinstance(ticket, Rejection):
                return ticket
            outcome = ticket.commit(connection, commit)
            if not isinstance(outcome, str):
                events.append(outcome)
                return None
            events.append(self._abort(ticket, HandoffFailed.reason, outcome, connection))
            return Rejection(HandoffFailed.reason, outcome)

    def request_prefix(
        self, ticket_id: int, epoch: int, connection: int, deliver_to: bytes
    ) -> Rejection | None:
        """Report PrefixRequested: the sender wants the KV that the owner holds. Must precede the
        ticket's end."""
        with self._locked() as events:
            ticket = self._addressed(ticket_id, epoch, connection)
            if isinstance(ticket, Rejection):
                return ticket
            ticket.renew(connection, self._clock())
            events.append(PrefixRequested(ticket_id, deliver_to))
            return None

    def renew(self, ticket_id: int, connection: int) -> Rejection | None:
        """Renew the lease: the sender is still computing."""
        with self._lock:
            ticket = self._addressed(ticket_id, _EPOCH, connection)
            if isinstance(ticket, Rejection):
                return ticket
            ticket.renew(connection, self._clock())
            return None

    def close_connection(self, connection: int, message: str) -> None:
        """Abort the open tickets that await KV on this connection."""
        with self._locked() as events:
            for ticket in self._open():
                part = ticket.parts.get(connection)
                if part and not part.commit:
                    reason = HandoffFailed.reason
                    events.append(self._abort(ticket, reason, message, connection))

    @contextmanager
    def _locked(self) -> Iterator[list[TicketEvent | None]]:
        """Hold the lock. After its release, report the events appended to the list, in order, then
        notify senders."""
        events: list[TicketEvent | None] = []
        with self._lock:
            yield events
            warnings, self._warnings = self._warnings, []
        for event in events:
            if event is not None:
                self._on_event(event)
        for warn in warnings:
            warn()

    # Requires the lock

    def _addressed(self, ticket_id: int, epoch: int, connection: int) -> Ticket | Rejection:
        """The open ticket that `connection` holds, or the rejection of its frame."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None or connection not in ticket.parts or epoch != _EPOCH:
            return _UNKNOWN
        return ticket.refusal(connection) or ticket

    def _open(self) -> Iterator[Ticket]:
        return (ticket for ticket in self._tickets.values() if ticket.is_open)

    def _overdue(self, ticket: Ticket) -> str:
        if not ticket.is_presented:
            what = "all parts of the ticket" if ticket.parts else "the ticket"
            return f"no sender presented {what} within {self._offer_s:g} s"
        return f"no KV and no sign of life for {self._lease_s:g} s ({ticket.state.value})"

    def _abort(
        self, ticket: Ticket, reason: str, message: str, by: int | None = None
    ) -> TicketAborted | None:
        """Abort an open ticket, and notify its senders. Return the event as Ticket.abort does.

        by: the connection that caused this, and knows; None for a reason of this side.
        """
        rejection = Rejection(reason, message)
        for connection, part in ticket.parts.items():
            if part.on_aborted and connection != by and not part.commit:
                warn = partial(part.on_aborted, ticket.ticket_id, _EPOCH, rejection)
                self._warnings.append(warn)
        return ticket.abort(reason, message)


_UNKNOWN = Rejection(
    HandoffFailed.reason, "the ticket is not, or no more, known on this connection"
)
