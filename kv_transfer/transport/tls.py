"""KV over TCP with TLS 1.3: both ends present a certificate of one authority.

TLS runs on memory buffers, so that the plain sockets keep their timeouts, polling and shutdown.
"""

from __future__ import annotations

import functools
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from baton.errors import PermissionDenied
from baton.rpc.peer_names import check_peer_names
from baton.rpc.tls import TlsFiles, check_files, watched
from kv_transfer.receiver import Receiver
from kv_transfer.ticket import Endpoint
from kv_transfer.transport.base import Dial, TransportConfig
from kv_transfer.transport.connection import TransportError
from kv_transfer.transport.stream import StreamListener, send_all, set_socket_timeout
from kv_transfer.transport.tcp_stream import TcpConnection, TcpServerStream, bind, connected

_NAME_KINDS = frozenset({"DNS", "URI"})
_READ_BYTES = 256 * 1024
#: Bytes encrypted and sent at once, so that a payload needs no second full copy.
_WRITE_BYTES = 256 * 1024


#: Returns the current context; it changes when the files do.
Contexts = Callable[[], ssl.SSLContext]


def server_contexts(tls: TlsFiles) -> Contexts:
    """Contexts of a receiver, which requires client certificates of the authority. Raises
    ConfigError if the files cannot be used now."""
    return watched(tls, lambda: _server_context(tls)).current


def client_contexts(tls: TlsFiles) -> Contexts:
    """Contexts of a sender, which checks the receiver's certificate and its name. Raises
    ConfigError."""
    return watched(tls, lambda: _context(ssl.PROTOCOL_TLS_CLIENT, tls)).current


def _server_context(tls: TlsFiles) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER, tls)
    context.verify_mode = ssl.CERT_REQUIRED
    # Sessions are never resumed.
    context.num_tickets = 0
    return context


def _context(protocol: int, tls: TlsFiles) -> ssl.SSLContext:
    check_files(tls)
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(tls.certfile, tls.keyfile)
    context.load_verify_locations(tls.ca_certs)
    return context


def connect_tls(
    address: str,
    timeout_s: float,
    send_timeout_s: float,
    context: ssl.SSLContext,
    name: str,
    peer_names: Sequence[str] = (),
) -> TlsConnection:
    """Connect to host:port. Raises TransportError.

    name: expected in the certificate; the host if empty.
    peer_names: the certificate must also carry one of them; empty for any.
    """
    sock = connected(address, timeout_s)
    host = address.rpartition(":")[0].strip("[]")
    set_socket_timeout(sock, socket.SO_RCVTIMEO, timeout_s)
    try:
        stream = TlsStream(sock, context, name or host)
        stream.check_peer(peer_names)
    except OSError as error:
        sock.close()
        raise TransportError(f"no TLS with {address}: {error}") from error
    set_socket_timeout(sock, socket.SO_RCVTIMEO, 0.0)
    return TlsConnection(sock, stream, send_timeout_s)


def tls_dialer(config: TransportConfig, tls: TlsFiles) -> Dial:
    """See Transport."""
    contexts = client_contexts(tls)

    def dial(address: str, timeout_s: float) -> TlsConnection:
        return connect_tls(
            address,
            timeout_s,
            config.send_timeout_s,
            contexts(),
            tls.server_name,
            config.peer_names,
        )

    return dial


def listen_tls(config: TransportConfig, tls: TlsFiles) -> StreamListener:
    """See Transport. Raises ConfigError if the files cannot be used now."""
    contexts = server_contexts(tls)
    sock, address = bind(config)
    return StreamListener(
        sock,
        Endpoint("tcp", address),
        functools.partial(TlsServerStream, contexts=contexts, peer_names=config.peer_names),
    )


class TlsStream:
    """TLS over a socket. Used by one thread at a time. All methods raise OSError, including its
    subclass ssl.SSLError."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None = None
    ) -> None:
        """Performs the TLS handshake, within the socket's timeouts. server_name: expected by a
        client; None at a server."""
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming,
            self._outgoing,
            server_side=server_name is None,
            server_hostname=server_name,
        )
        try:
            self._greet()
        except ssl.SSLError:
            self._flush()  # sends the alert with the reason
            raise

    def check_peer(self, names: Sequence[str]) -> None:
        """Raise PermissionError unless the peer's certificate carries one of the names. No check if
        `names` is empty."""
        if not names:
            return
        certificate: Any = self._tls.getpeercert() or {}
        shown = [
            name for kind, name in certificate.get("subjectAltName", ()) if kind in _NAME_KINDS
        ]
        try:
            check_peer_names(names, shown)
        except PermissionDenied as error:
            raise PermissionError(error.message) from error

    def write(self, *pieces: bytes | memoryview) -> None:
        for piece in pieces:
            view = memoryview(piece).cast("B") if piece else memoryview(b"")
            while view:
                view = view[self._tls.write(view[:_WRITE_BYTES]) :]
                self._flush()

    @property
    def has_more(self) -> bool:
        """Whether received bytes are still unread."""
        return bool(self._tls.pending() or self._incoming.pending)

    def read_into(self, view: memoryview, flags: int = 0) -> int:
        """Read at least one byte, or return 0 at the end. flags: for the socket's recv."""
        while True:
            try:
                # The type stubs lack reading into a buffer.
                num_bytes: Any = self._tls.read(len(view), view)
                return int(num_bytes)
            except ssl.SSLWantReadError:
                if not self._fill(flags):
                    return 0
            except ssl.SSLZeroReturnError:
                return 0

    def _greet(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._fill(0):
                    raise ConnectionResetError("closed during the handshake") from None
            else:
                self._flush()
                return

    def _fill(self, flags: int) -> bool:
        """Receive more. Return False at the end of the stream."""
        data = self._sock.recv(_READ_BYTES, flags)
        self._incoming.write(data)
        return bool(data)

    def _flush(self) -> None:
        if data := self._outgoing.read():
            send_all(self._sock, data)


class TlsConnection(TcpConnection):
    """Drains `stream` before `receive` returns None, so that the socket can be polled."""

    def __init__(self, sock: socket.socket, stream: TlsStream, send_timeout_s: float) -> None:
        super().__init__(sock, send_timeout_s)
        self._stream = stream

    def read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        return bytes(data[: self._stream.read_into(memoryview(data), socket.MSG_DONTWAIT)])

    def write(self, *pieces: bytes | memoryview) -> None:
        self._stream.write(*pieces)


class TlsServerStream(TcpServerStream):
    """Accepts no data before `greet`."""

    def __init__(
        self,
        sock: socket.socket,
        receiver: Receiver,
        *,
        contexts: Contexts,
        peer_names: Sequence[str],
    ) -> None:
        super().__init__(sock, receiver)
        self._contexts = contexts
        self._peer_names = peer_names
        self._stream: TlsStream

    def greet(self) -> None:
        super().greet()
        self._stream = TlsStream(self.sock, self._contexts())
        self._stream.check_peer(self._peer_names)

    @property
    def has_more(self) -> bool:
        return self._stream.has_more

    def read_into(self, view: memoryview) -> None:
        while view:
            num_bytes = self._stream.read_into(view)
            if not num_bytes:
                raise EOFError
            view = view[num_bytes:]

    def write(self, *pieces: bytes | memoryview) -> None:
        self._stream.write(*pieces)
