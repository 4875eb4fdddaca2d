"""The sending half of the KV channel towards one worker, without threads: tasks in, frames out, one
end per handoff.

    connection:  none --connect, KvHello--> greeted --KvAccept--> open --any failure--> none
                 (all handoffs end)
    handoff:     begun --KvBegin--> sending --KvCommit--> waiting --KvCommitted--> done
                   any state --abort, KvAbort, deadline, connection lost--> done with an error

KvBegin goes as soon as the connection is open: it overtakes other handoffs' chunks, whose room it
does not need, because the ticket's owner does not wait long for it.

Deadlines: connect (until KvAccept), credit (room for the next chunk), commit (until KvCommitted).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from baton.errors import BY_REASON, BatonError, EngineFault, HandoffFailed, PeerMismatch
from baton.types import WorkerIdentity
from baton.v1 import kv_pb2
from kv_transfer.frame import Frame, FrameError
from kv_transfer.handoff import (
    Begin,
    Cancel,
    FetchPrefix,
    Finish,
    Handoff,
    PendingChunks,
    Send,
    SendDone,
    Task,
    abort_of,
    chunk_of,
    chunks_of,
    commit_of,
    prefix_fetch_of,
)
from kv_transfer.handshake import SenderConfig, SenderHandshake, Terms
from kv_transfer.ticket import Endpoint

_log = logging.getLogger("baton.kv")


#: Tickets in one KvRenew, so that it fits a header.
_MAX_RENEWED = 1024
#: So many frames are sent before new tasks are looked for: what is urgent among them does not wait
#: for all chunks to be sent.
_ROUND_FRAMES = 16
#: So much is packed in no more time than it takes to wake the receiver.
_SMALL_BYTES = 256 * 1024


class SendConnection:
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
        self._handoffs: dict[str, Handoff] = {}
        # Each with the handoff that it is about: a key may be used again once its handoff is done.
        self._tasks: deque[tuple[Handoff, FetchPrefix | Send | Finish]] = deque()
        self._unpresented: deque[Handoff] = deque()
        # What was begun of the tasks.
        self._sending: PendingChunks | None = None
        self._session: SenderSession | None = None
        self._renewed_at = config.clock()
        self._idle_since = config.clock()

    @property
    def is_over(self) -> bool:
        """Idle for so long that it should be closed."""
        idle_s = self._config.clock() - self._idle_since
        return not self._handoffs and idle_s >= self._config.idle_timeout_s

    def fileno(self) -> int:
        """What to wait on besides tasks; -1 if nothing."""
        return self._session.connection.fileno() if self._session else -1

    def next_deadline(self) -> float:
        """When `pump` must be called at the latest."""
        if not self._handoffs:
            return self._idle_since + self._config.idle_timeout_s
        session = self._session
        if session is None:
            return self._config.clock()
        times = [h.commit_deadline for h in self._handoffs.values()]
        times.append(session.deadline())
        if session.terms:
            times.append(self._renewed_at + self._renew_interval_s())
        return min(time for time in times if time is not None)

    def handle(self, task: Task) -> None:
        """Take a task. Tasks of handoffs that are done are dropped."""
        match task:
            case Begin(key, ticket, data):
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
        """Connect if need be, take in what has come, send some of what has room, and end what is
        late.

        Whether there may be more to do at once."""
        if not self._handoffs and self._session is None:
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
            # It will not pass by itself: somebody has to see it.
            _log.warning("no KV to %s: %s", self._peer.worker_id, error.message)
            self._end_all(error)
        except HandoffFailed as error:
            self._end_all(error)
        else:
            # Replies that no file descriptor announces have come by now.
            is_inline = session.connection.fileno() < 0
            return has_more or (is_inline and (came or num_sent > 0))
        return False

    def close(self, error: BatonError) -> None:
        """End every handoff with `error`, and the connection."""
        self._end_all(error)

    # The connection.

    def _connect(self) -> SenderSession:
        ticket = next(iter(self._handoffs.values())).ticket
        self._session = session = SenderSession(self._config, self._peer, ticket.endpoints)
        self._renewed_at = self._config.clock()
        session.start()
        return session

    def _take_replies(self, session: SenderSession) -> bool:
        """Whether anything came."""
        came = False
        while (frame := session.connection.receive()) is not None:
            came = True
            self._take(session, frame)
        return came

    def _take(self, session: SenderSession, frame: Frame) -> None:
        match frame:
            case kv_pb2.KvCommitted() if session.terms is not None:
                handoff = self._find(frame.ticket_id)
                if handoff and handoff.commit_deadline is not None:
                    self._log_end(handoff)
                    self._done(handoff, None)
            case kv_pb2.KvAbort() if session.terms is not None:
                handoff = self._find(frame.ticket_id)
                if handoff:
                    error = BY_REASON.get(frame.reason, HandoffFailed)
                    self._done(handoff, error(f"{self._peer.worker_id}: {frame.message}"))
            case _:
                session.take(frame)

    def _end_all(self, error: BatonError) -> None:
        session, self._session = self._session, None
        self._forget_tasks()
        if session:
            session.connection.close()
        for handoff in tuple(self._handoffs.values()):
            self._done(handoff, error)

    # Sending.

    def _present(self, session: SenderSession) -> None:
        while session.terms and self._unpresented:
            handoff = self._unpresented.popleft()
            if not handoff.is_done:
                is_followed = self._is_small_and_next(handoff)
                session.connection.send(kv_pb2.KvBegin(ticket=handoff.data), more=is_followed)
                handoff.is_begun = True

    def _is_small_and_next(self, handoff: Handoff) -> bool:
        """Whether the next chunk is of this handoff, and soon packed. A large one's KvBegin goes
        ahead: the receiver checks the ticket meanwhile."""
        if self._sending or not self._tasks:
            return False
        owner, task = self._tasks[0]
        if owner is not handoff or not isinstance(task, Send):
            return False
        token_layer_bytes = self._config.layout.token_layer_bytes
        return task.piece.num_bytes(token_layer_bytes) <= _SMALL_BYTES

    def _send_ready(self, session: SenderSession) -> tuple[int, bool]:
        """How many frames were sent, and whether more could be. Tasks go in their order; a chunk
        without room holds up those behind it."""
        terms, num_sent = session.terms, 0
        if terms is None:
            return 0, False
        while self._sending or self._tasks:
            if self._sending is None:
                self._start(session, terms, *self._tasks.popleft())
            elif self._sending.next is None or self._sending.handoff.is_done:
                self._sending = None
            # A round ends before a chunk only: a commit that a chunk has announced is in the same
            # write.
            elif num_sent >= _ROUND_FRAMES:
                return num_sent, True
            elif not self._send_chunk(session, terms, self._sending):
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
        frame: Frame | None = None
        try:
            match task:
                case FetchPrefix(_, deliver_to):
                    frame = prefix_fetch_of(handoff.ticket, deliver_to)
                case Send():
                    self._sending = chunks_of(handoff, task, terms, session.max_chunk_bytes)
                case Finish():
                    frame = self._commit(handoff, task, terms)
        except HandoffFailed as error:
            self._abort(handoff, error)
            return
        if frame:
            session.connection.send(frame)

    def _send_chunk(self, session: SenderSession, terms: Terms, work: PendingChunks) -> bool:
        """False: there is no room now."""
        try:
            commits_next = self._commits_next(work.handoff)
            return session.send_chunk(terms, work, commits_next=commits_next)
        except EngineFault as error:
            self._abort(work.handoff, error)
            return True

    def _commits_next(self, handoff: Handoff) -> bool:
        """Whether the next task is this handoff's commit."""
        if not self._tasks:
            return False
        owner, task = self._tasks[0]
        return owner is handoff and isinstance(task, Finish)

    def _commit(self, handoff: Handoff, task: Finish, terms: Terms) -> kv_pb2.KvCommit:
        now = self._config.clock()
        frame = commit_of(handoff, task, terms, now)
        handoff.commit_deadline = now + self._config.ack_timeout_s
        handoff.prefill_end, handoff.committed_at = task.prefill_end, now
        return frame

    # Time.

    def _renew_interval_s(self) -> float:
        return min(h.ticket.lease_s for h in self._handoffs.values()) / 3

    def _renew(self, session: SenderSession) -> None:
        """Keep tickets alive, but only for an engine loop that has shown life since the last
        time."""
        if not session.terms or not self._handoffs:
            return
        now = self._config.clock()
        if now < self._renewed_at + self._renew_interval_s():
            return
        is_alive = self._heartbeat() > self._renewed_at
        self._renewed_at = now
        ticket_ids = [h.ticket.ticket_id for h in self._handoffs.values() if h.is_begun]
        if is_alive:
            for at in range(0, len(ticket_ids), _MAX_RENEWED):
                part = ticket_ids[at : at + _MAX_RENEWED]
                session.connection.send(kv_pb2.KvRenew(ticket_ids=part))

    def _check_deadlines(self, session: SenderSession) -> None:
        if not self._handoffs:
            return
        session.check_deadline()
        now, peer, config = self._config.clock(), self._peer.worker_id, self._config
        for handoff in tuple(self._handoffs.values()):
            if handoff.commit_deadline is not None and now >= handoff.commit_deadline:
                text = f"{peer} did not confirm the commit within {config.ack_timeout_s:g} s"
                self._abort(handoff, HandoffFailed(text))

    # Ends.

    def _log_end(self, handoff: Handoff) -> None:
        _log.debug(
            "%d bytes of KV for %s: committed %.3f ms, confirmed %.3f ms after the prefill",
            handoff.num_bytes,
            self._peer.worker_id,
            (handoff.committed_at - handoff.prefill_end) * 1e3,
            (self._config.clock() - handoff.prefill_end) * 1e3,
        )

    def _forget_tasks(self) -> None:
        self._tasks.clear()
        self._unpresented.clear()
        self._sending = None

    def _find(self, ticket_id: int) -> Handoff | None:
        return next((h for h in self._handoffs.values() if h.ticket.ticket_id == ticket_id), None)

    def _abort(self, handoff: Handoff, error: BatonError) -> None:
        """End a handoff from this side, and say so to the receiver if it knows of it."""
        self._done(handoff, error)
        if self._session and handoff.is_begun:
            try:
                self._session.connection.send(abort_of(handoff.ticket, error))
            except HandoffFailed as lost:
                self._end_all(lost)

    def _done(self, handoff: Handoff, error: BatonError | None) -> None:
        del self._handoffs[handoff.key]
        handoff.is_done = True
        self._idle_since = self._config.clock()
        self._on_done(SendDone(handoff.key, error, handoff.num_bytes))


class SenderSession:
    """The sender's end of one connection: what is agreed on it, what may be sent, how long the
    receiver may be silent. Over as soon as any method raises HandoffFailed: then only `close` may
    follow.

    terms, max_chunk_bytes: since the receiver's KvAccept; before it terms is None, and nothing but
    the handshake may be sent.
    """

    def __init__(
        self, config: SenderConfig, peer: WorkerIdentity, endpoints: Sequence[Endpoint]
    ) -> None:
        """Connects to the best of the endpoints. Raises TransportError."""
        self._config = config
        self._peer = peer
        self._accepted_by = config.clock() + config.connect_timeout_s
        self.connection = config.connect(endpoints, config.connect_timeout_s)
        self._handshake = SenderHandshake(config, peer, self.connection)
        self.terms: Terms | None = None
        self.max_chunk_bytes = 0
        # Since when the next chunk has had no room, without any credit coming.
        self._stalled_since: float | None = None

    def start(self) -> None:
        """To be called first. Raises what Connection.send does."""
        self._handshake.say_hello()

    def take(self, frame: Frame) -> None:
        """A frame that is about no handoff. Raises PeerMismatch if the two cannot work together,
        FrameError if it has no place here."""
        match frame:
            case kv_pb2.KvAccept() if self.terms is None:
                self._open(frame)
            case kv_pb2.KvRefuse() if self.terms is None:
                raise self._handshake.refused(frame)
            case kv_pb2.KvCredit() if self.terms is not None:
                self._stalled_since = None
            case _:
                raise FrameError(f"{self._peer.worker_id} sent a {type(frame).__name__} now")

    def send_chunk(self, terms: Terms, work: PendingChunks, *, commits_next: bool) -> bool:
        """Send the next chunk of `work`, which has one. False: there is no room now.

        commits_next: the handoff's commit will follow the last of its chunks at once. Raises
        EngineFault if the blocks could not be read: of this handoff alone.
        """
        piece = work.next
        if piece is None:
            return True
        staged = self.connection.stage(terms.codec.wire.num_bytes(piece))
        if staged is None:
            if self._stalled_since is None:
                self._stalled_since = self._config.clock()
            return False
        try:
            chunk, filled = chunk_of(work, piece, staged, terms)
        except EngineFault:
            self.connection.unstage(staged)
            raise
        work.advance()
        self.connection.send(chunk, filled, more=commits_next and work.next is None)
        work.handoff.count(chunk)
        return True

    def deadline(self) -> float | None:
        """When the receiver must have sent something; None: it need not."""
        if self.terms is None:
            return self._accepted_by
        if self._stalled_since is None:
            return None
        return self._stalled_since + self._config.ack_timeout_s

    def check_deadline(self) -> None:
        """Raises HandoffFailed if the receiver is late."""
        config, deadline = self._config, self.deadline()
        if deadline is None or config.clock() < deadline:
            return
        if self.terms is None:
            late = f"did not accept within {config.connect_timeout_s:g} s"
        else:
            late = f"took no KV for {config.ack_timeout_s:g} s"
        raise HandoffFailed(f"{self._peer.worker_id} {late}")

    def _open(self, accept: kv_pb2.KvAccept) -> None:
        config = self._config
        self.terms = self._handshake.accepted(accept)
        codec = self.terms.codec
        most = max(config.max_chunk_bytes, codec.wire.token_layer_bytes)
        self.max_chunk_bytes = min(most, accept.max_chunk_bytes)
        if not codec.is_plain:
            peer, dtype = self._peer.worker_id, config.layout.dtype
            _log.info("KV travels to %s as %s, not %s", peer, codec.wire.dtype, dtype)


_log = logging.getLogger("baton.kv")
