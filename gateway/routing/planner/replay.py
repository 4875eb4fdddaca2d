"""What share of recent requests a shape would have served within the targets. Pure.

Replays requests against workers that take what `StepCosts` say, by the rules that workers and the
gateway follow: chunks by the workers' own gap rule, the way of a prompt (ways.py), requests that
can still be in time before late ones (admission.py). Memory is taken to suffice.

It begins with what waits and what decodes: near its capacity a fleet falls behind by so little in
the time of a replay that from an empty start every shape would seem to keep up.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean

from baton.types import Slo, StepCosts
from gateway.routing.ways import LATE_EVERY, QUEUE_SHARE, SHARING_GAIN, TTFT_SHARE
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
class Load:
    """What a shape is to serve.

    latest: requests from time 0 on, in order. waiting: those that wait at that time, at minus the
    seconds since they came, in order. running: tokens left of each sequence that decodes then.
    """

    latest: Sequence[Demand]
    waiting: Sequence[Demand] = ()
    running: Sequence[int] = ()


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


class _Decoding:
    """Sequences that decode together, each a token a step. So neither which of them ends first
    changes, nor which is due first: both are kept as of the worker's first step."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._num_steps = 0
        self._num_added = 0
        self._by_end: list[tuple[int, int, float, _Request]] = []
        """Heap of (last step, number, due, request)."""
        self._by_due: list[tuple[float, int, int]] = []
        """Sorted (due, number, last step); none without a pace."""

    def __len__(self) -> int:
        return len(self._by_end)

    @property
    def num_steps(self) -> int:
        """Steps until one ends."""
        return self._by_end[0][0] - self._num_steps

    def add(self, request: _Request, num_left: int, due_s: float) -> None:
        """due_s: when its next token is due."""
        self._num_added += 1
        last = self._num_steps + num_left
        due_s -= self._num_steps * self._pace_s if self._pace_s < inf else 0.0
        heapq.heappush(self._by_end, (last, self._num_added, due_s, request))
        if self._pace_s < inf:
            insort(self._by_due, (due_s, self._num_added, last))

    def paces(self, now_s: float) -> Iterator[Pace]:
        """Paces of all, in the order in which they are due."""
        come_s = self._num_steps * self._pace_s - now_s if self._by_due else 0.0
        for due_s, _, last in self._by_due:
            yield Pace(due_s + come_s, last - self._num_steps, self._pace_s)

    def step(self, number: int, end_s: float) -> None:
        """Take so many steps; those that end with one of them end at end_s."""
        self._num_steps += number
        while self._by_end and self._by_end[0][0] <= self._num_steps:
            last, added, due_s, request = heapq.heappop(self._by_end)
            request.end_s = end_s
            if self._by_due:
                del self._by_due[bisect_left(self._by_due, (due_s, added, last))]


class _Worker:
    def __init__(self, model: Model, pace_s: float, ttft_s: float) -> None:
        self.model = model
        self.decoding = _Decoding(pace_s)
        self.prompts: list[_Request] = []
        self.pending = 0
        """Tokens of these."""
        self.is_idle = True
        self.end_s = 0.0
        """When its step ends, if it is not idle."""
        self.num_arriving = 0
        """Requests with KV on the way here."""
        self.speed = 0.0
        """Prompt tokens per second beside what decodes here."""
        self.max_pending = 0.0
        """Prompt tokens up to which it takes more."""
        self._pace_s, self._ttft_s = pace_s, ttft_s
        self._see_speed()

    def decode(self, request: _Request) -> None:
        """Decode a request that has its first token."""
        self.decoding.add(request, request.demand.num_output - 1, request.first_s + self._pace_s)
        self._see_speed()

    def step(self, number: int, end_s: float) -> None:
        """See _Decoding."""
        self.decoding.step(number, end_s)
        self._see_speed()

    def _see_speed(self) -> None:
        """After the number of sequences has changed."""
        self.speed = self._speed()
        most = QUEUE_SHARE * self._ttft_s * self.speed
        self.max_pending = max(1.0, min(2 * _MAX_STEP_TOKENS, most))

    def _speed(self) -> float:
        costs, n = self.model.costs, len(self.decoding)
        if not (self.model.decodes and n) or self._pace_s == inf:
            return 1 / costs.token_s
        spare_s = self._pace_s - costs.step_s - costs.sequence_s * n
        if spare_s <= 0:
            return 0.5 / costs.token_s
        return max(spare_s, MIN_CHUNK_TOKENS * costs.token_s) / costs.token_s / self._pace_s


class _Replay:
    def __init__(self, workers: Sequence[Model], slo: Slo) -> None:
        rule = gap_rule_of(slo, _UNBOUNDED)
        self._gaps = rule.new_budget()
        self._pace_s = inf if rule.tpot_s is None else rule.tpot_s
        self._ttft_s = inf if slo.ttft_s is None else slo.ttft_s
        self._gain = SHARING_GAIN if slo.tpot_s is None else 1.0
        self._workers = [_Worker(model, self._pace_s, self._ttft_s) for model in workers]
        self._homes = [w for w in self._workers if w.model.decodes]
        self._senders = [w for w in self._workers if not w.model.decodes]
        self._has_prefill = any(w.model.prefills for w in self._workers)
        self._on_time: deque[_Request] = deque()
        self._late: deque[_Request] = deque()
        """Waiting, in the order of arrival; those on time may have become late since."""
        self._num_on_time = 0
        """Places given since the last late request."""
        self._events: list[tuple[float, int, _Worker, _Request | None]] = []
        self._num_events = 0
        self._next_s = inf

    def run(self, load: Load) -> list[_Request]:
        """What decodes at the start is taken to be just on time. What waits comes one by one, so
        that the first ones fill the workers' queues, as others have filled them before."""
        requests = [_Request(demand, demand.num_prompt) for demand in (*load.waiting, *load.latest)]
        for number, num_left in enumerate(load.running):
            begun = _Request(Demand(0.0, 0, num_left + 1), 0, first_s=0.0)
            self._homes[number % len(self._homes)].decode(begun)
        arrivals = iter(requests)
        coming = next(arrivals, None)
        self._next_s = max(0.0, coming.demand.at_s) if coming else inf
        for home in self._homes:
            self._step(home, 0.0)
        while coming or self._events:
            idle = None
            if coming and (not self._events or self._next_s <= self._events[0][0]):
                now_s = self._next_s
                self._on_time.append(coming)
                coming = next(arrivals, None)
                self._next_s = max(0.0, coming.demand.at_s) if coming else inf
            else:
                now_s, _, worker, arrived = heapq.heappop(self._events)
                if arrived is None:
                    worker.is_idle = True
                else:
                    worker.num_arriving -= 1
                    worker.decode(arrived)
                idle = worker if worker.is_idle else None
            if (self._on_time or self._late) and (given := self._dispatch(now_s)):
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
        while queue := self._next_queue(now_s):
            request = queue[0]
            best, best_s = None, inf
            for worker in self._workers:
                cost_s = (worker.pending + request.num_missing) / worker.speed
                shares = not (worker.model.prefills or worker.model.is_colocated)
                if shares and self._has_prefill:
                    cost_s /= self._gain
                if cost_s < best_s:
                    best, best_s = worker, cost_s
            if best is None or best.pending >= best.max_pending:
                return given
            queue.popleft()
            self._num_on_time = 0 if queue is self._late else self._num_on_time + 1
            best.prompts.append(request)
            best.pending += request.num_missing
            given.append(best)
        return given

    def _next_queue(self, now_s: float) -> deque[_Request]:
        """The queue to serve next: those on time, but for one place of LATE_EVERY."""
        while self._on_time and not self._is_on_time(self._on_time[0], now_s):
            self._late.append(self._on_time.popleft())
        first, second = self._on_time, self._late
        if self._num_on_time >= LATE_EVERY - 1:
            first, second = second, first
        return first or second

    def _is_on_time(self, request: _Request, now_s: float) -> bool:
        token_s = self._workers[0].model.costs.token_s
        left_s = TTFT_SHARE * self._ttft_s - request.num_missing * token_s
        return now_s < request.demand.at_s + left_s

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
        num_steps = worker.decoding.num_steps
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
        spare_s = self._gaps.spare_s(base_s, ())
        paces = worker.decoding.paces(now_s) if base_s < self._pace_s else ()
        for pace in paces:
            if pace.due_s - base_s >= spare_s:
                break
            least_s = self._gaps.spare_s(base_s, (pace,))
            if least_s < spare_s:  # others are due later
                spare_s = least_s
                break
        num_tokens = spare_s / worker.model.costs.token_s
        return int(min(max(num_tokens, MIN_CHUNK_TOKENS), _MAX_STEP_TOKENS))

    def _begin_answer(self, worker: _Worker, request: _Request, now_s: float) -> None:
        request.first_s = request.end_s = now_s
        if request.demand.num_output <= 1:
            return
        if worker.model.decodes:
            worker.decode(request)
        else:
            home = min(self._homes, key=lambda w: len(w.decoding))
            home.num_arriving += 1
            self._push(now_s + _TRANSFER_S, home, request)

    def _end_after(self, worker: _Worker, num_steps: int, end_s: float) -> None:
        """Decode so many steps; the worker is idle again at their end."""
        worker.end_s = end_s
        self._push(end_s, worker, None)
        worker.step(num_steps, end_s)


def score(workers: Sequence[Model], load: Load, slo: Slo) -> float:
    """Share of the requests inside the targets, 0 to 1, and up to 0.1 for how near all are."""
    requests = _Replay(workers, slo).run(load)
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
