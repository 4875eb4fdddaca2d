"""KV over TCP, between any two hosts. Payloads follow their headers; credits are counted, not
numbered."""

from __future__ import annotations

import socket

from baton.v1 import kv_pb2
from kv_transfer.frame import Frame, FrameError
from kv_transfer.receiver import Land, Receiver
from kv_transfer.transport.base import TransportConfig
from kv_transfer.transport.connection import Staged, TransportError
from kv_transfer.transport.stream import ServerStream, StreamConnection

_NO_PAYLOAD = memoryview(b"")


def connected(address: str, timeout_s: float) -> socket.socket:
    """Connect to host:port. Returns a tuned socket in blocking mode. Raises TransportError."""
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    except (OSError, ValueError) as error:
        raise TransportError(f"cannot connect to {address}: {error}") from error
    sock.settimeout(None)
    tune(sock)
    return sock


def bind(config: TransportConfig) -> tuple[socket.socket, str]:
    """Return a listening socket, and the address for senders. Raises OSError."""
    host = config.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, config.port), family=family, backlog=64)
    shown = f"[{host}]" if ":" in host else host
    return sock, config.advertise_address or f"{shown}:{sock.getsockname()[1]}"


class TcpConnection(StreamConnection):
    """One staging buffer suffices: the payload has been copied when `send` returns."""

    carries_payloads = True

    def __init__(self, sock: socket.socket, send_timeout_s: float) -> None:
        super().__init__(sock, send_timeout_s)
        self._num_credits = 0
        self._num_in_flight = 0
        self._staging = bytearray()

    def open_staging(self, accept: kv_pb2.KvAccept) -> None:
        self._num_credits = accept.num_credits

    def stage(self, num_bytes: int) -> Staged | None:
        if self._num_in_flight >= self._num_credits:
            return None
        self._num_in_flight += 1
        if len(self._staging) < num_bytes:
            self._staging = _touched(num_bytes)
        return Staged(0, memoryview(self._staging)[:num_bytes], can_gather=True)

    def unstage(self, staged: Staged) -> None:
        del staged
        self._num_in_flight -= 1

    def take_back(self, slots: list[int]) -> None:
        if len(slots) > self._num_in_flight:
            raise FrameError("the receiver gives back more credits than are in use")
        self._num_in_flight -= len(slots)


class TcpServerStream(ServerStream):
    """Reads payloads into the ticket's blocks, or, if they need unpacking, into the only staging
    buffer: each chunk is unpacked before the next is read."""

    def __init__(self, sock: socket.socket, receiver: Receiver) -> None:
        super().__init__(sock, receiver)
        self._staging = memoryview(b"")

    def greet(self) -> None:
        super().greet()
        tune(self.sock)

    def opened(self) -> None:
        self._staging = memoryview(_touched(self.receiver.max_chunk_bytes))

    def read_frame(self, land: Land) -> tuple[Frame, memoryview]:
        preamble, frame = self.read_header(self._staging.nbytes)
        num_bytes = preamble.payload_bytes
        if not isinstance(frame, kv_pb2.KvChunk):
            if num_bytes:
                raise FrameError(f"a {type(frame).__name__} with a payload")
            return frame, _NO_PAYLOAD
        if num_bytes != frame.payload_bytes:
            raise FrameError("header and preamble give different sizes of the payload")
        landing = land(frame)
        for view in landing:
            self.read_into(view)
        if landing:
            return frame, _NO_PAYLOAD
        payload = self._staging[:num_bytes]
        self.read_into(payload)
        return frame, payload


def _touched(num_bytes: int) -> bytearray:
    """Return a buffer with touched pages, because the first write to a page is the most
    expensive."""
    return bytearray(b"\0") * num_bytes


def tune(sock: socket.socket) -> None:
    """Disable Nagle's algorithm, and detect a dead peer within half a minute on an idle
    connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
