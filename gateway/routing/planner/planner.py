"""The planner: from measured load, learned costs and targets to the number of workers and their
roles. Pure but for what it has learned; the caller gives the time.

It replays the latest requests in each shape, and takes the best one if that is clearly better than
the present one. Costs are remembered by number of threads. A number that was never used is taken to
divide the work evenly, and not to read weights faster; once it is used, it is measured.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from statistics import fmean, median
from typing import TypeVar

from baton.types import Role, Slo, StepCosts, Tier
from gateway.routing.planner.replay import BEST_SCORE, Demand, Load, Model, score
from gateway.routing.planner.shapes import (
    Shape,
    WorkerFacts,
    num_decoding,
    roles_before_leaving,
    roles_in,
    shapes_of,
    split_of,
)
from gateway.routing.planner.size import Bounds, Size, enough, num_going

#: Latest requests that are replayed for each worker, so that queues have time to grow; and the
#: least number of them for a decision.
_REQUESTS_PER_WORKER, _MIN_REQUESTS = 32, 8
#: Least gain of another shape, as a share of the requests, where many miss their targets; where few
#: do, as a share of those that do, but not less than one in a hundred requests.
MIN_GAIN, _GAIN_OF_MISSES, _LEAST_GAIN = 0.04, 0.3, 0.01
#: Seconds between two changes.
REST_S = 10.0
#: Weight of the latest replay in a shape's score: few requests say little.
_LATEST_WEIGHT = 0.3
#: Shares of prefill workers, the best ones, with which other numbers of workers are replayed.
_SHARES_TO_SIZE = 2
#: Workers that are replayed; a larger fleet is represented by so many, and by its share of the
#: requests.
_MAX_WORKERS = 8
#: Latest requests, the later half of which is replayed.
_MAX_LOGGED = 2 * _REQUESTS_PER_WORKER * _MAX_WORKERS
#: Seconds before the latest request from which others count, beside the least number of them.
_MAX_AGE_S = 240.0

_T = TypeVar("_T")


class LoadLog:
    """The latest requests: arrival, missing prompt tokens, and output tokens once known."""

    def __init__(self, waiting: Callable[[], Iterable[str]] = tuple) -> None:
        """waiting: names of the requests that have no worker yet."""
        self._waiting = waiting
        self._requests: OrderedDict[str, tuple[float, int, int]] = OrderedDict()
        self.num_arrivals = 0
        """Since the start."""

    def on_arrival(self, request_id: str, now_s: float, num_prompt_tokens: int) -> None:
        """Also for a request that is refused because the fleet is full: another shape might have
        served it."""
        self.num_arrivals += 1
        self._requests[request_id] = (now_s, num_prompt_tokens, 0)
        self._requests.move_to_end(request_id)  # names may come again
        while len(self._requests) > _MAX_LOGGED:
            self._requests.popitem(last=False)

    def on_placed(self, request_id: str, num_missing_tokens: int) -> None:
        if (known := self._requests.get(request_id)) and not known[2]:
            self._requests[request_id] = (known[0], num_missing_tokens, 0)

    def on_ended(self, request_id: str, num_output_tokens: int) -> None:
        if known := self._requests.get(request_id):
            self._requests[request_id] = (known[0], known[1], max(known[2], num_output_tokens))

    def load(self, now_s: float, share: float = 1.0) -> Load | None:
        """The latest requests, and those that wait; None while too few have ended. share: of the
        fleet's requests that this gateway sees; what others see is taken to be like it, so that all
        come faster, and more wait."""
        known = [num_output for *_, num_output in self._requests.values() if num_output]
        if len(known) < _MIN_REQUESTS:
            return None
        usual = max(1, round(fmean(known)))
        latest = [*self._requests.values()][-_MAX_LOGGED // 2 :]
        since_s = latest[-1][0] - _MAX_AGE_S
        num_old = sum(at_s < since_s for at_s, *_ in latest)
        latest = latest[min(num_old, len(latest) - _MIN_REQUESTS) :]
        start_s = latest[0][0]
        waiting = [logged for name in self._waiting() if (logged := self._requests.get(name))]

        def demand(at_s: float, num_prompt: int, num_output: int) -> Demand:
            return Demand(at_s, max(1, num_prompt), num_output or usual)

        return Load(
            [demand((at_s - start_s) * share, *rest) for at_s, *rest in latest],
            [
                demand(min(0.0, at_s - now_s), *rest)
                for at_s, *rest in sorted(waiting * round(1 / share))
            ],
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """roles: of each worker, by address; empty before anything was decided. num_workers: that there
    should be; None while nothing is said about it."""

    roles: Mapping[str, Role]
    num_workers: int | None = None


class Planner:
    """Decides for one model's workers."""

    def __init__(self, slo: Slo, bounds: Bounds | None = None) -> None:
        """bounds: of the number of workers; None: it is not decided."""
        self._slo = slo
        self._size = Size(bounds) if bounds else None
        self._costs: dict[int, StepCosts] = {}
        """By number of threads; 0 where it cannot change."""
        self._scores: dict[float, float] = {}
        """Means over the replays since the last change, by share of prefill workers."""
        self._best_shares: Sequence[float] = ()
        """Of prefill workers, those that scored best at the last replays."""
        self._num_workers = 0
        """At the last decision."""
        self._shape: Shape | None = None
        self._changed_s = -inf

    @property
    def has_costs(self) -> bool:
        """Whether workers have said what steps take; without, roles stay."""
        return self._costs_of(0) is not None

    def lead(self, num_workers: int | None) -> None:
        """Begin a term. num_workers: that the leader before has said; None if it said nothing."""
        self._shape = None  # another may have changed it
        self._scores.clear()
        if self._size:
            self._size.lead(num_workers)

    def pause(self) -> None:
        """Another leads, or nobody does."""
        if self._size:
            self._size.pause()

    def observe(self, measured: Sequence[tuple[int, StepCosts]]) -> None:
        """Learn from load reports: (threads in use, costs) of each worker. Costs that no step can
        have are ignored."""
        by_threads: dict[int, list[StepCosts]] = defaultdict(list)
        for num_threads, costs in measured:
            times_s = (costs.step_s, costs.sequence_s, costs.prompt_s, costs.token_s)
            if isfinite(sum(times_s)) and min(times_s) >= 0:
                by_threads[num_threads].append(costs)
        for num_threads, of_workers in by_threads.items():
            known = self._costs.get(num_threads, StepCosts())
            decode = [costs for costs in of_workers if costs.step_s or costs.sequence_s]
            if decode:
                known = replace(
                    known,
                    step_s=median(costs.step_s for costs in decode),
                    sequence_s=median(costs.sequence_s for costs in decode),
                )
            if prompts := [costs for costs in of_workers if costs.token_s]:
                known = replace(
                    known,
                    prompt_s=median(costs.prompt_s for costs in prompts),
                    token_s=median(costs.token_s for costs in prompts),
                )
            self._costs[num_threads] = known

    def decide(self, now_s: float, workers: Sequence[WorkerFacts], load: Load | None) -> Decision:
        """Decide from the latest requests; none: roles stay as they are, unless no worker decodes.
        Of fewer than two workers, only one that does not decode gets a role."""
        if not workers:
            return Decision({}, self._size.said if self._size else None)
        if load:
            num_running = sum(worker.num_sequences for worker in workers)
            load = replace(load, running=_tokens_left(load.latest, num_running))
        if len(workers) == 1:
            is_decoding = workers[0].role.tier is Tier.DECODE
            roles = {} if is_decoding else roles_in(Shape(0), workers)
        else:
            roles = self._roles(now_s, workers, load)
        if self._size is None:
            return Decision(roles)
        return self._sized(self._size, now_s, workers, load, roles)

    def _roles(
        self, now_s: float, workers: Sequence[WorkerFacts], load: Load | None
    ) -> Mapping[str, Role]:
        have_changed = len(workers) != self._num_workers
        self._shape = present = self._present(workers)
        self._num_workers = len(workers)
        if load and (have_changed or now_s - self._changed_s >= REST_S):
            best = self._best(workers, load, present)
            if best is not None and best != present:
                self._shape, self._changed_s = best, now_s
                self._scores.clear()
        return roles_in(self._shape, workers) if self._shape is not None else {}

    def _sized(
        self,
        size: Size,
        now_s: float,
        workers: Sequence[WorkerFacts],
        load: Load | None,
        roles: Mapping[str, Role],
    ) -> Decision:
        """Decide how many workers there should be. Fewer are said only once as many decode that one
        is left then."""
        num_ready = len(workers)
        size.on_workers(now_s, num_ready)
        needed = self._needed(size.bounds, workers, load)
        num_spare = 0 if needed is None else size.num_spare(now_s, num_ready, needed)
        num_leaving = size.num_leaving(num_ready)
        if num_spare and not num_leaving:
            num_leaving = size.num_leaving(num_ready, num_spare)
            if num_decoding(worker.role for worker in workers) > num_leaving:
                size.shrink(num_ready, num_spare)
        if 0 < num_leaving < num_ready and self._shape is not None:
            roles = roles_before_leaving(self._shape, workers, num_leaving)
        return Decision(roles, size.said)

    def _needed(
        self,
        bounds: Bounds,
        workers: Sequence[WorkerFacts],
        load: Load | None,
    ) -> int | None:
        """How many workers are enough for the latest requests; None while that is not known."""
        if load is None:
            is_busy = any(worker.num_sequences for worker in workers)
            return None if is_busy else bounds.clip(len(workers) - num_going(len(workers)))
        if self._models(Shape(0), workers) is None:
            return None
        scores: dict[int, float] = {}

        def score_of(number: int) -> float:
            if number not in scores:
                scores[number] = self._score_of(number, workers, load)
            return scores[number]

        return enough(score_of, len(workers), bounds)

    def _score_of(self, number: int, workers: Sequence[WorkerFacts], load: Load) -> float:
        """Score of so many workers, the present ones and others like them, with the best of a few
        shares of prefill workers; 0 before costs are known."""
        shares = {*(self._best_shares or (0.0, 0.5))}
        if self._shape is not None and self._num_workers:
            shares.add(self._shape.share(self._num_workers))
        fleet = [
            worker
            if not round_
            else replace(worker, address=f"{worker.address} {round_}", role=Role(Tier.DECODE))
            for round_ in range(-(-number // len(workers)))
            for worker in workers
        ][:number]
        shapes = {split_of(share, number) for share in shares}
        models = [self._models(shape, fleet) for shape in shapes]
        return max((self._replay(each, load, number) for each in models if each), default=0.0)

    def _replay(self, models: Sequence[Model], load: Load, number: int) -> float:
        """Score of a shape of `number` workers, of which `models` serve."""
        num_shown = min(number, _MAX_WORKERS)
        num_latest = _REQUESTS_PER_WORKER * min(self._num_workers, _MAX_WORKERS)
        thinned = _thinned(load, num_latest, num_shown / number)
        return score(_some(models, num_shown), thinned, self._slo)

    def _present(self, workers: Sequence[WorkerFacts]) -> Shape | None:
        """The shape that was chosen last, for as many workers as there are now; at first, and for
        another leader, the one that they have. One in which a worker decodes, if none does."""
        if self._shape is not None:
            num_before = max(1, self._num_workers)
            return (
                self._shape
                if num_before == len(workers)
                else split_of(self._shape.share(num_before), len(workers))
            )
        roles = {worker.address: worker.role for worker in workers}
        num_prefill = len(roles) - num_decoding(roles.values())
        if num_prefill == len(roles):
            return split_of(1.0, len(roles))
        has = [Shape(0), Shape(num_prefill)]
        return next((shape for shape in has if roles_in(shape, workers) == roles), None)

    def _best(
        self, workers: Sequence[WorkerFacts], load: Load, present: Shape | None
    ) -> Shape | None:
        number = len(workers)
        before, self._scores = self._scores, {}
        scores: dict[Shape, float] = {}
        others = [shape for shape in shapes_of(workers) if shape != present]
        for shape in [present, *others] if present else others:
            models = self._models(shape, workers)
            if models is not None:
                share = shape.share(number)
                now = self._replay(models, load, number)
                nearest = _nearest(share, before)
                usual = now if nearest is None else before[nearest]
                scores[shape] = self._scores[share] = usual + _LATEST_WEIGHT * (now - usual)
                is_best = shape == present and scores[shape] + _LEAST_GAIN > BEST_SCORE
                if is_best and before:  # at first all are replayed, so that each has a score
                    self._scores = {**before, share: scores[shape]}
                    return present
        if not scores:
            return None
        by_score = sorted(self._scores, key=lambda share: self._scores[share])
        self._best_shares = by_score[-_SHARES_TO_SIZE:]

        def num_kept(shape: Shape) -> int:
            roles = roles_in(shape, workers)
            return sum(roles[worker.address] == worker.role for worker in workers)

        best = max(scores, key=lambda shape: (scores[shape], num_kept(shape)))
        if present is None or present not in scores:
            return best
        num_missed = BEST_SCORE - scores[present]
        gain = max(_LEAST_GAIN, min(MIN_GAIN, _GAIN_OF_MISSES * num_missed))
        return best if scores[best] >= scores[present] + gain else present

    def _models(self, shape: Shape, workers: Sequence[WorkerFacts]) -> list[Model] | None:
        """Models of the workers that serve in a shape; None before costs are known."""
        roles = roles_in(shape, workers)
        alike: dict[tuple[Tier, bool, int], Model] = {}
        models = []
        for worker in workers:
            role = roles[worker.address]
            is_prefill = role.tier is Tier.PREFILL
            if is_prefill and not shape.num_prefill:
                continue
            num_threads = role.num_threads or worker.num_threads
            model = alike.get(kind := (role.tier, role.is_colocated, num_threads))
            if model is None:
                costs = self._costs_of(num_threads)
                if costs is None:
                    return None
                model = alike[kind] = Model(costs, is_prefill, not is_prefill, role.is_colocated)
            models.append(model)
        return models

    def _costs_of(self, num_threads: int) -> StepCosts | None:
        """Costs with this many threads: measured, or derived from another number."""
        whole = {n: c for n, c in self._costs.items() if c.token_s and (c.step_s or c.sequence_s)}
        if num_threads in whole or not whole:
            return whole.get(num_threads)
        nearest = min(whole, key=lambda number: abs(number - num_threads))
        costs, ratio = whole[nearest], max(1, nearest) / max(1, num_threads)
        return replace(costs, sequence_s=costs.sequence_s * ratio, token_s=costs.token_s * ratio)


def _nearest(share: float, known: Iterable[float]) -> float | None:
    """The known share nearest to this one; colocated is near to itself only."""
    alike = [other for other in known if bool(other) is bool(share)]
    return min(alike, key=lambda other: abs(other - share), default=None)


def _some(models: Sequence[Model], number: int) -> list[Model]:
    """Evenly chosen models, so that the shares of the roles stay; at least one of each role."""
    prefills, others = ([m for m in models if m.prefills is kind] for kind in (True, False))
    number = min(number, len(models))
    num_prefill = max(1, min(round(number * len(prefills) / len(models)), number - 1))
    shown = (num_prefill, number - num_prefill) if prefills else (0, number)
    return [*_evenly(prefills, shown[0]), *_evenly(others, shown[1])]


def _thinned(load: Load, num_latest: int, share: float) -> Load:
    """The latest requests, as far apart as if each worker had come by its share of them, and its
    share of what waits and runs."""
    latest = load.latest[-num_latest:]
    start_s = latest[0].at_s
    return Load(
        [replace(demand, at_s=(demand.at_s - start_s) / share) for demand in latest],
        _evenly(load.waiting, int(len(load.waiting) * share))[-num_latest:],
        _evenly(load.running, int(len(load.running) * share)),
    )


def _evenly(items: Sequence[_T], number: int) -> list[_T]:
    """So many items, evenly chosen."""
    return [items[int((i + 0.5) * len(items) / number)] for i in range(number)]


def _tokens_left(latest: Sequence[Demand], num_running: int) -> list[int]:
    """Of so many sequences that decode: from points that are spread evenly over the tokens of all
    answers to the ends of these, since a long answer is found running for longer."""
    period = sum(demand.num_output for demand in latest) / max(1, num_running)
    left: list[int] = []
    begin = 0
    for demand in latest:
        end = begin + demand.num_output
        while (point := (len(left) + 0.5) * period) < end and len(left) < num_running:
            left.append(max(1, int(end - point)))
        begin = end
    return left
