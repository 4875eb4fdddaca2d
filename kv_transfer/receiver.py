"""The receiving half of the KV channel, without I/O: frames in, blocks written, answers out.

Who writes into blocks, and when: only a chunk whose header has passed its own checksum and whose
place is the ticket's, not cached, and not arrived before. Its payload may be written there before
its checksum is known, because until the commit nobody reads a ticket's blocks, and a payload that
does not pass aborts the ticket: then the blocks go back unread. See
docs/adr/0010-kv-is-verified-in-place.md.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from baton.errors import BY_REASON, HandoffFailed
from baton.v1 import kv_pb2
from baton.wire import sample_from_proto
from engine.kv.groups import is_known
from engine.kv.range import KvRange
from kv_transfer.device_memory import Payload, check_device
from kv_transfer.frame import (
    CHECKSUM_MASK,
    Frame,
    FrameError,
    chunk_checksum,
    clipped,
    commit_checksum,
    place_checksum,
)
from kv_transfer.handshake import ReceiverConfig, ReceiverHandshake, Terms
from kv_transfer.ticket import Commit, Rejection
from kv_transfer.ticket_table import TicketTable
from kv_transfer.wire_format import most_token_layer_bytes

Reply = Callable[[Frame], None]
#: ReceiverSession.land.
Land = Callable[[kv_pb2.KvChunk], tuple[memoryview, ...]]


class Receiver:
    """Takes KV for one worker's tickets. Thread-safe: each connection's thread has a session of its
    own."""

    def __init__(self, config: ReceiverConfig, tickets: TicketTable) -> None:
        most_bytes = most_token_layer_bytes(config.pool.layout)
        if config.num_credits < 1 or config.max_chunk_bytes < most_bytes:
            raise ValueError("a receiver needs room for one token of one layer at least")
        self.config = config
        self.tickets = tickets
        self.num_credits = config.num_credits
        # Given back together, since each report wakes the sender's thread; the rest keeps it busy
        # meanwhile.
        self.credit_batch = max(1, config.num_credits // 2)
        self.max_chunk_bytes = config.max_chunk_bytes
        self._connections = itertools.count(1)

    def session(
        self,
        reply: Reply,
        seal: Callable[[bytes], None] = lambda _: None,
        wake: Callable[[], None] = lambda: None,
        checksum: kv_pb2.KvPayloadChecksum.ValueType = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED,
    ) -> ReceiverSession:
        """The receiving end of a new connection. `reply` and `seal` are called within on_frame and
        report_aborts only, in the same thread.

        seal: has all that follows carry digests, both ways; see Connection.seal. wake: called in
        any thread; has `report_aborts` called soon. checksum: of payloads, the best that the
        transport has.
        """
        handshake = ReceiverHandshake(self.config, reply, seal, checksum)
        return ReceiverSession(self, next(self._connections), reply, handshake, wake)


@dataclass(frozen=True, slots=True)
class _Landing:
    """A pin on the blocks that the payload of the next frame is being written into."""

    ticket_id: int
    views: tuple[memoryview, ...]


class ReceiverSession:
    """One connection's receiving end: KvHello first, then any mix of handoffs.

    on_frame raises FrameError at what a sound sender never sends; the transport then ends the
    connection, as it does when the `handshake` is refused. What concerns one ticket alone is
    answered by KvAbort and disturbs no other. `report_aborts` says what nobody asked: that a ticket
    is aborted.
    """

    def __init__(
        self,
        receiver: Receiver,
        connection: int,
        reply: Reply,
        handshake: ReceiverHandshake,
        wake: Callable[[], None],
    ) -> None:
        self._receiver = receiver
        self._tickets = receiver.tickets
        self._connection = connection
        self._reply = reply
        self.handshake = handshake
        self._wake = wake
        # Written in any thread, read in the connection's.
        self._unreported: deque[kv_pb2.KvAbort] = deque()
        # Slots that are free again, and not given back yet: fewer than credit_batch, so that the
        # sender is never without any.
        self._credits: list[int] = []
        self._landing: _Landing | None = None

    @property
    def peer(self) -> str:
        """The sender, for people."""
        return self.handshake.peer

    def report_aborts(self) -> None:
        """Warn the sender of tickets that were aborted for reasons of this side."""
        while self._unreported:
            self._reply(self._unreported.popleft())

    def land(self, chunk: kv_pb2.KvChunk) -> tuple[memoryview, ...]:
        """Where the payload of `chunk` may be written instead of being passed to on_frame: its
        place in the ticket's blocks.

        Nothing if it has to be staged. Otherwise on_frame takes `chunk` next, once the payload is
        there, or on_close ends all.
        """
        terms, piece = self.handshake.terms, place_of(chunk)
        if (
            terms is None
            or not terms.codec.can_view(piece)
            or header_fault(chunk, chunk.payload_bytes, terms)
        ):
            return ()
        pinned = self._tickets.pin(chunk.ticket_id, chunk.epoch, self._connection, piece)
        if isinstance(pinned, Rejection):
            # on_frame meets it again, and answers.
            return ()
        self._landing = _Landing(chunk.ticket_id, terms.codec.views(pinned.block_ids, piece))
        return self._landing.views

    def on_frame(self, frame: Frame, payload: Payload) -> None:
        """Take a frame. `payload` (of a chunk that did not land) is read before this returns, and
        not kept."""
        terms = self.handshake.terms
        if terms is None or isinstance(frame, kv_pb2.KvHello):
            self.handshake.on_frame(frame)
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
            case kv_pb2.KvFetchPrefix():
                self._on_fetch_prefix(frame)
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
        outcome = self._tickets.begin(begin.ticket, self._connection, self._on_ticket_aborted)
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
        """Verify, and copy into the ticket's blocks. What fails here aborts the ticket if this
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
            self._receiver.config.pool.follow(pinned.mark)
            fault = store(chunk, payload, pinned.block_ids, terms)
        except (ValueError, RuntimeError) as error:
            fault = f"the worker could not store a chunk: {error}"
            if isinstance(error, RuntimeError):
                check_device(self._receiver.config.pool, self._receiver.config.on_device_lost)
        finally:
            rejection = self._written(chunk, fault)
        return rejection

    def _written(self, chunk: kv_pb2.KvChunk, fault: str) -> Rejection | None:
        """The writer of a chunk is done with the blocks. A fault aborts the ticket before they are
        let go."""
        rejection = self._fail(chunk, fault) if fault else None
        self._tickets.unpin(chunk.ticket_id, chunk.checksum, chunk.payload_bytes)
        return rejection

    def _on_commit(self, terms: Terms, frame: kv_pb2.KvCommit) -> None:
        # The sum of the chunks' checksums, if the commit is as it was sent.
        checksum = (frame.checksum - commit_checksum(frame, 0, terms.key)) & CHECKSUM_MASK
        commit = Commit(
            ticket_id=frame.ticket_id,
            epoch=frame.epoch,
            num_tokens=frame.num_tokens,
            first_tokens=tuple(map(sample_from_proto, frame.first_tokens)),
            checksum=checksum,
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

    def _on_fetch_prefix(self, fetch: kv_pb2.KvFetchPrefix) -> None:
        ticket_id, epoch = fetch.ticket_id, fetch.epoch
        rejection = self._tickets.request_prefix(
            ticket_id, epoch, self._connection, fetch.deliver_to
        )
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

    def _on_ticket_aborted(self, ticket_id: int, epoch: int, rejection: Rejection) -> None:
        """In any thread."""
        self._unreported.append(_abort_of(ticket_id, epoch, rejection))
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


def place_of(chunk: kv_pb2.KvChunk) -> KvRange:
    """Where a chunk belongs. Raises FrameError if it is of no group that this version knows."""
    if not is_known(chunk.group):
        raise FrameError(f"a chunk of an unknown group {chunk.group}")
    place = (chunk.first_token, chunk.num_tokens, chunk.first_layer, chunk.num_layers)
    return KvRange(*place, chunk.group)


def header_fault(chunk: kv_pb2.KvChunk, num_bytes: int, terms: Terms) -> str:
    """What is wrong with the header of a chunk whose payload has `num_bytes`, as far as it alone
    shows."""
    if chunk.place_checksum != place_checksum(chunk):
        return "a chunk whose header has a wrong checksum"
    piece = place_of(chunk)
    if num_bytes != chunk.payload_bytes or num_bytes != terms.codec.wire.num_bytes(piece):
        return f"a chunk of {num_bytes} bytes for {piece}"
    return ""


def payload_fault(chunk: kv_pb2.KvChunk, payload: tuple[memoryview, ...], terms: Terms) -> str:
    """What is wrong with the payload, in these pieces, of a chunk whose header is sound."""
    is_sound = chunk_checksum(chunk, payload, terms.payload_key) == chunk.checksum
    return "" if is_sound else _wrong_checksum(chunk)


def store(chunk: kv_pb2.KvChunk, payload: Payload, block_ids: tuple[int, ...], terms: Terms) -> str:
    """Copy a payload into a sequence's blocks, unless it has a fault, which is returned: the blocks
    may then hold either.

    Raises what KvPool.unpack does, RuntimeError from the device.
    """
    codec, piece, seed = terms.codec, place_of(chunk), chunk.place_checksum
    if not isinstance(payload, memoryview):
        device = terms.on_device
        is_sound = device.unpack(block_ids, piece, payload, seed, chunk.checksum)
        return "" if is_sound else _wrong_checksum(chunk)
    if not terms.payload_key:
        is_sound = codec.unpack_checked(block_ids, piece, payload, seed, chunk.checksum)
        return "" if is_sound else _wrong_checksum(chunk)
    fault = payload_fault(chunk, (payload,), terms)
    if not fault:
        codec.unpack(block_ids, piece, payload)
    return fault


def _wrong_checksum(chunk: kv_pb2.KvChunk) -> str:
    return f"a chunk with a wrong checksum: {place_of(chunk)}"
