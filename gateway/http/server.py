"""The HTTP port: listening socket, TLS and shutdown."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Collection

from baton.errors import ConfigError
from baton.rpc.bind import bind_fault
from baton.rpc.tls import TlsFiles, check_files, watched
from gateway.http.connection import HttpConnection, HttpHandler, HttpLimits, HttpServerState

_BACKLOG = 1024
_HANDSHAKE_TIMEOUT_S = 10.0
#: Seconds for cancelled handlers to clean up, and then for clients to read buffered output.
_CLEAN_UP_S = 5.0


class HttpServer:
    """A listening HTTP server, created by `start_http`. Belongs to one event loop; `stop` is
    idempotent."""

    def __init__(
        self, server: asyncio.Server, state: HttpServerState, host: str, port: int
    ) -> None:
        self._server = server
        self._state = state
        self.host = host
        self.port = port

    @property
    def address(self) -> str:
        """host:port, with the bound port."""
        return f"{self.host}:{self.port}"

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new requests; cancel running ones after `grace_s` seconds, or at once if None. All
        connections are closed on return."""
        state = self._state
        state.is_stopping = True
        self._server.close()
        for connection in tuple(state.connections):
            connection.stop()
        if grace_s is not None:
            await _ended(self._tasks(), grace_s)
        tasks = self._tasks()
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
    server = await asyncio.get_running_loop().create_server(
        functools.partial(HttpConnection, state),
        sock=sock,
        ssl=context,
        backlog=_BACKLOG,
        ssl_handshake_timeout=_HANDSHAKE_TIMEOUT_S if context else None,
    )
    return HttpServer(server, state, host, sock.getsockname()[1])


def _listening_socket(host: str, port: int, reuse_port: bool) -> socket.socket:
    found = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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


async def _ended(tasks: Collection[asyncio.Future[None]], timeout_s: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=timeout_s)
