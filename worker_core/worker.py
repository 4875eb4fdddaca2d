"""The process of one worker, of either tier: everything it is made of, put together once."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.config import WorkerOptions
from baton.errors import ConfigError
from baton.kv_transports import listened_on, takes_port
from baton.phase_clock import PhaseClock
from baton.rpc.bind import check_bindable
from baton.service import ReadyReport
from baton.types import NumericsRule, Tier, WorkerLoad
from baton.v1 import sequence_service_pb2, sequence_service_pb2_grpc
from engine.interface import Engine, EngineSpec
from kv_transfer.device_memory import device_memory_of, warm_up_copies
from kv_transfer.handshake import SenderConfig
from kv_transfer.kv_secret import KvSecret, read_kv_secret
from kv_transfer.sender import Sender
from kv_transfer.transport.connector import make_connector
from kv_transfer.transport.listeners import open_receiver
from worker_core.admission import CoreLimits
from worker_core.build import build_matchers, build_pool
from worker_core.commands import Command, Drain, SetPolicy, StreamEvent
from worker_core.core import CoreDeps, WorkerCore
from worker_core.host import WorkerHost, describe, new_identity
from worker_core.loop import EngineLoop, Heartbeat, LoadBoard
from worker_core.policy import Policy
from worker_core.recorder import WorkerRecorder
from worker_core.service import SequenceServicer
from worker_core.speculation.interface import Speculation
from worker_core.state import SwapSpace
from worker_core.telemetry import open_worker_telemetry
from worker_core.worker_service import WorkerServicer, services

#: Objects that a step makes for each of its sequences and that live until it is over, or until the
#: next one is: grant, slice, row, samples, event, and the tuples around them; and as many again for
#: a step launched ahead.
_OBJECTS_PER_SEQUENCE = 32


@dataclass(frozen=True, slots=True)
class TierSetup:
    """What a tier adds to the worker core.

    max_num_launches: steps that the engine may have been given at once. swap_bytes: host memory for
    preempted sequences.
    policy_of: how it decides in a role. wire_dtype: type that KV travels in to this worker.
    """

    engine: Engine
    policy_of: Callable[[Tier], Policy]
    speculation: Speculation | None = None
    max_num_launches: int = 1
    swap_bytes: int = 0
    wire_dtype: str = "auto"


def max_num_launches(is_asked: bool | None, spec: EngineSpec, *, has_drafts: bool) -> int:
    """Steps that are under way at once. is_asked: --async-scheduling. Raises ConfigError if more
    are asked for than the engine can have."""
    if is_asked and spec.max_num_launches == 1:
        why = (
            f"{spec.model} has layers with a state, of which that before one step is kept; leave "
            "it out"
            if spec.layout.has_states
            else "processes that share a model get all tokens; leave it out, or give "
            "--tensor-parallel-size 1"
        )
        raise ConfigError.of("async_scheduling", True, why)
    is_useful = spec.computes_aside and not has_drafts
    is_wanted = is_useful if is_asked is None else is_asked
    return spec.max_num_launches if is_wanted else 1


async def serve_worker(
    options: WorkerOptions,
    load_tier: Callable[[], TierSetup],
    stop: asyncio.Event,
    on_ready: Callable[[ReadyReport], None],
) -> None:
    """Serve until `stop`. load_tier: blocks; it is called in a thread, once the ports are known to
    be free."""
    clock = PhaseClock()
    check_bindable(options.host, options.port)
    kv_secret = _kv_secret_of(options)
    if takes_port(options.kv_transport):
        check_bindable(options.kv_host, options.kv_port, "kv_host", "kv_port")
    tier = await asyncio.to_thread(load_tier)
    engine, policy = tier.engine, tier.policy_of(options.tier)
    await asyncio.to_thread(warm_up_copies, engine.kv)
    clock.lap("load")
    identity = new_identity(options)
    rule = NumericsRule(engine.spec.numerics, options.numerics == "strict")
    collect_garbage_less_often(options.max_num_seqs)
    board = LoadBoard()
    heartbeat = Heartbeat(options.worker_stall_timeout_s)
    telemetry = await asyncio.to_thread(open_worker_telemetry, options, board, engine.spec)
    recorder = WorkerRecorder(telemetry, time.monotonic) if telemetry.is_on else None

    def submit(command: Command) -> None:
        if recorder:
            recorder.on_command(command)
        loop.submit(command)

    def deliver(events: Sequence[StreamEvent], load: WorkerLoad) -> None:
        servicer.deliver(events)
        board.publish(load)
        if recorder:
            recorder.on_step(events)

    device_memory = device_memory_of(engine.kv)
    transports = listened_on(options.kv_transport, has_device=device_memory is not None)
    channel = open_receiver(
        identity,
        engine.kv,
        submit,
        time.monotonic,
        transports=transports,
        lease_s=options.ticket_lease_s,
        offer_s=options.ticket_offer_s,
        tcp_host=options.kv_host,
        tcp_port=options.kv_port,
        tcp_advertise_address=options.kv_advertise_address or "",
        kv_secret=kv_secret,
        rule=rule,
        on_device_lost=submit,
        tls=options.tls,
        peer_names=options.ssl_peer_names,
        wire_dtype=tier.wire_dtype,
    )
    connect = make_connector(
        options.kv_transport,
        tls=options.tls,
        peer_names=options.ssl_peer_names,
        memory=device_memory,
    )
    sender_config = SenderConfig(
        identity,
        engine.kv,
        connect,
        time.monotonic,
        secret=kv_secret,
        rule=rule,
        on_device_lost=submit,
    )
    sender = Sender(sender_config, submit, num_connections=options.kv_num_lanes)
    matchers = build_matchers(options, engine)
    try:
        deps = CoreDeps(
            engine=engine,
            pool=build_pool(options, engine),
            tickets=channel.tickets,
            sender=sender,
            swap=SwapSpace(engine.kv, tier.swap_bytes),
            matchers=matchers,
            clock=time.monotonic,
            beat=heartbeat.beat,
            speculation=tier.speculation,
        )
        limits = CoreLimits(
            options.max_num_seqs, options.max_num_batched_tokens, tier.max_num_launches
        )
        loop: EngineLoop[Command, StreamEvent] = EngineLoop(
            WorkerCore(deps, limits, policy), deliver, heartbeat, name="worker-engine"
        )
        servicer = SequenceServicer(submit, loop.has_room, sender.begin)
        max_shared_tokens = tier.policy_of(Tier.DECODE).local_prefill.max_shared_tokens
        info = describe(options, identity, engine.spec, max_shared_tokens)
        host = WorkerHost(
            options,
            loop,
            heartbeat,
            board,
            Drain(),
            info,
            engine.spec.dtype_reason,
            transports,
        )
        worker = WorkerServicer(
            info,
            board,
            heartbeat,
            host.start_draining,
            loop.submit,
            lambda role: loop.submit(SetPolicy(tier.policy_of(role))),
        )
        register = services(
            worker,
            lambda server: sequence_service_pb2_grpc.add_SequenceServiceServicer_to_server(
                servicer, server
            ),
            sequence_service_pb2.DESCRIPTOR.services_by_name["SequenceService"],
        )
        await host.serve(register, stop, on_ready, clock)
    finally:
        await asyncio.to_thread(sender.close)
        await asyncio.to_thread(channel.close)
        matchers.close()
        await asyncio.to_thread(telemetry.close)


def _kv_secret_of(options: WorkerOptions) -> KvSecret | None:
    """Raises ConfigError."""
    if options.kv_secret is None:
        return read_kv_secret(options.kv_secret_file)
    try:
        return KvSecret(options.kv_secret.get_secret_value().encode())
    except ValueError as error:
        raise ConfigError.of("kv_secret", "***", f"{error}; give openssl rand -hex 32") from None


def collect_garbage_less_often(max_num_seqs: int) -> None:
    """Have the youngest generation hold what steps of so many sequences make.

    Python looks at all objects of a generation each time it has grown by so many, 700 by default. A
    step of thousands of sequences makes tens of thousands, and none of them is garbage before it
    ends.
    """
    youngest, *others = gc.get_threshold()
    gc.set_threshold(max(youngest, _OBJECTS_PER_SEQUENCE * max_num_seqs), *others)
