"""A gRPC server with the features common to ours: rich errors, health, reflection, keepalive,
orderly shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped]

from baton.errors import ConfigError
from baton.rpc import health
from baton.rpc.acceptor import make_server
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
        # Otherwise clients within this limit are refused: a stream counts until the server has
        # released it, which is after the client has seen its end and may have started another.
        ("grpc.http.overload_protection", 0),
        # The keepalive of baton.rpc.channel's clients must not count as ping abuse, nor the burst
        # after a pause of theirs.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
    )


class RunningServer:
    """A started server. Belongs to the event loop that started it. `stop` ends it, and is
    idempotent."""

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
        """host:port with the bound port."""
        return f"{self.host}:{self.port}"

    @property
    def service_names(self) -> tuple[str, ...]:
        """Names with a health status; the overall one, "", is first."""
        return self._health.service_names

    def set_serving(self, service_name: str, is_serving: bool) -> None:
        """Set the health of a service, or of the whole server ("").

        Raises KeyError for an unknown service. No-op once stopping.
        """
        self._health.set_serving(service_name, is_serving)

    async def drive_health(self, is_alive: Callable[[], bool], *, period_s: float = 1.0) -> None:
        """Keep the health of all services equal to `is_alive()`, until cancelled or the server
        stops.

        is_alive: quick and without side effects, e.g. whether the engine loop's last step is
        recent. Called every `period_s` seconds; if it raises, all services become NOT_SERVING and
        the error propagates.
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
        """Set health to NOT_SERVING and refuse new calls; running ones are cancelled after
        `grace_s` seconds.

        None cancels them at once. Returns when the port is closed and all handlers have cleaned up,
        or 5 s after the cancellation.
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
    """Serve the services of `register`, with health and reflection, at "host:port"; port 0 takes a
    free one.

    is_serving: initial health of all services.
    max_concurrent_rpcs: further calls are refused with RESOURCE_EXHAUSTED by grpc itself.
    reuse_port: share the port and its connections with other servers that do so; otherwise the port
    is exclusive.
    credentials: None for plain text.
    interceptors: called before the handlers; their errors become statuses.
    keepalive_ms: silence before a caller is pinged, and again until it counts as lost.
    max_fields: maximum fields of a long message, including nested ones; None for no limit.
    Raises ConfigError if the address cannot be bound.
    """
    interceptor = ErrorInterceptor(max_fields)
    options = (*server_options(keepalive_ms), ("grpc.so_reuseport", int(reuse_port)))
    server = make_server((interceptor, *interceptors), options, max_concurrent_rpcs)
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
