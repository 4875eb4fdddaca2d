"""State machine of a worker of either tier. Sequences arrive as prompts or by tickets, are computed
in one continuous batch, and end or are handed off. On a prefill worker, sequences have a
destination from the start.

One step: apply commands, admit, plan, run, report. Each block is held by a sequence's lease from
the opening of the sequence. It is released when the sequence has left and no ticket writer, KV
sender or launch in flight can access it any more.

    admission.py   which sequences are admitted, and the source of their KV
    scheduler.py   which sequences run, and which are preempted
    late_blocks.py  blocks for KV that arrives by tickets
    handoff.py     KV transfers to other workers
    prefix_tiers.py  prefixes that move to tiers of KV and back
    preemption.py  swaps to host memory (swap.py), or release for another worker
    steps.py       from grants to samples, one step ahead
    drafting.py    drafts in a step's spare tokens
    output.py      from samples to tokens, choices and beams
    policy.py      decisions by the worker's role
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from baton.commands import Abort, Pause
from baton.errors import Cancelled
from baton.types import WorkerLoad
from engine.grammar import Matchers, with_grammar_ready
from engine.interface import DeviceLost, Engine
from engine.kv.ledger import ListBlocks, num_orphan_blocks
from engine.kv.pool import BlockPool
from engine.kv.tiers.stack import Fetched, Measured, Saved, TierStack
from kv_transfer.sender import KvSender, SendDone
from kv_transfer.ticket import PrefixRequested, TicketAborted, TicketCommitted, TicketOffered
from kv_transfer.ticket_group import Tickets
from kv_transfer.ticket_table import LateTickets
from worker_core.admission import Admission, CoreLimits
from worker_core.beam_group import BeamGroup
from worker_core.commands import (
    Command,
    Drain,
    KnownSequences,
    Open,
    SetPolicy,
    StreamClosed,
    StreamCommand,
    StreamEvent,
)
from worker_core.costs import Costs
from worker_core.drafting import Drafting
from worker_core.gap_rule import Pace
from worker_core.handoff import Handoffs, for_gateway
from worker_core.late_blocks import LATE_CHUNKS, LateBlocks, supports_late_blocks
from worker_core.loop import StepResult
from worker_core.output import OutputProcessor
from worker_core.policy import Policy, kept_tpot_s
from worker_core.preemption import Preemption
from worker_core.prefix_tiers import PrefixTiers
from worker_core.scheduler import Budget, StepPlan, plan_step
from worker_core.sequence import Stage, WorkerSequence
from worker_core.speculation.interface import Speculation
from worker_core.state import CoreState, SequenceGroup, ledger_of, orphans_of
from worker_core.steps import Steps
from worker_core.swap import SwapDone, SwapSpace
from worker_core.threads import Threads

_log = logging.getLogger("baton.worker")


@dataclass(frozen=True, slots=True)
class CoreDeps:
    """Dependencies of the core. sender: transfers sequences to other workers. clock: monotonic
    seconds.

    costs: None to start without measurements. beat: called with a step's number of tokens, before
    the step and at each group of layers within it. tiers: of KV below the device, if any.
    late_tickets: the same as `tickets`, if they may get their blocks while the KV arrives.
    threads: None if their number cannot change.
    """

    engine: Engine
    pool: BlockPool
    tickets: Tickets
    sender: KvSender
    swap: SwapSpace
    matchers: Matchers
    clock: Callable[[], float]
    beat: Callable[[int], None] = lambda _num_tokens: None
    speculation: Speculation | None = None
    costs: Costs | None = None
    tiers: TierStack | None = None
    late_tickets: LateTickets | None = None
    threads: Threads | None = None


class WorkerCore:
    """Implements worker_core.loop.Core."""

    def __init__(self, deps: CoreDeps, limits: CoreLimits, policy: Policy) -> None:
        self._limits = limits
        self._policy = policy
        token_bytes = deps.engine.spec.layout.token_bytes
        self._costs = deps.costs or Costs(policy.local_prefill, token_bytes)
        self._threads = deps.threads
        if self._threads:
            self._costs.num_threads = self._threads.num_now
        self._tickets = deps.tickets
        self._state = CoreState(
            deps.engine.spec,
            deps.pool,
            deps.swap,
            deps.clock,
            deps.speculation.forget if deps.speculation else None,
        )
        self._handoffs = Handoffs(self._state, deps.sender)
        self._output = OutputProcessor(self._state, self._handoffs)
        self._steps = Steps(
            self._state,
            deps.engine,
            Drafting(self._state, deps.speculation, limits.max_num_batched_tokens),
            self._costs,
            self._handoffs,
            self._output,
            deps.beat,
            # Drafting needs the last tokens, so no step is launched ahead.
            1 if deps.speculation else limits.max_num_launches,
        )
        self._tiers: PrefixTiers | None = None
        if deps.tiers:
            groups = deps.engine.spec.groups
            self._tiers = PrefixTiers(deps.tiers, deps.pool, groups, self._costs, deps.clock)
        late: LateBlocks | None = None
        if deps.late_tickets and supports_late_blocks(deps.engine.kv):
            ahead_tokens = LATE_CHUNKS * limits.max_num_batched_tokens
            late = LateBlocks(self._state, deps.late_tickets, ahead_tokens)
        self._admission = Admission(
            self._state,
            deps.tickets,
            limits,
            self._costs,
            deps.matchers,
            self._handoffs,
            self._tiers,
            late,
        )
        self._preemption = Preemption(self._state, self._costs, self._handoffs)
        self._num_orphans = 0

    def take(self, commands: Sequence[Command]) -> Sequence[StreamEvent]:
        """Apply commands. Returns the events that follow from them alone."""
        self._tickets.expire()
        self._handoffs.heartbeat()
        for command in commands:
            self._apply(command)
        return self._state.take_events()

    def step(self, commands: Sequence[Command]) -> StepResult[StreamEvent]:
        """Take commands and compute; their events are among the step's."""
        told = self.take(commands)
        computed = self.compute()
        return replace(computed, events=[*told, *computed.events])

    def compute(self) -> StepResult[StreamEvent]:
        """Compute a step, if there is work."""
        if self._tiers:
            self._tiers.step()
        self._admission.grow_arriving()
        has_come = self._preemption.bring_back() | self._admission.admit_queued()
        has_run = self._run_ahead() or self._run_alone()
        return StepResult(
            self._state.take_events(), self._load(), is_idle=not (has_come or has_run)
        )

    def _run_ahead(self) -> bool:
        """Launch the next step before the one in flight is collected, if allowed. Return whether
        there was work."""
        if not self._steps.may_launch(self._state.in_stage(Stage.RUNNING)):
            return False
        plan = self._plan(self._steps.num_shares)
        return not plan.preempted and self._steps.launch(plan.grants)

    def _run_alone(self) -> bool:
        """Collect the step in flight, then run one. Return whether there was work."""
        has_collected = self._steps.collect()
        plan = self._plan()
        for group in plan.preempted:
            self._preemption.preempt(group)
        has_run = self._steps.run(plan.grants)
        return has_collected or bool(plan.preempted) or has_run

    def _plan(self, num_shares: int = 1) -> StepPlan[SequenceGroup]:
        """Plan the next step. num_shares: concurrent steps that divide the running sequences."""
        most = self._limits.max_num_batched_tokens
        running = [
            group for group in self._state.in_stage(Stage.RUNNING) if not group.is_drawing_last
        ]
        prefilling = [group for group in running if group.is_prefilling]
        self._state.num_decoding = num_decoding = len(running) - len(prefilling)
        num_wanted = prefilling[0].num_missing_tokens if prefilling else 0
        paces = self._paces(running) if prefilling else ()
        num_prefill = self._costs.max_prefill_tokens(num_decoding, most, num_wanted, paces)
        budget = Budget(most, num_prefill, prompts_first=self._policy.prompts_first)
        if num_shares > 1:
            num_prompt_tokens = sum(group.spec.num_tokens for group in prefilling)
            budget = budget.of_launch(num_shares, num_decoding, num_prompt_tokens)
        ready = with_grammar_ready(self._steps.ready(running))
        num_blocks = self._state.pool.num_available + self._preemption.num_leaving_blocks
        return plan_step(ready, num_blocks, budget)

    def _paces(self, running: Sequence[SequenceGroup]) -> Iterator[Pace]:
        """Paces of the decoding sequences at the end of what is in flight; none without a
        target."""
        rule = self._policy.local_prefill.gap_rule
        if rule is None or rule.tpot_s is None:
            return
        now_s = self._state.clock() + self._steps.in_flight_s()
        for group in running:
            if isinstance(group, WorkerSequence) and not group.is_prefilling:
                yield group.pace(now_s, kept_tpot_s(rule.tpot_s, group.spec.slo))

    # Commands

    def _apply(self, command: Command) -> None:  # noqa: PLR0912, one arm per command
        match command:
            case Open():
                self._admission.open(command, self._policy)
            case StreamCommand(stream, handle, Abort()):
                self._give_up(stream, handle)
            case StreamCommand():
                if isinstance(command.command, Pause):
                    self._steps.collect()
                self._handoffs.apply(command)
            case StreamClosed(stream):
                self._admission.cancel_queued_of(stream)
                for group in [g for g in self._state.groups.values() if g.stream == stream]:
                    self._cancel(group)
            case TicketOffered(ticket_id):
                self._admission.on_offered(ticket_id)
            case TicketCommitted():
                sequence = self._admission.on_committed(command)
                if sequence and command.first_tokens:
                    self._output.produce_first_tokens(sequence, command.first_tokens)
            case TicketAborted():
                self._admission.on_aborted(command)
            case PrefixRequested(ticket_id):
                if sequence := self._admission.awaiting(ticket_id):
                    self._handoffs.serve_prefix(sequence, command)
            case SendDone():
                self._on_sent(command)
            case Drain():
                self._admission.is_draining = True
            case SetPolicy(policy, num_threads):
                self._policy = policy
                self._costs.policy = policy.local_prefill
                if self._threads:
                    self._steps.collect()
                    self._threads.use(num_threads)
                    self._costs.num_threads = self._threads.num_now
            case ListBlocks(reply):
                reply(ledger_of(self._state))
            case KnownSequences():
                self._end_orphans(command)
            case Saved() | Fetched() | Measured():
                if self._tiers:
                    self._tiers.on_report(command)
            case SwapDone():
                self._preemption.on_copied(command)
            case DeviceLost():
                # Detected by a transfer's thread; ends the worker like a failure in a step.
                raise command

    def _on_sent(self, done: SendDone) -> None:
        """Handle the end of a handoff, perhaps of a prompt that is still queued."""
        if done.error and self._admission.fail_queued(done.key, for_gateway(done.error)):
            return
        group = self._state.groups.get(done.key)
        sequence = group if isinstance(group, WorkerSequence) else None
        if sequence and sequence.stage is Stage.FETCHING and sequence.ticket_id is not None:
            self._tickets.abort(sequence.ticket_id, Cancelled.reason, "the handoff has ended")
        self._handoffs.on_done(done, sequence)

    def _end_orphans(self, known: KnownSequences) -> None:
        """End the sequences that a gateway has lost."""
        for group in orphans_of(self._state, known):
            _log.error("sequence %s is unknown to its gateway: ended", group.spec.request_id)
            self._num_orphans += 1
            self._cancel(group)
        self._num_orphans += self._admission.cancel_queued_of(known.stream, known.handles)

    def _give_up(self, stream: int, handle: int) -> None:
        """End a sequence, or one choice before the fork. Unknown handles are ignored."""
        if self._admission.cancel_queued((stream, handle)):
            return
        group = self._state.groups.get((stream, handle)) or self._state.group_of(stream, handle)
        if isinstance(group, WorkerSequence) and handle - group.handle in group.choices:
            group.choices.remove(handle - group.handle)
            if not group.choices:
                self._cancel(group)
        elif isinstance(group, BeamGroup):
            self._cancel(group)

    def _cancel(self, group: SequenceGroup) -> None:
        """End a sequence that no client waits for."""
        if isinstance(group, WorkerSequence):
            message = "the gateway gave the request up"
            if group.ticket_id is not None:
                self._tickets.abort(group.ticket_id, Cancelled.reason, message)
            self._handoffs.cancel(group, Cancelled.reason, message)
        self._state.leave(group)

    def _load(self) -> WorkerLoad:
        state, admission = self._state, self._admission
        running = state.in_stage(Stage.RUNNING)
        num_prefilling_tokens = sum(g.num_missing_tokens for g in running if g.is_prefilling)
        num_open_tickets = admission.num_awaiting_kv + self._handoffs.num_rejected
        return WorkerLoad(
            num_steps=self._steps.num_steps,
            num_running=len(running),
            num_waiting=len(state.groups)
            - len(running)
            - admission.num_awaiting_kv
            + admission.num_queued,
            num_pending_tokens=num_prefilling_tokens + admission.num_queued_tokens,
            blocks=state.pool.counts(),
            window_slots=state.pool.slot_counts(),
            num_open_tickets=num_open_tickets,
            num_orphan_sequences=self._num_orphans,
            num_orphan_blocks=num_orphan_blocks(state.pool, state.leases),
            is_draining=admission.is_draining,
            num_swaps=state.swap.num_swaps,
            local_prefill_threshold=admission.local_prefill_threshold,
            role=self._policy.role,
            prefill_tokens_per_s=self._costs.prefill_tokens_per_s(
                state.num_decoding, self._limits.max_num_batched_tokens
            ),
            num_host_blocks=admission.num_host_blocks,
            kv_tiers=self._tiers.loads() if self._tiers else (),
            is_colocated=self._policy.is_colocated,
            num_threads=self._threads.num_now if self._threads else 0,
            costs=self._costs.of_steps(),
        )
