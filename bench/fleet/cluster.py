"""A gateway and its simulated workers, to be made inside a virtual loop.

Fleet, dispatcher with admission and router, planner: the real ones. A request's way between them is
short here: placed, computed, handed over, decoded; no worker fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
from gateway.routing.fleet import Fleet
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


@dataclass(slots=True, eq=False)
class Answer:
    """What became of a request. Times in seconds; inf: never."""

    due_s: float
    num_output: int
    first_s: float = float("inf")
    end_s: float = float("inf")
    refused_s: float | None = None

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
        self.num_hit_tokens = self.num_prompt_tokens = self.num_sent_bytes = 0
        for name, policy in names:
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
                name, hardware, policy, piece_tokens, self.fleet.report, self._move
            )
        self._steering = Steering(
            self.fleet, self.dispatcher.log, SoleLease(), self._set_role, inline
        )
        self._tasks = [asyncio.create_task(self.dispatcher.run())]
        if shape.is_planned:
            self._tasks.append(asyncio.create_task(self._steering.run()))

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
        request.place(is_return=False)
        return request.outcome

    def _move(self, worker: WorkerModel, sequence: Running) -> None:
        """A prefill worker decodes: hand the sequence over if a decode worker has room."""
        num_output = sequence.num_tokens - sequence.spec.num_tokens
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

    def place(self, *, is_return: bool) -> None:
        need = Need.of(self._spec)
        self._cluster.dispatcher.place(self._spec, need, self._on_place, is_return=is_return)

    def _on_place(self, place: Placement | BatonError) -> None:
        if isinstance(place, BatonError):
            self.outcome.refused_s = self._loop.time() - self.outcome.due_s
            self._on_end.set()
            return
        self._placement = place
        if not place.source:
            self._compute(place, self._cluster.workers[place.owner.address], None)
            return
        # Its owner looks at the request between two steps.
        delay_s = self._cluster.workers[place.owner.address].until_step_s()
        self._loop.call_later(delay_s, self._reserve, place, place.source.address)

    def _reserve(self, place: Placement, source: str) -> None:
        num_held = self._cluster.workers[place.owner.address].reserve(self._spec.num_tokens)
        if num_held is None:
            place.record(Outcome.REFUSED)
            place.release()
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
            spec.sampling.max_tokens,
            worker.blocks,
            lambda now_s: self._on_first(sequence, num_held or 0, offered_s, now_s),
            self._end,
            self._on_moved,
            is_leaving=num_held is not None,
        )
        worker.open(sequence)

    def _on_moved(self, placement: Placement) -> None:
        if self._placement:
            self._placement.release()
        self._placement = placement

    def _on_first(self, sequence: Running, num_held: int, offered_s: float, now_s: float) -> None:
        place = self._placement
        if place is None or self.outcome.first_s <= now_s:
            return  # computed anew after a preemption
        self.outcome.first_s = now_s
        place.record(Outcome.PREFILLED)
        if not sequence.is_leaving:
            return
        sequence.is_leaving = False
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
