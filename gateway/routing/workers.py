"""Connections to the registry's workers, one task each.

unreachable ──info──> joined ──first load──> ready <──> draining
     ^                   │ refused: another model, version, tier          │
     └── backoff <── lost: stream broken, or no load report for long  ──┘

The registry only lists addresses. A connected worker that is no longer listed is kept, so the loss
of the registry, or of its data, fails no request.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc.aio

from baton.errors import BatonError, PeerMismatch, WorkerLost
from baton.registry import Registry, WorkerAdded, WorkerRemoved
from baton.rpc.channel import aio_channel
from baton.rpc.tls import TlsFiles
from baton.types import Tier, WorkerInfo, WorkerLoad
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.wire import info_from_proto, load_from_proto
from gateway.links.grpc_link import GrpcWorkerLink, worker_error
from gateway.links.worker_link import WorkerLink
from gateway.routing.fleet import Worker, WorkerState

_log = logging.getLogger(__name__)

#: Ticks per stall timeout.
_NUM_TICKS = 6

#: Lateness from which a tick counts as _LATE_TICK, as a fraction of its length.
_LATE, _LATE_TICK = 0.5, 0.25

#: Receive window of a worker's stream, in bytes: a few steps of many sequences. It is small so that
#: a slow gateway leaves old steps at the worker, which merges them, instead of reading them one by
#: one.
RECEIVE_WINDOW_BYTES = 16384

_INFO_TIMEOUT_S = 5.0

#: Seconds between two connection attempts: first and maximum; and the fraction subtracted at
#: random.
_FIRST_BACKOFF_S, MAX_BACKOFF_S, _JITTER = 0.2, 2.0, 0.5


class Membership(Protocol):
    """The fleet operations that connections need: implemented by Fleet, and by Fleets for several
    models."""

    @property
    def workers(self) -> Mapping[str, Worker]: ...

    def add(self, address: str, tier: Tier) -> Worker: ...

    def remove(self, address: str) -> None: ...

    def join(self, address: str, info: WorkerInfo, link: WorkerLink) -> None: ...

    def report(self, address: str, load: WorkerLoad) -> None: ...

    def leave(self, address: str, state: WorkerState, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Loss:
    """The end of a connection. was_used: whether the worker was accepted, which restarts the
    backoff."""

    state: WorkerState
    reason: str
    was_used: bool


class _Stalled(WorkerLost):
    """The worker's engine loop is stuck, or its reports stop while the connection is open."""


def _always() -> bool:
    return True


async def keep_connected(
    fleet: Membership,
    address: str,
    *,
    is_wanted: Callable[[], bool] = _always,
    tls: TlsFiles | None = None,
    stall_timeout_s: float = 1.5,
    draw: Callable[[], float] = random.random,
) -> None:
    """Keep the worker at `address` connected whenever it is reachable.

    stall_timeout_s: seconds without a report after which the connection is closed.
    Returns once the worker is not wanted and not connected; an open connection is kept.
    """
    num_failures = 0
    last_reason = ""
    while is_wanted():
        loss = await _connect_once(fleet, fleet.workers[address], tls, stall_timeout_s)
        num_failures = 1 if loss.was_used else num_failures + 1
        if loss.reason != last_reason:
            last_reason = loss.reason
            _log.warning("worker at %s is %s: %s", address, loss.state.value, loss.reason)
        if is_wanted():
            await asyncio.sleep(backoff_s(num_failures, draw()))


async def _connect_once(
    fleet: Membership, worker: Worker, tls: TlsFiles | None, stall_timeout_s: float
) -> _Loss:
    """Run one connection until it ends. Certificates are read anew, since they may have been
    renewed."""
    link: GrpcWorkerLink | None = None
    was_used = False
    try:
        async with aio_channel(
            worker.address, tls, receive_window_bytes=RECEIVE_WINDOW_BYTES
        ) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            info = await _get_info(stub, worker)
            link = GrpcWorkerLink(channel, worker.address)
            fleet.join(worker.address, info, link)
            _log.info("worker %s at %s was reached", info.identity.worker_id, worker.address)
            was_used = True
            silence = _Silence(stall_timeout_s)
            await _first_to_end([_watch(fleet, stub, worker, silence), silence.run(), link.run()])
            raise WorkerLost(f"worker at {worker.address} ended the connection")
    except PeerMismatch as error:
        state, reason = WorkerState.REFUSED, error.message
    except _Stalled as error:
        state, reason = WorkerState.STALLED, error.message
    except BatonError as error:
        state, reason = WorkerState.UNREACHABLE, error.message
    except ValueError as error:
        state, reason = WorkerState.REFUSED, f"speaks something that is not understood: {error}"
    finally:
        # Stop new placements first, then report the loss to the sequences placed there.
        if link is not None:
            fleet.leave(worker.address, WorkerState.UNREACHABLE, "the connection ended")
            link.lose(f"the worker at {worker.address} was lost")
    fleet.leave(worker.address, state, reason)
    return _Loss(state, reason, was_used)


async def _first_to_end(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all until one ends, then cancel the others. Raises the error of the first one."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _get_info(stub: worker_pb2_grpc.WorkerServiceAsyncStub, worker: Worker) -> WorkerInfo:
    request = worker_pb2.GetWorkerInfoRequest()
    try:
        response = await stub.GetWorkerInfo(request, timeout=_INFO_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise worker_error(error, worker.address) from error
    return info_from_proto(response)


class _Silence:
    """Time since the last report of one worker, in ticks of this process that were on time.

    A gateway that was itself suspended, or that clients keep busy, reads reports late: a tick that
    its event loop runs late says nothing about the worker, and counts as a quarter.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._num_ticks = 0.0

    def broken(self) -> None:
        """Reset after a report."""
        self._num_ticks = 0.0

    async def run(self) -> NoReturn:
        """Raise _Stalled after stall_timeout_s without a report, with a tolerance of one tick."""
        tick_s, loop = self._stall_timeout_s / _NUM_TICKS, asyncio.get_running_loop()
        while self._num_ticks <= _NUM_TICKS:
            due_s = loop.time() + tick_s
            await asyncio.sleep(tick_s)
            late_s = loop.time() - due_s
            self._num_ticks += 1.0 if late_s < _LATE * tick_s else _LATE_TICK
        raise _Stalled(f"it reported no load for {self._stall_timeout_s:g} s")


async def _watch(
    fleet: Membership,
    stub: worker_pb2_grpc.WorkerServiceAsyncStub,
    worker: Worker,
    silence: _Silence,
) -> None:
    """Forward load reports until the stream ends. Raises WorkerLost, or _Stalled if the worker's
    engine loop is stuck."""
    call = stub.WatchLoad(worker_pb2.WatchLoadRequest())
    try:
        while isinstance(response := await call.read(), worker_pb2.WatchLoadResponse):
            silence.broken()
            if response.heartbeat_age_ms > response.max_heartbeat_age_ms:
                raise _Stalled(f"its engine loop stands still since {response.heartbeat_age_ms} ms")
            fleet.report(worker.address, load_from_proto(response))
    except grpc.aio.AioRpcError as error:
        raise worker_error(error, worker.address) from error
    finally:
        call.cancel()


def backoff_s(num_failures: int, random: float) -> float:
    """Seconds to wait after `num_failures` consecutive failures, at least 1. random: in [0, 1),
    spreads gateways out."""
    full_s = min(MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 16))
    return full_s * (1.0 - _JITTER * random)


class Connect(Protocol):
    """The signature of `keep_connected`."""

    def __call__(
        self, fleet: Membership, address: str, /, *, is_wanted: Callable[[], bool]
    ) -> Awaitable[None]: ...


class Roster:
    """Owns one task per address, from its listing until it is neither listed nor connected."""

    def __init__(self, fleet: Membership, *, connect: Connect = keep_connected) -> None:
        self._fleet = fleet
        self._connect = connect
        self._listed: dict[str, Tier] = {}

    async def follow(self, registry: Registry) -> None:
        """Follow the registry's changes until cancelled."""
        async with asyncio.TaskGroup() as group, aclosing(registry.changes()) as changes:
            async for change in changes:
                self._take(change, group)

    def _take(self, change: WorkerAdded | WorkerRemoved, group: asyncio.TaskGroup) -> None:
        match change:
            case WorkerAdded(address, tier):
                self._listed[address] = tier
                if address not in self._fleet.workers:
                    self._start(address, group)
            case WorkerRemoved(address):
                self._listed.pop(address, None)

    def _start(self, address: str, group: asyncio.TaskGroup) -> None:
        self._fleet.add(address, self._listed[address])
        group.create_task(self._keep(address, self._listed[address], group))

    async def _keep(self, address: str, tier: Tier, group: asyncio.TaskGroup) -> None:
        await self._connect(
            self._fleet, address, is_wanted=lambda: self._listed.get(address) is tier
        )
        self._fleet.remove(address)
        if address in self._listed:  # listed again, in the other tier
            self._start(address, group)
