"""Gateways and their simulated workers, to be made inside a virtual loop.

A request's way is short here: placed, computed, handed over, decoded. What a lost worker had is
placed again and goes on, its tokens so far being computed anew. Where its gateway is lost, its
client goes on so at another one, with the tokens that it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from baton.errors import BatonError, FieldViolation, InvalidRequest
from baton.types import (
    Role,
    Sampling,
    SequenceSpec,
    Slo,
    Tier,
    WorkerIdentity,
    WorkerInfo,
    WorkerLoad,
)
from bench.fleet.failures import Failure
from bench.fleet.gateways import Gateway, Registry
from bench.fleet.worker import Hardware, Running, WorkerModel
from engine.plan.trace import TraceEntry
from gateway.routing.dispatcher import Placing, Waiting
from gateway.routing.placement import Outcome, Placement, plan
from gateway.routing.router import Need
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
    num_restarts: int = 0
    """Workers and gateways that were lost with it."""
    num_tokens: int = 0
    """That its client got."""

    @property
    def is_broken(self) -> bool:
        """Whether it was begun and not finished."""
        return self.refused_s is not None and self.first_s < float("inf")

    @property
    def is_wrong(self) -> bool:
        """Whether its client got more tokens than there are, or fewer and yet an end."""
        return self.end_s < float("inf") and self.num_tokens != self.num_output

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
    handed over. registry: that its gateways share, if they are several."""

    def __init__(
        self,
        shape: Shape,
        hardware: Hardware,
        slo: Slo,
        piece_tokens: int,
        seed: int = 0,
        max_queue_size: int = 1024,
        num_gateways: int = 1,
    ) -> None:
        if shape.max_num_batched_tokens:
            most = shape.max_num_batched_tokens
            hardware = replace(hardware, max_num_batched_tokens=most)
        self.hardware, self.slo, self._shape = hardware, slo, shape
        self._loop = asyncio.get_running_loop()
        self.spec = hardware.spec
        self._policies = {f"w{number}:1": policy for number, policy in enumerate(shape.policies)}
        self._seed, self._max_queue_size = seed, max_queue_size
        self._piece_tokens = piece_tokens
        self.registry = Registry()
        self._is_alone = num_gateways == 1
        self._num_started = 0
        """Gateways, since the start."""
        self.num_changes = 0
        """Roles that planners changed."""
        self._terms: dict[str, int] = {}
        """Latest term in which a role was ordered, by worker."""
        self.workers: dict[str, WorkerModel] = {}
        """By name; lost ones are absent."""
        self.live: dict[_Request, None] = {}
        """Requests that were not answered yet."""
        self.num_hit_tokens = self.num_prompt_tokens = self.num_sent_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.gateways: list[Gateway] = []
        for _ in range(num_gateways):
            self._start_gateway()
        for name in self._policies:
            self._start_worker(name)

    def _start_gateway(self) -> None:
        """Start one, which joins all workers."""
        gateway = Gateway(
            f"g{self._num_started}",
            {worker: policy.role for worker, policy in self._policies.items()},
            self.slo,
            self._shape.placing,
            self._set_role,
            key=(self._seed + (self._num_started << 64)).to_bytes(16, "big"),
            max_queue_size=self._max_queue_size,
            is_planned=self._shape.is_planned,
            registry=None if self._is_alone else self.registry,
        )
        self._num_started += 1
        self.gateways.append(gateway)
        for worker in self.workers.values():
            gateway.join(worker.name, self._info_of(worker.name))
            worker.report()

    def _info_of(self, name: str) -> WorkerInfo:
        policy, hardware = self._policies[name], self.hardware
        return WorkerInfo(
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

    def _start_worker(self, name: str) -> None:
        """Start a worker in its first role, with empty caches."""
        for gateway in self.gateways:
            gateway.join(name, self._info_of(name))
        self.workers[name] = WorkerModel(
            name, self.hardware, self._policies[name], self._piece_tokens, self._report
        )

    def _report(self, name: str, load: WorkerLoad) -> None:
        for gateway in self.gateways:
            gateway.fleet.report(name, load)

    def expect(self, failures: Sequence[Failure]) -> None:
        """Have these begin and end at their times from now."""
        self._tasks += [asyncio.create_task(self._fail(failure)) for failure in failures]

    async def _fail(self, failure: Failure) -> None:
        await asyncio.sleep(failure.at_s)
        end = failure.begin(self)
        await asyncio.sleep(failure.down_s)
        end()

    def lose_workers(self, one_of: int, first: int) -> Callable[[], None]:
        """See failures.Breakable."""
        names = [name for name in [*self._policies][first::one_of] if name in self.workers]
        for name in names:
            self.workers.pop(name).lose()
        for gateway in self.gateways:
            gateway.leave(names)
        for request in [*self.live]:
            request.on_workers_lost(names)

        def end() -> None:
            for name in names:
                self._start_worker(name)

        return end

    def lose_gateways(self, one_of: int, first: int) -> Callable[[], None]:
        """See failures.Breakable. One is left."""
        lost = self.gateways[first::one_of][: len(self.gateways) - 1]
        self.gateways = [gateway for gateway in self.gateways if gateway not in lost]
        for gateway in lost:
            self.num_changes += gateway.num_changes
            self._tasks.append(asyncio.create_task(gateway.close()))
        for request in [*self.live]:
            request.on_gateways_lost(lost)

        def end() -> None:
            for _ in lost:
                self._start_gateway()

        return end

    async def close(self) -> None:
        for gateway in self.gateways:
            self.num_changes += gateway.num_changes
            await gateway.close()
        self.gateways.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _set_role(self, address: str, role: Role, term: int) -> None:
        worker = self.workers.get(address)
        if worker is None or term < self._terms.get(address, 0):
            text = f"{term}: {address} is lost, or has a later term"
            raise InvalidRequest.of(FieldViolation("term", text))
        self._terms[address] = term
        worker.set_policy(policy_of(role, self.spec, self.slo))

    def send(self, entry: TraceEntry, number: int, on_end: asyncio.Event) -> Answer:
        """Serve a request that arrives now, by the gateways in turn."""
        request = _Request(self, entry, number, on_end)
        self.live[request] = None
        request.place(is_return=False)
        return request.outcome

    def delivery_s(self, num_sent: int, num_last: int) -> float:
        """Seconds until KV has come. num_last: tokens of it that were computed last, and hide
        behind no compute."""
        hardware = self.hardware
        self.num_sent_bytes += num_sent * hardware.token_bytes
        exposed_s = min(num_sent, num_last or num_sent) * hardware.token_bytes
        return hardware.transfer_s + exposed_s / hardware.wire_bytes_per_s


class _Request:
    """One request on its way."""

    def __init__(self, cluster: Cluster, entry: TraceEntry, number: int, on_end: asyncio.Event):
        self._cluster, self._number = cluster, number
        self._gateway = cluster.gateways[number % len(cluster.gateways)]
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
        self._waiting: Waiting | None = None
        """In its gateway's queue, or out of it since."""

    def place(self, *, is_return: bool) -> None:
        need, dispatcher = Need.of(self._spec), self._gateway.dispatcher
        self._waiting = dispatcher.place(self._spec, need, self._on_place, is_return=is_return)

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
            self._on_stray,
            is_leaving=num_held is not None,
        )
        self._sequence, self._computing = sequence, worker
        if num_held is not None:
            self._held = self._cluster.workers[place.owner.address], num_held
        worker.open(sequence)

    def _on_stray(self, worker: WorkerModel) -> None:
        """It decodes on a prefill worker: hand it over if a decode worker has room."""
        sequence, cluster, gateway = self._sequence, self._cluster, self._gateway
        if sequence is None:
            return
        spec = self._spec_so_far(sequence)
        placement = gateway.dispatcher.place_now(spec, gateway.fleet.ready(Tier.DECODE))
        if placement is None:
            return
        target = cluster.workers[placement.owner.address]
        num_held = target.reserve(sequence.num_tokens)
        if num_held is None:
            placement.record(Outcome.REFUSED)
            placement.release()
            return
        placement.record(Outcome.RESERVED)
        worker.take_out(sequence)
        if self._placement:
            self._placement.release()
        self._placement, self._computing = placement, None
        self._deliver(target, sequence, num_held, sequence.num_tokens - 1, 0)

    def _deliver(
        self, target: WorkerModel, sequence: Running, num_held: int, num_sent: int, num_last: int
    ) -> None:
        """Send KV to blocks of the target."""

        def come() -> None:
            if target.is_lost:
                return
            if sequence.is_over:
                target.give_back(num_held)
                return
            self._computing = target
            target.commit(sequence, num_held)

        self._loop.call_later(self._cluster.delivery_s(num_sent, num_last), come)

    def _spec_so_far(self, sequence: Running) -> SequenceSpec:
        num_output = sequence.num_tokens - len(self._spec.prompt_token_ids)
        return replace(self._spec, output_token_ids=(0,) * num_output)

    def _count(self, sequence: Running) -> None:
        """Its client has all tokens of a sequence that ends, or is given up."""
        self.outcome.num_tokens += sequence.num_tokens - self._spec.num_tokens

    def on_workers_lost(self, names: Collection[str]) -> None:
        """Workers are lost. If it was theirs, its gateway places it again with its tokens so
        far."""
        place = self._placement
        if place is None:
            return
        needed = [place.owner]
        if place.source is not None and (self._held or self._sequence is None):
            needed.append(place.source)  # it has yet to compute the prompt
        if any(worker.address in names for worker in needed):
            self._take_back()
            self.place(is_return=True)

    def on_gateways_lost(self, lost: Collection[Gateway]) -> None:
        """Gateways are lost. If it came by one, its client goes on at another one, at once, with
        its tokens so far."""
        if self._gateway not in lost:
            return
        if self._waiting is not None:
            self._gateway.dispatcher.cancel(self._waiting)
        self._take_back()
        gateways = self._cluster.gateways
        self._gateway = gateways[self._number % len(gateways)]
        self.place(is_return=False)

    def _take_back(self) -> None:
        """Leave its workers, as far as they are there, with its tokens so far."""
        sequence = self._sequence
        if sequence is not None:
            sequence.is_over = True
            if self._computing and not self._computing.is_lost:
                self._computing.drop(sequence)
            self._count(sequence)
            self._spec = self._spec_so_far(sequence)
        if self._held and not self._held[0].is_lost:
            self._held[0].give_back(self._held[1])
        place = self._placement
        self._sequence = self._computing = self._held = self._placement = None
        self.outcome.num_restarts += 1
        if place is not None:
            place.release()

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
        self._deliver(owner, sequence, num_held, num_sent, num_last)
        owner.costs.handoff.observe(num_sent, now_s - offered_s)

    def _end(self, now_s: float) -> None:
        place = self._placement
        if place is None:
            return
        self.outcome.end_s = now_s
        if self._sequence is not None:
            self._count(self._sequence)
        num_output = self._spec.sampling.max_tokens
        done = replace(self._spec, output_token_ids=(0,) * num_output)
        self._gateway.dispatcher.record(place.owner, done)
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
    tokens: list[int] = []
    for name in entry.hash_ids:
        tokens += [name] * entry.block_tokens
    return tuple(tokens[: entry.num_input_tokens])


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
