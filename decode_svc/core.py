"""The decode tier's state machine: sequences come in by tickets or as prompts, decode in one continuous batch, and leave.

One step: take commands, bring swapped sequences back, plan, preempt, run, hand out tokens. Every block is held by a
sequence's lease from the moment it is opened; it is given back when the sequence has left and nobody can touch it any
more: neither a ticket's writer, nor the sender of a handoff, nor a launch in flight.

    admission.py  who comes in, and where the KV comes from        scheduler.py  who runs, who must leave
    output.py     from draws to tokens, choices and beams           moves.py      to other workers, to host memory
    steps.py      from grants to samples, one step ahead            drafting.py   drafts beside what was granted
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.cache.ledger import ListBlocks, num_orphan_blocks
from baton.cache.pool import BlockPool
from baton.engine.interface import Engine
from baton.engine.loop import Step
from baton.grammar import Matchers, with_grammar_ready
from baton.types import WorkerLoad
from decode_svc.admission import Admission, DecodeLimits
from decode_svc.beam_group import BeamGroup
from decode_svc.commands import (
    Abort,
    DecodeCommand,
    Drain,
    HandOff,
    Known,
    Open,
    Pause,
    Resume,
    StreamClosed,
    StreamEvent,
)
from decode_svc.costs import Costs, LocalPrefillPolicy
from decode_svc.drafting import Drafting
from decode_svc.ledger import ledger_of, orphans_of
from decode_svc.moves import Lending, Moves, Preemption
from decode_svc.output import Output
from decode_svc.scheduler import Budget, StepPlan, plan_step
from decode_svc.sequence import DecodeSequence, Stage
from decode_svc.speculation.interface import NoSpeculation, Speculation
from decode_svc.state import DecodeState, Member
from decode_svc.steps import Steps
from decode_svc.swap_space import SwapSpace
from kv_transfer.kv_sender import KvSender
from kv_transfer.sender import SendDone
from kv_transfer.ticket import LendAsked, TicketCommitted, TicketDead, TicketEvent
from kv_transfer.tickets import Tickets

_log = logging.getLogger("baton.decode")


@dataclass(frozen=True, slots=True)
class DecodeDevices:
    """What the core works with. sender: carries sequences to other decode workers. clock: monotonic seconds.

    beat: called with a step's number of tokens, before it and at every group of layers within it.
    """

    engine: Engine
    pool: BlockPool
    tickets: Tickets
    sender: KvSender
    swap: SwapSpace
    matchers: Matchers
    clock: Callable[[], float]
    beat: Callable[[int], None] = lambda _num_tokens: None
    speculation: Speculation = field(default_factory=NoSpeculation)


class DecodeCore:
    """Implements baton.engine.loop.Core."""

    def __init__(
        self, devices: DecodeDevices, limits: DecodeLimits, local_prefill: LocalPrefillPolicy
    ) -> None:
        self._limits = limits
        self._costs = Costs(local_prefill)
        self._state = DecodeState(
            devices.engine.spec, devices.pool, devices.swap, devices.speculation.forget
        )
        drafting = Drafting(self._state, devices.speculation, limits.max_num_batched_tokens)
        self._steps = Steps(
            self._state,
            devices.engine,
            drafting,
            self._costs,
            devices.clock,
            devices.beat,
            # Drafts are found by the tokens known.
            1 if devices.speculation.max_num_drafts else limits.max_num_launches,
        )
        self._admission = Admission(
            self._state, devices.tickets, limits, self._costs, devices.matchers, devices.clock
        )
        self._moves = Moves(self._state, devices.sender, devices.clock)
        self._lending = Lending(self._state, devices.sender, devices.clock)
        self._preemption = Preemption(self._state, self._costs, devices.clock)
        self._output = Output(self._state)
        self._num_orphans = 0

    def step(self, commands: Sequence[DecodeCommand]) -> Step[StreamEvent]:
        self._admission.expire()
        self._moves.heartbeat()
        for command in commands:
            self._obey(command)
        has_returned = self._preemption.bring_back()
        has_run = self._run_ahead() or self._run_alone()
        is_idle = not (has_returned or has_run)
        return Step(self._state.take_events(), self._load(), is_idle)

    def _run_ahead(self) -> bool:
        """Launch the next step before the one in flight is collected, if it may be. Whether there was anything to do."""
        if not self._steps.may_launch(self._state.in_stage(Stage.RUNNING)):
            return False
        plan = self._plan()
        return not plan.preempted and self._steps.launch(plan.grants)

    def _run_alone(self) -> bool:
        """Collect the step in flight, then run one. Whether there was anything to do."""
        has_collected = self._steps.collect()
        plan = self._plan()
        for member in plan.preempted:
            self._preemption.preempt(member)
        has_run = self._steps.run(plan.grants)
        return has_collected or bool(plan.preempted) or has_run

    def _obey(self, command: DecodeCommand) -> None:
        match command:
            case Open():
                self._admission.open(command)
            case Abort(stream, handle):
                self._give_up(stream, handle)
            case Pause():
                self._steps.collect()
                self._moves.obey(command)
            case HandOff() | Resume():
                self._moves.obey(command)
            case StreamClosed(stream):
                for member in [m for m in self._state if m.stream == stream]:
                    self._abandon(member)
            case TicketCommitted() | TicketDead() | LendAsked():
                self._hear_of_ticket(command)
            case SendDone(key) if key in self._state.loans:
                self._lending.finish(command)
            case SendDone():
                self._moves.finish(command)
            case Drain():
                self._admission.is_draining = True
            case ListBlocks() | Known():
                self._audit(command)

    def _hear_of_ticket(self, event: TicketEvent) -> None:
        match event:
            case TicketCommitted():
                sequence = self._admission.join(event)
                if sequence and event.firsts:
                    self._output.produce_firsts(sequence, event.firsts)
            case TicketDead():
                self._admission.bury(event)
            case LendAsked():
                if sequence := self._admission.awaiting(event.ticket_id):
                    self._lending.lend(sequence, event)

    def _audit(self, command: ListBlocks | Known) -> None:
        """Open the books, or compare them with a gateway's."""
        if isinstance(command, ListBlocks):
            command.reply(ledger_of(self._state))
            return
        for member in orphans_of(self._state, command):
            _log.error("sequence %s is unknown to its gateway: ended", member.spec.request_id)
            self._num_orphans += 1
            self._abandon(member)

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
        running = [m for m in self._state.in_stage(Stage.RUNNING) if not self._is_drawing_last(m)]
        self._state.num_decoding = sum(not member.is_prefilling for member in running)
        return plan_step(
            with_grammar_ready(running),
            self._state.pool.num_available,
            Budget(most, self._costs.max_prefill_tokens(self._state.num_decoding, most)),
        )

    def _is_drawing_last(self, member: Member) -> bool:
        max_model_len = self._state.spec.max_model_len
        return isinstance(member, DecodeSequence) and member.is_drawing_last(max_model_len)

    def _load(self) -> WorkerLoad:
        running = self._state.in_stage(Stage.RUNNING)
        prefilling = [m.num_missing_tokens for m in running if m.is_prefilling]
        return WorkerLoad(
            num_steps=self._steps.num_steps,
            num_running=len(running),
            num_waiting=len(self._state) - len(running) - self._admission.num_open_tickets,
            num_pending_tokens=sum(prefilling) - len(prefilling),
            blocks=self._state.pool.counts(),
            num_open_tickets=self._admission.num_open_tickets,
            num_orphan_sequences=self._num_orphans,
            num_orphan_blocks=num_orphan_blocks(self._state.pool, self._state.leases),
            is_draining=self._admission.is_draining,
            num_swaps=self._state.swap.num_swaps,
            local_prefill_threshold=self._admission.local_prefill_threshold,
        )
