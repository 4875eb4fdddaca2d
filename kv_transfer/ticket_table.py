"""Tickets of one worker. What becomes of one is drawn in kv_transfer.ticket."""

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
    """Blocks that may be written, after a mark of theirs: see KvPool."""

    block_ids: tuple[int, ...]
    mark: object


def _draw_id() -> int:
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class TicketRules:
    """How tickets are made and how long they last.

    lease_s: how long a ticket waits for its commit, from its begin. offer_s: how long an offer
    waits for its sender, never longer than the lease. secret: of the tickets' digests, 16 to 64
    random bytes. draw_id: random numbers below 2^64.
    """

    lease_s: float = 30.0
    offer_s: float = math.inf
    secret: bytes = field(default_factory=partial(secrets.token_bytes, 32), repr=False)
    draw_id: Callable[[], int] = _draw_id


class TicketTable:
    """All tickets of one worker's boot. Thread-safe. Reports exactly one end, TicketCommitted or
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
        """on_event: called in any thread, holding no lock. clock: monotonic seconds. mark: of the
        pool that the blocks are in, see KvPool."""
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
        """Of senders, by whoever holds the lock."""
        self._none_over_before_s = clock()
        """Deadlines are only ever put off: this bound comes down only for a new ticket."""

    # What the owner of the blocks calls.

    @property
    def num_open(self) -> int:
        """Tickets whose event is still to come."""
        with self._lock:
            return sum(not ticket.is_settled for ticket in self._tickets.values())

    def state(self, ticket_id: int) -> TicketState | None:
        """None: unknown, or released."""
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

        A commit of fewer tokens is taken if it covers spec.num_tokens at least. lease_s: if it is
        to be shorter than the table's own. held_start: the first token that has a block, see
        BlockLease. Raises ValueError if the blocks have no such room.
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
        """Give a ticket up, in whatever state; a second abort, or one after the commit, changes
        nothing."""
        with self._locked() as events:
            ticket = self._tickets.get(ticket_id)
            if ticket and ticket.is_open:
                events.append(self._abort(ticket, reason, message))

    def abort_all(self, reason: str, message: str) -> None:
        """Give every ticket up whose event is still to come."""
        with self._locked() as events:
            events += [self._abort(ticket, reason, message) for ticket in self._open()]

    def expire(self) -> None:
        """Abort the tickets that nobody has presented in time, and those that no frame has come for
        within the lease."""
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

    # What the receiver calls, in its connections' threads. `connection` numbers them.

    def begin(
        self, data: bytes, connection: int, on_aborted: OnAborted | None = None
    ) -> Rejection | None:
        """A sender presents a ticket: genuine, of this boot, live and for the first time, or it is
        rejected.

        on_aborted: called, in any thread and holding no lock, when the ticket is aborted by
        anything but a frame of the connection, or its end."""
        try:
            # What is to the byte as it was given needs no digest.
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
        """Where to write `piece`, until unpin. A piece out of range or seen before
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
        """The writer of one pin is done with the blocks."""
        with self._locked() as events:
            events.append(self._tickets[ticket_id].unpin(checksum, num_bytes))

    def fail(
        self, ticket_id: int, epoch: int, connection: int, reason: str, message: str
    ) -> Rejection:
        """The sender broke a rule or gave up. Only the connection that holds the ticket can abort
        it so."""
        with self._locked() as events:
            ticket = self._addressed(ticket_id, epoch, connection)
            if isinstance(ticket, Rejection):
                return ticket
            events.append(ticket.abort(reason, message))
            return Rejection(reason, message)

    def commit(self, commit: Commit, connection: int) -> Rejection | None:
        """The sender says that all is sent. None: so it is, and TicketCommitted has been
        reported."""
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
        """The sender wants the KV that the owner holds. PrefixRequested is reported besides the
        ticket's one event, before it."""
        with self._locked() as events:
            ticket = self._addressed(ticket_id, epoch, connection)
            if isinstance(ticket, Rejection):
                return ticket
            ticket.renew(self._clock())
            events.append(PrefixRequested(ticket_id, deliver_to))
            return None

    def renew(self, ticket_id: int, connection: int) -> Rejection | None:
        """The sender is still computing."""
        with self._lock:
            ticket = self._addressed(ticket_id, _EPOCH, connection)
            if isinstance(ticket, Rejection):
                return ticket
            ticket.renew(self._clock())
            return None

    def close_connection(self, connection: int, message: str) -> None:
        """Abort what the connection had open."""
        with self._locked() as events:
            own = (ticket for ticket in self._open() if ticket.connection == connection)
            events += [ticket.abort(HandoffFailed.reason, message) for ticket in own]

    @contextmanager
    def _locked(self) -> Iterator[list[TicketEvent | None]]:
        """Hold the lock. The events put into the list are reported, in their order, once the lock
        is free again, and senders warned after them."""
        events: list[TicketEvent | None] = []
        with self._lock:
            yield events
            warnings, self._warnings = self._warnings, []
        for event in events:
            if event is not None:
                self._on_event(event)
        for warn in warnings:
            warn()

    # Under the lock.

    def _addressed(self, ticket_id: int, epoch: int, connection: int) -> Ticket | Rejection:
        """The open ticket that a frame of `connection` may be about."""
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
        """Abort an open ticket for a reason of this side, of which its sender is warned, too. What
        is to be reported now: see Ticket.abort."""
        if ticket.on_aborted:
            rejection = Rejection(reason, message)
            self._warnings.append(partial(ticket.on_aborted, ticket.ticket_id, _EPOCH, rejection))
        return ticket.abort(reason, message)


_UNKNOWN = Rejection(
    HandoffFailed.reason, "the ticket is not, or no more, known on this connection"
)
