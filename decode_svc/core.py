"""The decode tier's state: sequences come in by tickets or as prompts, decode in one continuous batch, and leave.

One step: take commands, plan, preempt, run, hand out tokens. Every block is held by a sequence's lease from the moment
it is opened; it is given back when the sequence has left and no writer can touch it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.cache.pool import BlockPool
from baton.engine.admission import refusal
from baton.engine.guard import SliceOutcome, forward_guarded
from baton.engine.interface import Batch, Engine
from baton.engine.loop import Step
from baton.errors import BatonError, Draining
from baton.events import (
    Committed,
    DecodeEvent,
    Deferred,
    Failed,
    Offered,
    Preempted,
    PrefillsHere,
    Tokens,
)
from baton.types import FinishReason, Sample, SequenceSpec, WorkerLoad, finish_reason
from decode_svc.scheduler import plan_step
from decode_svc.sequence import DecodeSequence, Stage
from kv_transfer.ticket import OfferedTicket, TicketCommitted, TicketDead


@dataclass(frozen=True, slots=True)
class Open:
    """A gateway asks for room. `stream` names its Decode stream, `handle` the sequence in it."""

    stream: int
    handle: int
    spec: SequenceSpec
    prefill_here: bool


@dataclass(frozen=True, slots=True)
class Abort:
    """A gateway gives a sequence up, in whatever stage it is."""

    stream: int
    handle: int


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """A gateway is gone, and all its sequences with it."""

    stream: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no more sequences."""


DecodeCommand = Open | Abort | StreamClosed | Drain | TicketCommitted | TicketDead


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """An event and the gateway stream it belongs to."""

    stream: int
    handle: int
    event: DecodeEvent


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """max_local_prefill_tokens: most missing tokens that are computed here rather than awaited by a ticket."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_local_prefill_tokens: int


class Tickets(Protocol):
    """What the core needs of kv_transfer.ticket.TicketTable."""

    def offer(
        self,
        spec: SequenceSpec,
        block_ids: tuple[int, ...],
        num_cached_tokens: int,
        num_tokens: int,
    ) -> OfferedTicket: ...

    def abort(self, ticket_id: int, reason: str, message: str) -> None: ...

    def expire(self) -> None: ...

    def release(self, ticket_id: int) -> None: ...


class DecodeCore:
    """Implements baton.engine.loop.Core."""

    def __init__(
        self,
        engine: Engine,
        pool: BlockPool,
        tickets: Tickets,
        limits: DecodeLimits,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """beat: called within a step, at every group of layers."""
        self._engine = engine
        self._pool = pool
        self._tickets = tickets
        self._limits = limits
        self._beat = beat
        self._sequences: dict[tuple[int, int], DecodeSequence] = {}
        self._by_ticket: dict[int, DecodeSequence] = {}
        self._events: list[StreamEvent] = []
        self._num_steps = 0
        self._is_draining = False

    def step(self, commands: Sequence[DecodeCommand]) -> Step[StreamEvent]:
        self._tickets.expire()
        for command in commands:
            self._obey(command)
        has_run = self._run()
        events, self._events = self._events, []
        return Step(events, self._load(), is_idle=not has_run)

    # Commands

    def _obey(self, command: DecodeCommand) -> None:
        match command:
            case Open():
                self._open(command)
            case Abort(stream, handle):
                self._abandon(self._sequences.get((stream, handle)))
            case StreamClosed(stream):
                for sequence in [s for s in self._sequences.values() if s.stream == stream]:
                    self._abandon(sequence)
            case TicketCommitted():
                self._join(command)
            case TicketDead():
                self._bury(command)
            case Drain():
                self._is_draining = True

    def _open(self, command: Open) -> None:
        answer = self._refusal(command.spec) or self._admit(command)
        self._events.append(StreamEvent(command.stream, command.handle, answer))

    def _refusal(self, spec: SequenceSpec) -> Failed | None:
        if self._is_draining:
            return _failed(Draining("this decode worker takes no more sequences"))
        invalid = refusal(spec, self._engine.spec)
        return _failed(invalid) if invalid else None

    def _admit(self, command: Open) -> DecodeEvent:
        if len(self._sequences) >= self._limits.max_num_seqs:
            return Deferred(f"{self._limits.max_num_seqs} sequences are here already")
        spec = command.spec
        lease = self._pool.lease(
            spec.tenant,
            spec.token_ids,
            spec.num_tokens + 1,
            shares_prefixes=self._engine.spec.shares_prefixes(len(spec.prompt_token_ids)),
        )
        if lease is None:
            return Deferred("no room for the prompt's blocks")
        if self._pool.counts().available < len(self._sequences):
            lease.release()  # each sequence here must be able to grow before a new one comes
            return Deferred("the sequences that run need the blocks that are left")
        num_cached = lease.num_cached_tokens
        sequence = DecodeSequence(
            command.stream, command.handle, spec, lease, Stage.RUNNING, num_cached
        )
        self._sequences[command.stream, command.handle] = sequence
        num_missing = spec.num_tokens - num_cached
        if command.prefill_here or num_missing <= self._limits.max_local_prefill_tokens:
            return PrefillsHere(num_cached)
        offered = self._tickets.offer(spec, tuple(lease.block_ids), num_cached, spec.num_tokens)
        sequence.stage = Stage.AWAITING_KV
        sequence.ticket_id = offered.ticket_id
        self._by_ticket[offered.ticket_id] = sequence
        return Offered(offered.data, num_cached)

    def _abandon(self, sequence: DecodeSequence | None) -> None:
        if sequence is None:
            return
        if sequence.ticket_id is None:
            self._leave(sequence)
            return
        sequence.stage = Stage.ABANDONED
        self._tickets.abort(sequence.ticket_id, "CANCELLED", "the gateway gave the request up")

    def _join(self, committed: TicketCommitted) -> None:
        sequence = self._settle(committed.ticket_id)
        if sequence.stage is Stage.ABANDONED:
            self._leave(sequence)
            return
        sequence.stage = Stage.RUNNING
        sequence.num_computed_tokens = committed.num_tokens
        sequence.lease.index(sequence.token_ids, committed.num_tokens)
        self._emit(sequence, Committed(committed.transfer_exposed_ms, committed.num_bytes))
        self._produce(sequence, committed.first)

    def _bury(self, dead: TicketDead) -> None:
        sequence = self._settle(dead.ticket_id)
        if sequence.stage is not Stage.ABANDONED:
            self._emit(sequence, Failed(dead.reason, dead.message, is_retriable=True))
        self._leave(sequence)

    def _settle(self, ticket_id: int) -> DecodeSequence:
        """The ticket has had its last event: its sequence alone owns the blocks now."""
        self._tickets.release(ticket_id)
        sequence = self._by_ticket.pop(ticket_id)
        sequence.ticket_id = None
        return sequence

    # One step of the batch

    def _run(self) -> bool:
        """Whether there was anything to run."""
        plan = plan_step(
            [s for s in self._sequences.values() if s.stage is Stage.RUNNING],
            self._pool.counts().available,
            self._pool.block_size,
            self._limits.max_num_batched_tokens,
        )
        for sequence in plan.preempted:
            self._emit(sequence, Preempted())
            self._leave(sequence)
        grants = [
            (sequence, num_new)
            for sequence, num_new in plan.grants
            if sequence.lease.grow(sequence.num_computed_tokens + num_new)
        ]
        if not grants:
            return bool(plan.preempted)
        batch = Batch(tuple(sequence.next_slice(num_new) for sequence, num_new in grants))
        outcomes = forward_guarded(self._engine, batch, lambda _first, _count: self._beat())
        self._num_steps += 1
        for (sequence, num_new), outcome in zip(grants, outcomes, strict=True):
            self._advance(sequence, num_new, outcome)
        return True

    def _advance(self, sequence: DecodeSequence, num_new: int, outcome: SliceOutcome) -> None:
        if isinstance(outcome, BatonError):
            self._emit(sequence, _failed(outcome))
            self._leave(sequence)
            return
        sequence.num_computed_tokens += num_new
        for sample in outcome:
            self._produce(sequence, sample)

    def _produce(self, sequence: DecodeSequence, sample: Sample) -> None:
        token_index = sequence.num_output_tokens
        sequence.token_ids.append(sample.token_id)
        finish = finish_reason(
            sample.token_id,
            sequence.num_output_tokens,
            len(sequence.token_ids),
            sequence.spec.sampling,
            self._engine.spec.max_model_len,
        )
        self._emit(sequence, Tokens(token_index, (sample,), finish))
        if finish is not FinishReason.NONE:
            self._leave(sequence)

    def _leave(self, sequence: DecodeSequence) -> None:
        """Give the blocks back; what was computed stays findable as a prefix until the memory is needed."""
        del self._sequences[sequence.stream, sequence.handle]
        if sequence.stage is Stage.RUNNING:
            sequence.lease.index(sequence.token_ids, sequence.num_computed_tokens)
        sequence.lease.release()

    def _emit(self, sequence: DecodeSequence, event: DecodeEvent) -> None:
        self._events.append(StreamEvent(sequence.stream, sequence.handle, event))

    def _load(self) -> WorkerLoad:
        running = [s for s in self._sequences.values() if s.stage is Stage.RUNNING]
        return WorkerLoad(
            num_steps=self._num_steps,
            num_running=len(running),
            num_waiting=0,
            num_pending_tokens=sum(s.num_missing_tokens - 1 for s in running),
            blocks=self._pool.counts(),
            num_open_tickets=len(self._by_ticket),
            is_draining=self._is_draining,
        )


def _failed(error: BatonError) -> Failed:
    return Failed(error.reason, error.message, is_retriable=error.retry_after_s is not None)
