"""Shapes of a fleet: how many workers of each role. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.types import Role, Tier

#: Maximum splits that are compared.
_MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """A ready worker.

    host: workers of one host divide its cores. listed_tier: that it was started for. role: that it
    serves. num_threads: that it was started with; 0 if they cannot change while it runs.
    num_sequences: that it has.
    """

    address: str
    host: str
    listed_tier: Tier
    role: Role
    num_threads: int = 0
    num_sequences: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """num_prefill: prefill workers of a split; 0: all are colocated, or, where workers of one host
    can divide its cores anew, one worker with all cores of its host, beside which others rest."""

    num_prefill: int

    def share(self, num_workers: int) -> float:
        """Share of prefill workers."""
        return self.num_prefill / num_workers

    def __str__(self) -> str:
        return f"{self.num_prefill} prefill workers" if self.num_prefill else "colocated"


def shapes_of(workers: Sequence[WorkerFacts]) -> Iterator[Shape]:
    """All shapes worth comparing for these workers."""
    num_splits = len(workers) - 1
    step = max(1, -(-num_splits // _MAX_SPLITS))
    yield from (Shape(number) for number in range(1, num_splits + 1, step))
    yield Shape(0)


def split_of(share: float, num_workers: int) -> Shape:
    """The shape of so many workers with the share of prefill workers that is nearest to `share`; 0:
    colocated."""
    if not share or num_workers < 2:
        return Shape(0)
    return Shape(min(max(1, round(share * num_workers)), num_workers - 1))


def roles_before_leaving(
    shape: Shape, workers: Sequence[WorkerFacts], num_leaving: int
) -> Mapping[str, Role]:
    """The roles in this shape, but for workers that decode besides, so that one is left when any
    `num_leaving` are gone."""
    roles = roles_in(shape, workers)
    if num_decoding(roles.values()) > num_leaving:
        return roles
    num_prefill = len(workers) - num_leaving - 1
    if shape.num_prefill and num_prefill > 0:
        return roles_in(Shape(num_prefill), workers)
    return {worker.address: Role(Tier.DECODE, is_colocated=True) for worker in workers}


def num_decoding(roles: Iterable[Role]) -> int:
    return sum(role.tier is Tier.DECODE for role in roles)


def roles_in(shape: Shape, workers: Sequence[WorkerFacts]) -> Mapping[str, Role]:
    """The role of each worker, by address; as few change theirs as possible."""
    if shape.num_prefill:
        by_fitness = sorted(workers, key=_fitness_to_prefill)
        prefill, decode = Role(Tier.PREFILL), Role(Tier.DECODE)
        return {
            worker.address: prefill if number < shape.num_prefill else decode
            for number, worker in enumerate(by_fitness)
        }
    by_host: dict[str, list[WorkerFacts]] = defaultdict(list)
    for worker in workers:
        by_host[worker.host if worker.num_threads else worker.address].append(worker)
    roles = {}
    for group in by_host.values():
        *resting, chosen = sorted(group, key=_fitness_to_prefill)
        num_threads = sum(worker.num_threads for worker in group) if resting else 0
        roles[chosen.address] = Role(Tier.DECODE, is_colocated=True, num_threads=num_threads)
        roles.update({worker.address: Role(Tier.PREFILL) for worker in resting})
    return roles


def _fitness_to_prefill(worker: WorkerFacts) -> tuple[bool, bool, str]:
    """Sort key: those that prefill now come first, then those started for it."""
    is_prefill = worker.role.tier is Tier.PREFILL
    return not is_prefill, worker.listed_tier is not Tier.PREFILL, worker.address
