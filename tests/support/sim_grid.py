"""A thousand workers as numbers: the gateway's real fleet, planner and affinity, with workers that
are only queues.

A prefill worker computes what its cache lacks, one prompt after the other, at a fixed rate; a
decode worker holds a sequence for its output's time. Workers tell their load at each change. They
may go, with their caches and all that they were doing, which is placed anew, and come back empty.
Requests are as in a trace of the mooncake format: a line has `timestamp` (ms), `input_length`,
`output_length`, and `hash_ids`, one per 512 tokens of the prompt; equal ids stand for equal
beginnings.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from baton.types import BlockCounts, Tier, WorkerLoad
from gateway.routing.fleet import Fleet, Worker, WorkerState
from gateway.routing.history import Digest, PrefixAffinity
from gateway.routing.placement import Outcome, Placement, plan
from gateway.routing.router import Need, Verdict
from tests.support.fake_workers import make_info
from tests.support.stub_link import StubLink

HASHED_TOKENS = 512
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace; the time of its arrival in seconds."""

    arrival_s: float
    num_input_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]

    @property
    def digests(self) -> tuple[Digest, ...]:
        whole = self.hash_ids[: self.num_input_tokens // HASHED_TOKENS]
        return tuple(
            Digest(number.to_bytes(8, "big"), HASHED_TOKENS * (index + 1))
            for index, number in enumerate(whole)
        )


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a file of the mooncake format."""
    lines = map(json.loads, path.read_text().splitlines())
    return [
        TraceRequest(
            line["timestamp"] / 1e3,
            line["input_length"],
            line["output_length"],
            tuple(line["hash_ids"]),
        )
        for line in lines
    ]


def synthetic_trace(num_requests: int, seed: int) -> list[TraceRequest]:
    """Uneven lengths; three beginnings that a half of all requests share; conversations that grow
    turn by turn."""
    rng = random.Random(seed)
    fresh = itertools.count(1000)
    hot = [tuple(next(fresh) for _ in range(size)) for size in (1, 4, 12)]
    conversations: deque[tuple[int, ...]] = deque(maxlen=2000)
    requests = []
    for index in range(num_requests):
        if conversations and rng.random() < 0.5:
            head = rng.choice(conversations)
        else:
            head = rng.choice(hot) if rng.random() < 0.5 else ()
        num_new = 1 + min(60, int(rng.lognormvariate(1.2, 1.1)))
        hash_ids = (*head, *(next(fresh) for _ in range(num_new)))
        conversations.append(hash_ids)
        num_tokens = HASHED_TOKENS * len(hash_ids) - rng.randrange(HASHED_TOKENS)
        num_output = 1 + min(2000, int(rng.lognormvariate(4.5, 1.0)))
        requests.append(TraceRequest(float(index), num_tokens, num_output, hash_ids))
    return requests


@dataclass
class Node:
    """What a worker does beside what the gateway knows. `num_computed_tokens`: since the fleet last
    changed."""

    worker: Worker
    is_there: bool = True
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    busy_until_s: float = 0.0
    num_computed_tokens: int = 0
    num_sequences: int = 0
    num_used_blocks: int = 0
    sequence_seconds: float = 0.0
    block_seconds: float = 0.0
    since_s: float = 0.0

    def advance(self, now_s: float) -> None:
        self.sequence_seconds += self.num_sequences * (now_s - self.since_s)
        self.block_seconds += self.num_used_blocks * (now_s - self.since_s)
        self.since_s = now_s


@dataclass(frozen=True, slots=True)
class Change:
    """A worker goes, or comes back. at: when, as a share of the time from the first to the last
    arrival."""

    at: float
    address: str
    is_there: bool


@dataclass(slots=True)
class Flight:
    """A request on its way through two workers."""

    request: TraceRequest
    gateway: int
    placement: Placement
    prefill: Node
    decode: Node
    num_blocks: int
    is_prefilled: bool = False

    def needs(self, node: Node) -> bool:
        return node is self.decode or (node is self.prefill and not self.is_prefilled)


@dataclass(frozen=True)
class GridResult:
    """Loads by worker, each as a share of the tier's mean, prefill work from the last change of the
    fleet on; hit shares in tokens; utilization from the first to the last arrival; waits in seconds
    of one prompt each."""

    prefill_work: list[float]
    decode_sequences: list[float]
    decode_blocks: list[float]
    hit_share: float
    ideal_hit_share: float
    utilization: float
    waits_s: list[float]


class Grid:
    """`load`: share of the prefill tier's capacity that the requests need, were nothing cached
    twice."""

    def __init__(
        self,
        num_prefills: int,
        num_decodes: int,
        *,
        token_s: float = 1e-4,
        step_s: float = 0.03,
        max_num_seqs: int = 32,
        num_blocks: int = 60_000,
        num_cached_hashes: int = 1000,
        num_gateways: int = 1,
    ) -> None:
        self._token_s, self._step_s = token_s, step_s
        self._num_blocks, self._num_cached_hashes = num_blocks, num_cached_hashes
        self._gateways = [
            (
                Fleet(
                    [f"p{i}:1" for i in range(num_prefills)],
                    [f"d{i}:1" for i in range(num_decodes)],
                ),
                PrefixAffinity(131_072),
            )
            for _ in range(num_gateways)
        ]
        self._fleet = self._gateways[0][0]
        self._nodes = {a: Node(worker) for a, worker in self._fleet.workers.items()}
        self._events: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._waiting: deque[tuple[TraceRequest, int]] = deque()
        self._flights: dict[int, Flight] = {}
        """By the placement's number."""
        self._num_placements = 0
        self._num_computed_tokens = 0
        self._waits_s: list[float] = []
        self._num_served_tokens = 0
        self._num_hit_tokens = 0
        self._max_num_seqs = max_num_seqs
        for fleet, affinity in self._gateways:
            fleet.listen_leave(affinity.forget)
        for address in self._nodes:
            self._join(address)

    def run(
        self, requests: Sequence[TraceRequest], load: float, changes: Iterable[Change] = ()
    ) -> GridResult:
        """Serve the requests, their arrivals stretched to `load`."""
        num_ideal = sum(_ideal_hits(requests))
        num_tokens = sum(r.num_input_tokens for r in requests)
        num_prefills = len(self._fleet.tier(Tier.PREFILL))
        span_s = (num_tokens - num_ideal) * self._token_s / num_prefills / load
        stretch = span_s / (requests[-1].arrival_s - requests[0].arrival_s or 1.0)
        for index, request in enumerate(requests):
            at_s = (request.arrival_s - requests[0].arrival_s) * stretch
            moved = replace(request, arrival_s=at_s)
            self._at(at_s, (moved, index % len(self._gateways)))
        for change in changes:
            self._at(change.at * span_s, change)
        while self._events:
            now_s, _, event = heapq.heappop(self._events)
            if isinstance(event, tuple):
                self._waiting.append(event)
            elif isinstance(event, Change):
                self._change(event, now_s)
            else:
                event(now_s)  # type: ignore[operator]
            self._place_all(now_s)
        assert not self._waiting
        assert not self._flights
        prefills = [n for n in self._nodes.values() if n.worker.tier is Tier.PREFILL]
        decodes = [n for n in self._nodes.values() if n.worker.tier is Tier.DECODE]
        return GridResult(
            _shares(n.num_computed_tokens for n in prefills),
            _shares(n.sequence_seconds for n in decodes),
            _shares(n.block_seconds for n in decodes),
            self._num_hit_tokens / self._num_served_tokens,
            num_ideal / num_tokens,
            self._num_computed_tokens * self._token_s / num_prefills / span_s,
            self._waits_s,
        )

    def _join(self, address: str) -> None:
        for fleet, _ in self._gateways:
            worker = fleet.workers[address]
            info = replace(
                make_info(address, worker.tier),
                max_model_len=1_000_000,
                num_blocks=self._num_blocks,
                max_num_seqs=self._max_num_seqs,
                max_num_batched_tokens=8192,
                max_local_prefill_tokens=0,
            )
            info = replace(info, layout=replace(info.layout, block_size=BLOCK_TOKENS))
            fleet.join(address, info, StubLink())
            fleet.report(address, WorkerLoad(blocks=BlockCounts(self._num_blocks, 0, 0)))

    def _change(self, change: Change, now_s: float) -> None:
        node = self._nodes[change.address]
        assert node.is_there is not change.is_there
        node.is_there = change.is_there
        for each in self._nodes.values():
            each.num_computed_tokens = 0
        if change.is_there:
            self._join(change.address)
            return
        for fleet, _ in self._gateways:
            fleet.leave(change.address, WorkerState.UNREACHABLE, "gone")
        for number, flight in list(self._flights.items()):
            if flight.needs(node):
                self._end(number, now_s)
                self._waiting.append((flight.request, flight.gateway))
        node.cache.clear()
        node.busy_until_s = now_s

    def _at(self, time_s: float, event: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _place_all(self, now_s: float) -> None:
        while self._waiting and self._place(*self._waiting[0], now_s):
            self._waiting.popleft()

    def _place(self, request: TraceRequest, gateway: int, now_s: float) -> bool:
        fleet, affinity = self._gateways[gateway]
        num_tokens = request.num_input_tokens
        need = Need(num_tokens, num_tokens + request.num_output_tokens, needs_decode=True)
        matched = affinity.matched_tokens(request.digests)
        self._num_placements += 1
        choice = plan(need, fleet, matched, self._num_placements.to_bytes(8, "big"))
        if isinstance(choice, Verdict):
            assert choice is Verdict.NOT_NOW
            return False
        assert choice.prefill
        assert choice.decode
        prefill, decode = fleet.workers[choice.prefill], fleet.workers[choice.decode]
        placement = Placement(
            fleet,
            self._num_placements,
            prefill,
            decode,
            max(1, num_tokens - matched.get(prefill.address, 0)),
            -(-(num_tokens + 1) // BLOCK_TOKENS),
        )
        for worker in (prefill, decode):
            affinity.record(request.digests, worker.address)
        num_blocks = -(-(num_tokens + request.num_output_tokens) // BLOCK_TOKENS)
        nodes = self._nodes[prefill.address], self._nodes[decode.address]
        flight = Flight(request, gateway, placement, *nodes, num_blocks)
        self._serve(self._num_placements, flight, now_s)
        return True

    def _serve(self, number: int, flight: Flight, now_s: float) -> None:
        prefill, decode, request = flight.prefill, flight.decode, flight.request
        assert prefill.is_there
        assert decode.is_there
        self._flights[number] = flight
        num_hit = self._look_up(prefill, request)
        num_computed = max(1, request.num_input_tokens - num_hit)
        self._num_served_tokens += request.num_input_tokens
        self._num_hit_tokens += num_hit
        self._num_computed_tokens += num_computed
        prefill.num_computed_tokens += num_computed
        begin_s = max(now_s, prefill.busy_until_s)
        self._waits_s.append(begin_s - request.arrival_s)
        prefill.busy_until_s = begin_s + num_computed * self._token_s
        decode.advance(now_s)
        decode.num_sequences += 1
        decode.num_used_blocks += flight.num_blocks
        flight.placement.record(Outcome.RESERVED)
        self._report(decode, now_s)
        self._report(prefill, now_s)

        def prefilled(at_s: float) -> None:
            if number in self._flights:
                flight.is_prefilled = True
                flight.placement.record(Outcome.PREFILLED)
                self._report(prefill, at_s)

        self._at(prefill.busy_until_s, prefilled)
        ends_at_s = prefill.busy_until_s + request.num_output_tokens * self._step_s
        self._at(ends_at_s, lambda at_s: self._end(number, at_s))

    def _end(self, number: int, now_s: float) -> None:
        """The request is answered, or a worker of it is gone."""
        flight = self._flights.pop(number, None)
        if flight is None:
            return
        decode = flight.decode
        decode.advance(now_s)
        decode.num_sequences -= 1
        decode.num_used_blocks -= flight.num_blocks
        flight.placement.release()
        if decode.is_there:
            self._report(decode, now_s)

    def _look_up(self, node: Node, request: TraceRequest) -> int:
        num_hit = 0
        for number in request.hash_ids:
            if number not in node.cache:
                break
            num_hit += HASHED_TOKENS
        for number in reversed(request.hash_ids):
            node.cache[number] = None
            node.cache.move_to_end(number)
        while len(node.cache) > self._num_cached_hashes:
            node.cache.popitem(last=False)
        return min(num_hit, request.num_input_tokens - 1)

    def _report(self, node: Node, now_s: float) -> None:
        free = self._num_blocks - node.num_used_blocks
        pending_s = max(0.0, node.busy_until_s - now_s)
        load = WorkerLoad(
            num_running=node.num_sequences,
            num_pending_tokens=round(pending_s / self._token_s),
            blocks=BlockCounts(free, 0, node.num_used_blocks),
        )
        for fleet, _ in self._gateways:
            fleet.report(node.worker.address, load)


def _ideal_hits(requests: Sequence[TraceRequest]) -> Iterator[int]:
    """Tokens of each request that one worker with endless memory would find."""
    seen: set[int] = set()
    for request in requests:
        num_known = sum(1 for _ in itertools.takewhile(seen.__contains__, request.hash_ids))
        seen.update(request.hash_ids)
        yield min(num_known * HASHED_TOKENS, request.num_input_tokens - 1)


def _shares(loads: Iterable[float]) -> list[float]:
    loads = list(loads)
    mean = sum(loads) / len(loads)
    return sorted(load / mean for load in loads)
