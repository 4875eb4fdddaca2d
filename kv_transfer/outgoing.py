"""What a sender says of a handoff: its KV, cut into chunks as the receiver takes them, and its
end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from baton.errors import BatonError, EngineFault, HandoffFailed
from baton.types import KvRange
from baton.v1 import kv_pb2
from kv_transfer.agreement import Terms
from kv_transfer.checksum import chunk_checksum, commit_checksum, place_checksum
from kv_transfer.chunking import chunks
from kv_transfer.frame import clipped
from kv_transfer.kv_ticket import KvTicket
from kv_transfer.send_task import Finish, Send
from kv_transfer.transport.base import Staged
from kv_transfer.version import BORROW_VERSION, can_commit, put_first_tokens

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
class Chunks:
    """Chunks of one task that are still to be sent. `next` is the one that waits for room; None:
    all are gone."""

    handoff: Handoff
    block_ids: tuple[int, ...]
    rest: Iterator[KvRange]
    next: KvRange | None

    def advance(self) -> None:
        self.next = next(self.rest, None)


def cut(handoff: Handoff, task: Send, terms: Terms, max_chunk_bytes: int) -> Chunks:
    """What of a piece the receiver lacks. Raises HandoffFailed if it is none of the ticket's."""
    piece, ticket = task.piece, handoff.ticket
    if piece.end_token > ticket.num_tokens:
        raise HandoffFailed(f"{piece} is more than the ticket's {ticket.num_tokens} tokens")
    first_token = min(max(piece.first_token, ticket.num_cached_tokens), piece.end_token)
    missing = replace(piece, first_token=first_token, num_tokens=piece.end_token - first_token)
    wire = terms.codec.wire
    rest = chunks(missing, wire.token_layer_bytes, max_chunk_bytes, wire.block_size)
    return Chunks(handoff, task.block_ids, rest, next(rest, None))


def chunk_of(
    work: Chunks, piece: KvRange, staged: Staged, terms: Terms
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
    if terms.version > 1:
        chunk.place_checksum = place_checksum(chunk)
    try:
        return chunk, _fill(chunk, work.block_ids, piece, staged, terms)
    except (ValueError, RuntimeError) as error:
        raise EngineFault(f"the KV of {piece} could not be read: {error}") from error


def commit_of(handoff: Handoff, task: Finish, terms: Terms, now_s: float) -> kv_pb2.KvCommit:
    """All of it is sent. Raises HandoffFailed if the receiver's version cannot be told so."""
    if not can_commit(len(task.firsts), terms.version):
        num_firsts, peer = len(task.firsts), handoff.ticket.owner.worker_id
        raise HandoffFailed(
            f"{num_firsts} first tokens, which version {terms.version} of {peer} has no room for"
        )
    commit = kv_pb2.KvCommit(
        ticket_id=handoff.ticket.ticket_id,
        epoch=handoff.ticket.epoch,
        num_tokens=task.num_tokens,
        exposed_us=max(0, round((now_s - task.prefill_end) * 1e6)),
    )
    put_first_tokens(commit, task.firsts, terms.version)
    commit.checksum = commit_checksum(commit, handoff.checksum, terms.version, terms.key)
    return commit


def borrow_of(ticket: KvTicket, lend_to: bytes, terms: Terms) -> kv_pb2.KvBorrow | None:
    """Ask for what the receiver holds. One that cannot be asked does not answer: the lease of the
    ticket `lend_to` ends the wait."""
    if terms.version < BORROW_VERSION:
        return None
    return kv_pb2.KvBorrow(ticket_id=ticket.ticket_id, epoch=ticket.epoch, lend_to=lend_to)


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
    if staged.can_gather and (pieces := codec.lend(block_ids, piece)):
        staged = replace(staged, pieces=pieces)
    elif not terms.key:
        chunk.checksum = codec.pack_checked(block_ids, piece, staged.buffer, seed)
        return staged
    else:
        codec.pack(block_ids, piece, staged.buffer)
    chunk.checksum = chunk_checksum(chunk, staged.payload, terms.key)
    return staged
