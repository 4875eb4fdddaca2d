"""Tickets and handoffs of a worker with several ranks, as its rank 0 sees them.

Each rank has its own pool, ticket table and sender, which know nothing of the others. What leaves
this file is as of one rank: one end per offered ticket, one SendDone per handoff.

    offer      the ticket goes into the table of every rank; the sender gets it when all have it
    committed  once every rank has committed it
    aborted    when the first rank aborts it: at the others, too; the event follows their ends, so
               that no rank writes its blocks any more
    sent       once every rank has sent its part; with the error of the first that failed
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Protocol

from baton.errors import HandoffFailed, InvalidRequest
from baton.types import SequenceSpec
from kv_transfer.frame import CHECKSUM_MASK
from kv_transfer.send_connection import Cancel, FetchPrefix, LaterTask, SendDone
from kv_transfer.sender import KvSender
from kv_transfer.ticket import (
    OfferedTicket,
    PrefixRequested,
    Reservation,
    TicketAborted,
    TicketCommitted,
    TicketEvent,
    TicketOffered,
)
from kv_transfer.ticket_table import TicketMint


class Tickets(Protocol):
    """All tickets of a worker, as its core sees them; see TicketTable."""

    def offer(
        self,
        spec: SequenceSpec,
        block_ids: tuple[int, ...],
        num_cached_tokens: int,
        num_tokens: int,
        lease_s: float = ...,
        held_start: int = ...,
    ) -> OfferedTicket: ...

    def abort(self, ticket_id: int, reason: str, message: str) -> None: ...

    def expire(self) -> None: ...

    def release(self, ticket_id: int) -> None: ...


class RankTickets(Protocol):
    """The ticket table of one rank; see TicketTable. A call may only be on its way to the rank when
    it returns."""

    def put(self, reservation: Reservation) -> bool:
        """Return whether the table has the ticket; if not yet, on_rank_offered follows."""
        ...

    def abort(self, ticket_id: int, reason: str, message: str) -> None: ...

    def expire(self) -> None: ...

    def release(self, ticket_id: int) -> None: ...


class TicketGroup:
    """All tickets of one boot of a worker. Thread-safe. See TicketTable; on_rank_event receives
    what the ranks report."""

    def __init__(
        self,
        mint: TicketMint,
        ranks: Sequence[RankTickets],
        on_event: Callable[[TicketEvent], None],
    ) -> None:
        """on_event: called in any thread, without a lock held."""
        self._mint = mint
        self._ranks = ranks
        self._on_event = on_event
        self._lock = threading.Lock()
        self._ends: dict[int, dict[int, TicketCommitted | TicketAborted]] = {}
        """By ticket: how it ended, by rank."""
        self._num_awaited: dict[int, int] = {}
        """By ticket: ranks whose tables may not have it yet; and offer, while it runs."""

    @property
    def num_open(self) -> int:
        """Tickets without an end event."""
        with self._lock:
            return sum(len(ends) < len(self._ranks) for ends in self._ends.values())

    def offer(
        self,
        spec: SequenceSpec,
        block_ids: tuple[int, ...],
        num_cached_tokens: int,
        num_tokens: int,
        lease_s: float = math.inf,
        held_start: int = 0,
    ) -> OfferedTicket:
        """See TicketTable."""
        with self._lock:
            reservation = self._mint.reserve(
                *(spec, block_ids, num_cached_tokens, num_tokens, lease_s, held_start),
                taken=self._ends,
            )
            self._ends[reservation.ticket_id] = {}
            self._num_awaited[reservation.ticket_id] = len(self._ranks) + 1
        num_known = 1 + sum(rank.put(reservation) for rank in self._ranks)
        is_known = self._acknowledge(reservation.ticket_id, num_known)
        return OfferedTicket(reservation.ticket_id, reservation.data, is_known)

    def abort(self, ticket_id: int, reason: str, message: str) -> None:
        """See TicketTable."""
        for rank in self._ranks:
            rank.abort(ticket_id, reason, message)

    def expire(self) -> None:
        """See TicketTable."""
        for rank in self._ranks:
            rank.expire()

    def release(self, ticket_id: int) -> None:
        """See TicketTable."""
        with self._lock:
            ends = self._ends.get(ticket_id)
            if ends is None:
                return
            if len(ends) < len(self._ranks):
                raise ValueError(f"ticket {ticket_id} has not ended at all ranks")
            del self._ends[ticket_id]
        for rank in self._ranks:
            rank.release(ticket_id)

    def on_rank_offered(self, ticket_id: int) -> None:
        """A rank's table has a ticket. Called in any thread."""
        if self._acknowledge(ticket_id, 1):
            self._on_event(TicketOffered(ticket_id))

    def _acknowledge(self, ticket_id: int, num_ranks: int) -> bool:
        """Return whether the tables of all ranks have the ticket now."""
        with self._lock:
            self._num_awaited[ticket_id] -= num_ranks
            if self._num_awaited[ticket_id]:
                return False
            del self._num_awaited[ticket_id]
            return True

    def on_rank_event(self, rank: int, event: TicketEvent) -> None:
        """A rank's table reports an event. Called in any thread."""
        if isinstance(event, TicketOffered | PrefixRequested):
            self._on_event(event)
            return
        with self._lock:
            ends = self._ends[event.ticket_id]
            ends[rank] = event
            is_first_abort = isinstance(event, TicketAborted) and not any(
                isinstance(end, TicketAborted) for at, end in ends.items() if at != rank
            )
            whole = _end_of(tuple(ends.values())) if len(ends) == len(self._ranks) else None
        if whole:
            self._on_event(whole)
        elif is_first_abort and isinstance(event, TicketAborted):
            for other in self._ranks:
                other.abort(event.ticket_id, event.reason, event.message)


def _end_of(ends: Sequence[TicketCommitted | TicketAborted]) -> TicketCommitted | TicketAborted:
    """The end of a ticket from those at all ranks, in their order of time."""
    committed = [end for end in ends if isinstance(end, TicketCommitted)]
    if len(committed) < len(ends):
        return next(end for end in ends if isinstance(end, TicketAborted))
    one = committed[0]
    if len({(end.num_tokens, end.first_tokens) for end in committed}) > 1:
        text = "the sender's ranks have ended the sequence differently"
        return TicketAborted(one.ticket_id, HandoffFailed.reason, text)
    return replace(
        one,
        transfer_exposed_ms=max(end.transfer_exposed_ms for end in committed),
        num_bytes=sum(end.num_bytes for end in committed),
        reserved_s=min(end.reserved_s for end in committed),
        receiving_s=min(end.receiving_s for end in committed),
        whole_start=max(end.whole_start for end in committed),
        checksum=sum(end.checksum for end in committed) & CHECKSUM_MASK,
    )


class SenderGroup:
    """See KvSender and Sender: the senders of all ranks. on_rank_done receives what they report."""

    def __init__(self, ranks: Sequence[KvSender], on_done: Callable[[SendDone], None]) -> None:
        """ranks: rank 0 first, which parses tickets."""
        self._ranks = ranks
        self._user_on_done = on_done
        self._lock = threading.Lock()
        self._ended: dict[Hashable, list[SendDone]] = {}
        """By handoff: its ends at ranks, by time."""

    @property
    def num_open(self) -> int:
        """Handoffs without SendDone."""
        with self._lock:
            return len(self._ended)

    def begin(self, key: Hashable, ticket: bytes, *others: LaterTask) -> int:
        """See Sender."""
        with self._lock:
            if key in self._ended:
                raise ValueError(f"a handoff {key!r} is under way")
            self._ended[key] = []
        first, *rest = self._ranks
        try:
            num_cached_tokens = first.begin(key, ticket, *others)
        except InvalidRequest:
            with self._lock:
                del self._ended[key]
            raise
        for rank in rest:
            rank.begin(key, ticket, *others)
        with self._lock:
            failed = next((done.error for done in self._ended.get(key, ()) if done.error), None)
        if failed:  # before the other ranks had begun, perhaps
            self.submit(Cancel(key, failed.reason, failed.message))
        return num_cached_tokens

    def submit(self, task: LaterTask) -> None:
        """See Sender."""
        ranks = self._ranks[:1] if isinstance(task, FetchPrefix) else self._ranks
        for rank in ranks:
            rank.submit(task)

    def heartbeat(self) -> None:
        """See Sender."""
        for rank in self._ranks:
            rank.heartbeat()

    def on_rank_done(self, done: SendDone) -> None:
        """A rank has ended its part of a handoff. Called in any thread."""
        with self._lock:
            ended = self._ended[done.key]
            is_first = done.error is not None and not any(each.error for each in ended)
        # Before this end counts, because the key may be used again once all have ended.
        if is_first and done.error:
            self.submit(Cancel(done.key, done.error.reason, done.error.message))
        with self._lock:
            ended.append(done)
            if len(ended) < len(self._ranks):
                return
            del self._ended[done.key]
        error = next((each.error for each in ended if each.error), None)
        self._user_on_done(SendDone(done.key, error, sum(each.num_bytes for each in ended)))
