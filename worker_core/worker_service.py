"""WorkerService: what both tiers report of themselves, and how they are asked to leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc.aio

from baton.errors import FieldViolation, InvalidRequest
from baton.rpc.server import Register
from baton.types import Role, Tier, WorkerInfo, WorkerLoad
from baton.v1 import (
    sequence_service_pb2,
    sequence_service_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from baton.wire import info_to_proto, load_to_proto
from engine.kv.ledger import BlockLedger, ListBlocks
from worker_core.commands import Command, Drain, SetPolicy
from worker_core.loop import Heartbeat, LoadBoard, is_empty
from worker_core.policy import Policy

#: Longest silence of WatchLoad, in seconds.
REPORT_S = 0.25

#: Maximum threads that a role may ask for: a system that refuses to start as many ends the process.
_MAX_THREADS = 1024

#: How far a term may be ahead of this host's clock.
_MAX_TERM_AHEAD_MS = 86_400_000

_SEQUENCE_SERVICE = sequence_service_pb2.DESCRIPTOR.services_by_name["SequenceService"].full_name
_WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

_Context = grpc.aio.ServicerContext[Any, Any]


def services(
    worker: WorkerServicer, sequences: sequence_service_pb2_grpc.SequenceServiceServicer
) -> Register:
    """Registers both services of a worker."""

    def register(server: grpc.aio.Server) -> Sequence[str]:
        sequence_service_pb2_grpc.add_SequenceServiceServicer_to_server(sequences, server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
        return _SEQUENCE_SERVICE, _WORKER_SERVICE

    return register


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Answers from the load board; the heartbeat is the engine loop's, not the process's."""

    def __init__(
        self,
        info: WorkerInfo,
        board: LoadBoard,
        heartbeat: Heartbeat,
        submit: Callable[[Command], None],
        policy_of: Callable[[Role], Policy],
    ) -> None:
        """submit: gives a command to the engine loop. policy_of: see TierSetup."""
        self._info = info_to_proto(info)
        self._board = board
        self._heartbeat = heartbeat
        self._submit = submit
        self._policy_of = policy_of
        self._term = 0
        """Latest term of a planner that changed the role."""

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
        self._submit(Drain())
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
        if request.num_threads > _MAX_THREADS:
            text = f"{request.num_threads} is too many; give at most {_MAX_THREADS}"
            raise InvalidRequest.of(FieldViolation("num_threads", text))
        if request.term:
            # Terms follow a clock in milliseconds (RedisLease); one that is far ahead would lock
            # all planners out.
            if request.term > 1e3 * time.time() + _MAX_TERM_AHEAD_MS:
                text = f"{request.term} is more than a day ahead of this worker's clock in ms"
                raise InvalidRequest.of(FieldViolation("term", text))
            if request.term < self._term:
                text = f"{request.term} is over: a planner of term {self._term} has asked since"
                raise InvalidRequest.of(FieldViolation("term", text))
            self._term = request.term
        role = Role(Tier(request.role), request.is_colocated, request.num_threads)
        self._submit(SetPolicy(self._policy_of(role), role.num_threads))
        started = self._info.num_threads
        wanted = (role.tier, role.is_colocated, started and (role.num_threads or started))
        async with asyncio.timeout(context.time_remaining()):
            await self._board.wait_until(
                lambda load: (load.role, load.is_colocated, load.num_threads) == wanted
            )
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

        self._submit(ListBlocks(lambda ledger: _call_in(loop, set_reply, ledger)))
        return _ledger_to_proto(await reply)

    def _report(self, load: WorkerLoad) -> worker_pb2.WatchLoadResponse:
        heartbeat = self._heartbeat
        return load_to_proto(load, round(heartbeat.age_s * 1e3), round(heartbeat.max_age_s * 1e3))


def _call_in(
    loop: asyncio.AbstractEventLoop, call: Callable[[BlockLedger], None], ledger: BlockLedger
) -> None:
    """Called in the engine loop's thread. No-op after the end of the event loop."""
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
