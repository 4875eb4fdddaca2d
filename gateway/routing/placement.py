"""Placement of one sequence: the router's choice among a sample of the fleet's workers, and the
claim on the chosen ones.

Comparing a thousand workers for each sequence costs more than it gains. A few random workers are
nearly as good, and keep gateways with equal load data from all choosing the same worker. Workers
that probably hold the prompt's prefix are added to the sample. All workers are compared only if the
sample does not suffice.
"""

from __future__ import annotations

import enum
import logging
import random
from collections.abc import Callable, Mapping, Sequence

from baton.types import Tier
from gateway.routing.fleet import Fleet, Worker
from gateway.routing.router import (
    Need,
    Plan,
    Verdict,
    choose,
    choose_host_memory,
    choose_prefill_to_stay,
)

_log = logging.getLogger(__name__)

#: Random workers per tier in the sample.
NUM_DRAWN = 12


def plan(
    need: Need, fleet: Fleet, matched: Mapping[str, int], key: bytes, *, is_full: bool = False
) -> Plan | Verdict:
    """Place one sequence among the fleet's ready workers.

    matched: leading tokens probably cached, by worker address.
    key: seed of the random choices.
    is_full: take the decode tier as full.
    """
    slo = need.slo or fleet.slo
    decodes = fleet.ready(Tier.DECODE)
    prefills = fleet.ready(Tier.PREFILL) if fleet.has_split else ()
    if need.numerics is not None:
        prefills = [w for w in prefills if w.info and w.info.numerics == need.numerics]
        decodes = [w for w in decodes if w.info and w.info.numerics == need.numerics]
    drawn = (
        _some(prefills, fleet, Tier.PREFILL, matched, key),
        _some(decodes, fleet, Tier.DECODE, matched, key),
    )
    choice: Plan | Verdict = Verdict.NO_WORKER
    for some_prefills, some_decodes in () if is_full else (drawn, (prefills, decodes)):
        choice = choose(
            need,
            [w.prefill_view(matched, fleet.prefill_work, slo) for w in some_prefills],
            [w.decode_view(matched, fleet.barred_from(w.address), slo) for w in some_decodes],
            key,
            slo,
        )
        is_all = some_prefills is prefills and some_decodes is decodes
        if is_all or (isinstance(choice, Plan) and _is_good(choice, need, fleet)):
            break
    if is_full:
        choice = Verdict.NOT_NOW
    is_full = choice is Verdict.NOT_NOW and not any(d.is_awaiting_report for d in decodes)
    if not (is_full and need.needs_decode and prefills):
        return choice
    # Late handoff: while the decode tier is full, a prefill worker keeps decoding.
    views = [w.prefill_view(matched, fleet.prefill_work, slo) for w in drawn[0]]
    stay = choose_prefill_to_stay(need, views, [w.decode_view() for w in drawn[0]], key)
    if stay:
        return stay
    # Or the prompt is computed, and waits in the host memory of a decode worker.
    taking = [w.decode_view(matched, fleet.barred_from(w.address)) for w in drawn[1]]
    return choose_host_memory(need, views, taking, key) or choice


def _is_good(choice: Plan, need: Need, fleet: Fleet) -> bool:
    """Whether comparing all workers could not yield a better kind of plan: none of its workers is
    to be avoided, and the prompt is computed in the right tier."""
    if {choice.prefill, choice.decode} & need.avoid:
        return False
    if choice.prefill is not None or not fleet.ready(Tier.PREFILL):
        return True
    decode = fleet.workers[choice.decode] if choice.decode else None
    if decode is None:
        return False
    if decode.load.is_colocated:
        return True
    # Otherwise it computes the prompt because that is faster, not because no KV reaches it.
    is_cut_off = decode.address in need.unreached or fleet.barred_from(decode.address)
    return need.num_tokens <= decode.load.local_prefill_threshold or not is_cut_off


def _some(
    ready: Sequence[Worker], fleet: Fleet, tier: Tier, matched: Mapping[str, int], key: bytes
) -> Sequence[Worker]:
    if len(ready) <= NUM_DRAWN:
        return ready
    drawn = random.Random(key + bytes((tier,))).sample(ready, NUM_DRAWN)
    some = {worker.address: worker for worker in drawn}
    for address in matched:
        worker = fleet.workers.get(address)
        if worker is not None and worker.tier is tier and worker.is_ready:
            some[address] = worker
    return tuple(some.values())


class Outcome(enum.Enum):
    """An event in the life of a placement."""

    RESERVED = enum.auto()
    """The owner has reserved blocks; its reports include them from now on."""
    REFUSED = enum.auto()
    """The owner had no room, or takes no more work."""
    REFUSED_BY_SOURCE = enum.auto()
    """The source takes no more work."""
    PREFILLED = enum.auto()
    """The prompt is computed, or needs no computing."""
    ONE_ENDED = enum.auto()
    """One of several sequences has ended at the owner."""
    RELEASED = enum.auto()
    """Neither worker holds anything of it."""


class Placement:
    """A sequence's claim on workers, counted in the fleet until its release. Release is idempotent.

    The sequence runs at its owner. The source, if any, only computes its prompt; otherwise the
    owner does.
    """

    def __init__(
        self,
        fleet: Fleet,
        placement_id: int,
        prefill: Worker | None,
        decode: Worker | None,
        num_prefill_tokens: int,
        num_blocks: int,
        num_sequences: int = 1,
        on_release: Callable[[], None] | None = None,
    ) -> None:
        """prefill: worker that computes the prompt, as a prefill worker.
        decode: worker that runs the sequence beyond its first tokens. At least one of the two is
        set; both may be the same.
        num_prefill_tokens: prompt tokens that probably have to be computed; at least 1 with a
        prefill worker, 0 where a migration sends the KV.
        num_sequences: sequences that it becomes on the decode worker.
        on_release: called once the decode worker has none of them."""
        owner = decode or prefill
        if owner is None or owner.link is None:
            raise ValueError("a placement without a worker that was reached")
        self.prefill = prefill
        self.decode = decode
        self.owner = owner
        self.source = prefill if prefill is not owner else None
        self.prefill_name = prefill.name if prefill else ""
        self.decode_name = decode.name if decode else ""
        first = self.source or owner
        keeps_class = fleet.numerics.is_strict
        self.numerics = first.info.numerics if keeps_class and first.info else None
        """Numerics class that the sequence must keep, that of the worker of its first token; None
        for any."""
        # Links as of now: after a loss the same address gets a new link.
        self.owner_link = owner.link
        self.source_link = self.source.link if self.source else None
        self._fleet = fleet
        self._id = placement_id
        self._computing = prefill or owner
        self._prefill_tokens = num_prefill_tokens
        self._num_sequences = num_sequences if decode else 0
        self._on_release = on_release
        if prefill:
            prefill.num_in_flight += prefill is not decode
            fleet.prefill_work.give(prefill.address, num_prefill_tokens)
        self._computing.outstanding_tokens += num_prefill_tokens
        if decode:
            decode.num_in_flight += num_sequences
            decode.num_homed += num_sequences
            decode.unreported_blocks[placement_id] = num_blocks

    def bypasses_split(self, num_missing_tokens: int) -> bool:
        """Whether a decode worker that computes `num_missing_tokens` tokens does the work of
        available prefill workers."""
        info = self.decode.info if self.decode else None
        if info is None or self.owner.tier is Tier.PREFILL:
            return False
        is_too_long = num_missing_tokens > info.max_local_prefill_tokens
        return is_too_long and bool(self._fleet.tier(Tier.PREFILL))

    def record(self, outcome: Outcome) -> None:
        match outcome:
            case Outcome.RESERVED:
                if self._num_sequences:
                    self.owner.settled.add(self._id)
            case Outcome.REFUSED:
                self.owner.is_awaiting_report = True
            case Outcome.REFUSED_BY_SOURCE:
                if self.source:
                    self.source.is_awaiting_report = True
            case Outcome.PREFILLED:
                self._release_prefill()
            case Outcome.ONE_ENDED:
                if self.decode and self._num_sequences > 1:
                    self._num_sequences -= 1
                    self.decode.num_in_flight -= 1
                    self.decode.num_homed -= 1
                    self._fleet.changed()
            case Outcome.RELEASED:
                self.release()

    def note_undelivered(self, sender: Worker, why: str, now_s: float) -> None:
        """Record that `sender` could not deliver KV to the owner."""
        if not (sender.is_joined and self.owner.is_joined):
            return
        rest_s = self._fleet.broken_pairs.note(sender.address, self.owner.address, now_s)
        if rest_s is not None:
            _log.warning(
                "worker %s could not deliver KV to %s, and is not paired with it for %g s: %s",
                sender.name,
                self.owner.name,
                rest_s,
                why,
            )

    def release(self) -> None:
        """Release all claims. Idempotent."""
        self._release_prefill()
        if self.decode and self._num_sequences:
            self.decode.num_in_flight -= self._num_sequences
            self.decode.num_homed -= self._num_sequences
            self._num_sequences = 0
            self.decode.unreported_blocks.pop(self._id, None)
            if self._on_release is not None:
                self._on_release()
            self._fleet.changed()

    def _release_prefill(self) -> None:
        if self._prefill_tokens:
            if self.prefill:
                self.prefill.num_in_flight -= self.prefill is not self.decode
            self._computing.outstanding_tokens -= self._prefill_tokens
            self._prefill_tokens = 0
            self._fleet.changed()
