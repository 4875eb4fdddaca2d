"""A decode core over an engine that computes nothing, so that only the host's own work takes
time."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.cache.pool import BlockPool
from baton.engine.interface import Engine
from baton.events import SequenceEvent
from baton.grammar import Matchers
from baton.grammar.vocabulary import GrammarVocabulary
from baton.types import KvSource, Sampling, SequenceSpec, WorkerIdentity
from bench.stub_engine import BLOCK_SIZE, MAX_MODEL_LEN, VOCAB_SIZE, StubEngine
from kv_transfer.sender import Sender
from kv_transfer.ticket_table import TicketTable
from kv_transfer.transport.loopback import LoopbackHub
from worker_core.admission import CoreLimits
from worker_core.commands import Command, Open
from worker_core.core import CoreDeps, WorkerCore
from worker_core.policy import LocalPrefillPolicy, decode_policy
from worker_core.state import SwapSpace


def draw_spec(index: int, num_prompt_tokens: int) -> SequenceSpec:
    """A sequence that shares no block with others, and does not end while it is measured."""
    rng = random.Random(index)
    return SequenceSpec(
        request_id=f"r{index}",
        prompt_token_ids=tuple(rng.choices(range(VOCAB_SIZE), k=num_prompt_tokens)),
        sampling=Sampling(max_tokens=MAX_MODEL_LEN),
        tenant=b"bench",
        arrival_ns=index,
    )


def _no_vocabulary() -> GrammarVocabulary:
    raise NotImplementedError


class HostRig:
    """`num_seqs` sequences that decode, each with `num_prompt_tokens` before its first token."""

    def __init__(
        self,
        num_seqs: int,
        num_prompt_tokens: int,
        num_blocks: int,
        step_s: float = 0.0,
        max_num_launches: int = 1,
        engine: Engine | None = None,
    ) -> None:
        """step_s: what the engine takes for a step, in seconds. max_num_launches: 2 to launch steps
        ahead. engine: one of num_blocks, in place of the stub."""
        self.num_seqs = num_seqs
        engine = engine or StubEngine(num_blocks, step_s)
        identity = WorkerIdentity("bench", 1)
        hub = LoopbackHub()
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, secret=secrets.token_bytes(32))
        self._commands: list[Command] = []
        ids = itertools.count(1)
        layout = engine.spec.layout
        self.tickets = TicketTable(
            identity,
            layout,
            (),
            1e6,
            self._commands.append,
            time.monotonic,
            secrets.token_bytes(32),
            lambda: next(ids),
        )
        sender = Sender(
            identity,
            layout,
            engine.kv,
            lambda endpoints, _: hub.connect(endpoints[0].address),
            self._commands.append,
            time.monotonic,
            is_inline=True,
        )
        self.core = WorkerCore(
            CoreDeps(
                engine=engine,
                pool=self.pool,
                tickets=self.tickets,
                sender=sender,
                swap=SwapSpace(engine.kv, 0),
                matchers=Matchers(_no_vocabulary, ThreadPoolExecutor(1)),
                clock=time.monotonic,
            ),
            CoreLimits(2 * num_seqs, 2 * num_seqs * num_prompt_tokens, max_num_launches),
            decode_policy(
                LocalPrefillPolicy(
                    MAX_MODEL_LEN, MAX_MODEL_LEN, is_pinned=True, max_itl_factor=None
                )
            ),
        )
        self.opening = [
            Open(0, handle, draw_spec(handle, num_prompt_tokens), KvSource.LOCAL)
            for handle in range(num_seqs)
        ]

    def step(self, commands: Sequence[Command] = ()) -> Sequence[SequenceEvent]:
        """One step; what it emitted, without whom."""
        return [emitted.event for emitted in self.core.step(commands).events]
