"""The HTTP port: listening socket, TLS and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Callable, Collection
from typing import Any

from baton.errors import ConfigError
from baton.rpc.bind import bind_fault
from baton.rpc.tls import TlsFiles, check_files, watched
from gateway.http.connection import HttpConnection, HttpHandler, HttpLimits, HttpServerState

_BACKLOG = 1024
#: Kernel buffer of unsent output, as requested; Linux takes twice that. By default it grows to
#: megabytes for a client that reads nothing, before output waits here and the stall is seen.
_SEND_BUFFER_BYTES = 2**17
#: Connections accepted per iteration of the event loop.
_NUM_ACCEPTED = 8
#: Pause after the process ran out of descriptors or memory, in seconds.
_EXHAUSTED_S = 0.2
_HANDSHAKE_TIMEOUT_S = 10.0
#: Seconds for cancelled handlers to clean up, and then for clients to read buffered output.
_CLEAN_UP_S = 5.0


class HttpServer:
    """A listening HTTP server, created by `start_http`. Belongs to one event loop; `stop` is
    idempotent."""

    def __init__(self, acceptor: Acceptor, state: HttpServerState, host: str, port: int) -> None:
        self._acceptor = acceptor
        self._state = state
        self.host = host
        self.port = port

    @property
    def address(self) -> str:
        """host:port, with the bound port."""
        return f"{self.host}:{self.port}"

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new requests; cancel running ones after `grace_s` seconds, or at once if None, and
        what goes on without a connection once they have ended. All connections are closed on
        return."""
        state = self._state
        state.is_stopping = True
        self._acceptor.close()
        for connection in tuple(state.connections):
            connection.stop()
        if grace_s is not None:
            await _ended(self._tasks(), grace_s)
        tasks = {*self._tasks(), *state.handler.background}
        for task in tasks:
            task.cancel()
        await _ended(tasks, _CLEAN_UP_S)
        left = tuple(state.connections)
        for connection in left:
            connection.close()
        await _ended({connection.lost for connection in left}, _CLEAN_UP_S)
        for connection in left:
            connection.abort()
        await _ended({connection.lost for connection in left}, _CLEAN_UP_S)

    def _tasks(self) -> set[asyncio.Task[None]]:
        return {c.task for c in self._state.connections if c.task is not None}


class Acceptor:
    """Accepts a few connections per iteration of the event loop, which otherwise accepts all that
    wait before it turns to running streams. Belongs to one event loop."""

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
    ) -> None:
        """sock: listening, non-blocking; owned from here on."""
        self._sock = sock
        self._make = make
        self._tls = {} if context is None else _handshake(context)
        self._loop = asyncio.get_running_loop()
        self._openings: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        """Accept no more; drop connections within their TLS handshake. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()
        for opening in self._openings:
            opening.cancel()

    def _listen(self) -> None:
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(_NUM_ACCEPTED):
            try:
                client, _address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # out of descriptors or memory
                self._loop.remove_reader(self._sock)
                self._timer = self._loop.call_later(_EXHAUSTED_S, self._listen)
                return
            client.setblocking(False)
            opening = self._loop.create_task(self._open(client))
            self._openings.add(opening)
            opening.add_done_callback(functools.partial(self._on_opened, client))

    async def _open(self, client: socket.socket) -> None:
        # Fails if the client left, or its handshake failed or took too long.
        with contextlib.suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make, client, **self._tls)
            return
        client.close()

    def _on_opened(self, client: socket.socket, opening: asyncio.Task[None]) -> None:
        self._openings.discard(opening)
        if opening.cancelled():  # perhaps before it began
            client.close()


async def start_http(
    handler: HttpHandler,
    host: str,
    port: int,
    *,
    limits: HttpLimits | None = None,
    tls: TlsFiles | None = None,
    requires_client_cert: bool = False,
    reuse_port: bool = False,
) -> HttpServer:
    """Serve at host:port; port 0 takes a free one. Raises ConfigError, naming http_port, if it
    cannot be bound."""
    context = _server_context(tls, requires_client_cert) if tls else None
    if not reuse_port:
        fault = bind_fault(host, port, port_option="http_port")
        if fault is not None:
            raise fault
    state = HttpServerState(handler, limits or HttpLimits())
    sock = _listening_socket(host, port, reuse_port)
    sock.listen(_BACKLOG)
    acceptor = Acceptor(sock, functools.partial(HttpConnection, state), context)
    return HttpServer(acceptor, state, host, sock.getsockname()[1])


def _listening_socket(host: str, port: int, reuse_port: bool) -> socket.socket:
    found = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError.of("http_port", port, f"cannot be bound ({error.strerror})") from None
    sock.setblocking(False)
    return sock


def _server_context(tls: TlsFiles, requires_client_cert: bool) -> ssl.SSLContext:
    """TLS context that rereads its files at the first connection after they change. Raises
    ConfigError, naming option, value and fix."""

    def make() -> ssl.SSLContext:
        check_files(tls)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(tls.certfile, tls.keyfile)
        if tls.ca_certs:
            context.load_verify_locations(tls.ca_certs)
        if requires_client_cert:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    files = watched(tls, make)
    first = files.current()

    def renew(stream: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:  # noqa: ARG001
        stream.context = files.current()

    first.sni_callback = renew
    return first


def _handshake(context: ssl.SSLContext) -> dict[str, Any]:
    return {"ssl": context, "ssl_handshake_timeout": _HANDSHAKE_TIMEOUT_S}


async def _ended(tasks: Collection[asyncio.Future[None]], timeout_s: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)
