"""Gives waiting sequences to workers, in order of rank, when there is room: late binding.

A sequence that nobody waits before is placed at once, if there is room. Else by one task, woken by
whatever may make
room: a new one, a load report, a worker that joins, a placement's end. Strictly in order: while the
first cannot be placed nobody else is, so that nobody starves. Only what no ready worker could ever
serve is passed over, and fails when no worker that it waits for comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from baton.errors import BatonError, FieldViolation, InvalidRequest, NoWorkers
from baton.types import NumericsClass, Rank, SequenceSpec, Tier
from gateway.routing.admission import AdmissionQueue
from gateway.routing.fleet import Fleet, Worker
from gateway.routing.history import Digest, PrefixAffinity, prefix_digests
from gateway.routing.placement import Placement, plan
from gateway.routing.router import Need, Plan, Verdict, choose

#: How long what waits already goes on waiting for a worker that can serve it.
NO_WORKER_GRACE_S = 10.0

#: Prefix digests remembered; about 300 bytes each.
_MAX_DIGESTS = 131_072

#: In a fleet of more workers than this, a search that found no room is not repeated at each report
#: of one of them, but after a pause, in seconds.
_MANY_WORKERS, _SEARCH_PAUSE_S = 64, 0.005

#: Share of the newest interval in the mean interval between two placements.
_INTERVAL_WEIGHT = 0.1


#: Called with the place, or with why there will be none; quick, raises nothing.
OnPlace = Callable[[Placement | BatonError], None]


@dataclass(slots=True, eq=False)
class Waiting:
    """A sequence in the queue."""

    spec: SequenceSpec
    need: Need
    digests: tuple[Digest, ...]
    on_place: OnPlace
    is_over: bool = False
    """Whether it was answered, or given up."""

    def answer(self, place: Placement | BatonError) -> None:
        self.is_over = True
        self.on_place(place)


class Dispatcher:
    """The queue and its task. `run` must be running for what waits to be placed."""

    def __init__(self, fleet: Fleet, *, max_queue_size: int, key: bytes) -> None:
        """`key`: a secret of this process, so that nobody can aim at another's prefixes or at a
        worker."""
        self._fleet = fleet
        self._key = key
        self._queue: AdmissionQueue[Waiting] = AdmissionQueue(max_queue_size)
        self._affinity = PrefixAffinity(_MAX_DIGESTS)
        self._wake = asyncio.Event()
        self._num_tries = 0
        self._placed_at_s = 0.0
        self._interval_s = 0.0
        self._stranded_s: dict[Rank, float] = {}
        """Since when each that no ready worker could serve waits."""
        fleet.listen(self._wake.set)
        fleet.listen_leave(self._affinity.forget)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    def place(
        self,
        spec: SequenceSpec,
        on_place: OnPlace,
        *,
        is_return: bool = False,
        avoid: frozenset[str] = frozenset(),
        unreached: frozenset[str] = frozenset(),
        numerics: NumericsClass | None = None,
    ) -> Placement | Waiting:
        """A place, which the caller releases; or one in the queue: `on_place` is called then,
        unless it is cancelled.

        is_return: the sequence was placed before, and now keeps its rank and finds room in the
        queue.
        avoid, unreached, numerics: see Need; numerics counts in a strict fleet only. Raises
        Overloaded, NoWorkers. on_place may get NoWorkers, or InvalidRequest if no worker could ever
        hold it.
        """
        if not is_return and not self._fleet.ready(Tier.DECODE):
            raise NoWorkers("no decode worker is ready", tier="decode")
        waiting = Waiting(
            spec,
            _need_of(spec, avoid, unreached, numerics if self._fleet.numerics.is_strict else None),
            prefix_digests(spec.token_ids, spec.tenant, self._key),
            on_place,
        )
        if not self._queue:
            place = self._place(waiting, asyncio.get_running_loop().time())
            if isinstance(place, Placement):
                return place
        self._queue.add(spec.rank, waiting, is_return=is_return, seconds_per_item=self._interval_s)
        self._wake.set()
        return waiting

    def cancel(self, waiting: Waiting) -> None:
        """It waits no more. Idempotent."""
        if not waiting.is_over:
            waiting.is_over = True
            self._queue.remove(waiting.spec.rank)
            self._wake.set()

    def place_now(self, spec: SequenceSpec, among: Collection[Worker]) -> Placement | None:
        """Claim room for a running sequence on one of these decode workers; None if none takes it
        now.

        It does not queue: what runs already makes no other wait longer by running elsewhere.
        """
        need = _need_of(spec)
        digests = prefix_digests(spec.token_ids, spec.tenant, self._key)
        matched = self._affinity.matched_tokens(digests)
        views = [w.decode_view(matched.get(w.address, 0)) for w in among if w.is_ready]
        self._num_tries += 1
        key = self._key + self._num_tries.to_bytes(8, "big")
        choice = choose(need, [], views, key)
        return self._claim(need, digests, choice, matched) if isinstance(choice, Plan) else None

    def record(self, worker: Worker, spec: SequenceSpec) -> None:
        """Remember that `worker` has the KV of all tokens of `spec`."""
        self._affinity.record(
            prefix_digests(spec.token_ids, spec.tenant, self._key), worker.address
        )

    async def run(self) -> None:
        """Place what waits, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            is_full = self._place_all(loop.time())
            if is_full and len(self._fleet.workers) > _MANY_WORKERS:
                await asyncio.sleep(_SEARCH_PAUSE_S)
            since_s = min(self._stranded_s.values(), default=None)
            until_s = None if since_s is None else since_s + NO_WORKER_GRACE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await self._wake.wait()

    def _place_all(self, now_s: float) -> bool:
        """Place from the head on, up to the first that has to wait for room; whether there is such
        a one."""
        passed_over: list[Waiting] = []
        is_full = False
        while (waiting := self._queue.pop()) is not None:
            place = self._place(waiting, now_s)
            if isinstance(place, Placement):
                waiting.answer(place)
            elif place is Verdict.NOT_NOW:
                self._queue.restore(waiting.spec.rank, waiting)
                is_full = True
                break
            elif error := self._why_hopeless(waiting, now_s):
                waiting.answer(error)
            else:
                passed_over.append(waiting)
        # An answer may have led to others being given up.
        passed_over = [waiting for waiting in passed_over if not waiting.is_over]
        self._stranded_s = {
            waiting.spec.rank: self._stranded_s.get(waiting.spec.rank, now_s)
            for waiting in passed_over
        }
        for waiting in passed_over:
            self._queue.restore(waiting.spec.rank, waiting)
        return is_full

    def _place(self, waiting: Waiting, now_s: float) -> Placement | Verdict:
        """Place one, or say why not."""
        self._fleet.broken_pairs.expire(now_s)
        matched = self._affinity.matched_tokens(waiting.digests)
        self._num_tries += 1
        key = self._key + self._num_tries.to_bytes(8, "big")
        choice = plan(waiting.need, self._fleet, matched, key)
        if isinstance(choice, Verdict):
            return choice
        placement = self._claim(waiting.need, waiting.digests, choice, matched)
        self._interval_s += _INTERVAL_WEIGHT * (now_s - self._placed_at_s - self._interval_s)
        self._placed_at_s = now_s
        return placement

    def _claim(
        self, need: Need, digests: tuple[Digest, ...], choice: Plan, matched: Mapping[str, int]
    ) -> Placement:
        workers = self._fleet.workers
        prefill = workers[choice.prefill] if choice.prefill else None
        decode = workers[choice.decode] if choice.decode else None
        num_cached = matched.get(prefill.address, 0) if prefill else 0
        num_blocks = decode.decode_view(0).num_blocks_for(need) if decode else 0
        for worker in (prefill, decode):
            if worker:
                self._affinity.record(digests, worker.address)
        return Placement(
            self._fleet,
            self._num_tries,
            prefill,
            decode,
            max(1, need.num_tokens - num_cached),
            num_blocks,
            need.num_sequences,
        )

    def _why_hopeless(self, waiting: Waiting, now_s: float) -> BatonError | None:
        """Why no worker that can serve it will come; None if one may yet."""
        known = [w.decode_view(0) for w in self._fleet.tier(Tier.DECODE) if w.is_known]
        if self._fleet.ready(Tier.DECODE) and not any(view.fits(waiting.need) for view in known):
            max_num_seqs = max((view.max_num_seqs for view in known), default=0)
            return _never_fits(waiting.need, max_num_seqs)
        if now_s - self._stranded_s.get(waiting.spec.rank, now_s) >= NO_WORKER_GRACE_S:
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


def _need_of(
    spec: SequenceSpec,
    avoid: frozenset[str] = frozenset(),
    unreached: frozenset[str] = frozenset(),
    numerics: NumericsClass | None = None,
) -> Need:
    beam = spec.sampling.beam
    num_left = spec.sampling.max_tokens - len(spec.output_token_ids)
    return Need(
        num_tokens=spec.num_tokens,
        max_num_tokens=len(spec.prompt_token_ids) + spec.sampling.max_tokens,
        needs_decode=num_left > 1 or beam is not None,
        avoid=avoid,
        num_sequences=beam.width if beam else spec.num_choices,
        unreached=unreached,
        numerics=numerics,
    )
