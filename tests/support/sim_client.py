"""A minimal gateway over simulated workers: places each request, again and again until all its
choices have ended."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from baton.commands import Abort, HandOff, Pause, Resume
from baton.events import (
    Committed,
    Deferred,
    Failed,
    LocalPrefill,
    NotHandedOff,
    Offered,
    Paused,
    Preempted,
    Prefilled,
    Tokens,
)
from baton.types import FinishReason, KvSource, SequenceSpec
from tests.support.sim_tiers import SimDecode, SimPrefill
from worker_core.commands import StreamCommand


class Choice(NamedTuple):
    """One output of one request."""

    request_id: str
    choice: int


@dataclass
class Stay:
    """A sequence, or one choice of it, on a decode worker. first: the handle of the sequence it is
    part of."""

    spec: SequenceSpec
    owner: SimDecode
    first: int
    group: SequenceSpec
    has_parted: bool = False
    moves_from: int | None = None
    is_moving: bool = False

    @property
    def choice(self) -> Choice:
        return Choice(self.spec.request_id, self.spec.choice)


@dataclass
class SimClient:
    rng: random.Random
    prefills: list[SimPrefill]
    decodes: list[SimDecode]
    move_rate: float = 0.0
    now: float = 0.0
    waiting: list[SequenceSpec] = field(default_factory=list)
    live: dict[int, Stay] = field(default_factory=dict)
    outputs: dict[Choice, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    scores: dict[Choice, float] = field(default_factory=dict)
    finished: dict[Choice, FinishReason] = field(default_factory=dict)
    failed: dict[str, Failed] = field(default_factory=dict)
    prompt_logprobs: dict[str, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    num_drafts: int = 0
    num_accepted: int = 0
    num_fetched: int = 0
    next_handle: int = 0

    def place(
        self,
        spec: SequenceSpec,
        worker: SimDecode | None = None,
        source: KvSource = KvSource.PREFILL,
        moves_from: int | None = None,
    ) -> None:
        worker = worker or self.rng.choice(self.wide_enough(spec))
        first = self.next_handle + 1
        self.next_handle += spec.num_choices
        for offset in range(spec.num_choices):
            stay = Stay(spec.choice_alone(offset), worker, first, spec, moves_from=moves_from)
            self.live[first + offset] = stay
        worker.open(0, first, spec, source)

    def wide_enough(self, spec: SequenceSpec) -> list[SimDecode]:
        """The decode workers that run so many choices or beams at once; of none, the gateway
        refuses the request."""
        return [w for w in self.decodes if w.shape.max_num_seqs >= spec.width]

    def cancel(self) -> None:
        """Give up one choice, or a whole beam search."""
        given_up = self.live[self.rng.choice(sorted(self.live))]
        for handle, stay in list(self.live.items()):
            is_same_request = stay.spec.request_id == given_up.spec.request_id
            if stay.choice == given_up.choice or (given_up.spec.sampling.beam and is_same_request):
                self.finished[stay.choice] = FinishReason.NONE
                self.abort(handle)

    def abort(self, handle: int) -> None:
        stay = self.live.pop(handle)
        stay.owner.submit(StreamCommand(0, handle, Abort()))
        if not any(other.first == stay.first for other in self.live.values()):
            for worker in self.prefills:
                for offset in range(stay.group.num_choices):
                    worker.submit(StreamCommand(0, stay.first + offset, Abort()))

    def move(self) -> None:
        movable = sorted(h for h, s in self.live.items() if s.has_parted and not s.is_moving)
        if movable:
            handle = self.rng.choice(movable)
            self.live[handle].is_moving = True
            self.live[handle].owner.submit(StreamCommand(0, handle, Pause()))

    def step_decode(self, worker: SimDecode) -> None:
        for addressed in worker.step().events:
            self.seen.add(type(addressed.event).__name__)
            stay = self.live.get(addressed.handle)
            if stay is not None:
                self.take(addressed.handle, stay, addressed.event)
            elif not isinstance(addressed.event, Tokens):
                self.take_for_group(addressed.handle, addressed.event)

    def take_for_group(self, first: int, event: object) -> None:
        """Choice 0 was given up, but what happens to the sequence comes under its handle."""
        others = [(h, s) for h, s in self.live.items() if s.first == first and not s.has_parted]
        if others:
            self.take(*others[0], event)

    def take(self, handle: int, stay: Stay, event: object) -> None:  # noqa: PLR0912, one arm per event
        spec = stay.spec
        match event:
            case Offered(ticket) if stay.moves_from is not None:
                owner = self.live[stay.moves_from].owner
                owner.submit(StreamCommand(0, stay.moves_from, HandOff(ticket)))
            case Offered(ticket):
                worker = self.rng.choice(self.prefills)
                worker.open(0, stay.first, stay.group, send_to=ticket)
            case Tokens(token_index, samples, finish):
                stay.has_parted = True
                self.num_drafts += event.num_draft_tokens
                self.num_accepted += event.num_accepted_tokens
                if event.score is not None:
                    self.scores[stay.choice] = event.score
                for index, sample in enumerate(samples, start=token_index):
                    self.put(stay, index, sample.token_id)
                if finish is not FinishReason.NONE:
                    self.end(handle, finish)
            case Deferred() | Preempted():
                self.return_to_queue(handle)
            case Paused():
                others = [worker for worker in self.decodes if worker is not stay.owner]
                target = self.rng.choice(others or self.decodes)
                source = KvSource.HANDOFF
                self.place(self.resumed(stay), target, source, moves_from=handle)
            case Committed() if stay.moves_from is not None:
                # The stay there is over, though its end was not reported yet.
                del self.live[stay.moves_from]
                stay.moves_from = None
            case NotHandedOff():
                for other in [h for h, s in self.live.items() if s.moves_from == handle]:
                    self.abort(other)
                self.resume(handle)
            case LocalPrefill() if stay.moves_from in self.live and stay.moves_from is not None:
                self.abort(stay.moves_from)
                stay.moves_from = None
            case Prefilled():
                self.check_prefilled(spec, event)
            case Failed():
                for member in self.together_with(handle):
                    del self.live[member]
                if stay.moves_from is None:
                    self.failed[spec.request_id] = event
                else:
                    self.resume(stay.moves_from)

    def resume(self, handle: int) -> None:
        """The move came to nothing."""
        if stay := self.live.get(handle):
            stay.is_moving = False
            stay.owner.submit(StreamCommand(0, handle, Resume()))

    def return_to_queue(self, handle: int) -> None:
        """Its sequence is gone from the worker: what has no tokens goes together, all else
        alone."""
        stay = self.live[handle]
        if stay.moves_from is not None:
            del self.live[handle]
            self.resume(stay.moves_from)
            return
        stays = [self.live.pop(member) for member in self.together_with(handle)]
        if len(stays) == stay.group.num_choices and not any(self.outputs[s.choice] for s in stays):
            self.waiting.append(stay.group)
        else:
            self.waiting += [self.resumed(s) for s in stays]

    def together_with(self, handle: int) -> list[int]:
        """The handles of all choices that are one sequence with this one; itself alone, once they
        have parted."""
        stay = self.live[handle]
        if stay.has_parted:
            return [handle]
        return [other for other, s in self.live.items() if s.first == stay.first]

    def end(self, handle: int, finish: FinishReason) -> None:
        self.finished[self.live[handle].choice] = finish
        del self.live[handle]

    def step_prefill(self, worker: SimPrefill) -> None:
        for addressed in worker.step().events:
            handle, event = addressed.handle, addressed.event
            self.seen.add(type(event).__name__)
            first = self.live[handle].first if handle in self.live else handle
            group = [h for h, s in self.live.items() if s.first == first]
            match event:
                case Failed() if group:
                    self.failed[self.live[group[0]].spec.request_id] = event
                    for member in group:
                        self.abort(member)
                case NotHandedOff() | Deferred() | Preempted():
                    raise AssertionError(f"{event} of a prefill worker that nobody disturbs")
                case Prefilled() if group:
                    self.num_fetched += event.num_fetched_tokens
                    self.check_prefilled(self.live[group[0]].group, event)
                case Tokens(token_index, (sample,), finish) if handle in self.live:
                    self.take_first(handle, token_index, sample.token_id, finish)

    def check_prefilled(self, spec: SequenceSpec, event: Prefilled) -> None:
        num_known = event.num_cached_tokens + event.num_fetched_tokens
        num_computed = sum(chunk.num_tokens for chunk in event.chunks)
        assert num_known + num_computed == spec.num_tokens
        if event.prompt_logprobs:
            self.prompt_logprobs[spec.request_id] = len(event.prompt_logprobs)

    def take_first(
        self, handle: int, token_index: int, token_id: int, finish: FinishReason
    ) -> None:
        stay = self.live[handle]
        self.put(stay, token_index, token_id)
        if finish is not FinishReason.NONE:
            stay.owner.submit(StreamCommand(0, handle, Abort()))
            self.end(handle, finish)

    def put(self, stay: Stay, index: int, token_id: int) -> None:
        assert self.outputs[stay.choice].setdefault(index, token_id) == token_id

    def resumed(self, stay: Stay) -> SequenceSpec:
        known = self.output_of(stay.choice)
        return stay.spec.choice_alone(0, tuple(known[len(stay.spec.output_token_ids) :]))

    def output_of(self, choice: Choice) -> list[int]:
        output = self.outputs[choice]
        return [output[index] for index in range(len(output))]

    def check_integrity(self) -> None:
        for worker in (*self.prefills, *self.decodes):
            worker.pool.check_integrity()

    def run(self, num_cancels: int = 0, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            self.now += 0.01
            if not self.live and not self.waiting:
                break
            if self.waiting and self.rng.random() < 0.5:
                self.place(self.waiting.pop(0))
            if num_cancels and self.live and self.rng.random() < 0.02:
                num_cancels -= 1
                self.cancel()
            if self.rng.random() < self.move_rate:
                self.move()
            if self.rng.random() < 0.6:
                self.step_decode(self.rng.choice(self.decodes))
            else:
                self.step_prefill(self.rng.choice(self.prefills))
            self.check_integrity()
        else:
            pytest.fail(f"no end: {len(self.live)} live, {len(self.waiting)} waiting")

    def quiet(self) -> None:
        """A few more rounds for aborts to settle; then nothing may be held by anyone."""
        for _ in range(4):
            for decoder in self.decodes:
                while decoder.swap_runner.run():
                    pass
                self.step_decode(decoder)
            for prefiller in self.prefills:
                self.step_prefill(prefiller)
        for worker in (*self.prefills, *self.decodes):
            assert worker.pool.counts().leased == 0
            worker.pool.check_integrity()
            assert worker.sender.num_open == 0
            assert worker.tickets.num_open == 0
        assert all(decoder.swap.num_bytes == 0 for decoder in self.decodes)
