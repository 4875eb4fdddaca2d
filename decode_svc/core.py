"""The decode tier's state machine: sequences come in by tickets or as prompts, decode in one continuous batch, and leave.

One step: take commands, bring swapped sequences back, plan, preempt, run, hand out tokens. Every block is held by a
sequence's lease from the moment it is opened; it is given back when the sequence has left and nobody can touch it any
more: neither a ticket's writer nor the sender of a handoff.

    admission.py  who comes in, and where the KV comes from        scheduler.py  who runs, who must leave
    output.py     from draws to tokens, choices and beams           moves.py      to other workers, to host memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.cache.pool import BlockCopy, BlockPool
from baton.engine.guard import forward_guarded
from baton.engine.interface import Batch, Engine, SequenceSlice
from baton.engine.loop import Step
from baton.types import WorkerLoad
from decode_svc.admission import Admission, DecodeLimits, Tickets
from decode_svc.beam_group import BeamGroup
from decode_svc.commands import (
    Abort,
    DecodeCommand,
    Drain,
    HandOff,
    Open,
    Pause,
    Resume,
    StreamClosed,
    StreamEvent,
)
from decode_svc.moves import Moves, Preemption
from decode_svc.output import Output
from decode_svc.scheduler import Budget, StepPlan, plan_step
from decode_svc.sequence import DecodeSequence, Stage
from decode_svc.state import DecodeState, Member
from decode_svc.swap_space import SwapSpace
from kv_transfer.kv_sender import KvSender
from kv_transfer.sender import SendDone
from kv_transfer.ticket import TicketCommitted, TicketDead


@dataclass(frozen=True, slots=True)
class DecodeDevices:
    """What the core works with. sender: carries sequences to other decode workers. clock: monotonic seconds.

    beat: called within a step, at every group of layers.
    """

    engine: Engine
    pool: BlockPool
    tickets: Tickets
    sender: KvSender
    swap: SwapSpace
    clock: Callable[[], float]
    beat: Callable[[], None] = lambda: None


class DecodeCore:
    """Implements baton.engine.loop.Core."""

    def __init__(self, devices: DecodeDevices, limits: DecodeLimits) -> None:
        self._engine = devices.engine
        self._beat = devices.beat
        self._limits = limits
        self._state = DecodeState(devices.engine.spec, devices.pool, devices.swap)
        self._admission = Admission(self._state, devices.tickets, limits)
        self._moves = Moves(self._state, devices.sender, devices.clock)
        self._preemption = Preemption(self._state)
        self._output = Output(self._state)
        self._num_steps = 0

    def step(self, commands: Sequence[DecodeCommand]) -> Step[StreamEvent]:
        self._admission.expire()
        self._moves.heartbeat()
        for command in commands:
            self._obey(command)
        has_returned = self._preemption.bring_back()
        plan = self._plan()
        for member in plan.preempted:
            self._preemption.preempt(member)
        has_run = self._run(plan.grants)
        is_idle = not (has_returned or plan.preempted or has_run)
        return Step(self._state.take_events(), self._load(), is_idle)

    def _obey(self, command: DecodeCommand) -> None:
        match command:
            case Open():
                self._admission.open(command)
            case Abort(stream, handle):
                self._give_up(stream, handle)
            case Pause():
                self._moves.pause(command)
            case HandOff():
                self._moves.hand_off(command)
            case Resume():
                self._moves.resume(command)
            case StreamClosed(stream):
                for member in [m for m in self._state if m.stream == stream]:
                    self._abandon(member)
            case TicketCommitted():
                sequence = self._admission.join(command)
                if sequence and command.firsts:
                    self._output.produce_firsts(sequence, command.firsts)
            case TicketDead():
                self._admission.bury(command)
            case SendDone():
                self._moves.finish(command)
            case Drain():
                self._admission.is_draining = True

    def _give_up(self, stream: int, handle: int) -> None:
        """End a sequence, or one choice of a sequence that is still one; unknown ones are gone already."""
        member = self._state.find(stream, handle) or self._state.group_of(stream, handle)
        if isinstance(member, DecodeSequence) and handle - member.handle in member.choices:
            member.choices.remove(handle - member.handle)
            if not member.choices:
                self._abandon(member)
        elif isinstance(member, BeamGroup):
            self._abandon(member)

    def _abandon(self, member: Member) -> None:
        """Nobody wants a member any more."""
        match member.stage:
            case Stage.AWAITING_KV if isinstance(member, DecodeSequence):
                self._admission.abandon(member)
            case Stage.MOVING:
                self._moves.abandon(member)
            case Stage.ABANDONED:
                pass
            case _:
                self._state.leave(member)

    def _plan(self) -> StepPlan[Member]:
        most = self._limits.max_num_batched_tokens
        return plan_step(
            self._state.in_stage(Stage.RUNNING),
            self._state.pool.counts().available,
            Budget(num_tokens=most, num_prefill_tokens=most),
        )

    def _run(self, granted: Sequence[tuple[Member, int]]) -> bool:
        """Compute what was granted, as far as there are blocks. Whether there was anything to run."""
        grants: list[tuple[Member, int, tuple[SequenceSlice, ...]]] = []
        copies: list[BlockCopy] = []
        for member, num_new in granted:
            prepared = member.prepare(num_new)
            if prepared is not None:
                copies += prepared
                grants.append((member, num_new, member.slices(num_new)))
        if not grants:
            return False
        if copies:
            self._engine.kv.copy_blocks([c.source for c in copies], [c.target for c in copies])
        batch = Batch(tuple(part for _, _, parts in grants for part in parts))
        outcomes = iter(forward_guarded(self._engine, batch, lambda _first, _count: self._beat()))
        self._num_steps += 1
        for member, num_new, parts in grants:
            own = [next(outcomes) for _ in parts]
            if isinstance(member, BeamGroup):
                self._output.advance_beams(member, own)
            else:
                self._output.advance(member, num_new, own[0])
        return True

    def _load(self) -> WorkerLoad:
        running = self._state.in_stage(Stage.RUNNING)
        prefilling = [m.num_missing_tokens for m in running if m.is_prefilling]
        return WorkerLoad(
            num_steps=self._num_steps,
            num_running=len(running),
            num_waiting=len(self._state.in_stage(Stage.SWAPPED)),
            num_pending_tokens=sum(prefilling) - len(prefilling),
            blocks=self._state.pool.counts(),
            num_open_tickets=self._admission.num_open_tickets,
            is_draining=self._admission.is_draining,
        )
