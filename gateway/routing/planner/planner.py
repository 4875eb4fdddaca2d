"""The planner: from measured load, learned costs and targets to roles of workers. Pure but for what
it has learned; the caller gives the time.

It replays the latest requests in each shape, and takes the best one if that is clearly better than
the present one. Costs are remembered by number of threads. A number that was never used is taken to
divide the work evenly, and not to read weights faster; once it is used, it is measured.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from math import inf, isfinite
from statistics import fmean, median

from baton.types import Role, Slo, StepCosts, Tier
from gateway.routing.planner.replay import BEST_SCORE, Demand, Model, score
from gateway.routing.planner.shapes import Shape, WorkerFacts, roles_in, shapes_of

#: Latest requests that are replayed for each worker, so that queues have time to grow; and the
#: least number of them for a decision.
_REQUESTS_PER_WORKER, _MIN_REQUESTS = 24, 8
#: Least gain of another shape, as a share of the requests, where many miss their targets; where few
#: do, as a share of those that do, but not less than one in a hundred requests.
MIN_GAIN, _GAIN_OF_MISSES, _LEAST_GAIN = 0.04, 0.3, 0.01
#: Seconds between two changes.
REST_S = 10.0
#: Weight of the latest replay in a shape's score: few requests say little.
_LATEST_WEIGHT = 0.3
#: Workers that are replayed; a larger fleet is represented by so many, and by its share of the
#: requests.
_MAX_WORKERS = 8
#: Latest requests, the later half of which is replayed.
_MAX_LOGGED = 2 * _REQUESTS_PER_WORKER * _MAX_WORKERS


class LoadLog:
    """The latest requests: arrival, missing prompt tokens, and output tokens once known."""

    def __init__(self) -> None:
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

    def demands(self, share: float = 1.0) -> tuple[Demand, ...]:
        """Of the latest, empty while too few have ended. share: of the fleet's requests that this
        gateway sees; what others see is taken to be like it, so that all come faster."""
        known = [num_output for *_, num_output in self._requests.values() if num_output]
        if len(known) < _MIN_REQUESTS:
            return ()
        usual = max(1, round(fmean(known)))
        latest = [*self._requests.values()][-_MAX_LOGGED // 2 :]
        start_s = latest[0][0]
        return tuple(
            Demand((at_s - start_s) * share, max(1, num_prompt), num_output or usual)
            for at_s, num_prompt, num_output in latest
        )


class Planner:
    """Decides for one model's workers."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._costs: dict[int, StepCosts] = {}
        """By number of threads; 0 where it cannot change."""
        self._scores: dict[Shape, float] = {}
        """Means over the replays since the last change, of `_num_workers` workers."""
        self._num_workers = 0
        self._shape: Shape | None = None
        self._changed_s = -inf

    def observe(self, measured: Sequence[tuple[int, StepCosts]]) -> None:
        """Learn from load reports: (threads in use, costs) of each worker. Costs that no step can
        have are ignored."""
        by_threads: dict[int, list[StepCosts]] = defaultdict(list)
        for num_threads, costs in measured:
            if all(isfinite(seconds) and seconds >= 0 for seconds in astuple(costs)):
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

    def decide(
        self, now_s: float, workers: Sequence[WorkerFacts], demands: Sequence[Demand]
    ) -> Mapping[str, Role]:
        """The role that each worker should have, by address: that of before unless another shape is
        clearly better; empty before anything was decided, and for fewer than two workers."""
        if len(workers) < 2:
            return {}
        present = self._present(workers)
        self._shape = present
        if demands and now_s - self._changed_s >= REST_S:
            best = self._best(workers, demands, present)
            if best is not None and best != present:
                self._shape, self._changed_s = best, now_s
                self._scores.clear()
        return roles_in(self._shape, workers) if self._shape is not None else {}

    def _present(self, workers: Sequence[WorkerFacts]) -> Shape | None:
        """The shape that was chosen last, as far as the workers still allow; at first, and for
        another leader, the one that they have."""
        shapes = [*shapes_of(workers)]
        if self._shape in shapes:
            return self._shape
        roles = {worker.address: worker.role for worker in workers}
        num_prefill = sum(role.tier is Tier.PREFILL for role in roles.values())
        has = [Shape(0), Shape(num_prefill)]
        return next((shape for shape in has if roles_in(shape, workers) == roles), None)

    def _best(
        self, workers: Sequence[WorkerFacts], demands: Sequence[Demand], present: Shape | None
    ) -> Shape | None:
        if len(workers) != self._num_workers:
            self._num_workers = len(workers)
            self._scores.clear()
        scores = self._scores
        num_shown = min(len(workers), _MAX_WORKERS)
        latest = demands[-_REQUESTS_PER_WORKER * num_shown :]
        thinned = _thinned(latest, num_shown / len(workers))
        for shape in {*shapes_of(workers), *([present] if present else [])}:
            models = self._models(shape, workers)
            if models is not None:
                now = score(_some(models, num_shown), thinned, self._slo)
                before = scores.get(shape, now)
                scores[shape] = before + _LATEST_WEIGHT * (now - before)
        if not scores:
            return None

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
        models = []
        for worker in workers:
            role = roles[worker.address]
            is_prefill = role.tier is Tier.PREFILL
            if is_prefill and not shape.num_prefill:
                continue
            costs = self._costs_of(role.num_threads or worker.num_threads)
            if costs is None:
                return None
            models.append(Model(costs, is_prefill, not is_prefill, role.is_colocated))
        return models

    def _costs_of(self, num_threads: int) -> StepCosts | None:
        """Costs with this many threads: measured, or derived from another number."""
        whole = {n: c for n, c in self._costs.items() if c.token_s and (c.step_s or c.sequence_s)}
        if num_threads in whole or not whole:
            return whole.get(num_threads)
        nearest = min(whole, key=lambda number: abs(number - num_threads))
        costs, ratio = whole[nearest], max(1, nearest) / max(1, num_threads)
        return replace(costs, sequence_s=costs.sequence_s * ratio, token_s=costs.token_s * ratio)


def _some(models: Sequence[Model], number: int) -> list[Model]:
    """Evenly chosen models, so that the shares of the roles stay; at least one of each role."""
    prefills, others = ([m for m in models if m.prefills is kind] for kind in (True, False))
    number = min(number, len(models))
    num_prefill = max(1, min(round(number * len(prefills) / len(models)), number - 1))
    shown = (num_prefill, number - num_prefill) if prefills else (0, number)
    return [
        kind[int((i + 0.5) * len(kind) / count)]
        for kind, count in zip((prefills, others), shown, strict=True)
        for i in range(count)
    ]


def _thinned(demands: Sequence[Demand], share: float) -> list[Demand]:
    """The requests, as far apart as if each worker had come by its share of them."""
    return (
        [replace(demand, at_s=demand.at_s / share) for demand in demands]
        if share < 1
        else [*demands]
    )
