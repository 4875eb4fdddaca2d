"""A worker of a simulated fleet: the real scheduler, costs and policies around steps that take as
long as `StepCosts` say.

What a core does beside these is left out: engines, tickets, tokens. While nothing but decoding is
to be done, steps are taken at once, up to the next end of a sequence; what comes in between cuts
them short at the end of a step.
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from baton.types import KvLayout, NumericsClass, Rank, SequenceSpec, StepCosts, Tier, WorkerLoad
from bench.fleet.cache import Blocks
from engine.interface import EngineSpec
from worker_core.costs import Costs
from worker_core.gap_rule import Pace
from worker_core.policy import Policy
from worker_core.scheduler import Budget, plan_step

MAX_MODEL_LEN = 1 << 20


@dataclass(frozen=True, slots=True)
class Hardware:
    """One worker. costs: of its steps, as workers publish them. host_s: between two steps.
    transfer_s, wire_bytes_per_s: of a handoff after the last chunk, and of that chunk.
    token_bytes: KV of a token."""

    costs: StepCosts
    host_s: float = 0.0005
    transfer_s: float = 0.003
    wire_bytes_per_s: float = 40e9
    token_bytes: int = 65_536
    num_blocks: int = 60_000
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048

    @property
    def spec(self) -> EngineSpec:
        """An engine of such workers."""
        layout = KvLayout("simulated", 1, 1, 1, "float16", self.block_size)
        numerics = NumericsClass("simulated", dtype="none")
        return EngineSpec(
            "simulated", layout, self.num_blocks, 1000, MAX_MODEL_LEN, numerics=numerics
        )

    def step_s(self, num_decoding: int, num_prompt: int) -> float:
        costs = self.costs
        seconds = costs.step_s + costs.sequence_s * num_decoding if num_decoding else 0.0
        if num_prompt:
            # A step that decodes has read the weights already.
            weights_s = max(costs.step_s, costs.prompt_s)
            seconds += weights_s - (costs.step_s if num_decoding else 0.0)
            seconds += costs.token_s * num_prompt
        return seconds


@dataclass(slots=True, eq=False)
class Running:
    """Implements worker_core.scheduler.Schedulable.

    names: of the prompt's pieces. num_tokens: prompt and output so far. num_left: tokens to come.
    on_stray: called after each step in which it decodes on a prefill worker.
    is_leaving: whether it goes on elsewhere after its first token. is_over: whether it was given
    up. since_s: when the worker got it. Times in seconds.
    """

    spec: SequenceSpec
    rank: Rank
    names: Sequence[int]
    num_tokens: int
    num_left: int
    blocks: Blocks
    on_first: Callable[[float], None]
    on_end: Callable[[float], None]
    on_stray: Callable[[WorkerModel], None]
    is_leaving: bool = False
    is_over: bool = False
    since_s: float = 0.0
    num_computed: int = 0
    num_held: int = 0
    begun_s: float = 0.0
    num_begun: int = 0
    min_new_tokens: int = field(default=1, init=False)

    @property
    def num_missing_tokens(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_prefilling(self) -> bool:
        return self.num_tokens - self.num_computed > 1

    @property
    def num_exclusive_blocks(self) -> int:
        return self.num_held

    def num_blocks_to_write(self, num_new: int) -> int:
        return max(0, self.blocks.num_for(self.num_computed + num_new) - self.num_held)

    def grow(self, num_new: int) -> None:
        """Compute so many more tokens."""
        number = self.num_blocks_to_write(num_new)
        self.num_computed += num_new
        if number:
            self.num_held += number
            self.blocks.lease(number)

    def pace(self, now_s: float, tpot_s: float) -> Pace:
        due_s = self.begun_s + tpot_s * (self.num_tokens + 1 - self.num_begun)
        return Pace(due_s - now_s, self.num_left, tpot_s)


class WorkerModel:
    """One worker."""

    def __init__(
        self,
        name: str,
        hardware: Hardware,
        policy: Policy,
        piece_tokens: int,
        report: Callable[[str, WorkerLoad], None],
    ) -> None:
        self.name = name
        self.hardware = hardware
        self.policy = policy
        self.blocks = Blocks(hardware.num_blocks, hardware.block_size, piece_tokens)
        self.costs = Costs(policy.local_prefill, hardware.token_bytes)
        self.costs.num_threads = 0
        self._report = report
        self._loop = asyncio.get_running_loop()
        self.running: list[Running] = []
        """By rank."""
        self._queued: list[Running] = []
        """Prompts without blocks, by rank."""
        self._arrived: list[Running] = []
        """KV came during a step; they decode from the next one on."""
        self.num_awaiting = 0
        """Sequences with blocks for KV that is to come."""
        self._timer: asyncio.Handle | None = None
        """End of what runs now; None while there is nothing to do."""
        self._planned_s = 0.0
        """When the next step was launched: as the last one began, with what had come by then."""
        self._decoding: tuple[float, float, int] | None = None
        """Start, seconds and number of steps that only decode."""
        self._ended_s: float | None = None
        """End of the last step, if it decoded."""
        self.is_lost = False
        self.report()

    # What the gateway asks for

    def set_policy(self, policy: Policy) -> None:
        self.policy = policy
        self.costs.policy = policy.local_prefill
        self._interrupt()
        self.report()

    def reserve(self, num_tokens: int) -> int | None:
        """Hold blocks for KV that is to come; their number, or None without room."""
        number = self.blocks.num_for(num_tokens + 1)
        is_full = len(self.running) + self.num_awaiting >= self.hardware.max_num_seqs
        if is_full or number > self.blocks.num_available:
            return None
        self.blocks.lease(number)
        self.num_awaiting += 1
        return number

    def give_back(self, num_held: int) -> None:
        """No KV will come."""
        self.num_awaiting -= 1
        self.blocks.release(num_held, ())

    def commit(self, sequence: Running, num_held: int) -> None:
        """The KV that blocks were reserved for has come."""
        sequence.blocks, sequence.num_held = self.blocks, num_held
        now_s = self._loop.time()
        sequence.since_s, sequence.begun_s, sequence.num_begun = now_s, now_s, sequence.num_tokens
        sequence.num_computed = sequence.num_tokens - 1
        self.blocks.hold(sequence.names)
        self._arrived.append(sequence)
        self._interrupt()

    def until_step_s(self) -> float:
        """Seconds until the next step, in which a worker looks at what came."""
        now_s = self._loop.time()
        if self._decoding:
            start_s, step_s, _ = self._decoding
            period_s = step_s + self.hardware.host_s
            return period_s - (now_s - start_s) % period_s
        return self._timer.when() - now_s if isinstance(self._timer, asyncio.TimerHandle) else 0.0

    def open(self, sequence: Running) -> None:
        """Compute a prompt."""
        sequence.since_s = self._loop.time()
        insort(self._queued, sequence, key=_rank_of)
        self._interrupt()

    def take_out(self, sequence: Running) -> None:
        """Stop running a sequence."""
        self.running.remove(sequence)
        self._release(sequence)

    def drop(self, sequence: Running) -> None:
        """Stop serving a sequence, running or queued."""
        if sequence in self._queued:
            self._queued.remove(sequence)
        else:
            self.take_out(sequence)

    def lose(self) -> None:
        """End with all that it has; it does nothing more."""
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()

    # Steps

    def _interrupt(self) -> None:
        """Begin a step, or let steps that only decode end early."""
        if self._timer is None:
            self._timer = self._loop.call_soon(self._step)
        elif self._decoding:
            start_s, step_s, number = self._decoding
            period_s = step_s + self.hardware.host_s
            # The next step is launched already.
            done = min(number, int((self._loop.time() - start_s) / period_s) + 2)
            if done < number:
                self._timer.cancel()
                self._decode_until(start_s, step_s, done)

    def _step(self) -> None:
        self._timer = None
        is_behind = self._admit()
        running = self.running
        if not running:
            self._ended_s = None
            self.report()
            return
        self._planned_s = now_s = self._loop.time()
        prefilling = [sequence for sequence in running if sequence.is_prefilling]
        num_decoding = len(running) - len(prefilling)
        if not prefilling and (number := self._num_steps()):
            if is_behind:
                number = 1
            self._decode_until(now_s, self.hardware.step_s(num_decoding, 0), number)
            return
        most = self.hardware.max_num_batched_tokens
        num_wanted = prefilling[0].num_missing_tokens if prefilling else 0
        num_prefill = self.costs.max_prefill_tokens(
            num_decoding, most, num_wanted, self._paces(now_s)
        )
        budget = Budget(most, num_prefill, prompts_first=self.policy.prompts_first)
        plan = plan_step(running, self.blocks.num_available, budget)
        for sequence in plan.preempted:
            self.take_out(sequence)
            sequence.num_computed = sequence.num_held = sequence.num_begun = 0
            insort(self._queued, sequence, key=_rank_of)
        num_prompt = sum(number for s, number in plan.grants if s.is_prefilling)
        num_decoding = sum(not s.is_prefilling for s, _ in plan.grants)
        seconds = self.hardware.step_s(num_decoding, num_prompt)
        self._timer = self._loop.call_at(
            now_s + seconds, self._end_step, plan.grants, num_prompt, seconds
        )

    def _paces(self, now_s: float) -> Iterator[Pace]:
        rule = self.policy.local_prefill.gap_rule
        if rule is not None and rule.tpot_s is not None:
            for sequence in self.running:
                if not sequence.is_prefilling:
                    yield sequence.pace(now_s, rule.tpot_s)

    def _num_steps(self) -> int:
        """Steps until a sequence ends or begins its answer, as far as there are blocks."""
        number = min(s.num_left if s.num_begun else 1 for s in self.running)
        while number and self._num_written(number) > self.blocks.num_available:
            number //= 2
        return number

    def _num_written(self, num_steps: int) -> int:
        if num_steps * len(self.running) <= self.blocks.num_available:
            return 0  # at most a block each and step
        return sum(sequence.num_blocks_to_write(num_steps) for sequence in self.running)

    def _decode_until(self, start_s: float, step_s: float, number: int) -> None:
        self._decoding = start_s, step_s, number
        end_s = start_s + number * step_s + (number - 1) * self.hardware.host_s
        self._timer = self._loop.call_at(end_s, self._end_decoding)

    def _end_decoding(self) -> None:
        if self._decoding is None:
            return
        start_s, step_s, number = self._decoding
        self._decoding = None
        self._planned_s = start_s + (number - 1) * (step_s + self.hardware.host_s)
        num_decoding = len(self.running)
        for sequence in [*self.running]:
            sequence.grow(number)
            self._add_tokens(sequence, number, self._loop.time())
        self.costs.observe_step(num_decoding, 0, step_s)
        gap_s = step_s + (self.hardware.host_s if number > 1 or self._ended_s else 0.0)
        self.costs.observe_gaps(num_decoding, 0, gap_s)
        self._end(self._loop.time(), has_decoded=True)

    def _end_step(
        self, grants: Sequence[tuple[Running, int]], num_prompt: int, seconds: float
    ) -> None:
        now_s = self._loop.time()
        num_decoding = sum(not sequence.is_prefilling for sequence, _ in grants)
        for sequence, number in grants:
            if sequence.num_held == 0:
                continue  # taken out meanwhile
            sequence.grow(number)
            if not sequence.num_missing_tokens:
                self._add_tokens(sequence, 1, now_s)
        self.costs.observe_step(num_decoding, num_prompt, seconds)
        if num_decoding:
            before_s = self._ended_s
            gap_s = now_s - before_s if before_s is not None else seconds
            self.costs.observe_gaps(num_decoding, num_prompt, gap_s)
        self._end(now_s, has_decoded=num_decoding > 0)

    def _add_tokens(self, sequence: Running, number: int, now_s: float) -> None:
        sequence.num_tokens += number
        sequence.num_left -= number
        if not sequence.num_begun:
            self._begin_answer(sequence, now_s)

    def _begin_answer(self, sequence: Running, now_s: float) -> None:
        self.blocks.hold(sequence.names)
        sequence.begun_s, sequence.num_begun = now_s, sequence.num_tokens
        if sequence.is_leaving:
            self.running.remove(sequence)
            self._release(sequence)
        sequence.on_first(now_s)

    def _end(self, now_s: float, *, has_decoded: bool) -> None:
        self._ended_s = now_s if has_decoded else None
        ended = [sequence for sequence in self.running if sequence.num_left <= 0]
        for sequence in ended:
            self.take_out(sequence)
        self.report()
        for sequence in ended:
            sequence.on_end(now_s)
        if self.policy.role is Tier.PREFILL:
            for sequence in [s for s in self.running if not s.is_prefilling]:
                sequence.on_stray(self)
        self._timer = self._loop.call_later(self.hardware.host_s, self._step)

    def _release(self, sequence: Running) -> None:
        self.blocks.release(sequence.num_held, sequence.names if sequence.num_begun else ())
        sequence.num_held = 0

    def _admit(self) -> bool:
        """Take what came before the step was launched, and give blocks to queued prompts, best rank
        first. With nothing to launch, the step waited for what came later. Return whether something
        came later."""
        until_s = self._planned_s if self.running else self._loop.time()
        for sequence in [s for s in self._arrived if s.since_s <= until_s]:
            self._arrived.remove(sequence)
            insort(self.running, sequence, key=_rank_of)
            self.num_awaiting -= 1
        is_behind = bool(self._arrived)
        for sequence in [*self._queued]:
            if sequence.since_s > until_s:
                is_behind = True
                continue
            num_places = len(self.running) + self.num_awaiting
            number = self.blocks.num_for(sequence.num_tokens + 1)
            if num_places >= self.hardware.max_num_seqs or number > self.blocks.num_available:
                break
            self._queued.remove(sequence)
            num_tokens = sequence.num_tokens
            sequence.num_computed = self.blocks.matched_tokens(sequence.names, num_tokens)
            sequence.blocks, sequence.num_held = self.blocks, number
            self.blocks.lease(number)
            insort(self.running, sequence, key=_rank_of)
        return is_behind

    def report(self) -> None:
        prefilling = [sequence for sequence in self.running if sequence.is_prefilling]
        num_decoding = len(self.running) - len(prefilling)
        costs, most = self.costs, self.hardware.max_num_batched_tokens
        load = WorkerLoad(
            num_running=len(self.running),
            num_waiting=len(self._queued),
            num_pending_tokens=sum(s.num_missing_tokens for s in prefilling)
            + sum(s.num_tokens for s in self._queued),
            blocks=self.blocks.counts(),
            num_open_tickets=self.num_awaiting,
            local_prefill_threshold=costs.local_prefill_threshold(num_decoding),
            role=self.policy.role,
            prefill_tokens_per_s=costs.prefill_tokens_per_s(num_decoding, most),
            is_colocated=self.policy.is_colocated,
            costs=costs.of_steps(),
        )
        self._report(self.name, load)


def _rank_of(sequence: Running) -> Rank:
    return sequence.rank
