"""Dispatches waiting sequences to workers by rank, once there is room (late binding).

With an empty queue, a sequence is placed at once if there is room. Otherwise one task places it,
best rank first; a new sequence, a load report, a worker that joins and the end of a placement each
wake the task. A sequence without room may be overtaken only by smaller ones, and by a bounded
number of them, which prevents starvation. A sequence that no ready worker could ever serve is
skipped. It fails unless a suitable worker comes back within NO_WORKER_GRACE_S.

A sequence that would miss its deadline is refused on arrival. One that waits is refused as soon as
it is too late to start: work for a client that has given up delays all others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from baton.errors import BatonError, FieldViolation, InvalidRequest, NoWorkers, Overloaded
from baton.types import DEFAULT_MAX_PREFIXES, Rank, SequenceSpec, Slo, Tier
from gateway.long_work import LONG_PIECE, Pacer, in_pieces
from gateway.routing.admission import (
    AdmissionQueue,
    LastStarts,
    WaitEstimate,
    queue_full,
    too_late,
)
from gateway.routing.fleet import Fleet, Worker
from gateway.routing.history import Digest, PrefixAffinity, PrefixHasher, prefix_digests
from gateway.routing.placement import NUM_DRAWN, Placement, plan
from gateway.routing.planner.planner import LoadLog
from gateway.routing.rivals import HOLD_S, Rivals, Shares
from gateway.routing.router import Need, Plan, Verdict, choose
from gateway.routing.spare_place import MIN_PLACES, SparePlace

#: Seconds that a sequence waits for a suitable worker to come back. A worker starved of CPU is
#: declared silent and is ready again a moment later.
NO_WORKER_GRACE_S = 10.0

#: In a fleet of more than _MANY_WORKERS, a search that found no room is repeated after a pause of
#: _SEARCH_PAUSE_S seconds, not at each load report.
_MANY_WORKERS, _SEARCH_PAUSE_S = 64, 0.005

#: Maximum blocked sequences that a search continues past; and places given to overtaking sequences
#: per place that a blocked one needs.
_MAX_BLOCKED, _OVERTAKEN_PER_PLACE = 16, 4

#: Factor on the estimated wait, so that few admitted requests miss their deadline.
_WAIT_MARGIN = 1.25

#: Tokens from which the prefix hasher of a sequence is stored, so that its prompt is not hashed
#: again when it comes back, moves or ends; and maximum sequences that have one, of about 5 KB each.
STORED_TOKENS, _MAX_HASHERS = 1024, 1024

#: Targets of the first token that a deadline is away at least, for the request to be served out of
#: its turn: those that it overtakes wait longer, and some until they are refused.
_PATIENCE = 10

#: Seconds after a refusal for which more is taken to come than there is room for.
_REFUSING_S = 0.5

#: Maximum requests with a recorded placement time, from which running times are learned.
_MAX_STARTS = 4096


#: Chooses the workers of a sequence; see placement.plan.
Placing = Callable[[Need, Fleet, Mapping[str, int], bytes], Plan | Verdict]

#: Receives the placement, or the reason why there is none. Must be quick and raise nothing.
OnPlace = Callable[[Placement | BatonError], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """What admission needs to know of a request.

    account: to be charged. width: places that it takes. num_tokens: of its prompt, perhaps
    estimated. max_tokens: of an output. deadline_s: on the event loop's clock. slo: its targets;
    None for the fleet's."""

    account: bytes
    width: int
    num_tokens: int
    max_tokens: int
    deadline_s: float
    slo: Slo | None


@dataclass(slots=True, eq=False)
class Waiting:
    """A sequence in the queue."""

    spec: SequenceSpec
    need: Need
    digests: tuple[Digest, ...]
    on_place: OnPlace
    account: bytes
    """The account charged; accounts share places by weight."""
    is_return: bool
    deadline_s: float
    """On the event loop's clock, seconds; `late_s`, too."""
    late_s: float
    """Time from which its first token misses its target; infinite without, -infinite if it was late
    on arrival."""
    ttft_s: float = inf
    """That target; infinite without."""
    until_s: float = field(init=False)
    """As late_s, as if nobody else waited; -infinite with a deadline soon after it, by which one
    that is late on arrival is promised its turn."""
    rank: Rank = field(init=False)
    """Order of service: priority, then when the first token is due, so by arrival among equal
    targets."""
    is_over: bool = False
    """Whether it was answered or cancelled."""
    num_overtaking: int = 0
    """Places given to later sequences while this one was first."""

    def __post_init__(self) -> None:
        priority, arrival_ns, name, choice = self.spec.rank
        target_ns = 0 if self.ttft_s == inf else round(1e9 * self.ttft_s)
        self.rank = (priority, arrival_ns + target_ns, name, choice)
        is_patient = self.deadline_s - self.late_s >= _PATIENCE * self.ttft_s
        self.until_s = self.late_s if is_patient else -inf

    @property
    def width(self) -> int:
        """Places that it takes."""
        return self.need.num_sequences

    @property
    def may_be_overtaken(self) -> bool:
        return self.num_overtaking < _OVERTAKEN_PER_PLACE * max(2, self.width)

    def may_overtake(self, other: Waiting) -> bool:
        """Whether this sequence may find room where the other finds none."""
        mine, its = self.need, other.need
        is_smaller = mine.num_sequences < its.num_sequences or mine.num_tokens < its.num_tokens
        return is_smaller or mine.avoid != its.avoid or mine.numerics != its.numerics

    def answer(self, place: Placement | BatonError) -> None:
        self.is_over = True
        self.on_place(place)


class Dispatcher:
    """The admission queue and the task that serves it. Queued sequences are placed only while `run`
    runs."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        max_queue_size: int,
        key: bytes,
        max_prefixes: int = DEFAULT_MAX_PREFIXES,
        weights: Mapping[bytes, float] | None = None,
        placing: Placing = plan,
    ) -> None:
        """key: a secret of this process, against requests aimed at another client's prefixes or at
        a chosen worker.
        weights: by account; 1 if absent."""
        self._placing = placing
        self._fleet = fleet
        self.log = LoadLog(lambda: [w.spec.request_id for w in self._queue if not w.is_return])
        self._key = key
        self._queue: AdmissionQueue[Waiting] = AdmissionQueue(max_queue_size, weights)
        self._rivals = Rivals()
        self._affinity = PrefixAffinity(max_prefixes)
        self._wake = asyncio.Event()
        self._is_placing = False
        """Whether `_place_all` runs: it takes sequences out of the queue and may put them back."""
        self._num_tries = 0
        self._estimate = WaitEstimate()
        self._last_starts: LastStarts[Waiting] = LastStarts()
        self._last_refusal_s = -inf
        """Last time that a request was refused on arrival."""
        self._starts_s: OrderedDict[str, float] = OrderedDict()
        """Placement times, by request id."""
        self._spare = SparePlace()
        self._hashers: OrderedDict[tuple[str, int], PrefixHasher] = OrderedDict()
        """Prefix hashers of sequences of STORED_TOKENS and more, by request id and first
        choice."""
        self._stranded_s: dict[Rank, float] = {}
        """Start of the wait of each sequence that no ready worker could serve."""
        self._room_since_s = inf
        """Since when there is room that is left to other gateways; infinite if there is none."""
        self._last_ready_s = -inf
        """Last time that a decode worker was ready."""
        fleet.listen(self._on_change)
        fleet.listen_leave(self._affinity.forget)

    def _on_change(self) -> None:
        """Wake the task if sequences wait: there may be room, or a worker less."""
        self._see_ready(asyncio.get_running_loop().time())
        if self._queue or self._is_placing:
            self._wake.set()

    def _see_ready(self, now_s: float) -> None:
        if self._fleet.has_ready(Tier.DECODE):
            self._last_ready_s = now_s

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def shares(self) -> Shares:
        """What other gateways need to know of the queue."""
        return self._queue.shares()

    def take_shares(self, others: Mapping[str, Shares]) -> None:
        """Count what other gateways give to accounts, by gateway."""
        charges, waiting = self._rivals.update(others)
        floor = max((shares.floor for shares in others.values()), default=0.0)
        self._queue.share(floor, charges, waiting)
        self._wake.set()

    def place(
        self,
        spec: SequenceSpec,
        need: Need,
        on_place: OnPlace,
        *,
        is_return: bool = False,
        account: bytes = b"",
        deadline_s: float = inf,
    ) -> Waiting:
        """Place a sequence now, or queue it. `on_place` is called once with a placement, which the
        caller must release, or with an error; it is not called after `cancel`.

        need: requirements of `spec`.
        is_return: the sequence was placed before; it keeps its rank and is accepted by a full
        queue.
        account: the account to charge.
        deadline_s: of the request, on the event loop's clock.
        Errors passed to on_place: Overloaded, NoWorkers, and InvalidRequest if no worker could ever
        hold the sequence.
        """
        digests = self._digests_of(spec)
        now_s = asyncio.get_running_loop().time()
        if not is_return:
            self.log.on_arrival(spec.request_id, now_s, need.num_tokens)
            self._spare.on_request(account, now_s)
        slo = spec.slo or self._fleet.slo
        late_s = now_s + self._fleet.spare_ttft_s(need.num_tokens, slo)
        ttft_s = inf if slo.ttft_s is None else slo.ttft_s
        waiting = Waiting(
            spec, need, digests, on_place, account, is_return, deadline_s, late_s, ttft_s
        )
        try:
            self._see_ready(now_s)
            if not is_return and now_s - self._last_ready_s >= NO_WORKER_GRACE_S:
                raise NoWorkers("no decode worker is ready", tier="decode")
            is_first = not (self._queue or self._queue.is_held(account))
            place = self._place(waiting, now_s) if is_first else None
            if isinstance(place, Placement):
                if self._queue.has_rivals:
                    self._queue.charge(waiting)
                waiting.answer(place)
                return waiting
            if not is_return:
                max_tokens = spec.sampling.max_tokens
                ask = Ask(account, waiting.width, need.num_tokens, max_tokens, deadline_s, spec.slo)
                waiting.late_s = self._late_s(ask, now_s)
                self._last_starts.add(self._last_start_s(waiting), waiting)
        except BatonError as error:
            waiting.answer(error)
            return waiting
        self._queue.add(waiting)
        self._estimate.set_waiting(True, now_s)
        self._wake.set()
        return waiting

    async def prepare(self, specs: Sequence[SequenceSpec]) -> None:
        """Hash the tokens of a request's sequences, which share its prompt, before `place` is
        called. Long sequences are hashed in pieces that yield to the event loop."""
        if all(spec.num_tokens < LONG_PIECE for spec in specs):
            return
        of_prompt = PrefixHasher(specs[0].prefix_key, self._key)
        await in_pieces(specs[0].prompt_token_ids, of_prompt.add)
        pacer = Pacer()
        for spec in specs:
            self._hashers[spec.request_id, spec.choice] = hasher = of_prompt.copy()
            await in_pieces(spec.output_token_ids, hasher.add)
            await pacer.advance(len(spec.output_token_ids))
        self._forget_hashers()

    def _digests_of(self, spec: SequenceSpec) -> tuple[Digest, ...]:
        """Digests of all tokens so far. A sequence with a stored hasher hashes only its new
        tokens."""
        name = spec.request_id, spec.choice
        hasher = self._hashers.get(name)
        if hasher is None:
            if spec.num_tokens < STORED_TOKENS:
                return prefix_digests(spec.token_ids, spec.prefix_key, self._key)
            hasher = self._hashers[name] = PrefixHasher(spec.prefix_key, self._key)
            self._forget_hashers()
        num_of_output = max(0, hasher.num_tokens - len(spec.prompt_token_ids))
        hasher.add(spec.prompt_token_ids[hasher.num_tokens :])
        hasher.add(spec.output_token_ids[num_of_output:])
        return tuple(digest for digest in hasher.digests if digest.num_tokens <= spec.num_tokens)

    def _forget_hashers(self) -> None:
        while len(self._hashers) > _MAX_HASHERS:
            self._hashers.popitem(last=False)

    def check(self, request_id: str, ask: Ask) -> None:
        """Raise Overloaded if `place` would refuse a request now, as far as that is known without
        its tokens. It costs a small part of preparing the request: what is refused under overload
        is to cost those that run as little as possible."""
        if not self._queue or not self._fleet.ready(Tier.DECODE):
            return
        now_s = asyncio.get_running_loop().time()
        try:
            self._late_s(ask, now_s)
        except Overloaded:
            self.log.on_arrival(request_id, now_s, ask.num_tokens)
            self._spare.on_request(ask.account, now_s)
            raise

    @property
    def is_refusing(self) -> bool:
        """Whether more requests come than there is room for: one was refused lately."""
        return asyncio.get_running_loop().time() < self._last_refusal_s + _REFUSING_S

    def _late_s(self, ask: Ask, now_s: float) -> float:
        """Time from which the first token of a request that arrives now would miss its target;
        -infinite if it waits too long for that. Raises Overloaded if the queue is full, or if it is
        expected to end after its deadline."""
        queue, estimate = self._queue, self._estimate
        account, width = ask.account, ask.width
        num_running = sum(worker.num_in_flight for worker in self._fleet.tier(Tier.DECODE))
        if len(queue) >= queue.max_size:
            self._last_refusal_s = now_s
            clear_s = estimate.seconds_for(queue.width, num_running, now_s)
            raise queue_full(len(queue), queue.max_size, clear_s)
        slo = ask.slo or self._fleet.slo
        late_s = now_s + self._fleet.spare_ttft_s(ask.num_tokens, slo)
        ttft_s = inf if slo.ttft_s is None else slo.ttft_s
        place_s = estimate.seconds_for(_WAIT_MARGIN, num_running, now_s)
        if place_s is None:
            return late_s
        wait_s = place_s * (queue.width_before(account, width, ttft_s) + width)
        on_time_in_s = now_s + wait_s - late_s
        if on_time_in_s > 0:
            late_s = -inf
            wait_s = place_s * (queue.width_before_late(account, width) + width)
        expected_s = wait_s + estimate.hold_s(ask.max_tokens)
        left_s = ask.deadline_s - now_s
        if expected_s > left_s:
            self._last_refusal_s = now_s
            is_told = estimate.is_agreed(now_s)
            if late_s > -inf:
                on_time_in_s = inf
            raise too_late(expected_s, left_s, is_told=is_told, on_time_in_s=on_time_in_s)
        return late_s

    def _last_start_s(self, waiting: Waiting) -> float:
        """Time at which it must be placed to end by its deadline; infinite for what was placed
        before."""
        hold_s = self._estimate.hold_s(waiting.spec.sampling.max_tokens)
        return inf if waiting.is_return else waiting.deadline_s - hold_s

    def _refuse_hopeless(self, waitings: Iterable[Waiting], now_s: float) -> None:
        """Refuse those that would miss their deadline if they were placed now."""
        for waiting in waitings:
            start_s = self._last_start_s(waiting)
            if start_s > now_s:  # running times are shorter than they were
                self._last_starts.add(start_s, waiting)
                continue
            self._queue.remove(waiting)
            left_s = waiting.deadline_s - now_s
            waiting.answer(too_late(waiting.deadline_s - start_s, left_s, is_told=True))

    def cancel(self, waiting: Waiting) -> None:
        """Stop waiting. Idempotent."""
        if not waiting.is_over:
            waiting.is_over = True
            self._queue.remove(waiting)
            self._wake.set()

    def keeps_last_place(self, now_s: float) -> bool:
        """Whether the decode tier has but one place left, and keeps it for an account that has
        none."""
        return self._spare.is_kept(now_s) and self._num_free <= 1

    @property
    def _num_free(self) -> float:
        """Free places of the decode tier. Infinite for tiers that keep none: large ones have free
        places all the time, and small ones too few."""
        ready = self._fleet.ready(Tier.DECODE)
        if not 0 < len(ready) <= NUM_DRAWN:
            return inf
        num_places = sum(worker.max_num_seqs for worker in ready)
        return sum(worker.num_free for worker in ready) if num_places >= MIN_PLACES else inf

    def place_now(
        self, spec: SequenceSpec, among: Collection[Worker], account: bytes = b""
    ) -> Placement | None:
        """Claim room for a running sequence on one of these decode workers; None if none has room
        now.

        It bypasses the queue: moving a running sequence takes no place from a waiting one.
        """
        need = Need.of(spec)
        digests = self._digests_of(spec)
        matched = self._affinity.matched_tokens(digests)
        views = [w.decode_view(matched) for w in among if w.is_ready]
        choice = choose(need, [], views, self._next_key())
        if not isinstance(choice, Plan):
            return None
        return self._claim(need, digests, choice, 0, account)

    def record(self, worker: Worker, spec: SequenceSpec) -> None:
        """Record that `worker` holds the KV of all tokens of `spec`, an output that has ended."""
        start_s = self._starts_s.get(spec.request_id)
        if start_s is not None:
            hold_s = asyncio.get_running_loop().time() - start_s
            self._estimate.on_ended(hold_s, len(spec.output_token_ids))
        self.log.on_ended(spec.request_id, len(spec.output_token_ids))
        self._affinity.record(self._digests_of(spec), worker.address)
        self._hashers.pop((spec.request_id, spec.choice), None)

    async def run(self) -> None:
        """Place queued sequences until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            self._queue.has_held = False
            self._is_placing = True
            self._refuse_hopeless(self._last_starts.due(loop.time()), loop.time())
            is_full = self._place_all(loop.time())
            held_until_s = self._place_held(loop.time())
            self._is_placing = False
            if is_full and len(self._fleet.workers) > _MANY_WORKERS:
                await asyncio.sleep(_SEARCH_PAUSE_S)
            since_s = min(self._stranded_s.values(), default=inf)
            last_start_s = self._last_starts.next_s(len(self._queue))
            until_s = min(since_s + NO_WORKER_GRACE_S, held_until_s, last_start_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until_s if until_s < inf else None):
                    await self._wake.wait()

    def _place_held(self, now_s: float) -> float:
        """Place the first sequence held up for other gateways', if any, once these have left its
        room for HOLD_S. Return when to look again."""
        queue = self._queue
        queue.ignores_rivals = True
        waiting = queue.pop(now_s) if queue.has_held else None
        queue.ignores_rivals = False
        if waiting is None:
            self._room_since_s = inf
            return inf
        queue.add(waiting)
        matched = self._affinity.matched_tokens(waiting.digests)
        choice = self._placing(waiting.need, self._fleet, matched, self._next_key())
        if not isinstance(choice, Plan):
            self._room_since_s = inf
            return inf
        self._room_since_s = min(self._room_since_s, now_s)
        if now_s < self._room_since_s + HOLD_S:
            return self._room_since_s + HOLD_S
        self._room_since_s = inf
        queue.ignores_rivals = True
        self._place_all(now_s)
        was_placed, queue.ignores_rivals = not queue.ignores_rivals, False
        # Else the room is kept for an account that is expected: until something changes.
        return now_s + HOLD_S if was_placed else inf

    def _place_all(self, now_s: float) -> bool:
        """Place queued sequences in order, up to the first that must not be overtaken any more.
        Return whether any is blocked for lack of room."""
        passed_over: list[Waiting] = []
        blocked: list[Waiting] = []
        kept: dict[bytes, Waiting] = {}
        """First of each account that leaves the last place to others."""
        while len(blocked) + len(kept) < _MAX_BLOCKED and all(b.may_be_overtaken for b in blocked):
            waiting = self._queue.pop(now_s, kept)
            if waiting is None:
                break
            if not all(map(waiting.may_overtake, blocked)):
                blocked.append(waiting)
                continue
            if self._last_start_s(waiting) < now_s:
                self._refuse_hopeless((waiting,), now_s)
                continue
            place = self._place(waiting, now_s)
            if isinstance(place, Placement):
                self._queue.charge(waiting)
                self._estimate.on_served(waiting.width, now_s)
                for other in blocked:
                    other.num_overtaking += waiting.width
                waiting.answer(place)
            elif place is Verdict.NOT_NOW:
                if self._is_last_kept_from(waiting, now_s):
                    kept[waiting.account] = waiting
                else:
                    blocked.append(waiting)
            elif error := self._why_hopeless(waiting, now_s):
                waiting.answer(error)
            else:
                passed_over.append(waiting)
        self._put_back(passed_over, (*blocked, *kept.values()), now_s)
        return bool(blocked or kept)

    def _put_back(
        self, passed_over: Sequence[Waiting], others: Sequence[Waiting], now_s: float
    ) -> None:
        """Queue again what was not placed. passed_over: what no ready worker could serve."""
        # An answer may have cancelled other sequences.
        passed_over = [waiting for waiting in passed_over if not waiting.is_over]
        self._stranded_s = {
            waiting.rank: self._stranded_s.get(waiting.rank, now_s) for waiting in passed_over
        }
        for waiting in (*passed_over, *others):
            if not waiting.is_over:
                self._queue.add(waiting)
        self._estimate.set_waiting(bool(self._queue), now_s)

    def _next_key(self) -> bytes:
        self._num_tries += 1
        return self._key + self._num_tries.to_bytes(8, "big")

    def _place(self, waiting: Waiting, now_s: float) -> Placement | Verdict:
        """Place one sequence, or return why not."""
        self._fleet.broken_pairs.expire(now_s)
        matched = self._affinity.matched_tokens(waiting.digests)
        need, account = waiting.need, waiting.account
        if not self._is_last_kept_from(waiting, now_s):
            choice = self._placing(need, self._fleet, matched, self._next_key())
        elif self._num_free:
            choice = plan(need, self._fleet, matched, self._next_key(), is_full=True)
        else:  # nor the last one of a prefill worker that decodes
            return Verdict.NOT_NOW
        if isinstance(choice, Verdict):
            return choice
        self._starts_s.setdefault(waiting.spec.request_id, now_s)
        if len(self._starts_s) > _MAX_STARTS:
            self._starts_s.popitem(last=False)
        num_cached = matched.get(choice.prefill or choice.decode or "", 0)
        num_missing = max(1, need.num_tokens - num_cached)
        if not waiting.is_return:
            self.log.on_placed(waiting.spec.request_id, num_missing)
        return self._claim(need, waiting.digests, choice, num_missing, account)

    def _is_last_kept_from(self, waiting: Waiting, now_s: float) -> bool:
        """Whether a sequence must leave the last place to others. One that comes back need not."""
        is_kept = not waiting.is_return and self._spare.is_kept_from(waiting.account, now_s)
        return is_kept and self._num_free <= waiting.width

    def _claim(
        self,
        need: Need,
        digests: tuple[Digest, ...],
        choice: Plan,
        num_prefill_tokens: int,
        account: bytes,
    ) -> Placement:
        workers = self._fleet.workers
        prefill = workers[choice.prefill] if choice.prefill else None
        decode = workers[choice.decode] if choice.decode else None
        num_blocks = decode.decode_view().num_blocks_for(need) if decode else 0
        for worker in (prefill, decode):
            if worker:
                self._affinity.record(digests, worker.address)
        if decode:
            self._spare.on_placed(account)
        return Placement(
            self._fleet,
            self._num_tries,
            prefill,
            decode,
            num_prefill_tokens,
            num_blocks,
            need.num_sequences,
            partial(self._spare.on_released, account),
        )

    def _why_hopeless(self, waiting: Waiting, now_s: float) -> BatonError | None:
        """The error if no suitable worker is expected to come back; None if one may."""
        known = [w.decode_view() for w in self._fleet.tier(Tier.DECODE) if w.is_known]
        if self._fleet.ready(Tier.DECODE) and not any(view.fits(waiting.need) for view in known):
            max_num_seqs = max((view.max_num_seqs for view in known), default=0)
            return _never_fits(waiting.need, max_num_seqs)
        if now_s - self._stranded_s.get(waiting.rank, now_s) >= NO_WORKER_GRACE_S:
            numerics = waiting.need.numerics
            of_class = f" and is of its numerics class ({numerics})" if numerics else ""
            text = f"no worker that can serve this{of_class} was ready for {NO_WORKER_GRACE_S:g} s"
            return NoWorkers(text, tier="decode")
        return None


def _never_fits(need: Need, max_num_seqs: int) -> InvalidRequest:
    if need.num_sequences > max_num_seqs:
        return InvalidRequest.of(
            FieldViolation(
                "sampling",
                f"{need.num_sequences} choices or beams are more than any decode worker here runs "
                f"at once; ask for at most {max_num_seqs}",
            )
        )
    return InvalidRequest.of(
        FieldViolation(
            "prompt",
            f"{need.num_tokens} tokens, up to {need.max_num_tokens} with the output, are more than "
            "any decode worker here holds; shorten the prompt or lower sampling.max_tokens",
        )
    )
