"""The prefill tier's state: prompts come in, are computed chunk by chunk, and their KV goes out as it is produced.

One step: take commands, give waiting prompts their blocks, share the token budget, run, send. KV of a chunk goes to the
sender after the chunk's step, so that it travels while the next one is computed; of a prompt's last chunk it goes
out layer group by layer group, during the step. The first token is told before the transfer ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.cache.ledger import ListBlocks
from baton.cache.pool import BlockPool
from baton.engine.admission import refusal
from baton.engine.guard import SliceOutcome, forward_guarded
from baton.engine.interface import Batch, Engine, SequenceSlice
from baton.engine.kv_range import KvRange
from baton.engine.loop import Step
from baton.engine.rows import num_scored_rows, wants_prompt_logprobs
from baton.errors import (
    BatonError,
    Cancelled,
    Draining,
    EngineFault,
    HandoffFailed,
    RetriableError,
)
from baton.grammar import Matchers, with_grammar_ready
from baton.types import FinishReason, Sample, SequenceSpec, finish_reason
from kv_transfer.kv_sender import KvSender
from kv_transfer.sender import SendDone
from kv_transfer.ticket import TicketCommitted, TicketDead
from kv_transfer.tickets import Tickets
from prefill_svc.borrowing import BorrowCosts, Borrowing
from prefill_svc.commands import (
    Abort,
    Drain,
    FirstToken,
    HandoffEnded,
    PrefillCommand,
    Prefilled,
    PrefillEvent,
    PrefillFailed,
    Submit,
)
from prefill_svc.job import ChunkTime, PrefillJob, Stage
from prefill_svc.reports import ledger_of, load_of
from prefill_svc.scheduler import share_budget


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class PrefillDevices:
    """What the core works with. tickets: of KV that is lent to this worker. clock: monotonic seconds.

    beat: called with a step's number of tokens, before it and at every group of layers within it.
    """

    engine: Engine
    pool: BlockPool
    sender: KvSender
    tickets: Tickets
    costs: BorrowCosts
    matchers: Matchers
    clock: Callable[[], float]
    beat: Callable[[int], None] = lambda _num_tokens: None


class PrefillCore:
    """Implements baton.engine.loop.Core."""

    def __init__(self, devices: PrefillDevices, limits: PrefillLimits) -> None:
        self._beat = devices.beat
        self._engine = devices.engine
        self._pool = devices.pool
        self._sender = devices.sender
        self._limits = limits
        self._matchers = devices.matchers
        self._clock = devices.clock
        self._borrowing = Borrowing(devices.tickets, devices.sender, devices.costs, devices.clock)
        self._jobs: dict[str, PrefillJob] = {}
        # Ends of handoffs whose prompt is still on its way here: a ticket is presented before its prompt is submitted.
        self._early_ends: dict[str, SendDone] = {}
        self._events: list[PrefillEvent] = []
        self._num_steps = 0
        self._is_draining = False

    def step(self, commands: Sequence[PrefillCommand]) -> Step[PrefillEvent]:
        self._sender.heartbeat()
        self._borrowing.expire()
        for command in commands:
            self._obey(command)
        has_run = self._run()
        events, self._events = self._events, []
        load = load_of(
            self._pool, self._jobs.values(), self._num_steps, is_draining=self._is_draining
        )
        return Step(events, load, is_idle=not has_run)

    # Commands

    def _obey(self, command: PrefillCommand) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Abort(key):
                self._give_up(key, Cancelled("the gateway gave the prompt up"))
            case SendDone():
                self._finish_handoff(command)
            case TicketCommitted() | TicketDead():
                self._settle_loan(command)
            case Drain():
                self._is_draining = True
            case ListBlocks(reply):
                reply(ledger_of(self._pool, self._jobs.values()))

    def _submit(self, command: Submit) -> None:
        spec = command.spec
        job = self._jobs[command.key] = PrefillJob(
            key=command.key,
            spec=spec,
            has_ticket=bool(command.ticket),
            num_held_tokens=command.num_held_tokens,
            arrived_s=self._clock(),
        )
        if done := self._early_ends.pop(command.key, None):
            self._finish_handoff(done)
        elif error := self._refusal(spec):
            self._fail(job, error)
        else:
            job.order = self._matchers.order(spec.sampling)

    def _refusal(self, spec: SequenceSpec) -> BatonError | None:
        if self._is_draining:
            return Draining("this prefill worker takes no more prompts")
        return refusal(spec, self._engine.spec)

    def _fail(self, job: PrefillJob, error: BatonError) -> None:
        """There will be no first token."""
        self._events.append(PrefillFailed(job.key, error))
        self._give_up(job.key, error)

    def _give_up(self, key: str, error: BatonError) -> None:
        """End a job from our side. The sender, if it knows the job, has the last word on its blocks."""
        job = self._jobs.get(key)
        if job is None or job.stage is Stage.CLOSING:
            return
        if not job.has_ticket:
            self._forget(job)
            return
        job.stage = Stage.CLOSING
        self._borrowing.give_up(job)
        self._sender.abort(key, error.reason, error.message)

    def _finish_handoff(self, done: SendDone) -> None:
        job = self._jobs.get(done.key)
        if job is None:
            self._early_ends[done.key] = done
            return
        error = done.error and _as_told(done.error)
        if job.stage is Stage.SENDING:
            self._events.append(HandoffEnded(job.key, error))
        elif error and job.stage is not Stage.CLOSING:
            self._events.append(PrefillFailed(job.key, error))
        job.is_sent = True
        if job.borrow_ticket_id is None:
            self._forget(job)
        else:
            job.stage = Stage.CLOSING
            self._borrowing.give_up(job)

    def _settle_loan(self, end: TicketCommitted | TicketDead) -> None:
        """What was asked for is here, or will not come: the prompt goes on, unless it was given up."""
        job = self._borrowing.settle(end)
        if job.stage is Stage.BORROWING:
            job.stage = Stage.COMPUTING
        elif job.is_sent:
            self._forget(job)

    # One step of the batch

    def _run(self) -> bool:
        """Whether there was anything to run."""
        self._start_waiting()
        computing = [job for job in self._jobs.values() if job.stage is Stage.COMPUTING]
        most = self._limits.max_num_batched_tokens
        grants, slices = self._sliced(share_budget(with_grammar_ready(computing), most))
        if not grants:
            return False
        batch = Batch(tuple(slices))
        num_tokens = batch.num_tokens
        last_chunks = [grant for grant in grants if grant[0].num_missing_tokens == grant[1]]

        def send_layers(first_layer: int, num_layers: int) -> None:
            self._beat(num_tokens)
            self._sender.heartbeat()
            for job, num_new in last_chunks:
                self._send_layers(job, num_new, first_layer, num_layers)

        self._beat(num_tokens)
        begin_s = self._clock()
        outcomes = forward_guarded(self._engine, batch, send_layers)
        end_s = self._clock()
        self._num_steps += 1
        self._borrowing.costs.observe_step(num_tokens, end_s - begin_s)
        for (job, num_new), outcome in zip(grants, outcomes, strict=True):
            job.chunks.append(ChunkTime(begin_s, end_s, num_new))
            self._advance(job, num_new, outcome)
        return True

    def _sliced(
        self, granted: Sequence[tuple[PrefillJob, int]]
    ) -> tuple[list[tuple[PrefillJob, int]], list[SequenceSlice]]:
        """Slices of what was granted, but for prompts whose first token no grammar allows: those fail."""
        grants: list[tuple[PrefillJob, int]] = []
        slices: list[SequenceSlice] = []
        for job, num_new in granted:
            is_last = num_new == job.num_missing_tokens
            try:
                part = job.next_slice(num_new, job.allowed_first() if is_last else None)
            except EngineFault as error:
                self._fail(job, error)
            else:
                grants.append((job, num_new))
                slices.append(part)
        return grants, slices

    def _start_waiting(self) -> None:
        """Give blocks to waiting prompts, in order of rank, until they or the places in a batch run out."""
        num_computing = sum(
            job.stage in (Stage.BORROWING, Stage.COMPUTING) for job in self._jobs.values()
        )
        waiting = [job for job in self._jobs.values() if job.stage is Stage.WAITING]
        num_places = self._limits.max_num_seqs - num_computing
        for job in heapq.nsmallest(num_places, waiting, key=lambda job: job.rank):
            spec = job.spec
            lease = self._pool.lease(
                spec.tenant,
                spec.token_ids,
                spec.num_tokens,
                shares_prefixes=self._engine.spec.shares_prefixes(len(spec.prompt_token_ids))
                and not wants_prompt_logprobs(spec),
            )
            if lease is None:
                return
            job.lease = lease
            job.started_s = self._clock()
            job.num_cached_tokens = job.num_computed_tokens = lease.num_cached_tokens
            job.stage = Stage.BORROWING if self._borrowing.begin(job) else Stage.COMPUTING
            self._send(
                job, KvRange(0, job.num_cached_tokens, 0, self._engine.spec.layout.num_layers)
            )

    def _advance(self, job: PrefillJob, num_new: int, outcome: SliceOutcome) -> None:
        if isinstance(outcome, BatonError):
            self._fail(job, outcome)
            return
        start = job.num_computed_tokens
        job.num_computed_tokens += num_new
        if job.lease:
            job.lease.index(job.spec.token_ids, job.num_computed_tokens)
        num_scored = num_scored_rows(job.spec, start, num_new)
        job.prompt_logprobs += [s.logprobs for s in outcome[:num_scored] if s.logprobs]
        if job.num_missing_tokens:
            self._send(job, KvRange(start, num_new, 0, self._engine.spec.layout.num_layers))
            return
        self._complete(job, outcome[num_scored:])

    def _complete(self, job: PrefillJob, samples: tuple[Sample, ...]) -> None:
        now = self._clock()
        spec = job.spec
        done = Prefilled(
            key=job.key,
            firsts=tuple(FirstToken(sample, self._finish(spec, sample)) for sample in samples),
            num_cached_tokens=job.num_cached_tokens,
            num_borrowed_tokens=job.num_borrowed_tokens,
            queue_s=job.started_s - job.arrived_s,
            compute_s=now - job.started_s,
            chunks=tuple(job.chunks),
            prompt_logprobs=tuple(job.prompt_logprobs),
        )
        self._events.append(done)
        if not job.has_ticket:
            self._forget(job)
        elif done.is_over:
            self._give_up(job.key, Cancelled("the first token ended the output"))
        else:
            job.stage = Stage.SENDING
            self._sender.commit(job.key, spec.num_tokens, samples, now)

    def _finish(self, spec: SequenceSpec, sample: Sample) -> FinishReason:
        """Whether a choice ends with its first token; beams part after it, and end at the decode worker."""
        if spec.sampling.beam:
            return FinishReason.NONE
        return finish_reason(
            sample.token_id,
            len(spec.output_token_ids) + 1,
            spec.num_tokens + 1,
            spec.sampling,
            self._engine.spec.max_model_len,
        )

    def _send_layers(
        self, job: PrefillJob, num_new: int, first_layer: int, num_layers: int
    ) -> None:
        if first_layer < job.num_sent_layers:
            return
        job.num_sent_layers = first_layer + num_layers
        self._send(job, KvRange(job.num_computed_tokens, num_new, first_layer, num_layers))

    def _send(self, job: PrefillJob, piece: KvRange) -> None:
        """Send what the destination does not hold of a piece."""
        start = max(piece.first_token, job.num_held_tokens)
        if job.has_ticket and start < piece.end_token:
            missing = replace(piece, first_token=start, num_tokens=piece.end_token - start)
            self._sender.send(job.key, job.block_ids, missing)

    def _forget(self, job: PrefillJob) -> None:
        """Give the blocks back; what was computed stays findable as a prefix until the memory is needed."""
        del self._jobs[job.key]
        if job.lease:
            job.lease.release()


def _as_told(error: BatonError) -> BatonError:
    """What a handoff's failure means to the gateway: but for our own faults, another pair of workers may do better."""
    if isinstance(error, RetriableError | EngineFault):
        return error
    return HandoffFailed(error.message)
