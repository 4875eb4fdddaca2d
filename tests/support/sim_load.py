"""A load against two workers under a virtual clock: gateway, dispatcher and worker cores are real,
engines compute nothing and take as long as a formula says.

A step takes `step_s`, `sequence_s` for each sequence that decodes and `token_s` for each token of a
prompt; what it computed is known to others once it is over. So the schedule alone is measured: the
same run gives the same figures anywhere.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from baton.commands import Abort, SequenceCommand
from baton.events import SequenceEvent, is_last
from baton.registry.lease import SoleLease
from baton.types import (
    NO_SLO,
    KvLayout,
    KvSource,
    NumericsClass,
    Role,
    Sample,
    Sampling,
    SequenceSpec,
    Slo,
    Tier,
    WorkerIdentity,
    WorkerInfo,
)
from baton.v1 import inference_pb2
from bench import measure
from bench.measure import Record, Summary, summarise
from engine.interface import Batch, EngineSpec, Launched, LayersDone
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from engine.kv.tensors.array import ArrayKvPool
from gateway.intake.decoding import Decoding
from gateway.intake.request import TextOptions, ValidatedRequest
from gateway.links.worker_link import Sink
from gateway.request.driver import RequestDeps, RequestDriver, outputs_of
from gateway.routing.dispatcher import Dispatcher
from gateway.routing.fleet import Fleet
from gateway.routing.migrator import Migrator
from gateway.routing.planner.planner import Decision
from gateway.routing.planner.replay import Load
from gateway.routing.planner.shapes import WorkerFacts
from gateway.routing.planner.steering import Decide, Steering
from kv_transfer.handshake import ReceiverConfig, SenderConfig
from kv_transfer.receiver import Receiver
from kv_transfer.sender import Sender
from kv_transfer.ticket import TicketCommitted
from kv_transfer.ticket_table import TicketRules, TicketTable
from kv_transfer.transport.loopback import LoopbackHub
from tests.support.sim_tiers import sim_matchers
from tests.support.virtual_loop import run_virtual
from worker_core.admission import CoreLimits
from worker_core.commands import Command, Destination, Open, SetPolicy, StreamCommand
from worker_core.core import CoreDeps, WorkerCore
from worker_core.loop import HEARTBEAT_S
from worker_core.policy import Policy, policy_of
from worker_core.swap import no_swap
from worker_core.threads import Threads

_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 8192
_LAYOUT = KvLayout("timed", 1, 1, 1, "float16", _BLOCK_SIZE)
TIMED_SPEC = EngineSpec(
    model="timed",
    layout=_LAYOUT,
    num_blocks=2048,
    vocab_size=1000,
    max_model_len=_MAX_MODEL_LEN,
    numerics=NumericsClass("timed", dtype="none"),
)


@dataclass(frozen=True)
class Speed:
    """Times of an engine. host_s: between two steps. transfer_s: of a handoff, after all compute.
    overlaps: whether prompts and weights take the longer of their times, not the sum.

    noise: share of the steps that take longer, by `noise_s` in the mean: others use the machine.
    """

    step_s: float = 0.004
    sequence_s: float = 0.0001
    token_s: float = 0.0001
    overlaps: bool = False
    host_s: float = 0.0005
    transfer_s: float = 0.003
    noise: float = 0.0
    noise_s: float = 0.0


@dataclass(frozen=True)
class Arrival:
    """One request."""

    due_s: float
    num_input_tokens: int
    num_output_tokens: int


class TimedClock:
    """A worker's: within a step, the virtual time plus what the step has taken so far."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return self._loop.time() + self.ahead_s


@dataclass(frozen=True)
class _Launch:
    """Implements Launched."""

    batch: Batch
    layers_done: LayersDone | None
    on_computed: Callable[[Batch], None]

    def samples(self) -> tuple[tuple[Sample, ...], ...]:
        self.on_computed(self.batch)
        if self.layers_done:
            self.layers_done(0, 1)
        return tuple((Sample(1),) * len(part.rows) for part in self.batch.slices)


class TimedEngine:
    """Implements engine.interface.Engine. Every token is the same."""

    def __init__(
        self,
        speed: Speed,
        num_blocks: int,
        clock: TimedClock,
        seed: int,
        slowdown: Callable[[], float],
    ) -> None:
        """slowdown: factor on a step that begins now, at least 1."""
        self.spec = replace(TIMED_SPEC, num_blocks=num_blocks)
        self.kv = ArrayKvPool(_LAYOUT, num_blocks)
        self.speed = speed
        self._slowdown = slowdown
        self._clock = clock
        self._rng = random.Random(seed)

    def launch(self, batch: Batch, layers_done: LayersDone | None = None) -> Launched:
        return _Launch(batch, layers_done, self._on_computed)

    def forward(
        self, batch: Batch, layers_done: LayersDone | None = None
    ) -> tuple[tuple[Sample, ...], ...]:
        return self.launch(batch, layers_done).samples()

    def _on_computed(self, batch: Batch) -> None:
        speed = self.speed
        num_decode = sum(len(part.token_ids) == 1 for part in batch.slices)
        num_prompt = batch.num_tokens - num_decode
        weights_s = speed.step_s + speed.sequence_s * num_decode
        compute_s = speed.token_s * num_prompt
        taken_s = max(weights_s, compute_s) if speed.overlaps else weights_s + compute_s
        self._clock.ahead_s += taken_s * self._slowdown()
        if speed.noise and self._rng.random() < speed.noise:
            self._clock.ahead_s += self._rng.expovariate(1 / speed.noise_s)


class LoadNode:
    """A worker, its engine loop, and the gateway's link to it."""

    def __init__(
        self, cluster: LoadCluster, name: str, tier: Tier, policy: Policy, num_blocks: int
    ) -> None:
        self._cluster = cluster
        self.name = name
        loop = asyncio.get_running_loop()
        self.clock = TimedClock(loop)
        engine = TimedEngine(
            cluster.speed, num_blocks, self.clock, len(cluster.nodes), self._slowdown
        )
        self.threads = Threads(1, self._use_threads) if cluster.wide else None
        self._engine = engine
        identity = WorkerIdentity(name, 1)
        listener = cluster.hub.listen(name)
        ids = random.Random(name)
        tickets = TicketTable(
            identity,
            _LAYOUT,
            (listener.endpoint,),
            TicketRules(secret=bytes(32), draw_id=lambda: ids.getrandbits(64)),
            self.submit,
            self.clock,
        )
        listener.serve(Receiver(ReceiverConfig(identity, engine.kv, 4, 1 << 20), tickets))
        config = SenderConfig(
            identity,
            engine.kv,
            lambda endpoints, _: cluster.hub.connect(endpoints[0].address),
            self.clock,
        )
        self._sender = Sender(config, self.submit, is_inline=True)
        deps = CoreDeps(
            engine=engine,
            pool=BlockPool(num_blocks, whole_blocks(_BLOCK_SIZE), secret=bytes(32)),
            tickets=tickets,
            sender=self._sender,
            swap=no_swap(engine.kv),
            matchers=sim_matchers(),
            clock=self.clock,
            threads=self.threads,
        )
        limits = CoreLimits(cluster.max_num_seqs, cluster.max_num_batched_tokens)
        self.core = WorkerCore(deps, limits, policy)
        self._inbox: list[Command] = []
        self._woken = asyncio.Event()
        self._sinks: dict[int, Sink] = {}
        self._num_handles = 0
        self.opened: Counter[KvSource] = Counter()
        info = WorkerInfo(
            identity,
            tier,
            "timed",
            _LAYOUT,
            1000,
            _MAX_MODEL_LEN,
            num_blocks,
            cluster.max_num_seqs,
            cluster.max_num_batched_tokens,
            policy.local_prefill.max_shared_tokens,
            num_threads=1 if cluster.wide else 0,
        )
        cluster.fleet.join(name, info, self)
        self.task = asyncio.create_task(self._run())

    def set_policy(self, role: Role) -> None:
        self._take(SetPolicy(policy_of(role, TIMED_SPEC, self._cluster.targets), role.num_threads))

    def _use_threads(self, number: int) -> None:
        wide = self._cluster.wide
        self._engine.speed = wide if number > 1 and wide else self._cluster.speed

    def _slowdown(self) -> float:
        """A machine with as many cores as workers computes with more threads than it has."""
        nodes = self._cluster.nodes
        at_work = [node for node in nodes if node is self or node.clock.ahead_s]
        num_threads = sum(node.threads.num_now if node.threads else 1 for node in at_work)
        return max(1.0, num_threads / max(1, len(nodes)))

    def submit(self, command: Command) -> None:
        """What a step of another worker sends is here once that step is over."""
        delay_s = self._cluster.ahead_s
        if isinstance(command, TicketCommitted):
            delay_s += self._cluster.speed.transfer_s
        if delay_s and not self.clock.ahead_s:
            asyncio.get_running_loop().call_later(delay_s, self._take, command)
        else:
            self._take(command)

    def _take(self, command: Command) -> None:
        self._inbox.append(command)
        self._woken.set()

    async def _run(self) -> None:
        while True:
            self._woken.clear()
            commands, self._inbox = self._inbox, []
            for stream_event in self.core.take(commands):
                self._emit(stream_event.handle, stream_event.event)
            self._cluster.stepping = self
            step = self.core.compute()
            self._cluster.stepping = None
            if self.clock.ahead_s:
                await asyncio.sleep(self.clock.ahead_s)
                self.clock.ahead_s = 0.0
            for stream_event in step.events:
                self._emit(stream_event.handle, stream_event.event)
            self._cluster.fleet.report(self.name, step.load)
            await asyncio.sleep(self._cluster.speed.host_s)
            if step.is_idle and not self._inbox:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._woken.wait()
                except TimeoutError:
                    pass

    def _emit(self, handle: int, event: SequenceEvent) -> None:
        sink = self._sinks.get(handle)
        if sink is not None:
            if is_last(event):
                del self._sinks[handle]
            sink(event)

    def open(
        self, spec: SequenceSpec, source: KvSource, sinks: Sequence[Sink], send_to: bytes = b""
    ) -> int:
        first = self._num_handles + 1
        self._num_handles += len(sinks)
        self.opened[source] += 1
        self._sinks.update(enumerate(sinks, start=first))
        destination = None
        if send_to:
            destination = Destination(self._sender.begin((0, first), send_to))
        self._take(Open(0, first, spec, source, destination))
        return first

    def send(self, handle: int, command: SequenceCommand) -> None:
        if not isinstance(command, Abort) or self._sinks.pop(handle, None) is not None:
            self._take(StreamCommand(0, handle, command))


@dataclass
class LoadCluster:
    """To be made inside a virtual loop. policies: of the workers, by name; p... are prefill
    workers.

    wide: speed of a worker with all cores of the machine, on which each has one; None: cores do not
    move. is_steered: whether the planner changes roles.
    """

    speed: Speed
    policies: dict[str, tuple[Tier, Policy]]
    num_blocks: int = 2048
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    targets: Slo = NO_SLO
    wide: Speed | None = None
    is_steered: bool = False
    hub: LoopbackHub = field(default_factory=LoopbackHub)
    nodes: list[LoadNode] = field(default_factory=list)
    stepping: LoadNode | None = None

    def __post_init__(self) -> None:
        prefills = [name for name, (tier, _) in self.policies.items() if tier is Tier.PREFILL]
        decodes = [name for name in self.policies if name not in prefills]
        self.fleet = Fleet(prefills, decodes, slo=self.targets)
        self.dispatcher = Dispatcher(self.fleet, max_queue_size=100_000, key=bytes(16))
        self.steering = Steering(
            self.fleet, self.dispatcher.log, SoleLease(), self.set_role, inline
        )
        migrator = Migrator(self.fleet, self.dispatcher)
        for name, (tier, policy) in self.policies.items():
            self.nodes.append(LoadNode(self, name, tier, policy, self.num_blocks))
        self.tasks = [
            asyncio.create_task(self.dispatcher.run()),
            asyncio.create_task(migrator.run()),
            *(node.task for node in self.nodes),
            *([asyncio.create_task(self.steering.run())] if self.is_steered else []),
        ]
        self.deps = RequestDeps(
            self.fleet,
            self.dispatcher,
            dict.fromkeys((False, True), Decoding(lambda _ids: "")),
            30.0,
            migrator,
        )

    async def set_role(self, address: str, role: Role, term: int) -> None:  # noqa: ARG002
        """Implements gateway.routing.planner.steering.SetRole."""
        next(node for node in self.nodes if node.name == address).set_policy(role)

    @property
    def ahead_s(self) -> float:
        """Time ahead of the worker that computes a step now."""
        return self.stepping.clock.ahead_s if self.stepping else 0.0

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def request(cluster: LoadCluster, number: int, arrival: Arrival) -> Record:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(arrival.due_s - loop.time())
    pieces: list[tuple[float, int]] = []

    async def write(chunk: inference_pb2.GenerateResponse) -> None:
        if chunk.token_ids:
            pieces.append((loop.time(), len(chunk.token_ids)))

    rng = random.Random(number)
    spec = SequenceSpec(
        f"r{number}",
        tuple(rng.randrange(1000) for _ in range(arrival.num_input_tokens)),
        Sampling(max_tokens=arrival.num_output_tokens),
        arrival_ns=number,
    )
    request = ValidatedRequest(spec, TextOptions())
    outputs = outputs_of(request, cluster.deps.decodings)
    await RequestDriver(cluster.deps, request, outputs, write, loop.time() + 6000.0).run()
    return Record(
        arrival.due_s, arrival.due_s, loop.time(), arrival.num_input_tokens, tuple(pieces)
    )


async def inline(
    decide: Decide, now_s: float, workers: Sequence[WorkerFacts], load: Load | None
) -> Decision:
    """Implements gateway.routing.planner.steering.Aside; a virtual clock knows no threads."""
    return decide(now_s, workers, load)


async def _serve(
    cluster: LoadCluster, arrivals: Sequence[Arrival], first_number: int
) -> list[Record]:
    await asyncio.sleep(0.5)
    start_s = asyncio.get_running_loop().time()
    due = [replace(arrival, due_s=arrival.due_s + start_s) for arrival in arrivals]
    numbered = enumerate(due, start=first_number)
    return await asyncio.gather(*(request(cluster, n, arrival) for n, arrival in numbered))


def records_of_load(
    arrivals: Sequence[Arrival],
    speed: Speed,
    policies: dict[str, tuple[Tier, Policy]],
    before: Sequence[Arrival] = (),
    **options: Any,
) -> list[Record]:
    """Serve a load. before: is served first, and not recorded. options: of LoadCluster."""

    async def main() -> list[Record]:
        cluster = LoadCluster(speed, policies, **options)
        await _serve(cluster, before, len(arrivals))
        records = await _serve(cluster, arrivals, 0)
        await cluster.close()
        return records

    return run_virtual(main())


def run_load(
    arrivals: Sequence[Arrival],
    speed: Speed,
    policies: dict[str, tuple[Tier, Policy]],
    slo: measure.Slo,
) -> Summary:
    """Serve a load, and measure it."""
    return summarise(records_of_load(arrivals, speed, policies), slo)
