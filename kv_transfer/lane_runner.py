"""Who drives a lane: a thread of its own, or the caller."""

from __future__ import annotations

import math
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from baton.errors import BatonError, HandoffFailed
from kv_transfer.lane import Lane
from kv_transfer.send_task import Task


def _closed() -> HandoffFailed:
    return HandoffFailed("the KV sender was closed")


class LaneRunner(Protocol):
    """Gives tasks to one lane."""

    @property
    def is_over(self) -> bool:
        """Takes no more tasks."""
        ...

    def submit(self, task: Task) -> bool:
        """Give a task, without waiting. False: the lane is over, and the task was not taken."""
        ...

    def poll(self) -> None:
        """The engine loop has come by: where the caller drives, do what is due."""
        ...

    def close(self) -> None:
        """End every handoff and the connection; returns when all is over. A second time changes
        nothing."""
        ...


#: Makes the runner of a new lane with that name.
RunLane = Callable[[Lane, str], LaneRunner]


class InlineLane:
    """Everything happens within the caller's calls, in one thread; for loopback and virtual
    clocks."""

    def __init__(self, lane: Lane, name: str) -> None:
        del name
        self._lane = lane
        self._inbox: deque[Task] = deque()
        self._is_running = False
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        return self._is_closed

    def submit(self, task: Task) -> bool:
        if self._is_closed:
            return False
        self._inbox.append(task)
        self._run()
        return True

    def poll(self) -> None:
        if not self._is_closed:
            self._run()

    def close(self) -> None:
        self._is_closed = True
        self._run()

    def _run(self) -> None:
        """A task submitted by what a task causes, and a close, are left to the outermost call."""
        if self._is_running:
            return
        self._is_running = True
        try:
            self._pump()
            while self._inbox and not self._is_closed:
                self._lane.handle(self._inbox.popleft())
                self._pump()
            if self._is_closed:
                while self._inbox:
                    self._lane.handle(self._inbox.popleft())
                self._lane.close(_closed())
        finally:
            self._is_running = False

    def _pump(self) -> None:
        while self._lane.pump():
            pass


class ThreadLane:
    """A thread that sleeps until there is a task, a frame, or a deadline; ends when the lane has
    been idle for long."""

    def __init__(self, lane: Lane, name: str, clock: Callable[[], float]) -> None:
        self._lane = lane
        self._clock = clock
        self._lock = threading.Lock()
        self._inbox: deque[Task] = deque()
        self._is_closed = False
        self._is_over = False
        # A byte is on its way to the thread, which has not taken its tasks since.
        self._is_woken = False
        self._wake_receive, self._wake_send = socket.socketpair()
        self._wake_receive.setblocking(False)
        self._wake_send.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._is_over

    def submit(self, task: Task) -> bool:
        with self._lock:
            if self._is_closed or self._is_over:
                return False
            self._inbox.append(task)
            self._wake()
        return True

    def poll(self) -> None:
        """Nothing: the thread sees to itself."""

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if not self._is_over:
                self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        """Under the lock, and not after the end."""
        if not self._is_woken:
            self._is_woken = True
            self._wake_send.send(b"\0")

    def _run(self) -> None:
        error: BatonError = HandoffFailed("the lane's thread has failed")
        try:
            while self._take_tasks():
                if not self._lane.pump():
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
                self._lane.handle(task)
            self._lane.close(error)

    def _take_tasks(self) -> bool:
        """Pass the inbox to the lane. False: it is time to end."""
        with self._lock:
            self._is_woken = False
            tasks = tuple(self._inbox)
            self._inbox.clear()
            if not tasks and not self._is_closed and self._lane.is_over:
                self._is_over = True
            is_over = self._is_closed or self._is_over
        for task in tasks:
            self._lane.handle(task)
        return not is_over

    def _wait(self) -> None:
        timeout_s = max(0.0, self._lane.next_deadline() - self._clock())
        poll = select.poll()
        poll.register(self._wake_receive, select.POLLIN)
        if (fileno := self._lane.fileno()) >= 0:
            poll.register(fileno, select.POLLIN)
        # Rounded up, so that a deadline is over when the thread wakes for it.
        ready = poll.poll(math.ceil(timeout_s * 1000))
        if any(fd == self._wake_receive.fileno() for fd, _ in ready):
            self._wake_receive.recv(64)
