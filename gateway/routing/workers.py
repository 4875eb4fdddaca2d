"""Keeps the gateway connected to its workers: one task per address.

unreachable ──info──> joined ──first load──> ready <──> draining
     ^                   │ refused: another model, version, tier          │
     └── backoff <── lost: stream broken, or no load report for long  ──┘
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc.aio

from baton.errors import BatonError, PeerMismatch, WorkerLost
from baton.rpc.channel import aio_channel
from baton.rpc.tls import TlsFiles
from baton.types import WorkerInfo
from baton.v1 import worker_pb2, worker_pb2_grpc
from baton.wire import info_from_proto, load_from_proto
from gateway.links.grpc_link import GrpcWorkerLink, worker_error
from gateway.routing.fleet import Fleet, Worker, WorkerState

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
    fleet: Fleet,
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
    fleet: Fleet, worker: Worker, tls: TlsFiles | None, stall_timeout_s: float
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
        # First nobody is sent there any more, then those who are there hear of it.
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
    fleet: Fleet, stub: worker_pb2_grpc.WorkerServiceAsyncStub, worker: Worker, silence: _Silence
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
