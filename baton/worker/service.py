"""WorkerService: what both tiers tell about themselves, and how they are asked to leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from baton.rpc.server import Register
from baton.types import WorkerInfo, WorkerLoad
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.wire import info_to_proto, load_to_proto
from baton.worker.load_board import LoadBoard, is_empty

#: Longest silence of WatchLoad, in seconds.
REPORT_S = 0.5

_Context = grpc.aio.ServicerContext[Any, Any]


def services(
    worker: WorkerServicer, add_tier: Callable[[grpc.aio.Server], None], tier: ServiceDescriptor
) -> Register:
    """Registers the tier's own service, which `add_tier` adds, and WorkerService beside it."""

    def register(server: grpc.aio.Server) -> Sequence[str]:
        add_tier(server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        return tier.full_name, worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

    return register


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Answers from the load board; `heartbeat_age_s` is the engine loop's, not the process's."""

    def __init__(
        self,
        info: WorkerInfo,
        board: LoadBoard,
        heartbeat_age_s: Callable[[], float],
        start_draining: Callable[[], None],
    ) -> None:
        self._info = info_to_proto(info)
        self._board = board
        self._heartbeat_age_s = heartbeat_age_s
        self._start_draining = start_draining

    async def GetWorkerInfo(  # noqa: N802
        self,
        request: worker_pb2.GetWorkerInfoRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> worker_pb2.GetWorkerInfoResponse:
        return self._info

    async def WatchLoad(  # noqa: N802
        self,
        request: worker_pb2.WatchLoadRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        while True:
            yield self._report(self._board.load)
            await self._board.wait_for_news(REPORT_S)

    async def Drain(  # noqa: N802
        self,
        request: worker_pb2.DrainRequest,  # noqa: ARG002
        context: _Context,
    ) -> worker_pb2.DrainResponse:
        self._start_draining()
        with suppress(TimeoutError):
            async with asyncio.timeout(context.time_remaining()):
                await self._board.wait_until(lambda load: load.is_draining and is_empty(load))
        load = self._board.load
        return worker_pb2.DrainResponse(num_remaining=load.num_running + load.num_waiting)

    def _report(self, load: WorkerLoad) -> worker_pb2.WatchLoadResponse:
        return load_to_proto(load, round(self._heartbeat_age_s() * 1000))
