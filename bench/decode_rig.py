"""A decode core that is stepped by hand, on a real engine and the real clock, and computes its
prompts itself."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.config import DecodeOptions
from baton.engine.interface import Engine
from baton.events import Tokens
from baton.types import KvSource, SequenceSpec, WorkerIdentity
from baton.worker.build import build_decode_engine, build_matchers, build_pool
from kv_transfer.sender import Sender
from kv_transfer.ticket_table import TicketTable
from kv_transfer.transport.loopback import LoopbackHub
from worker_core.admission import CoreLimits
from worker_core.commands import Command, Open
from worker_core.core import CoreDeps, WorkerCore
from worker_core.policy import LocalPrefillPolicy, decode_policy
from worker_core.speculation.speculator import build_speculation
from worker_core.state import SwapSpace


@dataclass(frozen=True, slots=True)
class StepResult:
    """seconds: of the step. ended: (handle, output) of sequences that it ended."""

    seconds: float
    num_tokens: int
    num_drafted: int
    num_accepted: int
    ended: tuple[tuple[int, tuple[int, ...]], ...]


class DecodeRig:
    """One worker's engine and core, without processes, threads or a network."""

    def __init__(self, options: DecodeOptions, clock: Callable[[], float]) -> None:
        """clock: by which steps are timed, in seconds."""
        self._clock = clock
        self.engine: Engine = build_decode_engine(options)
        hub = LoopbackHub()
        identity = WorkerIdentity("bench", 1)
        self._commands: list[Command] = []
        self._handles = itertools.count()
        self._outputs: dict[int, list[int]] = {}
        tickets = TicketTable(
            identity,
            self.engine.spec.layout,
            (),
            30.0,
            self._commands.append,
            time.monotonic,
            secrets.token_bytes(32),
            lambda: secrets.randbits(64),
        )
        sender = Sender(
            identity,
            self.engine.spec.layout,
            self.engine.kv,
            lambda endpoints, _: hub.connect(endpoints[0].address),
            self._commands.append,
            time.monotonic,
            is_inline=True,
        )
        devices = CoreDeps(
            engine=self.engine,
            pool=build_pool(options, self.engine),
            tickets=tickets,
            sender=sender,
            swap=SwapSpace(self.engine.kv, 0),
            matchers=build_matchers(options, self.engine),
            clock=time.monotonic,
            speculation=build_speculation(options, self.engine, clock),
        )
        most = self.engine.spec.max_model_len
        self._core = WorkerCore(
            devices,
            CoreLimits(options.max_num_seqs, options.max_num_batched_tokens),
            decode_policy(LocalPrefillPolicy(most, most, is_pinned=True, max_itl_factor=None)),
        )

    @property
    def num_running(self) -> int:
        """Sequences opened that have not ended."""
        return len(self._outputs)

    def open(self, spec: SequenceSpec) -> int:
        """Opens a sequence in the next step; returns its handle."""
        handle = next(self._handles)
        self._outputs[handle] = []
        self._commands.append(Open(0, handle, spec, KvSource.LOCAL))
        return handle

    def step(self) -> StepResult:
        """One step of the core, timed."""
        commands, self._commands[:] = list(self._commands), []
        begin_s = self._clock()
        events = self._core.step(commands).events
        seconds = self._clock() - begin_s
        emitted = [(e.handle, e.event) for e in events if isinstance(e.event, Tokens)]
        return StepResult(
            seconds,
            sum(len(tokens.samples) for _, tokens in emitted),
            sum(tokens.num_draft_tokens for _, tokens in emitted),
            sum(tokens.num_accepted_tokens for _, tokens in emitted),
            tuple(self._take(emitted)),
        )

    def _take(self, emitted: Sequence[tuple[int, Tokens]]) -> list[tuple[int, tuple[int, ...]]]:
        ended = []
        for handle, tokens in emitted:
            self._outputs[handle] += [sample.token_id for sample in tokens.samples]
            if tokens.finish:
                ended.append((handle, tuple(self._outputs.pop(handle))))
        return ended
