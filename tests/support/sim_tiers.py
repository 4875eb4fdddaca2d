"""Both tiers' cores on oracle engines, joined by the loopback channel, without threads or real
time.

Each worker's `step` is called by the test, or by tasks under a virtual loop, in any order it likes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from baton.errors import BatonError
from baton.types import KvSource, SequenceSpec, WorkerIdentity
from engine.grammar import Matchers
from engine.interface import Engine
from engine.kv.groups.group import GroupAllocator, SlotTable
from engine.kv.groups.state import StateSlots
from engine.kv.groups.window import WindowSlots
from engine.kv.layout import groups_of
from engine.kv.pool import BlockPool
from engine.kv.tiers.interface import Tier
from engine.kv.tiers.stack import TierStack
from engine.oracle import (
    FULL_LAYERS,
    OracleEngine,
    OracleLayers,
    OracleOptions,
    oracle_layout,
)
from kv_transfer.handshake import ReceiverConfig, SenderConfig
from kv_transfer.receiver import Receiver
from kv_transfer.sender import KvSender, SendDone, Sender
from kv_transfer.ticket import TicketEvent
from kv_transfer.ticket_table import TicketRules, TicketTable
from kv_transfer.transport.loopback import LoopbackHub, LoopbackListener
from tests.support.grammar_walks import small_vocabulary
from tests.support.kv_tiers import StepRunner, host_tier, tier_stack
from tests.support.sim_kv_ranks import KvOfRanks
from worker_core.admission import CoreLimits
from worker_core.commands import Command, Destination, Open, StreamEvent
from worker_core.core import CoreDeps, WorkerCore
from worker_core.costs import Costs
from worker_core.itl_budget import KeepPercentile
from worker_core.loop import StepResult
from worker_core.policy import LocalPrefillPolicy, Policy, decode_policy, prefill_policy
from worker_core.speculation.interface import Speculation
from worker_core.swap import SwapSpace

P = ParamSpec("P")
T = TypeVar("T")
Clock = Callable[[], float]


@dataclass(frozen=True)
class SimShape:
    """Sizes of one simulated worker."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 32
    max_local_prefill_tokens: int = 0
    enable_prefix_caching: bool = True
    poison_token_id: int = -1
    min_fetched_tokens: int = 1000
    max_num_launches: int = 2
    num_stages: int = 1
    """Pipeline stages; with more than one there are as many launches."""
    num_kv_ranks: int = 1
    """Ranks that send and receive the KV of some layers each."""
    swap_bytes: int = 0
    """Room for swapped sequences; a token of the oracle's takes 128 bytes."""
    host_blocks: int = 0
    """Blocks of a tier in host memory, which always pays."""
    num_pool_blocks: int = 0
    """Blocks that sequences may have, if fewer than the engine's."""
    layers: OracleLayers = FULL_LAYERS
    """Layers of all workers. With states there is a slot for each of max_num_seqs, and steps are
    not launched ahead."""
    has_window_slots: bool = False
    """Whether windowed layers' KV lies apart, with as few slots as a worker would have; where the
    window is of some layers."""

    @property
    def num_window_slots(self) -> int:
        if not self.has_window_slots:
            return 0
        groups = groups_of(oracle_layout(self.layers, self.block_size))
        most = groups.max_slots(self.max_num_seqs, self.max_num_batched_tokens)
        return min(most, self.num_blocks)


#: Workers of models with layers of each kind. The last have few slots for windowed layers, and many
#: blocks beside.
KV = SimShape()
STATES = SimShape(layers=OracleLayers(has_states=True))
GROUPS = SimShape(
    layers=OracleLayers(6), has_window_slots=True, max_num_seqs=4, max_num_batched_tokens=8
)


def _engine(shape: SimShape) -> OracleEngine:
    return OracleEngine(
        OracleOptions(
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            poison_token_id=shape.poison_token_id,
            adapters=("red", "blue"),
            layers=shape.layers,
            num_stages=shape.num_stages,
            num_window_slots=shape.num_window_slots,
            num_state_slots=shape.max_num_seqs,
        )
    )


class EnoughSlots(StateSlots):
    """Fails where a slot is looked for and there is none: nobody who has a place in the batch lacks
    one."""

    def __init__(self, table: SlotTable) -> None:
        super().__init__(table)
        self.fewest = table.num_slots
        """That have been available."""

    @property
    def num_available(self) -> int:
        assert super().num_available, "a sequence is to run that gets no slot for its states"
        return super().num_available

    def take(self, block_id: int) -> None:
        super().take(block_id)
        self.fewest = min(self.fewest, super().num_available)


def _allocators(engine: Engine) -> list[GroupAllocator]:
    """Allocators of all groups that lie apart from the blocks."""
    found = []
    for number, table in engine.kv.slot_tables.items():
        own = engine.kv.groups[number].allocator(table)
        found.append(EnoughSlots(table) if isinstance(own, StateSlots) else own)
    return found


def _pool(shape: SimShape, engine: Engine, allocators: Sequence[GroupAllocator]) -> BlockPool:
    groups = engine.kv.groups
    return BlockPool(
        shape.num_pool_blocks or shape.num_blocks,
        groups,
        secret=bytes(32),
        allocators=allocators,
        enable_prefix_caching=shape.enable_prefix_caching and not groups.cannot_rewind,
    )


def _sender(
    hub: LoopbackHub,
    identity: WorkerIdentity,
    engine: Engine,
    on_done: Callable[[SendDone], None],
    clock: Clock,
) -> Sender:
    config = SenderConfig(
        identity,
        engine.kv,
        lambda endpoints, _: hub.connect(endpoints[0].address),
        clock,
        max_chunk_bytes=256,
    )
    return Sender(config, on_done, is_inline=True)


def _open_tickets(
    hub: LoopbackHub,
    identity: WorkerIdentity,
    engine: Engine,
    on_event: Callable[[TicketEvent], None],
    clock: Clock,
    lease_s: float = 30.0,
    seed: int = 0,
) -> tuple[LoopbackListener, TicketTable]:
    layout = engine.spec.layout
    listener = hub.listen(identity.worker_id)
    ids = random.Random(seed)
    tickets = TicketTable(
        identity,
        layout,
        (listener.endpoint,),
        TicketRules(lease_s, secret=bytes(32), draw_id=lambda: ids.getrandbits(64)),
        on_event,
        clock,
    )
    listener.serve(Receiver(ReceiverConfig(identity, engine.kv, 4, 1 << 16), tickets))
    return listener, tickets


class EagerFetches(Costs):
    """Finds fetching so many tokens of a prefix, or more, always worth it."""

    def __init__(self, min_tokens: int, policy: LocalPrefillPolicy | None = None) -> None:
        super().__init__(policy or prefill_policy().local_prefill, token_bytes=1)
        self._min_tokens = min_tokens

    def is_fetch_cheaper(self, num_tokens: int) -> bool:
        return num_tokens >= self._min_tokens


class DearPrompts(EagerFetches):
    """Finds computing a token take a second: any tier pays."""

    def recompute_s(self, num_tokens: int) -> float | None:
        return float(num_tokens)


@dataclass
class SimWorker:
    """A worker: put commands into `inbox`, call step."""

    hub: LoopbackHub
    clock: Clock
    shape: SimShape = SimShape()
    name: str = "w0"
    boot: int = 1
    seed: int = 0
    lease_s: float = 30.0
    speculation: Speculation | None = None
    given_engine: Engine | None = None
    """In place of an oracle: of the shape's blocks."""
    beat: Callable[[int], None] = lambda _num_tokens: None
    inbox: list[Command] = field(default_factory=list)
    on_command: Callable[[], None] = lambda: None
    swap_runner: StepRunner = field(default_factory=StepRunner)
    """Swapped KV is copied some steps after that began."""
    make_tiers: Callable[[Engine], Sequence[Tier]] | None = None
    """Tiers of KV in place of the shape's. Their jobs run when the test says."""

    def __post_init__(self) -> None:
        identity = WorkerIdentity(self.name, self.boot)
        self.copy_rng = random.Random(self.seed)
        self.engine = self.given_engine or _engine(self.shape)
        allocators = _allocators(self.engine)
        self.slots = next((each for each in allocators if isinstance(each, WindowSlots)), None)
        self.state_slots = next(
            (each for each in allocators if isinstance(each, EnoughSlots)), None
        )
        self.pool = _pool(self.shape, self.engine, allocators)
        self.listener: Any
        self.tickets: Any
        self.sender: Any
        self.acknowledge: Callable[[], None] = lambda: None
        if self.shape.num_kv_ranks > 1:
            self.listener = ranks = KvOfRanks(self, identity)
            self.tickets, self.sender = ranks.tickets, ranks.sender
            self.acknowledge = ranks.acknowledge
        else:
            self.listener, self.tickets = _open_tickets(
                self.hub, identity, self.engine, self.submit, self.clock, self.lease_s, self.seed
            )
            self.sender = _sender(self.hub, identity, self.engine, self.submit, self.clock)
        self.swap = SwapSpace(
            self.engine.kv, self.shape.swap_bytes, self.swap_runner, self.submit, self.clock
        )
        policy = self.policy()
        tiers: Sequence[Tier] = ()
        if self.make_tiers:
            tiers = self.make_tiers(self.engine)
        elif self.shape.host_blocks:
            tiers = [host_tier(self.engine, self.shape.host_blocks)]
        self.tiers: TierStack | None = None
        self.runners: list[StepRunner] = []
        if tiers:
            self.tiers, self.runners = tier_stack(self.engine, tiers, self.submit, self.clock)
        costs = DearPrompts if tiers else EagerFetches
        deps = CoreDeps(
            engine=self.engine,
            pool=self.pool,
            tickets=self.tickets,
            sender=self.core_sender(),
            swap=self.swap,
            matchers=sim_matchers(),
            costs=costs(self.shape.min_fetched_tokens, policy.local_prefill),
            clock=self.clock,
            beat=self.beat,
            speculation=self.speculation,
            tiers=self.tiers,
            late_tickets=self.tickets if isinstance(self.tickets, TicketTable) else None,
        )
        limits = CoreLimits(
            self.shape.max_num_seqs,
            self.shape.max_num_batched_tokens,
            self.engine.spec.max_num_launches
            if self.engine.spec.is_pipelined
            else min(self.shape.max_num_launches, self.engine.spec.max_num_launches),
        )
        self.core = WorkerCore(deps, limits, policy)

    def core_sender(self) -> KvSender:
        """What the core hands off by."""
        return self.sender

    def policy(self) -> Policy:
        most = self.shape.max_local_prefill_tokens
        return decode_policy(
            LocalPrefillPolicy(most, most, is_pinned=True, gap_rule=KeepPercentile(2.0))
        )

    def submit(self, command: Command) -> None:
        self.inbox.append(command)
        self.on_command()

    def step(self) -> StepResult[StreamEvent]:
        told = self.take()
        result = self.compute()
        return replace(result, events=[*told, *result.events])

    def take(self) -> Sequence[StreamEvent]:
        """Apply what was submitted. Returns the events that follow from that alone."""
        while self.copies_now() and self.swap_runner.run():
            pass
        commands, self.inbox[:] = list(self.inbox), []
        return self.core.take(commands)

    def compute(self) -> StepResult[StreamEvent]:
        result = self.core.compute()
        self.acknowledge()
        return result

    def copies_now(self) -> bool:
        return self.copy_rng.random() < 0.5

    def open(
        self,
        stream: int,
        handle: int,
        spec: SequenceSpec,
        source: KvSource = KvSource.LOCAL,
        send_to: bytes = b"",
    ) -> None:
        """As the service does: the ticket of a destination is presented at once."""
        destination = None
        if send_to:
            destination = Destination(self.sender.begin((stream, handle), send_to))
        self.submit(Open(stream, handle, spec, source, destination))


@dataclass
class SimDecode(SimWorker):
    """A decode worker."""

    name: str = "d0"


@dataclass
class SimPrefill(SimWorker):
    """A prefill worker."""

    name: str = "p0"

    def policy(self) -> Policy:
        return prefill_policy()


class InlineExecutor(Executor):
    """Runs what it is given at once, in the caller's thread."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BatonError as error:
            future.set_exception(error)
        return future


def sim_matchers() -> Matchers:
    """A worker's matchers, without a thread."""
    return Matchers(small_vocabulary, InlineExecutor())


def fresh_names(prefix: str) -> Callable[[], str]:
    """A source of names that differ."""
    numbers = itertools.count()
    return lambda: f"{prefix}{next(numbers)}"
