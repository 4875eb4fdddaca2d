"""Standard health service (Check, List, Watch). Its status is set by the process explicitly; a
running server alone is not serving.

The aio servicer of grpcio-health-checking is not used: it has no List, leaves watches open at
shutdown, so that a stopping server waits out its grace period, and can be set from coroutines only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

SERVICE_NAME = "grpc.health.v1.Health"
OVERALL = ""
"""Service name of the whole server's health."""


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Belongs to one event loop. After `shut_down` everything is NOT_SERVING permanently, and
    watches end."""

    def __init__(self, service_names: Iterable[str], *, is_serving: bool) -> None:
        self._is_serving = dict.fromkeys((OVERALL, *service_names), is_serving)
        self._is_shut_down = False
        # Set at each change, and replaced by a new event.
        self._changed = asyncio.Event()

    @property
    def service_names(self) -> tuple[str, ...]:
        """All service names, the overall one first."""
        return tuple(self._is_serving)

    def set_serving(self, service_name: str, is_serving: bool) -> None:
        """Set a status and notify watchers of a change. Raises KeyError for an unknown service."""
        if self._is_serving[service_name] == is_serving or self._is_shut_down:
            return
        self._is_serving[service_name] = is_serving
        self._notify()

    def shut_down(self) -> None:
        """Set everything to NOT_SERVING, notify watchers and end their streams."""
        self._is_serving = dict.fromkeys(self._is_serving, False)
        self._is_shut_down = True
        self._notify()

    async def Check(  # noqa: N802, the name in the .proto
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> health_pb2.HealthCheckResponse:
        """The current status; NOT_FOUND for an unknown service."""
        if request.service not in self._is_serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return self._response(request.service)

    async def List(  # noqa: N802, the name in the .proto
        self,
        request: health_pb2.HealthListRequest,  # noqa: ARG002, the signature of the .proto
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> health_pb2.HealthListResponse:
        """The current status of every service."""
        return health_pb2.HealthListResponse(
            statuses={name: self._response(name) for name in self._is_serving}
        )

    async def Watch(  # noqa: N802, the name in the .proto
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],  # noqa: ARG002
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The current status, then each change; SERVICE_UNKNOWN for an unknown service."""
        last: health_pb2.HealthCheckResponse | None = None
        while True:
            changed = self._changed
            response = self._response(request.service)
            if response != last:
                last = response
                yield response
            elif self._is_shut_down:
                return
            else:
                await changed.wait()

    def _response(self, service_name: str) -> health_pb2.HealthCheckResponse:
        is_serving = self._is_serving.get(service_name)
        status = (
            health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if is_serving is None
            else health_pb2.HealthCheckResponse.SERVING
            if is_serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        return health_pb2.HealthCheckResponse(status=status)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
