"""What share of recent requests a shape would have served within the targets. Pure.

Replays requests against workers that take what `StepCosts` say, by the rules that workers and the
gateway follow: chunks by the workers' own gap rule, the way of a prompt (ways.py), requests that
can still be in time first (admission.py). Memory is taken to suffice.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean

from baton.types import Slo, StepCosts
from gateway.routing.ways import QUEUE_SHARE, SHARING_GAIN, TTFT_SHARE
from worker_core.gap_rule import Pace
from worker_core.policy import MIN_CHUNK_TOKENS, gap_rule_of
from worker_core.slo_budget import KeepTarget

#: What bounds gaps without a target: nothing.
_UNBOUNDED = KeepTarget(None, inf)
#: Tokens of a step.
_MAX_STEP_TOKENS = 2048
#: Time of a handoff after the first token, in seconds.
_TRANSFER_S = 0.005
#: Decode steps taken at once while KV may arrive between them.
_STEPS_AT_ONCE = 4
#: Weight of how far requests are from their targets, beside the share inside.
_NEARNESS_WEIGHT = 0.1
#: Score if all requests are inside.
BEST_SCORE = 1.0 + _NEARNESS_WEIGHT


@dataclass(frozen=True, slots=True)
class Demand:
    """A request: its arrival in seconds, prompt tokens that no cache has, and tokens of its
    answer."""

    at_s: float
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Model:
    """A worker of the shape. prefills: computes prompts for others. decodes: runs answers.
    is_colocated: computes all prompts of its answers."""

    costs: StepCosts
    prefills: bool
    decodes: bool
    is_colocated: bool = False


@dataclass(slots=True, eq=False)
class _Request:
    demand: Demand
    num_missing: int
    first_s: float = inf
    end_s: float = inf
    num_left: int = 0
    due_s: float = inf


@dataclass(slots=True, eq=False)
class _Worker:
    model: Model
    prompts: list[_Request] = field(default_factory=list)
    decoding: list[_Request] = field(default_factory=list)
    pending: int = 0
    is_idle: bool = True
    end_s: float = 0.0
    """When its step ends, if it is not idle."""
    num_arriving: int = 0
    """Requests with KV on the way here."""

    def speed(self, tpot_s: float) -> float:
        """Prompt tokens per second beside what decodes here. tpot_s: that steps keep; infinite
        without a target."""
        costs, n = self.model.costs, len(self.decoding)
        if not (self.model.decodes and n) or tpot_s == inf:
            return 1 / costs.token_s
        spare_s = tpot_s - costs.step_s - costs.sequence_s * n
        if spare_s <= 0:
            return 0.5 / costs.token_s
        return max(spare_s, MIN_CHUNK_TOKENS * costs.token_s) / costs.token_s / tpot_s


class _Replay:
    def __init__(self, workers: Sequence[Model], slo: Slo) -> None:
        rule = gap_rule_of(slo, _UNBOUNDED)
        self._gaps = rule.new_budget()
        self._pace_s = inf if rule.tpot_s is None else rule.tpot_s
        self._ttft_s = inf if slo.ttft_s is None else slo.ttft_s
        self._gain = SHARING_GAIN if slo.tpot_s is None else 1.0
        self._workers = [_Worker(model) for model in workers]
        self._homes = [w for w in self._workers if w.model.decodes]
        self._senders = [w for w in self._workers if not w.model.decodes]
        self._has_prefill = any(w.model.prefills for w in self._workers)
        self._queue: list[_Request] = []
        self._events: list[tuple[float, int, _Worker, _Request | None]] = []
        self._num_events = 0
        self._next_s = inf

    def run(self, demands: Sequence[Demand]) -> list[_Request]:
        requests = [_Request(d, d.num_prompt, num_left=d.num_output) for d in demands]
        arrivals = iter(requests)
        coming = next(arrivals, None)
        self._next_s = coming.demand.at_s if coming else inf
        while coming or self._events:
            idle = None
            if coming and (not self._events or self._next_s <= self._events[0][0]):
                now_s = self._next_s
                self._queue.append(coming)
                coming = next(arrivals, None)
                self._next_s = coming.demand.at_s if coming else inf
            else:
                now_s, _, worker, arrived = heapq.heappop(self._events)
                if arrived is None:
                    worker.is_idle = True
                else:
                    worker.num_arriving -= 1
                    worker.decoding.append(arrived)
                idle = worker if worker.is_idle else None
            if self._queue and (given := self._dispatch(now_s)):
                for worker in self._workers:
                    if worker.is_idle and (worker is idle or worker in given):
                        self._step(worker, now_s)
            elif idle is not None:
                self._step(idle, now_s)
        return requests

    def _push(self, at_s: float, worker: _Worker, arrived: _Request | None) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at_s, self._num_events, worker, arrived))

    def _dispatch(self, now_s: float) -> list[_Worker]:
        """Give queued prompts to workers, as far as these have room in their queues. Returns the
        workers."""
        given: list[_Worker] = []
        while self._queue:
            number = next((i for i, r in enumerate(self._queue) if self._is_on_time(r, now_s)), 0)
            request = self._queue[number]
            best, best_s = None, inf
            for worker in self._workers:
                cost_s = (worker.pending + request.num_missing) / worker.speed(self._pace_s)
                shares = not (worker.model.prefills or worker.model.is_colocated)
                if shares and self._has_prefill:
                    cost_s /= self._gain
                if cost_s < best_s:
                    best, best_s = worker, cost_s
            if best is None or best.pending >= self._max_pending(best):
                return given
            del self._queue[number]
            best.prompts.append(request)
            best.pending += request.num_missing
            given.append(best)
        return given

    def _is_on_time(self, request: _Request, now_s: float) -> bool:
        token_s = self._workers[0].model.costs.token_s
        left_s = TTFT_SHARE * self._ttft_s - request.num_missing * token_s
        return now_s < request.demand.at_s + left_s

    def _max_pending(self, worker: _Worker) -> float:
        queue_s = QUEUE_SHARE * self._ttft_s
        return max(1.0, min(2 * _MAX_STEP_TOKENS, queue_s * worker.speed(self._pace_s)))

    def _step(self, worker: _Worker, now_s: float) -> None:
        """Begin a step, or several that only decode; what they compute is known at their end."""
        costs, decoding = worker.model.costs, worker.decoding
        if not (worker.prompts or decoding):
            return
        base_s = costs.step_s + costs.sequence_s * len(decoding) if decoding else 0.0
        worker.is_idle = False
        if not worker.prompts:
            num_steps = self._num_steps(worker, now_s, base_s)
            self._end_after(worker, num_steps, now_s + num_steps * base_s)
            return
        chunk = left = self._chunk(worker, now_s, base_s)
        done = []
        for request in worker.prompts:
            taken = min(left, request.num_missing)
            request.num_missing -= taken
            left -= taken
            if not request.num_missing:
                done.append(request)
            if not left:
                break
        num_computed = chunk - left
        worker.pending -= num_computed
        # A step that decodes has read the weights already.
        weights_s = max(costs.step_s, costs.prompt_s) - (costs.step_s if decoding else 0.0)
        end_s = now_s + base_s + weights_s + num_computed * costs.token_s
        self._end_after(worker, 1, end_s)
        for request in done:
            worker.prompts.remove(request)
            self._begin_answer(worker, request, end_s)

    def _num_steps(self, worker: _Worker, now_s: float, base_s: float) -> int:
        """Steps that only decode, until a request ends, or work may come."""
        num_steps = min(request.num_left for request in worker.decoding)
        if self._next_s < inf:
            num_steps = min(num_steps, int((self._next_s - now_s) / base_s))
        if num_steps > _STEPS_AT_ONCE:
            ends_s = [sender.end_s for sender in self._senders if not sender.is_idle]
            until_s = now_s if worker.num_arriving else min(ends_s, default=inf) + _TRANSFER_S
            num_free = (until_s - now_s) / base_s
            num_steps = int(min(num_steps, max(num_free, _STEPS_AT_ONCE)))
        return max(1, num_steps)

    def _chunk(self, worker: _Worker, now_s: float, base_s: float) -> int:
        """Prompt tokens of the next step."""
        if not worker.decoding:
            return _MAX_STEP_TOKENS
        paces = (Pace(r.due_s - now_s, r.num_left, self._pace_s) for r in worker.decoding)
        num_tokens = self._gaps.spare_s(base_s, paces) / worker.model.costs.token_s
        return int(min(max(num_tokens, MIN_CHUNK_TOKENS), _MAX_STEP_TOKENS))

    def _begin_answer(self, worker: _Worker, request: _Request, now_s: float) -> None:
        request.first_s = request.end_s = now_s
        request.num_left -= 1
        request.due_s = now_s + self._pace_s
        if request.num_left <= 0:
            return
        if worker.model.decodes:
            worker.decoding.append(request)
        else:
            home = min(self._homes, key=lambda w: len(w.decoding))
            home.num_arriving += 1
            self._push(now_s + _TRANSFER_S, home, request)

    def _end_after(self, worker: _Worker, num_steps: int, end_s: float) -> None:
        """Decode so many steps; the worker is idle again at their end."""
        worker.end_s = end_s
        self._push(end_s, worker, None)
        for request in worker.decoding:
            request.num_left -= num_steps
            request.due_s += num_steps * self._pace_s
            request.end_s = end_s
        worker.decoding = [request for request in worker.decoding if request.num_left > 0]


def score(workers: Sequence[Model], demands: Sequence[Demand], slo: Slo) -> float:
    """Share of the requests inside the targets, 0 to 1, and up to 0.1 for how near all are."""
    requests = _Replay(workers, slo).run(demands)
    return fmean(_value(request, slo) for request in requests)


def _value(request: _Request, slo: Slo) -> float:
    ttft_s = request.first_s - request.demand.at_s
    num_gaps = request.demand.num_output - 1
    tpot_s = (request.end_s - request.first_s) / num_gaps if num_gaps > 0 else 0.0
    nearness = 1.0
    for taken_s, target_s in ((ttft_s, slo.ttft_s), (tpot_s, slo.tpot_s)):
        if target_s is not None:
            nearness *= min(1.0, target_s / taken_s) if taken_s > 0 else 1.0
    return (nearness >= 1.0) + _NEARNESS_WEIGHT * nearness
