"""One worker of either tier: its parts, put together once."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from baton.config import WorkerOptions
from baton.errors import ConfigError
from baton.kv_transports import takes_port
from baton.rpc.bind import check_bindable
from baton.service import ReadyReport
from baton.start_log import PhaseClock
from baton.telemetry import Telemetry
from baton.types import NumericsRule, Role, Tier, WorkerLoad
from engine.grammar import Matchers
from engine.interface import DeviceLost, Engine, EngineSpec
from engine.kv.tiers.runner import ThreadRunner
from engine.kv.tiers.stack import TierStack
from kv_transfer.device_memory import warm_up_copies
from kv_transfer.kv_secret import KvSecret
from worker_core.admission import CoreLimits
from worker_core.build import build_matchers, build_pool
from worker_core.commands import Command, StreamEvent
from worker_core.core import CoreDeps, WorkerCore
from worker_core.kv_channel import KvChannel, port_config
from worker_core.loop import EngineLoop, Heartbeat, LoadBoard
from worker_core.nodes import kv_secret_of, serve_node
from worker_core.policy import Policy
from worker_core.recorder import WorkerRecorder
from worker_core.sequence_service import SequenceServicer
from worker_core.server import WorkerServer, describe, new_identity
from worker_core.speculation.interface import Speculation
from worker_core.swap import SwapSpace
from worker_core.telemetry import open_worker_telemetry
from worker_core.threads import Threads, keep_to_numa_node
from worker_core.tier_build import build_tiers
from worker_core.worker_service import WorkerServicer, services

_log = logging.getLogger("baton.worker")

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
    role: of the start. threads: None if their number cannot change.
    """

    engine: Engine
    policy_of: Callable[[Role], Policy]
    role: Role
    threads: Threads | None = None
    speculation: Speculation | None = None
    max_num_launches: int = 1
    swap_bytes: int = 0
    wire_dtype: str = "auto"


def max_num_launches(is_asked: bool | None, spec: EngineSpec, *, has_drafts: bool) -> int:
    """Steps that are under way at once. is_asked: --async-scheduling. Raises ConfigError if more
    are asked for than the engine can have."""
    if is_asked and spec.max_num_launches == 1:
        why = (
            f"{spec.model} has {spec.groups.cannot_rewind}; leave it out"
            if spec.groups.cannot_rewind
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
    if options.own_numa_node is not None:
        keep_to_numa_node(options.own_numa_node)
    if options.node_rank:
        await serve_node(options, stop, on_ready)
        return
    clock = PhaseClock()
    check_bindable(options.host, options.port)
    kv_secret = kv_secret_of(options)
    if takes_port(options.kv_transport):
        check_bindable(options.kv_host, options.kv_port, "kv_host", "kv_port")
    tier = await asyncio.to_thread(load_tier)
    await asyncio.to_thread(warm_up_copies, tier.engine.kv)
    clock.lap("load")
    collect_garbage_less_often(options.max_num_seqs)
    board = LoadBoard()
    telemetry = await asyncio.to_thread(open_worker_telemetry, options, board, tier.engine.spec)
    try:
        tiers = await asyncio.to_thread(build_tiers, options, tier.engine)
        worker = Worker(options, tier, kv_secret, board, telemetry, tiers)
        try:
            await worker.serve(stop, on_ready, clock)
        finally:
            await asyncio.to_thread(worker.close)
    finally:
        await asyncio.to_thread(telemetry.close)
        await asyncio.to_thread(tier.engine.close)


class Worker:
    """The parts of one worker: the KV channel, the core in its engine loop, and the services.

    Commands reach the core by `_submit`, from streams, tickets and sends alike; events of its steps
    leave by `_deliver`.
    """

    def __init__(
        self,
        options: WorkerOptions,
        tier: TierSetup,
        kv_secret: KvSecret | None,
        board: LoadBoard,
        telemetry: Telemetry,
        tiers: TierStack | None,
    ) -> None:
        """Opens the KV endpoints; `close` closes them."""
        self._options = options
        self._tier = tier
        self._board = board
        self._recorder = WorkerRecorder(telemetry, time.monotonic) if telemetry.is_on else None
        self._heartbeat = Heartbeat(options.worker_stall_timeout_s)
        self._identity = new_identity(options)
        rule = NumericsRule(tier.engine.spec.numerics, options.numerics == "strict")
        config = port_config(options, self._identity, tier.wire_dtype, kv_secret, rule)
        with ExitStack() as undo:
            if tiers:
                undo.callback(tiers.close)
                tiers.report_to(self._submit)
            channel = KvChannel(config, tier.engine, self._submit)
            undo.callback(channel.close)
            self._transports = channel.transports
            matchers = build_matchers(options, tier.engine)
            undo.callback(matchers.close)
            swap = self._make_swap(tier)
            undo.callback(swap.close)
            core = self._make_core(channel, matchers, tiers, swap)
            self._loop: EngineLoop[Command, StreamEvent] = EngineLoop(
                core, self._deliver, self._heartbeat, name="worker-engine"
            )
            self._sequences = SequenceServicer(
                self._submit, self._loop.has_room, channel.sender.begin
            )
            self._closing = undo.pop_all()

    def close(self) -> None:
        """Blocks until connections and their threads have ended."""
        self._closing.close()

    async def serve(
        self, stop: asyncio.Event, on_ready: Callable[[ReadyReport], None], clock: PhaseClock
    ) -> None:
        """Serve until `stop`. Raises EngineFault if the engine loop ends by itself."""
        policy_of, spec = self._tier.policy_of, self._tier.engine.spec
        max_shared_tokens = policy_of(Role(Tier.DECODE)).local_prefill.max_shared_tokens
        info = describe(self._options, self._identity, spec, max_shared_tokens)
        if self._tier.threads:
            info = replace(info, num_threads=self._tier.threads.num_started)
        server = WorkerServer(
            self._options, self._loop, self._board, info, spec.dtype_reason, self._transports
        )
        worker = WorkerServicer(
            info, self._board, self._heartbeat, self._loop.submit, self._tier.policy_of
        )
        await server.serve(services(worker, self._sequences), stop, on_ready, clock)

    def _submit(self, command: Command) -> None:
        if self._recorder:
            self._recorder.on_command(command)
        self._loop.submit(command)

    def _deliver(self, events: Sequence[StreamEvent], load: WorkerLoad | None) -> None:
        self._sequences.deliver(events)
        if load is not None:
            self._board.publish(load)
        if self._recorder:
            self._recorder.on_step(events, is_over=load is not None)

    def _make_swap(self, tier: TierSetup) -> SwapSpace:
        def on_error(error: Exception) -> None:
            _log.error("a copy of swapped KV failed", exc_info=error)
            self._submit(DeviceLost(f"a copy of swapped KV failed: {error}"))

        runner = ThreadRunner("kv-swap", on_error)
        kv = tier.engine.kv
        num_bytes = tier.swap_bytes if kv.can_pack else 0
        return SwapSpace(kv, num_bytes, runner, self._submit, time.monotonic)

    def _make_core(
        self, channel: KvChannel, matchers: Matchers, tiers: TierStack | None, swap: SwapSpace
    ) -> WorkerCore:
        options, tier = self._options, self._tier
        secret = tiers.secret if tiers else secrets.token_bytes(32)
        deps = CoreDeps(
            engine=tier.engine,
            pool=build_pool(options, tier.engine, secret),
            tickets=channel.tickets,
            late_tickets=channel.late_tickets,
            sender=channel.sender,
            swap=swap,
            matchers=matchers,
            clock=time.monotonic,
            beat=self._heartbeat.beat,
            speculation=tier.speculation,
            tiers=tiers,
            threads=tier.threads,
        )
        limits = CoreLimits(
            options.max_num_seqs, options.max_num_batched_tokens, tier.max_num_launches
        )
        return WorkerCore(deps, limits, tier.policy_of(tier.role))


def collect_garbage_less_often(max_num_seqs: int) -> None:
    """Have the youngest generation hold what steps of so many sequences make.

    Python looks at all objects of a generation each time it has grown by so many, 700 by default. A
    step of thousands of sequences makes tens of thousands, and none of them is garbage before it
    ends.
    """
    youngest, *others = gc.get_threshold()
    gc.set_threshold(max(youngest, _OBJECTS_PER_SEQUENCE * max_num_seqs), *others)
