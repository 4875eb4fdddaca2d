"""Chooses the workers of a sequence, and the running sequences to move. Pure: snapshots in; a plan,
or a reason to wait, out.

The cost of a prefill worker is in tokens: its pending tokens, plus the sequence's tokens that its
cache probably lacks, which weigh more. A cached prefix wins while it saves more than the difference
of the queues. Its value falls by the work that its worker recently did above the tier's mean plus
one batch, so that a popular prefix spreads before it creates a hot spot. Equal workers are ordered
by recent work. The cost of a decode worker is its fill, batch or memory; a cached prefix decides
only between similar ones. A decode worker that no prefill worker can send KV to is the last choice,
and computes the prompt itself.

A decode worker is short when few of its blocks are available. Its worst-ranked sequences, which it
would preempt first, then move until it has some room. They move to workers that keep plenty of
blocks even with them. The three thresholds are apart, so that nothing moves back: a target stays
above the level at which moving stops, which is above the level at which it starts.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

from baton.types import NO_SLO, KvLayout, NumericsClass, Rank, SequenceSpec, Slo
from engine.kv.layout import groups_of
from gateway.routing.ways import Way, choose_way

#: Weight of a token to recompute, relative to a token to wait for: it delays all later sequences,
#: too.
RECOMPUTE_WEIGHT = 2.0

#: Assumed prefill speed of a decode worker before its first measurement, as a share of a prefill
#: worker's.
ASSUMED_SHARE = 0.5

#: Share of its prefill speed that a decode worker reaches while other prompts precede this one.
BEHIND_SHARE = 0.5

#: Tokens of an answer that are counted on where its maximum is larger.
USUAL_OUTPUT_TOKENS = 256

#: Difference in fill (0..1) that a fully cached prompt outweighs: relative to the fill, and its
#: minimum.
AFFINITY_SHARE, MIN_AFFINITY = 0.05, 0.02

#: Shares of available blocks: below SHORT a worker sheds sequences, up to RELIEVED; PLENTY must
#: remain at their target.
SHORT, RELIEVED, PLENTY = 0.1, 0.2, 0.4


@dataclass(frozen=True, slots=True)
class Need:
    """Requirements of a sequence.

    num_tokens: prompt and output tokens so far; their KV is to be computed or sent.
    max_num_tokens: maximum length.
    needs_decode: whether it continues after the token of the prefill.
    avoid: addresses of workers that failed this sequence; used only if there are no others.
    num_sequences: sequences on the decode worker (choices or beams) that share the tokens so far.
    unreached: addresses of decode workers that its KV could not be sent to; they compute the prompt
    if they are used.
    numerics: class of the workers that its tokens came from, if it must not change; None for any.
    slo: targets of its class; None: the deployment's.
    """

    num_tokens: int
    max_num_tokens: int
    needs_decode: bool
    avoid: frozenset[str] = frozenset()
    num_sequences: int = 1
    unreached: frozenset[str] = frozenset()
    numerics: NumericsClass | None = None
    slo: Slo | None = None

    @classmethod
    def of(
        cls,
        spec: SequenceSpec,
        avoid: frozenset[str] = frozenset(),
        unreached: frozenset[str] = frozenset(),
        numerics: NumericsClass | None = None,
    ) -> Need:
        """The requirements of `spec`."""
        num_left = spec.sampling.max_tokens - len(spec.output_token_ids)
        return cls(
            num_tokens=spec.num_tokens,
            max_num_tokens=len(spec.prompt_token_ids) + spec.sampling.max_tokens,
            needs_decode=num_left > 1 or spec.sampling.beam is not None,
            avoid=avoid,
            num_sequences=spec.width,
            unreached=unreached,
            numerics=numerics,
            slo=spec.slo,
        )


@dataclass(frozen=True, slots=True)
class PrefillView:
    """Snapshot of a ready prefill worker.

    ahead_tokens: recent tokens above its tier's mean; negative below it.
    batch_tokens: maximum tokens of one step; a smaller lead is ignored.
    """

    address: str
    max_model_len: int
    outstanding_tokens: int
    max_outstanding_tokens: float
    matched_tokens: int = 0
    ahead_tokens: float = 0.0
    batch_tokens: int = 0
    prefill_tokens_per_s: int = 0
    is_awaiting_report: bool = False

    def ttft_s(self, need: Need, others_tokens_per_s: int) -> float:
        """Estimated seconds until the prompt is computed, including the queue before it. The speed
        used is at least `others_tokens_per_s`, that of a decode worker: the own measurement may be
        old or missing, and a worker without work would never update it."""
        num_missing = max(1, need.num_tokens - self.matched_tokens)
        speed = max(self.prefill_tokens_per_s, others_tokens_per_s)
        return (self.outstanding_tokens + num_missing) / speed

    def worth_of_cache(self) -> float:
        """Queued tokens that its cached prefix outweighs."""
        lead = max(0.0, self.ahead_tokens - self.batch_tokens)
        return max(0.0, RECOMPUTE_WEIGHT * self.matched_tokens - lead)


@dataclass(frozen=True, slots=True)
class DecodeView:
    """Snapshot of a ready decode worker.

    num_available_blocks: free or evictable, as last reported, less blocks reserved since.
    num_sequences: running, waiting and on their way to it.
    unreached_by: addresses of prefill workers that cannot send it KV.
    max_shared_tokens: longest prompt that it computes although prefill workers are available.
    pending_tokens: prompt tokens that it has yet to compute; with max_pending_tokens or more it is
    given no further prompt to compute.
    prefill_tokens_per_s: its prefill speed beside the sequences that decode here; 0 if unknown.
    num_host_blocks: blocks of KV that may arrive in host memory now.
    is_colocated: whether it computes all prompts of its sequences.
    sequence_s: seconds that a sequence adds to each step; 0 if unknown.
    """

    address: str
    max_model_len: int
    max_local_prefill_tokens: int
    layout: KvLayout
    num_blocks: int
    num_available_blocks: int
    num_sequences: int
    max_num_seqs: int
    is_awaiting_report: bool = False
    matched_tokens: int = 0
    unreached_by: Set[str] = frozenset()
    max_shared_tokens: int = 0
    pending_tokens: int = 0
    max_pending_tokens: float = math.inf
    prefill_tokens_per_s: int = 0
    num_host_blocks: int = 0
    is_colocated: bool = False
    sequence_s: float = 0.0

    def ttft_s(self, need: Need, assumed_tokens_per_s: float) -> float:
        """Estimated seconds until the prompt is computed in chunks beside decoding sequences;
        infinite for a prompt above max_shared_tokens.
        assumed_tokens_per_s: speed before the first measurement."""
        if need.num_tokens > self.max_shared_tokens:
            return math.inf
        num_missing = max(1, need.num_tokens - self.matched_tokens)
        speed = self.prefill_tokens_per_s or assumed_tokens_per_s
        if self.pending_tokens:  # an earlier prompt then decodes beside the later ones
            speed *= BEHIND_SHARE
        return (self.pending_tokens + num_missing) / speed

    def num_blocks_for(self, need: Need) -> int:
        """Shared blocks, plus one block to write into for each sequence but the first."""
        return groups_of(self.layout).num_held_blocks(need.num_tokens + 1) + need.num_sequences - 1

    def fits(self, need: Need) -> bool:
        """Whether the sequence fits into the empty worker."""
        if self.max_model_len < need.max_num_tokens or self.max_num_seqs < need.num_sequences:
            return False
        return self.num_blocks_for(need) <= self.num_blocks

    def has_room(self, need: Need) -> bool:
        """Whether it fits now, with one block left for the growth of each running sequence."""
        num_sequences = self.num_sequences + need.num_sequences
        if self.is_awaiting_report or num_sequences > self.max_num_seqs:
            return False
        watermark = min(self.num_sequences, self.num_blocks // 8)
        return self.num_blocks_for(need) + watermark <= self.num_available_blocks

    def takes_in_host(self, need: Need) -> bool:
        """Whether the KV of such a prompt may arrive before it has blocks."""
        is_sent = need.num_tokens > self.max_local_prefill_tokens
        return self.num_host_blocks > 0 and is_sent and self.fits(need) and need.num_sequences == 1

    def has_room_to_stay(self, need: Need) -> bool:
        """Whether a prefill worker may run the sequence: half of its blocks stay free for
        prompts."""
        num_left = self.num_available_blocks - self.num_blocks_for(need)
        return self.has_room(need) and num_left >= self.num_blocks // 2

    def is_reached_by(self, need: Need, prefills: Sequence[PrefillView]) -> bool:
        """Whether one of these can send KV here."""
        if self.address in need.unreached:
            return False
        return any(prefill.address not in self.unreached_by for prefill in prefills)

    @property
    def takes_prompts(self) -> bool:
        """Whether it may be given a prompt to compute now. A cached prefix counts as a shorter
        queue."""
        worth = RECOMPUTE_WEIGHT * self.matched_tokens if self.is_colocated else 0.0
        return self.pending_tokens < self.max_pending_tokens + worth

    def delay_s(self, need: Need, assumed_tokens_per_s: float) -> float:
        """Estimated seconds by which a prompt computed here delays itself and other sequences: its
        own queue, the tokens to compute, and a longer step for each sequence that decodes here."""
        num_missing = max(1, need.num_tokens - self.matched_tokens)
        speed = self.prefill_tokens_per_s or assumed_tokens_per_s
        num_steps = min(need.max_num_tokens - need.num_tokens, USUAL_OUTPUT_TOKENS)
        decode_s = self.num_sequences * num_steps * self.sequence_s
        return (self.pending_tokens + RECOMPUTE_WEIGHT * num_missing) / speed + decode_s

    @property
    def is_short(self) -> bool:
        """Whether so few blocks are available that sequences should move away."""
        return self.num_available_blocks < SHORT * self.num_blocks


@dataclass(frozen=True, slots=True)
class Plan:
    """Addresses of the workers to use; at least one is set.

    prefill: None if the decode worker computes the prompt.
    decode: None if nothing follows the first token; equal to `prefill` if a prefill worker runs the
    sequence.
    """

    prefill: str | None
    decode: str | None


class Verdict(enum.Enum):
    """Why there is no plan."""

    NOT_NOW = enum.auto()
    """A ready worker could serve it, but has no room now."""
    NO_WORKER = enum.auto()
    """No ready worker could ever serve it."""


def choose(
    need: Need,
    prefills: Sequence[PrefillView],
    decodes: Sequence[DecodeView],
    tie_key: bytes,
    slo: Slo = NO_SLO,
) -> Plan | Verdict:
    """Choose workers for one sequence. `tie_key` breaks ties, uniformly over many keys."""
    able_prefills = [p for p in prefills if p.max_model_len >= need.max_num_tokens]
    if able_prefills and not need.needs_decode:
        prefill = _best_prefill(need, able_prefills, tie_key)
        return Plan(prefill.address, None) if prefill else Verdict.NOT_NOW
    able_decodes = [d for d in decodes if d.fits(need)]
    if not able_decodes:
        return Verdict.NO_WORKER
    split = [d for d in able_decodes if not d.is_colocated]
    if not split:
        colocated = _best_colocated(need, able_decodes, tie_key)
        return Plan(None, colocated.address) if colocated else Verdict.NOT_NOW
    decode = _best_decode(need, split if able_prefills else [], able_prefills, tie_key)
    decode = decode or _best_decode(need, able_decodes, able_prefills, tie_key)
    is_here = decode is not None and (
        need.num_tokens <= decode.max_local_prefill_tokens
        or not decode.is_reached_by(need, able_prefills)
    )
    if decode is None or (is_here and not decode.takes_prompts):
        return Verdict.NOT_NOW
    reaching = [p for p in able_prefills if p.address not in decode.unreached_by]
    way = Way(None, decode.address, 0.0)
    if not is_here:
        way = choose_way([*_ways(need, able_decodes, reaching, decode)], slo)
    if way.prefill is None:
        return Plan(None, way.decode)
    prefill = _best_prefill(need, reaching, tie_key)
    return Plan(prefill.address, decode.address) if prefill else Verdict.NOT_NOW


def choose_prefill_to_stay(
    need: Need, prefills: Sequence[PrefillView], views: Sequence[DecodeView], tie_key: bytes
) -> Plan | None:
    """Choose a prefill worker that computes the prompt and decodes until a decode worker has room;
    None if none can now. views: the same workers as decode workers."""
    roomy = {v.address for v in views if v.fits(need) and v.has_room_to_stay(need)}
    prefill = _best_prefill(need, [p for p in prefills if p.address in roomy], tie_key)
    return Plan(prefill.address, prefill.address) if prefill else None


def choose_host_memory(
    need: Need, prefills: Sequence[PrefillView], decodes: Sequence[DecodeView], tie_key: bytes
) -> Plan | None:
    """Choose a decode worker that takes the prompt's KV in host memory until it has blocks, and a
    prefill worker; None if there are none now."""
    taking = [
        replace(view, num_available_blocks=view.num_available_blocks + view.num_host_blocks)
        for view in decodes
        if view.takes_in_host(need)
    ]
    able = [prefill for prefill in prefills if prefill.max_model_len >= need.max_num_tokens]
    decode = _best_decode(need, taking, able, tie_key)
    if decode is None or not decode.is_reached_by(need, able):
        return None
    reaching = [prefill for prefill in able if prefill.address not in decode.unreached_by]
    prefill = _best_prefill(need, reaching, tie_key)
    return Plan(prefill.address, decode.address) if prefill else None


def _ways(
    need: Need, decodes: Sequence[DecodeView], prefills: Sequence[PrefillView], home: DecodeView
) -> Iterator[Way]:
    """The soonest way of each kind. prefills: that can send KV to `home`; at least one."""
    # Speed of the fastest; before the first measurement, only the number of tokens counts.
    speed = (
        max(p.prefill_tokens_per_s for p in prefills)
        or max(d.prefill_tokens_per_s for d in decodes)
        or 1
    )
    others = speed
    if not need.avoid:
        roomy = [view for view in decodes if view.takes_prompts and view.has_room(need)]
        for is_colocated in (False, True):
            ttfts_s = [
                (view.ttft_s(need, speed * ASSUMED_SHARE), index)
                for index, view in enumerate(roomy)
                if view.is_colocated is is_colocated
            ]
            if ttfts_s:
                ttft_s, index = min(ttfts_s)
                others = roomy[index].prefill_tokens_per_s or others
                yield Way(None, roomy[index].address, ttft_s, is_colocated=is_colocated)
    apart_s = min(prefill.ttft_s(need, others) for prefill in prefills)
    yield Way(prefills[0].address, home.address, apart_s)


def _best_prefill(need: Need, views: Sequence[PrefillView], tie_key: bytes) -> PrefillView | None:
    # An empty queue takes any prompt; a non-empty one takes more while it is short. Cached tokens
    # count as a shorter queue: otherwise a busy tier sends each sequence to the first worker with
    # room, misses all caches, and stays busy recomputing.
    views = [
        view
        for view in views
        if not view.is_awaiting_report
        and view.outstanding_tokens < view.max_outstanding_tokens + view.worth_of_cache()
    ]
    views = [view for view in views if view.address not in need.avoid] or views

    def rank(view: PrefillView) -> tuple[float, float, bytes]:
        cost = view.outstanding_tokens + RECOMPUTE_WEIGHT * need.num_tokens - view.worth_of_cache()
        return cost, view.ahead_tokens, _tie(tie_key, view.address)

    return min(views, key=rank, default=None)


def _best_decode(
    need: Need, views: Sequence[DecodeView], prefills: Sequence[PrefillView], tie_key: bytes
) -> DecodeView | None:
    """prefills: workers that could compute the prompt."""
    views = [view for view in views if view.has_room(need)]
    views = [view for view in views if view.address not in need.avoid] or views
    if prefills:
        views = [
            view
            for view in views
            if need.num_tokens <= view.max_local_prefill_tokens
            or view.is_reached_by(need, prefills)
        ] or views
    else:
        views = [view for view in views if view.takes_prompts]

    def rank(view: DecodeView) -> tuple[float, bytes]:
        batch = view.num_sequences / view.max_num_seqs
        memory = 1.0 - view.num_available_blocks / view.num_blocks
        fill = max(batch, memory)
        matched = min(1.0, view.matched_tokens / need.num_tokens)
        cost = fill - matched * (MIN_AFFINITY + AFFINITY_SHARE * fill)
        return cost, _tie(tie_key, view.address)

    return min(views, key=rank, default=None)


def _best_colocated(need: Need, views: Sequence[DecodeView], tie_key: bytes) -> DecodeView | None:
    views = [view for view in views if view.takes_prompts and view.has_room(need)]
    views = [view for view in views if view.address not in need.avoid] or views
    assumed = max((view.prefill_tokens_per_s for view in views), default=0) or 1

    def rank(view: DecodeView) -> tuple[float, int, bytes]:
        return view.delay_s(need, assumed), view.num_sequences, _tie(tie_key, view.address)

    return min(views, key=rank, default=None)


def _tie(tie_key: bytes, address: str) -> bytes:
    return hashlib.blake2b(address.encode(), key=tie_key, digest_size=8).digest()


@dataclass(frozen=True, slots=True)
class Running:
    """A running sequence that may be moved, and its worker. key: index chosen by the caller."""

    key: int
    address: str
    rank: Rank
    num_tokens: int

    def num_blocks_at(self, worker: DecodeView) -> int:
        """Blocks that it takes at `worker`, including the next token."""
        return groups_of(worker.layout).num_held_blocks(self.num_tokens + 1)


@dataclass(frozen=True, slots=True)
class Transfer:
    """Move the sequence `key` to `address`."""

    key: int
    address: str


def rebalance(
    workers: Sequence[DecodeView], sequences: Sequence[Running], max_transfers: int
) -> list[Transfer]:
    """Return at most `max_transfers` moves, worst-ranked sequences first."""
    available = {w.address: w.num_available_blocks for w in workers}
    places = {w.address: w.max_num_seqs - w.num_sequences for w in workers}
    by_address = {w.address: w for w in workers}
    short = {w.address for w in workers if w.is_short}
    transfers: list[Transfer] = []
    for sequence in sorted(sequences, key=lambda s: s.rank, reverse=True):
        if len(transfers) == max_transfers:
            break
        owner = by_address.get(sequence.address)
        if owner is None or owner.address not in short:
            continue
        if available[owner.address] >= RELIEVED * owner.num_blocks:
            continue
        others = [w for w in workers if w.address not in short and places[w.address] > 0]
        target = _roomiest(sequence, others, available)
        if target is None:
            continue
        available[target.address] -= sequence.num_blocks_at(target)
        available[owner.address] += sequence.num_blocks_at(owner)
        places[target.address] -= 1
        transfers.append(Transfer(sequence.key, target.address))
    return transfers


def _roomiest(
    sequence: Running, workers: Sequence[DecodeView], available: dict[str, int]
) -> DecodeView | None:
    """The worker with the largest share of available blocks after the move, if that share is at
    least PLENTY."""

    def share_left(worker: DecodeView) -> float:
        return (available[worker.address] - sequence.num_blocks_at(worker)) / worker.num_blocks

    best = max(workers, key=lambda w: (share_left(w), w.address), default=None)
    return best if best is not None and share_left(best) >= PLENTY else None
