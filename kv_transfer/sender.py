"""Sending half of the KV channel for the engine loop: no call waits for a peer."""

from __future__ import annotations

import functools
import math
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Protocol

from baton.errors import BatonError, HandoffFailed, PeerMismatch
from baton.kv_transports import kv_transport
from baton.types import WorkerIdentity
from engine.kv.part import KvPart
from engine.kv.tensors.part import pool_part
from kv_transfer.handshake import SenderConfig
from kv_transfer.routes import Route, clipped_to, differing_size, routes_from
from kv_transfer.send_connection import (
    Begin,
    Cancel,
    FetchPrefix,
    LaterTask,
    Send,
    SendConnection,
    SendDone,
    Task,
)
from kv_transfer.ticket import KvTicket, parse_ticket


class KvSender(Protocol):
    """See kv_transfer.sender.Sender. No call blocks."""

    def begin(self, key: Hashable, ticket: bytes, *others: LaterTask) -> int: ...

    def submit(self, task: LaterTask) -> None: ...

    def heartbeat(self) -> None: ...


def _closed() -> HandoffFailed:
    return HandoffFailed("the KV sender was closed")


class ConnectionRunner(Protocol):
    """Drives one connection, in its own thread or in the caller's."""

    @property
    def is_over(self) -> bool:
        """Whether it accepts no more tasks."""
        ...

    def submit(self, *tasks: Task) -> bool:
        """Queue tasks, without waiting. Return False, and queue none, if the connection is over."""
        ...

    def poll(self) -> None:
        """Do due work if the caller drives the connection; called by the engine loop."""
        ...

    def close(self) -> None:
        """End every handoff and the connection, and wait for the end. Idempotent."""
        ...


#: Makes the runner of a new connection. str: its name.
MakeRunner = Callable[[SendConnection, str], ConnectionRunner]


class InlineRunner:
    """Drives a connection within the caller's calls, in one thread: for loopback and virtual
    clocks."""

    def __init__(self, connection: SendConnection, name: str) -> None:
        del name
        self._connection = connection
        self._inbox: deque[Task] = deque()
        self._is_running = False
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        return self._is_closed

    def submit(self, *tasks: Task) -> bool:
        if self._is_closed:
            return False
        self._inbox.extend(tasks)
        self._run()
        return True

    def poll(self) -> None:
        if not self._is_closed:
            self._run()

    def close(self) -> None:
        self._is_closed = True
        self._run()

    def _run(self) -> None:
        """Run until nothing is due. Nested calls, caused by a task, leave the work to the outermost
        one."""
        if self._is_running:
            return
        self._is_running = True
        try:
            self._pump()
            while self._inbox and not self._is_closed:
                self._connection.handle(self._inbox.popleft())
                self._pump()
            if self._is_closed:
                while self._inbox:
                    self._connection.handle(self._inbox.popleft())
                self._connection.close(_closed())
        finally:
            self._is_running = False

    def _pump(self) -> None:
        while self._connection.pump():
            pass


class ThreadRunner:
    """Drives a connection in a thread that sleeps until a task, a frame or a deadline, and ends
    once the connection has been idle for long."""

    def __init__(self, connection: SendConnection, name: str, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._clock = clock
        self._lock = threading.Lock()
        self._inbox: deque[Task] = deque()
        self._is_closed = False
        self._is_over = False
        # Whether a wake-up byte is pending, so that another is unnecessary.
        self._is_woken = False
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._wake_send.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._is_over

    def submit(self, *tasks: Task) -> bool:
        with self._lock:
            if self._is_closed or self._is_over:
                return False
            self._inbox.extend(tasks)
            self._wake()
        return True

    def poll(self) -> None:
        """No-op: the thread drives the connection."""

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if not self._is_over:
                self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        """Wake the thread. Requires the lock, and a connection that is not over."""
        if not self._is_woken:
            self._is_woken = True
            self._wake_send.send(b"\0")

    def _run(self) -> None:
        error: BatonError = HandoffFailed("the connection's thread has failed")
        try:
            while self._take_tasks():
                if not self._connection.pump():
                    self._wait()
            error = _closed()
        finally:
            with self._lock:
                self._is_over = True
                tasks = tuple(self._inbox)
                self._inbox.clear()
                self._wake_receive.close()
                self._wake_send.close()
            for task in tasks:
                self._connection.handle(task)
            self._connection.close(error)

    def _take_tasks(self) -> bool:
        """Pass queued tasks to the connection. Return False if the thread must end."""
        with self._lock:
            self._is_woken = False
            tasks = tuple(self._inbox)
            self._inbox.clear()
            if not tasks and not self._is_closed and self._connection.is_over:
                self._is_over = True
            is_over = self._is_closed or self._is_over
        for task in tasks:
            self._connection.handle(task)
        return not is_over

    def _wait(self) -> None:
        timeout_s = max(0.0, self._connection.next_deadline() - self._clock())
        poll = select.poll()
        poll.register(self._wake_receive, select.POLLIN)
        if (fileno := self._connection.fileno()) >= 0:
            poll.register(fileno, select.POLLIN)
        # Rounded up, so that the thread does not wake before its deadline.
        ready = poll.poll(math.ceil(timeout_s * 1000))
        if any(fd == self._wake_receive.fileno() for fd, _ in ready):
            self._wake_receive.recv(64)


#: A worker, what goes to which of its ranks (None: all KV, to its only one), and the index of a
#: connection for that.
_ConnectionId = tuple[WorkerIdentity, Route | None, int]


@dataclass(frozen=True, slots=True)
class _Lane:
    """What of a handoff goes over one connection. part: see SenderConfig."""

    connection_id: _ConnectionId
    runner: ConnectionRunner
    part: KvPart | None

    def submit(self, task: LaterTask) -> None:
        if (own := self.own(task)) is not None:
            self.runner.submit(own)

    def own(self, task: LaterTask) -> LaterTask | None:
        """The task as far as it concerns this lane."""
        if self.part is None or not isinstance(task, Send):
            return task
        piece = clipped_to(self.part, task.piece)
        return replace(task, piece=piece) if piece else None


@dataclass(slots=True)
class _Handoff:
    """A handoff without SendDone. num_running: lanes that have not ended. error: of the first lane
    that failed. num_bytes: sent by ended lanes."""

    num_running: int
    lanes: list[_Lane] = field(default_factory=list)
    error: BatonError | None = None
    num_bytes: int = 0


__all__ = ["KvTicket", "SendDone", "Sender", "parse_ticket"]


class Sender:
    """Sends sequences' KV to the workers named by their tickets, over at most num_connections
    connections per worker and boot.

    A handoff stays on one connection: at its start, the one with the fewest handoffs, the first
    among equals. A further connection, with its thread, is therefore opened only when the existing
    ones are busy; idle ones close.

    A rank sends a ticket's KV as far as it holds it, to each rank of the owner that holds the same:
    over a connection each, all with the handoff's tasks, which count the model's layers. If one
    fails, the others are cancelled.

    Exactly one SendDone follows each `begin`, in a connection's thread (with is_inline, within the
    causing call). Until then the handoff's blocks may be read at any time. Calls for an ended key
    are ignored. Thread-safe, except with is_inline, where all calls must come from one thread.
    """

    def __init__(
        self,
        config: SenderConfig,
        on_done: Callable[[SendDone], None],
        *,
        num_connections: int = 1,
        is_inline: bool = False,
    ) -> None:
        self._config = config
        self._user_on_done = on_done
        self._make_runner: MakeRunner = (
            InlineRunner if is_inline else functools.partial(ThreadRunner, clock=config.clock)
        )
        self._lock = threading.RLock()
        self._num_connections = num_connections
        self._runners: dict[_ConnectionId, ConnectionRunner] = {}
        self._placed: dict[Hashable, _Handoff] = {}
        self._last_heartbeat = config.clock()
        self._is_closed = False

    @property
    def num_open(self) -> int:
        """Handoffs without SendDone."""
        with self._lock:
            return len(self._placed)

    def begin(self, key: Hashable, ticket: bytes, *others: LaterTask) -> int:
        """Open a handoff under the caller's key. Return how many leading tokens the ticket's owner
        holds already. Raises InvalidRequest for an invalid ticket, without a SendDone; ValueError
        if `key` is in use.

        others: further tasks of the handoff, queued with it.
        """
        parsed = parse_ticket(ticket)
        error = self._mismatch(parsed)
        routes = () if error else self._routes(parsed)
        handoff = _Handoff(max(1, len(routes)))
        with self._lock:
            if key in self._placed:
                raise ValueError(f"a handoff {key!r} is under way")
            self._placed[key] = handoff
        if not routes:  # another rank holds the same, and sends it
            self._on_done(SendDone(key, error, 0))
            return parsed.num_cached_tokens
        tasks = tuple(map(self._marked, others))
        for route in routes:
            begin = Begin(key, _ticket_on(route, parsed, self._config.own), ticket)
            self._place(handoff, route, begin, tasks)
        return parsed.num_cached_tokens

    def _mismatch(self, ticket: KvTicket) -> PeerMismatch | None:
        """Why KV of this rank cannot go into blocks of the ticket's owner; None if it can."""
        config, theirs = self._config, ticket.layout
        difference = config.ranks and differing_size(config.ranks, KvPart.whole(theirs))
        if config.ranks:
            theirs = config.own.layout(theirs)
        if difference := difference or config.pool.layout.difference(theirs):
            return PeerMismatch.of(ticket.owner.worker_id, *difference)
        return None

    def _routes(self, ticket: KvTicket) -> tuple[Route | None, ...]:
        """What goes to which rank of the owner; None for all that there is to its only one."""
        config = self._config
        whole = KvPart.whole(ticket.layout)
        if not ticket.ranks and config.own == whole and config.ranks.count(whole) < 2:
            return (None,)
        sources = config.ranks or (config.own,)
        return routes_from(config.rank, sources, tuple(rank.part for rank in ticket.receivers))

    def _place(
        self, handoff: _Handoff, route: Route | None, begin: Begin, tasks: tuple[LaterTask, ...]
    ) -> None:
        """Begin a handoff on a connection of `route`."""
        peer, part = begin.ticket.owner, route.part if route else None
        while True:
            with self._lock:
                if self._is_closed:
                    break
                taken = [lane.connection_id for h in self._placed.values() for lane in h.lanes]
                numbers = range(self._num_connections)
                connection_id = min(((peer, route, number) for number in numbers), key=taken.count)
                runner = self._runners.get(connection_id) or self._new_runner(connection_id)
                lane = _Lane(connection_id, runner, part)
                handoff.lanes.append(lane)
            own = [task for task in map(lane.own, tasks) if task]
            if runner.submit(begin, *own):
                if error := handoff.error:
                    runner.submit(Cancel(begin.key, error.reason, error.message))
                return
            # The connection has ended meanwhile.
            with self._lock:
                handoff.lanes.remove(lane)
                if self._runners.get(connection_id) is runner:
                    del self._runners[connection_id]
        self._on_done(SendDone(begin.key, HandoffFailed("the KV sender is closed"), 0))

    def submit(self, task: LaterTask) -> None:
        """Queue a further task of an open handoff."""
        with self._lock:
            handoff = self._placed.get(task.key)
            lanes = tuple(handoff.lanes) if handoff else ()
        if not lanes:
            return
        if isinstance(task, FetchPrefix):
            # Once for a ticket: the owner's first rank is asked by the first of this worker.
            lanes = lanes[:1] if self._config.rank == 0 else ()
        task = self._marked(task)
        for lane in lanes:
            lane.submit(task)

    def _marked(self, task: LaterTask) -> LaterTask:
        """Add the current mark to a task about KV without one, since its KV may still be on its way
        into the blocks."""
        if isinstance(task, Send) and task.mark is None:
            return replace(task, mark=self._config.pool.mark())
        return task

    def heartbeat(self) -> None:
        """Keep tickets from expiring. Must be called regularly while the engine loop is alive."""
        self._last_heartbeat = self._config.clock()
        with self._lock:
            runners = tuple(self._runners.values())
        for runner in runners:
            runner.poll()

    def close(self) -> None:
        """End all handoffs, connections and threads, and wait for their end."""
        with self._lock:
            self._is_closed = True
            runners = tuple(self._runners.values())
            self._runners.clear()
        for runner in runners:
            runner.close()

    def _new_runner(self, connection_id: _ConnectionId) -> ConnectionRunner:
        """Make a runner; requires the lock. Drops ended connections, so that they do not pile up
        over restarts of a fleet."""
        self._runners = {at: runner for at, runner in self._runners.items() if not runner.is_over}
        peer, route, number = connection_id
        config, name = self._config, f"baton-kv-send-{peer.worker_id}-{number}"
        if route:
            pool = pool_part(config.pool, route.part.within(config.own))
            config = replace(config, pool=pool, part=route.part)
            name = f"{name}-rank-{route.target}"
        connection = SendConnection(peer, config, lambda: self._last_heartbeat, self._on_done)
        self._runners[connection_id] = self._make_runner(connection, name)
        return self._runners[connection_id]

    def _on_done(self, done: SendDone) -> None:
        """A connection has ended its part of a handoff."""
        with self._lock:
            handoff = self._placed[done.key]
            others: tuple[_Lane, ...] = ()
            if done.error and handoff.error is None:
                handoff.error = done.error
                others = tuple(handoff.lanes) if handoff.num_running > 1 else ()
        # Before this end counts, because the key may be used again once all have ended.
        for lane in others:
            if done.error:
                lane.runner.submit(Cancel(done.key, done.error.reason, done.error.message))
        with self._lock:
            handoff.num_bytes += done.num_bytes
            handoff.num_running -= 1
            if handoff.num_running:
                return
            del self._placed[done.key]
        self._user_on_done(SendDone(done.key, handoff.error, handoff.num_bytes))


def _ticket_on(route: Route | None, ticket: KvTicket, own: KvPart) -> KvTicket:
    """The ticket as a connection of `route` sees it: of a part, at one rank. own: the sender's
    part."""
    if route is None:
        return ticket
    receiver = ticket.receivers[route.target]
    # A device copies whole blocks of a pool.
    is_divided = route.part != own or route.part != receiver.part
    endpoints = tuple(
        endpoint
        for endpoint in receiver.endpoints
        if not (is_divided and kv_transport(endpoint.transport).needs_device)
    )
    layout = route.part.layout(ticket.layout)
    return replace(ticket, layout=layout, endpoints=endpoints, ranks=())
