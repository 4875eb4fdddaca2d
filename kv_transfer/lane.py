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
from collections.abc import Callable

from baton.errors import BY_REASON, BatonError, EngineFault, HandoffFailed, PeerMismatch
from baton.types import WorkerIdentity
from baton.v1 import kv_pb2
from kv_transfer.agreement import Terms
from kv_transfer.frame import Frame
from kv_transfer.link import Link
from kv_transfer.outgoing import Chunks, Handoff, abort_of, borrow_of, commit_of, cut
from kv_transfer.send_task import Begin, Borrow, Cancel, Finish, Send, SendDone, SenderConfig, Task

_log = logging.getLogger("baton.kv")
#: Tickets in one KvRenew, so that it fits a header.
_MAX_RENEWED = 1024
#: So many frames are sent before new tasks are looked for: what is urgent among them does not wait
#: for all chunks to be sent.
_ROUND_FRAMES = 16


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
        self._handoffs: dict[str, Handoff] = {}
        # Each with the handoff that it is about: a key may be used again once its handoff is done.
        self._tasks: deque[tuple[Handoff, Borrow | Send | Finish]] = deque()
        self._unpresented: deque[Handoff] = deque()
        # What was begun of the tasks.
        self._sending: Chunks | None = None
        self._link: Link | None = None
        self._renewed_at = config.clock()
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
        link = self._link
        if link is None:
            return self._config.clock()
        times = [h.commit_deadline for h in self._handoffs.values()]
        times.append(link.deadline())
        if link.terms:
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
                    self._give_up(handoff, BY_REASON.get(reason, HandoffFailed)(message))
            case _:
                if task.key in self._handoffs:
                    self._tasks.append((self._handoffs[task.key], task))

    def pump(self) -> bool:
        """Connect if need be, take in what has come, send some of what has room, and end what is
        late.

        Whether there may be more to do at once."""
        if not self._handoffs and self._link is None:
            self._forget_tasks()
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

    def _connect(self) -> Link:
        ticket = next(iter(self._handoffs.values())).ticket
        self._link = link = Link(self._config, self._peer, ticket.endpoints)
        self._renewed_at = self._config.clock()
        link.greet()
        return link

    def _take_replies(self, link: Link) -> bool:
        """Whether anything came."""
        came = False
        while (frame := link.connection.receive()) is not None:
            came = True
            self._take(link, frame)
        return came

    def _take(self, link: Link, frame: Frame) -> None:
        match frame:
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
                link.take(frame)

    def _end_all(self, error: BatonError) -> None:
        link, self._link = self._link, None
        self._forget_tasks()
        if link:
            link.connection.close()
        for handoff in tuple(self._handoffs.values()):
            self._done(handoff, error)

    # Sending.

    def _present(self, link: Link) -> None:
        while link.terms and self._unpresented:
            handoff = self._unpresented.popleft()
            if not handoff.is_done:
                link.connection.send(kv_pb2.KvBegin(ticket=handoff.data))
                handoff.is_begun = True

    def _send_ready(self, link: Link) -> bool:
        """Whether anything was sent. Tasks go in their order; a chunk without room holds up those
        behind it."""
        terms, num_sent = link.terms, 0
        if terms is None:
            return False
        while self._sending or self._tasks:
            if self._sending is None:
                self._start(link, terms, *self._tasks.popleft())
            elif self._sending.next is None or self._sending.handoff.is_done:
                self._sending = None
            # A round ends before a chunk only: a commit that a chunk has announced is in the same
            # write.
            elif num_sent >= _ROUND_FRAMES or not self._send_chunk(link, terms, self._sending):
                break
            num_sent += 1
        return num_sent > 0

    def _start(
        self, link: Link, terms: Terms, handoff: Handoff, task: Borrow | Send | Finish
    ) -> None:
        if handoff.is_done:
            return
        frame: Frame | None = None
        try:
            match task:
                case Borrow(_, lend_to):
                    frame = borrow_of(handoff.ticket, lend_to, terms)
                case Send():
                    self._sending = cut(handoff, task, terms, link.max_chunk_bytes)
                case Finish():
                    frame = self._commit(handoff, task, terms)
        except HandoffFailed as error:
            self._give_up(handoff, error)
            return
        if frame:
            link.connection.send(frame)

    def _send_chunk(self, link: Link, terms: Terms, work: Chunks) -> bool:
        """False: there is no room now."""
        try:
            commits_next = self._commits_next(work.handoff)
            return link.send_chunk(terms, work, commits_next=commits_next)
        except EngineFault as error:
            self._give_up(work.handoff, error)
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

    def _renew(self, link: Link) -> None:
        """Keep tickets alive, but only for an engine loop that has shown life since the last
        time."""
        if not link.terms or not self._handoffs:
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
                link.connection.send(kv_pb2.KvRenew(ticket_ids=part))

    def _check_deadlines(self, link: Link) -> None:
        if not self._handoffs:
            return
        link.check_deadline()
        now, peer, config = self._config.clock(), self._peer.worker_id, self._config
        for handoff in tuple(self._handoffs.values()):
            if handoff.commit_deadline is not None and now >= handoff.commit_deadline:
                text = f"{peer} did not confirm the commit within {config.ack_timeout_s:g} s"
                self._give_up(handoff, HandoffFailed(text))

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

    def _give_up(self, handoff: Handoff, error: BatonError) -> None:
        """End a handoff from this side, and tell the receiver so if it knows of it."""
        self._done(handoff, error)
        if self._link and handoff.is_begun:
            try:
                self._link.connection.send(abort_of(handoff.ticket, error))
            except HandoffFailed as lost:
                self._end_all(lost)

    def _done(self, handoff: Handoff, error: BatonError | None) -> None:
        del self._handoffs[handoff.key]
        handoff.is_done = True
        self._idle_since = self._config.clock()
        self._on_done(SendDone(handoff.key, error, handoff.num_bytes))
