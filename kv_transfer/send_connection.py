"""Sending half of the KV channel to one worker, without threads: tasks in, frames out, one SendDone
per handoff.

    connection:  none --connect, KvHello--> greeted --KvAccept--> open --any failure--> none
                 (all handoffs end)
    handoff:     begun --KvBegin--> sending --KvCommit--> waiting --KvCommitted--> done
                   any state --abort, KvAbort, deadline, connection lost--> done with an error
                   aborted before its KvBegin: KvBegin and KvAbort are sent once the connection
                   is open, because the receiver has reserved its blocks

    task         Begin    Send ...     Finish    Cancel, at any time
    frame        KvBegin  KvChunk ...  KvCommit  KvAbort

KvBegin is sent as soon as the connection is open, ahead of other handoffs' chunks: it needs no
credit, and the ticket's owner waits only briefly for it. A handoff ends with one SendDone, once the
receiver has answered or failed to.

Deadlines: connect (until KvAccept), credit (room for the next chunk), commit (until KvCommitted).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from baton.errors import BY_REASON, BatonError, EngineFault, HandoffFailed, PeerMismatch
from baton.types import Sample, WorkerIdentity
from baton.v1 import kv_pb2
from baton.wire import sample_to_proto
from engine.kv.interface import kept_parts
from engine.kv.layout import groups_of
from engine.kv.range import KvRange
from kv_transfer.device_memory import check_device
from kv_transfer.frame import (
    CHECKSUM_MASK,
    chunk_checksum,
    clipped,
    commit_checksum,
    place_checksum,
)
from kv_transfer.handshake import SenderConfig, SenderSession, Terms
from kv_transfer.ticket import KvTicket
from kv_transfer.transport.connection import Staged
from kv_transfer.wire_format import chunks


@dataclass(frozen=True, slots=True)
class SendDone:
    """End of a handoff: the sender no longer reads its blocks. Without an error the receiver owns
    the sequence. num_bytes: KV bytes sent."""

    key: Hashable
    error: BatonError | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Open a handoff. data: the ticket's bytes."""

    key: Hashable
    ticket: KvTicket
    data: bytes


@dataclass(frozen=True, slots=True)
class Send:
    """Send a range of the sequence's KV, which is final in these blocks once `mark` is done (see
    KvPool); by default the mark of the time when the sender gets this task. Tokens that the
    receiver holds are skipped, as are tokens before whole_start in groups that keep fewer than all
    tokens."""

    key: Hashable
    block_ids: tuple[int, ...]
    piece: KvRange
    mark: object = None
    whole_start: int = 0


@dataclass(frozen=True, slots=True)
class FetchPrefix:
    """Ask the receiver to send the KV that it holds to the ticket `deliver_to` of this worker."""

    key: Hashable
    deliver_to: bytes


@dataclass(frozen=True, slots=True)
class Finish:
    """All KV is computed. `first_tokens` follow the `num_tokens` tokens, one per choice; empty if
    the receiver knows them. prefill_end: end of the prefill on the sender's clock."""

    key: Hashable
    num_tokens: int
    first_tokens: tuple[Sample, ...]
    prefill_end: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a handoff; its SendDone has the error of that reason."""

    key: Hashable
    reason: str
    message: str


#: Tasks of a handoff after Begin.
LaterTask = FetchPrefix | Send | Finish | Cancel
Task = Begin | LaterTask


@dataclass(slots=True)
class Handoff:
    """State of one handoff.

    data: the ticket's bytes.
    abort: sent directly after KvBegin, if it was aborted before that.
    checksum, num_bytes: sums over the chunks sent.
    """

    key: Hashable
    ticket: KvTicket
    data: bytes
    is_begun: bool = False
    is_done: bool = False
    abort: kv_pb2.KvAbort | None = None
    checksum: int = 0
    num_bytes: int = 0
    commit_deadline: float | None = None
    prefill_end: float = 0.0
    committed_at: float = 0.0


@dataclass(slots=True)
class PendingChunks:
    """Chunks of one task still to be sent. next: the chunk that waits for room; None at the end."""

    handoff: Handoff
    block_ids: tuple[int, ...]
    mark: object
    rest: Iterator[KvRange]
    next: KvRange | None


#: Maximum tickets per KvRenew, so that it fits into a header.
_MAX_RENEWED = 1024
#: Maximum frames per pump before polling for tasks, so that urgent ones do not wait for all chunks.
_ROUND_FRAMES = 16
#: Bytes that are packed in about the time that it takes to wake the receiver.
_SMALL_BYTES = 256 * 1024


class SendConnection:
    """Connection to one worker, driven by one thread at a time: `handle` accepts a task, `pump`
    does all work that is possible now."""

    def __init__(
        self,
        peer: WorkerIdentity,
        config: SenderConfig,
        heartbeat: Callable[[], float],
        on_done: Callable[[SendDone], None],
    ) -> None:
        """heartbeat: time of the engine loop's last sign of life, on config.clock."""
        self._peer = peer
        self._config = config
        self._heartbeat = heartbeat
        self._on_done = on_done
        self._handoffs: dict[Hashable, Handoff] = {}
        # Each with its handoff, because a key may be reused once its handoff is done.
        self._tasks: deque[tuple[Handoff, FetchPrefix | Send | Finish]] = deque()
        # Handoffs without KvBegin: all of them until there is a session.
        self._unpresented: deque[Handoff] = deque()
        # The task in progress.
        self._sending: PendingChunks | None = None
        self._session: SenderSession | None = None
        self._renewed_at = config.clock()
        self._renew_interval_s = math.inf
        self._idle_since = config.clock()

    @property
    def is_idle(self) -> bool:
        """Whether no handoff is under way, and no frame of an ended one is pending."""
        return not self._handoffs and not self._unpresented

    @property
    def is_over(self) -> bool:
        """Whether it has been idle long enough to be closed."""
        idle_s = self._config.clock() - self._idle_since
        return self.is_idle and idle_s >= self._config.idle_timeout_s

    def fileno(self) -> int:
        """File descriptor to poll, besides tasks; -1 if there is none."""
        return self._session.connection.fileno() if self._session else -1

    def next_deadline(self) -> float:
        """Latest time of the next `pump`."""
        if self.is_idle:
            return self._idle_since + self._config.idle_timeout_s
        session = self._session
        if session is None:
            return self._config.clock()
        times = [h.commit_deadline for h in self._handoffs.values()]
        times.append(session.deadline)
        if session.terms:
            times.append(self._renewed_at + self._renew_interval_s)
        return min(time for time in times if time is not None)

    def handle(self, task: Task) -> None:
        """Accept a task. Tasks of ended handoffs are dropped."""
        match task:
            case Begin(key, ticket, data):
                # The shortest lease applies until no handoff is left.
                most_s = self._renew_interval_s if self._handoffs else math.inf
                self._renew_interval_s = min(ticket.lease_s / 3, most_s)
                self._handoffs[key] = Handoff(key, ticket, data)
                self._unpresented.append(self._handoffs[key])
            case Cancel(key, reason, message):
                handoff = self._handoffs.get(key)
                if handoff:
                    self._abort(handoff, BY_REASON.get(reason, HandoffFailed)(message))
            case _:
                if task.key in self._handoffs:
                    self._tasks.append((self._handoffs[task.key], task))

    def pump(self) -> bool:
        """Connect if necessary, process replies, send what has room, and end overdue handoffs.

        Return whether another call may have work at once.
        """
        if self.is_idle and self._session is None:
            self._forget_tasks()
            return False
        try:
            session = self._session or self._connect()
            came = self._take_replies(session)
            self._present(session)
            num_sent, has_more = self._send_ready(session)
            session.connection.flush()
            self._renew(session)
            self._check_deadlines(session)
        except PeerMismatch as error:
            # Logged, because a mismatch is permanent and needs an operator.
            _log.warning("no KV to %s: %s", self._peer.worker_id, error.message)
            self._end_all(error)
        except HandoffFailed as error:
            self._end_all(error)
        else:
            # Without a file descriptor, replies have arrived by now, within the sends.
            is_inline = session.connection.fileno() < 0
            return has_more or (is_inline and (came or num_sent > 0))
        return False

    def close(self, error: BatonError) -> None:
        """End every handoff with `error`, and close the connection."""
        self._end_all(error)

    # The connection

    def _connect(self) -> SenderSession:
        ticket = self._unpresented[0].ticket
        self._session = session = SenderSession(self._config, self._peer, ticket.endpoints)
        self._renewed_at = self._config.clock()
        session.start()
        return session

    def _take_replies(self, session: SenderSession) -> bool:
        """Process replies. Return whether there were any."""
        came = False
        while (frame := session.connection.receive()) is not None:
            came = True
            if session.terms and isinstance(frame, kv_pb2.KvCredit):
                session.deadline = None
                continue
            if session.terms is None or not isinstance(frame, kv_pb2.KvCommitted | kv_pb2.KvAbort):
                session.take(frame)
                continue
            ticket_id = frame.ticket_id
            found = (h for h in self._handoffs.values() if h.ticket.ticket_id == ticket_id)
            handoff = next(found, None)
            if handoff is None:
                continue
            if isinstance(frame, kv_pb2.KvAbort):
                error = BY_REASON.get(frame.reason, HandoffFailed)
                self._done(handoff, error(f"{self._peer.worker_id}: {frame.message}"))
            elif handoff.commit_deadline is not None:
                _log.debug(
                    "%d bytes of KV for %s: committed %.3f ms, confirmed %.3f ms after the prefill",
                    handoff.num_bytes,
                    self._peer.worker_id,
                    (handoff.committed_at - handoff.prefill_end) * 1e3,
                    (self._config.clock() - handoff.prefill_end) * 1e3,
                )
                self._done(handoff, None)
        return came

    def _end_all(self, error: BatonError) -> None:
        session, self._session = self._session, None
        self._forget_tasks()
        if session:
            session.connection.close()
        for handoff in tuple(self._handoffs.values()):
            self._done(handoff, error)

    # Sending

    def _present(self, session: SenderSession) -> None:
        while session.terms and self._unpresented:
            handoff = self._unpresented.popleft()
            if handoff.abort:
                session.connection.send(kv_pb2.KvBegin(ticket=handoff.data), more=True)
                session.connection.send(handoff.abort)
            elif not handoff.is_done:
                # KvBegin waits for a small handoff's chunk, to share its write. For a large one it
                # goes ahead, so that the receiver checks the ticket meanwhile.
                task = None if self._sending else self._next_of(handoff)
                is_small = (
                    isinstance(task, Send)
                    and self._config.pool.groups.num_bytes(task.piece) <= _SMALL_BYTES
                )
                session.connection.send(kv_pb2.KvBegin(ticket=handoff.data), more=is_small)
                handoff.is_begun = True

    def _next_of(self, handoff: Handoff) -> FetchPrefix | Send | Finish | None:
        """The next task, if it belongs to this handoff."""
        owner, task = self._tasks[0] if self._tasks else (None, None)
        return task if owner is handoff else None

    def _send_ready(self, session: SenderSession) -> tuple[int, bool]:
        """Send frames of tasks, in order; a chunk without room blocks those behind it. Return
        (frames sent, whether more could be sent)."""
        terms, num_sent = session.terms, 0
        if terms is None:
            return 0, False
        while self._sending or self._tasks:
            if self._sending is None:
                self._start(session, terms, *self._tasks.popleft())
            elif (piece := self._sending.next) is None or self._sending.handoff.is_done:
                self._sending = None
            # Check only before a chunk, so that a commit stays in the same write as its last chunk.
            elif num_sent >= _ROUND_FRAMES:
                return num_sent, True
            elif not self._send_chunk(session, terms, self._sending, piece):
                break
            num_sent += 1
        return num_sent, False

    def _start(
        self,
        session: SenderSession,
        terms: Terms,
        handoff: Handoff,
        task: FetchPrefix | Send | Finish,
    ) -> None:
        if handoff.is_done:
            return
        ticket, now = handoff.ticket, self._config.clock()
        match task:
            case FetchPrefix(_, deliver_to):
                session.connection.send(
                    kv_pb2.KvFetchPrefix(
                        ticket_id=ticket.ticket_id, epoch=ticket.epoch, deliver_to=deliver_to
                    )
                )
            case Send(_, block_ids, piece, mark, whole_start) if (
                piece.end_token <= ticket.num_tokens
            ):
                first_token = min(max(piece.first_token, ticket.num_cached_tokens), piece.end_token)
                num_missing = piece.end_token - first_token
                missing = replace(piece, first_token=first_token, num_tokens=num_missing)
                wire, most = terms.codec.wire, session.max_chunk_bytes
                pool = self._config.pool
                block_size = wire.block_size if pool.groups.is_paged(missing) else 1
                token_bytes = wire.piece_layer_bytes(missing)
                # Smaller blocks at the receiver may make it keep fewer tokens.
                start = max(whole_start, groups_of(ticket.layout).whole_start(ticket.num_tokens))
                parts = kept_parts(pool, missing, start)
                rest = chain.from_iterable(
                    chunks(part, token_bytes, most, block_size) for part in parts
                )
                self._sending = PendingChunks(handoff, block_ids, mark, rest, next(rest, None))
            case Send(_, _, piece):
                text = f"{piece} is more than the ticket's {ticket.num_tokens} tokens"
                self._abort(handoff, HandoffFailed(text))
            case Finish(_, num_tokens, first_tokens, prefill_end):
                commit = kv_pb2.KvCommit(
                    ticket_id=ticket.ticket_id,
                    epoch=ticket.epoch,
                    num_tokens=num_tokens,
                    exposed_us=max(0, round((now - prefill_end) * 1e6)),
                    first_tokens=map(sample_to_proto, first_tokens),
                )
                commit.checksum = commit_checksum(commit, handoff.checksum, terms.key)
                handoff.commit_deadline = now + self._config.ack_timeout_s
                handoff.prefill_end, handoff.committed_at = prefill_end, now
                session.connection.send(commit)

    def _send_chunk(
        self, session: SenderSession, terms: Terms, work: PendingChunks, piece: KvRange
    ) -> bool:
        """Send one chunk. Return False if there is no room."""
        handoff, num_bytes = work.handoff, terms.codec.wire.num_bytes(piece)
        staged = session.connection.stage(num_bytes)
        if staged is None:
            if session.deadline is None:
                session.deadline = self._config.clock() + self._config.ack_timeout_s
            return False
        chunk = kv_pb2.KvChunk(
            ticket_id=handoff.ticket.ticket_id,
            epoch=handoff.ticket.epoch,
            first_token=piece.first_token,
            num_tokens=piece.num_tokens,
            first_layer=piece.first_layer,
            num_layers=piece.num_layers,
            group=kv_pb2.KvGroup.ValueType(piece.group),
            payload_bytes=num_bytes,
            slot=staged.slot,
        )
        chunk.place_checksum = place_checksum(chunk)
        try:
            self._config.pool.follow(work.mark)
            filled = fill(chunk, work.block_ids, piece, staged, terms)
        except (ValueError, RuntimeError) as error:
            session.connection.unstage(staged)
            self._abort(handoff, EngineFault(f"the KV of {piece} could not be read: {error}"))
            if isinstance(error, RuntimeError):
                check_device(self._config.pool, self._config.on_device_lost)
            return True
        work.next = next(work.rest, None)
        is_committed_next = work.next is None and isinstance(self._next_of(handoff), Finish)
        session.connection.send(chunk, filled, more=is_committed_next)
        handoff.checksum = (handoff.checksum + chunk.checksum) & CHECKSUM_MASK
        handoff.num_bytes += num_bytes
        return True

    # Time

    def _renew(self, session: SenderSession) -> None:
        """Renew the tickets' leases, provided that the engine loop has shown life since the last
        renewal."""
        if not session.terms or not self._handoffs:
            return
        now = self._config.clock()
        if now < self._renewed_at + self._renew_interval_s:
            return
        is_alive = self._heartbeat() > self._renewed_at
        self._renewed_at = now
        ticket_ids = [h.ticket.ticket_id for h in self._handoffs.values() if h.is_begun]
        if is_alive:
            for at in range(0, len(ticket_ids), _MAX_RENEWED):
                part = ticket_ids[at : at + _MAX_RENEWED]
                session.connection.send(kv_pb2.KvRenew(ticket_ids=part))

    def _check_deadlines(self, session: SenderSession) -> None:
        if self.is_idle:
            return
        now, peer, config = self._config.clock(), self._peer.worker_id, self._config
        if session.deadline is not None and now >= session.deadline:
            if session.terms:
                raise HandoffFailed(f"{peer} took no KV for {config.ack_timeout_s:g} s")
            raise HandoffFailed(f"{peer} did not accept within {config.connect_timeout_s:g} s")
        for handoff in tuple(self._handoffs.values()):
            if handoff.commit_deadline is not None and now >= handoff.commit_deadline:
                text = f"{peer} did not confirm the commit within {config.ack_timeout_s:g} s"
                self._abort(handoff, HandoffFailed(text))

    # Ends

    def _forget_tasks(self) -> None:
        self._tasks.clear()
        self._unpresented.clear()
        self._sending = None

    def _abort(self, handoff: Handoff, error: BatonError) -> None:
        """End a handoff from this side, and notify the receiver."""
        self._done(handoff, error)
        abort = kv_pb2.KvAbort(
            ticket_id=handoff.ticket.ticket_id,
            epoch=handoff.ticket.epoch,
            reason=error.reason,
            message=clipped(error.message),
        )
        if not handoff.is_begun:
            handoff.abort = abort
        elif self._session:
            try:
                self._session.connection.send(abort)
            except HandoffFailed as lost:
                self._end_all(lost)

    def _done(self, handoff: Handoff, error: BatonError | None) -> None:
        del self._handoffs[handoff.key]
        handoff.is_done = True
        self._idle_since = self._config.clock()
        self._on_done(SendDone(handoff.key, error, handoff.num_bytes))


_log = logging.getLogger("baton.kv")


def fill(
    chunk: kv_pb2.KvChunk,
    block_ids: tuple[int, ...],
    piece: KvRange,
    staged: Staged,
    terms: Terms,
) -> Staged:
    """Fill a chunk's payload: copied into `staged`, or gathered from the blocks where possible.
    Sets the chunk's checksum. Raises what ChunkCodec.pack does."""
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
