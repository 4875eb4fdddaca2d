"""All tickets of one worker. Ticket states are drawn in kv_transfer.ticket."""

from __future__ import annotations

import hmac
import math
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from baton.errors import HandoffFailed, InvalidRequest
from baton.types import KvLayout, SequenceSpec, WorkerIdentity
from baton.v1 import kv_pb2
from engine.kv.layout import groups_of
from engine.kv.range import KvRange
from kv_transfer.ticket import (
    Commit,
    Coverage,
    Endpoint,
    OfferedTicket,
    OnAborted,
    PrefixRequested,
    Rejection,
    Ticket,
    TicketAborted,
    TicketCommitted,
    TicketEvent,
    TicketState,
    common_fields,
    signed_ticket,
    ticket_message,
    verify_ticket,
)

_EPOCH = 1


class Pinned(NamedTuple):
    """Blocks that may be written once `mark` is done; see KvPool."""

    block_ids: tuple[int, ...]
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


class TicketTable:
    """All tickets of one boot of a worker. Thread-safe. Reports exactly one end, TicketCommitted or
    TicketAborted, per offered ticket."""

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        endpoints: tuple[Endpoint, ...],
        rules: TicketRules,
        on_event: Callable[[TicketEvent], None],
        clock: Callable[[], float],
        mark: Callable[[], object] = lambda: None,
    ) -> None:
        """on_event: called in any thread, without a lock held.
        clock: monotonic seconds.
        mark: of the pool of the blocks; see KvPool."""
        if not 16 <= len(rules.secret) <= 64:
            raise ValueError("the secret must have 16 to 64 bytes")
        self._identity = identity
        self._groups = groups_of(layout)
        self._common = common_fields(identity, layout, endpoints)
        self._lease_s = rules.lease_s
        self._offer_s = min(rules.offer_s, rules.lease_s)
        self._on_event = on_event
        self._clock = clock
        self._secret = rules.secret
        self._draw_id = rules.draw_id
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
    ) -> OfferedTicket:
        """Let a sender write tokens [num_cached_tokens, num_tokens) into the blocks. Called in the
        engine's thread.

        A commit must cover at least spec.num_tokens.
        lease_s: a lease shorter than the table's.
        held_start: first token with a block; see BlockLease.
        Raises ValueError if the blocks are too few.
        """
        room = len(block_ids) * self._groups.layout.block_size
        if not 0 <= num_cached_tokens <= num_tokens <= room:
            raise ValueError(
                f"{num_cached_tokens} cached of {num_tokens} tokens in room for {room}"
            )
        lease_s = min(lease_s, self._lease_s)
        deadline = self._clock() + min(lease_s, self._offer_s)
        with self._lock:
            self._none_over_before_s = min(self._none_over_before_s, deadline)
            ticket_id = self._draw_id()
            while ticket_id == 0 or ticket_id in self._tickets:
                ticket_id = self._draw_id()
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
            data = signed_ticket(shown, self._secret)
            self._tickets[ticket_id] = Ticket(
                ticket_id=ticket_id,
                data=data,
                block_ids=block_ids,
                groups=self._groups,
                min_tokens=min(spec.num_tokens, num_tokens),
                num_cached_tokens=num_cached_tokens,
                num_tokens=num_tokens,
                coverage=Coverage(self._groups),
                lease_s=lease_s,
                deadline=deadline,
                mark=self._mark(),
                held_start=held_start,
            )
        return OfferedTicket(ticket_id, data)

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
        self, data: bytes, connection: int, on_aborted: OnAborted | None = None
    ) -> Rejection | None:
        """Present a ticket. It must be genuine, of this boot, open and not presented before;
        otherwise return the rejection.

        on_aborted: called in any thread, without a lock held, when the ticket is aborted by
        anything but a frame of the connection or its end.
        """
        try:
            # Identical bytes need no digest check.
            ticket_id = ticket_message(data).ticket_id
            with self._lock:
                ticket = self._tickets.get(ticket_id)
            if ticket is None or not hmac.compare_digest(ticket.data, data):
                shown = verify_ticket(data, self._identity, self._secret)
                if shown.epoch != _EPOCH:
                    return _UNKNOWN
        except InvalidRequest as error:
            return Rejection(HandoffFailed.reason, error.message)
        with self._lock:
            ticket = self._tickets.get(ticket_id)
            return ticket.present(connection, on_aborted, self._clock()) if ticket else _UNKNOWN

    def pin(
        self, ticket_id: int, epoch: int, connection: int, piece: KvRange
    ) -> Pinned | Rejection:
        """Pin the blocks of `piece` for writing until unpin. A piece out of range, or seen before,
        aborts the ticket."""
        with self._locked() as events:
            ticket = self._addressed(ticket_id, epoch, connection)
            if isinstance(ticket, Rejection):
                return ticket
            fault = ticket.pin(piece, self._clock())
            if not fault:
                return Pinned(ticket.block_ids, ticket.mark)
            events.append(ticket.abort(HandoffFailed.reason, fault))
            return Rejection(HandoffFailed.reason, fault)

    def unpin(self, ticket_id: int, checksum: int, num_bytes: int) -> None:
        """Release one pin."""
        with self._locked() as events:
            events.append(self._tickets[ticket_id].unpin(checksum, num_bytes))

    def fail(
        self, ticket_id: int, epoch: int, connection: int, reason: str, message: str
    ) -> Rejection:
        """Abort a ticket because of its sender. Only the connection that holds the ticket can do
        so."""
        with self._locked() as events:
            ticket = self._addressed(ticket_id, epoch, connection)
            if isinstance(ticket, Rejection):
                return ticket
            events.append(ticket.abort(reason, message))
            return Rejection(reason, message)

    def commit(self, commit: Commit, connection: int) -> Rejection | None:
        """Commit a ticket. On success report TicketCommitted and return None, else the
        rejection."""
        with self._locked() as events:
            ticket = self._addressed(commit.ticket_id, commit.epoch, connection)
            if isinstance(ticket, Rejection):
                return ticket
            outcome = ticket.commit(commit)
            if isinstance(outcome, TicketCommitted):
                events.append(outcome)
                return None
            events.append(ticket.abort(HandoffFailed.reason, outcome))
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
            ticket.renew(self._clock())
            events.append(PrefixRequested(ticket_id, deliver_to))
            return None

    def renew(self, ticket_id: int, connection: int) -> Rejection | None:
        """Renew the lease: the sender is still computing."""
        with self._lock:
            ticket = self._addressed(ticket_id, _EPOCH, connection)
            if isinstance(ticket, Rejection):
                return ticket
            ticket.renew(self._clock())
            return None

    def close_connection(self, connection: int, message: str) -> None:
        """Abort the connection's open tickets."""
        with self._locked() as events:
            own = (ticket for ticket in self._open() if ticket.connection == connection)
            events += [ticket.abort(HandoffFailed.reason, message) for ticket in own]

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
        if ticket is None or ticket.connection != connection or epoch != _EPOCH:
            return _UNKNOWN
        return ticket.refusal or ticket

    def _open(self) -> Iterator[Ticket]:
        return (ticket for ticket in self._tickets.values() if ticket.is_open)

    def _overdue(self, ticket: Ticket) -> str:
        if ticket.state is TicketState.OFFERED:
            return f"no sender presented the ticket within {self._offer_s:g} s"
        return f"no KV and no sign of life for {self._lease_s:g} s ({ticket.state.value})"

    def _abort(self, ticket: Ticket, reason: str, message: str) -> TicketAborted | None:
        """Abort an open ticket for a reason of this side, and notify its sender. Return the event
        as Ticket.abort does."""
        if ticket.on_aborted:
            rejection = Rejection(reason, message)
            self._warnings.append(partial(ticket.on_aborted, ticket.ticket_id, _EPOCH, rejection))
        return ticket.abort(reason, message)


_UNKNOWN = Rejection(
    HandoffFailed.reason, "the ticket is not, or no more, known on this connection"
)
