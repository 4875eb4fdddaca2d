"""The receiving half of the KV channel, without I/O: frames in, blocks written, answers out.

Who writes into blocks, and when: only a chunk whose header has passed its own checksum and whose
place is the ticket's, not cached, and not arrived before. Its payload may be written there before
its checksum is known, because until the commit nobody reads a ticket's blocks, and a payload that
does not pass kills the ticket: then the blocks go back unread. See
docs/adr/0010-kv-is-verified-in-place.md.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from baton.engine.interface import KvPool
from baton.errors import BY_REASON, HandoffFailed
from baton.types import ANY_NUMERICS, KvLayout, NumericsRule, WorkerIdentity
from baton.v1 import kv_pb2
from kv_transfer.agreement import Terms
from kv_transfer.checksum import chunks_of_commit
from kv_transfer.device_memory import Payload
from kv_transfer.frame import Frame, FrameError, clipped
from kv_transfer.greeting import ReceiverGreeting, Welcome
from kv_transfer.incoming import header_fault, payload_fault, place_of, store
from kv_transfer.kv_secret import KvSecret
from kv_transfer.ticket import Commit, Rejection
from kv_transfer.ticket_table import TicketTable
from kv_transfer.version import first_tokens_of
from kv_transfer.wire_format import most_token_layer_bytes

Reply = Callable[[Frame], None]
#: ReceiverSession.land.
Land = Callable[[kv_pb2.KvChunk], tuple[memoryview, ...]]


class Receiver:
    """Takes KV for one worker's tickets. Thread-safe: each connection's thread has a session of its
    own."""

    def __init__(
        self,
        identity: WorkerIdentity,
        layout: KvLayout,
        pool: KvPool,
        tickets: TicketTable,
        num_credits: int,
        max_chunk_bytes: int,
        wire_dtype: str = "auto",
        secret: KvSecret | None = None,
        rule: NumericsRule = ANY_NUMERICS,
    ) -> None:
        """num_credits: chunks in flight per connection; each has `max_chunk_bytes` of staging here.

        wire_dtype: what senders are asked to send, one of WIRE_DTYPES. secret: KV is taken only
        from workers that have it, too; None: from whoever presents a ticket. rule: which senders it
        takes KV of.
        """
        if num_credits < 1 or max_chunk_bytes < most_token_layer_bytes(layout):
            raise ValueError("a receiver needs room for one token of one layer at least")
        self.welcome = Welcome(
            identity, pool, num_credits, max_chunk_bytes, wire_dtype, secret, rule
        )
        self.tickets = tickets
        self.num_credits = num_credits
        # Told together, since each telling wakes the sender's thread; the rest keeps it busy
        # meanwhile.
        self.credit_batch = max(1, num_credits // 2)
        self.max_chunk_bytes = max_chunk_bytes
        self._connections = itertools.count(1)

    def session(
        self,
        reply: Reply,
        seal: Callable[[bytes], None] = lambda _: None,
        wake: Callable[[], None] = lambda: None,
        checksum: kv_pb2.KvPayloadChecksum.ValueType = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED,
    ) -> ReceiverSession:
        """The receiving end of a new connection. `reply` and `seal` are called within on_frame and
        speak only, in the same thread.

        seal: has all that follows carry digests, both ways; see Connection.seal. wake: called in
        any thread; has `speak` called soon. checksum: of payloads, as the transport has it.
        """
        greeting = ReceiverGreeting(self.welcome, reply, seal, checksum)
        return ReceiverSession(self, next(self._connections), reply, greeting, wake)


@dataclass(frozen=True, slots=True)
class _Landing:
    """A pin on the blocks that the payload of the next frame is being written into."""

    ticket_id: int
    views: tuple[memoryview, ...]


class ReceiverSession:
    """One connection's receiving end: KvHello first, then any mix of handoffs.

    on_frame raises FrameError at what a sound sender never sends; the transport then ends the
    connection, as it does when `is_refused`. What concerns one ticket alone is answered by KvAbort
    and disturbs no other. `speak` tells what nobody
    asked: that a ticket has died.
    """

    def __init__(
        self,
        receiver: Receiver,
        connection: int,
        reply: Reply,
        greeting: ReceiverGreeting,
        wake: Callable[[], None],
    ) -> None:
        self._receiver = receiver
        self._tickets = receiver.tickets
        self._connection = connection
        self._reply = reply
        self._greeting = greeting
        self._wake = wake
        # Written in any thread, read in the connection's.
        self._news: deque[kv_pb2.KvAbort] = deque()
        # Slots that are free again, and not yet told: fewer than credit_batch, so that the sender
        # is never without any.
        self._credits: list[int] = []
        self._landing: _Landing | None = None

    @property
    def peer(self) -> str:
        """The sender, for people."""
        return self._greeting.peer

    @property
    def is_refused(self) -> bool:
        """Whether the connection is to end, the sender knowing why."""
        return self._greeting.is_refused

    @property
    def is_open(self) -> bool:
        """Whether the sender may present tickets."""
        return self._greeting.terms is not None

    def speak(self) -> None:
        """Tell the sender which of its tickets have died for reasons of this side."""
        while self._news:
            self._reply(self._news.popleft())

    def land(self, chunk: kv_pb2.KvChunk) -> tuple[memoryview, ...]:
        """Where the payload of `chunk` may be written instead of being passed to on_frame: its
        place in the ticket's blocks.

        Nothing if it has to be staged. Otherwise on_frame takes `chunk` next, once the payload is
        there, or on_close ends all.
        """
        terms, piece = self._greeting.terms, place_of(chunk)
        if (
            terms is None
            or not terms.codec.is_lendable(piece)
            or header_fault(chunk, chunk.payload_bytes, terms)
        ):
            return ()
        pinned = self._tickets.pin(chunk.ticket_id, chunk.epoch, self._connection, piece)
        if isinstance(pinned, Rejection):
            # on_frame meets it again, and answers.
            return ()
        self._landing = _Landing(chunk.ticket_id, terms.codec.lend(pinned, piece))
        return self._landing.views

    def on_frame(self, frame: Frame, payload: Payload) -> None:
        """Take a frame. `payload` (of a chunk that did not land) is read before this returns, and
        not kept."""
        terms = self._greeting.terms
        if terms is None or isinstance(frame, kv_pb2.KvHello):
            self._greeting.on_frame(frame)
            return
        match frame:
            case kv_pb2.KvChunk():
                self._on_chunk(terms, frame, payload)
            case kv_pb2.KvBegin():
                self._on_begin(frame)
            case kv_pb2.KvCommit():
                self._on_commit(terms, frame)
            case kv_pb2.KvRenew():
                self._on_renew(frame)
            case kv_pb2.KvBorrow():
                self._on_borrow(frame)
            case kv_pb2.KvAbort():
                self._on_abort(frame)
            case _:
                raise FrameError(f"a {type(frame).__name__} from a sender")

    def on_close(self, message: str) -> None:
        """The connection is over: its tickets are aborted. Nothing may call on_frame after or
        during this."""
        if self._landing:
            self._tickets.unpin(self._landing.ticket_id, 0, 0)
            self._landing = None
        self._tickets.close_connection(self._connection, f"{self.peer}: {message}")

    def _on_begin(self, begin: kv_pb2.KvBegin) -> None:
        outcome = self._tickets.begin(begin.ticket, self._connection, self._on_death)
        if not isinstance(outcome, Rejection):
            return
        try:
            ticket = kv_pb2.KvTicket.FromString(begin.ticket)
        except DecodeError:
            raise FrameError("a KvBegin without a ticket") from None
        self._reject(ticket.ticket_id, ticket.epoch, outcome)

    def _on_chunk(self, terms: Terms, chunk: kv_pb2.KvChunk, payload: Payload) -> None:
        landing, self._landing = self._landing, None
        if landing:
            rejection = self._written(chunk, payload_fault(chunk, landing.views, terms))
        else:
            rejection = self._write(terms, chunk, payload)
        self._credits.append(chunk.slot)
        if len(self._credits) >= self._receiver.credit_batch:
            self._reply(kv_pb2.KvCredit(slots=self._credits))
            self._credits.clear()
        if rejection:
            self._reject(chunk.ticket_id, chunk.epoch, rejection)

    def _write(self, terms: Terms, chunk: kv_pb2.KvChunk, payload: Payload) -> Rejection | None:
        """Verify, and copy into the ticket's blocks. What fails here kills the ticket if this
        connection holds it."""
        fault = header_fault(chunk, payload.nbytes, terms)
        if fault:
            return self._fail(chunk, fault)
        piece = place_of(chunk)
        pinned = self._tickets.pin(chunk.ticket_id, chunk.epoch, self._connection, piece)
        if isinstance(pinned, Rejection):
            return pinned
        fault = "the worker failed while it stored a chunk"
        try:
            fault = store(chunk, payload, pinned, terms)
        except (ValueError, RuntimeError) as error:
            fault = f"the worker could not store a chunk: {error}"
        finally:
            rejection = self._written(chunk, fault)
        return rejection

    def _written(self, chunk: kv_pb2.KvChunk, fault: str) -> Rejection | None:
        """The writer of a chunk is done with the blocks. A fault kills the ticket before they are
        let go."""
        rejection = self._fail(chunk, fault) if fault else None
        self._tickets.unpin(chunk.ticket_id, chunk.checksum, chunk.payload_bytes)
        return rejection

    def _on_commit(self, terms: Terms, frame: kv_pb2.KvCommit) -> None:
        commit = Commit(
            ticket_id=frame.ticket_id,
            epoch=frame.epoch,
            num_tokens=frame.num_tokens,
            firsts=first_tokens_of(frame, terms.version),
            checksum=chunks_of_commit(frame, terms.version, terms.key),
            exposed_ms=frame.exposed_us / 1000,
        )
        rejection = self._tickets.commit(commit, self._connection)
        if rejection:
            self._reject(frame.ticket_id, frame.epoch, rejection)
        else:
            self._reply(kv_pb2.KvCommitted(ticket_id=frame.ticket_id, epoch=frame.epoch))

    def _on_abort(self, abort: kv_pb2.KvAbort) -> None:
        reason = abort.reason if abort.reason in BY_REASON else HandoffFailed.reason
        self._tickets.fail(
            abort.ticket_id, abort.epoch, self._connection, reason, f"{self.peer}: {abort.message}"
        )

    def _on_borrow(self, borrow: kv_pb2.KvBorrow) -> None:
        ticket_id, epoch = borrow.ticket_id, borrow.epoch
        rejection = self._tickets.ask(ticket_id, epoch, self._connection, borrow.lend_to)
        if rejection:
            self._reject(ticket_id, epoch, rejection)

    def _on_renew(self, renew: kv_pb2.KvRenew) -> None:
        for ticket_id in renew.ticket_ids:
            rejection = self._tickets.renew(ticket_id, self._connection)
            if rejection:
                self._reject(ticket_id, 0, rejection)

    def _fail(self, chunk: kv_pb2.KvChunk, fault: str) -> Rejection:
        return self._tickets.fail(
            chunk.ticket_id, chunk.epoch, self._connection, HandoffFailed.reason, fault
        )

    def _on_death(self, ticket_id: int, epoch: int, rejection: Rejection) -> None:
        """In any thread."""
        self._news.append(_abort_of(ticket_id, epoch, rejection))
        self._wake()

    def _reject(self, ticket_id: int, epoch: int, rejection: Rejection) -> None:
        self._reply(_abort_of(ticket_id, epoch, rejection))


def _abort_of(ticket_id: int, epoch: int, rejection: Rejection) -> kv_pb2.KvAbort:
    return kv_pb2.KvAbort(
        ticket_id=ticket_id,
        epoch=epoch,
        reason=rejection.reason,
        message=clipped(rejection.message),
    )
