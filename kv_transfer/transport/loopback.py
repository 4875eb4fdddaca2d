"""The transport within a process: no thread and no socket; frames are taken within the sender's
call."""

from __future__ import annotations

import threading
from collections import deque

from baton.errors import ConfigError
from kv_transfer.frame import Frame, FrameError
from kv_transfer.receiver import Receiver
from kv_transfer.ticket import Endpoint
from kv_transfer.transport.base import Dial, Hub, Listener, Transport, TransportConfig
from kv_transfer.transport.connection import Connection, Staged, TransportError

_NO_PAYLOAD = memoryview(b"")


class LoopbackListener:
    """A receiver that can be reached by name until `close`, which ends its connections as a
    process's death would."""

    def __init__(self, hub: LoopbackHub, name: str) -> None:
        self.endpoint = Endpoint("loopback", name)
        self._hub = hub
        self._receiver: Receiver | None = None
        self._connections: list[LoopbackConnection] = []

    def serve(self, receiver: Receiver) -> None:
        """Connections can be made from here on."""
        self._receiver = receiver

    def connect(self) -> LoopbackConnection:
        if self._receiver is None:
            raise TransportError(f"loopback {self.endpoint.address!r} takes no connections yet")
        self._connections = [c for c in self._connections if not c.is_closed]
        connection = LoopbackConnection(self._receiver)
        self._connections.append(connection)
        return connection

    def close(self) -> None:
        self._hub.forget(self.endpoint.address)
        for connection in self._connections:
            connection.lose("the receiver is gone")
        self._connections.clear()


class LoopbackHub:
    """The names of one process, or of one simulation. Give the same hub to receivers and
    senders."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, LoopbackListener] = {}

    def listen(self, name: str) -> LoopbackListener:
        """Raises ValueError if the name is taken."""
        with self._lock:
            if name in self._listeners:
                raise ValueError(f"loopback name {name!r} is taken")
            return self._listeners.setdefault(name, LoopbackListener(self, name))

    def has(self, name: str) -> bool:
        with self._lock:
            return name in self._listeners

    def connect(self, name: str) -> LoopbackConnection:
        """Raises TransportError if nobody listens."""
        with self._lock:
            listener = self._listeners.get(name)
        if listener is None:
            raise TransportError(f"nobody listens at loopback {name!r}")
        return listener.connect()

    def forget(self, name: str) -> None:
        with self._lock:
            self._listeners.pop(name, None)


class LoopbackConnection:
    """See Connection. There is always room: the receiver has read a payload when `send` returns."""

    def __init__(self, receiver: Receiver) -> None:
        self._replies: deque[Frame] = deque()
        self._session = receiver.session(self._replies.append)
        self._buffer = bytearray()
        self._lost = ""

    @property
    def is_closed(self) -> bool:
        return bool(self._lost)

    def stage(self, num_bytes: int) -> Staged:
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        return Staged(0, memoryview(self._buffer)[:num_bytes])

    def unstage(self, staged: Staged) -> None:
        """Nothing to do: the one buffer is free whenever this end calls."""

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        del more
        if self._lost:
            raise TransportError(self._lost)
        try:
            self._session.on_frame(frame, staged.buffer if staged else _NO_PAYLOAD)
        except FrameError as error:
            self.lose(error.message)
            raise

    def flush(self) -> None:
        """Nothing to do: nothing waits."""

    def seal(self, key: bytes) -> None:
        """Nothing to do: nobody is on the way."""

    def receive(self) -> Frame | None:
        self._session.report_aborts()
        if self._replies:
            return self._replies.popleft()
        if self._lost:
            raise TransportError(self._lost)
        return None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self.lose("the sender is gone")

    def lose(self, message: str) -> None:
        """End the connection, from either side; a second time changes nothing."""
        if not self._lost:
            self._lost = message
            self._session.on_close(message)


def _listen(config: TransportConfig) -> Listener:
    return _hub_of(config).listen(config.worker_id)


def _dialer(config: TransportConfig) -> Dial:
    hub = _hub_of(config)

    def dial(name: str, timeout_s: float) -> Connection:
        del timeout_s
        return hub.connect(name)

    return dial


def _hub_of(config: TransportConfig) -> Hub:
    if config.hub is None:
        raise ConfigError.of("kv_transport", "loopback", "needs a hub; only tests have one")
    return config.hub


TRANSPORT = Transport(_listen, _dialer)
