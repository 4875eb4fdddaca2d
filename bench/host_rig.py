"""A decode core over an engine that computes nothing, so that only the host's own work takes time."""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from baton.cache.pool import BlockPool
from baton.engine.interface import Batch, EngineSpec, LayersDone
from baton.events import DecodeEvent
from baton.grammar import Matchers
from baton.grammar.vocabulary import GrammarVocabulary
from baton.types import KvLayout, KvSource, Sample, Sampling, SequenceSpec, WorkerIdentity
from decode_svc.admission import DecodeLimits
from decode_svc.commands import DecodeCommand, Open
from decode_svc.core import DecodeCore, DecodeDevices
from decode_svc.costs import LocalPrefillPolicy
from decode_svc.swap_space import SwapSpace
from kv_transfer.sender import Sender
from kv_transfer.ticket import TicketTable
from kv_transfer.transport.loopback import LoopbackHub

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1 << 17
_VOCAB_SIZE = 1000


class NoKv:
    """Implements baton.engine.interface.KvPool without memory: nothing may be moved."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks

    def pack(
        self,
        block_ids: Sequence[int],
        first_token: int,
        num_tokens: int,
        first_layer: int,
        num_layers: int,
        out: memoryview,
    ) -> None:
        raise NotImplementedError

    def unpack(
        self,
        block_ids: Sequence[int],
        first_token: int,
        num_tokens: int,
        first_layer: int,
        num_layers: int,
        data: memoryview,
    ) -> None:
        raise NotImplementedError

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        raise NotImplementedError


class StubEngine:
    """Implements baton.engine.interface.Engine: every row gets the same token."""

    def __init__(self, num_blocks: int) -> None:
        layout = KvLayout("host-bench", 1, 1, 8, "float32", BLOCK_SIZE)
        self.spec = EngineSpec("stub", layout, num_blocks, _VOCAB_SIZE, MAX_MODEL_LEN)
        self.kv = NoKv(layout, num_blocks)

    def forward(
        self,
        batch: Batch,
        layers_done: LayersDone | None = None,  # noqa: ARG002
    ) -> tuple[tuple[Sample, ...], ...]:
        return tuple((_SAMPLE,) * len(part.rows) for part in batch.slices)


_SAMPLE = Sample(7)


def draw_spec(index: int, num_prompt_tokens: int) -> SequenceSpec:
    """A sequence that shares no block with others, and does not end while it is measured."""
    rng = random.Random(index)
    return SequenceSpec(
        request_id=f"r{index}",
        prompt_token_ids=tuple(rng.choices(range(_VOCAB_SIZE), k=num_prompt_tokens)),
        sampling=Sampling(max_tokens=MAX_MODEL_LEN),
        tenant=b"bench",
        arrival_ns=index,
    )


def _no_vocabulary() -> GrammarVocabulary:
    raise NotImplementedError


class HostRig:
    """`num_seqs` sequences that decode, each with `num_prompt_tokens` before its first token."""

    def __init__(self, num_seqs: int, num_prompt_tokens: int, num_blocks: int) -> None:
        self.num_seqs = num_seqs
        engine = StubEngine(num_blocks)
        identity = WorkerIdentity("bench", 1)
        hub = LoopbackHub()
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, secret=secrets.token_bytes(32))
        self._commands: list[DecodeCommand] = []
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
        self.core = DecodeCore(
            DecodeDevices(
                engine=engine,
                pool=self.pool,
                tickets=self.tickets,
                sender=sender,
                swap=SwapSpace(engine.kv, 0),
                matchers=Matchers(_no_vocabulary, ThreadPoolExecutor(1)),
                clock=time.monotonic,
            ),
            DecodeLimits(2 * num_seqs, 2 * num_seqs * num_prompt_tokens),
            LocalPrefillPolicy(MAX_MODEL_LEN, MAX_MODEL_LEN, is_pinned=True, max_itl_factor=None),
        )
        self.opening = [
            Open(0, handle, draw_spec(handle, num_prompt_tokens), KvSource.HERE)
            for handle in range(num_seqs)
        ]

    def step(self, commands: Sequence[DecodeCommand] = ()) -> Sequence[DecodeEvent]:
        """One step; what it told, without whom."""
        return [told.event for told in self.core.step(commands).events]
