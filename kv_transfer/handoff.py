"""One handoff as its sender sees it: what is asked for, how far it is, and the frames that say so.

    task     Begin    Send ...     Finish    Cancel, at any time
    frame    KvBegin  KvChunk ...  KvCommit  KvAbort

It ends with one SendDone: when the receiver has answered, or will not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.errors import BatonError, EngineFault, HandoffFailed
from baton.types import KvRange, Sample
from baton.v1 import kv_pb2
from baton.wire import sample_to_proto
from kv_transfer.frame import chunk_checksum, clipped, commit_checksum, place_checksum
from kv_transfer.handshake import Terms
from kv_transfer.ticket import KvTicket
from kv_transfer.transport.base import Staged
from kv_transfer.wire_format import chunks


@dataclass(frozen=True, slots=True)
class SendDone:
    """The one end of a handoff, seen from its sender: it touches the blocks no more. No error: the
    receiver owns the sequence. num_bytes: KV that was sent."""

    key: str
    error: BatonError | None
    num_bytes: int


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
class FetchPrefix:
    """Ask the receiver for the KV that it holds; `deliver_to` are the bytes of a ticket of ours."""

    key: str
    deliver_to: bytes


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


Task = Begin | FetchPrefix | Send | Finish | Cancel


_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Handoff:
    """One handoff's state. data: the ticket's bytes. checksum, num_bytes: of the chunks that are on
    their way."""

    key: str
    ticket: KvTicket
    data: bytes
    is_begun: bool = False
    is_done: bool = False
    checksum: int = 0
    num_bytes: int = 0
    commit_deadline: float | None = None
    prefill_end: float = 0.0
    committed_at: float = 0.0

    def count(self, chunk: kv_pb2.KvChunk) -> None:
        """A chunk has gone."""
        self.checksum = (self.checksum + chunk.checksum) & _MASK
        self.num_bytes += chunk.payload_bytes


@dataclass(slots=True)
class PendingChunks:
    """Chunks of one task that are still to be sent. `next` is the one that waits for room; None:
    all are gone."""

    handoff: Handoff
    block_ids: tuple[int, ...]
    rest: Iterator[KvRange]
    next: KvRange | None

    def advance(self) -> None:
        self.next = next(self.rest, None)


def chunks_of(handoff: Handoff, task: Send, terms: Terms, max_chunk_bytes: int) -> PendingChunks:
    """What the receiver lacks of a piece. Raises HandoffFailed if it is none of the ticket's."""
    piece, ticket = task.piece, handoff.ticket
    if piece.end_token > ticket.num_tokens:
        raise HandoffFailed(f"{piece} is more than the ticket's {ticket.num_tokens} tokens")
    first_token = min(max(piece.first_token, ticket.num_cached_tokens), piece.end_token)
    missing = replace(piece, first_token=first_token, num_tokens=piece.end_token - first_token)
    wire = terms.codec.wire
    rest = chunks(missing, wire.token_layer_bytes, max_chunk_bytes, wire.block_size)
    return PendingChunks(handoff, task.block_ids, rest, next(rest, None))


def chunk_of(
    work: PendingChunks, piece: KvRange, staged: Staged, terms: Terms
) -> tuple[kv_pb2.KvChunk, Staged]:
    """A chunk's header, and its payload: copied into `staged`, or, where that will do, the blocks
    themselves.

    Raises EngineFault if they cannot be read.
    """
    ticket = work.handoff.ticket
    chunk = kv_pb2.KvChunk(
        ticket_id=ticket.ticket_id,
        epoch=ticket.epoch,
        first_token=piece.first_token,
        num_tokens=piece.num_tokens,
        first_layer=piece.first_layer,
        num_layers=piece.num_layers,
        payload_bytes=terms.codec.wire.num_bytes(piece),
        slot=staged.slot,
    )
    chunk.place_checksum = place_checksum(chunk)
    try:
        return chunk, _fill(chunk, work.block_ids, piece, staged, terms)
    except (ValueError, RuntimeError) as error:
        raise EngineFault(f"the KV of {piece} could not be read: {error}") from error


def commit_of(handoff: Handoff, task: Finish, terms: Terms, now_s: float) -> kv_pb2.KvCommit:
    """All of it is sent."""
    commit = kv_pb2.KvCommit(
        ticket_id=handoff.ticket.ticket_id,
        epoch=handoff.ticket.epoch,
        num_tokens=task.num_tokens,
        exposed_us=max(0, round((now_s - task.prefill_end) * 1e6)),
        first_tokens=map(sample_to_proto, task.firsts),
    )
    commit.checksum = commit_checksum(commit, handoff.checksum, terms.key)
    return commit


def prefix_fetch_of(ticket: KvTicket, deliver_to: bytes) -> kv_pb2.KvFetchPrefix:
    """Ask for what the receiver holds."""
    return kv_pb2.KvFetchPrefix(
        ticket_id=ticket.ticket_id, epoch=ticket.epoch, deliver_to=deliver_to
    )


def abort_of(ticket: KvTicket, error: BatonError) -> kv_pb2.KvAbort:
    """There will be no commit."""
    return kv_pb2.KvAbort(
        ticket_id=ticket.ticket_id,
        epoch=ticket.epoch,
        reason=error.reason,
        message=clipped(error.message),
    )


def _fill(
    chunk: kv_pb2.KvChunk,
    block_ids: tuple[int, ...],
    piece: KvRange,
    staged: Staged,
    terms: Terms,
) -> Staged:
    """The payload; its checksum is put into `chunk`. Raises what ChunkCodec.pack does."""
    codec, seed = terms.codec, chunk.place_checksum
    if staged.device is not None:
        chunk.checksum = terms.on_device.pack(block_ids, piece, staged.device, seed)
        return staged
    if staged.can_gather and (pieces := codec.views(block_ids, piece)):
        staged = replace(staged, pieces=pieces)
    elif not terms.payload_key:
        chunk.checksum = codec.pack_checked(block_ids, piece, staged.buffer, seed)
        return staged
    else:
        codec.pack(block_ids, piece, staged.buffer)
    chunk.checksum = chunk_checksum(chunk, staged.payload, terms.payload_key)
    return staged
