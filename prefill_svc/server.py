"""The prefill worker's process: everything it is made of, put together once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from baton.config import PrefillOptions
from baton.engine.heartbeat import Heartbeat
from baton.engine.loop import EngineLoop
from baton.phase_clock import PhaseClock
from baton.rpc.bind import check_bindable
from baton.service import ReadyReport
from baton.types import NumericsRule, WorkerLoad
from baton.v1 import prefill_pb2, prefill_pb2_grpc
from baton.worker.build import build_engine, build_matchers, build_pool
from baton.worker.host import WorkerHost, describe, new_identity
from baton.worker.load_board import LoadBoard
from baton.worker.service import WorkerServicer, services
from baton.worker.telemetry import open_worker_telemetry
from kv_transfer.device_memory import device_memory_of
from kv_transfer.kv_secret import read_kv_secret
from kv_transfer.running_receiver import open_receiver, transports_of
from kv_transfer.sender import Sender
from kv_transfer.transport.connector import make_connector
from prefill_svc.borrowing import BorrowCosts
from prefill_svc.commands import (
    Drain,
    PrefillCommand,
    PrefillEvent,
)
from prefill_svc.core import (
    PrefillCore,
    PrefillDevices,
    PrefillLimits,
)
from prefill_svc.recorder import PrefillRecorder
from prefill_svc.service import PrefillServicer

#: A lender that shows no sign of life for this long, in seconds, is not waited for: the prompt is computed.
LOAN_LEASE_S = 2.0


async def serve_prefill(
    options: PrefillOptions, stop: asyncio.Event, on_ready: Callable[[ReadyReport], None]
) -> None:
    """Prefill worker: computes prompts and sends their KV to decode workers."""
    clock = PhaseClock()
    check_bindable(options.host, options.port)
    kv_secret = read_kv_secret(options.kv_secret_file)
    engine = await asyncio.to_thread(build_engine, options)
    clock.lap("load")
    identity = new_identity(options)
    rule = NumericsRule(engine.spec.numerics, options.numerics == "strict")
    board = LoadBoard()
    heartbeat = Heartbeat(options.worker_stall_timeout_s)
    telemetry = await asyncio.to_thread(open_worker_telemetry, options, board, engine.spec)
    recorder = PrefillRecorder(telemetry, time.monotonic) if telemetry.is_on else None

    def submit(command: PrefillCommand) -> None:
        if recorder:
            recorder.on_command(command)
        loop.submit(command)

    sender = Sender(
        identity,
        engine.spec.layout,
        engine.kv,
        make_connector(
            options.kv_transport,
            tls=options.tls,
            peer_names=options.ssl_peer_names,
            memory=device_memory_of(engine.kv),
        ),
        submit,
        time.monotonic,
        num_lanes=options.kv_num_lanes,
        secret=kv_secret,
        rule=rule,
    )

    def deliver(events: Sequence[PrefillEvent], load: WorkerLoad) -> None:
        servicer.deliver(events)
        board.publish(load)
        if recorder:
            recorder.on_step(events)

    loans = open_receiver(
        identity,
        engine.kv,
        submit,
        time.monotonic,
        transports=transports_of(options.kv_transport, engine.kv),
        lease_s=LOAN_LEASE_S,
        tcp_host=options.kv_host,
        tcp_port=options.kv_port,
        tcp_advertise_address=options.kv_advertise_address or "",
        kv_secret=kv_secret,
        rule=rule,
        tls=options.tls,
        peer_names=options.ssl_peer_names,
    )
    limits = PrefillLimits(options.max_num_seqs, options.max_num_batched_tokens)
    matchers = build_matchers(options, engine)
    devices = PrefillDevices(
        engine=engine,
        pool=build_pool(options, engine),
        sender=sender,
        tickets=loans.tickets,
        costs=BorrowCosts(engine.spec.layout.token_bytes),
        matchers=matchers,
        clock=time.monotonic,
        beat=heartbeat.beat,
    )
    core = PrefillCore(devices, limits)
    loop: EngineLoop[PrefillCommand, PrefillEvent] = EngineLoop(
        core, deliver, heartbeat, name="prefill-engine"
    )
    servicer = PrefillServicer(submit, loop.has_room, sender.begin)
    info = describe(options, identity, engine.spec)
    host = WorkerHost(options, loop, heartbeat, board, Drain(), info, engine.spec.dtype_reason)
    worker = WorkerServicer(info, board, heartbeat, host.start_draining, loop.submit)
    try:
        register = services(
            worker,
            lambda server: prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server),
            prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
        )
        await host.serve(register, stop, on_ready, clock)
    finally:
        await asyncio.to_thread(sender.close)
        await asyncio.to_thread(loans.close)
        matchers.close()
        await asyncio.to_thread(telemetry.close)
