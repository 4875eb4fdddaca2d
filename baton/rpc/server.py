"""A gRPC server with everything each of ours has: rich errors, health, reflection, keepalive, an
orderly end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped]

from baton.errors import ConfigError
from baton.rpc import health
from baton.rpc.bind import bind_fault
from baton.rpc.channel import (
    KEEPALIVE_MS,
    MAX_CONCURRENT_STREAMS,
    Options,
    common_options,
)
from baton.rpc.interceptor import ErrorInterceptor
from baton.rpc.reflection import add_reflection

#: Adds servicers to a server and returns the full names of their services.
Register = Callable[[grpc.aio.Server], Sequence[str]]

_CLEAN_UP_S = 5.0


def server_options(keepalive_ms: int = KEEPALIVE_MS) -> Options:
    """keepalive_ms: see start_server."""
    return (
        *common_options(keepalive_ms),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        # Else calls of clients that keep to this limit are refused: a stream would count until the
        # server has let go of it, which is after the client saw its end and began another.
        ("grpc.http.overload_protection", 0),
        # What baton.rpc.channel's clients do must not look like ping abuse, nor may the burst after
        # a pause of theirs.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
    )


class RunningServer:
    """A started server. Belongs to the event loop that started it; `stop` ends it, and may be
    called again."""

    def __init__(
        self,
        server: grpc.aio.Server,
        interceptor: ErrorInterceptor,
        health_service: health.HealthService,
        host: str,
        port: int,
    ) -> None:
        self._server = server
        self._interceptor = interceptor
        self._health = health_service
        self._stopping = asyncio.Event()
        self.host = host
        self.port = port

    @property
    def address(self) -> str:
        """host:port, with the port that was bound."""
        return f"{self.host}:{self.port}"

    @property
    def service_names(self) -> tuple[str, ...]:
        """Names with a health status, the overall one, "", first."""
        return self._health.service_names

    def set_serving(self, service_name: str, is_serving: bool) -> None:
        """Set a service's health, or the whole server's ("").

        Raises KeyError for a service that is not here. Without effect once stopping.
        """
        self._health.set_serving(service_name, is_serving)

    async def drive_health(self, is_alive: Callable[[], bool], *, period_s: float = 1.0) -> None:
        """Keep the health of all services equal to `is_alive()`, until cancelled or the server
        stops.

        is_alive: quick and without side effects, e.g. whether the engine loop's last step is
        recent. It is asked every `period_s`; if it raises, all services are NOT_SERVING and the
        error goes on.
        """
        try:
            while not self._stopping.is_set():
                self._set_all(is_alive())
                with suppress(TimeoutError):
                    async with asyncio.timeout(period_s):
                        await self._stopping.wait()
        except Exception:
            self._set_all(False)
            raise

    async def stop(self, grace_s: float | None = None) -> None:
        """Health NOT_SERVING, no new calls; running ones have `grace_s` to finish and are cancelled
        then.

        None cancels them at once. Returns when the port is closed, and all handlers have cleaned up
        or had 5 s for it.
        """
        self._stopping.set()
        self._health.shut_down()
        await self._server.stop(grace_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLEAN_UP_S):
                await self._interceptor.wait_idle()

    def _set_all(self, is_serving: bool) -> None:
        for name in self.service_names:
            self.set_serving(name, is_serving)


async def start_server(
    address: str,
    register: Register,
    *,
    is_serving: bool = True,
    max_concurrent_rpcs: int | None = None,
    reuse_port: bool = False,
    credentials: grpc.ServerCredentials | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    keepalive_ms: int = KEEPALIVE_MS,
    max_fields: int | None = None,
) -> RunningServer:
    """Serve what `register` adds, with health and reflection, at "host:port"; port 0 takes a free
    one.

    is_serving: the health of all services at first.
    max_concurrent_rpcs: more are refused with RESOURCE_EXHAUSTED by grpc itself.
    reuse_port: share the port, and its connections, with other servers that ask for it; else it is
    this one's alone.
    credentials: None for plain text. interceptors: see calls before their handlers; what they raise
    becomes a status.
    keepalive_ms: a caller that is silent, asked, and silent again for this long each time is lost.
    max_fields: of a long message, those within it too; None for any number.
    Raises ConfigError if the address cannot be bound.
    """
    interceptor = ErrorInterceptor(max_fields)
    server = grpc.aio.server(
        interceptors=(interceptor, *interceptors),
        options=(*server_options(keepalive_ms), ("grpc.so_reuseport", int(reuse_port))),
        maximum_concurrent_rpcs=max_concurrent_rpcs,
    )
    names = tuple(register(server))
    health_service = health.HealthService(names, is_serving=is_serving)
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    add_reflection(server, (*names, health.SERVICE_NAME))
    port = _bind(server, address, credentials)
    await server.start()
    return RunningServer(server, interceptor, health_service, address.rpartition(":")[0], port)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    fix = "give a host and a free port as host:port; port 0 takes any free one"
    if not address.rpartition(":")[2].isdecimal():
        raise ConfigError.of("address", address, fix)
    try:
        port = (
            server.add_secure_port(address, credentials)
            if credentials
            else server.add_insecure_port(address)
        )
    except RuntimeError:
        port = 0
    if port == 0:
        host, _, wanted = address.rpartition(":")
        fault = bind_fault(host, int(wanted))
        raise fault or ConfigError.of("address", address, f"cannot be bound; {fix}")
    return port
