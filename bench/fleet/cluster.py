"""A gateway and its simulated workers, to be made inside a virtual loop.

Fleet, dispatcher with admission and router, planner: the real ones. A request's way between them is
short here: placed, computed, handed over, decoded. What a lost worker had is placed again and goes
on, its tokens so far being computed anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat

from baton.errors import BatonError
from baton.registry.lease import SoleLease
from baton.types import (
    Role,
    Sampling,
    SequenceSpec,
    Slo,
    Tier,
    WorkerIdentity,
    WorkerInfo,
)
from bench.fleet.worker import Hardware, Running, WorkerModel
from engine.plan.trace import TraceEntry
from gateway.routing.dispatcher import Dispatcher, Placing
from gateway.routing.fleet import Fleet, WorkerState
from gateway.routing.placement import Outcome, Placement, plan
from gateway.routing.planner.steering import Steering
from gateway.routing.router import Need
from tests.support.sim_load import inline
from tests.support.stub_link import StubLink
from worker_core.policy import Policy, policy_of


@dataclass(frozen=True, slots=True)
class Shape:
    """Workers, by their policies, and how they are chosen. is_planned: whether the planner gives
    them other roles."""

    policies: Sequence[Policy]
    placing: Placing = plan
    is_planned: bool = False
    max_num_batched_tokens: int | None = None
    """Of a step; None: as the hardware says."""


@dataclass(frozen=True, slots=True)
class Outage:
    """Workers that are lost at once, one of so many, and come back. Times in seconds from the start
    of the load."""

    name: str
    at_s: float
    down_s: float
    one_of: int
    first: int = 0


@dataclass(slots=True, eq=False)
class Answer:
    """What became of a request. Times in seconds; inf: never."""

    due_s: float
    num_output: int
    first_s: float = float("inf")
    end_s: float = float("inf")
    refused_s: float | None = None
    num_restarts: int = 0
    """Workers that were lost with it."""

    @property
    def is_broken(self) -> bool:
        """Whether it was begun and not finished."""
        return self.refused_s is not None and self.first_s < float("inf")

    @property
    def tpot_s(self) -> float:
        return (self.end_s - self.first_s) / max(1, self.num_output - 1)

    def is_inside(self, slo: Slo) -> bool:
        return (
            self.end_s < float("inf")
            and (slo.ttft_s is None or self.first_s - self.due_s <= slo.ttft_s)
            and (slo.tpot_s is None or self.tpot_s <= slo.tpot_s)
        )


class Cluster:
    """num_hit_tokens, num_prompt_tokens: of prompts, cached and all. num_sent_bytes: of KV that was
    handed over."""

    def __init__(
        self,
        shape: Shape,
        hardware: Hardware,
        slo: Slo,
        piece_tokens: int,
        seed: int = 0,
        max_queue_size: int = 1024,
    ) -> None:
        if shape.max_num_batched_tokens:
            most = shape.max_num_batched_tokens
            hardware = replace(hardware, max_num_batched_tokens=most)
        self.hardware, self.slo = hardware, slo
        self._loop = asyncio.get_running_loop()
        self.spec = hardware.spec
        names = [(f"w{number}:1", policy) for number, policy in enumerate(shape.policies)]
        self.fleet = Fleet(
            [name for name, policy in names if policy.role is Tier.PREFILL],
            [name for name, policy in names if policy.role is Tier.DECODE],
            slo=slo,
        )
        self.dispatcher = Dispatcher(
            self.fleet,
            max_queue_size=max_queue_size,
            key=seed.to_bytes(16, "big"),
            placing=shape.placing,
        )
        self.workers: dict[str, WorkerModel] = {}
        self.live: dict[_Request, None] = {}
        """Requests that were not answered yet."""
        self.num_hit_tokens = self.num_prompt_tokens = self.num_sent_bytes = 0
        self._piece_tokens = piece_tokens
        self._policies = dict(names)
        for name in self._policies:
            self._start(name)
        self._steering = Steering(
            self.fleet, self.dispatcher.log, SoleLease(), self._set_role, inline
        )
        self._tasks = [asyncio.create_task(self.dispatcher.run())]
        if shape.is_planned:
            self._tasks.append(asyncio.create_task(self._steering.run()))

    def _start(self, name: str) -> None:
        """Start a worker in its first role, with empty caches."""
        policy, hardware = self._policies[name], self.hardware
        info = WorkerInfo(
            WorkerIdentity(name, 1),
            policy.role,
            self.spec.model,
            self.spec.layout,
            self.spec.vocab_size,
            self.spec.max_model_len,
            self.spec.num_blocks,
            hardware.max_num_seqs,
            hardware.max_num_batched_tokens,
            policy.local_prefill.max_shared_tokens,
        )
        self.fleet.join(name, info, StubLink())
        self.workers[name] = WorkerModel(
            name, hardware, policy, self._piece_tokens, self.fleet.report, self._move
        )

    def expect(self, outages: Sequence[Outage]) -> None:
        """Lose workers at these times from now."""
        self._tasks += [asyncio.create_task(self._fail(outage)) for outage in outages]

    async def _fail(self, outage: Outage) -> None:
        await asyncio.sleep(outage.at_s)
        names = [*self.workers][outage.first :: outage.one_of]
        for name in names:
            self.workers[name].lose()
            self.fleet.leave(name, WorkerState.UNREACHABLE, "lost")
        for request in [*self.live]:
            request.on_lost(names)
        await asyncio.sleep(outage.down_s)
        for name in names:
            self._start(name)

    @property
    def num_changes(self) -> int:
        """Roles that the planner changed."""
        return self._steering.num_changes

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _set_role(self, address: str, role: Role, term: int) -> None:  # noqa: ARG002
        self.workers[address].set_policy(policy_of(role, self.spec, self.slo))

    def send(self, entry: TraceEntry, number: int, on_end: asyncio.Event) -> Answer:
        """Serve a request that arrives now."""
        request = _Request(self, entry, number, on_end)
        self.live[request] = None
        request.place(is_return=False)
        return request.outcome

    def _move(self, worker: WorkerModel, sequence: Running) -> None:
        """A prefill worker decodes: hand the sequence over if a decode worker has room."""
        num_output = sequence.num_tokens - len(sequence.spec.prompt_token_ids)
        spec = replace(sequence.spec, output_token_ids=(0,) * num_output)
        placement = self.dispatcher.place_now(spec, self.fleet.ready(Tier.DECODE))
        if placement is None:
            return
        target = self.workers[placement.owner.address]
        num_held = target.reserve(sequence.num_tokens)
        if num_held is None:
            placement.record(Outcome.REFUSED)
            placement.release()
            return
        placement.record(Outcome.RESERVED)
        worker.take_out(sequence)
        sequence.on_moved(placement)
        self.deliver(target, sequence, num_held, sequence.num_tokens - 1, 0)

    def deliver(
        self, target: WorkerModel, sequence: Running, num_held: int, num_sent: int, num_last: int
    ) -> None:
        """Send KV. num_last: tokens of it that were computed last, and hide behind no compute."""
        hardware = self.hardware
        self.num_sent_bytes += num_sent * hardware.token_bytes
        exposed_s = min(num_sent, num_last or num_sent) * hardware.token_bytes
        delay_s = hardware.transfer_s + exposed_s / hardware.wire_bytes_per_s
        self._loop.call_later(delay_s, target.commit, sequence, num_held)


class _Request:
    """One request on its way."""

    def __init__(self, cluster: Cluster, entry: TraceEntry, number: int, on_end: asyncio.Event):
        self._cluster = cluster
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._names = entry.hash_ids[: entry.num_input_tokens // entry.block_tokens]
        self.outcome = Answer(self._loop.time(), entry.num_output_tokens)
        self._spec = SequenceSpec(
            f"r{number}",
            tokens_of(entry, number),
            Sampling(max_tokens=entry.num_output_tokens),
            arrival_ns=number,
        )
        self._placement: Placement | None = None
        self._sequence: Running | None = None
        self._computing: WorkerModel | None = None
        """Worker that has the sequence; None while it waits, or its KV is under way."""
        self._held: tuple[WorkerModel, int] | None = None
        """Owner and its blocks, until the prompt is computed elsewhere."""

    def place(self, *, is_return: bool) -> None:
        need = Need.of(self._spec)
        self._cluster.dispatcher.place(self._spec, need, self._on_place, is_return=is_return)

    def _on_place(self, place: Placement | BatonError) -> None:
        if isinstance(place, BatonError):
            self.outcome.refused_s = self._loop.time() - self.outcome.due_s
            self._finish()
            return
        self._placement = place
        if not place.source:
            self._compute(place, self._cluster.workers[place.owner.address], None)
            return
        # Its owner looks at the request between two steps.
        delay_s = self._cluster.workers[place.owner.address].until_step_s()
        self._loop.call_later(delay_s, self._reserve, place, place.source.address)

    def _reserve(self, place: Placement, source: str) -> None:
        if self._placement is not place:
            return  # one of its workers was lost
        num_held = self._cluster.workers[place.owner.address].reserve(self._spec.num_tokens)
        if num_held is None:
            place.record(Outcome.REFUSED)
            place.release()
            self._placement = None
            self.place(is_return=True)
        else:
            self._compute(place, self._cluster.workers[source], num_held)

    def _compute(self, place: Placement, worker: WorkerModel, num_held: int | None) -> None:
        """num_held: blocks of the owner, if the sequence leaves after its first token."""
        place.record(Outcome.RESERVED)
        cluster, spec = self._cluster, self._spec
        cluster.num_hit_tokens += worker.blocks.matched_tokens(self._names, spec.num_tokens)
        cluster.num_prompt_tokens += spec.num_tokens
        offered_s = self._loop.time()
        sequence = Running(
            spec,
            spec.rank,
            self._names,
            spec.num_tokens,
            spec.sampling.max_tokens - len(spec.output_token_ids),
            worker.blocks,
            lambda now_s: self._on_first(sequence, num_held or 0, offered_s, now_s),
            self._end,
            self._on_moved,
            is_leaving=num_held is not None,
        )
        self._sequence, self._computing = sequence, worker
        if num_held is not None:
            self._held = self._cluster.workers[place.owner.address], num_held
        worker.open(sequence)

    def _on_moved(self, placement: Placement) -> None:
        if self._placement:
            self._placement.release()
        self._placement, self._computing = placement, None

    def on_lost(self, names: Collection[str]) -> None:
        """Workers are lost. If it was theirs, it is placed again with its tokens so far."""
        place = self._placement
        if place is None:
            return
        needed = [place.owner]
        if place.source is not None and (self._held or self._sequence is None):
            needed.append(place.source)  # it has yet to compute the prompt
        if all(worker.address not in names for worker in needed):
            return
        sequence = self._sequence
        if sequence is not None:
            if self._computing and self._computing.name not in names:
                self._computing.drop(sequence)
            num_output = sequence.num_tokens - len(self._spec.prompt_token_ids)
            self._spec = replace(self._spec, output_token_ids=(0,) * num_output)
        if self._held and self._held[0].name not in names:
            self._held[0].give_back(self._held[1])
        self._sequence = self._computing = self._held = self._placement = None
        self.outcome.num_restarts += 1
        place.release()
        self.place(is_return=True)

    def _on_first(self, sequence: Running, num_held: int, offered_s: float, now_s: float) -> None:
        place = self._placement
        if place is None:
            return
        # Later, if it is computed anew after a preemption or a loss.
        self.outcome.first_s = min(self.outcome.first_s, now_s)
        place.record(Outcome.PREFILLED)
        if not sequence.is_leaving:
            return
        sequence.is_leaving = False
        self._computing = self._held = None
        owner = self._cluster.workers[place.owner.address]
        num_prompt = self._spec.num_tokens
        num_sent = num_prompt - owner.blocks.matched_tokens(self._names, num_prompt)
        if sequence.num_left <= 0:
            owner.give_back(num_held)
            self._end(now_s)
            return
        num_last = min(num_sent, self._cluster.hardware.max_num_batched_tokens)
        self._cluster.deliver(owner, sequence, num_held, num_sent, num_last)
        owner.costs.handoff.observe(num_sent, now_s - offered_s)

    def _end(self, now_s: float) -> None:
        place = self._placement
        if place is None:
            return
        self.outcome.end_s = now_s
        num_output = self._spec.sampling.max_tokens
        done = replace(self._spec, output_token_ids=(0,) * num_output)
        self._cluster.dispatcher.record(place.owner, done)
        place.release()
        self._placement = None
        self._finish()

    def _finish(self) -> None:
        del self._cluster.live[self]
        self._on_end.set()


def tokens_of(entry: TraceEntry, number: int) -> tuple[int, ...]:
    """The prompt's tokens: equal pieces have equal names; without names, none are equal."""
    if not entry.hash_ids:
        return (number,) * entry.num_input_tokens
    size = entry.block_tokens
    pieces = (repeat(name, size) for name in entry.hash_ids)
    return tuple(islice(chain.from_iterable(pieces), entry.num_input_tokens))


async def serve(cluster: Cluster, entries: Sequence[TraceEntry]) -> list[Answer]:
    """Send requests when they are due, and wait for their ends."""
    loop = asyncio.get_running_loop()
    start_s, ends, answers = loop.time(), [], []
    for number, entry in enumerate(entries):
        delay_s = start_s + entry.arrival_s - loop.time()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        ends.append(asyncio.Event())
        answers.append(cluster.send(entry, number, ends[-1]))
    for end in ends:
        await end.wait()
    return answers
