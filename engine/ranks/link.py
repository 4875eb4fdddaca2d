"""The link between rank 0 and another rank: heartbeats both ways, and messages of services, beside
the commands of steps."""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

_log = logging.getLogger(__name__)

#: A peer sends a heartbeat at least this often. The peer's thread needs no more than the GIL: its
#: main thread may wait in an exchange.
HEARTBEAT_S = 0.2
#: A peer that sends nothing for so long has frozen, or the network to it is down.
SILENCE_S = 1.5
#: The same until its first message, because its process imports torch before; and until the first
#: step, because loading models and libraries holds the GIL for seconds on a busy machine.
FIRST_MESSAGE_S, LOADING_SILENCE_S = 120.0, 30.0
#: A peer that is seen to run is held up, and may be silent this many times as long after its first
#: message.
_HELD_UP = 10
#: Kinds of messages: one byte. Services have those from FIRST_SERVICE_KIND on.
HEARTBEAT, LOADED = 0, 1
#: To rank 0: another rank cannot be reached any more. What happened, as text.
PEER_SILENT = 2
FIRST_SERVICE_KIND = 16

#: Kind, and length of the payload.
_HEADER = struct.Struct("<BI")
#: Bytes of the longest payload: what announces more is no link.
MAX_PAYLOAD_BYTES = 64 << 20

#: Called in the link's thread, with the payload.
Handler = Callable[[bytes], None]
_Given = TypeVar("_Given")
_Got = TypeVar("_Got")


class Link:
    """One end. `send` may be called from any thread; handlers run in the link's thread, so a slow
    one delays the heartbeats."""

    def __init__(
        self,
        connection: socket.socket,
        name: str,
        on_closed: Callable[[], None],
        on_silent: Callable[[float], None],
        is_running: Callable[[], bool] = lambda: False,
    ) -> None:
        """connection: owned from here on. on_closed: called in the link's thread when the peer has
        closed its end, or died, or a handler has failed. on_silent: called there, with the seconds,
        when the peer has sent nothing for SILENCE_S or, before `end_loading`, for as long as stands
        there. Neither is called after `close`. is_running: whether the peer is seen to be neither
        frozen nor dead; asked at each heartbeat. What cannot say so any more counts as not."""
        self._connection = connection
        self._connection.settimeout(SILENCE_S)
        self._on_closed, self._on_silent = on_closed, on_silent
        self._is_running = is_running
        self._sending = threading.Lock()
        self._room = select.poll()
        self._room.register(connection, select.POLLOUT)
        self._is_closing = threading.Event()
        self._loaded_s: float | None = None
        """When the peer's silence began to count as that of one that has loaded."""
        self._handlers: dict[int, Handler] = {LOADED: self._on_loaded}
        self._thread = threading.Thread(target=self._run, name=f"link-{name}", daemon=True)

    def handle(self, kind: int, handler: Handler) -> None:
        """Call `handler` with each message of this kind. Other kinds are ignored."""
        self._handlers[kind] = handler

    def start(self) -> None:
        """Begin to send heartbeats, and to read."""
        self._thread.start()

    def end_loading(self) -> None:
        """From here on, neither side may be silent for SILENCE_S. Raises OSError as `send` does."""
        self._on_loaded(b"")
        self.send(LOADED)

    def _on_loaded(self, _: bytes) -> None:
        self._loaded_s = time.monotonic()

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Send a message of at most MAX_PAYLOAD_BYTES. Raises OSError if the peer is gone, or reads
        nothing for SILENCE_S; the link is then at its end. Raises ValueError for a longer one."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a message of {len(payload)} bytes, of at most {MAX_PAYLOAD_BYTES}")
        with self._sending:
            self._write(kind, payload)

    def _write(self, kind: int, payload: bytes) -> None:
        """See `send`."""
        try:
            left = memoryview(_HEADER.pack(kind, len(payload)) + payload)
            while left:
                left = left[self._patiently(self._connection.send, left) :]
        except OSError:
            # A part of the message may be out, so that the next one could not be read.
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            raise

    def _beat(self) -> None:
        """Send a heartbeat, unless that would have to wait: for a peer that is held up, which has
        enough to read, or for another thread's message, which is a sign of life as good. A thread
        that waited would not read, and two that did would wait for each other. Raises OSError."""
        if self._sending.acquire(blocking=False):
            try:
                if self._room.poll(0):
                    self._write(HEARTBEAT, b"")
            finally:
                self._sending.release()

    def close(self) -> None:
        """End the link, so that the peer's `on_closed` is called. Idempotent."""
        self._is_closing.set()
        with suppress(OSError):  # the peer was first
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        silent_s = 0.0
        try:
            silent_s = self._serve()
        except TimeoutError:
            silent_s = SILENCE_S
        except OSError:
            pass  # the peer has died
        except Exception:  # noqa: BLE001, logged; a thread that just ended would leave both sides waiting
            _log.exception("a message could not be handled")
        if self._is_closing.is_set():
            return
        if silent_s:
            self._on_silent(silent_s)
        else:
            self._on_closed()

    def _serve(self) -> float:
        """Serve until the peer closes the link (0.0) or is silent (for so many seconds). Raises
        OSError, ValueError, and any error of a handler."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        next_beat = heard_at = time.monotonic()
        is_first, has_beaten = True, False
        while not self._is_closing.is_set():
            if time.monotonic() >= next_beat:
                # A peer that has sent nothing yet may not read, either: beats would fill the link.
                if not (is_first and has_beaten):
                    self._beat()
                has_beaten = True
                next_beat = time.monotonic() + HEARTBEAT_S
            # What has come is read before silence is judged: this process may have been frozen.
            if poll.poll(max(0.0, next_beat - time.monotonic()) * 1e3):
                header = self._read(_HEADER.size)
                if header is None:
                    return 0.0
                kind, length = _HEADER.unpack(header)
                if length > MAX_PAYLOAD_BYTES:
                    raise ValueError(f"a message of {length} bytes, of at most {MAX_PAYLOAD_BYTES}")
                payload = self._read(length)
                if payload is None:
                    return 0.0
                if handler := self._handlers.get(kind):
                    handler(payload)
                heard_at, is_first = time.monotonic(), False
                continue
            since_s, max_silence_s = heard_at, LOADING_SILENCE_S
            if self._loaded_s is not None:
                since_s, max_silence_s = max(heard_at, self._loaded_s), SILENCE_S
            if self._is_running():
                max_silence_s *= _HELD_UP
            if is_first and self._loaded_s is None:
                max_silence_s = FIRST_MESSAGE_S
            if time.monotonic() > since_s + max_silence_s:
                return max_silence_s
        return 0.0

    def _read(self, num_bytes: int) -> bytes | None:
        """num_bytes bytes; None if the link ends before. Raises TimeoutError, OSError."""
        data = bytearray()
        while len(data) < num_bytes:
            more = self._patiently(self._connection.recv, num_bytes - len(data))
            if not more:
                return None
            data += more
        return bytes(data)

    def _patiently(self, call: Callable[[_Given], _Got], given: _Given) -> _Got:
        """The result of an operation of the socket, which a peer that is held up may delay. Raises
        OSError, of these TimeoutError after SILENCE_S."""
        num_left = _HELD_UP
        while True:
            try:
                return call(given)
            except TimeoutError:
                num_left -= 1
                if not num_left or not self._is_running():
                    raise
