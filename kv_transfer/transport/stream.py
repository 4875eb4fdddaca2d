"""Frames over stream sockets, without the payloads' places: what all transports but
loopback have in common.

The sender's end (StreamConnection); the receiver's: a thread that accepts (StreamListener), and one
per connection that reads and unpacks (ServerStream).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.v1 import kv_pb2
from kv_transfer.device_memory import Payload, check_device
from kv_transfer.frame import (
    HANDSHAKE_VERSION,
    PREAMBLE_BYTES,
    Frame,
    FrameBuffer,
    FrameError,
    Preamble,
    decode_header,
    decode_preamble,
    encode,
)
from kv_transfer.kv_secret import FrameSeal, Seals, receiver_seals, sender_seals
from kv_transfer.receiver import Land, Receiver, ReceiverSession
from kv_transfer.ticket import Endpoint
from kv_transfer.transport.connection import Staged, TransportError

_READ_BYTES = 64 * 1024


def set_socket_timeout(sock: socket.socket, option: int, timeout_s: float) -> None:
    """Bound each blocking receive (SO_RCVTIMEO) or send (SO_SNDTIMEO); 0 waits for ever."""
    seconds = int(timeout_s)
    timeval = struct.pack("@ll", seconds, round((timeout_s - seconds) * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, timeval)


def send_all(sock: socket.socket, *pieces: bytes | memoryview) -> None:
    """Gather the pieces into the socket. Raises OSError, also when the socket's send timeout passes
    without progress."""
    views = [memoryview(piece) for piece in pieces if len(piece)]
    while views:
        num_sent = sock.sendmsg(views)
        while views and num_sent >= len(views[0]):
            num_sent -= len(views.pop(0))
        if views:
            views[0] = views[0][num_sent:]


class StreamConnection(ABC):
    """See Connection. Owns `sock`, which is in blocking mode."""

    #: Whether payloads follow their headers on the socket.
    carries_payloads = False
    #: What the receiver may say that payloads' checksums are: it follows from where payloads are.
    payload_checksums = frozenset({kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED})

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        set_socket_timeout(sock, socket.SO_SNDTIMEO, send_timeout_s)
        self._sock = sock
        self._buffer = FrameBuffer()
        self._frames: deque[Frame] = deque()
        self._seal: FrameSeal | None = None
        # What goes out with the next frame.
        self._held: list[bytes | memoryview] = []

    @abstractmethod
    def stage(self, num_bytes: int) -> Staged | None: ...

    @abstractmethod
    def unstage(self, staged: Staged) -> None: ...

    @abstractmethod
    def open_staging(self, accept: kv_pb2.KvAccept) -> None:
        """The peer has said how much may be in flight."""

    @abstractmethod
    def take_back(self, slots: list[int]) -> None:
        """The peer gives room back. Raises FrameError if it was not taken."""

    def send(self, frame: Frame, staged: Staged | None = None, *, more: bool = False) -> None:
        payload = staged.payload if staged and self.carries_payloads else ()
        num_bytes = sum(piece.nbytes for piece in payload)
        self._held += (encode(frame, num_bytes, self._buffer.version, self._seal), *payload)
        if not more:
            self.flush()

    def flush(self) -> None:
        if not self._held:
            return
        held, self._held = self._held, []
        try:
            self.write(*held)
        except BlockingIOError:
            raise TransportError("the receiver takes no bytes any more") from None
        except OSError as error:
            raise TransportError(f"the connection to the receiver is lost: {error}") from error

    def seal(self, key: bytes) -> None:
        if self._frames:
            raise FrameError("the receiver spoke before it knew who we are")
        seals = sender_seals(key)
        self._seal, self._buffer.seal = seals.outgoing, seals.incoming

    def receive(self) -> Frame | None:
        while not self._frames:
            try:
                data = self.read(_READ_BYTES)
            except BlockingIOError:
                return None
            except OSError as error:
                raise TransportError(f"the connection to the receiver is lost: {error}") from error
            if not data:
                raise TransportError("the receiver has closed the connection")
            self._frames.extend(self._buffer.feed(data))
        frame = self._frames.popleft()
        if isinstance(frame, kv_pb2.KvAccept):
            if frame.payload_checksum not in self.payload_checksums:
                raise FrameError(f"payload checksums of kind {frame.payload_checksum} on this way")
            self.open_staging(frame)
        elif isinstance(frame, kv_pb2.KvCredit):
            self.take_back(list(frame.slots))
        return frame

    def read(self, num_bytes: int) -> bytes:
        """What has come, without waiting. Raises BlockingIOError if nothing has."""
        return self._sock.recv(num_bytes, socket.MSG_DONTWAIT)

    def write(self, *pieces: bytes | memoryview) -> None:
        """All of them. Raises OSError, also when the send timeout passes without progress."""
        send_all(self._sock, *pieces)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()


class SlottedConnection(StreamConnection):
    """A slot is the sender's but between the sending of a chunk and its credit. Payloads do not
    travel on the socket."""

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        super().__init__(sock, send_timeout_s)
        self._free: list[int] = []
        self._in_flight: set[int] = set()

    @abstractmethod
    def staged(self, slot: int, num_bytes: int) -> Staged:
        """The first bytes of a slot, writable. Not before the receiver's acceptance, nor after the
        end."""

    def open_slots(self, num_slots: int) -> None:
        """The memory is there, and all its slots are free: the first is taken first, and then
        whichever was given back last."""
        self._free = list(reversed(range(num_slots)))

    def stage(self, num_bytes: int) -> Staged | None:
        if not self._free:
            return None
        slot = self._free.pop()
        self._in_flight.add(slot)
        return self.staged(slot, num_bytes)

    def unstage(self, staged: Staged) -> None:
        self.take_back([staged.slot])

    def take_back(self, slots: list[int]) -> None:
        for slot in slots:
            if slot not in self._in_flight:
                raise FrameError(f"the receiver gives back slot {slot}, which is not in use")
            self._in_flight.remove(slot)
            self._free.append(slot)


MAX_CONNECTIONS = 256
#: Of them, from one address: a stranger leaves places for others.
MAX_CONNECTIONS_PER_ADDRESS = 64
#: A connection that may not present tickets by then is closed, whatever it has sent; a reply that
#: the peer does not read ends it.
GREETING_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 10.0
#: Pause after a failed accept, so that a full table of file descriptors does not spin the thread.
_ACCEPT_RETRY_S = 0.1

_log = logging.getLogger("baton.kv")


class ServerStream(ABC):
    """One connection's socket and staging. Owns both."""

    #: What payloads' checksums are on this way.
    payload_checksum: kv_pb2.KvPayloadChecksum.ValueType = kv_pb2.KV_PAYLOAD_CHECKSUM_UNSPECIFIED

    def __init__(self, sock: socket.socket, receiver: Receiver) -> None:
        self.sock = sock
        self.receiver = receiver
        self._version = HANDSHAKE_VERSION
        self._seals: Seals | None = None
        self._wake_lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closed = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)

    def greet(self) -> None:
        """What must be done before the first frame; in the connection's own thread: who greets
        slowly holds up nobody. Raises OSError."""
        set_socket_timeout(self.sock, socket.SO_SNDTIMEO, REPLY_TIMEOUT_S)

    @abstractmethod
    def read_frame(self, land: Land) -> tuple[Frame, Payload]:
        """Wait for a frame, and its payload, valid until the next one is read; empty if it has
        landed. land: the session's. Raises EOFError at the end of the stream, FrameError,
        OSError."""

    def accept(self, frame: kv_pb2.KvAccept) -> None:
        """Send the acceptance, with whatever the peer needs to stage payloads."""
        self.write(encode(frame))

    def reply(self, frame: Frame) -> None:
        if isinstance(frame, kv_pb2.KvAccept):
            self.accept(frame)
            self.agree(frame.version)
        else:
            outgoing = self._seals.outgoing if self._seals else None
            self.write(encode(frame, version=self._version, seal=outgoing))

    def opened(self) -> None:  # noqa: B027
        """The peer may present tickets now: what its payloads need is made ready. Not before, for a
        stranger must not cost memory."""

    def agree(self, version: int) -> None:
        """Frames are of that version from here on."""
        self._version = version

    def seal(self, key: bytes) -> None:
        """Frames carry digests from here on; see Connection.seal."""
        self._seals = receiver_seals(key)

    @property
    def has_more(self) -> bool:
        """Whether something has been read from the socket that belongs to frames to come."""
        return False

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would not wait."""
        return self.has_more or bool(self._poll.poll(0))

    def wait(self) -> bool:
        """Wait for a frame to come, or for `wake`. Whether one comes, or the stream has ended."""
        if self.has_more:
            return True
        ready = {fd for fd, _ in self._poll.poll()}
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        return self.sock.fileno() in ready

    def wake(self) -> None:
        """Have `wait` return; in any thread, without waiting."""
        with self._wake_lock:
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)

    def read_header(self, max_payload_bytes: int) -> tuple[Preamble, Frame]:
        """As read_frame, without the payload, of which so much may follow on the socket."""
        incoming = self._seals.incoming if self._seals else None
        head = self._read(PREAMBLE_BYTES)
        preamble = decode_preamble(head, max_payload_bytes, self._version, incoming)
        rest = self._read(preamble.rest_bytes)
        return preamble, decode_header(preamble, rest, incoming)

    def write(self, *pieces: bytes | memoryview) -> None:
        """All of them. Raises OSError, also when the reply timeout passes without progress."""
        send_all(self.sock, *pieces)

    def read_into(self, view: memoryview) -> None:
        """Fill `view`. Raises EOFError if the stream ends before."""
        while view:
            # The kernel waits for all of it: a thread that wakes for each packet spends its time
            # waking.
            num_bytes = self.sock.recv_into(view, 0, socket.MSG_WAITALL)
            if not num_bytes:
                raise EOFError
            view = view[num_bytes:]

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.read_into(memoryview(data))
        return data

    def close(self) -> None:
        with self._wake_lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._wake_fd)
        self.sock.close()


@dataclass(slots=True)
class _Peer:
    """A connection. address: of its other end, empty on a Unix socket. leave_at_s: when it must
    have greeted; None: it has."""

    sock: socket.socket
    address: str
    leave_at_s: float | None


class StreamListener:
    """Accepts connections on a bound socket, which it owns, from `serve` to `close`."""

    def __init__(
        self,
        sock: socket.socket,
        endpoint: Endpoint,
        stream: Callable[[socket.socket, Receiver], ServerStream],
    ) -> None:
        self.endpoint = endpoint
        self._sock = sock
        self._stream = stream
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._accepting: threading.Thread | None = None
        self._peers: dict[threading.Thread, _Peer] = {}

    def serve(self, receiver: Receiver) -> None:
        """Start to accept connections. Call once."""
        self._accepting = threading.Thread(
            target=self._accept, args=(receiver,), name=self._thread_name("accept"), daemon=True
        )
        self._accepting.start()

    def close(self) -> None:
        """End all connections; returns when their threads are gone. A second time changes
        nothing."""
        with self._lock:
            self._closing.set()
            threads = tuple(self._peers)
            socks = (self._sock, *(peer.sock for peer in self._peers.values()))
        for sock in socks:
            _hang_up(sock)
        for thread in (self._accepting, *threads):
            if thread:
                thread.join()
        self._sock.close()

    def _thread_name(self, what: str) -> str:
        return f"baton-kv-{self.endpoint.transport}-{what}"

    def _accept(self, receiver: Receiver) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while True:
            next_s = self._send_away(time.monotonic())
            if not poll.poll(None if next_s is None else math.ceil(next_s * 1000)):
                continue
            try:
                sock, address = self._sock.accept()
            except OSError as error:
                if self._closing.is_set() or self._sock.fileno() < 0:
                    return
                _log.warning("cannot accept a KV connection: %s", error)
                self._closing.wait(_ACCEPT_RETRY_S)
                continue
            if not self._start(sock, address[0] if address else "", receiver):
                sock.close()

    def _send_away(self, now_s: float) -> float | None:
        """End the connections that have not greeted in time; seconds until the next of them is
        late, None if there is none."""
        with self._lock:
            waiting = [(g.leave_at_s, g) for g in self._peers.values() if g.leave_at_s is not None]
        for leave_at_s, peer in waiting:
            if leave_at_s <= now_s:
                _log.warning("a KV connection did not greet within %g s", GREETING_TIMEOUT_S)
                _hang_up(peer.sock)
        return min((at_s - now_s for at_s, _ in waiting if at_s > now_s), default=None)

    def _start(self, sock: socket.socket, address: str, receiver: Receiver) -> bool:
        with self._lock:
            if self._closing.is_set() or not self._has_place(address):
                return False
            peer = _Peer(sock, address, time.monotonic() + GREETING_TIMEOUT_S)
            thread = threading.Thread(
                target=self._run,
                args=(peer, receiver),
                name=self._thread_name("receive"),
                daemon=True,
            )
            self._peers[thread] = peer
            thread.start()
            return True

    def _has_place(self, address: str) -> bool:
        """Under the lock."""
        num_alike = sum(peer.address == address for peer in self._peers.values())
        is_bounded = bool(address) and num_alike >= MAX_CONNECTIONS_PER_ADDRESS
        return len(self._peers) < MAX_CONNECTIONS and not is_bounded

    def _run(self, peer: _Peer, receiver: Receiver) -> None:
        sock = peer.sock
        try:
            stream = self._stream(sock, receiver)
            try:
                stream.greet()
                _converse(stream, receiver, peer)
            finally:
                stream.close()
        except OSError as error:
            _log.warning("a KV connection ended before its first frame: %s", error)
        except RuntimeError:
            check_device(receiver.config.pool, receiver.config.on_device_lost)
            raise
        finally:
            sock.close()
            with self._lock:
                self._peers.pop(threading.current_thread(), None)


def _hang_up(sock: socket.socket) -> None:
    """Wake the thread that waits in it. One that is closed already, or was never connected, has
    none."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _converse(stream: ServerStream, receiver: Receiver, peer: _Peer) -> None:
    """From the first frame to the end of the connection's tickets."""
    ending = "the connection's thread has failed"
    session = receiver.session(stream.reply, stream.seal, stream.wake, stream.payload_checksum)
    try:
        ending = _serve(stream, session, peer)
        _log.debug("KV connection of %s is over: %s", session.peer, ending)
    finally:
        session.on_close(ending)


def _serve(stream: ServerStream, session: ReceiverSession, peer: _Peer) -> str:
    """Feed the session until the connection ends; why it did."""
    try:
        while not session.handshake.is_refused:
            session.report_aborts()
            if session.handshake.terms is None or stream.wait():
                session.on_frame(*stream.read_frame(session.land))
            if session.handshake.terms and peer.leave_at_s is not None:
                peer.leave_at_s = None
                stream.opened()
    except FrameError as error:
        _log.warning("KV connection of %s ended: %s", session.peer, error.message)
        return error.message
    except EOFError:
        return "the sender has closed the connection"
    except BlockingIOError:
        return "the sender does not read"
    except OSError as error:
        _log.warning("KV connection of %s is lost: %s", session.peer, error)
        return f"the connection is lost: {error}"
    return "the sender does not fit this worker"
