"""KV over TCP with TLS 1.3: both ends show a certificate of one authority.

The sockets stay as they are, with their timeouts and whoever waits in them or shuts them down; what
passes is turned in memory.
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
#: Turned and sent at once, so that a payload needs no second copy of its own size.
_WRITE_BYTES = 256 * 1024


#: The context of the moment: it changes when files do.
Contexts = Callable[[], ssl.SSLContext]


def server_contexts(tls: TlsFiles) -> Contexts:
    """Of a receiver: senders show a certificate of the authority. Raises ConfigError if files
    cannot be used now."""
    return watched(tls, lambda: _server_context(tls)).current


def client_contexts(tls: TlsFiles) -> Contexts:
    """Of a sender: the receiver's certificate is of the authority, and made out to the name asked
    for. Raises ConfigError."""
    return watched(tls, lambda: _context(ssl.PROTOCOL_TLS_CLIENT, tls)).current


def _server_context(tls: TlsFiles) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER, tls)
    context.verify_mode = ssl.CERT_REQUIRED
    # Nobody resumes a session.
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
    """Connect to host:port. name: whom its certificate must be made out to; empty: the host. Raises
    TransportError.

    peer_names: of which it must carry one, besides; none: no other."""
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
    """See Transport. Raises ConfigError if files cannot be used now."""
    contexts = server_contexts(tls)
    sock, address = bind(config)
    return StreamListener(
        sock,
        Endpoint("tcp", address),
        functools.partial(TlsServerStream, contexts=contexts, peer_names=config.peer_names),
    )


class TlsStream:
    """Used by one thread at a time. All methods raise OSError, of which ssl.SSLError is one."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, server_name: str | None = None
    ) -> None:
        """Greets the peer, within the socket's timeouts. server_name: whom a client wants to speak
        to; None at a server."""
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
            self._flush()  # the peer learns why
            raise

    def check_peer(self, names: Sequence[str]) -> None:
        """Raises PermissionError unless the peer's certificate carries one of the names, or there
        are none."""
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
        """Whether something of what has come was not read yet."""
        return bool(self._tls.pending() or self._incoming.pending)

    def read_into(self, view: memoryview, flags: int = 0) -> int:
        """Some bytes, 0 at the end. flags: of the socket, when it has to be asked."""
        while True:
            try:
                # The stubs know of reading without a buffer only.
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
        """Whether more has come; False at the end of the stream."""
        data = self._sock.recv(_READ_BYTES, flags)
        self._incoming.write(data)
        return bool(data)

    def _flush(self) -> None:
        if data := self._outgoing.read():
            send_all(self._sock, data)


class TlsConnection(TcpConnection):
    """Nothing that has come is left in `stream` when `receive` finds no frame, so that the socket
    can be waited on."""

    def __init__(self, sock: socket.socket, stream: TlsStream, send_timeout_s: float) -> None:
        super().__init__(sock, send_timeout_s)
        self._stream = stream

    def read(self, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        return bytes(data[: self._stream.read_into(memoryview(data), socket.MSG_DONTWAIT)])

    def write(self, *pieces: bytes | memoryview) -> None:
        self._stream.write(*pieces)


class TlsServerStream(TcpServerStream):
    """Nothing passes before `greet`."""

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
