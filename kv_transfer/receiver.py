"""Receiving half of the KV channel, without I/O: frames in, blocks written, replies out.

A chunk is written only after its header's place checksum has passed, and only to a place that
belongs to the ticket, is not cached, and has not been written before. Its payload may be written
before its own checksum is verified: nobody reads a ticket's blocks before the commit, and a payload
that fails aborts the ticket, which releases the blocks unread. See
docs/adr/0010-kv-is-verified-in-place.md.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from baton.errors import BY_REASON, HandoffFailed
from baton.v1 import kv_pb2
from baton.wire import sample_from_proto
from engine.kv.groups import is_known
from engine.kv.range import KvRange
from kv_transfer.codec import ChunkCodec
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
from kv_transfer.ticket import Commit, ParkedChunk, Rejection
from kv_transfer.ticket_table import TicketTable
from kv_transfer.wire_format import most_token_layer_bytes

Reply = Callable[[Frame], None]
#: ReceiverSession.land.
Land = Callable[[kv_pb2.KvChunk], tuple[memoryview, ...]]


class Receiver:
    """Receives KV for one worker's tickets. Thread-safe: each connection's thread has its own
    session."""

    def __init__(self, config: ReceiverConfig, tickets: TicketTable) -> None:
        most_bytes = most_token_layer_bytes(config.pool.layout)
        if config.num_credits < 1 or config.max_chunk_bytes < most_bytes:
            raise ValueError("a receiver needs room for one token of one layer at least")
        self.config = config
        self.tickets = tickets
        self.num_credits = config.num_credits
        # Credits returned at once: each report wakes the sender's thread, and the remaining credits
        # keep it busy meanwhile.
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
        """Return the receiving end of a new connection. `reply` and `seal` are called only within
        on_frame and report_aborts, in the same thread.

        seal: makes all later frames carry digests, in both directions; see Connection.seal.
        wake: thread-safe; causes a call of `report_aborts` soon.
        checksum: kind of payload checksums of the transport.
        """
        handshake = ReceiverHandshake(self.config, reply, seal, checksum)
        return ReceiverSession(self, next(self._connections), reply, handshake, wake)


@dataclass(frozen=True, slots=True)
class _Landing:
    """Pin on the blocks that the next frame's payload is being written into."""

    ticket_id: int
    views: tuple[memoryview, ...]


class ReceiverSession:
    """Receiving end of one connection: KvHello first, then any mix of handoffs.

    on_frame raises FrameError for frames that a correct sender never sends; the transport must then
    close the connection, as it must after a refused `handshake`. Errors of a single ticket are
    answered with KvAbort and affect no other ticket. `report_aborts` sends aborts that originate
    here.
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
        # Appended by any thread, consumed by the connection's.
        self._unreported: deque[kv_pb2.KvAbort] = deque()
        # Free slots not returned yet: fewer than credit_batch, so that the sender always has some.
        self._credits: list[int] = []
        self._landing: _Landing | None = None
        self._parked_codec: ChunkCodec | None = None

    @property
    def peer(self) -> str:
        """The sender's name for messages."""
        return self.handshake.peer

    def report_aborts(self) -> None:
        """Send KvAbort for tickets that were aborted on this side."""
        while self._unreported:
            self._reply(self._unreported.popleft())

    def land(self, chunk: kv_pb2.KvChunk) -> tuple[memoryview, ...]:
        """The place in the ticket's blocks where `chunk`'s payload may be written directly, instead
        of being passed to on_frame.

        Empty if the payload must be staged. Otherwise the next call is on_frame with `chunk`, after
        the payload is written, or on_close.
        """
        terms, piece = self.handshake.terms, place_of(chunk)
        if (
            terms is None
            or not terms.codec.can_view(piece)
            or not self._tickets.has_blocks(chunk.ticket_id, piece)
            or header_fault(chunk, chunk.payload_bytes, terms)
        ):
            return ()
        pinned = self._tickets.pin(chunk.ticket_id, chunk.epoch, self._connection, piece)
        if isinstance(pinned, Rejection) or pinned.block_ids is None:
            # on_frame repeats the check and replies
            return ()
        self._landing = _Landing(chunk.ticket_id, terms.codec.views(pinned.block_ids, piece))
        return self._landing.views

    def on_frame(self, frame: Frame, payload: Payload) -> None:
        """Process a frame. `payload` (of a staged chunk) is read before this returns, and not
        kept."""
        terms = self.handshake.terms
        if terms is None or isinstance(frame, kv_pb2.KvHello):
            self.handshake.on_frame(frame)
            return
        match frame:
            case kv_pb2.KvChunk():
                self._on_chunk(terms, frame, payload)
            case kv_pb2.KvBegin():
                self._on_begin(terms, frame)
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
        """Abort the connection's tickets after it ended. Must not overlap with, or precede,
        on_frame."""
        if self._landing:
            self._tickets.unpin(self._landing.ticket_id, self._connection, 0, 0)
            self._landing = None
        self._tickets.close_connection(self._connection, f"{self.peer}: {message}")

    def _on_begin(self, terms: Terms, begin: kv_pb2.KvBegin) -> None:
        outcome = self._tickets.begin(
            begin.ticket, self._connection, self._on_ticket_aborted, terms.part
        )
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
        """Verify a payload and copy it into the ticket's blocks. A failure aborts the ticket if
        this connection holds it."""
        fault = header_fault(chunk, payload.nbytes, terms)
        if fault:
            return self._fail(chunk, fault)
        piece = place_of(chunk)
        pinned = self._tickets.pin(chunk.ticket_id, chunk.epoch, self._connection, piece)
        if isinstance(pinned, Rejection):
            return pinned
        fault = "the worker failed while it stored a chunk"
        if pinned.block_ids is None:
            return self._written(chunk, self._park(terms, chunk, payload))
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

    def _park(self, terms: Terms, chunk: kv_pb2.KvChunk, payload: Payload) -> str:
        """Verify a payload and keep a copy until it has blocks. Return its fault, or an empty
        string."""
        if not isinstance(payload, memoryview):
            return "a payload in a device's memory came before its blocks"
        data = memoryview(bytearray(payload))
        if fault := payload_fault(chunk, (data,), terms):
            return fault
        if self._parked_codec is None:  # the connection's own is not for other threads
            self._parked_codec = terms.codec.for_another_thread()
        unpack, piece = self._parked_codec.unpack, place_of(chunk)

        def write(block_ids: Sequence[int]) -> None:
            unpack(block_ids, piece, data)

        self._tickets.park(chunk.ticket_id, ParkedChunk(piece.first_token, len(data), write))
        return ""

    def _written(self, chunk: kv_pb2.KvChunk, fault: str) -> Rejection | None:
        """Unpin a chunk's blocks. A fault aborts the ticket first."""
        rejection = self._fail(chunk, fault) if fault else None
        self._tickets.unpin(chunk.ticket_id, self._connection, chunk.checksum, chunk.payload_bytes)
        return rejection

    def _on_commit(self, terms: Terms, frame: kv_pb2.KvCommit) -> None:
        # Sum of the chunks' checksums, provided that the commit arrived unchanged.
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
        """Queue a KvAbort. Thread-safe."""
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
    """The range of a chunk. Raises FrameError for an unknown group."""
    if not is_known(chunk.group):
        raise FrameError(f"a chunk of an unknown group {chunk.group}")
    place = (chunk.first_token, chunk.num_tokens, chunk.first_layer, chunk.num_layers)
    return KvRange(*place, chunk.group)


def header_fault(chunk: kv_pb2.KvChunk, num_bytes: int, terms: Terms) -> str:
    """The fault in the header of a chunk with `num_bytes` of payload, as far as the header shows
    it; empty if none."""
    if chunk.place_checksum != place_checksum(chunk):
        return "a chunk whose header has a wrong checksum"
    piece = place_of(chunk)
    if num_bytes != chunk.payload_bytes or num_bytes != terms.codec.wire.num_bytes(piece):
        return f"a chunk of {num_bytes} bytes for {piece}"
    return ""


def payload_fault(chunk: kv_pb2.KvChunk, payload: tuple[memoryview, ...], terms: Terms) -> str:
    """The fault in the payload of a chunk with a valid header; empty if none."""
    is_sound = chunk_checksum(chunk, payload, terms.payload_key) == chunk.checksum
    return "" if is_sound else _wrong_checksum(chunk)


def store(chunk: kv_pb2.KvChunk, payload: Payload, block_ids: tuple[int, ...], terms: Terms) -> str:
    """Copy a payload into a sequence's blocks. Return its fault, or an empty string; after a fault
    the blocks hold old or new bytes.

    Raises what KvPool.unpack does, and RuntimeError from the device.
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
