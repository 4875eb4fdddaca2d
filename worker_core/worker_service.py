"""WorkerService: what both tiers report of themselves, and how they are asked to leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from baton.errors import FieldViolation, InvalidRequest
from baton.rpc.server import Register
from baton.types import Tier, WorkerInfo, WorkerLoad
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.wire import info_to_proto, load_to_proto
from engine.kv.ledger import BlockLedger, ListBlocks
from worker_core.loop import Heartbeat, LoadBoard, is_empty

#: Longest silence of WatchLoad, in seconds.
REPORT_S = 0.25

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
    """Answers from the load board; the heartbeat is the engine loop's, not the process's."""

    def __init__(
        self,
        info: WorkerInfo,
        board: LoadBoard,
        heartbeat: Heartbeat,
        start_draining: Callable[[], None],
        list_blocks: Callable[[ListBlocks], None],
        set_role: Callable[[Tier], None],
    ) -> None:
        """list_blocks, set_role: give the command to the engine loop."""
        self._info = info_to_proto(info)
        self._board = board
        self._heartbeat = heartbeat
        self._start_draining = start_draining
        self._list_blocks = list_blocks
        self._set_role = set_role

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

    async def SetRole(  # noqa: N802
        self,
        request: worker_pb2.SetRoleRequest,
        context: _Context,
    ) -> worker_pb2.SetRoleResponse:
        if request.role not in tuple(map(int, Tier)):
            raise InvalidRequest.of(
                FieldViolation(
                    "role", f"{request.role} is no tier; give TIER_PREFILL or TIER_DECODE"
                )
            )
        role = Tier(request.role)
        self._set_role(role)
        async with asyncio.timeout(context.time_remaining()):
            await self._board.wait_until(lambda load: load.role is role)
        return worker_pb2.SetRoleResponse()

    async def ListBlocks(  # noqa: N802
        self,
        request: worker_pb2.ListBlocksRequest,  # noqa: ARG002
        context: _Context,  # noqa: ARG002
    ) -> worker_pb2.ListBlocksResponse:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[BlockLedger] = loop.create_future()

        def set_reply(ledger: BlockLedger) -> None:
            # The caller may have gone meanwhile.
            if not reply.done():
                reply.set_result(ledger)

        self._list_blocks(ListBlocks(lambda ledger: _call_in(loop, set_reply, ledger)))
        return _ledger_to_proto(await reply)

    def _report(self, load: WorkerLoad) -> worker_pb2.WatchLoadResponse:
        heartbeat = self._heartbeat
        return load_to_proto(load, round(heartbeat.age_s * 1e3), round(heartbeat.max_age_s * 1e3))


def _call_in(
    loop: asyncio.AbstractEventLoop, call: Callable[[BlockLedger], None], ledger: BlockLedger
) -> None:
    """From the engine loop's thread. An event loop that has ended has nobody to call."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, ledger)


def _ledger_to_proto(ledger: BlockLedger) -> worker_pb2.ListBlocksResponse:
    return worker_pb2.ListBlocksResponse(
        free_block_ids=ledger.free,
        cached_block_ids=ledger.cached,
        owners=[
            worker_pb2.BlockOwner(
                request_id=owner.request_id,
                choice=owner.choice,
                stage=owner.stage,
                ticket_id=owner.ticket_id,
                block_ids=owner.block_ids,
            )
            for owner in ledger.owners
        ],
        orphan_block_ids=ledger.orphans,
    )
