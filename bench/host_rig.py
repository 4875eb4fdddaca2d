"""Decode cores stepped by hand, without processes, threads or network; also over an engine that
computes nothing, to time the host's work only."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from baton.events import SequenceEvent
from baton.types import KvSource, Sampling, SequenceSpec, WorkerIdentity
from bench.stub_engine import BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE, StubEngine
from engine.grammar import Matchers
from engine.grammar.vocabulary import GrammarVocabulary
from engine.interface import Engine
from engine.kv.layout import whole_blocks
from engine.kv.pool import BlockPool
from kv_transfer.handshake import SenderConfig
from kv_transfer.send_connection import Finish, LaterTask, SendDone
from kv_transfer.sender import KvSender, Sender
from kv_transfer.ticket_table import TicketRules, TicketTable
from kv_transfer.transport.loopback import LoopbackHub
from worker_core.admission import CoreLimits
from worker_core.commands import Command, Open
from worker_core.core import CoreDeps, WorkerCore
from worker_core.policy import Policy, decode_policy, pinned_local_prefill, prefill_policy
from worker_core.speculation.interface import Speculation
from worker_core.swap import no_swap

#: Lease of a ticket, in seconds; longer than any measurement.
_LEASE_S = 1e6


def decode_core(
    engine: Engine,
    pool: BlockPool,
    limits: CoreLimits,
    commands: list[Command],
    matchers: Matchers | None = None,
    speculation: Speculation | None = None,
) -> tuple[WorkerCore, TicketTable]:
    """A core that computes all prompts itself. commands: receives the reports of its tickets and
    sender, for the next step."""
    policy = decode_policy(pinned_local_prefill(engine.spec.max_model_len, None))
    return _core(engine, pool, limits, policy, commands, None, matchers, speculation)


def prefill_core(
    engine: Engine, pool: BlockPool, limits: CoreLimits, commands: list[Command]
) -> WorkerCore:
    """A core with instantaneous handoffs. commands: see decode_core."""
    core, _ = _core(engine, pool, limits, prefill_policy(), commands, InstantSender(commands))
    return core


@dataclass(frozen=True, slots=True)
class InstantSender:
    """A KvSender that sends nothing and completes at once. commands: receives its reports."""

    commands: list[Command]

    def begin(self, key: Hashable, ticket: bytes, *others: LaterTask) -> int:
        raise NotImplementedError

    def submit(self, task: LaterTask) -> None:
        if isinstance(task, Finish):
            self.commands.append(SendDone(task.key, None, 0))

    def heartbeat(self) -> None:
        """See KvSender."""


def _core(
    engine: Engine,
    pool: BlockPool,
    limits: CoreLimits,
    policy: Policy,
    commands: list[Command],
    sender: KvSender | None,
    matchers: Matchers | None = None,
    speculation: Speculation | None = None,
) -> tuple[WorkerCore, TicketTable]:
    """sender: None: one over loopback."""
    identity = WorkerIdentity("bench", 1)
    hub = LoopbackHub()
    ids = itertools.count(1)
    layout = engine.spec.layout
    tickets = TicketTable(
        identity,
        layout,
        (),
        TicketRules(_LEASE_S, draw_id=lambda: next(ids)),
        commands.append,
        time.monotonic,
    )
    config = SenderConfig(
        identity,
        engine.kv,
        lambda endpoints, _: hub.connect(endpoints[0].address),
        time.monotonic,
    )
    sender = sender or Sender(config, commands.append, is_inline=True)
    deps = CoreDeps(
        engine=engine,
        pool=pool,
        tickets=tickets,
        sender=sender,
        swap=no_swap(engine.kv),
        matchers=matchers or Matchers(_no_vocabulary, ThreadPoolExecutor(1)),
        clock=time.monotonic,
        speculation=speculation,
    )
    return WorkerCore(deps, limits, policy), tickets


def draw_spec(index: int, num_prompt_tokens: int) -> SequenceSpec:
    """A sequence that shares no block with others, and does not end during the measurement."""
    rng = random.Random(index)
    return SequenceSpec(
        request_id=f"r{index}",
        prompt_token_ids=tuple(rng.choices(range(VOCAB_SIZE), k=num_prompt_tokens)),
        sampling=Sampling(max_tokens=MAX_MODEL_LEN),
        tenant=b"t" * 16,
        arrival_ns=index,
    )


def _no_vocabulary() -> GrammarVocabulary:
    raise NotImplementedError


class HostRig:
    """`num_seqs` decoding sequences, each with `num_prompt_tokens` of prompt."""

    def __init__(
        self,
        num_seqs: int,
        num_prompt_tokens: int,
        num_blocks: int,
        step_s: float = 0.0,
        max_num_launches: int = 1,
        engine: Engine | None = None,
    ) -> None:
        """step_s: seconds per step of the engine. max_num_launches: 2 launches steps ahead. engine:
        with num_blocks, replaces the stub."""
        self.num_seqs = num_seqs
        engine = engine or StubEngine(num_blocks, step_s)
        self.pool = BlockPool(num_blocks, whole_blocks(BLOCK_SIZE), secret=secrets.token_bytes(32))
        limits = CoreLimits(2 * num_seqs, 2 * num_seqs * num_prompt_tokens, max_num_launches)
        self.core, self.tickets = decode_core(engine, self.pool, limits, [])
        self.opening = [
            Open(0, handle, draw_spec(handle, num_prompt_tokens), KvSource.LOCAL)
            for handle in range(num_seqs)
        ]

    def step(self, commands: Sequence[Command] = ()) -> Sequence[SequenceEvent]:
        """Run one step; returns its events without their recipients."""
        return [emitted.event for emitted in self.core.step(commands).events]
