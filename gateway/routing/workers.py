"""Which workers the gateway keeps connected to, as the registry's list changes: a task each.

unreachable ──info──> joined ──first load──> ready <──> draining
     ^                   │ refused: another model, version, tier          │
     └── backoff <── lost: stream broken, or no load report for long  ──┘

The list says where to look, and nothing more. A worker that is on it no more but whose connection
stands is kept, so a registry that was lost, or lost its memory, costs no request anything."""

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

#: In how many parts a worker's silence is measured.
_NUM_TICKS = 6

#: How far a worker's stream may be ahead of the gateway, in bytes: a few steps of many sequences. A
#: gateway that is further behind would read old steps one by one; as it is, the worker keeps them
#: and reports them as one.
RECEIVE_WINDOW_BYTES = 16384

_INFO_TIMEOUT_S = 5.0

#: Between two tries to connect, in seconds: first, at most, and the share of it that chance takes
#: off.
_FIRST_BACKOFF_S, MAX_BACKOFF_S, _JITTER = 0.2, 2.0, 0.5


class Membership(Protocol):
    """Who is written down as there: a Fleet, whose methods these are, or the Fleets of several
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
    """How a connection ended. was_used: whether the worker had become ready, so that this is no
    failure in a row."""

    state: WorkerState
    reason: str
    was_used: bool


class _Stalled(WorkerLost):
    """The worker's engine loop stands still, or it reports nothing though its connection stands."""


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
    """Have the worker at `address` ready in the fleet whenever it can be reached.

    stall_timeout_s: silence after which it is given up. Ends by cancellation, or once it is not
    wanted and no connection stands: one that stands is kept.
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
    """One connection, from the first call to its end. With the certificates of the moment: they may
    be renewed."""
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
        # First nobody is sent there any more, then those who are there get the event.
        if link is not None:
            fleet.leave(worker.address, WorkerState.UNREACHABLE, "the connection ended")
            link.lose(f"the worker at {worker.address} was lost")
    fleet.leave(worker.address, state, reason)
    return _Loss(state, reason, was_used)


async def _first_to_end(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all until one ends, and end the others. Raises what that one raised."""
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
    """Of one worker. It is counted in ticks of this process, not in seconds: a gateway that stood
    still itself has heard nobody meanwhile, and no worker is to blame."""

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._num_ticks = 0

    def broken(self) -> None:
        """The worker has reported something."""
        self._num_ticks = 0

    async def run(self) -> NoReturn:
        """Raises _Stalled when it has lasted for stall_timeout_s, or one part more."""
        while self._num_ticks <= _NUM_TICKS:
            await asyncio.sleep(self._stall_timeout_s / _NUM_TICKS)
            self._num_ticks += 1
        raise _Stalled(f"it reported no load for {self._stall_timeout_s:g} s")


async def _watch(
    fleet: Membership,
    stub: worker_pb2_grpc.WorkerServiceAsyncStub,
    worker: Worker,
    silence: _Silence,
) -> None:
    """Pass load reports on until they end. Raises WorkerLost, _Stalled where the engine loop stands
    still."""
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
    """Seconds to wait after `num_failures` in a row, at least 1; `random` in [0, 1) spreads
    gateways out."""
    full_s = min(MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 16))
    return full_s * (1.0 - _JITTER * random)


class Connect(Protocol):
    """As gateway.routing.workers.keep_connected."""

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
        """Keep the fleet as the registry lists it, until cancelled."""
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
        if address in self._listed:  # by now as one of the other tier
            self._start(address, group)
