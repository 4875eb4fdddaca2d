"""The decode worker's process: everything it is made of, put together once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from baton.config import DecodeOptions
from baton.engine.heartbeat import Heartbeat
from baton.engine.interface import Engine, EngineSpec
from baton.engine.loop import EngineLoop
from baton.errors import ConfigError
from baton.phase_clock import PhaseClock
from baton.rpc.bind import check_bindable
from baton.service import ReadyReport
from baton.types import NumericsRule, WorkerLoad
from baton.v1 import decode_pb2, decode_pb2_grpc
from baton.worker.build import build_decode_engine, build_matchers, build_pool
from baton.worker.host import WorkerHost, describe, new_identity
from baton.worker.load_board import LoadBoard
from baton.worker.service import WorkerServicer, services
from baton.worker.telemetry import open_worker_telemetry
from decode_svc.admission import DecodeLimits
from decode_svc.commands import DecodeCommand, Drain, StreamEvent
from decode_svc.core import DecodeCore, DecodeDevices
from decode_svc.costs import LocalPrefillPolicy
from decode_svc.garbage import look_less_often
from decode_svc.recorder import DecodeRecorder
from decode_svc.service import DecodeServicer
from decode_svc.speculation.build import build_speculation
from decode_svc.swap_space import SwapSpace
from kv_transfer.device_memory import device_memory_of
from kv_transfer.kv_secret import read_kv_secret
from kv_transfer.running_receiver import open_receiver, transports_of
from kv_transfer.sender import Sender
from kv_transfer.transport.connector import make_connector


async def serve_decode(
    options: DecodeOptions,
    stop: asyncio.Event,
    on_ready: Callable[[ReadyReport], None],
    make_engine: Callable[[DecodeOptions], Engine] = build_decode_engine,
) -> None:
    """Decode worker: streams tokens of sequences whose KV prefill workers send."""
    clock = PhaseClock()
    check_bindable(options.host, options.port)
    kv_secret = read_kv_secret(options.kv_secret_file)
    if options.kv_transport not in ("shm", "cuda_ipc"):
        check_bindable(options.kv_host, options.kv_port, "kv_host", "kv_port")
    engine = await asyncio.to_thread(make_engine, options)
    speculation = await asyncio.to_thread(build_speculation, options, engine, time.perf_counter)
    clock.lap("load")
    identity = new_identity(options)
    rule = NumericsRule(engine.spec.numerics, options.numerics == "strict")
    look_less_often(options.max_num_seqs)
    limits = DecodeLimits(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        max_num_launches(options, engine.spec),
    )
    local_prefill = local_prefill_policy(options, engine)
    board = LoadBoard()
    heartbeat = Heartbeat(options.worker_stall_timeout_s)
    telemetry = await asyncio.to_thread(open_worker_telemetry, options, board, engine.spec)
    recorder = DecodeRecorder(telemetry, time.monotonic) if telemetry.is_on else None

    def submit(command: DecodeCommand) -> None:
        if recorder:
            recorder.on_command(command)
        loop.submit(command)

    def deliver(events: Sequence[StreamEvent], load: WorkerLoad) -> None:
        servicer.deliver(events)
        board.publish(load)
        if recorder:
            recorder.on_step(events)

    channel = open_receiver(
        identity,
        engine.kv,
        submit,
        time.monotonic,
        transports=transports_of(options.kv_transport, engine.kv),
        lease_s=options.ticket_lease_s,
        offer_s=options.ticket_offer_s,
        tcp_host=options.kv_host,
        tcp_port=options.kv_port,
        tcp_advertise_address=options.kv_advertise_address or "",
        kv_secret=kv_secret,
        rule=rule,
        tls=options.tls,
        peer_names=options.ssl_peer_names,
        wire_dtype=options.kv_transfer_dtype,
    )
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
    matchers = build_matchers(options, engine)
    try:
        devices = DecodeDevices(
            engine=engine,
            pool=build_pool(options, engine),
            tickets=channel.tickets,
            sender=sender,
            swap=SwapSpace(engine.kv, int(options.swap_space * 2**30)),
            matchers=matchers,
            clock=time.monotonic,
            beat=heartbeat.beat,
            speculation=speculation,
        )
        core = DecodeCore(devices, limits, local_prefill)
        loop: EngineLoop[DecodeCommand, StreamEvent] = EngineLoop(
            core, deliver, heartbeat, name="decode-engine"
        )
        servicer = DecodeServicer(submit, loop.has_room)
        info = describe(options, identity, engine.spec, local_prefill.max_threshold)
        host = WorkerHost(options, loop, heartbeat, board, Drain(), info, engine.spec.dtype_reason)
        worker = WorkerServicer(info, board, heartbeat, host.start_draining, loop.submit)
        register = services(
            worker,
            lambda server: decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server),
            decode_pb2.DESCRIPTOR.services_by_name["DecodeService"],
        )
        await host.serve(register, stop, on_ready, clock)
    finally:
        await asyncio.to_thread(sender.close)
        await asyncio.to_thread(channel.close)
        matchers.close()
        await asyncio.to_thread(telemetry.close)


def max_num_launches(options: DecodeOptions, spec: EngineSpec) -> int:
    """Steps that are under way at once. Raises ConfigError if more are asked for than the engine can have."""
    if options.async_scheduling and spec.max_num_launches == 1:
        raise ConfigError.of(
            "async_scheduling",
            True,
            "processes that share a model are told all tokens; leave it out, or give --tensor-parallel-size 1",
        )
    is_useful = spec.computes_aside and options.speculative_method == "none"
    is_wanted = is_useful if options.async_scheduling is None else options.async_scheduling
    return spec.max_num_launches if is_wanted else 1


def local_prefill_policy(options: DecodeOptions, engine: Engine) -> LocalPrefillPolicy:
    """Until speeds are known, a missing tail up to a block is taken to cost less to compute here than to send for."""
    pinned = engine.spec.max_model_len if options.colocated else options.max_local_prefill_tokens
    default = engine.spec.layout.block_size if pinned is None else pinned
    return LocalPrefillPolicy(
        default_threshold=default,
        max_threshold=options.max_num_batched_tokens if pinned is None else pinned,
        is_pinned=pinned is not None,
        max_itl_factor=None if options.colocated else options.max_itl_factor,
    )
