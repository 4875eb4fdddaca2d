"""The sending half of the KV channel towards one worker, without threads: tasks in, frames out, one end per handoff.

    connection:  none --connect, KvHello--> greeted --KvAccept--> open --any failure--> none (all handoffs end)
    handoff:     begun --KvBegin--> sending --KvCommit--> waiting --KvCommitted--> done
                   any state --abort, KvAbort, deadline, connection lost--> done with an error

KvBegin goes as soon as the connection is open: it overtakes other handoffs' chunks, whose room it does not need, because the
ticket's owner does not wait long for it.

Deadlines: connect (until KvAccept), credit (room for the next chunk), commit (until KvCommitted).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from baton.engine.kv_range import KvRange
from baton.errors import BY_REASON, BatonError, EngineFault, HandoffFailed, PeerMismatch
from baton.types import WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import layout_to_proto
from kv_transfer.agreement import Terms, terms_of
from kv_transfer.checksum import chunk_checksum, commit_checksum, place_checksum
from kv_transfer.chunking import chunks
from kv_transfer.frame import Frame, FrameError, clipped
from kv_transfer.kv_secret import KvSecret, has_nonce, new_nonce
from kv_transfer.kv_ticket import KvTicket
from kv_transfer.send_task import Begin, Borrow, Cancel, Finish, Send, SendDone, SenderConfig, Task
from kv_transfer.transport.base import Connection, Staged
from kv_transfer.version import (
    BORROW_VERSION,
    MAX_VERSION,
    MIN_VERSION,
    can_commit,
    put_first_tokens,
)

_MASK = (1 << 64) - 1
_log = logging.getLogger("baton.kv")
#: Tickets in one KvRenew, so that it fits a header.
_MAX_RENEWED = 1024
#: So many frames are sent before new tasks are looked for: what is urgent among them does not wait for all chunks to be sent.
_ROUND_FRAMES = 16


@dataclass(slots=True)
class _Handoff:
    """One handoff's state."""

    key: str
    ticket: KvTicket
    data: bytes
    """The ticket's bytes."""
    is_begun: bool = False
    is_done: bool = False
    checksum: int = 0
    num_bytes: int = 0
    commit_deadline: float | None = None
    prefill_end: float = 0.0
    committed_at: float = 0.0


@dataclass(slots=True)
class _Chunks:
    """Chunks of one task that are still to be sent. `next` is the one that waits for room."""

    handoff: _Handoff
    block_ids: tuple[int, ...]
    rest: Iterator[KvRange]
    next: KvRange | None


@dataclass(slots=True)
class _Link:
    """A connection and what the peer has said on it."""

    connection: Connection
    hello: kv_pb2.KvHello
    deadline: float
    """When KvAccept must have come."""
    terms: Terms | None = None
    max_chunk_bytes: int = 0
    """Both since KvAccept."""
    stalled_since: float | None = None
    """Since when the next chunk has had no room, without any credit coming."""
    renewed_at: float = 0.0
    waiting: deque[_Chunks] = field(default_factory=deque)


class Lane:
    """Driven by one thread at a time: `handle` takes a task, `pump` does what can be done now."""

    def __init__(
        self,
        peer: WorkerIdentity,
        config: SenderConfig,
        heartbeat: Callable[[], float],
        on_done: Callable[[SendDone], None],
    ) -> None:
        """heartbeat: when the engine loop last showed life, by config.clock."""
        self._peer = peer
        self._config = config
        self._heartbeat = heartbeat
        self._on_done = on_done
        self._handoffs: dict[str, _Handoff] = {}
        # Each with the handoff that it is about: a key may be used again once its handoff is done.
        self._tasks: deque[tuple[_Handoff, Borrow | Send | Finish]] = deque()
        self._unpresented: deque[_Handoff] = deque()
        self._link: _Link | None = None
        self._idle_since = config.clock()

    @property
    def is_over(self) -> bool:
        """Idle for so long that it should be closed."""
        idle_s = self._config.clock() - self._idle_since
        return not self._handoffs and idle_s >= self._config.idle_timeout_s

    def fileno(self) -> int:
        """What to wait on besides tasks; -1 if nothing."""
        return self._link.connection.fileno() if self._link else -1

    def next_deadline(self) -> float:
        """When `pump` must be called at the latest."""
        if not self._handoffs:
            return self._idle_since + self._config.idle_timeout_s
        times = [h.commit_deadline for h in self._handoffs.values() if h.commit_deadline]
        link = self._link
        if link and link.terms:
            times.append(link.renewed_at + self._renew_interval_s())
            if link.stalled_since is not None:
                times.append(link.stalled_since + self._config.ack_timeout_s)
        elif link:
            times.append(link.deadline)
        return min(times, default=self._config.clock())

    def handle(self, task: Task) -> None:
        """Take a task. Tasks of handoffs that are done are dropped."""
        match task:
            case Begin(key, ticket, data):
                self._handoffs[key] = _Handoff(key, ticket, data)
                self._unpresented.append(self._handoffs[key])
            case Cancel(key, reason, message):
                handoff = self._handoffs.get(key)
                if handoff:
                    self._give_up(handoff, BY_REASON.get(reason, HandoffFailed)(message))
            case _:
                if task.key in self._handoffs:
                    self._tasks.append((self._handoffs[task.key], task))

    def pump(self) -> bool:
        """Connect if need be, take in what has come, send some of what has room, and end what is late.

        Whether there may be more to do at once."""
        if not self._handoffs and self._link is None:
            self._tasks.clear()
            self._unpresented.clear()
            return False
        try:
            link = self._link or self._connect()
            is_busy = self._take_replies(link)
            self._present(link)
            is_busy |= self._send_ready(link)
            self._renew(link)
            self._check_deadlines(link)
        except PeerMismatch as error:
            # It will not pass by itself: somebody has to see it.
            _log.warning("no KV to %s: %s", self._peer.worker_id, error.message)
            self._end_all(error)
        except HandoffFailed as error:
            self._end_all(error)
        else:
            return is_busy
        return False

    def close(self, error: BatonError) -> None:
        """End every handoff with `error`, and the connection."""
        self._end_all(error)

    # The connection.

    def _connect(self) -> _Link:
        config = self._config
        ticket = next(iter(self._handoffs.values())).ticket
        deadline = config.clock() + config.connect_timeout_s
        connection = config.connect(ticket.endpoints, config.connect_timeout_s)
        hello = kv_pb2.KvHello(
            min_version=MIN_VERSION,
            max_version=MAX_VERSION,
            worker_id=config.identity.worker_id,
            generation=config.identity.generation,
            layout=layout_to_proto(config.layout),
            nonce=new_nonce() if config.secret else b"",
        )
        self._link = _Link(connection, hello, deadline, renewed_at=config.clock())
        connection.send(hello)
        return self._link

    def _take_replies(self, link: _Link) -> bool:
        """Whether anything came."""
        came = False
        while (frame := link.connection.receive()) is not None:
            came = True
            self._take(link, frame)
        return came

    def _take(self, link: _Link, frame: Frame) -> None:
        match frame:
            case kv_pb2.KvAccept() if link.terms is None:
                self._open(link, frame)
            case kv_pb2.KvRefuse() if link.terms is None:
                raise PeerMismatch.of(
                    self._peer.worker_id, frame.field, frame.actual, frame.expected
                )
            case kv_pb2.KvCredit() if link.terms is not None:
                link.stalled_since = None
            case kv_pb2.KvCommitted() if link.terms is not None:
                handoff = self._find(frame.ticket_id)
                if handoff and handoff.commit_deadline is not None:
                    self._log_end(handoff)
                    self._done(handoff, None)
            case kv_pb2.KvAbort() if link.terms is not None:
                handoff = self._find(frame.ticket_id)
                if handoff:
                    error = BY_REASON.get(frame.reason, HandoffFailed)
                    self._done(handoff, error(f"{self._peer.worker_id}: {frame.message}"))
            case _:
                raise FrameError(f"{self._peer.worker_id} sent a {type(frame).__name__} now")

    def _open(self, link: _Link, accept: kv_pb2.KvAccept) -> None:
        config, peer = self._config, self._peer
        terms = terms_of(accept, config.pool, peer)
        link.terms = replace(terms, key=self._prove(link, accept, config.secret))
        if link.terms.key:
            link.connection.seal(link.terms.key)
        wire = link.terms.codec.wire
        most = max(config.max_chunk_bytes, wire.token_layer_bytes)
        link.max_chunk_bytes = min(most, accept.max_chunk_bytes)
        if not link.terms.codec.is_plain:
            _log.info(
                "KV travels to %s as %s, not %s", peer.worker_id, wire.dtype, config.layout.dtype
            )

    def _prove(self, link: _Link, accept: kv_pb2.KvAccept, secret: KvSecret | None) -> bytes:
        """Check the receiver's proof and send ours; the connection's key. Empty without a secret."""
        if secret is None:
            return b""
        if not has_nonce(accept) or not secret.is_held_by(link.hello, accept):
            told = "another" if accept.proof else "none"
            raise PeerMismatch.of(self._peer.worker_id, "kv_secret", "the one of this worker", told)
        link.connection.send(kv_pb2.KvProof(proof=secret.sender_proof(link.hello, accept)))
        return secret.connection_key(link.hello, accept)

    def _end_all(self, error: BatonError) -> None:
        link, self._link = self._link, None
        self._tasks.clear()
        self._unpresented.clear()
        if link:
            link.connection.close()
        for handoff in tuple(self._handoffs.values()):
            self._done(handoff, error)

    # Sending.

    def _present(self, link: _Link) -> None:
        while link.terms and self._unpresented:
            handoff = self._unpresented.popleft()
            if not handoff.is_done:
                link.connection.send(kv_pb2.KvBegin(ticket=handoff.data))
                handoff.is_begun = True

    def _send_ready(self, link: _Link) -> bool:
        """Whether anything was sent. Tasks go in their order; a chunk without room holds up those behind it."""
        terms, num_sent = link.terms, 0
        if terms is None:
            return False
        while link.waiting or self._tasks:
            if not link.waiting:
                self._start(link, terms, *self._tasks.popleft())
            elif num_sent >= _ROUND_FRAMES and link.waiting[0].next:
                # Never after a chunk that its commit is to follow in the same write.
                break
            elif not self._send_chunk(link, terms, link.waiting[0]):
                break
            num_sent += 1
        return num_sent > 0

    def _start(
        self, link: _Link, terms: Terms, handoff: _Handoff, task: Borrow | Send | Finish
    ) -> None:
        if handoff.is_done:
            return
        match task:
            case Borrow(_, lend_to):
                self._borrow(link, terms, handoff, lend_to)
            case Send():
                self._start_chunks(link, terms, handoff, task)
            case Finish():
                self._commit(link, terms, handoff, task)

    def _borrow(self, link: _Link, terms: Terms, handoff: _Handoff, lend_to: bytes) -> None:
        """Ask for what the receiver holds. One that cannot be asked does not answer: our ticket's lease ends the wait."""
        if terms.version >= BORROW_VERSION:
            ticket = handoff.ticket
            frame = kv_pb2.KvBorrow(ticket_id=ticket.ticket_id, epoch=ticket.epoch, lend_to=lend_to)
            link.connection.send(frame)

    def _start_chunks(self, link: _Link, terms: Terms, handoff: _Handoff, task: Send) -> None:
        """Queue what of a piece the receiver lacks."""
        piece = task.piece
        first_token = max(piece.first_token, handoff.ticket.num_cached_tokens)
        if piece.end_token > handoff.ticket.num_tokens:
            text = f"{piece} is more than the ticket's {handoff.ticket.num_tokens} tokens"
            self._give_up(handoff, HandoffFailed(text))
            return
        if first_token >= piece.end_token:
            return
        missing = KvRange(
            first_token, piece.end_token - first_token, piece.first_layer, piece.num_layers
        )
        wire = terms.codec.wire
        rest = chunks(missing, wire.token_layer_bytes, link.max_chunk_bytes, wire.block_size)
        link.waiting.append(_Chunks(handoff, task.block_ids, rest, next(rest, None)))

    def _send_chunk(self, link: _Link, terms: Terms, work: _Chunks) -> bool:
        """Send the next chunk of `work`, or drop `work` if it is over. False: there is no room now."""
        handoff, piece = work.handoff, work.next
        if piece is None or handoff.is_done:
            link.waiting.popleft()
            return True
        num_bytes = terms.codec.wire.num_bytes(piece)
        staged = link.connection.stage(num_bytes)
        if staged is None:
            if link.stalled_since is None:
                link.stalled_since = self._config.clock()
            return False
        chunk = kv_pb2.KvChunk(
            ticket_id=handoff.ticket.ticket_id,
            epoch=handoff.ticket.epoch,
            first_token=piece.first_token,
            num_tokens=piece.num_tokens,
            first_layer=piece.first_layer,
            num_layers=piece.num_layers,
            payload_bytes=num_bytes,
            slot=staged.slot,
        )
        if terms.version > 1:
            chunk.place_checksum = place_checksum(chunk)
        filled = _fill(terms, work.block_ids, piece, chunk, staged)
        if isinstance(filled, EngineFault):
            link.connection.unstage(staged)
            self._give_up(handoff, filled)
            return True
        work.next = next(work.rest, None)
        link.connection.send(
            chunk,
            filled,
            more=work.next is None and len(link.waiting) == 1 and self._commits_next(handoff),
        )
        handoff.checksum = (handoff.checksum + chunk.checksum) & _MASK
        handoff.num_bytes += num_bytes
        return True

    def _commits_next(self, handoff: _Handoff) -> bool:
        """Whether the next task is this handoff's commit."""
        if not self._tasks:
            return False
        owner, task = self._tasks[0]
        return owner is handoff and isinstance(task, Finish)

    def _commit(self, link: _Link, terms: Terms, handoff: _Handoff, task: Finish) -> None:
        if not can_commit(len(task.firsts), terms.version):
            text = f"{len(task.firsts)} first tokens, which version {terms.version} of {self._peer.worker_id} has no room for"
            self._give_up(handoff, HandoffFailed(text))
            return
        now = self._config.clock()
        frame = kv_pb2.KvCommit(
            ticket_id=handoff.ticket.ticket_id,
            epoch=handoff.ticket.epoch,
            num_tokens=task.num_tokens,
            exposed_us=max(0, round((now - task.prefill_end) * 1e6)),
        )
        put_first_tokens(frame, task.firsts, terms.version)
        frame.checksum = commit_checksum(frame, handoff.checksum, terms.version, terms.key)
        handoff.commit_deadline = now + self._config.ack_timeout_s
        handoff.prefill_end, handoff.committed_at = task.prefill_end, now
        link.connection.send(frame)

    # Time.

    def _renew_interval_s(self) -> float:
        return min(h.ticket.lease_s for h in self._handoffs.values()) / 3

    def _renew(self, link: _Link) -> None:
        """Keep tickets alive, but only for an engine loop that has shown life since the last time."""
        if not link.terms or not self._handoffs:
            return
        now = self._config.clock()
        if now < link.renewed_at + self._renew_interval_s():
            return
        is_alive = self._heartbeat() > link.renewed_at
        link.renewed_at = now
        ticket_ids = [h.ticket.ticket_id for h in self._handoffs.values() if h.is_begun]
        if is_alive:
            for at in range(0, len(ticket_ids), _MAX_RENEWED):
                part = ticket_ids[at : at + _MAX_RENEWED]
                link.connection.send(kv_pb2.KvRenew(ticket_ids=part))

    def _check_deadlines(self, link: _Link) -> None:
        if not self._handoffs:
            return
        now, peer, config = self._config.clock(), self._peer.worker_id, self._config
        if link.terms is None and now >= link.deadline:
            raise HandoffFailed(f"{peer} did not greet within {config.connect_timeout_s:g} s")
        if link.stalled_since is not None and now >= link.stalled_since + config.ack_timeout_s:
            raise HandoffFailed(f"{peer} took no KV for {config.ack_timeout_s:g} s")
        for handoff in tuple(self._handoffs.values()):
            if handoff.commit_deadline is not None and now >= handoff.commit_deadline:
                text = f"{peer} did not confirm the commit within {config.ack_timeout_s:g} s"
                self._give_up(handoff, HandoffFailed(text))

    # Ends.

    def _log_end(self, handoff: _Handoff) -> None:
        _log.debug(
            "%d bytes of KV for %s: committed %.3f ms, confirmed %.3f ms after the prefill",
            handoff.num_bytes,
            self._peer.worker_id,
            (handoff.committed_at - handoff.prefill_end) * 1e3,
            (self._config.clock() - handoff.prefill_end) * 1e3,
        )

    def _find(self, ticket_id: int) -> _Handoff | None:
        return next((h for h in self._handoffs.values() if h.ticket.ticket_id == ticket_id), None)

    def _give_up(self, handoff: _Handoff, error: BatonError) -> None:
        """End a handoff from this side, and tell the receiver so if it knows of it."""
        self._done(handoff, error)
        if self._link and handoff.is_begun:
            try:
                self._link.connection.send(
                    kv_pb2.KvAbort(
                        ticket_id=handoff.ticket.ticket_id,
                        epoch=handoff.ticket.epoch,
                        reason=error.reason,
                        message=clipped(error.message),
                    )
                )
            except HandoffFailed as lost:
                self._end_all(lost)

    def _done(self, handoff: _Handoff, error: BatonError | None) -> None:
        del self._handoffs[handoff.key]
        handoff.is_done = True
        self._idle_since = self._config.clock()
        self._on_done(SendDone(handoff.key, error, handoff.num_bytes))


def _fill(
    terms: Terms,
    block_ids: tuple[int, ...],
    piece: KvRange,
    chunk: kv_pb2.KvChunk,
    staged: Staged,
) -> Staged | EngineFault:
    """Put a chunk's payload into `staged`: a copy, or, where that will do, the blocks themselves; its checksum into `chunk`."""
    codec = terms.codec
    try:
        if staged.can_gather and (pieces := codec.lend(block_ids, piece)):
            staged = replace(staged, pieces=pieces)
        elif not terms.key:
            seed = chunk.place_checksum
            chunk.checksum = codec.pack_checked(block_ids, piece, staged.buffer, seed)
            return staged
        else:
            codec.pack(block_ids, piece, staged.buffer)
    except (ValueError, RuntimeError) as error:
        return EngineFault(f"the KV of {piece} could not be read: {error}")
    chunk.checksum = chunk_checksum(chunk, staged.payload, terms.key)
    return staged
